"""Repairing a damaged results file: every intact result is recovered, to the last bit, and what is gone is said."""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import counting
import h5py
import numpy as np
import pytest

from landscape.cli.main import exit_code
from landscape.results import group as groups
from landscape.results import repair as damaged_files
from landscape.results.children import Children
from landscape.results.repair import SUPERBLOCK, repair

pytestmark = pytest.mark.slow

DIGESTS = "abcde"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("study") / "results.h5"
    for digest in DIGESTS:
        counting.measure_pending(path, counting.run_key(shape=(20, 5), digest=digest * 10, label=f"net {digest}"))
    return path.read_bytes()


@pytest.fixture
def study(tmp_path: Path, measured: bytes) -> Path:
    (tmp_path / "results.h5").write_bytes(measured)
    return tmp_path / "results.h5"


def names(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return [name for name, _ in groups.results_in(file)]


def assert_recovered(path: Path, damaged: bytes, tmp_path: Path, *, at_least: int) -> None:
    whole = counting.everything(path)
    broken, out = tmp_path / "broken.h5", tmp_path / "new.h5"
    broken.write_bytes(damaged)
    found = repair(broken, out)
    assert broken.read_bytes() == damaged
    assert found.gone
    assert len(found.kept) >= at_least
    mine = counting.everything(out)
    assert sorted(mine) == found.kept
    for name, (attributes, arrays) in mine.items():
        assert name in whole
        assert {k: str(v) for k, v in attributes.items()} == {k: str(v) for k, v in whole[name][0].items()}
        for array, values in whole[name][1].items():
            np.testing.assert_array_equal(arrays[array], values)
    lost = set(whole) - set(mine)
    everywhere = any(words in line for words in ("list", "end of the file", "counting/*") for line in found.gone)
    assert everywhere or all(any(name in line for line in found.gone) for name in lost)


def test_a_file_that_was_cut_gives_the_results_before_the_cut(study: Path, tmp_path: Path) -> None:
    content = study.read_bytes()
    (length,) = struct.unpack_from("<Q", content, 40)
    assert length == len(content)
    assert_recovered(study, content[: int(0.7 * length)], tmp_path, at_least=2)


@pytest.mark.parametrize("what", ["signature", "superblock", "root"])
def test_a_file_without_its_start_gives_every_result_under_its_own_name(study: Path, tmp_path: Path, what: str) -> None:
    content = bytearray(study.read_bytes())
    end = {"signature": 8, "superblock": SUPERBLOCK, "root": 900}[what]
    content[:end] = bytes(end)
    assert_recovered(study, bytes(content), tmp_path, at_least=len(DIGESTS))


def test_a_damaged_result_is_named_and_the_others_are_recovered(study: Path, tmp_path: Path) -> None:
    with h5py.File(study) as file:
        place = h5py.h5o.get_info(file["counting/net_c-cccccccccc/value"].id).addr
    content = bytearray(study.read_bytes())
    content[place : place + 64] = bytes(64)
    assert_recovered(study, bytes(content), tmp_path, at_least=len(DIGESTS) - 1)
    assert "counting/net_c-cccccccccc" not in names(tmp_path / "new.h5")


def test_a_lost_list_of_results_is_said_in_words(study: Path, tmp_path: Path) -> None:
    with h5py.File(study) as file:
        place = h5py.h5o.get_info(file["counting"].id).addr
    content = bytearray(study.read_bytes())
    content[place + 24 : place + 40] = b"\xff" * 16  # where its list lies
    (tmp_path / "cut.h5").write_bytes(content)
    found = repair(tmp_path / "cut.h5", tmp_path / "new.h5")
    assert "counting/* (the list of these results is lost)" in found.gone


def test_a_file_cut_anywhere_near_its_end_gives_every_name_once_and_as_it_was(study: Path, tmp_path: Path) -> None:
    with h5py.File(study, "r+") as file:  # a label that the name of the group does not have
        file["counting/net_b-bbbbbbbbbb"].attrs["label"] = "another"
    content = study.read_bytes()
    for share in (0.99, 0.97, 0.9):
        (tmp_path / "new.h5").unlink(missing_ok=True)
        assert_recovered(study, content[: int(share * len(content))], tmp_path, at_least=3)


def damages(content: bytes, count: int) -> Iterator[bytes]:
    """A file cut at random places, and one with random bytes at random places."""
    random = np.random.default_rng(0)
    for number in range(count):
        if number % 2:
            yield content[: random.integers(len(content) // 2, len(content))]
        else:
            damaged = bytearray(content)
            for at in random.integers(SUPERBLOCK, len(content) - 500, 5):
                damaged[at : at + 500] = random.bytes(500)
            yield bytes(damaged)


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.campaign)])
def test_random_damages_leave_results_that_are_equal_to_the_last_bit(study: Path, tmp_path: Path, count: int) -> None:
    for damaged in damages(study.read_bytes(), count):
        (tmp_path / "new.h5").unlink(missing_ok=True)
        assert_recovered(study, damaged, tmp_path, at_least=1)


