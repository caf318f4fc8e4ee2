"""The bundled trainer: one model, one data set, one recipe, and a folder of snapshots that a kill cannot spoil.

Nothing random has a state to save: the order of an epoch, its augmentation and its dropout are drawn from
(seed, epoch, step), so a run resumed after any finished epoch continues, on a CPU bit for bit, as if never stopped.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landscape import models
from landscape.data.dataset import Batches
from landscape.options import OptionError, at_least, invalid, one_of
from landscape.subject.evaluation import evaluate
from landscape.training.determinism import deterministic as reproducing
from landscape.training.distributed import device_of, team
from landscape.training.recipes import Recipe, at_size, checked
from landscape.training.run_folder import (
    FINAL,
    FINAL_EMA,
    INIT,
    WARMUP,
    Identity,
    halved,
    held,
    newest_snapshot,
    read_state,
    recorded_recipe,
    refuse_another_run,
    tidy,
    write_metrics,
    write_snapshot,
    write_state,
)
from landscape.training.training_set import asked_size, splits
from landscape.training.tuning import settled, tuned
from landscape.training.updates import Training, updates

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
    snapshot_dtype: str = "fp32",
    fraction: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    tune: bool = False,
    deterministic: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> Path:
    """Train a model, or finish a run that was stopped, and return the path of its `final.pt`.

    The run folder gets `init.pt`, `warmup.pt` (the end of the warm-up, where there is one, even inside an epoch),
    `epoch_NNN.pt` and `final.pt`, each with loss and accuracy on the test split, and `metrics.csv`. A finished run is
    returned as it is; an interrupted one continues after its last finished epoch. Among the processes of `torchrun`
    all train and the first writes.

    Args:
        model: a trainer's name, see `landscape.models.NAMES`.
        data: see `landscape.data.load`; the train split trains, the test split measures.
        recipe: every number of the training, see `landscape.training.recipes.recipe`.
        out: the run folder.
        data_root: the folder that holds the CIFAR folders, see `landscape.data.load`.
        model_args: arguments of the model; classes and channels come from the data, and so does image_size unless
            the data is a folder of images to be resized.
        snapshots: epochs between two `epoch_NNN.pt`; 0 makes about ten in a run.
        snapshot_dtype: "fp16" stores the `epoch_NNN.pt` but the last in half precision; they load as fp32.
        fraction: share of the training samples, the same share of every class.
        seed: of the weights, the order, the augmentation and the dropout.
        device: see `landscape.subject.device.device`.
        tune: choose the memory format, and on a GPU the compilation, by a short trial of this machine; what it chose
            is stored in the recipe, and used again when the run is resumed.
        deterministic: use deterministic algorithms alone, see `landscape.training.determinism`.
        report: called after every finished epoch, when its files are written.

    Raises:
        OptionError: a value out of its range.
        ValueError: the folder holds another run, the data cannot train this model, or the loss stopped being finite.
        RuntimeError: another process is training in the folder.
    """
    at_least("snapshots", snapshots, 0)
    one_of("snapshot_dtype", snapshot_dtype, ("fp32", "fp16"))
    if not 0 < fraction <= 1:
        raise invalid("fraction", fraction, "above 0 and at most 1")
    recipe, given = checked(recipe), dict(model_args or {})
    takes_drop_path = "drop_path" in models.accepts(model)  # an unknown name ends here, before any data is read
    with ExitStack() as stack:
        stack.enter_context(reproducing(deterministic))
        processes = stack.enter_context(team())
        place = device_of(device, processes)
        if recipe.batch_size < processes.size:
            raise OptionError(
                f"--batch-size {recipe.batch_size} leaves some of {processes.size} processes without work"
            )
        processes.first(lambda: stack.enter_context(held(out)))
        training, testing = splits(data, root=data_root, image_size=asked_size(given), fraction=fraction)
        if len(training) < 2 * processes.size:
            raise ValueError(
                f"{data} leaves {len(training)} samples to {processes.size} processes, expected at least two each; "
                "raise --fraction, or start fewer"
            )
        if recipe.randaugment and training.inputs.dtype != torch.uint8:
            raise ValueError(f"{data} gives ready tensors, RandAugment needs uint8 images; take --recipe cifar-noaug")
        channels, size = training.inputs.shape[1:3]
        recipe = at_size(recipe, size)
        arguments: dict[str, Any] = {"classes": training.classes, "image_size": size}
        if channels != 3:
            arguments["channels"] = channels
        if takes_drop_path and recipe.drop_path:
            arguments["drop_path"] = recipe.drop_path
        arguments |= {name: value for name, value in given.items() if name != "image_size"}  # the size is set
        recorded = processes.first(lambda: recorded_recipe(out))
        if recorded is not None:  # it goes on as it began
            if recipe.memory_format == "auto":
                recipe = replace(recipe, memory_format=recorded["memory_format"])
            if tune and not recipe.compile:
                recipe = replace(recipe, compile=recorded["compile"])
        elif tune:
            recipe = processes.first(lambda: tuned(recipe, model, arguments, training.to(place)))
        recipe = settled(recipe, model, arguments)
        identity = Identity(
            model=model,
            model_args=arguments,
            data={"name": data} | {key: getattr(training, key) for key in ("classes", "size", "mean", "std")},
            recipe={**asdict(recipe), "fraction": fraction},
            seed=seed,
        )
        processes.first(lambda: refuse_another_run(out, identity))
        if not processes.first(lambda: (out / FINAL).exists()):
            stack.enter_context(torch.random.fork_rng(devices=[place] if place.type == "cuda" else []))
            torch.manual_seed(seed)
            network = models.build(model, **identity.model_args)
            run = _Run(
                Training.of(network, training.to(place), recipe, seed=seed, team=processes),
                Batches(testing.to(place), recipe.batch_size),
                identity,
                out,
                spacing=snapshots or math.ceil(recipe.epochs / SNAPSHOTS),
                snapshot_dtype=snapshot_dtype,
            )
            _train(run, report)
        processes.first(lambda: tidy(out))  # here too after a kill between the last two writes
    return out / FINAL


@dataclass(frozen=True, eq=False)
class _Run:
    """A training and the folder it leaves its snapshots in, `spacing` epochs apart, in a precision."""

    training: Training
    tests: Batches
    identity: Identity
    out: Path
    spacing: int
    snapshot_dtype: str


def _train(run: _Run, report: Callable[[Progress], None] | None) -> None:
    """All epochs that are left. What is written twice after a kill is the same twice, and skipped."""
    first = run.training.team.first
    state = first(lambda: read_state(run.out))
    history: list[dict[str, float]] = state["history"] if state else []
    if state:
        run.training.restore(state)
    else:
        first(lambda: _snapshot(run, INIT, 0, _metrics(run, 0)))
    for epoch in range(len(history) + 1, run.training.recipe.epochs + 1):
        began = time.perf_counter()
        train_loss = _epoch(run, epoch)
        first(lambda: _finish(run, epoch, train_loss, began, history, report))  # noqa: B023  # called at once
    first(lambda: _finals(run, history))


def _finish(
    run: _Run,
    epoch: int,
    train_loss: float,
    began: float,
    history: list[dict[str, float]],
    report: Callable[[Progress], None] | None,
) -> None:
    """Measure a finished epoch and write what it leaves."""
    schedule, epochs = run.training.schedule, run.training.recipe.epochs
    step = epoch * schedule.per_epoch
    metrics = _metrics(run, step)
    if epoch % run.spacing == 0:
        _intermediate(run, epoch, step, metrics)
    seconds = time.perf_counter() - began
    progress = Progress(epoch, epochs, train_loss, seconds=seconds, lr=schedule.rate(step - 1), **metrics)
    history.append(asdict(progress))
    write_metrics(run.out, history, columns=[field.name for field in fields(Progress)])
    write_state(run.out, run.identity, {**run.training.state(), "history": history})
    if report is not None:
        report(progress)


def _intermediate(run: _Run, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
    """Write a snapshot between the warm-up and the end; in half precision with the loss of its rounded weights."""
    name = f"epoch_{epoch:03d}.pt"
    if run.snapshot_dtype == "fp32" or epoch == run.training.recipe.epochs:
        _snapshot(run, name, step, metrics)
    elif not (run.out / name).exists():
        rounded = copy.deepcopy(run.training.network)
        weights = halved(rounded.state_dict())
        rounded.load_state_dict(weights)
        _snapshot(run, name, step, _metrics(run, step, rounded), weights)


def _finals(run: _Run, history: list[dict[str, float]]) -> None:
    """Write the trained weights, `final.pt` last: where it is, all is."""
    steps = run.training.schedule.steps
    if run.training.average is not None:
        averaged = copy.deepcopy(run.training.network)
        averaged.load_state_dict(run.training.average.state_dict)
        _snapshot(run, FINAL_EMA, steps, _metrics(run, steps, averaged), averaged.state_dict())
    metrics = {name: history[-1][name] for name in ("loss", "accuracy")} if history else _metrics(run, steps)
    _snapshot(run, FINAL, steps, metrics)


def _epoch(run: _Run, epoch: int) -> float:
    """Train for one epoch, the first being 1, and return the mean loss over its samples."""
    schedule, processes = run.training.schedule, run.training.team
    before = (epoch - 1) * schedule.per_epoch
    losses: list[Tensor] = []
    sizes: list[int] = []
    for step, (loss, size) in enumerate(updates(run.training, epoch), start=before + 1):
        losses.append(loss)
        sizes.append(size)
        if processes.size == 1 and not loss.is_cuda and not loss.isfinite():
            break  # a GPU looks once, below, for it would have to wait for every loss; and so do several processes
        if step == schedule.warmup:
            processes.first(lambda: _warmed_up(run))
    values = processes.summed(torch.stack(losses).double()).cpu()
    broken = (~values.isfinite()).nonzero()
    if len(broken):
        raise _diverged(run, before + 1 + int(broken[0]), float(values[broken[0]]))
    return float(values @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes)


def _warmed_up(run: _Run) -> None:
    step = run.training.schedule.warmup
    if not (run.out / WARMUP).exists():
        _snapshot(run, WARMUP, step, _metrics(run, step))


def _metrics(run: _Run, step: int, network: nn.Module | None = None) -> dict[str, float]:
    """Loss and accuracy on the test split, after `step` updates."""
    evaluation = evaluate(network or run.training.network, run.tests)
    if not math.isfinite(evaluation.loss):  # the last update broke the weights after their last finite loss
        raise _diverged(run, step, evaluation.loss)
    return {"loss": evaluation.loss, "accuracy": evaluation.accuracy}


def _snapshot(
    run: _Run, name: str, step: int, metrics: Mapping[str, float], weights: Mapping[str, Tensor] | None = None
) -> None:
    path = run.out / name
    if not path.exists():
        epoch = step / run.training.schedule.per_epoch
        weights = run.training.network.state_dict() if weights is None else weights
        write_snapshot(path, run.identity, weights, epoch=epoch, metrics=metrics)


def _diverged(run: _Run, step: int, loss: float) -> ValueError:
    epoch, within = divmod(max(step - 1, 0), run.training.schedule.per_epoch)
    newest = newest_snapshot(run.out)
    kept = f"the last good snapshot is {newest}" if newest else "there is no snapshot yet"
    return ValueError(
        f"the loss became {loss} at epoch {epoch + 1}, step {within + 1}; {kept}; "
        f"lower --lr (now {run.training.recipe.lr}) and give the new run another --name or --out"
    )
