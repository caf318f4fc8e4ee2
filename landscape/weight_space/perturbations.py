"""Perturb weights: round-to-nearest quantisation, magnitude pruning, relative noise, low-rank truncation.

Every function takes a weight as rows (filters, entries), one filter per output unit, and returns it perturbed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from landscape.options import parse_numbers, require
from landscape.weight_space.directions import normalised, standard_normal

Method = Literal["quantise", "prune", "noise", "rank"]
METHODS: tuple[Method, ...] = get_args(Method)
Granularity = Literal["channel", "tensor", "group"]
MOST_BITS = 16
OPTIONS: Mapping[Method, str] = {"quantise": "bits", "prune": "sparsity", "noise": "noise", "rank": "rank"}
WORDS: Mapping[Method, Callable[[float], str]] = {
    "quantise": lambda level: f"{level:g} bits",
    "prune": lambda level: f"{level:.4g} pruned",
    "noise": lambda level: f"noise {level:.4g}",
    "rank": lambda level: f"rank {level:.4g}",
}


@dataclass(frozen=True)
class Setting:
    """A perturbation at one strength."""

    method: Method
    level: float  # bits; share of zeros; norm of the noise over that of the filter; share of the full rank
    granularity: Granularity = "channel"  # what shares a scale
    group_size: int = 64  # consecutive entries of a filter that share a scale
    seed: int = 0  # of the noise

    @property
    def name(self) -> str:
        return WORDS[self.method](self.level)

    def applied(self, rows: Tensor, key: str) -> Tensor:
        """The perturbed rows (filters, entries), computed in at least single precision; `key` seeds the noise."""
        exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.method == "quantise":
            changed = quantised(exact, int(self.level), self.granularity, self.group_size)
        elif self.method == "prune":
            changed = pruned(exact, self.level)
        elif self.method == "noise":
            changed = exact + self.level * normalised(standard_normal(exact, self.seed, 0, key), exact, "filter")
        else:
            changed = truncated(exact, self.level)
        return changed.to(rows.dtype)


def settings_of(
    bits: str, sparsity: str, noise: str, rank: str, *, granularity: Granularity, group_size: int, seed: int
) -> list[Setting]:
    """The settings that options name, in the order of `METHODS`, each from the weakest to the strongest.

    Raises:
        OptionError: a value is out of range, or there is no setting.
    """
    texts = dict(zip(METHODS, (bits, sparsity, noise, rank), strict=True))
    found = [
        Setting(method, level, granularity, group_size, seed)
        for method, text in texts.items()
        for level in sorted(_levels(method, text), reverse=method in ("quantise", "rank"))
    ]
    require(bool(found), "bits", bits, "numbers such as 8,4,2 where --sparsity, --noise and --rank are not given")
    return found


def _levels(method: Method, text: str) -> Iterator[float]:
    for level in dict.fromkeys(parse_numbers(OPTIONS[method], text)) if text else ():
        if method == "quantise":
            whole = level == int(level) and 2 <= level <= MOST_BITS
            require(whole, "bits", text, f"whole numbers from 2 to {MOST_BITS}, separated by commas")
        elif method == "noise":
            require(level > 0, "noise", text, "numbers above 0, separated by commas")
        else:
            require(0 < level < 1, OPTIONS[method], text, "numbers between 0 and 1, separated by commas")
        yield level


def quantised(rows: Tensor, bits: int, granularity: Granularity, group_size: int) -> Tensor:
    """Symmetric round-to-nearest quantisation: q = round(w / s) s with s = max |w| / (2^(bits - 1) - 1).

    The maximum is over the weight (`tensor`), each filter (`channel`) or consecutive entries of each filter (`group`).
    It falls on the grid, so that nothing is clipped; of the 2^bits codes, 2^bits - 1 are used. Ties round to even.
    """
    if granularity == "group":
        short = -rows.shape[1] % group_size
        padded = torch.nn.functional.pad(rows, (0, short)).reshape(len(rows), -1, group_size)
        return _rounded(padded, bits, padded.abs().amax(dim=2, keepdim=True)).reshape(len(rows), -1)[:, : rows.shape[1]]
    largest = rows.abs().amax(dim=1, keepdim=True) if granularity == "channel" else rows.abs().max()
    return _rounded(rows, bits, largest)


def _rounded(weights: Tensor, bits: int, largest: Tensor) -> Tensor:
    scale = largest / (2 ** (bits - 1) - 1)
    return torch.where(scale > 0, torch.round(weights / scale) * scale, weights)


def pruned(rows: Tensor, sparsity: float) -> Tensor:
    """The weight with its smallest magnitudes set to 0: round(sparsity n) of n entries, of equal ones the first."""
    flat = rows.flatten().clone()
    count = round(sparsity * flat.numel())
    flat[flat.abs().sort(stable=True).indices[:count]] = 0.0
    return flat.reshape(rows.shape)


def truncated(rows: Tensor, share: float) -> Tensor:
    """The closest matrix, in the Frobenius norm, of at most round(share min(filters, entries)) rank, at least 1."""
    left, values, right = torch.linalg.svd(rows, full_matrices=False)
    rank = max(1, round(share * len(values)))
    closest: Tensor = (left[:, :rank] * values[:rank]) @ right[:rank]
    return closest
