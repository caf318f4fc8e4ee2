"""Tell protocols apart: which results of a probe were measured in the same way, on the same samples, and which not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xarray as xr

from landscape.plots.appearance import parameters_of

# Probes whose numbers depend on the size of the mini-batches, on weight decay, and on the seed of the loading options.
BATCHWISE = ("attention", "ensemble", "evaluate", "hessian", "similarity", "trace", "uncertainty")
DECAYED = ("convexity", "density", "hessian", "trace")
SEEDED = ("evaluate", "uncertainty")
# Parameters that change how exact a number is, not which number it is.
ACCURACY = ("hvp", "draws", "vectors", "max_vectors", "tol", "tol_residual", "max_products", "ends", "eigenvectors",
            "verify", "timed", "tune", "budget", "pictures")  # fmt: skip
OF_THE_NETWORK = ("members", "snapshots", "run")  # parameters that name checkpoints
SHOWN = 60  # characters of a value in words


@dataclass(frozen=True)
class Protocol:
    """What two results of one probe must share, to be compared: facts in words, and the digest of the samples."""

    facts: Mapping[str, str]
    samples_sha256: str  # "" where an earlier version did not store it
    words: str  # as it stands beside the numbers

    def same(self, other: Protocol) -> bool:
        """Whether a difference can be attributed to the networks."""
        return self.facts == other.facts and len({self.samples_sha256, other.samples_sha256} - {""}) < 2

    def against(self, other: Protocol) -> str:
        """In what two protocols differ: `batch size 64 against 128`."""
        names = dict.fromkeys([*self.facts, *other.facts])
        pairs = [(name, self.facts.get(name, "not said"), other.facts.get(name, "not said")) for name in names]
        words = [f"{name} {_short(one)} against {_short(two)}" for name, one, two in pairs if one != two]
        return ", ".join(words) or "other samples of the same name"


def protocol_of(data: xr.Dataset, *, changed: bool = True) -> Protocol:
    """The protocol of a stored result, in words with what was `changed` about the network, or without."""
    probe, spec = str(data.attrs.get("probe", "")), _spec(data)
    words = str(data.attrs.get("protocol", "protocol not stored"))
    if not changed:
        words = re.sub(r", (mean of \d+ dropout masks|smoothing at \d+ places?( \([^)]*\))?)", "", words)
    facts: dict[str, Any] = {
        "data": data.attrs.get("data", ""), "split": spec.get("split", ""), "samples": data.attrs.get("samples", ""),
    }  # fmt: skip
    if not spec:  # imported: what is known of it is in its words
        facts["source"] = words
    facts["loss"] = str(spec.get("loss", "") or "cross-entropy").rpartition("/")[2]
    facts["augmentation"] = bool(spec.get("augment"))
    facts["preprocessing"] = [
        spec[name] for name in ("image_size", "mean", "std", "interpolation", "crop") if name in spec
    ]
    for name, key, probes in (("batch size", "batch_size", BATCHWISE), ("weight decay", "weight_decay", DECAYED),
                              ("seed of the data", "seed", SEEDED)):  # fmt: skip
        if probe in probes:
            facts[name] = spec.get(key, data.attrs.get(key, ""))
    drawn = parameters_of(data).get("plane") == "random" or parameters_of(data).get("along") == "random"
    without = (*ACCURACY, *OF_THE_NETWORK, *(("seed", "directions") if drawn else ()))
    given = {k: v for k, v in parameters_of(data).items() if k not in without}
    facts |= {name.replace("_", " "): value for name, value in given.items()}
    return Protocol(
        {name: _in_words(value) for name, value in facts.items()}, str(data.attrs.get("data_sha256", "")), words
    )


def variant_of(data: xr.Dataset) -> str:
    """What was changed about a network before it was measured; "" for the network of the checkpoint."""
    spec = _spec(data)
    arguments = spec.get("model_arg") or {}
    parts = [
        f"{spec['mc_dropout']} dropout masks" if spec.get("mc_dropout") else "",
        "smoothing inserted" if data.attrs.get("smoothing") else "",
        f"{spec['weights']} weights" if spec.get("weights", "raw") != "raw" else "",
        *(f"{name}={_short(_in_words(value))}" for name, value in sorted(arguments.items())),
    ]
    return ", ".join(filter(None, parts))


def _spec(data: xr.Dataset) -> dict[str, Any]:
    try:
        found = json.loads(str(data.attrs.get("spec", "")) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _in_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if isinstance(value, list | dict | bool | None) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
