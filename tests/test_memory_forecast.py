"""The memory that products and stored vectors need: forecast, kept within a limit, refused where nothing helps."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
from analytic import batches_of, run_probe
from torch import Tensor, nn

from landscape.cli.main import exit_code
from landscape.curvature import spectrum
from landscape.curvature.krylov_basis import SLICE, Basis
from landscape.curvature.lanczos import lanczos
from landscape.curvature.spectrum import Request, room
from landscape.data import memory
from landscape.data.memory import limited_to
from landscape.options import OptionError, parse_bytes
from landscape.probes.hessian import Hessian
from landscape.products import memory_forecast
from landscape.products.hessian_product import hessian_product
from landscape.products.hvp_backends import curvature
from landscape.products.memory_forecast import MemoryForecast, planned_micro_batches
from landscape.products.vectors import random_unit
from landscape.subject.subject import Subject

pytestmark = pytest.mark.slow

MIB = 2**20


@pytest.fixture
def subject() -> Subject:
    """Few parameters and large maps: a mini-batch of 16 images saves some MB for its gradient."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return Subject(nn.Sequential(*layers).eval(), batches_of((3, 32, 32), (16,), 3))


def test_parts_are_as_many_as_the_room_needs() -> None:
    found = MemoryForecast(vectors=10, stored=20, graph=160, samples=16)
    assert found.micro_batches(190) == 1
    assert found.micro_batches(110) == 2
    assert found.micro_batches(31) == 16  # no fewer than one sample each
    assert found.micro_batches(0) == 16
    assert (found.total(1), found.total(2), found.total(16)) == (190, 110, 40)
    assert MemoryForecast(10, 20, 0, 16).micro_batches(100) == 1


def test_a_limit_divides_mini_batches_and_leaves_the_eigenvalues(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    probe = Hessian(top=2, batches=1)
    whole = run_probe(probe, subject)
    with caplog.at_level("DEBUG", logger="landscape"), limited_to(2 * MIB):
        limited = run_probe(probe, subject)
    assert "the peak of the process is higher" in caplog.text
    assert "a mini-batch in " in caplog.text
    assert caplog.text.count("planned for: about") == 1
    torch.testing.assert_close(
        torch.tensor(limited["eigenvalue"]), torch.tensor(whole["eigenvalue"]), rtol=1e-4, atol=1e-6
    )
    with limited_to(2 * MIB):
        assert curvature(subject, subject.parameters, "auto").exceeds_memory


def test_the_forecast_counts_what_a_pass_saves(subject: Subject) -> None:
    """Convolution input and output, and what tanh and pooling keep, of one image each."""
    maps = 32 * 32 * 4
    saved = memory_forecast._saved_by_one(subject)
    assert 3 * maps + 8 * maps <= saved <= 3 * maps + 3 * 8 * maps + 4096


def test_a_limit_bounds_memory_and_vectors_and_below_one_sample_is_refused_with_what_it_needs(subject: Subject) -> None:
    size, cpu = 10_000_000, torch.device("cpu")
    assert room(size, torch.float32, cpu) == (2 * (2**31 // (4 * size)), torch.float16)
    with limited_to(2**31):
        assert memory.available() <= 2**31
        assert room(size, torch.float32, cpu) == (2 * (2**29 // (4 * size)), torch.float16)
    assert memory.limit() is None
    with limited_to(10_000), pytest.raises(ValueError, match=r"--memory .* less than one sample .* give --memory 1GiB"):
        planned_micro_batches(subject, subject.parameters, 0)


@pytest.mark.parametrize(
    ("text", "count"), [("8GiB", 2**33), ("500MB", 5 * 10**8), ("1.5g", None), ("0GiB", None), ("", 0)]
)
def test_amounts_of_memory(text: str, count: int | None) -> None:
    if count is None:
        with pytest.raises(OptionError, match="8GiB or 500MB"):
            parse_bytes("memory", text)
    else:
        assert (parse_bytes("memory", text) or 0) == count


def test_the_option_reaches_the_measurement_and_is_refused_with_other_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import torch\n"
        "def model(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))\n"
        "def data(split): return torch.randn(16, 3, 2, 2), torch.arange(16) % 3\n"
    )
    words = ["hessian", "--model", f"{source}:model", "--data", f"{source}:data", "--out", str(tmp_path / "r.h5")]
    words += ["--top", "1", "--batches", "1"]
    assert exit_code([*words, "--memory", "2k"]) == 1
    assert "give --memory 1GiB" in capsys.readouterr().err
    assert exit_code([*words, "--memory", "1GiB", "--verbose"]) == 0
    assert "planned for: about" in capsys.readouterr().err
    assert exit_code([*words, "--memory", "1GiB", "--workers", "2"]) == 2
    assert "limits one process" in capsys.readouterr().err


FREED = """
import os, sys, torch
from landscape.data.memory import return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

del (whole := {0: torch.ones(2**20 * 7)})[0]  # glibc keeps freed blocks up to this size, 28 MiB, from now on
before = resident()
if sys.argv[1] == "returned":
    return_freed_memory()
kept = [(torch.ones(2**20), torch.ones(2**15)) for _ in range(100)]  # 4 MiB and 128 KiB
kept = [small for _, small in kept]
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_holes_between_kept_tensors_go_back_to_the_system() -> None:
    def megabytes(mode: str) -> float:
        return float(forked.Popen(["-c", FREED, mode]).communicate()[0])

    if megabytes("kept") < 300:
        pytest.skip("this C library gives freed memory back by itself")
    assert megabytes("returned") < 100


def test_the_basis_is_freed_before_values_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision: what follows takes a fresh product per value, in which a graph needs the memory."""
    rows: list[int] = []

    def clear(basis: Basis) -> None:
        rows.append(len(basis))
        cleared(basis)
        assert len(basis) == 0

    cleared = Basis.clear
    monkeypatch.setattr(Basis, "clear", clear)
    values = torch.linspace(0.0, 1.0, 50).pow(4)
    found = lanczos(values.mul, random_unit(50, 0, device=values.device, dtype=values.dtype), 2, storage=torch.float16)
    assert rows == [found.products - 2]
    torch.testing.assert_close(torch.tensor(found.values), values[[-1, -2]].double(), rtol=1e-4, atol=0)


def test_a_search_of_a_large_network_holds_its_basis_and_the_vector_it_multiplies() -> None:
    weight = torch.rand(3 * SLICE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before, counts = _held(weight.nbytes // 2), list[int]()
    made = hessian_product(lambda: weight.pow(3).sum(), [weight])

    def product(vector: Tensor) -> Tensor:
        counts.append(len(_held(weight.nbytes // 2) - before))
        return made(vector)

    request = Request(1, "LM", None, 1e-9, 1.0, max_products=4, vectors=False, verify=False)
    with mock.patch.object(spectrum, "BASIS_BYTES", 10):
        spectrum.spectrum(product, request, weight.numel(), 0, weight)
    # The last product is of a Ritz vector, of a basis in half precision that is free by then.
    assert counts == [2] * len(counts)


def _held(least: int) -> set[int]:
    """The storages of at least so many bytes behind Python's tensors."""
    storages = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, Tensor)]
    return {one.data_ptr() for one in storages if one.nbytes() >= least}
