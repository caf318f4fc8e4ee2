"""Read the weights of a Hugging Face folder under the names that the installed version of transformers uses."""

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LIBRARY = "transformers.modeling_utils"


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the class of a model is from transformers."""
    return any(kind.__module__ == LIBRARY for kind in type(model).__mro__)


def read_by_transformers(model: Any, folder: Path) -> dict[str, Tensor]:
    """The weights in a folder, read by the library, which may save them under other names than its modules have.

    Raises:
        ValueError: the library cannot read it.
    """
    library_log: Any = import_module("transformers.utils.logging")
    verbosity, bars = library_log.get_verbosity(), library_log.is_progress_bar_enabled()
    library_log.set_verbosity(logging.ERROR)  # this project reports missing weights itself
    library_log.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):  # the library initialises missing weights
            loaded, report = type(model).from_pretrained(
                folder, config=model.config, output_loading_info=True, local_files_only=True,
                ignore_mismatched_sizes=True, trust_remote_code=False,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{folder} cannot be read by transformers ({str(error).strip().splitlines()[0]})") from None
    finally:
        library_log.set_verbosity(verbosity)
        if bars:
            library_log.enable_progress_bar()
    absent = [*report["missing_keys"], *report["mismatched_keys"]]
    fresh = {entry if isinstance(entry, str) else entry[0] for entry in absent}
    weights = {name: tensor for name, tensor in loaded.state_dict().items() if name not in fresh}
    return weights | {name: torch.empty(0) for name in report["unexpected_keys"]}
