"""Cost of the shared pass of `landscape features`, against a bare forward pass and against one pass per analysis.

    python benchmarks/features.py [--images 256] [--batch-size 128] [--threads 1] [--repeats 5] [--device cuda]

Random 32 x 32 images and untrained networks: a ResNet of 0.27 M parameters (three stages of three basic blocks, 16 to
64 channels) and ViT-Ti with patches of 2. Ratios of process time, with one thread: medians over rounds that run every
column once, so that other load affects all of them. Memory: the peak during one mini-batch above that before it, every
column in a fresh process. "Summaries" adds what is computed once of all images. "Notebook" is one pass per analysis,
keeping every feature map of the mini-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from measuring import clock_of, header, in_turns, on_device, parser, peak_of, row, untrained
from torch import Tensor

from landscape.api import configure_shared_pass
from landscape.layers.forward_hooks import feature_hooks, run_with_hooks
from landscape.layers.selection import layers_of
from landscape.subject.subject import Subject

NETWORKS = {"resnet 0.27 M": ("resnet_demo", {"blocks": (3, 3, 3), "width": 16}), "vit_ti": ("vit_ti", {})}
THREE = ("fourier", "variance", "similarity")
# column -> (probes, their options)
COLUMNS = {
    "fourier, diagonal": (("fourier",), {"spectrum": "diagonal"}),
    "variance": (("variance",), {}),
    "similarity": (("similarity",), {}),
    "geometry": (("geometry",), {}),
    "the three, diagonal": (THREE, {"spectrum": "diagonal"}),
    "the three, diagonal, and geometry": ((*THREE, "geometry"), {"spectrum": "diagonal"}),
    "the three, full spectrum": (THREE, {}),
    "the three and attention": ((*THREE, "attention"), {"spectra_images": 0}),
    "all, singular values of 4 images": ((*THREE, "attention"), {"spectra_images": 4}),
}

SUMMARISED = ("geometry", "the three, diagonal", "the three, diagonal, and geometry")  # measured with summaries too


def subject_of(network: str, images: int, batch_size: int, device: str = "cpu") -> Subject:
    name, arguments = NETWORKS[network]
    samples = batch_size * max(1, images // batch_size)
    sizes = {"size": 32, "samples": samples, "batch_size": batch_size}
    return untrained(name, classes=10, device=device, **sizes, **arguments)


def bare(subject: Subject) -> None:
    with torch.inference_mode():
        for i in range(len(subject.batches)):
            subject.model(subject.batch(i)[0])


def shared(subject: Subject, column: str) -> None:
    probes, options = COLUMNS[column]
    made, _ = configure_shared_pass(probes, "", options)
    for i in range(len(subject.batches)):
        run_with_hooks(subject, (i,), [probe.hooks(subject, (i,)) for probe in made])


def summarised(subject: Subject, column: str) -> None:
    """The shared pass, and then what each probe computes once from the stored numbers of all mini-batches."""
    probes, options = COLUMNS[column]
    made, _ = configure_shared_pass(probes, "", options)
    batches = range(len(subject.batches))
    found = [run_with_hooks(subject, (i,), [probe.hooks(subject, (i,)) for probe in made]) for i in batches]
    for position, probe in enumerate(made):
        plan, rows = probe.plan(subject), [values[position] for values in found]
        stored = {name: np.stack([np.asarray(row[name]) for row in rows]) for name in plan.quantities}
        labels = {name: values for name, (_, values) in plan.labels.items()}
        probe.reduce({**plan.axes, **labels, **stored, "done": np.ones(len(rows), dtype=np.uint8)})


def notebook(subject: Subject) -> None:
    """Fourier, variance and CKA as in notebooks: one pass each, all feature maps kept, then plain tensor code."""
    layers = layers_of(subject, ())
    for analysis in (_amplitudes, _variances, _kernels):
        for i in range(len(subject.batches)):
            kept: list[Tensor] = []
            with (
                torch.inference_mode(),
                feature_hooks(
                    subject.model, layers, lambda at, tensor, kept=kept: kept.append(layers[at].maps(tensor).clone())
                ),
            ):
                subject.model(subject.batch(i)[0])
                analysis(kept)


def _amplitudes(maps: Sequence[Tensor]) -> None:
    for z in maps:
        amplitude = torch.fft.fftshift(torch.log(torch.fft.fft2(z).abs() + 1e-6), dim=(-2, -1)).mean(dim=(0, 1))
        amplitude.diagonal()[len(amplitude) // 2 :]


def _variances(maps: Sequence[Tensor]) -> None:
    for z in maps:
        z.var(dim=(-2, -1)).mean()


def _kernels(maps: Sequence[Tensor]) -> None:
    kernels = [x.flatten(1) @ x.flatten(1).T for x in maps]
    for one in kernels:
        for other in kernels:
            (one * other).sum()


def ways() -> dict[str, Callable[[Subject], None]]:
    columns = {column: partial(shared, column=column) for column in COLUMNS}
    with_summaries = {f"{column}; summaries": partial(summarised, column=column) for column in SUMMARISED}
    return {"bare forward pass": bare, **columns, **with_summaries, "notebook way": notebook}


def fits(way: str, network: str) -> bool:
    return "vit" in network or "attention" not in COLUMNS.get(way.partition(";")[0], ((),))[0]


def measure(network: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds per column: the median over rounds of its ratio to the bare pass, times the bare pass's median."""
    subject = subject_of(network, arguments.images, arguments.batch_size, arguments.device)
    chosen = {name: partial(way, subject) for name, way in ways().items() if fits(name, network)}
    in_turns(chosen, 1)
    took = in_turns(chosen, arguments.repeats, clock_of(arguments.device))
    alone = took["bare forward pass"]
    ratios = {name: [own / one for own, one in zip(times, alone, strict=True)] for name, times in took.items()}
    return {name: statistics.median(alone) * statistics.median(of_way) for name, of_way in ratios.items()}


