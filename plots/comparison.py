"""Compare networks, or groups of them over seeds: headline numbers of one protocol, their differences, and verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr

from landscape.options import OptionError, did_you_mean
from landscape.plots.appearance import parameters_of
from landscape.plots.grouping import Groups, groups_of
from landscape.plots.measured import FLATTER, HIGHER, Measured, measured
from landscape.plots.pairing import paired
from landscape.plots.protocols import Protocol, protocol_of, variant_of
from landscape.results import reader
from landscape.results.paired import Difference, unpaired
from landscape.results.seed_groups import FEWEST, Effect, hedges_g, holm, mean_interval, welch

NAME = "compare"  # of the command, and of its results in a file
NOT_NETWORKS = (NAME, "hybrid")  # results that are of no checkpoint
LEVEL = 0.05  # of the tests, after Holm's correction
PAIRS = 4  # networks or groups up to which every pair is compared; beyond, all with the first
REAL, ALIKE, NOT, MISSING = "real", "cannot be told apart", "not comparable", "seeds are missing"


@dataclass(frozen=True)
class Entry:
    """The numbers of one network by one probe and protocol."""

    probe: str
    network: str
    protocol: int  # position among the protocols of the probe
    numbers: Mapping[str, Measured]
    data: xr.Dataset
    partial: str  # how much of it is finished, "" if all
    planes: Mapping[str, tuple[float, ...]]  # values of numbers on several random planes; none on one plane


@dataclass(frozen=True)
class GroupMean:
    """One headline number over the members of a group, with its interval by Student's t."""

    probe: str
    protocol: int
    group: str
    like: Measured  # name, unit and reading
    values: tuple[float, ...]
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Contrast:
    """The difference of two networks, or of two groups, in one number."""

    probe: str
    protocol: int | None  # None: they have no protocol in common
    number: str
    unit: str
    first: str
    second: str  # which is subtracted
    difference: Difference | None = None
    adjusted: float = np.nan  # p after Holm's correction over all rows of the probe
    effect: Effect | None = None
    seeds: tuple[int, int] = (1, 1)
    verdict: str = ""
    favours: str = ""  # `vit is flatter`; "" where no direction is better


@dataclass(frozen=True)
class Comparison:
    """Everything that is compared, and what was decided on the way."""

    networks: tuple[str, ...]
    groups: Groups | None
    against: str
    protocols: Mapping[str, Sequence[Protocol]]  # by probe
    entries: tuple[Entry, ...]
    means: tuple[GroupMean, ...]
    contrasts: tuple[Contrast, ...]
    notes: tuple[str, ...]

    def _repr_html_(self) -> str:
        from landscape.plots.comparison_text import as_html

        return as_html(self)


def compare(
    stored: Sequence[tuple[str, xr.Dataset]], *, group: Sequence[str] = (), against: str = "", source: str = "the file"
) -> Comparison:
    """Compare the results of one file, or of several.

    Raises:
        ValueError: nothing finished is stored.
        OptionError: a group or the label to compare with is unknown.
    """
    notes: list[str] = []
    results = [(name, data) for name, data in reader.by_checkpoint(list(stored)) if not name.startswith(_others())]
    known = [(name.partition("/")[0], data) for name, data in results if measured(data)]
    if not known:
        raise ValueError(
            f"{source} holds nothing finished to compare; run a probe first, for example: landscape calibration"
        )
    if len(known) < len(results):
        notes.append(f"{len(results) - len(known)} results without a finished number are left out")
    names = network_names([data for _, data in known])
    protocols: dict[str, list[Protocol]] = {}
    sets: dict[tuple[str, str, int], list[xr.Dataset]] = {}
    for (probe, data), network in zip(known, names, strict=True):
        position = _position(protocols.setdefault(probe, []), protocol_of(data))
        sets.setdefault((probe, network, position), []).append(data)
    entries = [_entry(*key, alike, notes) for key, alike in sets.items()]
    labels = {name: str(data.attrs.get("label", "")) for (_, data), name in zip(known, names, strict=True)}
    variants = {name: variant_of(data) for (_, data), name in zip(known, names, strict=True)}
    groups = _by_variant(groups_of(labels, group), variants) if group else None
    if groups is not None and groups.rest:
        notes.append(f"in no group: {', '.join(groups.rest)}")
    compared = tuple(groups.members) if groups else tuple(labels)
    against = _known(against, compared, labels) if against else ""
    order = tuple(sorted(entries, key=lambda one: (one.probe, one.protocol)))
    made = [c for probe in protocols for c in _of_probe(probe, order, protocols[probe], groups, compared, against)]
    means = tuple(_means(order, groups)) if groups else ()
    return Comparison(tuple(labels), groups, against, protocols, order, means, tuple(made), tuple(dict.fromkeys(notes)))


