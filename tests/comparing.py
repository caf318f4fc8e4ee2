"""Results of one unit, made up for tests of comparisons."""

import json
from typing import Any

import synthetic
import xarray as xr

HOSTILE = "a_b $x$ \\input{z} 100% & #1 ~^{} <b>|µ模 ](http://x)"
Results = list[tuple[str, xr.Dataset]]


def result(
    probe: str,
    label: str,
    values: dict[str, Any],
    *,
    parameters: dict[str, Any] | None = None,
    done: int = 1,
    **about: Any,
) -> tuple[str, xr.Dataset]:
    """A stored result of one unit; the rest of its attributes are those of a protocol."""
    spec = {"split": "test", "batch_size": 128, "weight_decay": 0.0, "loss": "", **about.pop("spec", {})}
    attributes = {
        **synthetic.declared(probe), "label": label, "checkpoint_sha256": label, "data": "digits", "samples": 100,
        "spec": json.dumps(spec), "parameters": json.dumps(parameters or {}), "created": "2026-01-01",
        "protocol": f"digits {spec['split']}, 100 samples, batch size {spec['batch_size']}", **about,
    }  # fmt: skip
    data = xr.Dataset({"done": ("unit", [done]), **values}, attrs=attributes)
    for name in data:
        if str(name).endswith("_se"):
            data[name].attrs["n"] = 1e4
    return f"{probe}/{label}-{abs(hash((label, json.dumps(spec), str(parameters)))):010d}"[:60], data


def trace(label: str, value: float, error: float = 0.1, **about: Any) -> tuple[str, xr.Dataset]:
    return result("trace", label, {"trace": value, "trace_se": error}, **about)


def seeds(group: str, *values: float) -> Results:
    return [trace(f"{group}-s{i}", value) for i, value in enumerate(values)]
