"""AlterNet (Park & Kim 2022, arXiv 2202.06709): a pre-activation ResNet whose stages end with attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.models import preresnet, resnet
from landscape.models.blocks import drop_path, require_per_stage


class AlterNet(preresnet.PreActivation):
    """Stages of n - 2m convolution blocks and m pairs (convolution block, MSA block).

    (N, C, H, W) images to (N, classes) logits. Arguments that are not explained are those of `ResNet`.

    Args:
        blocks: blocks of each stage, of both kinds.
        msa: MSA blocks of each stage, at most half of its blocks.
        heads: attention heads of each stage.
        head_dim: channels of one head.
        window: side of the windows within which attention works; a smaller map is one window. Default: 4
            with the stem for small images, else 7, or the nearest window that divides the maps.
        bottleneck: bottleneck convolution blocks, and MSA blocks that work on a quarter of the channels.

    Raises:
        ValueError: the per-stage arguments differ in length, a stage has too few blocks for its MSAs, or the
            window does not divide a map.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int,
        channels: int = 3,
        blocks: tuple[int, ...],
        msa: tuple[int, ...],
        heads: tuple[int, ...] = (3, 6, 12, 24),
        head_dim: int = 64,
        window: int | None = None,
        bottleneck: bool = False,
        width: int = 64,
        drop_path: float = 0.0,
        mc_dropout: float = 0.0,
        smoothing: bool = False,
    ) -> None:
        super().__init__(channels, width, image_size)
        require_per_stage(len(blocks), msa=msa, heads=heads)
        for i, (n, m) in enumerate(zip(blocks, msa, strict=True), start=1):
            if 2 * m > n:
                raise ValueError(f"msa={msa} asks for {m} MSAs in stage {i} of {n} blocks; give at most {n // 2}")
        first = image_size if image_size <= resnet.SMALL else -(-image_size // 4)
        sizes = [-(-first // 2**i) for i in range(len(blocks))]  # sides of the maps: strides round up
        attended = [size for size, count in zip(sizes, msa, strict=True) if count]
        window = window or default_window(image_size, attended)
        require_window(window, attended)

        def make(stage: int, position: int, inputs: int, planes: int, stride: int, rate: float) -> nn.Module:
            if placement(blocks[stage], msa[stage])[position]:  # never the first of its stage: shapes stay as they are
                return MSABlock(inputs, planes, min(window, sizes[stage]), heads[stage], head_dim, rate)
            return preresnet.Block(inputs, planes, stride, bottleneck, rate, mc_dropout)

        self.add_head(self.add_stages(make, blocks, width, bottleneck, drop_path, smoothing), classes)


class MSABlock(nn.Module):
    """x + attention(BN(reduction(GELU(BN(x))))), no MLP; the reduction is a 1 x 1 convolution to `inner`."""

    def __init__(self, dim: int, inner: int, window: int, heads: int, head_dim: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.norm1 = nn.BatchNorm2d(dim)
        self.gelu = nn.GELU()
        self.reduction = resnet.conv(dim, inner, 1)
        self.norm2 = nn.BatchNorm2d(inner)
        self.attention = WindowAttention(inner, dim, window, heads, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """One residual step, (batch, dim, height, width) to the same."""
        branch = self.attention(self.norm2(self.reduction(self.gelu(self.norm1(x)))))
        return x + drop_path(branch, self.rate, training=self.training)


class WindowAttention(nn.Module):
    """Self-attention within each window of a map: softmax(q k' / sqrt(d) + b) v, b by relative position.

    b_qk = table[row of k - row of q + w - 1, column of k - column of q + w - 1]: one table for all heads,
    where Swin (arXiv 2103.14030) has one per head.
    """

    relative_index: Tensor

    def __init__(self, inputs: int, outputs: int, window: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.window = window
        self.heads = heads
        self.query = resnet.conv(inputs, heads * head_dim, 1)
        self.key_value = resnet.conv(inputs, 2 * heads * head_dim, 1)
        self.projection = nn.Conv2d(heads * head_dim, outputs, 1)
        self.relative_position = nn.Parameter(torch.empty(2 * window - 1, 2 * window - 1))
        nn.init.trunc_normal_(self.relative_position, std=0.02)
        self.register_buffer("relative_index", relative_index(window), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Positions mixed within each window, (batch, inputs, H, W) to (batch, outputs, H, W).

        Raises:
            ValueError: the window does not divide the map, because images have another size than the model's.
        """
        height, width = x.shape[-2:]
        if height % self.window or width % self.window:
            raise ValueError(
                f"windows of {self.window} do not tile a {height} x {width} map; "
                "give images of the size that the model was built for (image_size)"
            )
        q = self._windows(self.query(x))
        k, v = self._windows(self.key_value(x)).chunk(2, dim=1)
        bias = self.relative_position.flatten()[self.relative_index].to(q.dtype)  # (position, position)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out: Tensor = self.projection(self._map(mixed, height, width))
        return out

    def _windows(self, x: Tensor) -> Tensor:
        """(batch, head * head dim, height, width) to (batch * window, head, position, head dim)."""
        batch, channels, height, width = x.shape
        w, rows, columns = self.window, height // self.window, width // self.window
        depth = self.query.out_channels // self.heads
        x = x.reshape(batch, channels // depth, depth, rows, w, columns, w)
        return x.permute(0, 3, 5, 1, 4, 6, 2).reshape(batch * rows * columns, channels // depth, w * w, depth)

    def _map(self, x: Tensor, height: int, width: int) -> Tensor:
        """The inverse of `_windows`."""
        w, rows, columns = self.window, height // self.window, width // self.window
        x = x.reshape(-1, rows, columns, self.heads, w, w, x.shape[-1])
        return x.permute(0, 3, 6, 1, 4, 2, 5).reshape(len(x), -1, height, width)


def placement(blocks: int, msa: int) -> list[bool]:
    """Which blocks of a stage are MSAs: n - 2m convolutions, then m pairs (convolution, MSA)."""
    return [False] * (blocks - 2 * msa) + [False, True] * msa


def build_up(msa: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The placement with the last `count` MSAs of `msa`, which is how the paper builds a network up (Sec. 4).

    MSAs replace convolution blocks from the end of the last stage backward; a stage that has all of its own passes on
    to the one before. (0, 1, 1, 2) grows by (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1, 2) from a pre-activation ResNet.

    Raises:
        ValueError: there are not so many.
    """
    if not 0 <= count <= sum(msa):
        raise ValueError(f"count must be 0 to the {sum(msa)} MSAs of msa={msa}, got {count}")
    placed = []
    for most in reversed(msa):
        placed.append(min(most, count))
        count -= placed[-1]
    return tuple(reversed(placed))


def default_window(image_size: int, attended: list[int]) -> int:
    """The window nearest to the paper's, 4 with the stem for small images and else 7, that fits."""
    usual = 4 if image_size <= resnet.SMALL else 7
    fit = [window for window in _fitting(attended) if window > 1]  # windows of one position mix nothing
    return min(fit, key=lambda window: (abs(window - usual), -window), default=1)


def _fitting(attended: list[int]) -> list[int]:
    """Windows up to the largest map that divide every map or exceed it."""
    largest = max(attended, default=1)
    return [w for w in range(1, largest + 1) if all(size % min(w, size) == 0 for size in attended)]


def require_window(window: int, attended: list[int]) -> None:
    """Raise ValueError for a window that neither divides a map nor exceeds it; lists those that do."""
    bad = [size for size in attended if size % min(window, size)]
    if bad:
        fit = ", ".join(map(str, _fitting(attended)))
        raise ValueError(f"window={window} does not divide the {bad[0]} x {bad[0]} map; give one of {fit}")


def relative_index(window: int) -> Tensor:
    """Index into the flattened table for every pair of positions of a window, (query, key)."""
    positions = torch.cartesian_prod(torch.arange(window), torch.arange(window))
    offset = positions[None] - positions[:, None] + window - 1  # (query, key, 2)
    return offset[..., 0] * (2 * window - 1) + offset[..., 1]
