"""Find folders written by transformers' `save_pretrained`, by path or by hub name; never from the network."""

import os
from pathlib import Path


def folder_of(name: str) -> Path:
    """The folder of a name: the path itself, or the hub client's cached copy.

    The cache is read without the client, whose import takes a second and whose failure offline takes twenty.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: the folder has no `config.json`.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _cached(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"hf:{name}: {folder} has no config.json; expected a folder that save_pretrained wrote")
    return folder


def _cached(name: str) -> Path:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        raise FileNotFoundError(
            f"hf:{name}: no such folder, and nothing of that name in {cache}; nothing is downloaded: fetch it "
            f"once with 'hf download {name}', or give a folder with config.json"
        ) from None
