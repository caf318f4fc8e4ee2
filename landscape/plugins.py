"""Find what other installed packages add by entry points: probes, figures, data sets, models and optimisers.

A package adds a probe by an entry point of the group `landscape.probes`, named like the probe, whose value is its
class; figures, data, models and optimisers likewise. See docs/plugins.md.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any, Literal

Group = Literal["probes", "figures", "data", "models", "optimizers"]
API = 1  # the version of the interface of probes and figures; theirs is a class variable or a field `api`


@dataclass(frozen=True)
class Plugin:
    """An entry point of another package."""

    name: str
    place: str  # module:attribute
    package: str  # its name and version

    def load(self) -> Any:
        """The object.

        Raises:
            ValueError: it cannot be imported; names the package and what to do.
        """
        module, _, attribute = self.place.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except Exception as error:  # whatever a foreign module raises
            raise self.broken(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    def broken(self, why: str) -> ValueError:
        return ValueError(f"{self.name} of the package {self.package} cannot be used ({why}); update or uninstall it")

    def require_api(self, found: Any) -> None:
        """Refuse an object for another version of the interface.

        Raises:
            ValueError: it names another version, or none.
        """
        if found != API:
            wanted = "names no `api`" if found is None else f"is made for version {found} of the interface"
            raise self.broken(f"it {wanted}, expected {API}")


@cache
def plugins(group: Group) -> Mapping[str, Plugin]:
    """What other packages add to a group, by name."""
    found = {}
    for point in metadata.entry_points(group=f"landscape.{group}"):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"
        found[point.name] = Plugin(point.name, point.value, package)
    return found


def beside(group: Group, own: Collection[str]) -> Mapping[str, Plugin]:
    """As `plugins`, without names of this project's own, which win; a line on stderr names, once, each left out."""
    found = plugins(group)
    for name in sorted(found.keys() & set(own)):
        _note(f"{name} of the package {found[name].package} is left out: landscape has one")
    return {name: one for name, one in found.items() if name not in own}


@cache
def _note(said: str) -> None:
    print(f"note: {said}", file=sys.stderr)


def place_of(group: Literal["data", "models"], name: str) -> str:
    """`module:attribute` of a name that a package adds; any other name, and those of this project's own, as it is."""
    if name not in plugins(group):
        return name
    added = beside(group, import_module(f"landscape.{group}").NAMES)
    return added[name].place if name in added else name
