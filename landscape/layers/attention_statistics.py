"""Statistics of attention maps and tokens: distance, entropy, mutual information, cosines, singular values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from landscape.discovery.layer import NOWHERE, AttentionCall, Layer
from landscape.layers.forward_hooks import feature_hooks
from landscape.layers.selection import spatial_layers
from landscape.probe import NotApplicable, Values
from landscape.subject import pixels, weights_cache
from landscape.subject.subject import Subject

FLOOR = torch.finfo(torch.float64).eps  # of singular values, relative to the largest


def distances(grid: tuple[int, int], spacing: tuple[float, float], device: torch.device) -> Tensor:
    """Distance between every two positions of a grid, (token, token) float64, in units of the spacing."""
    sides = (torch.arange(n, dtype=torch.float64, device=device) * d for n, d in zip(grid, spacing, strict=True))
    places = torch.cartesian_prod(*sides)
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True)
class Kind:
    """The windows of one kind, and which of their queries and keys are positions."""

    windows: slice | list[int]  # of the windows of an image
    queries: slice | list[int]
    keys: slice | list[int]
    count: int  # of these queries; 1 where it is unknown, and the same for all windows
    distance: Tensor | None  # from query to key, in pixels; None if unknown


def kinds_of(attention: AttentionCall, spacing: tuple[float, float], device: torch.device) -> list[Kind]:
    """The kinds of windows of an attention; `spacing`: pixels between neighbours, where positions were not followed."""
    if attention.windows is None:
        known = attention.grid != (0, 0)
        distance = distances(attention.grid, spacing, device) if known else None
        return [Kind(slice(None), slice(attention.prefix, None), slice(attention.prefix, None), 1, distance)]
    kinds = []
    for kind, sides in enumerate(zip(attention.windows.queries, attention.windows.keys, strict=True)):
        of_kind = [window for window, own in enumerate(attention.windows.kinds) if own == kind]
        inside = [[i for i, place in enumerate(places) if place != NOWHERE] for places in sides]
        if inside[0] and inside[1]:
            rows, columns = (
                torch.tensor([places[i] for i in own], dtype=torch.float64, device=device)
                for places, own in zip(sides, inside, strict=True)
            )
            distance = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist")
            several = slice(None) if len(of_kind) == len(attention.windows.kinds) else of_kind
            queries, keys = (_run(own, len(places)) for own, places in zip(inside, sides, strict=True))
            kinds.append(Kind(several, queries, keys, len(inside[0]), distance))
    return kinds


def _run(inside: list[int], count: int) -> slice | list[int]:
    """Positions among so many as a slice, if they are those from one on."""
    return slice(inside[0], None) if inside == list(range(inside[0], count)) else inside


def between(maps: Tensor, queries: slice | list[int], keys: slice | list[int]) -> Tensor:
    """Maps (..., query, key) between some queries and keys, rows renormalised to one if keys are left out."""
    kept = maps[..., queries, :][..., keys]
    return kept if kept.shape[-1] == maps.shape[-1] else kept / kept.sum(dim=-1, keepdim=True)


def mean_distance(maps: Tensor, distance: Tensor) -> Tensor:
    """sum_k A_qk |pos_q - pos_k|, mean over queries, (row, head) float64."""
    return torch.matmul(maps.flatten(-2), distance.flatten().to(maps.dtype)).double() / maps.shape[-2]


def entropy(maps: Tensor) -> Tensor:
    """-sum_k A_qk ln A_qk, mean over queries, (row, head) float64, in nats."""
    least = torch.finfo(maps.dtype).tiny  # 0 ln 0 = 0
    total: Tensor = _log(maps.detach().clamp_min(least)).mul_(maps).sum(dim=(-2, -1))
    return total.double() / -maps.shape[-2]


def _log(values: Tensor) -> Tensor:
    """Their natural logarithms in place, in single precision on a CPU by NumPy: in a third of the time."""
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return values.log_()
    np.log(values.numpy(), out=values.numpy())
    return values


def mutual_information(maps: Tensor, conditional: Tensor) -> Tensor:
    """Normalised mutual information of query and key, I / sqrt(H(q) H(k)), (row, head) float64.

    p(q) is uniform, p(k) = mean_q A_qk and I = H(k) - H(k | q), of which `conditional` is the `entropy` of the maps.
    0 where all queries have the same attention, even to a single key, where H(k) = 0; NaN for a single query.
    """
    queries = maps.shape[-2]
    marginal = torch.special.entr(maps.mean(dim=-2).double()).sum(dim=-1)
    information = (marginal - conditional).clamp_min(0.0)  # rounding may make it negative
    if queries == 1:
        return torch.full_like(information, torch.nan)
    normalised = information / (math.log(queries) * marginal).sqrt()
    return torch.where(marginal > 0, normalised, torch.zeros_like(normalised))


def head_cosine(maps: Tensor) -> Tensor:
    """Cosine similarity of the maps of every two heads, mean over pairs and queries, (row,) float64; NaN for one head.

    From |sum_h u_h|^2 = heads + the sum over pairs of distinct heads, u_h the attention of a query at unit length.
    """
    heads, queries = maps.shape[1], maps.shape[2]
    length = torch.linalg.vector_norm(maps, dim=-1)  # (row, head, query)
    total = torch.zeros_like(maps[:, 0])
    for head in range(heads):
        total.addcdiv_(maps[:, head], length[:, head, :, None])
    square = total.double().square().sum(dim=(-2, -1)) / queries
    return _over_pairs(square - heads, heads)


def _over_pairs(total: Tensor, count: int) -> Tensor:
    """The mean of a sum over ordered pairs of distinct ones; NaN for a single one."""
    return total / (count * (count - 1)) if count > 1 else torch.full_like(total, torch.nan)


def head_feature_cosine(outputs: Tensor) -> Tensor:
    """Cosine similarity of the outputs (row, head, query, channel) of every two heads, mean over pairs and queries.

    (row,) float64; NaN for one head. The cosine with an output of zeros is 0.
    """
    units = torch.nn.functional.normalize(outputs, dim=-1)
    total = units.sum(dim=1, dtype=torch.float64).square().sum(dim=-1)  # (row, query)
    own = torch.linalg.vector_norm(units, dim=-1, dtype=torch.float64).square().sum(dim=1)
    return _over_pairs((total - own).mean(dim=-1), outputs.shape[1])


def token_cosine(tokens: Tensor) -> Tensor:
    """Cosine similarity of every two tokens (image, token, channel), mean over pairs, (image,) float64; NaN for one."""
    total = torch.nn.functional.normalize(tokens, dim=-1).sum(dim=1, dtype=torch.float64)
    return _over_pairs(total.square().sum(dim=-1) - tokens.shape[1], tokens.shape[1])


def depth_cosine(tokens: Tensor, before: Tensor) -> Tensor:
    """Cosine similarity of each token with itself at an earlier layer, mean over tokens, (image,) float64."""
    return torch.nn.functional.cosine_similarity(tokens, before, dim=-1).mean(dim=1, dtype=torch.float64)


def singular_values(matrices: Tensor) -> Tensor:
    """ln(sigma_k / sigma_0), descending, (..., rank) float64; at least ln(2e-16), the double precision."""
    values: Tensor = torch.linalg.svdvals(matrices.double())
    return (values / values[..., :1]).clamp_min(FLOOR).log()


AXES = 3


def attended_layers(subject: Subject, patterns: tuple[str, ...]) -> list[Layer]:
    """The layers with a map whose residual branch is self-attention. Raises NotApplicable: there is none."""
    found = [layer for layer in spatial_layers(subject, patterns) if layer.attention and layer.branch is not None]
    found = [layer for layer in found if layer.branch is not None and layer.branch.skip and layer.branch.leaves]
    if not found:
        raise NotApplicable("--method principal needs layers of self-attention in a residual branch; there is none")
    return found


@weights_cache.once_per_weights
def tokens_around(subject: Subject, layer: Layer, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the first images in the residual stream before and after a layer's branch, (image, token, channel)."""
    assert layer.branch is not None
    before = replace(layer, tap=replace(layer.branch.leaves[0], side="input"))  # what the branch's first module reads
    start, end = (tokens.double().numpy() for tokens in first_tokens(subject, [before, layer], images))
    return start, end


