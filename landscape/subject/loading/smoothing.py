"""Insert smoothing blocks into a trained network: at the ends of its stages, or where the user says.

A block is a module without parameters behind the module whose output it smooths, so that weights keep their names, and
hooks, traces, `torch.func` and recorded passes see it like any other module.
"""

import copy
import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from landscape.data.structure import Forward, Nested, call_model
from landscape.discovery.discover import discover, layer_at
from landscape.discovery.graph import Call, Flow, few, record
from landscape.discovery.layer import Layer, Tap
from landscape.discovery.residual_blocks import node_at
from landscape.discovery.token_grid import consumer_is_linear
from landscape.models.blocks import Smoothing
from landscape.options import first_line, matching, nearest
from landscape.subject.mc_dropout import as_is
from landscape.subject.spec import SmoothingOptions, Spec, smoothing_of
from landscape.subject.subject import Subject

NAME = "smoothing"  # of an inserted module, after the name of the one whose output it smooths
_log = logging.getLogger(__name__)
_classes: dict[type[nn.Module], type[nn.Module]] = {}  # by the class whose outputs theirs smooths


class InsertedSmoothing(Smoothing):
    """A smoothing block for a tensor of any layout; tokens before those of the grid pass as they are."""

    def __init__(self, options: SmoothingOptions, layer: Layer) -> None:
        super().__init__(**options.block)
        self.options = options
        self.layout, self.grid, self.prefix = layer.layout, layer.grid, layer.prefix

    def forward(self, x: Tensor) -> Tensor:
        """The tensor smoothed over the positions of its map."""
        if self.layout == "channels first":
            return super().forward(x)
        if self.layout == "channels last":
            return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        maps = x[:, self.prefix :].transpose(1, 2).reshape(len(x), -1, *self.grid)
        tokens = super().forward(maps).flatten(2).transpose(1, 2)
        return torch.cat([x[:, : self.prefix], tokens], dim=1) if self.prefix else tokens


def inserted(model: nn.Module) -> dict[str, InsertedSmoothing]:
    """The smoothing blocks that were inserted into a network, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, InsertedSmoothing)}


def options_of(spec: Spec, recipe: dict[str, Any] | None) -> SmoothingOptions | None:
    """What a spec, or the recipe that a checkpoint was trained with, wants inserted."""
    return smoothing_of(spec.smooth, spec.smooth_block, spec.smooth_at, recipe)


def smoothed(subject: Subject) -> Subject:
    """The subject with the smoothing blocks that its spec or its checkpoint asks for; a caller's module is copied.

    Raises:
        ValueError: as `insert`.
    """
    options = options_of(subject.spec or Spec(), subject.checkpoint.recipe if subject.checkpoint else None)
    if options is None or inserted(subject.model):
        return subject
    if subject.checkpoint is None and not (subject.spec and subject.spec.model) and subject.origin.original is None:
        subject = replace(
            subject, model=copy.deepcopy(subject.model), origin=replace(subject.origin, original=subject.model)
        )
    plain = as_is(subject)
    with subject.evaluating():
        places = insert(plain.model, options, plain.example()[0], plain.forward)
    _log.debug("smoothing blocks (%s) after %s", options, ", ".join(places))
    return subject


def insert(
    model: nn.Module, options: SmoothingOptions, example: Nested, forward: Forward = call_model
) -> tuple[str, ...]:
    """Insert blocks into a network, in place, and return the names of the modules whose outputs they smooth.

    Raises:
        ValueError: the network has no stages, a stage already ends in such a block, no module returns the end of a
            stage, a named module returns no map, or the network does not accept the maps that result.
    """
    modules, replaceable = dict(model.named_modules()), set()

    def note(name: str, module: nn.Module, args: object, output: object) -> None:
        if _first_tensor(output) is not None:
            replaceable.add(name)

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(note, name)))
        flow = record(model, few(example), forward)
    if options.at:
        places = _named(flow, {name: modules[name] for name in modules if name in replaceable}, options.at)
    else:
        places = _stage_ends(model, flow, replaceable, example, forward)
    for layer in places:
        if options.padding == "grow" and layer.layout == "tokens":
            name = layer.tap.module
            raise ValueError(f"{name} returns tokens, whose number cannot grow; give --smooth-block padding=same")
        _insert(modules, layer.tap.module, InsertedSmoothing(options, layer))
    names = tuple(layer.tap.module for layer in places)
    try:
        record(model, few(example), forward)
    except Exception as error:  # whatever a foreign model raises
        reason = first_line(error)
        hint = (
            "padding=same keeps the size of the maps" if options.padding == "grow" else "name others with --smooth-at"
        )
        raise ValueError(
            f"the network fails with smoothing blocks after {', '.join(names)} ({reason}); {hint}"
        ) from error
    return names


def _stage_ends(model: nn.Module, flow: Flow, replaceable: set[str], example: Nested, forward: Forward) -> list[Layer]:
    """The last layer with a map of every stage, with the module that returns it."""
    layers = [layer for layer in discover(model, example, forward) if layer.spatial]
    ends = list({layer.stage: layer for layer in layers if layer.stage > 0}.values())
    if not ends or not any(layer.reduces for layer in layers):
        raise ValueError(
            f"the model ({type(model).__name__}) has no stages at whose ends its maps could be smoothed: none of its "
            "layers reduces the map; name modules with --smooth-at REGEX"
        )
    for layer in ends:
        if layer.kind == "smoothing":
            raise ValueError(
                f"stage {layer.stage} already ends in a smoothing block ({layer.name}); name other modules "
                "with --smooth-at REGEX"
            )
    return [replace(layer, tap=Tap(_returning(flow, layer, replaceable), "output")) for layer in ends]


def _returning(flow: Flow, layer: Layer, replaceable: set[str]) -> str:
    """The outermost module that returns a layer's tensor before anything else reads it, and is called once."""
    node = node_at(flow, layer.tap)
    times = [call.module for call in flow.calls]
    for call in flow.calls:
        if call.module in replaceable and call.writes[:1] == (node,) and times.count(call.module) == 1 and call.module:
            inside = flow.operations[flow.maker[node] + 1 : call.stop]
            if not any(node in operation.reads for operation in inside):
                return call.module
    raise ValueError(
        f"no module returns the end of stage {layer.stage} ({layer.name}); name modules with --smooth-at REGEX"
    )


