"""The table of probes: `landscape.probes()` gives what can be measured, by name, with a line on each.

To add one: a file here, a file in plots, a row in each of the two tables, a test. Other packages add theirs by entry
points, see `landscape.plugins`.
"""

import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from landscape.options import did_you_mean
from landscape.plugins import beside, plugins
from landscape.probe import Probe, checked

CORE, REPRESENTATIONS, PREDICTIONS = GROUPS = ("core", "representations", "predictions and robustness")
PLUGINS = "of other packages"  # the group of what entry points add


class ProbeEntry(NamedTuple):
    """A row of the table."""

    group: str  # one of GROUPS, whose rows follow each other: help, documentation and report have them in this order
    dataclass: str  # the probe, in the module of its name (_ for -), imported on use; "" of another package
    help: str  # one line, of the command
    shared_pass: bool = False  # whether `landscape features` measures it, from one forward pass with others
    sources: str = ""  # what a paper that uses it cites: keys of sources.bib, with spaces between
    needs: str = ""  # a package beyond the project's requirements, without which it measures files only


PROBES: dict[str, ProbeEntry] = {
    "surface": ProbeEntry(CORE, "Surface", "Loss on a filter-normalised plane around the weights.",
        sources="li2018visualizing"),
    "line": ProbeEntry(CORE, "Line", "Loss along a line through the weights, or to another checkpoint: the barrier.",
        sources="goodfellow2015qualitatively"),
    "barriers": ProbeEntry(CORE, "Barriers", "Barriers between every two of several checkpoints, also aligned.",
        sources="frankle2020linear ainsworth2023git"),
    "align": ProbeEntry(CORE, "Align", "Permute a second checkpoint to match: the barrier before and after.",
        sources="ainsworth2023git"),
    "trajectory": ProbeEntry(CORE, "Trajectory",
        "Training path on its principal plane; in polar coordinates, easy to misread.",
        sources="park2022how li2018visualizing"),
    "hessian": ProbeEntry(CORE, "Hessian", "Extreme Hessian eigenvalues of every mini-batch, each with its residual.",
        sources="park2022blurs park2022how"),
    "trace": ProbeEntry(CORE, "Trace", "Trace of the Hessian, with its standard error.",
        sources="epperly2024xtrace hutchinson1989stochastic"),
    "density": ProbeEntry(CORE, "Density", "Density of all Hessian eigenvalues, by Lanczos quadrature.",
        sources="ubaru2017fast ghorbani2019investigation"),
    "convexity": ProbeEntry(CORE, "Convexity", "Ratio of the extreme Hessian eigenvalues at every point of a plane.",
        sources="li2018visualizing"),
    "flatness": ProbeEntry(CORE, "Flatness",
        "How flat the loss is: sharpness, noise and curvature measures, each with its error.",
        sources="andriushchenko2023modern"),
    "step": ProbeEntry(CORE, "Step", "The optimiser's next update: sharpness along it, predicted and actual change.",
        sources="andreyev2024edge kalra2026scalable"),
    "noise-scale": ProbeEntry(CORE, "NoiseScale",
        "Gradient noise scale, simple and weighted by the curvature: useful batch sizes.",
        sources="mccandlish2018empirical"),
    "sensitivity": ProbeEntry(CORE, "Sensitivity",
        "Accuracy and loss when weights are quantised, pruned or disturbed, unit by unit.",
        sources="dong2020hawq"),
    "fourier": ProbeEntry(REPRESENTATIONS, "Fourier",
        "Relative log amplitude of feature maps over frequency, per layer.", True,
        sources="park2022how"),
    "variance": ProbeEntry(REPRESENTATIONS, "Variance", "Variance of feature maps over positions, per layer.", True,
        sources="park2022how"),
    "similarity": ProbeEntry(REPRESENTATIONS, "Similarity",
        "Centred kernel alignment of all pairs of layers, or of two networks.", True,
        sources="nguyen2021wide kornblith2019similarity"),
    "attention": ProbeEntry(REPRESENTATIONS, "Attention",
        "Distance, mutual information and diversity of self-attentions, per head.", True,
        sources="park2023what"),
    "attention-maps": ProbeEntry(REPRESENTATIONS, "AttentionPictures",
        "Where chosen positions of the first images attend, as pictures.",
        sources="park2023what"),
    "tokens": ProbeEntry(REPRESENTATIONS, "Tokens", "Tokens of the first images in the plane, by t-SNE.",
        sources="vandermaaten2008visualizing park2023what"),
    "geometry": ProbeEntry(REPRESENTATIONS, "Geometry",
        "Dimension of features, neural collapse and class separation, per layer.", True,
        sources="roy2007effective facco2017estimating papyan2020prevalence"),
    "lesion": ProbeEntry(REPRESENTATIONS, "Lesion", "Accuracy and loss when one unit is removed, for every unit.",
        sources="park2022how veit2016residual"),
    "probe-linear": ProbeEntry(REPRESENTATIONS, "ProbeLinear",
        "Accuracy of a linear classifier on frozen features, per layer.",
        sources="alain2017understanding park2023what"),
    "uncertainty": ProbeEntry(REPRESENTATIONS, "Uncertainty",
        "Model and data uncertainty of feature maps, and their spatial covariance, per layer.",
        sources="park2022blurs"),
    "calibration": ProbeEntry(PREDICTIONS, "Calibration",
        "Calibration of the probabilities, before and after temperature scaling.",
        sources="guo2017calibration"),
    "ensemble": ProbeEntry(PREDICTIONS, "Ensemble",
        "Averaged probabilities of several networks: calibration, uncertainty, diversity.",
        sources="lakshminarayanan2017simple gal2016dropout"),
    "corruption": ProbeEntry(PREDICTIONS, "Corruption",
        "Accuracy, NLL and calibration under common corruptions: CIFAR-C, ImageNet-C.", needs="imagecorruptions",
        sources="hendrycks2019benchmarking"),
    "perturbation": ProbeEntry(PREDICTIONS, "Perturbation",
        "Consistency of the predictions on slowly changing images: CIFAR-P.",
        sources="hendrycks2019benchmarking"),
    "attack": ProbeEntry(PREDICTIONS, "Attack", "Accuracy under adversarial changes of the pixels: FGSM and PGD.",
        sources="goodfellow2015explaining madry2018towards"),
    "input-surface": ProbeEntry(PREDICTIONS, "InputSurface",
        "Loss around the images: along the gradient, towards adversarial images, at random.",
        sources="moosavi2019robustness madry2018towards"),
    "noise": ProbeEntry(PREDICTIONS, "Noise", "Accuracy under noise of one band of frequencies, for every band.",
        sources="park2022how"),
    "shape-bias": ProbeEntry(PREDICTIONS, "ShapeBias",
        "Decisions for the shape against the texture of cue-conflict pictures.",
        sources="geirhos2019imagenet"),
    "stream": ProbeEntry(PREDICTIONS, "Stream",
        "Predictions averaged over neighbouring frames of a stream, against tau.",
        sources="park2021vector"),
}  # fmt: skip

