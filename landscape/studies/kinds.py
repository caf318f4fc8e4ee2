"""Find and tabulate the studies of trained networks: smoothing blocks, dropout masks, one argument, objectives.

Of each kind: the studies that a results file holds, and the rows of the table. What is measured says its file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from landscape.results.protocols import OF_A_RUN
from landscape.results.protocols import stored as options_of
from landscape.statistics.calibration import paired_difference, stored_scores
from landscape.studies.study import Cell, Network, Row, Stored, Study, identity, in_words, members_of, smoothed

SCORES = {"nll": ("NLL", 1.0, 3), "accuracy": ("accuracy", 100.0, 1), "ece": ("ECE", 100.0, 1)}  # unit, and digits
FEWEST = 3  # values that make a sweep


def smoothing(stored: Stored) -> list[Study]:
    """The checkpoints that were scored with and without smoothing, on one set of samples."""
    own: dict[str, list[tuple[str, xr.Dataset]]] = {}
    for name, data in stored:
        own.setdefault(identity(data), []).append((name, data))
    return [study for study in map(_with_and_without, own.values()) if sizes(study)]


def _with_and_without(stored: list[tuple[str, xr.Dataset]]) -> Study:
    samples: list[Any] = []

    def place(probe: str, data: xr.Dataset) -> Cell | None:
        if probe == "calibration" and not (data["done"] == 0).any():
            samples.append(data.attrs.get("data_sha256"))
            return (smoothed(data), (probe, members_of(data))) if samples[-1] == samples[0] else None
        return (smoothed(data), probe) if probe in ("fourier", "uncertainty", "hessian") else None

    study = Study.of(stored, place)
    study.label = str(stored[0][1].attrs.get("label", ""))
    return study


def sizes(study: Study) -> list[int]:
    """Numbers of dropout masks that were scored with and without smoothing; 0 is the network as it is."""
    found = [key[1] for (smooth, key) in study.cells if isinstance(key, tuple) and (not smooth, key) in study.cells]
    return sorted(set(found))


def smoothing_table(study: Study) -> list[Row]:
    """Scores in percent or nats, with the difference by smoothing and its 95 % interval, paired over samples."""
    rows = []
    for size in sizes(study):
        row: Row = {"dropout masks": str(size) if size else "no dropout"}
        without, smooth = (study.cells[key, ("calibration", size)] for key in (False, True))
        differences = paired_difference(*(stored_scores(_arrays(data)) for data in (smooth, without)))
        for name, (short, unit, digits) in SCORES.items():
            value, interval = differences[name]
            numbers = [unit * number for number in (float(without[name]), float(smooth[name]))]
            row[f"{short}{' %' * (unit > 1)}"] = " → ".join(f"{number:.{digits}f}" for number in numbers)
            ends = f"[{unit * interval.low:+.{digits}f}, {unit * interval.high:+.{digits}f}]"
            row[f"{short} difference"] = f"{unit * value:+.{digits}f} {ends}"
        rows.append(row)
    return rows


def _arrays(data: xr.Dataset) -> Mapping[str, Any]:
    return {str(name): values.values for name, values in data.data_vars.items()}


def heads(stored: Stored) -> list[Study]:
    """One study of all networks with a surface and a spectrum, if there are two and one of them has dropout masks."""

    def place(probe: str, data: xr.Dataset) -> Cell | None:
        quantity = {"surface": "loss", "hessian": "eigenvalue"}.get(probe, "")
        if (probe == "hessian" and "group" in data.dims) or quantity not in data:
            return None
        if not np.isfinite(data[quantity].values).any():
            return None
        return (identity(data), smoothed(data)), (probe, members_of(data) > 0)

    study = Study.of(stored, place)
    study.networks = {key: one for key, one in study.networks.items() if len({probe for probe, _ in one.results}) == 2}
    masked = any(masks for _, (_, masks) in study.cells)
    return [study] if len(study.networks) > 1 and masked else []


def sweep(stored: Stored) -> list[Study]:
    """A study of every argument of which networks have three values or more, and that alone differs among them.

    Of snapshots of one run the one with the most epochs counts.
    """
    trained, found = _trained(stored), []
    for argument in _arguments(trained):
        groups: dict[str, list[Network]] = {}
        for network in trained:
            groups.setdefault(_key(network.configuration, argument, *OF_A_RUN), []).append(network)
        for networks in groups.values():
            networks.sort(key=lambda one: _order(one.configuration.get(argument)))
            label = f"{networks[0].configuration['model']}-{argument}"
            found.append(Study(label, dict(enumerate(networks)), argument))
    return [study for study in found if len(study.values) >= FEWEST]


def differing(stored: Stored) -> list[str]:
    """The arguments in which trained networks differ, those of a single run left out."""
    trained = _trained(stored)
    values = {name: {_key({name: one.configuration.get(name)}) for one in trained} for name in _arguments(trained)}
    return [name for name, several in values.items() if len(several) > 1]


def _trained(stored: Stored) -> list[Network]:
    """Every network once, of the snapshots of a run the one with the most epochs."""
    newest: dict[str, Network] = {}
    for (_, masks, blocks), network in Study.of(stored, _place_in_sweep).networks.items():
        network.configuration |= {"dropout masks": masks, "smoothing inserted": blocks}
        key = _key(network.configuration)
        if key not in newest or network.epoch >= newest[key].epoch:
            newest[key] = network
    return list(newest.values())


def _arguments(trained: Sequence[Network]) -> list[str]:
    return list(dict.fromkeys(name for one in trained for name in one.configuration if name not in OF_A_RUN))


def _place_in_sweep(probe: str, data: xr.Dataset) -> Cell | None:
    """Of the results whose checkpoints say how the network was built."""
    split = {"calibration": options_of(data, "spec").get("split"), "hessian": "hessian"}.get(probe)
    if not options_of(data, "configuration") or "group" in data.dims or split not in ("test", "train", "hessian"):
        return None
    return (identity(data), members_of(data), str(data.attrs.get("smoothing", ""))), split


def _key(configuration: Row, *without: str) -> str:
    """What tells configurations apart, without some arguments."""
    return json.dumps({name: value for name, value in configuration.items() if name not in without}, sort_keys=True)


def _order(value: Any) -> tuple[Any, ...]:
    """Numbers in their order, then words, then none."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, in_words(value))


