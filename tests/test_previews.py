"""Previews of a surface through a run: stopped anywhere, spread over workers, and what they make of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from measured_runs import (
    assert_same,
    loaded,
    one_thread,
    small,
    stop_after,
    stored_result,
    threads_and_processes,
    with_snapshots,
)

from landscape.executors.executor import Executor
from landscape.probe import Probe
from landscape.results.run_key import Arrays
from landscape.run import run
from landscape.subject import subject


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_snapshots(tmp_path_factory.mktemp("resnet-digits"))


@pytest.fixture(scope="module")
def executors() -> Iterator[Mapping[str, Executor]]:
    with threads_and_processes() as executors:
        yield executors


@pytest.fixture(scope="module")
def previewed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    path = tmp_path_factory.mktemp("preview") / "whole.h5"
    return stored_result(path, run(preview(), few(folder), path))


def preview() -> Probe:
    return small("surface", resolution="21", preview=True, tolerance=0.5)


def few(folder: Path) -> subject.Subject:
    return loaded(folder, samples=4, batch_size=4)


@pytest.mark.slow
def test_a_preview_stores_what_it_evaluated_and_what_it_made_of_the_rest(
    previewed: Arrays, folder: Path, tmp_path: Path
) -> None:
    exact = stored_result(tmp_path / "r.h5", run(small("surface", resolution="21"), few(folder), tmp_path / "r.h5"))
    evaluated = previewed["evaluated"] == 1
    assert (evaluated.sum(), previewed["evaluations"]) == (340, 340)
    assert previewed["done"].all()
    for name in ("loss", "loss_se", "rise_se", "l2", "accuracy"):
        np.testing.assert_array_equal(previewed[name][evaluated], exact[name][evaluated], err_msg=name)
    error = np.abs(previewed["loss"] / exact["loss"] - 1)[~evaluated]
    assert 0 < np.quantile(error, 0.95) <= previewed["hold_out_error"] < 0.5
    np.testing.assert_allclose(previewed["l2"], exact["l2"], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("units", [30, 100, 285, 341, 420])  # coarse grid, rounds, hold-outs, interpolation
def test_a_preview_stopped_anywhere_has_the_content_of_a_straight_one(
    units: int, previewed: Arrays, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "results.h5"
    with pytest.raises(KeyboardInterrupt):
        run(preview(), few(folder), path, report=stop_after(units))
    outcome = run(preview(), few(folder), path)
    assert outcome.measured == 441 - units
    assert_same(stored_result(path, outcome), previewed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_preview_spread_over_workers_has_the_content_of_one_in_line(
    kind: str, previewed: Arrays, folder: Path, tmp_path: Path, executors: Mapping[str, Executor]
) -> None:
    path = tmp_path / "results.h5"
    assert_same(stored_result(path, run(preview(), few(folder), path, executor=executors[kind])), previewed)


@pytest.mark.slow
def test_a_preview_that_errs_too_much_is_the_exact_surface(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    exact = stored_result(path, run(small("surface", resolution="21"), few(folder), path))
    found = stored_result(path, run(small("surface", resolution="21", preview=True, tolerance=1e-9), few(folder), path))
    assert found["evaluated"].all()
    assert found["hold_out_error"] > 1e-9
    np.testing.assert_array_equal(found["loss"], exact["loss"])
