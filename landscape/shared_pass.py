"""Several probes from one forward pass per mini-batch; each answer is the one that its probe alone would give."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from landscape.layers.forward_hooks import one_pass
from landscape.options import OptionError
from landscape.probe import Listens, Probe, Unit, Values
from landscape.results.group import Outcome
from landscape.results.writer import Writer, discard
from landscape.run import MERGE_SECONDS, Report, as_stored, measured, question, reduce_of
from landscape.subject.subject import Subject


class ListeningProbe(Probe, Listens, Protocol):
    """A probe whose units are mini-batches, each measured by a listener of the forward pass."""


@dataclass(frozen=True)
class _OnePass:
    """What runs in place of a probe: one pass per unit, the values of every probe by its name."""

    probes: tuple[ListeningProbe, ...]

    def sweep(self, subject: Subject, units: Iterable[Unit]) -> Iterator[Values]:
        for unit in units:
            (i,) = unit.index
            found = one_pass(subject, i, [probe.listener(subject, i) for probe in self.probes])
            yield {probe.name: values for probe, values in zip(self.probes, found, strict=True)}


def fitting(probes: Sequence[ListeningProbe], subject: Subject) -> tuple[list[ListeningProbe], dict[str, str]]:
    """The probes that make sense for a network, and why each of the others does not.

    Raises:
        ValueError: none does; what the first says.
    """
    fit: list[ListeningProbe] = []
    refused: dict[str, ValueError] = {}
    for probe in probes:
        try:
            probe.plan(subject)
        except OptionError:
            raise
        except ValueError as error:
            refused[probe.name] = error
        else:
            fit.append(probe)
    if not fit:
        raise next(iter(refused.values()))
    return fit, {name: str(error) for name, error in refused.items()}


def run_together(
    probes: Sequence[ListeningProbe],
    subject: Subject,
    path: Path,
    *,
    label: str = "",
    executor: Executor | None = None,
    workers: int = 1,
    overwrite: bool = False,
    report: Report | None = None,
) -> list[Outcome]:
    """Measure what of the probes' answers is not yet in the file; arguments and errors as of `run`.

    Half-finished answers resume with the batch size that they began with, if need be in a pass of their own. The report
    counts passes.
    """
    subjects: dict[int, tuple[Subject, list[ListeningProbe]]] = {}
    for probe in probes:
        own = subject if overwrite else as_stored(probe, subject, path)
        subjects.setdefault(own.batch_size, (own, []))[1].append(probe)
    outcomes: dict[str, Outcome] = {}
    for own, several in subjects.values():
        outcomes |= _run(several, own, path, label or subject.label, executor, workers, overwrite, report)
    return [outcomes[probe.name] for probe in probes]


def _run(
    probes: Sequence[ListeningProbe],
    subject: Subject,
    path: Path,
    label: str,
    executor: Executor | None,
    workers: int,
    overwrite: bool,
    report: Report | None,
) -> dict[str, Outcome]:
    asked = {probe.name: question(probe, subject, label) for probe in probes}
    if overwrite:
        for one in asked.values():
            discard(path, one)
    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(Writer(path, one, reduce_of=reduce_of)) for name, one in asked.items()}
        pending = {name: {unit.index: unit for unit in writer.pending()} for name, writer in writers.items()}
        wanting: dict[tuple[str, ...], list[Unit]] = {}  # units by the probes that still lack them
        for i in range(len(subject.batches)):
            names = tuple(name for name, units in pending.items() if (i,) in units)
            if names:
                wanting.setdefault(names, []).append(pending[names[0]][i,])
        total = len(subject.batches)
        done, merged = total - sum(map(len, wanting.values())), time.monotonic()
        for names, units in wanting.items():
            several = _OnePass(tuple(probe for probe in probes if probe.name in names))
            with contextlib.closing(measured(several, subject, units, executor, workers)) as results:
                for unit, found in results:
                    for name, values in found.items():
                        writers[name].write(unit, values)
                    done += 1
                    if report is not None:
                        report(done, total)
                    if time.monotonic() - merged > MERGE_SECONDS:
                        for writer in writers.values():
                            writer.merge()
                        merged = time.monotonic()
        return {name: Outcome(writers[name].group, total, len(pending[name])) for name in writers}
