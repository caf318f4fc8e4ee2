"""Select the backend of Hessian-vector products: the requested one, or the fastest in a short benchmark."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from landscape.curvature import pattern_cache
from landscape.curvature.batched_basis import GROWTH
from landscape.curvature.hessian_product import out_of_memory
from landscape.curvature.kinks import activation_pattern, check_pattern, has_kinks
from landscape.curvature.micro_batches import MicroBatching
from landscape.curvature.operator import Curvature, Operator
from landscape.curvature.parameter_selection import matching
from landscape.curvature.pattern_cache import compact_bytes
from landscape.curvature.traced_hessian import trace
from landscape.curvature.vectors import length, random_unit
from landscape.data.memory import available_on
from landscape.subject.checks import refuse_training
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

# kept: double backward through a kept graph; traced: a recorded forward-over-reverse graph, with images in the order
# given or channels last; compiled: that graph as machine code; together: that graph for several mini-batches at once.
Hvp = Literal["auto", "kept", "traced", "traced-channels-last", "compiled", "together"]
Kinks = Literal["double", "single"]
CODES: tuple[str, ...] = get_args(Hvp)[1:]  # a mini-batch stores the position of its backend in this list
CODES_MEANING = f"how products were made: {', '.join(f'{i} {hvp}' for i, hvp in enumerate(CODES))}"
HVP_HELP = (
    "Hessian-vector product backend (kept: double backward, together: batched); auto benchmarks and picks the fastest "
    "(results agree to rounding)"
)
KINKS_HELP = "precision that decides the activation pattern (ReLU, max pooling); double adds a pass"
WORTH_TRACING = 32  # mini-batches: for fewer a trace of some seconds does not pay
WORTH_COMPILING = 500.0  # seconds of products: below that a compilation of half a minute to two does not
PRODUCTS = 20  # per mini-batch: of five eigenvalues
BATCHED = 8  # mini-batches per product of `together`, at least
MORE_BATCHED = (32, 16)  # of a GPU with enough memory, the most first; which is the fastest is not measured
WASTED = 0.125  # share of the mini-batches that may be added to fill up the last set of so many
AGREES = 0.1  # accepted relative difference of two backends: one unit on the other side of its kink causes 0.03
REPEATS = 3  # products per candidate
CLEARLY = 1.2  # how many times faster than the expected backend another one has to be

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedProducts:
    """The products to be made, which decide what preparation pays."""

    batches: int = 1  # mini-batches
    products: int = PRODUCTS  # of each mini-batch, about
    rebuilt: bool = False  # every product passes over all mini-batches, whose graphs are prepared anew for it

    @property
    def total(self) -> int:
        """Products of mini-batches."""
        return self.batches * self.products

    @property
    def prepared(self) -> int:
        """How often a mini-batch is prepared for products."""
        return self.total if self.rebuilt and self.batches > 1 else self.batches


ONE_BATCH = PlannedProducts()


def curvature(
    subject: Subject,
    parameters: Mapping[str, Tensor],
    hvp: Hvp,
    *,
    planned: PlannedProducts = ONE_BATCH,
    operator: Operator = "hessian",
    kinks: Kinks = "single",
    batched: bool = True,
) -> Curvature:
    """Prepare the planned products; those of other matrices than the Hessian use double backward.

    `auto` uses double backward for a few mini-batches; for more it traces the model and picks the backend that is the
    fastest over three products. With `batched` False several mini-batches at once are no candidate. Fixing the
    activation pattern (`kinks` double) costs a forward pass in double precision per mini-batch; where every product
    passes over all of them, their patterns are kept if they fit into memory, else they are not fixed.

    Raises:
        ValueError: the backend does not work with this model, or the model is in training mode.
    """
    refuse_training(subject.model)
    fixed = kinks == "double" and _can_fix_pattern(subject)
    if fixed and planned.prepared > planned.batches:
        fixed = _patterns_fit(subject, planned.batches)
    if operator == "hessian" and hvp == "auto" and planned.prepared >= WORTH_TRACING:
        known = _fastest_so_far(subject, parameters, fixed, batched)
        if not known:
            known.append(_fastest(Curvature(subject, parameters, "kept", fixed=fixed), planned, batched))
        return known[0]
    if operator != "hessian" or hvp in ("auto", "kept"):
        return Curvature(subject, parameters, "kept", operator, fixed)
    together = _side_by_side(subject, parameters, planned.batches) if hvp == "together" else 0
    return _traced(subject, parameters, fixed, hvp, together)


def autotuned(subject: Subject, pattern: str, hvp: Hvp, **options: Any) -> dict[str, str]:
    """The choice of a probe's `autotune`: the backend that `auto` picks; empty if one was requested."""
    if hvp != "auto":
        return {}
    return {"hvp": curvature(subject, matching(subject.parameters, pattern), hvp, **options).hvp}


