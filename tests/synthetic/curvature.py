"""Made-up spectra, traces, steps, gradient noise and flatness, at a checkpoint and during training."""

import math
from dataclasses import replace

import numpy as np
from analytic import tanh_net

from landscape.curvature.stored_spectrum import summary_quantities
from landscape.probe import Plan, Quantity, Unit, Values
from landscape.probes.flatness import Flatness
from landscape.probes.step import Step
from synthetic.networks import Measure, Network, quantities


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
        summaries=summary_quantities("hessian", ()),
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


def monitor(network: Network) -> tuple[Plan, Measure]:
    """A run that rises to its threshold, with the units of a fixed number of steps."""
    names = "threshold", "preconditioned_threshold", "learning_rate", "loss", "gradient_norm", "warm_error", "distance"
    critical = "critical_sharpness", "alarm"
    noise = "noise_scale", "noise_scale_se", "gradient_variance", "gradient_squared"
    ranked = "eigenvalue", "residual", "converged"
    also = "preconditioned", "preconditioned_residual", "preconditioned_converged"
    plan = Plan(
        over={"step": np.arange(0, 4000, 50)},
        axes={"rank": np.arange(2)},
        quantities={**quantities((), *names, *noise, *critical), **quantities(("rank",), *ranked, *also)},
        about={"step": Quantity("step", "updates"), "rank": Quantity("rank")},
    )

    def measure(unit: Unit) -> Values:
        (i,), at = unit.index, float(unit.at["step"])
        sharpness = 40 * network.width * (1 - math.exp(-at / 800)) * (1 + 0.05 * math.sin(i))
        both = np.array([sharpness, 0.6 * sharpness])
        squared = 0.02 + 0.05 * math.sin(1.7 * i) ** 2
        return {
            "critical_sharpness": 300 * sharpness, "alarm": float(i in (60, 61)),
            "threshold": 40.0 * network.width, "preconditioned_threshold": 38.0 / 1e-3, "learning_rate": 1e-3,
            "loss": 2 * math.exp(-at / 1000), "gradient_norm": 0.3, "warm_error": 1e-4, "distance": at**0.5,
            "noise_scale": network.width * 3.0 / squared, "noise_scale_se": 1.0 / squared,
            "gradient_variance": network.width * 3.0,
            "gradient_squared": squared, "eigenvalue": both, "residual": 1e-3 * both,
            "converged": [float(i % 9 > 0), 1.0], "preconditioned": 900 * both,
            "preconditioned_residual": both, "preconditioned_converged": [1.0, 1.0],
        }  # fmt: skip

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
