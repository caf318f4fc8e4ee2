"""The processes of one training: one, or several that `torchrun` started, on GPUs or CPU cores, of many machines."""

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
class Team:
    """This process among all: the first, of rank 0, measures and writes.

    Args:
        rank: 0 to size - 1.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def first(self, work: Callable[[], T]) -> T:
        """What the first process makes of the work, in all processes; its errors too, so that none waits for ever."""
        if self.size == 1:
            return work()
        said: list[object] = [None, None]
        if self.rank == 0:
            try:
                said[0] = work()
            except Exception as error:
                said[1] = error
        dist.broadcast_object_list(said, device=torch.device("cpu"))
        if isinstance(said[1], Exception):
            raise said[1]
        return said[0]  # type: ignore[return-value]

    def summed(self, values: Tensor) -> Tensor:
        """The sum of all processes' values, in all of them."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


ALONE = Team()


@contextmanager
def team() -> Iterator[Team]:
    """All processes of the group that `torchrun` started, connected; this process alone without one."""
    if not dist.is_available() or not dist.is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    # What is no gradient goes over the CPU, also between GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Team(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # leave together: who closes a connection that the other still uses ends it by an abort
    finally:
        dist.destroy_process_group()


def device_of(name: str, team: Team) -> torch.device:
    """The device of this process: of several on one machine each gets a GPU of its own.

    Raises:
        OptionError: the name is unknown, or means one GPU for all.
        ValueError: this machine does not have it.
    """
    found = device_named(name)
    if found.type != "cuda" or team.size == 1:
        return found
    if ":" in name:
        raise OptionError(
            f"--device {name} is one GPU for {team.size} processes; ask for cuda, which gives each its own"
        )
    own = device_named(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(own)
    return own
