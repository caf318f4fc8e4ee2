"""Carry a study out: train its networks, measure them, write the table; what is done is kept and not repeated."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xarray as xr

from landscape.options import format_duration, listed
from landscape.reporting.progress import Progress as Bar
from landscape.reporting.progress import say
from landscape.results.replacing import write_text
from landscape.statistics import rounding, seed_groups
from landscape.statistics.intervals import LEVEL
from landscape.statistics.means import mean_and_standard_error
from landscape.statistics.paired import Difference, by_error
from landscape.studies.claims import Claim, findings, markdown, markdown_table, protocol
from landscape.studies.correlations import Correlation, Diagram, correlation, correlation_table, diagram, diagram_table
from landscape.studies.edge_of_stability import SERIES, table_of
from landscape.studies.network_tables import with_keys
from landscape.studies.steps import TRAINING, Done, Setting, Step, Train, name_of
from landscape.studies.study import Cell
from landscape.studies.study_file import StudyFile

STATE = "study.json"
LEFT, CHANGED = "left", "the file changed"  # states of steps that are not done


@dataclass
class Progress:
    """What a study has done, kept in its folder: seconds by step, samples by step, and trainings that diverged."""

    title: str
    seconds: dict[str, float] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    diverged: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # measurements that do not apply to a network
    asked: dict[str, str] = field(default_factory=dict)  # digests of what the file says of each step
    changed: list[str] = field(default_factory=list)  # steps that are done as the file was before

    @classmethod
    def of(cls, study: StudyFile, out: Path) -> "Progress":
        """The progress that a folder holds; steps of which the file says something else by now are not done.

        Raises:
            ValueError: it is that of another study.
        """
        file = out / STATE
        try:
            made = cls(**json.loads(file.read_text())) if file.exists() else cls(study.title)
        except (TypeError, ValueError):
            raise ValueError(
                f"{file} cannot be read; remove it, and what {out} holds is measured no second time"
            ) from None
        if made.title != study.title:
            raise ValueError(f"{out} holds the study {made.title!r}, not {study.title!r}; give this one another --out")
        asked = {
            name_of(name, seed, key): study.question(name, key)
            for name, one in study.networks.items() for key in (TRAINING, SERIES, *study.measurements)
            for seed in one.seeds
        }  # fmt: skip
        changed = [step for step, new in asked.items() if made.asked.get(step, new) != new]
        made.changed = list(dict.fromkeys([*made.changed, *changed]))
        for step in made.changed:
            for known in (made.seconds, made.samples, made.diverged, made.left_out):
                known.pop(step, None)
        made.asked |= asked
        return made

    def write(self, out: Path) -> None:
        write_text(out / STATE, json.dumps(vars(self), indent=1) + "\n")

    def state(self, step: str) -> str:
        """Whether a step is done, is left, or has nothing to be done, in words."""
        if any(step.startswith(training.removesuffix("training")) for training in self.diverged):
            return "diverged"
        if step in self.changed:
            return CHANGED
        return "does not apply" if step in self.left_out else "done" if step in self.seconds else LEFT

    def in_words(self, steps: Sequence[str]) -> str:
        """How many of some steps are done, how many are left and for how long, and which of these the file changed."""
        left = [step for step in steps if self.state(step) in (LEFT, CHANGED)]
        text = f"{len(steps) - len(left)} of {len(steps)} steps done, {len(left)} left{self.about(left)}"
        changed = [step for step in left if step in self.changed]
        if changed:
            text += f"; the file has changed for {listed(changed)}, measured anew by study run"
        if any(step.endswith(f" {TRAINING}") for step in changed):
            text += "; a network that is trained otherwise needs another name, or the study another --out"
        return text

    def about(self, steps: Sequence[str]) -> str:
        """The expected time of some steps in words, each as the mean of those of its kind; none without any of one."""
        known: dict[str, list[float]] = {}
        for step, seconds in self.seconds.items():
            known.setdefault(_kind(step), []).append(seconds)
        if not steps or not known.keys() >= set(map(_kind, steps)):
            return ""
        return f", about {format_duration(sum(float(np.mean(known[_kind(step)])) for step in steps))}"


class Conducted(NamedTuple):
    """What a study gives."""

    text: str = ""  # its table
    wrong: Sequence[str] = ()  # expressions without a value
    correlations: Sequence[Correlation] = ()
    diagrams: Sequence[Diagram] = ()


def steps_of(study: StudyFile, claims: Sequence[Claim]) -> list[str]:
    """The names of all steps in order: of every seed the trainings, then the measurements."""
    steps, cells = [], study.cells(claims)
    for seed in study.seeds:
        steps += [name_of(*network) for network in study.trained(cells, seed)]
        steps += [name_of(name, seed, key) for name, key in cells if seed in study.networks[name].seeds]
    return list(dict.fromkeys(steps))


def conduct(
    study: StudyFile, out: Path, *, train: Train, measure: Callable[..., xr.Dataset], results: Path | None = None,
    table: Path | None = None, claims: Sequence[Claim] | None = None, device: str = "auto", quiet: bool = False,
    measured: bool = True, each: Callable[..., Iterable[Done]] = map, options: Mapping[str, str] | None = None,
) -> Conducted:  # fmt: skip
    """Train and measure what is left, write the table after every seed.

    `train` is called with model, data, fields of the recipe and the options of `training.train`; `measure` as
    `landscape.measure`. Trainings that diverge stay in the study without numbers. `each` is `map`, or that of a pool of
    processes, which carries out several steps at once: all trainings, then all measurements. `options`: as of
    `options_instead`, for notes.

    Raises:
        ValueError: the folder holds another study, the data changed, or no measurement applies to any network.
    """
    out.mkdir(parents=True, exist_ok=True)
    claims = study.claims if claims is None else claims
    setting = Setting(
        out, results or out / "results.h5", study.data, study.data_root, study.load, device, quiet, train, measure
    )
    run = _Run(study, out, setting, each, quiet, Progress.of(study, out), options or {})
    run.steps, cells, found = steps_of(study, claims), study.cells(claims), Conducted()
    with Bar(study.title, quiet=quiet, lines=False) as run.bar:
        for seeds in [[seed] for seed in study.seeds] if each is map else [study.seeds]:
            run.train_all(seeds, cells)
            for results_of_seed in run.measure_all(seeds, cells) if measured else ():
                run.seeds.append(results_of_seed)
                found = _found(run, claims)
                write_text(table or out / "study.md", found.text)
                for wrong in found.wrong if len(run.seeds) == 1 else ():  # the others take their time
                    say(f"note: {wrong}; correct the file at any time, nothing is measured twice", quiet=quiet)
    if (why := list(run.progress.left_out.values())) and not any(run.seeds):
        raise ValueError(f"nothing to measure: {why[0]}")
    return found


@dataclass
class _Run:
    study: StudyFile
    out: Path
    setting: Setting
    each: Callable[..., Iterable[Done]]
    quiet: bool
    progress: Progress
    options: Mapping[str, str]
    steps: list[str] = field(default_factory=list)
    position: int = 0  # of the step that runs
    bar: Callable[[float, int], object] = max
    trained: set[tuple[str, int]] = field(default_factory=set)  # networks with their seeds
    seeds: list[dict[Cell, xr.Dataset]] = field(default_factory=list)  # results of each

    def part(self, finished: int, total: int) -> None:
        """Show how far the study is, with the finished epochs or units of the step that runs."""
        self.bar(self.position + finished / max(total, 1), len(self.steps))

    def train_all(self, seeds: Sequence[int], cells: Sequence[Cell]) -> None:
        """Train every network of some seeds, unless it is trained."""
        wanted = dict.fromkeys(pair for seed in seeds for pair in self.study.trained(cells, seed))
        steps = [Step(self.study.networks[name], seed) for name, seed in wanted if (name, seed) not in self.trained]
        for step, done in self._carried_out([step for step in steps if step.name not in self.progress.diverged]):
            if done.why:
                self.progress.diverged[step.name] = said = with_keys(done.why, self.options)
                say(f"note: {step.network.name}, seed {step.seed} diverged: {said}", quiet=self.quiet)
            self._done(step, done.seconds, anew=done.anew)
        self.trained |= wanted.keys()

    def measure_all(self, seeds: Sequence[int], cells: Sequence[Cell]) -> Iterator[dict[Cell, xr.Dataset]]:
        """The results of every seed, each from the file or, where that lacks it, by measuring it."""
        steps = {seed: [step for cell in cells if (step := self._step(*cell, seed))] for seed in seeds}
        outcomes = iter(self._carried_out([step for of_seed in steps.values() for step in of_seed]))
        for of_seed in steps.values():
            found: dict[Cell, xr.Dataset] = {}
            for step, done in islice(outcomes, len(of_seed)):
                name, key = step.network.name, step.key
                if done.result is None:
                    self.progress.left_out[step.name] = said = with_keys(done.why, self.options)
                    self.progress.write(self.out)
                    for why in said.splitlines():
                        say(f"note: {key} of {name} is left out: {why}", quiet=self.quiet)
                    continue
                found[name, key] = done.result
                self._check_samples(step.name, str(done.result.attrs.get("data_sha256", "")))
                left = self._done(step, done.seconds, anew=step.name not in self.progress.seconds)
                of = f", seed {step.seed}" if step.network.label is None else ""
                say(f"{name}{of}: {key} in {format_duration(done.seconds)}{left}", quiet=self.quiet)
            yield found

    def _carried_out(self, steps: Sequence[Step]) -> Iterable[tuple[Step, Done]]:
        work = partial(self.setting, report=self.part) if self.each is map else self.setting
        return zip(steps, self.each(work, steps), strict=True)

    def _step(self, name: str, key: str, seed: int) -> Step | None:
        """A measurement; None without such a seed, or where the training of a network in it diverged."""
        study, one = self.study, self.study.networks[name]
        if seed not in one.seeds:
            return None
        measurement, partners = study.measurements.get(key), study.partners(name, key, seed)
        if any(name_of(*network) in self.progress.diverged for network in [(name, seed), *partners]):
            return None
        snapshot = measurement.snapshot if measurement else ""
        others = tuple(study.networks[other].file(self.out, of, snapshot) for other, of in partners)
        return Step(one, seed, key, measurement, others)

    def _check_samples(self, step: str, samples: str) -> None:
        if samples and self.progress.samples.setdefault(step, samples) != samples:
            raise ValueError(f"the data changed since {step} was measured; restore it, or give another --out")

    def _done(self, step: Step, seconds: float, *, anew: bool) -> str:
        """Keep that a step is done; how many are left, and for how long, in words."""
        if anew:
            self.progress.seconds[step.name] = round(seconds, 3)
            self.progress.changed = [one for one in self.progress.changed if one != step.name]
            self.progress.write(self.out)
        self.position = position = self.steps.index(step.name) + 1
        self.part(0, 1)
        rest = [one for one in self.steps[position:] if self.progress.state(one) in (LEFT, CHANGED)]
        about = self.progress.about(rest)
        return f" ({position} of {len(self.steps)}{about}{' left' * bool(about)})"


def _kind(step: str) -> str:
    """What steps that take about as long have in common."""
    return step.partition(" ")[2]


def _found(run: _Run, claims: Sequence[Claim]) -> Conducted:
    """What the seeds so far give; the table has protocol, followed trainings, numbers, comparisons, claims."""
    study, seeds = run.study, run.study.seeds[: len(run.seeds)]
    networks = [study.networks[name] for name in dict.fromkeys(name for name, _ in study.cells(claims))]
    trained = [one for one in networks if not one.full_batch]
    without: dict[str, list[str]] = {}
    values = {
        (number, one.name): [_value(run, one.name, number, i, without) for i in range(len(seeds))]
        for number in study.numbers for one in trained
    }  # fmt: skip
    correlations = [
        correlation(names, {name: study.networks[name].group for name in of}, values)
        for names, of in study.correlations if all((names[0], name) in values for name in of)
    ]  # fmt: skip
    diagrams = [
        diagram(number, over, base, {one.name: one.at for one in trained if one.base == base}, values)
        for number, over, base in study.diagrams
    ]  # fmt: skip
    series = {one.name: one.full_batch for one in networks if one.full_batch}
    text = protocol(study.title, study.about, trained, run.out, data=study.data, train=study.train, seeds=seeds)
    text += table_of(series, [one for one in run.seeds if all((name, SERIES) in one for name in series)])
    if values:
        rows = [(one.name, *(_mean(values[number, one.name]) for number in study.numbers)) for one in trained]
        text += "\n".join(["", "Means over seeds [95 %]:", "", *markdown(("network", *study.numbers), rows), ""])
    text += "".join(_compared(names, numbers, values) for names, numbers in study.compare)
    text += correlation_table(correlations) + "".join(map(diagram_table, diagrams))
    if diverged := [step.removesuffix(f" {TRAINING}") for step in run.progress.diverged]:
        text += f"\nDiverged: {len(diverged)} ({', '.join(diverged)}).\n"
    wrong = [f"{where[0]}{f' and {len(where) - 1} more' * (len(where) > 1)}: {why}" for why, where in without.items()]
    if claims:
        decided = findings(claims, run.seeds)
        wrong += [why for one in decided for why in one.wrong]
        text += "\n" + markdown_table(decided)
    return Conducted(text, list(dict.fromkeys(wrong)), correlations, diagrams)


def _value(run: _Run, network: str, number: str, i: int, without: dict[str, list[str]]) -> float:
    """A number of a network with the i-th seed; NaN where its results are not there, or it has no value: why, where."""
    results = run.seeds[i]
    if not all(need in results for need in run.study.needs(network, number)):
        return math.nan
    try:
        return float(run.study.scope(network, results)[number])
    except ValueError as error:
        without.setdefault(str(error), []).append(f"{network}, seed {run.study.seeds[i]}")
        return math.nan


def _mean(values: Sequence[float]) -> str:
    known = np.array([value for value in values if math.isfinite(value)])
    return rounding.interval(*seed_groups.mean_interval(known)) if len(known) else "not measured"


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
            found.append(seed_groups.two_groups(*(row[np.isfinite(row)] for row in pairs)))
    rows = []
    for number, one, p in zip(numbers, found, seed_groups.holm([one.p for one in found]), strict=True):
        untested = "seeds are missing" if not one.method else "no spread over seeds" if one.value else "equal"
        verdict = untested if math.isnan(p) else "real" if p < 1 - LEVEL else "cannot be told apart"
        shown = "" if math.isnan(p) else f"{p:.2g}"
        value = "" if math.isnan(one.value) else rounding.interval(one.value, one.low, one.high, sign=True)
        rows.append((number, value, shown, f"**{verdict}**"))
    head = (f"{names[0]} - {names[1]}", "difference [95 %], paired by seed", "p (Holm)", "verdict")
    return "\n".join(["", *markdown(head, rows), ""])
