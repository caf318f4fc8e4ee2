"""Freed memory that stays with the process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from landscape.cli.process_setup import MALLOC

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
    """Pages that the system hands out while the same tensors are made again and again."""
    command = [sys.executable, "-c", ALLOCATE, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT | environment)
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="glibc's business")
def test_tensors_of_a_pass_take_the_memory_of_the_last_one() -> None:
    assert _faults("keep") < _faults() / 5  # the heap grows a little at first


@pytest.mark.slow
@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="glibc's business")
def test_a_choice_of_the_user_stands() -> None:
    assert _faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > 5 * _faults("keep")
