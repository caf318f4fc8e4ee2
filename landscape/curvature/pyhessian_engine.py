"""PyHessian 0.1 (Yao et al. 2020) as a second engine, without its side effects and with residuals."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.curvature import lanczos, stopping
from landscape.products.hessian_product import differentiable_attention
from landscape.products.vectors import flat
from landscape.subject import restoration
from landscape.subject.subject import Subject


class _Counted(nn.Module):
    """Counts the products of a model: PyHessian clears its gradients once before each of them."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model, self.run = subject.model, subject.forward
        self.products = 0

    def forward(self, inputs: Tensor) -> Any:
        return self.run(self.model, inputs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.products += 1
        super().zero_grad(set_to_none)


def power_iteration(
    subject: Subject,
    i: int,
    parameters: Sequence[Tensor],
    product: Callable[[Tensor], Tensor],
    k: int,
    *,
    tol: float = 1e-3,
    iterations: int = 100,
    seed: int = 0,
) -> lanczos.Spectrum:
    """The k eigenvalues of largest magnitude as PyHessian finds them, one by one, by power iteration and deflation.

    PyHessian stops when two steps agree and computes no residual: values may be missed, or wrong by far more than
    `tol`. That makes it a cross-check. The residual of each value is computed here, by one more product v -> H v with
    weight decay included. The spectrum has neither ends nor nodes; the model, in eval mode, is left as found.
    PyHessian stops at a relative change of `tol` between two steps, or after `iterations` steps for one eigenvalue.

    Raises:
        FloatingPointError: a value is not finite.
    """
    from pyhessian import hessian

    counted, batch, shift = _Counted(subject), subject.batch(i), subject.weight_decay

    if subject.members:
        raise ValueError("--engine pyhessian measures one network, --mc-dropout averages several; drop --engine")
    if not all(isinstance(part, Tensor) for part in batch):
        raise ValueError("--engine pyhessian needs one tensor as input and one as target; drop --engine")

    def objective(outputs: Any, targets: Tensor) -> Tensor:
        loss = subject.losses(outputs, targets).mean()
        # Also where shift is 0: it links every parameter to the loss, and PyHessian fails on those that are not.
        return loss + 0.5 * shift * torch.stack([p.square().sum() for p in parameters]).sum()

    on_gpu = subject.device.type == "cuda"
    current = torch.cuda.device(subject.device) if on_gpu else contextlib.nullcontext()  # where it moves everything
    differentiated = {id(p) for p in parameters}
    with (  # PyHessian adds to existing gradients and leaves its own
        restoration.left_as_found(subject.model), warnings.catch_warnings(), differentiable_attention(),
        torch.random.fork_rng(devices=[]), current,
    ):  # fmt: skip
        warnings.simplefilter("ignore")  # backward() with create_graph, and the package's own syntax
        for p in subject.model.parameters():
            p.requires_grad_(id(p) in differentiated)
        torch.default_generator.manual_seed(seed)
        engine = hessian(counted, objective, data=batch, cuda=on_gpu)
        found, vectors = engine.eigenvalues(maxIter=iterations, tol=tol, top_n=k)
    if not np.isfinite(found).all():
        raise FloatingPointError("a Hessian product is not finite")
    order = stopping.wanted(np.array(found), k, "LM")
    values, basis = np.array(found)[order], torch.stack([flat(vectors[j]) for j in order])
    basis = basis / basis.norm(dim=1, keepdim=True)
    residuals = np.array([(product(v) - value * v).norm().item() for v, value in zip(basis, values, strict=True)])
    nan, none = float("nan"), np.empty(0)
    return lanczos.Spectrum(
        values=values, residuals=residuals, converged=residuals <= tol * np.abs(values), errors=residuals,
        largest=nan, smallest=nan, ends=(nan, nan), nodes=none, weights=none,
        products=counted.products + k, vectors=basis,
    )  # fmt: skip
