"""Preconditioners of optimisers against dense matrices, and their thresholds against the optimisers themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from analytic import dense_hessian, symmetric, tanh_net
from torch import Tensor, nn

from landscape.curvature.lanczos import lanczos
from landscape.curvature.preconditioner import preconditioner
from landscape.products.hvp_backends import curvature
from landscape.products.vectors import flat, random_unit
from landscape.subject.optimizer_rules import Rule, Together, length_in, rule_of
from landscape.subject.optimizers import proposed_update
from landscape.subject.subject import Subject

FROZEN = 1 - 1e-13  # a decay rate at which the squared gradients of a state stay as they are
LATE = 1e14  # a step at which the bias corrections are 1, with that rate too
Make = Callable[..., torch.optim.Optimizer]

# Name -> (optimiser, options); every one is tested at its own threshold.
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "gradient descent": (torch.optim.SGD, {}),
    "with weight decay": (torch.optim.SGD, {"weight_decay": 0.4}),
    "heavy ball": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "dampened": (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.8}),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"betas": (0.9, FROZEN), "weight_decay": 0.2}),
    "Adam, beta1 0.5": (torch.optim.Adam, {"betas": (0.5, FROZEN)}),
    "amsgrad": (torch.optim.Adam, {"betas": (0.9, FROZEN), "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"betas": (0.9, FROZEN), "weight_decay": 3.0}),
    "Adamax": (torch.optim.Adamax, {"betas": (0.9, FROZEN)}),
    "RMSprop": (torch.optim.RMSprop, {"alpha": FROZEN}),
    "RMSprop with momentum": (torch.optim.RMSprop, {"alpha": FROZEN, "momentum": 0.7, "weight_decay": 0.1}),
    "centred RMSprop": (torch.optim.RMSprop, {"alpha": FROZEN, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 1e-14}),
}


def _frozen(make: Make, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """An optimiser with a diverse state that gradients of 1e-9 do not change."""
    optimizer = make(groups, lr=0.1, **options)
    generator = torch.Generator().manual_seed(1)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, state in optimizer.state.items():
        second = 10.0 ** torch.empty_like(p).uniform_(-3, 0, generator=generator)
        for name in ("exp_avg_sq", "square_avg", "sum", "exp_inf"):
            if name in state:
                state[name] = second.clone()
        if "max_exp_avg_sq" in state:
            state["max_exp_avg_sq"] = 2 * second
        if "grad_avg" in state:
            state["grad_avg"] = 0.8 * second.sqrt()
        if "step" in state:
            state["step"] = torch.tensor(LATE, dtype=torch.float64)
    return optimizer


def _growth(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], hessian: Tensor) -> float:
    """Factor by which the distance to the minimum of a quadratic grows; it stops where that is clear."""
    start = w = flat(weights).detach()
    for _ in range(1500):
        w = flat(weights).detach()
        if w.norm() > 1e5 * start.norm():
            break
        for p, g in zip(weights, torch.split(hessian @ w, [p.numel() for p in weights]), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return float(w.norm() / start.norm())


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "groups"), [*((name, 2) for name in OPTIMIZERS), ("heavy ball", 1), ("Adam", 1), ("RMSprop", 1)]
)
def test_an_optimizer_converges_below_its_threshold_and_diverges_above_it(name: str, groups: int) -> None:
    make, options = OPTIMIZERS[name]
    bowl = symmetric([3.0, 2.0, 1.5, 1.0, 0.8, 0.5])

    def made() -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        generator = torch.Generator().manual_seed(0)
        first, second = (nn.Parameter(1e-9 * torch.randn(n, generator=generator, dtype=torch.float64)) for n in (2, 4))
        apart = [{"params": [first], "lr": 0.02}, {"params": [second]}]
        return _frozen(make, apart if groups == 2 else [{"params": [first, second]}], **options), [first, second]

    optimizer, weights = made()
    named = dict(zip(("first", "second"), weights, strict=True))
    known = preconditioner(optimizer, named)

    def ratio(scale: float) -> float:
        product = known.of(lambda v: v @ (scale * bowl), named)
        return float(torch.linalg.eigvalsh(product(torch.eye(6, dtype=torch.float64)))[-1]) / known.threshold

    low, high = 0.0, 1e4  # scales of the Hessian
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    assert ratio(0.99 * low) == pytest.approx(0.99, abs=0.01)  # that part of H which is weight decay stays
    assert _growth(*made(), 0.99 * low * bowl) < 1
    assert _growth(*made(), 1.01 * low * bowl) > 1e5


def _trained(make: Make, steps: int = 7, **options: Any) -> tuple[Subject, torch.optim.Optimizer, list[Tensor]]:
    """A small network after some full-batch updates, its optimiser, and P of each parameter as the last one had it.

    From the update itself: w - w_before = -lr P^-1 m, with m the first moment of Adam and the gradient elsewhere.
    """
    subject = tanh_net()
    weights = list(subject.model.parameters())
    optimizer = make(weights, lr=0.05, **options)
    for _ in range(steps):
        before = [p.detach().clone() for p in weights]
        optimizer.zero_grad()
        sum(subject.objective(i) for i in range(2)).backward()
        optimizer.step()
    decay, group = options.get("weight_decay", 0.0), optimizer.param_groups[0]
    found = []
    for p, start in zip(weights, before, strict=True):
        state = optimizer.state[p]
        moved = start * (1 - 0.05 * decay if make is torch.optim.AdamW else 1.0) - p.detach()
        coupled = 0.0 if make is torch.optim.AdamW else decay * start
        rate = 0.05 / (1 + (steps - 1) * group.get("lr_decay", 0.0))
        found.append(rate * state.get("exp_avg", p.grad + coupled) / moved)
    return subject, optimizer, found


ADAPTIVE: dict[str, tuple[Make, dict[str, Any], float]] = {  # with the threshold for lr 0.05
    "Adam": (torch.optim.Adam, {"weight_decay": 0.01}, 38 / 0.05),
    "amsgrad": (torch.optim.Adam, {"betas": (0.8, 0.9), "amsgrad": True}, 3.6 / 0.2 / 0.05),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.5}, 38 / 0.05 * 0.9875),
    "RMSprop": (torch.optim.RMSprop, {"weight_decay": 0.01}, 40.0),
    "centred RMSprop": (torch.optim.RMSprop, {"centered": True}, 40.0),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}, 40 * 1.6),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_eigenvalues_are_those_of_the_dense_matrix_with_p_as_the_last_update_had_it(name: str) -> None:
    make, options, threshold = ADAPTIVE[name]
    subject, optimizer, diagonals = _trained(make, **options)
    known = preconditioner(optimizer, subject.parameters)
    scale = flat(diagonals).rsqrt()
    assert torch.allclose(flat(known.scale.values()), scale, rtol=1e-6)
    assert known.threshold == pytest.approx(threshold, rel=1e-12)
    coupled = 0.0 if name == "AdamW" else options.get("weight_decay", 0.0)
    dense = scale[:, None] * (dense_hessian(subject) + coupled * torch.eye(len(scale))) * scale
    product = known.of(curvature(subject, subject.parameters, "double-backward").product(0), subject.parameters)
    start = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float64)
    found = lanczos(product, start, 3, which="LA", tol=1e-8)
    expected = torch.linalg.eigvalsh(dense).flip(0)[:3]
    assert found.values == pytest.approx(expected.numpy(), rel=1e-6)


def test_parameters_that_do_not_move_take_no_part() -> None:
    subject, optimizer, _ = _trained(torch.optim.Adam)
    last = list(subject.parameters)[-1]
    del optimizer.state[subject.parameters[last]]
    known = preconditioner(optimizer, subject.parameters)
    image = known.of(lambda v: v, subject.parameters)(torch.ones(subject.size, dtype=torch.float64))
    moved = subject.size - subject.parameters[last].numel()
    assert (image[:moved] > 0).all()
    assert (image[moved:] == 0).all()
    block = dict(list(subject.parameters.items())[:1])
    size = next(iter(block.values())).numel()
    of_block = known.of(lambda v: v, block)(torch.ones(size, dtype=torch.float64))
    assert torch.equal(of_block, image[:size])


@pytest.mark.parametrize(
    ("make", "options", "steps", "words"),
    [
        (torch.optim.NAdam, {}, 1, "threshold of NAdam is not known; those of SGD, Adam, Adamax,"),
        (torch.optim.SGD, {"lr": 0.0}, 1, "its learning rate is 0; give another"),
        (torch.optim.SGD, {"maximize": True}, 1, "ascends"),
        (torch.optim.Adam, {}, 0, "has made no update; give a later checkpoint"),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 20.0}, 1, "diverges by its decay alone"),
        (torch.optim.RMSprop, {"eps": 0.0}, 1, "entries that are not positive numbers; use a larger eps"),
    ],
)
def test_what_has_no_threshold_is_an_error(make: Make, options: dict[str, Any], steps: int, words: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight], **{"lr": 0.1, **options})
    for _ in range(steps):
        weight.grad = torch.zeros(3)
        optimizer.step()
    with pytest.raises(ValueError, match=words):
        preconditioner(optimizer, {"weight": weight})


class Lion(torch.optim.Optimizer):
    """Of any package: known by its hyper-parameters and the entries of its state."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.data.sub_(group["lr"] * torch.sign(mean + p.grad))
                mean.lerp_(p.grad, 1 - group["betas"][1])


