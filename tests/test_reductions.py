"""Losses by their reduction: PyTorch's means give losses per sample, sums and broadcasts are refused."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shapes import GraphNetwork, graphs
from torch import Tensor, nn

import landscape
from landscape.options import OptionError

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(48, 6, generator=generator)
CLASSES = torch.randint(3, (48,), generator=generator)
NUMBERS = torch.randn(48, 2, generator=generator)


def net(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, outputs)


MEANS: dict[str, tuple[Callable[..., Any], str, Tensor]] = {  # a loss that returns a mean, its name, targets
    "module": (nn.CrossEntropyLoss(), "", CLASSES),
    "function": (F.mse_loss, "mse", NUMBERS),
    "module of outputs": (nn.MSELoss(), "mse", NUMBERS),
    "per output": (nn.MSELoss(reduction="none"), "mse", NUMBERS),
    "per output, of one's own": (lambda z, y: F.mse_loss(z, y, reduction="none"), "mse", NUMBERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MEANS)
def test_a_mean_of_pytorch_is_taken_per_sample_so_that_its_fisher_matrix_and_errors_are_those_of_samples(
    case: str,
) -> None:
    loss, name, targets = MEANS[case]
    subjects = [landscape.load(net(3 if targets is CLASSES else 2), data=(INPUTS, targets), loss=one, batch_size=16)
                for one in (loss, name)]  # fmt: skip
    metrics = [landscape.evaluate(subject) for subject in subjects]
    assert (metrics[0]["loss"], metrics[0]["loss_se"]) == pytest.approx((metrics[1]["loss"], metrics[1]["loss_se"]))
    own, expected = (
        landscape.measure("hessian", s, operator="fisher", top=1, out=None).eigenvalue.values for s in subjects
    )
    assert own == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_fisher_matrix_of_another_mean_is_refused() -> None:
    for loss in (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), lambda z, y: F.cross_entropy(z, y)):
        subject = landscape.load(net(3), data=(INPUTS, CLASSES), loss=loss, batch_size=16)
        assert subject.traits.mean_only
        with pytest.raises(ValueError, match="Fisher matrix is a mean over the gradients of single samples"):
            landscape.measure("hessian", subject, operator="fisher", top=1, out=None)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="sum"), lambda z, y: F.cross_entropy(z, y) * len(z)])
def test_a_sum_is_noticed_where_the_first_mini_batch_is_a_single_sample(loss: Callable[..., Any]) -> None:
    edges = (0, 1, 17, 48)
    batches = [(INPUTS[a:b], CLASSES[a:b]) for a, b in pairwise(edges)]
    with pytest.raises(ValueError, match="returns the sum over the mini-batch"):
        landscape.load(net(3), data=batches, loss=loss)


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        F.l1_loss,
        nn.SmoothL1Loss(reduction="none"),
        F.poisson_nll_loss,
        lambda z, y: F.gaussian_nll_loss(z, y, torch.ones_like(y)),
        lambda z, y: (z - y).square().mean(),
        lambda z, y: (z.exp() - y.exp()).square().mean(1),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ],
)
def test_outputs_and_targets_that_pytorch_would_broadcast_are_refused(loss: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"compares every output with every target .* outputs.squeeze\(1\)"):
        landscape.load(net(1), data=(INPUTS, NUMBERS[:, 0]), loss=loss)


def test_a_loss_of_pairs_is_none_that_pytorch_would_broadcast() -> None:
    def ranking(z: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-(z - z.T) * (y[:, None] - y[None])).mean()

    assert landscape.load(net(1), data=(INPUTS, NUMBERS[:, 0]), loss=ranking).traits.coupled
    assert landscape.load(net(1), data=(INPUTS, NUMBERS[:, 0]), loss=lambda z, y: (z[:, 0] - y).square()).samples(0)


def test_a_sum_over_a_mini_batch_that_has_no_halves_is_noticed() -> None:
    for loss in (lambda o, batch: F.cross_entropy(o, batch["y"], reduction="sum"),
                 lambda o, batch: F.cross_entropy(o, batch["y"], reduction="none").sum()):  # fmt: skip
        with pytest.raises(ValueError, match="returns the sum over the mini-batch"):
            landscape.load(GraphNetwork(), data=graphs(), loss=loss)


def test_an_ignored_class_of_a_plain_classifier_is_refused_because_it_has_no_effect() -> None:
    with pytest.raises(OptionError, match="--ignore-index 1 has no effect"):
        landscape.load(net(3), data=(INPUTS, CLASSES), ignore_index=1)
