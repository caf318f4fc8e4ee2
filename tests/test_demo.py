"""The command `demo`: its study, and as it is delivered, from the networks to the last line."""

import re
from pathlib import Path

import pytest

from landscape.cli import studies
from landscape.cli.study import study_named
from landscape.doctor.rules import examine
from landscape.options import OptionError
from landscape.plots import FIGURES
from landscape.plots.report import findings_of
from landscape.probes import FEATURES, PROBES, probe_class
from landscape.results import reader

NUMBER_WITH_INTERVAL = r"\d \[-?\d\S*, -?\d\S*\]|\d ± \d"


def test_all_is_every_probe_that_applies_to_pictures_and_the_core_needs_no_more_than_is_installed() -> None:
    core = {one.probe for one in study_named("demo").measurements.values()}
    rest = [name for name, _ in studies.others(core)]
    measurable = {name for name, entry in PROBES.items() if not entry.needs and not probe_class(name).ordered}
    assert measurable <= {*core, *rest}
    assert not core & {*rest}
    assert not [name for name in core if PROBES[name].needs]


def test_at_most_sixteen_figures_are_drawn_each_of_a_probe_that_is_measured() -> None:
    study = study_named("demo")
    assert len(set(study.figures)) == len(study.figures) <= 16
    core, probes = {one.probe for one in study.measurements.values()}, {FIGURES[name].probe for name in study.figures}
    assert probes <= core
    assert core - {*FEATURES} <= probes


def test_too_few_samples_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"--samples must be at least {studies.FEWEST}, got {studies.FEWEST - 1}"):
        studies.demo(out=tmp_path, samples=studies.FEWEST - 1)
    assert [*tmp_path.iterdir()] == []
    assert 4 * study_named("demo").measurements["noise-scale"].options["groups"] == studies.FEWEST


@pytest.mark.campaign
def test_the_demo_ends_with_what_it_found_and_is_not_measured_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    studies.demo(out=tmp_path)
    table, found, commands = re.split(r"\n\n", capfd.readouterr().out.strip())
    sentences = found.splitlines()[1:]
    assert len(sentences) == 3
    assert all(re.search(NUMBER_WITH_INTERVAL, sentence) for sentence in sentences)
    assert [f"- {finding.number}" for finding in findings_of(tmp_path / "results.h5")][:3] == sentences
    assert [line.startswith("$ landscape ") for line in commands.splitlines()[1:]] == [True] * 3
    assert all(re.search(r"  \d+ (test|train)  ", row) for row in table.splitlines()[1:])
    drawn = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert drawn == set(study_named("demo").figures)
    assert (tmp_path / "report.html").stat().st_size < 3_000_000

    before = {name: data.attrs["finished"] for name, data in reader.groups(tmp_path / "results.h5")}
    monkeypatch.setattr(studies, "illustrate", lambda *_, **__: None)  # what is drawn is the same
    studies.demo(out=tmp_path)
    assert capfd.readouterr().err.count("already trained") == 4
    assert {name: data.attrs["finished"] for name, data in reader.groups(tmp_path / "results.h5")} == before
    serious = [f"{one.rule}: {one.text}" for one in examine([tmp_path / "results.h5"]) if one.severity != "note"]
    assert serious == []  # the doctor has nothing to say
