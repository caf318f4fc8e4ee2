"""Parts that the bundled networks share: initialisation, stochastic depth, MC dropout, heads and feature smoothing.

What acts on a residual branch is a function, not a module, so that a forward hook finds the branch under the name of
the module that computed it.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Head = Literal["gap", "bn-gap", "mlp", "flat-mlp"]
POSITIONS, HIDDEN = 7, 4096  # side of the map and hidden units of the head `flat-mlp`, at most
BOUND = 10.0  # t of t tanh(x / t), as in the paper
# (branch, rate) -> branch: what stochastic depth does in evaluation too, where it samples networks
stochastic_depth: ContextVar[Callable[[Tensor, float], Tensor] | None] = ContextVar("stochastic_depth", default=None)


def initialise(
    network: nn.Module, kinds: tuple[type[nn.Module], ...], draw: Callable[[Tensor], object], *tokens: Tensor | None
) -> None:
    """Draw the weights of all layers of these kinds, in their order in the network, then tokens; biases become 0.

    A network without memory, built for its shapes, is left alone: torch draws into it by importing its compiler.
    """
    if all(parameter.is_meta for parameter in network.parameters()):
        return
    for module in network.modules():
        if isinstance(module, kinds):
            draw(module.get_parameter("weight"))
            if module.bias is not None:
                nn.init.zeros_(module.get_parameter("bias"))
    for token in tokens:
        if token is not None:
            draw(token)


def require_per_stage(stages: int, **arguments: tuple[int, ...]) -> None:
    """Check that arguments have one entry per stage. Raises ValueError: one has not."""
    for name, values in arguments.items():
        if len(values) != stages:
            raise ValueError(f"{name}={values} has {len(values)} entries; give one per stage, {stages} in all")


def require_size(images: Tensor, size: int) -> None:
    """Raise ValueError for images of another size than the one the model was built for."""
    height, width = images.shape[-2:]
    if (height, width) != (size, size):
        raise ValueError(
            f"the images are {height} x {width} px, the model was built for {size} x {size}; resize them, or build it "
            f"with image_size={height}"
        )


def drop_path(branch: Tensor, rate: float, *, training: bool) -> Tensor:
    """Stochastic depth (Huang et al. 2016, arXiv 1603.09382): drop the branch for a random `rate` of the samples.

    The others are divided by 1 - rate, so that the expectation is the branch itself, which evaluation returns.
    """
    if rate and (sampled := stochastic_depth.get()) is not None:
        return sampled(branch, rate)
    if not training or rate == 0.0:
        return branch
    shape = (len(branch),) + (1,) * (branch.ndim - 1)
    kept = torch.rand(shape, dtype=branch.dtype, device=branch.device) >= rate
    return branch * kept / (1.0 - rate)


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Rates that rise linearly from 0 at the first block to `last` at the last one."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]


def mc_dropout(x: Tensor, rate: float) -> Tensor:
    """Dropout that stays on in evaluation: every forward pass is one sample of the network's predictions."""
    return F.dropout(x, rate, training=True) if rate else x


class Average(nn.Module):
    """Mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channel, height, width) to (batch, channel)."""
        return x.mean((2, 3))


def pooling(head: Head, features: int) -> tuple[nn.Module, int]:
    """The layers between the last feature map and the linear classifier, and the features that they give it.

    `gap` averages over positions; `bn-gap` applies batch norm and ReLU before; `mlp` adds a hidden layer of as many
    units after the average. `flat-mlp` does not average: it is the MLP head of VGG and of "Blurs Behave Like Ensembles"
    (arXiv 2105.12639), two hidden layers of 8 times as many units as channels, at most 4096, with dropout 0.5, on all
    channels of the map resized to 7 x 7.
    """
    if head == "bn-gap":
        return nn.Sequential(nn.BatchNorm2d(features), nn.ReLU(), Average()), features
    if head == "mlp":
        return nn.Sequential(Average(), nn.Linear(features, features), nn.ReLU()), features
    if head == "flat-mlp":
        hidden = min(8 * features, HIDDEN)
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(POSITIONS), nn.Flatten(),
            nn.Linear(features * POSITIONS**2, hidden), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5),
        ), hidden  # fmt: skip
    return Average(), features


class Smoothing(nn.Module):
    """blur(activation(t tanh(x / t))): features bounded, rectified, and averaged over neighbours, without parameters.

    The blur has stride 1. With "same" padding it repeats the last rows and columns, so that the map keeps its size and
    a constant map its values; "grow" pads zeros as the published code does, so that an even blur adds a row and column.

    Args:
        temperature: t; infinity does not bound the features.
        blur: side of the square of positions that are averaged; 1 averages nothing.
        padding: "same" or "grow".
        activation: "relu", "gelu" or "none".
    """

    def __init__(
        self,
        temperature: float = BOUND,
        blur: int = 2,
        padding: Literal["same", "grow"] = "same",
        activation: Literal["relu", "gelu", "none"] = "relu",
    ) -> None:
        super().__init__()
        self.temperature, self.blur, self.padding, self.activation = temperature, blur, padding, activation

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channel, height, width) to the same, but for "grow" with an even blur."""
        t, k = self.temperature, self.blur
        bounded = x if math.isinf(t) else t * torch.tanh(x / t)
        if self.activation != "none":
            bounded = F.relu(bounded) if self.activation == "relu" else F.gelu(bounded)
        if self.padding == "grow":
            return F.avg_pool2d(bounded, k, stride=1, padding=k // 2)
        before, after = (k - 1) // 2, k // 2
        return F.avg_pool2d(F.pad(bounded, (before, after, before, after), mode="replicate"), k, stride=1)
