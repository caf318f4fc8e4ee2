"""The baseline that errors under corruptions are relative to: a CSV, or a stored answer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from landscape.exchange import corruption_csv
from landscape.exchange.corruption_csv import METRICS, CorruptionTable
from landscape.options import OptionError
from landscape.results import reader

SUFFIXES = (".h5", ".hdf5")


def read(text: str) -> CorruptionTable:
    """The table of `FILE.csv`, of `results.h5` with one answer of `corruption`, or of `results.h5:LABEL`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no finished answer.
        OptionError: a results file holds several answers and no label says which.
    """
    file, _, label = text.rpartition(":")
    stored, label = (file, label) if file.endswith(SUFFIXES) else (text, "")
    if not stored.endswith(SUFFIXES):
        return corruption_csv.read(Path(text).expanduser())
    found = reader.find(Path(stored).expanduser(), probe="corruption", label=label or None)
    found = [(name, data) for name, data in found if (data["done"] == 1).all()]
    labels = list(dict.fromkeys(str(data.attrs.get("label", "")) for _, data in found))
    if not found:
        raise ValueError(f"{text} holds no finished answer of corruption; run landscape corruption BASELINE first")
    if len(labels) > 1:
        raise OptionError(f"--baseline {text} holds {', '.join(labels)}; say which, such as {stored}:{labels[0]}")
    data = found[-1][1]
    names = tuple(str(name) for name in data["corruption_name"].values)
    severities = tuple(int(s) for s in data["severity"].values)
    return CorruptionTable(names, severities, {name: np.asarray(data[name].values, float) for name in METRICS})


def selected(
    table: CorruptionTable, names: Sequence[str], severities: Sequence[int], text: str
) -> dict[str, np.ndarray]:
    """The scores of these corruptions and severities, (corruption, severity); NaN of a metric that it lacks.

    Raises:
        OptionError: the baseline lacks a corruption or a severity.
    """
    lacking = [name for name in names if name not in table.names]
    lacking += [f"severity {s}" for s in severities if s not in table.severities]
    if lacking:
        raise OptionError(
            f"--baseline {text} has no {lacking[0]}; it has {', '.join(table.names)} at severities "
            f"{', '.join(map(str, table.severities))}; leave it out with --corruptions and --severities"
        )
    rows, columns = [table.names.index(name) for name in names], [table.severities.index(s) for s in severities]
    return {metric: values[np.ix_(rows, columns)] for metric, values in table.scores.items()}
