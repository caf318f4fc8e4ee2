"""Judge claims: what decides each, how that is measured of trained networks, the verdicts, and their table."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import xarray as xr

from landscape.options import counted
from landscape.probes import probe_class
from landscape.statistics import intervals, means, rounding, seed_groups
from landscape.studies import merged, study

LEAST_SEEDS = 3  # for a verdict: two may agree by chance
RULE = (
    "A claim holds if Student's t test over seeds tells its number apart from zero, at 95 %, on the claimed side, and "
    "fails if on the other side. Otherwise, and with fewer than three seeds, we cannot tell. Intervals are given from "
    f"{intervals.FEWEST} seeds on. Small networks with short training decide little."
)
JOINTLY = {"ends": "along", "pair": "against", "members": "members"}  # option for other checkpoints, by `Probe.several`
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # batch-norm buffers, not parameters
Verdict: TypeAlias = Literal["holds", "fails", "cannot tell"]


@dataclass(frozen=True)
class FullBatch:
    """A training whose sharpness is followed, and the optimiser it is about."""

    optimizer: str  # class of torch.optim
    arguments: Mapping[str, Any]  # of the optimiser
    sharpness: Literal["eigenvalue", "preconditioned"]  # what has a threshold
    steps: int  # updates
    every: int  # updates between two measurements
    images: int = 300
    width: int = 50  # of the two hidden layers


@dataclass(frozen=True)
class Network:
    """A network of a study with a member per seed: trained, followed full batch, or files that are there already."""

    name: str
    model: str = ""  # a trainer's name
    model_args: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[Path | None] = ()  # None: the newest
    seeds: Sequence[int] = ()
    recipe: str = ""
    fraction: float = 1.0  # of the training images
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, with the number of epochs
    full_batch: FullBatch | None = None  # see `edge_of_stability`
    load: Mapping[str, Any] = field(default_factory=dict)  # options that files are loaded with
    group: str = ""  # of networks, for correlations within
    label: str | None = None  # of its results; None: name and seed
    measured: bool = True  # False: it is measured together with others only
    base: str = ""  # the table that it was made of, of one that makes several networks
    at: Mapping[str, Any] = field(default_factory=dict)  # the arguments that they differ in

    def file(self, out: Path, seed: int, snapshot: str = "final.pt") -> Path | None:
        """The checkpoint of a seed."""
        given = self.files[seed] if self.files else run_folder(out, self.name, seed)
        return given if given is None or self.label is not None or given.is_file() else given / snapshot


@dataclass(frozen=True)
class Measurement:
    """What is measured on a snapshot: a probe with its options; "evaluate", on the test split; or "metrics".

    The metrics are those that the trainer stored, on the whole test split. With an option `moving`, the data are
    sequences that a perturbation of that name makes of the test images.
    """

    probe: str
    options: Mapping[str, Any] = field(default_factory=dict)
    snapshot: str = "final.pt"
    networks: Sequence[str] = ()  # of which it is measured; none: of all
    otherwise: Mapping[str, Any] = field(default_factory=dict)  # options where it does not apply with its own
    others: Sequence[str] = ()  # networks that are measured together with each

    def of(
        self, checkpoint: Path | None, label: str, measure: Callable[..., xr.Dataset], *,
        others: Sequence[Path | None] = (), **how: Any,
    ) -> xr.Dataset:  # fmt: skip
        """The result for a checkpoint, from the results file if that holds it; `measure`: as `landscape.measure`."""
        from landscape.checkpoints.checkpoint import read_checkpoint

        out, options = how.pop("out"), merged(how, self.options)
        if others:
            options[JOINTLY[probe_class(self.probe).several]] = ",".join(map(str, others))
        if self.probe == "metrics" and checkpoint is not None:
            return xr.Dataset(read_checkpoint(checkpoint).metrics)
        label = label if self.snapshot == "final.pt" else f"{label}-{Path(self.snapshot).stem}"
        if self.probe == "evaluate":
            return _evaluate(checkpoint, out, label, **options)
        if moving := options.pop("moving", ""):
            options |= _moving_images(checkpoint, moving, **options)
        return measure(self.probe, checkpoint, out=out, label=label, **options)


def _evaluate(checkpoint: Path | None, out: Path, label: str, *, passes: int, **options: Any) -> xr.Dataset:
    from landscape.probes.evaluation import Evaluation
    from landscape.results import reader
    from landscape.running.run import run
    from landscape.subject.loading import load as loading

    outcome = run(Evaluation(passes), loading.load(checkpoint, label=label, **options), out)
    return reader.result(out, outcome.group).sel(passes=passes)


def _moving_images(
    checkpoint: Path | None, perturbation: str, *, samples: int, data_root: Path | None, device: str, **_: Any
) -> dict[str, Any]:
    """The test images of a checkpoint as clips of slowly changing frames, as options of `stream`."""
    from landscape.data import perturbations
    from landscape.subject.loading import load as loading
    from landscape.subject.loading.further_data import images_of

    still = images_of(loading.load(checkpoint, samples=samples, data_root=data_root, device=device), "moving images")
    frames = perturbations.generated(still.inputs.cpu(), perturbation, seed=0)
    clip_length = frames.shape[1]
    targets = still.targets.cpu().repeat_interleave(clip_length)
    moved = still.normalised(frames.flatten(0, 1))
    return {"data": (moved, targets), "samples": "all", "data_root": None, "clip_length": clip_length}


@dataclass(frozen=True)
class Claim:
    """A statement of a paper and the number whose sign decides it."""

    name: str  # for `--claim`
    statement: str
    source: str
    number: str  # what is computed per seed, in words, with its unit
    sign: Literal[-1, 1]  # of the number if the statement is true
    needs: tuple[study.Cell, ...]
    compute: Callable[[study.Results], float]  # the number, from the results it needs
    published: str = "figure only"  # the same number from the paper, if it gives one


@dataclass(frozen=True)
class Finding:
    """A claim with its numbers, one per seed."""

    claim: Claim
    numbers: Sequence[float]
    wrong: Sequence[str] = ()  # why a number is NaN

    @property
    def verdict(self) -> Verdict:
        """See `RULE`."""
        if len(self.numbers) < LEAST_SEEDS:
            return "cannot tell"
        mean, error = means.mean_and_standard_error(np.asarray(self.numbers, dtype=float))
        if not intervals.p_value(mean, error, len(self.numbers)) < 1 - intervals.LEVEL:
            return "cannot tell"
        return "holds" if math.copysign(1, mean) == self.claim.sign else "fails"


def over_seeds(numbers: Sequence[float]) -> str:
    """The mean in words, with half the width of its 95 % interval from four numbers on."""
    mean, error = means.mean_and_standard_error(np.asarray(numbers, dtype=float))
    half = float(intervals.quantile(len(numbers)) * error)
    return rounding.plus_minus(mean, half, 2)


def findings(claims: Iterable[Claim], seeds: Sequence[study.Results]) -> list[Finding]:
    """Every claim with its numbers, one per seed that has all results it needs; NaN where these give none."""
    return [_finding(claim, [one for one in seeds if all(need in one for need in claim.needs)]) for claim in claims]


def _finding(claim: Claim, seeds: Sequence[study.Results]) -> Finding:
    numbers, wrong = [], []
    for results in seeds:
        try:
            numbers.append(claim.compute(results))
        except ValueError as error:
            numbers.append(math.nan)
            wrong.append(f"claim {claim.name}: {error}")
    return Finding(claim, numbers, wrong)


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def markdown_table(findings: Sequence[Finding]) -> str:
    """The findings as a Markdown table, a row per claim, and the number of each verdict below it."""
    head = ("claim", "source", "number", "claimed", "published", "here, 95 % over seeds", "per seed", "verdict")
    rows = [
        (
            one.claim.statement, one.claim.source, one.claim.number, "negative" if one.claim.sign < 0 else "positive",
            one.claim.published, over_seeds(one.numbers) if one.numbers else "not measured",
            ", ".join(f"{number:.3g}" for number in one.numbers), f"**{one.verdict}**",
        )
        for one in findings
    ]  # fmt: skip
    verdicts = [finding.verdict for finding in findings]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(sorted(verdicts, reverse=True)))
    return "\n".join([*markdown(head, rows), "", f"In all: {counts}.", ""])


def protocol(
    title: str,
    about: str,
    networks: Sequence[Network],
    out: Path,
    *,
    data: str,
    train: Mapping[str, Any],
    seeds: Sequence[int],
) -> str:
    """The protocol in words, and a table of the networks with their accuracies."""
    lines = [f"# {title}", "", f"{about} {RULE}".strip()]
    if networks:
        where = f"{seeds[0]} to {seeds[-1]}" if list(seeds) == list(range(len(seeds))) else ", ".join(map(str, seeds))
        share = f"{train['fraction']:g} of the training images" if "fraction" in train else ""
        epochs = counted(train["epochs"], "epoch") if "epochs" in train else ""
        recipe = f"recipe {train['recipe']}" if "recipe" in train else ""
        how = ", ".join(filter(None, (data, f"seeds {where}", share, epochs, recipe)))
        accuracy = "accuracy, mean over seeds (95 % from four seeds on)"
        rows = [_network_row(one, out, [seed for seed in seeds if seed in one.seeds]) for one in networks]
        head = ("network", "model", "parameters", "share of images", "epochs", accuracy)
        lines += ["", f"{how}:", "", *markdown(head, [row for row in rows if row])]
    return "\n".join(lines) + "\n"


def _network_row(network: Network, out: Path, seeds: Sequence[int]) -> Sequence[str]:
    """The row of a trained network; none before one of its seeds is trained."""
    from landscape.checkpoints.checkpoint import read_checkpoint

    if network.files:
        return network.name, f"{len(network.files)} files", "", "", "", ""
    files = [file for file in (run_folder(out, network.name, seed) / "final.pt" for seed in seeds) if file.exists()]
    if not files:
        return ()
    runs = [read_checkpoint(file) for file in files]
    mean = seed_groups.mean_interval(np.array([run.metrics.get("accuracy", np.nan) for run in runs]), "share")
    size = sum(tensor.numel() for key, tensor in runs[0].state_dict.items() if not key.endswith(BUFFERS))
    given = {**network.model_args, **{key: value for key, value in network.overrides.items() if key != "epochs"}}
    arguments = "".join(f" {key}={value}" for key, value in given.items())
    accuracy = rounding.interval(*mean) if np.isfinite(mean[0]) else "no labels"
    images, epochs = f"{network.fraction:g}", f"{runs[0].epoch:g}"
    return network.name, f"{network.model}{arguments}", f"{size:,}", images, epochs, accuracy


def run_folder(out: Path, network: str, seed: int) -> Path:
    """The folder of one training."""
    return out / "checkpoints" / f"{network}-s{seed}"
