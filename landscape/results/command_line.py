"""The command line that measures a stored result, from the options that are stored with it."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

SAMPLES = 1024  # the default of every probe's command
OPTIONS = "options"  # attribute of a result that a command measures
EMPTY: tuple[Any, ...] = (None, "", (), [], {})
NO_OPTIONS = ("device", "ordered", "logits")  # fields of `Spec` that a command needs not, or does not, take


def chosen(probe: Any, spec: Any) -> dict[str, Any]:
    """The checkpoint, and the options of a probe and of loading that differ from the command's defaults, by name."""
    usual = {"samples": SAMPLES, "split": probe.split, "batch_size": probe.batch_size}
    own = {field.name: (getattr(probe, field.name), field.default) for field in fields(probe)}
    seed = own.pop("seed", (spec.seed, 0))
    loading = {
        field.name: (getattr(spec, field.name), usual.get(field.name, field.default))
        for field in fields(spec)
        if field.name not in NO_OPTIONS
    }
    pairs = {"checkpoint": loading.pop("checkpoint"), **own, **loading | {"seed": seed}}
    return {k: value for k, (value, default) in pairs.items() if value not in EMPTY and str(value) != str(default)}


def command_for(attributes: Mapping[str, Any], out: Path | str, **changes: Any) -> str:
    """The command that measures a stored result, with some options changed; "" where no command does.

    No command measures imported results and those measured from Python of objects in memory. The values in `changes`
    are options of the probe or of loading; None leaves an option out, so that its default holds.
    """
    try:
        options = json.loads(attributes.get(OPTIONS, "null"))
    except (TypeError, ValueError):
        return ""
    if not isinstance(options, dict):
        return ""
    options |= changes
    checkpoint = options.pop("checkpoint", None)
    words = ["landscape", str(attributes["probe"]), *([str(checkpoint)] if checkpoint else [])]
    return shlex.join([*words, *(word for item in options.items() for word in _words(*item)), "--out", str(out)])


def _words(name: str, value: Any) -> Iterator[str]:
    """An option as words of a command; none of an empty value."""
    option = f"--{name.replace('_', '-')}"
    if value in EMPTY:
        return
    if isinstance(value, bool):
        yield option if value else f"--no-{option[2:]}"
    elif isinstance(value, Mapping):
        yield from (word for key, item in value.items() for word in (option, f"{key}={item}"))
    elif isinstance(value, list) and name in ("mean", "std"):
        yield from (option, ",".join(f"{number:g}" for number in value))
    elif isinstance(value, list):
        yield from (word for item in value for word in (option, str(item)))
    else:
        yield from (option, str(value))
