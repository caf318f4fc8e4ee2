"""A resumed forward pass gives the same bits as a complete one, runs less, and restores the model."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from analytic import batches_of, same_state, state
from foreign import Encoder, Squeeze, torchvision_models
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from landscape import models
from landscape.data.structure import tensors_in
from landscape.discovery.graph import record
from landscape.discovery.layer import Tap
from landscape.layers import partial_forward
from landscape.layers.partial_forward import Cache, ResumePoint, advance, map_tensors, resume_point, resumed
from landscape.layers.unit_removal import Group
from landscape.probes import lesion, sensitivity
from landscape.probes.lesion import Lesion
from landscape.probes.sensitivity import Sensitivity
from landscape.subject.subject import Subject


def _subject(model: nn.Module, size: int = 16) -> Subject:
    return Subject(model.double().eval(), batches_of((3, size, size), (3, 2), 3))


def _in_place() -> nn.Module:
    theirs = torchvision_models()
    return theirs.ResNet(theirs.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)


SMALL: dict[str, Any] = {"classes": 3, "image_size": 16}
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "vit": lambda: models.build("vit_demo", **SMALL),
    "resnet": lambda: models.build("resnet_demo", **SMALL),
    "bottleneck": lambda: models.build("preresnet50", **SMALL, blocks=(2, 2), width=8),
    "alternet": lambda: models.build("alternet_demo", **SMALL),
    "in place": _in_place,
    "squeeze": Squeeze,
    "encoder": lambda: Encoder(grid=(4, 4)),
    "encoder, norm last": lambda: Encoder(grid=(4, 4), norm_first=False),
}


def _network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]()


def _starts(subject: Subject, groups: Sequence[Group]) -> list[ResumePoint]:
    """Complete passes for all groups."""
    return [ResumePoint()] * len(groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_unit_is_resumed_with_the_bits_of_complete_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, probe = _subject(_network(name)), Lesion()
    units = list(probe.plan(subject).units())
    short = list(probe.sweep(subject, units))
    assert ResumePoint() not in lesion.resume_points(subject, probe._groups(subject))
    monkeypatch.setattr(lesion, "resume_points", _starts)
    long = _subject(_network(name))
    assert list(probe.sweep(long, units)) == short


def _flops(model: nn.Module, images: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet", "bottleneck", "alternet"])
def test_a_study_of_all_units_takes_at_most_a_pass_for_each_and_late_units_a_fraction(name: str) -> None:
    subject, probe = _subject(_network(name)), Lesion()
    inputs = subject.batch(0)[0]
    units = [unit for unit in probe.plan(subject).units() if unit.index[0] == 0]
    lesion.resume_points(subject, probe._groups(subject))
    one = _flops(subject.model, inputs)
    with FlopCounterMode(display=False) as counter:
        list(probe.sweep(subject, units))
    assert counter.get_total_flops() <= one * len(units)  # and one more for the intact network
    assert counter.get_total_flops() < one * (0.5 * len(units) + 1.2)
    (last,) = probe._groups(subject)[-1].units
    taps = (*last.zeroed, *last.bypassed)
    point = resume_point(record(subject.model, inputs), taps, last.bypassed)
    cache = advance(subject.model, inputs, point, {})
    with resumed(subject.model, cache):
        assert _flops(subject.model, inputs) < 0.3 * one


def test_a_later_resume_point_is_reached_from_an_earlier_one() -> None:
    model, images = _network("vit").double().eval(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    flow = record(model, images)
    early, late = (resume_point(flow, [Tap(f"blocks.{i}.mlp", "output")], ()) for i in (1, 4))
    assert early.operations < late.operations
    first = advance(model, images, early, {})
    with FlopCounterMode(display=False) as counter:
        second = advance(model, images, late, first)
    assert counter.get_total_flops() < 0.7 * _flops(model, images)  # blocks 2 to 4 of five
    alone = advance(model, images, late, {})
    assert second.keys() == alone.keys() == late.skipped
    for tap in late.live:
        assert torch.equal(second[tap], alone[tap])
    assert late.live < late.skipped  # of most calls the shape is all that is kept


class Sideways(nn.Module):
    """The second half reads an attribute that the first half writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.third, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.first.register_forward_hook(lambda module, args, output: setattr(module, "hidden", 2 * output))

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        x = self.relu1(x + self.second(x))
        x = self.relu2(x + self.third(x))
        return self.head((x * self.first.hidden).mean((2, 3)))


