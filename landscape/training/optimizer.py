"""Build the optimiser of a recipe: which parameters get weight decay, and the learning rate of every step."""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from landscape.data.recipes import Recipe

UNDECAYED = re.compile(r"position|cls_token|mask_token")


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW or SGD with the recipe's weight decay on the parameters that get it."""
    groups = parameter_groups(model, recipe.weight_decay)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=recipe.lr, fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: the parameters with weight decay, and those without.

    As in timm, biases and norms (at most one dimension), position embeddings, relative position tables, the CLS and
    the mask token do not decay. The `l2` that probes report differs: it sums over all trainable parameters.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    free = {name: p for name, p in trainable.items() if p.ndim <= 1 or UNDECAYED.search(name)}
    decayed = [p for name, p in trainable.items() if name not in free]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": [*free.values()], "weight_decay": 0.0}]


def named_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The state dict of an optimiser, on the CPU, with the names of each group's parameters as `param_names`.

    Torch writes the same entry for an optimiser that was given named parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = optimizer.state_dict()
    groups = [
        {**stored, "param_names": [names[id(p)] for p in group["params"]]}
        for stored, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    entries = {
        key: {name: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
        for key, values in state["state"].items()
    }
    return {"state": entries, "param_groups": groups}


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every update: linear up to the peak, then half a cosine down to 0."""

    peak: float  # the largest rate
    per_epoch: int  # updates in an epoch
    warmup: int  # updates of the warm-up, the last of which has the peak rate
    steps: int  # updates of the run

    @classmethod
    def of_recipe(cls, recipe: Recipe, samples: int, *, processes: int = 1) -> "Schedule":
        """The schedule on so many samples; a smaller last batch counts if it has two rows a process, for batch norm."""
        whole, left = divmod(samples, recipe.batch_size * recipe.accumulate)
        per_epoch = whole + (left >= 2 * processes)
        warmup = max(1, round(recipe.warmup * per_epoch)) if recipe.warmup else 0
        return cls(recipe.lr, per_epoch, warmup, recipe.epochs * per_epoch)

    def rate(self, step: int) -> float:
        """The rate of update `step` = 0 .. steps - 1.

        peak (step + 1) / warmup in the warm-up, peak (1 + cos(pi (step - warmup) / (steps - warmup))) / 2 after it.
        That reaches 0 one step past the last, so that no update is wasted.
        """
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup))) / 2
