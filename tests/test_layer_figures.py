"""Figures of layers, spectra and bands show the stored numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import synthetic
import torch
import xarray as xr
from drawable import result_of
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from scipy.integrate import trapezoid
from torch import Tensor, nn

import landscape
from landscape.plots import FIGURES, appearance, depth
from landscape.plots import depth as plots_depth
from landscape.plots.appearance import look_of
from landscape.plots.figures import hessian, lesion
from landscape.probe import NotApplicable
from landscape.probes import OWN, probe_class
from landscape.statistics.stored import half_width, unmeasured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantity"), [("fourier_depth", "high_frequency"), ("variance", "variance"), ("probe_linear", "accuracy")]
)
def test_lines_over_depth_are_the_stored_numbers_with_their_errors(study: Path, name: str, quantity: str) -> None:
    data = result_of(study, FIGURES[name].probe)
    ax = FIGURES[name].module.draw(data, Figure().subplots(), look=look_of(data))
    shown = np.isfinite(data[quantity].values)
    line, _, (bars,) = ax.containers[0]
    np.testing.assert_array_equal(line.get_xdata(), data["depth"].values[shown])
    np.testing.assert_array_equal(line.get_ydata(), data[quantity].values[shown])
    heights = [segment[1, 1] - segment[0, 1] for segment in bars.get_segments()]
    np.testing.assert_allclose(heights, 2 * half_width(data, quantity)[shown], rtol=1e-6)


def test_bands_span_each_attention_unit_and_each_reduction() -> None:
    kinds, reduces = ["stem", "msa", "mlp", "conv"], [0, 0, 0, 1]
    layers = {"kind": kinds, "reduces": reduces, "depth": [0, 1 / 3, 2 / 3, 1]}
    ax = depth.bands(xr.Dataset({key: ("layer", value) for key, value in layers.items()}), Figure().subplots())
    grey, blue = ax.patches
    assert (grey.get_x(), grey.get_x() + grey.get_width()) == pytest.approx((0, 1 / 3))
    assert (blue.get_x(), blue.get_x() + blue.get_width()) == pytest.approx((2 / 3, 1))
    assert grey.get_alpha() == blue.get_alpha() == 0.15
    assert to_rgb(blue.get_facecolor()[:3]) == to_rgb("tab:blue")


@pytest.mark.slow
def test_fourier_lines_end_at_each_layers_own_highest_frequency(study: Path) -> None:
    data = result_of(study, "fourier", "resnet50-cifar100")
    ax = FIGURES["fourier"].module.draw(data, Figure().subplots())
    ends = [line.get_xdata()[-1] for line in ax.lines]
    np.testing.assert_array_equal(ends, np.nanmax(data["frequency"].values, axis=1))
    np.testing.assert_array_equal([line.get_ydata()[-1] for line in ax.lines], data["high_frequency"].values)


def test_the_density_of_each_side_is_that_of_scipy_at_the_same_bandwidth_reflected_at_0() -> None:
    values = np.random.default_rng(0).normal(size=200)
    at = np.linspace(-3, 3, 50)
    for own, there in ((values[values < 0], at < 0), (values[values > 0], at > 0)):
        width = 0.9 * min(own.std(ddof=1), scipy.stats.iqr(own) / 1.34) * own.size**-0.2
        kernels = scipy.stats.gaussian_kde(own, bw_method=width / own.std(ddof=1))
        expected = (kernels(at[there]) + kernels(-at[there])) * own.size / 200
        np.testing.assert_allclose(hessian.density(values, at)[there], expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("negative", [0, 1, 9, 10, 40, 100])
def test_the_areas_of_the_spectrum_are_the_share_of_each_side_with_ten_eigenvalues(negative: int) -> None:
    rng = np.random.default_rng(negative)
    values = np.concatenate([-rng.exponential(3.0, negative), rng.exponential(200.0, 100 - negative)])
    for at, share in (
        (np.linspace(-60, 0, 20_001), negative / 100 if negative >= 10 else 0),
        (np.linspace(0, 3000, 20_001), 1 - negative / 100),
    ):
        assert trapezoid(hessian.density(values, at), at) == pytest.approx(share, abs=1e-3)


@pytest.mark.slow
def test_both_panels_of_the_spectrum_show_the_density_of_all_values_on_one_scale(study: Path) -> None:
    data = result_of(study, "hessian")
    left, right = hessian.draw(
        data, tuple(Figure().subplots(1, 2)), look=look_of(data), ranges=((-400.0, 0.0), (0.0, 1500.0))
    )
    area = sum(trapezoid(ax.lines[0].get_ydata(), ax.lines[0].get_xdata()) for ax in (left, right))
    assert area == pytest.approx(1.0, abs=0.01)
    assert (left.get_xlim()[1], right.get_xlim()[0]) == (0, 0)
    assert left.get_ylim() == right.get_ylim()


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0], [-1.0, -1.0], [0.0]])
def test_a_few_equal_eigenvalues_still_draw(values: list[float]) -> None:
    data = xr.Dataset({"eigenvalue": (("batch", "rank"), [values])}, attrs={"label": "vit"})
    for ax in hessian.draw(data, tuple(Figure().subplots(1, 2)), look=look_of(data)):
        assert np.isfinite(ax.lines[0].get_ydata()).all()


@pytest.mark.slow
def test_lesion_bars_are_the_stored_drops_coloured_by_kind(study: Path) -> None:
    data = result_of(study, "lesion")
    ax = lesion.draw(data, Figure().subplots())
    bars = ax.containers[1] if len(ax.containers) > 1 else ax.containers[0]
    np.testing.assert_array_equal([bar.get_height() for bar in bars], data["accuracy_drop"].values)
    assert {to_rgb(bar.get_facecolor()[:3]) for bar in bars[1:]} == {to_rgb(lesion.KINDS[k]) for k in ("msa", "mlp")}
    assert [label.get_text() for label in ax.get_xticklabels()][:2] == ["0.stem", "1.msa"]


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["lesion", "noise"])
def test_a_loss_without_accuracy_is_drawn_beside_one_with_it(study: Path, probe: str) -> None:
    data = [result_of(study, probe, network.label) for network in synthetic.NETWORKS[:2]]
    other = data[1].copy(deep=True)
    for name in ("accuracy_drop", "accuracy_drop_se"):
        other[name][:] = np.nan
    figure = FIGURES[probe]
    assert figure.drawable(other)
    page = figure.module.page([data[0], other], appearance.looks([data[0], other]))
    labels = [ax.get_ylabel() for ax in page.axes]
    increases = 1 if probe == "noise" else 2
    assert labels.count("accuracy drop") == 1
    assert sum(label.startswith("loss increase") for label in labels) == increases
    ax = getattr(landscape.plots, probe)(other, ax=Figure().subplots())
    assert ax.get_ylabel().startswith("loss increase")
    drawn = ax.lines[0].get_ydata() if probe == "noise" else [bar.get_height() for bar in ax.containers[-1]]
    np.testing.assert_array_equal(drawn, other["loss_increase"].dropna("band" if probe == "noise" else "unit").values)


@pytest.mark.slow
def test_a_removal_that_blows_up_the_loss_does_not_hide_the_others(study: Path) -> None:
    data = result_of(study, "lesion").copy(deep=True)
    assert lesion.bars(data, Figure().subplots(), "loss_increase", "loss").get_yscale() == "linear"
    data["loss_increase"][:2] = [np.inf, 1e20]
    ax = lesion.bars(data, Figure().subplots(), "loss_increase", "loss")
    assert ax.get_yscale() == "symlog"
    assert np.isfinite(ax.get_ylim()).all()


@pytest.mark.slow
def test_noise_is_drawn_with_its_interval_and_without_empty_bands(study: Path) -> None:
    data = result_of(study, "noise")
    ax = FIGURES["noise"].module.draw(data, Figure().subplots(), look=look_of(data))
    shown = np.isfinite(data["accuracy_drop"].values)
    assert shown.sum() == 8
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), data["band"].values[shown])
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), data["accuracy_drop"].values[shown])
    top = ax.collections[0].get_datalim(ax.transData).y1
    upper = data["accuracy_drop"] + half_width(data, "accuracy_drop")
    assert top == pytest.approx(upper.max().item())


@pytest.mark.slow
def test_spectra_are_tiles_at_their_true_frequencies_with_one_scale(study: Path) -> None:
    data = [result_of(study, "fourier", network.label) for network in synthetic.NETWORKS[:2]]
    module = FIGURES["fourier_spectrum"].module
    page = module.page(data, appearance.looks(data))
    scales = {image.norm for ax in page.axes for image in ax.images}
    assert len(scales) == 1
    left_out = [one.sizes["layer"] for one in data if len(module.shown(one)) < one.sizes["layer"]]
    text = " ".join(" ".join(text.get_text() for text in page.texts).split())
    assert left_out
    assert all(f"{module.TILES} of {count}" in text for count in left_out)
    assert "layers, evenly spaced." in text
    for one, ax in zip(data, page.axes, strict=False):
        layers = module.shown(one)
        assert layers[0] == 0
        assert layers[-1] == one.sizes["layer"] - 1
        assert len(ax.images) == len(layers) <= module.TILES
        for place, (layer, image) in enumerate(zip(layers, ax.images, strict=True)):
            side = int(one["row_frequency"][layer].notnull().sum())
            np.testing.assert_array_equal(image.get_array(), one["spectrum"].values[layer, :side, :side])
            edges = -1 - 1 / side, 1 - 1 / side  # the middle of the first cell is -pi, of an even side
            np.testing.assert_allclose(image.get_extent(), (*(np.array(edges) + place * module.PITCH), *edges))
            assert np.unravel_index(np.nanargmax(image.get_array()), (side, side)) == (side // 2, side // 2)


@pytest.mark.slow
def test_the_classifier_of_linear_probes_is_named(study: Path) -> None:
    data = [result_of(study, "probe-linear", network.label) for network in synthetic.NETWORKS[:2]]
    module = FIGURES["probe_linear"].module
    text = " ".join(text.get_text() for text in module.page(data, appearance.looks(data)).texts)
    assert "Classifier: ridge regression." in " ".join(text.split())
    other = data[1].assign_attrs(parameters='{"solver": "lbfgs"}')
    text = " ".join(text.get_text() for text in module.page([data[0], other], appearance.looks([data[0], other])).texts)
    assert "ridge regression: " in " ".join(text.split())
    assert "logistic regression: " in " ".join(text.split())


@pytest.mark.slow
def test_a_linear_probe_is_drawn_beside_the_network_itself(study: Path) -> None:
    data = result_of(study, "probe-linear")
    *_, own = FIGURES["probe_linear"].module.draw(data, Figure().subplots(), look=look_of(data)).lines
    assert own.get_ydata() == [0.75, 0.75]


@pytest.mark.slow
def test_kinds_of_noise_have_a_panel_each(study: Path) -> None:
    data = [result_of(study, "noise", network.label) for network in synthetic.NETWORKS[:2]]
    other = data[0].assign_attrs(parameters='{"eps": "0.3", "equal_energy": true}')
    page = FIGURES["noise"].module.page([*data, other], appearance.looks([*data, other]))
    titles = [ax.get_title() for ax in page.axes]
    assert titles == ["eps 0.7, equal amplitude per pixel", "eps 0.3, equal energy in every band"]
    assert [len(ax.collections) for ax in page.axes] == [2, 1]


def test_lines_over_depth_break_where_layers_are_missing() -> None:
    depth = np.array([0.0, 0.1, 0.2, 0.7, 0.8, 1.0])
    data = xr.Dataset(
        {
            "variance": ("layer", np.arange(6.0)),
            "depth": ("layer", depth),
            "kind": ("layer", ["conv"] * 5 + ["smoothing"]),
        }
    )
    (line, *_) = plots_depth.over_depth(data, Figure().subplots(), "variance", look=look_of(data), shade=False).lines
    assert np.flatnonzero(np.isnan(line.get_ydata())).tolist() == [3, 6]


# --- What is NaN although all was measured has a reason, which is stored and said, whatever the probe ---


SMALLER = {"sensitivity": {"bits": "4"}}


class _Gate(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc(x.mean((2, 3), keepdim=True)))


class _Attending(nn.Module):
    """Self-attention of one or two heads to patches; no class token."""

    def __init__(self, patch: int, heads: int) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, patch, patch), nn.LayerNorm(8), nn.Linear(8, 5)
        self.attention = nn.MultiheadAttention(8, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), need_weights=False)[0]
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def _single_positions() -> nn.Module:
    stem = (nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), _Gate(8), nn.Conv2d(8, 8, 8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU())
    return nn.Sequential(*stem, nn.Flatten(), nn.Linear(8, 5))


def _dead() -> nn.Module:
    layers = [module for i in range(3) for module in (nn.Conv2d(8 if i else 3, 8, 3, 1, 1), nn.ReLU())]
    for parameter in layers[2].parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "maps of one position": _single_positions, "a layer of zeros": _dead,
    "one token": lambda: _Attending(16, 1), "one head": lambda: _Attending(4, 1), "two heads": lambda: _Attending(4, 2),
}  # fmt: skip
OF_LAYERS = [name for name in OWN if probe_class(name)().layers is not None]


@pytest.mark.parametrize("network", [pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS])
def test_a_layer_without_a_number_has_a_reason(network: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    torch.manual_seed(0)
    data = torch.randn(24, 3, 16, 16), torch.arange(24) % 5
    subject = landscape.load(NETWORKS[network]().eval(), data=data, batch_size=12)
    found = []
    for name in OF_LAYERS:
        probe = probe_class(name)(**{**probe_class(name).smallest, **SMALLER.get(name, {})})
        try:
            result = landscape.measure(probe, subject, out=None)
        except (NotApplicable, ValueError):  # says so itself
            continue
        plan = probe.plan(subject)
        for quantity in (plan.summaries or plan.quantities).keys() - {q for q in result if str(q).endswith("_se")}:
            values = result[quantity]
            finite = values.notnull().any(dim=[dim for dim in values.dims if dim != "layer"]).values
            why = result.attrs.get(f"{quantity}_unmeasured", "")
            names = result["name"].values[~finite] if "layer" in values.dims else [why] * int(not finite)
            assert all(layer and str(layer) in why for layer in names), (name, quantity, names, why)
            found += [(name, quantity)] * len(names)
    assert found
    assert len([text for text in caplog.messages if " NaN in " in text]) >= len({name for name, _ in found})


def test_layers_with_the_same_reason_share_it() -> None:
    found = unmeasured([("cka", "a", "still"), ("cka", "b", "dead"), ("cka", "c", "still"), ("nc3", "", "one class")])
    assert found == {"cka_unmeasured": "a, c: still; b: dead", "nc3_unmeasured": "one class"}
