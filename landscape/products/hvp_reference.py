"""Double backward on the first mini-batch, to compare other backends with, and a forecast of how long they take."""

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from landscape.checkpoints.raw_files import json_of
from landscape.data import structure, user_cache
from landscape.options import counted
from landscape.products import kinks, operator, vectors
from landscape.products.hessian_product import differentiable_attention, graph_nodes
from landscape.subject.device import name_of, wait_for
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

# Seconds of a product and of the preparation of a mini-batch, as shares of those of double backward: rounded from
# resnet_demo (0.66, 0.81) and vit_demo (0.74 to 0.84, 1.0) at random weights, mini-batches of 16 images of 32 x 32, one
# thread of a CPU with AVX-512; on an H200 a product of a ResNet-50 took 0.73. Those of several mini-batches in one
# product are a guess. Only what is predicted to win is prepared, and then its own times count.
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

    def faster(self, other: "Costs", planned: PlannedProducts) -> bool:
        """Whether this takes less time than another backend."""
        return self.total(planned) < other.total(planned)


def predicted(kept: Costs, functions: int, device: torch.device, *, batched: bool, stored: bool) -> Costs:
    """The costs of a traced graph from those of double backward and the number of functions in the forward pass.

    `batched`: of several mini-batches in one product; `stored` says that the graph is on disk. On a GPU the shares are
    those that the last graph had on one of its kind.
    """
    kind = "batched" if batched else "traced"
    each, once = _learned(device).get(kind, SHARES[kind])
    return Costs(LOADED if stored else TRACE[0] * functions + TRACE[1], once * kept.once, each * kept.each)


def learn(device: torch.device, kept: Costs, found: Costs, *, batched: bool) -> None:
    """Keep the measured shares of a traced graph for later predictions on GPUs of this kind."""
    path = _kept(device)
    if path is not None and min(kept.each, kept.once) > 0:
        shares = {"batched" if batched else "traced": (found.each / kept.each, found.once / kept.once)}
        with contextlib.suppress(OSError):
            path.write_text(json.dumps(_learned(device) | shares))


def _learned(device: torch.device) -> dict[str, tuple[float, float]]:
    path = _kept(device)
    try:
        return {} if path is None else {str(kind): (each, once) for kind, (each, once) in json_of(path).items()}
    except (OSError, ValueError, TypeError):
        return {}


def _kept(device: torch.device) -> Path | None:
    """The file of the shares of this kind of GPU; None for a CPU, whose shares were measured."""
    if device.type == "cpu" or (place := user_cache.folder("forecasts", "forecasts of products")) is None:
        return None
    return place / (re.sub(r"\W+", "-", name_of(device)) + ".json")


def reason(hvp: str, costs: Mapping[str, Costs], planned: PlannedProducts) -> str:
    """The chosen backend with its predicted seconds, and those of the other."""
    seconds = {name: cost.total(planned) for name, cost in costs.items()}
    others = "".join(f"; {name} {_in_words(s)}" for name, s in seconds.items() if name != hvp)
    batches = counted(planned.batches, "mini-batch")
    return f"{hvp} (predicted {_in_words(seconds[hvp])} for {batches}{others}); --hvp chooses another"


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"


AGREES = 0.1  # accepted relative difference of two backends where a unit on the other side of its kink causes 0.03
ROUNDING = 0.01  # accepted where only rounding differs: it is coarse for a network that fits its samples perfectly
STRICT = 1e-3  # accepted of a graph from disk that is found before anything was traced
REPEATS = 2  # products per candidate, after one more
LONG = 2.0  # seconds of a product that is not timed again; the first one of a process also sets up libraries

T = TypeVar("T")


@dataclass(frozen=True)
class Reference:
    """Double backward on the first mini-batch."""

    curved: operator.Curvature
    patterns: kinks.PatternCache | None  # with the activation pattern of the mini-batch if it is fixed
    costs: Costs
    functions: int  # in the forward pass
    product: Tensor | None  # with a random vector; None where it cannot be computed

    def pattern(self) -> list[Tensor]:
        """The activation pattern of the first mini-batch."""
        return replace(self.curved, patterns=self.patterns).pattern(0)


@once_per_weights
def reference(subject: Subject, parameters: Mapping[str, Tensor], fixed: bool) -> Reference:
    """Time double backward; its graph is freed before another backend needs memory."""
    curved = operator.Curvature(subject, parameters, "double-backward", fixed=fixed)
    cached = replace(curved, patterns=kinks.PatternCache(subject.device))
    if fixed:
        cached.pattern(0)
    vector = vectors.random_unit(curved.size, 0, device=subject.device, dtype=subject.dtype)
    try:
        once, product = _prepared_warm(lambda: cached.product(0), subject.device)
        each, expected = timed(lambda: product(vector), subject.device)
    except ValueError:
        return Reference(curved, cached.patterns, Costs(0.0, 0.0, 0.0), 0, None)
    if each < LONG:
        each = min(each, timed(lambda: product(vector), subject.device)[0])
    with torch.enable_grad(), differentiable_attention():
        loss, _ = _loss_of_few(subject)
    return Reference(curved, cached.patterns, Costs(0.0, once, each), len(graph_nodes([loss])), expected)


