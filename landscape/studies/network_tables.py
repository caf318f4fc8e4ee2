"""Make the networks of a study from their tables."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from landscape.studies import merged, study
from landscape.studies.claims import FullBatch, Network
from landscape.studies.study_tables import KEYS, Table, checked, refuse, require_known, within

NAME = r"\w[\w .+-]*"  # of a network


def networks_of(name: str, table: Table, defaults: Table, folder: Path) -> Iterator[Network]:
    """A network, or one per combination of values of the fields and the model's arguments in `over`."""
    from landscape.data.recipes import Recipe

    usual = {*KEYS["network"], *(one.name for one in fields(Recipe))}
    over = over_of(f"[networks.{name}]", table)
    for values in product(*over.values()):
        at = dict(zip(over, values, strict=True))
        own = merged(table, {key: value for key, value in at.items() if key in usual})
        own = merged(own, {"args": arguments} if (arguments := {k: v for k, v in at.items() if k not in usual}) else {})
        words = [name, *(re.sub(r"[^\w.+-]+", "-", study.in_words(value)) for value in values)]
        made = _network("-".join(words), {key: value for key, value in own.items() if key != "over"}, defaults, folder)
        at = {key: tuple(value) if isinstance(value, list) else value for key, value in at.items()}
        yield replace(made, base=name, at=at) if over else made


def _network(name: str, table: Table, defaults: Table, folder: Path) -> Network:
    from landscape import models
    from landscape.data import recipes

    own = {one.name for one in fields(recipes.Recipe)} - {"name"}
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
        how = {**checked(defaults, "network", also=own), **given}
        seeds = how.get("seeds", 3)
        seeds = tuple(range(seeds) if isinstance(seeds, int) else map(int, seeds))
        refuse(not seeds or len(set(seeds)) < len(seeds), "seeds must be a number of seeds, or different seeds")
        if "full_batch" in how:
            one = {key: tuple(value) if isinstance(value, list) else value for key, value in how["full_batch"].items()}
            names = [each.name for each in fields(FullBatch)]
            arguments = {key: value for key, value in one.items() if key not in names}
            of_name: Any = {key: value for key, value in one.items() if key in names}
            return Network(name, seeds=seeds, full_batch=FullBatch(arguments=arguments, **of_name))
        refuse("model" not in how, "it has neither a model to train nor files")
        accepted = models.accepts(how["model"])
        for key in how.get("args", {}):
            require_known(key, accepted, f"args of {how['model']}")
        relative = checked(how.get("relative", {}), "relative")
        overrides = {key: how[key] for key in how if key in own and key != "epochs"}
        recipe = how.get("recipe", recipes.default_recipe(how["model"]))
        epochs = how.get("epochs", recipes.RECIPES[recipe].epochs if recipe in recipes.RECIPES else 1)
        overrides = {"epochs": max(min(epochs, 1), round(epochs * relative.get("epochs", 1.0))), **overrides}
        recipes.recipe(recipe, **overrides)
        fraction = float(f"{how.get('fraction', 1.0) * relative.get('fraction', 1.0):.6g}")  # 0.2 x 0.2 is 0.04
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in how.get("args", {}).items()}
        arguments = {key: None if value == "none" else value for key, value in given.items()}
        return Network(
            name, how["model"], arguments, seeds=seeds, recipe=recipe, fraction=fraction, overrides=overrides,
            group=how.get("group", ""), measured=how.get("measure", True),
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
    from landscape.subject.spec import Spec

    for name in table.get("load", {}):
        require_known(name, [one.name for one in fields(Spec) if one.name != "checkpoint"], "load")
    return dict(table.get("load", {}))


def over_of(where: str, table: Table) -> Table:
    """The values of the names in `over`, each of which makes one more."""
    with within(where):
        over = table.get("over", {})
        refuse(not isinstance(over, Mapping) or not all(isinstance(of, list) and of for of in over.values()),
               "over must name options with lists of values, such as over = { mc_dropout = [1, 5] }")  # fmt: skip
        return dict(over)
