"""Files of figures: every one draws, finished or not, in every format, and leaves no trace in global state."""

import io
import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
import pytest
import synthetic
from drawable import (
    ERRORS,
    EVERYDAY,
    OF_STUDY,
    UNFINISHED,
    VIT,
    axes_for,
    check_layout,
    of_networks,
    result_of,
    spoilt,
    stored_in,
)  # fmt: skip
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from PIL import Image

import landscape
from landscape.options import OptionError
from landscape.plots import FIGURES, STUDIES, appearance, drawing, study_module, style, theme
from landscape.plots.figure import checked
from landscape.plots.selection import Selection
from landscape.plots.tidy import tidied
from landscape.probes import PROBES
from landscape.results import reader
from landscape.statistics.stored import has_intervals


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_module_offers_what_a_figure_needs_and_says_what_it_means(name: str) -> None:
    module = FIGURES[name].module  # loading checks it
    assert callable(module.draw)
    assert callable(module.page)
    assert module.MEANING.count(". ") == 1  # two sentences
    assert not hasattr(module, "notes") or name == FIGURES[name].probe.replace("-", "_")


def test_every_probe_has_a_figure_of_its_name() -> None:
    for probe in PROBES:
        figure = FIGURES[probe.replace("-", "_")]
        assert figure.probe == probe


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("MEANING = ''\ndef draw(): ...\ndef pagee(): ...", "wrong lacks page"),
        ("MEANING = 1\ndef draw(): ...\ndef page(): ...", "wrong.MEANING is a int, expected a str"),
        ("MEANING = ''\ndraw = 1\ndef page(): ...", "wrong.draw is a int, expected a function"),
        ("MEANING = ''\ndef draw(): ...\ndef page(): ...\ndef note(): ...", "wrong.note .* misspelt notes"),
        ("MEANING = ''\ndef draw(): ...\ndef page(): ...\ndef selekt(): ...", "wrong.selekt .* misspelt select"),
    ],
)
def test_a_misspelt_figure_module_is_rejected_by_name(lines: str, said: str) -> None:
    module = ModuleType("wrong")
    exec(lines, vars(module))
    with pytest.raises(TypeError, match=said):
        checked(module)


@pytest.mark.parametrize("name", STUDIES)
def test_every_figure_of_several_probes_offers_what_drawing_needs(name: str) -> None:
    module = study_module(name)
    assert module.MEANING.count(". ") == 1
    assert module.studies([]) == []
    assert callable(module.page)


@pytest.mark.slow
def test_a_study_draws_its_figures_in_the_order_of_the_table(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = stored_in(study)  # which reads them by the true one
    monkeypatch.setattr(reader, "streaming", lambda *_: nullcontext(stored))
    monkeypatch.setattr(drawing, "_save", lambda name, *_: [tmp_path / f"{name}.png"])
    assert [path.stem for path in drawing.draw(study, tmp_path)] == OF_STUDY


# A third of the figures at every change; the campaign checks the others, and all of them in the layout of a paper.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if zlib.crc32(name.encode()) % 3 == 0 else pytest.param(name, marks=pytest.mark.campaign)
             for name in OF_STUDY]
)  # fmt: skip
def test_every_figure_has_its_width_and_is_whole_and_readable(study: Path, name: str) -> None:
    with theme.applied(theme.SCREEN):
        page = tidied(getattr(landscape.plots, name)([data for _, data in stored_in(study)]))
        drawn = io.BytesIO()
        page.savefig(drawn, format="rgba")
        if name in EVERYDAY:
            check_layout(page, name)
    bars = [one for ax in page.axes for one in (*ax.containers, *ax.collections)]
    if any(isinstance(one, ErrorbarContainer | FillBetweenPolyCollection) for one in bars):
        assert re.search("interval|quartile|standard deviation|spread", said(page)), "what are the bars or bands?"
    assert page.get_figwidth() in ((style.PAGE,) if name in EVERYDAY else (style.COLUMN, style.PAGE))
    pixels = np.frombuffer(drawn.getvalue(), np.uint8).reshape(
        -1, round(page.get_figwidth() * style.RC["savefig.dpi"]), 4
    )
    assert pixels[:, [0, 1, -2, -1], :3].min() >= 200, f"{name} is cut off at its left or right edge"


ALL = os.environ.get("LAYOUTS") == "all"  # of what takes long, for every figure and layout


