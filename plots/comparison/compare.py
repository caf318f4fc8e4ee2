"""Compare the networks of results files, and show the table in a notebook."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from landscape.plots.comparison.comparison import Comparison, chosen, compare_results
from landscape.plots.comparison.text import as_html
from landscape.plots.selection import Selection
from landscape.results import reader


@dataclass(frozen=True)
class ComparisonTable(Comparison):
    """A comparison that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return as_html(self)


def compare(
    *files: Path | str,
    group: str | Sequence[str] = (),
    against: str = "",
    only: Sequence[str] = (),
    rows: Sequence[str] = (),
) -> ComparisonTable:
    r"""Compare the networks of results files, or groups of them over seeds; a table in a notebook.

    `group` is a regular expression whose match is the part of a label that tells seeds apart (`-s\d+$`) or whose
    capture group names the group, or patterns such as `sgd=sgd-*,adam=adam-*`. `against` is the network or group that
    all others are compared with; without it up to four are compared pair by pair, more with the first. `only` are the
    labels of those to compare, `rows` the numbers to show, PROBE or PROBE/NUMBER; `*` in either stands
    for anything.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or nothing finished in it.
        OptionError: a group, a number or a label is unknown.
    """
    rules = (group,) if isinstance(group, str) and group else tuple(group)
    with ExitStack() as opened:
        stored = [found for path in files for found in opened.enter_context(reader.streaming(path))]
        stored = Selection(tuple(only)).of(stored)
        found = compare_results(stored, group=rules, against=against, source=", ".join(map(str, files)))
    return ComparisonTable(**vars(chosen(found, rows) if rows else found))
