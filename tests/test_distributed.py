"""Training in several processes: the weights of a single one to rounding, one line per error, and resumption."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn

from landscape.checkpoints.checkpoint import read_checkpoint
from landscape.data.recipes import recipe
from landscape.options import OptionError
from landscape.subject.process_group import SINGLE_PROCESS, ProcessGroup, device_of
from landscape.training.train import train

pytestmark = pytest.mark.slow

SOURCE = """
import torch

def images(split, count=22):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3

def even(split):
    return images(split, 24)
"""
SMALL = {"vit_demo": {"dim": 8, "depth": 2, "heads": 2}, "resnet_demo": {"blocks": (1, 1), "width": 4}}
OVERRIDES = {"epochs": 3, "batch_size": 4, "accumulate": 2, "optimizer": "sgd", "lr": 0.05, "mixup": 1.0, "ema": 0.5}
MODELS = [("vit_demo", "images", {"sam": 0.1}), ("resnet_demo", "even", {"sync_bn": True})]

# Runs a command line in one process of two, prints its exit code and errors. The command `normalise` passes half the
# rows of a batch through a synchronised norm, forward and backward.
PROCESS = """
import contextlib, io, json, os, sys
import torch
import torch.distributed as dist
from landscape.cli.main import exit_code
from landscape.training.updates import SynchronisedBatchNorm2d, synchronise_batchnorm

