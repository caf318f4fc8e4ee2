"""Choose name, colour, marker and line style of each result by the model's family, the same in every figure.

Vision transformers are red circles and residual networks blue diamonds, as in the papers. Up to twelve checkpoints
differ in hue, marker and dash, so that colour-blind readers and grey prints can tell them apart.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import xarray as xr

from landscape.plots.figure import Line, Look, Named
from landscape.plots.theme import dark
from landscape.results import protocols, reader

# family: pattern in its models' names, colour, marker; the first match counts
FAMILIES: Mapping[str, tuple[str, str, str]] = {
    "AlterNet": (r"alter", "#009E73", "s"),
    "Swin": (r"swin", "#B87900", "^"),
    "PiT": (r"(?<![a-z])pit(?![a-z])", "#C25FB0", "v"),
    "Mixer": (r"mixer", "#000000", "P"),
    "ViT": (r"vit|deit", "#D62728", "o"),
    "ResNet": (r"resne[xt]t?", "#1F77B4", "D"),
}
# Every other checkpoint takes the next free pair of these and of the families'. On white all have a contrast of 3 : 1.
OTHERS: Sequence[tuple[str, str]] = (
    ("#00108A", "h"), ("#82574E", "p"), ("#7C7BFF", "*"), ("#385107", "X"), ("#6B276A", "<"), ("#4D4D4D", ">"),
)  # fmt: skip
PAIRS: Sequence[tuple[str, str]] = (*OTHERS, *((color, marker) for _, color, marker in FAMILIES.values()))
NEAR = 0.5  # distance of two colours, red, green and blue from 0 to 1, below which the second comes last
ON_DARK: Mapping[str, str] = {
    "#D62728": "#FF6B6B", "#1F77B4": "#5FB0F0", "#009E73": "#2FC79A", "#B87900": "#F4C430", "#C25FB0": "#F49AE0",
    "#000000": "#FFFFFF", "#00108A": "#5470FF", "#82574E": "#D9A08B", "#7C7BFF": "#A98BFF", "#385107": "#86C232",
    "#6B276A": "#C44FA0", "#4D4D4D": "#8B949E",
}  # fmt: skip
TELLING = ("plane", "along", "operator")  # named first among what distinguishes results of one checkpoint
LINES: Sequence[Named] = ("-", "--", "-.", ":")
# The second cue of checkpoints beside the marker: lines without markers are told apart in grey too.
DASHES: Sequence[Line] = (
    "-", "--", "-.", ":", (0, (7, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (1.5, 0.8)), (0, (9, 1.5, 3, 1.5)),
    (0, (5, 1, 1, 1, 1, 1, 1, 1)), (0, (3, 3)), (0, (10, 3)), (0, (1, 2.5)),
)  # fmt: skip


def loss_units(results: Sequence[xr.Dataset]) -> str:
    """Units of the losses of several results, for an axis that they share."""
    units = dict.fromkeys(str(data["loss"].attrs.get("units", "nats")) for data in results if "loss" in data)
    return " / ".join(map(escaped, units))


def loss_label(results: Sequence[xr.Dataset], name: str = "loss") -> str:
    """The label of an axis of losses; a user's own loss has no units."""
    units = loss_units(results)
    return name if units in ("loss", "1") else f"{name} ({units})"


def look_of(data: xr.Dataset) -> Look:
    """The look of one result by itself."""
    return looks([data])[0]


def looks(results: Sequence[xr.Dataset], among: Sequence[xr.Dataset] | None = None) -> list[Look]:
    """Distinct looks for several results.

    Colour and marker belong to the checkpoint (its label): the last one of a known family has the family's, every
    other one the next pair that is free, those of a colour near a family's last. The dash distinguishes checkpoints
    too, and results of one checkpoint. `among`: all results of a study, so that a checkpoint looks the same in every
    figure.
    """
    families: dict[str, str] = {}  # label: family
    measured: set[str] = set()  # labels of single networks
    for data in results if among is None else among:
        families.setdefault(label_of(data), family(data))
        measured |= {label_of(data)} if not protocols.of_several(data) else set()
    known = [(label, kind) for label, kind in families.items() if kind in FAMILIES]
    last = {kind: label for label, kind in sorted(known, key=lambda item: item[0] in measured)}
    taken = [FAMILIES[kind][1:] for kind in last]
    free = sorted((pair for pair in PAIRS if pair not in taken), key=lambda pair: _near(pair[0], taken)) or PAIRS
    others = [label for label, kind in families.items() if last.get(kind) != label]
    order = list(families)
    found: list[Look] = []
    seen: list[str] = []
    for data, name in zip(results, names(results), strict=True):
        label = label_of(data)
        kind = families[label]
        color, marker = FAMILIES[kind][1:] if label not in others else free[others.index(label) % len(free)]
        line = DASHES[(order.index(label) + seen.count(label)) % len(DASHES)]
        found.append(Look(name, ON_DARK[color] if dark() else color, marker, line))
        seen.append(label)
    return found


