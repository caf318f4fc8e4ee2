"""Every probe on an accelerator: a simulated one on any machine, a real GPU where there is one.

On the simulated accelerator the numbers have to be those of the CPU bit for bit, and the host may wait for the device
only as often as `CASES` allows. On CUDA they have to agree within a tolerance, which the case states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import xarray as xr
from devices import KINDS, differences, machine, subject_on
from simulated_accelerator import Simulation

import landscape
from landscape.probes import PROBES, probe_class
from landscape.products import hvp_backends

pytestmark = pytest.mark.slow

# On CUDA neither is compared: how far a pass rounds otherwise than the exact one.
ROUNDING = ("deviates", "deviation_95", "deviation_max")
# Digests of weights and data, the check for randomness, and clocks: how much is timed depends on the machine's load.
ONCE = ("checkpoint.py", "dataset.py", "checks.py", "device.py")


class Case(NamedTuple):
    """A probe with options, the tolerance on CUDA, and how often the host may wait."""

    probe: str
    options: dict[str, Any]
    model: str = "vit_demo"
    rtol: float = 1e-4  # on CUDA, of the largest value of a quantity: float32 forward passes with other kernels
    per_unit: int = 1  # waits of a unit
    simulated: float = 0.0  # tolerance on the simulated device: above 0 where other code runs there than on a CPU
    once: int = 1  # waits before the first unit: the losses of the unmodified network, say
    split: str = "train"
    only: tuple[str, ...] = ()  # quantities that are compared; all by default
    together: int = 0  # mini-batches per product on the device


def lanczos(model: str = "vit_demo", *, per_unit: int = 20, once: int = 4, **options: Any) -> Case:
    """Lanczos reads numbers as it goes, the known exception, and steps and tests in another order on a device.

    Converged eigenvalues have a relative residual below 1e-3, whose square bounds their difference; those at the other
    end of the spectrum are not converged, and the number of products depends on when convergence was tested.
    """
    given = {"top": 1, "batches": 2, "max_products": 20, **options}
    return Case("hessian", given, model, 1e-3, per_unit, simulated=1e-3, once=once, only=("eigenvalue", "loss"))


# The first 14 waits of a surface are seven inner products of the directions, lengths of tensors, and the checks of the
# recorded forward pass; then there is one per row.
CASES = {
    "surface": Case("surface", {"resolution": "3"}, once=14),
    "surface, recalibrated": Case("surface", {"resolution": "3", "bn": "recalibrate:2"}, "resnet_demo", once=14),
    "surface, channels last": Case(
        "surface", {"resolution": "3", "memory_format": "channels_last"}, "resnet_demo", once=14
    ),
    "surface, cap": Case("surface", {"resolution": "3", "cap": 5.0}, per_unit=3, once=14),
    # Control points compare with the exact pass; bf16 rounds to 8 bits, in another order on another device.
    "surface, bf16": Case("surface", {"resolution": "3", "precision": "bf16"}, rtol=3e-2, once=14),
    # The plane's own directions differ: eigenvectors by the square root of the error of their eigenvalues.
    "surface, eigen": Case(
        "surface", {"resolution": "3", "plane": "eigen"}, rtol=2e-2, simulated=2e-2, per_unit=20, once=34
    ),
    "line": Case("line", {"resolution": 3}, once=4),
    "hessian, double backward": lanczos(hvp="double-backward"),
    "hessian, traced": lanczos(hvp="traced"),
    "hessian, side by side": lanczos(hvp="traced", per_unit=60)._replace(together=2),
    "hessian, ggn": lanczos(operator="ggn"),
    "hessian, fisher": lanczos(operator="fisher"),
    "hessian, whole data set": lanczos(scope="dataset"),
    "hessian, per layer": lanczos(per_layer=True, max_products=6, batches=1, per_unit=8),
    "hessian, verified": lanczos(max_products=40, verify=True, per_unit=60),
    "hessian, kinks": lanczos("resnet_demo", kinks="double", once=40),
    # `auto` takes the fastest backend, which depends on the load and changes numbers by rounding: one case of it, and a
    # fixed one elsewhere. Choosing times three pieces of work, with two waits each.
    "trace, xtrace": Case("trace", {"vectors": 4, "hvp": "double-backward"}, rtol=1e-3, per_unit=8),
    "trace, hutch++": Case(
        "trace", {"vectors": 4, "method": "hutch++", "hvp": "double-backward"}, rtol=1e-3, per_unit=6
    ),
    "trace, hutchinson": Case(
        "trace", {"vectors": 4, "method": "hutchinson", "hvp": "double-backward"}, rtol=1e-3, per_unit=3
    ),
    "trace, auto": Case(
        "trace", {"vectors": 4, "method": "hutchinson"}, rtol=1e-3, per_unit=3, simulated=1e-5, once=7,
        only=("batch_trace", "trace", "loss"),
    ),
    "trace, blocks": Case(
        "trace", {"vectors": 4, "blocks": "layer", "diagonal": "full", "hvp": "double-backward"}, rtol=1e-2,
        per_unit=20, once=40,
    ),
    # The length of the critical step depends on which side of its start a loss falls; the estimated error of an
    # eigenvalue, a square of a small residual, differs by 3e-6 on some processors.
    "step": Case(
        "step", {"optimizer": "sgd", "optimizer_arg": ("lr=0.1",)}, rtol=1e-3, simulated=1e-5, per_unit=80, once=40
    ),
    "flatness": Case(
        "flatness", {"steps": 1, "draws": 4, "vectors": 2, "hvp": "double-backward"}, rtol=1e-2, simulated=1e-6,
        per_unit=60, once=40,
    ),
    "density": Case(
        "density", {"vectors": 2, "steps": 3, "hvp": "double-backward"}, rtol=1e-3, simulated=1e-6, per_unit=8
    ),
    "density, blocks": Case(
        "density", {"vectors": 1, "steps": 3, "blocks": "layer"}, rtol=1e-2, simulated=1e-6, per_unit=80, once=40
    ),
    "noise-scale": Case("noise-scale", {"groups": 3}, rtol=1e-2, per_unit=8, once=40),
    "fourier": Case("fourier", {"spectrum": "full"}, per_unit=4, simulated=1e-6),
    "variance": Case("variance", {}, simulated=1e-6),  # a CPU does not subtract small means first
    "uncertainty": Case("uncertainty", {"reach": 2}, "resnet_demo", per_unit=14, simulated=1e-6),
    "similarity": Case("similarity", {}, per_unit=3),
    "attention-maps": Case("attention-maps", {}, per_unit=8),
    "tokens": Case("tokens", {"images": 2, "perplexity": 5.0}, per_unit=8, only=("label",)),  # t-SNE amplifies rounding
    "convexity": Case(
        "convexity", {"resolution": "2", "max_products": 2}, rtol=2e-2, simulated=2e-2, per_unit=40, once=20
    ),
    "attention": Case("attention", {"spectra_images": 1}, per_unit=8, simulated=1e-12),
    "lesion": Case("lesion", {}, once=8),  # whether the common prefix may run once is checked per removed unit
    "sensitivity": Case("sensitivity", {"bits": "4,2", "vectors": 2}, rtol=1e-2, per_unit=8, once=40),
    "lesion, recalibrated": Case("lesion", {"bn": "recalibrate:2"}, "resnet_demo"),
    "geometry": Case("geometry", {"images": 10}, rtol=1e-3, simulated=1e-6, per_unit=4, once=4),
    "calibration": Case("calibration", {"draws": 20}, once=20, simulated=1e-6, split="test"),
    "noise": Case("noise", {"bands": "0.2,0.7", "equal_energy": True}),
    "perturbation": Case(
        "perturbation", {"perturbations": "translate", "source": "generated"}, per_unit=3, split="test"
    ),
    "shape-bias": Case("shape-bias", {}, once=4, split="test"),
    "input-surface": Case(
        "input-surface", {"directions": "gradient,random", "resolution": 3, "images": 2}, rtol=0.1
    ),
    "attack": Case("attack", {"eps": "2/255", "steps": 2}, rtol=0.1),
    "corruption": Case("corruption", {"corruptions": "brightness", "severities": "3"}, per_unit=8, split="test"),
    "stream": Case("stream", {"tau": "1", "timed": 0}, rtol=1e-3, per_unit=4, split="test"),
    # Ridge penalties are chosen by held-out accuracy, one sample of which is 1/12: only features are compared exactly.
    "probe-linear": Case("probe-linear", {"train_samples": 32}, rtol=0.2, per_unit=2, once=9, split="test"),
}  # fmt: skip


BESIDE = {"members": "members", "pair": "against"}  # the option that takes other networks, by what `several` says
CASES |= {
    name: Case(name, dict(probe_class(name).smallest), simulated=1e-5, per_unit=20, once=40)
    for name in PROBES
    if probe_class(name).several != "run" and name not in {case.probe for case in CASES.values()}
}
ALWAYS = ("hessian, double backward", "surface")  # of products and of moved weights; the others are a campaign


def measured(case: Case, device: str, simulation: Simulation | None = None) -> xr.Dataset:
    """The probe's result; of several networks with one of other weights beside the subject's."""
    subject, options = subject_on(device, case.model, split=case.split), dict(case.options)
    if option := BESIDE.get(probe_class(case.probe).several):
        other = subject_on(device, case.model, split=case.split, seed=1).model
        options = {**options, option: other if option == "against" else [other]}
        options.pop("snapshots", None)
    if simulation is not None:
        simulation.waits.clear()
        simulation.draws.clear()
    return landscape.measure(case.probe, subject, out=None, quiet=True, **options)


def waits(simulation: Simulation) -> dict[tuple[str, str], int]:
    return {key: n for key, n in simulation.waits.items() if key[0].split("/")[-1].split(":")[0] not in ONCE}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # imported while a graph is traced
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n not in ALWAYS)) for n in CASES])
def test_a_device_gives_the_numbers_of_the_cpu(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    expected = measured(case, "cpu")
    monkeypatch.setattr(hvp_backends, "mini_batches_per_product", lambda *_: case.together)
    with machine(kind) as simulation:
        found = measured(case, "cuda", simulation)
    allowed, left_out = (case.rtol, ROUNDING) if simulation is None else (case.simulated, ())
    compared = {key: d for key, d in differences(expected, found).items() if key not in left_out}
    assert {key: d for key, d in compared.items() if key in (case.only or compared) and not d <= allowed} == {}
    if simulation is not None:
        counted = waits(simulation)
        premises = 3  # once: digests of the samples, and whether outputs depend on the mini-batch
        assert sum(counted.values()) <= premises + case.once + int(expected["done"].size) * case.per_unit, counted
        assert not simulation.draws  # of the device's own generator, which the CPU does not have
