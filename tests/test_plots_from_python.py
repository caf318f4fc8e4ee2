"""`landscape.plots.NAME`: figures from Python, in the user's axes and in notebooks."""

import functools
import io
from pathlib import Path
from typing import Any

import pytest
import synthetic
import xarray as xr
from drawable import EVERYDAY, VIT, result_of, stored_in
from matplotlib.figure import Figure
from PIL import Image

import landscape
from landscape.options import OptionError
from landscape.plots import FIGURES, STUDIES, drawing
from landscape.results import reader


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_every_figure_is_a_function_that_draws_into_a_subfigure_and_returns_its_axes(
    study: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = FIGURES[name].module
    kept = module.draw
    returned: list[tuple[Any, Any]] = []

    @functools.wraps(kept)
    def draw(data: xr.Dataset, axes: Any, **options: Any) -> Any:
        returned.append((kept(data, axes, **options), axes))
        return returned[-1][0]

    monkeypatch.setattr(module, "draw", draw)
    _, under = Figure(layout="constrained").subfigures(2, 1)
    stored = [data for _, data in stored_in(study)]
    drawn = getattr(landscape.plots, name)(stored, under, only=VIT if FIGURES[name].probe != "ensemble" else ())
    assert set(drawn if isinstance(drawn, tuple) else [drawn]) <= set(under.axes)
    assert returned
    assert all(found is axes for found, axes in returned)


@pytest.mark.slow
def test_a_figure_from_python_is_drawn_of_a_file_of_an_opened_one_and_of_one_result(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", probes=("variance",))
    for data in (str(path), landscape.open(path), result_of(path, "variance")):
        page = landscape.plots.variance(data, only=VIT, columns=1, title="A title")  # type: ignore[operator]
        assert (page.get_figwidth(), page.get_suptitle()) == (3.25, "A title")


@pytest.mark.slow
def test_a_figure_in_the_users_axes_is_drawn_over_what_is_there(study: Path) -> None:
    data = [result_of(study, "variance", network.label) for network in synthetic.NETWORKS]
    ax = Figure().subplots()
    assert landscape.plots.variance(data, ax) is ax  # type: ignore[operator]
    assert len(ax.containers) == 3
    assert len({drawn.lines[0].get_color() for drawn in ax.containers}) == 3


@pytest.mark.slow
def test_figures_from_python_fail_in_one_line(study: Path) -> None:
    draw: Any = landscape.plots
    with pytest.raises(ValueError, match=r"surface_3d needs 1 axes \(3d\), got plain; give these or a \(sub\)figure"):
        draw.surface_3d(result_of(study, "surface"), Figure().subplots())
    with pytest.raises(ValueError, match=r"surface draws one result into axes, got 3; choose one with only=.*vit_ti"):
        draw.surface([data for _, data in stored_in(study)], Figure().subplots())
    with pytest.raises(ValueError, match="variance draws finished variance, depth, kind, reduces of landscape var"):
        draw.variance(result_of(study, "surface"))
    with pytest.raises(OptionError, match="--style must be screen, paper or dark, got bright"):
        draw.surface(study, style="bright")
    with pytest.raises(AttributeError, match="has no attribute surfaces; its figures are surface, "):
        _ = draw.surfaces


@pytest.mark.slow
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


def test_a_figure_shows_the_results_of_its_own_probe(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("line", "barriers", "hessian", "density"))
    with reader.streaming(path) as stored:
        results = reader.by_checkpoint(stored)
        pages = dict(drawing._pages(results, results, drawing.EVERYTHING, None, ()))
        for name, page in pages.items():
            assert {data.attrs["probe"] for data in page.args[0]} == {FIGURES[name].probe}
        chosen = [name for name, _ in drawing._pages(results, results, drawing.EVERYTHING, ["hessian"], ())]
        assert chosen == [name for name in pages if FIGURES[name].probe == "hessian"] != []
