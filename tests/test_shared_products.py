"""Hessian products that the processes of `torchrun` share: the numbers of one process, one line per error, no hang."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import xarray as xr
from analytic import tanh_net
from test_distributed import free_port, started

from landscape.cli.main import exit_code
from landscape.products import mini_batch_means as sample_means
from landscape.products.mini_batch_means import mean_loss, over_mini_batches, shares_of
from landscape.products.operator import WHOLE, Curvature
from landscape.products.vectors import random_unit
from landscape.results import reader
from landscape.subject.losses import LossTraits
from landscape.subject.process_group import ProcessGroup

pytestmark = pytest.mark.slow

SOURCE = """
import os, signal, time
import torch

def data(split, classes=3, count=21):
    x = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(count) % classes

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))

def other():
    made = model()
    with torch.no_grad():
        made[1].bias += float(os.environ["RANK"])
    return made

class Ending(torch.nn.Sequential):
    passes = 0
    def forward(self, x):
        outputs = super().forward(x)
        if outputs.requires_grad:
            outputs.register_hook(self.passed)
        return outputs

    def passed(self, _):
        Ending.passes += 1
        if os.environ.get("RANK") == "1" and Ending.passes > 30:
            if os.environ["ENDS"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no second derivative today")

def ending():
    return Ending(*model())
"""
DATASET = ["--scope", "dataset", "--top", "3", "--eigenvectors"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "source.py").write_text(SOURCE)
    return tmp_path


def words(folder: Path, command: str, *more: str, model: str = "model", out: str = "two.h5") -> list[str]:
    source = folder / "source.py"
    given = [command, "--model", f"{source}:{model}", "--data", f"{source}:data", "--batch-size", "8"]
    return [*given, "--device", "cpu", "--hvp", "double-backward", "--out", str(folder / out), *more]


def pair(command: Sequence[str]) -> list[tuple[int | None, str]]:
    """Exit code and errors of two processes, by rank."""
    port = free_port()
    processes = [started(["-m", "landscape", *command], rank, port) for rank in (0, 1)]
    try:
        return [
            (process.returncode, errors) for process in processes for _, errors in [process.communicate(timeout=300)]
        ]
    finally:
        for process in processes:
            process.kill()


def stored(path: Path, probe: str) -> xr.Dataset:
    ((_, data),) = reader.find(path, probe)
    return data


def in_one_process(command: list[str], folder: Path) -> None:
    assert exit_code([word.replace("two.h5", "one.h5") for word in command]) == 0


@pytest.mark.parametrize(
    ("command", "more", "names"),
    [
        ("hessian", DATASET, ("eigenvalue", "loss", "eigenvector")),
        ("hessian", ["--scope", "dataset", "--top", "1", "--operator", "ggn"], ("eigenvalue", "loss")),
        ("density", ["--vectors", "2", "--steps", "6"], ("nodes", "weights")),
        ("trace", ["--vectors", "8"], ("batch_trace", "loss")),
    ],
)
def test_two_processes_give_the_numbers_of_one(
    folder: Path, command: str, more: list[str], names: tuple[str, ...]
) -> None:
    """21 samples in mini-batches of 8, 8 and 5: the halves part inside the second one."""
    line = words(folder, command, *more)
    main, other = pair(line)
    assert (main[0], other[0]) == (0, 0), main[1] + other[1]
    assert "of" in main[1]
    assert other[1] == ""  # only the main process prints
    in_one_process(line, folder)
    one, two = (stored(folder / name, command) for name in ("one.h5", "two.h5"))
    for name in names:
        np.testing.assert_allclose(np.abs(two[name]), np.abs(one[name]), rtol=1e-6, atol=1e-6)


@pytest.mark.campaign
def test_torchrun_itself_starts_the_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "landscape"]
    line = words(folder, "hessian", *DATASET)
    done = subprocess.run([*command, *line], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": nep ") == 1
    main, other = pair(line)
    assert (main[0], other[0]) == (0, 0)
    assert (main[1].count("already measured"), other[1]) == (1, "")


def test_what_processes_cannot_share_is_refused_in_one_line(folder: Path) -> None:
    main, other = pair(words(folder, "hessian", *DATASET, model="other"))
    assert (main[0], other[0]) == (1, 1)
    assert main[1].count("differ between the processes") + other[1].count("differ between the processes") == 1
    assert not (folder / "two.h5").exists()
    main, other = pair(words(folder, "density", "--samples", "1", "--batch-size", "1"))
    assert (main[0], other[0]) == (1, 1)
    assert "got 1 sample for 2 processes" in main[1] + other[1]
    main, other = pair(words(folder, "hessian"))
    assert (main[0], other[0]) == (2, 2)
    assert (main[1] + other[1]).count("give --scope dataset") == 1


@pytest.mark.campaign
@pytest.mark.parametrize("ends", ["raise", "kill"])
def test_a_process_that_ends_ends_the_other_and_finished_units_are_kept(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ends: str
) -> None:
    """Rank 1 ends in its 31st backward pass, that of a later start vector: the first ones are in the file."""
    line = words(folder, "density", "--vectors", "8", "--steps", "2", model="ending")
    monkeypatch.setenv("ENDS", ends)
    main, other = pair(line)
    assert main[0] == 1
    assert other[0] == (1 if ends == "raise" else -signal.SIGKILL)
    said = [text for text in (main[1] + other[1]).splitlines() if text.startswith("landscape:")]
    assert len(said) == 1, said
    assert ("no second derivative today" if ends == "raise" else "another process of the group has ended") in said[0]
    done = stored(folder / "two.h5", "density")["done"]
    assert 0 < int(done.sum()) < 8


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["surface"], "start it without torchrun, with --workers N"),
        (["features"], "start it without torchrun, with --workers N"),
        (["plot"], "plot is for one process, got 2"),
    ],
)
def test_commands_that_processes_cannot_share_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: list[str], expected: str
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert exit_code(line) == 2
    errors = capsys.readouterr().err
    assert expected in errors
    assert errors.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    assert exit_code(line) == 2
    assert capsys.readouterr().err == ""


class Alone(ProcessGroup):
    """One process of several, whose sums are its own part."""

    def summed(self, add, vector):  # type: ignore[no-untyped-def]
        total = torch.zeros_like(vector)
        add(total)
        return total


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_of_all_processes_add_up_to_the_product(count: int) -> None:
    subject = tanh_net(sizes=(6, 6, 3), weight_decay=0.3)
    vector = random_unit(subject.size, 0, device=subject.device, dtype=subject.dtype)
    expected = over_mini_batches(Curvature(subject, subject.parameters, "double-backward"), range(3))(vector)
    total, loss, samples = torch.zeros_like(vector), 0.0, []
    for rank in range(count):
        subject.processes = Alone(rank, count)
        total += over_mini_batches(Curvature(subject, subject.parameters, "double-backward"), range(3))(vector)
        loss += mean_loss(subject, range(3)) if count > 1 else 0.0
        shares = shares_of(subject, range(3))
        samples.append(round(15 * sum(share.weight for share in shares)))
    subject.processes = ProcessGroup()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)
    assert sum(samples) == 15
    assert max(samples) - min(samples) <= 1
    if count > 1:
        assert loss == pytest.approx(mean_loss(subject, range(3)), rel=1e-12)


def test_mini_batches_that_cannot_be_split_go_to_one_process_each() -> None:
    subject = tanh_net(sizes=(6, 6, 3))
    subject.traits = LossTraits(mean_only=True)
    taken = []
    for rank in range(2):
        subject.processes = Alone(rank, 2)
        shares = shares_of(subject, range(3))
        assert all(share.part == WHOLE for share in shares)
        taken += [share.batch for share in shares]
    assert sorted(taken) == [0, 1, 2]


def test_the_graph_of_a_single_share_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []

    def product(self, i, part=WHOLE):  # type: ignore[no-untyped-def]
        prepared.append((i, part))
        return lambda vector: vector

    monkeypatch.setattr(sample_means.Curvature, "product", product)
    subject = tanh_net(sizes=(6, 6))
    subject.processes = Alone(1, 2)
    shared = over_mini_batches(Curvature(subject, subject.parameters, "double-backward"), range(2))
    vector = torch.ones(subject.size, dtype=torch.float64)
    torch.testing.assert_close(shared(vector) + shared(vector), vector)
    assert prepared == [(1, WHOLE)]


class Odd(ProcessGroup):
    """Two processes, of which the other has another vector."""

    def all_reduce(self, values):  # type: ignore[no-untyped-def]
        mark = values[-2].item()
        values[-2:] += values.new_tensor([mark + 1, (mark + 1) ** 2])
        return values


def test_vectors_that_differ_between_the_processes_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="the processes computed different vectors"):
        Odd(0, 2).summed(lambda total: None, torch.randn(5))


FSDP = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import landscape

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%s", rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(4, 3), mesh=init_device_mesh("cpu", (1,)))
try:
    landscape.measure("hessian", model, data=(torch.randn(8, 4), torch.arange(8) % 3), out=None)
except ValueError as error:
    print(error)
"""


def test_a_sharded_module_is_refused_because_it_has_no_double_backward() -> None:
    said, errors = forked.Popen(["-c", FSDP.replace("%s", free_port())]).communicate(timeout=300)
    assert errors == ""
    assert "is sharded by FSDP, which has no double backward" in said
    assert said.count("\n") == 1
