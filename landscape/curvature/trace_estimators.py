"""Estimates of the trace and the Frobenius norm of a symmetric operator: Hutchinson, Hutch++ and XTrace."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landscape.probe import derived_seed
from landscape.random_vectors import normal, signs
from landscape.subject.sample_statistics import mean_and_standard_error

Operator = Callable[[Tensor], Tensor]  # v -> A v, both (n,)
GROUPS = 16  # of vectors, that the jackknife behind XTrace's error leaves out
LEAST = 2  # vectors, without a jackknife


@dataclass(frozen=True)
class TraceEstimate:
    """An estimate of the trace of A, and from the same products that of A^2, the squared Frobenius norm of A."""

    value: float  # the estimate
    error: float  # its standard error over the random vectors; 0 if the trace is exact
    products: int  # operator products spent
    square: float  # estimate of tr A^2 = ||A||_F^2, without bias as well
    square_error: float  # its standard error


def hutchinson(
    operator: Operator, size: int, products: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> TraceEstimate:
    """Mean of v' A v over Rademacher vectors (Hutchinson 1989), exact for a diagonal A; of |A v|^2 for tr A^2.

    Var = 2 sum_{i != j} A_ij^2 / products: the error falls with the square root of the work.
    At least 2 products; `size`, n, of them give the exact trace. Device and dtype are those the operator expects.

    Raises:
        FloatingPointError: a product is not finite.
    """
    if products >= size:
        return exact(operator, size, device=device, dtype=dtype)
    vectors = (signs(size, derived_seed(seed, k), device=device, dtype=dtype) for k in range(products))
    forms, squares = _forms(operator, vectors)
    return TraceEstimate(*mean_and_standard_error(forms), products, *mean_and_standard_error(squares))


def hutch_plus_plus(
    operator: Operator, size: int, products: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> TraceEstimate:
    """The exact trace on the range of a sketch, and Hutchinson's on its complement (Meyer et al. 2021, algorithm 1).

    A third of the products each for the sketch, its range and the complement: exact where the rank is at most a third
    of the products. The standard error is that of the complement. Arguments as `hutchinson`; at least 4 products.
    """
    if products >= size:
        return exact(operator, size, device=device, dtype=dtype)
    rank = products // 3
    vectors = (signs(size, derived_seed(seed, k), device=device, dtype=dtype) for k in itertools.count())
    basis = _range(torch.stack(_images(operator, itertools.islice(vectors, rank)), dim=1))[0]  # (n, rank)
    caught = basis.shape[1]
    left = (v - basis @ (basis.T @ v) for v in itertools.islice(vectors, products - rank - caught))
    found = []
    for values in _forms(operator, itertools.chain(basis.T, left)):
        mean, error = mean_and_standard_error(values[caught:])
        found.append((sum(values[:caught].tolist()) + mean, error))
    return TraceEstimate(*found[0], products, *found[1])


def xtrace(
    operator: Operator, size: int, products: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> TraceEstimate:
    """Hutch++ with exchangeable vectors: each is in the sketch of all others (Epperly, Tropp & Webber 2024, XTrace).

    With W = (w_1 .. w_m) Gaussian, Q_i an orthonormal basis of A W without column i and P_i = I - Q_i Q_i',

        tr_i = tr Q_i' A Q_i + (n - rank Q_i) / ||P_i w_i||^2  w_i' P_i A P_i w_i,

    each unbiased (the ratio removes the length of w_i from its variance); the estimate is their mean, both from m +
    rank(A W) products. Exact where the rank is below m. The same formula with A^2 for A takes nothing but inner
    products of A W and A Q.

    The tr_i share their sketch: their standard deviation over sqrt(m) is 1.1 to 1.7 times too small where the spectrum
    decays, and the jackknife over vectors 1.5 to 4 times too large, since a sketch with fewer vectors is worse. The
    error is between them, at a third of the way on a logarithmic scale, as measured (benchmarks/CERTIFICATES.md).
    Arguments as `hutchinson`; at least 4 products. Holds about 2 * products vectors at once.
    """
    if products >= size:
        return exact(operator, size, device=device, dtype=dtype)
    m = products // 2
    w = torch.stack(
        [normal(size, derived_seed(seed, k), device=device, dtype=dtype) for k in range(m)], dim=1
    )  # (n, m)
    y = torch.stack(_images(operator, w.T), dim=1)  # A W
    basis, singular, right = _range(y)  # y = basis diag(singular) right, (n, r), (r,), (r, m)
    rank = len(singular)
    alone = right.square().sum(dim=0) > 1 - 1e-8  # columns whose direction the others do not span
    lost = torch.where(alone, right / singular[:, None], 0.0)  # (r, m), not normalised
    mapped = _images(operator, basis.T)  # A basis
    inside = _on_host([basis.T @ image for image in mapped]).reshape(rank, rank).T.contiguous()  # basis' A basis
    table = torch.stack(mapped) if mapped else basis.T
    gram = _on_host(list(table @ table.T)).reshape(rank, rank)  # basis' A^2 basis
    images_2 = _on_host(list(table @ y)).reshape(rank, m)  # basis' A^2 W

    small = _on_host([(w * y).sum(dim=0), y.square().sum(dim=0), w.square().sum(dim=0), *(basis.T @ w)])
    forms, forms_2, lengths, shares = small[0], small[1], small[2], small[3:]  # w' A w, w' A^2 w, w' w and basis' W
    images = singular[:, None] * right  # basis' A W
    sketch = _Sketch(size, lost, alone, lengths, shares)
    return TraceEstimate(
        *sketch.mean_and_error(inside, forms, images), m + rank,
        *sketch.mean_and_error(gram, forms_2, images_2),
    )  # fmt: skip


@dataclass(frozen=True)
class _Sketch:
    """What XTrace knows of its vectors W, in the basis of the range of A W, (r,)."""

    size: int
    lost: Tensor  # the directions that the range loses without a column, (r, m), not normalised; 0 if it loses none
    alone: Tensor  # whether it loses one, (m,)
    lengths: Tensor  # w' w, (m,)
    shares: Tensor  # basis' W, (r, m)

    def mean_and_error(self, inside: Tensor, forms: Tensor, images: Tensor) -> tuple[float, float]:
        """The mean of all tr_i and its standard error, from basis' A basis, w' A w and basis' A W."""
        m = len(self.alone)
        value, error = mean_and_standard_error(self._traces(inside, forms, images, torch.zeros(m, dtype=torch.bool)))
        if self.alone.all() and m > LEAST and error:
            groups = torch.arange(m) % GROUPS
            parts = [self._traces(inside, forms, images, groups == group).mean() for group in range(min(m, GROUPS))]
            jackknife = float(torch.stack(parts).std(correction=0)) * math.sqrt(len(parts) - 1)
            error *= max(jackknife / error, 1.0) ** (1 / 3)
        return value, error

    def _traces(self, inside: Tensor, forms: Tensor, images: Tensor, without: Tensor) -> Tensor:
        """tr_i of the vectors that are kept, from the sketch of all kept ones but i; `without` (m,) are left out."""
        kept = ~without
        gone = torch.linalg.qr(self.lost[:, without])[0]  # (r, left out)
        s = self.lost[:, kept] - gone @ (gone.T @ self.lost[:, kept])
        s = torch.nn.functional.normalize(s, dim=0)
        c = self.shares[:, kept] - gone @ (gone.T @ self.shares[:, kept])
        c = c - s * (s * c).sum(dim=0)
        rest = forms[kept] - 2 * (c * images[:, kept]).sum(dim=0) + (c * (inside @ c)).sum(dim=0)
        free = self.size - len(inside) + int(without.sum()) + self.alone[kept].double()
        held = inside.trace() - (gone * (inside @ gone)).sum() - (s * (inside @ s)).sum(dim=0)
        found: Tensor = held + free / (self.lengths[kept] - c.square().sum(dim=0)) * rest
        return found


