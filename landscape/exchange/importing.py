"""Import surfaces and lines of other tools into a results file, next to measured ones."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from landscape.exchange import csv_files, tomgoldstein
from landscape.exchange.csv_files import CorruptionTable, HybridTable
from landscape.exchange.grid import KNOWN, Grid
from landscape.headline import Headline, stored_headlines
from landscape.options import at_least, naming
from landscape.probe import Plan, Quantity, Unit, Values
from landscape.results.declared_size import refuse_special
from landscape.results.run_key import Outcome, ReduceOf, RunKey, versions
from landscape.results.writer import Writer
from landscape.statistics import basins, corruption_summary, surface_summary
from landscape.statistics.surface_summary import RADII

SUMMARIES = {
    "height": Quantity("mean rise of the loss at a radius", "nats", ("radius",)),
    "non_finite": Quantity("share of finished cells whose loss is not finite"),
}
ABOUT = {
    "x": Quantity("first direction"), "y": Quantity("second direction"), "t": Quantity("position on the line"),
    "radius": Quantity("distance from the centre"), "snapshot": Quantity("snapshot of the run"),
}  # fmt: skip


def import_file(
    path: Path,
    out: Path,
    *,
    label: str = "",
    weight_decay: float = csv_files.WEIGHT_DECAY,
    trajectory: Path | None = None,
    reduce_of: ReduceOf,
) -> list[Outcome]:
    """Add the surfaces, or scores, of another tool's file to a results file, made if absent, unless they are there.

    Args:
        path: a surface of tomgoldstein/loss-landscape (HDF5), or a CSV: a published surface, scores under corruptions,
            or accuracies over the weight of a contrastive objective.
        out: results file.
        label: readable name of the group; default: the file's stem.
        weight_decay: of a CSV's objective.
        trajectory: a projection file of tomgoldstein/loss-landscape: the trajectory of a run on the surface.
        reduce_of: returns the summary function of a probe, as for `Writer`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no surface.
    """
    at_least("weight_decay", weight_decay, 0.0)
    store = partial(_stored, path, out, reduce_of, relabel=bool(label))
    name = label or path.stem
    if (table := csv_files.table_in(path)) is not None:
        stored: Callable[..., Outcome] = _stored_hybrid if isinstance(table, HybridTable) else _stored_table
        return [stored(table, path, name, store)]
    grids = read(path, weight_decay=weight_decay, trajectory=trajectory)
    return [_stored_grid(grid, f"{name}-{grid.name}" if grid.name else name, store) for grid in grids]


def _stored(
    path: Path, out: Path, reduce_of: ReduceOf, question: tuple[str, str, str], plan: Plan,
    headlines: Sequence[Headline], values_of: Callable[[Unit], Values | None], *, relabel: bool,
) -> Outcome:  # fmt: skip
    """Store the units that have values; `question`: the probe, the label, the digest."""
    probe, label, digest = question
    attributes = {
        "parameters": "{}", "versions": json.dumps(versions()), "source": path.name, "model": "", "data": "",
        "checkpoint_sha256": "", "protocol": f"from {path.name}, protocol not said there",
        **stored_headlines(headlines),
    }  # fmt: skip
    written = 0
    key = RunKey(probe, label, digest, plan, attributes, relabel)
    with Writer(out, key, reduce_of=reduce_of) as writer:
        for unit in writer.pending():
            if (values := values_of(unit)) is not None:
                writer.write(unit, {**dict.fromkeys(plan.quantities, np.nan), **values})
                written += 1
        group = writer.group
    return Outcome(group, math.prod(plan.shape), written)


@naming
def read(path: Path, *, weight_decay: float = csv_files.WEIGHT_DECAY, trajectory: Path | None = None) -> list[Grid]:
    """The grids of a file of any known tool, with the trajectory of another file.

    Raises:
        FileNotFoundError, ValueError: as `import_file`.
    """
    found = _grids(path, weight_decay)
    if trajectory is None:
        return found
    refuse_special(trajectory)
    if not trajectory.exists():
        raise FileNotFoundError(f"no file at {trajectory}; give a projection file, with proj_xcoord and proj_ycoord")
    if any("y" not in grid.axes for grid in found):
        raise ValueError(f"{path} holds a line, expected a surface under the path of {trajectory}; drop --path")
    read_in = tomgoldstein.read_trajectory(trajectory)
    return [replace(grid, trajectory=read_in) for grid in found]


def _grids(path: Path, weight_decay: float) -> list[Grid]:
    if not path.exists():
        raise FileNotFoundError(f"no file at {path}; give a surface of another tool (HDF5 or CSV)")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected a surface of another tool (HDF5 or CSV)")
    refuse_special(path)
    if not h5py.is_hdf5(path):
        if path.read_bytes()[:1024].count(0):
            raise ValueError(f"{path} is neither HDF5 nor text; expected a surface of another tool (HDF5 or CSV)")
        return [csv_files.read_surface(path, weight_decay=weight_decay)]
    try:
        with h5py.File(path, "r") as file:
            ours = "format" in file.attrs
    except OSError as error:
        raise ValueError(f"{path} is damaged ({error}); give another copy") from None
    if ours:
        raise ValueError(f"{path} is a results file of landscape already; draw it with: landscape plot {path}")
    return tomgoldstein.read_surface(path)


def _stored_table(table: CorruptionTable, path: Path, label: str, store: Callable[..., Outcome]) -> Outcome:
    names, severities = np.array(table.names), np.array(table.severities)
    plan = Plan(
        over={"corruption": np.arange(len(names)), "severity": severities},
        quantities=corruption_summary.quantities(),
        labels={"corruption_name": (Quantity("corruption", dims=("corruption",)), names)},
        summaries=corruption_summary.summaries(baseline=False),
        facts={"source": f"imported from {path.name}"},
    )
    digest = _digest_of([table.names, table.severities], table.scores)

    def scores(unit: Unit) -> Values | None:
        found = {name: values[unit.index] for name, values in table.scores.items()}
        return found if np.isfinite(list(found.values())).any() else None

    return store(("corruption", label, digest), plan, corruption_summary.HEADLINES, scores)


def _stored_hybrid(table: HybridTable, path: Path, label: str, store: Callable[..., Outcome]) -> Outcome:
    plan = Plan(
        over={"weight": np.array(table.weights)},
        quantities={name: Quantity(name.replace("_", " ")) for name in table.scores},
        about={"weight": Quantity("weight of the contrastive objective, the rest is the masked-image one")},
        facts={"source": f"imported from {path.name}"},
    )
    digest = _digest_of([table.weights], table.scores)
    highest = [
        Headline(f"highest {one.long_name}", name, {"weight": "largest"}, where="at weight {weight:g}")
        for name, one in plan.quantities.items()
    ]
    return store(
        ("hybrid", label, digest), plan, highest, lambda unit: {k: v[unit.index] for k, v in table.scores.items()}
    )


def _digest_of(axes: list[Any], scores: Mapping[str, np.ndarray]) -> str:
    content = json.dumps([*axes, {name: values.tolist() for name, values in scores.items()}])
    return hashlib.sha256(content.encode()).hexdigest()[:10]


def _stored_grid(grid: Grid, label: str, store: Callable[..., Outcome]) -> Outcome:
    headlines: Sequence[Headline]
    if "y" in grid.axes:
        probe, plan, headlines = "surface", _plan_of_surface(grid), surface_summary.HEADLINES
    else:
        probe, plan, headlines = "line", _plan_of_line(grid, label), basins.LINE

    def values(unit: Unit) -> Values | None:
        index = unit.index[-len(grid.axes) :]
        known = {name: grid.values[name][index] for name in plan.quantities if name in grid.values}
        return known if grid.done[index] else None

    return store((probe, label, _digest(grid)), plan, headlines, values)


def _plan_of_surface(grid: Grid) -> Plan:
    per_snapshot, positions = ("snapshot",), np.zeros((0, 0)) if grid.trajectory is None else grid.trajectory.positions
    names = (("path_x", "first coordinate of the snapshot"), ("path_y", "second coordinate of the snapshot"))
    path = {name: (Quantity(about, dims=per_snapshot), at) for (name, about), at in zip(names, positions, strict=False)}
    return Plan(
        over=dict(grid.axes),
        axes={"radius": np.array(RADII), **({"snapshot": np.arange(positions.shape[1])} if path else {})},
        quantities=_quantities(grid), labels=path, summaries=SUMMARIES, about=ABOUT,
        facts={**grid.facts, "plane": "imported"},
    )  # fmt: skip


def _plan_of_line(grid: Grid, label: str) -> Plan:
    return Plan(
        over={"direction": np.arange(1), "t": grid.axes["x"]},
        quantities={
            **_quantities(grid),
            "accuracy_se": Quantity("standard error of the accuracy over samples", over="samples"),
        },
        labels={"name": (Quantity("direction", dims=("direction",)), np.array([label]))},
        about=ABOUT,
        facts={**grid.facts, "along": "imported"},
    )


def _quantities(grid: Grid) -> dict[str, Quantity]:
    return {name: KNOWN.get(name, Quantity(name.replace("_", " "))) for name in grid.values}


def _digest(grid: Grid) -> str:
    """Digest of all values, so that the same file is imported once."""
    digest = hashlib.sha256()
    positions = {} if grid.trajectory is None else {"path": grid.trajectory.positions}
    for name, values in {**grid.axes, **grid.values, "done": grid.done, **positions}.items():
        digest.update(f"{name}:{values.shape};".encode() + np.ascontiguousarray(values, dtype=float).tobytes())
    return digest.hexdigest()[:10]
