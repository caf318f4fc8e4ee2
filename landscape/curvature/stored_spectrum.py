"""Options of a spectrum, the quantities that every spectrum stores, and the summaries NEP and APE over all of them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from landscape.curvature import lanczos, preconditioner, stopping
from landscape.curvature.spectrum import Request
from landscape.headline import FLATTER, Headline, Quantity, with_errors
from landscape.options import OptionError, at_least, one_of, regular_expression, require
from landscape.products.hvp_backends import CODES_MEANING, Hvp, Kinks
from landscape.products.operator import Matrix
from landscape.statistics.intervals import positive_interval, share_interval
from landscape.statistics.means import mean_and_standard_error
from landscape.statistics.ratio import linearised

Scope = Literal["batch", "dataset"]
Engine = Literal["lanczos", "pyhessian"]
CHOICES = {"which": stopping.Which, "scope": Scope, "operator": Matrix, "hvp": Hvp, "kinks": Kinks, "engine": Engine}
LARGEST_RESULT = 2**30  # bytes of eigenvectors


def check(given: Any) -> None:
    """Check the options of the probe `hessian`.

    Raises:
        OptionError: one is out of its range, or two exclude each other.
    """
    at_least("top", given.top, 1)
    at_least("batches", given.batches, 0)
    at_least("max_products", given.max_products, 2)
    for name, choices in CHOICES.items():
        one_of(name, getattr(given, name), get_args(choices))
    for conflict in _conflicts(given):
        raise OptionError(conflict)
    regular_expression("params", given.params)
    require(0 < given.tol < 1, "tol", given.tol, "above 0 and below 1")
    require(0 <= given.tol_residual < 1, "tol-residual", given.tol_residual, "at least 0 and below 1")
    require(0 < given.ends <= 1, "ends", given.ends, "above 0 and at most 1")


def require_storable(size: int) -> None:
    """Check that eigenvectors of so many bytes fit a results file. Raises ValueError: they do not."""
    if size > LARGEST_RESULT:
        raise ValueError(
            f"--eigenvectors would store {size / 2**30:.1f} GiB, at most 1 GiB fits a results file; "
            "use fewer --batches, a smaller --top, or one block of weights with --params"
        )


def _conflicts(given: Any) -> Iterator[str]:
    """What is wrong with combinations of options that exclude each other."""
    traced = given.hvp == "traced"
    if given.operator in ("ggn", "fisher") and traced:
        only = f"--hvp {given.hvp} makes products of the Hessian only"
        yield f"{only}; with --operator {given.operator} use auto or double-backward"
    beyond_pyhessian = {
        f"which {given.which}": given.which != "LM", f"operator {given.operator}": given.operator != "hessian",
        f"scope {given.scope}": given.scope != "batch", f"hvp {given.hvp}": traced, "per-layer": given.per_layer,
        "tol-residual": given.tol_residual != 0.0,
    }  # fmt: skip
    for option, wanted in beyond_pyhessian.items():
        if given.engine == "pyhessian" and wanted:
            yield f"--engine pyhessian does not support --{option}; leave one of them out"
    if given.operator == "preconditioned" and given.which == "SA":
        yield "--operator preconditioned compares the largest eigenvalue; use --which LA, LM or both"
    if given.operator != "preconditioned" and (given.optimizer or given.optimizer_arg or not given.optimizer_state):
        yield "options of the optimiser need --operator preconditioned; add it or leave them out"
    if given.per_layer and traced:
        yield f"--hvp {given.hvp} would trace every layer; with --per-layer use auto or double-backward"
    if given.per_layer and given.eigenvectors:
        yield "--per-layer cannot store --eigenvectors; select one layer with --params"


HEADLINES = (
    Headline("nep", "nep", column=7, title="NEP",
             definition="share of negative eigenvalues among the largest by magnitude"),
    Headline("ape", "ape", reading=FLATTER, column=8, title="APE",
             definition="mean of the positive eigenvalues among the largest by magnitude"),
    Headline("sharpness", "sharpness"),
    Headline("stability", "stability"),
    Headline("largest eigenvalue", "mean_largest", reading=FLATTER, silent=True),
    Headline("largest", "eigenvalue", {"group batch rank": "largest"}, where="in {name}"),
)  # fmt: skip
UNKNOWN = float("nan"), float("nan")
MATRICES: Mapping[Matrix, tuple[str, str]] = {  # long name and units of the eigenvalues
    "hessian": ("Hessian", "loss per squared weight"),
    "ggn": ("Gauss-Newton", "loss per squared weight"),
    "fisher": ("empirical Fisher", "squared loss per squared weight"),
    "preconditioned": ("preconditioned Hessian", preconditioner.UNITS),
}


def spectrum_quantities(operator: Matrix, *, whole: str, loss_units: str, request: Request) -> dict[str, Quantity]:
    """The quantities of `spectrum_values`, and those that a probe adds to them: `loss` and `hvp`.

    `whole` says what each matrix belongs to: a mini-batch, or all samples.
    """
    (matrix, units), rank, node = MATRICES[operator], ("rank",), ("node",)
    quantities = {
        "eigenvalue": Quantity(f"{matrix} eigenvalue", units, rank),
        "residual": Quantity("residual ||Hv - lambda v||", units, rank),
        "error": Quantity("estimated error min(r, r^2 / gap) of the eigenvalue, rounding included", units, rank),
        "converged": Quantity(f"1 where {request.criterion}", dims=rank),
        "largest": Quantity("algebraically largest Ritz value: an eigenvalue is within its residual", units),
        "smallest": Quantity("algebraically smallest Ritz value: an eigenvalue is within its residual", units),
        "largest_residual": Quantity("residual of the largest Ritz value", units),
        "smallest_residual": Quantity("residual of the smallest Ritz value", units),
        "loss": Quantity(f"loss of the {whole}", loss_units),
        "matvecs": Quantity(f"matrix products spent, each with the {whole}"),
        "nodes": Quantity("Lanczos nodes: Ritz values of the start vector's quadrature", units, node),
        "weights": Quantity("their weights: the spectral density that the start vector saw", dims=node),
        "hvp": Quantity(CODES_MEANING),
    }
    if operator == "preconditioned":
        quantities |= preconditioner.STABILITY
    if request.verify:
        quantities["missed"] = Quantity("eigenvalues that only the search beside the others found")
    if request.vectors:
        quantities["eigenvector"] = Quantity(
            "unit eigenvector, parameters one after the other as in named_parameters()", dims=("rank", "parameter")
        )
    return quantities


def spectrum_values(spectrum: lanczos.Spectrum | None, request: Request, *, nodes: int, size: int) -> dict[str, Any]:
    """The stored values of one matrix: rows as long as the request and as `nodes`, padded with NaN.

    All are NaN for None, a matrix that is not finite; `size` is the number of parameters.
    """
    ranks = request.ranks
    values: dict[str, Any]
    if spectrum is None:
        values = dict.fromkeys(("largest", "smallest", "largest_residual", "smallest_residual"), np.nan)
        values |= {name: np.full(ranks, np.nan) for name in ("eigenvalue", "residual", "error")}
        values |= {name: np.full(nodes, np.nan) for name in ("nodes", "weights")}
        values |= {"converged": np.zeros(ranks), "matvecs": 1}
    else:
        values = {name: getattr(spectrum, name) for name in ("largest", "smallest")}
        values |= {f"{name}_residual": end for name, end in zip(values, spectrum.ends, strict=True)}
        rows = {"eigenvalue": "values", "residual": "residuals", "error": "errors", "converged": "converged"}
        values |= {name: _padded(getattr(spectrum, row), ranks) for name, row in rows.items()}
        values |= {name: _padded(getattr(spectrum, name), nodes) for name in ("nodes", "weights")}
        values["matvecs"] = spectrum.products
    if request.verify:
        values["missed"] = np.nan if spectrum is None else spectrum.missed
    if request.vectors:
        vectors = None if spectrum is None else spectrum.vectors
        values["eigenvector"] = np.full((ranks, size), np.nan) if vectors is None else vectors.double().cpu().numpy()
    return values


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    """Values followed by NaN, (count,)."""
    return np.append(values[:count].astype(float), np.full(max(count - len(values), 0), np.nan))


def summary_quantities(operator: Matrix, dims: tuple[str, ...]) -> dict[str, Quantity]:
    """The quantities of `summaries`."""
    _, units = MATRICES[operator]
    stability = preconditioner.SUMMARIES if operator == "preconditioned" else {}
    return {name: replace(one, dims=dims, error="mini-batches") for name, one in stability.items()} | {
        "nep": Quantity("share of negative eigenvalues", dims=dims, bounds="share", error="mini-batches", ends=True),
        "ape": Quantity(
            "mean of the positive eigenvalues", units, dims, bounds="positive", error="mini-batches", ends=True
        ),
        "mean_largest": Quantity("mean of the largest eigenvalue of a mini-batch", units, dims, error="mini-batches"),
    }


def summaries(data: Mapping[str, np.ndarray], *, per_layer: bool) -> dict[str, Any]:
    """NEP and APE over all finished mini-batches, of each layer if there are several, with their intervals."""
    values, done = _without_rounding(data), data["done"]
    stability = preconditioner.stability_summaries(data) if "ratio" in data else {}
    if not per_layer:
        return stability | _summaries(values, data["largest"], done)
    rows = [_summaries(values[:, g], data["largest"][:, g], done[:, g]) for g in range(done.shape[1])]
    return stability | {
        name: np.array([row.get(name, np.nan) for row in rows])
        for name in with_errors(summary_quantities("hessian", ()))
    }


def _without_rounding(data: Mapping[str, np.ndarray]) -> np.ndarray:
    """The eigenvalues, with 0 for those that are zero up to rounding: their sign has no meaning."""
    values = data["eigenvalue"]
    ends = np.fmax(np.abs(data["largest"]), np.abs(data["smallest"]))[..., None]
    size = np.abs(values)
    is_rounding = size <= np.minimum(data["residual"], lanczos.ROUNDING[torch.float32] * np.fmax(ends, size))
    return np.where(is_rounding, 0.0, values)


def _summaries(eigenvalues: np.ndarray, largest: np.ndarray, done: np.ndarray) -> dict[str, float]:
    """NEP and APE of eigenvalues (batch, rank), and the mean of the largest (batch,), with errors over mini-batches."""
    values = eigenvalues[done == 1]
    values = values[np.isfinite(values).any(axis=1)]
    largest = largest[(done == 1) & np.isfinite(largest)]
    if len(values) == 0:
        return {}
    known, positive = np.isfinite(values), values > 0
    parts = {
        "nep": (negative_share(values), linearised((values < 0).sum(axis=1), known.sum(axis=1)), share_interval),
        "ape": (positive_mean(values), linearised(np.where(positive, values, 0.0).sum(axis=1), positive.sum(axis=1)),
                positive_interval),
    }  # fmt: skip
    found: dict[str, float] = {}
    for name, (value, each, interval) in parts.items():
        error = mean_and_standard_error(each)[1]
        low, high = interval(value, error, len(each))
        found |= {name: value, f"{name}_se": error, f"{name}_low": float(low), f"{name}_high": float(high)}
    found["mean_largest"], found["mean_largest_se"] = mean_and_standard_error(largest) if len(largest) else UNKNOWN
    return found


def negative_share(values: np.ndarray) -> float:
    """NEP: share of negative values, a measure of non-convexity."""
    return float((values < 0).sum() / np.isfinite(values).sum())


def positive_mean(values: np.ndarray) -> float:
    """APE: mean of the positive values, a measure of sharpness; NaN where there are none."""
    positive = values[values > 0]
    return float(positive.mean()) if positive.size else float("nan")
