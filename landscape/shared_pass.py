"""Run several layer probes from one forward pass per mini-batch; each result equals that of its probe alone."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from landscape.layers.forward_hooks import one_pass
from landscape.options import OptionError
from landscape.probe import Listens, Probe, Unit, Values
from landscape.results.run_key import Outcome
from landscape.results.writer import Writer
from landscape.run import Found, Report, as_stored, fill, measured, run_key
from landscape.subject.identity import weights_sha256
from landscape.subject.subject import Subject


class ListeningProbe(Probe, Listens, Protocol):
    """A probe whose units are mini-batches, each measured by a listener of the forward pass."""


@dataclass(frozen=True)
class _OnePass:
    """What runs in place of a probe: one pass per unit, the values of every probe by its name."""

    probes: tuple[ListeningProbe, ...]

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
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
    weights = weights_sha256(subject)
    subjects: dict[int, tuple[Subject, list[ListeningProbe]]] = {}
    for probe in probes:
        own = subject if overwrite else as_stored(probe, subject, path, weights)
        subjects.setdefault(own.batch_size, (own, []))[1].append(probe)
    outcomes: dict[str, Outcome] = {}
    for own, several in subjects.values():
        outcomes |= _run(several, own, weights, path, label or subject.label, executor, workers, overwrite, report)
    return [outcomes[probe.name] for probe in probes]


def _run(
    probes: Sequence[ListeningProbe],
    subject: Subject,
    weights: str,
    path: Path,
    label: str,
    executor: Executor | None,
    workers: int,
    overwrite: bool,
    report: Report | None,
) -> dict[str, Outcome]:
    def results(writers: Sequence[Writer], pending: Sequence[Sequence[Unit]]) -> Generator[Found]:
        units = {unit.index: unit for several in pending for unit in several}
        lacking: dict[tuple[ListeningProbe, ...], list[Unit]] = {}  # units by the probes that still lack them
        for i in range(len(subject.batches)):
            several = tuple(p for p, own in zip(probes, pending, strict=True) if any(u.index == (i,) for u in own))
            if several:
                lacking.setdefault(several, []).append(units[i,])
        for several, wanted in lacking.items():
            with contextlib.closing(measured(_OnePass(several), subject, wanted, executor, workers)) as finished:
                yield from finished

    keys = [run_key(probe, subject, label, weights=weights) for probe in probes]
    outcomes = fill(path, keys, results, overwrite=overwrite, report=report)
    return {probe.name: outcome for probe, outcome in zip(probes, outcomes, strict=True)}
