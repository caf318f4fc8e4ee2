"""The report in a headless Chromium with software rendering: frames per second of a surface, first paint, sizes.

A study of three networks by every probe, from made-up numbers or of a file, and one with surfaces of N x N points. Each
frame turns the surface; a frame's own time ends when its pixels can be read, and its fifth percentile is that of an
idle machine. First paint is that of a page with all its pictures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import synthetic
from browser import MISSING, browser
from relu_surface import relu_surface

from landscape.plots import drawing
from landscape.plots.report import report
from landscape.probe import Plan, Quantity
from landscape.results.run_key import RunKey
from landscape.results.writer import Writer

FRAMES = """
const view = views.surface, times = [], canvas = document.querySelector("canvas.turn");
canvas.scrollIntoView();
const pen = canvas.getContext("2d"), own = [];
let last = 0;
return new Promise((done) => {
  const step = (now) => {
    if (last) times.push(now - last);
    last = now;
    view.state.az += 0.05;
    const start = performance.now();
    view.draw();
    pen.getImageData(0, 0, 1, 1);
    own.push(performance.now() - start);
    times.length < arguments[0] ? requestAnimationFrame(step) : done([times, own]);
  };
  requestAnimationFrame(step);
});
"""
READY = "return document.documentElement.dataset.ready === 'true'"
PAINT = "return performance.getEntriesByType('paint').find((e) => e.name === 'first-contentful-paint').startTime"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolution", type=int, default=201)
    parser.add_argument("--frames", type=int, default=120)
    parser.add_argument("--study", type=Path, help="results file for the first paint; default: made-up numbers")
    options = parser.parse_args()
    if MISSING:
        raise SystemExit(MISSING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        study = options.study or synthetic.write(folder / "study.h5")
        page = report(study, folder / "study.html", drawing.draw(study, folder / "figures"))
        text = page.read_text()
        fine = report(surfaces(folder / "fine.h5", options.resolution), folder / "fine.html", [])
        data, own = (
            len(of.partition('id="data">')[2].partition("</script>")[0]) / 1e3 for of in (text, fine.read_text())
        )
        script = len(text.rpartition("<script>")[2].partition("</script>")[0]) / 1e3
        print(f"page {page.stat().st_size / 1e6:.1f} MB, of it data {data:.0f} kB, script {script:.0f} kB")
        print(f"data of three surfaces of {options.resolution} x {options.resolution} points: {own:.0f} kB")
        with browser(folder / "profile") as window:
            paints = []
            for _ in range(7):
                window.open(page)
                window.until(READY)
                paints.append(window.run(PAINT))
            print(
                f"first paint {statistics.median(paints):.0f} ms (median of 7; {min(paints):.0f} to {max(paints):.0f})"
            )
            print("| renderer | frames / s, median | 95th percentile | own time of a frame, ms: 5 % | median |")
            print("| --- | --- | --- | --- | --- |")
            for query in ("?renderer=webgl2", "?renderer=2d"):
                window.open(fine.resolve().as_uri() + query)
                window.until(READY)
                times, own = window.run(FRAMES, options.frames)
                name = window.run("return views.surface.renderer()")
                rates = [1e3 / np.quantile(times, share) for share in (0.5, 0.95)]
                cost = [np.quantile(own, share) for share in (0.05, 0.5)]
                print(f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | {cost[0]:.1f} | {cost[1]:.1f} |")


def surfaces(path: Path, resolution: int) -> Path:
    """Three surfaces of small ReLU networks."""
    axis = np.linspace(-1, 1, resolution)
    plan = Plan(over={"x": axis, "y": axis}, quantities={n: Quantity(n) for n in ("loss", "loss_se", "l2", "accuracy")})
    for i in range(3):
        with Writer(path, RunKey("surface", f"net {i}", f"{i:010d}", plan, {"parameters": "{}"})):
            pass
        with h5py.File(path, "r+") as file:
            (group,) = (group for group in file["surface"].values() if group.attrs["label"] == f"net {i}")
            group["loss"][...], group["loss_se"][...] = relu_surface(resolution, i)
            group["done"][...] = 1
    return path


if __name__ == "__main__":
    main()
