"""Run a recorded graph in torch's interpreter, in one call that holds Python's lock at its start and end only.

The code that torch generates for a graph calls every operation from Python. Two threads with such code wait for each
other's lock hundreds of times per run, which costs up to a third of the time on two cores. The interpreter runs the
same operations on the same tensors, so that results are equal bit for bit.
"""

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from landscape.products import matrix_products

log = logging.getLogger(__name__)

Function = Callable[..., Sequence[Tensor]]
_private: Any = torch._C
_optimised: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]
_NONE = "none"  # activation after a product of oneDNN's
_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


class InterpretedGraph:
    """A graph as a function for the interpreter, with its `text`, from which it can be made again.

    Raises:
        RuntimeError: the text is no graph, or one of another version of torch.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._run = _private._create_function_from_graph("recorded", _private.parse_ir(text))

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        with _optimised(False):  # which would first observe the graph in several runs
            found: list[Tensor] = self._run(*tensors)
        return found


def interpreted(graph: fx.GraphModule) -> Function:
    """A recorded graph of torch's own operations as a function for the interpreter; the graph itself if that fails."""
    try:
        return InterpretedGraph(str(_translated(graph.graph)))
    except Exception as error:  # an operation or constant that the interpreter does not know, or another torch
        log.debug("a recorded graph that is called operation by operation: %s", error)
        return graph


def _translated(graph: fx.Graph) -> Any:
    """The same operations for the interpreter.

    Raises:
        ValueError: the graph does more than call operations of torch.
        RuntimeError: the interpreter does not know a constant or the result of an operation.
    """
    translation = _Translation()
    for node in graph.nodes:
        if node.op == "placeholder":
            translation.values[node] = [translation.graph.addInput(node.name)]
        elif node.op == "output":
            translation.finish(node.args[0])
        elif node.target is operator.getitem:
            translation.select(node)
        elif node.target is matrix_products.operator():
            translation.multiply(node)
        elif isinstance(node.target, OpOverload):
            translation.call(node)
        else:
            raise ValueError(f"{node.op} {node.target}")
    return translation.graph


class _Translation:
    """A graph for the interpreter that is being written, with the values of each translated node."""

    def __init__(self) -> None:
        self.graph = _private.Graph()
        self.values: dict[fx.Node, list[Any]] = {}
        self._constants: dict[tuple[type, str], Any] = {}

    def call(self, node: fx.Node) -> None:
        schema = node.target._schema  # type: ignore[union-attr]
        inputs = []
        for position, argument in enumerate(schema.arguments):
            given = node.args[position] if position < len(node.args) else None
            if position >= len(node.args):
                given = node.kwargs.get(argument.name, argument.default_value)
            inputs.append(self._value(given, argument.type))
        self.values[node] = self._insert(schema.name, inputs, [result.type for result in schema.returns])

    def multiply(self, node: fx.Node) -> None:
        """Our operator for large matrix products, which is written in Python, as the operation that it calls."""
        a, b = (self._value(given, None) for given in node.args)
        tensor, numbers = _private.TensorType.get(), _private.ListType(_private.OptionalType(_private.NumberType.get()))
        (transposed,) = self._insert("aten::t", [b], [tensor])
        (scalars,) = self._insert("prim::ListConstruct", [], [numbers])
        options = [self._constant(None), self._constant(_NONE), scalars, self._constant("")]
        self.values[node] = self._insert("mkldnn::_linear_pointwise", [a, transposed, *options], [tensor])

    def select(self, node: fx.Node) -> None:
        """One of several results, or an item of a list."""
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        found = self.values[source]
        if len(found) > 1:
            self.values[node] = [found[index]]
        else:
            inputs = [found[0], self._constant(index)]
            self.values[node] = self._insert("aten::__getitem__", inputs, [_private.TensorType.get()])

    def finish(self, results: Any) -> None:
        tensors = [self._value(result, None) for result in results]
        (listed,) = self._insert("prim::ListConstruct", tensors, [_private.ListType.ofTensors()])
        self.graph.registerOutput(listed)

    def _insert(self, name: str, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        node = self.graph.create(name, list(inputs), len(results))
        self.graph.insertNode(node)
        outputs = list(node.outputs())
        for output, kind in zip(outputs, results, strict=True):
            output.setType(kind)
        return outputs

    def _value(self, given: Any, kind: Any) -> Any:
        """The value of an argument; `kind` is its type in the operation's schema."""
        if isinstance(given, fx.Node):
            (value,) = self.values[given]
            return value
        if isinstance(given, list | tuple):
            while kind.kind() == "OptionalType":
                kind = kind.getElementType()
            items = [self._value(item, kind.getElementType()) for item in given]
            return self._insert("prim::ListConstruct", items, [kind])[0]
        return self._constant(given)

    def _constant(self, given: Any) -> Any:
        if given in _MEMORY_FORMATS:
            given = _MEMORY_FORMATS.index(given)
        key = (type(given), repr(given))
        if key not in self._constants and key[1] in ("inf", "-inf", "nan"):  # torch 2.6 cannot read what it writes
            (self._constants[key],) = self._insert("aten::Float", [self._constant(key[1])], [_private.FloatType.get()])
        elif key not in self._constants:
            self._constants[key] = self.graph.insertConstant(given)
        return self._constants[key]
