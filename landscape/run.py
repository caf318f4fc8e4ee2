"""From a question to stored numbers: pending units are measured, in-line or by any executor, and written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Executor, Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from landscape.probe import Autotunes, Estimates, Identifies, Plan, Probe, Reduces, Stages, Sweeps, Unit, Values, sweep
from landscape.probes import PROBES, probe_class
from landscape.results import group as groups
from landscape.results.group import Arrays, Outcome, Question, Reduce, safe
from landscape.results.versions import versions
from landscape.results.writer import Writer, discard, settle
from landscape.subject.loading import load_spec
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject

MERGE_SECONDS = 60.0
Report = Callable[[int, int], None]  # finished units, all units
Measured = Callable[[list[Unit]], Generator[tuple[Unit, Values]]]
_log = logging.getLogger(__name__)


def run(
    probe: Probe,
    subject: Subject,
    path: Path,
    *,
    label: str = "",
    executor: Executor | None = None,
    workers: int = 1,
    overwrite: bool = False,
    report: Report | None = None,
) -> Outcome:
    """Measure what is not yet in the file.

    Args:
        probe: what to measure.
        subject: on what.
        path: results file; made if absent.
        label: readable name of the group; default from the checkpoint.
        executor: measures chunks of units; the subject must then be loadable from its spec. None: in-line.
        workers: how many tasks the executor runs at once.
        overwrite: forget a stored answer first.
        report: told after every unit.

    Raises:
        store.Busy: another process is measuring the same question into the same file.
        ValueError, OSError: the file cannot be used; see the message.
    """
    probe, subject, choice = _settled(probe, subject, path, overwrite=overwrite)
    if not overwrite:
        subject = as_stored(probe, subject, path)
    asked = question(probe, subject, label or subject.label, choice)
    if overwrite:
        discard(path, asked)
    with Writer(path, asked, reduce_of=reduce_of) as writer:
        pending = writer.pending()
        total = math.prod(asked.plan.shape)
        done, merged = total - len(pending), time.monotonic()
        _announce(probe, subject, len(pending), workers)
        answers = partial(measured, probe, subject, executor=executor, workers=workers)
        results = _by_stages(probe, asked.plan, groups.read_group(path, writer.group), pending, answers)
        with contextlib.closing(results):  # an interrupt restores the model now, not when its traceback is forgotten
            for unit, values in results:
                writer.write(unit, values)
                done += 1
                if report is not None:
                    report(done, total)
                if time.monotonic() - merged > MERGE_SECONDS:
                    writer.merge()
                    merged = time.monotonic()
        group = writer.group
    return Outcome(group, total, len(pending))


def question(probe: Probe, subject: Subject, label: str, choice: Mapping[str, str] | None = None) -> Question:
    """The question a probe asks of a subject, with the record of a trial's choice."""
    attributes = {
        **(choice or {}),
        "parameters": json.dumps(asdict(probe), default=str),  # type: ignore[call-overload]
        **subject.attributes(),
        "versions": json.dumps(versions()),
    }
    if (seed := getattr(probe, "seed", subject.seed)) != subject.seed:  # one of several pairs of directions
        attributes["protocol"] = f"{subject.protocol} (seed {seed} of the {probe.name})"
    return Question(probe.name, safe(label), digest(probe, subject), probe.plan(subject), attributes)


def digest(probe: Probe, subject: Subject) -> str:
    """SHA-256, shortened, of all that can change the answer; a probe's `identity` stands for its parameters."""
    about = subject.identity(probe.uses)  # first: it notices weights that have changed
    parameters = probe.identity(subject) if isinstance(probe, Identifies) else asdict(probe)  # type: ignore[call-overload]
    asked = {"probe": probe.name, "parameters": parameters, **about}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:10]


def reduce_of(name: str, parameters: Mapping[str, Any]) -> Reduce | None:
    """The reduction that belongs to a stored group; none for a probe that this version does not have."""
    if name not in PROBES:
        return None
    probe = probe_class(name)(**parameters)
    return probe.reduce if isinstance(probe, Reduces) else None


