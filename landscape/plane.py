"""A plane in weight space and the evaluation of the loss on it, in place and restored bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from landscape import batchnorm, snapshots
from landscape import checkpoint as checkpoints
from landscape.curvature import Curvature, over_all_samples
from landscape.exchange import tomgoldstein
from landscape.forward import Forward, Manner
from landscape.linalg.directions import Normalize, orthogonal_to, random_direction
from landscape.linalg.lanczos import lanczos
from landscape.linalg.principal import principal
from landscape.linalg.vector import flat, inner, random_unit, unflat
from landscape.spectra import memory
from landscape.subject import Subject, correct

Span = tuple[float, float]
L2Definition = Literal["squared", "park2022"]
PLAIN = Manner()
FEWEST = 32  # samples before a point may be called off the chart


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
        return _checkpoint_plane(weights, [Path(part) for part in kind.split(",")])
    if Path(kind).is_dir():
        return _run_plane(subject, weights, Path(kind))
    if Path(kind).is_file():
        return _file_plane(subject, Path(kind))
    raise ValueError(
        f"--plane {kind} is neither random, eigen, two checkpoints A.pt,B.pt, a run's folder nor a file of directions"
    )


class Evaluator:
    """The loss at points of a plane; a context manager that leaves the model as it found it.

    Weights are written in place, moving tensors only, each time from w0: steps along the grid would drift. Beside the
    model there are three copies of its weights: w0, d1 and d2. (A fourth, w0 + x d1 of the present row, would save
    2.5 of the 7.4 ms that a write takes at 11 M weights, and 0.03 of 0.08 ms at 0.2 M.) Sums are float64 on the device;
    one transfer per row, on a CPU per point, so that a kill loses none.

    Args:
        subject: whose model is moved.
        plane: where to.
        recalibrate: mini-batches that refresh batch norm's statistics at every point; 0 keeps them.
        l2_definition: see `Surface`.
        manner: of the forward passes.
        cap: a point whose loss is clearly above it is left early.
    """

    def __init__(
        self,
        subject: Subject,
        plane: Plane,
        recalibrate: int = 0,
        l2_definition: L2Definition = "squared",
        *,
        manner: Manner = PLAIN,
        cap: float | None = None,
    ) -> None:
        self._subject, self._recalibrate, self._l2 = subject, recalibrate, l2_definition
        self._manner, self._cap = manner, cap
        self._forward, self._exact = Forward(subject, manner), Forward(subject, PLAIN)
        moving = {**plane.directions[0], **plane.directions[1]}
        trainable = subject.parameters
        parameters = [trainable[name] for name in moving]
        self._live = [p.data for p in parameters]
        self._origin = [p.data.clone() for p in parameters]
        zero = torch.zeros(())
        self._first, self._second = (
            [d.get(n, zero.to(p).expand_as(p)).to(p) for n, p in zip(moving, self._origin, strict=True)]
            for d in plane.directions
        )
        still = [p.detach() for name, p in trainable.items() if name not in moving]
        self._grams = _grams(self._origin, self._first, self._second, still)
        self._statistics = batchnorm.statistics(subject.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._foreach_copy_(self._live, self._origin)
        batchnorm.restore(self._subject.model, self._statistics)

    def at(self, x: float, y: float, *, control: bool = False) -> dict[str, float]:
        """What `along` says of one point."""
        (found,) = self.along([(x, y, control)])
        return found

    def along(self, points: Iterable[tuple[float, float, bool]]) -> Iterator[dict[str, float]]:
        """Loss and standard error, rise over the checkpoint's standard error, l2, accuracy, samples used, in order.

        Args:
            points: (x, y, control); a control point also says by how many standard errors its loss `deviates` from that
                of the plain manner, others have NaN there.
        """
        row: list[tuple[float, float, Tensor]] = []
        for x, y, control in points:
            if row and (x != row[0][0] or self._subject.device.type == "cpu"):
                yield from self._fetched(row)
                row = []
            with torch.inference_mode():
                row.append((x, y, self._sums(x, y, control)))
        yield from self._fetched(row)

    def _fetched(self, row: list[tuple[float, float, Tensor]]) -> Iterator[dict[str, float]]:
        if row:
            table = torch.stack([sums for _, _, sums in row]).tolist()  # the row's only transfer
            for (x, y, _), numbers in zip(row, table, strict=True):
                yield self._point(x, y, *numbers)

    def _sums(self, x: float, y: float, control: bool) -> Tensor:
        """Over samples: loss, its square, correct, rise, its square; samples; the loss in the plain manner, (7,)."""
        at_origin = self._subject.once(("at the origin", self._recalibrate, self._manner), self._losses_at_origin)
        self._move(x, y)
        if self._recalibrate:
            batchnorm.refresh(self._subject, self._recalibrate)
        sums = torch.zeros(5, dtype=torch.float64, device=self._subject.device)
        samples, exact = 0, torch.full_like(sums[:1], math.nan)
        for i in range(len(self._forward)):
            outputs, targets = self._forward(i)
            losses = self._subject.losses(outputs, targets).double()
            rise = losses - at_origin[i]
            right = correct(outputs, targets).sum()
            sums += torch.stack([losses.sum(), losses.square().sum(), right, rise.sum(), rise.square().sum()])
            samples += len(targets)
            if i & (i + 1) == 0 and self._far_above(sums, samples):  # after 1, 2, 4, 8, ... mini-batches
                break
        if control:
            parts = [self._subject.losses(*self._exact(k)).double().sum() for k in range(i + 1)]
            exact = torch.stack(parts).sum(dim=0, keepdim=True)
        return torch.cat([sums, torch.full_like(exact, samples), exact])

    def _losses_at_origin(self) -> list[Tensor]:
        """Losses per sample of the checkpoint itself, per mini-batch."""
        torch._foreach_copy_(self._live, self._origin)
        if self._recalibrate:
            batchnorm.refresh(self._subject, self._recalibrate)
        return [self._subject.losses(*self._forward(i)).double() for i in range(len(self._forward))]

    def _far_above(self, sums: Tensor, samples: int) -> bool:
        """Whether the mean is off the chart beyond doubt, by four standard errors, or not finite."""
        if self._cap is None or samples < FEWEST:
            return False
        total, squares = sums[:2].tolist()
        mean, error = _mean(total, squares, samples)
        return not math.isfinite(mean) or mean - 4 * error > self._cap

    def _point(
        self, x: float, y: float, total: float, squares: float, right: float, rise: float, rises: float,
        samples: float, exact: float,
    ) -> dict[str, float]:  # fmt: skip
        mean, error = _mean(total, squares, samples)
        with np.errstate(all="ignore"):
            deviates = float(np.abs(np.float64(total) - exact) / samples / np.float64(error))
        return {
            "loss": mean, "loss_se": error, "rise_se": _mean(rise, rises, samples)[1], "l2": self._l2_at(x, y),
            "accuracy": right / samples, "n": samples, "deviates": deviates,
        }  # fmt: skip

    def _move(self, x: float, y: float) -> None:
        if self._subject.device.type == "cpu":  # bound by memory: one pass less
            for live, origin, first in zip(self._live, self._origin, self._first, strict=True):
                torch.add(origin, first, alpha=x, out=live)
        else:  # bound by launches: three in all
            torch._foreach_copy_(self._live, self._origin)
            torch._foreach_add_(self._live, self._first, alpha=x)
        torch._foreach_add_(self._live, self._second, alpha=y)

    def _l2_at(self, x: float, y: float) -> float:
        """From inner products alone: ||w0 + x d1 + y d2||^2 is a quadratic form in (1, x, y)."""
        point = np.array([1.0, x, y])
        squared = np.clip(np.einsum("i,tij,j->t", point, self._grams, point), 0.0, None)
        return float(0.5 * squared.sum() if self._l2 == "squared" else np.sqrt(squared).sum())


def _mean(total: float, squares: float, samples: float) -> tuple[float, float]:
    """A mean and its standard error from sums over samples."""
    mean = total / samples
    with np.errstate(all="ignore"):
        variance = np.maximum(squares - samples * np.float64(mean) ** 2, 0.0) / np.float64(samples - 1)
        return mean, float(np.sqrt(variance / samples))


def _grams(origin: list[Tensor], first: list[Tensor], second: list[Tensor], still: list[Tensor]) -> np.ndarray:
    """Inner products of (w0, d1, d2) per tensor, (tensors, 3, 3) float64."""
    grams = []
    for vectors in zip(origin, first, second, strict=True):
        grams.append([[inner([a], [b]) for b in vectors] for a in vectors])
    grams += [[[inner([w], [w]), 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]] for w in still]
    return np.array(grams)


def _eigen_plane(subject: Subject, seed: int) -> Plane:
    """Unit eigenvectors of the smallest and the largest Hessian eigenvalue of the loss over all samples."""
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
    return Plane("eigen", (negative, positive), names, "weight", identity="eigen", model=model)


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


def _checkpoint_plane(weights: Mapping[str, Tensor], paths: list[Path]) -> Plane:
    if len(paths) != 2:
        raise ValueError(f"--plane names {len(paths)} checkpoints, expected two: A.pt,B.pt")
    differences, digests = [], []
    for path in paths:
        other = checkpoints.read(path)
        differences.append(snapshots.difference(other, weights))
        digests.append(checkpoints.weights_sha256(other.state_dict))
    plane = Plane(
        "checkpoints", (differences[0], differences[1]), (f"towards {paths[0].stem}", f"towards {paths[1].stem}"),
        "share of the way", spans=((-0.25, 1.25), (-0.25, 1.25)), identity=digests,
        path=np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), path_names=("", paths[0].stem, paths[1].stem),
    )  # fmt: skip
    if min(plane.norms) == 0.0 or abs(plane.cosine) > 1 - 1e-6:
        raise ValueError(f"the checkpoint, {paths[0]} and {paths[1]} lie on one line; a plane needs three that do not")
    return plane


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
    axes = principal(snapshots.gram(found, weights))
    if not axes.coefficients[1].any():
        raise ValueError(f"the {len(found)} snapshots of {run} lie on one line; a plane needs three that do not")
    first, second = snapshots.combined(found, weights, axes.coefficients)
    path = axes.coordinates
    low, high = np.minimum(path.min(axis=1), 0.0), np.maximum(path.max(axis=1), 0.0)
    margin = 0.25 * np.maximum(high - low, 0.05 * (high - low).max())
    shares = [f"component {k + 1} of the run ({100 * axes.explained[k]:.0f} % of its variance)" for k in range(2)]
    (x_low, y_low), (x_high, y_high) = low - margin, high + margin
    return Plane(
        "run", (first, second), (shares[0], shares[1]), "weight",
        spans=((float(x_low), float(x_high)), (float(y_low), float(y_high))),
        identity=[snapshot.sha256 for snapshot in found], path=path,
        path_names=tuple(f"epoch {s.epoch:g}" if math.isfinite(s.epoch) else s.path.stem for s in found),
    )  # fmt: skip
