"""Headline numbers as numbers: their errors are those of the stored quantities, and every headline number is there."""

import json
from pathlib import Path

import numpy as np
import pytest
import synthetic
import xarray as xr
from drawable import stored_in

from landscape.cli.main import exit_code
from landscape.curvature.stored_spectrum import summaries
from landscape.headline import Headline, stored_headlines
from landscape.plots import headlines
from landscape.results.headline_numbers import Measured, measured
from landscape.statistics.intervals import interval

# Probes that store no error of what their headlines say.
WITHOUT_ERRORS = {"attention-maps", "convexity", "monitor", "perturbation", "tokens", "trajectory"}


def named(data: xr.Dataset) -> dict[str, Measured]:
    return {one.name: one for one in measured(data)}


@pytest.mark.slow
def test_every_number_of_a_headline_is_among_the_numbers(study: Path) -> None:
    for group, data in stored_in(study):
        found, shown = named(data), headlines.text(headlines.with_intervals(data))
        assert any(sign in shown for sign in "±[") == (group.partition("/")[0] not in WITHOUT_ERRORS), shown
        for name, value in headlines.numbers(data).items():
            assert isinstance(value, str) or found[name].value == value


def test_a_stored_error_is_the_error_and_stored_ends_are_the_interval() -> None:
    data = xr.Dataset(
        {"nll": 0.5, "nll_se": 0.1, "nll_low": 0.2, "nll_high": 0.9, "ece": 0.1, "ece_se": 0.02},
        attrs=synthetic.declared("calibration"),
    )
    data["nll"].attrs["units"] = "nats"
    data["ece_se"].attrs["n"] = data["nll_se"].attrs["n"] = 20
    found = named(data)
    assert found["nll"] == Measured("nll", 0.5, 0.1, 0.2, 0.9, "nats", "lower is better", 20)
    assert (found["ece"].low, found["ece"].high) == pytest.approx(tuple(map(float, interval(0.1, 0.02, 20))))


def test_the_error_of_an_intact_accuracy_is_that_of_zeros_and_ones() -> None:
    right = np.array([1.0] * 30 + [0.0] * 10)
    data = xr.Dataset(
        {"accuracy_drop": ("unit", [0.1, 0.3]), "accuracy_drop_se": ("unit", [0.01, 0.02])},
        {"name": ("unit", ["a", "b"])},
        synthetic.declared("lesion", intact_accuracy=right.mean(), samples=40),
    )
    found = named(data)
    assert found["intact accuracy"].error == pytest.approx(right.std(ddof=1) / np.sqrt(40))
    assert (found["largest drop"].value, found["largest drop"].error) == (0.3, 0.02)


def test_nep_ape_and_the_largest_eigenvalue_have_errors_over_mini_batches() -> None:
    values = np.array([3.0, 5.0, 10.0, 4.0])
    arrays = {"eigenvalue": values[:, None], "largest": values, "smallest": values, "residual": np.zeros((4, 1)),
              "done": np.ones(4)}  # fmt: skip
    stored = summaries(arrays, per_layer=False)
    error = values.std(ddof=1) / np.sqrt(4)
    assert (stored["ape"], stored["ape_se"]) == pytest.approx((values.mean(), error))  # one eigenvalue per mini-batch
    assert 0 < stored["ape_low"] < values.mean() < stored["ape_high"]
    assert (stored["nep"], stored["nep_low"]) == (0.0, 0.0)
    assert 0.5 < stored["nep_high"] < 1.0  # no negative value in four mini-batches is no proof
    data = xr.Dataset({**stored, "eigenvalue": (("batch", "rank"), values[:, None]), "done": ("batch", np.ones(4))})
    data["converged"] = xr.ones_like(data["eigenvalue"])
    data.attrs |= synthetic.declared("hessian")
    for name in ("nep", "ape", "mean_largest"):
        data[f"{name}_se"].attrs["n"] = 4
    found = named(data)
    assert found["largest eigenvalue"].error == pytest.approx(error)
    assert (found["ape"].low, found["ape"].high) == pytest.approx((stored["ape_low"], stored["ape_high"]))
    assert (found["ape"].n, found["ape"].reading) == (4, "lower is flatter")


@pytest.mark.slow
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


def test_a_place_is_an_index_a_coordinate_an_end_an_extreme_a_name_a_fact_or_every_position() -> None:
    values, errors = np.array([[1.0, 5.0, np.nan], [2.0, np.nan, np.nan]]), np.full((2, 3), 0.1)
    data = xr.Dataset(
        {"value_of": (("unit", "t"), values), "value_of_se": (("unit", "t"), errors)},
        {"t": [0.0, 0.5, 1.0], "unit_name": ("unit", ["a", "b"])},
        {"chosen": 1},
    )
    ats: dict[str, dict[str, int | float | str]] = {
        "index": {"unit": -1, "t": 0}, "coordinate": {"unit": 0, "t": 0.5}, "last": {"unit": 0, "t": "last"},
        "largest": {"unit t": "largest"}, "smallest": {"unit t": "smallest"}, "name": {"unit": "b", "t": "first"},
        "fact": {"unit": "chosen", "t": 0}, "every {unit_name}": {"t": 0, "unit": "each"}, "mean": {"unit t": "mean"},
        "absent": {"unit": 0, "t": 0.25}, "other axes": {"unit": 0},
    }  # fmt: skip
    data.attrs |= stored_headlines([Headline(name, "value_of", at, where="at {t:g}"[: 8 * (name == "largest")])
                                    for name, at in ats.items()])  # fmt: skip
    assert {name: one.value for name, one in named(data).items()} == pytest.approx({
        "index": 2.0, "coordinate": 5.0, "last": 5.0, "largest": 5.0, "smallest": 1.0, "name": 2.0, "fact": 2.0,
        "every a": 1.0, "every b": 2.0, "mean": 8 / 3,
    })  # fmt: skip
    assert named(data)["largest"].at == "at 0.5"
    assert named(data)["mean"].error == pytest.approx(0.1)  # at most
