"""Measure the variance of feature maps over positions, per layer (Park & Kim 2022, Fig. 9)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.headline import Headline
from landscape.layers import layer_patterns, selection
from landscape.layers.forward_hooks import FeatureHooks, MapPart, units_of
from landscape.probe import Plan, Probe, Quantity, Values
from landscape.statistics.means import MEMBER_ERROR, error_over_members, means_over_batches
from landscape.statistics.stored import unmeasured
from landscape.subject.subject import Subject


@dataclass(frozen=True)
class Variance(Probe):
    """Unbiased variance over the H x W positions per image and channel, averaged over channels and images.

    Expected to fall where self-attention averages and to rise at convolutions and MLPs. The normalised form divides
    by the mean square of the map and so does not depend on its scale.
    """

    name: ClassVar[str] = "variance"
    logits: ClassVar[bool] = False
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("shallowest", "variance", {"layer": "first"}),
        Headline("deepest", "variance", {"layer": "last"}),
    )

    layers: layer_patterns.LayerPatterns = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))

    def plan(self, subject: Subject) -> Plan:
        layers = selection.spatial_layers(subject, self.layers)
        per_layer = ("layer",)
        member_error = {"variance_member_se": Quantity(MEMBER_ERROR, "feature^2", per_layer, over="member")}
        return Plan(
            over=units_of(subject),
            axes={"layer": np.arange(len(layers))},
            labels=selection.layer_labels(layers, "layer"),
            quantities={
                "samples": Quantity("images in the mini-batch"),
                "variance_sum": Quantity("sum over images of the variance", "feature^2", per_layer),
                "variance_square_sum": Quantity("sum over images of its square", "feature^4", per_layer),
                "square_sum": Quantity("sum over images of the mean square", "feature^2", per_layer),
            },
            summaries={
                "variance": Quantity("feature-map variance", "feature^2", per_layer, bounds="positive", error="images"),
                "variance_normalised": Quantity("feature-map variance over mean square", dims=per_layer),
                **(member_error if subject.members else {}),
            },
            facts=unmeasured(
                (name, layer.name, "its map has one position")
                for name in ("variance", "variance_normalised")
                for layer in layers
                if layer.grid == (1, 1)
            ),
        )

    def hooks(self, subject: Subject, index: tuple[int, ...]) -> FeatureHooks:
        i = index[0]
        layers = selection.spatial_layers(subject, self.layers)
        samples = subject.samples(i)
        sums = torch.full((3, len(layers)), torch.nan, dtype=torch.float64, device=subject.device)

        found: dict[int, list[Tensor]] = {p: [] for p, layer in enumerate(layers) if layer.grid != (1, 1)}

        def on_maps(position: int, part: MapPart) -> None:
            found[position].append(_moments(part))

        def values() -> Values:
            for position, parts in found.items():
                variance, square = torch.cat(parts, dim=1)
                sums[:, position] = torch.stack([variance.sum(), variance.square().sum(), square.sum()])
            total, squares, power = sums.cpu().numpy()
            return {"samples": samples, "variance_sum": total, "variance_square_sum": squares, "square_sum": power}

        return FeatureHooks(layers, values=values, on_maps=on_maps, in_parts=found.keys())

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        members = {"variance_member_se": error_over_members(data, "variance_sum")} if data["done"].ndim > 1 else {}
        power = data["square_sum"][data["done"] == 1].sum(axis=0)
        total = data["variance_sum"][data["done"] == 1].sum(axis=0)
        normalised = np.divide(total, power, out=np.full_like(total, np.nan), where=power > 0)
        zero = (("variance_normalised", name, "its map is zero") for name in data["name"][power == 0])
        found = means_over_batches(data, ("variance",)) | {"variance_normalised": normalised}
        return found | members | unmeasured(zero)


def _moments(part: MapPart) -> Tensor:
    """Variance over positions and mean square, means over channels, (2, N) float64."""
    positions = part.maps.shape[2:].numel()
    spread = part.spread.mean(dim=1)
    return torch.stack([spread / (positions - 1), spread / positions + part.level.double().square().mean(dim=1)])
