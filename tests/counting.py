"""A run key that needs no model, and a process that measures it: the tests of writer and journal kill it."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked
import h5py
import numpy as np

from landscape.probe import Plan, Quantity, Unit, Values
from landscape.results import group as groups
from landscape.results.run_key import Arrays, Reduce, RunKey
from landscape.results.writer import Writer

SMALL = (4, 3)  # units along both axes
# Words of quantities that cannot be negative.
NEVER_NEGATIVE = re.compile(
    r"share|accuracy(?! (drop|before|below))|loss(?!.* (minus|above|after|before|increase))|NC[134]|disagreement|"
    r"normalised mutual|(.* )?entropy of|(mean )?squared|.*\bFrobenius norm|.*heterogeneity"
)


def run_key(*, digest: str = "0123456789", label: str = "toy", shape: tuple[int, int] = (40, 25)) -> RunKey:
    """Units on two axes; per unit a number and a vector, per row a name, of all of them a sum."""
    plan = Plan(
        over={"x": np.linspace(-1, 1, shape[0]), "y": np.arange(shape[1])},
        axes={"bin": np.arange(3)},
        labels={"name": (Quantity("name of the row", dims=("x",)), np.array([f"row {i}" for i in range(shape[0])]))},
        quantities={"value": Quantity("a number", "nats"), "vector": Quantity("three numbers", "m", ("bin",))},
        summaries={"total": Quantity("sum of the finished numbers", "nats")},
        about={"x": Quantity("first coordinate", "m")},
        facts={"colour": "red", "weight": 1.5},
    )
    return RunKey("counting", label, digest, plan, {"parameters": "{}", "epoch": 3.0})


def values(unit: Unit) -> Values:
    """Numbers that belong to the unit alone."""
    numbers = np.random.default_rng(unit.seed(0)).normal(size=4)
    return {"value": numbers[0], "vector": numbers[1:]}


def everything(path: Path) -> dict[str, tuple[dict[str, Any], Arrays]]:
    with h5py.File(path) as file:
        stored = {name: (dict(group.attrs), groups.arrays(group)) for name, group in groups.results_in(file)}
    return stored


def assert_same_results(found: Path, wanted: Path) -> None:
    """The same groups, arrays, axes and attributes, but for the times."""
    mine, theirs = everything(found), everything(wanted)
    assert list(mine) == list(theirs)
    for name, (attributes, arrays) in theirs.items():
        assert list(mine[name][1]) == list(arrays)
        for quantity, values in arrays.items():
            np.testing.assert_array_equal(mine[name][1][quantity], values, err_msg=f"{name} {quantity}")
        times = ("created", "finished")
        about = [{k: str(v) for k, v in found.items() if k not in times} for found in (mine[name][0], attributes)]
        assert about[0] == about[1]
    from landscape.results import reader

    for (_, a), (_, b) in zip(reader.groups(found), reader.groups(wanted), strict=True):
        assert {n: v.dims for n, v in a.variables.items()} == {n: v.dims for n, v in b.variables.items()}
        assert {n: v.attrs for n, v in a.variables.items()} == {n: v.attrs for n, v in b.variables.items()}


def checked_error_counts(path: Path, group: str) -> dict[str, float]:
    """How many independent values each standard error of a result is of, which errors alone say.

    What cannot be negative says so, for its interval, or has the ends of its interval stored.
    """
    found = {}
    with h5py.File(path) as file:
        for name, stored in file[group].items():
            error = name == "se" or name.endswith("_se")
            assert (groups.OVER in stored.attrs, groups.N in stored.attrs) == (error, error), name
            of = file[group].get(name.removesuffix("_se"))
            if error and of is not None and f"{name.removesuffix('_se')}_low" not in file[group]:
                assert "bounds" in of.attrs or not NEVER_NEGATIVE.match(of.attrs["long_name"]), of.attrs["long_name"]
            if error:
                found[name] = float(stored.attrs[groups.N])
                assert found[name] >= 1 or not np.isfinite(stored[()]).any(), name
    return found


def reduce_of(probe: str, parameters: Mapping[str, Any]) -> Reduce | None:
    """The sum over finished units, for `counting` alone."""
    return (lambda data: {"total": np.nansum(data["value"])}) if probe == "counting" else None


def measure_pending(
    path: Path, key: RunKey, *, merge_every: int = 50, acknowledge: bool = False, rest: float = 0.0
) -> None:
    """Measure the pending units, merging every few and then sleeping `rest` s; prints the index of each stored unit."""
    with Writer(path, key, reduce_of=reduce_of) as writer:
        for count, unit in enumerate(writer.pending(), start=1):
            writer.write(unit, values(unit))
            if acknowledge:
                print(*unit.index, flush=True)
            if count % merge_every == 0:
                writer.merge()
                time.sleep(rest)


def small(**options: Any) -> RunKey:
    return run_key(shape=SMALL, **options)


def measured(path: Path, key: RunKey) -> Arrays:
    measure_pending(path, key)
    return group_of(path, key)


def group_of(path: Path, key: RunKey) -> Arrays:
    name = groups.stored_group(path, key.probe, key.digest)
    assert name is not None
    return groups.read_group(path, name)


def stopped(path: Path, key: RunKey, after: int) -> None:
    """A writer that leaves after so many units, as a kill does: nothing merged, its journal unlocked."""
    writer = Writer(path, key, reduce_of=reduce_of)
    for unit in writer.pending()[:after]:
        writer.write(unit, values(unit))
    writer._journal.__exit__(None, None, None)


def expected(key: RunKey) -> Arrays:
    """The group's numbers, recomputed."""
    units = list(key.plan.units())
    rows = [values(unit) for unit in units]
    shape = key.plan.shape
    value = np.array([row["value"] for row in rows]).reshape(shape)
    vector = np.array([row["vector"] for row in rows]).reshape(*shape, 3)
    return {"value": value, "vector": vector, "total": value.sum(), "done": np.ones(shape, np.uint8)}


def assert_complete(path: Path, key: RunKey) -> None:
    found = group_of(path, key)
    for name, array in expected(key).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-12, atol=0, err_msg=name)
    name = groups.stored_group(path, key.probe, key.digest)
    assert name is not None
    assert groups.attribute(path, name, "finished")


def leftovers(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir() if file != path)


def program(path: Path, key: RunKey, *, rest: float = 0.0) -> str:
    """Python code of a process that measures a run key and prints the index of each stored unit."""
    return f"""{forked.BESIDE}
from pathlib import Path
import counting
print("ready", flush=True)
counting.measure_pending(Path({str(path)!r}), counting.run_key(digest={key.digest!r}), acknowledge=True, rest={rest})
print("end", flush=True)
"""
