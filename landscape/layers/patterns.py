r"""What `--layers` says: REGEX[:KIND[:ROWSxCOLUMNS[+PREFIX]]], or a TOML file of such entries.

[layers]
'^stem$' = ""                                             # the kind that is found
'blocks\.\d+$' = "mlp"
'encoder$' = { kind = "msa", grid = [14, 14], prefix = 1 }  # for tokens that no grid of the model explains
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from landscape.options import OptionError

KINDS = ("stem", "conv", "msa", "mlp", "subsample", "head", "other")
_GRID = re.compile(r"(\d+)x(\d+)(?:\+(\d+))?")
_ENTRIES = {"kind", "grid", "prefix"}


@dataclass(frozen=True)
class Pattern:
    """One entry.

    Args:
        expression: searched for in the names of modules.
        kind: in place of the kind that is found; "" for that.
        grid: (rows, columns) of tokens; (0, 0) for the grid that is found.
        prefix: tokens before those of the grid.
    """

    expression: str
    kind: str = ""
    grid: tuple[int, int] = (0, 0)
    prefix: int = 0

    def __str__(self) -> str:
        grid = f":{self.grid[0]}x{self.grid[1]}+{self.prefix}" if any(self.grid) else ""
        return f"{self.expression}:{self.kind}{grid}" if self.kind or grid else self.expression


def parsed(text: str) -> Pattern:
    """One entry as it is written on the command line.

    Raises:
        OptionError: it is no regular expression, or names a grid without positions.
    """
    head, _, last = text.rpartition(":")
    grid, prefix = (0, 0), 0
    if head and (found := _GRID.fullmatch(last)):
        grid, prefix = (int(found[1]), int(found[2])), int(found[3] or 0)
        if not all(grid):
            raise OptionError(f"--layers {text} names a grid without positions; ask for ROWSxCOLUMNS")
        text, (head, _, last) = head, head.rpartition(":")
    expression, kind = (head, last) if head and last in (*KINDS, "") else (text, "")
    try:
        re.compile(expression)
    except re.error as error:
        raise OptionError(f"--layers {text} is no regular expression ({error})") from None
    return Pattern(expression, kind, grid, prefix)


def expanded(patterns: Iterable[str]) -> tuple[str, ...]:
    """Patterns with the entries of TOML files in the files' place, so that what is asked does not depend on a file.

    Raises:
        OptionError: as `parsed`.
        FileNotFoundError, ValueError: a file is not there, or is none of these files; see the message.
    """
    found: list[str] = []
    for text in patterns:
        found += [str(pattern) for pattern in _entries(Path(text))] if text.endswith(".toml") else [text]
    for text in found:
        parsed(text)
    return tuple(found)


def _entries(path: Path) -> Iterator[Pattern]:
    if not path.is_file():
        raise FileNotFoundError(f"--layers {path}: there is no such file; give a TOML file with a table [layers]")
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--layers {path} is no TOML file ({error})") from None
    table = content.get("layers")
    if not isinstance(table, dict) or not table:
        raise ValueError(f"--layers {path} has no table [layers]; expected lines such as 'blocks' = \"mlp\" in it")
    for expression, said in table.items():
        yield _entry(path, expression, said)


def _entry(path: Path, expression: str, said: Any) -> Pattern:
    values = {"kind": said} if isinstance(said, str) else said
    if not isinstance(values, dict) or not set(values) <= _ENTRIES:
        raise ValueError(
            f"--layers {path}: {expression!r} = {said!r}; expected a kind, or a table of {', '.join(sorted(_ENTRIES))}"
        )
    kind, grid, prefix = values.get("kind", ""), values.get("grid", (0, 0)), values.get("prefix", 0)
    if kind not in (*KINDS, ""):
        raise ValueError(f"--layers {path}: {expression!r} has the kind {kind!r}; kinds are {', '.join(KINDS)}")
    sides = isinstance(grid, list | tuple) and len(grid) == 2 and all(isinstance(side, int) for side in grid)
    if not sides or ("grid" in values and min(grid) < 1) or not isinstance(prefix, int) or prefix < 0:
        raise ValueError(
            f"--layers {path}: {expression!r} has grid {grid!r} and prefix {prefix!r}; "
            "expected [ROWS, COLUMNS] and a number of tokens"
        )
    return Pattern(expression, kind, (grid[0], grid[1]), prefix)
