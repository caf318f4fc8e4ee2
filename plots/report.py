"""Write one HTML page with every figure, its meaning and protocol, and a table of all checkpoints."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import xarray as xr

from landscape.plots import FIGURES, STUDIES, headlines
from landscape.plots.surface import HEIGHT_RADIUS
from landscape.results import reader
from landscape.results.malformed import readable
from landscape.results.replacing import replacing

Cell = str | int | float
Row = dict[str, Cell]
MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}
# column of the table: (probe, number in its headline), the first that was measured
COLUMNS: Mapping[str, Sequence[tuple[str, str]]] = {
    "accuracy": (("lesion", "intact accuracy"), ("surface", "accuracy")),
    "NEP": (("hessian", "nep"),),
    "APE": (("hessian", "ape"),),
    "height": (("surface", f"height at {HEIGHT_RADIUS:g}"),),
    "high freq. first": (("fourier", "shallowest"),),
    "high freq. last": (("fourier", "deepest"),),
    "drop": (("lesion", "largest drop"),),
}
LEGEND = (
    "Accuracy: of the intact network of the lesion study (by default on test data), else at the centre of the "
    "surface (by default on training data). NEP: share of negative Hessian eigenvalues; APE: mean of the positive "
    f"ones. Height: mean rise of the loss at radius {HEIGHT_RADIUS:g} of the surface. High frequency: "
    "relative log amplitude at the highest frequency of the first and of the last layer. Drop: largest accuracy drop "
    "when one unit is removed. An empty cell was not measured."
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; text-align: left; border-bottom: 1px solid #ddd; }
.scroll { overflow-x: auto; }
img { max-width: 100%; height: auto; }
.protocol { color: #666; font-size: 13px; }
"""


def report(path: Path | str, out: Path | str, figures: Sequence[Path]) -> Path:
    """Write the page: one file that loads nothing from elsewhere; of PNG and SVG figures it shows the SVG.

    Raises:
        FileNotFoundError, ValueError: there is no results file, or `out` is a folder.
    """
    path, out = Path(path), Path(out)
    if out.is_dir():
        raise ValueError(f"{out} is a folder, expected a file for the page, such as {out / 'report.html'}")
    stored = reader.groups(path)
    images = {figure.stem: figure for figure in sorted(figures) if figure.suffix in MEDIA}
    order = [*(name for name in FIGURES if name in images), *(name for name in images if name not in FIGURES)]
    title = html.escape(f"Loss landscape: {path.name}")
    page = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
        "<h2>Checkpoints</h2>",
        _table(summary_table(path)),
        f"<p>{html.escape(LEGEND)}</p>",
        *(_section(images[name], stored) for name in order),
        "<h2>Everything in the file</h2>",
        _table(headlines.summary(path)),
        "</body>\n</html>\n",
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as stream:
        stream.write("\n".join(page).encode())
    return out


def summary_table(path: Path | str) -> list[Row]:
    """One row per checkpoint with its headline numbers; NaN or "" where not measured.

    In the order of the study. Of several results of one probe for one checkpoint the newest counts. Checkpoints with
    the same label get a part of their digests.
    """
    stored = [(name, data) for name, data in reader.groups(path) if not name.startswith("compare/")]  # of a network
    ordered = reader.by_checkpoint(stored)
    digests: dict[str, set[str]] = {}
    for _, data in ordered:
        digests.setdefault(str(data.attrs.get("label", "")), set()).add(str(data.attrs.get("checkpoint_sha256", "")))
    results: dict[str, dict[str, xr.Dataset]] = {}
    for name, data in ordered:
        label, digest = str(data.attrs.get("label", "")), str(data.attrs.get("checkpoint_sha256", ""))
        several = digest and len(digests[label] - {""}) > 1
        found = results.setdefault(f"{label} ({digest[:6]})" if several else label, {})
        with readable(path, name):
            numbers = headlines.numbers(data)
        if numbers:
            found[name.partition("/")[0]] = data
    return [_row(label, found) for label, found in results.items()]


def shown(value: Cell) -> str:
    """A table's cell as text: four digits of a number, nothing for NaN."""
    if isinstance(value, str | int):
        return str(value)
    return "" if math.isnan(value) else f"{value:.4g}"


def _row(label: str, results: Mapping[str, xr.Dataset]) -> Row:
    numbers = {probe: headlines.numbers(data) for probe, data in results.items()}
    models = (str(data.attrs.get("model", "")) for data in results.values())
    row: Row = {"checkpoint": label, "model": next(filter(None, models), "")}
    for column, sources in COLUMNS.items():
        row[column] = next((numbers[p][key] for p, key in sources if key in numbers.get(p, ())), math.nan)
    row["worst unit"] = numbers.get("lesion", {}).get("at", "")
    return row


def _section(figure: Path, stored: Sequence[tuple[str, xr.Dataset]]) -> str:
    known = FIGURES.get(figure.stem)
    title = html.escape(figure.stem.replace("_", " "))
    image = f"data:{MEDIA[figure.suffix]};base64,{base64.b64encode(figure.read_bytes()).decode()}"
    lines = [f"<section>\n<h2>{title}</h2>", f'<img alt="{html.escape(figure.stem)}" src="{image}">']
    if known is not None:
        results = known.selected([data for name, data in stored if name.partition("/")[0] == known.probe])
        given = ((data.attrs.get("label", ""), data.attrs.get("protocol", "protocol not stored")) for data in results)
        protocols = "<br>".join(html.escape(f"{label}: {protocol}") for label, protocol in given)
        lines += [f"<p>{html.escape(known.module.MEANING)}</p>", f'<p class="protocol">{protocols}</p>']
    elif (name := figure.stem.partition("-")[0]) in STUDIES:
        lines.append(f"<p>{html.escape(import_module(f'landscape.plots.{STUDIES[name]}').MEANING)}</p>")
    return "\n".join([*lines, "</section>"])


def _table(rows: Sequence[Mapping[str, Cell]]) -> str:
    if not rows:
        return "<p>Nothing measured yet.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    lines = ("".join(f"<td>{html.escape(shown(value))}</td>" for value in row.values()) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
