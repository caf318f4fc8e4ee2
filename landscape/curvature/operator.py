"""Which product to use on a subject: of which matrix, from a kept graph or, of the Hessian, a traced one."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from landscape.curvature.gauss_newton import fisher_product, gauss_newton_product
from landscape.curvature.hessian_product import (
    differentiable_attention,
    hessian_product,
    once_differentiable,
    out_of_memory,
)
from landscape.curvature.kinks import Held, bends, refuse_another, sides
from landscape.curvature.micro_batches import Cut, Divided, Product
from landscape.curvature.traced_hessian import JointProduct, TracedHessian, trace
from landscape.curvature.vectors import length, random_unit
from landscape.subject.checks import refuse_training
from landscape.subject.derived import once_per_weights
from landscape.subject.outputs import logits_in, outputs_of
from landscape.subject.subject import Subject

Operator = Literal["hessian", "ggn", "fisher"]
Hvp = Literal["auto", "kept", "traced", "traced-channels-last", "compiled", "together"]
Kinks = Literal["double", "single"]
CODES: tuple[str, ...] = get_args(Hvp)[1:]  # what is stored per mini-batch is the position in this list
HOW = f"how products were made: {', '.join(f'{i} {kind}' for i, kind in enumerate(CODES))}"
WORTH_TRACING = 32  # mini-batches: below that a trace of some seconds does not pay
WORTH_COMPILING = 500.0  # seconds of products: below that a compilation of half a minute to two does not
PRODUCTS = 16  # per mini-batch, for that estimate
TOGETHER = 8  # mini-batches per product
WHOLE = slice(None)
AGREES = 0.1  # relative difference of products made in two ways: a unit on another side of its kink made 0.03
TRIAL = 3  # products per candidate
CLEARLY = 1.2  # how many times faster another way than the expected one has to be

Last = dict[tuple[int, int | None, int | None], list[Tensor]]  # mini-batch, part of it -> sides of its kinks
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Curvature:
    """Products of the objective's curvature on the mini-batches of a subject.

    Args:
        subject: whose loss is differentiated.
        parameters: by which, name -> tensor.
        kind: how.
        operator: of which matrix: Hessian, Gauss-Newton or empirical Fisher.
        holds: units stay on those sides of their kinks that double precision finds.
        last: where those of the last mini-batch are kept for other curvatures of the same subject.
    """

    subject: Subject
    parameters: Mapping[str, Tensor]
    kind: str
    operator: Operator = "hessian"
    holds: bool = False
    last: Last | None = None
    _traced: TracedHessian | None = None
    _cut: Cut = field(default_factory=Cut)

    @property
    def together(self) -> int:
        """How many mini-batches `joint` takes; 0 where there is none."""
        return self._traced.together if self._traced is not None else 0

    def product(self, i: int) -> Product:
        """The matrix of mini-batch i, weight decay included.

        Raises:
            ValueError: the model has no second derivative; names the layer.
            MemoryError: not even one sample fits.
        """
        inputs, targets = self.subject.batch(i)

        def make(part: slice) -> Product:
            return self._plain(i, part)

        whole = None
        if self._traced is not None and not self.together and self._fits(i):
            whole = partial(self._from_trace, self._traced, i)
        return Divided(make, len(targets), self._cut, explain=lambda error: self._named(error, inputs), whole=whole)

    def joint(self, batches: Sequence[int]) -> JointProduct:
        """The matrices of several mini-batches at once, `together` of them."""
        assert self._traced is not None
        pairs = [self.subject.batch(i) for i in batches]
        held = [self._sides(i) for i in batches] if self.holds else []
        return self._traced.at_all(pairs, sides=held, shift=self.subject.weight_decay)

    def fits_together(self, batches: Sequence[int]) -> bool:
        """Whether `joint` can take these."""
        return 0 < self.together == len(batches) and all(self._fits(i) for i in batches)

    def _fits(self, i: int) -> bool:
        return self._traced is not None and self._traced.suits(*self.subject.batch(i))

    def _sides(self, i: int, part: slice = WHOLE) -> list[Tensor]:
        """Of the kinks of some samples; they are kept for the next curvature only where several share `last`."""
        key = (i, part.start, part.stop)
        if self.last is not None and key in self.last:
            return self.last[key]
        found = sides(self.subject.model, self.subject.batch(i)[0][part])
        if self.last is not None:
            self.last.clear()
            self.last[key] = found
        return found

    def _from_trace(self, traced: TracedHessian, i: int) -> Product:
        inputs, targets = self.subject.batch(i)
        held = self._sides(i) if self.holds else []
        return traced.at(inputs, targets, sides=held, shift=self.subject.weight_decay)

    def _plain(self, i: int, part: slice) -> Product:
        subject, shift = self.subject, self.subject.weight_decay
        inputs, targets = (tensor[part] for tensor in subject.batch(i))
        parameters = list(self.parameters.values())
        held = Held(self._sides(i, part)) if self.holds else contextlib.nullcontext()

        def outputs() -> Tensor:
            with held:
                return outputs_of(subject.model, inputs)

        if self.operator == "hessian":
            return hessian_product(lambda: subject.losses(outputs(), targets).mean(), parameters, shift=shift)
        if self.operator == "ggn":
            return gauss_newton_product(outputs, lambda z: subject.losses(z, targets), parameters, shift=shift)
        return fisher_product(lambda: subject.losses(outputs(), targets), parameters, shift=shift)

    def _named(self, error: ValueError, inputs: Tensor) -> ValueError:
        """The error with the layer it comes from, where it is about a missing derivative."""
        if "differentiated twice" not in str(error):
            return error
        with differentiable_attention():
            layer = once_differentiable(self.subject.model, lambda: self.subject.model(inputs))
        where = f"the layer is {layer}; " if layer else ""
        return ValueError(
            f"{error}; {where}use its plain version (fused attention: fused_attn=False in timm, "
            'attn_implementation="eager" in transformers), or leave its parameters out with --params'
        )


def curvature(
    subject: Subject,
    parameters: Mapping[str, Tensor],
    hvp: Hvp,
    *,
    batches: int,
    operator: Operator = "hessian",
    kinks: Kinks = "single",
    joint: bool = True,
) -> Curvature:
    """Prepare products for a number of mini-batches; those of another matrix than the Hessian keep the plain graph.

    `auto` keeps the plain graph for a few mini-batches; for more it traces the model and takes what a trial of three
    products shows to be the fastest. Without `joint` the caller has no use for several mini-batches at once. The sides
    of kinks in `double` precision cost a forward pass in it for each product prepared.

    Raises:
        ValueError: the kind asked for does not work with this model, or it is being trained.
    """
    refuse_training(subject.model)
    holds = kinks == "double" and _decidable(subject)
    if operator == "hessian" and hvp == "auto" and batches >= WORTH_TRACING:
        fastest = _autotuned(subject, parameters, holds, joint)
        if not fastest:
            fastest.append(_fastest(Curvature(subject, parameters, "kept", holds=holds), batches, joint))
        return fastest[0]
    if operator != "hessian" or hvp in ("auto", "kept"):
        return Curvature(subject, parameters, "kept", operator, holds)
    return _traced(subject, parameters, holds, hvp)


@once_per_weights
def _decidable(subject: Subject) -> bool:
    """Whether the network has kinks in single precision, and is the same function in double."""
    if subject.dtype != torch.float32 or subject.device.type == "mps":
        return False
    inputs, _ = subject.batch(0)
    try:
        if not bends(subject.model, inputs):
            return False
        refuse_another(subject.model, inputs, sides(subject.model, inputs))
    except Exception as error:  # whatever a model's own code raises
        if isinstance(error, RuntimeError | MemoryError) and out_of_memory(error):
            return True  # parts of the mini-batch may fit
        why = str(error).strip().partition("\n")[0]
        log.info("kinks are left as single precision has them: the model cannot be followed in double (%s)", why)
        return False
    return True


def over_all_samples(
    subject: Subject, products: Curvature, *, batches: int | None = None
) -> Callable[[Tensor], Tensor]:
    """Products v -> H v for the mean over all samples: mini-batches weigh by their size, weight decay counts once.

    The graph of a single mini-batch is kept. Of several each is rebuilt for every product: one more gradient, for the
    memory of one mini-batch.

    Args:
        subject: whose samples.
        products: of its mini-batches.
        batches: only the first of them; None takes all.
    """
    sizes = [len(targets) for _, targets in islice(subject.batches, batches)]
    if len(sizes) == 1:
        return products.product(0)

    handful = max(products.together, 1)
    groups = [list(range(at, min(at + handful, len(sizes)))) for at in range(0, len(sizes), handful)]

    def product(vector: Tensor) -> Tensor:
        total = torch.zeros_like(vector)
        for group in groups:
            if products.fits_together(group):
                shares = torch.tensor([sizes[i] / sum(sizes) for i in group], dtype=vector.dtype, device=vector.device)
                total += shares @ products.joint(group)(vector.expand(len(group), -1))
                continue
            for i in group:
                total.add_(products.product(i)(vector), alpha=sizes[i] / sum(sizes))
        return total

    return product


@once_per_weights
def _autotuned(subject: Subject, parameters: Mapping[str, Tensor], holds: bool, joint: bool) -> list[Curvature]:
    """The fastest products, which the first call of `curvature` finds and adds."""
    return []


def _fastest(plain: Curvature, batches: int, joint: bool) -> Curvature:
    """The way that a trial shows to be the fastest; unless clearly slower, the one that usually is."""
    subject = plain.subject
    kinds: list[Hvp] = ["traced-channels-last" if convolves(subject.model) else "traced"]
    if joint and subject.device.type != "cpu" and batches >= 2 * TOGETHER:
        kinds.insert(0, "together")
    candidates = {"kept": plain}
    seconds = {"kept": _trial(candidates["kept"])}
    for kind in kinds:
        _try(kind, candidates, seconds)
    if batches * PRODUCTS * min(seconds.values()) > WORTH_COMPILING:
        log.info("compiling the Hessian products, a minute or two")
        _try("compiled", candidates, seconds)
    least = min(seconds.values())
    order = ["compiled", *kinds, "kept"]
    best = next(candidates[kind] for kind in order if seconds.get(kind, math.inf) <= CLEARLY * least)
    log.info(
        "Hessian products: %s (%s); --hvp chooses another",
        best.kind, ", ".join(f"{kind} {1e3 * s:.1f} ms" for kind, s in seconds.items()),
    )  # fmt: skip
    return best


def convolves(model: nn.Module) -> bool:
    """Whether a model slides kernels over maps; one that cuts an image into patches does not."""
    return any(isinstance(m, nn.Conv2d) and any(map(operator.gt, m.kernel_size, m.stride)) for m in model.modules())


def _try(kind: Hvp, candidates: dict[str, Curvature], seconds: dict[str, float]) -> None:
    """Add a way with its time, if it works with this model."""
    plain = candidates["kept"]
    try:
        kinks: Kinks = "double" if plain.holds else "single"
        made = curvature(plain.subject, plain.parameters, kind, batches=0, kinks=kinks)
        seconds[kind] = _trial(made)
    except (ValueError, RuntimeError) as error:
        log.info("no %s Hessian products: %s", kind, str(error).partition("\n")[0])
        return
    candidates[kind] = made


@once_per_weights
def _traced(subject: Subject, parameters: Mapping[str, Tensor], holds: bool, kind: Hvp) -> Curvature:
    plain = Curvature(subject, parameters, "kept", holds=holds)

    def losses(returned: object, targets: Tensor) -> Tensor:
        return subject.losses(logits_in(returned), targets)

    channels_last = kind == "traced-channels-last" or (kind == "compiled" and convolves(subject.model))
    inputs, targets = subject.batch(0)
    traced = trace(
        subject.model, losses, plain.parameters, inputs, targets,
        sides=plain._sides(0) if plain.holds else (),
        channels_last=channels_last, compiled=kind == "compiled",
        together=TOGETHER if kind == "together" else 0,
    )  # fmt: skip
    found = replace(plain, kind=kind, _traced=traced, _cut=Cut())
    _refuse_different(found, plain)
    return found


def _refuse_different(found: Curvature, plain: Curvature) -> None:
    """Refuse a trace whose product is another than that of the plain graph, where that works and is finite.

    What is compiled on its way, such as TorchScript, may be recorded wrongly.
    """
    size = sum(p.numel() for p in plain.parameters.values())
    vector = random_unit(size, 0, device=plain.subject.device, dtype=plain.subject.dtype)
    try:
        expected = plain.product(0)(vector)
    except ValueError:
        return
    if found.together:
        product = found.joint([0] * found.together)(vector.expand(found.together, -1))[0]
    else:
        product = found.product(0)(vector)
    wrong, whole = length(product - expected).item(), length(expected).item()
    if math.isfinite(whole) and not wrong <= AGREES * whole:
        raise ValueError(
            f"the model cannot be traced (a Hessian product of length {whole:.3g} would be wrong by {wrong:.3g}); "
            "ask for --hvp kept"
        )


def _trial(candidate: Curvature) -> float:
    """Seconds per mini-batch and product, the best of a few after a warm-up; that they agree is a test's business."""
    subject, together = candidate.subject, candidate.together
    size = sum(p.numel() for p in candidate.parameters.values())
    vector = random_unit(size, 0, device=subject.device, dtype=subject.dtype)
    if together:
        joint, rows = candidate.joint([0] * together), vector.expand(together, -1)
        return min(_timed(lambda: joint(rows), subject.device) for _ in range(1 + TRIAL)) / together
    product = candidate.product(0)
    return min(_timed(lambda: product(vector), subject.device) for _ in range(1 + TRIAL))


def _timed(work: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of work; on the CPU of the process alone, which other programs slow down less."""
    if device.type == "cpu":
        start = time.process_time()
        work()
        return (time.process_time() - start) / torch.get_num_threads()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start
