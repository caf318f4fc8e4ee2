"""What a worker receives, a plan and the digests that it must meet, and how it measures units from it.

A worker loads the subject by itself, from the same paths and seeds, and compares what it has loaded before its first
unit: a file that was replaced meanwhile, or another version of a library, must not enter under the old digest.
"""

import itertools
import os
import platform
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from landscape.checkpoints import raw_files
from landscape.checkpoints.user_code import refusing_exit
from landscape.probe import Probe, Sweeps, Unit, Values
from landscape.results.run_key import versions
from landscape.running.executor import sweep_within_memory
from landscape.subject.device import device_count
from landscape.subject.loading import identity, load
from landscape.subject.precision import exact_arithmetic
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject
from landscape.subject.threads import suitable_threads

STARTED_IN = os.getcwd()
Timed = tuple[float, Values]  # seconds that a unit took, and its values


@dataclass(frozen=True)
class Work:
    """Everything that a worker needs to measure units of one result: plain, small and picklable."""

    probe: Any  # a probe, or several in one pass
    spec: Spec
    folder: str  # relative paths are relative to it, or, on a machine without it, to the worker's own folder
    weights: str  # SHA-256 of the weights, of the samples, and of all that can change the numbers
    data: str
    digests: tuple[str, ...]  # one per probe
    file: str  # SHA-256 of the checkpoint's file, "" without one: tells what was replaced where something differs
    versions: Mapping[str, str]


def work_of(probe: Probe | Sweeps, subject: Subject) -> Work:
    """The work that measures a subject elsewhere. Raises ValueError: a part of the subject was made in Python."""
    if subject.spec is None or not subject.reloadable or subject.origin.others:
        raise ValueError(
            "workers load the subject by themselves and cannot load a model, data or a loss made in Python; "
            "give a checkpoint with --model file.py:callable, or use one worker"
        )
    weights = identity.weights_sha256(subject)
    digests = tuple(identity.digest(one, subject, weights) for one in probes_of(probe))
    file = subject.checkpoint.sha256 if subject.checkpoint is not None else ""
    return Work(
        probe, subject.spec, str(Path.cwd()), weights, subject.data.sha256, digests, file=file, versions=versions()
    )


def probes_of(probe: Any) -> tuple[Probe, ...]:
    """The probes that one pass measures: a probe itself, or those that share a pass."""
    return getattr(probe, "probes", (probe,))


def loaded(work: Work) -> Subject:
    """The subject of some work, after checking that it is the one that was asked for.

    Raises:
        ValueError: it is not, or a library has another version; names what differs.
        OSError: a file cannot be read.
    """
    here = f"worker {os.getpid()} on {platform.node()}"
    if differing := [f"{name} {versions().get(name)}, expected {v}" for name, v in work.versions.items()
                     if versions().get(name) != v]:  # fmt: skip
        raise ValueError(f"{here} has {'; '.join(differing)}; install the same versions on every machine")
    os.chdir(work.folder if os.path.exists(os.path.join(work.folder, work.spec.checkpoint or "")) else STARTED_IN)
    again = "was replaced since the command began, or is another one there; nothing of it is stored: run again"
    path = work.spec.checkpoint
    try:
        subject = load.load_spec(work.spec)
    except ValueError as error:
        if path is not None and raw_files.sha256_of(path) != work.file:
            raise ValueError(f"{here}: {path} {again} ({error})") from error
        raise
    weights = identity.weights_sha256(subject)
    if weights != work.weights:
        raise ValueError(f"{here}: {path or work.spec.model} has other weights; the file {again}")
    stored = subject.checkpoint
    replaced = stored is not None and stored.sha256 != work.file and f"{path} has the same weights; the file"
    if subject.data.sha256 != work.data:
        raise ValueError(f"{here}: {replaced or f'{subject.data.in_words} has other samples; a file of it'} {again}")
    if tuple(identity.digest(probe, subject, weights) for probe in probes_of(work.probe)) != work.digests:
        raise ValueError(f"{here}: {replaced or 'code, or a further file that an option names,'} {again}")
    return subject


def measured(work: Work, subject: Subject, units: Sequence[Unit]) -> Generator[Timed]:
    """Units one after the other, each as soon as it is finished."""
    with exact_arithmetic(), suitable_threads(subject), refusing_exit():  # a worker has settings of its own
        start = time.perf_counter()
        for values in sweep_within_memory(work.probe, subject, units):
            now = time.perf_counter()
            yield now - start, values
            start = time.perf_counter()


_loaded = threading.local()  # one subject per thread of a worker: probes write to the model's weights in place
_loading = threading.Lock()  # a fresh model draws from torch's global generator
_ranks = itertools.count()  # of the threads of this process


def measure_chunk(work: Work, units: Sequence[Unit], first: int = 0) -> list[Timed]:
    """Units on a subject that this thread keeps for the next chunk; `first`: slot of the worker on its host.

    Raises:
        ValueError: also where the host has fewer GPUs than threads.
    """
    if getattr(_loaded, "work", None) != work:
        with _loading:
            if not hasattr(_loaded, "rank"):
                _loaded.rank = next(_ranks)
            _loaded.work = _loaded.subject = None  # its memory is free before the next is loaded
            _loaded.subject = loaded(_on_own_device(work, _loaded.rank, first))
            _loaded.work = work
    return list(measured(work, _loaded.subject, units))


def _on_own_device(work: Work, rank: int, first: int) -> Work:
    """The work on a GPU that no other thread of a worker has, where it is for GPUs: each loads a subject of its own."""
    name = work.spec.device
    if name == "cpu" or (count := device_count()) == 0:
        return work
    place = rank if "dask_cuda" in sys.modules else first + rank  # whose workers see their own GPU first
    if place >= count or (":" in name and rank):
        raise ValueError(
            f"worker {os.getpid()} on {platform.node()} is thread {place + 1} of its host, which has {count} GPUs, and "
            f"each thread needs its own: start `dask worker --nworkers {count} --nthreads 1`, or give --device cpu"
        )
    return work if ":" in name else replace(work, spec=replace(work.spec, device=f"cuda:{place}"))
