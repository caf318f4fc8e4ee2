"""Gauss-Newton and empirical Fisher products against dense matrices from per-sample derivatives."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from analytic import (
    NETWORKS,
    attention_net,
    batches_of,
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
from torch import Tensor, nn

from landscape.curvature.lanczos import Spectrum
from landscape.curvature.pyhessian_engine import power_iteration
from landscape.options import OptionError
from landscape.probes.hessian import Hessian
from landscape.products.hessian_product import hessian_product
from landscape.products.hvp_backends import curvature
from landscape.products.operator import Operator, gauss_newton_product
from landscape.products.vectors import random_unit
from landscape.subject.subject import Subject


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


def test_a_loss_linear_in_the_outputs_and_a_parameter_that_is_not_used_have_no_gauss_newton_curvature() -> None:
    subject = quadratic(symmetric([3.0, -1.0, 2.0]))
    product = curvature(subject, subject.parameters, "auto", operator="ggn").product(0)
    assert torch.equal(product(torch.ones(3, dtype=torch.float64)), torch.zeros(3, dtype=torch.float64))
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


# --- PyHessian as an engine: its values, our residuals, and no side effects ---


def _found(subject: Subject, k: int = 2, *, tol: float = 1e-9, shift: float = 0.0, pattern: str = "") -> Spectrum:
    parameters = [p for name, p in subject.parameters.items() if pattern in name]
    product = hessian_product(partial(subject.loss, 0), parameters, shift=shift)
    return power_iteration(replace(subject, weight_decay=shift), 0, parameters, product, k, tol=tol, iterations=500)


def _largest(matrix: Tensor, k: int) -> np.ndarray:
    values = torch.linalg.eigvalsh(matrix).numpy()
    return values[np.argsort(-np.abs(values))][:k]


def test_values_and_residuals_are_those_of_the_dense_hessian_and_a_loose_rule_is_no_convergence() -> None:
    subject = tanh_net(sizes=(24,))
    matrix, found = dense_hessian(subject), _found(subject)
    np.testing.assert_allclose(found.values, _largest(matrix, 2), rtol=1e-4)
    assert found.vectors is not None
    true = (found.vectors @ matrix - torch.from_numpy(found.values)[:, None] * found.vectors).norm(dim=1)
    np.testing.assert_allclose(found.residuals, true.numpy(), rtol=1e-6)
    found = _found(tanh_net(sizes=(24,)), 5, tol=1e-2)
    assert (found.converged == (found.residuals <= 1e-2 * np.abs(found.values))).all()
    assert not found.converged.all()  # two equal steps are no residual
    assert found.products > 5


def test_weight_decay_shifts_and_a_subset_of_parameters_gives_its_block() -> None:
    subject = tanh_net(sizes=(24,))
    block = dense_hessian(subject)[-24:, -24:]
    np.testing.assert_allclose(_found(subject, 1, pattern="2.").values, _largest(block, 1), rtol=1e-5)
    np.testing.assert_allclose(_found(subject, 1, shift=0.5).values, _found(subject, 1).values + 0.5, rtol=1e-5)


class Idle(nn.Module):
    """A linear layer, and a weight that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.linear = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def test_an_unused_parameter_contributes_zeros() -> None:
    torch.manual_seed(0)
    subject = Subject(Idle().eval(), batches_of((4,), (12,), 3))
    assert _found(subject, 1).values == pytest.approx(_largest(dense_hessian(subject), 1), rel=1e-5)


def test_existing_gradients_are_neither_summed_nor_lost_and_the_model_is_left_unchanged() -> None:
    subject = convolution_net()
    clean = _found(subject, 1).values
    for p in subject.parameters.values():
        p.grad = torch.ones_like(p)
    frozen = next(iter(subject.parameters.values()))
    kept, random = state(subject.model), torch.random.get_rng_state()
    np.testing.assert_array_equal(_found(subject, 1).values, clean)
    _found(subject, 1, pattern="5.")
    assert all(p.requires_grad and p.grad is not None and bool((p.grad == 1).all()) for p in subject.model.parameters())
    assert frozen.requires_grad
    assert same_state(subject.model, kept)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not any(module.training for module in subject.model.modules())


def test_gradients_survive_a_failure() -> None:
    subject = tanh_net()
    parameters = list(subject.parameters.values())
    parameters[0].grad = torch.ones_like(parameters[0])

    def broken(logits: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        power_iteration(replace(subject, losses=broken), 0, parameters[1:], lambda v: v, 1)
    assert bool((parameters[0].grad == 1).all())
    assert parameters[0].requires_grad


def test_both_engines_of_the_probe_agree_on_an_attention_net() -> None:
    subject = attention_net(sizes=(12, 12))
    ours = run_probe(Hessian(top=1, tol=1e-5), subject)
    theirs = run_probe(Hessian(top=1, tol=1e-7, engine="pyhessian", eigenvectors=True), subject)
    np.testing.assert_allclose(theirs["eigenvalue"], ours["eigenvalue"], rtol=1e-3)
    np.testing.assert_allclose(theirs["loss"], ours["loss"], rtol=1e-12)
    assert np.isnan(theirs["largest"]).all()
    assert np.abs(np.linalg.norm(theirs["eigenvector"], axis=2) - 1).max() < 1e-9
