"""Graphs kept on disk between runs, as text or as machine code for a CPU: a later run loads them in milliseconds.

A folder holds code that will be run, so that an entry counts only if it belongs to the user and nobody else can write
it; an entry that cannot be read is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from landscape.curvature import matrix_products
from landscape.curvature.compiled_library import callable_graph
from landscape.curvature.compiler import OWN_MEMORY, beside, compile_to
from landscape.curvature.interpreted_graph import InterpretedGraph
from landscape.data import user_cache

MOST_BYTES, MOST_ENTRIES = 2 * 2**30, 200  # the entries used last stay
UNFINISHED, ABANDONED = "unfinished-", 86_400.0  # start of names; age in seconds at which nobody works on it any more
CALLS = os.cpu_count() or 1  # runs of one graph at the same time, each in a thread of the caller's
NAMES = ("once", "each")
Function = Callable[..., Sequence[Tensor]]
log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Where graphs are kept; None if nothing is kept."""
    return user_cache.folder("compiled", "compiled graphs")


def read_notes(key: str) -> dict[str, Any]:
    """What an earlier run noted under a key; empty if nothing, or nothing readable."""
    return _read(f"{key}.json") if key else {}


def write_notes(key: str, notes: Mapping[str, Any]) -> None:
    """Note something for later runs."""
    if key:
        _write(f"{key}.json", notes)


