"""Stage `features`: the shared pass of the layer probes against the bare forward pass."""

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from measuring import clock_of, table

import landscape
from gpu_stages.networks import build, images, subject
from gpu_stages.steps import Row, Rows, Settings, Step
from gpu_stages.timing import peak_gib, share_outside_kernels, shown
from landscape.subject.loading.load import measuring
from landscape.subject.subject import Subject

TITLE = "`landscape features` against the bare forward pass"
ABOUT = """\
Random weights, 32 px. Seconds per mini-batch are medians over the mini-batches of a second run, after the first, from
the device's clock at each one that `landscape.features` reports as finished; of the bare pass, the mean of a whole
run. `before`: seconds from the first call to its first finished mini-batch, which hold the search for layers, hashes
of weights and samples, and the start-up of kernels."""
NETWORKS = ("resnet50", "vit_ti", "vit_s")
BARE = "bare forward"
COLUMNS: dict[str, dict[str, Any]] = {
    BARE: {},
    "fourier": {"probes": ("fourier",)},
    "variance": {"probes": ("variance",)},
    "similarity": {"probes": ("similarity",)},
    "the three": {"probes": ("fourier", "variance", "similarity")},
    "with attention": {"probes": ("fourier", "variance", "similarity", "attention"), "spectra_images": 0},
    "with attention, spectra of 4 images": {
        "probes": ("fourier", "variance", "similarity", "attention"), "spectra_images": 4
    },
}  # fmt: skip


def steps(settings: Settings) -> Sequence[Step]:
    networks = ("vit_demo",) if settings.small else NETWORKS
    columns = (BARE, "the three", "with attention") if settings.small else tuple(COLUMNS)
    return [
        Step((name, column), partial(_measured, name, column, settings))
        for name in networks
        for column in columns
        if "vit" in name or "attention" not in column
    ]


def _measured(name: str, column: str, settings: Settings) -> Row:
    size, batch_size, batches = (16, 8, 3) if settings.small else (32, 128, 40)
    model = build(name, size, small=settings.small).to(settings.device)
    made, clock = subject(model, images(batch_size * batches, size), batch_size), clock_of(settings.device)
    marks: list[float] = []

    def run() -> None:
        marks[:] = [clock()]
        if column == BARE:
            _bare(made)
            end = clock()  # once, so that nothing waits between mini-batches
            marks.extend(end * k / batches + marks[0] * (1 - k / batches) for k in range(1, batches + 1))
        else:
            options = COLUMNS[column]
            landscape.features(
                made, out=None, quiet=True, report=lambda done, of: marks.append(clock()), **options
            )  # fmt: skip

    peak = peak_gib(run, settings.device)
    before = marks[1] - marks[0]
    run()
    took = [b - a for a, b in pairwise(marks[1:])]
    share = share_outside_kernels(run, settings.device)
    return {"seconds": statistics.median(took), "before": before, "peak": peak, "outside": share, "images": batch_size}


def _bare(made: Subject) -> None:
    with measuring(made), torch.inference_mode():
        for inputs, _ in made.each_batch():
            made.model(inputs)


def tables(rows: Rows) -> str:
    columns = ("network", "way", "ms / mini-batch", "images / s", "x bare", "before s", "peak GiB", "outside kernels")
    bare = {name: max(one["seconds"], 1e-9) for (name, column), one in rows.items() if column == BARE}
    return table(columns, (
        (name, column, f"{1e3 * one['seconds']:.2f}", f"{one['images'] / max(one['seconds'], 1e-9):.0f}",
         f"{one['seconds'] / bare.get(name, float('nan')):.2f}", f"{one['before']:.2f}",
         shown(one["peak"], "{:.2f}"), shown(one["outside"], "{:.0%}"))
        for (name, column), one in rows.items()
    ))  # fmt: skip
