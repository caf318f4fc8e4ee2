"""The Hessian probe: spectra per mini-batch, their summaries, and the options it rejects."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from analytic import (
    NETWORKS,
    convolution_net,
    dense_hessian,
    quadratic,
    run_probe,
    same_state,
    softmax_regression,
    state,
    symmetric,
    tanh_net,
)
from scipy import stats

from landscape.curvature.stopping import Which
from landscape.curvature.stored_spectrum import Scope, negative_share, positive_mean
from landscape.options import OptionError
from landscape.probes.hessian import Hessian
from landscape.probes.step import Step
from landscape.products.hvp_backends import CODES
from landscape.products.operator import Operator
from landscape.products.vectors import random_unit
from landscape.subject.subject import Subject


def _bowl(values: list[float], scales: list[float], *, weight_decay: float = 0.0) -> Subject:
    """Mini-batch i has the Hessian scales[i] A."""
    batches = [torch.tensor([[scale, 0.0]] * 2) for scale in scales]
    return quadratic(symmetric(values), batches=batches, weight_decay=weight_decay)


def _spectrum(subject: Subject, i: int) -> np.ndarray:
    values: np.ndarray = torch.linalg.eigvalsh(dense_hessian(subject, i)).numpy()
    return values


def _expected(values: np.ndarray, k: int, which: Which) -> np.ndarray:
    ends = {"LA": values[::-1][:k], "SA": values[:k], "LM": values[np.argsort(-np.abs(values))][:k]}
    return np.concatenate([ends["LA"], ends["SA"]]) if which == "both" else ends[which]


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_every_mini_batch_has_the_eigenvalues_of_its_dense_hessian(network: str) -> None:
    subject = NETWORKS[network]()
    orders: tuple[Which, ...] = ("LM", "LA", "SA", "both")
    spectra = [_spectrum(subject, i) for i in range(2)]
    for which in orders:
        found = run_probe(Hessian(top=3, which=which, tol=1e-10), subject)
        for i, values in enumerate(spectra):
            np.testing.assert_allclose(found["eigenvalue"][i], _expected(values, 3, which), rtol=1e-9, err_msg=which)
        assert found["converged"].all()
        assert (found["error"] <= 1e-10 * np.abs(found["eigenvalue"])).all()


@pytest.mark.parametrize("which", ["LM", "LA", "SA"])
def test_both_algebraic_ends_come_with_every_order(which: Which) -> None:
    found = run_probe(Hessian(top=1, which=which), _bowl([6.0, 1.0, 0.5, 0.1, -3.0], [1.0, 2.0]))
    np.testing.assert_allclose(found["largest"], [6.0, 12.0], rtol=1e-3)
    np.testing.assert_allclose(found["smallest"], [-3.0, -6.0], rtol=1e-3)
    assert (np.abs(found["largest"] - [6.0, 12.0]) <= found["largest_residual"] + 1e-12).all()
    assert (np.abs(found["smallest"] + [3.0, 6.0]) <= found["smallest_residual"] + 1e-12).all()


def test_softmax_regression_has_its_closed_form_spectrum() -> None:
    subject, matrix = softmax_regression()
    found = run_probe(Hessian(top=8, tol=1e-8), subject)
    np.testing.assert_allclose(found["eigenvalue"][0], torch.linalg.eigvalsh(matrix).flip(0)[:8], rtol=1e-10)
    assert found["smallest"][0] == pytest.approx(0.0, abs=1e-12)  # logits may all be shifted alike


def test_weight_decay_is_part_of_the_objective_and_not_of_the_loss_of_each_mini_batch() -> None:
    plain, decayed = (
        run_probe(Hessian(top=3), _bowl([4.0, 2.0, 1.0, -0.5], [1.0], weight_decay=w)) for w in (0.0, 0.5)
    )
    np.testing.assert_allclose(decayed["eigenvalue"], plain["eigenvalue"] + 0.5, rtol=1e-9)
    assert decayed["loss"] == plain["loss"]
    subject = tanh_net()
    assert run_probe(Hessian(top=1), subject)["loss"] == pytest.approx([subject.loss(i).item() for i in range(2)])


@pytest.mark.parametrize("probe", [Hessian(), Step(optimizer="sgd", optimizer_arg=("lr=0.1",))])
@pytest.mark.parametrize(("sizes", "used"), [((6, 6, 2), 2), ((6, 6, 6), 3), ((4,), 1), ((6, 3, 8), 3), ((6, 3, 6), 3)])
def test_a_last_smaller_mini_batch_alone_is_left_out_of_several(probe: Any, sizes: tuple[int, ...], used: int) -> None:
    assert probe.plan(tanh_net(sizes=sizes)).shape == (used,)


def test_no_more_mini_batches_and_eigenvalues_are_asked_for_than_there_are() -> None:
    subject = tanh_net(sizes=(6, 6, 6, 2))
    assert Hessian(batches=2).plan(subject).shape == (2,)
    with pytest.raises(ValueError, match="--batches 4 exceeds the 3 whole mini-batches"):
        Hessian(batches=4).plan(subject)
    with pytest.raises(ValueError, match="--top 60 exceeds the 59 parameters"):
        Hessian(top=60).plan(tanh_net())
    found = run_probe(Hessian(top=3, tol=1e-6), _bowl([2.0, -1.0, 0.5], [1.0]))
    np.testing.assert_allclose(found["eigenvalue"], [[2.0, -1.0, 0.5]], rtol=1e-12)


def test_params_restricts_the_hessian_to_a_diagonal_block_of_the_whole_or_of_every_layer() -> None:
    subject = tanh_net()
    found = run_probe(Hessian(top=2, params=r"^2\.", tol=1e-10), subject)
    block = dense_hessian(subject)[-24:, -24:]  # weight (3, 7) and bias (3,) of the last layer
    np.testing.assert_allclose(found["eigenvalue"][0], torch.linalg.eigvalsh(block).flip(0)[:2], rtol=1e-9)
    for wrong, similar in (("nothing", r"0\.weight"), (r"2\.wieght", r"2\.weight")):
        with pytest.raises(ValueError, match=rf"--params \S+ matches no trainable parameter; .* {similar}"):
            Hessian(params=wrong).plan(subject)
    found = run_probe(Hessian(top=2, per_layer=True, params="weight"), tanh_net())
    assert found["size"].tolist() == [28, 21]


def test_a_fully_frozen_model_and_batch_norm_in_training_mode_are_rejected_and_left_unchanged() -> None:
    subject = tanh_net()
    subject.model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter, all are frozen"):
        Hessian().plan(subject)
    subject = convolution_net()
    subject.model.train()
    kept = state(subject.model)
    with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\) is in training mode.*model\.eval\(\)"):
        run_probe(Hessian(top=2), subject)
    assert same_state(subject.model, kept)


@pytest.mark.parametrize("scope", ["batch", "dataset"])
def test_per_layer_has_the_spectrum_of_every_diagonal_block(scope: Scope) -> None:
    subject = tanh_net(sizes=(6, 6), weight_decay=0.1)
    found = run_probe(Hessian(top=25, per_layer=True, tol=1e-8, scope=scope, max_products=60), subject)
    assert found["name"].tolist() == ["0", "2"]
    assert found["size"].tolist() == [35, 24]
    matrices = [dense_hessian(subject, i) + 0.1 * torch.eye(59, dtype=torch.float64) for i in range(2)]
    for i, matrix in enumerate(matrices if scope == "batch" else [sum(matrices) / 2]):
        for g, block in enumerate((matrix[:35, :35], matrix[35:, 35:])):
            values = torch.linalg.eigvalsh(block).numpy()
            expected = values[np.argsort(-np.abs(values))][:25]
            got = found["eigenvalue"][i, g]
            np.testing.assert_allclose(got[: len(expected)], expected, atol=1e-10)
            assert np.isnan(got[len(expected) :]).all()  # the smaller layer has 24
    assert found["nep"].shape == (2,)
    for g in range(2):
        values = found["eigenvalue"][:, g]
        assert found["nep"][g] == pytest.approx((values < 0).sum() / np.isfinite(values).sum())
    with pytest.raises(ValueError, match="--top 36 exceeds the 35 parameters of the largest layer"):
        Hessian(top=36, per_layer=True).plan(subject)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's forward mode
def test_mini_batches_side_by_side_have_the_numbers_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.products.hvp_backends.mini_batches_per_product", lambda *_: 2)
    subject = tanh_net(sizes=(6, 6, 6))  # one full set and an incomplete one
    for verify in (False, True):
        options: dict[str, Any] = {"top": 3, "tol": 1e-6, "verify": verify, "eigenvectors": True}
        together, alone = (run_probe(Hessian(**options, hvp=hvp), subject) for hvp in ("traced", "double-backward"))
        assert (together["hvp"] == CODES.index("traced")).all()
        assert together["done"].all()
        for name in ("eigenvalue", "loss", "largest", "smallest", "eigenvector"):
            np.testing.assert_allclose(together[name], alone[name], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(together["matvecs"], alone["matvecs"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_non_finite_mini_batch_does_not_affect_those_side_by_side_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.products.hvp_backends.mini_batches_per_product", lambda *_: 3)
    subject = _bowl([4.0, 2.0, 1.0], [1.0, float("inf"), 2.0])
    found = run_probe(Hessian(top=2, hvp="traced"), subject)
    np.testing.assert_allclose(found["eigenvalue"][[0, 2]], [[4, 2], [8, 4]], rtol=1e-6)
    assert np.isnan(found["eigenvalue"][1]).all()


def test_the_nodes_of_every_search_are_a_density_of_its_own() -> None:
    subject = tanh_net()
    found = run_probe(Hessian(top=3, tol=1e-6, verify=False), subject)
    for i in range(2):
        nodes, weights = found["nodes"][i], found["weights"][i]
        count = int(found["matvecs"][i])
        assert np.isfinite(nodes).sum() == count
        assert np.nansum(weights) == pytest.approx(1.0)
        start = random_unit(59, Hessian().plan(subject).unit((i,)).seed(0), device=subject.device, dtype=subject.dtype)
        moment = (start @ dense_hessian(subject, i) @ start).item()
        assert np.nansum(nodes * weights) == pytest.approx(moment, rel=1e-9)


def test_the_estimated_error_is_never_above_the_bound_and_holds_here() -> None:
    subject = tanh_net()
    found = run_probe(Hessian(top=3, tol=1e-2), subject)
    assert (found["error"] <= found["residual"]).all()
    for i in range(2):
        assert (
            np.abs(found["eigenvalue"][i] - _expected(_spectrum(subject, i), 3, "LM")) <= 3 * found["error"][i] + 1e-12
        ).all()


@pytest.mark.parametrize("operator", ["hessian", "ggn", "fisher"])
def test_the_scope_of_a_data_set_weighs_mini_batches_by_their_samples(operator: Operator) -> None:
    parts = tanh_net(sizes=(16, 4), weight_decay=0.1)
    inputs, targets = (torch.cat(both) for both in zip(*parts.batches, strict=True))
    whole = Subject(parts.model, [(inputs, targets)], weight_decay=0.1)
    found = run_probe(Hessian(top=3, tol=1e-10, scope="dataset", operator=operator), parts)
    expected = run_probe(Hessian(top=3, tol=1e-10, operator=operator), whole)
    assert found["eigenvalue"].shape == (1, 3)
    for name in ("eigenvalue", "loss"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9)
    if operator == "hessian":
        matrix = 0.8 * dense_hessian(parts, 0) + 0.2 * dense_hessian(parts, 1)
        values = np.sort(np.abs(torch.linalg.eigvalsh(matrix).numpy() + 0.1))[::-1]
        np.testing.assert_allclose(np.abs(found["eigenvalue"][0]), values[:3], rtol=1e-9)


def test_a_data_set_may_be_its_first_mini_batches() -> None:
    subject = tanh_net(sizes=(6, 6, 6, 2))
    found = run_probe(Hessian(top=2, scope="dataset", batches=1, tol=1e-10), subject)
    expected = run_probe(Hessian(top=2, batches=1, tol=1e-10), subject)
    np.testing.assert_allclose(found["eigenvalue"], expected["eigenvalue"], rtol=1e-9)
    with pytest.raises(ValueError, match="--batches 5 exceeds the 4 mini-batches"):
        Hessian(scope="dataset", batches=5).plan(subject)


@pytest.mark.parametrize("which", ["LM", "both"])
def test_stored_eigenvectors_are_those_of_the_dense_hessian(which: Which) -> None:
    subject = tanh_net()
    found = run_probe(Hessian(top=2, which=which, tol_residual=1e-8, eigenvectors=True), subject)
    assert found["eigenvector"].shape == (2, len(found["rank"]), subject.size)
    for i in range(2):
        vectors, values = found["eigenvector"][i], found["eigenvalue"][i]
        np.testing.assert_allclose(vectors @ dense_hessian(subject, i).numpy(), values[:, None] * vectors, atol=1e-7)
        np.testing.assert_allclose(vectors @ vectors.T, np.eye(len(values)), atol=1e-9)
    assert "eigenvector" not in run_probe(Hessian(top=2), subject)


def test_more_eigenvectors_than_a_file_can_hold_are_rejected_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.curvature.stored_spectrum.LARGEST_RESULT", 8 * 2 * 3 * 59 - 1)
    with pytest.raises(ValueError, match=r"--eigenvectors would store .* fewer --batches"):
        Hessian(top=3, eigenvectors=True).plan(tanh_net())
    Hessian(top=2, eigenvectors=True).plan(tanh_net())


def test_verifying_finds_every_copy_and_counts_those_missed() -> None:
    values = [5.0, 5.0, 4.0, 3.0, -3.0, -3.0, 1.0] + [0.001 * i for i in range(40)]
    subject = _bowl(values, [1.0, 2.0])
    plain = run_probe(Hessian(top=2, ends=1.0, verify=False), subject)
    np.testing.assert_allclose(plain["eigenvalue"], [[5, 4], [10, 8]], rtol=1e-5)
    found = run_probe(Hessian(top=2, ends=1.0, eigenvectors=True), subject)
    np.testing.assert_allclose(found["eigenvalue"], [[5, 5], [10, 10]], rtol=1e-5)
    assert found["missed"].tolist() == [1, 1]
    assert (found["matvecs"] > plain["matvecs"]).all()
    assert found["converged"].all()
    assert np.abs(found["eigenvector"][0] @ found["eigenvector"][0].T - np.eye(2)).max() < 1e-6
    simple, plain = (run_probe(Hessian(top=3, verify=verify), tanh_net()) for verify in (True, False))
    assert simple["missed"].tolist() == [0, 0]
    np.testing.assert_array_equal(simple["eigenvalue"], plain["eigenvalue"])


@pytest.mark.parametrize("which", ["LM", "LA", "both"])
def test_a_linear_layer_with_squared_error_has_every_eigenvalue_once_per_output(which: Which) -> None:
    """H = 2 / (n outputs) X'X for every output: five copies, of which one start vector sees one."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5, bias=False).double()
    batches = [(torch.randn(8, 6).double(), torch.randn(8, 5).double()) for _ in range(2)]
    subject = Subject(layer.eval(), batches, losses=lambda y, t: (y - t).square().mean(1))
    found = run_probe(Hessian(top=7, which=which, kinks="single", seed=1), subject)
    for i, (x, _) in enumerate(batches):
        exact = np.sort(np.repeat(np.linalg.eigvalsh((2 / (8 * 5)) * (x.T @ x)), 5))
        ends = {"LM": exact[::-1][:7], "LA": exact[::-1][:7], "both": np.append(exact[::-1][:7], exact[:7])}
        np.testing.assert_allclose(found["eigenvalue"][i], ends[which], rtol=1e-4)
    assert found["converged"].all()
    assert (found["missed"] > 0).any()


