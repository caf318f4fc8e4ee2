"""Stage `probes`: every stored quantity of every probe, once on the CPU and once on the device."""

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from measuring import header, row
from torch import nn

import landscape
from gpu_stages.networks import KEPT, build, train
from gpu_stages.steps import Row, Rows, Settings, Step
from gpu_stages.timing import seconds
from landscape.probes import PROBES, probe_class

TITLE = "Every probe on the CPU and on the GPU"
ABOUT = """\
The same weights, digits and seeds on both. A difference is the greatest one of a stored array, over the greatest
magnitude on the CPU; `inf` where one is NaN and the other not. A quantity without a tolerance says how a search went
or is converged roughly by design, so that rounding may change it; it is shown and not judged. Seconds are those of
the second of two calls of `landscape.measure`, loading included, without a file: wall time of both sides. On a
machine without a GPU the network in double precision stands in for it, and quantities that depend on the precision of
random draws are not judged."""
NETWORKS = ("resnet_demo", "vit_demo", "alternet_demo")
SMALL_NETWORKS = ("alternet_demo",)  # it has convolutions and attention
WITHOUT = {  # probes that a network has nothing for
    "resnet_demo": ("attention", "attention-maps"),
    "alternet_demo": ("attention-maps",),  # its attention stays in windows
}
NEEDS = {"corruption": "imagecorruptions", "tokens": "sklearn"}  # packages that a machine may lack
TOLERANCE, OF_SPECTRA, OF_ACCURACY = 1e-3, 1e-2, 0.05
SPECTRA = (
    "smallest", "largest", "ratio", "eigenvalue", "ape", "ape_low", "ape_high", "trace", "trace_se", "batch_trace",
    "batch_trace_se", "value", "se", "term", "term_se",
)  # fmt: skip
SEARCH = {
    "hessian": (
        "hvp", "residual", "error", "converged", "largest", "smallest", "largest_residual", "smallest_residual",
        "matvecs", "nodes", "weights", "nep", "nep_low", "nep_high",
    ),
    "trace": ("hvp",),
    # Ranks of nearly equal numbers, and weights half-way between two neighbours on the grid, follow the rounding.
    "sensitivity": ("rank_correlation", "rank_correlation_low", "rank_correlation_high"),
    "step": ("critical_multiple", "critical_sharpness", "critical_passes", "converged",
             "batch_preconditioned_error", "batch_preconditioned_converged"),
    "density": ("hvp", "nodes", "weights"),
    "geometry": ("nc4", "nc4_se", "head_nc4", "head_nc4_se"),  # a decision near a border
    "convexity": ("converged", "smallest_residual", "largest_residual", "matvecs", "ratio_bound"),
    "tokens": ("position", "divergence"),  # t-SNE amplifies rounding
}  # fmt: skip
DRAWN = ("density",)  # its random vectors are others in double precision
OPTIONS: dict[str, dict[str, Any]] = {
    "surface": {"resolution": "7"}, "line": {"resolution": 9, "directions": 2}, "hessian": {"batches": 4},
    "step": {"optimizer": "sgd", "optimizer_arg": ("lr=0.1",)},
    "flatness": {"steps": 5, "draws": 4, "vectors": 8},
    "noise-scale": {"groups": 8}, "trace": {"vectors": 16}, "sensitivity": {"bits": "8,4", "vectors": 2},
    "density": {"vectors": 4, "steps": 30}, "trajectory": {},
}  # fmt: skip


def steps(settings: Settings) -> Sequence[Step]:
    networks = SMALL_NETWORKS if settings.small else NETWORKS
    probes = [probe for probe in PROBES if probe not in NEEDS or importlib.util.find_spec(NEEDS[probe])]
    pairs = [(network, probe) for network in networks for probe in probes if probe not in WITHOUT.get(network, ())]
    if settings.small:
        pairs.append(("vit_demo", "attention-maps"))
    return [Step(pair, partial(compared, *pair, settings)) for pair in pairs]


def compared(network: str, probe: str, settings: Settings) -> Row:
    """Differences of a probe's quantities, and the seconds of both sides."""
    cpu = _network(network, settings)
    gpu = settings.device.type == "cuda"
    other = copy.deepcopy(cpu).to(settings.device, torch.float32 if gpu else torch.float64)
    options = {**_options(probe, settings), "samples": 32 if settings.small else 256}
    several = probe_class(probe).several
    if several == "run":
        options["run"] = ",".join(map(str, _snapshots(network, settings)))
    found: list[xr.Dataset] = []

    def measure(model: nn.Module) -> None:
        if several == "pair":
            options["against"] = neighbour(cpu).to(next(model.parameters()))
        if several == "members":
            options.pop("snapshots", None)
            options["members"] = [neighbour(cpu).to(next(model.parameters()))]
        found.append(landscape.measure(probe, model, data="digits", out=None, quiet=True, **options))

    took = []
    for model in (cpu, other):
        if not settings.small:
            measure(model)
        took.append(seconds(partial(measure, model), settings.device))
    reference, there = found[0], found[-1]
    return {
        "seconds": took,
        "differences": {
            str(name): difference(reference[name].values, there[name].values, reference[name].attrs["units"])
            for name in reference.data_vars
            if reference[name].dtype.kind == "f"
        },
        "judged": gpu or probe not in DRAWN,
    }