def without_hvp(probe: Any) -> dict[str, Any]:
    """The parameters of a probe without the backend, which changes nothing but rounding."""
    return {name: value for name, value in asdict(probe).items() if name != "hvp"}


@once_per_weights
def _can_fix_pattern(subject: Subject) -> bool:
    """Whether the network has kinks in single precision, and is the same function in double."""
    if subject.dtype != torch.float32 or subject.device.type == "mps":
        return False
    inputs, _ = subject.batch(0)
    try:
        if subject.needs_graph:
            raise ValueError("it differentiates inside its forward pass")
        if not has_kinks(subject.model, inputs, subject.forward):
            return False
        pattern = activation_pattern(subject.model, inputs, subject.forward)
        check_pattern(subject.model, inputs, pattern, subject.forward)
    except Exception as error:  # whatever a model's own code raises
        if isinstance(error, RuntimeError | MemoryError) and out_of_memory(error):
            return True  # micro-batches may fit
        why = str(error).strip().partition("\n")[0]
        log.info("the activation pattern stays that of single precision: the model cannot be run in double (%s)", why)
        return False
    return True


@once_per_weights
def _patterns_fit(subject: Subject, batches: int) -> bool:
    """Whether the activation patterns of so many mini-batches may be kept in memory."""
    inputs, _ = subject.batch(0)
    needed = batches * compact_bytes(activation_pattern(subject.model, inputs, subject.forward))
    if needed > pattern_cache.MOST_BYTES:
        log.info(
            "the activation pattern stays that of single precision: those of %d mini-batches would take %.1f GiB, more "
            "than %.1f GiB; with at most --samples %d it is fixed", batches, needed / 2**30,
            pattern_cache.MOST_BYTES / 2**30, max(int(len(subject) * pattern_cache.MOST_BYTES / needed), 1),
        )  # fmt: skip
    return needed <= pattern_cache.MOST_BYTES


@once_per_weights
def _fastest_so_far(subject: Subject, parameters: Mapping[str, Tensor], fixed: bool, batched: bool) -> list[Curvature]:
    """The result of a benchmark, empty before it: one serves for any number of mini-batches."""
    return []


def _fastest(double_backward: Curvature, planned: PlannedProducts, batched: bool) -> Curvature:
    """The fastest backend of a benchmark; unless another is clearly faster, the one that usually is."""
    subject = double_backward.subject
    kinds: list[Hvp] = ["traced-channels-last" if convolves(subject.model) else "traced"]
    if batched and subject.device.type != "cpu" and planned.batches >= 2 * BATCHED:
        kinds.insert(0, "together")
    candidates = {"kept": double_backward}
    seconds = {"kept": _seconds_per_product(double_backward)}
    for hvp in kinds:
        _add_candidate(hvp, planned, candidates, seconds)
    if planned.total * min(seconds.values()) > WORTH_COMPILING:
        log.info("compiling the Hessian products, a minute or two")
        _add_candidate("compiled", planned, candidates, seconds)
    least = min(seconds.values())
    order = ["compiled", *kinds, "kept"]
    best = next(candidates[hvp] for hvp in order if seconds.get(hvp, math.inf) <= CLEARLY * least)
    log.info(
        "Hessian products: %s (%s); --hvp chooses another",
        best.hvp, ", ".join(f"{hvp} {1e3 * s:.1f} ms" for hvp, s in seconds.items()),
    )  # fmt: skip
    return best


def convolves(model: nn.Module) -> bool:
    """Whether a model slides overlapping kernels over maps; cutting an image into patches does not count."""
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return any(k > s for m in convolutions for k, s in zip(m.kernel_size, m.stride, strict=True))


def _add_candidate(
    hvp: Hvp, planned: PlannedProducts, candidates: dict[str, Curvature], seconds: dict[str, float]
) -> None:
    """Add a backend with its time, if it works with this model."""
    double_backward = candidates["kept"]
    try:
        kinks: Kinks = "double" if double_backward.fixed else "single"
        candidate = curvature(double_backward.subject, double_backward.parameters, hvp, planned=planned, kinks=kinks)
        seconds[hvp] = _seconds_per_product(candidate)
    except (ValueError, RuntimeError) as error:
        log.info("no %s Hessian products: %s", hvp, str(error).partition("\n")[0])
        return
    candidates[hvp] = candidate


