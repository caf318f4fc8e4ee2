"""Identify one result of a results file, so that any process can merge it, and give the command that measures it."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from landscape.headline import stored_headlines
from landscape.probe import Plan, Quantity, Values
from landscape.results.journal import Record

if TYPE_CHECKING:
    import xarray as xr

Arrays: TypeAlias = dict[str, np.ndarray]
Reduce: TypeAlias = Callable[[Arrays], Values]
ReduceOf: TypeAlias = Callable[[str, Mapping[str, Any]], Reduce | None]  # of a probe's name and parameters
LABEL = 400  # characters of a stored label
USES = "uses"  # attribute of a result: the loading options that its probe says change the numbers, by commas
SEVERAL = "several"  # attribute of a result: what several checkpoints of its command are, `Probe.several`


@dataclass(frozen=True)
class RunKey:
    """One result: runs with the same probe and digest continue it, any other digest gets a group of its own."""

    probe: str
    label: str  # readable, the attribute `label` and, made safe, part of the group's name; does not identify the result
    digest: str  # of everything that can change the numbers
    plan: Plan  # units, quantities, axes
    attributes: Mapping[str, Any] = field(default_factory=dict)  # stored with the group: parameters, versions, ...
    relabel: bool = False  # the user gave the label, which a result that is stored already takes too

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", readable_label(self.label))


@dataclass(frozen=True)
class Outcome:
    """Where a result lies and how much of it this run measured."""

    group: str
    units: int  # of the whole result
    measured: int  # units that this run measured; 0 if the result was complete before
    data: xr.Dataset | None = None  # the result itself, of a run without a file
    failed: str = ""  # the error of a probe that lost its units while others of the same pass went on


@cache
def versions() -> Mapping[str, str]:
    """Versions of everything that can change a number."""
    libraries = {name: metadata.version(name) for name in ("torch", "numpy", "scipy", "h5py")}
    try:
        own = metadata.version("landscape-probes")
    except metadata.PackageNotFoundError:  # a checkout on the import path
        own = "not installed"
    return {"landscape": own, "python": platform.python_version(), **libraries}


def declared(probe: Any) -> dict[str, str]:
    """Attributes of a result by what its probe declares."""
    certified = {"certified": json.dumps(dict(probe.certified))} if probe.certified else {}
    about = {USES: ",".join(probe.uses), SEVERAL: probe.several, "errors_over": probe.errors_over}
    return {**about, **certified, **stored_headlines(probe.headlines)}


def readable_label(label: str) -> str:
    """A label as it is stored: one line of printable text that HDF5 accepts."""
    return " ".join("".join(c if c.isprintable() else " " for c in label).split())[:LABEL] or "checkpoint"


def safe_label(label: str) -> str:
    """A label with the characters that a group's name allows."""
    return "".join(c if c.isalnum() or c in "._+-" else "_" for c in label).strip(".") or "checkpoint"


def fixed_width(values: np.ndarray) -> np.ndarray:
    """Text as fixed-width unicode (an object array has no bytes of its own), numbers as they are."""
    return np.asarray(values, dtype=np.str_) if np.asarray(values).dtype.kind in "OSU" else np.asarray(values)


def to_header(key: RunKey) -> Record:
    """The first record of a journal: enough to merge it without the process that wrote it."""
    plan = key.plan
    arrays: Arrays = {f"axis:{name}": values for name, values in {**plan.over, **plan.axes}.items()}
    arrays |= {f"label:{name}": fixed_width(values) for name, (_, values) in plan.labels.items()}
    tables = {"quantities": plan.quantities, "summaries": plan.summaries, "about": plan.about}
    data: dict[str, Any] = {table: {n: asdict(q) for n, q in rows.items()} for table, rows in tables.items()}
    data["labels"] = {name: asdict(quantity) for name, (quantity, _) in plan.labels.items()}
    data |= {"over": list(plan.over), "axes": list(plan.axes), "facts": dict(plan.facts), "grows": plan.grows}
    data |= {"probe": key.probe, "label": key.label, "digest": key.digest}
    return Record({"key": data, "attributes": dict(key.attributes)}, arrays)


def from_header(header: Record) -> RunKey:
    """The key of the result that a journal belongs to."""
    data = header.data["key"]

    def table(name: str) -> dict[str, Quantity]:
        return {row: Quantity(**{**q, "dims": tuple(q["dims"])}) for row, q in data[name].items()}

    plan = Plan(
        over={name: header.arrays[f"axis:{name}"] for name in data["over"]},
        quantities=table("quantities"),
        axes={name: header.arrays[f"axis:{name}"] for name in data["axes"]},
        labels={name: (quantity, header.arrays[f"label:{name}"]) for name, quantity in table("labels").items()},
        summaries=table("summaries"),
        about=table("about"),
        facts=data["facts"],
        grows=data.get("grows", False),
    )
    return RunKey(data["probe"], data["label"], data["digest"], plan, header.data["attributes"])


SAMPLES = 1024  # the default of every probe's command
OPTIONS = "options"  # attribute of a result that a command measures
# Loading options without which another command cannot load the same network, and the same data.
OF_NETWORK = ("model", "model_arg", "weights", "adapter", "mc_dropout", "trust_pickle", "allow_missing")
OF_DATA = ("data", "data_root", "loss", "outputs", "ignore_index", "block_size", "image_size")
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
    out_words = ["--out", str(out)] if str(out) else []
    return shlex.join([*words, *(word for item in options.items() for word in _words(*item)), *out_words])


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
