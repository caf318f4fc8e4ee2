"""Traces: the three estimators against closed forms and another library, and the probe against dense Hessians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from analytic import convolution_net, dense_hessian, quadratic, run_probe, softmax_regression, symmetric, tanh_net
from matplotlib.figure import Figure
from torch import Tensor

from landscape.curvature.trace_estimators import TraceEstimate, exact, hutch_plus_plus, hutchinson, xtrace
from landscape.plots import headlines, style
from landscape.plots.appearance import Look, look_of
from landscape.plots.figures import trace
from landscape.probes.trace import METHODS, Method, Trace
from landscape.results import reader
from landscape.running.run import run
from landscape.subject.subject import Subject

Estimator = Callable[..., TraceEstimate]
ESTIMATORS: Sequence[Estimator] = (hutchinson, hutch_plus_plus, xtrace)
OUTLIERS = [30.0, 20.0, -10.0, 5.0, *np.linspace(-0.1, 0.3, 96)]
CPU = torch.device("cpu")


def estimate(estimator: Estimator, matrix: Tensor, products: int, seed: int = 0) -> TraceEstimate:
    """Of a matrix, by its products alone."""
    return estimator(lambda v: matrix @ v, len(matrix), products, seed=seed, device=CPU, dtype=matrix.dtype)


def many(estimator: Estimator, matrix: Tensor, products: int, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and standard errors over seeds."""
    found = [estimate(estimator, matrix, products, seed) for seed in range(repeats)]
    return np.array([one.value for one in found]), np.array([one.error for one in found])


def test_hutchinson_is_exact_for_a_diagonal_matrix() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0, -3.0, 0.5, 0.25, 8.0], dtype=torch.float64))
    found = estimate(hutchinson, matrix, 4)
    assert (found.value, found.error, found.products) == (pytest.approx(12.75), pytest.approx(0.0, abs=1e-12), 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("estimator", [hutch_plus_plus, xtrace])
@pytest.mark.parametrize("rank", [1, 5])
def test_low_rank_is_exact_for_those_that_use_a_sketch(estimator: Estimator, rank: int, dtype: torch.dtype) -> None:
    values = [7.0, -3.0, 2.0, 1.0, 0.1][:rank]
    matrix = symmetric([*values, *[0.0] * 55]).to(dtype)
    exactly = 1e-12 if dtype == torch.float64 else 1e-4
    for seed in range(5):
        found = estimate(estimator, matrix, 18, seed)
        assert found.value == pytest.approx(sum(values), abs=exactly)
        assert found.error < exactly


def test_a_multiple_of_the_identity_is_exact_for_xtrace() -> None:
    assert estimate(xtrace, 2.5 * torch.eye(50, dtype=torch.float64), 8).value == pytest.approx(125.0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.75, pytest.param(0.9, marks=pytest.mark.campaign)])
def test_the_error_of_xtrace_is_honest_on_any_spectrum(decay: float) -> None:
    matrix = symmetric([decay**k if decay else 1 + k / 100 for k in range(60)])
    values, errors = many(xtrace, matrix, 16, 60)
    off = np.sqrt(np.mean((values - matrix.trace().item()) ** 2))
    assert 0.8 * off < np.sqrt(np.mean(errors**2)) < 1.6 * off


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_zero_matrix_has_trace_zero_without_error(estimator: Estimator) -> None:
    found = estimate(estimator, torch.zeros(40, 40, dtype=torch.float64), 9)
    assert (found.value, found.error) == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_are_unbiased_and_their_errors_honest(estimator: Estimator) -> None:
    values, errors = many(estimator, symmetric(OUTLIERS), 16, 90)
    mean_error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - sum(OUTLIERS)) < 3.5 * mean_error
    assert np.sqrt((errors**2).mean()) == pytest.approx(values.std(ddof=1), rel=0.3)


