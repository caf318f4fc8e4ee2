"""Files are replaced by files alone: a device, a pipe or a folder in the place of an output stays what it is."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic

from landscape.cli.main import exit_code
from landscape.plots import drawing
from landscape.plots.comparison import text
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
