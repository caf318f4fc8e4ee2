"""Draw figures into files: all that a results file allows, or the curves of a training run."""

from __future__ import annotations

import csv
import difflib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from landscape.options import OptionError, require
from landscape.plots import FIGURES, IMPORTED, STUDIES, over_seeds, study_module, tidy
from landscape.plots.appearance import label_of
from landscape.plots.comparison.grouping import MANY, drawn_groups
from landscape.plots.figure import Figure
from landscape.plots.selection import Selection, Stored
from landscape.plots.theme import HIGHEST, SCREEN, Theme, applied, captioned
from landscape.results import reader
from landscape.results.replacing import replacing
from landscape.studies.citation import latex

if TYPE_CHECKING:
    from landscape.plots.comparison.comparison import Comparison

EVERYTHING = Selection()
MESH_DPI = 200  # of meshes in PDF and SVG, whatever the style
FORMATS = ("png", "pdf", "svg")
NAMES = (*FIGURES, *STUDIES)
# No creation date in the files: equal figures are equal files.
_METADATA: Mapping[str, dict[str, None]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
_log = logging.getLogger(__name__)


def draw(
    path: Path | str,
    out: Path | str,
    formats: Sequence[str] = ("png",),
    probes: Sequence[str] | None = None,
    *,
    figures: Sequence[str] = (),
    selection: Selection = EVERYTHING,
    group: Sequence[str] = (),
    theme: Theme = SCREEN,
    eigenvalues: tuple[float, float] | None = None,
    live: bool = True,
) -> list[Path]:
    """Draw every figure that the results allow, all results of a probe in one; return the files written.

    Results with nothing finished are left out and logged; `left_out` lists them. `figures` are the names of those to
    draw (default: all). `group` are rules of groups over seeds as of `landscape.compare`, or `none`; of many networks
    there are groups without. `eigenvalues` is the axis range of the max-eigenvalue spectra; default: from the data.
    Without `live`, what the report's page draws by itself is left out.

    Raises:
        OptionError: a format, a probe, a figure or a label is unknown.
        FileNotFoundError, ValueError: there is no results file, or `out` is not a folder.
    """
    if unknown := [name for name in formats if name not in FORMATS]:
        raise OptionError(f"unknown format {unknown[0]}; expected {', '.join(FORMATS)}")
    known = {figure.probe for figure in FIGURES.values()}
    if unknown := [name for name in probes or () if name not in known]:
        raise OptionError(f"no figure shows the probe {unknown[0]}; expected {', '.join(sorted(known))}")
    for name in figures:
        check_name(name)
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a folder for the figures; give another --out")
    written = []
    with reader.streaming(path) as stored, applied(theme), reader.using(path):
        everything = selection.of(reader.by_checkpoint(stored))
        for left, data in _left_out(everything):
            _log.info("no figure of %s%s", left, _why_left_out(data, known=left.partition("/")[0] in known))
        networks = [item for item in everything if not item[0].startswith("compare/")]
        groups = drawn_groups(list(dict.fromkeys(label_of(data) for _, data in networks)), group)
        if groups is not None:
            _log.info(
                "groups over seeds: %s; landscape plot --group none draws every network", ", ".join(groups.members)
            )
        drawn = over_seeds.both(networks, groups, {figure.probe for figure in FIGURES.values() if figure.seeds})
        pages = _pages(*drawn, selection, probes, figures)
        for name, page in pages if live else (one for one in pages if not FIGURES[one[0]].live):
            if eigenvalues is not None and "ranges" in signature(page.func).parameters:
                page.keywords["ranges"] = ((eigenvalues[0], 0.0), (0.0, eigenvalues[1]))
            with reader.using(path, names=[str(data.encoding.get("group", name)) for data in page.args[0]]):
                for file, part in _split(name, page) if theme.columns else [(name, page)]:
                    written += _save(file, part, folder, formats)
        if probes is None:
            studies = [name for name in STUDIES if name in figures or not figures]
            written += _save_studies(selection.of(stored), folder, formats, studies)
    for name in sorted(set(figures) - {file.stem.partition("-")[0] for file in written}):
        _log.info("no figure %s: %s", name, _needs(name))
    return written


def draw_layout(
    path: Path | str,
    out: Path | str,
    formats: Sequence[str] = ("png",),
    *,
    selection: Selection = EVERYTHING,
    theme: Theme = SCREEN,
) -> list[Path]:
    """Draw all networks as the multi-panel figures of Park & Kim 2022, the last result of every checkpoint.

    A part that no result shows is logged, with the command that measures it, and named in the caption.

    Raises:
        OptionError, FileNotFoundError, ValueError: as `draw`.
    """
    from landscape.plots.figures import park2022

    written = []
    with reader.streaming(path) as read, applied(theme):
        stored = selection.of(reader.by_checkpoint(read))
        everything = [data for _, data in stored]
        for name, parts in park2022.PAGES.items():
            found = []
            for part in parts:
                entry = FIGURES[part.figure]
                results = entry.selected([data for name, data in stored if name.partition("/")[0] == entry.probe])
                found.append(park2022.chosen(part, results, selection.looks(results, everything)))
            for command in park2022.missing(parts, found):
                _log.info("%s: nothing of %s yet", name, command)
            if any(found):
                written += _save(name, partial(park2022.page, parts, found), Path(out), formats)
    return written


def draw_studies(
    path: Path | str, out: Path | str, formats: Sequence[str] = ("png",), names: Sequence[str] = STUDIES
) -> list[Path]:
    """Draw figures of several probes together where a file holds what they need; return the files.

    They are named like the study, several of one kind with their labels: `smoothing.png`, `smoothing-LABEL.png`.
    """
    with reader.streaming(path) as stored, applied(SCREEN), reader.using(path):
        return _save_studies(stored, Path(out), formats, names)


def _pages(
    stored: Stored, means: Stored, selection: Selection, probes: Sequence[str] | None, figures: Sequence[str]
) -> Iterator[tuple[str, partial[Figure]]]:
    """Name and drawing of every figure that the results of networks, or their means over seeds, allow."""
    everything = [data for _, data in stored]
    for figure in FIGURES.values():
        if (probes is not None and figure.probe not in probes) or (figures and figure.name not in figures):
            continue
        shown = means if figure.seeds else stored
        results = figure.selected([data for name, data in shown if name.partition("/")[0] == figure.probe])
        if results:
            yield figure.name, partial(figure.module.page, results, selection.looks(results, everything))


def _split(name: str, page: partial[Figure]) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Files and drawings of a figure: of as many networks together as are at most `HIGHEST`, the first by its name."""
    results, looks = page.args
    figure, size = page(), len(results)
    while figure.get_figheight() > HIGHEST and size > 1:
        size = min(size - 1, max(1, int(size * HIGHEST / figure.get_figheight())))
        figure = page.func(results[:size], looks[:size], **page.keywords)
    yield name, lambda: figure
    for number, at in enumerate(range(size, len(results), size), start=2):
        yield f"{name}-{number}", partial(page.func, results[at : at + size], looks[at : at + size], **page.keywords)


def _needs(name: str) -> str:
    """What a figure needs that the file does not hold, in words."""
    if name in STUDIES:
        return f"run landscape {name} first"
    figure = FIGURES[name]
    return f"the results hold no finished {', '.join(figure.needs)} of landscape {figure.probe}"


def _save_studies(stored: Stored, folder: Path, formats: Sequence[str], names: Sequence[str]) -> list[Path]:
    written = []
    for name in names:
        module = study_module(name)
        found = module.studies(stored)
        for study in found:
            label = re.sub(r"[^\w.+-]", "_", study.label)
            file = f"{name}-{label}" if len(found) > 1 else name
            written += _save(file, partial(module.page, study), folder, formats)
    return written


def draw_comparison(comparison: Comparison, out: Path | str, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw a comparison that need not be stored; return the files, `compare.*`."""
    from landscape.plots.comparison.rows import label_of, records, words_of
    from landscape.plots.figures import compare_study

    study = compare_study.Records(label_of(comparison), records(comparison), words_of(comparison))
    with applied(SCREEN):
        return _save("compare", partial(compare_study.page, study), Path(out), formats)


def draw_run(folder: Path, out: Path, formats: Sequence[str] = ("png",), *, theme: Theme = SCREEN) -> list[Path]:
    """Draw loss and accuracy of a training run from its `metrics.csv`; return the files written, `curves.*`.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: it is not the table of a training run.
    """
    from landscape.plots import curves

    file = folder / "metrics.csv"
    if not file.is_file():
        raise FileNotFoundError(f"no metrics.csv in {folder}; give a results file, or a run folder of landscape train")
    try:
        lines = list(csv.DictReader(file.read_text().splitlines()))
        run = {name: np.array([float(line[name]) for line in lines]) for name in (*curves.NEEDS, "seconds")}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is not the table of a training run ({error}); train again, or delete it") from None
    if not lines:
        raise ValueError(f"{file} holds no finished epoch yet; wait for the first")
    with applied(theme):
        return _save("curves", lambda: curves.page(run, folder.resolve().name), out, formats)


def draw_page(name: str, shown: Sequence[Any], out: Path | str, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Draw what a study gives by the module of figures of that name; return the files, none for nothing."""
    if not shown:
        return []
    with applied(SCREEN):
        return _save(name, partial(import_module(f"landscape.plots.figures.{name}").page, shown), Path(out), formats)


def is_drawable(path: Path | str) -> bool:
    """Whether a figure shows a result of a file."""
    with reader.streaming(path, on_demand=True) as stored:
        return len(_left_out(stored)) < len(stored)


def has_many(path: Path | str, group: Sequence[str] = ()) -> bool:
    """Whether a file holds more than `MANY` networks, or groups over their seeds, of which each picture takes seconds.

    Raises:
        OptionError, FileNotFoundError, ValueError: as `draw`.
    """
    with reader.streaming(path, on_demand=True) as stored:
        labels = list(dict.fromkeys(label_of(data) for name, data in stored if not name.startswith("compare/")))
    groups = drawn_groups(labels, group)
    return len(labels if groups is None else (*groups.members, *groups.rest)) > MANY


def left_out(path: Path | str) -> list[str]:
    """Groups that appear in no figure: nothing of them is finished, or no figure draws their probe."""
    with reader.streaming(path) as stored:
        return [name for name, _ in _left_out(stored)]


def check_name(name: str) -> None:
    """Raise an OptionError unless a figure has this name."""
    near = difflib.get_close_matches(name, NAMES, 5, cutoff=0.4) or NAMES[:5]
    require(name in NAMES, "figure", name, f"the name of a figure, such as {', '.join(near)}")


def _left_out(stored: Stored) -> list[tuple[str, xr.Dataset]]:
    def drawn(probe: str, data: xr.Dataset) -> bool:
        return probe in IMPORTED or any(figure.drawable(data) for figure in FIGURES.values() if figure.probe == probe)

    return [(name, data) for name, data in stored if not drawn(name.partition("/")[0], data)]


def _why_left_out(data: xr.Dataset, *, known: bool) -> str:
    if "done" not in data or not (data["done"].values == 1).all():
        return " yet"
    return ": its numbers are not finite" if known else ": no installed figure shows it"


def _save(name: str, page: Callable[[], Figure], folder: Path, formats: Sequence[str]) -> list[Path]:
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{extension}" for extension in formats]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a label in any script is welcome
        figure = tidy.tidied(page())
        for path, extension in zip(paths, formats, strict=True):
            dpi: Any = matplotlib.rcParams["savefig.dpi"] if extension == "png" else MESH_DPI
            drawn = BytesIO()  # the writer of PDF hides the error of a full disk behind one of its own
            figure.savefig(drawn, format=extension, metadata=_METADATA[extension], dpi=dpi)
            with replacing(path) as stream:
                stream.write(drawn.getbuffer())
    if captioned() == "tex" and (text := str(getattr(figure, "caption", ""))):
        with replacing(folder / f"{name}.tex") as stream:
            stream.write(_tex(text, name).encode())
    return paths


def _tex(text: str, name: str) -> str:
    r"""A caption with a label, to `\input` below the figure: formulas stay, all else is text."""
    parts = re.split(r"(?<!\\)(\$[^$]+?(?<!\\)\$)", text)
    said = "".join(part if i % 2 else latex(part.replace(r"\$", "$")) for i, part in enumerate(parts))
    return f"\\caption{{{said}}}\n\\label{{fig:landscape-{name}}}\n"
