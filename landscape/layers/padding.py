"""Which tokens of a mini-batch's sequences count: padding, where the attention mask is 0, has no part in statistics."""

import torch
from torch import Tensor

from landscape.data.dataset import BatchList
from landscape.data.structure import Nested, input_named
from landscape.discovery.layer import Layer
from landscape.subject.loading.next_tokens import MASK
from landscape.subject.subject import Subject


class Counted:
    """The tokens of one mini-batch that are no padding; in an encoder-decoder those of the side that a layer is on."""

    def __init__(self, subject: Subject, i: int) -> None:
        config = getattr(subject.model, "config", None)
        self._two_sides = bool(getattr(config, "is_encoder_decoder", False))
        inputs = subject.batches[i][0] if isinstance(subject.batches, BatchList) else None  # images have no mask
        masks = {side: input_named(subject.model, inputs, side + MASK) for side in ("", "decoder_")}
        self._masks = {side: _tokens_of(mask, subject.device) for side, mask in masks.items()}

    def of(self, layer: Layer) -> Tensor | None:
        """The tokens of a layer that count, (N, T) bool; None where none is padding."""
        decoder = self._two_sides and "decoder" in layer.name.split(".")
        return self._masks["decoder_" if decoder else ""]


def _tokens_of(mask: Nested, device: torch.device) -> Tensor | None:
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    counted = mask != 0
    return None if bool(counted.all()) else counted.to(device)


def has_tokens(tensor: Tensor, counted: Tensor | None) -> bool:
    """Whether a tensor is (N, T, channel) with these tokens."""
    return counted is not None and tensor.ndim == 3 and tensor.shape[:2] == counted.shape


def without_padding(tensor: Tensor, counted: Tensor | None) -> Tensor:
    """A tensor (N, T, channel) with its tokens in front and zeros behind them, on whatever side the padding was."""
    if counted is None or not has_tokens(tensor, counted):
        return tensor
    order = (~counted).long().argsort(dim=1, stable=True)
    in_front = tensor.gather(1, order[:, :, None].expand_as(tensor))
    return in_front.masked_fill(~counted.gather(1, order)[:, :, None], 0.0)


def mean_token(tensor: Tensor, counted: Tensor | None) -> Tensor:
    """Mean over the tokens that count of a tensor (N, T, channel), over all positions of another one, (N, channel)."""
    if counted is None or not has_tokens(tensor, counted):
        return tensor.flatten(1, -2).mean(dim=1)
    return tensor.masked_fill(~counted[:, :, None], 0.0).sum(dim=1) / counted.sum(dim=1, keepdim=True)


def rows_of_tokens(values: Tensor, counted: Tensor | None) -> list[Tensor]:
    """Queries (row, head, query, any) as parts of which all rows count as many of them: one, or a part per row."""
    if counted is None or (len(values), values.shape[2]) != tuple(counted.shape):
        return [values]
    return [row[None, :, own] for row, own in zip(values, counted, strict=True)]


def between_tokens(maps: Tensor, counted: Tensor | None) -> Tensor:
    """Maps (1, head, query, key) of one sequence without its padding, of which `counted` is (T,)."""
    if counted is None or maps.shape[2:] != (len(counted), len(counted)) or len(maps) != 1:
        return maps
    own = counted.nonzero()[:, 0]
    return maps[:, :, own][..., own]
