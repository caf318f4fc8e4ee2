"""Weights of a Hugging Face folder under the names that the running version of transformers gives them."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LIBRARY = "transformers.modeling_utils"


def of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of that library's."""
    return any(kind.__module__ == LIBRARY for kind in type(model).__mro__)


def renamed(model: Any, folder: Path) -> dict[str, Tensor]:
    """What a folder holds of a model, read by the library: it saves under other names than those of its modules.

    Args:
        model: of transformers.
        folder: written by `save_pretrained`.

    Raises:
        ValueError: the library cannot read it.
    """
    telling: Any = import_module("transformers.utils.logging")
    before, bars = telling.get_verbosity(), telling.is_progress_bar_enabled()
    telling.set_verbosity(logging.ERROR)  # what is missing is said by us
    telling.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):  # the library initialises what it does not find
            found, told = type(model).from_pretrained(
                folder, config=model.config, output_loading_info=True, local_files_only=True,
                ignore_mismatched_sizes=True, trust_remote_code=False,
            )  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{folder} cannot be read by transformers ({str(error).strip().splitlines()[0]})") from None
    finally:
        telling.set_verbosity(before)
        if bars:
            telling.enable_progress_bar()
    fresh = {
        entry if isinstance(entry, str) else entry[0]
        for key in ("missing_keys", "mismatched_keys")
        for entry in told[key]
    }
    weights = {name: tensor for name, tensor in found.state_dict().items() if name not in fresh}
    return weights | {name: torch.empty(0) for name in told["unexpected_keys"]}
