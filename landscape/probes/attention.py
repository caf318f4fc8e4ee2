"""Measure statistics of self-attention maps and of the diversity of tokens (Park et al. 2023, arXiv 2305.00729)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.discovery.attention import SINGLE
from landscape.discovery.layer import NOWHERE, AttentionCall, Grid, Layer
from landscape.headline import Headline
from landscape.layers import attention_maps, forward_hooks, layer_patterns, padding, selection
from landscape.layers import attention_statistics as metrics
from landscape.options import at_least, one_of
from landscape.probe import NotApplicable, Plan, Probe, Quantity, Values
from landscape.statistics.means import means_over_batches
from landscape.statistics.stored import unmeasured
from landscape.subject.subject import Subject

PER_HEAD = {  # quantity: (long name, units, bounds)
    "distance": ("attention distance", "pixels", ""),
    "entropy": ("entropy of the attention of a query", "nats", "positive"),
    "mutual_information": ("normalised mutual information of query and key", "1", "share"),
}
OVER_HEADS = "_over_heads"  # of a mean over heads, whose error over images is less than the mean of theirs
PER_LAYER = {
    **{f"{name}{OVER_HEADS}": (f"{words}, mean over heads", *of) for name, (words, *of) in PER_HEAD.items()},
    "head_cosine": ("cosine similarity of the attention of two heads", "1", ""),
    "head_feature_cosine": ("cosine similarity of the outputs of two heads, before their projection", "1", ""),
    "token_cosine": ("cosine similarity of two tokens", "1", ""),
    "depth_cosine": ("cosine similarity of a token with itself one self-attention earlier", "1", ""),
}


@dataclass(frozen=True)
class Attention(Probe):
    """Attention distance, entropy and normalised mutual information per head; cosines and singular values per layer.

    Tokens that are no positions (class token, padding) are removed from the maps and the rows renormalised; maps of
    windows count per window. The output of a head is its map times the values, all tokens among them, for the queries
    that are positions. Tokens are those of the residual stream after the self-attention, without prefix. Mutual
    information 0 means that all queries attend alike (attention collapse). Padding of sequences is left out. Singular
    values are those of each image's tokens (token, channel), for the first `spectra_images` of every mini-batch, and of
    each mini-batch's token means, or class tokens (`pool`): ln(sigma_k / sigma_0), which is then averaged. `centred`
    subtracts the mean token, or image, before: its values are half the logarithms of the eigenvalues of the covariance.
    One forward pass per mini-batch.
    """

    name: ClassVar[str] = "attention"
    logits: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ("batch_size",)
    smallest: ClassVar[Mapping[str, Any]] = {"spectra_images": 1}
    headlines: ClassVar[Sequence[Headline]] = tuple(
        Headline(f"{word} {depth}", f"{quantity}{OVER_HEADS}", {"layer": end})
        for quantity, word in (("distance", "distance"), ("mutual_information", "NMI"))
        for depth, end in (("shallowest", 0), ("deepest", -1))
    )

    layers: layer_patterns.LayerPatterns = ()
    spectra_images: Annotated[int, "images per mini-batch whose tokens' singular values are computed"] = 4

    pool: Annotated[
        Literal["mean", "cls"], "an image in the singular values: mean over tokens, or cls, its class token"
    ] = "mean"
    centred: Annotated[bool, "singular values after subtracting the mean token, or image, as of a covariance"] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))
        at_least("spectra_images", self.spectra_images, 0)
        one_of("pool", self.pool, ("mean", "cls"))

    def plan(self, subject: Subject) -> Plan:
        layers = attention_layers(subject, self.layers)
        if self.pool == "cls":
            selection.require_class_token(layers)
        shape = self._shape(subject)
        per_head, per_layer = ("layer", "head"), ("layer",)
        token, image = ("layer", "token_rank"), ("layer", "image_rank")
        sums, means = {}, {}
        for name, (long_name, units, bounds) in {**PER_HEAD, **PER_LAYER}.items():
            dims = per_head if name in PER_HEAD else per_layer
            sums[f"{name}_sum"] = Quantity(f"sum over images: {long_name}", units, dims)
            sums[f"{name}_square_sum"] = Quantity(f"sum of squares over images: {long_name}", f"{units}^2", dims)
            means[name] = Quantity(long_name, units, dims, bounds=bounds, error="images")
        rows, columns = np.array([layer.attention.grid for layer in layers if layer.attention]).T
        attending = "rows of the grid, or of its windows, that attend; 0: unknown"
        return Plan(
            over=forward_hooks.units_of(subject),
            axes={
                "layer": np.arange(len(layers)), "head": np.arange(shape["heads"]),
                "token_rank": np.arange(shape["tokens"]), "image_rank": np.arange(shape["images"]),
            },
            labels={
                **selection.layer_labels(layers, "layer"),
                "rows": (Quantity(attending, dims=per_layer), rows),
                "columns": (Quantity("columns of it", dims=per_layer), columns),
            },
            quantities={
                "samples": Quantity("images in the mini-batch"),
                **sums,
                "token_samples": Quantity("images whose tokens got their singular values"),
                "token_singular_value_sum": Quantity("sum over these images of ln(sigma / largest)", "nats", token),
                "batch_singular_value": Quantity("ln(sigma / largest) of the images of the mini-batch", "nats", image),
            },
            summaries={
                **means,
                "token_singular_value": Quantity("ln(sigma / largest) of an image's tokens", "nats", token),
                "image_singular_value": Quantity("ln(sigma / largest) of a mini-batch's images", "nats", image),
            },
            facts=unmeasured(_missing(layers)),
            about={
                "layer": Quantity("self-attention"), "token_rank": Quantity("rank"), "image_rank": Quantity("rank"),
            },
        )  # fmt: skip

    def hooks(self, subject: Subject, index: tuple[int, ...]) -> forward_hooks.FeatureHooks:
        i = index[0]
        layers, shape = attention_layers(subject, self.layers), self._shape(subject)
        size, n, counted = selection.image_size(subject.batches[i][0]), len(layers), padding.Counted(subject, i)

        def empty(*sizes: int) -> Tensor:
            return torch.full(sizes, torch.nan, dtype=torch.float64, device=subject.device)

        head_sums = {name: empty(2, n, shape["heads"]) for name in PER_HEAD}
        layer_sums = {name: empty(2, n) for name in PER_LAYER}
        spectra = {name: np.full((n, shape[f"{name}s"]), np.nan) for name in ("token", "image")}
        matrices: dict[str, Tensor] = {}  # by kind and position
        previous: dict[str, Tensor] = {}  # the tokens after the previous self-attention

        def on_attention(position: int, maps: attention_maps.AttentionMaps) -> None:
            layer = layers[position]
            side = size or layer.grid  # without images in tokens
            statistics = _statistics(layer, maps, subject.samples(i), side, counted.of(layer))
            layer_sums["head_cosine"][:, position] = _sums(statistics.pop("head_cosine"))
            for name, values in statistics.items():
                head_sums[name][:, position, : values.shape[1]] = _sums(values)
                layer_sums[f"{name}{OVER_HEADS}"][:, position] = _sums(values.mean(dim=1))

        def on_heads(position: int, outputs: Tensor) -> None:
            alike = _likeness(layers[position], outputs.detach(), subject.samples(i), counted.of(layers[position]))
            layer_sums["head_feature_cosine"][:, position] = _sums(alike)

        def on_features(position: int, tensor: Tensor) -> None:
            layer = layers[position]
            if not layer.spatial:
                return
            tokens = layer.maps(tensor).flatten(2).transpose(1, 2)  # (image, token, channel)
            layer_sums["token_cosine"][:, position] = _sums(metrics.token_cosine(tokens))
            last = previous.pop("tokens", None)
            if last is not None and last.shape == tokens.shape:
                layer_sums["depth_cosine"][:, position] = _sums(metrics.depth_cosine(tokens, last))
            previous["tokens"] = tokens.clone()  # the network may work in place
            if self.spectra_images:
                matrices[f"token {position}"] = self._centred(tokens[: self.spectra_images])
            images = tensor[:, 0] if self.pool == "cls" else tokens.mean(dim=1, dtype=torch.float64)
            matrices[f"image {position}"] = self._centred(images)

        def values() -> Values:
            arrays = forward_hooks.transferred({**head_sums, **layer_sums, **matrices})
            for key in matrices:  # on the host: a GPU takes one matrix after the other, and waits for each
                ranks, (kind, position) = metrics.singular_values(torch.from_numpy(arrays.pop(key))), key.split()
                spectra[kind][int(position), : ranks.shape[-1]] = ranks.sum(dim=0) if ranks.dim() > 1 else ranks
            return {
                "samples": subject.samples(i),
                **{f"{name}_sum": value[0] for name, value in arrays.items()},
                **{f"{name}_square_sum": value[1] for name, value in arrays.items()},
                "token_samples": min(self.spectra_images, subject.samples(i)),
                "token_singular_value_sum": spectra["token"],
                "batch_singular_value": spectra["image"],
            }

        return forward_hooks.FeatureHooks(layers, on_features, values, on_attention, on_heads)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over finished images with standard errors; singular values of images: means over full mini-batches.

        Of members the means over all of them.
        """
        done = data["done"] == 1
        count, sums = data["token_samples"][done].sum(), data["token_singular_value_sum"]
        tokens = sums[done].sum(axis=0) / count if count else np.nan
        full = done & (data["samples"] == np.max(data["samples"][done], initial=0.0))  # a smaller one has other ranks
        images = data["batch_singular_value"][full]
        return {
            **means_over_batches(data, (*PER_HEAD, *PER_LAYER)),
            "token_singular_value": np.broadcast_to(tokens, sums.shape[done.ndim :]),
            "image_singular_value": images.mean(axis=0) if len(images) else np.full(images.shape[1:], np.nan),
        }

    def _centred(self, matrices: Tensor) -> Tensor:
        """Matrices (..., sample, channel), float64, whose singular values are stored."""
        centre = matrices.mean(dim=-2, keepdim=True, dtype=torch.float64) if self.centred else 0.0
        return matrices.double() - centre

    def _shape(self, subject: Subject) -> dict[str, int]:
        """Lengths of the padded axes."""
        layers = attention_layers(subject, self.layers)
        return {
            "heads": max(layer.attention.heads for layer in layers if layer.attention) or 1,
            "tokens": max(min(layer.grid[0] * layer.grid[1], layer.channels) for layer in layers) or 1,
            "images": min(subject.samples(0), max(layer.channels for layer in layers)),
        }


