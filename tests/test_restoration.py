"""A module of the caller is left as found by every measurement, also after an error: its training goes on as alone."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured_runs import FASTER
from torch import Tensor, nn
from torch.nn import functional as F

import landscape
from landscape import models
from landscape.checkpoints.user_code import rng_states
from landscape.probes import PROBES, probe_class
from landscape.subject.subject import Subject

FEW: dict[str, Any] = {"data": "digits", "samples": 12, "batch_size": 6}


def network() -> nn.Module:
    """With batch norm, dropout, attention, a frozen weight, gradients, a hook, and modules in both modes."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"blocks": (1, 1, 2), "msa": (0, 0, 1), "heads": (1, 1, 2), "head_dim": 4, "width": 4}
    model = nn.Sequential(models.build("alternet_demo", classes=10, image_size=16, **sizes), nn.Dropout(0.5))
    model.register_buffer("counter", torch.zeros(1))
    model.register_forward_hook(count)
    model.train()[0].conv1.eval()
    next(model.parameters()).requires_grad_(False)
    F.cross_entropy(model(torch.randn(8, 3, 16, 16)), torch.arange(8)).backward()
    return model


def count(module: nn.Module, inputs: object, outputs: object) -> None:
    module.counter += 1  # type: ignore[operator]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype).numpy().tobytes()


def state(model: nn.Module) -> dict[str, Any]:
    """All that a measurement must leave alone, to be compared with ==."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return {
        "bits": {name: (bits(tensor), tensor.dtype) for name, tensor in tensors.items()},
        "tensors": {name: (id(tensor), tensor.requires_grad) for name, tensor in tensors.items()},
        "gradients": {n: None if p.grad is None else (id(p.grad), bits(p.grad)) for n, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {n: [dict(getattr(m, hook)) for hook in hooks] for n, m in model.named_modules()},
        "generators": rng_states(),
    }


def options(probe: str, folder: Path, model: nn.Module) -> dict[str, Any]:
    smallest = {**probe_class(probe).smallest, **FASTER.get(probe, {})}
    if probe in ("surface", "lesion"):  # statistics of batch norm move too
        smallest["bn"] = "recalibrate:1"
    if probe == "trajectory":
        for epoch in range(3):
            moved = {n: t + 0.01 * epoch * torch.randn_like(t) if t.is_floating_point() else t
                     for n, t in model.state_dict().items()}  # fmt: skip
            torch.save(moved, folder / f"epoch_{epoch}.pt")
        return {**smallest, "run": str(folder)}
    if probe in ("ensemble", "barriers"):
        return {**smallest, "snapshots": "", "members": [copy.deepcopy(model)]}
    if probe == "align":
        return {**smallest, "against": copy.deepcopy(model)}
    return smallest


@pytest.mark.slow
@pytest.mark.parametrize("probe", [*PROBES, "features", "evaluate"])
def test_every_probe_leaves_the_callers_module_and_the_generators_as_found(probe: str, tmp_path: Path) -> None:
    model = network()
    given = {} if probe in ("features", "evaluate") else options(probe, tmp_path, model)
    before = state(model)
    subject = landscape.load(model, **FEW)
    assert subject.model is model
    assert state(model) == before
    if probe == "evaluate":
        landscape.evaluate(subject)
    elif probe == "features":
        landscape.features(subject, out=None)
    else:
        landscape.measure(probe, subject, out=None, **given)
    assert state(model) == before


class Failing(nn.Module):
    """Raises an error at its pass number `limit`."""

    error: BaseException = RuntimeError("out of order")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.passes, self.limit = model, 0, 10**9

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        if self.passes >= self.limit:
            raise self.error
        outputs: Tensor = self.model(inputs)
        return outputs


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["surface", "trajectory", "hessian", "variance", "lesion"])
def test_an_error_in_the_middle_of_a_pass_leaves_the_module_as_found(probe: str, tmp_path: Path) -> None:
    model = Failing(network())
    given = options(probe, tmp_path, model)
    subject = landscape.load(model, **FEW)
    before, model.passes = state(model), 0
    landscape.measure(probe, subject, out=None, **given)
    first, middle, last = 1, max(1, model.passes // 2), model.passes
    broken, pressed = RuntimeError("out of order"), KeyboardInterrupt()
    for model.limit, model.error in ((first, pressed), (middle, broken), (last, pressed)):
        model.passes = 0
        with pytest.raises(type(model.error)):
            landscape.measure(probe, dataclasses.replace(subject), out=None, **given)
        assert state(model) == before


@pytest.mark.slow
def test_an_interrupt_between_two_units_leaves_the_module_as_found() -> None:
    model = network()
    subject = landscape.load(model, **FEW)
    before = state(model)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for probe in ("surface", "lesion"):
        with pytest.raises(KeyboardInterrupt):
            landscape.measure(probe, subject, out=None, report=interrupt, **probe_class(probe).smallest)
        assert state(model) == before


def test_loading_that_fails_leaves_the_module_as_found_and_one_that_cannot_be_copied_is_refused_in_half_precision() -> (
    None
):
    model = Failing(network())
    model.limit = 1
    before = state(model)
    with pytest.raises(ValueError, match="the model fails on inputs"):
        landscape.load(model, **FEW)
    assert state(model) == before
    model = network().bfloat16()
    model.lock = __import__("threading").Lock()
    with pytest.raises(ValueError, match=r"torch.bfloat16 on cpu\) cannot be copied .*module\.float\(\)"):
        landscape.load(model, **FEW)


def trained(probe: Callable[[nn.Module, int], object]) -> bytes:
    """The weights after a few steps with momentum, dropout, batch norm and a random order, probed after each."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
                          nn.Linear(784, 10))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = torch.randn(40, 3, 16, 16), torch.randint(10, (40,))
    for step in range(4):
        rows = torch.randperm(40)[:16]
        loss = F.cross_entropy(model(inputs[rows] + random.random() * np.random.rand()), targets[rows])  # noqa: NPY002
        optimizer.zero_grad(set_to_none=False)
        probe(model, step)  # zero gradients: what adds to them would show
        loss.backward()
        probe(model, step)
        optimizer.step()
    return b"".join(bits(tensor) for tensor in model.state_dict().values())


