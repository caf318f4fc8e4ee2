"""A sanity check after loading: are loss and accuracy of the first mini-batches better than guessing?

An accuracy at chance level means that weights, class order and normalisation do not match.
"""

import hashlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import bdtrc
from torch import Tensor

from landscape.data import dataset, structure
from landscape.options import counted
from landscape.subject.losses import class_indices
from landscape.subject.subject import Subject
from landscape.subject.targets import are_probabilities
from landscape.subject.weights_cache import once_per_weights

LEVEL = 0.01  # significance level of the test against guessing
INPUTS = 256 * 3 * 64 * 64  # numbers that pass through the model
SURE = 1e-6  # p-value below which a class order is named as the likely cause


@dataclass(frozen=True)
class SanityCheck:
    """Loss and accuracy of the first mini-batches, and whether guessing would do as well."""

    loss: float
    accuracy: float  # NaN where the loss defines none
    samples: int
    classes: int  # outputs of the model
    p_value: float  # binomial probability that guessing is right at least as often; NaN without an accuracy
    cause: str = ""  # the likely cause of an accuracy at chance level; "" where the samples suggest none
    lost: int = 0  # samples whose loss is not finite

    @property
    def at_chance(self) -> bool:
        """Whether the accuracy is no better than guessing, at a level of 1 %."""
        return self.p_value >= LEVEL


