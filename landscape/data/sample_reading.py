"""Read samples of Python objects: what is asked for, and how a sample becomes a pair of tensors."""

import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from landscape.checkpoints.user_code import fixed_rng, guarded, rng_states
from landscape.data import decoding, sampling
from landscape.data.dataset import Images, number_of_classes, square_side
from landscape.data.preprocessing import Resize, default_normalisation
from landscape.data.structure import TARGETS, BatchLayout, Nested, first_of, tensors_in
from landscape.probe import derived_seed

SEED = 0  # of random transforms
SHOWN = 4  # fields in a note
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """Which samples of an object are asked for, and how they are read."""

    name: str  # of the object, for messages and results
    samples: sampling.Samples = None  # how many: a number, a share such as "10%", None or "all" for all
    image_size: int | None = None  # side of pictures; None: by the size of the first
    resize: Resize | None = None  # of pictures
    layout: Callable[[], BatchLayout] = BatchLayout  # what goes to the model, and what to the loss; called if needed
    batch_size: int = 128  # of samples that are not one tensor each, which are never divided anew
    whole: bool = False  # the loss takes the whole batch, so that none of its entries may be left out
    ordered: bool = False  # samples keep the order of their source, see `sampling.subset`

    def read(self, what: str, sample: Nested) -> tuple[Nested, Nested]:
        """Inputs and targets of a sample or mini-batch, which messages call `what`."""
        pair = isinstance(sample, tuple | list) and len(sample) == 2
        if pair and not isinstance(sample[0], tuple | list | Mapping):
            return sample[0], sample[1]
        parts = self.layout().read(f"{self.name}: {what}", sample)
        if isinstance(sample, Mapping) and not self.whole and not self.layout().called_by_loss:
            inputs = parts[0].values() if isinstance(parts[0], Mapping) else ()
            used = {id(value) for value in (*parts, *inputs)}
            left = (n for n, v in sample.items() if isinstance(v, Tensor | np.ndarray) and id(v) not in used)
            if unused := tuple(map(str, left)):
                _note_unused(self.name, unused)
        return parts

    def is_pair(self, sample: Nested, parts: tuple[Nested, Nested]) -> bool:
        """Whether a sample, read as `parts`, is one input and one target tensor, picture or number, and that is all."""
        only = not self.whole or (isinstance(sample, tuple | list) and len(sample) == 2)
        return only and all(map(_is_plain, parts)) and parts[0] is not parts[1]

    def tensors(self, what: str, sample: Nested) -> "tuple[Tensor, Tensor, Request]":
        """A sample as two tensors, pictures decoded; and the request for the other samples, with the same size."""
        value, target = self.read(what, sample)
        pictured = value.size if isinstance(value, Image.Image) else None
        value, size = _decoded(f"{self.name}: {what}", value, self.image_size, self.resize)
        request = self if size == self.image_size else replace(self, image_size=size)
        if isinstance(target, Image.Image):
            target = _mask(f"{self.name}: target of {what}", target, None if pictured is None else size, self.resize)
        return self.tensor(f"input of {what}", value), self.tensor(f"target of {what}", target), request

    def tensor(self, what: str, value: Any) -> Tensor:
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            value = value.copy()  # such as a memory map: torch has no read-only tensors
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            got = f"{self.name}: {what} is a {type(value).__name__}"
            raise ValueError(f"{got}; expected a tensor, a picture or a number") from None

    def images(self, inputs: Tensor, targets: Tensor, source: Any, listed: np.ndarray | None) -> Images:
        """The samples with normalisation and number of classes; `listed`: class numbers of the whole source."""
        mean, std = default_normalisation(inputs)
        named = _named_classes(source)
        in_list = 0 if listed is None else number_of_classes(torch.from_numpy(listed))
        classes = max(number_of_classes(targets), named, in_list)
        return Images(inputs, targets, self.name, classes, square_side(inputs), mean, std, counted=not named)


@cache
def _note_unused(name: str, fields: tuple[str, ...]) -> None:
    """Say once which fields of the data are neither inputs of the model nor the target."""
    shown, more = ", ".join(fields[:SHOWN]), len(fields) - SHOWN
    _log.warning(
        "note: the model gets no %s%s of %s; a field is given to the parameter of forward that has its name",
        shown, f" and {more} more fields" * (more > 0), name,
    )  # fmt: skip


