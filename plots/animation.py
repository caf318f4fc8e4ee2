"""Animate surface or spectrum of one run over its epochs, or turn the reliefs of several networks together."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from scipy.interpolate import RegularGridInterpolator

from landscape.options import require
from landscape.plots import FIGURES, plane, style
from landscape.plots.figure import Look
from landscape.plots.figures import hessian, hessian_phases, surface, surface_3d, surface_relief
from landscape.plots.selection import Selection
from landscape.plots.theme import Theme, applied, ink, page_width, panel_width
from landscape.results import reader
from landscape.results.replacing import replacing

TURNTABLE = "turntable"
KINDS = ("surface", "surface_3d", "hessian", TURNTABLE)
FORMATS = (".gif", ".mp4")
DPI = 150
SHARE = 0.9  # of a mesh's cells that are below the upper end of its vertical axis
MOST = 6  # surfaces side by side
FRAMES = 36  # of one turn
LIFT = 0.02  # of the vertical axis, by which the path lies above the relief


def animate(
    path: Path | str, out: Path | str, kind: str = "surface", *, selection: Selection, theme: Theme, rate: float = 0.0
) -> list[float]:
    """Write an animation, as GIF or as MP4 by the name of `out`; returns the epochs that it shows.

    Drawn are the results of one run with most snapshots: equal protocol and parameters, checkpoints of one folder. A
    turntable shows the surfaces of several networks from all sides. `rate` is the number of frames per second, by
    default 2, of a turntable 12.

    Raises:
        OptionError: the kind or the format is unknown, or a turntable is of too many surfaces.
        ValueError: no run has results at two epochs. FileNotFoundError: MP4 without ffmpeg.
    """
    out = Path(out)
    require(kind in KINDS, "figure", kind, f"one of {', '.join(KINDS)}")
    require(out.suffix.lower() in FORMATS, "out", out, "a file that ends in .gif or .mp4")
    rate = rate or (12.0 if kind == TURNTABLE else 2.0)
    if kind == TURNTABLE:
        return _turned(path, out, selection, theme, rate)
    probe = FIGURES[kind].probe
    with reader.streaming(path, probe) as stored, applied(theme):
        found = FIGURES[kind].selected([data for _, data in selection.of(stored)])
        lines = sorted(hessian_phases.runs(found).values(), key=len)
        if not lines:
            raise ValueError(
                f"{path} holds no run with results of {probe} at two epochs or more; measure its snapshots with equal "
                f"options, for example: landscape {probe} RUN/epoch_*.pt --out {path}"
            )
        results = [found[i] for i in lines[-1]]
        looks = selection.looks(results, results)
        _write(out, list(_frames(results, looks, kind)), rate)
        return [hessian_phases.epoch(data) for data in results]


def _turned(path: Path | str, out: Path, selection: Selection, theme: Theme, rate: float) -> list[float]:
    """Write the reliefs of all selected surfaces turning together; returns their epochs."""
    with reader.streaming(path, "surface") as stored, applied(theme):
        results = FIGURES["surface_relief"].selected([data for _, data in selection.of(stored)])
        if not results:
            raise ValueError(f"{path} holds no surface; measure one first: landscape surface CHECKPOINT --out {path}")
        require(len(results) <= MOST, "only", f"{len(results)} surfaces", f"at most {MOST}")
        _write(out, list(_turn(results, selection.looks(results, results), DPI)), rate)
        return [hessian_phases.epoch(data) for data in results]


def _frames(results: Sequence[xr.Dataset], looks: Sequence[Look], kind: str) -> Iterator[np.ndarray]:
    """The pictures in the order of the epochs, (height, width, 3) of bytes; the layout is that of the first."""
    width = panel_width(4.5)
    spectrum = kind == "hessian"
    note = hessian.ticks(results) if spectrum else "One scale for all epochs."
    figure = style.page(results[:1], looks[-1:], height=2.2 if spectrum else 0.75 * width, width=width, note=note)
    figure.set_dpi(DPI)
    panels: tuple[str | None, ...] = FIGURES[kind].panels
    axes = [figure.add_subplot(1, len(panels), i + 1, projection=panel) for i, panel in enumerate(panels)]
    levels = None if spectrum else surface.contour_levels(results)
    if kind == "surface" and levels is not None:
        surface.add_colour_bar(figure, axes, results, levels)
    for number, data in enumerate(results):
        for ax in axes:
            ax.clear()
        if spectrum:
            _draw_spectrum(data, axes, results, looks[-1])
        elif levels is not None and kind == "surface":
            surface.draw(data, axes[0], levels=levels)
        else:
            surface_3d.draw(data, axes[0], span=plane.vertical_range(results, SHARE))
        axes[0].set_title(f"epoch {hessian_phases.epoch(data):g}", loc="left")
        if number == 0:
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        yield _pixels(figure)


def _pixels(figure: Any) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def _draw_spectrum(data: xr.Dataset, axes: Sequence[Any], results: Sequence[xr.Dataset], look: Look) -> None:
    """The spectrum on the axes of all epochs; the density is logarithmic, since peaks differ by far."""
    ranges = hessian.axis_ranges(results)
    hessian.draw(data, (axes[0], axes[1]), look=look, ranges=ranges)
    sides = [hessian.density(hessian.eigenvalues(one), np.linspace(*side, 400)) for one in results for side in ranges]
    top = max(float(side.max()) for side in sides) or 1.0
    for ax in axes:
        ax.set_yscale("log")
        ax.set_ylim(1e-4 * top, 2 * top)
    for ax, side in zip(axes, ("negative", "positive"), strict=True):
        ax.set_title(side, loc="right")
    axes[1].set_ylabel("")
    axes[1].tick_params(labelleft=False)


def _write(out: Path, frames: Sequence[np.ndarray], rate: float) -> None:
    """Write the pictures as one file, which replaces an old one when it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix.lower() == ".gif":
        from PIL import Image

        pictures = [Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE) for frame in frames]
        with replacing(out) as stream:
            pictures[0].save(
                stream, format="GIF", save_all=True, append_images=pictures[1:], duration=1000 / rate, loop=0
            )
        return
    program = shutil.which("ffmpeg")
    if program is None:
        raise FileNotFoundError("MP4 needs ffmpeg, which is not installed; install it, or give --out animation.gif")
    height, width = (side - side % 2 for side in frames[0].shape[:2])  # the usual coding of colours needs even sides
    raw = b"".join(np.ascontiguousarray(frame[:height, :width]).tobytes() for frame in frames)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "animation.mp4"
        command = [program, "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}",
                   "-r", f"{rate:g}", "-i", "-", "-pix_fmt", "yuv420p", str(part)]  # fmt: skip
        ended = subprocess.run(command, input=raw, capture_output=True, check=False)
        if ended.returncode:
            raise ValueError(
                f"ffmpeg failed ({ended.stderr.decode(errors='replace').strip()}); give --out animation.gif"
            )
        with replacing(out) as stream:
            stream.write(part.read_bytes())


