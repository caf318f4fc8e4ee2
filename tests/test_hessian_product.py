"""Hessian products against dense Hessians, and what has no second derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from analytic import NETWORKS, convolution_net, dense_hessian, quadratic, same_state, state, symmetric, tanh_net
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from landscape.api import measure
from landscape.probes import probe_class
from landscape.products.hessian_product import HessianProduct, hessian_product
from landscape.products.vectors import random_unit
from landscape.subject.loading.load import load
from landscape.subject.subject import Subject

pytestmark = pytest.mark.slow


def _product(subject: Subject, i: int = 0, **options: Any) -> HessianProduct:
    return hessian_product(partial(subject.loss, i), list(subject.parameters.values()), **options)


def _vectors(count: int, n: int) -> list[Tensor]:
    return [random_unit(n, seed, device=torch.device("cpu"), dtype=torch.float64) for seed in range(count)]


@pytest.mark.parametrize("network", NETWORKS)
def test_products_are_those_of_the_dense_hessian_of_each_mini_batch(network: str) -> None:
    subject = NETWORKS[network]()
    for i in range(2):
        matrix, product = dense_hessian(subject, i), _product(subject, i)
        for v in _vectors(3, subject.size):
            torch.testing.assert_close(product(v), matrix @ v, rtol=1e-9, atol=1e-12)


def test_value_and_gradient_come_with_the_product() -> None:
    matrix = symmetric([3.0, -1.0, 2.0])
    subject = quadratic(matrix, weight=torch.tensor([[1.0, 2.0, 3.0]]), slope=torch.tensor([0.5, 0.0, -1.0]))
    w, slope = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([0.5, 0.0, -1.0]).double()
    product = _product(subject, gradient=True)
    assert product.value == pytest.approx((w @ matrix @ w / 2 + slope @ w).item())
    torch.testing.assert_close(product.gradient, matrix @ w + slope)


def test_the_union_of_two_mini_batches_has_the_weighted_sum_of_their_hessians() -> None:
    parts = tanh_net(sizes=(16, 4))
    inputs, targets = (torch.cat(both) for both in zip(*parts.batches, strict=True))
    whole = Subject(parts.model, [(inputs, targets)])
    (v,) = _vectors(1, parts.size)
    expected = 0.8 * _product(parts, 0)(v) + 0.2 * _product(parts, 1)(v)
    torch.testing.assert_close(_product(whole)(v), expected, rtol=1e-10, atol=1e-14)


def test_curvature_of_unused_and_linear_weights_is_zero_and_frozen_ones_are_left_out() -> None:
    subject = tanh_net()
    n = subject.size
    subject.model.register_parameter("unused", nn.Parameter(torch.ones(5, dtype=torch.float64)))
    subject.model.register_parameter("frozen", nn.Parameter(torch.ones(7, dtype=torch.float64), requires_grad=False))
    with_unused = Subject(subject.model, subject.batches)
    v = torch.ones(n + 5, dtype=torch.float64)
    order = [name != "unused" for name, p in with_unused.parameters.items() for _ in range(p.numel())]
    kept = torch.tensor(order)
    found = _product(with_unused)(v)
    assert with_unused.size == n + 5
    assert not found[~kept].any()
    torch.testing.assert_close(found[kept], _product(tanh_net())(v[:n]))
    linear = quadratic(torch.zeros(4, 4).double(), slope=torch.arange(4.0))
    assert not _product(linear)(torch.ones(4).double()).any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_the_model_and_the_process_are_left_unchanged(mode: Callable[[], torch.no_grad | torch.enable_grad]) -> None:
    subject = convolution_net()
    first = next(subject.model.parameters())
    first.grad = torch.full_like(first, 3.0)
    kept, training = state(subject.model), [module.training for module in subject.model.modules()]
    random, attention = torch.random.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    with mode():
        _product(subject)(_vectors(1, subject.size)[0])
    assert (first.grad == 3.0).all()
    assert all(p.grad is None for p in list(subject.model.parameters())[1:])
    assert same_state(subject.model, kept)
    assert [module.training for module in subject.model.modules()] == training
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.backends.mha.get_fastpath_enabled() == attention


def test_an_operation_without_a_second_derivative_is_named() -> None:
    q = nn.Parameter(torch.randn(1, 1, 4, 8))

    def fused() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return nn.functional.scaled_dot_product_attention(q, q, q).square().sum()

    with pytest.raises(ValueError, match=r"cannot be differentiated twice \(.*flash_attention"):
        hessian_product(fused, [q])(torch.ones(32))


def test_fused_attention_and_the_fused_encoder_layer_are_differentiated_too() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).double().eval()
    inputs = torch.randn(3, 4, 8, dtype=torch.float64)
    parameters = list(layer.parameters())
    product = hessian_product(lambda: layer(inputs).pow(3).mean(), parameters)
    u, v = _vectors(2, sum(p.numel() for p in parameters))
    assert torch.dot(u, product(v)).item() == pytest.approx(torch.dot(v, product(u)).item(), rel=1e-9)
    assert product(v).norm() > 1e-3


class Bagged(nn.Module):
    """A classifier of mean embeddings, looked up in one of several ways."""

    def __init__(self, way: str, sparse: bool = False) -> None:
        super().__init__()
        self.way = way
        bag = nn.EmbeddingBag(7, 4, mode="mean", sparse=sparse)
        self.table = bag if way == "bag" else nn.Embedding(7, 4, sparse=sparse)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.way == "function":
            found = nn.functional.embedding(tokens, self.table.weight, sparse=self.table.sparse).mean(dim=1)
        else:
            found = self.table(tokens) if self.way == "bag" else self.table(tokens).mean(dim=1)
        if self.way == "distance":
            found = torch.cdist(found, self.head.weight, p=1) @ torch.ones(3, 4, dtype=found.dtype)
        logits: Tensor = self.head(found)
        return logits


def bagged(way: str, sparse: bool, **options: Any) -> Subject:
    torch.manual_seed(0)
    tokens = torch.randint(7, (12, 5))
    return load(Bagged(way, sparse).double().eval(), data=(tokens, torch.arange(12) % 3), **options)


class Recomputing(nn.Module):
    """A classifier that keeps no activations, in the way of torch that knows `backward` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = checkpoint(self.last, self.first(x), use_reentrant=True)
        return logits


