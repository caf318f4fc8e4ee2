"""Evaluate features by their nearest neighbours among labelled ones (Wu et al. 2018, arXiv 1805.01978, section 3.4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.data.dataset import Images
from landscape.training.training_set import balanced_rows

NEIGHBOURS = 20
TEMPERATURE = 0.07
LABELLED = 2048  # training samples at most, the same number of every class


def neighbour_accuracy(features: Callable[[Tensor], Tensor], train: Images, tests: Images, *, batch_size: int) -> float:
    """Share of the test images whose class wins the vote of the most similar training images.

    A neighbour of cosine similarity s has exp(s / 0.07) votes. `features` maps normalised images to (N, d).
    """
    labelled = train.take(balanced_rows(train.targets.cpu(), min(LABELLED, len(train))).numpy())
    known, wanted = (_unit_features(features, images, batch_size) for images in (labelled, tests))
    similar, index = (wanted @ known.T).topk(min(NEIGHBOURS, len(known)), dim=1)
    votes = torch.zeros(len(wanted), train.classes, device=wanted.device, dtype=wanted.dtype)
    votes.scatter_add_(1, labelled.targets[index], ((similar - 1) / TEMPERATURE).exp())
    return (votes.argmax(dim=1) == tests.targets).double().mean().item()


def _unit_features(features: Callable[[Tensor], Tensor], images: Images, batch_size: int) -> Tensor:
    found = [features(images.normalised(part)) for part in torch.split(images.inputs, batch_size)]
    return F.normalize(torch.cat(found).float(), dim=1)
