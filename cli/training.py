"""The commands `train` and `models`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.cli.command_options import Debug, Quiet, Verbose
from landscape.options import OptionError, parse_arguments
from landscape.reporting.progress import is_main_process, say
from landscape.subject.spec import BLOCK_HELP, smoothing_of
from landscape.training.monitor_options import MonitorOptions

if TYPE_CHECKING:
    from landscape.training.train import EpochResult

Option = typer.Option
MEMORY_FORMATS = {True: "channels_last", False: "contiguous", None: None}
ChannelsLast = Annotated[
    bool | None, Option("--channels-last/--no-channels-last", help="default: if most weights belong to convolutions")
]
SnapshotOptimizer = Annotated[
    bool, Option("--snapshot-optimizer", help="keep the optimiser's state in the snapshots, for landscape step")
]


def train(
    model: Annotated[str, typer.Argument(help="name of a model, see: landscape models")],
    data: Annotated[str, Option(help="NAME, FOLDER or file.py:callable")],
    data_root: Annotated[Path | None, Option(help="folder that holds cifar-100-python/ and the like")] = None,
    model_arg: Annotated[list[str], Option(help="KEY=VALUE argument of the model; repeatable")] = [],  # noqa: B006
    recipe: Annotated[str | None, Option(help="demo, cifar-vit, cifar-cnn, cifar-noaug, imagenet-vit")] = None,
    objective: Annotated[str | None, Option(help="classification, or without labels: simclr, mim")] = None,
    epochs: Annotated[int | None, Option(help="total, warm-up included; 0 writes the initial weights")] = None,
    batch_size: Annotated[int | None, Option(help="images per step")] = None,
    lr: Annotated[float | None, Option(help="peak learning rate")] = None,
    weight_decay: Annotated[float | None, Option(help="decoupled (AdamW) or L2 (SGD, 5e-4 if not given)")] = None,
    label_smoothing: Annotated[float | None, Option(help="share of the target spread over all classes")] = None,
    mixup: Annotated[float | None, Option(help="alpha of its Beta distribution; 0 is off")] = None,
    cutmix: Annotated[float | None, Option(help="alpha of its Beta distribution; 0 is off")] = None,
    drop_path: Annotated[float | None, Option(help="rate of stochastic depth at the last block")] = None,
    warmup: Annotated[float | None, Option(help="epochs of linear warm-up; default: up to a fifth of the run")] = None,
    snapshots: Annotated[int, Option(help="write epoch_NNN.pt every N epochs; 0: about ten in a run")] = 0,
    snapshot_dtype: Annotated[str, Option(help="fp32, or fp16 to halve intermediate snapshots")] = "fp32",
    snapshot_optimizer: SnapshotOptimizer = False,
    fraction: Annotated[float, Option(help="class-balanced share of the training split")] = 1.0,
    set: Annotated[list[str], Option(help="any recipe field: optimizer=sgd; repeatable", metavar="FIELD=VALUE")] = [],  # noqa: B006
    accumulate: Annotated[int | None, Option(help="mini-batches per update (gradient accumulation)")] = None,
    ema: Annotated[float | None, Option(help="decay of a moving average of the weights (final_ema.pt)")] = None,
    sam: Annotated[float | None, Option(help="radius of sharpness-aware minimisation, two passes per update")] = None,
    precision: Annotated[str | None, Option(help="auto (bf16 on a GPU that has it), fp32 or bf16")] = None,
    channels_last: ChannelsLast = None,
    compile: Annotated[bool, Option("--compile", help="train with torch.compile")] = False,
    deterministic: Annotated[bool, Option("--deterministic", help="use deterministic algorithms only")] = False,
    tensorboard: Annotated[bool, Option("--tensorboard", help="also write event files to the run folder")] = False,
    monitor: Annotated[bool, Option("--monitor", help="follow sharpness and noise, in monitor.h5 there")] = False,
    monitor_every: Annotated[int, Option(help="updates between two measurements of --monitor")] = 100,
    monitor_overhead: Annotated[float, Option(help="share of the time that --monitor may take")] = 0.02,
    smooth: Annotated[bool, Option("--smooth", help="train with smoothing blocks at the ends of the stages")] = False,
    smooth_at: Annotated[str, Option(help="REGEX: smoothing blocks after these modules instead")] = "",
    smooth_block: Annotated[str, Option(help=BLOCK_HELP)] = "",
    sync_bn: Annotated[bool, Option("--sync-bn", help="batch norm statistics over all torchrun processes")] = False,
    name: Annotated[str, Option(help="added to the run folder's name")] = "",
    seed: Annotated[int, Option(help="seed of weights, order and augmentation")] = 0,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    out: Annotated[Path | None, Option(help="run folder; default checkpoints/MODEL-DATA[-NAME]")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train a model and write snapshots; an interrupted run resumes after its last finished epoch."""
    options = {
        "epochs": epochs, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay, "mixup": mixup,
        "label_smoothing": label_smoothing, "cutmix": cutmix, "drop_path": drop_path, "warmup": warmup, "sam": sam,
        "accumulate": accumulate, "ema": ema, "precision": precision, "memory_format": MEMORY_FORMATS[channels_last],
        "compile": compile or None, "sync_bn": sync_bn or None, "objective": objective,
    }  # fmt: skip
    follow = MonitorOptions(monitor_every, monitor_overhead)
    run_training(
        model, data, overrides_of(set, options), recipe=recipe, snapshots=snapshots, seed=seed, fraction=fraction,
        out=out or Path("checkpoints") / run_name(model, data, name), data_root=data_root,
        model_args=parse_arguments("model_arg", model_arg), snapshot_dtype=snapshot_dtype,
        snapshot_optimizer=snapshot_optimizer, device=device, deterministic=deterministic, tensorboard=tensorboard,
        monitor=follow if monitor else None, quiet=quiet,
        smoothing=smoothing_of(smooth or None, smooth_block, smooth_at),
    )  # fmt: skip