@pytest.mark.slow
def test_training_is_bit_identical_with_and_without_probing() -> None:
    subjects: dict[int, Subject] = {}
    measured: list[float] = []

    def probe(model: nn.Module, step: int) -> None:
        if id(model) not in subjects:
            subjects[id(model)] = landscape.load(model, **FEW)
        subject = subjects[id(model)]
        found = landscape.measure("hessian", subject, out=None, quiet=True, top=1, batches=1)
        measured.append(found["loss"].item())
        landscape.measure("surface", subject, out=None, quiet=True, resolution=3)
        landscape.evaluate(subject)
        subject.objective(0)

    assert trained(probe) == trained(lambda model, step: None)
    assert (len(measured), len(set(measured))) == (8, 4)  # of the present weights, twice between two steps


@pytest.mark.slow
def test_each_measurement_is_that_of_the_present_weights_in_evaluation_mode() -> None:
    model = network()
    subject = landscape.load(model, **FEW)
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
        alone = copy.deepcopy(model).eval()
        with torch.no_grad():
            expected = [F.cross_entropy(alone(x), y).item() for x, y in subject.batches]
        assert [subject.objective(i).item() for i in range(2)] == pytest.approx(expected, rel=1e-5)
        found = landscape.measure("hessian", subject, out=None, top=1)
        assert found["loss"].values == pytest.approx(expected, rel=1e-5)
        assert landscape.evaluate(subject)["loss"] == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.slow
def test_the_context_of_the_caller_does_not_reach_a_measurement() -> None:
    subject = landscape.load(network(), **FEW)
    expected = landscape.measure("trace", subject, out=None, vectors=8)["trace"].item()
    with torch.no_grad(), torch.autocast("cpu"):
        assert landscape.measure("trace", subject, out=None, vectors=8)["trace"].item() == expected
    with torch.inference_mode():
        assert landscape.measure("trace", subject, out=None, vectors=8)["trace"].item() == expected


