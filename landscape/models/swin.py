"""Swin transformer (Liu et al. 2021, arXiv 2103.14030): attention in windows that every other block shifts."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.models import blocks, mixer, resnet, vit
from landscape.models.alternet import relative_index, require_window


class Swin(nn.Module):
    """Stages of window attention, between which 2 x 2 positions are merged and the channels doubled.

    (N, C, H, W) images to (N, classes) logits. Maps are channels-last throughout.

    Args:
        dim: channels of the first stage.
        depths: blocks of each stage.
        heads: attention heads of each stage.
        window: side of the windows; a smaller map is one window, which is not shifted. Default: 4 up to 64 px,
            else 7.
        patch: side of a square patch in pixels. Default: 1 up to 32 px, 2 up to 64 px, else 4.
        qkv_bias: biases of queries, keys and values, which the published network has and this family otherwise not.

    Raises:
        ValueError: the patch does not divide the image, the window does not divide a map, a map that is to be merged
            has an odd side, the heads do not divide the channels, or the per-stage arguments differ in length.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        channels: int = 3,
        dim: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        heads: tuple[int, ...] = (3, 6, 12, 24),
        window: int | None = None,
        patch: int | None = None,
        mlp_ratio: int = 4,
        qkv_bias: bool = False,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        patch = patch or (1 if image_size <= 32 else 2 if image_size <= resnet.SMALL else 4)
        window = window or (4 if image_size <= resnet.SMALL else 7)
        sides = [vit.divided(image_size, patch) // 2**i for i in range(len(depths))]
        blocks.require_per_stage(len(depths), heads=heads)
        if sides[0] % 2 ** (len(depths) - 1):
            raise ValueError(
                f"a map of {sides[0]} x {sides[0]} cannot be halved {len(depths) - 1} times; "
                "give another image size or patch"
            )
        for i, count in enumerate(heads):
            if dim * 2**i % count:
                raise ValueError(f"heads={heads} do not share the {dim * 2**i} channels of stage {i + 1} evenly")
        require_window(window, sides)
        self.image_size = image_size
        self.patch_embedding = nn.Conv2d(channels, dim, patch, stride=patch)
        self.patch_norm = nn.LayerNorm(dim)
        rates = iter(blocks.drop_path_rates(drop_path, sum(depths)))
        stages: list[nn.Module] = []
        for i, (side, depth, count) in enumerate(zip(sides, depths, heads, strict=True)):
            width, w = dim * 2**i, min(window, side)
            stack: list[nn.Module] = [Merging(width // 2)] if i else []
            for j in range(depth):
                shift = w // 2 if j % 2 and w < side else 0
                attention = WindowAttention(width, count, side, w, shift, qkv_bias)
                stack.append(vit.Block(width, attention, mixer.mlp(width, width * mlp_ratio), next(rates)))
            stages.append(nn.Sequential(*stack))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(dim * 2 ** (len(depths) - 1))
        self.head = nn.Linear(dim * 2 ** (len(depths) - 1), classes)
        blocks.initialise(self, (nn.Linear,), partial(nn.init.trunc_normal_, std=0.02))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images of the size the model was built for."""
        blocks.require_size(images, self.image_size)
        x = self.patch_norm(self.patch_embedding(images).permute(0, 2, 3, 1))  # (batch, row, column, channel)
        logits: Tensor = self.head(self.norm(self.stages(x)).mean((1, 2)))
        return logits


class WindowAttention(nn.Module):
    """Self-attention within each window, softmax(q k' / sqrt(d) + b) v, one table of b per head.

    The map is rolled so that windows shifted by `shift` down and right lie on the usual ones; positions that meet there
    only because the map was rolled do not see each other.
    """

    relative_index: Tensor
    mask: Tensor | None

    def __init__(self, dim: int, heads: int, side: int, window: int, shift: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.projection = nn.Linear(dim, dim)
        self.relative_position = nn.Parameter(torch.empty((2 * window - 1) ** 2, heads))
        nn.init.trunc_normal_(self.relative_position, std=0.02)
        self.register_buffer("relative_index", relative_index(window), persistent=False)
        self.register_buffer("mask", shift_mask(side, window, shift) if shift else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Positions mixed within each window, (batch, row, column, dim) to the same."""
        batch, side, _, dim = x.shape
        w, count = self.window, side // self.window
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        x = x.reshape(batch, count, w, count, w, dim).transpose(2, 3).reshape(batch, count**2, w * w, dim)
        qkv = self.qkv(x).reshape(batch, count**2, w * w, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)
        bias = self.relative_position[self.relative_index].permute(2, 0, 1)  # (head, query, key)
        if self.mask is not None:
            bias = bias + torch.zeros_like(self.mask, dtype=bias.dtype).masked_fill_(~self.mask, -torch.inf)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # (batch, window, head, position, head dim)
        x = self.projection(mixed.transpose(2, 3).reshape(batch, count**2, w * w, dim))
        x = x.reshape(batch, count, count, w, w, dim).transpose(2, 3).reshape(batch, side, side, dim)
        return x.roll((self.shift, self.shift), (1, 2)) if self.shift else x


class Merging(nn.Module):
    """Each 2 x 2 positions become one, their channels side by side, then normed and halved."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, row, column, dim) to (batch, row / 2, column / 2, 2 dim)."""
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        merged: Tensor = self.reduction(self.norm(torch.cat(corners, dim=-1)))
        return merged


def shift_mask(side: int, window: int, shift: int) -> Tensor:
    """Whether query and key of a rolled window were neighbours before, (window, 1, query, key) bool.

    The last `shift` rows of the rolled map came from its top, the last `shift` columns from its left; in the windows
    that hold both kinds each sees its own kind alone. All other windows see all of themselves, however many there are.
    """
    rolled = torch.arange(side) >= side - shift
    kind = 2 * rolled[:, None].long() + rolled[None, :].long()
    count = side // window
    kinds = kind.reshape(count, window, count, window).transpose(1, 2).reshape(count**2, 1, window**2)
    return kinds[..., :, None] == kinds[..., None, :]
