"""Hessian products by compiled code: one network is compiled once a session, and all is asserted of its code."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from analytic import convolution_net, everything, in_double, run_probe, tanh_net
from torch import Tensor, nn

from landscape.curvature import hvp_backends, matrix_products, stored_graphs, stored_hessian
from landscape.curvature.compiled_library import callable_graph
from landscape.curvature.hvp_backends import Hvp, curvature
from landscape.curvature.operator import Curvature
from landscape.curvature.vectors import random_unit
from landscape.data import user_cache
from landscape.probe import Probe
from landscape.probes.density import Density
from landscape.probes.hessian import Hessian
from landscape.probes.trace import Trace
from landscape.results import reader
from landscape.run import run
from landscape.subject.subject import Subject

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # by torch's forward mode
]


def set_up(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Keep compiled code, and make matrix products as of large matrices on a CPU with AVX-512."""
    monkeypatch.setenv(user_cache.VARIABLE, str(cache))
    monkeypatch.setattr(matrix_products, "_has_avx512", torch.backends.mkldnn.is_available)
    monkeypatch.setattr(matrix_products, "LARGE", 1)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that the processes of a session share, with the code that one of them has compiled."""
    own = tmp_path_factory.getbasetemp()
    cache = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled_products"
    with cache.with_suffix(".lock").open("w") as lock, pytest.MonkeyPatch.context() as monkeypatch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        set_up(monkeypatch, cache)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".torch.jit", DeprecationWarning)
            assert_exact(everything())
    return cache


@pytest.fixture(autouse=True)
def folder(session: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled code is kept."""
    set_up(monkeypatch, session)
    return session / "compiled"


