"""Scores of predicted probabilities per image: over the labelled pixels of a mask, or of the one class of an image."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from landscape.results.calibration import BINS, EDGES
from landscape.subject.subject import Subject

MEANS = ("nll", "correct", "top5", "brier")
Sums = dict[str, np.ndarray]


def image_scores(log_probabilities: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Scores of one image, float64: means over its labelled pixels, and counts of pixels per class.

    Log probabilities are (C, ...) and targets (...): () for the class of an image, (H, W) for a mask. Negative targets
    have no label; an image without any gives NaN and counts of 0.

    Returns:
        `nll, correct, top5, brier` (), of every confidence bin (10,) the share of the pixels `share` and the sums of
        confidence and correctness over these `confidence, right`, and `intersection, union` (C,) in pixels.
    """
    logs, wanted = log_probabilities.reshape(len(log_probabilities), -1), targets.flatten()
    labelled = wanted >= 0
    if not bool(labelled.all()):
        logs, wanted = logs[:, labelled], wanted[labelled]
    classes, pixels = logs.shape
    wanted = wanted.long()
    own = logs.gather(0, wanted[None])[0].double()
    probabilities = logs.exp()
    confidence, predicted = probabilities.max(dim=0)
    right = (predicted == wanted).double()
    first = logs.topk(min(5, classes), dim=0).indices
    square = probabilities.double().square().sum(dim=0)
    bin_of = torch.bucketize(confidence.double(), torch.from_numpy(EDGES).to(logs.device))
    per_bin = torch.zeros(3, BINS, dtype=torch.float64, device=logs.device)
    per_bin.index_add_(1, bin_of, torch.stack([torch.ones_like(right), confidence.double(), right]))
    hits = torch.bincount(wanted[predicted == wanted], minlength=classes)
    either = torch.bincount(wanted, minlength=classes) + torch.bincount(predicted, minlength=classes) - hits
    share, confident, correct = per_bin / pixels
    return {
        "nll": -own.mean(),
        "correct": right.mean(),
        "top5": (first == wanted).any(dim=0).double().mean(),
        "brier": (square - 2 * own.exp() + 1).mean(),
        "share": share,
        "confidence": confident,
        "right": correct,
        "intersection": hits.double(),
        "union": either.double(),
    }


def summarised(images: Mapping[str, np.ndarray], weights: np.ndarray | None = None) -> Sums:
    """Scores of several images, each with the same weight whatever the number of its labelled pixels.

    Images are the arrays of `image_scores` stacked along the first axis, (N, ...). `weights` (..., N) gives how often
    each of them counts in a resample; by default each counts once. Images without a label (NaN) never count.

    Returns:
        `nll, accuracy, top5, brier`; over 10 confidence bins `ece`, and signed, confidence - accuracy, `ece_signed`; at
        the confidence 0.9 `accuracy_90` (accuracy of confident predictions), `uncertainty_90` (share of wrong ones that
        are not confident) and `frequency_90` (share of confident ones); `mean_iou`, the intersection over union of all
        pixels, mean over the classes that occur. Each has the leading axes of the weights.
    """
    known = np.isfinite(images["nll"])
    weights = (np.ones(len(known)) if weights is None else weights) * known
    total = weights.sum(axis=-1)

    def mean(name: str) -> np.ndarray:
        return np.tensordot(weights, np.nan_to_num(images[name]), axes=(-1, 0))

    with np.errstate(invalid="ignore", divide="ignore"):
        nll, accuracy, top5, brier = (mean(name) / total for name in MEANS)
        share, confidence, right = (mean(name) / total[..., None] for name in ("share", "confidence", "right"))
        iou = mean("intersection") / mean("union")
        return {
            "nll": nll,
            "accuracy": accuracy,
            "top5": top5,
            "brier": brier,
            "ece": np.abs(confidence - right).sum(axis=-1),
            "ece_signed": (confidence - right).sum(axis=-1),
            "accuracy_90": right[..., -1] / share[..., -1],
            "uncertainty_90": 1 - (share - right)[..., -1] / (1 - accuracy),
            "frequency_90": share[..., -1],
            "mean_iou": np.nanmean(np.where(np.isfinite(iou), iou, np.nan), axis=-1),
        }


def jackknife(images: Mapping[str, np.ndarray]) -> Sums:
    """Standard errors of `summarised` over images, by leaving out one at a time (Efron & Stein 1981)."""
    n = len(images["nll"])
    if n < 2:
        return {name: np.array(np.nan) for name in summarised(images)}
    parts = summarised(images, 1 - np.eye(n))
    return {name: np.sqrt((n - 1) / n * np.square(values - values.mean()).sum()) for name, values in parts.items()}


def stacked(images: list[dict[str, Tensor]]) -> Sums:
    """The scores of several images along a first axis, on the CPU."""
    return {name: torch.stack([one[name] for one in images]).cpu().numpy() for name in images[0]}


def pixel_metrics(subject: Subject) -> dict[str, float]:
    """Metrics of a dense prediction over all images with their standard errors over images, as `evaluate` names them.

    Pixels of one image are not independent, so that errors are over images.
    """
    parts: list[dict[str, Tensor]] = []
    with subject.evaluating():
        for inputs, targets in subject.each_batch():
            logits = subject.outputs(inputs)
            assert isinstance(targets, Tensor)
            parts += [image_scores(one.double().log_softmax(dim=0), y) for one, y in zip(logits, targets, strict=True)]
    images = stacked(parts)
    values, errors = summarised(images), jackknife(images)
    metrics: dict[str, float] = {"samples": len(parts)}
    for name, key in {"loss": "nll", **{key: key for key in ("accuracy", "mean_iou", "brier", "ece")}}.items():
        metrics[name], metrics[f"{name}_se"] = float(values[key]), float(errors[key])
    return metrics
