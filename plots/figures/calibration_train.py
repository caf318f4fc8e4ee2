"""Draw the error on test data against the NLL on training data (Park & Kim 2022, arXiv 2202.06709, Fig. C.2)."""

from collections.abc import Sequence
from dataclasses import replace

import xarray as xr

from landscape.plots import broken, style, theme
from landscape.plots.appearance import looks as looks_of
from landscape.plots.figure import Axes, Figure, Look
from landscape.results.protocols import stored

MEANING = (
    "Networks to the left fit their training data better, those further down generalise better: a network that is left "
    "of and above another one overfits in comparison. The training data are measured as the result says, so that "
    "with augmentation the NLL is that of augmented samples."
)


def draw(data: Sequence[xr.Dataset] | xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw one network as a point with its 95 % intervals; the data are its results on train and on test samples.

    A single result gives both coordinates.
    """
    train, test = (data, data) if isinstance(data, xr.Dataset) else (data[0], data[-1])
    point(train, test, ax, look)
    ax.set(xlabel="NLL on train (nats)", ylabel="error on test")
    return ax


def point(train: xr.Dataset, test: xr.Dataset, ax: Axes, look: Look, *, error: bool = True) -> None:
    """Draw the NLL of a result against the error, or accuracy, of another one, each with its 95 % interval."""
    nll, nll_low, nll_high = (float(train[f"nll{end}"]) for end in ("", "_low", "_high"))
    accuracy, low, high = (float(test[f"accuracy{end}"]) for end in ("", "_low", "_high"))
    shown = (1 - accuracy, 1 - high, 1 - low) if error else (accuracy, low, high)
    ax.errorbar(
        [nll], shown[:1], xerr=broken.bars(nll, nll_low, nll_high), yerr=broken.bars(*shown),
        color=look.color, marker=look.marker, linestyle="none", elinewidth=0.7,
    )  # fmt: skip


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel with a point per network."""
    found = pairs(results)
    tested = [results[test] for _, test in found]
    shown = looks_of(tested)
    both = [results[i] for pair in found for i in pair]
    named = [one for look in shown for one in (look, look)]
    figure = style.page(
        both, named, height=2.6, width=theme.panel_width(), legend=[replace(look, line=" ") for look in shown],
        caption=style.protocol(tested, shown), note="NLL: of the train split. Bars: 95 % intervals over samples.",
    )  # fmt: skip
    ax = figure.subplots()
    for (train, test), look in zip(found, shown, strict=True):
        draw([results[train], results[test]], ax, look=look)
    return figure


def select(results: Sequence[xr.Dataset]) -> list[int]:
    """Positions of the results of checkpoints that are measured on the train and on the test split."""
    return sorted(i for pair in pairs(results) for i in pair)


def pairs(results: Sequence[xr.Dataset]) -> list[tuple[int, int]]:
    """Positions of the results of each checkpoint on the train and on the test split, the newest of each."""
    found: dict[tuple[str, str, str], dict[str, int]] = {}
    for i, data in enumerate(results):
        names = ("label", "checkpoint_sha256", "data")
        label, digest, source = (str(data.attrs.get(name, "")) for name in names)
        found.setdefault((label, digest, source), {})[str(stored(data, "spec").get("split", ""))] = i
    return [(splits["train"], splits["test"]) for splits in found.values() if {"train", "test"} <= splits.keys()]