@lru_cache
def _rgb(color: str) -> tuple[float, ...]:
    """Red, green and blue of #RRGGBB, from 0 to 1."""
    return tuple(int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))


def _near(color: str, taken: Sequence[tuple[str, str]]) -> bool:
    """Whether a colour resembles one of the taken ones, such as navy blue that of residual networks."""
    return any(math.dist(_rgb(color), _rgb(other)) < NEAR for other, _ in taken)


def family(data: xr.Dataset) -> str:
    """The family of a model by its name, else by the result's label; for an unknown family, the name itself."""
    return _family(str(data.attrs.get("model", "")), label_of(data))


@lru_cache(2**12)
def _family(model: str, label: str) -> str:
    matching = (name for text in (model, label) for name in FAMILIES if re.search(FAMILIES[name][0], text.lower()))
    return next(matching, model or label)


def names(results: Sequence[xr.Dataset]) -> list[str]:
    """The labels; results with the same label also get the parameters in which they differ."""
    pairs = zip(map(label_of, results), differences(results), strict=True)
    return [escaped(f"{label} ({differs})" if differs else label) for label, differs in pairs]


def differences(results: Sequence[xr.Dataset]) -> list[str]:
    """What tells each result from the others with its label; "" for one that has its label alone."""
    alike: dict[str, list[xr.Dataset]] = {}
    for data in results:
        alike.setdefault(label_of(data), []).append(data)
    return [_difference(data, same) if len(same := alike[label_of(data)]) > 1 else "" for data in results]


def escaped(text: str) -> str:
    r"""Text from a file, escaped for matplotlib: `$` starts no formula, a leading `_` hides no legend entry."""
    text = " ".join(text.split()).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def cut(names: Sequence[str], letters: Sequence[int]) -> list[str]:
    """Names of at most so many letters each: cut at the front, or in the middle where two would be equal then."""

    def short(name: str, most: int, start: int) -> str:
        return name if len(name) <= most else f"{name[:start]}…{name[start + 1 - most :]}"

    front = [short(name, most, 0) for name, most in zip(names, letters, strict=True)]
    if len(set(front)) == len(set(names)):
        return front
    return [short(name, most, most // 2) for name, most in zip(names, letters, strict=True)]


def label_of(data: xr.Dataset) -> str:
    """The label of a result, as it is stored."""
    return str(data.attrs.get("label", ""))


def _difference(data: xr.Dataset, alike: Sequence[xr.Dataset]) -> str:
    """The fewest facts that distinguish a result from the others, chosen greedily by how many pairs each separates."""
    mine, others = _facts(data), [_facts(other) for other in alike]
    different = [key for key in mine if any(other.get(key) != mine[key] for other in others)]
    named: list[str] = []
    pairs = [(one, other) for i, one in enumerate(others) for other in others[:i]]
    while pairs and different:
        known = [key for key in different if key != "digest"]
        key = max(known, key=lambda key: (_separated(pairs, key), key in TELLING), default="digest")
        if not _separated(pairs, key):
            if "digest" not in different:
                break
            key = "digest"
        named.append(key)
        different.remove(key)
        pairs = [(one, other) for one, other in pairs if one.get(key) == other.get(key)]
    return ", ".join(_in_words(key, mine[key]) for key in mine if key in named) or "again"


def _separated(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], key: str) -> int:
    return sum(one.get(key) != other.get(key) for one, other in pairs)


def _in_words(key: str, value: Any) -> str:
    """A fact in words, with the last part of each path."""
    if isinstance(value, bool):
        return key if value else f"no {key}"
    if isinstance(value, str):
        value = ",".join(part.rstrip("/").rpartition("/")[2] for part in value.split(","))
    return f"{key} {value}".strip()


def _facts(data: xr.Dataset) -> dict[str, Any]:
    spec = protocols.stored(data, "spec")
    protocol: dict[str, Any] = {key: spec[key] for key in ("loss", "weight_decay", "split", "augment") if key in spec}
    if "loss" in protocol:
        protocol["loss"] = str(data.attrs.get("loss") or protocol["loss"] or "cross-entropy").rpartition("/")[2]
    attributes = {key: data.attrs.get(key, "") for key in ("data", "samples", "batch_size", "checkpoint_sha256")}
    attributes["checkpoint_sha256"] = str(attributes["checkpoint_sha256"])[:6]
    protocol["smoothing"] = bool(data.attrs.get("smoothing", ""))
    digest = str(data.encoding.get("group", "")).rpartition("-")[2]
    return {**reader.parameters_of(data), **protocol, **attributes, "digest": digest}
