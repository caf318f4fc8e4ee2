"""Evaluate the headline numbers that a result declares (`probe.Headline`): values, errors, 95 % intervals, units.

No probe is known here by its name, so that the result of any has its numbers. Neither torch nor matplotlib is imported.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from string import Formatter
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import xarray as xr

from landscape.headline import HEADLINES, Headline, Reading
from landscape.statistics import intervals, rounding, stored
from landscape.statistics.means import error_over_parts, mean_and_standard_error

SAME = 1e-9  # of coordinates
Place = Mapping[str, int]  # positions on some axes


class _Part(NamedTuple):
    """Numbers with the names of their axes, as an xarray variable, which takes fifty times as long to index."""

    dims: tuple[str, ...]
    values: np.ndarray

    def over(self, axes: Sequence[str], reduce: Callable[..., Any]) -> _Part:
        """What is left when some axes are reduced by a function that skips NaN."""
        at = tuple(self.dims.index(axis) for axis in axes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of nothing but NaN
            return _Part(tuple(dim for dim in self.dims if dim not in axes), np.asarray(reduce(self.values, axis=at)))

    def at(self, place: Place) -> _Part:
        """What is left at positions on some axes."""
        index = tuple(place.get(dim, slice(None)) for dim in self.dims)
        return _Part(tuple(dim for dim in self.dims if dim not in place), np.asarray(self.values[index]))


Parts = Mapping[str, _Part]  # value, error, n, low, high, and the value over every part of the samples


@dataclass(frozen=True)
class Measured:
    """One headline number of one result; NaN where an error is not known."""

    name: str
    value: float
    error: float = np.nan  # standard error
    low: float = np.nan  # ends of the 95 % interval
    high: float = np.nan
    unit: str = ""
    reading: Reading = ""
    n: float = np.nan  # independent values behind the error
    bounds: str = ""  # what the number cannot leave, as of its quantity: `share` or `positive`
    at: str = ""  # where it was found, in words

    @property
    def known(self) -> bool:
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    def over(self, values: Sequence[float]) -> Measured:
        """The mean of independent values of this number, with its error and interval over them."""
        mean, error = mean_and_standard_error(np.array(values))
        low, high = intervals.BY_BOUNDS[self.bounds](mean, error, len(values))
        return replace(self, value=mean, error=error, low=float(low), high=float(high), n=len(values))

    def __str__(self) -> str:
        low, high = (f"{end:.0f}" if 1000 <= abs(end) < 1e6 else f"{end:.3g}" for end in (self.low, self.high))
        text = f"{self.value:.4g}" + (f" [{low}, {high}]" if self.known else "")
        return f"{text} {self.at}".strip()

    def in_words(self) -> str:
        """The value with half the width of its interval, or with both ends where these are not equally far."""
        if not self.known:
            return f"{self.value:.3g} or more" if self.high == np.inf else f"{self.value:.4g}"
        above, below = self.high - self.value, self.value - self.low
        if abs(above - below) <= 0.02 * (above + below):
            return rounding.plus_minus(self.value, (above + below) / 2)
        return rounding.interval(self.value, self.low, self.high)

    def as_json(self) -> dict[str, Any]:
        """With JSON's null for what is not known."""
        row = {"standard_error" if key == "error" else key: value for key, value in asdict(self).items()}
        return {key: None if isinstance(v, float) and not np.isfinite(v) else v for key, v in row.items()}


def measured(data: xr.Dataset) -> list[Measured]:
    """The headline numbers of a result that are finite and no mere bound; also those without a known error."""
    return [one for _, one in numbers(data) if one.high != np.inf]


def as_json(data: xr.Dataset) -> dict[str, Any]:
    """The headline numbers of a result as an entry for JSON."""
    return {"numbers": [one.as_json() for one in measured(data)]}


def numbers(data: xr.Dataset) -> list[tuple[Headline, Measured]]:
    """Declarations and finite numbers of a result, the first of every name; an upper end that is infinite: a bound.

    Those of a result that does not change, which an open file holds, are computed once.
    """
    of_file: Any = data if isinstance(cast(object, data), Hashable) else None
    if of_file is None:
        return _numbers(data)
    if of_file not in _known:
        _known[of_file] = _numbers(data)
    return _known[of_file]


