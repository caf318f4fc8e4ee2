"""Identify models and losses made in Python by their code and configuration: equal weights may be other functions."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def object_sha256(value: object) -> str:
    """SHA-256 of a function with the plain values that it closes over, or of an object's class and plain attributes.

    Of a module, the plain attributes of all its submodules count: activation functions, strides, numbers of heads.
    Tensors and modules in closures and attributes of other objects do not.
    """
    return hashlib.sha256("\n".join(_parts(value)).encode()).hexdigest()


def _parts(value: object) -> Iterator[str]:
    if isinstance(value, partial):
        yield from _parts(value.func)
        yield repr([_plain(part) for part in (*value.args, *sorted(value.keywords.items()))])
    elif isinstance(value, nn.Module):
        for name, module in value.named_modules():
            kind: Any = type(module)
            yield f"{name}:{_source(kind)}:{_attributes(module)}"
    elif isinstance(value, FunctionType):
        yield _source(value)
        yield repr([_plain(cell.cell_contents) for cell in value.__closure__ or () if _is_filled(cell)])
        yield repr(_plain(value.__defaults__))
    else:
        owner = getattr(value, "__self__", None)
        kind = value if isinstance(value, type) else type(value if owner is None else owner)
        yield _source(kind)
        yield getattr(value, "__qualname__", "")
        yield _attributes(value if owner is None else owner)


@cache
def _source(code: Any) -> str:
    """Source text of a function or class; else its byte code, or its name."""
    name = f"{code.__module__}.{code.__qualname__}"
    if name.startswith("torch."):
        return name
    try:
        return f"{name}\n{inspect.getsource(code)}"
    except (OSError, TypeError):  # made by exec, or built in
        return f"{name}\n{_byte_code(getattr(code, '__code__', None))}"


def _byte_code(code: CodeType | None) -> str:
    if code is None:
        return ""
    constants = [_byte_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _attributes(value: object) -> str:
    attributes = {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_") and k != "training"}
    return repr(sorted((name, _plain(inner)) for name, inner in attributes.items()))


def _plain(value: object) -> str:
    """A text that is equal for equal plain values; of another object its class or name, which has no address in it."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list | set | frozenset):
        inner = [_plain(item) for item in value]
        return f"{type(value).__name__}{sorted(inner) if isinstance(value, set | frozenset) else inner}"
    if isinstance(value, dict):
        return repr([(_plain(key), _plain(item)) for key, item in value.items()])
    if isinstance(value, FunctionType):
        return _source(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
