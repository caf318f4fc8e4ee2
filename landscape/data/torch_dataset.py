"""Data from Python objects: a pair of tensors, a torch Dataset, a DataLoader, anything that yields samples."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset

from landscape.checkpoints import user_code
from landscape.checkpoints.user_code import guarded, import_callable
from landscape.data import decoding
from landscape.data.dataset import Images
from landscape.data.memory import Resident
from landscape.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Resize
from landscape.data.sampling import Samples, balanced, subset
from landscape.options import parse_count
from landscape.probe import derived_seed

# Names of what a sample that is a dict brings, the first that it has: transformers', datasets', torchvision's.
INPUTS = ("pixel_values", "image", "img", "images", "input", "inputs", "x", "data")
TARGETS = ("labels", "label", "fine_label", "target", "targets", "y", "class")
SEED = 0  # of the order of a loader that shuffles
AGAIN = 4  # items of a dataset that are read a second time
_END = object()
_log = logging.getLogger(__name__)


def images_of(
    name: str, made: Any, *, samples: Samples, image_size: int | None, resize: Resize | None = None
) -> Images:
    """What a callable of the user's returned, as resident samples.

    A pair of tensors `(inputs, targets)` is used as it is: its first rows, in its order. A Dataset with a length is
    read once, in order, and served in the class-balanced order; where it lists its targets (`targets`, or a
    column of labels) only the chosen items are read; what an item draws at random it draws from a fixed seed, and an
    item that is another one when read again all the same is refused. A DataLoader, or anything else that can be
    iterated, is read once: its first samples, in its order. A sample is a tuple of input and target (what follows is
    ignored) or a dict with names of `INPUTS` and `TARGETS`. Pictures become uint8 images (`image_size` as for folders,
    the size rule applied to the first, and `resize`); uint8 images get ImageNet's mean and std; floating-point tensors
    count as normalised.

    Raises:
        ValueError: it is something else, fails, holds nothing, or does not fit into memory.
    """
    if isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(x, Tensor | np.ndarray) for x in made):
        return _pair(name, _tensor(f"{name}: inputs", made[0]), _tensor(f"{name}: targets", made[1]), samples)
    plain = isinstance(made, dict | str | tuple)
    batched = isinstance(made, DataLoader) or (hasattr(made, "dataset") and not hasattr(made, "__getitem__"))
    if not plain and not batched and hasattr(made, "__len__") and hasattr(made, "__getitem__"):
        return _materialised(name, made, samples, image_size, resize)
    if not plain and hasattr(made, "__iter__"):
        return _streamed(name, made, samples, image_size, resize, batched=batched)
    raise ValueError(
        f"{name} returned a {type(made).__name__}; expected a torch Dataset or DataLoader, "
        "or a pair of tensors (inputs, targets)"
    )


def _pair(name: str, inputs: Tensor, targets: Tensor, samples: Samples) -> Images:
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
        raise ValueError(
            f"{name} returned inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; "
            "expected the same number of rows in both, at least one"
        )
    count = parse_count("samples", samples, len(inputs))
    return Images(inputs[:count], targets[:count], name, classes_in(name, targets), side(inputs))


def _materialised(name: str, dataset: Any, samples: Samples, image_size: int | None, resize: Resize | None) -> Images:
    if not len(dataset):
        raise ValueError(f"{name} returned an empty {type(dataset).__name__}; expected at least one item")
    listed = _listed(dataset)
    order = np.arange(len(dataset)) if listed is None else subset(listed, samples)
    inputs, targets = Resident(name, len(order)), Resident(name, len(order))
    drawn = False
    for row in order.tolist():
        item, random = _item(name, dataset, row)
        drawn = drawn or random
        value, target = _parts(f"{name}: item {row}", item)
        value, image_size = _decoded(f"{name}: item {row}", value, image_size, resize)
        one, wanted = _tensor(f"{name}: input {row}", value), _tensor(f"{name}: target {row}", target)
        if inputs.count and (one.shape, wanted.shape) != (inputs.shape, targets.shape):
            shapes, first = ((tuple(x.shape), tuple(y.shape)) for x, y in ((one, wanted), (inputs, targets)))
            raise ValueError(f"{name}: item {row} has the shapes {shapes}, the first {first}; make them equal")
        inputs.append(one[None])
        targets.append(wanted[None])
    for row, before in zip(order[:AGAIN].tolist(), inputs.tensor, strict=False):
        value, _ = _parts(f"{name}: item {row}", _item(name, dataset, row)[0])
        again = _tensor(f"{name}: input {row}", _decoded(f"{name}: item {row}", value, image_size, resize)[0])
        if not torch.equal(again.nan_to_num(), before.nan_to_num()):
            raise ValueError(
                f"{name}: item {row} is another one when it is read again, expected the same; switch its random "
                "transforms off, or draw them from torch's, numpy's or Python's global generator, which is seeded here"
            )
    if drawn:
        _log.warning("note: %s transforms its items at random; each was drawn once, from a fixed seed", name)
    counts = [_named_classes(dataset), *([] if listed is None else [classes_in(name, torch.from_numpy(listed))])]
    images = _images(name, inputs.tensor, targets.tensor, counts)
    if listed is not None:
        return images
    whole = images.targets.ndim == 1 and not images.targets.is_floating_point()
    rows = balanced(images.targets.numpy()) if whole else order
    return images.take(rows[: parse_count("samples", samples, len(rows))])


def _item(name: str, dataset: Any, row: int) -> tuple[Any, bool]:
    """An item, drawn from a seed of its own where it is random, and whether it is."""
    with user_code.fixed_rng(derived_seed(SEED, "item", row)):
        before = user_code.rng_states()
        item = guarded(f"{name}: item {row}", partial(operator.getitem, dataset, row))
        return item, before != user_code.rng_states()


def _streamed(
    name: str, stream: Any, samples: Samples, image_size: int | None, resize: Resize | None, *, batched: bool
) -> Images:
    total = _length(stream, batched)
    if total is None and str(samples).endswith("%"):
        raise ValueError(f"{name} gives a {type(stream).__name__} without a length; ask for a number with --samples")
    wanted = None if total is None and samples in (None, "all") else parse_count("samples", samples, total or 2**62)
    if batched and isinstance(getattr(stream, "sampler", None), RandomSampler):
        _log.info("%s: the loader shuffles; it is read once, in the order of seed %d", name, SEED)
    rows = None if total is None else wanted or total
    inputs, targets = Resident(name, rows), Resident(name, rows)
    with user_code.fixed_rng(SEED):  # the same shuffle and the same transforms at every loading
        for i, item in enumerate(_items(name, stream)):
            what = f"{name}: {'batch' if batched else 'item'} {i}"
            value, target = _parts(what, item)
            if not batched:
                value, image_size = _decoded(what, value, image_size, resize)
            parts = [_tensor(f"{what}: input", value), _tensor(f"{what}: target", target)]
            for part, kept in zip(parts, (inputs, targets), strict=True):
                left = None if wanted is None else wanted - kept.count
                kept.append((part if batched else part[None])[:left], what=what)
            if wanted is not None and inputs.count >= wanted:
                break
    if not inputs.count or inputs.count != targets.count:
        raise ValueError(f"{name} gave {inputs.count} inputs and {targets.count} targets; expected some, one of each")
    source = getattr(stream, "dataset", stream)
    listed = _listed(source) if batched else None
    counts = [_named_classes(source), *([] if listed is None else [classes_in(name, torch.from_numpy(listed))])]
    images = _images(name, inputs.tensor, targets.tensor, counts)
    if wanted is not None and (total is None or wanted < total):
        _warn_sorted(name, images.targets)
    return images


def _items(name: str, stream: Any) -> Iterator[Any]:
    iterator = guarded(name, partial(iter, stream))
    while (item := guarded(name, partial(next, iterator, _END))) is not _END:
        yield item


def _length(stream: Any, batched: bool) -> int | None:
    """Number of samples, where it is known."""
    counted = getattr(stream, "sampler", None) or getattr(stream, "dataset", None) if batched else stream
    try:
        return len(counted)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _warn_sorted(name: str, targets: Tensor) -> None:
    whole = targets.ndim == 1 and not targets.is_floating_point()
    if whole and len(targets) >= 8 and bool((targets.diff() >= 0).all()):
        _log.warning(
            "%s: the first %d samples are in the order of their classes, %d to %d; shuffle the loader, or return its "
            "dataset, which is served class-balanced", name, len(targets), int(targets[0]), int(targets[-1]),
        )  # fmt: skip


def _parts(what: str, item: Any) -> tuple[Any, Any]:
    """Input and target of a sample, or of a batch."""
    if isinstance(item, Mapping):
        names = [next((name for name in known if name in item), None) for known in (INPUTS, TARGETS)]
        if None not in names:
            return item[names[0]], item[names[1]]
        raise ValueError(
            f"{what} has the fields {', '.join(map(str, item))}; expected an input ({', '.join(INPUTS[:3])}, ...) "
            f"and a target ({', '.join(TARGETS[:3])}, ...)"
        )
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise ValueError(f"{what} is a {type(item).__name__}; expected a pair (input, target)")
    return item[0], item[1]


def _decoded(what: str, value: Any, image_size: int | None, resize: Resize | None) -> tuple[Any, int | None]:
    """A picture, also an encoded one as `datasets` gives it, as pixels; and the size that all are to have."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        value = decoding.opened(value["bytes"], what)
    if not isinstance(value, Image.Image):
        return value, image_size
    size = image_size or decoding.own_size([value.size])
    return guarded(what, partial(decoding.pixels, value, size, resize)), size


