"""Forward passes in double precision: a copy of a model whose weights are converted anew, and faster convolutions."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

CONVOLUTIONS = frozenset({torch.conv2d, F.conv2d})
_functorch: Any = torch._C._functorch


class DoubleCopy:
    """A copy of a model in double precision, with the model's weights of each time it is used.

    Copying modules takes longer than converting the weights of a small model, so that the modules are copied once.
    Between uses the copy holds no weights. A model that keeps tensors outside its parameters and buffers is copied at
    each use, because these may be computed from the weights. One thread uses the copy at a time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copy: nn.Module | None = None

    @contextlib.contextmanager
    def current(self) -> Iterator[nn.Module]:
        """The copy, with the weights and buffers that the model has now; what a pass stores on it is undone."""
        if any(isinstance(value, Tensor) for module in self._model.modules() for value in vars(module).values()):
            yield double_copy(self._model)
            return
        originals = _tensors(self._model)
        if self._copy is None or len(_tensors(self._copy)) != len(originals):
            self._copy = double_copy(self._model)
            doubles = _tensors(self._copy)
        else:
            doubles = _tensors(self._copy)
            for double, original in zip(doubles, originals, strict=True):
                double.data = _double(original)
        try:
            with attributes_restored(self._copy):
                yield self._copy
        finally:
            for double in doubles:
                double.data = double.new_empty(0)


@once_per_weights
def double_of(subject: Subject) -> DoubleCopy:
    """The copy of a subject's model."""
    return DoubleCopy(subject.model)


def double_copy(model: nn.Module) -> nn.Module:
    """A copy in double precision; floating-point weights and buffers are not copied in single precision first."""
    doubled: dict[int, Any] = {}
    for tensor in _tensors(model):
        if tensor.is_floating_point():
            double = _double(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            doubled[id(tensor)] = nn.Parameter(double, requires_grad=False) if is_parameter else double
    for module in model.modules():  # what a hook computes from the weights, as spectral norm does, cannot be copied
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                doubled[id(value)] = value.detach().double() if value.is_floating_point() else value.detach()
    with torch.no_grad():
        copied = copy.deepcopy(model, doubled)
        for module in copied.modules():
            if isinstance(module, torch.jit.ScriptModule):  # which copies its weights by itself, as they are
                for weight in module.double().parameters():
                    weight.requires_grad_(False)
    return copied


def _tensors(model: nn.Module) -> list[Tensor]:
    return list(itertools.chain(model.parameters(), model.buffers()))


def _double(tensor: Tensor) -> Tensor:
    """A copy, in double precision if it is of floating point."""
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


@contextlib.contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what a forward pass stores on the modules, such as tensors that a later pass would read.

    Attributes are set back, and so is what containers among them hold.
    """
    attributes = {module: dict(vars(module)) for module in model.modules()}
    held = [(c, copy.copy(c)) for known in attributes.values() for c in known.values() if type(c) in (dict, list)]
    try:
        yield
    finally:
        for module, known in attributes.items():
            for name in vars(module).keys() - known.keys():
                del vars(module)[name]
            vars(module).update(known)
        for container, content in held:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)


def convolution(
    input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """`conv2d`, equal to rounding; on a CPU in double precision as a product of matrices for each row of the kernel.

    Torch has no optimised convolution for double precision: it copies each input once for every entry of the kernel.
    Here it is copied once for every column: with 16 channels of 32 x 32 half the time, and a third of the memory.
    """
    if not _suits(input, weight, stride, padding, dilation, groups):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    (down, right), (top, left) = _pair(stride), _pair(padding)
    outputs, channels, rows, columns = weight.shape
    padded = F.pad(input, (left, left, top, top)) if top or left else input.contiguous()
    count, _, height, width = padded.shape
    height, across = (height - rows) // down + 1, (width - columns) // right + 1
    each, channel, row, column = padded.stride()
    # (image, column of the kernel, channel, row, column of the output)
    shape = (count, columns, channels, padded.shape[2], across)
    shifted = padded.as_strided(shape, (each, column, channel, row, column * right)).contiguous()
    kernels = weight.permute(2, 0, 3, 1).reshape(rows, 1, outputs, columns * channels)
    result = input.new_empty(count, outputs, height * across)
    for at, kernel in enumerate(kernels.expand(-1, count, -1, -1)):
        part = shifted[:, :, :, at : at + (height - 1) * down + 1 : down].reshape(count, columns * channels, -1)
        result.baddbmm_(kernel, part, beta=float(at > 0))
    if bias is not None:
        result += bias[:, None]
    return result.view(count, outputs, height, across)


def _suits(images: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether a convolution is one that `convolution` computes itself."""
    if any(_functorch.is_functorch_wrapped_tensor(tensor) for tensor in (images, weight)) or isinstance(padding, str):
        return False
    plain = images.dtype == weight.dtype == torch.float64 and images.device.type == "cpu" and images.dim() == 4
    dense = groups == 1 and _pair(dilation) == (1, 1) and images.numel() > 0
    if not (plain and dense and max(weight.shape[2:]) > 1 and images.shape[1] == weight.shape[1]):
        return False
    sides = zip(images.shape[2:], weight.shape[2:], _pair(padding), strict=True)
    return all(image + 2 * padded >= kernel for image, kernel, padded in sides)


def _pair(value: Any) -> tuple[int, int]:
    first, *rest = [value] if isinstance(value, int) else list(value)
    return int(first), int(rest[0] if rest else first)
