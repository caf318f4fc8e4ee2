"""Group networks over their seeds by their labels: by a regular expression, or by a pattern for every group."""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from landscape.options import OptionError, invalid, time_limit

EXPECTED = r"a regular expression such as '-s\d+$', or NAME=GLOB,NAME=GLOB such as sgd=sgd-*,adam=adam-*"
NONE, MANY = "none", 8  # the rule of no groups; networks up to which there are none unless asked for
SEED = r"(?:^|[-_. ])(?:seed|s)[-_]?\d+$"  # the rule beyond
TABLE = re.compile(r"[^=,\\()\[\]^$|+]+=[^\\()^$|+]*")  # a list of patterns, and no regular expression


@dataclass(frozen=True)
class Groups:
    """Members of every group by name, in the order of the networks, and the networks that are in none."""

    members: Mapping[str, tuple[str, ...]]
    rest: tuple[str, ...] = ()
    factor: str = "group"  # what the groups differ in, for tables
    rules: tuple[str, ...] = field(default_factory=tuple)  # as given, so that they can be applied again


def groups_of(networks: Mapping[str, str], rules: Sequence[str]) -> Groups:
    """Groups of networks, given their labels by name.

    A regular expression is searched in the label. Its capture groups name the group; without any, the match is the part
    that tells seeds apart, and what is left of the label names the group.

    Raises:
        OptionError: a rule is neither, matches no label, takes too long, or puts a network into two groups.
    """
    factor, group_of = _parsed(rules)
    found: dict[str, list[str]] = {}
    rest = []
    with time_limit("group", ",".join(rules)):
        for network, label in networks.items():
            names = group_of(label)
            if len(names) > 1:
                raise OptionError(f"--group puts {label} into {' and '.join(names)}; give patterns that do not overlap")
            if names:
                found.setdefault(names[0], []).append(network)
            else:
                rest.append(network)
    if not found:
        near = ", ".join(list(dict.fromkeys(networks.values()))[:4])
        raise invalid("group", ",".join(rules), f"{EXPECTED}, that fits a label such as {near}")
    return Groups({name: tuple(members) for name, members in found.items()}, tuple(rest), factor, tuple(rules))


def drawn_groups(labels: Sequence[str], rules: Sequence[str]) -> Groups | None:
    """The groups that figures show: those asked for; of many networks, those whose labels differ in a seed.

    Raises:
        OptionError: as `groups_of`.
    """
    if tuple(rules) == (NONE,):
        return None
    found = None
    if rules or (len(labels) > MANY and sum(bool(re.search(SEED, label)) for label in labels) > 1):
        found = groups_of({label: label for label in labels}, rules or (SEED,))
    return found if found and (rules or any(len(one) > 1 for one in found.members.values())) else None


def _parsed(rules: Sequence[str]) -> tuple[str, Callable[[str], list[str]]]:
    """What the groups differ in, and a function from labels to the names of their groups."""
    if all(TABLE.fullmatch(rule) for rule in rules):
        factor, patterns = _patterns(rules)
        return factor, lambda label: [
            n for n, globs in patterns.items() if any(fnmatch.fnmatchcase(label, glob) for glob in globs)
        ]
    if len(rules) > 1:
        raise invalid("group", ",".join(rules), f"one regular expression, or {EXPECTED.partition('or ')[2]}")
    try:
        pattern = re.compile(rules[0])
    except (re.error, RecursionError, OverflowError) as error:
        raise invalid("group", f"{rules[0]} ({error})", EXPECTED) from None
    return "group", lambda label: _by_expression(pattern, label)


def _patterns(rules: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """`NAME=GLOB,NAME=GLOB`, or `FACTOR=NAME:GLOB,NAME:GLOB`; a name may have several patterns."""
    factor, patterns = "group", dict[str, list[str]]()
    for rule in rules:
        head, _, tail = rule.partition("=")
        sign = "="
        if ":" in tail.partition(",")[0]:
            factor, rule, sign = head.strip(), tail, ":"
        for part in rule.split(","):
            name, there, glob = part.partition(sign)
            if not (there and name.strip() and glob.strip()):
                raise invalid("group", rule, EXPECTED)
            patterns.setdefault(name.strip(), []).append(glob.strip())
    return factor, patterns


def _by_expression(pattern: re.Pattern[str], label: str) -> list[str]:
    match = pattern.search(label)
    if match is None:
        return []
    if pattern.groups:
        name = "-".join(part for part in match.groups() if part)
    else:
        left = label[: match.start()].rstrip("-_. "), label[match.end() :].lstrip("-_. ")
        name = "-".join(filter(None, left))
    return [name or "(all)"]
