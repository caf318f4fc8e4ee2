"""Vision transformer with local attention: every query attends to its own neighbourhood (Park & Kim 2022, Fig. 4)."""

import torch
from torch import Tensor

from landscape.models.vit import ViT, default_patch


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
