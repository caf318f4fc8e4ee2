"""Put the page together: one HTML file with its style, its script and its data, which loads nothing from elsewhere."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import xarray as xr

from landscape.options import counted
from landscape.plots import FIGURES, IMPORTED, appearance, headlines, over_seeds
from landscape.plots.comparison.comparison import means_of
from landscape.plots.comparison.grouping import drawn_groups
from landscape.plots.comparison.networks import compared as networks_of
from landscape.plots.report import compared, panels, sections
from landscape.plots.report.findings import findings
from landscape.plots.report.markup import Html, element, join
from landscape.plots.report.next_steps import unfinished
from landscape.plots.report.panels import PARTS, Drawn
from landscape.plots.report.protocols import Protocols
from landscape.plots.report.sections import checks
from landscape.plots.report.table import checkpoints, comparison
from landscape.results import reader
from landscape.results.protocols import of_several

SCRIPTS = ("figures.js", "view.js", "surface.js", "charts.js", "page.js")
Stored = Sequence[tuple[str, xr.Dataset]]


def document(
    stored: Stored,
    file: Path,
    figures: Sequence[Path],
    examined: Sequence[Any] | None = None,
    group: Sequence[str] = (),
) -> str:
    """The whole page of a study, with what the doctor found in it where it was examined, in groups over seeds."""
    ordered = reader.by_checkpoint([(name, data) for name, data in stored if not name.startswith("compare/")])
    named = list(zip(checkpoints(ordered), (data for _, data in ordered), strict=True))
    groups = drawn_groups(list(dict.fromkeys(appearance.label_of(data) for _, data in ordered)), group)
    data = live_data(*over_seeds.both(ordered, groups, {figure.probe for figure in FIGURES.values() if figure.layers}))
    data["groups"] = [[name, *members] for name, members in groups.members.items()] if groups else []
    parts = [part for part in PARTS if data.get(part) or (part == "spectra" and data["densities"])]
    numbered = Protocols()
    table = comparison(ordered, numbered)
    static = sections.by_probe(figures, named)
    drawn = sections.figure_sections(static, numbered, file)
    means = means_of(networks_of(ordered, groups.rules, file.name).entries) if groups else ()
    tested, over = compared.comparisons(stored), compared.group_means(means, groups)
    first = [("answers", "What these results say"), *[("checks", "Checks")] * (examined is not None)]
    first += [("checkpoints", "Checkpoints"), *[("groups", "Means over seeds")] * bool(over)]
    first += [("compared", "Differences, tested")] * bool(tested)
    body = [
        sections.answers(findings(ordered, file, means), parts),
        *([] if examined is None else [checks(examined, file)]),
        sections.checkpoint_table(table),
        over,
        tested,
        *(_live(part, data, [section.probe for section in static]) for part in parts),
        drawn,
        sections.protocol_list(numbered),
        sections.everything(headlines.rows(file, stored), skipped(ordered)),
    ]
    return _document(f"Loss landscape: {file.name}", _header(named, file), _contents(parts, static, first), body, data)


def live_data(ordered: Stored, means: Stored) -> dict[str, Any]:
    """What the script draws, as plain values: text, numbers, and arrays in base64; its layer plots are of means."""
    drawn = _drawn(ordered)
    return panels.collected(drawn) | panels.layers_collected(drawn if means is ordered else _drawn(means), drawn)


def _drawn(ordered: Stored) -> list[Drawn]:
    results = [data for _, data in ordered]
    by_name = dict(zip((id(data) for data in results), checkpoints(ordered), strict=True))
    found: list[Drawn] = []
    for probe in dict.fromkeys(str(data.attrs.get("probe", "")) for data in results):
        alike = [data for data in results if data.attrs.get("probe") == probe]
        for data, look in zip(alike, appearance.looks(alike, among=results), strict=True):
            name = look.label.replace("\\$", "$").strip()
            found.append(Drawn(data, name, str(look.color).lower(), by_name[id(data)]))
    return found


def skipped(ordered: Stored) -> list[str]:
    """Results that no figure shows, each with the reason."""
    lines = []
    for group, data in ordered:
        probe = group.partition("/")[0]
        figures = [figure for figure in FIGURES.values() if figure.probe == probe]
        if not figures and probe not in IMPORTED:
            lines.append(f"{group} is skipped: no figure shows the probe {probe}.")
        elif figures and not any(figure.drawable(data) for figure in figures):
            lines.append(f"{group} is not drawn: no finite value in {figures[0].needs[0]} ({_how_much(data)}).")
    return lines


def _how_much(data: xr.Dataset) -> str:
    return unfinished(data) or "all units are finished"


def _header(named: Sequence[tuple[str, xr.Dataset]], file: Path) -> Html:
    lacking = [(who, data) for who, data in named if unfinished(data)]
    networks = len({who for who, data in named if not of_several(data)})
    text = f"{counted(len(named), 'result')} of {counted(networks, 'checkpoint')} in {file.name}."
    parts = [element("h1", f"Loss landscape: {file.name}"), element("p", text)]
    if lacking:
        each = [element("li", f"{data.attrs.get('probe', '')} of {who}: {unfinished(data)}") for who, data in lacking]
        summary = element("summary", f"{sections.MARK} {len(lacking)} unfinished: their figures show what is there")
        parts.append(element("details", summary, element("ul", *each), class_="partial"))
    button = element("button", "Dark", type="button", id="theme", hidden=True, aria_label="Switch to dark or light")
    return element("header", *parts, button)


def _contents(parts: Sequence[str], static: Sequence[sections.ProbeSection], first: Sequence[tuple[str, str]]) -> Html:
    items = [_link(target, text) for target, text in first]
    items += [_link(part, PARTS[part], live=True) for part in parts]
    inner = element("ul", *(_link(f"probe-{section.probe}", section.probe) for section in static))
    items.append(element("li", element("a", "Figures", href="#figures"), inner))
    items += [_link("protocols", "Protocols"), _link("everything", "Everything in the file")]
    return element("nav", element("ol", *items), aria_label="Contents")


def _link(target: str, text: str, *, live: bool = False) -> Html:
    return element("li", element("a", text, href=f"#{target}"), class_="live" if live else None, hidden=live)


def _live(part: str, data: dict[str, Any], probes: Sequence[str]) -> Html:
    """The place of a part that the script draws, with links to what its numbers mean."""
    meanings = {figure.probe: figure.name for figure in reversed(FIGURES.values()) if figure.live == part}
    links = [
        element("a", f"About {probe}", href=f"#about-{probe}", class_="info", data_about=probe, data_meaning=figure)
        for probe, figure in reversed(meanings.items())
        if probe in probes
    ]
    heading = element("h2", PARTS[part])
    where = element("p", join(links, " "), class_="links")
    return element("section", heading, element("div", id=f"{part}-view"), where, id=part, class_="live", hidden=True)


def _document(title: str, header: Html, contents: Html, body: Sequence[Html], data: dict[str, Any]) -> str:
    folder = resources.files("landscape.plots.report")
    style = folder.joinpath("page.css").read_text()
    script = "\n".join(folder.joinpath(name).read_text() for name in SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'"
    )
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        f"<style>{style}</style>",
    ]
    skip = element("a", "Skip to the results", href="#main", class_="skip")
    noscript = "<noscript><p>Without JavaScript this page is its tables and the pictures below.</p></noscript>"
    main = element("main", element("div", id="networks", class_="live", hidden=True), join(body), id="main")
    dialog = element("dialog", id="dialog", aria_label="What this means")
    page = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>', *head, "</head>\n<body>", skip, header, noscript, contents, main,
        dialog, f'<script type="application/json" id="data">{encoded}</script>', f"<script>{script}</script>",
        "</body>\n</html>\n",
    ]  # fmt: skip
    return "\n".join(page)


def _hash(text: str) -> str:
    """The name of an inline style or script in the content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
