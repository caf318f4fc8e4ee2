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


def proposed(optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> list[Tensor]:
    """The update that an optimiser would make with these gradients."""
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return rule_of(optimizer).update(before, gradients, optimizer)


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


class Foreign(torch.optim.Optimizer):
    """An optimiser of another package: names as of SGD or Adam, `step_of(w, g, state, group)` its own."""

    def __init__(
        self, params: Any, step_of: Callable[..., Tensor] = torch.mul, lr: float = 0.1, **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, **options})
        self.step_of = step_of  # an attribute, which copy.deepcopy of an optimiser leaves out

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data += self.step_of(p.data, p.grad, self.state[p], group)


def sgd(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    g = g + group["weight_decay"] * w
    state["momentum_buffer"] = group["momentum"] * state["momentum_buffer"] + g if state else g.clone()
    return -group["lr"] * state["momentum_buffer"]


def sgdw(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    return sgd(w, g, state, {**group, "weight_decay": 0.0}) - group["lr"] * group["weight_decay"] * w


def lars(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    return sgd(w, 0.01 * g * w.norm() / g.norm() if w.ndim > 1 else g, state, group)


def adamw(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    first, second = group["betas"]
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
    state["step"] += 1
    state["exp_avg"].lerp_(g, 1 - first)
    state["exp_avg_sq"].lerp_(g * g, 1 - second)
    root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt() + group["eps"]
    u = state["exp_avg"] / (1 - first ** state["step"]) / root + group["weight_decay"] * w
    return -group["lr"] * u


def lamb(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    u = adamw(w, g, state, group)
    return u * group["lr"] * w.norm() / u.norm() if w.ndim > 1 else u


def cautious(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    u = adamw(w, g, state, group)
    return u * (u * g < 0)


def lookahead(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    slow, k = state.pop("slow", (w, 0))
    u = sgd(w, g, state, group)
    u = u if (k + 1) % 6 else 0.5 * (slow + w + u) - w
    state["slow"] = (slow if (k + 1) % 6 else w + u, k + 1)
    return u


def lion(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    mean = state.setdefault("exp_avg", torch.zeros_like(w))
    u = -group["lr"] * (torch.sign(torch.lerp(g, mean, 0.9)) + group["weight_decay"] * w)
    mean.lerp_(g, 0.01)
    return u


def soap(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Adam in the eigenbasis of Shampoo's factors (Vyas et al., arXiv 2409.11321), at every step anew."""
    if w.ndim < 2:
        return adamw(w, g, state, group)
    left, right = (state.get(name, 0.0) + part for name, part in (("left", g @ g.T), ("right", g.T @ g)))
    own = {name: value for name, value in state.items() if name not in ("left", "right")}
    q, p = (torch.linalg.eigh(side.double())[1].to(w.dtype) for side in (left, right))
    u = q @ adamw(torch.zeros_like(w), q.T @ g @ p, own, group) @ p.T
    state.update(own, left=left, right=right)
    return u


def schedule_free(w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Schedule-free SGD (Defazio et al., arXiv 2405.15682): the weights are y = 0.1 z + 0.9 x, x the mean of z."""
    z, x, t = state.get("z", w.clone()), state.get("x", w.clone()), state.get("step", 0) + 1
    z = z - group["lr"] * g
    x = torch.lerp(x, z, 1 / t)
    state.update(z=z, x=x, step=t)
    return torch.lerp(z, x, 0.9) - w


ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}
# What an optimiser does -> (its hyper-parameters, what it is recognised as, with decoupled decay, norm of its steps).
BEHAVIOURS: dict[Callable[..., Tensor], tuple[dict[str, Any], str, bool, str]] = {
    sgd: ({"momentum": 0.9}, "SGD", False, "euclidean"), sgdw: ({"momentum": 0.9}, "SGD", True, "euclidean"),
    adamw: (ADAM, "Adam", True, "euclidean"), lars: ({"momentum": 0.9, "nesterov": False}, "", False, "euclidean"),
    lamb: ({**ADAM, "amsgrad": False}, "", False, "euclidean"), cautious: (ADAM, "", False, "euclidean"),
    lookahead: ({"momentum": 0.9}, "", False, "euclidean"), lion: ({"betas": (0.9, 0.99)}, "", False, "elementwise"),
    soap: (ADAM, "", False, "euclidean"), schedule_free: ({"momentum": 0.9}, "", False, "euclidean"),
}  # fmt: skip


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda own: own.__name__)
def test_an_optimizer_is_known_by_what_it_does_and_not_by_its_names(behaviour: Callable[..., Tensor]) -> None:
    options, name, decoupled, norm = BEHAVIOURS[behaviour]
    weight, bias = (nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in ((4, 3), (4,)))
    optimizer = Foreign([weight, bias], behaviour, weight_decay=0.5, **options)
    drawn, before = torch.get_rng_state(), weight.detach().clone()
    rule = rule_of(optimizer)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(weight, before)
    assert not optimizer.state
    assert (rule.name, rule.decoupled, rule.norm) == (name or "Foreign", decoupled, norm)
    for _ in range(2):
        weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
        optimizer.step()
    start = weight.detach().clone()
    step = proposed(optimizer, [torch.ones_like(weight), torch.ones_like(bias)])[0]
    assert torch.equal(weight, start)
    optimizer.step()
    assert torch.equal(weight - start, step)
    parameters = {"weight": weight, "bias": bias}
    if not name:
        with pytest.raises(ValueError, match="stability threshold of Foreign is not known; those of SGD"):
            preconditioner(optimizer, parameters)
        return
    known = preconditioner(optimizer, parameters)
    assert known.threshold == pytest.approx({"SGD": 38.0, "Adam": 380.0}[name] * (0.975 if decoupled else 1.0))
    assert set(known.decay.values()) == {0.0 if decoupled else 0.5}


class Halved(torch.optim.Adam):
    """A variant of Adam that says itself what is known of it."""

    landscape_rule = Rule(
        "Halved", frozenset({"exp_avg_sq"}), stability=lambda group, state: (2.0, 2.0), definition="P = 2",
        norm="elementwise", update=lambda parameters, gradients, optimizer: [-g / 2 for g in gradients],
    )  # fmt: skip


def test_an_optimizer_may_say_itself_what_is_known_of_it_and_muon_has_steps_of_one_spectral_norm() -> None:
    weight = nn.Parameter(torch.eye(3, dtype=torch.float64))
    assert rule_of(Halved([weight])).norm == "elementwise"
    (step,) = proposed(Halved([weight]), [torch.ones(3, 3)])
    assert torch.equal(step, -torch.ones(3, 3) / 2)
    assert rule_of(torch.optim.Muon([weight])).norm == "spectral"
    assert length_in("spectral", torch.diag(torch.tensor([3.0, 4.0]))) == pytest.approx(4.0)
    assert preconditioner(Together(torch.optim.SGD([weight], lr=0.1)), {"weight": weight}).threshold == 20.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_pytorch_are_themselves(name: str) -> None:
    make, options = OPTIMIZERS[name]
    rule = rule_of(make([nn.Parameter(torch.ones(3))], lr=0.1, **options))
    assert rule.name == make.__name__.replace("AdamW", "Adam")  # type: ignore[attr-defined]
    assert rule.decoupled == (make is torch.optim.AdamW)


def test_an_optimizer_of_another_model_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(ValueError, match=r"1 parameters are held by several optimisers \(SGD \+ Adam\)"):
        preconditioner(Together(optimizer, torch.optim.Adam([weight])), {"weight": weight})
    with pytest.raises(ValueError, match="SGD holds none of the 1 parameters of the model"):
        preconditioner(optimizer, {"weight": nn.Parameter(torch.ones(3))})
