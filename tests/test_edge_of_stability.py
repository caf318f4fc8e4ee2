"""The edge-of-stability studies: their numbers from made-up series, and a short one from training to the table."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from landscape.api import names_of_results
from landscape.cli.main import exit_code
from landscape.cli.study import shipped
from landscape.results import reader
from landscape.studies.edge_of_stability import THRESHOLDS, plateau, ratios, table_of
from landscape.studies.study_file import study_of

STUDY = study_of(shipped()["reproduce"], names_of_results)
CLAIMS = {one.name: one for one in STUDY.claims}
TRAININGS = {name: one.full_batch for name, one in STUDY.networks.items() if one.full_batch}


def series(name: str, values: list[float]) -> xr.Dataset:
    """A series whose sharpness is so many times its threshold, 200."""
    kind = TRAININGS[name].sharpness
    sharpness = 200.0 * np.array(values)[:, None]
    return xr.Dataset({kind: (("step", "rank"), sharpness), THRESHOLDS[kind]: ("step", np.full(len(values), 200.0))})


def number(claim: str, values: list[float]) -> float:
    """The number of a claim, of a made-up series."""
    ((name, _),) = CLAIMS[claim].needs
    return CLAIMS[claim].compute({(name, "series"): series(name, values)})


@pytest.mark.parametrize("name", TRAININGS)
def test_the_plateau_begins_where_the_threshold_is_first_reached(name: str) -> None:
    data = series(name, [0.5, 0.8, math.nan, 1.0, 1.06, 0.97])
    found = ratios(data, TRAININGS[name].sharpness)
    assert found == pytest.approx([0.5, 0.8, 1.0, 1.06, 0.97])
    assert plateau(found) == pytest.approx([1.0, 1.06, 0.97])


def test_the_claims_are_a_rise_and_a_margin_and_no_plateau_is_no_number() -> None:
    values = [0.5, 0.8, math.nan, 1.0, 1.06, 0.97]
    assert number("sharpening", values) == pytest.approx(math.log(1.01 / 0.5))
    assert number("edge-of-stability", values) == pytest.approx(0.02)
    assert number("adaptive-edge", [0.5, 1.0, 0.8, 0.9]) == pytest.approx(-0.05)
    assert all(math.isnan(number(name, [0.5, 0.9, 0.99])) for name in ("sharpening", "adaptive-edge"))


def test_the_table_has_the_ratio_of_every_seed() -> None:
    results = [
        {("gradient descent", "series"): series("gradient descent", [0.5, 1.0 + e])} for e in (0.0, 0.01, 0.02, 0.03)
    ]
    row = table_of({"gradient descent": TRAININGS["gradient descent"]}, results).splitlines()[5]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[0] == "gradient descent"
    assert cells[-2:] == ["1.015 ± 0.021", "1.000, 1.010, 1.020, 1.030"]
    assert table_of({}, []) == ""


@pytest.mark.slow
def test_a_study_is_reproduced_from_training_to_the_table_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shipped()["reproduce"].read_text()
    for kind, steps, every in (("eigenvalue", 3000, 25), ("preconditioned", 1000, 10)):
        old = f'sharpness = "{kind}", steps = {steps}, every = {every}'
        assert old in text
        text = text.replace(old, f'sharpness = "{kind}", steps = 6, every = 2, images = 20, width = 4')
    (file := tmp_path / "reproduce.toml").write_text(text)
    monkeypatch.setattr("landscape.cli.study.shipped", lambda: {"reproduce": file})
    command = ["reproduce", "--data", "digits", "--seeds", "2", "--out", str(tmp_path / "new"), "--device", "cpu"]
    command += ["--claim", "edge-of-stability", "--claim", "adaptive-edge"]
    assert exit_code(command) == 0
    first, said = capsys.readouterr()
    assert "full-batch Adam, seed 1: series in" in said
    assert "| gradient descent | SGD, lr 0.01 | 20 | 2 x 4 | 6 |" in first
    assert first.count("**cannot tell**") == 2  # two seeds, and no plateau after six updates
    found = reader.find(tmp_path / "new" / "results.h5", "monitor")
    assert [data["step"].values.tolist() for _, data in found] == [[0, 2, 4, 6]] * 4
    (descent,) = [data for _, data in found if data.attrs["label"] == "gradient-descent-digits-s0"]
    assert descent["threshold"].values == pytest.approx(200.0)
    assert np.isnan(descent["preconditioned_threshold"].values).sum() == 0
    (adam,) = [data for _, data in found if data.attrs["label"] == "full-batch-Adam-digits-s1"]
    assert np.isnan(adam["preconditioned_threshold"].values[0])  # before its first update
    assert adam["preconditioned_threshold"].values[1:] == pytest.approx(38000.0)
    assert exit_code(command) == 0  # again: from what is there
    assert capsys.readouterr().out == first
    assert len(reader.find(tmp_path / "new" / "results.h5", "monitor")) == 4
