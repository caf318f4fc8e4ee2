"""The data term of the objective: losses per sample, by name or by a callable of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from landscape.data.source import named
from landscape.probe import OptionError

Losses = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (N,)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy from log-sum-exp, (N,); targets are class indices (N,) or shares (N, classes)."""
    soft = targets.is_floating_point()
    return F.cross_entropy(outputs, targets.to(outputs.dtype) if soft else targets.long(), reduction="none")


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, mean over the outputs of a sample, (N,)."""
    wanted = targets.to(outputs.dtype).reshape(len(outputs), -1)
    return F.mse_loss(outputs.reshape(len(outputs), -1), wanted, reduction="none").mean(dim=1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits, mean over the labels of a sample, (N,); for several labels per sample."""
    wanted = targets.to(outputs.dtype).reshape(len(outputs), -1)
    logits = outputs.reshape(len(outputs), -1)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(dim=1)


NAMES: Mapping[str, Losses] = {"cross-entropy": cross_entropy, "mse": mse, "bce": bce}


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
        raise OptionError(f"--loss {spec} is unknown; ask for {', '.join(NAMES)}, or file.py:callable")
    function = named(spec)

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
