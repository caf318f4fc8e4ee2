"""Define what a figure module offers (`FigureModule`), check it on loading, and describe its row in the table."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import xarray as xr

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.colors import BoundaryNorm as BoundaryNorm
    from matplotlib.colors import Normalize as Normalize
    from matplotlib.figure import Figure as Figure
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.patches import Patch as Patch

    from landscape.statistics.paired import Difference
else:
    Axes = BoundaryNorm = Figure = Line2D = Normalize = Patch = Any  # for modules that do not import matplotlib

Color = str | tuple[float, float, float]
Named = Literal["-", "--", "-.", ":", " "]
Line = Named | tuple[float, tuple[float, ...]]
Numbers = dict[str, float | str]  # headline numbers by name, or notes in words
Draw = Callable[..., Any]  # draws one result in axes, such as the function of a figure module


@dataclass(frozen=True)
class Look:
    """Name, colour, marker and line style of one result."""

    label: str
    color: Color = "#555555"
    marker: str = "o"
    line: Line = "-"

    @property
    def cues(self) -> dict[str, Any]:
        """Colour, marker and line style as arguments of matplotlib."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.line}

    def legend_handle(self) -> Line2D:
        from matplotlib.lines import Line2D

        return Line2D([], [], **self.cues, label=self.label)


class FigureModule(Protocol):
    """A module that draws one figure. `Selective`, `Noted` and `Comparing` are optional.

    The main figure of a probe imports matplotlib inside its functions: `landscape show` reads its notes only.
    """

    MEANING: str  # two sentences: what the numbers mean, and what they do not

    def draw(self, data: xr.Dataset, axes: Any, /) -> Any:
        """Draw one result and return the axes."""

    def page(self, results: Sequence[xr.Dataset], looks: Sequence[Look], /) -> Figure:
        """The whole figure, with all results."""


@runtime_checkable
class Selective(Protocol):
    """A figure module that draws only some of the results that hold its quantities."""

    def select(self, results: Sequence[xr.Dataset], /) -> list[int]:
        """Positions of the results to draw."""


@runtime_checkable
class Noted(Protocol):
    """The main figure module of a probe (named like it), with what its headline says besides numbers."""

    def notes(self, data: xr.Dataset, /) -> Mapping[str, str]:
        """What is not converged, not finite or only a bound, in words by name."""


@runtime_checkable
class Dated(Protocol):
    """The module of a study whose stored rows are of other results of the file, which may have changed since."""

    def outdated(self, data: xr.Dataset, stored: Sequence[tuple[str, xr.Dataset]], /) -> str:
        """That they have, in words; else ""."""


@runtime_checkable
class Comparing(Protocol):
    """A `Pairing` module of a probe whose results are compared sample by sample wherever they stand together."""

    def alike(self, results: Sequence[xr.Dataset], /) -> list[int]:
        """Positions of the results on the same samples, the first such set; empty where there is none."""


@runtime_checkable
class Pairing(Protocol):
    """The main figure module of a probe whose results hold more than one value per number."""

    def paired(self, data: xr.Dataset, other: xr.Dataset, /) -> Mapping[str, Difference]:
        """A result minus another one of the same samples, by the names of those numbers that are paired."""


@runtime_checkable
class Unpaired(Protocol):
    """Likewise, with what is said of a number that is not paired."""

    def unpaired(self, name: str, data: xr.Dataset, other: xr.Dataset, /) -> Difference | str:
        """The difference of two results, or why it is not paired, for that by the errors of both."""


@runtime_checkable
class Tabled(Protocol):
    """The main figure module of a probe whose command prints a table of its results."""

    def table(self, results: Sequence[xr.Dataset], /) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows by name of the column, and lines that stand below them."""


REQUIRED = ("MEANING", "draw", "page")
OPTIONAL = ("select", "notes", "against", "paired", "unpaired", "table")


@cache
def checked(module: ModuleType) -> FigureModule:
    """A figure module that has all it must have and misspells nothing.

    Raises:
        TypeError: naming the module and what is missing or misspelt.
    """
    missing = [name for name in REQUIRED if not hasattr(module, name)]
    if missing:
        raise TypeError(f"{module.__name__} lacks {', '.join(missing)}; a figure module defines {', '.join(REQUIRED)}")
    if not isinstance(module.MEANING, str):
        raise TypeError(f"{module.__name__}.MEANING is a {type(module.MEANING).__name__}, expected a str")
    for name, value in vars(module).items():
        if name in (*REQUIRED[1:], *OPTIONAL):
            if not callable(value):
                raise TypeError(f"{module.__name__}.{name} is a {type(value).__name__}, expected a function")
        elif getattr(value, "__module__", None) == module.__name__:
            near = difflib.get_close_matches(name, OPTIONAL, 1, cutoff=0.8)
            if near:
                raise TypeError(f"{module.__name__}.{name} looks like a misspelt {near[0]}; rename it")
    return cast(FigureModule, module)


@dataclass(frozen=True)
class LayerPlot:
    """A quantity per layer that the report's page draws by itself: under which title, in what units."""

    quantity: str
    title: str
    unit: str = ""
    logarithmic: bool = False
    bars: bool = False


@dataclass(frozen=True)
class FigureEntry:
    """A row of the table of figures; the module is imported on use."""

    name: str  # of the module and of the file that is drawn
    probe: str  # whose results it draws
    needs: tuple[str, ...]  # quantities that a result must hold; the first must have a finite value by now
    lacks: tuple[str, ...] = ()  # axes that a result must not have
    panels: tuple[str | None, ...] = (None,)  # projections of the axes that `draw` takes
    instead: str = ""  # a quantity that is drawn, and may have the finite value, where the first has none
    finite: int = 1  # how many of `needs`, from the first, must have a finite value
    seeds: bool = False  # whether a mean over seeds is drawn as a network is; else the first of each group
    live: str = ""  # the part of the report's page that draws it by itself, a row of `report.panels.PARTS`
    layers: tuple[LayerPlot, ...] = ()  # what that part draws, of results per layer
    api: int | None = None  # of another package's figure: the version of the interface, `plugins.API`
    module_name: str = ""  # likewise: the module of its entry point

    @cached_property
    def module(self) -> FigureModule:
        return checked(import_module(self.module_name or f"landscape.plots.figures.{self.name}"))

    def axes_in(self, figure: Any) -> Any:
        """New axes for `draw` in a figure or subfigure, at most three side by side; several as a tuple."""
        columns = min(len(self.panels), 3)
        rows = -(-len(self.panels) // columns)
        axes = tuple(figure.add_subplot(rows, columns, i + 1, projection=panel) for i, panel in enumerate(self.panels))
        return axes if len(axes) > 1 else axes[0]

    def drawable(self, data: xr.Dataset) -> bool:
        """Whether a result is complete enough to be drawn."""
        fits = all(name in data for name in self.needs) and not any(axis in data.variables for axis in self.lacks)
        drawn = (self.needs[0], *filter(data.__contains__, [self.instead]))
        others = self.needs[1 : self.finite]
        known = {name: np.isfinite(data.variables[name].values).any() for name in (*drawn, *others)} if fits else {}
        return fits and any(known[name] for name in drawn) and all(known[name] for name in others)

    def selected(self, results: Sequence[xr.Dataset]) -> list[xr.Dataset]:
        """The drawable results that belong in the figure."""
        drawable = [data for data in results if self.drawable(data)]
        if drawable and isinstance(module := self.module, Selective):
            return [drawable[i] for i in module.select(drawable)]
        return drawable
