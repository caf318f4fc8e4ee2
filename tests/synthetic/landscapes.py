"""Made-up losses over weights and pixels: planes, lines, barriers and trajectories."""

import math
from typing import Any

import numpy as np

from landscape.probe import Plan, Quantity, Unit, Values
from landscape.statistics import basins
from landscape.statistics.means import PARTS
from landscape.subject.losses import MEANINGS, cross_entropy
from landscape.weight_space import barriers
from synthetic.networks import Measure, Network, quantities


def scores(*values: Any) -> dict[str, tuple[Quantity, np.ndarray]]:
    """Labels of losses and accuracies on two data sets."""
    names = ("score_name", "score_data", "score_kind", "score_units", "score_centre", "score_margin", "score_samples")
    data, kinds = ("prose", "prose", "code", "code"), ("loss", "accuracy") * 2
    text = ([f"{one} {kind}" for one, kind in zip(data, kinds, strict=True)], data, kinds, ("nats", "1") * 2)
    return {n: (Quantity(n, dims=("score",)), np.array(v)) for n, v in zip(names, (*text, *values), strict=True)}


CENTRES, MARGINS, SAMPLES = (0.5, 0.9, 0.6, 0.8), (0.1, 0.05, 0.2, 0.05), (64.0,) * 4


def worsened(rise: float) -> Values:
    """The scores of a point where the loss is higher by so much."""
    worse = rise * np.array([1.0, 0.2, 2.0, 0.4])
    value = np.array(CENTRES) + worse * np.array([1, -1, 1, -1])
    parts = worse[:, None] * (1 + 0.1 * np.linspace(-1, 1, PARTS))
    return {"score_value": value, "score_worse": worse, "score_se": np.full(4, 0.02), "score_worse_se": 0.1 * worse,
            "score_worse_part": parts}  # fmt: skip


def surface(network: Network) -> tuple[Plan, Measure]:
    at = np.linspace(-1, 1, 21)
    plan = Plan(
        over={"x": at, "y": at},
        quantities=quantities((), "loss", "loss_se", "rise_se", "l2", "accuracy", "objective")
        | quantities(("part",), "loss_part") | basins.MEASURED,
        facts={"weight_decay": 0.05},
        axes={"radius": np.array([0.1, 0.25, 0.5, 1.0]), "snapshot": np.arange(4), "score": np.arange(4),
              "part": np.arange(PARTS), "distance": basins.distances(at, at)},
        labels={
            **scores(CENTRES, MARGINS, SAMPLES),
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
                "accuracy": 0.9 * np.exp(-rise), "objective": loss + l2 / 20, **worsened(loss - 0.2),
                "loss_part": 0.2 + (loss - 0.2) * (1 + 0.1 * np.linspace(-1, 1, PARTS))}  # fmt: skip

    return plan, measure


def line(network: Network) -> tuple[Plan, Measure]:
    per_line = ("direction",)
    barriers = ("barrier", "barrier_se", "barrier_at", "accuracy_barrier", "accuracy_barrier_se")
    errors = ("loss_se", "accuracy_se", "excess_se", "accuracy_deficit_se")
    plan = Plan(
        over={"direction": np.arange(2), "t": np.linspace(0, 1, 9)},
        axes={"score": np.arange(4), "part": np.arange(PARTS), "side": np.array(basins.SIDES)},
        quantities=quantities((), "loss", "accuracy", "l2", "excess", "accuracy_deficit", *errors) | basins.MEASURED,
        labels={
            "name": (Quantity("direction", dims=per_line), np.array(["towards a", "towards b"])),
            **scores(CENTRES, MARGINS, SAMPLES),
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
        facts={"before": 1, "other": "final-2", "similarity": 0.5},
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
        facts={"before": 0},
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
