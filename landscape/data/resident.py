"""A tensor in memory that is filled block by block, of a known length or not."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.data import memory


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
