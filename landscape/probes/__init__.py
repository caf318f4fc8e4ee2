"""The probes, by name. Adding one: a file here, a file in plots, a test, a line in each of the two tables."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# name -> (module, class, one line of help); the modules are imported on use, so that this table costs nothing
PROBES: dict[str, tuple[str, str, str]] = {
    "surface": ("surface", "Surface", "Loss on a filter-normalised plane around the weights."),
    "line": ("line", "Line", "Loss along a line through the weights, or to another checkpoint: the barrier."),
    "trajectory": (
        "trajectory",
        "Trajectory",
        "Training path in polar coordinates and on its principal plane.",
    ),
    "hessian": (
        "hessian",
        "Hessian",
        "Extreme Hessian eigenvalues of every mini-batch, each with its residual.",
    ),
    "trace": ("trace", "Trace", "Trace of the Hessian, with its standard error."),
    "density": ("density", "Density", "Density of all Hessian eigenvalues, by Lanczos quadrature."),
    "fourier": ("fourier", "Fourier", "Relative log amplitude of feature maps over frequency, per layer."),
    "variance": ("variance", "Variance", "Variance of feature maps over positions, per layer."),
    "similarity": ("similarity", "Similarity", "Centred kernel alignment of all pairs of layers, or of two networks."),
    "attention": ("attention", "Attention", "Distance, mutual information and diversity of self-attentions, per head."),
    "lesion": ("lesion", "Lesion", "Accuracy and loss when one unit is removed, for every unit."),
    "noise": ("noise", "Noise", "Accuracy under noise of one band of frequencies, for every band."),
    "probe-linear": ("probe_linear", "ProbeLinear", "Accuracy of a linear classifier on frozen features, per layer."),
}

# what `landscape features` measures, from one forward pass per mini-batch
FEATURES = ("fourier", "variance", "similarity", "attention")
FEATURES_HELP = "Fourier, variance, similarity and attention from one forward pass per mini-batch."


def probe_class(name: str) -> type[Any]:
    """The dataclass of a probe.

    Raises:
        ValueError: there is no probe of that name; lists them.
    """
    if name not in PROBES:
        raise ValueError(f"there is no probe {name}; expected one of {', '.join(PROBES)}")
    module, attribute, _ = PROBES[name]
    return getattr(import_module(f"landscape.probes.{module}"), attribute)  # type: ignore[no-any-return]