@pytest.mark.parametrize("probe", ["noise-scale", "flatness", "step", "hessian", "trace", "density"])
def test_recomputed_activations_that_have_no_gradient_are_refused_with_the_cure(probe: str) -> None:
    subject = load(Recomputing(), data=(torch.randn(32, 3), torch.arange(32) % 3), batch_size=4)
    options = {"optimizer": "SGD", "optimizer_arg": ("lr=0.1",)} if probe == "step" else probe_class(probe).smallest
    with pytest.raises(ValueError, match="use_reentrant=False"):
        measure(probe, subject, out=None, quiet=True, **options)


@pytest.mark.parametrize(
    ("way", "probe"),
    [("module", "hessian"), *(("function", name) for name in ("trace", "density", "flatness", "noise-scale", "step"))],
)
def test_sparse_gradients_are_measured_as_the_dense_ones_that_they_are(way: str, probe: str) -> None:
    options = {"optimizer": "SGD", "optimizer_arg": ("lr=0.1",)} if probe == "step" else probe_class(probe).smallest
    found, dense = (
        measure(probe, bagged(way, s, batch_size=4), out=None, quiet=True, **options) for s in (True, False)
    )
    for name, values in found.data_vars.items():
        if values.dtype.kind == "f" and "seconds" not in str(name):
            np.testing.assert_allclose(values, dense[name], rtol=1e-9, atol=1e-12, err_msg=str(name))


@pytest.mark.parametrize(
    ("way", "advice"),
    [
        ("bag", r"the layer is table \(EmbeddingBag\); use nn.Embedding and the sum"),
        ("distance", "write the distance out"),
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_the_advice_fits_the_operation_that_has_no_second_derivative(way: str, advice: str, sparse: bool) -> None:
    with pytest.raises(ValueError, match=f"cannot be differentiated twice .*{advice}.*; surface, line and what else"):
        measure("hessian", bagged(way, sparse), out=None, quiet=True, top=1)


def test_a_loss_without_a_second_derivative_is_not_blamed_on_layers() -> None:
    def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
        lengths = [torch.full((len(targets),), n) for n in (outputs.shape[1], targets.shape[1])]
        return nn.functional.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), targets, *lengths, reduction="none")

    subject = load(nn.Linear(4, 5), data=(torch.randn(4, 9, 4), torch.randint(1, 5, (4, 2))), loss=ctc)
    message = r"_ctc_loss_backward.*; the CTC loss of PyTorch has a gradient alone; surface, line"
    with pytest.raises(ValueError, match=message):
        measure("trace", subject, out=None, quiet=True)
