"""Previews of a surface through a run: stopped anywhere, spread over workers, and what they make of the rest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measured_runs import assert_same, small, stop_after, stored_result

from landscape.results.run_key import Arrays
from landscape.running.executor import Executor
from landscape.running.run import run
from landscape.subject.loading import load as loading
from landscape.subject.subject import Subject

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

OWN = Path(__file__).with_name("own.py")


def few() -> Subject:
    return loading.load(model=f"{OWN}:model", data=f"{OWN}:data", samples=4, batch_size=4)


def measured(path: Path, *, preview: bool = True, tolerance: float = 0.5, **how: Any) -> Arrays:
    probe = small("surface", resolution="21", preview=preview, tolerance=tolerance)
    return stored_result(path, run(probe, few(), path, **how))


@pytest.fixture(scope="module")
def previewed(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    return measured(tmp_path_factory.mktemp("preview") / "whole.h5")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    return measured(tmp_path_factory.mktemp("exact") / "whole.h5", preview=False)


def test_a_preview_stores_what_it_evaluated_and_what_it_made_of_the_rest(previewed: Arrays, exact: Arrays) -> None:
    evaluated = previewed["evaluated"] == 1
    assert (evaluated.sum(), previewed["evaluations"]) == (340, 340)
    assert previewed["done"].all()
    for name in ("loss", "loss_se", "rise_se", "l2", "accuracy"):
        np.testing.assert_array_equal(previewed[name][evaluated], exact[name][evaluated], err_msg=name)
    error = np.abs(previewed["loss"] / exact["loss"] - 1)[~evaluated]
    assert 0 < np.quantile(error, 0.95) <= previewed["hold_out_error"] < 0.5
    np.testing.assert_allclose(previewed["l2"], exact["l2"], rtol=1e-9)


def test_a_preview_stopped_in_every_phase_has_the_content_of_a_straight_one(previewed: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    for units in (30, 100, 285, 341, 420):  # coarse grid, rounds, hold-outs, before and in interpolation
        with pytest.raises(KeyboardInterrupt):
            measured(path, report=stop_after(units))
    assert_same(measured(path, report=lambda done, total: done > 420 or pytest.fail("measured again")), previewed)


def test_a_preview_spread_over_workers_has_the_content_of_one_in_line(
    previewed: Arrays, tmp_path: Path, executors: Mapping[str, Executor]
) -> None:
    assert_same(measured(tmp_path / "results.h5", executor=executors["processes"]), previewed)


def test_a_preview_that_errs_too_much_is_the_exact_surface(exact: Arrays, tmp_path: Path) -> None:
    found = measured(tmp_path / "results.h5", tolerance=1e-9)
    assert found["evaluated"].all()
    assert found["hold_out_error"] > 1e-9
    np.testing.assert_array_equal(found["loss"], exact["loss"])
