"""Import surfaces and lines of other tools into a results file, next to measured ones."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from landscape.exchange import corruption_csv, hybrid_csv, park2022_csv, tomgoldstein
from landscape.exchange.corruption_csv import CorruptionTable
from landscape.exchange.grid import KNOWN, Grid
from landscape.exchange.hybrid_csv import HybridTable
from landscape.headline import Headline, stored_headlines
from landscape.options import at_least, naming
from landscape.probe import Plan, Quantity, Values
from landscape.results.declared_size import refuse_special
from landscape.results.run_key import Outcome, ReduceOf, RunKey, readable_label, versions
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
    weight_decay: float = park2022_csv.WEIGHT_DECAY,
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
    if (table := table_in(path)) is not None:
        given: Any = {"path": path, "out": out, "label": label or path.stem, "reduce_of": reduce_of}
        if isinstance(table, HybridTable):
            return [_stored_hybrid(table, **given, relabel=bool(label))]
        return [_stored_table(table, **given, relabel=bool(label))]
    grids = read(path, weight_decay=weight_decay, trajectory=trajectory)
    named = [f"{label or path.stem}-{grid.name}" if grid.name else label or path.stem for grid in grids]
    return [
        _stored(grid, path, out, name, reduce_of, relabel=bool(label)) for grid, name in zip(grids, named, strict=True)
    ]


@naming
def read(path: Path, *, weight_decay: float = park2022_csv.WEIGHT_DECAY, trajectory: Path | None = None) -> list[Grid]:
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


@naming
def table_in(path: Path) -> CorruptionTable | HybridTable | None:
    """The scores of a CSV under corruptions, or over the weight of an objective; None where the file is no such table.

    Raises:
        ValueError: it is such a file and cannot be read.
    """
    if not path.is_file() or h5py.is_hdf5(path):
        return None
    if hybrid_csv.is_table(path):
        return hybrid_csv.read(path)
    return corruption_csv.read(path) if corruption_csv.is_table(path) else None


def _grids(path: Path, weight_decay: float) -> list[Grid]:
    if not path.exists():
        raise FileNotFoundError(f"no file at {path}; give a surface of another tool (HDF5 or CSV)")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected a surface of another tool (HDF5 or CSV)")
    refuse_special(path)
    if not h5py.is_hdf5(path):
        if path.read_bytes()[:1024].count(0):
            raise ValueError(f"{path} is neither HDF5 nor text; expected a surface of another tool (HDF5 or CSV)")
        return [park2022_csv.read_surface(path, weight_decay=weight_decay)]
    try:
        with h5py.File(path, "r") as file:
            ours = "format" in file.attrs
    except OSError as error:
        raise ValueError(f"{path} is damaged ({error}); give another copy") from None
    if ours:
        raise ValueError(f"{path} is a results file of landscape already; draw it with: landscape plot {path}")
    return tomgoldstein.read_surface(path)


def _stored_table(
    table: CorruptionTable, path: Path, out: Path, label: str, reduce_of: ReduceOf, *, relabel: bool
) -> Outcome:
    names, severities = np.array(table.names), np.array(table.severities)
    plan = Plan(
        over={"corruption": np.arange(len(names)), "severity": severities},
        quantities=corruption_summary.quantities(),
        labels={"corruption_name": (Quantity("corruption", dims=("corruption",)), names)},
        summaries=corruption_summary.summaries(baseline=False),
        facts={"source": f"imported from {path.name}"},
    )
    content = json.dumps([table.names, table.severities, {name: v.tolist() for name, v in table.scores.items()}])
    digest = hashlib.sha256(content.encode()).hexdigest()[:10]
    key = RunKey(
        "corruption", readable_label(label), digest, plan, _attributes(path, corruption_summary.HEADLINES), relabel
    )
    unknown, written = dict.fromkeys(plan.quantities, np.nan), 0
    with Writer(out, key, reduce_of=reduce_of) as writer:
        for unit in writer.pending():
            scores = {name: values[unit.index] for name, values in table.scores.items()}
            if np.isfinite(list(scores.values())).any():
                writer.write(unit, {**unknown, **scores})
                written += 1
        group = writer.group
    return Outcome(group, len(names) * len(severities), written)


def _stored_hybrid(
    table: HybridTable, path: Path, out: Path, label: str, reduce_of: ReduceOf, *, relabel: bool
) -> Outcome:
    plan = Plan(
        over={"weight": np.array(table.weights)},
        quantities={name: Quantity(name.replace("_", " ")) for name in table.scores},
        about={"weight": Quantity("weight of the contrastive objective, the rest is the masked-image one")},
        facts={"source": f"imported from {path.name}"},
    )
    content = json.dumps([table.weights, {name: values.tolist() for name, values in table.scores.items()}])
    digest = hashlib.sha256(content.encode()).hexdigest()[:10]
    key = RunKey("hybrid", readable_label(label), digest, plan, _attributes(path, ()), relabel)
    written = 0
    with Writer(out, key, reduce_of=reduce_of) as writer:
        for unit in writer.pending():
            writer.write(unit, {name: values[unit.index] for name, values in table.scores.items()})
            written += 1
        group = writer.group
    return Outcome(group, len(table.weights), written)


def _attributes(path: Path, headlines: Sequence[Headline]) -> dict[str, Any]:
    return {
        "parameters": "{}", "versions": json.dumps(versions()), "source": path.name, "model": "", "data": "",
        "checkpoint_sha256": "", "protocol": f"from {path.name}, protocol not said there",
        **stored_headlines(headlines),
    }  # fmt: skip


def _stored(grid: Grid, path: Path, out: Path, label: str, reduce_of: ReduceOf, *, relabel: bool) -> Outcome:
    headlines: Sequence[Headline]
    if "y" in grid.axes:
        probe, plan, headlines = "surface", _plan_of_surface(grid), surface_summary.HEADLINES
    else:
        probe, plan, headlines = "line", _plan_of_line(grid, label), basins.LINE
    key = RunKey(probe, readable_label(label), _digest(grid), plan, _attributes(path, headlines), relabel)
    written = 0
    with Writer(out, key, reduce_of=reduce_of) as writer:
        for unit in writer.pending():
            index = unit.index[-len(grid.axes) :]
            if grid.done[index]:
                known: Values = {name: grid.values[name][index] for name in plan.quantities if name in grid.values}
                writer.write(unit, {**dict.fromkeys(plan.quantities, np.nan), **known})
                written += 1
        group = writer.group
    return Outcome(group, int(grid.done.size), written)


def _plan_of_surface(grid: Grid) -> Plan:
    per_snapshot, positions = ("snapshot",), np.zeros((0, 0)) if grid.trajectory is None else grid.trajectory.positions
    names = (("path_x", "first coordinate of the snapshot"), ("path_y", "second coordinate of the snapshot"))
    path = {name: (Quantity(about, dims=per_snapshot), at) for (name, about), at in zip(names, positions, strict=False)}
    return Plan(
        over=dict(grid.axes),
        axes={"radius": np.array(RADII), **({"snapshot": np.arange(positions.shape[1])} if path else {})},
        quantities=_quantities(grid),
        labels=path,
        summaries=SUMMARIES,
        about=ABOUT,
        facts={**grid.facts, "plane": "imported"},
    )


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
