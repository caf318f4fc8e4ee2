"""Parse `--device`, and wait for one."""

from __future__ import annotations

import torch

from landscape.options import invalid


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that a clock read before and after tells the time of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device(name: str) -> torch.device:
    """The device named "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".

    Raises:
        OptionError: the name is invalid.
        ValueError: this machine has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdigit() or name == kind):
        raise invalid("device", name, "auto, cpu, cuda or cuda:1")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"--device {name}: this machine has {count} CUDA devices; use --device cpu or auto")
    return torch.device(name)
