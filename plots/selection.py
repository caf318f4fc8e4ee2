"""Choose which results are drawn: checkpoints by label and in an order, under other names and in other colours."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import xarray as xr

from landscape.options import invalid, require
from landscape.plots.appearance import label_of, looks
from landscape.plots.figure import Look
from landscape.results import reader

Stored = Sequence[tuple[str, xr.Dataset]]
Data = Path | str | xr.Dataset | xr.DataTree | Sequence[xr.Dataset]


@dataclass(frozen=True)
class Selection:
    """What to draw of a results file: `only` and `colors` name labels as stored, `*` stands for anything."""

    only: tuple[str, ...] = ()  # labels, in the order in which they are drawn; empty: all
    labels: Mapping[str, str] = field(default_factory=dict)  # stored label: what is written instead
    colors: Mapping[str, str] = field(default_factory=dict)  # label, stored or written: colour

    def of(self, stored: Stored) -> list[tuple[str, xr.Dataset]]:
        """The chosen results under their names. Raises OptionError: no checkpoint has a label that is asked for."""
        known = list(dict.fromkeys(label_of(data) for _, data in stored))
        unwritten = [label for label in self.colors if label not in self.labels.values()]
        for option, patterns in (("only", self.only), ("label", self.labels), ("color", unwritten)):
            for pattern in patterns:
                if known and not any(_matches(label, pattern) for label in known):
                    raise invalid(option, pattern, f"a label of the file, such as {', '.join(known[:9])}")
        found = list(stored)
        if self.only:
            chosen = [label for pattern in self.only for label in known if _matches(label, pattern)]
            order = {label: place for place, label in reversed(list(enumerate(chosen)))}
            found = [item for item in found if label_of(item[1]) in order]
            found.sort(key=lambda item: order[label_of(item[1])])
        return [(name, self._renamed(data)) for name, data in found]

    def looks(self, results: Sequence[xr.Dataset], among: Sequence[xr.Dataset]) -> list[Look]:
        """The looks of results, in the colours that are asked for."""
        written = {self.labels.get(label, label): color for label, color in self.colors.items()}
        found = looks(results, among=among)
        chosen = [next((c for label, c in written.items() if _matches(label_of(data), label)), "") for data in results]
        return [replace(look, color=color) if color else look for look, color in zip(found, chosen, strict=True)]

    def _renamed(self, data: xr.Dataset) -> xr.Dataset:
        label = label_of(data)
        if label not in self.labels:
            return data
        renamed = data.assign_attrs(label=self.labels[label])
        renamed.encoding = data.encoding
        return renamed


@contextmanager
def results_of(data: Data) -> Iterator[list[tuple[str, xr.Dataset]]]:
    """Results of any form of data, by probe and label; checkpoints in the order of every figure. A file is streamed."""
    if isinstance(data, Path | str):
        with reader.streaming(data) as stored:
            yield reader.by_checkpoint(stored)
        return
    tree = isinstance(data, xr.DataTree)
    found = [node.to_dataset() for node in data.leaves] if isinstance(data, xr.DataTree) else data
    wrong = next((one for one in ([found] if not isinstance(found, Sequence) else found)
                  if not isinstance(one, xr.Dataset)), None)  # fmt: skip
    if wrong is not None:
        raise TypeError(f"expected results files, or results of landscape.measure, got a {type(wrong).__name__}")
    every = [found] if isinstance(found, xr.Dataset) else [one for one in found if not tree or one.data_vars]
    named = [(f"{one.attrs.get('probe', '')}/{label_of(one)}", one) for one in every]
    yield reader.by_checkpoint(named) if tree else named


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Parse `LABEL=VALUE` texts of an option; the last `=` counts.

    Raises:
        OptionError: one has no `=`, or nothing beside it.
    """
    found = {}
    for text in given:
        name, separator, value = text.rpartition("=")
        if not (separator and name and value):
            raise invalid(option, repr(text), "LABEL=VALUE, with the label that landscape show lists")
        found[name] = value
    return found


def colours(given: Sequence[str]) -> dict[str, str]:
    """Parse `LABEL=COLOR` texts. Raises OptionError: one is no pair, or its colour has no such name."""
    from matplotlib.colors import is_color_like

    found = pairs("color", given)
    for color in found.values():
        require(is_color_like(color), "color", color, "LABEL=COLOR with a colour such as tab:red or #1F77B4")
    return found


def _matches(label: str, pattern: str) -> bool:
    return label == pattern or fnmatchcase(label, re.sub(r"([\[\]])", r"[\1]", pattern))
