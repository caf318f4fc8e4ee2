"""How the Hessian of a mini-batch is made: Gauss-Newton part, blocks and diagonal, against dense matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from analytic import (
    attention_net,
    dense_hessian,
    dense_of,
    quadratic,
    run_probe,
    softmax_regression,
    symmetric,
    tanh_net,
)
from matplotlib.figure import Figure

from landscape.curvature.block_diagonal import Partition
from landscape.options import OptionError
from landscape.plots import drawing, headlines
from landscape.plots.appearance import look_of
from landscape.plots.figures import trace_blocks
from landscape.probes.trace import Trace
from landscape.results import reader
from landscape.running.run import run
from landscape.subject.subject import Subject


def expected(subject: Subject, i: int, *, vectors: int = 4000) -> dict[str, float]:
    """The ratios of dense matrices over many vectors."""
    h, g = dense_hessian(subject, i).numpy(), dense_of(subject, "ggn", i).numpy()
    partition = Partition.of(subject.parameters, "module")
    owner = np.concatenate([np.full(size, block) for block, size in enumerate(partition.sizes)])
    block = np.where(owner[:, None] == owner, h, 0.0)
    v = np.random.default_rng(0).choice([-1.0, 1.0], (len(h), vectors))
    full, diagonal, beyond = h @ v, block @ v, (h - g) @ v
    first = owner == 0

    def length(x: np.ndarray) -> np.ndarray:
        return np.linalg.norm(x, axis=0)

    return {
        "off_block": float(np.mean(length(full - diagonal) / length(full))),
        "block_cosine": float(np.mean((full * diagonal).sum(axis=0) / length(full) / length(diagonal))),
        "non_gauss_newton": float(np.mean(length(beyond) / length(full))),
        "first rows": float(np.mean(length((full - diagonal)[first]) / length(full[first]))),
    }


@pytest.mark.slow
def test_the_ratios_are_those_of_dense_matrices() -> None:
    subject = tanh_net(sizes=(6, 4))
    found = run_probe(Trace(vectors=400, blocks="module"), subject)
    wanted = [expected(subject, i) for i in range(2)]
    for name in ("off_block", "block_cosine", "non_gauss_newton"):
        for i in range(2):
            error = found[f"batch_{name}_se"][i]
            assert 0 < error < 0.1
            assert found[f"batch_{name}"][i] == pytest.approx(wanted[i][name], abs=4 * error + 0.01)
        mean = np.average(found[f"batch_{name}"], weights=(6, 4))
        assert found[name] == pytest.approx(mean)
        spread = np.sqrt(2 * np.sum((np.array([0.6, 0.4]) * (found[f"batch_{name}"] - mean)) ** 2))
        assert found[f"{name}_se"] == pytest.approx(spread)
    rows = found["batch_rows_off_block"][0, 0]
    assert rows == pytest.approx(wanted[0]["first rows"], abs=4 * found["batch_rows_off_block_se"][0, 0] + 0.01)
    assert list(found["name"]) == ["0", "2"]


def test_a_linear_model_is_all_gauss_newton_and_a_single_tensor_all_in_its_block() -> None:
    subject, _ = softmax_regression()
    found = run_probe(Trace(vectors=8, blocks="tensor"), subject)
    assert found["non_gauss_newton"] == pytest.approx(0.0, abs=1e-7)
    assert found["off_block"] == pytest.approx(0.0, abs=1e-12)
    assert found["block_cosine"] == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("network", [tanh_net, attention_net])
def test_the_diagonal_lies_within_its_errors_of_the_dense_one(network: object) -> None:
    subject = network(sizes=(6, 3))  # type: ignore[operator]
    dense = np.stack([np.diag(dense_hessian(subject, i).numpy()) for i in range(2)])
    found = run_probe(Trace(vectors=64, diagonal="full"), subject)
    error = np.maximum(found["batch_diagonal_se"], 1e-12)
    within = np.abs(found["batch_diagonal"] - dense) <= 1.96 * error
    assert 0.9 < within.mean() <= 1.0
    whole = np.average(dense, axis=0, weights=(6, 3))
    mean = np.average(found["batch_diagonal"], axis=0, weights=(6, 3))
    np.testing.assert_allclose(found["diagonal"], mean, rtol=1e-5, atol=1e-9)
    assert (np.abs(found["diagonal"] - whole) <= 1.96 * np.maximum(found["diagonal_se"], 1e-12)).mean() > 0.9
    at = 0
    for tensor, size in enumerate(found["tensor_size"]):
        own = dense[0, at : at + size]
        for name, wanted in (("mean", own.mean()), ("square", (own**2).sum())):
            value, of_value = (found[f"batch_diagonal_{name}{end}"][0, tensor] for end in ("", "_se"))
            assert value == pytest.approx(wanted, abs=4.5 * of_value + 1e-9)
        at += size


@pytest.mark.slow
def test_the_sum_of_squares_of_the_diagonal_has_no_bias() -> None:
    matrix = symmetric(np.linspace(-2, 6, 30).tolist(), seed=3)
    wanted = float((torch.diagonal(matrix) ** 2).sum())
    found = [run_probe(Trace(vectors=8, diagonal="full", seed=seed), quadratic(matrix)) for seed in range(60)]
    squares, errors = (np.array([one[f"batch_diagonal_square{end}"][0, 0] for one in found]) for end in ("", "_se"))
    assert squares.mean() == pytest.approx(wanted, abs=4 * squares.std(ddof=1) / np.sqrt(60))
    assert 0.5 * squares.std(ddof=1) < np.sqrt(np.mean(errors**2)) < 2 * squares.std(ddof=1)
    naive = np.mean([(one["batch_diagonal"][0].astype(float) ** 2).sum() for one in found])
    assert naive > wanted + 4 * squares.std(ddof=1) / np.sqrt(60)  # what the correction removes


def test_the_diagonal_of_a_diagonal_matrix_is_exact() -> None:
    values = [1.0, 2.0, 4.0, -3.0, 0.5]
    matrix = torch.diag(torch.tensor(values, dtype=torch.float64))
    found = run_probe(Trace(vectors=4, diagonal="full"), quadratic(matrix))
    np.testing.assert_allclose(found["diagonal"], values, rtol=1e-6)
    assert found["diagonal_se"] == pytest.approx(np.zeros(5), abs=1e-9)
    assert found["diagonal_sd"][0] == pytest.approx(np.std(values))
    assert found["diagonal_quantile"][0, 2] == pytest.approx(1.0)
    assert "batch_diagonal" not in run_probe(Trace(vectors=4, diagonal="summary"), quadratic(symmetric(values)))


def test_the_trace_is_that_without_the_options() -> None:
    plain, more = (run_probe(Trace(vectors=8, **o), tanh_net()) for o in ({}, {"blocks": "tensor", "diagonal": "full"}))  # type: ignore[arg-type]
    assert more["batch_trace"] == pytest.approx(plain["batch_trace"])


@pytest.mark.parametrize("options", [{"blocks": "tensor"}, {"diagonal": "summary"}])
def test_rounds_of_vectors_are_of_the_trace_alone(options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="--tol adds vectors for the trace"):
        Trace(tol=0.1, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_figure_has_a_bar_for_every_block_and_ratio(tmp_path: Path) -> None:
    run(Trace(vectors=8, blocks="tensor"), tanh_net(), tmp_path / "results.h5", label="net")
    assert [path.stem for path in drawing.draw(tmp_path / "results.h5", tmp_path)] == ["trace", "trace_blocks"]
    ((_, data),) = reader.find(tmp_path / "results.h5", "trace")
    ax = trace_blocks.draw(data, Figure().subplots(), look=look_of(data))
    widths = [bar.get_width() for bar in ax.patches]
    np.testing.assert_allclose(widths, np.concatenate([data["rows_off_block"], data["rows_non_gauss_newton"]]))
    assert headlines.numbers(data)["off_block"] == data["off_block"]
