"""Protection from damaged results files, on which the HDF5 library itself may crash."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path


def check_not_damaged(file: Path) -> None:
    """Read a results file in a child process first, so that a crash of HDF5 becomes an error message.

    Skipped if torch is loaded or other threads run, because a forked child would lose them.

    Raises:
        ValueError: the child crashed.
    """
    if not file.is_file() or "torch" in sys.modules or threading.active_count() > 1:
        return
    from landscape.results import reader

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):  # the parent will meet the same error and report it
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            reader.groups(file)
        os._exit(0)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        raise ValueError(f"{file} is damaged (HDF5 crashes on it); save what is intact with: landscape repair {file}")
