"""Read the tables of a study's file with their keys checked, and make its networks from them."""

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from landscape.options import OptionError, alternatives, did_you_mean, require
from landscape.probe import Probe
from landscape.studies import edge_of_stability, merged, study
from landscape.studies.claims import FullBatch, Network

Table: TypeAlias = Mapping[str, Any]
KEYS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "the file": {
        "title": str, "about": str, "data": str, "data_root": str, "measure_all": bool, "train": dict, "networks": dict,
        "measure": dict, "numbers": dict, "claims": list, "compare": list, "correlations": list, "load": dict,
        "figures": list, "diagrams": list,
    },
    "network": {
        "model": str, "args": dict, "files": (str, list), "load": dict, "relative": dict, "full_batch": dict,
        "over": dict,
        "group": str, "measure": bool, "seeds": (int, list), "recipe": str, "epochs": int, "fraction": (int, float),
        "given": bool,
    },
    "relative": {"epochs": (int, float), "fraction": (int, float)},
    "claim": {
        "name": str, "statement": str, "source": str, "number": str, "value": str, "sign": (str, int), "published": str,
    },
    "comparison": {"networks": list, "numbers": list}, "diagram": {"number": (str, list), "over": list},
    "correlation": {"x": str, "y": (str, list), "networks": list},
}  # fmt: skip


def tables(table: Table, key: str) -> Iterator[tuple[str, Table]]:
    """The tables below a key, by name."""
    for name, one in table.get(key, {}).items():
        refuse(not isinstance(one, Mapping), f"{key}.{name} must be a table, got {one!r}")
        yield name, one


def checked(table: Any, what: str, also: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    """A table whose keys and types are those that it may have."""
    from landscape.data.recipes import TYPES

    refuse(not isinstance(table, Mapping), f"{what} must be a table, got {table!r}")
    kinds = KEYS[what]
    for key, value in table.items():
        if key not in also or key in kinds:
            require_known(key, [*kinds, *sorted(also - kinds.keys())])
            kind = kinds[key]
            of = (kind,) if isinstance(kind, type) else kind
            wrong = not isinstance(value, of) or (isinstance(value, bool) and bool not in of)
            expected = alternatives([TYPES[one] for one in of if one is not int or float not in of])
            refuse(wrong, f"{key} must be {expected}, got {value!r}")
    return dict(table)


def require_known(name: Any, names: Any, where: str = "") -> None:
    """Raise a ValueError with the nearest name unless there is one of that name."""
    near = did_you_mean(str(name), names)
    place = f"{where}: " if where else ""
    refuse(name not in names, f"{place}there is no {name}; expected one of {', '.join(names)}{near}")


def known_names(given: str | Sequence[Any], known: Any, where: str) -> list[str]:
    """One name or several, all of which are known; raises ValueError otherwise."""
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        require_known(name, known, where)
    return names


def refuse(wrong: bool, text: str) -> None:
    """Raise a ValueError where something is wrong."""
    if wrong:
        raise ValueError(text)


class InFile(ValueError):
    """An error at a place of a study's file, and so no usage error."""

    said = ""  # at that place, with options
    of_option = False
    step = ""  # that was carried out, in words


@contextmanager
def within(where: str, step: str = "") -> Iterator[None]:
    """Name the place in every error; options become the file's keys."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # raised by the system, about a file
            raise
        raised, inner = InFile(f"{where}: {with_keys(str(error))}"), error if isinstance(error, InFile) else None
        raised.said, raised.step = (inner.said, inner.step or step) if inner else (str(error), step)
        raised.of_option = inner.of_option if inner else isinstance(error, OptionError)
        raise raised from error


@contextmanager
def options_instead(options: Mapping[str, str]) -> Iterator[None]:
    """Raise errors of a study as a command does whose options make its file; `options`: their names by the file's keys.

    Raises:
        OptionError: an option has an invalid value.
        ValueError: something else is wrong.
    """
    try:
        yield
    except InFile as error:
        text = with_keys(error.said, options)
        if error.of_option:
            raise OptionError(text) from error
        raise ValueError(f"{error.step}: {text}" if error.step else text) from error


def with_keys(message: str, options: Mapping[str, str] = MappingProxyType({})) -> str:
    """A message with keys of the file for options, unless they are of a command that it names, or of studies alone.

    Those in `options` stay options, by these names.
    """
    command, studies = r"landscape [a-z][^;,()]*", "out|workers|scheduler|shard|debug"

    def word(at: re.Match[str]) -> str:
        key = (at[1] or "").replace("-", "_")
        return at[0].replace(at[1], options[key].replace("_", "-")) if key in options else key or at[0]

    return re.sub(rf"{command}|(?<![\w-])--(?!(?:{studies})\b)(?:no-)?([a-z][a-z-]*)", word, message)


NAME = r"\w[\w .+-]*"  # of a network


def networks_of(name: str, table: Table, defaults: Table, folder: Path) -> Iterator[Network]:
    """A network, or one per combination of values of the fields and the model's arguments in `over`."""
    usual = KEYS["network"].keys() | _recipe_fields()
    over = over_of(f"[networks.{name}]", table)
    for values in product(*over.values()):
        at = dict(zip(over, values, strict=True))
        own = merged(table, {key: value for key, value in at.items() if key in usual})
        own = merged(own, {"args": arguments} if (arguments := {k: v for k, v in at.items() if k not in usual}) else {})
        words = [name, *(re.sub(r"[^\w.+-]+", "-", study.in_words(value)) for value in values)]
        made = _network("-".join(words), {key: value for key, value in own.items() if key != "over"}, defaults, folder)
        at = {key: tuple(value) if isinstance(value, list) else value for key, value in at.items()}
        yield replace(made, base=name, at=at) if over else made


def training_of(file: Table) -> Table:
    """What the networks of a study have in common."""
    with within("[train]"):
        return checked(file.get("train", {}), "network", also=_recipe_fields())


def _recipe_fields() -> set[str]:
    from landscape.data.recipes import Recipe

    return {one.name for one in fields(Recipe)} - {"name"}


def _network(name: str, table: Table, defaults: Table, folder: Path) -> Network:
    from landscape import models
    from landscape.data import recipes
    from landscape.training.train import check_request

    own = _recipe_fields()
    with within(f"[networks.{name}]"):
        refuse(not re.fullmatch(NAME, name), "a name is made of letters, digits, spaces and . + - _")
        given = checked(table, "network", also=own)
        if files := given.get("files"):
            refuse("model" in given, "files are trained already; drop model, or files")
            found = sorted(Path(path) for one in ([files] if isinstance(files, str) else files)
                           for path in glob.glob(str(folder / str(one)), recursive=True))  # fmt: skip
            refuse(not found, f"no file matches {files}; a pattern is relative to the study's file")
            of_group = {
                "load": loading_of(given), "group": given.get("group", ""), "measured": given.get("measure", True),
            }  # fmt: skip
            return Network(name, files=tuple(found), seeds=tuple(range(len(found))), **of_group)
        how = {**defaults, **given}
        of = how.get("seeds", 3)
        seeds = tuple(range(of) if isinstance(of, int) else of)
        wrong = not seeds or len(set(seeds)) < len(seeds) or not all(isinstance(seed, int) for seed in seeds)
        refuse(wrong, f"seeds must be a number of seeds, or a list of different ones; got {of}")
        if "full_batch" in how:
            one = {key: tuple(value) if isinstance(value, list) else value for key, value in how["full_batch"].items()}
            names = [each.name for each in fields(FullBatch)]
            arguments = {key: value for key, value in one.items() if key not in names}
            of_name: Any = {key: value for key, value in one.items() if key in names}
            lacking = ", ".join(key for key in ("optimizer", "sharpness", "steps", "every") if key not in one)
            refuse(bool(lacking), f"full_batch lacks {lacking}")
            require_known(one["sharpness"], edge_of_stability.THRESHOLDS, "sharpness")
            return Network(name, seeds=seeds, full_batch=FullBatch(arguments=arguments, **of_name))
        refuse("model" not in how, "it has neither a model to train nor files")
        accepted = models.accepts(how["model"])
        for key in how.get("args", {}):
            require_known(key, accepted, f"args of {how['model']}")
        with within("relative"):
            relative = checked(how.get("relative", {}), "relative")
        overrides = {key: how[key] for key in how if key in own and key != "epochs"}
        recipe = how.get("recipe", recipes.default_recipe(how["model"]))
        epochs = how.get("epochs", recipes.RECIPES[recipe].epochs if recipe in recipes.RECIPES else 1)
        overrides = {"epochs": max(min(epochs, 1), round(epochs * relative.get("epochs", 1.0))), **overrides}
        fraction = float(f"{how.get('fraction', 1.0) * relative.get('fraction', 1.0):.6g}")  # 0.2 x 0.2 is 0.04
        check_request(how["model"], recipes.recipe(recipe, **overrides), fraction)
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in how.get("args", {}).items()}
        arguments = {key: None if value == "none" else value for key, value in given.items()}
        models.arguments_of(how["model"], arguments)  # fails for a value of another type
        return Network(
            name, how["model"], arguments, seeds=seeds, recipe=recipe, fraction=fraction, overrides=overrides,
            load=loading_of(how), group=how.get("group", ""), measured=how.get("measure", True),
        )  # fmt: skip


