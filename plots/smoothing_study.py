"""Draw a network with and without smoothing blocks: scores over ensemble sizes, features and curvature ("Blurs")."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import depth, hessian, style
from landscape.plots.appearance import Look
from landscape.plots.figure import Axes, Figure
from landscape.results import reader
from landscape.results.calibration import paired_difference, stored_scores

MEANING = (
    "The same weights with and without smoothing blocks: scores against the number of dropout masks whose "
    "probabilities are averaged, features and curvature, with differences in the table that are paired over samples. A "
    "network that was not trained with the blocks also pays for features that it does not expect."
)
LOOKS = {False: Look("without smoothing", "tab:blue", "D"), True: Look("with smoothing", "tab:green", "o", "--")}
SCORES = {"nll": "NLL (nats)", "accuracy": "accuracy", "ece": "calibration error (ECE)"}
PERCENT = ("accuracy", "ece")
Row = dict[str, str]


@dataclass
class Study:
    """The results of one checkpoint on one set of samples."""

    label: str
    scores: dict[tuple[int, bool], xr.Dataset] = field(default_factory=dict)  # by dropout masks and smoothing
    others: dict[tuple[str, bool], xr.Dataset] = field(default_factory=dict)  # by probe and smoothing

    @property
    def sizes(self) -> list[int]:
        """Numbers of dropout masks that were measured with and without smoothing; 0 is the network as it is."""
        return sorted({size for size, smooth in self.scores if (size, not smooth) in self.scores})


def studies(stored: Iterable[tuple[str, xr.Dataset]]) -> list[Study]:
    """The checkpoints that were scored with and without smoothing; of results of one kind the last counts."""
    found: dict[str, Study] = {}
    scored: dict[str, Any] = {}
    for name, data in stored:
        probe, smooth = name.partition("/")[0], bool(data.attrs.get("smoothing", ""))
        label = str(data.attrs.get("label", ""))
        key = str(data.attrs.get("checkpoint_sha256", "")) or label
        study = found.setdefault(key, Study(label))
        if probe == "calibration" and not (data["done"] == 0).any():
            same = scored.setdefault(key, data.attrs.get("data_sha256"))
            if same == data.attrs.get("data_sha256"):
                study.scores[members_of(data), smooth] = data
        elif probe in ("fourier", "uncertainty", "hessian"):
            study.others[probe, smooth] = data
    return [study for study in found.values() if study.sizes]


def members_of(data: xr.Dataset) -> int:
    """The number of dropout masks that a result was measured with."""
    return int(json.loads(str(data.attrs.get("spec", "{}")) or "{}").get("mc_dropout", 0))


def tables(path: Path | str) -> list[list[Row]]:
    """One table per checkpoint: scores by number of dropout masks, without and with smoothing, and their difference."""
    return [table(study) for study in studies(reader.groups(path))]


def table(study: Study) -> list[Row]:
    """Scores in percent or nats, with the difference by smoothing and its 95 % interval, paired over samples."""
    rows = []
    for size in study.sizes:
        row: Row = {"dropout masks": str(size) if size else "no dropout"}
        without, smooth = (study.scores[size, key] for key in (False, True))
        differences = paired_difference(*(stored_scores(_arrays(data)) for data in (smooth, without)))
        for name in SCORES:
            unit, digits = (100.0, 1) if name in PERCENT else (1.0, 3)
            value, interval = differences[name]
            numbers = [unit * number for number in (float(without[name]), float(smooth[name]))]
            short = {"nll": "NLL", "ece": "ECE"}.get(name, name)
            row[f"{short}{' %' * (unit > 1)}"] = " → ".join(f"{number:.{digits}f}" for number in numbers)
            ends = f"[{unit * interval.low:+.{digits}f}, {unit * interval.high:+.{digits}f}]"
            row[f"{short} difference"] = f"{unit * value:+.{digits}f} {ends}"
        rows.append(row)
    return rows


def _arrays(data: xr.Dataset) -> Mapping[str, Any]:
    return {str(name): values.values for name, values in data.data_vars.items()}


def page(study: Study) -> Figure:
    """Scores over ensemble sizes, features and curvature in six panels, and the table."""
    shown = [study.scores[size, smooth] for size in study.sizes[-1:] for smooth in (False, True)]
    rows = table(study)
    plain = "; lines without markers: the network without dropout" if 0 in study.sizes and len(study.sizes) > 1 else ""
    note = (
        f"Error bars of scores: 95 % intervals over samples{plain}. Differences in the table: paired over samples, "
        "with 95 % intervals. Hollow: smoothing blocks. Lines among eigenvalues: mean of the positive ones."
    )
    looks = list(LOOKS.values())
    handles = [look.legend_handle() for look in looks]
    figure = style.page(shown, looks, height=4.6 + 0.16 * len(rows), legend=handles, note=note)
    grid = figure.add_gridspec(3, 3, height_ratios=(2.0, 2.0, 0.1 + 0.17 * (len(rows) + 1)))
    axes = [[figure.add_subplot(grid[row, column]) for column in range(3)] for row in range(2)]
    for ax, name in zip(axes[0], SCORES, strict=True):
        draw_scores(study, ax, name)
    panels = (("fourier", "high_frequency"), ("uncertainty", _uncertainty(study)))
    for ax, (probe, quantity) in zip(axes[1], panels, strict=False):
        _draw_depth(study, ax, probe, quantity)
    _draw_eigenvalues(study, axes[1][2])
    _draw_table(figure.add_subplot(grid[2, :]), rows)
    return figure


def draw_scores(study: Study, ax: Axes, name: str) -> Axes:
    """Draw a score over the number of dropout masks, with and without smoothing."""
    sizes = [size for size in study.sizes if size]
    for smooth, look in LOOKS.items():
        found = {size: study.scores[size, smooth] for size in study.sizes}
        if 0 in found:
            kind = "D" if not sizes and not smooth else "o" if not sizes else ""
            ax.axhline(float(found[0][name]), color=look.color, linestyle=look.line, linewidth=0.8, alpha=0.7)
            if kind:
                ax.errorbar([int(smooth)], *_ends([found[0]], name), color=look.color, marker=kind)
        if sizes:
            values = [found[size] for size in sizes]
            ax.errorbar(
                sizes, *_ends(values, name), color=look.color, marker=look.marker, linestyle=look.line, elinewidth=0.8
            )
    if sizes:
        ax.set_xscale("log")
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        ax.set_xlabel("dropout masks")
    else:
        ax.set(xticks=[0, 1], xlim=(-0.5, 1.5))
        ax.set_xticklabels([look.label.removesuffix(" smoothing") for look in LOOKS.values()])
        ax.set_xlabel("smoothing")
    ax.set_ylabel(SCORES[name])
    return ax


def _ends(results: Sequence[xr.Dataset], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Values, and how far their intervals reach below and above."""
    value, low, high = (np.array([float(data[f"{name}{end}"]) for data in results]) for end in ("", "_low", "_high"))
    return value, np.clip(np.nan_to_num(np.stack([value - low, high - value])), 0.0, None)