@once_per_weights
def flops(subject: Subject) -> float:
    """Floating-point operations of a Hessian product of the first mini-batch, from those of a few samples, or 0.

    A forward pass of doubled numbers, and two backward passes of each.
    """
    with FlopCounterMode(display=False) as counter, differentiable_attention(), contextlib.suppress(Exception):
        _, samples = _loss_of_few(subject)
        return 6.0 * float(counter.get_total_flops()) * subject.samples(0) / samples
    return 0.0


def _loss_of_few(subject: Subject) -> tuple[Tensor, int]:
    """The loss of one sample, or of the mini-batch where that cannot be split or the model wants its size; how many."""
    inputs, targets = subject.batch(0)
    if subject.divisible:
        first = [structure.rows_of(nested, slice(0, 1)) for nested in (inputs, targets)]
        with contextlib.suppress(Exception):  # whatever a model's own code raises
            return subject.losses(subject.outputs(first[0]), first[1]).mean(), 1
    return subject.losses(subject.outputs(inputs), targets).mean(), subject.samples(0)


def agrees(candidate: operator.Curvature, expected: Reference) -> bool:
    """Whether the product of a loaded graph is that of double backward, to rounding."""
    try:
        return expected.product is not None and _difference(candidate, expected, expected.product) <= STRICT
    except (RuntimeError, ValueError):  # tensors that the graph was not made for
        return False


def require_agreement(candidate: operator.Curvature, expected: Reference) -> None:
    """Reject a trace whose product differs from that of double backward, where the latter works and is finite.

    Code that is compiled already, such as TorchScript, may be recorded wrongly, and a weight that a module also holds
    outside its parameters counts as a constant there.
    """
    if expected.product is None:
        return
    size, difference = vectors.length(expected.product).item(), _difference(candidate, expected, expected.product)
    if math.isfinite(size) and not difference <= ROUNDING and not (difference <= AGREES and _may_jump(expected.curved)):
        raise ValueError(
            f"the model cannot be traced (a Hessian product of length {size:.3g} would be wrong by "
            f"{difference * size:.3g}); use --hvp double-backward"
        )


def _may_jump(curved: operator.Curvature) -> bool:
    """Whether units may land on either side of their kinks, or rounding is coarse."""
    subject = curved.subject
    if subject.dtype != torch.float32:
        return subject.dtype != torch.float64
    return not curved.fixed and kinks.has_kinks(subject.model, subject.batch(0)[0], subject.forward)


def _difference(candidate: operator.Curvature, expected: Reference, product: Tensor) -> float:
    vector = vectors.random_unit(candidate.size, 0, device=product.device, dtype=product.dtype)
    found = _first_product(replace(candidate, patterns=expected.patterns))(vector).view(-1, candidate.size)[0]
    difference, size = vectors.length(found - product).item(), vectors.length(product).item()
    return difference / size if size else difference


def seconds_of(candidate: operator.Curvature) -> tuple[float, float]:
    """Seconds to prepare a mini-batch, its activation pattern aside, and per product, the best of a few."""
    subject, batches = candidate.subject, max(candidate.batched, 1)
    vector = vectors.random_unit(candidate.size, 0, device=subject.device, dtype=subject.dtype)
    once, product = _prepared_warm(lambda: _first_product(candidate), subject.device)
    times = [timed(lambda: product(vector), subject.device)[0] for _ in range(1 + REPEATS)]
    return once / batches, min(times) / batches


def _prepared_warm(prepare: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds to prepare a product, with it; on a device the second time, because the first one loads kernels."""
    if device.type != "cpu":
        prepare()
    return timed(prepare, device)


def _first_product(candidate: operator.Curvature) -> Callable[[Tensor], Tensor]:
    """Products of the first mini-batch; of a batched backend those of as many copies of it, by rows."""
    if not candidate.batched:
        return candidate.product(0)
    batched = candidate.batched_product([0] * candidate.batched)
    return lambda vector: batched(vector.expand(candidate.batched, -1))


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds of work with its result; on a CPU of this process alone, which other programs slow down less."""
    if device.type == "cpu":
        start = time.process_time()
        result = work()
        return (time.process_time() - start) / torch.get_num_threads(), result
    wait_for(device)
    start = time.perf_counter()
    result = work()
    wait_for(device)
    return time.perf_counter() - start, result
