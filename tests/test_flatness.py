"""Measures of flatness: against closed forms, dense Hessians and loops, and their invariances."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from analytic import (
    attention_net,
    convolution_net,
    dense_hessian,
    quadratic,
    run_probe,
    same_state,
    softmax_regression,
    state,
    symmetric,
    tanh_net,
)
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from torch.func import functional_call

import landscape
from landscape.probe import NotApplicable
from landscape.probes.flatness import Flatness
from landscape.statistics.flatness import MEASURES
from landscape.subject.linear_head import with_normalised_logits
from landscape.subject.subject import Subject
from landscape.weight_space import flatness_terms

SMOOTH = symmetric([3.0, 1.5, 0.5, 0.2, 0.1])
SLOPE = torch.tensor([0.3, -0.2, 0.5, 0.1, 0.4], dtype=torch.float64)
WEIGHT = torch.tensor([[0.8, -1.2, 0.4, 2.0, -0.6]], dtype=torch.float64)


def measured(subject: Subject, measures: str, **options: Any) -> dict[str, tuple[float, float]]:
    """Values with their errors, by the name of the measure."""
    found = run_probe(Flatness(measures=measures, hvp="double-backward", **options), subject)
    return dict(zip(found["measure_name"].tolist(), zip(found["value"], found["se"], strict=True), strict=True))


def value(subject: Subject, measure: str, **options: Any) -> float:
    return measured(subject, measure, **options)[measure][0]


def bowl() -> tuple[Subject, Tensor]:
    """A convex quadratic off its minimum, and its gradient there."""
    return quadratic(SMOOTH, weight=WEIGHT, slope=SLOPE), SMOOTH @ WEIGHT.flatten() + SLOPE


def largest_in_l2_ball(matrix: Tensor, gradient: Tensor, radius: float) -> float:
    """The maximum of g'd + d'Ad/2 over |d| <= radius, A positive: (l I - A) d = g, |d| = radius with l > max A."""
    eigenvalues, vectors = np.linalg.eigh(matrix.numpy())
    g = vectors.T @ gradient.numpy()
    excess = brentq(lambda x: np.linalg.norm(g / (eigenvalues[-1] + x - eigenvalues)) - radius, 1e-12, 1e6, xtol=1e-14)
    d = g / (eigenvalues[-1] + excess - eigenvalues)
    return float(g @ d + d @ (eigenvalues * d) / 2)


def largest_in_linf_ball(matrix: Tensor, gradient: Tensor, radius: float) -> float:
    """The maximum of a convex function over a box lies in a corner."""
    corners = radius * torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(gradient))), dtype=torch.float64)
    return float((corners @ gradient + ((corners @ matrix) * corners).sum(dim=1) / 2).max())


@pytest.mark.parametrize("radius", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_worst_case_of_a_quadratic_is_found(radius: float, adaptive: bool) -> None:
    subject, gradient = bowl()
    scale = torch.diag(WEIGHT.flatten().abs()) if adaptive else torch.eye(5, dtype=torch.float64)
    matrix, slope = scale @ SMOOTH @ scale, scale @ gradient
    prefix = "adaptive-" if adaptive else ""
    for ball, exact in (("l2", largest_in_l2_ball), ("linf", largest_in_linf_ball)):
        name = f"{prefix}worst-{ball}"
        truth = exact(matrix, slope, radius)
        found = value(subject, name, rho=f"{name}={radius}", steps=60)
        near = 1e-4 if ball == "l2" else 0.05  # a box has other corners that are higher than their neighbours
        assert truth * (1 - near) <= found <= truth * (1 + 1e-9)
        assert value(subject, name, rho=f"{name}={radius}") == pytest.approx(truth, rel=max(near, 5e-3))  # 20 steps


def test_a_worst_case_is_never_negative_and_weights_of_zero_do_not_move_adaptively() -> None:
    top = quadratic(-SMOOTH, weight=torch.zeros(1, 5))  # a maximum, where every change lowers the loss
    assert value(top, "worst-l2") == 0.0
    subject = quadratic(SMOOTH, weight=torch.zeros(1, 5), slope=SLOPE)
    assert value(subject, "adaptive-worst-l2") == 0.0
    assert value(subject, "adaptive-worst-linf") == 0.0
    assert value(subject, "worst-l2") > 0.0
    assert value(tanh_net(), "worst-l2", rho="worst-l2=1e308") == math.inf  # an overflow in the ball


def loss_at(subject: Subject, i: int, change: Callable[[str, Tensor], Tensor]) -> Tensor:
    """The loss of mini-batch i with changed copies of the weights."""
    inputs, targets = subject.batch(i)
    weights = {name: p.detach() + change(name, p.detach()) for name, p in subject.parameters.items()}
    with torch.no_grad():
        return subject.losses(functional_call(subject.model, weights, (inputs,)), targets).mean()


def test_sam_is_one_step_along_the_gradient_of_each_mini_batch() -> None:
    subject, rises = convolution_net(sizes=(6, 4)), []
    for i in range(2):
        loss = subject.loss(i)
        slopes = dict(zip(subject.parameters, torch.autograd.grad(loss, [*subject.parameters.values()]), strict=True))
        length = torch.cat([g.flatten() for g in slopes.values()]).norm()
        after = loss_at(subject, i, lambda name, p, slopes=slopes, length=length: 0.05 * slopes[name] / length)
        rises.append((after - loss.detach()).item())
    before = state(subject.model)
    found, error = measured(subject, "sam")["sam"]
    mean = 0.6 * rises[0] + 0.4 * rises[1]
    assert found == pytest.approx(mean, rel=1e-9)
    assert error == pytest.approx(math.sqrt(2 * (0.36 * (rises[0] - mean) ** 2 + 0.16 * (rises[1] - mean) ** 2)))
    assert same_state(subject.model, before)


def published_auto_pgd(subject: Subject, i: int, *, radius: float, steps: int, l2: bool, adaptive: bool) -> float:
    """The ascent of the published code without halved steps, weight by weight.

    Momentum is a share of the last change but one; steps are scale * gradient over the norm of the gradient, and are
    projected on the ellipsoid in the Euclidean metric.
    """
    weights = [p.detach().clone() for p in subject.parameters.values()]
    scale = [w.abs() if adaptive else torch.ones_like(w) for w in weights]

    def at(change: list[Tensor]) -> tuple[float, list[Tensor]]:
        inputs, targets = subject.batch(i)
        moved = [(w + d).requires_grad_() for w, d in zip(weights, change, strict=True)]
        named = dict(zip(subject.parameters, moved, strict=True))
        loss = subject.losses(functional_call(subject.model, named, (inputs,)), targets).mean()
        return loss.item(), list(torch.autograd.grad(loss, moved))

    def length(change: list[Tensor]) -> float:
        return math.sqrt(sum((d / s).square().nan_to_num().sum().item() for d, s in zip(change, scale, strict=True)))

    def projected(change: list[Tensor]) -> list[Tensor]:
        if not l2:
            return [d.clamp(-radius * s, radius * s) for d, s in zip(change, scale, strict=True)]
        if length(change) <= radius:
            return change
        if not adaptive:
            return [d * radius / length(change) for d in change]

        def shrunk(x: float) -> list[Tensor]:
            return [(d / (1 + 2 * x / s**2)).nan_to_num() for d, s in zip(change, scale, strict=True)]

        return shrunk(brentq(lambda x: length(shrunk(x)) - radius, 0.0, 1e6))

    start = at([torch.zeros_like(w) for w in weights])[0]
    change = last = [torch.zeros_like(w) for w in weights]
    best, step = start, 2 * radius
    for _ in range(steps):
        _, gradient = at(change)
        norm_of = math.sqrt(sum(g.square().sum().item() for g in gradient))
        uphill = [g / norm_of if l2 else g.sign() for g in gradient]
        z = projected([d + step * g * s for d, g, s in zip(change, uphill, scale, strict=True)])
        change, last = [0.75 * a + 0.25 * b for a, b in zip(z, last, strict=True)], change
        best = max(best, at(change)[0])
    return best - start


@pytest.mark.slow
@pytest.mark.parametrize("make", [tanh_net, convolution_net])
def test_the_worst_case_is_at_least_that_of_the_published_steps(make: Callable[[], Subject]) -> None:
    subject = make()
    for name in ("worst-l2", "worst-linf", "adaptive-worst-l2", "adaptive-worst-linf"):
        how = {"radius": MEASURES[name].radius, "l2": name.endswith("l2"), "adaptive": "adaptive" in name}
        theirs = np.mean([published_auto_pgd(subject, i, steps=20, **how) for i in (0, 1)])
        assert 0.999 < value(subject, name) / theirs < (1.1 if name == "adaptive-worst-l2" else 1.01)


@pytest.mark.slow
def test_the_average_case_of_a_quadratic_is_half_the_trace() -> None:
    subject, _ = bowl()
    squares = (SMOOTH.diagonal() * WEIGHT.flatten() ** 2).sum().item()
    truths = {
        "average-l2": 0.3**2 * SMOOTH.trace().item() / 2, "average-linf": 0.3**2 * SMOOTH.trace().item() / 6,
        "adaptive-average-l2": 0.3**2 * squares / 2, "adaptive-average-linf": 0.3**2 * squares / 6,
    }  # fmt: skip
    rho = ",".join(f"{name}=0.3" for name in truths)
    found = measured(subject, ",".join(truths), rho=rho, draws=400)
    for name, truth in truths.items():
        mean, error = found[name]
        assert abs(mean - truth) < 4 * error
        assert error < 0.15 * truth


@pytest.mark.slow
def test_the_average_case_is_that_of_plain_loops() -> None:
    subject = tanh_net(sizes=(6,))
    generator = torch.Generator().manual_seed(5)
    for name, draw in (
        ("average-l2", lambda p: 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64)),
        ("adaptive-average-linf",
         lambda p: 0.5 * p.abs() * (2 * torch.rand(p.shape, generator=generator, dtype=torch.float64) - 1)),
    ):  # fmt: skip
        plain = torch.stack([loss_at(subject, 0, lambda name, p, draw=draw: draw(p)) for _ in range(300)])
        rises = plain - loss_at(subject, 0, lambda name, p: torch.zeros_like(p))
        found, error = measured(subject, name, rho=f"{name}=0.5", draws=200)[name]
        spread = rises.std().item() / 300**0.5
        assert abs(found - rises.mean().item()) < 4 * math.hypot(error, spread)
    assert value(subject, "average-l2", rho="average-l2=1e-3") == pytest.approx(
        1e-6 * dense_hessian(subject).trace().item() / 2, rel=0.6
    )  # pairs of opposite signs cancel the slope, which is a thousand times as large


class NodeSum(nn.Module):
    """Class scores of graphs (N, 3), sums over nodes: `nodes` (N, 4, 2), or (M, 2) and the graph of every node."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, nodes: Tensor, graph: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.hidden(nodes))
        if graph is None:
            return self.head(hidden.sum(1))
        return self.head(hidden.new_zeros(int(graph.max()) + 1, 5).index_add(0, graph, hidden))