def network_names(results: Sequence[xr.Dataset]) -> list[str]:
    """Names of networks: the labels, a part of the digest where two checkpoints share one, and what was changed."""
    about = [(str(d.attrs.get("label", "")), str(d.attrs.get("checkpoint_sha256", "")), variant_of(d)) for d in results]
    digests: dict[str, set[str]] = {}
    for label, digest, _ in about:
        digests.setdefault(label, set()).add(digest)
    common = len({variant for *_, variant in about}) == 1
    names = []
    for label, digest, variant in about:
        parts = [digest[:6] if len(digests[label] - {""}) > 1 else "", "" if common else variant]
        words = ", ".join(filter(None, parts))
        names.append(f"{label} ({words})" if words else label)
    return names


def _others() -> tuple[str, ...]:
    return tuple(f"{name}/" for name in NOT_NETWORKS)


def _entry(probe: str, network: str, position: int, alike: Sequence[xr.Dataset], notes: list[str]) -> Entry:
    """One network's numbers by one protocol: of one result, or means over several random planes."""
    by_seed: dict[str, xr.Dataset] = {}
    for data in sorted(alike, key=lambda data: (not _partial(data), str(data.attrs.get("created", "")))):
        by_seed[str(parameters_of(data).get("seed", ""))] = data  # the newest of those that are finished counts
    if len(by_seed) < len(alike):
        notes.append(f"{probe} of {network} is stored several times; the newest counts")
    finished = [data for data in by_seed.values() if not _partial(data)]
    last = (finished or list(by_seed.values()))[-1]
    numbers = {one.name: one for one in measured(last)}
    planes: dict[str, tuple[float, ...]] = {}
    for name, one in numbers.items() if len(finished) > 1 else ():
        values = tuple(o.value for data in finished for o in measured(data) if o.name == name)
        if len(set(values)) > 1:  # not the loss at the centre, which all planes share
            planes[name] = values
            mean, low, high = mean_interval(np.array(values))
            error = float(np.std(values, ddof=1) / np.sqrt(len(values)))
            numbers[name] = replace(one, value=mean, error=error, low=low, high=high)
    return Entry(probe, network, position, numbers, last, _partial(last), planes)


def _partial(data: xr.Dataset) -> str:
    done, units = reader.finished_units(data), int(data["done"].size) if "done" in data else 0
    return f"{done} of {units} units" if done < units else ""


def _position(known: list[Protocol], protocol: Protocol) -> int:
    """Where a protocol stands among those of its probe; it is added if it is new."""
    for i, other in enumerate(known):
        if other.same(protocol):
            if not other.samples_sha256:
                known[i] = replace(other, samples_sha256=protocol.samples_sha256)
            return i
    known.append(protocol)
    return len(known) - 1


def _by_variant(groups: Groups, variants: Mapping[str, str]) -> Groups:
    """Groups whose members were changed in the same way."""
    members: dict[str, list[str]] = {}
    for name, networks in groups.members.items():
        several = len({variants[network] for network in networks}) > 1
        for network in networks:
            own = f"{name} ({variants[network] or 'as it is'})" if several else name
            members.setdefault(own, []).append(network)
    return replace(groups, members={name: tuple(networks) for name, networks in members.items()})


def _known(against: str, compared: Sequence[str], labels: Mapping[str, str]) -> str:
    by_label = [name for name in compared if labels.get(name) == against]
    found = [name for name in compared if name == against] or by_label
    if len(found) != 1:
        what = "is the label of several networks" if found else "is unknown"
        near = did_you_mean(against, compared)
        raise OptionError(f"--against {against} {what}; expected one of {', '.join(found or compared)}{near}")
    return found[0]


def pairs_of(compared: Sequence[str], against: str) -> list[tuple[str, str]]:
    """Who is compared with whom, (first, second): second is subtracted."""
    if against or len(compared) > PAIRS:
        reference = against or compared[0]
        return [(name, reference) for name in compared if name != reference]
    return [(later, earlier) for earlier, later in itertools.combinations(compared, 2)]


def _of_probe(
    probe: str, entries: Sequence[Entry], protocols: Sequence[Protocol], groups: Groups | None,
    compared: Sequence[str], against: str,
) -> list[Contrast]:  # fmt: skip
    """All differences by one probe, with p after Holm's correction, and verdicts."""
    own = [entry for entry in entries if entry.probe == probe]
    members = groups.members if groups else {name: (name,) for name in compared}
    found: list[Contrast] = []
    for first, second in pairs_of(compared, against):
        sides = [[e for e in own if e.network in members[name]] for name in (first, second)]
        common = sorted({e.protocol for e in sides[0]} & {e.protocol for e in sides[1]})
        for position in common:
            parts = [[e for e in side if e.protocol == position] for side in sides]
            found += _contrasts(probe, position, (first, second), parts, groups is not None)
        if not common and all(sides):
            one, other = (protocols[side[0].protocol] for side in sides)
            why = f"{NOT}: protocols differ ({one.against(other)})"
            found.append(Contrast(probe, None, "", "", first, second, verdict=why))
    adjusted = holm([c.difference.p if c.difference else np.nan for c in found])
    readings = {name: one.reading for entry in own for name, one in entry.numbers.items()}
    return [
        _judged(contrast, p, readings.get(contrast.number, "")) for contrast, p in zip(found, adjusted, strict=True)
    ]


