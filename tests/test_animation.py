"""`landscape animate`: one figure over the epochs of a run."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
import xarray as xr
from drawable import result_of
from PIL import Image

from landscape.options import OptionError
from landscape.plots import animation, plane, style, theme
from landscape.plots.figure import Look
from landscape.plots.figures import hessian, surface_relief
from landscape.plots.selection import Selection
from landscape.results import reader


def _snapshot(data: xr.Dataset, epoch: int) -> xr.Dataset:
    spec = json.dumps({"checkpoint": f"runs/a/epoch_{epoch}.pt"})
    return data.assign_attrs(epoch=float(epoch), spec=spec).assign(loss=data["loss"] / (1 + epoch))


@pytest.mark.slow
def test_an_animation_shows_the_epochs_in_order_on_common_colours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((_, data),) = reader.groups(synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("surface",)))
    stored = [("surface/x", _snapshot(data, epoch)) for epoch in (3, 1, 2)]
    monkeypatch.setattr(reader, "streaming", lambda *_: nullcontext(stored))
    write, frames = animation._write, list[np.ndarray]()
    monkeypatch.setattr(animation, "_write", lambda out, made, rate: (frames.extend(made), write(out, made, rate)))
    epochs = animation.animate("r.h5", tmp_path / "a.gif", selection=Selection(), theme=theme.Theme(), rate=4)
    assert epochs == [1.0, 2.0, 3.0]
    with Image.open(tmp_path / "a.gif") as picture:
        assert (picture.n_frames, picture.info["duration"]) == (3, 250)  # type: ignore[attr-defined]
        assert picture.width == 675
    bar = np.s_[:, -90:]  # the colour bar is the same in all frames, the surface is not
    assert all((frame[bar] == frames[0][bar]).all() for frame in frames)
    assert not (frames[0] == frames[1]).all()


@pytest.mark.slow
def test_an_animation_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:2], probes=("surface",))
    options: dict[str, Any] = {"selection": Selection(), "theme": theme.Theme()}
    with pytest.raises(ValueError, match=r"holds no run with results of surface at two epochs .* RUN/epoch_\*\.pt"):
        animation.animate(study, tmp_path / "a.gif", **options)
    with pytest.raises(OptionError, match=r"--out must be a file that ends in \.gif or \.mp4"):
        animation.animate(study, tmp_path / "a.avi", **options)
    with pytest.raises(OptionError, match="--figure must be one of surface, surface_3d, hessian, turntable, got line"):
        animation.animate(study, tmp_path / "a.gif", "line", **options)
    monkeypatch.setattr(animation.shutil, "which", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"MP4 needs ffmpeg.* give --out animation\.gif"):
        animation._write(tmp_path / "a.mp4", [np.zeros((4, 4, 3), np.uint8)], 2.0)
    assert not (tmp_path / "a.mp4").exists()


@pytest.mark.slow
def test_a_turntable_shows_every_network_from_all_sides_with_a_visible_bowl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:2], probes=("surface",))
    monkeypatch.setattr(animation, "FRAMES", 4)
    options: dict[str, Any] = {"selection": Selection(), "theme": theme.Theme()}
    assert len(animation.animate(study, tmp_path / "a.gif", "turntable", **options)) == 2
    with Image.open(tmp_path / "a.gif") as picture:
        assert (picture.n_frames, picture.info["duration"]) == (4, 80)  # type: ignore[attr-defined]
        first, second = (np.asarray((picture.seek(k), picture.convert("L"))[1]) for k in (0, 1))
    for half in np.array_split(np.arange(first.shape[1]), 2):  # both networks turn
        assert (first[:, half] != second[:, half]).mean() > 0.05


def test_a_steep_surface_leaves_half_of_the_scale_to_a_flat_one() -> None:
    x = np.linspace(-1, 1, 21)
    bowl = x[:, None] ** 2 + x**2
    flat, steep = (xr.Dataset({"loss": (("x", "y"), 0.1 * np.exp(k * bowl))}, {"x": x, "y": x}) for k in (1, 12))
    low, high = plane.bowl_range([flat, steep], surface_relief.SHARE)
    assert np.log(float(flat["loss"].quantile(0.98)) / low) == pytest.approx(np.log(high / low) / 2)
    high_up = flat * 5  # its minimum lies higher, and its losses overflow at the edge
    high_up["loss"][0, 0] = np.inf
    low, high = plane.bowl_range([high_up, steep], surface_relief.SHARE)
    assert np.log(float(high_up["loss"].quantile(0.98)) / 0.5) > 0.25 * np.log(high / low)
    made = surface_relief.smooth(high_up, (low, high))
    assert float(made["loss"].interp(x=0.3, y=-0.47)) == pytest.approx(0.5 * np.exp(0.3**2 + 0.47**2), rel=1e-2)
    made = surface_relief.smooth(flat, (low, high))
    assert float(made["loss"].interp(x=0.3, y=-0.47)) == pytest.approx(0.1 * np.exp(0.3**2 + 0.47**2), rel=1e-3)


def test_a_path_of_training_lies_on_the_relief_just_above_it() -> None:
    axis, path = np.linspace(-1, 1, 21), np.array([-0.8, -0.1, 0.3])
    bowl = xr.Dataset({"loss": (("x", "y"), 0.1 * np.exp(axis[:, None] ** 2 + axis**2))}, {"x": axis, "y": axis})
    data = bowl.assign(path_x=("snapshot", path), path_y=("snapshot", path / 2))
    span, ax = (0.1, 0.8), style.page([], [], height=2).add_subplot(projection="3d")
    animation._draw_path(data, ax, span)
    (line,) = ax.lines
    x, y, z = line.get_data_3d()
    np.testing.assert_allclose((x, y), (path, path / 2))
    above = animation.LIFT * np.log10(span[1] / span[0])
    np.testing.assert_allclose(z, np.log10(0.1 * np.exp(path**2 + path**2 / 4)) + above, atol=2e-3)


@pytest.mark.slow
def test_every_page_that_marks_single_eigenvalues_says_what_ticks_are(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, page = [], style.page
    monkeypatch.setattr(style, "page", lambda *args, **about: (notes.append(about["note"]), page(*args, **about))[1])
    data = result_of(small, "hessian", synthetic.SMALL.label)
    values = np.abs(data["eigenvalue"])
    few = data.assign(eigenvalue=values.where(values < values.max(), -values))
    hessian.page([few], [Look("one")])
    next(animation._frames([few], [Look("one")], "hessian"))
    assert ["Ticks: " in note for note in notes] == [True, True]