def normalise(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, weight = torch.load(f"{folder}/given.pt")
    norm = torch.nn.BatchNorm2d(3).double()
    synchronise_batchnorm(norm)
    assert isinstance(norm, SynchronisedBatchNorm2d)
    part = x[rank::2].clone().requires_grad_()
    out = norm(part)
    (out * weight[rank::2]).sum().backward()
    torch.save([out.detach(), part.grad, norm.running_mean, norm.running_var], f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    return 0

words = sys.argv[1:]
with contextlib.redirect_stderr(io.StringIO()) as errors:
    code = normalise(words[1]) if words[0] == "normalise" else exit_code(words)
print(json.dumps([code, errors.getvalue()]), flush=True)
os._exit(0)  # as the command does: threads of a closed connection may abort a normal exit
"""


def started(command: Sequence[str], rank: int, port: str) -> forked.Popen:
    """A process as `torchrun --nproc-per-node 2` starts it."""
    group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    environment = {**os.environ, **group, "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return forked.Popen(command, env=environment)


def outcome(command: Sequence[str]) -> list[Any]:
    """What two processes print as JSON in their last line, by rank."""
    port = free_port()
    processes = [started(command, rank, port) for rank in (0, 1)]
    try:
        ended = [(*process.communicate(timeout=300), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [code for *_, code in ended] == [0, 0], ended
    return [json.loads(output.splitlines()[-1]) for output, *_ in ended]


def outcomes(*commands: list[str]) -> list[list[Any]]:
    """What two processes make of several command lines: by command, by rank, the exit code and the errors.

    Every command has a pair of its own: a process that leaves one group and joins the next may wait forever.
    """
    return [outcome(["-c", PROCESS, *words]) for words in commands]


def free_port() -> str:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return str(place.getsockname()[1])


def command_line(model: str, source: str, out: Path, **overrides: object) -> list[str]:
    sizes = [f"{name}={str(value).strip('()')}" for name, value in SMALL[model].items()]
    words = ["train", model, "--data", source, "--out", str(out), "--device", "cpu", "--seed", "2"]
    words += [word for size in sizes for word in ("--model-arg", size.replace(" ", ""))]
    return words + [word for name, value in overrides.items() for word in ("--set", f"{name}={value}")]


def train_losses(run: Path) -> list[float]:
    return [float(row["train_loss"]) for row in csv.DictReader((run / "metrics.csv").read_text().splitlines())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, where two processes have trained both models and normalised a batch."""
    folder = tmp_path_factory.mktemp("group")
    (folder / "source.py").write_text(SOURCE)
    generator = torch.Generator().manual_seed(0)
    batch = tuple(torch.randn(5, 3, 4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    torch.save(batch, folder / "given.pt")
    commands = [
        command_line(model, f"{folder / 'source.py'}:{data}", folder / model, **OVERRIDES, **more)
        for model, data, more in MODELS
    ]
    *trained, normalised = outcomes(*commands, ["normalise", str(folder)])
    assert [code for code, _ in normalised] == [0, 0]
    for main, other in trained:
        assert (main[0], other[0]) == (0, 0), main
        assert "epoch 3/3" in main[1]
        assert other[1] == ""  # only the main process prints
    return folder


@pytest.mark.campaign
@pytest.mark.parametrize(("model", "data", "more"), MODELS)
def test_two_processes_give_the_weights_of_one(
    folder: Path, tmp_path: Path, model: str, data: str, more: dict[str, float]
) -> None:
    """Four parts of each update of 8 rows; the last of 22 rows has 6, which are two parts of one step then."""
    source, overrides = f"{folder / 'source.py'}:{data}", {**OVERRIDES, **more}
    train(model, source, recipe=recipe("demo", **overrides), out=tmp_path, model_args=SMALL[model], seed=2)
    initial = read_checkpoint(tmp_path / "init.pt").state_dict
    for name in ("final.pt", "final_ema.pt"):
        one, two = (read_checkpoint(run / name).state_dict for run in (tmp_path, folder / model))
        for key in one:
            torch.testing.assert_close(two[key], one[key], rtol=2e-4, atol=2e-5)
    assert max((one[key] - initial[key]).abs().max().item() for key in one) > 1e-2
    assert train_losses(folder / model) == pytest.approx(train_losses(tmp_path), rel=1e-4)


@pytest.mark.campaign
def test_a_killed_group_resumes_and_each_process_refuses_another_run_in_one_line(tmp_path: Path) -> None:
    file, overrides = tmp_path / "source.py", {**OVERRIDES, "epochs": 16}
    file.write_text(SOURCE)
    source, out = f"{file}:images", tmp_path / "run"
    port, command = free_port(), ["-m", "landscape", *command_line("vit_demo", source, out, **overrides)]
    killed = [started(command, rank, port) for rank in (0, 1)]
    forked.wait_until((out / "resume.pt").exists)
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    first = torch.load(out / "resume.pt", weights_only=True)["history"]
    assert 0 < len(first) < 16
    resumed, refused = outcomes(
        command_line("vit_demo", source, out, **overrides),
        command_line("vit_demo", source, out, **{**overrides, "clip": 3.0}),
    )
    assert [code for code, _ in resumed] == [0, 0], resumed
    assert f"epoch {len(first) + 1}/16" in resumed[0][1]
    assert f"epoch {len(first)}/16" not in resumed[0][1]
    alone = train(
        "vit_demo", source, recipe=recipe("demo", **overrides), out=tmp_path / "one", seed=2,
        model_args=SMALL["vit_demo"],
    )  # fmt: skip
    one, two = (read_checkpoint(path).state_dict for path in (alone, out / "final.pt"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-2, atol=1e-3)  # rounding grown over 48 updates
    for code, errors in refused:
        assert code == 1
        assert errors.count("\n") == 1
        assert "holds another run (recipe clip 1.0 in the folder, 3.0 requested)" in errors


def test_a_synchronised_norm_is_that_of_the_whole_batch(folder: Path) -> None:
    """Halves of 3 and 2 rows: outputs, gradients and running statistics are those of torch's own on all five."""
    x, weight = torch.load(folder / "given.pt")
    norm, whole = nn.BatchNorm2d(3).double(), x.clone().requires_grad_()
    out = norm(whole)
    (out * weight).sum().backward()
    assert whole.grad is not None
    for rank in (0, 1):
        part, gradient, mean, variance = torch.load(folder / f"{rank}.pt")
        torch.testing.assert_close(part, out.detach()[rank::2], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient, whole.grad[rank::2], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mean, norm.running_mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(variance, norm.running_var, rtol=1e-10, atol=1e-12)


def test_a_single_process_works_without_a_group() -> None:
    assert SINGLE_PROCESS.on_main_process(lambda: 3) == 3
    assert device_of("cpu", ProcessGroup(1, 2)) == torch.device("cpu")


def test_several_processes_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.subject.process_group.device_named", torch.device)
    with pytest.raises(OptionError, match="--device cuda:1 is one GPU for 2 processes; give cuda"):
        device_of("cuda:1", ProcessGroup(0, 2))
