"""Products from a traced graph against double backward, on mini-batches the trace has not seen."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from analytic import Branching, batches_of, convolution_net, same_state, state, tanh_net
from torch import Tensor, fx, nn

from landscape import models
from landscape.probes.hessian import Hessian
from landscape.products import hvp_backends, matrix_products
from landscape.products.hessian_product import hessian_product
from landscape.products.hvp_backends import Hvp, curvature
from landscape.products.traced_hessian import TracedHessian, trace
from landscape.products.vectors import random_unit
from landscape.results import reader
from landscape.running.run import run
from landscape.subject.subject import Subject

# The warning is of torch's forward mode.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]
SMALL: dict[str, dict[str, object]] = {  # one block of each sort: recording takes a second per residual branch
    "vit_demo": {"dim": 16, "depth": 1, "heads": 2},
    "resnet_demo": {"width": 4, "blocks": (1, 1)},
    "preresnet_demo": {"width": 4, "blocks": (1,)},
    "alternet_demo": {"width": 4, "blocks": (2,), "msa": (1,), "heads": (1,), "head_dim": 4},
}


def _demo(name: str) -> Subject:
    torch.manual_seed(0)
    model = models.build(name, classes=3, image_size=8, **SMALL[name]).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # off its initial statistics, which would hide a wrong use of them
            module.running_mean = 0.3 * torch.randn(module.num_features, dtype=torch.float64)
            module.running_var = 0.5 + torch.rand(module.num_features, dtype=torch.float64)
    return Subject(model, batches_of((3, 8, 8), (4, 4), 3), weight_decay=0.1)


def _vector(size: int) -> Tensor:
    return random_unit(size, 5, device=torch.device("cpu"), dtype=torch.float64)


def _assert_as_kept(subject: Subject, kind: Hvp, parameters: dict[str, nn.Parameter] | None = None) -> None:
    chosen = parameters or subject.parameters
    vector = _vector(sum(p.numel() for p in chosen.values()))
    traced, kept = (curvature(subject, chosen, hvp) for hvp in (kind, "double-backward"))
    for i in (1, 0, 1):
        expected, found = kept.product(i), traced.product(i)
        assert found.value == pytest.approx(expected.value, rel=1e-12)
        for _ in range(2):  # a product leaves nothing behind for the next
            torch.testing.assert_close(found(vector), expected(vector), rtol=1e-6, atol=1e-12)


def _graph(subject: Subject) -> fx.GraphModule:
    """What runs once per product, as recorded."""
    graph = hvp_backends._graph(subject, subject.parameters, False, 0, torch.contiguous_format).graphs[1]
    assert isinstance(graph, fx.GraphModule)
    return graph


@pytest.mark.parametrize("name", SMALL)
def test_a_second_mini_batch_of_the_shape_has_the_products_of_its_own_graph(name: str) -> None:
    subject = _demo(name)
    _assert_as_kept(subject, "traced")
    traced = curvature(subject, subject.parameters, "traced")._traced
    assert traced is not None
    assert (traced.layout is torch.channels_last) is (name != "vit_demo")  # where a network convolves


@pytest.mark.parametrize(("width", "layout"), [(7, torch.contiguous_format), (8, torch.channels_last)])
def test_a_layout_that_may_damage_the_memory_is_not_taken(width: int, layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 16, 1, stride=2))
    assert hvp_backends._layouts(Subject(model, batches_of((3, 8, 8), (4, 4), 3))) == (layout,)


@pytest.mark.parametrize("pattern", ["2.", "weight"])
def test_a_subset_of_the_parameters_leaves_the_others_constant(pattern: str) -> None:
    subject = tanh_net()
    _assert_as_kept(subject, "traced", {name: p for name, p in subject.parameters.items() if pattern in name})


class Tied(nn.Module):
    """One weight used twice, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) @ self.first.weight.T


