"""Stacked recurrent layers one by one, so that their dropout, which lies between them, can be replaced."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# Not `torch.lstm`, in whose place `precision.exact_arithmetic` puts its own.
RECURRENT = {getattr(torch._C._VariableFunctions, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


class RecurrentCall(NamedTuple):
    """A call of one of `RECURRENT`, by the positions of its arguments."""

    function: Callable[..., tuple[Tensor, ...]]
    inputs: Tensor  # (N, T, C), (T, N, C), or the rows of packed sequences
    sizes: list[Tensor]  # of packed sequences one tensor, how many of them reach each step; else empty
    hidden: Any  # initial state, (layers * directions, N, H): of an LSTM two of them
    weights: Any  # of all layers, one after the other
    biases: bool
    layers: int
    rate: float
    both: bool  # directions
    layout: list[bool]  # `batch_first`; empty for packed sequences

    @classmethod
    def of(cls, function: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> "RecurrentCall":
        """From the arguments of the function."""
        packed = int(isinstance(arguments[3], list | tuple))
        hidden, weights, biases, layers, rate, _, both, *layout = arguments[1 + packed :]
        sizes = list(arguments[1 : 1 + packed])
        return cls(function, arguments[0], sizes, hidden, weights, biases, layers, float(rate), both, layout)

    def layer_by_layer(self, between: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        """What the function returns, with `between` applied to the outputs of every layer but the last."""
        several = isinstance(self.hidden, list | tuple)
        states = self.hidden if several else [self.hidden]
        weights, directions = len(self.weights) // self.layers, 1 + self.both
        x, ends = self.inputs, []
        for layer in range(self.layers):
            first = [state.narrow(0, layer * directions, directions).contiguous() for state in states]
            own = self.weights[layer * weights : (layer + 1) * weights]
            x, *last = self.function(
                x, *self.sizes, first if several else first[0], own, self.biases, 1, 0.0, False, self.both, *self.layout
            )  # fmt: skip
            ends.append(last)
            x = between(x) if layer + 1 < self.layers else x
        return x, *(torch.cat(of_layers) for of_layers in zip(*ends, strict=True))


def order_of(inputs: Any) -> Tensor | None:
    """Which sequence of the mini-batch each of the packed ones is; None where they are in its order."""
    return inputs.sorted_indices if isinstance(inputs, PackedSequence) else None


def rows_of_packed(padded: Tensor, sizes: Tensor, order: Tensor | None, of: str = "") -> Tensor:
    """The rows that padded sequences (N, T, C) have when they are packed.

    Raises:
        ValueError: the order is that of other sequences.
    """
    if order is not None and len(order) != len(padded):
        raise ValueError(
            f"dropout between the recurrent layers{of} acts on packed sequences of unknown order, expected a call of "
            "nn.LSTM, nn.GRU or nn.RNN; give it padded sequences, or drop --mc-dropout"
        )
    reached = torch.arange(len(padded)) < sizes[:, None]
    step, row = (index.to(padded.device) for index in reached.nonzero(as_tuple=True))
    return padded[row if order is None else order[row], step]
