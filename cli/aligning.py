"""The option `--save` of `landscape align`: the permuted checkpoint as a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from landscape.cli.command_options import OWN, option
from landscape.progress import say

if TYPE_CHECKING:
    from landscape.subject.subject import Subject

SAVE = option(Path | None, "write the permuted other checkpoint to this file", None, OWN)


def save_aligned(probe: Any, subject: Subject, path: Path, *, quiet: bool) -> None:
    """Write the checkpoint that a probe has permuted."""
    from landscape.probes.align import alignment_of
    from landscape.weight_space.aligned_networks import write_aligned

    found = alignment_of(probe, subject)
    write_aligned(found, path)
    say(f"align: {path} holds {found.other.path} with its units permuted", quiet=quiet)
