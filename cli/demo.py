"""The command `demo`: small networks trained on the embedded digits, the core probes, sixteen figures, one report."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from multiprocessing.pool import Pool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from landscape.cli.command_options import Debug, Quiet
from landscape.cli.measuring import measure_all
from landscape.cli.text_table import text_table
from landscape.cli.training import run_name, run_training
from landscape.options import format_duration
from landscape.probe import NotApplicable
from landscape.probes import FEATURES, PROBES, probe_class
from landscape.reporting.progress import say

if TYPE_CHECKING:
    from landscape.plots.report.findings import Finding

Option = typer.Option
MODELS: Mapping[str, Mapping[str, Any]] = {  # with arguments: patches of 4 px, 16 tokens, cost the ViT a quarter of 64
    "vit_demo": {"patch": 4}, "resnet_demo": {}, "alternet_demo": {},
}  # fmt: skip
AGAIN = "resnet_demo"  # trained a second time, with another seed, for the probes between two networks
EPOCHS = 10  # of the 25 of the recipe
WORKERS = 2  # processes that train and measure: networks as small as these gain nothing by threads


class Step(NamedTuple):
    """What is measured at once: a probe, or "features", with its parameters, of networks loaded in one way."""

    probe: str
    parameters: Mapping[str, Any]
    loading: Mapping[str, Any]
    paths: Sequence[Path] = ()


def _step(probe: str, samples: int = 512, *, batch_size: int = 0, **parameters: Any) -> Step:
    """A probe, or "features", with parameters that are coarser than the defaults, fine enough to see the shape."""
    loading = {"samples": samples} | ({"batch_size": batch_size} if batch_size else {})
    return Step(probe, parameters, loading)


SGD: Mapping[str, Any] = {"optimizer": "sgd", "optimizer_arg": ("lr=0.1",), "optimizer_state": False}
MEASURES = "sam,worst-l2,adaptive-worst-l2,average-l2,adaptive-average-l2,fisher-rao"
BETWEEN = ("line", "align", "barriers")  # measured between the two seeds
EARLY = (
    "noise-scale",
)  # measured at the end of warm-up: the gradient of the trained networks is smaller than its error
CORE: Sequence[Step] = (  # the longest first, so that no process waits for the other at the end
    _step("surface", 128, resolution="11", range="0.5"),
    _step("convexity", 12, resolution="3", range="0.5", tol=0.3),
    _step("hessian", 128, top=4),
    _step("barriers", 128, resolution=5, snapshots="spread:2", repair=1, restarts=1, align=True),
    _step("align", 256, resolution=11, repair=2, restarts=1),
    _step("line", 256, resolution=21),
    _step("trajectory", 256),
    _step("step", 96, **SGD, batch_size=16),
    _step("trace", 96, vectors=8, batch_size=16),
    _step("density", 48, vectors=6, steps=8),
    _step("flatness", 64, measures=MEASURES, steps=5, draws=8, vectors=8, batch_size=16),
    _step("noise-scale", 768, groups=24, simple=True),
    _step("sensitivity", 128, bits="3,2", vectors=2),
    _step("features", 256),
    _step("lesion", 360),
)
FIGURES = (
    "surface", "line", "align", "barriers", "convexity", "trajectory", "hessian", "step", "trace", "density",
    "flatness", "noise_scale", "fourier_depth", "variance", "lesion", "sensitivity",
)  # fmt: skip
OTHERS: Sequence[Step] = (  # of `--all`, where the defaults take long
    _step("perturbation", 64),
    _step("attack", 128, eps="1/255,4/255,16/255", steps=10),
    _step("input-surface", 64, resolution=11),
    _step("corruption", 128, severities="1,3,5"),
)
SENTENCES = 3
OWN = "landscape hessian weights.pt --model mine.py:model --data mine.py:data"


def demo(
    out: Annotated[Path, Option(help="folder for checkpoints, results, figures and report")] = Path("."),
    all: Annotated[bool, Option("--all", help="run every probe and draw every figure, in several minutes")] = False,
    epochs: Annotated[int, Option(help="epochs per model")] = EPOCHS,
    samples: Annotated[int, Option(help="samples per probe, at most")] = 1024,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a ViT, a ResNet and an AlterNet on digits, run the core probes, draw 16 figures: at most two minutes.

    Finished steps are kept and not repeated.
    """
    from landscape.doctor.rules import examine
    from landscape.plots import drawing, report

    start, results = time.monotonic(), out / "results.h5"
    with processes() as pool:
        trainings = [*((model, 0) for model in MODELS), (AGAIN, 1)]
        train_one = partial(train, out=out, epochs=epochs, device=device, quiet=quiet)
        *networks, again = pool.imap(train_one, trainings)
        steps = [
            step._replace(paths=paths) for step in plan(every=all, quiet=quiet)
            for paths in runs(step.probe, networks, [networks[list(MODELS).index(AGAIN)], again])
        ]  # fmt: skip
        measure_one = partial(measure, samples=samples, device=device, out=results)
        done = zip(steps, pool.imap(measure_one, steps), strict=True)
        for probe, of_probe in groupby(done, key=lambda item: item[0].probe):
            say(summary(probe, [outcome for _, outcome in of_probe]), quiet=quiet)
        names = drawing.NAMES if all else FIGURES
        shares = [tuple(names[k::WORKERS]) for k in range(WORKERS)]  # each process reads the results once
        figures = [path for paths in pool.imap(partial(draw, results, out / "figures"), shares) for path in paths]
    page = report.report(results, out / "report.html", figures, examine([results]))
    typer.echo(text_table(report.summary_table(results)))
    typer.echo(closing(report.findings_of(results), out))
    took = format_duration(time.monotonic() - start)
    say(f"{results}, {len(figures)} figures in {out / 'figures'}, {page}; {took} in all", quiet=quiet)