def given_networks(places: Sequence[str], table: Table, paths: Sequence[Path | None]) -> dict[str, Network]:
    """A network per checkpoint that the command names and place of the file; None is the newest."""
    from landscape.checkpoints.file_names import labels_of

    labels = labels_of([path for path in paths if path is not None]) if len(paths) > 1 else [""]
    made = [
        Network(f"{label} {place}".strip(), files=(path,), seeds=(0,), load=loading_of(table[place]), label=label)
        for path, label in zip(paths or [None], labels, strict=True) for place in places
    ]  # fmt: skip
    return {one.name: one for one in made}


def loading_of(table: Table) -> Table:
    """The options that a table loads networks with."""
    options = dict(table.get("load", {}))
    with within("load"):
        check_loading(options)
    return options


def check_loading(options: Table) -> None:
    """Raise a ValueError or FileNotFoundError for an unknown option of loading, or a wrong value; nothing is read."""
    from landscape.data import check_name, recipes
    from landscape.subject.losses import loss_of
    from landscape.subject.spec import Spec

    for name in options:
        require_known(name, [one.name for one in fields(Spec) if one.name != "checkpoint"])
    spec = Spec(**options)
    for value, check in ((spec.data, check_name), (spec.recipe, recipes.recipe), (spec.loss, loss_of)):
        if isinstance(value, str) and value and (check is not loss_of or ":" not in value):  # a user's is imported
            check(value)


def check_places(probe: Probe) -> None:
    """Raise a ValueError where an option of a probe names nothing that is there, or that a study might make in time."""
    for name, words in probe.places.items():
        known = alternatives([*words, "a path"])
        for part in filter(None, getattr(probe, name).split(",")):
            require(part in words or "/" in part or Path(part).exists(), name, part, f"{known} that exists")


def over_of(where: str, table: Table) -> Table:
    """The values of the names in `over`, each of which makes one more."""
    with within(where):
        over = table.get("over", {})
        refuse(not isinstance(over, Mapping) or not all(isinstance(of, list) and of for of in over.values()),
               "over must name options with lists of values, such as over = { mc_dropout = [1, 5] }")  # fmt: skip
        return dict(over)
