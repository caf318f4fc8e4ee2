"""A results file of a study of several networks, written by `results.writer.Writer` from made-up numbers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from analytic import attention_net, tanh_net

from landscape.data import corruptions
from landscape.probe import Plan, Quantity, Unit, Values
from landscape.probes import PROBES, probe_class
from landscape.probes.ensemble import Ensemble
from landscape.probes.flatness import Flatness
from landscape.probes.sensitivity import Sensitivity
from landscape.probes.step import Step
from landscape.results import basins, corruption_summary
from landscape.results.run_key import RunKey
from landscape.results.writer import Writer
from landscape.run import reduce_of
from landscape.subject import sample_statistics
from landscape.subject.losses import MEANINGS, cross_entropy
from landscape.weight_space import barriers

Measure = Callable[[Unit], Values]
PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "surface": {"seed": 0},
    "hessian": {"seed": 0},
    "noise": {"eps": "0.7"},
    "ensemble": {"draws": 20, "orders": 2},
}


@dataclass(frozen=True)
class Network:
    """What a made-up network is called and made of: kind and stage of every layer."""

    label: str
    model: str
    kinds: tuple[str, ...]
    stages: tuple[int, ...]
    width: float = 1.0  # of its valley

    @property
    def names(self) -> list[str]:
        return [f"stages.{s}.{i}.{kind}" for i, (s, kind) in enumerate(zip(self.stages, self.kinds, strict=True))]


def transformer(label: str, model: str = "vit_ti", depth: int = 12) -> Network:
    return Network(label, model, ("stem", *(("msa", "mlp") * depth)), (0,) * (2 * depth + 1), 0.7)


def convolutional(label: str, model: str = "resnet50", blocks: Sequence[int] = (3, 4, 6, 3)) -> Network:
    stages = [stage for stage, count in enumerate(blocks, start=1) for _ in range(count)]
    return Network(label, model, ("stem", *(("conv",) * len(stages))), (0, *stages), 1.5)


def hybrid(label: str, model: str = "alternet50") -> Network:
    kinds = ("conv",) * 3 + ("conv",) * 3 + ("msa",) + ("conv",) * 5 + ("msa",) + ("conv", "msa") * 2
    return Network(label, model, ("stem", *kinds), (0, *(1,) * 3, *(2,) * 4, *(3,) * 6, *(4,) * 4), 1.0)


NETWORKS = (
    transformer("vit_ti-cifar100"),
    convolutional("resnet50-cifar100"),
    hybrid("alternet50-cifar100"),
)
ALL = (*PROBES, "monitor")  # what figures are drawn of


def write(
    path: Path, networks: Sequence[Network] = NETWORKS, *, probes: Iterable[str] = ALL, share: float = 1.0
) -> Path:
    """Store every probe of every network, the first `share` of its units finished."""
    for number, network in enumerate(networks):
        for probe in probes:
            plan, measure = MADE_UP[probe](network) if probe in MADE_UP else measured(probe)
            parameters = PARAMETERS.get(probe, {}) if probe in MADE_UP else probe_class(probe).smallest
            attributes: dict[str, Any] = {
                "parameters": json.dumps(parameters),
                "model": network.model,
                "data": "cifar100",
                "batch_size": 128,
                "samples": 1024,
                "epoch": 300.0,
                "checkpoint_sha256": f"{number:064x}",
                "protocol": "cifar100 test, 1024 samples, batch size 128, no augmentation, weight decay 0, seed 0",
            }
            place = ALL.index(probe)
            key = RunKey(probe, network.label, f"{number:05x}{place:05x}", plan, attributes)
            with Writer(path, key, reduce_of=reduce_of) as writer:
                for unit in first(list(plan.units()), share):
                    writer.write(unit, measure(unit))
    return path


def measured(name: str) -> tuple[Plan, Measure]:
    """A probe without made-up numbers, measured on a tiny network."""
    probe, subject = probe_class(name)(**probe_class(name).smallest), attention_net()
    return probe.plan(subject), partial(probe.measure, subject)


def first(units: list[Unit], share: float) -> Iterator[Unit]:
    yield from units[: math.ceil(share * len(units))]


def labels(network: Network, axis: str) -> dict[str, tuple[Quantity, np.ndarray]]:
    n = len(network.kinds)
    reduces = np.r_[0, np.diff(network.stages) > 0] * (np.array(network.kinds) != "stem")
    reduces[1] = 0  # the first stage keeps the stem's map
    values = {"name": network.names, "kind": network.kinds, "stage": network.stages, "depth": np.arange(n) / (n - 1)}
    return {key: (Quantity(key, dims=(axis,)), np.array(value)) for key, value in values.items()} | {
        "reduces": (Quantity("1 where the map gets smaller", dims=(axis,)), reduces.astype(int))
    }


def quantities(dims: tuple[str, ...], *names: str) -> dict[str, Quantity]:
    return {name: Quantity(name.replace("_", " "), dims=dims) for name in names}


def scores(*values: Any) -> dict[str, tuple[Quantity, np.ndarray]]:
    """Labels of losses and accuracies on two data sets."""
    names = ("score_data", "score_kind", "score_units", "score_centre", "score_margin")
    text = (("prose", "prose", "code", "code"), ("loss", "accuracy") * 2, ("nats", "1") * 2)
    return {n: (Quantity(n, dims=("score",)), np.array(v)) for n, v in zip(names, (*text, *values), strict=True)}


CENTRES, MARGINS = (0.5, 0.9, 0.6, 0.8), (0.1, 0.05, 0.2, 0.05)


def worsened(rise: float) -> Values:
    """The scores of a point where the loss is higher by so much."""
    worse = rise * np.array([1.0, 0.2, 2.0, 0.4])
    value = np.array(CENTRES) + worse * np.array([1, -1, 1, -1])
    return {"score_value": value, "score_worse": worse, "score_se": np.full(4, 0.02), "score_worse_se": 0.1 * worse}


def surface(network: Network) -> tuple[Plan, Measure]:
    at = np.linspace(-1, 1, 21)
    plan = Plan(
        over={"x": at, "y": at},
        quantities=quantities((), "loss", "loss_se", "rise_se", "l2", "accuracy", "objective") | basins.MEASURED,
        facts={"weight_decay": 0.05},
        axes={"radius": np.array([0.1, 0.25, 0.5, 1.0]), "snapshot": np.arange(4), "score": np.arange(4),
              "distance": basins.distances(at, at)},
        labels={
            **scores(CENTRES, MARGINS),
            "path_x": (Quantity("x", dims=("snapshot",)), np.array([0.8, 0.6, 0.1, 0.0])),
            "path_y": (Quantity("y", dims=("snapshot",)), np.array([-0.5, 0.5, 0.3, 0.0])),
            "path_name": (Quantity("snapshot", dims=("snapshot",)), np.array([f"epoch {t}" for t in range(4)])),
        },
        summaries={**quantities(("radius",), "height", "height_se"), **quantities((), "non_finite"),
                   **basins.summaries("filter norm", plane=True)},
        about={"x": Quantity("first random direction", "filter norm"),
               "y": Quantity("second random direction", "filter norm")},
    )  # fmt: skip

    def measure(unit: Unit) -> Values:
        x, y = unit.at["x"], unit.at["y"]
        rise = network.width * (x**2 + 2 * y**2 + 0.3 * np.sin(3 * x) * y)
        loss = 0.2 + 6 * np.tanh(rise) + (np.inf if network.width > 1.4 and x * y > 0.8 else 0.0)
        l2 = 40 + x**2 + y**2
        return {"loss": loss, "loss_se": 0.01, "rise_se": 0.01 * math.sqrt(x**2 + y**2), "l2": l2,
                "accuracy": 0.9 * np.exp(-rise), "objective": loss + l2 / 20, **worsened(loss - 0.2)}  # fmt: skip

    return plan, measure


def line(network: Network) -> tuple[Plan, Measure]:
    per_line = ("direction",)
    barriers = ("barrier", "barrier_se", "barrier_at", "accuracy_barrier", "accuracy_barrier_se")
    errors = ("loss_se", "accuracy_se", "excess_se", "accuracy_deficit_se")
    plan = Plan(
        over={"direction": np.arange(2), "t": np.linspace(0, 1, 9)},
        axes={"score": np.arange(4), "side": np.array(basins.SIDES)},
        quantities=quantities((), "loss", "accuracy", "l2", "excess", "accuracy_deficit", *errors) | basins.MEASURED,
        labels={
            "name": (Quantity("direction", dims=per_line), np.array(["towards a", "towards b"])),
            **scores(CENTRES, MARGINS),
        },
        summaries={
            **quantities(per_line, *barriers),
            **quantities(("t",), "loss_mean", "loss_spread"),
            **basins.summaries("share of the way", plane=False),
        },
        about={"t": Quantity("position on the line", "share of the way")},
        facts={"along": "checkpoints"},
    )

    def measure(unit: Unit) -> Values:
        (k, _), t = unit.index, unit.at["t"]
        rise = (1 + k) * network.width * t * (1 - t)
        return {"loss": 0.5 + t + rise, "accuracy": 0.9 - 0.1 * t - rise / 5, "l2": 40.0, "excess": rise,
                "accuracy_deficit": rise / 5, **dict.fromkeys(errors, 0.02), **worsened(t + rise)}  # fmt: skip

    return plan, measure


def align(network: Network) -> tuple[Plan, Measure]:
    names = ("as they are", "as they are, batch norm recomputed", "aligned", "aligned, batch norm recomputed")
    plan = Plan(
        over={"curve": np.arange(4), "t": np.linspace(0, 1, 5)},
        quantities={**barriers.means(MEANINGS[cross_entropy]), **barriers.paired(MEANINGS[cross_entropy])},
        labels={"name": (Quantity("curve", dims=("curve",)), np.array(names))},
        summaries=barriers.summaries(MEANINGS[cross_entropy], ("curve",)),
        facts={"other": "final-2", "similarity": 0.5},
    )

    def measure(unit: Unit) -> Values:
        return between(unit.at["t"], network.width * (4 - unit.index[0]))

    return plan, measure


def between(t: float, height: float) -> Values:
    rise = height * t * (1 - t)
    return {"loss": 0.5 + t + rise, "accuracy": 0.9 - 0.1 * t - rise / 5, "excess": rise, "accuracy_deficit": rise / 5,
            **dict.fromkeys(("loss_se", "accuracy_se", "excess_se", "accuracy_deficit_se"), 0.02)}  # fmt: skip


def all_barriers(network: Network) -> tuple[Plan, Measure]:
    names, first, second = ("as they are", "aligned"), np.array([0.0, 0.0, 1.0]), np.array([1.0, 2.0, 2.0])
    plan = Plan(
        over={"curve": np.arange(2), "pair": np.arange(3), "t": np.linspace(0, 1, 5)},
        axes={"checkpoint": np.arange(3), "other": np.arange(3)},
        quantities={**barriers.means(MEANINGS[cross_entropy]), **barriers.paired(MEANINGS[cross_entropy])},
        labels={
            "name": (Quantity("curve", dims=("curve",)), np.array(names)),
            "checkpoint_name": (Quantity("checkpoint", dims=("checkpoint",)), np.array(["run-1", "run-2", "run-3"])),
            "first": (Quantity("checkpoint at t = 0", dims=("pair",)), first),
            "second": (Quantity("checkpoint at t = 1", dims=("pair",)), second),
        },
        summaries={
            **barriers.summaries(MEANINGS[cross_entropy], ("curve", "pair")),
            **quantities(
                ("curve", "checkpoint", "other"), "barrier_matrix", "barrier_matrix_se", "accuracy_barrier_matrix",
                "accuracy_barrier_matrix_se",
            ),
        },
    )  # fmt: skip

    def measure(unit: Unit) -> Values:
        return between(unit.at["t"], network.width * (1 + unit.index[1]) / (1 + unit.index[0]))

    return plan, measure


def trajectory(network: Network) -> tuple[Plan, Measure]:
    epochs = np.array([0.0, 5.0, 50.0, 100.0, 150.0, 200.0, 250.0, 300.0])
    time = np.linspace(0, 1, len(epochs))
    random = np.random.default_rng(len(network.kinds))
    path = np.cumsum(random.normal(size=(len(epochs), 40)), axis=0) * 0.6 + time[:, None] * np.arange(40) / 10
    path -= path[-1]
    plan = Plan(
        over={"snapshot": np.arange(len(epochs))},
        axes={"other": np.arange(len(epochs)), "component": np.arange(2)},
        quantities={
            **quantities(("other",), "gram"),
            **quantities((), "loss", "loss_se", "accuracy", "plane_loss", "plane_loss_se"),
        },
        labels={"epoch": (Quantity("epoch", dims=("snapshot",)), epochs)},
        summaries={
            **quantities(("snapshot",), "radius", "angle", "pc1", "pc2", "off_plane"),
            **quantities(("component",), "explained_variance"),
        },
    )

    def measure(unit: Unit) -> Values:
        (t,) = unit.index
        return {"gram": path @ path[t], "loss": 2 - time[t], "loss_se": 0.01, "accuracy": 0.8 * time[t],
                "plane_loss": 2.4 - 1.4 * time[t], "plane_loss_se": 0.02}  # fmt: skip

    return plan, measure


def hessian(network: Network) -> tuple[Plan, Measure]:
    rank = ("rank",)
    ends = ("largest", "smallest", "largest_residual", "smallest_residual")
    plan = Plan(
        over={"batch": np.arange(40)},
        axes={"rank": np.arange(5), "node": np.arange(20)},
        quantities={
            **quantities(rank, "eigenvalue", "residual", "converged"),
            **quantities(("node",), "nodes", "weights"),
            **quantities((), *ends, "loss", "matvecs"),
        },
        summaries=quantities((), "nep", "nep_low", "nep_high", "ape", "ape_low", "ape_high"),
    )

    def measure(unit: Unit) -> Values:
        random = np.random.default_rng(unit.seed(len(network.kinds)))
        values = 60 / network.width * random.lognormal(0.3 * network.width, 0.8, 5)
        negative = random.random(5) < 0.25 / network.width**2
        values = np.sort(np.where(negative, -0.3 * values, values))[::-1]
        nodes, weights = np.full((2, 20), np.nan)
        nodes[:14] = np.sort(np.r_[values, 0.01 * random.standard_normal(9)])
        weights[:14] = np.exp(-np.abs(nodes[:14])) / np.exp(-np.abs(nodes[:14])).sum()
        return {"eigenvalue": values, "residual": 1e-4 * values, "converged": np.ones(5), "matvecs": 14,
                "loss": 1 + 0.01 * values.max(), "nodes": nodes, "weights": weights,
                **dict.fromkeys(ends, 1.0)}  # fmt: skip

    return plan, measure


def fourier(network: Network) -> tuple[Plan, Measure]:
    n = len(network.kinds)
    sides = [32 >> max(0, stage - 1) for stage in network.stages] if max(network.stages) else [16] * n
    frequency = np.full((n, max(sides) // 2), np.nan)
    for row, side in zip(frequency, sides, strict=True):
        row[: side // 2] = np.arange(side // 2) * 2 / side
    per_bin, most = ("layer", "bin"), max(sides)
    grid = np.full((n, most), np.nan)  # frequencies of rows and of columns
    for row, side in zip(grid, sides, strict=True):
        row[:side] = (np.arange(side) - side // 2) * 2 / side
    plan = Plan(
        over={"batch": np.arange(8)},
        axes={
            "layer": np.arange(n),
            "bin": np.arange(frequency.shape[1]),
            "common_frequency": np.arange(4) / 16,
            "row": np.arange(most),
            "column": np.arange(most),
            "half_column": np.arange(most // 2 + 1),
        },
        labels={
            **labels(network, "layer"),
            "row_frequency": (Quantity("frequency of a row", "pi", ("layer", "row")), grid),
            "column_frequency": (Quantity("frequency of a column", "pi", ("layer", "column")), grid),
            "frequency": (Quantity("frequency", "pi", per_bin), frequency),
            "scale": (Quantity("scale", dims=("layer",)), np.array(sides) / 32),
        },
        quantities={
            **quantities((), "samples"),
            **quantities(per_bin, "delta_sum", "delta_square_sum"),
            **quantities(("layer", "row", "half_column"), "spectrum_sum"),
        },
        summaries={
            **quantities(("layer", "row", "column"), "spectrum"),
            **quantities(per_bin, "delta_log_amplitude", "delta_log_amplitude_se"),
            **quantities(("layer", "common_frequency"), "delta_log_amplitude_common"),
            **quantities(("layer",), "high_frequency", "high_frequency_se"),
        },
    )
    steps = np.array([{"msa": -0.9, "mlp": 0.5, "conv": 0.15, "stem": 0.0}[kind] for kind in network.kinds])

    def measure(unit: Unit) -> Values:
        level = -2.5 + np.cumsum(steps) / network.width
        delta = level[:, None] * np.sqrt(frequency)
        spectrum = np.full((n, most, most // 2 + 1), np.nan)
        for values, height, side in zip(spectrum, level, sides, strict=True):
            down, across = np.fft.fftfreq(side) * 2, np.arange(side // 2 + 1) * 2 / side
            values[:side, : side // 2 + 1] = 128 * height * np.maximum(np.abs(down)[:, None], across) ** 0.5
        return {
            "samples": 128,
            "delta_sum": 128 * delta,
            "delta_square_sum": 128 * (delta**2 + 0.8),
            "spectrum_sum": spectrum,
        }

    return plan, measure


def variance(network: Network) -> tuple[Plan, Measure]:
    n = len(network.kinds)
    plan = Plan(
        over={"batch": np.arange(8)},
        axes={"layer": np.arange(n)},
        labels=labels(network, "layer"),
        quantities={
            **quantities((), "samples"),
            **quantities(("layer",), "variance_sum", "variance_square_sum", "square_sum"),
        },
        summaries=quantities(("layer",), "variance", "variance_se", "variance_normalised"),
    )
    steps = np.array([{"msa": -0.35, "mlp": 0.45, "conv": 0.2, "stem": 0.0}[kind] for kind in network.kinds])

    def measure(unit: Unit) -> Values:
        level = 0.1 * np.exp(np.cumsum(steps))
        level[-1] = np.nan if network.model.startswith("vit") else level[-1]  # a layer without a map
        return {"samples": 128, "variance_sum": 128 * level, "variance_square_sum": 200 * level**2,
                "square_sum": 256 * level}  # fmt: skip

    return plan, measure


def monitor(network: Network) -> tuple[Plan, Measure]:
    """A run that rises to its threshold, with the units of a fixed number of steps."""
    names = "threshold", "preconditioned_threshold", "learning_rate", "loss", "gradient_norm", "warm_error", "distance"
    noise = "noise_scale", "noise_scale_se", "gradient_variance", "gradient_squared"
    ranked = "eigenvalue", "residual", "converged"
    also = "preconditioned", "preconditioned_residual", "preconditioned_converged"
    plan = Plan(
        over={"step": np.arange(0, 4000, 50)},
        axes={"rank": np.arange(2)},
        quantities={**quantities((), *names, *noise), **quantities(("rank",), *ranked, *also)},
        about={"step": Quantity("step", "updates"), "rank": Quantity("rank")},
    )

    def measure(unit: Unit) -> Values:
        (i,), at = unit.index, float(unit.at["step"])
        sharpness = 40 * network.width * (1 - math.exp(-at / 800)) * (1 + 0.05 * math.sin(i))
        both = np.array([sharpness, 0.6 * sharpness])
        squared = 0.02 + 0.05 * math.sin(1.7 * i) ** 2
        return {
            "threshold": 40.0 * network.width, "preconditioned_threshold": 38.0 / 1e-3, "learning_rate": 1e-3,
            "loss": 2 * math.exp(-at / 1000), "gradient_norm": 0.3, "warm_error": 1e-4, "distance": at**0.5,
            "noise_scale": network.width * 3.0 / squared, "noise_scale_se": 1.0 / squared,
            "gradient_variance": network.width * 3.0,
            "gradient_squared": squared, "eigenvalue": both, "residual": 1e-3 * both,
            "converged": [float(i % 9 > 0), 1.0], "preconditioned": 900 * both,
            "preconditioned_residual": both, "preconditioned_converged": [1.0, 1.0],
        }  # fmt: skip

    return plan, measure


def lesion(network: Network) -> tuple[Plan, Measure]:
    units = len(network.kinds)
    plan = Plan(
        over={"batch": np.arange(8), "unit": np.arange(units)},
        labels={
            **labels(network, "unit"),
            "rule": (Quantity("what was done", dims=("unit",)), np.array(["zero"] * units)),
        },
        quantities=sample_statistics.quantities(),
        summaries=sample_statistics.summaries("unit"),
        facts={"intact_loss": 0.9, "intact_accuracy": 0.75},
    )

    def measure(unit: Unit) -> Values:
        _, i = unit.index
        drop = 0.25 * math.exp(-0.3 * i) + 0.03 * (1 + math.sin(3 * i)) - 0.005
        return {"samples": 128, "accuracy_drop_sum": 128 * drop, "accuracy_drop_square_sum": 128 * drop,
                "loss_increase_sum": 512 * drop, "loss_increase_square_sum": 2560 * drop}  # fmt: skip

    return plan, measure


def sensitivity(network: Network) -> tuple[Plan, Measure]:
    plan = Sensitivity(bits="8,4,2", vectors=2).plan(attention_net())
    plan = replace(plan, over={**plan.over, "batch": np.arange(4)})
    units = len(plan.axes["unit"])

    def measure(unit: Unit) -> Values:
        batch, trial, place = unit.index
        if trial >= len(plan.axes["setting"]):
            form = 4.0 * (1.0 + 0.2 * math.sin(batch + trial)) * math.exp(-0.5 * (place - 1)) * network.width
            unknown = dict.fromkeys(plan.quantities, math.nan)
            return {**unknown, "part_loss_increase": np.full(8, math.nan), "samples": 64, "quadratic_form": form}
        wave = 1.3 * units if place == 0 else 1.0 + math.sin(3 * place)
        rise = 1e-4 * 30.0**trial * (wave - 0.05)
        sums = {f"{name}_sum": 64 * rise * scale for name, scale in (("accuracy_drop", 0.1), ("loss_increase", 1.0))}
        squares = {name.replace("_sum", "_square_sum"): 64 * (3 * value / 64) ** 2 for name, value in sums.items()}
        parts = 8 * rise * (1 + 0.3 * np.sin(np.arange(8) + batch + place))
        change = 1e-4 * 16.0**trial * (1 + place)
        return {**sums, **squares, "samples": 64, "part_loss_increase": parts, "squared_norm": change,
                "quadratic_form": math.nan}  # fmt: skip

    return plan, measure


def noise(network: Network) -> tuple[Plan, Measure]:
    bands = np.arange(1, 10) / 10
    plan = Plan(
        over={"batch": np.arange(8), "band": bands},
        labels={"frequencies": (Quantity("frequencies", dims=("band",)), np.arange(9))},
        quantities={**sample_statistics.quantities(), "noise_square_sum": Quantity("sum of the mean square")},
        summaries={**sample_statistics.summaries("band"), "noise_rms": Quantity("rms", dims=("band",))},
        facts={"intact_loss": 0.9, "intact_accuracy": 0.75, "empty_bands": "0.2"},
    )

    def measure(unit: Unit) -> Values:
        drop = np.nan if unit.index[1] == 1 else 0.3 * math.sin(3 * unit.at["band"] * network.width) ** 2
        return {"samples": 128, "accuracy_drop_sum": 128 * drop, "accuracy_drop_square_sum": 128 * drop,
                "loss_increase_sum": 512 * drop, "loss_increase_square_sum": 2048 * drop,
                "noise_square_sum": 128 * unit.at["band"]}  # fmt: skip

    return plan, measure


def shape_bias(network: Network) -> tuple[Plan, Measure]:
    names, each = np.array(["bear", "car", "cat", "dog", "elephant"]), ("category",)
    plan = Plan(
        over={"batch": np.arange(8)},
        axes={"category": np.arange(5)},
        labels={"category_name": (Quantity("category", dims=each), names)},
        quantities=quantities(each, "pictures", "by_shape", "by_texture"),
        summaries={
            **quantities(each, "category_bias", "category_bias_se"),
            **quantities((), "shape_bias", "shape_bias_se", "shape_accuracy", "texture_accuracy"),
        },
        facts={"source": "made up", "left_out": 0},
    )

    def measure(unit: Unit) -> Values:
        shape = np.round(8 + 4 * np.sin(np.arange(5)) / network.width)
        return {"pictures": np.full(5, 20), "by_shape": shape, "by_texture": 16 - shape}

    return plan, measure


def perturbation(network: Network) -> tuple[Plan, Measure]:
    names, scores = np.array(["translate", "rotate", "gaussian_noise"]), ("consistency", "cross_entropy", "accuracy")
    frames, each = np.array([8, 16, 16]), ("perturbation",)
    plan = Plan(
        over={"perturbation": np.arange(3), "batch": np.arange(8)},
        axes={"frame": np.arange(16)},
        labels={
            "perturbation_name": (Quantity("perturbation", dims=each), names),
            "frames": (Quantity("frames", dims=each), frames),
        },
        quantities={
            **quantities((), "samples", *(f"{name}_{end}" for name in scores for end in ("sum", "square_sum"))),
            **quantities(("frame",), *(f"{name}_at_sum" for name in scores)),
        },
        summaries={
            **quantities(each, *scores, *(f"{name}_se" for name in scores)),
            **quantities(("perturbation", "frame"), *(f"{name}_at" for name in scores)),
            **quantities((), *(f"mean_{name}" for name in scores)),
        },
        facts={"source": "made up"},
    )

    def measure(unit: Unit) -> Values:
        which, _ = unit.index
        level = {"consistency": 0.9 - 0.1 * which / network.width, "cross_entropy": 0.4 + 0.2 * which, "accuracy": 0.7}
        sums = {f"{name}_sum": 128 * value for name, value in level.items()}
        squares = {f"{name}_square_sum": 135 * value**2 for name, value in level.items()}
        at = np.where(np.arange(16) < frames[which], 1 + 0.05 * np.sin(np.arange(16)), np.nan)
        return {"samples": 128, **sums, **squares, **{f"{name}_at_sum": 128 * v * at for name, v in level.items()}}

    return plan, measure


def input_surface(network: Network) -> tuple[Plan, Measure]:
    at, line = np.linspace(-0.1, 0.1, 7), ("direction", "t")
    directions = ("gradient of the image's loss", "random", "towards the image that PGD finds")
    own = ("image_loss", "image_accuracy")
    sums = [f"{name}_sum" for name in ("loss", "loss_square", "rise", "rise_square", "accuracy")]
    means = ("loss", "loss_se", "rise", "rise_se", "accuracy")
    plan = Plan(
        over={"batch": np.arange(8), "row": np.arange(3 + 7)},
        axes={"direction": np.arange(3), "t": at, "x": at, "y": at, "image": np.arange(4)},
        labels={"direction_name": (Quantity("direction", dims=("direction",)), np.array(directions))},
        quantities={
            "samples": Quantity("images"),
            **quantities(("t",), *sums),
            **quantities(("image", "t"), *(f"row_{name}" for name in own)),
        },
        summaries={
            **quantities(("x", "y"), *means),
            **quantities(line, *(f"line_{name}" for name in means)),
            **quantities(("image", "x", "y"), *own),
        },
    )
    steep = np.array([60.0, 2.0, 80.0]) / network.width

    def measure(unit: Unit) -> Values:
        batch, row = unit.index
        x = at[row - 3] if row >= 3 else 0.0
        plane = steep[0] * ((x + 0.1) ** 2 - 0.01) + steep[1] * at**2
        rise = plane if row >= 3 else steep[row] * (at + 10 * at**2)
        level, spread = 0.5 + rise, 0.1 + np.abs(rise)
        each = np.stack([0.3 * (i + 1) + 0.6 / network.width + plane for i in range(4)])
        if batch or row < 3:
            each = np.full_like(each, np.nan)
        return {
            "samples": 128, "loss_sum": 128 * level, "loss_square_sum": 128 * (level**2 + spread**2),
            "rise_sum": 128 * rise, "rise_square_sum": 128 * (rise**2 + spread**2),
            "accuracy_sum": 128 * np.exp(-level), "row_image_loss": each,
            "row_image_accuracy": np.where(np.isnan(each), np.nan, each < 1.0),
        }  # fmt: skip

    return plan, measure


def attack(network: Network) -> tuple[Plan, Measure]:
    after = ("method", "eps")
    plan = Plan(
        over={"batch": np.arange(8), "method": np.arange(2), "eps": np.array([1, 2, 4, 8]) / 255},
        labels={"method_name": (Quantity("attack", dims=("method",)), np.array(["fgsm", "pgd"]))},
        quantities={
            **sample_statistics.quantities(),
            **quantities((), "accuracy_sum", "accuracy_square_sum", "loss_sum", "loss_square_sum"),
        },
        summaries={
            **quantities(after, "accuracy", "accuracy_se", "loss", "loss_se"),
            **quantities(after, *sample_statistics.summaries("eps")),
        },
        facts={"intact_loss": 0.9, "intact_accuracy": 0.75},
    )

    def measure(unit: Unit) -> Values:
        left = 0.75 * math.exp(-60 * unit.at["eps"] * (1 + unit.index[1]) / network.width)
        return {"samples": 128, "accuracy_sum": 128 * left, "accuracy_square_sum": 128 * left, "loss_sum": 128 - left,
                "loss_square_sum": 512, "accuracy_drop_sum": 128 * (0.75 - left), "accuracy_drop_square_sum": 128,
                "loss_increase_sum": 256, "loss_increase_square_sum": 1024}  # fmt: skip

    return plan, measure


def corruption(network: Network) -> tuple[Plan, Measure]:
    names = np.array(corruptions.NAMES)
    plan = Plan(
        over={"corruption": np.arange(len(names)), "severity": np.arange(1, 6)},
        axes={"block": np.arange(20), "size": np.array([1, 2, 5])},
        labels={
            "corruption_name": (Quantity("corruption", dims=("corruption",)), names),
            "block_samples": (Quantity("samples", dims=("block",)), np.full(20, 50)),
        },
        quantities={
            **corruption_summary.quantities(),
            **corruption_summary.block_quantities(),
            **corruption_summary.size_quantities(),
        },
        summaries=corruption_summary.summaries(baseline=False, sizes=True),
        facts={"clean_accuracy": 0.75, "clean_nll": 0.9, "clean_ece": 0.05, "source": "made up"},
    )

    def measure(unit: Unit) -> Values:
        kind, severity = unit.index
        accuracy = 0.7 - 0.1 * severity * (1 + math.sin(kind)) / network.width
        random = np.random.default_rng(unit.seed(0)).normal(size=20)
        found = {"accuracy": accuracy, "nll": 3 - 2 * accuracy, "ece": 0.4 - accuracy / 3}
        by_size = {name: value * np.array([1.2, 1.1, 1.0]) for name, value in found.items()}
        return {"samples": 1000, **found, **{f"{name}_se": 0.01 for name in found},
                **{f"{name}_block": 50 * value + 2 * random for name, value in found.items()},
                **{f"size_{name}": values for name, values in by_size.items()},
                **{f"size_{name}_block": np.add.outer(50 * values, 2 * random) for name, values in by_size.items()},
        }  # fmt: skip

    return plan, measure


def probe_linear(network: Network) -> tuple[Plan, Measure]:
    n = len(network.kinds)
    names = ("accuracy", "accuracy_se", "held_out_accuracy", "fitted_accuracy", "penalty", "features")
    plan = Plan(
        over={"layer": np.arange(n)},
        labels=labels(network, "layer"),
        quantities=quantities((), *names),
        facts={"intact_accuracy": 0.75, "fitted_on": "8192 samples"},
    )

    def measure(unit: Unit) -> Values:
        accuracy = 0.7 - 0.5 * math.exp(-3 * (unit.index[0] + 1) / n)
        return dict(zip(names, (accuracy, 0.014, accuracy, accuracy + 0.05, 0.01, 192), strict=True))

    return plan, measure


def trace(network: Network) -> tuple[Plan, Measure]:
    plan = Plan(
        over={"batch": np.arange(8)},
        quantities=quantities(
            (), "batch_trace", "batch_trace_se", "batch_square", "batch_square_se", "samples", "loss", "matvecs"
        ),
        summaries=quantities((), "trace", "trace_se", "trace_spread", "frobenius", "frobenius_se"),
    )

    def measure(unit: Unit) -> Values:
        level = 400 / network.width**4 * (1 + 0.2 * math.sin(unit.index[0]))
        return {
            "batch_trace": level, "batch_trace_se": 0.1 * level, "batch_square": 9 * level, "batch_square_se": level,
            "samples": 128, "loss": 2.0, "matvecs": 32,
        }  # fmt: skip

    return plan, measure


def density(network: Network) -> tuple[Plan, Measure]:
    node = ("node",)
    plan = Plan(
        over={"vector": np.arange(4)},
        axes={"node": np.arange(12)},
        quantities={**quantities(node, "nodes", "weights"), **quantities((), "matvecs")},
        summaries=quantities((), "mean", "mean_se", "largest", "smallest"),
    )

    def measure(unit: Unit) -> Values:
        nodes = np.linspace(-1.5, 4, 12) + 0.1 * unit.index[0]
        weights = np.exp(-3 * np.abs(nodes)) / np.exp(-3 * np.abs(nodes)).sum()
        return {"nodes": np.sinh(nodes) / network.width, "weights": weights, "matvecs": 12}

    return plan, measure


def similarity(network: Network) -> tuple[Plan, Measure]:
    n = len(network.kinds)
    plan = Plan(
        over={"batch": np.arange(8)},
        axes={"layer": np.arange(n), "other": np.arange(n)},
        labels={
            **labels(network, "layer"),
            **{f"other_{name}": item for name, item in labels(network, "other").items()},
        },
        quantities={
            **quantities((), "samples"),
            **quantities(("layer", "other"), "hsic"),
            **quantities(("layer",), "hsic_layer"),
            **quantities(("other",), "hsic_other"),
        },
        summaries=quantities(("layer", "other"), "cka", "cka_se"),
    )
    place = np.arange(n) / 6 + 0.7 * np.array(network.stages)

    def measure(unit: Unit) -> Values:
        noise = 0.02 * np.random.default_rng(unit.seed(0)).normal(size=(n, n))
        alike = np.exp(-np.abs(place[:, None] - place)) + noise + noise.T
        return {"samples": 128, "hsic": alike, "hsic_layer": np.ones(n), "hsic_other": np.ones(n)}

    return plan, measure


COSINES = ("head", "head_feature", "token", "depth")


def attention(network: Network) -> tuple[Plan, Measure]:
    """Of a network without self-attention, of its layers all the same."""
    n = len(network.kinds)
    per_head = [f"{name}_{what}" for name in ("distance", "entropy", "mutual_information")
                for what in ("sum", "square_sum")]  # fmt: skip
    per_layer = [f"{name}_cosine_{what}" for name in COSINES for what in ("sum", "square_sum")]
    mean_head = [name.removesuffix("_sum") for name in per_head if "square" not in name]
    mean_layer = [name.removesuffix("_sum") for name in per_layer if "square" not in name]
    plan = Plan(
        over={"batch": np.arange(8)},
        axes={"layer": np.arange(n), "head": np.arange(3), "token_rank": np.arange(64), "image_rank": np.arange(128)},
        labels=labels(network, "layer"),
        quantities={
            **quantities((), "samples", "token_samples"),
            **quantities(("layer", "head"), *per_head),
            **quantities(("layer",), *per_layer),
            **quantities(("layer", "token_rank"), "token_singular_value_sum"),
            **quantities(("layer", "image_rank"), "batch_singular_value"),
        },
        summaries={
            **quantities(("layer", "head"), *mean_head, *(f"{name}_se" for name in mean_head)),
            **quantities(("layer",), *mean_layer, *(f"{name}_se" for name in mean_layer)),
            **quantities(("layer", "token_rank"), "token_singular_value"),
            **quantities(("layer", "image_rank"), "image_singular_value"),
        },
    )
    depth = np.linspace(0, 1, n)
    far = 8 + 6 * depth[:, None] + np.array([-4.0, 0.0, 3.0]) * (1 - depth[:, None])

    def measure(unit: Unit) -> Values:
        means = {"distance": far, "entropy": 3 + 0 * far, "mutual_information": 0.5 / (1 + 0.1 * far)}
        alike = {f"{name}_cosine": 0.3 + 0.5 * depth for name in COSINES}
        sums = {f"{name}_sum": 128 * mean for name, mean in {**means, **alike}.items()}
        squares = {f"{name}_square_sum": 129 * mean**2 for name, mean in {**means, **alike}.items()}
        ranks = [-(0.2 + 2 * depth[:, None]) * np.log1p(np.arange(count)) for count in (64, 128)]
        return {**sums, **squares, "samples": 128, "token_samples": 4, "token_singular_value_sum": 4 * ranks[0],
                "batch_singular_value": ranks[1]}  # fmt: skip

    return plan, measure


def ensemble(network: Network) -> tuple[Plan, Measure]:
    """Results measured on two tiny networks."""
    subject = attention_net()
    other = copy.deepcopy(subject.model)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    subject.others = {"other": other}
    probe = Ensemble(members="other", **PARAMETERS["ensemble"])
    return probe.plan(subject), partial(probe.measure, subject)


def noise_scale(network: Network) -> tuple[Plan, Measure]:
    """Gradients of one direction with noise, so that the simple noise scale is about 300 times the network's width."""
    count = 16
    parts = ("squared_gradient", "gradient_noise", "gradient_curvature", "curved_gradient_noise")
    kinds = ("simple", "curvature")
    names = [*kinds, *parts, *(f"{name}_se" for name in (*kinds, *parts))]
    names += [f"{kind}_{what}" for kind in kinds for what in ("low", "high", "resolved")]
    plan = Plan(
        over={"group": np.arange(count)},
        axes={"other": np.arange(count)},
        quantities={
            **quantities(("other",), "inner", "curved_inner"),
            **quantities((), "noise", "curved_noise", "samples", "loss"),
        },
        summaries=quantities((), *names),
    )  # fmt: skip

    def measure(unit: Unit) -> Values:
        (i,), rng = unit.index, np.random.default_rng(unit.seed(0))
        inner, noise = 1 + 0.15 * rng.normal(size=(2, count)), 300 * network.width * (1 + 0.2 * rng.normal(size=2))
        half = np.where((np.arange(count) - i) % count % 2 == 1, inner[1], np.nan)
        return {"inner": inner[0], "curved_inner": half, "noise": noise[0], "curved_noise": 0.5 * noise[1],
                "samples": 64, "loss": 0.5}  # fmt: skip

    return plan, measure