def of_paper() -> list[tuple[str, int, int]]:
    """Figure, columns and networks: all figures of three networks in one column, and a part of the other cases."""
    cases = itertools.product(EVERYDAY, (1, 2), (1, 3, 12))
    share = {(1, 3): 1, (2, 3): 12, (1, 1): 6, (2, 1): 6, (1, 12): 8, (2, 12): 8}
    return [case for case in cases if ALL or zlib.crc32(repr(case).encode()) % share[case[1:]] == 0]


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "columns", "count"), of_paper())
def test_a_figure_of_a_paper_is_readable_and_fits_its_column_and_page(
    study: Path, name: str, columns: int, count: int
) -> None:
    results = of_networks(study, name, count)
    with theme.applied(theme.Theme("paper", columns, "A title with $ and <b>")):
        page = partial(FIGURES[name].module.page, results, appearance.looks(results))
        (_, first), *rest = drawing._split(name, page)
        # the results repeat: one of the parts that hold the same networks
        others = {tuple(data.attrs["label"].split()[0] for data in part.args[0]): part for _, part in rest}  # type: ignore[attr-defined]
        for part in (first, *others.values()):
            figure = tidied(part())
            figure.dpi = matplotlib.rcParams["savefig.dpi"]
            figure.draw_without_rendering()
            check_layout(figure, name)
            assert figure.get_figwidth() == (style.COLUMN, style.PAGE)[columns - 1]
            assert figure.get_figheight() <= theme.HIGHEST
            sides = [ax.get_window_extent().size / figure.dpi for ax in figure.axes if ax.get_label() != "<colorbar>"]
            assert min(side.min() for side in sides) >= 0.6


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_figure_of_few_numbers_or_of_some_that_are_not_finite_draws(
    begun: Path, half: Path, small: Path, name: str
) -> None:
    """One unit alone; then together two fifths of the units, errors that are not finite, and such numbers.

    One figure in six is laid out too.
    """
    laid_out = ALL or zlib.crc32(name.encode()) % 6 == 0
    figure = FIGURES[name]
    few, some, whole = (result_of(path, figure.probe, synthetic.SMALL.label) for path in (begun, half, small))
    assert figure.drawable(few) == (name not in UNFINISHED[0.001])
    assert figure.drawable(some) == (name not in UNFINISHED[0.4])
    for together in ([few], [some, spoilt(whole, errors=True), spoilt(whole, errors=False)]):
        if results := [data for data in together if figure.drawable(data)]:
            with theme.applied(theme.SCREEN):
                page = figure.module.page(results, appearance.looks(results))
                page.set_layout_engine(page.get_layout_engine() if laid_out else None)
                page.draw_without_rendering()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_a_figure_speaks_of_intervals_where_its_results_have_some(small: Path, name: str) -> None:
    """As no loss that returns a mean has them, and no few values."""
    figure = FIGURES[name]
    whole = result_of(small, figure.probe, synthetic.SMALL.label)
    errors = {key: value for key, value in whole.data_vars.items() if str(key).endswith(ERRORS) or key == "se"}
    unknown = {key: value.copy(data=np.full(value.shape, np.nan)) for key, value in errors.items()}
    without = whole.assign({key: value.assign_attrs(n=np.nan, over="") for key, value in unknown.items()})
    assert not has_intervals(without)
    for data in [data for data in (whole, without) if not has_intervals(data) and figure.drawable(data)]:
        with theme.applied(theme.SCREEN):
            page = figure.module.page([data], appearance.looks([data]))
        assert "95 %" not in said(page)