def _read(name: str) -> dict[str, Any]:
    path = folder()
    if path is None or not user_cache.is_own(path / name):
        return {}
    try:
        content = json.loads((path / name).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(name: str, content: Mapping[str, Any]) -> None:
    path = folder()
    if path is None:
        return
    with contextlib.suppress(OSError):
        descriptor, unfinished = tempfile.mkstemp(dir=path, prefix=UNFINISHED)
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(content, stream)
            os.replace(unfinished, path / name)
        finally:  # still there on a full disk
            Path(unfinished).unlink(missing_ok=True)


def store_recorded(key: str, kind: str, graphs: Sequence[Any], about: Mapping[str, Any]) -> None:
    """Keep the text of recorded graphs, and what is known about them; graphs without text are not kept."""
    path = folder() if key else None
    if path is not None and all(isinstance(graph, InterpretedGraph) for graph in graphs):
        _write(_recorded(key, kind), {**about, "graphs": [graph.text for graph in graphs]})
        _forget_oldest(path)


def load_recorded(key: str, kind: str) -> tuple[Function, Function, dict[str, Any]] | None:
    """The recorded graphs of an entry and what is known about them; None if there is no usable entry."""
    found = _read(_recorded(key, kind)) if key else {}
    try:
        once, each = map(InterpretedGraph, found["graphs"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None
    return once, each, found


def _recorded(key: str, kind: str) -> str:
    return f"{key}.{kind}.json"


def is_stored(key: str, kind: str) -> bool:
    """Whether there is an entry of a kind, `compiled` or one of recorded graphs; it may prove unusable."""
    path = folder() if key else None
    if path is None:
        return False
    return (path / key / "about.json" if kind == "compiled" else path / _recorded(key, kind)).is_file()


def load(key: str) -> tuple[Function, Function, dict[str, Any]] | None:
    """The compiled graphs of an entry and what is known about them; None if there is no usable entry."""
    path = folder()
    if path is None:
        return None
    entry = path / key
    try:
        if not all(map(user_cache.is_own, (entry, *entry.iterdir()))):
            return None
        about = json.loads((entry / "about.json").read_text())
        if [_sha256(entry, name) for name in NAMES] != about["sha256"]:
            return None
        once, each = [_function(entry / f"{name}.so") for name in NAMES]
        os.utime(entry)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return once, each, about


def compiled(
    key: str,
    graphs: tuple[fx.GraphModule, fx.GraphModule],
    given: Sequence[Tensor],
    further: Sequence[Tensor],
    about: Mapping[str, Any],
) -> tuple[Function, Function]:
    """Compile two graphs, the second for all outputs of the first but its first one, and for `further` tensors.

    The code is valid for tensors of the shapes and strides given. It is kept under the key if there is a folder.

    Raises:
        RuntimeError: a graph cannot be compiled (there is no compiler).
    """
    if given[0].device.type == "cpu":
        try:
            return _compiled_for_disk(key, graphs, given, further, about)
        except Exception as error:  # some operators work in this process alone; without a compiler both ways fail
            log.debug("compiled graphs that cannot be kept for later runs: %s", error)
    return _compiled_for_process(graphs, given, further)


def _compiled_for_disk(
    key: str,
    graphs: tuple[fx.GraphModule, fx.GraphModule],
    given: Sequence[Tensor],
    further: Sequence[Tensor],
    about: Mapping[str, Any],
) -> tuple[Function, Function]:
    path = folder()
    made = Path(tempfile.mkdtemp(dir=path, prefix=UNFINISHED))
    try:
        threads = torch.get_num_threads()
        with torch.no_grad():
            _, *expected = graphs[0](*given)  # laid out as the compiled code will lay them out, which is checked
            with beside(lambda: compile_to(made, NAMES[1], graphs[1], [*expected, *further], threads)):
                compile_to(made, NAMES[0], graphs[0], given, threads)
            first = _function(made / f"{NAMES[0]}.so")  # stays loaded wherever the file goes
            _, *outputs = first(*given)
            if [t.stride() for t in outputs] != [t.stride() for t in expected]:
                compile_to(made, NAMES[1], graphs[1], [*outputs, *further], threads)
            second = _function(made / f"{NAMES[1]}.so")
            second(*outputs, *further)
        known = {**about, "sha256": [_sha256(made, name) for name in NAMES]}
        (made / "about.json").write_text(json.dumps(known))
        for file in made.iterdir():
            file.chmod(0o700)
        if path is not None and key:
            _move(made, path / key)
            _forget_oldest(path)
        return first, second
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _compiled_for_process(
    graphs: tuple[fx.GraphModule, fx.GraphModule], given: Sequence[Tensor], further: Sequence[Tensor]
) -> tuple[Function, Function]:
    """For a GPU, whose kernels torch keeps on disk by itself, and for what cannot be kept."""
    from torch import _inductor as inductor  # takes more than a second

    with torch.no_grad():
        first = inductor.compile(graphs[0], [*given], options=OWN_MEMORY)
        _, *outputs = first(*given)
        return first, inductor.compile(graphs[1], [*outputs, *further], options=OWN_MEMORY)


def _move(made: Path, entry: Path) -> None:
    with contextlib.suppress(OSError):
        if entry.exists():
            shutil.rmtree(entry)
        os.rename(made, entry)


def _forget_oldest(path: Path) -> None:
    """Delete the entries used longest ago, beyond the most that are kept, and what killed processes left behind."""
    with contextlib.suppress(OSError):
        used = sorted(((entry.stat().st_mtime, entry) for entry in path.iterdir()), reverse=True)
        size = 0
        for number, (last, entry) in enumerate(used):
            size += sum(file.stat().st_size for file in ([entry] if entry.is_file() else entry.iterdir()))
            abandoned = entry.name.startswith(UNFINISHED) and time.time() - last > ABANDONED
            if abandoned or number >= 3 * MOST_ENTRIES or size > MOST_BYTES:  # code, text, notes
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _sha256(entry: Path, name: str) -> str:
    """Of the files of a graph, so that one that was written in part is noticed."""
    digest = hashlib.sha256((entry / f"{name}.so").read_bytes())
    digest.update((entry / f"{name}.json").read_bytes())
    return digest.hexdigest()


def _function(file: Path) -> Function:
    """A compiled graph, callable from several threads at once."""
    matrix_products.operator()  # that the code may call
    return callable_graph(file, CALLS)
