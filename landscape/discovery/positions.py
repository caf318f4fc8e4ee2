"""Follow the positions of an image through a pass: where in the image the numbers of each tensor come from.

The positions of a tensor are tensors of its shape, of stride 0 along axes on which they do not change: rows and columns
of pixels, NaN for tokens that are no positions (class token, padding). They lie on the host, where they are compared,
whatever the device of the pass. A product of queries and keys has four: those of its queries, then those of its keys.
After a sum of products over the positions themselves there are none, ().
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import nan
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.data.structure import map_tensors, tensors_in

Positions = tuple[Tensor, ...]
FINEST = 2.0**16  # parts of a pixel that positions are rounded to
Find = Callable[[Any], tuple[int, Positions | None] | None]  # node and positions of a tensor of the pass

MOVES = {  # functions that only move the numbers of tensors, so that they are called on the positions as well
    "reshape", "view", "flatten", "unflatten", "permute", "transpose", "swapaxes", "movedim", "moveaxis", "squeeze",
    "unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "tile", "cat", "concat", "stack", "roll", "flip",
    "pad", "_pad", "split", "chunk", "unbind", "tensor_split", "__getitem__", "select", "narrow", "index_select",
    "gather", "take_along_dim", "unfold", "fold", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "t",
    "T", "mT", "data",
}  # fmt: skip
RESAMPLING = {"interpolate", "upsample", "adaptive_avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool1d"}
REDUCTIONS = {"mean", "sum", "amax", "amin", "max", "min"}
PRODUCTS = {"matmul", "__matmul__", "bmm", "einsum", "baddbmm"}  # of matrices
POOLING_WORDS = ("input", "kernel_size", "stride", "padding")
STRIDED = ("conv1d", "conv2d", "conv3d", "max_pool", "avg_pool", "boolean_dispatch", "fractional_max_pool")


def of_image(image: Tensor) -> Positions | None:
    """Rows and columns of the pixels of images (N, C, H, W)."""
    if image.ndim != 4 or not image.is_floating_point():
        return None
    sides = (torch.arange(side, dtype=torch.float64) for side in image.shape[2:])
    return tuple(side.expand(image.shape) for side in torch.meshgrid(*sides, indexing="ij"))


def follow(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor],
    find: Find,
) -> list[Positions | None]:  # fmt: skip
    """The positions of the results of a torch function; None where they are unknown."""
    known = [(*found, tensor) for tensor in tensors_in((args, kwargs)) if (found := find(tensor)) is not None]
    given = [(tensor, p) for _, p, tensor in sorted(known, key=lambda one: one[0]) if p is not None]
    shape = results[0].shape
    if not given:
        return [None] * len(results)
    try:
        if name in MOVES:
            count = max(len(positions) for _, positions in given)
            return _moved(name, func, args, kwargs, find, count) if count else [()] * len(results)
        if name in PRODUCTS or name == "scaled_dot_product_attention":
            return [_of_product(name, args, kwargs, find, shape)]
        positions = next(iter(given))[1]
        if name == "multi_head_attention_forward":  # of its queries
            return [_of(find, args[0]), *[None] * (len(results) - 1)]
        if name in ("linear", "addmm"):
            return [_varying(tuple(_mean(p, -1) for p in positions), shape)]
        if name.startswith(STRIDED):
            return [_varying(_strided(name, positions, args, kwargs, shape), shape)] * len(results)
        if name in RESAMPLING:
            return [_varying(tuple(func(_mean(p, 1), *args[1:], **kwargs) for p in positions), shape)]
        if name in REDUCTIONS and positions and positions[0].shape != shape:
            axes = args[1] if len(args) > 1 else kwargs.get("dim")
            keep = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
            return [_varying(tuple(p.mean(axes, keepdim=keep) for p in positions), shape)] * len(results)
        return [_shared(given, result.shape) for result in results]
    except (RuntimeError, TypeError, ValueError, IndexError):  # arguments that no rule knows
        return [None] * len(results)


def maps_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], find: Find) -> Positions | None:
    """Positions of the queries and keys of an attention function, both of the shape of its maps.

    Of a softmax of numbers of one tensor those of that tensor, its axis last.
    """
    if name == "scaled_dot_product_attention":
        query, key = (args[i] if len(args) > i else kwargs[word] for i, word in enumerate(("query", "key")))
        keys = _of(find, key)
        if keys and query.ndim > 2 and query.shape[-3] != key.shape[-3] > 1:  # several heads share a key
            keys = tuple(p.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3) for p in keys)
        keys = keys and tuple(p.transpose(-2, -1) for p in keys)
        shape = *query.shape[:-1], key.shape[-2]
        return _product(_matrix_letters(query.ndim, key.ndim), _of(find, query), keys, shape)
    if name == "multi_head_attention_forward":
        given = dict(zip(("query", "key", "value", "width", "num_heads"), args, strict=False)) | kwargs
        query, key = (_of(find, given[one]) for one in ("query", "key"))
        if not query or not key:
            return None
        maps = (query[0].shape[1], given["num_heads"], query[0].shape[0], key[0].shape[0])
        rows = (p[..., 0].T[:, None, :, None].expand(maps) for p in query)
        return *rows, *(p[..., 0].T[:, None, None, :].expand(maps) for p in key)
    logits = next(tensors_in((args, kwargs)))
    positions, axis = _of(find, logits), kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if positions is None or axis in (None, -1, logits.ndim - 1):
        return positions
    return tuple(p.movedim(axis, -1) for p in positions) if len(positions) == 2 else None


def spelt(equation: str, first: int, second: int) -> tuple[str, str, str]:
    """The axes of two factors with so many axes, and of their product, with letters for the dots of an equation."""
    terms, _, after = equation.replace(" ", "").partition("->")
    one, _, other = terms.partition(",")
    unused = "".join(letter for letter in ascii_letters if letter not in equation)
    dots = [count - len(term) + 3 if "..." in term else 0 for term, count in ((one, first), (other, second))]
    most = max(dots)
    starts = (most - dots[0], most - dots[1], 0)
    one, other, after = (t.replace("...", unused[i:most]) for t, i in zip((one, other, after), starts, strict=True))
    return one, other, after


def _of(find: Find, tensor: Any) -> Positions | None:
    found = find(tensor)
    return found[1] if found else None


def _moved(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], find: Find, count: int
) -> list[Positions | None]:
    """Positions of the results of a function that moves the numbers of tensors; NaN for those without positions."""

    def part(i: int, tensor: Tensor) -> Tensor:
        positions = _of(find, tensor)
        if positions is not None and len(positions) == count:
            return positions[i]
        if not tensor.is_floating_point():
            return tensor.cpu()  # an index
        return torch.full((), nan, dtype=torch.float64).expand(tensor.shape)

    columns = []
    for i in range(count):
        moved, options = map_tensors((args, kwargs), partial(part, i))
        if name == "view":
            result = moved[0].reshape(*moved[1:])
        elif name in ("pad", "_pad"):
            sides = options.get("pad", moved[1] if len(moved) > 1 else None)
            kept = range(moved[0].ndim - len(sides) // 2)  # axes that are not padded
            result = F.pad(_narrow(moved[0], kept), sides, value=nan)
            result = result.expand(*moved[0].shape[: len(kept)], *result.shape[len(kept) :])
        elif name in ("cat", "concat"):
            parts, axis = moved[0], options.get("dim", moved[1] if len(moved) > 1 else 0) % moved[0][0].ndim
            same = [i for i in range(parts[0].ndim) if i != axis and all(p.stride(i) == 0 for p in parts)]
            result = torch.cat([_narrow(p, same) for p in parts], axis)
            result = result.expand(*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])
        elif name == "fold" or (name == "unfold" and func is F.unfold):
            weight = func(torch.ones_like(moved[0]), *moved[1:], **options)  # 0 at padding, the number of summands
            result = func(moved[0].nan_to_num(), *moved[1:], **options) / weight
            result = torch.where(weight > 0, result, nan)
        else:
            result = func(*moved, **options)
        columns.append([_thin(one) for one in tensors_in(result)])
    return list(zip(*columns, strict=True))


def rounded(positions: Tensor) -> Tensor:
    """Positions without the last digits, which the order of a sum decides."""
    return (positions * FINEST).round() / FINEST


def _narrow(positions: Tensor, axes: Iterable[int] | None = None) -> Tensor:
    """The first numbers along those of some axes, or of all, on which the positions have stride 0."""
    axes = range(positions.ndim) if axes is None else axes
    cut = {axis for axis in axes if positions.stride(axis) == 0}
    return positions[tuple(slice(0, 1) if axis in cut else slice(None) for axis in range(positions.ndim))]


def _thin(positions: Tensor) -> Tensor:
    """The same numbers, of stride 0 along every axis on which they do not change."""
    thin = positions.view(torch.int64)  # in which NaN equals NaN
    for axis in reversed(range(positions.ndim)):  # channels, which mostly share a position, first
        if (size := positions.shape[axis]) == 1:
            continue
        first = thin.narrow(axis, 0, 1)
        if thin.stride(axis) == 0 or (
            torch.equal(first, thin.narrow(axis, size - 1, 1)) and bool((thin == first).all())
        ):
            thin = first
    return thin.view(torch.float64).expand(positions.shape)


def _is_constant(positions: Positions) -> bool:
    return all(step == 0 or size == 1 for p in positions for size, step in zip(p.shape, _thin(p).stride(), strict=True))


def _varying(positions: Positions, shape: Sequence[int]) -> Positions | None:
    """The positions, expanded to a shape; None if all are the same, as of a mean over the whole image."""
    return None if _is_constant(positions) and positions else tuple(_thin(p).expand(shape) for p in positions)


def _shared(given: Sequence[tuple[Tensor, Positions]], shape: Sequence[int]) -> Positions | None:
    """Positions of what several tensors are combined to: those of the map, and of the oldest, as of the skip."""
    fitting = [p for tensor, p in given if tensor.ndim <= len(shape) and _fits(tensor.shape, shape)]
    several = [p for p in fitting if len(p) == max(map(len, fitting))]
    several = [p for p in several if not _is_constant(p)] or several
    return tuple(p.expand(shape) for p in several[0]) if several else None


def _fits(shape: Sequence[int], larger: Sequence[int]) -> bool:
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(larger), strict=False))


def _strided(
    name: str, positions: Positions, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int]
) -> Positions:
    """Centres of the kernels of a convolution or pooling."""
    words = ("input", "weight", "bias", "stride", "padding", "dilation") if "conv" in name else POOLING_WORDS
    given = dict(zip(words, args, strict=False)) | kwargs
    kernel = given["weight"].shape[2:] if "weight" in given else given["kernel_size"]
    stride, padding = given.get("stride") or (1 if "conv" in name else kernel), given.get("padding", 0)
    result = tuple(_mean(p, 1) for p in positions)
    for axis, count in enumerate(shape[2:], 2):
        size, step, apart = (
            int(value if isinstance(value, int) else value[min(axis - 2, len(value) - 1)])
            for value in (kernel, stride, given.get("dilation", 1) if "conv" in name else 1)
        )
        reach = apart * (size - 1)
        if isinstance(padding, str):
            before = max(0, (count - 1) * step + reach + 1 - positions[0].shape[axis]) // 2 if padding == "same" else 0
        else:
            before = padding if isinstance(padding, int) else padding[min(axis - 2, len(padding) - 1)]
        result = tuple(_sampled(p, axis, reach / 2 - before + step * torch.arange(count)) for p in result)
    return result


def _mean(positions: Tensor, axis: int) -> Tensor:
    """Means along an axis, which is kept."""
    if positions.stride(axis) == 0:
        return positions.narrow(axis, 0, 1)
    result = rounded(_narrow(positions).mean(axis, keepdim=True))
    axis %= positions.ndim
    return result.expand(*positions.shape[:axis], 1, *positions.shape[axis + 1 :])


def _sampled(positions: Tensor, axis: int, at: Tensor) -> Tensor:
    """Positions between and beyond those along an axis; padding continues the map."""
    size = positions.shape[axis]
    if positions.stride(axis) == 0 or size == 1:
        return positions.narrow(axis, 0, 1)
    positions = _narrow(positions)
    index, at = (
        values.to(positions).view(-1, *[1] * (positions.ndim - axis - 1)) for values in (torch.arange(size), at)
    )
    if positions.isnan().any():
        step = positions.diff(dim=axis).nanmean(axis, keepdim=True)
        start = (positions - step * index).nanmean(axis, keepdim=True)
        positions = rounded(torch.where(positions.isnan(), start + step * index, positions))
    below = at.floor().clamp(0, size - 2)
    low, high = (positions.index_select(axis, (below + i).long().flatten()) for i in (0, 1))
    return low + (at - below) * (high - low)


def _of_product(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], find: Find, shape: Sequence[int]
) -> Positions | None:
    if name == "scaled_dot_product_attention":
        maps, value = maps_of(name, args, kwargs, find), args[2] if len(args) > 2 else kwargs["value"]
        return _product(_matrix_letters(value.ndim, value.ndim), maps, _of(find, value), shape)
    left, right = [*tensors_in(args)][-2:]
    counts = left.ndim, right.ndim
    letters = spelt(args[0], *counts) if name == "einsum" else _matrix_letters(*counts)
    if find(left) is None or find(right) is None:  # a weight
        one, own = (left, letters[0]) if find(right) is None else (right, letters[1])
        half = _half(_of(find, one) or (), own, letters[2], shape, averaged=True)
        return _varying(half, shape) if half else None
    return _product(letters, _of(find, left), _of(find, right), shape)


def _matrix_letters(left: int, right: int) -> tuple[str, str, str]:
    """The axes of the factors of a matrix product, which have so many, and of their product."""
    lead = "abcdefgh"[10 - max(left, right) :]
    return lead[len(lead) + 2 - left :] + "mk", lead[len(lead) + 2 - right :] + "kn", lead + "mn"


def _product(
    letters: tuple[str, str, str], left: Positions | None, right: Positions | None, shape: Sequence[int]
) -> Positions | None:
    """Positions of a product: of maps with the values those of the queries, else those of both factors.

    Those along axes that are summed over are lost.
    """
    one, other, after = letters
    factors = [(p, own) for p, own in ((left, one), (right, other)) if p is not None]
    maps = [(p, own) for p, own in factors if len(p) > 2]
    halves = [half for p, own in maps or factors if (half := _half(p, own, after, shape))]
    if not halves:
        return () if len(factors) == 2 else None
    own = [axis for axis, letter in enumerate(after) if (letter in one) != (letter in other)]
    both = len(halves) == 2 and any(
        p.stride(axis) and p.shape[axis] > 1 for half in halves for p in half for axis in own
    )
    return (*halves[0], *halves[1]) if both else halves[0]


def _half(positions: Positions, own: str, after: str, shape: Sequence[int], averaged: bool = False) -> Positions | None:
    """Rows and columns that do not change along the axes of a factor that are summed over, as of the product."""
    lost = [axis for axis, letter in enumerate(own) if letter not in after]
    order = [[letter for letter in own if letter in after].index(letter) for letter in after if letter in own]
    missing = [axis for axis, letter in enumerate(after) if letter not in own]
    for pair in (positions[:2], positions[2:]):
        thin = [_thin(p) for p in pair]
        if pair and (averaged or all(p.stride(axis) == 0 or p.shape[axis] == 1 for p in thin for axis in lost)):
            for axis in reversed(lost):
                thin = [p.mean(axis) if averaged else p.select(axis, 0) for p in thin]
            thin = [p.permute(order) for p in thin]
            for axis in missing:
                thin = [p.unsqueeze(axis) for p in thin]
            return tuple(p.expand(shape) for p in thin)
    return None
