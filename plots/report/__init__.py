"""Write one HTML page to explore a study: figures that can be turned and linked, tables, answers, protocols."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from landscape.plots.report import findings
from landscape.plots.report.page import document
from landscape.plots.report.table import summary_table as summary_table
from landscape.results import reader
from landscape.results.replacing import check_place, write_text

PLACE = ("page", "report.html")


def report(
    path: Path | str,
    out: Path | str,
    figures: Sequence[Path],
    examined: Sequence[Any] | None = None,
    group: Sequence[str] = (),
) -> Path:
    """Write the page: one file that loads nothing from elsewhere; of PNG and SVG figures it shows the SVG.

    `examined` is what `landscape.doctor` found in the file, which the page lists; `group` as of `drawing.draw`.

    Raises:
        FileNotFoundError, ValueError: there is no results file, or `out` is a folder.
    """
    path, out = Path(path), Path(out)
    check_place(out, *PLACE)
    with reader.streaming(path, on_demand=True) as stored, reader.using(path):
        text = document(stored, path, figures, examined, group)
    return write_text(out, text)


def findings_of(path: Path | str) -> list[findings.Finding]:
    """The answers at the beginning of the page."""
    with reader.streaming(path, on_demand=True) as stored:
        found = [(name, data) for name, data in stored if not name.startswith("compare/")]
        return findings.findings(reader.by_checkpoint(found), Path(path))
