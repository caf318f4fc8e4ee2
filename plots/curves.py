"""Draw loss, accuracy and learning rate of one training run over its epochs."""

from collections.abc import Mapping, Sequence

import numpy as np

from landscape.options import counted
from landscape.plots import style, theme
from landscape.plots.appearance import escaped
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Mean loss over the training samples as they were trained on (augmented, mixed, smoothed, while the weights move), "
    "and loss and accuracy on the test split after each epoch. The two losses are of different samples: their "
    "difference is not the generalisation gap."
)
TRAIN, TEST = "0.5", "tab:blue"
NEEDS = ("epoch", "epochs", "train_loss", "loss", "accuracy", "lr")


def curves(run: Mapping[str, np.ndarray], axes: Sequence[Axes]) -> Sequence[Axes]:
    """Draw one run, finished or not, from the columns of its `metrics.csv` on three axes."""
    epoch = run["epoch"]
    marker = "o" if len(epoch) < 25 else ""
    axes[0].plot(epoch, run["train_loss"], color=TRAIN, marker=marker)
    axes[0].plot(epoch, run["loss"], color=TEST, marker=marker)
    axes[0].set_ylabel("loss")
    axes[1].plot(epoch, run["accuracy"], color=TEST, marker=marker)
    axes[1].set_ylabel("test accuracy")
    axes[2].plot(epoch, run["lr"], color=theme.muted(), marker=marker)
    axes[2].set_ylabel("learning rate")
    axes[2].set_ylim(bottom=0.0)
    axes[2].ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    for ax in axes:
        ax.set_xlabel("epoch")
        ax.set_xlim(0, 1.02 * max(run["epochs"][-1], 1))
        style.whole_numbers(ax)
    return axes


def page(run: Mapping[str, np.ndarray], name: str) -> Figure:
    """The figure of one run."""
    finished, epochs = int(run["epoch"][-1]), int(run["epochs"][-1])
    best = int(np.argmax(run["accuracy"]))
    caption = (
        f"{escaped(name)}: {finished} of {counted(epochs, 'epoch')}, test accuracy {run['accuracy'][-1]:.4f}, at its "
        f"highest {run['accuracy'][best]:.4f} (epoch {int(run['epoch'][best])}), {run['seconds'].sum() / 60:.1f} min. "
        "The train loss is of samples as they were trained on: augmented, mixed, smoothed. The learning rate is that "
        "of an epoch's last update."
    )
    legend = [Look("train", TRAIN, ""), Look("test", TEST, "")]
    figure = style.page([], [], height=1.9, legend=legend, caption=caption)
    curves(run, figure.subplots(1, 3))
    return figure
