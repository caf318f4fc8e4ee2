"""Choose bit-widths for the units of a quantised network under a size budget, from losses measured by `sensitivity`."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from landscape.options import OptionError, invalid, parse_bytes
from landscape.results import reader
from landscape.results.replacing import write_text
from landscape.statistics.sensitivity import over_parts, parts_of

SCALE = 1e4  # of the largest cost, in the solver whose absolute tolerance is 1e-6
ASSUMPTION = "the increases of single units add up"


def _with_error(value: float, error: float, sign: str = "") -> str:
    """A value and its error; without one the value alone."""
    return f"{value:{sign}.4g}{f' +- {error:.2g}' if math.isfinite(error) else ''}"


@dataclass(frozen=True)
class BitTable:
    """Bit-widths of units, and what they are expected to cost."""

    names: tuple[str, ...]
    weights: tuple[str, ...]  # names of the parameters of each unit, separated by spaces
    sizes: np.ndarray  # weights of each unit
    bits: np.ndarray  # of each unit
    increase: np.ndarray  # measured loss increase of each unit alone at its bits
    increase_se: np.ndarray
    expected: float  # sum of these
    expected_se: float  # its error over parts of the mini-batches
    held_out: float  # that sum where the table is chosen by one half of the samples and measured on the other
    uniform: tuple[tuple[int, float, float, float, float], ...]  # of all units at one width: see `uniform_of`
    units: str  # of the loss

    @property
    def mean_bits(self) -> float:
        """Mean bits per weight, without the scales."""
        return float(self.sizes @ self.bits / self.sizes.sum())

    @property
    def bytes(self) -> int:
        """Size of the weights, without the scales."""
        return math.ceil(int(self.sizes @ self.bits) / 8)

    def rows(self) -> list[dict[str, Any]]:
        columns = zip(self.names, self.sizes, self.bits, self.increase, self.increase_se, strict=True)
        return [
            {"unit": name, "weights": int(size), "bits": int(bits), "loss increase": _with_error(up, error)}
            for name, size, bits, up, error in columns
        ]

    def words(self) -> list[str]:
        """What is expected of the table, under which assumption, and how far that was from the truth."""
        said = [
            f"mean {self.mean_bits:.3g} bits per weight, {self.bytes:,} bytes without scales; expected loss increase "
            f"{_with_error(self.expected, self.expected_se)} {self.units}, if {ASSUMPTION} "
            f"({self.held_out:.4g} on samples that it is not chosen by)"
        ]
        for bits, together, together_se, error, error_se in self.uniform:
            said.append(
                f"measured: all units at {bits} bits increase the loss by {_with_error(together, together_se)}, "
                f"{_with_error(error, error_se, '+')} from the sum of the single increases"
            )
        return said

    def as_json(self) -> dict[str, Any]:
        """The table for other programs."""
        return {
            "bits": dict(zip(self.names, map(int, self.bits), strict=True)),
            "weights": dict(zip(self.names, (text.split() for text in self.weights), strict=True)),
            "mean_bits": self.mean_bits,
            "bytes": self.bytes,
            "expected_loss_increase": self.expected,
            "expected_loss_increase_se": self.expected_se,
            "held_out_loss_increase": self.held_out,
            "assumption": ASSUMPTION,
            "uniform": [
                dict(zip(("bits", "loss_increase", "loss_increase_se", "additivity_error", "additivity_error_se"), row,
                         strict=True))
                for row in self.uniform
            ],
        }  # fmt: skip


def bit_table(data: Any, budget: str) -> BitTable:
    """The table of a result of `sensitivity` that is expected to increase the loss least.

    An integer program (multiple-choice knapsack) over the measured increases, solved exactly, to 1e-6 of
    the budget. A unit's cost at some bits is the largest increase measured at as many or more, at least 0: noise must
    not make fewer bits look better.

    Raises:
        OptionError: the budget is no size, or below the fewest bits that were measured.
        ValueError: the result holds no finished quantisation.
    """
    arrays = {name: np.asarray(data[name]) for name in (*NEEDED, "setting") if name in data}
    if missing := [name for name in NEEDED if name not in arrays]:
        raise ValueError(f"a bit table needs a result of sensitivity, this one lacks {missing[0]}")
    quantised = np.flatnonzero(arrays["method"].astype(str) == "quantise")
    increase = arrays["loss_increase"][:, quantised]  # (unit, width), from the most bits to the fewest
    if not quantised.size or not np.isfinite(increase).all():
        what = "no quantisation" if not quantised.size else "units or bit-widths that are not finished, or not finite"
        raise ValueError(f"a bit table needs every unit at every bit-width, and this result holds {what}")
    bits = arrays["level"][quantised].astype(int)
    sizes = arrays["size"].astype(np.int64)
    total = budget_bits(budget, int(sizes.sum()))
    if total < int(sizes.sum()) * bits.min():
        least = math.ceil(int(sizes.sum()) * int(bits.min()) / 8)
        raise OptionError(
            f"--budget {budget} is below {bits.min()} bits for every weight ({least:,} bytes), the fewest that were "
            "measured; give more, or measure fewer --bits"
        )
    bits_of, units = np.outer(sizes, bits), np.arange(len(sizes))
    chosen = _knapsack(increase, bits_of, total)
    sums, parts = parts_of(arrays)
    sums = sums[:, quantised, 1:]  # (part, width, unit)
    expected, error = over_parts(sums[:, chosen, units].sum(axis=1), parts)
    held_out = []
    for half in (np.arange(len(parts)) % 2 == 0, np.arange(len(parts)) % 2 == 1) if len(parts) > 1 else ():
        own = _knapsack(sums[half].sum(axis=0).T / parts[half].sum(), bits_of, total)
        held_out.append(float(sums[~half][:, own, units].sum() / parts[~half].sum()))
    attributes = getattr(data["loss_increase"], "attrs", {})
    return BitTable(
        tuple(map(str, arrays["name"])), tuple(map(str, arrays["weights"])), sizes, bits[chosen],
        increase[units, chosen], arrays["loss_increase_se"][units, quantised[chosen]], float(expected), float(error),
        float(np.mean(held_out)) if held_out else math.nan,
        uniform_of(arrays, quantised, float(sizes @ bits[chosen] / sizes.sum())), str(attributes.get("units", "nats")),
    )  # fmt: skip


NEEDED = (
    "name", "weights", "size", "method", "level", "loss_increase", "loss_increase_se", "part_loss_increase", "samples",
    "done", "together_loss_increase", "together_loss_increase_se", "additivity_error", "additivity_error_se",
)  # fmt: skip


def budget_bits(text: str, weights: int) -> int:
    """Bits in all for `4.5` (mean bits per weight) or `12MB`. Raises OptionError: the text is neither."""
    if re.fullmatch(r"\d+(\.\d+)?", text) and float(text) > 0:
        return math.floor(float(text) * weights + 1e-9)
    try:
        found = parse_bytes("budget", text)
    except OptionError:
        found = None
    if found is None:
        raise invalid("budget", text, "mean bits per weight such as 4.5, or a size such as 12MB")
    return 8 * found


def uniform_of(
    arrays: Mapping[str, np.ndarray], quantised: np.ndarray, mean_bits: float
) -> tuple[tuple[int, float, float, float, float], ...]:
    """Bits, joint loss increase and additivity error with their errors, for the widths around a mean one."""
    bits = arrays["level"][quantised]
    near = {int(quantised[i]) for i in (np.abs(bits - mean_bits).argsort(kind="stable")[:2])}
    names = ("together_loss_increase", "together_loss_increase_se", "additivity_error", "additivity_error_se")
    return tuple((int(arrays["level"][i]), *(float(arrays[name][i]) for name in names)) for i in sorted(near))  # type: ignore[misc]


def _knapsack(increase: np.ndarray, sizes: np.ndarray, capacity: int) -> np.ndarray:
    """One column per row, (n,), with the least total cost among those whose sizes fit; arguments are (n, k)."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import block_diag, csr_matrix, vstack

    costs = np.maximum.accumulate(np.maximum(increase, 0.0), axis=1)
    n, k = costs.shape
    one_each = block_diag([np.ones((1, k))] * n)
    scale = SCALE / max(float(costs.max()), 1e-300)
    found = milp(
        (scale * costs).ravel(),
        integrality=np.ones(n * k),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            vstack([one_each, csr_matrix(sizes.reshape(1, -1) / capacity)]), [1.0] * n + [0.0], [1.0] * (n + 1)
        ),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise ValueError(f"no table of bit-widths was found: {found.message}")
    chosen = np.asarray(found.x).reshape(n, k).argmax(axis=1)
    equal = costs == costs[np.arange(n), chosen][:, None]
    fewest = k - 1 - np.argmax(equal[:, ::-1], axis=1)  # of equally good widths, which fits as well
    return np.asarray(fewest)


def bit_tables(path: Path, budget: str, *, label: str | None = None) -> list[tuple[str, BitTable]]:
    """The table of every result of `sensitivity` in a file, (group, table).

    Raises:
        OptionError: the budget is no size, or too small.
        FileNotFoundError, ValueError: there is no results file, or nothing in it that a table can be made of.
    """
    found = [(name, data) for name, data in reader.find(path, "sensitivity", label) if reader.finished_units(data)]
    if not found:
        raise ValueError(f"{path} holds no result of sensitivity for --budget; measure one: landscape sensitivity")
    tables = []
    for name, data in found:
        with reader.using(path, names=[name]):
            tables.append((name, bit_table(data, budget)))
    return tables


def export_bit_tables(path: Path, out: Path, budget: str, *, label: str | None = None) -> list[Path]:
    """Write every table to `<label>-<digest>-bits.json`: bits of each unit, its parameters, and what is expected.

    Raises:
        OptionError, FileNotFoundError, ValueError: as `bit_tables`.
    """
    tables = bit_tables(path, budget, label=label)
    texts = {f"{name.partition('/')[2]}-bits.json": json.dumps(table.as_json(), indent=1) for name, table in tables}
    return [write_text(out / name, f"{text}\n") for name, text in texts.items()]
