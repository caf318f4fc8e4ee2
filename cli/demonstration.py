"""The whole road on the embedded data: three trained networks, every probe, every figure, one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from landscape.cli.files import drawn
from landscape.cli.probing import OPTIONS, measure_all
from landscape.cli.progress import say
from landscape.cli.training import run_name, run_training
from landscape.probes import PROBES

MODELS = ("vit_demo", "resnet_demo", "alternet_demo")
# Coarser than the defaults of a study, fine enough to see the shape.
SETTINGS: dict[str, dict[str, Any]] = {"surface": {"resolution": "21"}, "hessian": {}}


def demonstrate(out: Path, *, epochs: int | None, samples: str, device: str, quiet: bool) -> None:
    """Train, probe, plot, report; everything that is already there is kept and not done again."""
    finals = [
        run_training(
            model, "digits", {"epochs": epochs}, recipe="demo", out=out / "checkpoints" / run_name(model, "digits"),
            device=device, quiet=quiet,
        )
        for model in MODELS
    ]  # fmt: skip
    results = out / "results.h5"
    common = {name: default for name, (_, default) in OPTIONS.items()}
    common |= {"samples": samples, "device": device, "out": results, "quiet": quiet}
    for name in PROBES:
        from landscape.api import own_defaults

        chosen = {"samples": "320"} if name == "hessian" else {}
        measure_all(name, finals, {**own_defaults(name), **SETTINGS.get(name, {})}, **{**common, **chosen})
    figures = drawn(results, out / "figures", ("png",), quiet=True)
    from landscape.plots import report

    page = report.report(results, out / "report.html", figures)
    typer.echo(report.text_table(report.summary_table(results)))
    say(f"{results}, {len(figures)} figures in {out / 'figures'}, {page}", quiet=quiet)
