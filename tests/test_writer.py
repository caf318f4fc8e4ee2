"""The results file: its format, what kills and full disks do to it, who may write it, and what it refuses."""

import errno
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import counting
import forked
import h5py
import numpy as np
import pytest
import xarray as xr
from counting import assert_complete, group_of, leftovers, measured, small, stopped

from landscape.results import group as groups
from landscape.results import hdf5_file
from landscape.results.journal import Busy, Journal
from landscape.results.unmerged_journals import merge_orphans
from landscape.results.updating import locked
from landscape.results.writer import Writer, discard


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.h5"


# --- the format ---


def test_every_axis_of_every_dataset_has_one_scale_named_like_its_dimension(path: Path) -> None:
    measured(path, small())
    dimensions = {"value": ("x", "y"), "vector": ("x", "y", "bin"), "done": ("x", "y"), "name": ("x",), "total": ()}
    with h5py.File(path) as file:
        group = file["counting/toy-0123456789"]
        assert set(group) == {*dimensions, "x", "y", "bin"}
        for name, dims in dimensions.items():
            scales = [list(axis.values()) for axis in group[name].dims]
            assert [[scale.name.rpartition("/")[2] for scale in axis] for axis in scales] == [[dim] for dim in dims]
        assert all(group[axis].is_scale for axis in ("x", "y", "bin"))


def test_root_says_format_1_and_a_group_says_what_made_it(path: Path) -> None:
    measured(path, small())
    with h5py.File(path) as file:
        assert file.attrs["format"] == 1
        assert isinstance(file.attrs["format"], np.integer)
        group = file["counting/toy-0123456789"]
        wanted = {"probe": "counting", "label": "toy", "parameters": "{}", "epoch": 3.0, "colour": "red", "weight": 1.5}
        assert {name: group.attrs[name] for name in wanted} == wanted
        assert group.attrs["created"] <= group.attrs["finished"]
        about = {name: (item.attrs["long_name"], item.attrs["units"]) for name, item in group.items()}
    assert about["value"] == ("a number", "nats")
    assert about["vector"] == ("three numbers", "m")
    assert about["x"] == ("first coordinate", "m")
    assert about["y"] == ("y", "1")


def test_numbers_are_float64_done_is_uint8_and_unfinished_is_nan(path: Path) -> None:
    key = small()
    with Writer(path, key) as writer:
        for unit in writer.pending()[:5]:
            writer.write(unit, counting.values(unit))
    found = group_of(path, key)
    assert {name: found[name].dtype for name in ("value", "vector", "total")} == dict.fromkeys(
        ("value", "vector", "total"), np.dtype("float64")
    )
    assert found["done"].dtype == np.uint8
    assert found["done"].ravel().tolist() == [1] * 5 + [0] * 7
    np.testing.assert_array_equal(np.isnan(found["value"]), found["done"] == 0)
    np.testing.assert_array_equal(np.isnan(found["vector"]).all(axis=-1), found["done"] == 0)
    assert np.isnan(found["total"])  # no reduction was given
    assert groups.attribute(path, "counting/toy-0123456789", "finished") == ""


@pytest.mark.parametrize("lacking", ["vector", "name", "bin", "total"])
@pytest.mark.parametrize("units", [1, 12])
def test_a_stored_result_that_lacks_an_array_is_refused_in_one_line(path: Path, lacking: str, units: int) -> None:
    stopped(path, small(), units)
    with h5py.File(path, "r+") as file:
        del file["counting/toy-0123456789"][lacking]
    before = path.read_bytes()
    said = rf"not as landscape writes it \(it lacks {lacking}\); give --overwrite to measure it"
    with pytest.raises(ValueError, match=said), Writer(path, small()) as writer:
        writer.pending()
    assert path.read_bytes() == before
    discard(path, small())
    measured(path, small())
    assert_complete(path, small())


# --- resuming ---


