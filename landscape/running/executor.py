"""The interface of executors, the one that measures in this process within its memory, and units that kill workers."""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import copy_context
from typing import Any, Protocol, TypeAlias, TypeVar

from landscape.options import counted
from landscape.probe import MICRO_BATCHES, Probe, Sweeps, Unit, Values, noting_micro_batches, sweep
from landscape.products.hessian_product import out_of_memory
from landscape.products.micro_batches import SampleTooLargeError, free_memory
from landscape.results.run_key import Outcome
from landscape.subject import other_samples, weights_cache
from landscape.subject.process_group import Disconnected, ProcessGroup, portable
from landscape.subject.subject import Subject

T = TypeVar("T")
_log = logging.getLogger(__name__)


def sweep_within_memory(probe: Probe | Sweeps, subject: Subject, units: Sequence[Unit]) -> Generator[Values]:
    """As `probe.sweep`; where memory runs out, mini-batches are halved and the unit is repeated.

    Only for probes whose units and numbers do not depend on the batch size. Where a unit is a mini-batch, its curvature
    is computed in micro-batches instead, whose mean is exact. Either way the number of parts stands beside the values,
    as `MICRO_BATCHES`, from the first divided unit on.

    Raises:
        RuntimeError, MemoryError: memory ran out, and mini-batches cannot be halved.
    """
    done, whole = 0, min(subject.batch_size, len(subject))
    while True:
        try:
            for values in _noted(probe, subject, units[done:], -(-whole // subject.batch_size)):
                yield values
                done += 1
            return
        except (RuntimeError, MemoryError) as error:
            divisible = out_of_memory(error) and not isinstance(error, SampleTooLargeError)
            smaller = _halved(subject) if divisible and _halvable(probe, subject, units[done]) else None
            if smaller is None:
                raise
        subject = smaller
        free_memory()
        _log.warning("out of memory: continuing with mini-batches of %d, %d before", subject.batch_size, whole)


def with_smaller_mini_batches(subject: Subject, work: Callable[[Subject], T]) -> T:
    """What work gives for a subject, or, where memory runs out, for the same samples in halved mini-batches."""
    while True:
        try:
            return work(subject)
        except (RuntimeError, MemoryError) as error:
            smaller = _halved(subject) if out_of_memory(error) else None
            if smaller is None:
                raise
        subject = smaller
        free_memory()


def _halvable(probe: Probe | Sweeps, subject: Subject, unit: Unit) -> bool:
    """Whether mini-batches of another size leave units and numbers of a probe as they are."""
    fits = isinstance(probe, Probe) and "batch_size" not in probe.uses and "batch" not in unit.at
    return fits and subject.processes.size == 1


def _halved(subject: Subject) -> Subject | None:
    """The subject in mini-batches of half the size; None where they cannot be halved.

    What was recorded and prepared for the larger ones would still fill the memory: it is dropped.
    """
    smaller = other_samples.rebatched(subject, max(min(subject.batch_size, len(subject)) // 2, 1))
    if smaller.batch_size == subject.batch_size:
        return None
    weights_cache.cache_of(subject).values.clear()
    return smaller


def _noted(probe: Probe | Sweeps, subject: Subject, units: Sequence[Unit], parts: int) -> Iterator[Values]:
    """Values of units, with the largest number of parts so far where that is above 1."""
    found = [parts]
    context = copy_context()  # a generator has no context of its own
    context.run(noting_micro_batches, found)
    results = context.run(sweep, probe, subject, units)
    while (values := context.run(next, results, None)) is not None:
        yield {**values, MICRO_BATCHES: max(found)} if max(found) > 1 else values


NAMED = 5  # units that an error names


class Executor(Protocol):
    """Measures units of a probe on a subject, each yielded as soon as it is known, in any order."""

    @property
    def workers(self) -> int:
        """How many measure at once."""

    @property
    def here(self) -> bool:
        """Whether it measures in this process, on the subject itself."""

    def measure(self, probe: Probe | Sweeps, subject: Subject, units: Sequence[Unit]) -> Generator[tuple[Unit, Values]]:
        """Every unit with its values.

        Raises:
            ValueError: the subject cannot be loaded elsewhere, or a worker has loaded another one.
            PoisonUnits: at the end, some units killed their workers again and again.
        """


class InProcess:
    """Measures in this process, one unit after the other."""

    workers, here = 1, True

    def measure(self, probe: Probe | Sweeps, subject: Subject, units: Sequence[Unit]) -> Generator[tuple[Unit, Values]]:
        yield from zip(units, sweep_within_memory(probe, subject, units), strict=True)


IN_PROCESS = InProcess()


class PoisonUnits(RuntimeError):
    """Some units killed every worker that measured them, and are left pending."""

    def __init__(self, units: Sequence[Unit]) -> None:
        names = ", ".join(map(name_of, units[:NAMED])) + (", ..." if len(units) > NAMED else "")
        super().__init__(
            f"{counted(len(units), 'unit')} killed a worker several times (out of memory?), left pending: {names}; "
            "everything else is stored: run the same command with --workers 1 or a smaller --batch-size to measure "
            "what is left"
        )


def name_of(unit: Unit) -> str:
    """A unit in words: its position and coordinates."""
    at = ", ".join(f"{name}={value}" for name, value in unit.at.items())
    return f"unit {'/'.join(map(str, unit.index))} ({at})"


Measure: TypeAlias = Callable[[Sequence[Unit]], Generator[tuple[Unit, Values]]]
NEXT = "next"  # tells the others to measure the next unit


def leading(processes: ProcessGroup, measure: Measure) -> Measure:
    """`measure` of the first process, with which the others measure the same units."""

    def measured(units: Sequence[Unit]) -> Generator[tuple[Unit, Values]]:
        processes.broadcast(list(units))
        with contextlib.closing(measure(units)) as found:
            for _ in units:
                processes.broadcast(NEXT)
                yield next(found)

    return measured


def follow(probe: Probe, subject: Subject) -> Outcome:
    """Measure what the first process measures, until it ends; its outcome.

    Raises:
        Exception: what ended the first process.
    """
    found: Iterator[Values] = iter(())
    while True:
        message: Any = subject.processes.broadcast(None)
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Outcome):
            return message
        if message == NEXT:
            next(found)
        else:
            found = sweep(probe, subject, message)


@contextlib.contextmanager
def followed(processes: ProcessGroup) -> Iterator[list[Outcome]]:
    """Tell the other processes the outcome that the block leaves in the list, or the error that ends it."""
    outcome: list[Outcome] = []
    try:
        yield outcome
    except Disconnected:
        raise
    except Exception as error:
        # Those that failed with it do not listen any more.
        with contextlib.suppress(Disconnected):
            processes.broadcast(portable(error))
        raise
    processes.broadcast(outcome[0])


def require_equal(subject: Subject, digest: str) -> None:
    """Reject a group whose processes do not measure the same, or of which some would have no samples.

    Raises:
        ValueError: in all of them.
    """
    processes = subject.processes
    processes.require_equal("weights, data or options", digest)
    if len(subject) < processes.size:
        raise ValueError(
            f"got {counted(len(subject), 'sample')} for {processes.size} processes, expected at least one each; give "
            f"more --samples, or torchrun --nproc-per-node {len(subject)}"
        )
