"""What the README shows works as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from landscape.cli.main import exit_code
from landscape.probes import PROBES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


FILES = {re.match(r"# (\w+\.py)", block)[1]: block for block in blocks("python") if block.startswith("# ")}  # type: ignore[index]
EXAMPLES = [block for block in blocks("python") if not block.startswith("# ")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries inside the commands
def test_the_python_examples_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(["train", "vit_demo", "--data", "digits", "--epochs", "0"]) == 0
    scope: dict[str, object] = {}
    for example in EXAMPLES:
        exec(example, scope)
    printed = capsys.readouterr().out
    assert "NEP" in printed
    assert "vit_demo-digits" in printed


@pytest.mark.slow
def test_your_own_models_in_the_readme_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, object] = {}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    exec(FILES["mine.py"], scope)
    torch.manual_seed(0)
    torch.save(scope["model"]().state_dict(), tmp_path / "weights.pt")  # type: ignore[operator]
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("console") for line in block.splitlines() if any(f"{f}:" in line for f in FILES)]
    assert len(lines) >= 5
    for line in lines:
        command = line.removeprefix("$ landscape ").partition("  #")[0].split()
        assert exit_code([*command, *(["--resolution", "3"] if command[0] == "surface" else [])]) == 0, line
    assert (tmp_path / "results.h5").exists()


def test_every_file_the_readme_names_is_there() -> None:
    links = re.findall(r"\]\(([\w./]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_names_every_probe_among_the_commands_and_every_command_exists() -> None:
    helped = subprocess.run([sys.executable, "-m", "landscape", "--help"], capture_output=True, text=True).stdout
    (listed,) = re.findall(r"`(train models demo reproduce \|[^`]*)`", README)
    words = listed.replace("|", " ").split()
    assert [word for word in words if f" {word} " not in helped] == []
    assert [name for name in PROBES if name not in words] == []
