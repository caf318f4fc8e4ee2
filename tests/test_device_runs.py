"""What a run on an accelerator promises beside its numbers: resuming, memory, determinism, precision and training."""

from __future__ import annotations

import gc
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from devices import KINDS, SIZES, differences, machine, subject_on
from torch import Tensor, nn
from torch.nn import functional as F

import landscape
from landscape.data import memory
from landscape.data.recipes import RECIPES
from landscape.layers.fourier import signs
from landscape.products import memory_forecast
from landscape.products.vectors import random_unit
from landscape.running.local_processes import on_the_host
from landscape.subject.precision import exact_arithmetic
from landscape.training.train import train

pytestmark = [pytest.mark.campaign, pytest.mark.parametrize("kind", KINDS)]
OPTIONS: dict[str, dict[str, Any]] = {  # the backend of products is given: which one is fastest depends on the load
    "line": {"resolution": 3},
    "surface": {"resolution": "3"},
    "trace": {"vectors": 4, "hvp": "double-backward"},
    "hessian": {"top": 1, "batches": 1, "max_products": 4},
}


class Stopped(Exception):
    """Raised by a progress report, as Ctrl-C would be."""


def stop(finished: int, _: int) -> None:
    if finished:
        raise Stopped


@pytest.mark.parametrize("probe", ["similarity", "line", "trace"])
@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_file_begun_on_one_device_is_finished_on_the_other(
    probe: str, first: str, second: str, kind: str, tmp_path: Path
) -> None:
    options = OPTIONS.get(probe, {})
    whole = landscape.measure(probe, subject_on("cpu"), out=None, quiet=True, **options)
    with machine(kind):
        given = {"out": tmp_path / "r.h5", "quiet": True, **options}
        with pytest.raises(Stopped):
            landscape.measure(probe, subject_on(first), report=stop, **given)
        reported: list[int] = []
        found = landscape.measure(probe, subject_on(second), report=lambda k, n: reported.append(k), **given)
    assert reported[0] == 2  # the first unit was not measured again
    assert max(differences(whole, found).values()) <= (0.0 if kind == "simulated" else 1e-3)


def test_exhausted_memory_divides_the_mini_batch_and_changes_nothing(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pass whose memory is not known: otherwise the mini-batch is divided before the memory is exhausted.
    monkeypatch.setattr(memory_forecast, "_saved_by_one", lambda subject: 0)
    samples, most = (64, 2**26) if kind == "simulated" else (1024, 2**35)
    given: dict[str, Any] = {"samples": samples, "batch_size": samples, "split": "train", "model": "resnet_demo"}
    options: dict[str, Any] = {"vectors": 4, "hvp": "double-backward", "out": None, "quiet": True}
    expected = landscape.measure("trace", subject_on("cpu", **given), **options)["trace"].item()
    with machine(kind), caplog.at_level(logging.WARNING):
        subject = subject_on("cuda", **given)
        try:
            while "out of memory: continuing" not in caplog.text:
                torch.cuda.empty_cache()
                room = torch.cuda.memory_allocated() + most
                torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
                found = landscape.measure("trace", subject, **options)["trace"].item()
                torch.cuda.set_per_process_memory_fraction(1.0)
                most = int(most * 0.7)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    # Micro-batches sum in another order; the vectors are the same.
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("probe", ["lesion", "surface", "hessian"])
def test_device_memory_is_given_back(probe: str, kind: str) -> None:
    with machine(kind):
        before = allocated(kind)
        subject = subject_on("cuda")
        landscape.measure(probe, subject, out=None, quiet=True, **OPTIONS.get(probe, {}))
        assert torch.cuda.memory_allocated() > before
        del subject
        assert allocated(kind) == before


def allocated(kind: str) -> int:
    """Bytes on the device without what nothing refers to, and without the workspaces that cuBLAS keeps per stream."""
    gc.collect()
    if kind == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("probe", ["trace", "surface", "lesion", "variance"])
def test_two_runs_on_a_device_are_equal_bit_for_bit(probe: str, kind: str) -> None:
    with machine(kind):
        one, other = (
            landscape.measure(probe, subject_on("cuda", "resnet_demo"), out=None, quiet=True, **OPTIONS.get(probe, {}))
            for _ in range(2)
        )
    assert set(differences(one, other).values()) == {0.0}


def test_random_vectors_and_masks_are_those_of_the_cpu(kind: str) -> None:
    given = {"dtype": torch.float32}
    expected = random_unit(1000, 3, device=torch.device("cpu"), **given)
    plain = subject_on("cpu")
    with machine(kind):
        on_device = random_unit(1000, 3, device=torch.device("cuda"), **given)
        assert on_device.device.type == "cuda"
        torch.testing.assert_close(on_device.cpu(), expected, rtol=1e-6, atol=0)
        assert torch.equal(signs((3, 8, 8), 5).to("cuda").cpu(), signs((3, 8, 8), 5))
        subject = subject_on("cuda")
        for i in range(3):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(subject.batches[i], plain.batches[i], strict=True))


