"""`landscape.measure` and `landscape.features`: probes by name, on a subject or a checkpoint, into a results file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import xarray as xr

from landscape.options import OptionError, alternatives, invalid
from landscape.probe import Probe, Varies
from landscape.probes import FEATURES, probe_class
from landscape.results import reader
from landscape.run import Report, run
from landscape.shared_pass import ListeningProbe, fitting, run_together
from landscape.subject.loading import load
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject


def measure(
    probe: str,
    subject: Subject | Path | str | None = None,
    *,
    out: Path | str = "results.h5",
    preset: str = "",
    label: str = "",
    overwrite: bool = False,
    report: Report | None = None,
    **options: Any,
) -> xr.Dataset:
    """Measure, store, and return the labelled result (of several random planes, the last).

    Args:
        probe: name of the probe, such as "hessian".
        subject: a loaded subject; or a checkpoint, loaded with the probe's own defaults and the options of `load`;
            or None: the newest checkpoint.
        out: results file; a finished question is not measured again.
        preset: "park2022" for the paper's convention.
        label: readable name in the file.
        overwrite: measure again what the file already holds.
        report: told after every unit.
        **options: parameters of the probe; with a checkpoint, options of `load` too.

    Raises:
        OptionError: an option is unknown or out of its range.
        ValueError, OSError: see the message.
    """
    settings = {**preset_of(probe, preset), **options}
    made, rest = configured(probe, settings)
    if isinstance(subject, Subject):
        given = [name for name in rest if name in options and name not in own_defaults(probe)]
        if given:
            raise OptionError(f"{', '.join(given)} belongs to loading; give it to landscape.load")
        loaded = subject
    else:
        loaded = load(subject, label=label, **{**defaults(probe), **rest})
    for variant in variants(made):
        outcome = run(variant, loaded, Path(out), label=label, overwrite=overwrite, report=report)
    return dict(reader.groups(Path(out)))[outcome.group]


def features(
    subject: Subject | Path | str | None = None,
    *,
    probes: Sequence[str] = FEATURES,
    out: Path | str = "results.h5",
    preset: str = "",
    label: str = "",
    overwrite: bool = False,
    report: Report | None = None,
    **options: Any,
) -> dict[str, xr.Dataset]:
    """Measure several layer probes from one forward pass per mini-batch; the labelled result of each, by its name.

    A probe that makes no sense for the network (attention for a convolutional one) is left out. Arguments as of
    `measure`; options of a probe reach those that have them.

    Raises:
        OptionError, ValueError, OSError: as `measure`; no probe fits the network.
    """
    made, rest = configured_together(probes, preset, options)
    if isinstance(subject, Subject):
        if rest:
            raise OptionError(f"{', '.join(rest)} belongs to loading; give it to landscape.load")
        loaded = subject
    else:
        loaded = load(subject, label=label, **{**defaults(probes[0]), **rest})
    fit, _ = fitting(made, loaded)
    outcomes = run_together(fit, loaded, Path(out), label=label, overwrite=overwrite, report=report)
    stored = dict(reader.groups(Path(out)))
    return {probe.name: stored[outcome.group] for probe, outcome in zip(fit, outcomes, strict=True)}


def configured_together(
    probes: Sequence[str], preset: str, options: dict[str, Any]
) -> tuple[list[ListeningProbe], dict[str, Any]]:
    """Probes that share one pass, each with the parameters it has, and the settings that belong to loading.

    Raises:
        OptionError: a probe takes no part in a shared pass; a setting is nobody's.
    """
    for name in probes:
        if name not in FEATURES:
            raise OptionError(f"{name} does not listen to a shared pass; ask for some of {', '.join(FEATURES)}")
    own = {name: set(own_defaults(name)) for name in probes}
    everybodys = set().union(*own.values())
    made: list[ListeningProbe] = []
    rest: dict[str, Any] = {}
    for name in probes:
        mine = {key: value for key, value in options.items() if key in own[name] or key not in everybodys}
        probe, rest = configured(name, {**preset_of(name, preset), **mine})
        made.append(cast(ListeningProbe, probe))
    return made, rest


def configured(probe: str, settings: dict[str, Any]) -> tuple[Probe, dict[str, Any]]:
    """The probe with its own parameters, and the settings that belong to loading.

    Raises:
        OptionError: a setting is neither.
    """
    kind = probe_class(probe)
    own = {field.name for field in fields(kind)}
    loading = {field.name for field in fields(Spec)} - {"checkpoint"}
    unknown = [name for name in settings if name not in own | loading]
    if unknown:
        raise OptionError(f"{probe} has no option {unknown[0]}; it has {', '.join(sorted(own))}")
    parameters = {
        field.name: _several(settings[field.name]) if isinstance(field.default, tuple) else settings[field.name]
        for field in fields(kind)
        if field.name in settings
    }
    return kind(**parameters), {name: value for name, value in settings.items() if name in loading}


def _several(value: Any) -> tuple[Any, ...]:
    """A repeatable option: one word stands for a list of one."""
    return (value,) if isinstance(value, str) else tuple(value)


def defaults(probe: str) -> dict[str, Any]:
    """How a probe's subject is loaded unless asked otherwise."""
    kind = probe_class(probe)
    return {"split": kind.split, "batch_size": kind.batch_size, "samples": 1024, "logits": kind.logits}


def own_defaults(probe: str) -> dict[str, Any]:
    """The probe's parameters as they are unless asked otherwise."""
    return {field.name: field.default for field in fields(probe_class(probe))}


def variants(probe: Probe) -> list[Probe]:
    """The questions one probe stands for: itself, or what its own `variants` gives (random planes, say)."""
    return list(probe.variants()) if isinstance(probe, Varies) else [probe]


def preset_of(probe: str, preset: str) -> dict[str, Any]:
    """Settings of a named convention.

    Raises:
        OptionError: there is none of that name.
    """
    presets = probe_class(probe).presets
    if preset and preset not in presets:
        raise invalid("preset", preset, f"{alternatives(list(presets))} for {probe}")
    return dict(presets[preset]) if preset else {}
