"""Measure from Python: run a probe by name on a subject or a checkpoint, store the result and return it."""

import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import xarray as xr
from torch import nn

from landscape.options import OptionError, alternatives, did_you_mean, invalid, parse_shard, plain_value, require
from landscape.predictions.evaluation import metrics_of
from landscape.probe import Probe, Shard
from landscape.probes import FEATURES, probe_class
from landscape.reporting.progress import Advice, Progress, in_notebook
from landscape.results import headline_numbers, reader, run_key
from landscape.running.executor import IN_PROCESS, Executor
from landscape.running.run import Report, result_of_small_network, run
from landscape.running.shared_pass import SharedPassProbe, applicable, run_shared_pass
from landscape.studies import network_tables
from landscape.studies.expressions import Known
from landscape.subject import networks_in_memory, spec
from landscape.subject.loading.identity import protocol
from landscape.subject.loading.load import load, measuring
from landscape.subject.subject import Subject

Source: TypeAlias = Subject | nn.Module | Path | str | None
_log = logging.getLogger(__name__)


def measure(
    probe: str | Probe | type[Probe],
    subject: Source = None,
    *,
    out: Path | str | None = "results.h5",
    preset: str = "",
    label: str = "",
    overwrite: bool = False,
    shard: str = "",
    quiet: bool = False,
    report: Report | None = None,
    executor: Executor = IN_PROCESS,
    **options: Any,
) -> xr.Dataset:
    """Measure, store, and return the labelled result; with several random planes, that of the last.

        spectrum = landscape.measure("hessian", subject, out=None, top=1)

    The subject's model is left as it was, so that a network can be measured in the middle of its training: modes,
    gradients, buffers, hooks and the global random generators are as before. Loading options such as `split` and
    `batch_size` come with the subject; the protocol is printed once for each probe of a subject.

    Args:
        probe: name of the probe, such as "hessian"; `landscape.probes()` lists them. Or a probe of your own, as a class
            or with its parameters; it is measured as the others are.
        subject: a loaded subject; or a checkpoint, or a module with `data`, loaded with the probe's own defaults and
            the options of `load`; or None: the newest checkpoint.
        out: results file; a finished result is not measured again. None: no file, the result is only returned.
        preset: "park2022" for the paper's convention.
        label: readable name in the file.
        overwrite: measure again what the file already holds.
        shard: "2/8" measures the second of eight parts of the units, for `landscape merge`; each needs its own file.
        quiet: print neither protocol nor progress.
        report: called with (finished units, all units) after every unit, in place of the progress bar, which appears
            after a second on a terminal or in a notebook.
        executor: what measures the units, such as `running.local_processes.Processes(4)`; default: this process.
        **options: parameters of the probe; with a checkpoint, options of `load` too. Where a parameter names checkpoint
            files (`along`, `plane`, `against`), modules, subjects and state dicts in memory do as well:
            `measure("line", a, along=b)`, `measure("surface", a, plane=(b, c))`.

    Raises:
        OptionError: an option is unknown or out of its range.
        ValueError, OSError: see the message.
    """
    kind = probe_class(probe)
    given = options if isinstance(probe, str | type) else {**vars(probe), **options}
    naming, part = networks_in_memory.named(given), Shard(*parse_shard("shard", shard))
    made, loading = configure(kind, preset, {**_seed_of(subject, kind), **naming.options})
    own = parameter_defaults(kind)
    loaded = _loaded(subject, loading, label, late=[name for name in options if name not in own])
    path = Path(out) if out is not None else None
    _say_protocol(kind, loaded, quiet=quiet)
    loaded = replace(loaded, origin=replace(loaded.origin, others=naming.networks)) if naming.networks else loaded
    bar = _progress(f"{kind.name} {label or loaded.label}", [made], loaded, quiet=quiet or report is not None)
    with measuring(loaded), bar as shown:
        for variant in made.variants():
            how: Any = {"label": label, "overwrite": overwrite, "shard": part, "executor": executor}
            outcome = run(variant, loaded, path, report=report or shown, **how)
    return reader.measured(path, outcome)


