"""Measure the uncertainty of feature maps per layer, and how far their points agree (Park & Kim 2022, "Blurs")."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.discovery.layer import Layer
from landscape.headline import Headline
from landscape.layers import forward_hooks, layer_patterns, selection
from landscape.options import at_least
from landscape.probe import Plan, Probe, Quantity, Unit, Values, derived_seed
from landscape.statistics.means import means_over_batches
from landscape.statistics.stored import unmeasured
from landscape.subject.members import unpositioned, with_inputs
from landscape.subject.subject import Subject

INPUTS = {"gaussian": "i.i.d. Gaussian input", "data": "the data"}
TERMS = ("sum", "square_sum", "cross_sum")  # of products with the centre: their sum, that of squares, with its own
KEYS = tuple(f"{what}_{term}" for what in ("covariance", "neighbours") for term in TERMS)


@dataclass(frozen=True)
class Uncertainty(Probe):
    """Model uncertainty, data uncertainty and spatial covariance of the feature maps.

    Model uncertainty is the standard deviation over the members of `--mc-dropout` at a point, data uncertainty that
    over the points of a map within one pass; both are averaged over channels and images. The covariance of every point
    with the centre of its map is over images, summed over channels and divided by the centre's variance, for i.i.d.
    Gaussian input and for the data, in one pass. Costs a forward pass per member and one more.
    """

    name: ClassVar[str] = "uncertainty"
    logits: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "seed")  # means over a mini-batch; the Gaussian input
    smallest: ClassVar[Mapping[str, Any]] = {"reach": 1}
    headlines: ClassVar[Sequence[Headline]] = tuple(
        headline
        for name in ("model", "data")
        for headline in (
            Headline(f"{name} uncertainty after / before smoothing", f"{name}_smoothing"),
            Headline(f"{name} shallowest", f"{name}_uncertainty", {"layer": "first"}),
            Headline(f"{name} deepest", f"{name}_uncertainty", {"layer": "last"}),
        )
    )

    layers: layer_patterns.LayerPatterns = ()
    reach: Annotated[int, "positions on every side of the centre whose covariance with it is stored"] = 7

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))
        at_least("reach", self.reach, 1)

    def plan(self, subject: Subject) -> Plan:
        layers = self._layers(subject)
        if selection.image_size(unpositioned(subject.example()[0])) is None:
            raise ValueError("no input of this model is an image (N, C, H, W), which uncertainty replaces by noise")
        offsets, per_layer, window = np.arange(-self.reach, self.reach + 1), ("layer",), ("layer", "row", "column")
        names = {"data": "standard deviation over points", "rms": "root mean square"}
        if subject.members > 1:
            names["model"] = "standard deviation over members"
        quantities = {"samples": Quantity("images in the mini-batch")}
        summaries = {}
        for name, words in names.items():
            quantities[f"{name}_sum"] = Quantity(f"sum over images of the {words}", "feature", per_layer)
            quantities[f"{name}_square_sum"] = Quantity("sum over images of its square", "feature^2", per_layer)
            long_name = words if name == "rms" else f"{name} uncertainty"
            summary = f"{name}_uncertainty" if name != "rms" else name
            summaries[summary] = Quantity(long_name, "feature", per_layer, error="images")
        if any(layer.kind == "smoothing" for layer in layers):
            for name in names.keys() - {"rms"}:
                summaries[f"{name}_smoothing"] = Quantity(f"{name} uncertainty after / before smoothing blocks, mean")
        for name, words in INPUTS.items():
            for what, dims in (("covariance", window), ("neighbours", per_layer)):
                for term in TERMS:
                    quantities[f"{name}_{what}_{term}"] = Quantity(
                        f"{term} of products with the centre, {words}", dims=dims
                    )
                other = "the centre" if what == "covariance" else "its four neighbours"
                long_name = f"covariance with {other}, {words}, over the centre's variance"
                summaries[f"{name}_{what}"] = Quantity(long_name, dims=dims, error="images")
        return Plan(
            over={"batch": np.arange(len(subject.batches))},
            axes={"layer": np.arange(len(layers)), "row": offsets, "column": offsets},
            labels=selection.layer_labels(layers, "layer"),
            quantities=quantities,
            summaries=summaries,
            about={
                "row": Quantity("rows from the centre of the map"),
                "column": Quantity("columns from the centre of the map"),
            },
            facts={"members": subject.members},
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (i,) = unit.index
        layers = self._layers(subject)
        spreads = [_Spread(subject.members > 1) for _ in layers]
        found: dict[str, dict[int, Tensor]] = {name: {} for name in INPUTS}
        inputs, _ = subject.batch(i)

        def on_noise(position: int, tensor: Tensor) -> None:
            found["gaussian"][position] = _products(layers[position].maps(tensor), self.reach)

        for member in range(max(subject.members, 1)):
            index = (i, member) if subject.members else (i,)

            def on_features(position: int, tensor: Tensor, first: bool = member == 0) -> None:
                maps = layers[position].maps(tensor)
                spreads[position].add(maps)
                if first:
                    found["data"][position] = _products(maps, self.reach)

            forward_hooks.FeatureHooks(layers, on_features).run(subject, index)
            if member == 0:
                noise = with_inputs(inputs, _gaussian(unpositioned(inputs), subject.seed, i))
                forward_hooks.FeatureHooks(layers, on_noise).run(subject, index, noise)
        values: dict[str, Any] = {"samples": subject.samples(i)}
        per_image = [spread.per_image() for spread in spreads]
        for name in per_image[0]:
            numbers = torch.stack([spread[name] for spread in per_image]).cpu().numpy()  # (layer, image)
            values |= {f"{name}_sum": numbers.sum(axis=1), f"{name}_square_sum": np.square(numbers).sum(axis=1)}
        for name, products in found.items():
            sums = _sums(torch.stack([products[position] for position in range(len(layers))]), self.reach)
            values |= {f"{name}_{key}": terms.cpu().numpy() for key, terms in sums.items()}
        return values

    def _layers(self, subject: Subject) -> list[Layer]:
        layers = [layer for layer in selection.spatial_layers(subject, self.layers) if layer.grid != (1, 1)]
        if not layers:
            raise ValueError("every map of this model is a single position, which has no spread; give larger images")
        return layers

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over all finished images, ratios of sums, and their standard errors (of a ratio, to first order)."""
        found: dict[str, np.ndarray] = {}
        for name, summary in (("model", "model_uncertainty"), ("data", "data_uncertainty"), ("rms", "rms")):
            if f"{name}_sum" in data:
                found[summary], found[f"{summary}_se"] = means_over_batches(data, (name,)).values()
        at = np.flatnonzero(data["kind"] == "smoothing")
        for name in ("model", "data") if len(at) else ():
            if (values := found.get(f"{name}_uncertainty")) is not None:
                found[f"{name}_smoothing"] = (values[at] / values[at - 1]).mean()
        done, still = data["done"] == 1, []
        n = data["samples"][done].sum()
        for name in INPUTS:
            sums = {key: data[f"{name}_{key}"][done].sum(axis=0) for key in KEYS}
            own, own_square = (sums[f"covariance_{term}"][:, self.reach, self.reach] for term in TERMS[:2])
            for what in ("covariance", "neighbours"):
                total, square, cross = (sums[f"{what}_{term}"] for term in TERMS)
                shape = (-1,) + (1,) * (total.ndim - 1)
                variance, variance_square = own.reshape(shape), own_square.reshape(shape)
                with np.errstate(all="ignore"):
                    ratio = total / variance
                    residual = np.clip(square - 2 * ratio * cross + ratio**2 * variance_square, 0.0, None)
                    error = np.sqrt(residual * n / (n - 1)) / variance
                found[f"{name}_{what}"] = np.where(variance > 0, ratio, np.nan)
                found[f"{name}_{what}_se"] = np.where(variance > 0, error, np.nan)
                still += [
                    (f"{name}_{what}", layer, "the centre of its map is zero") for layer in data["name"][own == 0]
                ]
        return found | unmeasured(still)


