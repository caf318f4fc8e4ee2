"""The permutations of a network's units that leave its function unchanged, from one recorded forward pass."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

NONE = 0  # stands for no unit: a place that always stays where it is


class Units:
    """A growing set of units with what one forward pass says about them, each in constant time.

    Units that are added to each other, or multiplied, have to move together (`unite`). A unit may lie in a block, which
    is a unit too, and then moves with it (`put_under`). Units that meet something with an order of its own are pinned.
    Of every unit the operations that it goes through are counted by a random number each (`mark`), so that equal sums
    mean equal use.
    """

    def __init__(self) -> None:
        self._up = np.zeros(1024, dtype=np.int64)  # towards the representative of the united units
        self._block = np.zeros(1024, dtype=np.int64)  # of a representative; NONE where it lies in none
        self._use = np.zeros(1024, dtype=np.uint64)
        self._pinned = np.zeros(1024, dtype=bool)
        self._kin = np.zeros(1024, dtype=np.int64)  # blocks made at once, which must not become one
        self._count, self._families = 1, 0
        self._pinned[NONE] = True
        self._random = np.random.default_rng(0)

    def fresh(self, count: int, *, blocks: bool = False) -> np.ndarray:
        """New units, (count,); those that are blocks of others are never united with each other."""
        while self._count + count > len(self._up):
            for name in ("_up", "_block", "_use", "_pinned", "_kin"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        made = np.arange(self._count, self._count + count)
        self._up[made] = made
        if blocks:
            self._families += 1
            self._kin[made] = self._families
        self._count += count
        return made

    def find(self, units: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._up[units]
        while True:
            further = self._up[found]
            if np.array_equal(further, found):
                return found
            found = further

    def unite(self, first: np.ndarray, second: np.ndarray) -> None:
        """Let units move together, pair by pair (the arrays broadcast)."""
        pairs = np.stack([self.find(a).ravel() for a in np.broadcast_arrays(first, second)], axis=1)
        waiting = [tuple(pair) for pair in np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).tolist()]
        while waiting:
            a, b = (self._root(unit) for unit in waiting.pop())
            if a == b:
                continue
            if NONE in (a, b):
                self._pinned[a] = self._pinned[b] = True
                continue
            if self._kin[a] and self._kin[a] == self._kin[b]:
                self._pinned[[a, b]] = True
            self._up[b] = a
            with np.errstate(over="ignore"):  # sums are modulo 2^64
                self._use[a] += self._use[b]
            self._pinned[a] |= self._pinned[b]
            self._kin[a] = self._kin[a] or self._kin[b]
            blocks = self._block[a], self._block[b]
            self._block[a] = blocks[0] or blocks[1]
            if all(blocks):
                waiting.append((int(blocks[0]), int(blocks[1])))

    def put_under(self, units: np.ndarray, blocks: np.ndarray) -> None:
        """Let units move with blocks, pair by pair (the arrays broadcast)."""
        pairs = np.stack([self.find(a).ravel() for a in np.broadcast_arrays(units, blocks)], axis=1)
        for unit, block in np.unique(pairs, axis=0).tolist():
            unit, block = self._root(unit), self._root(block)
            if NONE in (unit, block) or unit == block:
                self._pinned[[unit, block]] = True
            elif self._block[unit]:
                self.unite(np.array([self._block[unit]]), np.array([block]))
            else:
                self._block[unit] = block

    def pin(self, units: np.ndarray) -> None:
        """Let units stay where they are."""
        self._pinned[self.find(np.unique(units))] = True

    def mark(self, arrays: Iterable[np.ndarray]) -> None:
        """Note that units take part in an operation, in the role of one of its operands each."""
        for units in arrays:
            role = self._random.integers(1, 2**63, dtype=np.uint64)
            found, times = np.unique(self.find(units), return_counts=True)
            with np.errstate(over="ignore"):
                self._use[found] += role * times.astype(np.uint64)

    def mark_places(self, units: np.ndarray, axes: Iterable[int]) -> None:
        """Note that the order along some axes matters: units at different positions along them differ in use."""
        wanted = set(axes)
        shape = [n if axis in wanted else 1 for axis, n in enumerate(units.shape)]
        roles = self._random.integers(1, 2**63, size=shape, dtype=np.uint64)
        with np.errstate(over="ignore"):
            np.add.at(self._use, self.find(units).ravel(), np.broadcast_to(roles, units.shape).ravel())

    def block_of(self, units: np.ndarray) -> np.ndarray:
        """The representatives of the blocks in which units lie; NONE where they lie in none."""
        return self.find(self._block[self.find(units)])

    def pinned(self, unit: int) -> bool:
        """Whether a unit has to stay."""
        return bool(self._pinned[self._root(unit)])

    def use(self, unit: int) -> int:
        """A number that is equal for units that every operation treats alike."""
        return int(self._use[self._root(unit)])

    def _root(self, unit: int) -> int:
        while self._up[unit] != unit:
            unit = int(self._up[unit])
        return unit


FIXED = -1


@dataclass(frozen=True)
class Group:
    """Units that may be permuted among each other; those in blocks stay with the others of their block."""

    name: str  # the first tensor and axis of its units
    units: np.ndarray  # positions among all that move, (n,)
    block: np.ndarray  # position of the block of each among the units of the group `within`, (n,); zeros for none
    within: int  # number of the group of the blocks, -1 for none

    def __len__(self) -> int:
        return len(self.units)


@dataclass(frozen=True, eq=False)
class Permutations:
    """All groups of a network. A permutation of its units is an array p: the unit p[i] comes to the place of unit i."""

    groups: Sequence[Group]  # blocks before what they hold
    size: int  # units that may move
    # By tensor and axis: the unit at every position, FIXED where nothing moves; (rows, columns) where the units along
    # the second axis depend on the row, as of grouped convolutions.
    places: Mapping[str, Mapping[int, np.ndarray]]

    @property
    def identity(self) -> np.ndarray:
        return np.arange(self.size)

    @cached_property
    def families(self) -> list[list[int]]:
        """Numbers of the groups: one without blocks around it, and all that its units hold, in this order."""
        found: dict[int, list[int]] = {}
        root: dict[int, int] = {}
        for k, group in enumerate(self.groups):
            root[k] = k if group.within < 0 else root[group.within]
            found.setdefault(root[k], []).append(k)
        return list(found.values())

    def random(self, generator: np.random.Generator, families: Iterable[int] | None = None) -> np.ndarray:
        """A random permutation of the units of some families, by default of all."""
        moved = self.identity
        for family in range(len(self.families)) if families is None else families:
            for k in self.families[family]:
                group = self.groups[k]
                if group.within < 0:
                    moved[group.units] = generator.permutation(group.units)
                    continue
                outer = self.groups[group.within].units
                for b, unit in enumerate(outer):
                    source = int(np.flatnonzero(outer == moved[unit])[0])
                    moved[group.units[group.block == b]] = generator.permutation(group.units[group.block == source])
        return moved

    def apply(self, tensors: Mapping[str, Tensor], moved: np.ndarray) -> dict[str, Tensor]:
        """The tensors with their units permuted; those that no permutation concerns are the same objects."""
        return {name: self.applied(name, tensor, moved) for name, tensor in tensors.items()}

    def applied(self, name: str, tensor: Tensor, moved: np.ndarray) -> Tensor:
        """One tensor with its units permuted along all axes, the first of them first."""
        for axis, units in sorted(self.places.get(name, {}).items()):
            source = _source(units, moved)
            if source.ndim == 1:
                if not np.array_equal(source, np.arange(len(source))):
                    tensor = tensor.index_select(axis, torch.from_numpy(source).to(tensor.device))
            else:
                index = torch.from_numpy(source).to(tensor.device)
                tensor = tensor.gather(1, index.reshape(*index.shape, *[1] * (tensor.dim() - 2)).expand(tensor.shape))
        return tensor

    def without(self, families: Iterable[int]) -> "Permutations":
        """The same without some families, whose units stay."""
        dropped = {k for family in families for k in self.families[family]}
        kept = [k for k in range(len(self.groups)) if k not in dropped]
        number = {k: i for i, k in enumerate(kept)}
        old = np.concatenate([self.groups[k].units for k in kept]) if kept else np.zeros(0, dtype=np.int64)
        new = np.full(self.size + 1, FIXED)
        new[old] = np.arange(len(old))
        groups = [
            replace(self.groups[k], units=new[self.groups[k].units], within=number.get(self.groups[k].within, -1))
            for k in kept
        ]
        places = {name: {axis: new[units] for axis, units in axes.items()} for name, axes in self.places.items()}
        return Permutations(groups, len(old), _moving(places))


def _source(units: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """For every position that from which its content comes: of the unit that moves there, its equally ranked place."""
    if units.ndim == 2:
        return _by_rows(units, moved)
    target = np.where(units == FIXED, FIXED, np.append(moved, FIXED)[units])
    source = np.arange(len(units))
    source[np.argsort(target, kind="stable")] = np.argsort(units, kind="stable")
    source[units == FIXED] = np.flatnonzero(units == FIXED)
    return source


def _by_rows(units: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """As `_source` along each row, after the rows have moved; rows with the same units hold them in the same order."""
    target = np.append(moved, FIXED)[units]
    here = np.argsort(np.argsort(target, axis=1, kind="stable"), axis=1, kind="stable")
    origin = {int(row.max()): r for r, row in enumerate(units)}
    came = units[[origin[int(row.max())] for row in target]]
    return np.take_along_axis(np.argsort(came, axis=1, kind="stable"), here, axis=1)


def permutations_of(units: Units, axes: Mapping[str, Mapping[int, np.ndarray]]) -> Permutations:
    """The groups of the units of a recorded forward pass, by tensor and axis."""
    roots = {name: {axis: units.find(array) for axis, array in of.items()} for name, of in axes.items()}
    first: dict[int, str] = {}
    for name, of in roots.items():
        for axis, array in of.items():
            for unit in np.unique(array).tolist():
                first.setdefault(unit, f"{name}:{axis}")
    block: dict[int, int] = {}
    waiting = list(first)
    while waiting:
        unit = waiting.pop()
        if unit not in block:
            block[unit] = int(units.block_of(np.array([unit]))[0])
            waiting += [block[unit]] if block[unit] != NONE else []
    frozen = {unit for unit in block if _in_circle(unit, block)}
    inside: dict[int, list[int]] = defaultdict(list)
    for unit, outer in block.items():
        if outer != NONE and unit not in frozen:
            inside[outer].append(unit)
    kinds: dict[int, object] = {}

    def kind(unit: int) -> object:
        if unit not in kinds:
            held = Counter(map(kind, inside[unit]))
            own = unit if units.pinned(unit) else NONE  # nothing is like a unit that stays, or a block with one
            kinds[unit] = hash((units.use(unit), own, frozenset(held.items())))
        return kinds[unit]

    sets: dict[object, list[int]] = {}
    key: dict[int, object] = {}
    for unit in sorted(block, key=lambda u: (_depth(u, block, frozen), u)):
        outer = block[unit]
        if unit in frozen or units.pinned(unit):
            key[unit] = ("fixed", unit)
            continue
        key[unit] = (kind(unit), key[outer] if outer != NONE else None)
        sets.setdefault(key[unit], []).append(unit)
    return _numbered(sets, key, block, first, roots)


def _numbered(
    sets: Mapping[object, list[int]], key: Mapping[int, object], block: Mapping[int, int], first: Mapping[int, str],
    roots: Mapping[str, Mapping[int, np.ndarray]],
) -> Permutations:  # fmt: skip
    """Groups with more than one unit, and those that hold some."""
    kept = {which: found for which, found in sets.items() if len(found) > 1}
    number = {which: k for k, which in enumerate(kept)}
    groups: list[Group] = []
    position: dict[int, int] = {}
    count = 0
    for found in kept.values():
        outer = block[found[0]]
        within = number.get(key[outer], -1) if outer != NONE else -1
        if within >= 0:
            where = {unit: i for i, unit in enumerate(kept[key[outer]])}
            blocks = np.array([where[block[unit]] for unit in found])
        else:
            blocks = np.zeros(len(found), dtype=np.int64)
        position |= {unit: count + i for i, unit in enumerate(found)}
        named = [first[unit] for unit in found if unit in first]
        groups.append(Group(min(named, default="blocks"), np.arange(count, count + len(found)), blocks, within))
        count += len(found)
    lookup = np.full(max([*position, NONE]) + 1, FIXED)
    for unit, place in position.items():
        lookup[unit] = place
    places = {
        name: {
            axis: np.where(array < len(lookup), lookup[np.minimum(array, len(lookup) - 1)], FIXED)
            for axis, array in of.items()
        }
        for name, of in roots.items()
    }
    return Permutations(groups, count, _moving(places))


def _moving(places: Mapping[str, Mapping[int, np.ndarray]]) -> dict[str, dict[int, np.ndarray]]:
    """Only what moves."""
    found = {
        name: {axis: units for axis, units in axes.items() if (units != FIXED).any()} for name, axes in places.items()
    }
    return {name: axes for name, axes in found.items() if axes}


def _depth(unit: int, block: Mapping[int, int], frozen: set[int]) -> int:
    depth = 0
    while unit not in frozen and block[unit] != NONE:
        unit, depth = block[unit], depth + 1
    return depth


def _in_circle(unit: int, block: Mapping[int, int]) -> bool:
    seen = set()
    while unit != NONE and unit not in seen:
        seen.add(unit)
        unit = block[unit]
    return unit != NONE
