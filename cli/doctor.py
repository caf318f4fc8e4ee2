"""The command `doctor`: what is wrong or suspicious with the numbers of results files, and what to do about it."""

from __future__ import annotations

import json as encoding
import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.cli.command_options import Debug
from landscape.cli.damaged_files import in_child
from landscape.options import counted, listed, printable

if TYPE_CHECKING:
    from landscape.doctor.finding import Finding

QUICK = 2**24  # bytes of a file that is examined for a suggestion
FINDINGS = 3  # exit code where something is wrong or suspicious; 1 and 2 are errors of the command itself


def doctor(
    files: Annotated[list[Path] | None, typer.Argument(help="results files, examined together")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON: a list of findings")] = False,
    debug: Debug = False,
) -> int:
    """Say what is wrong or suspicious with stored numbers, and what to do about it.

    The exit code is 0 if nothing or only notes were found, 3 if something is suspicious or wrong.
    """
    from landscape.cli.process_setup import importing
    from landscape.doctor.rules import examine
    from landscape.plots.comparison.rows import outdated

    files = files or [Path("results.h5")]

    def reduce_of(*of: Any) -> Any:  # which imports torch, where a result was changed
        with importing():
            from landscape.running import run
        return run.reduce_of(*of)

    def examined() -> list[Finding]:
        return examine(files, reduce_of, outdated)

    findings = in_child(examined, files)
    if json:
        typer.echo(encoding.dumps([{**asdict(finding), "figure": figure_of(finding)} for finding in findings]))
    for finding in () if json else findings:
        about = listed(finding.groups, 1)
        typer.echo(printable(f"{finding.severity} ({finding.rule}), {about}: {finding.text}"))
        typer.echo(f"  {printable(finding.remedy)}")
        if figure := figure_of(finding):
            typer.echo(f"  look at: {shlex.join(['landscape', 'plot', finding.file, '--figure', figure])}")
    counts = Counter(finding.severity for finding in findings)
    if not json:
        said = ", ".join(f"{counts[severity]} {severity}" for severity in ("wrong", "suspicious") if counts[severity])
        notes = counted(counts["note"], "note") if counts["note"] else ""
        typer.echo(", ".join(filter(None, [said or "nothing wrong or suspicious found", notes])))
    return FINDINGS if counts["wrong"] + counts["suspicious"] else 0


def figure_of(finding: Finding) -> str:
    """The name of the figure that shows the numbers of a finding; "" where none does."""
    from landscape.plots import FIGURES, STUDIES

    probe = finding.groups[0].partition("/")[0] if finding.groups else ""
    return next((name for name, figure in FIGURES.items() if figure.probe == probe), probe * (probe in STUDIES))


def suggestion(file: Path) -> str:
    """One line that leads to the doctor where it names something wrong or suspicious in a file; "" where not.

    A large file is not examined for it.
    """
    command = shlex.join(["landscape", "doctor", str(file)])
    unknown = f"to check these numbers: {command}"
    if file.stat().st_size > QUICK:
        return unknown
    from landscape.doctor.rules import examine

    try:
        counts = Counter(finding.severity for finding in examine([file]))
    except (OSError, ValueError):  # it is unreadable in part; the doctor says where
        return unknown
    said = " and ".join(f"{counts[word]} {word}" for word in ("wrong", "suspicious") if counts[word])
    return f"{said}: {command} says what, and what to do" if said else ""
