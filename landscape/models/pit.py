"""Pooling-based vision transformer (Heo et al. 2021, arXiv 2103.16302): stages of fewer and wider tokens."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from landscape.models import blocks, resnet, vit


class PiT(nn.Module):
    """Transformer blocks in stages, between which a map is halved and its channels doubled.

    (N, C, H, W) images to (N, classes) logits, read from the class token. Patches overlap; learned positions, with one
    for the class token, are added once. Queries, keys and values have no bias. Arguments that are not explained are
    those of `ViT`.

    Args:
        depths: blocks of each stage.
        heads: attention heads of each stage; channels follow as heads x head_dim.
        head_dim: channels of one head.
        patch: side of a square patch in pixels. Default: 2 up to 64 px, else 16.
        stride: between patches. Default: half a patch.

    Raises:
        ValueError: the per-stage arguments differ in length, channels do not grow by whole factors, or the patch
            exceeds the image.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        channels: int = 3,
        depths: tuple[int, ...] = (2, 6, 4),
        heads: tuple[int, ...] = (2, 4, 8),
        head_dim: int = 32,
        mlp_ratio: int = 4,
        patch: int | None = None,
        stride: int | None = None,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        patch = patch or (2 if image_size <= resnet.SMALL else 16)
        stride = stride or max(patch // 2, 1)
        dims = [head_dim * count for count in heads]
        blocks.require_per_stage(len(depths), heads=heads)
        if any(after % before for before, after in pairwise(heads)):
            raise ValueError(f"heads={heads} do not grow by whole factors; give numbers such as 2,4,8")
        if patch > image_size:
            raise ValueError(f"patch={patch} exceeds images of {image_size} px; give at most {image_size}")
        self.image_size = image_size
        self.patch_embedding = nn.Conv2d(channels, dims[0], patch, stride=stride)
        side = (image_size - patch) // stride + 1
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dims[0]))
        self.position_embedding = nn.Parameter(torch.zeros(1, 1 + side * side, dims[0]))
        self.dropout = nn.Dropout(dropout)
        rates = iter(blocks.drop_path_rates(drop_path, sum(depths)))
        self.stages = nn.ModuleList(
            nn.Sequential(*(vit.block(dim, count, mlp_ratio, next(rates), dropout) for _ in range(depth)))
            for dim, count, depth in zip(dims, heads, depths, strict=True)
        )
        self.pools = nn.ModuleList(Pool(one, next) for one, next in pairwise(dims))
        self.norm = nn.LayerNorm(dims[-1])
        self.head = nn.Linear(dims[-1], classes)
        draw = partial(nn.init.trunc_normal_, std=std)
        blocks.initialise(self, (nn.Linear,), draw, self.position_embedding, self.cls_token)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images of the size the model was built for."""
        blocks.require_size(images, self.image_size)
        maps = self.patch_embedding(images)
        side = maps.shape[-1]
        x = torch.cat([self.cls_token.expand(len(maps), -1, -1), maps.flatten(2).transpose(1, 2)], dim=1)
        x = self.dropout(x + self.position_embedding)  # (batch, 1 + token, dim)
        for i, stage in enumerate(self.stages):
            if i > 0:
                x = self.pools[i - 1](x, side)
                side = -(-side // 2)
            x = stage(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


class Pool(nn.Module):
    """A depth-wise 3 x 3 convolution of stride 2 for the map of tokens, a linear layer for the class token."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, groups=inputs)
        self.cls = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, side: int) -> Tensor:
        """(batch, 1 + side^2, inputs) to (batch, 1 + ceil(side / 2)^2, outputs)."""
        maps = x[:, 1:].transpose(1, 2).reshape(len(x), -1, side, side)
        return torch.cat([self.cls(x[:, :1]), self.conv(maps).flatten(2).transpose(1, 2)], dim=1)
