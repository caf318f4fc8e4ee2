"""Draw scores of several data sets over the distance from a checkpoint, with the radii of their basins."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import xarray as xr

from landscape.plots import appearance, style
from landscape.plots.figure import Axes, Draw, Figure, Look
from landscape.statistics import stored

NOTE = (
    "Bands: 95 % intervals of the change from the checkpoint. Dots: where a score leaves its interval, with the "
    "95 % interval; arrows: not within the range."
)
Score = tuple[int, int, Look, float]  # position, panel, look, and the value at which it leaves its interval
MARKS = (("C0", "o"), ("C1", "s"), ("C2", "^"), ("C3", "D"), ("C4", "v"), ("C5", "P"))  # colour, marker


def panel_of(data: xr.Dataset, s: int) -> int:
    """The panel of a score: 0 for losses, 1 for accuracies."""
    return int(str(data["score_kind"].values[s]) == "accuracy")


def styles(results: Iterable[xr.Dataset]) -> dict[tuple[str, str], Look]:
    """Colour and line of every data set and kind of loss of some results; an accuracy has those of its data set."""
    found: dict[tuple[str, str], Look] = {}
    for data in results:
        for name, kind in zip(data["score_data"].values, data["score_kind"].values, strict=True):
            key = _key(str(name), str(kind))
            if key not in found:
                color, marker = MARKS[len(found) % len(MARKS)]
                label = " ".join(filter(None, (appearance.escaped(key[0]), appearance.escaped(key[1]))))
                found[key] = Look(label, color, marker, appearance.LINES[len(found) % len(appearance.LINES)])
    return found


def scores(data: xr.Dataset, known: Mapping[tuple[str, str], Look], axes: Sequence[Axes]) -> Iterator[Score]:
    """Every score of a result, with the edge of its interval drawn."""
    for s, (name, kind) in enumerate(zip(data["score_data"].values, data["score_kind"].values, strict=True)):
        panel, look, edge = panel_of(data, s), known[_key(str(name), str(kind))], edge_of(data, s)
        if np.isfinite(edge):
            axes[panel].axhline(edge, color=look.color, linewidth=0.5, linestyle=":", zorder=0)
        yield s, panel, look, edge


def _key(name: str, kind: str) -> tuple[str, str]:
    return name, "" if kind in ("loss", "accuracy", name) else kind


def sign(data: xr.Dataset, s: int) -> float:
    """+1 for a score that is worse the higher it is."""
    return -1.0 if panel_of(data, s) else 1.0


def edge_of(data: xr.Dataset, s: int) -> float:
    """The value of a score at which it leaves its interval."""
    with np.errstate(invalid="ignore"):
        return float(data["score_centre"].values[s] + sign(data, s) * data["score_margin"].values[s])


def half_width(data: xr.Dataset, name: str) -> xr.DataArray:
    """Half the width of the intervals of a quantity, on its dimensions."""
    return data[name].copy(data=stored.half_width(data, name))


def draw_curve(
    ax: Axes, at: np.ndarray, value: np.ndarray, half: np.ndarray, look: Look, *, thin: bool = False
) -> None:
    """Draw a score over finite points, with a band of half that width where there is one."""
    shown = np.isfinite(value)
    half = np.where(np.isfinite(half), half, 0.0)[shown]
    ax.plot(at[shown], value[shown], color=look.color, linestyle=look.line, linewidth=0.6 if thin else 1.1)
    ax.fill_between(at[shown], value[shown] - half, value[shown] + half, color=look.color, alpha=0.18, linewidth=0)


def draw_marks(
    ax: Axes, edge: float, marks: Sequence[Sequence[float]], look: Look, *, hollow: bool = False, small: bool = False
) -> None:
    """Draw radii with the ends of their intervals (at, low, high), at the height of the edge of a score's interval."""
    for at, low, high in marks:
        if not np.isfinite([at, edge]).all():
            continue
        limit = ax.get_xlim()
        open_ended = not np.isfinite(high)
        high = limit[1 if at >= 0 else 0] if open_ended else high
        ax.plot([low, high], [edge, edge], color=look.color, linewidth=0.9, solid_capstyle="butt")
        arrow = ">" if at >= 0 else "<"
        face = "none" if hollow else look.color
        ax.plot(at, edge, arrow if open_ended else look.marker or "o", color=look.color, zorder=5,
                markersize=2.2 if small else 3.5, markerfacecolor=face)  # fmt: skip
        ax.set_xlim(limit)


def finish(axes: Sequence[Axes], data: xr.Dataset, xlabel: str, values: Sequence[Sequence[np.ndarray]]) -> None:
    """Label the panels, the losses logarithmic where they span orders of magnitude; say where one has no score."""
    for i, (ax, name) in enumerate(zip(axes, ("loss", "accuracy"), strict=False)):
        units = {str(data["score_units"].values[s]) for s in range(data.sizes["score"]) if panel_of(data, s) == i}
        ax.set(xlabel=xlabel, ylabel=appearance.loss_label([data]) if not i and len(units) < 2 else name)
        drawn = np.concatenate([part.ravel() for part in values[i]]) if values[i] else np.empty(0)
        if not np.isfinite(drawn).any():
            style.write_centred(ax, f"no finite {name}", va="center", fontsize=7)
        elif not i:
            style.log_if_wide(ax, drawn)


def page(results: Sequence[xr.Dataset], looks: Sequence[Look], draw: Draw, note: str = "") -> Figure:
    """A row of two panels per result."""
    from matplotlib.lines import Line2D

    known = styles(results)
    legend = [Line2D([], [], color=one.color, linestyle=one.line, marker=one.marker, markersize=3, label=one.label)
              for one in known.values()]  # fmt: skip
    figure = style.page(results, looks, height=2.1 * len(results), legend=legend, note=f"{NOTE} {note}".strip())
    grid = figure.subplots(len(results), 2, squeeze=False)
    for row, data, look in zip(grid, results, looks, strict=True):
        draw(data, tuple(row), known=known)
        row[0].set_title(style.fitted(look.label, 3.0, style.title_size(2)))
    return figure
