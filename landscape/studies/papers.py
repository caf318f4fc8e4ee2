"""List the papers' claims: the networks and measurements that decide each, and the number whose sign does.

Sources: "How Do Vision Transformers Work?" (Park & Kim, ICLR 2022, arXiv 2202.06709; below HowViT, with the number of
its question), "Blurs Behave Like Ensembles" (Park & Kim, ICML 2022, arXiv 2105.12639; below Blurs), "Vector Quantized
Bayesian Neural Network Inference for Data Streams" (Park et al., AAAI 2021, arXiv 1907.05911; below VQ-BNN), "What
Do Self-Supervised Vision Transformers Learn?" (Park et al., ICLR 2023, arXiv 2305.00729; below SelfViT), and the two of
`edge_of_stability`, whose trainings are followed step by step (below EoS and AEoS).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import xarray as xr

from landscape.results.headline_numbers import measured
from landscape.studies.claims import Claim, Measurement, Training
from landscape.studies.edge_of_stability import SERIES, rise, within
from landscape.studies.study import Cell, Results

Q1, Q2, Q3 = (f"HowViT, question {number}" for number in (1, 2, 3))
HIGH, MIDDLE = 0.9, 0.3  # centres of two noise bands, in units of pi
EQUAL_FREQUENCY = 1e-3  # tolerance of a band's centre

Value: TypeAlias = Callable[[xr.Dataset], float]
Deciding: TypeAlias = tuple[tuple[Cell, ...], Callable[[Results], float]]  # `needs` and `compute` of a claim

LOCAL = {"dim": 48, "depth": 5, "heads": 3, "std": 0.1}  # of the size of vit_demo
NETWORKS: Mapping[str, Training] = {
    "vit": Training("vit_demo"),
    "resnet": Training("resnet_demo"),
    "alternet": Training("alternet_demo"),
    "preresnet": Training("preresnet_demo"),
    # A fifth of the images for the same number of updates.
    "small": Training("vit_demo", images=0.2, epochs=5.0),
    # Pairs that are compared only with each other, on shorter runs.
    "k3": Training("localvit_ti", {**LOCAL, "neighbourhood": 3}, epochs=0.625),
    "global": Training("localvit_ti", {**LOCAL, "neighbourhood": None}, epochs=0.625),
    "dropout": Training("resnet_demo", {"mc_dropout": 0.3}, epochs=0.625),
    "smoothing": Training("resnet_demo", {"mc_dropout": 0.3, "smoothing": True}, epochs=0.625),
    # Encoders that are trained without labels.
    "contrastive": Training("vit_demo", objective="simclr"),
    "masked": Training("vit_demo", objective="mim"),
}
MEASUREMENTS: Mapping[str, Measurement] = {
    "surface": Measurement("surface", {"resolution": "13", "samples": 256}),
    "spectrum": Measurement("hessian", {"preset": "park2022", "samples": 256}),
    "early spectrum": Measurement("hessian", {"preset": "park2022", "samples": 256}, "warmup.pt"),
    "fourier": Measurement("fourier", {"samples": 512}),
    "variance": Measurement("variance", {"samples": 512}),
    "lesion": Measurement("lesion", {"samples": 1024}),
    "noise": Measurement("noise", {"samples": 1024}),
    "accuracy": Measurement("metrics"),
    "ensemble": Measurement("evaluate", {"samples": 2048, "passes": 16}),
    "ensemble sizes": Measurement("ensemble", {"samples": 2048, "mc_dropout": 20}),
    "dropout fourier": Measurement("fourier", {"samples": 512, "mc_dropout": 8}),
    "fourier without dropout": Measurement("fourier", {"samples": 512, "model_arg": {"mc_dropout": 0}}),
    "uncertainty": Measurement("uncertainty", {"samples": 512, "mc_dropout": 8}),
    "attention": Measurement("attention", {"samples": 512}),
    "stream": Measurement("stream", {"samples": 256, "moving": "translate", "tau": "1"}),
}


def _alone(network: str, measurement: str, value: Value) -> Deciding:
    """The value of one network."""
    return ((network, measurement),), lambda results: value(results[network, measurement])


def _difference(one: str, other: str, measurement: str, value: Value | str, reference: str = "") -> Deciding:
    """The value of one network minus that of another, by another measurement if that is given as the reference.

    The value is a function of the result, or the name of a headline number.
    """
    needs = ((one, measurement), (other, reference or measurement))
    of = value if callable(value) else lambda data: headline(data, value)
    return needs, lambda results: of(results[needs[0]]) - of(results[needs[1]])


def _log_ratio(one: str, other: str, measurement: str, name: str) -> Deciding:
    return _difference(one, other, measurement, lambda data: math.log(headline(data, name)))


def _largest_difference(one: str, other: str, name: str) -> Deciding:
    """The largest difference of two networks' ensembles of one size: negative if that of every size is."""
    needs = ((one, "ensemble sizes"), (other, "ensemble sizes"))
    return needs, lambda results: float((results[needs[0]][name] - results[needs[1]][name]).max())


