"""What is compared: the numbers of every network by probe and protocol, under names that tell networks apart."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xarray as xr

from landscape.options import counted
from landscape.plots.appearance import label_of
from landscape.plots.comparison.grouping import Groups, groups_of
from landscape.results import reader
from landscape.results.headline_numbers import Measured, measured, numbers
from landscape.results.protocols import Protocol, optimizer_of, protocol_of, variant_of
from landscape.results.reader import parameters_of

NAME = "compare"  # of the command, and of its results in a file
Digests = dict[tuple[str, bool], set[str]]  # by label, and whether the results are of weights or of a training run
NOT_NETWORKS = (NAME, "hybrid")  # results that are of no checkpoint


@dataclass(frozen=True)
class Entry:
    """The numbers of one network by one probe and protocol."""

    probe: str
    network: str
    side: str  # the group that it belongs to, without groups the network itself; "" in no group
    protocol: int  # position among the protocols of the probe
    numbers: Mapping[str, Measured]
    data: xr.Dataset
    partial: str  # how much of it is finished, "" if all
    planes: Mapping[str, tuple[float, ...]]  # values of numbers on several random planes; none on one plane


@dataclass(frozen=True)
class Compared:
    """Networks by probe and protocol, and what was decided on the way."""

    entries: tuple[Entry, ...]
    protocols: Mapping[str, Sequence[Protocol]]  # by probe
    groups: Groups | None
    notes: tuple[str, ...]


def compared(stored: Sequence[tuple[str, xr.Dataset]], rules: Sequence[str], source: str) -> Compared:
    """The results of networks with finished numbers, in groups where there are rules for them.

    Raises:
        ValueError: nothing finished is stored.
        OptionError: no group, or an ambiguous one.
    """
    notes: list[str] = []
    others = tuple(f"{name}/" for name in NOT_NETWORKS)
    results = [(name, data) for name, data in reader.by_checkpoint(list(stored)) if not name.startswith(others)]
    probes: dict[str, list[xr.Dataset]] = {}
    for name, data in results:
        if measured(data):
            probes.setdefault(name.partition("/")[0], []).append(data)
    if not probes:
        raise ValueError(
            f"{source} holds nothing finished to compare; run a probe first, for example: landscape calibration"
        )
    known = [data for found in probes.values() for data in found]
    if len(known) < len(results):
        notes.append(f"left out: {counted(len(results) - len(known), 'result')} without a finished number")
    labels = {label_of(data): label_of(data) for data in known}
    groups = groups_of(labels, rules) if rules else None
    if groups is not None and groups.rest:
        notes.append(f"in no group: {', '.join(groups.rest)}")
    digests = _digests(known)
    protocols: dict[str, list[Protocol]] = {}
    entries = []
    for probe, found in probes.items():
        sets: dict[tuple[str, str, int], list[xr.Dataset]] = {}
        same = len({(variant_of(data), optimizer_of(data)) for data in found}) == 1
        for data, (network, side) in zip(found, _names(found, digests, groups), strict=True):
            at = position(protocols.setdefault(probe, []), protocol_of(data, changed=same))
            sets.setdefault((network, side, at), []).append(data)
        entries += [_entry(probe, *key, alike, notes) for key, alike in sets.items()]
    entries += [row for e in entries for row in _beside_one(e, entries, protocols)]
    notes += _twins(known)
    entries.sort(key=lambda one: (list(probes).index(one.probe), one.protocol))
    return Compared(tuple(entries), protocols, groups, tuple(dict.fromkeys(notes)))


def _names(results: Sequence[xr.Dataset], digests: Digests, groups: Groups | None) -> list[tuple[str, str]]:
    """Network and group of the results of one probe.

    The labels, with a part of the digest (and the optimiser, of trainings) where two checkpoints share one, and with
    what was changed about a network where that is not the same of all.
    """
    group_of = {label: name for name, members in groups.members.items() for label in members} if groups else {}
    same = len({variant_of(data) for data in results}) == 1
    found = []
    for data in results:
        label, variant = label_of(data), "" if same else variant_of(data)
        apart = (optimizer_of(data), _identity(data)[:6]) if len(digests[label, _of_weights(data)]) > 1 else ()
        network = _with(label, *apart, variant)
        side = network if groups is None else _with(group_of[label], variant) if label in group_of else ""
        found.append((network, side))
    return found


def _with(name: str, *words: str) -> str:
    said = ", ".join(filter(None, words))
    return f"{name} ({said})" if said else name


def _digests(results: Sequence[xr.Dataset]) -> Digests:
    """Identities of the networks that have a label."""
    found: Digests = {}
    for data in results:
        found.setdefault((label_of(data), _of_weights(data)), set()).add(_identity(data))
    return found


def _of_weights(data: xr.Dataset) -> bool:
    """Whether a result is of one set of weights, not of a training run."""
    return bool(data.attrs.get("checkpoint_sha256"))


def _identity(data: xr.Dataset) -> str:
    """What a result is of: the digest of its weights, or that of its question where it is of a whole training run."""
    weights = str(data.attrs.get("checkpoint_sha256", ""))
    if weights:
        return weights
    run = f"{data.encoding.get('group', '')} {data.attrs.get('created', '')}"
    return hashlib.sha256(run.encode()).hexdigest()


def _twins(results: Sequence[xr.Dataset]) -> Iterator[str]:
    """Results of one question, whose digest their groups' names end with, under several labels."""
    first: dict[str, str] = {}
    for data in results:
        label, question = label_of(data), str(data.encoding.get("group", "")).rpartition("-")[2]
        if question and _of_weights(data) and first.setdefault(question, label) != label:
            yield f"{label} has the same weights as {first[question]}"


