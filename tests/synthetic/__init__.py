"""A results file of a study of several networks, stored from made-up numbers in one change of the file."""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from analytic import attention_net

from landscape.headline import Headline, stored_headlines
from landscape.monitoring import stored_series
from landscape.probe import Plan, Unit, Values
from landscape.probes import PROBES, probe_class
from landscape.results import group as groups
from landscape.results.run_key import RunKey
from landscape.results.updating import change_file
from landscape.results.writer import record_of
from landscape.running.run import reduce_of
from synthetic.curvature import density, flatness, hessian, monitor, noise_scale, step, trace
from synthetic.features import attention, fourier, probe_linear, similarity, variance
from synthetic.landscapes import align, all_barriers, input_surface, line, surface, trajectory
from synthetic.networks import PARAMETERS, Measure, Network, convolutional, hybrid, transformer
from synthetic.predictions import attack, corruption, ensemble, lesion, noise, perturbation, sensitivity, shape_bias

NETWORKS = (transformer("vit_ti-cifar100"), convolutional("resnet50-cifar100"), hybrid("alternet50-cifar100"))
SMALL = transformer("vit", depth=3)
ALL = (*PROBES, "monitor")  # what figures are drawn of


def write(
    path: Path, networks: Sequence[Network] = NETWORKS, *, probes: Iterable[str] = ALL, share: float = 1.0
) -> Path:
    """Store every probe of every network, the first `share` of its units finished; networks are measured in turn."""
    probes = tuple(probes)

    def change(file: h5py.File) -> None:
        for number, network in enumerate(networks):
            for probe in probes:
                plan, measure = MADE_UP[probe](network) if probe in MADE_UP else measured(probe)
                key = _key(number, network, probe, plan)
                group = groups.open_or_create(file, key)
                group.attrs["created"] = f"2025-01-01T{number:02}:{ALL.index(probe):02}:00+00:00"
                units = first(list(plan.units()), share)
                groups.merge(group, (record_of(key, unit, measure(unit)) for unit in units), reduce_of)
        patch.undo()
        for _, group in groups.results_in(file):
            groups.seal(group)

    with pytest.MonkeyPatch.context() as patch:  # each result is sealed once, and none looked for others of its label
        patch.setattr(groups, "seal", lambda group, stored=None: None)
        patch.setattr(groups, "_other_checkpoint", lambda file, key: "")
        change_file(path, change)
    return path


def shared(factory: pytest.TempPathFactory, name: str, *args: Any, resumed: Path | None = None, **kwargs: Any) -> Path:
    """A file as `write` makes it, or `resumed`, made by one of the processes of the tests and read by all."""
    folder = factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / f"made_up_{name}"
    folder.mkdir(exist_ok=True)
    path = folder / "results.h5"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        made = path.with_name("begun.h5")  # by its own name only once it is whole
        if resumed is not None:
            shutil.copy(resumed, made)
        return write(made, *args, **kwargs).rename(path)


def changed(study: Path, to: Path, change: Callable[[h5py.File], object]) -> Path:
    """A copy of a study with something changed by `change(file)`."""
    shutil.copy(study, to)
    with h5py.File(to, "r+") as file:
        change(file)
    return to


def _key(number: int, network: Network, probe: str, plan: Plan) -> RunKey:
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
    attributes = declared(probe, **attributes)
    del attributes["probe"]  # written from the key
    return RunKey(probe, network.label, f"{number:05x}{ALL.index(probe):05x}", plan, attributes)


def headlines_of(probe: str) -> Sequence[Headline]:
    return stored_series.HEADLINES if probe == "monitor" else probe_class(probe).headlines


def declared(probe: str, **attributes: Any) -> dict[str, Any]:
    """Attributes of a made-up result."""
    kind = probe_class("trace" if probe == "monitor" else probe)
    about = {"uses": ",".join(kind.uses), "several": kind.several, "errors_over": kind.errors_over}
    return {"probe": probe, **about, **stored_headlines(headlines_of(probe)), **attributes}


class Projection:
    """In place of t-SNE, whose import and descent take seconds: the first two channels."""

    kl_divergence_ = 0.5

    def __init__(self, **_: Any) -> None: ...

    def fit_transform(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:, :2]


@cache
def measured(name: str) -> tuple[Plan, Measure]:
    """A probe without made-up numbers, measured on a tiny network; once for all networks."""
    probe, subject = probe_class(name)(**probe_class(name).smallest), attention_net()
    found = dict[tuple[int, ...], Values]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("landscape.probes.tokens._tsne", lambda: Projection)
        plan = probe.plan(subject)

    def measure(unit: Unit) -> Values:
        if unit.index not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("landscape.probes.tokens._tsne", lambda: Projection)
                found[unit.index] = probe.measure(subject, unit)
        return found[unit.index]

    return plan, measure


def first(units: list[Unit], share: float) -> Iterator[Unit]:
    yield from units[: math.ceil(share * len(units))]


MADE_UP: Mapping[str, Callable[[Network], tuple[Plan, Measure]]] = {
    "monitor": monitor, "surface": surface, "trajectory": trajectory, "hessian": hessian, "fourier": fourier,
    "variance": variance, "lesion": lesion, "sensitivity": sensitivity, "trace": trace, "step": step,
    "flatness": flatness, "density": density, "line": line, "align": align, "barriers": all_barriers, "noise": noise,
    "noise-scale": noise_scale, "corruption": corruption, "attack": attack, "input-surface": input_surface,
    "perturbation": perturbation, "shape-bias": shape_bias, "probe-linear": probe_linear, "similarity": similarity,
    "attention": attention, "ensemble": ensemble,
}  # fmt: skip
