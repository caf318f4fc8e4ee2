"""Make straight lines in weight space: random, of Hessian eigenvectors, between checkpoints, of a run, from a file."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from torch import Tensor

from landscape.checkpoints import file_names, raw_files
from landscape.checkpoints.checkpoint import state_dict_sha256
from landscape.checkpoints.state_dict_loading import with_model_keys
from landscape.options import OptionError
from landscape.products.vectors import inner
from landscape.subject import batchnorm, other_networks
from landscape.subject.subject import Subject
from landscape.weight_space import planes, weight_differences
from landscape.weight_space.directions import Normalize, Span, length_units, random_direction
from landscape.weight_space.weight_differences import principal_axes
from landscape.weight_space.weight_uses import weight_uses
from landscape.weight_space.weights_in_place import FROZEN, RunningStatistics, WeightsInPlace

Kind = Literal["random", "eigen", "checkpoints", "run", "file"]


@dataclass(frozen=True, eq=False)
class StraightLine:
    """The line w0 + t d."""

    kind: Kind  # where d comes from
    name: str  # long name of d
    direction: Mapping[str, Tensor]  # name -> tensor of the parameters that move
    units: str  # what t = 1 means
    span: Span = (-1.0, 1.0)  # default range of t
    identity: Any = None  # what the line depends on beyond the subject's weights and data
    filters: str = ""  # of a random direction, those that are not slices along dim 0, in words
    # parameters and floating-point buffers of the other checkpoint, on a line between two
    end: Mapping[str, Tensor] | None = None
    # of a curve (1 - t)^2 w0 + 2 t (1 - t) c + t^2 w1 to another checkpoint in place of a line: the point c
    control: Mapping[str, Tensor] | None = None

    @property
    def norm(self) -> float:
        return float(inner(self.direction.values(), self.direction.values()) ** 0.5)


class ModelOnLine(contextlib.AbstractContextManager["ModelOnLine"]):
    """The model at points of a line; a context manager that restores it bit for bit.

    At t = 1 of a line to another checkpoint the weights are that checkpoint's, bit for bit. Beyond either end
    interpolated buffers stay those of the end: an extrapolated variance may turn negative.
    """

    def __init__(self, subject: Subject, line: StraightLine, statistics: RunningStatistics = FROZEN) -> None:
        self._subject, self._statistics, self._ends = subject, statistics, line.end is not None
        parameters: dict[str, Tensor] = dict(subject.model.named_parameters())
        buffers: dict[str, Tensor] = dict(subject.model.named_buffers())
        end = line.direction if line.end is None else line.end
        self._target = {name: tensor.to(parameters[name].data) for name, tensor in end.items() if name in parameters}
        self._buffers: dict[str, Tensor] = {}
        if self._ends and statistics.interpolate:
            self._buffers = {name: tensor.to(buffers[name].data) for name, tensor in end.items() if name in buffers}
        self._control = line.control
        self._weights = WeightsInPlace(subject, [*self._target, *self._buffers])

    def __exit__(self, *error: object) -> None:
        self._weights.restore()

    def move_to(self, t: float) -> None:
        with self._subject.evaluating():
            if self._ends:
                if self._control is None:
                    self._weights.interpolate(self._target, t)
                else:
                    self._weights.interpolate(self._control, 2 * t * (1 - t), self._target, t * t)
                self._weights.interpolate(self._buffers, min(max(t, 0.0), 1.0))
            else:
                self._weights.translate((self._target, t))
            if self._statistics.recalibrate:
                batchnorm.refresh(self._subject, self._statistics.recalibrate)


def lines_of(
    subject: Subject, along: str, *, normalize: Normalize, ignore: str, seed: int, count: int
) -> list[StraightLine]:
    """The lines that `--along` names: `random`, `eigen`, checkpoints `B.pt,C.pt`, a run's folder, a file of directions.

    The subject's weights are at t = 0. The seed of the first random direction is counted up; `count` is the number of
    random directions, or of principal components of a run.

    Raises:
        FileNotFoundError, ValueError: there is no such line for this subject.
        OptionError: a count where `along` determines the number of lines.
    """
    weights = {name: p.detach() for name, p in subject.parameters.items()}
    if any(part in subject.origin.others for part in along.split(",")):
        return [_towards(subject, Path(part)) for part in along.split(",")]
    if along == "random":
        uses, units, lines = weight_uses(subject, normalize, ignore), length_units(normalize), []
        for k in range(seed, seed + count):
            direction = random_direction(
                uses.movable(weights), seed=k, axis=0, normalize=normalize, ignore=ignore, filters=uses.filters
            )
            name, identity = f"random direction, seed {k}", uses.identity
            lines.append(StraightLine("random", name, direction, units, identity=identity, filters=uses.words))
        return lines
    if along == "eigen":
        plane = planes.plane_of(subject, "eigen", normalize=normalize, ignore=ignore, seed=seed)
        axes = zip(plane.names, plane.directions, plane.spans, strict=True)
        return [StraightLine("eigen", n, d, plane.units, span, "eigen") for n, d, span in axes][::-1]  # largest first
    if Path(along).is_dir() and not raw_files.holds_weights(Path(along)):
        return _principal_components(subject, Path(along), weights, count)
    if count > 1:
        fixed = f"--along {along}, which determines the number"
        raise OptionError(f"--directions {count} cannot be combined with {fixed}; drop it")
    if Path(along).is_file() and h5py.is_hdf5(along):
        return _lines_of_file(subject, Path(along))
    paths = [Path(part) for part in along.split(",")]
    if not any(path.exists() for path in paths) and not along.lower().endswith(file_names.SUFFIXES):
        known = "random, eigen, a checkpoint B.pt, a run's folder or a file of directions"
        raise ValueError(f"--along must be {known}, got {along}")
    return [_towards(subject, path) for path in paths]


def _lines_of_file(subject: Subject, path: Path) -> list[StraightLine]:
    return [
        StraightLine("file", f"{axis}direction of {path.name}", d, "direction", identity=state_dict_sha256(d))
        for axis, d in zip("xy", planes.directions_in(subject, path), strict=False)
    ]


def _towards(subject: Subject, path: Path) -> StraightLine:
    """The line to another checkpoint of the same model at t = 1; it also moves weights that are not trainable."""
    other, own = other_networks.read_beside(subject, path), subject.model.state_dict()
    # Raises for the first weight that does not fit.
    weight_differences.tensors_like(other, {name: own[name] for name in subject.parameters})
    name = str(path) if str(path) in subject.origin.others else file_names.label_of(other.path)
    line = line_to(subject, with_model_keys(other.state_dict, set(own)), name, state_dict_sha256(other.state_dict))
    if not any(bool(change.any()) for change in line.direction.values()):
        raise ValueError(f"{path} holds the same weights as the checkpoint; a line needs two different ones")
    return line


def line_to(subject: Subject, state: Mapping[str, Tensor], name: str, identity: Any) -> StraightLine:
    """The line to other weights of the subject's model, under its names, at t = 1."""
    own = subject.model.state_dict()
    end = {n: state[n].to(tensor) for n, tensor in own.items() if n in state and tensor.is_floating_point()}
    difference = {name: end[name] - own[name] for name, _ in subject.model.named_parameters() if name in end}
    return StraightLine(
        "checkpoints", f"towards {name}", difference, "share of the way", (0.0, 1.0), identity=identity, end=end
    )


def _principal_components(subject: Subject, run: Path, weights: Mapping[str, Tensor], count: int) -> list[StraightLine]:
    """Lines through the present weights along the principal components of a run's trajectory."""
    found = other_networks.run_of(subject, run)
    axes = principal_axes(weight_differences.gram(found, weights), count)
    rank = int(axes.coefficients.any(axis=1).sum())
    if rank < count:
        got = f"the {len(found)} snapshots of {run} have {rank} principal components"
        raise ValueError(f"{got}; give --directions {rank}")
    low, high = np.minimum(axes.coordinates.min(axis=1), 0.0), np.maximum(axes.coordinates.max(axis=1), 0.0)
    margin = 0.25 * (high - low).max()
    span = float(low.min() - margin), float(high.max() + margin)
    directions = weight_differences.combined(found, weights, axes.coefficients)
    return [
        StraightLine("run", name, direction, "weight", span, [snapshot.sha256 for snapshot in found])
        for name, direction in zip(axes.names, directions, strict=True)
    ]
