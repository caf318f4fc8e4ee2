"""Sharpness-aware minimisation: one update against the formula written out, and what it must not depend on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from landscape.checkpoints.checkpoint import read_checkpoint
from landscape.checkpoints.snapshots import of_run
from landscape.data.dataset import Images
from landscape.data.recipes import Recipe, recipe
from landscape.predictions.evaluation import evaluate
from landscape.probe import derived_seed
from landscape.subject.loading.load import model_without_data
from landscape.subject.spec import Spec
from landscape.training.train import train
from landscape.training.training_set import splits
from landscape.training.updates import Trainer, ascended, epoch_updates, moving_average

RHO, LR = 0.3, 0.5
Weights = dict[str, Tensor]


def images(count: int = 12) -> Images:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, 4, 4, generator=generator, dtype=torch.float64)
    return Images(inputs, torch.arange(count) % 3, name="made", classes=3, size=4, mean=(), std=())


def network(*, norm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(20, 3)).double()


def one_step(**overrides: Any) -> Recipe:
    """One update of SGD with all samples, without anything that would change the gradient."""
    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "crop": 0, "flip": False}
    given = {"epochs": 1, "warmup": 0.0, "lr": LR, "batch_size": 12, "sam": RHO, **plain, **overrides}
    return recipe("demo", **given)


def updated(model: nn.Module, made: Recipe) -> Trainer:
    trainer = Trainer.of(model, images(), made, seed=7)
    for _ in epoch_updates(trainer, 1):
        pass
    return trainer


def loss_of(model: nn.Module) -> Callable[[Weights], Tensor]:
    """The loss of the update's rows in their order, a function of the weights; buffers stay as they are."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(derived_seed(7, "order", 1)))
    buffers, made = {name: tensor.clone() for name, tensor in model.named_buffers()}, images()

    def loss(weights: Weights) -> Tensor:
        torch.manual_seed(derived_seed(7, "dropout", 1, 0))
        state = {**weights, **{name: tensor.clone() for name, tensor in buffers.items()}}
        return F.cross_entropy(functional_call(model, state, made.inputs[order]), made.targets[order])

    return loss


def by_hand(model: nn.Module, rho: float = RHO) -> Weights:
    """w - lr grad L(w + rho g / |g|) with g = grad L(w), from torch.func and one flat vector."""
    loss = loss_of(model.train())
    begin = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradient = torch.func.grad(loss)(begin)
    length = torch.cat([tensor.flatten() for tensor in gradient.values()]).norm()
    above = {name: begin[name] + rho * gradient[name] / length for name in begin}
    second = torch.func.grad(loss)(above)
    return {name: begin[name] - LR * second[name] for name in begin}


