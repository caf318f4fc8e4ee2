"""The interface of executors, the one that measures in this process, and what happens to units that kill workers."""

from collections.abc import Generator, Sequence
from typing import Protocol

from landscape.probe import Probe, Sweeps, Unit, Values
from landscape.running.memory_limit import sweep_within_memory
from landscape.subject.subject import Subject

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
        """Units in order."""
        yield from zip(units, sweep_within_memory(probe, subject, units), strict=True)


IN_PROCESS = InProcess()


class PoisonUnits(RuntimeError):
    """Some units killed every worker that measured them, and are left pending."""

    def __init__(self, units: Sequence[Unit]) -> None:
        names = ", ".join(map(name_of, units[:NAMED])) + (", ..." if len(units) > NAMED else "")
        what = "1 unit" if len(units) == 1 else f"{len(units)} units"
        super().__init__(
            f"{what} killed a worker several times (out of memory?), left pending: {names}; everything else is stored: "
            "run the same command with --workers 1 or a smaller --batch-size to measure what is left"
        )


def name_of(unit: Unit) -> str:
    """A unit in words: its position and coordinates."""
    at = ", ".join(f"{name}={value}" for name, value in unit.at.items())
    return f"unit {'/'.join(map(str, unit.index))} ({at})"