def test_hutchinson_has_its_closed_form_variance() -> None:
    matrix = symmetric(OUTLIERS)
    values, _ = many(hutchinson, matrix, 8, 300)
    off_diagonal = matrix.square().sum() - matrix.diagonal().square().sum()
    assert values.var(ddof=1) == pytest.approx(2 * off_diagonal.item() / 8, rel=0.3)


@pytest.mark.slow
def test_a_sketch_beats_random_vectors_alone_where_the_spectrum_has_outliers() -> None:
    matrix = symmetric(OUTLIERS)
    plain, sketched, exchanged = (
        np.sqrt(((many(estimator, matrix, 24, 40)[0] - sum(OUTLIERS)) ** 2).mean()) for estimator in ESTIMATORS
    )
    assert 5 * exchanged < plain
    assert 5 * sketched < plain


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("products", [5, 6, 50])
def test_as_many_products_as_rows_give_the_trace_itself(estimator: Estimator, products: int) -> None:
    matrix = symmetric([4.0, -1.0, 0.5, 0.25, 0.125])
    assert estimate(estimator, matrix, products) == exact(lambda v: matrix @ v, 5, device=CPU, dtype=matrix.dtype)
    assert estimate(estimator, matrix, products).value == pytest.approx(3.875)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("products", [4, 5, 7, 16, 33])
def test_products_are_counted_and_never_exceeded(estimator: Estimator, products: int) -> None:
    spent, matrix = [], symmetric(OUTLIERS)

    def operator(v: Tensor) -> Tensor:
        spent.append(1)
        return matrix @ v

    found = estimator(operator, len(matrix), products, seed=0, device=CPU, dtype=torch.float64)
    assert found.products == len(spent) <= products
    assert np.isfinite(found.error)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_product_that_is_not_finite_is_an_error(estimator: Estimator) -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        estimate(estimator, torch.full((20, 20), torch.nan, dtype=torch.float64), 6)


@pytest.mark.slow
def test_curvlinops_agrees_within_the_errors() -> None:
    library = pytest.importorskip("curvlinops")
    matrix = symmetric(OUTLIERS)
    torch.manual_seed(0)
    theirs = np.array([library.xtrace(matrix, 24).item() for _ in range(60)])
    ours, _ = many(xtrace, matrix, 24, 60)
    assert ours.mean() == pytest.approx(theirs.mean(), abs=4 * np.hypot(ours.std(), theirs.std()) / np.sqrt(60))
    assert ours.std() < 1.5 * theirs.std()


# --- the probe ---


@pytest.mark.slow
@pytest.mark.parametrize("network", [tanh_net, convolution_net])
def test_enough_products_give_the_traces_of_dense_hessians(network: Callable[..., Subject]) -> None:
    subject = network(sizes=(6, 3))
    found = run_probe(Trace(vectors=subject.size), subject)
    dense = [dense_hessian(subject, i).trace().item() for i in range(2)]
    np.testing.assert_allclose(found["batch_trace"], dense, rtol=1e-9)
    assert found["trace"] == pytest.approx((6 * dense[0] + 3 * dense[1]) / 9)
    assert found["trace_se"] == 0.0


@pytest.mark.parametrize("method", METHODS)
def test_every_method_comes_within_its_error_of_softmax_regression(method: Method) -> None:
    subject, matrix = softmax_regression(features=12)
    found = run_probe(Trace(method=method, vectors=16), subject)
    assert 0 < found["trace_se"] < 0.5 * matrix.trace()
    assert found["trace"] == pytest.approx(matrix.trace().item(), abs=4 * found["trace_se"])


def test_the_split_into_mini_batches_does_not_change_the_trace() -> None:
    whole = tanh_net(sizes=(9,))
    inputs, targets = whole.batches[0]
    parts = Subject(whole.model, [(inputs[:4], targets[:4]), (inputs[4:8], targets[4:8]), (inputs[8:], targets[8:])])
    split, joint = (run_probe(Trace(vectors=59), subject)["trace"] for subject in (parts, whole))
    assert split == pytest.approx(joint, rel=1e-9)