class Halved(torch.optim.Adam):
    """A variant of Adam in its entries, and one that says itself what is known of it."""

    landscape_rule = Rule(
        "Halved", frozenset(), frozenset({"exp_avg_sq"}), stability=lambda group, state: (2.0, 2.0), definition="P = 2",
        norm="elementwise", update=lambda parameters, gradients, optimizer: [-g / 2 for g in gradients],
    )  # fmt: skip


def test_an_optimizer_is_known_by_its_structure_or_says_itself_what_is_known_of_it() -> None:
    weight = nn.Parameter(torch.eye(3, dtype=torch.float64))
    kinds: dict[str, tuple[Any, str]] = {
        "Lion": (Lion, "elementwise"), "Muon": (torch.optim.Muon, "spectral"), "Halved": (Halved, "elementwise"),
        "Adam": (type("Variant", (torch.optim.Adam,), {}), "euclidean"),
        "RAdam": (torch.optim.RAdam, "euclidean"),
    }  # fmt: skip
    for name, (make, norm) in kinds.items():
        optimizer = make([weight], lr=0.1)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        rule = rule_of(optimizer)
        assert (rule.name, rule.norm) == (name, norm)
        (step,) = proposed_update(optimizer, [torch.ones(3, 3)])
        assert length_in(rule.norm, step) > 0
        if name in ("Lion", "RAdam", "Muon"):
            with pytest.raises(ValueError, match="is not known; those of SGD"):
                preconditioner(optimizer, {"weight": weight})
    (step,) = proposed_update(Halved([weight]), [torch.ones(3, 3)])
    assert torch.equal(step, -torch.ones(3, 3) / 2)
    assert length_in("spectral", torch.diag(torch.tensor([3.0, 4.0]))) == pytest.approx(4.0)
    assert preconditioner(Together(torch.optim.SGD([weight], lr=0.1)), {"weight": weight}).threshold == 20.0


def test_an_optimizer_of_another_model_is_an_error() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match="SGD holds none of the 1 parameters of the model"):
        preconditioner(optimizer, {"weight": nn.Parameter(torch.ones(3))})
