"""How an answer looks in every figure: its name, and a colour, marker and line that follow its family.

Vision transformers are red circles and residual networks blue diamonds, as in the papers; every other family has a
colour of the Okabe-Ito palette, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import xarray as xr

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

Color = str | tuple[float, float, float]
Line = Literal["-", "--", "-.", ":"]
# family: what its models' names contain, colour, marker; the first that fits counts
FAMILIES: Mapping[str, tuple[str, Color, str]] = {
    "AlterNet": (r"alter", "#009E73", "s"),
    "Swin": (r"swin", "#E69F00", "^"),
    "PiT": (r"(?<![a-z])pit(?![a-z])", "#CC79A7", "v"),
    "Mixer": (r"mixer", "#000000", "P"),
    "ViT": (r"vit|deit", "tab:red", "o"),
    "ResNet": (r"resne[xt]t?", "tab:blue", "D"),
}
OTHERS: Sequence[tuple[Color, str]] = (("#56B4E9", "X"), ("#999933", "p"), ("#882255", "h"), ("#555555", "*"))
LINES: Sequence[Line] = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Look:
    """Name, colour, marker and line of one answer."""

    label: str
    color: Color = "#555555"
    marker: str = "o"
    line: Line = "-"

    def sample(self) -> Line2D:
        """What stands for it in a legend."""
        from matplotlib.lines import Line2D

        return Line2D([], [], color=self.color, marker=self.marker, linestyle=self.line, label=self.label)


def loss_units(answers: Sequence[xr.Dataset]) -> str:
    """Units of the losses of some answers, for an axis that they share."""
    return " / ".join(dict.fromkeys(str(data["loss"].attrs.get("units", "nats")) for data in answers if "loss" in data))


def look(data: xr.Dataset) -> Look:
    """The look of one answer by itself."""
    return looks([data])[0]


def looks(answers: Sequence[xr.Dataset], among: Sequence[xr.Dataset] | None = None) -> list[Look]:
    """Looks that tell answers apart.

    Colour and marker are the checkpoint's (its label's): of several in one family the last has the pure colour, earlier
    ones are paler. The line tells answers of one checkpoint apart, or else checkpoints of one family.

    Args:
        answers: of one figure.
        among: all answers of a study, so that a checkpoint looks the same in every figure; default: `answers`.
    """
    families: dict[str, list[str]] = {}
    for data in answers if among is None else among:
        labels = families.setdefault(family(data), [])
        if _label(data) not in labels:
            labels.append(_label(data))
    strangers = [name for name in families if name not in FAMILIES]
    found: list[Look] = []
    seen: list[str] = []
    for data, name in zip(answers, names(answers), strict=True):
        kin, label = family(data), _label(data)
        color, marker = FAMILIES[kin][1:] if kin in FAMILIES else OTHERS[strangers.index(kin) % len(OTHERS)]
        members = families[kin]
        later = len(members) - 1 - members.index(label)
        paleness = 0.6 * later / max(len(members) - 1, 1)
        line = LINES[(later + seen.count(label)) % len(LINES)]
        found.append(Look(name, paler(color, paleness) if paleness else color, marker, line))
        seen.append(label)
    return found


def family(data: xr.Dataset) -> str:
    """The family of a model by its name, else by the answer's label; of a stranger, the name itself."""
    model, label = str(data.attrs.get("model", "")), _label(data)
    for text in (model.lower(), label.lower()):
        for name, (pattern, _, _) in FAMILIES.items():
            if re.search(pattern, text):
                return name
    return model or label


def paler(color: Color, share: float) -> Color:
    """A colour mixed with white."""
    from matplotlib.colors import to_rgb

    red, green, blue = ((1 - share) * part + share for part in to_rgb(color))
    return red, green, blue


def names(answers: Sequence[xr.Dataset]) -> list[str]:
    """The labels; answers with one label are told apart by the parameters in which they differ."""
    labels = [_label(data) for data in answers]
    found = []
    for data, label in zip(answers, labels, strict=True):
        alike = [other for other, name in zip(answers, labels, strict=True) if name == label]
        found.append(plain(f"{label} ({_difference(data, alike)})" if len(alike) > 1 else label))
    return found


def plain(text: str) -> str:
    r"""Text from a file as matplotlib may show it: `$` starts no formula, a leading `_` hides no legend entry."""
    text = " ".join(text.split()).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def asked(data: xr.Dataset) -> dict[str, Any]:
    """The parameters of an answer's question: how its products were made is none of it."""
    found: dict[str, Any] = json.loads(data.attrs.get("parameters", "{}"))
    return {key: value for key, value in found.items() if key != "hvp"}


def _label(data: xr.Dataset) -> str:
    return str(data.attrs.get("label", ""))


def _difference(data: xr.Dataset, alike: Sequence[xr.Dataset]) -> str:
    """What tells an answer from the others: of all that differs no more than it takes, the most telling first."""
    mine, others = _facts(data), [_facts(other) for other in alike]
    different = [key for key in mine if any(other.get(key) != mine[key] for other in others)]
    named: list[str] = []
    pairs = [(one, other) for i, one in enumerate(others) for other in others[:i]]
    while pairs and different:
        key = max((key for key in different if key != "digest"), key=lambda k: _told_apart(pairs, k), default="digest")
        if not _told_apart(pairs, key):
            if "digest" not in different:
                break
            key = "digest"
        named.append(key)
        different.remove(key)
        pairs = [(one, other) for one, other in pairs if one.get(key) == other.get(key)]
    return ", ".join(_said(key, mine[key]) for key in mine if key in named) or "again"


def _told_apart(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], key: str) -> int:
    return sum(one.get(key) != other.get(key) for one, other in pairs)


def _said(key: str, value: Any) -> str:
    """A fact in words; of paths the last part."""
    if isinstance(value, bool):
        return key if value else f"no {key}"
    text = (
        ",".join(part.rstrip("/").rpartition("/")[2] for part in value.split(",")) if isinstance(value, str) else value
    )
    return f"{key} {text}".strip()


def _facts(data: xr.Dataset) -> dict[str, Any]:
    spec = json.loads(str(data.attrs.get("spec", "{}")) or "{}")
    protocol = {key: spec[key] for key in ("loss", "weight_decay", "split", "augment") if key in spec}
    if "loss" in protocol:
        protocol["loss"] = str(protocol["loss"] or "cross-entropy").rpartition("/")[2]
    attributes = {key: data.attrs.get(key, "") for key in ("data", "samples", "batch_size", "checkpoint_sha256")}
    attributes["checkpoint_sha256"] = str(attributes["checkpoint_sha256"])[:6]
    digest = str(data.encoding.get("group", "")).rpartition("-")[2]
    return {**asked(data), **protocol, **attributes, "digest": digest}