OWN = tuple(PROBES)
PROBES |= {n: ProbeEntry(PLUGINS, "", f"Of the package {one.package}.") for n, one in beside("probes", OWN).items()}
_given: dict[str, type[Any]] = {}  # classes that a caller gave, by name

FEATURES = tuple(name for name, entry in PROBES.items() if entry.shared_pass)
FEATURES_HELP = "Fourier, variance, similarity, attention and geometry from one forward pass per mini-batch."


def probe_class(probe: str | type[Any] | Probe) -> type[Any]:
    """The dataclass of a probe, by its name or of itself, checked against the contract of `landscape.probe`.

    A class of the caller's own is known by its name from then on, in this process.

    Raises:
        ValueError: there is no probe of that name (lists them), it cannot be imported, or its class is named as one of
            this project is.
        TypeError: it breaks the contract; see `checked`.
    """
    if isinstance(probe, str):
        return _given[probe] if probe in _given else _class_of(probe)
    kind = checked(probe if isinstance(probe, type) else type(probe))
    if kind.name in PROBES and kind is not _class_of(kind.name):
        raise ValueError(f"{kind.__name__} is named {kind.name}, as a probe of landscape is; give it another name")
    if kind.name not in PROBES:
        _given[kind.name] = kind
    return kind


@cache
def _class_of(name: str) -> type[Any]:
    if name not in PROBES:
        several = "; landscape.features(...) measures several in one pass" if name == "features" else ""
        near = several or did_you_mean(name, PROBES)
        raise ValueError(f"there is no probe {name}; expected one of {', '.join(PROBES)}{near}")
    entry = PROBES[name]
    if entry.dataclass:
        module = import_module(f"landscape.probes.{name.replace('-', '_')}")
        return checked(getattr(module, entry.dataclass))
    plugin = plugins("probes")[name]
    kind: type[Any] = plugin.load()
    plugin.require_api(vars(kind).get("api"))
    try:
        checked(kind)
    except TypeError as error:
        raise plugin.broken(str(error)) from error
    if kind.name != name:
        raise plugin.broken(f"its class is named {kind.name}")
    return kind


def is_known(name: str) -> bool:
    """Whether there is a probe of that name, or the caller has given its class."""
    return name in PROBES or name in _given


class ProbeList(dict[str, str]):
    """Names of probes with one line about each; prints as a table."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {text}" for name, text in self.items())


class _Callable(ModuleType):
    """This package, which `landscape.probes()` calls: the function that users look for has the package's name."""

    def __call__(self) -> ProbeList:
        """What `landscape.measure` can measure: the name of every probe, with one line about it."""
        return ProbeList({name: entry.help for name, entry in PROBES.items()})


sys.modules[__name__].__class__ = _Callable
