"""Draw stored comparisons: a panel per headline number, a row per network or group, with intervals and every seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import escaped
from landscape.plots.compared import NAME
from landscape.plots.figure import Axes, Figure
from landscape.results.stored_table import rows_of

MEANING = (
    "Headline numbers of networks with 95 % intervals, or means of groups over seeds with those of Student's t and a "
    "point per seed, in a panel per number and protocol. Overlapping intervals do not say that two are equal, and "
    "intervals that just miss each other do not say that they differ: landscape compare tests the differences."
)
MOST, COLUMNS, LONGEST = 12, 3, 26  # panels, panels side by side, characters of a name
ROW = 0.16  # inches
MEAN, SEED = "#0072B2", "#555555"
Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The records of one comparison."""

    label: str
    rows: Sequence[Row]

    @property
    def kind(self) -> str:
        """What a row of the panels is: `group`, or `network` without groups."""
        return "group" if any(row["kind"] == "group" for row in self.rows) else "network"

    @property
    def names(self) -> list[str]:
        """Networks or groups, in order."""
        return list(dict.fromkeys(str(row[self.kind]) for row in self.rows if row["kind"] == self.kind))

    @property
    def panels(self) -> list[tuple[str, str, str]]:
        """(probe, protocol, number): those with a better direction first, as many as fit."""
        found: dict[tuple[str, str, str], bool] = {}
        for row in self.rows:
            if row["kind"] == self.kind:
                key = str(row["probe"]), str(row["protocol"]), str(row["number"])
                found[key] = found.get(key, False) or bool(row["reading"])
        judged = [key for key, reading in found.items() if reading]
        return [*judged, *(key for key in found if key not in judged)][:MOST]


def studies(stored: Iterable[tuple[str, xr.Dataset]]) -> list[Study]:
    """Every stored comparison."""
    found = [(data, rows_of(data)) for name, data in stored if name.partition("/")[0] == NAME]
    return [Study(str(data.attrs.get("label", "")), rows) for data, rows in found if rows]


def page(study: Study) -> Figure:
    """The panels, with the names at the left of each row of them."""
    panels = study.panels
    columns = min(COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    each = ROW * max(len(study.names), 3) + 0.62
    words = "Points: seeds; bars: means with 95 % intervals by Student's t." if study.kind == "group" else ""
    left_out = len({(r["probe"], r["protocol"], r["number"]) for r in study.rows if r["kind"] == study.kind}) - len(
        panels
    )
    more = f" {left_out} more numbers in the table." if left_out else ""
    note = f"{words or 'Bars: 95 % intervals over samples (hessian: mini-batches).'}{more}"
    caption = f"{escaped(study.label)}."
    figure = style.page([], [], height=lines * each, caption=caption, note=note)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    several = {probe for probe, protocol, _ in panels if protocol != "a"}
    for i, ax in enumerate(grid.flat):
        if i >= len(panels):
            ax.remove()
            continue
        draw(study, ax, panels[i], marked=panels[i][0] in several)
    return figure


def draw(study: Study, ax: Axes, panel: tuple[str, str, str], *, marked: bool = False) -> Axes:
    """Draw one number: a row per network or group; several protocols of a probe are `marked` in the title."""
    probe, protocol, number = panel
    own = [r for r in study.rows if (r["probe"], r["protocol"], r["number"]) == panel]
    shown = {str(row[study.kind]): row for row in own if row["kind"] == study.kind}
    for at, name in enumerate(study.names):
        seeds = [row["value"] for row in own if row["kind"] == "network" and row["group"] == name]
        if study.kind == "group" and seeds:
            ax.plot(seeds, np.full(len(seeds), at + 0.22), "o", color=SEED, markersize=2.5, fillstyle="none", mew=0.6)
        if name in shown:
            row = shown[name]
            value, low, high = (float(np.nan if row[key] is None else row[key]) for key in ("value", "low", "high"))
            bars = np.nan_to_num(np.array([[value - low], [high - value]])).clip(min=0.0)
            ax.errorbar([value], [at], xerr=bars, color=MEAN, marker="D" if row.get("partial") is None else "x",
                        markersize=3.2, elinewidth=1.0)  # fmt: skip
    example = next(iter(shown.values()), {})
    unit = f" ({example['unit']})" if example.get("unit") else ""
    ax.set_yticks(range(len(study.names)), [escaped(_shortened(name)) for name in study.names])
    ax.set_ylim(len(study.names) - 0.4, -0.6)
    ax.tick_params(labelsize=style.SMALL)
    ax.locator_params(axis="x", nbins=5)
    ax.grid(axis="y", color="0.92", linewidth=0.5)
    ax.set_axisbelow(True)
    title = escaped(f"{probe}: {number}{f' [{protocol}]' if marked else ''}")
    side = style.PAGE / COLUMNS - 0.4
    ax.set_title(style.fitted(title, side, style.SMALL), fontsize=style.SMALL)
    ax.set_xlabel(
        style.fitted(f"{example.get('reading') or ''}{unit}".strip(), side, style.SMALL), fontsize=style.SMALL
    )
    return ax


def headline(data: xr.Dataset) -> dict[str, float | str]:
    """How many differences there are of each verdict."""
    verdicts = [str(row["verdict"]) for row in rows_of(data) if row["kind"] == "difference"]
    plain = [verdict.partition(":")[0].partition(" (")[0] for verdict in verdicts]
    return {"differences": f"{len(plain)}", **{word: str(plain.count(word)) for word in dict.fromkeys(plain)}}


def _shortened(name: str) -> str:
    """A long name with its start and its end, which tell networks apart."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2 - 1]}…{name[-LONGEST // 2 :]}"
