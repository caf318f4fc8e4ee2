"""Scheduling of units over workers: sizes of chunks, dead workers, units that kill, slow workers; and a simulation."""

from __future__ import annotations

import pytest
from simulated_workers import Cluster, Simulation

from landscape.running.schedule import TRIES, Schedule


def worked(schedule: Schedule, worker: str, workers: int = 2, seconds: float = 1.0) -> list[int]:
    """Let a worker measure its next chunk."""
    chunk = schedule.next(worker, workers, 0.0)
    assert chunk is not None
    for unit in chunk.units:
        schedule.finished(worker, unit, seconds, 0.0)
    schedule.idle(worker)
    return list(chunk.units)


def test_chunks_take_the_wanted_time_and_shrink_towards_the_end() -> None:
    schedule, sizes = Schedule(1000, seconds=1.0), []
    while not schedule.complete:
        sizes.append(len(worked(schedule, "a", seconds=0.01)))
    assert sizes[:3] == [1, 100, 100]
    assert sizes[-3:] == [1, 1, 1]
    assert sum(sizes) == 1000


def test_the_setup_of_a_chunk_takes_a_tenth_of_it() -> None:
    schedule = Schedule(1000, seconds=1.0, shared_setup=True)
    chunk = schedule.next("a", 2, 0.0)
    assert chunk is not None
    assert chunk.units == [0, 1]
    schedule.finished("a", 0, 6.0, 0.0)
    schedule.finished("a", 1, 1.0, 0.0)
    schedule.idle("a")
    assert (schedule.setup_seconds, schedule.unit_seconds) == (5.0, 1.0)
    assert len(worked(schedule, "a")) == 50


def test_units_of_few_workers_with_a_setup_are_shared_out_at_once() -> None:
    schedule = Schedule(4, seconds=1.0, shared_setup=True)
    assert [schedule.next(worker, 2, 0.0).units for worker in "ab"] == [[0, 1], [2, 3]]  # type: ignore[union-attr]


def test_where_results_come_one_by_one_a_chunk_with_setup_is_a_share_and_what_is_not_begun_moves() -> None:
    schedule = Schedule(40, seconds=1.0, shared_setup=True, one_by_one=True)
    assert [len(schedule.next(worker, 2, 0.0).units) for worker in "ab"] == [20, 20]  # type: ignore[union-attr]
    for unit in range(20):
        schedule.finished("a", unit, 3.0 if unit == 0 else 1.0, 0.0)
    schedule.idle("a")
    taken = schedule.next("a", 2, 0.0)
    assert taken is not None
    assert (taken.units, taken.taken_from) == (list(range(30, 40)), "b")
    assert schedule.lost("b") == list(range(20, 30))
    assert [worked(schedule, "c", 2), worked(schedule, "c", 2)] == [list(range(21, 30)), [20]]


def test_units_of_a_dead_worker_are_measured_again_one_by_one() -> None:
    schedule = Schedule(8, seconds=100.0)
    worked(schedule, "a")
    chunk = schedule.next("a", 1, 0.0)
    assert chunk is not None
    assert chunk.units == [1, 2, 3, 4]
    schedule.finished("a", 1, 1.0, 0.0)
    assert schedule.lost("a") == [2, 3, 4]
    left = []
    while not schedule.complete:
        left.append(worked(schedule, "b", 1))
    assert left == [[5, 6], [7], [2], [3], [4]]


def test_a_unit_that_kills_is_given_up_after_three_deaths_and_the_others_are_finished() -> None:
    schedule, deaths = Schedule(20, seconds=5.0), 0
    while not schedule.complete:
        chunk = schedule.next("a", 1, 0.0)
        assert chunk is not None
        for unit in list(chunk.units):
            if unit == 11:
                schedule.lost("a")
                deaths += 1
                break
            schedule.finished("a", unit, 1.0, 0.0)
        else:
            schedule.idle("a")
    assert schedule.poisoned == [11]
    assert deaths <= TRIES + 1


def test_a_unit_that_kills_two_workers_which_repeat_it_is_given_up_once() -> None:
    schedule = Schedule(2, seconds=1.0)
    assert worked(schedule, "a") == [0]
    assert [schedule.next("a", 1, 0.0).units, schedule.next("b", 2, 60.0).units] == [[1], [1]]  # type: ignore[union-attr]
    assert not schedule.lost("a", deaths=TRIES)
    assert not schedule.lost("b", deaths=TRIES)
    assert (schedule.poisoned, schedule.complete) == ([1], True)


def test_an_idle_worker_takes_what_another_has_not_begun() -> None:
    schedule = Schedule(12, seconds=100.0)
    worked(schedule, "a", 1)
    mine = schedule.next("a", 1, 0.0)
    rest = schedule.next("b", 1, 0.0)
    assert mine is not None
    assert rest is not None
    while len(rest.units) > 1:
        worked_off = schedule.next("b", 1, 0.0)
        for unit in rest.units:
            schedule.finished("b", unit, 1.0, 0.0)
        if worked_off is None or worked_off.taken_from:
            break
        rest = worked_off
    schedule = Schedule(5, seconds=100.0)
    worked(schedule, "a", 1)
    slow = [schedule.next(worker, 1, 0.0) for worker in "abc"]
    assert [chunk.units for chunk in slow if chunk] == [[1, 2], [3], [4]]
    schedule.finished("b", 3, 1.0, 0.0)
    schedule.idle("b")
    taken = schedule.next("b", 1, 0.0)
    assert taken is not None
    assert (taken.units, taken.taken_from) == ([2], "a")


def assert_repeated(schedule: Schedule, slow_after: float) -> None:
    """Assert that an idle worker takes the other's unit again, not yet at `slow_after` but long after it."""
    for worker in "ab":
        assert schedule.next(worker, 2, 0.0) is not None
    assert schedule.finished("b", 2, 1.0, 1.0)
    schedule.idle("b")
    assert schedule.next("b", 2, slow_after) is None
    repeated = schedule.next("b", 2, 2 * slow_after)
    assert repeated is not None
    assert repeated.units == [1]


def test_a_unit_that_takes_far_longer_than_others_is_measured_twice_and_counts_once() -> None:
    schedule = Schedule(3, seconds=1.0)
    worked(schedule, "a")
    assert_repeated(schedule, slow_after=2.0)
    assert schedule.finished("b", 1, 1.0, 5.0)
    assert not schedule.finished("a", 1, 10.0, 10.0)
    assert schedule.complete


def test_a_unit_that_brings_those_of_its_row_is_not_slow() -> None:
    schedule = Schedule(3, seconds=1.0)
    worked(schedule, "a")
    for seconds in (30.0, *[0.1] * 20):  # a row, which a GPU computes at once
        schedule._learn(seconds, fresh=False)
    assert_repeated(schedule, slow_after=40.0)


@pytest.mark.campaign
@pytest.mark.parametrize(("workers", "least"), [(1, 0.9), (100, 0.9)])
def test_simulated_workers_are_used_although_some_are_slow_stall_and_die(workers: int, least: float) -> None:
    cluster = Cluster(workers)
    outcome = Simulation(10_000, cluster).run()
    assert outcome.deaths > 0
    assert outcome.measured < 1.03 * 10_000
    assert outcome.efficiency(10_000, cluster) >= least
