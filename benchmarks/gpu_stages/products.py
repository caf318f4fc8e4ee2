"""Stage `products`: probes whose time is Hessian products, over several mini-batches and random vectors."""

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from measuring import table

import landscape
from gpu_stages.networks import prepared
from gpu_stages.steps import Row, Rows, Settings, Step, alone_in_memory
from gpu_stages.timing import peak_gib, seconds, share_outside_kernels, shown
from landscape.reporting.progress import Progress
from landscape.subject.subject import Subject

TITLE = "Trace, density, and the spectrum of a whole data set"
ABOUT = """\
Eight mini-batches of 16 synthetic images and networks after 150 updates, each call of `landscape.measure` after one
that chose the products and recorded them. Products are those of single mini-batches; `first`: seconds of the first
call. Outside kernels: the share of a third call's wall time in which the device neither computes nor copies."""
NETWORKS = tuple((name, size) for size in (224, 32) for name in ("resnet50", "vit_s"))
BATCHES, BATCH_SIZE = 8, 16
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "trace, 8 vectors": ("trace", {"vectors": 8, "method": "hutchinson"}),
    "density, 10 steps": ("density", {"vectors": 1, "steps": 10}),
    "top 5 of all samples": ("hessian", {"scope": "dataset", "top": 5}),
}


def steps(settings: Settings) -> Sequence[Step]:
    networks = (("vit_demo", 16),) if settings.small else NETWORKS
    return [
        Step((name, size, way), partial(_measured, name, size, way, settings))
        for name, size in networks
        for way in WAYS
    ]


@alone_in_memory
def _subject(name: str, size: int, settings: Settings) -> Subject:
    count, batch_size = (2, 4) if settings.small else (BATCHES, BATCH_SIZE)
    return prepared(
        name, size, "trained", settings.device,
        folder=settings.folder, small=settings.small, batch_size=batch_size, batches=count,
    )  # fmt: skip


def _measured(name: str, size: int, way: str, settings: Settings) -> Row:
    subject, (probe, options) = _subject(name, size, settings), WAYS[way]
    few = {"vectors": 4, "steps": 2, "top": 1}
    options = {key: few.get(key, value) if settings.small else value for key, value in options.items()}
    made: list[int] = []

    def run() -> None:
        made.clear()
        with patch.object(Progress, "products", lambda _, count, per_unit: made.append(count)):
            landscape.measure(probe, subject, out=None, quiet=True, **options)

    found: Row = {"first": seconds(run, settings.device)}
    found["seconds"] = seconds(lambda: found.update(peak=peak_gib(run, settings.device)), settings.device)
    return {**found, "products": sum(made), "outside": share_outside_kernels(run, settings.device)}


def tables(rows: Rows) -> str:
    columns = ("network", "px", "way", "products", "s", "ms / product", "first", "outside kernels", "peak GiB")
    return table(columns, (
        (*key, one["products"], f"{one['seconds']:.3f}", f"{1e3 * one['seconds'] / max(one['products'], 1):.2f}",
         f"{one['first']:.2f}", shown(one["outside"], "{:.0%}"), shown(one["peak"], "{:.2f}"))
        for key, one in rows.items()
    ))  # fmt: skip
