"""Replays of recorded computations, with a recorder that runs the work again: what a CUDA graph does with addresses."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from analytic import convolution_net, tanh_net
from recording import Recorder
from torch import Tensor

from landscape.subject import graph_replay
from landscape.subject.graph_replay import GraphReplay, Work
from landscape.subject.subject import Subject
from landscape.weight_space import forward_mode
from landscape.weight_space.forward_mode import _layout, _of_tensors
from landscape.weight_space.plane_evaluator import PlaneEvaluator
from landscape.weight_space.planes import plane_of

CPU = torch.device("cpu")


class Function:
    """(a, b, v) -> [a * v, b + v], which counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor, v: Tensor) -> list[Tensor]:
        self.calls += 1
        return [a * v, b + v]


def _numbers(seed: int) -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(seed))


def _agrees(found: Sequence[Tensor], a: Tensor, b: Tensor, v: Tensor) -> bool:
    return torch.equal(found[0], a * v) and torch.equal(found[1], b + v)


def test_one_recording_serves_every_set_of_kept_tensors() -> None:
    recorder = Recorder()
    replay = GraphReplay(Function(), "test", capture=recorder)
    for seed in (0, 10, 20):
        a, b = _numbers(seed), _numbers(seed + 1)
        bound = replay.at([a, b])
        for turn in range(3):
            v = _numbers(seed + 2 + turn)
            assert _agrees(bound(v), a, b, v)
    assert (recorder.recordings, recorder.replays) == (1, 9)


def test_kept_tensors_are_released_once_they_are_at_the_addresses() -> None:
    replay = GraphReplay(Function(), "test", capture=Recorder())
    first, second = (replay.at([_numbers(seed), _numbers(seed + 1)]) for seed in (0, 10))
    first(_numbers(2))
    del first
    second(_numbers(2))
    assert [t.data_ptr() for t in second.kept] == [t.data_ptr() for t in replay._kept]


def test_sets_that_are_used_in_turn_stay_apart() -> None:
    replay = GraphReplay(Function(), "test", capture=Recorder())
    sets = [(_numbers(seed), _numbers(seed + 1)) for seed in (0, 10)]
    bound = [replay.at(kept) for kept in sets]
    for turn in range(6):
        (a, b), v = sets[turn % 2], _numbers(20 + turn)
        assert _agrees(bound[turn % 2](v), a, b, v)


def test_the_callers_tensors_are_not_written_to() -> None:
    replay = GraphReplay(Function(), "test", capture=Recorder())
    a, b, v = _numbers(0), _numbers(1), _numbers(2)
    replay.at([a, b])(v)
    replay.at([_numbers(3), _numbers(4)])(_numbers(5))
    for seed, tensor in enumerate((a, b, v)):
        assert torch.equal(tensor, _numbers(seed))


def test_a_replay_that_differs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(wrong_by=0.1)
    replay = GraphReplay(Function(), "test", capture=recorder)
    a, b, v = _numbers(0), _numbers(1), _numbers(2)
    bound = replay.at([a, b])
    with caplog.at_level(logging.DEBUG, logger="landscape"):
        for _ in range(3):
            assert _agrees(bound(v), a, b, v)
    assert recorder.replays == 1
    assert len(caplog.messages) == 1
    assert "no CUDA graph of the test (a replay of length" in caplog.messages[0]


def test_a_recording_that_misses_a_kernel_is_not_used() -> None:
    recorder = Recorder(misses=True)
    a, b = _numbers(0), _numbers(1)
    bound = GraphReplay(Function(), "test", capture=recorder).at([a, b])
    for seed in (2, 2, 3):  # the first products are often of one vector: those that choose a backend
        v = _numbers(seed)
        assert _agrees(bound(v), a, b, v)
    assert recorder.replays == 1


def test_what_a_recording_prepares_stays_at_its_addresses_for_another() -> None:
    recorder = Recorder()
    prepare = GraphReplay(lambda x: [x + 1, 2 * x], "test", capture=recorder)
    replay = GraphReplay(Function(), "test", capture=recorder)

    def prepared(x: Tensor) -> Callable[..., Sequence[Tensor]]:
        replay.release()
        return replay.at(prepare.at([])(x), of=prepare)

    inputs = [_numbers(seed) for seed in range(4)]
    products = [prepared(x) for x in inputs]  # all before the first is called
    for turn in range(2):
        for x, product in zip(inputs, products, strict=True):
            assert _agrees(product(v := _numbers(9 + turn)), x + 1, 2 * x, v)
    held = [t.data_ptr() for t in replay._kept]
    assert held == [t.data_ptr() for t in prepare._results]
    replay.forget(), prepare.forget()
    for x in inputs[:2]:
        assert _agrees(prepared(x)(v), x + 1, 2 * x, v)
    assert recorder.recordings == 4


