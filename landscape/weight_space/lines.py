"""Lines through weight space, and the model placed along them, in place and put back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import h5py
import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints import checkpoint as checkpoints
from landscape.checkpoints import file_formats, snapshots
from landscape.curvature.vectors import inner
from landscape.options import OptionError
from landscape.subject import batchnorm
from landscape.subject.subject import Subject
from landscape.weight_space import weight_differences
from landscape.weight_space.coordinates import Span
from landscape.weight_space.directions import Normalize, random_direction
from landscape.weight_space.planes import directions_in, plane_of
from landscape.weight_space.principal_axes import principal

Kind = Literal["random", "eigen", "checkpoints", "run", "file"]


@dataclass(frozen=True, eq=False)
class Section:
    """w0 + t d.

    Args:
        kind: where d comes from.
        name: long name of d.
        direction: name -> tensor of the parameters that move.
        units: what t = 1 means.
        span: the range of t that shows what the line is about.
        identity: what the line depends on beyond the subject's weights and data.
        end: of a line to another checkpoint, its parameters and floating-point buffers.
    """

    kind: Kind
    name: str
    direction: Mapping[str, Tensor]
    units: str
    span: Span = (-1.0, 1.0)
    identity: Any = None
    end: Mapping[str, Tensor] | None = None

    @property
    def norm(self) -> float:
        """Length of the direction."""
        return float(inner(self.direction.values(), self.direction.values()) ** 0.5)


def sections_of(
    subject: Subject, along: str, *, normalize: Normalize, ignore: str, seed: int, count: int
) -> list[Section]:
    """The lines that a word names: `random`, `eigen`, other checkpoints `B.pt,C.pt`, a run's folder, directions.

    Args:
        subject: at whose weights t = 0.
        along: the word.
        normalize: length of random directions.
        ignore: regular expression of parameters that no random direction moves.
        seed: of the first random direction, counted up.
        count: random directions, or principal components of a run.

    Raises:
        FileNotFoundError, ValueError: there is no such line for this subject.
        OptionError: a count beside a word that says how many.
    """
    weights = {name: p.detach() for name, p in subject.parameters.items()}
    if along == "random":
        units = {"none": "weight", "park2022": "norm of the weights along dim 0"}.get(normalize, f"{normalize} norm")
        found = []
        for k in range(count):
            direction = random_direction(weights, seed=seed + k, axis=0, normalize=normalize, ignore=ignore)
            if not direction:
                raise ValueError("no parameter with at least two dimensions is left to move; relax --ignore")
            found.append(Section("random", f"random direction, seed {seed + k}", direction, units, identity="random"))
        return found
    if along == "eigen":
        plane = plane_of(subject, "eigen", normalize=normalize, ignore=ignore, seed=seed)
        return [
            Section("eigen", name, direction, plane.units, span, identity="eigen")
            for name, direction, span in list(zip(plane.names, plane.directions, plane.spans, strict=True))[::-1]
        ]  # the largest first
    if Path(along).is_dir() and not file_formats.holds_weights(Path(along)):
        return _components(Path(along), weights, count)
    if count > 1:
        raise OptionError(f"--directions {count} has no meaning beside --along {along}, which says how many; drop it")
    if Path(along).is_file() and h5py.is_hdf5(along):
        directions = zip("xy", directions_in(subject, Path(along)), strict=False)
        return [
            Section("file", f"{axis}direction of {Path(along).name}", direction, "direction",
                    identity=checkpoints.weights_sha256(direction))
            for axis, direction in directions
        ]  # fmt: skip
    paths = [Path(part) for part in along.split(",")]
    if not any(path.exists() for path in paths) and not any(path.suffix in snapshots.SUFFIXES for path in paths):
        raise ValueError(f"--along {along} is neither random, eigen, a checkpoint B.pt, a run's folder nor directions")
    return [_towards(subject, path) for path in paths]


class Along:
    """The model at points of a section; a context manager that leaves it as it found it.

    At t = 1 of a line to another checkpoint the weights are that checkpoint's, bit for bit. Beyond either end
    interpolated buffers stay those of the end: an extrapolated variance may turn negative.

    Args:
        subject: whose model is moved.
        section: where to.
        interpolate: move the floating-point buffers (batch norm's statistics) to the other checkpoint's too.
        recalibrate: mini-batches that refresh batch norm's statistics at every point; 0 keeps them.
    """

    def __init__(self, subject: Subject, section: Section, *, interpolate: bool = False, recalibrate: int = 0) -> None:
        self._subject, self._recalibrate = subject, recalibrate
        live: dict[str, Tensor] = dict(subject.model.named_parameters())
        target = section.direction
        if section.end is not None:
            target = {name: tensor for name, tensor in section.end.items() if name in live}
        self._weights = len(target)
        if section.end is not None and interpolate:
            buffers: dict[str, Tensor] = dict(subject.model.named_buffers())
            live |= buffers
            target = {**target, **{name: tensor for name, tensor in section.end.items() if name in buffers}}
        self._live = [live[name].data for name in target]
        self._target = [tensor.to(live[name].data) for name, tensor in target.items()]
        self._straight = section.end is not None
        self._origin = [tensor.clone() for tensor in self._live]
        self._statistics = batchnorm.statistics(subject.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._foreach_copy_(self._live, self._origin)
        batchnorm.restore(self._subject.model, self._statistics)

    def place(self, t: float) -> None:
        """Write the weights of one point into the model."""
        with torch.inference_mode():
            torch._foreach_copy_(self._live, self._origin)
            if self._straight:
                weights, buffers = slice(self._weights), slice(self._weights, None)
                torch._foreach_lerp_(self._live[weights], self._target[weights], t)
                if self._live[buffers]:
                    torch._foreach_lerp_(self._live[buffers], self._target[buffers], min(max(t, 0.0), 1.0))
            else:
                torch._foreach_add_(self._live, self._target, alpha=t)
            if self._recalibrate:
                batchnorm.refresh(self._subject, self._recalibrate)


def _towards(subject: Subject, path: Path) -> Section:
    """The straight line to another checkpoint of the same model, trainable or not, at t = 1."""
    other, own = checkpoints.read(path), subject.model.state_dict()
    weight_differences.difference(
        other, {name: own[name] for name in subject.parameters}
    )  # names the first that does not fit
    found = checkpoints.fitted(other.state_dict, set(own))
    floating = {name: tensor for name, tensor in own.items() if tensor.is_floating_point()}
    end = {name: found[name].to(tensor) for name, tensor in floating.items() if name in found}
    names = [name for name, _ in subject.model.named_parameters()]
    difference = {name: end[name] - own[name] for name in names if name in end}
    if not any(bool(change.any()) for change in difference.values()):
        raise ValueError(f"{path} holds the weights of the checkpoint itself; a line needs two different ones")
    return Section(
        "checkpoints", f"towards {checkpoints.label_of(path)}", difference, "share of the way", (0.0, 1.0),
        identity=checkpoints.weights_sha256(other.state_dict), end=end,
    )  # fmt: skip


def _components(run: Path, weights: Mapping[str, Tensor], count: int) -> list[Section]:
    """Principal components of a run's path, through the present weights."""
    found = snapshots.of_run(run)
    axes = principal(weight_differences.gram(found, weights), count)
    rank = int(axes.coefficients.any(axis=1).sum())
    if rank < count:
        raise ValueError(
            f"the {len(found)} snapshots of {run} have {rank} principal components; ask for --directions {rank}"
        )
    low = np.minimum(axes.coordinates.min(axis=1), 0.0)
    high = np.maximum(axes.coordinates.max(axis=1), 0.0)
    margin = 0.25 * (high - low).max()
    return [
        Section(
            "run", f"component {k + 1} of the run ({100 * axes.explained[k]:.0f} % of its variance)", direction,
            "weight", (float(low.min() - margin), float(high.max() + margin)), [s.sha256 for s in found],
        )
        for k, direction in enumerate(weight_differences.combined(found, weights, axes.coefficients))
    ]  # fmt: skip
