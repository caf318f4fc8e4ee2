"""PyHessian 0.1 (Yao et al. 2020) as a second engine: kept from its side effects, and each value with its residual."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from landscape.curvature.hessian_product import differentiable_attention
from landscape.curvature.lanczos import Spectrum, wanted
from landscape.curvature.vectors import flat


class _Counted(nn.Module):
    """The model, counting the products: PyHessian clears gradients once before each of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.products = 0

    def forward(self, inputs: Tensor) -> object:
        return self.model(inputs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.products += 1
        super().zero_grad(set_to_none)


def power_iteration(
    model: nn.Module,
    loss: Callable[[object, Tensor], Tensor],
    batch: tuple[Tensor, Tensor],
    parameters: Sequence[Tensor],
    product: Callable[[Tensor], Tensor],
    k: int,
    *,
    shift: float = 0.0,
    tol: float = 1e-3,
    iterations: int = 100,
    seed: int = 0,
) -> Spectrum:
    """The k eigenvalues of largest magnitude as PyHessian finds them, one by one, by power iteration and deflation.

    It stops where two steps agree and knows no residual: values may be missed, or wrong by far more than `tol`. That
    makes it a cross-check. The residual of each is computed here, by one product more.

    Args:
        model: in eval mode; left as found.
        loss: (what the model returns, targets) -> mean loss.
        batch: inputs and targets.
        parameters: by which to differentiate; the others stand still meanwhile.
        product: v -> H v + shift v, for the residuals.
        k: how many.
        shift: added to the diagonal.
        tol: relative change between two steps at which PyHessian stops.
        iterations: its cap on the steps for one eigenvalue.
        seed: of its start vectors.

    Returns:
        A spectrum that knows neither ends nor nodes.

    Raises:
        FloatingPointError: a value is not finite.
    """
    from pyhessian import hessian

    counted = _Counted(model)

    def objective(returned: object, targets: Tensor) -> Tensor:
        # Also where shift is 0: it links every parameter to the loss, and PyHessian fails on those that are not.
        return loss(returned, targets) + 0.5 * shift * torch.stack([p.square().sum() for p in parameters]).sum()

    with _left_as_found(model, parameters), differentiable_attention(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        engine = hessian(counted, objective, data=batch, cuda=batch[0].device.type == "cuda")
        found, vectors = engine.eigenvalues(maxIter=iterations, tol=tol, top_n=k)
    if not np.isfinite(found).all():
        raise FloatingPointError("a Hessian product is not finite")
    order = wanted(np.array(found), k, "LM")
    values = np.array(found)[order]
    basis = torch.stack([flat(vectors[i]) for i in order])
    basis = basis / basis.norm(dim=1, keepdim=True)
    residuals = np.array([(product(v) - value * v).norm().item() for v, value in zip(basis, values, strict=True)])
    return Spectrum(
        values=values,
        residuals=residuals,
        converged=residuals <= tol * np.abs(values),
        errors=residuals,
        largest=float("nan"),
        smallest=float("nan"),
        ends=(float("nan"), float("nan")),
        nodes=np.empty(0),
        weights=np.empty(0),
        products=counted.products + k,
        vectors=basis,
    )


@contextlib.contextmanager
def _left_as_found(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Gradients, modes and what is trainable, restored; PyHessian adds to the gradients it finds and leaves its own."""
    every = list(model.parameters())
    gradients = [p.grad for p in every]
    trainable = [p.requires_grad for p in every]
    modes = [(module, module.training) for module in model.modules()]
    chosen = {id(p) for p in parameters}
    try:
        for p in every:
            p.grad = None
            p.requires_grad_(id(p) in chosen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # backward() with create_graph, and the package's own syntax
            yield
    finally:
        for p, gradient, before in zip(every, gradients, trainable, strict=True):
            p.grad = gradient
            p.requires_grad_(before)
        for module, training in modes:
            module.training = training
