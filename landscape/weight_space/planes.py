"""Planes in weight space: random, of Hessian eigenvectors, through checkpoints, of a run, from a file."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints import checkpoint as checkpoints
from landscape.checkpoints import snapshots
from landscape.curvature.lanczos import lanczos
from landscape.curvature.operator import Curvature, over_all_samples
from landscape.curvature.spectrum import memory
from landscape.curvature.vectors import flat, inner, random_unit, unflat
from landscape.exchange import tomgoldstein
from landscape.options import format_duration
from landscape.subject.subject import Subject
from landscape.weight_space import cost_model, weight_differences
from landscape.weight_space.coordinates import Span
from landscape.weight_space.directions import Normalize, orthogonal_to, random_direction
from landscape.weight_space.principal_axes import principal

_log = logging.getLogger(__name__)
SHARE = 0.02  # of the loss: further out, the loss of trained networks follows its curvature no more


@dataclass(frozen=True, eq=False)
class Plane:
    """w0 + x d1 + y d2.

    Args:
        kind: random, eigen, checkpoints, run or file.
        directions: (d1, d2), each name -> tensor of the parameters that move.
        names: long names of the axes.
        units: what 1 means on both.
        spans: the range of x and y that shows what the plane is about.
        identity: what the plane depends on beyond weights and data.
        model: of the loss around the centre, where it is known: `model_loss`, and `slope_x`, `curvature_x` and those of
            y; the cross term is zero.
        path: coordinates of a run's snapshots, or of the checkpoints that span the plane, (2, snapshots).
        path_names: of these, their epochs or files.
        ends: of a plane through checkpoints, the tensors of the other two that no direction moves and that differ
            (statistics of batch norm, frozen weights), by name; empty where all agree.
    """

    kind: str
    directions: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    names: tuple[str, str]
    units: str
    spans: tuple[Span, Span] = ((-1.0, 1.0), (-1.0, 1.0))
    identity: Any = None
    model: Mapping[str, float] = field(default_factory=dict)
    path: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    path_names: tuple[str, ...] = ()
    ends: tuple[Mapping[str, Tensor], ...] = ({}, {})

    @property
    def norms(self) -> tuple[float, float]:
        """Lengths of the two directions."""
        first, second = (inner(d.values(), d.values()) ** 0.5 for d in self.directions)
        return first, second

    @property
    def cosine(self) -> float:
        """Cosine of the angle between them."""
        first, second = self.directions
        shared = [name for name in first if name in second]
        product = inner([first[n] for n in shared], [second[n] for n in shared])
        lengths = self.norms[0] * self.norms[1]
        return product / lengths if lengths else 0.0


def plane_of(
    subject: Subject, kind: str, *, normalize: Normalize, ignore: str, seed: int, orthogonal: bool = False
) -> Plane:
    """The plane that a word names: `random`, `eigen`, `A.pt,B.pt`, a run's folder or a file of directions.

    Raises:
        FileNotFoundError, ValueError: there is no such plane for this subject.
    """
    weights = {name: p.detach() for name, p in subject.parameters.items()}
    if kind == "random":
        first, second = (
            random_direction(weights, seed=seed, axis=axis, normalize=normalize, ignore=ignore) for axis in (0, 1)
        )
        if not first:
            raise ValueError("no parameter with at least two dimensions is left to move; relax --ignore")
        if orthogonal:
            second = orthogonal_to(first, second)
        units = {"none": "weight", "park2022": "norm of the weights along dim 0"}.get(normalize, f"{normalize} norm")
        return Plane(
            "random",
            (first, second),
            ("first random direction", "second random direction"),
            units,
            identity="random",
        )
    if kind == "eigen":
        return _eigen_plane(subject, seed)
    if "," in kind:
        return _checkpoint_plane(subject, weights, [Path(part) for part in kind.split(",")])
    if Path(kind).is_dir():
        return _run_plane(subject, weights, Path(kind))
    if Path(kind).is_file():
        return _file_plane(subject, Path(kind))
    raise ValueError(
        f"--plane {kind} is neither random, eigen, two checkpoints A.pt,B.pt, a run's folder nor a file of directions"
    )


def _eigen_plane(subject: Subject, seed: int) -> Plane:
    """Unit eigenvectors of the smallest and the largest Hessian eigenvalue of the loss over all samples."""
    if _log.isEnabledFor(logging.INFO):
        seconds = cost_model.PRODUCTS * len(subject) * cost_model.product(subject)
        time = format_duration(seconds)
        _log.info("Hessian eigenvectors first: some %d products, about %s", cost_model.PRODUCTS, time)
    parameters = list(subject.parameters.values())
    product = over_all_samples(subject, Curvature(replace(subject, weight_decay=0.0), subject.parameters, "kept"))
    start = random_unit(subject.size, seed, device=subject.device, dtype=subject.dtype)
    room, storage = memory(start)
    try:
        found = lanczos(product, start, 1, which="both", room=room, storage=storage, vectors=True)
    except FloatingPointError as error:
        raise ValueError(f"--plane eigen needs finite curvature: {error}; check the weights") from None
    assert found.vectors is not None
    negative, positive = (
        dict(zip(subject.parameters, unflat(found.vectors[k], parameters), strict=True)) for k in (1, 0)
    )
    names = (
        f"eigenvector of {found.values[1]:.3g} (smallest)",
        f"eigenvector of {found.values[0]:.3g} (largest)",
    )
    value, gradient = _gradient(subject)
    slopes = found.vectors[[1, 0]].double() @ gradient
    model = {
        "model_loss": value,
        "slope_x": slopes[0].item(),
        "slope_y": slopes[1].item(),
        "curvature_x": float(found.values[1]),
        "curvature_y": float(found.values[0]),
    }
    x, y = (reach(value, model[f"slope_{axis}"], model[f"curvature_{axis}"]) for axis in "xy")
    return Plane(
        "eigen", (negative, positive), names, "weight", spans=((-x, x), (-y, y)), identity="eigen", model=model
    )  # fmt: skip


def reach(loss: float, slope: float, curvature: float) -> float:
    """How far to look along a unit eigenvector, to two digits: where curvature alone changes the loss by `SHARE`.

    At least to twice the distance of the quadratic model's stationary point, so that it is in sight; 1 at most, the
    range of other planes, which is also what a direction without curvature gets.
    """
    if not (curvature and np.isfinite([loss, slope, curvature]).all()):
        return 1.0
    found = max(math.sqrt(2 * SHARE * (abs(loss) or 1.0) / abs(curvature)), 2 * abs(slope / curvature))
    return float(f"{min(found, 1.0):.2g}")


def _gradient(subject: Subject) -> tuple[float, Tensor]:
    """Loss over all samples and its gradient, flat, both in float64."""
    parameters = list(subject.parameters.values())
    total, gradient = 0.0, torch.zeros(subject.size, dtype=torch.float64, device=subject.device)
    for i in range(len(subject.batches)):
        share = len(subject.batches[i][1]) / len(subject)
        with torch.enable_grad():
            loss = subject.loss(i)
            found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        total += share * loss.item()
        gradient.add_(flat(found).double(), alpha=share)
    return total, gradient


def _checkpoint_plane(subject: Subject, weights: Mapping[str, Tensor], paths: list[Path]) -> Plane:
    if len(paths) != 2:
        raise ValueError(f"--plane names {len(paths)} checkpoints, expected two: A.pt,B.pt")
    differences, digests, states = [], [], []
    for path in paths:
        other = checkpoints.read(path)
        differences.append(weight_differences.difference(other, weights))
        digests.append(checkpoints.weights_sha256(other.state_dict))
        states.append(other)
    plane = Plane(
        "checkpoints", (differences[0], differences[1]), (f"towards {paths[0].stem}", f"towards {paths[1].stem}"),
        "share of the way", spans=((-0.25, 1.25), (-0.25, 1.25)), identity=digests,
        path=np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), path_names=("", paths[0].stem, paths[1].stem),
        ends=_ends(subject, weights, states),
    )  # fmt: skip
    if min(plane.norms) == 0.0 or abs(plane.cosine) > 1 - 1e-6:
        raise ValueError(f"the checkpoint, {paths[0]} and {paths[1]} lie on one line; a plane needs three that do not")
    return plane


def _ends(
    subject: Subject, weights: Mapping[str, Tensor], others: list[checkpoints.Checkpoint]
) -> tuple[dict[str, Tensor], ...]:
    """The floating-point tensors beside the weights in which other checkpoints differ from the subject."""
    still = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    own = {n: t.detach() for n, t in still.items() if t.is_floating_point() and n not in weights}
    found = [checkpoints.fitted(other.state_dict, set(own)) for other in others]
    for other, state in zip(others, found, strict=True):
        for name, tensor in own.items():
            if name in state and state[name].shape != tensor.shape:
                raise ValueError(
                    f"{other.path} is of another architecture: {name} is {tuple(state[name].shape)}, expected "
                    f"{tuple(tensor.shape)}; take checkpoints of one model"
                )
    ends = tuple({name: state.get(name, tensor).to(tensor) for name, tensor in own.items()} for state in found)
    differing = [n for n, tensor in own.items() if not all(torch.equal(end[n], tensor) for end in ends)]
    return tuple({name: end[name] for name in differing} for end in ends)


def directions_in(subject: Subject, path: Path) -> list[dict[str, Tensor]]:
    """The directions of a file in the layout of tomgoldstein/loss-landscape."""
    shapes = {name: tuple(p.shape) for name, p in subject.model.named_parameters()}
    state = {name: tuple(tensor.shape) for name, tensor in subject.model.state_dict().items()}
    found = tomgoldstein.read_directions(path, shapes, state)
    trainable = subject.parameters
    for direction in found:
        still = next((name for name in direction if name not in trainable), None)
        if still is not None:
            raise ValueError(f"{path} moves {still}, which is not trainable here; train it, or give other directions")
    return [
        {name: torch.as_tensor(values).to(trainable[name]) for name, values in direction.items()} for direction in found
    ]


def _file_plane(subject: Subject, path: Path) -> Plane:
    directions = directions_in(subject, path)
    if len(directions) < 2:
        raise ValueError(f"{path} holds one direction, a plane needs two; draw it with: landscape line --along {path}")
    first, second = directions
    identity = [checkpoints.weights_sha256(direction) for direction in directions]
    names = (f"xdirection of {path.name}", f"ydirection of {path.name}")
    return Plane("file", (first, second), names, "direction", identity=identity)


def _run_plane(subject: Subject, weights: Mapping[str, Tensor], run: Path) -> Plane:
    """The principal plane of a run's path, through the present weights, with the path as coordinates."""
    found = snapshots.of_run(run)
    axes = principal(weight_differences.gram(found, weights))
    if not axes.coefficients[1].any():
        raise ValueError(f"the {len(found)} snapshots of {run} lie on one line; a plane needs three that do not")
    first, second = weight_differences.combined(found, weights, axes.coefficients)
    path = axes.coordinates
    low, high = np.minimum(path.min(axis=1), 0.0), np.maximum(path.max(axis=1), 0.0)
    margin = 0.25 * np.maximum(high - low, 0.05 * (high - low).max())
    shares = [f"component {k + 1} of the run ({100 * axes.explained[k]:.0f} % of its variance)" for k in range(2)]
    (x_low, y_low), (x_high, y_high) = low - margin, high + margin
    return Plane(
        "run", (first, second), (shares[0], shares[1]), "weight",
        spans=((float(x_low), float(x_high)), (float(y_low), float(y_high))),
        identity=[snapshot.sha256 for snapshot in found], path=path,
        path_names=tuple(f"epoch {round(s.epoch, 2):g}" if math.isfinite(s.epoch) else s.path.stem for s in found),
    )  # fmt: skip
