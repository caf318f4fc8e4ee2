"""What every operation of ATen does to the labels of its operands; an unknown one lets all their units stay."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from landscape.symmetry.labels import Calculus, Labels, labels_of_constant

# (calculus, labels of a value or None for what is no tensor, arguments by name, result) -> labels of the result(s)
Find: TypeAlias = Callable[[Any], Labels]
Arguments: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Callable[[Calculus, Find, Arguments, Any], Any]

REARRANGING = {
    "permute", "transpose", "t", "select", "slice", "unsqueeze", "squeeze", "expand", "split", "split_with_sizes",
    "unbind", "roll", "flip", "pixel_shuffle", "pixel_unshuffle", "repeat", "constant_pad_nd", "chunk", "unfold",
    "repeat_interleave", "channel_shuffle", "native_channel_shuffle", "narrow", "movedim", "im2col", "diagonal",
}  # fmt: skip
CALL = "*"  # among arguments by name: all but the first as they were given
RESHAPES = {"view", "_unsafe_view", "_reshape_alias", "reshape"}
COPIES = {"clone", "_to_copy", "lift_fresh", "detach", "alias", "contiguous", "native_dropout", "dropout", "view_of"}
CONSTANTS = {
    "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
    "scalar_tensor",
}  # fmt: skip
REDUCTIONS = {
    "sum", "mean", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm", "norm", "prod", "max", "min", "any",
    "all", "logsumexp", "argmax", "argmin", "std_mean",
}  # fmt: skip
SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}
BATCH_NORMS = {
    "native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "miopen_batch_norm",
    "_batch_norm_no_update", "batch_norm",
}  # fmt: skip
POOLS = {
    "avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool", "upsample", "_upsample", "reflection_pad",
    "replication_pad", "_adaptive_avg_pool", "mkldnn_max_pool", "mkldnn_adaptive_avg_pool",
}  # fmt: skip


def labels_of_result(
    calculus: Calculus, find: Find, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """The labels of the first tensors that an operation returned, in order, or of one; None if it is not known."""
    name = str(func.overloadpacket).rpartition(".")[2]
    names = [argument.name for argument in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given = {**dict(zip(names, args, strict=False)), **kwargs}  # in order: the first argument first
    given |= {name: value for name, value in defaults.items() if name not in given}
    given[CALL] = (args[1:], kwargs)
    plain = name.removesuffix("_") if name.endswith("_") and not name.startswith("__") else name
    rule = RULES.get(plain)
    if rule is None and plain.rstrip("123d").rstrip("_").startswith(tuple(POOLS)) and "backward" not in plain:
        rule = _pool
    if rule is None and torch.Tag.pointwise in func.tags:
        rule = _pointwise
    return None if rule is None else rule(calculus, find, given, result)


def _pointwise(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    return calculus.combine(*(find(value) for value in given.values() if isinstance(value, Tensor)))


def _rearranged(function: str) -> Rule:
    def rule(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
        args, kwargs = given[CALL]
        operation = getattr(torch.ops.aten, function)

        def move(tensor: Tensor) -> Any:
            if function == "im2col":
                return operation(tensor.double(), *args, **kwargs).long()
            return operation(tensor, *args, **kwargs)

        return calculus.move(find(next(iter(given.values()))), move)

    return rule


def _reshaped(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    own, *_ = given.values()
    return calculus.move(find(own), lambda t: t.reshape(result.shape))


def _copied(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    return find(next(iter(given.values())))


def _restrided(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    """Strides alone are changed."""
    if tuple(given["size"]) != find(given["self"]).shape:
        raise ValueError("another shape of the same memory")
    return find(given["self"])


def _constant(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    return labels_of_constant(result)


def _reduced(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    own = find(given["self"])
    dims = given.get("dim")
    if isinstance(dims, Tensor) or isinstance(given.get("other"), Tensor):
        return _pointwise(calculus, find, given, result)  # the maximum of two tensors
    axes = [dims] if isinstance(dims, int) else list(dims) if dims else list(range(len(own.shape)))
    first = result[0] if isinstance(result, tuple) else result
    reduced = calculus.reduce(own, axes, keepdim=first.dim() == len(own.shape))
    return (
        [reduced, Labels.in_order(result[1].shape) if result[1].dtype == torch.int64 else reduced]
        if isinstance(result, tuple)
        else reduced
    )


def _softmax(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    return calculus.normalise(find(given["self"]), [given["dim"]])


def _layer_norm(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    own, axes = find(given["input"]), range(-len(given["normalized_shape"]), 0)
    scaled = _affine(calculus, find, given, calculus.normalise(own, axes))
    statistic = calculus.reduce(own, axes)
    return [scaled, *(statistic for _ in result[1:])] if isinstance(result, tuple) else scaled


def _affine(calculus: Calculus, find: Find, given: Arguments, own: Labels, *, after: int = 0) -> Labels:
    """With scale and shift, each followed by `after` axes of length one."""
    for name in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(given.get(name), Tensor):
            added = calculus.move(find(given[name]), lambda t: t.reshape(*t.shape, *[1] * after))
            own = calculus.combine(own, added)
    return own


def _batch_norm(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    own = find(given["input"])
    return _affine(calculus, find, given, own, after=len(own.shape) - 2)


def _group_norm(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    own = find(given["input"])
    shape, groups = own.shape, given["group"] if "group" in given else given["num_groups"]
    split = calculus.move(own, lambda t: t.reshape(shape[0], groups, shape[1] // groups, *shape[2:]))
    normal = calculus.normalise(split, range(2, len(shape) + 1))
    back = calculus.move(normal, lambda t: t.reshape(shape))
    return _affine(calculus, find, given, back, after=len(shape) - 2)


def _product(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    """mm, bmm, addmm, baddbmm; of a vector, as in mv, addmv, dot, over the last axis of both."""
    values = [find(value) for value in given.values() if isinstance(value, Tensor)]
    first, second = values[-2:]
    if len(second.shape) > 1:
        product = calculus.contract(first, second)
    else:
        product = calculus.reduce(calculus.combine(first, second), [-1], keepdim=False)
    return calculus.combine(product, values[0]) if len(values) == 3 else product


def _linear(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    own, weight = find(given["input"]), calculus.move(find(given["weight"]), lambda t: t.t())
    product = calculus.contract(own, weight)
    return calculus.combine(product, find(given["bias"])) if given.get("bias") is not None else product


def _convolution(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    """As a product of (batch, group, 1, in, 1 ...) and (1, group, out, in, kernel ...), summed over in and kernel."""
    groups, spatial = given["groups"], given["weight"].dim() - 2
    own = calculus.pin_along(find(given["input"]), [0, *range(-spatial, 0)])
    weight = calculus.pin_along(find(given["weight"]), range(-spatial, 0))
    inputs, outputs = own.shape[1], result.shape[1]
    kernel = weight.shape[2:]
    own = calculus.move(
        own, lambda t: t.flatten(2)[..., 0].reshape(t.shape[0], groups, 1, inputs // groups, *[1] * spatial)
    )
    if given["transposed"]:
        arranged = calculus.move(
            weight, lambda t: t.reshape(groups, inputs // groups, outputs // groups, *kernel).transpose(1, 2)
        )
    else:
        arranged = calculus.move(weight, lambda t: t.reshape(groups, outputs // groups, inputs // groups, *kernel))
    summed = calculus.reduce(calculus.combine(own, arranged), range(3, 4 + spatial))
    product = calculus.move(summed, lambda t: t.reshape(t.shape[0], outputs, *[1] * spatial).expand(result.shape))
    product = Labels(product.shape, product.arrays, (*product.ordered[:2], *(n > 1 for n in result.shape[2:])))
    return _affine(calculus, find, {"bias": given.get("bias")}, product, after=spatial)


def _attention(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    query, key, value = (find(given[name]) for name in ("query", "key", "value"))
    heads = [one.shape[-3] for one in (query, key)]
    if heads[0] != heads[1]:  # of grouped queries
        key, value = (
            calculus.move(one, lambda t: t.repeat_interleave(heads[0] // heads[1], -3)) for one in (key, value)
        )
    scores = calculus.contract(query, calculus.move(key, lambda t: t.transpose(-1, -2)))
    for name in ("attn_mask", "attn_bias"):
        if isinstance(given.get(name), Tensor):
            scores = calculus.combine(scores, find(given[name]))
    return calculus.contract(calculus.normalise(scores, [-1]), value)


def _embedding(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    table = calculus.pin_along(find(given["weight"]), [0])
    places = given["indices"].shape
    row = calculus.move(table, lambda t: t[0].expand(*places, t.shape[1]))
    return Labels(row.shape, row.arrays, (*(n > 1 for n in places), False))


def _indexed(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    indices = given["indices"] if "indices" in given else [*[None] * given["dim"], given["index"]]
    at = [axis for axis, index in enumerate(indices) if index is not None]
    width = max((index.dim() if index is not None and index.dtype == torch.bool else 1) for index in indices)
    own = calculus.pin_along(find(given["self"]), range(at[0], at[-1] + width))
    return calculus.move(own, lambda t: t[tuple(slice(None) if i is None else i.to("cpu") for i in indices)])


def _joined(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    return calculus.join([find(tensor) for tensor in given["tensors"]], given.get("dim", 0))


def _stacked(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    at = given.get("dim", 0) % result.dim()
    return calculus.join([calculus.move(find(t), lambda x: x.unsqueeze(at)) for t in given["tensors"]], at)


def _pool(calculus: Calculus, find: Find, given: Arguments, result: Any) -> Any:
    """Pooling and resampling over the last axes."""
    own = find(next(iter(given.values())))
    first = result[0] if isinstance(result, tuple | list) else result
    spatial = max(1, len(own.shape) - 2)
    own = calculus.pin_along(own, range(-spatial, 0))
    calculus.units.mark(own.arrays)
    flat = calculus.move(
        own, lambda t: t.flatten(-spatial)[..., :1].reshape(*t.shape[:-spatial], *[1] * spatial).expand(first.shape)
    )
    return Labels(flat.shape, flat.arrays, (*flat.ordered[:-spatial], *(n > 1 for n in first.shape[-spatial:])))


RULES: dict[str, Rule] = {
    **{name: _rearranged(name) for name in REARRANGING},
    **dict.fromkeys(RESHAPES, _reshaped),
    **dict.fromkeys(COPIES, _copied),
    **dict.fromkeys(CONSTANTS, _constant),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"), _product),
    "linear": _linear, "convolution": _convolution, "_convolution": _convolution, "mkldnn_convolution": _convolution,
    "native_layer_norm": _layer_norm, "rms_norm": _layer_norm, "_fused_rms_norm": _layer_norm,
    "native_group_norm": _group_norm, "group_norm": _group_norm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention, "_scaled_dot_product_attention_math": _attention,
    "_scaled_dot_product_efficient_attention": _attention, "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention, "scaled_dot_product_attention": _attention,
    "embedding": _embedding, "index": _indexed, "index_select": _indexed, "_unsafe_index": _indexed,
    "as_strided": _restrided, "cat": _joined, "stack": _stacked,
    # Elementwise without the tag, in some releases of torch.
    **dict.fromkeys(("copy", "gelu", "where", "hardswish", "hardsigmoid", "hardtanh", "silu", "mish"), _pointwise),
}  # fmt: skip
