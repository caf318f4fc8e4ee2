"""Measure a probe in a group of processes: the first decides and writes, and the others follow it unit by unit.

Every process measures every unit, of whose products it makes its share. Between units the others wait for the first,
so that a stop or an error of it, such as a full disk, reaches them where they can end.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias

from landscape.probe import Probe, Unit, Values, sweep
from landscape.results.run_key import Outcome
from landscape.subject.process_group import Disconnected, ProcessGroup, portable
from landscape.subject.subject import Subject

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
            f"{len(subject)} samples are fewer than the {processes.size} processes; give more --samples, or torchrun "
            f"--nproc-per-node {len(subject)}"
        )
