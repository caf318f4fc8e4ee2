"""A simulated accelerator: tensors in host memory that behave as if they were on a device.

Two modes see every call. The storage of a tensor "on the device" is registered; its `device` reads `cuda:0`,
results of its operations are registered too, and an operation that mixes it with a host tensor raises the error of a
GPU. Whatever would make a host wait for a GPU is counted by the line of `landscape` that asked for it. The kernels are
those of the CPU, so that the numbers have to be equal bit for bit; but products are rounded as TF32 wherever the
settings allow it, and recurrent layers have the derivatives that cuDNN has. Copies to the host that do not wait hold
NaN until something waits, and page-locked memory must not change while the device reads it. With the kind "mps" there
is no double precision.

It does not see: other kernels that only a GPU has and their rounding, asynchronous errors, worker threads, compiled
code, and devices that C++ code reads (TorchScript).
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

import landscape
from landscape.discovery.operation_mode import OperationMode

PACKAGES = tuple(str(folder) for folder in {Path(landscape.__file__).parent, Path(__file__).parents[1] / "landscape"})
Place = torch.device | None  # None: the host
Recording = list[tuple[Any, Any, Any, Any]]  # operation, arguments, options, result
_KEEP = object()  # no place is forced

# Operations that make the host wait for the device. Others wait where an index is a mask.
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "is_nonzero", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave", "_linalg_check_errors", "_to_host",
}  # fmt: skip
_MOVING = {"copy_", "_foreach_copy_", "_to_copy", "set_", "_has_compatible_shallow_copy_type"}
_PRODUCTS = {"mm": "matmul", "bmm": "matmul", "addmm": "matmul", "baddbmm": "matmul", "addmv": "matmul"}
_PRODUCTS |= {"convolution": "conv", "convolution_backward": "conv"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_JOINING = {"cat", "stack"}


class Functions(TorchFunctionMode):
    """Calls from Python: devices named and read, and copies to the host."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.simulation.called(func, args, dict(kwargs or {}))


