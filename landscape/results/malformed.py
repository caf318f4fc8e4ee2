"""Say in one sentence which stored result a reader stumbled over, and check what every reader relies on.

Files come from anywhere: a result may lack an array or an attribute, or hold it in another form.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from landscape.options import OptionError, printable

# What reading a result raises where it is not as it was written.
WRONG = (LookupError, TypeError, AttributeError, ArithmeticError, ValueError)
TEXT = ("probe", "label", "created", "finished", "model", "data", "protocol")  # attributes that are text
JSON = ("parameters", "spec", "versions")  # and those that are JSON objects
NUMBERS = "biuf"  # kinds of dtypes
SHOWN = 160  # characters of a reason
DEBUG = "or see with --debug where that was noticed"
REPAIR = "or save what else is intact with: landscape repair "


@contextlib.contextmanager
def readable(
    path: Path | str, *names: str, advice: str = DEBUG, changed: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Turn whatever reading these results of a file raises into one sentence that names them.

    Where they were not `changed` since they were written, it gives another cause. Of several files, `path` has commas.

    Raises:
        ValueError: reading failed.
    """
    try:
        yield
    except OptionError:
        raise
    except WRONG as error:
        if str(error).startswith(tuple(f"{path}".split(", "))):
            raise
        which = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") or "a result"
        if not changed():
            about = f"{printable(which)}: " if names else ""
            about += "" if type(error) is ValueError else f"{type(error).__name__}: "
            raise ValueError(
                f"{path}: {about}{_reason(error)}; the results are as landscape wrote them: the cause lies elsewhere, "
                "--debug shows where"
            ) from error
        raise ValueError(
            f"{path}: {printable(which)} is not as landscape writes it ({_reason(error)}); measure it again "
            f"into another file, {advice}"
        ) from error


def check_attributes(attributes: Mapping[str, Any], probe: str) -> None:
    """Check the attributes of a result of a probe.

    Raises:
        ValueError: one is missing, or has another form than it is written in.
    """
    for name, value in attributes.items():
        check_attribute(name, value)
    check_identity(attributes, probe)


def check_identity(attributes: Mapping[str, Any], probe: str) -> None:
    """Check that a result has a label and is of a probe. Raises ValueError: it is not."""
    if "label" not in attributes:
        raise ValueError("it lacks the attribute label")
    if attributes.get("probe") != probe:
        raise ValueError(f"the attribute probe is {attributes.get('probe')!r}, expected {probe!r}")


def check_attribute(name: str, value: Any) -> None:
    """Check an attribute of a result. Raises ValueError: it has another form than it is written in."""
    if not isinstance(value, str | int | float):
        raise ValueError(f"the attribute {name} is neither text nor a number")
    if name in TEXT and not isinstance(value, str):
        raise ValueError(f"the attribute {name} is {value!r}, expected text")
    if name in JSON:
        _check_json(name, value)


def check_array(name: str, dataset: h5py.Dataset) -> None:
    """Check the type of an array. Raises ValueError: it holds neither numbers nor text."""
    text = h5py.check_string_dtype(dataset.dtype) is not None
    if dataset.shape is None or not (text or dataset.dtype.kind in NUMBERS):
        raise ValueError(f"{name} holds neither numbers nor text")


def check_done(done: np.ndarray) -> None:
    """Check the array that says which units are finished. Raises ValueError: it says something else."""
    values = np.asarray(done)  # which may still lie in the file
    if values.dtype.kind not in "biu" or (values.size and not 0 <= values.min() <= values.max() <= 1):
        raise ValueError("done holds something else than 0 and 1")


def _check_json(name: str, value: object) -> None:
    try:
        found = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"the attribute {name} is not a JSON object")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    if isinstance(error, KeyError) and " " not in text:
        text = f"it lacks {text}"
    return printable(text[:SHOWN]) or "for a reason that the library does not say"
