"""Run a probe into a results file: measure the pending units, in-line or by any executor, and write them."""

import contextlib
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xarray as xr

from landscape import models
from landscape.headline import stored_headlines
from landscape.options import OptionError
from landscape.probe import (
    WHOLE,
    Autotunes,
    Estimates,
    Identifies,
    Plan,
    Probe,
    Reduces,
    Shard,
    Stages,
    Unit,
    Values,
    report_units,
)
from landscape.probes import PROBES, is_known, probe_class
from landscape.products.derivative_check import disagreement
from landscape.reporting.event_log import unlogged
from landscape.reporting.progress import forecast_level
from landscape.results import group as groups
from landscape.results import protocols, unmerged_journals
from landscape.results.run_key import OPTIONS, Arrays, Outcome, Reduce, RunKey, chosen, readable_label, versions
from landscape.results.writer import MemoryWriter, Writer, discard
from landscape.running.executor import (
    IN_PROCESS,
    Executor,
    Measure,
    follow,
    followed,
    leading,
    require_equal,
    with_smaller_mini_batches,
)
from landscape.subject import other_samples, precision, threads
from landscape.subject.loading import checks, sanity_check
from landscape.subject.loading.identity import attributes as attributes_of
from landscape.subject.loading.identity import digest as digest
from landscape.subject.loading.identity import weights_sha256
from landscape.subject.loading.load import load
from landscape.subject.subject import Subject

MERGE_SECONDS = 60.0
AnyWriter: TypeAlias = Writer | MemoryWriter
Report = Callable[[int, int], None]  # finished units, all units
UnitResult: TypeAlias = tuple[Unit, Mapping[str, Values]]  # a finished unit and its values, by the name of the probe
_log = logging.getLogger(__name__)


@precision.exact_arithmetic()
def run(
    probe: Probe,
    subject: Subject,
    path: Path | None,
    *,
    label: str = "",
    executor: Executor = IN_PROCESS,
    overwrite: bool = False,
    report: Report | None = None,
    shard: Shard = WHOLE,
    fsync: bool = False,
) -> Outcome:
    """Measure what is not yet in the file, which is created if absent; without a file (None) measure all.

    An executor other than this process needs a subject that its workers can load from its spec.
    `overwrite` discards a stored result first; `label` is the readable name of the result, also of one that is stored
    already, by default the subject's. A `shard` measures its part of the units alone. With `fsync` each finished unit
    is flushed to the disk.

    Raises:
        OptionError: the probe cannot be divided into shards.
        Busy: another process is writing the same result into the same file.
        ValueError, OSError: the file cannot be used; see the message.
    """
    probe_class(type(probe))
    weights = weights_sha256(subject)  # hashed once, for every digest of this run
    probe, subject, choices = _resolved(probe, subject, path, weights, overwrite=overwrite)
    if not overwrite:
        subject = with_stored_batch_size(probe, subject, path, weights)
    key = run_key(probe, subject, label, choices, weights=weights)
    if shard != WHOLE:
        _require_shardable(probe, key)
    if subject.processes.size > 1:
        require_equal(subject, key.digest)
        if subject.processes.rank > 0:
            with threads.suitable_threads(subject):
                return follow(probe, subject)

    def results(writers: Sequence[AnyWriter], pending: Sequence[Sequence[Unit]]) -> Generator[UnitResult]:
        if isinstance(probe, Estimates) and pending[0] and _log.isEnabledFor(logging.INFO):
            seconds, words = _estimate(probe, subject, pending[0], executor)
            _log.log(forecast_level(seconds), "%s %s: %s", probe.name, label or subject.label, words)
        arrays = writers[0].arrays()
        measure: Measure = partial(executor.measure, probe, subject)
        if subject.processes.size > 1:
            measure = leading(subject.processes, measure)
        with contextlib.closing(_by_stages(probe, key.plan, arrays, pending[0], measure)) as finished:
            for unit, values in finished:
                yield unit, {probe.name: values}

    here = subject if executor.here else None
    how: dict[str, Any] = {"overwrite": overwrite, "report": report, "shard": shard, "fsync": fsync}
    with followed(subject.processes) as end:
        (outcome,) = run_loop(path, [key], results, here=here, **how)
        end.append(outcome)
    return outcome


