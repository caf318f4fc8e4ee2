"""Train one model on one data set by one recipe; write a folder of snapshots that no kill can corrupt.

Without labels the snapshots hold the encoder alone; of a masked-image encoder `final_decoder.pt` holds the decoder too.

No RNG state is saved: the order of an epoch, its augmentation and its dropout are drawn from (seed, epoch, step), so a
run resumed after any finished epoch continues, on a CPU bit for bit, as if never stopped.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from landscape import models
from landscape.checkpoints.checkpoint import write_checkpoint
from landscape.checkpoints.file_names import DECODER, FINAL, FINAL_EMA
from landscape.checkpoints.user_code import kept_rng, seed_torch
from landscape.data.dataset import Batches, Images
from landscape.data.recipes import Recipe, at_size, validated
from landscape.monitoring.monitor import Monitor
from landscape.options import OptionError, at_least, one_of, require
from landscape.subject.loading.smoothing import insert
from landscape.subject.process_group import ProcessGroup, device_of, process_group
from landscape.subject.spec import SmoothingOptions, recorded
from landscape.subject.threads import fixed_threads
from landscape.training import monitor_options, objectives, run_folder, updates
from landscape.training.monitored import monitored
from landscape.training.optimizer import named_state
from landscape.training.run_folder import INIT, WARMUP, RunIdentity
from landscape.training.training_set import requested_size, splits

SNAPSHOTS = 10  # `epoch_NNN.pt` in a run, where the spacing is not given


class Diverged(ValueError):
    """The loss of a training is not finite."""


@dataclass(frozen=True)
class EpochResult:
    """One finished epoch."""

    epoch: int  # epochs finished, of `epochs`
    epochs: int
    train_loss: float  # mean over the epoch's samples as they were trained on: augmented, mixed, smoothed
    loss: float  # on the test split at the end of the epoch, as is `accuracy` (a fraction)
    accuracy: float  # without labels that of the nearest neighbours, see `nearest_neighbours`
    seconds: float  # of this epoch, its evaluation included
    lr: float  # learning rate of its last update


Report: TypeAlias = Callable[[EpochResult], None]


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
    snapshot_optimizer: bool = False,
    fraction: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    deterministic: bool = False,
    smoothing: SmoothingOptions | None = None,
    monitor: monitor_options.MonitorOptions | None = None,
    report: Report | None = None,
) -> Path:
    """Train a model, or finish an interrupted run after its last finished epoch; return the path of its `final.pt`.

    The run folder gets `init.pt`, `warmup.pt` (perhaps inside an epoch), `epoch_NNN.pt`, `final.pt` and `metrics.csv`.

    Args:
        model: a trainer's name, see `landscape.models.NAMES`.
        data: see `landscape.data.load`; the train split trains, the test split measures.
        recipe: every number of the training, see `landscape.data.recipes.recipe`.
        out: the run folder; under `torchrun` rank 0 writes.
        data_root: of the CIFAR folders, see `landscape.data.load`.
        model_args: of the model; classes, channels and (unless images are resized) image_size come from the data.
        snapshots: epochs between two `epoch_NNN.pt`; 0 makes about ten in a run.
        snapshot_dtype: "fp16" stores the `epoch_NNN.pt` but the last in half precision; they load as fp32.
        snapshot_optimizer: keep the optimiser's state in them; with AdamW they are three times as large.
        fraction: share of the training samples, the same share of every class.
        seed: of the weights, the order, the augmentation and the dropout.
        device: see `landscape.subject.device.device`.
        deterministic: allow deterministic algorithms only.
        smoothing: insert smoothing blocks; every checkpoint says so in its recipe, and is loaded with them.
        monitor: follow the run in `monitor.h5`, see `monitored`.
        report: called after every finished epoch, when its files are written.

    Raises:
        ValueError: the folder holds another run, the data cannot train this model, or the loss became non-finite.
        OptionError, RuntimeError: a value is out of its range; another process is training in the folder.
    """
    _check_options(model, recipe, snapshots, snapshot_dtype, snapshot_optimizer, fraction)
    with updates.deterministic_algorithms(deterministic), process_group() as processes, ExitStack() as stack:
        place = device_of(device, processes)
        processes.on_main_process(lambda: stack.enter_context(run_folder.locked(out)))
        images, tests = splits(data, root=data_root, image_size=requested_size(model_args or {}), fraction=fraction)
        _check_training_set(images, data, recipe, processes)
        recipe, arguments = _resolved(recipe, out, model, model_args or {}, images, processes)
        identity = RunIdentity(model, arguments, _about(data, images), _settings(recipe, fraction, smoothing), seed)
        if not processes.on_main_process(lambda: run_folder.is_finished(out, identity)):
            stack.enter_context(kept_rng(place))
            network, tested = _network(identity, recipe, images, smoothing), Batches(tests.to(place), recipe.batch_size)
            trainer = updates.Trainer.of(network, images.to(place), recipe, seed=seed, processes=processes)
            _train(_Run(trainer, tested, identity, out, snapshots, snapshot_dtype, snapshot_optimizer, monitor), report)
        processes.on_main_process(lambda: run_folder.tidy(out))  # here too after a kill between the last two writes
    return out / FINAL


def _network(identity: RunIdentity, recipe: Recipe, images: Images, smoothing: SmoothingOptions | None) -> nn.Module:
    """The freshly initialised network of a run; seeds the global generator."""
    seed_torch(identity.seed)
    network = objectives.objective_of(recipe).build(identity.model, identity.model_args)
    if smoothing is not None:
        if recipe.objective == "mim":
            raise OptionError("--smooth blurs the maps of a network's stages, --objective mim trains a ViT; drop one")
        insert(network, smoothing, torch.zeros(2, *images.inputs.shape[1:]))
    return network


def _settings(recipe: Recipe, fraction: float, smoothing: SmoothingOptions | None) -> dict[str, Any]:
    return {**asdict(recipe), "fraction": fraction, **recorded(smoothing)}


def _about(data: str, images: Images) -> dict[str, Any]:
    return {"name": data, **{key: getattr(images, key) for key in ("classes", "size", "mean", "std")}}


def _check_options(
    model: str, recipe: Recipe, snapshots: int, snapshot_dtype: str, snapshot_optimizer: bool, fraction: float
) -> None:
    at_least("snapshots", snapshots, 0)
    one_of("snapshot_dtype", snapshot_dtype, ("fp32", "fp16"))
    check_request(model, recipe, fraction)
    if snapshot_optimizer and recipe.objective != "classification":
        raise OptionError(
            f"--snapshot-optimizer keeps the state of all weights, and --objective {recipe.objective} stores its "
            "encoder alone; leave it out"
        )


def check_request(model: str, recipe: Recipe, fraction: float) -> None:
    """Raise a ValueError for what cannot be trained, before any data is read."""
    require(0 < fraction <= 1, "fraction", fraction, "above 0 and at most 1")
    validated(recipe)
    models.accepts(model)  # fails for an unknown name
    objectives.refuse_model(recipe, model)


def _check_training_set(images: Images, data: str, recipe: Recipe, processes: ProcessGroup) -> None:
    if recipe.batch_size < processes.size:
        raise OptionError(f"--batch-size {recipe.batch_size} leaves some of {processes.size} processes without work")
    if len(images) < 2 * processes.size:
        raise ValueError(
            f"{data} leaves {len(images)} samples to {processes.size} processes, expected at least two each; "
            "raise --fraction, or start fewer"
        )
    objectives.refuse_images(recipe, images)
    if recipe.randaugment and images.inputs.dtype != torch.uint8:
        raise ValueError(f"{data} gives ready tensors, RandAugment needs uint8 images; take --recipe cifar-noaug")


def _resolved(
    recipe: Recipe, out: Path, model: str, model_args: Mapping[str, Any], images: Images, processes: ProcessGroup
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe for these images, in the memory format of a recorded run, and all arguments of the model."""
    recorded = processes.on_main_process(lambda: run_folder.recorded_memory_format(out))
    channels, size = images.inputs.shape[1:3]
    recipe = at_size(recipe, size)
    arguments: dict[str, Any] = {"classes": images.classes, "image_size": size}
    if channels != 3:
        arguments["channels"] = channels
    if recipe.drop_path and "drop_path" in models.accepts(model):
        arguments["drop_path"] = recipe.drop_path
    arguments |= {name: value for name, value in model_args.items() if name != "image_size"}  # the images' own
    if recorded is not None and recipe.memory_format == "auto":
        recipe = replace(recipe, memory_format=recorded)  # type: ignore[arg-type]  # validated when it was written
    return updates.with_memory_format(recipe, model, arguments), arguments


