"""Headline numbers of every probe's result as numbers with errors.

The names are those of the headline (`headlines.numbers`), which is text where it says more than numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import basin_panels, geometry, headlines
from landscape.plots.align import pair
from landscape.plots.headline_number import (
    FLATTER,
    FLATTER_ABOVE,
    HIGHER,
    LOWER,
    Measured,
    Reading,
    number,
    of_share,
    without_error,
)
from landscape.results.ratio import linearised
from landscape.statistics.intervals import interval
from landscape.statistics.stored import count_of

OVER: Mapping[str, str] = {  # what the errors of a probe are over; of all others over samples
    "flatness": "mini-batches, samples, random vectors or noise draws",
    "hessian": "mini-batches",
    "step": "mini-batches",
    "trace": "random vectors",
    "density": "random vectors",
    "noise-scale": "groups of samples",
}
# In headlines, but no measurement of the network: errors, positions, settings, and what was not reached.
OTHER = ("_se", "threshold", "at", "at tau", "not converged", "found by a second search",
         "seconds per frame", "hold-out error at most", "deviation at most (standard errors)",
         "mini-batches not finite")  # fmt: skip


def measured(data: xr.Dataset, headline: headlines.Numbers | None = None) -> list[Measured]:
    """The headline numbers of a result that are finite; also those without a known error.

    `headline` is its headline, if it is known already.
    """
    own = OF_PROBE.get(str(data.attrs.get("probe", "")))
    found = {one.name: one for one in (*own(data), *basin_panels.radii(data))} if own is not None else {}
    for name, value in (headlines.numbers(data) if headline is None else headline).items():
        if not isinstance(value, str) and name not in found and not name.endswith(OTHER[0]) and name not in OTHER:
            found[name] = without_error(data, name, float(value))
    return [one for one in found.values() if np.isfinite(one.value)]


def as_json(data: xr.Dataset) -> dict[str, Any]:
    """The headline numbers of a result as an entry for JSON."""
    return {"numbers": [one.as_json() for one in measured(data)]}


def _scalars(rows: Sequence[tuple[str, str, Reading]], data: xr.Dataset) -> Iterator[Measured]:
    for name, quantity, reading in rows:
        yield from number(data, name, quantity, reading)


def _density(data: xr.Dataset) -> Iterator[Measured]:
    """Of the whole Hessian its mean eigenvalue, of its diagonal blocks how different they are."""
    names = ("heterogeneity", "shape_heterogeneity") if "heterogeneity" in data else ()
    yield from _scalars([(name, name, "") for name in names] or [("mean", "mean", FLATTER)], data)


def _ends(rows: Sequence[tuple[str, str]], data: xr.Dataset) -> Iterator[Measured]:
    """Of quantities over layers those of the first and of the last finite one."""
    for prefix, quantity in rows:
        at = np.flatnonzero(np.isfinite(data[quantity].values)) if quantity in data else np.array([], dtype=int)
        for word, place in (("shallowest", 0), ("deepest", -1)) if at.size else ():
            yield from number(data, f"{prefix}{word}", quantity, at={str(data[quantity].dims[0]): int(at[place])})


def _largest_change(axis: str, data: xr.Dataset) -> Iterator[Measured]:
    quantity = headlines.change(data)
    if headlines.finite(data, quantity).size:
        worst = int(np.nanargmax(np.where(np.isfinite(data[quantity].values), data[quantity].values, -np.inf)))
        word = "drop" if quantity == "accuracy_drop" else "increase"
        place = data["name" if axis == "unit" else axis].values[worst]
        where = f"at {place}" if isinstance(place, str) else f"at {place:g} π"
        yield from (replace(one, at=where) for one in number(data, f"largest {word}", quantity, at={axis: worst}))


def _sensitivity(data: xr.Dataset) -> Iterator[Measured]:
    """The loss increase by all units at every setting, and the largest of a single unit."""
    for s, name in enumerate(data["setting_name"].values):
        yield from number(data, f"all at {name}", "together_loss_increase", LOWER, {"setting": s})
        if s == data.sizes["setting"] - 1:
            yield from number(data, "rank correlation", "rank_correlation", at={"setting": s})
    increase = data["loss_increase"].transpose("unit", "setting").values
    if np.isfinite(increase).any():
        unit, setting = np.unravel_index(
            np.nanargmax(np.where(np.isfinite(increase), increase, -np.inf)), increase.shape
        )
        at = {"unit": int(unit), "setting": int(setting)}
        yield from number(data, "largest increase", "loss_increase", LOWER, at)


def _hessian(data: xr.Dataset) -> Iterator[Measured]:
    """NEP and APE over mini-batches, and the mean of their largest eigenvalues."""
    if "ape" not in data or data["ape"].ndim:
        return
    yield from _scalars((("stability", "stability", ""), ("sharpness", "sharpness", ""), ("nep", "nep", ""),
                         ("ape", "ape", FLATTER), ("largest eigenvalue", "mean_largest", FLATTER)), data)  # fmt: skip


def mini_batches(data: xr.Dataset) -> dict[str, np.ndarray]:
    """Values per mini-batch, (batch,), whose means are NEP, APE and the mean largest eigenvalue; none otherwise.

    A ratio is linearised, so that the spread of the values gives its error.
    """
    if data.attrs.get("probe") != "hessian" or data["eigenvalue"].ndim != 2:
        return {}
    values = data["eigenvalue"].transpose("batch", "rank").values
    values = values[np.isfinite(values).any(axis=1)]
    positive = values > 0
    return {
        "nep": linearised((values < 0).sum(axis=1), np.isfinite(values).sum(axis=1)),
        "ape": linearised(np.where(positive, values, 0.0).sum(axis=1), positive.sum(axis=1)),
        "largest eigenvalue": data["largest"].values,
    }


def _flatness(data: xr.Dataset) -> Iterator[Measured]:
    """Every measure."""
    from landscape.plots.flatness import rows_of

    for row in rows_of(data):
        unit, reading = "" if row.units == "1" else row.units, FLATTER if row.flatter == "lower" else FLATTER_ABOVE
        yield Measured(row.name, row.value, row.error, row.low, row.high, unit, reading, row.n)


def _surface(data: xr.Dataset) -> Iterator[Measured]:
    """Loss and accuracy at the centre, and the height."""
    centre = {axis: np.flatnonzero(np.abs(data[axis].values) < 1e-9) for axis in ("x", "y") if axis in data}
    if len(centre) == 2 and all(len(places) for places in centre.values()):
        at = {axis: int(places[0]) for axis, places in centre.items()}
        yield from number(data, "loss", "loss", LOWER, at)
        for one in number(data, "accuracy", "accuracy", HIGHER, at):
            yield of_share(data, "accuracy", one.value)
    for i, radius in enumerate(data["radius"].values if "height" in data else ()):
        yield from number(data, f"height at {radius:g}", "height", FLATTER, {"radius": i})


def _ensemble(data: xr.Dataset) -> Iterator[Measured]:
    """Scores of one member and of all."""
    readings: Mapping[str, Reading] = {"nll": LOWER, "accuracy": HIGHER, "ece": LOWER, "temperature": ""}
    for name, reading in readings.items():
        for words, place in (("one member", 0), ("all members", -1)):
            yield from number(data, f"{name} of {words}", name, reading, {"size": place})
    yield from number(data, "disagreement", "mean_disagreement")
    yield from number(data, "epistemic entropy", "epistemic_entropy", at={"size": -1})


def _attention(data: xr.Dataset) -> Iterator[Measured]:
    """Means over the heads of the first and the last layer; the mean of their errors is an upper bound."""
    for name, word in (("distance", "distance"), ("mutual_information", "NMI")):
        rows, errors, unit = data[name].values, data[f"{name}_se"].values, str(data[name].attrs["units"])
        places = np.flatnonzero(np.isfinite(rows).any(axis=1))
        for key, place in (("shallowest", 0), ("deepest", -1)) if places.size else ():
            known = np.isfinite(rows[places[place]])
            value, error = (float(part[places[place]][known].mean()) for part in (rows, errors))
            n = float(count_of(data, name))
            low, high = map(float, interval(value, error, n))
            yield Measured(f"{word} {key}", value, error, low, high, "" if unit == "1" else unit, n=n)


def _attack(data: xr.Dataset) -> Iterator[Measured]:
    """The accuracy (or loss) under every attack at the largest eps that is finished, by the names of the headline."""
    from landscape.plots import attack

    quantity = attack.quantity_of(data)
    reading: Reading = HIGHER if quantity == "accuracy" else LOWER
    for i, method in enumerate(attack.names_of(data)):
        done = np.flatnonzero(np.isfinite(data[quantity].values[i]))
        if done.size:
            eps = 255 * float(data["eps"].values[done[-1]])
            name = f"{attack.NAMES.get(method, method)} at {eps:g}/255"
            yield from number(data, name, quantity, reading, {"method": i, "eps": int(done[-1])})


def _probe_linear(data: xr.Dataset) -> Iterator[Measured]:
    """Accuracy of the linear probes of the first and the last layer, and the best."""
    yield from _ends((("", "accuracy"),), data)
    values = data["accuracy"].values
    if np.isfinite(values).any():
        yield from number(data, "best", "accuracy", HIGHER, {"layer": int(np.nanargmax(values))})


def _similarity(data: xr.Dataset) -> Iterator[Measured]:
    """Alignment of the first layer with the last."""
    yield from number(data, "first with last", "cka", at={"layer": 0, "other": -1})


def _tokens(data: xr.Dataset) -> Iterator[Measured]:
    """The common displacement of the last layer that is finished; a divergence of t-SNE has no error."""
    done = np.flatnonzero(np.isfinite(data["common"].values)) if "common" in data else np.empty(0, dtype=int)
    if done.size:
        yield from number(data, "common displacement", "common", at={"layer": int(done[-1])})


def _line(data: xr.Dataset) -> Iterator[Measured]:
    """The highest barrier between checkpoints, also in accuracy; of random lines the loss at the checkpoint."""
    if headlines.finite(data, "barrier").size:
        top = {str(data["barrier"].dims[0]): int(np.nanargmax(data["barrier"].values))}
        yield from number(data, "barrier", "barrier", at=top)
        yield from number(data, "accuracy barrier", "accuracy_barrier", at=top)
    elif "t" in data and (start := np.flatnonzero(data["t"].values == 0.0)).size:
        yield from number(data, "loss", "loss", LOWER, {"direction": 0, "t": int(start[0])})


def _align(data: xr.Dataset) -> Iterator[Measured]:
    """The barrier between two checkpoints before and after alignment."""
    if headlines.finite(data, "barrier").size:
        before, after = pair(data)
        yield from number(data, "barrier before", "barrier", at={"curve": before})
        yield from number(data, "barrier", "barrier", at={"curve": after})
        yield from number(data, "accuracy barrier", "accuracy_barrier", at={"curve": after})


def _barriers(data: xr.Dataset) -> Iterator[Measured]:
    """The highest barrier between any two checkpoints, of the last curve."""
    last = data["barrier"].values[-1]
    if np.isfinite(last).any():
        yield from number(data, "barrier", "barrier", at={"curve": -1, "pair": int(np.nanargmax(last))})


def _evaluate(data: xr.Dataset) -> Iterator[Measured]:
    """Scores of the last number of passes."""
    for name, reading in (("loss", LOWER), ("accuracy", HIGHER)):
        yield from number(data, name, name, reading, {"passes": -1} if "passes" in data.dims else None)


def _geometry(data: xr.Dataset) -> Iterator[Measured]:
    """Dimensions, separation and collapse at the classifier's input, or at the last layer."""
    return (one for words, name, at in geometry.places(data) for one in number(data, words, name, at=at))


