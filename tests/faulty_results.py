"""Results that have a fault named by `landscape doctor`, and sound results to compare with."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from landscape.doctor import panels, premises, protocols, spectra, surfaces
from landscape.doctor.finding import Result, Rule, RuleOfSeveral
from landscape.probes import probe_class
from landscape.statistics.intervals import CERTIFIED

ERROR = 0.01  # standard error of a made-up loss


OF_GEOMETRY = json.dumps(dict(probe_class("geometry").certified))


def made(probe: str, arrays: Mapping[str, Any] = {}, *, label: str = "net", **attributes: Any) -> Result:
    """A stored result of made-up numbers: name -> (dims, values), or a number."""
    parameters, spec = attributes.pop("parameters", {}), attributes.pop("spec", {})
    about = {"probe": probe, "label": label, "samples": 1000, "classes": 10, "data": "digits", "epoch": 12.0}
    spec = {"checkpoint": f"{label}.pt", "split": "train", "samples": str(attributes.get("samples", 1000)), **spec}
    about |= {"spec": json.dumps(spec), "parameters": json.dumps(parameters), "options": json.dumps(spec | parameters)}
    about |= {"checkpoint_sha256": label, **attributes}
    variables = {name: value if isinstance(value, tuple) else ((), value) for name, value in arrays.items()}
    for name in [name for name in variables if name.endswith("_se")]:
        variables[name] = (*variables[name], {"over": "samples", "n": about["samples"]})
    return Result(Path("r.h5"), f"{probe}/{label}-0123456789", xr.Dataset(variables, attrs=about))


def surface(reach: float = 1.0, *, points: int = 11, at: tuple[float, float] = (0.0, 0.0), **attributes: Any) -> Result:
    """A round bowl of height 2.2 at radius 0.5, beyond which the loss grows."""
    x = y = np.linspace(-reach, reach, points)
    a, b = np.meshgrid(x - at[0], y - at[1], indexing="ij")
    loss = attributes.pop("loss", 0.05 + 9 * (a**2 + b**2))
    flat = np.full(loss.shape, ERROR)
    arrays = {"x": ("x", x), "y": ("y", y), "accuracy": (("x", "y"), np.clip(1 - loss / 10, 0.1, 1))}
    arrays |= {"loss": (("x", "y"), loss), "loss_se": (("x", "y"), flat), "rise_se": (("x", "y"), flat)}
    arrays |= {"done": (("x", "y"), np.ones(loss.shape, np.uint8)), **attributes.pop("arrays", {})}
    return made("surface", arrays, plane="random", **attributes)


def line(**arrays: Any) -> Result:
    t = np.linspace(0, 1, 5)
    loss = np.array([[0.1, 0.5, 1.0, 0.5, 0.2]])
    known: dict[str, Any] = {"t": ("t", t), "loss": (("direction", "t"), loss)}
    known |= {"loss_se": (("direction", "t"), np.full(loss.shape, ERROR)), "name": ("direction", ["towards b"])}
    own = {name: ("direction", np.array([value])) for name, value in arrays.items()}
    return made("line", {**known, **own}, statistics="frozen")


def pairs(*barriers: float) -> Result:
    """Barriers of every two of several checkpoints, as they are."""
    errors = np.full((1, len(barriers)), 0.02)
    return made("barriers", {"barrier": (("curve", "pair"), [barriers]), "barrier_se": (("curve", "pair"), errors)})


def corners(excess: float) -> Result:
    arrays = {"path_loss": [0.1, 0.2, 0.3], "path_excess": [0.0, excess, 0.0], "path_name": ["a", "b", "c"]}
    on_path = {name: ("snapshot", value) for name, value in arrays.items()}
    return made("surface", on_path, plane="checkpoints", statistics="frozen", parameters={"bn": "frozen"})


def hessian(
    batches: int = 12, *, converged: float = 1.0, values: np.ndarray | None = None, **attributes: Any
) -> Result:
    eigenvalue = np.linspace(1.0, 50.0, 2 * batches).reshape(batches, 2) if values is None else values
    arrays: dict[str, Any] = {"eigenvalue": (("batch", "rank"), eigenvalue), "done": ("batch", np.ones(batches))}
    arrays |= {"converged": (("batch", "rank"), np.full(eigenvalue.shape, converged))}
    arrays |= {
        "residual": (("batch", "rank"), np.full(eigenvalue.shape, 0.1)),
        "loss": ("batch", np.full(batches, 0.1)),
    }
    arrays |= {"nep": 0.2, "nep_low": 0.1, "nep_high": 0.3, **attributes.pop("arrays", {})}
    parameters = {"max_products": 200, "tol": 1e-4, "kinks": "double", **attributes.pop("parameters", {})}
    about = {"batch_size": 16, "samples": 16 * batches, "parameters": parameters}
    return made("hessian", arrays, **{**about, **attributes})


def drops(probe: str, rise: float, intact: float = 0.9, drop: float = 0.2, **attributes: Any) -> Result:
    known = {"loss_increase": rise, "loss_increase_se": ERROR, "accuracy_drop": drop}
    arrays = {name: ("unit", np.full(4, value)) for name, value in known.items()}
    return made(probe, arrays, intact_accuracy=intact, **attributes)


def spread(values: list[float], error: float) -> dict[str, Any]:
    layer = np.array(values)
    return {"variance": ("layer", layer), "variance_se": ("layer", np.full(len(layer), error))}


def path(worst: float, count: int = 5) -> Result:
    loss = np.linspace(2.3, 0.1, count)
    plane = np.where(np.arange(count) == 1, worst, loss)
    arrays = {
        "loss": loss, "plane_loss": plane, "plane_excess": plane - loss, "plane_excess_se": np.full(count, ERROR),
        "radius": loss,
    }  # fmt: skip
    return made("trajectory", {name: ("snapshot", value) for name, value in arrays.items()})


BOWL = surface().values("loss")
PITS = BOWL.copy()
PITS[5, 8] = -1.0  # a deeper minimum three cells from the centre
RAGGED = np.where(BOWL > 15, np.inf, BOWL)
CASES: dict[str, tuple[Rule, Result, Result, str]] = {  # name -> rule, with the fault, without it, what to do
    "minimum at the edge": (surfaces.minimum_at_the_edge, surface(0.3, at=(0.3, 0.0)), surface(), "--range 0.6"),
    "minimum elsewhere": (surfaces.minimum_elsewhere, surface(loss=PITS), surface(at=(0.2, 0.0)), "evaluate net.pt"),
    "too wide": (surfaces.too_wide, surface(8.0), surface(1.0), "--range 1"),
    "coarse basin": (surfaces.too_wide, surface(2.0), surface(1.0), "--range 1"),  # a basin of three points
    "too narrow": (surfaces.too_narrow, surface(0.005), surface(0.5), "--range"),
    "height unknown": (
        surfaces.no_rise,
        surface(arrays={"radius": ("radius", [0.5]), "height": ("radius", [0.0]), "height_se": ("radius", [0.02])}),
        surface(arrays={"radius": ("radius", [0.5]), "height": ("radius", [2.0]), "height_se": ("radius", [0.02])}),
        "--samples all",
    ),
    "no centre": (surfaces.no_centre, surface(points=10), surface(points=11), "--resolution 11,11"),
    "not finite": (surfaces.not_finite, surface(loss=RAGGED), surface(), "--range 0.5"),
    "nowhere finite": (surfaces.not_finite, surface(loss=math.nan * RAGGED), surface(), "evaluate net.pt"),
    "clipped": (
        surfaces.clipped,
        surface(parameters={"cap": 0.3}, arrays={"n": (("x", "y"), np.where(BOWL > 0.3, 100.0, 1000.0))}),
        surface(parameters={"cap": 4.0}, arrays={"n": (("x", "y"), np.where(BOWL > 4.0, 100.0, 1000.0))}),
        "--cap",
    ),
    "rough preview": (
        surfaces.rough_preview,
        surface(parameters={"tolerance": 0.05}, arrays={"hold_out_error": 0.2, "evaluated": (("x", "y"), 0 * BOWL)}),
        surface(parameters={"tolerance": 0.05}, arrays={"hold_out_error": 0.01, "evaluated": (("x", "y"), 0 * BOWL)}),
        "landscape surface net.pt",
    ),
    "inexact pass": (
        surfaces.inexact_pass, surface(arrays={"deviation_95": 3.0}), surface(arrays={"deviation_95": 1.0}), "surface"),
    "frozen end": (
        surfaces.frozen_ends, line(end_loss=0.2, end_excess=0.01), line(end_loss=0.2, end_excess=1e-6),
        "--bn recalibrate:8"),
    "frozen corner": (surfaces.frozen_corners, corners(0.5), corners(1e-7), "landscape surface net.pt"),
    "frozen path": (surfaces.frozen_path, path(9.0), path(2.5), "--bn recalibrate:8"),
    "barrier": (
        surfaces.barrier_unknown, line(barrier=0.01, barrier_se=0.02), line(barrier=0.9, barrier_se=0.02), "samples"),
    "barriers of pairs": (surfaces.barrier_unknown, pairs(0.9, 0.01, 0.8), pairs(0.9, 0.7, 0.8), "samples"),
    "barrier of one pair": (surfaces.barrier_unknown, pairs(0.01), pairs(0.9), "samples"),
    "short path": (surfaces.short_path, path(1.0, count=3), path(1.0), "--snapshots"),
    "unconverged": (spectra.unconverged, hessian(converged=0.0), hessian(), "--max-products 800"),
    "mini-batch without spectrum": (
        spectra.without_spectrum, hessian(values=np.array([[np.nan] * 2, [1.0, 2.0]]), batches=2), hessian(),
        "evaluate"),
    "loss not finite": (
        premises.loss_not_finite,
        made("step", {"loss": ("batch", [np.nan, 1.0]), "done": ("batch", [1, 1])}),
        made("step", {"loss": ("batch", [np.nan, 1.0]), "done": ("batch", [0, 1])}),
        "evaluate net.pt",
    ),
    "loss of an end not finite": (
        premises.loss_not_finite,
        made("barriers", {"loss": (("pair", "t"), [[0.1, 0.2, np.inf]]), "done": (("pair", "t"), np.ones((1, 3)))}),
        made("barriers", {"loss": (("pair", "t"), [[0.1, np.inf, 0.2]]), "done": (("pair", "t"), np.ones((1, 3)))}),
        "evaluate net.pt",
    ),
    "loss of an interrupted run not finite": (
        premises.loss_not_finite,
        made("attack", {"loss": ("method", [np.inf, np.nan]), "done": (("batch", "method"), [[1, 0]])}),
        made("attack", {"loss": ("method", [0.1, np.nan]), "done": (("batch", "method"), [[1, 0]])}),
        "evaluate net.pt",
    ),
    "no finite number": (
        premises.loss_not_finite,
        made("flatness", {"value": ("measure", [np.nan, np.nan])}),
        made("flatness", {"value": ("measure", [np.nan, 1.0])}),
        "evaluate net.pt",
    ),
    "few mini-batches": (
        spectra.few_values,
        hessian(3, arrays={"nep_se": ((), 0.1, {"n": 3.0, "over": "batch"})}),
        hessian(24, arrays={"nep_se": ((), 0.1, {"n": 24.0, "over": "batch"})}),
        "--samples 128",
    ),
    **{
        f"uncertified {over}": (
            spectra.few_values,
            made("surface", {"loss_se": ("x", [0.1, 0.2], {"n": least - 1.0, "over": over})}, samples=least - 1),
            made("surface", {"loss_se": ("x", [0.1, 0.2], {"n": float(least), "over": over})}, samples=least),
            remedy,
        )
        for (over, least), remedy in zip(
            CERTIFIED.items(),
            ("--samples 300", "--samples 384", "--groups 32", "--vectors 32", "--vectors 8", "--images 18"),
            strict=True,
        )
    },
    "uncertified by its own condition": (
        spectra.few_values,
        made("geometry", {"nc4_se": ((), 0.1, {"n": 511.0, "over": "samples"})}, samples=511, certified=OF_GEOMETRY),
        made("geometry", {"nc4_se": ((), 0.1, {"n": 512.0, "over": "samples"})}, samples=512, certified=OF_GEOMETRY),
        "--samples 1100",
    ),
    "few vectors": (
        spectra.few_vectors,
        made("trace", {"trace": 2.0, "trace_se": ((), 0.9, {"n": 4.0})}, parameters={"vectors": 12}),  # by XTrace
        made("trace", {"trace": 9.0, "trace_se": 0.9}, parameters={"vectors": 12}),
        "--vectors 48",
    ),
    "one vector": (
        spectra.few_vectors,
        made("density", {"mean": 1.0, "mean_se": math.nan}, parameters={"vectors": 1}),
        made("density", {"mean": 1.0, "mean_se": 0.01}, parameters={"vectors": 4}),
        "landscape density",
    ),
    "tolerance missed": (
        spectra.tolerance_missed,
        made("trace", {"within_tol": 0.0}, parameters={"tol": 0.01, "max_vectors": 64}),
        made("trace", {"within_tol": 1.0}, parameters={"tol": 0.01, "max_vectors": 64}),
        "--max-vectors 256",
    ),
    "kinks": (spectra.kinks, hessian(parameters={"kinks": "single"}), hessian(), "landscape hessian"),
    "derivatives": (
        spectra.derivatives, hessian(derivatives="the gradient is not the derivative of the loss"), hessian(),
        "without detached terms"),
    "missed eigenvalues": (
        spectra.copies, hessian(parameters={"verify": False}), hessian(), "landscape hessian"),
    "at chance": (
        premises.at_chance, made("lesion", intact_accuracy=0.11), made("lesion", intact_accuracy=0.2),
        "evaluate net.pt"),
    "loss at chance": (
        premises.loss_at_chance, hessian(arrays={"loss": ("batch", np.full(12, 2.4))}), hessian(), "--split train"),
    "loss above guessing": (
        premises.loss_above_guessing, surface(loss=BOWL + 6), surface(loss=BOWL + 2), "--split train"),
    "few per class": (
        premises.few_per_class, made("lesion", intact_accuracy=0.9, samples=30), made("lesion", intact_accuracy=0.9),
        "--samples"),
    "flat panel": (panels.flat_panel, drops("lesion", 0.001), drops("lesion", 0.2), "--samples"),
    "flat noise": (
        panels.flat_panel, drops("noise", 0.0, parameters={"eps": "0.1,0.2"}), drops("noise", 1.0), "--eps 0.8"),
    "saturated panel": (
        panels.saturated_panel, drops("attack", 9.0, drop=0.8), drops("attack", 9.0, drop=0.7), "--eps 0.25/255"),
    "dead layers": (
        panels.dead_layers,
        made("variance", {"variance_normalised": ("layer", [0.5, 0.0]), "name": ("layer", ["a", "b"])}),
        made("variance", {"variance_normalised": ("layer", [0.5, 1e-3]), "name": ("layer", ["a", "b"])}),
        "landscape layers net.pt",
    ),
    "layers of zeros": (
        panels.dead_layers,
        made("variance", {"variance_normalised": ("layer", [0.5, np.nan]), "variance": ("layer", [1.0, 0.0]),
                          "name": ("layer", ["a", "b"])}),
        made("variance", {"variance_normalised": ("layer", [0.5, np.nan]), "variance": ("layer", [1.0, np.nan]),
                          "name": ("layer", ["a", "b"])}),
        "landscape layers net.pt",
    ),
    "depth unknown": (
        panels.depth_unknown, made("variance", spread([1.0, 1.1], 0.1)), made("variance", spread([1.0, 3.0], 0.1)),
        "samples"),
    "zero panel": (
        panels.zero_panel,
        made("attack", {"loss_increase": ("eps", [0.0, 0.0]), "loss_increase_se": ("eps", [0.0, 0.0])}),
        made("attack", {"loss_increase": ("eps", [0.0, 0.1]), "loss_increase_se": ("eps", [0.0, 0.0])}),
        "--eps 1/255",
    ),
    "repeated samples": (
        premises.repeated_samples, made("lesion", samples_repeated=750), made("lesion", samples_repeated=9),
        "--samples 250"),
    "mini-batch": (
        premises.mini_batch, made("lesion", mini_batch="outputs change by up to 30%"), made("lesion", mini_batch=""),
        "evaluation mode"),
    "below the checkpoint's accuracy": (
        premises.contradicts_checkpoint, made("lesion", intact_accuracy=0.46, stated_accuracy=0.98),
        made("lesion", intact_accuracy=0.46, stated_accuracy=0.98, spec={"mc_dropout": 8}), "evaluate net.pt"),
    "above the checkpoint's accuracy": (
        premises.contradicts_checkpoint,
        made("lesion", intact_accuracy=0.99, stated_accuracy=0.8, spec={"split": "test"}),
        made("lesion", intact_accuracy=0.99, stated_accuracy=0.8), "no samples of training"),
    "above the checkpoint's loss": (
        premises.contradicts_checkpoint, hessian(stated_loss=0.05), hessian(stated_loss=0.08), "evaluate net.pt"),
    "overconfident": (
        premises.overconfident, made("calibration", {"ece_signed": 0.33}), made("calibration", {"ece_signed": 0.2}),
        "evaluate net.pt"),
    "same members": (
        panels.same_members,
        made("ensemble", {"disagreement": (("member", "other"), np.zeros((2, 2)))}),
        made("ensemble", {"disagreement": (("member", "other"), np.full((2, 2), 0.1))}),
        "different training runs",
    ),
    "announced spike": (
        panels.announced_spike,
        made("monitor", {"step": ("step", [100, 200, 300]), "alarm": ("step", [np.nan, 0.0, 1.0])}),
        made("monitor", {"step": ("step", [100, 200, 300]), "alarm": ("step", [np.nan, 0.0, 0.0])}),
        "lower learning rate",
    ),
}  # fmt: skip

LESION = {"intact_accuracy": 0.9}
SEVERAL: dict[str, tuple[RuleOfSeveral, list[Result], list[Result]]] = {  # name -> rule, with the fault, without it
    "two numbers of samples": (
        protocols.differing_protocols,
        [made("lesion", label="a"), made("lesion", label="b", samples=500)],
        # one of them was measured both ways: the others can be compared
        [made("lesion", label="a"), made("lesion", label="b", samples=500), made("lesion", label="b")],
    ),
    "other directions": (
        protocols.differing_protocols,
        [surface(label="a", parameters={"normalize": "filter"}), surface(label="b", parameters={"normalize": "layer"})],
        # more points are not another question
        [surface(label="a"), surface(label="b", points=15, parameters={"resolution": "15"})],
    ),
    "other monitored part": (
        protocols.differing_protocols,
        [made("monitor", label="a"), made("monitor", label="b", parameters={"params": "head"})],
        # rows at other steps, and the seed of the training, are not another question
        [made("monitor", label=str(n), parameters={"every": n, "overhead": n / 100, "seed": n}) for n in (10, 25)],
    ),
    "drawn anew": (
        protocols.drawn_anew,
        [made("lesion", label=x, protocol="x, random transforms drawn once") for x in "ab"],
        [made("lesion", label=x, protocol="x, no augmentation") for x in "ab"],
    ),
    "augmented with two seeds": (
        protocols.drawn_anew,
        [made("lesion", label="a", protocol="augmented once", spec={"seed": 0}, batch_size=8),
         made("lesion", label="b", protocol="augmented once", spec={"seed": 1}, batch_size=8)],
        [made("lesion", label=x, protocol="augmented once", spec={"seed": 0}, batch_size=8) for x in "ab"],
    ),
    "other samples": (
        protocols.other_samples,
        [made("calibration", label=x, data_sha256=x) for x in "ab"],
        [made("calibration", label=x, data_sha256="one") for x in "ab"],
    ),
    "one label": (
        protocols.one_label,
        [made("lesion", checkpoint_sha256=x) for x in "ab"],
        [made("lesion", checkpoint_sha256=x, epoch=float(k)) for k, x in enumerate("ab")],
    ),
    "same weights": (
        protocols.same_weights,
        [made("lesion", label=x, checkpoint_sha256="one") for x in "ab"],
        [made("lesion", label=x, checkpoint_sha256="one", spec={"mc_dropout": k}) for k, x in enumerate("ab")],
    ),
    "twins": (
        protocols.same_weights,
        [made("lesion", label=x, weights_sha256="one") for x in "ab"],
        [made("lesion", label=x, weights_sha256=x) for x in "ab"],
    ),
    "leaked test": (
        premises.leaked_test,
        [made("lesion", samples_sketch=f"1 2 {x}", spec={"split": x}) for x in ("train", "test")],
        [made("lesion", samples_sketch=f"1 {x} {x}", spec={"split": x}) for x in ("train", "test")],
    ),
    "mixed seeds": (
        premises.mixed_seeds,
        [surface(label=x, parameters={"plane": "random", "seed": k}) for k, x in enumerate("ab")],
        # the second was measured with both seeds
        [surface(label=x, parameters={"plane": "random", "seed": k}) for x, k in (("a", 0), ("b", 1), ("b", 0))],
    ),
    "losses disagree": (
        protocols.losses_disagree, [surface(), surface(loss=BOWL + 0.5, spec={"mean": [0.5], "std": [0.5]})],
        [surface(), surface(0.5)]),
    "one seed": (
        protocols.one_seed,
        [made("lesion", label=x, configuration=json.dumps({"model": x, "seed": 0})) for x in "ab"],
        [
            made("lesion", label=x + s, configuration=json.dumps({"model": x, "seed": s, "memory_format": s}))
            for x in "ab" for s in "01"  # the format that was faster
        ],
    ),
    "versions": (
        protocols.versions_differ,
        [made("lesion", label=x, versions=x) for x in "ab"], [made("lesion", label=x, versions="1") for x in "ab"]),
    "too few samples": (
        premises.too_few_samples,
        [made("lesion", label=x, samples=60, intact_accuracy=1 - k / 60) for k, x in enumerate("ab", 1)],
        [
            made(probe, label=x, samples=n, intact_accuracy=1 - k / 60)
            for k, x in enumerate("ab", 1) for probe, n in (("lesion", 600), ("sensitivity", 60))  # the most count
        ],
    ),
}  # fmt: skip
