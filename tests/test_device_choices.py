"""Which products and which mini-batches a device is given, each a cheap fact on the simulated one or without any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import subject_on
from simulated_cuda import simulated_cuda
from torch import nn

from landscape.curvature import lanczos
from landscape.curvature.stopping import StoppingRule
from landscape.data.memory import limited_to
from landscape.products import hvp_backends, hvp_reference, memory_forecast
from landscape.products.hvp_backends import Hvp, curvature
from landscape.products.hvp_reference import Costs, PlannedProducts, Reference, learn, predicted
from landscape.products.memory_forecast import MemoryForecast, planned_micro_batches
from landscape.products.operator import Curvature
from landscape.products.vectors import random_unit
from landscape.running.executor import _halved
from landscape.subject.loading.load import measuring
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import cache_of

CUDA = torch.device("cuda")
MANY = PlannedProducts(batches=1000)


def _convolutional() -> Subject:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)).eval()
    return Subject(model, [(torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))])


@pytest.mark.parametrize(("planned", "tried"), [(MANY, ["contiguous", "channels_last"]), (PlannedProducts(), [])])
def test_the_faster_layout_is_taken_where_the_trial_pays_and_the_loser_is_freed(
    planned: PlannedProducts, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, freed = _convolutional(), []
    kept = Curvature(subject, subject.parameters, "double-backward")

    def prepared(_: Any, parameters: Any, fixed: bool, together: int, layout: torch.memory_format) -> Curvature:
        traced: Any = SimpleNamespace(layout=layout, batched=0, forget=lambda: freed.append(layout))
        return Curvature(subject, subject.parameters, "traced", _traced=traced)

    def seconds(curved: Curvature) -> tuple[float, float]:
        assert curved._traced is not None
        return 0.1, 0.1 if curved._traced.layout is torch.channels_last else 0.2

    monkeypatch.setattr(hvp_backends, "reference", lambda *_: Reference(kept, None, Costs(0.0, 0.5, 0.5), 10, None))
    monkeypatch.setattr(hvp_backends, "_layouts", lambda _: (torch.contiguous_format, torch.channels_last))
    monkeypatch.setattr(hvp_backends, "_prepared", prepared)
    monkeypatch.setattr(hvp_backends, "seconds_of", seconds)
    found = hvp_backends._measured(subject, subject.parameters, False, 0, planned)
    assert found is not None
    assert found[1].each == (0.1 if tried else 0.2)
    assert freed == ([torch.contiguous_format] if tried else [])


def test_the_first_preparation_on_a_device_is_not_timed() -> None:
    calls: list[int] = []
    hvp_reference._prepared_warm(lambda: calls.append(1), torch.device("cpu"))
    assert len(calls) == 1
    with simulated_cuda():
        hvp_reference._prepared_warm(lambda: calls.append(1), CUDA)
    assert len(calls) == 3


def test_forecasts_of_a_kind_of_gpu_are_learned(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANDSCAPE_CACHE", str(tmp_path))
    kept = Costs(0.0, 1.0, 2.0)
    with simulated_cuda():
        before = predicted(kept, 10, CUDA, batched=False, stored=False)
        learn(CUDA, kept, Costs(0.0, 0.25, 0.5), batched=False)
        learn(CUDA, kept, Costs(0.0, 0.5, 0.25), batched=True)
        one, several = (predicted(kept, 10, CUDA, batched=batched, stored=False) for batched in (False, True))
    assert (one.once, one.each, several.once, several.each) == (0.25, 0.5, 0.5, 0.25)
    assert predicted(kept, 10, torch.device("cpu"), batched=False, stored=False) == before


@pytest.mark.slow
def test_mini_batches_share_a_product_where_they_fit_and_leave_the_device_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_cuda():
        model, inputs = nn.Linear(4, 3).to("cuda").eval(), torch.randn(6, 4).to("cuda")
        subject = Subject(model, [(inputs, torch.zeros(6, dtype=torch.long).to("cuda"))])

        def together(planned: PlannedProducts) -> int:
            return hvp_backends.mini_batches_per_product(subject, subject.parameters, planned)

        assert together(MANY) == hvp_backends.BATCHED
        assert together(PlannedProducts(batches=4)) == 0
        with limited_to(2**10):
            assert together(MANY) == 0
        assert hvp_reference.flops(subject) == 6 * (6 * 2 * 4 * 3)  # of the forward pass of six samples
        monkeypatch.setattr(hvp_backends, "FILLING", 6 * (6 * 2 * 4 * 3) - 1)
        assert together(MANY) == 0


@pytest.mark.slow
def test_a_gpu_divides_mini_batches_for_a_given_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_forecast, "forecast", lambda *_: MemoryForecast(0, 0, 2**33, 5))
    with simulated_cuda():
        subject = subject_on("cuda", "resnet_demo")
        assert planned_micro_batches(subject, subject.parameters, 0) == 1
        with limited_to(2**32):
            assert planned_micro_batches(subject, subject.parameters, 0) == 3
    with limited_to(2**32):
        assert planned_micro_batches(_convolutional(), {}, 0) == 3


def test_what_was_prepared_for_mini_batches_that_did_not_fit_is_dropped() -> None:
    subject = subject_on("cpu", "resnet_demo")
    cache_of(subject).values["recorded"] = torch.ones(3)
    smaller = _halved(subject)
    assert smaller is not None
    assert smaller.batch_size == 2
    assert not cache_of(subject).values


@pytest.mark.slow
@pytest.mark.parametrize("searches", [1, 3])
def test_a_search_on_a_device_waits_for_its_tests_of_convergence_alone(searches: int) -> None:
    starts = torch.randn(searches, 2000, generator=torch.Generator().manual_seed(0))

    def counts(steps: int) -> tuple[int, int]:
        before = simulation.operations, sum(simulation.waits.values())
        search = lanczos.searches(starts.to("cuda"), StoppingRule(1, tol=0.0), max_steps=steps, room=100)
        lanczos.run(lambda rows: rows * there, search)
        return simulation.operations - before[0], sum(simulation.waits.values()) - before[1]

    with simulated_cuda() as simulation:
        there = torch.linspace(-1, 1, 2000).to("cuda")
        few, many = counts(16), counts(32)
    assert (many[0] - few[0]) / 16 <= 45  # operations a step, with two blocks of basis vectors
    assert (many[1] - few[1]) / 16 <= 0.5  # waits a step


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # imported while a graph is traced
@pytest.mark.parametrize(("hvp", "passes", "own"), [("double-backward", 5, 0), ("traced", 0, 2)])
def test_a_product_on_a_device_is_its_passes_and_asks_the_host_for_nothing(hvp: Hvp, passes: int, own: int) -> None:
    """At most so many operations as that many gradients, or the copy and the sum around a recorded product."""
    with simulated_cuda() as simulation:
        subject = subject_on("cuda", "resnet_demo")
        with measuring(subject):
            product = curvature(subject, subject.parameters, hvp).product(0)
            vector = random_unit(subject.size, 0, device=subject.device, dtype=subject.dtype)
            for _ in range(3):  # recorded, and compared
                product(vector)
            simulation.operations = 0
            torch.autograd.grad(subject.loss(0), list(subject.parameters.values()))
            gradient, simulation.operations = simulation.operations, 0
            for counted in (simulation.waits, simulation.doubles, simulation.uploads, simulation.host_draws):
                counted.clear()
            product(vector)
            assert simulation.operations <= passes * gradient + own
            assert not [*simulation.waits, *simulation.uploads, *simulation.host_draws]
            logits = subject.outputs(subject.batch(0)[0]).numel()
            assert sum(simulation.doubles.values()) <= 20 * logits, "of the loss alone"
