"""Hessian products from a traced graph, split into what runs once per mini-batch and what runs once per product.

The forward-over-reverse derivative of the loss is recorded once per shape as a flat list of operations. Those that do
not depend on the vector run once per mini-batch; the rest run once per product, without autograd.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize, grad_and_value, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from landscape.data.structure import Forward, call_model
from landscape.options import first_line
from landscape.probe import report_products
from landscape.products import double_precision, graph_passes, kinks
from landscape.products.hessian_product import Product, differentiable_attention
from landscape.products.interpreted_graph import interpreted
from landscape.products.vectors import unflat
from landscape.subject import graph_replay, members

log = logging.getLogger(__name__)

Losses = Callable[[Any, Tensor], Tensor]  # (outputs of the forward pass, targets) -> losses per sample (N,)
Graph = Callable[..., Sequence[Tensor]]
Inputs = Tensor | members.Positioned  # with dropout masks, which belong to positions in the data
Shape = tuple[torch.Size, torch.dtype, torch.Size, torch.dtype]  # of inputs and of targets
# Derivatives f'(x) g in one operation; as two operations the costly part f'(x) does not depend on the vector.
SPLITTABLE = [
    getattr(torch.ops.aten, f"{name}_backward")
    for name in ("elu", "gelu", "hardswish", "mish", "sigmoid", "silu", "softplus", "tanh")
]


@dataclass(frozen=True)
class TracedHessian:
    """Hessian products for every mini-batch of one shape; `at` prepares those of one mini-batch.

    The weights are read at each `at`, so that weights written since the trace count.
    """

    parameters: Mapping[str, Tensor]  # the tensors differentiated by, by name
    shape: Shape  # of inputs and targets, with their dtypes: what the trace is valid for
    layout: torch.memory_format  # memory format of the inputs
    batched: int  # mini-batches per product; 0 for a trace without an axis for them
    constants: Sequence[Tensor]  # what else the loss depends on, such as buffers: read at each `at` too
    _once: graph_replay.GraphReplay  # both in one pool
    _each: graph_replay.GraphReplay

    def at(self, inputs: Inputs, targets: Tensor, *, pattern: Sequence[Tensor] = (), shift: float = 0.0) -> Product:
        """Run the part that does not depend on the vector; with the activation `pattern` if one was given to `trace`.

        Raises:
            ValueError: the mini-batch has another shape than the one traced.
        """
        if not self.suits(inputs, targets):
            raise ValueError(f"the graph was traced for {self.shape}, got {shape_of(inputs, targets)}")
        weights = self._weights()
        value, each = self._prepared(self._given(weights, *tensors_of(inputs), targets, *pattern))

        def products(vector: Tensor) -> Sequence[Tensor]:
            with torch.no_grad():
                return each(*unflat(vector.contiguous(), weights))

        return Product(value, shift, products, nbytes=each.nbytes)

    def at_batches(
        self, batches: Sequence[tuple[Inputs, Tensor]], *, patterns: Sequence[Sequence[Tensor]] = (), shift: float = 0.0
    ) -> "BatchedProduct":
        """As `at`, for `batched` mini-batches at once, each with its activation pattern."""
        weights = self._weights()
        given = [[*tensors_of(inputs), targets] for inputs, targets in batches]
        stacked = [torch.stack(tensors) for rows in (given, patterns) for tensors in zip(*rows, strict=True)]
        values, each = self._prepared([*self.constants, *weights, *stacked])
        return BatchedProduct(values, weights, shift, each)

    def forget(self) -> None:
        """Drop what is recorded on a device, and its memory."""
        self._each.forget()
        self._once.forget()

    def suits(self, inputs: Inputs, targets: Tensor) -> bool:
        """Whether the trace is valid for a mini-batch."""
        return shape_of(inputs, targets) == self.shape

    def interpreted(self) -> "TracedHessian":
        """The same products by torch's interpreter, in which several threads do not wait for each other."""
        once, each = self.graphs
        assert isinstance(once, fx.GraphModule)
        assert isinstance(each, fx.GraphModule)
        return self.with_graphs(interpreted(once), interpreted(each))

    @property
    def graphs(self) -> tuple[Graph, Graph]:
        """What runs once per mini-batch, and once per product."""
        return self._once.function, self._each.function

    def with_graphs(self, once: Graph, each: Graph, **options: Any) -> "TracedHessian":
        """The same with other graphs, and options of their `GraphReplay`."""
        recorded = replays(once, each, **options)
        return replace(self, _once=recorded[0], _each=recorded[1])

    def _prepared(self, given: Sequence[Tensor]) -> tuple[Tensor, graph_replay.BoundReplay]:
        """Loss, and products of the mini-batch that is given; another one may hold the addresses of a recording."""
        self._each.release()
        with torch.no_grad():
            value, *kept = self._once.at([])(*given)
            value = value.clone() if self._once.holds(value) else value
        return value, self._each.at(kept, of=self._once)

    def _weights(self) -> list[Tensor]:
        return [_laid_out(p, self.layout) for p in self.parameters.values()]

    def _given(self, weights: Sequence[Tensor], *tensors: Tensor) -> list[Tensor]:
        return [*self.constants, *weights, *(_laid_out(tensor, self.layout) for tensor in tensors)]


