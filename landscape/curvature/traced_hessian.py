"""Hessian products from a traced graph, split into what is done once per mini-batch and what is done per product.

The forward-over-reverse derivative of the loss is recorded once per shape as a plain list of operations. Those that do
not depend on the vector run once per mini-batch; the rest run once per product, without autograd, and may be compiled.
Tracing derivatives first and compiling the result is the order that works: compiling through double backward fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch import _inductor as inductor
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch.func import functional_call, grad_and_value, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from landscape.curvature.graph_passes import join
from landscape.curvature.hessian_product import differentiable_attention, out_of_memory
from landscape.curvature.kinks import Held
from landscape.curvature.matrix_products import widen
from landscape.curvature.vectors import flat, unflat

Losses = Callable[[object, Tensor], Tensor]  # (what the model returns, targets) -> losses per sample (N,)
Graph = Callable[..., Sequence[Tensor]]
Shape = tuple[torch.Size, torch.dtype, torch.Size, torch.dtype]  # of inputs and of targets
# Derivatives f'(x) g in one operation, whose costly part f'(x) does not depend on the vector once they are two.
SPLITTABLE = [
    getattr(torch.ops.aten, f"{name}_backward")
    for name in ("elu", "gelu", "hardswish", "mish", "sigmoid", "silu", "softplus", "tanh")
]


@dataclass(frozen=True)
class TracedHessian:
    """Products for every mini-batch of one shape; `at` prepares one of them.

    The weights are read at each `at`, so that those written since the trace count.

    Args:
        parameters: the tensors differentiated by, by name.
        shape: of inputs and targets, with their dtypes: what the trace is valid for.
        layout: memory format of the inputs.
        together: mini-batches per product; 0 for one without an axis of its own.
    """

    parameters: Mapping[str, Tensor]
    shape: Shape
    layout: torch.memory_format
    together: int
    _once: Graph
    _each: Graph

    def at_all(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        sides: Sequence[Sequence[Tensor]] = (),
        shift: float = 0.0,
    ) -> JointProduct:
        """Run the part that does not depend on the vectors, for several mini-batches at once.

        Args:
            batches: as many as were traced together, each of the shape traced.
            sides: of each of them, as in `at`.
            shift: likewise.
        """
        weights = self._weights()
        inputs, targets = (torch.stack(tensors) for tensors in zip(*batches, strict=True))
        held = [torch.stack(tensors) for tensors in zip(*sides, strict=True)]
        with torch.no_grad():
            values, *kept = self._once(*weights, inputs, targets, *held)
        return JointProduct(values.tolist(), weights, shift, kept, self._each)

    def at(self, inputs: Tensor, targets: Tensor, *, sides: Sequence[Tensor] = (), shift: float = 0.0) -> TracedProduct:
        """Run the part that does not depend on the vector.

        Args:
            inputs: of the mini-batch.
            targets: likewise.
            sides: of its kinks, see `kinks.sides`; as many as were traced.
            shift: added to the diagonal: the Hessian of shift * (1/2) ||w||^2.

        Raises:
            ValueError: the mini-batch has another shape than the one traced.
        """
        if not self.suits(inputs, targets):
            raise ValueError(f"the graph was traced for {self.shape}, got {_shape(inputs, targets)}")
        weights = self._weights()
        inputs, targets, *held = (_laid_out(tensor, self.layout) for tensor in (inputs, targets, *sides))
        with torch.no_grad():
            value, *kept = self._once(*weights, inputs, targets, *held)
        return TracedProduct(value.item(), weights, shift, kept, self._each)

    def suits(self, inputs: Tensor, targets: Tensor) -> bool:
        """Whether the trace is valid for a mini-batch."""
        return _shape(inputs, targets) == self.shape

    def _weights(self) -> list[Tensor]:
        return [_laid_out(p, self.layout) for p in self.parameters.values()]


@dataclass(frozen=True)
class TracedProduct:
    """v -> H v + shift v on one mini-batch; the counterpart of `HessianProduct`."""

    value: float
    parameters: Sequence[Tensor]
    shift: float
    _kept: Sequence[Tensor]
    _each: Graph

    def __call__(self, vector: Tensor) -> Tensor:
        """H v, (n,)."""
        with torch.no_grad():
            product = flat(self._each(*self._kept, *unflat(vector.contiguous(), self.parameters)))
        return product.add_(vector, alpha=self.shift) if self.shift else product


@dataclass(frozen=True)
class JointProduct:
    """Rows v_i -> H_i v_i + shift v_i, (M, n) -> (M, n): several mini-batches in one run of the graph."""

    values: Sequence[float]
    parameters: Sequence[Tensor]
    shift: float
    _kept: Sequence[Tensor]
    _each: Graph

    def __call__(self, vectors: Tensor) -> Tensor:
        """H_i v_i by rows, (M, n)."""
        count = len(vectors)
        pieces = torch.split(vectors, [p.numel() for p in self.parameters], dim=1)
        shaped = [piece.reshape(count, *p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        with torch.no_grad():
            products = torch.cat([found.reshape(count, -1) for found in self._each(*self._kept, *shaped)], dim=1)
        return products.add_(vectors, alpha=self.shift) if self.shift else products


def trace(
    model: nn.Module,
    losses: Losses,
    parameters: Mapping[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    sides: Sequence[Tensor] = (),
    channels_last: bool = False,
    compiled: bool = False,
    together: int = 0,
) -> TracedHessian:
    """Record the Hessian product of the mean loss on mini-batches of this shape, in 1 to 5 s.

    Args:
        model: in eval mode; its buffers and other parameters are constants of the trace.
        losses: (what the model returns, targets) -> (N,).
        parameters: those differentiated by.
        inputs: an example of the shape.
        targets: likewise.
        sides: of their kinks, if these are to be held; every mini-batch then has to bring its own.
        channels_last: keep images and kernels channels last, which convolutions on CPUs like.
        together: as many mini-batches in one product, which fills a device that one of them leaves idle.
        compiled: compile both parts, in 5 to 60 s; worth it from about a hundred mini-batches.

    Raises:
        ValueError: the model cannot be traced (it branches on values, or has no forward derivative), or its graph
            cannot be compiled (there is no compiler).
    """
    names = list(parameters)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    detached = [_laid_out(p, layout) for p in parameters.values()]
    inputs, targets, *sides = (_laid_out(tensor, layout) for tensor in (inputs, targets, *sides))

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor, held: Sequence[Tensor]) -> Tensor:
        with Held(held) if held else contextlib.nullcontext():
            returned = functional_call(model, weights, (x,))
        return losses(returned, y).mean()

    def product(*arguments: Tensor) -> list[Tensor]:
        weights, (x, y, *held) = arguments[: len(names)], arguments[len(names) : -len(names)]
        vector = dict(zip(names, arguments[-len(names) :], strict=True))

        def gradient(w: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
            return grad_and_value(loss)(w, x, y, held)

        primal, tangents = jvp(gradient, (dict(zip(names, weights, strict=True)),), (vector,))[:2]
        value, tangent = primal[1], tangents[0]
        return [value, *(tangent[name] for name in names)]

    vectors = unflat(inputs.new_zeros(sum(p.numel() for p in detached), dtype=detached[0].dtype), detached)
    example: list[Tensor] = [inputs, targets, *sides]
    function: Callable[..., list[Tensor]] = product
    if together:
        vectors = [p.new_zeros(together, *p.shape) for p in detached]
        example = [torch.stack([tensor] * together) for tensor in example]
        function = torch.vmap(product, in_dims=(None,) * len(names) + (0,) * (len(example) + len(names)))
    try:
        with differentiable_attention():
            graph = make_fx(function, _halves())(*detached, *example, *vectors)
    except Exception as error:
        raise ValueError(f"the model cannot be traced ({str(error).strip().splitlines()[0]})") from error
    _reshape(graph)
    once, each = split(graph, vectors=len(names))
    join(each.graph)
    each.recompile()
    parts = _compiled(once, each, [*detached, *example], vectors) if compiled else (once, each)
    return TracedHessian(dict(parameters), _shape(inputs, targets), layout, together, *parts)


def _compiled(
    once: fx.GraphModule, each: fx.GraphModule, given: Sequence[Tensor], vectors: Sequence[Tensor]
) -> tuple[Graph, Graph]:
    """Both graphs as machine code, for tensors laid out as these.

    They are lists of operations already, so that nothing has to look at Python code for them, least of all per call.
    """
    try:
        with torch.no_grad():
            first = inductor.compile(once, [*given])
            _, *kept = first(*given)
            return first, inductor.compile(each, [*kept, *vectors])
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"the Hessian products cannot be compiled ({why}); choose another --hvp") from error


def _halves() -> dict[OpOverload, Callable[..., Any]]:
    """Derivatives as two operations each."""
    return {
        operation: way for operation, way in get_decompositions(SPLITTABLE).items() if isinstance(operation, OpOverload)
    }


def _shape(inputs: Tensor, targets: Tensor) -> Shape:
    return inputs.shape, inputs.dtype, targets.shape, targets.dtype


def _laid_out(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """Without a graph and contiguous; images and kernels in a memory format."""
    return tensor.detach().contiguous(memory_format=layout if tensor.dim() == 4 else torch.contiguous_format)


def _reshape(graph: fx.GraphModule) -> None:
    """Views become reshapes: of several mini-batches, or of a transposed product, a copy may be needed."""
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in views:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()


def split(whole: fx.GraphModule, *, vectors: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Two graphs from one whose last inputs are `vectors` tensors and whose first output does not depend on them.

    Returns:
        `once(inputs) -> [first output, *kept]` and `each(*kept, *vectors) -> other outputs`.
    """
    nodes = whole.graph.nodes
    whole.graph.eliminate_dead_code()
    inputs = [node for node in nodes if node.op == "placeholder"]
    widen(whole.graph, _dependent(whole.graph, inputs[-vectors:]))
    dependent = _dependent(whole.graph, inputs[-vectors:])
    (output,) = (node for node in nodes if node.op == "output")
    results = list(output.args[0])
    kept = [n for n in nodes if n not in dependent and any(user in dependent for user in n.users if user is not output)]
    kept += [r for r in results[1:] if isinstance(r, fx.Node) and r not in dependent and r not in kept]

    once = fx.Graph()
    seen: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in dependent and node is not output:
            seen[node] = once.node_copy(node, seen.__getitem__)
    once.output([seen[node] for node in [results[0], *kept]])
    once.eliminate_dead_code()

    each = fx.Graph()
    seen = {}
    for node in [*kept, *inputs[-vectors:]]:
        seen[node] = each.placeholder(node.name)
    for node in nodes:
        if node in dependent and node not in seen and node is not output:
            seen[node] = each.node_copy(node, seen.__getitem__)
    each.output([seen[node] for node in results[1:]])
    each.eliminate_dead_code()
    return fx.GraphModule(whole, once), fx.GraphModule(whole, each)


def _dependent(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The sources and all that is computed from them."""
    found = set(sources)
    for node in graph.nodes:
        if any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found