def _uncertainty(study: Study) -> str:
    """Model uncertainty where both networks have it."""
    both = [study.others.get(("uncertainty", smooth), xr.Dataset()) for smooth in LOOKS]
    return "model_uncertainty" if all("model_uncertainty" in data for data in both) else "data_uncertainty"


def _draw_depth(study: Study, ax: Axes, probe: str, quantity: str) -> None:
    labels = {"high_frequency": "Δ\u00a0ln\u00a0A, highest frequency"}
    for smooth, look in LOOKS.items():
        data = study.others.get((probe, smooth))
        if data is not None and quantity in data:
            depth.over_depth(data, ax, quantity, look=look, shade=False)
    ax.set_ylabel(labels.get(quantity, quantity.replace("_", " ")))
    if not ax.lines:
        style.write_centred(ax, f"no {probe} yet")


def _draw_eigenvalues(study: Study, ax: Axes) -> None:
    """Each mini-batch's eigenvalues as points, the mean of the positive ones (APE) as a line."""
    for smooth, look in LOOKS.items():
        data = study.others.get(("hessian", smooth))
        if data is None or not hessian.eigenvalues(data).size:
            continue
        values = data["eigenvalue"].values.reshape(data.sizes["batch"], -1)
        at = int(smooth) + np.linspace(-0.2, 0.2, len(values))[:, None] + np.zeros_like(values)
        ax.plot(at.ravel(), values.ravel(), color=look.color, marker=look.marker, linestyle="", alpha=0.7, markersize=3)
        positive = values[values > 0]
        ax.plot([smooth - 0.3, smooth + 0.3], [positive.mean()] * 2, color=look.color, linestyle=look.line)
    ax.axhline(0.0, color="0.7", linewidth=0.6, zorder=0)
    ax.set(ylabel="Hessian eigenvalues", xticks=[0, 1], xlim=(-0.5, 1.5), xlabel="smoothing")
    ax.set_xticklabels([look.label.removesuffix(" smoothing") for look in LOOKS.values()])


def _draw_table(ax: Axes, rows: Sequence[Row]) -> None:
    ax.axis("off")
    cells = [list(row.values()) for row in rows]
    drawn = ax.table(cells, colLabels=list(rows[0]), loc="center", cellLoc="center", edges="horizontal")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(style.SMALL)
    drawn.scale(1.0, 0.9)
    drawn.auto_set_column_width(list(range(len(rows[0]))))
