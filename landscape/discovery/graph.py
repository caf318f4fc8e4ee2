"""Record one forward pass as a graph: every operation, the tensors it reads and writes, and its module call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from typing import Any, Self
from weakref import finalize

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from landscape.data.structure import Forward, Nested, call_model, rows_of, tensors_in
from landscape.discovery.positions import PRODUCTS, Positions, follow, maps_of, of_image

ATTENTION = {"scaled_dot_product_attention", "softmax", "_softmax", "multi_head_attention_forward"}
ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
POOLING = {"max_pool2d", "avg_pool2d", "boolean_dispatch", "max_pool2d_with_indices", "fractional_max_pool2d"}
VIEWS = {"reshape", "view", "flatten", "permute", "transpose", "contiguous", "unflatten", "mT", "T", "data"}
# Operations with weights, matrix products and attention: a residual branch has at least one.
HEAVY = ATTENTION | PRODUCTS | {"conv1d", "conv2d", "conv3d", "linear"}
CONVERSIONS = {"to", "float", "double", "half", "bfloat16", "type", "type_as"}  # no operation where they change nothing
Key = tuple[str, int]  # name of a torch function, and the number of its call in a pass
Receiver = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any], None]  # function, arguments, result
Node = int  # one value of a tensor: an in-place operation makes a new node of the same tensor


@dataclass(frozen=True)
class Patches:
    """How `unfold` cuts a map into patches: (rows, columns) each."""

    grid: tuple[int, int]  # of the patches
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


@dataclass(frozen=True)
class Operation:
    """One torch function call on values that depend on the input."""

    name: str  # of the torch function
    reads: tuple[Node, ...]  # nodes that depend on the model's input
    writes: tuple[Node, ...]  # nodes produced
    call: int  # position in `Flow.calls` of the innermost enclosing module call
    weight: tuple[int, ...] = ()  # shape of the weight of a convolution or linear layer, else ()
    number: int = 0  # of earlier calls of this function in the pass
    heads: int = 0  # of an attention function, else 0
    blurs: bool = False  # whether it averages each channel over neighbouring positions, with stride 1
    patches: Patches | None = None  # of an unfolded map
    equation: str = ""  # of an einsum
    maps: Positions | None = None  # of an attention function: positions of its queries and keys, if they are known


@dataclass
class Call:
    """One call of a module."""

    module: str  # dotted name, "" for the model itself
    number: int  # of earlier calls of this module in the pass
    parent: int  # position in `Flow.calls` of the enclosing call, -1 for the model itself
    start: int  # number of operations before it
    reads: tuple[Node, ...] = ()  # nodes passed to it, in order
    writes: tuple[Node, ...] = ()  # nodes it returned
    stop: int = -1  # number of operations when it returned


@dataclass
class Flow:
    """A recorded pass. Node 0 is the model's input."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of every node
    operations: list[Operation] = field(default_factory=list)  # in order of execution
    calls: list[Call] = field(default_factory=list)  # module calls in order of their start
    ancestors: list[int] = field(default_factory=list)  # of every node, as a bit set that includes the node itself
    maker: list[int] = field(default_factory=list)  # position of the operation that produced each, -1 for the input
    positions: list[Positions | None] = field(default_factory=list)  # of every node in the image, if they are known
    indices: int = 0  # the nodes of integers, as of tokens, as a bit set
    second: int = 0  # the nodes whose second axis is that of the samples, as a bit set

    def between(self, fork: Node, end: Node) -> list[int]:
        """Operations on the paths from one node to a later one, in order."""
        inside = self.ancestors[end] & ~self.ancestors[fork]
        several = range(self.maker[fork] + 1, self.maker[end] + 1)
        paths = ((i, self.operations[i].writes) for i in several)
        paths = ((i, writes) for i, writes in paths if self.ancestors[writes[0]] >> fork & 1)
        return [i for i, writes in paths if any(inside >> node & 1 for node in writes)]

    def samples_first(self, node: Node) -> Self:
        """The flow with a node's axes in the order of most networks: first that of the samples."""
        if not self.second >> node & 1:
            return self
        shapes, positions = list(self.shapes), list(self.positions)
        tokens, samples, *rest = shapes[node]
        shapes[node], found = (samples, tokens, *rest), positions[node]
        positions[node] = found and tuple(p.transpose(0, 1) for p in found)
        return replace(self, shapes=shapes, positions=positions)

    def enclosing(self, call: int) -> Iterator[int]:
        while call >= 0:
            yield call
            call = self.calls[call].parent


def few(example: Nested) -> Nested:
    """The first two samples of a single tensor; other examples are as small as they can be."""
    return example[:2] if isinstance(example, Tensor) else example


