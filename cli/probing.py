"""The command of a probe: its options are the fields of its dataclass and those common to all probes."""

from __future__ import annotations

import inspect
import math
import os
import typing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from landscape.cli.progress import Progress, say
from landscape.options import format_duration, parse_arguments, parse_numbers
from landscape.probes import FEATURES

SMALL = 8_000_000  # samples per mini-batch times parameters, below which threads cost more than they bring
COMMON, OWN, DATA, OUTPUT = "Options", "This probe", "Model and data", "Output"


def option(kind: Any, help: str, default: Any, panel: str, *flags: str) -> tuple[Any, Any]:
    """An annotation and a default, as Typer reads them."""
    return Annotated[kind, typer.Option(*flags, help=help, rich_help_panel=panel)], default


# name -> (annotation, default); None means: what the preset, the probe or the checkpoint says
OPTIONS: dict[str, tuple[Any, Any]] = {
    "data": option(
        str | None,
        "NAME, FOLDER, FILE.npz, FILE.parquet, X.npy,Y.npy, tokens.npy or file.py:callable; default: what the "
        "checkpoint was trained on.",
        None,
        DATA,
    ),
    "data_root": option(Path | None, "Folder that holds cifar-100-python/ and the like.", None, DATA),
    "split": option(Literal["train", "test"] | None, "Part of the data.", None, DATA),
    "samples": option(str | None, "A number, a share such as 10%, or all. Default 1024.", None, DATA),
    "batch_size": option(int | None, "Samples per mini-batch. Default 128, hessian 16.", None, DATA),
    "augment": option(bool | None, "Transform by the checkpoint's own recipe, drawn once.", None, DATA),
    "weight_decay": option(float | None, "Coefficient of (1/2) ||w||^2 in the objective.", None, DATA),
    "loss": option(
        str | None, "cross-entropy, mse, l1, huber, bce, or file.py:callable: a loss per sample.", None, DATA
    ),
    "image_size": option(int | None, "Side of the images in pixels.", None, DATA),
    "mean": option(str | None, "Mean of each channel, of pixels in 0 to 1: 0.5,0.5,0.5.", None, DATA),
    "std": option(str | None, "Standard deviation of each channel, likewise.", None, DATA),
    "interpolation": option(str | None, "How pictures are resampled: bilinear, bicubic, lanczos ...", None, DATA),
    "crop": option(str | None, "Share of the shorter side that the crop keeps, or squash.", None, DATA),
    "block_size": option(int | None, "Tokens per sequence of a token file.", None, DATA),
    "model": option(
        str | None,
        "Name, timm:NAME, torchvision:NAME, hf:FOLDER, module:callable or file.py:callable, "
        "where the checkpoint does not say.",
        None,
        DATA,
    ),
    "model_arg": option(list[str], "KEY=VALUE argument of the model; repeatable.", [], DATA),
    "weights": option(Literal["raw", "ema"] | None, "The model's weights or their moving average.", None, DATA),
    "trust_pickle": option(
        bool, "Unpickle the checkpoint although it may run code: only files of your own.", False, DATA
    ),
    "allow_missing": option(
        bool, "Leave weights that the checkpoint lacks, or has in another shape, as initialised.", False, DATA
    ),
    "device": option(str, "auto, cpu, cuda or cuda:1.", "auto", COMMON),
    "seed": option(int, "Seed of everything random.", 0, COMMON),
    "preset": option(str, "Settings of a paper: park2022.", "", COMMON),
    "workers": option(int, "Processes that measure side by side.", 1, COMMON),
    "label": option(list[str], "Name in the results file, one per checkpoint; repeatable.", [], OUTPUT),
    "out": option(Path, "Results file.", Path("results.h5"), OUTPUT),
    "overwrite": option(bool, "Measure again what the file already answers.", False, OUTPUT),
    "quiet": option(bool, "Say nothing but errors.", False, OUTPUT),
    "debug": option(bool, "Show the traceback of an error.", False, OUTPUT),
}
LOADING = (
    "data",
    "data_root",
    "split",
    "samples",
    "batch_size",
    "augment",
    "weight_decay",
    "loss",
    "image_size",
    "mean",
    "std",
    "interpolation",
    "crop",
    "block_size",
    "model",
    "weights",
)