def first_tokens(subject: Subject, layers: Sequence[Layer], images: int) -> list[Tensor]:
    """The tokens of the first images at every layer, (image, token, channel), on the CPU."""
    found: dict[int, Tensor] = {}

    def receive(position: int, tensor: Tensor) -> None:
        layer = layers[position]
        if tuple(tensor.shape[1:]) != layer.shape:
            raise ValueError(
                f"{layer.name} reads {tuple(tensor.shape[1:])} and adds to {layer.shape}, expected the same tokens; "
                "name other layers with --layers"
            )
        found[position] = layer.maps(tensor.detach()).flatten(2).transpose(1, 2).cpu()

    with torch.no_grad(), subject.evaluating(), feature_hooks(subject.model, layers, receive):
        subject.outputs(pixels.first_inputs(subject, images))
    return [found[position] for position in range(len(layers))]


def on_principal_axes(before: Sequence[np.ndarray] | np.ndarray, after: Sequence[np.ndarray] | np.ndarray) -> Values:
    """Coordinates of the tokens (image, token, channel) of every image, and how far they move together.

    The axes are the first three principal ones of an image's tokens before and after together, each with the sign that
    makes its largest component positive. With d the displacement of a token, `common_displacement` is
    |mean d|^2 / mean |d|^2: 1 where all tokens move alike, 0 where their moves cancel; NaN where nothing moves.
    """
    positions, shares, common = [], [], []
    for start, end in zip(before, after, strict=True):
        both = np.stack([start, end])  # (side, token, channel)
        centred = both - both.mean(axis=(0, 1))
        _, values, axes = np.linalg.svd(centred.reshape(-1, both.shape[-1]), full_matrices=False)
        axes = axes[:AXES] * np.sign(axes[np.arange(AXES), np.abs(axes[:AXES]).argmax(axis=1)])[:, None]
        positions.append(centred @ axes.T)
        moved = end - start
        with np.errstate(invalid="ignore", divide="ignore"):
            shares.append(values[:AXES] ** 2 / (values**2).sum())
            common.append((moved.mean(axis=0) ** 2).sum() / (moved**2).sum(axis=1).mean())
    return {
        "stream_position": np.stack(positions, axis=1),  # (side, image, token, axis)
        "explained": np.stack(shares),
        "common_displacement": np.array(common),
    }
