"""What tests of the command line share: its results, and a user's file."""

from __future__ import annotations

from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr
MINE = """
import torch
def model(width=5): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, width), torch.nn.Tanh(),
                                               torch.nn.Linear(width, 3))
def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 3, 2, 2, generator=generator), torch.randint(3, (24,), generator=generator)
"""


def one_line(err: str) -> bool:
    return err.startswith("landscape: ") and err.count("\n") == 1 and "Traceback" not in err
