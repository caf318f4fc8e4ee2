"""Replayed forward passes of a surface, with a recorder in place of CUDA graphs."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from analytic import convolution_net, tanh_net
from recording import Recorder

from landscape.subject.graph_replay import GraphReplay
from landscape.subject.subject import Subject
from landscape.weight_space import forward_mode
from landscape.weight_space.forward_mode import _layout, _of_tensors
from landscape.weight_space.plane_evaluator import PlaneEvaluator
from landscape.weight_space.planes import plane_of


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