def run_loop(
    path: Path | None,
    keys: Sequence[RunKey],
    results: Callable[[Sequence[AnyWriter], Sequence[Sequence[Unit]]], Generator[UnitResult]],
    *,
    here: Subject | None,
    overwrite: bool,
    report: Report | None,
    shard: Shard = WHOLE,
    fsync: bool = False,
) -> list[Outcome]:
    """The run loop: write what `results` measures of the pending units, and merge it about once a minute.

    There is one key per result; several results have the same units. `results` takes the writers and the pending
    units of each key and yields the finished units. `here`: the subject if it is measured in this process.
    """
    if overwrite and path is not None:
        for key in keys:
            discard(path, key)
    with contextlib.ExitStack() as stack:
        writers: list[AnyWriter] = []
        for key in keys:
            writers.append(_writer(path, key, fsync=fsync))
            stack.enter_context(writers[-1])
        pending = [shard.part(writer.key.plan, writer.pending()) for writer in writers]
        total = len(range(shard.number - 1, math.prod(keys[0].plan.shape), shard.of))
        done = total - len({unit.index for units in pending for unit in units})
        merged = time.monotonic()
        report_units(done, total)
        if here is not None and any(pending):
            stack.enter_context(threads.suitable_threads(here))
        # Closed before the writers: an interrupt restores the model now, not when its traceback is forgotten.
        for unit, found in stack.enter_context(contextlib.closing(results(writers, pending))):
            for writer in writers:
                if writer.key.probe in found:
                    writer.write(unit, found[writer.key.probe])
            done += 1
            if report is not None:
                report(done, total)
            if time.monotonic() - merged > MERGE_SECONDS:
                for writer in writers:
                    writer.merge()
                merged = time.monotonic()
        pairs = zip(writers, pending, strict=True)
        return [Outcome(writer.group, total, len(units), writer.result()) for writer, units in pairs]


def _estimate(probe: Estimates, subject: Subject, pending: Sequence[Unit], executor: Executor) -> tuple[float, str]:
    return with_smaller_mini_batches(subject, lambda own: probe.estimate(own, len(pending), executor.workers))


def _writer(path: Path | None, key: RunKey, *, fsync: bool) -> AnyWriter:
    if path is None:
        return MemoryWriter(key, reduce_of=reduce_of)
    return Writer(path, key, reduce_of=reduce_of, sync=fsync)


def _require_shardable(probe: Probe, key: RunKey) -> None:
    """Refuse shards of a run whose units, or whose question, follow from what only the whole run knows."""
    chosen_for = key.attributes.get("chosen_for", key.digest)
    if chosen_for != key.digest:
        choices = key.attributes["choices"]
        raise OptionError(
            "--shard needs the same question on every machine, and --tune and --budget choose it by the speed of this "
            f"one; give what they chose here as options instead: {choices}"
        )
    with MemoryWriter(key, reduce_of=reduce_of) as empty:
        if isinstance(probe, Stages) and probe.stage(empty.arrays()) is not None:
            raise OptionError(
                f"--shard cannot divide this {probe.name}: it decides by all units so far which one is next; leave out "
                f"{probe.staged_by}, which asks for that, or --shard"
            )


def run_key(
    probe: Probe, subject: Subject, label: str, choices: Mapping[str, str] | None = None, *, weights: str | None = None
) -> RunKey:
    """The key of a probe's result on a subject, with the record of what autotuning chose; `weights` as in `digest`.

    `label` is the user's; without one, a new result has the subject's.
    """
    if probe.deterministic:
        checks.refuse_stochastic(subject)
    attributes = {
        **(choices or {}),
        "parameters": json.dumps(asdict(probe), default=str),  # type: ignore[call-overload]
        **attributes_of(subject),
        **sanity_check.premises(subject, weights),
        protocols.USES: ",".join(probe.uses),
        protocols.SEVERAL: probe.several,
        "errors_over": probe.errors_over,
        **({"certified": json.dumps(dict(probe.certified))} if probe.certified else {}),
        "versions": json.dumps(versions()),
        **stored_headlines(probe.headlines),
    }
    if probe.name in PROBES and (spec := subject.spec) is not None and (spec.checkpoint or spec.model):
        unasked = _unasked(probe, subject, choices)
        asked = {name: value for name, value in chosen(probe, spec).items() if name not in unasked}
        attributes[OPTIONS] = json.dumps(asked, default=str)
    if probe.differentiates and (found := disagreement(subject)):
        attributes["derivatives"] = found
    plan = probe.plan(subject)
    said = str(plan.facts.get("protocol", attributes["protocol"]))
    if probe.params:
        said += f", parameters matching {probe.params}"
    if probe.seed not in (None, subject.seed):  # one of several pairs of directions
        said += f" (seed {probe.seed} of the {probe.name})"
    plan = replace(plan, facts={**plan.facts, "protocol": said})
    name = readable_label(label or subject.label)
    return RunKey(probe.name, name, digest(probe, subject, weights), plan, attributes, relabel=bool(label))


