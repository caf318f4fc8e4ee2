"""Which way of making Hessian products is taken, and that it never matters for the numbers."""

from __future__ import annotations

import logging

import pytest
import torch
from analytic import batches_of, convolution_net, tanh_net
from torch import Tensor, nn

from landscape import curvature as module
from landscape.curvature import CODES, WORTH_TRACING, Curvature, curvature
from landscape.linalg.vector import random_unit
from landscape.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's forward mode


class Branching(nn.Module):
    """Takes a way that depends on the values it sees: nothing a trace could record."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.tanh() if y.sum() > 0 else y.sin()


def test_few_mini_batches_keep_the_plain_graph_without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_trial", lambda _: pytest.fail("a trial"))
    subject = tanh_net()
    assert curvature(subject, subject.parameters, "auto", batches=WORTH_TRACING - 1).kind == "kept"


@pytest.mark.parametrize("fastest", ["kept", "traced", "traced-channels-last"])
def test_of_many_the_fastest_in_a_trial_is_taken_and_said(
    fastest: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def seconds(candidate: Curvature) -> float:
        tried.append(candidate.kind)
        return 0.001 if candidate.kind == fastest else 0.002

    monkeypatch.setattr(module, "_trial", seconds)
    subject = convolution_net()
    with caplog.at_level(logging.INFO, logger="landscape"):
        chosen = curvature(subject, subject.parameters, "auto", batches=WORTH_TRACING)
    assert (chosen.kind, tried) == (fastest, ["kept", "traced", "traced-channels-last"])
    assert f"Hessian products: {fastest} (kept " in caplog.text
    assert curvature(subject, subject.parameters, "auto", batches=50) is chosen  # tried once per subject
    assert len(tried) == 3


def test_channels_last_is_no_candidate_without_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(module, "_trial", lambda candidate: tried.append(candidate.kind) or 1.0)
    subject = tanh_net()
    curvature(subject, subject.parameters, "auto", batches=WORTH_TRACING)
    assert tried == ["kept", "traced"]


def test_what_cannot_be_traced_keeps_its_graph_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    subject = Subject(Branching().double().eval(), batches_of((4,), (6,) * 3, 3))
    with caplog.at_level(logging.INFO, logger="landscape"):
        chosen = curvature(subject, subject.parameters, "auto", batches=WORTH_TRACING)
    assert chosen.kind == "kept"
    assert "no traced Hessian products: the model cannot be traced" in caplog.text
    with pytest.raises(ValueError, match="cannot be traced"):  # asked for by name it is an error
        curvature(subject, subject.parameters, "traced", batches=WORTH_TRACING)


def test_the_trial_times_products_of_the_first_mini_batch() -> None:
    subject = tanh_net()
    assert 0 < module._trial(Curvature(subject, subject.parameters, "kept")) < 1


def test_weight_decay_is_in_every_kind_of_product() -> None:
    plain, decayed = tanh_net(), tanh_net(weight_decay=0.25)
    vector = random_unit(plain.size, 0, device=torch.device("cpu"), dtype=torch.float64)
    for kind in CODES[:3]:
        without, with_it = (
            curvature(subject, subject.parameters, kind, batches=2).product(1)(vector)  # type: ignore[arg-type]
            for subject in (plain, decayed)
        )
        torch.testing.assert_close(with_it, without + 0.25 * vector, rtol=1e-12, atol=1e-14)
