"""Measure sharpness, gradient noise and distance in the middle of a training run, which goes on as if alone."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from landscape.monitoring import followed_model, gradients, shards, stored_series
from landscape.monitoring.budget import Budget, Kind
from landscape.monitoring.measurement import Measurement, optimizer_in_use
from landscape.options import at_least, first_line, require
from landscape.results import reader, series
from landscape.subject.loading.load import measuring
from landscape.subject.optimizer_rules import parts_of, rule_of

if TYPE_CHECKING:
    import xarray as xr


CHECKED = 20  # every so many measurements one is checked by a random start
FAILURES = 3  # measurements in a row that may fail before the monitor stops
MERGE_SECONDS = 30.0  # between two merges of the journal into the file, at least
MERGES = 0.05  # share of the overhead that merging may take; a kill loses no row of the journal
_log = logging.getLogger(__name__)


class Monitor(contextlib.AbstractContextManager["Monitor"]):
    """Measures a model every so many steps of a training run and writes a series into a results file.

    Two lines in a training loop::

        monitor = landscape.Monitor(model, loss, batch, every=100, out="run.h5")
        for inputs, targets in loader:
            ...
            optimizer.step()
            monitor.step()

    Measured on `batch`, in evaluation mode and in full precision: the largest eigenvalues of the Hessian, the norm of
    the gradient and its noise scale, and the distance from the weights at the start; with `optimizer` also its learning
    rate, its stability threshold and the eigenvalues that it sees (`curvature.preconditioner`). Weights, gradients,
    buffers, modes, hooks, the global random generators and autocast are left as found: the training is the same, bit
    for bit.

    Step t is the state after t updates; that at the construction is measured there, so that what cannot be measured
    fails at once. Later a measurement that fails says so and is left out; the training goes on.

    Under DistributedDataParallel every process makes a monitor, and that of rank 0 measures and writes; models in
    wrappers are unwrapped, compiled ones too. Under FSDP2 (`fully_shard`) all processes measure together, see
    `shards.Shards`, without eigenvalues and norm sharpness: weights are freed after a backward pass, and Hessian
    products need them in a second one.

    Args:
        model: in training, on its device.
        loss: mean loss as a function of (outputs, targets), (outputs, batch) or (model, batch), as its parameters are
            named; or the name of one, see `landscape.load`.
        batch: one mini-batch as the training's loader gives it, that all steps are measured on; the whole training set
            where the edge of stability of full-batch training is of interest.
        every: steps between two measurements.
        out: results file; several runs may write into one.
        data: what `batch` was taken from, as figures and tables name it; it changes no number.
        label: name of the run, default the class of the model. A run of the same name in the same file gets a number.
        optimizer: of the training, any, or a list of several. An adaptive one whose threshold is known (Adam, AdamW,
            Adamax, RMSprop, Adagrad) costs a second search.
        top: eigenvalues per measurement.
        noise: parts of the mini-batch whose gradients give the noise scale beside eigenvalues; 0 leaves it out, also
            that of accumulated micro-batches, which comes without a pass (`micro_batches`).
        tol: largest estimated relative error of an eigenvalue.
        overhead: share of the training time that measurements may take; steps are left out to keep within it, which is
            said once, see `budget.Budget`. `math.inf` leaves out none.
        start: updates made before this process; a run that resumes from a checkpoint gives the checkpoint's step. Its
            series in `out` goes on from there: rows after that step are dropped, and the distance stays that from the
            first start (from a sketch of its weights, see `distance.Start`).
        seed: of the random start vectors.
        overwrite: a run from step 0 takes the place of the last one of its name.
        other: a second mini-batch, whose critical sharpness along the same update is measured too.
        on_row: called with every row, its finite numbers by name and its `step`; of eigenvalues the largest. One that
            raises is warned of once, and the run goes on.

    Raises:
        OptionError, ValueError, OSError: one line that says what was got, what was expected and what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[..., Any] = "",
        batch: Any = None,
        *,
        every: int = 100,
        out: Path | str = "run.h5",
        data: str = "",
        label: str = "",
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        top: int = 1,
        noise: int = 4,
        tol: float = 5e-3,
        overhead: float = 0.02,
        start: int = 0,
        seed: int = 0,
        overwrite: bool = False,
        other: Any = None,
        on_row: Callable[[dict[str, float]], object] | None = None,
    ) -> None:
        for name, value, least in (("every", every, 1), ("top", top, 1), ("noise", noise, 0), ("start", start, 0)):
            at_least(name, value, least)
        require(overhead > 0, "overhead", overhead, "above 0; math.inf leaves out no step")
        given, optimizer = optimizer, optimizer_in_use(optimizer)
        known = given is None or optimizer is not None
        require(known, "optimizer", type(given).__name__, "an optimiser of PyTorch, or a list of several")
        require(0 < tol < 1, "tol", tol, "above 0 and below 1")
        self.every, self.number, self._start, self._on_row = every, start, start, on_row
        self._skipped, self._failures, self._measured, self._said = 0, 0, 0, False
        self._passes: gradients.Passes | None = None
        self._noise = deque[tuple[float, float]](maxlen=gradients.UPDATES if noise else 0)  # of the last updates
        self._warning = stored_series.EarlyWarning()
        self._writer: series.SeriesWriter | None = None
        self._module = module = followed_model.followed(model)
        self._updates, self._shards = followed_model.UpdatesSeen(module), shards.Shards(model)
        main = not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0
        self._active = main or self._shards.divided
        for part in parts_of(optimizer):
            rule_of(part)  # in every process: the steps of one that recognise it may be collective
        if self._active:
            settings = {"every": every, "overhead": overhead, "top": top, "noise": noise, "tol": tol, "seed": seed}
            with self._shards.gathered_anew():
                self._subject = followed_model.subject_of(module, loss, batch, label, other)
            self._budget = Budget(overhead, self._subject.device)
            with measuring(self._subject), self._shards.gathered_anew():
                if other is not None:
                    followed_model.check_other(self._subject)
                begun = gradients.Start(self._subject.parameters, self._shards, start)
                if main:
                    place = stored_series.Place(Path(out), start, overwrite=overwrite)
                    self._writer = stored_series.opened(place, self._subject, optimizer, begun, settings, data)
                    self._finalizer = weakref.finalize(self, _close, self._writer, os.getpid())
                    self._finalizer.atexit = False  # by then HDF5 is closed; what `atexit` holds runs before that
                    atexit.register(self._finalizer)
            self._measurement = Measurement(self._subject, begun, optimizer, top=top, parts=noise, tol=tol, seed=seed)
            self._merge_at = self._budget.now() + MERGE_SECONDS
            if start % every == 0:
                self._measure("check")
        self._prepare()

    def step(self, number: int | None = None) -> None:
        """Count an update, and measure after every `every`-th; call it behind `optimizer.step()`.

        A call before which the optimiser has made no update does not count: calls for each part of an accumulated
        gradient, and two calls in one step, are harmless. `number` gives the number of updates so far in place of the
        monitor's own count.
        """
        updated, rate = self._updates.since_last_call()
        before, self.number = self.number, max(self.number, self.number + updated if number is None else number)
        if self.number == before:
            return
        if self.number // self.every != before // self.every:
            passes, self._passes = self._passes, None
            self._noise.extend(passes.taken() if passes is not None else [])
            if self._active:
                self._on_grid(rate)
        self._prepare()

    def _on_grid(self, rate: float) -> None:
        """Measure what the budget allows."""
        kinds: tuple[Kind, ...] = ("eigenvalues" if self._measured % CHECKED else "check", "row")
        kind = next(filter(self._allowed, kinds), None)
        if kind is None:
            self._say_when()
            self._skipped += 1
            return
        try:
            self._measure(kind, rate)
            self._failures = 0
        except Exception as error:  # whatever the caller's model, loss and data raise
            self._failed(error)

    def _allowed(self, kind: Kind) -> bool:
        """Whether the budget allows it; of divided weights all processes measure, or none."""
        return not self._shards.total(not self._budget.allows(kind, self.every * self._seconds()))

    def _seconds(self) -> float:
        """Of a training step, on average."""
        return self._budget.training / max(self.number - self._start, 1)

    def _prepare(self) -> None:
        """Keep the weights where the next update is one to measure."""
        if (self.number + 1) // self.every == self.number // self.every:
            return
        if self._active:
            with self._budget.beside():
                self._measurement.before_update()
        if self._noise.maxlen:
            self._passes = gradients.Passes(self._module, self._shards)

    def data(self) -> xr.Dataset:
        """The series so far, as `landscape.open` returns it.

        Raises:
            ValueError: this process does not write it, being none of rank 0.
        """
        if self._writer is None:
            raise ValueError("only the process of rank 0 measures; read the series there")
        if self._finalizer.alive:
            self._writer.merge()
        return reader.result(self._writer.path, self._writer.group)

    def close(self) -> None:
        """Write the series to its end; done by itself when the process ends or the monitor is no longer used."""
        self._active = False
        self._updates.forget()
        if self._passes is not None:
            self._passes.hooks.close()
        if self._writer is not None:
            self._finalizer()
            atexit.unregister(self._finalizer)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _measure(self, kind: Kind, rate: float = math.nan) -> None:
        budget = self._budget
        timing = {"training_seconds": budget.training, "skipped": self._skipped}
        with budget.measuring(kind), measuring(self._subject), self._shards.gathered_anew():
            values = self._measurement.at_present(kind, rate)
        timing["seconds"] = budget.last
        self._measured, self._skipped = self._measured + (kind != "row"), 0
        if self._writer is None:
            return
        with budget.beside(kind):
            plan = self._writer.key.plan
            nothing = {n: np.full([len(plan.axes[d]) for d in q.dims], np.nan) for n, q in plan.quantities.items()}
            row = {**nothing, **values, **gradients.pooled(self._noise), **timing}
            changes = (float(row[name]) for name in ("loss", "actual_change", "predicted_change"))
            row["alarm"] = self._warning.alarm(self.number, *changes)
            self._writer.write(self.number, row)
            if (began := budget.now()) >= self._merge_at:
                self._writer.merge()
                seconds = budget.now() - began
                self._merge_at = began + max(MERGE_SECONDS, seconds / (MERGES * budget.overhead))
        if self._on_row is not None:
            first = {name: float(np.ravel(value)[0]) for name, value in row.items()}
            try:
                self._on_row({"step": self.number, **{n: value for n, value in first.items() if math.isfinite(value)}})
            except Exception as error:  # whatever a logger raises
                self._on_row = None
                _log.warning(
                    "warning: on_row raised %s (%s) at step %d and is not called again; the training goes on",
                    type(error).__name__, first_line(error), self.number,
                )  # fmt: skip

    def _say_when(self) -> None:
        """Say once that steps are left out, and which one has the next row."""
        if self._said:
            return
        self._said, seconds = True, self._seconds()
        due = self._budget.due("row", self.every * seconds) / seconds
        due = max(self._start + math.ceil(due), self.number + 1)
        due = -(-due // self.every) * self.every
        _log.warning(
            "note: a row without eigenvalues takes as long as %.2g training steps; to keep within %g %% of the "
            "training time the next one is at about step %d, not at %d; a smaller batch or a larger overhead= has more "
            "rows",
            self._budget.expected("row") / seconds, 100 * self._budget.overhead, due, self.number,
        )  # fmt: skip

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._skipped += 1
        reason = first_line(error)
        if self._shards.divided:
            raise RuntimeError(
                f"step {self.number} is not measured ({reason}), and the training ends: with weights divided among "
                "processes the others would wait for this one; correct it, or train without the monitor"
            ) from error
        stop = self._failures == FAILURES
        _log.warning(
            "warning: step %d is not measured (%s); the training goes on%s", self.number, reason,
            ", without the monitor" if stop else "",
        )  # fmt: skip
        self._active = not stop


def _close(writer: series.SeriesWriter, process: int) -> None:
    """Finish a series, in the process that began it: a worker of a data loader has a copy of the monitor."""
    if os.getpid() == process:
        writer.close()
