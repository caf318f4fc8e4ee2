"""Count how often the interval of Kendall's tau covers the true one: `python benchmarks/correlations.py [STUDIES]`.

Networks are pairs of normal numbers, whose correlation r gives tau = 2 / pi x asin(r) (Greiner); within groups there is
a difference of three standard deviations between neighbouring groups.
"""

import math
import sys

import numpy as np

from landscape.statistics.seed_groups import kendall


def covered(studies: int, n: int, tau: float, groups: int) -> float:
    """The share of studies of n networks whose interval holds tau."""
    generator, r = np.random.default_rng(n), math.sin(math.pi / 2 * tau)
    labels, count = np.arange(n) % groups, 0
    for _ in range(studies):
        x, noise = generator.normal(size=(2, n))
        y = r * x + math.sqrt(1 - r**2) * noise
        _, low, high = kendall(x + 3 * labels, y - 3 * labels, list(map(str, labels)) if groups > 1 else None)
        count += low <= tau <= high
    return count / studies


if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for groups in (1, 3):
        for n in (12, 30, 100):
            shares = [covered(total, n, tau, groups) for tau in (0.0, 0.3, 0.6)]
            row = " | ".join(f"{100 * share:.1f}" for share in shares)
            print(f"| {n} | {'all' if groups == 1 else f'within {groups} groups'} | {row} |", flush=True)