def test_as_many_replays_are_compared_as_asked_for() -> None:
    recorder, function = Recorder(), Function()
    bound = GraphReplay(function, "test", checks=2, capture=recorder).at([_numbers(0), _numbers(1)])
    for seed in range(5):
        bound(_numbers(seed))
    plain = function.calls - recorder.recordings - recorder.replays
    assert plain == 2


def test_results_that_are_zero_or_not_finite_prove_nothing_and_are_no_difference() -> None:
    for value in (0.0, torch.nan):
        recorder = Recorder(wrong_by=0.1)
        bound = GraphReplay(lambda a, v: [a * v], "test", capture=recorder).at([_numbers(0)])
        bound(torch.full((4,), value))
        v = _numbers(2)
        assert torch.equal(bound(v)[0], _numbers(0) * v)
        assert recorder.replays == 2
    recorder, v = Recorder(), torch.tensor([1.0, torch.nan, torch.inf, 2.0])
    bound = GraphReplay(lambda v: [2 * v], "test", capture=recorder).at([])
    for _ in range(3):
        torch.testing.assert_close(bound(v)[0], 2 * v, equal_nan=True)
    assert recorder.replays == 3


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("stream is capturing\nx")]
)
def test_where_recording_fails_the_function_runs_plainly(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(work: Work, device: torch.device) -> tuple[Callable[[], None], Sequence[Tensor]]:
        raise error

    bound = GraphReplay(Function(), "test", capture=refuse).at([_numbers(0), _numbers(1)])
    with caplog.at_level(logging.DEBUG, logger="landscape"):
        for seed in (2, 3):
            assert _agrees(bound(_numbers(seed)), _numbers(0), _numbers(1), _numbers(seed))
    assert len(caplog.messages) == 1
    assert "\n" not in caplog.messages[0]


def test_other_shapes_run_plainly() -> None:
    recorder = Recorder()
    bound = GraphReplay(lambda v: [v * 2], "test", capture=recorder).at([])
    for count in (4, 3, 4):
        v = torch.ones(count)
        assert torch.equal(bound(v)[0], 2 * v)
    assert recorder.replays == 2


def test_on_a_cpu_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_replay, "cuda_capture", None)
    function = Function()
    a, b, v = _numbers(0), _numbers(1), _numbers(2)
    assert _agrees(GraphReplay(function, "test").at([a, b])(v), a, b, v)
    assert function.calls == 1


# --- Replayed forward passes of a surface, with a recorder in place of CUDA graphs ---


def _replay_by(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record as on a GPU."""
    monkeypatch.setattr(forward_mode, "_on_gpu", lambda subject: True)
    monkeypatch.setattr(forward_mode, "GraphReplay", partial(GraphReplay, capture=recorder))


POINTS = [(x, y, x == y) for x in (-1.0, 0.0, 0.5) for y in (-1.0, 0.5)]


def _surface(subject: Subject, **options: Any) -> list[dict[str, float]]:
    plane = plane_of(subject, "random", normalize="filter", ignore="bias", seed=0)
    with PlaneEvaluator(subject, plane, **options) as evaluator:
        return list(evaluator.evaluate(POINTS))


@pytest.mark.parametrize("network", [tanh_net, convolution_net])
def test_a_surface_of_replays_is_that_of_plain_passes_bit_for_bit(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _surface(network())
    recorder = Recorder()
    _replay_by(recorder, monkeypatch)
    subject = network()
    replayed = _surface(subject)
    assert repr(replayed) == repr(plain)
    shapes = {inputs.shape for inputs, _ in subject.batches}
    assert recorder.recordings == 2 * len(shapes)  # at the origin, and with sums, for every size of mini-batches
    assert recorder.replays > len(POINTS)


def test_a_recording_that_does_not_follow_the_weights_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a model that reads its weights into Python: equal where they are recorded, found out at the next point."""
    plain = _surface(tanh_net(sizes=(6,)))
    recorder = Recorder(stale=True)
    _replay_by(recorder, monkeypatch)
    with caplog.at_level(logging.DEBUG, logger="landscape"):
        assert repr(_surface(tanh_net(sizes=(6,)))) == repr(plain)
    assert (recorder.recordings, recorder.replays) == (2, 4)
    assert sum("no CUDA graph of the forward pass" in message for message in caplog.messages) == 2


def test_recording_takes_batches_that_are_nothing_but_tensors() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    assert _of_tensors(({"x": a, "mask": [b, (a,)]}, b))
    assert not _of_tensors(({"x": a, "length": 3}, b))
    assert _layout(({"x": a}, b)) == _layout(({"x": a + 1}, b + 1))
    assert _layout(({"x": a}, b)) != _layout(({"x": a[:1]}, b))
    assert _layout(({"x": a}, b)) != _layout(({"x": a.double()}, b))
