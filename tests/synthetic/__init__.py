"""A results file of a study of several networks, written by `results.writer.Writer` from made-up numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from analytic import attention_net

from landscape.probe import Plan, Unit
from landscape.probes import PROBES, probe_class
from landscape.results.run_key import RunKey
from landscape.results.writer import Writer
from landscape.run import reduce_of
from synthetic.curvature import density, flatness, hessian, monitor, noise_scale, step, trace
from synthetic.features import attention, fourier, probe_linear, similarity, variance
from synthetic.landscapes import align, all_barriers, input_surface, line, surface, trajectory
from synthetic.networks import PARAMETERS, Measure, Network, convolutional, hybrid, transformer
from synthetic.predictions import attack, corruption, ensemble, lesion, noise, perturbation, sensitivity, shape_bias

NETWORKS = (
    transformer("vit_ti-cifar100"),
    convolutional("resnet50-cifar100"),
    hybrid("alternet50-cifar100"),
)
ALL = (*PROBES, "monitor")  # what figures are drawn of


def write(
    path: Path, networks: Sequence[Network] = NETWORKS, *, probes: Iterable[str] = ALL, share: float = 1.0
) -> Path:
    """Store every probe of every network, the first `share` of its units finished."""
    for number, network in enumerate(networks):
        for probe in probes:
            plan, measure = MADE_UP[probe](network) if probe in MADE_UP else measured(probe)
            parameters = PARAMETERS.get(probe, {}) if probe in MADE_UP else probe_class(probe).smallest
            attributes: dict[str, Any] = {
                "parameters": json.dumps(parameters),
                "model": network.model,
                "data": "cifar100",
                "batch_size": 128,
                "samples": 1024,
                "epoch": 300.0,
                "checkpoint_sha256": f"{number:064x}",
                "protocol": "cifar100 test, 1024 samples, batch size 128, no augmentation, weight decay 0, seed 0",
            }
            place = ALL.index(probe)
            key = RunKey(probe, network.label, f"{number:05x}{place:05x}", plan, attributes)
            with Writer(path, key, reduce_of=reduce_of) as writer:
                for unit in first(list(plan.units()), share):
                    writer.write(unit, measure(unit))
    return path


def measured(name: str) -> tuple[Plan, Measure]:
    """A probe without made-up numbers, measured on a tiny network."""
    probe, subject = probe_class(name)(**probe_class(name).smallest), attention_net()
    return probe.plan(subject), partial(probe.measure, subject)


def first(units: list[Unit], share: float) -> Iterator[Unit]:
    yield from units[: math.ceil(share * len(units))]


MADE_UP: Mapping[str, Callable[[Network], tuple[Plan, Measure]]] = {
    "monitor": monitor,
    "surface": surface,
    "trajectory": trajectory,
    "hessian": hessian,
    "fourier": fourier,
    "variance": variance,
    "lesion": lesion,
    "sensitivity": sensitivity,
    "trace": trace,
    "step": step,
    "flatness": flatness,
    "density": density,
    "line": line,
    "align": align,
    "barriers": all_barriers,
    "noise": noise,
    "noise-scale": noise_scale,
    "corruption": corruption,
    "attack": attack,
    "input-surface": input_surface,
    "perturbation": perturbation,
    "shape-bias": shape_bias,
    "probe-linear": probe_linear,
    "similarity": similarity,
    "attention": attention,
    "ensemble": ensemble,
}
