"""Memory of traced Hessian products: equal operations are merged, cheap kept tensors are computed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from analytic import attention_net, batches_of
from torch import Tensor, fx, nn

from landscape.curvature import rematerialisation
from landscape.curvature.kinks import activation_pattern
from landscape.curvature.rematerialisation import merge_equal
from landscape.curvature.traced_hessian import TracedHessian, trace
from landscape.curvature.vectors import random_unit
from landscape.subject.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's forward mode


def _relu_net() -> Subject:
    """Batch norm off its initial statistics, and kinks."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_mean, norm.running_var = 0.3 * torch.randn(4), 0.5 + torch.rand(4)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    return Subject(model.double().eval(), batches_of((3, 8, 8), (4, 4), 3))


def _traced(subject: Subject, threshold: int, monkeypatch: pytest.MonkeyPatch) -> tuple[TracedHessian, list[Tensor]]:
    monkeypatch.setattr(rematerialisation, "LARGE", threshold)
    inputs, targets = subject.batch(0)
    assert isinstance(inputs, Tensor)
    assert isinstance(targets, Tensor)
    pattern = activation_pattern(subject.model, inputs, subject.forward)
    return trace(subject.model, subject.losses, subject.parameters, inputs, targets, pattern=pattern), pattern


def _kept(traced: TracedHessian, subject: Subject, pattern: list[Tensor]) -> int:
    """Bytes that are kept between products beside inputs and weights."""
    inputs, targets = subject.batch(0)
    given = traced._given(traced._weights(), inputs, targets, *pattern)  # type: ignore[arg-type]
    with torch.no_grad():
        memories = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in traced._once(*given)[1:]}
    return sum(size for at, size in memories.items() if at not in {t.untyped_storage().data_ptr() for t in given})


@pytest.mark.slow
@pytest.mark.parametrize("make", [_relu_net, attention_net])
def test_recomputing_keeps_less_and_changes_no_product(
    make: Callable[[], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = make()
    (plain, pattern), (saving, _) = (_traced(subject, threshold, monkeypatch) for threshold in (2**60, 0))
    vector = random_unit(subject.size, 5, device=torch.device("cpu"), dtype=torch.float64)
    expected, found = (t.at(*subject.batch(0), pattern=pattern)(vector) for t in (plain, saving))  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    assert _kept(saving, subject, pattern) < 0.95 * _kept(plain, subject, pattern)


def test_small_mini_batches_keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing costs time for each product; below the threshold the graph is the one without it."""
    subject = _relu_net()
    default = rematerialisation.LARGE
    assert _traced(subject, default, monkeypatch)[0].code == _traced(subject, 2**60, monkeypatch)[0].code
    assert _traced(subject, default, monkeypatch)[0].code != _traced(subject, 0, monkeypatch)[0].code


def test_equal_operations_are_merged_unless_something_writes_to_them() -> None:
    aten = torch.ops.aten
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second, other = (graph.call_function(aten.mul.Scalar, (x, by)) for by in (2, 2, 2.0))
    written, untouched = (graph.call_function(aten.mul.Scalar, (x, 3)) for _ in range(2))
    added = graph.call_function(aten.add_.Scalar, (written, 1))
    noise = [graph.call_function(aten.rand_like.default, (x,)) for _ in range(2)]
    graph.output([first, second, other, added, untouched, *noise])
    module = fx.GraphModule(nn.Module(), graph)
    expected = module(torch.ones(3))[:5]
    assert merge_equal(module) == 1
    torch.testing.assert_close(module(torch.ones(3))[:5], expected)
