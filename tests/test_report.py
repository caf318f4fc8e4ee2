"""The report: complete without a network or a script, every label text, numbers with intervals and protocols."""

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import synthetic
from drawable import EVERYDAY, UNFINISHED, stored_in
from PIL import Image

from landscape.cli.main import exit_code
from landscape.doctor.finding import Finding
from landscape.plots import FIGURES
from landscape.plots.comparison import rows as comparison_rows
from landscape.plots.comparison.text import compare
from landscape.plots.report import page, panels, report, sections, table
from landscape.results import reader
from landscape.statistics.intervals import interval

pytestmark = pytest.mark.slow

VIT, RESNET = (network.label for network in synthetic.NETWORKS[:2])
HOSTILE = (
    "<script>alert(1)</script>",
    "$x_1 \\frac{a}{b}$ 100 % & #",
    "größe-模型-🙂",
    '"><img src=x onerror=alert(1)>',
)
LARGEST_SCRIPT, LARGEST_DATA = 64_000, 312_000  # bytes


class Page(HTMLParser):
    """Elements with their attributes, text outside scripts, and the content of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[dict[str, str]] = []
        self.words = ""
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append({name: value or "" for name, value in attrs})
        self._open = tag if tag in self.raw else ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.raw[self._open].append(data)
        else:
            self.words += data

    def of(self, tag: str) -> list[dict[str, str]]:
        return [found for name, found in zip(self.tags, self.attributes, strict=True) if name == tag]


def written(path: Path, folder: Path, figures: list[Path] | None = None) -> str:
    return report(path, folder / "report.html", figures or []).read_text()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A small picture in place of every figure."""
    folder = tmp_path_factory.mktemp("pictures")
    for name in FIGURES:
        Image.new("RGB", (4, 3)).save(folder / f"{name}.png")
    return sorted(folder.glob("*.png"))


