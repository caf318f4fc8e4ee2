"""Curvature and trajectory of the mean prediction of several dropout masks, against its dense Hessian in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import run_probe, state
from torch import Tensor, nn

from landscape.models.dropout_masks import kept
from landscape.probe import derived_seed
from landscape.probes.convexity import Convexity
from landscape.probes.density import Density
from landscape.probes.hessian import Hessian
from landscape.probes.trace import Trace
from landscape.probes.trajectory import Trajectory
from landscape.products import hvp_backends, stored_hessian
from landscape.products.hvp_backends import curvature
from landscape.subject.mc_dropout import as_is, with_members
from landscape.subject.subject import Subject
from landscape.weight_space.planes import plane_of

MEMBERS, RATE, UNITS, SIZES = 3, 0.4, 4, (7, 4)  # two mini-batches of different sizes
DECAY = 0.1
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")]


def subject(sizes: Sequence[int] = SIZES) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, UNITS), nn.Tanh(), nn.Dropout(RATE), nn.Linear(UNITS, 3)).double().eval()
    batches = [(torch.randn(size, 3, dtype=torch.float64), torch.arange(size) % 3) for size in sizes]
    return with_members(Subject(model, batches, weight_decay=DECAY), MEMBERS)


def losses(weights: Tensor, of: Subject, batch: int, *, member: int | None = None) -> Tensor:
    """- log of the mean over masks of the probability of each label, from the weights as one vector, by hand."""
    first, hidden, last, out = weights.split([3 * UNITS, UNITS, 3 * UNITS, 3])
    inputs, targets = of.batches[batch]
    positions = torch.arange(SIZES[batch]) + (SIZES[0] if batch else 0)
    units = (inputs @ first.view(UNITS, 3).T + hidden).tanh()
    found = []
    for m in range(MEMBERS) if member is None else [member]:
        mask = kept(derived_seed(derived_seed(0, "dropout", m), 0), positions, UNITS, RATE)
        found.append((units * mask / (1 - RATE) @ last.view(3, UNITS).T + out).softmax(dim=1))
    return F.nll_loss(torch.stack(found).mean(dim=0).log(), targets, reduction="none")


def weights_of(of: Subject) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in of.parameters.values()])


def dense(of: Subject, batches: tuple[int, ...] = (0, 1), weights: Tensor | None = None) -> Tensor:
    """The Hessian of the mean loss over the samples of some mini-batches, with weight decay."""
    weights = weights_of(of) if weights is None else weights
    total = lambda w: torch.cat([losses(w, of, i) for i in batches]).mean()  # noqa: E731
    return torch.autograd.functional.hessian(total, weights) + DECAY * torch.eye(len(weights)).double()


def test_the_loss_by_hand_is_that_of_the_subject() -> None:
    of = subject()
    for i in (0, 1):
        torch.testing.assert_close(losses(weights_of(of), of, i).mean(), of.loss(i))
    assert not torch.allclose(losses(weights_of(of), of, 0, member=0), losses(weights_of(of), of, 0, member=1))


class DropPath(nn.Identity):
    """Stochastic depth as a module, found by its name as that of timm is."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob = rate


