"""The command `compare`: networks, or groups of them over seeds, by headline numbers with errors and verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from landscape.cli import command_options, damaged_files
from landscape.options import OptionError, alternatives, counted
from landscape.reporting.progress import say

if TYPE_CHECKING:
    from landscape.plots.comparison.comparison import Comparison

Option = typer.Option
LARGE = 2**30  # bytes of a file that is not copied in memory for a table
SUFFIXES = {".md": "markdown", ".csv": "csv", ".tex": "latex", ".json": "json"}
Rows = Annotated[
    str,
    Option(
        help="only the numbers of these probes, or these numbers: hessian,trace/trace; p values remain corrected for "
        "all numbers that were tested"
    ),
]
Store = Annotated[
    bool,
    Option(
        help="store the comparison in the (first) results file, where plot and report find it; not with --only, --rows"
    ),
]


def compare(
    file: Annotated[list[Path] | None, typer.Argument(help="results files; default: results.h5")] = None,
    group: Annotated[
        list[str] | None,
        Option(
            help=r"groups over seeds: a regular expression whose match is the part that tells seeds apart, such as "
            r"'-s\d+$' (or whose capture group names the group), or patterns: sgd=sgd-*,adam=adam-* or "
            "optimizer=sgd:sgd-*,adam:adam-*"
        ),
    ] = None,
    against: Annotated[
        str, Option(help="network or group that all others are compared with; default: every pair of up to four")
    ] = "",
    only: Annotated[list[str], Option(help="only the checkpoint of this label (* is anything); repeatable")] = [],  # noqa: B006
    rows: Rows = "",
    columns: Annotated[int, Option(min=1, max=2, help="width of a LaTeX table, in columns of a two-column paper")] = 2,
    format: Annotated[
        str, Option(help="text, markdown, csv, latex or json; default: by the ending of --out, else text")
    ] = "",
    out: Annotated[Path | None, Option(help="write the tables to this file; default: print them")] = None,
    figures: Annotated[Path | None, Option(help="folder for the figure; landscape plot draws it too")] = None,
    store: Store = True,
    quiet: command_options.Quiet = False,
    debug: command_options.Debug = False,
) -> None:
    """Compare networks, or groups over seeds: numbers with errors, paired differences, effect sizes and verdicts.

    Reads what probes measured. Numbers of different protocols (split, samples, batch size, parameters) are never
    compared. A difference is real where p, after Holm's correction, is below 0.05.
    """
    from landscape.plots import drawing
    from landscape.plots.comparison import text as comparison_text
    from landscape.plots.comparison.text import compare as compared
    from landscape.results.replacing import check_place, write_text

    known = tuple(comparison_text.FORMATS)
    kind = format or (SUFFIXES.get(out.suffix.lower(), "text") if out else "text")
    if kind not in known:
        raise OptionError(f"--format {kind} is unknown; expected {alternatives(known)}")
    if out is not None:
        check_place(out, "tables", "comparison.md")
    files = file or [Path("results.h5")]
    for path in files:
        damaged_files.check_not_damaged(path)
    numbers = tuple(name.strip() for name in rows.split(",") if name.strip())
    found = compared(*files, group=group or (), against=against, only=only, rows=numbers)
    text = comparison_text.as_latex(found, columns) if kind == "latex" else comparison_text.FORMATS[kind](found)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
        say(f"compared {counted(len(found.networks), 'network')} in {out}", quiet=quiet)
    if store and not only and not numbers:
        _store(files[0], found, quiet=quiet)
    if figures is not None:
        for path in drawing.draw_comparison(found, figures):
            say(str(path), quiet=quiet)


def _store(path: Path, found: Comparison, *, quiet: bool) -> None:
    """Store the comparison; a file that cannot be changed is left as it is, with a note."""
    from landscape.plots.comparison import rows as comparison_rows

    if path.stat().st_size > LARGE:  # every change of a results file copies it in memory
        say(f"note: not stored in {path}, which is larger than 1 GiB; --out writes the tables", quiet=quiet)
        return
    try:
        group = comparison_rows.store(path, found)
    except OSError as error:
        say(f"note: not stored in {path} ({error.strerror or error}); --no-store does not try", quiet=quiet)
    else:
        say(f"stored as {group} in {path}; landscape plot {path} draws it", quiet=quiet)
