"""A user's own file: a model and data, as the README shows them."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A convolution, a residual one and a classifier."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.act = nn.ReLU()
        self.fc = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.act(x + self.body(x))
        return self.fc(x.mean((2, 3)))


def model(width: int = 6) -> nn.Module:
    return Net(width)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.randint(4, (16,), generator=generator)
