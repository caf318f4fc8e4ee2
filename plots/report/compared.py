"""Stored comparisons as tables: every difference with its interval and verdict, and the means of groups."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr

from landscape.plots.comparison import grouping, networks
from landscape.plots.comparison.comparison import REAL, GroupMean
from landscape.plots.comparison.rows import MINUS, letter, outdated, signed
from landscape.plots.report.markup import Html, element, join
from landscape.results.stored_table import rows_of
from landscape.statistics.rounding import interval

Row = Mapping[str, Any]
REGION = {"tabindex": "0", "role": "region"}
HEADS = ("probe", "number", "difference", "value [95 %]", "p (Holm)", "verdict")
NOTE = (
    "Real: p below 0.05 after Holm's correction over the differences of a probe. A difference of two networks is about "
    "these two, other seeds may differ as much; that of groups is about seeds."
)


def comparisons(stored: Sequence[tuple[str, xr.Dataset]]) -> Html:
    """A table per stored comparison; nothing where there is none."""
    tables = [
        table
        for name, data in stored
        if name.partition("/")[0] == networks.NAME and (table := _table(data, rows_of(data), outdated(data, stored)))
    ]
    if not tables:
        return Html("")
    heading = element("h2", "Differences, tested")
    return element("section", heading, *tables, element("p", NOTE, class_="note"), id="compared")


def group_means(means: Sequence[GroupMean], groups: grouping.Groups | None) -> Html:
    """Every headline number as the mean of each group over its seeds, one row per number and protocol."""
    if groups is None:
        return Html("")
    rows: dict[tuple[str, int, str], dict[str, GroupMean]] = {}
    for mean in means:
        rows.setdefault((mean.probe, mean.protocol, mean.mean.name), {})[mean.group] = mean
    heads = ("probe", "number", *groups.members)
    head = element("tr", *(element("th", element("span", name, class_="title"), scope="col") for name in heads))
    lines = []
    for (probe, position, number), cells in rows.items():
        unit = next(iter(cells.values())).mean.unit
        name = f"{number}{f' ({unit})' if unit else ''}{f' [{letter(position)}]' if position else ''}"
        row = (_mean(cells.get(group), len(members)) for group, members in groups.members.items())
        lines.append(element("tr", element("td", probe), element("td", name), *row))
    body = element("table", element("thead", head), element("tbody", join(lines)), class_="sortable")
    said = "; ".join(f"{name}: {', '.join(members)}" for name, members in groups.members.items())
    note = (
        f"Means of finished networks, in brackets 95 % intervals by Student's t. {said}. Layer plots and figures of "
        "curves show these means, all others the first network of each group; landscape report --group none shows all."
    )
    scroll = element("div", body, class_="scroll", **REGION, aria_label="Table of means over seeds")
    return element("section", element("h2", "Means over seeds"), scroll, element("p", note, class_="note"), id="groups")


def _mean(of: GroupMean | None, members: int) -> Html:
    if of is None:
        return element("td")
    one = of.mean
    value, _, ends = signed(interval(one.value, one.low, one.high)).partition(" ")
    within = element("span", f" {ends}", class_="interval") if ends else ""
    some = element("small", f"of {one.n:g} of {members}") if one.n < members else ""
    return element("td", value, within, some, data_value=repr(one.value))


def _table(data: xr.Dataset, rows: Sequence[Row], age: str) -> Html:
    differences = sorted((row for row in rows if row["kind"] == "difference"), key=lambda row: row["verdict"] != REAL)
    lines = [_line(row) for row in differences]
    label = str(data.attrs.get("label", ""))
    if not lines:
        return element("p", f"{label}: no difference is stored.")
    caption = element("caption", f"Differences of {label}")
    head = element("tr", *(element("th", element("span", name, class_="title"), scope="col") for name in HEADS))
    counts = Counter(str(row["verdict"] or "").partition(":")[0].partition(" (")[0] for row in differences)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    summary = element("summary", f"{label}: {len(lines)} differences, {words}")
    body = element("table", caption, element("thead", head), element("tbody", join(lines)), class_="sortable")
    region = REGION | {"aria_label": f"Table of differences of {label}"}
    notes = " ".join(filter(None, (f"This comparison is {age}." if age else "", str(data.attrs.get("notes", "")))))
    table = element("details", summary, element("div", body, class_="scroll", **region))
    return element("div", element("p", notes) if notes else "", table)


def _line(row: Row) -> Html:
    value, low, high, p = (
        math.nan if row[key] is None else float(row[key]) for key in ("value", "low", "high", "p_holm")
    )
    who = f"{row['group'] or row['network'] or ''} {MINUS} {row['against'] or ''}"
    said = f"{row['verdict'] or ''}{': ' + str(row['favours']) if row['favours'] else ''}"
    number = f"{row['number'] or ''}{' (' + str(row['unit']) + ')' if row['unit'] else ''}"
    known = math.isfinite(value)
    shown = signed(interval(value, low, high, sign=True)) if known else ""
    return element(
        "tr", element("td", row["probe"] or ""), element("td", number), element("th", who, scope="row"),
        element("td", shown, data_value=repr(value) if known else None),
        element("td", "" if math.isnan(p) else f"{p:.2g}" if p >= 1e-4 else "< 0.0001",
                data_value=None if math.isnan(p) else repr(p)),
        element("td", said, class_="sure", data_sure="certain" if row["verdict"] == REAL else "no"),
    )  # fmt: skip
