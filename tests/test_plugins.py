"""Probes of other packages and of the user: measured, stored and drawn as those of this project are."""

import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from analytic import tanh_net
from landscape_gradient_norm import figure
from landscape_gradient_norm.probe import GradientNorm

import landscape
from landscape import plots, plugins, probes
from landscape.checkpoints.optimizer_state import optimizer_class
from landscape.cli.main import exit_code
from landscape.data import load_batches
from landscape.plots import appearance
from landscape.probe import Stage
from landscape.probes import probe_class
from landscape.results import reader
from landscape.running.run import digest
from landscape.subject.spec import Spec

ROOT = Path(__file__).parents[1]


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a package with entry points and modules for one test."""

    def install(points: dict[str, str], **modules: str) -> None:
        about = tmp_path / "other-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.2\n")
        lines = [f"[landscape.{key.partition('/')[0]}]\n{key.partition('/')[2]} = {v}\n" for key, v in points.items()]
        (about / "entry_points.txt").write_text("".join(lines))
        for name, code in modules.items():
            (tmp_path / f"{name}.py").write_text(code)

    monkeypatch.syspath_prepend(tmp_path)
    plugins.plugins.cache_clear()
    yield install
    plugins.plugins.cache_clear()


@pytest.mark.slow
def test_a_probe_of_ones_own_is_measured_stored_and_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject, out = tanh_net(sizes=(3,) * 4), tmp_path / "results.h5"
    for probe in (GradientNorm, GradientNorm(), GradientNorm(order=2)):
        found = landscape.measure(probe, subject, out=out, quiet=True)
        np.testing.assert_allclose(found["norm"], found["batch_norm"].mean("batch"))
    other = landscape.measure(GradientNorm(order=np.inf), subject, out=out, quiet=True)
    assert (other["norm"].values <= found["norm"].values).all()
    assert [name.partition("/")[0] for name, _ in reader.groups(out)] == ["gradient-norm"] * 2
    assert exit_code(["plot", str(out), "--out", str(tmp_path / "figures")]) == 1
    assert capsys.readouterr().err.count(": no installed figure shows it") == 2  # not: its numbers are not finite
    assert "norm_se" in found
    assert found["norm_se"].attrs["n"] == found.sizes["batch"]
    drawn = figure.page([found], appearance.looks([found]))
    assert any("95 % intervals" in text.get_text() for text in drawn.texts)  # what its bars are


@dataclass(frozen=True)
class Again(GradientNorm):
    """One that asks for its first unit at every stage."""

    def stage(self, data: Mapping[str, np.ndarray]) -> Stage:
        return Stage([(0,)], {})


def test_a_stage_that_names_what_is_done_is_refused() -> None:
    with pytest.raises(ValueError, match="`stage` of gradient-norm names a unit that is done"):
        landscape.measure(Again(), tanh_net(), out=None, quiet=True)


def test_other_code_is_another_result_and_a_name_of_this_project_is_refused() -> None:
    class Twice(GradientNorm):
        def measure(self, subject: Any, unit: Any) -> Any:
            return {name: 2 * value for name, value in super().measure(subject, unit).items()}

    class Named(GradientNorm):
        name: ClassVar[str] = "trace"

    assert digest(Twice(), tanh_net()) != digest(GradientNorm(), tanh_net())
    with pytest.raises(ValueError, match="Named is named trace, as a probe of landscape is; give it another name"):
        landscape.measure(Named(), tanh_net(), out=None, quiet=True)


BASE = "from landscape_gradient_norm.probe import GradientNorm\n"
BROKEN = [
    ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
    (f"{BASE}class Own(GradientNorm):\n    name = 'own'", "names no `api`, expected 1"),
    (f"{BASE}class Own(GradientNorm):\n    name, api = 'own', 2", "made for version 2 of the interface, expected 1"),
    (f"{BASE}class Own(GradientNorm):\n    api = 1", "its class is named gradient-norm"),
    ("class Own:\n    name, api = 'own', 1", "Own is not a probe; expected a frozen dataclass that inherits Probe"),
]


@pytest.mark.parametrize(("code", "why"), BROKEN)
def test_a_probe_that_cannot_be_used_is_refused_with_its_package(
    code: str, why: str, added: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    added({"probes/own": "broken:Own"}, broken=code)
    monkeypatch.setitem(probes.PROBES, "own", probes.ProbeEntry("", "", ""))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(ValueError, match=r"own of the package other 1\.2 cannot be used") as caught:
        probe_class("own")
    assert why in str(caught.value)
    assert str(caught.value).endswith("; update or uninstall it")


def test_a_figure_that_cannot_be_used_is_left_out_with_a_note(added: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code = "from landscape_gradient_norm.figure import ENTRY\nOTHER = type(ENTRY)('other', 'own', ('norm',), api=2)"
    added({"figures/gradient_norm": "drawn:ENTRY", "figures/other": "drawn:OTHER", "figures/lost": "drawn:NONE"},
          drawn=code)  # fmt: skip
    assert [entry.name for entry in plots._of_other_packages()] == ["gradient_norm"]
    notes = capsys.readouterr().err.splitlines()
    assert ["made for version 2" in notes[0], "AttributeError" in notes[1]] == [True, True]


def test_names_of_this_project_win_and_the_others_are_places_of_code(
    added: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import torch\n"
        "class Slow(torch.optim.SGD):\n    pass\n"
        "def pairs():\n    return torch.zeros(3, 2), torch.arange(3)\n"
        "def net():\n    return torch.nn.Linear(2, 3)\n"
    )
    added({"data/mine": "things:pairs", "data/digits": "things:pairs", "models/small": "things:net",
           "optimizers/Slow": "things:Slow", "optimizers/SGD": "things:Slow"}, things=code)  # fmt: skip
    assert load_batches("mine").inputs.shape == (3, 2)
    assert load_batches("digits", samples=4).inputs.shape[0] == 4
    assert load_batches("digits", samples=4).inputs.shape[0] == 4
    note = "note: digits of the package other 1.2 is left out: landscape has one"
    assert capsys.readouterr().err.count(note) == 1
    assert (Spec(model="small").model, Spec(model="vit_ti").model) == ("things:net", "vit_ti")
    assert [optimizer_class(name).__module__ for name in ("Slow", "SGD")] == ["things", "torch.optim.sgd"]


def test_an_unknown_probe_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"there is no probe tracé; .*did you mean trace"):
        probe_class("tracé")


@pytest.mark.campaign
def test_the_package_of_the_documentation_is_built_installed_and_used(tmp_path: Path, snapshots: Path) -> None:
    """In an environment of its own, which sees the libraries of this one."""
    if not any(metadata.distributions(name="pip")):
        pytest.skip("needs pip")
    source, home, out = tmp_path / "source", tmp_path / "venv", tmp_path / "results.h5"
    shutil.copytree(ROOT / "docs/plugin", source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], check=True)
    venv.create(home)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text(
        "".join(f"import site; site.addsitedir({p!r})\n" for p in site.getsitepackages())
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", packages, wheel], check=True)

    def run(*words: object, code: int = 0) -> str:
        command = [home / "bin/python", "-m", "landscape", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "landscape-gradient-norm 0.1.0" in run("--help")
    said = run("gradient-norm", "--help")
    assert "--order" in said
    assert "Norm of the gradient of the mean loss" in said
    measure = ("gradient-norm", snapshots, "--data", "digits", "--samples", 32, "--batch-size", 8, "--out", out)
    assert "shard 1/2" in run(*measure, "--shard", "1/2")
    assert "2 of 4 units" in run(*measure, "--workers", 2)
    assert "already measured" in run(*measure)
    assert "gradient-norm" in run("show", out)
    assert "intervals over mini-batches" in run("compare", out, "--no-store")
    run("plot", out, "--out", tmp_path / "figures")
    assert [file.stem for file in (tmp_path / "figures").iterdir()] == ["gradient_norm"]
    run("report", out, "--out", tmp_path / "report.html")
    assert "gradient-norm" in (tmp_path / "report.html").read_text()
