"""What of an HDF5 file lies in the file itself: the rest is not read, and a file that reaches out is not written."""

from __future__ import annotations

from pathlib import Path

import h5py

DEPTH = 3  # probe, answer, quantity
MOST_LINKS = 200_000
EXPANSION = 16  # most that arrays may be larger than their file, by compression or values that were never written
SLACK = 2**26  # bytes below which that does not matter


def own(group: h5py.Group) -> list[str]:
    """Names in a group by hard links alone."""
    return [name for name in group if isinstance(group.get(name, getlink=True), h5py.HardLink)]


def refuse_outside(file: h5py.File, path: Path, *, links: bool) -> None:
    """Refuse arrays whose numbers lie in other files, or are more than the file can hold.

    Args:
        file: open.
        path: of the file.
        links: refuse links too, as before writing, when one would lead the pen elsewhere.

    Raises:
        ValueError: naming the first of them.
    """
    count, total, room = 0, 0, EXPANSION * path.stat().st_size + SLACK
    groups: list[tuple[h5py.Group, int]] = [(file, 1)]
    while groups:
        group, depth = groups.pop()
        inside = own(group)
        if links and len(inside) < len(group):
            name = next(name for name in group if name not in inside)
            raise ValueError(
                f"{path} holds a link in place of data ({group.name.rstrip('/')}/{name}), which may lead to another "
                "file; give another --out, or remove the link"
            )
        for name in inside:
            item, count = group[name], count + 1
            if isinstance(item, h5py.Group) and depth < DEPTH:
                groups.append((item, depth + 1))
            elif isinstance(item, h5py.Dataset):
                if item.external or item.is_virtual:
                    raise ValueError(f"{path} keeps the numbers of {item.name} in another file; refused")
                total += item.nbytes
        if total > room or count > MOST_LINKS:
            raise ValueError(
                f"{path} has {path.stat().st_size:,} bytes and declares arrays of {total:,} bytes; refused"
            )
