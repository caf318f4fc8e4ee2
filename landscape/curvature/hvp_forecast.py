"""Predict how long each backend of Hessian-vector products takes for the products that are planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Seconds of a product and of the preparation of a mini-batch, as shares of those of double backward: rounded from
# resnet_demo (traced 0.66, 0.81; compiled 0.55, 0.66) and vit_demo (0.74 to 0.84, 1.0; 0.55, 0.42) at random
# weights, mini-batches of 16 images of 32 x 32, one thread of a CPU with AVX-512. Those of `together` are a guess: no
# GPU was measured. Only what is predicted to win is prepared, and then its own times count.
SHARES = {"traced": (0.70, 1.0), "compiled": (0.57, 0.7), "together": (0.5, 0.7)}
# Seconds per function of the forward pass, and in any case, to record a graph and to compile it, compilers included:
# a line through the same two networks (102 and 291 functions) on that CPU.
TRACE = (0.01, 1.0)
COMPILE = (0.06, 18.0)
LOADED = 0.3  # seconds to load and check code from disk
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

    start: float  # before the first mini-batch: to record and to compile; 0 once that is done
    once: float  # to prepare a mini-batch
    each: float  # per product

    def total(self, planned: PlannedProducts) -> float:
        """Seconds from now on."""
        return self.start + (planned.prepared * self.once + planned.total * self.each) / planned.at_once


def predicted(hvp: str, kept: Costs, functions: int, notes: Mapping[str, Any], *, stored: bool) -> Costs:
    """The costs of a backend from those of double backward, the number of functions in the forward pass and notes.

    The `notes` of an earlier run on the same network are in seconds of that run, of double backward too, which says how
    fast the machine was; `stored` says that compiled code is on disk.
    """
    kind = hvp.removesuffix("-channels-last")
    each, once = SHARES[kind]
    start = _line(TRACE, functions) + (_line(COMPILE, functions) if kind == "compiled" else 0.0)
    costs = Costs(start, once * kept.once, each * kept.each)
    try:
        then, now = Costs(*notes["kept"]), Costs(*notes[hvp])
        pace = (kept.once + kept.each) / (then.once + then.each)
        costs = Costs(pace * now.start, pace * now.once, pace * now.each)
    except (KeyError, TypeError, ZeroDivisionError):
        pass
    return replace(costs, start=LOADED) if stored else costs


def reason(hvp: str, costs: Mapping[Any, Costs], planned: PlannedProducts, *, paid: float = 0.0) -> str:
    """The chosen backend with its predicted seconds, those of the others, and those that earlier runs paid."""
    seconds = {name: cost.total(planned) for name, cost in costs.items()}
    others = ", ".join(f"{name} {_in_words(s)}" for name, s in seconds.items() if name != hvp)
    batches = f"{planned.batches} mini-batch{'es' if planned.batches > 1 else ''}"
    earlier = f"; it would have saved {_in_words(paid)} in earlier runs" if paid >= 0.1 else ""
    return f"{hvp} (predicted {_in_words(seconds[hvp])} for {batches}; {others}{earlier}); --hvp chooses another"


def _line(coefficients: tuple[float, float], functions: int) -> float:
    slope, constant = coefficients
    return slope * functions + constant


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