def _side_by_side(subject: Subject, parameters: Mapping[str, Tensor], batches: int) -> int:
    """Mini-batches per product of `together`: more on a GPU whose memory they fit; the first answer stays."""
    if subject.device.type != "cuda":
        return BATCHED
    known = _side_by_side_so_far(subject, parameters)
    if not known:
        known.append(batched_count(batches, _fitting(subject, parameters)))
    return known[0]


@once_per_weights
def _side_by_side_so_far(subject: Subject, parameters: Mapping[str, Tensor]) -> list[int]:
    """Empty before the first answer: parts of a run, with fewer mini-batches each, share one trace."""
    return []


def _fitting(subject: Subject, parameters: Mapping[str, Tensor]) -> int:
    """How many mini-batches fit into half of a GPU's memory: their graphs, and the vectors of their searches."""
    device, double_backward = subject.device, Curvature(subject, parameters, "kept")
    free, before = available_on(device), torch.cuda.memory_allocated(device)
    product = double_backward.product(0)  # holds the tensors that a graph keeps
    graph = torch.cuda.memory_allocated(device) - before
    del product
    vectors = GROWTH * double_backward.size * subject.dtype.itemsize
    # Twice, as a product needs about as much again, and twice for what a CUDA graph copies and holds for itself.
    return int(free // 2 // (4 * graph + vectors))


def batched_count(batches: int, fitting: int) -> int:
    """The most mini-batches per product that fit into memory and hardly have to be filled up in the last set."""
    return next((n for n in MORE_BATCHED if n <= fitting and -batches % n <= WASTED * batches), BATCHED)


@once_per_weights
def _traced(subject: Subject, parameters: Mapping[str, Tensor], fixed: bool, hvp: Hvp, together: int) -> Curvature:
    double_backward = Curvature(subject, parameters, "kept", fixed=fixed)

    inputs, targets = subject.batch(0)
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise ValueError(f"--hvp {hvp} needs one tensor as input and one as target; use --hvp kept")
    traced = trace(
        subject.model, subject.losses, parameters, inputs, targets, forward=subject.forward,
        pattern=double_backward.pattern(0) if fixed else (),
        channels_last=hvp == "traced-channels-last" or (hvp == "compiled" and convolves(subject.model)),
        compiled=hvp == "compiled",
        batched=together,
    )  # fmt: skip
    candidate = replace(double_backward, hvp=hvp, _traced=traced, _micro_batching=MicroBatching())
    _require_agreement(candidate, double_backward)
    return candidate


def _require_agreement(candidate: Curvature, double_backward: Curvature) -> None:
    """Reject a trace whose product differs from that of double backward, where the latter works and is finite.

    Code that is compiled already, such as TorchScript, may be recorded wrongly.
    """
    subject = candidate.subject
    vector = random_unit(candidate.size, 0, device=subject.device, dtype=subject.dtype)
    try:
        expected = double_backward.product(0)(vector)
    except ValueError:
        return
    product = _first_product(candidate)(vector).view(-1, candidate.size)[0]
    difference, size = length(product - expected).item(), length(expected).item()
    if math.isfinite(size) and not difference <= AGREES * size:
        raise ValueError(
            f"the model cannot be traced (a Hessian product of length {size:.3g} would be wrong by {difference:.3g}); "
            "use --hvp kept"
        )


def _seconds_per_product(candidate: Curvature) -> float:
    """Seconds per mini-batch and product, the best of a few after a warm-up."""
    subject, product = candidate.subject, _first_product(candidate)
    vector = random_unit(candidate.size, 0, device=subject.device, dtype=subject.dtype)
    times = [_seconds(lambda: product(vector), subject.device) for _ in range(1 + REPEATS)]
    return min(times) / max(candidate.batched, 1)


def _first_product(candidate: Curvature) -> Callable[[Tensor], Tensor]:
    """Products of the first mini-batch; of a batched backend those of as many copies of it, by rows."""
    if not candidate.batched:
        return candidate.product(0)
    batched = candidate.batched_product([0] * candidate.batched)
    return lambda vector: batched(vector.expand(candidate.batched, -1))


def _seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of work; on a CPU of this process alone, which other programs slow down less."""
    if device.type == "cpu":
        start = time.process_time()
        work()
        return (time.process_time() - start) / torch.get_num_threads()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start
