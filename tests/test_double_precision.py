"""Forward passes in double precision: a copy that follows the weights of its model, and convolutions as products."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from analytic import run_probe
from torch import Tensor, nn

from landscape.probes.hessian import Hessian
from landscape.products import double_precision, kinks
from landscape.products.double_precision import DoubleCopy, convolution, double_copy, double_of
from landscape.products.kinks import activation_pattern
from landscape.subject.subject import Subject


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.ReLU()
    ).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("size", "kernel", "options"),
    [
        ((7, 9), (3, 3), {}), ((7, 9), (3, 3), {"padding": 1}), ((7, 9), (3, 3), {"stride": 2, "padding": 1}),
        ((8, 8), (3, 3), {"stride": (2, 3), "padding": (1, 2)}), ((8, 6), (1, 5), {"padding": (0, 2), "stride": [1]}),
        ((8, 6), (4, 2), {"stride": (3, 1)}), ((3, 3), (3, 3), {}), ((7, 7), (1, 1), {"stride": 2}),
        ((7, 7), (3, 3), {"dilation": 2}), ((7, 7), (3, 3), {"groups": 2}), ((7, 7), (3, 3), {"padding": "same"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_are_those_of_torch(
    layout: torch.memory_format, size: tuple[int, int], kernel: tuple[int, int], options: dict[str, Any], bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, *size, generator=generator, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(6, 4 // options.get("groups", 1), *kernel, generator=generator, dtype=torch.float64)
    offset = torch.randn(6, generator=generator, dtype=torch.float64) if bias else None
    expected = F.conv2d(x, weight, offset, **options)
    torch.testing.assert_close(convolution(input=x, weight=weight, bias=offset, **options), expected)


def test_unusual_inputs_of_convolutions_are_left_to_torch() -> None:
    weight = torch.ones(2, 3, 3, 3, dtype=torch.float64)
    assert convolution(torch.ones(3, 5, 5, dtype=torch.float64), weight).shape == (2, 3, 3)
    assert convolution(torch.ones(0, 3, 5, 5, dtype=torch.float64), weight).shape == (0, 2, 3, 3)
    with pytest.raises(RuntimeError, match=r"[Kk]ernel size"):
        convolution(torch.ones(1, 3, 2, 2, dtype=torch.float64), weight)
    with pytest.raises(RuntimeError, match="channels"):
        convolution(torch.ones(1, 2, 5, 5, dtype=torch.float64), weight)
    images = torch.ones(2, 1, 3, 5, 5, dtype=torch.float64)
    assert torch.vmap(convolution, in_dims=(0, None))(images, weight).shape == (2, 1, 2, 3, 3)


def test_the_pattern_is_that_of_convolutions_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _net(), torch.randn(6, 3, 9, 9)
    ours = activation_pattern(model, x)
    monkeypatch.setattr(kinks, "CONVOLUTIONS", frozenset())
    assert [part.unique().tolist() for part in ours] == [[-1.0, 1.0]] * 2
    for found, expected in zip(ours, activation_pattern(model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_copy_follows_the_weights_and_buffers_of_its_model() -> None:
    model, x = _net(), torch.randn(6, 3, 9, 9)
    double = DoubleCopy(model)
    before = activation_pattern(model, x, double=double)
    model[0].weight.data.neg_()  # not counted by autograd
    model[1].running_mean.add_(0.1)
    model[3].weight = nn.Parameter(model[3].weight.detach().flip(0))
    after = activation_pattern(model, x, double=double)
    assert not torch.equal(before[0], after[0])
    for found, expected in zip(after, activation_pattern(model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_a_copy_of_a_program_is_in_double_precision_too() -> None:
    model, x = nn.Sequential(torch.jit.script(_net()), nn.Flatten()), torch.randn(6, 3, 9, 9)  # type: ignore[no-untyped-call]
    copied = double_copy(model)
    assert all(w.is_leaf and not w.requires_grad and w.dtype is torch.double for w in copied.parameters())
    torch.testing.assert_close(copied(x.double()), model(x).double())
    assert all(w.requires_grad and w.dtype is torch.float for w in model.parameters())


def test_a_copy_holds_no_weights_between_passes_and_forgets_what_a_pass_stores() -> None:
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.passes, self.last = nn.Linear(3, 3), 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            self.last = self.layer(x)
            return F.relu(self.last) * self.passes

    model = Storing()
    double = DoubleCopy(model)
    for _ in range(2):
        activation_pattern(model, torch.ones(2, 3), double=double)
        assert double._copy is not None
        assert double._copy.passes == 0
        assert double._copy.last is None
        assert all(parameter.numel() == 0 for parameter in double._copy.parameters())
    assert model.passes == 0


def test_a_model_with_tensors_beside_its_weights_is_copied_at_each_pass() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    model.scale = torch.ones(2)
    double = DoubleCopy(model)
    with double.current() as first:
        assert torch.equal(first.scale, torch.ones(2))
    model.scale = -torch.ones(2)
    with double.current() as second:
        assert torch.equal(second.scale, -torch.ones(2))
    assert double._copy is None


def test_threads_share_a_copy() -> None:
    torch.manual_seed(0)
    model, inputs = _net(), [torch.randn(4, 3, 9, 9) for _ in range(24)]
    double = DoubleCopy(model)
    expected = [activation_pattern(model, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: activation_pattern(model, x, double=double), inputs))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_modules_are_copied_once_for_all_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[nn.Module] = []
    original = double_precision.double_copy

    def counted(model: nn.Module) -> nn.Module:
        copies.append(model)
        return original(model)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    batches = [(torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])) for _ in range(5)]
    subject = Subject(model, batches)
    assert double_of(subject) is double_of(subject)
    monkeypatch.setattr(double_precision, "double_copy", counted)
    run_probe(Hessian(top=1, hvp="double-backward"), subject)
    assert len(copies) <= 2  # the first says whether the pattern can be fixed
