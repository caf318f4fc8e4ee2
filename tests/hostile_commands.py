"""What hostile files are given to: commands in an empty folder, which end in one clear line and write nothing."""

import re
from pathlib import Path

import pytest

from landscape.cli.main import exit_code

MODEL = """import torch
def model(): return torch.nn.Linear(4, 300)
def data(): return torch.ones(8, 4), torch.ones(8).long()
"""


def beside_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, entered, with a model and data beside it."""
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    return tmp_path


def everything(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command ends."""
    capsys.readouterr()
    assert exit_code(words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"landscape: .+\n", said.err)
    assert len(said.err) < 800
    return said.err