def _stream(data: xr.Dataset) -> Iterator[Measured]:
    """Scores without smoothing and at the best tau, of one deterministic pass per frame."""
    from landscape.plots import stream

    best = stream.best(data)
    for name in ("nll", "ece"):
        for words, tau in ((name, 0), ("smoothed" if name == "nll" else "smoothed ece", best)):
            yield from number(data, words, name, LOWER, {"prediction": 0, "tau": tau})


def _input_surface(data: xr.Dataset) -> Iterator[Measured]:
    """The rise of the loss along every direction at the largest coordinate."""
    from landscape.plots.input_surface import words_of

    for i, words in enumerate(words_of(data)):
        yield from number(data, words, "line_rise", at={"direction": i, "t": -1})


OF_PROBE: Mapping[str, Callable[[xr.Dataset], Iterator[Measured]]] = {
    "align": _align,
    "attack": _attack,
    "attention": _attention,
    "barriers": _barriers,
    "calibration": partial(_scalars, (("nll", "nll", LOWER), ("accuracy", "accuracy", HIGHER), ("ece", "ece", LOWER),
                                      ("signed ece", "ece_signed", ""), ("temperature", "temperature", ""))),
    "corruption": partial(_scalars, (("mean accuracy", "mean_accuracy", HIGHER), ("mean nll", "mean_nll", LOWER),
                                     ("mean ece", "mean_ece", LOWER), ("mCE", "mce", LOWER),
                                     ("mCNLL", "mcnll", LOWER), ("mCECE", "mcece", LOWER))),
    "density": _density,
    "ensemble": _ensemble,
    "evaluate": _evaluate,
    "flatness": _flatness,
    "fourier": partial(_ends, (("", "high_frequency"),)),
    "geometry": _geometry,
    "hessian": _hessian,
    "input-surface": _input_surface,
    "lesion": partial(_largest_change, "unit"),
    "line": _line,
    "noise": partial(_largest_change, "band"),
    "noise-scale": partial(_scalars, (("simple", "simple", ""), ("curvature", "curvature", ""))),
    "probe-linear": _probe_linear,
    "sensitivity": _sensitivity,
    "shape-bias": partial(_scalars, (("shape bias", "shape_bias", ""),)),
    "similarity": _similarity,
    "stream": _stream,
    "surface": _surface,
    "step": partial(_scalars, (("batch sharpness", "mean_batch_sharpness", FLATTER),
                               ("critical sharpness", "mean_critical_sharpness", FLATTER),
                               ("sharpness along the update", "mean_directional_sharpness", FLATTER),
                               ("change of the objective", "mean_actual_change", ""))),
    "tokens": _tokens,
    "trace": partial(_scalars, (("trace", "trace", FLATTER), ("frobenius", "frobenius", FLATTER),
                                ("off_block", "off_block", ""), ("non_gauss_newton", "non_gauss_newton", ""))),
    "uncertainty": partial(_ends, (("model ", "model_uncertainty"), ("data ", "data_uncertainty"))),
    "variance": partial(_ends, (("", "variance"),)),
}  # fmt: skip
