"""Rules of what numbers rest on: samples that repeat or were trained on, and passes that depend on the mini-batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from scipy.special import bdtr, bdtrc

from landscape.doctor.accuracy import LEVEL, intact_accuracy
from landscape.doctor.finding import Finding, Result, at_weights, found, measure_again
from landscape.statistics.intervals import NORMAL

REPEATED = 0.05  # share of repeated samples above which errors are too small by more than they are known
APART = 0.05  # difference of two accuracies that more than another machine or precision makes
LARGER = 1.5  # times the stated test loss, above which no training loss of the same network lies
CONFIDENT = 0.25  # mean confidence minus accuracy: more than networks are overconfident by on data like their own
SHARED = 2  # digests in two sketches; one may be a picture that both splits of a data set hold


def repeated_samples(result: Result) -> Iterator[Finding]:
    """Samples whose inputs equal those of others: their number, and with it every error, is overstated.

    With a share r of repetitions, errors over samples are too small by a factor of sqrt(1 - r).
    """
    repeated, samples = int(result.attribute("samples_repeated", 0)), result.samples
    if repeated > REPEATED * samples > 0:
        yield found(
            "repeated-samples", "suspicious", result,
            f"{repeated} of {samples} samples are copies of others: errors over samples are too small by a factor of "
            f"up to {math.sqrt(samples / (samples - repeated)) if repeated < samples else math.inf:.2g}",
            f"give --data every sample once, or --samples {samples - repeated} if there are no more",
        )  # fmt: skip


def mini_batch(result: Result) -> Iterator[Finding]:
    """Outputs change with the other samples of the mini-batch: batch norm in training mode, in code of the user's own.

    Such a network hardly notices the scale of its weights, so that its surface looks far flatter than it is.
    """
    if said := str(result.attribute("mini_batch")):
        yield found(
            "mini-batch", "wrong", result, f"{said}: the forward pass uses statistics of the mini-batch",
            "switch normalisation and the like to evaluation mode in the model's own code (training=False, "
            "track_running_stats=True), and measure again with --overwrite",
        )  # fmt: skip


def contradicts_checkpoint(result: Result) -> Iterator[Finding]:
    """The accuracy, or where none is stored the training loss, is not what the checkpoint has of its own test split.

    A lower accuracy (binomial test at 1 %, and by 5 points): other inputs, targets or classes than in training. A
    higher one on the test split: samples of the training split. Networks that an option changes are left out.
    """
    stated, spec = float(result.attribute("stated_accuracy", math.nan)), result.spec
    changed = any(spec.get(name) for name in ("mc_dropout", "smooth", "augment", "loss", "model"))
    if changed or result.attribute("smoothing") or spec.get("weights", "raw") != "raw":
        return
    accuracy, n = intact_accuracy(result), result.samples
    words, look = "", f"; see: landscape evaluate {spec.get('checkpoint')}"
    cause = "check that --mean, --std, the order of the classes and the targets are those of training"
    if np.isfinite(accuracy) and np.isfinite(stated) and n:
        hits = round(accuracy * n)
        words = f"the accuracy {accuracy:.3f} on {n} samples, and its checkpoint states {stated:.3f} on test samples"
        if stated - accuracy > APART and bdtr(hits, n, stated) < LEVEL:
            yield found("contradicts-checkpoint", "suspicious", result, words, cause + look)
        elif spec.get("split") == "test" and accuracy - stated > APART and bdtrc(hits - 1, n, stated) < LEVEL:
            cause = "check that the test split of the data holds no samples of training"
            yield found("contradicts-checkpoint", "suspicious", result, words, cause + look)
        return
    loss, stated = _training_loss(result), float(result.attribute("stated_loss", math.nan))
    if loss - NORMAL * _error(result) > LARGER * stated:
        words = f"the training loss {loss:.3g}, and its checkpoint states {stated:.3g} on test samples"
        yield found("contradicts-checkpoint", "suspicious", result, words, cause + look)


def _losses(result: Result) -> np.ndarray:
    """The losses of the mini-batches of the training split, in one row; empty where none are stored."""
    loss = result.values("loss")
    stored = result.probe in ("hessian", "trace", "step") and result.spec.get("split") == "train" and loss.ndim == 1
    return loss[np.isfinite(loss)] if stored else np.array([])


def _training_loss(result: Result) -> float:
    losses = _losses(result)
    if losses.size:
        return float(losses.mean())
    return at_weights(result, "loss") if result.spec.get("split") == "train" else math.nan


def _error(result: Result) -> float:
    losses = _losses(result)
    return float(losses.std(ddof=1) / math.sqrt(losses.size)) if losses.size > 1 else 0.0


def overconfident(result: Result) -> Iterator[Finding]:
    """Far more confident than right, by 25 points: targets or classes are likely not those of training.

    Overconfidence on data like those of training is 0 to 20 points (Guo et al. 2017, Table 1).
    """
    excess = result.number("ece_signed")
    if result.probe == "calibration" and excess > CONFIDENT:
        yield found(
            "overconfident", "suspicious", result,
            f"the mean confidence exceeds the accuracy by {excess:.2f}, more than overconfidence explains",
            "check the targets, the order of the classes and the normalisation: landscape evaluate "
            f"{result.spec.get('checkpoint') or 'CHECKPOINT'}",
        )  # fmt: skip


def leaked_test(results: Sequence[Result]) -> Iterator[Finding]:
    """The test split shares samples with the training split: what is called a test is none."""
    known: dict[tuple[str, str], dict[str, Result]] = defaultdict(dict)
    for result in results:
        if sketch := str(result.attribute("samples_sketch")):
            known[str(result.attribute("data")), str(result.spec.get("split"))].setdefault(sketch, result)
    for (data, split), sketches in known.items():
        for one, a in sketches.items() if split == "train" else ():
            for other, b in known.get((data, "test"), {}).items():
                if len({*one.split()} & {*other.split()}) >= SHARED:
                    yield found(
                        "leaked-test", "wrong", [a, b],
                        f"samples of the test split of {data} are also samples of its training split",
                        "give --data a test split of other samples, and measure the test results again with "
                        "--overwrite",
                    )  # fmt: skip
                    return


def mixed_seeds(results: Sequence[Result]) -> Iterator[Finding]:
    """Random directions of other seeds for other networks: part of what the figure shows is the draw of directions.

    With one seed, networks of one architecture share the draw; over several seeds, `--directions N` shows its spread.
    """
    seeds: dict[tuple[str, str], dict[int, Result]] = defaultdict(dict)
    for result in results:
        if "random" in (result.parameters.get("plane"), result.parameters.get("along")):
            seed = int(result.parameters.get("seed") or 0)
            seeds[result.probe, result.label].setdefault(seed, result)
    for (one, other), (a, b) in (([*pair], [seeds[key] for key in pair]) for pair in combinations(seeds, 2)):
        if one[0] == other[0] and not a.keys() & b.keys():
            first, second = next(iter(a)), next(iter(b))
            yield found(
                "mixed-seeds", "suspicious", [a[first], b[second]],
                f"the random directions of {one[1]} are of seed {first} and those of {other[1]} of seed {second}",
                measure_again(b[second], "measure both with one --seed", seed=first),
            )  # fmt: skip
            return
