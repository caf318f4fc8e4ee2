"""Declare the numbers that sum up a result: beside the quantities of a probe, and stored with the result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Reading: TypeAlias = Literal["", "lower is better", "higher is better", "lower is flatter", "higher is flatter"]
LOWER: Reading = "lower is better"
HIGHER: Reading = "higher is better"
FLATTER: Reading = "lower is flatter"
FLATTER_ABOVE: Reading = "higher is flatter"
HEADLINES = "headlines"  # attribute of a result: its declarations as JSON


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
    by: str = ""  # a quantity or fact that it is divided by, at the same place
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