def test_samples_to_fit_on_may_stay_on_the_host_where_the_scored_ones_do_not(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"train_samples": 32, "out": None, "quiet": True}
    with machine(kind):
        on_device, partly = (subject_on("cuda", split="test") for _ in range(2))
        expected = landscape.measure("probe-linear", on_device, **options)
        assert partly.images is not None
        scored = partly.images.inputs.nbytes
        monkeypatch.setattr(memory, "stays_on_host", lambda name, size, device: bool(size > scored))
        found = landscape.measure("probe-linear", partly, **options)
    assert max(differences(expected, found).values()) == 0.0


def test_the_second_device_is_used_alone(kind: str) -> None:
    with machine(kind):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        gc.collect()
        before = torch.cuda.memory_allocated(0)
        subject = subject_on("cuda:1")
        found = landscape.measure("variance", subject, out=None, quiet=True)
        assert subject.device == torch.device("cuda:1")
        assert torch.cuda.memory_allocated(0) == before
    assert differences(landscape.measure("variance", subject_on("cpu"), out=None, quiet=True), found)


def test_tf32_never_enters_exact_arithmetic(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 64, 8, 8, generator=generator), torch.randn(64, 64, 3, 3, generator=generator)
    with machine(kind), exact_arithmetic():  # restores the settings
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("medium")
        x, w = x.to("cuda"), w.to("cuda")
        with exact_arithmetic():
            maps, product = F.conv2d(x, w), x.flatten(1) @ x.flatten(1).T
        exact = F.conv2d(x.double(), w.double())
        # TF32 keeps 10 bits and would be wrong by 1e-4 or more.
        assert (maps - exact).norm() <= 2e-6 * exact.norm()
        exact = x.flatten(1).double() @ x.flatten(1).double().T
        assert (product - exact).norm() <= 2e-6 * exact.norm()


@pytest.mark.slow
def test_tf32_is_left_to_the_surface_that_asks_for_it_and_its_deviation_is_told(kind: str) -> None:
    settings: dict[str, Any] = {"out": None, "quiet": True, "resolution": "5"}
    exact = landscape.measure("surface", subject_on("cpu"), **settings)
    with machine(kind):
        found = landscape.measure("surface", subject_on("cuda"), precision="tf32", **settings)
        again = landscape.measure("surface", subject_on("cuda"), **settings)
    assert 0 < found.deviation_max < 0.5, "10 bits of the mantissa, against the spread of samples"
    expected = np.abs(found.loss - exact.loss) / exact.loss_se
    np.testing.assert_allclose(found.deviates, expected, rtol=0.05, atol=1e-4)
    np.testing.assert_allclose(again.loss, exact.loss, rtol=1e-6)
    with pytest.raises(ValueError, match="--precision tf32 is of GPUs, and the device is cpu; give fp32 or bf16"):
        landscape.measure("surface", subject_on("cpu"), precision="tf32", **settings)


def test_evaluate_and_features(kind: str) -> None:
    expected = landscape.evaluate(subject_on("cpu"))
    one = landscape.features(subject_on("cpu"), out=None, quiet=True)
    with machine(kind) as simulation:
        subject = subject_on("cuda")
        assert landscape.evaluate(subject) == pytest.approx(expected, rel=1e-4, nan_ok=True)
        if simulation is not None:
            simulation.waits.clear()
        other = landscape.features(subject, out=None, quiet=True)
    assert one.keys() == other.keys()
    for name in one:
        # A CPU takes logarithms and spreads of single precision by other code.
        assert max(differences(one[name], other[name]).values()) <= 1e-4


