"""Rules of the Hessian's eigenvalues: convergence, number of mini-batches and vectors, bootstrap intervals, kinks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.special import stdtr, stdtrit

from landscape.doctor.finding import Finding, Result, found, measure_again
from landscape.results.rounding import plus_minus

CONFIDENCE = 0.95
# Mini-batches from which the bootstrap interval of a mean is wrong in less than twice the 5 % that it promises: with n
# values its half-width is 1.96 sqrt((n - 1) / n) standard errors, where Student's t with n - 1 degrees of freedom is
# needed. It holds the mean in 60 % of the cases for n = 2, 81 % for 4, 89 % for 8, 90 % for 10, 92 % for 16.
ENOUGH_BATCHES = 10


def unconverged(result: Result) -> Iterator[Finding]:
    """Eigenvalues whose estimated error or residual did not reach what was asked for, at the most products."""
    converged = result.values("converged")
    eigenvalue = result.values("eigenvalue") if result.probe == "hessian" else result.values("largest")
    if converged.shape != eigenvalue.shape or not converged.size:
        return
    known = np.isfinite(eigenvalue)
    missed = known & (converged == 0)
    if missed.any():
        worst = ""
        residual = result.values("residual" if result.probe == "hessian" else "largest_residual")
        if residual.shape == missed.shape:
            with np.errstate(divide="ignore", invalid="ignore"):
                worst = f", relative residual up to {np.nanmax((residual / np.abs(eigenvalue))[missed]):.2g}"
        products = result.parameters.get("max_products")
        yield found(
            "unconverged", "wrong" if 2 * missed.sum() > known.sum() else "suspicious", result,
            f"{int(missed.sum())} of {int(known.sum())} eigenvalues did not converge to --tol "
            f"{result.parameters.get('tol', '')} within {products} products{worst}",
            measure_again(result, "allow more products", max_products=4 * int(products) if products else None),
        )  # fmt: skip


def without_spectrum(result: Result) -> Iterator[Finding]:
    """Mini-batches whose Hessian is not finite are left out of every summary."""
    eigenvalue = result.values("eigenvalue")
    if result.probe != "hessian" or eigenvalue.ndim != 2 or "done" not in result.data:
        return
    lost = int((~np.isfinite(eigenvalue).any(axis=1) & (result.data["done"].values == 1)).sum())
    if lost:
        yield found(
            "not-finite", "suspicious", result, f"the loss of {lost} of {len(eigenvalue)} mini-batches is not finite",
            "check the weights and the normalisation of the data: landscape evaluate "
            f"{result.spec.get('checkpoint') or 'CHECKPOINT'}",
        )  # fmt: skip


def few_batches(result: Result) -> Iterator[Finding]:
    """The bootstrap intervals of NEP and APE are too short with few mini-batches, see `ENOUGH_BATCHES`."""
    if result.probe != "hessian" or "group" in result.data or result.parameters.get("scope") == "dataset":
        return
    n = _mini_batches(result)
    if 0 < n < ENOUGH_BATCHES and result.complete:
        coverage = 2 * stdtr(n - 1, 1.96 * np.sqrt((n - 1) / n)) - 1 if n > 1 else 0.0
        text = (
            f"NEP and APE are of {n} mini-batches; their 95 % bootstrap intervals hold the mean in about {coverage:.0%}"
            if n > 1
            else "NEP and APE are of one mini-batch and have no interval"
        )
        size = int(result.attribute("batch_size", 16))
        changes = {"batches": None, "samples": str(2 * ENOUGH_BATCHES * size)}
        yield found(
            "few-batches", "suspicious", result, text, measure_again(result, "use more mini-batches", **changes)
        )


def saturated_bootstrap(result: Result) -> Iterator[Finding]:
    """A share of 0 or 1 in all resamples has an interval of width zero, which is not a proof.

    If none of n independent values is negative, the share is below 1 - 0.05^(1 / n) with 95 % confidence (the exact
    form of the rule of three, Hanley & Lippman-Hand 1983). Values of a mini-batch are not independent: n counts
    mini-batches. A note, because many networks have no negative eigenvalue among the largest.
    """
    n = _mini_batches(result)
    share, low, high = (result.number(name) for name in ("nep", "nep_low", "nep_high"))
    if n > 1 and low == high == share and share in (0.0, 1.0):
        limit = 1 - (1 - CONFIDENCE) ** (1 / n)
        inside = f"at most {limit:.2g}" if share == 0 else f"at least {1 - limit:.2g}"
        yield found(
            "saturated-bootstrap", "note", result,
            f"NEP is {share:g} in every mini-batch, and so is its interval; with 95 % confidence it is {inside} "
            f"({n} mini-batches, rule of three)",
            "report the bound instead of the interval of width zero",
        )  # fmt: skip


def few_vectors(result: Result) -> Iterator[Finding]:
    """The estimate is not told apart from zero by its error over random vectors, or has none.

    With v start vectors the error is that of a mean of v values: Student's t with v - 1 degrees of freedom (of a
    trace, of all mini-batches' vectors together).
    """
    name = {"trace": "trace", "density": "mean"}.get(result.probe)
    value, error = (result.number(f"{name}{end}") for end in ("", "_se"))
    vectors = int(result.parameters.get("vectors", 0))
    if name is None or not np.isfinite(value) or vectors < 1:
        return
    what = "trace" if name == "trace" else "mean eigenvalue"
    again = measure_again(result, "use more random vectors", vectors=max(4 * vectors, 8))
    if not np.isfinite(error):
        text = f"the {what} {value:.3g} has no error, because it is of {vectors} random vector{'s' * (vectors > 1)}"
        yield found("few-vectors", "suspicious", result, text, again)
        return
    freedom = (vectors - 1) * (len(result.values("batch_trace")) or 1)
    if freedom > 0 and abs(value) < stdtrit(freedom, (1 + CONFIDENCE) / 2) * error:
        text = f"the {what} {plus_minus(value, error)} of {vectors} random vectors is not told apart from zero"
        yield found("few-vectors", "suspicious", result, text, again)


def tolerance_missed(result: Result) -> Iterator[Finding]:
    """The relative error that was asked for was not reached with the most vectors."""
    if result.number("within_tol") == 0:
        most = int(result.parameters.get("max_vectors", 0))
        yield found(
            "tolerance-missed", "suspicious", result,
            f"the relative error is above --tol {result.parameters.get('tol')} with the most vectors, {most}",
            measure_again(result, "allow more vectors", max_vectors=4 * most),
        )  # fmt: skip


def derivatives(result: Result) -> Iterator[Finding]:
    """The loss is not what was differentiated: a check of derivatives against differences said so."""
    if said := str(result.data.attrs.get("derivatives", "")):
        yield found(
            "derivatives",
            "wrong",
            result,
            said,
            "measure a loss whose gradient is its derivative, without detached terms",
        )


def kinks(result: Result) -> Iterator[Finding]:
    """Units within rounding of a kink of ReLU took either side: eigenvalues depend on the order of summation.

    Seen to change an eigenvalue by up to 1e-3, against 1e-5 with the activation pattern of double precision.
    """
    if result.parameters.get("kinks") == "single" and result.parameters.get("engine", "lanczos") == "lanczos":
        yield found(
            "kinks", "suspicious", result,
            "--kinks single leaves units within rounding of a kink on either side: eigenvalues differ by up to 1e-3 "
            "between backends and machines",
            measure_again(result, "use --kinks double", kinks=None),
        )  # fmt: skip


def missed_values(result: Result) -> Iterator[Finding]:
    """`--verify` found eigenvalues that the first search had missed."""
    missed = result.values("missed")
    if missed.size and np.nansum(missed) > 0:
        yield found(
            "missed-eigenvalues", "suspicious", result,
            f"a second search found {int(np.nansum(missed))} eigenvalues that the first one had missed",
            measure_again(result, "use a smaller tolerance", tol=float(result.parameters.get("tol", 1e-4)) / 100),
        )  # fmt: skip


def _mini_batches(result: Result) -> int:
    """How many mini-batches have eigenvalues; 0 for results without any."""
    eigenvalue = result.values("eigenvalue")
    return int(np.isfinite(eigenvalue).any(axis=-1).sum()) if result.probe == "hessian" and eigenvalue.ndim == 2 else 0