def test_tied_weights_count_once_and_unused_ones_have_no_curvature() -> None:
    torch.manual_seed(1)
    subject = Subject(Tied().double().eval(), batches_of((4,), (5, 5), 4))
    assert subject.size == 16 + 4 + 2
    _assert_as_kept(subject, "traced")


def test_tracing_and_products_leave_the_model_as_found() -> None:
    subject = convolution_net()
    model = subject.model
    for p in subject.parameters.values():
        p.grad = torch.ones_like(p)
    kept, random = state(model), torch.random.get_rng_state()
    layouts = [p.stride() for p in model.parameters()]
    curvature(subject, subject.parameters, "traced").product(1)(_vector(subject.size))
    assert same_state(model, kept)
    assert [p.stride() for p in model.parameters()] == layouts
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in subject.parameters.values())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not any(module.training for module in model.modules())


def _traced(subject: Subject) -> TracedHessian:
    return trace(subject.model, lambda out, y: subject.losses(out, y), subject.parameters, *subject.batch(0))  # type: ignore[arg-type]


def test_a_mini_batch_of_another_shape_is_rejected_by_the_trace_and_uses_double_backward() -> None:
    subject = tanh_net(sizes=(6, 4))
    with pytest.raises(ValueError, match=r"traced for .*6, 4.* got .*4, 4"):
        _traced(subject).at(*subject.batch(1))
    vector = _vector(subject.size)
    found = curvature(subject, subject.parameters, "traced").product(1)(vector)
    expected = hessian_product(lambda: subject.loss(1), list(subject.parameters.values()))(vector)
    assert torch.equal(found, expected)


def test_a_model_that_cannot_be_traced_is_rejected_with_the_reason() -> None:
    with pytest.raises(ValueError, match="the model cannot be traced"):
        _traced(Subject(Branching().double(), batches_of((4,), (6,), 3)))
    subject = Subject(Refuses().double().eval(), batches_of((4,), (5, 5), 3))
    with pytest.raises(ValueError, match=r"the model cannot be traced \(AssertionError\)"):
        curvature(subject, subject.parameters, "traced")


def test_the_costly_part_of_an_activation_is_computed_once() -> None:
    """Every product only multiplies by it; the numbers are those of double backward."""
    torch.manual_seed(0)
    activations = [nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU(), nn.Softplus(), nn.Hardswish()]
    layers = [layer for activation in activations for layer in (nn.Linear(4, 4), activation)]
    subject = Subject(nn.Sequential(*layers, nn.Linear(4, 3)).double(), batches_of((4,), (4, 4), 3))
    _assert_as_kept(subject, "traced")
    assert not [node.target for node in _graph(subject).graph.nodes if "_backward" in str(node.target)]


def test_mini_batches_of_another_dtype_or_layout_have_the_products_of_double_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).eval()
    (x, _), targets = batches_of((4,), (6,), 3)[0], torch.randn(6, 3)
    x = x.float()
    batches = [(x, targets), (x.t().contiguous().t(), targets.t().contiguous().t()), (x, targets.double())]
    subject = Subject(model, batches, losses=lambda z, y: (z - y).square().mean(1))
    vector = torch.stack([_vector(subject.size).float()] * 2, dim=1)[:, 0]
    for i in range(3):
        kept, found = (
            curvature(subject, subject.parameters, kind).product(i) for kind in ("double-backward", "traced")
        )
        torch.testing.assert_close(found(vector), kept(vector), rtol=1e-4, atol=1e-6)


def test_convolutions_of_every_geometry_have_the_products_of_double_backward() -> None:
    torch.manual_seed(0)
    convolutions = [
        nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 4, 3, stride=2, padding=1),
        nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 4, 2, dilation=2), nn.Conv2d(4, 4, 2, bias=False),
    ]  # fmt: skip
    layers = [layer for convolution in convolutions for layer in (convolution, nn.Tanh())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3)).double().eval()
    subject = Subject(model, batches_of((3, 8, 8), (4, 4), 3))
    kept, traced = (
        curvature(subject, subject.parameters, hvp).product(1)(_vector(subject.size))
        for hvp in ("double-backward", "traced")
    )
    torch.testing.assert_close(traced, kept, rtol=1e-10, atol=1e-13)


