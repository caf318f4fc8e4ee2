"""Stage `surface`: points of a loss surface in every execution mode against the bare forward pass."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring import header, row
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_stages.networks import prepared
from gpu_stages.steps import Row, Rows, Settings, Step, alone_in_memory
from gpu_stages.timing import peak_gib, seconds, share_outside_kernels, shown
from gpu_stages.variants import cuda_graphs
from landscape.probes.surface import Surface
from landscape.subject.loading.load import measuring
from landscape.subject.subject import Subject

TITLE = "Loss surfaces"
ABOUT = """\
The bare forward pass is the model and the sum of its losses over all images, on the device, without gradients, and
one transfer at the end; `CUDA graph` is that pass recorded once and replayed. Other rows are points of a 51 x 51
surface by `landscape surface`, which replays the pass too unless the row says otherwise, in turns with the bare
passes; seconds are medians over the rounds, of what further points of a call add to its first one, so that losses at
the centre and compilation do not count. The last column is an EXTRAPOLATION of the measured points to 51 x 51 points
of 10,000 images. Deviation: of a point's loss from exact fp32, in standard errors of that loss over the images, the
greatest of the measured points."""
NETWORKS = (("resnet50", 32), ("vit_s", 32), ("resnet50", 224), ("vit_s", 224))
SMALL_NETWORKS = (("resnet_demo", 16),)
SIDE, WHOLE = 51, 10_000
NO_GRAPH = "exact fp32, no CUDA graph"
OPTIONS: dict[str, dict[str, Any]] = {
    "exact fp32": {},
    NO_GRAPH: {},
    "channels last": {"memory_format": "channels_last"},
    "tf32": {"precision": "tf32"},
    "tf32, channels last": {"precision": "tf32", "memory_format": "channels_last"},
    "bf16": {"precision": "bf16"},
    "bf16, channels last": {"precision": "bf16", "memory_format": "channels_last"},
    "compiled": {"compile": True},
    "bf16, compiled": {"precision": "bf16", "compile": True},
}
# (round, points) -> (loss, its standard error) of each point
Work = Callable[[int, int], list[tuple[float, float]]]
BARE = ("bare forward", "bare forward, CUDA graph")


def steps(settings: Settings) -> Sequence[Step]:
    rounds, networks = (1, SMALL_NETWORKS) if settings.small else (3, NETWORKS)
    ways = [way for way in (*BARE, *OPTIONS) if _runs(way, settings)]
    return [
        Step((name, size, i, way), partial(_measured, name, size, i, way, settings))
        for name, size in networks
        for i in range(rounds)
        for way in ways
    ]


def _runs(way: str, settings: Settings) -> bool:
    """Whether a way can be measured here: graphs and TF32 need a GPU, and compiling would take most of a dry run."""
    of_gpus = way == BARE[1] or "tf32" in way
    return (not of_gpus or settings.device.type == "cuda") and not (settings.small and "compiled" in way)


@dataclass
class Case:
    """A network with its images, and the ways that were warmed up."""

    subject: Subject
    ways: dict[str, Work]


@alone_in_memory
def case_of(name: str, size: int, settings: Settings) -> Case:
    images = 32 if settings.small else 10_000 if size <= 32 else 2_560
    batch_size = 16 if settings.small else 500 if size <= 32 else 128
    subject = prepared(
        name, size, "trained", settings.device,
        folder=settings.folder, small=settings.small, batch_size=batch_size, batches=images // batch_size,
    )  # fmt: skip
    return Case(subject, {})


def _measured(name: str, size: int, i: int, way: str, settings: Settings) -> Row:
    case, device = case_of(name, size, settings), settings.device
    row: Row = {"images": len(case.subject)}
    with measuring(case.subject), cuda_graphs(way != NO_GRAPH):
        known = way in case.ways
        work = case.ways[way] = case.ways[way] if known else made(case.subject, way)
        points = 1 if way in BARE else 2 if settings.small else 4
        one, several = (partial(work, i, count) for count in (1, 1 + points))
        if not known:
            row["first"] = seconds(one, device)
            row["peak"], row["outside"] = peak_gib(several, device), share_outside_kernels(one, device)
        # What a call does once, however many points it has, is left out.
        before = 0.0 if way in BARE else seconds(one, device)
        found: list[tuple[float, float]] = []
        took = seconds(lambda: found.extend(several()), device)
        row["seconds"] = max(0.0, took - before) / (1 + points if way in BARE else points)
    row["losses"] = [] if way in BARE else found
    return row


def made(subject: Subject, way: str) -> Work:
    """A way as a function of the round and of the number of points, which gives (loss, standard error) of each."""
    if way in BARE:
        run = graphed(subject) if way == BARE[1] else partial(bare, subject.model, list(subject.each_batch()))
        return lambda i, count: [(float(run()) / len(subject), 0.0) for _ in range(count)]
    probe = Surface(resolution=str(SIDE), **OPTIONS[way])
    units = list(probe.plan(subject).units())

    def surface(i: int, count: int) -> list[tuple[float, float]]:
        start = SIDE * (SIDE // 2 + 1 + i) + 10  # no control point among them: there are 25 of 2,601
        return [
            (float(values["loss"]), float(values["loss_se"]))
            for values in probe.sweep(subject, units[start : start + count])
        ]

    return surface


@torch.inference_mode()
def bare(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum of the losses, on the device."""
    return torch.stack([F.cross_entropy(model(x), y, reduction="sum") for x, y in batches]).sum()


