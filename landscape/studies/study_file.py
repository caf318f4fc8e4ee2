"""Read the file of a study and check it whole: networks, measurements, numbers, claims, comparisons.

The file is TOML, see `docs/studies.md`. Its tables become the objects of `claims` and expressions; nothing runs here.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from landscape.options import did_you_mean
from landscape.results.declared_size import toml_of
from landscape.statistics.rank_correlation import FEWEST
from landscape.studies import merged
from landscape.studies.claims import Claim, FullBatch, Measurement, Network
from landscape.studies.edge_of_stability import SERIES
from landscape.studies.expressions import Expression, Known
from landscape.studies.study import Cell, Results

Table: TypeAlias = Mapping[str, Any]
Configure: TypeAlias = Callable[[str, str, dict[str, Any]], Known]  # checks a probe's preset and options
SIGNS: Mapping[Any, Any] = {"positive": 1, "negative": -1, 1: 1, -1: -1}
NAME = r"\w[\w .+-]*"  # of a network
SNAPSHOTS = ("final.pt", "warmup.pt", "init.pt", "final_ema.pt")
SPECIAL = {"metrics": (), "evaluate": ("passes",), "stream": ("moving",)}  # options that are no probe's
KEYS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "the file": {
        "title": str, "about": str, "data": str, "data_root": str, "measure_all": bool, "train": dict, "networks": dict,
        "measure": dict, "numbers": dict, "claims": list, "compare": list, "correlations": list, "load": dict,
    },
    "network": {
        "model": str, "args": dict, "files": (str, list), "load": dict, "relative": dict, "full_batch": dict,
        "group": str, "seeds": (int, list), "recipe": str, "epochs": int, "fraction": (int, float), "given": bool,
    },
    "relative": {"epochs": (int, float), "fraction": (int, float)},
    "claim": {
        "name": str, "statement": str, "source": str, "number": str, "value": str, "sign": (str, int), "published": str,
    },
    "comparison": {"networks": list, "numbers": list}, "correlation": {"x": str, "y": (str, list), "networks": list},
}  # fmt: skip


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

    @property
    def seeds(self) -> list[int]:
        """The seeds of all networks."""
        return sorted({seed for one in self.networks.values() for seed in one.seeds})

    def cells(self, claims: Sequence[Claim]) -> list[Cell]:
        """What is measured for some claims, in order."""
        needs = [need for one in claims for need in one.needs]
        if self.measure_all:
            needs += [
                (name, key) for key, how in self.measurements.items() for name, one in self.networks.items()
                if not one.full_batch and name in (how.networks or self.networks)
            ]  # fmt: skip
            needs += [(name, SERIES) for name, one in self.networks.items() if one.full_batch]
        return list(dict.fromkeys(needs))

    def scope(self, network: str, results: Results) -> dict[str, Any]:
        """What the names in an expression over one network mean: its results and its numbers."""
        return _Scope({key: data for (name, key), data in results.items() if name == network}, self.numbers)

    def needs(self, network: str, key: str) -> Iterator[Cell]:
        """The cells behind a name of a network: a measurement of it, or those of a number."""
        if key in self.numbers:
            for base, _ in self.numbers[key].chains:
                yield from self.needs(network, base)
            return
        known = [SERIES] if self.networks[network].full_batch else [*self.measurements, *self.numbers]
        _known(key, known, f"of {network}")
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
    with _within(str(source)):
        return _study({"title": source.stem} | merged(toml_of(source), changes or {}), source.parent, configure, given)


def _study(table: Table, folder: Path, configure: Configure, given: Sequence[Path | None]) -> StudyFile:
    checked = _checked(table, "the file")
    defaults, data = checked.get("train", {}), checked.get("data", "")
    known: dict[str, Known] = {}
    every = [pair for of, one in _tables(checked, "measure") for pair in _over(of, one)]
    measurements = {name: _measurement(name, one, configure, known) for name, one in every}
    places = [name for name, one in _tables(checked, "networks") if one.get("given")]
    _refuse(bool(given) and not places, f"it names its networks, got {len(given)} checkpoints; drop them")
    networks = {name: _network(name, one, defaults, folder)
                for name, one in _tables(checked, "networks") if name not in places}  # fmt: skip
    networks |= _given(places, checked.get("networks", {}), given)
    _refuse(not networks, "it has no networks; write a table such as [networks.sgd]")
    without = not data and any(one.model or one.full_batch for one in networks.values())
    _refuse(without, "data is missing, such as data = 'digits'")
    for name, how in measurements.items():
        for network in how.networks:
            _known(network, networks, f"[measure.{name}] networks")
    numbers: dict[str, Expression] = {}
    for name, text in checked.get("numbers", {}).items():
        with _within(f"[numbers] {name}"):
            _refuse(name in measurements, "a measurement has this name too; give another one")
            numbers[name] = Expression(str(text), (*measurements, *numbers))
            _check_taken(numbers[name], known)
    root = Path(checked["data_root"]) if checked.get("data_root") else None
    made = StudyFile(
        checked.get("title", "A study"), checked.get("about", ""), data, root, defaults, networks, measurements,
        numbers, (), tuple(_comparison(one, networks, numbers) for one in checked.get("compare", ())),
        tuple(pair for one in checked.get("correlations", ()) for pair in _correlations(one, networks, numbers)),
        checked.get("measure_all", True), _loading(checked),
    )  # fmt: skip
    claims = tuple(_claim(one, made, known) for one in checked.get("claims", ()))
    names = [one.name for one in claims]
    _refuse(len(set(names)) < len(names), f"two claims are named {next((n for n in names if names.count(n) > 1), '')}")
    return StudyFile(**{**vars(made), "claims": claims})


def _network(name: str, table: Table, defaults: Table, folder: Path) -> Network:
    from landscape import models
    from landscape.data import recipes

    own = {one.name for one in fields(recipes.Recipe)} - {"name"}
    with _within(f"[networks.{name}]"):
        _refuse(not re.fullmatch(NAME, name), "a name is made of letters, digits, spaces and . + - _")
        given = _checked(table, "network", also=own)
        if files := given.get("files"):
            _refuse("model" in given, "files are trained already; drop model, or files")
            found = sorted(Path(path) for one in ([files] if isinstance(files, str) else files)
                           for path in glob.glob(str(folder / str(one)), recursive=True))  # fmt: skip
            _refuse(not found, f"no file matches {files}; a pattern is relative to the study's file")
            of_group = {"load": _loading(given), "group": given.get("group", "")}
            return Network(name, files=tuple(found), seeds=tuple(range(len(found))), **of_group)
        how = {**_checked(defaults, "network", also=own), **given}
        seeds = how.get("seeds", 3)
        seeds = tuple(range(seeds) if isinstance(seeds, int) else map(int, seeds))
        _refuse(not seeds or len(set(seeds)) < len(seeds), "seeds must be a number of seeds, or different seeds")
        if "full_batch" in how:
            one = {key: tuple(value) if isinstance(value, list) else value for key, value in how["full_batch"].items()}
            names = [each.name for each in fields(FullBatch)]
            arguments = {key: value for key, value in one.items() if key not in names}
            of_name: Any = {key: value for key, value in one.items() if key in names}
            return Network(name, seeds=seeds, full_batch=FullBatch(arguments=arguments, **of_name))
        _refuse("model" not in how, "it has neither a model to train nor files")
        accepted = models.accepts(how["model"])
        for key in how.get("args", {}):
            _known(key, accepted, f"args of {how['model']}")
        relative = _checked(how.get("relative", {}), "relative")
        overrides = {key: how[key] for key in how if key in own and key != "epochs"}
        recipe = how.get("recipe", recipes.default_recipe(how["model"]))
        epochs = how.get("epochs", recipes.RECIPES[recipe].epochs if recipe in recipes.RECIPES else 1)
        overrides = {"epochs": max(1, round(epochs * relative.get("epochs", 1.0))), **overrides}
        recipes.recipe(recipe, **overrides)
        fraction = float(f"{how.get('fraction', 1.0) * relative.get('fraction', 1.0):.6g}")  # 0.2 x 0.2 is 0.04
        arguments = {key: None if value == "none" else value for key, value in how.get("args", {}).items()}
        return Network(
            name, how["model"], arguments, seeds=seeds, recipe=recipe, fraction=fraction, overrides=overrides,
            group=how.get("group", ""),
        )  # fmt: skip


def _given(places: Sequence[str], table: Table, paths: Sequence[Path | None]) -> dict[str, Network]:
    """A network per checkpoint that the command names and place of the file; None is the newest."""
    from landscape.checkpoints.file_names import labels_of

    labels = labels_of([path for path in paths if path is not None]) if len(paths) > 1 else [""]
    made = [
        Network(f"{label} {place}".strip(), files=(path,), seeds=(0,), load=_loading(table[place]), label=label)
        for path, label in zip(paths or [None], labels, strict=True) for place in places
    ]  # fmt: skip
    return {one.name: one for one in made}


def _loading(table: Table) -> Table:
    """The options that a table loads networks with."""
    from landscape.subject.spec import Spec

    for name in table.get("load", {}):
        _known(name, [one.name for one in fields(Spec) if one.name != "checkpoint"], "load")
    return dict(table.get("load", {}))


def _over(name: str, table: Table) -> Iterator[tuple[str, Table]]:
    """A measurement, or one per value of the options in `over`, each with the value in its name."""
    with _within(f"[measure.{name}]"):
        own = {key: value for key, value in table.items() if key != "over"}
        over = table.get("over", {})
        _refuse(not isinstance(over, Mapping) or not all(isinstance(of, list) and of for of in over.values()),
                "over must name options with lists of values, such as over = { mc_dropout = [1, 5] }")  # fmt: skip
        for values in product(*over.values()):
            yield " ".join([name, *map(str, values)]), {"probe": name, **own, **dict(zip(over, values, strict=True))}


def _measurement(name: str, table: Table, configure: Configure, known: dict[str, Known]) -> Measurement:
    """A measurement; what is known of its results is added."""
    with _within(f"[measure.{name}]"):
        options = dict(table)
        probe, snapshot = str(options.pop("probe", name)), str(options.pop("snapshot", SNAPSHOTS[0]))
        preset, networks = str(options.pop("preset", "")), options.pop("networks", ())
        otherwise = options.pop("otherwise", {})
        wrong = isinstance(networks, str) or not isinstance(otherwise, Mapping)
        _refuse(wrong, "networks must be a list of names, and otherwise a table of options")
        _known(snapshot, SNAPSHOTS, "snapshot") if not snapshot.startswith("epoch_") else None
        special = SPECIAL.get(probe, ())
        if probe not in ("metrics", "evaluate"):
            usual = {key: value for key, value in options.items() if key not in special}
            known[name] = configure(probe, preset, merged(usual, otherwise))
        _refuse(probe == "evaluate" and "passes" not in options, "evaluate needs passes, such as passes = 1")
        options |= {"preset": preset} if preset else {}
        return Measurement(probe, options, snapshot, tuple(networks), otherwise)


def _check_taken(expression: Expression, known: Mapping[str, Known], networks: Table | None = None) -> None:
    """Refuse headline numbers and quantities that no result of a measurement has."""
    with _within(expression.text):
        for of, name, headline in expression.taken:
            if of in known and of not in (networks or {}):
                known[of].check(of, name, headline=headline)


def _claim(table: Table, study: StudyFile, known: Mapping[str, Known]) -> Claim:
    with _within(f"claim {table.get('name', '') if isinstance(table, Mapping) else ''}".strip()):
        given = _checked(table, "claim")
        for key in ("name", "value", "sign"):
            _refuse(key not in given, f"{key} is missing")
        _refuse(given["sign"] not in SIGNS, f"sign must be positive or negative, got {given['sign']}")
        expression = Expression(given["value"], study.networks)
        needs: dict[Cell, None] = {}
        for network, key in expression.chains:
            with _within(expression.text):
                needs |= dict.fromkeys(study.needs(network, key))
        _check_taken(expression, known, study.networks)

        def compute(results: Results) -> float:
            return expression.value({name: study.scope(name, results) for name, _ in expression.chains})

        return Claim(
            given["name"], given.get("statement", given["name"]), given.get("source", ""),
            given.get("number", given["value"]), SIGNS[given["sign"]], tuple(needs), compute,
            given.get("published", "figure only" if "source" in given else ""),
        )  # fmt: skip


def _comparison(table: Table, networks: Table, numbers: Table) -> tuple[Sequence[str], Sequence[str]]:
    with _within("[[compare]]"):
        given = _checked(table, "comparison")
        names, of = given.get("networks", list(networks)), given.get("numbers", list(numbers))
        said = f"networks must be two names, the second is subtracted; got {', '.join(map(str, names))}"
        _refuse(len(set(names)) != 2, said)
        for name in names:
            _known(name, networks, "networks")
            _refuse(len(networks[name].seeds) < 2, f"{name} is a group of one; a comparison needs two seeds or files")
        for name in of:
            _known(name, numbers, "numbers")
        _refuse(not of, "there are no [numbers] to compare")
        return names, of


def _correlations(table: Table, networks: Table, numbers: Table) -> Iterator[tuple[tuple[str, str], Sequence[str]]]:
    with _within("[[correlations]]"):
        given = _checked(table, "correlation")
        _refuse(not given.get("x") or not given.get("y"), "x and y are missing: names of [numbers]")
        of = given.get("networks", [name for name, one in networks.items() if not one.full_batch])
        for name in of:
            _known(name, networks, "networks")
        why = "seeds of one are kept together, and files of one pattern are its seeds"
        _refuse(len(set(of)) < FEWEST, f"it needs {FEWEST} networks, got {len(set(of))}; {why}")
        for y in [given["y"]] if isinstance(given["y"], str) else given["y"]:
            for name in (given["x"], y):
                _known(name, numbers, "numbers")
            yield (given["x"], y), list(dict.fromkeys(of))


def _tables(table: Table, key: str) -> Iterator[tuple[str, Table]]:
    for name, one in table.get(key, {}).items():
        _refuse(not isinstance(one, Mapping), f"{key}.{name} must be a table, got {one!r}")
        yield name, one


def _checked(table: Any, what: str, also: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    """A table whose keys and types are those that it may have."""
    _refuse(not isinstance(table, Mapping), f"{what} must be a table, got {table!r}")
    kinds = KEYS[what]
    for key, value in table.items():
        if key not in also or key in kinds:
            _known(key, [*kinds, *sorted(also)], what)
            wrong = not isinstance(value, kinds[key]) or (isinstance(value, bool) and kinds[key] is not bool)
            _refuse(wrong, f"{key} has another type than it should, got {value!r}")
    return dict(table)


def _known(name: Any, known: Any, where: str) -> None:
    near = did_you_mean(str(name), known)
    _refuse(name not in known, f"{where}: there is no {name}; expected one of {', '.join(known)}{near}")


def _refuse(wrong: bool, text: str) -> None:
    if wrong:
        raise ValueError(text)


@contextmanager
def _within(where: str) -> Iterator[None]:
    """Name the place in every error, which is one of the file and so no usage error."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
