"""Figures of Hessian spectra beyond the two panels: over phases, layers, losses, and with the bulk."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import xarray as xr
from analytic import quadratic, run_probe, symmetric, tanh_net
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy.integrate import trapezoid

from landscape.options import OptionError
from landscape.plots import drawing, headlines
from landscape.plots.appearance import look_of
from landscape.plots.figures import (
    density_blocks,
    hessian,
    hessian_density,
    hessian_layers,
    hessian_loss,
    hessian_phases,
    saddle,
)
from landscape.plots.figures.density import axis_resolution_of
from landscape.plots.report.panels import Drawn, densities
from landscape.probes.density import Density
from landscape.probes.hessian import Hessian
from landscape.probes.surface import Surface
from landscape.results import reader
from landscape.running.run import run
from landscape.statistics.intervals import NORMAL
from landscape.subject.subject import Subject


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "results.h5"
    subject = tanh_net(sizes=(6,) * 5)
    run(Hessian(top=3), subject, path, label="net")
    run(Hessian(top=3, per_layer=True), subject, path, label="net")
    return path


def _snapshots(epochs: list[float], *, folder: str = "runs/a", protocol: str = "p") -> list[xr.Dataset]:
    def made(at: float) -> xr.Dataset:
        largest = ("batch", np.array([1.0, 2.0, 4.0]) + at)
        numbers = {name: at for name in ("nep", "nep_low", "nep_high", "ape", "ape_low", "ape_high")}
        spec = json.dumps({"checkpoint": f"{folder}/epoch_{at:.0f}.pt"})
        attributes = {"epoch": at, "spec": spec, "protocol": protocol, "parameters": "{}", "label": f"net-{at}"}
        return xr.Dataset({"largest": largest, **numbers}, attrs=attributes)

    return [made(at) for at in epochs]


def _stored(file: Path, *, layers: bool) -> xr.Dataset:
    return next(data for _, data in reader.find(file, "hessian") if ("group" in data.dims) == layers)


@pytest.mark.slow
def test_each_result_is_drawn_by_the_figures_for_it(file: Path, tmp_path: Path) -> None:
    drawn = [path.stem for path in drawing.draw(file, tmp_path)]
    assert drawn == ["hessian", "hessian_density", "hessian_loss", "hessian_layers"]
    assert drawing.left_out(file) == []


def test_phases_are_snapshots_of_one_run_and_one_protocol_by_epoch() -> None:
    run_a, run_b = _snapshots([3.0, 0.0, 1.0]), _snapshots([0.0, 2.0], folder="runs/b")
    lonely, other = _snapshots([5.0], folder="runs/c"), _snapshots([4.0], protocol="q")
    unknown = _snapshots([float("nan")])
    results = [*run_a, *lonely, *other, *run_b, *unknown]
    assert list(hessian_phases.runs(results).values()) == [[1, 2, 0], [5, 6]]
    assert hessian_phases.select(results) == [0, 1, 2, 5, 6]
    assert hessian_phases.select(lonely) == []


def test_the_hvp_backend_does_not_separate_snapshots_of_a_run() -> None:
    run_a = _snapshots([0.0, 1.0])
    for data, hvp in zip(run_a, ("double-backward", "traced"), strict=True):
        data.attrs["parameters"] = json.dumps({"top": 5, "hvp": hvp})
    assert list(hessian_phases.runs(run_a).values()) == [[0, 1]]


def test_the_newer_of_two_results_at_one_epoch_is_drawn() -> None:
    assert list(hessian_phases.runs(_snapshots([0.0, 1.0, 1.0])).values()) == [[0, 2]]


def test_phases_show_the_stored_numbers_over_the_epoch() -> None:
    axes = Figure().subplots(1, 3)
    run = _snapshots([2.0, 0.0, 1.0])
    assert hessian_phases.draw(run, axes, look=look_of(run[0])) is axes
    for ax, expected in zip(axes, ([0, 1, 2], [0, 1, 2], [2, 3, 4]), strict=True):
        np.testing.assert_allclose(ax.lines[0].get_xdata(), [0, 1, 2])
        np.testing.assert_allclose(ax.lines[0].get_ydata(), expected)


def test_bars_are_the_means_of_both_ends_of_every_layer(file: Path) -> None:
    data = _stored(file, layers=True)
    ax = hessian_layers.draw(data, Figure().subplots(), look=look_of(data))
    widths = np.array([bar.get_width() for bar in ax.patches])
    expected = np.concatenate([data[name].mean("batch").values for name in ("largest", "smallest")])
    np.testing.assert_allclose(widths, expected)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "2"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first layer is on top


def test_the_correlation_of_loss_and_sharpness_is_that_of_scipy(file: Path) -> None:
    data = _stored(file, layers=False)
    expected = scipy.stats.spearmanr(data["loss"], np.abs(data["eigenvalue"][:, 0])).statistic
    assert hessian_loss.correlation(data) == pytest.approx(expected)
    tied = data.assign(loss=("batch", np.array([1.0, 1.0, 2.0, 2.0, 3.0])))
    expected = scipy.stats.spearmanr(tied["loss"], np.abs(data["eigenvalue"][:, 0])).statistic
    assert hessian_loss.correlation(tied) == pytest.approx(expected)
    assert np.isnan(hessian_loss.correlation(data.isel(batch=[0, 1])))


def _spectrum(scale: float, draws: int) -> xr.Dataset:
    values = scale * np.random.default_rng(draws).standard_normal((1, draws))
    about = {"label": f"{scale:g}", "probe": "hessian"}
    arrays = {"eigenvalue": values, "converged": np.ones_like(values)}
    found = {name: (("batch", "rank"), array) for name, array in arrays.items()}
    return xr.Dataset({**found, "done": ("batch", [1])}, attrs=about)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "logarithmic"), [(4.0, False), (7.0, False), (14.0, True), (100.0, True)])
@pytest.mark.parametrize("draws", [40, 400])
def test_the_density_is_logarithmic_by_the_widths_of_the_spectra_and_says_so(
    scale: float, logarithmic: bool, draws: int
) -> None:
    results = [_spectrum(1.0, draws), _spectrum(scale, draws + 1)]
    looks = [look_of(data) for data in results]
    figure = hessian.page(results, looks)
    assert {ax.get_yscale() for ax in figure.axes} == {"log" if logarithmic else "linear"}
    said = [text.get_text() for text in figure.findobj(Text) if "Logarithmic density" in text.get_text()]
    assert bool(said) is logarithmic


@pytest.mark.parametrize("widths", [1.0, 100.0])
def test_few_eigenvalues_of_a_side_are_ticks_and_a_side_without_any_is_narrow(widths: float) -> None:
    positive, few = _spectrum(1.0, 40), _spectrum(widths, 40)
    positive["eigenvalue"], few["eigenvalue"] = abs(positive["eigenvalue"]), abs(few["eigenvalue"])
    results = [positive, few]
    looks = [look_of(data) for data in results]
    left, right = hessian.page(results, looks).axes
    assert left.get_position().width < 0.5 * right.get_position().width
    assert not [*left.findobj(PathCollection), *right.findobj(PathCollection)]
    few["eigenvalue"][0, :3] *= -1
    page = hessian.page(results, looks)
    ticks = [ax.findobj(PathCollection) for ax in page.axes]
    assert [len(found) for found in ticks] == [1, 0]
    assert len(ticks[0][0].get_offsets()) == 3
    assert [line.get_ydata().any() for line in page.axes[0].lines] == [False, False]  # no hill beside the ticks
    assert any("Ticks: the eigenvalues" in text.get_text() for text in page.findobj(Text))
    few["eigenvalue"][0, 9:] = np.nan  # few on both sides, and then of both networks
    for shown in (results, [few, few]):
        hessian.page(shown, looks).canvas.draw()
    assert not hessian.density(hessian.eigenvalues(few), np.linspace(-1, 1, 9)).any()


@pytest.mark.slow
def test_the_report_broadens_densities_as_the_figure_does() -> None:
    results = [run(Density(vectors=4, steps=4, seed=seed), tanh_net(), None).data for seed in (0, 1)]
    drawn = [Drawn(data, str(i), "#000000", "a") for i, data in enumerate(results) if data is not None]
    resolution = axis_resolution_of([one.data for one in drawn])
    found = densities(drawn)
    assert {(panel["linear"], panel["kernel"]) for panel in found} == {(resolution.linear, resolution.width)}


def test_the_density_of_the_searches_is_the_mean_over_mini_batches(file: Path) -> None:
    data = _stored(file, layers=False)
    ax = hessian_density.draw(data, Figure().subplots(), look=look_of(data))
    resolution, x = axis_resolution_of([data]), np.asarray(ax.lines[0].get_xdata(), dtype=float)
    expected = np.zeros_like(x)
    for nodes, weights in zip(data["nodes"].values, data["weights"].values, strict=True):
        for node, weight in zip(nodes[np.isfinite(nodes)], weights[np.isfinite(weights)], strict=True):
            bump = scipy.stats.norm.pdf(
                np.arcsinh(x / resolution.linear), np.arcsinh(node / resolution.linear), resolution.width
            )
            expected += weight * bump / np.sqrt(x**2 + resolution.linear**2) / 5
    np.testing.assert_allclose(ax.lines[0].get_ydata(), expected, rtol=1e-9)
    assert trapezoid(expected, x) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_the_range_of_the_two_panels_is_an_option(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    page = hessian.page

    @functools.wraps(page)
    def spy(*arguments: object, **options: object) -> Figure:
        seen.append(options.get("ranges"))
        return page(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(hessian, "page", spy)
    drawing.draw(file, tmp_path, figures=["hessian"], eigenvalues=(-120.0, 900.0))
    drawing.draw(file, tmp_path, figures=["hessian"])
    assert seen == [((-120.0, 0.0), (0.0, 900.0)), None]


@pytest.mark.parametrize("text", ["900", "0:900", "-1:0", "a:b", "nan:3", "5:-5"])
def test_a_range_without_zero_in_it_is_refused(text: str) -> None:
    from landscape.cli.figures import parse_eigenvalues

    with pytest.raises(OptionError, match="--eigenvalues must be LOW:HIGH around zero, for example -120:900"):
        parse_eigenvalues(text)


class TestHeadline:
    """What the summary says of an run_probe, and what it does not hide."""

    def test_mini_batches_that_are_not_finite_are_named(self) -> None:
        data = _summary({"eigenvalue": [[1.0, 2.0], [np.nan, np.nan], [np.nan, np.nan]]}, done=[1, 1, 0])
        assert headlines.numbers(data)["not finite"] == "mini-batch 1"

    def test_values_that_are_not_converged_are_counted_and_named(self) -> None:
        converged = [[1, 1], [1, 0], [0, 0]]
        data = _summary({"eigenvalue": [[1.0, 2.0]] * 3, "converged": converged}, done=[1, 1, 1])
        assert headlines.numbers(data)["not converged"] == "3 of 6 values, mini-batches 1, 2"

    def test_nothing_is_said_where_all_is_well(self) -> None:
        data = _summary({"eigenvalue": [[1.0, 2.0]] * 2, "converged": [[1, 1]] * 2}, done=[1, 1])
        assert headlines.numbers(data) == {}

    def test_per_layer_the_sharpest_is_named(self, file: Path) -> None:
        data = _stored(file, layers=True)
        found = headlines.numbers(data)
        flat = data["eigenvalue"].values
        assert found["largest"] == np.nanmax(flat)
        sharpest = data["name"].values[int(np.nanmax(flat, axis=(0, 2)).argmax())]
        assert str(headlines.with_intervals(data)["largest"]).endswith(f", in {sharpest}")


def _summary(arrays: dict[str, list[list[float]]], *, done: list[int]) -> xr.Dataset:
    arrays = {"converged": np.ones_like(arrays["eigenvalue"]), **arrays}
    values = {name: (("batch", "rank"), np.array(array, dtype=float)) for name, array in arrays.items()}
    return xr.Dataset({**values, "done": ("batch", np.array(done))}, attrs={"probe": "hessian"})


def test_a_search_that_is_cut_short_is_named_in_the_summary() -> None:
    subject: Subject = tanh_net()
    found = run_probe(Hessian(top=3, tol=1e-9, max_products=5), subject)
    names = ("eigenvalue", "converged")
    data = _summary({name: found[name] for name in names}, done=[1, 1])
    assert headlines.numbers(data)["not converged"] == "6 of 6 values, mini-batches 0, 1"


@pytest.mark.slow
def test_the_saddle_view_has_the_quadratic_model_over_the_loss(tmp_path: Path) -> None:
    matrix = symmetric([6.0, 2.0, 1.0, -3.0])
    subject = quadratic(matrix, batches=[torch.tensor([[1.0, 0.5]] * 4), torch.tensor([[1.0, 0.2]] * 2)])
    path = tmp_path / "results.h5"
    run(Surface(resolution="7", plane="eigen"), subject, path, label="bowl")
    ((_, data),) = reader.find(path, "surface")
    assert (data.attrs["curvature_x"], data.attrs["curvature_y"]) == pytest.approx((-3.0, 6.0), abs=1e-6)
    fitted = saddle.model(data, data["x"].values[:, None], data["y"].values[None, :])
    np.testing.assert_allclose(fitted, data["loss"].transpose("x", "y"), atol=1e-5)  # a quadratic is its own model
    axes = tuple(Figure().subplots(1, 2))
    assert saddle.draw(data, axes) is axes
    np.testing.assert_allclose(axes[1].lines[0].get_ydata(), data["loss"].transpose("x", "y")[:, 3])
    for line in axes[1].lines[1::2]:  # a parabola, however coarse the grid
        assert len(line.get_xdata()) > 100
    assert [drawn.stem for drawn in drawing.draw(path, tmp_path, figures=["saddle"])] == ["saddle"]
    assert saddle.select([data, data.drop_attrs()]) == [0]


def test_the_saddle_view_shows_its_band_whole() -> None:
    at, rise = np.linspace(-1.0, 1.0, 5), np.array([0.0, 3.0, 0.0, np.nan, np.inf])
    loss = np.where(at[:, None] ** 2 > 0.9, np.inf, 1.0) + 0.0 * at[None, :]
    facts = {"model_loss": 1.0, "slope_x": 0.0, "slope_y": 0.0, "curvature_x": 0.1, "curvature_y": 0.1}
    quantities = {"loss": loss, "rise_se": np.broadcast_to(rise, (5, 5)), "done": np.ones((5, 5))}
    data = xr.Dataset({name: (("x", "y"), values) for name, values in quantities.items()}, {"x": at, "y": at}, facts)
    data["rise_se"].attrs["n"] = np.inf
    _, lines = saddle.draw(data, tuple(Figure().subplots(1, 2)))
    low, high = lines.get_ylim()
    assert (low, high) == pytest.approx((1 - 1.2 * 3 * NORMAL, 1 + 1.2 * 3 * NORMAL))


@pytest.mark.slow
def test_the_figure_of_blocks_shows_every_density_and_the_distances(tmp_path: Path) -> None:
    subject = tanh_net(sizes=(6,))
    run(Density(vectors=2, steps=6, blocks="tensor"), subject, tmp_path / "results.h5", label="net")
    run(Density(vectors=2, steps=6), subject, tmp_path / "results.h5", label="net")
    drawn = [path.stem for path in drawing.draw(tmp_path / "results.h5", tmp_path)]
    assert drawn == ["density", "density_blocks"]
    assert drawing.left_out(tmp_path / "results.h5") == []
    data = next(data for _, data in reader.find(tmp_path / "results.h5", "density") if "block" in data.dims)
    spectra, matrix = density_blocks.draw(data, Figure().subplots(1, 2))
    assert [text.get_text() for text in spectra.get_yticklabels()] == list(subject.parameters)
    rows = np.asarray(spectra.collections[0].get_array(), dtype=float)
    np.testing.assert_allclose(np.nansum(10**rows, axis=1), 1.0, atol=1e-3)  # probabilities
    np.testing.assert_array_equal(matrix.images[0].get_array(), data["js_distance"])
    assert headlines.numbers(data)["heterogeneity"] == data["heterogeneity"]
    assert str(headlines.numbers(data)["heterogeneity is the"]).startswith("mean over pairs of blocks of sqrt(JSD)")