@pytest.mark.parametrize("after", [0, 1, 7, 12])
def test_a_run_key_stopped_after_any_unit_resumes_with_the_next(path: Path, after: int) -> None:
    key = small()
    stopped(path, key, after)
    with Writer(path, key, reduce_of=counting.reduce_of) as writer:
        pending = writer.pending()
        assert [unit.index for unit in pending] == [unit.index for unit in key.plan.units()][after:]
        for unit in reversed(pending):
            writer.write(unit, counting.values(unit))
    assert_complete(path, key)
    assert leftovers(path) == []


def test_units_merge_twice_without_harm(path: Path) -> None:
    key = small()
    stopped(path, key, 5)
    journal = path.with_name(f"{path.name}.journal-{key.digest}")
    before = journal.read_bytes()
    stopped(path, key, 0)
    journal.write_bytes(before)  # a kill between the replacement of the file and the clearing of the journal
    counting.measure_pending(path, key)
    assert_complete(path, key)


def test_a_value_that_the_plan_does_not_promise_is_refused(path: Path) -> None:
    key = small()
    with (
        pytest.raises(ValueError, match=r"measured \['value'\], its plan promises \['value', 'vector'\]"),
        Writer(path, key) as writer,
    ):
        writer.write(key.plan.unit((0, 0)), {"value": 1.0})
    with (
        pytest.raises(ValueError, match=r"measured vector of shape \(9,\), its plan promises"),
        Writer(path, key) as writer,
    ):
        writer.write(key.plan.unit((0, 0)), {"value": 1.0, "vector": np.zeros(9)})  # before it is in the journal


def test_a_quantity_over_an_axis_that_the_plan_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="a quantity over tensr, and no such axis; it has bin, "):
        small().plan.axis("tensr")


def test_units_of_another_plan_are_not_mixed_in(path: Path) -> None:
    measured(path, small())
    other = counting.run_key(shape=(2, 3))
    with (
        pytest.raises(ValueError, match=r"has \(4, 3\) units, expected \(2, 3\).*--overwrite"),
        Writer(path, other) as w,
    ):
        w.pending()


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_that_was_acknowledged(path: Path) -> None:
    key = counting.run_key()
    moments = random.Random(0)
    acknowledged: list[str] = []
    kills = 0
    while True:
        with forked.Popen(["-c", counting.program(path, key)]) as child:
            child.wait_for("ready\n")
            time.sleep(moments.uniform(0, 0.012))  # of the third of a second that a quiet machine needs for all
            if kills < 15:  # then one process may go on to the end
                child.kill()
            killed = child.wait() != 0
            kills += killed
            acknowledged += [line for line in child.printed().splitlines() if line not in ("ready", "end")]
        if not killed:
            break
    assert kills >= 15
    units = [" ".join(map(str, unit.index)) for unit in key.plan.units()]
    # in order, none twice; a unit may have been safe before it could be acknowledged
    assert len(set(acknowledged)) == len(acknowledged)
    assert len(units) - kills <= len(acknowledged) <= len(units)
    assert set(acknowledged) <= set(units)
    assert_complete(path, key)
    assert leftovers(path) == []


# --- several writers and readers ---


def test_the_same_run_key_twice_is_busy(path: Path) -> None:
    key = small()
    with Writer(path, key) as first:
        first.write(key.plan.unit((0, 0)), counting.values(key.plan.unit((0, 0))))
        with pytest.raises(Busy, match=r"result \(counting, toy\) is being measured .* another process; .*--out"):
            Writer(path, key)
        with pytest.raises(Busy):
            discard(path, key)
    assert group_of(path, key)["done"].sum() == 1


@pytest.mark.slow
def test_two_processes_with_different_run_keys_both_end_complete(path: Path) -> None:
    keys = [counting.run_key(digest=digit * 10) for digit in "ab"]
    processes = [forked.Popen(["-c", counting.program(path, key)]) for key in keys]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
    for key in keys:
        assert_complete(path, key)
    assert leftovers(path) == []


