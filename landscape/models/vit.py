"""Vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929; dimensions of DeiT), and one with local attention."""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.models.blocks import drop_path, drop_path_rates, initialise, require_size
from landscape.options import at_least


class ViT(nn.Module):
    """Pre-LN transformer over patches, with learned absolute positions.

    (N, C, H, W) images to (N, classes) logits. Queries, keys and values have no bias; the heads share `dim`
    evenly, 64 each in vit_ti, vit_s and vit_b.

    Args:
        patch: side of a square patch in pixels. Default: 2 up to 32 px, 4 up to 64 px, 16 above, or the next
            larger divisor of the image that leaves at most `tokens` patches.
        tokens: bound on the number of patches where `patch` is left out.
        mlp_ratio: hidden units of the MLP over `dim`.
        head: "cls" reads the class token; "gap" averages the patch tokens and has no class token.
        drop_path: stochastic depth of the last block, rising linearly from 0 at the first.
        dropout: after the embedding, the attention's projection and both layers of the MLP.
        decoder: None makes a classifier. A number makes an autoencoder in the style of SimMIM (arXiv 2111.09886): so
            many blocks behind the encoder, then a linear layer that reconstructs the pixels of every patch,
            (N, patch, channels * side^2); a mask token can take the place of patches.
        std: of the truncated normal that weights, class token and positions start from. 0.02 is DeiT's; networks
            much narrower than its learn many times faster from about 1 / sqrt(dim).

    Raises:
        ValueError: the patch does not divide the image, or the heads do not divide `dim`.
        OptionError: the decoder has fewer than 0 blocks.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        channels: int = 3,
        dim: int,
        depth: int,
        heads: int,
        patch: int | None = None,
        tokens: int = 1024,
        mlp_ratio: int = 4,
        head: Literal["cls", "gap"] = "cls",
        drop_path: float = 0.0,
        dropout: float = 0.0,
        decoder: int | None = None,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        patch = patch or default_patch(image_size, tokens)
        side = divided(image_size, patch)
        if dim % heads:
            fit = ", ".join(map(str, _divisors(dim)))
            raise ValueError(f"heads={heads} do not share dim={dim} evenly; give one of {fit}")
        self.image_size = image_size
        self.grid_size = (side, side)
        self.num_prefix_tokens = 1 if head == "cls" else 0
        self.patch_embedding = nn.Conv2d(channels, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if head == "cls" else None
        self.position_embedding = nn.Parameter(torch.zeros(1, self.num_prefix_tokens + side * side, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(block(dim, heads, mlp_ratio, rate, dropout) for rate in drop_path_rates(drop_path, depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.decoder: nn.Sequential | None = None
        self.mask_token: nn.Parameter | None = None
        outputs = classes
        if decoder is not None:
            at_least("decoder", decoder, 0)
            self.decoder = nn.Sequential(*(block(dim, heads, mlp_ratio, 0.0, 0.0) for _ in range(decoder)))
            self.mask_token, outputs = nn.Parameter(torch.zeros(1, 1, dim)), channels * patch**2
        self.head = nn.Linear(dim, outputs)
        draw = partial(nn.init.trunc_normal_, std=std)
        initialise(self, (nn.Linear, nn.Conv2d), draw, self.position_embedding, self.cls_token)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images of the size the model was built for, or an autoencoder's pixels."""
        return self.without_patches(images, None)

    def without_patches(self, images: Tensor, mask: Tensor | None) -> Tensor:
        """As `forward`, with the mask token of an autoencoder in place of the patches of a mask (N, patch) bool."""
        require_size(images, self.image_size)
        x = self.patch_embedding(images).flatten(2).transpose(1, 2)  # (batch, token, dim)
        if mask is not None and self.mask_token is not None:
            x = torch.where(mask[..., None], self.mask_token.to(x.dtype), x)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = self.dropout(x + self.position_embedding)
        x = self.norm(self.blocks(x))
        if self.decoder is not None:
            pixels: Tensor = self.head(self.decoder(x)[:, self.num_prefix_tokens :])
            return pixels
        logits: Tensor = self.head(x.mean(1) if self.cls_token is None else x[:, 0])
        return logits


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); each branch is subject to stochastic depth."""

    def __init__(self, dim: int, attention: nn.Module, mlp: nn.Module, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.norm1 = nn.LayerNorm(dim)
        self.attention = attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """One step of the residual stream, (batch, token, dim) to the same."""
        x = x + drop_path(self.attention(self.norm1(x)), self.rate, training=self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.rate, training=self.training)


def block(dim: int, heads: int, mlp_ratio: int, rate: float, dropout: float) -> Block:
    """A block of global attention."""
    attention, hidden = Attention(dim, heads, dropout), dim * mlp_ratio
    layers = nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim), nn.Dropout(dropout)
    return Block(dim, attention, nn.Sequential(*layers), rate)


class Attention(nn.Module):
    """Multi-head self-attention softmax(q k' / sqrt(d)) v, by the fused kernel.

    That kernel has no second derivative; code that needs one runs the forward pass under the math backend. Where there
    is a mask (query, key), a query sees only the keys that it names.
    """

    mask: Tensor | None

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens mixed by attention, (batch, token, dim) to the same."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, head, token, head dim)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        out: Tensor = self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, tokens, dim)))
        return out


def default_patch(image_size: int, tokens: int, *, least: int = 1) -> int:
    """The smallest divisor of the image from its usual patch upward that leaves at most `tokens` patches."""
    usual = max(least, 2 if image_size <= 32 else 4 if image_size <= 64 else 16)
    fit = (p for p in _divisors(image_size) if p >= usual and (image_size // p) ** 2 <= tokens)
    return next(fit, image_size)


def divided(image_size: int, patch: int) -> int:
    """Patches along one side of an image.

    Raises:
        ValueError: the patch does not divide the image; lists those that do.
    """
    if image_size % patch:
        fit = ", ".join(map(str, _divisors(image_size)))
        raise ValueError(f"patch={patch} does not divide images of {image_size} px; give one of {fit}")
    return image_size // patch


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


class LocalViT(ViT):
    """A ViT without class token whose queries attend to the k x k positions around them, without padding.

    The parameters are the same for every k. An even k reaches one position further down and right than up and left.

    Args:
        neighbourhood: k; None (the word `none`) attends globally.
        patch: as for `ViT`, but from 4 upward.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        channels: int = 3,
        dim: int,
        depth: int,
        heads: int,
        neighbourhood: int | None = 3,
        patch: int | None = None,
        mlp_ratio: int = 4,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        std: float = 0.02,
    ) -> None:
        super().__init__(
            classes=classes, image_size=image_size, channels=channels, dim=dim, depth=depth, heads=heads,
            patch=patch or default_patch(image_size, 1024, least=4), mlp_ratio=mlp_ratio, head="gap",
            drop_path=drop_path, dropout=dropout, std=std,
        )  # fmt: skip
        if neighbourhood is not None:
            mask = neighbours(self.grid_size, neighbourhood)
            for block in self.blocks.children():
                block.get_submodule("attention").register_buffer("mask", mask, persistent=False)


def neighbours(grid: tuple[int, int], k: int) -> Tensor:
    """Whether a key lies in the k x k neighbourhood of a query, (query, key) bool, positions row by row."""
    positions = torch.cartesian_prod(*(torch.arange(side) for side in grid))
    offset = positions[None] - positions[:, None]  # (query, key, 2)
    return ((offset >= -((k - 1) // 2)) & (offset <= k // 2)).all(dim=-1)
