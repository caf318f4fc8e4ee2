"""The loss curvature of a subject as an operator: products of the Hessian, Gauss-Newton or empirical Fisher matrix."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from landscape.data.structure import Nested, rows_of
from landscape.products import chunked_cross_entropy, hessian_product, micro_batches, traced_hessian
from landscape.products.double_precision import double_of
from landscape.products.kinks import FixedPattern, PatternCache, activation_pattern
from landscape.products.vectors import unflat
from landscape.subject.loading.checks import require_losses_per_sample, require_tensor_outputs
from landscape.subject.subject import Subject


def gauss_newton_product(
    outputs: Callable[[], Tensor],
    losses: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    *,
    shift: float = 0.0,
) -> hessian_product.Product:
    """The generalised Gauss-Newton matrix (Schraudolph 2002), J' M J with M the Hessian of the mean loss by the logits.

    For cross-entropy it is the Fisher matrix of the model's own distribution. `outputs` gives the logits (N, classes),
    `losses` the losses per sample (N,) of logits; `shift` is added to the diagonal.

    Raises:
        ValueError: an operation in the model has no derivative; names it.
    """
    with hessian_product.differentiable_attention(), torch.enable_grad():
        logits = outputs()
    with torch.enable_grad():
        point = logits.detach().requires_grad_()
        loss = losses(point).mean()
        (slope,) = hessian_product.with_graphs(torch.autograd.grad(loss, point, create_graph=True), [point])

    def middle(vector: Tensor) -> Tensor:
        (curved,) = torch.autograd.grad(slope, point, grad_outputs=vector, retain_graph=True)
        return curved

    return _prepared(loss.detach(), logits, middle, parameters, shift)


def fisher_product(
    losses: Callable[[], Tensor], parameters: Sequence[Tensor], *, shift: float = 0.0
) -> hessian_product.Product:
    """The EMPIRICAL Fisher, mean over samples of g g' with g the gradient of a sample's loss at its true target.

    With J the derivative of the losses per sample (N,), M is 1/N. Not the Fisher matrix of the model's distribution,
    nor an approximation of the Hessian far from a good fit (Kunstner et al. 2019).

    Raises:
        ValueError: an operation in the model has no derivative; names it.
    """
    with hessian_product.differentiable_attention(), torch.enable_grad():
        outputs = losses()
    return _prepared(outputs.detach().mean(), outputs, lambda vector: vector / len(outputs), parameters, shift)


def _prepared(
    value: Tensor, outputs: Tensor, middle: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], shift: float
) -> hessian_product.Product:
    """The product v -> J' M J v, J the derivative of a few outputs by the weights and M a small symmetric matrix.

    J' u is one backward pass, linear in u, and J v the derivative of its inner product with v by u: two backward passes
    through kept graphs per product, without forward mode.
    """
    with torch.enable_grad(), hessian_product.second_derivative_errors():
        u = torch.zeros_like(outputs, requires_grad=True)
        transposed = torch.autograd.grad(
            outputs, parameters, grad_outputs=u, create_graph=True, allow_unused=True, materialize_grads=True
        )
        # A parameter that is not used has no graph to u.
        transposed = tuple(t if t.requires_grad else t + 0 * u.sum() for t in transposed)
    hessian_product.require_second_derivative(transposed)

    def products(vector: Tensor) -> Sequence[Tensor]:
        with hessian_product.second_derivative_errors():
            (forward,) = torch.autograd.grad(transposed, u, grad_outputs=unflat(vector, parameters), retain_graph=True)
            return torch.autograd.grad(
                outputs, parameters, middle(forward), retain_graph=True, allow_unused=True, materialize_grads=True
            )

    return hessian_product.Product(value, shift, products)


Operator = Literal["hessian", "ggn", "fisher"]
Matrix = Literal[Operator, "preconditioned"]  # what a spectrum is of: one of these, or P^-1/2 H P^-1/2
WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class Curvature:
    """Products of the objective's curvature on the mini-batches of a subject."""

    subject: Subject  # whose loss is differentiated
    parameters: Mapping[str, Tensor]  # differentiated by, name -> tensor
    hvp: str  # name of the backend, see `hvp_backends.Hvp`
    operator: Operator = "hessian"  # of which matrix: Hessian, Gauss-Newton or empirical Fisher
    fixed: bool = False  # the activation pattern is fixed to that of double precision
    # holds activation patterns, for other curvatures of the same subject or for products over all samples
    patterns: PatternCache | None = None
    # Positions of parameters in each block: the Hessian without all other blocks; by double backward alone.
    blocks: tuple[tuple[int, ...], ...] = ()
    gradient: bool = False  # products by double backward keep the gradient too
    _traced: traced_hessian.TracedHessian | None = None
    _micro_batching: micro_batches.MicroBatching = field(default_factory=micro_batches.MicroBatching)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def batched(self) -> int:
        """How many mini-batches `batched_product` takes; 0 if the backend takes them one by one."""
        return self._traced.batched if self._traced is not None else 0

    @property
    def exceeds_memory(self) -> bool:
        """Whether a mini-batch did not fit into memory as a whole."""
        return self._micro_batching.count > 1

    def of(self, *, operator: Operator = "hessian", blocks: tuple[tuple[int, ...], ...] = ()) -> "Curvature":
        """Another matrix of the same mini-batches, or its diagonal blocks, by double backward."""
        return replace(self, hvp="double-backward", operator=operator, blocks=blocks, _traced=None)

    def product(self, i: int, part: slice = WHOLE) -> micro_batches.MicroBatchedProduct:
        """The matrix of mini-batch i, or of some of its samples, weight decay included.

        Raises:
            ValueError: the model has no second derivative; names the layer.
            MemoryError: not even one sample fits.
        """
        inputs, _ = part_of(self.subject, i, part)
        rows = range(*part.indices(self.subject.samples(i)))
        samples = len(rows) if self.subject.divisible else 1
        whole = None
        if part == WHOLE and self._traced is not None and not self.batched and self._fits(i):
            whole = partial(self._traced_product, self._traced, i)

        def prepare(inner: slice) -> hessian_product.Product:
            first = rows.start
            return self._product(i, part if inner == WHOLE else slice(first + inner.start, first + inner.stop))

        return micro_batches.MicroBatchedProduct(
            prepare, samples, self._micro_batching,
            explain=lambda error: hessian_product.with_layer_name(error, self.subject, inputs), whole=whole,
        )  # fmt: skip

    def batched_product(self, batches: Sequence[int]) -> traced_hessian.BatchedProduct:
        """The matrices of `batched` mini-batches at once."""
        assert self._traced is not None
        pairs = [self.subject.batch(i) for i in batches]
        patterns = [self.pattern(i) for i in batches] if self.fixed else []
        return self._traced.at_batches(pairs, patterns=patterns, shift=self.subject.weight_decay)

    def fits_batched(self, batches: Sequence[int]) -> bool:
        """Whether `batched_product` can take these mini-batches."""
        return 0 < self.batched == len(batches) and all(self._fits(i) for i in batches)

    def pattern(self, i: int, part: slice = WHOLE) -> list[Tensor]:
        """Activation pattern of some samples of mini-batch i; cached only where several curvatures share `patterns`."""
        key = (i, part.start, part.stop)
        known = None if self.patterns is None else self.patterns.get(key)
        if known is not None:
            return known
        inputs, _ = part_of(self.subject, i, part)
        pattern = activation_pattern(self.subject.model, inputs, self.subject.forward, double_of(self.subject))
        if self.patterns is not None:
            self.patterns.put(key, pattern)
        return pattern

    def _fits(self, i: int) -> bool:
        return self._traced is not None and self._traced.suits(*self.subject.batch(i))

    def _traced_product(self, traced: traced_hessian.TracedHessian, i: int) -> hessian_product.Product:
        inputs, targets = self.subject.batch(i)
        pattern = self.pattern(i) if self.fixed else []
        return traced.at(inputs, targets, pattern=pattern, shift=self.subject.weight_decay)

    def _product(self, i: int, part: slice) -> hessian_product.Product:
        """From a double-backward graph of some samples of a mini-batch."""
        subject, shift = self.subject, self.subject.weight_decay
        inputs, targets = part_of(self.subject, i, part)
        parameters = list(self.parameters.values())
        pattern = FixedPattern(self.pattern(i, part)) if self.fixed else contextlib.nullcontext()

        def outputs() -> Any:
            with pattern:
                return subject.outputs(inputs)

        if self.operator == "hessian":
            head = chunked_cross_entropy.chunked_head(subject, targets)
            return hessian_product.hessian_product(
                lambda: chunked_cross_entropy.losses_of(subject, head, outputs, targets).mean(), parameters,
                shift=shift, blocks=self.blocks, gradient=self.gradient,
            )  # fmt: skip
        if self.operator == "ggn":
            with hessian_product.differentiable_attention():  # one forward pass at a time
                require_tensor_outputs(subject)
            return gauss_newton_product(outputs, lambda z: subject.losses(z, targets), parameters, shift=shift)
        require_losses_per_sample(subject)
        return fisher_product(lambda: subject.losses(outputs(), targets), parameters, shift=shift)


def part_of(subject: Subject, i: int, part: slice) -> tuple[Nested, Nested]:
    """Inputs and targets of some samples of a mini-batch."""
    inputs, targets = subject.batch(i)
    return (inputs, targets) if part == WHOLE else (rows_of(inputs, part), rows_of(targets, part))
