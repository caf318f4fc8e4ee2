"""Logistic regression against scikit-learn, and the stationarity of its fits."""

import numpy as np
import pytest
import torch
from torch import Tensor

from landscape.layers.linear_classifier import LOGISTIC_PENALTIES, TOLERANCE, gradient, logistic


def _data(samples: int = 90, features: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, features, generator=generator, dtype=torch.float64) * torch.arange(1, features + 1) + 5
    wanted = torch.randint(classes, (samples,), generator=generator)
    return x + wanted[:, None], torch.nn.functional.one_hot(wanted, classes).double()


@pytest.mark.parametrize("penalty", [1e-3, 0.1, 10.0])
def test_the_fit_is_that_of_scikit_learn(penalty: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = _data()
    (found,) = logistic(x, y, (penalty,))
    standard = ((x - x.mean(0)) / x.std(0, correction=0)).numpy()
    theirs = linear_model.LogisticRegression(C=1 / (penalty * len(x)), tol=1e-10, max_iter=10_000)
    theirs.fit(standard, y.argmax(1).numpy())
    np.testing.assert_allclose(found.weight.T, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(found.scores(x).softmax(1), theirs.predict_proba(standard), atol=1e-5)


def test_every_penalty_ends_at_a_minimum_in_the_order_asked() -> None:
    x, y = _data()
    found = logistic(x, y, LOGISTIC_PENALTIES)
    lengths = [classifier.weight.norm().item() for classifier in found]
    assert lengths == sorted(lengths, reverse=True)
    for classifier, penalty in zip(found, LOGISTIC_PENALTIES, strict=True):
        assert gradient(classifier, x, y, penalty) <= TOLERANCE


def test_the_gradient_is_that_of_the_objective() -> None:
    x, y = _data()
    (classifier,) = logistic(x, y, (10.0,))
    weight, bias = classifier.weight.clone().requires_grad_(), classifier.bias.clone().requires_grad_()
    standard = (x - classifier.mean) / classifier.scale
    loss = -(y * (standard @ weight + bias).log_softmax(1)).sum(1).mean() + 0.1 / 2 * weight.square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    largest = max(weight.grad.abs().max().item(), bias.grad.abs().max().item())
    assert gradient(classifier, x, y, 0.1) == pytest.approx(largest, rel=1e-9)


def test_class_probabilities_count_as_that_many_samples() -> None:
    x, y = _data(samples=40)
    other = y.roll(1, dims=1)
    (soft,) = logistic(x, 0.75 * y + 0.25 * other, (0.1,))
    (hard,) = logistic(torch.cat([x, x, x, x]), torch.cat([y, y, y, other]), (0.1,))
    torch.testing.assert_close(soft.weight, hard.weight, rtol=0, atol=1e-5)


def test_a_constant_feature_takes_no_part() -> None:
    x, y = _data()
    (found,) = logistic(torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1), y, (0.1,))
    (without,) = logistic(x, y, (0.1,))
    assert (found.weight[-1] == 0).all()
    torch.testing.assert_close(found.weight[:-1], without.weight, rtol=0, atol=1e-5)
