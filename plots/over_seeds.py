"""Results of networks that differ in their seeds as one: their mean with its error over seeds, or that of the first."""

import copy
from collections import ChainMap
from collections.abc import Container, Mapping, Sequence
from typing import Any, cast

import numpy as np
import xarray as xr

from landscape.plots.appearance import label_of
from landscape.plots.comparison import grouping, networks
from landscape.plots.selection import Stored
from landscape.results import handles, reader
from landscape.results.protocols import Protocol, protocol_of
from landscape.statistics.intervals import BY_BOUNDS

OVER = "seeds"  # what the errors of a mean are over


def both(stored: Stored, groups: grouping.Groups | None, means: Container[str]) -> tuple[Stored, Stored]:
    """Results of the first of every group, and with means (`grouped`); twice what is given where there are none."""
    return (grouped(stored, groups), grouped(stored, groups, means=means)) if groups else (stored, stored)


def grouped(stored: Stored, groups: grouping.Groups, *, means: Container[str] = ()) -> list[tuple[str, xr.Dataset]]:
    """One result per group, probe and protocol in place of its finished members', and those of no group.

    It is their mean, of the probes whose `means` are asked for, or else that of the first; its protocol says which. Of
    a member's results by one protocol the newest counts, as in `compare`.
    """
    group_of = {label: name for name, members in groups.members.items() for label in members}
    protocols: dict[str, list[Protocol]] = {}
    members: dict[tuple[str, ...], dict[str, xr.Dataset]] = {}
    names: dict[tuple[str, ...], str] = {}
    for name, data in stored:
        probe, label = name.partition("/")[0], label_of(data)
        group = group_of.get(label)
        if group is None:
            key: tuple[str, ...] = (name,)
        elif reader.unfinished(data):
            continue
        else:
            key = probe, group, str(networks.position(protocols.setdefault(probe, []), protocol_of(data)))
        names.setdefault(key, name)
        known = members.setdefault(key, {}).setdefault(label, data)
        if str(known.attrs.get("created", "")) <= str(data.attrs.get("created", "")):
            members[key][label] = data
    results = {key: list(known.values()) for key, known in members.items()}
    return [
        (name, results[key][0] if len(key) == 1 else _as_one(results[key], key[1], mean=key[0] in means))
        for key, name in names.items()
    ]


def _as_one(members: Sequence[xr.Dataset], group: str, *, mean: bool) -> xr.Dataset:
    found, one = (_mean(members) if mean and len(members) > 1 else None), cast(Any, members[0])
    which = f"{label_of(one)} of {len(members)} {OVER}" if found is None else f"mean over {len(members)} {OVER}"
    about = {"label": group, "protocol": ", ".join(filter(None, (str(one.attrs.get("protocol", "")), which)))}
    about |= {} if found is None else {"errors_over": OVER}
    if not isinstance(one, reader.Stored):
        return cast(xr.Dataset, one.assign(found or {}).assign_attrs(about))
    made: Any = copy.copy(one)
    vars(made).pop("whole", None)  # which has the other attributes and numbers
    made.attrs, made.variables = {**one.attrs, **about}, ChainMap(cast(Any, found or {}), made.variables)
    return cast(xr.Dataset, made)


def _mean(members: Sequence[xr.Dataset]) -> Mapping[str, xr.DataArray] | None:
    """The mean of every number, with its error and interval where the members have one; None where words differ.

    They are computed when they are asked for.
    """
    like, n = members[0], len(members)
    numbers: list[str] = []
    for name, one in like.variables.items():
        others = [data.variables.get(name) for data in members[1:]]
        if any(other is None or other.shape != one.shape for other in others):
            return None
        if one.dtype.kind == "f" and one.dims != (name,):
            numbers.append(str(name))
        elif any((other.values != one.values).any() for other in others if other is not None):
            return None
    ends = ("_se", "_low", "_high")
    means = [name for name in numbers if not name.endswith(ends) and name != "se"]
    parts = {f"{name}{end}": (name, end) for name in means for end in ("", *ends) if f"{name}{end}" in numbers}

    def read(key: str) -> xr.DataArray:
        name, end = parts[key]
        values, about = np.stack([data.variables[name].values for data in members]), like.variables[name]
        with np.errstate(invalid="ignore"):
            mean, error = values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(n)
        if not end:
            return xr.DataArray(xr.Variable(about.dims, np.asarray(mean), about.attrs, fastpath=True))
        low, high = BY_BOUNDS[str(about.attrs.get("bounds", ""))](mean, error, n)
        said = {k: v for k, v in like.variables[key].attrs.items() if k != "over"} | {"n": n}
        part = np.asarray((error, low, high)[ends.index(end)])
        return xr.DataArray(xr.Variable(about.dims, part, said, fastpath=True))

    return handles.OnDemand(parts, read)
