"""Evaluate the expressions of a study's file: a small language over results, without any of Python's other powers.

`vit.spectrum["ape"]` is a headline number of a result, `vit.noise.accuracy_drop` a stored quantity or a fact. Numbers
and arrays are added, subtracted, multiplied, divided and raised to a power, and given to the `FUNCTIONS`.
"""

import ast
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xarray as xr

from landscape.options import did_you_mean, listed
from landscape.results.headline_numbers import measured
from landscape.studies.edge_of_stability import plateau, ratios

Compute: TypeAlias = Callable[[Mapping[str, Any]], Any]  # of what the names in an expression mean
EQUAL = 1e-3  # tolerance of a coordinate
LONGEST, DEEPEST = 1000, 40  # characters of an expression, and levels of it
LISTED = 12  # names in an error
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}  # fmt: skip


class Known(NamedTuple):
    """The names in the results of a probe."""

    numbers: Sequence[str]  # headline numbers, with `*` for a part that the network or an option decides
    quantities: Sequence[str]  # those that headline numbers are of
    others: Callable[[], Sequence[str]]  # all that it stores, which takes longer to find; none if not known
    excluded: Callable[[], Collection[str]]  # headline numbers that its options leave out, as far as is known

    def check(self, measurement: str, name: str, *, headline: bool) -> None:
        """Raise a ValueError if a result has no such headline number, or quantity."""
        if name in self.quantities and not headline:
            return
        lost, others = (self.excluded(), ()) if headline else ((), self.others())
        known = list(dict.fromkeys([*self.quantities, *others])) if others else []
        known = [one for one in self.numbers if one not in lost] if headline else known
        if known and (name in lost or not any(fnmatchcase(name, one) for one in known)):
            what = f"{'number' if headline else 'quantity'} {name}{' with its options' * (name in lost)}"
            expected = f"{listed(known, LISTED)}{did_you_mean(name, known)}"
            raise ValueError(f"{measurement} has no {what}; expected one of {expected}")


def at(values: xr.DataArray, **place: float) -> Any:
    """The value nearest to a coordinate of every named axis, or at a position (from 0, or -1 from the end)."""
    values = xr.DataArray(values)
    for axis, where in place.items():
        if (named := axis in values.coords) and not (abs(values[axis] - where) <= EQUAL).any():
            raise ValueError(
                f"{axis} has no {where:g}, only {listed([f'{one:g}' for one in values[axis].values], LISTED)}"
            )
        values = values.sel({axis: where}, method="nearest") if named else values.isel({axis: int(where)})
    return _there(float(values)) if not values.ndim else values


def _there(value: Any) -> Any:
    """A value that a result has, not NaN."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("what it names has none")
    return value


def first(values: Any, axis: str = "") -> Any:
    """The first value, or the values at the first position of an axis."""
    return values.isel({axis: 0}) if axis else float(np.ravel(values)[0])


def last(values: Any, axis: str = "") -> Any:
    """The last value, or the values at the last position of an axis."""
    return values.isel({axis: -1}) if axis else float(np.ravel(values)[-1])


def _each(array: Callable[[Any], Any], number: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of every value of an array, or of a number."""
    return lambda value: array(value) if isinstance(value, xr.DataArray) and value.ndim else number(value)


def change_across(data: xr.Dataset, values: Any, kind: str) -> float:
    """Mean change from the preceding layer, over layers of a kind that do not reduce their map."""
    change = np.diff(np.asarray(values), prepend=np.nan)
    counted = (data["kind"].values.astype(str) == kind) & (data["reduces"].values == 0) & np.isfinite(change)
    return float(change[counted].mean()) if counted.any() else math.nan


def stage_ends(data: xr.Dataset, values: Any) -> float:
    """Mean over stages of the value at the last layer of each that has one."""
    stage, array = data["stage"].values, np.asarray(values)
    finite = np.isfinite(array)
    ends = [array[(stage == one) & finite][-1] for one in np.unique(stage[finite]) if one >= 0]
    return float(np.mean(ends)) if ends else math.nan


def first_against_rest(data: xr.Dataset) -> float:
    """Accuracy drop of the first unit of a stage minus the mean of its others, averaged over stages with others."""
    drop, stage = data["accuracy_drop"].values, data["stage"].values
    differences = [
        drop[stage == one][0] - drop[stage == one][1:].mean() for one in np.unique(stage) if (stage == one).sum() > 1
    ]
    return float(np.mean(differences)) if differences else math.nan


def attention_ends(mixed: xr.Dataset, cnn: xr.Dataset) -> float:
    """Accuracy drop of the attention at the end of a stage minus that of the convolution there in its CNN."""
    kind, stage = mixed["kind"].values.astype(str), mixed["stage"].values
    differences = []
    for one in np.unique(stage):
        end = np.flatnonzero(stage == one)[-1]
        same = np.flatnonzero(cnn["stage"].values == one)
        if kind[end] == "msa" and len(same):
            differences.append(float(mixed["accuracy_drop"][end]) - float(cnn["accuracy_drop"][same[-1]]))
    return float(np.mean(differences)) if differences else math.nan


def _mean(values: Any) -> float:
    array = np.asarray(values, dtype=float)
    return float(values.mean() if isinstance(values, xr.DataArray) else array.mean()) if array.size else math.nan


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ln": _each(np.log, math.log), "exp": _each(np.exp, math.exp), "sqrt": _each(np.sqrt, math.sqrt), "abs": abs,
    "at": at, "first": first, "last": last, "mean": _mean,
    "max": lambda values: float(xr.DataArray(values).max()), "min": lambda values: float(xr.DataArray(values).min()),
    "change_across": change_across, "stage_ends": stage_ends, "first_against_rest": first_against_rest,
    "attention_ends": attention_ends, "ratios": ratios, "plateau": plateau,
}  # fmt: skip