def check_sanity(subject: Subject, samples: int = 256) -> SanityCheck:
    """Evaluate the first mini-batches with together at least `samples` samples (64 for large images).

    Raises:
        ValueError: no loss is finite.
    """
    loss, correct, predicted, wanted = [], [], [], []
    classes, normalisation = 2, ""
    numbers = sum(tensor.numel() for tensor in structure.tensors_in(subject.batches[0][0])) // subject.samples(0)
    samples = max(min(64, samples), min(samples, INPUTS // max(numbers, 1)))
    with subject.evaluating():
        for i in range(len(subject.batches)):
            inputs, targets = subject.batch(i)
            outputs = subject.outputs(inputs)
            losses, right = subject.losses_and_right(outputs, targets)
            if subject.dense and isinstance(targets, Tensor):  # frames of a stream may have no label
                losses, right = (values[(targets >= 0).flatten(1).any(dim=1)] for values in (losses, right))
            loss.append(losses.detach().double())
            correct.append(right.detach().double())
            logits = structure.logits_or_none(outputs)
            if logits is not None and not subject.meaning.accuracy and are_classes(logits, targets):
                classes = logits.shape[1]
                predicted.append(logits.argmax(dim=1))
                wanted.append(class_indices(targets))
            normalisation = normalisation or _normalisation_hint(inputs)
            if sum(map(len, loss)) >= samples:
                break
    losses = torch.cat(loss)
    if not losses.isfinite().any():
        raise ValueError(
            f"the model's loss is {losses[0].item()} on all of the first {len(losses)} samples; "
            f"{why_not_finite(subject)}"
        )
    hit = torch.cat(correct)
    check = SanityCheck(losses.mean().item(), hit.mean().item(), len(losses), classes, math.nan)
    if lost := int((~losses.isfinite()).sum()):
        return replace(check, lost=lost, cause=why_not_finite(subject))
    if len(predicted) < len(loss):
        return check
    p_value = guessing_p_value(int(hit.sum().item()), len(losses), classes)
    cause = ""
    if p_value >= LEVEL:
        taken, targets_of = torch.cat(predicted).cpu().numpy(), torch.cat(wanted).cpu().numpy()
        cause = class_order_hint(taken, targets_of, classes) or normalisation
        if not cause and len(set(taken)) == 1:
            cause = f"every sample is predicted as class {taken[0]}, which suggests wrong weights or inputs"
    return replace(check, p_value=p_value, cause=cause)


def warning(check: SanityCheck, *, initial: bool | None = False, own: float | None = None) -> str:
    """The warning about losses that are not finite, or an accuracy at chance level; "" where there are none.

    An accuracy is expected at chance level where the weights are `initial` ones (None: they may be), or the
    checkpoint's `own` accuracy is at chance too.
    """
    samples = counted(check.samples, "sample")
    if check.lost:
        return (
            f"warning: the loss of {check.lost} of {samples} is not finite, nor are means over these samples; "
            f"{check.cause}"
        )
    expected = own is None or guessing_p_value(round(own * check.samples), check.samples, check.classes) < LEVEL
    if not check.at_chance or initial or not expected:
        return ""
    known = "" if own is None else f", and the checkpoint's own metrics say {own:.3f}"
    likely = f"; here {check.cause}" if check.cause else ""
    fresh = ", initial weights (epoch 0 may be either)" if initial is None else ""
    return (
        f"warning: accuracy {check.accuracy:.3f} on {samples} is no better than guessing among "
        f"{check.classes} classes (binomial test, p = {check.p_value:.2g}){known}; the common causes are classes in "
        f"another order than in training, another normalisation, and weights of another model{fresh}{likely}"
    )


def guessing_p_value(hits: int, samples: int, classes: int) -> float:
    """Probability that guessing among the classes is right at least `hits` times, P(X >= hits)."""
    return 1.0 if hits <= 0 else float(bdtrc(hits - 1, samples, 1 / classes))


def class_order_hint(predicted: np.ndarray, wanted: np.ndarray, classes: int) -> str:
    """A sentence if predictions match the targets under another numbering of the classes, else "".

    Tries a shift by one (a background class, say) on all samples. Tries a general order as the one-to-one assignment
    that fits every other sample of each class best, judged on the samples between. Class numbers are (N,).
    """
    size = max(classes, int(wanted.max()) + 1)
    fitted = _every_other(wanted)
    tables = np.zeros((2, size, size))  # of the samples that are judged, and of those that are fitted
    np.add.at(tables, (fitted.astype(int), wanted, predicted), 1)
    orders = [
        (predicted == wanted + 1, "the samples are predicted as their class + 1: the class numbers are shifted by one"),
        (predicted == wanted - 1, "the samples are predicted as their class - 1: the class numbers are shifted by one"),
    ]
    most = tables[0].max(axis=0).sum()  # an order has one class for every predicted one
    if guessing_p_value(most, int((~fitted).sum()), classes) < SURE:  # else no order can be sure, and SciPy takes long
        from scipy.optimize import linear_sum_assignment

        _, assigned = linear_sum_assignment(tables[1], maximize=True)
        words = "held-out samples are correct under another class order: check that of the data"
        orders.append((assigned[wanted[~fitted]] == predicted[~fitted], words))
    sure = [(hit.mean(), words) for hit, words in orders if guessing_p_value(hit.sum(), len(hit), classes) < SURE]
    return "{:.0%} of {}".format(*max(sure)) if sure else ""


def _every_other(classes: np.ndarray) -> np.ndarray:
    """Mask (N,) of the first, third, ... sample of each class."""
    by_class = np.argsort(classes, kind="stable")
    _, first, counts = np.unique(classes[by_class], return_index=True, return_counts=True)
    place = np.empty(len(classes), np.int64)
    place[by_class] = np.arange(len(classes)) - np.repeat(first, counts)
    return np.asarray(place % 2 == 0)


def are_classes(outputs: Tensor, targets: structure.Nested) -> bool:
    """Whether targets are class numbers or soft targets, whose rows sum to one, unlike those of a regression."""
    if not isinstance(targets, Tensor) or outputs.dim() != 2 or outputs.shape[1] < 2:
        return False
    if not targets.is_floating_point():
        return targets.dim() == 1
    return targets.shape == outputs.shape and are_probabilities(targets)


def why_not_finite(subject: Subject) -> str:
    """What is not finite, and what to do: inputs, targets, or weights by name."""
    first = 0
    for i in range(len(subject.batches)):
        for what, part in zip(("inputs", "targets"), subject.batch(i), strict=True):
            for tensor in (one for one in structure.tensors_in(part) if one.is_floating_point()):
                lost = (~tensor.isfinite()).reshape(len(tensor) if tensor.dim() else 1, -1).any(dim=1)
                if bool(lost.any()):
                    where = "" if bool(lost.all()) else f" of sample {first + int(lost.nonzero()[0])}"
                    return f"the {what}{where} of the data are not finite; check --data, --mean and --std"
        first += subject.samples(i)
    for name, tensor in subject.model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return f"the weight {name} is not finite; give an earlier checkpoint"
    return "weights and inputs are finite; check the normalisation of the data, and the weights, which may overflow"


def _normalisation_hint(inputs: structure.Nested) -> str:
    """A sentence if the inputs do not look normalised; "" if they do, and for token numbers."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return ""
    mean, std = inputs.double().mean().item(), inputs.double().std().item()
    low, high = inputs.min().item(), inputs.max().item()
    if low >= 0 and high <= 1:
        return f"the inputs lie between {low:.2g} and {high:.2g}: they are not normalised by mean and std"
    if abs(mean) > 3 or not 0.05 < std < 5:
        return f"the inputs have mean {mean:.3g} and std {std:.3g}, far from 0 and 1: check mean and std"
    return ""


SKETCH = 16  # digests of samples that are stored: the smallest, which overlapping sets share
FEW = 8  # samples of the pass whose first half also runs alone
APART = 0.02  # of the largest output: half precision rounds to less, statistics of a mini-batch change more
_log = logging.getLogger(__name__)


def premises(subject: Subject, weights: str) -> dict[str, Any]:
    """Attributes of a result by which `landscape.doctor` judges its samples, its weights and its forward pass.

    `samples_repeated` of the samples are copies of others. `samples_sketch` holds the smallest digests of samples, of
    which two overlapping sets share some. `stated_accuracy` and `stated_loss` are those that a checkpoint of the
    trainer has of the test split of its data. `mini_batch` says how outputs depend on the mini-batch.
    """
    digests = sorted(_digests(subject))
    distinct = sorted(set(digests))
    stored = subject.checkpoint
    known = stored.metrics if stored is not None and stored.data.get("name") == subject.data.name else {}
    return {
        "samples_repeated": len(digests) - len(distinct), "samples_sketch": " ".join(distinct[:SKETCH]),
        "stated_accuracy": float(known.get("accuracy", math.nan)), "stated_loss": float(known.get("loss", math.nan)),
        "mini_batch": mini_batch_effect(subject), "weights_sha256": weights,
    }  # fmt: skip


def _digests(subject: Subject) -> Iterator[str]:
    """A short digest of the inputs of every sample, where they are rows of tensors."""
    if isinstance(subject.batches, dataset.Batches) and not subject.batches.images.sequences:
        yield from _of_rows(subject.batches.images.inputs)
    elif isinstance(subject.batches, dataset.BatchList):
        for inputs, _ in subject.batches.pairs:
            if isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.dim() > 1:
                yield from _of_rows(inputs)


def _of_rows(inputs: Tensor) -> Iterator[str]:
    for row in inputs.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy() if len(inputs) else ():
        yield hashlib.blake2b(row, digest_size=6).hexdigest()


@once_per_weights
def mini_batch_effect(subject: Subject) -> str:
    """How outputs of a few samples change with the others in their mini-batch, in words; "" if they do not."""
    fixed = subject.checkpoint is not None and subject.checkpoint.batch_size
    if subject.members or fixed or not isinstance(subject.batches, dataset.Batches) or not subject.divisible:
        return ""
    try:
        with subject.evaluating(), torch.no_grad():
            inputs = structure.rows_of(subject.batch(0)[0], slice(FEW))
            whole = next(structure.tensors_in(subject.outputs(inputs)))
            half = len(whole) // 2
            alone = next(structure.tensors_in(subject.outputs(structure.rows_of(inputs, slice(half)))))
    except (RuntimeError, ValueError, TypeError, IndexError, StopIteration) as error:  # named by the measurement itself
        _log.info("whether outputs depend on the mini-batch is not known: %s", error)
        return ""
    if half < 2 or alone.shape != whole[:half].shape:
        return ""
    change, size = (float(t.detach().float().abs().max()) for t in (alone - whole[:half], whole))
    if not change > APART * size:
        return ""
    return f"outputs of {half} samples change by up to {change / size:.0%} when {len(whole) - half} others join them"
