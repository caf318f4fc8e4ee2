"""Measure the relative log amplitude of each layer's feature maps (Park & Kim 2022, Fig. 2a and Fig. 8)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.discovery.layer import Layer, chunks
from landscape.headline import Headline
from landscape.layers import forward_hooks, fourier, layer_patterns, selection
from landscape.layers.fourier import diagonal_frequencies, log_amplitude
from landscape.options import one_of
from landscape.probe import Plan, Probe, Quantity, Values
from landscape.statistics.means import MEMBER_ERROR, error_over_members, means_over_batches
from landscape.statistics.stored import unmeasured
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

OF_MEMBERS = {
    "delta_log_amplitude_member_se": Quantity(MEMBER_ERROR, "nats", ("layer", "bin"), over="member"),
    "high_frequency_member_se": Quantity(MEMBER_ERROR, "nats", ("layer",), over="member"),
}


@dataclass(frozen=True)
class Fourier(Probe):
    """DeltaLogA(f) = A(f, f) - A(0, 0), A the log amplitude averaged over images and channels AFTER the logarithm.

    Negative and falling where the layer's map is smooth (low-pass), relative to the layer's own zero frequency. One
    forward pass for all layers; sums per mini-batch are stored.
    """

    name: ClassVar[str] = "fourier"
    logits: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"park2022": {"frequencies": "park2022"}}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("shallowest", "high_frequency", {"layer": "first"}, column=11, title="high freq. first",
                 definition="relative log amplitude at the highest frequency, first layer"),
        Headline("deepest", "high_frequency", {"layer": "last"}, column=12, title="high freq. last",
                 definition="relative log amplitude at the highest frequency, last layer"),
    )  # fmt: skip

    layers: layer_patterns.LayerPatterns = ()
    spectrum: Annotated[
        Literal["full", "diagonal"], "full: store the mean spectrum at all frequencies; diagonal: only along it"
    ] = "full"
    frequencies: Annotated[Literal["true", "park2022"], "true DFT frequencies, or with the last bin called pi"] = "true"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))
        one_of("spectrum", self.spectrum, ("full", "diagonal"))
        one_of("frequencies", self.frequencies, ("true", "park2022"))

    def plan(self, subject: Subject) -> Plan:
        layers = selection.spatial_layers(subject, self.layers)
        bins = [diagonal_frequencies(*layer.grid) for layer in layers]
        count = max(map(len, bins))
        frequency = np.full((len(layers), count), np.nan)
        for row, values in zip(frequency, bins, strict=True):
            last = values[-1] if self.frequencies == "park2022" and values[-1] > 0 else 1.0
            row[: len(values)] = values / last
        size = selection.image_size(subject.batches[0][0])
        if size is None:
            raise ValueError("no input of this model is an image (N, C, H, W), which fourier compares the layers with")
        side = min(size)
        scale = np.array([min(layer.grid) / side for layer in layers])
        coarsest = min((s for s, values in zip(scale, bins, strict=True) if len(values) > 1), default=1.0)
        coarse = frequency[list(scale).index(coarsest)] if coarsest in scale else np.zeros(1)
        per_bin = ("layer", "bin")
        spectrum = self._spectrum_plan(layers)
        return Plan(
            over=forward_hooks.units_of(subject),
            axes={
                "layer": np.arange(len(layers)),
                "bin": np.arange(count),
                "common_frequency": coarse[np.isfinite(coarse)] * coarsest,
                **spectrum.axes,
            },
            labels={
                **selection.layer_labels(layers, "layer"),
                "frequency": (Quantity("frequency on the layer's own grid", "pi", per_bin), frequency),
                "scale": (Quantity("positions of the layer per input pixel, along one side", dims=("layer",)), scale),
                **spectrum.labels,
            },
            quantities={
                "samples": Quantity("images in the mini-batch"),
                "delta_sum": Quantity("sum over images of DeltaLogA", "nats", per_bin),
                "delta_square_sum": Quantity("sum over images of DeltaLogA squared", "nats^2", per_bin),
                **spectrum.quantities,
            },
            summaries={
                "delta_log_amplitude": Quantity("relative log amplitude", "nats", per_bin, error="images"),
                "delta_log_amplitude_common": Quantity(
                    "relative log amplitude at common physical frequencies", "nats", ("layer", "common_frequency")
                ),
                "high_frequency": Quantity(
                    "relative log amplitude at the highest frequency", "nats", ("layer",), error="images"
                ),
                **spectrum.summaries,
                **(OF_MEMBERS if subject.members else {}),
            },
            about={
                "bin": Quantity("frequency bin"),
                "common_frequency": Quantity("physical frequency", "pi per input pixel"),
                **spectrum.about,
            },
        )

    def hooks(self, subject: Subject, index: tuple[int, ...]) -> forward_hooks.FeatureHooks:
        i = index[0]
        layers = selection.spatial_layers(subject, self.layers)
        samples = subject.samples(i)
        plan = _plan(subject, self)

        def zeros(name: str) -> Tensor:
            shape = [len(plan.axis(dim)) for dim in plan.quantities[name].dims]
            return torch.full(shape, torch.nan, dtype=torch.float64, device=subject.device)

        sums = {name: zeros(name) for name in plan.quantities if name != "samples"}

        found: dict[int, list[tuple[Tensor, dict[str, Tensor]]]] = {}
        in_parts = [p for p, own in enumerate(layers) if self.spectrum != "full" and fourier.by_product(*own.grid)]

        def on_features(position: int, tensor: Tensor) -> None:
            found[position] = [self._transformed(chunk) for chunk in chunks(layers[position].maps(tensor))]

        def on_maps(position: int, part: forward_hooks.MapPart) -> None:
            amplitude = fourier.diagonal_of_varying(part.level, part.varying)
            found.setdefault(position, []).append((_relative(amplitude), {}))

        def values() -> Values:
            for position, measured in found.items():
                images = torch.cat([delta for delta, _ in measured])
                totals = {"delta_sum": images.sum(dim=0), "delta_square_sum": images.square().sum(dim=0)}
                totals |= {
                    name: torch.stack([more[name] for _, more in measured]).sum(dim=0) for name in measured[0][1]
                }
                for name, own in totals.items():
                    sums[name][position][tuple(slice(n) for n in own.shape)] = own
            return {"samples": samples, **forward_hooks.transferred(sums)}

        return forward_hooks.FeatureHooks(layers, on_features, values, on_maps=on_maps, in_parts=in_parts)

    def _transformed(self, maps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """DeltaLogA of each map (N, C, H, W) of one layer, (N, bins), and sums over the maps, by the FFT."""
        spectrum = fourier.half_spectrum(maps)
        delta, sums = _relative(fourier.diagonal(spectrum, maps.shape[-1])), dict[str, Tensor]()
        if self.spectrum == "full":
            sums["spectrum_sum"] = log_amplitude(spectrum).mean(dim=1).sum(dim=0, dtype=torch.float64)
        return delta, sums

    def _spectrum_plan(self, layers: Sequence[Layer]) -> Plan:
        if self.spectrum == "diagonal":
            return Plan(over={}, quantities={})
        rows, columns = (max(layer.grid[axis] for layer in layers) for axis in (0, 1))
        where = {}
        for name, axis, count in (("row", 0, rows), ("column", 1, columns)):
            frequency = np.full((len(layers), count), np.nan)
            for row, layer in zip(frequency, layers, strict=True):
                row[: layer.grid[axis]] = fourier.frequencies(layer.grid[axis])
            quantity = Quantity(f"frequency of a {name} of the layer's spectrum", "pi", ("layer", name))
            where[f"{name}_frequency"] = (quantity, frequency)
        total = "sum over images of the mean log amplitude over channels, frequencies from zero upward"
        mean = "mean log amplitude relative to that at frequency zero"
        return Plan(
            over={},
            axes={"row": np.arange(rows), "column": np.arange(columns), "half_column": np.arange(columns // 2 + 1)},
            labels=where,
            quantities={"spectrum_sum": Quantity(total, "nats", ("layer", "row", "half_column"))},
            summaries={"spectrum": Quantity(mean, "nats", ("layer", "row", "column"))},
            about={
                "row": Quantity("row of the spectrum, zero frequency in the middle"),
                "column": Quantity("column of the spectrum"),
                "half_column": Quantity("column from zero upward"),
            },
        )

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over all finished images, their standard errors, and the means at common physical frequencies."""
        mean, error = means_over_batches(data, ("delta",)).values()
        physical = data["frequency"] * data["scale"][:, None]
        common = np.full((len(mean), len(data["common_frequency"])), np.nan)
        last = np.isfinite(data["frequency"]).sum(axis=1) - 1
        for row, (at, values) in enumerate(zip(physical, mean, strict=True)):
            if last[row] > 0:
                common[row] = np.interp(data["common_frequency"], at[: last[row] + 1], values[: last[row] + 1])
        rows = np.arange(len(mean))
        found = {
            "delta_log_amplitude": mean,
            "delta_log_amplitude_se": error,
            "delta_log_amplitude_common": common,
            "high_frequency": np.where(last > 0, mean[rows, last], np.nan),
            "high_frequency_se": np.where(last > 0, error[rows, last], np.nan),
        }
        if data["done"].ndim > 1:
            spread = error_over_members(data, "delta_sum")
            found["delta_log_amplitude_member_se"] = spread
            found["high_frequency_member_se"] = np.where(last > 0, spread[rows, last], np.nan)
        if "spectrum_sum" in data:
            found["spectrum"] = _spectra(data)
        why, coarse = "its map has at most two rows or columns", data["name"][last == 0] if "name" in data else ()
        names = ("high_frequency", "delta_log_amplitude_common")
        return found | unmeasured((name, layer, why) for name in names for layer in coarse)


@once_per_weights
def _plan(subject: Subject, probe: Fourier) -> Plan:
    return probe.plan(subject)


def _relative(amplitude: Tensor) -> Tensor:
    """DeltaLogA of each map, (N, bins), from log amplitudes (N, C, bins)."""
    return (amplitude - amplitude[..., :1]).mean(dim=1, dtype=torch.float64)


def _spectra(data: Mapping[str, np.ndarray]) -> np.ndarray:
    """Mean spectra over all finished images, zero frequency in the centre and subtracted, (layer, row, column)."""
    found = np.full((len(data["layer"]), len(data["row"]), len(data["column"])), np.nan)
    done = data["done"] == 1
    if done.any():
        means = data["spectrum_sum"][done].sum(axis=0) / data["samples"][done].sum()
        sides = [np.isfinite(data[f"{name}_frequency"]).sum(axis=1) for name in ("row", "column")]
        for layer, (mean, height, width) in enumerate(zip(means, *sides, strict=True)):
            full = fourier.full_spectrum(mean[:height, : width // 2 + 1], width)
            found[layer, :height, :width] = full - mean[0, 0]
    return found
