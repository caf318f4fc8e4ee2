"""Draw stored comparisons: a panel per headline number, a row per network or group, with intervals and every seed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xarray as xr

from landscape.options import counted
from landscape.plots import appearance, broken, style, theme
from landscape.plots.comparison.networks import NAME
from landscape.plots.comparison.rows import OF_SAMPLES, outdated
from landscape.plots.figure import Axes, Figure
from landscape.results.stored_table import rows_of
from landscape.studies.study import Row

MEANING = (
    "Headline numbers of networks with 95 % intervals, or means of groups over seeds with those of Student's t and a "
    "point per seed, in a panel per number and protocol. Overlapping intervals do not say that two are equal, and "
    "intervals that just miss each other do not say that they differ: landscape compare tests the differences."
)
MOST, COLUMNS, LONGEST = 12, 3, 26  # panels, panels side by side on a page, characters of a name
ROW = 0.16  # inches
MEAN = "#0072B2"


@dataclass(frozen=True)
class Records:
    """The records of one comparison."""

    label: str
    rows: Sequence[Row]
    protocols: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by probe, in words
    over: Mapping[str, str] = field(default_factory=dict)  # by probe: what its errors are over

    @property
    def kind(self) -> str:
        """What a row of the panels is: `group`, or `network` without groups."""
        return "group" if any(row["kind"] == "group" for row in self.rows) else "network"

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(str(row[self.kind]) for row in self.rows if row["kind"] == self.kind))

    @property
    def panels(self) -> list[tuple[str, str, str]]:
        """(probe, protocol, number) that two have: flatness first, then what has a better direction, probe by probe."""
        found: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            if row["kind"] == self.kind:
                found.setdefault((str(row["probe"]), str(row["protocol"]), str(row["number"])), []).append(row)
        shared = {key: rows for key, rows in found.items() if len(rows) > 1} or found
        turn: dict[tuple[str, int], int] = {}
        order = {}
        for key, rows in shared.items():
            kind = ("flatter" not in str(rows[0]["reading"])) + (not rows[0]["reading"])
            turn[key[0], kind] = turn.get((key[0], kind), 0) + 1
            order[key] = kind, turn[key[0], kind] if kind else 0
        chosen = sorted(shared, key=order.__getitem__)[: MOST // 2 if theme.narrow() else MOST]
        probes = list(dict.fromkeys(probe for probe, *_ in chosen))
        return sorted(chosen, key=lambda key: probes.index(key[0]))


def studies(stored: Iterable[tuple[str, xr.Dataset]]) -> list[Records]:
    """Every stored comparison."""
    stored = list(stored)
    found = [(data, rows_of(data)) for name, data in stored if name.partition("/")[0] == NAME]
    return [
        Records(
            _label(data, outdated(data, stored)),
            rows,
            *(json.loads(str(data.attrs.get(name, "{}"))) for name in ("protocols", "errors_over")),
        )
        for data, rows in found
        if rows
    ]


def _label(data: xr.Dataset, age: str) -> str:
    label = str(data.attrs.get("label", ""))
    return f"{label} ({age})" if age else label


def page(study: Records) -> Figure:
    """The panels, with the names at the left of each row of them."""
    panels = study.panels
    columns = min(1 if theme.narrow() else COLUMNS, len(panels))
    figure, axes = style.beside(
        [], [], len(panels), height=ROW * max(len(study.names), 3) + 0.62, columns=columns, sharey=True,
        caption=_caption(study, panels), note=_note(study, panels),
    )  # fmt: skip
    several = {probe for probe, protocol, _ in panels if protocol != "a"}
    for ax, panel in zip(axes, panels, strict=True):
        draw(study, ax, panel, marked=panel[0] in several)
    return figure


def _caption(study: Records, panels: Sequence[tuple[str, str, str]]) -> str:
    """What is compared, and the protocols of the panels, equal ones once."""
    said: dict[str, list[str]] = {}
    for probe, protocol in dict.fromkeys((probe, protocol) for probe, protocol, _ in panels):
        words = study.protocols.get(probe, ())
        position = ord(protocol) - ord("a") if len(protocol) == 1 else len(words)
        if position < len(words):
            said.setdefault(words[position], []).append(f"{probe} [{protocol}]" if len(words) > 1 else probe)
    protocols = "; ".join(f"{', '.join(of)}: {words}" for words, of in said.items())
    return appearance.escaped(f"{study.label}. {protocols}.".replace("..", "."))


def _note(study: Records, panels: Sequence[tuple[str, str, str]]) -> str:
    shown = {(row["probe"], row["protocol"], row["number"]) for row in study.rows if row["kind"] == study.kind}
    more = f" {counted(len(shown) - len(panels), 'more number')} in the table." if len(shown) > len(panels) else ""
    if study.kind == "group":
        return f"Points: seeds; bars: means with 95 % intervals by Student's t.{more}"
    over = {probe: study.over.get(probe, OF_SAMPLES) for probe, *_ in panels}
    own = [f"{probe}: {words}" for probe, words in over.items() if words != OF_SAMPLES]
    crosses = " Crosses: unfinished results." if any(row["partial"] for row in study.rows) else ""
    others = f" ({'; '.join(own)})" if own else ""
    return f"Bars: 95 % intervals over samples{others}.{crosses}{more}"


def draw(study: Records, ax: Axes, panel: tuple[str, str, str], *, marked: bool = False) -> Axes:
    """Draw one number: a row per network or group; several protocols of a probe are `marked` in the title."""
    probe, protocol, number = panel
    own = [r for r in study.rows if (r["probe"], r["protocol"], r["number"]) == panel]
    shown = {str(row[study.kind]): row for row in own if row["kind"] == study.kind}
    for at, name in enumerate(study.names):
        seeds = [row["value"] for row in own if row["kind"] == "network" and row["group"] == name]
        if study.kind == "group" and seeds:
            below = np.full(len(seeds), at + 0.22)
            ax.plot(seeds, below, "o", color=theme.muted(), markersize=2.5, fillstyle="none", markeredgewidth=0.6)
        if name in shown:
            row = shown[name]
            value, low, high = (float(np.nan if row[key] is None else row[key]) for key in ("value", "low", "high"))
            marker = "D" if row.get("partial") is None else "x"
            ends = broken.bars(value, low, high)
            ax.errorbar([value], [at], xerr=ends, color=MEAN, marker=marker, markersize=3.2, elinewidth=1.0)
    example = next(iter(shown.values()), {})
    unit = f" ({example['unit']})" if example.get("unit") else ""
    names = appearance.cut(study.names, [LONGEST] * len(study.names))
    ax.set_yticks(range(len(names)), [appearance.escaped(name) for name in names])
    ax.set_ylim(len(study.names) - 0.4, -0.6)
    ax.tick_params(labelsize=style.SMALL)
    ax.locator_params(axis="x", nbins=5)
    ax.grid(axis="y", linewidth=0.5)
    ax.set_axisbelow(True)
    title = appearance.escaped(f"{probe}: {number}{f' [{protocol}]' if marked else ''}")
    side = theme.page_width() / (1 if theme.narrow() else COLUMNS) - 0.4
    ax.set_title(style.fitted(title, side, style.SMALL), fontsize=style.SMALL)
    ax.set_xlabel(
        style.fitted(f"{example.get('reading') or ''}{unit}".strip(), side, style.SMALL), fontsize=style.SMALL
    )
    return ax


def notes(data: xr.Dataset) -> dict[str, str]:
    """How many differences there are of each verdict."""
    verdicts = [str(row["verdict"]) for row in rows_of(data) if row["kind"] == "difference"]
    plain = [verdict.partition(":")[0].partition(" (")[0] for verdict in verdicts]
    return {"differences": f"{len(plain)}", **{word: str(plain.count(word)) for word in dict.fromkeys(plain)}}
