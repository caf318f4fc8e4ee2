"""Random vectors as functions of seed and position: the same bits on every device, in any order and in any part.

A word is a hash of (seed, row, column) by integer arithmetic on the device where it is needed: nothing is drawn on the
host, and nothing but four tables of 1 KB is copied. The words of a row become entries of a vector:

- a sign is the highest bit of a word, a uniform number its 24 highest bits;
- four normal numbers are (x1 + x2 + x3 + x4, x1 + x2 - x3 - x4, x1 - x2 + x3 - x4, x1 - x2 - x3 + x4) / 2, each x
  from a table for one byte of a word. They lie `COLUMNS` apart.

A table has quantiles of 256 equally probable parts of the normal distribution, stretched so that their second, fourth,
sixth and eighth moments are 1, 3, 15 and 105. The four sums turn x by an orthogonal matrix, so that all joint moments
up to the ninth are those of independent normal numbers, to 1e-5. The distribution function is off by 2e-5 at most, the
probability beyond 4 by 0.5 %, beyond 5 by 2 %; the largest number is 6.3. Entries of the tables are multiples of 2^-20,
so that no sum is rounded, or 0.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

COLUMNS = 2**16  # words of a row
AT_ONCE = 128  # rows that a device other than the CPU makes at once; on a CPU one, which stays in its cache
UNIT = 2.0**-20  # entries of the first table are odd multiples of it, those of the others even ones
STRETCH = (  # of the quantiles of each table, a polynomial of their squares
    (0.448850315, 0.088527551, -0.031363333, 0.002919426), (0.45190072, 0.077570602, -0.026141752, 0.002265374),
    (0.45496549, 0.066883257, -0.021213995, 0.001672494), (0.458149405, 0.056224356, -0.016459414, 0.00112554),
)  # fmt: skip
SIGNS, NORMAL, UNIFORM = (kind << 48 for kind in range(3))  # numbers of the first rows


def signs(size: int, seed: int, *, device: torch.device, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Independent entries of +1 and -1 (Rademacher), (size,); from entry `start` of the vector on."""
    return _vector(_signs, 1, SIGNS, size, seed, start, device, dtype)


def uniform(size: int, seed: int, *, device: torch.device, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Independent entries with the uniform distribution on (-1, 1), odd multiples of 2^-23, as `signs`."""
    return _vector(_uniform, 1, UNIFORM, size, seed, start, device, dtype)


def normal(size: int, seed: int, *, device: torch.device, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Entries with the standard normal distribution, as `signs`."""
    return _vector(_normal, 4, NORMAL, size, seed, start, device, dtype)


def words(seed: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Hashes of (seed, row, column), (rows, columns) int32, of rows (N,) int64 and of `hashed_columns`.

    The high bits are the better ones.
    """
    first, second = _keys(seed, rows)
    mixed = _mixed(columns[None] ^ first[:, None], 15, -2073254261).add_(second[:, None])
    return _mixed(mixed, 16, 0x7FEB352D)


def hashed_columns(count: int, like: Tensor) -> Tensor:
    """Contributions of columns 0 .. count - 1 to words, (count,) int32, on the device of `like`, also within vmap."""
    counter = (like.new_ones(count, dtype=torch.int64).cumsum(dim=0) - 1).to(torch.int32)
    return _mixed(counter.mul(-1640531527), 16, 0x7FEB352D)


def _keys(seed: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two words per row, (N,) int32 each, by the 64-bit finaliser of SplitMix64 (Steele et al. 2014)."""
    z = rows * -7046029254386353131 + seed
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor
    z = z ^ ((z >> 31) & (2**33 - 1))
    return z.to(torch.int32), (z >> 32).to(torch.int32)


def _mixed(words: Tensor, shift: int, factor: int) -> Tensor:
    """A round of a 32-bit hash: (x ^ (x >>> shift)) * factor modulo 2^32."""
    return words.bitwise_right_shift(shift).bitwise_and_(2 ** (32 - shift) - 1).bitwise_xor_(words).mul_(factor)


def _vector(
    entries: Callable[[Tensor, int], list[Tensor]], planes: int, kind: int, size: int, seed: int, start: int,
    device: torch.device, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Entries start .. start + size - 1 of a vector; a word becomes up to `planes` of them, `COLUMNS` apart."""
    found = torch.empty(size, device=device, dtype=dtype)
    span, stop = planes * COLUMNS, start + size
    columns = hashed_columns(min(COLUMNS, stop), found)
    at = start // span
    while (begin := at * span) < stop:
        whole = (stop - begin) // span  # rows; what follows them has fewer columns, or fewer planes
        rows = min(whole, 1 if device.type == "cpu" else AT_ONCE) if whole else 1
        drawn = words(seed, kind + torch.arange(at, at + rows, device=device), columns[: stop - begin])
        row = torch.stack(entries(drawn, min(planes, -(-(stop - begin) // COLUMNS))), dim=1).view(-1)
        first = max(start, begin)
        part = row[first - begin : stop - begin]
        found[first - start : first - start + len(part)] = part
        at += rows
    return found


def _signs(words: Tensor, _: int) -> list[Tensor]:
    return [words.bitwise_and_(-(2**31)).bitwise_or_(0x3F800000).view(torch.float32)]  # 1.0 with the sign of the word


def _uniform(words: Tensor, _: int) -> list[Tensor]:
    return [words.bitwise_right_shift_(8).bitwise_or_(1).float().mul_(2.0**-23)]


def _normal(words: Tensor, planes: int) -> list[Tensor]:
    high = words.bitwise_right_shift(16).bitwise_and_(0xFFFF)
    low = words.bitwise_xor_(high)  # the low bits of a product depend on fewer bits than the high ones
    tables = _tables().to(words.device, non_blocking=True)
    x = [
        table.index_select(0, byte.bitwise_and_(255).view(-1)).view(words.shape)
        for table, byte in zip(tables, (high >> 8, high, low >> 8, low), strict=True)
    ]
    sums, differences = (x[0] + x[1], x[2] + x[3]), (x[0].sub_(x[1]), x[2].sub_(x[3]))
    four = (torch.add, sums), (torch.sub, sums), (torch.add, differences), (torch.sub, differences)
    return [combined(*pair) for combined, pair in four[:planes]]


@cache
def _tables() -> Tensor:
    """The halves x / 2 for each of the four bytes of a word, (4, 256) float32."""
    parts = torch.arange(128, dtype=torch.float64) + torch.tensor([[0.2], [0.4], [0.6], [0.8]], dtype=torch.float64)
    quantiles, odd = torch.special.ndtri(0.5 + parts / 256), torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    a, b, c, d = torch.tensor(STRETCH, dtype=torch.float64)[:, :, None].unbind(dim=1)
    squares = quantiles.square()
    halves = quantiles * (a + squares * (b + squares * (c + squares * d)))
    upper = ((2 * ((halves / UNIT - odd) / 2).round() + odd) * UNIT).float()
    return torch.cat([-upper.flip(1), upper], dim=1)