@cache
def _network(name: str, settings: Settings) -> nn.Module:
    """On the CPU, trained a little, so that accuracies are neither 0 nor 1."""
    model = build(name, 16, small=settings.small)
    train(model, 16, updates=2 if settings.small else 60, batch_size=16)
    return model


def neighbour(model: nn.Module, seed: int = 1) -> nn.Module:
    """A network close by, another member of an ensemble."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return other


def _snapshots(name: str, settings: Settings) -> list[str]:
    """Files of four snapshots, the last one the network itself."""
    model = _network(name, settings)
    folder = settings.folder / KEPT / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    files = []
    for i in range(4):
        state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        for key, _ in model.named_parameters():
            state[key] += 0.01 * (3 - i) * torch.randn(state[key].shape, generator=generator)
        files.append(str(folder / f"{name}_epoch_{i:03d}.pt"))
        torch.save(state, files[-1])
    return files


def _options(probe: str, settings: Settings) -> Mapping[str, Any]:
    return probe_class(probe).smallest if settings.small else OPTIONS.get(probe, {})


def difference(reference: np.ndarray, there: np.ndarray, unit: str = "1") -> float:
    """Greatest difference over the greatest finite magnitude of the reference; inf if a NaN stands on one side only.

    Of angles in degrees over a half-turn: those of parallel vectors are rounding.
    """
    if reference.shape != there.shape or (np.isnan(reference) != np.isnan(there)).any():
        return float("inf")
    known = ~np.isnan(reference)
    a, b = reference[known], there[known]
    a, b = a[a != b], b[a != b]  # equal infinities too
    if not a.size:
        return 0.0
    greatest = 180.0 if unit == "degree" else np.abs(reference[np.isfinite(reference)]).max(initial=0.0)
    return float(np.abs(a - b).max() / (greatest or 1.0))


def tolerance(probe: str, quantity: str) -> float | None:
    """The greatest difference that passes; None for a quantity that is not judged."""
    if quantity in SEARCH.get(probe, ()):
        return None
    if "accuracy" in quantity:
        return OF_ACCURACY
    return OF_SPECTRA if quantity in SPECTRA or probe == "density" else TOLERANCE


def verdict(probe: str, one: Row) -> tuple[str, list[str]]:
    """PASS or FAIL, with the quantities that differ too much."""
    limits = {name: tolerance(probe, name) for name in one["differences"]}
    worse = [
        name for name, found in one["differences"].items() if (limit := limits[name]) is not None and found > limit
    ]
    if not one["judged"]:
        return "not judged", []
    return ("FAIL" if worse else "PASS"), worse


def tables(rows: Rows) -> str:
    lines = [header("network", "probe", "quantities", "CPU s", "device s", "ratio", "worst judged", "difference", "")]
    fails = []
    for (network, probe), one in rows.items():
        judged = {n: d for n, d in one["differences"].items() if tolerance(str(probe), n) is not None}
        worst = max(judged, key=judged.__getitem__, default="")
        here, there = one["seconds"]
        found, worse = verdict(str(probe), one)
        fails += [f"{network} {probe} {name} {one['differences'][name]:.1e}" for name in worse]
        lines.append(row(
            network, probe, len(one["differences"]), f"{here:.2f}", f"{there:.2f}", f"{here / max(there, 1e-9):.1f}",
            worst, f"{judged.get(worst, 0.0):.1e}", found,
        ))  # fmt: skip
    lines += ["", f"Above their tolerance: {'; '.join(fails) or 'none'}."]
    return "\n".join([*lines, "", _every_quantity(rows)])


def _every_quantity(rows: Rows) -> str:
    """A line per probe and quantity, with a column per network."""
    networks = list(dict.fromkeys(network for network, _ in rows))
    cells: dict[tuple[str, str], dict[str | int, float]] = {}
    for (network, probe), one in rows.items():
        for name, found in one.get("differences", {}).items():
            cells.setdefault((str(probe), name), {})[network] = found
    lines = [header("probe", "quantity", *map(str, networks), "tolerance")]
    for (probe, name), of in cells.items():
        limit = tolerance(probe, name)
        found = (f"{of[network]:.1e}" if network in of else "" for network in networks)
        lines.append(row(probe, name, *found, "" if limit is None else f"{limit:g}"))
    return "\n".join(lines)
