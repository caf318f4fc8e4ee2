"""Statistics of pairs and of groups over seeds, against SciPy, by hand, and by how often intervals hold."""

import numpy as np
import pytest
from scipy import stats

from landscape.statistics.calibration import SampleScores, paired_difference
from landscape.statistics.paired import by_error, mcnemar, paired_t, unpaired
from landscape.statistics.seed_groups import hedges_g, holm, mean_interval, two_groups

RNG = np.random.default_rng(0)


def test_a_paired_difference_is_that_of_a_paired_t_test() -> None:
    values = RNG.normal(size=40)
    other = values + RNG.normal(0.2, 0.5, size=40)
    found, known = paired_t(values, other), stats.ttest_rel(values, other)
    ends = known.confidence_interval()
    assert (found.low, found.high, found.p) == pytest.approx((ends.low, ends.high, known.pvalue))
    assert found.value == pytest.approx(values.mean() - other.mean())


def test_pairs_without_any_difference_are_alike_and_a_single_pair_says_nothing() -> None:
    assert paired_t(np.ones(5), np.ones(5)).p == 1.0
    assert np.isnan(paired_t(np.ones(1), np.zeros(1)).p)
    assert np.isnan(paired_t(np.array([np.inf, 1.0]), np.array([np.inf, 1.0])).p)


def test_right_answers_are_compared_by_the_exact_test_of_mcnemar() -> None:
    right = np.array([1.0] * 30 + [0.0] * 10 + [1.0] * 60)
    other = np.array([0.0] * 30 + [1.0] * 10 + [1.0] * 60)
    found = mcnemar(right, other)
    assert found.p == pytest.approx(stats.binomtest(10, 40).pvalue)
    assert found.value == pytest.approx(0.2)
    assert found.low < 0.2 < found.high
    assert mcnemar(right, right).p == 1.0


def test_errors_without_pairs_add_up_as_of_independent_estimates() -> None:
    found = unpaired((3.0, 0.3, 1e6), (2.0, 0.4, 1e6))
    assert found.p == pytest.approx(2 * stats.norm.sf(1 / 0.5), rel=1e-3)
    assert (found.low, found.high) == pytest.approx((1 - 1.96 * 0.5, 1 + 1.96 * 0.5), abs=1e-4)
    assert unpaired((1.0, 0.0, 9), (1.0, 0.0, 9)).p == 1.0
    assert np.isnan(unpaired((1.0, 0.0, 9), (2.0, 0.0, 9)).p)
    assert np.isnan(unpaired((1.0, np.nan, 9), (2.0, 0.1, 9)).p)


def test_the_bootstrap_of_a_mean_agrees_with_that_of_scipy() -> None:
    nll = np.abs(RNG.normal(size=(2, 200)))
    zeros = np.zeros(200)
    scores = [SampleScores(one, zeros, zeros, zeros, np.full(200, 0.5)) for one in nll]
    value, own = paired_difference(*scores, draws=2000)["nll"]
    known = stats.bootstrap((nll[0] - nll[1],), np.mean, n_resamples=2000, method="percentile", random_state=1)
    ends = known.confidence_interval
    assert (own.low, own.high) == pytest.approx((ends.low, ends.high), abs=0.1 * (ends.high - ends.low))
    p = 2 * stats.norm.sf(abs(value) / known.standard_error)
    assert by_error(value, own.error, 200, "", (own.low, own.high)).p == pytest.approx(p, rel=0.3)


def test_a_mean_over_seeds_has_the_interval_of_student() -> None:
    values = RNG.normal(size=4)
    ends = stats.ttest_1samp(values, 0.0).confidence_interval()
    assert mean_interval(values) == pytest.approx((values.mean(), ends.low, ends.high))
    assert np.isnan(mean_interval(values[:3])[1])  # points only


def test_a_mean_of_shares_over_seeds_stays_a_share() -> None:
    values = np.array([0.0, 0.1, 0.9, 0.2])
    mean, low, high = mean_interval(values, "share")
    assert 0 <= low < mean < high <= 1
    assert mean_interval(np.zeros(4), "share")[:2] == (0.0, 0.0)
    assert mean_interval(np.zeros(4), "share")[2] > 0.5


def test_groups_are_compared_by_the_t_test_of_two_groups() -> None:
    values, other = RNG.normal(size=3), RNG.normal(1.0, 3.0, size=5)
    found, known = two_groups(values, other), stats.ttest_ind(values, other, equal_var=False)
    ends = known.confidence_interval()
    assert (found.low, found.high, found.p) == pytest.approx((ends.low, ends.high, known.pvalue))
    assert np.isnan(two_groups(values[:1], other).p)
    assert two_groups(np.ones(3), np.ones(3)).p == 1.0
    assert np.isnan(two_groups(np.ones(3), np.zeros(3)).p)


@pytest.mark.parametrize(("shift", "sizes"), [(0.0, (3, 3)), (1.5, (3, 5)), (-4.0, (2, 8)), (60.0, (3, 3))])
def test_the_interval_of_the_effect_inverts_the_noncentral_t_distribution(shift: float, sizes: tuple[int, int]) -> None:
    values, other = RNG.normal(shift, 1.0, size=sizes[0]), RNG.normal(size=sizes[1])
    found = hedges_g(values, other)
    df, scale = sum(sizes) - 2, np.sqrt(sizes[0] * sizes[1] / sum(sizes))
    t = stats.ttest_ind(values, other).statistic
    for end, share in ((found.low, 0.975), (found.high, 0.025)):
        assert stats.nct.cdf(t, df, end * scale) == pytest.approx(share, abs=1e-4)
    assert found.value == pytest.approx((1 - 3 / (4 * df - 1)) * t / scale, rel=0.02)  # Hedges' own approximation
    for few in (values[:1], np.ones(3)):  # an effect needs two of each and some spread
        assert np.isnan(hedges_g(few, np.zeros(3)).value)


@pytest.mark.slow
def test_intervals_hold_the_truth_in_95_of_100_groups() -> None:
    rng, draws = np.random.default_rng(1), 600
    held = np.zeros(3)
    for _ in range(draws):
        values, other = rng.normal(1.0, 1.0, size=4), rng.normal(0.0, 1.0, size=4)
        mean, difference = mean_interval(values), two_groups(values, other)
        effect = hedges_g(values, other)
        held += [mean[1] < 1 < mean[2], difference.low < 1 < difference.high, effect.low < 1 < effect.high]
    share = held / draws
    assert share[0] == pytest.approx(0.95, abs=0.027)  # three standard errors of a share of 600
    assert share[1:] == pytest.approx(0.95, abs=0.027)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    found = holm([0.2, np.nan, 0.001, 0.9])
    assert np.isnan(found[1])
    assert [found[0], found[2], found[3]] == pytest.approx([0.4, 0.003, 0.9])
    assert holm([]) == []
    rng = np.random.default_rng(2)  # many tests of nothing seldom find something
    found_anything = sum(min(holm(list(rng.uniform(size=20)))) < 0.05 for _ in range(1000))
    assert found_anything < 70  # 50 are expected; without the correction 640
