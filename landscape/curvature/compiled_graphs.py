"""Graphs as machine code for a CPU, kept on disk between runs: a later run loads them in milliseconds.

A folder holds code that will be run, so that an entry counts only if it belongs to the user and nobody else can write
it; an entry that cannot be read is made again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from landscape.curvature import matrix_products

VARIABLE = "LANDSCAPE_CACHE"  # another folder; empty: nothing is kept
MOST_BYTES, MOST_ENTRIES = 2 * 2**30, 200  # the entries used last stay
UNFINISHED, ABANDONED = "unfinished-", 86_400.0  # start of names; age in seconds at which nobody works on it any more
CALLS = os.cpu_count() or 1  # runs of one graph at the same time, each in a thread of the caller's
NAMES = ("once", "each")
Function = Callable[..., Sequence[Tensor]]
_private: Any = torch._C
log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Where compiled graphs are kept, made for the user alone; None if nothing is kept."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    home = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "landscape"
    try:
        path = home.expanduser() / "compiled"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_safe(path):
            raise PermissionError(f"{path} belongs to, or can be written by, another user")
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is read-only")
    except (OSError, RuntimeError) as error:  # expanduser without a home
        _say_once(f"compiled graphs are not kept for later runs: {error}")
        return None
    return path


@functools.cache
def _say_once(text: str) -> None:
    log.info("%s", text)


def _is_safe(path: Path) -> bool:
    """Whether a file or folder is the user's own and writable by nobody else."""
    try:
        found = path.lstat()
    except OSError:
        return False
    own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    return own and not path.is_symlink() and not found.st_mode & 0o022


def read_notes(key: str) -> dict[str, Any]:
    """What an earlier run noted under a key; empty if nothing, or nothing readable."""
    path = folder() if key else None
    if path is None or not _is_safe(path / f"{key}.json"):
        return {}
    try:
        notes = json.loads((path / f"{key}.json").read_text())
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def write_notes(key: str, notes: Mapping[str, Any]) -> None:
    """Note something for later runs."""
    path = folder() if key else None
    if path is not None:
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=path, prefix=UNFINISHED)
            try:
                with os.fdopen(descriptor, "w") as stream:
                    json.dump(notes, stream)
                os.replace(name, path / f"{key}.json")
            finally:  # still there on a full disk
                Path(name).unlink(missing_ok=True)


def is_stored(key: str) -> bool:
    """Whether there is an entry; it may prove unusable."""
    path = folder() if key else None
    return path is not None and (path / key / "about.json").is_file()


def load(key: str) -> tuple[Function, Function, dict[str, Any]] | None:
    """The compiled graphs of an entry and what is known about them; None if there is no usable entry."""
    path = folder()
    if path is None:
        return None
    entry = path / key
    try:
        if not all(map(_is_safe, (entry, *entry.iterdir()))):
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
        with torch.no_grad():
            _compile(graphs[0], given, made, NAMES[0])
            first = _function(made / f"{NAMES[0]}.so")  # stays loaded wherever the file goes
            _, *outputs = first(*given)
            _compile(graphs[1], [*outputs, *further], made, NAMES[1])
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
        first = inductor.compile(graphs[0], [*given])
        _, *outputs = first(*given)
        return first, inductor.compile(graphs[1], [*outputs, *further])


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
            if abandoned or number >= 2 * MOST_ENTRIES or size > MOST_BYTES:  # an entry and its notes
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _sha256(entry: Path, name: str) -> str:
    """Of the files of a graph, so that one that was written in part is noticed."""
    digest = hashlib.sha256((entry / f"{name}.so").read_bytes())
    digest.update((entry / f"{name}.json").read_bytes())
    return digest.hexdigest()


def _function(file: Path) -> Function:
    """A compiled graph, callable from several threads at once."""
    matrix_products.operator()  # that the code may call
    runner = _private._aoti.AOTIModelContainerRunnerCpu(str(file), CALLS)

    def run(*tensors: Tensor) -> list[Tensor]:
        found: list[Tensor] = runner.run(list(tensors))
        return found

    return run


def _compile(graph: fx.GraphModule, example: Sequence[Tensor], folder: Path, name: str) -> None:
    """Write `name`.so, and to `name`.json how it calls operators that are no part of torch."""
    from torch import _inductor as inductor  # takes more than a second

    plain = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in plain.graph.nodes:  # of the recording, which the compilation would mix with its own
        node.meta = {}
    with tempfile.TemporaryDirectory(dir=folder) as sources:
        options = {"aot_inductor.output_path": f"{sources}/{name}.so", **_cheaper()}
        with torch.no_grad(), warnings.catch_warnings(), _without_input_checks():
            warnings.simplefilter("ignore")  # torch's about its own functions
            inductor.aot_compile(plain, tuple(example), options=options)
        calls = [file.read_text() for file in Path(sources).glob("*.json") if not file.stem.endswith("_metadata")]
        (folder / f"{name}.json").write_text(calls[0] if calls else '{"nodes": []}')
        os.replace(f"{sources}/{name}.so", folder / f"{name}.so")


def _cheaper() -> dict[str, Any]:
    """Settings that make a compilation shorter and its code no slower, as far as this version of torch has them."""
    from torch._inductor import config

    wanted = {
        "aot_inductor.precompile_headers": False,  # pay from the third compilation of a process on
        "aot_inductor.compile_wrapper_opt_level": "O0",  # it calls the kernels
    }
    known = config.get_config_copy()
    return {name: value for name, value in wanted.items() if name in known}


@contextlib.contextmanager
def _without_input_checks() -> Iterator[None]:
    """Leave out checks of every input, nine tenths of the code around the kernels, which are off by default anyway."""
    try:
        from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

        replaced = patch.object(CppWrapperCpu, "generate_input_output_runtime_checks", _no_checks)
    except (ImportError, AttributeError):
        yield
        return
    with replaced:
        yield


def _no_checks(wrapper: Any) -> None:
    wrapper.prefix.splice_aot(
        """
        static bool _check_aoti_runtime_check_inputs_env() { return false; }
        static void __check_inputs_outputs(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {}
        """
    )
