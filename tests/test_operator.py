"""The choice of the Hessian-vector product backend, and that it does not change the numbers."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import Branching, batches_of, convolution_net, tanh_net
from recording import Recorder
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from landscape.probes.hessian import Hessian
from landscape.products import hvp_backends as module
from landscape.products import hvp_reference
from landscape.products.hessian_product import HessianProduct, Product, non_differentiable_layer
from landscape.products.hvp_backends import CODES, Hvp, curvature
from landscape.products.hvp_reference import Costs, PlannedProducts
from landscape.products.micro_batches import MicroBatchedProduct, MicroBatching
from landscape.products.operator import Curvature, Operator
from landscape.products.vectors import joint_inner, joint_length, random_unit
from landscape.results import reader
from landscape.running.run import run
from landscape.subject.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's forward mode


def at_costs(monkeypatch: pytest.MonkeyPatch, **seconds: tuple[float, float]) -> list[str]:
    """Set the seconds (per preparation, per product) of every backend; returns those that get measured."""
    measured: list[str] = []
    plain = hvp_reference.reference.__wrapped__  # type: ignore[attr-defined]

    def reference(*arguments: Any) -> Any:
        return replace(plain(*arguments), costs=Costs(0.0, *seconds["kept"]), functions=100)

    def seconds_of(candidate: Curvature) -> tuple[float, float]:
        measured.append(candidate.hvp)
        return seconds[candidate.hvp]

    def prepared(subject: Subject, parameters: Any, *_: object) -> Curvature:
        return Curvature(subject, parameters, "traced")

    monkeypatch.setattr(module, "reference", reference)
    monkeypatch.setattr(module, "seconds_of", seconds_of)
    monkeypatch.setattr(module, "_traced", prepared)
    return measured


@pytest.mark.parametrize(("batches", "expected"), [(1, "double-backward"), (20, "traced")])
def test_the_backend_of_the_least_predicted_time_is_chosen(
    batches: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = at_costs(monkeypatch, kept=(0.1, 0.05), traced=(0.1, 0.035))
    subject = tanh_net()
    planned = PlannedProducts(batches, products=20)
    assert curvature(subject, subject.parameters, "auto", planned=planned).hvp == expected
    assert measured == ([] if expected == "double-backward" else [expected])  # nothing else is prepared


def test_a_backend_that_proves_slower_than_predicted_is_left_and_the_reason_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured = at_costs(monkeypatch, kept=(0.1, 0.05), traced=(0.1, 0.2))
    subject = tanh_net()
    with caplog.at_level(logging.DEBUG, logger="landscape"):
        chosen = curvature(subject, subject.parameters, "auto", planned=PlannedProducts(1000))
    assert (chosen.hvp, measured) == ("double-backward", ["traced"])
    assert "double-backward (predicted 1100 s for 1000 mini-batches; traced 4100 s); --hvp chooses" in caplog.text


def test_a_backend_that_fails_in_any_way_is_no_candidate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("val")

    monkeypatch.setattr(hvp_reference, "TRACE", (0.0, 0.0))
    monkeypatch.setattr(module, "trace", broken)
    subject = tanh_net()
    with caplog.at_level(logging.DEBUG, logger="landscape"):
        assert curvature(subject, subject.parameters, "auto", planned=PlannedProducts(100)).hvp == "double-backward"
    assert "no traced Hessian products: 'val'" in caplog.text


def test_what_is_prepared_once_at_once_or_anew_counts_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = at_costs(monkeypatch, kept=(0.1, 0.05), traced=(0.1, 0.035))
    subject = tanh_net()
    for planned in (PlannedProducts(1000), PlannedProducts(1)):
        assert curvature(subject, subject.parameters, "auto", planned=planned).hvp == "traced"
    assert measured == ["traced"]
    at_costs(monkeypatch, kept=(0.1, 0.05), traced=(0.1, 0.035))
    subject = tanh_net()
    chosen = [
        curvature(subject, subject.parameters, "auto", planned=PlannedProducts(10, 20, at_once=at_once)).hvp
        for at_once in (4, 1)
    ]
    assert chosen == ["double-backward", "traced"]
    at_costs(monkeypatch, kept=(1.0, 0.01), traced=(0.1, 0.01))
    monkeypatch.setattr(hvp_reference, "SHARES", {"traced": (1.0, 0.95)})
    subject = tanh_net()

    def chosen(planned: PlannedProducts) -> str:
        return curvature(subject, subject.parameters, "auto", planned=planned).hvp

    assert chosen(PlannedProducts(20, 20)) == "double-backward"
    assert chosen(PlannedProducts(20, 20, rebuilt=True)) == "traced"


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_uses_double_backward_and_logs_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(Branching().double().eval(), batches_of((4,), (6,) * 3, 3))
    monkeypatch.setattr(hvp_reference, "TRACE", (0.0, 0.0))
    with caplog.at_level(logging.DEBUG, logger="landscape"):
        chosen = curvature(subject, subject.parameters, "auto", planned=PlannedProducts(100))
    assert chosen.hvp == "double-backward"
    assert "no traced Hessian products: the model cannot be traced" in caplog.text
    with pytest.raises(ValueError, match="cannot be traced"):  # an error if asked for by name
        curvature(subject, subject.parameters, "traced")


@pytest.mark.slow
def test_batched_products_are_those_of_each_mini_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mini_batches_per_product", lambda *_: 2)
    subject = convolution_net()
    batched = curvature(subject, subject.parameters, "traced", batched=True)
    assert batched.batched == 2
    joint = batched.batched_product([0, 1])
    rows = torch.stack([
        random_unit(subject.size, seed, device=torch.device("cpu"), dtype=torch.float64) for seed in (0, 1)
    ])  # fmt: skip
    found = joint(rows)
    for i in range(2):
        alone = Curvature(subject, subject.parameters, "double-backward").product(i)
        torch.testing.assert_close(found[i], alone(rows[i]), rtol=1e-10, atol=1e-13)
        assert joint.values[i] == pytest.approx(alone.value, rel=1e-12)
    assert not batched.fits_batched([0])


@pytest.mark.slow
def test_a_resumed_result_keeps_its_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shares = {"traced": (0.0, 0.0)}
    monkeypatch.setattr(hvp_reference, "SHARES", shares)
    monkeypatch.setattr(hvp_reference, "TRACE", (0.0, 0.0))
    monkeypatch.setattr(module, "seconds_of", lambda candidate: (0.0, 0.0))

    def spectra(path: Path, stop: int) -> np.ndarray:
        seen = [0]

        def report(done: int, total: int) -> None:
            seen[0] = done
            if done == stop:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            run(Hessian(top=2), tanh_net(sizes=(6,) * 4), path, report=report)
        ((_, data),) = reader.find(path, "hessian")
        return np.asarray(data["hvp"].values)

    half = spectra(tmp_path / "a.h5", 2)
    assert half[:2].tolist() == [CODES.index("traced")] * 2
    shares["traced"] = (9.0, 9.0)  # now the other backend is faster
    assert spectra(tmp_path / "a.h5", 99).tolist() == [CODES.index("traced")] * 4
    assert spectra(tmp_path / "b.h5", 99).tolist() == [CODES.index("double-backward")] * 4


class OfSize(nn.Module):
    """Takes mini-batches of one size alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(4, 3), size

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.tanh().view(self.size, 3)


