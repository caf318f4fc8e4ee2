"""The option `--save`: the network that a probe makes, as a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landscape.cli.command_options import OWN, option
from landscape.options import OptionError
from landscape.progress import say

if TYPE_CHECKING:
    from landscape.subject.subject import Subject

SAVE = option(Path | None, "write the permuted other checkpoint to this file", None, OWN)


def saving(path: Path | None, loading: Mapping[str, Any], *, quiet: bool) -> Callable[[Any, Subject], None] | None:
    """What writes the checkpoint after the measurement; None where it is not asked for.

    Raises:
        OptionError: no checkpoint can be written there, or the network is none that one could be loaded into.
    """
    if path is None:
        return None
    if path.is_dir():
        raise OptionError(f"--save must be a file, got the folder {path}; for example {path / 'aligned.pt'}")
    if loading.get("adapter") == "separate":
        raise OptionError("--save writes a whole network; drop --adapter separate, and the merged one is aligned")

    def save(probe: Any, subject: Subject) -> None:
        say(f"{probe.name}: {path} holds {probe.save(subject, path)}", quiet=quiet)

    return save
