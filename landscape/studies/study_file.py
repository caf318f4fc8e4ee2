"""Read the file of a study and check it whole: networks, measurements, numbers, claims, comparisons.

The file is TOML, see `docs/studies.md`. Its tables become the objects of `claims` and expressions; nothing runs here.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from landscape.probes import probe_class
from landscape.results.declared_size import toml_of
from landscape.statistics.seed_groups import FEWEST_NETWORKS
from landscape.studies import edge_of_stability, merged, network_tables
from landscape.studies.claims import JOINTLY, Claim, Measurement, Network
from landscape.studies.expressions import Expression, Known
from landscape.studies.network_tables import Table, checked, known_names, refuse, require_known, tables, within
from landscape.studies.study import Cell, Results

Configure: TypeAlias = Callable[[str, str, dict[str, Any]], Known]  # checks a probe's preset and options
SIGNS: Mapping[Any, Any] = {"positive": 1, "negative": -1, 1: 1, -1: -1}
SNAPSHOTS = ("final.pt", "warmup.pt", "init.pt", "final_ema.pt")
SPECIAL = {"metrics": (), "evaluate": ("passes",), "stream": ("moving",)}  # options that are no probe's


@dataclass(frozen=True)
class StudyFile:
    """A checked study."""

    title: str
    about: str
    data: str
    data_root: Path | None
    train: Table
    networks: Mapping[str, Network]
    measurements: Mapping[str, Measurement]
    numbers: Mapping[str, Expression]
    claims: tuple[Claim, ...]
    compare: tuple[tuple[Sequence[str], Sequence[str]], ...] = field(default=())  # networks, and names of numbers
    correlations: tuple[tuple[tuple[str, str], Sequence[str]], ...] = ()  # two numbers, and networks
    measure_all: bool = True  # every measurement of every network; else what claims and numbers need
    load: Table = field(default_factory=dict)  # options that all networks are loaded with
    figures: tuple[str, ...] = ()  # names of those to draw; none: all that the results allow
    diagrams: tuple[tuple[str, Sequence[str], str], ...] = ()  # a number, arguments, and what made the networks

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for one in self.networks.values() if one.measured for seed in one.seeds})

    def cells(self, claims: Sequence[Claim]) -> list[Cell]:
        """What is measured for some claims, in order."""
        needs = [need for one in claims for need in one.needs]
        if self.measure_all:
            needs += [
                (name, key) for key, how in self.measurements.items() for name, one in self.networks.items()
                if not one.full_batch and (name in how.networks if how.networks else one.measured)
            ]  # fmt: skip
            needs += [(name, edge_of_stability.SERIES) for name, one in self.networks.items() if one.full_batch]
        return list(dict.fromkeys(needs))

    def partners(self, name: str, key: str, seed: int) -> list[tuple[str, int]]:
        """The networks, with their seeds, that are measured together with that of a cell."""
        others = self.measurements[key].others if key in self.measurements else ()
        place = self.networks[name].seeds.index(seed)
        return [(other, self.networks[other].seeds[place]) for other in others]

    def trained(self, cells: Sequence[Cell], seed: int) -> list[tuple[str, int]]:
        """The networks, with their seeds, that are trained before cells with a seed are measured."""
        of_seed = [cell for cell in cells if seed in self.networks[cell[0]].seeds]
        found = [(name, seed) for name, _ in of_seed]
        found += [partner for name, key in of_seed for partner in self.partners(name, key, seed)]
        return [(name, seed) for name, seed in dict.fromkeys(found) if self.networks[name].model]

    def question(self, network: str, key: str) -> str:
        """The digest of what the file says about one step: a training, or a measurement and the networks it takes."""
        how = self.measurements.get(key)
        networks = [self.networks[name] for name in (network, *(how.others if how else ()))]
        made: list[Any] = [
            (one.model, one.model_args, one.recipe, one.fraction, one.overrides, one.full_batch) for one in networks
        ]
        made += [(one.files, one.load) for one in networks]
        asked = [how.probe, how.options, how.snapshot, how.otherwise, self.load] if how else []
        text = json.dumps([key, self.data, made, asked], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def scope(self, network: str, results: Results) -> dict[str, Any]:
        """What the names in an expression over one network mean: its results and its numbers."""
        return _Scope({key: data for (name, key), data in results.items() if name == network}, self.numbers)

    def needs(self, network: str, key: str) -> Iterator[Cell]:
        """The cells behind a name of a network: a measurement of it, or those of a number."""
        if key in self.numbers:
            for base, _ in self.numbers[key].chains:
                yield from self.needs(network, base)
            return
        known = [edge_of_stability.SERIES] if self.networks[network].full_batch else [*self.measurements, *self.numbers]
        require_known(key, known, f"of {network}")
        yield network, key


class _Scope(dict[str, Any]):
    """Results by name, and numbers that are computed when they are asked for."""

    def __init__(self, results: Mapping[str, Any], numbers: Mapping[str, Expression]) -> None:
        super().__init__(results)
        self._numbers = numbers

    def __missing__(self, key: str) -> float:
        self[key] = value = self._numbers[key].value(self)
        return value


def study_of(
    source: Path | Table, configure: Configure, *, changes: Table | None = None, given: Sequence[Path | None] = ()
) -> StudyFile:
    """Read and check a study, with changes that count more than the file, and checkpoints for networks with `given`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: naming what is wrong in it, and what is near.
    """
    if isinstance(source, Mapping):
        return _study(merged(source, changes or {}), Path(), configure, given)
    with within(str(source)):
        return _study({"title": source.stem} | merged(toml_of(source), changes or {}), source.parent, configure, given)


def _study(table: Table, folder: Path, configure: Configure, given: Sequence[Path | None]) -> StudyFile:
    from landscape.data import check_name

    file = checked(table, "the file")
    defaults, data = network_tables.training_of(file), file.get("data", "")
    known: dict[str, Known] = {}
    every = [pair for of, one in tables(file, "measure") for pair in _over(of, one)]
    measurements = {name: _measurement(name, one, configure, known) for name, one in every}
    places = [name for name, one in tables(file, "networks") if one.get("given")]
    refuse(bool(given) and not places, f"it names its networks, got {len(given)} checkpoints; drop them")
    made = [one for name, of in tables(file, "networks") if name not in places
            for one in network_tables.networks_of(name, of, defaults, folder)]  # fmt: skip
    networks = {one.name: one for one in made}
    refuse(len(networks) < len(made), f"two networks have one name; the networks are {', '.join(o.name for o in made)}")
    networks |= network_tables.given_networks(places, file.get("networks", {}), given)
    refuse(not networks, "it has no networks; write a table such as [networks.sgd]")
    without = not data and any(one.model or one.full_batch for one in networks.values())
    refuse(without, "data is missing, such as data = 'digits'")
    check_name(data) if data else None
    for name, how in measurements.items():
        known_names([*how.networks, *how.others], networks, f"[measure.{name}] networks")
        most = max((len(one.seeds) for one in networks.values() if one.name in (how.networks or networks)), default=0)
        for other in how.others:
            refuse(len(networks[other].seeds) < most, f"[measure.{name}] with: {other} has fewer than {most} seeds")
    numbers: dict[str, Expression] = {}
    for name, text in file.get("numbers", {}).items():
        with within(f"[numbers] {name}"):
            refuse(name in measurements, "a measurement has this name too; give another one")
            numbers[name] = Expression(str(text), (*measurements, *numbers))
            _check_taken(numbers[name], known)
    root = Path(file["data_root"]) if file.get("data_root") else None
    study = StudyFile(
        file.get("title", "A study"), file.get("about", ""), data, root, defaults, networks, measurements,
        numbers, (), tuple(_comparison(one, networks, numbers) for one in file.get("compare", ())),
        tuple(pair for one in file.get("correlations", ()) for pair in _correlations(one, networks, numbers)),
        file.get("measure_all", True), network_tables.loading_of(file), tuple(file.get("figures", ())),
        tuple(of for one in file.get("diagrams", ()) for of in _diagrams(one, networks, numbers)),
    )  # fmt: skip
    claims = tuple(_claim(one, study, known) for one in file.get("claims", ()))
    names = [one.name for one in claims]
    refuse(len(set(names)) < len(names), f"two claims are named {next((n for n in names if names.count(n) > 1), '')}")
    return replace(study, claims=claims)


def _over(name: str, table: Table) -> Iterator[tuple[str, Table]]:
    """A measurement, or one per value of the options in `over`, each with the value in its name."""
    own = {key: value for key, value in table.items() if key != "over"}
    over = network_tables.over_of(f"[measure.{name}]", table)
    for values in product(*over.values()):
        yield " ".join([name, *map(str, values)]), {"probe": name, **own, **dict(zip(over, values, strict=True))}


def _measurement(name: str, table: Table, configure: Configure, known: dict[str, Known]) -> Measurement:
    """A measurement; what is known of its results is added."""
    with within(f"[measure.{name}]"):
        options = dict(table)
        probe, snapshot = str(options.pop("probe", name)), str(options.pop("snapshot", SNAPSHOTS[0]))
        preset, networks = str(options.pop("preset", "")), options.pop("networks", ())
        otherwise, others = options.pop("otherwise", {}), options.pop("with", ())
        wrong = isinstance(networks, str) or isinstance(others, str) or not isinstance(otherwise, Mapping)
        refuse(wrong, "networks and with must be lists of names, and otherwise a table of options")
        several = probe_class(probe).several if others else ""
        refuse(bool(others) and several not in JOINTLY, f"with: {probe} measures one network; drop it")
        require_known(snapshot, SNAPSHOTS, "snapshot") if not snapshot.startswith("epoch_") else None
        special = SPECIAL.get(probe, ())
        if probe not in ("metrics", "evaluate"):
            usual = {key: value for key, value in options.items() if key not in special}
            for of in (usual, merged(usual, otherwise)):
                known[name] = configure(probe, preset, of)
        elif probe == "evaluate":
            refuse("passes" not in options, "evaluate needs passes, such as passes = 1")
            network_tables.check_loading({key: value for key, value in options.items() if key not in special})
        else:
            refuse(bool(options), f"metrics are the trainer's own and have no options, got {', '.join(options)}")
        options |= {"preset": preset} if preset else {}
        return Measurement(probe, options, snapshot, tuple(networks), otherwise, tuple(others))


def _check_taken(expression: Expression, known: Mapping[str, Known], networks: Table | None = None) -> None:
    """Refuse headline numbers and quantities that no result of a measurement has."""
    with within(expression.text):
        for of, name, headline in expression.taken:
            if of in known and of not in (networks or {}):
                known[of].check(of, name, headline=headline)


def _claim(table: Table, study: StudyFile, known: Mapping[str, Known]) -> Claim:
    with within(f"claim {table.get('name', '') if isinstance(table, Mapping) else ''}".strip()):
        given = checked(table, "claim")
        for key in ("name", "value", "sign"):
            refuse(key not in given, f"{key} is missing")
        refuse(given["sign"] not in SIGNS, f"sign must be positive or negative, got {given['sign']}")
        expression = Expression(given["value"], study.networks)
        needs: dict[Cell, None] = {}
        for network, key in expression.chains:
            with within(expression.text):
                needs |= dict.fromkeys(study.needs(network, key))
        _check_taken(expression, known, study.networks)
        _check_pairs((name for name, _ in expression.chains), study.networks)

        def compute(results: Results) -> float:
            return expression.value({name: study.scope(name, results) for name, _ in expression.chains})

        return Claim(
            given["name"], given.get("statement", given["name"]), given.get("source", ""),
            given.get("number", given["value"]), SIGNS[given["sign"]], tuple(needs), compute,
            given.get("published", "figure only" if "source" in given else ""),
        )  # fmt: skip


def _comparison(table: Table, networks: Table, numbers: Table) -> tuple[Sequence[str], Sequence[str]]:
    with within("[[compare]]"):
        given = checked(table, "comparison")
        names = known_names(given.get("networks", list(networks)), networks, "networks")
        refuse(len(set(names)) != 2, f"networks must be two names, the second is subtracted; got {', '.join(names)}")
        for name in names:
            refuse(len(networks[name].seeds) < 2, f"{name} is a group of one; a comparison needs two seeds or files")
        _check_pairs(names, networks)
        of = known_names(given.get("numbers", list(numbers)), numbers, "numbers")
        refuse(not of, "there are no [numbers] to compare")
        return names, of


def _check_pairs(names: Iterable[str], networks: Mapping[str, Network]) -> None:
    """Refuse files that cannot be paired in the order of their names, such as where one is missing."""
    counts = {name: len(networks[name].files) for name in dict.fromkeys(names) if networks[name].files}
    said = " and ".join(f"{name} has {count}" for name, count in counts.items())
    refuse(len({*counts.values()}) > 1, f"files pair in the order of their names, but {said}; give as many of each")


def _diagrams(
    table: Table, networks: Mapping[str, Network], numbers: Table
) -> Iterator[tuple[str, Sequence[str], str]]:
    with within("[[diagrams]]"):
        given = checked(table, "diagram")
        over, known = given.get("over", []), [name for one in networks.values() for name in one.at]
        refuse(not given.get("number") or len(over) not in (1, 2), "it needs a number, and over of 1 or 2 arguments")
        known_names(over, dict.fromkeys(known), "over of the networks")
        for base in dict.fromkeys(one.base for one in networks.values() if {*over} <= one.at.keys()):
            rest = [name for one in networks.values() if one.base == base for name in one.at if name not in over]
            refuse(bool(rest), f"networks of {base} differ in {', '.join(dict.fromkeys(rest))} too; name it in over")
            for number in known_names(given["number"], numbers, "numbers"):
                yield number, over, base


def _correlations(table: Table, networks: Table, numbers: Table) -> Iterator[tuple[tuple[str, str], Sequence[str]]]:
    with within("[[correlations]]"):
        given = checked(table, "correlation")
        refuse(not given.get("x") or not given.get("y"), "x and y are missing: names of [numbers]")
        usual = [name for name, one in networks.items() if not one.full_batch]
        of = known_names(given.get("networks", usual), networks, "networks")
        why = "seeds of one are kept together, and files of one pattern are its seeds"
        refuse(len(set(of)) < FEWEST_NETWORKS, f"it needs {FEWEST_NETWORKS} networks, got {len(set(of))}; {why}")
        (x,) = known_names(given["x"], numbers, "numbers")
        for y in known_names(given["y"], numbers, "numbers"):
            yield (x, y), list(dict.fromkeys(of))
