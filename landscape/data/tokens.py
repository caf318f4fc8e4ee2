"""Token files for language models: `.npy` arrays of token numbers, in blocks whose every next token is predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from landscape.data.dataset import Images
from landscape.data.sampling import Samples, shuffled
from landscape.options import OptionError, at_least, parse_count

SUFFIX = ".npy"


def load(name: str, *, samples: Samples, block_size: int | None) -> Images:
    """The first `samples` sequences of a token file, in one fixed seeded order; both splits are the file itself.

    A 1-D array is cut into blocks of `block_size` inputs; the targets are the same tokens one further, so that each
    token but the first is predicted once, and a rest too short for a block is left out. Rows of a 2-D array are
    sequences of their own: of T tokens, T - 1 predict the others; `block_size` shortens them. Only the chosen
    sequences are read.

    Raises:
        OptionError: the blocks have no size, or one that the file has no tokens for.
        ValueError: the file is no array of token numbers.
    """
    if block_size is not None:
        at_least("block_size", block_size, 1)
    array = _opened(Path(name).expanduser())
    if array.ndim == 1:
        if block_size is None:
            raise OptionError(f"{name} is one run of {len(array)} tokens; say how many go together: --block-size N")
        count, length = (len(array) - 1) // block_size, block_size
    else:
        count, length = len(array), min(array.shape[1] - 1, block_size or array.shape[1])
    if count < 1 or length < 1:
        raise OptionError(
            f"{name} has {array.size} tokens, too few for a sequence of {block_size or 1} and the one after it; "
            "ask for a smaller --block-size or give a longer file"
        )
    chosen = shuffled(count)[: parse_count("samples", samples, count)]
    starts = chosen * length
    rows = [array[s : s + length + 1] for s in starts] if array.ndim == 1 else [array[r, : length + 1] for r in chosen]
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    if tokens.min() < 0:
        raise ValueError(f"{name} has the token {int(tokens.min())}; expected numbers from 0 upward, without padding")
    return Images(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), name, int(tokens.max()) + 1, 0)


def _opened(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an array ({error}); write it with numpy.save") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}; expected token numbers, "
            "one run (1-D) or sequences (2-D)"
        )
    return array  # type: ignore[no-any-return]