def _by_temporal_smoothing(data: xr.Dataset, name: str) -> float:
    """Change of a score of one deterministic pass per frame by temporal smoothing."""
    scores = data[name].isel(prediction=0)
    return float(scores.isel(tau=-1) - scores.isel(tau=0))


def _relative_throughput(data: xr.Dataset) -> float:
    """Frames per second with temporal smoothing, as a share of those without."""
    return float(data.attrs["frames_per_second_smoothed"] / data.attrs["frames_per_second_deterministic"])


def headline(data: xr.Dataset, name: str) -> float:
    """A headline number; NaN where it is not known."""
    return next((one.value for one in measured(data) if one.name == name), math.nan)


def band(data: xr.Dataset, centre: float) -> float:
    """Accuracy drop under noise of one band, a fraction."""
    return float(data["accuracy_drop"].sel(band=centre, method="nearest", tolerance=EQUAL_FREQUENCY))


def mean_step(values: np.ndarray, data: xr.Dataset, kinds: Sequence[str]) -> float:
    """Mean change from the preceding layer, over layers of some kinds that do not reduce their map."""
    kind, reduces = data["kind"].values.astype(str), data["reduces"].values
    change = np.diff(values, prepend=np.nan)
    counted = np.isin(kind, kinds) & (reduces == 0) & np.isfinite(change)
    return float(change[counted].mean()) if counted.any() else math.nan


def _sharpness(kind: str) -> Value:
    return lambda data: mean_step(data["high_frequency"].values, data, [kind])


def _spread(kind: str) -> Value:
    def value(data: xr.Dataset) -> float:
        with np.errstate(divide="ignore"):  # a layer without a map has NaN and does not count
            return mean_step(np.log(data["variance"].values), data, [kind])

    return value


def at_stage_ends(data: xr.Dataset, values: np.ndarray) -> float:
    """Mean over stages of the value at the last layer of each that has one."""
    stage, finite = data["stage"].values, np.isfinite(values)
    ends = [values[(stage == one) & finite][-1] for one in np.unique(stage[finite]) if one >= 0]
    return float(np.mean(ends)) if ends else math.nan


