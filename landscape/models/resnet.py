"""Residual network (He et al. 2016, arXiv 1512.03385), the stride of a bottleneck in its 3 x 3 convolution.

Parameters are named as in torchvision, so that its state dicts load as they are where the stem is ImageNet's.
"""

from collections.abc import Callable

from torch import Tensor, nn

from landscape.models.blocks import Head, Smoothing, drop_path, drop_path_rates, initialise, mc_dropout, pooling

EXPANSION = 4  # output channels of a bottleneck over its planes
SMALL = 64  # px; images up to this size pass the stem at full resolution


# (stage, position in it, input channels, planes, stride, rate of stochastic depth) -> block
MakeBlock = Callable[[int, int, int, int, int, float], nn.Module]


class Staged(nn.Module):
    """A network of convolutions whose maps pass the stages `layer1`, `layer2`, ..."""

    stages: tuple[str, ...]

    def add_stages(
        self, make: MakeBlock, blocks: tuple[int, ...], width: int, bottleneck: bool, drop_path: float, smoothing: bool
    ) -> int:
        """Add the stages, of which each but the first halves the map; returns the channels of the last one."""
        self.stages = tuple(f"layer{i}" for i in range(1, len(blocks) + 1))
        rates = iter(drop_path_rates(drop_path, sum(blocks)))
        inputs = width
        for i, (stage, count) in enumerate(zip(self.stages, blocks, strict=True)):
            planes = width * 2**i
            stack: list[nn.Module] = []
            for j in range(count):
                stack.append(make(i, j, inputs, planes, 2 if i > 0 and j == 0 else 1, next(rates)))
                inputs = planes * EXPANSION if bottleneck else planes
            if smoothing:
                stack.append(Smoothing())
            self.add_module(stage, nn.Sequential(*stack))
        return inputs

    def through_stages(self, x: Tensor) -> Tensor:
        """The map after the last stage, (batch, channel, height, width)."""
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return x


class ResNet(Staged):
    """Post-activation residual network; (N, C, H, W) images to (N, classes) logits.

    Args:
        blocks: residual blocks of each stage; from the second stage on, each halves the map and doubles the
            channels.
        bottleneck: blocks of 1 x 1, 3 x 3, 1 x 1 convolutions, four times as wide outside, not of two 3 x 3.
        width: channels of the stem and planes of the first stage.
        groups: of the 3 x 3 convolution of a bottleneck (ResNeXt, arXiv 1611.05431: 32).
        width_per_group: channels of each group per 64 planes (ResNeXt: 4; WideResNet, in its one group: 128).
        drop_path: stochastic depth of the last block, rising linearly from 0 at the first.
        mc_dropout: rate of dropout before the last convolution of every block, also in evaluation.
        smoothing: a smoothing block at the end of every stage.
        head: `gap`, `bn-gap`, `mlp` or `flat-mlp`, see `pooling`.

    Raises:
        ValueError: groups or a width per group are given for basic blocks, or leave no channels.
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
        groups: int = 1,
        width_per_group: int = 64,
        drop_path: float = 0.0,
        mc_dropout: float = 0.0,
        smoothing: bool = False,
        head: Head = "gap",
    ) -> None:
        super().__init__()
        if not bottleneck and (groups, width_per_group) != (1, 64):
            raise ValueError(
                f"groups={groups} and width_per_group={width_per_group} need bottleneck blocks; "
                "use a bottleneck network, such as resnet50"
            )
        if width * width_per_group < 64:
            raise ValueError(
                f"width_per_group={width_per_group} leaves nothing of width={width}; give at least {-(-64 // width)}"
            )
        self.conv1, self.maxpool = stem(channels, width, image_size)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()

        def make(_stage: int, _position: int, inputs: int, planes: int, stride: int, rate: float) -> nn.Module:
            inner = planes * width_per_group // 64 * groups
            outputs = planes * EXPANSION if bottleneck else planes
            return Block(inputs, inner, outputs, stride, bottleneck, groups, rate, mc_dropout)

        features = self.add_stages(make, blocks, width, bottleneck, drop_path, smoothing)
        self.pool, features = pooling(head, features)
        self.fc = nn.Linear(features, classes)
        initialise(self, (nn.Conv2d,), kaiming)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        logits: Tensor = self.fc(self.pool(self.through_stages(x)))
        return logits


class Block(nn.Module):
    """relu(skip(x) + branch(x)): a branch of two 3 x 3 convolutions, or of 1 x 1, 3 x 3, 1 x 1 (bottleneck).

    Each activation is a module of its own, none works in place: hooks and second derivatives need the values.
    """

    def __init__(
        self,
        inputs: int,
        inner: int,
        outputs: int,
        stride: int,
        bottleneck: bool,
        groups: int,
        rate: float,
        mc_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.rate = rate
        self.mc_dropout = mc_dropout
        self.bottleneck = bottleneck
        self.conv1 = conv(inputs, inner, 1) if bottleneck else conv(inputs, inner, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu1 = nn.ReLU()
        self.conv2 = conv(inner, inner, 3, stride=stride, groups=groups) if bottleneck else conv(inner, inner, 3)
        self.bn2 = nn.BatchNorm2d(inner)
        if bottleneck:
            self.relu2 = nn.ReLU()
            self.conv3 = conv(inner, outputs, 1)
            self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride=stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """One residual step, (batch, inputs, H, W) to (batch, outputs, H / stride, W / stride)."""
        skip = x if self.downsample is None else self.downsample(x)
        branch = self.relu1(self.bn1(self.conv1(x)))
        if self.bottleneck:
            branch = self.relu2(self.bn2(self.conv2(branch)))
            branch = self.bn3(self.conv3(mc_dropout(branch, self.mc_dropout)))
        else:
            branch = self.bn2(self.conv2(mc_dropout(branch, self.mc_dropout)))
        out: Tensor = self.relu(drop_path(branch, self.rate, training=self.training) + skip)
        return out


def conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias, padded so that stride 1 keeps the size of the map."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)


def stem(channels: int, width: int, image_size: int) -> tuple[nn.Conv2d, nn.Module]:
    """First convolution and pooling: CIFAR's at full size, above 64 px ImageNet's, which leave a quarter."""
    if image_size <= SMALL:
        return conv(channels, width, 3), nn.Identity()
    return conv(channels, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)


def kaiming(weight: Tensor) -> None:
    """Draw the weight of a convolution by fan-out (He et al. 2015); all norms keep their scale 1, the last too."""
    nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
