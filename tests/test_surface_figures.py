"""Figures of surfaces, lines and paths show the stored numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import synthetic
import xarray as xr
from drawable import VIT, axes_for, result_of
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from landscape.plots import FIGURES, appearance, plane, theme
from landscape.plots.appearance import look_of
from landscape.plots.figures import surface, surface_error, surface_heat, surface_height
from landscape.plots.tidy import _shown, label_decades, tidied
from landscape.statistics.stored import half_width


@pytest.mark.slow
def test_contours_have_the_checkpoint_in_the_middle_and_dots_where_the_loss_overflows(study: Path) -> None:
    data = result_of(study, "surface", "resnet50-cifar100")
    ax = surface.draw(data, Figure().subplots())
    lost = int(np.isinf(data["loss"].values).sum())
    assert lost > 0
    dots = next(line for line in ax.lines if line.get_label() == "loss not finite")
    assert len(dots.get_xdata()) == lost
    np.testing.assert_allclose(ax.lines[-1].get_xydata(), [[0.0, 0.0]])
    assert ax.get_xlabel() == "first random direction (filter\u00a0norm)"


def test_x_of_the_file_is_horizontal() -> None:
    x, y = np.linspace(-1, 1, 5), np.linspace(-1, 1, 3)
    loss = np.broadcast_to(x[:, None], (5, 3)) + 2.0  # grows with x alone
    data = xr.Dataset({"loss": (("x", "y"), loss), "done": (("x", "y"), np.ones((5, 3)))}, {"x": x, "y": y})
    ax = surface.draw(data, Figure().subplots())
    np.testing.assert_array_equal(ax.collections[0].get_array(), loss.T)


def test_contour_levels_follow_the_span_of_the_loss() -> None:
    def levels(*values: float) -> np.ndarray:
        return surface.contour_levels([xr.Dataset({"loss": ("x", np.array(values))})])

    even = np.diff(levels(*np.linspace(1, 3, 50)))
    np.testing.assert_allclose(even, even[0])
    wide = levels(*np.geomspace(0.01, 1000, 50))
    assert (wide[1:] / wide[:-1]).max() == pytest.approx(2.5)  # 2 to 5
    assert len(levels(1.0)) > 1  # one value is no span


def test_a_flat_surface_beside_a_steep_one_has_contours_too() -> None:
    steep, flat = (xr.Dataset({"loss": ("x", np.linspace(0.8, high, 50))}) for high in (15.0, 3.5))
    even, shared = surface.contour_levels([steep]), surface.contour_levels([steep, flat])
    assert np.ptp(np.diff(even)) == pytest.approx(0.0, abs=1e-9)
    assert ((shared > 0.8) & (shared < 3.5)).sum() >= 3 > ((even > 0.8) & (even < 3.5)).sum()


@pytest.mark.slow
def test_the_polar_path_starts_at_one_and_ends_in_the_middle(study: Path) -> None:
    data = result_of(study, "trajectory")
    polar, plane = FIGURES["trajectory"].module.draw(data, axes_for("trajectory"), look=look_of(data))
    path = polar.lines[0]
    assert tuple(path.get_xydata()[0]) == (0.0, 1.0)
    assert path.get_ydata()[-1] == 0.0
    assert np.isfinite(path.get_xdata()).all()  # the end has no angle of its own
    np.testing.assert_array_equal(plane.lines[0].get_ydata(), data["pc2"].values)


@pytest.mark.slow
def test_lines_are_the_stored_numbers_with_their_bands_and_barriers(study: Path) -> None:
    data = result_of(study, "line")
    left, right = FIGURES["line"].module.draw(data, tuple(Figure().subplots(1, 2)), look=look_of(data))
    curves = [drawn for drawn in left.lines if len(drawn.get_xdata()) == data.sizes["t"]]
    np.testing.assert_array_equal([drawn.get_ydata() for drawn in curves], data["loss"].values)
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx((data["loss"] + half_width(data, "loss"))[0].max().item())
    bars = [drawn.get_ydata() for drawn in left.lines if drawn.get_marker() == "_"]
    np.testing.assert_allclose([top - low for low, top in bars], data["barrier"].values)
    curves = [drawn.get_ydata() for drawn in right.lines if len(drawn.get_xdata()) == data.sizes["t"]]
    np.testing.assert_array_equal(curves, data["accuracy"].values)


def test_several_random_directions_are_a_mean_and_a_spread() -> None:
    loss = np.array([[3.0, 1.0, 2.0], [5.0, 1.0, 4.0], [4.0, 1.0, 9.0]])
    both = ("direction", "t")
    data = xr.Dataset(
        {**{name: (both, loss) for name in ("loss", "accuracy")}, "done": (both, np.ones((3, 3))),
         **{f"{name}_se": (both, 0 * loss) for name in ("loss", "accuracy")}, "name": ("direction", ["a", "b", "c"])},
        {"t": [-1.0, 0.0, 1.0]}, attrs={"along": "random", "label": "net"},
    )  # fmt: skip
    ax, _ = FIGURES["line"].module.draw(data, tuple(Figure().subplots(1, 2)), look=look_of(data))
    np.testing.assert_array_equal(ax.lines[3].get_ydata(), [4.0, 1.0, 5.0])
    assert not ax.collections or not np.isfinite(ax.collections[0].get_paths()[0].vertices[:, 1]).any()  # of three
    page = FIGURES["line"].module.page([data], appearance.looks([data]))
    assert [text.get_text() for text in page.legends[0].get_texts()] == ["net: 3 random directions"]


@pytest.mark.slow
def test_lines_without_an_accuracy_have_the_panel_of_the_loss_alone(study: Path) -> None:
    first = result_of(study, "line")
    undefined = first.assign(accuracy=(first.accuracy * np.nan).assign_attrs(units="undefined"))
    page = FIGURES["line"].module.page
    panels = [len(page(data, appearance.looks(data)).axes) for data in ([first], [undefined], [first, undefined])]
    assert panels == [2, 1, 2]


@pytest.mark.slow
def test_lines_of_one_checkpoint_differ_in_label_and_line_style(study: Path) -> None:
    data = [result_of(study, "line").copy() for _ in range(2)]
    for one, bn in zip(data, ("auto", "recalibrate:4"), strict=True):
        one.attrs["parameters"] = f'{{"bn": "{bn}"}}'
    page = FIGURES["line"].module.page(data, appearance.looks(data))
    labels = [text.get_text() for text in page.legends[0].get_texts()]
    assert labels[0].startswith(f"{VIT} (bn auto): towards a, barrier 0.17 ± 0.04")
    assert labels[3].startswith(f"{VIT} (bn recalibrate:4): towards b, barrier")
    assert len({entry.get_linestyle() for entry in page.legends[0].get_lines()}) == 4


@pytest.mark.slow
def test_the_path_lies_over_its_plane_with_the_end_as_a_star(study: Path) -> None:
    data = result_of(study, "surface")
    ax = FIGURES["path"].module.draw(data, Figure().subplots())
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), np.stack([data["path_x"], data["path_y"]], axis=1))
    assert (ax.lines[1].get_marker(), ax.lines[1].get_xydata().tolist()) == ("*", [[0.0, 0.0]])
    assert [text.get_text() for text in ax.texts] == [f"epoch {t}" for t in range(4)]
    ax = FIGURES["path"].module.draw(data.assign(path_x=data["path_x"] * 1e-3, path_y=data["path_y"] * 1e-3), ax)
    assert [text.get_text() for text in ax.texts[4:]] == ["epoch 0"]  # names that would touch are left out
    for text in ax.texts:  # away from the nearer edge
        assert text.get_horizontalalignment() == ("right" if text.xy[0] > sum(ax.get_xlim()) / 2 else "left")  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_plane_of_a_run_stands_beside_the_snapshots_own_losses(study: Path) -> None:
    data = result_of(study, "trajectory")
    losses, distances = FIGURES["trajectory_loss"].module.draw(data, tuple(Figure().subplots(1, 2)), look=look_of(data))
    for drawn, name in zip(losses.lines, ("loss", "plane_loss"), strict=True):
        np.testing.assert_array_equal(drawn.get_xydata(), np.stack([data["epoch"], data[name]], axis=1))
    np.testing.assert_array_equal(distances.lines[0].get_ydata(), data["off_plane"].values)


@pytest.mark.slow
def test_a_heat_map_marks_evaluated_and_capped_points(study: Path) -> None:
    data = result_of(study, "surface")
    evaluated = (data["x"] + data["y"] > 0).astype(float)
    n = xr.where(data["x"] > 0.55, 64.0, 128.0) * xr.ones_like(evaluated)
    ax = Figure().add_subplot()
    surface_heat.draw(data.assign(evaluated=evaluated, n=n), ax)
    dots, crosses, *_ = ax.lines
    assert len(np.asarray(dots.get_xdata())) == int(evaluated.sum())
    assert all(x + y > 0 for x, y in zip(np.asarray(dots.get_xdata()), np.asarray(dots.get_ydata()), strict=True))
    assert np.asarray(crosses.get_xdata()).min() > 0.55
    assert len(np.asarray(crosses.get_xdata())) == int((n < 128).sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["surface", "surface_heat", "surface_error"])
def test_a_plane_through_checkpoints_marks_and_names_the_others(study: Path, name: str) -> None:
    names = ["", "sgd", "adam", "far", "off"][: result_of(study, "surface").sizes["snapshot"]]
    data = result_of(study, "surface").assign(path_name=("snapshot", names)).assign_attrs(plane="checkpoints")
    data["path_x"][-1] = 100.0  # where the grid does not reach
    ax = FIGURES[name].module.draw(data, Figure().subplots())
    assert [text.get_text() for text in ax.texts if text.get_text() in names and text.get_text()] == names[1:]
    points = next(line for line in ax.lines if len(np.asarray(line.get_xdata())) == len(names))
    np.testing.assert_array_equal(points.get_xydata(), np.stack([data["path_x"], data["path_y"]], axis=1))
    assert points.get_linewidth() == 0.0  # nobody went from one to the other
    assert ax.get_xlim()[1] < 2 * data["x"].values[-1]


@pytest.mark.slow
def test_maps_of_several_networks_share_one_logarithmic_colour_scale(study: Path) -> None:
    results = [result_of(study, "surface", network.label) for network in synthetic.NETWORKS]
    page = surface_heat.page(results, appearance.looks(results))
    norms = {id(ax.collections[0].norm) for ax in page.axes[: len(results)]}
    finite = np.concatenate([data["loss"].values[np.isfinite(data["loss"].values)] for data in results])
    assert len(norms) == 1
    norm = page.axes[0].collections[0].norm
    assert isinstance(norm, LogNorm)
    assert (norm.vmin, norm.vmax) == (finite.min(), finite.max())


@pytest.mark.slow
def test_the_error_map_shows_the_error_as_a_share_of_the_loss(study: Path) -> None:
    data = result_of(study, "surface")
    ax = surface_error.draw(data, Figure().add_subplot())
    shown = ax.collections[0].get_array()
    np.testing.assert_allclose(np.asarray(shown).reshape(21, 21), (0.01 / data["loss"]).transpose("y", "x").values)


@pytest.mark.slow
def test_heights_are_drawn_with_their_intervals(study: Path) -> None:
    data = result_of(study, "surface")
    ax = surface_height.draw(data, Figure().add_subplot(), look=look_of(data))
    (bars,) = ax.containers
    line, _, (segments,) = bars.lines
    np.testing.assert_allclose(line.get_ydata(), data["height"].values)
    lengths = [segment[1, 1] - segment[0, 1] for segment in segments.get_segments()]
    np.testing.assert_allclose(lengths, 2 * half_width(data, "height"))


@pytest.mark.parametrize(
    ("low", "high", "first"),
    [(0.9, 1.1, "0.9"), (1.5, 30.0, "2"), (2.0, 2.5, "2"), (2e-3, 5e-2, "0.002"), (1500.0, 9e4, "2000"),
     (2e-6, 7e-6, r"2\times10^{-6}"), (0.5, 30.0, "10^{0}")],
)  # fmt: skip
def test_ticks_of_a_narrow_logarithmic_scale_are_round_and_few(low: float, high: float, first: str) -> None:
    ax = Figure().add_subplot(xlim=(low, high), xscale="log")
    labels = [label.get_text().strip("$") for label in _shown(label_decades(ax.figure).axes[0].xaxis)]
    assert 2 <= len(labels) <= 12
    assert labels[0] in (first, rf"\mathdefault{{{first}}}")


@pytest.mark.slow
def test_heights_in_other_units_have_their_own_panel(study: Path) -> None:
    data = result_of(study, "surface")
    other = data.assign_coords(x=data["x"].assign_attrs(units="share of the way"))
    results = [data, other, data]
    figure = surface_height.page(results, appearance.looks(results))
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert labels == ["distance from the weights (filter norm)", "distance from the weights (share of the way)"]
    assert [len(ax.containers) for ax in figure.axes] == [2, 1]


def test_names_on_a_plane_do_not_cover_each_other() -> None:
    ax = Figure(layout="constrained").add_subplot(xlim=(0, 1))
    for x, name in ((0.55, "epoch 6"), (0.45, "epoch 9"), (0.0, "epoch 12")):
        plane.annotate(ax, xr.Dataset(coords={"x": [0.0, 1.0]}), x, 0.5, name)
    with theme.applied(theme.SCREEN):
        tidied(ax.figure)
    assert [text.get_visible() for text in ax.texts] == [True, False, True]
