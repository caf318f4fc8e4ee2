"""The spectrum that the optimiser of a checkpoint sees, with its threshold, against dense matrices."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import dense_hessian, quadratic, run_probe, symmetric, tanh_net

import landscape
from landscape.curvature.preconditioner import preconditioner
from landscape.probes.hessian import Hessian
from landscape.products.vectors import flat
from landscape.running.run import digest
from landscape.subject.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's forward mode


def _saved(tmp_path: Path, make: Any, **options: Any) -> tuple[Path, Subject, torch.optim.Optimizer]:
    subject = tanh_net()
    optimizer = make(subject.model.parameters(), lr=0.05, **options)
    for _ in range(7):
        optimizer.zero_grad()
        subject.objective(0).backward()
        optimizer.step()
    file = tmp_path / "checkpoint.pt"
    torch.save({"model": subject.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file, subject, optimizer


def _loaded(file: Path, subject: Subject, **options: Any) -> Subject:
    """The network from its file, on the same samples."""
    inputs, targets = (torch.cat(parts) for parts in zip(*subject.batches, strict=True))
    (file.parent / "net.py").write_text(NET)
    return landscape.load(file, model=f"{file.parent / 'net.py'}:net", data=(inputs, targets), batch_size=6, **options)


NET = """
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
"""


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["batch", "dataset"])
@pytest.mark.parametrize("hvp", ["double-backward", "traced"])
def test_the_probe_reads_the_state_beside_the_weights(tmp_path: Path, scope: str, hvp: str) -> None:
    file, subject, optimizer = _saved(tmp_path, torch.optim.AdamW, weight_decay=0.5)
    loaded = _loaded(file, subject)
    probe = Hessian(operator="preconditioned", top=3, which="LA", scope=scope, hvp=hvp, tol=1e-8)
    found = run_probe(probe, loaded)
    known = preconditioner(optimizer, subject.parameters)
    scale = flat(known.scale.values())
    matrices = [scale[:, None] * dense_hessian(subject, i) * scale for i in range(2)]
    if scope == "dataset":
        matrices = [(matrices[0] + matrices[1]) / 2]
    expected = np.array([torch.linalg.eigvalsh(matrix).flip(0)[:3].numpy() for matrix in matrices])
    assert found["eigenvalue"] == pytest.approx(expected, rel=1e-4)
    assert found["threshold"] == pytest.approx(38 / 0.05 * 0.9875, rel=1e-12)
    ratio = expected[:, 0] / (38 / 0.05 * 0.9875)
    assert found["ratio"] == pytest.approx(ratio, rel=1e-4)
    assert found["stability"] == pytest.approx(ratio.mean(), rel=1e-4)
    assert found["facts"]["stability"] == known.definition
    if scope == "batch":
        assert found["sharpness_se"] == pytest.approx(expected[:, 0].std(ddof=1) / math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("which", ["LM", "LA", "both"])
@pytest.mark.parametrize("top", [1, 2, 4])
def test_the_ratio_is_that_of_the_largest_eigenvalue_where_those_of_largest_magnitude_are_negative(
    which: Any, top: int
) -> None:
    subject = quadratic(symmetric(torch.cat([torch.tensor([-5.0, -4.0, -3.0]), torch.linspace(-1.0, 2.0, 37)])))
    probe = Hessian(operator="preconditioned", optimizer="sgd", optimizer_arg=("lr=0.1",), top=top, which=which)
    found = run_probe(replace(probe, hvp="double-backward"), subject)
    assert found["ratio"] == pytest.approx(2.0 / (2 / 0.1), rel=3e-3)
    assert found["sharpness"] == pytest.approx(2.0, abs=float(found["ratio_error"][0]) * 20)


def test_weight_decay_is_that_of_the_optimizer(tmp_path: Path) -> None:
    file, subject, _ = _saved(tmp_path, torch.optim.SGD, momentum=0.9)
    loaded = _loaded(file, subject, weight_decay=0.05)
    with pytest.raises(ValueError, match=r"--weight-decay 0.05 is not used with --operator preconditioned"):
        Hessian(operator="preconditioned").plan(loaded)


def test_a_new_learning_rate_moves_the_threshold_alone(tmp_path: Path) -> None:
    file, subject, _ = _saved(tmp_path, torch.optim.SGD, momentum=0.9)
    loaded = _loaded(file, subject)
    probe = Hessian(operator="preconditioned", optimizer_arg=("lr=0.2",), top=1, which="LA", hvp="double-backward")
    found, plain = run_probe(probe, loaded), run_probe(Hessian(top=1, which="LA", hvp="double-backward"), loaded)
    assert found["threshold"] == pytest.approx(3.8 / 0.2, rel=1e-12)
    assert found["eigenvalue"] == pytest.approx(plain["eigenvalue"], rel=1e-9)
    assert digest(probe, loaded) != digest(replace(probe, optimizer_arg=("lr=0.1",)), loaded)
