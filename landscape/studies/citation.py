"""Write what a paper says and cites of a results file: a paragraph of methods, and the BibTeX of its sources."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources

import xarray as xr

from landscape.probes import PROBES
from landscape.results.protocols import stored as attribute
from landscape.results.run_key import OPTIONS

TOOL = "landscape"  # key of this software
SAID = (  # by the protocol, or about files and machines of the user
    "checkpoint", "data", "samples", "split", "batch_size", "weight_decay", "seed", "augment", "hvp",
    "data_root", "device", "adapter", "trust_pickle",
)  # fmt: skip
LATEX = {  # what a character is in a paper
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "\N{MINUS SIGN}": "$-$", "±": r"$\pm$", "<": "$<$", ">": "$>$", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}  # fmt: skip
ENTRY = r"""@misc{landscape,
  title = {landscape: Loss-Landscape and Representation Diagnostics of any {PyTorch} Checkpoint},
  author = {{The landscape developers}}, version = {VERSION}
}"""


def methods_and_sources(results: Sequence[xr.Dataset]) -> str:
    r"""A paragraph with `\cite`, and below it the entries that it cites; as a whole a file that BibTeX reads.

    Raises:
        ValueError: no probe of this project measured any of them.
    """
    by_probe: dict[str, list[xr.Dataset]] = {}
    for data in results:
        by_probe.setdefault(str(data.attrs.get("probe", "")), []).append(data)
    known = {probe: by_probe[probe] for probe in PROBES if probe in by_probe}
    if not known:
        raise ValueError("nothing measured to cite by an installed probe; run one first, such as: landscape surface")
    releases = sorted({str(attribute(d, "versions").get("landscape", "")) for some in known.values() for d in some})
    release = ", ".join(filter(None, releases))
    lines = [rf"We measured with landscape {release} \cite{{{TOOL}}}."]
    lines += [_sentence(probe, some) for probe, some in known.items()]
    keys = dict.fromkeys(key for probe in known for key in PROBES[probe].sources.split())
    entries = bibliography()
    return "\n\n".join(["\n".join(lines), ENTRY.replace("VERSION", release), *(entries[key] for key in keys)]) + "\n"


def bibliography() -> dict[str, str]:
    """The entries of all sources by their keys."""
    text = resources.files("landscape.probes").joinpath("sources.bib").read_text("utf-8")
    return {
        entry.partition("{")[2].partition(",")[0]: entry.strip() for entry in re.split(r"(?m)^(?=@)", text) if entry
    }


def _sentence(probe: str, results: Sequence[xr.Dataset]) -> str:
    """What a probe measures, by whom it is, on which data and with which options, and what its intervals are over."""
    entry = PROBES[probe]
    cited = rf" \cite{{{','.join(entry.sources.split())}}}" if entry.sources else ""
    how: dict[str, dict[str, None]] = {}
    for data in results:
        options = _options(attribute(data, OPTIONS))
        words = ", ".join(filter(None, (str(data.attrs.get("protocol", "")), options)))
        how.setdefault(words, {}).setdefault(str(data.attrs.get("label", "")))
    said = "; ".join(f"{words} ({', '.join(who)})" if len(how) > 1 else words for words, who in how.items())
    over = " and ".join(dict.fromkeys(str(data.attrs.get("errors_over", "samples")) for data in results))
    name = probe[:1].upper() + probe[1:]
    return f"{name}: {entry.help.rstrip('.')}{cited}; {latex(said)}; 95\\,\\% intervals over {latex(over)}.".replace(
        "@", " at "
    )


def _options(options: Mapping[str, object]) -> str:
    """Options that differ from their defaults, without those of the protocol, and without files of the user."""
    plain = {
        name: json.dumps(value) if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if name not in SAID and isinstance(value, str | int | float) and "/" not in str(value)
    }
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items())


def latex(text: str) -> str:
    """A value as text of LaTeX, on one line."""
    return "".join(LATEX.get(char, char) for char in re.sub(r"\s+", " ", text))