_known: WeakKeyDictionary[Any, list[tuple[Headline, Measured]]] = WeakKeyDictionary()


def _numbers(data: xr.Dataset) -> list[tuple[Headline, Measured]]:
    found: dict[str, tuple[Headline, Measured]] = {}
    parts = functools.cache(functools.partial(_parts, data))  # which several declarations share
    for headline in declared(data):
        if not (headline.unless and np.isfinite(_values(data, headline.unless)).any()):
            for one in _evaluated(data, headline, parts):
                if np.isfinite(one.value):
                    found.setdefault(one.name, (headline, one))
    return list(found.values())


def declared(data: xr.Dataset) -> list[Headline]:
    """What a result declares; one without declarations, all its numbers without an axis."""
    if HEADLINES in data.attrs:
        return list(_declarations(data.attrs[HEADLINES]))
    return [
        Headline(str(name), str(name)) for name, v in data.data_vars.items() if not v.ndim and v.dtype.kind in "fiu"
    ]


@functools.lru_cache
def _declarations(text: str) -> list[Headline]:
    return [Headline(**row) for row in json.loads(text)]


def each(data: xr.Dataset, name: str, quantity: str, axis: str) -> Iterator[Measured]:
    """A stored quantity at every position on its axis, with its error and interval; in the name as in declarations."""
    return _evaluated(data, Headline(name, quantity, {axis: "each"}))


def _values(data: xr.Dataset, name: str) -> np.ndarray:
    """A quantity or a fact as an array; NaN where the result has neither."""
    known = data.variables[name].values if name in data.variables else data.attrs.get(name, np.nan)
    return np.asarray(known, dtype=float)


def _evaluated(
    data: xr.Dataset, headline: Headline, parts_of: Callable[[str], Parts] | None = None
) -> Iterator[Measured]:
    dims = data.variables[headline.quantity].dims if headline.quantity in data.variables else ()
    if {axis for axes in headline.at for axis in axes.split()} != set(dims):
        return
    known = parts_of(headline.quantity) if parts_of else _parts(data, headline.quantity)
    found: list[tuple[Place, Parts]] = [({}, known)]
    for axes, word in headline.at.items():
        found = [
            ({**place, **more}, rest)
            for place, parts in found
            for more, rest in _narrowed(data, place, parts, axes.split(), word)
        ]
    other = _values(data, headline.unlike) if headline.unlike else None
    for place, parts in found:
        one = _measured(data, headline, place, parts)
        if other is None or one.value != other[tuple(place.values())]:
            yield one


def _parts(data: xr.Dataset, name: str) -> Parts:
    """Value, error, number of values and ends of an interval on the axes of a quantity; a fact has a value alone."""
    if name not in data.variables:
        return {"value": _Part((), _values(data, name))}
    dims, value, (low, high) = data.variables[name].dims, _values(data, name), stored.ends_of(data, name)
    arrays = {"error": stored.error_of(data, name), "n": stored.count_of(data, name), "low": low, "high": high}
    unknown = np.full(value.shape, np.nan)  # of errors with other axes
    known = {key: v if v.shape in ((), value.shape) else unknown for key, v in arrays.items()}
    found = {key: _Part(tuple(map(str, dims[: v.ndim])), v) for key, v in {"value": value, **known}.items()}
    if (of := f"{name}_part") in data.variables:
        found["part"] = _Part(tuple(map(str, data.variables[of].dims)), _values(data, of))
    return found


