"""Say in which layers a quantity is NaN although everything is measured, and why: attributes of a result."""

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

SUFFIX = "_unmeasured"  # of the attribute of a quantity
NOT_FINITE = "its features are not finite"
ALIKE = "no difference between samples"

_log = logging.getLogger(__name__)


def unmeasured(found: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Attributes from quantities, each with the name of a layer, or "", and the reason why it is NaN there."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for quantity, layer, reason in found:
        reasons.setdefault(quantity, {}).setdefault(reason, []).append(layer)
    return {
        f"{quantity}{SUFFIX}": "; ".join(": ".join(filter(None, (", ".join(names), why))) for why, names in one.items())
        for quantity, one in reasons.items()
    }


def store_reasons(attributes: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Store the reasons among values, and say those that are new; quantities with the same reason share a line."""
    alike: dict[str, list[str]] = {}
    for name, value in values.items():
        if name.endswith(SUFFIX) and attributes.get(name) != value:
            attributes[name] = value
            alike.setdefault(value, []).append(name.removesuffix(SUFFIX))
    for value, quantities in alike.items():
        first, *others = quantities
        more = (
            f" and {len(others)} more quantities are"
            if len(others) > 1
            else f" and {others[0]} are"
            if others
            else " is"
        )
        where = " in" if ": " in value else ":"
        _log.info("note: %s%s NaN%s %s", first, more, where, "; ".join(map(_shortened, value.split("; "))))


def _shortened(reason: str) -> str:
    names, colon, why = reason.rpartition(": ")
    first, *others = names.split(", ")
    return f"{first}{f' and {len(others)} more layers' if others else ''}{colon}{why}"
