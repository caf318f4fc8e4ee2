"""Files are replaced by files alone: a device, a pipe or a folder in the place of an output stays what it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from landscape.cli.main import exit_code
from landscape.results.replacing import replacing

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


def test_every_command_that_writes_a_file_refuses_a_device(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    for words in (
        ["report", str(study), "--out", str(device)],
        ["compare", str(study), "--no-store", "--out", str(device)],
        ["merge", str(study), "--out", str(device)],
        ["export", str(study), "--format", "csv", "--out", str(device)],
        ["animate", str(study), "--out", str(device)],
    ):
        assert exit_code(words) != 0, words
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1, said
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
