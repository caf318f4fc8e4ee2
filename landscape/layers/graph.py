"""Record one forward pass as a graph: every operation, the tensors it reads and writes, and its module call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ATTENTION = {"scaled_dot_product_attention", "softmax", "_softmax", "multi_head_attention_forward"}
ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
POOLING = {"max_pool2d", "avg_pool2d", "boolean_dispatch", "max_pool2d_with_indices", "fractional_max_pool2d"}
VIEWS = {"reshape", "view", "flatten", "permute", "transpose", "contiguous", "unflatten"}
# Operations with weights, matrix products and attention: a residual branch has at least one.
HEAVY = ATTENTION | {"conv1d", "conv2d", "conv3d", "linear", "matmul", "__matmul__", "bmm", "einsum", "baddbmm"}
Key = tuple[str, int]  # name of a torch function, and the number of its call in a pass
Node = int  # one value of a tensor: an in-place operation makes a new node of the same tensor


@dataclass(frozen=True)
class Operation:
    """One torch function call on values that depend on the input.

    Args:
        name: of the torch function.
        reads: nodes that depend on the model's input.
        writes: nodes produced.
        call: position in `Flow.calls` of the innermost enclosing module call.
        weight: shape of the weight of a convolution or linear layer, else ().
        number: of earlier calls of this function in the pass; counted for attention functions only.
        heads: of an attention function, else 0.
    """

    name: str
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    call: int
    weight: tuple[int, ...] = ()
    number: int = 0
    heads: int = 0


@dataclass
class Call:
    """One call of a module.

    Args:
        module: dotted name, "" for the model itself.
        number: of earlier calls of this module in the pass.
        parent: position in `Flow.calls` of the enclosing call, -1 for the model itself.
        reads: nodes passed to it, in order.
        writes: nodes it returned.
        start: number of operations before it.
        stop: number of operations when it returned.
    """

    module: str
    number: int
    parent: int
    start: int
    reads: tuple[Node, ...] = ()
    writes: tuple[Node, ...] = ()
    stop: int = -1


@dataclass
class Flow:
    """A recorded pass. Node 0 is the model's input.

    Args:
        shapes: of every node.
        operations: in order of execution.
        calls: module calls in order of their start.
        ancestors: of every node, as a bit set that includes the node itself.
        maker: node -> position of the operation that produced it, -1 for the input.
    """

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)

    def between(self, fork: Node, end: Node) -> list[int]:
        """Operations on the paths from one node to a later one, in order."""
        inside = self.ancestors[end] & ~self.ancestors[fork]
        return [
            i
            for i, operation in enumerate(self.operations)
            if any(inside >> node & 1 for node in operation.writes)
            and (self.ancestors[operation.writes[0]] >> fork & 1)
        ]

    def enclosing(self, call: int) -> Iterator[int]:
        """A call and its enclosing calls, innermost first."""
        while call >= 0:
            yield call
            call = self.calls[call].parent


def record(model: nn.Module, inputs: Tensor) -> Flow:
    """Run the model once, in eval mode and without gradients, and record the pass.

    Tensors are followed by identity through Python, so every module works that computes with torch functions; compiled
    and scripted parts appear as single operations.

    Raises:
        ValueError: the model is a TorchScript program.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the modules of a TorchScript program cannot be hooked; save the state_dict() of its model and name the "
            "model with --model"
        )
    recorder = _Recorder()
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(recorder.pre_hook(name), with_kwargs=True))
        handles.append(module.register_forward_hook(recorder.hook(), always_call=False))
    training = {module: module.training for module in model.modules()}
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused encoder layer would hide its operations
    try:
        model.eval()
        with torch.no_grad(), recorder:
            recorder.add_input(inputs)
            model(inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, was in training.items():
            module.training = was
        for handle in handles:
            handle.remove()
    return recorder.flow


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()
        self._nodes: dict[int, Node] = {}  # id of a tensor -> its current node
        self._kept: list[Tensor] = []  # keeps every tensor alive, so that no id is used twice
        self._open: list[int] = []  # calls not yet returned
        self._counts: dict[str, int] = {}
        self._attention: dict[str, int] = {}

    def add_input(self, tensor: Tensor) -> None:
        self._add(tensor, ancestors=0, maker=-1)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        reads = tuple(dict.fromkeys(self._recorded((args, kwargs))))
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        number, heads = 0, 0
        if name in ATTENTION:
            number = self._attention[name] = self._attention.get(name, -1) + 1
            heads = _heads(name, args, kwargs, self.flow.shapes[0][0])
        if reads:
            tensors = [t for t in _tensors(result) if isinstance(t, Tensor)]
            if tensors and name != "__get__":
                past = 0
                for node in reads:
                    past |= self.flow.ancestors[node]
                position = len(self.flow.operations)
                writes = tuple(self._add(t, ancestors=past, maker=position) for t in tensors)
                call = self._open[-1] if self._open else -1
                weight = _weight(name, args, kwargs)
                self.flow.operations.append(Operation(name, reads, writes, call, weight, number, heads))
        return result

    def pre_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            parent = self._open[-1] if self._open else -1
            reads = tuple(self._recorded((args, kwargs)))
            self._open.append(len(self.flow.calls))
            self.flow.calls.append(Call(name, number, parent, len(self.flow.operations), reads))

        return hook

    def hook(self) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            call = self.flow.calls[self._open.pop()]
            call.writes, call.stop = tuple(self._recorded(output)), len(self.flow.operations)

        return hook

    def _add(self, tensor: Tensor, *, ancestors: int, maker: int) -> Node:
        node = len(self.flow.shapes)
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)
        self.flow.shapes.append(tuple(tensor.shape))
        self.flow.ancestors.append(ancestors | 1 << node)
        self.flow.maker.append(maker)
        return node

    def _recorded(self, values: Any) -> Iterator[Node]:
        return (self._nodes[id(t)] for t in _tensors(values) if id(t) in self._nodes)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists, dicts and dataclass-like outputs, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _weight(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if not (name.startswith("conv") or name == "linear"):
        return ()
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


def _heads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], images: int) -> int:
    """Number of heads of an attention function."""
    if name == "multi_head_attention_forward":
        return int(kwargs.get("num_heads", args[4] if len(args) > 4 else 1))
    shape = next(_tensors((args, kwargs))).shape
    if len(shape) < 3:
        return 1
    return shape[-3] if len(shape) > 3 else max(1, shape[0] // images)  # (batch * head, query, key)
