"""Statistics of pairs and of groups over seeds, against SciPy, by hand, and by how often intervals hold."""

import numpy as np
import pytest
from comparing import result, seeds, trace
from scipy import stats

from landscape.options import OptionError
from landscape.plots.comparison import text as comparison_text
from landscape.plots.comparison.comparison import ALIKE, MISSING, REAL
from landscape.plots.comparison.comparison import compare_results as compare
from landscape.plots.comparison.grouping import SEED, drawn_groups, groups_of
from landscape.plots.over_seeds import grouped
from landscape.statistics.calibration import SampleScores, paired_difference
from landscape.statistics.paired import by_error, mcnemar, paired_t, unpaired
from landscape.statistics.seed_groups import hedges_g, holm, mean_interval, two_groups

RNG = np.random.default_rng(0)


def test_paired_differences_are_those_of_a_paired_t_test_alike_without_any_and_nothing_of_one_pair() -> None:
    values = RNG.normal(size=40)
    other = values + RNG.normal(0.2, 0.5, size=40)
    found, known = paired_t(values, other), stats.ttest_rel(values, other)
    ends = known.confidence_interval()
    assert (found.low, found.high, found.p) == pytest.approx((ends.low, ends.high, known.pvalue))
    assert found.value == pytest.approx(values.mean() - other.mean())
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


def test_means_over_seeds_have_the_interval_of_student_and_those_of_shares_stay_shares() -> None:
    values = RNG.normal(size=4)
    ends = stats.ttest_1samp(values, 0.0).confidence_interval()
    assert mean_interval(values) == pytest.approx((values.mean(), ends.low, ends.high))
    assert np.isnan(mean_interval(values[:3])[1])  # points only
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


@pytest.mark.parametrize(
    ("rules", "groups"),
    [
        ([r"-s\d+$"], {"sgd": 2, "adam": 1}), ([r"^(\w+)-s\d+$"], {"sgd": 2, "adam": 1}),
        (["s=sgd-*,a=adam-*"], {"s": 2, "a": 1}), (["s=sgd-*", "a=adam-*"], {"s": 2, "a": 1}),
        (["optimizer=s:sgd-*,a:adam-*"], {"s": 2, "a": 1}), (["both=sgd-*,both=adam-*"], {"both": 3}),
    ],
)  # fmt: skip
def test_groups_by_a_regular_expression_or_by_patterns(rules: list[str], groups: dict[str, int]) -> None:
    found = groups_of({name: name for name in ("sgd-s0", "sgd-s1", "adam-s0", "other")}, rules)
    assert {name: len(members) for name, members in found.members.items()} == groups
    assert found.rest == ("other",)
    assert found.factor == ("optimizer" if rules[0].startswith("optimizer") else "group")


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (["nothing"], "fits a label such as aaa"), (["("], "missing \\), unterminated subpattern"),
        (["x=a*,y=aa*"], "into x and y"), (["x=a*,y"], "got x=a\\*,y"), (["a", "b"], "one regular expression"),
    ],
)  # fmt: skip
def test_unusable_groups_are_usage_errors(rules: list[str], said: str) -> None:
    labels = {"aaa": "aaa", "a b": "a b"}
    with pytest.raises(OptionError, match=said):
        groups_of(labels, rules)


@pytest.mark.slow
def test_a_regular_expression_that_never_ends_is_stopped() -> None:
    label = "a" * 60 + "!"
    with pytest.raises(OptionError, match="matched in 5 s"):
        groups_of({label: label}, [r"(a|a)*$"])


def test_groups_over_seeds_are_judged_by_the_spread_of_seeds() -> None:
    found = compare([*seeds("x", 1.0, 1.1, 0.9), *seeds("y", 3.0, 3.2, 2.9)], group=[r"-s\d$"])
    (contrast,) = found.contrasts
    assert (contrast.verdict, contrast.favours, contrast.seeds) == (REAL, "x is flatter", (3, 3))
    assert contrast.effect is not None
    assert contrast.effect.low > 1
    assert [(of.mean.value, of.mean.n) for of in found.means] == [(pytest.approx(1.0), 3), (pytest.approx(9.1 / 3), 3)]
    wide = compare([*seeds("x", 1.0, 5.0, 3.0), *seeds("y", 3.0, 6.0, 4.0)], group=[r"-s\d$"])
    assert wide.contrasts[0].verdict == ALIKE  # although the errors of each are 0.1


