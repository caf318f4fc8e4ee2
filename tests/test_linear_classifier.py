"""Ridge classifiers against scikit-learn and the normal equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from landscape.layers.linear_classifier import PENALTIES, fit_with_best_penalty, ridge


def _data(samples: int = 60, features: int = 7, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, features, generator=generator, dtype=torch.float64) * torch.arange(1, features + 1) + 5
    wanted = torch.randint(classes, (samples,), generator=generator)
    return x + wanted[:, None], torch.nn.functional.one_hot(wanted, classes).double()


@pytest.mark.parametrize("penalty", [1e-6, 0.1, 30.0])
def test_the_fit_is_that_of_scikit_learn(penalty: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = _data()
    (found,) = ridge(x, y, (penalty,))
    standard = (x - x.mean(0)) / x.std(0, correction=0)
    theirs = linear_model.Ridge(alpha=penalty * len(x)).fit(standard.numpy(), y.numpy())
    np.testing.assert_allclose(found.weight.T, theirs.coef_, atol=1e-10)
    np.testing.assert_allclose(found.scores(x), theirs.predict(standard.numpy()), atol=1e-10)


def test_several_penalties_are_the_fits_of_each() -> None:
    x, y = _data()
    for one, penalty in zip(ridge(x, y, PENALTIES), PENALTIES, strict=True):
        standard = (x - one.mean) / one.scale
        normal = standard.T @ standard / len(x) + penalty * torch.eye(7, dtype=torch.float64)
        expected = torch.linalg.solve(normal, standard.T @ (y - y.mean(0)) / len(x))
        torch.testing.assert_close(one.weight, expected, rtol=1e-8, atol=1e-12)


def test_scale_and_offset_of_features_do_not_matter() -> None:
    x, y = _data()
    (one,), (other,) = ridge(x, y, (0.1,)), ridge(1e4 * x - 3, y, (0.1,))
    torch.testing.assert_close(one.scores(x), other.scores(1e4 * x - 3), rtol=1e-8, atol=1e-10)


def test_constant_features_and_more_features_than_samples_are_fitted() -> None:
    x, y = _data(samples=10, features=30)
    x[:, 3] = 2.0
    found = ridge(x, y, PENALTIES)
    assert all(one.weight[3].abs().max() < 1e-8 and one.scores(x).isfinite().all() for one in found)
    assert (found[0].scores(x).argmax(1) == y.argmax(1)).all()  # interpolates


def test_the_penalty_is_the_best_on_the_held_out_samples_and_the_fit_takes_all() -> None:
    x, y = _data(samples=80, features=40)
    held_out = torch.arange(80) % 4 == 0
    found, penalty, accuracy = fit_with_best_penalty(x, y, held_out)
    scores = {
        p: (one.scores(x[held_out]).argmax(1) == y[held_out].argmax(1)).double().mean().item()
        for p, one in zip(PENALTIES, ridge(x[~held_out], y[~held_out], PENALTIES), strict=True)
    }
    assert accuracy == max(scores.values()) > min(scores.values())
    assert penalty == max(p for p, score in scores.items() if score == accuracy)
    (whole,) = ridge(x, y, (penalty,))
    assert torch.equal(found.weight, whole.weight)