def graphed(subject: Subject) -> Callable[[], Tensor]:
    """The bare pass over all mini-batches as one CUDA graph, which reads the weights anew at every replay."""
    batches, total = list(subject.each_batch()), torch.zeros((), device=subject.device)
    side = torch.cuda.Stream(subject.device)
    side.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.cuda.stream(side):
        bare(subject.model, batches[:1])
    torch.cuda.current_stream(subject.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        total.copy_(torch.stack([F.cross_entropy(subject.model(x), y, reduction="sum") for x, y in batches]).sum())

    def replay() -> Tensor:
        graph.replay()
        return total

    return replay


def tables(rows: Rows) -> str:
    columns = (
        "network", "px", "images", "way", "s / point", "images / s", "x bare", "outside kernels", "peak GiB",
        "first call s", "deviation, SE", "51 x 51 x 10,000 (extrapolated)",
    )  # fmt: skip
    lines = [header(*columns)]
    cases = dict.fromkeys((name, size, way) for name, size, _, way in rows)
    for name, size, way in cases:
        own = {key[2]: one for key, one in rows.items() if (key[0], key[1], key[3]) == (name, size, way)}
        took = statistics.median(max(one["seconds"], 1e-9) for one in own.values())
        base = {i: rows.get((name, size, i, BARE[0]), {}).get("seconds") for i in own}  # none where it failed
        ratios = [one["seconds"] / base[i] for i, one in own.items() if base[i]]
        exact = {i: rows.get((name, size, i, "exact fp32"), {}).get("losses") for i in own}
        images, first = next(iter(own.values()))["images"], next((one for one in own.values() if "first" in one), {})
        lines.append(row(
            name, size, images, way, f"{took:.4f}", f"{images / took:.0f}",
            f"{statistics.median(ratios):.2f}" if ratios else "n/a",
            *_once(first), _deviation(own, exact) if way in OPTIONS else "", _hours(took * SIDE**2 * WHOLE / images),
        ))  # fmt: skip
    return "\n".join(lines)


def _once(first: Row) -> list[str]:
    cells = (("outside", "{:.0%}"), ("peak", "{:.2f}"), ("first", "{:.1f}"))
    return [shown(first.get(name, np.nan), form) for name, form in cells]


def _deviation(own: dict[Any, Row], exact: dict[Any, Any]) -> str:
    """Greatest |loss - exact| / standard error of the points that both have."""
    found = [
        abs(loss - true) / (error or np.nan)
        for i, one in own.items()
        if exact[i]
        for (loss, _), (true, error) in zip(one["losses"], exact[i], strict=True)
    ]
    return f"{np.nanmax(found):.1e}" if found else ""


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds > 3600 else f"{seconds / 60:.1f} min"
