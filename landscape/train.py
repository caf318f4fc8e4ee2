"""The bundled trainer: one model, one data set, one recipe, and a folder of snapshots that a kill cannot spoil.

Nothing random has a state to save: the order of an epoch, its augmentation and its dropout are drawn from
(seed, epoch, step), so a run resumed after any finished epoch continues, on a CPU bit for bit, as if never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from landscape import models
from landscape.data.augment import Augmentation
from landscape.data.images import Batches, Images
from landscape.device import device as device_named
from landscape.evaluate import evaluate
from landscape.optimizer import Schedule, optimizer
from landscape.probe import OptionError, at_least, derived_seed
from landscape.recipes import Recipe, at_size, checked
from landscape.run_folder import (
    FINAL,
    INIT,
    WARMUP,
    Identity,
    newest_snapshot,
    read_state,
    recorded_recipe,
    refuse_another_run,
    tidy,
    write_metrics,
    write_snapshot,
    write_state,
)
from landscape.training_set import asked_size, splits
from landscape.tuning import settled

SNAPSHOTS = 10  # `epoch_NNN.pt` in a run, where the spacing is not asked for


@dataclass(frozen=True)
class Progress:
    """One finished epoch.

    Args:
        epoch: epochs finished, of `epochs`.
        train_loss: mean over the epoch's samples as they were trained on: augmented, mixed, smoothed.
        loss: on the test split at the end of the epoch, as is `accuracy` (a fraction).
        seconds: of this epoch, its test included.
        lr: learning rate of its last update.
    """

    epoch: int
    epochs: int
    train_loss: float
    loss: float
    accuracy: float
    seconds: float
    lr: float


def train(
    model: str,
    data: str,
    *,
    recipe: Recipe,
    out: Path,
    data_root: Path | None = None,
    model_args: Mapping[str, Any] | None = None,
    snapshots: int = 0,
    fraction: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    report: Callable[[Progress], None] | None = None,
) -> Path:
    """Train a model, or finish a run that was stopped, and return the path of its `final.pt`.

    The run folder gets `init.pt`, `warmup.pt` (the end of the warm-up, where there is one, even inside an epoch),
    `epoch_NNN.pt` and `final.pt`, each with loss and accuracy on the test split, and `metrics.csv`. A finished run is
    returned as it is; an interrupted one continues after its last finished epoch.

    Args:
        model: a trainer's name, see `landscape.models.NAMES`.
        data: see `landscape.data.load`; the train split trains, the test split measures.
        recipe: every number of the training, see `landscape.recipes.recipe`.
        out: the run folder.
        data_root: the folder that holds the CIFAR folders, see `landscape.data.load`.
        model_args: arguments of the model; classes and channels come from the data, and so does image_size unless
            the data is a folder of images to be resized.
        snapshots: epochs between two `epoch_NNN.pt`; 0 makes about ten in a run.
        fraction: share of the training samples, the same share of every class.
        seed: of the weights, the order, the augmentation and the dropout.
        device: see `landscape.device.device`.
        report: called after every finished epoch, when its files are written.

    Raises:
        OptionError: a value out of its range.
        ValueError: the folder holds another run, the data cannot train this model, or the loss stopped being finite.
    """
    at_least("snapshots", snapshots, 0)
    if not 0 < fraction <= 1:
        raise OptionError(f"--fraction {fraction} is out of range; ask for more than 0 and at most 1")
    recipe, place, given = checked(recipe), device_named(device), dict(model_args or {})
    takes_drop_path = "drop_path" in models.accepts(model)  # an unknown name ends here, before any data is read
    training, testing = splits(data, root=data_root, image_size=asked_size(given), fraction=fraction)
    if recipe.randaugment and training.inputs.dtype != torch.uint8:
        raise ValueError(f"{data} gives ready tensors, RandAugment needs uint8 images; take --recipe cifar-noaug")
    channels, size = training.inputs.shape[1:3]
    recipe = at_size(recipe, size)
    recorded = recorded_recipe(out)
    if recorded is not None and recipe.memory_format == "auto":
        recipe = replace(recipe, memory_format=recorded["memory_format"])  # as the run began
    arguments: dict[str, Any] = {"classes": training.classes, "image_size": size}
    if channels != 3:
        arguments["channels"] = channels
    if takes_drop_path and recipe.drop_path:
        arguments["drop_path"] = recipe.drop_path
    arguments |= {name: value for name, value in given.items() if name != "image_size"}  # the size is set
    recipe = settled(recipe, model, arguments)
    identity = Identity(
        model=model,
        model_args=arguments,
        data={"name": data} | {key: getattr(training, key) for key in ("classes", "size", "mean", "std")},
        recipe={**asdict(recipe), "fraction": fraction},
        seed=seed,
    )
    refuse_another_run(out, identity)
    if not (out / FINAL).exists():
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            torch.manual_seed(seed)
            network = models.build(model, **identity.model_args).to(place)
            network.to(memory_format=_layout(recipe))  # type: ignore[call-overload]  # typed for tensors of four axes
            tests = Batches(testing.to(place), recipe.batch_size)
            schedule = Schedule.of_recipe(recipe, len(training))
            run = _Run(network, optimizer(network, recipe), training.to(place), tests, recipe, schedule, identity, out)
            _train(run, spacing=snapshots or math.ceil(recipe.epochs / SNAPSHOTS), report=report)
    tidy(out)  # here too after a kill between the last two writes
    return out / FINAL


@dataclass(frozen=True, eq=False)
class _Run:
    """What the steps of one training share."""

    network: nn.Module
    descent: torch.optim.Optimizer
    training: Images
    tests: Batches
    recipe: Recipe
    schedule: Schedule
    identity: Identity
    out: Path


def _train(run: _Run, *, spacing: int, report: Callable[[Progress], None] | None) -> None:
    """All epochs that are left. What is written twice after a kill is the same twice, and skipped."""
    state = read_state(run.out)
    history: list[dict[str, float]] = state["history"] if state else []
    if state:
        run.network.load_state_dict(state["state_dict"])
        run.descent.load_state_dict(state["optimizer"])
        metrics = {name: history[-1][name] for name in ("loss", "accuracy")}
    else:
        metrics = _metrics(run, step=0)
        _snapshot(run, INIT, step=0, metrics=metrics)
    for epoch in range(len(history) + 1, run.recipe.epochs + 1):
        began = time.perf_counter()
        train_loss = _epoch(run, epoch)
        step = epoch * run.schedule.per_epoch
        metrics = _metrics(run, step)
        if epoch % spacing == 0:
            _snapshot(run, f"epoch_{epoch:03d}.pt", step, metrics)
        seconds = time.perf_counter() - began
        rate = run.schedule.rate(step - 1)
        progress = Progress(epoch, run.recipe.epochs, train_loss, seconds=seconds, lr=rate, **metrics)
        history.append(asdict(progress))
        write_metrics(run.out, history, columns=[field.name for field in fields(Progress)])
        write_state(
            run.out,
            run.identity,
            {"state_dict": run.network.state_dict(), "optimizer": run.descent.state_dict(), "history": history},
        )
        if report is not None:
            report(progress)
    _snapshot(run, FINAL, run.schedule.steps, metrics)


def _epoch(run: _Run, epoch: int) -> float:
    """Train for one epoch, the first being 1, and return the mean loss over its samples."""
    first = (epoch - 1) * run.schedule.per_epoch
    losses: list[Tensor] = []
    sizes: list[int] = []
    for step, (loss, size) in enumerate(_updates(run, epoch), start=first + 1):
        losses.append(loss)
        sizes.append(size)
        if not loss.is_cuda and not loss.isfinite():
            break  # a GPU looks once, below: it would have to wait for every loss
        if step == run.schedule.warmup and not (run.out / WARMUP).exists():
            _snapshot(run, WARMUP, step, _metrics(run, step))
    values = torch.stack(losses).double().cpu()
    broken = (~values.isfinite()).nonzero()
    if len(broken):
        raise _diverged(run, first + 1 + int(broken[0]), float(values[broken[0]]))
    return float(values @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes)


def _updates(run: _Run, epoch: int) -> Iterator[tuple[Tensor, int]]:
    """The updates of one epoch: each yields its loss, still on the device, and its number of samples."""
    images, recipe, seed = run.training, run.recipe, run.identity.seed
    augmented = Augmentation.of_recipe(asdict(recipe))
    device = images.inputs.device
    bf16 = _bf16(recipe, device)
    generator = torch.Generator().manual_seed(derived_seed(seed, "order", epoch))
    order = torch.randperm(len(images), generator=generator).to(device)
    run.network.train()
    forward = torch.compile(run.network) if recipe.compile else run.network
    for i in range(run.schedule.per_epoch):
        for group in run.descent.param_groups:
            group["lr"] = run.schedule.rate((epoch - 1) * run.schedule.per_epoch + i)
        rows = order[i * recipe.batch_size : (i + 1) * recipe.batch_size]
        inputs, targets = augmented(
            images.inputs[rows],
            images.targets[rows],
            classes=images.classes,
            seed=derived_seed(seed, "augmentation", epoch, i),
        )
        torch.manual_seed(derived_seed(seed, "dropout", epoch, i))
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = forward(images.normalised(inputs).contiguous(memory_format=_layout(recipe)))
        loss = F.cross_entropy(logits.float(), targets)  # from log-softmax, in fp32; soft targets too
        run.descent.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if recipe.clip:
            nn.utils.clip_grad_norm_(run.network.parameters(), recipe.clip)
        run.descent.step()
        yield loss.detach(), len(rows)


def _metrics(run: _Run, step: int) -> dict[str, float]:
    """Loss and accuracy on the test split, after `step` updates."""
    evaluation = evaluate(run.network, run.tests)
    if not math.isfinite(evaluation.loss):  # the last update broke the weights after their last finite loss
        raise _diverged(run, step, evaluation.loss)
    return {"loss": evaluation.loss, "accuracy": evaluation.accuracy}


def _snapshot(run: _Run, name: str, step: int, metrics: Mapping[str, float]) -> None:
    path = run.out / name
    if not path.exists():
        epoch = step / run.schedule.per_epoch
        write_snapshot(path, run.identity, run.network.state_dict(), epoch=epoch, metrics=metrics)


def _diverged(run: _Run, step: int, loss: float) -> ValueError:
    epoch, within = divmod(max(step - 1, 0), run.schedule.per_epoch)
    newest = newest_snapshot(run.out)
    kept = f"the last good snapshot is {newest}" if newest else "there is no snapshot yet"
    return ValueError(
        f"the loss became {loss} at epoch {epoch + 1}, step {within + 1}; {kept}; "
        f"lower --lr (now {run.recipe.lr}) and give the new run another --name or --out"
    )


def _layout(recipe: Recipe) -> torch.memory_format:
    return torch.channels_last if recipe.memory_format == "channels_last" else torch.contiguous_format


def _bf16(recipe: Recipe, device: torch.device) -> bool:
    if recipe.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return recipe.precision == "bf16"
