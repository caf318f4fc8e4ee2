"""Carry a study out: train its networks, measure them, write the table; what is done is kept and not repeated."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xarray as xr

from landscape.options import format_duration
from landscape.probe import NotApplicable
from landscape.reporting.progress import Progress as Bar
from landscape.reporting.progress import say
from landscape.results.replacing import write_text
from landscape.statistics.intervals import LEVEL
from landscape.statistics.means import mean_and_standard_error
from landscape.statistics.paired import Difference, by_error
from landscape.statistics.rounding import interval
from landscape.statistics.seed_groups import holm, mean_interval, two_groups
from landscape.studies import merged
from landscape.studies.claims import Claim, findings, markdown, markdown_table, protocol, run_folder
from landscape.studies.correlations import Correlation, correlation
from landscape.studies.correlations import table as table_of_correlations
from landscape.studies.edge_of_stability import SERIES, followed, table_of
from landscape.studies.study import Cell
from landscape.studies.study_file import StudyFile

Train: TypeAlias = Callable[..., Path]
STATE = "study.json"


@dataclass
class Progress:
    """What a study has done, kept in its folder: seconds by step, samples by step, and trainings that diverged."""

    title: str
    seconds: dict[str, float] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    diverged: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # measurements that do not apply to a network

    @classmethod
    def of(cls, study: StudyFile, out: Path) -> Progress:
        """The progress that a folder holds.

        Raises:
            ValueError: it is that of another study.
        """
        file = out / STATE
        if not file.exists():
            return cls(study.title)
        try:
            made = cls(**json.loads(file.read_text()))
        except (TypeError, ValueError):
            raise ValueError(
                f"{file} cannot be read; remove it, and what {out} holds is measured no second time"
            ) from None
        if made.title != study.title:
            raise ValueError(f"{out} holds the study {made.title!r}, not {study.title!r}; give this one another --out")
        return made

    def write(self, out: Path) -> None:
        """Keep it."""
        write_text(out / STATE, json.dumps(vars(self), indent=1) + "\n")

    def state(self, step: str) -> str:
        """Whether a step is done, is left, or has nothing to be done, in words."""
        if any(step.startswith(training.removesuffix("training")) for training in self.diverged):
            return "diverged"
        return "does not apply" if step in self.left_out else "done" if step in self.seconds else "left"

    def left(self, steps: Sequence[str]) -> float:
        """Expected seconds of some steps, each as the mean of those of its kind; NaN without any of one."""
        means: dict[str, float] = {}
        for kind in {_kind(step) for step in steps}:
            own = [seconds for step, seconds in self.seconds.items() if _kind(step) == kind]
            means[kind] = sum(own) / len(own) if own else math.nan
        return sum(means[_kind(step)] for step in steps)


class Conducted(NamedTuple):
    """What a study gives."""

    text: str  # its table
    wrong: list[str]  # expressions without a value
    correlations: list[Correlation]


def steps_of(study: StudyFile, claims: Sequence[Claim]) -> list[str]:
    """The names of all steps in order: of every seed the trainings, then the measurements."""
    cells = study.cells(claims)
    steps = []
    for seed in study.seeds:
        own = [name for name, one in study.networks.items() if seed in one.seeds and name in {n for n, _ in cells}]
        steps += [_step(name, seed, "training") for name in own if study.networks[name].model]
        steps += [_step(name, seed, key) for name, key in cells if name in own]
    return steps


def conduct(
    study: StudyFile, out: Path, *, train: Train, measure: Callable[..., xr.Dataset], results: Path | None = None,
    table: Path | None = None, claims: Sequence[Claim] | None = None, device: str = "auto", quiet: bool = False,
    measured: bool = True,
) -> Conducted:  # fmt: skip
    """Train and measure what is left, write the table after every seed.

    `train` is called with model, data, fields of the recipe and the options of `training.train`; `measure` as
    `landscape.measure`. Trainings that diverge stay in the study without numbers.

    Raises:
        ValueError: the folder holds another study, the data changed, or no measurement applies to any network.
    """
    out.mkdir(parents=True, exist_ok=True)
    claims = study.claims if claims is None else claims
    run = _Run(study, out, results or out / "results.h5", train, measure, device, quiet, Progress.of(study, out))
    run.steps, text = steps_of(study, claims), ""
    with Bar(study.title, quiet=quiet, lines=False) as run.bar:
        for position, seed in enumerate(study.seeds):
            run.train_all(seed, [name for name, _ in study.cells(claims)])
            if measured:
                run.seeds.append(run.measure_all(seed, study.cells(claims)))
                run.wrong.clear()
                text = _text(run, study.seeds[: position + 1], claims)
                write_text(table or out / "study.md", text)
    if (why := list(run.progress.left_out.values())) and not any(run.seeds):
        raise ValueError(f"nothing to measure: {why[0]}")
    return Conducted(text, list(dict.fromkeys(run.wrong)), run.correlated)


@dataclass
class _Run:
    study: StudyFile
    out: Path
    results: Path
    train: Train
    measure: Callable[..., xr.Dataset]
    device: str
    quiet: bool
    progress: Progress
    steps: list[str] = field(default_factory=list)
    position: int = 0  # of the step that runs
    bar: Callable[[float, int], object] = max
    seeds: list[dict[Cell, xr.Dataset]] = field(default_factory=list)  # results of each
    wrong: list[str] = field(default_factory=list)  # expressions without a value
    correlated: list[Correlation] = field(default_factory=list)

    def part(self, finished: int, total: int) -> None:
        """Show how far the study is, with the finished epochs or units of the step that runs."""
        self.bar(self.position + finished / max(total, 1), len(self.steps))

    def train_all(self, seed: int, names: Sequence[str]) -> None:
        """Train every network of a seed, unless it is trained."""
        from landscape.training.train import Diverged

        study = self.study
        for name in dict.fromkeys(names):
            one, step = study.networks[name], _step(name, seed, "training")
            if not one.model or seed not in one.seeds or step in self.progress.diverged:
                continue
            folder = run_folder(self.out, name, seed)
            began, there = time.monotonic(), (folder / "final.pt").exists()
            try:
                self.train(
                    one.model, study.data, dict(one.overrides), recipe=one.recipe, seed=seed, fraction=one.fraction,
                    out=folder, model_args=one.model_args, data_root=study.data_root,
                    device=self.device, quiet=self.quiet, report=self.part,
                )  # fmt: skip
            except Diverged as error:
                self.progress.diverged[step] = str(error)
                say(f"note: {name}, seed {seed} diverged: {error}", quiet=self.quiet)
            self._done(step, began, anew=not there)

    def measure_all(self, seed: int, cells: Sequence[Cell]) -> dict[Cell, xr.Dataset]:
        """The results of a seed, each from the file or, where that lacks it, by measuring it."""
        found: dict[Cell, xr.Dataset] = {}
        for name, key in cells:
            one, step, began = self.study.networks[name], _step(name, seed, key), time.monotonic()
            if seed not in one.seeds or _step(name, seed, "training") in self.progress.diverged:
                continue
            try:
                found[name, key] = self._result(name, seed, key)
            except NotApplicable as error:
                self.progress.left_out[step] = str(error)
                self.progress.write(self.out)
                say(f"note: {key} of {name} is left out: {error}", quiet=self.quiet)
                continue
            self._check_samples(step, str(found[name, key].attrs.get("data_sha256", "")))
            left = self._done(step, began, anew=step not in self.progress.seconds)
            took = format_duration(time.monotonic() - began)
            say(f"{name}{f', seed {seed}' if one.label is None else ''}: {key} in {took}{left}", quiet=self.quiet)
        return found

    def _result(self, name: str, seed: int, key: str) -> xr.Dataset:
        study, one = self.study, self.study.networks[name]
        if one.full_batch:
            return followed(
                name, one.full_batch, data=study.data, data_root=study.data_root, seed=seed, device=self.device,
                out=self.results,
            )  # fmt: skip
        how: dict[str, Any] = {"data_root": study.data_root, "device": self.device, "out": self.results}
        if one.files and study.data:
            how = {"data": study.data, **how}
        how, measurement = how | merged(study.load, one.load), study.measurements[key]
        label = f"{name}-s{seed}" if one.label is None else one.label
        checkpoint, measure = one.file(self.out, seed, measurement.snapshot), partial(self.measure, report=self.part)
        try:
            return measurement.of(checkpoint, label, measure, **how)
        except NotApplicable:
            if not measurement.otherwise:
                raise
            other = replace(measurement, options=merged(measurement.options, measurement.otherwise))
            with contextlib.suppress(ValueError):
                return other.of(checkpoint, label, measure, **how)
            raise

    def _check_samples(self, step: str, samples: str) -> None:
        if samples and self.progress.samples.setdefault(step, samples) != samples:
            raise ValueError(f"the data changed since {step} was measured; restore it, or give another --out")

    def _done(self, step: str, began: float, *, anew: bool) -> str:
        """Keep that a step is done; how many are left, and for how long, in words."""
        if anew:
            self.progress.seconds[step] = round(time.monotonic() - began, 3)
            self.progress.write(self.out)
        self.position = position = self.steps.index(step) + 1
        self.part(0, 1)
        rest = [one for one in self.steps[position:] if self.progress.state(one) == "left"]
        seconds = self.progress.left(rest)
        about = f", about {format_duration(seconds)} left" if math.isfinite(seconds) and rest else ""
        return f" ({position} of {len(self.steps)}{about})"


def _step(network: str, seed: int, key: str) -> str:
    return f"{network}-s{seed} {key}"


def _kind(step: str) -> str:
    """What steps that take about as long have in common."""
    return step.partition(" ")[2]


def _text(run: _Run, seeds: Sequence[int], claims: Sequence[Claim]) -> str:
    """The whole table: protocol, trainings that are followed, numbers, comparisons, claims."""
    study = run.study
    networks = [study.networks[name] for name in dict.fromkeys(name for name, _ in study.cells(claims))]
    trained = [one for one in networks if not one.full_batch]
    text = protocol(study.title, study.about, trained, run.out, data=study.data, train=study.train, seeds=seeds)
    series = {one.name: one.full_batch for one in networks if one.full_batch}
    text += table_of(series, [one for one in run.seeds if all((name, SERIES) in one for name in series)])
    values = {
        (number, one.name): [_value(run, one.name, seed, number, of) for seed, of in zip(seeds, run.seeds, strict=True)]
        for number in study.numbers for one in trained
    }  # fmt: skip
    if values:
        rows = [
            (name, *(_mean(values[number, name]) for number in study.numbers)) for name in (t.name for t in trained)
        ]
        text += "\n".join(["", "Means over seeds [95 %]:", "", *markdown(("network", *study.numbers), rows), ""])
    for names, numbers in study.compare:
        text += _compared(names, numbers, values)
    groups = {name: study.networks[name].group for name in study.networks}
    run.correlated = [
        correlation(names, {name: groups[name] for name in of}, values)
        for names, of in study.correlations if all((names[0], name) in values for name in of)
    ]  # fmt: skip
    text += table_of_correlations(run.correlated)
    if run.progress.diverged:
        text += f"\nDiverged: {len(run.progress.diverged)} ({', '.join(run.progress.diverged)}).\n".replace(
            " training", ""
        )
    if not claims:
        return text
    decided = findings(claims, run.seeds)
    run.wrong += [wrong for one in decided for wrong in one.wrong]
    return text + "\n" + markdown_table(decided)


def _value(run: _Run, network: str, seed: int, number: str, results: dict[Cell, xr.Dataset]) -> float:
    """A number of a network; NaN where its results are not there, or it has no value, which is said at the end."""
    if not all(need in results for need in run.study.needs(network, number)):
        return math.nan
    try:
        return float(run.study.scope(network, results)[number])
    except ValueError as error:
        run.wrong.append(f"{network}, seed {seed}: {error}")
        return math.nan


def _mean(values: Sequence[float]) -> str:
    known = np.array([value for value in values if math.isfinite(value)])
    return interval(*mean_interval(known)) if len(known) else "not measured"


def _compared(names: Sequence[str], numbers: Sequence[str], values: dict[tuple[str, str], list[float]]) -> str:
    """Differences of two networks in some numbers, paired by seed where both have two or more."""
    found: list[Difference] = []
    for number in numbers:
        pairs = np.array([values[number, name] for name in names], dtype=float)
        both = pairs[:, np.isfinite(pairs).all(axis=0)]
        if both.shape[1] > 1:
            mean, error = mean_and_standard_error(both[0] - both[1])
            found.append(by_error(float(mean), float(error), both.shape[1], "Student's t over pairs of one seed"))
        else:
            found.append(two_groups(*(row[np.isfinite(row)] for row in pairs)))
    rows = []
    for number, one, p in zip(numbers, found, holm([one.p for one in found]), strict=True):
        verdict = "seeds are missing" if math.isnan(p) else "real" if p < 1 - LEVEL else "cannot be told apart"
        rows.append((number, interval(one.value, one.low, one.high, sign=True), f"{p:.2g}", f"**{verdict}**"))
    head = (f"{names[0]} - {names[1]}", "difference [95 %], paired by seed", "p (Holm)", "verdict")
    return "\n".join(["", *markdown(head, rows), ""])
