"""Loss-landscape and representation diagnostics of any PyTorch checkpoint.

    subject = landscape.load("checkpoints/vit_demo-digits/final.pt")
    spectrum = landscape.measure("hessian", subject, out="results.h5", top=5)
    tree = landscape.open("results.h5")

Importing this package is cheap: torch is imported by `load` and `measure`, not by `open`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landscape.api import measure
    from landscape.results.reader import open
    from landscape.subject.loading import load
    from landscape.subject.subject import Subject

__all__ = ["Subject", "load", "measure", "open"]

_HOME = {"Subject": "subject.subject", "load": "subject.loading", "measure": "api", "open": "results.reader"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module landscape has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(f"landscape.{_HOME[name]}"), name)
