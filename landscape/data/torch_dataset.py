"""Load data from Python objects: tensors, a torch Dataset, a DataLoader, mini-batches of any structure."""

import logging
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from landscape.checkpoints.user_code import fixed_rng, guarded, import_callable, parameters_of
from landscape.data import iterables, memory, structure
from landscape.data.dataset import BatchList, Images, number_of_classes, square_side
from landscape.data.sample_reading import Request, are_class_numbers, listed_targets, read_item
from landscape.data.sampling import Split, balanced, number_of, shuffled, subset
from landscape.probe import derived_seed

SPLIT = "split"  # parameter of a callable that returns the train or the test part
REREAD = 4  # items that are read a second time, to detect random ones
_log = logging.getLogger(__name__)


def load(request: Request, split: Split) -> Images | BatchList:
    """The data that a callable returns, see `data_of`; the request's name is `file.py:callable`.

    It is called with `split="train"` or `split="test"` if it has a parameter of that name, else without arguments: its
    data are then one part, which serves as both. The global random generators are in fixed states, equal in every
    process.

    Raises:
        FileNotFoundError, ValueError: as `import_callable`; the callable needs other arguments, fails, or returns
            something else.
    """
    function = import_callable(request.name)
    parameters = parameters_of(function)
    splits = SPLIT in parameters
    if other := [name for name, required in parameters.items() if required and name != SPLIT]:
        raise ValueError(
            f"{request.name} needs the argument {other[0]}, but --data calls it without arguments, or with "
            f'split="{split}" if it takes a split; give {other[0]} a default value, or name a function that calls it'
        )
    with fixed_rng(derived_seed(0, "data")):
        made = guarded(request.name, partial(function, split=split) if splits else function)
    return replace(data_of(made, request), one_part=not splits)


def data_of(made: Any, request: Request) -> Images | BatchList:
    """The samples of an object, in memory.

    A pair of tensors `(inputs, targets)` is used as it is: its first rows, in its order; so is a tuple, dict or
    dataclass of tensors with equally many rows. Of a Dataset with a length only the selected items are read: the first
    of the class-balanced order if it lists its targets (see `listed_targets`), else as many random ones, always the
    same, which are then put into a balanced order (of targets that are not class numbers, its first items). Each item
    is read with the random generators in a fixed state, and refused if it still differs when read again. A DataLoader,
    or any other iterable of mini-batches or samples, is read once: its first samples, in its order.

    A sample is read as the request's `layout` says. Where inputs and targets are one tensor each, they become `Images`,
    which are divided into mini-batches of any size: pictures become uint8 images, uint8 images get ImageNet's mean and
    std, floating-point tensors are taken to be normalised. Anything else becomes a `BatchList`: the mini-batches of a
    loader as they are, other samples `batch_size` at a time.

    Raises:
        ValueError: it is something else, fails, is empty, or does not fit into memory.
    """
    read = _data_of(made, request)
    if read.drawn:
        _log.warning("note: %s transforms its items at random; each was drawn once, with a fixed seed", request.name)
    return read


def _data_of(made: Any, request: Request) -> Images | BatchList:
    pair = isinstance(made, tuple | list) and len(made) == 2
    if pair and all(isinstance(part, Tensor | np.ndarray) for part in made):
        return _from_pair(request, request.tensor("inputs", made[0]), request.tensor("targets", made[1]))
    if isinstance(made, str):
        raise _unknown(request, made)
    batched = isinstance(made, DataLoader) or (hasattr(made, "dataset") and not hasattr(made, "__getitem__"))
    whole = isinstance(made, dict | tuple | Tensor) or not (hasattr(made, "__iter__") or hasattr(made, "__getitem__"))
    if whole and not batched:
        return _from_whole(request, made)
    sized = not batched and hasattr(made, "__len__") and hasattr(made, "__getitem__")
    sized = sized and not isinstance(made, IterableDataset)  # it inherits a method `__getitem__` that only fails
    if sized and not (isinstance(made, list) and _holds_batches(request, made)):
        return replace(_from_dataset(request, made), available=len(made))
    if hasattr(made, "__iter__"):
        return iterables.load(made, request, batched=batched)
    raise _unknown(request, made)


def _unknown(request: Request, made: Any) -> ValueError:
    return ValueError(
        f"{request.name} returned a {type(made).__name__}; expected a torch Dataset or DataLoader, a list of "
        "mini-batches, or tensors (inputs, targets)"
    )


def _from_pair(request: Request, inputs: Tensor, targets: Tensor) -> Images:
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
        raise ValueError(
            f"{request.name} returned inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; "
            "expected the same number of rows in both, at least one"
        )
    count, classes = number_of(request.samples, len(inputs)), number_of_classes(targets)
    about = request.name, classes, square_side(inputs)
    return Images(inputs[:count], targets[:count], *about, available=len(inputs))