def test_weight_decay_adds_itself_once_per_weight() -> None:
    plain, decayed = (run_probe(Trace(vectors=59), tanh_net(weight_decay=w)) for w in (0.0, 0.25))
    assert decayed["trace"] == pytest.approx(plain["trace"] + 0.25 * 59)
    np.testing.assert_array_equal(decayed["loss"], plain["loss"])


def test_errors_of_mini_batches_add_in_squares_by_their_samples() -> None:
    data = {
        "done": np.array([1, 1, 1, 0]), "batch_trace": np.array([10.0, 14.0, 3.0, np.nan]),
        "batch_trace_se": np.array([1.0, 2.0, 4.0, np.nan]), "batch_square": np.array([10.0, 40.0, 20.0, np.nan]),
        "batch_square_se": np.array([1.0, 2.0, 4.0, np.nan]), "samples": np.array([8.0, 8.0, 4.0, np.nan]),
    }  # fmt: skip
    found = Trace().reduce(data)
    assert found["trace"] == pytest.approx((8 * 10 + 8 * 14 + 4 * 3) / 20)
    assert found["trace_se"] == pytest.approx(np.sqrt(8**2 * 1 + 8**2 * 4 + 4**2 * 16) / 20)
    assert found["trace_spread"] == pytest.approx(np.sqrt(8.0))  # of the two whole ones
    assert found["frobenius"] == pytest.approx(np.sqrt(480 / 20))
    assert found["frobenius_se"] == pytest.approx(found["trace_se"] / (2 * found["frobenius"]))
    assert Trace().reduce({**data, "done": np.zeros(4)}) == {}


def test_a_non_finite_mini_batch_is_stored_as_such_and_reported() -> None:
    batches = [torch.tensor([[scale, 0.0]] * 2) for scale in (1.0, float("nan"), 3.0)]
    subject = quadratic(symmetric([4.0, -1.0, 0.5, 0.25, 0.125]), batches=batches)
    found = run_probe(Trace(), subject)
    np.testing.assert_allclose(found["batch_trace"], [3.875, np.nan, 11.625])
    assert found["trace"] == pytest.approx(7.75)
    data = xr.Dataset({k: ("batch", found[k]) for k in ("batch_trace", "done")}, attrs={"probe": "trace"})
    assert headlines.numbers(data) == {"mini-batches not finite": "1"}


# --- the figure ---


def stored(traces: Sequence[float], label: str = "vit") -> xr.Dataset:
    measured = {"batch_trace": traces, "samples": np.full(len(traces), 8)}
    measured |= dict.fromkeys(("batch_trace_se", "batch_square", "batch_square_se"), np.ones(len(traces)))
    data = {name: ("batch", np.asarray(values, dtype=float)) for name, values in measured.items()}
    done = np.isfinite(traces)
    summaries = Trace().reduce({**{name: values for name, (_, values) in data.items()}, "done": done.astype(int)})
    return xr.Dataset({**data, **summaries}, {"batch": np.arange(len(traces))}, {"label": label, "probe": "trace"})


def test_the_line_lies_at_the_trace_of_all_samples_in_a_band_of_its_error() -> None:
    data = stored([3.0, 5.0, np.nan])
    data["trace_se"].attrs["n"] = 8
    ax = trace.draw(data, Figure().subplots(), look=look_of(data))
    assert [line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1] == [4.0]
    (band,) = ax.patches
    assert band.get_height() == pytest.approx(2 * 2.3646 * np.sqrt(2) / 2, rel=1e-4)  # Student, 7 degrees


@pytest.mark.parametrize(("traces", "scale"), [([3.0, 50.0], "log"), ([3.0, 5.0], "linear"), ([-3.0, 50.0], "linear")])
def test_the_axis_is_logarithmic_for_positive_traces_decades_apart(traces: list[float], scale: str) -> None:
    page = trace.page([stored(traces)], [Look("vit")])
    assert page.axes[0].get_yscale() == scale
    assert page.bbox.width == style.PAGE * page.dpi


