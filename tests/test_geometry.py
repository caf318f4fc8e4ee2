"""Facts about the geometry of features: definitions, known dimensions, an exact simplex, errors, and the probe."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import passage, run_probe
from torch import nn

import landscape
from landscape import models
from landscape.layers.forward_hooks import feature_hooks
from landscape.layers.selection import layers_of
from landscape.plots.headlines import with_intervals
from landscape.probes import geometry
from landscape.probes.geometry import DIMENSIONS, FEW, OF_CLASSES, Geometry
from landscape.results.headline_numbers import measured
from landscape.statistics import feature_dimension
from landscape.statistics.feature_dimension import (
    CENSORED,
    Estimate,
    effective_rank,
    nearest,
    participation_ratio,
    two_nn,
)
from landscape.statistics.intervals import quantile
from landscape.statistics.neural_collapse import Labels, collapse
from landscape.subject.subject import Subject

pytestmark = pytest.mark.usefixtures("one_thread")


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean(axis=0)


def orthonormal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Orthogonal columns of length one and mean zero, (rows, columns)."""
    q, _ = np.linalg.qr(centred(random(seed).standard_normal((rows, columns))))
    return np.asarray(q)


@pytest.mark.parametrize(("samples", "width"), [(40, 12), (12, 40)])
def test_the_effective_rank_is_the_exponential_of_the_entropy_of_singular_values(samples: int, width: int) -> None:
    """Roy & Vetterli 2007: `rank` equal singular values have the effective rank `rank`."""
    basis = random(1).standard_normal((5, width))
    turn, _ = np.linalg.qr(basis.T)
    equal = orthonormal(samples, 5) @ turn.T
    assert effective_rank(equal).value == pytest.approx(5)
    x = centred(random(2).standard_normal((samples, width)) ** 3)
    s = np.linalg.svd(x, compute_uv=False)
    p = s[s > 1e-9 * s[0]] / s.sum()
    assert effective_rank(x).value == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    assert effective_rank(7.0 * x) == pytest.approx(effective_rank(x))


def test_the_participation_ratio_is_that_of_moments_over_distinct_samples() -> None:
    """Its two parts by their definition: averages over all quadruples of distinct samples, each without bias."""
    x = random(3).standard_normal((7, 3)) @ np.diag([1.0, 2.0, 0.5]) + random(4).standard_normal((7, 1)) ** 3
    half = ((x[:, None] - x[None]) ** 2).sum(axis=-1) / 2
    quadruples = list(itertools.permutations(range(7), 4))
    of_trace = np.mean([half[i, j] * half[k, m] for i, j, k, m in quadruples])
    of_square = np.mean([((x[i] - x[j]) @ (x[k] - x[m])) ** 2 / 4 for i, j, k, m in quadruples])
    found = participation_ratio(centred(x))
    assert found.value == pytest.approx(of_trace / of_square)
    left = [participation_ratio(centred(np.delete(x, i, axis=0))).value for i in range(7)]
    assert found.error == pytest.approx(np.sqrt(6 * np.var(left))), "the jackknife, by leaving samples out"


def test_the_participation_ratio_has_no_large_bias_with_fewer_samples_than_dimensions() -> None:
    """200 dimensions of equal variance from 60 samples; (tr S)^2 / tr S^2 of the sample covariance is about 46."""
    found, naive = [], []
    for seed in range(20):
        x = centred(random(seed).standard_normal((60, 200)))
        values = np.linalg.svd(x, compute_uv=False) ** 2
        found.append(participation_ratio(x))
        naive.append(values.sum() ** 2 / (values**2).sum())
    assert np.mean(naive) < 50
    assert np.mean([one.value for one in found]) == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize("dimension", [1, 2, 4])
def test_two_nn_finds_the_dimension_of_a_cube(dimension: int) -> None:
    """In 10 dimensions, bent; its edges make the estimate of a cube a little too low as the dimension grows."""
    cube = random(dimension).random((800, dimension))
    turn, _ = np.linalg.qr(random(5).standard_normal((10, 10)))
    x = centred(np.concatenate([cube, 0.1 * cube**2, np.zeros((800, 10 - 2 * dimension))], axis=1) @ turn)
    found = two_nn(x)
    assert found.value == pytest.approx(dimension, abs=3 * found.error + 0.1 * (dimension - 1))
    assert 1.1 < found.error / (found.value / np.sqrt(718)) < 1.5  # neighbours share distances


