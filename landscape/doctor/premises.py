"""Rules of what numbers rest on: samples, training data, mini-batches, and whether accuracies say anything."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy.special import bdtr, bdtrc, ndtri, stdtrit

from landscape.doctor import finding
from landscape.options import counted
from landscape.statistics.intervals import NORMAL, quantile
from landscape.statistics.means import mean_and_standard_error
from landscape.statistics.rounding import plus_minus

LEVEL = 0.01  # significance level of the test against guessing, that of the check after loading
LEAST_ERRORS = NORMAL**2  # below it, the half-width of the 95 % interval exceeds the number of errors
STATED = ("loss_increase", "value", "effective_rank")  # of probes that store no loss; single ones may be undefined
SAMPLES_FOR_GUESS = 2  # a single sample decides nothing


def at_chance(result: finding.Result) -> Iterator[finding.Finding]:
    """The accuracy is no better than guessing among the classes: binomial test at 1 %, as after loading a checkpoint.

    An untrained network (epoch 0) is at chance by definition: a note.
    """
    accuracy, classes, n = intact_accuracy(result), result.classes, result.samples
    if not (np.isfinite(accuracy) and classes > 1 and n >= SAMPLES_FOR_GUESS):
        return
    hits = round(accuracy * n)
    p_value = float(bdtrc(hits - 1, n, 1 / classes))
    if p_value >= LEVEL:
        yield _knows_nothing(
            result, "wrong",
            f"the accuracy {accuracy:.3f} on {n} samples is no better than guessing among {classes} classes "
            f"(binomial test, p = {p_value:.2g})",
        )  # fmt: skip


def _knows_nothing(result: finding.Result, severity: finding.Severity, text: str, more: str = "") -> finding.Finding:
    """The finding of a network that guesses, a note where its weights are initial ones; `more`: options to look on."""
    untrained = result.attribute("epoch", math.nan) == 0
    trained = f"that the weights are trained ({result.attribute('weights_taken') or 'their origin is not stored'})"
    check = f"check {trained} and that --mean, --std and the class order are those of training"
    check += f"; run: {result.evaluation}{more}" if result.spec.get("checkpoint") else ""
    remedy = "these are initial weights: expected" if untrained else check
    return finding.found("at-chance", "note" if untrained else severity, result, text, remedy)


def loss_at_chance(result: finding.Result) -> Iterator[finding.Finding]:
    """The mean loss of the mini-batches is not below that of guessing, log K.

    Of results that store no accuracy. The mean over n mini-batches is compared by Student's t at 1 %.
    """
    if result.probe not in ("hessian", "trace") or not result.classes or result.spec.get("loss"):
        return
    loss = result.values("loss").ravel()
    loss = loss[np.isfinite(loss)]
    chance = math.log(result.classes)
    if not loss.size:
        return
    mean, error = mean_and_standard_error(loss)
    margin = stdtrit(len(loss) - 1, 1 - LEVEL) * error if len(loss) > 1 else 0.0
    among = f" ± {margin:.2g} over {len(loss)} mini-batches" if margin else ""
    if mean + margin >= chance and mean > chance / 2:
        yield _knows_nothing(
            result, "suspicious",
            f"the mean loss {mean:.3g}{among} is not certainly below that of "
            f"guessing, log {result.classes} = {chance:.3g}: these may be eigenvalues of a network that knows nothing",
            " --split train",
        )  # fmt: skip


def loss_above_guessing(result: finding.Result) -> Iterator[finding.Finding]:
    """The training loss at the checkpoint is above that of guessing, log K, though its accuracy is better.

    Training lowers this loss, so that other inputs than in training are likely, such as another mean and std. One-sided
    at 1 %. Of test samples nothing is said: an overconfident network may honestly lose more there than by guessing.
    """
    grid, chance = finding.Grid.around(result), math.log(result.classes or 1)
    if grid is None or not grid.has_centre or not chance or result.spec.get("loss"):
        return
    if result.spec.get("split") == "test" or any(at_chance(result)):
        return
    if grid.at_centre - ndtri(1 - LEVEL) * grid.loss_se > chance:
        half = float(quantile(result.samples)) * grid.loss_se
        yield _knows_nothing(
            result, "suspicious",
            f"the training loss at the checkpoint, {plus_minus(grid.at_centre, half)}, is above that of guessing, "
            f"log {result.classes} = {chance:.3g}", " --split train",
        )  # fmt: skip


def loss_not_finite(result: finding.Result) -> Iterator[finding.Finding]:
    """The network's loss, or every number that a probe states, is infinite or not a number.

    Surfaces, lines and spectra have rules of their own: there single points may overflow. Of barriers, only the ends of
    the lines are asked for, the networks themselves. A summary of an interrupted run is NaN where no unit of it is
    finished.
    """
    if result.probe in ("surface", "line", "convexity", "hessian"):
        return
    if result.probe == "barriers":
        result = replace(result, data=result.data.isel(t=[0, -1], missing_dims="ignore"))
    name = next((name for name in ("loss", *STATED) if result.values(name).size), "")
    values = result.values(name)
    if not result.complete:
        done = result.data["done"]
        by_unit = result.data[name].dims[: done.ndim] == done.dims if name else False
        values = values[done.values == 1] if by_unit else values[~np.isnan(values)]
    lost = ~np.isfinite(values)
    if lost.any() and (lost.all() or name not in STATED):
        yield finding.found(
            "not-finite", "wrong", result, f"{name.replace('_', ' ')}: {int(lost.sum())} of {lost.size} are not finite",
            finding.look_at_inputs(result), cause=result.probe,
        )  # fmt: skip


def too_few_samples(results: Sequence[finding.Result]) -> Iterator[finding.Finding]:
    """Accuracies of several checkpoints that differ, but not by more than their errors, on few errors each.

    Two accuracies differ where the 95 % interval of their difference excludes zero. Where they do not, the
    samples are too few for any statement if a network made fewer than `LEAST_ERRORS` errors (or was right as rarely):
    then even its own error rate is not told apart from zero. Otherwise the networks may be equal, and nothing is said.
    Of every network the accuracy on the most samples counts: a probe on few was not asked for it. The number of
    samples suggested is that at which this difference exceeds its error.
    """
    known = [(r, intact_accuracy(r)) for r in results if r.samples and np.isfinite(intact_accuracy(r))]
    most: dict[tuple[str, Any], int] = {}
    for r, _ in known:
        key = r.label, r.attribute("data")
        most[key] = max(r.samples, most.get(key, 0))
    known = [(r, a) for r, a in known if r.samples == most[r.label, r.attribute("data")]]
    stated: dict[tuple[Any, ...], dict[tuple[str, float], finding.Result]] = defaultdict(
        dict
    )  # each by one of its probes
    for r, a in known:
        stated[r.attribute("data"), r.spec.get("split")].setdefault((r.label, a), r)
    for (label, a), one in (item for alike in stated.values() for item in alike.items()):
        if min(a, 1 - a) * one.samples >= LEAST_ERRORS:
            continue
        for (its, b), other in stated[one.attribute("data"), one.spec.get("split")].items():
            if label == its or a == b:
                continue
            error = math.sqrt(a * (1 - a) / one.samples + b * (1 - b) / other.samples)
            error = max(error, 1 / min(one.samples, other.samples))  # an accuracy of 1 has an error too
            if abs(a - b) < NORMAL * error:
                errors = round(min(a, 1 - a) * one.samples)
                what = counted(errors, "error" if a > 0.5 else "right answer")
                yield finding.found(
                    "too-few-samples", "suspicious", [one, other],
                    f"{one.label} {a:.3f} and {other.label} {b:.3f} on {one.samples} samples are not told apart, and "
                    f"{one.label} has {what}",
                    finding.more_samples(one, NORMAL * error / abs(a - b)),
                )  # fmt: skip
                return


def few_per_class(result: finding.Result) -> Iterator[finding.Finding]:
    """Fewer than five samples per class on average: a statement about the classes rests on a handful of each.

    Five is the least expected count at which the usual approximations for shares hold (Cochran 1954).
    """
    measured = np.isfinite(intact_accuracy(result)) or result.probe in ("fourier", "variance", "similarity")
    if measured and result.classes > 1 and 0 < result.samples < 5 * result.classes:
        yield finding.found(
            "too-few-samples", "suspicious", result,
            f"{result.samples} samples of {result.classes} classes are fewer than five per class",
            finding.more_samples(result, math.sqrt(10 * result.classes / result.samples)),
        )  # fmt: skip


def intact_accuracy(result: finding.Result) -> float:
    """The accuracy of the unchanged network, wherever a probe stores it; NaN where it does not."""
    for name in ("intact_accuracy", "clean_accuracy"):
        if name in result.data.attrs:
            return float(result.attribute(name))
    own = finding.at_weights(result, "accuracy")
    return result.number("accuracy") if math.isnan(own) else own


REPEATED = 0.05  # share of repeated samples above which errors are too small by more than they are known
APART = 0.05  # difference of two accuracies that more than another machine or precision makes
LARGER = 1.5  # times the stated test loss, above which no training loss of the same network lies
CONFIDENT = 0.25  # mean confidence minus accuracy: more than networks are overconfident by on data like their own
SHARED = 2  # digests in two sketches; one may be a picture that both splits of a data set hold


def repeated_samples(result: finding.Result) -> Iterator[finding.Finding]:
    """Samples whose inputs equal those of others: their number, and with it every error, is overstated.

    With a share r of repetitions, errors over samples are too small by a factor of sqrt(1 - r).
    """
    repeated, samples = int(result.attribute("samples_repeated", 0)), result.samples
    if repeated > REPEATED * samples > 0:
        yield finding.found(
            "repeated-samples", "suspicious", result,
            f"{repeated} of {samples} samples are copies of others: errors over samples are too small by a factor of "
            f"up to {math.sqrt(samples / (samples - repeated)) if repeated < samples else math.inf:.2g}",
            f"give --data every sample once, or --samples {samples - repeated} if there are no more",
        )  # fmt: skip


def mini_batch(result: finding.Result) -> Iterator[finding.Finding]:
    """Outputs change with the other samples of the mini-batch: batch norm in training mode, in code of the user's own.

    Such a network hardly notices the scale of its weights, so that its surface looks far flatter than it is.
    """
    if said := str(result.attribute("mini_batch")):
        yield finding.found(
            "mini-batch", "wrong", result, f"{said}: the forward pass uses statistics of the mini-batch",
            "switch normalisation and the like to evaluation mode in the model's own code (training=False, "
            "track_running_stats=True), and measure again with --overwrite",
        )  # fmt: skip


def contradicts_checkpoint(result: finding.Result) -> Iterator[finding.Finding]:
    """The accuracy, or where none is stored the training loss, is not what the checkpoint has of its own test split.

    A lower accuracy (binomial test at 1 %, and by 5 points): other inputs, targets or classes than in training. A
    higher one on the test split: samples of the training split. Networks that an option changes are left out.
    """
    stated, spec = float(result.attribute("stated_accuracy", math.nan)), result.spec
    changed = any(spec.get(name) for name in ("mc_dropout", "smooth", "augment", "loss", "model"))
    if changed or result.attribute("smoothing") or spec.get("weights", "raw") != "raw":
        return
    accuracy, n = intact_accuracy(result), result.samples
    words, look = "", f"; see: {result.evaluation}"
    cause = "check that --mean, --std, the order of the classes and the targets are those of training"
    if np.isfinite(accuracy) and np.isfinite(stated) and n:
        hits = round(accuracy * n)
        words = f"the accuracy {accuracy:.3f} on {n} samples, and its checkpoint states {stated:.3f} on test samples"
        if stated - accuracy > APART and bdtr(hits, n, stated) < LEVEL:
            yield finding.found("contradicts-checkpoint", "suspicious", result, words, cause + look)
        elif spec.get("split") == "test" and accuracy - stated > APART and bdtrc(hits - 1, n, stated) < LEVEL:
            cause = "check that the test split of the data holds no samples of training"
            yield finding.found("contradicts-checkpoint", "suspicious", result, words, cause + look)
        return
    (loss, error), stated = mean_and_standard_error(_losses(result)), float(result.attribute("stated_loss", math.nan))
    if loss - NORMAL * np.nan_to_num(error) > LARGER * stated:
        words = f"the training loss {loss:.3g}, and its checkpoint states {stated:.3g} on test samples"
        yield finding.found("contradicts-checkpoint", "suspicious", result, words, cause + look)


def _losses(result: finding.Result) -> np.ndarray:
    """The losses of the mini-batches of the training split, or the one at the weights; NaN where none is stored."""
    if result.spec.get("split") != "train":
        return np.array([math.nan])
    loss = result.values("loss") if result.probe in ("hessian", "trace", "step") else np.array([])
    known = loss[np.isfinite(loss)] if loss.ndim == 1 else np.array([])
    return known if known.size else np.array([finding.at_weights(result, "loss")])


def overconfident(result: finding.Result) -> Iterator[finding.Finding]:
    """Far more confident than right, by 25 points: targets or classes are likely not those of training.

    Overconfidence on data like those of training is 0 to 20 points (Guo et al. 2017, Table 1).
    """
    excess = result.number("ece_signed")
    if result.probe == "calibration" and excess > CONFIDENT:
        yield finding.found(
            "overconfident", "suspicious", result,
            f"the mean confidence exceeds the accuracy by {excess:.2f}, more than overconfidence explains",
            f"check the targets, the order of the classes and the normalisation: {result.evaluation}",
        )  # fmt: skip


def leaked_test(results: Sequence[finding.Result]) -> Iterator[finding.Finding]:
    """The test split shares samples with the training split: what is called a test is none."""
    known: dict[tuple[str, str], dict[str, finding.Result]] = defaultdict(dict)
    for result in results:
        if sketch := str(result.attribute("samples_sketch")):
            known[str(result.attribute("data")), str(result.spec.get("split"))].setdefault(sketch, result)
    for (data, split), sketches in known.items():
        for one, a in sketches.items() if split == "train" else ():
            for other, b in known.get((data, "test"), {}).items():
                if len({*one.split()} & {*other.split()}) >= SHARED:
                    yield finding.found(
                        "leaked-test", "wrong", [a, b],
                        f"samples of the test split of {data} are also samples of its training split",
                        "give --data a test split of other samples, and measure the test results again with "
                        "--overwrite",
                    )  # fmt: skip
                    return


def mixed_seeds(results: Sequence[finding.Result]) -> Iterator[finding.Finding]:
    """Random directions of other seeds for other networks: part of what the figure shows is the draw of directions.

    With one seed, networks of one architecture share the draw; over several seeds, `--directions N` shows its spread.
    """
    seeds: dict[tuple[str, str], dict[int, finding.Result]] = defaultdict(dict)
    for result in results:
        if "random" in (result.parameters.get("plane"), result.parameters.get("along")):
            seed = int(result.parameters.get("seed") or 0)
            seeds[result.probe, result.label].setdefault(seed, result)
    for (one, other), (a, b) in (([*pair], [seeds[key] for key in pair]) for pair in combinations(seeds, 2)):
        if one[0] == other[0] and not a.keys() & b.keys():
            first, second = next(iter(a)), next(iter(b))
            yield finding.found(
                "mixed-seeds", "suspicious", [a[first], b[second]],
                f"the random directions of {one[1]} are of seed {first} and those of {other[1]} of seed {second}",
                finding.measure_again(b[second], "measure both with one --seed", seed=first),
            )  # fmt: skip
            return
