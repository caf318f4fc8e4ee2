"""How much memory is free, asked before a data set is made resident."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from landscape.data import memory

CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


class TooLarge(ValueError):
    """Samples that free memory does not hold."""


def require(name: str, count: int, each: int) -> None:
    """Refuse samples that do not fit into free memory, before the first is read.

    Args:
        name: of the data, for the message.
        count: how many samples.
        each: bytes of one.

    Raises:
        TooLarge: they need more than is free.
    """
    free = available()
    if count * each > free:
        raise TooLarge(
            f"{name}: {count:,} samples of {said(each)} need {said(count * each)} of memory and {said(free)} is free; "
            "ask for fewer with --samples, or for smaller images with --image-size"
        )


def available() -> int:
    """Bytes that can be taken without swapping: of the machine, or of the container where that is less.

    Where the system does not say what is free (macOS), all of its memory.
    """
    free = [number for number in (_machine(), _container()) if number is not None]
    return min(free) if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def said(count: float) -> str:
    """A number of bytes as people say it."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def _machine() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    """What the limit of a container leaves; file pages that can be dropped count as free."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file "),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            most = int((CGROUPS / limit).read_text())  # "max", where there is no limit, is no number
            taken = int((CGROUPS / used).read_text())
            stat = (CGROUPS / limit).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        dropped = next((int(line.split()[1]) for line in stat if line.startswith(cached)), 0)
        return max(0, most - taken + dropped)
    return None


class Resident:
    """Rows that arrive in blocks of one shape and dtype, held once.

    Room for all rows is made at the first block where their number is known; else it is doubled when it is used up.

    Args:
        name: of the data, for messages.
        rows: how many will come, None where nobody knows.
    """

    def __init__(self, name: str, rows: int | None) -> None:
        self.count = 0
        self._name, self._rows = name, rows
        self._room = torch.empty(0)

    @property
    def shape(self) -> torch.Size:
        """Shape of one row."""
        return self._room.shape[1:]

    @property
    def tensor(self) -> Tensor:
        """All rows that came."""
        return self._room[: self.count]

    def append(self, block: Tensor, *, what: str = "") -> None:
        """Add rows (B, ...).

        Raises:
            ValueError: they differ from the first, or memory does not hold them.
        """
        if self.count and (block.shape[1:], block.dtype) != (self.shape, self._room.dtype):
            raise ValueError(
                f"{what or self._name}: samples are {tuple(block.shape[1:])} {block.dtype}, the first "
                f"{tuple(self.shape)} {self._room.dtype}; make them equal"
            )
        needed = self.count + len(block)
        if needed > len(self._room) or not self.count:
            self._grow(max(needed, self._rows or 2 * needed), block)
        self._room[self.count : needed] = block
        self.count = needed

    def _grow(self, rows: int, block: Tensor) -> None:
        memory.require(self._name, rows, block[0].numel() * block.element_size() if len(block) else 0)
        room = torch.empty((rows, *block.shape[1:]), dtype=block.dtype)
        if self.count:
            room[: self.count] = self.tensor
        self._room = room
