"""Draw the norm of the gradient of every weight tensor."""

from landscape.plots import style
from landscape.plots.figure import FigureEntry
from landscape.statistics.stored import half_width

ENTRY = FigureEntry("gradient_norm", "gradient-norm", needs=("norm", "norm_se"), api=1)
MEANING = "How much the loss asks of every weight tensor. Large is not bad: it depends on the size of the weights."


def draw(data, axes, *, look):
    """One network."""
    at = data["tensor"].values
    axes.errorbar(at, data["norm"].values, half_width(data, "norm"), color=look.color, marker=look.marker, linestyle="")
    axes.set(xlabel="weight tensor", ylabel="norm of the gradient", yscale="log")
    return axes


def page(results, looks):
    """All networks, with their legend, their protocol and what the bars are."""
    note = "Bars: 95 % intervals over mini-batches."
    figure = style.page(results, looks, height=2.0, legend=looks, note=note)
    axes = figure.subplots()
    for data, look in zip(results, looks, strict=True):
        draw(data, axes, look=look)
    return figure
