"""What the README and the pages of the documentation show works as shown."""

import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command

import landscape
from landscape.cli.main import app, exit_code
from landscape.plots import FIGURES
from landscape.plots.drawing import NAMES
from landscape.probes import GROUPS, OWN, PROBES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
HEADINGS = ["Definition", "Source", "Units", "Cost", "Error", "What it does not say", "Reference"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def files(page: Path) -> dict[str, str]:
    named = ((re.match(r"# (\w+\.py)", block), block) for block in blocks(page, "python"))
    return {match[1]: block for match, block in named if match}


def shown(page: Path) -> list[str]:
    """The command lines of a page, without comments."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines()]
    return [line.partition(" #")[0].strip() for line in lines if line.startswith("landscape ")]


@pytest.mark.campaign
@pytest.mark.parametrize("page", [README, ROOT / "docs" / "python.md"], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries inside the commands
def test_the_python_examples_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(["train", "vit_demo", "--data", "digits", "--epochs", "0"]) == 0
    scope: dict[str, object] = {}
    elsewhere = [*files(page).values(), *blocks(ROOT / "docs" / "monitoring.md", "python")]  # run by their own tests
    for example in blocks(page, "python"):
        if example not in elsewhere:
            exec(example, scope)
    assert "NEP" in capsys.readouterr().out


@pytest.mark.campaign
def test_the_commands_of_the_readme_work_in_an_empty_folder_in_their_order(tmp_path: Path) -> None:
    for name, text in files(README).items():
        (tmp_path / name).write_text(text)
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if not line.startswith("#")]
    words = [one for one in words if one[0] in ("landscape", "python3") and "venv" not in one]
    assert len(words) >= 9
    less = {
        "train": ["--epochs", "1"],
        "surface": ["--resolution", "3"],
        "doctor": [],
        "report": [],
        "plot": [],
    }  # the last one counts
    for one in words:
        few = less.get(one[1], ["--samples", "32"])
        if one[0] == "python3":
            subprocess.run([sys.executable, *one[1:]], cwd=tmp_path, check=True)
            continue
        child = forked.Popen([sys.executable, "-m", *one, *few], cwd=tmp_path)
        _, errors = child.communicate(600)
        assert child.returncode in ((0, 3) if "doctor" in one else (0,)), (one, errors)
    assert {"results.h5", "report.html"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.campaign
def test_your_own_models_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, scope = ROOT / "docs" / "own-models.md", dict[str, object]()
    for name, text in files(page).items():
        (tmp_path / name).write_text(text)
    exec(files(page)["mine.py"], scope)
    torch.manual_seed(0)
    torch.save(scope["model"]().state_dict(), tmp_path / "weights.pt")  # type: ignore[operator]
    monkeypatch.chdir(tmp_path)
    lines = [line for line in shown(page) if any(f"{name}:" in line for name in files(page))]
    assert len(lines) >= 2
    for line in lines:
        command = line.split()[1:]
        assert exit_code([*command, *(["--resolution", "3"] if command[0] == "surface" else [])]) == 0, line
    assert (tmp_path / "results.h5").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_command_that_a_page_names_exists(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    for line in shown(page):
        for command in re.split(r"&& landscape|&&", re.sub(r"--model \S+", "", line.removeprefix("landscape"))):
            _assert_known(shlex.split(command))


@cache
def command_line() -> Any:
    return get_command(app)


def _assert_known(words: list[str]) -> None:
    """The command and its options exist."""
    group = command_line()
    with group.make_context("landscape", ["--help"], resilient_parsing=True) as context:
        _, found, arguments = group.resolve_command(context, words)
        if hasattr(found, "commands"):  # a group of its own
            _, found, arguments = found.resolve_command(context, arguments)
    options = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert [one for one in arguments if one.startswith("--") and one.partition("=")[0] not in options] == []


@pytest.mark.slow
def test_what_the_page_of_papers_names_exists() -> None:
    page = (ROOT / "docs" / "papers.md").read_text()
    for command in sorted({span for span in re.findall(r"`([^`]+)`", page) if span.startswith("landscape ")}):
        _assert_known(shlex.split(command)[1:])
    lists = re.findall(r"figures? ((?:`\w+`(?:, | and )?)+)", page)
    named = {name for words in lists for name in re.findall(r"`(\w+)`", words)}
    assert len(named) > 5
    assert sorted(named - FIGURES.keys()) == []
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {row.replace(r"\|", "").count("|") for row in rows} == {5}


@pytest.mark.slow
def test_the_readme_names_the_probes_of_every_group_and_all_other_commands() -> None:
    helped = subprocess.run([sys.executable, "-m", "landscape", "--help"], capture_output=True, text=True).stdout
    text = README.read_text()
    rows = {group: re.findall(r"`([^`]+)`", row) for group, row in re.findall(r"(?m)^\| ([^|`]+) \| (`.*) \|$", text)}
    assert list(rows) == list(GROUPS)
    for group, named in rows.items():
        assert named == [name for name in OWN if PROBES[name].group == group and name in named]
    (listed,) = re.findall(r"`(train models demo reproduce \|[^`]*)`", text)
    assert {*listed.replace("|", " ").split(), *OWN} == {*re.findall(r"(?m)^│ ([a-z][\w-]+) ", helped)}


def test_the_commands_that_are_called_stable_exist() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    named = {*re.findall(r"`([a-z][a-z-]+)`", page)} - {"format", "api", *GROUPS}
    assert len(named) > 15
    assert sorted(named - command_line().commands.keys()) == []


@pytest.mark.parametrize("name", PROBES)
def test_every_probe_has_a_page_with_all_its_parts(name: str) -> None:
    page = ROOT / "docs" / "probes" / f"{name}.md"
    assert re.findall(r"(?m)^## (.*)", page.read_text()) == HEADINGS
    assert any(line.split()[1] in (name, "features") for line in shown(page))
    assert page.read_text().split("\n\n")[1].endswith("?")  # the question, which stands in the index


@pytest.mark.campaign
@pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="the documentation needs the extra `docs`")
def test_the_documentation_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", ROOT / "docs", tmp_path]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    loaded = r"<(?:script|img|link)[^>]*(?:src|href)=\"(https?:[^\"]*)\""
    assert {link for page in tmp_path.rglob("*.html") for link in re.findall(loaded, page.read_text())} == set()
    assert "Coverage of the intervals" in (tmp_path / "probes" / "trace.html").read_text()
    assert "Frobenius norm of the Hessian of the mini-batch" in (tmp_path / "format-0.1.html").read_text()


def test_the_page_of_all_figures_is_current_and_every_picture_has_words() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "wall.py"))["wall"]()
    assert (ROOT / "docs" / "all-figures.md").read_text() == made
    assert all(f"`{name}`:" in made for name in NAMES)
    assert [name for name in FIGURES if f"/{name}.png)" not in made] == []
    pictures = [
        (page.name, alt, to) for page in PAGES for alt, to in re.findall(r"!\[(.*?)\]\((\S+)\)", page.read_text())
    ]
    assert not [(page, to) for page, alt, to in pictures if len(alt) < 10]


@pytest.mark.campaign
def test_the_gallery_shows_what_is_drawn_of_the_shipped_results_now(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "wall.py"))["draw"](tmp_path)
    assert len(drawn) > 20
    for path in drawn:
        with Image.open(path) as made, Image.open(ROOT / "gallery" / path.name) as shown:
            assert made.size == shown.size, path.name
            one, other = (np.asarray(picture.convert("L"), dtype=float) for picture in (made, shown))
        assert (np.abs(one - other) > 32).mean() < 0.002, path.name


def test_the_chooser_names_every_core_probe_by_its_page() -> None:
    named = set(re.findall(r"probes/([a-z-]+)\.md", (ROOT / "docs" / "choose.md").read_text()))
    assert named <= {*PROBES}
    assert len(named) > 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_of_code_can_be_pasted_and_fits_a_screen(page: Path) -> None:
    lines = [
        line for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL) for line in block.splitlines()
    ]
    assert [line for line in lines if line.startswith(("$ ", ">>> ")) or len(line) > 120] == []


@pytest.mark.slow
def test_the_story_shows_the_comparison_as_it_is_computed() -> None:
    made = landscape.compare(ROOT / "docs" / "examples" / "results" / "sgd-sam.h5", group=r"-s\d+$")
    (table,) = blocks(ROOT / "docs" / "sam.md", "text")
    rows = [re.split(r"  +", line) for line in table.replace("−", "-").splitlines()[1:]]
    contrasts = [one for one in made.contrasts if one.probe == "flatness" or one.number == "trace"]
    assert [row[1] for row in rows] == [contrast.number for contrast in contrasts]
    for row, contrast in zip(rows, contrasts, strict=True):
        assert contrast.difference is not None
        shown = re.findall(r"[-+][\d.]+", row[2])
        found = contrast.difference.value, contrast.difference.low, contrast.difference.high
        assert [float(one) for one in shown] == pytest.approx(found, abs=0.6 * 0.1 ** len(shown[0].partition(".")[2]))
        assert float(row[4]) == pytest.approx(contrast.adjusted, abs=0.01)
        assert contrast.verdict in row[5]
