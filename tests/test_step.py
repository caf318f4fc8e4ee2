"""The probe `step`: closed forms on quadratics, dense Hessians, the real optimiser's step, and what can go wrong."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from analytic import dense_hessian, quadratic, run_probe, symmetric, tanh_net
from test_preconditioner import Foreign, schedule_free, soap
from torch import Tensor, nn

import landscape
from landscape.options import OptionError
from landscape.probes.step import Step
from landscape.statistics.means import mean_and_standard_error
from landscape.subject.subject import Subject
from landscape.weight_space.optimizer_step import PASSES, critical_step

SGD: dict[str, Any] = {"optimizer": "sgd", "optimizer_arg": ("lr=0.1",)}


def _weights(subject: Subject) -> Tensor:
    return torch.cat([p.detach().flatten() for p in subject.parameters.values()])


def _gradient(subject: Subject, i: int) -> Tensor:
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(subject.objective(i), list(subject.parameters.values()))]
    )


def _hessian(subject: Subject, i: int) -> Tensor:
    """Of the objective."""
    return dense_hessian(subject, i) + subject.weight_decay * torch.eye(subject.size, dtype=torch.float64)


def _as_found(subject: Subject) -> tuple[Any, ...]:
    return copy.deepcopy(
        (subject.model.state_dict(), [p.grad for p in subject.model.parameters()], torch.get_rng_state())
    )


def test_critical_sharpness_of_a_quadratic_is_the_curvature_along_the_gradient() -> None:
    matrix = symmetric([9.0, 4.0, 1.0, 0.25])
    subject = quadratic(matrix, weight=torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64))
    found = run_probe(Step(**SGD), subject)
    g = matrix @ _weights(subject)
    exact = (g @ matrix @ g / (g @ g)).item()
    assert found["critical_sharpness"][0] == pytest.approx(exact, rel=2**-4)
    assert found["critical_passes"][0] <= PASSES
    assert found["gradient_sharpness"][0] == pytest.approx(exact)
    assert found["directional_sharpness"][0] == pytest.approx(exact)
    assert found["angle"][0] == pytest.approx(0, abs=1e-5)
    assert found["update_norm"][0] == pytest.approx(0.1 * found["gradient_norm"][0])
    change = -0.1 * (g @ g).item() + 0.005 * (g @ matrix @ g).item()
    assert found["actual_change"][0] == pytest.approx(change)
    assert found["predicted_change"][0] == pytest.approx(change)


def test_the_critical_step_of_random_quadratics_takes_at_most_ten_passes() -> None:
    generator = random.Random(0)
    within = passes = 0
    for _ in range(200):
        slope, exact = -(10 ** generator.uniform(-6, 1)), 10 ** generator.uniform(-4, 4)
        calls: list[float] = []

        def change(c: float, slope: float = slope, exact: float = exact, calls: list[float] = calls) -> float:
            calls.append(c)
            return slope * c * (1 - c / exact)

        found = critical_step(change, slope)
        assert found.passes == len(calls) + 1 <= PASSES
        within += found.converged and abs(found.multiple / exact - 1) < 2**-4
        passes += found.passes
    assert within == 200
    assert passes <= 200 * 4


def test_a_search_from_the_last_critical_step_takes_few_passes_and_finds_one_that_has_moved() -> None:
    random, passes = np.random.default_rng(0), []
    for _ in range(1000):
        true = 10 ** random.uniform(-1, 4)
        guess = true * 2 ** random.normal(0, 0.03)
        found = critical_step(lambda c, true=true: -c + c**2 / true, -1.0, guess=guess)  # type: ignore[misc]
        assert found.multiple == pytest.approx(true, rel=2**-4)
        passes.append(found.passes)
    assert np.mean(passes) <= 4
    for true in (0.02, 0.3, 20.0, 300.0):  # the last one was 3
        found = critical_step(lambda c, true=true: -c + c**2 / true, -1.0, guess=3.0)  # type: ignore[misc]
        assert found.multiple == pytest.approx(true, rel=2**-4)


def test_a_critical_step_far_away_is_found_where_the_loss_has_flattened_out() -> None:
    """The last critical step lies beyond it, on a line to the start that a parabola through both hardly leaves."""
    level = math.exp(-260 / 50)
    found = critical_step(lambda c: c * (level - math.exp(-c / 50)), level - 1, guess=330.0)
    assert found.converged
    assert found.multiple == pytest.approx(260, rel=2**-4)


def test_a_critical_step_that_is_not_bracketed_is_said_to_be_unknown() -> None:
    for change, slope in ((lambda c: -c, -1.0), (lambda c: c, 1.0), (lambda c: 0.0, 0.0), (lambda c: c, math.nan)):
        found = critical_step(change, slope)
        assert math.isnan(found.multiple)
        assert not found.converged
    overflow = critical_step(lambda c: -c if c < 3 else math.inf, -1.0)
    assert overflow.multiple == pytest.approx(3, rel=2**-4)
    # by the tangent at the end: a slope that turns out to be above 0 is given up, and a crossing at the end is known
    rising = critical_step(lambda c: 0.1 * c + c**3, -0.9, known=(1.001, 1.1 + 0.001 * 2.0))
    assert (rising.converged, rising.passes <= 4) == (False, True)
    assert critical_step(lambda c: c**2 - 1.02 * c, -1.02, known=(1.001, -0.019)).passes == 2
    # a guess far off, a wall instead of a parabola
    assert critical_step(lambda c: -c if c < 0.2 else 1.0, -1.0, guess=2.0).multiple == pytest.approx(0.2, rel=2**-4)


def _real_update(subject: Subject, i: int, optimizer: Any) -> Tensor:
    """The change of the weights by a real step on a copy of the model, flat."""
    other = copy.deepcopy(subject.model)
    parameters = [p for p in other.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten() for p in parameters])
    inputs, targets = subject.batch(i)
    made = optimizer(parameters)
    subject.losses(other(inputs), targets).mean().backward()
    made.step()
    return torch.cat([p.detach().flatten() for p in parameters]) - before


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(
    ("options", "made"),
    [
        (SGD, lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            {"optimizer": "adamw", "optimizer_arg": ("lr=0.02", "weight_decay=0.5")},
            lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.5),
        ),
    ],
)
def test_every_quantity_equals_that_of_a_dense_hessian_and_a_real_step(
    options: Mapping[str, Any], made: Any, weight_decay: float
) -> None:
    subject = tanh_net(sizes=(6, 6, 6), weight_decay=weight_decay)
    before = _as_found(subject)
    found = run_probe(Step(others=2, **options), subject)
    torch.testing.assert_close(_as_found(subject), before, rtol=0, atol=0)
    for i in range(3):
        u, g, h = _real_update(subject, i, made), _gradient(subject, i), _hessian(subject, i)
        expected = {
            "update_norm": u.norm(),
            "gradient_norm": g.norm(),
            "angle": torch.rad2deg(torch.acos((-(u @ g) / (u.norm() * g.norm())).clamp(max=1.0))),
            "directional_sharpness": u @ h @ u / (u @ u),
            "gradient_sharpness": g @ h @ g / (g @ g),
            "predicted_change_first": g @ u,
            "predicted_change": g @ u + u @ h @ u / 2,
            "actual_change": _moved(subject, u, i) - subject.objective(i),
            "loss": subject.objective(i),
        }
        beside = [j for j in range(3) if j != i]
        second = [_gradient(subject, j) @ u + u @ _hessian(subject, j) @ u / 2 for j in beside]
        expected["other_predicted_change"] = torch.stack(second).mean()
        actual = [_moved(subject, u, j) - subject.objective(j) for j in beside]
        expected["other_actual_change"] = torch.stack(actual).mean()
        for name, value in expected.items():
            assert found[name][i] == pytest.approx(value.item(), rel=1e-5, abs=1e-4 if name == "angle" else 1e-12), name
        multiple, rate = found["critical_multiple"][i], 0.1 if options is SGD else 0.02
        if not found["converged"][i]:  # the objective stays below its start as far as ten passes reach
            assert np.isnan(multiple)
            assert found["critical_passes"][i] == PASSES
            continue
        # along c u the objective is at its start where the critical learning rate is, within the width of the bracket
        assert found["critical_sharpness"][i] == pytest.approx(2 / (multiple * rate))
        below, above = (
            (_moved(subject, c * u, i) - subject.objective(i)).item() for c in (multiple / 1.05, multiple * 1.05)
        )
        assert below <= 0 < above
    assert weight_decay == 0 or found["converged"].all()


def _moved(subject: Subject, update: Tensor, i: int) -> Tensor:
    """The objective after an update, on a copy."""
    other = Subject(
        copy.deepcopy(subject.model), subject.batches, losses=subject.losses, weight_decay=subject.weight_decay
    )
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(_weights(subject) + update, list(other.parameters.values()))
        return other.objective(i)


def test_summaries_are_means_over_mini_batches_with_their_errors() -> None:
    subject = tanh_net(sizes=(6, 6, 6, 6, 3))  # the smaller last one is left out
    found = run_probe(Step(**SGD), subject)
    assert found["loss"].shape == (4,)
    along, squares = found["gradient_sharpness"], found["gradient_norm"] ** 2
    mean, error = mean_and_standard_error(along)
    assert (found["mean_batch_sharpness"], found["mean_batch_sharpness_se"]) == (mean, error)
    np.testing.assert_array_equal(found["batch_sharpness"], along)
    assert found["pooled_batch_sharpness"] == pytest.approx((along * squares).sum() / squares.sum())
    left_out = [np.delete(along * squares, i).sum() / np.delete(squares, i).sum() for i in range(4)]
    assert found["pooled_batch_sharpness_se"] == pytest.approx(np.std(left_out) * math.sqrt(3))
    mean, error = mean_and_standard_error(found["actual_change"])
    assert (found["mean_actual_change"], found["mean_actual_change_se"]) == (mean, error)
    assert found["descending"] == 1.0


def test_clipping_shortens_the_gradient_that_the_optimiser_gets() -> None:
    subject = tanh_net()
    plain, clipped = (run_probe(Step(clip=clip, **SGD), subject) for clip in (0.0, 0.01))
    assert clipped["update_norm"][0] == pytest.approx(0.1 * 0.01, rel=1e-3)
    np.testing.assert_allclose(clipped["gradient_norm"], plain["gradient_norm"])
    shortened = 0.01 / plain["gradient_norm"]
    np.testing.assert_allclose(clipped["critical_multiple"] * shortened, plain["critical_multiple"], rtol=0.09)


class Soap(Foreign):
    """Of another package."""

    def __init__(self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, soap, lr, betas=betas, eps=1e-3)  # the classes of a softmax have a null direction


class ScheduleFree(Foreign):
    """Of another package, with modes as `schedulefree` has."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, schedule_free, lr, momentum=momentum, train_mode=False)

    def train(self, mode: bool = True) -> None:
        for group in self.param_groups:
            group["train_mode"] = mode

    def step(self, closure: Any = None) -> None:
        assert all(group["train_mode"] for group in self.param_groups)
        super().step()


