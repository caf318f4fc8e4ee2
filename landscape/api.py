"""Measure from Python: run a probe by name on a subject or a checkpoint, store the result and return it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import xarray as xr

from landscape.options import OptionError, alternatives, invalid
from landscape.probe import Probe, Varies
from landscape.probes import FEATURES, probe_class
from landscape.results import reader
from landscape.run import Report, run
from landscape.shared_pass import SharedPassProbe, applicable, run_shared_pass
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
    """Measure, store, and return the labelled result (the last one, of several random planes).

    Args:
        probe: name of the probe, such as "hessian".
        subject: a loaded subject; or a checkpoint, loaded with the probe's own defaults and the options of `load`;
            or None: the newest checkpoint.
        out: results file; a finished result is not measured again.
        preset: "park2022" for the paper's convention.
        label: readable name in the file.
        overwrite: measure again what the file already holds.
        report: called with (finished units, all units) after every unit.
        **options: parameters of the probe; with a checkpoint, options of `load` too.

    Raises:
        OptionError: an option is unknown or out of its range.
        ValueError, OSError: see the message.
    """
    settings = {**preset_of(probe, preset), **options}
    made, loading = configure(probe, settings)
    loaded = _loaded(subject, probe, loading, label, given=set(options) - set(parameter_defaults(probe)))
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
    """Measure several layer probes from one forward pass per mini-batch; returns the labelled result of each by name.

    Probes that do not apply to the network (attention to a convolutional one) are skipped. Arguments as for `measure`;
    an option reaches every probe that has it.

    Raises:
        OptionError, ValueError, OSError: as `measure`; no probe fits the network.
    """
    made, loading = configure_shared_pass(probes, preset, options)
    loaded = _loaded(subject, probes[0], loading, label, given=set(loading))
    fit, _ = applicable(made, loaded)
    outcomes = run_shared_pass(fit, loaded, Path(out), label=label, overwrite=overwrite, report=report)
    stored = dict(reader.groups(Path(out)))
    return {probe.name: stored[outcome.group] for probe, outcome in zip(fit, outcomes, strict=True)}


def _loaded(
    subject: Subject | Path | str | None, probe: str, loading: Mapping[str, Any], label: str, *, given: set[str]
) -> Subject:
    """The subject itself, or loaded with the probe's defaults; loading options given with a subject are an error."""
    if not isinstance(subject, Subject):
        return load(subject, label=label, **{**loading_defaults(probe), **loading})
    if late := [name for name in loading if name in given]:
        raise OptionError(f"{', '.join(late)} must be given to landscape.load, got it with a loaded subject")
    return subject


def configure_shared_pass(
    probes: Sequence[str], preset: str, options: dict[str, Any]
) -> tuple[list[SharedPassProbe], dict[str, Any]]:
    """Probes for a shared pass, each with its own parameters, and the loading options.

    Raises:
        OptionError: a probe cannot share a pass, or a setting belongs neither to a probe nor to loading.
    """
    for name in probes:
        if name not in FEATURES:
            raise OptionError(f"probes must be among {', '.join(FEATURES)}; got {name}, which cannot share a pass")
    own = {name: parameter_defaults(name) for name in probes}
    of_all = set().union(*own.values())
    made: list[SharedPassProbe] = []
    rest: dict[str, Any] = {}
    for name in probes:
        wanted = {key: value for key, value in options.items() if key in own[name] or key not in of_all}
        probe, rest = configure(name, {**preset_of(name, preset), **wanted})
        made.append(cast(SharedPassProbe, probe))
    return made, rest


def configure(probe: str, settings: dict[str, Any]) -> tuple[Probe, dict[str, Any]]:
    """Split settings into the probe with its own parameters, and the loading options.

    Raises:
        OptionError: a setting is neither.
    """
    kind, own = probe_class(probe), parameter_defaults(probe)
    loading = {field.name for field in fields(Spec)} - {"checkpoint"}
    unknown = [name for name in settings if name not in loading | own.keys()]
    if unknown:
        raise OptionError(f"{probe} has no option {unknown[0]}; it has {', '.join(sorted(own))}")
    parameters = {
        field.name: _several(settings[field.name]) if isinstance(field.default, tuple) else settings[field.name]
        for field in fields(kind)
        if field.name in settings
    }
    return kind(**parameters), {name: value for name, value in settings.items() if name in loading}


def _several(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def loading_defaults(probe: str) -> dict[str, Any]:
    """The default loading options of a probe's subject."""
    kind = probe_class(probe)
    return {"split": kind.split, "batch_size": kind.batch_size, "samples": 1024, "logits": kind.logits}


def parameter_defaults(probe: str) -> dict[str, Any]:
    """The default parameters of a probe."""
    return {field.name: field.default for field in fields(probe_class(probe))}


def variants(probe: Probe) -> list[Probe]:
    """The runs of a probe: itself, or its variants (several random planes, say)."""
    return list(probe.variants()) if isinstance(probe, Varies) else [probe]


def preset_of(probe: str, preset: str) -> dict[str, Any]:
    """Settings of a preset.

    Raises:
        OptionError: there is no preset of that name.
    """
    presets = probe_class(probe).presets
    if preset and preset not in presets:
        raise invalid("preset", preset, f"{alternatives(list(presets))} for {probe}")
    return dict(presets[preset]) if preset else {}
