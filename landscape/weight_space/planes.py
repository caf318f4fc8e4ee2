"""Make planes in weight space: random, of Hessian eigenvectors, through checkpoints, of a run, from a file."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import Checkpoint, state_dict_sha256
from landscape.checkpoints.file_names import stem_of
from landscape.curvature.lanczos import lanczos
from landscape.curvature.spectrum import VECTOR_RESIDUAL, memory
from landscape.exchange import tomgoldstein
from landscape.options import format_duration
from landscape.products import mini_batch_means, operator
from landscape.products.vectors import flat, inner, random_unit, unflat
from landscape.reporting.progress import forecast_level
from landscape.subject.losses import loss_gradients
from landscape.subject.other_networks import read_beside, run_of
from landscape.subject.subject import Subject
from landscape.weight_space import cost_model, weight_differences
from landscape.weight_space.directions import (
    Normalize,
    Span,
    length_units,
    random_direction,
    through_centre,
    through_checkpoints,
)
from landscape.weight_space.weight_differences import principal_axes
from landscape.weight_space.weight_uses import weight_uses

_log = logging.getLogger(__name__)
LOSS_CHANGE = 0.02  # relative; farther out the loss of trained networks no longer follows its curvature


def extreme_eigenvectors(
    subject: Subject, seed: int
) -> tuple[tuple[dict[str, Tensor], dict[str, Tensor]], dict[str, float]]:
    """Unit eigenvectors of the smallest (x) and the largest (y) Hessian eigenvalue over all samples, by Lanczos.

    With the quadratic model: `model_loss`, slope and curvature along both; the cross term is zero.

    Raises:
        ValueError: the curvature is not finite.
    """
    if _log.isEnabledFor(logging.INFO):
        count = cost_model.PRODUCTS
        seconds = count * len(subject) * cost_model.hessian_product_seconds(subject)
        _log.log(forecast_level(seconds), "Hessian eigenvectors first: about %s", format_duration(seconds))
    parameters = list(subject.parameters.values())
    product = mini_batch_means.over_mini_batches(
        operator.Curvature(replace(subject, weight_decay=0.0), subject.parameters, "double-backward")
    )
    start = random_unit(subject.size, seed, device=subject.device, dtype=subject.dtype)
    room, storage = memory(start)
    try:
        found = lanczos(
            product, start, 1, which="both", tol=None, tol_residual=VECTOR_RESIDUAL,
            room=room, storage=storage, vectors=True,
        )  # fmt: skip
    except FloatingPointError as error:
        raise ValueError(f"--plane eigen needs finite curvature: {error}; check the weights") from None
    assert found.vectors is not None
    vectors = (unflat(found.vectors[k], parameters) for k in (1, 0))
    smallest, largest = (dict(zip(subject.parameters, vector, strict=True)) for vector in vectors)
    loss, gradient = _loss_and_gradient(subject)
    slopes = (found.vectors[[1, 0]].double() @ gradient).tolist()
    model = {
        "model_loss": loss, "slope_x": slopes[0], "slope_y": slopes[1],
        "curvature_x": float(found.values[1]), "curvature_y": float(found.values[0]),
    }  # fmt: skip
    return (smallest, largest), model


def half_range(loss: float, slope: float, curvature: float) -> float:
    """Half the default range along a unit eigenvector: where curvature alone changes the loss by `LOSS_CHANGE`.

    At least twice the distance of the quadratic model's stationary point, so that it is in view. At most 1, the range
    of other planes, which a direction without curvature gets too. Rounded to two digits.
    """
    if not (curvature and np.isfinite([loss, slope, curvature]).all()):
        return 1.0
    distance = max(math.sqrt(2 * LOSS_CHANGE * (abs(loss) or 1.0) / abs(curvature)), 2 * abs(slope / curvature))
    return float(f"{min(distance, 1.0):.2g}")


def _loss_and_gradient(subject: Subject) -> tuple[float, Tensor]:
    """Loss over all samples and its flat gradient, both accumulated in float64."""
    parameters = list(subject.parameters.values())
    losses: list[Tensor] = []
    shares = [subject.samples(i) / len(subject) for i in range(len(subject.batches))]
    gradient = torch.zeros(subject.size, dtype=torch.float64, device=subject.device)
    for i, share in enumerate(shares):
        with torch.enable_grad():
            loss = subject.loss(i)
            gradients = loss_gradients(loss, parameters)
        losses.append(loss.detach())
        gradient.add_(flat(gradients).double(), alpha=share)
    return sum(share * loss for share, loss in zip(shares, torch.stack(losses).tolist(), strict=True)), gradient


@dataclass(frozen=True, eq=False)
class Plane:
    """The plane w0 + x d1 + y d2."""

    kind: str  # random, eigen, checkpoints, run or file
    directions: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # name -> tensor of the parameters that move
    names: tuple[str, str]  # long names of the axes
    units: str  # what 1 means on both
    spans: tuple[Span, Span] = ((-1.0, 1.0), (-1.0, 1.0))  # of x and y, to choose their ranges from
    identity: Any = None  # what the plane depends on beyond weights and data
    model: Mapping[str, float] = field(default_factory=dict)  # quadratic, around the centre: see `extreme_eigenvectors`
    # coordinates of a run's snapshots, or of the checkpoints that span the plane, (2, snapshots)
    path: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    path_names: tuple[str, ...] = ()  # epochs or files of these
    filters: str = ""  # of random directions, those that are not slices along dim 0, in words
    # on a plane through checkpoints, tensors of the other two that no direction moves and that differ (batch norm's
    # statistics, frozen weights), by name; empty where all agree
    ends: tuple[Mapping[str, Tensor], ...] = ({}, {})

    @property
    def norms(self) -> tuple[float, float]:
        first, second = (inner(d.values(), d.values()) ** 0.5 for d in self.directions)
        return first, second

    @property
    def cosine(self) -> float:
        first, second = self.directions
        shared = [name for name in first if name in second]
        product = inner([first[n] for n in shared], [second[n] for n in shared])
        lengths = self.norms[0] * self.norms[1]
        return product / lengths if lengths else 0.0

    @property
    def facts(self) -> dict[str, str | float]:
        norm_x, norm_y = self.norms
        filters = {"filters": self.filters} if self.filters else {}
        return {"plane": self.kind, "cosine": self.cosine, "norm_x": norm_x, "norm_y": norm_y, **filters, **self.model}

    def default_ranges(self, grid: tuple[int, int]) -> tuple[Span, Span]:
        """Ranges of x and y with the checkpoints of a plane through three, or the centre of a run's, on the grid."""
        nx, ny = grid
        if self.kind == "checkpoints":
            return through_checkpoints(nx), through_checkpoints(ny)
        if self.kind == "run":
            return through_centre(self.spans[0], nx), through_centre(self.spans[1], ny)
        return self.spans


