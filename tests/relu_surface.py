"""The loss of a small ReLU network on a random plane, which is kinked as real surfaces are, without torch."""

from __future__ import annotations

import numpy as np


def relu_surface(
    resolution: int, seed: int = 0, *, samples: int = 64, reach: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Mean cross-entropy and the standard error of its rise from the centre, (resolution, resolution) each.

    A network of 16-24-5 units whose last layer is fitted, moved along two random directions of its layers' norms.
    """
    rng = np.random.default_rng(seed)
    inputs, targets = rng.normal(size=(samples, 16)), rng.integers(0, 5, samples)
    first, last = rng.normal(size=(16, 24)) / 4, np.zeros((24, 5))
    hidden = np.maximum(inputs @ first, 0)
    for _ in range(400):
        last -= 0.5 * hidden.T @ (_softmax(hidden @ last) - np.eye(5)[targets]) / samples
    moved = [[rng.normal(size=w.shape) for _ in range(2)] for w in (first, last)]
    scaled = [
        [d * np.linalg.norm(w) / np.linalg.norm(d) for d in pair] for w, pair in zip((first, last), moved, strict=True)
    ]
    axis = np.linspace(-reach, reach, resolution)
    loss, error = np.empty((2, resolution, resolution))
    centre = _losses(inputs, targets, first, last)
    for i, a in enumerate(axis):
        row = (w + a * d[0] + axis[:, None, None] * d[1] for w, d in zip((first, last), scaled, strict=True))
        own = _losses(inputs, targets, *row)
        loss[i], error[i] = own.mean(axis=1), (own - centre).std(axis=1, ddof=1) / np.sqrt(samples)
    return loss, error


def _losses(inputs: np.ndarray, targets: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    logits = np.maximum(inputs @ first, 0) @ last  # (..., sample, class)
    logits -= logits.max(axis=-1, keepdims=True)
    return np.asarray(np.log(np.exp(logits).sum(axis=-1)) - logits[..., np.arange(len(targets)), targets])


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))
