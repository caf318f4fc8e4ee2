"""Data sets and models from a callable: `path/file.py:callable` or `package.module:callable`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from landscape.data import folder
from landscape.data.images import Images, balanced
from landscape.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Fit


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
        with _on_path(Path.cwd()):
            module = guarded(spec, lambda: importlib.import_module(place))
    else:
        path = _file(spec, place)
        with _on_path(path.parent):
            module = guarded(spec, lambda: _from_file(path))
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(attribute, names, 3) or names[:3]
        hint = f"; it has {', '.join(near)}" if near else ""
        raise ValueError(f"{spec}: {place} has no callable {attribute!r}{hint}")
    return found  # type: ignore[no-any-return]


def spec_sha256(spec: str) -> str | None:
    """SHA-256 of the file that a spec names, None where it names a module.

    Raises:
        FileNotFoundError: there is no such file.
    """
    place, _ = _split(spec)
    return hashlib.sha256(_file(spec, place).read_bytes()).hexdigest() if place.endswith(".py") else None


def load(spec: str, *, samples: int | None, image_size: int | None, fit: Fit | None = None) -> Images:
    """The data that a callable without arguments returns.

    A pair `(inputs, targets)` is used as it is: its first rows, in its order. A torch Dataset is read once,
    in order, and served in the class-balanced order; where it lists its `targets`, as image folders do, only
    the chosen items are read. Pictures become uint8 images (`image_size` as for folders, the size rule
    applied to the first, and `fit`); uint8 images get ImageNet's mean and std; floating-point tensors count
    as normalised.

    Raises:
        FileNotFoundError, ValueError: as `named`; the callable fails, or returns something else.
    """
    function = named(spec)
    made = guarded(spec, function)
    if isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(x, Tensor | np.ndarray) for x in made):
        return _pair(spec, _tensor(f"{spec}: inputs", made[0]), _tensor(f"{spec}: targets", made[1]), samples)
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")) or isinstance(made, dict | str | tuple):
        raise ValueError(
            f"{spec} returned a {type(made).__name__}; expected a torch Dataset with a length, "
            "or a pair of tensors (inputs, targets)"
        )
    return _materialised(spec, made, samples, image_size, fit)


def _pair(spec: str, inputs: Tensor, targets: Tensor, samples: int | None) -> Images:
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
        raise ValueError(
            f"{spec} returned inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; "
            "expected the same number of rows in both, at least one"
        )
    return Images(inputs[:samples], targets[:samples], spec, _classes(spec, targets), _size(inputs))


def _materialised(spec: str, dataset: Any, samples: int | None, image_size: int | None, fit: Fit | None) -> Images:
    if not len(dataset):
        raise ValueError(f"{spec} returned an empty {type(dataset).__name__}; expected at least one item")
    listed = _listed(dataset)
    order = np.arange(len(dataset)) if listed is None else balanced(listed)[:samples]
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for row in order.tolist():
        item = guarded(f"{spec}: item {row}", partial(operator.getitem, dataset, row))
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(f"{spec}: item {row} is a {type(item).__name__}; expected a pair (input, target)")
        value = item[0]
        if isinstance(value, Image.Image):
            image_size = image_size or folder.own_size([value.size])
            value = fit.pixels(value, image_size) if fit else folder.pixels(value, image_size)
        inputs.append(_tensor(f"{spec}: input {row}", value))
        targets.append(_tensor(f"{spec}: target {row}", item[1]))
        shapes, first = ((tuple(inputs[i].shape), tuple(targets[i].shape)) for i in (-1, 0))
        if shapes != first:
            raise ValueError(f"{spec}: item {row} has the shapes {shapes}, the first {first}; make them equal")
    stacked, wanted = torch.stack(inputs), torch.stack(targets)
    counts = [_classes(spec, wanted), len(getattr(dataset, "classes", ()))]
    counts += [] if listed is None else [_classes(spec, torch.from_numpy(listed))]
    mean, std = _normalisation(stacked)
    images = Images(stacked, wanted, spec, max(counts), _size(stacked), mean, std)
    if listed is not None:
        return images
    whole = wanted.ndim == 1 and not wanted.is_floating_point()
    return images.take((balanced(wanted.numpy()) if whole else order)[:samples])


def _listed(dataset: Any) -> np.ndarray | None:
    """The dataset's own list of class numbers, where it has a usable one."""
    listed = getattr(dataset, "targets", None)
    if not isinstance(listed, list | tuple | np.ndarray | Tensor) or len(listed) != len(dataset):
        return None
    found = np.asarray(listed)
    return found.astype(np.int64) if found.ndim == 1 and found.dtype.kind in "iu" else None


def _tensor(what: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # a memory map, say: torch has no read-only tensors
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} is a {type(value).__name__}; expected a tensor, a picture or a number") from None


def _classes(spec: str, targets: Tensor) -> int:
    if targets.is_floating_point():
        return targets.shape[1] if targets.ndim == 2 else 0  # soft labels, or a regression
    if targets.min() < 0:
        raise ValueError(f"{spec} has the target {int(targets.min())}; expected class numbers from 0 upward")
    return int(targets.max()) + 1


def _size(inputs: Tensor) -> int:
    return inputs.shape[-1] if inputs.ndim == 4 and inputs.shape[-1] == inputs.shape[-2] else 0


def _normalisation(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if inputs.dtype != torch.uint8 or inputs.ndim != 4:
        return (), ()
    if inputs.shape[1] == 3:
        return IMAGENET_MEAN, IMAGENET_STD
    return (0.5,) * inputs.shape[1], (0.5,) * inputs.shape[1]


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
def _on_path(place: Path) -> Iterator[None]:
    sys.path.insert(0, str(place))
    try:
        yield
    finally:
        with suppress(ValueError):  # the imported code may have changed the path itself
            sys.path.remove(str(place))


def guarded(what: str, function: Callable[[], Any]) -> Any:
    """Call foreign code; whatever it raises becomes one line, with the cause kept for `--debug`."""
    try:
        return function()
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses the command line
        first = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(f"{what} failed with {type(error).__name__}: {first}") from error
