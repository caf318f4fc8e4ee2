"""State by what a reader may doubt a result: its samples, weights and mini-batches, and what the checkpoint knows."""

import hashlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from landscape.data.dataset import Batches, BatchList
from landscape.data.structure import rows_of, tensors_in
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

SKETCH = 16  # digests of samples that are stored: the smallest, which overlapping sets share
FEW = 8  # samples of the pass whose first half also runs alone
APART = 0.02  # of the largest output: half precision rounds to less, statistics of a mini-batch change more
_log = logging.getLogger(__name__)


def premises(subject: Subject, weights: str | None) -> dict[str, Any]:
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
        "samples_repeated": len(digests) - len(distinct),
        "samples_sketch": " ".join(distinct[:SKETCH]),
        "stated_accuracy": float(known.get("accuracy", math.nan)),
        "stated_loss": float(known.get("loss", math.nan)),
        "mini_batch": mini_batch_effect(subject),
        **({"weights_sha256": weights} if weights else {}),
    }


def _digests(subject: Subject) -> Iterator[str]:
    """A short digest of the inputs of every sample, where they are rows of tensors."""
    if isinstance(subject.batches, Batches) and not subject.batches.images.sequences:
        yield from _of_rows(subject.batches.images.inputs)
    elif isinstance(subject.batches, BatchList):
        for inputs, _ in subject.batches.pairs:
            if isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.dim() > 1:
                yield from _of_rows(inputs)


def _of_rows(inputs: Tensor) -> Iterator[str]:
    for row in inputs.detach().cpu():
        content = row.contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield hashlib.blake2b(content, digest_size=6).hexdigest()


@once_per_weights
def mini_batch_effect(subject: Subject) -> str:
    """How outputs of a few samples change with the others in their mini-batch, in words; "" if they do not."""
    fixed = subject.checkpoint is not None and subject.checkpoint.batch_size
    if subject.members or fixed or not isinstance(subject.batches, Batches) or not subject.divisible:
        return ""
    try:
        with subject.evaluating(), torch.no_grad():
            inputs = rows_of(subject.batch(0)[0], slice(FEW))
            whole = next(tensors_in(subject.outputs(inputs)))
            half = len(whole) // 2
            alone = next(tensors_in(subject.outputs(rows_of(inputs, slice(half)))))
    except (RuntimeError, ValueError, TypeError, IndexError, StopIteration) as error:  # named by the measurement itself
        _log.info("whether outputs depend on the mini-batch is not known: %s", error)
        return ""
    if half < 2 or alone.shape != whole[:half].shape:
        return ""
    change, size = (float(t.detach().float().abs().max()) for t in (alone - whole[:half], whole))
    if not change > APART * size:
        return ""
    return f"outputs of {half} samples change by up to {change / size:.0%} when {len(whole) - half} others join them"
