"""A comparison as text, Markdown, LaTeX, CSV, JSON or HTML."""

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from landscape.options import printable
from landscape.plots.comparison.comparison import Comparison, flatness
from landscape.plots.comparison.rows import MINUS, Row, closing, records, sections, words_of

# Characters of a line in the terminal, and in a paper on two columns, unless its names are longer.
WIDEST, WIDEST_PRINTED = 150, 105
ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MINUS: "$-$", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}  # fmt: skip


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


def as_latex(comparison: Comparison) -> str:
    r"""Tables with the rules of booktabs (`\usepackage{booktabs}`), which XeLaTeX, LuaLaTeX and pdfLaTeX set.

    Each has a short caption and a label, and fits the width of a page; what the intervals are is said once per probe,
    below its last table.
    """
    lines = []
    for section in sections(comparison):
        tables = [(words, part) for words, rows in section.tables for part in _narrow(rows, WIDEST_PRINTED) if part]
        for i, (words, rows) in enumerate(tables, start=1):
            below = (
                rf"\par\smallskip{{\footnotesize {_latex(section.caption)}\par}}"
                if i == len(tables) and section.caption
                else ""
            )
            label = "-".join(
                ["tab:landscape", *re.findall(r"\w+", section.title), *([str(i)] if len(tables) > 1 else [])]
            )
            lines += [
                r"\begin{table}", r"\centering", r"\small", rf"\caption{{{_latex(f'{section.title}: {words}')}}}",
                rf"\label{{{label}}}", rf"\begin{{tabular}}{{{''.join(_alignment(rows))}}}", r"\toprule",
                " & ".join(map(_latex, rows[0])) + r" \\", r"\midrule",
                *(" & ".join(map(_latex, row.values())) + r" \\" for row in rows),
                r"\bottomrule", r"\end{tabular}", *filter(None, [below]), r"\end{table}", "",
            ]  # fmt: skip
    return printable_lines([*lines, *(f"% {' '.join(line.split())}" for line in closing(comparison))])


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


def _narrow(rows: Sequence[Row], widest: int = WIDEST) -> list[list[Row]]:
    """A table as several with the same first column, so that a line of numbers fits."""
    if not rows:
        return []
    first, *names = rows[0]
    widths = {name: 2 + max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
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


def _alignment(rows: Sequence[Row]) -> Iterable[str]:
    """Columns of numbers to the right, so that their decimal points stand below each other, all others to the left."""
    return ("r" if all(re.match(rf"[{MINUS}+-]?\d|$", row[name]) for row in rows) else "l" for name in rows[0])


def _latex(text: str) -> str:
    return "".join(ESCAPES.get(char, char) for char in " ".join(text.split()))