@dataclass(frozen=True, eq=False)
class _Run:
    """A trainer and the run folder that gets its snapshots."""

    trainer: updates.Trainer
    tests: Batches
    identity: RunIdentity
    out: Path
    snapshots: int  # epochs between two of them; 0 for about ten in a run
    snapshot_dtype: str
    snapshot_optimizer: bool
    monitor: monitor_options.MonitorOptions | None


def _train(run: _Run, report: Report | None) -> None:
    """Train the remaining epochs. A snapshot that was written before a kill would be the same again, and is skipped."""
    on_main_process = run.trainer.processes.on_main_process
    with fixed_threads(run.trainer.recipe.batch_size // run.trainer.processes.size, run.trainer.network):
        state = on_main_process(lambda: run_folder.read_state(run.out))
        history: list[dict[str, float]] = state["history"] if state else []
        if state:
            run.trainer.restore(state)
        else:
            on_main_process(lambda: _snapshot(run, INIT, 0))
        with monitored(run.trainer, run.out, run.monitor, len(history)) as monitor:
            for epoch in range(len(history) + 1, run.trainer.recipe.epochs + 1):
                began = time.perf_counter()
                train_loss = _epoch(run, epoch, monitor)
                on_main_process(lambda: _finish_epoch(run, epoch, train_loss, began, history, report))  # noqa: B023  # called at once
        on_main_process(lambda: _write_final(run, history))


def _finish_epoch(
    run: _Run, epoch: int, train_loss: float, began: float, history: list[dict[str, float]], report: Report | None
) -> None:
    schedule, epochs = run.trainer.schedule, run.trainer.recipe.epochs
    step = epoch * schedule.per_epoch
    metrics = _metrics(run, step, run.trainer.network)
    if epoch % (run.snapshots or math.ceil(epochs / SNAPSHOTS)) == 0:
        _write_intermediate(run, epoch, step, metrics)
    seconds = time.perf_counter() - began
    result = EpochResult(epoch, epochs, train_loss, seconds=seconds, lr=schedule.rate(step - 1), **metrics)
    history.append(asdict(result))
    run_folder.write_metrics(run.out, history, columns=[field.name for field in fields(EpochResult)])
    run_folder.write_state(run.out, run.identity, {**run.trainer.state(), "history": history})
    if report is not None:
        report(result)


def _write_intermediate(run: _Run, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
    """Write `epoch_NNN.pt`; in half precision its metrics are those of the rounded weights."""
    name = f"epoch_{epoch:03d}.pt"
    if run.snapshot_dtype == "fp32" or epoch == run.trainer.recipe.epochs:
        _snapshot(run, name, step, metrics)
    elif not (run.out / name).exists():
        rounded = copy.deepcopy(run.trainer.network)
        weights = run_folder.half_precision(rounded.state_dict())
        rounded.load_state_dict(weights)
        _snapshot(run, name, step, network=rounded, weights=weights)


def _write_final(run: _Run, history: list[dict[str, float]]) -> None:
    """Write the trained weights, `final.pt` last: where it is, everything is."""
    steps = run.trainer.schedule.steps
    if run.trainer.average is not None:
        _snapshot(run, FINAL_EMA, steps, network=run.trainer.average.module)
    if isinstance(run.trainer.objective, objectives.MaskedImages):
        _snapshot(run, DECODER, steps)
    _snapshot(run, FINAL, steps, {name: history[-1][name] for name in ("loss", "accuracy")} if history else None)


def _epoch(run: _Run, epoch: int, monitor: Monitor | None) -> float:
    """Train for one epoch, the first being 1, and return the mean loss over its samples."""
    schedule, processes = run.trainer.schedule, run.trainer.processes
    before = (epoch - 1) * schedule.per_epoch
    losses: list[Tensor] = []
    sizes: list[int] = []
    for step, (loss, size) in enumerate(updates.epoch_updates(run.trainer, epoch), start=before + 1):
        losses.append(loss)
        sizes.append(size)
        if processes.size == 1 and not loss.is_cuda and not loss.isfinite():
            break  # on a GPU, which would have to wait for every loss, and in several processes: once an epoch, below
        if monitor is not None:
            monitor.step(step)
        if step == schedule.warmup:
            processes.on_main_process(lambda: _snapshot(run, WARMUP, schedule.warmup))
    values = processes.all_reduce(torch.stack(losses).double()).cpu()
    broken = (~values.isfinite()).nonzero()
    if len(broken):
        raise _diverged(run, before + 1 + int(broken[0]), float(values[broken[0]]))
    return float(values @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes)


def _metrics(run: _Run, step: int, network: nn.Module) -> dict[str, float]:
    trainer = run.trainer
    found = trainer.objective.evaluated(network, trainer.images, run.tests, seed=trainer.seed)
    if not math.isfinite(found["loss"]):  # the last update broke the weights after their last finite loss
        raise _diverged(run, step, found["loss"])
    return found


def _snapshot(
    run: _Run, name: str, step: int, metrics: Mapping[str, float] | None = None, *,
    network: nn.Module | None = None, weights: Mapping[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write the trained network, or another, unless the file exists; its metrics are measured if not given."""
    path, network = run.out / name, network or run.trainer.network
    if not path.exists():
        epoch, metrics = step / run.trainer.schedule.per_epoch, metrics or _metrics(run, step, network)
        objective = run.trainer.objective
        named = {objective.accuracy if name == "accuracy" else name: value for name, value in metrics.items()}
        identity, held = run.identity, objective.encoder(weights or network.state_dict())
        if name == DECODER and isinstance(objective, objectives.MaskedImages):
            identity = replace(identity, model_args=objective.of_autoencoder(identity.model_args))
            held = objective.autoencoder(network.state_dict())
        kept = run.snapshot_optimizer and name != FINAL_EMA
        optimizer = named_state(run.trainer.optimizer, run.trainer.network) if kept else None
        write_checkpoint(path, **asdict(identity), state_dict=held, epoch=epoch, metrics=named, optimizer=optimizer)


def _diverged(run: _Run, step: int, loss: float) -> Diverged:
    epoch, within = divmod(max(step - 1, 0), run.trainer.schedule.per_epoch)
    newest = run_folder.newest_snapshot(run.out)
    good = f"the last good snapshot is {newest}" if newest else "there is no snapshot yet"
    return Diverged(
        f"the loss became {loss} at epoch {epoch + 1}, step {within + 1}; {good}; "
        f"lower lr (now {run.trainer.recipe.lr}) and give the new run another --out"
    )
