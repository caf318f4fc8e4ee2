"""Spectra of the Hessian's diagonal blocks and their Jensen-Shannon distances, against dense blocks."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from analytic import (
    attention_net,
    batches_of,
    convolution_net,
    dense_hessian,
    quadratic,
    run_probe,
    symmetric,
    tanh_net,
)
from scipy.spatial.distance import jensenshannon
from scipy.stats import norm
from scipy.stats import t as student
from torch import nn

from landscape.curvature.block_diagonal import BlockKind, Partition, block_quadratures
from landscape.probes.density import Density
from landscape.statistics.block_spectra import LINEAR, WIDTH, heterogeneity
from landscape.subject.subject import Subject

ARRAYS = ("nodes", "weights")


def spectra(subject: Subject, kind: BlockKind) -> list[np.ndarray]:
    """Eigenvalues of every dense diagonal block of the Hessian over all samples."""
    sizes = [len(targets) for _, targets in subject.batches]
    dense = torch.stack([size / sum(sizes) * dense_hessian(subject, i) for i, size in enumerate(sizes)]).sum(dim=0)
    partition = Partition.of(subject.parameters, kind)
    rows = [partition.part(torch.arange(len(dense)), block) for block in range(len(partition.names))]
    return [torch.linalg.eigvalsh(dense[r][:, r]).numpy() for r in rows]


def distances(spectra: list[np.ndarray], *, own_scale: bool) -> np.ndarray:
    """The definition, with smooth densities on a fine grid and SciPy's distance."""
    rms = np.array([np.sqrt(np.mean(values**2)) for values in spectra])
    scales = rms if own_scale else np.full(len(rms), np.median(rms))
    u = [np.arcsinh(values / (LINEAR * scale)) for values, scale in zip(spectra, scales, strict=True)]
    end = max(np.abs(values).max() for values in u) + 8 * WIDTH
    grid = np.linspace(-end, end, 4001)
    curves = [norm.pdf(grid[:, None], values, WIDTH).mean(axis=1) for values in u]
    return np.array([[jensenshannon(p, q, base=2) for q in curves] for p in curves])


def of_pairs(matrix: np.ndarray) -> np.ndarray:
    return matrix[np.triu_indices(len(matrix), 1)]


def padded(rows: list[np.ndarray]) -> np.ndarray:
    size = max(map(len, rows))
    return np.stack([np.pad(row, (0, size - len(row)), constant_values=np.nan) for row in rows])


def wide_net() -> Subject:
    """Blocks of 4 to 480 weights: runs of 40 steps do not span the large ones."""
    torch.manual_seed(0)
    layers = nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 4)
    model = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        model[0].weight *= 3
        model[4].weight *= 5
    return Subject(model, batches_of((20,), (24,), 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "kind"),
    [(tanh_net, "tensor"), (tanh_net, "module"), (convolution_net, "layer"), (attention_net, "layer")],
)
def test_blocks_that_a_run_spans_have_the_eigenvalues_of_the_dense_block(
    network: Callable[..., Subject], kind: BlockKind
) -> None:
    subject = network(sizes=(6,) if network is attention_net else (6, 3))
    steps = 24
    found = run_probe(Density(vectors=1, steps=steps, blocks=kind), subject)
    for values, nodes, weights in zip(spectra(subject, kind), found["nodes"][0], found["weights"][0], strict=True):
        if len(values) <= steps:
            np.testing.assert_allclose(nodes[: len(values)], values, atol=1e-9 * max(np.abs(values).max(), 1))
            np.testing.assert_allclose(weights[: len(values)], 1 / len(values))
            assert np.isnan(nodes[len(values) :]).all()
        else:
            assert nodes[[0, -1]] == pytest.approx(values[[0, -1]], rel=1e-6)
    assert list(found["size"]) == [len(values) for values in spectra(subject, kind)]