def independent_values(method: str, products: int) -> int:
    """Count the values behind the error: all vectors, those of the complement (at least), or XTrace's estimates."""
    return {"hutchinson": products, "hutch++": products - 2 * (products // 3), "xtrace": products // 2}[method]


def exact(operator: Operator, size: int, *, device: torch.device, dtype: torch.dtype) -> TraceEstimate:
    """The exact trace and squared Frobenius norm from n products, one per coordinate.

    Raises:
        FloatingPointError: a product is not finite.
    """
    places = torch.arange(size, device=device)
    units = ((places == i).to(dtype) for i in range(size))
    forms, squares = _forms(operator, units)
    return TraceEstimate(sum(forms.tolist()), 0.0, size, sum(squares.tolist()), 0.0)


def rounds_for(variances: np.ndarray, counts: np.ndarray, target: float, *, most: int) -> np.ndarray:
    """How many rounds of each of several independent means bring the standard error of their sum to a target.

    The mean of k rounds of a part with the variance V per round has the variance V / k. The part with the fewest rounds
    gets the next one, which follows the order of the parts and not their errors: choosing by estimated errors would
    favour parts whose estimate happens to be low. At most as many rounds as are known are added at once, since the
    variances are estimates too.

    Args:
        variances: of one round, (parts,).
        counts: rounds so far, at least one each, (parts,).
        target: standard error of the sum.
        most: cap on the rounds of a part.

    Returns:
        Rounds of each part, counts where the target is met, (parts,).
    """
    wanted = counts.copy()
    while wanted.sum() < 2 * counts.sum() and not (variances / wanted).sum() <= target**2:
        part = int(np.argmin(wanted))
        if wanted[part] >= most:
            break
        wanted[part] += 1
    return wanted


def _range(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal basis of the columns, and the small factors in float64 on the CPU; rounding is dropped."""
    q, r = torch.linalg.qr(y)
    left, singular, right = torch.linalg.svd(r.double().cpu(), full_matrices=False)
    kept = singular > len(r) * torch.finfo(y.dtype).eps * singular.max()
    return q @ left[:, kept].to(q), singular[kept], right[kept]


def _products(operator: Operator, vectors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Every vector with its product; whether products are finite is asked once, as each answer waits for the device.

    Raises:
        FloatingPointError: after the last one, a product is not finite.
    """
    finite = []
    for v in vectors:
        image = operator(v)
        finite.append(image.isfinite().all())
        yield v, image
    if finite and not torch.stack(finite).all():
        raise FloatingPointError("a Hessian product is not finite")


def _images(operator: Operator, vectors: Iterable[Tensor]) -> list[Tensor]:
    return [image for _, image in _products(operator, vectors)]


def _forms(operator: Operator, vectors: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Both v' A v and |A v|^2 of every vector, (vector,) float64 on the CPU."""
    pairs = [torch.stack([torch.dot(v, image), torch.dot(image, image)]) for v, image in _products(operator, vectors)]
    forms, squares = _on_host(pairs).view(len(pairs), 2).unbind(dim=1)
    return forms, squares


def _on_host(values: Sequence[Tensor]) -> Tensor:
    """Numbers, or rows of them, in float64 on the CPU, by one transfer."""
    return (torch.stack(list(values)) if values else torch.empty(0)).double().cpu()
