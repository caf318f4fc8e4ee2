"""Compare the networks of results files, and show the table in a notebook."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from landscape.plots.comparison.comparison import Comparison, chosen, compare_results
from landscape.plots.comparison.text import as_html
from landscape.plots.selection import Data, Selection, results_of


@dataclass(frozen=True)
class ComparisonTable(Comparison):
    """A comparison that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return as_html(self)


def compare(
    *results: Data,
    group: str | Sequence[str] = (),
    against: str = "",
    only: str | Sequence[str] = (),
    rows: str | Sequence[str] = (),
) -> ComparisonTable:
    r"""Compare the networks of results files, or groups of them over seeds; a table in a notebook.

    `results` are results files, results of `landscape.measure` (one, or a list), or what `landscape.open` returns.
    `group` is a regular expression whose match is the part of a label that tells seeds apart (`-s\d+$`) or whose
    capture group names the group, or patterns such as `sgd=sgd-*,adam=adam-*`. `against` is the network or group that
    all others are compared with; without it up to four are compared pair by pair, more with the first. `only` are the
    labels of those to compare, `rows` the numbers to show, PROBE or PROBE/NUMBER; `*` in either stands
    for anything.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or nothing finished in it.
        TypeError: something else than results is given.
        OptionError: a group, a number or a label is unknown.
    """
    rules, labels, shown = ((text,) if isinstance(text, str) and text else tuple(text) for text in (group, only, rows))
    with ExitStack() as opened:
        stored = [found for data in results for found in opened.enter_context(results_of(data))]
        stored = Selection(labels).of(stored)
        source = ", ".join(str(data) for data in results if isinstance(data, Path | str)) or "what is given"
        found = compare_results(stored, group=rules, against=against, source=source)
    return ComparisonTable(**vars(chosen(found, shown) if shown else found))
