"""The diagonal blocks of the Hessian: how parameters are divided into them, Lanczos runs on all, and what is stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.lanczos import Spectrum, searches
from landscape.curvature.stopping import StoppingRule
from landscape.probe import Plan, Quantity, derived_seed
from landscape.products.parameter_selection import ancestor
from landscape.products.vectors import random_unit
from landscape.statistics.block_spectra import DEFINITION, heterogeneity, moments

BlockKind = Literal["none", "tensor", "module", "layer"]
BLOCK_KINDS = (
    "tensor: a parameter tensor each, module: the own parameters of a module, layer: those of the modules inside a "
    "module, such as the two linear layers of an MLP"
)


@dataclass(frozen=True)
class Partition:
    """Parameters divided into blocks, each in the order of the flat vector."""

    names: tuple[str, ...]  # of the blocks
    members: tuple[tuple[int, ...], ...]  # positions of each block's parameters in the list of all
    _slices: tuple[slice, ...]  # of every parameter in a flat vector, (n,)

    @staticmethod
    def of(parameters: Mapping[str, Tensor], kind: BlockKind) -> "Partition":
        """One block per tensor, per module that owns parameters, or per module that holds such modules."""
        levels = {"tensor": 0, "module": 1, "layer": 2}[kind]
        groups: dict[str, list[int]] = {}
        slices, at = [], 0
        for i, (name, parameter) in enumerate(parameters.items()):
            groups.setdefault(ancestor(name, levels), []).append(i)
            slices.append(slice(at, at + parameter.numel()))
            at += parameter.numel()
        return Partition(tuple(groups), tuple(map(tuple, groups.values())), tuple(slices))

    @property
    def sizes(self) -> list[int]:
        return [sum(self._slices[i].stop - self._slices[i].start for i in members) for members in self.members]

    def part(self, vector: Tensor, block: int) -> Tensor:
        return torch.cat([vector[self._slices[i]] for i in self.members[block]])

    def joined(self, parts: Mapping[int, Tensor], like: Tensor) -> Tensor:
        """The vector (n,) of the entries of some blocks, zero elsewhere, of the dtype and device of `like`."""
        whole = like.new_zeros(self._slices[-1].stop)
        for block, part in parts.items():
            slices = [self._slices[i] for i in self.members[block]]
            for piece, at in zip(torch.split(part, [s.stop - s.start for s in slices]), slices, strict=True):
                whole[at] = piece
        return whole


def block_quadratures(
    product: Callable[[Tensor], Tensor], partition: Partition, steps: int, *, seed: int, like: Tensor
) -> list[Spectrum | None]:
    """A Lanczos run of `steps` steps in every block, all in step: they share each product with the block diagonal.

    A mini-batch whose graph is rebuilt for every product is thus differentiated once per step, not once per step and
    block, and all bases together take the memory of a single run on all parameters. A block with at most `steps` rows
    is spanned by its run: its nodes are its eigenvalues.

    Args:
        product: v -> H_bd v, (n,) to (n,), with H_bd the block diagonal of H; it may skip blocks where v is zero.
        partition: the blocks.
        steps: Lanczos steps in each.
        seed: of the random start vectors, a different one in every block.
        like: a tensor of the dtype and on the device of the parameters.

    Returns:
        The quadrature of every block; None where its products are not finite.
    """
    device, dtype = like.device, like.dtype
    starts = [
        random_unit(size, derived_seed(seed, block), device=device, dtype=dtype)
        for block, size in enumerate(partition.sizes)
    ]
    # tol 0: all nodes are wanted, and nothing stops a run before its last step.
    running = [searches(start[None], StoppingRule(steps, tol=0.0), max_steps=steps) for start in starts]
    vectors = {block: next(search)[0] for block, search in enumerate(running)}
    found: list[Spectrum | None] = [None] * len(running)
    while vectors:
        images = product(partition.joined(vectors, like))
        for block in list(vectors):
            try:
                vectors[block] = running[block].send(partition.part(images, block)[None])[0]
            except StopIteration as end:
                (found[block],) = end.value
                del vectors[block]
    return found


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
    row, pair, error = ("block",), ("block", "other"), "start vectors (jackknife)"
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
            "mean": Quantity("mean eigenvalue of the block", EIGENVALUE, row, error="start vectors"),
            "mean_square": Quantity(
                "mean squared eigenvalue of the block", square, row, bounds="positive", error="start vectors"
            ),
            "largest": Quantity("largest node of the block", EIGENVALUE, row),
            "smallest": Quantity("smallest node of the block", EIGENVALUE, row),
            "js_distance": Quantity(JS, dims=pair, error=error),
            "shape_distance": Quantity(
                f"{JS}, each block divided by its root mean square eigenvalue", dims=pair, error=error
            ),
            "heterogeneity": Quantity(
                "block heterogeneity: the mean of js_distance over all pairs of blocks", bounds="positive", error=error
            ),
            "heterogeneity_half_steps": Quantity("block heterogeneity from half of the Lanczos steps"),
            "shape_heterogeneity": Quantity(
                "the mean of shape_distance over all pairs of blocks", bounds="positive", error=error
            ),
        },
        about={
            "vector": Quantity("start vector"), "other": Quantity("other block"),
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