class Operations(OperationMode):
    """Operations below autograd and functorch."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _about(func)[1]:
            with self:  # of tensors made in inference mode; of others autograd has split composite operations already
                return func.decompose(*args, **(kwargs or {}))
        return self.simulation.operated(func, args, dict(kwargs or {}))


class Simulation:
    """What is on the device, and what it was asked for.

    `waits` counts host synchronisations by (line of `landscape`, operation), `draws` random operations on the device's
    own global generator, `doubles` entries written in double precision by line, and `operations` all that ran there
    but views. `uploads` and `host_draws` hold the bytes of every copy to a device and of every random tensor of the
    host, with its line.
    """

    def __init__(self, kind: str = "cuda", count: int = 2) -> None:
        self.kind, self.count, self.current, self.limit = kind, count, 0, 0
        self.waits: Counter[tuple[str, str]] = Counter()
        self.draws: Counter[tuple[str, str]] = Counter()
        self.doubles: Counter[str] = Counter()
        self.operations = 0
        self.uploads: list[tuple[str, int]] = []
        self.host_draws: list[tuple[str, int]] = []
        self.initialised = False  # by the first tensor on a device
        self.pools: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()  # of graphs: handle and bytes
        self.aside = False  # a side stream has run, and nothing waits for it yet
        self.captures_fail = self.allocator_is_stuck = False  # the second follows from a capture that failed
        self._pending: list[tuple[Tensor, Tensor]] = []  # copies to the host under way, with what they will hold
        self._read: list[tuple[Tensor, Tensor]] = []  # page-locked tensors that are being copied, with what they held
        self._locked: dict[int, StorageWeakRef] = {}  # page-locked storages
        self._stored: dict[int, tuple[StorageWeakRef, torch.device, int]] = {}
        self._prune_at, self._bytes, self.peak = 10_000, 0, 0
        self._generators: dict[int, tuple[torch.device, torch._C.Generator]] = {}  # kept, so that no address is reused
        self._ambient: Place = None  # of the arguments of the function called from Python
        self.recording: Recording | None = None  # of a CUDA graph
        self._forced: Any = _KEEP
        self._recorded: Place = None  # of the last operation of a recorded graph

    def place(self, tensor: Tensor) -> Place:
        """The device of a tensor; None for one of the host."""
        found = self._stored.get(storage_of(tensor)._cdata)
        return None if found is None else found[1]

    def put(self, tensor: Tensor, place: Place) -> Tensor:
        """Register the storage of a new tensor."""
        if place is None or (storage := storage_of(tensor))._cdata in self._stored:
            return tensor
        self.initialised = True
        self._stored[storage._cdata] = (StorageWeakRef(storage), place, storage.nbytes())
        self._bytes += storage.nbytes()  # at least what is alive
        if len(self._stored) > self._prune_at or self._bytes > max(self.peak, self.limit):
            self.prune()
            self.peak = max(self.peak, self._bytes)
            if self.limit and self._bytes > self.limit:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes.")
        return tensor

    def allocated(self, device: Any = None) -> int:
        """Bytes of the tensors that are alive on a device."""
        self.prune()
        return sum(size for _, place, size in self._stored.values() if place.index == self.index(device))

    def index(self, device: Any) -> int:
        """The index of a device, the current one by default."""
        given = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.current if given is None else given

    def _pooled(self) -> int:
        """Bytes of the pools of recorded graphs; those that share one use the same memory, one after the other."""
        most: dict[Any, int] = {}
        for handle, size in self.pools.values():
            most[handle] = max(most.get(handle, 0), size)
        return sum(most.values())

    def prune(self) -> None:
        self._stored = {key: entry for key, entry in self._stored.items() if not entry[0].expired()}
        self._bytes = sum(size for _, _, size in self._stored.values()) + self._pooled()
        self._prune_at = 2 * len(self._stored) + 10_000

    def _of(self, device: Any) -> Place:
        place = _place_of(device)
        if place is None or place.type != self.kind:
            return place if place is None or place.type != "cpu" else None
        index = self.current if place.index is None else place.index
        if index >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        return torch.device(self.kind, index)

    def generator(self, _: type, device: Any = "cpu") -> torch._C.Generator:
        """Makes a `torch.Generator`, and remembers the device that it was asked for."""
        made = torch._C.Generator("cpu")
        if (place := self._of(device)) is not None:
            self._generators[made._cdata] = (place, made)
        return made

    def wait(self, operation: str) -> None:
        """The host waits for the device."""
        if self.recording is not None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {operation}")
        self.waits[_line(), operation] += 1
        with _disable_current_modes():
            for copy, value in self._pending:
                copy.copy_(value)
        self._pending.clear()
        self.finish_reading()

    def finish_reading(self) -> None:
        """Copies from page-locked memory are over: what they read has to be what it was when they were begun."""
        read, self._read = self._read, []
        with _disable_current_modes():
            assert all(map(torch.equal, *zip(*read, strict=True))) if read else True, (
                "a page-locked tensor was written to while the device read it"
            )

    def page_locked(self, tensor: Tensor) -> Tensor:
        """A copy in memory that the device reads while the host goes on."""
        copy = self.unwatched(Tensor.clone, (tensor,), {})
        storage = storage_of(copy)
        self._locked[storage._cdata] = StorageWeakRef(storage)
        return copy

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        return self._plainly(func, args, kwargs)

    def _plainly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forced = self._forced
        if isinstance(func, torch._ops.OpOverload):  # of a recorded graph: C++ code has read the tensors' real device
            kwargs.pop("device", None)
            place = next((p for t in tensors_in(args, kwargs) if (p := self.place(t)) is not None), None)
            self._recorded = place or self._recorded
            with self.within(self._recorded, forced):
                return func(*args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type in (self.kind, "cpu"):
            forced, kwargs["device"] = self._of(kwargs["device"]), torch.device("cpu")
        ambient = self._ambient
        if func is not torch.tensor:
            ambient = next((p for t in tensors_in(args, kwargs) if (p := self.place(t)) is not None), ambient)
        before = self._ambient, self._forced
        self._ambient, self._forced = ambient, forced  # as `within`, which takes longer
        try:
            result = func(*args, **kwargs)
        finally:
            self._ambient, self._forced = before
        # `torch.tensor` copies its data unseen by the other mode.
        return self.put(result, forced) if func is torch.tensor and forced is not _KEEP else result

    @contextlib.contextmanager
    def within(self, ambient: Place, forced: Any = _KEEP) -> Iterator[None]:
        before = self._ambient, self._forced
        self._ambient, self._forced = ambient, forced
        try:
            yield
        finally:
            self._ambient, self._forced = before

    def to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """`Tensor.to` with its many forms."""
        tensor, rest = args[0], list(args[1:])
        target: Any = _KEEP
        for i, value in enumerate(rest):
            if isinstance(value, Tensor):
                target, rest[i] = self.place(value), value.dtype
            elif isinstance(value, str | torch.device | int) and not isinstance(value, bool):
                target = self._of(value)
                rest[i] = None
        if isinstance(other := kwargs.pop("other", None), Tensor):
            target, kwargs["dtype"] = self.place(other), other.dtype
        if (device := kwargs.pop("device", None)) is not None:
            target = self._of(device)
        here = self.place(tensor)
        if rest and rest[0] is None:
            rest = rest[1:]
            names = ("dtype", "non_blocking", "copy")
            kwargs.update({name: value for name, value in zip(names, rest, strict=False) if value is not None})
            rest = []
        if target is _KEEP or target == here:
            with self.within(here):
                return func(tensor, *rest, **kwargs) if rest or kwargs else tensor
        self._moved(here, target, tensor, waits=not kwargs.get("non_blocking"))
        kwargs["copy"] = True
        if not rest and "dtype" not in kwargs:
            rest = [tensor.dtype]
        with self.within(target, target):
            moved: Tensor = func(tensor, *rest, **kwargs)
        if kwargs.get("non_blocking") and target is None:
            self._under_way(moved)
        return moved

    def _under_way(self, copy: Tensor) -> None:
        """A copy to the host that does not wait holds NaN until something does."""
        with _disable_current_modes():
            self._pending.append((copy.detach(), copy.detach().clone()))
            copy.detach().fill_(torch.nan if copy.is_floating_point() else -1)

    def as_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """`as_tensor` and `asarray`: copies only where it has to."""
        device = kwargs.pop("device", None)
        made = args[0] if isinstance(args[0], Tensor) else torch.as_tensor(args[0])
        return self.to(Tensor.to, (made,), {**kwargs, **({} if device is None else {"device": device})})

    def unwatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that would not wait on a real device."""
        waits = self.waits.copy()
        try:
            return self._plainly(func, args, kwargs)
        finally:
            self.waits = waits

    def _moved(self, source: Place, target: Place, tensor: Tensor, *, waits: bool = True) -> None:
        if source is not None and target is None and waits:
            self.wait("to the host")
        if source is None and target is not None:
            self.uploads.append((_line(), tensor.nbytes))
            locked = self._locked.get(storage_of(tensor)._cdata)
            if not waits and locked is not None and not locked.expired():
                with _disable_current_modes():
                    self._read.append((tensor.detach(), tensor.detach().clone()))

    def recurrent(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Recurrent layers: those of cuDNN have no second derivative, and in evaluation mode no first."""
        result = self._plainly(func, args, kwargs)
        if self.place(args[0]) is None or not torch.backends.cudnn.enabled or not torch.is_grad_enabled():
            return result
        packed = isinstance(args[3], list | tuple)
        return _CudnnRecurrence.apply(args[6 + packed], *result)  # type: ignore[no-untyped-call]

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`tolist`: copies to the host and reads there."""
        return func(self.to(Tensor.to, (args[0], "cpu"), {}), **kwargs)

    def refuse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`numpy` and what uses it."""
        if (place := self.place(args[0])) is not None:
            raise TypeError(f"can't convert {place} device type tensor to numpy. Use Tensor.cpu() first.")
        return func(*args, **kwargs)

    def operated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, _, random = _about(func)
        tensors = tensors_in(args, kwargs)
        places = [self.place(t) for t in tensors]
        on = next((p for p in places if p is not None), None)
        if on is not None:
            self._check(name, args, tensors, places, on)
        target: Place = self._target(name, kwargs, tensors, on)
        self._check_generator(name, [*args, *kwargs.values()], target, random=random)
        if on is not None and name in _PRODUCTS and _rounds(_PRODUCTS[name]):
            args = tuple(_as_tf32(a) if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args)
        result = func(*args, **kwargs)
        if target is not None:
            self._counted(func, result)
        if random and target is None:
            self.host_draws.append((_line(), sum(t.nbytes for t in tensors_in(result))))
        if name == "copy_" and any(args[2:]) and places[0] is None and on is not None:
            self._under_way(result)
        if name in _WAITING and on is not None:
            self.wait(name)
        if self.recording is not None and target is not None:
            self.recording.append((func, args, kwargs, result))
        for tensor in tensors_in(result):
            self.put(tensor, target) if not any(tensor is given for given in tensors) else None
        return result

    def _counted(self, func: Any, result: Any) -> None:
        self.operations += not func.is_view
        assert not self.aside, "a side stream may not have finished"
        if written := sum(t.numel() for t in tensors_in(result) if t.dtype == torch.float64):
            if self.kind == "mps":
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it.")
            self.doubles[_line()] += written

    def _target(self, name: str, kwargs: dict[str, Any], tensors: list[Tensor], on: Place) -> Place:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == self.kind:
            kwargs["device"] = torch.device("cpu")
            return self._of(device)
        if self._forced is not _KEEP and (not tensors or name in ("_to_copy", "clone") or device is not None):
            return self._forced  # type: ignore[no-any-return]
        return on if tensors else self._ambient

    def _check(self, name: str, args: Any, tensors: list[Tensor], places: list[Place], on: torch.device) -> None:
        if name in _INDEXING:
            masks = [t for t in tensors_in(args[1]) if t.dtype in (torch.bool, torch.uint8)]
            if any(self.place(t) is not None or t.dim() for t in masks):
                self.wait("mask")
            indexed = [self.place(t) for t in (args[0], *tensors_in(args[2:])) if t.dim()]
            mixed = len(set(indexed)) > 1 or (self.place(args[0]) is None and bool(set(places) - {None}))
        elif name in _MOVING:
            if args and isinstance(args[0], Tensor) and name == "copy_":
                self._moved(places[1], places[0], tensors[1], waits=not any(args[2:]))
            mixed = False
        else:
            scalars = name not in _JOINING and not (name.endswith("_") and places[0] is None)
            mixed = (
                len({p for t, p in zip(tensors, places, strict=True) if t.dim() or p is not None or not scalars}) > 1
            )
        if mixed:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got {[str(p or 'cpu') for p in places]}"
            )

    def _check_generator(self, name: str, values: list[Any], target: Place, *, random: bool) -> None:
        given = [value for value in values if isinstance(value, torch._C.Generator)]
        for generator in given:
            place = self._generators.get(generator._cdata, (None, None))[0]
            if (place and place.type) != (target and target.type):
                raise RuntimeError(f"Expected a {target or 'cpu'} device type for generator but found {place or 'cpu'}")
        if random and not given and target is not None:
            self.draws[_line(), name] += 1


class _CudnnRecurrence(torch.autograd.Function):
    """Passes outputs of a recurrent layer on, and refuses the derivatives that cuDNN does not have."""

    @staticmethod
    def forward(ctx: Any, training: bool, *outputs: Tensor) -> Any:
        ctx.training = training
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        if not ctx.training:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        return None, *slopes


def _rounds(product: str) -> bool:
    """Whether the settings let the device compute float32 products with 10 bits."""
    backend = torch.backends.cuda.matmul if product == "matmul" else getattr(torch.backends.cudnn, product, None)
    if (precision := getattr(backend, "fp32_precision", "none")) != "none":
        return bool(precision == "tf32")
    return torch.backends.cudnn.allow_tf32 if product == "conv" else torch.get_float32_matmul_precision() != "highest"


def _as_tf32(tensor: Tensor) -> Tensor:
    """Rounded to the 10 bits of mantissa that TF32 keeps."""
    with _disable_current_modes():
        return ((tensor.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


@cache
def _about(operation: Any) -> tuple[str, bool, bool]:
    """Its name, whether it is composed of others, and whether it draws."""
    name = operation.overloadpacket.__name__
    random = torch.Tag.nondeterministic_seeded in operation.tags or name.startswith("rand")
    return name, operation._can_decompose(), random and "dot_product" not in name  # without dropout


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def tensors_in(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value) if value else ()
        elif isinstance(value, dict):
            found += tensors_in(*value.values()) if value else ()
    return found


def _place_of(device: Any) -> Place:
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return None if place.type == "cpu" else place


def _line() -> str:
    """The innermost line of `landscape` on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES):
            return f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside"