def test_bytes_of_other_files_are_not_copied(study: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 24)
    with h5py.File(study, "r+") as file:
        file["counting/net_c-cccccccccc"].create_dataset(
            "far", (3,), "f8", external=[(str(tmp_path / "secret"), 0, 24)]
        )
    content = bytearray(study.read_bytes())
    content[8:20] = b"\xff" * 12
    assert_recovered(study, bytes(content), tmp_path, at_least=len(DIGESTS) - 1)
    assert "counting/net_c-cccccccccc" not in names(tmp_path / "new.h5")
    assert b"ssss" not in (tmp_path / "new.h5").read_bytes()


@pytest.mark.campaign
def test_false_starts_of_results_take_seconds_and_what_is_there_is_found(study: Path, tmp_path: Path) -> None:
    start = b"\x01\x00\x01\x00\x01\x00\x00\x00\x18\x00\x00\x00\0\0\0\0\x11\x00\x10\x00\0\0\0\0" + b"\1" * 16
    content = bytearray(study.read_bytes())
    content[:900] = bytes(900)
    before = os.times()
    assert_recovered(study, bytes(content) + start * 20_000, tmp_path, at_least=len(DIGESTS))
    assert sum(os.times()[:4]) - sum(before[:4]) < 15


@pytest.mark.parametrize("crash", ["", "net_b"])
def test_each_result_is_copied_once_and_one_on_which_hdf5_crashes_is_left_out(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    copied, copy = tmp_path / "copied", groups.copy

    def counted(source: h5py.Group, file: h5py.File, name: str, *more: Any) -> h5py.Group:  # in a child process
        with copied.open("a") as stream:
            stream.write(f"{name}\n")
        if crash and crash in name:
            os._exit(1)
        return copy(source, file, name, *more)

    monkeypatch.setattr(groups, "copy", counted)
    (tmp_path / "broken.h5").write_bytes(bytes(SUPERBLOCK) + study.read_bytes()[SUPERBLOCK:])
    found = repair(tmp_path / "broken.h5", tmp_path / "new.h5")
    assert found.kept == names(tmp_path / "new.h5")
    assert len(found.kept) == len(DIGESTS) - bool(crash)
    assert found.gone[1:] == ["counting/net_b-bbbbbbbbbb (HDF5 crashes on it)"] * bool(crash)
    if not crash:
        assert sorted(copied.read_text().split()) == found.kept


def test_a_damaged_name_is_not_kept(study: Path, tmp_path: Path) -> None:
    damaged = study.read_bytes().replace(b"net_c-cccccccccc\0", b"net_c-cccccbcccc\0")
    assert_recovered(study, damaged, tmp_path, at_least=len(DIGESTS))


def test_what_exceeds_the_budget_is_said(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damaged_files, "SECONDS", 0.3)
    monkeypatch.setattr(damaged_files, "_examined", lambda image, places, size: (0 for _ in iter(int, 1) if False))
    (tmp_path / "broken.h5").write_bytes(study.read_bytes()[:-3000])
    with pytest.raises(ValueError, match=r"holds no result that can be recovered.*what is not found within 0 s"):
        repair(tmp_path / "broken.h5", tmp_path / "new.h5")


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_zeros_anywhere_cost_what_they_hit(study: Path, tmp_path: Path, seed: int) -> None:
    content = bytearray(study.read_bytes())
    with h5py.File(study) as file:  # within the descriptions of arrays and results, which HDF5 cannot read without
        places = [h5py.h5o.get_info(file[f"counting/net_{d}-{d * 10}/vector"].id).addr for d in DIGESTS]
    at = places[np.random.default_rng(seed).integers(len(places))]
    content[at - 200 : at + 300] = bytes(500)
    assert_recovered(study, bytes(content), tmp_path, at_least=len(DIGESTS) - 2)


def test_a_file_that_is_whole_is_left_and_one_without_anything_is_refused(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.h5"
    assert exit_code(["repair", str(study), "--out", str(out)]) == 0
    assert "nothing to repair: 5 results of " in capsys.readouterr().err
    assert not out.exists()
    (tmp_path / "text.h5").write_bytes(b"text" * 100)
    assert exit_code(["repair", str(tmp_path / "text.h5"), "--out", str(out)]) == 1
    assert "holds no result that can be recovered" in capsys.readouterr().err
    assert not out.exists()
    study.write_bytes(study.read_bytes()[:-3000])
    assert exit_code(["repair", str(study)]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(tmp_path / "results.repaired.h5")
    assert "gone: " in said.err
    assert exit_code(["repair", str(study)]) == 1
    assert "exists; give another --out" in capsys.readouterr().err


def test_what_hdf5_searches_without_end_takes_a_small_share_of_the_time() -> None:
    def work(items: Sequence[int]) -> Iterator[int]:
        for item in items:
            while item == 1:  # also on the second item alone
                pass
            yield item

    children = Children(2.0, print)
    assert list(children.each(work, [0, 1, 2])) == [(0, 0), (1, None), (2, 2)]
    assert children.left > 1.0