def test_blocks_are_tensors_modules_or_the_modules_that_hold_them() -> None:
    parameters = attention_net().parameters
    names = {kind: Partition.of(parameters, kind).names for kind in ("tensor", "module", "layer")}
    assert names["tensor"] == tuple(parameters)
    assert "blocks.0.attention.qkv" in names["module"]
    assert {"blocks.0", "blocks.0.attention", "blocks.0.mlp", "head", "cls_token"} <= set(names["layer"])
    for kind in names:
        partition = Partition.of(parameters, kind)
        vector = torch.arange(sum(p.numel() for p in parameters.values()), dtype=torch.float64)
        parts = {block: partition.part(vector, block) for block in range(len(partition.names))}
        assert torch.equal(partition.joined(parts, vector), vector)
        assert [len(part) for part in parts.values()] == partition.sizes


@pytest.mark.parametrize("own_scale", [False, True])
def test_the_distance_of_known_spectra_is_that_of_smooth_densities(own_scale: bool) -> None:
    generator = np.random.default_rng(0)
    known = [generator.normal(0, width, size) for width, size in ((1.0, 40), (0.2, 60), (5.0, 30))] + [np.zeros(8)]
    known[3][0] = 1.0
    weights = padded([np.full(len(values), 1 / len(values)) for values in known])
    found = heterogeneity(padded(known)[None], weights[None])
    prefix = "shape" if own_scale else "js"
    wanted = distances(known, own_scale=own_scale)
    np.testing.assert_allclose(found[f"{prefix}_distance"], wanted, atol=2e-3)
    name = "shape_heterogeneity" if own_scale else "heterogeneity"
    assert found[name] == pytest.approx(of_pairs(wanted).mean(), abs=2e-3)
    assert np.isnan(found[f"{name}_se"])  # a single vector


def test_distances_are_0_for_equal_1_for_disjoint_spectra_and_do_not_depend_on_the_unit() -> None:
    nodes = np.array([[[1.0, 2.0], [1.0, 2.0], [-1.0, -2.0], [1e3, 2e3]]])
    weights = np.full_like(nodes, 0.5)
    found, scaled = heterogeneity(nodes, weights), heterogeneity(1e-7 * nodes, weights)
    assert found["js_distance"][0, 1] == pytest.approx(0.0, abs=1e-6)
    assert found["js_distance"][0, 2:] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert found["shape_distance"][0, 3] == pytest.approx(0.0, abs=1e-6)  # a factor only
    np.testing.assert_allclose(scaled["js_distance"], found["js_distance"], atol=1e-6)


@pytest.mark.campaign  # a sweep over steps
def test_the_distances_come_to_those_of_the_dense_blocks_with_more_steps() -> None:
    subject = wide_net()
    wanted = [distances(spectra(subject, "tensor"), own_scale=own) for own in (False, True)]
    off = {}
    for steps in (4, 12, 40, 80):
        found = run_probe(Density(vectors=6, steps=steps, blocks="tensor"), subject)
        off[steps] = np.abs(of_pairs(found["js_distance"] - wanted[0]))
    assert off[80].mean() < off[12].mean() < off[4].mean()
    assert off[40].mean() < 0.01
    assert off[40].max() < 0.04
    bound = student.ppf(0.9995, 6 - 1) * found["heterogeneity_se"]  # of six vectors: one in a thousand is beyond
    assert found["heterogeneity"] == pytest.approx(of_pairs(wanted[0]).mean(), abs=bound)
    assert found["heterogeneity_half_steps"] == pytest.approx(found["heterogeneity"], abs=0.01)
    for name, dense in zip(("js", "shape"), wanted, strict=True):
        bound = student.ppf(0.9995, 6 - 1) * of_pairs(found[f"{name}_distance_se"]) + 5e-3
        assert (np.abs(of_pairs(found[f"{name}_distance"] - dense)) <= bound).all()


