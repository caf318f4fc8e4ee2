"""Tensors in nested structures, such as batches and outputs: tuples, lists, dicts, dataclasses, plain objects."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_convert

# A tensor, or a tuple, list, mapping or plain object of nested values; leaves other than tensors are left alone.
Nested: TypeAlias = Any


def tensors_in(value: Nested) -> Iterator[Tensor]:
    """All tensors, in a fixed order: of an object those of its attributes."""
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Nested, prefix: str = "", inside: tuple[Nested, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """All tensors with the path to each, such as `inputs.0.mask`; `inside` which objects the value is.

    An object that refers to one that it is in, is not entered again.
    """
    if isinstance(value, Tensor):
        yield prefix, value
        return
    if isinstance(value, PackedSequence):
        yield prefix, value.data
        return
    if any(value is outer for outer in inside):
        return
    for name, inner in _items(value):
        yield from named_tensors(inner, f"{prefix}.{name}" if prefix else str(name), (*inside, value))


def map_tensors(value: Nested, change: Callable[[Tensor], Tensor], copies: dict[int, Nested] | None = None) -> Nested:
    """The same structure with a function applied to every tensor; objects are copied, never changed.

    `copies` are those made so far, by the id of the original, which may refer to itself.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        orders = (None if order is None else change(order) for order in (value.sorted_indices, value.unsorted_indices))
        return PackedSequence(change(value.data), value.batch_sizes, *orders)  # the sizes have to stay on the CPU
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change, copies) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        inner = {key: map_tensors(item, change, copies) for key, item in value.items()}
        return type(value)(inner) if isinstance(value, dict) else inner
    if not _is_plain_object(value):
        return value
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    changed = copies[id(value)] = copy.copy(value)
    for name, item in vars(value).items():
        object.__setattr__(changed, name, map_tensors(item, change, copies))  # also of a frozen dataclass
    return changed


def as_tensors(value: Nested) -> Nested:
    """The same structure with tensors in place of NumPy's arrays."""
    return default_convert(value)  # type: ignore[no-untyped-call]


def common_length(value: Nested) -> int | None:
    """The length along dimension 0 that all tensors share; None if they share none, or there is no tensor."""
    lengths = {len(tensor) if tensor.dim() else None for tensor in tensors_in(value)}
    return lengths.pop() if len(lengths) == 1 and not _holds_packed(value) else None


def rows_of(value: Nested, rows: slice | Tensor) -> Nested:
    """Some rows of every tensor; the tensors share a `common_length`."""
    return map_tensors(value, lambda tensor: tensor[rows])


def _holds_packed(value: Nested, inside: tuple[Nested, ...] = ()) -> bool:
    """Whether sequences of several lengths lie in one tensor."""
    if isinstance(value, PackedSequence):
        return True
    deeper = () if any(value is outer for outer in inside) else _items(value)
    return any(_holds_packed(inner, (*inside, value)) for _, inner in deeper)


def _items(value: Nested) -> Iterator[tuple[Any, Nested]]:
    if isinstance(value, PackedSequence):
        return
    if isinstance(value, tuple | list):
        yield from enumerate(value)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif _is_plain_object(value):
        yield from vars(value).items()


def _is_plain_object(value: Any) -> bool:
    """Whether a value is a dataclass, or an instance of another class made in Python with a tensor as attribute."""
    if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return is_dataclass(value) or any(isinstance(inner, Tensor) for inner in vars(value).values())