def mean_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("case", ["mean loss", "packed graphs"])
def test_a_mini_batch_that_cannot_be_divided_is_measured_as_a_whole(case: str) -> None:
    """By a loss that returns a mean, and of graphs packed into one list of nodes."""
    torch.manual_seed(0)
    model = NodeSum().double()
    nodes = torch.randn(12, 4, 2, dtype=torch.float64)
    targets = model(nodes).argmax(dim=1)
    reference = landscape.load(model, data=(nodes, targets), batch_size=6)
    if case == "mean loss":
        measures = "sam,worst-l2,average-linf,pac-bayes-sigma"
        subject = landscape.load(model, data=(nodes, targets), batch_size=6, loss=mean_cross_entropy)
    else:
        measures = "sam,worst-l2,average-linf,pac-bayes-sigma,fisher-rao,relative-flatness"
        graph = torch.arange(6).repeat_interleave(4)
        packed = [({"nodes": nodes[at].flatten(0, 1), "graph": graph}, targets[at]) for at in (slice(6), slice(6, 12))]
        subject = landscape.load(model, data=packed, loss="cross-entropy")
    assert not subject.divisible
    options = {"rho": "worst-l2=0.5,average-linf=0.3", "draws": 4, "steps": 3}
    whole, divided = measured(subject, measures, **options), measured(reference, measures, **options)
    assert {k: v for k, (v, _) in whole.items()} == pytest.approx({k: v for k, (v, _) in divided.items()}, rel=1e-9)
    assert all(math.isfinite(v) for v, _ in divided.values())