class Expression:
    """A checked expression; names that are no words stand in quotes: `"gradient descent".series`."""

    def __init__(self, text: str, known: Iterable[str] = ()) -> None:
        """Parse and check an expression over known names. Raises ValueError: it is none, or names something else."""
        self.text, self._known = text, tuple(known)
        self.chains: list[tuple[str, str]] = []  # a name, and what is taken of it, in order
        self.taken: list[tuple[str, str, bool]] = []  # likewise at every level, and whether in brackets: a headline
        try:
            tree = ast.parse(text, mode="eval").body if len(text) <= LONGEST else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = None
        if tree is None:
            raise ValueError(f"{text[:80]} is no expression; expected such as ln(a.spectrum['ape']) - 0.5")
        self._compute = self._function(tree)

    def value(self, scope: Mapping[str, Any]) -> float:
        """The number, where names mean what the scope says: results, or mappings of results by name.

        NaN where there is nothing to take it of, such as a plateau that is not reached.

        Raises:
            ValueError: a result has no such quantity or number, or it is NaN there, or the value is no finite number.
        """
        try:
            with np.errstate(all="ignore"):  # a layer without a map has NaN and does not count
                value = self._compute(scope)
            if isinstance(value, xr.DataArray) and value.ndim:
                axes, axis = ", ".join(map(str, value.dims)), value.dims[0]
                raise ValueError(f"it is an array over {axes}; take its mean, its max or first(..., '{axis}')")
            if math.isinf(value):
                raise ValueError("it is infinite")
            return float(value)
        except (ArithmeticError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            said = "it divides by zero" if isinstance(error, ZeroDivisionError) else " ".join(str(error).split())
            raise ValueError(f"{self.text} has no value: {said[:200]}") from error

    def _function(self, node: ast.expr, depth: int = 0) -> Compute:
        """A part of the expression as a function of the scope; raises ValueError for what is not allowed."""
        if depth > DEEPEST:
            raise ValueError(f"{self.text[:80]} is nested too deep; split it")
        inner = partial(self._function, depth=depth + 1)
        match node:
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                apply, one, other = OPERATORS[type(op)], inner(left), inner(right)
                return lambda scope: apply(one(scope), other(scope))
            case ast.UnaryOp(ast.USub(), operand):
                positive = inner(operand)
                return lambda scope: -positive(scope)
            case ast.Call(func, arguments, keywords):
                function = self._known_function(ast.unparse(func), arguments, keywords)
                given, words = list(map(inner, arguments)), {str(word.arg): inner(word.value) for word in keywords}
                return lambda scope: function(
                    *(one(scope) for one in given), **{name: one(scope) for name, one in words.items()}
                )
            case ast.Attribute(of, key) if not key.startswith("_"):
                return self._part(of, key, inner, headline=False)
            case ast.Subscript(of, ast.Constant(str(key))) if key:
                return self._part(of, key, inner, headline=True)
            case ast.Name(name):
                return self._named(name, "")
            case ast.Constant(str(word)):
                return lambda scope: word
            case ast.Constant(int() | float() as number) if not isinstance(number, bool):
                return lambda scope: float(number)  # whole powers would have no end
        raise ValueError(f"{self.text}: {ast.unparse(node)[:60]} is not allowed; expected names, numbers, + - * / **")

    def _known_function(
        self, name: str, arguments: Sequence[ast.expr], keywords: Sequence[ast.keyword]
    ) -> Callable[..., Any]:
        if name not in FUNCTIONS or any(word.arg is None for word in keywords):
            near = did_you_mean(name, FUNCTIONS)
            raise ValueError(f"{self.text}: there is no function {name}; expected {', '.join(FUNCTIONS)}{near}")
        signature = inspect.signature(FUNCTIONS[name])
        try:
            signature.bind(*arguments, **{str(word.arg): word for word in keywords})
        except TypeError as error:
            takes = ", ".join(signature.parameters)
            raise ValueError(f"{self.text}: {name} takes {takes}; got {error}") from error
        return FUNCTIONS[name]

    def _part(self, of: ast.expr, key: str, inner: Callable[[ast.expr], Compute], *, headline: bool) -> Compute:
        """What an attribute, or a text in brackets, takes of a name, plain or in quotes, or of a part of it."""
        match of:
            case ast.Name(name) | ast.Constant(str(name)):
                base = self._named(name, key)
            case ast.Attribute(_, name) | ast.Subscript(_, ast.Constant(str(name))):
                base = inner(of)
            case _:
                name, base = "", inner(of)
        if name:
            self.taken.append((name, key, headline))
        return lambda scope: _taken(base(scope), key, headline=headline)

    def _named(self, name: str, key: str) -> Compute:
        if name not in self._known:
            near = did_you_mean(name, self._known)
            raise ValueError(f"{self.text}: there is no {name}; expected one of {', '.join(self._known)}{near}")
        self.chains.append((name, key))
        return lambda scope: scope[name]


def _taken(base: Any, key: str, *, headline: bool) -> Any:
    """A result of a network by its measurement's name; a headline number, a quantity or a fact of a result."""
    if isinstance(base, xr.Dataset):
        known: Sequence[str] = (
            [one.name for one in measured(base)] if headline else [*map(str, base.data_vars), *base.attrs]
        )
        if key not in known:
            what = "number" if headline else "quantity"
            raise ValueError(f"the result has no {what} {key}{did_you_mean(key, known)}")
        if headline:
            return _there(next((one.value for one in measured(base) if one.name == key), math.nan))
        return _there(base.attrs[key] if key not in base else base[key] if base[key].ndim else base[key].item())
    if isinstance(base, Mapping):
        return base[key]
    raise ValueError(f"{key} is asked of a number")
