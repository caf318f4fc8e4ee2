"""Measure the trajectory of training in weight space (Park & Kim 2022, Fig. 1b; Li et al. 2018, section 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
from torch import Tensor

from landscape.checkpoints import file_names, snapshots
from landscape.checkpoints.snapshots import Snapshot
from landscape.headline import Headline
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.statistics.means import mean_and_standard_error
from landscape.subject import batchnorm, other_networks, sample_statistics, weights_cache
from landscape.subject.batchnorm import recalibration
from landscape.subject.subject import Subject
from landscape.weight_space import weight_differences
from landscape.weight_space.weight_differences import PrincipalAxes, principal_axes
from landscape.weight_space.weights_in_place import WeightsInPlace

Run: TypeAlias = Path | tuple[Path, ...]  # a folder, or files in order
AXES = {"snapshot": "snapshot", "other": "other snapshot", "component": "axis"}


@dataclass(frozen=True)
class Trajectory(Probe):
    """Radius and angle of every snapshot from the final weights, its projection on the principal plane, its loss.

    D_t = w_t - w_T: radius ||D_t|| / ||D_0||, angle arccos(<D_t, D_0> / (||D_t|| ||D_0||)). The polar figure is easy
    to misread: in high dimension almost all of a trajectory is off any plane. See off_plane, the explained variance
    and plane_excess: how much higher the loss is at the projection of a snapshot than at the snapshot itself.
    On the plane, batch norm's running statistics are those of the final weights, as in `surface --plane RUN_DIR`,
    unless `bn` is recalibrate:K; a snapshot's own loss always uses its own.
    """

    name: ClassVar[str] = "trajectory"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"run": ()}
    several: ClassVar[str] = "run"
    checkpoints: ClassVar[str] = "folder of a run's snapshots, or the snapshots in order"
    split: ClassVar[str] = "train"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {"split": "train", "augment": True, "weight_decay": 0.05}
    }
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("pc1", "explained_variance", {"component": 0}),
        Headline("pc2", "explained_variance", {"component": 1}),
        Headline("off plane at most", "off_plane", {"snapshot": "largest"}),
    )

    run: Annotated[str, "folder of the snapshots, or A.pt,B.pt,C.pt in order; default: that of the checkpoint"] = ""
    bn: Annotated[str, "batch-norm statistics on the principal plane: frozen, or recalibrate:K mini-batches"] = "frozen"

    def __post_init__(self) -> None:
        recalibration(self.bn)

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The contents of the snapshots instead of their folder."""
        return {
            "run": [[snapshot.epoch, snapshot.sha256] for snapshot in self._snapshots(subject)],
            "bn": self.bn,
            **batchnorm.dependence(subject, recalibration(self.bn)),
        }

    def plan(self, subject: Subject) -> Plan:
        found = self._snapshots(subject)
        # Raises for another architecture.
        weight_differences.difference(found[-1].read(), subject.parameters)
        count = np.arange(len(found))
        per_snapshot, meaning = ("snapshot",), subject.meaning
        epochs, names = np.array([s.epoch for s in found]), np.array([file_names.stem_of(s.path) for s in found])
        return Plan(
            over={"snapshot": count},
            axes={"other": count, "component": np.arange(2)},
            labels={
                "epoch": (Quantity("epoch", "epochs", per_snapshot), epochs),
                "name": (Quantity("file", dims=per_snapshot), names),
            },
            quantities={
                "gram": Quantity("inner product with another snapshot, from the final weights", "weight^2", ("other",)),
                "loss": Quantity("loss", meaning.units, bounds=meaning.bounds, error="samples"),
                "accuracy": meaning.of_accuracy("accuracy", bounds="share"),
                "plane_loss": Quantity(
                    "loss on the principal plane, at the snapshot's place on it",
                    meaning.units,
                    bounds=meaning.bounds,
                    error="samples",
                ),
                "plane_accuracy": meaning.of_accuracy("accuracy on the principal plane, at the snapshot's place on it"),
                "plane_excess": Quantity("loss on the plane minus the snapshot's own", meaning.units, error="samples"),
            },
            summaries={
                "radius": Quantity("distance from the final weights, relative to the start's", dims=per_snapshot),
                "angle": Quantity("angle to the start, seen from the final weights", "rad", per_snapshot),
                "pc1": Quantity("first principal coordinate", "weight", per_snapshot),
                "pc2": Quantity("second principal coordinate", "weight", per_snapshot),
                "off_plane": Quantity("distance from the principal plane", "weight", per_snapshot),
                "explained_variance": Quantity("share of the path's variance", dims=("component",)),
            },
            about={name: Quantity(about) for name, about in AXES.items()},
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (t,) = unit.index
        found = self._snapshots(subject)
        lenient = subject.spec is not None and subject.spec.allow_missing
        with WeightsInPlace(subject, [name for name, _ in subject.model.named_parameters()]):
            snapshots.load_snapshot(subject.model, found[t], allow_missing=lenient)
            loss, right = (values.numpy() for values in sample_statistics.per_sample(subject))
            snapshots.load_snapshot(subject.model, found[-1], allow_missing=lenient)
            gram, axes, directions = _geometry(subject, self._run(subject))
            steps = zip(directions, axes.coordinates[:, t].tolist(), strict=True)
            with WeightsInPlace(subject, subject.parameters) as final:  # from the final weights to the projection
                final.translate(*steps)
                if recalibration(self.bn):
                    batchnorm.refresh(subject, recalibration(self.bn))
                on_plane, right_on_plane = (values.numpy() for values in sample_statistics.per_sample(subject))
        values = {"gram": gram[t], "accuracy": right.mean(), "plane_accuracy": right_on_plane.mean()}
        with np.errstate(invalid="ignore"):  # infinite losses
            excess = on_plane - loss
        for name, losses in {"loss": loss, "plane_loss": on_plane, "plane_excess": excess}.items():
            values[name], values[f"{name}_se"] = mean_and_standard_error(losses)
            if subject.traits.mean_only:
                values[f"{name}_se"] = np.nan
        return values

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """All geometric quantities, from the inner products alone."""
        done = data["done"] == 1
        gram = np.where(done[:, None], data["gram"], data["gram"].T)  # symmetric: one of two rows is enough
        start, squared = gram[0], np.diag(gram)
        with np.errstate(invalid="ignore", divide="ignore"):
            radius = np.sqrt(squared / gram[0, 0])
            angle = np.arccos(np.clip(start / np.sqrt(squared * gram[0, 0]), -1.0, 1.0))
        # The start is at angle 0 by definition; arccos would return a rounding error.
        angle[0] = 0.0 if np.isfinite(gram[0, 0]) else np.nan
        angle[squared == 0.0] = np.nan
        summaries: dict[str, Any] = {"radius": radius, "angle": angle}
        if np.isfinite(gram).all():
            axes = principal_axes(gram)
            summaries |= {"pc1": axes.coordinates[0], "pc2": axes.coordinates[1], "off_plane": axes.off_plane}
            summaries["explained_variance"] = axes.explained
        return summaries

    def _run(self, subject: Subject) -> Run:
        if not self.run and subject.checkpoint is None:
            raise ValueError("a trajectory needs the folder of a run's snapshots; give RUN_DIR")
        if not self.run:
            return subject.checkpoint.path.parent  # type: ignore[union-attr]
        return (
            Path(self.run)
            if Path(self.run).exists() or "," not in self.run
            else tuple(Path(part) for part in self.run.split(","))
        )

    def _snapshots(self, subject: Subject) -> list[Snapshot]:
        return _snapshots(subject, self._run(subject))


@weights_cache.once_per_weights
def _snapshots(subject: Subject, run: Run) -> list[Snapshot]:
    return other_networks.run_of(subject, run)


@weights_cache.once_per_weights
def _geometry(subject: Subject, run: Run) -> tuple[np.ndarray, PrincipalAxes, list[dict[str, Tensor]]]:
    """Inner products, principal axes and their directions, relative to the final weights, which the model holds."""
    found = _snapshots(subject, run)
    final = {name: p.detach() for name, p in subject.parameters.items()}
    gram = weight_differences.gram(found, final)
    axes = principal_axes(gram)
    return gram, axes, weight_differences.combined(found, final, axes.coefficients)
