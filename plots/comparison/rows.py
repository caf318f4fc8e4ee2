"""The tables of a comparison: rows of words per probe for readers, and tidy records for programs."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from landscape.options import counted
from landscape.plots.comparison.comparison import ALIKE, LEVEL, MISSING, PAIRS, Comparison, Contrast, flatness
from landscape.plots.comparison.networks import NAME, compared
from landscape.results import headline_numbers, stored_table
from landscape.statistics.rounding import interval

Row = dict[str, str]
MINUS = "\N{MINUS SIGN}"
ALONE = "A difference of two networks is about these two: other seeds may differ as much."
OF_SAMPLES = "samples"  # what errors are over unless the result says otherwise
NAMES = 60  # characters of the names of groups in a label
SEEDS = (
    "Means over seeds with 95 % intervals, from four seeds on; differences by a t test, g: Hedges' g with its 95 % "
    "interval. They are about seeds, on these samples."
)


@dataclass(frozen=True)
class Section:
    """The tables of one probe and what stands below them."""

    title: str
    tables: Sequence[tuple[str, Sequence[Row]]]  # (the protocol, or what the rows are; the rows)
    caption: str


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """One row per number of a network, per mean of a group, and per difference; None where something is not known."""
    empty: dict[str, Any] = dict.fromkeys(
        ("kind", "probe", "protocol", "number", "unit", "reading", "network", "group", "against", "seeds", "value",
         "standard_error", "n", "low", "high", "p", "p_holm", "g", "g_low", "g_high", "method", "verdict", "favours",
         "partial")
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for entry in comparison.entries:
        for one in entry.numbers.values():
            own = {"kind": "network", "probe": entry.probe, "protocol": letter(entry.protocol),
                   "network": entry.network, "group": entry.side if comparison.groups else None, "value": one.value,
                   "standard_error": one.error, "n": one.n, "low": one.low, "high": one.high,
                   "partial": entry.partial or None}  # fmt: skip
            rows.append(empty | own | _about(one))
    for of in comparison.means:
        own = {"kind": "group", "probe": of.probe, "protocol": letter(of.protocol), "group": of.group,
               "seeds": f"{of.mean.n:g}", "value": of.mean.value, "low": of.mean.low, "high": of.mean.high}  # fmt: skip
        rows.append(empty | own | _about(of.mean))
    for c in comparison.contrasts:
        who = "group" if comparison.groups else "network"
        own = {"kind": "difference", "probe": c.probe, "number": c.number, "unit": c.unit, who: c.first,
               "protocol": None if c.protocol is None else letter(c.protocol), "against": c.second,
               "seeds": f"{c.seeds[0]}, {c.seeds[1]}" if comparison.groups else None, "verdict": c.verdict,
               "favours": c.favours or None}  # fmt: skip
        if c.difference is not None:
            d = c.difference
            own |= {"value": d.value, "low": d.low, "high": d.high, "p": d.p, "p_holm": c.adjusted, "method": d.method}
        if c.effect is not None:
            own |= {"g": c.effect.value, "g_low": c.effect.low, "g_high": c.effect.high}
        rows.append(empty | own)
    return [{key: _known(value) for key, value in row.items()} for row in rows]


def sections(comparison: Comparison) -> list[Section]:
    """A section per probe: a table of every protocol, and one of the differences."""
    found = []
    for probe, protocols in comparison.protocols.items():
        tables = [
            (_words(comparison, probe, i), _group_rows(comparison, probe, i) or _network_rows(comparison, probe, i))
            for i in range(len(protocols))
        ]
        contrasts = [c for c in comparison.contrasts if c.probe == probe]
        if contrasts:
            several = len(protocols) > 1
            references = {c.second for c in contrasts}
            one = references.pop() if len(references) == 1 and len(comparison.sides) > PAIRS else ""
            rows = [_difference_row(c, comparison, several=several, reference=one) for c in contrasts]
            tables.append((f"Differences from {one}" if one else "Differences", rows))
        found.append(Section(probe, tables, _caption(comparison, probe, contrasts)))
    return found


def store(path: Path, comparison: Comparison) -> str:
    """Store the records in a results file, in place of an older comparison of the same groups; returns the group."""
    groups = comparison.groups
    definition = {"group": list(groups.rules) if groups else [], "against": comparison.against}
    about = {
        "protocol": "", "notes": " ".join(closing(comparison)), "factor": groups.factor if groups else "network",
        "protocols": json.dumps(words_of(comparison)), "errors_over": json.dumps(_over(comparison)),
    }  # fmt: skip
    return stored_table.store(path, NAME, label_of(comparison), definition, records(comparison), about)


def outdated(data: xr.Dataset, stored: Sequence[tuple[str, xr.Dataset]]) -> str:
    """Words for a stored comparison whose file holds numbers that it does not: they changed or came later; else ""."""
    held = {_key(row) for row in stored_table.rows_of(data) if row["kind"] == "network"}
    try:
        entries = compared(stored, (), "").entries
    except ValueError:
        return ""
    new = {(e.probe, e.network, one.name, float(one.value)) for e in entries for one in e.numbers.values()} - held
    return f"out of date: {len(new)} numbers changed or came since; run landscape compare again" if new else ""


def _key(row: Mapping[str, Any]) -> tuple[str, str, str, float]:
    value = row["value"]
    return row["probe"], row["network"], row["number"], math.nan if value is None else float(value)


def words_of(comparison: Comparison) -> dict[str, list[str]]:
    """The protocols of every probe in words."""
    return {probe: [one.words for one in found] for probe, found in comparison.protocols.items()}


def _over(comparison: Comparison) -> dict[str, str]:
    return {entry.probe: str(entry.data.attrs.get("errors_over", OF_SAMPLES)) for entry in comparison.entries}


def label_of(comparison: Comparison) -> str:
    """What is compared, in a few words."""
    groups = comparison.groups
    label = counted(len(comparison.sides), "group" if groups else "network")
    label += f" by {groups.factor}" if groups and groups.factor != "group" else ""
    label += f" ({', '.join(comparison.sides)[:NAMES]})" if groups else ""  # of which a file may hold several
    label += f" against {comparison.against}" if comparison.against else ""
    return label


def letter(position: int) -> str:
    """The mark of a protocol: a, b, ..."""
    return chr(ord("a") + position) if position < 26 else f"p{position}"


def signed(text: str) -> str:
    """With the minus sign in place of the hyphen, but in exponents."""
    return re.sub("(?<!e)-", MINUS, text)


def _about(one: headline_numbers.Measured) -> dict[str, Any]:
    return {"number": one.name, "unit": one.unit, "reading": one.reading}


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _words(comparison: Comparison, probe: str, position: int) -> str:
    """The protocol; marked, and with what is different, where a probe has several."""
    protocols = comparison.protocols[probe]
    words = protocols[position].words
    if len(protocols) == 1:
        return words
    other = "" if position == 0 else f" (from a: {protocols[position].against(protocols[0])})"
    return f"[{letter(position)}] {words}{other}"


def _network_rows(comparison: Comparison, probe: str, position: int) -> list[Row]:
    own = [entry for entry in comparison.entries if (entry.probe, entry.protocol) == (probe, position)]
    columns = _columns(one for entry in own for one in entry.numbers.values())
    rows = []
    for entry in own:
        row = {"network": f"{entry.network}{f' (partial: {entry.partial})' if entry.partial else ''}"}
        for name, heading in columns.items():
            one = entry.numbers.get(name)
            row[heading] = "" if one is None else signed(interval(one.value, one.low, one.high))
        rows.append(row)
    return rows


def _group_rows(comparison: Comparison, probe: str, position: int) -> list[Row]:
    own = [of for of in comparison.means if (of.probe, of.protocol) == (probe, position)]
    columns = _columns(of.mean for of in own)
    factor = comparison.groups.factor if comparison.groups else "group"
    rows: dict[str, Row] = {}
    for name in comparison.sides:
        for one in (of.mean for of in own if of.group == name):
            row = rows.setdefault(name, {factor: name, "seeds": "", **dict.fromkeys(columns.values(), "")})
            row["seeds"] = str(max(int(one.n), int(row["seeds"] or 0)))
            row[columns[one.name]] = signed(interval(one.value, one.low, one.high))
    return list(rows.values())


def _columns(numbers: Iterable[headline_numbers.Measured]) -> dict[str, str]:
    """Names of numbers with their short units, in order."""
    return {one.name: f"{one.name} ({one.unit})" if 0 < len(one.unit) < 8 else one.name for one in numbers}


def _difference_row(c: Contrast, comparison: Comparison, *, several: bool, reference: str) -> Row:
    """One difference; without its `reference` where all rows have the same."""
    row = {"difference": c.first if reference else f"{c.first} {MINUS} {c.second}", "of": c.number}
    if several:
        row["protocol"] = "" if c.protocol is None else letter(c.protocol)
    d = c.difference
    row["value [95 %]"] = signed(interval(d.value, d.low, d.high, sign=True)) if d else ""
    if comparison.groups:
        effect = c.effect
        row["g [95 %]"] = (
            signed(interval(effect.value, effect.low, effect.high, sign=True))
            if effect and math.isfinite(effect.value)
            else ""
        )
    row["p (Holm)"] = "" if not math.isfinite(c.adjusted) else f"{c.adjusted:.2g}" if c.adjusted >= 1e-4 else "< 0.0001"
    favours = c.favours
    if reference:  # of the network that the row names
        favours = favours.removeprefix(f"{c.first} is ")
        for word, opposite in (("flatter", "sharper"), ("better", "worse")):
            favours = favours.replace(f"{reference} is {word}", opposite)
    return row | {"verdict": f"{c.verdict}: {favours}" if favours else c.verdict}


def _caption(comparison: Comparison, probe: str, contrasts: Sequence[Contrast]) -> str:
    """What the errors are over, how the differences were tested, and what the verdicts mean."""
    numbers = {one.name: one for e in comparison.entries if e.probe == probe for one in e.numbers.values()}
    readings: dict[str, list[str]] = {}
    for one in numbers.values():
        if one.reading:
            readings.setdefault(one.reading, []).append(one.name)
    known = any(one.known for one in numbers.values())
    intervals = f"In brackets: 95 % intervals over {_over(comparison)[probe]}."
    said = [SEEDS] if comparison.groups else [intervals] if known else []
    said += [f"{words[:1].upper()}{words[1:]}: {', '.join(names)}." for words, names in readings.items()]
    methods: dict[str, list[str]] = {}
    for c in contrasts:
        if c.difference is not None and c.difference.method and c.number not in methods.get(c.difference.method, ()):
            methods.setdefault(c.difference.method, []).append(c.number)
    tests = comparison.tests.get(probe, 0)
    if tests and any(math.isfinite(c.adjusted) for c in contrasts):
        if not comparison.groups or any(MISSING in c.verdict for c in contrasts):
            by = "; ".join(f"{how} ({', '.join(of)})" for how, of in methods.items())
            said.append(f"Intervals and p: {by}.")
        rows = f"over the {tests} rows" if tests > 1 else "(one row)"
        said.append(f"p: Holm's correction {rows} of {probe}; real: p < {LEVEL:g}, else {ALIKE}.")
        said.append("Intervals are those of each row by itself.")
    if contrasts and not comparison.groups:
        said.append(ALONE)
    if any(MISSING in c.verdict for c in contrasts):
        said.append("Where seeds are missing, a difference is about these networks only.")
    if probe == "surface":
        most = max((len(values) for e in comparison.entries for values in e.planes.values()), default=1)
        said.append(
            f"Heights are means over up to {most} random planes."
            if most > 1
            else "Heights are those of one plane, with errors over samples that are upper bounds; --directions 5 of "
            "surface draws more planes."
        )
    return " ".join(said)


def closing(comparison: Comparison) -> list[str]:
    """What the measures of flatness say, and the notes."""
    lines = [f"Flatness: {line}." for line in flatness(comparison)]
    if len(comparison.sides) == 1:
        what = "group" if comparison.groups else "network"
        lines.append(f"One {what}: there is nothing to compare it with; measure another one into the same file.")
    groups = comparison.groups.members if comparison.groups else {}
    members = [f"{name}: {', '.join(members)}" for name, members in groups.items()]
    return [*lines, *(["Groups: " + "; ".join(members) + "."] if members else []),
            *(f"Note: {note}." for note in comparison.notes)]  # fmt: skip
