"""Choose how figures look: settings for paper, screens and dark pages, the width in columns, ink and background."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from landscape.options import one_of

COLUMN, PAGE = 3.25, 6.75  # inches: one column of a paper, both columns
HIGHEST = 7.0  # inches of a figure of a paper
RC: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "lines.linewidth": 1.2, "lines.markersize": 3.5, "axes.spines.top": False, "axes.spines.right": False,
    "figure.dpi": 100, "savefig.dpi": 200, "grid.color": "0.9", "hatch.linewidth": 0.5,
    "pdf.fonttype": 42, "ps.fonttype": 42,  # TrueType, which publishers ask for
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "landscape",  # equal figures are equal files
}  # fmt: skip
_INK, _GROUND = "0.92", "#16181d"
STYLES: Mapping[str, dict[Any, Any]] = {
    "screen": {},
    "paper": {"savefig.dpi": 300},  # which publishers ask for
    "dark": {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), _GROUND),
        "legend.facecolor": _GROUND, "grid.color": "0.25", "patch.edgecolor": _INK, "hatch.color": _INK,
    },
}  # fmt: skip
CAPTIONS = ("text", "none", "tex")  # the caption: below the figure, left out, or in a LaTeX file of its own


@dataclass(frozen=True)
class Theme:
    """How figures are drawn: a style of `STYLES`, the width in columns of a paper (0: each figure's own), a title."""

    style: str = "screen"
    columns: int = 0
    title: str = ""
    caption: str = "text"  # one of CAPTIONS

    def __post_init__(self) -> None:
        one_of("style", self.style, STYLES)
        one_of("columns", str(self.columns), ("0", "1", "2"))
        one_of("caption", self.caption, CAPTIONS)


SCREEN = Theme()
_theme: ContextVar[Theme] = ContextVar("theme", default=SCREEN)


@contextlib.contextmanager
def applied(theme: Theme) -> Iterator[None]:
    """Draw in a theme."""
    import matplotlib

    token = _theme.set(theme)
    try:
        with matplotlib.rc_context({**RC, **STYLES[theme.style]}):
            yield
    finally:
        _theme.reset(token)


def page_width() -> float:
    """The width of a figure in inches."""
    return COLUMN if narrow() else PAGE


def panel_width(preferred: float = COLUMN) -> float:
    """The width in inches of a figure that does not need a whole page: the preferred one where none was asked for."""
    return page_width() if _theme.get().columns else preferred


def narrow() -> bool:
    """Whether figures are one column wide."""
    return _theme.get().columns == 1


def title() -> str:
    """The title above the figure."""
    return _theme.get().title


def captioned() -> str:
    """Where the caption stands, one of CAPTIONS."""
    return _theme.get().caption


def dark() -> bool:
    """Whether axes have a dark background, that of the style or one the user set."""
    if "matplotlib" not in sys.modules:  # as when a report is written, which has no figures
        return False
    import matplotlib
    from matplotlib.colors import to_rgb

    ground = matplotlib.rcParams["axes.facecolor"]
    return sum(to_rgb(ground)) < 1.5


def ink() -> str:
    """The colour of text and axes."""
    import matplotlib

    return str(matplotlib.rcParams["text.color"])


def ground() -> str:
    """The background of axes."""
    import matplotlib

    return str(matplotlib.rcParams["axes.facecolor"])


def muted() -> str:
    """The colour of captions and of lines beside the data."""
    return "0.72" if dark() else "0.35"


def missing() -> str:
    """The colour of cells without a value."""
    return "0.3" if dark() else "0.88"
