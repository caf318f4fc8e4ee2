"""The edge-of-stability studies of `reproduce`: full-batch training of a small network, followed by a monitor.

As in "Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability" (Cohen et al., ICLR 2021, arXiv
2103.00065; below EoS) and "Adaptive Gradient Methods at the Edge of Stability" (Cohen et al., arXiv 2207.14484; below
AEoS): a fully connected tanh network, half the squared error to one-hot targets, all images in one mini-batch. With
cross-entropy the sharpness falls again at the end, when the network is sure of every image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

SERIES = "series"  # the measurement of a study, where a claim needs it


@dataclass(frozen=True)
class Study:
    """A training whose sharpness is followed, and the optimiser it is about."""

    optimizer: str  # class of torch.optim
    arguments: Mapping[str, Any]  # of the optimiser
    sharpness: Literal["eigenvalue", "preconditioned"]  # what has a threshold
    steps: int  # updates
    every: int  # updates between two measurements
    images: int = 300
    width: int = 50  # of the two hidden layers

    @property
    def threshold(self) -> str:
        """Name of the stored threshold."""
        return "threshold" if self.sharpness == "eigenvalue" else "preconditioned_threshold"


STUDIES: Mapping[str, Study] = {
    "gradient descent": Study("SGD", {"lr": 0.01}, "eigenvalue", steps=3000, every=25),
    "full-batch Adam": Study("Adam", {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-7}, "preconditioned", 1000, every=10),
}


def ratios(study: Study, data: xr.Dataset) -> np.ndarray:
    """Sharpness / threshold at every measured step that has both, (step,)."""
    found = (data[study.sharpness].isel(rank=0) / data[study.threshold]).values
    return np.asarray(found[np.isfinite(found)])


def plateau(values: np.ndarray) -> np.ndarray:
    """Those ratios from the first that reaches 1 to the end of the training; empty if none does."""
    reached = np.flatnonzero(values >= 1)
    return values[reached[0] :] if reached.size else values[:0]


def within(study: str, data: xr.Dataset, margin: float) -> float:
    """By how much the mean ratio on the plateau lies within a margin around 1; NaN without a plateau."""
    values = plateau(ratios(STUDIES[study], data))
    return float(margin - abs(values.mean() - 1)) if values.size else math.nan


def rise(study: str, data: xr.Dataset) -> float:
    """ln(mean ratio on the plateau / first ratio); NaN without a plateau."""
    values = ratios(STUDIES[study], data)
    level = plateau(values)
    return float(np.log(level.mean() / values[0])) if level.size else math.nan


def table_of(studies: Mapping[str, Study], results: Sequence[Mapping[tuple[str, str], xr.Dataset]]) -> str:
    """The trainings as a Markdown table, with their ratios on the plateau over seeds; empty without any."""
    from landscape.cli.findings import half_width_over_seeds
    from landscape.results.rounding import plus_minus

    lines = [
        "",
        "Full-batch trainings of fully connected tanh networks with half the squared error, followed step by step:",
        "",
        "| training | optimiser | images | hidden layers | updates | first ratio to the threshold | mean ratio from "
        "where it first reaches 1, 95 % over seeds | per seed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, study in studies.items():
        series = [ratios(study, one[name, SERIES]) for one in results]
        means = [plateau(values).mean() if plateau(values).size else math.nan for values in series]
        arguments = ", ".join(f"{key} {value}" for key, value in study.arguments.items())
        each, first = (", ".join(f"{value:.3f}" for value in some) for some in (means, [v[0] for v in series]))
        lines.append(
            f"| {name} | {study.optimizer}, {arguments} | {study.images} | 2 x {study.width} | {study.steps} | {first} "
            f"| {plus_minus(float(np.mean(means)), half_width_over_seeds(means), 2)} | {each} |"
        )
    return "\n".join([*lines, ""]) if studies else ""


def followed(name: str, *, data: str, data_root: Path | None, seed: int, device: str, out: Path) -> xr.Dataset:
    """The series of a study with one seed: from the results file, or from a training that writes it there."""
    import torch

    from landscape.monitoring.monitor import Monitor
    from landscape.results import reader
    from landscape.subject import device as devices

    study, label = STUDIES[name], f"{name.replace(' ', '-')}-{Path(data).stem}-s{seed}"
    for group, stored in reader.find(out, "monitor") if out.exists() else ():
        if stored.attrs["label"] == label and study.steps in stored["step"].values:
            return reader.result(out, group)
    place = devices.device(device)
    inputs, targets = (part.to(place) for part in _samples(study, data, data_root))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _network(study, inputs[0].numel(), targets.shape[1]).to(place)
    optimizer = getattr(torch.optim, study.optimizer)(model.parameters(), **study.arguments)
    with Monitor(
        model, half_squared_error, (inputs, targets), every=study.every, out=out, label=label, optimizer=optimizer,
        noise=0, tol=1e-3, overhead=math.inf, seed=seed, overwrite=True, data=f"{Path(data).stem} train",
    ) as monitor:  # fmt: skip
        for _ in range(study.steps):
            optimizer.zero_grad()
            half_squared_error(model(inputs), targets).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            monitor.step()
        return monitor.data()


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared distance to the target of each sample, (N,)."""
    return 0.5 * (outputs - targets).square().sum(dim=1)


def _network(study: Study, pixels: int, classes: int) -> nn.Module:
    from torch import nn

    layers: list[nn.Module] = [nn.Flatten()]
    for before in (pixels, study.width):
        layers += [nn.Linear(before, study.width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(study.width, classes))


def _samples(study: Study, data: str, data_root: Path | None) -> tuple[Tensor, Tensor]:
    """The first training images of a class-balanced order, and one-hot targets."""
    from torch.nn.functional import one_hot

    from landscape import data as datasets
    from landscape.data.sampling import subset

    images = datasets.load(data, root=data_root, split="train")
    images = images.take(subset(images.targets.numpy(), study.images))
    return images.normalised(images.inputs), one_hot(images.targets, images.classes).float()
