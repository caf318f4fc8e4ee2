"""How the steps of a training are computed: the memory format that suits a network, and what a short trial chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from landscape import models
from landscape.recipes import Recipe


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
