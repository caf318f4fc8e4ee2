"""Make the command of every probe: its options, and measuring each checkpoint into the results file with progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from landscape.cli import command_options, process_setup
from landscape.cli.loading import chosen_checkpoints, expected, load, several_checkpoints
from landscape.options import OptionError, counted, format_duration, parse_bytes, parse_shard
from landscape.probe import WHOLE, NotApplicable, Shard
from landscape.probes import FEATURES, probe_class
from landscape.reporting.event_log import event_log, record
from landscape.reporting.progress import Advice, Progress, say, text_table

if TYPE_CHECKING:
    from landscape.results.run_key import Outcome
    from landscape.subject.process_group import ProcessGroup
    from landscape.subject.subject import Subject

SAVE = command_options.option(
    Path | None, "write the permuted other checkpoint to this file", None, command_options.OWN
)


def command_of(name: str) -> Callable[..., None]:
    """The function behind `landscape NAME`, with options made from the dataclasses of its probes and of loading."""
    with process_setup.importing():
        from landscape.api import loading_defaults
        from landscape.data.memory import limited_to

    kinds = [probe_class(probe) for probe in probes_of(name)]
    own = {key: item for kind in kinds for key, item in command_options.probe_options(kind).items()}

    def command(context: typer.Context, checkpoint: list[Path] | None, **options: Any) -> None:
        typed, save = command_options.typed_options(context, options), options.pop("save", None)
        parameters = {
            key: tuple(v) if isinstance(v, list) else v for key, v in typed.items() if key in own.keys() - {"save"}
        }
        run = {key: options[key] for key in command_options.RUN if key not in ("debug", "memory", "verbose")}
        with limited_to(_memory(**{key: options[key] for key in ("memory", "workers", "scheduler")})):
            given = command_options.loading_values(typed)
            after = _saving(save, given, quiet=run["quiet"])
            measure_all(name, checkpoint or [None], parameters, given, after=after, **run)

    checkpoints = several_checkpoints(kinds[0].checkpoints)
    loading = command_options.loading_options(loading_defaults(kinds[0]))
    own |= {"save": SAVE} if hasattr(kinds[0], "save") else {}
    table = {
        "context": command_options.CONTEXT, "checkpoint": checkpoints, **own, **loading, **command_options.RUN,
        "help_all": command_options.HELP_ALL,
    }  # fmt: skip
    return command_options.with_options(command, table)


def _saving(path: Path | None, loading: Mapping[str, Any], *, quiet: bool) -> Callable[[Any, Subject], None] | None:
    """What writes the checkpoint after the measurement; None where it is not asked for.

    Raises:
        OptionError: no checkpoint can be written there, or the network is none that one could be loaded into.
    """
    if path is None:
        return None
    if path.is_dir():
        raise OptionError(f"--save must be a file, got the folder {path}; for example {path / 'aligned.pt'}")
    if loading.get("adapter") == "separate":
        raise OptionError("--save writes a whole network; drop --adapter separate, and the merged one is aligned")

    def save(probe: Any, subject: Subject) -> None:
        say(f"{probe.name}: {path} holds {probe.save(subject, path)}", quiet=quiet)

    return save


def _memory(memory: str, workers: int, scheduler: str) -> int | None:
    """The bytes of `--memory`, which other processes than this one do not know."""
    if memory and (workers > 1 or scheduler):
        raise OptionError(f"--memory {memory} limits one process; leave it out with --workers and --scheduler")
    return parse_bytes("memory", memory)


def probes_of(command: str) -> tuple[str, ...]:
    """The probes that a command measures."""
    return FEATURES if command == "features" else (command,)


def measure_all(
    command: str,
    checkpoints: Sequence[Path | None],
    parameters: Mapping[str, Any],
    loading: Mapping[str, Any],
    *,
    out: Path,
    preset: str = "",
    workers: int = 1,
    scheduler: str = "",
    log: Path | None = None,
    shard: str = "",
    label: Sequence[str] = (),
    overwrite: bool = False,
    fsync: bool = False,
    quiet: bool = False,
    after: Callable[[Any, Subject], None] | None = None,
) -> list[Outcome]:
    """Measure one checkpoint after the other into one file, by one probe or "features"; where each result lies.

    Parameters of the probe, and fields of `Spec` (`loading`), override the preset: give only those that the user chose.
    The checkpoint None is the newest; labels come from the paths. Of several checkpoints, those to which the probe does
    not apply are left out with a note. `after` is called with each measured probe and its subject.

    Raises:
        NotApplicable: the probe applies to none of the checkpoints.
        OptionError, ValueError, OSError: as `landscape.measure`; some of several probes failed, after the others.
    """
    from landscape.results import hdf5_file
    from landscape.subject.loading.preprocessing import sharing_images

    common: dict[str, Any] = {"shard": Shard(*parse_shard("shard", shard)), "fsync": fsync, "overwrite": overwrite}
    several = probe_class(probes_of(command)[0]).several
    asked, _ = _configured(command, preset, expected(several, checkpoints, parameters), loading)
    with process_setup.sharing_processes() as processes, contextlib.ExitStack() as stack:
        _refuse_separate_units(asked, workers, scheduler, processes)
        stack.enter_context(event_log(log if processes.rank == 0 else None, command=command, out=out))
        processes.on_main_process(lambda: hdf5_file.check(out, writable=True))
        common["executor"] = stack.enter_context(process_setup.executor_of(workers, scheduler))
        choose = partial(chosen_checkpoints, command, several, checkpoints, parameters, quiet=quiet)
        chosen = processes.in_all(partial(choose, command_options.reading_values(loading), label))
        runs, spec = _configured(command, preset, chosen.parameters, loading)
        refused = 0
        outcomes: list[Outcome] = []
        stack.enter_context(sharing_images() if len(chosen.paths) > 1 else contextlib.nullcontext())
        for path, name in zip(chosen.paths, chosen.labels, strict=True):
            subject = _loaded(path, spec, name, processes, quiet=quiet)
            _note_unusual_layers(runs, subject, quiet=quiet)
            common["label"] = name if label else ""
            try:
                for probes, words in zip(runs, _told_apart(runs), strict=True):
                    outcomes += _measure(command, probes, subject, out, common, words, quiet=quiet)
                    if after is not None:
                        after(probes[0], subject)
            except NotApplicable as error:
                if (refused := refused + 1) == len(chosen.paths):
                    raise
                say(f"note: {name} is left out: {error}", quiet=quiet)
        _print_table(command, out, outcomes if common["shard"] == WHOLE else [], quiet=quiet)
    return _all_measured(outcomes)


def _print_table(command: str, out: Path, outcomes: Sequence[Outcome], *, quiet: bool) -> None:
    """Print the table of all results of a command, where it has one."""
    from landscape.plots.headlines import main_figure
    from landscape.results import reader

    outcomes = [outcome for outcome in outcomes if not outcome.failed]
    if outcomes and not quiet and hasattr(module := main_figure(command), "table"):
        rows, below = module.table([reader.result(out, one.group) for one in outcomes])
        typer.echo("\n".join([text_table(rows), "", *below]))


def _all_measured(outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes, unless probes of a shared pass failed while the others went on."""
    lost = [f"{outcome.group.rpartition('-')[0]} ({outcome.failed})" for outcome in outcomes if outcome.failed]
    if lost:
        raise ValueError(f"failed alone, the others are measured: {'; '.join(lost)}")
    return outcomes


