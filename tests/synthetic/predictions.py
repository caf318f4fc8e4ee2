"""Made-up predictions of damaged networks and of changed inputs."""

import copy
import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from analytic import attention_net

from landscape.data import corruptions
from landscape.headline import with_errors
from landscape.probe import Plan, Quantity, Unit, Values
from landscape.probes.ensemble import Ensemble
from landscape.probes.sensitivity import Sensitivity
from landscape.statistics import corruption_summary
from landscape.subject import sample_statistics
from landscape.subject.subject import Origin
from synthetic.networks import PARAMETERS, Measure, Network, labels, quantities


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
            **quantities(after, *with_errors(sample_statistics.summaries("eps"))),
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
        ends = {"ece_low": found["ece"] - 0.02, "ece_high": found["ece"] + 0.02, "ece_chance": 0.01}
        return {"samples": 1000, **found, **{f"{name}_se": 0.01 for name in found}, **ends,
                "size_ece_chance": np.full(3, 0.01),
                **{f"{name}_block": 50 * value + 2 * random for name, value in found.items()},
                **{f"size_{name}": values for name, values in by_size.items()},
                **{f"size_{name}_block": np.add.outer(50 * values, 2 * random) for name, values in by_size.items()},
        }  # fmt: skip

    return plan, measure


def ensemble(network: Network) -> tuple[Plan, Measure]:
    """Results measured on two tiny networks."""
    subject = attention_net()
    other = copy.deepcopy(subject.model)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    subject.origin = Origin(others={"other": other})
    probe = Ensemble(members="other", **PARAMETERS["ensemble"])
    return probe.plan(subject), partial(probe.measure, subject)
