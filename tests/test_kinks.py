"""Units within rounding of a kink, whose side single precision decides differently unless the pattern is fixed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import Cancelling, attention_net, cancelling, in_double, run_probe, same_state, state
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.checkpoint import checkpoint

from landscape.probe import Probe
from landscape.probes.density import Density
from landscape.probes.hessian import Hessian
from landscape.probes.trace import Trace
from landscape.products import kinks as patterns
from landscape.products import operator as module
from landscape.products.hvp_backends import Hvp, curvature
from landscape.products.kinks import FixedPattern, PatternCache, activation_pattern, compact_bytes, has_kinks
from landscape.products.operator import Operator
from landscape.products.vectors import random_unit
from landscape.subject.loading.identity import asked
from landscape.subject.subject import Subject

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # by torch's forward mode
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of rows of a Jacobian
]


def in_place(x: Tensor) -> Tensor:
    F.relu_(x)  # the returned tensor is ignored
    return x


@pytest.mark.slow
def test_products_of_every_backend_are_those_of_double_precision() -> None:
    subject = cancelling()
    double = in_double(subject)
    vector = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float32)
    exact = curvature(double, double.parameters, "double-backward").product(1)(vector.double())
    backends: list[Hvp] = ["double-backward", "traced"]
    for hvp in backends:
        fixed = curvature(subject, subject.parameters, hvp, kinks="double").product(1)(vector)
        free = curvature(subject, subject.parameters, hvp, kinks="single").product(1)(vector)
        torch.testing.assert_close(fixed.double(), exact, rtol=1e-5, atol=1e-6)
        assert (free - exact).norm() > 0.05 * exact.norm()


@pytest.mark.slow
def test_batched_products_are_those_of_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.products.hvp_backends.mini_batches_per_product", lambda *_: 2)
    subject = cancelling()
    double = in_double(subject)
    vector = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float32)
    exact = [curvature(double, double.parameters, "double-backward").product(i)(vector.double()) for i in (0, 1)]
    joint = curvature(subject, subject.parameters, "traced", kinks="double", batched=True)
    rows = joint.batched_product([0, 1])(vector.expand(2, -1))
    torch.testing.assert_close(rows.double(), torch.stack(exact), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operator", ["ggn", "fisher"])
def test_other_matrices_are_those_of_double_precision(operator: Operator) -> None:
    subject = cancelling()
    double = in_double(subject)
    vector = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float32)
    exact = curvature(double, double.parameters, "double-backward", operator=operator).product(0)(vector.double())
    fixed = curvature(subject, subject.parameters, "double-backward", operator=operator, kinks="double")
    torch.testing.assert_close(fixed.product(0)(vector).double(), exact, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_has_its_own_activation_pattern() -> None:
    subject = cancelling()
    fixed = curvature(subject, subject.parameters, "double-backward", kinks="double")
    vector = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float32)
    whole = fixed.product(0)(vector)
    fixed._micro_batching.count = 2
    torch.testing.assert_close(fixed.product(0)(vector), whole, rtol=1e-5, atol=1e-6)


BENDS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu": (F.relu, 0.0),
    "ReLU": (nn.ReLU(), 0.0),
    "ReLU in place": (nn.ReLU(inplace=True), 0.0),
    "torch.relu": (torch.relu, 0.0),
    "tensor.relu_": (lambda x: x.relu_(), 0.0),
    "in place, unread": (in_place, 0.0),
    "leaky": (nn.LeakyReLU(0.2), 0.0),
    "relu6": (F.relu6, 0.0),
    "ReLU6 at its upper end": (nn.ReLU6(), 6.0),
    "hardtanh": (nn.Hardtanh(), -1.0),
    "hardtanh by position": (lambda x: F.hardtanh(x, -3.0, 1.0), 1.0),
    "prelu": (nn.PReLU(), 0.0),
    "rrelu": (nn.RReLU().eval(), 0.0),
    "elu": (nn.ELU(2.0), 0.0),
    "threshold": (nn.Threshold(0.0, -2.0), 0.0),
    "abs": (torch.abs, 0.0),
    "clamp": (lambda x: x.clamp(-9.0, 0.0), 0.0),
    "one-dimensional max pooling": (lambda x: F.max_pool1d(torch.stack([0 * x, x], -1), 2).flatten(1), 0.0),
    "adaptive max pooling": (lambda x: nn.AdaptiveMaxPool2d(1)(torch.stack([0 * x, x], -1)[..., None])[..., 0, 0], 0.0),
    "max pooling with positions": (
        lambda x: F.max_pool2d(torch.stack([0 * x, x], -1)[:, None], (1, 2), return_indices=True)[0].flatten(1),
        0.0,
    ),
    "max pooling": (lambda x: F.max_pool2d(torch.stack([0 * x, x], -1)[:, None], (1, 2)).flatten(1), 0.0),
}


@pytest.mark.parametrize("name", BENDS)
def test_every_kinked_function_has_the_slopes_of_double_precision(name: str) -> None:
    bend, near = BENDS[name]
    torch.manual_seed(0)
    model = Cancelling(bend, near=near).eval()
    doubled = copy.deepcopy(model).double()
    x = torch.cat([torch.ones(2, 3), torch.randn(3, 3)])
    pattern = activation_pattern(model, x)

    def slopes(network: nn.Module, inputs: Tensor, *, fix: bool) -> dict[str, Tensor]:
        def outputs(weights: dict[str, Tensor]) -> Tensor:
            if not fix:
                return functional_call(network, weights, (inputs,))  # type: ignore[no-any-return]
            with FixedPattern(pattern):
                return functional_call(network, weights, (inputs,))  # type: ignore[no-any-return]

        return jacrev(outputs)(dict(network.named_parameters()))  # type: ignore[no-any-return]

    exact = slopes(doubled, x.double(), fix=False)
    fixed, free = slopes(model, x, fix=True), slopes(model, x, fix=False)
    for weight in exact:
        torch.testing.assert_close(fixed[weight].double(), exact[weight], rtol=1e-5, atol=1e-5)
    assert (free["units.weight"] - exact["units.weight"]).abs().max() > 0.01


def test_nothing_changes_if_no_unit_is_near_a_kink_also_where_inputs_are_infinite() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)).eval()
    x = 10 * torch.randn(5, 2, 8, 8)
    plain = model(x)
    with FixedPattern(activation_pattern(model, x)):
        assert torch.equal(model(x), plain)
    x = torch.tensor([-torch.inf, -1.0, 1.0, torch.inf])
    model = nn.Sequential(nn.ReLU6())
    with FixedPattern(activation_pattern(model, x)):
        assert torch.equal(model(x), torch.tensor([0.0, 0.0, 1.0, 6.0]))


def test_the_model_is_left_unchanged() -> None:
    class Counting(Cancelling):
        def __init__(self) -> None:
            super().__init__(F.relu)
            self.register_buffer("passes", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.passes, Tensor)
            self.passes += 1
            return super().forward(x)

    model = Counting().eval()
    before, random = state(model), torch.get_rng_state()
    activation_pattern(model, torch.ones(4, 3))
    assert same_state(model, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())


def test_a_smooth_network_has_no_pass_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = attention_net()
    subject.model.float()
    subject = Subject(subject.model, [(x.float(), y) for x, y in subject.batches])
    assert not has_kinks(subject.model, subject.batch(0)[0])
    monkeypatch.setattr(module, "activation_pattern", lambda *_: pytest.fail("a pass in double precision"))
    assert not curvature(subject, subject.parameters, "double-backward", kinks="double").fixed


def test_a_network_that_does_not_run_in_double_precision_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Single(Cancelling):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ torch.eye(3)

    subject = cancelling()
    single = replace(subject, model=Single(F.relu).eval())
    with caplog.at_level(logging.INFO, logger="landscape"):
        assert not curvature(single, single.parameters, "double-backward", kinks="double").fixed
    assert "the model cannot be run in double" in caplog.text


@pytest.mark.parametrize("more", [-1, 1])
def test_a_pass_with_another_number_of_kinks_is_rejected(more: int) -> None:
    model = Cancelling(F.relu).eval()
    pattern = activation_pattern(model, torch.ones(4, 3))
    with (
        pytest.raises(ValueError, match="fewer" if more > 0 else "more"),
        FixedPattern(pattern + pattern if more > 0 else []),
    ):
        model(torch.ones(4, 3))


def test_the_probe_fixes_the_pattern_and_kinks_single_has_another_run_key() -> None:
    subject = cancelling()
    double = in_double(subject)
    measured = {
        "fixed": (Hessian(top=2), subject),
        "free": (Hessian(top=2, kinks="single"), subject),
        "exact": (Hessian(top=2), double),
    }
    values = {name: run_probe(probe, of)["eigenvalue"] for name, (probe, of) in measured.items()}
    assert values["fixed"] == pytest.approx(values["exact"], rel=1e-5)
    assert values["free"] != pytest.approx(values["exact"], rel=1e-2)
    assert len({str(asked(Hessian(kinks=kinks), subject)) for kinks in ("double", "single")}) == 2


WHOLE: dict[str, Probe] = {
    "trace": Trace(vectors=4, method="hutchinson"),
    "density": Density(vectors=2, steps=20),
    "dataset": Hessian(top=2, scope="dataset"),
    "dataset by layer": Hessian(top=1, scope="dataset", per_layer=True),
}
NUMBERS = {"trace": "batch_trace", "density": "largest", "dataset": "eigenvalue", "dataset by layer": "eigenvalue"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_other_numbers_of_the_curvature_are_those_of_double_precision_too(name: str) -> None:
    subject, probe = cancelling(), WHOLE[name]
    exact = run_probe(probe, in_double(subject))[NUMBERS[name]]
    fixed, free = (run_probe(replace(probe, kinks=k), subject)[NUMBERS[name]] for k in ("double", "single"))  # type: ignore[type-var]
    scale = np.nanmax(np.abs(exact))
    np.testing.assert_allclose(fixed, exact, rtol=0, atol=1e-5 * scale)
    assert np.nanmax(np.abs(free - exact)) > 1e-2 * scale
    if name != "dataset by layer":  # whose products are by double backward
        traced = run_probe(replace(probe, hvp="traced"), subject)[NUMBERS[name]]  # type: ignore[type-var]
        np.testing.assert_allclose(traced, fixed, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize(
    ("probe", "more"),  # of all mini-batches the first one also says how large they are, and is timed
    [(Density(vectors=2, steps=4), 2), (Hessian(top=1, scope="dataset"), 2), (Hessian(top=1, per_layer=True), 0)],
)
def test_patterns_of_all_mini_batches_are_computed_once(
    probe: Probe, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def counted(*arguments: object) -> list[Tensor]:
        seen.append(1)
        return activation_pattern(*arguments)  # type: ignore[arg-type]

    subject = cancelling()
    curvature(subject, subject.parameters, "double-backward", kinks="double")  # a check, once
    monkeypatch.setattr(module, "activation_pattern", counted)
    run_probe(probe, subject)
    assert len(seen) == len(subject.batches) + more


def test_patterns_that_do_not_fit_into_memory_are_not_fixed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patterns, "MOST_BYTES", 30)  # 2 mini-batches of 4 samples and 6 units: 48
    subject = cancelling()
    with caplog.at_level(logging.INFO, logger="landscape"):
        found, free = (run_probe(Density(vectors=1, steps=3, kinks=k), cancelling()) for k in ("double", "single"))
    np.testing.assert_array_equal(found["nodes"], free["nodes"])
    assert "those of 2 mini-batches would take 0.0 GiB, more than 0.0 GiB; with at most --samples 5" in caplog.text
    assert curvature(subject, subject.parameters, "double-backward", kinks="double").fixed  # one mini-batch at a time


def test_a_compact_pattern_is_the_pattern() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    pattern, cache = activation_pattern(model, torch.randn(3, 1, 8, 8)), PatternCache(torch.device("cpu"))
    for i in (0, 1):
        cache.put((i, None, None), pattern)
    again = cache.get((0, None, None))
    assert again is not None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(again, pattern, strict=True))
    assert compact_bytes(pattern) == pattern[0].numel() + 4 * pattern[1].numel()


def fixes_pattern(model: nn.Module, inputs: Tensor) -> bool:
    subject = Subject(model.eval(), [(inputs, torch.arange(len(inputs)) % 3)])
    return curvature(subject, subject.parameters, "double-backward", kinks="double").fixed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)  # double draws another
        y: Tensor = self.b(F.relu(self.a(x + noise)))
        return y


class Recomputing(Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(checkpoint(lambda z: F.relu(self.a(z)), x, use_reentrant=False))
        return y


class Mapping(Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.vmap(lambda row: F.relu(self.a(row)))(x))
        return y


class Shaped(Net):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.relu(self.a(x.view(2, -1, 8))).view(-1, 16))  # not for one sample
        return y


@pytest.mark.parametrize(("network", "fixed"), [(Noisy, False), (Recomputing, False), (Mapping, False), (Shaped, True)])
def test_the_pattern_is_fixed_only_if_double_precision_is_the_same_function(
    network: Callable[[], nn.Module], *, fixed: bool
) -> None:
    assert fixes_pattern(network(), torch.randn(6, 8)) is fixed


def test_caches_that_a_model_builds_stay_in_single_precision() -> None:
    class Caching(Net):
        cache: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None or len(self.cache) != len(x):
                self.cache = torch.linspace(0, 1, len(x)).to(x)[:, None]
            y: Tensor = self.b(F.relu(self.a(x))) * (1 + self.cache)
            return y

    model = Caching()
    assert fixes_pattern(model, torch.randn(6, 8))
    assert model.cache is not None
    assert model.cache.dtype == torch.float32


def test_a_weight_that_a_hook_computes_does_not_stop_the_pattern_of_double_precision() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 2)).eval()
    inputs = torch.randn(6, 4)
    hidden = model[0](inputs)  # leaves a weight with a graph behind
    assert not model[0].weight.is_leaf
    (pattern,) = activation_pattern(model, inputs)
    assert torch.equal(pattern.float(), hidden.sign())
