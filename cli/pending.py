"""The command that finishes a result, from what the results file says about it."""

from __future__ import annotations

import json
import shlex
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from landscape.subject.spec import Spec


def command_for(attributes: Mapping[str, Any], out: Path) -> str:
    """The command line that measures what a result lacks; "" where no command does, as of an imported result."""
    from landscape.probes import PROBES, probe_class

    probe, stored = str(attributes.get("probe", "")), attributes.get("spec")
    if probe not in PROBES or not stored or attributes.get("source"):
        return ""
    from landscape import api  # imports torch

    parameters, spec = json.loads(attributes.get("parameters", "{}")), json.loads(stored)
    if not (spec.get("checkpoint") or spec.get("model")):
        return ""  # measured from Python, of objects in memory
    spec["seed"] = parameters.get("seed", spec.get("seed", 0))
    words = ["landscape", probe]
    if spec.get("checkpoint"):
        words.append(str(spec["checkpoint"]))
    words += _options(probe_class(probe), parameters, api.parameter_defaults(probe))
    words += _options(Spec, spec, {**{f.name: f.default for f in fields(Spec)}, **api.loading_defaults(probe)})
    return shlex.join([*words, "--out", str(out)])


def _options(kind: type[Any], values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """The options, among the documented fields of a dataclass, whose values are not the defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        name, option = field.name, f"--{field.name.replace('_', '-')}"
        if typing.get_origin(hints[name]) is not typing.Annotated or name not in values or name == "device":
            continue
        value, default = values[name], defaults.get(name, field.default)
        if value in (None, "", [], {}) or value == default or (kind is not Spec and name == "seed"):
            continue
        if isinstance(value, bool):
            yield option if value else f"--no-{option[2:]}"
        elif isinstance(value, dict):
            yield from (word for key, item in value.items() for word in (option, f"{key}={item}"))
        elif isinstance(value, list) and name in ("mean", "std"):
            yield from (option, ",".join(f"{number:g}" for number in value))
        elif isinstance(value, list):
            yield from (word for item in value for word in (option, str(item)))
        else:
            yield from (option, str(value))