@pytest.fixture
def entry(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is kept, to be damaged."""
    subject = everything()
    key = stored_hessian.key_of(subject, subject.parameters, fixed=True)
    copied = tmp_path / "cache" / "compiled" / key
    shutil.copytree(folder / key, copied)
    monkeypatch.setenv(user_cache.VARIABLE, str(tmp_path / "cache"))
    return copied


def by(hvp: Hvp, subject: Subject) -> Curvature:
    return curvature(subject, subject.parameters, hvp, kinks="double")


def vector_of(subject: Subject) -> Tensor:
    return random_unit(subject.size, 3, device=torch.device("cpu"), dtype=subject.dtype)


def assert_exact(subject: Subject, i: int = 1) -> None:
    """The product of compiled code is that of double backward in double precision."""
    vector, double = vector_of(subject), in_double(subject)
    compiled, exact = by("compiled", subject).product(i)(vector), by("kept", double).product(i)(vector.double())
    torch.testing.assert_close(compiled.double(), exact, rtol=1e-5, atol=1e-6)


def refuse(*_: object, **__: object) -> None:
    pytest.fail("traced or compiled again")


def test_compiled_code_gives_the_products_of_double_precision_of_every_mini_batch() -> None:
    """With its activation pattern; also in another memory layout, and of targets of another type."""
    plain = everything()
    (inputs, targets), hot = plain.batches[1], torch.eye(3)
    laid_out = inputs.contiguous(memory_format=torch.channels_last)
    subject = replace(plain, batches=[*plain.batches, (laid_out, targets), (inputs, hot[targets])])
    for scale in (1.0, 1.5):  # batch norm statistics written since the trace count too
        for buffer in filter(torch.is_floating_point, subject.model.buffers()):
            buffer.mul_(scale)
        for i in (1, 2, 3):
            assert_exact(subject, i)
    traced = by("compiled", subject)._traced
    assert traced is not None
    assert traced.layout is torch.channels_last
    recorded = hvp_backends._graph(subject, subject.parameters, True, "traced-channels-last", 0)
    assert ("landscape.matmul" in recorded.code) is torch.backends.mkldnn.is_available()
    decayed, vector = replace(plain, weight_decay=0.25), vector_of(plain)
    with_it, without = (by("compiled", one).product(1)(vector) for one in (decayed, plain))
    torch.testing.assert_close(with_it, without + 0.25 * vector)


WHOLE: dict[str, Probe] = {
    "batch_trace": Trace(vectors=4, method="hutchinson", hvp="compiled"),
    "largest": Density(vectors=2, steps=20, hvp="compiled"),
    "eigenvalue": Hessian(top=2, scope="dataset", hvp="compiled"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_probes_have_the_same_numbers_by_compiled_code(name: str) -> None:
    compiled, kept = (run_probe(replace(WHOLE[name], hvp=hvp), everything())[name] for hvp in ("compiled", "kept"))  # type: ignore[type-var]
    np.testing.assert_allclose(compiled, kept, rtol=0, atol=1e-6 * np.nanmax(np.abs(kept)))


def test_a_second_run_neither_traces_nor_compiles_and_uses_weights_written_since(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_exact(everything())
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(hvp_backends, "trace", refuse)
    monkeypatch.setattr(stored_graphs, "compile_to", refuse)
    again = everything()
    for tensor in (*again.model.buffers(), *again.model.parameters()):
        if tensor.is_floating_point():
            tensor.data.mul_(1.5)  # other weights and statistics, which the code does not hold
    assert_exact(again)


def test_damaged_code_is_compiled_again_and_code_that_others_could_write_is_not_loaded(
    entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact, compiled = entry.parent.parent / "intact", []
    shutil.copytree(entry, intact)

    def copies(made: Path, name: str, *_: object) -> None:
        """In place of the compiler."""
        compiled.append(name)
        for file in (f"{name}.so", f"{name}.json"):
            shutil.copy(intact / file, made / file)

    monkeypatch.setattr(stored_graphs, "compile_to", copies)
    (entry / "each.so").unlink()  # a file in use, which this process holds, is never written to
    (entry / "each.so").write_bytes(b"torn")
    assert_exact(everything())  # made again, without an error
    assert "once" in compiled  # and the other one in a copy of this process
    entry.chmod(0o777)
    assert stored_graphs.load(entry.name) is None  # others could have written it
    entry.chmod(0o700)
    assert stored_graphs.load(entry.name) is not None
    (entry / "once.json").chmod(0o666)
    assert stored_graphs.load(entry.name) is None


def test_code_of_another_function_under_the_same_key_is_noticed(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def as_recorded(key: str, graphs: tuple[Any, Any], *_: object) -> tuple[Any, Any]:
        """In place of the compiler."""
        compiled.append(key)
        return graphs

    monkeypatch.setattr(stored_hessian, "key_of", lambda *_: entry.name)
    monkeypatch.setattr(stored_graphs, "compiled", as_recorded)
    assert_exact(everything())
    assert compiled == []
    other = everything()
    other.model.activation = nn.Tanh()
    assert_exact(other)
    assert compiled == [entry.name]


def test_another_process_loads_code_that_calls_an_operator_of_this_package(folder: Path) -> None:
    """It is registered before the code is loaded."""
    subject = everything()
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "from analytic import everything\n"
        "from landscape.curvature import hvp_backends\n"
        "def refuse(*_, **__): raise SystemExit('traced again')\n"
        "hvp_backends.trace = refuse; subject = everything()\n"
        "print(hvp_backends.curvature(subject, subject.parameters, 'compiled', kinks='double').hvp)"
    )
    child = forked.Popen([sys.executable, "-c", script])
    out, errors = child.communicate(300)
    assert (child.returncode, out.split()) == (0, ["compiled"]), errors
    key = stored_hessian.key_of(subject, subject.parameters, fixed=True)
    assert json.loads((folder / key / "each.json").read_text())["nodes"] == []  # nor does the code call Python


LIBRARY = """
#include <stddef.h>
#include <unistd.h>
int started = 0, released = 0;
int AOTInductorModelContainerCreateWithDevice(void **c, size_t n, const char *d, const char *f) { return 0; }
int AOTInductorModelContainerDelete(void *c) { return 0; }
int AOTInductorModelContainerGetNumOutputs(void *c, size_t *n) { *n = 0; return 0; }
int AOTInductorModelContainerRun(void *c, void **i, size_t n, void **o, size_t m, void *s, void *p)
{
    __atomic_store_n(&started, 1, __ATOMIC_SEQ_CST);
    for (int k = 0; k < 60000 && !__atomic_load_n(&released, __ATOMIC_SEQ_CST); k++) usleep(1000);
    return !released;
}
"""


def test_other_threads_run_during_a_call_of_compiled_code(tmp_path: Path) -> None:
    """The call ends when another thread says so, of a library with the interface of torch's."""
    file = tmp_path / "waits.so"
    file.with_suffix(".json").write_text('{"nodes": []}')
    file.with_suffix(".c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", file, file.with_suffix(".c")], check=True)
    call = callable_graph(file, 1)
    with ThreadPoolExecutor(1) as pool:
        started, released = (ctypes.c_int.in_dll(ctypes.CDLL(str(file)), name) for name in ("started", "released"))
        waiting = pool.submit(call, torch.ones(1))
        while not started.value:
            time.sleep(0.001)
        released.value = 1
        assert waiting.result() == []  # an error of the library otherwise, after a minute


def test_products_that_cannot_be_compiled_say_why() -> None:
    subject = tanh_net()
    settings = {"cpp.cxx": (None, "no-such-compiler")}
    with (
        torch._inductor.config.patch(settings),
        pytest.raises(ValueError, match=r"cannot be compiled \(.*no-such-compiler.*\); choose another --hvp"),
    ):
        curvature(subject, subject.parameters, "compiled")


# --- every backend beside double backward ---


@pytest.mark.parametrize("kind", ["traced", "traced-channels-last", "compiled", "together"])
def test_products_use_weights_written_after_the_trace(kind: Hvp, tmp_path: Path) -> None:
    networks = {"compiled": everything, "traced-channels-last": convolution_net}
    subject = networks.get(kind, tanh_net)()

    def largest(hvp: Hvp) -> list[float]:
        probe = Hessian(top=2, hvp=hvp)
        group = run(probe, subject, tmp_path / "results.h5", overwrite=True).group
        return list(dict(reader.groups(tmp_path / "results.h5"))[group].largest.values)

    before = largest(kind)
    with torch.no_grad():
        for p in subject.model.parameters():
            p.mul_(1.5)
    assert largest(kind) == pytest.approx(largest("kept"), rel=1e-6)
    for module in subject.model.modules():  # as load_state_dict(assign=True) does
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach() / 1.5))
    assert largest(kind) == pytest.approx(before, rel=1e-6)