def _listed(dataset: Any) -> np.ndarray | None:
    """The dataset's own list of class numbers, where it has a usable one."""
    if isinstance(dataset, Subset):
        below = _listed(dataset.dataset)
        return None if below is None else below[np.asarray(dataset.indices, np.int64)]
    listed = getattr(dataset, "targets", None)
    columns = getattr(dataset, "column_names", None)  # of Hugging Face's datasets
    if listed is None and isinstance(columns, list | tuple):
        name = next((name for name in TARGETS if name in columns), None)
        listed = None if name is None else list(dataset[name])
    if not isinstance(listed, list | tuple | np.ndarray | Tensor) or len(listed) != len(dataset):
        return None
    found = np.asarray(listed)
    return found.astype(np.int64) if found.ndim == 1 and found.dtype.kind in "iu" else None


def _named_classes(dataset: Any) -> int:
    """How many classes a dataset names, 0 where it names none."""
    if isinstance(dataset, Subset):
        return _named_classes(dataset.dataset)
    features = getattr(dataset, "features", None)  # of Hugging Face's datasets
    if isinstance(features, Mapping):
        label = next((features[name] for name in TARGETS if name in features), None)
        return len(getattr(label, "names", None) or ())
    return len(getattr(dataset, "classes", ()))


def _images(name: str, inputs: Tensor, targets: Tensor, counts: list[int]) -> Images:
    mean, std = normalisation(inputs)
    classes = max(classes_in(name, targets), *counts)
    return Images(inputs, targets, name, classes, side(inputs), mean, std, counted=not counts[0])