def command_of(name: str) -> Callable[..., None]:
    """The function behind `landscape NAME`, with a signature made from the dataclasses of its probes."""
    own = {key: item for probe in probes_of(name) for key, item in _options_of(probe).items()}

    def command(checkpoint: list[Path] | None, **options: Any) -> None:
        parameters = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items() if key in own}
        common = {key: value for key, value in options.items() if key not in own}
        measure_all(name, checkpoint or [None], parameters, **common)

    where = "folder of a run's snapshots" if name == "trajectory" else "checkpoints, or run folders"
    argument = Annotated[
        list[Path] | None, typer.Argument(help=f"{where}; default: the newest final.pt under ./checkpoints")
    ]
    table = {"checkpoint": (argument, None), **own, **OPTIONS}
    return with_options(command, table)


def with_options(command: Callable[..., None], table: dict[str, tuple[Any, Any]]) -> Callable[..., None]:
    """A command whose options Typer reads from a table: name -> (annotation, default)."""
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for key, (annotation, default) in table.items()
        ]
    )
    command.__annotations__ = {key: annotation for key, (annotation, _) in table.items()}
    return command


def probes_of(command: str) -> tuple[str, ...]:
    """The probes that a command measures."""
    return FEATURES if command == "features" else (command,)


def _options_of(probe: str) -> dict[str, tuple[Any, Any]]:
    from landscape.probes import probe_class

    kind = probe_class(probe)
    hints = typing.get_type_hints(kind, include_extras=True)
    own: dict[str, tuple[Any, Any]] = {}
    for field in fields(kind):
        if field.name == "seed":
            continue  # the common one
        annotation, help = typing.get_args(hints[field.name])[:2]
        repeated = typing.get_origin(annotation) is tuple
        default = [] if repeated else field.default
        assert default is not MISSING
        flag = f"--{field.name.replace('_', '-')}"
        own[field.name] = option(list[str] if repeated else annotation, help, default, OWN, flag)
    return own


def measure_all(
    name: str,
    paths: list[Path] | list[None],
    parameters: dict[str, Any],
    *,
    preset: str,
    model_arg: list[str],
    device: str,
    seed: int,
    workers: int,
    label: list[str],
    out: Path,
    overwrite: bool,
    quiet: bool,
    debug: bool,
    trust_pickle: bool,
    allow_missing: bool,
    **options: Any,
) -> None:
    """Measure one checkpoint after the other into one file."""
    from landscape import api
    from landscape.options import OptionError, at_least
    from landscape.results import hdf5_file
    from landscape.subject import loading

    at_least("workers", workers, 1)
    if label and len(label) != len(paths):
        raise OptionError(f"--label was given {len(label)} times for {len(paths)} checkpoints; give one each")
    given = {key: value for key, value in options.items() if value is not None}
    given |= {key: parse_numbers(key, given[key]) for key in ("mean", "std") if key in given}
    given |= {"model_arg": parse_arguments("model_arg", model_arg), "device": device, "seed": seed}
    given |= {"trust_pickle": trust_pickle, "allow_missing": allow_missing}
    probes = probes_of(name)
    usual = {key: value for probe in probes for key, value in api.own_defaults(probe).items()}
    changed = {key: value for key, value in parameters.items() if value != usual[key]}
    questions: list[list[Any]]
    if len(probes) > 1:
        made, rest = api.configured_together(probes, preset, {**changed, **given})
        questions = [list(made)]
    else:
        one, rest = api.configured(name, {**api.preset_of(name, preset), **changed, **given})
        questions = [[variant] for variant in api.variants(one)]
    hdf5_file.check(out, writable=True)
    for path in paths:  # the last one too, before the first takes its hour
        if path is not None and not path.exists():
            raise FileNotFoundError(f"no checkpoint at {path}; give an existing file or a run's folder")
    for position, path in enumerate(paths):
        loaded = loading.load(
            file_of(path), label=label[position] if label else "", **{**api.defaults(probes[0]), **rest}
        )
        introduce(loaded, quiet=quiet)
        if loaded.device.type == "cpu" and workers == 1:
            _settle_threads(loaded)
        _remark(questions[0], loaded, quiet=quiet)
        if len(questions) > 1:
            say(f"{name}: {len(questions)} in turn, each told for itself and with its share of any budget", quiet=quiet)
        for together in questions:
            with _executor(workers) as executor:
                _measure(
                    together, loaded, out, executor, workers, overwrite=overwrite, quiet=quiet, shared=len(probes) > 1
                )