class Rectified(nn.Module):
    """Kinks, dropout of channels, inside attention and stochastic depth, and a sample of several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.Dropout2d(0.3), nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.depth, self.fc = DropPath(0.4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.channels(self.norm(self.conv(x)).relu())
        tokens = maps.flatten(2).transpose(1, 2)
        return self.fc((tokens + self.depth(self.attention(tokens, tokens, tokens)[0])).mean(dim=1))


def rectified(dtype: torch.dtype, batches: int) -> Subject:
    torch.manual_seed(0)
    data = [(torch.randn(5, 2, 2, 2), torch.arange(5) % 3) for _ in range(batches)]
    return with_members(Subject(Rectified().to(dtype).eval(), data), 2)


def test_recorded_products_of_two_mini_batches_have_the_masks_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvp_backends, "mini_batches_per_product", lambda *_: 2)
    of = rectified(torch.float64, batches=2)
    kept_graph, recorded = (
        curvature(of, of.parameters, "double-backward"),
        curvature(of, of.parameters, "traced", batched=True),
    )
    assert (recorded.hvp, recorded.batched, recorded.fits_batched(range(2))) == ("traced", 2, True)
    vector = torch.randn(kept_graph.size, dtype=torch.float64)
    expected = torch.stack([kept_graph.product(i)(vector) for i in range(2)])
    found = recorded.batched_product(range(2))(vector.expand(2, -1))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_recorded_products_have_the_masks_and_take_the_activation_pattern_of_double_precision() -> None:
    of = rectified(torch.float32, batches=2)
    products = [curvature(of, of.parameters, hvp, kinks="double") for hvp in ("double-backward", "traced")]
    assert all(product.fixed for product in products)
    vector = torch.randn(products[0].size)
    for i in range(2):
        torch.testing.assert_close(*(product.product(i)(vector) for product in products), rtol=1e-3, atol=1e-5)


def test_recorded_products_belong_to_the_masks() -> None:
    """What is kept on disk is found by the seed and number of the masks too."""
    of = rectified(torch.float64, batches=1)
    others = [with_members(replace(of, seed=1), 2), with_members(of, 3), as_is(of)]
    keys = [stored_hessian.key_of(one, one.parameters, False) for one in (of, *others)]
    assert all(keys)
    assert len(set(keys)) == 4
    assert stored_hessian.key_of(rectified(torch.float64, batches=16), of.parameters, False) == keys[0]


@pytest.mark.parametrize("hvp", ["auto", "double-backward"])
def test_the_density_has_the_moments_of_the_dense_hessian(hvp: str) -> None:
    of, steps = subject(), 31
    found = run_probe(Density(vectors=2, steps=steps, hvp=hvp), of)
    values = torch.linalg.eigvalsh(dense(of)).numpy()
    assert len(values) == steps  # as many nodes as parameters: every node is an eigenvalue
    np.testing.assert_allclose(found["largest"], values[-1], rtol=1e-8)
    np.testing.assert_allclose(found["smallest"], values[0], rtol=1e-6, atol=1e-9)
    real = found["nodes"][np.isfinite(found["nodes"])]
    assert np.abs(real[:, None] - values).min(axis=1).max() < 1e-7
    assert abs(found["mean"] - values.mean()) < 5 * found["mean_se"]


@pytest.mark.parametrize("method", ["xtrace", "hutchinson", "hutch++"])
def test_the_trace_is_that_of_the_dense_hessian(method: str) -> None:
    of = subject()
    found = run_probe(Trace(vectors=28, method=method), of)
    for i in (0, 1):
        error = abs(found["batch_trace"][i] - dense(of, (i,)).trace().item())
        assert error < 4 * found["batch_trace_se"][i]
    assert abs(found["trace"] - dense(of).trace().item()) < 4 * found["trace_se"]
    assert found["trace_se"] < 0.2 * found["trace"]


def test_the_eigenvalues_of_hessian_are_those_of_the_dense_one() -> None:
    of = subject()
    found = run_probe(Hessian(top=3, tol=1e-8), of)
    values = torch.linalg.eigvalsh(dense(of, (0,)))  # of the mini-batch that is whole
    by_size = values[values.abs().argsort(descending=True)][:3]
    np.testing.assert_allclose(np.sort(found["eigenvalue"][0]), np.sort(by_size.numpy()), rtol=1e-6)


def test_convexity_has_both_ends_of_the_dense_hessian_at_displaced_weights() -> None:
    of, probe = subject(), Convexity(resolution="2", range="0.5", tol=1e-8, seed=2)
    found = run_probe(probe, of)
    plane = plane_of(of, "random", normalize="filter", ignore=probe.ignore, seed=2)
    sides = [torch.cat([d.get(name, torch.zeros_like(p)).reshape(-1) for name, p in of.parameters.items()])
             for d in plane.directions]  # fmt: skip
    for i, x in enumerate(found["x"]):
        for j, y in enumerate(found["y"]):
            there = weights_of(of) + float(x) * sides[0] + float(y) * sides[1]
            values = torch.linalg.eigvalsh(dense(of, weights=there))
            assert found["smallest"][i, j] == pytest.approx(values[0].item(), rel=1e-6)
            assert found["largest"][i, j] == pytest.approx(values[-1].item(), rel=1e-6)
            expected = torch.cat([losses(there, of, k) for k in (0, 1)]).mean().item()
            assert found["loss"][i, j] == pytest.approx(expected, rel=1e-10)


def test_a_trajectory_has_the_mean_prediction_of_every_snapshot_and_on_its_plane(tmp_path: Path) -> None:
    of, path = subject(), []
    end = weights_of(of)
    for epoch in range(4):
        path.append(end + 0.3 * (3 - epoch) * torch.randn_like(end))
        values, own = path[-1].clone(), state(of.model)
        pieces = values.split([own[name].numel() for name in own])
        torch.save(
            {name: piece.view(own[name].shape) for name, piece in zip(own, pieces, strict=True)},
            tmp_path / f"epoch_{epoch:03}.pt",
        )
    found = run_probe(Trajectory(run=str(tmp_path)), of)
    moved = torch.stack(path) - end
    _, _, axes = torch.linalg.svd(moved - moved.mean(dim=0), full_matrices=False)
    for t, weights in enumerate(path):
        own = torch.cat([losses(weights, of, i) for i in (0, 1)])
        on_plane = torch.cat([losses(end + axes[:2].T @ (axes[:2] @ moved[t]), of, i) for i in (0, 1)])
        assert found["loss"][t] == pytest.approx(own.mean().item(), rel=1e-10)
        assert found["loss_se"][t] == pytest.approx(own.std().item() / 11**0.5, rel=1e-10)
        assert found["plane_loss"][t] == pytest.approx(on_plane.mean().item(), rel=1e-8)
        excess = on_plane - own
        assert found["plane_excess_se"][t] == pytest.approx(excess.std().item() / 11**0.5, rel=1e-6, abs=1e-12)
    torch.testing.assert_close(weights_of(of), end)
