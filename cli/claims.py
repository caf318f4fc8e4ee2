"""What the papers say, as numbers that stored answers of a few networks decide: the table of `landscape reproduce`.

Sources: "How Do Vision Transformers Work?" (Park & Kim, ICLR 2022, arXiv 2202.06709; below HowViT, with
the number of the question that it asks) and "Blurs Behave Like Ensembles" (Park & Kim, ICML 2022, arXiv 2105.12639;
below Blurs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import xarray as xr
from scipy import stats

from landscape.results.statistics import mean_and_standard_error

CONFIDENCE = 0.95
LEAST_SEEDS = 3  # for a verdict: an interval from two may be narrow, or none, by chance
HEIGHT_RADIUS, HIGH, MIDDLE = 0.5, 0.9, 0.3  # radius on the plane; centres of two noise bands, in units of pi
EQUAL_FREQUENCY = 1e-3  # bands are looked up by their centre

Need: TypeAlias = tuple[str, str]  # a network and a question put to it, by their names
Answers: TypeAlias = Mapping[Need, xr.Dataset]
Value: TypeAlias = Callable[[xr.Dataset], float]
Decided: TypeAlias = tuple[tuple[Need, ...], Callable[[Answers], float]]  # `needs` and `of` of a claim
Verdict: TypeAlias = Literal["holds", "fails", "cannot tell"]


@dataclass(frozen=True)
class Network:
    """One network of the comparison and how far it is trained, in shares of what is asked for.

    Args:
        model: a trainer's name.
        model_args: its arguments.
        images: share of the training images, of those that the others see.
        epochs: factor on the epochs of the others.
    """

    model: str
    model_args: Mapping[str, Any] = field(default_factory=dict)
    images: float = 1.0
    epochs: float = 1.0


@dataclass(frozen=True)
class Question:
    """What a network is asked, at one snapshot: a probe with its options; "evaluate", on the test split; or "metrics".

    The metrics are those that the trainer stored, on the whole test split.
    """

    probe: str
    options: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Literal["final.pt", "warmup.pt"] = "final.pt"


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper and the number whose sign decides it.

    Args:
        name: by which it is asked for.
        says: the sentence.
        source: where it stands.
        number: what is computed per seed, in words, with its unit.
        published: the same number from the paper; "figure only" where it gives none.
        claimed: the sign the number has if the sentence is true.
        needs: whose answers it takes.
        of: the number, from these answers.
    """

    name: str
    says: str
    source: str
    number: str
    published: str
    claimed: Literal[-1, 1]
    needs: tuple[Need, ...]
    of: Callable[[Answers], float]


@dataclass(frozen=True)
class Finding:
    """A claim with its numbers, one per seed."""

    claim: Claim
    numbers: Sequence[float]

    @property
    def mean(self) -> float:
        """Over seeds; NaN where one of them is."""
        return float(np.mean(self.numbers)) if len(self.numbers) else math.nan

    @property
    def half_width(self) -> float:
        """Of the 95 % interval of Student's t over seeds; infinite for one seed, NaN where a number is."""
        count = len(self.numbers)
        if count < 2:
            return math.inf
        quantile: float = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
        return float(quantile * mean_and_standard_error(np.array(self.numbers))[1])

    @property
    def verdict(self) -> Verdict:
        """Holds or fails where the whole interval has the claimed sign or the other; else nobody can tell.

        Nor from fewer than `LEAST_SEEDS` numbers.
        """
        if len(self.numbers) < LEAST_SEEDS or not abs(self.mean) > self.half_width:
            return "cannot tell"
        return "holds" if math.copysign(1, self.mean) == self.claim.claimed else "fails"


LOCAL = {"dim": 48, "depth": 5, "heads": 3, "std": 0.1}  # of the size of vit_demo
NETWORKS: Mapping[str, Network] = {
    "vit": Network("vit_demo"),
    "resnet": Network("resnet_demo"),
    "alternet": Network("alternet_demo"),
    "preresnet": Network("preresnet_demo"),
    # A fifth of the images for as many updates.
    "small": Network("vit_demo", images=0.2, epochs=5.0),
    # Pairs that are compared with each other alone, on shorter runs.
    "k3": Network("localvit_ti", {**LOCAL, "neighbourhood": 3}, epochs=0.625),
    "global": Network("localvit_ti", {**LOCAL, "neighbourhood": None}, epochs=0.625),
    "dropout": Network("resnet_demo", {"mc_dropout": 0.3}, epochs=0.625),
    "smoothing": Network("resnet_demo", {"mc_dropout": 0.3, "smoothing": True}, epochs=0.625),
}
QUESTIONS: Mapping[str, Question] = {
    "surface": Question("surface", {"resolution": "13", "samples": 256}),
    "spectrum": Question("hessian", {"preset": "park2022", "samples": 256}),
    "early spectrum": Question("hessian", {"preset": "park2022", "samples": 256}, "warmup.pt"),
    "fourier": Question("fourier", {"samples": 512}),
    "variance": Question("variance", {"samples": 512}),
    "lesion": Question("lesion", {"samples": 1024}),
    "noise": Question("noise", {"samples": 1024}),
    "accuracy": Question("metrics"),
    "ensemble": Question("evaluate", {"samples": 2048, "passes": 16}),
}


