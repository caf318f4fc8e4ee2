"""What only a device breaks or gets wrong, each a cheap fact on the simulated one."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from devices import subject_on
from simulated_cuda import simulated_cuda
from torch import Tensor, nn

import landscape
from landscape import models
from landscape.checkpoints.user_code import fixed_rng
from landscape.curvature.pyhessian_engine import power_iteration
from landscape.data.dataset import Batches, Images
from landscape.predictions.scores import overlaps
from landscape.products.hessian_product import _note_rounding, hessian_product, out_of_memory, second_derivative_errors
from landscape.products.micro_batches import free_memory
from landscape.subject import graph_replay
from landscape.subject.device import converted
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


@pytest.mark.parametrize("fails", [False, True])
def test_others_draw_random_numbers_of_a_device_while_it_records_and_after_a_recording_that_failed(fails: bool) -> None:
    with simulated_cuda() as simulation:
        generator = torch.cuda.default_generators[0]
        state = generator.state
        simulation.captures_fail = fails

        def work() -> list[Tensor]:  # stands in for another thread
            if simulation.recording is not None:
                generator.draw()
            return [torch.ones(3, device="cuda")]

        with contextlib.suppress(RuntimeError):
            graph_replay.cuda_capture(work, torch.device("cuda:0"), None)
        generator.draw()
        assert generator.get_offset() == 8
        assert (generator.state is state) is not fails, "graphs of others have registered it"


def test_a_function_that_waits_is_not_recorded_and_others_may_be() -> None:
    with simulated_cuda() as simulation:
        x = torch.ones(3, device="cuda")
        waiting = GraphReplay(lambda v: [v * v.sum().item()], "test").at([])
        assert torch.equal(waiting(x)[0], 3 * x)
        assert not simulation.allocator_is_stuck
        other = GraphReplay(lambda v: [v * v.sum()], "test")
        assert torch.equal(other.at([])(x)[0], 3 * x)
        assert other.holds(other.at([])(x)[0])


def test_other_threads_may_read_numbers_of_a_device_while_a_function_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_replay, "_on_host", lambda tensor: False)  # all threads are on a device
    x = torch.ones(1)
    with ThreadPoolExecutor(1) as other, graph_replay.recordable():
        assert other.submit(x.item).result() == 1
        with pytest.raises(RuntimeError, match="waits for the device"):
            x.item()


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
    for error in (
        RuntimeError("derivative for aten::x is not implemented"),
        AssertionError("only to train"),
        AssertionError(),
    ):
        with pytest.raises(ValueError, match="cannot be differentiated twice"), second_derivative_errors():
            raise error


@pytest.mark.slow
def test_pyhessian_works_on_the_second_device() -> None:
    pytest.importorskip("pyhessian")
    with simulated_cuda():
        subject = subject_on("cuda:1", "resnet_demo")
        found: Any = power_iteration(subject, 0, list(subject.parameters.values()), lambda v: v, 1, iterations=2)
    assert found.vectors.device == torch.device("cpu")


@pytest.mark.slow
def test_an_exported_program_makes_its_tensors_where_it_is_measured() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + torch.arange(3, device=x.device)

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

    module = torch.export.export(Shifted(), (torch.ones(2, 3),)).module()
    with simulated_cuda():
        moved: Any = converted(module, torch.device("cuda"))
        devices = {node.kwargs["device"] for node in moved.graph.nodes if "device" in node.kwargs}
        assert devices == {torch.device("cuda")}
        assert moved(torch.ones(2, 3, device="cuda")).device.type == "cuda"


@pytest.mark.parametrize(
    ("operation", "function"),
    [("UpsampleBilinear2D", lambda w: nn.functional.interpolate(w, scale_factor=2, mode="bilinear")),
     ("Gather", lambda w: w.gather(3, torch.zeros_like(w, dtype=torch.long))),
     ("IndexAdd", lambda w: w.index_add(3, torch.zeros(4, dtype=torch.long, device=w.device), w))],
)  # fmt: skip
def test_a_network_that_adds_in_any_order_on_a_device_is_named_once(
    operation: str, function: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def product(device: str) -> None:
        weight = torch.randn(1, 1, 4, 4).to(device).requires_grad_()
        hessian_product(lambda: function(weight.square()).square().sum(), [weight])

    _note_rounding.cache_clear()
    with simulated_cuda(), caplog.at_level(logging.INFO, logger="landscape"):
        product("cpu")
        assert not caplog.messages
        product("cuda"), product("cuda")
    assert sum(f"{operation} adds in any order on a GPU" in said for said in caplog.messages) == 1


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name", ["alternet_demo", "localvit_ti", "swin_ti", "pit_ti", "mixer_ti", "resnet18", "resnext50"]
)
def test_bundled_networks_add_in_one_order(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _note_rounding.cache_clear()
    with simulated_cuda(), caplog.at_level(logging.INFO, logger="landscape"):
        model = models.build(name, classes=3, image_size=32).to("cuda").eval()
        x, y = torch.randn(2, 3, 32, 32).to("cuda"), torch.tensor([0, 1]).to("cuda")
        hessian_product(lambda: nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    assert not caplog.messages


def test_masks_are_scored_without_a_wait_for_every_image() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(4, 6, 3), torch.randint(-1, 3, (4, 6))
    predicted = logits.argmax(dim=-1)
    both = [[((p == c) & (t == c)).sum().item() for c in range(3)] for p, t in zip(predicted, targets, strict=True)]
    either = [
        [(((p == c) | (t == c)) & (t >= 0)).sum().item() for c in range(3)]
        for p, t in zip(predicted, targets, strict=True)
    ]
    with simulated_cuda() as simulation:
        found = overlaps(logits.to("cuda"), targets.to("cuda"))
        assert not simulation.waits
        assert found.tolist() == [[a, b] for a, b in zip(both, either, strict=True)]


def test_copies_of_samples_on_a_device_are_hashed_once() -> None:
    def transfers(device: str) -> list[int]:
        images = Images(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.long), "test", 2, 2)
        data, counts = Batches(images.to(device), 2), []
        for _ in range(2):
            simulation.waits.clear()
            assert data.sha256
            data.forget_sha256()
            counts.append(sum(simulation.waits.values()) if device == "cuda" else int("_digest" in vars(data.images)))
        return counts

    with simulated_cuda() as simulation:
        assert transfers("cuda") == [2, 0]
        assert transfers("cpu") == [0, 0]
