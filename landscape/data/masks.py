"""Targets with a class number per pixel: which pixels count, and which images have any that do."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from landscape.data.dataset import BatchList, Images

UNLABELLED = -1  # what `with_unlabelled` writes; every negative class number means the same
_log = logging.getLogger(__name__)


def are_masks(targets: Any) -> bool:
    """Whether targets are class numbers of pixels, (N, H, W) integers."""
    return (
        isinstance(targets, Tensor) and targets.ndim == 3 and not (targets.is_floating_point() or targets.is_complex())
    )


def with_class_numbers(data: Images | BatchList) -> Images | BatchList:
    """The data with 0 and 1 for targets that are False and True."""

    def binary(targets: Any) -> bool:
        return isinstance(targets, Tensor) and targets.dtype == torch.bool

    if isinstance(data, Images):
        return replace(data, targets=data.targets.long()) if binary(data.targets) else data
    pairs = [(inputs, targets.long() if binary(targets) else targets) for inputs, targets in data.pairs]
    return (
        replace(data, pairs=pairs, classes=data.classes) if any(binary(targets) for _, targets in data.pairs) else data
    )


def with_unlabelled(data: Images | BatchList, ignored: int, *, keep: bool = False) -> Images | BatchList:
    """The data with -1 for pixels without a label: those of the class number `ignored`, and negative ones.

    Images without a labelled pixel have no loss: they are left out, unless they are to be kept as frames of a stream.
    Data with other targets are returned as they are. (N, 1, H, W) integers count as (N, H, W).

    Raises:
        ValueError: no image has a labelled pixel; or a mini-batch that a loader formed holds such an image.
    """
    if isinstance(data, BatchList):
        return _of_batches(data, ignored)
    targets = _flat(data.targets, data.inputs)
    if not are_masks(targets) or data.inputs.ndim < 3:
        return data
    targets = _marked(targets, ignored)
    data = replace(data, targets=targets, classes=int(targets.max()) + 1, counted=True)
    labelled = (targets >= 0).flatten(1).any(dim=1)
    count = int(labelled.sum())
    if not count:
        raise ValueError(
            f"no pixel of the {len(data)} targets {tuple(targets.shape)} of {data.name} is labelled: all are {ignored} "
            "or negative; check the masks, or name another number with --ignore-index -1"
        )
    if keep or count == len(data):
        return data
    _log.warning("note: %d of %d images of %s have no labelled pixel and are left out", len(data) - count, len(data),
                 data.name)  # fmt: skip
    return data.take(labelled.nonzero()[:, 0].cpu().numpy())


def _flat(targets: Tensor, inputs: Any) -> Tensor:
    """Targets (N, 1, H, W) of integers as (N, H, W); others as they are."""
    pixels = isinstance(inputs, Tensor) and inputs.ndim == 4 and targets.ndim == 4 and targets.shape[1] == 1
    return targets[:, 0] if pixels and not targets.is_floating_point() else targets


def _marked(targets: Tensor, ignored: int) -> Tensor:
    if targets.dtype in (torch.uint8, torch.bool):
        targets = targets.to(torch.int16)  # which holds negative numbers
    found = (targets < 0) | (targets == ignored)
    return targets.masked_fill(found, UNLABELLED) if bool(found.any()) else targets


def _of_batches(data: BatchList, ignored: int) -> BatchList:
    pairs: list[Any] = []
    for i, (inputs, given) in enumerate(data.pairs):
        targets = given
        if isinstance(targets, Tensor) and targets.ndim >= 3:
            targets = _flat(targets, first_tensor(inputs))
        if are_masks(targets):
            targets = _marked(targets, ignored)
            empty = (targets < 0).flatten(1).all(dim=1).nonzero()
            if len(empty):
                raise ValueError(
                    f"image {int(empty[0])} of mini-batch {i} of {data.name} has no labelled pixel: all are {ignored} "
                    "or negative; leave it out, or name another number with --ignore-index -1"
                )
        pairs.append((inputs, targets))
    if not any(are_masks(targets) for _, targets in pairs):
        return data
    classes = max((int(t.max()) + 1 for _, t in pairs if are_masks(t)), default=data.classes)
    return replace(data, pairs=pairs, classes=classes)


def first_tensor(inputs: Any) -> Any:
    """The tensor itself, or the first of several named inputs."""
    return next(iter(inputs.values()), None) if isinstance(inputs, Mapping) else inputs
