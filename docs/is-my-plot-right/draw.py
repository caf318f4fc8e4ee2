"""Draw the pictures of is-my-plot-right.md from the results files beside this script."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from landscape.plots.figures import surface
from landscape.results import reader

HERE = Path(__file__).parent
CHANCE = np.log(10)  # loss of guessing among the ten digits


def draw(file: Path) -> Path:
    """Contours on the left, the loss along the first direction with its error on the right."""
    ((_, data),) = reader.groups(file)
    with mpl.rc_context({"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(6.2, 2.7), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        surface.draw(data, left)
        x, middle = data["x"].values, len(data["y"]) // 2
        loss, error = (data[name].values[:, middle] for name in ("loss", "loss_se"))
        right.fill_between(x, loss - 1.96 * error, loss + 1.96 * error, alpha=0.3, lw=0)
        right.plot(x, loss, "o-", ms=2.5, lw=1)
        right.axhline(CHANCE, color="0.5", ls="--", lw=0.8)
        right.annotate("guessing", (x[0], CHANCE), xytext=(2, 2), textcoords="offset points", color="0.4", fontsize=7)
        right.set(xlabel="along the first direction", ylabel="loss (nats), 95 %")
        right.margins(y=0.12)
        if loss.max() > 20 * CHANCE:
            right.set_yscale("log")
        figure.suptitle(file.stem.replace("-", " "), fontsize=10)
        path = file.with_suffix(".png")
        figure.savefig(path, dpi=110)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
    return path


if __name__ == "__main__":
    for result in sorted(HERE.glob("*.h5")):
        print(draw(result), "bytes:", draw(result).stat().st_size)
