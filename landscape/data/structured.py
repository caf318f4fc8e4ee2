"""Form batches of any structure: several inputs, masks, dicts, dataclasses, graphs that the user packs, no targets."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import default_collate

from landscape.data.dataset import BatchList, count_of, number_of_classes
from landscape.data.sample_reading import Request
from landscape.data.structure import Nested, as_tensors, map_tensors, rows_of, tensors_in


class ShapesDiffer(ValueError):
    """Samples of different shapes, which do not fit into one tensor."""


def looks_batched(inputs: Nested, targets: Nested) -> bool:
    """Whether the first element of an iterable is a mini-batch: a target for every row of its inputs."""
    if not isinstance(targets, Tensor):
        return next(tensors_in(targets), None) is not None
    if not isinstance(inputs, Tensor):
        return targets.dim() >= 1
    return targets.dim() >= 1 and inputs.dim() >= 2 and len(targets) == len(inputs)


def from_rows(data: Nested, count: int, request: Request) -> BatchList:
    """Mini-batches of the first rows of a data set whose tensors are in memory as a whole."""
    size = request.batch_size
    return _batch_list([rows_of(data, slice(at, min(at + size, count))) for at in range(0, count, size)], request)


def from_items(items: Sequence[Nested], request: Request) -> BatchList:
    """Mini-batches of samples, collated like a DataLoader does.

    Raises:
        ValueError: the samples have different shapes.
    """
    size = request.batch_size
    return _batch_list([_collated(items[at : at + size], request) for at in range(0, len(items), size)], request)


def from_batches(batches: Iterator[Nested], wanted: int | None, request: Request) -> BatchList:
    """Whole mini-batches as they come, until at least `wanted` samples are there.

    None is cut: a model may shorten a padded mini-batch to its longest sequence.

    Raises:
        ValueError: one holds no tensor.
    """
    wholes: list[Nested] = []
    count = 0
    for batch in batches:
        whole = as_tensors(batch)
        wholes.append(map_tensors(whole, torch.clone))  # a loader may use its memory again for the next batch
        count += count_of(request.read("a batch", whole)[1], whole) or 1
        if wanted is not None and count >= wanted:
            break
    return _batch_list(wholes, request)


def _batch_list(wholes: Sequence[Nested], request: Request) -> BatchList:
    for whole in wholes:
        if next(tensors_in(whole), None) is None:
            got = type(whole).__name__
            raise ValueError(f"{request.name}: a batch is a {got} without tensors; expected tensors in it")
    pairs = [request.read(f"batch {i}", whole) for i, whole in enumerate(wholes)]
    return BatchList(pairs, wholes, request.name, max(_classes(request.name, targets) for _, targets in pairs))


def _classes(name: str, targets: Nested) -> int:
    if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
        return 0
    return number_of_classes(name, targets)


def _collated(items: Sequence[Nested], request: Request) -> Nested:
    try:
        return default_collate(list(items))
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"{request.name}: its samples cannot be stacked to mini-batches ({reason}); return a DataLoader with a "
            "collate_fn that forms them"
        ) from error
