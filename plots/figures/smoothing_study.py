"""Draw a network with and without smoothing blocks: scores over ensemble sizes, features and curvature ("Blurs")."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import broken, depth, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures import hessian
from landscape.studies import kinds
from landscape.studies.study import Row, Study

MEANING = (
    "The same weights with and without smoothing blocks: scores against the number of dropout masks whose "
    "probabilities are averaged, features and curvature, with differences in the table that are paired over samples. A "
    "network that was not trained with the blocks also pays for features that it does not expect."
)
LOOKS = {False: Look("without smoothing", "tab:blue", "D"), True: Look("with smoothing", "tab:green", "o", "--")}
SCORES = {"nll": "NLL (nats)", "accuracy": "accuracy", "ece": "calibration error (ECE)"}
studies = kinds.smoothing


def page(study: Study) -> Figure:
    """Scores over ensemble sizes, features and curvature in six panels, and the table."""
    sizes, rows = kinds.sizes(study), kinds.smoothing_table(study)
    shown = [study.cells[smooth, ("calibration", sizes[-1])] for smooth in LOOKS]
    plain = "; lines without markers: the network without dropout" if 0 in sizes and len(sizes) > 1 else ""
    note = (
        f"Error bars of scores: 95 % intervals over samples{plain}. Differences in the table: paired over samples, "
        "with 95 % intervals. Hollow: smoothing blocks. Lines among eigenvalues: mean of the positive ones."
    )
    looks = list(LOOKS.values())
    figure = style.page(shown, looks, height=4.6 + 0.16 * len(rows), legend=looks, note=note)
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
    every = kinds.sizes(study)
    sizes = [size for size in every if size]
    for smooth, look in LOOKS.items():
        found = {size: study.cells[smooth, ("calibration", size)] for size in every}
        if 0 in found:
            kind = "D" if not sizes and not smooth else "o" if not sizes else ""
            ax.axhline(float(found[0][name]), color=look.color, linestyle=look.line, linewidth=0.8, alpha=0.7)
            if kind:
                ax.errorbar([int(smooth)], *_ends([found[0]], name), color=look.color, marker=kind)
        if sizes:
            values = [found[size] for size in sizes]
            ax.errorbar(sizes, *_ends(values, name), **look.cues, elinewidth=0.8)
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
    return value, broken.bars(value, low, high)


def _uncertainty(study: Study) -> str:
    """Model uncertainty where both networks have it."""
    both = [study.cells.get((smooth, "uncertainty"), xr.Dataset()) for smooth in LOOKS]
    return "model_uncertainty" if all("model_uncertainty" in data for data in both) else "data_uncertainty"


def _draw_depth(study: Study, ax: Axes, probe: str, quantity: str) -> None:
    labels = {"high_frequency": "Δ\u00a0ln\u00a0A, highest frequency"}
    for smooth, look in LOOKS.items():
        data = study.cells.get((smooth, probe))
        if data is not None and quantity in data:
            depth.over_depth(data, ax, quantity, look=look, shade=False)
    ax.set_ylabel(labels.get(quantity, quantity.replace("_", " ")))
    if not ax.lines:
        style.write_centred(ax, f"no {probe} yet")


def _draw_eigenvalues(study: Study, ax: Axes) -> None:
    """Each mini-batch's eigenvalues as points, the mean of the positive ones (APE) as a line."""
    for smooth, look in LOOKS.items():
        data = study.cells.get((smooth, "hessian"))
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
