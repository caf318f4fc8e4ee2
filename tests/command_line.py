"""What tests of the command line share: its results, and a user's file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import typer

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


def foreign_options(words: Sequence[str], err: str) -> set[str]:
    """The options that the message of a refusal names, and that neither its command nor one that it names has."""
    said = err.splitlines()[-1] if err.startswith("landscape: ") else ""
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", said)) - {"--debug", "--help"}
    named -= {word.partition("=")[0] for word in words}
    for command in (words, *(text.split() for text in re.findall(r"landscape ([a-z-]+(?: [a-z]+)?)", said))):
        named -= _options(command) if named else set()  # which imports a probe for its options
    return named


def _options(command: Sequence[str]) -> set[str]:
    from landscape.cli.main import MEASURING, _tree

    node, path = _tree(), list(command)
    if path and path[0] in MEASURING:
        node.resolve_command(typer.Context(node), path[:1])
    while path and (below := getattr(node, "commands", {}).get(path.pop(0))):
        node = below
    return {flag for param in node.params for flag in (*param.opts, *param.secondary_opts)}