def test_nep_and_ape_are_those_of_all_values_of_all_mini_batches_and_without_a_positive_one_there_is_no_mean() -> None:
    found = run_probe(Hessian(top=3), _bowl([4.0, 2.0, -3.0, 0.1], [1.0, 2.0, 1.0, 2.0]))  # 4, -3, 2 and 8, -6, 4
    assert found["nep"] == pytest.approx(1 / 3)
    assert found["ape"] == pytest.approx((4 + 2 + 8 + 4) / 4)
    assert found["mean_largest"] == pytest.approx(6.0)
    assert found["ape_se"] == pytest.approx(np.std([3, 6, 3, 6], ddof=1) / 2)  # every mini-batch has two positive ones
    assert found["nep_low"] <= found["nep"] <= found["nep_high"]
    half = stats.t.ppf(0.975, 3) * found["ape_se"] / found["ape"]
    assert (found["ape_low"], found["ape_high"]) == pytest.approx((4.5 / math.exp(half), 4.5 * math.exp(half)))
    found = run_probe(Hessian(top=2), _bowl([-1.0, -2.0, -5.0], [1.0, 1.0]))
    assert found["nep"] == 1.0
    assert np.isnan(found["ape"])
    assert np.isnan(found["ape_low"])
    assert negative_share(np.array([0.0, 1.0])) == 0.0
    assert np.isnan(positive_mean(np.zeros(3)))


