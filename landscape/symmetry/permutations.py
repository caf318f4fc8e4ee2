"""The permutations of a network's units that leave its function unchanged, from one recorded forward pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from landscape.symmetry.units import NONE, Units

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
        """The permutation that moves nothing."""
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

    def without(self, families: Iterable[int]) -> Permutations:
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
