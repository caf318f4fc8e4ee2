r"""Parse `--layers`: REGEX[:KIND[:ROWSxCOLUMNS[+PREFIX]]], or a TOML file of such entries.

A layer is the output of the module. With the kind `stream` it is the discovered layer of that name instead: the
residual stream after the module, where the module is a branch.

[layers]
'^stem$' = ""              # keep the kind that discovery finds
'blocks\.\d+$' = "mlp"
'encoder$' = "msa:14x14+1"  # for tokens whose grid discovery cannot find
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from landscape.discovery.layer import KINDS, Grid
from landscape.options import OptionError
from landscape.results.declared_size import toml_of

LayerPatterns = Annotated[
    tuple[str, ...],
    "modules to measure instead of the discovered layers: REGEX[:KIND] or file.toml; kind stream: discovered layers",
]
_GRID = re.compile(r"(\d+)x(\d+)(?:\+(\d+))?")
STREAM = "stream"  # in place of a kind: the discovered layer of that name


@dataclass(frozen=True)
class Pattern:
    """One entry of `--layers`."""

    expression: str  # regular expression, searched for in module names
    kind: str = ""  # replaces the kind that discovery finds; "" keeps it, `STREAM` the whole discovered layer
    grid: Grid = (0, 0)  # (rows, columns) of tokens, replaces the grid that discovery finds; (0, 0) keeps it
    prefix: int = 0  # tokens before those of the grid

    def __str__(self) -> str:
        grid = f":{self.grid[0]}x{self.grid[1]}+{self.prefix}" if any(self.grid) else ""
        return f"{self.expression}:{self.kind}{grid}" if self.kind or grid else self.expression


def parse(text: str) -> Pattern:
    """Parse one entry as written on the command line.

    Raises:
        OptionError: the regular expression is invalid, or the grid has no positions.
    """
    head, _, last = text.rpartition(":")
    grid, prefix = (0, 0), 0
    if head and (match := _GRID.fullmatch(last)):
        grid, prefix = (int(match[1]), int(match[2])), int(match[3] or 0)
        if not all(grid):
            raise OptionError(f"--layers {text} has a grid without positions; expected ROWSxCOLUMNS, both at least 1")
        text, (head, _, last) = head, head.rpartition(":")
    expression, kind = (head, last) if head and last in (*KINDS, STREAM, "") else (text, "")
    try:
        re.compile(expression)
    except re.error as error:
        raise OptionError(f"--layers {text} is not a regular expression ({error})") from None
    return Pattern(expression, kind, grid, prefix)


def expand(patterns: Iterable[str]) -> tuple[str, ...]:
    """Replace each TOML file by its entries, so that a result is identified by the entries and not by a file name.

    Raises:
        OptionError: as `parse`.
        FileNotFoundError, ValueError: a file is missing or has other content; see the message.
    """
    expanded: list[str] = []
    for text in patterns:
        expanded += _entries(Path(text)) if text.endswith(".toml") else [text]
    for text in expanded:
        parse(text)
    return tuple(expanded)


def _entries(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise FileNotFoundError(f"--layers {path} does not exist; give a TOML file with a table [layers]")
    try:
        content = toml_of(path)
    except ValueError as error:
        raise ValueError(f"--layers {path}: {error}") from None
    table = content.get("layers")
    if not isinstance(table, dict) or not table:
        raise ValueError(f"--layers {path} has no table [layers]; expected lines such as 'blocks' = \"mlp\" in it")
    for expression, value in table.items():
        text = f"{expression}:{value}" if value else expression
        if not isinstance(value, str) or parse(text).expression != expression:
            raise ValueError(
                f"--layers {path}: {expression!r} = {value!r}, expected KIND[:ROWSxCOLUMNS[+PREFIX]]; kinds are "
                f"{', '.join((*KINDS, STREAM))}"
            )
        yield text
