"""The journal: what survives torn tails, flipped bits and killed writers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from landscape.results.journal import MAGIC, Busy, Journal, Record, records_of

HOLD = """
import sys, time
from pathlib import Path
from landscape.results.journal import Journal, Record
with Journal(Path(sys.argv[1])) as journal:
    journal.append(Record({"index": [0]}, {}))
    print("held", flush=True)
    time.sleep(60)
"""


def record(number: int) -> Record:
    arrays = {
        "matrix": np.random.default_rng(number).normal(size=(2, 3)), "scalar": np.float64(number),
        "none": np.zeros((0, 4)), "name": np.array(["MSA", "größer"]), "flag": np.array([True, False]),
    }  # fmt: skip
    return Record({"index": [number, 7], "nan": None}, arrays)


def write(path: Path, count: int) -> list[int]:
    """A journal of so many records; the sizes of the file after each."""
    with Journal(path) as journal:
        sizes = [path.stat().st_size]
        for number in range(count):
            journal.append(record(number))
            sizes.append(path.stat().st_size)
    return sizes


def read(path: Path) -> list[Record]:
    with Journal(path) as journal:
        return list(journal.records())


def assert_are_first_records(found: list[Record], count: int) -> None:
    assert [entry.data["index"][0] for entry in found] == list(range(count))
    for number, entry in enumerate(found):
        wanted = record(number).arrays
        assert list(entry.arrays) == list(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(entry.arrays[name], array)
            assert entry.arrays[name].dtype == np.asarray(array).dtype


def test_records_come_back_in_order_with_shapes_and_dtypes(tmp_path: Path) -> None:
    write(tmp_path / "journal", 5)
    assert_are_first_records(read(tmp_path / "journal"), 5)


def test_a_tail_torn_at_any_byte_is_cut_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3)
    whole = path.read_bytes()
    for end in range(sizes[2], sizes[3]):
        path.write_bytes(whole[:end])
        with Journal(path) as journal:
            assert path.stat().st_size == sizes[2]
            journal.append(record(2))
        assert path.read_bytes() == whole


def test_a_head_torn_at_any_byte_starts_an_empty_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for end in range(len(MAGIC)):
        path.write_bytes(MAGIC[:end])
        assert read(path) == []
        assert path.read_bytes() == MAGIC


@pytest.mark.parametrize("records", [2, 0])
def test_random_bytes_behind_the_records_are_cut_and_alone_are_an_empty_journal(records: int, tmp_path: Path) -> None:
    path, whole = tmp_path / "journal", b""
    if records:
        write(path, records)
        whole = path.read_bytes()
    random = np.random.default_rng(records)
    for length in [*range(20), *random.integers(20, 200, 40)]:
        path.write_bytes(whole + random.bytes(length))
        assert_are_first_records(read(path), records)


def test_zeros_behind_the_records_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal"  # a power cut leaves them; eight are a head of length 0 with its right CRC
    write(path, 2)
    whole = path.read_bytes()
    for zeros in (1, 8, 16, 4096):
        path.write_bytes(whole + bytes(zeros))
        assert_are_first_records(read(path), 2)


def test_a_flipped_bit_anywhere_in_a_record_costs_that_record_alone_and_is_said(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3)
    whole = path.read_bytes()
    for position in range(sizes[1], sizes[2]):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with Journal(path) as journal:
            assert [entry.data["index"][0] for entry in journal.records()] == [0, 2]
            assert journal.unreadable.startswith("about 1 of 3 records cannot be read")
            with pytest.raises(ValueError, match="must be set aside"):
                journal.append(record(3))
        assert path.read_bytes() == damaged


NO_JOURNALS = {
    "text": b"remember the milk\n" * 10,
    "newer": b"landscape journal 2\n" + bytes(range(100)),
    "random": np.random.default_rng(0).bytes(300),
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("kind", NO_JOURNALS)
def test_what_is_no_journal_is_left_as_it_is_until_it_is_set_aside(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "r.h5.journal-0"
    for kept in ("r.h5.unreadable-0", "r.h5.unreadable-0-2"):
        path.write_bytes(NO_JOURNALS[kind])
        with Journal(path) as journal:
            assert list(journal.records()) == []
            assert f"its {len(NO_JOURNALS[kind]):,} bytes are no journal" in journal.unreadable
            assert path.read_bytes() == NO_JOURNALS[kind]
            assert journal.set_aside() == tmp_path / kept
            journal.append(record(0))
        assert (tmp_path / kept).read_bytes() == NO_JOURNALS[kind]
        assert_are_first_records(read(path), 1)


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_a_link_a_folder_or_a_pipe_with_the_name_of_a_journal_is_refused(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "journal", tmp_path / "precious"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("precious")
    with pytest.raises(OSError, match="is not a file of this program, whose name it has; move it away"):
        Journal(path)
    with pytest.raises(OSError, match="journal"):
        records_of(path)
    assert (target.read_text() if kind == "link" else target.exists()) == ("precious" if kind == "link" else False)


def test_a_journal_is_read_while_its_writer_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for number in range(2):
            journal.append(record(number))
        before = path.read_bytes()
        assert_are_first_records(records_of(path), 2)
        path.write_bytes(before + b"torn")
        assert_are_first_records(records_of(path), 2)
    assert path.read_bytes() == before + b"torn"


def test_synced_records_are_flushed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_size))
    with Journal(tmp_path / "journal", sync=True) as journal:
        journal.append(record(0))
        journal.append(record(1))
    assert flushed == sorted(set(flushed))
    assert len(flushed) == 3  # its head, and each record


def test_clear_forgets_records_and_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, 3)
    with Journal(path) as journal:
        journal.clear()
        assert list(journal.records()) == []
        with pytest.raises(Busy):
            Journal(path)
        journal.append(record(0))
        assert_are_first_records(list(journal.records()), 1)


def test_a_removed_journal_frees_its_name_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path) as first:
        first.remove()
        with Journal(path) as second:
            second.append(record(0))
            assert list(first.records()) == []
    assert_are_first_records(read(path), 1)


def test_a_short_write_is_a_full_disk_and_what_was_whole_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    write_all = os.pwrite
    with Journal(path) as journal:
        journal.append(record(0))
        monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: write_all(handle, data[:-1], offset))
        with pytest.raises(OSError, match=r"the disk is full; free some space"):
            journal.append(record(1))
        with pytest.raises(OSError, match=r"the disk is full"):
            Journal(tmp_path / "other")
        monkeypatch.undo()
        assert_are_first_records(list(journal.records()), 1)
        journal.append(record(1))
    assert_are_first_records(read(path), 2)
    assert read(tmp_path / "other") == []  # its failed opening kept no lock


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        before = path.read_bytes()
        with pytest.raises(Busy, match="another process"):
            Journal(path)
        assert path.read_bytes() == before
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert [entry.data for entry in read(path)] == [{"index": [0]}]
