"""Show in the gallery the pages that `landscape.plots` returns: figures that pyplot does not manage."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from matplotlib import pyplot
from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

_shown: WeakSet[Figure] = WeakSet()


def pages(block: Any, variables: dict[str, Any], configuration: dict[str, Any]) -> str:
    """Save the new figures among the variables of an example; returns what places them on its page."""
    managed = [pyplot.figure(number) for number in pyplot.get_fignums()]
    saved = []
    for figure in variables["example_globals"].values():
        if isinstance(figure, Figure) and figure not in _shown and figure not in managed:
            path = next(variables["image_path_iterator"])
            figure.savefig(path, dpi=150)
            _shown.add(figure)
            saved.append(path)
    return str(figure_rst(saved, configuration["src_dir"]))
