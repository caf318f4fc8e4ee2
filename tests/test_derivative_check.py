"""Losses whose gradient is not their derivative are named and stored, sound ones are not; weight norm is exact."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from analytic import dense_hessian
from torch import Tensor, nn

import landscape
from landscape.doctor.rules import examine
from landscape.subject.loading.load import measuring

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(32, 6, generator=generator)
TOKENS = torch.randint(20, (32, 5), generator=generator)
CLASSES = torch.randint(3, (32,), generator=generator)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (1 - torch.exp(-losses)).detach() ** 2 * losses


class Square(torch.autograd.Function):
    """A square whose backward pass has no derivative of its own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z.detach().clone())
        return z**2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return gradients[0] * 2 * z.detach()


class Net(nn.Module):
    """Two linear layers with something between them, or on the first one's weights."""

    def __init__(
        self, between: Callable[[Tensor], Tensor] = torch.tanh, weights: Callable[[Tensor], Tensor] = lambda w: w
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.between, self.weights = between, weights

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(F.linear(x, self.weights(self.first.weight), self.first.bias)))


class ByFrequency(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 4, scale_grad_by_freq=True), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.embedding(tokens).mean(1))


def on_kinks() -> nn.Module:
    model = Net(torch.relu)
    for parameter in model.first.parameters():
        nn.init.zeros_(parameter)
    return model


GRADIENT, PRODUCT = "the gradient is not the derivative of the loss", "second derivatives are not those of the gradient"
CASES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "detached weight of a loss": (Net, focal, GRADIENT),
    "own backward pass": (lambda: Net(Square.apply), "", PRODUCT),
    "stop-gradient": (lambda: Net(lambda h: torch.tanh(h) + 0.5 * torch.tanh(h).detach()), "", GRADIENT),
    "straight-through rounding": (lambda: Net(weights=lambda w: w + ((4 * w).round() / 4 - w).detach()), "", GRADIENT),
    "gradient by frequency": (ByFrequency, "", GRADIENT),
    "norm of zeros": (lambda: Net(lambda h: h.tanh() + F.normalize(0 * h, dim=-1)), "", PRODUCT + " (nan"),
    "tanh": (Net, "", ""),
    "loss in single precision": (Net, lambda z, y: F.cross_entropy(z.float() / 50, y), ""),
    "detached weight in single precision": (Net, lambda z, y: focal(z.float(), y), GRADIENT),
    "relu": (lambda: Net(torch.relu), "", ""),
    "kinks that lie close": (lambda: Net(lambda h: torch.remainder(2e4 * h, 2).sub(1).abs() / 2e4 + h.tanh()), "", ""),
    "units exactly on their kinks": (on_kinks, "", ""),
    "linear": (lambda: nn.Linear(6, 3), "", ""),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(),
                                          nn.Linear(8, 3)), "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_the_derivative_of_the_loss_is_said_stored_and_found(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build, loss, says = CASES[case]
    torch.manual_seed(0)
    model = build()
    inputs = TOKENS if isinstance(model, ByFrequency) else INPUTS
    subject = landscape.load(model, data=(inputs, CLASSES), loss=loss)
    file = tmp_path / "results.h5"
    with caplog.at_level(logging.WARNING, "landscape"):
        found = landscape.measure("trace", subject, out=file, vectors=4, quiet=True)
    assert str(found.attrs.get("derivatives", "")).startswith(says)
    assert (says in caplog.text) if says else (GRADIENT not in caplog.text and PRODUCT not in caplog.text)
    assert ("derivatives" in [one.rule for one in examine([file])]) == bool(says)
    if not says:
        assert "derivatives" not in found.attrs


@pytest.mark.parametrize("dim", [0, -1, 1])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_second_derivatives_of_weight_norm_are_those_of_its_formula(dim: int, old: bool) -> None:
    torch.manual_seed(0)
    normed = (nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm)(nn.Linear(6, 4), dim=dim)
    model = nn.Sequential(normed, nn.Tanh(), nn.Linear(4, 3)).double()
    subject = landscape.load(model, data=(INPUTS.double(), CLASSES))
    with measuring(subject):
        hessian = dense_hessian(subject)
    weights = list(model.parameters())
    step, rows = 1e-6, []
    for p in weights:
        for k in range(p.numel()):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    p.view(-1)[k] += sign * step
                ends.append(torch.cat([g.flatten() for g in torch.autograd.grad(
                    F.cross_entropy(model(INPUTS.double()), CLASSES), weights)]))  # fmt: skip
                with torch.no_grad():
                    p.view(-1)[k] -= sign * step
            rows.append((ends[0] - ends[1]) / (2 * step))
    torch.testing.assert_close(hessian, torch.stack(rows), rtol=1e-5, atol=1e-6)
