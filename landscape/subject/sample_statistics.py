"""Means over samples and their errors; accuracy drop and loss increase of a modified network as paired differences."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.data.structure import Nested
from landscape.headline import HIGHER, Headline
from landscape.probe import Quantity, Values
from landscape.statistics.means import means_by_name
from landscape.subject.losses import CLASSIFICATION, Meaning
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

INTACT = (
    Headline("intact accuracy", "intact_accuracy", reading=HIGHER, samples=True),
    Headline("intact loss", "intact_loss", unless="intact_accuracy"),
)


def largest(axis: str, where: str, **column: Any) -> tuple[Headline, ...]:
    """The largest drop of the accuracy along an axis; of the loss, which defines none, the largest increase."""
    drop = Headline("largest drop", "accuracy_drop", {axis: "largest"}, where=where, **column)
    return drop, replace(drop, name="largest increase", quantity="loss_increase", unless="accuracy_drop")


def mean_and_standard_error(values: Tensor) -> tuple[float, float]:
    """Mean of independent values (n,) and its standard error, std / sqrt(n); NaN for a single value.

    PyTorch and NumPy (`statistics.means`) sum in different orders, so that the last digits of a stored error differ.
    """
    n = len(values)
    return values.mean().item(), values.std().item() / n**0.5 if n > 1 else math.nan


def quantities(meaning: Meaning = CLASSIFICATION) -> dict[str, Quantity]:
    """Quantities that are stored per mini-batch."""
    return {
        "samples": Quantity("samples in the mini-batch"),
        "accuracy_drop_sum": meaning.of_accuracy("sum over samples of accuracy before - after"),
        "accuracy_drop_square_sum": meaning.of_accuracy("sum over samples of the squared accuracy before - after"),
        "loss_increase_sum": Quantity("sum over samples of loss after - before", meaning.units),
        "loss_increase_square_sum": Quantity("sum over samples of its square", f"{meaning.units}^2"),
    }


def summaries(axes: str | tuple[str, ...], meaning: Meaning = CLASSIFICATION) -> dict[str, Quantity]:
    """Means and standard errors along one axis or several, which `reduced` computes."""
    dims = (axes,) if isinstance(axes, str) else axes
    return {
        "accuracy_drop": meaning.of_accuracy("accuracy before - after", dims, error="samples"),
        "loss_increase": Quantity("loss after - before", meaning.units, dims, error="samples"),
    }


def change(subject: Subject, batch: int, after: Tensor) -> Values:
    """Sums over one mini-batch of the differences between modified and unmodified network.

    `after` is loss and correctness of its samples in the modified network, (2, n) float64.
    """
    start = first_row(subject, batch)
    loss, correct = after.cpu()
    loss_before, correct_before = (values[start : start + len(loss)] for values in intact_per_sample(subject))
    sums: dict[str, float] = {"samples": len(loss)}
    for name, difference in (("accuracy_drop", correct_before - correct), ("loss_increase", loss - loss_before)):
        sums[f"{name}_sum"] = difference.sum().item()
        sums[f"{name}_square_sum"] = difference.square().sum().item()
    if subject.traits.mean_only:
        sums["loss_increase_square_sum"] = math.nan
    return sums


def part_sums(subject: Subject, batch: int, after: Tensor, parts: int) -> np.ndarray:
    """Sums of the loss increase over consecutive parts of a mini-batch, those of `numpy.array_split`, (parts,).

    `after` as in `change`.
    """
    start, loss = first_row(subject, batch), after[0].cpu()
    difference = loss - intact_per_sample(subject)[0][start : start + len(loss)]
    return np.array([part.sum().item() for part in difference.tensor_split(parts)])


def first_row(subject: Subject, batch: int) -> int:
    """Position of a mini-batch's first sample in the data."""
    if subject.images is not None:
        return batch * subject.batch_size
    return sum(map(subject.samples, range(batch)))


def reduced(data: Mapping[str, np.ndarray]) -> Values:
    """Means over all finished samples and their standard errors; the first axis is that of the mini-batches."""
    return means_by_name(data, ("accuracy_drop", "loss_increase"))


def loss_and_correctness(subject: Subject, inputs: Nested, targets: Nested) -> Tensor:
    """Loss and correctness of every sample of a mini-batch, (2, n) float64, on the device; inside `evaluating`."""
    losses, right = subject.losses_and_right(subject.outputs(inputs), targets)
    return torch.stack([losses.double(), right.double()]).detach()


def per_sample(subject: Subject) -> tuple[Tensor, Tensor]:
    """Loss and correctness of every sample, (N,) float64 on the CPU; one pass, one transfer at its end."""
    with subject.evaluating():
        parts = [loss_and_correctness(subject, *batch) for batch in subject.each_batch()]
    loss, right = torch.cat(parts, dim=1).cpu()
    return loss, right


@once_per_weights
def intact_per_sample(subject: Subject) -> tuple[Tensor, Tensor]:
    """`per_sample` of the unmodified model, computed once."""
    return per_sample(subject)


def intact_means(subject: Subject) -> dict[str, float]:
    """Mean loss and accuracy of the unmodified model, attributes of a result."""
    loss, right = intact_per_sample(subject)
    return {"intact_loss": loss.mean().item(), "intact_accuracy": right.mean().item()}
