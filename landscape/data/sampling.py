"""Select samples of a data set, in a fixed order."""

from typing import Literal, TypeAlias

import numpy as np

from landscape.options import parse_count

ORDER = 0x9E3779B97F4A7C15  # constant of the fixed order: changing it changes every stored number
Split: TypeAlias = Literal["train", "test"]
Samples: TypeAlias = int | str | None  # a number, a share such as "10%", or "all" (also None)


def keys(rows: np.ndarray) -> np.ndarray:
    """One pseudo-random uint64 per row number: the output function of SplitMix64 (Steele et al. 2014).

    Not from a library, whose stream may change with its version: this order must never change. A row's key depends on
    its number alone, so that a truncated data set keeps the order of the full one.
    """
    z = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(ORDER)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shuffled(count: int) -> np.ndarray:
    """Rows 0..count-1 in the fixed seeded order."""
    return np.argsort(keys(np.arange(count)), kind="stable")


def balanced(targets: np.ndarray) -> np.ndarray:
    """Rows in a fixed seeded order whose every prefix is as class-balanced as the data allow.

    Round r takes the r-th image (in seeded order) of each class that still has one. Within a round the classes are in
    seeded order too, so that small batches do not hold neighbouring classes. `targets` are (N,) integers.
    """
    rows, targets = shuffled(len(targets)), np.asarray(targets, np.int64)
    by_class = rows[np.argsort(targets[rows], kind="stable")]
    _, first, counts = np.unique(targets[by_class], return_index=True, return_counts=True)
    rounds = np.arange(len(rows)) - np.repeat(first, counts)
    return by_class[np.lexsort((keys(by_class), rounds))]


def subset(targets: np.ndarray, samples: Samples, *, ordered: bool = False) -> np.ndarray:
    """Rows of a class-balanced subset: the first `samples` of the `balanced` order of `targets` (N,).

    `ordered`: the first ones in the order of the source, for frames of a stream.
    """
    order = np.arange(len(targets)) if ordered else balanced(targets)
    return order[: number_of(samples, len(targets))]


def number_of(samples: Samples, available: int) -> int:
    """How many of the available samples are asked for. Raises OptionError: it is below 1, or no number or share."""
    return parse_count("samples", samples, available)
