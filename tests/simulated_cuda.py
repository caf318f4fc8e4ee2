"""`torch.cuda` of the simulated accelerator: its devices, memory, streams and graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulated_accelerator import Functions, Operations, Recording, Simulation, storage_of, tensors_in
from torch.utils._python_dispatch import _disable_current_modes

TOTAL_MEMORY = 16 * 2**30


@contextlib.contextmanager
def simulated_cuda(count: int = 2) -> Iterator[Simulation]:
    """A machine with some simulated CUDA devices."""
    simulation = Simulation("cuda", count)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in {**_devices(simulation), **_memory(simulation), **_graphs(simulation)}.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch, "Generator", type("Generator", (torch._C.Generator,), {"__new__": simulation.generator}))
        patch.setattr(torch, "autocast", _Autocast)
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", _grouped(simulation))
        patch.setattr(torch.autograd, "_engine_run_backward", _backward(simulation))
        with Functions(simulation), Operations(simulation):
            yield simulation


def _devices(simulation: Simulation) -> dict[str, Any]:
    states = [torch.Generator().manual_seed(i) for i in range(simulation.count)]

    def set_device(device: Any) -> None:
        simulation.current = simulation.index(device)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
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
        "device": lambda device: contextlib.nullcontext(),
    }


def _memory(simulation: Simulation) -> dict[str, Any]:
    def set_fraction(fraction: float, device: Any = None) -> None:
        simulation.limit = 0 if fraction >= 1 else int(fraction * TOTAL_MEMORY)

    def reset_peak(device: Any = None) -> None:
        simulation.peak = simulation.allocated(device)

    def info(device: Any = None) -> tuple[int, int]:
        total = simulation.limit or TOTAL_MEMORY
        return total - simulation.allocated(device), total

    return {
        "empty_cache": lambda: None,
        "memory_allocated": simulation.allocated,
        "max_memory_allocated": lambda device=None: simulation.peak,
        "reset_peak_memory_stats": reset_peak,
        "memory_reserved": simulation.allocated,
        "set_per_process_memory_fraction": set_fraction,
        "mem_get_info": info,
    }


def _graphs(simulation: Simulation) -> dict[str, Any]:
    """Streams that do nothing, and graphs that run the recorded operations again at the same addresses."""

    class Graph:
        recorded: Recording

        def replay(self) -> None:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                for operation, arguments, options, result in self.recorded:
                    if _is_view(operation):
                        continue
                    again = operation(*arguments, **options)
                    given = {storage_of(t)._cdata for t in tensors_in(arguments, options)}
                    for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
                        if storage_of(old)._cdata not in given:
                            old.copy_(new)

    @contextlib.contextmanager
    def record(graph: Graph, **_: Any) -> Iterator[None]:
        simulation.recording = graph.recorded = []
        try:
            yield
        finally:
            simulation.recording = None
        for operation, arguments, options, result in graph.recorded:  # kernels run at the first replay
            given = {storage_of(t)._cdata for t in tensors_in(arguments, options)}
            for tensor in tensors_in(result):
                if not _is_view(operation) and storage_of(tensor)._cdata not in given and tensor.is_floating_point():
                    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                        tensor.fill_(torch.nan)

    def debug(mode: Any) -> None:
        simulation.waits_are_errors = mode in ("error", 2)

    return {
        "CUDAGraph": Graph,
        "graph": record,
        "Stream": lambda device=None: _Stream(),
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "get_sync_debug_mode": lambda: 2 if simulation.waits_are_errors else 0,
        "set_sync_debug_mode": debug,
    }


class _Stream:
    def wait_stream(self, other: _Stream) -> None: ...
    def synchronize(self) -> None: ...


def _is_view(operation: Any) -> bool:
    return bool(operation.is_view)


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
