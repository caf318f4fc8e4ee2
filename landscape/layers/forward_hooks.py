"""One forward pass of a mini-batch for any number of listeners: layers' tensors and attention maps as they pass by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from landscape.layers.attention_maps import Maps, attending
from landscape.layers.graph import Key
from landscape.layers.selection import Layer
from landscape.probe import Values
from landscape.subject.subject import Subject


@dataclass(frozen=True)
class Listener:
    """What one probe does with one mini-batch.

    Args:
        layers: whose tensors it is handed.
        receive: takes the position of a layer and its tensor; must keep neither the tensor nor a view of it for long.
        values: what the probe stores, once the pass is over.
        attend: takes the position of a layer and the attention maps that its branch makes.
    """

    layers: Sequence[Layer]
    receive: Callable[[int, Tensor], None]
    values: Callable[[], Values]
    attend: Callable[[int, Maps], None] | None = None


def one_pass(subject: Subject, i: int, listeners: Sequence[Listener]) -> list[Values]:
    """What each listener makes of mini-batch i, from one forward pass for all of them."""
    inputs, _ = subject.batch(i)
    heard = [(listener, position) for listener in listeners for position in range(len(listener.layers))]

    def receive(which: int, tensor: Tensor) -> None:
        listener, position = heard[which]
        listener.receive(position, tensor)

    maps: dict[Key, Callable[[Maps], None]] = {}
    for listener, position in heard:
        attention = listener.layers[position].attention
        if listener.attend is not None and attention is not None:
            maps[attention.key] = partial(listener.attend, position)
    layers = [listener.layers[position] for listener, position in heard]
    with torch.inference_mode(), listening(subject.model, layers, receive), attending(maps, len(inputs)):
        subject.model(inputs)
    return [listener.values() for listener in listeners]


@contextmanager
def listening(model: nn.Module, layers: Sequence[Layer], receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand each layer's tensor to `receive(position, tensor)` while the model runs; nothing is kept.

    Hooks are removed afterwards, also after an exception.
    """
    modules = dict(model.named_modules())
    counts: dict[tuple[str, str], int] = {}
    wanted: dict[tuple[str, str], dict[int, list[int]]] = {}
    for position, layer in enumerate(layers):
        key: tuple[str, str] = (layer.tap.module, layer.tap.side)
        wanted.setdefault(key, {}).setdefault(layer.tap.call, []).append(position)

    def give(key: tuple[str, str], value: object) -> None:
        number = counts[key] = counts.get(key, -1) + 1
        value = tuple(value.values()) if isinstance(value, Mapping) else value  # a dataclass-like output
        tensor = value[0] if isinstance(value, tuple | list) else value
        for position in wanted[key].get(number, []):
            assert isinstance(tensor, Tensor)
            receive(position, tensor)

    handles = [model.register_forward_pre_hook(lambda module, args: counts.clear())]
    for key in wanted:
        module, side = modules[key[0]], key[1]
        if side == "input":
            handles.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, key=key: give(key, args or tuple(kwargs.values())),
                    with_kwargs=True,
                )
            )
        else:
            handles.append(module.register_forward_hook(lambda module, args, output, key=key: give(key, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
