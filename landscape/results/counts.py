"""Count the independent values behind a standard error, from what a result stores."""

from collections.abc import Mapping
from typing import Any

import numpy as np

REPEATED = "member"  # the axis whose positions see the same values, which count once


def independent(
    over: str, axes: tuple[str, ...], stored: Mapping[str, np.ndarray], dims: Mapping[str, tuple[str, ...]],
    *, fact: Any = None,
) -> np.ndarray:  # fmt: skip
    """Count the independent values of an error, of the finished units, for every position on its axes that matters.

    - `over` names an axis of the units: its positions where any unit is finished. Another axis: its length.
    - `over` names an array of counts: its sum over the finished units and all axes that the error does not have, of
      members the most of one. An array with the axes of the error stays as it is.
    - Otherwise it is the attribute of that name, such as `samples`; NaN where there is no such number.

    Args:
        over: what the values are, see `probe.Quantity`.
        axes: of the error.
        stored: arrays by name: `done`, and the one that `over` names if there is one.
        dims: names of the axes of every array.
        fact: the attribute of the group that `over` names.
    """
    units, done = dims.get("done", ()), np.asarray(stored.get("done", np.ones(())) == 1)
    if not done.any():
        return np.array(np.nan)
    if over in units:
        others = tuple(i for i, axis in enumerate(units) if axis not in (*axes, over))
        left = [axis for axis in units if axis in (*axes, over)]
        return np.asarray(done.any(axis=others).sum(axis=left.index(over)))
    if over not in stored:
        return np.array(float(fact) if isinstance(fact, int | float | np.number) else np.nan)
    if dims[over] == (over,):
        return np.array(len(stored[over]))
    count, own = np.nan_to_num(np.asarray(stored[over], float)), dims[over]
    if own[: len(units)] == units:
        count = np.where(done.reshape(*done.shape, *(1,) * (count.ndim - done.ndim)), count, 0.0)
    if REPEATED in own and REPEATED not in axes:
        count, own = count.max(axis=own.index(REPEATED)), tuple(axis for axis in own if axis != REPEATED)
    return np.asarray(count.sum(axis=tuple(i for i, axis in enumerate(own) if axis not in axes)))


def smallest(counts: Any) -> float:
    """The smallest count that is finite and above 0; NaN where there is none."""
    known = np.asarray(counts, float)
    known = known[np.isfinite(known) & (known > 0)]
    return float(known.min()) if known.size else np.nan