@pytest.mark.parametrize("operator", ["ggn", "fisher"])
def test_eigenvalues_that_are_rounding_have_no_sign(operator: Operator) -> None:
    subject = tanh_net(sizes=(2, 2, 2))
    subject.model.float()
    found = run_probe(Hessian(top=8, operator=operator), subject)
    assert found["nep"] == 0.0  # positive semi-definite, of a rank below 8
    known = found["eigenvalue"][found["eigenvalue"] > 1e-5]
    assert len(known) < 24
    assert found["ape"] == pytest.approx(known.mean())


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_non_finite_mini_batch_is_stored_as_such_and_affects_no_other(scale: float, verify: bool) -> None:
    found = run_probe(Hessian(top=2, verify=verify, eigenvectors=True), _bowl([4.0, -3.0, 2.0], [1.0, scale, 2.0]))
    np.testing.assert_allclose(found["eigenvalue"], np.array([[4, -3], [np.nan, np.nan], [8, -6]]), rtol=1e-6)
    assert found["converged"].tolist() == [[1, 1], [0, 0], [1, 1]]
    for name in ("residual", "eigenvector", "largest", *(["missed"] if verify else [])):
        assert np.isnan(found[name][1]).all()
    assert found["done"].tolist() == [1, 1, 1]
    assert found["ape"] == pytest.approx(6.0)


