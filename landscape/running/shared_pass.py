"""Run several layer probes from one forward pass per mini-batch; each result equals that of its probe alone."""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from landscape.layers.forward_hooks import run_with_hooks
from landscape.options import OptionError
from landscape.probe import WHOLE, Probe, Shard, SharesPass, Unit, Values
from landscape.products.hessian_product import out_of_memory
from landscape.results.run_key import Outcome, RunKey
from landscape.running.executor import IN_PROCESS, Executor
from landscape.running.run import AnyWriter, Report, UnitResult, run_key, run_loop
from landscape.subject.loading.identity import weights_sha256
from landscape.subject.precision import exact_arithmetic
from landscape.subject.subject import Subject


class SharedPassProbe(Probe, SharesPass, Protocol):
    """A probe whose units are mini-batches, each measured by hooks on its forward pass."""


@dataclass(frozen=True)
class _OnePass:
    """Stands in for a probe: one forward pass per unit gives the values of every probe, by name.

    A probe that fails in it is measured alone, as each other is then, and has its error in place of values.
    """

    probes: tuple[SharedPassProbe, ...]

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        several, failed = list(self.probes), dict[str, str]()
        for unit in units:
            try:
                found = _values(several, subject, unit)
            except Exception as error:  # of a probe or of the network
                if len(several) == 1 or out_of_memory(error):
                    raise
                found = {}
                for probe in list(several):
                    try:
                        found |= _values([probe], subject, unit)
                    except Exception as own:
                        several.remove(probe)
                        failed[probe.name] = f"{own}" if isinstance(own, ValueError) else f"{type(own).__name__}: {own}"
                if not several:
                    raise
            yield {**found, **failed}


def _values(probes: Sequence[SharedPassProbe], subject: Subject, unit: Unit) -> dict[str, Values]:
    found = run_with_hooks(subject, unit.index, [probe.hooks(subject, unit.index) for probe in probes])
    return dict(zip((probe.name for probe in probes), found, strict=True))


def applicable(probes: Sequence[SharedPassProbe], subject: Subject) -> tuple[list[SharedPassProbe], dict[str, str]]:
    """The probes that apply to a network, and for each of the others the reason why not.

    Raises:
        ValueError: no probe applies; the reason of the first.
    """
    fit: list[SharedPassProbe] = []
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


@exact_arithmetic()
def run_shared_pass(
    probes: Sequence[SharedPassProbe],
    subject: Subject,
    path: Path | None,
    *,
    label: str = "",
    executor: Executor = IN_PROCESS,
    overwrite: bool = False,
    report: Report | None = None,
    shard: Shard = WHOLE,
    fsync: bool = False,
) -> list[Outcome]:
    """Measure what is not yet in the file, for several probes; arguments and errors as for `run`.

    A half-finished result resumes with its own batch size, in a pass of its own if necessary. `report` counts passes.
    A probe that fails loses its own result alone: its outcome says why.
    """
    weights = weights_sha256(subject)
    by_batch_size: dict[int, tuple[Subject, list[SharedPassProbe], list[RunKey]]] = {}
    for probe in probes:
        key, own = run_key(probe, subject, label, weights=weights, path=path, overwrite=overwrite)
        _, several, keys = by_batch_size.setdefault(own.batch_size, (own, [], []))
        several.append(probe)
        keys.append(key)
    outcomes: dict[str, Outcome] = {}
    failed: dict[str, str] = {}
    for own, several, keys in by_batch_size.values():
        results = partial(_results, several, own, executor, failed)
        here = own if executor.here else None
        kept: Any = {"overwrite": overwrite, "shard": shard, "fsync": fsync}
        filled = run_loop(path, keys, results, here=here, report=report, **kept)
        outcomes |= {probe.name: outcome for probe, outcome in zip(several, filled, strict=True)}
    return [replace(outcomes[probe.name], failed=failed.get(probe.name, "")) for probe in probes]


def _results(
    probes: Sequence[SharedPassProbe],
    subject: Subject,
    executor: Executor,
    failed: dict[str, str],
    writers: Sequence[AnyWriter],
    pending: Sequence[Sequence[Unit]],
) -> Generator[UnitResult]:
    """Every pending mini-batch with the values of the probes that lack it, those with the same gaps in one pass.

    The errors of those that fail are put into `failed`.
    """
    lacking: dict[tuple[int, ...], tuple[Unit, list[SharedPassProbe]]] = {}
    for probe, units in zip(probes, pending, strict=True):
        for unit in units:
            lacking.setdefault(unit.index, (unit, []))[1].append(probe)
    passes: dict[tuple[str, ...], tuple[list[SharedPassProbe], list[Unit]]] = {}
    for _, (unit, several) in sorted(lacking.items()):
        passes.setdefault(tuple(probe.name for probe in several), (several, []))[1].append(unit)
    for several, units in passes.values():
        with contextlib.closing(executor.measure(_OnePass(tuple(several)), subject, units)) as finished:
            for unit, found in finished:
                failed |= {name: values for name, values in found.items() if isinstance(values, str)}
                yield unit, {name: values for name, values in found.items() if not isinstance(values, str)}
