"""The page of what works on networks of three libraries, from rows that `zoo.py` measures."""

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROBES = {"fourier": "delta_log_amplitude", "variance": "variance", "similarity": "cka", "attention": "distance"}
COLUMNS = (*PROBES, "lesion", "hessian")
LIBRARIES = ("timm", "torchvision", "transformers", "torch")
SIGNS = {"number": "x", "partial": "part", "none": "-", "refused": "refused", "failed": "FAILED", "limit": "limit"}
MEANINGS = {  # of the signs, and of an empty cell
    "number": "a number for every layer (`hessian`: an eigenvalue)", "partial": "numbers for this share of the layers",
    "none": "the network has nothing of the kind, such as maps of positions or self-attention",
    "refused": "one line says why", "failed": "an error of another library",
    "limit": "not finished within the time or memory of a network", "": "not measured yet",
}  # fmt: skip
Row = dict[str, Any]


def cells(row: Row) -> list[str]:
    """A row of the table."""
    if "broken" in row or "not_built" in row:
        return [row["name"], row.get("broken") or "not built", *[""] * (3 + len(COLUMNS))]
    layers, known = row["discovery"], "layers" in row["discovery"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in layers.get("kinds", {}).items())
    read = row.get("attention", {})
    measured = known and layers["attentions"] and read.get("outcome") != "limit"
    return [
        row["name"] if row["name"].endswith(f"/{row['member']}") else f"{row['name']} ({row['member']})",
        f"{layers['layers']} ({kinds}), {layers['stages']} stages" if known else SIGNS[layers["outcome"]],
        f"{layers['grids']}" if known else "",
        f"{read.get('finite', 0)} of {layers['attentions']}" if measured else "",
        f"{row.get('lesion', {}).get('units', '')}",
        *(SIGNS[row[c]["outcome"]] + (f" {row[c]['finite']}/{row[c]['of']}" if "nan" in row[c] else "")
          if c in row else "" for c in COLUMNS),
    ]  # fmt: skip


def cells_of(page: Path) -> dict[str, list[str]]:
    """The rows of a written table by the names of their networks."""
    lines = (line[2:-2].split(" | ") for line in page.read_text().splitlines() if line.startswith("| "))
    return {several[0].partition(" (")[0]: several for several in lines if len(several) == 5 + len(COLUMNS)}


def differing(new: Sequence[str], old: Sequence[str]) -> list[str]:
    """The cells that are not those of the page, of what both have measured."""
    unknown = ("", SIGNS["limit"])
    pairs = ((one, other) for one, other in zip(new, old, strict=True) if not {one, other} & {*unknown})
    return [f"DIFFERS: {new[0]}: {one}, {other} in the page" for one, other in pairs if one != other]


def line(row: Row) -> str:
    return f"{' | '.join(cells(row))} | {row['seconds']:g} s"


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """What was refused, failed or not finite, each reason with its networks."""
    networks: dict[str, list[str]] = {}
    for row in rows:
        columns: dict[str, list[str]] = {}
        for column in ("discovery", *COLUMNS):
            if row.get(column, {"outcome": ""})["outcome"] in ("refused", "failed", "partial", "limit"):
                columns.setdefault(row[column].get("said", "not finite"), []).append(column)
        columns |= {row[key]: [key.replace("_", " ")] for key in ("broken", "not_built") if key in row}
        for said, several in columns.items():
            said = re.sub(r"\w+(\.[\w.]+)(, \w+\.[\w.]+)+", lambda names: _several(names[0]), said)
            networks.setdefault(f"{', '.join(several)}: {said}".replace("|", "/"), []).append(row["name"])
    for said, names in sorted(networks.items(), key=lambda item: -len(item[1])):
        yield f"- {', '.join(names)}: {said}"


def _several(names: str) -> str:
    """The first of many layers, and how many there are."""
    several = names.split(", ")
    return f"{several[0]} and {len(several) - 1} more" if len(several) > 3 else names


def page(known: Iterable[Row], everything: int) -> str:
    """The page of the documentation."""
    rows = sorted(known, key=lambda row: row["name"])
    built = [row for row in rows if "discovery" in row]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    dates = sorted({row["date"] for row in rows})
    text = [
        "# Networks of timm, torchvision and transformers", "",
        f"This page says which probes work on {len(rows)} of {everything} networks with random weights: the smallest "
        "member of every family of timm, every builder of torchvision for classification, segmentation and detection, "
        "and every architecture of transformers with a head for image classification, masked or causal language "
        f"modelling, from a tiny configuration. {len(rows) - len(built)} could not be built this way. Measured by "
        f"`benchmarks/zoo.py` from {' to '.join(dict.fromkeys((dates[0], dates[-1])))} with {versions}, on four "
        "samples of noise; `hessian` on two samples, with two products, which are compared with differences of "
        "gradients only where no number comes out. Of detection networks the scores of the classes are measured, as "
        "means over anchors, or in R-CNNs of a box that is the image.", "", "| cell | meaning |", "| --- | --- |",
        *(f"| {SIGNS.get(outcome, '(empty)')} | {meaning} |" for outcome, meaning in MEANINGS.items()), "",
        "[The reasons](#reasons) for refusals and failures follow the table, and [the versions](#versions) of this "
        "project that measured the cells end the page.", "",
        "## Shares", "", "| | networks | " + " | ".join(COLUMNS) + " |", "|" + " --- |" * (2 + len(COLUMNS)),
        *shares(built), "", "## Networks", "",
        "| network | layers | with a grid | attentions read | units | " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * (5 + len(COLUMNS)),
        *(f"| {' | '.join(cells(row))} |" for row in built), "", "## Reasons", "", *reasons(rows), "",
        "## Versions", "", *by_version(built), "",
    ]  # fmt: skip
    return "\n".join(text)


def by_version(built: Sequence[Row]) -> Iterator[str]:
    """Which cells were measured with which commit of this project."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in built:
        columns: dict[str, list[str]] = {}
        for column in COLUMNS:
            if column in row:
                columns.setdefault(row[column].get("version", ""), []).append(column)
        for version, several in columns.items():
            found.setdefault((version, "all" if len(columns) == 1 else ", ".join(several)), []).append(row["name"])
    for (version, what), names in sorted(found.items()):
        if version:
            yield f"- {version}, {what}: {', '.join(names)}"
    if any(not version for version, _ in found):
        yield "- earlier versions, which were not noted: everything else"


def shares(built: Sequence[Row]) -> Iterator[str]:
    """Of the networks that have what a probe measures, how many give a number for every layer, or say why not."""
    groups: dict[str, list[Row]] = {}
    for row in built:
        groups.setdefault(row["name"].rpartition("/")[0], []).append(row)
    for group, rows in groups.items():
        found: list[str] = []
        for column in COLUMNS:
            several = [row[column] for row in rows if column in row and row[column]["outcome"] != "none"]
            whole, known = len(several), sum(one["outcome"] == "number" for one in several)
            stored = sum(not one.get("said", "not finite").startswith("not finite") for one in several if "nan" in one)
            reason = f", {stored} with stored reasons" if stored else ""
            found.append(f"{known} of {whole} ({known / whole:.0%}){reason}" if whole else "")
        yield f"| {group} | {len(rows)} | {' | '.join(found)} |"