def said(page: Figure) -> str:
    """What stands below a figure, in one line."""
    return " ".join(text.get_text().replace("\n", " ") for text in page.texts)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of two probes, quickly read."""
    return synthetic.shared(tmp_path_factory, "quick", [synthetic.SMALL], probes=("surface", "variance"))


@pytest.mark.slow
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


@pytest.mark.usefixtures("unsaved")
def test_a_probe_without_made_up_numbers_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "MADE_UP", {})
    path = synthetic.write(tmp_path / "new.h5", synthetic.NETWORKS[:1], probes=("variance",), share=0.4)
    assert "variance" in [figure.stem for figure in drawing.draw(path, tmp_path)]


@pytest.mark.usefixtures("unsaved")
def test_a_result_with_nothing_finished_is_left_out_and_named(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "empty.h5", synthetic.NETWORKS[:1], probes=("hessian", "lesion"), share=0.0)
    synthetic.write(path, synthetic.NETWORKS[:1], probes=("variance",))
    assert {FIGURES[figure.stem].probe for figure in drawing.draw(path, tmp_path)} == {"variance"}
    assert [name.partition("/")[0] for name in drawing.left_out(path)] == ["hessian", "lesion"]


@pytest.mark.slow
def test_equal_results_give_equal_files_of_every_format_whose_text_is_text_and_leave_the_callers_style(
    quick: Path, tmp_path: Path
) -> None:
    before = dict(matplotlib.rcParams)
    (pdf, svg), again = (
        drawing.draw(quick, tmp_path / folder, formats=("pdf", "svg"), figures=("variance",)) for folder in "ab"
    )
    assert dict(matplotlib.rcParams) == before
    assert [path.name for path in (pdf, svg)] == ["variance.pdf", "variance.svg"]
    assert [path.read_bytes() for path in (pdf, svg)] == [path.read_bytes() for path in again]
    assert b"/Type3" not in pdf.read_bytes()  # fonts as outlines without names, which publishers refuse
    assert b"/CIDFontType2" in pdf.read_bytes()  # TrueType
    words = "".join(ElementTree.parse(svg).getroot().itertext())
    assert "normalised depth" in words
    assert "batch size 128" in words  # the protocol is on the figure


@pytest.mark.slow
def test_any_label_can_be_drawn(tmp_path: Path) -> None:
    networks = [synthetic.transformer(label, depth=2) for label in ("_hidden", "a$b$_{", "模型", "<b>bold", "x" * 200)]
    path = synthetic.write(tmp_path / "r.h5", networks, probes=("hessian", "variance"))
    assert len(drawing.draw(path, tmp_path, figures=("hessian", "variance"))) == 2


@pytest.mark.slow
def test_chosen_checkpoints_are_drawn_in_the_order_asked_for_under_their_new_names(study: Path) -> None:
    selection = Selection(only=("resnet*", VIT), labels={VIT: "ViT $"}, colors={VIT: "#123456"})
    found = [data for _, data in selection.of(reader.find(study, probe="variance"))]
    assert [data.attrs["label"] for data in found] == ["resnet50-cifar100", "ViT $"]
    assert [look.color == "#123456" for look in selection.looks(found, found)] == [False, True]
    for wrong in (Selection(only=("nobody",)), Selection(labels={"nobody": "x"}), Selection(colors={"nobody": "red"})):
        with pytest.raises(OptionError, match=f"must be a label of the file, such as .*{VIT}.*, got nobody"):
            wrong.of(reader.find(study, probe="variance"))


@pytest.mark.slow
@pytest.mark.usefixtures("unsaved")
def test_only_the_figures_asked_for_are_drawn_and_one_that_cannot_be_is_named(
    quick: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        drawn = drawing.draw(quick, tmp_path, figures=("variance", "saddle"))
    assert [path.name for path in drawn] == ["variance.png"]
    assert [r.getMessage() for r in caplog.records if "saddle" in r.getMessage()] == [
        "no figure saddle: the results hold no finished loss, rise_se, done, x, y of landscape surface"
    ]
    with pytest.raises(OptionError, match=r"--figure must be .*variance.*, got varience"):
        drawing.draw(quick, tmp_path, figures=("varience",))


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "width"), [(1, 3.25), (2, 6.75)])
def test_files_are_as_wide_as_the_columns_asked_for(quick: Path, tmp_path: Path, columns: int, width: float) -> None:
    page = theme.Theme("paper", columns, "A title with $ and <b>")
    for path in drawing.draw(quick, tmp_path, figures=("surface_height",), theme=page):
        with Image.open(path) as image:
            assert image.width == round(300 * width)


@pytest.mark.slow
@pytest.mark.usefixtures("unsaved")
def test_the_page_gets_no_pictures_of_what_it_draws_by_itself_and_nine_networks_are_many(tmp_path: Path) -> None:
    networks = [synthetic.transformer(f"net-{i}x", depth=1) for i in range(9)]
    path = synthetic.write(tmp_path / "r.h5", networks, probes=("variance", "noise"))
    for live, names in ((False, ["noise"]), (True, ["variance", "noise"])):
        assert [figure.stem for figure in drawing.draw(path, tmp_path, live=live)] == names
    assert drawing.is_drawable(path)
    assert [drawing.has_many(path, rule) for rule in ([], ["net-[0-7](x)"])] == [True, False]  # a group and one more


def test_unknown_formats_and_probes_are_usage_errors(tmp_path: Path) -> None:
    study = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("variance",))
    with pytest.raises(OptionError, match="unknown format gif; expected png, pdf, svg"):
        drawing.draw(study, tmp_path, formats=("gif",))
    with pytest.raises(OptionError, match="probe nobody"):
        drawing.draw(study, tmp_path, probes=("nobody",))
    with pytest.raises(ValueError, match="expected a folder"):
        drawing.draw(study, study)


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
@pytest.mark.campaign
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("monitor", "step"), ("monitor_preconditioned", "step"), ("monitor_noise", "step"),
        ("monitor_critical", "step"),
        ("trajectory_loss", "snapshot"), ("perturbation_frames", "frame"), ("stream_frames", "frame"),
    ],
)  # fmt: skip
def test_a_short_series_has_whole_numbers_on_its_axis(study: Path, name: str, axis: str) -> None:
    short = result_of(study, FIGURES[name].probe).isel({axis: slice(3)})
    short = short.assign({"epoch": ("snapshot", np.arange(3.0))} if axis == "snapshot" else {axis: np.arange(3)})
    axes = axes_for(name)
    import_module(f"landscape.plots.figures.{name}").draw(short, axes, look=appearance.look_of(short))
    for ax in axes if isinstance(axes, tuple) else (axes,):
        ticks = ax.get_xticks()
        assert len(ticks) >= 2
        assert ticks == pytest.approx(np.round(ticks))