class Shared(nn.Module):
    """One module called three times, its input and the sums changed in place in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for _ in range(3):
            x = self.relu(x.mul_(0.5) + self.block(x))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("kind", [Sideways, Shared])
def test_networks_with_hidden_state_or_repeated_modules_get_the_right_numbers(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def studied() -> list[Any]:
        torch.manual_seed(0)
        subject, probe = _subject(kind(), 8), Lesion()
        return list(probe.sweep(subject, list(probe.plan(subject).units())))

    short, units = studied(), 2 if kind is Sideways else 3
    assert len(short) == 2 * units
    monkeypatch.setattr(lesion, "resume_points", _starts)
    assert studied() == short


class Gate(nn.Conv2d):
    """Keeps a number of its output, which no recording of tensors sees."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.kept = output[..., 0].mean().item()
        return output


class Remembering(nn.Module):
    """Multiplies by what the gate keeps, which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = Gate(3, 4, 1), nn.Linear(4, 3)
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.gate(images) + self.first(images) * self.gate.kept
        x = (x + self.second(x)) * self.gate.kept
        self.gate(images)
        return self.head(x.mean((2, 3)))


def test_no_pass_resumes_after_a_module_that_keeps_a_number_although_it_runs_again_later() -> None:
    torch.manual_seed(0)
    subject = _subject(Remembering(), 8)
    assert _points(subject, Sensitivity()) == [ResumePoint()] * 4


@pytest.mark.slow
def test_verification_takes_a_pass_and_the_rest_of_one_per_unit_and_happens_once() -> None:
    subject, probe = _subject(_network("vit")), Sensitivity()
    one, units = _flops(subject.model, subject.example()[0]), probe._units(subject)
    with FlopCounterMode(display=False) as counter:
        assert ResumePoint() not in _points(subject, probe)[1:]
    assert counter.get_total_flops() < one * (1.5 * len(units) + 4)  # the paths of one recorded pass and another's
    with FlopCounterMode(display=False) as again:
        assert ResumePoint() not in _points(subject, probe)[1:]
    assert again.get_total_flops() == 0


@pytest.mark.slow
def test_what_is_verified_at_a_time_is_limited_without_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    points = _points(_subject(_network("vit")), Sensitivity())
    made: list[weakref.ref[Tensor]] = []
    most = []  # bytes that all caches together hold

    def advanced(*given: Any) -> Cache:
        cache = advance(*given)
        made.extend(weakref.ref(tensor) for tensor in tensors_in(list(cache.values())) if not tensor.is_meta)
        alive = {id(t): t.numel() * t.element_size() for t in (ref() for ref in made) if t is not None}
        most[-1] = max(most[-1], sum(alive.values()))
        return cache

    monkeypatch.setattr(partial_forward, "advance", advanced)
    for limit in (2**27, 1_000_000, 100):  # all points at once, some, one at a time
        monkeypatch.setattr(partial_forward, "MOST_COMPARED", limit)
        made.clear()
        most.append(0)
        assert _points(_subject(_network("vit")), Sensitivity()) == points
    assert most[2] < most[1] < 1_000_000 + most[2] < most[0] / 1.5


def _points(subject: Subject, probe: Sensitivity) -> list[ResumePoint]:
    return sensitivity.resume_points(subject, probe._units(subject))


def test_the_model_is_restored_also_after_an_exception() -> None:
    model = _network("vit").double().eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    before, whole = state(model), model(images)
    model.blocks[0].forward = model.blocks[0].forward  # type: ignore[union-attr, method-assign, operator, index]
    point = resume_point(record(model, images), [Tap("blocks.3.mlp", "output")], ())
    cache = advance(model, images, point, {})
    with resumed(model, cache):
        assert torch.equal(model(images), whole)
    with pytest.raises(ValueError, match="built for"), resumed(model, cache):
        model(images[..., :8])
    assert same_state(model, before)
    assert torch.equal(model(images), whole)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["blocks.0"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_makes_other_calls_is_an_error() -> None:
    model = _network("vit").double().eval()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    point = ResumePoint(1, frozenset({Tap("head", "output", 3)}), frozenset())
    with pytest.raises(LookupError, match="does not make the module calls that were recorded"):
        advance(model, images, point, {})
    assert not any(module._forward_hooks for module in model.modules())


def test_outputs_of_any_shape_are_copied() -> None:
    x = torch.zeros(2)
    copied = map_tensors({"a": (x, [x, None]), "b": 3}, torch.clone)
    assert copied["b"] == 3
    assert copied["a"][1][1] is None
    copied["a"][0].add_(1)
    assert x.tolist() == [0, 0]
    assert copied["a"][1][0].tolist() == [0, 0]
