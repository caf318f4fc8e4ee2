"""Figures: every one draws, finished or not, shows the stored numbers, and leaves no trace in global state."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import matplotlib
import numpy as np
import pytest
import scipy.stats
import synthetic
import xarray as xr
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.figure import Figure
from PIL import Image

import landscape
from landscape.options import OptionError
from landscape.plots import (
    FIGURES,
    STUDIES,
    animation,
    appearance,
    depth,
    drawing,
    headlines,
    hessian,
    lesion,
    park2022,
    style,
    surface,
    surface_error,
    surface_heat,
    surface_height,
    theme,
)
from landscape.plots import depth as plots_depth
from landscape.plots.figure import Headlined, checked
from landscape.plots.selection import Selection
from landscape.plots.tidy import _shown, _touch, tidied
from landscape.probes import PROBES
from landscape.results import reader

VIT = synthetic.NETWORKS[0].label
# Of some results only: tests of their own.
SPECIAL = {"hessian_phases", "hessian_layers", "saddle", "noise_pictures", "calibration_train"}
EVERYDAY = [name for name in FIGURES if name not in SPECIAL]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write(tmp_path_factory.mktemp("study") / "results.h5")


@pytest.fixture(scope="module")
def drawn(study: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return drawing.draw(study, tmp_path_factory.mktemp("figures"))


def result_of(study: Path, probe: str, label: str = VIT) -> xr.Dataset:
    ((_, data),) = reader.find(study, probe=probe, label=label)
    return data


def axes_for(name: str) -> Any:
    return FIGURES[name].axes_in(Figure())


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_module_offers_what_a_figure_needs(name: str) -> None:
    module = FIGURES[name].module  # loading checks it
    assert callable(module.draw)
    assert callable(module.page)
    assert isinstance(module, Headlined) == (name == FIGURES[name].probe.replace("-", "_"))


def test_every_probe_has_a_figure_of_its_name_with_its_headline() -> None:
    for probe in PROBES:
        figure = FIGURES[probe.replace("-", "_")]
        assert figure.probe == probe
        assert isinstance(figure.module, Headlined)
        assert headlines.headline_function(probe) == figure.module.headline


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("MEANING = ''\ndef draw(): ...\ndef pagee(): ...", "wrong lacks page"),
        ("MEANING = 1\ndef draw(): ...\ndef page(): ...", "wrong.MEANING is a int, expected a str"),
        ("MEANING = ''\ndraw = 1\ndef page(): ...", "wrong.draw is a int, expected a function"),
        ("MEANING = ''\ndef draw(): ...\ndef page(): ...\ndef headlin(): ...", "wrong.headlin .* misspelt headline"),
        ("MEANING = ''\ndef draw(): ...\ndef page(): ...\ndef selekt(): ...", "wrong.selekt .* misspelt select"),
    ],
)
def test_a_misspelt_figure_module_is_rejected_by_name(lines: str, said: str) -> None:
    module = ModuleType("wrong")
    exec(lines, vars(module))
    with pytest.raises(TypeError, match=said):
        checked(module)


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_figure_returns_the_axes_it_was_given(study: Path, name: str) -> None:
    axes = axes_for(name)
    assert FIGURES[name].module.draw(result_of(study, FIGURES[name].probe), axes) is axes


@pytest.mark.parametrize("name", EVERYDAY)
def test_every_figure_is_a_function_that_draws_into_a_subfigure_or_a_page(study: Path, name: str) -> None:
    draw: Any = getattr(landscape.plots, name)
    _, under = Figure(layout="constrained").subfigures(2, 1)
    drawn = draw(str(study), under, only=VIT if FIGURES[name].probe != "ensemble" else ())
    assert set(drawn if isinstance(drawn, tuple) else [drawn]) <= set(under.axes)
    data = result_of(study, FIGURES[name].probe)
    page = draw(data, columns=1, title="A title")
    assert (page.get_figwidth(), page.get_suptitle()) == (3.25, "A title")


def test_a_figure_in_the_users_axes_is_drawn_over_what_is_there(study: Path) -> None:
    data = [result_of(study, "variance", network.label) for network in synthetic.NETWORKS]
    ax = Figure().subplots()
    assert landscape.plots.variance(data, ax) is ax  # type: ignore[operator]
    assert len(ax.containers) == 3
    assert len({drawn.lines[0].get_color() for drawn in ax.containers}) == 3


def test_figures_from_python_fail_in_one_line(study: Path) -> None:
    draw: Any = landscape.plots
    with pytest.raises(ValueError, match=r"surface_3d needs 1 axes \(3d\), got plain; give these or a \(sub\)figure"):
        draw.surface_3d(result_of(study, "surface"), Figure().subplots())
    with pytest.raises(ValueError, match=r"surface draws one result into axes, got 3; choose one with only=.*vit_ti"):
        draw.surface(study, Figure().subplots())
    with pytest.raises(ValueError, match="variance draws finished variance, depth, kind, reduces of landscape var"):
        draw.variance(result_of(study, "surface"))
    with pytest.raises(OptionError, match="--style must be screen, paper or dark, got bright"):
        draw.surface(study, style="bright")
    with pytest.raises(AttributeError, match="has no attribute surfaces; its figures are surface, "):
        _ = draw.surfaces


def test_a_figure_shows_itself_in_a_notebook_and_keeps_truetype_fonts(study: Path) -> None:
    page = landscape.plots.variance(result_of(study, "variance"), columns=1)  # type: ignore[operator]
    with Image.open(io.BytesIO(page._repr_png_())) as image:
        assert abs(image.width - 3.25 * 150) < 1
    saved = io.BytesIO()
    page.savefig(saved, format="pdf")
    assert b"/CIDFontType2" in saved.getvalue()
    assert b"/Type3" not in saved.getvalue()


def test_every_figure_has_a_line_in_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "figures.md").read_text()
    assert [name for name in FIGURES if f"| `{name}` | " not in page] == []
    assert [name for name in STUDIES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_it_means_in_two_sentences(name: str) -> None:
    assert FIGURES[name].module.MEANING.count(". ") == 1


@pytest.mark.parametrize("name", STUDIES)
def test_every_figure_of_several_probes_offers_what_drawing_needs(name: str) -> None:
    module = import_module(f"landscape.plots.{STUDIES[name]}")
    assert module.MEANING.count(". ") == 1
    assert module.studies([]) == []
    assert callable(module.page)


@pytest.mark.slow
def test_every_figure_becomes_a_file_of_a_paper_width(drawn: list[Path]) -> None:
    assert [path.stem for path in drawn] == EVERYDAY
    for path in drawn:
        with Image.open(path) as image:
            assert image.width == round(style.PAGE * style.RC["savefig.dpi"])
            inked = np.asarray(image.convert("L")) < 200
        assert not inked[:, [0, 1, -2, -1]].any(), f"{path.stem} is cut off at its left or right edge"


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.001, 0.4])
def test_a_half_finished_file_draws_every_figure(tmp_path: Path, share: float) -> None:
    path = synthetic.write(tmp_path / "half.h5", [synthetic.transformer("vit", depth=3)], share=share)
    assert [figure.stem for figure in drawing.draw(path, tmp_path / "figures")] == EVERYDAY


def test_a_figure_of_unfinished_results_says_how_much_of_them_is_there(tmp_path: Path) -> None:
    one = {"networks": synthetic.NETWORKS[:1], "probes": ("surface",)}
    paths = [synthetic.write(tmp_path / f"{share}.h5", **one, share=share) for share in (0.4, 1.0)]
    results = [reader.groups(path)[0][1] for path in paths]
    half, whole = (landscape.plots.surface(result) for result in results)
    label, done = results[0].attrs["label"], reader.finished_units(results[0])
    assert 0 < done < results[0]["done"].size
    assert [text.get_text() for text in half.texts if "Unfinished" in text.get_text()] == [
        f"Unfinished: {label} {done} of {results[0]['done'].size} units."
    ]
    assert not any("Unfinished" in text.get_text() for text in whole.texts)


def test_a_probe_without_made_up_numbers_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "MADE_UP", {})
    path = synthetic.write(tmp_path / "new.h5", synthetic.NETWORKS[:1], probes=("variance",), share=0.4)
    assert "variance" in [figure.stem for figure in drawing.draw(path, tmp_path)]


def test_a_result_with_nothing_finished_is_left_out_and_named(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "empty.h5", synthetic.NETWORKS[:1], probes=("hessian", "lesion"), share=0.0)
    synthetic.write(path, synthetic.NETWORKS[:1], probes=("variance",))
    assert {FIGURES[figure.stem].probe for figure in drawing.draw(path, tmp_path)} == {"variance"}
    assert [name.partition("/")[0] for name in drawing.left_out(path)] == ["hessian", "lesion"]


@pytest.mark.slow
def test_every_format_is_written_and_text_stays_text(study: Path, tmp_path: Path) -> None:
    written = drawing.draw(study, tmp_path, formats=("pdf", "svg"), probes=("variance",))
    pdf, svg = tmp_path / "variance.pdf", tmp_path / "variance.svg"
    assert {pdf, svg} <= set(written)
    assert b"/Type3" not in pdf.read_bytes()  # fonts as outlines without names, which publishers refuse
    assert b"/CIDFontType2" in pdf.read_bytes()  # TrueType
    words = "".join(ElementTree.parse(svg).getroot().itertext())
    assert "normalised depth" in words
    assert "batch size 128" in words  # the protocol is on the figure


@pytest.mark.slow
def test_equal_results_give_equal_files(study: Path, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        drawing.draw(study, tmp_path / folder, formats=("svg", "pdf"), probes=("hessian",))
    for name in ("hessian.svg", "hessian.pdf"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.slow
def test_drawing_leaves_the_callers_style_alone(study: Path, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    drawing.draw(study, tmp_path, probes=("variance",))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
@pytest.mark.parametrize("label", ["_hidden", "a$b$_{", "模型", "<b>bold", "x" * 200])
def test_any_label_can_be_drawn(tmp_path: Path, label: str) -> None:
    path = synthetic.write(tmp_path / "r.h5", [synthetic.transformer(label, depth=2)], probes=("hessian", "variance"))
    assert {FIGURES[figure.stem].probe for figure in drawing.draw(path, tmp_path)} == {"hessian", "variance"}


def test_chosen_checkpoints_are_drawn_in_the_order_asked_for_under_their_new_names(study: Path) -> None:
    selection = Selection(only=("resnet*", VIT), labels={VIT: "ViT $"}, colors={VIT: "#123456"})
    found = [data for _, data in selection.of(reader.find(study, probe="variance"))]
    assert [data.attrs["label"] for data in found] == ["resnet50-cifar100", "ViT $"]
    assert [look.color == "#123456" for look in selection.looks(found, found)] == [False, True]
    for wrong in (Selection(only=("nobody",)), Selection(labels={"nobody": "x"}), Selection(colors={"nobody": "red"})):
        with pytest.raises(OptionError, match=f"must be a label of the file, such as .*{VIT}.*, got nobody"):
            wrong.of(reader.find(study, probe="variance"))


def test_only_the_figures_asked_for_are_drawn_and_one_that_cannot_be_is_named(
    study: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        drawn = drawing.draw(study, tmp_path, figures=("variance", "saddle"))
    assert [path.name for path in drawn] == ["variance.png"]
    assert [r.getMessage() for r in caplog.records if "saddle" in r.getMessage()] == [
        "no figure saddle: the results hold no finished loss, rise_se, done, x, y of landscape surface"
    ]
    with pytest.raises(OptionError, match=r"--figure must be .*variance.*, got varience"):
        drawing.draw(study, tmp_path, figures=("varience",))


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "width"), [(1, 3.25), (2, 6.75)])
def test_every_figure_is_as_wide_as_the_columns_asked_for(
    study: Path, tmp_path: Path, columns: int, width: float
) -> None:
    page = theme.Theme("paper", columns, "A title with $ and <b>")
    for path in drawing.draw(study, tmp_path, figures=("surface", "surface_relief", "hessian", "lesion"), theme=page):
        with Image.open(path) as image:
            assert image.width == round(300 * width)


def test_the_layout_of_the_paper_holds_every_network_and_names_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probes = ("surface", "hessian", "fourier", "variance", "lesion")
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS, probes=probes)
    with caplog.at_level("INFO"):
        drawn = drawing.draw_layout(path, tmp_path, theme=theme.Theme(columns=2))
    assert [file.name for file in drawn] == ["park2022_weights.png", "park2022_features.png"]
    assert [r.getMessage() for r in caplog.records] == ["park2022_weights: nothing of landscape trajectory yet"]
    results = [data for name, data in reader.groups(path) if name.startswith("hessian")]
    parts = park2022.PAGES["park2022_weights"]
    found = dict.fromkeys((part.figure for part in parts), park2022.one_each(results, appearance.looks(results)))
    page = park2022.page(parts, {**found, "surface_3d": [], "trajectory": []})
    texts = " ".join(" ".join(text.get_text().split()) for text in page.texts)
    assert "Not measured: landscape surface, landscape trajectory." in texts
    assert [len(ax.lines) for ax in page.axes] == [3, 3]
    assert {text.get_text() for text in page.legends[0].get_texts()} == {n.label for n in synthetic.NETWORKS}


def _snapshot(data: xr.Dataset, epoch: int) -> xr.Dataset:
    spec = json.dumps({"checkpoint": f"runs/a/epoch_{epoch}.pt"})
    return data.assign_attrs(epoch=float(epoch), spec=spec).assign(loss=data["loss"] / (1 + epoch))


@pytest.mark.slow
def test_an_animation_shows_the_epochs_in_order_on_common_colours(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = result_of(study, "surface")
    stored = [("surface/x", _snapshot(data, epoch)) for epoch in (3, 1, 2)]
    monkeypatch.setattr(reader, "find", lambda *_: stored)
    epochs = animation.animate("r.h5", tmp_path / "a.gif", selection=Selection(), theme=theme.Theme(), rate=4)
    assert epochs == [1.0, 2.0, 3.0]
    with Image.open(tmp_path / "a.gif") as picture:
        assert (picture.n_frames, picture.info["duration"]) == (3, 250)  # type: ignore[attr-defined]
        assert picture.width == 675
    with theme.applied(theme.SCREEN):
        looks = appearance.looks([one for _, one in stored])
        frames = list(animation._frames([one for _, one in stored], looks, "surface"))
    bar = np.s_[:, -90:]  # the colour bar is the same in all frames, the surface is not
    assert all((frame[bar] == frames[0][bar]).all() for frame in frames)
    assert not (frames[0] == frames[1]).all()


def test_an_animation_that_cannot_be_made_says_why(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"selection": Selection(), "theme": theme.Theme()}
    with pytest.raises(ValueError, match=r"holds no run with results of surface at two epochs .* RUN/epoch_\*\.pt"):
        animation.animate(study, tmp_path / "a.gif", **options)
    with pytest.raises(OptionError, match=r"--out must be a file that ends in \.gif or \.mp4"):
        animation.animate(study, tmp_path / "a.avi", **options)
    with pytest.raises(OptionError, match="--figure must be one of surface, surface_3d, hessian, got line"):
        animation.animate(study, tmp_path / "a.gif", "line", **options)
    monkeypatch.setattr(animation.shutil, "which", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"MP4 needs ffmpeg.* give --out animation\.gif"):
        animation._write(tmp_path / "a.mp4", [np.zeros((4, 4, 3), np.uint8)], 2.0)
    assert not (tmp_path / "a.mp4").exists()


@pytest.mark.slow
def test_tick_labels_do_not_touch_and_no_text_is_too_small_at_print_size(study: Path) -> None:
    for columns in (1, 2):
        for name in EVERYDAY:
            with theme.applied(theme.Theme("paper", columns)):
                page = getattr(landscape.plots, name)(study, columns=columns)
                tidied(page)
                page.dpi = matplotlib.rcParams["savefig.dpi"]
            for ax in page.axes:
                for side, axis in enumerate((ax.xaxis, ax.yaxis) if ax.name == "rectilinear" else ()):
                    labels = _shown(axis)
                    assert not any(_touch(one, other, side) for one, other in itertools.pairwise(labels)), (
                        name,
                        columns,
                    )
                sizes = [text.get_fontsize() for text in ax.findobj(matplotlib.text.Text) if text.get_text()]
                assert min(sizes, default=6.0) >= 6.0, (name, columns)


def test_unknown_formats_and_probes_are_usage_errors(study: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown format gif; expected png, pdf, svg"):
        drawing.draw(study, tmp_path, formats=("gif",))
    with pytest.raises(OptionError, match="probe nobody"):
        drawing.draw(study, tmp_path, probes=("nobody",))
    with pytest.raises(ValueError, match="expected a folder"):
        drawing.draw(study, study)


def test_families_have_their_colours_and_markers(study: Path) -> None:
    data = [result_of(study, "variance", network.label) for network in synthetic.NETWORKS]
    vit, resnet, alternet = appearance.looks(data)
    assert (vit.color, vit.marker) == ("tab:red", "o")
    assert (resnet.color, resnet.marker) == ("tab:blue", "D")
    assert alternet.color not in (vit.color, resnet.color)


@pytest.mark.parametrize(
    ("model", "family"),
    [("vit_demo", "ViT"), ("timm:deit_small", "ViT"), ("preresnet_demo", "ResNet"), ("resnext50", "ResNet"),
     ("alternet_demo", "AlterNet"), ("pit_ti", "PiT"), ("swin_ti", "Swin"), ("net.py:make", "net.py:make")],
)  # fmt: skip
def test_a_family_is_known_by_the_models_name(model: str, family: str) -> None:
    assert appearance.family(xr.Dataset(attrs={"model": model, "label": "final"})) == family


def test_eight_checkpoints_of_three_families_look_all_different() -> None:
    models = ["vit_ti", "vit_s", "vit_b", "resnet18", "resnet50", "a.py:f", "b.py:g", "vit_l"]
    found = appearance.looks([xr.Dataset(attrs={"model": model, "label": model}) for model in models])
    assert len({(to_rgb(look.color), look.line) for look in found}) == len(models)
    assert found[-1].color == "tab:red"  # the last of a family is pure


def _contrast(color: appearance.Color, ground: str) -> float:
    """The contrast ratio of WCAG 2.1."""

    def luminance(of: appearance.Color) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(of)]
        return float(np.dot((0.2126, 0.7152, 0.0722), linear))

    low, high = sorted((luminance(color), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("style_name", theme.STYLES)
@pytest.mark.parametrize("count", [6, 12])
@pytest.mark.parametrize("model", ["net.py:net{}", "vit_{}"])
def test_many_models_differ_in_hue_marker_and_dash_and_stand_out_from_the_page(
    model: str, count: int, style_name: str
) -> None:
    networks = [xr.Dataset(attrs={"model": model.format(i), "label": f"run {i}"}) for i in range(count)]
    with theme.applied(theme.Theme(style_name)):
        found, ground = appearance.looks(networks), theme.ground()
    cues = [(to_rgb(look.color), look.marker, look.line) for look in found]
    assert [len(set(cue)) for cue in zip(*cues, strict=True)] == [count] * 3
    assert min(_contrast(look.color, ground) for look in found) >= 3.0
    colors = itertools.combinations((np.array(to_rgb(look.color)) for look in found), 2)
    assert min(np.linalg.norm(one - other) for one, other in colors) > 0.2


def test_an_ensemble_does_not_take_the_colour_of_its_first_member() -> None:
    network, ensemble = (
        xr.Dataset(attrs={"model": "vit_ti", "label": label, "probe": probe})
        for label, probe in (("vit", "hessian"), ("vit + 2", "ensemble"))
    )
    assert [look.color == "tab:red" for look in appearance.looks([network, ensemble])] == [True, False]


def test_a_checkpoint_looks_the_same_in_every_figure_of_a_study() -> None:
    study = [xr.Dataset(attrs={"model": "vit_ti", "label": label}) for label in ("start", "end")]
    alone, together = appearance.looks(study[:1], among=study)[0], appearance.looks(study)[0]
    assert alone == together


def test_results_of_one_label_are_distinguished_by_what_differs() -> None:
    same = {"label": "vit", "model": "vit_ti"}
    data = [xr.Dataset(attrs={**same, "parameters": f'{{"seed": {seed}, "tol": 0.1}}'}) for seed in (0, 1)]
    assert appearance.names(data) == ["vit (seed 0)", "vit (seed 1)"]


def test_a_name_says_what_distinguishes_results_and_not_the_backend_of_products() -> None:
    stored = [("lanczos", "kept", ""), ("pyhessian", "auto", ""), ("lanczos", "kept", "a/mine.py:f")]
    data = [
        xr.Dataset(attrs={"label": "vit", "parameters": json.dumps({"hvp": hvp, "engine": engine, "top": 5}),
                          "spec": json.dumps({"loss": loss})})
        for engine, hvp, loss in stored
    ]  # fmt: skip
    assert appearance.names(data) == [
        "vit (engine lanczos, loss cross-entropy)",
        "vit (engine pyhessian, loss cross-entropy)",
        "vit (engine lanczos, loss mine.py:f)",
    ]


def test_results_are_distinguished_even_if_the_first_three_differences_do_not_suffice() -> None:
    stored: list[dict[str, object]] = [
        {"resolution": 5, "plane": "random", "preview": False, "cap": 1, "seed": 0},
        {"resolution": 5, "plane": "random", "preview": False, "cap": 1, "seed": 1},
        {"resolution": 9, "plane": "/home/me/runs/long/", "preview": True, "cap": 2, "seed": 0},
    ]
    data = [xr.Dataset(attrs={"label": "vit", "parameters": json.dumps(parameters)}) for parameters in stored]
    assert appearance.names(data) == [
        "vit (plane random, seed 0)",
        "vit (plane random, seed 1)",
        "vit (plane long, seed 0)",
    ]
    others = [{"plane": "/home/me/runs/long/", "preview": False}, {"plane": "random", "preview": False}]
    data = [xr.Dataset(attrs={"label": "vit", "parameters": json.dumps(parameters)}) for parameters in others]
    assert appearance.names(data) == ["vit (plane long)", "vit (plane random)"]
    others = [{"preview": False}, {"preview": True}]
    data = [xr.Dataset(attrs={"label": "vit", "parameters": json.dumps(parameters)}) for parameters in others]
    assert appearance.names(data) == [
        "vit (no preview)",
        "vit (preview)",
    ]


@pytest.mark.parametrize(
    ("name", "quantity"), [("fourier_depth", "high_frequency"), ("variance", "variance"), ("probe_linear", "accuracy")]
)
def test_lines_over_depth_are_the_stored_numbers_with_their_errors(study: Path, name: str, quantity: str) -> None:
    data = result_of(study, FIGURES[name].probe)
    ax = FIGURES[name].module.draw(data, Figure().subplots())
    shown = np.isfinite(data[quantity].values)
    line, _, (bars,) = ax.containers[0]
    np.testing.assert_array_equal(line.get_xdata(), data["depth"].values[shown])
    np.testing.assert_array_equal(line.get_ydata(), data[quantity].values[shown])
    heights = [segment[1, 1] - segment[0, 1] for segment in bars.get_segments()]
    np.testing.assert_allclose(heights, 2 * data[f"{quantity}_se"].values[shown], rtol=1e-6)


def test_bands_span_each_attention_unit_and_each_reduction() -> None:
    kinds, reduces = ["stem", "msa", "mlp", "conv"], [0, 0, 0, 1]
    layers = {"kind": kinds, "reduces": reduces, "depth": [0, 1 / 3, 2 / 3, 1]}
    ax = depth.bands(xr.Dataset({key: ("layer", value) for key, value in layers.items()}), Figure().subplots())
    grey, blue = ax.patches
    assert (grey.get_x(), grey.get_x() + grey.get_width()) == pytest.approx((0, 1 / 3))
    assert (blue.get_x(), blue.get_x() + blue.get_width()) == pytest.approx((2 / 3, 1))
    assert grey.get_alpha() == blue.get_alpha() == 0.15
    assert to_rgb(blue.get_facecolor()[:3]) == to_rgb("tab:blue")


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


@pytest.mark.parametrize("negative", [0, 1, 5, 40, 100])
def test_the_areas_of_the_spectrum_are_the_share_of_negative_eigenvalues_and_the_rest(negative: int) -> None:
    rng = np.random.default_rng(negative)
    values = np.concatenate([-rng.exponential(3.0, negative), rng.exponential(200.0, 100 - negative)])
    for at, share in (
        (np.linspace(-60, 0, 20_001), negative / 100),
        (np.linspace(0, 3000, 20_001), 1 - negative / 100),
    ):
        assert np.trapezoid(hessian.density(values, at), at) == pytest.approx(share, abs=1e-3)


def test_both_panels_of_the_spectrum_show_the_density_of_all_values_on_one_scale(study: Path) -> None:
    data = result_of(study, "hessian")
    left, right = hessian.draw(data, tuple(Figure().subplots(1, 2)), ranges=((-400.0, 0.0), (0.0, 1500.0)))
    area = sum(np.trapezoid(ax.lines[0].get_ydata(), ax.lines[0].get_xdata()) for ax in (left, right))
    assert area == pytest.approx(1.0, abs=0.01)
    assert (left.get_xlim()[1], right.get_xlim()[0]) == (0, 0)
    assert left.get_ylim() == right.get_ylim()


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0], [-1.0, -1.0], [0.0]])
def test_a_few_equal_eigenvalues_still_draw(values: list[float]) -> None:
    data = xr.Dataset({"eigenvalue": (("batch", "rank"), [values])}, attrs={"label": "vit"})
    for ax in hessian.draw(data, tuple(Figure().subplots(1, 2))):
        assert np.isfinite(ax.lines[0].get_ydata()).all()


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


def test_lesion_bars_are_the_stored_drops_coloured_by_kind(study: Path) -> None:
    data = result_of(study, "lesion")
    ax = lesion.draw(data, Figure().subplots())
    bars = ax.containers[1] if len(ax.containers) > 1 else ax.containers[0]
    np.testing.assert_array_equal([bar.get_height() for bar in bars], data["accuracy_drop"].values)
    assert {to_rgb(bar.get_facecolor()[:3]) for bar in bars[1:]} == {to_rgb(lesion.KINDS[k]) for k in ("msa", "mlp")}
    assert [label.get_text() for label in ax.get_xticklabels()][:2] == ["0.stem", "1.msa"]


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
    assert (labels.count("accuracy drop"), labels.count("loss increase")) == (1, increases)
    ax = figure.module.draw(other, Figure().subplots())
    assert ax.get_ylabel() == "loss increase"
    drawn = ax.lines[0].get_ydata() if probe == "noise" else [bar.get_height() for bar in ax.containers[-1]]
    np.testing.assert_array_equal(drawn, other["loss_increase"].dropna("band" if probe == "noise" else "unit").values)


OLD = {  # probe: a quantity that versions before did not store, and the figures that then leave the result out
    "attack": ("accuracy_se", {"attack"}),
    "calibration": ("held_ece", {"calibration"}),
    "ensemble": ("predictive_entropy", {"ensemble"}),
    "stream": ("nll_change_high", {"stream"}),
    "line": ("barrier_se", {"line"}),
    "shape-bias": ("by_shape", {"shape_bias"}),
    "attention": ("head_feature_cosine", set[str]()),
    "trajectory": ("off_plane", {"trajectory"}),
}


@pytest.mark.parametrize("probe", OLD)
def test_a_result_of_another_version_is_drawn_with_what_it_has_or_left_out_in_one_line(
    study: Path, probe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, (lacks, left_out) = tmp_path / "old.h5", OLD[probe]
    path.write_bytes(study.read_bytes())
    with h5py.File(path, "r+") as file:
        first, *others = sorted(file[probe])
        del file[probe][first][lacks]
        label = file[probe][first].attrs["label"]
    written = drawing.draw(path, tmp_path, probes=[probe])
    assert left_out <= {figure.stem for figure in written} or not others
    said = [line for line in caplog.messages if line.startswith("note:")]
    assert said == [
        f"note: {name} leaves out {label}, which lacks {lacks}; --overwrite measures it again" for name in left_out
    ]
    rows = [row for row in headlines.summary(path) if row["probe"] == probe]
    assert len(rows) == 1 + len(others)
    assert all(row["headline"] for row in rows)


def test_the_headline_of_an_ensemble_of_another_version_has_what_it_holds(study: Path) -> None:
    data = result_of(study, "ensemble")
    found, whole = headlines.numbers(data.drop_vars("temperature")), headlines.numbers(data)
    assert found == {name: value for name, value in whole.items() if name != "temperature"}
    assert headlines.numbers(data.drop_vars("mean_disagreement")) == {
        "lacks": "mean_disagreement, which another version did not store"
    }


def test_names_lose_their_common_prefix_and_stay_distinct() -> None:
    assert lesion.shortened(["blocks.0.attn", "blocks.1.attn"]) == ["0.attn", "1.attn"]
    assert lesion.shortened(["layer1.0.conv2", "layer2.0.conv2"]) == ["layer1.0.conv2", "layer2.0.conv2"]
    assert lesion.shortened(["only.one"]) == ["only.one"]
    assert lesion.shortened(["a.b", "a.b.c"]) == ["b", "b.c"]
    assert lesion.shortened(["a.0.x + a.1.x", "a.1.x + a.2.x"]) == ["0.x + 1.x", "1.x + 2.x"]


def test_a_removal_that_blows_up_the_loss_does_not_hide_the_others(study: Path) -> None:
    data = result_of(study, "lesion").copy(deep=True)
    assert lesion.bars(data, Figure().subplots(), "loss_increase", "loss").get_yscale() == "linear"
    data["loss_increase"][:2] = [np.inf, 1e20]
    ax = lesion.bars(data, Figure().subplots(), "loss_increase", "loss")
    assert ax.get_yscale() == "symlog"
    assert np.isfinite(ax.get_ylim()).all()


def test_noise_is_drawn_with_its_interval_and_without_empty_bands(study: Path) -> None:
    data = result_of(study, "noise")
    ax = FIGURES["noise"].module.draw(data, Figure().subplots())
    shown = np.isfinite(data["accuracy_drop"].values)
    assert shown.sum() == 8
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), data["band"].values[shown])
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), data["accuracy_drop"].values[shown])
    top = ax.collections[0].get_datalim(ax.transData).y1
    upper = data["accuracy_drop"] + 1.96 * data["accuracy_drop_se"]
    assert top == pytest.approx(upper.max().item())


def test_spectra_are_tiles_at_their_true_frequencies_with_one_scale(study: Path) -> None:
    data = [result_of(study, "fourier", network.label) for network in synthetic.NETWORKS[:2]]
    module = FIGURES["fourier_spectrum"].module
    page = module.page(data, appearance.looks(data))
    scales = {image.norm for ax in page.axes for image in ax.images}
    assert len(scales) == 1
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


def test_the_classifier_of_linear_probes_is_named(study: Path) -> None:
    data = [result_of(study, "probe-linear", network.label) for network in synthetic.NETWORKS[:2]]
    module = FIGURES["probe_linear"].module
    text = " ".join(text.get_text() for text in module.page(data, appearance.looks(data)).texts)
    assert "Classifier: ridge regression." in " ".join(text.split())
    other = data[1].assign_attrs(parameters='{"solver": "lbfgs"}')
    text = " ".join(text.get_text() for text in module.page([data[0], other], appearance.looks([data[0], other])).texts)
    assert "ridge regression: " in " ".join(text.split())
    assert "logistic regression: " in " ".join(text.split())


def test_a_linear_probe_is_drawn_beside_the_network_itself(study: Path) -> None:
    data = result_of(study, "probe-linear")
    *_, own = FIGURES["probe_linear"].module.draw(data, Figure().subplots()).lines
    assert own.get_ydata() == [0.75, 0.75]


def test_kinds_of_noise_have_a_panel_each(study: Path) -> None:
    data = [result_of(study, "noise", network.label) for network in synthetic.NETWORKS[:2]]
    other = data[0].assign_attrs(parameters='{"eps": "0.3", "equal_energy": true}')
    page = FIGURES["noise"].module.page([*data, other], appearance.looks([*data, other]))
    titles = [ax.get_title() for ax in page.axes]
    assert titles == ["eps 0.7, equal amplitude per pixel", "eps 0.3, equal energy in every band"]
    assert [len(ax.collections) for ax in page.axes] == [2, 1]


def test_the_polar_path_starts_at_one_and_ends_in_the_middle(study: Path) -> None:
    data = result_of(study, "trajectory")
    polar, plane = FIGURES["trajectory"].module.draw(data, axes_for("trajectory"))
    path = polar.lines[0]
    assert tuple(path.get_xydata()[0]) == (0.0, 1.0)
    assert path.get_ydata()[-1] == 0.0
    assert np.isfinite(path.get_xdata()).all()  # the end has no angle of its own
    np.testing.assert_array_equal(plane.lines[0].get_ydata(), data["pc2"].values)


def test_lines_are_the_stored_numbers_with_their_bands_and_barriers(study: Path) -> None:
    data = result_of(study, "line")
    left, right = FIGURES["line"].module.draw(data, tuple(Figure().subplots(1, 2)))
    curves = [drawn for drawn in left.lines if len(drawn.get_xdata()) == data.sizes["t"]]
    np.testing.assert_array_equal([drawn.get_ydata() for drawn in curves], data["loss"].values)
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx((data["loss"] + 2 * data["loss_se"])[0].max().item())
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
    ax, _ = FIGURES["line"].module.draw(data, tuple(Figure().subplots(1, 2)))
    np.testing.assert_array_equal(ax.lines[3].get_ydata(), [4.0, 1.0, 5.0])
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(5 + np.std([2, 4, 9], ddof=1))
    page = FIGURES["line"].module.page([data], appearance.looks([data]))
    assert [text.get_text() for text in page.legends[0].get_texts()] == ["net: 3 random directions"]


def test_lines_without_an_accuracy_have_the_panel_of_the_loss_alone(study: Path) -> None:
    first = result_of(study, "line")
    undefined = first.assign(accuracy=(first.accuracy * np.nan).assign_attrs(units="undefined"))
    page = FIGURES["line"].module.page
    panels = [len(page(data, appearance.looks(data)).axes) for data in ([first], [undefined], [first, undefined])]
    assert panels == [2, 1, 2]


def test_lines_of_one_checkpoint_differ_in_label_and_line_style(study: Path) -> None:
    data = [result_of(study, "line").copy() for _ in range(2)]
    for one, bn in zip(data, ("auto", "recalibrate:4"), strict=True):
        one.attrs["parameters"] = f'{{"bn": "{bn}"}}'
    page = FIGURES["line"].module.page(data, appearance.looks(data))
    labels = [text.get_text() for text in page.legends[0].get_texts()]
    assert labels[0].startswith(f"{VIT} (bn auto): towards a, barrier 0.17 ± 0.02")
    assert labels[3].startswith(f"{VIT} (bn recalibrate:4): towards b, barrier")
    assert len({entry.get_linestyle() for entry in page.legends[0].get_lines()}) == 4


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


def test_the_plane_of_a_run_stands_beside_the_snapshots_own_losses(study: Path) -> None:
    data = result_of(study, "trajectory")
    losses, distances = FIGURES["trajectory_loss"].module.draw(data, tuple(Figure().subplots(1, 2)))
    for drawn, name in zip(losses.lines, ("loss", "plane_loss"), strict=True):
        np.testing.assert_array_equal(drawn.get_xydata(), np.stack([data["epoch"], data[name]], axis=1))
    np.testing.assert_array_equal(distances.lines[0].get_ydata(), data["off_plane"].values)


def test_a_caption_lists_protocols_that_differ() -> None:
    data = [xr.Dataset(attrs={"label": name, "protocol": f"digits {name}"}) for name in ("train", "test")]
    styles = appearance.looks(data)
    assert style.protocol(data, styles) == "train: digits train; test: digits test."
    assert style.protocol(data[:1], styles[:1]) == "digits train."


def test_a_caption_says_how_batch_norm_was_treated_unless_frozen() -> None:
    attributes = {"protocol": "digits", "plane": "checkpoints"}
    data = [
        xr.Dataset(attrs={**attributes, "label": name, "statistics": how})
        for name, how in (("one", "frozen"), ("two", "interpolated between the checkpoints"))
    ]
    styles = appearance.looks(data)
    assert style.protocol(data[:1], styles[:1]) == "digits."
    treated = "digits, batch-norm statistics interpolated between the checkpoints"
    assert style.protocol(data, styles) == f"one: digits, batch-norm statistics frozen; two: {treated}."


@pytest.mark.parametrize("count", [1, 8])
def test_nothing_on_a_page_overlaps_or_leaves_it(count: int) -> None:
    label = "a_long_label_of_a_checkpoint-cifar100-with_mixup and 9000 numbers after it"
    data = [xr.Dataset(attrs={"label": f"{label}_{i}", "protocol": "a protocol, " * (i + 3)}) for i in range(count)]
    styles = appearance.looks(data)
    page = style.page(data, styles, height=2.0, width=style.COLUMN, legend=[look.legend_handle() for look in styles])
    axes = page.subplots()
    axes.set_xlabel("x")
    page.canvas.draw()
    (caption,), (legend,) = page.texts, page.legends
    boxes = [caption.get_window_extent(), legend.get_window_extent(), axes.get_tightbbox()]
    for below, above in itertools.pairwise(boxes):
        assert below.y1 <= above.y0 + 1
    assert boxes[0].y0 >= 0
    assert all(box.x0 >= 0 and box.x1 <= page.bbox.x1 for box in boxes)


FULL = """
import json, resource, sys
from pathlib import Path
from landscape.cli.main import exit_code
study, folder = Path(sys.argv[1]), Path(sys.argv[2])
commands = [["plot", "--out", "figures"], ["report", "--out", "page.html"], ["export", "--out", "exported", "--format",
             "tomgoldstein,csv,vtp"]]
