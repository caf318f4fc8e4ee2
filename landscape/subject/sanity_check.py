"""The cheapest proof that weights, classes and normalisation met: loss and accuracy of the first mini-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import bdtrc
from torch import Tensor

from landscape.subject.outputs import outputs_of
from landscape.subject.subject import Subject

LEVEL = 0.01  # of the test against guessing
INPUTS = 256 * 3 * 64 * 64  # numbers that pass through the model
SURE = 1e-6  # of what is named as the likely cause


@dataclass(frozen=True)
class Proof:
    """Loss and accuracy of the first mini-batches, and whether guessing would do as well.

    Args:
        accuracy: what the loss counts as right, NaN where it knows no right and wrong.
        classes: outputs of the model.
        chance: probability that guessing one of the classes is right as often or more often, by the binomial
            distribution; NaN without an accuracy.
        cause: what the samples say about why accuracy is at chance, "" where they say nothing.
    """

    loss: float
    accuracy: float
    samples: int
    classes: int
    chance: float
    cause: str = ""

    @property
    def at_chance(self) -> bool:
        """Guessing does as well, at a level of 1 %."""
        return self.chance >= LEVEL


def prove(subject: Subject, samples: int = 256) -> Proof:
    """Evaluate the first mini-batches, as many as hold so many samples; of large images fewer, 64 at least.

    Raises:
        ValueError: no output is finite.
    """
    loss, right, predicted, wanted = [], [], [], []
    classes, moments = 2, ""
    samples = max(min(64, samples), min(samples, INPUTS // subject.batches[0][0][0].numel()))
    with torch.inference_mode():
        for i in range(len(subject.batches)):
            inputs, targets = subject.batch(i)
            outputs = outputs_of(subject.model, inputs)
            classes = outputs.shape[-1]
            loss.append(subject.losses(outputs, targets).double())
            right.append(subject.right(outputs, targets).double())
            if not subject.meaning.accuracy and are_classes(outputs, targets):
                predicted.append(outputs.argmax(dim=1))
                wanted.append(targets.argmax(dim=1) if targets.is_floating_point() else targets)
            moments = moments or _unusual(inputs)
            if sum(map(len, loss)) >= samples:
                break
    losses = torch.cat(loss)
    if not losses.isfinite().any():
        raise ValueError(
            f"the model's loss is {losses[0].item()} on all of the first {len(losses)} samples; "
            "check the weights for non-finite values and the normalisation of the data"
        )
    hit = torch.cat(right)
    proof = Proof(losses.mean().item(), hit.mean().item(), len(losses), classes, math.nan)
    if len(predicted) < len(loss):
        return proof
    hits = int(hit.sum().item())
    chance = guessed(hits, len(losses), classes)
    cause = ""
    if chance >= LEVEL:
        taken, classes_of = torch.cat(predicted).cpu().numpy(), torch.cat(wanted).cpu().numpy()
        cause = order_of(taken, classes_of, classes) or moments or _one_class(taken)
    return replace(proof, chance=chance, cause=cause)


def doubt(proof: Proof, *, epoch: float = math.nan, own: float | None = None) -> str:
    """What to say about weights whose accuracy is at chance; "" where nothing is wrong with that.

    Args:
        proof: of a model whose weights come from a checkpoint.
        epoch: of the checkpoint; initial weights have no more than chance.
        own: accuracy that the checkpoint itself names; one that is at chance too is no surprise.
    """
    expected = own is None or guessed(round(own * proof.samples), proof.samples, proof.classes) < LEVEL
    if not proof.at_chance or epoch == 0 or not expected:
        return ""
    known = "" if own is None else f", and the checkpoint's own metrics say {own:.3f}"
    likely = f"; here {proof.cause}" if proof.cause else ""
    return (
        f"warning: accuracy {proof.accuracy:.3f} on {proof.samples} samples is no better than guessing among "
        f"{proof.classes} classes (binomial test, p = {proof.chance:.2g}){known}; the common causes are classes in "
        f"another order than in training, another normalisation, and weights of another model{likely}"
    )


def guessed(hits: int, samples: int, classes: int) -> float:
    """Probability that guessing among the classes gives so many hits or more, P(X >= hits)."""
    return 1.0 if hits <= 0 else float(bdtrc(hits - 1, samples, 1 / classes))


def order_of(predicted: np.ndarray, wanted: np.ndarray, classes: int) -> str:
    """Words on predictions that follow the targets through another numbering of the classes; "" where they do not.

    A shift by one (a background class, say) is looked for in all samples. A general order is the one-to-one assignment
    that fits every other sample of each class best, and counts by how well it does on those between.

    Args:
        predicted: (N,) class numbers.
        wanted: (N,) likewise.
        classes: how many there are.
    """
    found: list[tuple[float, str]] = []
    for shift in (1, -1):
        hits = int((predicted == wanted + shift).sum())
        if guessed(hits, len(wanted), classes) < SURE:
            share = hits / len(wanted)
            words = f"{share:.0%} of the samples are taken for the class {shift:+d}: the classes are shifted by one"
            found.append((share, words))
    from scipy.optimize import linear_sum_assignment

    size = max(classes, int(wanted.max()) + 1)
    table = np.zeros((size, size))
    fitted = _every_other(wanted)
    np.add.at(table, (wanted[fitted], predicted[fitted]), 1)
    _, assigned = linear_sum_assignment(table, maximize=True)
    held_out, taken = wanted[~fitted], predicted[~fitted]
    hits = int((assigned[held_out] == taken).sum())
    if guessed(hits, len(held_out), classes) < SURE:
        share = hits / len(held_out)
        words = f"{share:.0%} of held-out samples are right in another order of the classes: check that of the data"
        found.append((share, words))
    return max(found, default=(0.0, ""))[1]


def _every_other(classes: np.ndarray) -> np.ndarray:
    """The first, third, ... sample of each class (N,), true; the others false."""
    by_class = np.argsort(classes, kind="stable")
    _, first, counts = np.unique(classes[by_class], return_index=True, return_counts=True)
    place = np.empty(len(classes), np.int64)
    place[by_class] = np.arange(len(classes)) - np.repeat(first, counts)
    return np.asarray(place % 2 == 0)


def _one_class(predicted: np.ndarray) -> str:
    taken = np.unique(predicted)
    return f"every sample is taken for class {taken[0]}, as unfit weights or inputs do" if len(taken) == 1 else ""


def are_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Class numbers, or shares of the classes: rows that sum to one, as the targets of a regression do not."""
    if outputs.dim() != 2 or outputs.shape[1] < 2:
        return False
    if not targets.is_floating_point():
        return targets.dim() == 1
    sums = targets.double().sum(dim=-1)
    return targets.shape == outputs.shape and bool(((sums - 1).abs() < 1e-3).all() & (targets >= 0).all())


def _unusual(inputs: Tensor) -> str:
    """Words on inputs that do not look normalised; "" for those that do, and for numbers of tokens."""
    if not inputs.is_floating_point():
        return ""
    mean, std = inputs.double().mean().item(), inputs.double().std().item()
    low, high = inputs.min().item(), inputs.max().item()
    if low >= 0 and high <= 1:
        return f"the inputs lie between {low:.2g} and {high:.2g}: they are not normalised by mean and std"
    if abs(mean) > 3 or not 0.05 < std < 5:
        return f"the inputs have mean {mean:.3g} and std {std:.3g}, far from 0 and 1: check mean and std"
    return ""