@dataclass(frozen=True)
class BatchedProduct:
    """Rows v_i -> H_i v_i + shift v_i, (M, n) -> (M, n): several mini-batches in one run of the graph."""

    _values: Tensor  # losses of the mini-batches, (M,)
    parameters: Sequence[Tensor]
    shift: float
    _each: Graph

    @property
    def values(self) -> list[float]:
        """Losses of the mini-batches; read when they are asked for, because reading them waits for the device."""
        values: list[float] = self._values.tolist()
        return values

    def __call__(self, vectors: Tensor) -> Tensor:
        """H_i v_i by rows, (M, n)."""
        count = len(vectors)
        report_products(count)
        pieces = torch.split(vectors, [p.numel() for p in self.parameters], dim=1)
        shaped = [piece.reshape(count, *p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        with torch.no_grad():
            products = torch.cat([row.reshape(count, -1) for row in self._each(*shaped)], dim=1)
        return products.add_(vectors, alpha=self.shift) if self.shift else products


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Pause garbage collection: a trace makes a million small objects and frees few, and each search visits them all.

    It takes a sixth of the time of a trace.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collection()
def trace(
    model: nn.Module,
    losses: Losses,
    parameters: Mapping[str, Tensor],
    inputs: Inputs,
    targets: Tensor,
    *,
    forward: Forward = call_model,
    pattern: Sequence[Tensor] = (),
    channels_last: bool = False,
    batched: int = 0,
) -> TracedHessian:
    """Record the Hessian product of the mean loss on mini-batches of this shape, in 1 to 5 s, without computing it.

    The model is in eval mode. Inputs and targets are an example of the shape. With a `pattern`, to fix the activation
    pattern, every mini-batch has to bring its own. `channels_last` is faster for convolutions on CPUs; `batched`
    mini-batches per product fill a device that one of them leaves idle.

    Raises:
        ValueError: the model cannot be traced (it branches on values, or has no forward derivative).
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    weights = [_laid_out(p, layout) for p in parameters.values()]
    example = [_laid_out(tensor, layout) for tensor in (*tensors_of(inputs), targets, *pattern)]
    masked = isinstance(inputs, members.Positioned)
    function: Callable[..., list[Tensor]] = _loss_and_product(model, forward, losses, list(parameters), masked)
    vectors = unflat(example[0].new_zeros(sum(p.numel() for p in weights), dtype=weights[0].dtype), weights)
    if batched:
        vectors = [p.new_zeros(batched, *p.shape) for p in weights]
        example = [torch.stack([tensor] * batched) for tensor in example]
        function = torch.vmap(function, in_dims=(None,) * len(weights) + (0,) * (len(example) + len(weights)))
    # Without writes in place, so that equal operations can be merged.
    graph = _recorded(model, functionalize(function, remove="mutations"), [*weights, *example, *vectors])
    graph_passes.views_to_reshapes(graph)
    graph_passes.plain_copies(graph)
    constants = graph_passes.lift_constants(graph)
    graph_passes.merge_equal(graph)
    once, each = graph_passes.split(graph, vectors=len(weights))
    return TracedHessian(dict(parameters), shape_of(inputs, targets), layout, batched, constants, *replays(once, each))


def replays(once: Graph, each: Graph, **options: Any) -> tuple[graph_replay.GraphReplay, graph_replay.GraphReplay]:
    """Both graphs, recorded on a CUDA device into one pool, where what the first keeps stays for the second."""
    first = graph_replay.GraphReplay(once, "preparation of Hessian products", **options)
    return first, graph_replay.GraphReplay(each, "Hessian product", **{"pool": first.pool, **options})


def _recorded(model: nn.Module, function: Callable[..., list[Tensor]], arguments: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function of a model, recorded without values where possible: it needs no memory for them."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with differentiable_attention():
        try:
            with double_precision.attributes_restored(model), _code_when_called(), fake:
                return make_fx(function, _decompositions())(*map(fake.from_tensor, arguments))
        except Exception as error:  # whatever the model's code raises; with values it may work
            log.debug("recording with values: %s", error)
        try:
            with double_precision.attributes_restored(model), _code_when_called():
                return make_fx(function, _decompositions())(*arguments)
        except Exception as error:
            why = first_line(error)
            raise ValueError(f"the model cannot be traced ({why})") from error


def _code_when_called() -> AbstractContextManager[object]:
    """Let graphs write their code when they are called: what is recorded is only passed over. A private part of torch.

    It takes a tenth of the time of recording.
    """
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        return contextlib.nullcontext()
    return cast(AbstractContextManager[object], _use_lazy_graph_module(True))


class _Forward(nn.Module):
    """The forward pass of a model as a module, whose parameters can be replaced."""

    def __init__(self, model: nn.Module, run: Forward) -> None:
        super().__init__()
        self.model, self.run = model, run
        self.training = model.training

    def forward(self, inputs: Inputs) -> Any:
        return self.run(self.model, inputs)


def _loss_and_product(
    model: nn.Module, forward: Forward, losses: Losses, names: Sequence[str], masked: bool
) -> Callable[..., list[Tensor]]:
    """(*weights, *inputs, targets, *pattern, *vectors) -> [loss, *H v], with a tensor per parameter."""
    module = _Forward(model, forward)

    def loss(weights: dict[str, Tensor], x: Inputs, y: Tensor, pattern: Sequence[Tensor]) -> Tensor:
        with kinks.FixedPattern(pattern) if pattern else contextlib.nullcontext():
            returned = functional_call(module, {f"model.{name}": w for name, w in weights.items()}, (x,))
        return losses(returned, y).mean()

    def product(*arguments: Tensor) -> list[Tensor]:
        weights, given = arguments[: len(names)], arguments[len(names) : -len(names)]
        x = members.Positioned(given[0], given[1]) if masked else given[0]
        y, *pattern = given[1 + masked :]
        vector = dict(zip(names, arguments[-len(names) :], strict=True))

        def gradient(w: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
            return grad_and_value(loss)(w, x, y, pattern)

        primal, tangents = jvp(gradient, (dict(zip(names, weights, strict=True)),), (vector,))[:2]
        value, tangent = primal[1], tangents[0]
        return [value, *(tangent[name] for name in names)]

    return product


def _decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Of the derivatives in `SPLITTABLE` into two operations each."""
    return {name: f for name, f in get_decompositions(SPLITTABLE).items() if isinstance(name, OpOverload)}


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The inputs, and with dropout masks the positions of the samples."""
    return [inputs] if isinstance(inputs, Tensor) else [inputs.inputs, inputs.positions]


def shape_of(inputs: Inputs, targets: Tensor) -> Shape:
    """What a trace is valid for."""
    own = tensors_of(inputs)[0]
    return own.shape, own.dtype, targets.shape, targets.dtype


def _laid_out(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """Without a graph and contiguous; images and kernels in a memory format."""
    return tensor.detach().contiguous(memory_format=layout if tensor.dim() == 4 else torch.contiguous_format)
