"""`torch.cuda` of the simulated accelerator: its devices, memory, streams and graphs."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest
import torch
from simulated_accelerator import Functions, Operations, Simulation, storage_of, tensors_in
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from landscape.subject import graph_replay

TOTAL_MEMORY = 16 * 2**30


@contextlib.contextmanager
def simulated_cuda(count: int = 2, kind: str = "cuda") -> Iterator[Simulation]:
    """A machine with some simulated CUDA devices, or of another kind."""
    simulation = Simulation(kind, count)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in {**_devices(simulation), **_memory(simulation), **_graphs(simulation)}.items():
            patch.setattr(torch.cuda, name, _called_as(getattr(torch.cuda, name), function))
        patch.setattr(torch, "Generator", type("Generator", (torch._C.Generator,), {"__new__": simulation.generator}))
        patch.setattr(torch, "autocast", _Autocast)
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: False)  # to lay out weights for
        patch.setattr(graph_replay, "_on_host", lambda tensor: simulation.place(tensor) is None)
        patch.setattr(graph_replay, "_failed_captures", [])
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", _grouped(simulation))
        patch.setattr(torch.autograd, "_engine_run_backward", _backward(simulation))
        with Functions(simulation), Operations(simulation):
            yield simulation
            simulation.finish_reading()


def _called_as(real: Any, simulated: Any) -> Any:
    """What is simulated, after the arguments have proven to be those of torch's own function, of this version."""
    if not inspect.isfunction(simulated) or real in (torch.cuda.Event, torch.cuda.Stream):  # which C++ code makes
        return simulated
    signature = inspect.signature(real)

    @wraps(simulated)
    def called(*arguments: Any, **options: Any) -> Any:
        signature.bind(*arguments, **options)
        return simulated(*arguments, **options)

    return called


def _devices(simulation: Simulation) -> dict[str, Any]:
    states = [_Generator(i) for i in range(simulation.count)]

    def set_device(device: Any) -> None:
        simulation.current = simulation.index(device)

    def initialise() -> None:
        simulation.initialised = True

    @contextlib.contextmanager
    def current(device: Any) -> Iterator[None]:
        before, simulation.current = simulation.current, simulation.index(device)
        try:
            yield
        finally:
            simulation.current = before

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: simulation.initialised,
        "_lazy_init": initialise,
        "init": initialise,
        "default_generators": states,
        "device_count": lambda: simulation.count,
        "current_device": lambda: simulation.current,
        "set_device": set_device,
        "synchronize": lambda device=None: simulation.wait("synchronize"),
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device=0: states[simulation.index(device)].get_state(),
        "set_rng_state": lambda state, device=0: states[simulation.index(device)].set_state(state),
        "device": current,
    }


def _memory(simulation: Simulation) -> dict[str, Any]:
    def set_fraction(fraction: float, device: Any = None) -> None:
        simulation.limit = 0 if fraction >= 1 else int(fraction * TOTAL_MEMORY)

    def empty_cache() -> None:
        if simulation.allocator_is_stuck:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def reset_peak(device: Any = None) -> None:
        simulation.peak = simulation.allocated(device)

    def info(device: Any = None) -> tuple[int, int]:
        total = simulation.limit or TOTAL_MEMORY
        return total - simulation.allocated(device), total

    return {
        "empty_cache": empty_cache,
        "memory_allocated": simulation.allocated,
        "max_memory_allocated": lambda device=None: simulation.peak,
        "reset_peak_memory_stats": reset_peak,
        "memory_reserved": simulation.allocated,
        "set_per_process_memory_fraction": set_fraction,
        "mem_get_info": info,
    }