def _narrowed(
    data: xr.Dataset, place: Place, parts: Parts, axes: Sequence[str], word: int | float | str
) -> Iterator[tuple[Place, Parts]]:
    """What a word leaves of axes: the position that it means, or several.

    The error of a mean is that of its values over parts of the samples; where these are not known, the mean of the
    errors at most.
    """
    value = parts["value"]
    if word == "mean":
        means = {key: part.over(axes, np.nanmean) for key, part in parts.items() if key in ("value", "error", "part")}
        if "part" in means:
            of_parts = means["part"]
            means["error"] = _Part(of_parts.dims[:-1], error_over_parts(of_parts.values))
            means["n"] = _Part((), np.array(float(of_parts.values.shape[-1])))
        elif n := parts.get("n"):
            means["n"] = n.over(n.dims, np.nanmin)
        yield {}, means
    elif word == "median":
        yield {}, {"value": value.over(axes, np.nanmedian)}
    elif word == "largest" and len(axes) < len(value.dims):  # a number for every position on the others
        yield {}, {"value": value.over(axes, np.nanmax)}
    else:
        for position in _positions(data, place, value, axes, word):
            at = dict(zip(axes, map(int, position), strict=True))
            yield at, {key: part.at(at) for key, part in parts.items()}


def _positions(data: xr.Dataset, place: Place, value: _Part, axes: Sequence[str], word: int | float | str) -> Any:
    axis = axes[0]
    size = value.values.shape[value.dims.index(axis)]
    if isinstance(word, float):
        return np.argwhere(np.abs(_values(data, axis) - word) < SAME)[:1]
    if isinstance(word, int):
        return [[word % size]] if -size <= word < size else []
    way, _, of = word.partition(" ")
    if way in ("largest", "smallest"):
        if of and of not in data.variables:
            return []
        ranked = _Part(tuple(map(str, data.variables[of].dims)), _values(data, of)).at(place) if of else value
        by = ranked.values.transpose([ranked.dims.index(one) for one in axes])
        by = np.where(np.isfinite(by), by if way == "largest" else -by, -np.inf)
        return [np.unravel_index(np.argmax(by), by.shape)] if by.size else []
    known = np.argwhere(np.isfinite(value.values)) if value.values.ndim == 1 else np.zeros((0, 1), int)
    if word in ("first", "last"):
        return known[:1] if word == "first" else known[-1:]
    if word == "each":
        return [[i] for i in range(size)]
    names = data.variables.get(f"{axis}_name")
    if names is not None and (names.values == word).any():
        return np.argwhere(names.values == word)[:1]
    at = _values(data, word)
    return [[int(at) % size]] if not at.ndim and np.isfinite(at) else []


def _measured(data: xr.Dataset, headline: Headline, place: Place, parts: Parts) -> Measured:
    about = data.variables[headline.quantity].attrs if headline.quantity in data.variables else {}
    value, error, n, low, high = (
        float(parts[key].values) if key in parts else np.nan for key in ("value", "error", "n", "low", "high")
    )
    name, where = (_words(data, text, place) for text in (headline.name, headline.where))
    if headline.by:
        by, _, there = headline.by.partition(" at ")
        dims = data.variables[by].dims if by in data.variables else ()
        at = {axis: there or word for axis, word in headline.at.items() if axis in dims}
        below = next(_evaluated(data, Headline("", by, at)), None)
        return Measured(name, np.nan if below is None else value / below.value)
    unit, bounds = str(about.get("units", "1")), str(about.get("bounds", ""))
    for axis in place if unit == "1" else ():  # the rows of a table have units of their own
        unit = str(data.variables[f"{axis}_units"].values[place[axis]]) if f"{axis}_units" in data.variables else unit
    if headline.samples:
        bounds, n = "share", float(data.attrs.get("samples", np.nan))
        error = float(np.sqrt(value * (1 - value) / (n - 1))) if n > 1 and 0 <= value <= 1 else np.nan
    if headline.samples or "low" not in parts:
        low, high = map(float, intervals.BY_BOUNDS[bounds](value, error, n))
    return Measured(name, value, error, low, high, "" if unit == "1" else unit, headline.reading, n, bounds, where)


def _words(data: xr.Dataset, text: str, place: Place) -> str:
    """A text with the entries of arrays at a place for what stands in braces, also as `{255*eps:g}`."""
    found = {}
    for field in _fields(text):
        factor, _, name = field.rpartition("*")
        array = data.variables[name]
        entry = array.values[tuple([place[str(axis)] for axis in array.dims])]
        found[field] = float(factor) * entry if factor else entry
    return text.format(**found)


@functools.lru_cache
def _fields(text: str) -> list[str]:
    return [field for _, field, _, _ in Formatter().parse(text) if field]
