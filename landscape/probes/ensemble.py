"""Measure ensembles: averaged probabilities by number of members, uncertainty, diversity (arXiv 2105.12639)."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from landscape.data.structure import logits_in
from landscape.headline import Headline
from landscape.layers.cka import centred_kernel, hsic
from landscape.options import OptionError, at_least, require
from landscape.predictions import running_sums, timing
from landscape.predictions.member_networks import MemberNetwork, member_networks, parse_snapshots
from landscape.predictions.running_sums import RunningSums, orders_of, sizes_of
from landscape.predictions.scores import (
    PART,
    class_targets,
    labelled,
    logits_and_targets,
    padded,
    refuse_other_than_classifier,
)
from landscape.predictions.temperature import INVERSE, MOMENTS, TemperatureFit, in_fit
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.statistics import calibration as statistics
from landscape.statistics.calibration import METRIC_NAMES
from landscape.subject.mc_dropout import as_is
from landscape.subject.subject import Subject

MEMORY = 2**28  # bytes of the running sums and kernels of the mini-batches that a member predicts at a time
AT_ONCE = 64  # mini-batches that a member predicts at a time: what an interrupted run repeats at most
SCORES = ("nll", "correct", "top5", "brier", "confidence")
ENTROPIES = {
    "predictive": "entropy of the mean probabilities",
    "aleatoric": "mean over members of the entropy of their probabilities",
    "epistemic": "predictive minus aleatoric entropy, the members' disagreement",
}
PER_SAMPLE = {
    "sample_disagreement": Quantity("share of the pairs of members whose classes differ", dims=("row",)),
    "sample_divergence": Quantity("Kullback-Leibler divergence, mean over pairs of members", "nats", ("row",)),
}


@dataclass(frozen=True)
class Ensemble(Probe):
    """Calibration of the averaged probabilities of the first 1, 2, 3, 5, 10, 20, 50 members, and of all of them.

    Members are checkpoints, snapshots of their runs (`snapshots`) or averages of these (`swa`), each with every dropout
    mask of `--mc-dropout`. A number is the mean over `orders` in which the members join, with its standard deviation
    over orders, and the interval over samples of the first order, moved to that mean. Predictive entropy is that of the
    mean probabilities, aleatoric the mean of the members' entropies, epistemic the difference. Each member runs once.
    Labels and pixels count as in `calibration`.
    """

    name: ClassVar[str] = "ensemble"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"members": ()}
    several: ClassVar[str] = "members"
    checkpoints: ClassVar[str] = "members, or a folder of them"
    uses: ClassVar[tuple[str, ...]] = ("batch_size",)  # of the unbiased CKA
    smallest: ClassVar[Mapping[str, Any]] = {"draws": 20, "orders": 2, "snapshots": "last:2"}
    headlines: ClassVar[Sequence[Headline]] = running_sums.HEADLINES

    members: Annotated[str, "further members, B.pt,C.pt; or list them as arguments"] = ""
    snapshots: Annotated[str, "take last:K or spread:K snapshots of the run of each checkpoint as members"] = ""
    swa: Annotated[
        int, "average these snapshots' weights into one member; batch norm recalibrated on this many train mini-batches"
    ] = 0
    orders: Annotated[int, "orders in which more than five members join; fewer join in every order"] = 10
    draws: Annotated[int, "bootstrap resamples behind the intervals"] = 1000
    timed: Annotated[int, "images by which the time of one pass and of all members is measured; 0: it is not"] = 0
    seed: Annotated[int, "seed of the orders and of the bootstrap"] = 0

    def __post_init__(self) -> None:
        require(2 <= self.draws <= statistics.MOST_DRAWS, "draws", self.draws, f"2 to {statistics.MOST_DRAWS:,}")
        at_least("orders", self.orders, 1)
        at_least("swa", self.swa, 0)
        at_least("timed", self.timed, 0)
        parse_snapshots(self.snapshots)
        if self.swa and not self.snapshots:
            raise OptionError(f"--swa {self.swa} averages snapshots of a run; give --snapshots last:5 with it")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The digests of the members' weights in place of their paths."""
        members = [network.sha256 for network in self._networks(subject)]
        return {"members": members, "snapshots": None, "timed": None}

    def plan(self, subject: Subject) -> Plan:
        refuse_other_than_classifier(subject, "ensemble")
        names = self._names(subject)
        if len(names) < 2 and self.swa:
            kind, count = parse_snapshots(self.snapshots)
            raise ValueError(
                f"--snapshots {kind}:{count} --swa {self.swa} averages {count} snapshots into one network (batch norm "
                f"from {self.swa} mini-batches), and an ensemble has at least 2 members; leave --swa out to take the "
                "snapshots as members, give several runs, or --mc-dropout 10"
            )
        if len(names) < 2:
            raise ValueError(
                f"an ensemble has at least 2 members, got 1 ({subject.label}); give several checkpoints, "
                "--snapshots last:5, or --mc-dropout 10"
            )
        sizes = sizes_of(len(names))
        rows = max(map(subject.samples, range(len(subject.batches))))
        per_sample, pair, statistic = ("size", "row"), ("member", "other"), ("statistic",)
        numbers = np.arange(len(names))
        orders = np.arange(len(orders_of(len(names), self.orders, self.seed)))
        scores: dict[str, tuple[str, ...]] = dict.fromkeys(SCORES, per_sample)
        if several := labelled(class_targets(subject, 0)) is not None:
            scores["binned"] = (*per_sample, "part")
        return Plan(
            over={"batch": np.arange(len(subject.batches))},
            axes={
                "size": np.array(sizes), "row": np.arange(rows), "order": orders, "member": numbers,
                "other": numbers, "statistic": np.arange(statistics.COLUMNS),
                "bin": (np.arange(statistics.BINS) + 0.5) / statistics.BINS,
                "half": np.arange(2), "moment": np.arange(MOMENTS), "step": 1 / INVERSE,
                **({"part": np.arange(statistics.BINNED)} if several else {}),
            },
            labels={"name": (Quantity("member", dims=("member",)), np.array(names))},
            quantities={
                "samples": Quantity("samples in the mini-batch"),
                "held_out": Quantity("samples in it that no temperature is fitted on"),
                **{f"sample_{name}": Quantity(f"{name}, first order", dims=dims) for name, dims in scores.items()},
                "sample_predictive": Quantity(ENTROPIES["predictive"], "nats", per_sample),
                "sample_aleatoric": Quantity(ENTROPIES["aleatoric"], "nats", per_sample),
                **PER_SAMPLE,
                "order_sums": Quantity("sums behind the metrics", dims=("order", "size", *statistic)),
                "member_sums": Quantity("sums behind a member's own metrics", dims=("member", *statistic)),
                "differing": Quantity("samples on which two members' classes differ", dims=pair),
                "temperature_sums": Quantity(
                    "sums behind the temperature: samples of the fit, and the others",
                    dims=("size", "half", "moment", "step"),
                ),
                "hsic": Quantity("unbiased HSIC of two members", "feature^4", pair),
            },
            summaries=_summaries(),
            about={
                "size": Quantity("members averaged"), "row": Quantity("sample in the mini-batch"),
                "other": Quantity("other member"), "statistic": Quantity("column of the sums"),
                "bin": Quantity("centre of the bin of confidence"), "half": Quantity("half of the samples"),
                "moment": Quantity("NLL, its slope, the slope's square, curvature"), "step": Quantity("temperature"),
                **({"part": PART} if several else {}),
            },
            facts={"data_sha256": subject.data.sha256, **self._times(subject)},
        )  # fmt: skip

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Every member is loaded once for as many mini-batches as the running sums have memory for."""
        waiting = list(units)
        while waiting:
            now, waiting = waiting[: (room := self._room(subject))], waiting[room:]
            yield from self._together(subject, now)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Metrics of every size from the sums, their spread over orders, and intervals over samples."""
        done = data["done"] == 1
        metrics = statistics.metrics(data["order_sums"][done].sum(axis=0))  # (order, size) each
        intervals = [self._intervals(data, size) for size in range(len(data["size"]))]
        found: dict[str, Any] = {}
        for name in METRIC_NAMES:
            mean = metrics[name].mean(axis=0)
            shift = mean - metrics[name][0]
            found |= {name: mean, f"{name}_spread": running_sums.spread(metrics[name])}
            found[f"{name}_se"] = np.array([one[name].error for one in intervals])
            low = np.array([one[name].low for one in intervals]) + shift
            found[f"{name}_low"] = low if name == "ece_signed" else np.maximum(low, 0.0)
            high = np.array([one[name].high for one in intervals]) + shift
            found[f"{name}_high"] = high if name in ("nll", "brier") else np.minimum(high, 1.0)
        own = statistics.metrics(data["member_sums"][done].sum(axis=0))
        found |= {f"member_{name}": own[name] for name in METRIC_NAMES}
        diagram = statistics.bins(data["order_sums"][done].sum(axis=0)[0])
        found |= {f"bin_{name}": values for name, values in diagram.items()}
        found |= _scaled(data, done)
        return {**found, **running_sums.uncertainty(data, done), **running_sums.diversity(data, done)}

    def _networks(self, subject: Subject) -> list[MemberNetwork]:
        others = tuple(filter(None, self.members.split(",")))
        return member_networks(subject, others, self.snapshots, self.swa)

    def _names(self, subject: Subject) -> list[str]:
        """Names of all members, those of one network with the number of their dropout mask."""
        names = [network.name for network in self._networks(subject)]
        return [f"{name} #{i + 1}" for name in names for i in range(subject.members)] if subject.members else names

    def _room(self, subject: Subject) -> int:
        """Mini-batches whose running sums and kernels fit into `MEMORY`."""
        members, n = len(self._names(subject)), subject.samples(0)
        with subject.evaluating():
            outputs = logits_in(as_is(subject).outputs(as_is(subject).example()[0]))
        classes = outputs.numel() // len(outputs)  # of all rows of a sample
        orders = len(orders_of(members, self.orders, self.seed))
        subsets = min(orders * len(sizes_of(members)), 2**members)
        return int(min(AT_ONCE, max(1, MEMORY // (8 * n * ((subsets + 4) * classes + members * n)))))

    def _together(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """The values of some mini-batches, from one pass of every member over them."""
        names = self._names(subject)
        orders, sizes = orders_of(len(names), self.orders, self.seed), sizes_of(len(names))
        batches = [unit.index[0] for unit in units]
        targets = {i: class_targets(subject, i) for i in batches}
        sums = {i: RunningSums(orders, sizes, targets[i], in_fit(subject, self.seed, i)) for i in batches}
        kernels: dict[int, list[Tensor]] = {i: [] for i in batches}
        for member in self._each_member(subject):
            for i in batches:
                with _last_linear_inputs(member.model) as features:
                    logits, _ = logits_and_targets(member, i)
                _refuse_other_classes(member, logits, sums[i], subject)
                sums[i].add(logits)
                whole = features and len(features[-1]) == len(logits)  # not a row per pixel
                kernels[i].append(centred_kernel(features[-1] if whole else logits))
        rows = max(map(subject.samples, range(len(subject.batches))))
        for i in batches:
            yield _values(sums[i], torch.stack(kernels.pop(i)), rows)

    def _each_member(self, subject: Subject) -> Iterator[Subject]:
        """Every member as a subject, whose forward pass is its own as long as the caller uses it."""
        for network in self._networks(subject):
            loaded = network.load(subject)
            for i in range(max(1, loaded.members)):
                with loaded.member(i) if loaded.members else contextlib.nullcontext():
                    yield loaded

    def _times(self, subject: Subject) -> dict[str, float]:
        """Seconds of the prediction of an image: of one pass of the network as it is, and of all members."""
        if not self.timed:
            return {}
        one = timing.per_image(as_is(subject), self.timed)
        every = [timing.per_image(member, self.timed) for member in self._each_member(subject)]
        each = timing.facts("seconds_per_image_one_pass", one)
        return each | timing.facts("seconds_per_image_all", np.sum(every, axis=0))

    def _intervals(self, data: Mapping[str, np.ndarray], size: int) -> dict[str, statistics.Interval]:
        stored = [f"sample_{name}" for name in (*SCORES, "binned") if f"sample_{name}" in data]
        columns = {name: data[name][:, size] for name in stored}
        scores = statistics.stored_scores({**columns, "done": data["done"]})
        return statistics.bootstrap(scores, draws=self.draws, seed=self.seed)


def _values(sums: RunningSums, kernels: Tensor, rows: int) -> dict[str, Any]:
    """What is stored of one mini-batch, once all members are added."""
    first = [sums.scores(subset) for subset in sums.subsets[0]]
    totals = {subset: statistics.sums(sums.scores(subset)).sum(axis=0) for row in sums.subsets for subset in row}
    differing = sums.differing()
    m, _, samples = differing.shape
    values = {
        **{f"sample_{name}": np.stack([getattr(one, name) for one in first]) for name in vars(first[0])},
        "sample_predictive": np.stack(sums.predictive_entropy),
        "sample_aleatoric": np.stack(sums.aleatoric_entropy),
        "sample_disagreement": differing.sum(axis=(0, 1)) / (m * (m - 1)),
        "sample_divergence": sums.divergence(),
    }
    return {
        **{name: padded(value, rows, min(1, value.ndim - 1)) for name, value in values.items()},  # after that of sizes
        "samples": samples, "held_out": sums.held_out,
        "order_sums": np.stack([[totals[subset] for subset in row] for row in sums.subsets]),
        "member_sums": np.stack([statistics.sums(scores).sum(axis=0) for scores in sums.member_scores]),
        "differing": differing.sum(axis=2),
        "temperature_sums": np.stack(sums.temperature_sums), "hsic": hsic(kernels, kernels).cpu().numpy(),
    }  # fmt: skip


def _scaled(data: Mapping[str, np.ndarray], done: np.ndarray) -> dict[str, np.ndarray]:
    """Temperature of every size, and the NLL of the other half of the samples before and after scaling."""
    rows, n = [], float(data["held_out"][done].sum()) or np.nan
    for fitted, other in data["temperature_sums"][done].sum(axis=0):
        temperature, left = TemperatureFit(fitted).fitted(quiet=True), TemperatureFit(other)
        rows.append([temperature.value, temperature.error, left.nll(1.0) / n, left.nll(temperature.value) / n])
    names = ("temperature", "temperature_se", "held_nll", "scaled_nll")
    return {**dict(zip(names, np.array(rows).T, strict=True)), "temperature_se.n": data["samples"][done].sum() - n}


@contextlib.contextmanager
def _last_linear_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """The input of the linear layer that is called last, which is the classifier; empty without linear layers."""
    seen: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            seen[:] = [inputs[0].detach()]

    with contextlib.ExitStack() as hooks:
        for module in (module for module in model.modules() if isinstance(module, nn.Linear)):
            hooks.enter_context(module.register_forward_pre_hook(see))
        yield seen


def _refuse_other_classes(member: Subject, logits: Tensor, sums: RunningSums, subject: Subject) -> None:
    if sums.classes not in (0, logits.shape[-1]):
        raise ValueError(
            f"{member.label} predicts {logits.shape[-1]} classes and {subject.label} {sums.classes}, expected members "
            "of the same classes; leave one of them out"
        )


def _summaries() -> dict[str, Quantity]:
    """Every metric per size with its spread and interval; every member's own; uncertainty and diversity."""
    size, found = ("size",), {}
    for name, about in METRIC_NAMES.items():
        units = "nats" if name == "nll" else "1"
        found[name] = Quantity(about, units, size, error="samples", ends=True)
        found[f"{name}_spread"] = Quantity(f"standard deviation of {name} over orders", units, size)
        found[f"member_{name}"] = Quantity(f"{about}, of a member by itself", units, ("member",))
    for name in ("count", "confidence", "accuracy"):
        found[f"bin_{name}"] = Quantity(f"{name} in the bin of confidence, first order", dims=("size", "bin"))
    found["temperature"] = Quantity(
        "temperature fitted on half of the samples, first order", dims=size, error="samples"
    )
    found["held_nll"] = Quantity("negative log likelihood of the other half", "nats", size)
    found["scaled_nll"] = Quantity("the same after temperature scaling", "nats", size)
    for name, about in ENTROPIES.items():
        found[f"{name}_entropy"] = Quantity(about, "nats", size, bounds="positive", error="samples")
    found["disagreement"] = Quantity("share of samples on which two members' classes differ", dims=("member", "other"))
    found["cka"] = Quantity("centred kernel alignment of the classifiers' inputs", dims=("member", "other"))
    for name, units, bounds in (("disagreement", "1", "share"), ("divergence", "nats", "positive")):
        found[f"mean_{name}"] = Quantity(f"{name}, mean over pairs of members", units, bounds=bounds, error="samples")
    found["mean_cka"] = Quantity("centred kernel alignment, mean over pairs of members")
    return found
