"""Parse `--device`, wait for one, and put a model on it in a precision to measure in."""

import copy
import logging

import torch
from torch import Tensor, fx, nn

from landscape.data.memory import page_locked
from landscape.options import first_line, invalid

HALF = (torch.float16, torch.bfloat16)
NARROWEST = 8  # channels before a strided 1 x 1 convolution whose gradient in channels_last is safe on every CPU
_log = logging.getLogger(__name__)


def name_of(device: torch.device) -> str:
    """The kind of GPU, or of another device its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work, so that a clock read before and after tells the time of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def too_narrow(model: nn.Module) -> bool:
    """Whether a strided 1 x 1 convolution has so few input channels that channels_last may damage the memory.

    oneDNN 3.12 (of PyTorch 2.13) writes the gradient of such a kernel outside of its memory on CPUs with AVX2 and
    without AVX-512; double precision is not its work.
    """
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d) and m.weight.dtype != torch.float64)
    return any(m.kernel_size == (1, 1) and m.stride != (1, 1) and m.in_channels < NARROWEST for m in convolutions)


class Transfer:
    """A copy of a tensor to the host that is under way while a GPU goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._host = page_locked(torch.empty(tensor.shape, dtype=tensor.dtype)).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The copy, once it is there; what the device was given after it may still run."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def device_count() -> int:
    """The number of CUDA devices of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device(name: str) -> torch.device:
    """The device named "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".

    Raises:
        OptionError: the name is invalid.
        ValueError: this machine has no such device.
    """
    count = device_count()
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdigit() or name == kind):
        raise invalid("device", name, "auto, cpu, cuda or cuda:1")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"--device {name}: this machine has {count} CUDA devices; use --device cpu or auto")
    return torch.device(name)


def converted(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself, moved to a device, in single precision if it was in half."""
    model = model.to(device)
    for graph in [part for part in model.modules() if isinstance(part, fx.GraphModule)]:
        for node in [node for node in graph.graph.nodes if "device" in node.kwargs]:  # of where it was exported
            node.kwargs = {**node.kwargs, "device": device}
        graph.recompile()
    return model.float() if next(model.parameters()).dtype in HALF else model


def converted_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of the caller's module on a device, in single precision if it was in half; the module stays as it is.

    Raises:
        ValueError: it cannot be copied.
    """
    first = next(module.parameters())
    try:
        model = converted(copy.deepcopy(module), device)
    except (RuntimeError, TypeError, copy.Error) as error:
        reason = first_line(error)
        raise ValueError(
            f"the module ({type(module).__name__}, {first.dtype} on {first.device}) cannot be copied to measure it in "
            f"single precision on {device} ({reason}); convert it yourself: module.float().to({str(device)!r})"
        ) from error
    now = next(model.parameters())
    _log.warning(
        "note: the module is %s on %s; a copy in %s on %s is measured, with the module's weights at every measurement",
        first.dtype, first.device, now.dtype, now.device,
    )  # fmt: skip
    return model


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device, of which the index may be left open."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
