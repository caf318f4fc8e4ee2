"""Evaluate a network: loss, accuracy, top-5, Brier score and calibration error, each with its standard error."""

import logging
import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints.user_code import fixed_rng
from landscape.data.structure import Forward, Nested, outputs_of
from landscape.options import OptionError, at_least
from landscape.predictions.scores import logits_and_targets, overlaps, sample_scores, score_rows
from landscape.probe import derived_seed
from landscape.statistics import calibration
from landscape.statistics.calibration import SampleScores
from landscape.statistics.means import jackknife_error
from landscape.subject import precision, restoration, sample_statistics
from landscape.subject.loading import checks, next_tokens
from landscape.subject.losses import cross_entropy
from landscape.subject.subject import Subject

_log = logging.getLogger(__name__)


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Nested, Tensor]],
    *,
    passes: int = 1,
    seed: int = 0,
    forward: Forward = outputs_of,
) -> dict[str, Any]:
    """Evaluate a classifier in eval mode, leaving every module in the mode it was in.

    Batches are inputs on the model's device and class indices (N,) or soft targets (N, classes). For a network that is
    stochastic at test time (MC dropout, Gal & Ghahramani 2016, arXiv 1506.02142), evaluate the mean of the
    probabilities of several passes, whose random numbers follow from the seed.

    Returns:
        `samples`, and means over them: `loss`, the cross-entropy; `accuracy` and `top5`, fractions (1 of at most five
        classes); `brier`, sum over classes of (p - y)^2; `ece`, the calibration error (`calibration.gaps`). Each with
        its standard error `NAME_se`, std(ddof=1) / sqrt(samples), NaN for a single sample.

    Raises:
        OptionError: `passes` is below 1.
        ValueError: there is no batch, or the targets are not classes.
    """
    at_least("passes", passes, 1)
    parts: list[Tensor] = []
    stochastic = False
    with torch.no_grad(), restoration.evaluation_mode(model):
        for i, (inputs, targets) in enumerate(batches):
            with fixed_rng(derived_seed(seed, "passes", i)) if passes > 1 else nullcontext():
                outputs = [forward(model, inputs) for _ in range(passes)]
            stochastic = stochastic or any(not torch.equal(one, outputs[0]) for one in outputs[1:])
            logits = outputs[0]
            if passes > 1:  # the logarithm of the mean probabilities, which are their logits
                logarithms = torch.stack([one.double().log_softmax(dim=1) for one in outputs])
                logits = logarithms.logsumexp(dim=0) - math.log(passes)
            parts.append(score_rows(logits, targets))
    if passes > 1 and parts and not stochastic:
        _log.warning("the %d passes are equal: this network is deterministic at test time, one pass suffices", passes)
    if not parts:
        raise ValueError("got no batches to evaluate on, expected at least one; raise --samples")
    # Copied to the host once: a copy per batch would make a GPU wait.
    return _with_errors(SampleScores(*torch.cat(parts, dim=1).cpu().numpy()))


@precision.exact_arithmetic()
def metrics_of(subject: Subject, *, passes: int = 1) -> dict[str, float]:
    """The metrics of `evaluate` of a classifier; of another model the loss, and the accuracy if the loss defines one.

    A language model also has its perplexity (`_perplexity`). Samples are sequences: errors are over sequences because
    the tokens of one are dependent. A dense prediction has the metrics of a classifier, means
    over the labelled pixels of every image, and the mean intersection over union; its errors are over images.

    Raises:
        OptionError: several passes of a model that is not a classifier, or that has members.
        ValueError: as `evaluate`, or the model draws random numbers and there is one pass.
    """
    if passes > 1 and subject.members:
        raise OptionError(f"--passes {passes} and --mc-dropout {subject.members} both average; give one of them")
    targets = subject.batch(0)[1]
    soft = targets.is_floating_point() if isinstance(targets, Tensor) else False
    classes = subject.losses is cross_entropy and isinstance(targets, Tensor) and targets.dim() == (2 if soft else 1)
    if passes == 1:
        with restoration.evaluation_mode(subject.model):
            checks.refuse_stochastic(subject, "; or average several passes (--passes 10)" if classes else "")
    if subject.dense and passes == 1:
        return _of_masks(subject)
    if classes:
        batches = subject.each_batch()
        return evaluate(subject.model, batches, passes=passes, seed=subject.seed, forward=subject.forward)
    if passes != 1:
        raise OptionError(f"--passes {passes} averages the probabilities of a classifier; leave it out here")
    loss, correct = sample_statistics.intact_per_sample(subject)
    metrics: dict[str, float] = {"samples": len(loss)}
    metrics["loss"], metrics["loss_se"] = sample_statistics.mean_and_standard_error(loss)
    if subject.traits.mean_only:
        metrics["loss_se"] = math.nan
    if not correct.isnan().any():
        metrics["accuracy"], metrics["accuracy_se"] = sample_statistics.mean_and_standard_error(correct)
    return metrics | _perplexity(subject, loss, correct) if next_tokens.of_tokens(subject) else metrics


def _perplexity(subject: Subject, loss: Tensor, correct: Tensor) -> dict[str, float]:
    """Perplexity, the exponential of the mean loss over all tokens with a target, given that of each sequence (N,).

    Where sequences differ in the number n of these tokens, that mean is the ratio sum(n l) / sum(n), which differs from
    the mean over sequences; it is given too, as `token_loss`, and likewise `token_accuracy`. Errors over sequences are
    those of a ratio, by the delta method, and of its exponential.
    """
    counts = torch.cat([(targets >= 0).sum(dim=1) for _, targets in subject.each_batch()]).double().cpu()
    mean, ratio_of = loss.mean(), counts / counts.mean()
    alike = bool((counts == counts[0]).all())
    if not alike:
        mean = (ratio_of * loss).mean()
    _, error = sample_statistics.mean_and_standard_error(ratio_of * (loss - mean))
    perplexity = math.exp(mean)
    metrics = {"perplexity": perplexity, "perplexity_se": perplexity * error}
    if alike:
        return metrics
    share = (ratio_of * correct).mean()
    _, share_error = sample_statistics.mean_and_standard_error(ratio_of * (correct - share))
    tokens = {"token_loss": mean.item(), "token_loss_se": error}
    return {**tokens, "token_accuracy": share.item(), "token_accuracy_se": share_error, **metrics}


def _with_errors(scores: SampleScores) -> dict[str, Any]:
    """The metrics that `calibration` stores as far as they have a standard error, with it; the NLL is the loss."""
    values = calibration.summary(scores)
    found: dict[str, Any] = {"samples": len(scores)}
    for metric, error in calibration.standard_errors(scores).items():
        name = "loss" if metric == "nll" else metric
        found |= {name: values[metric], f"{name}_se": error}
    return found


def _of_masks(subject: Subject) -> dict[str, float]:
    """Metrics of a dense prediction; the error of the intersection over union leaves out one image at a time."""
    parts, pixels = [], []
    for i in range(len(subject.batches)):
        logits, targets = logits_and_targets(subject, i)
        parts.append(sample_scores(logits, targets))
        pixels.append(overlaps(logits, targets))
    images = torch.cat(pixels).cpu().numpy()
    total, n = images.sum(axis=0), len(images)
    left_out = calibration.mean_iou(total - images)
    error = float(jackknife_error(left_out)) if n > 1 else math.nan
    return _with_errors(calibration.joined(parts)) | {
        "mean_iou": float(calibration.mean_iou(total)),
        "mean_iou_se": error,
    }
