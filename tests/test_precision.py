"""Measurements compute float32 products in float32, whatever the caller allows, and leave the settings as found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import landscape
from landscape.options import OptionError
from landscape.probes.trace import Trace
from landscape.running.run import run
from landscape.subject.precision import exact_arithmetic
from landscape.subject.subject import Subject
from landscape.training.updates import deterministic_algorithms

backends: Any = torch.backends


def settings() -> list[Any]:
    """All that decides how float32 products are computed, to be compared with ==."""
    newer = ((backends.cudnn, "conv"), (backends.mkldnn, "matmul"), (backends.mkldnn, "conv"))  # from torch 2.9 on
    products = (backends.cuda.matmul, *(getattr(backend, operation, None) for backend, operation in newer))
    return [
        torch.get_float32_matmul_precision(),
        backends.cudnn.allow_tf32,
        [getattr(product, "fp32_precision", "") for product in products],
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        torch.is_autocast_enabled("cpu"),
    ]


@pytest.fixture(params=["as delivered", "high", "medium", "TF32 everywhere"])
def allowed(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Settings of a caller, which are as delivered after the test."""
    with exact_arithmetic():  # restores them
        torch.set_float32_matmul_precision("highest" if request.param == "as delivered" else "medium")
        backends.cudnn.allow_tf32, backends.cudnn.benchmark = True, True
        if request.param == "high":
            torch.set_float32_matmul_precision("high")
        if request.param == "TF32 everywhere" and hasattr(backends, "fp32_precision"):
            backends.fp32_precision = "tf32"
        yield settings()
        if hasattr(backends, "fp32_precision"):
            backends.fp32_precision = "none"


class Watched(nn.Module):
    """A linear layer that notes the settings that it runs under."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.then = nn.Linear(64, 4), then
        self.seen: list[list[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(settings())
        self.then()
        logits: Tensor = self.linear(x)
        return logits


def watched(then: Callable[[], None] = lambda: None) -> Subject:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(96, 64, generator=generator), torch.arange(96) % 4) for _ in range(2)]
    return Subject(Watched(then), batches)


def exact(seen: list[Any]) -> bool:
    products = all(precision in ("ieee", "") for precision in seen[2])
    return products and [seen[0], seen[1], *seen[3:]] == ["highest", False, False, False, False, True, False]


def test_products_are_exact_within_and_settings_restored(allowed: list[Any]) -> None:
    with torch.autocast("cpu"):
        outside = settings()
        with exact_arithmetic():
            assert exact(settings())
            with exact_arithmetic():
                assert exact(settings())
            assert exact(settings())
        assert settings() == outside
    assert settings() == allowed


@pytest.mark.parametrize("name", ["allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"])
def test_whether_sums_may_be_split_stays_the_callers_choice(name: str) -> None:
    product, split = backends.cuda.matmul, f"{name}_split_k"
    if not hasattr(product, split):
        pytest.skip("this PyTorch has no such setting")
    setattr(product, name, (False, False))
    try:
        with exact_arithmetic():
            assert (getattr(product, name), getattr(product, split)) == (False, False)
        assert (getattr(product, name), getattr(product, split)) == (False, False)
    finally:
        setattr(product, name, True)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OptionError])
def test_settings_are_restored_after_an_error_and_after_an_interrupt(error: type, allowed: list[Any]) -> None:
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise error("stop")

    subject = watched(stop)
    with pytest.raises(error, match="stop"):
        landscape.measure("line", subject, out=None, quiet=True)
    assert exact(subject.model.seen[-1])
    assert settings() == allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trace", "line", "surface", "evaluate"])
def test_the_callers_precision_does_not_reach_the_numbers(name: str, allowed: list[Any]) -> None:
    def found() -> list[float]:
        subject = watched()
        if name == "evaluate":
            values = list(landscape.evaluate(subject).values())
        else:
            options: dict[str, Any] = {
                "trace": {"vectors": 4},
                "surface": {"resolution": "3"},
                "line": {"resolution": 3},
            }.get(name, {})
            result = landscape.measure(name, subject, out=None, quiet=True, **options)
            values = [float(result[v].sum()) for v in result.data_vars if result[v].dtype.kind == "f"]
        assert subject.model.seen
        assert all(map(exact, subject.model.seen))
        return [value for value in values if value == value]

    with exact_arithmetic():
        expected = found()
    with torch.autocast("cpu"), torch.no_grad():
        assert found() == expected
    assert settings() == allowed


def test_the_run_loop_is_exact_without_the_python_interface(allowed: list[Any]) -> None:
    subject = watched()
    run(Trace(vectors=4), subject, None)  # as a command does
    assert all(map(exact, subject.model.seen))
    assert settings() == allowed


def test_threads_that_measure_at_once_leave_exact_arithmetic_to_each_other(allowed: list[Any]) -> None:
    def nested(_: int) -> bool:
        with exact_arithmetic():
            return exact(settings())

    with exact_arithmetic(), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(nested, range(32)))
        assert exact(settings())
    assert settings() == allowed


def test_measurements_of_two_threads_that_overlap_are_exact_to_their_ends(allowed: list[Any]) -> None:
    first, second = exact_arithmetic(), exact_arithmetic()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(first.__enter__).result()
        other.submit(second.__enter__).result()
        one.submit(first.__exit__, None, None, None).result()
        assert other.submit(lambda: exact(settings())).result()
        other.submit(second.__exit__, None, None, None).result()
    assert settings() == allowed


@pytest.mark.slow
def test_bf16_is_left_to_the_surface_that_asks_for_it() -> None:
    seen: list[torch.dtype] = []
    subject = watched()
    subject.model.linear.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    landscape.measure("surface", subject, out=None, quiet=True, resolution="3", precision="bf16")
    assert torch.bfloat16 in seen
    seen.clear()
    landscape.measure("surface", subject, out=None, quiet=True, resolution="3")
    assert set(seen) == {torch.float32}


def test_reduced_precision_would_change_these_numbers() -> None:
    """So that the tests above compare something: bf16 products of these matrices differ from exact ones."""
    subject = watched()
    inputs, _ = subject.batch(0)
    with torch.autocast("cpu"):
        rounded = F.linear(inputs, subject.model.linear.weight).float()
    assert not torch.equal(rounded, F.linear(inputs, subject.model.linear.weight))


# --- The deterministic mode: its error for an operation without an algorithm, and what it restores ---


def test_an_operation_without_a_deterministic_algorithm_is_named_in_one_line() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^put_ has no deterministic algorithm .*--deterministic") as caught,
        deterministic_algorithms(),
    ):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert "\n" not in str(caught.value)
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_pass_and_everything_is_as_before() -> None:
    seen: list[bool] = []

    def fail() -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"), deterministic_algorithms():
        fail()
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
