"""The command line that measures a stored result, written from its attributes; torch is not needed for it.

The options of probes and of loading are declared in modules that import torch. Their names and defaults are read from
the source instead: they are dataclass fields annotated with a help text.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PROBES, SPEC = "landscape.probes", ("landscape.subject.spec", "Spec")
SAMPLES = "1024"  # the default of every probe's command, see `api.loading_defaults`
UNKNOWN = object()  # a default that no literal states: the option is always written


def command_for(attributes: Mapping[str, Any], out: Path | str, **changes: Any) -> str:
    """The command that measures a stored result, with some options changed; "" where no command does.

    No command measures imported results and those measured from Python of objects in memory. The values in `changes`
    are options of the probe or of loading; None leaves an option out, so that its default holds.
    """
    probe, stored = str(attributes.get("probe", "")), attributes.get("spec")
    declared = _declared_by(probe)
    if declared is None or not stored:
        return ""
    try:
        parameters, spec = json.loads(attributes.get("parameters", "{}")), json.loads(stored)
    except ValueError:
        return ""
    if not isinstance(spec, dict) or not (spec.get("checkpoint") or spec.get("model")):
        return ""
    own, usual = declared
    loading = {**_fields(*SPEC), "samples": (True, SAMPLES), **{k: (True, usual[k]) for k in usual.keys() & LOADING}}
    spec["seed"] = parameters.pop("seed", spec.get("seed", 0))
    for name, value in changes.items():
        (spec if name in spec else parameters)[name] = value
    words = ["landscape", probe, *([str(spec["checkpoint"])] if spec.get("checkpoint") else [])]
    words += [*_options(own, parameters), *_options(loading, spec)]
    return shlex.join([*words, "--out", str(out)])


LOADING = {"split", "batch_size"}  # class variables of a probe that are defaults of loading options
Fields = Mapping[str, tuple[bool, Any]]  # name -> whether it is an option, and its default


def _options(fields: Fields, values: Mapping[str, Any]) -> Iterator[str]:
    """The options whose values are not the defaults."""
    for name, (is_option, default) in fields.items():
        value = values.get(name)
        if not is_option or name == "device" or value in (None, "", [], {}) or _same(value, default):
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield option if value else f"--no-{option[2:]}"
        elif isinstance(value, Mapping):
            yield from (word for key, item in value.items() for word in (option, f"{key}={item}"))
        elif isinstance(value, list) and name in ("mean", "std"):
            yield from (option, ",".join(f"{number:g}" for number in value))
        elif isinstance(value, list):
            yield from (word for item in value for word in (option, str(item)))
        else:
            yield from (option, str(value))


def _same(value: Any, default: Any) -> bool:
    """Whether a stored value is the default; numbers may be stored as text."""
    return value == default or (not isinstance(value, bool | list) and str(value) == str(default))


@cache
def _declared_by(probe: str) -> tuple[Fields, Mapping[str, Any]] | None:
    """The fields of a probe and its class variables that are defaults of loading; None where there is no such probe."""
    name = f"{PROBES}.{probe.replace('-', '_')}"
    if not probe.replace("-", "_").isidentifier() or importlib.util.find_spec(name) is None:
        return None
    for node in _tree(name).body:
        if isinstance(node, ast.ClassDef) and _value(name, _assigned(node).get("name")) == probe:
            usual = {"split": "test", "batch_size": 128}
            known = {key: _value(name, value) for key, value in _assigned(node).items() if key in LOADING}
            return _fields(name, node.name), usual | known
    return None


@cache
def _fields(module: str, of: str) -> Fields:
    """The fields of a dataclass; those that are annotated with a help text (`Annotated`, or an alias) are options."""
    (node,) = (n for n in _tree(module).body if isinstance(n, ast.ClassDef) and n.name == of)
    found: dict[str, tuple[bool, Any]] = {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            kind = ast.unparse(line.annotation).partition("[")[0]
            if kind != "ClassVar":
                found[line.target.id] = kind.isidentifier() and not hasattr(builtins, kind), _value(module, line.value)
    return found


def _assigned(node: ast.ClassDef) -> dict[str, ast.expr]:
    lines = (line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name))
    return {line.target.id: line.value for line in lines if line.value is not None}  # type: ignore[union-attr]


def _value(module: str, node: ast.expr | None) -> Any:
    """The value of a literal, or of a name that stands for one."""
    if isinstance(node, ast.Name):
        return _constant(module, node.id)
    if isinstance(node, ast.Call):  # field(default_factory=dict) and the like: empty
        return None
    try:
        return ast.literal_eval(node) if node is not None else UNKNOWN
    except ValueError:
        return UNKNOWN


def _constant(module: str, name: str) -> Any:
    """The value that a module gives to a name, or that of the module from which it imports the name."""
    for line in _tree(module).body:
        if isinstance(line, ast.ImportFrom) and any(alias.name == name for alias in line.names):
            return _constant(str(line.module), name)
        if isinstance(line, ast.Assign):
            target, value = line.targets[0], line.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]  # type: ignore[attr-defined]
            for left, right in pairs:
                if isinstance(left, ast.Name) and left.id == name:
                    return _value(module, right)
    return UNKNOWN


@cache
def _tree(module: str) -> ast.Module:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return ast.Module([], [])
    return ast.parse(Path(found.origin).read_text(encoding="utf-8"))
