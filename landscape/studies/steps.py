"""Carry out one step of a study, a training or a measurement of a network, in this process or in another one."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import xarray as xr

from landscape.probe import NotApplicable
from landscape.results.journal import Busy
from landscape.studies import claims, edge_of_stability, merged
from landscape.studies.network_tables import within

Train: TypeAlias = Callable[..., Path]
Report: TypeAlias = Callable[[int, int], None]
TRAINING = "training"
AGAIN_SECONDS = 5.0  # until a result that another worker measures is asked for again


class Step(NamedTuple):
    """A training, or a measurement, of a network with a seed."""

    network: claims.Network
    seed: int
    key: str = TRAINING  # or the name of the measurement
    measurement: claims.Measurement | None = None
    others: Sequence[Path | None] = ()  # checkpoints that are measured together with that of the network

    @property
    def name(self) -> str:
        return name_of(self.network.name, self.seed, self.key)

    @property
    def place(self) -> str:
        """The table of the study's file that asks for it, and of what."""
        if self.measurement is None:
            return f"[networks.{self.network.name}]"
        return f"[measure.{self.key}] of {self.name.removesuffix(f' {self.key}')}"


class Done(NamedTuple):
    """What became of a step."""

    seconds: float
    result: xr.Dataset | None = None  # of a measurement
    why: str = ""  # it diverged, or does not apply
    anew: bool = True  # False: the network was trained already


@dataclass(frozen=True)
class Setting:
    """What all steps of a study have in common; `train` and `measure` as for `conduct`. Called with a step."""

    out: Path
    results: Path
    data: str
    data_root: Path | None
    load: Mapping[str, Any]
    device: str
    quiet: bool
    train: Train
    measure: Callable[..., xr.Dataset]

    def __call__(self, step: Step, report: Report | None = None) -> Done:
        """Carry it out; `report` is called with finished and all epochs or units. Without it others may run beside."""
        while True:
            try:
                return self._done(step, report)
            except Busy:  # another step asks the same question, such as of a network with equal weights
                if report is not None:
                    raise
                time.sleep(AGAIN_SECONDS)

    def _done(self, step: Step, report: Report | None) -> Done:
        from landscape.training.train import Diverged

        began, there = time.monotonic(), False
        with within(step.place, f"{step.key} of {step.network.name}"):
            try:
                if step.key == TRAINING:
                    folder = claims.run_folder(self.out, step.network.name, step.seed)
                    there, result = (folder / "final.pt").exists(), None
                    self._train(step.network, step.seed, folder, report)
                else:
                    result = self._measured(step, report)
            except (Diverged, NotApplicable) as error:
                return Done(time.monotonic() - began, why=str(error))
            return Done(time.monotonic() - began, result, anew=not there)

    def _train(self, one: claims.Network, seed: int, folder: Path, report: Report | None) -> None:
        self.train(
            one.model, self.data, dict(one.overrides), recipe=one.recipe, seed=seed, fraction=one.fraction, out=folder,
            model_args=one.model_args, data_root=self.data_root, device=self.device, quiet=self.quiet, report=report,
        )  # fmt: skip

    def _measured(self, step: Step, report: Report | None) -> xr.Dataset:
        one, seed = step.network, step.seed
        if one.full_batch:
            return edge_of_stability.followed(
                one.name, one.full_batch, data=self.data, data_root=self.data_root, seed=seed, device=self.device,
                out=self.results,
            )  # fmt: skip
        assert step.measurement is not None
        how: dict[str, Any] = {"data_root": self.data_root, "device": self.device, "out": self.results}
        if one.files and self.data:
            how = {"data": self.data, **how}
        how |= merged(self.load, one.load)
        label = f"{one.name}-s{seed}" if one.label is None else one.label
        checkpoint, of = one.file(self.out, seed, step.measurement.snapshot), partial(self.measure, report=report)
        try:
            return step.measurement.of(checkpoint, label, of, others=step.others, **how)
        except NotApplicable as error:
            if not (otherwise := step.measurement.otherwise):
                raise
            other = replace(step.measurement, options=merged(step.measurement.options, otherwise))
            try:
                return other.of(checkpoint, label, of, others=step.others, **how)
            except ValueError as second:
                if str(second) == str(error):
                    raise error from None
                raise NotApplicable(f"{error}\notherwise: {second}") from second


def name_of(network: str, seed: int, key: str = TRAINING) -> str:
    """The name of a step in the study."""
    return f"{network}-s{seed} {key}"


Each: TypeAlias = Callable[..., Iterable[Any]]


@contextmanager
def pool(workers: int) -> Iterator[Each]:
    """The `map` of so many processes, each with a share of the threads; with one worker `map` itself.

    They end with this process, also if it is killed. What they call must keep what is finished, which is all that is
    left of calls that run at an error.

    Raises:
        RuntimeError: one of them died.
    """
    if workers == 1:
        yield map
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (workers,))
    try:
        yield executor.map
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {workers} workers died (out of memory?); what is finished is kept, run again with fewer"
        ) from error
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        executor.shutdown(cancel_futures=True)  # its thread waits for the processes: two that do see one living on


def _begin(workers: int) -> None:
    """Leave Ctrl-C to the parent, end with it, and take a share of the threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from landscape.subject.threads import thread_limit

    torch.set_num_threads(max(1, thread_limit() // workers))


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
