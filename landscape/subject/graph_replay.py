"""Replay a computation of fixed shapes as a CUDA graph: one launch in place of hundreds.

Small networks and mini-batches leave a GPU idle while Python launches one kernel after the other. A CUDA graph records
the kernels once, with the addresses of their arguments, and launches all of them at once; new numbers are copied to
those addresses first.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from landscape.data.memory import available_on
from landscape.discovery.operation_mode import OperationMode
from landscape.options import first_line

Function = Callable[..., Sequence[Tensor]]
Work = Callable[[], Sequence[Tensor]]
# (work, device) -> what replays it, and the tensors that hold the results after every replay
Capture = Callable[[Work, torch.device], tuple[Callable[[], None], Sequence[Tensor]]]
WARM_UPS = 3  # libraries choose kernels and allocate workspaces during the first runs
AGREES = 1e-5  # relative difference of a replay from the plain run: sums may be taken in another order
SHARE = 0.25  # of the free memory that copies of the kept tensors may take
# Operations that wait for the device, whatever they are given; what reads a mask waits too.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "is_nonzero", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave", "_linalg_check_errors",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
MOVING = {"_to_copy", "copy_"}

_log = logging.getLogger(__name__)
_failed_captures: list[str] = []  # of this process: after the first one nothing more is recorded


class MemoryPool:
    """Device memory that several recordings share: each overwrites what the others keep between their results.

    Recordings of one pool run one after the other, and results are read before the next one runs, unless they were
    there when that was recorded.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def capture(self, work: Work, device: torch.device) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """As `cuda_capture`, into this pool."""
        if not self._graphs:  # the memory ends with the last of them, and its handle cannot be used again
            self._handle = torch.cuda.graph_pool_handle()
        graph, results = cuda_capture(work, device, self._handle)
        self._graphs.add(graph)
        return graph.replay, results


class GraphReplay:
    """`function(*kept, *given) -> results` on tensors of fixed shapes, replayed on a CUDA device and plain elsewhere.

    `kept` are the same for many calls (of a mini-batch, say), `given` change with every call. One recording serves any
    number of `kept`: they are copied to the addresses of the first. The first replays are compared with the plain
    function on the device, and it is recorded with zeros, so that a kernel which the recording misses shows. If they
    differ, or recording fails, the function runs plainly from then on, which is logged.

    Args:
        function: without random numbers and without branches on values; must not keep or change its arguments.
        name: of the function, for messages.
        checks: replays that are compared.
        pool: the memory of the recording, its own by default.
        capture: how to record; None is that of the pool, for CUDA devices alone.
    """

    def __init__(
        self,
        function: Function,
        name: str,
        *,
        checks: int = 1,
        pool: MemoryPool | None = None,
        capture: Capture | None = None,
    ) -> None:
        self.function, self._name, self._checks = function, name, checks
        self._capture, self.pool = capture, pool or MemoryPool()
        self._failed = False
        self._owner: weakref.ref[BoundReplay] | None = None  # whose `kept` the addresses hold
        self._fixed = False  # whether those are the addresses of another recording's results
        self.forget()

    def forget(self) -> None:
        """Drop the recording with its memory; the next call records anew."""
        self._replay: Callable[[], None] | None = None
        self._given: list[Tensor] = []
        self._results: Sequence[Tensor] = ()
        if not self._fixed:
            self._kept: list[Tensor] = []
            self._owner = None

    def at(self, kept: Sequence[Tensor], *, of: "GraphReplay | None" = None) -> "BoundReplay":
        """The function with its first arguments; its results are overwritten by the next call of any `at`.

        `of`: what has computed them. Where it has replayed a recording they stay at their addresses and are not copied.
        """
        bound = BoundReplay(self, kept)
        if of is not None and kept and of.holds(kept[0]):
            if self._replay is None:
                self._kept, self._fixed = list(kept), True
            if all(a is b for a, b in zip(self._kept, kept, strict=True)):
                self._owner = weakref.ref(bound)
            else:
                bound.kept = [tensor.clone() for tensor in kept]
        return bound

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a result of the recording, which the next replay overwrites."""
        return any(tensor is result for result in self._results)

    def check_again(self) -> None:
        """Compare the next replay too."""
        self._checks = max(self._checks, 1)

    def release(self) -> None:
        """Copy what the addresses of `kept` hold to where it stays, before they are overwritten."""
        owner = self._owner() if self._owner is not None else None
        if owner is not None:  # it may be called again
            owner.kept = [tensor.clone() for tensor in self._kept]
        self._owner = None

    def run(self, bound: "BoundReplay", given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of a bound function, see `at`."""
        if not self._records(given):
            return self.function(*bound.kept, *given)
        try:
            self._load(bound, given)
            assert self._replay is not None
            self._replay()
            return self._checked() if self._checks else self._results
        except (RuntimeError, AssertionError, AttributeError) as error:  # of CUDA, or of a torch without it
            self._give_up(first_line(error))
        return self.function(*bound.kept, *given)

    def _records(self, given: Sequence[Tensor]) -> bool:
        if self._failed or not given or not (self._capture or given[0].device.type == "cuda"):
            return False
        return self._replay is None or [t.shape for t in given] == [t.shape for t in self._given]

    def _load(self, bound: "BoundReplay", given: Sequence[Tensor]) -> None:
        """Record if necessary, and copy the arguments to the addresses of the recording."""
        if self._replay is None:
            device = given[0].device
            size = 0 if self._fixed else sum(tensor.nbytes for tensor in bound.kept)
            if self._capture is None and size > SHARE * available_on(device):
                raise RuntimeError("too little memory is free")
            kept = self._kept if self._fixed else [torch.zeros_like(t) for t in bound.kept]
            zeros = [torch.zeros_like(t) for t in given]
            work = lambda: self.function(*kept, *zeros)  # noqa: E731
            self._replay, self._results = (self._capture or self.pool.capture)(work, device)
            self._kept, self._given = kept, zeros
        if self._owner is None or self._owner() is not bound:
            self.release()
            _copy(self._kept, bound.kept)
            self._owner, bound.kept = weakref.ref(bound), self._kept
        _copy(self._given, given)

    def _checked(self) -> Sequence[Tensor]:
        """The results of the replay, or of the plain function if they differ."""
        plain = self.function(*self._kept, *self._given)
        size, error = _size_and_error(plain, self._results)
        if size == 0.0:  # nothing can be compared
            return plain
        self._checks -= 1
        if not error <= AGREES * size:
            self._give_up(f"a replay of length {size:.2g} differs by {error:.2g}")
            return plain
        return self._results

    def _give_up(self, why: str) -> None:
        _log.debug("no CUDA graph of the %s (%s): its kernels are launched one by one", self._name, why)
        self.forget()
        self._failed = True


