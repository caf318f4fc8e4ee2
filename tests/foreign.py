"""Networks of other libraries: torchvision's, and small ones of the kinds that users bring."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from landscape.checkpoints.libraries import library
from landscape.models.resnet import ResNet


def torchvision_models() -> Any:
    """torchvision.models, also beside a torch that its compiled operators do not fit."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    return library("torchvision").models


class Encoder(nn.Module):
    """A vision transformer on torch's own encoder layers, with `prefix` tokens before those of the patches."""

    def __init__(
        self, *, grid: tuple[int, int] = (4, 2), prefix: int = 1, norm_first: bool = True, batch_first: bool = True
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Conv2d(3, 12, 4, 4)
        self.prefix = nn.Parameter(torch.randn(1, prefix, 12))
        self.positions = nn.Parameter(torch.randn(1, grid[0] * grid[1], 12))
        layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        x = torch.cat([self.prefix.expand(len(x), -1, -1), x], dim=1)
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))


class Reshaped(nn.Module):
    """Patches cut by reshaping, attention of as many channels (2 x 8) as there are tokens: the grid is 8 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 2 * 4, 16)
        self.qkv = nn.Linear(16, 48)
        self.projection = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        n = len(images)
        x = images.reshape(n, 3, 8, 2, 2, 4).permute(0, 2, 4, 1, 3, 5)  # (batch, row, column, channel, y, x)
        x = self.embed(x.reshape(n, 16, 24))
        q, k, v = self.qkv(x).reshape(n, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)  # (batch, token, head, 8)
        x = self.norm(x + self.projection(mixed.reshape(n, 16, 16)))
        return self.head(x.mean(1))


class Plain(nn.Module):
    """Convolutions one after the other, without anything residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.second(torch.relu(self.first(images)))))
        return self.head(x.mean((2, 3)))


class Functional(nn.Module):
    """A residual sum that no module takes in."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.branch = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = x + self.branch(x).relu()
        return self.head(x.mean((2, 3)))


class Squeeze(nn.Module):
    """An inverted bottleneck with squeeze-and-excitation, as in MobileNet and EfficientNet."""

    def __init__(self, stride: int = 1, padding: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.padding = padding  # by the forward pass instead of the convolution
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.skip = nn.Conv2d(8, 8, 1, stride=stride)
        self.expand, self.norm1, self.act1 = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.SiLU()
        self.depthwise = nn.Conv2d(16, 16, 3, padding=int(not padding), stride=stride, groups=16)
        self.norm2, self.act2 = nn.BatchNorm2d(16), nn.SiLU()
        self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 16, 1)
        self.project, self.norm3 = nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.classified(self.stem(images), bypass=False)

    def classified(self, x: Tensor, *, bypass: bool) -> Tensor:
        """Logits, with the depth-wise convolution or with what takes its place in a lesion."""
        y = self.act1(self.norm1(self.expand(x)))
        if not bypass:
            y = self.act2(self.norm2(self.depthwise(nn.functional.pad(y, self.padding))))
        elif self.skip.stride[0] > 1:
            y = nn.functional.avg_pool2d(y, self.skip.stride)
        y = self.norm3(self.project(y * torch.sigmoid(self.gate(self.pool(y)))))
        return self.head(self.average(self.skip(x) + y).flatten(1))


def off_its_start(model: nn.Module, by: float = 0.3) -> nn.Module:
    """In float64 and eval mode, parameters and statistics off their initial values: mistakes there show."""
    model.double().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point():
                tensor.add_(by * torch.randn_like(tensor))
    return model


def vit_stream(model: Any, images: Tensor, without: str = "") -> Iterator[Tensor]:
    """The residual stream of our vision transformer, written out: after its embedding and every branch but one."""
    x = model.patch_embedding(images).flatten(2).transpose(1, 2)
    x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1) + model.position_embedding
    yield x
    for i, block in enumerate(model.blocks):
        for norm, branch in (("norm1", "attention"), ("norm2", "mlp")):
            if without != f"blocks.{i}.{branch}":
                x = x + block.get_submodule(branch)(block.get_submodule(norm)(x))
            yield x


def residual_stream(
    model: Any, images: Tensor, where: str = "", broken: Callable[[Any, Tensor], Tensor] | None = None
) -> Iterator[Tensor]:
    """That of our residual networks: after the stem, its pooling and every block, one of which may be replaced."""
    x = model.conv1(images)
    if isinstance(model, ResNet):
        x = model.relu(model.bn1(x))
    yield x
    if not isinstance(model.maxpool, nn.Identity):
        x = model.maxpool(x)
        yield x
    for stage in model.stages:
        for i, block in model.get_submodule(stage).named_children():
            x = broken(block, x) if broken is not None and where == f"{stage}.{i}" else block(x)
            yield x
