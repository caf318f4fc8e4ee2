"""Run one forward pass of a mini-batch and hand its features and attention maps to any number of probes."""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.data.structure import Nested, tensors_in
from landscape.discovery.graph import CountedCalls, Key, Receiver, uncounted
from landscape.discovery.layer import Layer, Side, Tap, chunks
from landscape.layers.attention_maps import AttentionMaps, attention_hooks
from landscape.probe import Values
from landscape.subject.subject import Subject

PART = 2**20  # numbers at a time on a CPU
SMALL_MEAN = 4.0  # standard deviations: such a mean costs squares and Fourier sums less than one more decimal place


@dataclass(frozen=True)
class MapPart:
    """Maps of some images (n, C, H, W), in at least single precision, and what probes compute of them once for all."""

    maps: Tensor
    memory: Tensor  # for `varying`, grown where it is needed

    @cached_property
    def level(self) -> Tensor:
        """Means over positions, (n, C)."""
        mean: Tensor = self.maps.mean(dim=(2, 3))
        return mean

    @property
    def spread(self) -> Tensor:
        """Sums over positions of squared deviations from the mean, (n, C) float64."""
        return self._varying[1]

    @property
    def varying(self) -> Tensor:
        """The maps less a constant each, (n, C, H, W): their mean, or 0 where every mean is small.

        Without a large mean, frequencies above zero do not suffer from cancellation. The next part overwrites it.
        """
        return self._varying[0]

    @cached_property
    def _varying(self) -> tuple[Tensor, Tensor]:
        if self.maps.device.type == "cpu":  # elsewhere the decision would wait for the device
            constant = self.level.double().square() * self.maps.shape[2:].numel()
            spread = _squares(self.maps) - constant
            if bool((constant <= SMALL_MEAN**2 * spread).all()):
                return self.maps, spread
        if self.memory.numel() < self.maps.numel():
            self.memory.resize_(self.maps.numel())  # once per tensor: the system clears new memory
        kept = self.memory[: self.maps.numel()].view(self.maps.shape)
        varying = torch.sub(self.maps, self.level[..., None, None], out=kept)
        return varying, _squares(varying)


def _squares(maps: Tensor) -> Tensor:
    """Sums of squares over positions of maps (n, C, H, W), (n, C) float64; torch.var takes several times as long."""
    if maps.device.type == "cpu" and maps.stride(1) == 1:  # of tokens, whose norms over positions are as slow
        return maps.square().sum(dim=(2, 3)).double()
    norms: Tensor = torch.linalg.vector_norm(maps, dim=(2, 3))
    return norms.double().square()


@dataclass(frozen=True)
class FeatureHooks:
    """What one probe does during the forward pass of one mini-batch; receivers take the position of a layer first."""

    layers: Sequence[Layer]
    on_features: Callable[[int, Tensor], None] | None = None  # must not keep the tensor or a view of it
    values: Callable[[], Values] = dict  # what the probe stores, called after the pass
    on_attention: Callable[[int, AttentionMaps], None] | None = None  # takes the maps of the layer's branch
    on_heads: Callable[[int, Tensor], None] | None = None  # takes the outputs of its heads, (row, head, query, channel)
    on_maps: Callable[[int, MapPart], None] | None = None  # takes the maps of some images after the others
    in_parts: Container[int] = ()  # positions of the layers that come by `on_maps`, not by `on_features`

    def run(self, subject: Subject, index: tuple[int, ...], changed: Nested = None) -> Values:
        """The values of these hooks alone, as by `run_with_hooks`."""
        return run_with_hooks(subject, index, [self], changed)[0]


def units_of(subject: Subject) -> dict[str, np.ndarray]:
    """The unit axes of a probe that measures with hooks: the mini-batches, and the members if there are any."""
    members = {"member": np.arange(subject.members)} if subject.members else {}
    return {"batch": np.arange(len(subject.batches)), **members}