def _named(flow: Flow, modules: dict[str, nn.Module], expression: str) -> list[Layer]:
    """The modules that a regular expression finds, as layers."""
    found = matching("smooth_at", expression, filter(None, modules))
    first: dict[str, Call] = {call.module: call for call in reversed(flow.calls) if call.module in found}
    if not first:
        some = nearest(expression, modules, "module")
        raise ValueError(f"--smooth-at {expression} matches no module of a forward pass; {some}")
    layers = []
    for name in found:
        call = first.get(name)
        if call is None or not call.writes:
            continue
        node = call.writes[0]
        layer = layer_at(flow, node, Tap(name, "output"), "other", name, linear=consumer_is_linear(flow, node))
        if not layer.spatial or min(layer.grid) < 2:
            shape = " x ".join(map(str, layer.shape))
            raise ValueError(
                f"--smooth-at {expression} names {name}, which returns {shape}, expected a map of positions"
            )
        layers.append(layer)
    return layers


def _insert(modules: dict[str, nn.Module], name: str, block: InsertedSmoothing) -> None:
    """Put a block behind a module: at its end or after it in a sequence, else into its forward pass."""
    module, (parent, _, own) = modules[name], name.rpartition(".")
    free = NAME if not hasattr(module, NAME) else f"{NAME}_block"
    if _is_sequence(module):
        module.add_module(free, block)
    elif parent and _is_sequence(modules[parent]):
        _insert_after(modules[parent], own, block)
    elif "forward" in vars(module):
        raise ValueError(
            f"the forward of {name} was replaced on the module itself; name another with --smooth-at REGEX"
        )
    else:
        module.add_module(free, block)
        module.__class__ = _with_smoothing(type(module))


def _is_sequence(module: nn.Module) -> bool:
    """Whether a module does nothing but call its children in order."""
    return type(module).forward is nn.Sequential.forward and "forward" not in vars(module)


def _insert_after(sequence: nn.Module, own: str, block: InsertedSmoothing) -> None:
    children = dict(sequence._modules)
    sequence._modules.clear()
    for key, child in children.items():
        sequence._modules[key] = child
        if key == own:
            sequence._modules[f"{own}_{NAME}"] = block


def _with_smoothing(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of modules whose outputs are smoothed; everything else, its name included, is as before."""
    if kind in _classes:
        return _classes[kind]

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block = next(child for child in self.children() if isinstance(child, InsertedSmoothing))
        return _smoothed_first(block, kind.forward(self, *args, **kwargs))

    about = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    _classes[kind] = type(kind.__name__, (kind,), about)
    return _classes[kind]


def _smoothed_first(block: nn.Module, returned: Any) -> Any:
    """What a module returned, its first tensor smoothed."""
    first = _first_tensor(returned)
    if first is None:
        raise ValueError(f"the module returns a {type(returned).__name__}, expected a tensor; name another")
    return block(first) if first is returned else type(returned)([block(first), *returned[1:]])


def _first_tensor(returned: object) -> Tensor | None:
    """The tensor that a module returned, or the first entry of its tuple or list; None if it is something else."""
    if isinstance(returned, tuple | list) and returned and not hasattr(returned, "_fields"):
        returned = returned[0]
    return returned if isinstance(returned, Tensor) else None