def attention_layers(subject: Subject, patterns: tuple[str, ...]) -> list[Layer]:
    """The layers whose branch contains self-attention. Raises NotApplicable: there is none."""
    layers = [layer for layer in selection.layers_of(subject, patterns) if layer.attention is not None]
    if not layers:
        raise NotApplicable(
            "no self-attention was found in this network; if it has any, name its modules, for example "
            "--layers 'attn:msa'"
        )
    return layers


def _missing(layers: Sequence[Layer]) -> Iterator[tuple[str, str, str]]:
    """Quantities that layers do not have: the quantity, the layer's name, and why."""
    before: tuple[Grid, int] | None = None
    for layer in layers:
        missing = dict(_missing_of_heads(layer.attention)) if layer.attention else {}
        tokens = layer.grid, layer.channels
        if not layer.spatial:
            of_tokens = "token_cosine", "token_singular_value", "image_singular_value", "depth_cosine"
            missing |= dict.fromkeys(of_tokens, "the positions of its tokens are unknown")
        else:
            if math.prod(layer.grid) == 1:
                missing["token_cosine"] = "it has one token"
            if tokens != before:
                missing["depth_cosine"] = "no self-attention before it has tokens of its number and width"
            before = tokens
        yield from ((name, layer.name, why) for name, why in missing.items())


