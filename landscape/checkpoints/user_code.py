"""Import and call code that the user names as `file.py:callable` or `module:callable`, with its randomness controlled.

Foreign code draws from the global random generators of torch, numpy (the legacy one) and Python. Their states
show whether it draws, and can be seeded while it runs.
"""

import ast
import builtins
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from landscape.options import first_line

HOST = torch.device("cpu")
_ran: dict[Path, str] = {}  # SHA-256 of files that were imported: they may be replaced afterwards


def import_callable(spec: str) -> Callable[..., Any]:
    """The callable that `path/file.py:callable` or `package.module:callable` names.

    A file is imported by its path under a private module name, once for the same bytes. During the import its folder
    (for a module: the working directory) is on `sys.path`, so that it can import its neighbours; a file can do so in
    its functions too, when they run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the spec has another form, the import fails, or there is no callable of that name.
    """
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute.isidentifier():
        raise ValueError(f"{spec!r} names no callable; expected path/file.py:callable or package.module:callable")
    if not place.endswith(".py"):
        with on_path(Path.cwd()):
            module = guarded(spec, lambda: importlib.import_module(place))
    else:
        path = _file(spec, place)
        with on_path(path.parent):
            module = guarded(spec, lambda: _import_file(path))
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(attribute, names, 3) or names[:3]
        hint = f"; it has {', '.join(near)}" if near else ""
        raise ValueError(f"{spec}: {place} has no callable {attribute!r}{hint}")
    return found  # type: ignore[no-any-return]


def parameters_of(function: Callable[..., Any]) -> dict[str, bool]:
    """The named parameters of a callable, and whether each is required; none if Python does not know its signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a C function
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is inspect.Parameter.empty for p in parameters if p.kind in named}


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether a callable takes any named argument (`**kwargs`), or Python does not know its signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def refuse_file_alone(option: str, value: str) -> None:
    """Reject `file.py` without a callable, and name those that the file defines, without running it.

    Raises:
        FileNotFoundError: there is no such file; ValueError: it names no callable.
    """
    place = value.rstrip(":")
    if not place.endswith(".py"):
        return
    kinds = ast.FunctionDef | ast.ClassDef
    try:
        tree = ast.parse(_file(f"--{option} {value}", place).read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"--{option} {place} is not readable as Python ({error}); correct it") from None
    names = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    near = difflib.get_close_matches(option, names, 1, 0.5) or (names if len(names) == 1 else ["NAME"])
    shown = ", ".join([*names[:8], *(["..."] if len(names) > 8 else [])])
    defines = f"it defines {shown}" if names else "it defines no function or class"
    raise ValueError(f"--{option} {value} names no callable; {defines}: give --{option} {place}:{near[0]}")


def guarded(what: str, function: Callable[[], Any]) -> Any:
    """Call foreign code; whatever it raises becomes a one-line error, with its cause kept for `--debug`."""
    try:
        return function()
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses the command line
        reason = str(error).strip() and f": {first_line(error)}"
        if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):  # an option that no command has
            reason = ": its weights hold code, which is not run; save them with safetensors"
        raise ValueError(f"{what} failed with {type(error).__name__}{reason}") from error


@contextmanager
def refusing_exit() -> Iterator[None]:
    """Turn the end of the program that a user's code asks for into an error: it would look like a finished run."""
    try:
        yield
    except SystemExit as error:
        raise ValueError(
            f"a user's code called sys.exit({error.code!r}); everything finished is kept, remove that call"
        ) from error


def spec_sha256(spec: str) -> str | None:
    """SHA-256 of the file that a spec names, as this process last ran it if it has; None if it names a module.

    Raises:
        FileNotFoundError: there is no such file.
    """
    place = spec.rpartition(":")[0]
    if not place.endswith(".py"):
        return None
    path = _file(spec, place)
    return _ran.get(path) or hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Put a folder first on `sys.path`."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the imported code may have changed the path itself
            sys.path.remove(str(folder))


def rng_states() -> list[Any]:
    """States of the global generators: torch's (of every device in use), numpy's and Python's."""
    accelerators = [torch.cuda.get_rng_state(i) for i in _accelerators()]
    return [*(s.numpy().tobytes() for s in (torch.get_rng_state(), *accelerators)), _legacy_state(), random.getstate()]


@contextmanager
def kept_rng(device: torch.device = HOST) -> Iterator[None]:
    """Restore the states of the global generators afterwards, also where a device is used for the first time."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=_accelerators()):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)


@contextmanager
def fixed_rng(seed: int) -> Iterator[None]:
    """Seed the global generators, and restore their states afterwards."""
    with kept_rng():
        seed_torch(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        yield


def seed_torch(seed: int) -> None:
    """Seed torch's global generators of every device in use.

    `torch.manual_seed` would leave a seed behind for GPUs that are not in use yet, in place of the caller's.
    """
    torch.default_generator.manual_seed(seed)
    for i in _accelerators():
        torch.cuda.default_generators[i].manual_seed(seed)


def _legacy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return kind, np.asarray(keys).tobytes(), *rest


def _accelerators() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def _file(spec: str, place: str) -> Path:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{spec}: there is no file {place}; expected path/file.py:callable")
    return path


def _import_file(path: Path) -> ModuleType:
    code = path.read_bytes()
    _ran[path] = hashlib.sha256(code).hexdigest()
    identity = hashlib.sha256(f"{path}\n".encode() + code).hexdigest()[:16]
    name = f"_landscape_{path.stem}_{identity}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(module_spec)

    def imported(*args: Any, **options: Any) -> Any:
        with on_path(path.parent):
            return builtins.__import__(*args, **options)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imported}  # of the code of this file alone
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up by name
    try:
        # These bytes, not the loader's: it takes cached bytecode of the same size and second for the file.
        exec(compile(code, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
