"""Answer a reader's first questions from the numbers and their errors, and say where they cannot be answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import xarray as xr

from landscape.plots.align import pair
from landscape.plots.report import next_steps, protocols
from landscape.plots.report.next_steps import listed, unfinished
from landscape.plots.report.table import QUANTILE, Estimate, checkpoints, height, scalar, with_error
from landscape.results import reader

Stored = Sequence[tuple[str, xr.Dataset]]
Certainty = Literal["certain", "mixed", "cannot tell", "not measured", ""]
RADII = (0.1, 0.25, 0.5, 1.0)
SHOWN = 3  # measures, units or layers named in one sentence


@dataclass(frozen=True)
class Finding:
    """A question with its answer, how sure it is, what it rests on, the part of the page that shows it, a command."""

    question: str
    answer: Sequence[str]  # one sentence each
    certainty: Certainty
    detail: str = ""
    section: str = ""
    command: str = ""
    number: str = ""  # the sentence of the answer that has a number with its 95 % interval, where one has


def findings(stored: Stored, file: Path) -> list[Finding]:
    """Which network is flatter, whether two are in one basin, what filters, what matters most, and what to run next."""
    names = checkpoints(reader.by_checkpoint(list(stored)))
    ordered = [(name, data) for name, (_, data) in zip(names, reader.by_checkpoint(list(stored)), strict=True)]
    return [flatter(ordered), basins(ordered), filters(ordered), matters(ordered), _next(ordered, file)]


def flatter(ordered: Stored) -> Finding:
    """Which network is flatter, by the curvature at the weights and by the height at every radius."""
    question = "Which network is flatter, and is that certain?"
    measures: list[tuple[str, str, Callable[[xr.Dataset], Estimate | None]]] = [
        ("curvature (APE)", "hessian", scalar("ape")),
        ("Hessian trace", "trace", scalar("trace")),
    ]
    measures += [(f"height at {r:g}", "surface", lambda data, r=r: height(data, r)) for r in RADII]  # type: ignore[misc]
    winners: dict[str, list[str]] = {}
    sharper: set[str] = set()  # networks that some measure finds sharper than another network
    unsure, detail, number = [], [], ""
    for title, probe, get in measures:
        compared = _compared([(n, d) for n, d in ordered if d.attrs.get("probe") == probe], get)
        if len(compared) < 2:
            continue
        ranked = sorted(compared.items(), key=lambda item: item[1].value)
        (first, least), others = ranked[0], ranked[1:]
        detail.append(f"{title}: " + ", ".join(f"{name} {estimate}" for name, estimate in ranked[:SHOWN]))
        behind = [name for name, other in others if _apart(least, other)]
        sharper |= set(behind)
        rest = listed(f"{other} of {name}" for name, other in others[:SHOWN])
        if len(behind) == len(others):
            number = number if winners else f"{first} is the flattest by {title}: {least}, against {rest}."
            winners.setdefault(first, []).append(title)
        else:
            alike = [first, *(name for name, _ in others if name not in behind)]
            but = f", which are both flatter than {listed(behind[:SHOWN])}" if len(alike) == 2 and behind else ""
            but = f", which are all flatter than {listed(behind[:SHOWN])}" if len(alike) > 2 and behind else but
            unsure.append(f"{listed(alike[:SHOWN])} by {title}{but}")
            number = number or f"By {title}, no network is told apart as the flattest: {least} of {first}, {rest}."
    said = "; ".join(detail)
    if not detail:
        text = "Not measured: at least two networks under one protocol are needed (hessian, trace or surface)."
        return Finding(question, [text], "not measured")
    lines = [f"{name} is the flattest by {listed(by)}." for name, by in winners.items()]
    lines += [f"Not told apart: {text}." for text in unsure]
    lines += [number]
    if not winners:
        return Finding(question, ["These numbers cannot tell.", *lines], "cannot tell", said, "surface", number=number)
    if len(winners) > 1 or sharper & set(winners):
        lines.insert(0, "There is no single answer: it depends on how far from the weights one looks.")
    certainty: Certainty = "mixed" if unsure or len(winners) > 1 else "certain"
    return Finding(question, lines, certainty, said, "surface", number=number)


def basins(ordered: Stored) -> Finding:
    """Whether the loss rises between two trained networks, and whether a permutation of units explains that."""
    question = "Are two trained networks in one basin?"
    found, sure = [], True
    for name, data in _newest(ordered, "align").items():
        before, after = (
            with_error(*(data[f"barrier{end}"].values[curve].item() for end in ("", "_se"))) for curve in pair(data)
        )
        if before is None or after is None:
            continue
        sure = sure and _apart(before, Estimate(0.0, 0.0, 0.0))
        rise = f"The loss rises by {before} on the straight line from {name} to {data.attrs.get('other', '')}"
        found.append(f"{rise}, and by {after} after the units of the second are permuted to match.")
    if not found:
        return Finding(question, ["Not measured (align)."], "not measured")
    return Finding(question, found, "certain" if sure else "mixed", number=found[0])


def filters(ordered: Stored) -> Finding:
    """Which layer of every network lowers the amplitude at the highest frequency most, beyond its error."""
    question = "Which layer filters high frequencies?"
    found, counts, sure, largest = [], [], True, (math.inf, "")
    for name, data in _newest(ordered, "fourier").items():
        if "high_frequency" not in data:
            continue
        values, errors = data["high_frequency"].values, _errors(data, "high_frequency")
        changes = []
        for i, j in pairwise(range(len(values))):
            if np.isfinite(values[[i, j]]).all() and not data["reduces"].values[j]:
                error = math.hypot(errors[i], errors[j])
                changes.append((float(values[j] - values[i]), error, j))
        if not changes:
            continue
        change, error, j = min(changes)
        layer = f"{data['name'].values[j]} ({data['kind'].values[j]})"
        if change < -QUANTILE * error:
            found.append(
                f"{name}: {layer} lowers high frequencies most, by {-change:.3g} ± {QUANTILE * error:.2g} nats."
            )
            largest = min(largest, (change, found[-1]))
        else:
            sure = False
            least = f"{layer}: {change:.2g} ± {QUANTILE * error:.2g}"
            found.append(f"{name}: no layer lowers high frequencies beyond its error ({least}).")
        for kind in ("msa", "mlp", "conv"):
            own = [c for c in changes if data["kind"].values[c[2]] == kind]
            lower = sum(c < -QUANTILE * e for c, e, _ in own)
            counts += [f"{name}: {lower} of {len(own)} {kind} layers lower them"] if own else []
    if not found:
        return Finding(question, ["Not measured (fourier)."], "not measured")
    detail = "; ".join(counts) + ". Layers that reduce the map are left out, as their frequencies are others."
    return Finding(question, found, "certain" if sure else "mixed", detail, "layers", number=largest[1])


def matters(ordered: Stored) -> Finding:
    """Which unit of every network costs most when it is removed, and whether that is told apart from the second."""
    question = "Which unit matters most?"
    found, detail, sure, largest = [], [], True, (-math.inf, "")
    for name, data in _newest(ordered, "lesion").items():
        quantity = next((q for q in ("accuracy_drop", "loss_increase") if q in data and data[q].notnull().any()), "")
        if not quantity:
            continue
        values, errors = data[quantity].values, _errors(data, quantity)
        order = [int(i) for i in np.argsort(-np.where(np.isfinite(values), values, -np.inf))]
        first = order[0]
        words = quantity.replace("_", " ")
        text = f"{name}: {data['name'].values[first]} ({words} {values[first]:.3g} ± {QUANTILE * errors[first]:.2g})"
        rivals = [
            i for i in order[1:]
            if values[first] - values[i] <= QUANTILE * math.hypot(errors[first], errors[i]) and np.isfinite(values[i])
        ]  # fmt: skip
        if rivals:
            sure = False
            text += f", not told apart from {listed([str(data['name'].values[i]) for i in rivals[:SHOWN]])}"
        found.append(f"{text}.")
        largest = max(largest, (float(values[first]), found[-1]))
        ranked = (f"{data['name'].values[i]} {values[i]:.3g} ± {QUANTILE * errors[i]:.2g}" for i in order[:SHOWN])
        detail.append(f"{name}: {', '.join(ranked)}")
    if not found:
        return Finding(question, ["Not measured (lesion)."], "not measured")
    certainty: Certainty = "certain" if sure else "mixed"
    return Finding(question, found, certainty, "; ".join(detail), "layers", number=largest[1])


def _next(ordered: Stored, file: Path) -> Finding:
    step = next_steps.next_step(ordered, file)
    return Finding("Which command to run next?", [step.text], "", step.note, "", step.command)


def _compared(results: Stored, get: Callable[[xr.Dataset], Estimate | None]) -> dict[str, Estimate]:
    """The estimates of the protocol that most networks share, the newest result of each network."""
    groups: dict[tuple[str, str], dict[str, Estimate]] = {}
    for name, data in results:
        estimate = get(data)
        if estimate is not None and math.isfinite(estimate.error) and not unfinished(data):
            groups.setdefault(protocols.key_of(data), {})[name] = estimate
    return max(groups.values(), key=len, default={})


def _apart(one: Estimate, other: Estimate) -> bool:
    """Whether the difference of two estimates exceeds 1.96 of its standard errors, errors taken as independent."""
    return abs(one.value - other.value) > QUANTILE * math.hypot(one.error, other.error)


def _newest(ordered: Stored, probe: str) -> Mapping[str, xr.Dataset]:
    return {name: data for name, data in ordered if data.attrs.get("probe") == probe}


def _errors(data: xr.Dataset, name: str) -> np.ndarray:
    found = data[f"{name}_se"].values if f"{name}_se" in data else np.full(data[name].shape, math.nan)
    return np.asarray(np.where(np.isfinite(found), found, math.inf))