def test_a_model_that_takes_one_size_of_mini_batches_is_measured() -> None:
    subject = Subject(OfSize(7).eval(), batches_of((4,), (7, 7), 3))
    assert curvature(subject, subject.parameters, "auto").product(1).value > 0


class Hungry(nn.Module):
    """Runs out of memory above a number of samples."""

    def __init__(self, most: int, error: Exception) -> None:
        super().__init__()
        self.linear, self.most, self.error = nn.Linear(4, 3), most, error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise self.error
        y: Tensor = self.linear(x)
        return y.tanh()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "error"),
    [
        *((operator, torch.OutOfMemoryError("CUDA out of memory")) for operator in ("hessian", "ggn", "fisher")),
        ("hessian", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    ],
)
def test_a_mini_batch_that_does_not_fit_is_split_into_micro_batches(
    operator: Operator, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    subject = Subject(Hungry(16, error).double().eval(), batches_of((4,), (7, 7), 3), weight_decay=0.1)
    vector = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float64)
    whole = Curvature(subject, subject.parameters, "double-backward", operator).product(1)
    subject.model.most = 3  # type: ignore[assignment]
    parts = Curvature(subject, subject.parameters, "double-backward", operator)
    first = parts.product(0)
    assert "out of memory: continuing with mini-batches of 7 in 4 micro-batches" in caplog.text
    caplog.clear()
    second = parts.product(1)
    torch.testing.assert_close(second(vector), whole(vector), rtol=1e-12, atol=1e-15)
    assert second.value == pytest.approx(whole.value, rel=1e-12)
    assert first.value != second.value
    assert caplog.text == ""  # the number of micro-batches holds for the next mini-batch
    subject.model.most = 0  # type: ignore[assignment]
    with pytest.raises(MemoryError, match="a single sample does not fit"):
        second(vector)


@pytest.mark.slow
def test_mini_batches_that_run_out_of_memory_at_the_same_time_are_split_once() -> None:
    together, micro_batching = threading.Barrier(4, timeout=20), MicroBatching()

    def prepare(part: slice) -> Product:
        if part == slice(None):
            together.wait()
            raise MemoryError("cannot allocate memory")
        return Product(torch.tensor(1.0), 0.0, lambda vector: [2 * vector])

    def product(_: int) -> Tensor:
        return MicroBatchedProduct(prepare, 8, micro_batching, explain=lambda error: error)(torch.ones(3))

    with ThreadPoolExecutor(4) as pool:
        assert [found.tolist() for found in pool.map(product, range(4))] == [[2.0] * 3] * 4
    assert micro_batching.count == 2