def test_pac_bayes_sigma_is_that_of_a_normal_distribution() -> None:
    """A sample per pair of weights: the noise turns the margin w_0 - w_1 = 1 around with Phi(-1 / (sigma sqrt 2))."""
    count = 400
    model = nn.Linear(count, 2, bias=False).double().eval()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5], [-0.5]]).expand(2, count))
    inputs, targets = torch.eye(count, dtype=torch.float64), torch.zeros(count, dtype=torch.long)
    subject = Subject(model, [(inputs[:300], targets[:300]), (inputs[300:], targets[300:])])
    sigma, error = measured(subject, "pac-bayes-sigma", draws=20)["pac-bayes-sigma"]
    truth = 1 / (math.sqrt(2) * norm.ppf(0.9))
    assert abs(sigma - truth) < 4 * error
    assert error < 0.02 * truth
    with torch.no_grad():
        model.weight.zero_()  # right only by the order of the classes: any noise makes half of the samples wrong
    assert math.isnan(value(subject, "pac-bayes-sigma", draws=4))
    half = Subject(model, [(torch.zeros(4, count, dtype=torch.float64), torch.tensor([0, 1, 0, 1]))])
    assert math.isnan(value(half, "pac-bayes-sigma", draws=4))  # half of the classes are wrong, with any weights


