"""Load the checkpoint that a command names, and print what was loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.probe import Probe
from landscape.reporting.progress import say

if TYPE_CHECKING:
    from landscape.checkpoints.checkpoint import Checkpoint
    from landscape.subject.subject import Subject

# The argument of a command that takes one checkpoint.
CHECKPOINT = (
    Annotated[Path | None, typer.Argument(help="checkpoint, or run folder; default: the newest under ./checkpoints")],
    None,
)


def several_checkpoints(what: str = Probe.checkpoints) -> tuple[Any, None]:
    """The argument of a command that takes any number of checkpoints; `what`: what it does with them."""
    help = f"{what}; default: the newest final.pt under ./checkpoints"
    return Annotated[list[Path] | None, typer.Argument(help=help)], None


def load(path: Path | None, values: dict[str, Any], *, label: str = "", quiet: bool) -> Subject:
    """Load a subject and print it, with loss and accuracy on a few samples as a sanity check.

    Raises:
        FileNotFoundError, ValueError: as `landscape.load`; the model's outputs are not finite.
    """
    from landscape.models.providers import AS_BUILT
    from landscape.running.memory_limit import with_smaller_mini_batches
    from landscape.subject.loading import checks, identity, sanity_check
    from landscape.subject.loading import load as loading

    subject = loading.load(path, label=label, **values)
    stored = subject.checkpoint
    about = f"{subject.size / 1e6:.3g} M parameters"
    protocol = f"{identity.protocol(subject)}; {subject.device}"
    if reason := checks.why_no_loss(subject):
        source = f"{stored.path} ({stored.taken})" if stored is not None else identity.origin(subject)
        say(protocol, quiet=quiet)
        say(f"{subject.label}: {source}, {about}; {reason}", quiet=quiet)
        return subject
    found = with_smaller_mini_batches(subject, sanity_check.check_sanity)
    if stored is not None:
        source = f"{stored.path} ({stored.taken}){_age(stored)}"
        warning = sanity_check.warning(found, initial=stored.initial, own=stored.metrics.get("accuracy"))
    elif identity.origin(subject) != AS_BUILT:
        source, warning = identity.origin(subject), sanity_check.warning(found)
    else:  # a callable may bring trained weights of its own
        source, warning = "freshly initialised" if found.at_chance else f"no checkpoint, weights {AS_BUILT}", ""
    accuracy = f", accuracy {found.accuracy:.4f}" if math.isfinite(found.accuracy) else ""
    some = f" on {found.samples} samples" if found.samples < len(subject) else ""
    loss = f"loss {found.loss:.4f}{accuracy}{some}"
    say(protocol, quiet=quiet)
    say(f"{subject.label}: {source}, {about}; {loss}", quiet=quiet)
    if warning:
        say(warning, quiet=quiet)
    return subject


def _age(stored: Checkpoint) -> str:
    if stored.initial is None:
        return ", epoch 0: initial weights, or those after a first epoch counted as 0"
    return (", initial weights" + ("" if stored.native else " by its name")) if stored.initial else ""