def test_a_module_in_half_precision_is_measured_by_a_copy_that_follows_it(caplog: pytest.LogCaptureFixture) -> None:
    model = network().bfloat16()
    before = state(model)
    subject = landscape.load(model, **FEW)
    assert "torch.bfloat16 on cpu; a copy in torch.float32 on cpu is measured" in caplog.text
    assert state(model) == before
    assert (subject.model is model, subject.dtype) == (False, torch.float32)
    for _ in range(2):
        expected = landscape.evaluate(landscape.load(copy.deepcopy(model).float(), **FEW))
        assert landscape.evaluate(subject) == expected
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
def test_a_compiled_or_replicated_module_is_measured_by_itself() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    for wrapped in (compiled, nn.DataParallel(model), nn.DataParallel(compiled)):
        assert landscape.load(wrapped, **FEW).model is model
    script = torch.jit.script(nn.Linear(3, 2))
    assert landscape.load(script, data=(torch.ones(4, 3), torch.arange(4) % 2)).model is script


@pytest.mark.slow
def test_what_was_frozen_or_changed_beside_the_weights_is_another_result(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.Linear(4, 10))
    model.register_buffer("scale", torch.ones(1), persistent=False)
    model.register_forward_hook(lambda module, inputs, outputs: outputs * module.scale)
    subject = landscape.load(model, **FEW)

    def largest() -> float:
        return float(landscape.measure("hessian", subject, out=tmp_path / "r.h5", top=1, batches=1)["largest"].item())

    def middle() -> float:
        return float(landscape.measure("surface", subject, out=tmp_path / "r.h5", resolution=3)["loss"].max().item())

    whole, high = largest(), middle()
    model[1].requires_grad_(False)
    frozen = largest()
    assert frozen < whole
    assert middle() != high
    model.scale.mul_(2)
    assert largest() > frozen


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")  # of torch, at its first forward derivative
@pytest.mark.slow
def test_values_cached_for_the_weights_do_not_outlive_an_attribute_of_the_module() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    model.factor = 1.0
    model.register_forward_hook(lambda module, inputs, outputs: outputs * module.factor)
    subject = landscape.load(model, data="digits", samples=16, batch_size=2)
    other = landscape.load(copy.deepcopy(model), data="digits", samples=16, batch_size=2)
    options: dict[str, Any] = {"out": None, "top": 1, "hvp": "traced"}
    landscape.measure("hessian", subject, **options)
    model.factor = 2.0
    other.model.factor = 2.0
    found, expected = (landscape.measure("hessian", one, **options)["largest"].values for one in (subject, other))
    assert found == pytest.approx(expected, rel=1e-4)  # before, the trace held the factor of the first measurement


class Remembering(nn.Module):
    """Makes a tensor at its first pass and keeps it, as position encodings often do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None or len(self.scale) != len(x):
            self.scale = torch.full((len(x), 1), 2.0).exp()
        return self.second(self.first(x) * self.scale)  # type: ignore[no-any-return]


def test_tensors_that_a_module_keeps_from_a_measurement_serve_its_training() -> None:
    module, data = Remembering(), (torch.randn(8, 3), torch.arange(8) % 2)
    subject = landscape.load(module, data=data, batch_size=4)
    landscape.measure("surface", subject, out=None, resolution=2, quiet=True)
    F.cross_entropy(module(data[0][:4]), data[1][:4]).backward()
    assert module.first.weight.grad is not None


class Shifted(nn.Sequential):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x + shift)  # type: ignore[no-any-return]


def test_counting_the_samples_leaves_batch_norm_as_it_is() -> None:
    module = Shifted(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    batches = [{"x": torch.randn(4, 3), "shift": torch.ones(3), "y": torch.arange(4) % 2} for _ in range(2)]
    subject = landscape.load(module, data=batches, loss=nn.CrossEntropyLoss(reduction="none"))
    before = state(module)
    assert len(dataclasses.replace(subject)) == 8
    assert state(module) == before
