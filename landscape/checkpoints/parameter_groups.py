"""Find which of a model's parameters the entries of an optimiser's state belong to: a state has positions, no names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch

from landscape.checkpoints.key_matching import listed, match_keys
from landscape.checkpoints.optimizer_state import OptimizerState

Shapes = Mapping[str, torch.Size]  # by name, in the order of the model
Groups = list[list[str]]  # names of the parameters of each group
Few = Callable[[str, torch.Size], bool]


def parameters_of_groups(state: OptimizerState, trainable: Shapes, every: Shapes) -> Groups:
    """Names of the parameters in each group of a state, in its order.

    By the names in the state where it has them. Otherwise a group has its parameters in the order of the model, as
    scripts filter them from it; of several groups, parameters belong where their shapes are, and, if two groups have
    entries of one shape, where one of the usual rules puts them: whole blocks one after the other, or biases and norms
    apart from the rest. `every` also has the frozen parameters, which some scripts hand to the optimiser too.

    Raises:
        ValueError: the numbers or the shapes are another model's, or the groups can be told apart in several ways.
    """
    if state.names:
        return _by_name(state, every)
    for shapes in (trainable, every):
        if len(shapes) == len(state.keys):
            return _by_position(state, shapes)
    sizes = " + ".join(str(len(group["params"])) for group in state.groups)
    frozen = len(every) - len(trainable)
    raise ValueError(
        f"the optimiser state in {state.path} ({state.taken}) is of {len(state.keys)} parameters ({sizes}), the model "
        f"has {len(trainable)}{f' and {frozen} frozen ones' if frozen else ''}; give the model that was trained, with "
        "the same parameters frozen, by --model file.py:callable, or start a new optimiser: --no-optimizer-state"
    )


def _by_name(state: OptimizerState, every: Shapes) -> Groups:
    found = match_keys(state.names, every)
    own = {in_state: name for name, in_state in found.names.items()}
    strange = [name for name in state.names if name not in own]
    if strange:
        raise ValueError(
            f"the optimiser state in {state.path} ({state.taken}) names {len(strange)} parameters that the model does "
            f"not have{listed(strange)}; give the model that was trained with --model, or start a new optimiser: "
            "--no-optimizer-state"
        )
    groups = _blocks([own[name] for name in state.names], [len(group["params"]) for group in state.groups])
    _require_shapes(state, groups, every)
    return groups


def _by_position(state: OptimizerState, shapes: Shapes) -> Groups:
    sizes = [len(group["params"]) for group in state.groups]
    if len([size for size in sizes if size]) == 1:
        groups = [list(shapes) if size else [] for size in sizes]
        _require_shapes(state, groups, shapes)
        return groups
    if groups := _by_shape(state, shapes):
        return groups
    found: list[Groups] = []
    for rule in RULES:
        groups = rule(shapes, sizes)
        if [len(group) for group in groups] == sizes and not _misfit(state, groups, shapes) and groups not in found:
            found.append(groups)
    if len(found) == 1:
        return found[0]
    why = "fits them in no usual way" if not found else f"fits them in {len(found)} ways"
    raise ValueError(
        f"the optimiser state in {state.path} ({state.taken}) has {len(sizes)} groups of {', '.join(map(str, sizes))} "
        f"parameters, and the model {why}; give the optimiser named parameters, as torch.optim.AdamW(model."
        "named_parameters()), and save it again, or start a new one: --no-optimizer-state"
    )


def _by_shape(state: OptimizerState, shapes: Shapes) -> Groups:
    """The groups, if all shapes are known and every shape is in one group alone; else none."""
    place: dict[torch.Size, set[int]] = {}
    for i, group in enumerate(state.groups):
        for key in group["params"]:
            shape = state.shape(key)
            if shape is None:
                return []
            place.setdefault(shape, set()).add(i)
    if any(len(groups) > 1 for groups in place.values()) or any(shape not in place for shape in shapes.values()):
        return []
    groups = [[name for name, shape in shapes.items() if i in place[shape]] for i in range(len(state.groups))]
    return [] if _misfit(state, groups, shapes) else groups


def _blocks(names: Iterable[str], sizes: Sequence[int]) -> Groups:
    names, ends = list(names), [0, *accumulate(sizes)]
    return [names[start:end] for start, end in pairwise(ends)]


def _apart(few: Few, first: bool, shapes: Shapes, _: Sequence[int]) -> Groups:
    """The parameters with some property in a group of their own, the first or the second."""
    own = [name for name, shape in shapes.items() if few(name, shape)]
    rest = [name for name in shapes if name not in own]
    return [own, rest] if first else [rest, own]


FEW: Sequence[Few] = (
    lambda name, shape: len(shape) <= 1,  # timm, and most scripts
    lambda name, shape: name.endswith("bias"),
    lambda name, shape: "bias" in name or "norm" in name.lower(),
)
RULES: Sequence[Callable[[Shapes, Sequence[int]], Groups]] = (
    _blocks, *(partial(_apart, few, first) for few in FEW for first in (True, False))
)  # fmt: skip


def _misfit(state: OptimizerState, groups: Iterable[Iterable[str]], shapes: Shapes) -> tuple[str, torch.Size] | None:
    """The first parameter whose entries have another shape, and that shape."""
    names = [name for group in groups for name in group]
    for key, name in zip(state.keys, names, strict=False):
        shape = state.shape(key)
        if shape is not None and shape != shapes[name] and shape.numel() != 0:
            return name, shape
    return None


def _require_shapes(state: OptimizerState, groups: Groups, shapes: Shapes) -> None:
    if wrong := _misfit(state, groups, shapes):
        name, shape = wrong
        raise ValueError(
            f"the optimiser state in {state.path} ({state.taken}) has entries of shape {tuple(shape)} where {name} of "
            f"the model is {tuple(shapes[name])}: it is another model's, or its parameters are in another order; give "
            "the model that was trained with --model, or start a new optimiser: --no-optimizer-state"
        )
