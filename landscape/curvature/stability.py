"""Preconditioned sharpness of a subject against the stability threshold of its optimiser: what is stored of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from landscape.curvature.preconditioner import Preconditioner, preconditioner
from landscape.curvature.spectrum import Request, spectrum
from landscape.probe import Quantity, derived_seed
from landscape.products.vectors import random_unit
from landscape.statistics.means import mean_and_standard_error
from landscape.subject.optimizers import OptimizerOptions, restored_optimizer
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

UNITS = "1 / learning rate"
SEEN = ("batch_preconditioned", "batch_preconditioned_error", "batch_preconditioned_converged")


@once_per_weights
def optimizer_of(subject: Subject, options: OptimizerOptions) -> tuple[Preconditioner, str]:
    """The preconditioner of a subject's optimiser at the state beside its weights, and that optimiser in words.

    Raises:
        ValueError: as `restored_optimizer` and `preconditioner`; the subject has weight decay of its own.
    """
    if subject.weight_decay:
        raise ValueError(
            f"--weight-decay {subject.weight_decay:g} is not used with --operator preconditioned, which takes that of "
            "the optimiser; leave it out, and --preset, which sets it"
        )
    restored = restored_optimizer(subject, options)
    return preconditioner(restored.optimizer, restored.copies), restored.words


@dataclass(frozen=True)
class SeenByOptimizer:
    """The largest eigenvalues of P^-1/2 H P^-1/2 for one optimiser, measured with products that others need too."""

    known: Preconditioner
    request: Request

    def values(
        self, product: Callable[[Tensor], Tensor], parameters: Mapping[str, Tensor], shift: float, i: int
    ) -> dict[str, np.ndarray]:
        """Those of mini-batch i with their errors, (rank,) each; NaN where the matrix is not finite.

        `product` is v -> H v + shift v in the parameters; the shift is left out, as the optimiser has its own decay.
        """
        own = next(iter(parameters.values()))
        size = sum(p.numel() for p in parameters.values())
        matrix = self.known.of(lambda v: product(v) - shift * v if shift else product(v), parameters)
        seed = derived_seed(0, "preconditioned", i)
        start, request = random_unit(size, seed, device=own.device, dtype=own.dtype), self.request.capped(size)
        try:
            found = spectrum(matrix, request, start, seed)
        except FloatingPointError:
            return {name: np.full(self.request.top, np.nan) for name in SEEN}
        lacking = (0, self.request.top - len(found.values))
        parts = (found.values, found.errors, found.converged.astype(float))
        return {n: np.pad(p, lacking, constant_values=np.nan) for n, p in zip(SEEN, parts, strict=True)}


def seen_quantities() -> dict[str, Quantity]:
    """The quantities of `SeenByOptimizer`, and their means over mini-batches (`seen_summaries`)."""
    what = "largest eigenvalue of P^-1/2 H P^-1/2 on the mini-batch, P the optimiser's preconditioner"
    words = (what, "estimated error min(r, r^2 / gap) of that eigenvalue", "1 where its error is within the tolerance")
    return {n: Quantity(w, UNITS if n != SEEN[2] else "1", ("rank",)) for n, w in zip(SEEN, words, strict=True)}


def seen_summary_quantities() -> dict[str, Quantity]:
    """The quantities of `seen_summaries`."""
    return {
        "preconditioned": Quantity("preconditioned sharpness, mean over mini-batches", UNITS, ("rank",)),
        "preconditioned_se": Quantity("its standard error over mini-batches", UNITS, ("rank",), over="batch"),
    }


def seen_summaries(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Means over finished mini-batches and their standard errors, (rank,) each."""
    columns = np.where((data["done"] == 1)[:, None], data[SEEN[0]], np.nan).T
    mean, error = zip(*map(_mean, columns), strict=True)
    return {
        "preconditioned": np.array(mean), "preconditioned_se": np.array(error),
        "preconditioned_se.n": np.isfinite(columns).sum(axis=1),
    }  # fmt: skip


def stability_quantities() -> dict[str, Quantity]:
    """What is stored of every matrix beside its eigenvalues."""
    return {
        "threshold": Quantity("largest eigenvalue at which the optimiser is stable on a quadratic", UNITS),
        "ratio": Quantity("largest eigenvalue / threshold: above 1 the optimiser is unstable on a quadratic"),
        "ratio_error": Quantity("estimated error of the ratio, from that of the eigenvalue"),
    }


def stability_values(values: Mapping[str, Any], threshold: float) -> dict[str, float]:
    """Those values of one matrix, from those of its spectrum; the ratio is NaN where that is not finite."""
    eigenvalues = values["eigenvalue"]
    found = {"threshold": threshold, "ratio": np.nan, "ratio_error": np.nan}
    if np.isfinite(eigenvalues).any():
        at = int(np.nanargmax(eigenvalues))
        found |= {"ratio": eigenvalues[at] / threshold, "ratio_error": values["error"][at] / threshold}
    return found


def stability_summary_quantities(dims: tuple[str, ...]) -> dict[str, Quantity]:
    """The quantities of `stability_summaries`."""
    return {
        "sharpness": Quantity("preconditioned sharpness: the largest eigenvalue, mean over mini-batches", UNITS, dims),
        "sharpness_se": Quantity("its standard error over mini-batches", UNITS, dims, over="batch"),
        "stability": Quantity("preconditioned sharpness / threshold", dims=dims),
        "stability_se": Quantity("its standard error over mini-batches", dims=dims, over="batch"),
    }


def stability_summaries(data: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Mean of the largest eigenvalue over finished mini-batches, also as a share of the threshold; of each layer."""
    ratio = np.where(data["done"] == 1, data["ratio"], np.nan)
    thresholds = data["threshold"][np.isfinite(data["threshold"])]
    threshold = thresholds[0] if thresholds.size else np.nan
    rows = [_mean(column) for column in ratio.reshape(len(ratio), -1).T]
    mean, error = (np.reshape(part, ratio.shape[1:]) for part in zip(*rows, strict=True))
    return {
        "sharpness": mean * threshold, "sharpness_se": error * threshold, "stability": mean, "stability_se": error,
        **dict.fromkeys(("sharpness_se.n", "stability_se.n"), np.isfinite(ratio).sum(axis=0)),
    }  # fmt: skip


def _mean(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return mean_and_standard_error(known) if known.size else (np.nan, np.nan)