def _contrasts(
    probe: str, position: int, names: tuple[str, str], parts: Sequence[Sequence[Entry]], grouped: bool
) -> Iterator[Contrast]:
    """Differences in every number that both sides have, by one protocol."""
    first, second = names
    partial = next((f"{e.network} is unfinished ({e.partial})" for side in parts for e in side if e.partial), "")
    whole = [[e for e in side if not e.partial] for side in parts]
    if not all(whole):
        yield Contrast(probe, position, "", "", first, second, verdict=f"{NOT}: {partial}")
        return
    by_pairs = paired(whole[0][0].data, whole[1][0].data) if [len(side) for side in whole] == [1, 1] else {}
    for name, like in whole[0][0].numbers.items():
        values = [np.array([e.numbers[name].value for e in side if name in e.numbers]) for side in whole]
        if not all(len(side) for side in values):
            continue
        seeds = len(values[0]), len(values[1])
        base = Contrast(probe, position, name, like.unit, first, second, seeds=seeds)
        if grouped and max(seeds) > 1:
            yield replace(base, difference=welch(values[0], values[1]), effect=hedges_g(values[0], values[1]))
        else:
            verdict = MISSING if grouped else ""
            difference = by_pairs.get(name) or _of_two(name, whole[0][0], whole[1][0])
            yield replace(base, difference=difference, verdict=verdict)


def _of_two(name: str, first: Entry, second: Entry) -> Difference:
    """The difference of two networks without pairs: over random planes if both have several, else by their errors."""
    planes = [np.array(entry.planes.get(name, ())) for entry in (first, second)]
    if min(map(len, planes)) >= FEWEST:
        return welch(planes[0], planes[1], "planes")
    one, other = first.numbers[name], second.numbers[name]
    return unpaired(one.value, one.error, other.value, other.error)


def _judged(contrast: Contrast, adjusted: float, reading: str) -> Contrast:
    """With the adjusted p, the verdict, and whom the difference favours."""
    if contrast.difference is None:
        return contrast
    verdict = contrast.verdict
    if verdict == MISSING or (contrast.effect is not None and min(contrast.seeds) < FEWEST):
        verdict = f"{MISSING} ({contrast.seeds[0]} against {contrast.seeds[1]})"
    elif not verdict:
        verdict = f"{NOT}: no error is known" if np.isnan(adjusted) else REAL if adjusted < LEVEL else ALIKE
    favours = ""
    if verdict == REAL and reading:
        lower = contrast.first if contrast.difference.value < 0 else contrast.second
        higher = contrast.second if lower == contrast.first else contrast.first
        favours = f"{higher if reading == HIGHER else lower} is {'flatter' if reading == FLATTER else 'better'}"
        if contrast.probe == "surface" and reading == FLATTER and "errors" in contrast.difference.method:
            favours += " on this plane"
    return replace(contrast, adjusted=adjusted, verdict=verdict, favours=favours)


def _means(entries: Iterable[Entry], groups: Groups) -> Iterator[GroupMean]:
    """Every number over the finished members of every group."""
    group_of = {network: name for name, members in groups.members.items() for network in members}
    found: dict[tuple[str, int, str, str], list[Measured]] = {}
    for entry in entries:
        if entry.network in group_of and not entry.partial:
            for name, one in entry.numbers.items():
                found.setdefault((entry.probe, entry.protocol, group_of[entry.network], name), []).append(one)
    for (probe, position, group, _), members in found.items():
        values = tuple(one.value for one in members)
        yield GroupMean(probe, position, group, members[0], values, *mean_interval(np.array(values)))


def flatness(comparison: Comparison) -> list[str]:
    """What the measures of flatness say together, a line per pair: some may disagree."""
    readings = {(e.probe, name): one.reading for e in comparison.entries for name, one in e.numbers.items()}
    lines = []
    for first, second in dict.fromkeys((c.first, c.second) for c in comparison.contrasts):
        said: dict[str, list[str]] = {}
        for c in comparison.contrasts:
            if (c.first, c.second) == (first, second) and readings.get((c.probe, c.number)) == FLATTER:
                word = ALIKE if c.verdict == ALIKE else c.favours if c.verdict == REAL else "not judged"
                said.setdefault(word, []).append(f"{c.number} ({c.probe})")
        if said:
            clear = [word for word in said if word not in (ALIKE, "not judged")]
            end = "; the measures disagree" if len(clear) > 1 else ""
            lines.append("; ".join(f"{word} by {', '.join(by)}" if word in clear else f"{word}: {', '.join(by)}"
                                   for word, by in said.items()) + end)  # fmt: skip
            lines[-1] = f"{first} and {second}: {lines[-1]}"
    return lines
