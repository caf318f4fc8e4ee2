"""Suggest the next command of a study: what is unfinished, what some networks lack, more planes, more seeds."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from landscape import options
from landscape.options import counted
from landscape.plots.report import protocols
from landscape.results import reader, run_key
from landscape.results.protocols import PREPROCESSING, of_several, stored

Stored = Sequence[tuple[str, xr.Dataset]]
WANTED = ("hessian", "surface", "fourier", "lesion")  # probes that the first questions need
SHOWN = 3  # names in one sentence


def command_to_measure(data: xr.Dataset, out: Path) -> str:
    """The command that measures a result again; "" where no command does, as of objects in memory or an import.

    Options with their default values are left out, and so is `--hvp`: the run chooses the fastest again.
    """
    return run_key.command_for(data.attrs, out, hvp=None)


def command_to_draw(out: Path, figure: str = "") -> str:
    """The command that draws all figures of a file, or one."""
    return shlex.join(["landscape", "plot", str(out), *(["--figure", figure] if figure else [])])


@dataclass(frozen=True)
class Step:
    """What to do, in one sentence, a note, and the command."""

    text: str
    note: str = ""
    command: str = ""


def next_step(ordered: Stored, file: Path) -> Step:
    """The first of: finish a result, measure what some networks lack, five planes, other seeds."""
    for name, data in ordered:
        if (lacking := unfinished(data)) and (command := command_to_measure(data, file)):
            text = f"Finish {data.attrs.get('probe', '')} of {name}: {lacking}."
            return Step(text, "It continues where it stopped.", command)
    known = {name: data for name, data in ordered if not of_several(data) and checkpoint(data)}
    known = {name: data for name, data in known.items() if command_to_measure(data, file)}
    for probe in WANTED:
        examples = {name: data for name, data in ordered if data.attrs.get("probe") == probe}
        measured = {checkpoint(data) for data in examples.values()}
        lacks = {n: data for n, data in known.items() if n not in examples and checkpoint(data) not in measured}
        if lacks and (not examples or len(lacks) <= len(examples)):
            example = next((data for data in examples.values() if checkpoint(data)), None)
            names, command = _together(probe, lacks, example, file)
            text = f"Measure {probe} of {listed(names, SHOWN)}, which the file lacks."
            return Step(text, "With the protocol of the others." if example is not None else "", command)
    surfaces = {name: data for name, data in ordered if data.attrs.get("probe") == "surface" and checkpoint(data)}
    random = {name: data for name, data in surfaces.items() if data.attrs.get("plane", "random") == "random"}
    seeds = {json.dumps(protocols.settings_of(data).get("seed", "0")) for data in random.values()}
    if len(seeds) == 1:
        text = "Every surface has one pair of random directions: five show how much the heights depend on the plane."
        _, command = _together("surface", random, next(iter(random.values())), file, directions=5)
        return Step(text, "What is there is not measured again.", command)
    text = (
        "Train every network with further seeds (landscape train ... --seed 1) and measure those too: the errors here "
        "are over samples, and say nothing about other training runs."
    )
    return Step(text)


def unfinished(data: xr.Dataset) -> str:
    """How many units of a result are missing, in words; "" for none."""
    units = int(data.variables["done"].size) if "done" in data else 0
    lacking = units - reader.finished_units(data) if units else 0
    return f"{lacking:,} of {counted(units, 'unit', ',')} missing" if lacking else ""


def checkpoint(data: xr.Dataset) -> str:
    """The path of the checkpoint that a result was measured from; "" if it is not known."""
    return str(stored(data, "spec").get("checkpoint") or "")


def listed(words: Iterable[str], most: int | None = None) -> str:
    """Words as `a, b and c`; with `most`, of more than so many `a, b, c and 4 more`."""
    words = list(words)
    if most is not None and len(words) > most:
        return options.listed(words, most)
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _together(
    probe: str, results: Mapping[str, xr.Dataset], example: xr.Dataset | None, file: Path, **changes: Any
) -> tuple[list[str], str]:
    """The networks that one command can measure, those loaded as the first is, and that command.

    Its other options are those of the example; without one, those that name the data of the first network.
    """
    asked = {name: stored(data, run_key.OPTIONS) for name, data in results.items()}
    loaded = {name: {key: one[key] for key in run_key.OF_NETWORK if key in one} for name, one in asked.items()}
    first = next(iter(results))
    names = [name for name in results if loaded[name] == loaded[first]]
    others = {key: asked[first][key] for key in (*run_key.OF_DATA, *PREPROCESSING) if key in asked[first]}
    if example is not None:
        others = {
            k: v for k, v in stored(example, run_key.OPTIONS).items() if k not in (*run_key.OF_NETWORK, "checkpoint")
        }
    attributes = {"probe": probe, run_key.OPTIONS: json.dumps(others | loaded[first])}
    words = shlex.split(run_key.command_for(attributes, file, hvp=None, **changes))
    return names, shlex.join([*words[:2], *dict.fromkeys(checkpoint(results[name]) for name in names), *words[2:]])
