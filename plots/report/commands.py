"""Write the commands that measured a result and drew a figure, from what the file stores."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xarray as xr

# Fields of the stored spec that are no options, or that the first word of the command says.
NOT_OPTIONS = ("checkpoint", "ordered", "logits", "device", "seed")
# What is left out where it has this value, which is the default of every command.
PLAIN: Mapping[str, Any] = {
    "batch_size": 128, "weights": "raw", "ignore_index": 255, "precision": "fp32", "memory_format": "contiguous",
}  # fmt: skip
CHOSEN = ("hvp", "seed", "l2_definition", "random_start")  # by the run, or written otherwise, or without an off switch


def measured(data: xr.Dataset, out: Path) -> str:
    """The command that measures a result again; "" where no command does, as of objects in memory or an import.

    Options are those stored, so that the command stays right where defaults change; empty ones are left out.
    """
    stored = str(data.attrs.get("spec", ""))
    if not stored or not data.attrs.get("probe"):
        return ""
    try:
        spec, parameters = json.loads(stored), json.loads(str(data.attrs.get("parameters", "{}")))
    except ValueError:
        return ""
    if not isinstance(spec, dict) or not (spec.get("checkpoint") or spec.get("model")):
        return ""
    words = ["landscape", str(data.attrs["probe"])]
    words += [str(spec["checkpoint"])] if spec.get("checkpoint") else []
    words += _options({key: value for key, value in parameters.items() if key not in CHOSEN})
    words += _options({key: value for key, value in spec.items() if key not in NOT_OPTIONS})
    seed = parameters.get("seed", spec.get("seed", 0))
    words += ["--seed", str(seed)] if seed else []
    return shlex.join([*words, "--out", str(out)])


def drawn(out: Path) -> str:
    """The command that draws all figures of a file."""
    return shlex.join(["landscape", "plot", str(out)])


def _options(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value in (None, "", False) or value == PLAIN.get(name) or (isinstance(value, list | dict) and not value):
            continue
        if value is True:
            yield option
        elif isinstance(value, dict):
            yield from (word for key, item in value.items() for word in (option, f"{key}={item}"))
        elif isinstance(value, list):
            parts = [str(part) for part in value]
            yield from (option, ",".join(parts)) if name in ("mean", "std") else _repeated(option, parts)
        else:
            yield from (option, str(value))


def _repeated(option: str, parts: list[str]) -> Iterator[str]:
    for part in parts:
        yield from (option, part)
