"""Token files for language models: `.npy` arrays of token numbers, split into sequences for next-token prediction."""

from pathlib import Path

import numpy as np
import torch

from landscape.data.dataset import Images
from landscape.data.numpy_files import mapped
from landscape.data.sampling import Samples, shuffled
from landscape.options import OptionError, at_least, parse_count

SUFFIX = ".npy"


def load(name: str, *, samples: Samples, block_size: int | None) -> Images:
    """The first `samples` sequences of a token file, in a fixed seeded order; both splits are the whole file.

    A 1-D array is split into blocks of `block_size` inputs, whose targets are shifted by one token: each token but the
    first is predicted once, and a remainder shorter than a block is left out. Rows of a 2-D array are sequences: the
    first T - 1 of T tokens are inputs, the last T - 1 targets; `block_size` shortens them. Only the selected sequences
    are read.

    Raises:
        OptionError: the block size is missing, or larger than the file.
        ValueError: the file is not an array of token numbers.
    """
    if block_size is not None:
        at_least("block_size", block_size, 1)
    path = Path(name).expanduser()
    array = mapped(path)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}; expected token numbers, "
            f"one sequence (1-D) or several (2-D); images go with their targets: --data {name},TARGETS.npy"
        )
    if array.ndim == 1:
        if block_size is None:
            raise OptionError(
                f"{name} is one sequence of {len(array)} tokens; give the tokens per block with --block-size N"
            )
        count, length = (len(array) - 1) // block_size, block_size
    else:
        count, length = len(array), min(array.shape[1] - 1, block_size or array.shape[1])
    if count < 1 or length < 1:
        raise OptionError(
            f"{name} has {array.size} tokens, too few for a block of {block_size or 1} and the token after it; "
            "give a smaller --block-size or a longer file"
        )
    selected = shuffled(count)[: parse_count("samples", samples, count)]
    rows = [array[i * length :][: length + 1] if array.ndim == 1 else array[i, : length + 1] for i in selected]
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    if tokens.min() < 0:
        raise ValueError(f"{name} has the token {int(tokens.min())}; expected numbers from 0 upward, without padding")
    return Images(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), name, int(tokens.max()) + 1, 0, one_part=True
    )
