"""How the steps of a training are computed: the memory format that suits a network, and what a short trial chooses."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from landscape import models
from landscape.data.dataset import Images
from landscape.training.recipes import FORMATS, Recipe
from landscape.training.updates import Training, updates
from landscape.weight_space.forward_mode import GAIN

TRIALS = 3  # updates in a trial, after one that is not timed
_log = logging.getLogger(__name__)


def settled(recipe: Recipe, model: str, arguments: Mapping[str, Any]) -> Recipe:
    """The recipe with "auto" replaced by what it stands for: a rule and no trial, so that equal runs are equal bits."""
    if recipe.memory_format != "auto":
        return recipe
    with torch.device("meta"):  # shapes without values
        network = models.build(model, **arguments)
    return replace(recipe, memory_format="channels_last" if mostly_convolutions(network) else "contiguous")


def mostly_convolutions(network: nn.Module) -> bool:
    """Whether more than half of the weights are kernels of convolutions that mix pixels or channels of maps."""
    kernels = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Conv2d))
    return 2 * kernels > sum(parameter.numel() for parameter in network.parameters())


def tuned(recipe: Recipe, model: str, arguments: Mapping[str, Any], images: Images) -> Recipe:
    """The recipe with the memory format, and on a GPU the compilation, whose updates pass a short trial fastest.

    The settled recipe stays where nothing is clearly faster. A format or a compilation that was asked for stays as it
    is, and so does the precision, which changes more than rounding.
    """
    formats = FORMATS if recipe.memory_format == "auto" else (recipe.memory_format,)
    best = settled(recipe, model, arguments)
    tried = {best: seconds(best, model, arguments, images)}
    for name in formats:
        for compiled in {recipe.compile, recipe.compile or images.inputs.is_cuda}:
            other = replace(best, memory_format=name, compile=compiled)  # type: ignore[arg-type]  # one of its words
            if other not in tried:
                tried[other] = seconds(other, model, arguments, images)
    quickest = min(tried, key=tried.__getitem__)
    if tried[quickest] < tried[best] / (1 + GAIN):
        best = quickest
    _log.info(
        "chosen by a trial: memory format %s, %s: %.0f images/s",
        best.memory_format,
        "compiled" if best.compile else "not compiled",
        best.batch_size * best.accumulate / tried[best],
    )
    return best


def seconds(recipe: Recipe, model: str, arguments: Mapping[str, Any], images: Images) -> float:
    """Time of an update of a network of its own, the best of a few."""
    place = images.inputs.device
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        training = Training.of(models.build(model, **arguments), images, recipe, seed=0)
        found = []
        steps = updates(training, 1)
        for _ in range(min(1 + TRIALS, training.schedule.per_epoch)):
            start = time.perf_counter()
            next(steps)[0].item()  # waits for the device
            found.append(time.perf_counter() - start)
    return min(found[1:] or found)
