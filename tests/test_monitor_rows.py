"""Rows of a monitor come from a gradient and forward passes, and the noise scale of micro-batches without a pass."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_monitor import ALL, data, network, train
from torch import Tensor, nn
from torch.nn import functional as F

import landscape
from landscape.cli.main import exit_code
from landscape.doctor.rules import examine
from landscape.monitoring.budget import Budget
from landscape.monitoring.followed_model import rate_of, subject_of
from landscape.monitoring.gradients import BUCKETS, UPDATES, Start, estimates, gram, noise, pooled, sketch_of
from landscape.monitoring.measurement import TrackedEigenvalues
from landscape.monitoring.shards import Shards
from landscape.monitoring.stored_series import EarlyWarning, plan_of
from landscape.statistics.intervals import BY_BOUNDS
from landscape.subject.optimizer_rules import Together

pytestmark = pytest.mark.slow


class Bowl(nn.Module):
    """A quadratic w'Hw / 2 for its one weight, whatever the inputs."""

    def __init__(self, hessian: Tensor, start: Tensor) -> None:
        super().__init__()
        self.hessian, self.w = hessian, nn.Parameter(start)

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.w @ self.hessian @ self.w / 2).expand(len(inputs))


def loss_of_bowl(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def test_rows_between_those_with_eigenvalues_have_what_a_gradient_and_passes_along_the_update_made_tell(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(20, 20, generator=generator, dtype=torch.float64))
    hessian = basis @ torch.diag(torch.logspace(-2, 1, 20, dtype=torch.float64)) @ basis.T
    model = Bowl(hessian, torch.randn(20, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    rows: list[dict[str, float]] = []
    norms: list[float] = []

    def logger(row: dict[str, float]) -> None:
        rows.append(row)
        if len(rows) == 9:
            raise RuntimeError("no server\nat all")

    batch = torch.zeros(4, 1), torch.zeros(4)
    how: dict[str, Any] = {"every": 1, "out": tmp_path / "r.h5", "optimizer": optimizer, "noise": 0, **ALL}
    monitor = landscape.Monitor(model, loss_of_bowl, batch, on_row=logger, other=batch, **how)
    monitor._budget.allows = lambda kind, interval: kind == "row" or monitor.number == 5  # type: ignore[method-assign]
    expected = []
    for _ in range(12):
        g = hessian @ model.w.detach()
        optimizer.zero_grad()
        model(batch[0]).mean().backward()
        optimizer.step()
        monitor.step()
        expected.append((g @ hessian @ g / (g @ g), -0.02 * g @ g))
        norms.append((hessian @ model.w.detach()).norm().item())
    found = monitor.data()
    sharpness, first = np.array(expected).T
    assert np.isnan(found["critical_sharpness"].values[0])
    assert np.abs(found["critical_sharpness"].values[1:] / sharpness - 1).max() < 2**-4
    assert np.abs(found["relative_critical_sharpness"].values[1:] / sharpness - 1).max() < 2**-4
    assert found["gradient_norm"].values[1:] == pytest.approx(np.array(norms), rel=1e-9)
    assert found["predicted_change"].values[1:] == pytest.approx(first, rel=1e-9)
    assert found["actual_change"].values[1:] == pytest.approx(np.diff(found["loss"].values), rel=1e-9)
    assert found["critical_passes"].values[1] <= 8
    assert found["critical_passes"].values[2:].mean() <= 5
    assert np.flatnonzero(np.isfinite(found["eigenvalue"].values[:, 0])).tolist() == [0, 5]
    assert found["norm_sharpness"].values[5] == pytest.approx(sharpness[4], rel=1e-9)
    assert [row["step"] for row in rows] == list(range(9))
    assert rows[8]["critical_sharpness"] == found["critical_sharpness"].values[8]
    assert "eigenvalue" in rows[0]
    assert "eigenvalue" not in rows[1]
    (said,) = (record.getMessage() for record in caplog.records if record.name.startswith("landscape.monitoring"))
    assert said.startswith("warning: on_row raised RuntimeError (no server) at step 8 and is not called again;")


def test_every_row_has_what_is_promised_of_the_group_that_made_the_update_in_the_passes_that_it_counts(
    tmp_path: Path,
) -> None:
    model, batch, calls = network(), data(), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    groups = [{"params": [*model[4].parameters()], "lr": 0.05}, {"params": [*model[0].parameters()], "lr": 9.0}]
    optimizer = torch.optim.SGD(groups)  # the larger rate is that of a group without a gradient
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model.register_forward_pre_hook(count)
    how: dict[str, Any] = {"every": 1, "out": tmp_path / "r.h5", "optimizer": optimizer, "noise": 0, **ALL}
    monitor = landscape.Monitor(model, F.cross_entropy, batch, **how)
    monitor._budget.allows = lambda kind, interval: kind == "row"  # type: ignore[method-assign]
    rates, passes = [], []
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model[4](model[:4](batch[0].double()).detach()), batch[1]).backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()  # before the row: its rate is not that of the update
        calls = 0
        monitor.step()
        passes.append(calls)
    found = monitor.data().isel(step=slice(1, None))
    assert found["learning_rate"].values == pytest.approx(rates)
    assert found["critical_passes"].values.tolist() == passes
    sharper = found["critical_sharpness"].values * found["critical_multiple"].values
    assert sharper == pytest.approx(2 / np.array(rates), nan_ok=True)
    for name in ("gradient_norm", "update_norm", "distance", "loss", "predicted_change", "actual_change"):
        assert np.isfinite(found[name].values).all(), name


def test_without_a_gradient_the_rate_is_that_of_the_groups_that_hold_the_model() -> None:
    models = nn.Linear(1, 1), nn.Linear(1, 1)
    several = Together(
        *(torch.optim.SGD(one.parameters(), lr=rate) for one, rate in zip(models, (0.1, 9.0), strict=True))
    )
    assert rate_of(several, {id(p) for p in models[0].parameters()}) == 0.1


def test_noise_is_unbiased_for_gradients_of_known_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, spread = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([0.5, 1.0, 3.0]).double()
    found = []
    for _ in range(800):
        samples = mean + spread * torch.randn(8, 4, 3, generator=generator, dtype=torch.float64)
        found.append(noise(gram(list(samples.mean(dim=1))), 4))
    squared, variance = (np.array([one[f"gradient_{name}"] for one in found]) for name in ("squared", "variance"))
    for values, expected in ((squared, float(mean.square().sum())), (variance, float(spread.square().sum()))):
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(values))
    errors = np.array([one["noise_scale_se"] for one in found])
    scales = np.array([one["noise_scale"] for one in found])
    assert np.median(errors[np.isfinite(errors)]) == pytest.approx(np.nanstd(scales[scales < 20]), rel=0.5)


@pytest.mark.parametrize(("count", "size", "bias"), [(4, 16, 0.02), (2, 8, 0.06)])
def test_intervals_of_the_free_noise_scale_cover_the_true_one(count: int, size: int, bias: float) -> None:
    model = network()
    subject = subject_of(model, F.cross_entropy, data(), "", None)
    interval = BY_BOUNDS[plan_of(subject, 1, 0, np.zeros(BUCKETS)).quantities["simple_noise_scale"].bounds]
    random, covered, scales = np.random.default_rng(0), [], []
    mean, spread = np.array([1.0, -2.0, 0.5, 0.0]), np.array([1.0, 2.0, 3.0, 2.0])
    true = float((spread**2).sum() / (mean**2).sum())
    for _ in range(1000):
        parts = mean + spread * random.standard_normal((UPDATES, count, size, 4)).mean(axis=2)  # of micro-batches
        small, large = (parts**2).sum(axis=2).mean(axis=1), (parts.mean(axis=1) ** 2).sum(axis=1)
        squared, variance = estimates(small, large, count, size)  # type: ignore[arg-type]
        scale, error = pooled([*zip(squared, variance, strict=True)]).values()
        scales.append(scale)
        low, high = interval(scale, error, UPDATES)
        covered.append(low <= true <= high)
    assert np.mean(scales) == pytest.approx(true, rel=bias)
    assert 0.93 <= np.mean(covered) <= 0.97


def test_the_free_noise_scale_is_that_of_the_gradients_accumulated_in_an_update(tmp_path: Path) -> None:
    model = network()
    model[3].eval()  # without dropout the same gradients come again
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = landscape.Monitor(model, F.cross_entropy, data(), every=1, out=tmp_path / "r.h5", **ALL)
    inputs, targets = data()
    sums: list[Tensor] = []
    for parts, factor in ((3, 1), (4, 1), (1, 1), (2, math.inf)):  # one pass tells nothing, nor do those that overflow
        optimizer.zero_grad()
        for rows in torch.arange(24).chunk(parts):
            (factor * F.cross_entropy(model(inputs[rows].double()), targets[rows]) / parts).backward()
            flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            sums = [*(sums if rows[0] else []), flat.clone()]
        if factor == 1:  # a gradient scaler leaves out the other
            optimizer.step()
        monitor.step(monitor.number + 1)
        if parts == 3:
            gradients = [sums[0], *(after - before for before, after in itertools.pairwise(sums))]
            expected = noise(gram(gradients), 8)
    found = monitor.data()["simple_noise_scale"].values
    assert found[1] == pytest.approx(expected["noise_scale"], nan_ok=True)
    assert found[3:] == pytest.approx(found[2], nan_ok=True)
    known = np.array(monitor._noise)
    assert known[0] == pytest.approx(np.array([expected["gradient_squared"], expected["gradient_variance"]]))
    assert known.shape == (2, 2)
    assert np.isfinite(known).all()
    monitor.close()
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_compiled_model_trains_and_is_followed_as_the_same_model(tmp_path: Path) -> None:
    rows = []
    for compiled in (False, True):
        model = network(dtype=torch.float32)
        forward = torch.compile(model, backend="eager") if compiled else model
        monitor = landscape.Monitor(model, F.cross_entropy, data(), every=1, out=tmp_path / f"{compiled}.h5", **ALL)
        train(forward, 2, monitor.step)
        rows.append(monitor.data()["gradient_norm"].values)
        monitor.close()
    np.testing.assert_array_equal(*rows)
    assert pooled([(1.0, 2.0)]) == {
        "simple_noise_scale": 2.0,
        "simple_noise_scale_se": pytest.approx(math.nan, nan_ok=True),
    }


def test_costs_that_scatter_as_in_sound_trainings_raise_no_alarm() -> None:
    costs = 0.1 * np.exp(0.6 * np.random.default_rng(0).standard_normal(5000))  # of a loss of 1
    warning = EarlyWarning()
    assert np.nansum([warning.alarm(0, 1.0, 0.0, -cost) for cost in costs]) == 0


def test_a_loss_spike_after_a_jump_of_the_rate_is_announced_and_a_sound_run_has_no_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 20, generator=generator)
    targets = (inputs[:, :5] + torch.randn(512, 5, generator=generator)).argmax(dim=1)
    announced: dict[str, list[int]] = {}
    for name, factor in (("sound", 1.0), ("jump", 12.0)):
        torch.manual_seed(1)
        model, losses = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        how: dict[str, Any] = {"every": 4, "out": tmp_path / "r.h5", "label": name, "noise": 0, **ALL}
        monitor = landscape.Monitor(model, F.cross_entropy, (inputs[:64], targets[:64]), **how)
        monitor._budget.allows = lambda kind, interval: kind == "row"  # type: ignore[method-assign]
        for step in range(280):
            optimizer.param_groups[0]["lr"] = 0.05 * (factor if step >= 200 else 1.0)
            rows = torch.randint(512, (32,), generator=generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            monitor.step()
            losses.append(loss.item())
        found = monitor.data()
        monitor.close()
        announced[name] = found["step"].values[found["alarm"].values == 1].tolist()
    assert announced["sound"] == []
    first = announced["jump"][0]
    assert 200 < first <= 220
    mean = np.convolve(losses, np.full(5, 0.2), "valid")  # of the five losses from each step on
    assert first < 200 + np.flatnonzero(mean[200:] > 2 * np.mean(losses[100:200]))[0]
    said = [record.getMessage() for record in caplog.records if "loss spike" in record.getMessage()]
    assert said[0].startswith(f"warning: a loss spike may follow step {first}: ")
    assert exit_code(["plot", str(tmp_path / "r.h5"), "--out", str(tmp_path / "figures")]) == 0
    findings = [one for one in examine([tmp_path / "r.h5"]) if one.rule == "announced-spike"]
    assert [one.groups[0].rpartition("-")[0] for one in findings] == ["monitor/jump"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_measurements_keep_within_their_share_of_the_training_time() -> None:
    clock = Clock()
    budget = Budget(0.02, torch.device("cpu"), clock)
    measured: dict[str, list[int]] = {"check": [], "eigenvalues": [], "row": []}
    for step in range(20_001):
        clock.now += 0.01 if step else 0.0
        for kind in ("eigenvalues" if measured["check"] else "check", "row"):
            if step % 100 == 0 and budget.allows(kind, 1.0):  # type: ignore[arg-type]
                with budget.measuring(kind):  # type: ignore[arg-type]
                    clock.now += {"check": 0.5, "eigenvalues": 0.1, "row": 0.014}[kind]
                measured[kind].append(step)
                break
        assert not step or budget.spent <= max(0.02 * budget.training, 0.5 + 0.015 * budget.training)
    assert measured["check"] == [0]
    assert sorted(measured["row"] + measured["eigenvalues"]) == list(range(100, 20_001, 100))
    assert 8_000 < measured["eigenvalues"][0] < 13_000  # after the first one has been paid for
    assert budget.training == pytest.approx(200.0)


@pytest.mark.parametrize(("first", "usual", "rows"), [(80.0, 1.75, 100), (2000.0, 38.0, 4)])
def test_rows_that_take_longer_than_others_are_paid_for_by_these_and_leave_out_none(
    first: float, usual: float, rows: int
) -> None:
    clock = Clock()
    budget = Budget(0.02, torch.device("cpu"), clock)
    with budget.measuring("check"):
        clock.now += first
    generator, made = np.random.default_rng(0), 0
    for _ in range(100):
        clock.now += 100.0  # steps of a second
        assert budget.spent - first <= 0.02 * budget.training + 0.6 * usual  # by which a row may exceed the expected
        if budget.allows("row", 100.0):
            with budget.measuring("row"):  # the first is cold, and every tenth is slowed down by something else
                clock.now += usual * ((1.4 if made % 10 == 0 else 0.85) + generator.uniform(0, 0.2))
            made += 1
    assert made == rows


def test_a_measurement_that_is_too_expensive_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    monitor = landscape.Monitor(model, F.cross_entropy, data(), every=1, out=tmp_path / "r.h5", overhead=1e-9)
    train(model, 5, monitor.step)
    monitor._budget.overhead = math.inf
    train(model, 1, monitor.step)
    found = monitor.data()
    assert found["step"].values.tolist() == [0, 6]
    assert found["skipped"].values.tolist() == [0, 5]
    (said,) = (record.getMessage() for record in caplog.records if record.name.startswith("landscape.monitoring"))
    assert re.match(
        r"note: a row without eigenvalues takes as long as \S+ training steps; to keep within 1e-07 % .* not at 1;",
        said,
    )
    assert "overhead" in found.attrs["schedule"]


def test_the_sketch_of_many_weights_keeps_distances_within_its_error() -> None:
    alone = Shards(nn.Linear(1, 1))
    generator = torch.Generator().manual_seed(0)
    before = {"a": torch.randn(300, 200, generator=generator), "b": torch.randn(40_000, generator=generator)}
    after = {name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in before.items()}
    exact, none = Start(before, alone).distance(after)
    resumed = Start(after, alone)
    resumed.resume(sketch_of(before))
    found, error = resumed.distance(after)
    assert none == 0.0
    assert error == pytest.approx(found / math.sqrt(2 * BUCKETS))
    assert 0 < abs(found - exact) < 4 * error
    few = {"a": before["a"][:20]}
    moved = {"a": after["a"][:20]}
    resumed.resume(sketch_of(few))
    assert resumed.distance(moved) == pytest.approx(Start(few, alone).distance(moved))


def test_a_search_from_the_last_vectors_finds_what_they_have_nothing_of_and_so_does_a_check() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(200, 200, generator=generator, dtype=torch.float64))[0]
    values = torch.cat([torch.linspace(0, 5, 199), torch.tensor([8.0])]).double()
    hidden = values.clone()
    hidden[0] = 10.0
    tracked = TrackedEigenvalues(1, 1e-4, 200, basis[0], seed=0)
    for matrix, check in ((values, False), (values * 1.01, False), (hidden, False), (hidden, True)):
        full = basis @ torch.diag(matrix) @ basis.T
        found = tracked.search(lambda v, full=full: full @ v, check=check)
        assert found["eigenvalue"][0] == pytest.approx(matrix.max().item(), rel=1e-4)
    assert found["warm_error"] == pytest.approx(0.0, abs=1e-4)


def test_a_value_that_overtakes_the_largest_between_two_searches_is_found() -> None:
    """The largest eigenvector hardly moves, and another one has the largest eigenvalue now."""
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(200, 200, dtype=torch.float64, generator=generator))
    bulk = torch.rand(198, dtype=torch.float64, generator=generator)
    tracked = TrackedEigenvalues(1, 5e-3, 200, basis[0], seed=0)
    for first, second in ((10.0, 9.0), (8.0, 10.0), (7.0, 9.5)):
        full = basis @ torch.diag(torch.cat([torch.tensor([first, second]).double(), bulk])) @ basis.T
        found = tracked.search(lambda v, full=full: full @ v, check=False)
        assert found["eigenvalue"][0] == pytest.approx(max(first, second), rel=1e-2)


def test_a_model_that_overflows_has_rows_without_eigenvalues(tmp_path: Path) -> None:
    model = network()
    monitor = landscape.Monitor(model, F.cross_entropy, data(), every=1, out=tmp_path / "r.h5", **ALL)
    for p in model.parameters():
        p.data.fill_(math.inf)
    monitor.step()
    found = monitor.data()
    assert found["converged"].values[:, 0].tolist() == [1, 0]
    assert np.isnan(found["eigenvalue"].values[1, 0])
    assert not np.isfinite(found["loss"].values[1])
