"""Pickled CIFAR batches, read without giving the pickle anything that it could misuse."""

from __future__ import annotations

import _codecs
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from landscape import pickled

# Every name the official files use, in the spellings of numpy 1 and 2, and Python's own for bytes. What
# stands behind numpy's names is ours.
ALLOWED: Mapping[str, Callable[..., Any] | str] = {
    **pickled.NUMPY,
    "numpy.ndarray": "ndarray",
    "numpy.dtype": lambda code, _align, _copy: pickled.Dtype(code).checked(),
    "_codecs.encode": _codecs.encode,
}


class _Restricted(pickled.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for the global {module}.{name}, which is refused")
        return super().find_class(module, name)


def batch(path: Path) -> dict[str, Any]:
    """The dict of one batch file: str keys, arrays as numpy arrays, byte strings of Python 2 as bytes.

    Raises:
        ValueError: the file is damaged, names a global outside `ALLOWED`, or holds no dict.
    """
    try:
        content = _Restricted(io.BytesIO(path.read_bytes()), ALLOWED, encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return {pickled.text(key): v.value() if isinstance(v, pickled.Array) else v for key, v in content.items()}
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{path} is not a CIFAR batch: {reason}; expected a dict of numpy arrays and lists; get the file anew"
        ) from None
