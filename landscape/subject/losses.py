"""The data term of the objective: losses per sample, by name or by a callable of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.checkpoints.user_code import import_callable
from landscape.options import invalid
from landscape.probe import Quantity

Losses = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (N,)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy from log-sum-exp, (N,); of a sequence of tokens its mean over them.

    Args:
        outputs: logits (N, classes), or (N, tokens, vocabulary).
        targets: class indices (N,), shares (N, classes), or the next tokens (N, tokens).
    """
    if outputs.dim() == 3:
        every = F.cross_entropy(outputs.flatten(0, 1), targets.flatten().long(), reduction="none")
        return every.view(targets.shape).mean(dim=1)
    soft = targets.is_floating_point()
    return F.cross_entropy(outputs, targets.to(outputs.dtype) if soft else targets.long(), reduction="none")


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, mean over the outputs of a sample, (N,)."""
    return F.mse_loss(*_rows(outputs, targets), reduction="none").mean(dim=1)


def l1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error, mean over the outputs of a sample, (N,)."""
    return F.l1_loss(*_rows(outputs, targets), reduction="none").mean(dim=1)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber loss with delta 1, mean over the outputs of a sample, (N,): e^2/2 up to |e| = 1, then |e| - 1/2."""
    return F.huber_loss(*_rows(outputs, targets), reduction="none").mean(dim=1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits, mean over the labels of a sample, (N,); for several labels per sample."""
    return F.binary_cross_entropy_with_logits(*_rows(outputs, targets), reduction="none").mean(dim=1)


def _rows(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both with all that belongs to a sample in one row.

    Raises:
        ValueError: they have different sizes; torch would repeat the smaller one.
    """
    if outputs.numel() != targets.numel():
        raise ValueError(
            f"the model returns {tuple(outputs.shape)} for targets {tuple(targets.shape)}, expected a number for each"
        )
    return outputs.reshape(len(outputs), -1), targets.to(outputs.dtype).reshape(len(outputs), -1)


def most_probable(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether each sample's largest logit is at its (largest) target, (N,); of a sequence the share of its tokens.

    NaN where targets are no classes.
    """
    if outputs.dim() == 3 and not targets.is_floating_point() and targets.shape == outputs.shape[:2]:
        return (outputs.argmax(dim=2) == targets).double().mean(dim=1)
    if outputs.dim() != 2 or (targets.is_floating_point() and targets.shape != outputs.shape):
        return nowhere(outputs, targets)
    wanted = targets.argmax(dim=1) if targets.is_floating_point() else targets
    return outputs.argmax(dim=1) == wanted


def each_label(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of a sample's labels on their side: logit above 0 where the target is above 1/2, (N,)."""
    logits, wanted = _rows(outputs, targets)
    return ((logits > 0) == (wanted > 0.5)).double().mean(dim=1)


def nowhere(outputs: Tensor, targets: Tensor) -> Tensor:
    """NaN for every sample, (N,): there is no right and wrong."""
    return torch.full((len(targets),), torch.nan, device=outputs.device)


@dataclass(frozen=True)
class Meaning:
    """What the numbers of a loss stand for.

    Args:
        units: of the loss.
        right: `(outputs, targets) -> (N,)`, what accuracy is the mean of.
        accuracy: that in words; "" for the share of samples whose class is the most probable one.
    """

    units: str
    right: Losses = most_probable
    accuracy: str = ""

    def of_accuracy(self, long_name: str, dims: tuple[str, ...] = ()) -> Quantity:
        """A quantity that is an accuracy, or a difference of two: it says what it counts, or that there is none."""
        if self.right is nowhere:
            return Quantity(f"{long_name} ({self.accuracy})", "undefined", dims)
        return Quantity(f"{long_name} ({self.accuracy})" if self.accuracy else long_name, dims=dims)


CLASSIFICATION = Meaning("nats")
NAMES: Mapping[str, Losses] = {"cross-entropy": cross_entropy, "mse": mse, "l1": l1, "huber": huber, "bce": bce}
NONE = "none: a regression has no classes"
MEANINGS: Mapping[Losses, Meaning] = {
    cross_entropy: CLASSIFICATION,
    mse: Meaning("squared error", nowhere, NONE),
    l1: Meaning("absolute error", nowhere, NONE),
    huber: Meaning("Huber loss", nowhere, NONE),
    bce: Meaning("nats", each_label, "share of a sample's labels on their side of 1/2"),
}


def meaning_of(losses: Losses) -> Meaning:
    """What the numbers of a loss stand for; of one made elsewhere the unit is unknown."""
    return MEANINGS.get(losses, Meaning("loss"))


def losses_of(spec: str) -> Losses:
    """The losses that a word names: one of `NAMES`, or `file.py:callable` or `module:callable`.

    A callable takes outputs and targets of a mini-batch and returns one loss per sample.

    Raises:
        OptionError: there is no loss of that name.
        FileNotFoundError, ValueError: the callable cannot be loaded; or, when called, it does not return one loss per
            sample.
    """
    if not spec:
        return cross_entropy
    if spec in NAMES:
        return NAMES[spec]
    if ":" not in spec:
        raise invalid("loss", spec, f"{', '.join(NAMES)}, or file.py:callable")
    function = import_callable(spec)

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        found = function(outputs, targets)
        if not isinstance(found, Tensor) or found.shape != (len(targets),):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"--loss {spec} returned {got} for {len(targets)} samples, expected one loss per sample, "
                f'({len(targets)},); with torch\'s losses ask for reduction="none"'
            )
        return found

    return losses