def _entry(probe: str, network: str, side: str, position: int, alike: Sequence[xr.Dataset], notes: list[str]) -> Entry:
    """One network's numbers by one protocol: of one result, or means over several random planes."""
    by_seed: dict[str, xr.Dataset] = {}
    for data in sorted(alike, key=lambda data: (not reader.unfinished(data), str(data.attrs.get("created", "")))):
        by_seed[str(parameters_of(data).get("seed", ""))] = data  # the newest of those that are finished counts
    if len(by_seed) < len(alike):
        notes.append(f"{probe} of {network} is stored several times; the newest counts")
    finished = [data for data in by_seed.values() if not reader.unfinished(data)]
    last = (finished or list(by_seed.values()))[-1]
    numbers = {one.name: one for one in measured(last)}
    planes: dict[str, tuple[float, ...]] = {}
    for name, one in numbers.items() if len(finished) > 1 else ():
        values = tuple(o.value for data in finished for o in measured(data) if o.name == name)
        if len(set(values)) > 1:  # not the loss at the centre, which all planes share
            planes[name] = values
            numbers[name] = one.over(values)
    return Entry(probe, network, side, position, numbers, last, reader.unfinished(last), planes)


def _beside_one(entry: Entry, entries: Sequence[Entry], known: Mapping[str, Sequence[Protocol]]) -> Iterator[Entry]:
    """Several networks together, as a row among the results of one network with those numbers, on the same samples."""
    found = [(headline, one) for headline, one in numbers(entry.data) if headline.like]
    protocol = protocol_of(entry.data)
    for other in {(e.probe, e.protocol): e for e in entries if found}.values():
        theirs = known[other.probe][other.protocol]
        common = {name for name in theirs.facts.keys() & protocol.facts.keys() if name != "seed"}
        if (
            {headline.like for headline, _ in found} <= other.numbers.keys()
            and protocol.samples_sha256 and protocol.samples_sha256 == theirs.samples_sha256
            and all(theirs.facts[name] == protocol.facts[name] for name in common)
        ):  # fmt: skip
            place: Any = found[0][0].at
            data = entry.data.isel(place).assign_attrs(probe=other.probe)
            many = f"mean of {' and '.join(f'{int(data[axis])}' for axis in place)}"
            network, side = _with(entry.network, many), entry.side and _with(entry.side, many)
            own = {headline.like: replace(one, name=headline.like) for headline, one in found}
            yield replace(
                entry, probe=other.probe, network=network, side=side, protocol=other.protocol, numbers=own, data=data
            )


def position(known: list[Protocol], protocol: Protocol) -> int:
    """Where a protocol stands among those of its probe; it is added if it is new."""
    for i, other in enumerate(known):
        if other.same(protocol):
            if not other.samples_sha256:
                known[i] = replace(other, samples_sha256=protocol.samples_sha256)
            return i
    known.append(protocol)
    return len(known) - 1
