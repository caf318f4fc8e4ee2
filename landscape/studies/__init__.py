"""Studies: questions about several networks, from what is measured of them to the table and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """What a command measures at once: a probe with its parameters, of networks that are loaded in one way."""

    probe: str  # or "features", which measures several
    parameters: Mapping[str, Any]
    loading: Mapping[str, Any]
    paths: Sequence[Path | None] = ()
    words: str = ""  # that say what is measured
