"""Number the protocols of a study, so that a page prints each once, and tell which results may be compared."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import xarray as xr

from landscape.results import protocols, reader

IN_TEXT = ("data", "split", "samples", "source", "against", "baseline")  # facts that the text says, or of the networks


def text_of(data: xr.Dataset) -> str:
    """The protocol of a result: data, samples, augmentation, and the treatment of batch norm where it is not usual."""
    statistics = str(data.attrs.get("statistics", "frozen"))
    also = f", batch-norm statistics {statistics}" if statistics != "frozen" else ""
    return f"{str(data.attrs.get('protocol', '')) or 'protocol not stored'}{also}"


def settings_of(data: xr.Dataset) -> dict[str, str]:
    """What else changes the meaning of a result's numbers, in words: the facts of its protocol, samples and seed."""
    try:
        protocol = protocols.protocol_of(data)
        facts = {**protocol.facts, "digest of the samples": protocol.samples_sha256[:8]}
        seed = reader.parameters_of(data).get("seed")
    except ValueError:
        return {}
    facts = {name: value for name, value in facts.items() if name not in IN_TEXT and value not in ("", "null", "[]")}
    return facts | ({} if seed is None else {"seed": str(seed)})


def key_of(data: xr.Dataset) -> tuple[str, str]:
    """What two results of one probe must share for their numbers to stand in one column."""
    return text_of(data), json.dumps(settings_of(data), sort_keys=True)


def distinctions(results: Sequence[xr.Dataset], data: xr.Dataset) -> str:
    """How the protocol and the parameters of a result differ from those of others, in words; "" if they do not."""
    mine, words = settings_of(data), []
    for part in text_of(data).split(", "):
        if any(part not in text_of(other).split(", ") for other in results):
            words.append(part)
    for key in mine:
        if any(settings_of(other).get(key) != mine[key] for other in results):
            words.append(f"{key} {mine[key]}")
    return ", ".join(words)


@dataclass
class Protocols:
    """The protocols in order of appearance, with the probes that used each."""

    texts: dict[str, list[str]] = field(default_factory=dict)

    def number(self, data: xr.Dataset) -> int:
        """The number of a result's protocol, from 1."""
        text, probe = text_of(data), str(data.attrs.get("probe", ""))
        probes = self.texts.setdefault(text, [])
        if probe not in probes:
            probes.append(probe)
        return list(self.texts).index(text) + 1