def test_two_nn_is_the_likelihood_of_its_distances_and_agrees_with_the_linear_fit() -> None:
    """Facco et al. 2017: -ln(1 - F) over ln mu is a line through 0, fitted without the largest tenth."""
    x = centred(random(6).random((500, 3)))
    distances = np.linalg.norm(x[:, None] - x[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    first, second = np.sort(distances, axis=1)[:, :2].T
    np.testing.assert_allclose(nearest(x)[0], (first, second))
    logarithm = np.sort(np.log(second / first))
    share = np.arange(1, 501) / 501
    kept = slice(0, 450)
    assert CENSORED == 0.1
    slope = (logarithm[kept] @ -np.log(1 - share[kept])) / (logarithm[kept] @ logarithm[kept])
    found = two_nn(x)
    below = logarithm[kept].sum() + 50 * logarithm[449]
    assert found.value == pytest.approx(449 / below)
    assert found.value == pytest.approx(slope, abs=2 * found.error)


def test_two_nn_leaves_out_equal_samples() -> None:
    x = random(7).random((300, 2))
    twice = np.concatenate([x, x[:50]])
    assert np.isfinite(two_nn(centred(twice)).value)
    assert np.isnan(two_nn(centred(np.repeat(x[:20], 2, axis=0))).value)


def draws(samples: int) -> np.ndarray:
    """Value and error of each dimension in 60 draws from one Gaussian, (draw, measure, 2)."""
    scale = np.arange(1, 21) ** -0.5
    found = []
    for seed in range(60):
        x = centred(random(seed).standard_normal((samples, 20)) * scale)
        found.append([effective_rank(x), participation_ratio(x), two_nn(x)])
    return np.array(found)


def test_errors_of_dimensions_are_the_spread_over_draws() -> None:
    found = draws(150)
    spread, error = found[..., 0].std(axis=0, ddof=1), found[..., 1].mean(axis=0)
    share = np.arange(1, 21) ** -0.5 / (np.arange(1, 21) ** -0.5).sum()
    spread[0] = np.hypot(spread[0], found[:, 0, 0].mean() - np.exp(-(share * np.log(share)).sum()))  # with its bias
    np.testing.assert_allclose(error, spread, rtol=0.3)


def clouds(seed: int, samples: int = 200, classes: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features of Gaussian classes of unequal size, their classes, and a random classifier."""
    means = 1.5 * random(100).standard_normal((classes, 7))
    y = np.minimum(random(seed).integers(0, classes + 1, samples), classes - 1)
    x = 2.0 + means[y] + random(seed + 1).standard_normal((samples, 7))
    return x, y, random(101).standard_normal((classes, 7))


def by_definition(x: np.ndarray, y: np.ndarray, weight: np.ndarray, decisions: np.ndarray) -> dict[str, float]:
    """Dense matrices, loops over pairs, and means without the sample itself."""
    classes = range(int(y.max()) + 1)
    means = np.array([x[y == c].mean(axis=0) for c in classes])
    m = means - means.mean(axis=0)
    within = sum(np.outer(row - means[c], row - means[c]) for row, c in zip(x, y, strict=True)) / len(x)
    between = m.T @ m / len(m)
    length = np.linalg.norm(m, axis=1)
    cosines = [m[a] @ m[b] / length[a] / length[b] for a in classes for b in classes if a != b]
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    distance = 1 - unit @ unit.T

    def mean(a: int, b: int) -> float:
        block = distance[np.ix_(y == a, y == b)]
        return float(block.mean() if a != b else block.sum() / (len(block) * (len(block) - 1)))

    wrong = []
    for i in range(len(x)):
        others = np.arange(len(x)) != i
        near = [((x[i] - x[others & (y == c)].mean(axis=0)) ** 2).sum() for c in classes]
        wrong.append(np.argmin(near) != decisions[i])
    return {
        "class_separation": 1
        - np.mean([mean(c, c) for c in classes]) / np.mean([mean(a, b) for a in classes for b in classes]),
        "nc1": np.trace(within @ np.linalg.pinv(between, rcond=1e-9)) / len(m),
        "nc2_lengths": length.std(ddof=1) / length.mean(),
        "nc2_angles": np.std(cosines),
        "nc2_simplex": np.mean(np.abs(np.array(cosines) + 1 / (len(m) - 1))),
        "nc3": ((weight / np.linalg.norm(weight) - m / np.linalg.norm(m)) ** 2).sum(),
        "nc4": np.mean(wrong),
    }


def test_collapse_is_what_its_definitions_say() -> None:
    x, y, weight = clouds(0)
    decisions = random(8).integers(0, 5, len(x))
    found = {name: one.value for name, one in collapse(x, Labels(y), decisions, weight).items()}
    assert found == pytest.approx(by_definition(x, y, weight, decisions))


@pytest.mark.slow
def test_errors_of_collapse_are_the_spread_over_draws() -> None:
    found = np.array(
        [
            list(collapse(clouds(seed)[0], Labels(clouds(seed)[1]), None, clouds(0)[2]).values())
            for seed in range(0, 120, 2)
        ]
    )
    spread, error = found[..., 0].std(axis=0, ddof=1), found[..., 1].mean(axis=0)
    np.testing.assert_allclose(error, spread, rtol=0.35)


def test_a_simplex_has_collapsed() -> None:
    """Class means of a simplex in 8 dimensions, turned and shifted, with the classifier that belongs to them."""
    turn, _ = np.linalg.qr(random(9).standard_normal((8, 4)))
    simplex = (np.eye(4) - 0.25) @ turn.T
    y = np.arange(80) % 4
    x = simplex[y] + 1e-5 * random(10).standard_normal((80, 8)) + 0.3
    found = collapse(x, Labels(y), y, 3.0 * simplex)
    assert {name: found[name].value for name in found if name != "class_separation"} == pytest.approx(
        dict.fromkeys(("nc1", "nc2_lengths", "nc2_angles", "nc2_simplex", "nc3", "nc4"), 0.0), abs=1e-4
    )
    assert found["class_separation"].value == pytest.approx(1.0, abs=1e-4)
    assert collapse(x, Labels(y), (y + 1) % 4, -simplex)["nc4"].value == 1.0
    assert collapse(x, Labels(y), None, -simplex)["nc3"].value == pytest.approx(4.0, abs=1e-4)
    signs = collapse(x, Labels(2 * (y % 2) - 1), y % 2, simplex)  # -1 is no class of a classifier
    assert np.isnan([signs["nc3"].value, signs["nc4"].value]).all()


def test_classes_of_one_sample_do_not_count() -> None:
    x, y, weight = clouds(4)
    more = collapse(np.r_[x, x[:1] + 9], Labels(np.r_[y, 5]), None, np.r_[weight, weight[:1]])
    assert more == collapse(x, Labels(y), None, weight)
    alone = collapse(x[:5], Labels(np.arange(5)), np.zeros(5), weight)
    assert all(np.isnan(one.value) for one in alone.values())


def vit(batch_size: int = 16, samples: int = 72) -> Subject:
    torch.manual_seed(0)
    model = models.build("vit_demo", classes=4, image_size=8, patch=4, dim=12, depth=1, heads=2).double().eval()
    inputs = torch.randn(samples, 3, 8, 8, dtype=torch.float64)
    targets = torch.arange(samples) % 4
    inputs += 0.5 * torch.randn(4, 3, 1, 1, dtype=torch.float64)[targets]
    return Subject(model, list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True)))


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_the_probe_measures_pooled_features_of_the_first_images(pool: str) -> None:
    """Against features that are collected and pooled here, and the network's own decisions."""
    subject = vit()
    found = run_probe(Geometry(pool=pool, images=60), subject)  # type: ignore[arg-type]
    layers = layers_of(subject, ())
    kept: list[list[np.ndarray]] = [[] for _ in range(len(layers) + 1)]
    logits, handle = (
        [],
        subject.model.head.register_forward_pre_hook(  # type: ignore[union-attr, operator]
            lambda module, args: kept[-1].append(args[0].numpy())
        ),
    )

    def receive(position: int, tensor: torch.Tensor) -> None:
        tokens = tensor.numpy()
        kept[position].append(tokens[:, 0] if pool == "cls" else tokens[:, 1:].mean(axis=1))

    with torch.no_grad(), feature_hooks(subject.model, layers, receive):
        logits = [subject.model(subject.batches[i][0]).argmax(dim=1) for i in range(5)]
    handle.remove()
    decisions, y = torch.cat(logits).numpy()[:60], np.arange(60) % 4
    assert found["images_used"] == 60
    assert found["class_size"] == 15
    weight = subject.model.head.weight.detach().numpy()  # type: ignore[union-attr, operator]
    for position, parts in enumerate(kept):
        x = np.concatenate(parts)[:60]
        head = position == len(layers)
        wanted = dict(zip(DIMENSIONS, (effective_rank(centred(x)), participation_ratio(centred(x)), two_nn(centred(x))),
                          strict=True)) | collapse(x, Labels(y), decisions, weight if head else None)  # fmt: skip
        for name, one in wanted.items():
            at = (found[f"head_{name}"], found[f"head_{name}_se"]) if head else (
                found[name][position], found[f"{name}_se"][position])  # fmt: skip
            np.testing.assert_allclose(at, one, rtol=1e-6, err_msg=f"{name} of place {position}")


def test_the_features_of_a_place_are_multiplied_with_themselves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[np.ndarray] = []
    monkeypatch.setattr(geometry, "scatter", lambda x: products.append(x.T @ x) or products[-1])
    monkeypatch.setattr(feature_dimension, "scatter", None)
    found = run_probe(Geometry(), vit())
    assert len(products) == len(found["effective_rank"]) + 1


def test_numbers_do_not_depend_on_the_size_of_mini_batches() -> None:
    one, other = (run_probe(Geometry(), vit(size)) for size in (16, 72))
    for name in ("effective_rank", "intrinsic_dimension", "nc1", "head_nc3", "nc4_se"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-6)


def test_half_of_the_mini_batches_are_enough_for_numbers() -> None:
    found = run_probe(Geometry(), vit(), units=3)
    assert found["images_used"] == 48
    assert np.isfinite(found["nc1"]).all()
    nothing = run_probe(Geometry(), vit(), units=0)
    assert nothing["images_used"] == 0
    assert np.isnan(nothing["effective_rank"]).all()


def test_without_classes_or_a_linear_classifier_the_dimensions_are_left() -> None:
    subject = passage(torch.randn(40, 6, 4, 4, dtype=torch.float64), batch_size=10)
    regression = Subject(subject.model, [(x, torch.randn(len(x), 3).double()) for x, _ in subject.batches],
                         losses=lambda outputs, targets: (outputs - targets).square().mean(dim=1))  # fmt: skip
    found = run_probe(Geometry(), regression)
    assert set(DIMENSIONS) <= set(found)
    assert not set(OF_CLASSES) & set(found)
    bare = nn.Sequential(*list(subject.model.children())[:1], nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    encoder = Subject(bare, subject.batches)
    found = run_probe(Geometry(layers=("0",)), encoder)
    assert "head_nc3" not in found
    assert "nc4" not in found
    assert np.isfinite(found["nc1"]).all()


@pytest.mark.parametrize("images", [1, 3])
def test_too_few_images_are_refused(images: int) -> None:
    with pytest.raises(ValueError, match=f"geometry needs at least 4 images, got {images}; raise --samples"):
        Geometry().plan(vit(samples=images))


def test_one_sample_per_class_is_the_reason_that_is_said_once() -> None:
    subject = passage(torch.randn(6, 6, 4, 4, dtype=torch.float64), batch_size=6)
    found = run_probe(Geometry(), Subject(subject.model, [(subject.batches[0][0], torch.arange(6))]))
    assert {found[f"{name}_unmeasured"] for name in ("nc1", "head_nc1", "class_separation")} == {FEW}


def test_features_that_are_not_finite_give_no_numbers() -> None:
    maps = torch.randn(40, 6, 4, 4, dtype=torch.float64)
    maps[3, 0, 0, 0] = torch.nan
    found = run_probe(Geometry(), passage(maps))
    assert np.isnan(found["effective_rank"]).all()
    assert np.isnan(found["nc1"]).all()


@pytest.mark.slow
def test_the_headline_is_that_of_the_classifiers_input_with_its_errors(tmp_path: Path) -> None:
    found: Any = landscape.measure("geometry", vit(), out=tmp_path / "r.h5", quiet=True)
    value, error = float(found["head_nc3"]), float(found["head_nc3_se"])
    assert with_intervals(found)["NC3"] == f"{value:.3g} ± {quantile(72) * error:.1g}"
    one = next(one for one in measured(found) if one.name == "NC3")
    assert Estimate(one.value, one.error) == (value, error)
    without = {one.name: one.value for one in measured(found.drop_vars("head_effective_rank"))}
    assert without["effective rank"] == found["effective_rank"].values[-1]
