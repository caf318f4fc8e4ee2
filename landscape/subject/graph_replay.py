"""Replay a computation of fixed shapes as a CUDA graph: one launch in place of hundreds.

Small networks and mini-batches leave a GPU idle while Python launches one kernel after the other. A CUDA graph records
the kernels once, with the addresses of their arguments, and launches all of them at once; new numbers are copied to
those addresses first. Unmeasured here: how much that saves, and which models cannot be recorded.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from landscape.data.memory import available_on

Function = Callable[..., Sequence[Tensor]]
Work = Callable[[], Sequence[Tensor]]
# (work, device) -> what replays it, and the tensors that hold the results after every replay
Capture = Callable[[Work, torch.device], tuple[Callable[[], None], Sequence[Tensor]]]
WARM_UPS = 3  # libraries choose kernels and allocate workspaces during the first runs
AGREES = 1e-5  # relative difference of a replay from the plain run: sums may be taken in another order
SHARE = 0.25  # of the free memory that copies of the kept tensors may take

_log = logging.getLogger(__name__)


class GraphReplay:
    """`function(*kept, *given) -> results` on tensors of fixed shapes, replayed on a CUDA device and plain elsewhere.

    `kept` are the same for many calls (of a mini-batch, say), `given` change with every call. One recording serves any
    number of `kept`: they are copied to the addresses of the first. The first replays are compared with the plain
    function on the device; if they differ, or recording fails, the function runs plainly from then on, which is logged.

    Args:
        function: without random numbers and without branches on values; must not keep or change its arguments.
        name: of the function, for messages.
        checks: replays that are compared.
        capture: how to record; None is `cuda_capture`, for CUDA devices alone.
    """

    def __init__(self, function: Function, name: str, *, checks: int = 1, capture: Capture | None = None) -> None:
        self._function, self._name, self._checks = function, name, checks
        self._capture = capture
        self._replay: Callable[[], None] | None = None
        self._failed = False
        self._owner: weakref.ref[BoundReplay] | None = None  # whose `kept` the addresses hold
        self._kept: list[Tensor] = []
        self._given: list[Tensor] = []
        self._results: Sequence[Tensor] = ()

    def at(self, kept: Sequence[Tensor]) -> BoundReplay:
        """The function with its first arguments; its results are overwritten by the next call of any `at`."""
        return BoundReplay(self, kept)

    def check_again(self) -> None:
        """Compare the next replay too."""
        self._checks = max(self._checks, 1)

    def run(self, bound: BoundReplay, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of a bound function, see `at`."""
        if not self._records(given):
            return self._function(*bound.kept, *given)
        try:
            self._load(bound, given)
        except (RuntimeError, AssertionError, AttributeError) as error:  # of CUDA, or of a torch without it
            self._give_up(str(error).strip().partition("\n")[0])
            return self._function(*bound.kept, *given)
        assert self._replay is not None
        self._replay()
        return self._checked() if self._checks else self._results

    def _records(self, given: Sequence[Tensor]) -> bool:
        if self._failed or not given or not (self._capture or given[0].device.type == "cuda"):
            return False
        return self._replay is None or [t.shape for t in given] == [t.shape for t in self._given]

    def _load(self, bound: BoundReplay, given: Sequence[Tensor]) -> None:
        """Record if necessary, and copy the arguments to the addresses of the recording."""
        owner = self._owner() if self._owner is not None else None
        if self._replay is None:
            device = given[0].device
            size = sum(tensor.nbytes for tensor in bound.kept)
            if self._capture is None and size > SHARE * available_on(device):
                raise RuntimeError("too little memory is free")
            kept, copies = [t.clone() for t in bound.kept], [t.clone() for t in given]
            work = lambda: self._function(*kept, *copies)  # noqa: E731
            self._replay, self._results = (self._capture or cuda_capture)(work, device)
            self._kept, self._given = kept, copies
        elif owner is not bound:
            if owner is not None:  # it may be called again
                owner.kept = [tensor.clone() for tensor in self._kept]
            _copy(self._kept, bound.kept)
        if owner is not bound:
            self._owner, bound.kept = weakref.ref(bound), self._kept
        _copy(self._given, given)

    def _checked(self) -> Sequence[Tensor]:
        """The results of the replay, or of the plain function if they differ."""
        plain = self._function(*self._kept, *self._given)
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
        self._failed, self._replay, self._results, self._kept, self._given = True, None, (), [], []


class BoundReplay:
    """A function of a `GraphReplay` with its first arguments."""

    def __init__(self, replay: GraphReplay, kept: Sequence[Tensor]) -> None:
        self._replay, self.kept = replay, kept

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        return self._replay.run(self, given)


def cuda_capture(work: Work, device: torch.device) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Record work as a CUDA graph on a stream of its own, after a few runs there.

    Raises:
        RuntimeError: the work cannot be recorded: it waits for the device, say, or memory is short.
    """
    present = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(present)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        # A wait inside a recording would leave the memory allocator in a state of recording; here it only raises.
        with _waits_are_errors():
            for _ in range(WARM_UPS):
                work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = work()
    present.wait_stream(stream)
    return graph.replay, results


@contextlib.contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Operations that wait for the device raise RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _size_and_error(plain: Sequence[Tensor], replayed: Sequence[Tensor]) -> tuple[float, float]:
    """Norm of the finite entries, and of the difference of all that are not equal, NaN to NaN included."""
    a, b = (torch.cat([t.detach().double().flatten() for t in tensors]) for tensors in (plain, replayed))
    same = (a == b) | (a.isnan() & b.isnan())
    finite, differences = torch.where(a.isfinite(), a, 0.0), torch.where(same, 0.0, a - b)
    size, error = torch.stack([finite.norm(), differences.norm()]).tolist()
    return size, error
