"""Repairing a damaged results file: every intact result is recovered, to the last bit, and what is gone is said."""

from __future__ import annotations

import struct
from pathlib import Path

import counting
import h5py
import numpy as np
import pytest

from landscape.cli.main import exit_code
from landscape.results import group as groups
from landscape.results.repair import SUPERBLOCK, repair

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
    assert all(any(name in line or "list" in line or "end of the file" in line for line in found.gone) for name in lost)


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
    assert "nothing to repair: all 5 results" in capsys.readouterr().err
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
