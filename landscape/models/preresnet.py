"""Pre-activation residual network (He et al. 2016, "Identity mappings", arXiv 1603.05027)."""

from __future__ import annotations

from torch import Tensor, nn

from landscape.models.blocks import Smoothing, drop_path, drop_path_rates, mc_dropout
from landscape.models.resnet import EXPANSION, conv, initialise, stem, strides


class PreResNet(nn.Module):
    """Pre-activation residual network; (N, C, H, W) images to (N, classes) logits.

    The stem is a convolution alone; norm and activation come first in every block, and once more before the
    average.

    Args:
        blocks: residual blocks of each stage; from the second stage on, each halves the map and doubles the
            channels.
        bottleneck: blocks of 1 x 1, 3 x 3, 1 x 1 convolutions, four times as wide outside, not of two 3 x 3.
        width: channels of the stem and planes of the first stage.
        drop_path: stochastic depth of the last block, rising linearly from 0 at the first.
        mc_dropout: rate of dropout before the last convolution of every block, also in evaluation.
        smoothing: a smoothing block at the end of every stage.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        channels: int = 3,
        blocks: tuple[int, ...],
        bottleneck: bool = False,
        width: int = 64,
        drop_path: float = 0.0,
        mc_dropout: float = 0.0,
        smoothing: bool = False,
    ) -> None:
        super().__init__()
        self.conv1, self.maxpool = stem(channels, width, image_size)
        self.stages = tuple(f"layer{i}" for i in range(1, len(blocks) + 1))
        rates = iter(drop_path_rates(drop_path, sum(blocks)))
        inputs = width
        for i, (stage, count) in enumerate(zip(self.stages, blocks, strict=True)):
            planes = width * 2**i
            stack: list[nn.Module] = []
            for stride in strides(i, count):
                block = Block(inputs, planes, stride, bottleneck, next(rates), mc_dropout)
                stack.append(block)
                inputs = block.outputs
            if smoothing:
                stack.append(Smoothing())
            self.add_module(stage, nn.Sequential(*stack))
        self.bn = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = self.maxpool(self.conv1(images))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)  # (batch, channel, height, width)
        logits: Tensor = self.fc(self.relu(self.bn(x)).mean((2, 3)))
        return logits


class Block(nn.Module):
    """skip(x) + branch(x), where the branch is BN, ReLU, convolution, two or (bottleneck) three times over.

    Where the shape changes, the skip is a 1 x 1 convolution of the first BN-ReLU's output, with no norm.
    """

    def __init__(
        self, inputs: int, planes: int, stride: int, bottleneck: bool, rate: float, mc_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.rate = rate
        self.mc_dropout = mc_dropout
        self.bottleneck = bottleneck
        self.outputs = planes * EXPANSION if bottleneck else planes
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = conv(inputs, planes, 1) if bottleneck else conv(inputs, planes, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU()
        self.conv2 = conv(planes, planes, 3, stride=stride) if bottleneck else conv(planes, planes, 3)
        if bottleneck:
            self.bn3 = nn.BatchNorm2d(planes)
            self.relu3 = nn.ReLU()
            self.conv3 = conv(planes, self.outputs, 1)
        self.downsample: nn.Conv2d | None = None
        if stride != 1 or inputs != self.outputs:
            self.downsample = conv(inputs, self.outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """One residual step, (batch, inputs, H, W) to (batch, outputs, H / stride, W / stride)."""
        active = self.relu1(self.bn1(x))
        skip = x if self.downsample is None else self.downsample(active)
        branch = self.relu2(self.bn2(self.conv1(active)))
        if self.bottleneck:
            branch = self.relu3(self.bn3(self.conv2(branch)))
            branch = self.conv3(mc_dropout(branch, self.mc_dropout))
        else:
            branch = self.conv2(mc_dropout(branch, self.mc_dropout))
        return skip + drop_path(branch, self.rate, training=self.training)