PACKAGES = {kind.__name__: SimpleNamespace(load=lambda kind=kind: kind) for kind in (Soap, ScheduleFree)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SGD", *PACKAGES])
def test_the_state_of_a_checkpoint_makes_the_step_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("plugins", "beside"):
        monkeypatch.setattr(f"landscape.checkpoints.optimizer_state.{name}", lambda *_: PACKAGES)
    (tmp_path / "net.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(4, 3)\n")
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inputs, targets = torch.randn(16, 4), torch.arange(16) % 3
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if kind != "SGD":
        optimizer = PACKAGES[kind].load()(model.parameters(), lr=0.5)
        getattr(optimizer, "train", bool)()
    for i in range(5):
        part = slice(8 * (i % 2), 8 * (i % 2) + 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    how: Any = {"model": f"{tmp_path}/net.py:net", "data": (inputs, targets), "batch_size": 8}
    named = {"out": None, "quiet": True} | ({"optimizer": kind} if kind != "SGD" else {})
    found = landscape.measure("step", landscape.load(tmp_path / "last.pt", **how), **named)
    expected = {"SGD": "SGD(lr=0.5, momentum=0.9", "Soap": "Soap(lr=0.5, betas=(0.9, 0.99)"}
    assert found.attrs["optimizer"].startswith(expected.get(kind, "ScheduleFree(lr=0.5"))
    assert "state" in found.attrs["optimizer"]
    assert found.attrs["optimizer"].endswith(" from last.pt")
    assert ("threshold" in found) == (kind == "SGD")  # none is known of the others
    start = nn.functional.cross_entropy(model(inputs[8:]), targets[8:]).item()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs[8:]), targets[8:]).backward()
    optimizer.step()
    update = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert found["update_norm"].values[1] == pytest.approx(update.norm().item(), rel=1e-5)
    end = nn.functional.cross_entropy(model(inputs[8:]), targets[8:]).item()
    assert found["actual_change"].values[1] == pytest.approx(end - start, abs=1e-6)
    if kind == "ScheduleFree":
        optimizer.train(False)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "eval.pt")
        with pytest.raises(ValueError, match=r"saved after eval\(\), beside averaged weights"):
            landscape.measure("step", landscape.load(tmp_path / "eval.pt", **how), **named)


