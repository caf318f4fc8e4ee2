"""Gauss-Newton and empirical Fisher products against dense matrices from per-sample derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from analytic import (
    NETWORKS,
    convolution_net,
    dense_hessian,
    dense_of,
    quadratic,
    run_probe,
    same_state,
    softmax_regression,
    state,
    symmetric,
    tanh_net,
)
from torch import nn

from landscape.options import OptionError
from landscape.probes.hessian import Hessian
from landscape.products.hvp_backends import curvature
from landscape.products.operator import Operator, gauss_newton_product
from landscape.products.vectors import random_unit


@pytest.mark.parametrize("operator", ["ggn", "fisher"])
@pytest.mark.parametrize("network", NETWORKS)
def test_products_are_those_of_the_dense_matrix_of_each_mini_batch(network: str, operator: Operator) -> None:
    subject = NETWORKS[network]()
    vector = random_unit(subject.size, 0, device=torch.device("cpu"), dtype=torch.float64)
    curved = curvature(subject, subject.parameters, "auto", operator=operator)
    for i in range(2):
        product = curved.product(i)
        for _ in range(2):
            torch.testing.assert_close(product(vector), dense_of(subject, operator, i) @ vector, rtol=1e-9, atol=1e-13)
        assert product.value == pytest.approx(subject.loss(i).item(), rel=1e-12)


@pytest.mark.parametrize("operator", ["ggn", "fisher"])
def test_eigenvalues_are_those_of_the_dense_matrix_shifted_by_weight_decay(operator: Operator) -> None:
    subject = tanh_net(weight_decay=0.5)
    expected = torch.linalg.eigvalsh(dense_of(subject, operator)).flip(0)[:3] + 0.5
    found = run_probe(Hessian(top=3, tol=1e-10, operator=operator), subject)
    np.testing.assert_allclose(found["eigenvalue"][0], expected, rtol=1e-9)
    assert found["nep"] == 0.0


def test_where_the_logits_are_linear_in_the_weights_gauss_newton_is_the_hessian() -> None:
    subject, matrix = softmax_regression()
    product = curvature(subject, subject.parameters, "auto", operator="ggn").product(0)
    found = torch.stack([product(v) for v in torch.eye(subject.size, dtype=torch.float64)])
    torch.testing.assert_close(found, matrix, rtol=0, atol=1e-14)


def test_gauss_newton_and_fisher_differ_from_the_hessian_and_from_each_other() -> None:
    subject = tanh_net()
    matrices = [dense_hessian(subject), dense_of(subject, "ggn"), dense_of(subject, "fisher")]
    distances = [(a - b).norm() / a.norm() for a, b in zip(matrices, matrices[1:] + matrices[:1], strict=True)]
    assert min(distances) > 0.1  # else the tests above could not tell them apart


def test_a_loss_linear_in_the_outputs_has_no_gauss_newton_curvature() -> None:
    subject = quadratic(symmetric([3.0, -1.0, 2.0]))
    product = curvature(subject, subject.parameters, "auto", operator="ggn").product(0)
    assert torch.equal(product(torch.ones(3, dtype=torch.float64)), torch.zeros(3, dtype=torch.float64))


def test_a_parameter_that_is_not_used_has_none_either() -> None:
    used, unused = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    product = gauss_newton_product(lambda: used[None].sin(), lambda z: z.square().sum(1), [used, unused])
    found = product(torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(found[:3], 2 * torch.cos(torch.ones(3, dtype=torch.float64)) ** 2)
    assert torch.equal(found[3:], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("operator", ["ggn", "fisher"])
def test_the_model_is_left_as_found(operator: Operator) -> None:
    subject = convolution_net()
    kept = state(subject.model)
    run_probe(Hessian(top=1, operator=operator), subject)
    assert same_state(subject.model, kept)
    assert all(p.grad is None for p in subject.parameters.values())


def test_traced_products_are_of_the_hessian_only() -> None:
    with pytest.raises(OptionError, match="--hvp traced makes products of the Hessian only; with --operator ggn"):
        Hessian(operator="ggn", hvp="traced")
