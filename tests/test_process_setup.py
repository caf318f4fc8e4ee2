"""What the command line sets for the whole process, and that the library sets nothing."""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.cli.process_setup import MALLOC, set_threads, worker_pool
from landscape.subject.loading import load

ALLOCATE = """
import resource, sys, torch
from landscape.cli.process_setup import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
def work():
    return [torch.ones(12_000_000) for _ in range(3)] and None
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", *(name for name, _, _ in MALLOC))}


@functools.cache
def _faults(*arguments: str, **environment: str) -> int:
    """Page faults while the same tensors are allocated again and again."""
    command = [sys.executable, "-c", ALLOCATE, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT | environment)
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="glibc's business")
def test_freed_memory_is_reused_without_page_faults() -> None:
    assert _faults("keep") < _faults() / 5  # the heap grows a little at first


@pytest.mark.slow
@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="glibc's business")
def test_malloc_settings_of_the_user_are_kept() -> None:
    assert _faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > 5 * _faults("keep")


def _spin_count(*lines: str, **environment: str) -> str:
    code = "\n".join(["import os", *lines, "print(os.environ.get('GOMP_SPINCOUNT'))"])
    clean = {name: value for name, value in ENVIRONMENT.items() if name != "GOMP_SPINCOUNT"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | environment
    )
    return run.stdout.strip()


@pytest.mark.slow
def test_only_the_command_line_changes_the_process() -> None:
    imports = "import landscape.api, landscape.cli.main, landscape.cli.process_setup as setup"
    assert _spin_count(imports, "assert not any(name in os.environ for name, _, _ in setup.MALLOC)") == "None"
    assert _spin_count(imports, "setup.set_up_process()") == "10000"
    assert _spin_count(imports, "setup.set_up_process()", GOMP_SPINCOUNT="7") == "7"


@pytest.mark.slow
def test_a_data_loader_in_a_worker_starts_its_own_workers_like_the_main_process() -> None:
    with worker_pool(2) as pool:
        assert pool is not None
        method = pool.submit(eval, "__import__('multiprocessing').get_start_method()").result()
    assert method == multiprocessing.get_start_method()


def test_threads_are_set_for_batches_without_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def __init__(self) -> None:
            self.x, self.y = torch.ones(5, 3), torch.zeros(5).long()

    class Network(nn.Linear):
        def forward(self, data: Graph) -> Tensor:
            return super().forward(data.x)

    def loss(outputs: Tensor, batch: Graph) -> Tensor:
        return F.cross_entropy(outputs, batch.y)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_threads(load(Network(3, 2), data=[Graph()], loss=loss))