def test_a_merge_adopts_the_journals_of_the_dead_and_leaves_those_of_the_living(path: Path) -> None:
    dead, living, merging = (small(digest=digit * 10) for digit in "abc")
    stopped(path, dead, 5)
    with Writer(path, living, reduce_of=counting.reduce_of) as writer:
        unit = living.plan.unit((1, 1))
        writer.write(unit, counting.values(unit))
        counting.measure_pending(path, merging)
        assert group_of(path, dead)["done"].sum() == 5
        assert group_of(path, dead)["total"] == pytest.approx(np.nansum(group_of(path, dead)["value"]))
        assert group_of(path, living)["done"].sum() == 0
        assert leftovers(path) == [f"{path.name}.journal-{living.digest}"]
    assert group_of(path, living)["done"].sum() == 1
    assert_complete(path, merging)


def test_a_journal_outlives_its_results_file(path: Path) -> None:
    key = small()
    stopped(path, key, 5)
    path.unlink()
    merge_orphans(path, reduce_of=counting.reduce_of)
    assert group_of(path, key)["done"].sum() == 5
    assert leftovers(path) == []


def test_a_name_with_wildcards_finds_its_journals(tmp_path: Path) -> None:
    path = tmp_path / "run[1]*.h5"
    stopped(path, small(digest="a" * 10), 5)
    counting.measure_pending(path, small())
    assert group_of(path, small(digest="a" * 10))["done"].sum() == 5


@pytest.mark.slow
def test_a_journal_that_is_being_adopted_is_waited_for(path: Path) -> None:
    key = small()
    stopped(path, key, 5)
    opened = threading.Event()

    def adopt() -> None:  # as a merge of another process does, slowly
        with locked(path), Journal(path.with_name(f"{path.name}.journal-{key.digest}")):
            opened.set()
            time.sleep(0.2)

    other = threading.Thread(target=adopt)
    other.start()
    opened.wait()
    counting.measure_pending(path, key)
    other.join()
    assert_complete(path, key)


@pytest.mark.campaign
def test_a_concurrent_reader_never_sees_a_broken_file(path: Path) -> None:
    key = counting.run_key()
    measured(path, small(digest="a" * 10))
    seen = []
    with forked.Popen(["-c", counting.program(path, key, rest=0.2)]) as child:  # time for the reader between merges
        while child.poll() is None:
            with xr.open_datatree(path, engine="h5netcdf") as tree:
                if "toy-0123456789" in tree["counting"].children:
                    data = tree["counting/toy-0123456789"].to_dataset().load()
                    seen.append(int(data["done"].sum()))
                    np.testing.assert_array_equal(np.isfinite(data["value"]), data["done"] == 1)
    assert seen == sorted(seen)
    assert len(set(seen)) > 2  # the reader did watch it grow


def test_a_reader_that_stays_open_blocks_no_writer(path: Path) -> None:
    measured(path, small(digest="a" * 10))
    with h5py.File(path, "r"):  # with HDF5's own lock
        measured(path, small())
    assert_complete(path, small())


def test_overwriting_removes_one_result(path: Path) -> None:
    kept, gone = small(digest="a" * 10), small()
    measured(path, kept)
    measured(path, gone)
    discard(path, gone)
    assert groups.stored_group(path, "counting", gone.digest) is None
    assert_complete(path, kept)
    discard(path, gone)  # nothing there is no error
    discard(path.parent / "none" / "results.h5", gone)
    assert leftovers(path) == []


# --- refused files ---


