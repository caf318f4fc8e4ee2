"""Figures in the layout of the paper: which results each part takes, what it names as missing, and that pages fit."""

import itertools
import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import synthetic
import xarray as xr
from drawable import check_layout, of_networks, result_of

from landscape.plots import appearance, drawing, style, theme
from landscape.plots.figures import park2022
from landscape.plots.tidy import tidied
from landscape.results import reader


@pytest.mark.slow
@pytest.mark.usefixtures("unsaved")
def test_the_layout_of_the_paper_holds_every_network_and_names_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probes = ("surface", "hessian", "fourier", "variance", "lesion")
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS, probes=probes)
    with caplog.at_level("INFO"):
        drawn = drawing.draw_layout(path, tmp_path, theme=theme.Theme(columns=2))
    assert [file.stem for file in drawn] == ["park2022_weights", "park2022_spectra", "park2022_features"]
    assert [r.getMessage() for r in caplog.records] == [
        "park2022_weights: nothing of landscape trajectory yet",
        "park2022_spectra: nothing of landscape hessian of early snapshots yet",
        "park2022_alternet: nothing of landscape lesion of networks that differ in their self-attentions yet",
        "park2022_alternet: nothing of landscape corruption yet",
    ]
    results = [data for name, data in reader.groups(path) if name.startswith("hessian")]
    parts = park2022.PAGES["park2022_weights"]
    page = park2022.page(parts, [[], [], park2022.chosen(parts[2], results, appearance.looks(results))])
    texts = " ".join(" ".join(text.get_text().split()) for text in page.texts)
    assert "Not measured: landscape surface, landscape trajectory." in texts
    assert [len(ax.lines) for ax in page.axes] == [3, 3]
    assert {text.get_text() for text in page.legends[0].get_texts()} == {n.label for n in synthetic.NETWORKS}


def of_run(result: xr.Dataset, run: str, stage: str, epoch: float) -> xr.Dataset:
    spec = json.dumps({"checkpoint": f"{run}/{stage}.pt"})
    return result.assign_attrs(label=f"{run}-{stage}", spec=spec, epoch=epoch)


@pytest.mark.campaign
@pytest.mark.parametrize(("columns", "count"), [*itertools.product((1, 2), (1, 3, 12))])
@pytest.mark.parametrize("name", park2022.PAGES)
def test_a_page_in_the_layout_of_the_paper_is_readable_and_no_higher_than_a_page(
    study: Path, name: str, columns: int, count: int
) -> None:
    parts, found = park2022.PAGES[name], []
    for part in parts:
        of = of_networks(study, part.figure, count)
        if part.choose is park2022.built_up:
            of = [data.isel(unit=slice(i % 3, None)).assign_attrs(model="one") for i, data in enumerate(of)]
        else:
            of = [of_run(one, one.attrs["label"], *at) for one in of for at in (("warmup", 0.5), ("final", 9.0))]
        found.append(park2022.chosen(part, of, appearance.looks(of)))
    with theme.applied(theme.Theme(columns=columns)):
        page = tidied(park2022.page(parts, found))
        page.dpi = matplotlib.rcParams["savefig.dpi"]
        page.draw_without_rendering()
        check_layout(page, name)
    assert page.get_figwidth() == (style.COLUMN, style.PAGE)[columns - 1]
    assert page.get_figheight() <= theme.HIGHEST + 1e-9


@pytest.mark.slow
def test_the_layout_of_the_paper_takes_early_spectra_for_one_part_and_the_last_snapshots_for_the_others(
    study: Path,
) -> None:
    spectrum = result_of(study, "hessian")
    results = [
        of_run(spectrum, run, stage, epoch)
        for run in "ab"
        for stage, epoch in (("final", 9.0), ("init", 0.0), ("warmup", 0.5), ("epoch_005", 5.0))
    ]
    results += [spectrum.assign_attrs(label="alone"), of_run(spectrum, "c", "warmup", 1.0)]
    parts = park2022.PAGES["park2022_spectra"]
    end, early = (park2022.chosen(part, results, appearance.looks(results)) for part in parts)
    assert [look.label for _, look in end] == ["a-final", "b-final", "alone", "c-warmup"]
    assert [(data.attrs["label"], look.label) for data, look in early] == [
        ("a-warmup", "a-final"), ("b-warmup", "b-final"),
    ]  # fmt: skip
    page = park2022.page(parts, [end, early])
    assert [len(ax.lines) for ax in page.axes] == [4, 4, 2, 2]
    assert "Early in training: epoch 0.5 of a-final, 0.5 of b-final." in page.caption  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_the_layout_of_the_paper_shows_the_whole_angle_of_every_run_in_any_order(study: Path, order: int) -> None:
    wide, narrow = (result_of(study, "trajectory").assign_attrs(label=label) for label in ("wide", "narrow"))
    wide["angle"][0], narrow["angle"] = 2.0, narrow["angle"].clip(max=1.0)
    results = [wide, narrow][::order]
    part = park2022.PAGES["park2022_weights"][1]
    (ax,) = park2022.page([part], [park2022.chosen(part, results, appearance.looks(results))]).axes
    assert np.rad2deg(ax.get_xlim()).tolist() == [0, 180]


@pytest.mark.slow
def test_the_layout_of_the_paper_draws_the_accuracy_of_a_model_over_its_self_attentions(study: Path) -> None:
    alternet, vit = (result_of(study, "lesion", synthetic.NETWORKS[i].label) for i in (2, 0))
    convolutional = alternet.assign(kind=alternet["kind"].where(alternet["kind"] != "msa", "conv"))
    built = [
        data.assign_attrs(label=f"{seed} {data is alternet}", intact_accuracy=accuracy + 0.02 * seed)
        for data, accuracy in ((alternet, 0.8), (convolutional, 0.7))
        for seed in (0, 1)
    ]
    partial_result = alternet.assign_attrs(label="half", parameters=json.dumps({"layers": ["1"]}))
    part = park2022.PAGES["park2022_alternet"][0]
    results = [vit, *built, partial_result]
    chosen = park2022.chosen(part, results, appearance.looks(results))
    assert [data.attrs["label"] for data, _ in chosen] == [data.attrs["label"] for data in built]
    (ax,) = park2022.page([part], [chosen]).axes
    _, mean = ax.lines[:2]
    assert list(mean.get_xdata()) == [0, 4]
    assert list(mean.get_ydata()) == pytest.approx([0.71, 0.81])
    assert park2022.chosen(part, [vit], appearance.looks([vit])) == []
