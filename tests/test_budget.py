"""Budgets, autotuning and execution modes: what a budget lowers, what is stored, what a faster pass may change."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import attention_net, convolution_net, run_probe, same_state, state

from landscape.probes.surface import Surface
from landscape.results import group as groups
from landscape.results import reader
from landscape.running.run import run
from landscape.subject.loading import load as loading
from landscape.subject.other_samples import on_first, rebatched
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights
from landscape.weight_space import cost_model, forward_mode
from landscape.weight_space.cost_model import PRODUCTS, Rates, Workload, autotune, fit_to_budget
from landscape.weight_space.forward_mode import REFERENCE, ExecutionMode, ForwardPass, fastest, is_control_point
from landscape.weight_space.planes import Plane, plane_of

pytestmark = pytest.mark.slow


def product(grid: tuple[int, int]) -> int:
    return grid[0] * grid[1]


def each(grid: tuple[int, int], samples: int) -> float:
    """A millisecond per sample and point."""
    return product(grid) * samples * 1e-3


@pytest.fixture
def digits() -> Subject:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 10))
    return loading.load(model, data="digits", samples=256, batch_size=32, split="train")


@pytest.mark.parametrize("limit", [20.0, 60.0, 500.0, 1e4])
def test_resolution_and_samples_use_most_of_the_budget_and_not_more(limit: float) -> None:
    grid, samples = fit_to_budget((51, 51), 1024, product, each, limit, "")
    cost = each(grid, samples)
    assert cost <= limit
    assert cost > 0.8 * min(limit, 51 * 51 * 1.024)
    assert all(n % 2 == 1 and 11 <= n <= 51 for n in grid)
    assert 64 <= samples <= 1024


def test_a_budget_that_is_too_short_names_what_would_fit() -> None:
    with pytest.raises(ValueError, match=r"--budget 1s is too short: 11 x 11 points on 64 samples take about 8 s"):
        fit_to_budget((51, 51), 1024, product, each, 1.0, "1s")


def test_a_budget_counts_the_points_of_a_preview() -> None:
    def preview(grid: tuple[int, int]) -> int:
        return 340

    few, many = (
        fit_to_budget((51, 51), 1024, points, partial(Rates(1e-3).total, Workload(points)), 200.0, "")
        for points in (preview, product)
    )
    assert few[0] == (51, 51)
    assert few[1] > many[1]


def test_the_cost_of_a_run_counts_all_its_passes() -> None:
    rates = Rates(forward=1.0, reference=10.0, refresh=100.0, product=1000.0)
    points, origin = 6 * 1.0 * 7, 1.0 * 7
    assert rates.total(Workload(product), (2, 3), 7) == points + origin + 7 * 100.0
    assert replace(rates, refresh=0.0, compilation=5.0).total(Workload(product), (2, 3), 7) == 49.0 + 5.0
    assert (
        replace(rates, refresh=0.0).total(Workload(product, controls=lambda grid: 4), (2, 3), 7) == 49.0 + 4 * 10.0 * 7
    )
    assert replace(rates, refresh=0.0).total(Workload(product, corners=3), (2, 3), 7) == 49.0 + 3 * 10.0 * 7
    assert replace(rates, refresh=0.0).total(Workload(product, eigen=True), (2, 3), 7) == 49.0 + PRODUCTS * 1000.0 * 7


def test_only_parts_that_a_surface_needs_are_timed_and_the_model_is_unchanged() -> None:
    subject = convolution_net(sizes=(8, 5))
    kept = state(subject.model)
    reference = cost_model.rates(subject, REFERENCE, Surface()._workload)
    assert (reference.reference, reference.refresh, reference.product) == (0.0, 0.0, 0.0)
    fast = Surface(precision="bf16", bn="recalibrate:2", plane="eigen")
    found = cost_model.rates(subject, fast.mode, fast._workload)
    assert min(found.forward, found.reference, found.refresh, found.product) > 0
    assert same_state(subject.model, kept)


def test_the_estimate_of_a_preview_includes_that_of_every_point(
    digits: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("landscape.weight_space.cost_model.rates", lambda subject, mode, work: Rates(1 / 256))
    probe = Surface(resolution="51", preview=True)
    expected = "about 6 min, or 43 min if interpolation errs and all are evaluated"
    assert probe.estimate(digits, 2601)[1] == expected
    assert Surface(resolution="11", cap=3.0).estimate(digits, 121)[1] == "at most 2 min"
    advice = "about 43 min; --preview takes about 6 min and --budget 10m lowers resolution and samples to fit"
    assert Surface(resolution="51").estimate(digits, 2601)[1] == advice


def test_pairs_of_directions_share_a_budget_and_its_autotuning(
    digits: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = []
    monkeypatch.setattr(
        "landscape.weight_space.cost_model.autotune", lambda *_, budget, **__: budgets.append(budget) or {"samples": 64}
    )
    variants = Surface(directions=3, budget="1m").variants()
    assert [probe.autotune(digits) for probe in variants] == [{"samples": 64}] * 3
    assert budgets == ["20s"]


def test_with_a_budget_eigenvectors_are_computed_once_and_on_the_chosen_samples(
    digits: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought: list[int] = []

    def plane(subject: Subject, *args: Any, **options: Any) -> Plane:
        sought.append(len(subject))
        return replace(plane_of(subject, "random", **options), kind="eigen")

    monkeypatch.setattr("landscape.probes.surface._plane", once_per_weights(plane))
    monkeypatch.setattr(Surface, "autotune", lambda self, subject: {"samples": 64} if self.budget else {})
    run(Surface(plane="eigen", resolution="3", budget="1m"), digits, tmp_path / "results.h5")
    assert sought == [64]


def test_a_budget_cannot_reduce_batches_that_are_given_as_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.weight_space.cost_model.rates", lambda subject, mode, work: Rates(1 / 400))
    with pytest.raises(ValueError, match="needs fewer samples than the 400 in memory"):
        autotune(attention_net(sizes=(400,)), REFERENCE, grid=(11, 11), work=Workload(product), budget="1m")


def test_autotuned_choices_are_stored_and_used_again(
    digits: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "results.h5", []
    choices = {"resolution": "5,3", "samples": 64, "batch_size": 16, "memory_format": "channels_last"}

    def autotune(self: Surface, subject: Subject) -> dict[str, Any]:
        calls.append(self)
        return dict(choices) if self.tune else {}

    monkeypatch.setattr(Surface, "autotune", autotune)
    undecided = Surface(tune=True, budget="1m")
    first = run(undecided, digits, path)
    choices["resolution"] = "9"  # a faster machine, or a quieter hour
    again = run(undecided, digits, path)
    assert (first.units, again.units, again.measured, len(calls)) == (15, 15, 0, 1)
    assert again.group == first.group
    assert (groups.attribute(path, first.group, "samples"), groups.attribute(path, first.group, "batch_size")) == (
        64,
        16,
    )
    outright = Surface(resolution="5,3", memory_format="channels_last")
    assert (
        run(outright, rebatched(on_first(digits, 64), 16), path).group == first.group
    )  # one run key, autotuned or given
    assert run(undecided, digits, path, overwrite=True).units == 81


def test_fewer_samples_are_the_first_ones(digits: Subject) -> None:
    few = on_first(digits, 40)
    assert (len(few), len(few.batches)) == (40, 2)
    torch.testing.assert_close(few.batch(0)[0], digits.batch(0)[0], rtol=0, atol=0)
    assert on_first(digits, 999) is digits


def test_another_batch_size_or_format_is_chosen_only_if_it_is_clearly_faster(
    digits: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {(32, "contiguous"): 100.0, (32, "channels_last"): 104.0, (64, "contiguous"): 120.0}
    monkeypatch.setattr(
        forward_mode,
        "_samples_per_second",
        lambda subject, mode: rates.get((subject.batch_size, mode.memory_format), 90),
    )
    assert fastest(digits, REFERENCE) == (64, REFERENCE)
    rates[(32, "channels_last")] = 130.0
    assert fastest(digits, REFERENCE) == (32, ExecutionMode(memory_format="channels_last"))


def test_autotuning_returns_all_choices_and_the_estimate_a_time(digits: Subject) -> None:
    assert forward_mode.forward_seconds(digits, REFERENCE) > 0
    seconds, words = Surface(resolution="21").estimate(digits, 441)
    assert seconds > 0
    assert words.startswith("about ")
    found = autotune(digits, REFERENCE, grid=(51, 51), work=Workload(product), tune=True, budget="2h")
    assert set(found) == {"batch_size", "memory_format", "resolution", "samples"}


def test_channels_last_and_bf16_change_the_loss_by_little_and_say_by_how_much() -> None:
    subject = convolution_net(sizes=(20, 20))
    subject.model.float()
    plain = run_probe(Surface(resolution="5"), subject)
    for options in ({"memory_format": "channels_last"}, {"precision": "bf16"}):
        found = run_probe(Surface(resolution="5", **options), subject)  # type: ignore[arg-type]
        expected = np.abs(found["loss"] - plain["loss"]) / found["loss_se"]
        np.testing.assert_allclose(found["deviates"], expected, atol=1e-6)
        assert found["deviation_95"] <= found["deviation_max"] == np.max(found["deviates"])
    assert 0 < found["deviation_max"] < 0.5
    assert "deviates" not in plain


def test_bf16_weights_that_move_are_cast_anew_at_every_point() -> None:
    subject = attention_net(sizes=(12,))
    subject.model.float()
    probe = Surface(resolution="3", precision="bf16")
    together = run_probe(probe, subject)["loss"]
    alone = [probe.measure(subject, unit)["loss"] for unit in reversed(list(probe.plan(subject).units()))]
    np.testing.assert_array_equal(together.ravel(), alone[::-1])
    assert len(np.unique(together)) == 9


def test_a_compiled_model_sees_weights_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # traced alike, without a compiler
    subject = convolution_net()
    kept = state(subject.model)
    found, plain = (run_probe(Surface(resolution="3", compile=flag), subject) for flag in (True, False))
    np.testing.assert_allclose(found["loss"], plain["loss"], rtol=1e-12)
    assert found["deviation_max"] < 1e-9
    assert same_state(subject.model, kept)


@pytest.mark.parametrize("options", [{"compile": True}, {"precision": "bf16"}])
def test_a_faster_mode_stopped_and_resumed_gives_the_same_numbers_and_deviations(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def subject() -> Subject:
        found = convolution_net(sizes=(8, 5))  # the last mini-batch has another shape
        found.model.float()
        return found

    def stop(done: int, total: int) -> None:
        if done == 11:
            raise KeyboardInterrupt

    probe = Surface(resolution="5", **options)
    whole = run(probe, subject(), tmp_path / "whole.h5")
    with pytest.raises(KeyboardInterrupt):
        run(probe, subject(), tmp_path / "parts.h5", report=stop)
    parts = run(probe, subject(), tmp_path / "parts.h5")
    assert parts.measured == 14
    one, other = (reader.find(tmp_path / f"{name}.h5", "surface")[0][1] for name in ("whole", "parts"))
    for name in ("loss", "loss_se", "rise_se", "deviates", "deviation_95", "deviation_max"):
        np.testing.assert_array_equal(one[name], other[name])
    assert np.isfinite(one["deviates"]).all()
    assert whole.group == parts.group


def test_mini_batches_are_prepared_once_and_only_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = attention_net(sizes=(6, 6, 6))
    first = ForwardPass(subject, REFERENCE)
    outputs = [first(i)[0] for i in range(3)]
    assert len(first._cache) == 3
    monkeypatch.setattr(forward_mode, "CACHE_BYTES", subject.batch(0)[0].nbytes)
    tight = ForwardPass(attention_net(sizes=(6, 6, 6)), REFERENCE)
    for i in (0, 1, 2, 1):
        assert torch.equal(tight(i)[0], outputs[i])
    assert len(tight._cache) == 1


def test_control_points_are_spread_over_the_grid() -> None:
    found = [(i, j) for i in range(51) for j in range(21) if is_control_point((i, j), (51, 21))]
    assert len(found) == 25
    assert {(0, 0), (25, 10), (50, 20), (0, 20)} <= set(found)


def test_timings_of_work_that_does_not_wait_for_a_gpu_include_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(f"waits for {device}"))
    monkeypatch.setattr(cost_model, "SECONDS", 0.0)
    assert cost_model._mean_seconds(lambda: order.append("works"), torch.device("cuda", 1)) > 0
    assert order == ["works", "waits for cuda:1"] * 3