def _graphs(simulation: Simulation) -> dict[str, Any]:
    """Streams that have to wait for each other, and graphs that run recorded operations again at the same addresses.

    As on a GPU, a graph keeps neither its arguments nor its results alive, what lies between them has no address of its
    own, and results hold nothing before the first replay.
    """

    numbers, used = itertools.count(), set[Any]()

    class Graph:
        def __init__(self) -> None:
            self.steps: list[tuple[Any, Any, list[_At]]] = []
            self.made: dict[int, StorageWeakRef] = {}
            self.number = next(numbers)

        def replay(self) -> None:
            pool = simulation.pools[self][0]
            for later in [graph for graph, (handle, _) in simulation.pools.items() if handle is pool]:
                if later.number > self.number:  # whose results may lie between those of this one
                    for weak in later.made.values():
                        _poison(weak)
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                storages: dict[int, torch.UntypedStorage] = {}
                for operation, given, results in self.steps:
                    arguments, options = tree_map_only(_At, lambda at: at.tensor(storages), given)
                    for at, tensor in zip(results, tensors_in(operation(*arguments, **options)), strict=True):
                        if at.key in self.made:
                            storages.setdefault(at.key, tensor.untyped_storage())
                for key, weak in self.made.items():
                    if not weak.expired():
                        _alive(weak).copy_(storages[key])

    @contextlib.contextmanager
    def record(graph: Graph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
        pool = pool or object()
        alive = [handle for handle, _ in simulation.pools.values()]
        if pool in used and pool not in alive:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        used.add(pool)
        simulation.recording = recording = []
        simulation.prune()
        marked = torch.cuda.default_generators[simulation.current].state
        marked.recording = True
        try:
            yield
            if simulation.captures_fail:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        except BaseException:
            simulation.allocator_is_stuck = True
            raise
        finally:
            simulation.recording = None
        marked.recording = False
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            given: set[int] = set()  # storages that operations were given before one of them made it
            for operation, arguments, options, result in recording:
                given |= {_key(t) for t in tensors_in(arguments, options)} - graph.made.keys()
                made = [t for t in tensors_in(result) if _key(t) not in given | graph.made.keys()]
                graph.made |= {_key(t): StorageWeakRef(storage_of(t)) for t in made}
                for tensor in made:
                    if tensor.is_floating_point():  # kernels run at the first replay
                        tensor.fill_(torch.nan)
                step = tree_map_only(Tensor, _At.of, (arguments, options))
                graph.steps.append((operation, step, [_At.of(t) for t in tensors_in(result)]))
            size = sum(_alive(weak).nbytes() for weak in graph.made.values())
            simulation.pools[graph] = pool, size

    return {
        "CUDAGraph": Graph,
        "graph": record,
        "graph_pool_handle": object,
        "Event": lambda: _Stream(simulation),
        "Stream": lambda device=None: _Stream(simulation),
        "current_stream": lambda device=None: _Stream(simulation, present=True),
        "stream": lambda stream: stream,
    }


@dataclass(frozen=True)
class _At:
    """Where a tensor of a recording is: its storage, which it does not keep alive, and its place there."""

    key: int
    weak: StorageWeakRef
    layout: tuple[Any, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _At:
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        return cls(_key(tensor), StorageWeakRef(storage_of(tensor)), layout, tensor.dtype)

    def tensor(self, made: dict[int, torch.UntypedStorage]) -> Tensor:
        storage = made[self.key] if self.key in made else _alive(self.weak)
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)  # type: ignore[call-overload, no-any-return]


def _key(tensor: Tensor) -> int:
    return storage_of(tensor)._cdata


def _poison(weak: StorageWeakRef) -> None:
    """Fill memory that something else may have been written to."""
    if not weak.expired():
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            _alive(weak).fill_(0xFF)  # NaN in every format of floating-point numbers


def _alive(weak: StorageWeakRef) -> torch.UntypedStorage:
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    if storage is None:
        raise RuntimeError("CUDA error: a graph reads memory that was freed")
    return storage


class _Stream:
    """A stream: what runs on another one than the present has to wait for it, and the other way round."""

    def __init__(self, simulation: Simulation, *, present: bool = False) -> None:
        self.simulation, self.present, self.waited = simulation, present, present

    def wait_stream(self, other: _Stream) -> None:
        self.waited = True
        self.simulation.aside = False

    def record(self, stream: _Stream) -> None: ...
    def synchronize(self) -> None:
        self.simulation.wait("synchronize")

    def __enter__(self) -> None:
        assert self.waited, "a stream begins before what it reads is there"

    def __exit__(self, *_: object) -> None:
        self.simulation.aside |= not self.present


class _State:
    """Of a generator: random numbers of a CPU, how many were drawn, and whether a recording has marked it."""

    def __init__(self, numbers: torch._C.Generator, drawn: int = 0) -> None:
        self.numbers, self.drawn, self.recording = numbers, drawn, False


class _Generator:
    """The default generator of a device, whose state others may share; one that is marked refuses draws for good."""

    def __init__(self, seed: int = 0, state: _State | None = None) -> None:
        self.state = state or _State(torch.Generator().manual_seed(seed))

    def __getattr__(self, name: str) -> Any:  # seeds and states
        return getattr(self.state.numbers, name)

    def draw(self) -> None:
        if self.state.recording:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.state.drawn += 4

    def clone_state(self) -> _Generator:
        return _Generator(state=_State(self.state.numbers, self.state.drawn))

    def graphsafe_get_state(self) -> _Generator:
        return _Generator(state=self.state)

    def graphsafe_set_state(self, other: _Generator) -> None:
        self.state = other.state

    def get_offset(self) -> int:
        return self.state.drawn

    def set_offset(self, drawn: int) -> None:
        self.state.drawn = drawn


class _Autocast(torch.amp.autocast_mode.autocast):
    """Autocast of the device becomes that of the CPU, whose kernels run."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _grouped(simulation: Simulation) -> Any:
    """Tensors by device and type, which optimisers ask C++ code for."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        groups = group(lists, with_indices)
        places = ((simulation.place(values[0][0]) or device, dtype) for (device, dtype), (values, _) in groups.items())
        return dict(zip(places, groups.values(), strict=True))

    return grouped


def _backward(simulation: Simulation) -> Any:
    """The backward pass, in which Python code sees devices too; new tensors are where the outputs are."""
    run_backward = torch.autograd.graph._engine_run_backward

    def within(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        place = next((p for t in tensors_in(outputs) if (p := simulation.place(t)) is not None), None)
        with Functions(simulation), simulation.within(place):
            return run_backward(outputs, *args, **kwargs)

    return within
