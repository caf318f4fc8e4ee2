"""Thread counts: a limit that the user sets, a fixed rule for small networks, time by the clock for others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.probes.trace import Trace
from landscape.running.run import run
from landscape.subject import threads
from landscape.subject.loading.load import load
from landscape.subject.subject import Subject
from landscape.subject.threads import fastest_threads, fixed_threads, intra_op_threads, suitable_threads, thread_limit

LARGE = threads.SMALL // 10


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "_quota", lambda: 8)
    with intra_op_threads(4):
        yield


def _subject(parameters: int) -> Subject:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(parameters))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight[:3]

    return load(Network(), data=[(torch.ones(16, 3), torch.zeros(16, dtype=torch.long))])


def test_a_small_network_has_one_thread_whatever_the_clock_says_and_a_large_one_is_not_small_if_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "fastest_threads", lambda work, limit: limit)
    with suitable_threads(_subject(10)):
        assert torch.get_num_threads() == 1
        assert thread_limit() == 4  # the limit that nested measurements see
    assert torch.get_num_threads() == 4
    with suitable_threads(_subject(LARGE)):
        assert torch.get_num_threads() == 4
    subject = _subject(LARGE)
    subject.model.requires_grad_(False)
    with suitable_threads(subject):
        assert torch.get_num_threads() == 4


@pytest.mark.slow
def test_no_threads_are_timed_for_a_finished_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed: list[int] = []

    def noted(work: object, limit: int) -> int:
        timed.append(limit)
        return limit

    monkeypatch.setattr(threads, "fastest_threads", noted)
    subject, probe = _subject(LARGE), Trace(vectors=4, kinks="single")
    measured = [run(probe, replace(subject), tmp_path / "r.h5").measured for _ in range(2)]
    assert (measured, timed) == ([1, 0], [4])


def test_training_has_as_many_threads_as_a_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with fixed_threads(32, nn.Linear(10, 10)):
        assert torch.get_num_threads() == 1
    with fixed_threads(threads.SMALL // 100, nn.Linear(10, 10)):
        assert torch.get_num_threads() == 4
    assert torch.get_num_threads() == 4


def test_the_threads_of_the_caller_are_restored_after_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), suitable_threads(_subject(10)):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == thread_limit() == 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have passed, which only a test changes; there is no processor time."""
    now = [0.0]
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_the_fastest_threads_by_the_clock_are_taken_and_not_by_processor_time(clock: list[float]) -> None:
    def waits_for_other_threads() -> None:
        clock[0] += 0.002 * torch.get_num_threads()

    def gains_from_threads() -> None:
        clock[0] += 0.008 / torch.get_num_threads()

    assert fastest_threads(waits_for_other_threads, 4) == 1
    assert fastest_threads(gains_from_threads, 4) == 4
    assert torch.get_num_threads() == 4


def test_slow_work_is_timed_once(clock: list[float]) -> None:
    runs: list[int] = []

    def work() -> None:
        runs.append(torch.get_num_threads())
        clock[0] += 2 * max(threads.LONG, threads.ENOUGH)

    assert fastest_threads(work, 4) == 4
    assert runs == [4]


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, os.cpu_count()),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, os.cpu_count()),
        ({}, os.cpu_count()),
    ],
)
def test_the_cpu_quota_of_a_container(
    files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(threads, "CGROUPS", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    threads._quota.cache_clear()
    assert threads._quota() == cpus
    threads._quota.cache_clear()


def test_a_quota_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_quota", lambda: 3)
    assert thread_limit() == 3


def test_a_busy_machine_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(threads, "_noted", set())
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with caplog.at_level("DEBUG", logger="landscape"):
        monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 2.0, 2.0))
        threads.note_load(2)
        assert not caplog.messages
        monkeypatch.setattr(os, "getloadavg", lambda: (6.13, 2.0, 2.0))
        threads.note_load(1)
        threads.note_load(1)
    assert caplog.messages == ["load 6.1 on 2 CPUs; 1 thread per operation"]


def test_a_network_whose_loss_cannot_be_computed_is_timed_by_its_outputs() -> None:
    subject = _subject(LARGE)
    without_classifier = replace(subject, batches=[(torch.ones(16, 3), torch.full((16,), 7))])
    with pytest.raises(IndexError):
        without_classifier.loss(0)
    with suitable_threads(without_classifier):
        assert torch.get_num_threads() <= 4


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_a_system_that_does_not_say_its_load_counts_as_idle(error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[float, float, float]:
        raise error

    monkeypatch.setattr(os, "getloadavg", unknown)
    with suitable_threads(_subject(LARGE)):
        assert 1 <= torch.get_num_threads() <= 4


def test_threads_are_set_for_batches_without_a_length() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x, self.y = torch.ones(5, 3), torch.zeros(5).long()

    class Network(nn.Linear):
        def forward(self, data: Graph) -> Tensor:
            return super().forward(data.x)

    def loss(outputs: Tensor, batch: Graph) -> Tensor:
        return F.cross_entropy(outputs, batch.y)

    with suitable_threads(load(Network(3, 2), data=[Graph()], loss=loss)):
        assert torch.get_num_threads() == 1