# --- a target of the error ---


def three_batches() -> Subject:
    """Mini-batches whose Hessians are 1, 3 and 2 times the matrix of known trace."""
    return quadratic(symmetric(OUTLIERS), batches=[torch.tensor([[scale, 0.0]]) for scale in (1.0, 3.0, 2.0)])


@pytest.mark.campaign
@pytest.mark.parametrize(("method", "tol"), [("hutchinson", 0.1), ("hutch++", 0.01), ("xtrace", 0.005)])
def test_the_achieved_error_has_the_size_of_the_target(method: Method, tol: float) -> None:
    subject, truth = three_batches(), 2 * sum(OUTLIERS)
    probes = [Trace(method=method, vectors=16, tol=tol, max_vectors=4096, seed=seed) for seed in range(50)]
    found = [run_probe(probe, subject) for probe in probes]
    errors = np.array([one["trace"] / truth - 1 for one in found])
    estimated = np.array([one["trace_se"] / abs(one["trace"]) for one in found])
    assert (estimated <= tol).all()
    assert np.mean([one["within_tol"] for one in found]) == 1.0
    assert 0.7 * tol < np.sqrt((errors**2).mean()) < 1.25 * tol
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(50) + 0.2 * tol  # stopping by an estimate biases a little


@pytest.mark.slow
def test_more_vectors_are_added_until_the_target_is_met_and_no_more_than_twice_as_many() -> None:
    loose, tight = (run_probe(Trace(method="hutchinson", vectors=16, tol=t), three_batches()) for t in (0.3, 0.04))
    assert (loose["matvecs"] == 16).all()
    assert tight["trace_se"] <= 0.04 * tight["trace"]
    needed = tight["matvecs"].sum() * (tight["trace_se"] / (0.04 * tight["trace"])) ** 2
    assert needed < tight["matvecs"].sum() <= 2 * needed
    assert set(np.diff(tight["matvecs"]).tolist()) <= {0, -16}  # mini-batches in turn


def test_the_first_round_is_the_run_without_a_target() -> None:
    plain, aimed = (run_probe(Trace(vectors=8, tol=tol), tanh_net()) for tol in (0.0, 0.9))
    for name in ("batch_trace", "batch_trace_se", "samples", "loss", "matvecs", "trace", "trace_se"):
        np.testing.assert_array_equal(plain[name], aimed[name])


def test_a_cap_that_ends_the_run_before_the_target_is_said_once_and_stored(caplog: pytest.LogCaptureFixture) -> None:
    subject = three_batches()
    with caplog.at_level("INFO"):
        data = run(Trace(method="hutchinson", vectors=8, tol=0.01, max_vectors=32), subject, None).data
    assert data is not None
    (said,) = [record.message for record in caplog.records if "--max-vectors" in record.message]
    assert "above --tol 0.01, at the cap of --max-vectors 32; about --max-vectors" in said
    assert data["within_tol"] == 0
    assert data["matvecs"].values.tolist() == [32] * 3
    assert "not met" in headlines.text(headlines.numbers(data))


@pytest.mark.slow
def test_a_stopped_run_with_a_target_goes_on_as_it_would_have(tmp_path: Path) -> None:
    probe, subject, out = Trace(method="hutchinson", vectors=8, tol=0.05), three_batches(), tmp_path / "r.h5"

    def stop(finished: int, total: int) -> None:
        if finished == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(probe, subject, out, report=stop)
    outcome = run(probe, subject, out)
    whole = run(probe, subject, None).data
    assert whole is not None
    xr.testing.assert_identical(reader.result(out, outcome.group).drop_attrs(), whole.drop_attrs())


