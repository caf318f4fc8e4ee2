"""Find the pictures of ImageNet-C (Hendrycks & Dietterich 2019): FOLDER/CORRUPTION/SEVERITY/CLASS/*.JPEG."""

from pathlib import Path

from landscape.data.corruptions import SETS, SEVERITIES


def names_in(folder: Path) -> tuple[str, ...]:
    """The corruptions that a folder holds, also one level further down as the archives are named (noise, blur, ...)."""
    return tuple(name for name in SETS["all"] if _of(folder, name) is not None)


def pictures(folder: Path, name: str, severity: int) -> Path:
    """The folder of class folders of a corruption at a severity.

    Raises:
        FileNotFoundError: there is none; names the existing corruptions or severities.
    """
    place = _of(folder, name)
    if place is None:
        raise FileNotFoundError(f"{folder} has no folder {name}; it has {', '.join(names_in(folder)) or 'none'}")
    if not (place / str(severity)).is_dir():
        there = ", ".join(str(s) for s in SEVERITIES if (place / str(s)).is_dir())
        raise FileNotFoundError(f"{place} has no severity {severity}; it has {there or 'none'}; unpack it again")
    return place / str(severity)


def _of(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, *sorted(folder.glob(f"*/{name}")))
    return next((path for path in candidates if any((path / str(s)).is_dir() for s in SEVERITIES)), None)
