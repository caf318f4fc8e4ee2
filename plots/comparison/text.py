"""A comparison as text, Markdown, LaTeX, CSV, JSON or HTML."""

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from landscape.options import printable
from landscape.plots.comparison.comparison import REAL, Comparison, chosen, compare_results, flatness
from landscape.plots.comparison.rows import MINUS, Row, closing, records, sections, words_of
from landscape.plots.selection import Data, Selection, results_of
from landscape.studies.citation import latex

WIDEST = 150  # characters of a line in the terminal, unless its names are longer
PRINTED, SIZES = {1: 54, 2: 105}, {1: r"\footnotesize", 2: r"\small"}  # those of a line in columns of a paper, and size
NUMBER = re.compile(
    rf"(?:< )?[{MINUS}+-]?\d+(?=(?:\.\d+)?(?:e[+-]?\d+)?(?: \[.*\])?$)"
)  # its units; an interval may follow


def as_text(comparison: Comparison) -> str:
    """Aligned columns for the terminal."""
    lines = []
    for section in sections(comparison):
        lines.append(f"== {section.title} ==")
        for words, rows in section.tables:
            lines.append(words)
            lines += [line for part in _narrow(rows) for line in (*_aligned(part), "")]
        lines += [section.caption, ""]
    return printable_lines([*lines, *closing(comparison)])


def as_markdown(comparison: Comparison) -> str:
    """Tables of GitHub's Markdown."""
    lines = []
    for section in sections(comparison):
        lines += [f"## {_markdown(section.title)}", ""]
        for words, rows in section.tables:
            lines += [_markdown(words), ""]
            lines += [_line(map(_markdown, rows[0])), _line("---" for _ in rows[0])] if rows else []
            lines += [*(_line(map(_markdown, row.values())) for row in rows), ""]
        lines += [_markdown(section.caption), ""]
    below = [part for line in closing(comparison) for part in (_markdown(line), "")]
    return printable_lines([*lines, *below])


def as_latex(comparison: Comparison, columns: int = 2) -> str:
    r"""Tables with the rules of booktabs (`\usepackage{booktabs}`), which XeLaTeX, LuaLaTeX and pdfLaTeX set.

    Each has a short caption and a label, and fits one column of a paper, or two (a page). Numbers stand with their
    decimal points below each other. What the intervals are is said once per probe, below its last table.
    """
    widest, lines = PRINTED[columns], []
    for section in sections(comparison):
        tables = [(words, part) for words, rows in section.tables for part in _narrow(rows, widest) if part]
        for i, (words, rows) in enumerate(tables, start=1):
            said = section.caption if i == len(tables) else ""
            said += " *: real." if said and _too_wide(rows, widest) else ""
            below = rf"\par\smallskip{{\footnotesize {latex(said)}\par}}" if said else ""
            label = "-".join(
                ["tab:landscape", *re.findall(r"\w+", section.title), *([str(i)] if len(tables) > 1 else [])]
            )
            star = "*" if columns == 2 else ""  # of a page that is set in two columns; in one it means nothing
            lines += [
                rf"\begin{{table{star}}}", r"\centering", SIZES[columns],
                rf"\caption{{{latex(f'{section.title}: {words}')}}}",
                rf"\label{{{label}}}", *_tabular(rows, widest), *filter(None, [below]), rf"\end{{table{star}}}", "",
            ]  # fmt: skip
    return printable_lines([*lines, *(f"% {' '.join(line.split())}" for line in closing(comparison))])


