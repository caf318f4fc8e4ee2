"""What `landscape doctor` found in the file, with what to do about each finding."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from landscape.plots.report.markup import Html, element, escape
from landscape.plots.report.next_steps import listed
from landscape.plots.report.sections import copied

COMMAND = "run: "  # begins a remedy that is a command
MOST = 30


class Check(Protocol):
    """A finding of the doctor: how bad, about which results, what, and what to do."""

    @property
    def severity(self) -> str: ...
    @property
    def groups(self) -> tuple[str, ...]: ...
    @property
    def text(self) -> str: ...
    @property
    def remedy(self) -> str: ...


def checks(found: Sequence[Check], file: Path) -> Html:
    """The findings, the worst first, each with its remedy, and the command that examines the file again."""
    command = shlex.join(["landscape", "doctor", str(file)])
    counts = {word: sum(one.severity == word for one in found) for word in ("wrong", "suspicious", "note")}
    named = [f"{count} {word}{'s' * (word == 'note' and count > 1)}" for word, count in counts.items() if count]
    said = f"{listed(named)}." if named else "Nothing wrong or suspicious was found."
    items = [_item(one) for one in found[:MOST]]
    more = element("p", f"and {len(found) - MOST} more") if len(found) > MOST else ""
    return element(
        "section", element("h2", "Checks of these numbers"), element("p", said, class_="note"),
        element("ul", *items, class_="plain") if items else "", more, copied(command), id="checks",
    )  # fmt: skip


def _item(one: Check) -> Html:
    about = one.groups[0] + (f" and {len(one.groups) - 1} more" if len(one.groups) > 1 else "") if one.groups else ""
    remedy = one.remedy.removeprefix(COMMAND)
    what = copied(remedy) if remedy != one.remedy else escape(remedy)
    mark = element("span", one.severity, class_="sure", data_sure=one.severity)
    return element("li", mark, f" {one.text} ", element("small", about), element("div", what))
