"""Follow full-batch trainings of small networks by a monitor: those of `reproduce` at the edge of stability.

As in "Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability" (Cohen et al., ICLR 2021, arXiv
2103.00065; below EoS) and "Adaptive Gradient Methods at the Edge of Stability" (Cohen et al., arXiv 2207.14484; below
AEoS): a fully connected tanh network, half the squared error to one-hot targets, all images in one mini-batch. With
cross-entropy the sharpness falls again at the end, when the network is sure of every image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from landscape.studies import claims, study

if TYPE_CHECKING:
    from torch import Tensor, nn

SERIES = "series"  # the measurement of such a training, where a claim needs it
THRESHOLDS = {"eigenvalue": "threshold", "preconditioned": "preconditioned_threshold"}  # by what has one


def ratios(data: xr.Dataset, sharpness: str) -> np.ndarray:
    """Sharpness / threshold at every measured step that has both, (step,)."""
    found = (data[sharpness].isel(rank=0) / data[THRESHOLDS[sharpness]]).values
    return np.asarray(found[np.isfinite(found)])


def plateau(values: np.ndarray) -> np.ndarray:
    """Those ratios from the first that reaches 1 to the end of the training; empty if none does."""
    reached = np.flatnonzero(values >= 1)
    return values[reached[0] :] if reached.size else values[:0]


def table_of(trainings: Mapping[str, claims.FullBatch], seeds: Sequence[study.Results]) -> str:
    """The trainings as a Markdown table, with their ratios on the plateau over seeds; empty without any."""
    if not trainings:
        return ""
    head = (
        "training", "optimiser", "images", "hidden layers", "updates", "first ratio to the threshold",
        "mean ratio from where it first reaches 1, 95 % over seeds", "per seed",
    )  # fmt: skip
    rows = []
    for name, one in trainings.items():
        series = [ratios(results[name, SERIES], one.sharpness) for results in seeds]
        means = [plateau(values).mean() if plateau(values).size else math.nan for values in series]
        arguments = ", ".join(f"{key} {value}" for key, value in one.arguments.items())
        each, first = (", ".join(f"{value:.3f}" for value in some) for some in (means, [v[0] for v in series]))
        about = (name, f"{one.optimizer}, {arguments}", one.images, f"2 x {one.width}", one.steps)
        rows.append((*about, first, claims.over_seeds(means), each))
    title = "Full-batch trainings of fully connected tanh networks with half the squared error, followed step by step:"
    return "\n".join(["", title, "", *claims.markdown(head, rows), ""])


def followed(
    name: str, training: claims.FullBatch, *, data: str, data_root: Path | None, seed: int, device: str, out: Path
) -> xr.Dataset:
    """The series of a training with one seed: from the results file, or from a training that writes it there."""
    import torch

    from landscape.monitoring.monitor import Monitor
    from landscape.results import reader
    from landscape.subject import device as devices

    label = f"{name.replace(' ', '-')}-{Path(data).stem}-s{seed}"
    for group, stored in reader.find(out, "monitor") if out.exists() else ():
        if stored.attrs["label"] == label and training.steps in stored["step"].values:
            return reader.result(out, group)
    place = devices.device(device)
    inputs, targets = (part.to(place) for part in _samples(training, data, data_root))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _network(training, inputs[0].numel(), targets.shape[1]).to(place)
    optimizer = getattr(torch.optim, training.optimizer)(model.parameters(), **training.arguments)
    with Monitor(
        model, half_squared_error, (inputs, targets), every=training.every, out=out, label=label, optimizer=optimizer,
        noise=0, tol=1e-3, overhead=math.inf, seed=seed, overwrite=True, data=f"{Path(data).stem} train",
    ) as monitor:  # fmt: skip
        for _ in range(training.steps):
            optimizer.zero_grad()
            half_squared_error(model(inputs), targets).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            monitor.step()
        return monitor.data()


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared distance to the target of each sample, (N,)."""
    return 0.5 * (outputs - targets).square().sum(dim=1)


def _network(training: claims.FullBatch, pixels: int, classes: int) -> nn.Module:
    from torch import nn

    layers: list[nn.Module] = [nn.Flatten()]
    for before in (pixels, training.width):
        layers += [nn.Linear(before, training.width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(training.width, classes))


def _samples(training: claims.FullBatch, data: str, data_root: Path | None) -> tuple[Tensor, Tensor]:
    """The first training images of a class-balanced order, and one-hot targets."""
    from torch.nn.functional import one_hot

    from landscape import data as datasets
    from landscape.data.sampling import subset

    images = datasets.load(data, root=data_root, split="train")
    images = images.take(subset(images.targets.numpy(), training.images))
    return images.normalised(images.inputs), one_hot(images.targets, images.classes).float()
