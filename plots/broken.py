"""Draw what has no place on an axis: values that are infinite, and values whose error is not a finite number."""

from typing import Any

import numpy as np

from landscape.plots.figure import Axes
from landscape.plots.theme import ink, muted

ERROR, VALUE = "× no finite error", "triangles at the edge: infinite"
MARK = "broken"  # gid of the words in the corner of an axes


def bar(error: np.ndarray) -> np.ndarray:
    """Lengths of error bars, 0 where the error is not a finite number; `mark` says where."""
    known = np.isfinite(error) & (np.nan_to_num(error) >= 0)
    return np.asarray(np.where(known, error, 0.0))


def bars(value: Any, low: Any, high: Any) -> np.ndarray:
    """Lengths below and above the values, (2, n), of intervals; 0 where an end is not a finite number."""
    with np.errstate(invalid="ignore"):
        return np.stack([bar(np.atleast_1d(value) - low), bar(high - np.atleast_1d(value))])


def mark(ax: Axes, at: np.ndarray, value: np.ndarray, error: np.ndarray | None = None, *, flat: bool = False) -> None:
    """Cross the values without a finite error, and put a triangle at the edge of the axes for infinite ones.

    `error` may have a row below and one above, or be both ends of intervals, (2, n). `at` are the places on the other
    axis, which is the vertical one if `flat`. NaN is a value that does not exist, and stays without a mark.
    """
    value = np.asarray(value, dtype=float)
    unsure = np.zeros(value.shape, bool) if error is None else ~np.isfinite(np.atleast_2d(error)).all(axis=0)
    said = []
    if (crossed := unsure & np.isfinite(value)).any():
        place = (value[crossed], at[crossed]) if flat else (at[crossed], value[crossed])
        ax.plot(*place, "x", color=ink(), markersize=6, markeredgewidth=1.0, zorder=6)
        said.append(ERROR)
    for sign, edge, shape in ((1, 1.0, ">" if flat else "^"), (-1, 0.0, "<" if flat else "v")):
        where = np.asarray(at)[value == sign * np.inf]
        if where.size:
            edges = np.full(where.shape, edge)
            place, how = (
                ((edges, where), ax.get_yaxis_transform()) if flat else ((where, edges), ax.get_xaxis_transform())
            )
            ax.plot(*place, shape, color=ink(), markersize=4, transform=how, clip_on=False, zorder=6)
            said.append(VALUE)
    if said:
        _say(ax, said)


def _say(ax: Axes, said: list[str]) -> None:
    """Explain the marks once, in the corner of the axes."""
    known = next((text for text in ax.texts if text.get_gid() == MARK), None)
    words = dict.fromkeys([*(known.get_text().splitlines() if known else []), *said])
    if known is None:
        known = ax.text(0.02, 0.98, "", transform=ax.transAxes, fontsize=6, color=muted(), va="top", gid=MARK, zorder=7)
    known.set_text("\n".join(words))
