"""The command `demo`: three small networks trained on the embedded digits, every probe, every figure, one report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli.command_options import Debug, Quiet
from landscape.cli.figures import draw
from landscape.cli.measuring import measure_all
from landscape.cli.text_table import text_table
from landscape.cli.training import run_name, run_training
from landscape.options import format_duration
from landscape.probes import FEATURES, PROBES, probe_class
from landscape.progress import say

Option = typer.Option
MODELS = ("vit_demo", "resnet_demo", "alternet_demo")
EPOCHS = 12  # of the 25 of the recipe
# Parameters coarser than the defaults, fine enough to see the shape; and the number of samples, where it is smaller.
COARSE: Mapping[str, Mapping[str, Any]] = {
    "surface": {"resolution": "15"},
    "line": {"resolution": 15},
    "align": {"resolution": 5},
    "barriers": {"resolution": 5, "snapshots": "spread:3"},
    "convexity": {"resolution": "5"},
    "step": {"optimizer": "sgd", "optimizer_arg": ("lr=0.1",), "optimizer_state": False},
    "trace": {"vectors": 12},
    "sensitivity": {"bits": "6,4,2", "vectors": 2},
    "density": {"vectors": 2, "steps": 20},
    "flatness": {"steps": 5, "draws": 4, "vectors": 8},
    "noise-scale": {"groups": 16},
    "corruption": {"severities": "1,3,5"},
    "attack": {"eps": "1/255,4/255,16/255", "steps": 10},
    "input-surface": {"resolution": 11},
}
WITHIN_A_RUN = ("align", "barriers")  # between networks of one architecture, here those of one run
SAMPLES: Mapping[str, int] = {
    "surface": 256,
    "line": 256,
    "align": 128,
    "barriers": 128,
    "convexity": 16,
    "hessian": 256,
    "step": 256,
    "trace": 128,
    "sensitivity": 128,
    "density": 64,
    "flatness": 128,
    "noise-scale": 256,
    "corruption": 128,
    "attack": 128,
    "input-surface": 64,
    "perturbation": 64,
}


def demo(
    out: Annotated[Path, Option(help="folder for checkpoints, results, figures and report")] = Path("."),
    epochs: Annotated[int | None, Option(help="epochs per model")] = None,
    samples: Annotated[int, Option(help="samples per probe, at most")] = 512,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a ViT, a ResNet and an AlterNet on digits, run every probe, draw every figure: about four minutes.

    Finished steps are kept and not repeated.
    """
    from landscape.doctor.rules import examine
    from landscape.plots import report

    start = time.monotonic()
    checkpoints = [
        run_training(
            model, "digits", {"epochs": EPOCHS if epochs is None else epochs}, recipe="demo",
            out=out / "checkpoints" / run_name(model, "digits"), device=device, quiet=quiet,
        )
        for model in MODELS
    ]  # fmt: skip
    results = out / "results.h5"
    for name in (*(name for name in PROBES if name not in FEATURES), "features"):
        if (needed := PROBES[name].needs if name in PROBES else "") and find_spec(needed) is None:
            say(f"{name}: left out, as {needed} is not installed", quiet=quiet)
            continue
        if name in PROBES and probe_class(name).ordered:
            continue  # the demo's data are no frames of a stream
        began = time.monotonic()
        loading = {"samples": str(min(samples, SAMPLES.get(name, samples))), "device": device, "seed": 0}
        runs = [[one] for one in checkpoints] if name in WITHIN_A_RUN else [checkpoints]
        measured = sum(measure_all(name, run, COARSE.get(name, {}), loading, out=results, quiet=True) for run in runs)
        results_of = f"{measured} result{'s' if measured > 1 else ''}"
        say(f"{name}: {results_of} in {format_duration(time.monotonic() - began)}", quiet=quiet)
    figures = draw(results, out / "figures", ("png",), quiet=True)
    page = report.report(results, out / "report.html", figures, examine([results]))
    typer.echo(text_table(report.summary_table(results)))
    took = format_duration(time.monotonic() - start)
    say(f"{results}, {len(figures)} figures in {out / 'figures'}, {page}; {took} in all", quiet=quiet)
