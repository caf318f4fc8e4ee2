"""A layer of a network: a point of its residual stream, how to hook it, and how its tensor becomes feature maps."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from landscape.discovery.graph import Key, Patches

Kind = Literal["stem", "conv", "msa", "mlp", "subsample", "smoothing", "head", "other"]
KINDS: tuple[str, ...] = get_args(Kind)
Layout = Literal["channels first", "channels last", "tokens", "none"]
Side = Literal["input", "output", "function"]
Grid = tuple[int, int]  # (rows, columns) of positions

Place = tuple[float, float]  # row and column in the image, in pixels
NOWHERE: Place = (math.inf, math.inf)  # of a token that is no position

CPU_CHUNK = 2**18  # numbers in a chunk on a CPU: intermediate results stay in its caches
GPU_CHUNK = 2**26  # many more elsewhere, where launching small kernels costs more than memory


@dataclass(frozen=True)
class Tap:
    """Where to hook: the first tensor given to, or returned by, one call of a module; else what a function returns."""

    module: str  # its dotted name; of the side `function` the name of a torch function
    side: Side
    call: int = 0


@dataclass(frozen=True)
class Branch:
    """The residual branch that ends in a layer; in a network without skips, the modules that the layer consists of."""

    leaves: tuple[Tap, ...]  # calls of the branch's modules without children, in order of execution
    end: Tap | None  # the last module call before the addition that returns the branch's output, if there is one
    skip: bool = True  # whether there is an addition


@dataclass(frozen=True)
class HeadOutputs:
    """The call that returns what the heads read from the values: the maps times the values."""

    key: Key  # as of `AttentionCall`; `multi_head_attention_forward` returns their projection, and is called again
    order: tuple[int, ...] = ()  # axes of its result as (..., query, channel); () as they are


@dataclass(frozen=True)
class Windows:
    """Where the queries and keys of the windows of an attention lie: a window is all that attend to one another."""

    queries: tuple[tuple[Place, ...], ...]  # of each kind of window, relative to one of its keys
    keys: tuple[tuple[Place, ...], ...]
    kinds: tuple[int, ...]  # kind of every window of an image
    order: tuple[int, ...]  # of the maps of an image, so that they are (window, head)


@dataclass(frozen=True)
class AttentionCall:
    """The call of an attention function in a layer's branch."""

    key: Key  # name of the function, and how many calls of it came before in the pass
    heads: int  # attention maps per image or window; 0 where there are none, for the `reason`
    grid: Grid  # (rows, columns) of the positions it mixes: the layer's grid, or one of its windows; (0, 0) if unknown
    prefix: int  # tokens before them
    patches: Patches | None = None  # of unfolded keys: each query attends to the patch around it
    outputs: HeadOutputs | None = None  # None where no call returns them, as where the maps of several heads are mixed
    windows: Windows | None = None  # None where positions are unknown, or those of `grid` and `prefix`
    reason: str = ""  # why they are unknown
    others: int = 0  # later calls in the branch, as of heads that are computed one after the other

    def covers(self, grid: Grid) -> bool:
        """Whether each position of a grid attends to all of them."""
        one = self.windows is None or (len(self.windows.kinds) == 1 and self.windows.queries == self.windows.keys)
        return one and self.grid == grid


@dataclass(frozen=True)
class Layer:
    """A point of the residual stream after a block."""

    name: str  # dotted module name: of the block, or of the module whose output is added to the stream
    kind: Kind  # what the block computes
    stage: int  # 0 for the stem, then counted up whenever the map gets smaller
    depth: float  # normalised, 0 to 1
    reduces: bool  # whether the map gets smaller here
    tap: Tap  # where to hook its tensor
    shape: tuple[int, ...]  # of the tensor without the batch axis
    layout: Layout  # the order of channels and positions in it
    grid: Grid  # (H, W) of its positions; (0, 0) where there is none
    prefix: int = 0  # tokens before those of the grid (class token, registers)
    branch: Branch | None = None  # the residual branch, where there is one
    attention: AttentionCall | None = None  # the attention call of its branch, where there is one
    samples_axis: int = 0  # of the tensor that is tapped; 1 in networks with tokens first
    rows_per_image: int = 1  # rows of the tensor's first axis per image: above 1 where windows share that axis
    order: tuple[int, ...] = ()  # of the tokens of an image, so that they are those of the grid; () as they are
    of_images: bool = (
        True  # whether the model's inputs are images (N, C, H, W), so that positions are those of an image
    )

    @property
    def spatial(self) -> bool:
        return self.grid != (0, 0)

    @property
    def grid_unknown(self) -> bool:
        """Whether it has tokens or positions whose place in the image is unknown."""
        return self.of_images and len(self.shape) > 1 and not self.spatial and math.prod(self.shape[:-1]) > 1

    @property
    def channels(self) -> int:
        return self.shape[0] if self.layout == "channels first" else self.shape[-1]

    def features(self, tensor: Tensor) -> Tensor:
        """The tensor without prefix tokens, in any order of axes after the first, (N, ...)."""
        if self.order:
            tensor = tensor.movedim(1, -1) if self.layout == "channels first" else tensor
            return tensor.reshape(len(tensor) // self.rows_per_image, -1, self.channels)[:, self.order]
        if self.rows_per_image > 1:
            return tensor.reshape(-1, self.rows_per_image, *tensor.shape[1:])
        return tensor[:, self.prefix :] if self.layout == "tokens" else tensor

    def maps(self, tensor: Tensor) -> Tensor:
        if self.layout == "channels first" and not self.order:
            return tensor
        if self.layout == "channels last":
            return tensor.permute(0, 3, 1, 2)
        tokens = self.features(tensor).transpose(1, 2)  # (N, C, T)
        return tokens.reshape(len(tokens), -1, *self.grid)


def chunks(maps: Tensor, size: int | None = None) -> tuple[Tensor, ...]:
    """A batch (N, ...) in consecutive chunks of whole rows, of about `size` numbers on a CPU."""
    row = max(1, maps[0].numel()) if len(maps) else 1
    most = (size or CPU_CHUNK) if maps.device.type == "cpu" else GPU_CHUNK
    split: tuple[Tensor, ...] = torch.split(maps, max(1, most // row))
    return split
