"""Store where chosen positions attend, layer by layer, for pictures (Park et al. 2023, arXiv 2305.00729, Fig. 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.discovery.layer import NOWHERE, Layer
from landscape.headline import Headline
from landscape.layers import attention_maps, layer_patterns, selection
from landscape.layers import attention_statistics as statistics
from landscape.layers.forward_hooks import FeatureHooks
from landscape.options import at_least, parse_numbers, require
from landscape.probe import NotApplicable, Plan, Probe, Quantity, Unit, Values
from landscape.probes.attention import attention_layers
from landscape.subject import pixels, sample_statistics
from landscape.subject.loading.identity import protocol
from landscape.subject.subject import Subject


@dataclass(frozen=True)
class AttentionPictures(Probe):
    """The attention of some query positions to all others, mean over heads, for the first images.

    Prefix tokens are removed and the rows renormalised, as in `attention`. Self-attentions within windows are left out:
    their keys are not those of the whole image. One forward pass over the mini-batches that hold the images.
    """

    name: ClassVar[str] = "attention-maps"
    logits: ClassVar[bool] = False
    smallest: ClassVar[Mapping[str, Any]] = {"images": 2}
    headlines: ClassVar[Sequence[Headline]] = tuple(
        Headline(name, "attention", {"row column": "largest", "image query": "mean", "layer": layer})
        for name, layer in (("largest weight first", 0), ("last", -1))
    )

    layers: layer_patterns.LayerPatterns = ()
    images: Annotated[int, "number of images, the first of the data"] = 4
    queries: Annotated[str, "ROW,COLUMN of each query as shares of the image, one after the other"] = "0.5,0.5,0.2,0.2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))
        at_least("images", self.images, 1)
        numbers = parse_numbers("queries", self.queries)
        inside = len(numbers) % 2 == 0 and all(0 <= value <= 1 for value in numbers)
        require(inside, "queries", self.queries, "pairs of shares from 0 to 1, such as 0.5,0.5 for the centre")

    def plan(self, subject: Subject) -> Plan:
        layers, places = self._layers(subject), self._places
        inputs = pixels.first_inputs(subject, self.images)
        rows, columns = (max(layer.grid[axis] for layer in layers) for axis in (0, 1))
        per_query = ("query", "coordinate")
        return Plan(
            over={"image": np.arange(self.images)},
            axes={
                "layer": np.arange(len(layers)), "query": np.arange(len(places)), "coordinate": np.arange(2),
                "row": np.arange(rows), "column": np.arange(columns), "channel": np.arange(3),
                "pixel_row": np.arange(inputs.shape[-2]), "pixel_column": np.arange(inputs.shape[-1]),
            },
            labels={
                **selection.layer_labels(layers, "layer"),
                "place": (Quantity("row and column of the query, as shares of the image", dims=per_query), places),
                "picture": (
                    Quantity("image", dims=("image", "channel", "pixel_row", "pixel_column")),
                    pixels.colours(subject, inputs),
                ),
            },
            quantities={
                "attention": Quantity("attention of a query, mean over heads", dims=("layer", "query", "row", "column"))
            },
            about={"layer": Quantity("self-attention")},
            facts={"protocol": protocol(subject, samples=self.images)},
        )  # fmt: skip

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Images of one mini-batch share its forward pass."""
        starts = [sample_statistics.first_row(subject, i) for i in range(len(subject.batches))]
        shown = -1
        for unit in units:
            (image,) = unit.index
            batch = int(np.searchsorted(starts, image, side="right")) - 1
            if batch != shown:
                maps, shown = self._of_batch(subject, batch), batch
            yield {"attention": maps[image - starts[batch]]}

    def _of_batch(self, subject: Subject, batch: int) -> np.ndarray:
        """The attention of the wanted queries of every image of a mini-batch, (image, layer, query, row, column)."""
        layers, samples = self._layers(subject), subject.samples(batch)
        rows, columns = (max(layer.grid[axis] for layer in layers) for axis in (0, 1))
        found = np.full((samples, len(layers), len(self._places), rows, columns), np.nan)

        def on_attention(position: int, maps: attention_maps.AttentionMaps) -> None:
            layer = layers[position]
            assert layer.attention is not None
            (kind,), (height, width) = statistics.kinds_of(layer.attention, (1.0, 1.0), maps.device), layer.grid
            for image in range(min(samples, self.images)):
                some = self._attended(layer, kind, maps.chunk(slice(image, image + 1)))
                found[image, position, :, :height, :width] = some.double().cpu().numpy()

        FeatureHooks(layers, on_attention=on_attention).run(subject, (batch,))
        return found

    def _attended(self, layer: Layer, kind: statistics.Kind, maps: Tensor) -> Tensor:
        """Mean over heads of the rows of the wanted queries of one image, (query, H, W)."""
        assert layer.attention is not None
        height, width = layer.grid
        kept = statistics.between(maps, kind.queries, kind.keys)[0].mean(dim=0)
        at = [(min(int(y * height), height - 1), min(int(x * width), width - 1)) for y, x in self._places.tolist()]
        if layer.attention.windows is not None:
            places = [place for place in layer.attention.windows.queries[0] if place != NOWHERE]
            order = sorted(range(len(places)), key=places.__getitem__)
            kept = kept[order][:, order]
        return torch.stack([kept[y * width + x].view(height, width) for y, x in at])

    @property
    def _places(self) -> np.ndarray:
        return np.array(parse_numbers("queries", self.queries)).reshape(-1, 2)

    def _layers(self, subject: Subject) -> list[Layer]:
        """The self-attentions over all positions of the image. Raises NotApplicable: there is none."""
        found = attention_layers(subject, self.layers)
        whole = [layer for layer in found if layer.spatial and layer.attention and layer.attention.covers(layer.grid)]
        if not whole:
            raise NotApplicable(
                f"none of the {len(found)} self-attentions covers the whole image, which attention-maps draws; "
                "measure this network with attention"
            )
        return whole