def _tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # a memory map, say: torch has no read-only tensors
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} is a {type(value).__name__}; expected a tensor, a picture or a number") from None


def classes_in(name: str, targets: Tensor) -> int:
    """Number of classes that targets speak of, 0 for a regression.

    Raises:
        ValueError: a class number is negative.
    """
    if targets.is_floating_point():
        return targets.shape[1] if targets.ndim == 2 else 0  # soft labels, or a regression
    if targets.min() < 0:
        raise ValueError(f"{name} has the target {int(targets.min())}; expected class numbers from 0 upward")
    return int(targets.max()) + 1


def side(inputs: Tensor) -> int:
    """Side of square images, else 0."""
    return inputs.shape[-1] if inputs.ndim == 4 and inputs.shape[-1] == inputs.shape[-2] else 0


def normalisation(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of uint8 images whose source names none: ImageNet's for three channels; empty for all else."""
    if inputs.dtype != torch.uint8 or inputs.ndim != 4:
        return (), ()
    if inputs.shape[1] == 3:
        return IMAGENET_MEAN, IMAGENET_STD
    return (0.5,) * inputs.shape[1], (0.5,) * inputs.shape[1]


def load(spec: str, *, samples: Samples, image_size: int | None, resize: Resize | None = None) -> Images:
    """The data that a callable without arguments returns, see `objects.images_of`.

    What it draws at random it draws from a fixed seed, the same in every process.

    Raises:
        FileNotFoundError, ValueError: as `named`; the callable fails, or returns something else.
    """
    function = import_callable(spec)
    with user_code.fixed_rng(derived_seed(0, "data")):
        made = guarded(spec, function)
    return images_of(spec, made, samples=samples, image_size=image_size, resize=resize)