@pytest.mark.slow
@pytest.mark.parametrize("make", [tanh_net, attention_net])
def test_measures_of_the_hessian_are_those_of_the_dense_one(make: Callable[..., Subject]) -> None:
    subject = make(sizes=(6, 3))
    dense = (6 * dense_hessian(subject, 0) + 3 * dense_hessian(subject, 1)) / 9
    found = measured(subject, "top-eigenvalue,trace,frobenius", vectors=32)
    top = torch.linalg.eigvalsh(dense)[-1].item()
    assert found["top-eigenvalue"][0] == pytest.approx(top, rel=1e-3)
    assert abs(found["top-eigenvalue"][0] - top) <= max(10 * found["top-eigenvalue"][1], 1e-9)
    for name, truth in (("trace", dense.trace().item()), ("frobenius", dense.norm().item())):
        mean, error = found[name]
        assert abs(mean - truth) < 4 * error
        assert error < 0.5 * abs(truth)


def double_sum(hessian: Tensor, weight: Tensor) -> float:
    """The definition: sum over s, t of <w_s, w_t> times the trace of the block of rows s and t."""
    rows, columns = weight.shape
    blocks = hessian.reshape(rows, columns, rows, columns)
    return sum((weight[s] @ weight[t] * blocks[s, :, t, :].trace()).item() for s in range(rows) for t in range(rows))