def _missing_of_heads(attention: AttentionCall) -> Iterator[tuple[str, str]]:
    """Quantities of maps that an attention does not have, and why."""
    if not attention.heads:
        lacking = (name for name in (*PER_HEAD, *PER_LAYER) if name in PER_HEAD or "head" in name)
        yield from dict.fromkeys(lacking, attention.reason).items()
        return
    if attention.grid == (0, 0) and attention.windows is None:
        yield from dict.fromkeys(("distance", f"distance{OVER_HEADS}"), attention.reason).items()
    queries = attention.windows.queries if attention.windows else ()
    if attention.reason == SINGLE or (queries and all(len(places) - places.count(NOWHERE) < 2 for places in queries)):
        reason = "a window has one query" if queries else attention.reason
        yield from dict.fromkeys(("mutual_information", f"mutual_information{OVER_HEADS}"), reason).items()
    if attention.heads == 1:
        yield from dict.fromkeys(("head_cosine", "head_feature_cosine"), "it has one head").items()
    elif attention.outputs is None:
        yield "head_feature_cosine", "no product of its attention maps with the values was found"


def _statistics(
    layer: Layer, maps: attention_maps.AttentionMaps, images: int, size: tuple[int, int], counted: Tensor | None
) -> dict[str, Tensor]:
    """Distance, entropy and mutual information per image and head, and the heads' cosine per image."""
    assert layer.attention is not None
    windows = maps.rows // images
    step = max(1, maps.size // (maps.row_size * windows))  # images at a time, within the memory of the queries
    step = 1 if counted is not None else step
    down, across = (pixels / n if n else 1.0 for pixels, n in zip(size, layer.grid, strict=True))
    kinds = metrics.kinds_of(layer.attention, (down, across), maps.device)
    parts: dict[str, list[Tensor]] = {name: [] for name in (*PER_HEAD, "head_cosine")}
    for first in range(0, images, step):
        chunk = maps.chunk(slice(first * windows, (first + step) * windows))
        several = chunk.reshape(-1, windows, *chunk.shape[1:])  # (image, window, head, query, key)
        found = [_of_kind(several, kind, None if counted is None else counted[first]) for kind in kinds]
        for name, values in parts.items():
            values.append(_mean_of_windows([one[name] for one in found], kinds))
    return {name: torch.cat(values) for name, values in parts.items()}


def _likeness(layer: Layer, outputs: Tensor, images: int, counted: Tensor | None) -> Tensor:
    """Cosine similarity of the outputs (row, head, query, channel) of two heads, per image."""
    assert layer.attention is not None
    several, found = outputs.reshape(images, -1, *outputs.shape[1:]), []  # (image, window, ...)
    kinds = metrics.kinds_of(layer.attention, (1.0, 1.0), outputs.device)
    for kind in kinds:
        parts = padding.rows_of_tokens(several[:, kind.windows].flatten(0, 1)[:, :, kind.queries], counted)
        found.append(torch.cat([metrics.head_feature_cosine(part) for part in parts]).reshape(images, -1))
    return _mean_of_windows(found, kinds)


def _of_kind(maps: Tensor, kind: metrics.Kind, counted: Tensor | None) -> dict[str, Tensor]:
    """The statistics in the windows of one kind, (image, window, head), those of all heads together (image, window)."""
    chosen = maps[:, kind.windows]
    rows = padding.between_tokens(metrics.between(chosen.flatten(0, 1), kind.queries, kind.keys), counted)
    entropy = metrics.entropy(rows)
    unknown = torch.full_like(entropy, torch.nan)
    found = {
        "distance": unknown if kind.distance is None else metrics.mean_distance(rows, kind.distance),
        "entropy": entropy,
        "mutual_information": metrics.mutual_information(rows, entropy),
        "head_cosine": metrics.head_cosine(rows),
    }
    return {name: values.reshape(*chosen.shape[:2], *values.shape[1:]) for name, values in found.items()}


def _mean_of_windows(values: Sequence[Tensor], kinds: Sequence[metrics.Kind]) -> Tensor:
    """Mean over queries of values (image, window, ...) of each kind: windows with padding have fewer of them."""
    if len(kinds) == 1:
        return values[0].mean(dim=1)
    weights = [
        torch.full_like(value, kind.count).where(~value.isnan(), 0.0) for value, kind in zip(values, kinds, strict=True)
    ]
    total = torch.cat([value.nan_to_num() * weight for value, weight in zip(values, weights, strict=True)], dim=1)
    return total.sum(dim=1) / torch.cat(weights, dim=1).sum(dim=1)


def _sums(values: Tensor) -> Tensor:
    """Sum over images, and sum of squares."""
    return torch.stack([values.sum(dim=0), values.square().sum(dim=0)])
