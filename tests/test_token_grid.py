"""Windowed residual streams: their grid is unknown and reported so, and probes that need no grid run."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from analytic import run_probe
from foreign import torchvision_models
from torch import Tensor, nn
from zoo import _timm

from landscape.discovery.discover import discover
from landscape.layers.pooled_features import pooled
from landscape.layers.selection import remarks
from landscape.probes.fourier import Fourier
from landscape.probes.similarity import Similarity
from landscape.subject.subject import Subject


class Block(nn.Module):
    """x + MLP(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Windows(nn.Module):
    """An MLP block on a map, one on its 4 x 4 windows, and one on the map again."""

    def __init__(self, *, batched: bool) -> None:
        super().__init__()
        self.batched = batched  # windows on the batch axis, or on an axis of their own
        self.stem = nn.Conv2d(3, 6, 2, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).permute(0, 2, 3, 1)  # (N, 8, 8, 6)
        x = self.blocks[0](x)
        x = x.reshape(-1, 2, 4, 2, 4, 6).transpose(2, 3)
        x = x.reshape(-1, 16, 6) if self.batched else x.reshape(-1, 4, 16, 6)
        x = self.blocks[1](x)
        x = x.reshape(-1, 2, 2, 4, 4, 6).transpose(2, 3).reshape(-1, 8, 8, 6)
        x = self.blocks[2](x)
        return self.head(x.mean((1, 2)))


@pytest.mark.parametrize("batched", [False, True])
def test_only_windowed_layers_have_no_grid(batched: bool) -> None:
    torch.manual_seed(0)
    model = Windows(batched=batched).double().eval()
    images = torch.randn(6, 3, 16, 16).double()
    layers = discover(model, images)
    assert [(layer.name, layer.grid, layer.rows_per_image) for layer in layers] == [
        ("stem", (8, 8), 1),
        ("blocks.0.mlp", (8, 8), 1),
        ("blocks.1.mlp", (0, 0), 4 if batched else 1),
        ("blocks.2.mlp", (8, 8), 1),
    ]
    assert ["of blocks.1.mlp" in remark for remark in remarks(layers)] == [True]
    subject = Subject(model, [(images, torch.arange(6) % 5)])
    assert run_probe(Fourier(), subject)["name"].tolist() == ["stem", "blocks.0.mlp", "blocks.2.mlp"]
    np.testing.assert_allclose(np.diag(run_probe(Similarity(), subject)["cka"]), 1.0)


def test_windows_on_the_batch_axis_are_features_of_their_image() -> None:
    torch.manual_seed(0)
    model, images = Windows(batched=True).eval(), torch.randn(3, 3, 16, 16)
    layer = discover(model, images)[2]
    tensor = torch.randn(3 * 4, 16, 6)
    assert torch.equal(layer.features(tensor), tensor.reshape(3, 4, 16, 6))
    torch.testing.assert_close(pooled(layer, tensor, "mean"), tensor.reshape(3, 64, 6).mean(1))


def _maxvit() -> nn.Module:
    return torchvision_models().MaxVit((64, 64), 8, 4, [8, 16], [1, 1], 4, 0.0, num_classes=5)  # type: ignore[no-any-return]


FOREIGN: dict[str, tuple[Callable[[], nn.Module], int, set[str]]] = {
    "torchvision maxvit": (_maxvit, 64, {"stem.0.0", *(f"blocks.{i}.layers.0.layers.MBconv.layers" for i in (0, 1))}),
    "timm hiera": (
        partial(_timm, "hiera_tiny_224", img_size=(64, 64), stages=(1, 1, 1, 1), embed_dim=8, num_heads=1), 64, set()
    ),
    "timm mobilevit": (
        partial(_timm, "mobilevit_xxs"), 64,
        {"stem.conv", "stages.0.0", "stages.1.0", "stages.1.1", "stages.1.2", "stages.2.0", "stages.3.0", "stages.4.0"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_windowed_networks_have_grids_where_the_windows_are_joined(name: str) -> None:
    torch.manual_seed(0)
    build, size, spatial = FOREIGN[name]
    layers = discover(build().eval(), torch.randn(2, 3, size, size))
    assert {layer.name for layer in layers if layer.spatial} == spatial
    assert any(layer.grid_unknown for layer in layers)
