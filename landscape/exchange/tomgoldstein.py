"""Read and write the HDF5 files of tomgoldstein/loss-landscape (Li et al. 2018): surfaces, trajectories, directions.

A surface file holds `xcoordinates`, `ycoordinates` (absent for a line), `train_loss`, `train_acc` (per cent), the same
for `test_`, perhaps `min_eig`, `max_eig`, and `dir_file`. Values are stored with x fastest, whatever the shape of the
array: that tool fills a (nx, ny) array by the flat index of a (ny, nx) mesh. A point not evaluated yet holds -1.
A projection file, the trajectory of a run on a plane, holds `proj_xcoord` and `proj_ycoord`, one number per snapshot.
A direction file holds `xdirection/0`, `xdirection/1`, ...: one array per parameter in their order, or per entry of the
state dict; the same under `ydirection`.
"""

import collections
import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np

from landscape.exchange.grid import Grid, ProjectedTrajectory, ascending
from landscape.results.hdf5_file import checked_groups

_log = logging.getLogger(__name__)
UNFILLED = -1.0
AXES = {"x": "xcoordinates", "y": "ycoordinates"}
SPLITS = ("train", "test")
EIGENVALUES = {"min_eig": 1.0, "max_eig": -1.0}  # what that tool writes where it has not computed them
PROJECTIONS = ("proj_xcoord", "proj_ycoord")


def read_surface(path: Path) -> list[Grid]:
    """The surfaces (or lines) in a file, one per split of the data.

    Raises:
        ValueError: it holds none, or one whose size differs from its coordinates.
    """
    with _reading(path) as file:
        splits = [split for split in SPLITS if f"{split}_loss" in file]
        if AXES["x"] not in file or not splits:
            if set(PROJECTIONS) <= set(file):
                raise ValueError(
                    f"{path} holds the path of a run, expected a surface; give both: "
                    f"landscape import SURFACE.h5 --path {path}"
                )
            raise ValueError(
                f"{path} has no xcoordinates with a train_loss or test_loss, got {_contents(file)}; give a surface "
                "file (a direction file goes to: landscape surface --plane FILE)"
            )
        named = {axis: np.asarray(file[key][()], dtype=float) for axis, key in AXES.items() if key in file}
        axes, index = ascending(list(named.values()))
        sizes = tuple(len(axis) for axis in axes)

        def over(key: str) -> np.ndarray:
            flat = np.asarray(file[key][()], dtype=float).ravel()
            if flat.size != np.prod(sizes):
                expected = " x ".join(map(str, sizes))
                raise ValueError(f"{path} has {flat.size} values of {key} for {expected} coordinates")
            return np.asarray(flat.reshape(sizes[::-1]).T[index])

        grids = []
        for split in splits:
            loss = over(f"{split}_loss")
            done = loss != UNFILLED
            values = {"loss": np.where(done, loss, np.nan), "loss_se": np.full(sizes, np.nan)}
            accuracy = over(f"{split}_acc") / 100 if f"{split}_acc" in file else np.full(sizes, np.nan)
            values |= {"accuracy": np.where(done, accuracy, np.nan), "l2": np.full(sizes, np.nan)}
            if split == splits[0]:
                values |= _eigenvalues(path, {name: over(name) for name in EIGENVALUES if name in file})
            facts = {"split": split, "l2_definition": "not in the file", "dir_file": _text(file, "dir_file")}
            name = split if len(splits) > 1 else ""
            grids.append(Grid(dict(zip(named, axes, strict=True)), values, done, facts, name))
    return grids


