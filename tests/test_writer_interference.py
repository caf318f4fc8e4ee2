"""What others do to a results file and its journals: damage them, put files and links in their place, delete them."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import counting
import numpy as np
import pytest
import synthetic
from counting import assert_complete, expected, group_of, leftovers, measured, small, stopped

from landscape.cli.main import exit_code
from landscape.plots import drawing
from landscape.plots.comparison import text
from landscape.results import writer as writing
from landscape.results.journal import Journal, Record
from landscape.results.replacing import replacing
from landscape.results.run_key import RunKey, to_header
from landscape.results.unmerged_journals import merge_orphans
from landscape.results.writer import Writer, discard


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.h5"


# --- journals that cannot be read, and what is not ours ---


def spoilt(kind: str, content: bytes) -> bytes:
    if kind == "turned bit":
        middle = content.index(b'{"data": {"index": [0, 2]')
        return content[:middle] + b"X" + content[middle + 1 :]
    return {
        "random bytes": np.random.default_rng(0).bytes(1000),
        "text": b"notes\n" * 20,
        "newer format": content.replace(b"journal 1", b"journal 2"),
        "another result": content.replace(b"0123456789", b"fedcba9876"),
    }[kind]


@pytest.mark.parametrize("kind", ["turned bit", "random bytes", "text", "newer format", "another result"])
@pytest.mark.parametrize("own", [True, False])
def test_a_journal_that_cannot_be_read_is_kept_and_said(
    path: Path, kind: str, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    key = small()
    stopped(path, key, 5)
    journal = path.with_name(f"{path.name}.journal-{key.digest}")
    if kind == "another result":  # a whole journal under the name of this one
        other = small(digest="fedcba9876")
        stopped(path.with_name("other.h5"), other, 5)
        path.with_name("other.h5").unlink()
        content = path.with_name(f"other.h5.journal-{other.digest}").rename(journal).read_bytes()
    else:
        content = spoilt(kind, journal.read_bytes())
        journal.write_bytes(content)
    if own:
        with Writer(path, key, reduce_of=counting.reduce_of) as writer:
            left = len(writer.pending())
    else:
        merge_orphans(path, reduce_of=counting.reduce_of)
        left = 12 - int(group_of(path, key)["done"].sum())
    assert left == (12 - 4 if kind == "turned bit" else 12)
    kept = path.with_name(f"{path.name}.unreadable-{key.digest}")
    assert leftovers(path) == [kept.name]
    assert kept.read_bytes() == content
    said = {"turned bit": "about 1 of 6 records cannot be read", "another result": "belongs to counting fedcba9876"}
    assert said.get(kind, "no journal of this version") in caplog.text
    assert f"the whole file is kept as {kept.name}" in caplog.text


def test_a_journal_under_another_name_changes_no_finished_result(path: Path) -> None:
    key = small()
    before = measured(path, key)
    with Journal(path.with_name(f"{path.name}.journal-fedcba9876")) as journal:
        journal.append(to_header(key))
        journal.append(Record({"index": [0, 0]}, {"value": np.float64(1.0), "vector": np.ones(3)}))
    merge_orphans(path, reduce_of=counting.reduce_of)
    assert leftovers(path) == [f"{path.name}.unreadable-fedcba9876"]
    path.with_name(leftovers(path)[0]).rename(path.with_name(f"{path.name}.journal-{key.digest}"))
    merge_orphans(path, reduce_of=counting.reduce_of)  # the right name, but the unit is finished
    for name, values in before.items():
        np.testing.assert_array_equal(group_of(path, key)[name], values)


@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_file_that_another_replaces_at_any_moment_gets_every_unit(
    path: Path, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other, merged = small(), small(digest="fedcba9876"), []
    measured(path.with_name("other.h5"), other)

    def replaced(*arguments: Any) -> Any:
        found = update(*arguments)
        merged.append(path)
        if len(merged) == when:  # just behind a merge, as `cp other.h5 results.h5` does
            path.write_bytes(path.with_name("other.h5").read_bytes())
        return found

    update = writing.update
    monkeypatch.setattr(writing, "update", replaced)
    counting.measure_pending(path, key, merge_every=5)
    assert_complete(path, key)
    assert leftovers(path) == ["other.h5"]


def test_a_file_whose_name_begins_like_a_journal_is_never_touched(path: Path) -> None:
    notes = [path.with_name(f"{path.name}.journal-{end}") for end in ("notes", "2026-01-01.txt", "0123456789.bak")]
    for file in notes:
        file.write_text("mine")
    folder = path.with_name(f"{path.name}.journal-{'e' * 10}")
    folder.mkdir()
    measured(path, small())
    merge_orphans(path, reduce_of=counting.reduce_of)
    discard(path, small())
    assert [file.read_text() for file in notes] == ["mine"] * 3
    assert leftovers(path) == sorted(file.name for file in (*notes, folder))


@pytest.mark.parametrize("name", [".results.h5.merging", "results.h5.journal-0123456789", "results.h5.lock"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_with_the_name_of_one_of_our_files_leads_no_write_to_its_target(
    path: Path, tmp_path: Path, name: str, there: bool
) -> None:
    target = tmp_path / "elsewhere" / "precious"
    target.parent.mkdir()
    if there:
        target.write_text("precious")
    (tmp_path / name).symlink_to(target)
    if name.endswith("merging"):  # what a kill leaves behind there is replaced
        measured(path, small())
        assert_complete(path, small())
    else:
        with pytest.raises(OSError, match="move it away"):
            Writer(path, small())
    assert [file.read_text() for file in target.parent.iterdir()] == ["precious"] * there


def test_a_users_own_link_stays_a_link_and_leads_to_the_results(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    path, target = tmp_path / "results.h5", tmp_path / "disk" / "data.h5"
    path.symlink_to(target)  # of a file that is not there yet
    for key in (small(), small(digest="a" * 10)):
        stopped(path, key, 3)
        merge_orphans(path, reduce_of=counting.reduce_of)
        measured(path, key)
        assert_complete(target, key)
    assert path.is_symlink()
    assert leftovers(target) == []
    assert leftovers(path) == ["disk"]


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_of_the_umask_and_an_old_one_keeps_its_own(
    path: Path, mask: int, mode: int
) -> None:
    before = os.umask(mask)
    try:
        with Writer(path, small()):
            files = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
        assert files == {path.name: mode, f"{path.name}.journal-0123456789": mode}
        path.chmod(0o640)
        measured(path, small())
        assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


# --- a file that somebody deletes or replaces during a run ---


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_units_that_the_file_lost_during_a_run_are_written_again(
    path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    key, other = small(), small(digest="a" * 10)
    measured(path.with_name("other.h5"), other)
    stopped(path, key, 2)
    with Writer(path, key, reduce_of=counting.reduce_of) as writer:
        pending = writer.pending()
        for unit in pending:
            writer.write(unit, counting.values(unit))
            if unit is pending[5]:
                writer.merge()
                path.unlink()
                if how == "replaced":
                    path.with_name("other.h5").rename(path)
    assert_complete(path, key)
    if how == "replaced":
        assert_complete(path, other)
    assert "was deleted or replaced; its 8 units are written again" in caplog.text


def replaced_by_text(path: Path, key: RunKey) -> None:
    """A run in which somebody saves a text under the name of the results after six of nine units."""
    with Writer(path, key, reduce_of=counting.reduce_of) as writer:
        for count, unit in enumerate(writer.pending()[:9]):
            writer.write(unit, counting.values(unit))
            if count == 5:
                writer.merge()
                path.write_text("a letter")


def test_a_file_that_took_the_place_of_the_results_is_not_replaced_and_nothing_is_lost(path: Path) -> None:
    key = small()
    with pytest.raises(ValueError, match=r"not an HDF5 file; .*; what was measured is kept in results\.h5\.journal-0"):
        replaced_by_text(path, key)
    assert path.read_text() == "a letter"
    path.unlink()
    with Writer(path, key, reduce_of=counting.reduce_of) as writer:
        assert len(writer.pending()) == 3
    np.testing.assert_array_equal(group_of(path, key)["value"].ravel()[:9], expected(key)["value"].ravel()[:9])


def test_a_file_that_is_replaced_during_a_merge_keeps_what_it_has_then(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = small(), small(digest="a" * 10)
    measured(path.with_name("other.h5"), other)
    reduce = counting.reduce_of("counting", {})
    assert reduce is not None

    def replaced(data: Any) -> Any:  # by a program that knows no locks, once
        if path.with_name("other.h5").exists():
            path.with_name("other.h5").rename(path)
        return reduce(data)

    with Writer(path, key, reduce_of=lambda probe, parameters: replaced) as writer:
        for unit in writer.pending():
            writer.write(unit, counting.values(unit))
    assert_complete(path, key)
    assert_complete(path, other)


# --- Files are replaced by files alone: a device, a pipe or a folder in the place of an output stays what it is ---


KINDS: dict[str, Callable[[Path], object]] = {"pipe": os.mkfifo, "folder": Path.mkdir}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_regular_file_is_left_in_its_place(kind: str, linked: bool, tmp_path: Path) -> None:
    place = tmp_path / "out"
    KINDS[kind](place)
    out = tmp_path / "link" if linked else place
    if linked:
        out.symlink_to(place)
    before = stat.S_IFMT(place.stat().st_mode)
    with pytest.raises(OSError, match="not a regular file"), replacing(out) as stream:
        stream.write(b"text")
    assert stat.S_IFMT(place.stat().st_mode) == before
    assert sorted(tmp_path.iterdir()) == sorted({place, out})


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["report", "compare --no-store", "merge", "export --format csv", "animate"], ids=lambda c: c.split()[0]
)
def test_every_command_that_writes_a_file_refuses_a_device_before_it_works(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("surface",))
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    monkeypatch.setattr(drawing, "draw", None)
    monkeypatch.setattr(text, "compare", None)
    word, *options = command.split()
    assert exit_code([word, str(results), *options, "--out", str(device)]) != 0
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    assert "NoneType" not in said[0]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