def record(model: nn.Module, inputs: Nested, forward: Forward = call_model) -> Flow:
    """Run the model once, in eval mode and without gradients, and record the pass; `forward` calls it.

    Tensors are followed by identity through Python, so every module works that computes with torch functions; compiled
    parts appear as single operations.

    Raises:
        ValueError: the model, or a part of it, is a TorchScript program.
    """
    scripts = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    if (script := next(scripts, None)) is not None:
        raise ValueError(
            f"the modules of a TorchScript program{f' ({script})' if script else ''} cannot be hooked; save the "
            "state_dict() of its model and name the model with --model"
        )
    recorder = _Recorder()
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(recorder.before_hooks, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_pre_hook(partial(recorder.enter, name), with_kwargs=True))
        handles.append(module.register_forward_hook(recorder.before_hooks_of_output, prepend=True))
        handles.append(module.register_forward_hook(recorder.leave))
    training = {module: module.training for module in model.modules()}
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused encoder layer would hide its operations
    try:
        model.eval()
        with torch.no_grad(), recorder:
            for tensor in tensors_in(inputs):
                recorder.add(tensor, ancestors=0, maker=-1, positions=of_image(tensor))
            forward(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, was in training.items():
            module.training = was
        for handle in handles:
            handle.remove()
    recorder.flow.second = _samples_second(recorder.flow, model, inputs, forward)
    return recorder.flow


def _samples_second(flow: Flow, model: nn.Module, inputs: Nested, forward: Forward) -> int:
    """The nodes (token, sample, ...), as a bit set: by their positions in the images, or by a pass of one sample."""
    doubtful = [i for i, shape in enumerate(flow.shapes) if len(shape) > 2 and shape[1] == flow.shapes[0][0] > 1]
    found: list[Node] = []
    if flow.positions[0]:
        places = ((i, flow.positions[i]) for i in doubtful)
        found = [i for i, p in places if p and any(q.stride(0) for q in p) and not any(q.stride(1) for q in p)]
    elif doubtful:
        with suppress(Exception):  # whatever a foreign model raises that takes no single sample
            one = record(model, rows_of(inputs, slice(0, 1)), forward).shapes
            if len(one) == len(flow.shapes):
                found = [i for i in doubtful if one[i] == (flow.shapes[i][0], 1, *flow.shapes[i][2:])]
    return reduce(or_, (1 << i for i in found), 0)


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()
        self._nodes: dict[int, Node] = {}  # id of a tensor, as long as it lives -> its current node
        self._open: list[int] = [-1]  # calls not yet returned, innermost last
        # Operations and calls so far, and what a module is given or returns, before the user's own hooks on it run.
        self._before_hooks: list[tuple[int, int, tuple[Node, ...]]] = []
        self._counts: dict[str, int] = {}
        self._functions: dict[str, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = tuple(dict.fromkeys(self._recorded((args, kwargs))))
        result = func(*args, **kwargs)
        name = name_of(func, args)
        number = self._functions[name] = self._functions.get(name, -1) + 1
        if name in CONVERSIONS and any(result is value for value in args):
            return result
        weight = _weight(name, args, kwargs)
        heads = _heads(name, args, kwargs, self.flow.shapes[0][0]) if name in ATTENTION else 0
        tensors = list(tensors_in(result))
        if reads and tensors:
            past = reduce(or_, (self.flow.ancestors[node] for node in reads))
            position = len(self.flow.operations)
            maps = maps_of(name, args, kwargs, self._find) if name in ATTENTION else None
            places = follow(name, func, args, kwargs, tensors, self._find)
            added = zip(tensors, places, strict=True)
            writes = tuple(self.add(t, ancestors=past, maker=position, positions=place) for t, place in added)
            blurs = _blurs(name, args, kwargs) and min(tensors[0].shape[-2:]) > 1
            patches = _patches(*args, **kwargs) if func is F.unfold else None
            equation = args[0] if name == "einsum" and isinstance(args[0], str) else ""
            call = self._open[-1]
            operation = Operation(name, reads, writes, call, weight, number, heads, blurs, patches, equation, maps)
            self.flow.operations.append(operation)
        return result

    def before_hooks(self, module: nn.Module, *values: Any) -> None:
        state = len(self.flow.operations), len(self.flow.calls), tuple(self._recorded(values))
        self._before_hooks.append(state)

    def before_hooks_of_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.before_hooks(module, output)

    def _forget_hooks(self, values: Any) -> tuple[Node, ...]:
        """Drop the operations of hooks that only read: what they read is not what the network reads.

        Returns:
            the nodes of the values.
        """
        (position, calls, before), nodes = self._before_hooks.pop(), tuple(self._recorded(values))
        if nodes == before:
            del self.flow.operations[position:], self.flow.calls[calls:]
        return nodes

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reads = self._forget_hooks((args, kwargs))
        number = self._counts[name] = self._counts.get(name, -1) + 1
        self.flow.calls.append(Call(name, number, self._open[-1], len(self.flow.operations), reads))
        self._open.append(len(self.flow.calls) - 1)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nodes = self._forget_hooks(output)
        call = self.flow.calls[self._open.pop()]
        call.writes, call.stop = nodes, len(self.flow.operations)

    def add(self, tensor: Tensor, *, ancestors: int, maker: int, positions: Positions | None) -> Node:
        node = len(self.flow.shapes)
        self._nodes[id(tensor)] = node
        finalize(tensor, self._nodes.pop, id(tensor), None)
        self.flow.shapes.append(tuple(tensor.shape))
        self.flow.ancestors.append(ancestors | 1 << node)
        self.flow.maker.append(maker)
        self.flow.indices |= int(not tensor.is_floating_point()) << node
        self.flow.positions.append(positions)
        return node

    def _find(self, tensor: Tensor) -> tuple[Node, Positions | None] | None:
        node = self._nodes.get(id(tensor))
        return None if node is None else (node, self.flow.positions[node])

    def _recorded(self, values: Any) -> Iterator[Node]:
        return (self._nodes[id(t)] for t in tensors_in(values) if id(t) in self._nodes)


_UNCOUNTED = ContextVar("_UNCOUNTED", default=False)


@contextmanager
def uncounted() -> Iterator[None]:
    """Run the block, in which `CountedCalls` count nothing: its calls are none of the model."""
    token = _UNCOUNTED.set(True)
    try:
        yield
    finally:
        _UNCOUNTED.reset(token)


class CountedCalls(TorchFunctionMode):
    """Hands over some calls of torch functions in this thread, which are counted as in a recorded pass."""

    def __init__(self, receivers: Mapping[Key, Sequence[Receiver]]) -> None:
        super().__init__()
        self._receivers, self._names = receivers, {name for name, _ in receivers}
        self._counts: dict[str, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = name_of(func, args)
        if name in self._names and not _UNCOUNTED.get():
            number = self._counts[name] = self._counts.get(name, -1) + 1
            for receive in self._receivers.get((name, number), ()):
                receive(func, args, kwargs or {}, result)
        return result


def name_of(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Name of a torch function, or of an attribute of a tensor, such as `mT`.

    bias + x W with W a parameter (inputs, outputs), as in GPT-2, is a linear layer.
    """
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))  # type: ignore[attr-defined]
    return "linear" if name == "addmm" and len(args) == 3 and isinstance(args[2], nn.Parameter) else name


def _weight(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if name == "linear" and len(args) == 3 and isinstance(args[2], Tensor) and args[2].ndim == 2:  # addmm
        return tuple(args[2].shape[::-1])
    if not (name.startswith("conv") or name == "linear"):
        return ()
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


def _patches(input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Patches:
    kernel, apart, beside, step = (
        (side, side) if isinstance(side, int) else (side[0], side[1])
        for side in (kernel_size, dilation, padding, stride)
    )
    rows, columns = (
        (n + 2 * b - a * (k - 1) - 1) // s + 1
        for n, k, s, b, a in zip(input.shape[-2:], kernel, step, beside, apart, strict=True)
    )
    return Patches((rows, columns), kernel, step, beside, apart)


def _blurs(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call averages neighbours with stride 1: an average pooling, or a fixed filter of each channel."""
    if name == "avg_pool2d":
        side = kwargs.get("kernel_size", args[1] if len(args) > 1 else 1)
        stride = kwargs.get("stride", args[2] if len(args) > 2 else None)
        return np.max(side) > 1 and bool(np.all(np.equal(side if stride in (None, ()) else stride, 1)))
    if name != "conv2d":
        return False
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    stride = kwargs.get("stride", args[3] if len(args) > 3 else 1)
    if not isinstance(weight, Tensor) or isinstance(weight, nn.Parameter):
        return False
    return weight.shape[1] == 1 and max(weight.shape[2:]) > 1 and bool(np.all(np.equal(stride, 1)))


def _heads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], images: int) -> int:
    if name == "multi_head_attention_forward":
        return int(kwargs.get("num_heads", args[4] if len(args) > 4 else 1))
    shape = next(tensors_in((args, kwargs))).shape
    if len(shape) < 3:
        return int("softmax" not in name)  # which over a matrix chooses the experts of a token
    return shape[-3] if len(shape) > 3 else max(1, shape[0] // images)  # (batch * head, query, key)
