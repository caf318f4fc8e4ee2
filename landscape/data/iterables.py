"""Load data from a DataLoader, or from another iterable, read once; form batches of any structure from its samples."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, default_collate

from landscape.checkpoints.user_code import fixed_rng, guarded, rng_states
from landscape.data.dataset import BatchList, Images, count_of, number_of_classes, uneven
from landscape.data.memory import GrowingTensor, ShapesDiffer
from landscape.data.sample_reading import Request, are_class_numbers, listed_targets, read_item
from landscape.data.sampling import number_of
from landscape.data.structure import Nested, as_tensors, common_length, map_tensors, rows_of, tensors_in
from landscape.options import first_line, listed


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
    return BatchList(pairs, wholes, request.name, max(_classes(targets) for _, targets in pairs))


def _classes(targets: Nested) -> int:
    if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
        return 0
    return number_of_classes(targets)


def _collated(items: Sequence[Nested], request: Request) -> Nested:
    try:
        return default_collate(list(items))
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(
            f"{request.name}: its samples cannot be stacked to mini-batches ({reason}); return a DataLoader with a "
            "collate_fn that forms them"
        ) from error


SEED = 0  # of a loader's shuffle and of random transforms
SIZES = 6  # sizes of mini-batches that a message names
UNKNOWN = 2**62  # samples of an iterable without a length
_END = object()
_log = logging.getLogger(__name__)


def load(stream: Any, request: Request, *, batched: bool) -> Images | BatchList:
    """The first samples of an iterable, in its order; `batched`: it is known to give mini-batches.

    Raises:
        ValueError: it fails, is empty, or its samples differ in shape.
    """
    with fixed_rng(SEED):  # the same shuffle and transforms whenever it is loaded
        iterator = guarded(request.name, partial(iter, stream))
        started = rng_states()  # after the seed that a loader draws for its processes
        loaded = _load(stream, _items(request.name, iterator), request, batched)
        moved = rng_states() != started
    return replace(loaded, drawn=_draws(request.name, stream, moved))


def _draws(name: str, stream: Any, moved: bool) -> bool:
    """Whether the data set behind a loader transforms its items at random; `moved`: random numbers were drawn.

    These may be those of the shuffle, and other processes draw their own, so that one item is read again.
    """
    dataset = getattr(stream, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    try:
        return (moved or getattr(stream, "num_workers", 0) > 0) and read_item(name, dataset, 0)[1]
    except ValueError:  # its sampler gives other keys
        return False


def _load(stream: Any, items: Iterator[Any], request: Request, batched: bool) -> Images | BatchList:
    name, total = request.name, _length(stream, batched)
    if total is None and str(request.samples).endswith("%"):
        raise ValueError(f"{name} returned a {type(stream).__name__} without a length; give a number with --samples")
    if batched and isinstance(getattr(stream, "sampler", None), RandomSampler):
        _log.info("%s: the loader shuffles; it is read once, with the shuffle of seed %d", name, SEED)
    first = next(items, _END)
    if first is _END:
        raise ValueError(f"{name} gave 0 inputs and 0 targets; expected equally many, at least one")
    pair = request.read("batch 0" if batched else "item 0", as_tensors(first))
    if not batched and looks_batched(*pair):
        batched, total = True, None  # the length was that of the list
    wanted = _wanted(request, total)
    items = chain([first], items)
    of_all = partial(replace, available=total or 0)
    if request.is_pair(first, pair) and (not batched or common_length(pair) is not None):
        try:
            return of_all(_plain(stream, items, request, wanted, total, batched=batched))
        except ShapesDiffer:
            if not batched or iter(stream) is stream:  # which cannot be read from its start again
                raise
    elif batched:
        return of_all(from_batches(items, wanted, request))
    else:
        return of_all(from_items([item for item, _ in zip(items, range(wanted or UNKNOWN))], request))  # noqa: B905
    with fixed_rng(SEED):
        again = _items(name, guarded(name, partial(iter, stream)))
        return of_all(from_batches(again, wanted, request))


def _wanted(request: Request, total: int | None) -> int | None:
    """Number of samples asked for; None for all of an unknown number."""
    if total is None and request.samples in (None, "all"):
        return None
    return number_of(request.samples, total or UNKNOWN)


def _plain(
    stream: Any, items: Iterator[Any], request: Request, wanted: int | None, total: int | None, *, batched: bool
) -> Images:
    """Samples, or batches of them, whose inputs and targets are one tensor each."""
    rows = None if total is None else wanted or total
    inputs, targets = GrowingTensor(request.name, rows), GrowingTensor(request.name, rows)
    sizes: list[int] = []  # of the mini-batches
    for i, item in enumerate(items):
        what = f"{'batch' if batched else 'item'} {i}"
        if batched:
            parts = [request.tensor(what, part) for part in request.read(what, item)]
        else:
            *parts, request = request.tensors(what, item)
            parts = [part[None] for part in parts]
        if len(parts[0]) != len(parts[1]):
            raise ShapesDiffer(
                f"{request.name} gave {len(parts[0])} inputs and {len(parts[1])} targets; expected equally many"
            )
        sizes.append(len(parts[0]))
        for part, kept in zip(parts, (inputs, targets), strict=True):
            left = None if wanted is None else wanted - kept.count
            kept.append(part[:left], what=f"{request.name}: {what}")
        if wanted is not None and inputs.count >= wanted:
            break
    size = sizes[0] if sizes else 0
    if batched and inputs.count > min(request.batch_size, size) and (request.batch_size != size or uneven(sizes)):
        keeps = "" if uneven(sizes) else f"; --batch-size {size} (batch_size={size}) keeps them"
        held = listed(sizes, SIZES) if uneven(sizes) else size
        _log.warning(
            "note: the mini-batches of %s hold %s samples and are divided anew, %d in each%s", request.name, held,
            request.batch_size, keeps,
        )  # fmt: skip
    source = getattr(stream, "dataset", stream)
    images = request.images(inputs.tensor, targets.tensor, source, listed_targets(source) if batched else None)
    first = wanted is not None and (total is None or wanted < total)
    if first and are_class_numbers(images.targets) and len(images) >= 8 and bool((images.targets.diff() >= 0).all()):
        _log.warning(
            "%s: the first %d samples are sorted by class, %d to %d; shuffle the loader, or return its dataset, which "
            "is served class-balanced", request.name, len(images), int(images.targets[0]), int(images.targets[-1]),
        )  # fmt: skip
    return images


def _items(name: str, iterator: Iterator[Any]) -> Iterator[Any]:
    while (item := guarded(name, partial(next, iterator, _END))) is not _END:
        yield item


def _length(stream: Any, batched: bool) -> int | None:
    """Number of samples; None where the sampler or data set has no length (torch raises one of two errors)."""
    counted = getattr(stream, "sampler", None) or getattr(stream, "dataset", None) if batched else stream
    try:
        return len(counted)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
