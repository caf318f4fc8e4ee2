"""Rules of the Hessian's eigenvalues: convergence, number of mini-batches and vectors, bootstrap intervals, kinks."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from landscape.doctor.finding import Finding, Result, found, measure_again, more_samples
from landscape.options import counted, listed
from landscape.results.protocols import stored
from landscape.statistics.intervals import CERTIFIED, FEWEST
from landscape.statistics.rounding import plus_minus
from landscape.statistics.stored import half_width

QUARTERS = 4  # samples of a group of `noise-scale` at least
UNITS = {
    "batch": "mini-batches", "vector": "random vectors", "vectors": "random vectors", "group": "groups of samples",
    "image": "images", "block": "blocks of samples", "part": "parts of mini-batches",
}  # fmt: skip
OF_SAMPLES = ("samples", "block", "part", "groups of samples")  # of which more samples make more


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
    if result.probe != "hessian" or (eigenvalue := result.values("eigenvalue")).ndim != 2 or "done" not in result.data:
        return
    lost = int((~np.isfinite(eigenvalue).any(axis=1) & (result.data.variables["done"].values == 1)).sum())
    if lost:
        yield found(
            "not-finite", "suspicious", result,
            f"the loss of {lost} of {counted(len(eigenvalue), 'mini-batch')} is not finite",
            f"check the weights and the normalisation of the data: {result.evaluation}",
            cause=result.probe,
        )  # fmt: skip


def few_values(result: Result) -> Iterator[Finding]:
    """Errors over fewer independent values than an interval needs, or than those with which coverage was measured.

    The former of summaries only; the latter is a note.
    """
    few: dict[str, tuple[float, str]] = {}
    uncertified: dict[str, dict[str, float]] = {}
    certified = {**CERTIFIED, **stored(result.data, "certified")}
    for name in map(str, result.data.variables) if result.complete else ():
        if name == "se" or name.endswith("_se"):
            error = result.data.variables[name]
            n, over = float(error.attrs.get("n", np.nan)), str(error.attrs.get("over", ""))
            words = name.removesuffix("se").strip("_").replace("_", " ") or "value"
            if FEWEST <= n < certified.get(over, 0):
                uncertified.setdefault(over, {})[words] = n
            elif n < FEWEST and not error.ndim and np.isfinite(error.values):  # without an error nothing misleads
                few[words] = n, over
    if few:
        n, over = next(iter(few.values()))
        yield found(
            "few-values", "suspicious", result,
            f"{', '.join(few)}: of {n:g} {_units(over)}, too few for an interval (at least {FEWEST})",
            _more(result, over, n, (2 if over == "batch" else 4) * FEWEST), cause=f"{result.probe}, {over}",
        )  # fmt: skip
    for over, names in uncertified.items():
        least, n = certified[over], min(names.values())
        yield found(
            "uncertified", "note", result,
            f"{listed(names)}: intervals over {n:g} {_units(over)}, whose coverage was measured with {least} or more",
            _more(result, over, n, least), cause=over,
        )  # fmt: skip


def _units(over: str) -> str:
    return UNITS.get(over, over.replace("_", " ") or "values")


def _more(result: Result, over: str, n: float, least: int) -> str:
    """The remedy for n values of a kind where at least so many are needed."""
    if over in OF_SAMPLES or (over == "batch" and result.exhausted and not result.parameters.get("batches")):
        return more_samples(result, math.sqrt(least / n))
    each = max(round(float(result.parameters.get("vectors", n)) / n), 1)  # products per vector: 2 by XTrace
    changes: dict[str, Any] = {"vectors": least * each} if "vector" in over else {"batches": None}
    if over in ("group", "image"):
        changes[f"{over}s"] = str(least)
    samples = least * {"batch": int(result.attribute("batch_size", 16)), "group": QUARTERS, "image": 1}.get(over, 0)
    if over != "batch" and samples > result.available:
        return f"these data have {result.available:g} samples, too few for {least} {_units(over)}"
    if samples > result.samples:
        changes["samples"] = str(samples) if samples < result.available else "all"
    return measure_again(result, f"use more {_units(over)}", **changes)


def few_vectors(result: Result) -> Iterator[Finding]:
    """The estimate is not told apart from zero by its interval over random vectors, or has no error."""
    name = {"trace": "trace", "density": "mean"}.get(result.probe)
    value, error = (result.number(f"{name}{end}") for end in ("", "_se"))
    vectors = int(result.parameters.get("vectors", 0))
    if name is None or not np.isfinite(value) or vectors < 1:
        return
    what = "trace" if name == "trace" else "mean eigenvalue"
    again = measure_again(result, "use more random vectors", vectors=max(4 * vectors, 8))
    if not np.isfinite(error):
        text = f"the {what} {value:.3g} has no error, because it is of {counted(vectors, 'random vector')}"
        yield found("few-vectors", "suspicious", result, text, again)
        return
    half = float(half_width(result.data, name))
    if abs(value) < half:
        text = f"the {what} {plus_minus(value, half)} of {vectors} random vectors is not told apart from zero"
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
            "derivatives", "wrong", result, said,
            "measure a loss whose gradient is its derivative, without detached terms",
        )  # fmt: skip


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


def copies(result: Result) -> Iterator[Finding]:
    """`--no-verify` leaves out the search for copies of equal eigenvalues, of which one start vector finds one."""
    if result.probe == "hessian" and result.parameters.get("verify") is False and result.parameters.get("top") != 1:
        yield found(
            "copies", "suspicious", result,
            "copies of equal eigenvalues are not excluded, as a linear layer with squared error has one per output",
            measure_again(result, "search for copies", verify=None),
        )  # fmt: skip
