"""The report in a browser: no error, no request, and everything that turns, sorts, links and adapts does so."""

import base64
import csv
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import h5py
import numpy as np
import pytest
import synthetic
from browser import MISSING, Browser, browser
from PIL import Image

from landscape.plots import FIGURES
from landscape.plots.report import report

pytestmark = [pytest.mark.campaign, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'
RENDERERS = ("?renderer=webgl2", "?renderer=2d")


@pytest.fixture(scope="module")
def path(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three networks, with a small picture in place of every figure, and a label that is markup."""
    folder = tmp_path_factory.mktemp("report")
    results = folder / "results.h5"
    results.write_bytes(study.read_bytes())
    with h5py.File(results, "r+") as file:
        for group in (group for probe in file.values() for group in probe.values()):
            if group.attrs["label"] == synthetic.NETWORKS[2].label:
                group.attrs["label"] = HOSTILE
    for name in FIGURES:
        Image.new("RGB", (40, 30), "#88aacc").save(folder / f"{name}.png")
    return report(results, folder / "report.html", sorted(folder.glob("*.png")))


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        made.tool("Network.enable")
        yield made


@pytest.fixture
def opened(window: Browser, path: Path) -> Browser:
    window.tool("Emulation.clearDeviceMetricsOverride")
    window.tool("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": "light"}])
    window.open(path)
    window.until("return document.documentElement.dataset.ready === 'true'")
    return window


def centre(window: Browser, selector: str) -> tuple[float, float]:
    """The middle of an element, after scrolling to it."""
    x, y = window.run(
        "const node = document.querySelector(arguments[0]);"
        "node.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const b = node.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]",
        selector,
    )
    return float(x), float(y)


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Share of the pixels that differ visibly."""
    assert one.shape == other.shape
    return float((np.abs(one - other).max(axis=-1) > 24).mean())


def settled(window: Browser) -> None:
    window.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("renderer", RENDERERS)
def test_the_page_opens_without_an_error_and_without_a_request(window: Browser, path: Path, renderer: str) -> None:
    window.log("browser")
    window.log("performance")
    window.open(path.resolve().as_uri() + renderer)
    window.until("return document.documentElement.dataset.ready === 'true'")
    assert [entry["message"] for entry in window.log("browser") if entry["level"] == "SEVERE"] == []
    events = [json.loads(entry["message"])["message"] for entry in window.log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []
    assert {url.partition("?")[0] for url in asked if url.startswith("file:")} == {path.resolve().as_uri()}
    if renderer.endswith("2d"):
        assert window.run("return views.surface.renderer()") == "2d"


def test_a_policy_blocks_any_other_script(opened: Browser) -> None:
    opened.run(
        "const node = document.createElement('script'); node.textContent = 'window.broken = true';"
        "document.body.append(node)"
    )
    assert opened.run("return window.broken") is None
    opened.log("browser")  # holds the refusal


def test_labels_are_text(opened: Browser) -> None:
    assert opened.run("return document.querySelectorAll('img[src=x]').length + document.scripts.length") == 2
    assert opened.run(
        "return document.querySelector('#surface-view select').textContent.includes(arguments[0])", HOSTILE
    )
    assert HOSTILE in opened.run("return document.querySelector('#checkpoints tbody').textContent")


@pytest.mark.parametrize("renderer", RENDERERS)
def test_the_surface_turns_by_mouse_and_keys_and_comes_back(window: Browser, path: Path, renderer: str) -> None:
    window.open(path.resolve().as_uri() + renderer)
    window.until("return document.documentElement.dataset.ready === 'true'")
    x, y = centre(window, "canvas.turn")
    settled(window)
    before = window.picture("canvas.turn")
    assert np.ptp(before.reshape(-1, 3), axis=0).min() > 50  # something is drawn
    window.mouse("mousePressed", x, y, pressed=True)
    window.mouse("mouseMoved", x + 80, y + 20, pressed=True)
    window.mouse("mouseReleased", x + 80, y + 20)
    window.mouse("mouseMoved", 2, 2)
    settled(window)
    turned = window.picture("canvas.turn")
    assert difference(before, turned) > 0.02
    window.run("document.querySelector('canvas.turn').focus()")
    window.key("ArrowLeft")
    window.key("+")
    settled(window)
    assert difference(turned, window.picture("canvas.turn")) > 0.01
    reset = "[...document.querySelectorAll('#surface button')].find((b) => b.textContent.startsWith('Reset'))"
    window.run(f"{reset}.click()")
    window.run("document.activeElement.blur()")
    settled(window)
    assert difference(before, window.picture("canvas.turn")) < 0.005


def test_both_renderers_draw_the_same_surface(window: Browser, path: Path) -> None:
    pictures = []
    for renderer in RENDERERS:
        window.open(path.resolve().as_uri() + renderer)
        window.until("return document.documentElement.dataset.ready === 'true'")
        if renderer.endswith("webgl2") and window.run("return views.surface.renderer()") != "webgl2":
            pytest.skip("no WebGL2 in this browser")
        centre(window, "canvas.turn")
        settled(window)
        pictures.append(window.picture("canvas.turn"))
    assert difference(*pictures) < 0.05


def test_hovering_says_the_loss_with_its_error(opened: Browser) -> None:
    x, y = centre(opened, "canvas.turn")
    settled(opened)
    opened.mouse("mouseMoved", x, y)
    opened.until("return !document.getElementById('tooltip').hidden")
    said = opened.run("return document.getElementById('tooltip').textContent")
    assert "loss" in said
    assert "±" in said


def test_the_cap_and_the_slice_change_what_is_drawn(opened: Browser) -> None:
    line = "return document.querySelector('#surface-view > .chart path[stroke]').getAttribute('d')"
    before = opened.run(line)
    slide = (
        "const input = document.querySelector(`#surface input[aria-label='${arguments[0]}']`);"
        "input.value = arguments[1];"
        "input.dispatchEvent(new Event('input')); return views.surface.state[arguments[2]]"
    )
    assert opened.run(slide, "Slice: angle", 90, "angle") == pytest.approx(np.pi / 2)
    assert opened.run(line) != before
    low, high = (opened.run(slide, "Cap of the loss", value, "cap") for value in (30, 80))
    assert low < high
    x, y = centre(opened, "#surface-view .flat svg")
    opened.mouse("mousePressed", x - 90, y + 90, pressed=True)
    opened.mouse("mouseMoved", x + 90, y - 90, pressed=True)
    opened.mouse("mouseReleased", x + 90, y - 90)
    assert opened.run("return views.surface.state.angle") == pytest.approx(np.pi / 4, abs=0.1)


def test_the_bandwidth_of_spectra_and_the_epoch_of_trajectories_slide(opened: Browser) -> None:
    line = "return document.querySelector('#spectra svg path[stroke]').getAttribute('d')"
    slide = (
        "const i = document.querySelector(arguments[0]); i.value = arguments[1]; i.dispatchEvent(new Event('input'))"
    )
    sides = "density([1, 2, 3, ...Array(few).fill(-1)], -4, 4, 1, few)"  # a side of few eigenvalues has ticks alone
    drawn = f"const few = DATA.spectra[0].few; return {sides}.filter((p) => p.x > 0).map((p) => [p.x, p.y, p.kind])"
    assert opened.run(drawn) == [[x, 0, "tick"] for x in (1, 2, 3)]
    before = opened.run(line)
    opened.run(slide, "#spectra input[type=range]", 2)
    assert opened.run(line) != before
    opened.run(slide, "#trajectory input[type=range]", 0)
    assert "epoch 0" in opened.run("return document.querySelector('#trajectory ul').textContent")
    assert opened.run("return document.querySelectorAll('#trajectory .mark.on').length") > 0


@pytest.mark.parametrize("width", [1440, 390])
def test_charts_have_the_width_of_their_place_and_marks_stay_at_their_points(opened: Browser, width: int) -> None:
    opened.tool("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    settled(opened)
    widths = opened.run(
        "return [...document.querySelectorAll('.chart svg')].map((n) => [n.getBoundingClientRect().width,"
        " n.viewBox.baseVal.width, n.parentNode.clientWidth])"
    )
    assert widths
    for shown, drawn, place in widths:
        assert shown == pytest.approx(drawn, abs=1)
        assert shown == pytest.approx(max(place, 220), abs=1)
    centres = (
        "return [...document.querySelectorAll('#layers .mark')].map((n) => { const b = n.getBoundingClientRect();"
        " return [b.left + b.width / 2 + scrollX, b.top + b.height / 2 + scrollY]; })"
    )
    before = np.asarray(opened.run(centres))
    opened.run("const s = document.querySelector('#layers select'); s.value = 2; s.dispatchEvent(new Event('change'))")
    assert opened.run("return document.querySelectorAll('#layers .mark.on').length") >= 4
    assert np.abs(np.asarray(opened.run(centres)) - before).max() < 1


def test_pointing_at_a_layer_moves_nothing_and_marks_it_everywhere(opened: Browser) -> None:
    opened.tool("Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False)
    settled(opened)
    mark = "#layers .chart:nth-of-type(3) .mark"
    x, y = centre(opened, mark)
    opened.mouse("mouseMoved", x, y)
    opened.until("return !document.getElementById('tooltip').hidden")
    settled(opened)
    box = opened.run(
        "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return [b.left + b.width / 2, b.top + b.height / 2]",
        mark,
    )
    assert box == pytest.approx([x, y], abs=1)
    assert opened.run("return document.querySelectorAll('#layers .mark.on').length") >= 4


def test_a_layer_is_marked_in_every_plot(opened: Browser) -> None:
    opened.run("const s = document.querySelector('#layers select'); s.value = 2; s.dispatchEvent(new Event('change'))")
    marked = opened.run(
        "return [...document.querySelectorAll('#layers .chart')].filter((f) => f.querySelector('.mark.on')).length"
    )
    assert marked >= 4
    said = opened.run("return document.getElementById('layer-said').textContent")
    assert "Fourier" in said
    assert "±" in said
    shown = "return document.querySelectorAll('#layers .mark').length"
    before = opened.run(shown)
    opened.run("document.querySelector('#layers .legend button').click()")
    assert opened.run(shown) < before


def test_the_table_sorts_by_value_both_ways(opened: Browser) -> None:
    values = (
        "const t = document.querySelector('table.sortable'), heads = [...t.tHead.rows[0].cells];"
        "const at = heads.findIndex((h) => h.textContent.startsWith(arguments[0]));"
        "heads[at].querySelector('button').click();"
        "const cells = [...t.tBodies[0].rows].map((r) => r.cells[at].dataset.value ?? r.cells[at].textContent);"
        "return [heads[at].getAttribute('aria-sort'), cells]"
    )
    for direction in ("ascending", "descending"):
        sort, cells = opened.run(values, "APE")
        numbers = [float(cell) for cell in cells if cell]
        assert sort == direction
        assert numbers == sorted(numbers, reverse=direction == "descending")
        assert len(set(numbers)) > 1


def test_what_a_number_means_is_one_click_away(opened: Browser) -> None:
    opened.run("document.querySelector('a.info[data-title=APE]').click()")
    said = opened.run("const d = document.getElementById('dialog'); return d.open && d.textContent")
    for words in ("mean of the positive eigenvalues", "How this misleads", "batch size 128", "landscape plot"):
        assert words in said
    opened.run("document.querySelector('#dialog > button').click()")
    assert not opened.run("return document.getElementById('dialog').open")


def test_a_command_is_copied(opened: Browser) -> None:
    opened.run("document.querySelector('details.about').open = true; document.querySelector('.about .copy').click()")
    opened.until("return document.querySelector('.about .copy').textContent === 'Copied'")


def test_a_dark_page_is_dark_and_the_button_changes_it(opened: Browser) -> None:
    light = opened.picture()
    opened.tool("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    settled(opened)
    dark = opened.picture()
    assert np.median(light) > 230
    assert np.median(dark) < 60
    opened.run("document.getElementById('theme').click()")
    settled(opened)
    assert np.median(opened.picture()) > 230


def test_a_phone_needs_no_sideways_scroll(opened: Browser) -> None:
    opened.tool("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    opened.run("location.reload()")
    opened.until("return document.documentElement.dataset.ready === 'true'")
    settled(opened)
    assert opened.run("return document.documentElement.scrollWidth") <= 390
    assert opened.run("return document.querySelector('canvas.turn').clientWidth") > 300


def test_the_printed_page_has_every_figure_and_no_controls(opened: Browser) -> None:
    opened.run("dispatchEvent(new Event('beforeprint'))")
    assert opened.run("return document.querySelectorAll('details:not([open])').length") == 0
    opened.run("dispatchEvent(new Event('afterprint'))")
    opened.tool("Emulation.setEmulatedMedia", media="print")
    hidden = "return [...document.querySelectorAll('.controls, nav, #theme')].every((n) => !n.getClientRects().length)"
    assert opened.run(hidden)
    assert len(base64.b64decode(opened.tool("Page.printToPDF")["data"])) > 50_000


def test_keys_reach_everything(opened: Browser) -> None:
    opened.run("document.activeElement.blur(); scrollTo(0, 0)")
    opened.key("Tab")
    assert opened.run("return document.activeElement.className") == "skip"
    unreachable = opened.run(
        "return [...document.querySelectorAll('button, a[href], input, select, summary')]"
        ".filter((n) => n.tabIndex < 0 && ![...n.closest('[data-roving]')?.querySelectorAll('*') ?? []]"
        ".some((other) => other.matches(other.closest('[data-roving]').dataset.roving) && other.tabIndex === 0)).length"
    )
    assert unreachable == 0
    unnamed = opened.run(
        "return [...document.querySelectorAll('canvas[role], svg[role], img')].filter((n) => "
        "!(n.getAttribute('aria-label') || n.alt)).length"
    )
    assert unnamed == 0


def test_fewer_than_60_stops_of_the_tab_key_lead_to_the_last_section_and_arrows_to_what_they_leave_out(
    opened: Browser,
) -> None:
    stops = opened.run(
        "const end = [...document.querySelectorAll('main > section')].at(-1);"
        "return [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex]')].filter((n) =>"
        "n.tabIndex >= 0 && n.checkVisibility() && n.compareDocumentPosition(end) & 4).length"
    )
    assert 10 < stops < 60
    opened.run("document.querySelector('nav a').focus()")
    for key, place in (("ArrowDown", 1), ("ArrowUp", 0), ("End", -1), ("Home", 0)):
        opened.key(key)
        links = "[...document.querySelectorAll('nav a')].filter((n) => !n.closest('[hidden]'))"
        assert opened.run(f"return {links}.at({place}) === document.activeElement")
    opened.run("const box = document.querySelector('.columns input'); box.click()")  # the head with the tab stop
    assert opened.run(
        "return [...document.querySelectorAll('thead [tabindex=\"0\"]')].some((n) => n.checkVisibility())"
    )
    opened.run("document.querySelector('.columns input').click()")


def _filtered(window: Browser, text: str) -> None:
    window.run(
        "const i = document.querySelector('#networks input'); i.value = arguments[0];"
        "i.dispatchEvent(new Event('input'))",
        text,
    )


ROWS = (
    "return [...document.querySelectorAll('#checkpoints tbody tr')].filter((r) => !r.hidden)"
    ".map((r) => r.cells[0].textContent)"
)
SHOWN = (
    "return [...document.querySelectorAll('#layers .legend button')]"
    ".filter((b) => !b.hidden && b.getAttribute('aria-pressed') === 'true').length"
)


def test_networks_are_filtered_and_shown_alone_on_the_whole_page(opened: Browser) -> None:
    every, name = opened.run(ROWS), synthetic.NETWORKS[0].label
    drawn = "return document.querySelectorAll('#layers .mark').length"
    marks = opened.run(drawn)
    _filtered(opened, f"^{name}$")
    assert (opened.run(ROWS), opened.run(SHOWN)) == ([name], 1)
    assert 0 < opened.run(drawn) < marks
    _filtered(opened, "(")  # no pattern: a part of a name
    assert opened.run(ROWS) == [one for one in every if "(" in one]
    _filtered(opened, "^vit-s0$")  # a group is shown with any of its members
    assert opened.run("DATA.groups = [['vit', 'vit-s0']]; return [view.fits('vit'), view.fits('net')]") == [True, False]
    _filtered(opened, "")
    button = "document.querySelector('#layers .legend button')"
    opened.run(f"{button}.dispatchEvent(new MouseEvent('click', {{detail: 2, bubbles: true}}))")
    assert (opened.run(SHOWN), len(opened.run(ROWS))) == (1, 1)
    assert opened.run("return document.querySelectorAll('#trajectory .legend button[aria-pressed=true]').length") == 1
    opened.run(f"{button}.dispatchEvent(new MouseEvent('click', {{shiftKey: true, bubbles: true}}))")
    assert opened.run(ROWS) == every


def test_the_address_brings_back_what_was_shown(window: Browser, path: Path) -> None:
    window.open(path.resolve().as_uri())
    window.until("return document.documentElement.dataset.ready === 'true'")
    _filtered(window, synthetic.NETWORKS[0].label)
    window.run(
        "const change = (s, to) => { const i = document.querySelector(s); i.value = to;"
        " i.dispatchEvent(new Event('input')); };"
        "change(\"input[aria-label='Cap of the loss']\", 30); change('#trajectory input[type=range]', 0);"
        "const box = document.querySelectorAll('#checkpoints .columns input')[1]; box.click();"
        "views.surface.state.az = 0.6; document.querySelector('canvas.turn').focus()"
    )
    window.key("ArrowLeft")
    window.until("return location.hash.includes('Cap') && location.hash.includes('az=')")
    address = window.run("return location.href")
    state = (
        "return [views.surface.state.cap, views.surface.state.az, document.querySelector('#trajectory ul').textContent,"
        " document.querySelector('#checkpoints thead').rows[0].cells[1].hidden,"
        " document.querySelector('#networks input').value]"
    )
    shown, rows = window.run(state), window.run(ROWS)
    window.open("about:blank")
    window.open(address)
    window.until("return document.documentElement.dataset.ready === 'true'")
    assert window.run(state) == shown
    assert shown[3] is True
    assert window.run(ROWS) == rows
    window.open(f"{path.resolve().as_uri()}#layers?hidden=[&Network=99&nobody=1")  # written by hand
    window.until("return document.documentElement.dataset.ready === 'true'")


def _saved(window: Browser, button: str) -> str:
    """What a button would save, as text."""
    window.run("window.download = (name, type, content) => { window.content = content; }; window.content = null")
    window.run(f"{button}.click()")
    window.until("return window.content")
    return str(window.run("return typeof content === 'string' ? content : content.type + ' ' + content.size"))


def test_tables_are_saved_with_their_shown_rows_and_columns(opened: Browser) -> None:
    save = "document.querySelectorAll('#checkpoints .save button')"
    every = list(csv.DictReader(_saved(opened, f"{save}[0]").splitlines()))
    assert [row["checkpoint"] for row in every] == opened.run(ROWS)
    ape = next(name for name in every[0] if name.startswith("APE") and not name.endswith(("low", "high")))
    for row in every:
        if row[ape]:
            assert float(row[f"{ape} low"]) <= float(row[ape]) <= float(row[f"{ape} high"])
    _filtered(opened, synthetic.NETWORKS[0].label)
    opened.run("document.querySelectorAll('#checkpoints .columns input')[1].click()")
    (row,) = csv.DictReader(_saved(opened, f"{save}[0]").splitlines())
    assert "model" not in row
    table = _saved(opened, f"{save}[1]")
    assert table.count("\\\\") == 2  # a head and a row
    assert table.index("\\toprule") < table.index("\\midrule") < table.index("\\bottomrule")
    assert table.count(" & ") % 2 == 0


def test_charts_are_saved_as_drawings_and_as_pictures(opened: Browser) -> None:
    plots = {"#layers .chart": "normalised depth", "#surface .turn + *": "x", "#surface .flat": "first random"}
    for plot, axis in (plots | {"#layers .flat": "layer"}).items():  # the latter three are pictures with vector axes
        save = f"document.querySelector('{plot} .save').querySelectorAll('button')"
        drawing = ElementTree.fromstring(_saved(opened, f"{save}[0]"))
        words = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
        assert any(word.startswith(axis) for word in words if word)
        assert (plot == "#layers .chart") == (HOSTILE in words)
        names = [part for part in drawing if part.get("d", "").endswith("h18")]
        assert all(part.get("stroke") != "#ffffff" for part in names)  # on a white page
    kind, size = _saved(opened, f"{save}[1]").split()
    assert kind == "image/png"
    assert int(size) > 5000
    opened.log("browser")


def test_the_surface_zooms_by_wheel_and_by_buttons(opened: Browser) -> None:
    x, y = centre(opened, "canvas.turn")
    zoom = "return views.surface.state.zoom"
    before = opened.run(zoom)
    opened.run("document.querySelector('canvas.turn').focus()")
    opened.tool("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-200)
    opened.until(f"{zoom} > {before} + 0.1")
    opened.run("document.querySelector('[aria-label=Farther]').click()")
    assert opened.run(zoom) < before * 1.65 - 0.1


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from npm's registry."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("axe-core comes from npm, which is not installed")
    packed = subprocess.run(["npm", "pack", "--silent", "axe-core@4"], cwd=folder, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip("npm has no axe-core here")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing_that_shuts_anyone_out(opened: Browser, axe: str, width: int, scheme: str) -> None:
    opened.tool("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    opened.tool("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
    settled(opened)
    opened.run(f"{axe}; window.axe = axe; for (const node of document.querySelectorAll('details')) node.open = true")
    passed, found = opened.run(
        "return axe.run().then((r) => [r.passes.length, r.violations.map((v) => "
        "`${v.id}: ${v.nodes.length} x ${v.nodes[0].html}`)])"
    )
    assert passed > 20
    assert found == []
