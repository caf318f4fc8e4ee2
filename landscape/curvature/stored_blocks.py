"""What a results file stores of the spectra of the Hessian's diagonal blocks, and what is computed from that."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from landscape.curvature.block_diagonal import Partition
from landscape.probe import Plan, Quantity
from landscape.statistics.block_spectra import DEFINITION, heterogeneity, moments

EIGENVALUE = "loss per squared weight"
JS = "Jensen-Shannon distance of the blocks' spectral densities"


def block_plan(partition: Partition, vectors: int, steps: int) -> Plan:
    """Start vectors as units, and for each the quadrature of every block.

    Raises:
        ValueError: there is one block only, which has no distance.
    """
    if len(partition.names) < 2:
        raise ValueError(
            f"the selected parameters are a single block, {partition.names[0]}; leave out --blocks, or give smaller "
            "ones or fewer --params"
        )
    row, pair, error = ("block",), ("block", "other"), "its standard error over start vectors"
    square = f"({EIGENVALUE})^2"
    return Plan(
        over={"vector": np.arange(vectors)},
        axes={"block": np.arange(len(partition.names)), "other": np.arange(len(partition.names)),
              "node": np.arange(steps)},
        quantities={
            "nodes": Quantity("node of the block's quadrature: a Ritz value, ascending", EIGENVALUE, (*row, "node")),
            "weights": Quantity("its weight; those of a vector and block sum to 1", dims=(*row, "node")),
            "matvecs": Quantity("products of the block with all samples spent", dims=row),
        },
        labels={
            "name": (Quantity("block", dims=row), np.array(partition.names)),
            "size": (Quantity("parameters of the block", dims=row), np.array(partition.sizes)),
        },
        summaries={
            "mean": Quantity("mean eigenvalue of the block", EIGENVALUE, row),
            "mean_se": Quantity(error, EIGENVALUE, row, over="vector"),
            "mean_square": Quantity("mean squared eigenvalue of the block", square, row),
            "mean_square_se": Quantity(error, square, row, over="vector"),
            "largest": Quantity("largest node of the block", EIGENVALUE, row),
            "smallest": Quantity("smallest node of the block", EIGENVALUE, row),
            "js_distance": Quantity(JS, dims=pair),
            "js_distance_se": Quantity(f"{error} (jackknife)", dims=pair, over="vector"),
            "shape_distance": Quantity(f"{JS}, each block divided by its root mean square eigenvalue", dims=pair),
            "shape_distance_se": Quantity(f"{error} (jackknife)", dims=pair, over="vector"),
            "heterogeneity": Quantity("block heterogeneity: the mean of js_distance over all pairs of blocks"),
            "heterogeneity_se": Quantity(f"{error} (jackknife)", over="vector"),
            "heterogeneity_half_steps": Quantity("block heterogeneity from half of the Lanczos steps"),
            "shape_heterogeneity": Quantity("the mean of shape_distance over all pairs of blocks"),
            "shape_heterogeneity_se": Quantity(f"{error} (jackknife)", over="vector"),
        },
        about={
            "vector": Quantity("start vector"), "block": Quantity("block"), "other": Quantity("other block"),
            "node": Quantity("node"),
        },
        facts={"heterogeneity_definition": DEFINITION},
    )  # fmt: skip


def block_summaries(data: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Moments and ends of every block and the distances between blocks, over all finished start vectors."""
    done = data["done"] == 1
    if not done.any():
        return {}
    nodes, weights = data["nodes"][done], data["weights"][done]
    return {**moments(nodes, weights), **heterogeneity(nodes, weights)}
