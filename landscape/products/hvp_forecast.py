"""Predict how long each backend of Hessian-vector products takes for the products that are planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Seconds of a product and of the preparation of a mini-batch, as shares of those of double backward: rounded from
# resnet_demo (0.66, 0.81) and vit_demo (0.74 to 0.84, 1.0) at random weights, mini-batches of 16 images of 32 x 32, one
# thread of a CPU with AVX-512. Those of several mini-batches in one product are a guess: no GPU was measured. Only what
# is predicted to win is prepared, and then its own times count.
SHARES = {"traced": (0.70, 1.0), "batched": (0.5, 0.7)}
# Seconds per function of the forward pass, and in any case, to record a graph: a line through the same two networks
# (102 and 291 functions) on that CPU.
TRACE = (0.01, 1.0)
LOADED = 0.3  # seconds to load and check a graph from disk
PRODUCTS = 20  # per mini-batch: of five eigenvalues


@dataclass(frozen=True)
class PlannedProducts:
    """The products to be made, which decide what preparation pays."""

    batches: int = 1  # mini-batches
    products: int = PRODUCTS  # of each mini-batch, about
    rebuilt: bool = False  # every product passes over all mini-batches, whose graphs are prepared anew for it
    at_once: int = 1  # mini-batches measured at the same time, in threads
    stored: int = 0  # bytes of the vectors that a search keeps

    @property
    def total(self) -> int:
        """Products of mini-batches."""
        return self.batches * self.products

    @property
    def prepared(self) -> int:
        """How often a mini-batch is prepared for products."""
        return self.total if self.rebuilt and self.batches > 1 else self.batches


@dataclass(frozen=True)
class Costs:
    """Seconds of a backend, measured or predicted."""

    start: float  # before the first mini-batch: to record; 0 once that is done
    once: float  # to prepare a mini-batch
    each: float  # per product

    def total(self, planned: PlannedProducts) -> float:
        """Seconds from now on."""
        return self.start + (planned.prepared * self.once + planned.total * self.each) / planned.at_once

    def faster(self, other: Costs, planned: PlannedProducts) -> bool:
        """Whether this takes less time than another backend."""
        return self.total(planned) < other.total(planned)


def predicted(kept: Costs, functions: int, *, batched: bool, stored: bool) -> Costs:
    """The costs of a traced graph from those of double backward and the number of functions in the forward pass.

    `batched`: of several mini-batches in one product; `stored` says that the graph is on disk.
    """
    each, once = SHARES["batched" if batched else "traced"]
    return Costs(LOADED if stored else TRACE[0] * functions + TRACE[1], once * kept.once, each * kept.each)


def reason(hvp: str, costs: Mapping[str, Costs], planned: PlannedProducts) -> str:
    """The chosen backend with its predicted seconds, and those of the other."""
    seconds = {name: cost.total(planned) for name, cost in costs.items()}
    others = "".join(f"; {name} {_in_words(s)}" for name, s in seconds.items() if name != hvp)
    batches = f"{planned.batches} mini-batch{'es' if planned.batches > 1 else ''}"
    return f"{hvp} (predicted {_in_words(seconds[hvp])} for {batches}{others}); --hvp chooses another"


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
