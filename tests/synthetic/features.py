"""Made-up feature maps, attention and similarity, layer by layer."""

import math

import numpy as np

from landscape.probe import Plan, Quantity, Unit, Values
from synthetic.networks import Measure, Network, labels, quantities


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
            "layer": np.arange(n), "bin": np.arange(frequency.shape[1]), "common_frequency": np.arange(4) / 16,
            "row": np.arange(most), "column": np.arange(most), "half_column": np.arange(most // 2 + 1),
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
    )  # fmt: skip
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
        summaries={**quantities(("layer", "other"), "cka", "cka_se"), **quantities((), "neighbours")},
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
    from landscape.probes.attention import OVER_HEADS, PER_HEAD, PER_LAYER

    n = len(network.kinds)
    per_head = [f"{name}_{what}" for name in PER_HEAD for what in ("sum", "square_sum")]
    per_layer = [f"{name}_{what}" for name in PER_LAYER for what in ("sum", "square_sum")]
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
        alike |= {f"{name}{OVER_HEADS}": mean.mean(axis=1) for name, mean in means.items()}
        sums = {f"{name}_sum": 128 * mean for name, mean in {**means, **alike}.items()}
        squares = {f"{name}_square_sum": 129 * mean**2 for name, mean in {**means, **alike}.items()}
        ranks = [-(0.2 + 2 * depth[:, None]) * np.log1p(np.arange(count)) for count in (64, 128)]
        return {**sums, **squares, "samples": 128, "token_samples": 4, "token_singular_value_sum": 4 * ranks[0],
                "batch_singular_value": ranks[1]}  # fmt: skip

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
