"""Targets that a loss ignores, such as an `ignore_index`: a mean that counts them is diluted, an accuracy is wrong."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.checkpoints.user_code import fixed_rng
from landscape.data import dataset, structure
from landscape.subject.losses import IGNORED, Loss
from landscape.subject.subject import Subject

# Losses of torch that take logits: what a network with probabilities ends in, and the loss that takes these.
OF_TORCH: Mapping[Any, tuple[str, str]] = {
    F.cross_entropy: ("softmax", "nll"), nn.CrossEntropyLoss: ("softmax", "nll"),
    F.binary_cross_entropy_with_logits: ("sigmoid", "bce-probabilities"),
    nn.BCEWithLogitsLoss: ("sigmoid", "bce-probabilities"),
}  # fmt: skip
MOST_CLASSES = 1_024  # that a loss is called with, one by one
MANY = 10_000  # mini-batches, above which only the first is looked at


def refuse_diluting(loss: Loss, data: dataset.Images | dataset.BatchList, ignored: list[int]) -> NoReturn:
    """Reject a loss per sample, token or pixel that is 0 for those without a label, which would dilute the mean.

    Raises:
        Diluted: it is such a loss.
    """
    every = [targets for targets in _targets(data) if isinstance(targets, Tensor)]
    of_samples = every[0].dim() == 1
    count = sum(int((targets == value).sum()) for targets in every for value in ignored)
    label = "targets >= 0" if max(ignored) < 0 else f"targets != {ignored[-1]}"
    what, cure = f"{sum(map(Tensor.numel, every))} tokens or pixels", f"{label}).flatten(1).sum(1)"
    raise Diluted(
        f"{named(loss)} is 0 for {count} of {len(data) if of_samples else what}, whose target {ignored[-1]} stands "
        + ("for no label; leave these samples out of the data" if of_samples else
           f"for no label; return one loss per sample: losses.view(len(targets), -1).sum(1) / ({cure}")
    )  # fmt: skip


class Diluted(ValueError):
    """A mean over samples, tokens or pixels would count those without a label."""


def refuse_empty_mean(subject: Subject, loss: Loss, ignored: list[int]) -> None:
    """Reject a mean over a mini-batch without a label, which is not a number.

    Raises:
        ValueError: there is such a mini-batch.
    """
    for i, (_, targets) in enumerate(subject.batches if len(subject.batches) < MANY else ()):
        given = [targets[name] for name in structure.TARGETS if name in targets] if isinstance(targets, Mapping) else []
        labels = given[0] if given else targets
        known = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.numel()
        if known and bool(torch.isin(labels, torch.tensor(ignored, device=labels.device)).all()):
            raise ValueError(
                f"{named(loss)} is a mean over the labels of a mini-batch, and mini-batch {i} of "
                f"{subject.data.in_words} has none (all {ignored[-1]}); leave such samples out"
            )


def ignored(loss: Loss, logits: Tensor | None, data: dataset.Images | dataset.BatchList | None) -> list[int]:
    """The class numbers among all targets that have no loss whatever the outputs, such as an `ignore_index`.

    PyTorch's losses say theirs. Another loss is called with made-up outputs of one sample, or of one pixel or token: no
    number has a loss of 0 for two of them unless it is ignored, while a sure network has such losses in plenty.
    """
    every = [] if data is None or logits is None else list(_targets(data))
    if loss.takes_batch or not every or not isinstance(every[0], Tensor) or logits is None:
        return []
    shape, given = every[0].shape, [one for one in every if isinstance(one, Tensor) and one.numel()]
    if any(one.is_floating_point() or one.is_complex() or one.dim() != len(shape) for one in given) or not given:
        return []
    last = logits.dim() == 3 and logits.shape[:2] == shape[:2]  # (N, tokens, classes)
    if logits.dim() != len(shape) + 1 or (classes := logits.shape[-1 if last else 1]) < 2:
        return []

    def none(value: int, *outputs: Tensor) -> bool:
        targets = torch.full((1,) * len(shape), value, dtype=given[0].dtype, device=logits.device)
        with fixed_rng(0), torch.no_grad():
            return all(not loss.function(one, targets).nan_to_num().any() for one in outputs)

    low, high = min(int(one.min()) for one in given), max(int(one.max()) for one in given)
    if (own := _ignore_index(loss)) is not None:
        values = [own]
    else:
        blank = logits.new_zeros(
            [classes if i == (logits.dim() - 1 if last else 1) else 1 for i in range(logits.dim())]
        )
        made = (blank, blank + torch.linspace(-1, 1, classes, device=logits.device).reshape(blank.shape).to(blank))
        within = range(max(low, 0), min(high + 1, classes)) if classes <= MOST_CLASSES else range(0)
        try:
            values = [value for value in within if none(value, *made)]
            values = [] if len(values) == len(within) > 0 else values  # nothing of one sample alone has a loss
            values += [value for value in (low, high) if not 0 <= value < classes and none(value, *made)]
        except Exception:  # whatever the user's function raises for a sample of this size, or for no class
            return []
    return [value for value in sorted({*values}) if any(bool((one == value).any()) for one in given)]


def _ignore_index(loss: Loss) -> int | None:
    """What one of PyTorch's losses ignores; None of other losses."""
    function = getattr(loss.function, "__wrapped__", loss.function)
    if isinstance(loss.function, partial):
        return loss.function.keywords.get("ignore_index", IGNORED) if of_torch(loss.function) else None
    known = getattr(function, "ignore_index", None) if isinstance(function, nn.Module) else None
    return known if isinstance(known, int) else IGNORED if function is F.cross_entropy else None


def _targets(data: dataset.Images | dataset.BatchList) -> Iterator[structure.Nested]:
    return iter([data.targets] if isinstance(data, dataset.Images) else [targets for _, targets in data.pairs])


def of_torch(losses: Callable[..., Any]) -> tuple[str, str] | None:
    """The row of `OF_TORCH` of a loss, or of what it wraps."""
    given = getattr(losses, "__wrapped__", losses)
    given = given.func if isinstance(given, partial) else given
    return OF_TORCH.get(given if inspect.isfunction(given) else type(given))


def named(loss: Loss) -> str:
    """A loss as errors call it."""
    return f"--loss {loss.name}" if loss.name else "the loss"