def test_an_update_against_which_the_loss_rises_has_no_critical_sharpness() -> None:
    subject = tanh_net()
    found = run_probe(Step(optimizer="sgd", optimizer_arg=("lr=0.1", "maximize=true")), subject)
    assert found["descends"].tolist() == [0.0, 0.0]
    assert np.isnan(found["critical_sharpness"]).all()
    assert found["angle"][0] == pytest.approx(180)
    assert found["descending"] == 0.0


def test_a_zero_gradient_leaves_out_what_has_no_direction() -> None:
    subject = quadratic(symmetric([2.0, 1.0]), weight=torch.zeros(2, dtype=torch.float64))
    found = run_probe(Step(**SGD), subject)
    for name in ("gradient_norm", "update_norm", "actual_change", "predicted_change"):
        assert found[name][0] == 0.0
    for name in ("angle", "directional_sharpness", "gradient_sharpness", "critical_sharpness", "descends"):
        assert np.isnan(found[name][0])
    assert "mean_batch_sharpness" not in found or np.isnan(found["mean_batch_sharpness"])
    assert np.isnan(found["batch_sharpness"]).all()


def test_frozen_parameters_do_not_move() -> None:
    subject = tanh_net()
    first, *_ = subject.model.parameters()
    first.requires_grad_(False)
    found = run_probe(Step(**SGD), subject)
    assert found["gradient_norm"][0] == pytest.approx(_gradient(subject, 0).norm().item())
    whole = tanh_net()
    assert found["gradient_norm"][0] < _gradient(whole, 0).norm().item()


