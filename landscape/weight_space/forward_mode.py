"""How mini-batches go through a model: precision, memory format, compilation; and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from landscape.subject.derived import once_per_weights
from landscape.subject.outputs import logits_in
from landscape.subject.subject import Subject

Precision = Literal["fp32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]
RESIDENT = 2**30  # bytes of prepared mini-batches kept on the device; beyond, each is prepared anew at every access
BATCH_SIZES = (32, 64, 128, 256, 512)
TRIAL_SAMPLES = 256
GAIN = 0.05  # what a trial must bring: less is noise


@dataclass(frozen=True)
class Manner:
    """How the forward pass is computed; the default is the model's own precision.

    Args:
        precision: bf16 computes under autocast from weights that are written in full precision.
        memory_format: of the inputs; convolutions then take the weights in that order too.
        compile: by `torch.compile`, which sees weights written in place.
    """

    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    compile: bool = False


@once_per_weights
def _compiled(subject: Subject) -> Callable[[Tensor], Any]:
    return torch.compile(subject.model)


@once_per_weights
def _prepared(subject: Subject, memory_format: MemoryFormat) -> list[tuple[Tensor, Tensor]]:
    """The prepared mini-batches, which `Forward` appends in order."""
    return []


class Forward:
    """The model on mini-batch i in some manner, `forward(i) -> (outputs, targets)`, mini-batches kept prepared.

    Args:
        subject: model and mini-batches.
        manner: see `Manner`.
    """

    def __init__(self, subject: Subject, manner: Manner) -> None:
        self._subject, self._manner = subject, manner
        self._model: Callable[[Tensor], Any] = subject.model
        if manner.compile:
            self._model = _compiled(subject)
        self._kept: list[tuple[Tensor, Tensor]] = _prepared(subject, manner.memory_format)

    def __len__(self) -> int:
        return len(self._subject.batches)

    def __call__(self, i: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._prepared(i)
        with self.context():
            outputs = logits_in(self._model(inputs))
        return outputs.float() if outputs.dtype == torch.bfloat16 else outputs, targets

    def context(self) -> AbstractContextManager[object]:
        """What the model runs under: nothing in full precision, so that those numbers are untouched.

        Left after every mini-batch: autocast keeps cast weights while it lasts, and they move.
        """
        if self._manner.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._subject.device.type, dtype=torch.bfloat16)

    def _prepared(self, i: int) -> tuple[Tensor, Tensor]:
        if i < len(self._kept):
            return self._kept[i]
        inputs, targets = self._subject.batch(i)
        if self._manner.memory_format == "channels_last" and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if i == len(self._kept) and (len(self._kept) + 1) * inputs.nbytes <= RESIDENT:
            self._kept.append((inputs, targets))
        return inputs, targets


def seconds(subject: Subject, manner: Manner, batches: Iterable[int] = (0,)) -> float:
    """Time of the forward pass of some mini-batches and their losses, after a warm-up; the better of two."""
    forward, chosen, found = Forward(subject, manner), list(batches), []
    with torch.inference_mode():
        for _ in range(3):
            start = time.perf_counter()
            sums = [subject.losses(*forward(i)).double().sum() for i in chosen]
            sums[-1].item()  # waits for the device
            found.append(time.perf_counter() - start)
    return min(found[1:])


def quickest(subject: Subject, manner: Manner) -> tuple[int, Manner]:
    """Batch size and memory format that passed a trial fastest; the present ones where nothing is clearly faster."""
    formats: tuple[MemoryFormat, ...] = ("contiguous", "channels_last")
    inputs = subject.batch(0)[0]
    found = (_rate(subject, manner), subject.batch_size, manner)
    for name in formats if inputs.dim() == 4 else ():
        if name != manner.memory_format:
            other = Manner(manner.precision, name, manner.compile)
            found = _better(found, (_rate(subject, other), subject.batch_size, other))
    manner = found[2]
    for size in BATCH_SIZES if subject.images is not None else ():
        if size != subject.batch_size and size <= len(subject):
            found = _better(found, (_rate(subject.rebatched(size), manner), size, manner))
    return found[1], found[2]


def _rate(subject: Subject, manner: Manner) -> float:
    """Samples per second over some mini-batches of the full size."""
    count = max(1, min(len(subject) // subject.batch_size, TRIAL_SAMPLES // subject.batch_size))
    return min(count * subject.batch_size, len(subject)) / seconds(subject, manner, range(count))


def _better(kept: tuple[float, int, Manner], tried: tuple[float, int, Manner]) -> tuple[float, int, Manner]:
    return tried if tried[0] > (1 + GAIN) * kept[0] else kept