def step(network: Network) -> tuple[Plan, Measure]:
    plan = replace(Step(**Step.smallest).plan(tanh_net()), over={"batch": np.arange(8)})

    def measure(unit: Unit) -> Values:
        level = 1 + 0.2 * math.sin(unit.index[0])
        predicted = {"predicted_change_first": -0.02, "predicted_change": -0.01 * level}
        actual = {"actual_change": -0.008 * level**2, "other_actual_change": 0.002 * level}
        along = {
            **dict.fromkeys(("gradient", "batch"), 12 * level / network.width),
            "directional": 4 * level,
            "critical": 18 * level,
        }
        return {
            **dict.fromkeys(plan.quantities, 1.0), **predicted, **actual, "angle": 20 * level,
            **{f"other_{name}": value for name, value in predicted.items()},
            **{f"{name}_sharpness": value for name, value in along.items()},
        }  # fmt: skip

    return plan, measure


def flatness(network: Network) -> tuple[Plan, Measure]:
    """Sharper where the network is narrower, but by the average-case measures."""
    plan = Flatness(**Flatness.smallest).plan(tanh_net())
    names = [str(name) for name in plan.labels["measure_name"][1]]

    def measure(unit: Unit) -> Values:
        (i,), known = unit.index, np.arange(len(names)) == plan.labels["unit_measure"][1][unit.index[0]]
        levels = np.array([0.1 * network.width ** (1 if "average" in name else -1) for name in names])
        known |= known[names.index("trace")] & (np.array(names) == "frobenius")
        terms = np.where(known, levels * (1 + 0.1 * math.sin(3 * i)), np.nan)
        return {"term": terms, "term_se": 0.2 * terms, "samples": 6}

    return plan, measure


MADE_UP: Mapping[str, Callable[[Network], tuple[Plan, Measure]]] = {
    "monitor": monitor,
    "surface": surface,
    "trajectory": trajectory,
    "hessian": hessian,
    "fourier": fourier,
    "variance": variance,
    "lesion": lesion,
    "sensitivity": sensitivity,
    "trace": trace,
    "step": step,
    "flatness": flatness,
    "density": density,
    "line": line,
    "align": align,
    "barriers": all_barriers,
    "noise": noise,
    "noise-scale": noise_scale,
    "corruption": corruption,
    "attack": attack,
    "input-surface": input_surface,
    "perturbation": perturbation,
    "shape-bias": shape_bias,
    "probe-linear": probe_linear,
    "similarity": similarity,
    "attention": attention,
    "ensemble": ensemble,
}
