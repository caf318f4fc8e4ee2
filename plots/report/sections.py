"""The written parts of the page: answers, the table of checkpoints, figures with their meaning, protocols."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import xarray as xr

from landscape import options
from landscape.options import counted
from landscape.plots import FIGURES, STUDIES, headlines, study_module
from landscape.plots.report import next_steps, protocols
from landscape.plots.report.findings import Finding
from landscape.plots.report.markup import Html, element, escape, join
from landscape.plots.report.next_steps import listed, unfinished
from landscape.plots.report.table import Table
from landscape.results.headline_numbers import Measured

MEDIA = {".png": "image/png", ".svg": "image/svg+xml"}
SENTENCES = 4  # of an answer that are shown at once
MARK = "◐"  # of what is unfinished
MOST_COMMANDS = NAMED = 24  # of one probe: commands, and networks in the text of a picture
LARGEST, TALLEST = 250_000, 16_383  # bytes of a picture that is not made smaller, and pixels of a side of any WebP
SCALES = (1.0, 0.75, 0.5, 0.35)  # by which one is made smaller


def copied(command: str) -> Html:
    """A command with a button that copies it, which the script shows."""
    button = element("button", "Copy", type="button", class_="copy", hidden=True, aria_label="Copy the command")
    return element("div", element("pre", element("code", command)), button, class_="command")


def _sentences(lines: Sequence[str]) -> Html:
    return element("ul", *(element("li", line) for line in lines))


def answers(found: Sequence[Finding], live: Sequence[str]) -> Html:
    """The first questions with their answers."""
    blocks = []
    lacking = [element("li", f"{one.question} {one.answer[0]}") for one in found if one.certainty == "not measured"]
    for finding in found:
        if finding.certainty == "not measured":
            continue
        sure = {"certain": "certain, as far as the errors say", "mixed": "not certain throughout"}
        mark = element(
            "span", sure.get(finding.certainty, finding.certainty), class_="sure", data_sure=finding.certainty
        )
        parts: list[object] = [element("h3", finding.question, *((" ", mark) if finding.certainty else ()))]
        most = SENTENCES if len(finding.answer) > SENTENCES + 1 else SENTENCES + 1
        parts.append(_sentences(finding.answer[:most]))
        if rest := finding.answer[most:]:
            parts.append(element("details", element("summary", f"{len(rest)} more sentences"), _sentences(rest)))
        if finding.command:
            parts.append(copied(finding.command))
        if finding.detail:
            lines = _sentences(finding.detail.split("; "))
            parts.append(element("details", element("summary", "The numbers behind it"), lines))
        if finding.section in live:
            parts.append(
                element("p", element("a", "See it below", href=f"#{finding.section}"), class_="live", hidden=True)
            )
        blocks.append(element("article", *parts))
    blocks += [element("article", element("h3", "What they do not say"), element("ul", *lacking))] if lacking else []
    note = (
        "Intervals are 95 %: over seeds where that is said, else over samples or mini-batches of one trained network; "
        "every comparison stands by itself. "
        "Another training run, another plane or another protocol may say something else."
    )
    return element(
        "section", element("h2", "What these results say"), *blocks, element("p", note, class_="note"), id="answers"
    )


def checkpoint_table(table: Table) -> Html:
    """One row per checkpoint, one column per number and protocol, each with a link to what it means."""
    if not table.columns:
        return element("section", element("h2", "Checkpoints"), element("p", "Nothing measured yet."), id="checkpoints")
    heads = [element("th", "checkpoint", scope="col"), element("th", "model", scope="col")]
    for column in table.columns:
        parts: list[object] = [element("span", column.number.title, class_="title"), " "]
        about = {"href": f"#about-{column.probe}", "class_": "info", "data_about": column.probe}
        about |= {"data_title": column.number.title, "data_definition": column.number.definition}
        parts.append(element("a", "?", **about, aria_label=f"What {column.number.title} means"))
        link = element("a", f"P{column.protocol}", href=f"#protocol-{column.protocol}", title="protocol")
        measured = ", ".join(filter(None, (column.probe, column.samples)))
        parts.append(element("small", f"{measured}, ", link, f": {column.distinct}" if column.distinct else ""))
        heads.append(element("th", *parts, scope="col"))
    rows = []
    for name, model in table.checkpoints.items():
        cells = [element("th", name, scope="row"), element("td", model)]
        cells += [_cell(column.cells.get(name), column.partial.get(name, "")) for column in table.columns]
        rows.append(element("tr", *cells))
    body = element("table", element("thead", element("tr", *heads)), element("tbody", join(rows)), class_="sortable")
    note = (
        "In brackets: the 95 % interval, over samples or (NEP, APE) mini-batches. A column holds numbers of one "
        "protocol only; P links to it, ? says what a number means and how it misleads. An empty cell was not measured"
        + (f", {MARK} is unfinished." if any(column.partial for column in table.columns) else ".")
    )
    scroll = element("div", body, class_="scroll", tabindex="0", role="region", aria_label="Table of checkpoints")
    return element("section", element("h2", "Checkpoints"), scroll, element("p", note, class_="note"), id="checkpoints")


def _cell(estimate: Measured | None, partial: str) -> Html:
    if estimate is None:
        return element("td")
    parts: list[object] = [f"{estimate.value:.4g}"]
    if estimate.known:
        parts.append(element("span", f" [{estimate.low:.3g}, {estimate.high:.3g}]", class_="interval"))
    if estimate.at:
        parts.append(element("small", estimate.at))
    if partial:
        parts.append(element("small", f"{MARK} {partial}"))
    return element("td", *parts, data_value=repr(estimate.value))


@dataclass
class ProbeSection:
    """The static figures of one probe, with the results that they show."""

    probe: str
    images: dict[str, Path | None] = field(default_factory=dict)  # by figure; None where the page has no picture
    results: list[tuple[str, xr.Dataset]] = field(default_factory=list)  # checkpoint, result

    @cached_property
    def said(self) -> list[str]:
        """The first checkpoints with their headline numbers."""
        shown = self.results[:NAMED]
        found = [(who, headlines.text(headlines.with_intervals(data))) for who, data in shown]
        return [f"{who}: {text}" if text else who for who, text in found]


def by_probe(figures: Sequence[Path], named: Sequence[tuple[str, xr.Dataset]]) -> list[ProbeSection]:
    """Figures in the order of the table of figures, those of several probes together at the end, as "studies"."""
    images = {figure.stem: figure for figure in sorted(figures) if figure.suffix in MEDIA}
    found: dict[str, ProbeSection] = {}
    of_probe: dict[str, list[tuple[str, xr.Dataset]]] = {}
    for who, data in named:
        of_probe.setdefault(str(data.attrs.get("probe", "")), []).append((who, data))
    other = [name for name, one in FIGURES.items() if one.selected([data for _, data in of_probe.get(one.probe, ())])]
    for name in [*(name for name in FIGURES if name in {*images, *other}), *(n for n in images if n not in FIGURES)]:
        probe = FIGURES[name].probe if name in FIGURES else "studies"
        section = found.setdefault(probe, ProbeSection(probe, results=of_probe.get(probe, [])))
        section.images[name] = images.get(name)
    return list(found.values())


def figure_sections(sections: Sequence[ProbeSection], numbered: protocols.Protocols, file: Path) -> Html:
    """Every static figure with its meaning, and per probe the protocols and the commands."""
    blocks = []
    for section in sections:
        pictures = [_picture(name, image, section, file) for name, image in section.images.items()]
        blocks.append(
            element(
                "section", element("h3", section.probe), *pictures, _about(section, numbered, file),
                id=f"probe-{section.probe}",
            )
        )  # fmt: skip
    return element("section", element("h2", "Figures"), join(blocks), id="figures")


def _picture(name: str, image: Path | None, section: ProbeSection, file: Path) -> Html:
    title = name.replace("_", " ")
    address, scale = _embedded(image) if image else ("", 0.0)
    picture = element("img", src=address, alt=alternative(title, section), decoding="async") if image else ""
    meaning, misleads = meaning_of(name)
    words = [element("p", meaning), element("p", element("b", "How this misleads. "), misleads)] if meaning else []
    live = name in FIGURES and bool(FIGURES[name].live)
    if scale < 1:
        shown = f"Shown at {scale:.0%} of its size; " if scale else "Drawn above, where scripts run; " if live else ""
        words += [element("p", shown, element("code", next_steps.command_to_draw(file, name)), " draws it whole.")]
    body = element("figure", picture, element("figcaption", *words, id=f"meaning-{name}"))
    about = {"class_": "picture", "open": True, "id": f"figure-{name}", "data_live": live}
    return element("details", element("summary", title), body, **about)


def _embedded(image: Path) -> tuple[str, float]:
    """The address of a figure inside the page and the scale that it is shown at.

    A PNG becomes WebP with the same pixels, in a third of the bytes. A large one, such as of sixty networks, is made
    smaller until it has at most `LARGEST` bytes or the least of `SCALES`, so that the page stays small.
    """
    if image.suffix != ".png":
        return f"data:{MEDIA[image.suffix]};base64,{base64.b64encode(image.read_bytes()).decode()}", 1.0
    from PIL import Image

    size = image.stat().st_size
    with Image.open(image) as picture:
        sides = [(scale, [max(1, int(side * scale)) for side in picture.size]) for scale in SCALES]
        fitting = [(scale, to) for scale, to in sides if max(to) <= TALLEST] or sides[-1:]
        # What is hopeless is not tried: a lossy picture has about a sixth of the bytes of its PNG.
        worth = [(scale, to) for scale, to in fitting if size * scale**2 <= 6 * LARGEST] or fitting[-1:]
        for scale, to in worth:
            stream = BytesIO()
            how = {"lossless": True} if scale == 1 and size <= 3 * LARGEST else {"quality": 70}
            (picture if scale == 1 else picture.resize(to)).save(stream, "webp", method=3, **how)
            if len(stream.getvalue()) <= LARGEST:
                break
    return f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}", scale


def alternative(title: str, section: ProbeSection) -> str:
    """The text in place of a figure: what it shows, of which checkpoints, and their headline numbers."""
    if not section.results:
        return f"Figure: {title}."
    more = len(section.results) - NAMED
    said = [*section.said, *([f"and {more:,} more"] if more > 0 else [])]
    return f"Figure: {title}, of {section.probe}. " + "; ".join(said) + "."


def meaning_of(figure: str) -> tuple[str, str]:
    """The two sentences of a figure: what it means, and how it misleads; empty for an unknown one."""
    study = figure.partition("-")[0]
    if figure in FIGURES:
        text = FIGURES[figure].module.MEANING
    elif study in STUDIES:
        text = str(study_module(study).MEANING)
    else:
        return "", ""
    first, _, second = text.partition(". ")
    return f"{first}.", second


def _about(section: ProbeSection, numbered: protocols.Protocols, file: Path) -> Html:
    by_protocol: dict[int, list[str]] = {}
    asked: dict[str, None] = {}
    partial = []
    for who, data in section.results:
        by_protocol.setdefault(numbered.number(data), []).append(who)
        asked.setdefault(next_steps.command_to_measure(data, file))
        if lacking := unfinished(data):
            partial.append(f"{MARK} {who}: {lacking}")
    items = [
        element("li", element("a", f"P{number}", href=f"#protocol-{number}"),
                f" ({', '.join(dict.fromkeys(who))})")
        for number, who in by_protocol.items()
    ]  # fmt: skip
    given = [command for command in asked if command]
    body: list[object] = [element("p", text, class_="partial") for text in partial]
    body += [element("h4", "Protocol"), element("ul", *items)] if items else []
    body += [element("h4", "Measured by"), *(copied(command) for command in given[:MOST_COMMANDS])] if given else []
    body += [element("p", f"and {len(given) - MOST_COMMANDS} more")] if len(given) > MOST_COMMANDS else []
    body += [element("h4", "Drawn by"), copied(next_steps.command_to_draw(file))]
    about = element("div", *body, id=f"about-{section.probe}")
    return element("details", element("summary", "Protocol and commands"), about, class_="about")


def protocol_list(numbered: protocols.Protocols) -> Html:
    """Every protocol once."""
    items = [
        element("li", element("b", f"P{i} "), text, " ", element("small", ", ".join(probes)), id=f"protocol-{i}")
        for i, (text, probes) in enumerate(numbered.texts.items(), start=1)
    ]
    return element("section", element("h2", "Protocols"), element("ul", *items, class_="plain"), id="protocols")


def everything(rows: Sequence[Mapping[str, object]], skipped: Sequence[str]) -> Html:
    """All results of the file with their headline numbers, and what the page leaves out."""
    if not rows:
        body: Html = element("p", "Nothing measured yet.")
    else:
        names = [name for name in rows[0] if any(row[name] != "" for row in rows)]
        head = element("tr", *(element("th", name, scope="col") for name in names))
        lines = [element("tr", *(element("td", escape(row[name])) for name in names)) for row in rows]
        table = element("table", element("thead", head), element("tbody", join(lines)))
        region = {"tabindex": "0", "role": "region", "aria_label": "Table of all results"}
        body = element("div", table, class_="scroll", **region)
    left = [element("li", text) for text in skipped]
    return element(
        "section", element("h2", "Everything in the file"), element("ul", *left) if left else "", body, id="everything"
    )


COMMAND = "run: "  # begins a remedy that is a command
MOST = 30


def checks(found: Sequence[Any], file: Path) -> Html:
    """The doctor's findings, the worst first, each with its remedy, and the command that examines the file again."""
    command = shlex.join(["landscape", "doctor", str(file)])
    counts = {word: sum(one.severity == word for one in found) for word in ("wrong", "suspicious", "note")}
    named = [counted(count, word) if word == "note" else f"{count} {word}" for word, count in counts.items() if count]
    said = f"{listed(named)}." if named else "Nothing wrong or suspicious was found."
    items = [_item(one) for one in found[:MOST]]
    more = element("p", f"and {len(found) - MOST} more") if len(found) > MOST else ""
    return element(
        "section", element("h2", "Checks of these numbers"), element("p", said, class_="note"),
        element("ul", *items, class_="plain") if items else "", more, copied(command), id="checks",
    )  # fmt: skip


def _item(one: Any) -> Html:
    about = options.listed(one.groups, 1)
    remedy = one.remedy.removeprefix(COMMAND)
    what = copied(remedy) if remedy != one.remedy else escape(remedy)
    mark = element("span", one.severity, class_="sure", data_sure=one.severity)
    return element("li", mark, f" {one.text} ", element("small", about), element("div", what))