def features(
    subject: Source = None,
    *,
    probes: Sequence[str] = FEATURES,
    out: Path | str | None = "results.h5",
    preset: str = "",
    label: str = "",
    overwrite: bool = False,
    quiet: bool = False,
    report: Report | None = None,
    **options: Any,
) -> dict[str, xr.Dataset]:
    """Measure several layer probes from one forward pass per mini-batch; returns the labelled result of each by name.

    Probes that do not apply to the network (attention to a convolutional one) are skipped, and one that fails is left
    out with a warning. Arguments as for `measure`; an option reaches every probe that has it.

    Raises:
        OptionError, ValueError, OSError: as `measure`; no probe fits the network.
    """
    kinds = [probe_class(name) for name in probes]
    made, loading = configure_shared_pass(kinds, preset, {**_seed_of(subject, *kinds), **options})
    loaded = _loaded(subject, loading, label, late=[name for name in options if name in loading])
    path = Path(out) if out is not None else None
    _say_protocol(kinds[0], loaded, quiet=quiet)
    bar = _progress(f"features {label or loaded.label}", made, loaded, quiet=quiet or report is not None)
    with measuring(loaded), bar as shown:
        fit, _ = applicable(made, loaded)
        outcomes = run_shared_pass(fit, loaded, path, label=label, overwrite=overwrite, report=report or shown)
    measured = dict(zip((probe.name for probe in fit), outcomes, strict=True))
    for name, outcome in measured.items():
        if outcome.failed:
            _log.warning("%s failed and is left out: %s", name, outcome.failed)
    return {name: reader.measured(path, outcome) for name, outcome in measured.items() if not outcome.failed}


def evaluate(subject: Source = None, *, passes: int = 1, label: str = "", **options: Any) -> dict[str, float]:
    """Compute loss, accuracy, top-5, Brier score and calibration error, or perplexity, with standard errors.

    Args:
        subject: a loaded subject; or a checkpoint, a module, or None for the newest checkpoint, loaded as by `load`.
        passes: forward passes whose probabilities are averaged, for MC dropout.
        label: readable name.
        **options: with a checkpoint, options of `load`.

    Raises:
        OptionError, ValueError, OSError: see the message.
    """
    if isinstance(subject, Subject) and options:
        raise OptionError(f"{', '.join(options)} must be given to landscape.load, got it with a loaded subject")
    loaded = subject if isinstance(subject, Subject) else load(subject, label=label, **options)
    with measuring(loaded):
        return metrics_of(loaded, passes=passes)


def study(
    file: Path | str | Mapping[str, Any], *, out: Path | str | None = None, device: str = "auto", quiet: bool = False
) -> str:
    """Train and measure what a study's file says, and return its table (Markdown); see `landscape study run`.

    Args:
        file: the file, or its content as a dictionary.
        out: folder for checkpoints, `results.h5` and `study.md`; default: named as the file.
        device: auto, cpu, cuda or cuda:1.
        quiet: print no progress.

    Raises:
        ValueError, OSError: the file is wrong, or a step cannot be carried out; see the message.
    """
    from landscape.studies.conduct import conduct
    from landscape.studies.study_file import study_of

    source = file if isinstance(file, Mapping) else Path(file)
    folder = Path(out) if out is not None else Path(source.stem if isinstance(source, Path) else "study")
    how: Any = {"train": _trained, "measure": partial(measure, quiet=True), "device": device, "quiet": quiet}
    found = conduct(study_of(source, names_of_results), folder, **how)
    if found.wrong:
        _log.warning("; ".join(found.wrong))
    return found.text


def _trained(model: str, data: str, overrides: dict[str, Any], *, recipe: str, quiet: bool, **options: Any) -> Path:
    from landscape.data import recipes
    from landscape.training.train import train

    made, report = recipes.recipe(recipe, **overrides), options.pop("report")
    return train(model, data, recipe=made, report=lambda done: report(done.epoch, done.epochs), **options)


def names_of_results(probe: str, preset: str, options: dict[str, Any]) -> Known:
    """Find the names of a probe's results; an OptionError or ValueError unless it has the preset and the options."""
    kind = probe_class(probe)
    made, loading = configure(kind, preset, options)
    network_tables.check_loading({name: value for name, value in loading.items() if name != "classes"})
    network_tables.check_places(made)
    numbers = tuple(re.sub(r"\{[^}]*\}", "*", one.name) for one in made.headlines)
    stored = tuple(dict.fromkeys(name for one in made.headlines for name in (one.quantity, one.by) if name))

    def others() -> list[str]:
        data = result_of_small_network(made)
        return list(map(str, [*data.data_vars, *data.coords, *data.attrs]))

    def excluded() -> Set[str]:
        own = _numbers_of(made)
        return _numbers_of(kind()) - own if own else own

    return Known(numbers, stored, others, excluded)


def _numbers_of(probe: Probe) -> Set[str]:
    """The headline numbers of a probe's result of a small network; none where it does not apply to it."""
    return {one.name for _, one in headline_numbers.numbers(result_of_small_network(probe))}


def _loaded(subject: Source, loading: Mapping[str, Any], label: str, *, late: Sequence[str]) -> Subject:
    """The subject itself, or loaded; an error if loading options are given too `late`, with a loaded subject."""
    if isinstance(subject, nn.Module) and not loading.get("data"):
        raise OptionError(f"{type(subject).__name__} is a module without data; give data=... with it")
    if not isinstance(subject, Subject):
        return load(subject, label=label, **loading)
    if late:
        raise OptionError(f"{', '.join(late)} must be given to landscape.load, got it with a loaded subject")
    return subject


