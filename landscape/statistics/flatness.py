"""The measures of flatness: their names, definitions and invariances, and their values from stored terms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from landscape.statistics.means import mean_and_standard_error

Over = Literal["mini-batches", "samples", "random vectors", "noise draws", "residual"]  # what an error is over
Invariant = Literal["yes", "no", "whole layers", "with --normalize-logits"]
TERM, TERM_SE, SAMPLES, OF = "term", "term_se", "samples", "unit_measure"
ERROR_RISE = 0.1  # of the classification error, that of `pac-bayes-sigma`


@dataclass(frozen=True)
class Measure:
    """One measure of flatness."""

    name: str
    definition: str
    over: Over  # what its terms, and so its error, are over
    units: str  # `LOSS` stands for the units of the loss
    # Whether two networks that are the same function, or whose logits are multiples, have the same value.
    rescaling: Invariant  # the weights into a ReLU unit are multiplied by a number, those out of it divided
    logit_scale: Invariant  # the weights of the last layer are multiplied by a number
    permutation: Invariant = "yes"  # hidden units change places
    radius: float = math.nan  # rho by default; NaN where there is none
    norm: str = ""  # l2 or linf, of the perturbation
    adaptive: bool = False  # the perturbation is in units of each weight
    root: bool = False  # the value is the square root of the mean of its terms
    flatter: Literal["lower", "higher"] = "lower"


LOSS = "{loss}"
CURVATURE = f"{LOSS} per squared weight"
BALL = "largest rise of a mini-batch's loss found by Auto-PGD among changes d of the weights with {} <= rho"
NOISE = "mean rise of a mini-batch's loss under {} {} of the weights"
TOGETHER: Invariant = "with --normalize-logits"
MEASURES: Mapping[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("sam", "rise of a mini-batch's loss by one step of length rho along its gradient", "mini-batches",
                LOSS, "no", "no", radius=0.05, norm="l2"),
        Measure("worst-l2", BALL.format("|d|_2"), "mini-batches", LOSS, "no", "no", radius=0.5, norm="l2"),
        Measure("worst-linf", BALL.format("|d|_inf"), "mini-batches", LOSS, "no", "no", radius=0.001, norm="linf"),
        Measure("adaptive-worst-l2", BALL.format("|d / w|_2"), "mini-batches", LOSS, "yes", TOGETHER, radius=0.5,
                norm="l2", adaptive=True),
        Measure("adaptive-worst-linf", BALL.format("|d / w|_inf"), "mini-batches", LOSS, "yes", TOGETHER, radius=0.002,
                norm="linf", adaptive=True),
        Measure("average-l2", NOISE.format("normal noise of standard deviation", "rho"), "mini-batches", LOSS, "no",
                "no", radius=0.05, norm="l2"),
        Measure("average-linf", NOISE.format("uniform noise in", "[-rho, rho]"), "mini-batches", LOSS, "no", "no",
                radius=0.1, norm="linf"),
        Measure("adaptive-average-l2", NOISE.format("normal noise of standard deviation", "rho |w|"), "mini-batches",
                LOSS, "yes", TOGETHER, radius=0.1, norm="l2", adaptive=True),
        Measure("adaptive-average-linf", NOISE.format("uniform noise in", "[-rho |w|, rho |w|]"), "mini-batches", LOSS,
                "yes", TOGETHER, radius=0.2, norm="linf", adaptive=True),
        Measure("pac-bayes-sigma", "largest standard deviation of normal noise of the weights under which the mean "
                f"classification error over all samples rises by at most {ERROR_RISE}", "noise draws", "weight", "no",
                "no", flatter="higher"),
        Measure("relative-flatness", "sum over pairs of rows of the last layer's weights of <w_s, w_t> Tr H_st, H_st "
                "the block of the Hessian", "samples", LOSS, "whole layers", TOGETHER),
        Measure("fisher-rao", "sqrt(w' F w), F the mean over samples of g g', g the gradient of a sample's loss",
                "samples", LOSS, "yes", TOGETHER, root=True),
        Measure("top-eigenvalue", "largest eigenvalue of the Hessian of the loss over all samples", "residual",
                CURVATURE, "no", "no"),
        Measure("trace", "trace of the Hessian of the loss over all samples", "random vectors", CURVATURE, "no", "no"),
        Measure("frobenius", "Frobenius norm of the Hessian of the loss over all samples", "random vectors", CURVATURE,
                "no", "no", root=True),
    )
}  # fmt: skip
OF_VECTORS = ("trace", "frobenius")  # both from the same Hessian products


def values(data: Mapping[str, np.ndarray], draws: int) -> dict[str, np.ndarray]:
    """`value`, `se` and `n`, (measure,), from the terms of the finished units; NaN where none is finished.

    A term that is not finite makes its value so: the loss overflows inside the ball.
    """
    names: Sequence[str] = [str(name) for name in data["measure_name"]]
    found = np.full((3, len(names)), np.nan)
    for k, name in enumerate(names):
        mine = _finished(data, names, name)
        if mine.any():
            terms, errors = data[TERM][mine, k], data[TERM_SE][mine, k]
            found[:, k] = pooled(MEASURES[name], terms, errors, data[SAMPLES][mine], draws)
    least = float(np.min(data[SAMPLES][data["done"] == 1], initial=math.inf))
    within = [values_within(MEASURES[name], least, draws) for name in names]
    return {"value": found[0], "se": found[1], "n": found[2], f"{TERM_SE}.n": within}


def values_within(measure: Measure, samples: float, draws: int) -> float:
    """How many values the error of a single term is of: its samples, noise draws, or their pairs of opposite signs."""
    if measure.over == "mini-batches" and "average" in measure.name:
        return draws // 2
    return {"mini-batches": samples, "samples": samples, "noise draws": draws}.get(measure.over, math.nan)


def pooled(
    measure: Measure, terms: np.ndarray, errors: np.ndarray, samples: np.ndarray, draws: int
) -> tuple[float, float, float]:
    """A measure from its terms, its standard error, and how many values that is of; NaN for a residual.

    Terms of mini-batches weigh by their samples, and the error of their mean is that over mini-batches; of a single
    one it is that over its samples or noise draws. Means over samples have the errors of the mini-batches' means.
    """
    several = len(terms) > 1 and measure.over != "samples"
    n = len(terms) if several else values_within(measure, float(samples.sum()), draws)
    with np.errstate(invalid="ignore"):
        if measure.over in ("mini-batches", "samples"):
            share = samples / samples.sum()
            mean = float(share @ terms)
            error = float(np.sqrt(share**2 @ errors**2))
            if several:
                error = float(np.sqrt(share**2 @ (terms - mean) ** 2 * len(terms) / (len(terms) - 1)))
        elif several:
            mean, error = mean_and_standard_error(terms)
        else:
            mean, error = float(terms[0]), float(errors[0])
        if not measure.root:
            return mean, error, n
        value = math.sqrt(mean) if mean >= 0 else math.nan
        return value, error / (2 * value) if value else math.nan, n


class Parts(NamedTuple):
    """Values of one measure per mini-batch or random vector, (n,); their mean, weighted by the shares, is the value."""

    values: np.ndarray
    shares: np.ndarray
    numbers: np.ndarray  # which mini-batches or random vectors
    of: str  # mini-batches or random vectors


def parts(data: Mapping[str, np.ndarray]) -> dict[str, Parts]:
    """The measures that have several finished parts; that of a root is linearised around the value."""
    names, found = [str(name) for name in data["measure_name"]], {}
    for k, name in enumerate(names):
        if MEASURES[name].over in ("mini-batches", "samples", "random vectors"):
            mine = _finished(data, names, name)
            terms, vectors = data[TERM][mine, k], MEASURES[name].over == "random vectors"
            weights = np.ones(len(terms)) if vectors else data[SAMPLES][mine]
            if len(terms) > 1:
                shares = weights / weights.sum()
                if MEASURES[name].root:
                    mean = shares @ terms
                    root = math.sqrt(mean) if mean > 0 else math.nan
                    terms = root + (terms - mean) / (2 * root)
                found[name] = Parts(terms, shares, data["part"][mine], "random vectors" if vectors else "mini-batches")
    return found


def _finished(data: Mapping[str, np.ndarray], names: Sequence[str], name: str) -> np.ndarray:
    """Which units are finished and of a measure; trace and Frobenius norm share theirs."""
    shared = OF_VECTORS if name in OF_VECTORS else (name,)
    of = np.isin(data[OF], [names.index(other) for other in shared if other in names])
    return np.asarray((data["done"] == 1) & of)