@pytest.mark.slow
def test_a_loss_of_the_whole_mini_batch_is_taken_as_it_is_and_a_sum_is_refused() -> None:
    model, (inputs, targets) = nn.Linear(4, 3), (torch.randn(12, 4), torch.arange(12) % 3)

    def spread(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.var(dim=0).sum() + nn.functional.cross_entropy(outputs, targets)

    subject = landscape.load(model, data=(inputs, targets), batch_size=6, loss=spread)
    found = landscape.measure("step", subject, out=None, quiet=True, **SGD)
    gradients = torch.autograd.grad(spread(model(inputs[:6]), targets[:6]), list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm().item()
    assert found["gradient_norm"].values[0] == pytest.approx(norm, rel=1e-5)

    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")

    with pytest.raises(ValueError, match="returns the sum over the mini-batch"):
        landscape.load(model, data=(inputs, targets), batch_size=6, loss=total)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="has no optimiser state; save torch's"):
        run_probe(Step(), tanh_net())
    with pytest.raises(OptionError, match="closure"):
        Step(optimizer="LBFGS")
    with pytest.raises(ValueError, match=r"--batches 5 needs as many whole mini-batches, and .* gives 2 of 6 samples"):
        run_probe(Step(batches=5, **SGD), tanh_net())
    with pytest.raises(OptionError, match="--clip must be at least 0"):
        Step(clip=-1.0, **SGD)
    broken = tanh_net()
    with torch.no_grad():
        next(broken.model.parameters())[0, 0] = math.inf
    found = run_probe(Step(**SGD), broken)
    assert np.isnan(found["update_norm"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_preconditioned_eigenvalues_are_those_of_dense_matrices(
    kind: str, weight_decay: float, tmp_path: Path
) -> None:
    subject = tanh_net()
    made: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.25),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.5),
    }
    optimizer = made[kind](subject.model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        subject.objective(0).backward()
        optimizer.step()
    torch.save({"model": subject.model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()\n"
    )
    data = tuple(torch.cat(parts) for parts in zip(*subject.batches, strict=True))
    loaded = landscape.load(
        tmp_path / "a.pt", model=f"{tmp_path / 'net.py'}:net", data=data, batch_size=6, weight_decay=weight_decay
    )
    found = landscape.measure("step", loaded, out=None, quiet=True, top=2)
    if kind == "sgd":
        diagonal, decay, threshold = torch.ones(subject.size, dtype=torch.float64), 0.25, 3 / 0.1
    else:
        second = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in subject.model.parameters()])
        diagonal = (1 - 0.9**5) * ((second / (1 - 0.999**5)).sqrt() + 1e-8)
        decay, threshold = 0.0, 3.8 / (0.1 * 0.05) * (1 - 0.05 * 0.5 / 2)
    scale = diagonal.rsqrt()
    rows = []
    for i in range(len(subject.batches)):
        matrix = dense_hessian(subject, i) + decay * torch.eye(subject.size, dtype=torch.float64)
        rows.append(torch.linalg.eigvalsh(scale[:, None] * matrix * scale).flip(0)[:2].numpy())
    exact = np.array(rows)
    assert found["batch_preconditioned"].values == pytest.approx(exact, rel=2e-3)
    assert (np.abs(found["batch_preconditioned"] - exact) <= found["batch_preconditioned_error"] + 1e-9 * exact).all()
    assert (found["batch_preconditioned_converged"] == 1).all()
    assert found["preconditioned"].values == pytest.approx(exact.mean(axis=0), rel=2e-3)
    error = exact.std(axis=0, ddof=1) / math.sqrt(len(exact))
    assert found["preconditioned_se"].values == pytest.approx(error, rel=0.05)
    assert found["threshold"].item() == pytest.approx(threshold, rel=1e-12)


