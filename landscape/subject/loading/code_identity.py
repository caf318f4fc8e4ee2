"""Identify models and losses made in Python by their code and configuration: equal weights may be other functions."""

import ast
import dis
import hashlib
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor, nn

from landscape.checkpoints.checkpoint import state_dict_sha256

PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEEPEST = 2  # objects within objects; of deeper ones (a trainer's data, say) the class alone counts
OF_MODULES = set(vars(nn.Module())) | {"training"}  # attributes of every module
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
NESTED = ("body", "orelse", "handlers", "finalbody", "cases")  # statements within a statement
OF_FILES = "_landscape_"  # start of the module names of files that `import_callable` imports
_changing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # attributes that forward passes change
_sources: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def object_sha256(value: object, *, weights: bool = True) -> str:
    """SHA-256 of a function, or of an object, with what it computes from.

    Of a function: its source, defaults, and the values of its closure and of the global names in it. Of an object: its
    class with the base classes, and its attributes; of a module those of all submodules too, such as activation
    functions, strides and numbers of heads, and, if `weights`, its parameters and buffers.
    """
    described = _Description()
    digest = hashlib.sha256()
    for text in described.of_module(value, weights=weights) if isinstance(value, nn.Module) else described.of(value):
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


@contextmanager
def forward_passes(model: nn.Module) -> Iterator[None]:
    """Notice which attributes the passes in the block change, such as counters of calls: they identify nothing."""
    before = _attributes(model)
    yield
    for part, texts in _attributes(model).items():
        changed = {name for name, text in texts.items() if part in before and before[part].get(name) != text}
        if changed:
            _changing[part] = _changing.get(part, set()) | changed