@pytest.mark.parametrize("make", [tanh_net, attention_net])
def test_relative_flatness_is_the_double_sum_over_blocks_of_the_dense_hessian(make: Callable[..., Subject]) -> None:
    subject = make(sizes=(6, 3))
    name, weight = [(name, p.detach()) for name, p in subject.parameters.items() if p.dim() == 2][-1]
    at = sum(p.numel() for p in itertools.takewhile(lambda p: p is not subject.parameters[name],
                                                     subject.parameters.values()))  # fmt: skip
    rows = slice(at, at + weight.numel())
    dense = (6 * dense_hessian(subject, 0) + 3 * dense_hessian(subject, 1))[rows, rows] / 9
    assert value(subject, "relative-flatness") == pytest.approx(double_sum(dense, weight), rel=1e-9)


def test_relative_flatness_of_softmax_regression_has_a_closed_form() -> None:
    subject, hessian = softmax_regression()
    weight = subject.parameters["weight"].detach()
    inputs, _ = subject.batch(0)
    p = torch.softmax(inputs @ weight.T, dim=1)
    terms = inputs.square().sum(dim=1) * (p @ weight.square().sum(dim=1) - (p @ weight).square().sum(dim=1))
    found, error = measured(subject, "relative-flatness")["relative-flatness"]
    assert found == pytest.approx(terms.mean().item()) == pytest.approx(double_sum(hessian, weight))
    assert error == pytest.approx((terms.std() / len(terms) ** 0.5).item())


@pytest.mark.parametrize("make", [tanh_net, convolution_net, attention_net])
def test_fisher_rao_is_the_norm_of_the_weights_under_the_gradients_of_samples(make: Callable[..., Subject]) -> None:
    subject = make(sizes=(4, 2))
    squares = []
    for inputs, targets in subject.each_batch():
        for x, y in zip(inputs, targets, strict=True):  # type: ignore[arg-type]
            loss = subject.losses(subject.outputs(x[None]), y[None]).sum()
            slopes = torch.autograd.grad(loss, [*subject.parameters.values()])
            pairs = zip(slopes, subject.parameters.values(), strict=True)
            squares.append(sum((g * p).sum().item() for g, p in pairs) ** 2)
    found, error = measured(subject, "fisher-rao")["fisher-rao"]
    assert found == pytest.approx(math.sqrt(sum(squares) / 6), rel=1e-9)
    assert 0 < error < found


def relu_net() -> Subject:
    """Three layers with logits of mean 0; every sample is right, so that noise makes errors."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 4, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        model[4].weight.mul_(4.0)
        model[4].bias.sub_(model(inputs).mean(dim=0))
        targets = model(inputs).argmax(dim=1)
    return Subject(model, [(inputs[:24], targets[:24]), (inputs[24:], targets[24:])])


def changed(change: Callable[[nn.Module], None]) -> Subject:
    subject = relu_net()
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        change(model)
    return Subject(model, subject.batches)


def rescale(factor: Tensor) -> Callable[[Any], None]:
    """Multiply what enters the second layer's units, and divide what leaves them."""

    def change(model: Any) -> None:
        model[2].weight.mul_(factor[:, None])
        model[2].bias.mul_(factor)
        model[4].weight.div_(factor)

    return change


def permute(model: Any) -> None:
    order = torch.tensor([3, 1, 4, 0, 2])
    model[2].weight.copy_(model[2].weight[order])
    model[2].bias.copy_(model[2].bias[order])
    model[4].weight.copy_(model[4].weight[:, order])


def enlarge(model: Any) -> None:
    model[4].weight.mul_(3.0)
    model[4].bias.mul_(3.0)


FEW = {"draws": 10, "vectors": 6, "steps": 4}


