"""Compare networks, or groups of them over seeds: headline numbers of one protocol, their differences, and verdicts."""

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import xarray as xr

from landscape.headline import FLATTER, FLATTER_ABOVE, HIGHER
from landscape.options import OptionError, did_you_mean, invalid
from landscape.plots.comparison.networks import Compared, Entry, compared
from landscape.plots.headlines import main_figure
from landscape.results import headline_numbers, reader
from landscape.statistics.intervals import quantile
from landscape.statistics.paired import Difference, unpaired
from landscape.statistics.seed_groups import FEWEST, Effect, hedges_g, holm, two_groups

LEVEL = 0.05  # of the tests, after Holm's correction
PAIRS = 4  # networks or groups up to which every pair is compared; beyond, all with the first
REAL, ALIKE, NOT, MISSING = "real", "cannot be told apart", "not comparable", "seeds are missing"
EQUAL = "equal"  # values without an error between them: nothing is tested


@dataclass(frozen=True)
class GroupMean:
    """The mean of one headline number over the members of a group, so many values, with its interval over them."""

    probe: str
    protocol: int
    group: str
    mean: headline_numbers.Measured


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
class Comparison(Compared):
    """What is compared, with the differences and what was decided on the way."""

    networks: tuple[str, ...]
    sides: tuple[str, ...]  # what is compared: networks, or groups
    against: str
    means: tuple[GroupMean, ...]
    contrasts: tuple[Contrast, ...]
    tests: Mapping[str, int]  # by probe: over how many p is corrected


def compare_results(
    stored: Sequence[tuple[str, xr.Dataset]], *, group: Sequence[str] = (), against: str = "", source: str = "the file"
) -> Comparison:
    """As `compare`, of results that are read already: their groups and datasets."""
    found = compared(stored, group, source)
    sides = tuple(dict.fromkeys(entry.side for entry in found.entries if entry.side))
    if against and against not in sides:
        near = did_you_mean(against, sides)
        raise OptionError(f"--against {against} is unknown; expected one of {', '.join(sides)}{near}")
    made = tuple(c for probe in found.protocols for c in _of_probe(probe, found, against))
    means = means_of(found.entries) if found.groups else ()
    networks = tuple(dict.fromkeys(e.network for e in found.entries if not reader.parameters_of(e.data).get("members")))
    tests = Counter(c.probe for c in made if np.isfinite(c.adjusted))
    return Comparison(**vars(found), networks=networks, sides=sides, against=against, means=means, contrasts=made,
                      tests=tests)  # fmt: skip


def chosen(comparison: Comparison, rows: Sequence[str]) -> Comparison:
    """A comparison with some of its numbers only, PROBE or PROBE/NUMBER with `*` for anything; p stays that of all.

    Raises:
        OptionError: a pattern fits none.
    """
    known = dict.fromkeys(f"{e.probe}/{name}" for e in comparison.entries for name in e.numbers)
    for pattern in rows:
        if not any(_fits(one, pattern) for one in known):
            near = ", ".join(name for name in known if name.startswith(pattern.partition("/")[0])) or ", ".join(known)
            raise invalid("rows", pattern, f"PROBE or PROBE/NUMBER, such as {textwrap.shorten(near, 200)}")

    def shown(probe: str, name: str) -> bool:
        return any(_fits(f"{probe}/{name}", pattern) for pattern in rows)

    entries = [
        replace(e, numbers={name: one for name, one in e.numbers.items() if shown(e.probe, name)})
        for e in comparison.entries
    ]
    probes = {e.probe for e in entries if e.numbers}
    return replace(
        comparison,
        entries=tuple(e for e in entries if e.probe in probes),
        protocols={probe: found for probe, found in comparison.protocols.items() if probe in probes},
        means=tuple(one for one in comparison.means if shown(one.probe, one.mean.name)),
        contrasts=tuple(
            c for c in comparison.contrasts if c.probe in probes and (not c.number or shown(c.probe, c.number))
        ),
    )


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern if "/" in pattern else f"{pattern}/*")


def pairs_of(sides: Sequence[str], against: str) -> list[tuple[str, str]]:
    """Who is compared with whom, (first, second): second is subtracted."""
    if against or len(sides) > PAIRS:
        reference = against or sides[0]
        return [(name, reference) for name in sides if name != reference and reference in sides]
    return [(later, earlier) for earlier, later in itertools.combinations(sides, 2)]


def _of_probe(probe: str, found: Compared, against: str) -> list[Contrast]:
    """All differences by one probe, with p after Holm's correction, and verdicts."""
    own = [entry for entry in found.entries if entry.probe == probe and entry.side]
    contrasts: list[Contrast] = []
    for first, second in pairs_of(list(dict.fromkeys(entry.side for entry in own)), against):
        sides = [[e for e in own if e.side == name] for name in (first, second)]
        common = sorted({e.protocol for e in sides[0]} & {e.protocol for e in sides[1]})
        for position in common:
            parts = [[e for e in side if e.protocol == position] for side in sides]
            contrasts += _contrasts(probe, position, (first, second), parts, found.groups is not None)
        if not common:
            one, other = (found.protocols[probe][side[0].protocol] for side in sides)
            why = f"{NOT}: protocols differ ({one.against(other)})"
            contrasts.append(Contrast(probe, None, "", "", first, second, verdict=why))
    copies = _copies(own)
    contrasts = [c for c in contrasts if c.number not in copies]
    tested = [None if c.difference is None or _cannot_differ(c.difference) else c.difference for c in contrasts]
    adjusted = holm([np.nan if difference is None else difference.p for difference in tested])
    readings = {name: one.reading for entry in own for name, one in entry.numbers.items()}
    return [_judged(c, p, readings.get(c.number, "")) for c, p in zip(contrasts, adjusted, strict=True)]


