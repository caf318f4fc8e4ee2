"""Import the optional libraries when used: timm, torchvision, transformers, Lightning."""

import importlib
import importlib.util
import logging
import sys
from types import ModuleType

import torch

EXTRAS = {"timm": "timm", "torchvision": "torchvision", "transformers": "hf", "lightning": "lightning", "peft": "peft"}
# Operators whose schemas torchvision expects even if its compiled operators did not load.
SCHEMAS = ("nms", "qnms")
MISMATCH = "operator torchvision::"  # in the error of such an import

log = logging.getLogger(__name__)
_kept: list[torch.library.Library] = []  # dropping a library unregisters its schemas


def library(name: str) -> ModuleType:
    """Import a library by name; torchvision first, which the others import.

    Raises:
        ValueError: it is not installed, or cannot be imported.
    """
    try:
        if name != "torchvision" and importlib.util.find_spec("torchvision") is not None:
            _torchvision()
        return _torchvision() if name == "torchvision" else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ValueError(f"{name} cannot be imported ({error}); install what it requires") from error
        extra = f"landscape-probes[{EXTRAS[name]}]"
        raise ValueError(f"{name} is not installed; install it: pip install '{extra}'") from None
    except (ImportError, RuntimeError) as error:
        needed = f"install the release for torch {torch.__version__}" + f": {cure()}" * (name == "torchvision")
        raise ValueError(f"{name} cannot be imported ({error}); {needed}") from error


def cure() -> str:
    """The command that installs the torchvision of this torch, from the index that has it."""
    build = torch.__version__.partition("+")[2]  # such as cpu or cu128
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"pip uninstall -y torchvision && pip install torch=={torch.__version__} torchvision{index}"


def _torchvision() -> ModuleType:
    """Import torchvision, even if its compiled operators were built for another torch.

    Its import then fails on a missing operator of detection models, and succeeds with two schemas without kernels. They
    are defined only after such a failure, because they would clash with operators that do load.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if MISMATCH not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    if not _kept:
        _kept.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
        for operator in SCHEMAS:
            schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            _kept[0].define(schema)  # type: ignore[no-untyped-call]
    found = importlib.import_module("torchvision")
    log.info(
        "torchvision was built for another torch than %s: its classification models work here, not those of detection, "
        "nor your own `import timm` or `import transformers`; to mend it: %s",
        torch.__version__,
        cure(),
    )
    return found
