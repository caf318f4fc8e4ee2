"""Training in several processes: the weights of a single one to rounding, one line per error, and resumption."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from landscape.checkpoints import checkpoint
from landscape.options import OptionError
from landscape.training.distributed import SINGLE_PROCESS, ProcessGroup, device_of
from landscape.training.recipes import recipe
from landscape.training.synchronised_batchnorm import SynchronisedBatchNorm2d, synchronise_batchnorm
from landscape.training.train import train

SOURCE = """
import torch

def images(count=22):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3

def even():
    return images(24)
"""
SMALL = {"vit_demo": {"dim": 8, "depth": 2, "heads": 2}, "resnet_demo": {"blocks": (1, 1), "width": 4}}
ASKED = {"epochs": 3, "batch_size": 4, "accumulate": 2, "optimizer": "sgd", "lr": 0.05, "mixup": 1.0, "ema": 0.5}


def started(words: list[str], rank: int, port: int) -> subprocess.Popen[str]:
    """A process as `torchrun --nproc-per-node 2` starts it."""
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{k: str(v) for k, v in group.items()}, "TORCHELASTIC_RUN_ID": "test"}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    command = [sys.executable, "-m", "landscape", "train", *words]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def pair(words: list[str]) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [started(words, rank, port) for rank in (0, 1)]


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def command_line(model: str, source: str, out: Path, **asked: object) -> list[str]:
    sizes = [f"{name}={str(value).strip('()')}" for name, value in SMALL[model].items()]
    words = [model, "--data", source, "--out", str(out), "--device", "cpu", "--seed", "2"]
    words += [word for size in sizes for word in ("--model-arg", size.replace(" ", ""))]
    return words + [word for name, value in asked.items() for word in ("--set", f"{name}={value}")]


@pytest.mark.parametrize(
    ("model", "data", "more"), [("vit_demo", "images", {}), ("resnet_demo", "even", {"sync_bn": True})]
)
def test_two_processes_give_the_weights_of_one(tmp_path: Path, model: str, data: str, more: dict[str, bool]) -> None:
    """Four parts of each update of 8 rows; the last of 22 rows has 6, which are two parts of one step then."""
    file, asked = tmp_path / "source.py", {**ASKED, **more}
    file.write_text(SOURCE)
    source = f"{file}:{data}"
    alone = train(model, source, recipe=recipe("demo", **asked), out=tmp_path / "one", model_args=SMALL[model], seed=2)
    both = pair(command_line(model, source, tmp_path / "two", **asked))
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "epoch 3/3" in said[0]
    assert said[1] == ""  # only the main process prints
    begun = checkpoint.read(alone.with_name("init.pt")).state_dict
    for file in ("final.pt", "final_ema.pt"):
        one, two = (checkpoint.read(tmp_path / folder / file).state_dict for folder in ("one", "two"))
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=2e-4, atol=2e-5)
    assert max((one[name] - begun[name]).abs().max().item() for name in one) > 1e-2
    losses = [(tmp_path / folder / "metrics.csv").read_text().split(",train_loss")[0] for folder in ("one", "two")]
    assert losses[0] == losses[1]


def test_a_killed_group_goes_on_and_another_run_is_refused_by_each_in_one_line(tmp_path: Path) -> None:
    file, asked = tmp_path / "source.py", {**ASKED, "epochs": 16}
    file.write_text(SOURCE)
    source = f"{file}:images"
    killed = pair(command_line("vit_demo", source, tmp_path / "run", **asked))
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "resume.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / "run" / "resume.pt").exists()
    first = torch.load(tmp_path / "run" / "resume.pt", weights_only=True)["history"]
    assert 0 < len(first) < 16
    resumed = pair(command_line("vit_demo", source, tmp_path / "run", **asked))
    said = [process.communicate()[1] for process in resumed]
    assert [process.returncode for process in resumed] == [0, 0], said
    assert f"epoch {len(first) + 1}/16" in said[0]
    assert f"epoch {len(first)}/16" not in said[0]
    alone = train(
        "vit_demo", source, recipe=recipe("demo", **asked), out=tmp_path / "one", seed=2,
        model_args=SMALL["vit_demo"],
    )  # fmt: skip
    one, two = (checkpoint.read(path).state_dict for path in (alone, tmp_path / "run" / "final.pt"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-2, atol=1e-3)  # rounding grown over 48 updates
    refused = pair(command_line("vit_demo", source, tmp_path / "run", **{**asked, "clip": 3.0}))
    for process in refused:
        words = process.communicate()[1]
        assert process.returncode == 1
        assert words.count("\n") == 1
        assert "holds another run (recipe clip 1.0 there, 3.0 asked for)" in words


def normed(rank: int, port: int, folder: str) -> None:
    """In one of two processes: half the rows of a batch through a synchronised norm, forward and backward."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x, weight = torch.load(f"{folder}/given.pt")
    norm = nn.BatchNorm2d(3).double()
    synchronise_batchnorm(norm)
    assert isinstance(norm, SynchronisedBatchNorm2d)
    part = x[rank::2].clone().requires_grad_()
    out = norm(part)
    (out * weight[rank::2]).sum().backward()
    torch.save([out.detach(), part.grad, norm.running_mean, norm.running_var], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_a_synchronised_norm_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Halves of 3 and 2 rows: outputs, gradients and running statistics are those of torch's own on all five."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(5, 3, 4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    torch.save((x, weight), tmp_path / "given.pt")
    torch.multiprocessing.spawn(normed, (free_port(), str(tmp_path)), nprocs=2)
    norm, whole = nn.BatchNorm2d(3).double(), x.clone().requires_grad_()
    (norm(whole) * weight).sum().backward()
    assert whole.grad is not None
    for rank in (0, 1):
        out, gradient, mean, variance = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(out, norm(whole).detach()[rank::2], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient, whole.grad[rank::2], rtol=1e-10, atol=1e-12)
        fresh = nn.BatchNorm2d(3).double()
        fresh(x)
        torch.testing.assert_close(mean, fresh.running_mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(variance, fresh.running_var, rtol=1e-10, atol=1e-12)


def test_a_single_process_works_without_a_group() -> None:
    assert SINGLE_PROCESS.on_main_process(lambda: 3) == 3
    assert device_of("cpu", ProcessGroup(1, 2)) == torch.device("cpu")


def test_several_processes_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("landscape.training.distributed.device_named", torch.device)
    with pytest.raises(OptionError, match="--device cuda:1 is one GPU for 2 processes; ask for cuda"):
        device_of("cuda:1", ProcessGroup(0, 2))