def _copies(entries: Sequence[Entry]) -> set[str]:
    """Numbers that repeat an earlier one in every network, such as the largest of one eigenvalue: tested once."""
    columns: dict[str, list[tuple[int, float]]] = {}
    for i, entry in enumerate(entries):
        for name, one in entry.numbers.items():
            columns.setdefault(name, []).append((i, one.value))
    names = list(columns)
    return {name for i, name in enumerate(names) if columns[name] in [columns[earlier] for earlier in names[:i]]}


def _cannot_differ(difference: Difference) -> bool:
    """Whether both values are equal without an error, as shares of 0 in all mini-batches: no test, and none counted."""
    return difference.value == 0 and not difference.high > difference.low


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
            yield replace(base, difference=two_groups(values[0], values[1]), effect=hedges_g(values[0], values[1]))
        else:
            verdict = MISSING if grouped else ""
            difference = by_pairs.get(name) or _of_two(name, whole[0][0], whole[1][0])
            if np.isnan(difference.p):  # no error is known: the values stand in the table
                continue
            yield replace(base, difference=difference, verdict=verdict)


def paired(data: xr.Dataset, other: xr.Dataset) -> Mapping[str, Difference]:
    """A result minus another one, for those numbers that are paired; none where the samples are not known to be same.

    Both are finished and of one probe and protocol.
    """
    module, sha256 = main_figure(str(data.attrs.get("probe", ""))), data.attrs.get("data_sha256")
    same = sha256 and sha256 == other.attrs.get("data_sha256")
    return module.paired(data, other) if same and hasattr(module, "paired") else {}


def _of_two(name: str, first: Entry, second: Entry) -> Difference:
    """The difference of two networks, not paired: over planes or mini-batches where both have several, or by errors."""
    planes = [np.array(entry.planes.get(name, ())) for entry in (first, second)]
    if min(map(len, planes)) >= FEWEST:
        return two_groups(planes[0], planes[1], "planes")
    module = main_figure(first.probe)
    why: Difference | str = module.unpaired(name, first.data, second.data) if hasattr(module, "unpaired") else ""
    if not isinstance(why, str):
        return why
    one, other = first.numbers[name], second.numbers[name]
    mine, theirs = ((each.value, _error(each), each.n) for each in (one, other))
    return unpaired(mine, theirs, why)


def _error(one: headline_numbers.Measured) -> float:
    """The standard error; of a share of 0 or 1, whose samples are all alike, that which its interval implies."""
    return float((one.high - one.low) / (2 * quantile(one.n))) if one.error == 0 and one.high > one.low else one.error


def _judged(contrast: Contrast, adjusted: float, reading: str) -> Contrast:
    """With the adjusted p, the verdict, and whom the difference favours."""
    if contrast.difference is None:
        return contrast
    verdict = contrast.verdict
    if _cannot_differ(contrast.difference):
        return replace(contrast, verdict=EQUAL)
    if verdict == MISSING or (contrast.effect is not None and min(contrast.seeds) < FEWEST):
        verdict = f"{MISSING} ({contrast.seeds[0]} against {contrast.seeds[1]})"
    elif not verdict:
        verdict = f"{NOT}: no error is known" if np.isnan(adjusted) else REAL if adjusted < LEVEL else ALIKE
    favours = ""
    if verdict == REAL and reading:
        lower = contrast.first if contrast.difference.value < 0 else contrast.second
        higher = contrast.second if lower == contrast.first else contrast.first
        favoured = higher if reading in (HIGHER, FLATTER_ABOVE) else lower
        favours = f"{favoured} is {'flatter' if reading in (FLATTER, FLATTER_ABOVE) else 'better'}"
        if contrast.probe == "surface" and reading == FLATTER and "errors" in contrast.difference.method:
            favours += " on this plane"
    return replace(contrast, adjusted=adjusted, verdict=verdict, favours=favours)


def means_of(entries: Iterable[Entry]) -> tuple[GroupMean, ...]:
    """Every number over the finished members of every group."""
    found: dict[tuple[str, int, str, str], list[headline_numbers.Measured]] = {}
    for entry in entries:
        if entry.side and not entry.partial:
            for name, one in entry.numbers.items():
                found.setdefault((entry.probe, entry.protocol, entry.side, name), []).append(one)
    return tuple(
        GroupMean(probe, position, group, of[0].over([one.value for one in of]))
        for (probe, position, group, _), of in found.items()
    )


def flatness(comparison: Comparison) -> list[str]:
    """What the measures of flatness say together, a line per pair: some may disagree."""
    readings = {(e.probe, name): one.reading for e in comparison.entries for name, one in e.numbers.items()}
    lines = []
    for first, second in dict.fromkeys((c.first, c.second) for c in comparison.contrasts):
        said: dict[str, list[str]] = {}
        for c in comparison.contrasts:
            if (c.first, c.second) == (first, second) and readings.get((c.probe, c.number)) in (FLATTER, FLATTER_ABOVE):
                word = ALIKE if c.verdict == ALIKE else c.favours if c.verdict == REAL else "not judged"
                said.setdefault(word, []).append(f"{c.number} ({c.probe})")
        if said:
            clear = [word for word in said if word not in (ALIKE, "not judged")]
            end = "; the measures disagree" if len(clear) > 1 else ""
            lines.append("; ".join(f"{word} by {', '.join(by)}" if word in clear else f"{word}: {', '.join(by)}"
                                   for word, by in said.items()) + end)  # fmt: skip
            lines[-1] = f"{first} and {second}: {lines[-1]}"
    return lines
