"""What only a device breaks or gets wrong, each a cheap fact on the simulated one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import subject_on
from simulated_cuda import simulated_cuda
from torch import Tensor, nn

import landscape
from landscape.checkpoints.user_code import fixed_rng
from landscape.curvature.pyhessian_engine import power_iteration
from landscape.products.hessian_product import hessian_product, out_of_memory, second_derivative_errors
from landscape.products.micro_batches import free_memory
from landscape.subject.graph_replay import GraphReplay
from landscape.subject.precision import exact_arithmetic

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 4, 2, batch_first=True),
    "gru": lambda: nn.GRU(3, 4, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 4),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_have_second_derivatives_while_measuring(name: str) -> None:
    torch.manual_seed(0)
    layer = RECURRENT[name]().double().eval()
    x, sizes = torch.randn(2, 5, 3, dtype=torch.float64), [p.numel() for p in layer.parameters()]
    v = torch.randn(sum(sizes), dtype=torch.float64)

    def product(device: str) -> Tensor:
        moved, inputs = layer.to(device), x.to(device)
        found = hessian_product(lambda: moved(inputs)[0].square().mean(), list(moved.parameters()))(v.to(device))
        return found.cpu()

    expected = product("cpu")
    with simulated_cuda():
        with exact_arithmetic():
            assert torch.equal(product("cuda"), expected)
        with pytest.raises(ValueError, match="cudnn RNN backward can only be called in training mode"):
            product("cuda")
        with exact_arithmetic(), torch.no_grad():
            layer.to("cuda")(x.to("cuda"))
        assert torch.backends.cudnn.enabled


def test_after_a_capture_that_failed_nothing_is_recorded_and_memory_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with simulated_cuda() as simulation, caplog.at_level(logging.DEBUG, logger="landscape"):
        x = torch.ones(3, device="cuda")

        def doubled(v: Tensor) -> list[Tensor]:
            return [2 * v]

        assert torch.equal(GraphReplay(doubled, "first").at([])(x)[0], 2 * x)
        simulation.captures_fail = True
        assert torch.equal(GraphReplay(doubled, "second").at([])(x)[0], 2 * x)
        simulation.captures_fail = False
        assert torch.equal(GraphReplay(doubled, "third").at([])(x)[0], 2 * x)
        free_memory()
    assert [text.partition(" (")[0] for text in caplog.messages] == [
        "no CUDA graph of the second", "no CUDA graph of the third"
    ]  # fmt: skip


def test_a_function_that_waits_is_not_recorded_and_others_may_be() -> None:
    with simulated_cuda() as simulation:
        x = torch.ones(3, device="cuda")
        waiting = GraphReplay(lambda v: [v * v.sum().item()], "test").at([])
        assert torch.equal(waiting(x)[0], 3 * x)
        assert not simulation.allocator_is_stuck
        other = GraphReplay(lambda v: [v * v.sum()], "test")
        assert torch.equal(other.at([])(x)[0], 3 * x)
        assert other.holds(other.at([])(x)[0])


def test_an_apple_gpu_is_refused_where_it_is_loaded() -> None:
    with simulated_cuda(kind="mps"):
        model, x = nn.Linear(2, 2).to("mps"), torch.randn(4, 2)
        with pytest.raises(ValueError, match="the module is on an Apple GPU, which has no double precision; give dev"):
            landscape.load(model, data=[(x, torch.tensor([0, 1, 0, 1]))])
        with pytest.raises(TypeError, match="float64"):
            torch.ones(2, device="mps").double()


def test_versions_that_warn_of_the_old_interface_of_tf32_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def warn_once(_: str) -> None:
        if not said:
            warnings.warn("Please use the new API settings to control TF32 behavior: fp32_precision", stacklevel=1)
        said.append(1)

    monkeypatch.setattr(torch, "set_float32_matmul_precision", warn_once)
    with exact_arithmetic():
        assert said


def test_the_callers_seed_of_devices_that_are_not_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_cuda() as simulation:
        torch.manual_seed(42)
        before = list(torch.cuda._lazy_seed_tracker.get_calls())  # type: ignore[no-untyped-call]
        with fixed_rng(7):
            torch.rand(1)
        assert list(torch.cuda._lazy_seed_tracker.get_calls()) == before  # type: ignore[no-untyped-call]
        assert not simulation.initialised
        torch.ones(1, device="cuda")
        state = torch.cuda.get_rng_state()
        with fixed_rng(7):
            assert torch.cuda.default_generators[0].initial_seed() == 7
        assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize(
    "text", ["CUDNN_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
             "GET was unable to find an engine to execute this computation", "CUDA error: out of memory"],
)  # fmt: skip
def test_memory_that_libraries_of_a_device_lack_is_recognised(text: str) -> None:
    assert out_of_memory(RuntimeError(text))
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "cuDNN error: EXECUTION"])
def test_errors_of_a_device_do_not_blame_the_model(text: str) -> None:
    with pytest.raises(RuntimeError, match=text), second_derivative_errors():
        raise RuntimeError(text)
    with pytest.raises(ValueError, match="cannot be differentiated twice"), second_derivative_errors():
        raise RuntimeError("derivative for aten::x is not implemented")


@pytest.mark.slow
def test_pyhessian_works_on_the_second_device() -> None:
    pytest.importorskip("pyhessian")
    with simulated_cuda():
        subject = subject_on("cuda:1", "resnet_demo")
        found: Any = power_iteration(subject, 0, list(subject.parameters.values()), lambda v: v, 1, iterations=2)
    assert found.vectors.device == torch.device("cpu")