def _relative_uncertainty(data: xr.Dataset) -> float:
    """ln(model uncertainty / root mean square of the map), averaged over the ends of the stages."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return at_stage_ends(data, np.log(data["model_uncertainty"].values / data["rms"].values))


def _high_frequency(data: xr.Dataset) -> float:
    return at_stage_ends(data, data["high_frequency"].values)


def last_layer(data: xr.Dataset, name: str) -> float:
    """Mean over heads, if there are any, at the last layer."""
    return float(data[name].isel(layer=-1).mean())


def mean_distance(data: xr.Dataset) -> float:
    """Attention distance averaged over heads and layers, pixels."""
    return float(data["distance"].mean())


def first_against_rest(data: xr.Dataset) -> float:
    """Accuracy drop of the first unit of a stage minus the mean of its others, averaged over stages with others."""
    drop, stage = data["accuracy_drop"].values, data["stage"].values
    differences = [
        drop[stage == one][0] - drop[stage == one][1:].mean() for one in np.unique(stage) if (stage == one).sum() > 1
    ]
    return float(np.mean(differences)) if differences else math.nan


def _stage_ends(results: Results) -> float:
    """Accuracy drop of the attention at the end of a stage minus that of the convolution there in its CNN."""
    alternet, cnn = results["alternet", "lesion"], results["preresnet", "lesion"]
    kind, stage = alternet["kind"].values.astype(str), alternet["stage"].values
    differences = []
    for one in np.unique(stage):
        last = np.flatnonzero(stage == one)[-1]
        same = np.flatnonzero(cnn["stage"].values == one)
        if kind[last] == "msa" and len(same):
            differences.append(float(alternet["accuracy_drop"][last]) - float(cnn["accuracy_drop"][same[-1]]))
    return float(np.mean(differences)) if differences else math.nan


CLAIMS: tuple[Claim, ...] = (
    Claim("flatter", "A ViT's loss surface is flatter than a ResNet's", Q1, "height at radius 0.5, ViT - ResNet, nats",
          -1, *_difference("vit", "resnet", "surface", "height at 0.5"),
          published="1.98 - 3.03 = -1.05 (their published surfaces)"),
    Claim("sharpness", "A ViT's positive Hessian eigenvalues are smaller", Q1, "ln(APE of the ViT / APE of the ResNet)",
          -1, *_log_ratio("vit", "resnet", "spectrum", "ape")),
    Claim("early-sharpness", "... and so they are at the end of warm-up", Q1,
          "ln(APE of the ViT / APE of the ResNet), end of warm-up", -1,
          *_log_ratio("vit", "resnet", "early spectrum", "ape")),
    Claim("negative", "A ViT has more negative Hessian eigenvalues early in training", Q1,
          "NEP, ViT - ResNet, end of warm-up", 1, *_difference("vit", "resnet", "early spectrum", "nep")),
    Claim("less-data", "With less data a ViT has more negative eigenvalues", Q1,
          "NEP, a fifth of the images - all, end of warm-up (312 updates, 500)", 1,
          *_difference("small", "vit", "early spectrum", "nep")),
    Claim("locality", "Local attention has fewer negative eigenvalues than global", Q1,
          "NEP, 3 x 3 - global, end of warm-up", -1, *_difference("k3", "global", "early spectrum", "nep")),
    Claim("low-pass", "Self-attentions are low-pass filters", Q2,
          "change of DeltaLogA at the highest frequency across an MSA of the ViT, nats", -1,
          *_alone("vit", "fourier", _sharpness("msa"))),
    Claim("low-pass-alternet", "... in a network of convolutions too", Q2,
          "the same across an MSA of the AlterNet, nats", -1, *_alone("alternet", "fourier", _sharpness("msa"))),
    Claim("high-pass", "Convolutions are high-pass filters", Q2,
          "the same across a convolutional block of the ResNet, nats", 1,
          *_alone("resnet", "fourier", _sharpness("conv"))),
    Claim("high-pass-mlp", "MLPs of a ViT amplify high frequencies", Q2, "the same across an MLP of the ViT, nats", 1,
          *_alone("vit", "fourier", _sharpness("mlp"))),
    Claim("variance", "Self-attentions reduce the variance of feature maps", Q2,
          "change of ln variance across an MSA of the ViT", -1, *_alone("vit", "variance", _spread("msa"))),
    Claim("variance-conv", "Convolutions and MLPs increase it", Q2,
          "change of ln variance across a convolutional block of the ResNet", 1,
          *_alone("resnet", "variance", _spread("conv"))),
    Claim("rhythm", "Early convolutions of a stage matter most", Q3,
          "accuracy drop, first unit of a stage - its others, ResNet", 1,
          *_alone("resnet", "lesion", first_against_rest)),
    Claim("ends", "At the end of a stage attention matters more than convolution", Q3,
          "accuracy drop, last unit of a stage, AlterNet - its CNN", 1,
          (("alternet", "lesion"), ("preresnet", "lesion")), _stage_ends),
    Claim("noise", "A ViT is robust to high-frequency noise where a ResNet is not", Q2,
          "accuracy drop at 0.9 pi, ViT - ResNet", -1,
          *_difference("vit", "resnet", "noise", lambda data: band(data, HIGH)),
          published="0.048 - 0.154 = -0.106 (ImageNet)"),
    Claim("noise-contrast", "... and suffers from low frequencies instead", Q2,
          "accuracy drop at 0.9 pi less that at 0.3 pi, ViT - ResNet", -1,
          *_difference("vit", "resnet", "noise", lambda data: band(data, HIGH) - band(data, MIDDLE)),
          published="(0.048 - 0.149) - (0.154 - 0.127) = -0.128 (ImageNet)"),
    Claim("alternet", "AlterNet is above the CNN it is built from", Q3, "accuracy, AlterNet - its CNN", 1,
          *_difference("alternet", "preresnet", "accuracy", "accuracy"),
          published="0.8402 - 0.8248 = 0.0154 (CIFAR-100, 50 layers)"),
    Claim("smoothing", "Spatial smoothing improves MC dropout", "Blurs",
          "NLL of 16 averaged passes, with smoothing - without, nats", -1,
          *_difference("smoothing", "dropout", "ensemble", "loss")),
    Claim("smoothing-sizes", "... at every number of averaged dropout masks", "Blurs",
          "largest over 1, 2, 3, 5, 10, 20 masks of NLL with smoothing - without, nats", -1,
          *_largest_difference("smoothing", "dropout", "nll")),
    Claim("smoothing-calibration", "... and so does its calibration", "Blurs",
          "largest over 1, 2, 3, 5, 10, 20 masks of ECE with smoothing - without", -1,
          *_largest_difference("smoothing", "dropout", "ece")),
    Claim("dropout-frequencies", "MC dropout adds high frequencies to feature maps", "Blurs",
          "DeltaLogA at the highest frequency at the ends of stages, 8 dropout masks - none, nats", 1,
          *_difference("dropout", "dropout", "dropout fourier", _high_frequency, "fourier without dropout")),
    Claim("smoothing-frequencies", "... and spatial smoothing removes them", "Blurs",
          "the same with dropout masks, with smoothing - without, nats", -1,
          *_difference("smoothing", "dropout", "dropout fourier", _high_frequency)),
    Claim("uncertainty", "Spatial smoothing lowers the uncertainty of feature maps", "Blurs",
          "ln(standard deviation over masks / root mean square) at the ends of stages, with smoothing - without", -1,
          *_difference("smoothing", "dropout", "uncertainty", _relative_uncertainty)),
    Claim("temporal", "Temporal smoothing of a stream lowers the loss", "VQ-BNN",
          "NLL with temporal smoothing - without, ResNet, moving images, nats", -1,
          *_alone("resnet", "stream", lambda data: _by_temporal_smoothing(data, "nll")),
          published="0.284 - 0.314 = -0.030 (CamVid)"),
    Claim("temporal-calibration", "... and improves calibration", "VQ-BNN",
          "ECE with temporal smoothing - without, ResNet, moving images", -1,
          *_alone("resnet", "stream", lambda data: _by_temporal_smoothing(data, "ece")),
          published="0.0300 - 0.0431 = -0.0131 (CamVid)"),
    Claim("temporal-throughput", "... at 90 % of the frames per second", "VQ-BNN",
          "frames per second with temporal smoothing / without - 0.9, ResNet", 1,
          *_alone("resnet", "stream", lambda data: _relative_throughput(data) - 0.9)),
    Claim("global-attention", "Contrastive encoders attend globally", "SelfViT, question 1",
          "attention distance, contrastive - masked-image encoder, pixels", 1,
          *_difference("contrastive", "masked", "attention", mean_distance)),
    Claim("collapse", "... and their attention is less diverse at the end", "SelfViT, question 1",
          "normalised mutual information of the last layer, contrastive - masked-image encoder", -1,
          *_difference("contrastive", "masked", "attention", lambda data: last_layer(data, "mutual_information"))),
    Claim("masked-frequencies", "Masked-image encoders use high frequencies", "SelfViT, question 2",
          "DeltaLogA at the highest frequency of the last layer, masked-image - contrastive encoder, nats", 1,
          *_difference("masked", "contrastive", "fourier", lambda data: last_layer(data, "high_frequency"))),
    Claim("sharpening", "Full-batch gradient descent moves to larger sharpness", "EoS",
          "ln(mean sharpness from where it first reaches 2 / learning rate / that before the first step)", 1,
          *_alone("gradient descent", SERIES, lambda data: rise("gradient descent", data))),
    Claim("edge-of-stability", "... and stays at 2 / learning rate, within 3 %", "EoS",
          "0.03 - distance from 1 of the mean of sharpness x learning rate / 2, from where that first reaches 1", 1,
          *_alone("gradient descent", SERIES, lambda data: within("gradient descent", data, 0.03))),
    Claim("adaptive-edge", "Full-batch Adam stays at its own threshold, within 5 %", "AEoS",
          "0.05 - distance from 1 of the mean of preconditioned sharpness / threshold, from where that first reaches 1",
          1, *_alone("full-batch Adam", SERIES, lambda data: within("full-batch Adam", data, 0.05))),
)  # fmt: skip
