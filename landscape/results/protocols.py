"""Tell protocols apart: which results of a probe were measured in the same way, on the same samples, and which not.

One definition for every reader: `compare` tests differences of one protocol, `doctor` names checkpoints that have none
in common, the report has a column per protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xarray as xr

from landscape.results.run_key import SEVERAL, USES

# What such options are as facts; every other one is the same for all probes, or part of the data.
FACTS = {"batch size": "batch_size", "weight decay": "weight_decay", "seed of the data": "seed"}
# Parameters that change how exact a number is, how fast it is found, or which numbers there are.
ACCURACY = ("hvp", "draws", "vectors", "max_vectors", "tol", "tol_residual", "max_products", "ends", "eigenvectors",
            "verify", "timed", "tune", "budget", "measures", "pictures", "memory_format", "compile",
            "every", "overhead")  # fmt: skip
# Of a configuration, what may differ between runs of one: the seed, the recipe's name, and what only makes it faster.
OF_A_RUN = ("seed", "name", "memory_format", "compile")
OF_THE_NETWORK = ("members", "snapshots", "run")  # parameters that name checkpoints
# Facts that forbid a test of the difference, but not a figure side by side: how finely a grid is resolved, the seed,
# and where a plane or line lies that each network's own curvature, run or checkpoints set.
FINENESS = ("resolution", "preview", "tolerance", "cap", "precision", "seed")
OWN_PLACE = ("plane", "along", "range")
OPTIONS = {**FACTS, "augmentation": "augment"}  # facts whose option has another name
PREPROCESSING = ("image_size", "mean", "std", "interpolation", "crop")
CHANGES = ("weights", "mc_dropout")  # loading options that measure another network of the same checkpoint
OPTIMIZER = r", optimiser (\w+)"  # of a monitored training, in the words of its protocol
SHOWN = 60  # characters of a value in words


@dataclass(frozen=True)
class Protocol:
    """What two results of one probe must share, to be compared: facts in words, and the digest of the samples."""

    facts: Mapping[str, str]
    samples_sha256: str  # "" of an imported result
    words: str  # as it stands beside the numbers

    def same(self, other: Protocol) -> bool:
        """Whether a difference can be attributed to the networks."""
        return self.facts == other.facts and len({self.samples_sha256, other.samples_sha256} - {""}) < 2

    def against(self, other: Protocol) -> str:
        """In what two protocols differ: `batch size 64 against 128`."""
        pairs = differing(self.facts, other.facts)
        words = [f"{name} {_short(pairs[name][0])} against {_short(pairs[name][1])}" for name in pairs]
        return ", ".join(words) or "other samples of the same name"


def protocol_of(data: xr.Dataset, *, changed: bool = True) -> Protocol:
    """The protocol of a stored result, in words with what was `changed` about the network or training, or without."""
    spec, parameters = stored(data, "spec"), stored(data, "parameters")
    words = str(data.attrs.get("protocol", "protocol not stored"))
    if not changed:
        words = re.sub(rf", (mean of \d+ dropout masks|smoothing at \d+ places?( \([^)]*\))?)|{OPTIMIZER}", "", words)
    facts: dict[str, Any] = {
        "data": data.attrs.get("data", ""), "split": spec.get("split", ""), "samples": data.attrs.get("samples", ""),
    }  # fmt: skip
    if not spec:  # imported: what is known of it is in its words
        facts["source"] = words
    facts["loss"] = str(data.attrs.get("loss") or spec.get("loss") or "cross-entropy").rpartition("/")[2]
    facts["augmentation"] = bool(spec.get("augment"))
    facts["recipe"] = spec.get("recipe") if spec.get("augment") else ""
    facts |= {name.replace("_", " "): spec.get(name) for name in PREPROCESSING}
    used = str(data.attrs.get(USES, "")).split(",")
    facts |= {name: spec.get(key, data.attrs.get(key, "")) for name, key in FACTS.items() if key in used}
    random = "random" in (parameters.get("plane"), parameters.get("along"))
    # A followed training gives its own seed to the start vectors of its eigenvalues, and rows at steps of its own.
    drawn = ("seed", "directions") if random else ("seed",) if "every" in parameters else ()
    without = (*ACCURACY, *OF_THE_NETWORK, *drawn)
    facts |= {name.replace("_", " "): value for name, value in parameters.items() if name not in without}
    if random:  # as measured: the default is a number too
        axes = [data[axis].values for axis in "xyt" if axis in data and data[axis].size]
        facts["range"] = ",".join(f"{axis.min():g}:{axis.max():g}" for axis in axes)
    said = {name: _in_words(value) for name, value in facts.items() if value not in (None, "", [], {})}
    return Protocol(said, str(data.attrs.get("data_sha256", "")), words)


def of_several(data: xr.Dataset) -> bool:
    """Whether a result is of several networks together, which are its members."""
    return bool(data.attrs.get(SEVERAL) == "members")


def samples_of(data: xr.Dataset) -> str:
    """How many samples of which split a result is of: `360 test`; "" where neither is stored."""
    return " ".join(filter(None, (str(data.attrs.get("samples", "")), str(stored(data, "spec").get("split", "")))))


def side_by_side(data: xr.Dataset) -> Mapping[str, str]:
    """The facts that must agree between networks of one figure, with what was changed about the network."""
    facts, changes = protocol_of(data).facts, stored(data, "spec")
    random = "random" in (facts.get("plane"), facts.get("along"))
    without = (*FINENESS, *(() if random else OWN_PLACE))
    own = {name: _in_words(changes[name]) for name in CHANGES if changes.get(name) not in (None, "", 0, "raw")}
    return {name: value for name, value in facts.items() if name not in without} | own


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Facts that are not the same in two protocols, with both values; "not said" where one does not have it."""
    names = dict.fromkeys([*one, *other])
    pairs = {name: (one.get(name, "not said"), other.get(name, "not said")) for name in names}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def option_of(fact: str) -> str:
    """The name of the parameter or loading option that sets a fact."""
    return OPTIONS.get(fact, fact.replace(" ", "_"))


def variant_of(data: xr.Dataset) -> str:
    """What was changed about a network before it was measured; "" for the network of the checkpoint."""
    spec = stored(data, "spec")
    arguments = spec.get("model_arg") or {}
    parts = [
        f"{spec['mc_dropout']} dropout masks" if spec.get("mc_dropout") else "",
        "smoothing inserted" if data.attrs.get("smoothing") else "",
        f"{spec['weights']} weights" if spec.get("weights", "raw") != "raw" else "",
        *(f"{name}={_short(_in_words(value))}" for name, value in sorted(arguments.items())),
    ]
    return ", ".join(filter(None, parts))


def optimizer_of(data: xr.Dataset) -> str:
    """The optimiser of a monitored training, "" of everything else."""
    found = re.search(OPTIMIZER, str(data.attrs.get("protocol", "")))
    return found[1] if found else ""


def stored(data: xr.Dataset, name: str) -> dict[str, Any]:
    """Stored options: `parameters` of the probe, `spec` of loading, or `configuration`; empty where there are none."""
    try:
        found = json.loads(data.attrs.get(name) or "{}")
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _in_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if isinstance(value, list | dict | bool | None) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
