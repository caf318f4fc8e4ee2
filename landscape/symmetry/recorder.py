"""Record in one forward pass which units of a network move together."""

import logging
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from landscape.data.structure import tensors_in
from landscape.symmetry.labels import Calculus, Labels, labels_of_constant
from landscape.symmetry.operations import labels_of_result
from landscape.symmetry.units import Units

_log = logging.getLogger(__name__)


class UnitRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every position along every axis of the given tensors a unit, and follows these through a forward pass.

    Args:
        tensors: parameters and buffers by name.
        inputs: of the pass, whose elements have an order of their own.
        kernels: names of the weights of convolutions, whose axes from the third on are positions.
    """

    supports_higher_order_operators = True

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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no, else torch imports its compiler, which takes seconds, to keep it from what is never compiled."""
        return False

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
        if found is None:
            return [Labels.in_order(t.shape) for t in written]
        return list(found) if isinstance(found, list | tuple) else [found]

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