def _seed_of(subject: Source, *kinds: type[Probe]) -> dict[str, Any]:
    """The seed that a subject was loaded with, where it is an option of a probe too; on the command line it is one."""
    drawing = any("seed" in parameter_defaults(kind) for kind in kinds)
    return {"seed": subject.seed} if isinstance(subject, Subject) and drawing else {}


def _progress(what: str, probes: Sequence[Probe], subject: Subject, *, quiet: bool) -> Progress:
    return Progress(what, quiet=quiet, after=1.0, lines=in_notebook(), advice=Advice.of(probes, subject))


_said: WeakKeyDictionary[Subject, set[str]] = WeakKeyDictionary()  # probes whose protocol was printed


def _say_protocol(kind: type[Probe], subject: Subject, *, quiet: bool) -> None:
    """Print the protocol, and the defaults that it differs from, once for each probe of a subject.

    It goes to stderr, or to the log where the caller has set that up.
    """
    known = _said.setdefault(subject, set())
    if quiet or kind.name in known:
        return
    known.add(kind.name)
    usual = loading_defaults(kind)
    own: dict[str, Any] = {"batch_size": subject.batch_size, "samples": len(subject)}
    if subject.spec is not None and not subject.data.one_part:
        own["split"] = subject.spec.split
    if own["samples"] < usual["samples"] and (subject.spec is None or subject.spec.samples == "all"):
        del own["samples"]  # there are no more
    other = ", ".join(f"{name}={usual[name]!r}" for name in sorted(own) if own[name] != usual[name])
    hint = f" (defaults of {kind.name}: {other})" if other else ""
    line = f"{kind.name} of {subject.label}: {protocol(subject)}{hint}"
    if _log.isEnabledFor(logging.INFO) or logging.getLogger("landscape").level != logging.NOTSET:
        _log.info(line)
    else:
        print(line, file=sys.stderr)


def configure_shared_pass(
    kinds: Sequence[type[Probe]], preset: str, options: dict[str, Any]
) -> tuple[list[SharedPassProbe], dict[str, Any]]:
    """Probes for a shared pass, each with its own parameters, and the loading options with their common defaults.

    Raises:
        OptionError: a probe cannot share a pass; or as `configure`.
    """
    for kind in kinds:
        if kind.name not in FEATURES:
            raise OptionError(f"probes must be among {', '.join(FEATURES)}; got {kind.name}, which cannot share a pass")
    of_all = set().union(*map(parameter_defaults, kinds))
    made: list[SharedPassProbe] = []
    rest: dict[str, Any] = {}
    for kind in kinds:
        own = parameter_defaults(kind)
        wanted = {key: value for key, value in options.items() if key in own or key not in of_all}
        probe, rest = configure(kind, preset, wanted)
        made.append(cast(SharedPassProbe, probe))
    return made, rest


def configure(kind: type[Probe], preset: str, given: Mapping[str, Any]) -> tuple[Probe, dict[str, Any]]:
    """Split settings, over those of a preset, into the probe and the loading options, over the probe's defaults.

    Raises:
        OptionError: there is no such preset, or a setting is neither.
    """
    if preset and preset not in kind.presets:
        raise invalid("preset", preset, f"{alternatives(list(kind.presets))} for {kind.name}")
    settings, own = {**kind.presets.get(preset, {}), **given}, parameter_defaults(kind)
    loading = {field.name for field in fields(spec.Spec)} - {"checkpoint"} | {"classes"}
    unknown = [name for name in settings if name not in loading | own.keys()]
    if unknown:
        known = f"it has {', '.join(sorted(own))}, and those of landscape.load"
        near = did_you_mean(unknown[0], [*own, *loading])
        raise OptionError(f"{kind.name} has no option {unknown[0]}; {known}{near}")
    parameters = {}
    for name, default in own.items():
        if name in settings:
            value = plain_value(name, settings[name], default)
            parameters[name] = _several(name, value) if isinstance(default, tuple) else value
    made, of_loading = kind(**parameters), {name: value for name, value in settings.items() if name in loading}
    return made, {**loading_defaults(kind), "logits": made.logits, **of_loading}


def _several(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping) and name.endswith("_arg"):
        return spec.assignments(value)
    several = isinstance(value, Iterable) and not isinstance(value, Mapping)
    require(several, name, repr(value), "a text or a list of texts")
    return (value,) if isinstance(value, str) else tuple(value)


def loading_defaults(kind: type[Probe]) -> dict[str, Any]:
    """The default loading options of a probe's subject."""
    usual = {"split": kind.split, "batch_size": kind.batch_size, "samples": run_key.SAMPLES, "logits": kind.logits}
    return {**usual, "ordered": True} if kind.ordered else usual


def parameter_defaults(kind: type[Any]) -> dict[str, Any]:
    """The default parameters of a probe."""
    return {field.name: field.default for field in fields(kind)}
