"""Which product to use on a subject: of which matrix, from a kept graph or, of the Hessian, a traced one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from landscape.linalg.ggn import GaussNewtonProduct, fisher_product, gauss_newton_product
from landscape.linalg.hessian import HessianProduct, hessian_product
from landscape.linalg.traced import TracedHessian, TracedProduct, trace
from landscape.linalg.vector import random_unit
from landscape.subject import Subject, logits_in, outputs_of

Operator = Literal["hessian", "ggn", "fisher"]
Product = HessianProduct | TracedProduct | GaussNewtonProduct
Hvp = Literal["auto", "kept", "traced", "traced-channels-last", "compiled"]
CODES: tuple[str, ...] = get_args(Hvp)[1:]  # what is stored per mini-batch is the position in this list
WORTH_TRACING = 12  # mini-batches: below that a trace of some seconds does not pay
TRIAL = 3  # products per candidate

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Curvature:
    """Products of the objective's curvature on the mini-batches of a subject.

    Args:
        subject: whose loss is differentiated.
        parameters: by which, name -> tensor.
        kind: how.
        operator: of which matrix: Hessian, Gauss-Newton or empirical Fisher.
    """

    subject: Subject
    parameters: Mapping[str, Tensor]
    kind: str
    operator: Operator = "hessian"
    _traced: TracedHessian | None = None

    def product(self, i: int) -> Product:
        """The matrix of mini-batch i, weight decay included."""
        subject, shift = self.subject, self.subject.weight_decay
        if self._traced is not None:
            inputs, targets = self.subject.batch(i)
            if (inputs.shape, targets.shape) == self._traced.shape:
                return self._traced.at(inputs, targets, shift=shift)
        parameters = list(self.parameters.values())
        if self.operator == "hessian":
            return hessian_product(partial(subject.loss, i), parameters, shift=shift)
        inputs, targets = subject.batch(i)
        outputs = partial(outputs_of, subject.model, inputs)
        if self.operator == "ggn":
            return gauss_newton_product(outputs, lambda z: subject.losses(z, targets), parameters, shift=shift)
        return fisher_product(lambda: subject.losses(outputs(), targets), parameters, shift=shift)


def curvature(
    subject: Subject, parameters: Mapping[str, Tensor], hvp: Hvp, *, batches: int, operator: Operator = "hessian"
) -> Curvature:
    """Prepare products for a number of mini-batches; those of another matrix than the Hessian keep the plain graph.

    `auto` keeps the plain graph for a few mini-batches; for more it traces the model and takes what a trial of three
    products shows to be the fastest. Compiling has to be asked for.

    Raises:
        ValueError: the kind asked for does not work with this model.
    """
    if operator != "hessian":
        return Curvature(subject, parameters, "kept", operator)
    if hvp == "kept":
        return Curvature(subject, parameters, "kept")
    if hvp != "auto":
        return _traced(subject, parameters, hvp)
    if batches < WORTH_TRACING:
        return Curvature(subject, parameters, "kept")
    return subject.once(("curvature", tuple(parameters)), lambda: _fastest(subject, parameters))


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

    def product(vector: Tensor) -> Tensor:
        total = torch.zeros_like(vector)
        for i, size in enumerate(sizes):
            total.add_(products.product(i)(vector), alpha=size / sum(sizes))
        return total

    return product


def _fastest(subject: Subject, parameters: Mapping[str, Tensor]) -> Curvature:
    candidates = [Curvature(subject, parameters, "kept")]
    kinds: list[Hvp] = ["traced"]
    if any(isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1 for module in subject.model.modules()):
        kinds.append("traced-channels-last")
    for kind in kinds:
        try:
            candidates.append(_traced(subject, parameters, kind))
        except ValueError as error:
            log.info("no %s Hessian products: %s", kind, error)
    seconds = {candidate.kind: _trial(candidate) for candidate in candidates}
    best = min(candidates, key=lambda candidate: seconds[candidate.kind])
    log.info(
        "Hessian products: %s (%s); --hvp chooses another",
        best.kind, ", ".join(f"{kind} {1e3 * s:.1f} ms" for kind, s in seconds.items()),
    )  # fmt: skip
    return best


def _traced(subject: Subject, parameters: Mapping[str, Tensor], kind: Hvp) -> Curvature:
    def losses(returned: object, targets: Tensor) -> Tensor:
        return subject.losses(logits_in(returned), targets)

    traced = trace(
        subject.model, losses, parameters, *subject.batch(0),
        channels_last=kind == "traced-channels-last", compiled=kind == "compiled",
    )  # fmt: skip
    return Curvature(subject, parameters, kind, _traced=traced)


def _trial(candidate: Curvature) -> float:
    """Seconds per product, the best of a few after a warm-up; agreement with the plain graph is a test's business."""
    product = candidate.product(0)
    size = sum(p.numel() for p in candidate.parameters.values())
    vector = random_unit(size, 0, device=candidate.subject.device, dtype=candidate.subject.dtype)
    return min(_timed(lambda: product(vector), candidate.subject.device) for _ in range(1 + TRIAL))


def _timed(work: Callable[[], Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