def as_stored(probe: Probe, subject: Subject, path: Path) -> Subject:
    """The subject with the batch size of a half-finished answer, so that it resumes where batch size is free."""
    settle(path, reduce_of=reduce_of)
    group = groups.stored(path, probe.name, digest(probe, subject))
    if group is None or "batch_size" in probe.uses:
        return subject
    return subject.rebatched(groups.attribute(path, group, "batch_size"))


def _settled(probe: Probe, subject: Subject, path: Path, *, overwrite: bool) -> tuple[Probe, Subject, dict[str, str]]:
    """Probe and subject with what is left to a trial: as an earlier run recorded it, else as a trial chooses now.

    Returns:
        both, and the attributes that record the choice.
    """
    if not isinstance(probe, Autotunes):
        return probe, subject, {}
    undecided = digest(probe, subject)
    settle(path, reduce_of=reduce_of)
    group = None if overwrite else groups.chosen(path, probe.name, undecided)
    choices = json.loads(groups.attribute(path, group, "choices")) if group else probe.autotune(subject)
    if not choices:
        return probe, subject, {}
    probe, subject = probe.resolved(subject, choices)
    return probe, subject, {"chosen_for": undecided, "choices": json.dumps(choices)}


def _announce(probe: Probe, subject: Subject, units: int, workers: int) -> None:
    """Say how long it will take, where the probe can tell before it starts."""
    if isinstance(probe, Estimates) and units and _log.isEnabledFor(logging.INFO):
        _log.info("%s: %d units, %s", probe.name, units, probe.estimate(subject, units, workers))


def _by_stages(
    probe: Probe, plan: Plan, data: Arrays, pending: list[Unit], measured: Measured
) -> Generator[tuple[Unit, Values]]:
    """Every pending unit with its values: at once, or stage by stage where the probe decides by what is known."""
    step = probe.stage(data) if isinstance(probe, Stages) else None
    while step is not None and step.indices:
        with contextlib.closing(measured([plan.unit(index) for index in step.indices])) as results:
            for unit, values in results:
                for name, value in values.items():
                    data[name][unit.index] = value
                data["done"][unit.index] = 1
                yield unit, values
        step = probe.stage(data) if isinstance(probe, Stages) else None
    rest = [unit for unit in pending if not data["done"][unit.index]]
    if step is None:
        with contextlib.closing(measured(rest)) as results:
            yield from results
    else:
        for unit in rest:
            yield unit, {name: step.derived[name][unit.index] for name in plan.quantities}


def measured(
    probe: Probe | Sweeps, subject: Subject, units: list[Unit], executor: Executor | None, workers: int
) -> Generator[tuple[Unit, Values]]:
    """Units with their values, in-line in order, or as an executor finishes them."""
    if executor is None:
        yield from zip(units, sweep(probe, subject, units), strict=True)
        return
    if subject.spec is None:
        raise ValueError(
            "workers load the subject by themselves and cannot load a module made in Python; "
            "give a checkpoint with --model file.py:callable, or use one worker"
        )
    size = max(1, math.ceil(len(units) / (4 * workers)))
    chunks = [units[i : i + size] for i in range(0, len(units), size)]
    tasks: dict[Future[list[Values]], list[Unit]] = {}
    try:
        for chunk in chunks:  # a pool whose worker has died refuses here already
            tasks[executor.submit(_measure, probe, subject.spec, chunk)] = chunk
        for task in as_completed(tasks):
            yield from zip(tasks[task], task.result(), strict=True)
    except BrokenProcessPool:
        raise RuntimeError("a worker died (out of memory?); run again to resume, with fewer workers") from None
    finally:
        for task in tasks:
            task.cancel()


_loaded = threading.local()  # one subject per worker thread: probes write to the model's weights in place
_loading = threading.Lock()  # a fresh model draws from torch's only generator


def _measure(probe: Probe | Sweeps, spec: Spec, units: list[Unit]) -> list[Values]:
    if getattr(_loaded, "spec", None) != spec:
        with _loading:
            _loaded.subject, _loaded.spec = load_spec(spec), spec
    return list(sweep(probe, _loaded.subject, units))