def plane_of(subject: Subject, kind: str, *, normalize: Normalize, ignore: str, seed: int) -> Plane:
    """The plane that `--plane` names: `random`, `eigen`, `A.pt,B.pt`, a run's folder or a file of directions.

    Raises:
        FileNotFoundError, ValueError: there is no such plane for this subject.
    """
    weights = {name: p.detach() for name, p in subject.parameters.items()}
    if kind == "random":
        uses = weight_uses(subject, normalize, ignore)
        first, second = (
            random_direction(
                uses.movable(weights), seed=seed, axis=k, normalize=normalize, ignore=ignore, filters=uses.filters
            )
            for k in (0, 1)
        )
        names = "first random direction", "second random direction"
        units = length_units(normalize)
        return Plane("random", (first, second), names, units, identity=uses.identity, filters=uses.words)
    if kind == "eigen":
        return _eigen_plane(subject, seed)
    if "," in kind:
        return _checkpoint_plane(subject, weights, [Path(part) for part in kind.split(",")])
    if Path(kind).is_dir():
        return _run_plane(subject, weights, Path(kind))
    if Path(kind).is_file():
        return _file_plane(subject, Path(kind))
    known = "random, eigen, two checkpoints A.pt,B.pt, a run's folder or a file of directions"
    raise ValueError(f"--plane must be {known}, got {kind}")


def _eigen_plane(subject: Subject, seed: int) -> Plane:
    directions, model = extreme_eigenvectors(subject, seed)
    x, y = (half_range(model["model_loss"], model[f"slope_{axis}"], model[f"curvature_{axis}"]) for axis in "xy")
    ends = {"x": "smallest", "y": "largest"}
    first, second = (f"eigenvector of {model[f'curvature_{axis}']:.3g} ({end})" for axis, end in ends.items())
    spans = (-x, x), (-y, y)
    return Plane("eigen", directions, (first, second), "weight", spans, identity="eigen", model=model)