def hdf5(path: Path, **attributes: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("numbers", data=np.arange(1000))
        file.attrs.update(attributes)


def truncated(path: Path) -> None:
    hdf5(path, format=1)
    path.write_bytes(path.read_bytes()[:2500])


REFUSED = {
    "text": (
        lambda path: path.write_text("x,y,loss\n0,0,1\n"),
        r"not an HDF5 file; give (a file that a probe wrote|another --out)",
    ),
    "empty": (lambda path: path.write_bytes(b""), r"not an HDF5 file"),
    "no format": (hdf5, r"not a results file of landscape \(no attribute format\)"),
    "format in words": (lambda path: hdf5(path, format="1"), r"no attribute format"),
    "newer format": (lambda path: hdf5(path, format=2), r"format 2, this version reads format 1; update landscape"),
    "truncated": (truncated, r"is damaged .*truncated.*; save what is intact with: landscape repair "),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_not_ours_is_refused_in_one_line_and_left_as_it_is(path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    make(path)  # type: ignore[no-untyped-call]
    before = path.read_bytes()
    for refused in (lambda: hdf5_file.check(path), lambda: Writer(path, small()), lambda: discard(path, small())):
        with pytest.raises(ValueError, match=message) as caught:
            refused()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert leftovers(path) == []


def test_a_folder_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ValueError, match=r"is a folder, expected an HDF5 results file"):
        Writer(path, small())


def test_a_read_only_file_is_refused_for_root_too_and_still_read(path: Path) -> None:
    measured(path, small())
    before = path.read_bytes()
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=r"is read-only; make it writable \(chmod u\+w\)"):
        Writer(path, small(digest="a" * 10))
    assert_complete(path, small())
    assert path.read_bytes() == before
    assert leftovers(path) == []


def test_what_was_finished_outlives_a_folder_that_cannot_be_written_any_more(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, key = os.open, small()

    def refused(name: Any, *arguments: Any, **options: Any) -> int:
        if str(name).endswith(".lock"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return real(name, *arguments, **options)

    said = r"cannot write .*results\.h5: its folder cannot be written \(Permission denied\); make it writable, or give "
    with Writer(path, key) as writer:
        (unit, *_) = writer.pending()
        writer.write(unit, counting.values(unit))
        monkeypatch.setattr(os, "open", refused)
        with pytest.raises(OSError, match=said + r"another --out; what was finished is kept in results\.h5\.journal-"):
            writer.merge()
        monkeypatch.undo()
        assert set(leftovers(path)) == {writer._journal.path.name}
    with Writer(path, key) as writer:
        assert unit not in writer.pending()


def test_a_missing_file_is_no_error_for_a_writer_and_one_for_a_reader(path: Path) -> None:
    hdf5_file.check(path, writable=True)
    with pytest.raises(FileNotFoundError, match=r"no results file at .*; run a probe first"):
        hdf5_file.check(path)


# --- full disks ---

LIMITED = """
import resource
from pathlib import Path
import counting
resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
try:
    counting.measure_pending(Path(PATH), counting.run_key(), merge_every=10_000)
except OSError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("room", "kept"), [(0, False), (19, False), (2_000, False), (30_000, False), (60_000, True)])
def test_a_full_disk_leaves_the_file_and_the_journal_and_a_rerun_completes(path: Path, room: int, kept: bool) -> None:
    earlier = small(digest="a" * 10)
    measured(path, earlier)
    code = forked.BESIDE + LIMITED.replace("ROOM", str(room)).replace("PATH", repr(str(path)))
    with forked.Popen(["-c", code]) as child:
        said, errors = child.communicate(timeout=300)
    assert (child.returncode, errors) == (0, "")
    assert said.startswith("cannot write ")
    assert said.count("\n") == 1
    assert_complete(path, earlier)
    key = counting.run_key()
    assert all(name.startswith(f"{path.name}.journal-") for name in leftovers(path))
    with Writer(path, key, reduce_of=counting.reduce_of) as writer:
        assert (len(writer.pending()) < 1000) == kept  # the merged file is of 58 kB; a journal as long holds 300 units
        for unit in writer.pending():
            writer.write(unit, counting.values(unit))
    assert_complete(path, key)
    assert leftovers(path) == []
