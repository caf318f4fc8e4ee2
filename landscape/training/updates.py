"""Make the updates of a training run: shuffled and augmented mini-batches, gradients, optimiser steps."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from landscape import models
from landscape.checkpoints.user_code import seed_torch
from landscape.data.dataset import Images
from landscape.data.recipes import Recipe
from landscape.probe import derived_seed
from landscape.subject.device import NARROWEST, too_narrow
from landscape.subject.process_group import SINGLE_PROCESS, ProcessGroup
from landscape.training.objectives import Objective, objective_of
from landscape.training.optimizer import Schedule, build_optimizer


class SynchronisedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose training statistics are the mean and variance of all processes' samples together.

    Each direction exchanges two sums: that of the values, then that of the centred squares.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channel, height, width) to the same."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return super().forward(x)
        wide = x if x.dtype == torch.float64 else x.float()
        count = _all_reduced(torch.full((), x.numel() / x.shape[1], dtype=wide.dtype, device=x.device))
        mean = _all_reduced(wide.sum((0, 2, 3))) / count
        centred = wide - mean[:, None, None]
        variance = _all_reduced(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            share = self.momentum or 0.0
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * count / (count - 1), share)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        scale: Tensor = torch.rsqrt(variance + self.eps) * self.weight
        out: Tensor = centred * scale[:, None, None] + self.bias[:, None, None]
        return out.to(x.dtype)


def synchronise_batchnorm(network: nn.Module) -> None:
    """Turn every batch norm of a network into a synchronised one, in place; parameters and names stay."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SynchronisedBatchNorm2d


class _AllReduce(torch.autograd.Function):
    """The sum over processes; each process's output depends on all inputs alike, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_reduced(gradient)


def _all_reduced(value: Tensor) -> Tensor:
    total: Tensor = _AllReduce.apply(value)  # type: ignore[no-untyped-call]
    return total


LEAST_NORM = 1e-12  # added to the norm of the gradient, which is 0 at a critical point


@contextmanager
def ascended(network: nn.Module, rho: float) -> Iterator[None]:
    """Within the block, the weights are w + rho g / ||g|| (section 2, p = 2), where g is the present gradient.

    After it they are w again, bit for bit, with the gradients that the block left: the update's second pass. All
    parameters with a gradient move, also biases and norms. g is that of the whole update: of all parts of an
    accumulated one and of all processes, whose gradients are summed by then. So the result does not depend on how an
    update is divided; the paper's takes one ascent direction per accelerator. Buffers, which are batch norm's
    statistics, are kept from the first pass. Memory: another copy of the weights.
    """
    weights: list[Tensor] = [parameter for parameter in network.parameters() if parameter.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    buffers = list(network.buffers())
    with torch.no_grad():
        before = [tensor.clone() for tensor in (*weights, *buffers)]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        steps = torch._foreach_mul(gradients, rho / (norm + LEAST_NORM))
        torch._foreach_add_(weights, list(steps))
    yield
    with torch.no_grad():
        torch._foreach_copy_([*weights, *buffers], before)


WARMUP = 10  # sets how fast the decay rises over the first updates


def moving_average(network: nn.Module, decay: float) -> AveragedModel:
    """An average that starts from the present weights; `update_parameters(network)` adds those after an update.

    Update t = 1, 2, ... makes a <- d a + (1 - d) w with d = min(decay, (1 + t) / (10 + t)). The rising d forgets the
    initial weights also in a run shorter than 1 / (1 - decay) updates. Floating-point buffers, which are batch norm's
    statistics, are averaged like the weights; counters are copied.
    """

    def update(averaged: Any, current: Any, _: Tensor | int) -> None:
        t = int(model.n_averaged)  # on the CPU, unlike the argument, so that nothing waits for a GPU
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(averaged, current, 1 - min(decay, (1 + t) / (WARMUP + t)))
        else:
            torch._foreach_copy_(averaged, current)

    model = AveragedModel(network, multi_avg_fn=update, use_buffers=True)
    model.update_parameters(network)  # the first call copies the weights, and makes the next one t = 1
    return model


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
    ) -> "Trainer":
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
    so that equal runs give equal bits. Not with a convolution that is `too_narrow`.

    Raises:
        ValueError: channels_last of a network with such a convolution.
    """
    if recipe.memory_format == "contiguous":
        return recipe
    with torch.device("meta"):  # shapes without values
        network = models.build(model, **arguments)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    narrow = too_narrow(network)
    if recipe.memory_format == "channels_last":
        if narrow:
            raise ValueError(
                f"memory_format=channels_last needs {NARROWEST} channels before a strided 1 x 1 convolution: PyTorch "
                "writes outside of its memory for fewer on some CPUs; use contiguous, or a wider network"
            )
        return recipe
    convolutional = 2 * sum(m.weight.numel() for m in convolutions) > sum(p.numel() for p in network.parameters())
    return replace(recipe, memory_format="channels_last" if convolutional and not narrow else "contiguous")


def _gradient(trainer: Trainer, inputs: Tensor, targets: Tensor, *, dropout: int) -> Tensor:
    """Leave the gradient of the mean loss in the parameters; return this process's share of that loss.

    `dropout` is the seed of the random numbers drawn in the network.
    """
    seed_torch(dropout)
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


LACKS = " does not have a deterministic implementation"  # follows the name of an operation in torch's error


@contextmanager
def deterministic_algorithms(enabled: bool = True) -> Iterator[None]:
    """Within the block, operations give equal bits for equal inputs on this machine, or raise.

    On a CPU with a fixed number of threads they do so anyway. The setting that cuBLAS needs must be made before the
    first CUDA call of the process.

    Raises:
        RuntimeError: the named operation has no deterministic algorithm.
    """
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        operation, lacks, _ = str(error).partition(LACKS)
        if not lacks:
            raise
        raise RuntimeError(
            f"{operation} has no deterministic algorithm on this device; drop --deterministic, or train on a CPU"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