class BoundReplay:
    """A function of a `GraphReplay` with its first arguments."""

    def __init__(self, replay: GraphReplay, kept: Sequence[Tensor]) -> None:
        self._replay, self.kept = replay, kept

    @property
    def nbytes(self) -> int:
        """Of its first arguments."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.kept}.values())

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        return self._replay.run(self, given)


def cuda_capture(work: Work, device: torch.device, pool: Any) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """Record work as a CUDA graph on a stream of its own, after a trial and a few runs there; with its results.

    Raises:
        RuntimeError: the work cannot be recorded: it waits for the device, say, or memory is short.
    """
    if _failed_captures:
        raise RuntimeError(f"an earlier recording failed: {_failed_captures[0]}")
    present = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(present)
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return _captured(work, device, pool, stream, present)
    finally:
        present.wait_stream(stream)


def _captured(
    work: Work, device: torch.device, pool: Any, stream: torch.cuda.Stream, outside: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """As `cuda_capture`. A recording marks the state of the device's generator, and one that fails for good.

    Whatever draws from a marked state outside of the recording fails, so that the generator gets another one meanwhile.
    """
    with recordable():
        work()
    for _ in range(WARM_UPS - 1):
        work()
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[device.index]
    marked = generator.graphsafe_get_state()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            with torch.cuda.stream(outside):  # what records has no state to copy
                generator.graphsafe_set_state(generator.clone_state())
            results = work()
    except BaseException as error:
        _failed_captures.append(first_line(error))
        raise
    drawn = generator.get_offset()
    generator.graphsafe_set_state(marked)
    generator.set_offset(drawn)
    return graph, results


def empty_cache() -> None:
    """Give the memory back that torch keeps for reuse on CUDA devices.

    Not after a recording that failed: up to PyTorch 2.11 the allocator then believes that it is recording, and fails.
    """
    if torch.cuda.is_available() and not _failed_captures:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def recordable() -> Iterator[None]:
    """Refuse operations of this thread that wait for a device or copy from the host: they cannot be recorded.

    A wait inside a recording would leave the memory allocator in a state of recording; here it only raises.
    """
    with _Made(), _Operations():  # type: ignore[no-untyped-call]
        yield


class _Made(TorchFunctionMode):
    """Refuses tensors made on a device from numbers of the host, which operations do not show."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        numbers = {torch.tensor: args[:1], Tensor.new_tensor: args[1:2], torch.as_tensor: args[:1]}.get(func, ())
        if any(not isinstance(given, Tensor) for given in numbers) and not _on_host(made):
            raise RuntimeError("numbers of the host are copied")
        return made


class _Operations(OperationMode):  # type: ignore[no-untyped-call]
    """Refuses operations that wait, and copies between host and device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func._can_decompose():  # in inference mode; elsewhere autograd has split composite operations already
            with self:
                return func.decompose(*args, **(kwargs or {}))
        name, given = func.overloadpacket.__name__, _tensors((args, kwargs))
        masked = name in INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
        if (masked or name in WAITING) and not all(map(_on_host, given)):
            raise RuntimeError(f"{name} waits for the device")
        made = func(*args, **(kwargs or {}))
        if name in MOVING and len({_on_host(t) for t in (*given, *_tensors(made))}) > 1:
            raise RuntimeError(f"{name} copies between host and device")
        return made


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t is not s]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])


def _size_and_error(plain: Sequence[Tensor], replayed: Sequence[Tensor]) -> tuple[float, float]:
    """Norm of the finite entries, and of the difference of all that are not equal, NaN to NaN included."""
    norms = []
    for a, b in zip(plain, replayed, strict=True):  # one by one, for the memory of one of them
        a, b = a.detach().double(), b.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())
        norms.append(torch.stack([torch.where(a.isfinite(), a, 0.0).norm(), torch.where(same, 0.0, a - b).norm()]))
    size, error = torch.stack(norms).norm(dim=0).tolist()
    return size, error
