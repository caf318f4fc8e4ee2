"""Rules that compute again: summaries from the stored units, and the number of samples from those of the units."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from landscape.doctor.finding import Finding, Result, found
from landscape.results.reader import Variables

ROUNDING = 1e-6  # of the largest entry of a summary, which other versions of libraries sum in another order
MOST = 2**28  # bytes of a result that are held to compute its summaries
Reduce = Callable[[dict[str, np.ndarray]], Mapping[str, Any]]


def summaries(result: Result, reduce: Reduce) -> Iterator[Finding]:
    """Stored summaries that do not follow from the stored units: one of the two was changed afterwards."""
    if result.data.nbytes > MOST:
        yield found(
            "summaries", "note", result,
            f"summaries of {result.data.nbytes / 2**20:,.0f} MiB of numbers are not computed again",
            f"a result of at most {MOST >> 20} MiB is checked",
        )  # fmt: skip
        return
    stored: Any = result.data.variables
    read = stored.array if isinstance(stored, Variables) else lambda name: stored[name].values
    arrays = {str(name): np.asarray(read(name)) for name in stored}
    try:
        computed = reduce(arrays)
    except Exception:  # of a result that lacks what a summary is of, which is said elsewhere
        return
    changed = []
    for name, value in computed.items():
        if name not in arrays or arrays[name].dtype.kind != "f" or np.shape(value) != arrays[name].shape:
            continue
        known, again = arrays[name], np.asarray(value, dtype=float)
        size = np.abs(again[np.isfinite(again)]).max(initial=0.0)
        with np.errstate(invalid="ignore"):
            apart = np.abs(known - again) > ROUNDING * max(float(size), 1e-300)
        if (apart | (np.isnan(known) != np.isnan(again))).any():
            changed.append(name)
    if changed:
        yield found(
            "summaries", "wrong", result,
            f"{len(changed)} stored summaries ({', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''}) do not "
            "follow from the stored units",
            _anew(result),
        )  # fmt: skip


def samples(result: Result) -> Iterator[Finding]:
    """The number of samples that a result names is not that of its finished units."""
    counted = result.data.variables.get("samples")
    if counted is None or "batch" not in counted.dims or not result.complete or not result.samples:
        return
    total = float(np.nansum(counted.max([dim for dim in counted.dims if dim != "batch"]).values))
    if total and total != result.samples:
        yield found(
            "samples", "wrong", result, f"it names {result.samples:,} samples, and its units hold {total:,.0f}",
            _anew(result),
        )  # fmt: skip


def _anew(result: Result) -> str:
    command = result.command()
    return f"run: {command} --overwrite" if command else "measure it again with --overwrite"