@pytest.mark.slow
@pytest.mark.parametrize("normalized", [False, True])
def test_invariances_are_those_that_the_table_states(normalized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other units make another start of the search for the eigenvalue, which must not show.
    monkeypatch.setattr(flatness_terms, "TOP", replace(flatness_terms.TOP, tol=1e-8))

    def of(subject: Subject) -> dict[str, tuple[float, float]]:
        return measured(subject, "all", normalize_logits=normalized, **FEW)

    plain = of(relu_net())
    units = of(changed(rescale(torch.tensor([0.5, 2.0, 3.0, 0.25, 4.0], dtype=torch.float64))))
    layer = of(changed(rescale(torch.full((5,), 3.0, dtype=torch.float64))))
    logits, permuted = of(changed(enlarge)), of(changed(permute))
    assert set(plain) == set(MEASURES)
    for name, measure in MEASURES.items():
        first, error = plain[name]

        def same(other: dict[str, tuple[float, float]], name: str = name, first: float = first) -> bool:
            return math.isclose(other[name][0], first, rel_tol=1e-6)

        assert math.isfinite(first), name
        assert same(units) == (measure.rescaling == "yes"), name
        assert same(layer) == (measure.rescaling in ("yes", "whole layers")), name
        assert same(logits) == (normalized and measure.logit_scale == "with --normalize-logits"), name
        assert measure.permutation == "yes"
        drawn = measure.over in ("random vectors", "noise draws") or "average" in name  # others draws for other units
        assert same(permuted) or (drawn and abs(permuted[name][0] - first) < 5 * math.hypot(error, permuted[name][1]))


def test_normalised_logits_have_mean_zero_and_norm_one() -> None:
    subject = tanh_net(sizes=(6,))
    inputs, targets = subject.batch(0)
    logits = subject.model(inputs).detach()
    centred = logits - logits.mean(dim=1, keepdim=True)
    expected = nn.functional.cross_entropy(centred / centred.norm(dim=1, keepdim=True), targets)
    assert with_normalised_logits(subject).loss(0).item() == pytest.approx(expected.item())
    single, _ = bowl()
    with pytest.raises(ValueError, match="at least 2 classes"):
        run_probe(Flatness(normalize_logits=True, measures="sam"), single)


def test_a_loss_of_several_outputs_has_no_measure_of_the_logits_alone() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"logits": super().forward(x), "other": x}

    def of_both(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return (outputs["logits"].sum(dim=1) - outputs["other"].sum(dim=1) - targets).square()

    data = (torch.arange(12.0).reshape(4, 3) / 12, torch.arange(4) % 2)
    subject = landscape.load(Two(3, 2), data=data, loss=of_both)
    with pytest.raises(NotApplicable, match=r"--measures relative-flatness needs .* a loss per sample of them;"):
        measured(subject, "relative-flatness")
    with pytest.raises(ValueError, match="a loss of the logits alone, got one of the dict"):
        run_probe(Flatness(normalize_logits=True, measures="sam"), subject)


@pytest.mark.slow
def test_numbers_do_not_depend_on_which_measures_are_asked_for_or_on_weight_decay() -> None:
    subject = tanh_net()
    every, few = (measured(subject, which, draws=4, vectors=4) for which in ("all", "average-l2,frobenius,worst-l2"))
    assert list(few) == ["worst-l2", "average-l2", "frobenius"]
    assert few == {name: every[name] for name in few}
    assert measured(tanh_net(weight_decay=0.5), "trace,sam", draws=4, vectors=4) == {
        name: every[name] for name in ("sam", "trace")
    }


def test_units_of_a_half_finished_result_give_the_measures_that_are_known() -> None:
    subject = tanh_net()
    found = run_probe(Flatness(measures="trace,sam", vectors=4), subject, units=4)
    assert found["measure_name"].tolist() == ["sam", "trace"]
    assert np.isfinite(found["value"]).tolist() == [False, True]


def test_pac_bayes_needs_classes() -> None:
    regression = Subject(nn.Linear(4, 1).double().eval(), [(torch.ones(4, 4).double(), torch.ones(4, 1).double())],
                         losses=nn.functional.mse_loss)  # fmt: skip
    with pytest.raises(NotApplicable, match="needs a classification error"):
        Flatness(measures="pac-bayes-sigma").plan(regression)
