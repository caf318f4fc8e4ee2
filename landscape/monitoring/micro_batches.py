"""Measure the noise scale of a training by the micro-batches whose gradients add up to an update, without a pass."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.data.structure import common_length
from landscape.monitoring.gradients import estimates
from landscape.monitoring.shards import Shards, own_parts

UPDATES = 20  # whose estimates of |G|^2 and tr Sigma are averaged


class MicroBatches:
    """The gradients of the backward passes that make one update, taken by hooks which are there for it alone.

    With m passes of b samples each, |G|^2 and tr Sigma are estimated without bias from the mean of |g_i|^2 and from
    |mean of g_i|^2 (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), whatever the passes' common factor. The
    noise scale is the ratio of their averages over the last `UPDATES` updates, with its jackknife error over these.
    Passes of several processes count like those of one; replicas add up their gradients once more for it. Of weights
    that FSDP2 has divided, g_i are the gradients before they are divided, and their mean is in those after it.
    """

    def __init__(self, module: nn.Module, shards: Shards) -> None:
        self._module, self._shards = module, shards
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._remove: list[Callable[[], None]] = []
        self._known: deque[tuple[float, float]] = deque(maxlen=UPDATES)

    def begin(self) -> None:
        """Watch the passes of the next update."""
        self.end()
        self._counts: dict[int, int] = {}  # passes by parameter
        self._versions: set[int] = set()  # of the parameters; a closure moves them between its passes
        self._sums: dict[int, Tensor] = {}
        self._reduced: dict[int, Tensor] = {}  # |mean over processes|^2 of divided weights
        self._squares: list[Tensor] = []
        self._sizes: set[int | None] = set()
        for p in self._parameters:
            if self._shards.divided:
                self._remove.append(p.register_post_accumulate_grad_hook(self._divided).remove)  # type: ignore[no-untyped-call]
            else:
                self._remove.append(p.register_hook(self._of(p)).remove)  # type: ignore[no-untyped-call]
        for module in self._module.modules() if self._shards.divided else ():
            self._remove.append(module.register_forward_pre_hook(self._whole).remove)
        self._remove.append(self._module.register_forward_pre_hook(self._seen, with_kwargs=True).remove)

    def end(self, *, complete: bool = True) -> None:
        """Watch no longer, and add the estimates of a complete update of several passes of one size at one point."""
        watched = complete and bool(self._remove)
        for remove in self._remove:
            remove()
        self._remove = []
        if watched and self._shards.processes * max(self._counts.values(), default=1) > 1:
            self._estimate()
        self._sums, self._squares = {}, []

    def _estimate(self) -> None:
        """Add up the passes of all processes, which have each as many of as many samples."""
        processes, m = self._shards.processes, max(self._counts.values(), default=0)
        size = next(iter(self._sizes)) if len(self._sizes) == 1 and len(self._versions) == 1 else None
        passed = sum(map(bool, self._counts.values()))
        known = size is not None and m > 0 and len(self._reduced) == (passed if self._shards.divided else 0)
        own = float(sum(self._squares)), float(sum(self._reduced.values())), m * (size or 0), (m * (size or 0)) ** 2
        small, large, samples, squared, all_known = self._shards.add_up(*own, known)
        if all_known < processes or processes * squared > samples**2 * (1 + 1e-9):
            return
        if not self._shards.divided:
            totals = [self._sums.get(id(p), torch.zeros_like(p)) for p in self._parameters]
            for total in totals:
                self._shards.add_up_in_place(total)
            large = sum(float(total.double().square().sum()) for total in totals) / processes**2
        assert size is not None
        self._known.append(estimates(small / (m * processes), large / m**2, m * processes, size))

    def scale(self) -> tuple[float, float]:
        """The noise scale in samples over the last updates and its error; that is NaN until there are `UPDATES`."""
        values = np.array(self._known).reshape(-1, 2)
        return pooled(values[:, 0], values[:, 1])

    def _of(self, p: Tensor) -> Callable[[Tensor], None]:
        i = id(p)

        def hook(gradient: Tensor) -> None:
            g = gradient.detach()
            g = g.to_dense() if g.is_sparse else g
            self._counts[i] = self._counts.get(i, 0) + 1
            self._squares.append(g.double().square().sum())
            if not self._shards.divided:
                self._sums[i] = self._sums[i] + g if i in self._sums else g.clone()

        return hook

    def _whole(self, module: nn.Module, _: Any) -> None:
        """Watch the gathered weights of a layer, whose gradients are those of this process alone."""
        for p in module.parameters(recurse=False) if torch.is_grad_enabled() else ():
            if p.requires_grad and id(p) not in self._counts:
                self._counts[id(p)] = 0
                self._remove.append(p.register_hook(self._of(p)).remove)  # type: ignore[no-untyped-call]

    def _divided(self, p: Tensor) -> None:
        assert p.grad is not None
        (part,) = own_parts({"": p.grad}).values()
        self._reduced[id(p)] = part.double().square().sum()

    def _seen(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._versions.add(sum(p._version for p in self._parameters))
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
