"""Check that data fit into free memory before they are read, and collect them in a growing tensor."""

import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
M_MMAP_THRESHOLD, RETURNED = -3, 2**20  # of glibc's malloc.h; bytes from which a freed block goes back at once
RESIDENT = 0.5  # of a GPU's free memory that samples may take

_log = logging.getLogger(__name__)
_limit: ContextVar[int | None] = ContextVar("_limit", default=None)


class TooLarge(ValueError):
    """The samples do not fit into free memory."""


def require(name: str, count: int, each: int) -> None:
    """Check that `count` samples of `each` bytes fit into free memory, before the first is read.

    Raises:
        TooLarge: they need more than is free.
    """
    free = available()
    if count * each > free:
        needed = f"{count:,} samples of {format_bytes(each)} need {format_bytes(count * each)}"
        raise TooLarge(
            f"{name}: {needed} of memory and {format_bytes(free)} is free; give fewer samples, or smaller images"
        )


def available() -> int:
    """Bytes available without swapping, of the machine or of the container, whichever has less.

    All memory of the machine if the system does not report what is free (macOS).
    """
    free = [number for number in (_machine(), _container(), limit()) if number is not None]
    return min(free) if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit() -> int | None:
    """Bytes that the user allows; None without a limit."""
    return _limit.get()


@contextmanager
def limited_to(count: int | None) -> Iterator[None]:
    """Count no more than so many bytes as free while the block runs; None sets no limit."""
    token = _limit.set(count)
    try:
        yield
    finally:
        _limit.reset(token)


def available_on(device: torch.device) -> int:
    """Bytes that can be allocated on a CUDA device: what is free, and what torch keeps for reuse."""
    free, _ = torch.cuda.mem_get_info(device)
    found = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return found if (most := limit()) is None else min(found, most)


def return_freed_memory() -> None:
    """Let this process give large freed blocks back to the system at once, and those that it holds now.

    glibc keeps freed blocks of up to 32 MiB for later allocations, which rarely fit them: a gradient graph leaves
    gigabytes of holes. Memory that comes back has to be cleared again by the system, which may take a third of a
    measurement's time. Does nothing with other C libraries.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(M_MMAP_THRESHOLD, RETURNED)
        library.malloc_trim(0)


def stays_on_host(name: str, size: int, device: torch.device) -> bool:
    """Whether samples of `size` bytes would take too much of a GPU's memory; says so."""
    if device.type != "cuda" or size <= RESIDENT * (free := available_on(device)):
        return False
    _log.debug(
        "%s: %s of samples stay in the computer's memory, because the GPU has %s free; its mini-batches are copied one "
        "after the other", name, format_bytes(size), format_bytes(free),
    )  # fmt: skip
    return True


def page_locked(tensor: Tensor) -> Tensor:
    """A copy from which a GPU reads while the host goes on; the tensor itself where there is no such memory."""
    try:
        return tensor.pin_memory()
    except RuntimeError:
        return tensor


def format_bytes(count: float) -> str:
    """A number of bytes in a readable unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def binary_bytes(count: float) -> str:
    """A number of bytes in GiB or MiB, as the option takes it."""
    return f"{count / 2**30:.3g}GiB" if count >= 2**30 else f"{count / 2**20:.3g}MiB"


def _machine() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    """What a container's limit leaves; file pages that can be dropped count as free."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file "),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            most = int((CGROUPS / limit).read_text())  # "max" without a limit, which is not a number
            taken = int((CGROUPS / used).read_text())
            stat = (CGROUPS / limit).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):
            continue
        dropped = next((int(line.split()[1]) for line in stat if line.startswith(cached)), 0)
        return max(0, most - taken + dropped)
    return None


class ShapesDiffer(ValueError):
    """Samples of different shapes or types, which do not fit into one tensor."""


class GrowingTensor:
    """A tensor of rows that arrive in blocks of one shape and dtype.

    Memory for all rows is reserved at the first block if their number is known; else it is doubled whenever it is full.
    """

    def __init__(self, name: str, rows: int | None) -> None:
        self.count = 0
        self._name, self._rows = name, rows
        self._room = torch.empty(0)

    @property
    def shape(self) -> torch.Size:
        return self._room.shape[1:]

    @property
    def tensor(self) -> Tensor:
        return self._room[: self.count]

    def append(self, block: Tensor, *, what: str = "") -> None:
        """Add rows (B, ...).

        Raises:
            ShapesDiffer: their shape or dtype differs from the first.
            TooLarge: they do not fit into memory.
        """
        if self.count and (block.shape[1:], block.dtype) != (self.shape, self._room.dtype):
            raise ShapesDiffer(
                f"{what or self._name}: samples are {tuple(block.shape[1:])} {block.dtype}, the first "
                f"{tuple(self.shape)} {self._room.dtype}; make them equal"
            )
        needed = self.count + len(block)
        if needed > len(self._room) or not self.count:
            rows = max(needed, self._rows or 2 * needed)
            require(self._name, rows, block[0].numel() * block.element_size() if len(block) else 0)
            room = torch.empty((rows, *block.shape[1:]), dtype=block.dtype)
            if self.count:
                room[: self.count] = self.tensor
            self._room = room
        self._room[self.count : needed] = block
        self.count = needed
