"""The whole road on the embedded data: three trained networks, every probe, every figure, one page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from landscape.cli.files import drawn
from landscape.cli.probing import OPTIONS, measure_all, probes_of
from landscape.cli.progress import say
from landscape.cli.training import run_name, run_training
from landscape.options import format_duration
from landscape.probes import FEATURES, PROBES

MODELS = ("vit_demo", "resnet_demo", "alternet_demo")
EPOCHS = 12  # of the 25 of the recipe
# Coarser than the defaults of a study, fine enough to see the shape.
COARSE: dict[str, dict[str, Any]] = {
    "surface": {"resolution": "15", "samples": "256"},
    "line": {"resolution": 15, "samples": "256"},
    "hessian": {"samples": "256"},
    "trace": {"samples": "128", "vectors": 12},
    "density": {"samples": "64", "vectors": 2, "steps": 20},
}


def _settle_threads() -> None:
    """Choose the number of threads by training steps of the kind that follows."""
    import torch

    from landscape import models
    from landscape.cli import threads

    model, images = models.build(MODELS[-1], classes=10, image_size=16), torch.randn(32, 3, 16, 16)
    threads.settle(lambda: model(images).sum().backward())


def demonstrate(out: Path, *, epochs: int | None, samples: str, device: str, quiet: bool) -> None:
    """Train, probe, plot, report; everything that is already there is kept and not done again."""
    from landscape.api import own_defaults

    start = time.monotonic()
    _settle_threads()
    epochs = EPOCHS if epochs is None else epochs
    finals = [
        run_training(
            model, "digits", {"epochs": epochs}, recipe="demo", out=out / "checkpoints" / run_name(model, "digits"),
            device=device, quiet=quiet,
        )
        for model in MODELS
    ]  # fmt: skip
    results = out / "results.h5"
    common = {name: default for name, (_, default) in OPTIONS.items()}
    common |= {"samples": samples, "device": device, "out": results, "quiet": True}
    for name in (*(name for name in PROBES if name not in FEATURES), "features"):
        began = time.monotonic()
        usual = {key: value for probe in probes_of(name) for key, value in own_defaults(probe).items()}
        settings = {**common, **usual, **COARSE.get(name, {})}
        own = {key: settings.pop(key) for key in usual if key != "seed"}
        measure_all(name, finals, own, **settings)
        say(f"{name}: {len(finals)} networks in {format_duration(time.monotonic() - began)}", quiet=quiet)
    figures = drawn(results, out / "figures", ("png",), quiet=True)
    from landscape.plots import report

    page = report.report(results, out / "report.html", figures)
    typer.echo(report.text_table(report.summary_table(results)))
    took = format_duration(time.monotonic() - start)
    say(f"{results}, {len(figures)} figures in {out / 'figures'}, {page}; {took} in all", quiet=quiet)
