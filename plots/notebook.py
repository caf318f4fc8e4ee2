"""The figure that is drawn: it shows itself in a notebook, and is saved with editable text wherever it is saved."""

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from landscape.plots.theme import RC

SAVED: dict[Any, Any] = {name: RC[name] for name in ("pdf.fonttype", "ps.fonttype", "svg.fonttype", "svg.hashsalt")}
SHOWN_DPI = 150  # of a figure in a notebook


class Page(Figure):
    """A figure of matplotlib in the style that it was made in."""

    caption = ""  # also where the figure does not show it

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save the figure with TrueType fonts; arguments as of matplotlib."""
        with matplotlib.rc_context(SAVED):
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=SHOWN_DPI)
        return stream.getvalue()
