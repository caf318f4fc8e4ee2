"""Headline numbers as numbers: their errors are those of the stored quantities, and every headline number is there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic
import xarray as xr
from drawable import stored_in

from landscape.cli.main import exit_code
from landscape.plots import headlines
from landscape.plots.headline_number import Measured
from landscape.plots.measured import OTHER, measured
from landscape.results.statistics import QUANTILE

# Probes that store no error of what their headlines say.
WITHOUT_ERRORS = {"attention-maps", "convexity", "monitor", "perturbation", "tokens", "trajectory"}


def named(data: xr.Dataset) -> dict[str, Measured]:
    return {one.name: one for one in measured(data)}


def test_every_number_of_a_headline_is_among_the_numbers(study: Path) -> None:
    for group, data in stored_in(study):
        found, shown = named(data), headlines.text(headlines.with_errors(data))
        assert ("\N{PLUS-MINUS SIGN}" in shown) == (group.partition("/")[0] not in WITHOUT_ERRORS), shown
        for name, value in headlines.numbers(data).items():
            if not isinstance(value, str) and name not in OTHER and not name.endswith("_se"):
                same = [one for one in found.values() if one.value == pytest.approx(value)]
                assert same, (group, name)


def test_a_stored_error_is_the_error_and_stored_ends_are_the_interval() -> None:
    data = xr.Dataset(
        {"nll": 0.5, "nll_se": 0.1, "nll_low": 0.2, "nll_high": 0.9, "ece": 0.1, "ece_se": 0.02},
        attrs={"probe": "calibration"},
    )
    data["nll"].attrs["units"] = "nats"
    found = named(data)
    assert found["nll"] == Measured("nll", 0.5, 0.1, 0.2, 0.9, "nats", "lower is better")
    assert (found["ece"].low, found["ece"].high) == pytest.approx((0.1 - QUANTILE * 0.02, 0.1 + QUANTILE * 0.02))


def test_the_error_of_an_intact_accuracy_is_that_of_zeros_and_ones() -> None:
    right = np.array([1.0] * 30 + [0.0] * 10)
    data = xr.Dataset(
        {"accuracy_drop": ("unit", [0.1, 0.3]), "accuracy_drop_se": ("unit", [0.01, 0.02])},
        {"name": ("unit", ["a", "b"])},
        {"probe": "lesion", "intact_accuracy": right.mean(), "samples": 40},
    )
    found = named(data)
    assert found["intact accuracy"].error == pytest.approx(right.std(ddof=1) / np.sqrt(40))
    assert (found["largest drop"].value, found["largest drop"].error) == (0.3, 0.02)


def test_the_largest_eigenvalue_is_a_mean_over_mini_batches() -> None:
    values = np.array([3.0, 5.0, 10.0])
    data = xr.Dataset(
        {
            "nep": 0.1,
            "ape": 2.0,
            "ape_low": 1.0,
            "ape_high": 3.0,
            "largest": ("batch", values),
            "eigenvalue": (("batch", "rank"), values[:, None]),
            "done": ("batch", [1] * 3),
        },
        attrs={"probe": "hessian"},
    )
    found = named(data)
    assert found["largest eigenvalue"].error == pytest.approx(values.std(ddof=1) / np.sqrt(3))
    assert found["ape"].error == pytest.approx(values.std(ddof=1) / np.sqrt(3))  # one eigenvalue per mini-batch
    assert (found["ape"].low, found["ape"].high) == (1.0, 3.0)
    assert found["ape"].reading == "lower is flatter"


def test_what_is_not_known_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = synthetic.write(tmp_path / "study.h5", synthetic.NETWORKS[:1], probes=("variance", "similarity"))
    assert exit_code(["show", str(study), "--json"]) == 0
    text = capsys.readouterr().out
    rows = json.loads(text)
    numbers = [number for row in rows for number in row["numbers"]]
    assert numbers
    assert all(number["value"] is not None for number in numbers)
    assert any(number["standard_error"] is None for number in numbers)
    assert "headline" in rows[0]
    assert exit_code(["show", str(study)]) == 0
    assert "standard_error" not in capsys.readouterr().out
