"""Record in one forward pass what matrix products, convolutions, lookups and additions do with parameters."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from landscape.data.structure import tensors_in
from landscape.discovery.operation_mode import OperationMode
from landscape.weight_space.directions import Filters

# Matrix products: positions of the operands, and from its end the dimension that each sums over.
PRODUCTS = {
    "mm": ((0, -1), (1, -2)), "bmm": ((0, -1), (1, -2)), "addmm": ((1, -1), (2, -2)), "baddbmm": ((1, -1), (2, -2)),
    "mv": ((0, -1), (1, -1)), "addmv": ((1, -1), (2, -1)), "dot": ((0, -1), (1, -1)), "linear": ((0, -1), (1, -1)),
    "_grouped_mm": ((0, -1), (1, -2)),
}  # fmt: skip
BIASES = {"addmm": 0, "baddbmm": 0, "addmv": 0, "convolution": 2, "linear": 2}  # positions of what is added
LOOKUPS = {"embedding": (0, 1), "index_select": (0, 2), "index": (0, 1)}  # positions of table and indices
RESHAPES = {"view", "_unsafe_view", "_reshape_alias", "reshape"}
COPIES = {"clone", "_to_copy", "lift_fresh", "_weight_norm_interface", "native_dropout"}
ADDITIONS = {"add", "add_"}
MARKS = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093)  # primes
# Size, and stride in the parameter's own row-major order; stride 0: not a dimension of the parameter.
Factor: TypeAlias = tuple[int, int]
Dims: TypeAlias = tuple[tuple[Factor, ...], ...]  # of every dimension of a tensor, the outermost factor first
# What a tensor is made of: parameters by name; None if not by rearranging, or elementwise, alone.
Parts: TypeAlias = Mapping[str, Dims | None]


class PassRecorder(OperationMode):
    """Records how a forward pass without gradients uses parameters; a context manager.

    Tensors are followed by storage, offset and strides through views, copies and elementwise functions.

    Args:
        parameters: by name.
        inputs: of the pass, a tensor or tensors in any structure.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.added: set[str] = set()  # added to activations, and never multiplied with any or looked up by the input
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._made: dict[Any, Parts] = {
            _key(p): {name: tuple(((n, s),) for n, s in zip(p.shape, _strides(p.shape), strict=True))}
            for name, p in parameters.items()
        }
        # Storages whose values depend on those of the input.
        self._inputs = {_storage(t) for t in tensors_in(inputs)}
        self._summed: dict[str, set[Filters | None]] = {}
        self._constant: set[str] = set()  # multiply what does not depend on the input, position features say
        self._chosen: set[str] = set()  # tables whose rows the input's values choose

    def filters(self, name: str) -> Filters | None:
        """The filters of a parameter, None where its uses do not show them or contradict each other."""
        found = self._summed.get(name, set())
        if len(found) == 1:
            return next(iter(found))
        return Filters.along_rows(self._shapes[name]) if not found and name in self._chosen else None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.added -= {*self._summed, *self._chosen, *self._constant}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        result = func(*args, **options)
        name = str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
        read, written = list(_tensors((args, options))), list(_tensors(result))
        dependent = any(self._depends(t) for t in read)
        self._record(name, args, read)
        made = self._outputs(func, name, args, read, written)
        storages = {_storage(t) for t in read}
        for tensor, parts in zip(written, made, strict=True):
            if dependent:
                self._inputs.add(_storage(tensor))
            elif _storage(tensor) not in storages:
                self._inputs.discard(_storage(tensor))  # of a tensor that was freed
            if parts:
                self._made[_key(tensor)] = parts
            else:
                self._made.pop(_key(tensor), None)
        return result

    def _depends(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and _storage(tensor) in self._inputs

    def _parts(self, tensor: Any) -> Parts:
        return self._made.get(_key(tensor), {}) if isinstance(tensor, Tensor) else {}

    def _record(self, name: str, args: tuple[Any, ...], read: Sequence[Tensor]) -> None:
        """What one operation does with parameters, where activations take part."""
        if name in PRODUCTS:
            operands = PRODUCTS[name]
            for (at, dim), (other, _) in (operands, operands[::-1]):
                if self._depends(args[other]):
                    self._sum(args[at], (dim % args[at].dim(),))
                elif other < at:
                    self._constant |= set(self._parts(args[at]))
        elif name == "convolution" and self._depends(args[0]):
            self._convolve(args[1], transposed=args[6], groups=args[8])
        elif name in ADDITIONS:
            for added, to in (args[:2], args[1::-1]):
                self._add(added, to)
        elif name.startswith("_scaled_dot_product"):  # a mask
            for tensor in read[3:]:
                self._add(tensor, args[0])
        if name in BIASES and len(args) > BIASES[name]:
            bias = args[BIASES[name]]
            self._add(bias, next(t for t in args if isinstance(t, Tensor) and t is not bias))

    def _add(self, added: Any, to: Any) -> None:
        if self._depends(to):
            self.added |= set(self._parts(added))

    def _sum(self, tensor: Tensor, summed: Iterable[int]) -> None:
        for name, dims in self._parts(tensor).items():
            if dims is not None:
                self._summed.setdefault(name, set()).add(_filters(self._shapes[name], dims, set(summed)))

    def _convolve(self, weight: Tensor, *, transposed: bool, groups: int) -> None:
        kernel = range(2, weight.dim())
        if not transposed:
            self._sum(weight, (1, *kernel))
        elif groups == 1:
            self._sum(weight, (0, *kernel))
        else:
            shape = (groups, weight.shape[0] // groups, *weight.shape[1:])
            for name, dims in self._parts(weight).items():
                split = _reshaped(dims, weight.shape, shape)
                found = _filters(self._shapes[name], split, {1, *(k + 1 for k in kernel)}) if split else None
                self._summed.setdefault(name, set()).add(found)

    def _outputs(
        self, func: Any, name: str, args: tuple[Any, ...], read: Sequence[Tensor], written: Sequence[Tensor]
    ) -> Iterable[Parts]:
        """What every output of an operation is made of; activations are not followed."""
        made = [(tensor.shape, self._parts(tensor)) for tensor in read]
        names = {n for _, parts in made for n in parts}
        if not names or name.endswith("_like") or name.startswith("new_"):
            return [{}] * len(written)
        if name in LOOKUPS and self._parts(args[LOOKUPS[name][0]]):
            return [self._looked_up(name, args)]
        if len(read) == 1 and (name in RESHAPES or getattr(func, "is_view", False)):
            views = {n: _viewed(func, name, args, written, dims) for n, dims in made[0][1].items()}
            return [{n: found[k] for n, found in views.items()} for k in range(len(written))]
        if len(read) > 1 and any(map(self._depends, read)):
            return [{}] * len(written)
        if name == "stack":
            at = args[1] % written[0].dim() if len(args) > 1 else 0
            new: Dims = (((len(read), 0),),)
            made = [
                (written[0].shape, {n: d if d is None else (*d[:at], *new, *d[at:]) for n, d in parts.items()})
                for _, parts in made
            ]
        if name in ("cat", "stack") or name in COPIES or torch.Tag.pointwise in getattr(func, "tags", ()):
            return [_merged(made), *({} for _ in written[1:])]
        return [dict.fromkeys(names)] * len(written)

    def _looked_up(self, name: str, args: tuple[Any, ...]) -> Parts:
        table, indices = (args[position] for position in LOOKUPS[name])
        at = args[1] % table.dim() if name == "index_select" else 0
        if name == "index":
            at = next(axis for axis, index in enumerate(indices) if index is not None)
        given = [index for index in indices if index is not None] if name == "index" else [indices]
        parts = self._parts(table)
        # An embedding with one row for all samples and places is of what the input may choose (its segment).
        constant = name == "embedding" and bool((indices == indices.flatten()[:1]).all())
        if constant or any(map(self._depends, given)):
            self._chosen |= set(parts)
        if len(given) > 1 or given[0].dtype in (torch.bool, torch.uint8):
            return dict.fromkeys(parts)
        new = tuple(((size, 0),) for size in given[0].shape)
        return {n: None if dims is None else (*dims[:at], *new, *dims[at + 1 :]) for n, dims in parts.items()}


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _merged(sources: Sequence[tuple[Sequence[int], Parts]]) -> Parts:
    """What an elementwise function of tensors, or their concatenation, is made of."""
    found: dict[str, Dims | None] = {}
    most = max(len(shape) for shape, _ in sources)
    for shape, parts in sources:
        for name, dims in parts.items():
            aligned = None if dims is None else (((1, 0),),) * (most - len(shape)) + dims
            before = found.get(name)
            # Rearranged in two ways (w + w.T) it is unknown; beside a function of itself (w / norm(w)) it is itself.
            found[name] = before or aligned if None in (before, aligned) or before == aligned else None
    return found


def _viewed(
    func: Any, name: str, args: tuple[Any, ...], written: Sequence[Tensor], dims: Dims | None
) -> list[Dims | None]:
    """Dimensions of every view that an operation makes of a tensor, by the strides it gives to a marked one."""
    source = args[0]
    if dims is None or source.dim() > len(MARKS):
        return [None] * len(written)
    if name in RESHAPES:
        return [_reshaped(dims, source.shape, written[0].shape)]
    try:
        marked = func(torch.empty_strided(source.shape, MARKS[: source.dim()], device="meta"), *args[1:])
    except RuntimeError:
        return [None] * len(written)
    return [_by_marks(view, source.shape, dims) for view in _tensors(marked)]


def _by_marks(view: Tensor, shape: Sequence[int], dims: Dims) -> Dims | None:
    found: list[tuple[Factor, ...]] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        at = next((k for k in range(len(shape)) if stride and stride % MARKS[k] == 0), None)
        if size == 1 or not stride:
            found.append(((size, 0),))
        elif at is None:
            return None
        elif size == shape[at] and stride == MARKS[at]:
            found.append(dims[at])
        elif len(dims[at]) == 1:
            found.append(((size, dims[at][0][1] * (stride // MARKS[at])),))
        else:
            return None
    return tuple(found)


def _reshaped(dims: Dims | None, shape: Sequence[int], new: Sequence[int]) -> Dims | None:
    """The dimensions regrouped to a new shape; None where that splits what belongs together."""
    if dims is None or any(math.prod(n for n, _ in dim) != size for dim, size in zip(dims, shape, strict=True)):
        return None
    rest = [factor for dim in dims for factor in dim if factor[0] > 1][::-1]
    found = []
    for size in new:
        dim: list[Factor] = []
        while size > 1 and rest:
            n, stride = rest.pop()
            if n > size and n % size == 0:
                rest.append((n // size, stride))
                n, stride = size, stride * (n // size)
            if size % n:
                return None
            dim.append((n, stride))
            size //= n
        found.append(tuple(dim) or ((1, 0),))
    return tuple(found)


def _filters(shape: Sequence[int], dims: Dims, summed: set[int]) -> Filters | None:
    """Filters of a parameter of that shape, a tensor of which with these dimensions is summed over some of them."""
    roles = [(n, stride, at in summed) for at, dim in enumerate(dims) for n, stride in dim if stride and n > 1]
    sizes: list[int] = []
    over: list[bool] = []
    for axis, (size, stride) in enumerate(zip(shape, _strides(shape), strict=True)):
        inside = sorted((role for role in roles if stride <= role[1] < stride * size), key=lambda role: -role[1])
        kinds = {role[2] for role in inside}
        if size == 1:
            sizes, over = [*sizes, 1], [*over, axis > 0]
        elif len(kinds) < 2:  # an axis that is not among the dimensions is selected from, one index at a time
            sizes, over = [*sizes, size], [*over, kinds == {True}]
        else:
            parts = [role[0] for role in inside]
            if math.prod(parts) != size or [role[1] for role in inside] != [stride * s for s in _strides(parts)]:
                return None
            sizes, over = [*sizes, *parts], [*over, *(role[2] for role in inside)]
    return Filters(tuple(sizes), tuple(axis for axis, is_summed in enumerate(over) if is_summed))
