"""Draw the accuracy of linear probes over depth, per network."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import depth, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.results.reader import parameters_of

MEANING = (
    "How well a linear classifier tells the classes apart from the frozen features of each layer, fitted on the train "
    "split and scored on the test split; dotted is the network itself. It says what can be read from the average of a "
    "map, not what the network uses, and widths differ between layers."
)
CLASSIFIERS = {"ridge": "ridge regression", "lbfgs": "logistic regression"}


def draw(data: xr.Dataset, ax: Axes, *, look: Look, shade: bool = True) -> Axes:
    """Draw the accuracy of every layer's linear probe over normalised depth, beside the network's own with bands."""
    depth.over_depth(data, ax, "accuracy", look=look, shade=shade)
    ax.set(ylabel="accuracy of a linear probe")
    if not shade:
        return ax
    intact = float(data.attrs.get("intact_accuracy", np.nan))
    if np.isfinite(intact):
        ax.axhline(intact, color=theme.muted(), linestyle=":", linewidth=0.9)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per network on common axes; for several networks, one more with all of them."""
    fitted: dict[str, list[str]] = {}
    for data, look in zip(results, looks, strict=True):
        fitted.setdefault(CLASSIFIERS[parameters_of(data).get("solver", "ridge")], []).append(look.label)
    several = "; ".join(f"{name}: {', '.join(labels)}" for name, labels in fitted.items())
    text = several if len(fitted) > 1 else next(iter(fitted))
    note = f"Classifier: {text}. {depth.NOTE} Dotted: the network itself."
    return depth.page(results, looks, draw, note=note)


def notes(data: xr.Dataset) -> dict[str, str]:
    """How many classifiers are not converged."""
    unconverged = int((data["converged"].values == 0).sum()) if "converged" in data else 0
    return {"not converged": str(unconverged)} if unconverged else {}