class _Spread:
    """Running sums over members of the maps of one layer, (N, C, H, W) each."""

    def __init__(self, several: bool) -> None:
        self._several, self.members = several, 0

    def add(self, maps: Tensor) -> None:
        points, rms = torch.cat([_over_points(part) for part in forward_hooks.map_parts(maps)], dim=1)
        if not self.members:
            self.points, self.rms = points, rms
            if self._several:  # differences from the first member lose no digits
                self.first, self.total, self.squares = maps.clone(), torch.zeros_like(maps), torch.zeros_like(maps)
        else:
            difference = maps - self.first
            self.total += difference
            self.squares.addcmul_(difference, difference)
            self.points, self.rms = self.points + points, self.rms + rms
        self.members += 1

    def per_image(self) -> dict[str, Tensor]:
        """Data uncertainty, root mean square and, of several members, model uncertainty of every image, (N,)."""
        m = self.members
        found = {"data": self.points / m, "rms": self.rms / m}
        if m > 1:
            variance = (self.squares - self.total.square() / m).clamp_min(0.0) / (m - 1)
            found["model"] = variance.sqrt().mean(dim=(1, 2, 3), dtype=torch.float64)
        return found


def _over_points(part: forward_hooks.MapPart) -> Tensor:
    """Standard deviation over points, mean over channels, and root mean square of every image, (2, N) float64."""
    positions = part.maps.shape[2:].numel()
    square = part.spread / positions + part.level.double().square()
    return torch.stack([(part.spread / (positions - 1)).sqrt().mean(dim=1), square.mean(dim=1).sqrt()])


