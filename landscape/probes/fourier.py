"""Relative log amplitude of Fourier-transformed feature maps, per layer (Park & Kim 2022, Fig. 2a and Fig. 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.features import Listener, one_pass
from landscape.layers import labels, spatial_layers
from landscape.linalg.fourier import diagonal_frequencies, relative_log_amplitude
from landscape.patterns import expanded
from landscape.probe import Plan, Quantity, Unit, Values, one_of
from landscape.subject import Subject


@dataclass(frozen=True)
class Fourier:
    """DeltaLogA(f) = A(f, f) - A(0, 0), A the log amplitude averaged over images and channels AFTER the logarithm.

    Negative and falling: the layer's map is smooth (a low-pass). One forward pass for all layers; per-batch sums are
    stored, so that error bars and resuming are free. The reference of each layer is its own zero frequency.
    """

    name: ClassVar[str] = "fourier"
    uses: ClassVar[tuple[str, ...]] = ()
    split: ClassVar[str] = "test"
    batch_size: ClassVar[int] = 128
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"park2022": {"frequencies": "park2022"}}

    layers: Annotated[tuple[str, ...], "REGEX[:KIND] or file.toml: modules instead of the layers found"] = ()
    frequencies: Annotated[Literal["true", "park2022"], "true DFT frequencies, or the last bin called pi"] = "true"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", expanded(self.layers))
        one_of("frequencies", self.frequencies, ("true", "park2022"))

    def plan(self, subject: Subject) -> Plan:
        found = spatial_layers(subject, self.layers)
        bins = [diagonal_frequencies(*layer.grid) for layer in found]
        count = max(map(len, bins))
        frequency = np.full((len(found), count), np.nan)
        for row, values in zip(frequency, bins, strict=True):
            last = values[-1] if self.frequencies == "park2022" and values[-1] > 0 else 1.0
            row[: len(values)] = values / last
        side = min(subject.batches[0][0].shape[-2:])
        scale = np.array([min(layer.grid) / side for layer in found])
        coarsest = min((s for s, values in zip(scale, bins, strict=True) if len(values) > 1), default=1.0)
        coarse = frequency[list(scale).index(coarsest)] if coarsest in scale else np.zeros(1)
        per_bin = ("layer", "bin")
        return Plan(
            over={"batch": np.arange(len(subject.batches))},
            axes={
                "layer": np.arange(len(found)),
                "bin": np.arange(count),
                "common_frequency": coarse[np.isfinite(coarse)] * coarsest,
            },
            labels={
                **labels(found, "layer"),
                "frequency": (Quantity("frequency on the layer's own grid", "pi", per_bin), frequency),
                "scale": (Quantity("positions of the layer per input pixel, along one side", dims=("layer",)), scale),
            },
            quantities={
                "samples": Quantity("images in the mini-batch"),
                "delta_sum": Quantity("sum over images of DeltaLogA", "nats", per_bin),
                "delta_square_sum": Quantity("sum over images of DeltaLogA squared", "nats^2", per_bin),
            },
            summaries={
                "delta_log_amplitude": Quantity("relative log amplitude", "nats", per_bin),
                "delta_log_amplitude_se": Quantity("its standard error over images", "nats", per_bin),
                "delta_log_amplitude_common": Quantity(
                    "relative log amplitude at common physical frequencies", "nats", ("layer", "common_frequency")
                ),
                "high_frequency": Quantity("relative log amplitude at the highest frequency", "nats", ("layer",)),
                "high_frequency_se": Quantity("its standard error over images", "nats", ("layer",)),
            },
            about={
                "batch": Quantity("mini-batch"),
                "layer": Quantity("layer"),
                "bin": Quantity("frequency bin"),
                "common_frequency": Quantity("physical frequency", "pi per input pixel"),
            },
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (i,) = unit.index
        return one_pass(subject, i, [self.listener(subject, i)])[0]

    def listener(self, subject: Subject, i: int) -> Listener:
        """What listens to mini-batch i."""
        found = spatial_layers(subject, self.layers)
        samples = len(subject.batches[i][1])
        count = max(len(diagonal_frequencies(*layer.grid)) for layer in found)
        sums = torch.full((2, len(found), count), torch.nan, dtype=torch.float64, device=subject.device)

        def receive(position: int, tensor: Tensor) -> None:
            delta = relative_log_amplitude(found[position].maps(tensor))  # (N, bins)
            sums[0, position, : delta.shape[1]] = delta.sum(dim=0)
            sums[1, position, : delta.shape[1]] = delta.square().sum(dim=0)

        def values() -> Values:
            total, squares = sums.cpu().numpy()
            return {"samples": samples, "delta_sum": total, "delta_square_sum": squares}

        return Listener(found, receive, values)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over all finished images, their errors, and the view at common frequencies."""
        mean, error = mean_and_error(data, "delta_sum", "delta_square_sum")
        physical = data["frequency"] * data["scale"][:, None]
        common = np.full((len(mean), len(data["common_frequency"])), np.nan)
        last = np.isfinite(data["frequency"]).sum(axis=1) - 1
        for row, (at, values) in enumerate(zip(physical, mean, strict=True)):
            if last[row] > 0:
                common[row] = np.interp(data["common_frequency"], at[: last[row] + 1], values[: last[row] + 1])
        rows = np.arange(len(mean))
        return {
            "delta_log_amplitude": mean,
            "delta_log_amplitude_se": error,
            "delta_log_amplitude_common": common,
            "high_frequency": np.where(last > 0, mean[rows, last], np.nan),
            "high_frequency_se": np.where(last > 0, error[rows, last], np.nan),
        }


def mean_and_error(data: Mapping[str, np.ndarray], total: str, squares: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean over images and its standard error from per-batch sums (batch, ...) and `samples` (batch,)."""
    done = data["done"] == 1
    n = data["samples"][done].sum()
    if n == 0:
        empty = np.full(data[total].shape[1:], np.nan)
        return empty, empty
    mean = data[total][done].sum(axis=0) / n
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.clip(data[squares][done].sum(axis=0) - n * mean**2, 0.0, None) / (n - 1)
    return mean, np.sqrt(variance / n)