def _checkpoint_plane(subject: Subject, weights: Mapping[str, Tensor], paths: list[Path]) -> Plane:
    if len(paths) != 2:
        raise ValueError(f"--plane names {len(paths)} checkpoints, expected two: A.pt,B.pt")
    others = [read_beside(subject, path) for path in paths]
    first, second = (weight_differences.difference(other, weights) for other in others)
    names = stem_of(paths[0]), stem_of(paths[1])
    plane = Plane(
        "checkpoints", (first, second), (f"towards {names[0]}", f"towards {names[1]}"), "share of the way",
        spans=((-0.25, 1.25), (-0.25, 1.25)), identity=[state_dict_sha256(other.state_dict) for other in others],
        path=np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), path_names=("", *names),
        ends=_ends(subject, weights, others),
    )  # fmt: skip
    if min(plane.norms) == 0.0 or abs(plane.cosine) > 1 - 1e-6:
        raise ValueError(f"the checkpoint, {paths[0]} and {paths[1]} lie on one line; a plane needs three that do not")
    return plane


def _ends(subject: Subject, weights: Mapping[str, Tensor], others: list[Checkpoint]) -> tuple[dict[str, Tensor], ...]:
    """Floating-point tensors that no direction moves and in which the other checkpoints differ from the subject."""
    tensors = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    own = {n: t.detach() for n, t in tensors.items() if t.is_floating_point() and n not in weights}
    states = [weight_differences.tensors_like(other, own, allow_missing=True) for other in others]
    ends = tuple({name: state.get(name, tensor).to(tensor) for name, tensor in own.items()} for state in states)
    differing = [n for n, tensor in own.items() if not all(torch.equal(end[n], tensor) for end in ends)]
    return tuple({name: end[name] for name in differing} for end in ends)


def directions_in(subject: Subject, path: Path) -> list[dict[str, Tensor]]:
    """The directions of a file in the layout of tomgoldstein/loss-landscape."""
    shapes = {name: tuple(p.shape) for name, p in subject.model.named_parameters()}
    state = {name: tuple(tensor.shape) for name, tensor in subject.model.state_dict().items()}
    directions = tomgoldstein.read_directions(path, shapes, state)
    trainable = subject.parameters
    for frozen in (name for direction in directions for name in direction if name not in trainable):
        raise ValueError(f"{path} moves {frozen}, which is not trainable here; train it, or give other directions")
    return [{name: torch.as_tensor(array).to(trainable[name]) for name, array in d.items()} for d in directions]


def _file_plane(subject: Subject, path: Path) -> Plane:
    directions = directions_in(subject, path)
    if len(directions) < 2:
        raise ValueError(f"{path} holds one direction, a plane needs two; draw it with: landscape line --along {path}")
    first, second = directions
    identity = [state_dict_sha256(direction) for direction in directions]
    names = (f"xdirection of {path.name}", f"ydirection of {path.name}")
    return Plane("file", (first, second), names, "direction", identity=identity)


def _run_plane(subject: Subject, weights: Mapping[str, Tensor], run: Path) -> Plane:
    """The plane of a run's first two principal components through the present weights, with the run's path on it."""
    found = run_of(subject, run)
    axes = principal_axes(weight_differences.gram(found, weights))
    if not axes.coefficients[1].any():
        raise ValueError(f"the {len(found)} snapshots of {run} lie on one line; a plane needs three that do not")
    first, second = weight_differences.combined(found, weights, axes.coefficients)
    path = axes.coordinates
    low, high = np.minimum(path.min(axis=1), 0.0), np.maximum(path.max(axis=1), 0.0)
    margin = 0.25 * np.maximum(high - low, 0.05 * (high - low).max())
    (x_low, y_low), (x_high, y_high) = low - margin, high + margin
    return Plane(
        "run", (first, second), (axes.names[0], axes.names[1]), "weight",
        spans=((float(x_low), float(x_high)), (float(y_low), float(y_high))),
        identity=[snapshot.sha256 for snapshot in found], path=path,
        path_names=tuple(f"epoch {round(s.epoch, 2):g}" if math.isfinite(s.epoch) else stem_of(s.path) for s in found),
    )  # fmt: skip
