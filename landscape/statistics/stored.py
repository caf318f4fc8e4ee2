"""Intervals of stored quantities, from the standard errors and the numbers of values stored beside them."""

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
