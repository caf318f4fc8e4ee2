"""Headline numbers of each result, for `landscape show`, the report and the last line of a command.

They are those that the result declares; the module of its main figure may add `notes` in words. Neither torch nor
matplotlib is imported.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import FIGURES, STUDIES, study_module
from landscape.plots.appearance import differences
from landscape.plots.figure import Numbers
from landscape.probe import MICRO_BATCHES
from landscape.results import headline_numbers, reader


def numbers(data: xr.Dataset) -> Numbers:
    """The few numbers that sum up a result, and what its figure notes."""
    return _found(data, lambda one: one.value)


def with_intervals(data: xr.Dataset) -> Numbers:
    """`numbers` in words: with 95 % intervals where these are known, and with their places."""
    return _found(data, lambda one: ", ".join(filter(None, (one.in_words(), one.at))))


def _found(data: xr.Dataset, form: Callable[[headline_numbers.Measured], float | str]) -> Numbers:
    """Numbers in a form, and notes, which replace a number of the same name."""
    found: Numbers = {one.name: form(one) for headline, one in headline_numbers.numbers(data) if not headline.silent}
    return {**found, **notes_of(str(data.attrs.get("probe", "")))(data)}


@functools.cache
def notes_of(probe: str) -> Callable[[xr.Dataset], Mapping[str, str]]:
    """What the figure of a probe, or of a study, notes about a result besides its numbers."""
    module = study_module(probe) if probe in STUDIES else main_figure(probe)
    notes: Callable[[xr.Dataset], Mapping[str, str]] = getattr(module, "notes", lambda data: {})
    return notes


def change(data: xr.Dataset) -> str:
    """The quantity that a modified network is judged by: the loss increase where the loss defines no accuracy."""
    drop = finite(data, "accuracy_drop").size > 0
    return "accuracy_drop" if drop or not finite(data, "loss_increase").size else "loss_increase"


def missed_tol(data: xr.Dataset) -> dict[str, str]:
    """That the relative error of an estimate is above the target `tol`; empty where it is not."""
    return {"tol": "not met by the most vectors"} if float(data.get("within_tol", 1.0)) == 0.0 else {}


def text(found: Numbers) -> str:
    """Numbers as `name value, name value`; those with an interval are text already."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else f'{value:.4g}'}"
        for name, value in found.items()
        if not name.endswith("_se")
    )


def summary(path: Path | str, also: Callable[[xr.Dataset], dict[str, Any]] = lambda data: {}) -> list[dict[str, Any]]:
    """One row per stored result, in the order of `reader.groups`: what it is, its progress, its headline, and more."""
    with reader.streaming(path, on_demand=True) as stored:
        return rows(path, stored, also)


def rows(
    path: Path | str,
    stored: Sequence[tuple[str, xr.Dataset]],
    also: Callable[[xr.Dataset], dict[str, Any]] = lambda data: {},
) -> list[dict[str, Any]]:
    """The rows of `summary`, of results that were read from a file."""
    found, of_probe = [], dict[str, list[tuple[str, xr.Dataset]]]()
    for item in stored:
        of_probe.setdefault(item[0].partition("/")[0], []).append(item)
    differs = {
        name: said
        for items in of_probe.values()
        for (name, _), said in zip(items, differences([data for _, data in items]), strict=True)
    }
    for name, data in stored:
        probe = name.partition("/")[0]
        with reader.using(path, names=[name]):
            others = compared(name, stored if probe in STUDIES else of_probe[probe])
            headline = text(_or_why(data) | others | divided(data))
        row = {
            "probe": probe, "label": str(data.attrs.get("label", "")), "differs": differs[name],
            "digest": name.rpartition("-")[2],
            "done": reader.finished_units(data), "units": int(data.variables["done"].size) if "done" in data else 0,
            "model": str(data.attrs.get("model", "")), "data": str(data.attrs.get("data", "")),
            "finished": str(data.attrs.get("finished", "")), "headline": headline,
        }  # fmt: skip
        found.append(row | also(data))
    return found


def _or_why(data: xr.Dataset) -> Numbers:
    """The headline numbers; of a finished result without any, that there are none."""
    finished = "done" in data and bool((data.variables["done"].values == 1).all())
    return with_intervals(data) or (
        {"no number": "is finite: more samples or larger maps may have some"} if finished else {}
    )


def divided(data: xr.Dataset) -> Numbers:
    """Into how many parts mini-batches were divided because they did not fit into memory; empty if they were not."""
    parts = data.attrs.get(MICRO_BATCHES, 1)
    return {"mini-batches": f"in {parts} parts (memory)"} if parts != 1 else {}


def headline(path: Path | str, group: str) -> str:
    """The headline of one stored result, as text.

    Raises:
        ValueError: the file holds no such group; FileNotFoundError, ValueError: as `reader.open`.
    """
    found = _or_why(reader.result(path, group))
    probe = group.partition("/")[0]
    return text(found | compared(group, reader.find(path, probe) if hasattr(main_figure(probe), "alike") else []))


def compared(group: str, stored: Sequence[tuple[str, xr.Dataset]]) -> Numbers:
    """Differences of a result from the first one of its probe on the same samples, where the probe has such.

    Of a stored study, that the file holds other numbers than it was made from.
    """
    probe = group.partition("/")[0]
    if probe in STUDIES and hasattr(study := study_module(probe), "outdated"):
        old = study.outdated(dict(stored)[group], stored)
        return {"out of date": old.removeprefix("out of date: ")} if old else {}
    if not hasattr(module := main_figure(probe), "alike"):
        return {}
    alike = [name for name, _ in stored if name.partition("/")[0] == probe]
    if group not in alike[1:]:
        return {}
    results = dict(stored)
    data, others = results[group], [results[name] for name in alike[: alike.index(group)]]
    same = module.alike([*others, data])
    if not hasattr(module, "paired") or not same or same[-1] != len(others):
        return {}
    first = others[same[0]]
    said = (
        f"{name} {one.value:+.4f}" + (f" [{one.low:+.4f}, {one.high:+.4f}]" if np.isfinite(one.low) else "")
        for name, one in module.paired(data, first).items()
        if np.isfinite(one.value)
    )
    words = ", ".join(said)
    return {f"against {first.attrs.get('label', '')}": words} if words else {}


def main_figure(probe: str) -> Any:
    """The module of the figure that is named like a probe; None where it has none."""
    figure = FIGURES.get(probe.replace("-", "_"))
    return figure.module if figure is not None and figure.probe == probe else None


def finite(data: xr.Dataset, name: str) -> np.ndarray:
    """The finite values of a quantity in order; none where the result lacks it."""
    values = data.variables[name].values if name in data else np.array([])
    return np.asarray(values[np.isfinite(values)])