def overrides_of(set: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Fields of the recipe that `--set` and options of their own override."""
    from landscape.data.recipes import parse_overrides

    return {**parse_overrides(set), **{field: value for field, value in options.items() if value is not None}}


def run_name(model: str, data: str, name: str = "") -> str:
    """`<model>-<data>[-<name>]`, with the last part of the path for data from a folder or file.

    Raises:
        OptionError: the name is a path.
    """
    if "/" in name:
        raise OptionError(f"--name must be a word, got the path {name}; give the run folder as --out instead")
    short = Path(data.rpartition(":")[0] or data).stem if "/" in data or ":" in data else data
    return "-".join(part for part in (model, short, name) if part)


def run_training(
    model: str, data: str, overrides: dict[str, Any], *, recipe: str | None, out: Path, quiet: bool,
    tensorboard: bool = False, report: Callable[[int, int], None] | None = None, **options: Any,
) -> Path:  # fmt: skip
    """Train, print and report every epoch, and draw a figure at the end; return the path of `final.pt`."""
    from landscape.data import recipes
    from landscape.training.train import train as train_model

    resolved = recipes.recipe(recipe or recipes.default_recipe(model), **overrides)
    what = "accuracy" if resolved.objective == "classification" else "neighbour accuracy"
    board = EventFiles(out) if tensorboard else None

    def finished(done: "EpochResult") -> None:
        if report is not None:
            report(done.epoch, done.epochs)
        if board is not None:
            board(done)
        numbers = f"train loss {done.train_loss:.4f} loss {done.loss:.4f} {what} {done.accuracy:.4f}"
        say(f"{out.name} epoch {done.epoch}/{done.epochs} {numbers} {done.seconds:.1f} s", quiet=quiet)

    existed = (out / "final.pt").exists()
    final = train_model(model, data, recipe=resolved, out=out, report=finished, **options)
    if not is_main_process():
        return final
    from landscape.checkpoints.checkpoint import read_checkpoint

    states = {final.with_name("final_ema.pt"): "moving average", final: "already trained" if existed else "trained"}
    for file, state in states.items():  # the last line is that of final.pt, also for scripts
        if file.exists():
            metrics = read_checkpoint(file).metrics
            accuracy = metrics[what.replace(" ", "_")]
            say(f"{state}: {file}, loss {metrics['loss']:.4f}, {what} {accuracy:.4f}", quiet=quiet)
    if (out / "metrics.csv").exists():
        from landscape.plots import drawing

        drawing.draw_run(out, out)
    return final


def models(
    build_up: Annotated[
        str | None, Option(help="AlterNet whose placements of 0, 1, 2, ... MSAs are listed, in the paper's order")
    ] = None,
    debug: Debug = False,
) -> None:
    """List the models that `train` builds, with their numbers of parameters."""
    from landscape import models as known

    if build_up is not None:
        for count, placement in enumerate(known.build_up(build_up)):
            argument = ",".join(map(str, placement))
            typer.echo(f"{count} MSA  --model-arg msa={argument}  {known.summary(build_up, msa=placement)}")
        return
    width = max(map(len, known.NAMES))
    for name in known.NAMES:
        typer.echo(f"{name:{width}}  {known.summary(name)}")


FOLDER = "tensorboard"  # in the run folder


class EventFiles:
    """Event files in the run folder, created with the first epoch; called with every finished epoch.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(
                "--tensorboard needs a package: pip install 'landscape-probes[tensorboard]'; or leave the option out"
            ) from None
        self._make: Any = partial(SummaryWriter, str(out / FOLDER))
        self._writer: Any = None

    def __call__(self, done: "EpochResult") -> None:
        """Write one epoch, and flush it to disk."""
        if self._writer is None:
            self._writer = self._make()
        scalars = {
            "loss/train": done.train_loss, "loss/test": done.loss, "accuracy/test": done.accuracy, "lr": done.lr,
            "seconds": done.seconds,
        }  # fmt: skip
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, done.epoch)
        self._writer.flush()
