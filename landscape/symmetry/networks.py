"""Find the permutations of a network by recording which units move together, and prove them on its weights."""

import copy
import logging
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from landscape.checkpoints.user_code import fixed_rng
from landscape.data.structure import tensors_in
from landscape.discovery.operation_mode import OperationMode
from landscape.symmetry.labels import Calculus, Labels, labels_of_constant
from landscape.symmetry.operations import labels_of_result
from landscape.symmetry.permutations import Permutations, Units, permutations_of

_log = logging.getLogger(__name__)


class UnitRecorder(OperationMode):
    """Gives every position along every axis of the given tensors a unit, and follows these through a forward pass.

    Args:
        tensors: parameters and buffers by name.
        inputs: of the pass, whose elements have an order of their own.
        kernels: names of the weights of convolutions, whose axes from the third on are positions.
    """

    def __init__(self, tensors: Mapping[str, Tensor], inputs: Any, kernels: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units = Units()
        self.unknown: set[str] = set()  # operations without a rule
        self._calculus = Calculus(self.units)
        self._labels: Any = WeakTensorKeyDictionary()
        self._views: dict[int, list[weakref.ref[Tensor]]] = {}  # tensors with labels, by storage
        # Units along each axis of a tensor; of a grouped convolution's second axis by row, (rows, columns)
        self.axes: dict[str, dict[int, np.ndarray]] = {}
        self._names: Any = WeakTensorKeyDictionary()
        self._used: set[str] = set()
        for tensor in tensors_in(inputs):
            self._labels[tensor] = Labels.in_order(tensor.shape)
        for name, tensor in tensors.items():
            self._names[tensor] = name
            shape = tensor.shape[:2] if name in kernels else tensor.shape
            self.axes[name] = {axis: self.units.fresh(n) for axis, n in enumerate(shape) if n > 1}
            self._note(tensor, self._own(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        before = self._find(args[0]) if args and isinstance(args[0], Tensor) and func._schema.is_mutable else None
        result = func(*args, **options)
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        if not any(self._find(t).arrays for t in read) and not written:
            return result
        with torch.utils._python_dispatch._disable_current_modes():
            self._convolves_groups(func, args)
            found = self._result(func, args, options, result, read, written)
            for tensor, labels in zip(written, found, strict=False):
                if tuple(tensor.shape) != labels.shape:
                    self._calculus.pin(labels)
                    labels = Labels.in_order(tensor.shape)
                if before is not None and tensor is args[0]:
                    self._wrote(tensor, before, labels)
                self._note(tensor, labels)
        return result

    def pin(self, values: Any) -> None:
        """Let the units of tensors stay, such as those of a network's outputs."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._calculus.pin(self._find(leaf))

    def _result(
        self,
        func: Any,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        result: Any,
        read: list[Tensor],
        written: list[Tensor],
    ) -> list[Labels]:
        labelled = any(self._find(t).arrays for t in read)
        try:
            found = labels_of_result(self._calculus, self._find, func, args, options, result)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
            _log.debug("%s: %s", func, error, exc_info=True)
            found = None
        if found is None and labelled:
            self.unknown.add(str(func.overloadpacket).rpartition(".")[2])
            self._calculus.pin(*map(self._find, read))
        known = [] if found is None else list(found) if isinstance(found, list | tuple) else [found]
        return [*known, *(Labels.in_order(t.shape) for t in written[len(known) :])]

    def _find(self, tensor: Any) -> Labels:
        if not isinstance(tensor, Tensor):
            return Labels.in_order(())
        known: Labels | None = self._labels.get(tensor)
        if known is None:  # of a constant
            with torch.utils._python_dispatch._disable_current_modes():
                known = self._labels[tensor] = labels_of_constant(tensor)
        return known

    def _note(self, tensor: Tensor, labels: Labels) -> None:
        self._labels[tensor] = labels
        alive = self._views.setdefault(int(tensor.untyped_storage()._cdata), [])
        alive[:] = [other for other in alive if other() is not None and other() is not tensor]
        alive.append(weakref.ref(tensor))

    def _wrote(self, tensor: Tensor, before: Labels, now: Labels) -> None:
        """Where a tensor that shares memory was written to, let units stay that the others know nothing of."""
        others = [one() for one in self._views.get(int(tensor.untyped_storage()._cdata), [])]
        if any(other is not None and other is not tensor for other in others):
            covered = [axis for axis in range(len(before.shape)) if before.covers(axis)]
            self._calculus.pin_along(now, [axis for axis in range(len(now.shape)) if axis not in covered])
            for other in others:
                if other is not None and other is not tensor and not before.arrays and not self._find(other).arrays:
                    self._labels[other] = Labels.in_order(other.shape)

    def _own(self, tensor: Tensor) -> Labels:
        """Of a parameter: a unit along each axis."""
        dims, arrays = tensor.dim(), []
        for axis, units in self.axes[self._names[tensor]].items():
            if units.ndim == 1:
                arrays.append(units.reshape([-1 if i == axis else 1 for i in range(dims)]))
            else:
                arrays.append(units.reshape([*units.shape, *[1] * (dims - 2)]))
        ordered = tuple(n > 1 and axis not in self.axes[self._names[tensor]] for axis, n in enumerate(tensor.shape))
        return Labels(tuple(tensor.shape), tuple(arrays), ordered)

    def _convolves_groups(self, func: Any, args: tuple[Any, ...]) -> None:
        """Give the inputs of every group of a convolution units of their own, if its weight was not used before."""
        for value in args:
            name = self._names.get(value) if isinstance(value, Tensor) else None
            if name is None:
                continue
            convolution = (
                "convolution" in str(func) and len(args) > 8 and value is args[1] and not args[6] and args[8] > 1
            )
            if convolution and name not in self._used and value.shape[1] > 1:
                groups, rows = args[8], value.shape[0]
                units = self.units.fresh(groups * value.shape[1]).reshape(groups, -1)
                self.axes[name][1] = np.repeat(units, rows // groups, axis=0)
                self._labels[value] = self._own(value)
            self._used.add(name)


TOLERANCE = 1e-5  # relative change of the outputs under a random permutation of every group


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
