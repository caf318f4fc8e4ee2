"""Simulate a run on many workers: the scheduling code of `landscape`, with units that only take time.

Workers differ in speed, stall now and then, and die; one process receives every result, one after the other.
"""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

from landscape.running import dask_cluster, schedule


@dataclass(frozen=True)
class Cluster:
    """What the simulated machines are like; times in seconds."""

    workers: int
    unit: float = 1.0  # mean time of a unit on a usual worker
    spread: float = 0.1  # standard deviation of its logarithm
    stalls: float = 0.002  # share of units that take ten times as long where they run
    slow: float = 0.02  # share of workers with half the speed
    deaths: float = 0.001  # per second and worker
    notice: float = 1.0  # until a dead worker is noticed
    restart: float = 10.0  # from then until it is replaced
    latency: float = 0.01  # between a worker and the process that receives results, both ways
    per_unit: float = 0.0003  # of that process for a result, and for a chunk
    per_chunk: float = 0.002


@dataclass(frozen=True)
class Outcome:
    """What a simulated run took."""

    seconds: float
    measured: int  # units, with those that were measured more than once
    deaths: int
    busy: float  # share of the time in which the receiving process works

    def efficiency(self, units: int, cluster: Cluster) -> float:
        """Time of all units on usual workers, over the time of all workers."""
        return units * cluster.unit / (cluster.workers * self.seconds)


class Simulation:
    """One run; `seed` decides what happens in it."""

    def __init__(self, units: int, cluster: Cluster, seed: int = 0) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self._schedule = schedule.Schedule(units, seconds=dask_cluster.CHUNK_SECONDS)
        self._speed = [0.5 if i < round(cluster.slow * cluster.workers) else 1.0 for i in range(cluster.workers)]
        self._events: list[tuple[float, int, int, list[tuple[int, float]], bool]] = []
        self._idle = list(range(cluster.workers))
        self._free = self._worked = 0.0  # when the receiving process is free, and for how long it has worked
        self._measured = self._deaths = 0

    def run(self) -> Outcome:
        """Go from event to event until every unit is finished."""
        self._employ(0.0)
        while not self._schedule.complete:
            now, _, worker, results, died = heapq.heappop(self._events)
            if now == float("inf"):
                break
            cost = self._cluster.per_chunk + self._cluster.per_unit * len(results)
            self._free, self._worked = max(now, self._free) + cost, self._worked + cost
            for unit, seconds in results:
                self._schedule.finished(worker, unit, seconds, self._free)
            if died:
                self._schedule.lost(worker)
                heapq.heappush(self._events, (now + self._cluster.restart, -self._deaths, worker, [], False))
            else:
                self._schedule.idle(worker)
                self._idle.append(worker)
            self._employ(self._free)
        return Outcome(self._free, self._measured, self._deaths, self._worked / self._free)

    def _employ(self, now: float) -> None:
        while self._idle:
            chunk = self._schedule.next(self._idle[-1], self._cluster.workers, now)
            if chunk is None:
                if not self._events:
                    self._events.append((float("inf"), 0, 0, [], False))
                return
            worker = self._idle.pop()
            results = list(self._results(worker, list(chunk.units)))
            died = len(results) < len(chunk.units)
            end = now + self._cluster.latency + sum(seconds for _, seconds in results)
            if died:  # results of a chunk come together, and are lost together
                self._deaths += 1
                end, results = end + self._cluster.notice, []
            heapq.heappush(self._events, (end, self._measured, worker, results, died))

    def _results(self, worker: int, units: list[int]) -> Iterator[tuple[int, float]]:
        for unit in units:
            self._measured += 1
            if self._random.random() < self._cluster.deaths * self._cluster.unit:
                return
            seconds = self._cluster.unit * self._random.lognormvariate(
                -(self._cluster.spread**2) / 2, self._cluster.spread
            )
            yield unit, seconds / self._speed[worker] * (10 if self._random.random() < self._cluster.stalls else 1)
