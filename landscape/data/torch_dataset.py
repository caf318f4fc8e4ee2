"""Load data from Python objects that a user's callable returns: a pair of tensors, a torch Dataset, a DataLoader."""

from __future__ import annotations

import logging
import operator
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset

from landscape.checkpoints.user_code import fixed_rng, guarded, import_callable, parameters_of, rng_states
from landscape.data import decoding
from landscape.data.dataset import Images, number_of_classes, square_side
from landscape.data.memory import GrowingTensor
from landscape.data.preprocessing import Resize, default_normalisation
from landscape.data.sampling import Samples, Split, balanced, subset
from landscape.options import parse_count
from landscape.probe import derived_seed

# Keys of samples that are dicts, as transformers, datasets and torchvision name them; the first that exists counts.
INPUTS = ("pixel_values", "image", "img", "images", "input", "inputs", "x", "data")
TARGETS = ("labels", "label", "fine_label", "target", "targets", "y", "class")
SPLIT = "split"  # parameter of a callable that returns the train or the test part
SEED = 0  # of a loader's shuffle and of random transforms
REREAD = 4  # items that are read a second time, to detect random ones
_END = object()
_log = logging.getLogger(__name__)


def load(spec: str, *, split: Split, samples: Samples, image_size: int | None, resize: Resize | None = None) -> Images:
    """The data that a callable returns, see `images_of`.

    It is called with `split="train"` or `split="test"` if it has a parameter of that name, else without arguments: its
    data are then one part, which serves as both. The global random generators are in fixed states, equal in every
    process.

    Raises:
        FileNotFoundError, ValueError: as `import_callable`; the callable needs other arguments, fails, or returns
            something else.
    """
    function = import_callable(spec)
    parameters = parameters_of(function)
    splits = SPLIT in parameters
    if other := [name for name, required in parameters.items() if required and name != SPLIT]:
        raise ValueError(
            f'{spec} needs the argument {other[0]}, but --data calls it without arguments, or with split="{split}" if '
            f"it takes a split; give {other[0]} a default value, or name a function that calls it"
        )
    with fixed_rng(derived_seed(0, "data")):
        made = guarded(spec, partial(function, split=split) if splits else function)
    images = images_of(spec, made, samples=samples, image_size=image_size, resize=resize)
    return replace(images, one_part=not splits)


def images_of(name: str, made: Any, *, samples: Samples, image_size: int | None, resize: Resize | None) -> Images:
    """The samples of an object, in memory.

    A pair of tensors `(inputs, targets)` is used as it is: its first rows, in its order. A Dataset with a length is
    served in the class-balanced order; if it lists its targets (`targets`, or a column of labels), only the selected
    items are read. Each item is read with the random generators in a fixed state, and refused if it still differs when
    read again. A DataLoader, or any other iterable, is read once: its first samples, in its order.

    A sample is a tuple of input and target (further entries are ignored) or a dict with keys of `INPUTS` and `TARGETS`.
    Pictures become uint8 images (`image_size` as for folders, by the size of the first, and `resize`); uint8 images
    get ImageNet's mean and std; floating-point tensors are taken to be normalised.

    Raises:
        ValueError: it is something else, fails, is empty, or does not fit into memory.
    """
    if isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(x, Tensor | np.ndarray) for x in made):
        return _from_pair(name, _tensor(f"{name}: inputs", made[0]), _tensor(f"{name}: targets", made[1]), samples)
    plain = isinstance(made, dict | str | tuple)
    batched = isinstance(made, DataLoader) or (hasattr(made, "dataset") and not hasattr(made, "__getitem__"))
    if not plain and not batched and hasattr(made, "__len__") and hasattr(made, "__getitem__"):
        return _from_dataset(name, made, samples, image_size, resize)
    if not plain and hasattr(made, "__iter__"):
        return _from_iterable(name, made, samples, image_size, resize, batched=batched)
    raise ValueError(
        f"{name} returned a {type(made).__name__}; expected a torch Dataset or DataLoader, "
        "or a pair of tensors (inputs, targets)"
    )


