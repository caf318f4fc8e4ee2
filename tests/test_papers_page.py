"""What docs/papers.md names exists: commands, their options, figures and files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from landscape.cli.main import app
from landscape.plots import FIGURES

PATH = Path(__file__).parent.parent / "docs" / "papers.md"
PAGE = PATH.read_text()
COMMANDS = sorted({span for span in re.findall(r"`([^`]+)`", PAGE) if span.startswith("landscape ")})


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_exists_with_its_options(command: str) -> None:
    group: Any = typer.main.get_command(app)
    with group.make_context("landscape", ["--help"], resilient_parsing=True) as context:
        _, found, arguments = group.resolve_command(context, shlex.split(command)[1:])
    options = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert [one for one in arguments if one.startswith("--") and one not in options] == []


def test_every_figure_of_the_page_exists() -> None:
    lists = re.findall(r"figures? ((?:`\w+`(?:, | and )?)+)", PAGE)
    named = {name for words in lists for name in re.findall(r"`(\w+)`", words)}
    assert len(named) > 5
    assert sorted(named - FIGURES.keys()) == []


def test_every_row_has_four_columns_and_every_linked_file_exists() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert {row.replace(r"\|", "").count("|") for row in rows} == {5}
    assert [link for link in re.findall(r"\]\(([\w./]+)\)", PAGE) if not (PATH.parent / link).exists()] == []
