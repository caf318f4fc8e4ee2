"""Suggest the next command of a study: what is unfinished, what some networks lack, more planes, more seeds."""

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xarray as xr

from landscape import options
from landscape.plots.report import protocols
from landscape.results import reader, run_key
from landscape.results.protocols import of_several, stored

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
            probe, units = data.attrs.get("probe", ""), data.variables["done"].size
            text = f"Finish {probe} of {name}: {lacking:,} of {units:,} units are missing."
            return Step(text, "It continues where it stopped.", command)
    paths = {name: str(path) for name, data in ordered if not of_several(data) and (path := checkpoint(data))}
    for probe in WANTED:
        examples = {name: data for name, data in ordered if data.attrs.get("probe") == probe}
        measured = {checkpoint(data) for data in examples.values()}
        lacks = [name for name, path in paths.items() if name not in examples and path not in measured]
        if lacks and (not examples or len(lacks) <= len(examples)):
            example = next((data for data in examples.values() if checkpoint(data)), None)
            options = _options(example, file) if example is not None else ["--out", str(file)]
            text = f"Measure {probe} of {listed(lacks, SHOWN)}, which the file lacks."
            note = "With the protocol of the others." if example is not None else ""
            return Step(text, note, shlex.join(["landscape", probe, *(paths[name] for name in lacks), *options]))
    surfaces = [data for _, data in ordered if data.attrs.get("probe") == "surface" and checkpoint(data)]
    random = [data for data in surfaces if data.attrs.get("plane", "random") == "random"]
    seeds = {json.dumps(protocols.settings_of(data).get("seed", "0")) for data in random}
    if len(seeds) == 1:
        words = ["landscape", "surface", *dict.fromkeys(map(checkpoint, random)), "--directions", "5"]
        text = "Every surface has one pair of random directions: five show how much the heights depend on the plane."
        options = _without(_options(random[0], file), "--directions")
        return Step(text, "What is there is not measured again.", shlex.join([*words, *options]))
    text = (
        "Train every network with further seeds (landscape train ... --seed 1) and measure those too: the errors here "
        "are over samples, and say nothing about other training runs."
    )
    return Step(text)


def unfinished(data: xr.Dataset) -> int:
    """How many units of a result are missing."""
    return int(data.variables["done"].size) - reader.finished_units(data) if "done" in data else 0


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


def _options(data: xr.Dataset, file: Path) -> list[str]:
    """The options of the command that measured a result from a checkpoint."""
    return shlex.split(command_to_measure(data, file))[3:]


def _without(options: Sequence[str], name: str) -> list[str]:
    """Options with one of them, and its value, left out."""
    at = options.index(name) if name in options else len(options)
    return [*options[:at], *options[at + 2 :]]