def _from_pair(name: str, inputs: Tensor, targets: Tensor, samples: Samples) -> Images:
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
        raise ValueError(
            f"{name} returned inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; "
            "expected the same number of rows in both, at least one"
        )
    count = parse_count("samples", samples, len(inputs))
    return Images(inputs[:count], targets[:count], name, number_of_classes(name, targets), square_side(inputs))


def _from_dataset(name: str, dataset: Any, samples: Samples, image_size: int | None, resize: Resize | None) -> Images:
    if not len(dataset):
        raise ValueError(f"{name} returned an empty {type(dataset).__name__}; expected at least one item")
    listed = _listed_targets(dataset)
    order = np.arange(len(dataset)) if listed is None else subset(listed, samples)
    inputs, targets = GrowingTensor(name, len(order)), GrowingTensor(name, len(order))
    drawn = False
    for row in order.tolist():
        one, wanted, image_size, random = _item(name, dataset, row, image_size, resize)
        drawn = drawn or random
        if inputs.count and (one.shape, wanted.shape) != (inputs.shape, targets.shape):
            shapes, first = ((tuple(x.shape), tuple(y.shape)) for x, y in ((one, wanted), (inputs, targets)))
            raise ValueError(f"{name}: item {row} has the shapes {shapes}, the first {first}; make them equal")
        inputs.append(one[None])
        targets.append(wanted[None])
    for row, before in zip(order[:REREAD].tolist(), inputs.tensor, strict=False):
        again = _item(name, dataset, row, image_size, resize)[0]
        if not torch.equal(again.nan_to_num(), before.nan_to_num()):
            raise ValueError(
                f"{name}: item {row} differs when it is read again, expected the same; switch its random transforms "
                "off, or draw them from the global generator of torch, numpy or Python, which is seeded here"
            )
    if drawn:
        _log.warning("note: %s transforms its items at random; each was drawn once, with a fixed seed", name)
    images = _images(name, inputs.tensor, targets.tensor, _named_classes(dataset), listed)
    if listed is not None:
        return images
    rows = balanced(images.targets.numpy()) if _class_numbers(images.targets) else order
    return images.take(rows[: parse_count("samples", samples, len(rows))])


def _item(
    name: str, dataset: Any, row: int, image_size: int | None, resize: Resize | None
) -> tuple[Tensor, Tensor, int | None, bool]:
    """Input and target, read with a seed of their own; the size for all; whether random numbers were drawn."""
    what = f"{name}: item {row}"
    with fixed_rng(derived_seed(SEED, "item", row)):
        before = rng_states()
        item = guarded(what, partial(operator.getitem, dataset, row))
        drawn = before != rng_states()
    value, target = _parts(what, item)
    value, size = _decoded(what, value, image_size, resize)
    return _tensor(f"{name}: input {row}", value), _tensor(f"{name}: target {row}", target), size, drawn


def _from_iterable(
    name: str, stream: Any, samples: Samples, image_size: int | None, resize: Resize | None, *, batched: bool
) -> Images:
    total = _length(stream, batched)
    if total is None and str(samples).endswith("%"):
        raise ValueError(f"{name} returned a {type(stream).__name__} without a length; give a number with --samples")
    wanted = None if total is None and samples in (None, "all") else parse_count("samples", samples, total or 2**62)
    if batched and isinstance(getattr(stream, "sampler", None), RandomSampler):
        _log.info("%s: the loader shuffles; it is read once, with the shuffle of seed %d", name, SEED)
    rows = None if total is None else wanted or total
    inputs, targets = GrowingTensor(name, rows), GrowingTensor(name, rows)
    with fixed_rng(SEED):  # the same shuffle and transforms whenever it is loaded
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
        raise ValueError(
            f"{name} gave {inputs.count} inputs and {targets.count} targets; expected equally many, at least one"
        )
    source = getattr(stream, "dataset", stream)
    listed = _listed_targets(source) if batched else None
    images = _images(name, inputs.tensor, targets.tensor, _named_classes(source), listed)
    first = wanted is not None and (total is None or wanted < total)
    if first and _class_numbers(images.targets) and len(images) >= 8 and bool((images.targets.diff() >= 0).all()):
        _log.warning(
            "%s: the first %d samples are sorted by class, %d to %d; shuffle the loader, or return its dataset, which "
            "is served class-balanced", name, len(images), int(images.targets[0]), int(images.targets[-1]),
        )  # fmt: skip
    return images