def test_one_seed_says_that_seeds_are_missing() -> None:
    for values in ((1.0,), (1.0, 1.1)):
        (contrast,) = compare([*seeds("x", *values), *seeds("y", 3.0)], group=[r"-s\d$"]).contrasts
        assert contrast.verdict == f"{MISSING} (1 against {len(values)})"
        assert contrast.favours == ""
    text = comparison_text.as_text(compare([*seeds("x", 1.0), *seeds("y", 3.0)], group=[r"-s\d$"]))
    assert "Where seeds are missing, a difference is about these networks only." in text


def test_members_that_were_changed_form_a_group_of_their_own() -> None:
    dropped = [trace("x-s0", 2.0, spec={"mc_dropout": 8}), trace("x-s1", 2.1, spec={"mc_dropout": 8})]
    found = compare([*seeds("x", 1.0, 1.1), *dropped], group=[r"-s\d$"])
    assert found.sides == ("x", "x (8 dropout masks)")
    masks = [trace(f"{group}-s0", 2.0, spec={"mc_dropout": 8}) for group in "xy"]
    assert compare(masks, group=[r"-s\d$"]).sides == ("x", "y")  # all of them were changed: that is the protocol
    words = "digits test, mean of 8 dropout masks, seed 0"
    said = [one[1].assign_attrs(protocol=words) for one in (dropped[0], seeds("y", 1.0)[0])]
    found = compare([("trace/a", said[0]), ("trace/b", said[1])])
    assert found.protocols["trace"][0].words == "digits test, seed 0"  # of both


def test_every_probe_compares_the_groups_that_it_measured() -> None:
    others = [result("density", f"{name}-s{i}", {"mean": 1.0 + i, "mean_se": 0.1}) for name in "vw" for i in range(2)]
    results = [*seeds("x", 1.0, 1.1), *seeds("y", 3.0, 3.2), *seeds("z", 3.0, 3.2), *others]
    found = compare(results, group=[r"-s\d$"])
    assert len(found.sides) == 5
    pairs = {"trace": {("y", "x"), ("z", "x"), ("z", "y")}, "density": {("w", "v")}}
    for probe, known in pairs.items():
        assert {(c.first, c.second) for c in found.contrasts if c.probe == probe} == known


def test_seeds_of_a_group_are_drawn_as_their_mean_and_those_of_others_or_unfinished_ones_are_not() -> None:
    labels = ("a-s0", "a-s1", "a-s2", "b")
    depths = {"depth": ("layer", [0.0, 1.0]), "name": ("layer", ["x", "y"])}
    stored = [
        result("variance", label, {"v": ("layer", [i, i + 2.0]), "v_se": ("layer", [9.0, 9.0]), **depths})
        for i, label in enumerate(labels)
    ]
    stored.append(
        result("variance", "a-s9", {"v": ("layer", [1e9, 1e9]), "v_se": ("layer", [9.0, 9.0]), **depths}, done=0)
    )
    assert drawn_groups(labels, ()) is None  # few
    assert drawn_groups([f"epoch_{i}" for i in range(20)], ()) is None
    groups = drawn_groups([*labels, "a-s9"], [SEED])
    assert groups is not None
    (_, mean), (_, other) = grouped(stored, groups, means=["variance"])
    np.testing.assert_allclose(mean["v"], [1.0, 3.0])
    np.testing.assert_allclose(mean["v_se"], 3**-0.5)
    np.testing.assert_array_equal(mean["depth"], [0.0, 1.0])
    assert (mean.label, mean.errors_over, mean["v_se"].attrs["n"]) == ("a", "seeds", 3)
    assert mean.protocol.endswith("mean over 3 seeds")
    assert other.identical(stored[3][1])
    (_, first), _ = grouped(stored, groups)
    assert first["v"].identical(stored[0][1]["v"])
    assert first.protocol.endswith("a-s0 of 3 seeds")
    for created, value in (("2026-02-01", 7.0), ("2025-01-01", 99.0)):  # measured again: the newest counts, once
        name, again = result("variance", "a-s2", {"v": ("layer", [value] * 2), "v_se": ("layer", [9.0] * 2), **depths})
        stored.append((f"{name}{created}", again.assign_attrs(created=created)))
    (_, mean), _ = grouped(stored, groups, means=["variance"])
    np.testing.assert_allclose(mean["v"], [8 / 3, 4.0])
    assert mean.protocol.endswith("mean over 3 seeds")
    stored[1][1]["name"][0] = "z"  # another network: no mean of the two
    assert grouped(stored, groups, means=["variance"])[0][1].protocol.endswith("a-s0 of 3 seeds")
