"""Summarise scores of predictions: calibration metrics, reliability diagrams, bootstrap intervals, paired differences.

Every metric is a function of sums over samples (`sums`), so that mini-batches add up, and a bootstrap draw is one row
of a matrix product.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from landscape.statistics.intervals import percentile_interval, share_interval
from landscape.statistics.means import mean_and_standard_error

BINS = 10
EDGES = np.arange(1, BINS) / BINS  # between the bins (0, 0.1], (0.1, 0.2], ..., (0.9, 1]; the last one is "at 0.9"
METRIC_NAMES = {
    "nll": "negative log likelihood", "accuracy": "share of right classes",
    "top5": "share with the right class among the first five", "brier": "Brier score",
    "ece": "expected calibration error", "ece_signed": "signed calibration error, confidence - accuracy",
    "accuracy_90": "accuracy of the samples of confidence above 0.9",
    "uncertainty_90": "share of the wrong samples whose confidence is not above 0.9",
    "frequency_90": "share of samples of confidence above 0.9",
}  # fmt: skip
METRICS = tuple(METRIC_NAMES)
SHARES = ("accuracy", "top5", "frequency_90")  # of all samples
_COUNT, _CONFIDENCE, _CORRECT = (slice(5 + i * BINS, 5 + (i + 1) * BINS) for i in range(3))  # columns of `sums`
COLUMNS = 5 + 3 * BINS  # of `sums`
BINNED = COLUMNS - 4
MOST_DRAWS = 100_000  # of resamples, which a stored result may ask for too
Scoring: TypeAlias = Callable[[np.ndarray], Mapping[str, np.ndarray]]  # of summed rows (..., K)
_AT_ONCE = 1 << 22  # resampled indices that are held in memory at a time


@dataclass(frozen=True)
class SampleScores:
    """Scores of every sample, (N,) float64 each."""

    nll: np.ndarray  # negative log likelihood of the true class, in nats
    correct: np.ndarray  # 1 where the most probable class is the true one
    top5: np.ndarray  # 1 where the true class is among the five most probable
    brier: np.ndarray  # sum over classes of (p - y)^2
    confidence: np.ndarray  # the largest probability

    def __len__(self) -> int:
        return len(self.nll)


@dataclass(frozen=True)
class MeanScores(SampleScores):
    """Scores of samples of several rows each, labels or pixels: the means over them."""

    binned: np.ndarray  # (N, BINNED), the means of those columns of `sums` that the others do not give


@dataclass(frozen=True)
class Interval:
    """Uncertainty of an estimate: its standard error, and the ends of its 95 % interval."""

    error: float
    low: float
    high: float


def joined(parts: Sequence[SampleScores]) -> SampleScores:
    """The scores of several mini-batches as those of one."""
    columns = (np.concatenate([getattr(one, field.name) for one in parts]) for field in fields(parts[0]))
    return type(parts[0])(*columns)


def mean_scores(rows: SampleScores, sample: np.ndarray, count: int) -> MeanScores:
    """Scores of `count` samples from those of rows, each of which belongs to the sample of a number, (rows,).

    Every sample weighs the same, however many rows it has; of one without, the means are NaN.
    """
    number, of = np.bincount(sample, minlength=count), bin_of(rows.confidence)
    weights = 1 / number[sample]

    def mean(values: np.ndarray) -> np.ndarray:
        return np.where(number > 0, np.bincount(sample, weights * values, count), np.nan)

    def per_bin(values: np.ndarray) -> np.ndarray:
        return np.bincount(of * count + sample, weights * values, BINS * count).reshape(BINS, count)

    unsure = mean((rows.correct == 0) & (of < BINS - 1))
    confidence = per_bin(rows.confidence)
    binned = np.concatenate([unsure[None], per_bin(np.ones(len(rows))), confidence, per_bin(rows.correct)])
    nll, correct, top5, brier = (mean(values) for values in (rows.nll, rows.correct, rows.top5, rows.brier))
    confident = np.where(number > 0, confidence.sum(axis=0), np.nan)
    return MeanScores(nll, correct, top5, brier, confident, binned.T)


def stored_scores(data: Mapping[Any, Any], *, held_out: bool = False, scaled: bool = False) -> SampleScores:
    """The scores of all finished samples of a stored calibration result, in the order of the data.

    `held_out`: of those that the temperature was not fitted on; `scaled`: after temperature scaling.
    """
    columns, kind = [], MeanScores if "sample_binned" in data else SampleScores
    for field in fields(kind):
        after = f"sample_scaled_{field.name}"
        columns.append(np.asarray(data[after if scaled and after in data else f"sample_{field.name}"], dtype=float))
    wanted = ~np.isnan(np.asarray(data["sample_scaled_confidence" if held_out else "sample_confidence"]))
    wanted &= (np.asarray(data["done"]) == 1)[:, None]
    return kind(*(column[wanted] for column in columns))


def bin_of(confidence: np.ndarray) -> np.ndarray:
    """The bin of every confidence, 0 to 9: one at an edge belongs to the bin below, exactly 1 to the last."""
    return np.asarray(np.digitize(confidence, EDGES, right=True))


def gaps(scores: SampleScores) -> np.ndarray:
    """Per sample, what has the expected calibration error as its mean (Guo et al. 2017, equation 3), (N,).

    ECE = sum_b (n_b / n) |mean confidence - accuracy in bin b| = mean_i s(b_i) (confidence_i - correct_i), with s(b)
    the sign of the sum of bin b.
    """
    rows = sums(scores)
    gap = rows[:, _CONFIDENCE] - rows[:, _CORRECT]
    return np.asarray(gap @ np.sign(gap.sum(axis=0)))


def standard_errors(scores: SampleScores) -> dict[str, float]:
    """Standard errors over samples of the metrics that are means over them; of the ECE with its signs as given."""
    columns = {"nll": scores.nll, "accuracy": scores.correct, "top5": scores.top5, "brier": scores.brier}
    return {name: mean_and_standard_error(values)[1] for name, values in (columns | {"ece": gaps(scores)}).items()}


def sums(scores: SampleScores) -> np.ndarray:
    """What every sample adds to the sums that `metrics` takes, (N, COLUMNS).

    Columns: nll, correct, top5, brier, wrong and not above 0.9; then per bin of confidence the number of samples, their
    confidence, and how many are correct. A confidence of exactly 1 belongs to the last bin.
    """
    rows = np.zeros((len(scores), COLUMNS))
    if isinstance(scores, MeanScores):
        rows[:, :4] = np.stack([scores.nll, scores.correct, scores.top5, scores.brier], axis=1)
        rows[:, 4:] = scores.binned
        return rows
    of = bin_of(scores.confidence)
    unsure = (scores.correct == 0) & (of < BINS - 1)
    rows[:, :5] = np.stack([scores.nll, scores.correct, scores.top5, scores.brier, unsure], axis=1)
    for columns, values in ((_COUNT, 1.0), (_CONFIDENCE, scores.confidence), (_CORRECT, scores.correct)):
        rows[np.arange(len(rows)), columns.start + of] = values
    return rows


def bins(total: np.ndarray) -> dict[str, np.ndarray]:
    """Reliability diagram of summed `sums` (K): `count`, mean `confidence` and `accuracy` per bin (NaN: none)."""
    count = total[..., _COUNT]
    with np.errstate(invalid="ignore", divide="ignore"):
        confidence, accuracy = total[..., _CONFIDENCE] / count, total[..., _CORRECT] / count
    return {"count": count, "confidence": confidence, "accuracy": accuracy}


def metrics(total: np.ndarray) -> dict[str, np.ndarray]:
    """Every metric of summed `sums` (..., K), as fractions; NaN where no sample takes part.

    Expected calibration error (Guo et al. 2017, equation 3): sum over bins of share times |confidence - accuracy|;
    `ece_signed` keeps the sign, so that it is above 0 for an overconfident network. At the cut-off 0.9: `accuracy_90`
    of the samples of confidence above 0.9, `uncertainty_90` = P(confidence <= 0.9 | wrong), `frequency_90` = share of
    samples above 0.9.
    """
    count, gap = total[..., _COUNT], total[..., _CONFIDENCE] - total[..., _CORRECT]
    n = count.sum(axis=-1)
    sure = count[..., -1]
    with np.errstate(invalid="ignore", divide="ignore"):
        nll, accuracy, top5, brier = (total[..., i] / n for i in range(4))
        return {
            "nll": nll, "accuracy": accuracy, "top5": top5, "brier": brier, "ece": np.abs(gap).sum(axis=-1) / n,
            "ece_signed": gap.sum(axis=-1) / n, "accuracy_90": total[..., _CORRECT][..., -1] / sure,
            "uncertainty_90": total[..., 4] / (n - total[..., 1]), "frequency_90": sure / n,
        }  # fmt: skip


def mean_iou(overlaps: np.ndarray) -> np.ndarray:
    """Mean over the classes that occur of intersection over union, from the pixels of both per class, (..., 2, C)."""
    hits, either = overlaps[..., 0, :], overlaps[..., 1, :]
    there = either > 0
    iou = np.divide(hits, either, out=np.zeros_like(hits), where=there)
    with np.errstate(invalid="ignore"):
        return np.asarray(iou.sum(axis=-1) / there.sum(axis=-1))


def summary(scores: SampleScores) -> dict[str, float]:
    """Every metric of the samples (`metrics`)."""
    return {name: float(value) for name, value in metrics(sums(scores).sum(axis=0)).items()}


@dataclass(frozen=True)
class Resampled:
    """Scores of samples, or of blocks of dependent ones, and those of as many that are drawn with replacement."""

    rows: np.ndarray  # `sums` of every sample, or their sum over every block, (N, K)
    value: Mapping[str, np.ndarray]
    drawn: Mapping[str, np.ndarray]  # (draws,)
    seed: int

    @classmethod
    def of(cls, rows: np.ndarray, draws: int, seed: int, scores: Scoring = metrics) -> "Resampled":
        return cls(rows, scores(rows.sum(axis=0)), scores(_resampled_sums(rows, draws, seed)), seed)

    def interval(self, name: str) -> Interval:
        """The interval of a score, as `bootstrap` states it."""
        found, value = _interval(self.value[name], self.drawn[name]), float(self.value[name])
        if name in SHARES:
            ends = share_interval(value, found.error, len(self.rows))
            return Interval(found.error, *map(float, ends))
        if name != "ece" or np.isnan(found.low):
            return found
        by_chance = value <= percentile_interval(self._ece_by_chance())[1]
        low = 0.0 if by_chance else min(max(2 * value - found.high, 0.0), value)
        return Interval(found.error, low, max(2 * value - found.low, value, found.high))

    def minus(self, other: "Resampled", name: str) -> tuple[float, Interval]:
        """A score minus that of another network on the same samples, and its interval.

        Calibration errors are too large by different amounts: the ends of both intervals are joined with the
        correlation of the resamples (Zou & Donner 2008, doi:10.1002/sim.3095), or added up towards an ECE that may be
        0.
        """
        value, others = float(self.value[name]), float(other.value[name])
        with np.errstate(invalid="ignore"):  # infinite scores of both
            difference = float(self.value[name] - other.value[name])
            found = _interval(difference, self.drawn[name] - other.drawn[name])
        if name != "ece" or not found.error > 0:  # also where both are the same in every resample
            return difference, found
        mine, theirs = self.interval(name), other.interval(name)
        errors = mine.error * theirs.error
        together = float(np.cov(self.drawn[name], other.drawn[name])[0, 1]) / errors if errors else 0.0
        down = _joined(value - mine.low, theirs.high - others, together if mine.low else -1.0)
        up = _joined(mine.high - value, others - theirs.low, together if theirs.low else -1.0)
        return difference, Interval(found.error, difference - down, difference + up)

    def _ece_by_chance(self) -> np.ndarray:
        """The ECE that a calibrated network of these confidences has by chance, whose gaps have mean 0, (draws,)."""
        gap = self.rows[:, _CONFIDENCE] - self.rows[:, _CORRECT]
        generator, draws = np.random.default_rng(self.seed), len(self.drawn["ece"])
        drawn = generator.multivariate_normal(np.zeros(BINS), gap.T @ gap, draws, check_valid="ignore")
        return np.asarray(np.abs(drawn).sum(axis=1) / self.rows[:, _COUNT].sum())


def bootstrap(scores: SampleScores, *, draws: int = 1000, seed: int = 0) -> dict[str, Interval]:
    """Uncertainty of every metric by resampling samples.

    Percentile intervals, of `SHARES` Wilson's. The ECE of a finite sample is biased upwards, and that of a resample
    once more: its interval goes from the lower end that is reflected at the estimate, or from 0 where a calibrated
    network has as large an ECE in more than 2.5 %, to the larger of the upper ends, reflected or not.
    """
    resampled = Resampled.of(sums(scores), draws, seed)
    return {name: resampled.interval(name) for name in METRICS}


def _joined(one: float, other: float, correlation: float) -> float:
    """The distance of an end of a difference, from those of its parts."""
    return math.sqrt(max(one**2 + other**2 - 2 * correlation * one * other, 0.0))


def chance_ece(scores: SampleScores) -> float:
    """The mean of the ECE that a calibrated network of these confidences has by chance: at most so much is too large.

    The sum over bins of the mean of |N(0, s^2)|, s^2 the sum of the squared gaps of the bin.
    """
    rows = sums(scores)
    spread = np.sqrt(((rows[:, _CONFIDENCE] - rows[:, _CORRECT]) ** 2).sum(axis=0))
    return float(math.sqrt(2 / math.pi) * spread.sum() / len(rows))


def paired_difference(
    scores: SampleScores, other: SampleScores, *, draws: int = 1000, seed: int = 0
) -> dict[str, tuple[float, Interval]]:
    """Every metric of the first minus that of the other on the same samples, with its bootstrap uncertainty.

    Both networks are resampled together, so that what makes a sample hard for both cancels (of the ECE see
    `Resampled.minus`).

    Raises:
        ValueError: they hold different numbers of samples.
    """
    if len(scores) != len(other):
        raise ValueError(f"got {len(scores)} and {len(other)} samples, expected the same; measure on the same data")
    mine, theirs = (Resampled.of(sums(one), draws, seed) for one in (scores, other))
    return {name: mine.minus(theirs, name) for name in METRICS}


def _resampled_sums(rows: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Sums of rows (N, K) over N rows drawn with replacement, (draws, K)."""
    n, start = len(rows), 0
    total = np.zeros((draws, rows.shape[1]))
    few = n * draws <= _AT_ONCE
    parts: Iterable[np.ndarray] = _few_counts(n, draws, seed) if few else _counts(n, draws, seed)
    for counts in parts if n else ():
        with np.errstate(invalid="ignore"):  # infinite scores
            total[start : start + len(counts)] = counts @ rows
        start += len(counts)
    return total


def _counts(n: int, draws: int, seed: int) -> Iterator[np.ndarray]:
    """How often every one of n rows is drawn, (draws, n), some draws at a time."""
    generator, step = np.random.default_rng(seed), max(1, _AT_ONCE // max(1, n))
    for start in range(0, draws, step):
        size = min(step, draws - start)
        drawn = generator.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(float)


@lru_cache(maxsize=1)
def _few_counts(n: int, draws: int, seed: int) -> Sequence[np.ndarray]:
    return list(_counts(n, draws, seed))


def _interval(estimate: float | np.ndarray, draws: np.ndarray) -> Interval:
    """Interval of a metric or of a difference; NaN where the metric or all draws are undefined or infinite."""
    draws = draws[np.isfinite(draws)]
    if len(draws) < 2 or not np.isfinite(estimate):
        return Interval(np.nan, np.nan, np.nan)
    return Interval(float(draws.std(ddof=1)), *percentile_interval(draws))
