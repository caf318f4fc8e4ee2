"""Pre-activation residual network (He et al. 2016, "Identity mappings", arXiv 1603.05027)."""

from torch import Tensor, nn

from landscape.models.blocks import drop_path, initialise, mc_dropout
from landscape.models.resnet import EXPANSION, Staged, conv, kaiming, stem


class PreActivation(Staged):
    """A stem that is a convolution alone, stages, and a norm and activation before the average and the classifier.

    (N, C, H, W) images to (N, classes) logits.
    """

    def __init__(self, channels: int, width: int, image_size: int) -> None:
        super().__init__()
        self.conv1, self.maxpool = stem(channels, width, image_size)

    def add_head(self, features: int, classes: int) -> None:
        """Add what follows the stages, and initialise the network."""
        self.bn = nn.BatchNorm2d(features)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(features, classes)
        initialise(self, (nn.Conv2d,), kaiming)

    def forward(self, images: Tensor) -> Tensor:
        x = self.through_stages(self.maxpool(self.conv1(images)))
        logits: Tensor = self.fc(self.relu(self.bn(x)).mean((2, 3)))
        return logits


class PreResNet(PreActivation):
    """Pre-activation residual network; (N, C, H, W) images to (N, classes) logits.

    Norm and activation come first in every block. The arguments are those of `ResNet`.
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
        super().__init__(channels, width, image_size)

        def make(_stage: int, _position: int, inputs: int, planes: int, stride: int, rate: float) -> nn.Module:
            return Block(inputs, planes, stride, bottleneck, rate, mc_dropout)

        self.add_head(self.add_stages(make, blocks, width, bottleneck, drop_path, smoothing), classes)


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
        outputs = planes * EXPANSION if bottleneck else planes
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = conv(inputs, planes, 1) if bottleneck else conv(inputs, planes, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU()
        self.conv2 = conv(planes, planes, 3, stride=stride) if bottleneck else conv(planes, planes, 3)
        if bottleneck:
            self.bn3 = nn.BatchNorm2d(planes)
            self.relu3 = nn.ReLU()
            self.conv3 = conv(planes, outputs, 1)
        self.downsample: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = conv(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """One residual step, (batch, inputs, H, W) to (batch, outputs, H / stride, W / stride)."""
        active = self.relu1(self.bn1(x))
        skip = x if self.downsample is None else self.downsample(active)
        branch = self.relu2(self.bn2(self.conv1(active)))
        if self.bottleneck:
            branch = self.relu3(self.bn3(self.conv2(branch)))
        last = self.conv3 if self.bottleneck else self.conv2
        branch = last(mc_dropout(branch, self.mc_dropout))
        return skip + drop_path(branch, self.rate, training=self.training)
