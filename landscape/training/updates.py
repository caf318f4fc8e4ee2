"""Make the updates of a training run: shuffled and augmented mini-batches, gradients, optimiser steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from landscape import models
from landscape.data.dataset import Images
from landscape.data.recipes import Recipe
from landscape.probe import derived_seed
from landscape.subject.process_group import SINGLE_PROCESS, ProcessGroup
from landscape.training.ema import moving_average
from landscape.training.objectives import Objective, objective_of
from landscape.training.optimizer import Schedule, build_optimizer
from landscape.training.sharpness_aware import ascended
from landscape.training.synchronised_batchnorm import synchronise_batchnorm


@dataclass(frozen=True, eq=False)
class Trainer:
    """A network with everything that one of its updates needs.

    An update sees `batch_size * accumulate` rows. They are augmented and mixed together, then split into parts: one
    for each process, and within a process `accumulate` of them one after the other, whose gradients add up. So the
    update is that of the whole, to rounding, wherever a sample's output does not depend on the others' (batch norm,
    unless `sync_bn`) nor on random numbers drawn in the network (dropout, drop path). With `sam` a second pass over
    the same rows, with the same random numbers, gives the gradient at the ascent point of the whole update.
    """

    network: nn.Module  # on its device, in its memory format
    images: Images  # the whole training set, on the same device
    recipe: Recipe
    schedule: Schedule
    seed: int
    processes: ProcessGroup
    optimizer: torch.optim.Optimizer
    forward: Callable[..., Tensor]  # the network as it is called: wrapped for several processes, compiled
    objective: Objective
    average: AveragedModel | None  # of the weights, where the recipe has `ema`

    @classmethod
    def of(
        cls, network: nn.Module, images: Images, recipe: Recipe, *, seed: int, processes: ProcessGroup = SINGLE_PROCESS
    ) -> Trainer:
        """The trainer of a network, which it moves to the images' device, from its present weights."""
        network.to(images.inputs.device)
        network.to(memory_format=_memory_format(recipe))  # type: ignore[call-overload]  # typed for four axes alone
        forward: Any = network
        if recipe.sync_bn and processes.size > 1:
            synchronise_batchnorm(network)
        average = moving_average(network, recipe.ema) if recipe.ema else None
        if processes.size > 1:
            forward = DistributedDataParallel(network)
        if recipe.compile:
            forward = torch.compile(forward)
        schedule = Schedule.of_recipe(recipe, len(images), processes=processes.size)
        optimizer, objective = build_optimizer(network, recipe), objective_of(recipe)
        return cls(network, images, recipe, schedule, seed, processes, optimizer, forward, objective, average)

    def state(self) -> dict[str, Any]:
        """What `restore` needs to continue after any update."""
        state = {"state_dict": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state if self.average is None else {**state, "ema": self.average.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.network.load_state_dict(state["state_dict"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["ema"])


def epoch_updates(trainer: Trainer, epoch: int) -> Iterator[tuple[Tensor, int]]:
    """Make the updates of one epoch, the first being 1; yield each one's loss, still on the device, and its rows.

    The loss is a mean over the rows of the whole update; of several processes each yields its own share of it.
    """
    recipe, images, schedule = trainer.recipe, trainer.images, trainer.schedule
    generator = torch.Generator().manual_seed(derived_seed(trainer.seed, "order", epoch))
    order = torch.randperm(len(images), generator=generator).to(images.inputs.device)
    per_update = recipe.batch_size * recipe.accumulate
    trainer.network.train()
    for i in range(schedule.per_epoch):
        for group in trainer.optimizer.param_groups:
            group["lr"] = schedule.rate((epoch - 1) * schedule.per_epoch + i)
        rows = order[i * per_update : (i + 1) * per_update]
        seed = derived_seed(trainer.seed, "augmentation", epoch, i)
        inputs, targets = trainer.objective.examples(images, rows, trainer.network, seed=seed)
        rank = (trainer.processes.rank,) if trainer.processes.rank else ()  # every process has its own dropout
        dropout = derived_seed(trainer.seed, "dropout", epoch, i, *rank)
        loss = _gradient(trainer, inputs, targets, dropout=dropout)
        if recipe.sam:
            with ascended(trainer.network, recipe.sam):
                _gradient(trainer, inputs, targets, dropout=dropout)
        if recipe.clip:
            nn.utils.clip_grad_norm_(trainer.network.parameters(), recipe.clip)
        trainer.optimizer.step()
        if trainer.average is not None:
            trainer.average.update_parameters(trainer.network)
        yield loss, len(rows)


def with_memory_format(recipe: Recipe, model: str, arguments: Mapping[str, Any]) -> Recipe:
    """The recipe with the memory format "auto" replaced by the one that suits the model.

    That is channels_last where more than half of the weights are kernels of 2-D convolutions: a rule and no benchmark,
    so that equal runs give equal bits.
    """
    if recipe.memory_format != "auto":
        return recipe
    with torch.device("meta"):  # shapes without values
        network = models.build(model, **arguments)
    kernels = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Conv2d))
    convolutional = 2 * kernels > sum(parameter.numel() for parameter in network.parameters())
    return replace(recipe, memory_format="channels_last" if convolutional else "contiguous")


def _gradient(trainer: Trainer, inputs: Tensor, targets: Tensor, *, dropout: int) -> Tensor:
    """Leave the gradient of the mean loss in the parameters; return this process's share of that loss.

    `dropout` is the seed of the random numbers drawn in the network.
    """
    torch.manual_seed(dropout)
    trainer.optimizer.zero_grad()
    recipe, processes, rows = trainer.recipe, trainer.processes, len(inputs)
    least = min(2, max(1, recipe.batch_size // processes.size))  # rows of a part: batch norm needs two
    count = max(1, min(recipe.accumulate, rows // (processes.size * least)))
    parts = count * processes.size
    first = processes.rank * count
    own = range(first, first + count)  # part p holds rows p, p + parts, p + 2 parts, ...

    def forward(*args: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=_uses_bf16(recipe, inputs.device)):
            return trainer.forward(*args)

    shares = []
    for p in own:
        x = inputs[p::parts].flatten(0, inputs.ndim - 4).contiguous(memory_format=_memory_format(recipe))
        wanted = targets[p::parts]
        with _without_gradient_sync(trainer.forward) if p != own[-1] else nullcontext():
            loss = trainer.objective.loss(forward, x, wanted) * (len(wanted) / rows)
            # DistributedDataParallel averages gradients over the processes; their sum is wanted.
            (loss * processes.size).backward()  # type: ignore[no-untyped-call]
        shares.append(loss.detach())
    return torch.stack(shares).sum()


def _without_gradient_sync(forward: Callable[..., Tensor]) -> AbstractContextManager[None]:
    """Accumulate gradients in this process alone; the last part's backward pass exchanges their sum."""
    wrapped = getattr(forward, "_orig_mod", forward)  # of a compiled one
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


def _memory_format(recipe: Recipe) -> torch.memory_format:
    return torch.channels_last if recipe.memory_format == "channels_last" else torch.contiguous_format


def _uses_bf16(recipe: Recipe, device: torch.device) -> bool:
    if recipe.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return recipe.precision == "bf16"