@pytest.mark.slow
def test_running_out_of_memory_within_a_product_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tanh_net()
    vector = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float64)
    product = Curvature(subject, subject.parameters, "double-backward").product(0)
    expected = product(vector)
    failing = iter([torch.OutOfMemoryError("CUDA out of memory")])
    plain = HessianProduct.__call__

    def call(self: HessianProduct, given: Tensor) -> Tensor:
        for error in failing:
            raise error
        return plain(self, given)

    monkeypatch.setattr(HessianProduct, "__call__", call)
    torch.testing.assert_close(product(vector), expected, rtol=1e-12, atol=1e-15)


class Once(torch.autograd.Function):
    """A function whose gradient has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Fused(nn.Module):
    """A layer with a kernel of its own, as external attention has."""

    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)


class CPUFlash(nn.Module):
    """Calls a fused attention kernel by its own name, which no setting can force elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.view(len(x), 1, 1, -1).float()
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0].view_as(x).to(x.dtype)


@pytest.mark.parametrize(
    ("layer", "does"), [(Fused, "write it with operations that can be"), (CPUFlash, "use its plain")]
)
def test_a_layer_without_a_second_derivative_is_named(layer: type[nn.Module], does: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), layer())
    subject = Subject(nn.Sequential(inner, nn.Linear(8, 3)).double().eval(), batches_of((4,), (6, 6), 3))
    with pytest.raises(ValueError, match=rf"differentiated twice .*the layer is 0\.2 \({layer.__name__}\); {does}"):
        Curvature(subject, subject.parameters, "double-backward").product(0)(torch.zeros(subject.size).double())


def test_the_benchmark_times_the_first_mini_batch() -> None:
    subject = tanh_net()
    assert all(
        0 < seconds < 1
        for seconds in hvp_reference.seconds_of(Curvature(subject, subject.parameters, "double-backward"))
    )


@pytest.mark.slow
def test_weight_decay_is_in_every_kind_of_product() -> None:
    plain, decayed = tanh_net(), tanh_net(weight_decay=0.25)
    vector = random_unit(plain.size, 0, device=torch.device("cpu"), dtype=torch.float64)
    for kind in ("double-backward", "traced"):
        without, with_it = (
            curvature(subject, subject.parameters, kind).product(1)(vector)  # type: ignore[arg-type]
            for subject in (plain, decayed)
        )
        torch.testing.assert_close(with_it, without + 0.25 * vector, rtol=1e-12, atol=1e-14)


class Clamped(nn.Module):
    """The hard sigmoid by a clamp."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 3).clamp(0, 6) / 6


@pytest.mark.parametrize("kind", ["double-backward", "traced"])
def test_the_hard_sigmoid_has_the_second_derivatives_of_a_clamp(kind: Hvp) -> None:
    products = []
    for gate in (nn.Hardsigmoid(), Clamped()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), gate, nn.Linear(8, 3)).double().eval()
        subject = Subject(model, batches_of((4,), (6, 6), 3))
        vector = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float64)
        products.append(curvature(subject, subject.parameters, kind).product(1)(vector))
    torch.testing.assert_close(*products, rtol=1e-12, atol=1e-14)
    assert products[0].abs().max() > 0


def test_a_layer_without_a_second_derivative_is_named_after_layers_that_work_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Hardswish(inplace=True), nn.Hardsigmoid(inplace=True))
    assert non_differentiable_layer(model, lambda: model(torch.randn(2, 3))) == "2 (Hardsigmoid)"


@pytest.mark.slow
@pytest.mark.parametrize("together", [0, 2])
def test_replayed_products_are_those_of_every_mini_batch(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mini_batches_per_product", lambda *_: together)
    subject = tanh_net(sizes=(6,) * 4)
    curved = curvature(subject, subject.parameters, "traced", batched=True)
    assert curved._traced is not None
    recorder = Recorder()
    replayed = replace(curved, _traced=curved._traced.with_graphs(*curved._traced.graphs, capture=recorder))
    vectors = torch.stack([
        random_unit(subject.size, seed, device=torch.device("cpu"), dtype=torch.float64) for seed in range(2)
    ])  # fmt: skip
    for _ in range(2):
        for i in (0, 2):
            one, other = (c.batched_product([i, i + 1]) if together else c.product(i) for c in (curved, replayed))
            for rows in (vectors, vectors.flip(0)):
                given = rows if together else rows[0]
                torch.testing.assert_close(other(given), one(given), rtol=0, atol=0)
    assert (recorder.recordings, recorder.replays) == (2, 4 + 8)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lengths_and_products_of_tensors_are_those_of_entries_in_float64(dtype: torch.dtype, scale: float) -> None:
    parts = [(scale * torch.randn(shape)).to(dtype) for shape in ((3, 5000), (7,), (), (4096,), (0, 2))]
    expected = torch.cat([part.double().reshape(-1) for part in parts]).norm().item()
    assert joint_length(parts) == pytest.approx(expected, rel=1e-6)
    assert joint_inner(parts, parts) == pytest.approx(expected**2, rel=1e-6)