def file_of(checkpoint: Path | None) -> Path | None:
    """The checkpoint that a path stands for: of a run's folder the last."""
    from landscape.checkpoints import file_formats, snapshots

    if checkpoint is None or not checkpoint.is_dir() or file_formats.holds_weights(checkpoint):
        return checkpoint
    return snapshots.last(checkpoint)


def _remark(probes: list[Any], loaded: Any, *, quiet: bool) -> None:
    """Say how the layers were found, where that is not as usual."""
    from landscape.layers.selection import layers_of, remarks

    if all(getattr(probe, "layers", None) == () for probe in probes):
        try:
            found = layers_of(loaded)
        except ValueError:
            return  # the probe says so itself
        for remark in remarks(found):
            say(f"note: {remark}", quiet=quiet)


def _settle_threads(loaded: Any) -> None:
    """Choose the number of threads by forward passes of the first mini-batch."""
    import torch

    from landscape.cli import threads

    if len(loaded.batch(0)[1]) * loaded.size < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # by rule, not by trial: the last bits of a resumed run are those of a straight one
        return
    with torch.inference_mode():
        threads.settle(lambda: loaded.loss(0))


def introduce(loaded: Any, *, quiet: bool) -> None:
    """Say what was loaded, with the cheapest proof that weights, classes and normalisation met.

    Raises:
        ValueError: the model's outputs are not finite.
    """
    from landscape.models.providers import AS_BUILT
    from landscape.subject import identity, loading, sanity_check

    stored = loaded.checkpoint
    about = f"{loaded.size / 1e6:.3g} M parameters, {loaded.device}; {identity.protocol(loaded)}"
    if not loading.classifies(loaded):
        source = f"{stored.path} ({stored.taken})" if stored is not None else identity.origin(loaded)
        say(
            f"{loaded.label}: {source}, {about}; no classifier of the checkpoint's own: loss and accuracy say nothing",
            quiet=quiet,
        )
        return
    found = sanity_check.prove(loaded)
    if stored is not None:
        source = f"{stored.path} ({stored.taken})" + (", initial weights" if stored.epoch == 0 else "")
        warning = sanity_check.doubt(found, epoch=stored.epoch, own=stored.metrics.get("accuracy"))
    elif identity.origin(loaded) != AS_BUILT:
        source, warning = identity.origin(loaded), sanity_check.doubt(found)
    else:  # a callable may bring trained weights of its own
        source, warning = "freshly initialised" if found.at_chance else f"no checkpoint, weights {AS_BUILT}", ""
    say(
        f"{loaded.label}: {source}, {about}; on {found.samples} of them loss {found.loss:.4f}"
        + (f", accuracy {found.accuracy:.4f}" if math.isfinite(found.accuracy) else ""),
        quiet=quiet,
    )
    if warning:
        say(warning, quiet=quiet)


def _executor(workers: int) -> AbstractContextManager[Executor | None]:
    if workers == 1:
        return nullcontext()
    import multiprocessing

    import torch

    threads = max(1, torch.get_num_threads() // workers)
    context = multiprocessing.get_context("spawn")  # a forked child would inherit torch's threads and CUDA's state
    return ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,))


def _measure(
    probes: list[Any],
    loaded: Any,
    out: Path,
    executor: Executor | None,
    workers: int,
    *,
    overwrite: bool,
    quiet: bool,
    shared: bool,
) -> None:
    """One probe, or several from one pass."""
    import time

    from landscape.plots import headlines
    from landscape.run import run
    from landscape.shared_pass import fitting, run_together

    start = time.monotonic()
    how: dict[str, Any] = {"executor": executor, "workers": workers, "overwrite": overwrite}
    if shared:
        probes, refused = fitting(probes, loaded)
        for name, reason in refused.items():
            say(f"note: {name} is left out: {reason}", quiet=quiet)
        with Progress(f"features {loaded.label}", quiet=quiet) as progress:
            outcomes = run_together(probes, loaded, out, report=progress, **how)
    else:
        with Progress(f"{probes[0].name} {loaded.label}", quiet=quiet) as progress:
            outcomes = [run(probes[0], loaded, out, report=progress, **how)]
    took = format_duration(time.monotonic() - start)
    for outcome in outcomes:
        headline = headlines.headline(out, outcome.group)
        if outcome.measured == 0:
            say(f"already measured: {outcome.group} in {out}; --overwrite measures again. {headline}", quiet=quiet)
        else:
            counted = f"{outcome.measured} of {outcome.units} units in {took}"
            say(f"{outcome.group} in {out}: {counted}. {headline}", quiet=quiet)
