"""Find the permutations of a network by a recorded forward pass, and prove them on its weights."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from landscape.checkpoints.user_code import fixed_rng
from landscape.symmetry.permutations import Permutations, permutations_of
from landscape.symmetry.recorder import UnitRecorder

TOLERANCE = 1e-5  # relative change of the outputs under a random permutation of every group
_log = logging.getLogger(__name__)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and floating-point buffers by their first name."""
    found = dict(model.named_parameters())
    stored = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point() and name in stored}
    return {**found, **buffers}


def recorded(model: nn.Module, run: Callable[[nn.Module], Any], inputs: Any) -> tuple[Permutations, frozenset[str]]:
    """The permutations of a network in eval mode, from its forward pass `run(model)`; and operations without a rule."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused layer would hide the operations
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.modules.conv._ConvNd)}
    kernels = {f"{name}.weight".removeprefix(".") for name in convolutions}
    try:
        recorder = UnitRecorder(tensors_of(model), inputs, kernels)
        with torch.no_grad(), fixed_rng(0):
            with recorder:
                outputs = run(model)
            recorder.pin(outputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return permutations_of(recorder.units, recorder.axes), frozenset(recorder.unknown)


@dataclass(frozen=True)
class Proof:
    """Permutations under which a network's outputs stay, and what did not pass."""

    permutations: Permutations
    error: float  # largest relative change of the outputs under a random permutation of every group
    refused: tuple[str, ...]  # groups under whose permutations the outputs changed, which stay now


def proven(permutations: Permutations, model: nn.Module, run: Callable[[nn.Module], Any], *, seed: int = 0) -> Proof:
    """Permute every group at random and compare the outputs, in double precision where the model allows it.

    Where they differ by more than `TOLERANCE` of their largest value, the groups are tried one by one, and those that
    fail stay.
    """
    double = copy.deepcopy(model).double()
    try:
        expected = _outputs(double, run)
    except (RuntimeError, TypeError, ValueError):  # a model that casts to single precision itself
        double = copy.deepcopy(model)
        expected = _outputs(double, run)
    own = tensors_of(double)
    originals = {name: tensor.detach().clone() for name, tensor in own.items()}

    def change(moved: np.ndarray, of: Permutations) -> float:
        with torch.no_grad():
            for name, tensor in of.apply(originals, moved).items():
                own[name].copy_(tensor)
        return _difference(_outputs(double, run), expected)

    generator = np.random.default_rng(seed)
    error = change(permutations.random(generator), permutations)
    if error <= TOLERANCE:
        return Proof(permutations, error, ())
    families = range(len(permutations.families))
    failed = [f for f in families if not change(permutations.random(generator, [f]), permutations) <= TOLERANCE]
    names = tuple(permutations.groups[permutations.families[f][0]].name for f in failed)
    kept = permutations.without(failed)
    error = change(kept.random(generator), kept)
    return (
        Proof(kept, error, names) if error <= TOLERANCE else Proof(permutations.without(families), 0.0, ("all groups",))
    )


def _outputs(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[Tensor]:
    with torch.no_grad(), fixed_rng(0):
        return [
            leaf.double() for leaf in tree_leaves(run(model)) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]


def _difference(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference relative to the largest value of each tensor."""
    pairs = zip(outputs, expected, strict=True)
    return max(float((new - old).abs().max() / old.abs().max().clamp_min(1e-30)) for new, old in pairs)


def jittered(model: nn.Module, seed: int = 0) -> Mapping[str, Tensor]:
    """The weights with a little noise, so that initial values that are all equal do not hide a wrong permutation."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor.detach() + 0.1 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
        for name, tensor in tensors_of(model).items()
    }