@contextmanager
def processes() -> Iterator[Pool]:
    """Processes that share the CPUs: one thread is fastest for networks as small as these.

    They end with this one, also if it is killed; what they have finished is kept.
    """
    with multiprocessing.get_context("spawn").Pool(WORKERS, _begin) as pool:
        yield pool


def _begin() -> None:
    """Leave Ctrl-C to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def train(network: tuple[str, int], *, out: Path, epochs: int, device: str, quiet: bool) -> Path:
    """Train a model with a seed; the path of its last checkpoint.

    Where the run's folder holds another run, such as that of `landscape train vit_demo --data digits`, it gets another.
    """
    from landscape.training.run_folder import AnotherRun

    model, seed = network
    of_seed, folder = f"seed{seed}" * bool(seed), out / "checkpoints"
    trained = partial(
        run_training, model, "digits", {"epochs": epochs}, recipe="demo", model_args=MODELS[model], seed=seed,
        device=device, quiet=quiet,
    )  # fmt: skip
    try:
        return trained(out=folder / run_name(model, "digits", of_seed))
    except AnotherRun:
        return trained(out=folder / run_name(model, "digits", f"demo{of_seed}"))


def plan(*, every: bool, quiet: bool = True) -> Iterator[Step]:
    """What is measured: the core probes, or all but those of an order of frames, which digits do not have."""
    yield from CORE
    settings = {step.probe: step for step in OTHERS}
    known = {step.probe for step in CORE} | set(FEATURES)
    for name in (name for name in PROBES if every and name not in known and not probe_class(name).ordered):
        if (needed := PROBES[name].needs) and find_spec(needed) is None:
            say(f"{name}: left out, as {needed} is not installed", quiet=quiet)
        else:
            yield settings.get(name, _step(name))


def runs(probe: str, networks: Sequence[Path], seeds: Sequence[Path]) -> Sequence[Sequence[Path]]:
    """The checkpoints that a probe measures together: one, all as members, or the two seeds."""
    if probe in BETWEEN:
        return [seeds]
    if probe == "ensemble":
        return [networks]
    return [[one.with_name("warmup.pt") if probe in EARLY else one] for one in networks]


def measure(step: Step, *, samples: int, device: str, out: Path) -> tuple[list[int], float]:
    """How many units of every result a step measured now, 0 where it was complete, and the seconds that it took."""
    began = time.monotonic()
    loading = {**step.loading, "samples": str(min(samples, step.loading["samples"])), "device": device, "seed": 0}
    try:
        outcomes = measure_all(step.probe, step.paths, step.parameters, loading, out=out, quiet=True)
    except NotApplicable:  # attention, of a network that has none
        return [], 0.0
    return [outcome.measured for outcome in outcomes], time.monotonic() - began


def summary(probe: str, outcomes: Sequence[tuple[list[int], float]]) -> str:
    """One line about a step."""
    units = [count for counts, _ in outcomes for count in counts]
    count = f"{len(units)} result{'s' * (len(units) != 1)}"
    if not any(units):
        return f"{probe}: {count}, already measured"
    return f"{probe}: {count} in {format_duration(sum(seconds for _, seconds in outcomes))}"


def draw(results: Path, folder: Path, names: Sequence[str]) -> list[Path]:
    """Draw some figures; no path where the results do not allow one."""
    from landscape.plots import drawing

    return drawing.draw(results, folder, figures=names)


def closing(found: Sequence[Finding], out: Path) -> str:
    """What was found, in sentences with numbers, and the commands to type next."""
    sentences = [finding.number for finding in found if finding.number][:SENTENCES]
    compare, every = (
        ["landscape", "compare", str(out / "results.h5")],
        ["landscape", "demo", "--out", str(out), "--all"],
    )
    commands = [shlex.join(compare), shlex.join(every), OWN]
    lines = ["", "Found (in brackets and after ±: 95 % intervals):", *(f"- {line}" for line in sentences)]
    return "\n".join([*lines, "", "Next:", *(f"$ {command}" for command in commands)])