def test_large_matrices_in_single_precision_have_the_products_of_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN multiplies them where it is available, including transposed ones and those with a bias."""
    monkeypatch.setattr(matrix_products, "_has_avx512", torch.backends.mkldnn.is_available)
    monkeypatch.setattr(matrix_products, "LARGE", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3))
    batches = batches_of((8,), (6, 6), 3)
    double = Subject(copy.deepcopy(model).double(), batches)
    subject = Subject(model, [(x.float(), y) for x, y in batches])
    vector = _vector(subject.size)
    expected = curvature(double, double.parameters, "double-backward").product(1)
    found = curvature(subject, subject.parameters, "traced").product(1)
    torch.testing.assert_close(found(vector.float()).double(), expected(vector), rtol=1e-4, atol=1e-6)
    assert ("landscape.matmul" in _graph(subject).code) is torch.backends.mkldnn.is_available()


class Caches(nn.Module):
    """Keeps tensors of the last size of mini-batches, as an attribute and in a container, as masks are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale: Tensor | None = None
        self.known: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None or len(self.scale) != len(x):
            self.scale = torch.full((len(x), 1), 1.5)
            self.known = {len(x): self.scale + 1}
        y: Tensor = self.linear(x)
        return y.tanh() * self.scale + self.known[len(x)]


def test_recording_leaves_nothing_on_the_model() -> None:
    subject = Subject(Caches().double().eval(), batches_of((4,), (5, 5), 3))
    inputs, _ = subject.batches[1]
    assert isinstance(inputs, Tensor)
    expected = copy.deepcopy(subject.model)(inputs)
    curvature(subject, subject.parameters, "traced")
    torch.testing.assert_close(subject.model(inputs), expected)


class Refuses(nn.Module):
    """Fails without a message where it is differentiated forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if torch.func.debug_unwrap(y) is not y:
            raise AssertionError
        return y.tanh()


class HoldsItsWeightTwice(nn.Module):
    """Uses a weight as a parameter and, for a small part of its outputs, from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.held = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.tanh() + 0.03 * nn.functional.linear(x, self.held[0]).square()


def test_a_wrong_trace_is_rejected_also_where_products_miss_a_small_part(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    subject = Subject(HoldsItsWeightTwice().double().eval(), batches_of((4,), (5, 5), 3))
    with pytest.raises(ValueError, match="would be wrong by"):
        curvature(subject, subject.parameters, "traced")
    assert curvature(subject, subject.parameters, "auto").hvp == "double-backward"
    subject = tanh_net()
    right = TracedHessian.at
    monkeypatch.setattr(TracedHessian, "at", lambda self, x, y, **_: right(self, x, y, shift=1.0))
    with pytest.raises(ValueError, match="would be wrong by"):
        curvature(subject, subject.parameters, "traced")


@pytest.mark.parametrize("together", [0, 2])
def test_products_use_weights_written_after_the_trace(
    together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hvp_backends, "mini_batches_per_product", lambda *_: together)
    subject = tanh_net() if together else convolution_net()

    def largest(hvp: Hvp) -> list[float]:
        probe = Hessian(top=1, hvp=hvp)
        group = run(probe, subject, tmp_path / "results.h5", overwrite=True).group
        return list(dict(reader.groups(tmp_path / "results.h5"))[group].largest.values)

    before = largest("traced")
    with torch.no_grad():
        for p in subject.model.parameters():
            p.mul_(1.5)
    assert largest("traced") == pytest.approx(largest("double-backward"), rel=1e-6)
    for module in subject.model.modules():  # as load_state_dict(assign=True) does
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach() / 1.5))
    assert largest("traced") == pytest.approx(before, rel=1e-6)