def _turn(results: Sequence[xr.Dataset], looks: Sequence[Look], dpi: int) -> Iterator[np.ndarray]:
    """The pictures of one turn, (height, width, 3) of bytes."""
    span = plane.bowl_range(results, surface_relief.SHARE)
    note = surface_relief.scale(results, span)
    note += " Black: the path of training." * any(map(_has_run_path, results))
    columns = min(len(results), 3)
    rows, side = -(-len(results) // columns), page_width() / columns
    figure = style.page(results, looks, height=0.9 * side * rows, note=note)
    figure.set_dpi(dpi)
    axes = [figure.add_subplot(rows, columns, i + 1, projection="3d") for i in range(len(results))]
    for ax, data, look in zip(axes, results, looks, strict=True):
        surface_relief.draw(data, ax, span=span)
        _draw_path(data, ax, span)
        size = style.title_size(columns)
        ax.set_title(style.fitted(look.label, side, size), fontsize=size)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for angle in np.linspace(0, 360, FRAMES, endpoint=False):
        for ax in axes:
            ax.view_init(elev=28, azim=angle - 60)
        yield _pixels(figure)


def _has_run_path(data: xr.Dataset) -> bool:
    return {"path_x", "path_y"} <= set(data) and data.attrs.get("plane") != "checkpoints"


def _draw_path(data: xr.Dataset, ax: Any, span: tuple[float, float]) -> None:
    """The path of training on the relief, where the plane holds one and as far as it lies inside."""
    if not _has_run_path(data):
        return
    made = surface_relief.smooth(data, span)
    height = RegularGridInterpolator(
        (made["x"].values, made["y"].values), made["loss"].transpose("x", "y").values, bounds_error=False
    )
    x, y = data["path_x"].values, data["path_y"].values
    z = height(np.stack([x, y], axis=-1))
    low, high = span
    z, low, high = (np.log10(v) for v in (z, low, high)) if low > 0 else (z, low, high)
    z = z + LIFT * (high - low)
    ax.plot(x, y, z, color=ink(), marker=".", markersize=3, linewidth=1, zorder=10)