def distance(found: nn.Module, expected: Weights) -> float:
    """The largest difference of a weight; the trainer's loss is in float32, so an equal update differs by 1e-7."""
    own = dict(found.named_parameters())
    return max((own[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("kind", [{}, {"norm": True}, {"dropout": 0.5}])
def test_an_update_is_the_formula(kind: dict[str, Any]) -> None:
    """With batch norm over the batch, and with the same dropout at both points; of radius 0 it is the plain one."""
    model = network(**kind)
    expected, plain = by_hand(model), by_hand(model, rho=0.0)
    trainer = updated(model, one_step())
    assert distance(trainer.network, expected) < 1e-6
    assert distance(trainer.network, plain) > 1e-2
    assert distance(updated(network(**kind), one_step(sam=0.0)).network, plain) < 1e-6


@pytest.mark.parametrize("accumulate", [2, 3])
def test_an_accumulated_update_ascends_along_the_gradient_of_the_whole(accumulate: int) -> None:
    model = network()
    expected = by_hand(model)
    made = one_step(batch_size=12 // accumulate, accumulate=accumulate)
    assert distance(updated(model, made).network, expected) < 1e-6


def test_statistics_of_batch_norm_are_those_of_the_first_pass() -> None:
    plain, sharp = (updated(network(norm=True), one_step(sam=rho)).network for rho in (0.0, RHO))
    for (name, one), (_, other) in zip(plain.named_buffers(), sharp.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    assert dict(sharp.named_buffers())["1.num_batches_tracked"] == 1


def test_clipping_bounds_the_second_gradient_alone() -> None:
    model = network()
    begin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = by_hand(model)
    moved = torch.cat([(expected[name] - begin[name]).flatten() for name in begin]).norm()
    clip = 0.25 * float(moved) / LR
    clipped = {name: begin[name] + 0.25 * (expected[name] - begin[name]) for name in begin}
    own = dict(updated(model, one_step(clip=clip)).network.named_parameters())
    for name, tensor in clipped.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-5, atol=1e-7)  # clip_grad_norm_ adds 1e-6 to the norm


def test_the_weights_come_back_bit_for_bit_and_the_average_never_sees_the_ascent() -> None:
    model = network(norm=True)
    F.cross_entropy(model(images().inputs), images().targets).backward()
    before = copy.deepcopy(model.state_dict())
    with ascended(model, 1e6):
        away = torch.cat([(p - before[name]).flatten() for name, p in model.named_parameters()]).norm()
        model(images().inputs)
    assert away.item() == pytest.approx(1e6, rel=1e-9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    trainer = updated(network(), one_step(ema=1e-9))
    assert trainer.average is not None
    torch.testing.assert_close(trainer.average.module.state_dict(), trainer.network.state_dict(), rtol=1e-7, atol=1e-9)


def test_at_a_critical_point_nothing_moves() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    (model(torch.ones(1, 2)) * 0).sum().backward()
    with ascended(model, 0.5):
        assert torch.equal(model.weight, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "sizes"),
    [("simclr", {"batch_size": 16}), ("mim", {"batch_size": 16}), ("classification", {"batch_size": 16, "mixup": 1.0})],
)
def test_every_objective_trains_with_it_and_its_checkpoint_says_so(
    tmp_path: Path, objective: str, sizes: dict[str, Any]
) -> None:
    runs = []
    for rho in (0.0, 0.05):
        made = recipe("demo", epochs=1, objective=objective, sam=rho, **sizes)
        final = train(
            "vit_demo", "digits", recipe=made, out=tmp_path / f"{objective}-{rho}", fraction=0.05,
            model_args={"dim": 8, "depth": 1, "heads": 2, "patch": 4},
        )  # fmt: skip
        runs.append(read_checkpoint(final))
    plain, sharp = runs
    assert (plain.recipe["sam"], sharp.recipe["sam"]) == (0.0, 0.05)
    assert any(not torch.equal(plain.state_dict[name], tensor) for name, tensor in sharp.state_dict.items())


# --- The moving average of the weights: its recursion, its buffers, its checkpoint ---


def test_the_average_is_its_recursion() -> None:
    """a_t = d_t a + (1 - d_t) w_t with d_t = min(decay, (1 + t) / (10 + t)), written out for a scalar."""
    network = nn.Linear(1, 1, bias=False).double()
    values = [2.0, -1.0, 0.5, 8.0]
    with torch.no_grad():
        network.weight.fill_(3.0)
        average = moving_average(network, 0.3)
        expected = 3.0
        for t, value in enumerate(values, start=1):
            network.weight.fill_(value)
            average.update_parameters(network)
            decay = min(0.3, (1 + t) / (10 + t))
            expected = decay * expected + (1 - decay) * value
    assert [(1 + t) / (10 + t) < 0.3 for t in (1, 2, 3, 4)] == [True, True, False, False]  # both sides of the bound
    assert average.module.weight.item() == pytest.approx(expected, rel=1e-12)


def test_statistics_are_averaged_and_counters_copied() -> None:
    network = nn.BatchNorm2d(2)
    average = moving_average(network, 0.9)
    network(torch.full((4, 2, 1, 1), 10.0))
    average.update_parameters(network)
    assert average.module.num_batches_tracked == 1
    decay = 2 / 11
    assert average.module.running_mean.tolist() == pytest.approx([(1 - decay) * 0.1 * 10] * 2)
    assert network.running_mean.tolist() == pytest.approx([1.0] * 2)  # the network's own are its own


@pytest.mark.slow
def test_no_decay_gives_the_last_weights_and_does_not_change_the_run(tmp_path: Path) -> None:
    requested = {"epochs": 1, "batch_size": 32}
    small = {"model_args": {"dim": 8, "depth": 2, "heads": 2, "patch": 4}, "fraction": 0.1}
    plain = train("vit_demo", "digits", recipe=recipe("demo", **requested), out=tmp_path / "plain", **small)
    final = train("vit_demo", "digits", recipe=recipe("demo", ema=1e-9, **requested), out=tmp_path / "run", **small)
    averaged = read_checkpoint(final.with_name("final_ema.pt"))
    last = read_checkpoint(final)
    assert not (plain.parent / "final_ema.pt").exists()
    assert all(torch.equal(last.state_dict[n], t) for n, t in read_checkpoint(plain).state_dict.items())
    for name, tensor in last.state_dict.items():
        torch.testing.assert_close(averaged.state_dict[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_the_averaged_checkpoint_is_complete_and_no_snapshot_of_the_trajectory(tmp_path: Path) -> None:
    small = {"model_args": {"blocks": (1, 1), "width": 4}, "fraction": 0.1}
    requested = recipe("demo", epochs=2, batch_size=32, ema=0.9)
    final = train("resnet_demo", "digits", recipe=requested, out=tmp_path / "run", snapshots=1, **small)
    path = final.with_name("final_ema.pt")
    found = read_checkpoint(path)
    assert (found.epoch, found.recipe["ema"]) == (2.0, 0.9)
    network, _ = model_without_data(Spec(checkpoint=path))
    _, testing = splits("digits", root=None)
    measured = evaluate(network, [(testing.normalised(testing.inputs), testing.targets)])
    assert found.metrics["loss"] == pytest.approx(measured["loss"], rel=1e-5)
    assert found.metrics["loss"] != pytest.approx(read_checkpoint(final).metrics["loss"], rel=3e-5)
    assert path not in [snapshot.path for snapshot in of_run(tmp_path / "run")]
