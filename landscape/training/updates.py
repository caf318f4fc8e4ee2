"""The updates of a training run: from the rows of an epoch's order to steps of the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from landscape.data.augment import Augmentation
from landscape.data.dataset import Images
from landscape.probe import derived_seed
from landscape.training.distributed import ALONE, Team
from landscape.training.ema import Average
from landscape.training.optimizer import Schedule, optimizer
from landscape.training.recipes import Recipe
from landscape.training.synchronised import synchronise


@dataclass(frozen=True, eq=False)
class Training:
    """A network with all that one of its updates needs.

    An update sees `batch_size * accumulate` rows. They are augmented and mixed together, then cut into parts: one for
    each process, and within a process `accumulate` of them one after the other, whose gradients add up. So the update
    is that of the whole, to rounding, wherever a sample's output does not depend on the others' (batch norm, unless
    `sync_bn`) nor on random numbers drawn in the network (dropout, drop path).

    Args:
        network: on its device, in its memory format.
        images: all that are trained on, on the same device.
        forward: the network as it is called: wrapped for several processes, compiled.
        average: of the weights, where the recipe has `ema`.
    """

    network: nn.Module
    images: Images
    recipe: Recipe
    schedule: Schedule
    seed: int
    team: Team
    descent: torch.optim.Optimizer
    forward: Callable[[Tensor], Tensor]
    average: Average | None = field(default=None)

    @classmethod
    def of(cls, network: nn.Module, images: Images, recipe: Recipe, *, seed: int, team: Team = ALONE) -> Training:
        """The training of a new network, moved to the images' device, from its present weights."""
        network.to(images.inputs.device)
        network.to(memory_format=_layout(recipe))  # type: ignore[call-overload]  # typed for tensors of four axes
        forward: Any = network
        if recipe.sync_bn and team.size > 1:
            synchronise(network)
        if team.size > 1:
            forward = DistributedDataParallel(network)
        if recipe.compile:
            forward = torch.compile(forward)
        return cls(
            network,
            images,
            recipe,
            Schedule.of_recipe(recipe, len(images), processes=team.size),
            seed,
            team,
            optimizer(network, recipe),
            forward,
            Average(network, recipe.ema) if recipe.ema else None,
        )

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on after any update."""
        kept = {"state_dict": self.network.state_dict(), "optimizer": self.descent.state_dict()}
        return kept if self.average is None else {**kept, "ema": self.average.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self.network.load_state_dict(state["state_dict"])
        self.descent.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.restore(state["ema"])


def updates(training: Training, epoch: int) -> Iterator[tuple[Tensor, int]]:
    """The updates of one epoch, the first being 1: each yields its loss, still on the device, and its rows.

    The loss is a mean over the rows of the whole update; of several processes each yields its own share of it.
    """
    recipe, images, schedule = training.recipe, training.images, training.schedule
    augmented = Augmentation.of_recipe(asdict(recipe))
    generator = torch.Generator().manual_seed(derived_seed(training.seed, "order", epoch))
    order = torch.randperm(len(images), generator=generator).to(images.inputs.device)
    per_update = recipe.batch_size * recipe.accumulate
    training.network.train()
    for i in range(schedule.per_epoch):
        for group in training.descent.param_groups:
            group["lr"] = schedule.rate((epoch - 1) * schedule.per_epoch + i)
        rows = order[i * per_update : (i + 1) * per_update]
        inputs, targets = augmented(
            images.inputs[rows],
            images.targets[rows],
            classes=images.classes,
            seed=derived_seed(training.seed, "augmentation", epoch, i),
        )
        others = (training.team.rank,) if training.team.rank else ()  # every process has its own dropout
        torch.manual_seed(derived_seed(training.seed, "dropout", epoch, i, *others))
        training.descent.zero_grad()
        loss = _gradient(training, images.normalised(inputs), targets)
        if recipe.clip:
            nn.utils.clip_grad_norm_(training.network.parameters(), recipe.clip)
        training.descent.step()
        if training.average is not None:
            training.average.update(training.network)
        yield loss, len(rows)


def _gradient(training: Training, inputs: Tensor, targets: Tensor) -> Tensor:
    """Leave the gradient of the mean loss in the parameters; return this process's share of that loss."""
    recipe, team, rows = training.recipe, training.team, len(inputs)
    least = min(2, max(1, recipe.batch_size // team.size))  # rows of a part: batch norm needs two
    count = max(1, min(recipe.accumulate, rows // (team.size * least)))
    parts = count * team.size
    own = range(team.rank * count, (team.rank + 1) * count)  # part p holds rows p, p + parts, p + 2 parts, ...
    shares = []
    for p in own:
        x = inputs[p::parts].contiguous(memory_format=_layout(recipe))
        with _unshared(training.forward) if p != own[-1] else nullcontext():
            with torch.autocast(x.device.type, torch.bfloat16, enabled=_bf16(recipe, x.device)):
                logits = training.forward(x)
            # From log-softmax, in fp32; soft targets too.
            loss = F.cross_entropy(logits.float(), targets[p::parts]) * (len(x) / rows)
            (loss * team.size).backward()  # type: ignore[no-untyped-call]  # gradients are averaged over processes
        shares.append(loss.detach())
    return torch.stack(shares).sum()


def _unshared(forward: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Gradients stay in this process until the last part's have been added."""
    wrapped = getattr(forward, "_orig_mod", forward)  # of a compiled one
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


def _layout(recipe: Recipe) -> torch.memory_format:
    return torch.channels_last if recipe.memory_format == "channels_last" else torch.contiguous_format


def _bf16(recipe: Recipe, device: torch.device) -> bool:
    if recipe.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return recipe.precision == "bf16"
