"""The command `demo`, from the networks to the last line, with one epoch and few samples; and as it is delivered."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from landscape.cli import demo
from landscape.doctor.rules import examine
from landscape.plots import FIGURES
from landscape.plots.report import findings_of
from landscape.probes import FEATURES, PROBES, probe_class
from landscape.results import reader

FEW = {
    "surface": {"resolution": "5"},
    "align": {"resolution": 3, "restarts": 1, "repair": 1},
    "features": {},
    "lesion": {},
}
SHORT = [step._replace(parameters={**step.parameters, **FEW[step.probe]}) for step in demo.CORE if step.probe in FEW]
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


class Here:
    """In place of the pool of processes: this one."""

    imap = staticmethod(map)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_the_demo_ends_with_what_it_found_and_is_not_measured_twice(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, of two untrained networks and a few probes; or as it is delivered."""
    steps = demo.CORE if whole else SHORT
    options = {} if whole else {"epochs": 0, "samples": 48}
    if not whole:
        monkeypatch.setattr(demo, "processes", lambda: nullcontext(Here))
        monkeypatch.setattr(demo, "MODELS", {"vit_demo": {}, demo.AGAIN: {}})
    monkeypatch.setattr(demo, "CORE", steps)
    demo.demo(out=tmp_path, **options)
    said = capfd.readouterr()
    assert "already measured" not in said.err
    table, found, commands = re.split(r"\n\n", said.out.strip())
    sentences = found.splitlines()[1:]
    assert len(sentences) == 3
    assert all(re.search(NUMBER_WITH_INTERVAL, sentence) for sentence in sentences)
    assert [f"- {finding.number}" for finding in findings_of(tmp_path / "results.h5")][:3] == sentences
    assert [line.startswith("$ landscape ") for line in commands.splitlines()[1:]] == [True] * 3
    samples = r"\d+" if whole else "48"
    assert all(re.search(rf"  {samples} (test|train)  ", row) for row in table.splitlines()[1:])
    drawn = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert drawn == {name for name in demo.FIGURES if FIGURES[name].probe in {s.probe for s in steps} | set(FEATURES)}
    assert (tmp_path / "report.html").stat().st_size < 3_000_000

    before = {name: data.attrs["finished"] for name, data in reader.groups(tmp_path / "results.h5")}
    if not whole:
        monkeypatch.setattr(demo, "draw", lambda *_: [])  # the figures are there
    demo.demo(out=tmp_path, **options)
    again = capfd.readouterr().err
    assert again.count("already trained") == len(demo.MODELS) + 1
    assert again.count("already measured") == len(steps)
    assert {name: data.attrs["finished"] for name, data in reader.groups(tmp_path / "results.h5")} == before
    if whole:  # the doctor has nothing to say
        assert [f"{one.rule}: {one.text}" for one in examine([tmp_path / "results.h5"]) if one.severity != "note"] == []