def _eigenvalues(path: Path, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Eigenvalues, NaN where the file holds what that tool begins with; none where it holds nothing else."""
    begun = np.logical_and.reduce([values == EIGENVALUES[name] for name, values in found.items()] or [True])
    if begun.any() and found:
        _log.info("note: %s holds eigenvalues of %d of %d points", path, begun.size - begun.sum(), begun.size)
    return {} if begun.all() else {name: np.where(begun, np.nan, values) for name, values in found.items()}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[h5py.File]:
    """The file open for reading; ValueError for one that refers to other files."""
    with h5py.File(path, "r") as file:
        collections.deque(checked_groups(file, path, links=True), maxlen=0)
        yield file


def surface_file(grid: Grid, *, split: str = "train") -> bytes:
    """A surface in that tool's layout; arrays of unequal sides are (ny, nx), which its figures can draw."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file["dir_file"] = str(grid.facts.get("dir_file", ""))
        for axis, values in grid.axes.items():
            file[AXES[axis]] = values
        for key, name, factor in ((f"{split}_loss", "loss", 1.0), (f"{split}_acc", "accuracy", 100.0)):
            values = np.where(grid.done, factor * grid.values.get(name, np.full(grid.done.shape, np.nan)), UNFILLED)
            file[key] = values.T
        for name, begun in EIGENVALUES.items():
            if name in grid.values:
                values = grid.values[name]
                file[name] = np.where(np.isnan(values), begun, values).T
    return content.getvalue()


def read_trajectory(path: Path) -> ProjectedTrajectory:
    """The trajectory in a projection file. Raises ValueError: it holds none."""
    wanted = " and ".join(PROJECTIONS)
    if not h5py.is_hdf5(path):
        raise ValueError(f"{path} is not an HDF5 file; give a projection file with {wanted}")
    with _reading(path) as file:
        if not set(PROJECTIONS) <= set(file):
            raise ValueError(f"{path} holds no {wanted}, got {_contents(file)}; give a projection file")
        x, y = (np.asarray(file[name][()], dtype=float).ravel() for name in PROJECTIONS)
    if len(x) != len(y) or not len(x):
        raise ValueError(f"{path} has {len(x)} and {len(y)} coordinates, expected equally many, at least one")
    return ProjectedTrajectory(np.stack([x, y]), np.full(len(x), np.nan))


def trajectory_file(trajectory: ProjectedTrajectory) -> bytes:
    """A trajectory in that tool's layout, in the units of the surface's axes."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        for name, values in zip(PROJECTIONS, trajectory.positions, strict=True):
            file[name] = values
    return content.getvalue()


def read_directions(
    path: Path, parameters: Mapping[str, tuple[int, ...]], state: Mapping[str, tuple[int, ...]]
) -> list[dict[str, np.ndarray]]:
    """The one or two directions in a file, by parameter name.

    `parameters` and `state` are the shapes of the model's parameters and of its state dict, in order.

    Raises:
        ValueError: it holds no directions, or those of another model; names the first tensor that differs.
    """
    if not h5py.is_hdf5(path):
        raise ValueError(
            f"{path} is not an HDF5 file; give a direction file with xdirection and ydirection, or, for a plane "
            f"through checkpoints, two of them: --plane {path},OTHER.pt"
        )
    with _reading(path) as file:
        found = [name for name in ("xdirection", "ydirection") if isinstance(file.get(name), h5py.Group)]
        if "xdirection" not in found:
            raise ValueError(f"{path} holds no xdirection, got {_contents(file)}")
        return [_direction(path, file[name], parameters, state) for name in found]


def _direction(
    path: Path, group: h5py.Group, parameters: Mapping[str, tuple[int, ...]], state: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    where = group.name.strip("/")
    layouts = [layout for layout in (parameters, state) if len(layout) == len(group)]
    if not layouts:
        raise ValueError(
            f"{path} has {len(group)} tensors in {where}, expected the {len(parameters)} parameters of the model "
            f"(or the {len(state)} entries of its state dict); give a file made for this model"
        )
    arrays = [np.asarray(group[str(i)][()]) for i in range(len(group))]
    for i, ((name, shape), values) in enumerate(zip(layouts[0].items(), arrays, strict=True)):
        if values.shape != tuple(shape):
            got = f"{where}/{i} is {values.shape}"
            raise ValueError(f"{path} is of another architecture: {got}, expected {tuple(shape)} of {name}")
        if name not in parameters and values.any():
            raise ValueError(
                f"{path} moves {name}, which is not a parameter; give directions of weights (its --dir_type weights)"
            )
    named = zip(layouts[0], arrays, strict=True)
    return {name: values for name, values in named if name in parameters and values.any()}


def _contents(file: h5py.File) -> str:
    return ", ".join(list(file)[:6]) or "nothing"


def _text(file: h5py.File, key: str) -> str:
    value = file[key][()] if key in file else b""
    return Path(value.decode() if isinstance(value, bytes) else str(value)).name