def peak(network: str, way: str, arguments: argparse.Namespace) -> float:
    """Peak MB during one mini-batch above the memory before it, in a fresh process."""
    command = [sys.executable, __file__, "--peak-of", network, way, "--batch-size", str(arguments.batch_size)]
    command += ["--device", arguments.device]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # return freed memory at once
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def own_peak(network: str, way: str, batch_size: int, device: str) -> float:
    torch.set_num_threads(1)
    subject = subject_of(network, batch_size, batch_size, device)
    for probes, options in COLUMNS.values():
        for probe in configure_shared_pass(probes, "", options)[0]:
            if "vit" in network or probe.name != "attention":
                probe.plan(subject)  # finds the layers, on two images
    small = Subject(subject.model, [(x[:4], y[:4]) for x, y in subject.batches])
    ways()[way](small)  # imports what is imported on use
    return peak_of(partial(ways()[way], subject), device)


def largest_map(network: str, batch_size: int) -> float:
    subject = subject_of(network, batch_size, batch_size)
    return max(float(np.prod(layer.shape)) for layer in layers_of(subject, ())) * batch_size * 4 / 2**20


def main() -> None:
    options = on_device(parser(__doc__, images=256, batch_size=128, threads=1, repeats=5))
    options.add_argument("--networks", nargs="*", default=list(NETWORKS))
    options.add_argument("--peak-of", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.peak_of:
        print(own_peak(*arguments.peak_of, arguments.batch_size, arguments.device))
        return
    torch.set_num_threads(arguments.threads)
    for network in arguments.networks:
        seconds = measure(network, arguments)
        alone = seconds["bare forward pass"]
        largest = largest_map(network, arguments.batch_size)
        size = subject_of(network, 1, 1).size / 1e6
        print(f"\n{network}: {size:.3g} M parameters, largest feature map {largest:.1f} MB\n")
        print(header("way", "s", "x bare", "peak MB", "maps above bare"))
        base = peak(network, "bare forward pass", arguments)
        for name, took in seconds.items():
            memory = peak(network, name, arguments)
            numbers = f"{took:.2f}", f"{took / alone:.2f}", f"{memory:.0f}", f"{(memory - base) / largest:.1f}"
            print(row(name, *numbers), flush=True)
    print(json.dumps({"torch": torch.__version__, **vars(arguments)}))


if __name__ == "__main__":
    main()
