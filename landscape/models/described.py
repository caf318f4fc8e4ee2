"""Refuse networks that a file describes far larger than its weights, before memory is reserved for them."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from landscape.checkpoints.raw_files import files_of
from landscape.checkpoints.user_code import kept_rng
from landscape.data.memory import available, format_bytes
from landscape.results.declared_size import EXPANSION, refuse_oversized

SLACK = 4 * 10**6  # bytes by which a network may exceed `EXPANSION` times the file with its weights
MOST_MODULES = 50_000  # in it, which take some seconds and 200 MB without their parameters


def refuse_larger(path: Path, what: str, make: Callable[[], nn.Module], *, config: bool = False) -> None:
    """Refuse a network, in a sentence `what`, that is far larger than the weights of the file that describes it.

    One that a configuration alone describes may be as large as free memory.

    Raises:
        ValueError: it is larger, or has modules without end.
    """
    held = None if config else sum(file.stat().st_size for file in files_of(path))

    def refuse(count: int) -> None:
        if held is not None:
            refuse_oversized(str(path), what, count, held, expansion=EXPANSION, slack=SLACK)
        elif count > (free := available()):
            raise ValueError(
                f"{path} declares {what}, which needs {format_bytes(count)} of memory, and {format_bytes(free)} is free"
            )

    size = 0
    try:
        with kept_rng(), warnings.catch_warnings(), torch.device("meta"), counting(path, lambda _: None) as count:
            warnings.simplefilter("ignore")
            make()
            size = count()
    except _EndlessError:
        raise
    except Exception:  # it computes with its weights while it is built
        with kept_rng(), counting(path, refuse):
            make()
    refuse(size)


class _EndlessError(ValueError):
    pass


@contextmanager
def counting(path: Path, refuse: Callable[[int], None]) -> Iterator[Callable[[], int]]:
    """Call `refuse` with the bytes of all tensors that modules get within the block, whenever they grow.

    What it raises ends the block, even if that would report another error.
    """
    sizes: dict[int, int] = {}
    modules, total, thread = 0, 0, threading.get_ident()
    raised: list[ValueError] = []

    def added(module: nn.Module, name: str, value: Any) -> None:
        nonlocal modules, total
        if value is None or threading.get_ident() != thread:
            return
        try:
            if isinstance(value, torch.Tensor):
                total += value.nbytes - sizes.get(id(value), 0)
                sizes[id(value)] = value.nbytes
                refuse(total)
            else:
                modules += 1
                if modules > MOST_MODULES:
                    raise _EndlessError(f"{path} declares a network of more than {MOST_MODULES:,} modules; refused")
        except ValueError as error:
            raised.append(error)
            raise

    kinds = ("parameter", "buffer", "module")
    handles = [getattr(hooks, f"register_module_{kind}_registration_hook")(added) for kind in kinds]
    try:
        yield lambda: total
    except Exception:
        if raised:
            raise raised[0] from None
        raise
    finally:
        for handle in handles:
            handle.remove()