@pytest.mark.parametrize("options", [("adam", ("lr=0.1",)), ("rprop", ())], ids=["before an update", "no threshold"])
def test_an_optimiser_without_a_preconditioner_has_no_preconditioned_eigenvalues(
    options: tuple[str, tuple[str, ...]],
) -> None:
    optimizer, arguments = options
    subject = tanh_net()
    found = landscape.measure(
        "step", subject, out=None, quiet=True, optimizer=optimizer, optimizer_arg=arguments, optimizer_state=False
    )
    assert {"preconditioned", "batch_preconditioned", "threshold", "rank"}.isdisjoint(found.variables)
    assert np.isfinite(found["mean_batch_sharpness"].item())


def test_beside_muon_adamw_moves_the_rest_with_its_own_defaults() -> None:
    found = landscape.measure(
        "step", tanh_net(), out=None, quiet=True, optimizer="muon", optimizer_arg=("lr=0.5", "weight_decay=0.3")
    )
    muon, adamw = found.attrs["optimizer"].split(" + ")
    assert "lr=0.5, weight_decay=0.3" in muon
    assert "lr=0.001" in adamw
    assert "weight_decay=0.01" in adamw
    assert found.attrs["learning_rate"] == 0.5


def test_preconditioned_eigenvalues_can_be_left_out() -> None:
    found = landscape.measure("step", tanh_net(), out=None, quiet=True, top=0, **SGD)
    assert "preconditioned" not in found
    assert found["threshold"].item() == pytest.approx(20)
