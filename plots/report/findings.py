"""Answer a reader's first questions from the numbers and their errors, and say where they cannot be answered."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import xarray as xr

from landscape.headline import FLATTER, FLATTER_ABOVE
from landscape.plots.comparison.comparison import GroupMean
from landscape.plots.report import next_steps, protocols, table
from landscape.plots.report.next_steps import listed, unfinished
from landscape.results import reader
from landscape.results.headline_numbers import Measured, each, measured, numbers
from landscape.statistics import intervals, paired
from landscape.statistics.stored import count_of, error_of

Stored = Sequence[tuple[str, xr.Dataset]]
Certainty = Literal["certain", "mixed", "cannot tell", "not measured", ""]
UNKNOWN = "whose error is not stored"
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


def findings(stored: Stored, file: Path, means: Sequence[GroupMean] = ()) -> list[Finding]:
    """Which network is flatter, whether two are in one basin, what filters, what matters most, and what to run next."""
    names = table.checkpoints(reader.by_checkpoint(list(stored)))
    ordered = [(name, data) for name, (_, data) in zip(names, reader.by_checkpoint(list(stored)), strict=True)]
    return [flatter(ordered, means), basins(ordered), filters(ordered), matters(ordered), _next(ordered, file)]


def flatter(ordered: Stored, means: Sequence[GroupMean] = ()) -> Finding:
    """Which network is flatter, by every measure of flatness of two networks, or groups, or more under one protocol."""
    question = f"Which network is flatter{', over seeds' * bool(means)}, and is that certain?"
    winners: dict[str, list[str]] = {}
    sharper: set[str] = set()  # networks that some measure finds sharper than another network
    unsure, detail, number_said = [], [], ""
    for title, compared in (_group_measures(means) if means else _measures(ordered)).items():
        reading = next(iter(compared.values())).reading
        ranked = sorted(compared.items(), key=lambda item: item[1].value, reverse=reading == FLATTER_ABOVE)
        (first, flattest), others = ranked[0], ranked[1:]
        shown = listed([f"{one} of {name}" for name, one in ranked], SHOWN)
        detail.append(f"{title}: {shown}")
        behind = [name for name, other in others if _apart(flattest, other)]
        sharper |= set(behind)
        rest = listed([f"{other} of {name}" for name, other in others], SHOWN)
        if len(behind) == len(others):
            number_said = number_said if winners else f"{first} is the flattest by {title}: {flattest}, against {rest}."
            winners.setdefault(first, []).append(title)
        else:
            unsure.append(f"{title}: flattest {first}, told apart from {len(behind) or 'none'} of {len(others)}")
            number_said = (
                number_said or f"By {title}, no network is certainly the flattest: {flattest} of {first}, {rest}."
            )
    said = "; ".join(detail)
    if not detail:
        text = (
            "Not measured: at least two networks under one protocol are needed (hessian, trace, surface or flatness)."
        )
        return Finding(question, [text], "not measured")
    lines = [f"{name} is the flattest by {listed(by)}." for name, by in winners.items()]
    lines += [number_said, *(f"Not told apart by {text}." for text in unsure)]
    if not winners:
        lines.insert(0, "These numbers cannot tell.")
        return Finding(question, lines, "cannot tell", said, "surface", number=number_said)
    if len(winners) > 1 or sharper & set(winners):
        lines.insert(
            0, "There is no single answer: it depends on the measure, and on how far from the weights one looks."
        )
    certainty: Certainty = "mixed" if unsure or len(winners) > 1 else "certain"
    return Finding(question, lines, certainty, said, "surface", number=number_said)


def basins(ordered: Stored) -> Finding:
    """Whether the loss rises between two trained networks, and whether a permutation of units explains that."""
    question = "Are two trained networks in one basin?"
    found, sure = [], True
    for name, data in _newest(ordered, "align").items():
        known = {one.name: one for one in measured(data)}
        if not {"barrier before", "barrier"} <= set(known):
            continue
        before, after = known["barrier before"], known["barrier"]
        sure &= before.low > 0
        rise = f"The loss rises by {before} on the straight line from {name} to {data.attrs.get('other', '')}"
        found.append(f"{rise}, and by {after} after the units of the second are permuted to match.")
    if not found:
        return Finding(question, ["Not measured (align)."], "not measured")
    return Finding(question, found, "certain" if sure else "mixed", number=found[0])


def filters(ordered: Stored) -> Finding:
    """Which layer of every network lowers the amplitude at the highest frequency most, and whether it stands out."""
    question = "Which layer filters high frequencies?"
    found, counts, sure, largest = [], [], True, (math.inf, "")
    for name, data in _newest(ordered, "fourier").items():
        if "high_frequency" not in data:
            continue
        layers, kinds, reduces, high = (
            data.variables[quantity].values for quantity in ("name", "kind", "reduces", "high_frequency")
        )
        changes = [
            replace(_difference(data, "high_frequency", j, i), name=f"{layers[j]} ({kinds[j]})", at=str(kinds[j]))
            for i, j in pairwise(range(high.size))
            if np.isfinite(high[[i, j]]).all() and not reduces[j]
        ]
        if not changes:
            continue
        first, *others = sorted(changes, key=lambda one: one.value)
        rivals = [one.name for one in others if not _apart(first, one)]
        amount = f"by {-first.value:.3g} "
        amount += f"[{-first.high:.3g}, {-first.low:.3g}] nats" if first.known else f"nats, {UNKNOWN}"
        lowers = f"{name}: {first.name} lowers high frequencies"
        if not first.high < 0 and (first.known or first.value >= 0):
            beyond = " beyond its error" if first.known else ""
            found.append(f"{name}: no layer lowers high frequencies{beyond} ({first.name}: {amount}).")
        elif rivals and first.known:
            found.append(f"{lowers} {amount}, not told apart from {listed(rivals, SHOWN)}.")
        else:
            found.append(f"{lowers} most, {amount}.")
        largest = min(largest, (first.value if first.high < 0 else math.inf, found[-1]))
        sure &= first.high < 0 and not rivals
        for kind in ("msa", "mlp", "conv"):
            own = [one for one in changes if one.at == kind and one.known]
            counts += (
                [f"{name}: {sum(one.high < 0 for one in own)} of {len(own)} {kind} layers lower them"] if own else []
            )
    if not found:
        return Finding(question, ["Not measured (fourier)."], "not measured")
    left_out = "Layers that reduce the map are left out, as their frequencies are others."
    detail = ". ".join(filter(None, ("; ".join(counts), left_out)))
    number_said = largest[1] if math.isfinite(largest[0]) else ""
    return Finding(question, found, "certain" if sure else "mixed", detail, "layers", number=number_said)


def matters(ordered: Stored) -> Finding:
    """Which unit of every network costs most when it is removed, and whether that is told apart from the second."""
    question = "Which unit matters most?"
    found, detail, sure, largest = [], [], True, (-math.inf, "")
    for name, data in _newest(ordered, "lesion").items():
        changes = (q for q in ("accuracy_drop", "loss_increase") if q in data)
        quantity = next((q for q in changes if np.isfinite(data.variables[q].values).any()), "")
        if not quantity:
            continue
        units = [one for one in each(data, "{name}", quantity, "unit") if np.isfinite(one.value)]
        first, *others = sorted(units, key=lambda one: -one.value)
        rivals = [one.name for one in others if not _apart(first, one)]
        text = f"{name}: {first.name} ({quantity.replace('_', ' ')} {first})"
        if rivals:
            text += f", not told apart from {listed(rivals, SHOWN)}" if first.known else f", {UNKNOWN}"
        sure &= not rivals
        found.append(f"{text}.")
        largest = max(largest, (first.value, found[-1]))
        detail.append(f"{name}: {listed([f'{one.name} {one}' for one in (first, *others)], SHOWN)}")
    if not found:
        return Finding(question, ["Not measured (lesion)."], "not measured")
    certainty: Certainty = "certain" if sure else "mixed"
    return Finding(question, found, certainty, "; ".join(detail), "layers", number=largest[1])


def _next(ordered: Stored, file: Path) -> Finding:
    step = next_steps.next_step(ordered, file)
    return Finding("Which command to run next?", [step.text], "", step.note, "", step.command)


def _measures(ordered: Stored) -> dict[str, dict[str, Measured]]:
    """Every measure of flatness, of the protocol that most networks share: the networks that have it with its interval.

    Those of the table of checkpoints come first. The newest result of each network counts, and of two measures with the
    same values in all networks the first.
    """
    groups: dict[tuple[bool, str, str], dict[tuple[str, str], dict[str, Measured]]] = {}
    for name, data in ordered:
        for number, one in numbers(data) if not unfinished(data) else ():
            if one.reading in (FLATTER, FLATTER_ABOVE) and one.known:
                of = groups.setdefault((not number.column, str(data.attrs.get("probe", "")), one.name), {})
                of.setdefault(protocols.key_of(data), {})[name] = one
    found: dict[str, dict[str, Measured]] = {}
    for (_, probe, title), by_protocol in sorted(groups.items(), key=lambda item: item[0][0]):
        most = max(by_protocol.values(), key=len)
        values = {name: one.value for name, one in most.items()}
        if len(most) > 1 and values not in [{n: one.value for n, one in other.items()} for other in found.values()]:
            found[f"{title} ({probe})"] = most
    return found


def _group_measures(means: Sequence[GroupMean]) -> dict[str, dict[str, Measured]]:
    """Every measure of flatness with the mean of every group over its seeds, and its error over them."""
    found: dict[str, dict[str, Measured]] = {}
    for one in means:
        if one.mean.reading in (FLATTER, FLATTER_ABOVE) and one.protocol == 0 and one.mean.n > 1:
            found.setdefault(f"{one.mean.name} ({one.probe})", {})[one.group] = one.mean
    return {title: compared for title, compared in found.items() if len(compared) > 1}


def _difference(data: xr.Dataset, name: str, i: int, j: int) -> Measured:
    """An entry of a quantity minus another one, with its error and interval, the errors taken as independent."""
    values, errors, n = data.variables[name].values, error_of(data, name), float(count_of(data, name))
    found = paired.unpaired((values[i], errors[i], n), (values[j], errors[j], n))
    return Measured(name, found.value, math.hypot(errors[i], errors[j]), found.low, found.high, n=n)


def _apart(one: Measured, other: Measured) -> bool:
    """Whether two estimates differ beyond their errors, taken as independent, or, without errors, beyond intervals."""
    found = paired.unpaired((one.value, one.error, one.n), (other.value, other.error, other.n))
    if np.isnan(found.p):
        return one.known and other.known and (one.high < other.low or other.high < one.low)
    return found.p < 1 - intervals.LEVEL


def _newest(ordered: Stored, probe: str) -> Mapping[str, xr.Dataset]:
    return {name: data for name, data in ordered if data.attrs.get("probe") == probe}
