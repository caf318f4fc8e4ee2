"""Loss of a network quantised by a table of bit-widths, and with all units at one width, on the test split.

    landscape train vit_demo --data digits
    landscape sensitivity checkpoints/vit_demo-digits/final.pt --split train --samples 512 --out quantised-vit.h5
    python benchmarks/bit_table.py checkpoints/vit_demo-digits/final.pt quantised-vit.h5 --budgets 3,4

Weights are quantised per channel. The table is chosen on the train split, by the results in the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from measuring import header, parser, row
from torch import Tensor

import landscape
from landscape.results import reader
from landscape.statistics.bit_allocation import BitTable, bit_table
from landscape.statistics.means import mean_and_standard_error
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject
from landscape.weight_space.perturbations import quantised
from landscape.weight_space.weights_in_place import WeightsInPlace


def after(subject: Subject, table: BitTable, bits: Iterable[int]) -> tuple[np.ndarray, float]:
    """Loss per sample and accuracy with every unit at its bits."""
    pairs = [(name, int(b)) for own, b in zip(table.weights, bits, strict=True) for name in own.split()]
    weights = {name: subject.parameters[name].detach() for name, _ in pairs}
    changed: dict[str, Tensor] = {
        name: quantised(weights[name].flatten(1), b, "channel", 0).reshape(weights[name].shape) for name, b in pairs
    }
    with torch.no_grad(), WeightsInPlace(subject, changed) as place:
        place.interpolate(changed, 1.0)
        loss, right = per_sample(subject)
    return loss.numpy(), float(right.mean())


def main() -> None:
    arguments = parser(__doc__, budgets="3,4")
    arguments.add_argument("checkpoint", type=Path)
    arguments.add_argument("results", type=Path)
    given = arguments.parse_args()
    ((_, data),) = reader.find(given.results, "sensitivity")
    subject = landscape.load(given.checkpoint, split="test", samples="all")
    start, right = per_sample(subject)
    print(f"{len(start)} test samples; loss {start.mean():.3f}, accuracy {right.mean():.1%}")
    print(
        header(
            "bits",
            "expected",
            "of samples not chosen by",
            "table",
            "accuracy",
            "one width",
            "accuracy",
            "table - one width",
        )
    )
    for budget in given.budgets.split(","):
        table = bit_table(data, budget)
        own, accuracy = after(subject, table, table.bits)
        uniform, other = after(subject, table, [int(budget)] * len(table.bits))
        rises = [mean_and_standard_error(x) for x in (own - start.numpy(), uniform - start.numpy(), own - uniform)]
        told = [f"{mean:+.3f} ± {error:.3f}" for mean, error in rises]
        expected = f"{table.expected:+.3f} ± {table.expected_se:.3f}"
        print(
            row(
                budget, expected, f"{table.held_out:+.3f}", told[0], f"{accuracy:.1%}", told[1], f"{other:.1%}", told[2]
            )
        )


if __name__ == "__main__":
    main()
