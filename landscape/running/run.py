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
from landscape.results.creation import empty_arrays
from landscape.results.run_key import OPTIONS, Arrays, Outcome, Reduce, RunKey, chosen, declared, versions
from landscape.results.unmerged_journals import stored_attribute
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
    weights = weights_sha256(subject)  # hashed once, for every digest of this run
    probe, subject, choices = _resolved(probe, subject, path, weights, overwrite=overwrite)
    key, subject = run_key(probe, subject, label, choices, weights=weights, path=path, overwrite=overwrite)
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
            if path is None:
                writers.append(MemoryWriter(key, reduce_of=reduce_of))
            else:
                writers.append(Writer(path, key, reduce_of=reduce_of, sync=fsync))
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


def _require_shardable(probe: Probe, key: RunKey) -> None:
    """Refuse shards of a run whose units, or whose question, follow from what only the whole run knows."""
    chosen_for = key.attributes.get("chosen_for", key.digest)
    if chosen_for != key.digest:
        choices = key.attributes["choices"]
        raise OptionError(
            "--shard needs the same question on every machine, and --tune and --budget choose it by the speed of this "
            f"one; give what they chose here as options instead: {choices}"
        )
    if isinstance(probe, Stages) and probe.stage(empty_arrays(key.plan)) is not None:
        raise OptionError(
            f"--shard cannot divide this {probe.name}: it decides by all units so far which one is next; leave out "
            f"{probe.staged_by}, which asks for that, or --shard"
        )


def run_key(
    probe: Probe,
    subject: Subject,
    label: str,
    choices: Mapping[str, str] | None = None,
    *,
    weights: str | None = None,
    path: Path | None = None,
    overwrite: bool = False,
) -> tuple[RunKey, Subject]:
    """The key of a probe's result, with the record of what autotuning chose, and the subject that it is measured on.

    That is the one given, but in mini-batches of the size of a half-finished result in the file where this cannot
    matter. `label` is the user's; without one, a new result has the subject's. `weights` as in `digest`.
    """
    weights = weights or weights_sha256(subject)
    if probe.deterministic:
        checks.refuse_stochastic(subject)
    premises = sanity_check.premises(subject, weights)
    if probe.differentiates and (found := disagreement(subject)):
        premises["derivatives"] = found
    question = digest(probe, subject, weights)
    if path is not None and not overwrite:
        batch_size = subject.processes.on_main_process(
            lambda: stored_attribute(path, probe.name, question, "batch_size", reduce_of)
        )
        if batch_size is not None and "batch_size" not in probe.uses:
            subject = other_samples.rebatched(subject, int(batch_size))
    attributes: dict[str, Any] = dict(choices or {})
    if probe.name in PROBES and (spec := subject.spec) is not None and (spec.checkpoint or spec.model):
        made = json.loads(attributes.get("choices", "{}"))  # by autotuning: what changes no number, no command needs
        known = probe.identity(subject) if made and isinstance(probe, Identifies) else {}
        unasked = {name for name in made if known.get(name, name) is None}
        asked = {name: value for name, value in chosen(probe, spec).items() if name not in unasked}
        attributes[OPTIONS] = json.dumps(asked, default=str)
    attributes |= {
        "parameters": json.dumps(asdict(probe), default=str),  # type: ignore[call-overload]
        **declared(probe),
        **attributes_of(subject),
        **premises,
        "versions": json.dumps(versions()),
    }
    plan = probe.plan(subject)
    said = str(plan.facts.get("protocol", attributes["protocol"]))
    if probe.params:
        said += f", parameters matching {probe.params}"
    if probe.seed not in (None, subject.seed):  # one of several pairs of directions
        said += f" (seed {probe.seed} of the {probe.name})"
    plan = replace(plan, facts={**plan.facts, "protocol": said})
    return RunKey(probe.name, label or subject.label, question, plan, attributes, relabel=bool(label)), subject


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


def _resolved(
    probe: Probe, subject: Subject, path: Path | None, weights: str, *, overwrite: bool
) -> tuple[Probe, Subject, dict[str, str]]:
    """Probe and subject with the choices of autotuning, an earlier run's or made now, and attributes to record them."""
    if not isinstance(probe, Autotunes):
        return probe, subject, {}
    undecided, on_main_process = digest(probe, subject, weights), subject.processes.on_main_process

    def made() -> Mapping[str, Any]:
        if path is not None:
            stored = stored_attribute(path, probe.name, undecided, "choices", reduce_of, autotuned=True)
            if stored is not None and not overwrite:
                return dict(json.loads(stored))
        with threads.suitable_threads(subject):
            return probe.autotune(subject)

    choices = on_main_process(made)
    if not choices:
        return probe, subject, {}
    return *probe.resolved(subject, choices), {"chosen_for": undecided, "choices": json.dumps(choices)}


def _by_stages(
    probe: Probe,
    plan: Plan,
    arrays: Arrays,
    pending: Sequence[Unit],
    measure: Callable[[Sequence[Unit]], Generator[tuple[Unit, Values]]],
) -> Generator[tuple[Unit, Values]]:
    """Every pending unit with its values: all at once, or in the stages that the probe derives from stored arrays."""
    left = {unit.index: unit for unit in pending}
    step = probe.stage(arrays) if isinstance(probe, Stages) else None
    while step is not None and step.indices:
        if not left.keys() >= set(step.indices):
            raise ValueError(f"`stage` of {probe.name} names a unit that is done or not planned; give what is left")
        with contextlib.closing(measure([left.pop(index) for index in step.indices])) as results:
            for unit, values in results:
                for name in plan.quantities:
                    arrays[name][unit.index] = values[name]
                arrays["done"][unit.index] = 1
                yield unit, values
        step = probe.stage(arrays) if isinstance(probe, Stages) else None
    if step is None:
        with contextlib.closing(measure(list(left.values()))) as results:
            yield from results
    else:
        for unit in left.values():
            yield unit, {name: step.derived[name][unit.index] for name in plan.quantities}


def result_of_small_network(probe: Probe) -> xr.Dataset:
    """A result whose every number is 1; an empty one where the probe does not apply to the network."""
    try:
        with unlogged("landscape"):  # what is noted of this network is not about the user's
            key, _ = run_key(probe, _small_subject(), "")
            with MemoryWriter(key, reduce_of=reduce_of) as writer:
                data = writer.result()
    except (ValueError, RuntimeError, OSError):
        return xr.Dataset()
    return data.map(lambda one: one.where(False, 1.0) if one.dtype.kind == "f" else one, keep_attrs=True)


@functools.cache
def _small_subject() -> Subject:
    """A small network with random weights, and images without content."""
    with torch.random.fork_rng(devices=()):
        network = models.build("vit_demo", classes=10, image_size=8).eval()
    return load(network, data=(torch.zeros(128, 3, 8, 8), torch.arange(128) % 10))
