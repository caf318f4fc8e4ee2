"""Write the commands that measured a result and drew a figure, from what the file stores."""

import shlex
from pathlib import Path

import xarray as xr

from landscape.results.command_line import command_for


def measured(data: xr.Dataset, out: Path) -> str:
    """The command that measures a result again; "" where no command does, as of objects in memory or an import.

    Options with their default values are left out, and so is `--hvp`: the run chooses the fastest again.
    """
    return command_for(data.attrs, out, hvp=None)


def drawn(out: Path) -> str:
    """The command that draws all figures of a file."""
    return shlex.join(["landscape", "plot", str(out)])
