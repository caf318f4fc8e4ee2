"""The command `demo`: its tables, and as it is delivered, from the networks to the last line."""

import re
from pathlib import Path

import pytest

from landscape.cli import demo
from landscape.cli.training import run_training
from landscape.doctor.rules import examine
from landscape.plots import FIGURES
from landscape.plots.report import findings_of
from landscape.probes import FEATURES, PROBES, probe_class
from landscape.results import reader

NUMBER_WITH_INTERVAL = r"\d \[-?\d\S*, -?\d\S*\]|\d ± \d"


def test_all_is_every_probe_that_applies_to_pictures_and_the_core_needs_no_more_than_is_installed() -> None:
    core, every = ([step.probe for step in demo.plan(every=every)] for every in (False, True))
    assert every[: len(core)] == core
    assert len(set(every)) == len(every)
    measurable = {name for name, entry in PROBES.items() if not entry.needs and not probe_class(name).ordered}
    assert measurable <= {*every, *FEATURES}
    assert not [name for name in core if name in PROBES and PROBES[name].needs]


def test_at_most_sixteen_figures_are_drawn_each_of_a_probe_that_is_measured() -> None:
    assert len(set(demo.FIGURES)) == len(demo.FIGURES) <= 16
    probes = {FIGURES[name].probe for name in demo.FIGURES}
    assert probes <= {step.probe for step in demo.CORE} | set(FEATURES)
    assert {step.probe for step in demo.CORE} - {"features"} <= probes


@pytest.mark.slow
def test_a_run_of_the_users_own_is_left_alone_and_the_demo_trains_beside_it(tmp_path: Path) -> None:
    """As where the README's `landscape train vit_demo --data digits` comes first."""
    how = {"out": tmp_path, "epochs": 0, "device": "cpu", "quiet": True}
    own = run_training(
        "vit_demo", "digits", {"epochs": 0}, recipe=None, out=tmp_path / "checkpoints" / "vit_demo-digits", quiet=True
    )
    before = own.read_bytes()
    final = demo.train(("vit_demo", 0), **how)
    assert final.parent.name == "vit_demo-digits-demo"
    assert own.read_bytes() == before != final.read_bytes()
    content = final.read_bytes()
    assert demo.train(("vit_demo", 0), **how) == final
    assert final.read_bytes() == content
    assert demo.train(("resnet_demo", 1), **how).parent.name == "resnet_demo-digits-seed1"


@pytest.mark.campaign
def test_the_demo_ends_with_what_it_found_and_is_not_measured_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    demo.demo(out=tmp_path)
    said = capfd.readouterr()
    assert "already measured" not in said.err
    table, found, commands = re.split(r"\n\n", said.out.strip())
    sentences = found.splitlines()[1:]
    assert len(sentences) == 3
    assert all(re.search(NUMBER_WITH_INTERVAL, sentence) for sentence in sentences)
    assert [f"- {finding.number}" for finding in findings_of(tmp_path / "results.h5")][:3] == sentences
    assert [line.startswith("$ landscape ") for line in commands.splitlines()[1:]] == [True] * 3
    assert all(re.search(r"  \d+ (test|train)  ", row) for row in table.splitlines()[1:])
    drawn = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert drawn == set(demo.FIGURES)
    assert (tmp_path / "report.html").stat().st_size < 3_000_000

    before = {name: data.attrs["finished"] for name, data in reader.groups(tmp_path / "results.h5")}
    demo.demo(out=tmp_path)
    again = capfd.readouterr().err
    assert again.count("already trained") == len(demo.MODELS) + 1
    assert again.count("already measured") == len(demo.CORE)
    assert {name: data.attrs["finished"] for name, data in reader.groups(tmp_path / "results.h5")} == before
    serious = [f"{one.rule}: {one.text}" for one in examine([tmp_path / "results.h5"]) if one.severity != "note"]
    assert serious == []  # the doctor has nothing to say