def _items(name: str, stream: Any) -> Iterator[Any]:
    iterator = guarded(name, partial(iter, stream))
    while (item := guarded(name, partial(next, iterator, _END))) is not _END:
        yield item


def _length(stream: Any, batched: bool) -> int | None:
    """Number of samples, None if unknown."""
    counted = getattr(stream, "sampler", None) or getattr(stream, "dataset", None) if batched else stream
    try:
        return len(counted)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _class_numbers(targets: Tensor) -> bool:
    return targets.ndim == 1 and not targets.is_floating_point()


def _parts(what: str, item: Any) -> tuple[Any, Any]:
    """Input and target of a sample, or of a batch."""
    if isinstance(item, Mapping):
        value, target = first_of(INPUTS, item), first_of(TARGETS, item)
        if value is not None and target is not None:
            return item[value], item[target]
        raise ValueError(
            f"{what} has the fields {', '.join(map(str, item))}; expected an input ({', '.join(INPUTS[:3])}, ...) "
            f"and a target ({', '.join(TARGETS[:3])}, ...)"
        )
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise ValueError(f"{what} is a {type(item).__name__}; expected a pair (input, target)")
    return item[0], item[1]


def first_of(known: Iterable[str], there: Container[str]) -> str | None:
    """The first of the known names that is there, None if there is none."""
    return next((name for name in known if name in there), None)


def _decoded(what: str, value: Any, image_size: int | None, resize: Resize | None) -> tuple[Any, int | None]:
    """The pixels of a picture (also encoded, as `datasets` gives it), or the value itself; and the size for all."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        value = decoding.opened(value["bytes"], what)
    if not isinstance(value, Image.Image):
        return value, image_size
    size = image_size or decoding.common_size([value.size])
    return guarded(what, partial(decoding.pixels, value, size, resize)), size


def _listed_targets(dataset: Any) -> np.ndarray | None:
    """The dataset's own list of class numbers, None if it has no usable one."""
    if isinstance(dataset, Subset):
        below = _listed_targets(dataset.dataset)
        return None if below is None else below[np.asarray(dataset.indices, np.int64)]
    listed = getattr(dataset, "targets", None)
    columns = getattr(dataset, "column_names", None)  # of Hugging Face's datasets
    if listed is None and isinstance(columns, list | tuple):
        name = first_of(TARGETS, columns)
        listed = None if name is None else list(dataset[name])
    if not isinstance(listed, list | tuple | np.ndarray | Tensor) or len(listed) != len(dataset):
        return None
    found = np.asarray(listed)
    return found.astype(np.int64) if found.ndim == 1 and found.dtype.kind in "iu" else None


def _named_classes(dataset: Any) -> int:
    """Number of classes that a dataset names, 0 if it names none."""
    if isinstance(dataset, Subset):
        return _named_classes(dataset.dataset)
    features = getattr(dataset, "features", None)  # of Hugging Face's datasets
    if isinstance(features, Mapping):
        label = next((features[name] for name in TARGETS if name in features), None)
        return len(getattr(label, "names", None) or ())
    return len(getattr(dataset, "classes", ()))


def _images(name: str, inputs: Tensor, targets: Tensor, named: int, listed: np.ndarray | None) -> Images:
    mean, std = default_normalisation(inputs)
    in_list = 0 if listed is None else number_of_classes(name, torch.from_numpy(listed))
    classes = max(number_of_classes(name, targets), named, in_list)
    return Images(inputs, targets, name, classes, square_side(inputs), mean, std, counted=not named)


def _tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # such as a memory map: torch has no read-only tensors
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} is a {type(value).__name__}; expected a tensor, a picture or a number") from None
