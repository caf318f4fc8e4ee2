"""Versions of everything that can change a number."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Versions of everything that can move a number."""
    names = ("torch", "numpy", "scipy", "h5py")
    return {
        "landscape": metadata.version("landscape-probes"),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }
