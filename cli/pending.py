"""Print what a results file still lacks with the commands that finish it, and follow its progress."""

from __future__ import annotations

import json
import shlex
import time
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from landscape.options import format_duration, printable
from landscape.subject.spec import Spec

POLL_SECONDS = 2.0  # between two looks at a file that is followed


def show_pending(file: Path, *, as_json: bool) -> None:
    """Print every unfinished result: how many units it lacks, which ones, and the command that measures them."""
    from landscape.results.standing import standings

    rows = []
    found = standings(file)
    for result in found:
        if lacks := result.done.size - result.finished:
            row = {"group": result.group, "units": result.done.size, "missing": lacks, "which": result.missing()}
            rows.append({**row, "running": result.running, "command": command_for(result.attributes, file)})
    if as_json:
        typer.echo(json.dumps(rows))
    elif not rows:
        typer.echo(f"nothing is missing; finished results: {len(found)}")
    for row in () if as_json else rows:
        now = ", being measured now" if row["running"] else ""
        units = f"{row['missing']:,} of {row['units']:,} units missing ({row['which']}){now}"
        typer.echo(f"{printable(row['group'])}: {units}")
        typer.echo(f"  {printable(row['command'] or 'no command measures it')}")


def follow(file: Path, *, as_json: bool) -> None:
    """Print the progress of every result when it changes, until all are finished."""
    from landscape.results.standing import standings

    first: dict[str, tuple[float, int]] = {}
    last: dict[str, int] = {}
    while True:
        found, now = standings(file), time.monotonic()
        for result in found:
            start, before = first.setdefault(result.group, (now, result.finished))
            if last.get(result.group) == result.finished:
                continue
            last[result.group] = result.finished
            rate = (result.finished - before) / max(now - start, 1e-9)
            row = {"group": result.group, "finished": result.finished, "units": result.done.size, "rate": rate}
            left = f", {rate:.3g}/s, about {_duration(result.done.size - result.finished, rate)} left"
            text = f"{printable(result.group)} {result.finished:,}/{result.done.size:,}"
            typer.echo(json.dumps(row) if as_json else text + (left if rate and not result.done.all() else ""))
        if all(result.done.all() for result in found):
            return
        time.sleep(POLL_SECONDS)


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


def _duration(units: int, rate: float) -> str:
    return format_duration(units / rate) if rate else ""


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
