"""Match the units of two networks by their weights (Ainsworth et al. 2023, arXiv 2209.04836, Algorithm 1)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from landscape.symmetry.permutations import FIXED, Permutations

SWEEPS = 100  # over all families at most; a few are enough


@dataclass(frozen=True)
class Match:
    """The best permutation of the second network's units that was found."""

    moved: np.ndarray  # see `Permutations`
    similarity: float  # inner product of the weights of both networks after it
    before: float  # and without it
    largest: float  # what it would be if both had equal weights up to the permutation: |A| |B|

    def cosine(self, inner_product: float) -> float:
        """An inner product as a share of the largest; NaN where the weights of a network are all zero."""
        return inner_product / self.largest if self.largest else math.nan


def match(
    permutations: Permutations,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    *,
    restarts: int = 3,
    seed: int = 0,
) -> Match:
    """Maximise <A, P B> over permutations P, family by family in random order, until none improves it.

    The first start settles the families one after the other from the input and output, whose units stay, using the
    weights towards settled units alone; the others start from the identity, as in the paper. The best is returned.

    On the host, so that ties break alike on every device.

    Args:
        permutations: of the units of both networks.
        first: the weights to compare, by name.
        second: those of the other network.
        restarts: number of starts.
        seed: of the order of the families.
    """
    names = [name for name in permutations.places if name in first]
    a, b = ({name: tensors[name].detach().float().cpu() for name in names} for tensors in (first, second))
    generator = np.random.default_rng(seed)
    search = _Search(permutations, a, b)
    ends = []
    for start in range(restarts):
        search.reset()
        if start == 0:
            search.settle()
        search.descend(generator)
        ends.append((search.objective(), search.moved))
    similarity, moved = max(ends, key=lambda end: end[0])
    search.reset()
    before = search.objective()
    if similarity <= before:
        similarity, moved = before, permutations.identity
    norms = [sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5 for tensors in (a, b)]
    return Match(moved, similarity, before, norms[0] * norms[1])


