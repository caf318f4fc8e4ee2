"""What is stored beside quantities: errors and the numbers of values behind them, and why one is NaN in some layers."""

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np

from landscape.statistics.intervals import BY_BOUNDS, Ends, quantile


def error_of(data: Any, name: str) -> np.ndarray:
    """The standard error of a quantity of a labelled result; NaN where the result has none."""
    error = _stored_error(data, name)
    return np.asarray(np.full(data.variables[name].shape, np.nan) if error is None else error.values, dtype=float)


def count_of(data: Any, name: str) -> np.ndarray:
    """How many independent values the error of a quantity is over, a number or one per element; NaN where unknown."""
    error = _stored_error(data, name)
    if error is None:
        return np.asarray(np.nan)
    over = str(error.attrs.get("over", ""))
    if over in data and data.variables[over].dims == error.dims != (over,):
        return np.asarray(data.variables[over].values, dtype=float)
    return np.asarray(error.attrs.get("n", np.nan), dtype=float)


def _stored_error(data: Any, name: str) -> Any:
    """The array of the standard error; None where there is none."""
    error = "se" if name == "value" else f"{name}_se"
    return data.variables.get(error)


def half_width(data: Any, name: str) -> np.ndarray:
    """Half the width of the 95 % intervals of a quantity, by Student's t; NaN where there is none."""
    return np.asarray(quantile(count_of(data, name)) * error_of(data, name))


def ends_of(data: Any, name: str) -> Ends:
    """Ends of the 95 % intervals of a quantity: the stored ones, else those that its bounds allow."""
    low, high = (np.asarray(data.variables[f"{name}{end}"].values, dtype=float) if f"{name}{end}" in data else None
                 for end in ("_low", "_high"))  # fmt: skip
    if low is not None and high is not None:
        return low, high
    of = BY_BOUNDS[str(data.variables[name].attrs.get("bounds", ""))]
    return of(data.variables[name].values, error_of(data, name), count_of(data, name))


def has_intervals(data: Any) -> bool:
    """Whether any quantity of a labelled result has a 95 % interval."""
    errors = [name for name in map(str, data.variables) if name == "se" or name.endswith(("_se", "_low"))]
    names = ("value" if name == "se" else name.rpartition("_")[0] for name in errors)
    return any(np.isfinite(ends_of(data, name)).any() for name in names if name in data)


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


SUFFIX = "_unmeasured"  # of the attribute of a quantity
NOT_FINITE = "its features are not finite"
ALIKE = "no difference between samples"

_log = logging.getLogger(__name__)


def unmeasured(found: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Attributes from quantities, each with the name of a layer, or "", and the reason why it is NaN there."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for quantity, layer, reason in found:
        reasons.setdefault(quantity, {}).setdefault(reason, []).append(layer)
    return {
        f"{quantity}{SUFFIX}": "; ".join(": ".join(filter(None, (", ".join(names), why))) for why, names in one.items())
        for quantity, one in reasons.items()
    }


def store_reasons(attributes: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Store the reasons among values, and say those that are new; quantities with the same reason share a line."""
    alike: dict[str, list[str]] = {}
    for name, value in values.items():
        if name.endswith(SUFFIX) and attributes.get(name) != value:
            attributes[name] = value
            alike.setdefault(value, []).append(name.removesuffix(SUFFIX))
    for value, quantities in alike.items():
        first, *others = quantities
        more = (
            f" and {len(others)} more quantities are"
            if len(others) > 1
            else f" and {others[0]} are"
            if others
            else " is"
        )
        where = " in" if ": " in value else ":"
        _log.info("note: %s%s NaN%s %s", first, more, where, "; ".join(map(_shortened, value.split("; "))))


def _shortened(reason: str) -> str:
    names, colon, why = reason.rpartition(": ")
    first, *others = names.split(", ")
    return f"{first}{f' and {len(others)} more layers' if others else ''}{colon}{why}"