def _products(maps: Tensor, reach: int) -> Tensor:
    """Products of the points around the centre with it, centred over images, channels' mean, (N, row, column) float64.

    Unbiased: products of deviations from the mini-batch's mean times n / (n - 1); NaN outside of the map.
    """
    n, side = len(maps), 2 * reach + 1
    row, column = maps.shape[2] // 2, maps.shape[3] // 2
    top, left = max(row - reach, 0), max(column - reach, 0)
    window = maps[:, :, top : row + reach + 1, left : column + reach + 1]
    above, before = reach - (row - top), reach - (column - left)
    points = window.double().flatten(2)  # (N, C, position)
    # Of tokens in the order of the memory; on a CPU the products take a quarter of the time that einsum takes.
    mean = points.mT.mean(dim=0).mT if points.stride(1) == 1 else points.mean(dim=0)
    at = (row - top) * window.shape[3] + column - left
    centre = points[:, :, at] - mean[:, at]
    products = ((centre[:, None] @ points)[:, 0] - centre @ mean) * (n / max(n - 1, 1) / maps.shape[1])
    rest = (before, side - before - window.shape[3], above, side - above - window.shape[2])
    return F.pad(products.view(n, *window.shape[2:]), rest, value=torch.nan)


def _sums(products: Tensor, reach: int) -> dict[str, Tensor]:
    """Sums over images of the products of every layer, (layer, N, row, column), and of those of the neighbours."""
    own = products[:, :, reach, reach]
    neighbours = [products[:, :, reach + i, reach + j] for i, j in ((-1, 0), (1, 0), (0, -1), (0, 1))]
    found = {}
    for name, terms in (("covariance", products), ("neighbours", torch.stack(neighbours).nanmean(dim=0))):
        with_own = own.reshape(*own.shape, *(1,) * (terms.ndim - 2))
        for term, values in zip(TERMS, (terms, terms.square(), terms * with_own), strict=True):
            found[f"{name}_{term}"] = values.sum(dim=1)
    return found


def _gaussian(images: Tensor, seed: int, i: int) -> Tensor:
    """Standard normal numbers of the shape of mini-batch i, the same on every device."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "gaussian", i))
    return torch.randn(images.shape, generator=generator).to(images)