def run():
    return [exit_code([word, str(study), *(str(folder / w) if i == 1 else w for i, w in enumerate(rest))])
            for word, *rest in commands]
def content():
    return {str(file): file.read_bytes().hex() for file in folder.rglob("*") if file.is_file()}
codes, before = run(), content()
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
print("---")
again = run()
print(json.dumps([codes, again, len(before), content() == before]))
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_figures_pages_and_files_that_were_there(tmp_path: Path) -> None:
    study = synthetic.write(tmp_path / "study.h5", synthetic.NETWORKS[:1], probes=["surface"])
    command = [sys.executable, "-c", FULL, str(study), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    codes, again, files, unchanged = json.loads(ended.stdout.splitlines()[-1])
    assert (codes, again, unchanged) == ([0] * 3, [1] * 3, True)
    assert files > 5
    said = [line for line in ended.stderr.splitlines() if line.startswith("landscape: ")]
    assert [("File too large" in line or "cannot" in line) for line in said] == [True] * 3


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
@pytest.mark.parametrize("probe", ["surface", "surface_heat"])
def test_labels_of_six_different_planes_do_not_overlap(study: Path, probe: str) -> None:
    results = []
    for k in range(6):
        data = result_of(study, "surface").copy()
        for axis in ("x", "y"):
            about = {"long_name": f"component {k} of the run (82 % of its variance)", "units": "weight"}
            data[axis] = data[axis].assign_attrs(about)
        results.append(data)
    page = FIGURES[probe].module.page(results, appearance.looks(results))
    page.draw_without_rendering()
    labels = [label for ax in page.axes[:6] for label in (ax.xaxis.label, ax.yaxis.label)]
    boxes = [label.get_window_extent() for label in labels]
    assert all(label.get_text() for label in labels)
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


def test_maps_of_several_networks_share_one_logarithmic_colour_scale(study: Path) -> None:
    results = [result_of(study, "surface", network.label) for network in synthetic.NETWORKS]
    page = surface_heat.page(results, appearance.looks(results))
    norms = {id(ax.collections[0].norm) for ax in page.axes[: len(results)]}
    finite = np.concatenate([data["loss"].values[np.isfinite(data["loss"].values)] for data in results])
    assert len(norms) == 1
    norm = page.axes[0].collections[0].norm
    assert isinstance(norm, LogNorm)
    assert (norm.vmin, norm.vmax) == (finite.min(), finite.max())


def test_the_error_map_shows_the_error_as_a_share_of_the_loss(study: Path) -> None:
    data = result_of(study, "surface")
    ax = surface_error.draw(data, Figure().add_subplot())
    shown = ax.collections[0].get_array()
    np.testing.assert_allclose(np.asarray(shown).reshape(21, 21), (0.01 / data["loss"]).transpose("y", "x").values)


def test_heights_are_drawn_with_their_intervals(study: Path) -> None:
    data = result_of(study, "surface")
    ax = surface_height.draw(data, Figure().add_subplot())
    (bars,) = ax.containers
    line, _, (segments,) = bars.lines
    np.testing.assert_allclose(line.get_ydata(), data["height"].values)
    lengths = [segment[1, 1] - segment[0, 1] for segment in segments.get_segments()]
    np.testing.assert_allclose(lengths, 2 * 1.96 * data["height_se"].values)


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.1), (1.0, 30.0), (2.0, 2.5), (1e-3, 5e-2)])
def test_ticks_of_a_narrow_logarithmic_scale_are_round_and_few(low: float, high: float) -> None:
    ticks = surface_heat.round_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    assert low <= ticks.min() <= ticks.max() <= high


def test_heights_in_other_units_have_their_own_panel(study: Path) -> None:
    data = result_of(study, "surface")
    other = data.assign_coords(x=data["x"].assign_attrs(units="share of the way"))
    results = [data, other, data]
    figure = surface_height.page(results, appearance.looks(results))
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert labels == ["distance from the weights (filter norm)", "distance from the weights (share of the way)"]
    assert [len(ax.containers) for ax in figure.axes] == [2, 1]


def test_lines_over_depth_break_where_layers_are_missing() -> None:
    depth = np.array([0.0, 0.1, 0.2, 0.7, 0.8, 1.0])
    data = xr.Dataset(
        {
            "variance": ("layer", np.arange(6.0)),
            "depth": ("layer", depth),
            "kind": ("layer", ["conv"] * 5 + ["smoothing"]),
        }
    )
    (line, *_) = plots_depth.over_depth(data, Figure().subplots(), "variance", shade=False).lines
    assert np.flatnonzero(np.isnan(line.get_ydata())).tolist() == [3, 6]