def run_with_hooks(
    subject: Subject, index: tuple[int, ...], hooks: Sequence[FeatureHooks], changed: Nested = None
) -> list[Values]:
    """The values of each probe's hooks, from one forward pass for all of them; `index` is on the axes of `units_of`.

    `changed`: other inputs of the same samples.
    """
    i, *member = index
    inputs = subject.batch(i)[0] if changed is None else changed
    hooked = [(hook, position) for hook in hooks for position in range(len(hook.layers))]
    places: dict[Tap, list[tuple[FeatureHooks, int]]] = {}
    for hook, position in hooked:
        places.setdefault(hook.layers[position].tap, []).append((hook, position))
    layers = [several[0][0].layers[several[0][1]] for several in places.values()]
    rows = None if subject.divisible else subject.samples(i)

    def receive(at: int, tensor: Tensor) -> None:
        if rows is not None and len(tensor) != rows:
            raise ValueError(
                f"{layers[at].name} has {len(tensor)} rows for {rows} samples, expected one for each; name other "
                "layers with --layers"
            )
        _give_features(places[layers[at].tap], tensor.detach())

    takes = [
        (attention, hook.on_attention and partial(hook.on_attention, at), hook.on_heads and partial(hook.on_heads, at))
        for hook, at in hooked
        if (attention := hook.layers[at].attention) is not None
    ]
    with (
        subject.member(*member) if member else nullcontext(),
        subject.evaluating(),
        attention_hooks(takes, subject.samples(i)),
        feature_hooks(subject.model, layers, receive),
    ):
        subject.outputs(inputs)
    return [hook.values() for hook in hooks]


def _give_features(receivers: Sequence[tuple[FeatureHooks, int]], tensor: Tensor) -> None:
    """Hand a tensor to the probes, as a whole or as maps in parts."""
    parts: dict[Hashable, tuple[Layer, list[Callable[[MapPart], None]]]] = {}
    for hook, position in receivers:
        layer = hook.layers[position]
        if hook.on_maps is not None and position in hook.in_parts:
            order = layer.layout, layer.prefix, layer.grid
            parts.setdefault(order, (layer, []))[1].append(partial(hook.on_maps, position))
        elif hook.on_features is not None:
            hook.on_features(position, tensor)
    for layer, several in parts.values():
        for part in map_parts(layer.maps(tensor)):
            for receive in several:
                receive(part)


def map_parts(maps: Tensor) -> Iterator[MapPart]:
    """Maps (N, C, H, W) in parts, several at a time so that calls of the library cost little."""
    dtype = torch.promote_types(maps.dtype, torch.float32)
    memory = torch.empty(0, dtype=dtype, device=maps.device)
    for part in chunks(maps, PART):
        yield MapPart(part.to(dtype), memory)


def transferred(sums: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors of one dtype as arrays, by one transfer from the device."""
    everything = torch.cat([tensor.flatten() for tensor in sums.values()]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in sums.values()])[:-1]
    parts = zip(sums.items(), np.split(everything, ends), strict=True)
    return {name: part.reshape(tensor.shape) for (name, tensor), part in parts}


@contextmanager
def feature_hooks(model: nn.Module, layers: Sequence[Layer], receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand each layer's tensor to `receive(position, tensor)` while the model runs once; nothing is kept.

    The hooks are removed afterwards, also after an exception.
    """
    positions: dict[Tap, list[int]] = {}
    for position, layer in enumerate(layers):
        positions.setdefault(layer.tap, []).append(position)

    def give(tap: Tap, args: tuple[Any, ...], value: Any) -> None:
        tensor = next(tensors_in(value), None)  # of a tuple, a mapping or a dataclass, nested in any way, the first
        for position in positions.get(tap, ()):
            assert isinstance(tensor, Tensor)
            with uncounted():
                receive(position, tensor.movedim(layers[position].samples_axis, 0))

    def give_result(tap: Tap, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        give(tap, args, result)

    modules = dict.fromkeys((tap.module, tap.side) for tap in positions if tap.side != "function")
    functions: dict[Key, list[Receiver]] = {
        (tap.module, tap.call): [partial(give_result, tap)] for tap in positions if tap.side == "function"
    }
    with hooked_calls(model, modules, give), CountedCalls(functions) if functions else nullcontext():
        yield


@contextmanager
def hooked_calls(
    model: nn.Module, sides: Iterable[tuple[str, Side]], hook: Callable[[Tap, tuple[Any, ...], Any], Any]
) -> Iterator[None]:
    """Call `hook(tap, args, value)` at every call of some modules; the value is their input or output.

    Unless None, the result of a hook on an output replaces the output. Each forward pass of the model counts the calls
    anew. The hooks are removed afterwards, also after an exception.
    """
    counts: dict[tuple[str, Side], int] = {}

    def count_and_call(name: str, side: Side, args: tuple[Any, ...], value: Any) -> Any:
        number = counts[name, side] = counts.get((name, side), -1) + 1
        return hook(Tap(name, side, number), args, value)

    def before(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count_and_call(name, "input", args, args or tuple(kwargs.values()))

    def after(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return count_and_call(name, "output", args, output)

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(lambda module, args: counts.clear()))
        for name, side in sides:
            module = model.get_submodule(name)
            if side == "input":
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            else:
                hooks.enter_context(module.register_forward_hook(partial(after, name)))
        yield
