"""Score predicted probabilities, sample by sample; `landscape.results.calibration` summarises the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.results.calibration import (
    METRICS,
    Interval,
    SampleScores,
    bootstrap,
    joined,
    paired_difference,
    summary,
    sums,
)

__all__ = [
    "METRICS",
    "Interval",
    "SampleScores",
    "bootstrap",
    "joined",
    "paired_difference",
    "sample_scores",
    "score_rows",
    "summary",
    "sums",
]


def sample_scores(log_probabilities: Tensor, targets: Tensor) -> SampleScores:
    """Scores of log probabilities (N, C) for the classes (N,); logits are normalised in double precision.

    Shares of the classes (N, C) are targets too. A true class of probability 0 has an infinite `nll`.

    Raises:
        ValueError: the shapes do not fit.
    """
    return SampleScores(*score_rows(log_probabilities, targets).cpu().numpy())


def score_rows(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """`sample_scores` as one tensor on the device, (5, N) float64, in the order of the fields of `SampleScores`."""
    hard = targets.dim() == 1 and not targets.is_floating_point()
    if log_probabilities.dim() != 2 or (targets.shape != log_probabilities.shape[: targets.dim()]) or not targets.dim():
        raise ValueError(
            f"got targets {tuple(targets.shape)} {targets.dtype} for logits {tuple(log_probabilities.shape)}, expected "
            "classes (N,) or soft targets (N, classes); score a classifier on labelled data"
        )
    logarithms = log_probabilities.double().log_softmax(dim=1)
    probabilities = logarithms.exp()
    confidence, predicted = probabilities.max(dim=1)
    if hard:
        nll = -logarithms.gather(1, targets[:, None])[:, 0]
        shares = torch.nn.functional.one_hot(targets, logarithms.shape[1])
    else:
        shares = targets.double()
        nll = -torch.where(shares > 0, shares * logarithms, 0.0).sum(dim=1)
        targets = targets.argmax(dim=1)
    top5 = (logarithms.topk(min(5, logarithms.shape[1]), dim=1).indices == targets[:, None]).any(dim=1)
    brier = (probabilities - shares).square().sum(dim=1)
    return torch.stack([nll, (predicted == targets).double(), top5.double(), brier, confidence.clamp(max=1.0)])
