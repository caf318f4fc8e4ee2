"""A series grows row by row, survives kills, and holds every coordinate once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from landscape.probe import Plan, Quantity
from landscape.results import reader
from landscape.results import unmerged_journals as standings
from landscape.results.journal import Busy, Journal, Record
from landscape.results.merging import merge_files
from landscape.results.run_key import RunKey, to_header
from landscape.results.series import SeriesWriter
from landscape.results.unmerged_journals import merge_orphans

PLAN = Plan(
    over={"step": np.array([], np.int64)},
    axes={"rank": np.arange(2)},
    quantities={"loss": Quantity("loss"), "eigenvalue": Quantity("eigenvalue", dims=("rank",))},
    labels={"weight": (Quantity("weight", dims=("rank",)), np.array([1.0, 2.0]))},
    grows=True,
)
KEY = RunKey("monitor", "a run", "0123456789", PLAN, {"parameters": "{}", "versions": "{}"})


def row(at: int) -> dict[str, Any]:
    return {"loss": 1.0 / (1 + at), "eigenvalue": [at, -at]}


def stored(path: Path) -> xr.Dataset:
    ((_, data),) = reader.groups(path)
    return data


def merge(path: Path) -> None:
    merge_orphans(path, reduce_of=lambda probe, parameters: None)


def test_rows_are_appended_replaced_and_opened_by_xarray(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "r.h5", KEY)
    assert stored(tmp_path / "r.h5").sizes["step"] == 0
    for at in range(0, 3000, 10):
        writer.write(at, row(at))
    writer.merge()
    writer.write(10, {"loss": -1.0, "eigenvalue": [5, 6]})
    writer.close()
    data = xr.open_dataset(tmp_path / "r.h5", group=writer.group, engine="h5netcdf")
    assert data["step"].values.tolist() == list(range(0, 3000, 10))
    assert data["loss"].values[[0, 1, 2]].tolist() == [1.0, -1.0, 1 / 21]
    assert data["eigenvalue"].dims == ("step", "rank")
    assert data["done"].values.all()
    assert data["weight"].values.tolist() == [1.0, 2.0]
    assert data.attrs["finished"]


@pytest.mark.slow
def test_a_file_that_is_merged_often_does_not_grow(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "r.h5", KEY)
    writer.write(0, row(0))
    writer.merge()
    size = (tmp_path / "r.h5").stat().st_size
    for at in range(1, 25):
        writer.write(at, row(at))
        writer.merge()
    assert (tmp_path / "r.h5").stat().st_size == size


def test_a_kill_loses_no_row_and_a_resumed_run_drops_those_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    writer = SeriesWriter(path, KEY)
    for at in (0, 10, 20):
        writer.write(at, row(at))
    with pytest.raises(Busy, match=r"is being written into .* by another process or monitor; close that one, or give"):
        SeriesWriter(path, KEY)
    writer.release()  # as a kill would
    (journal,) = tmp_path.glob("*.journal-*")
    content = journal.read_bytes()
    merge(path)
    assert stored(path)["step"].values.tolist() == [0, 10, 20]
    assert not stored(path).attrs["finished"]
    journal.write_bytes(content[:-3])  # torn at its end, and merged twice: every row is there once
    writer = SeriesWriter(path, KEY, after=10)
    assert stored(path)["step"].values.tolist() == [0, 10]
    writer.write(15, row(15))
    writer.release()
    merge(path)
    assert stored(path)["step"].values.tolist() == [0, 10, 15]


def test_rows_are_written_again_into_a_file_that_was_deleted(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "r.h5", KEY)
    for at in (0, 1):
        writer.write(at, row(at))
    writer.merge()
    (tmp_path / "r.h5").unlink()
    writer.write(2, row(2))
    writer.close()
    assert stored(tmp_path / "r.h5")["step"].values.tolist() == [0, 1, 2]


def test_a_series_goes_on_in_a_file_that_another_command_copied(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "a.h5", KEY)
    writer.write(0, row(0))
    writer.close()
    merge_files([tmp_path / "a.h5"], tmp_path / "b.h5", reduce_of=lambda probe, parameters: None)
    created = stored(tmp_path / "b.h5").attrs["created"]
    writer = SeriesWriter(tmp_path / "b.h5", KEY)
    writer.write(1, row(1))
    writer.close()
    data = stored(tmp_path / "b.h5")
    assert data["step"].values.tolist() == [0, 1]
    assert data["eigenvalue"].values.tolist() == [[0, 0], [1, -1]]
    assert data.attrs["created"] == created


def test_what_does_not_belong_to_a_series_is_refused_or_set_aside(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "r.h5", KEY)
    with pytest.raises(ValueError, match=r"monitor measured \['loss'\], its plan promises \['eigenvalue', 'loss'\]"):
        writer.write(0, {"loss": 1.0})
    writer.close()
    with Journal(tmp_path / f"r.h5.journal-{KEY.digest}") as journal:
        journal.append(to_header(KEY))
        journal.append(Record({"at": 3}, {"loss": np.zeros(()), "eigenvalue": np.zeros(5)}))
    merge(tmp_path / "r.h5")
    assert [path.name for path in tmp_path.glob("*unreadable*")] == [f"r.h5.unreadable-{KEY.digest}"]
    assert stored(tmp_path / "r.h5").sizes["step"] == 0


def test_a_series_that_grows_is_never_said_to_lack_anything(tmp_path: Path) -> None:
    writer = SeriesWriter(tmp_path / "r.h5", KEY)
    writer.write(0, row(0))
    (one,) = standings.standings(tmp_path / "r.h5")
    assert (one.finished, one.missing()) == (one.done.size, "")
    writer.close()
