"""Colours, markers, names and captions: what distinguishes results in a figure, and that nothing overlaps."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import synthetic
import xarray as xr
from drawable import result_of, stored_in
from matplotlib.colors import to_rgb

import landscape
from landscape.plots import FIGURES, appearance, drawing, style, theme
from landscape.plots.figures import lesion


def vit(**parameters: object) -> xr.Dataset:
    return xr.Dataset(attrs={"label": "vit", "model": "vit_ti", "parameters": json.dumps(parameters)})


def test_families_have_their_colours_and_markers() -> None:
    about = [{"label": network.label, "model": network.model} for network in synthetic.NETWORKS]
    vit, resnet, alternet = appearance.looks([xr.Dataset(attrs=attributes) for attributes in about])
    assert (vit.color, vit.marker) == ("#D62728", "o")
    assert (resnet.color, resnet.marker) == ("#1F77B4", "D")
    assert alternet.color not in (vit.color, resnet.color)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["monitor", "step"])
def test_networks_have_marks_of_their_own_beside_their_colours(study: Path, name: str) -> None:
    page = getattr(landscape.plots, name)([data for _, data in stored_in(study)])
    marks: dict[str, set[str]] = {}
    for line in page.axes[0].get_lines():
        if len(line.get_xdata()) and line.get_marker() in tuple("oDs"):
            marks.setdefault(str(line.get_color()), set()).add(str(line.get_marker()))
    assert sorted(map(sorted, marks.values())) == [["D"], ["o"], ["s"]]


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
    assert found[-1].color == "#D62728"  # the last of a family is pure


@pytest.mark.parametrize("model", appearance.FAMILIES)
def test_two_networks_of_one_family_have_colours_far_apart(model: str) -> None:
    found = appearance.looks([xr.Dataset(attrs={"model": model, "label": f"{model}-{i}"}) for i in range(2)])
    assert math.dist(*(to_rgb(look.color) for look in found)) >= appearance.NEAR


def _contrast(color: str, ground: str) -> float:
    """The contrast ratio of WCAG 2.1."""

    def luminance(of: str) -> float:
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
        xr.Dataset(attrs={"model": "vit_ti", "label": label, "several": several})
        for label, several in (("vit", "each"), ("vit + 2", "members"))
    )
    assert [look.color == "#D62728" for look in appearance.looks([network, ensemble])] == [True, False]


def test_a_checkpoint_looks_the_same_in_every_figure_of_a_study() -> None:
    study = [xr.Dataset(attrs={"model": "vit_ti", "label": label}) for label in ("start", "end")]
    alone, together = appearance.looks(study[:1], among=study)[0], appearance.looks(study)[0]
    assert alone == together


LONG = "/home/me/runs/long/"
NAMED: dict[tuple[str, ...], list[xr.Dataset]] = {  # what distinguishes results of one label
    ("seed 0", "seed 1"): [vit(seed=seed, tol=0.1) for seed in (0, 1)],
    ("plane long", "plane random"): [vit(plane=plane, preview=False) for plane in (LONG, "random")],
    ("no preview", "preview"): [vit(preview=preview) for preview in (False, True)],
    ("plane random, seed 0", "plane random, seed 1", "plane long, seed 0"): [  # where three differences do not suffice
        vit(resolution=5, plane="random", preview=False, cap=1, seed=0),
        vit(resolution=5, plane="random", preview=False, cap=1, seed=1),
        vit(resolution=9, plane=LONG, preview=True, cap=2, seed=0),
    ],
    ("engine lanczos, loss cross-entropy", "engine pyhessian, loss cross-entropy", "engine lanczos, loss mine.py:f"): [
        vit(hvp=hvp, engine=engine, top=5).assign_attrs(spec=json.dumps({"loss": loss}))  # not the backend of products
        for engine, hvp, loss in (
            ("lanczos", "double-backward", ""),
            ("pyhessian", "auto", ""),
            ("lanczos", "double-backward", "a/mine.py:f"),
        )
    ],
}


@pytest.mark.parametrize("said", NAMED)
def test_results_of_one_label_are_distinguished_by_what_differs(said: tuple[str, ...]) -> None:
    assert appearance.names(NAMED[said]) == [f"vit ({words})" for words in said]


def test_names_lose_their_common_prefix_and_stay_distinct() -> None:
    assert lesion.shortened(["blocks.0.attn", "blocks.1.attn"]) == ["0.attn", "1.attn"]
    assert lesion.shortened(["layer1.0.conv2", "layer2.0.conv2"]) == ["layer1.0.conv2", "layer2.0.conv2"]
    assert lesion.shortened(["only.one"]) == ["only.one"]
    assert lesion.shortened(["a.b", "a.b.c"]) == ["b", "b.c"]
    assert lesion.shortened(["a.0.x + a.1.x", "a.1.x + a.2.x"]) == ["0.x + 1.x", "1.x + 2.x"]
    long = [f"blocks.{i}.attention.projection" for i in range(2)]
    assert lesion.shortened(["head", *long]) == ["head", "blocks.0.at…projection", "blocks.1.at…projection"]
    assert lesion.shortened(["head", long[0]]) == ["head", "….attention.projection"]  # the end tells them apart


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


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_nothing_on_a_page_overlaps_or_leaves_it(count: int) -> None:
    label = "a_long_label_of_a_checkpoint-cifar100-with_mixup and 9000 numbers after it"
    data = [xr.Dataset(attrs={"label": f"{label}_{i}", "protocol": "a protocol, " * (i + 3)}) for i in range(count)]
    styles = appearance.looks(data)
    page = style.page(data, styles, height=2.0, width=style.COLUMN, legend=styles)
    axes = page.subplots()
    axes.set_xlabel("x")
    page.canvas.draw()
    (caption,), (legend,) = page.texts, page.legends
    boxes = [caption.get_window_extent(), legend.get_window_extent(), axes.get_tightbbox()]
    for below, above in itertools.pairwise(boxes):
        assert below.y1 <= above.y0 + 1
    assert boxes[0].y0 >= 0
    assert all(box.x0 >= 0 and box.x1 <= page.bbox.x1 for box in boxes)


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


@pytest.mark.slow
def test_a_caption_stands_below_the_figure_nowhere_or_in_a_file_of_latex(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", [synthetic.transformer("a_$b", depth=2)], probes=("variance",))
    heights = {}
    for caption in theme.CAPTIONS:
        drawing.draw(path, tmp_path / caption, ("svg",), theme=theme.Theme(caption=caption))
        drawn = (tmp_path / caption / "variance.svg").read_text()
        heights[caption] = float(re.findall(r'height="([\d.]+)pt"', drawn)[0])
        assert ("batch size" in drawn) == (caption == "text")
        assert "a_$b" in drawn
    assert heights["none"] == heights["tex"] < heights["text"]
    assert [file.name for file in sorted(tmp_path.glob("*/*.tex"))] == ["variance.tex"]
    said = (tmp_path / "tex" / "variance.tex").read_text()
    assert re.fullmatch(r"\\caption\{.*batch size.*\.\}\n\\label\{fig:landscape-variance\}\n", said)
    assert re.search(r"(?<!\\)[&%#_]", said) is None
    assert drawing._tex(r"a_b at 95 %: $H_1$, x\$ & y.", "z").startswith(r"\caption{a\_b at 95 \%: $H_1$, x\$ \& y.}")
