"""Define what a figure module offers (`FigureModule`), check it on loading, and describe its row in the table."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import xarray as xr

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.colors import BoundaryNorm as BoundaryNorm
    from matplotlib.colors import Normalize as Normalize
    from matplotlib.figure import Figure as Figure
    from matplotlib.lines import Line2D as Line2D
    from matplotlib.patches import Patch as Patch
else:
    Axes = BoundaryNorm = Figure = Line2D = Normalize = Patch = Any  # at run time, when nothing imports matplotlib

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
    """A module that draws one figure; it may define functions of `OPTIONAL` too.

    It imports matplotlib inside its functions: `landscape show` and reports without pictures read its words only.
    """

    MEANING: str  # two sentences: what the numbers mean, and what they do not

    def draw(self, data: xr.Dataset, axes: Any, /) -> Any:
        """Draw one result and return the axes."""

    def page(self, results: Sequence[xr.Dataset], looks: Sequence[Look], /) -> Figure:
        """The whole figure, with all results."""


REQUIRED = ("MEANING", "draw", "page")
# Functions that a module may define besides; others than the figure ask the main module of a probe, named like it.
OPTIONAL: Mapping[str, str] = {
    "select": "(results): positions of the results to draw, where these are not all that hold its quantities",
    "notes": "(data): what is not converged, not finite or only a bound, in words by name, beside the headline numbers",
    "alike": "(results): positions of the first set on equal samples, which are compared wherever they are drawn",
    "paired": "(data, other): the difference on the same samples, by the names of those numbers that are paired",
    "unpaired": "(name, data, other): the difference of a number that is not paired, or why it is not, in words",
    "table": "(results): rows by name of the column and lines below them, which the probe's command prints",
    "outdated": "(data, stored): of a study, in words, that results its rows are of have changed since; else empty",
}


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
        select = getattr(self.module, "select", None) if drawable else None  # importing takes time
        return [drawable[i] for i in select(drawable)] if select else drawable
