"""The global random generators: noticed when foreign code draws from them, and fixed while it runs.

Numpy's is the legacy one, which is what foreign code draws from.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch


def states() -> list[Any]:
    """States of the generators that foreign code draws from: torch's (of every device in use), numpy's, Python's."""
    accelerators = [torch.cuda.get_rng_state(i) for i in _accelerators()]
    return [*(s.numpy().tobytes() for s in (torch.get_rng_state(), *accelerators)), _legacy(), random.getstate()]


@contextmanager
def fixed(seed: int) -> Iterator[None]:
    """Seed all of them, and put them back afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=_accelerators()):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpys)  # noqa: NPY002
            random.setstate(pythons)


def _legacy() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return kind, np.asarray(keys).tobytes(), *rest


def _accelerators() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def guarded(what: str, function: Callable[[], Any]) -> Any:
    """Call foreign code; whatever it raises becomes one line, with the cause kept for `--debug`."""
    try:
        return function()
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses the command line
        first = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(f"{what} failed with {type(error).__name__}: {first}") from error


def named(spec: str) -> Callable[..., Any]:
    """The callable that a spec names; the spec is split at its last colon.

    A file is loaded by its path under a private module name, once for the same bytes; while it is imported
    its folder is on `sys.path` (for a module: the working directory), so that it may import its neighbours.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the spec has another form, importing fails, or there is no callable of that name.
    """
    place, attribute = _split(spec)
    if not place.endswith(".py"):
        with on_path(Path.cwd()):
            module = guarded(spec, lambda: importlib.import_module(place))
    else:
        path = _file(spec, place)
        with on_path(path.parent):
            module = guarded(spec, lambda: _from_file(path))
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(attribute, names, 3) or names[:3]
        hint = f"; it has {', '.join(near)}" if near else ""
        raise ValueError(f"{spec}: {place} has no callable {attribute!r}{hint}")
    return found  # type: ignore[no-any-return]


def spec_sha256(spec: str) -> str | None:
    """SHA-256 of the file that a spec names, None where it names no file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    place = spec.rpartition(":")[0]
    return hashlib.sha256(_file(spec, place).read_bytes()).hexdigest() if place.endswith(".py") else None


def _split(spec: str) -> tuple[str, str]:
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ValueError(f"{spec!r} names no callable; expected path/file.py:callable or package.module:callable")
    return place, attribute


def _file(spec: str, place: str) -> Path:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{spec}: there is no file {place}; expected path/file.py:callable")
    return path


def _from_file(path: Path) -> ModuleType:
    code = path.read_bytes()
    identity = hashlib.sha256(f"{path}\n".encode() + code).hexdigest()[:16]
    name = f"_landscape_{path.stem}_{identity}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    try:
        # These bytes, not the loader's: it takes cached bytecode of the same size and second for the file.
        exec(compile(code, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def on_path(place: Path) -> Iterator[None]:
    """A folder in front of the places where modules are looked for."""
    sys.path.insert(0, str(place))
    try:
        yield
    finally:
        with suppress(ValueError):  # the imported code may have changed the path itself
            sys.path.remove(str(place))
