"""Draw any figure from Python: `landscape.plots.NAME(data, ax=None)`, a page of its own or the user's axes."""

import inspect
from collections.abc import Sequence
from typing import Any

import xarray as xr

from landscape.plots import FIGURES
from landscape.plots.figure import FigureEntry
from landscape.plots.selection import Data, Selection, results_of
from landscape.plots.theme import Theme, applied
from landscape.plots.tidy import label_decades


def figure(
    name: str,
    data: Data,
    ax: Any = None,
    *,
    only: Sequence[str] = (),
    style: str = "screen",
    columns: int = 0,
    title: str = "",
) -> Any:
    """Draw a figure of all results that it can show; returns the figure, or the axes where they were given.

    Args:
        name: one of `FIGURES`; `landscape.plots.surface(data)` is `figure("surface", data)`.
        data: a results file, one or several results of `landscape.measure`, or what `landscape.open` returns.
        ax: where to draw: axes, as many as the figure has panels, or a figure or subfigure of matplotlib. The style
            is then the user's, and legend and caption are left to them.
        only: labels of checkpoints, `*` stands for anything.
        style: `screen`, `paper` or `dark`.
        columns: width of the figure, 1 (3.25 in) or 2 (6.75 in); 0: as it needs.
        title: title above the figure.

    Raises:
        ValueError: nothing to draw, or axes that do not fit; OptionError: there is no such style, width or label.
    """
    entry = FIGURES[name]
    theme = Theme(style, columns, title)
    selection = Selection(tuple([only] if isinstance(only, str) else only))
    with results_of(data) as stored:
        everything = [result for _, result in selection.of(stored)]
        own = [result for result in everything if result.attrs.get("probe", entry.probe) == entry.probe]
        results = entry.selected(own)
        if not results:
            raise ValueError(
                f"{name} draws finished {', '.join(entry.needs)} of landscape {entry.probe}, and the data hold none; "
                f'measure them first, for example: landscape.measure("{entry.probe}", checkpoint)'
            )
        if ax is None:
            with applied(theme):
                return label_decades(entry.module.page(results, selection.looks(results, everything)))
        return _into(entry, results, selection, everything, _axes(entry, ax))


def _axes(entry: FigureEntry, ax: Any) -> Any:
    """Axes for the panels of a figure: those given, checked, or new ones in the figure that was given."""
    from matplotlib.figure import FigureBase

    if isinstance(ax, FigureBase):
        return entry.axes_in(ax)
    given = [ax] if hasattr(ax, "plot") else list(getattr(ax, "flat", ax))
    kinds = [{"rectilinear": None}.get(one.name, one.name) for one in given]
    if kinds != list(entry.panels):
        needed, got = (", ".join(kind or "plain" for kind in some) for some in (entry.panels, kinds))
        raise ValueError(
            f"{entry.name} needs {len(entry.panels)} axes ({needed}), got {got}; give these or a (sub)figure"
        )
    return given[0] if len(given) == 1 else tuple(given)


def _into(
    entry: FigureEntry, results: Sequence[xr.Dataset], selection: Selection, among: Sequence[xr.Dataset], axes: Any
) -> Any:
    """Draw results into axes, over each other where their lines can be told apart."""
    draw: Any = entry.module.draw
    known = inspect.signature(draw).parameters
    if len(results) > 1 and "look" not in known:
        labels = ", ".join(str(result.attrs.get("label", "")) for result in results)
        raise ValueError(f"{entry.name} draws one result into axes, got {len(results)}; choose one with only={labels}")
    looks = selection.looks(results, among)
    for i, (result, look) in enumerate(zip(results, looks, strict=True)):
        options: dict[str, Any] = {"look": look} if "look" in known else {}
        if "shift" in known and len(results) > 1:
            options["shift"] = 0.5 * (i - (len(results) - 1) / 2) / len(results) * (0.06 if "radius" in result else 1.0)
        draw(result, axes, **options)
    return axes
