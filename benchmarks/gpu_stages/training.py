"""Stage `training`: updates of the bundled trainer on synthetic images that lie on the device."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from measuring import table
from torch.utils.flop_counter import FlopCounterMode

from gpu_stages.networks import CLASSES, TINY
from gpu_stages.steps import Row, Rows, Settings, Step
from gpu_stages.timing import peak_gib, share_outside_kernels, shown, typical
from landscape import models
from landscape.data import dataset, recipes
from landscape.training.updates import Trainer, epoch_updates, with_memory_format

TITLE = "Training throughput"
ABOUT = """\
The bundled trainer by the network's own recipe (augmentation, mixing, clipping, AdamW) on 50,000 random images of 32
px in device memory; seconds per update are the median of five times 20 updates after a warm-up, with the loss left on
the device. TFLOP/s: three forward passes per update, by PyTorch's counter, over the time."""
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16, compiled": {"precision": "bf16", "compile": True},
    "fp32, compiled": {"precision": "fp32", "compile": True},
}


def steps(settings: Settings) -> Sequence[Step]:
    if settings.small:
        return [
            Step(("vit_demo", 8, way), partial(_measured, "vit_demo", 8, way, settings)) for way in ("fp32", "bf16")
        ]
    return [
        Step((name, batch_size, way), partial(_measured, name, batch_size, way, settings))
        for batch_size in (96, 512)
        for name in ("vit_ti", "resnet50")
        for way in WAYS
    ]


def _measured(name: str, batch_size: int, way: str, settings: Settings) -> Row:
    torch.manual_seed(0)
    size, samples = (16, 64) if settings.small else (32, 50_000)
    own = TINY[name] if settings.small else {}
    network = models.build(name, classes=CLASSES, image_size=size, **own)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()(torch.zeros(2, 3, size, size))
    flops = int(counter.get_total_flops()) * batch_size // 2
    inputs = torch.randint(256, (samples, 3, size, size), dtype=torch.uint8)
    targets = torch.randint(CLASSES, (samples,))
    images = dataset.Images(inputs, targets, "random", CLASSES, size, (0.5,) * 3, (0.25,) * 3).to(settings.device)
    chosen = recipes.recipe(recipes.default_recipe(name), batch_size=batch_size, epochs=1000, **WAYS[way])
    chosen = with_memory_format(chosen, name, {"classes": CLASSES, "image_size": size, **own})
    updates = _updates(Trainer.of(network, images, chosen, seed=0))
    number, repeats = (1, 1) if settings.small else (20, 5)

    def run() -> None:
        for _ in islice(updates, number):
            pass

    peak = peak_gib(run, settings.device)
    took = typical(run, settings.device, repeats) / number
    outside = share_outside_kernels(run, settings.device)
    return {"seconds": took, "rate": batch_size / took, "tflops": 3 * flops / took / 1e12, "peak": peak,
            "outside": outside, "layout": chosen.memory_format}  # fmt: skip


def _updates(trainer: Trainer) -> Iterator[None]:
    for epoch in count(1):
        for _ in epoch_updates(trainer, epoch):
            yield


def tables(rows: Rows) -> str:
    columns = ("network", "batch size", "way", "layout", "ms / update", "images / s", "TFLOP/s", "peak GiB")
    return table((*columns, "outside kernels"), (
        (*key, one["layout"], f"{1e3 * one['seconds']:.2f}", f"{one['rate']:.0f}", f"{one['tflops']:.2f}",
         shown(one["peak"], "{:.2f}"), shown(one["outside"], "{:.0%}"))
        for key, one in rows.items()
    ))  # fmt: skip
