"""Top eigenvalues of a mini-batch's Hessian by PyHessian and by curvlinops with scipy's eigsh, and their errors."""

import contextlib
import io
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

from landscape.products.hessian_product import differentiable_attention
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

TOP = 5


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: object) -> Any:
        self.calls += 1
        return self.function(*arguments)


def pyhessian(subject: Subject, i: int, *, tol: float = 1e-3, iterations: int = 100) -> tuple[np.ndarray, int]:
    module = import_module("pyhessian.hessian")  # the package gives its class the module's name

    def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return subject.losses(outputs, targets).mean()

    counted = Counted(module.hessian_vector_product)
    replaced = patch.object(module, "hessian_vector_product", counted)
    on_gpu = subject.device.type == "cuda"
    current = torch.cuda.device(subject.device) if on_gpu else contextlib.nullcontext()  # where it moves everything
    with replaced, differentiable_attention(), current, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # create_graph=True with backward()
        made = module.hessian(subject.model, criterion, data=subject.batch(i), cuda=on_gpu)
        torch.manual_seed(i)
        values, _ = made.eigenvalues(maxIter=iterations, tol=tol, top_n=TOP)
    subject.model.zero_grad(set_to_none=True)  # it leaves gradients with graphs behind
    return np.array(values), counted.calls


def curvlinops(subject: Subject, i: int, *, compiled: bool = False) -> tuple[np.ndarray, int]:
    """By products of its operator, or by those of `torch.compile`, made in the first call for all mini-batches."""
    with differentiable_attention(), contextlib.redirect_stdout(io.StringIO()):
        operator = _operator(subject, i)
        if compiled:
            operator._mp = _compiled(subject)
        n, counted = subject.size, Counted(operator.to_scipy().__matmul__)
        matrix = LinearOperator((n, n), matvec=counted, dtype=np.float32)
        start = np.random.default_rng(i).standard_normal(n).astype(np.float32)
        values = eigsh(matrix, TOP, which="LM", tol=1e-3, v0=start, return_eigenvectors=False)
    return values[np.argsort(-np.abs(values))], counted.calls


def _operator(subject: Subject, i: int) -> Any:
    from curvlinops import HessianLinearOperator

    loss, parameters, data = torch.nn.CrossEntropyLoss(), list(subject.parameters.values()), [subject.batch(i)]
    return HessianLinearOperator(subject.model, loss, parameters, data, progressbar=False, check_deterministic=False)


@once_per_weights
def _compiled(subject: Subject) -> Callable[..., Any]:
    """What its operator multiplies with one vector, `jvp` of `grad`, compiled; mini-batch and vector are arguments."""
    from curvlinops.utils import make_functional_model_and_loss

    parameters = tuple(subject.parameters.values())
    outputs, loss = make_functional_model_and_loss(subject.model, torch.nn.CrossEntropyLoss(), parameters)

    def product(inputs: torch.Tensor, targets: torch.Tensor, *columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def value(*weights: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = loss(outputs(*weights, inputs), targets)
            return found

        gradient = torch.func.grad(value, argnums=tuple(range(len(parameters))))
        _, found = torch.func.jvp(gradient, parameters, tuple(column[..., 0] for column in columns))
        return tuple(part[..., None] for part in found)

    return torch.no_grad()(torch.compile(product, fullgraph=True))


def errors(values: np.ndarray, truth: np.ndarray) -> tuple[float, int]:
    """Worst relative error to the nearest estimate, and how many true values have none within 1 %."""
    nearest = (np.abs(values[:, None] - truth) / np.abs(truth)).min(axis=0)
    return float(nearest.max()), int((nearest > 0.01).sum())
