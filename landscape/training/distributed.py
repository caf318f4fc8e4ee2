"""Train in one process, or in the group that `torchrun` started on GPUs or CPU cores of one or several machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.options import OptionError
from landscape.subject.device import device as device_named

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """This process among those of the training; the main process, of rank 0, evaluates and writes."""

    rank: int = 0  # 0 to size - 1
    size: int = 1  # number of processes

    def on_main_process(self, work: Callable[[], T]) -> T:
        """Run `work` in the main process and return its result in all; its errors are raised in all, so none hangs."""
        if self.size == 1:
            return work()
        outcome: list[object] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, device=torch.device("cpu"))
        if isinstance(outcome[1], Exception):
            raise outcome[1]
        return outcome[0]  # type: ignore[return-value]

    def all_reduce(self, values: Tensor) -> Tensor:
        """Replace `values` by their sum over the processes, in all of them."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


SINGLE_PROCESS = ProcessGroup()


@contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """The connected process group that `torchrun` started, or this process alone."""
    if not dist.is_available() or not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield SINGLE_PROCESS
        return
    # Only gradients go over NCCL; everything else goes over the CPU, also between GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield ProcessGroup(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # leave together: closing a connection that another process still uses aborts that process
    finally:
        dist.destroy_process_group()


def device_of(name: str, processes: ProcessGroup) -> torch.device:
    """The device of this process; several processes on one machine get a GPU each.

    Raises:
        OptionError: the name is unknown, or means one GPU for all.
        ValueError: this machine does not have it.
    """
    device = device_named(name)
    if device.type != "cuda" or processes.size == 1:
        return device
    if ":" in name:
        raise OptionError(
            f"--device {name} is one GPU for {processes.size} processes; give cuda, with which each gets its own"
        )
    device = device_named(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    return device