@pytest.fixture(scope="module")
def text(study: Path, pictures: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(study, tmp_path_factory.mktemp("page"), pictures)


@pytest.fixture(scope="module")
def shown(text: str) -> Page:
    return Page(text)


def test_the_page_loads_nothing_and_its_policy_allows_nothing_else(text: str, shown: Page) -> None:
    for attributes in shown.attributes:
        for name in ("src", "href", "srcset", "action", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:image/"))
    (policy,) = [a["content"] for a in shown.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    _, script = shown.raw["script"]  # the first is data
    (style,) = shown.raw["style"]
    for name, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script)
    assert "innerHTML" not in script
    assert all(not name.startswith("on") and name != "style" for a in shown.attributes for name in a)


def test_the_page_has_contents_a_viewport_and_a_text_for_every_picture(
    text: str, shown: Page, pictures: list[Path]
) -> None:
    ids = [a["id"] for a in shown.attributes if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in shown.of("a")} <= set(ids)
    assert any(a.get("name") == "viewport" and "width=device-width" in a["content"] for a in shown.of("meta"))
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    images = shown.of("img")
    assert len(images) == len(pictures)
    height = next(a["alt"] for a in images if "surface height" in a["alt"])
    assert VIT in height
    assert re.search(r"height at 0\.5 [\d.]+", height)
    assert "nav" in shown.tags
    assert "easy to misread" in shown.words
    for network in synthetic.NETWORKS:
        assert network.label in shown.words


def test_every_protocol_is_printed_once_and_linked(study: Path, shown: Page) -> None:
    protocols = {str(data.attrs.get("protocol")) for _, data in stored_in(study)}
    items = [a["id"] for a in shown.of("li") if a.get("id", "").startswith("protocol-")]
    assert len(items) == len(protocols)
    for protocol in protocols:
        assert shown.words.count(protocol) == 1


def test_without_a_script_every_picture_is_open_and_every_live_part_hidden(shown: Page) -> None:
    assert all("open" in a for a in shown.of("details") if a.get("class") == "picture")
    live = [a for a in shown.attributes if a.get("class") in ("live", "copy")]
    assert live
    assert all("hidden" in a for a in live)


def test_what_only_the_script_draws_has_its_meaning_and_its_commands(tmp_path: Path) -> None:
    probes = ("variance", "noise")  # the latter has no part that the script draws, and of many networks no picture
    path = synthetic.write(tmp_path / "r.h5", [synthetic.transformer("net", depth=1)], probes=probes)
    found = Page(written(path, tmp_path))
    ids = {a["id"] for a in found.attributes if "id" in a}
    assert {"meaning-variance", "about-variance", "meaning-noise", "about-noise"} <= ids
    plot = f"landscape plot {path} --figure"
    assert f"Drawn above, where scripts run; {plot} variance draws it whole." in found.words
    assert f"{plot} noise draws it whole." in found.words
    assert found.of("img") == []


@pytest.mark.parametrize("label", HOSTILE)
def test_a_label_is_text(label: str, tmp_path: Path, pictures: list[Path]) -> None:
    path = synthetic.write(tmp_path / "r.h5", [synthetic.transformer(label, depth=1)], probes=("variance", "lesion"))
    found = Page(written(path, tmp_path, [p for p in pictures if p.stem in ("variance", "lesion")]))
    assert found.tags.count("script") == 2
    assert found.tags.count("img") == 2
    assert label in found.words
    data = json.loads(found.raw["script"][0])
    assert data["layers"][0]["series"][0]["who"] == label
    assert "<" not in found.raw["script"][0]


def test_the_table_holds_the_stored_numbers_with_their_intervals(study: Path) -> None:
    columns = {column.number.title: column for column in table.comparison(stored_in(study)).columns}
    ((_, hessian),) = reader.find(study, "hessian", VIT)
    ape = columns["APE"].cells[VIT]
    assert (ape.value, ape.low, ape.high) == tuple(hessian[name].item() for name in ("ape", "ape_low", "ape_high"))
    ((_, surface),) = reader.find(study, "surface", VIT)
    height, error = (surface[name].sel(radius=0.5).item() for name in ("height", "height_se"))
    low, _ = interval(height, error, surface["height_se"].attrs["n"])
    assert columns["height"].cells[VIT].low == pytest.approx(float(low))
    ((_, fourier),) = reader.find(study, "fourier", VIT)
    assert columns["high freq. last"].cells[VIT].value == fourier["high_frequency"].values[-1]
    assert columns["largest drop"].cells[VIT].at == "at stages.0.0.stem"


def test_numbers_of_different_protocols_are_in_different_columns(few: Path, tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        group = next(group for name, group in file["fourier"].items() if name.startswith(VIT))
        group.attrs["protocol"] = "another split, 5 samples"
        lesion = next(group for name, group in file["lesion"].items() if name.startswith(RESNET))
        lesion.attrs["parameters"] = json.dumps({"bn": "recalibrate:4"})
        next(iter(file["hessian"].values())).attrs["data_sha256"] = "another folder of the same name"

    path = synthetic.changed(few, tmp_path / "r.h5", change)
    found = table.comparison(reader.groups(path))
    by_title: dict[str, list[table.Column]] = {}
    for column in found.columns:
        by_title.setdefault(column.number.title, []).append(column)
    first, second = by_title["high freq. last"]
    assert set(first.cells).isdisjoint(second.cells)
    assert {"another split", "5 samples"} <= {
        part for column in (first, second) for part in column.distinct.split(", ")
    }
    assert any("bn recalibrate:4" in column.distinct for column in by_title["largest drop"])
    assert any("digest of the samples another" in column.distinct for column in by_title["APE"])
    words = Page(written(path, tmp_path)).words
    assert "another split, 5 samples" in words


def decoded(held: dict[str, Any]) -> np.ndarray:
    """The values of an encoded array, as the page's script decodes them: NaN unfinished, inf not finite."""
    if held["t"] == "f4":
        return np.frombuffer(base64.b64decode(held["b"]), "<f4").reshape(held["n"]).astype(float)
    bits = 8 * int(held["t"][1:])
    planes = np.frombuffer(zlib.decompress(base64.b64decode(held["z"]), -15), np.uint8).astype(int)
    rest = sum(plane << 8 * i for i, plane in enumerate(planes.reshape(bits // 8, -1)))
    signed = np.where(rest & 1, -(rest >> 1) - 1, rest >> 1).reshape(held["n"])
    code = signed.cumsum(axis=0).cumsum(axis=1) % 2**bits
    top = 2**bits - 3
    value = held["lo"] + (held["hi"] - held["lo"]) * code / top
    value = np.where(held["zero"] & (code == 0), 0.0, np.exp(value)) if held["log"] else value
    return np.where(code > top, np.where(code == top + 2, np.nan, np.inf), value)


@pytest.mark.parametrize("bits", [panels.VALUE, panels.ERROR])
def test_arrays_come_back_as_they_were(bits: int) -> None:
    rng = np.random.default_rng(0)
    wide = np.exp(rng.normal(scale=4, size=(90, 80)))
    zeros = wide.copy()
    zeros[5] = 0.0
    for values in (rng.normal(size=(90, 80)), wide, zeros, rng.normal(size=(3, 4))):
        values[0, 0], values[1, 1] = np.inf, np.nan
        done = np.ones(values.shape, bool)
        done[2, 2] = False
        held = panels.encoded(values, done, bits=bits)
        found = decoded(held)
        missing = np.isnan(found)
        assert missing[2, 2]
        assert missing.sum() == 1
        assert np.isinf(found[[0, 1], [0, 1]]).all()
        known = np.isfinite(values) & done
        span = np.ptp(values[known])
        steps = 2**bits - 3
        close = {"rtol": 22 / steps} if held.get("log") else {"rtol": 1e-6, "atol": span / steps}
        np.testing.assert_allclose(found[known], values[known], **close)
        np.testing.assert_array_equal(found[known & (values == 0)], 0.0)


def test_the_script_and_the_data_are_small(text: str, shown: Page) -> None:
    folder = Path(page.__file__).parent
    scripts = {file.name: file.read_text() for file in folder.glob("*.js")}
    assert set(scripts) == set(page.SCRIPTS)
    assert sum(len(script.encode()) for script in scripts.values()) <= LARGEST_SCRIPT
    data, script = (len(part.encode()) for part in shown.raw["script"])
    # Three surfaces of 201 x 201 points, in place of the small ones: losses of 64 samples on a plane through kinks.
    a, b, c = np.random.default_rng(0).normal(size=(3, 128))
    kinks = np.maximum(a + b * (x := np.linspace(-1, 1, 201))[:, None, None] + c * x[:, None], 0)
    losses = np.log1p(np.exp(kinks.reshape(201, 201, 64, 2).sum(axis=-1)))  # which take the bytes of a ReLU network's
    surface = ((losses.mean(axis=-1), 16), (losses.std(axis=-1, ddof=1) / 8, 8))
    fine = 3 * sum(len(json.dumps(panels.encoded(values, bits=bits))) for values, bits in surface)
    assert fine <= 120_000
    assert data + fine + script <= LARGEST_DATA


def test_the_page_lists_what_the_doctor_found_with_what_to_do(few: Path, tmp_path: Path) -> None:
    wrong = Finding("one", "wrong", ("surface/a", "surface/b"), "a <b>", "run: landscape surface a.pt --range 1")
    note = Finding("two", "note", ("hessian/a",), "text", "look at it")
    found = Page(report(few, tmp_path / "r.html", [], [wrong, note]).read_text())
    words = " ".join(found.words.split())
    assert "1 wrong and 1 note." in words
    ids, first = [a["id"] for a in found.attributes if "id" in a], ["#answers", "#checks", "#checkpoints"]
    assert (
        [a["href"] for a in found.of("a") if a["href"] in first][:3]
        == first
        == [f"#{i}" for i in ids if f"#{i}" in first]
    )
    assert "wrong a <b> surface/a and 1 more" in words
    assert "landscape surface a.pt --range 1" in words
    assert f"landscape doctor {few}" in words
    assert "Nothing wrong or suspicious" in Page(report(few, tmp_path / "r.html", [], []).read_text()).words
    assert "Checks of these numbers" not in Page(report(few, tmp_path / "r.html", []).read_text()).words


def test_a_stored_comparison_is_a_table_with_verdicts(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:2], probes=("hessian", "lesion"))
    assert "Differences, tested" not in Page(written(path, tmp_path)).words
    made = compare(path)
    comparison_rows.store(path, made)
    found = Page(written(path, tmp_path))
    assert found.tags.count("caption") == 1
    said = " ".join(found.words.split())
    verdicts = [f"{c.verdict}{c.favours and ': ' + c.favours}" for c in made.contrasts if c.difference is not None]
    assert [verdict for verdict in verdicts if verdict not in said] == []
    assert f"{made.contrasts[0].first} − {made.contrasts[0].second}" in said


def test_many_networks_are_groups_over_their_seeds(tmp_path: Path, pictures: list[Path]) -> None:
    networks = [synthetic.transformer(f"{kind}-s{i}", depth=2) for kind in ("a", "b") for i in range(5)]
    path = synthetic.write(tmp_path / "r.h5", networks, probes=("variance", "surface"))
    with h5py.File(path, "r+") as file:
        for name, group in file["variance"].items():
            group["variance"][...] *= 1 + int(name.partition("-s")[2][0])
    found = Page(written(path, tmp_path, [p for p in pictures if p.stem in ("variance", "surface")]))
    data = json.loads(found.raw["script"][0])
    (plot,) = data["layers"]
    assert data["groups"] == [[kind, *(f"{kind}-s{i}" for i in range(5))] for kind in ("a", "b")]
    assert [series["name"] for series in plot["series"]] == ["a", "b"]
    assert [panel["name"] for panel in data["surface"]] == ["a", "b"]
    members = [data["variance"].values for _, data in reader.find(path, "variance") if data.label.startswith("a")]
    np.testing.assert_allclose(decoded(plot["series"][0]["values"]), np.mean(members, axis=0), rtol=1e-6)
    half = 2.7764 * np.std(members, axis=0, ddof=1) / 5**0.5  # Student's t of four degrees of freedom
    np.testing.assert_allclose(decoded(plot["series"][0]["halves"]), half, rtol=1e-4)
    assert "Means over seeds" in found.words
    assert "a-s0, a-s1" in found.words
    every = Page(report(path, tmp_path / "each.html", [], group=["none"]).read_text())
    assert len(json.loads(every.raw["script"][0])["layers"][0]["series"]) == 10
    assert "Means over seeds" not in every.words


def test_a_group_of_an_unknown_probe_is_skipped_with_a_line(few: Path, tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        file.copy(next(iter(file["variance"].values())), file, "aura/net-0123456789")
        file["aura/net-0123456789"].attrs["probe"] = "aura"

    words = Page(written(synthetic.changed(few, tmp_path / "r.h5", change), tmp_path)).words
    assert "aura/net-0123456789 is skipped: no figure shows the probe aura." in words


def surface_file(path: Path, change: Any) -> Path:
    return synthetic.changed(
        synthetic.write(path.with_name("base.h5"), synthetic.NETWORKS[:1], probes=("surface",)), path,
        lambda file: [change(group) for group in file["surface"].values()],
    )  # fmt: skip


def test_cells_that_are_not_finite_are_counted_and_an_empty_surface_is_left_out(tmp_path: Path) -> None:
    def infinite(group: h5py.Group) -> None:
        group["loss"][0, :3] = np.inf

    path = surface_file(tmp_path / "r.h5", infinite)
    (panel,) = json.loads(Page(written(path, tmp_path)).raw["script"][0])["surface"]
    assert panel["lost"] == 3

    def nothing(group: h5py.Group) -> None:
        for name in ("loss", "objective", "profile_mean"):
            group[name][...] = np.nan

    empty = surface_file(tmp_path / "e.h5", nothing)
    found = Page(written(empty, tmp_path))
    assert json.loads(found.raw["script"][0])["surface"] == []
    assert "is not drawn: no finite value in loss (all units are finished)" in found.words


def test_a_large_surface_is_thinned_and_unused_arrays_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from landscape.probe import Plan, Quantity
    from landscape.results.run_key import RunKey
    from landscape.results.writer import Writer

    axis = np.linspace(-1, 1, 401)
    named = {name: Quantity(name) for name in ("loss", "loss_se", "l2", "accuracy")}
    plan = Plan(over={"x": axis, "y": axis}, quantities=named)
    path = tmp_path / "r.h5"
    with Writer(path, RunKey("surface", "net", "0123456789", plan, {"parameters": "{}"})):
        pass
    with h5py.File(path, "r+") as file:
        group = file["surface/net-0123456789"]
        group["loss"][...] = 1 + axis[:, None] ** 2 + 0.5 * axis**2
        group["done"][...] = 1
        group["l2"][...] = 7.0
    read: list[str] = []
    get = reader._Parts.__getitem__
    monkeypatch.setattr(
        reader._Parts, "__getitem__", lambda self, key: (read.append(self.item.name), get(self, key))[1]
    )
    (panel,) = json.loads(Page(written(path, tmp_path)).raw["script"][0])["surface"]
    assert panel["loss"]["n"] == [201, 201]
    assert panel["thinned"] == "201 x 201 of 401 x 401"
    assert read
    assert not any(name.endswith("/l2") for name in read)


def test_streamed_results_are_those_in_memory(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(stored_in(study))
    monkeypatch.setattr(reader, "LARGE", 16)
    with reader.streaming(study) as streamed:
        assert {name for name, _ in streamed} == set(whole)
        for name, data in streamed:
            assert data.attrs["label"] != VIT or data.identical(whole[name]), name


def test_many_layers_and_many_checkpoints_are_shown(tmp_path: Path) -> None:
    networks = [synthetic.transformer(f"net {'n' * 60} {i}", depth=100) for i in range(12)]
    path = synthetic.write(tmp_path / "r.h5", networks, probes=("variance",))
    (plot,) = json.loads(Page(written(path, tmp_path)).raw["script"][0])["layers"]
    assert len(plot["series"]) == 12
    assert all(len(series["layers"]) == 201 for series in plot["series"])


def test_a_file_without_results_makes_a_page_that_says_so(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def empty(file: h5py.File) -> None:
        for probe in list(file):
            del file[probe]

    words = Page(written(synthetic.changed(few, tmp_path / "r.h5", empty), tmp_path)).words
    assert "Nothing measured yet." in words
    assert exit_code(["report", str(tmp_path / "r.h5"), "--out", str(tmp_path / "p.html")]) == 1
    assert "nothing finished to draw" in capsys.readouterr().err


def test_a_report_into_a_folder_is_rejected(few: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a file for the page"):
        report(few, tmp_path, [])


def test_report_and_compare_take_half_finished_results_and_never_load_torch(tmp_path: Path) -> None:
    probes = ("noise-scale", "hessian", "variance")
    networks = [synthetic.transformer(label, depth=2) for label in ("vit", "other")]
    half = synthetic.write(tmp_path / "half.h5", networks, probes=probes, share=0.001)
    code = (
        "import sys; from landscape.cli.main import exit_code\n"
        f"codes = [exit_code([*words, '--quiet']) for words in (['compare', {str(half)!r}, '--no-store'],\n"
        f"         ['report', {str(half)!r}, '--out', {str(tmp_path / 'new' / 'report.html')!r}])]\n"
        "print(*codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == ["0", "0", "False"]
    found = Page((tmp_path / "new" / "report.html").read_text())
    drawn = [a["id"].removeprefix("figure-") for a in found.of("details") if a.get("class") == "picture"]
    expected = [name for name in EVERYDAY if name not in UNFINISHED[0.001] and FIGURES[name].probe in probes]
    assert sorted(drawn) == sorted(expected)
    assert found.tags.count("img") == len([name for name in drawn if not FIGURES[name].live])


def test_a_picture_of_many_networks_is_made_smaller_and_the_page_says_so(few: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (17000, 100, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "lesion.png", compress_level=1)
    Image.new("RGB", (40, 30)).save(tmp_path / "variance.png")
    found = Page(written(few, tmp_path, [tmp_path / "lesion.png", tmp_path / "variance.png"]))
    sides = []
    for attributes in found.of("img"):
        with Image.open(io.BytesIO(base64.b64decode(attributes["src"].partition(",")[2]))) as picture:
            sides.append(picture.size)
    assert sorted(sides) == [(40, 30), (50, 8500)]
    assert found.words.count("Shown at 50% of its size; landscape plot") == 1


def test_the_text_of_a_picture_names_the_first_of_many_results_and_says_how_many_more(
    tmp_path: Path, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:2], probes=("trace",))
    (picture,) = (one for one in pictures if one.stem == "trace")
    for most in (2, 1):
        monkeypatch.setattr(sections, "NAMED", most)
        (alternative,) = (one["alt"] for one in Page(written(path, tmp_path, [picture])).of("img"))
        assert (VIT in alternative, RESNET in alternative, "and 1 more" in alternative) == (True, most == 2, most == 1)