def test_rounds_with_two_backends_are_stored_with_that_of_the_first_and_never_a_third() -> None:
    probe, subject = Trace(vectors=8, tol=0.01, max_vectors=32), three_batches()
    plan = probe.plan(subject)
    data = {name: np.ones(plan.shape) for name in plan.quantities} | {"done": np.ones(plan.shape)}
    data["round_hvp"][:, 1:] = 3.0
    data["round_samples"][2, 2:] = np.nan  # rounds that were not needed
    assert np.asarray(probe.reduce(data)["hvp"]).tolist() == [1.0, 1.0, 1.0]


def test_a_mini_batch_that_is_not_finite_does_not_hold_up_the_others() -> None:
    batches = [torch.tensor([[scale, 0.0]]) for scale in (1.0, float("nan"), 3.0)]
    found = run_probe(Trace(method="hutchinson", vectors=8, tol=0.1), quadratic(symmetric(OUTLIERS), batches=batches))
    assert np.isfinite(found["batch_trace"]).tolist() == [True, False, True]
    assert found["within_tol"] == 1.0
    assert found["trace"] == pytest.approx(2 * sum(OUTLIERS), rel=0.4)


def test_params_restricts_the_trace_to_a_diagonal_block() -> None:
    subject = tanh_net(sizes=(6,))
    found = run_probe(Trace(vectors=24, params=r"^2\."), subject)  # as many as parameters: exact
    assert found["trace"] == pytest.approx(dense_hessian(subject)[-24:, -24:].trace().item(), rel=1e-9)
    with pytest.raises(ValueError, match="--params nothing matches no trainable parameter"):
        run_probe(Trace(params="nothing"), subject)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_frobenius_norm_comes_within_its_errors_without_bias(estimator: Estimator) -> None:
    matrix = symmetric(OUTLIERS)
    wanted = float(np.sum(np.square(OUTLIERS)))
    found = [estimate(estimator, matrix, 24, seed) for seed in range(40)]
    values, errors = np.array([one.square for one in found]), np.array([one.square_error for one in found])
    assert values.mean() == pytest.approx(wanted, abs=4 * values.std(ddof=1) / np.sqrt(40) + 1e-9 * wanted)
    assert 0.5 * values.std(ddof=1) < np.sqrt(np.mean(errors**2)) < 2 * values.std(ddof=1)


def test_the_norm_from_xtrace_has_a_far_smaller_error_than_the_mean_of_squared_products() -> None:
    found = {one: estimate(one, symmetric(OUTLIERS), 24) for one in (hutchinson, xtrace)}
    assert found[xtrace].square_error < 0.01 * found[hutchinson].square_error
    low_rank = estimate(xtrace, symmetric([3.0, -2.0, *[0.0] * 30]), 12)
    assert (low_rank.square, low_rank.square_error) == (pytest.approx(13.0), pytest.approx(0.0, abs=1e-6))
    whole = exact(lambda v: symmetric([3.0, -2.0]) @ v, 2, device=CPU, dtype=torch.float64)
    assert (whole.square, whole.square_error) == (pytest.approx(13.0), 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_the_frobenius_norms_of_mini_batches_are_those_of_dense_hessians(method: Method) -> None:
    subject = tanh_net(sizes=(6, 3))
    dense = np.array([dense_hessian(subject, i).square().sum().item() for i in range(2)])
    found = run_probe(Trace(vectors=40, method=method), subject)
    assert (np.abs(found["batch_square"] - dense) <= 4 * found["batch_square_se"] + 1e-9 * dense).all()
    assert found["frobenius"] == pytest.approx(
        np.sqrt(np.average(dense, weights=(6, 3))), abs=4 * found["frobenius_se"]
    )
    exactly = run_probe(Trace(vectors=subject.size, method=method), subject)
    assert exactly["batch_square"] == pytest.approx(dense)
    assert exactly["frobenius_se"] == 0.0
    rounds = run_probe(Trace(vectors=10, tol=0.9, max_vectors=20, method=method), subject)
    assert rounds["frobenius"] == pytest.approx(np.sqrt(np.average(dense, weights=(6, 3))), rel=0.5)
