"""MLP-Mixer (Tolstikhin et al. 2021, arXiv 2105.01601): an MLP over the tokens, then one over the channels."""

from torch import Tensor, nn

from landscape.models.blocks import drop_path, drop_path_rates, initialise, require_size
from landscape.models.vit import default_patch, divided

EPSILON = 1e-6  # of layer norms, the paper's


class Mixer(nn.Module):
    """Patches mixed by MLPs alone, without attention or positions; (N, C, H, W) images to (N, classes) logits.

    Args:
        token_hidden: hidden units of the MLP over the tokens.
        channel_hidden: hidden units of the MLP over the channels.
        patch: side of a square patch in pixels, by default as for `ViT`.

    Raises:
        ValueError: the patch does not divide the image.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        channels: int = 3,
        dim: int,
        depth: int,
        token_hidden: int,
        channel_hidden: int,
        patch: int | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        patch = patch or default_patch(image_size, 1024)
        side = divided(image_size, patch)
        self.grid_size = (side, side)
        self.image_size = image_size
        self.patch_embedding = nn.Conv2d(channels, dim, patch, stride=patch)
        rates = drop_path_rates(drop_path, depth)
        self.blocks = nn.Sequential(*(Block(dim, side * side, token_hidden, channel_hidden, rate) for rate in rates))
        self.norm = nn.LayerNorm(dim, EPSILON)
        self.head = nn.Linear(dim, classes)
        initialise(self, (nn.Linear,), nn.init.xavier_uniform_)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images of the size the model was built for."""
        require_size(images, self.image_size)
        x = self.patch_embedding(images).flatten(2).transpose(1, 2)  # (batch, token, dim)
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


class Block(nn.Module):
    """x + tokens(norm(x)')', then x + mlp(norm(x)): mixing across positions, then across channels."""

    def __init__(self, dim: int, tokens: int, token_hidden: int, channel_hidden: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.norm1 = nn.LayerNorm(dim, EPSILON)
        self.tokens = mlp(tokens, token_hidden)
        self.norm2 = nn.LayerNorm(dim, EPSILON)
        self.mlp = mlp(dim, channel_hidden)

    def forward(self, x: Tensor) -> Tensor:
        """One step of the residual stream, (batch, token, dim) to the same."""
        mixed = self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + drop_path(mixed, self.rate, training=self.training)
        return x + drop_path(self.mlp(self.norm2(x)), self.rate, training=self.training)


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Two layers with a GELU between them, over the last axis."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
