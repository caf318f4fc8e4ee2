"""Call a compiled graph without holding Python's lock, so that several mini-batches run at once, each in a thread.

torch's own runner holds the lock from start to end. A compiled graph is a shared library with a stable C interface
(torch/csrc/inductor/aoti_runtime/interface.h), which `ctypes` calls with the lock released.
"""

from __future__ import annotations

import _ctypes
import ctypes
import json
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_aoti: Any = torch._C._aoti
_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


def callable_graph(file: Path, at_once: int) -> Callable[..., list[Tensor]]:
    """A compiled graph for a CPU, callable from `at_once` threads at the same time; further ones wait.

    A graph that calls operators that are no part of torch, which `file`.json lists, needs torch's own runner.

    Raises:
        RuntimeError: the library cannot be loaded.
    """
    calls = json.loads(file.with_suffix(".json").read_text())
    if calls.get("nodes"):
        runner = _aoti.AOTIModelContainerRunnerCpu(str(file), at_once)
        return lambda *tensors: runner.run(list(tensors))
    return _Library(file, at_once)


class _Library:
    """A shared library with one compiled graph."""

    def __init__(self, file: Path, at_once: int) -> None:
        try:
            library = ctypes.CDLL(str(file))
            create = library.AOTInductorModelContainerCreateWithDevice
            delete = library.AOTInductorModelContainerDelete
            outputs = library.AOTInductorModelContainerGetNumOutputs
            self._run = library.AOTInductorModelContainerRun
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"compiled graph {file} cannot be loaded: {error}") from error
        create.argtypes = (POINTER(c_void_p), c_size_t, c_char_p, c_char_p)
        outputs.argtypes = (c_void_p, POINTER(c_size_t))
        delete.argtypes = (c_void_p,)
        handles = POINTER(c_void_p)
        self._run.argtypes = (c_void_p, handles, c_size_t, handles, c_size_t, c_void_p, c_void_p)
        for function in (create, delete, outputs, self._run):
            function.restype = c_int32
        self._container, count = c_void_p(), c_size_t()
        _check(create(byref(self._container), at_once, b"cpu", None))
        weakref.finalize(self, _free, delete, self._container, library._handle).atexit = False
        _check(outputs(self._container, byref(count)))
        self._outputs = count.value

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        given = _handles(tensors)
        found = (c_void_p * self._outputs)()
        _check(self._run(self._container, given, len(given), found, self._outputs, None, None))
        results: list[Tensor] = _aoti.alloc_tensors_by_stealing_from_void_ptrs(
            [_capsule(handle, None, None) for handle in found]
        )
        return results


def _free(delete: Any, container: c_void_p, library: int) -> None:
    """Unload the library as well: another file of the same name would else be taken for it."""
    delete(container)
    _ctypes.dlclose(library)


def _handles(tensors: Sequence[Tensor]) -> ctypes.Array[c_void_p]:
    """New references to tensors, which the call takes over."""
    capsules = _aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    return (c_void_p * len(tensors))(*[_pointer(capsule, None) for capsule in capsules])


def _check(code: int) -> None:
    if code:
        raise RuntimeError("a compiled graph failed, see the message above; --hvp traced does without")