def _refuse_separate_units(
    runs: Sequence[Sequence[Any]], workers: int, scheduler: str, processes: ProcessGroup
) -> None:
    """Reject what the processes of a group cannot share: units of their own, and more processes."""
    if processes.size == 1:
        return
    if workers > 1 or scheduler:
        other = f"--scheduler {scheduler}" if scheduler else f"--workers {workers}"
        raise OptionError(
            f"{other} measures by other processes than torchrun's; leave it out, or start without torchrun"
        )
    if not all(probe.whole for probes in runs for probe in probes):
        raise OptionError(
            "hessian --scope batch measures mini-batches one by one; processes of torchrun share the mean over all "
            "samples: give --scope dataset, or start without torchrun, with --workers N"
        )


def _loaded(
    path: Path | None, values: Mapping[str, Any], label: str, processes: ProcessGroup, *, quiet: bool
) -> Subject:
    from landscape.subject.process_group import device_of

    def on_own_device() -> Subject:
        device = {"device": str(device_of(values.get("device", "auto"), processes))} if processes.size > 1 else {}
        return load(path, {**values, **device}, label=label, quiet=quiet)

    subject = processes.in_all(on_own_device)
    process_setup.free_large_blocks(subject.size * subject.dtype.itemsize)
    return replace(subject, processes=processes) if processes.size > 1 else subject


