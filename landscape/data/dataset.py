"""Data sets in memory, and the mini-batches that probes and trainer read from them."""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import state_dict_sha256, tensors_sha256
from landscape.data import augment, memory
from landscape.data.structure import Nested, common_length, map_tensors, named_tensors, rows_of, tensors_in
from landscape.options import at_least, counted
from landscape.probe import derived_seed

_log = logging.getLogger(__name__)


def in_unit_range(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs in 0..255 over 255, the same bits on every device: a GPU would multiply by the inverse of a number."""
    return inputs.to(dtype) / torch.full((), 255.0, dtype=dtype, device=inputs.device)


@dataclass(frozen=True, eq=False)
class Images:
    """A data set as two tensors in memory."""

    inputs: Tensor  # (N, C, H, W) uint8 for images; else the tensor that the source gave, unchanged
    targets: Tensor  # (N,) int64, or the tensor that the source gave
    name: str  # as given to `load`
    classes: int  # number of classes, 0 for regression
    size: int  # H of square images, else 0
    mean: tuple[float, ...] = ()  # per channel, of inputs in [0, 1]; empty: inputs are used as they are
    std: tuple[float, ...] = ()  # likewise
    counted: bool = False  # `classes` is one more than the largest class number found; the data may have more
    # sizes (width, height) of the pictures before they were resized; empty if they were not, or not as asked for
    resized_from: Set[tuple[int, int]] = frozenset()
    one_part: bool = False  # the source has no train and test part of its own: both splits are the same samples
    drawn: bool = False  # the source transforms its samples at random; each was drawn once
    shifted: bool = False  # the source gave the tokens themselves as targets, which are now those after them
    available: int = 0  # samples that the source has, of which these were taken; 0 where it does not say

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def sequences(self) -> str:
        """For messages, how many sequences of how many tokens; "" for data other than tokens."""
        tokens = self.inputs.dim() == 2 and not self.inputs.is_floating_point() and self.targets.dim() == 2
        return f"{counted(len(self), 'sequence')} of {counted(self.inputs.shape[1], 'token')}" if tokens else ""

    def to(self, device: torch.device | str) -> "Images":
        """The same images on another device."""
        moved = replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))
        vars(moved)["_copies"] = moved.inputs is not self.inputs and moved.targets is not self.targets
        return moved

    def for_device(self, device: torch.device) -> "Images":
        """As `to`; inputs that a GPU has no room for stay on the host, and `Batches` copies its mini-batches."""
        if not memory.stays_on_host(self.name, self.inputs.nbytes, device):
            return self.to(device)
        return replace(self, inputs=memory.page_locked(self.inputs), targets=self.targets.to(device))

    def take(self, rows: np.ndarray) -> "Images":
        index = torch.from_numpy(rows).to(self.inputs.device)
        return replace(self, inputs=self.inputs[index], targets=self.targets[index])

    def normalised(self, inputs: Tensor) -> Tensor:
        """Inputs x (N, C, H, W) in 0..255 as float32 (x / 255 - mean) / std; x itself without a mean."""
        if not self.mean:
            return inputs
        # Made on the CPU: creating them on a GPU would wait for all of its pending work.
        mean, std = (
            torch.tensor(values).view(-1, 1, 1).to(inputs.device, non_blocking=True) for values in (self.mean, self.std)
        )
        return (in_unit_range(inputs, torch.float32) - mean) / std

    @property
    def sha256(self) -> str:
        """SHA-256 of everything that reaches a model: bytes, shapes and dtypes of both tensors, mean and std."""
        return _hashed(self, [("", self.inputs), ("", self.targets)], f"{self.mean};{self.std}")


class BatchSource(Sequence[tuple[Nested, Nested]]):
    """Mini-batches `(inputs, targets)`, the same ones every time, and what is known of the data they are from."""

    images: Images | None  # the data set in memory; None where the samples are not rows of two tensors
    name: str  # as given to `load`
    one_part: bool  # not divided into train and test
    available: int  # samples that the source has; 0 where it does not say

    @property
    def in_words(self) -> str:
        """The name of the data, for messages."""
        return "the data in memory" if self.name == "in memory" else self.name

    @property
    @abstractmethod
    def sha256(self) -> str:
        """SHA-256 of the samples as they are now."""

    def forget_sha256(self) -> None:
        """Compute the digest again when it is asked for: arrays that share the tensors' memory change silently."""


class CallersBatches(BatchSource):
    """Any sequence of mini-batches that was made in Python."""

    images, name, one_part, available = None, "in memory", False, 0

    def __init__(self, batches: Sequence[tuple[Nested, Nested]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: Any) -> Any:
        return self.batches[index]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all tensors. Raises ValueError: the batches are others when they are read again."""
        digests = {
            state_dict_sha256({f"{i}/{path}": t for i in range(len(self)) for path, t in named_tensors(self[i])})
            for _ in range(2)
        }
        if len(digests) > 1:
            raise ValueError(
                f"batches ({type(self.batches).__name__}) gives others when it is read again, expected the same every "
                "time; materialise it once with list(...)"
            )
        return digests.pop()

    def forget_sha256(self) -> None:
        vars(self).pop("sha256", None)


@dataclass(frozen=True, eq=False)
class Batches(BatchSource):
    """Mini-batches `(inputs, targets)`: batch i holds rows i*B to (i+1)*B - 1, normalised.

    They are on the device of the targets; inputs that stay on the host (`Images.for_device`) are copied there at every
    access. An augmentation is drawn from (seed, i) at every access, so that it is always the same without being kept
    in memory: every grid point and every matvec sees common random numbers.
    """

    images: Images
    batch_size: int
    augmentation: augment.Augmentation | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("batch_size", self.batch_size, 1)

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Tensor, Tensor]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor] | list[tuple[Tensor, Tensor]]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index]  # counts negative indices and raises IndexError as lists do
        rows = slice(i * self.batch_size, (i + 1) * self.batch_size)
        targets = self.images.targets[rows]
        inputs = self.images.inputs[rows].to(targets.device, non_blocking=True)
        if self.augmentation is not None:
            seed = derived_seed(self.seed, i)
            inputs, targets = self.augmentation(inputs, targets, classes=self.images.classes, seed=seed)
        return self.images.normalised(inputs), targets

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.images.name

    @property
    def one_part(self) -> bool:  # type: ignore[override]
        return self.images.one_part

    @property
    def available(self) -> int:  # type: ignore[override]
        return self.images.available

    @property
    def sha256(self) -> str:
        return self.images.sha256

    def forget_sha256(self) -> None:
        _forget(self.images)


@dataclass(frozen=True, eq=False)
class BatchList(BatchSource):
    """Mini-batches of any structure in memory, as their source formed them; they are never split up or joined."""

    pairs: Sequence[tuple[Nested, Nested]]  # inputs of the model and targets of the loss
    wholes: Sequence[Nested]  # the same batches as the source gave them; they share their tensors with the pairs
    name: str  # as given to `load`
    classes: int = 0  # number of classes; 0 for targets other than class numbers
    one_part: bool = False  # they are not divided into train and test
    drawn: bool = False  # the source transforms its samples at random; each was drawn once
    shifted: bool = False  # the source gave the tokens themselves as targets, which are now those after them
    available: int = 0  # samples that the source has, of which these were taken; 0 where it does not say
    images: ClassVar[None] = None  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        return list(self.pairs[index]) if isinstance(index, slice) else self.pairs[index]

    def to(self, device: torch.device | str) -> "BatchList":
        """The same mini-batches on another device."""
        moved: dict[int, Tensor] = {}  # tensors that a pair shares with its whole are moved once

        def move(tensor: Tensor) -> Tensor:
            return moved.setdefault(id(tensor), tensor.to(device))

        pairs, wholes = ([map_tensors(part, move) for part in parts] for parts in (self.pairs, self.wholes))
        made = replace(self, pairs=pairs, wholes=wholes)
        vars(made)["_copies"] = all(id(tensor) != source for source, tensor in moved.items())
        return made

    def for_device(self, device: torch.device) -> "BatchList":
        """As `to`; mini-batches that a GPU has no room for together stay on the host."""
        size = sum(tensor.nbytes for tensor in {id(t): t for t in tensors_in([*self.pairs, *self.wholes])}.values())
        return self if memory.stays_on_host(self.name, size, device) else self.to(device)

    def labelled(self, rows: Sequence[Tensor], nouns: str, lack: str) -> "BatchList":
        """The rows with a label of every mini-batch, by a boolean (N,) for each, without mini-batches that have none.

        Raises:
            ValueError: no row has a label, or a tensor of a mini-batch that lacks one has not a row per sample.
        """
        lost, total, parts = sum(int((~kept).sum()) for kept in rows), sum(map(len, rows)), list[Any]()
        what = f"{lost} of {total} {nouns} of {self.name} have {lack}"
        if lost == total:
            raise ValueError(f"{what}; check its labels")
        for part, kept in zip(zip(self.pairs, self.wholes, strict=True), rows, strict=True):
            if not bool(kept.all()) and common_length(part) != len(kept):
                raise ValueError(f"{what}, and mini-batches have tensors without a row for each; leave these out")
            parts += [part if bool(kept.all()) else rows_of(part, kept)] if bool(kept.any()) else []
        if lost:
            _log.warning("note: %s and are left out", what)
        pairs, wholes = zip(*parts, strict=True)
        return replace(self, pairs=pairs, wholes=wholes) if lost else self

    def samples(self, i: int) -> int | None:
        """Number of samples of mini-batch i; None where only the loss can tell, as for packed graphs."""
        return count_of(self.pairs[i][1], self.wholes[i])

    @property
    def sha256(self) -> str:
        """SHA-256 of all tensors, with their shapes, dtypes and places in the batches."""
        parts = ({"pair": pair, "whole": whole} for pair, whole in zip(self.pairs, self.wholes, strict=True))
        named = [(f"{path}:", tensor) for i, part in enumerate(parts) for path, tensor in named_tensors(part, str(i))]
        return _hashed(self, named)

    def forget_sha256(self) -> None:
        _forget(self)


def uneven(sizes: Sequence[int]) -> bool:
    """Whether mini-batches of these sizes have no common one: a last, smaller one does not count."""
    return len({*sizes[:-1]}) > 1 or any(size > sizes[0] for size in sizes)


def count_of(targets: Nested, whole: Nested) -> int | None:
    """Number of samples of a mini-batch with such targets; None where its structure does not tell."""
    if isinstance(targets, Tensor) and targets is not whole:
        return len(targets) if targets.dim() else 1
    return common_length(whole)


def version(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Numbers that change when a tensor is changed in place."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _forget(samples: Images | BatchList) -> None:
    """Compute a digest again when it is asked for, unless the samples are copies on a device: nobody writes to those.

    To hash gigabytes there takes seconds.
    """
    if not vars(samples).get("_copies"):
        vars(samples).pop("_digest", None)


def _hashed(samples: Images | BatchList, named: Sequence[tuple[str, Tensor]], end: str = "") -> str:
    """`tensors_sha256`, computed again where its tensors, which may be the caller's, have changed in place."""
    now = version(tensor for _, tensor in named)
    known: tuple[tuple[int, ...], str] | None = vars(samples).get("_digest")
    if known is None or known[0] != now:
        known = vars(samples)["_digest"] = now, tensors_sha256(named, end)
    return known[1]


def number_of_classes(targets: Tensor) -> int:
    """Number of classes that targets refer to, 0 for a regression and other targets of a loss of its own."""
    if targets.is_floating_point():
        return targets.shape[1] if targets.ndim == 2 else 0  # soft labels, or a regression
    return 0 if _lowest(targets) < 0 else int(targets.max()) + 1


def lowest_target(data: Images | BatchList) -> int:
    """The lowest of targets that are one integer per sample, which classes have none of below 0; else 0."""
    every = [data.targets] if isinstance(data, Images) else [targets for _, targets in data.pairs]
    return min(map(_lowest, every))


def _lowest(targets: Nested) -> int:
    """As `lowest_target`: of several numbers per sample, such as those of tokens, negative ones are padding."""
    if not isinstance(targets, Tensor) or targets.ndim != 1 or not len(targets):
        return 0
    return 0 if targets.is_floating_point() or targets.is_complex() else int(targets.min())


def square_side(inputs: Tensor) -> int:
    """Side of square images, else 0."""
    return inputs.shape[-1] if inputs.ndim == 4 and inputs.shape[-1] == inputs.shape[-2] else 0
