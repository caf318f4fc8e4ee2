"""HTML elements from Python values: all text is escaped, markup stays as it is."""

import html
from collections.abc import Iterable

EMPTY = ("img", "meta", "br")  # elements without an end


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Anything as text of a page; markup stays as it is."""
    return text if isinstance(text, Html) else Html(html.escape(str(text)))


def join(parts: Iterable[object], between: str = "\n") -> Html:
    """Parts one after the other, each escaped unless it is markup."""
    return Html(between.join(escape(part) for part in parts))


def element(name: str, *children: object, **attributes: object) -> Html:
    """One element. `class_` is the attribute `class`, `data_x` is `data-x`; True is an attribute without a value."""
    given = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            given.append(f" {key}")
        elif value not in (None, False):
            given.append(f' {key}="{html.escape(str(value))}"')
    start = f"<{name}{''.join(given)}>"
    return Html(start if name in EMPTY else f"{start}{join(children, '')}</{name}>")