@pytest.mark.campaign  # of 24 repetitions
def test_errors_are_those_of_repetitions_and_noise_adds_no_distance() -> None:
    """Two spectra are equal: without a correction their distance would be that of the noise."""
    generator = np.random.default_rng(1)
    known = [0.05 * generator.normal(size=size) for size in (60, 90)]
    known.append(known[0].copy())
    values = torch.from_numpy(np.concatenate(known))
    partition = Partition.of({f"{i}": torch.from_numpy(part) for i, part in enumerate(known)}, "tensor")
    found = []
    for seed in range(24):
        seeds = [100 * seed + vector for vector in range(5)]
        runs = [block_quadratures(lambda v: values * v, partition, 20, seed=own, like=values) for own in seeds]
        nodes, weights = (np.array([[getattr(one, name) for one in run] for run in runs]) for name in ARRAYS)
        found.append(heterogeneity(nodes, weights))
    repeated, errors = (np.array([one[name] for one in found]) for name in ("heterogeneity", "heterogeneity_se"))
    wanted = distances(known, own_scale=False)
    assert repeated.mean() == pytest.approx(of_pairs(wanted).mean(), abs=4 * repeated.std(ddof=1) / np.sqrt(24) + 0.01)
    assert 0.5 * repeated.std(ddof=1) < np.sqrt(np.mean(errors**2)) < 2 * repeated.std(ddof=1)
    equal = np.array([one["js_distance"][0, 2] for one in found])
    assert equal.mean() < wanted[0, 1] / 2


class Parts(nn.Module):
    """A quadratic w'Aw / 2 of weights in several tensors."""

    def __init__(self, matrix: torch.Tensor, sizes: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(size, dtype=matrix.dtype) for size in sizes)
        self.register_buffer("matrix", matrix)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        w = torch.cat(list(self.parts))
        return samples * (w @ self.matrix @ w / 2)  # type: ignore[no-any-return]


def blocks_of(matrix: torch.Tensor, sizes: list[int]) -> Subject:
    batch = torch.ones(1, 1, dtype=matrix.dtype), torch.zeros(1, dtype=torch.long)
    return Subject(Parts(matrix, sizes).eval(), [batch], losses=lambda outputs, targets: outputs[:, 0])


def test_blocks_leave_out_what_lies_between_them() -> None:
    matrix = symmetric(np.linspace(-3, 5, 12).tolist())
    subject = blocks_of(matrix, [5, 7])
    found = run_probe(Density(vectors=2, steps=8, blocks="tensor"), subject)
    for block, rows in enumerate((slice(0, 5), slice(5, 12))):
        wanted = torch.linalg.eigvalsh(matrix[rows, rows]).numpy()
        np.testing.assert_allclose(found["nodes"][:, block, : len(wanted)], [wanted] * 2, atol=1e-9)
        assert found["mean"][block] == pytest.approx(wanted.mean())
        assert found["mean_square"][block] == pytest.approx((wanted**2).mean())
        assert found["mean_square_se"][block] == pytest.approx(0, abs=1e-9)
    assert found["heterogeneity_se"] == pytest.approx(0, abs=1e-6)  # exact spectra have no error


def test_weight_decay_shifts_the_nodes_of_all_blocks() -> None:
    probe = Density(vectors=1, steps=10, blocks="tensor")
    plain, decayed = (run_probe(probe, tanh_net(weight_decay=decay)) for decay in (0.0, 0.5))
    np.testing.assert_allclose(decayed["nodes"], plain["nodes"] + 0.5, rtol=1e-7)


def test_a_single_block_is_refused_and_blocks_without_a_finite_number_have_no_distance() -> None:
    with pytest.raises(ValueError, match="are a single block, weight"):
        run_probe(Density(blocks="tensor"), quadratic(symmetric([1.0, 2.0])))
    nodes = np.full((2, 3, 4), np.nan)
    found = heterogeneity(nodes, nodes)
    assert all(np.isnan(value).all() for value in found.values())
    assert found["js_distance"].shape == (3, 3)


def test_a_half_finished_result_has_the_distances_of_its_finished_vectors() -> None:
    found = run_probe(Density(vectors=3, steps=6, blocks="tensor"), tanh_net(), units=1)
    assert np.isfinite(found["heterogeneity"])
    assert np.isnan(found["heterogeneity_se"])
    assert "heterogeneity" not in run_probe(Density(vectors=2, steps=6, blocks="tensor"), tanh_net(), units=0)
