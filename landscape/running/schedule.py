"""Decide which worker measures which units: sizes of chunks, units of dead workers, units that kill, slow workers.

Pure policy, without processes and clocks: local workers, dask and a simulation of the tests use it.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

TRIES = 3  # deaths of a worker with the same unit alone, after which the unit is given up
SETUP_SHARE = 0.1  # of the time of a chunk that may go into its set-up
HANDLING = 0.01  # seconds of a chunk per worker, so that the one process that takes all results keeps up
SLOW = 3.0  # times the mean time of a unit, after which an idle worker measures the same unit too
LATENCY = 0.05  # seconds of work that are not worth a worker of their own
SLOWEST = 2.0  # seconds before which no unit counts as slow


@dataclass
class _Chunk:
    """What a worker has been given and has not finished; the first of it is being measured."""

    units: list[int]
    since: float  # when its first unit was begun
    fresh: bool = True  # nothing of it is finished: the time of its first unit includes the set-up


@dataclass(frozen=True)
class Chunk:
    """Units for a worker, in order; `taken_from` is the worker that need not measure them any more."""

    units: Sequence[int]
    taken_from: Hashable | None = None


class Schedule:
    """Distributes units 0 to n - 1 over workers that may come, go and die at any time.

    A chunk takes about `seconds`, longer with hundreds of workers, and at most half of a worker's share of what is
    left, so that all end together. With `shared_setup` it is large enough that its set-up, which is measured, takes a
    tenth of its time at most; with results `one_by_one`, which show what is not begun, it is a worker's whole share.
    When nothing is left, an idle worker takes over what others have not begun, or repeats a unit that takes far longer
    than the others: units give the same numbers everywhere, and the first result counts.
    """

    def __init__(self, units: int, *, seconds: float, shared_setup: bool = False, one_by_one: bool = False) -> None:
        self.units = units
        self._seconds, self._shared_setup, self._one_by_one = seconds, shared_setup, one_by_one
        self._pending = deque(range(units))
        self._alone: deque[int] = deque()  # units that a worker died with: measured last, each as its own chunk
        self._suspects: set[int] = set()
        self._deaths: dict[int, int] = {}
        self._chunks: dict[Hashable, _Chunk] = {}
        self._repeated: set[int] = set()
        self._done: set[int] = set()
        self.poisoned: list[int] = []  # units that were given up
        self.unit_seconds = 0.0  # mean of the recent units, without set-up; 0 while unknown
        self._longest = 0.0  # of the recent ones: of those that come together, as a row, the first takes all the time
        self.setup_seconds = 0.0
        self._first = 0.0  # seconds of the first unit of all, with its set-up

    @property
    def complete(self) -> bool:
        """Whether every unit is finished or given up."""
        return len(self._done) + len(self.poisoned) == self.units

    def next(self, worker: Hashable, workers: int, now: float) -> Chunk | None:
        """What an idle worker measures next; None: nothing for now. `workers`: their present number."""
        taken_from = None
        if self._pending:
            units = [self._pending.popleft() for _ in range(self._size(workers))]
        elif self._alone:
            units = [self._alone.popleft()]
        else:
            units, taken_from = self._not_begun()
            units = units or self._slow(now)
        units = [unit for unit in units if unit not in self._done]
        if not units:
            return None
        self._chunks[worker] = _Chunk(list(units), now)
        return Chunk(units, taken_from)

    def finished(self, worker: Hashable, unit: int, seconds: float, now: float) -> bool:
        """Note a result, which took so many seconds; whether it is the first of its unit."""
        chunk = self._chunks.get(worker)
        if chunk is not None and unit in chunk.units:
            chunk.units.remove(unit)
            self._learn(seconds, fresh=chunk.fresh)
            chunk.since, chunk.fresh = now, False
        if unit in self._done or unit in self.poisoned:
            return False
        self._done.add(unit)
        return True

    def spent(self, worker: Hashable) -> bool:
        """Whether a worker has finished every unit of its chunk, and only has yet to say that it has ended."""
        chunk = self._chunks.get(worker)
        return chunk is not None and not chunk.units

    def idle(self, worker: Hashable) -> None:
        """A worker has ended its chunk."""
        self._return(self._chunks.pop(worker, None))

    def lost(self, worker: Hashable, deaths: int = 1) -> list[int]:
        """A worker is gone, after so many deaths with its chunk; the units that are measured again.

        The one that was being measured is measured alone from now on, or all, where results do not come one by one; one
        that was alone is given up after `TRIES` deaths.
        """
        chunk = self._chunks.pop(worker, None)
        if chunk is None or not chunk.units:
            return []
        first, alone = chunk.units[0], len(chunk.units) == 1
        self._deaths[first] = self._deaths.get(first, 0) + (deaths if alone else 1)  # it was being measured
        self._suspects.update(chunk.units[:1] if self._one_by_one else chunk.units)
        if alone and self._deaths[first] >= TRIES and first not in self._done:
            if first not in self.poisoned:  # two workers may have died with it, one of which repeated it
                self.poisoned.append(first)
            return []
        return self._return(chunk)

    def _return(self, chunk: _Chunk | None) -> list[int]:
        """Queue what of a chunk nobody else has."""
        elsewhere = {unit for other in self._chunks.values() for unit in other.units} | self._done | {*self.poisoned}
        gone = [u for u in (chunk.units if chunk else ()) if u not in elsewhere]
        for unit in gone:
            self._repeated.discard(unit)
            if unit in self._suspects:
                self._alone.append(unit)
            else:
                self._pending.append(unit)
        return gone

    def _size(self, workers: int) -> int:
        left, workers = len(self._pending), max(workers, 1)
        share = math.ceil(left / (2 * workers))
        if self._shared_setup and self._one_by_one:
            return min(math.ceil(self.units / workers), left)
        if not self.unit_seconds:  # two tell the set-up from the units
            return min(2, math.ceil(self.units / workers), left) if self._shared_setup else 1
        wanted = max(1, int(max(self._seconds, HANDLING * workers) / self.unit_seconds))
        if self._shared_setup:
            least = math.ceil(self.setup_seconds / (SETUP_SHARE * self.unit_seconds))
            return min(max(wanted, least), max(share, min(least, math.ceil(left / workers))))
        return min(wanted, share)

    def _not_begun(self) -> tuple[list[int], Hashable | None]:
        """The later half of the chunk with most units that are not begun, and whose it is."""
        found = [(len(chunk.units), worker) for worker, chunk in self._chunks.items()]
        most, worker = max(found, key=lambda pair: pair[0], default=(0, None))
        begun = (most + 1) // 2
        if most < 2 or begun * self.unit_seconds <= max(self.setup_seconds, LATENCY):
            return [], None
        chunk = self._chunks[worker]
        chunk.units, units = chunk.units[:begun], chunk.units[begun:]
        return units, worker

    def _slow(self, now: float) -> list[int]:
        """The unit that has been measured for the longest time, if for far longer than usual."""
        limit = max(SLOW * max(self.unit_seconds, self._longest), SLOWEST)
        begun = [
            (chunk.since + (self.setup_seconds if chunk.fresh else 0.0), chunk.units[0])
            for chunk in self._chunks.values()
            if chunk.units and chunk.units[0] not in self._repeated | self._suspects
        ]
        if not begun or not self.unit_seconds or now - min(begun)[0] < limit:
            return []
        unit = min(begun)[1]
        self._repeated.add(unit)
        return [unit]

    def _learn(self, seconds: float, *, fresh: bool) -> None:
        if fresh and self._shared_setup:
            if not self.unit_seconds:
                self._first = seconds
            else:
                self.setup_seconds = max(seconds - self.unit_seconds, 0.0)
            return
        self._longest = max(seconds, 0.98 * self._longest)
        weight = 0.2 if self.unit_seconds else 1.0
        if not self.unit_seconds and self._shared_setup:
            self.setup_seconds = max(self._first - seconds, 0.0)
        self.unit_seconds += weight * (max(seconds, 1e-9) - self.unit_seconds)
