"""Declare what a result holds: its quantities with their errors, and the numbers that sum it up."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Reading: TypeAlias = Literal["", "lower is better", "higher is better", "lower is flatter", "higher is flatter"]
LOWER: Reading = "lower is better"
HIGHER: Reading = "higher is better"
FLATTER: Reading = "lower is flatter"
FLATTER_ABOVE: Reading = "higher is flatter"
HEADLINES = "headlines"  # attribute of a result: its declarations as JSON
# What independent values are in words, where `Quantity.over` has another name for them.
OVER = {
    "images": "samples", "mini-batches": "batch", "start vectors": "vector", "groups": "group",
    "parts of the samples": "part",
}  # fmt: skip


@dataclass(frozen=True)
class Quantity:
    """One stored array."""

    long_name: str  # what it is, for axes and tables
    units: str = "1"  # physical units; "1" for pure numbers
    dims: tuple[str, ...] = ()  # names of its axes; those of a measured quantity FOLLOW the unit axes
    dtype: str = "float64"  # numpy dtype of the stored array; unfinished values are NaN, so measured numbers are floats
    # Of a standard error: what its independent values are: an axis of the units such as `batch` or `vector`, `samples`,
    # the name of a stored array of counts, or words, where `reduce` counts them. See `stored.independent`.
    over: str = ""
    bounds: str = ""  # what the number cannot leave, for its interval: `share` (0 to 1) or `positive` (above 0)
    # What its standard error is over, in words, such as `mini-batches (jackknife)`: the plan then has NAME_se behind
    # it, which is `over` that, unless `over` says what else.
    error: str = ""
    ends: bool = False  # whether the plan has the ends of its 95 % interval behind it too, NAME_low and NAME_high


def with_errors(quantities: Mapping[str, Quantity]) -> dict[str, Quantity]:
    """The quantities, each with its standard error and the ends of its interval behind it where it declares them."""
    found: dict[str, Quantity] = {}
    for name, one in quantities.items():
        found[name] = replace(one, error="", over="" if one.error else one.over, ends=False)
        if one.error:
            independent = re.split(", | \\(", one.error)[0]
            over = one.over or OVER.get(independent, independent)
            found[f"{name}_se"] = Quantity(f"its standard error over {one.error}", one.units, one.dims, over=over)
        for end, which in (("low", "lower"), ("high", "upper")) if one.ends else ():
            found[f"{name}_{end}"] = Quantity(f"{which} end of its 95 % interval", one.units, one.dims)
    return found


@dataclass(frozen=True)
class Headline:
    """A number that sums up a result: a quantity, or a fact, at a place.

    `at` gives the place on every axis of the quantity, in order, of one axis or of several together (`x y`): a position
    (int), a coordinate (float), `first` or `last` with a finite value, `largest`, `smallest`, `largest QUANTITY` (of
    another), `mean`, `median`, `each` (a number per position), the name at it, a fact or number that is the position.
    Of numbers with the same name, the first with a value counts.
    """

    name: str  # may hold arrays on the axes of the quantity in braces: `all at {setting_name}`, `at {255*eps:g}/255`
    quantity: str
    at: Mapping[str, int | float | str] = field(default_factory=dict)
    reading: Reading = ""
    where: str = ""  # the place in words, likewise: `at {name}`
    by: str = ""  # a quantity or fact that it is divided by, at the same place, or at another as `QUANTITY at WORD`
    unless: str = ""  # a quantity or fact, with whose finite values the result lacks the number
    like: str = ""  # the number of one network that it is of several together, in one table with theirs
    unlike: str = ""  # a quantity, with whose same value at the same place the result lacks it
    samples: bool = False  # whether it is the share of samples that are right, whose number gives its error
    silent: bool = False  # in tables and comparisons alone, not in one line of text
    column: int = 0  # from left to right, of the report's table of checkpoints; 0 for none
    title: str = ""  # of the column
    definition: str = ""


def stored_headlines(headlines: Sequence[Headline]) -> dict[str, str]:
    """The attribute of a result that holds its declarations; none for none."""
    rows = [{name: value for name, value in vars(one).items() if value} for one in headlines]
    return {HEADLINES: json.dumps(rows)} if rows else {}