def sweep_table(study: Study) -> list[Row]:
    """The numbers of the figure, a row per run."""
    columns = {
        "accuracy": ("test", "accuracy"), "training NLL": ("train", "nll"),
        "largest eigenvalue": ("hessian", "mean_largest"), "NEP": ("hessian", "nep"), "APE": ("hessian", "ape"),
    }  # fmt: skip
    return [
        {
            study.argument: study.value(one),
            "seed": str(one.configuration.get("seed", "")),
            **{name: one.number(*cell)[0] for name, cell in columns.items()},
        }
        for one in study.networks.values()
    ]


KINDS = {"smoothing": (smoothing, smoothing_table), "heads": (heads, None), "sweep": (sweep, sweep_table)}


def hybrid(stored: Stored) -> list[Study]:
    """One study of all imported tables and of all results of probe-linear, if a table was imported."""
    each = count()

    def place(probe: str, data: xr.Dataset) -> Cell | None:
        known = probe == "probe-linear" and np.isfinite(data["accuracy"].values).any()
        return (next(each), probe) if known or probe == "hybrid" else None

    study = Study.of(stored, place)
    return [study] if any(probe == "hybrid" for _, probe in study.cells) else []


def build_up_rows(checkpoints: Sequence[Path]) -> Iterator[Row]:
    """A row per trained AlterNet, from what its checkpoint says.

    Raises:
        ValueError: one is no AlterNet, was trained on other data than the first, or holds no accuracy.
    """
    from landscape import models
    from landscape.checkpoints import snapshots
    from landscape.checkpoints.checkpoint import read_checkpoint

    first: tuple[str, str] | None = None
    for given in checkpoints:
        path = snapshots.checkpoint_of(given)
        stored = read_checkpoint(path)
        if stored.model not in models.NAMES or "msa" not in models.accepts(stored.model):
            raise ValueError(f"{path} is a {stored.model or 'checkpoint of another library'}, expected an AlterNet")
        if "accuracy" not in stored.metrics:
            raise ValueError(f"{path} holds no accuracy on the test split; train it with landscape train")
        about = (stored.model, str(stored.data.get("name", "")))
        first = first or about
        if about != first:
            raise ValueError(
                f"{path} is {about[0]} on {about[1]}, the first network {first[0]} on {first[1]}; give networks of one "
                "kind and of one data set"
            )
        msa = stored.model_args.get("msa", models.MODELS[stored.model].keywords["msa"])
        yield {
            "model": about[0], "data": about[1], "msa": sum(msa), "seed": stored.seed,
            **{name: float(stored.metrics[name]) for name in ("accuracy", "loss")}, "checkpoint": str(path),
        }  # fmt: skip
