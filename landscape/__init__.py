"""Loss-landscape and representation diagnostics of any PyTorch checkpoint.

    subject = landscape.load("checkpoints/vit_demo-digits/final.pt")
    spectrum = landscape.measure("hessian", subject, out="results.h5", top=5)
    tree = landscape.open("results.h5")
    landscape.plots.hessian(tree)

`landscape.probes()` lists what `measure` can measure, beside a `Probe` of your own; with `out=None` it writes no file.
`landscape.plots` holds one function per figure.

Importing this package is cheap: torch is imported by `load` and `measure`, not by `open`, `compare`, `plots` and
`probes`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from landscape import probes
    from landscape.api import evaluate, features, measure, study
    from landscape.headline import Headline
    from landscape.monitoring.lightning_callback import LightningMonitor
    from landscape.monitoring.monitor import Monitor
    from landscape.monitoring.transformers_callback import TransformersMonitor
    from landscape.plots.comparison.text import compare
    from landscape.probe import Plan, Probe, Quantity, Unit
    from landscape.results.reader import open
    from landscape.subject.loading.load import load
    from landscape.subject.subject import Subject

    __version__: str

__all__ = [
    "Headline", "LightningMonitor", "Monitor", "Plan", "Probe", "Quantity", "Subject", "TransformersMonitor", "Unit",
    "__version__", "compare", "evaluate", "features", "load", "measure", "open", "probes", "study",
]  # fmt: skip

_HOME = {
    "LightningMonitor": "monitoring.lightning_callback", "Monitor": "monitoring.monitor",
    "TransformersMonitor": "monitoring.transformers_callback",
    "Subject": "subject.subject", "load": "subject.loading.load", "open": "results.reader",
    "Headline": "headline", "Plan": "probe", "Probe": "probe", "Quantity": "probe", "Unit": "probe",
    "compare": "plots.comparison.text", "evaluate": "api", "features": "api", "measure": "api",
    "study": "api",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    from importlib import import_module, metadata

    if name == "__version__":
        return metadata.version("landscape-probes")
    if name in ("plots", "probes"):
        return import_module(f"landscape.{name}")
    if name not in _HOME:
        raise AttributeError(f"module landscape has no attribute {name}; it has {', '.join(__all__)}")
    return getattr(import_module(f"landscape.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