def _from_whole(request: Request, made: Any) -> Images | BatchList:
    converted = structure.as_tensors(made)
    rows = structure.common_length(converted)
    if not rows:
        lengths = [len(tensor) if tensor.dim() else "no" for tensor in structure.tensors_in(converted)]
        if not lengths:
            raise _unknown(request, made)
        raise ValueError(
            f"{request.name} returned tensors with {', '.join(map(str, lengths))} rows; expected the same number in "
            "all, at least one, or a list of mini-batches"
        )
    inputs, targets = request.read("its data", converted)
    if request.is_pair(made, (inputs, targets)):
        return _from_pair(request, inputs, targets)
    taken = iterables.from_rows(converted, number_of(request.samples, rows), request)
    return replace(taken, available=rows)


def _holds_batches(request: Request, made: list[Any]) -> bool:
    return len(made) > 0 and iterables.looks_batched(*request.read("item 0", structure.as_tensors(made[0])))


def _from_dataset(request: Request, dataset: Any) -> Images | BatchList:
    name = request.name
    if not len(dataset):
        raise ValueError(f"{name} returned an empty {type(dataset).__name__}; expected at least one item")
    listed, count = listed_targets(dataset), number_of(request.samples, len(dataset))
    unlisted = listed is None and not request.ordered
    drawing = unlisted and count < len(dataset)
    order = shuffled(len(dataset))[:count] if drawing else np.arange(count)
    order = order if listed is None else subset(listed, request.samples, ordered=request.ordered)
    reads = ((row, *read_item(name, dataset, row)) for row in order.tolist())
    first = next(reads)
    if not request.is_pair(first[1], request.read(f"item {first[0]}", first[1])):
        return _structured_items(request, dataset, (np.arange(count) if drawing else order).tolist())
    if drawing and not are_class_numbers(request.tensors(f"item {first[0]}", first[1])[1][None]):
        order, drawing = np.arange(count), False
        reads = ((row, *read_item(name, dataset, row)) for row in order.tolist())
        first = next(reads)
    if drawing:
        _log.info(
            "%s: the %s does not list its targets, so that %d of its %d items are drawn at random instead of "
            "class-balanced; give it a list `targets`", name, type(dataset).__name__, count, len(dataset),
        )  # fmt: skip
    inputs, targets = memory.GrowingTensor(name, len(order)), memory.GrowingTensor(name, len(order))
    drawn = False
    for row, item, random in chain([first], reads):
        one, wanted, request = request.tensors(f"item {row}", item)
        drawn = drawn or random
        if inputs.count and (one.shape, wanted.shape) != (inputs.shape, targets.shape):
            shapes, before = ((tuple(x.shape), tuple(y.shape)) for x, y in ((one, wanted), (inputs, targets)))
            raise ValueError(
                f"{name}: item {row} has the shapes {shapes}, the first {before}; make them equal, or return a "
                "DataLoader with a collate_fn that pads them"
            )
        inputs.append(one[None])
        targets.append(wanted[None])
    for row, kept in zip(order[:REREAD].tolist(), inputs.tensor, strict=False):
        item = read_item(name, dataset, row)[0]
        _refuse_unsteady(name, row, request.tensors(f"item {row}", item)[0], kept)
    numbers = targets.tensor if are_class_numbers(targets.tensor) else torch.empty(0)
    if listed is not None and not np.array_equal(listed[order], numbers.numpy()):
        listed = None  # a target transform makes other classes of them
    images = replace(request.images(inputs.tensor, targets.tensor, dataset, listed), drawn=drawn)
    return images.take(balanced(images.targets.numpy())) if unlisted and are_class_numbers(images.targets) else images


def _structured_items(request: Request, dataset: Any, rows: list[int]) -> BatchList:
    items, draws = zip(*(read_item(request.name, dataset, row) for row in rows), strict=True)
    for row, kept in zip(rows[:REREAD], items, strict=False):
        again = read_item(request.name, dataset, row)[0]
        _refuse_unsteady(request.name, row, structure.as_tensors(again), structure.as_tensors(kept))
    return replace(iterables.from_items(items, request), drawn=any(draws))


def _refuse_unsteady(name: str, row: int, again: structure.Nested, kept: structure.Nested) -> None:
    pairs = zip(structure.tensors_in(again), structure.tensors_in(kept), strict=True)
    if not all(torch.equal(new.nan_to_num(), old.nan_to_num()) for new, old in pairs):
        raise ValueError(
            f"{name}: item {row} differs when it is read again, expected the same; switch its random transforms off, "
            "or draw them from the global generator of torch, numpy or Python, which is seeded here"
        )