def _tabular(rows: Sequence[Row], widest: int) -> list[str]:
    """The body of a table, in which a column of numbers is two that meet at the decimal point.

    Where differences with their verdicts are too wide, every two that are compared are a line above their rows.
    """
    above = "difference" if _too_wide(rows, widest) else ""
    if above:
        real = [row["verdict"].startswith(REAL) for row in rows]
        marked = [{**row, "of": f"{row['of']}{'*' * star}"} for row, star in zip(rows, real, strict=True)]
        inside = [{name: cell for name, cell in row.items() if name not in (above, "verdict")} for row in marked]
    else:
        inside = [dict(row) for row in rows]
    numeric = {name: all(NUMBER.match(row[name]) or not row[name] for row in inside) for name in inside[0]}
    columns = "".join("r@{}l" if number else "l" for number in numeric.values())
    head = [rf"\multicolumn{{2}}{{c}}{{{latex(name)}}}" if number else latex(name) for name, number in numeric.items()]
    lines, last = [" & ".join(head), r"\midrule"], ""
    for row, whole in zip(inside, rows, strict=True):
        if above and whole[above] != last:
            last = whole[above]
            lines.append(rf"\multicolumn{{{len(numeric) + sum(numeric.values())}}}{{l}}{{\emph{{{latex(last)}}}}}")
        lines.append(" & ".join(_at_point(cell) if numeric[name] else latex(cell) for name, cell in row.items()))
    ended = [line if line.startswith(r"\midrule") else rf"{line} \\" for line in lines]
    return [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *ended, r"\bottomrule", r"\end{tabular}"]


def _too_wide(rows: Sequence[Row], widest: int) -> bool:
    """Whether rows of differences, which `_narrow` does not divide, are longer than a line."""
    return "verdict" in rows[0] and sum(_widths(rows).values()) > widest


def _at_point(cell: str) -> str:
    """A number as two cells: up to the units, and from the decimal point on, with its interval."""
    found = NUMBER.match(cell)
    rest = cell[found.end() :] if found else cell
    return f"{latex(found[0] if found else '')} & {'~' * rest.startswith(' ')}{latex(rest.lstrip())}"


def as_html(comparison: Comparison) -> str:
    """Tables with all text escaped, for notebooks."""
    parts = []
    for section in sections(comparison):
        parts.append(f"<h4>{html.escape(section.title)}</h4>")
        for words, rows in section.tables:
            parts.append(f"<p>{html.escape(words)}</p>")
            cells = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
            body = "".join(
                "<tr>" + "".join(f"<t{'d' if i else 'h'}>{html.escape(cell)}</t{'d' if i else 'h'}>" for cell in row)
                + "</tr>" for i, row in enumerate(cells)
            )  # fmt: skip
            parts.append(f"<table>{body}</table>")
        parts.append(f"<p><small>{html.escape(section.caption)}</small></p>")
    return "\n".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in closing(comparison))])


def as_csv(comparison: Comparison) -> str:
    """One row per number and per difference, with the columns of `records`."""
    rows = records(comparison)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return stream.getvalue()


def as_json(comparison: Comparison) -> str:
    """The records, the protocols, the groups and the notes; what is not known is null."""
    content = {
        "networks": list(comparison.networks),
        "groups": {name: list(members) for name, members in comparison.groups.members.items()}
        if comparison.groups
        else {},
        "protocols": words_of(comparison),
        "records": records(comparison),
        "flatness": flatness(comparison),
        "notes": list(comparison.notes),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "text": as_text, "markdown": as_markdown, "csv": as_csv, "latex": as_latex, "json": as_json,
}  # fmt: skip


def printable_lines(lines: Iterable[str]) -> str:
    """Lines as text that cannot steer a terminal."""
    return "\n".join(printable(line) for line in lines).rstrip() + "\n"


def _widths(rows: Sequence[Row]) -> dict[str, int]:
    """Characters that every column takes, with the space between two."""
    return {name: 2 + max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}


def _narrow(rows: Sequence[Row], widest: int = WIDEST) -> list[list[Row]]:
    """A table as several with the same first column, so that a line of numbers fits."""
    if not rows:
        return []
    (first, *names), widths = rows[0], _widths(rows)
    parts: list[list[str]] = [[]]
    for name in names:
        if (
            parts[-1]
            and widths[first] + sum(widths[one] for one in [*parts[-1], name]) > widest
            and "verdict" not in names
        ):
            parts.append([])
        parts[-1].append(name)
    return [[{name: row[name] for name in (first, *part)} for row in rows] for part in parts]


def _aligned(rows: Sequence[Row]) -> list[str]:
    cells = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Escaped: brackets of intervals stay, those of links do not."""
    return re.sub(r"([\\`*_{}<>|~#$&]|(?<=\])[(\[:])", r"\\\1", " ".join(text.split()))


@dataclass(frozen=True, repr=False)
class ComparisonTable(Comparison):
    """A comparison that is printed as tables, also in a notebook."""

    def __repr__(self) -> str:
        return as_text(self)

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
