"""Hessian-vector products by double backward; where a model has no second derivative, the layer is named."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from landscape.data.structure import Nested, tensors_in
from landscape.options import first_line
from landscape.products.vectors import flat, unflat
from landscape.subject.subject import Subject

# Part of an operation's name, or of torch's message about it -> what to do instead.
WITHOUT_SECOND_DERIVATIVE = {
    "embedding_bag": "use nn.Embedding and the sum, mean or maximum of its rows",
    "cdist": "write the distance out, as in (a[:, None] - b).abs().sum(-1) for p=1, or give "
    'compute_mode="use_mm_for_euclid_dist" for p=2',
    "ctc_loss": "the CTC loss of PyTorch has a gradient alone",
    "attention": "use its plain version (fused attention: fused_attn=False in timm, "
    'attn_implementation="eager" in transformers)',
    "checkpoint": "switch checkpointing off while measuring, or use torch.utils.checkpoint with use_reentrant=False",
}
# What torch says where memory is exhausted: on a CPU, in the libraries of a GPU, and of its driver.
NO_MEMORY = (
    "allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED", "unable to find an engine", "CUDA error: out of memory",
)  # fmt: skip
OF_DEVICE = ("CUDA error", "cuDNN error", "cuBLAS error", "NCCL", "CUDNN_STATUS", "CUBLAS_STATUS")
# Functions that add in any order on a GPU, or their derivatives: from torch's list for `use_deterministic_algorithms`.
IN_ANY_ORDER = {f"{name}Backward0" for name in (
    "UpsampleLinear1D", "UpsampleBilinear2D", "UpsampleBicubic2D", "UpsampleTrilinear3D", "UpsampleBilinear2DAa",
    "GridSampler2D", "GridSampler3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AvgPool3D",
    "MaxPool3DWithIndices", "FractionalMaxPool2D", "FractionalMaxPool3D", "ReflectionPad1D", "ReflectionPad2D",
    "ReflectionPad3D", "ReplicationPad1D", "ReplicationPad2D", "ReplicationPad3D", "IndexSelect",
    "Gather", "IndexAdd", "Put", "ScatterAdd", "ScatterReduce", "Cumsum", "NllLoss2D", "MaxUnpool2D",
)}  # fmt: skip
_log = logging.getLogger(__name__)
_attention_switches = threading.RLock()


@dataclass(frozen=True)
class Product:
    """v -> A v + shift v for the curvature matrix A of one function."""

    loss: Tensor  # value of the function at the present weights, ()
    shift: float  # added to the diagonal: the Hessian of shift * (1/2) ||w||^2
    _products: Callable[[Tensor], Sequence[Tensor]]  # v -> A v, with a tensor per parameter
    nbytes: int = field(default=0, kw_only=True)  # of what is kept between products; 0 where autograd keeps it

    @property
    def value(self) -> float:
        """Value of the function; read when it is asked for, because reading it waits for the device."""
        return self.loss.item()

    def __call__(self, vector: Tensor) -> Tensor:
        """A v + shift v, (n,)."""
        product = flat(self._products(vector))
        return product.add_(vector, alpha=self.shift) if self.shift else product

    def add_to(self, total: Tensor, vector: Tensor, weight: float) -> None:
        """Add weight (A v + shift v) to a sum, (n,), without another vector of that length."""
        pieces = self._products(vector)
        for part, piece in zip(unflat(total, pieces), pieces, strict=True):
            part.add_(piece, alpha=weight)
        if self.shift:
            total.add_(vector, alpha=weight * self.shift)


@dataclass(frozen=True)
class HessianProduct(Product):
    """v -> H v + shift v for one scalar function, by double backward through a kept graph (Pearlmutter 1994).

    The gradient graph is built once; every product is one more backward pass through it, about 2.2 to 2.7
    gradients. Nothing is written to `.grad`. A call raises ValueError where the model has no second derivative.
    """

    _gradient: Sequence[Tensor] = ()  # if it was asked for: products need its graph alone

    @property
    def gradient(self) -> Tensor:
        """The gradient, flat, (n,)."""
        assert self._gradient
        return flat(self._gradient)


def hessian_product(
    function: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    shift: float = 0.0,
    blocks: Sequence[Sequence[int]] = (),
    gradient: bool = False,
) -> HessianProduct:
    """Prepare Hessian products of a scalar function of the parameters, at the cost of one gradient.

    With `blocks`, positions of parameters, products of the block diagonal: the Hessian without all other blocks. With
    `gradient` the gradient is kept, as many numbers as parameters.

    Raises:
        ValueError: an operation in the model has no derivative; names it.
    """
    with differentiable_attention(), torch.enable_grad():
        value = function()
        with second_derivative_errors():
            found = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
        found = with_graphs(found, parameters)
    require_second_derivative(found)
    graph, kept = [get_gradient_edge(g) for g in found], [g.detach() for g in found] if gradient else ()
    del found

    def products(vector: Tensor) -> Sequence[Tensor]:
        pieces = unflat(vector, parameters)
        with second_derivative_errors():
            if blocks:
                return _block_diagonal(parameters, graph, blocks, pieces)
            return torch.autograd.grad(
                graph, parameters, pieces, retain_graph=True, allow_unused=True, materialize_grads=True
            )

    return HessianProduct(value.detach(), shift, products, kept)


def _block_diagonal(
    parameters: Sequence[Tensor], gradients: Sequence[GradientEdge], blocks: Sequence[Sequence[int]],
    pieces: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """H_bd v from one graph of the gradient, with a tensor per parameter.

    The product of a block differentiates the block's own gradients by the block's own parameters: only the part of the
    graph between them is passed, on average a quarter to a third of what a product with all of H passes. On a CPU a
    block where v is zero is skipped.
    """
    product = [torch.zeros_like(piece) for piece in pieces]
    for block in blocks:
        on_host = pieces[block[0]].device.type == "cpu"  # elsewhere the question would wait for the device
        if on_host and not any(pieces[i].any() for i in block):
            continue
        found = torch.autograd.grad(
            [gradients[i] for i in block], [parameters[i] for i in block], [pieces[i] for i in block],
            retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        for i, part in zip(block, found, strict=True):
            product[i] = part
    return product


def with_graphs(gradients: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients that can all be differentiated again: a source that enters linearly, or not at all, gets a graph."""
    return tuple(g if g.requires_grad else g + 0 * p for g, p in zip(gradients, sources, strict=True))