def _attributes(model: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """The attributes of every module of the user's, as text."""
    own = [part for part in model.modules() if not type(part).__module__.startswith("torch.")]
    return {
        part: {name: "\n".join(_Description().of(inner, DEEPEST)) for name, inner in vars(part).items()
               if name not in OF_MODULES}
        for part in own
    }  # fmt: skip


class _Description:
    """Texts that are equal for equal objects in every process; an object that was described is not described again."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # by id; they stay alive, so that no id is used twice

    def of(self, value: Any, depth: int = 0) -> Iterator[str]:
        """The texts of any value."""
        kind = type(value).__qualname__
        if isinstance(value, PLAIN):
            yield repr(value)
        elif id(value) in self._seen:
            yield f"{kind} again"
        elif isinstance(value, tuple | list | set | frozenset | Mapping):
            yield kind
            yield from self._of_container(value, depth)
        elif isinstance(value, ModuleType) or depth > DEEPEST:
            yield getattr(value, "__qualname__", getattr(value, "__name__", kind))
        else:
            self._seen[id(value)] = value
            yield from self._of_object(value, depth)

    def of_module(self, module: nn.Module, *, weights: bool, depth: int = 0) -> Iterator[str]:
        """The texts of a module and its submodules."""
        parts = list(module.named_modules())
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if weights:
            yield _of_tensors(tensors)
        self._seen |= {id(known): known for known in (*tensors.values(), *(part for _, part in parts))}
        for name, part in parts:
            yield name
            yield from self.of(type(part), depth)
            yield from self._of_attributes(part, depth, leave_out=OF_MODULES | _changing.get(part, set()))
            yield from (_source(hook) for name in HOOKS for hook in vars(part)[name].values() if _has_source(hook))

    def _of_container(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from self.of(key, depth)
                yield from self.of(inner, depth)
        elif isinstance(value, set | frozenset):
            yield from sorted("\n".join(self.of(inner, depth)) for inner in value)
        else:
            for inner in value:
                yield from self.of(inner, depth)

    def _of_object(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, Tensor):
            yield _of_tensors({"": value})
        elif isinstance(value, np.ndarray):
            yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        elif isinstance(value, nn.Module):
            yield from self.of_module(value, weights=True, depth=depth + 1)
        elif isinstance(value, FunctionType):
            yield _source(value)
            yield from self._beside_source(value, depth)
        elif isinstance(value, type):
            yield from self._of_class(value, depth)
        elif isinstance(value, partial):
            yield from self.of((value.func, value.args, sorted(value.keywords.items())), depth)
        elif isinstance(value, MethodType):
            yield from self.of((value.__func__, value.__self__), depth)
        elif hasattr(value, "__dict__") and not hasattr(value, "__qualname__"):
            yield from self.of(type(value), depth)
            yield from self._of_attributes(value, depth)
        else:
            text = repr(value)  # a data type, a device; other objects have their address in it
            yield text if " at 0x" not in text else getattr(value, "__qualname__", type(value).__qualname__)

    def _of_class(self, kind: type, depth: int) -> Iterator[str]:
        for owner in kind.__mro__:
            yield _source(owner)
            for name, member in vars(owner).items() if _is_own(owner) else ():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(function, FunctionType):  # a class without source, or one of several of its name
                    yield _source(function)
                    yield from self._beside_source(function, depth)
                elif isinstance(member, PLAIN) and not name.startswith("__"):
                    yield f"{name} {member!r}"

    def _of_attributes(self, value: object, depth: int, leave_out: Iterable[str] = ()) -> Iterator[str]:
        for name, inner in sorted(vars(value).items()):
            if name not in leave_out:
                yield name
                yield from self.of(inner, depth + 1)

    def _beside_source(self, function: FunctionType, depth: int) -> Iterator[str]:
        """The values that a function computes from, beside its arguments."""
        yield from self.of((function.__defaults__, function.__kwdefaults__), depth)
        for cell in function.__closure__ or ():
            if _is_filled(cell):
                yield from self.of(cell.cell_contents, depth)
        for name in sorted(_global_names(function.__code__)) if _is_own(function) else ():
            if name in function.__globals__:
                yield name
                yield from self.of(function.__globals__[name], depth)


def _of_tensors(tensors: Mapping[str, Tensor]) -> str:
    try:
        return state_dict_sha256(tensors)
    except (RuntimeError, TypeError, ValueError):  # without values, as on the meta device
        return ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())


def _is_own(code: Any) -> bool:
    """Whether a function or class is the user's: not of the standard library, an installed package or this one."""
    if code.__module__ == "__main__":  # a script or a notebook, also one that an installed program runs
        return True
    if str(code.__module__).startswith("landscape."):
        return False
    try:
        path = inspect.getfile(code)
    except (OSError, TypeError):  # built in
        return False
    return not any(part in path for part in INSTALLED)


def _has_source(code: Any) -> bool:
    return isinstance(code, FunctionType | type)


def _source(code: Any) -> str:
    """Source text of a function or class; else its byte code, or its name."""
    if code not in _sources:
        _sources[code] = _read_source(code)
    return _sources[code]


def _read_source(code: Any) -> str:
    name = f"{code.__module__}.{code.__qualname__}"
    if name.startswith(("torch.", "builtins.")):
        return name
    if name.startswith(OF_FILES):  # whose module is named after its path
        name = str(code.__qualname__)
    own: CodeType | None = getattr(code, "__code__", None)
    try:
        # One line may hold several functions without a name, and a file may be replaced after its import.
        partly = own is not None and (code.__name__ == "<lambda>" or (_is_own(code) and not _is_as_imported(own)))
        return f"{name}\n{inspect.getsource(own) if own else _class_source(code)}{_byte_code(own) if partly else ''}"
    except (OSError, TypeError, SyntaxError):  # made by exec, built in, or no longer there
        return f"{name}\n{_byte_code(own)}"


def _is_as_imported(code: CodeType) -> bool:
    """Whether the file of a function, as it is now, gives the byte code that runs; true where there is no file."""
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    return not text or (code.co_qualname, _byte_code(code)) in _compiled(text)


@lru_cache(maxsize=64)
def _compiled(text: str) -> set[tuple[str, str]]:
    """The functions of a file, at any depth, by qualified name and byte code."""
    found, waiting = set[tuple[str, str]](), [compile(text, "", "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        found.add((code.co_qualname, _byte_code(code)))
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


def _class_source(kind: type) -> str:
    """Source text of a class as `inspect` finds it, which parses the whole file again for every class."""
    lines = linecache.getlines(inspect.getsourcefile(kind) or "", vars(sys.modules[kind.__module__]))
    first, last = _places("".join(lines)).get(kind.__qualname__, (0, 0))
    if not first:
        raise OSError("could not find class definition")
    return "".join(lines[first - 1 : last])


@lru_cache(maxsize=8)
def _places(text: str) -> dict[str, tuple[int, int]]:
    """First and last line of every class of a file by qualified name; of several of one name, those of the first."""
    found: dict[str, tuple[int, int]] = {}
    waiting: list[tuple[Any, str]] = [(ast.parse(text), "")]
    while waiting:
        node, where = waiting.pop()
        if isinstance(node, ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = first, node.end_lineno or first
            found[f"{where}{node.name}"] = min(lines, found.get(f"{where}{node.name}", lines))
            where = f"{where}{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{where}{node.name}.<locals>."
        waiting += [(inner, where) for part in NESTED for inner in getattr(node, part, ())]
    return found


def _byte_code(code: CodeType | None) -> str:
    if code is None:
        return ""
    constants = [
        _byte_code(c) if isinstance(c, CodeType) else repr(sorted(c, key=repr) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


@cache
def _global_names(code: CodeType) -> frozenset[str]:
    """Names of global values in a function and in those defined in it."""
    inner = (_global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    found = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(found).union(*inner)


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