def read_item(name: str, dataset: Any, row: int) -> tuple[Any, bool]:
    """An item, read with a seed of its own, and whether random numbers were drawn."""
    with fixed_rng(derived_seed(SEED, "item", row)):
        before = rng_states()
        item = guarded(f"{name}: item {row}", partial(operator.getitem, dataset, row))
        return item, before != rng_states()


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):  # an encoded picture of `datasets`
        return True
    return not isinstance(value, tuple | list | dict) and not any(tensor is not value for tensor in tensors_in(value))


def listed_targets(dataset: Any) -> np.ndarray | None:
    """The class numbers of all items, (N,), where the dataset lists them; None if it has no usable list.

    They are its `targets`, or its `labels` or the second entries of its `samples`, as data sets of torchvision have
    them; a column of labels of a Hugging Face dataset; the second of two tensors of a TensorDataset; those of the data
    sets below a Subset or a ConcatDataset.
    """
    if isinstance(dataset, Subset):
        below = listed_targets(dataset.dataset)
        return None if below is None else below[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [listed_targets(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    found = _class_numbers(getattr(dataset, "targets", None), dataset)
    if found is not None:
        return found
    for listed in _other_lists(dataset):
        found = _class_numbers(listed, dataset)
        if found is not None and (found >= 0).all():  # a number for "without a label" is no class
            return found
    return None


def _other_lists(dataset: Any) -> Iterator[Any]:
    columns = getattr(dataset, "column_names", None)  # of Hugging Face's datasets
    if isinstance(columns, list | tuple):
        name = first_of(TARGETS, columns)
        yield None if name is None else list(dataset[name])
        return
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        yield dataset.tensors[1]
    yield getattr(dataset, "labels", None)
    samples = getattr(dataset, "samples", None)
    if isinstance(samples, list | tuple) and all(isinstance(s, tuple | list) and len(s) == 2 for s in samples):
        yield [target for _, target in samples]


def _class_numbers(listed: Any, dataset: Any) -> np.ndarray | None:
    if not isinstance(listed, list | tuple | np.ndarray | Tensor):
        return None
    try:
        found = np.asarray(listed)
    except (ValueError, TypeError, RuntimeError):  # ragged, or on an accelerator
        return None
    usable = found.shape == (len(dataset),) and found.dtype.kind in "iub"
    return found.astype(np.int64) if usable else None


def are_class_numbers(targets: Tensor) -> bool:
    """Whether every target is one integer."""
    return targets.ndim == 1 and not targets.is_floating_point()


def _named_classes(dataset: Any) -> int:
    """Number of classes that a dataset names, 0 if it names none."""
    if isinstance(dataset, Subset):
        return _named_classes(dataset.dataset)
    features = getattr(dataset, "features", None)  # of Hugging Face's datasets
    if isinstance(features, Mapping):
        label = next((features[name] for name in TARGETS if name in features), None)
        return len(getattr(label, "names", None) or ())
    return len(getattr(dataset, "classes", ()))


def _decoded(what: str, value: Any, image_size: int | None, resize: Resize | None) -> tuple[Any, int | None]:
    """The pixels of a picture (also encoded, as `datasets` gives it), or the value itself; and the size for all."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        value = decoding.opened(value["bytes"], what)
    if not isinstance(value, Image.Image):
        return value, image_size
    size = image_size or decoding.common_size([value.size])
    return guarded(what, partial(decoding.pixels, value, size, resize)), size


def _mask(what: str, picture: Image.Image, side: int | None, resize: Resize | None) -> np.ndarray:
    """The class numbers (H, W) in a picture of one channel; `side`: of its input, if that is a picture too.

    Raises:
        ValueError: it has several channels, or its input is resized, after which its pixels have no class numbers.
    """
    if picture.mode not in ("1", "L", "P", "I", "I;16"):
        raise ValueError(f"{what} is a picture of mode {picture.mode}, expected one class number per pixel (L or P); "
                         "return tensors")  # fmt: skip
    if side is not None and (picture.size != (side, side) or resize is not None):
        width, height = picture.size
        raise ValueError(
            f"{what} is a picture of {width} x {height}, and its input is resized to {side} x {side}; return tensors "
            "of equal size for both"
        )
    return np.asarray(picture).astype(np.int64)