def test_a_half_finished_result_is_summarised_from_its_finished_mini_batches() -> None:
    found = run_probe(Hessian(top=2), _bowl([4.0, -3.0, 2.0], [1.0, 100.0]), units=1)
    assert (found["nep"], found["ape"]) == (0.5, pytest.approx(4.0))
    assert run_probe(Hessian(top=2), _bowl([4.0, -3.0, 2.0], [1.0]), units=0).keys().isdisjoint({"nep", "ape"})


def test_products_are_counted_and_capped() -> None:
    spread = [1.0 + 0.01 * i for i in range(60)]
    found = run_probe(Hessian(top=3, max_products=7), _bowl(spread, [1.0]))
    assert found["matvecs"] == [7]
    assert not found["converged"].any()
    assert run_probe(Hessian(top=3, max_products=2), _bowl(spread, [1.0]))["matvecs"] == [4]  # for three values
    outliers = [20.0, -11.0, 7.0, 5.0, 3.0] + [0.01 * i for i in range(40)]
    assert run_probe(Hessian(top=5), _bowl(outliers, [1.0, 1.0]))["matvecs"].max() <= 12


@pytest.mark.parametrize("other", [{"hvp": "traced"}, {"eigenvectors": True}, {"engine": "pyhessian"}])
def test_per_layer_excludes_what_it_cannot_do(other: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=rf"--{next(iter(other))}.*--per-layer|--per-layer.*--{next(iter(other))}"):
        Hessian(per_layer=True, **other)
