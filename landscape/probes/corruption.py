"""Measure accuracy, NLL and calibration under common corruptions (Hendrycks & Dietterich 2019, arXiv 1903.12261)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import numpy as np

from landscape.data import corruptions, structure
from landscape.exchange import csv_files
from landscape.headline import Headline
from landscape.options import require
from landscape.predictions import running_sums, scores
from landscape.probe import Plan, Probe, Quantity, Unit, Values, make_texts
from landscape.statistics import calibration, corruption_summary, means
from landscape.statistics.calibration import SampleScores
from landscape.statistics.corruption_summary import BLOCKS, METRICS
from landscape.subject import members, weights_cache
from landscape.subject.loading.further_data import AUTO, GENERATED, Source, images_of, source_of, with_images
from landscape.subject.loading.identity import protocol
from landscape.subject.subject import Subject

DRAWS = 200  # of the bootstrap of each calibration error


@dataclass(frozen=True)
class Corruption(Probe):
    """Scores of the test images under every corruption and severity, their means, and errors relative to a baseline.

    The images come from the files of CIFAR-10-C, CIFAR-100-C or ImageNet-C where they are, else they are generated from
    the clean images, seeded per image. One corruption and severity is in memory at a time. Standard errors are over
    samples; those of the means respect that all corruptions are of the same images. With `--mc-dropout` also the scores
    of the first 1, 2, 3, 5, 10, ... members, from the same passes.
    """

    name: ClassVar[str] = "corruption"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"source": (AUTO, GENERATED)}
    smallest: ClassVar[Mapping[str, Any]] = {"corruptions": "brightness,gaussian_noise", "severities": "1,5"}
    headlines: ClassVar[Sequence[Headline]] = corruption_summary.HEADLINES

    corruptions: Annotated[str, "common (15), all (19), or names separated by commas"] = "common"
    severities: Annotated[str, "1 to 5, separated by commas"] = "1,2,3,4,5"
    source: Annotated[
        str, "auto: CIFAR-10-C or CIFAR-100-C under --data-root, else generated; generated; or a folder of these or of "
        "ImageNet-C",
    ] = AUTO  # fmt: skip
    baseline: Annotated[
        str, "the network that mCE, mCNLL and mCECE are relative to, as FILE.csv or results.h5:LABEL; default: none"
    ] = ""
    seed: Annotated[int, "seed of generated corruptions"] = 0

    def __post_init__(self) -> None:
        make_texts(self, "corruptions", "severities")
        corruptions.parse_names(self.corruptions)
        corruptions.parse_severities(self.severities)
        require(bool(self.source), "source", "nothing", f"{AUTO}, {GENERATED} or a folder")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, with texts parsed, and the content of source and baseline for their paths."""
        source = self._source(subject).identity(subject, self._names, self._severities)
        chosen = {"corruptions": self._names, "severities": self._severities, "source": source}
        against = {name: values.tolist() for name, values in self._baseline().items()}
        sizes = {"sizes": _sizes(subject)} if subject.members else {}
        return {**chosen, "baseline": against, **sizes}

    def plan(self, subject: Subject) -> Plan:
        source, names, against = self._source(subject), self._names, self._baseline()
        clean = calibration.summary(clean_scores(subject))
        per_cell = corruption_summary.PER_CELL
        baseline = {
            f"baseline_{name}": (Quantity(f"{METRICS[name][0]} of the baseline", METRICS[name][1], per_cell), values)
            for name, values in against.items()
        }
        blocks, sizes = np.bincount(np.arange(len(subject)) % BLOCKS), _sizes(subject)
        return Plan(
            over={"corruption": np.arange(len(names)), "severity": np.array(self._severities)},
            axes={"block": np.arange(len(blocks)), **({"size": np.array(sizes)} if sizes else {})},
            labels={
                "corruption_name": (Quantity("corruption", dims=("corruption",)), np.array(names)),
                "block_samples": (Quantity("samples in the block", dims=("block",)), blocks),
                **baseline,
            },
            quantities={
                **corruption_summary.quantities(),
                **corruption_summary.block_quantities(),
                **(corruption_summary.size_quantities() if sizes else {}),
            },
            summaries=corruption_summary.summaries(baseline=bool(against), sizes=bool(sizes)),
            about={"block": Quantity("block of samples"), **({"size": Quantity("members averaged")} if sizes else {})},
            facts={
                **{f"clean_{name}": clean[name] for name in METRICS},
                "source": source.in_words,
                "data_sha256": subject.data.sha256,
                "protocol": f"{protocol(subject)}, {source.in_words}",
            },
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        name, severity = self._names[unit.index[0]], int(unit.at["severity"])
        images = self._source(subject).images(subject, name, severity, self.seed)
        *_, found = every = scored(with_images(subject, images))
        accuracy, accuracy_se = means.mean_and_standard_error(found.correct)
        nll, nll_se = means.mean_and_standard_error(found.nll)
        of_ece = calibration.bootstrap(found, draws=DRAWS, seed=self.seed)["ece"]
        return {
            "samples": len(found),
            **{"accuracy": accuracy, "accuracy_se": accuracy_se, "nll": nll, "nll_se": nll_se},
            "ece": calibration.summary(found)["ece"], "ece_se": of_ece.error,
            "ece_low": of_ece.low, "ece_high": of_ece.high, corruption_summary.CHANCE: calibration.chance_ece(found),
            **_block_sums(found),
            **(_by_size(every) if subject.members else {}),
        }  # fmt: skip

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        return corruption_summary.reduced(data)

    @property
    def _names(self) -> tuple[str, ...]:
        return corruptions.parse_names(self.corruptions)

    @property
    def _severities(self) -> tuple[int, ...]:
        return corruptions.parse_severities(self.severities)

    def _source(self, subject: Subject) -> Source:
        return source_for(subject, self.source, self._names, self.seed)

    def _baseline(self) -> dict[str, np.ndarray]:
        if not self.baseline:
            return {}
        table = csv_files.baseline(self.baseline)
        return csv_files.selected(table, self._names, self._severities, self.baseline)


@weights_cache.once_per_weights
def source_for(subject: Subject, wanted: str, names: tuple[str, ...], seed: int) -> Source:
    """`source_of`, looked up once."""
    images_of(subject)
    return source_of(subject, wanted, names, seed)


@weights_cache.once_per_weights
def clean_scores(subject: Subject) -> SampleScores:
    """Scores of the samples as they are."""
    return scored(subject)[-1]


def scored(subject: Subject) -> list[SampleScores]:
    """Scores of every sample, mini-batch by mini-batch: of an ensemble for each of its sizes, the whole one last."""
    forward, sizes = subject.forward, _sizes(subject)
    parts: list[list[SampleScores]] = []
    with subject.evaluating():
        for inputs, targets in subject.each_batch():
            if isinstance(forward, members.MemberForward):
                outputs = forward.of_first(subject.model, cast(members.Positioned, inputs), sizes)
            else:
                outputs = [subject.outputs(inputs)]
            parts.append([scores.sample_scores(structure.logits_in(one), targets) for one in outputs])
    return [calibration.joined(list(of_size)) for of_size in zip(*parts, strict=True)]


def _sizes(subject: Subject) -> list[int]:
    """The sizes of an ensemble that are scored; none of a network without members."""
    return running_sums.sizes_of(subject.members) if subject.members else []


def _by_size(every: Sequence[SampleScores]) -> dict[str, np.ndarray]:
    """What is stored of every size."""
    summaries, sums = [calibration.summary(one) for one in every], [_block_sums(one) for one in every]
    values = {f"size_{name}": np.array([one[name] for one in summaries]) for name in METRICS}
    values[f"size_{corruption_summary.CHANCE}"] = np.array([calibration.chance_ece(one) for one in every])
    return values | {f"size_{name}": np.stack([one[name] for one in sums]) for name in sums[0]}


def _block_sums(found: SampleScores) -> dict[str, np.ndarray]:
    """The sums per block of samples behind the errors of the summaries."""
    terms = {"accuracy": found.correct, "nll": found.nll, "ece": calibration.gaps(found)}
    block = np.arange(len(found)) % BLOCKS
    return {f"{name}_block": np.bincount(block, values) for name, values in terms.items()}