def test_training_and_its_trajectory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which torch delivers on
    recipe = {**vars(RECIPES["cifar-vit"]), "epochs": 2, "warmup": 1.0, "precision": "fp32", "batch_size": 32}
    given: dict[str, Any] = {"recipe": type(RECIPES["cifar-vit"])(**recipe), "fraction": 0.1, "snapshots": 1}
    arguments = {**SIZES["vit_demo"], "drop_path": 0.0}  # which would be drawn on the device
    finals = {}
    with machine(kind) as simulation:
        for device in ("cpu", "cuda"):
            finals[device] = train(
                "vit_demo", "digits", out=tmp_path / device, device=device, model_args=arguments, **given
            )
        if simulation is not None:
            in_updates = {key: n for key, n in simulation.waits.items() if "updates.py" in key[0]}
            assert in_updates == {}  # an update never waits; losses are read once per epoch
            assert not simulation.draws
        path = {"samples": 8, "batch_size": 4, "data": "digits", "out": None, "quiet": True}
        found = {
            device: landscape.measure("trajectory", finals["cpu"], device=device, **path) for device in ("cpu", "cuda")
        }
    weights = {device: torch.load(final, weights_only=True)["state_dict"] for device, final in finals.items()}
    for name, weight in weights["cpu"].items():
        tolerance = 0.0 if kind == "simulated" else 1e-2  # Adam divides by gradients that are nearly zero
        torch.testing.assert_close(weights["cuda"][name].cpu(), weight, rtol=tolerance, atol=tolerance)
    apart = differences(found["cpu"], found["cuda"])
    if kind == "cuda":  # of two losses, which are compared
        apart = {name: d for name, d in apart.items() if "excess" not in name}
    assert max(apart.values()) <= (0.0 if kind == "simulated" else 1e-4)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_monitor_on_a_device_has_the_numbers_of_the_cpu(recurrent: bool, kind: str, tmp_path: Path) -> None:
    def rows(device: str) -> xr.Dataset:
        torch.manual_seed(0)
        model: nn.Module = (
            Last(nn.LSTM(6, 3, batch_first=True)) if recurrent else nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        )
        model.to(device)
        x, y = torch.randn(8, 2, 6).to(device), (torch.arange(8) % 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with landscape.Monitor(
            model, F.cross_entropy, (x, y), every=1, out=tmp_path / f"{device}.h5", top=1, noise=4, tol=1e-6,
            optimizer=optimizer, overhead=math.inf,
        ) as monitor:  # fmt: skip
            for _ in range(2):
                optimizer.zero_grad()
                with exact_arithmetic():  # the training's own arithmetic is the caller's
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                monitor.step()
            return monitor.data()

    with machine(kind):
        found = differences(rows("cpu"), rows("cuda"))
    compared = ("loss", "gradient_norm", "eigenvalue", "noise_scale", "distance", "learning_rate")
    assert {name: found[name] for name in compared if found[name] > 1e-4} == {}


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.layer(x)[0][:, -1]
        return last


def test_while_workers_measure_nothing_of_their_subject_is_on_the_device(kind: str) -> None:
    with machine(kind):
        gc.collect()
        before = torch.cuda.memory_allocated()
        subject = subject_on("cuda")
        weights, inputs = [p.detach().cpu() for p in subject.model.parameters()], subject.batch(0)[0].cpu()
        assert torch.cuda.memory_allocated() > before
        with on_the_host(subject):
            assert torch.cuda.memory_allocated() == before
        assert {p.device.type for p in subject.model.parameters()} == {"cuda"}
        assert all(map(torch.equal, weights, (p.detach().cpu() for p in subject.model.parameters())))
        assert torch.equal(inputs, subject.batch(0)[0].cpu())


@pytest.mark.parametrize("probe", ["trace", "density"])
def test_a_probe_that_runs_out_of_memory_at_its_peak_goes_on_in_parts(
    probe: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"density": {"vectors": 1, "steps": 3, "hvp": "double-backward"}, **OPTIONS}[probe]

    def measured(share: float) -> xr.Dataset:
        nonlocal peak
        with machine(kind):
            samples, model = (24, "vit_demo") if kind == "simulated" else (1024, "resnet_demo")  # blocks are of 20 MiB
            subject = subject_on("cuda", model, samples=samples, batch_size=samples // 2)
            before = allocated(kind)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                if share < 1:
                    room = (before + share * peak) / torch.cuda.mem_get_info()[1]
                    torch.cuda.set_per_process_memory_fraction(room)
                found = landscape.measure(probe, subject, out=None, quiet=True, **options)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            peak = torch.cuda.max_memory_allocated() - before
            return found

    peak = 0
    with caplog.at_level(logging.DEBUG, logger="landscape"):
        found = differences(measured(1.0), measured(0.9))
    assert "out of memory: continuing" in caplog.text
    assert max(found.values()) <= 1e-5
