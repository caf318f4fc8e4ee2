"""Reject files that declare far more content than they can hold, before memory is reserved for it, and pipes."""

from pathlib import Path

EXPANSION = 16  # largest allowed ratio of content to its file: shared, compressed or never written values
SLACK = 2**26  # bytes below which the ratio does not matter


def refuse_oversized(
    file: str,
    what: str,
    declared: int,
    held: int,
    *,
    expansion: int = 1,
    slack: int = 0,
    unit: str = "bytes",
) -> None:
    """Refuse content that is larger than `expansion` times what holds it, plus `slack`.

    Raises:
        ValueError: it is; the message starts with `file`.
    """
    if declared > expansion * held + slack:
        raise ValueError(f"{file} declares {what} of {declared:,} {unit} in a file of {held:,} {unit}; refused")


def refuse_special(path: Path) -> None:
    """Refuse a pipe or a device, on which reading may wait for ever.

    Raises:
        ValueError: it is one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder; give a regular file")