_ASKED = ("shape", "dtype", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "itemsize", "nbytes")
_SPECIAL: dict[Any, Callable[[Simulation, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    # What makes no tensor, and is called most.
    **dict.fromkeys(
        [
            *(getattr(Tensor, name).__get__ for name in _ASKED), Tensor.dim, Tensor.numel, Tensor.size, Tensor.stride,
            Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.is_inference, Tensor.data_ptr,
        ],
        lambda s, f, a, k: f(*a, **k),
    ),
    Tensor.device.__get__: lambda s, f, a, k: s.place(a[0]) or f(*a),  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda s, f, a, k: s.place(a[0]) is not None,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda s, f, a, k: s.place(a[0]) is None,  # type: ignore[attr-defined]
    Tensor.get_device: lambda s, f, a, k: getattr(s.place(a[0]), "index", -1),
    Tensor.to: Simulation.to,
    Tensor.cpu: lambda s, f, a, k: s.to(Tensor.to, (a[0], "cpu"), k),
    Tensor.cuda: lambda s, f, a, k: s.to(Tensor.to, (a[0], torch.device("cuda", *a[1:])), k),
    torch.nn.functional.one_hot: lambda s, f, a, k: s.unwatched(f, a, k),  # reads the targets on a CPU only
    torch.as_tensor: lambda s, f, a, k: s.as_tensor(a, k),
    torch.asarray: lambda s, f, a, k: s.as_tensor(a, k),
    **dict.fromkeys(
        map(torch._C._VariableFunctions.__getattribute__, ("lstm", "gru", "rnn_tanh", "rnn_relu")), Simulation.recurrent
    ),
    Tensor.pin_memory: lambda s, f, a, k: s.page_locked(a[0]),
    Tensor.tolist: Simulation.read,
    Tensor.numpy: Simulation.refuse,
    Tensor.__array__: Simulation.refuse,
    Tensor.__deepcopy__: lambda s, f, a, k: s.put(s.unwatched(f, a, k), s.place(a[0])),
}  # fmt: skip