def _unasked(probe: Probe, subject: Subject, choices: Mapping[str, str] | None) -> set[str]:
    """What autotuning chose that changes no number, so that no command needs it."""
    made = json.loads(choices["choices"]) if choices else {}
    known = probe.identity(subject) if made and isinstance(probe, Identifies) else {}
    return {name for name in made if known.get(name, name) is None}


def reduce_of(name: str, parameters: Mapping[str, Any]) -> Reduce | None:
    """The `reduce` of a stored group's probe; None where it has none or the probe is unknown."""
    if not is_known(name):
        return None
    try:
        probe = probe_class(name)(**parameters)
    except (TypeError, OptionError):
        _log.warning("note: summaries of a %s are not computed again: its parameters are not those of the probe", name)
        return None
    return probe.reduce if isinstance(probe, Reduces) else None


def with_stored_batch_size(probe: Probe, subject: Subject, path: Path | None, weights: str) -> Subject:
    """The subject with the batch size of the half-finished result to resume, where batch size cannot matter."""
    if path is None:
        return subject
    undecided = digest(probe, subject, weights)

    def stored() -> int:
        unmerged_journals.merge_orphans(path, reduce_of=reduce_of)
        group = groups.stored_group(path, probe.name, undecided)
        if group is None or "batch_size" in probe.uses:
            return subject.batch_size
        return int(groups.attribute(path, group, "batch_size"))

    return other_samples.rebatched(subject, subject.processes.on_main_process(stored))


def _resolved(
    probe: Probe, subject: Subject, path: Path | None, weights: str, *, overwrite: bool
) -> tuple[Probe, Subject, dict[str, str]]:
    """Probe and subject with the choices of autotuning, an earlier run's or made now, and attributes to record them."""
    if not isinstance(probe, Autotunes):
        return probe, subject, {}
    undecided, on_main_process = digest(probe, subject, weights), subject.processes.on_main_process

    def made() -> Mapping[str, Any]:
        assert isinstance(probe, Autotunes)
        stored = None if path is None else _stored_choices(probe, path, undecided, overwrite=overwrite)
        if stored is not None:
            return stored
        with threads.suitable_threads(subject):
            return probe.autotune(subject)

    choices = on_main_process(made)
    if not choices:
        return probe, subject, {}
    probe, subject = probe.resolved(subject, choices)
    return probe, subject, {"chosen_for": undecided, "choices": json.dumps(choices)}


def _stored_choices(probe: Probe, path: Path, undecided: str, *, overwrite: bool) -> Mapping[str, Any] | None:
    """What autotuning chose for an earlier run of the same run key; None if there was none."""
    unmerged_journals.merge_orphans(path, reduce_of=reduce_of)
    group = None if overwrite else groups.stored_group(path, probe.name, undecided, autotuned=True)
    choices: Mapping[str, Any] | None = json.loads(groups.attribute(path, group, "choices")) if group else None
    return choices


def _by_stages(
    probe: Probe,
    plan: Plan,
    arrays: Arrays,
    pending: Sequence[Unit],
    measure: Callable[[Sequence[Unit]], Generator[tuple[Unit, Values]]],
) -> Generator[tuple[Unit, Values]]:
    """Every pending unit with its values: all at once, or in the stages that the probe derives from stored arrays."""
    step = probe.stage(arrays) if isinstance(probe, Stages) else None
    while step is not None and step.indices:
        with contextlib.closing(measure([plan.unit(index) for index in step.indices])) as results:
            for unit, values in results:
                for name in plan.quantities:
                    arrays[name][unit.index] = values[name]
                arrays["done"][unit.index] = 1
                yield unit, values
        step = probe.stage(arrays) if isinstance(probe, Stages) else None
    rest = [unit for unit in pending if not arrays["done"][unit.index]]
    if step is None:
        with contextlib.closing(measure(rest)) as results:
            yield from results
    else:
        for unit in rest:
            yield unit, {name: step.derived[name][unit.index] for name in plan.quantities}


def result_of_small_network(probe: Probe) -> xr.Dataset:
    """A result whose every number is 1; an empty one where the probe does not apply to the network."""
    try:
        with unlogged("landscape"), MemoryWriter(run_key(probe, _small_subject(), ""), reduce_of=reduce_of) as writer:
            data = writer.result()  # what is noted of this network is not about the user's
    except (ValueError, RuntimeError, OSError):
        return xr.Dataset()
    return data.map(lambda one: one.where(False, 1.0) if one.dtype.kind == "f" else one, keep_attrs=True)


@functools.cache
def _small_subject() -> Subject:
    """A small network with random weights, and images without content."""
    with torch.random.fork_rng(devices=()):
        network = models.build("vit_demo", classes=10, image_size=8).eval()
    return load(network, data=(torch.zeros(128, 3, 8, 8), torch.arange(128) % 10))
