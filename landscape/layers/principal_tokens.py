"""The tokens of an image before and after self-attention, on their common principal axes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from landscape.discovery.layer import Layer
from landscape.layers.forward_hooks import feature_hooks
from landscape.layers.selection import spatial_layers
from landscape.probe import NotApplicable, Values
from landscape.subject import pixels, weights_cache
from landscape.subject.subject import Subject

AXES = 3


def attended_layers(subject: Subject, patterns: tuple[str, ...]) -> list[Layer]:
    """The layers with a map whose residual branch is self-attention.

    Raises:
        NotApplicable: there is none.
    """
    found = [layer for layer in spatial_layers(subject, patterns) if layer.attention and layer.branch is not None]
    found = [layer for layer in found if layer.branch is not None and layer.branch.skip and layer.branch.leaves]
    if not found:
        raise NotApplicable("--method principal needs layers of self-attention in a residual branch; there is none")
    return found


def tokens_around(subject: Subject, layer: Layer, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the first images in the residual stream before and after a layer's branch, (image, token, channel)."""
    return _tokens_around(subject, (layer,), images)


@weights_cache.once_per_weights
def _tokens_around(subject: Subject, layers: tuple[Layer, ...], images: int) -> tuple[np.ndarray, np.ndarray]:
    (layer,) = layers
    assert layer.branch is not None
    before = replace(layer, tap=replace(layer.branch.leaves[0], side="input"))  # what the branch's first module reads
    found: dict[int, np.ndarray] = {}

    def receive(position: int, tensor: Tensor) -> None:
        if tuple(tensor.shape[1:]) != layer.shape:
            raise ValueError(
                f"{layer.name} reads {tuple(tensor.shape[1:])} and adds to {layer.shape}, expected the same tokens; "
                "name other layers with --layers"
            )
        maps = layer.maps(tensor.detach())
        found[position] = maps.flatten(2).transpose(1, 2).cpu().double().numpy()

    with torch.no_grad(), subject.evaluating(), feature_hooks(subject.model, [before, layer], receive):
        subject.outputs(pixels.first_inputs(subject, images))
    return found[0], found[1]


def on_principal_axes(before: Sequence[np.ndarray] | np.ndarray, after: Sequence[np.ndarray] | np.ndarray) -> Values:
    """Coordinates of the tokens (image, token, channel) of every image, and how far they move together.

    The axes are the first three principal ones of an image's tokens before and after together, each with the sign that
    makes its largest component positive. With d the displacement of a token, `common_displacement` is
    |mean d|^2 / mean |d|^2: 1 where all tokens move alike, 0 where their moves cancel; NaN where nothing moves.
    """
    positions, shares, common = [], [], []
    for start, end in zip(before, after, strict=True):
        both = np.stack([start, end])  # (side, token, channel)
        centred = both - both.mean(axis=(0, 1))
        _, values, axes = np.linalg.svd(centred.reshape(-1, both.shape[-1]), full_matrices=False)
        axes = axes[:AXES] * np.sign(axes[np.arange(AXES), np.abs(axes[:AXES]).argmax(axis=1)])[:, None]
        positions.append(centred @ axes.T)
        moved = end - start
        with np.errstate(invalid="ignore", divide="ignore"):
            shares.append(values[:AXES] ** 2 / (values**2).sum())
            common.append((moved.mean(axis=0) ** 2).sum() / (moved**2).sum(axis=1).mean())
    return {
        "stream_position": np.stack(positions, axis=1),  # (side, image, token, axis)
        "explained": np.stack(shares),
        "common_displacement": np.array(common),
    }
