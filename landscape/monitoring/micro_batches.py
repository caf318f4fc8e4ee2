"""Measure the noise scale of a training by the micro-batches whose gradients add up to an update, without a pass."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.data.structure import common_length
from landscape.monitoring.gradients import estimates

UPDATES = 20  # whose estimates of |G|^2 and tr Sigma are averaged


class MicroBatches:
    """The gradients of the backward passes that make one update, taken by hooks which are there for it alone.

    With m passes of b samples each, |G|^2 and tr Sigma are estimated without bias from the mean of |g_i|^2 and from
    |mean of g_i|^2 (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), whatever the passes' common factor. The
    noise scale is the ratio of their averages over the last `UPDATES` updates, with its jackknife error over these.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._remove: list[Callable[[], None]] = []
        self._known: deque[tuple[float, float]] = deque(maxlen=UPDATES)

    def begin(self) -> None:
        """Watch the passes of the next update."""
        self.end()
        self._counts: dict[int, int] = {}
        self._versions: set[tuple[int, int]] = set()  # of the parameters; a closure moves them between its passes
        self._sums: dict[int, Tensor] = {}
        self._squares: list[Tensor] = []
        self._sizes: set[int | None] = set()
        for i, p in enumerate(self._module.parameters()):
            if p.requires_grad:
                self._remove.append(p.register_hook(self._of(i, p)).remove)  # type: ignore[no-untyped-call]
        self._remove.append(self._module.register_forward_pre_hook(self._seen, with_kwargs=True).remove)

    def end(self) -> None:
        """Watch no longer, and add the estimates of an update of several passes of one size at the same weights."""
        watched = bool(self._remove)
        for remove in self._remove:
            remove()
        self._remove = []
        m = max(self._counts.values(), default=0) if watched else 0
        size = next(iter(self._sizes)) if watched and len(self._sizes) == 1 else None
        if m > 1 and size is not None and len(self._versions) == len(self._counts):
            small = float(torch.stack(self._squares).sum()) / m
            large = sum(float(total.double().square().sum()) for total in self._sums.values()) / m**2
            self._known.append(estimates(small, large, m, size))
        self._sums, self._squares = {}, []

    def scale(self) -> tuple[float, float]:
        """The noise scale in samples over the last updates and its error; that is NaN until there are `UPDATES`."""
        values = np.array(self._known).reshape(-1, 2)
        return pooled(values[:, 0], values[:, 1])

    def _of(self, i: int, p: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            g = gradient.detach()
            g = g.to_dense() if g.is_sparse else g
            self._versions.add((i, p._version))
            self._counts[i] = self._counts.get(i, 0) + 1
            self._squares.append(g.double().square().sum())
            self._sums[i] = self._sums[i] + g if i in self._sums else g.clone()

        return hook

    def _seen(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._sizes.add(common_length((args, kwargs)))


def pooled(squared: np.ndarray, variance: np.ndarray) -> tuple[float, float]:
    """Mean tr Sigma / mean |G|^2, and its error by the jackknife; NaN where |G|^2 is not positive."""
    n = len(squared)
    if not n or squared.mean() <= 0:
        return np.nan, np.nan
    scale = float(variance.mean() / squared.mean())
    if n < UPDATES:
        return scale, np.nan
    left_out = (variance.sum() - variance) / (squared.sum() - squared)
    return scale, float(np.sqrt((n - 1) / n * np.square(left_out - left_out.mean()).sum()))
