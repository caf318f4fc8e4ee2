"""Run the forward pass in an execution mode (precision, memory format, compilation), and find the fastest."""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.data.memory import available_on
from landscape.data.structure import Nested, map_tensors, tensors_in
from landscape.subject import other_samples, weights_cache
from landscape.subject.graph_replay import GraphReplay, MemoryPool
from landscape.subject.precision import gpu_products
from landscape.subject.subject import Subject

Precision = Literal["fp32", "tf32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]
CACHE_BYTES = 2**30  # of prepared mini-batches in memory; the others are prepared anew at every access
CACHE_SHARE = 0.125  # of a GPU's free memory, if that is more
BATCH_SIZES = (32, 64, 128, 256, 512)
BENCHMARK_SAMPLES = 256
GAIN = 0.05  # smallest relative speed-up that counts: less is noise


@dataclass(frozen=True)
class ExecutionMode:
    """How the forward pass is computed; the default, in the model's own precision, is the reference."""

    precision: Precision = "fp32"  # bf16 by autocast, tf32 on a GPU; weights are written in full precision
    memory_format: MemoryFormat = "contiguous"  # of the inputs; convolutions then use it for their weights too
    compile: bool = False  # by `torch.compile`, which sees weights written in place


REFERENCE = ExecutionMode()


def is_control_point(index: tuple[int, ...], grid: tuple[int, int]) -> bool:
    """Whether a grid point is one of the 5 x 5 at which a faster mode is compared with the reference."""
    return all(i in _control_indices(n) for i, n in zip(index, grid, strict=True))


def control_points(grid: tuple[int, int]) -> int:
    """Number of control points: fewer than 25 on a grid that is narrower."""
    return math.prod(len(_control_indices(n)) for n in grid)


def _control_indices(count: int) -> set[int]:
    return set(np.linspace(0, count - 1, 5).round().astype(int).tolist())


@weights_cache.once_per_weights
def _compiled(subject: Subject) -> Callable[..., Any]:
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # that they are not used is on purpose
    return torch.compile(subject.model)


@weights_cache.once_per_weights
def _prepared(subject: Subject, memory_format: MemoryFormat) -> list[tuple[Nested, Nested]]:
    """The prepared mini-batches, which `ForwardPass` appends in order."""
    return []


@weights_cache.once_per_weights
def _replays(subject: Subject, mode: ExecutionMode, addresses: tuple[int, ...]) -> dict[Any, GraphReplay]:
    """The recorded forward passes, by shapes of the mini-batch, which `ForwardPass` adds; valid for these addresses."""
    return {}


@weights_cache.once_per_weights
def _pool(subject: Subject) -> MemoryPool:
    """The memory of all recorded passes: their results are read before the next one runs."""
    return MemoryPool()


class ForwardPass:
    """`forward(i) -> (outputs, targets)` of mini-batch i in an execution mode; prepared mini-batches are cached.

    On a GPU `losses_and_right` is recorded once per shape of mini-batches and replayed with the weights that are at
    their addresses then: the kernels are the same, launched at once. Recomputing batch norm's statistics
    (`batchnorm.refresh`) is not recorded. What a recording saves is not measured.
    """

    def __init__(self, subject: Subject, mode: ExecutionMode) -> None:
        if mode.compile and subject.members:
            raise ValueError("--compile runs one network, --mc-dropout averages several; give one of them")
        if mode.precision == "tf32" and not _on_gpu(subject):
            raise ValueError(f"--precision tf32 is of GPUs, and the device is {subject.device}; give fp32 or bf16")
        self._subject, self._mode = subject, mode
        self._model: Callable[..., Any] = _compiled(subject) if mode.compile else subject.model
        self._cache: list[tuple[Nested, Nested]] = _prepared(subject, mode.memory_format)
        tensors = itertools.chain(subject.model.parameters(), subject.model.buffers())
        on_host = subject.device.type == "cpu"
        self._room = CACHE_BYTES if on_host else max(CACHE_BYTES, CACHE_SHARE * available_on(subject.device))
        self._replayed = _on_gpu(subject) and not subject.traits.needs_graph
        addresses = tuple(tensor.data_ptr() for tensor in tensors) if self._replayed else ()
        self._replays: dict[Any, GraphReplay] = _replays(subject, mode, addresses)

    def __len__(self) -> int:
        return len(self._subject.batches)

    def __call__(self, i: int) -> tuple[Any, Nested]:
        inputs, targets = self._prepared(i)
        return self._outputs(inputs), targets

    def _outputs(self, inputs: Nested) -> Any:
        with self._products():
            outputs = self._subject.forward(self._model, inputs)
        return map_tensors(outputs, lambda t: t.float() if t.dtype == torch.bfloat16 else t)

    def losses_and_right(self, i: int) -> tuple[Tensor, Tensor]:
        """Loss and correctness of every sample of mini-batch i, (N,) each."""
        losses, right = self._measured(i)
        return losses.clone(), right.clone()  # the next replay writes to the same addresses

    def sums(self, i: int, origin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums (5,) over the samples of mini-batch i, whose losses elsewhere are `origin`, with `losses_and_right`.

        Of loss, loss^2, correct, rise and rise^2. The next call may write to the same addresses.
        """
        sums, losses, right = self._measured(i, origin)
        return sums, losses, right

    def check_again(self) -> None:
        """Compare the next replay of every shape with the plain forward pass: after weights were written, say."""
        for replay in self._replays.values():
            replay.check_again()

    def _measured(self, i: int, *origin: Tensor) -> Sequence[Tensor]:
        """Loss and correctness of mini-batch i, after the sums where there is an `origin`; replayed where it may be."""
        batch = self._prepared(i)
        if not self._replayed or not _of_tensors(batch):
            return self._computed(*batch, *origin)
        shapes = len(origin), _layout(batch)
        if shapes not in self._replays:

            def work(*tensors: Tensor) -> Sequence[Tensor]:
                remaining = iter(tensors)
                elsewhere = [next(remaining) for _ in origin]
                return self._computed(*map_tensors(batch, lambda _: next(remaining)), *elsewhere)

            self._replays[shapes] = GraphReplay(work, "forward pass", pool=_pool(self._subject))
        found: Sequence[Tensor] = self._replays[shapes].at([])(*origin, *tensors_in(batch))
        return found

    def _computed(self, inputs: Nested, targets: Nested, *origin: Tensor) -> list[Tensor]:
        losses, right = self._subject.losses_and_right(self._outputs(inputs), targets)
        losses, right = losses.detach().double(), right.detach()
        return [*(_sums(losses, right, one) for one in origin), losses, right]

    def _products(self) -> AbstractContextManager[object]:
        """Left after every mini-batch, because autocast caches the cast weights, and the weights move."""
        if self._mode.precision == "bf16":
            return torch.autocast(self._subject.device.type, dtype=torch.bfloat16)
        return gpu_products(tf32=self._mode.precision == "tf32") if _on_gpu(self._subject) else nullcontext()

    def _prepared(self, i: int) -> tuple[Nested, Nested]:
        if i < len(self._cache):
            return self._cache[i]
        inputs, targets = self._subject.batch(i)
        if self._mode.memory_format == "channels_last":
            last = torch.channels_last
            inputs = map_tensors(inputs, lambda t: t.contiguous(memory_format=last) if t.dim() == 4 else t)
        size = sum(tensor.nbytes for tensor in tensors_in(inputs))
        if i == len(self._cache) and (len(self._cache) + 1) * size <= self._room:
            self._cache.append((inputs, targets))
        return inputs, targets


def _sums(losses: Tensor, right: Tensor, origin: Tensor) -> Tensor:
    rise = losses - origin
    return torch.stack([losses.sum(), losses.square().sum(), right.sum(), rise.sum(), rise.square().sum()])


def _on_gpu(subject: Subject) -> bool:
    return subject.device.type == "cuda"


def _of_tensors(value: Nested) -> bool:
    """Whether a batch is nothing but tensors in tuples, lists and dicts, so that its shapes say all that may differ."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_of_tensors, value.values()))
    return type(value) is Tensor or (type(value) in (tuple, list) and all(map(_of_tensors, value)))


def _layout(value: Nested) -> Hashable:
    """Structure, shapes and dtypes of such a batch."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), tuple((name, _layout(item)) for name, item in items)


def forward_seconds(subject: Subject, mode: ExecutionMode, batches: Iterable[int] = (0,)) -> float:
    """Time of the forward pass and the losses of some mini-batches: the better of two, after a warm-up."""
    forward, indices, times = ForwardPass(subject, mode), list(batches), []
    with subject.evaluating():
        for _ in range(3):
            start = time.perf_counter()
            sums = [forward.losses_and_right(i)[0].sum() for i in indices]
            sums[-1].item()  # waits for the device
            times.append(time.perf_counter() - start)
    return min(times[1:])


def fastest(subject: Subject, mode: ExecutionMode) -> tuple[int, ExecutionMode]:
    """The fastest batch size and memory format in a short benchmark; the present ones unless others clearly win."""
    size, best = subject.batch_size, _samples_per_second(subject, mode)
    formats: tuple[MemoryFormat, ...] = ("contiguous", "channels_last")
    for other in [replace(mode, memory_format=name) for name in formats if name != mode.memory_format]:
        pictures = any(tensor.dim() == 4 for tensor in tensors_in(subject.batch(0)[0]))
        if pictures and (rate := _samples_per_second(subject, other)) > (1 + GAIN) * best:
            best, mode = rate, other
    sizes = [n for n in BATCH_SIZES if n != size and n <= len(subject)] if subject.images is not None else []
    for other_size in sizes:
        if (rate := _samples_per_second(other_samples.rebatched(subject, other_size), mode)) > (1 + GAIN) * best:
            best, size = rate, other_size
    return size, mode


def _samples_per_second(subject: Subject, mode: ExecutionMode) -> float:
    """Over some mini-batches of the full size."""
    count = max(1, min(len(subject) // subject.batch_size, BENCHMARK_SAMPLES // subject.batch_size))
    return min(count * subject.batch_size, len(subject)) / forward_seconds(subject, mode, range(count))