def findings(claims: Iterable[Claim], studies: Sequence[Answers]) -> list[Finding]:
    """Every claim with the numbers of those studies, one per seed, that have all it needs."""
    return [
        Finding(claim, [claim.of(answers) for answers in studies if all(need in answers for need in claim.needs)])
        for claim in claims
    ]


def table(found: Sequence[Finding]) -> str:
    """The findings as a Markdown table, a row per claim."""
    lines = [
        "| claim | source | number | claimed | published | here, 95 % over seeds | per seed | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for finding in found:
        claim = finding.claim
        here = f"{finding.mean:.3g} ± {finding.half_width:.2g}" if finding.numbers else "not measured"
        each = ", ".join(f"{number:.3g}" for number in finding.numbers)
        sign = "negative" if claim.claimed < 0 else "positive"
        lines.append(
            f"| {claim.says} | {claim.source} | {claim.number} | {sign} | {claim.published} | {here} | {each} "
            f"| **{finding.verdict}** |"
        )
    return "\n".join(lines) + "\n"


def _alone(network: str, question: str, value: Value) -> Decided:
    """The value of one network."""
    return ((network, question),), lambda answers: value(answers[network, question])


def _between(one: str, other: str, question: str, value: Value) -> Decided:
    """The value of one network less that of another."""
    needs = ((one, question), (other, question))
    return needs, lambda answers: value(answers[one, question]) - value(answers[other, question])


def _log_ratio(one: str, other: str, question: str, name: str) -> Decided:
    return _between(one, other, question, lambda data: math.log(scalar(data, name)))


def scalar(data: xr.Dataset, name: str) -> float:
    """A stored number without an axis."""
    return float(data[name])


def height(data: xr.Dataset) -> float:
    """Mean rise of the loss at `HEIGHT_RADIUS`, nats."""
    return float(data["height"].sel(radius=HEIGHT_RADIUS))


def band(data: xr.Dataset, centre: float) -> float:
    """Accuracy drop under noise of one band, a fraction."""
    return float(data["accuracy_drop"].sel(band=centre, method="nearest", tolerance=EQUAL_FREQUENCY))


def steps(values: np.ndarray, data: xr.Dataset, kinds: Sequence[str]) -> float:
    """Mean change at the layers of some kinds, from the layer before; those that reduce their map do not count."""
    kind, reduces = data["kind"].values.astype(str), data["reduces"].values
    change = np.diff(values, prepend=np.nan)
    counted = np.isin(kind, kinds) & (reduces == 0) & np.isfinite(change)
    return float(change[counted].mean()) if counted.any() else math.nan


def _sharpness(data: xr.Dataset, kinds: Sequence[str]) -> float:
    return steps(data["high_frequency"].values, data, kinds)


def _spread(data: xr.Dataset, kinds: Sequence[str]) -> float:
    with np.errstate(divide="ignore"):  # a layer without a map has NaN and does not count
        return steps(np.log(data["variance"].values), data, kinds)


def first_against_rest(data: xr.Dataset) -> float:
    """Accuracy drop of the first unit of each stage less the mean of its others, mean over stages that have others."""
    drop, stage = data["accuracy_drop"].values, data["stage"].values
    differences = [
        drop[stage == one][0] - drop[stage == one][1:].mean() for one in np.unique(stage) if (stage == one).sum() > 1
    ]
    return float(np.mean(differences)) if differences else math.nan


def _ends(answers: Answers) -> float:
    """Drop of the attention that ends a stage less that of the convolution there in the network without attention."""
    mixed, plain = answers["alternet", "lesion"], answers["preresnet", "lesion"]
    kind, stage = mixed["kind"].values.astype(str), mixed["stage"].values
    differences = []
    for one in np.unique(stage):
        last = np.flatnonzero(stage == one)[-1]
        twin = np.flatnonzero(plain["stage"].values == one)
        if kind[last] == "msa" and len(twin):
            differences.append(float(mixed["accuracy_drop"][last]) - float(plain["accuracy_drop"][twin[-1]]))
    return float(np.mean(differences)) if differences else math.nan


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "flatter", "A ViT's loss surface is flatter than a ResNet's", "HowViT, question 1",
        "height at radius 0.5, ViT - ResNet, nats", "1.98 - 3.03 = -1.05 (their published surfaces)", -1,
        *_between("vit", "resnet", "surface", height),
    ),
    Claim(
        "sharpness", "A ViT's positive Hessian eigenvalues are smaller", "HowViT, question 1",
        "ln(APE of the ViT / APE of the ResNet)", "figure only", -1,
        *_log_ratio("vit", "resnet", "spectrum", "ape"),
    ),
    Claim(
        "early-sharpness", "... and so they are at the end of warm-up", "HowViT, question 1",
        "ln(APE of the ViT / APE of the ResNet), end of warm-up", "figure only", -1,
        *_log_ratio("vit", "resnet", "early spectrum", "ape"),
    ),
    Claim(
        "negative", "A ViT has more negative Hessian eigenvalues early in training", "HowViT, question 1",
        "NEP, ViT - ResNet, end of warm-up", "figure only", 1,
        *_between("vit", "resnet", "early spectrum", lambda data: scalar(data, "nep")),
    ),
    Claim(
        "less-data", "With less data a ViT has more negative eigenvalues", "HowViT, question 1",
        "NEP, a fifth of the images - all, end of warm-up (312 updates, 500)", "figure only", 1,
        *_between("small", "vit", "early spectrum", lambda data: scalar(data, "nep")),
    ),
    Claim(
        "locality", "Local attention has fewer negative eigenvalues than global", "HowViT, question 1",
        "NEP, 3 x 3 - global, end of warm-up", "figure only", -1,
        *_between("k3", "global", "early spectrum", lambda data: scalar(data, "nep")),
    ),
    Claim(
        "low-pass", "Self-attentions are low-pass filters", "HowViT, question 2",
        "change of DeltaLogA at the highest frequency across an MSA of the ViT, nats", "figure only", -1,
        *_alone("vit", "fourier", lambda data: _sharpness(data, ["msa"])),
    ),
    Claim(
        "low-pass-alternet", "... in a network of convolutions too", "HowViT, question 2",
        "the same across an MSA of the AlterNet, nats", "figure only", -1,
        *_alone("alternet", "fourier", lambda data: _sharpness(data, ["msa"])),
    ),
    Claim(
        "high-pass", "Convolutions are high-pass filters", "HowViT, question 2",
        "the same across a convolutional block of the ResNet, nats", "figure only", 1,
        *_alone("resnet", "fourier", lambda data: _sharpness(data, ["conv"])),
    ),
    Claim(
        "high-pass-mlp", "MLPs of a ViT amplify high frequencies", "HowViT, question 2",
        "the same across an MLP of the ViT, nats", "figure only", 1,
        *_alone("vit", "fourier", lambda data: _sharpness(data, ["mlp"])),
    ),
    Claim(
        "variance", "Self-attentions reduce the variance of feature maps", "HowViT, question 2",
        "change of ln variance across an MSA of the ViT", "figure only", -1,
        *_alone("vit", "variance", lambda data: _spread(data, ["msa"])),
    ),
    Claim(
        "variance-conv", "Convolutions and MLPs increase it", "HowViT, question 2",
        "change of ln variance across a convolutional block of the ResNet", "figure only", 1,
        *_alone("resnet", "variance", lambda data: _spread(data, ["conv"])),
    ),
    Claim(
        "rhythm", "Early convolutions of a stage matter most", "HowViT, question 3",
        "accuracy drop, first unit of a stage - its others, ResNet", "figure only", 1,
        *_alone("resnet", "lesion", first_against_rest),
    ),
    Claim(
        "ends", "At the end of a stage attention matters more than convolution", "HowViT, question 3",
        "accuracy drop, last unit of a stage, AlterNet - its CNN", "figure only", 1,
        (("alternet", "lesion"), ("preresnet", "lesion")), _ends,
    ),
    Claim(
        "noise", "A ViT is robust to high-frequency noise where a ResNet is not", "HowViT, question 2",
        "accuracy drop at 0.9 pi, ViT - ResNet", "0.048 - 0.154 = -0.106 (ImageNet)", -1,
        *_between("vit", "resnet", "noise", lambda data: band(data, HIGH)),
    ),
    Claim(
        "noise-contrast", "... and suffers from low frequencies instead", "HowViT, question 2",
        "accuracy drop at 0.9 pi less that at 0.3 pi, ViT - ResNet",
        "(0.048 - 0.149) - (0.154 - 0.127) = -0.128 (ImageNet)", -1,
        *_between("vit", "resnet", "noise", lambda data: band(data, HIGH) - band(data, MIDDLE)),
    ),
    Claim(
        "alternet", "AlterNet is above the CNN it is built from", "HowViT, question 3",
        "accuracy, AlterNet - its CNN", "0.8402 - 0.8248 = 0.0154 (CIFAR-100, 50 layers)", 1,
        *_between("alternet", "preresnet", "accuracy", lambda data: scalar(data, "accuracy")),
    ),
    Claim(
        "smoothing", "Spatial smoothing improves MC dropout", "Blurs",
        "NLL of 16 averaged passes, with smoothing - without, nats", "figure only", -1,
        *_between("smoothing", "dropout", "ensemble", lambda data: scalar(data, "loss")),
    ),
)  # fmt: skip