@cache
def _note_rounding(operation: str) -> None:
    """Say once that a network is reproducible to rounding alone."""
    _log.info("note: %s adds in any order on a GPU: the same unit gives the same numbers again to rounding", operation)


def require_second_derivative(gradients: Sequence[Tensor]) -> None:
    """Reject gradients that are cut off from the weights: otherwise products would silently be zero.

    Raises:
        ValueError: a function in the graph is marked once_differentiable.
    """
    for node in graph_nodes(gradients):
        if node.name() in IN_ANY_ORDER and gradients[0].device.type != "cpu":
            _note_rounding(node.name().removesuffix("Backward0"))
        if node.name().endswith("Error"):  # what torch inserts for a function marked once_differentiable
            raise ValueError("the model cannot be differentiated twice (one of its functions is once_differentiable)")


def graph_nodes(outputs: Iterable[Tensor]) -> set[Node]:
    """The functions of the graph of some tensors."""
    waiting = [output.grad_fn for output in outputs]
    found: set[Node] = set()
    while waiting:
        if (node := waiting.pop()) is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


@contextlib.contextmanager
def second_derivative_errors() -> Iterator[None]:
    """Turn errors of torch, or of a backward pass that asserts, into a ValueError; those of a device pass unchanged."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if out_of_memory(error) or str(error).startswith(OF_DEVICE):
            raise
        said = first_line(error)
        raise ValueError(f"the model cannot be differentiated twice ({said})") from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error reports exhausted memory; torch has a class for that of its own allocator on devices alone."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in NO_MEMORY)


@contextlib.contextmanager
def differentiable_attention() -> Iterator[None]:
    """Compute attention by plain matrix products, and the hard sigmoid by a clamp: fused, they are differentiable once.

    One thread at a time: the switches belong to the process, and leaving the context would reset them for the others.
    """
    with _attention_switches, sdpa_kernel(SDPBackend.MATH):
        fused, functional.hardsigmoid = functional.hardsigmoid, _hardsigmoid
        try:
            yield
        finally:
            functional.hardsigmoid = fused


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return functional.hardtanh(input + 3.0, 0.0, 6.0) / 6.0


def with_layer_name(error: ValueError, subject: Subject, inputs: Nested) -> ValueError:
    """The error, with the non-differentiable layer and a remedy added if it is about a missing second derivative."""
    if "differentiated twice" not in str(error):
        return error
    with differentiable_attention():
        layer = non_differentiable_layer(subject.model, lambda: subject.outputs(inputs))
    where = f"the layer is {layer}; " if layer else ""
    advice = next((words for name, words in WITHOUT_SECOND_DERIVATIVE.items() if name in str(error).lower()), "")
    exclude = ", or exclude its parameters with --params" if layer else ""
    return ValueError(f"{error}; {where}{advice or 'write it with operations that can be'}{exclude}; surface, line and "
                      "what else needs no curvature can be measured")  # fmt: skip


def non_differentiable_layer(model: nn.Module, forward: Callable[[], object]) -> str:
    """The innermost module that cannot be differentiated twice, as `name (class)`; "" if none is found.

    Every module is run alone, on the inputs it received in `forward`, and differentiated twice; inner ones come first.
    """
    layers: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    testing = False

    def test(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any], returned: object) -> None:
        nonlocal testing
        if testing or layers:
            return
        testing = True
        try:
            if not _twice_differentiable(module, given, options):
                layers.append(f"{names[module] or 'the model'} ({type(module).__name__})")
        finally:
            testing = False

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in names:
            hooks.enter_context(module.register_forward_hook(test, with_kwargs=True))
        forward()
    return layers[0] if layers else ""


def _twice_differentiable(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> bool:
    leaves: list[Tensor] = [p for p in module.parameters() if p.requires_grad]

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1].clone()  # a module may write to it in place

    with torch.enable_grad(), contextlib.suppress(StopIteration):
        returned = module(*map(leaf, given), **{name: leaf(value) for name, value in options.items()})
        output = next(value for value in tensors_in(returned) if value.requires_grad)
        try:
            first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True, allow_unused=True)
            gradients = [g for g in first if g is not None and g.requires_grad]
            require_second_derivative(gradients)
            if gradients:
                torch.autograd.grad([g.square().sum() for g in gradients], leaves, allow_unused=True)
        except (RuntimeError, ValueError, AssertionError):
            return False
    return True
