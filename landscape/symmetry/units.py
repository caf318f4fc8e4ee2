"""Units of a network, such as channels, and what is known of which of them have to move together."""

from collections.abc import Iterable

import numpy as np

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
        """The representatives of units, of the same shape."""
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
