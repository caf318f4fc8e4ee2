"""Labels of a surface: where the snapshots of a run, or the checkpoints that span the plane, lie on it."""

from __future__ import annotations

import logging

import numpy as np

from landscape.probe import Quantity
from landscape.subject.derived import once_per_weights
from landscape.subject.subject import Subject
from landscape.weight_space.plane_evaluator import PlaneEvaluator
from landscape.weight_space.planes import Plane
from landscape.weight_space.weights_in_place import OWN, RunningStatistics

_log = logging.getLogger(__name__)
Labels = dict[str, tuple[Quantity, np.ndarray]]


def path_labels(subject: Subject, plane: Plane, statistics: RunningStatistics) -> Labels:
    """Coordinates and names; of checkpoints also their losses. Empty where the plane has no path."""
    if not plane.path.size:
        return {}
    per_snapshot = ("snapshot",)
    return {
        "path_x": (Quantity("first coordinate of the snapshot", plane.units, per_snapshot), plane.path[0]),
        "path_y": (Quantity("second coordinate of the snapshot", plane.units, per_snapshot), plane.path[1]),
        "path_name": (Quantity("snapshot", dims=per_snapshot), np.array(plane.path_names)),
        **(_checkpoint_losses(subject, plane, statistics) if plane.kind == "checkpoints" else {}),
    }


def _checkpoint_losses(subject: Subject, plane: Plane, statistics: RunningStatistics) -> Labels:
    """The checkpoints' own losses, and by how much the plane's differ from them."""
    own, shown = _losses(subject, plane, OWN), _losses(subject, plane, statistics)
    losses = zip(plane.path_names, shown, own, strict=True)
    words = ", ".join(f"{name or subject.label} {here:.4g} (its own {itself:.4g})" for name, here, itself in losses)
    prefix = f"batch-norm statistics {statistics}; " if any(plane.ends) else ""
    _log.info("surface: %sloss at the checkpoints: %s", prefix, words)
    per_snapshot, units = ("snapshot",), subject.meaning.units
    return {
        "path_loss": (Quantity("loss of the checkpoint itself", units, per_snapshot), own),
        "path_excess": (Quantity("loss on the plane minus the checkpoint's own", units, per_snapshot), shown - own),
    }


@once_per_weights
def _losses(subject: Subject, plane: Plane, statistics: RunningStatistics) -> np.ndarray:
    with PlaneEvaluator(subject, plane, statistics) as evaluator:
        return np.array([evaluator.at(x, y)["loss"] for x, y in plane.path.T.tolist()])
