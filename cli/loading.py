"""Decide which checkpoints a command measures, load them, and print what was loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.options import OptionError, counted
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
    from landscape.running.executor import with_smaller_mini_batches
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
    some = f" on {counted(found.samples, 'sample')}" if found.samples < len(subject) else ""
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


OF_RANDOM_LINES = {"along", "directions", "normalize", "ignore"}  # options that say that random lines are meant


@dataclass(frozen=True)
class Chosen:
    """The checkpoints to measure one after the other, and parameters of the probe that follow from them."""

    paths: Sequence[Path | None]  # None is the newest
    labels: Sequence[str]  # one per path; "" for the default
    parameters: Mapping[str, Any]


def chosen_checkpoints(
    command: str,
    several: str,
    given: Sequence[Path | None],
    parameters: Mapping[str, Any],
    reading: Mapping[str, Any],
    labels: Sequence[str],
    *,
    quiet: bool,
) -> Chosen:
    """The checkpoints that the paths of a command stand for, as `snapshots.what_to_measure` says, and their labels.

    `several` is that of the probe: several files are one run, or two of one architecture the ends of a line, unless an
    option asks for random lines, or the members of one result, or the second is aligned with the first.
    What is decided is printed. `reading`: options of `read_checkpoint`.

    Raises:
        OptionError: the number of labels is not that of the checkpoints.
        FileNotFoundError, ValueError: a path holds no checkpoint, or a folder no run.
    """
    from landscape.checkpoints import snapshots
    from landscape.checkpoints.file_names import labels_of

    named = [path for path in given if path is not None]
    for path in named:  # all of them, before the first is measured for an hour
        if not path.exists():
            raise snapshots.absent(path)
    if several == "run":
        paths, more = _runs(named, parameters, reading)
    else:
        paths, more = [file for path in named for file in snapshots.what_to_measure(path, **reading)], {}
    if several == "ends" and len(paths) > 1:
        between, about = _line_between(paths, parameters, reading)
        say(f"{command}: {about}", quiet=quiet)
        if between:
            paths, more = paths[:1], {"along": str(paths[1])}
            labels = [" to ".join(labels)] if len(labels) == 2 else labels
        elif parameters.get("connect", "straight") != "straight" and "along" not in parameters:
            _refuse_curve(paths)
    if several == "pair" and len(paths) > 1:
        more, labels = _to_align(command, paths, parameters, labels)
        paths = paths[:1]
    if several == "members" and len(paths) > 1:
        further = ",".join(filter(None, [*map(str, paths[1:]), str(parameters.get("members", ""))]))
        say(f"{command}: {len(paths)} checkpoints are its members", quiet=quiet)
        labels = labels or [f"{labels_of(paths[:1])[0]} + {len(paths) - 1}"]
        paths, more = paths[:1], {"members": further}
    count = max(len(paths), 1)
    if labels and len(labels) != count:
        raise OptionError(f"--label must be given once per checkpoint ({count}), got {len(labels)}")
    defaults = labels_of(paths) if len(paths) > 1 else [""]
    return Chosen(paths or [None], labels or defaults, {**parameters, **more})


def expected(several: str, given: Sequence[Path | None], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a command before its checkpoints are read: of two, the second is taken for a line's end."""
    if several == "ends" and len(given) == 2 and not OF_RANDOM_LINES & parameters.keys():
        return {**parameters, "along": str(given[1])}
    return parameters


def _runs(
    named: Sequence[Path], parameters: Mapping[str, Any], reading: Mapping[str, Any]
) -> tuple[list[Path], dict[str, str]]:
    """The last snapshot of each run, and the files of a run that are named one by one."""
    from landscape.checkpoints import raw_files, snapshots
    from landscape.checkpoints.file_names import FINAL

    folders = [path.is_dir() and (not raw_files.holds_weights(path) or len(named) == 1) for path in named]
    if len(named) > 1 and not any(folders) and "run" not in parameters and {path.name for path in named} != {FINAL}:
        return [snapshots.of_run(named, **reading)[-1].path], {"run": ",".join(map(str, named))}
    paths: list[Path] = []
    more: dict[str, str] = {}
    for path, is_folder in zip(named, folders, strict=True):
        has_final = (path / FINAL).exists()
        last = path / FINAL if has_final else snapshots.of_run(path, **reading)[-1].path if is_folder else path
        more |= {"run": str(path)} if last == path and is_folder and "run" not in parameters else {}
        paths.append(last)
    return paths, more


def _to_align(
    command: str, paths: Sequence[Path], parameters: Mapping[str, Any], labels: Sequence[str]
) -> tuple[dict[str, str], Sequence[str]]:
    """The checkpoint that is permuted, as an option; and the label of the two."""
    if len(paths) > 2 or "against" in parameters:
        raise OptionError(
            f"{command} takes two checkpoints, got {len(paths) + ('against' in parameters)}; for all pairs of several: "
            "landscape barriers --align"
        )
    return {"against": str(paths[1])}, [" to ".join(labels)] if len(labels) == 2 else labels


def _line_between(paths: Sequence[Path], parameters: Mapping[str, Any], reading: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether two checkpoints are the ends of a line, and a sentence about it."""
    from landscape.checkpoints.raw_files import holds_adapter
    from landscape.checkpoints.snapshots import same_architecture

    first, second = paths[:2]
    adapters = holds_adapter(first) or holds_adapter(second)  # merged into their base, they are alike
    chosen = OF_RANDOM_LINES & parameters.keys()
    alike = len(paths) == 2 and not chosen and (adapters or same_architecture(first, second, **reading))
    if alike:
        return True, f"from {first} to {second}; --along random measures random lines through each instead"
    kind = "lines" if "along" in chosen else "random lines"
    why = ", whose architectures differ" if len(paths) == 2 and not chosen else ""
    between = "" if why or "along" in chosen else f"; between two of them: landscape line {first} --along {second}"
    return False, f"{kind} through each of {len(paths)} checkpoints{why}{between}"


def _refuse_curve(paths: Sequence[Path]) -> None:
    if len(paths) > 2:
        ends = ",".join(map(str, paths[1:]))
        raise OptionError(
            f"--connect bezier connects two checkpoints, got {len(paths)}; for curves from the first to each of the "
            f"others: landscape line {paths[0]} --along {ends}"
        )
    raise ValueError(
        f"--connect bezier connects two checkpoints of one architecture, and {paths[1]} has another one than {paths[0]}"
    )
