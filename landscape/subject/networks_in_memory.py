"""Networks in memory where an option names a checkpoint file: a module, a subject or a state dict of the caller's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from landscape.checkpoints import checkpoint, containers
from landscape.options import OptionError

Network: TypeAlias = nn.Module | Mapping[str, Tensor]
OPTIONS = {"along": 0, "plane": 2, "against": 1, "members": 0}  # that take networks, with their number; 0: any number
RESERVED = ("random", "eigen")  # words with a meaning of their own in these options


@dataclass(frozen=True)
class Naming:
    """Options as text, with the networks that stand behind names in it."""

    options: dict[str, Any]
    networks: dict[str, Network] = field(default_factory=dict)


def named(options: Mapping[str, Any]) -> Naming:
    """Replace every network in memory, and every path given together with one, by a name.

    The name of a subject is its label, that of others `module` or `state_dict`; they are numbered where it is taken.

    Raises:
        OptionError: an option takes another number of networks.
    """
    naming = Naming(dict(options))
    for option in OPTIONS.keys() & options.keys():
        value = options[option]
        several = list(value) if isinstance(value, tuple | list) else [value]
        if any(_is_network(one) for one in several) and len(several) != OPTIONS[option] > 0:
            raise OptionError(f"{option} takes {OPTIONS[option]} networks in memory, got {len(several)}")
        naming.options[option] = ",".join(_name(one, naming.networks) for one in several)
    return naming


def checkpoint_of(name: str, network: Network) -> checkpoint.Checkpoint:
    """The weights of a network as they are now, as if read from a file of that name.

    Raises:
        ValueError: a dictionary holds no weights.
    """
    try:
        found = containers.weights_in(network.state_dict() if isinstance(network, nn.Module) else network, "raw")
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    # Copies: they may share memory with the weights that the measurement moves.
    weights = {key: tensor.detach().to("cpu", copy=True) for key, tensor in found.weights.items()}
    return checkpoint.Checkpoint(Path(name), weights, taken="in memory")


def _is_network(value: object) -> bool:
    return isinstance(value, nn.Module | Mapping) or isinstance(getattr(value, "model", None), nn.Module)


def _name(value: Any, networks: dict[str, Network]) -> str:
    """The text for one value; a network is entered under its name."""
    if not _is_network(value):
        return str(value)
    if isinstance(value, nn.Module | Mapping):
        label, network = ("module" if isinstance(value, nn.Module) else "state_dict"), value
    else:  # a subject
        label, network = re.sub(r"[^\w+-]", "_", value.label), value.origin.original or value.model
    taken = {*networks, *RESERVED}
    number = next(k for k in range(1, len(taken) + 2) if (label if k == 1 else f"{label}-{k}") not in taken)
    name = label if number == 1 else f"{label}-{number}"
    networks[name] = network
    return name
