"""Gradients of mini-batches and micro-batches with their noise, and the distance of the weights from the first ones."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.data.structure import common_length, rows_of
from landscape.monitoring.shards import Shards, own_parts
from landscape.probe import derived_seed
from landscape.products.hessian_product import differentiable_attention
from landscape.products.vectors import dot, flat, length
from landscape.random_vectors import hashed_columns, signs, words
from landscape.statistics.means import jackknife_error
from landscape.subject.losses import loss_gradients
from landscape.subject.subject import Subject

BUCKETS = 2**14
AT_ONCE = 2**20  # weights
NOTHING = np.full(BUCKETS, np.nan)  # the sketch of a part of the weights: there is none
SIGNS, TURNS = derived_seed(0, "start", "signs"), derived_seed(0, "start", "turns")  # of the sketch


class Start:
    """The weights at the start: a copy, or in a resumed run the sketch of them that its results file holds.

    A count sketch (Charikar, Chen & Farach-Colton 2002) adds up the weights, each with a random sign, in `BUCKETS`
    random buckets. It is linear, and E|S x|^2 = |x|^2 with the variance 2 (|x|^4 - sum x_i^4) / BUCKETS at most, so
    that |S x| is |x| with a relative standard error of at most 1 / sqrt(2 BUCKETS) = 0.55 %. Of a model with at most so
    many weights it is the weights themselves.
    """

    def __init__(self, parameters: Mapping[str, Tensor], shards: Shards, start: int = 0) -> None:
        self.shards = shards
        self.sketch = NOTHING if shards.divided else sketch_of(parameters)
        known = not shards.divided or start == 0
        self._copies = {n: p.clone() for n, p in own_parts(parameters).items()} if known else None

    def resume(self, sketch: np.ndarray) -> None:
        """Go on from the sketch of an earlier process; of divided weights there is none."""
        if not self.shards.divided:
            self.sketch, self._copies = sketch, None

    def distance(self, parameters: Mapping[str, Tensor]) -> tuple[float, float]:
        """|w - w_0| and its standard error, which is 0 where it is exact."""
        if self._copies is not None:
            return self.shards.norm(p - self._copies[n] for n, p in own_parts(parameters).items()), 0.0
        if self.shards.divided:
            return math.nan, math.nan
        found = float(np.linalg.norm(sketch_of(parameters) - self.sketch))
        exact = sum(p.numel() for p in parameters.values()) <= BUCKETS
        return found, 0.0 if exact else found / math.sqrt(2 * BUCKETS)


def sketch_of(parameters: Mapping[str, Tensor]) -> np.ndarray:
    """The count sketch of the weights, (BUCKETS,), zeros behind the weights themselves where these are fewer.

    Made where the weights are. `BUCKETS` weights that follow each other go into different buckets, in an order turned
    by a random number: two others meet with the probability 1 / BUCKETS, and no sum depends on an order of threads.
    """
    weights = flat(p.detach() for p in parameters.values())
    if len(weights) <= BUCKETS:
        return np.pad(weights.double().cpu().numpy(), (0, BUCKETS - len(weights)))
    device, double = weights.device, torch.float64
    order, total = torch.arange(BUCKETS, device=device), torch.zeros(BUCKETS, device=device, dtype=double)
    for at in range(0, len(weights), AT_ONCE):
        part = weights[at : at + AT_ONCE]
        part = part * signs(len(part), SIGNS, start=at, device=device, dtype=double)
        table = nn.functional.pad(part, (0, -len(part) % BUCKETS)).view(-1, BUCKETS)
        rows = at // BUCKETS + torch.arange(len(table), device=device)
        turns = words(TURNS, rows, hashed_columns(1, rows)) >> 18
        total += table.gather(1, (order + turns) % BUCKETS).sum(dim=0)
    sums: np.ndarray = total.cpu().numpy()
    return sums


def parts_of(subject: Subject, wanted: int) -> list[slice]:
    """The mini-batch in parts of equal size: `wanted` of them or the nearest number that divides the samples, if any.

    More, up to twice as many, come before fewer. One part where the mini-batch cannot be divided.
    """
    inputs, targets = subject.batch(0)
    rows = common_length((inputs, targets))
    if rows is None or subject.traits.coupled or wanted < 2:
        return [slice(None)]
    near = [*range(wanted, 2 * wanted + 1), *range(wanted - 1, 1, -1)]
    count = next((m for m in near if rows % m == 0 and m <= rows), 1)
    return [slice(at, at + rows // count) for at in range(0, rows, rows // count)]


def gradients_of(subject: Subject, parts: Sequence[slice], whole: Tensor) -> list[Tensor]:
    """The gradient of each part, flat, (n,); that of the last one is what the others leave of the `whole` gradient."""
    inputs, targets = subject.batch(0)
    parameters = list(subject.parameters.values())
    gradients: list[Tensor] = []
    for part in parts[:-1]:
        with differentiable_attention():
            loss = subject.losses(subject.outputs(rows_of(inputs, part)), rows_of(targets, part)).mean()
        gradients.append(flat(loss_gradients(loss, parameters)))
    rest = len(parts) * whole
    for gradient in gradients:
        rest -= gradient
    return [*gradients, rest]


def gram(vectors: Sequence[Tensor]) -> np.ndarray:
    """Inner products of vectors, (m, m), in double precision."""
    m = len(vectors)
    products = torch.stack([dot(vectors[i], vectors[j]) for i in range(m) for j in range(i, m)]).tolist()
    found = np.zeros((m, m))
    found[np.triu_indices(m)] = products
    return np.asarray(found + np.triu(found, 1).T)


def noise(inner: np.ndarray, size: int) -> dict[str, float]:
    """What the inner products of the gradients of m parts of `size` samples each say about that of a single sample.

    With G the mean gradient over all data and Sigma the covariance over samples: |G|^2, which may come out negative,
    and tr Sigma without bias, and the simple noise scale tr Sigma / |G|^2 in samples, NaN where |G|^2 is not positive,
    with its error by the jackknife over the parts.

    McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1: with gradients of b and of B samples, |G|^2 is estimated
    without bias by (B |g_B|^2 - b |g_b|^2) / (B - b), and tr Sigma by (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B). Here b is
    the size of a part, |g_b|^2 the mean over the parts, and B the whole mini-batch, whose gradient is their mean.
    """
    m = len(inner)
    squared, variance = _of_gram(inner, size)
    left_out = [np.delete(np.delete(inner, i, 0), i, 1) for i in range(m)] if m > 2 else []
    ratios = np.array([v / s for s, v in (_of_gram(one, size) for one in left_out) if s > 0])
    return {
        "gradient_squared": squared, "gradient_variance": variance,
        "noise_scale": variance / squared if squared > 0 else np.nan,
        "noise_scale_se": float(jackknife_error(ratios)) if 2 < m == len(ratios) else np.nan,
    }  # fmt: skip


def _of_gram(inner: np.ndarray, b: int) -> tuple[float, float]:
    m = len(inner)
    return estimates(float(np.trace(inner)) / m, float(inner.sum()) / m**2, m, b)


def estimates(small: float, large: float, m: int, b: int) -> tuple[float, float]:
    """|G|^2 and tr Sigma, from the mean of |g|^2 over m gradients of b samples each and |mean of g|^2."""
    whole = b * m
    return (whole * large - b * small) / (whole - b), (small - large) / (1 / b - 1 / whole)


UPDATES = 20  # whose estimates of |G|^2 and tr Sigma are averaged


class Passes:
    """The gradients of the backward passes that make one update, taken by hooks which are there for it alone.

    With m passes of b samples each, |G|^2 and tr Sigma are estimated without bias from the mean of |g_i|^2 and from
    |mean of g_i|^2 (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), whatever the passes' common factor.
    Passes of several processes count like those of one; replicas add up their gradients once more for it. Of weights
    that FSDP2 has divided, g_i are the gradients before they are divided, and their mean is in those after it.
    """

    def __init__(self, module: nn.Module, shards: Shards) -> None:
        self._shards, divided = shards, shards.divided
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._counts: dict[int, int] = {}  # passes by parameter
        self._versions: set[int] = set()  # of the parameters; a closure moves them between its passes
        self._sums: dict[int, Tensor] = {}
        self._reduced: dict[int, Tensor] = {}  # |mean over processes|^2 of divided weights
        self._squares: list[Tensor] = []
        self._sizes: set[int | None] = set()
        self.hooks = contextlib.ExitStack()  # closed, it watches no longer
        for p in self._parameters:
            watch: Any = p.register_post_accumulate_grad_hook if divided else p.register_hook
            self.hooks.enter_context(watch(self._divided if divided else partial(self._passed, id(p))))
        for part in module.modules() if divided else ():
            self.hooks.enter_context(part.register_forward_pre_hook(self._whole))
        self.hooks.enter_context(module.register_forward_pre_hook(self._seen, with_kwargs=True))

    def taken(self) -> list[tuple[float, float]]:
        """|G|^2 and tr Sigma by the passes so far, if these are several of one size at one point; watch no longer.

        They are those of all processes, which have each as many of as many samples.
        """
        self.hooks.close()
        processes, m = self._shards.processes, max(self._counts.values(), default=0)
        if processes == 1 and m < 2:
            return []
        size = (next(iter(self._sizes)) or 0) if len(self._sizes) == len(self._versions) == 1 else 0
        whole = not self._shards.divided or len(self._reduced) == sum(map(bool, self._counts.values()))
        own = float(sum(self._squares)), float(sum(self._reduced.values())), m * size, (m * size) ** 2
        small, large, samples, squared, all_known = self._shards.add_up(*own, whole and m * size > 0)
        if all_known < processes or processes * squared > samples**2 * (1 + 1e-9) or not math.isfinite(small):
            return []  # also where scaled gradients have overflown
        if not self._shards.divided:
            totals = [self._sums.get(id(p), torch.zeros_like(p)) for p in self._parameters]
            for total in totals:
                self._shards.add_up_in_place(total)
            large = sum(float(length(total).square()) for total in totals) / processes**2
        return [estimates(small / (m * processes), large / m**2, m * processes, size)]

    def _passed(self, i: int, gradient: Tensor) -> None:
        g = gradient.detach()
        g = g.to_dense() if g.is_sparse else g
        self._counts[i] = self._counts.get(i, 0) + 1
        self._squares.append(length(g).square())
        if not self._shards.divided:
            self._sums[i] = self._sums[i] + g if i in self._sums else g.clone()

    def _whole(self, module: nn.Module, _: Any) -> None:
        """Watch the gathered weights of a layer, whose gradients are those of this process alone."""
        for p in module.parameters(recurse=False) if torch.is_grad_enabled() else ():
            if p.requires_grad and id(p) not in self._counts:
                self._counts[id(p)] = 0
                self.hooks.enter_context(p.register_hook(partial(self._passed, id(p))))  # type: ignore[no-untyped-call]

    def _divided(self, p: Tensor) -> None:
        assert p.grad is not None
        self._reduced[id(p)] = length(own_parts({"": p.grad})[""]).square()

    def _seen(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # which would trace this hook, and keep it
            self._versions.add(sum(p._version for p in self._parameters))
            self._sizes.add(common_length((args, kwargs)))


def pooled(updates: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The noise scale in samples, mean tr Sigma / mean |G|^2 over the last `UPDATES` updates, with its jackknife error.

    NaN where |G|^2 is not positive; without error of fewer updates. If the factor of a gradient scaler changes among
    them, each counts by its square.
    """
    squared, variance = np.array(updates).reshape(-1, 2).T
    if not len(squared) or squared.mean() <= 0:
        return {}
    error = np.nan
    if len(squared) >= UPDATES:
        error = float(jackknife_error((variance.sum() - variance) / (squared.sum() - squared)))
    return {"simple_noise_scale": float(variance.mean() / squared.mean()), "simple_noise_scale_se": error}
