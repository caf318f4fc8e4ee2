"""Measure accuracy, NLL and calibration under common corruptions (Hendrycks & Dietterich 2019, arXiv 1903.12261)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from landscape.data import corruptions
from landscape.exchange import corruption_baseline
from landscape.options import require
from landscape.predictions import scores
from landscape.predictions.scores import SampleScores
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.results import calibration, corruption_summary
from landscape.results.corruption_summary import BLOCKS, METRICS
from landscape.results.statistics import mean_and_standard_error
from landscape.subject.corrupted_images import AUTO, GENERATED, Source, images_of, source_of, with_images
from landscape.subject.identity import protocol
from landscape.subject.outputs import logits_in
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

DRAWS = 200  # of the bootstrap of each calibration error


@dataclass(frozen=True)
class Corruption(Probe):
    """Scores of the test images under every corruption and severity, their means, and errors relative to a baseline.

    The images come from the files of CIFAR-10-C, CIFAR-100-C or ImageNet-C where they are, else they are generated from
    the clean images, seeded per image. One corruption and severity is in memory at a time. Standard errors are over
    samples; those of the means respect that all corruptions are of the same images.
    """

    name: ClassVar[str] = "corruption"
    smallest: ClassVar[Mapping[str, Any]] = {"corruptions": "brightness,gaussian_noise", "severities": "1,5"}

    corruptions: Annotated[str, "common (15), all (19), or names separated by commas"] = "common"
    severities: Annotated[str, "1 to 5, separated by commas"] = "1,2,3,4,5"
    source: Annotated[
        str, "auto: CIFAR-10-C or CIFAR-100-C under --data-root, else generated; generated; or a folder of these or of "
        "ImageNet-C",
    ] = AUTO  # fmt: skip
    baseline: Annotated[
        str, "FILE.csv, or results.h5:LABEL: the network that mCE, mCNLL and mCECE are relative to; default: none"
    ] = ""
    seed: Annotated[int, "seed of generated corruptions"] = 0

    def __post_init__(self) -> None:
        for name in ("corruptions", "severities"):  # Python callers may give lists
            value = getattr(self, name)
            text = value if isinstance(value, str) else ",".join(map(str, np.atleast_1d(value).tolist()))
            object.__setattr__(self, name, text)
        corruptions.parse_names(self.corruptions)
        corruptions.parse_severities(self.severities)
        require(bool(self.source), "source", "nothing", f"{AUTO}, {GENERATED} or a folder")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, with texts parsed, and the content of source and baseline for their paths."""
        source = self._source(subject).identity(subject, self._names, self._severities)
        chosen = {"corruptions": self._names, "severities": self._severities, "source": source}
        against = {name: values.tolist() for name, values in self._baseline().items()}
        return {**asdict(self), **chosen, "baseline": against}

    def plan(self, subject: Subject) -> Plan:
        source, names, against = self._source(subject), self._names, self._baseline()
        clean = scores.summary(clean_scores(subject))
        per_cell = corruption_summary.PER_CELL
        baseline = {
            f"baseline_{name}": (Quantity(f"{METRICS[name][0]} of the baseline", METRICS[name][1], per_cell), values)
            for name, values in against.items()
        }
        blocks = np.bincount(np.arange(len(subject)) % BLOCKS)
        return Plan(
            over={"corruption": np.arange(len(names)), "severity": np.array(self._severities)},
            axes={"block": np.arange(len(blocks))},
            labels={
                "corruption_name": (Quantity("corruption", dims=("corruption",)), np.array(names)),
                "block_samples": (Quantity("samples in the block", dims=("block",)), blocks),
                **baseline,
            },
            quantities={**corruption_summary.quantities(), **corruption_summary.block_quantities()},
            summaries=corruption_summary.summaries(baseline=bool(against)),
            about={
                "corruption": Quantity("corruption"),
                "severity": Quantity("severity"),
                "block": Quantity("block of samples"),
            },
            facts={
                **{f"clean_{name}": clean[name] for name in METRICS},
                "source": source.in_words,
                "data_sha256": subject.data_sha256,
                "protocol": f"{protocol(subject)}, {source.in_words}",
            },
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        name, severity = self._names[unit.index[0]], int(unit.at["severity"])
        found = scored(with_images(subject, self._source(subject).images(subject, name, severity, self.seed)))
        accuracy, accuracy_se = mean_and_standard_error(found.correct)
        nll, nll_se = mean_and_standard_error(found.nll)
        terms = {"accuracy": found.correct, "nll": found.nll, "ece": calibration_gaps(found)}
        block = np.arange(len(found)) % BLOCKS
        return {
            "samples": len(found),
            **{"accuracy": accuracy, "accuracy_se": accuracy_se, "nll": nll, "nll_se": nll_se},
            "ece": scores.summary(found)["ece"],
            "ece_se": scores.bootstrap(found, draws=DRAWS, seed=self.seed)["ece"].error,
            **{f"{name}_block": np.bincount(block, values) for name, values in terms.items()},
        }

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
        table = corruption_baseline.read(self.baseline)
        return corruption_baseline.selected(table, self._names, self._severities, self.baseline)


@once_per_weights
def source_for(subject: Subject, wanted: str, names: tuple[str, ...], seed: int) -> Source:
    """`source_of`, looked up once."""
    images_of(subject)
    return source_of(subject, wanted, names, seed)


@once_per_weights
def clean_scores(subject: Subject) -> SampleScores:
    """Scores of the samples as they are."""
    return scored(subject)


def scored(subject: Subject) -> SampleScores:
    """Scores of every sample, mini-batch by mini-batch."""
    with subject.evaluating():
        return scores.joined(
            [
                scores.sample_scores(logits_in(subject.outputs(inputs)), targets)
                for inputs, targets in subject.each_batch()
            ]
        )


def calibration_gaps(found: SampleScores) -> np.ndarray:
    """Per sample, what adds up to samples x ECE: confidence - correctness with the sign of its bin's sum, (N,)."""
    gap = found.confidence - found.correct
    bin_of = np.digitize(found.confidence, calibration.EDGES, right=True)
    sign = np.sign(np.bincount(bin_of, gap, minlength=calibration.BINS))
    return np.asarray(sign[bin_of] * gap)