class _Search:
    """One permutation with the second network's tensors under it."""

    def __init__(self, permutations: Permutations, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        self.permutations, self._first, self._second = permutations, first, second
        group_of = np.zeros(permutations.size, dtype=np.int64)
        for k, group in enumerate(permutations.groups):
            group_of[group.units] = k
        family_of = {k: f for f, family in enumerate(permutations.families) for k in family}
        self._family = np.array([family_of[k] for k in group_of.tolist()], dtype=np.int64)
        # Tensors and axes in which the units of a group are; the tensors of a family.
        self._where: dict[int, list[tuple[str, int]]] = {k: [] for k in range(len(permutations.groups))}
        self._tensors: dict[int, set[str]] = {f: set() for f in range(len(permutations.families))}
        for name in first:
            for axis, units in permutations.places[name].items():
                for k in np.unique(group_of[units[units != FIXED]]).tolist():
                    self._where[k].append((name, axis))
                    self._tensors[family_of[k]].add(name)
        self.reset()

    def reset(self) -> None:
        """Start from the identity."""
        self.moved = self.permutations.identity
        self._current = dict(self._second)

    def objective(self, names: set[str] | None = None) -> float:
        """<A, P B> over some tensors, by default over all with units that move."""
        chosen = self._first if names is None else names
        return sum(float((self._first[name] * self._current[name]).sum(dtype=torch.float64)) for name in chosen)

    def settle(self) -> None:
        """Match every family once, by the weights towards units that stay or are matched already."""
        waiting = set(range(len(self.permutations.families)))
        while waiting:
            settled = ~np.isin(self._family, list(waiting))
            family = max(sorted(waiting), key=lambda f: self._known(f, settled))
            usable = settled if self._known(family, settled) > 1 else None
            self._move(family, self._found(family, usable))
            waiting.remove(family)

    def descend(self, generator: np.random.Generator) -> None:
        """Improve family by family until none can be."""
        for _ in range(SWEEPS):
            improved = False
            for family in generator.permutation(len(self.permutations.families)).tolist():
                names = self._tensors[family]
                before, kept = self.objective(names), (self.moved, self._current)
                self._move(family, self._found(family, None))
                if self.objective(names) > before + 1e-6 * abs(before):
                    improved = True
                else:
                    self.moved, self._current = kept
            if not improved:
                return

    def _known(self, family: int, settled: np.ndarray) -> float:
        """Weights per unit of the family's outermost group, and of what it holds, towards settled units."""
        numbers = self.permutations.families[family]
        known = [float(self._mask(name, axis, settled).sum()) for k in numbers for name, axis in self._where[k]]
        return sum(count / len(self.permutations.groups[numbers[0]]) for count in known)

    def _mask(self, name: str, axis: int, settled: np.ndarray) -> Tensor:
        """Ones where the units along all other axes stay or are settled, broadcastable to the tensor."""
        shape = self._first[name].shape
        known = torch.ones(*shape[:2], *[1] * (len(shape) - 2)) * math.prod(shape[2:])
        for other, units in self.permutations.places[name].items():
            if other == axis:
                continue
            flags = torch.from_numpy(np.append(settled, True)[units]).float()
            if units.ndim == 1:
                known = known * flags.reshape([-1 if i == other else 1 for i in range(len(shape))])
            else:
                known = known * flags.reshape([*flags.shape, *[1] * (len(shape) - 2)])
        return known

    def _found(self, family: int, settled: np.ndarray | None) -> dict[int, np.ndarray]:
        """By group of a family the best assignment: position of the present unit of B for every unit of A."""
        groups, numbers = self.permutations.groups, self.permutations.families[family]
        values: dict[int, np.ndarray] = {}
        inside: dict[int, np.ndarray] = {}
        for k in reversed(numbers):  # what is held before its holder
            values[k], inside[k] = self._similarity(k, settled)
            for held in (c for c in numbers if groups[c].within == k):
                values[k] += _of_blocks(values[held], groups[held].block, len(groups[k]))
        found: dict[int, np.ndarray] = {}
        for k in numbers:
            if groups[k].within < 0:
                found[k] = linear_sum_assignment(values[k], maximize=True)[1]
                continue
            outer, block = found[groups[k].within], groups[k].block
            chosen = np.zeros(len(block), dtype=np.int64)
            for b, source in enumerate(outer):
                here, there = np.flatnonzero(block == b), np.flatnonzero(block == source)
                value = values[k][np.ix_(here, there)]
                if b == source:
                    value = value + inside[k][np.ix_(here, there)]
                chosen[here] = there[linear_sum_assignment(value, maximize=True)[1]]
            found[k] = chosen
        return found

    def _similarity(self, k: int, settled: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Inner products of the weights of every unit of A with those of every unit of the permuted B, (n, n).

        The second part holds for units of one block alone: of weights whose other axis moves with the same blocks.
        """
        group = self.permutations.groups[k]
        n = len(group)
        everywhere, in_block = np.zeros((n, n)), np.zeros((n, n))
        for name, axis in self._where[k]:
            rows = []
            for tensors in (self._first, self._current):
                tensor = tensors[name]
                if settled is not None and tensors is self._first:
                    tensor = tensor * (self._mask(name, axis, settled) > 0)
                rows.append(self._rows(tensor, name, axis, group.units))
            product = (rows[0] @ rows[1].T).double().numpy()
            coupled = any(units.ndim == 2 for units in self.permutations.places[name].values())
            total = in_block if coupled else everywhere
            total += product
        return everywhere, in_block

    def _rows(self, tensor: Tensor, name: str, axis: int, members: np.ndarray) -> Tensor:
        """The weights of every unit of a group, (n, weights)."""
        units = self.permutations.places[name][axis]
        flat = (tensor if units.ndim == 2 else tensor.movedim(axis, 0)).reshape(units.size, -1)
        order = np.argsort(units.ravel(), kind="stable")
        order = order[np.isin(units.ravel()[order], members)]
        return flat[torch.from_numpy(order).to(flat.device)].reshape(len(members), -1)

    def _move(self, family: int, found: Mapping[int, np.ndarray]) -> None:
        moved = self.moved.copy()
        for k, chosen in found.items():
            units = self.permutations.groups[k].units
            moved[units] = self.moved[units[chosen]]
        self.moved = moved
        changed = {name: self.permutations.applied(name, self._second[name], moved) for name in self._tensors[family]}
        self._current = {**self._current, **changed}


def _of_blocks(values: np.ndarray, block: np.ndarray, count: int) -> np.ndarray:
    """The best total of every block of A with every block of B, (blocks, blocks)."""
    members = [np.flatnonzero(block == b) for b in range(count)]
    if len(block) == count:
        order = np.concatenate(members)
        return values[np.ix_(order, order)]
    total = np.zeros((count, count))
    for i, here in enumerate(members):
        for j, there in enumerate(members):
            part = values[np.ix_(here, there)]
            total[i, j] = part[linear_sum_assignment(part, maximize=True)].sum()
    return total