def _configured(
    command: str, preset: str, parameters: Mapping[str, Any], loading: Mapping[str, Any]
) -> tuple[list[list[Any]], dict[str, Any]]:
    """The probes of each run, and the fields of `Spec` with their defaults, of a command."""
    from landscape import api

    kinds, given = [probe_class(name) for name in probes_of(command)], {**parameters, **loading}
    if len(kinds) > 1:
        together, spec = api.configure_shared_pass(kinds, preset, given)
        return [list(together)], spec
    probe, spec = api.configure(kinds[0], preset, given)
    return [[variant] for variant in probe.variants()], spec


def _note_unusual_layers(runs: Sequence[Sequence[Any]], subject: Subject, *, quiet: bool) -> None:
    """Print how many runs there are, and how layers were discovered if not in the usual way or by the user."""
    from landscape.layers.selection import layers_of, remarks

    probes = runs[0]
    if len(runs) > 1:
        say(f"{probes[0].name}: {len(runs)} runs, each reported separately, with its share of any budget", quiet=quiet)
    if all(probe.layers == () for probe in probes):
        try:
            layers = layers_of(subject, ())
        except ValueError:
            return  # the probe raises the same
        for remark in remarks(layers):
            say(f"note: {remark}", quiet=quiet)


def _told_apart(runs: Sequence[Sequence[Any]]) -> list[str]:
    """The options in which runs of one probe differ, in words such as `eps 0.3`; "" of a single run."""
    asked = [{field.name: getattr(probe, field.name) for field in fields(probe)} for probe, *_ in runs]
    differ = [name for name in asked[0] if any(one[name] != asked[0][name] for one in asked)]
    return [", ".join(f"{name.replace('_', ' ')} {one[name]}" for name in differ) for one in asked]


def _measure(
    command: str, probes: list[Any], subject: Subject, out: Path, how: Mapping[str, Any], words: str, *, quiet: bool
) -> list[Outcome]:
    """Measure one probe, or several from shared forward passes, and print a line with what each found.

    `how`: options of `run`; `words`: what tells it from other runs of the command. Returns where the results lie;
    nothing in other processes than the first.
    """
    from landscape.running.run import run
    from landscape.running.shared_pass import applicable, run_shared_pass

    start = time.monotonic()
    outcomes: list[Outcome]
    quiet = quiet or subject.processes.rank > 0
    if command == "features":
        probes, reasons = applicable(probes, subject)
        for name, reason in reasons.items():
            say(f"note: {name} is left out: {reason}", quiet=quiet)
    with Progress(f"{command} {subject.label}", quiet=quiet, advice=Advice.of(probes, subject)) as progress:

        def report(finished: int, total: int) -> None:
            progress(finished, total)
            process_setup.end_if_received()

        if command == "features":
            outcomes = run_shared_pass(probes, subject, out, report=report, **how)
        else:
            outcomes = [run(probe, subject, out, report=report, **how) for probe in probes]
    took = format_duration(time.monotonic() - start)
    if subject.processes.rank > 0:  # the file may lie on another machine
        return []
    for outcome in outcomes:
        if outcome.failed:
            continue
        record("result", group=outcome.group, units=outcome.units, measured=outcome.measured, out=out)
        say(_found(outcome, out, how["shard"], took, words), quiet=quiet)
    return outcomes


def _found(outcome: Outcome, out: Path, shard: Shard, took: str, words: str) -> str:
    """What was found, and where it lies: the line of one probe and network."""
    from landscape.plots import headlines
    from landscape.results.group import attribute

    probe, label = outcome.group.partition("/")[0], attribute(out, outcome.group, "label")
    name = f"{probe} {label} ({words})" if words else f"{probe} {label}"
    kept = outcome.units - outcome.measured
    if not outcome.measured:
        how = f"already measured, in {out}; --overwrite measures again"
    elif kept:
        units = f"{outcome.measured:,} of {counted(outcome.units, 'unit', ',')}"
        how = f"{units} in {took}, the others are kept from before; in {out}"
    else:
        how = f"{took}, in {out}"
    if shard == WHOLE:
        return f"{name}: {headlines.headline(out, outcome.group) or 'measured'} ({how})"
    if not outcome.units:
        how = f"no units, because there are fewer than {shard.of}"
    return f"{name}: shard {shard} ({how}); landscape merge joins the shards"
