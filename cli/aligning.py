"""The option `--save` of `landscape align`: the permuted checkpoint as a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landscape.cli.command_options import OWN, option
from landscape.options import OptionError
from landscape.progress import say

if TYPE_CHECKING:
    from landscape.subject.subject import Subject

SAVE = option(Path | None, "write the permuted other checkpoint to this file", None, OWN)


def saving(path: Path | None, loading: Mapping[str, Any], *, quiet: bool) -> Callable[[Any, Subject], None] | None:
    """What writes the permuted checkpoint after the measurement; None where it is not asked for.

    Raises:
        OptionError: no checkpoint can be written there, or the network is none that one could be loaded into.
    """
    if path is None:
        return None
    if path.is_dir():
        raise OptionError(f"--save must be a file, got the folder {path}; for example {path / 'aligned.pt'}")
    if loading.get("adapter") == "separate":
        raise OptionError("--save writes a whole network; drop --adapter separate, and the merged one is aligned")
    return partial(save_aligned, path=path, quiet=quiet)


def save_aligned(probe: Any, subject: Subject, path: Path, *, quiet: bool) -> None:
    """Write the checkpoint that a probe has permuted."""
    from landscape.probes.align import alignment_of
    from landscape.weight_space.aligned_networks import write_aligned

    found = alignment_of(probe, subject)
    write_aligned(found, path)
    say(f"align: {path} holds {found.other.path} with its units permuted", quiet=quiet)
