"""When a search for extreme eigenvalues may stop: the wanted values are known, and none is likely to be missing.

Without torch, so that searches on any device can ask with the numbers of one row each.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

Which = Literal["LM", "LA", "SA", "both"]
UNSEEN = 0.01  # chance, up to a factor of 0.8, of a start vector that hides an eigenvalue further out
SEPARATION = 0.03  # relative distance to a found value from which on another one is looked for
NEAR_ZERO = 1e-3  # residual at which an end near zero counts as known, as a share of the largest |value|
VALUE_ROUNDING = 0.1  # rounding of a value, as a share of that of a residual


@dataclass(frozen=True, eq=False)
class RitzPairs:
    """What a Krylov space of m dimensions knows about the eigenvalues of an operator with n rows."""

    values: np.ndarray  # Ritz values, ascending, (m,)
    couplings: np.ndarray  # beta times the last component of each Ritz vector, with its sign, (m,)
    start: np.ndarray | None  # components of the random start vector, (m,); None where a restart dropped some
    size: int  # n
    floor: float  # residual that rounding leaves, as a share of the largest |value|: 1e-6 in single precision

    @cached_property
    def least(self) -> float:
        """The residual that rounding leaves; no value has to be better than that."""
        return self.floor * (float(np.abs(self.values).max()) or 1.0)

    @cached_property
    def residuals(self) -> np.ndarray:
        """||H v - theta v|| with its rounding, (m,)."""
        return np.asarray(np.maximum(np.abs(self.couplings), self.least if self.size > 1 else 0.0))

    @cached_property
    def errors(self) -> np.ndarray:
        """Estimated errors min(r, r^2 / gap) of the values (Kato-Temple), with their rounding, (m,).

        The gap is the distance to the nearest other Ritz value less that one's residual, within which its eigenvalue
        lies. Not bounds: eigenvalues that the space has not seen do not count.
        """
        distances = np.abs(self.values[:, None] - self.values) - self.residuals  # (m, m)
        np.fill_diagonal(distances, np.inf)
        gap, r = distances.min(axis=1), self.residuals
        squared = np.divide(r**2, gap, out=r.copy(), where=gap > 0)
        rounding = VALUE_ROUNDING * self.least if self.size > 1 else 0.0
        return np.asarray(np.maximum(np.minimum(r, squared), rounding))

    def recomputed(self, positions: np.ndarray, values: np.ndarray, residuals: np.ndarray) -> "RitzPairs":
        """The pairs with some values and residuals replaced by those of fresh products."""
        replaced, couplings = self.values.copy(), self.couplings.copy()
        replaced[positions], couplings[positions] = values, residuals
        return replace(self, values=replaced, couplings=couplings)

    def hidden(self, points: np.ndarray) -> np.ndarray:
        """The largest component of the start vector that an eigenvector unseen so far may have, (points,).

        In units of 1 / sqrt(n), so that a random start has standard normal ones. An eigenvector with eigenvalue x and
        the component c has c p_j(x) on basis vector j, p_j the Lanczos polynomials; the squares sum to at most 1, so
        |c| <= (sum of p_j(x)^2)^(-1/2) (van Dorsselaer, Hochstenbach & van der Vorst 2000). The sum is written in
        Ritz pairs here.
        """
        assert self.start is not None
        distances = points[:, None] - self.values
        tiny = 1e-9 * self.least
        components = self.couplings / np.where(np.abs(distances) > tiny, distances, tiny)  # (points, m)
        return np.asarray(np.abs(components @ self.start) * np.sqrt(self.size / (1.0 + (components**2).sum(axis=1))))


@dataclass(frozen=True)
class Copies:
    """Values of which there may be further eigenvectors; see `StoppingRule`."""

    values: tuple[float, ...]
    last: float  # the last wanted value, with the errors of all: what is further out is not among the wanted ones

    def further(self, value: float, which: Which) -> bool:
        return bool(_outward(np.array(value), which) > _outward(np.array(self.last), which))

    def told(self, ritz: RitzPairs, which: Which) -> bool:
        """Whether one is known, or none is likely."""
        if not self.values or ritz.start is None:
            return True
        outermost = ritz.values[wanted(ritz.values, 1, which)[0]]
        return self.further(outermost, which) or bool((ritz.hidden(np.array(self.values)) <= UNSEEN).all())

    @classmethod
    def of(cls, values: np.ndarray, errors: np.ndarray, which: Which) -> "Copies":
        """Those of wanted values in the order of the request, that are further out than the last one by the errors."""
        out, margin = _outward(values, which), errors.sum()
        sign = -1.0 if which == "SA" or (which == "LM" and values[-1] < 0) else 1.0
        return cls(tuple(values[out > out[-1] + 2 * margin].tolist()), float(values[-1] + sign * margin))


@dataclass(frozen=True)
class StoppingRule:
    """What the wanted values must fulfil before a search ends; at least one tolerance is given.

    Args:
        k: how many values are wanted; `both` wants k at each end.
        which: LM largest magnitude, LA largest, SA smallest, both: k largest then k smallest.
        tol: largest estimated relative error of a wanted value, see `RitzPairs.errors`; None does not ask for one.
        tol_residual: largest relative residual of a wanted value; None does not ask for one.
        ends: also converge the largest and smallest value to this relative residual, or to 0.001 of the largest
            |value|: near zero no relative residual is ever reached. 1.0 disables it.
        unseen: also go on while the start vector may hide a value further out, which only its random part can tell: 1
            for a random start, the share of its random part for another one, more to be less sure; 0 does not ask.
        copies: instead, whether there are eigenvectors with these values, or others further out than the last wanted
            one: done as soon as the start is not likely to hide one of any of them, or a Ritz value is further out.
    """

    k: int
    which: Which = "LM"
    tol: float | None = 1e-4
    tol_residual: float | None = None
    ends: float = 1.0
    unseen: float = 1.0
    copies: Copies | None = None

    def done(self, ritz: RitzPairs) -> bool:
        """Whether the wanted values are known, none is likely to be missing, and both ends are as requested."""
        if self.copies is not None:
            return self.copies.told(ritz, self.which)
        parts: tuple[Which, ...] = ("LA", "SA") if self.which == "both" else (self.which,)
        return all(self._known(ritz, part) for part in parts) and self._ends_known(ritz)

    def converged(self, values: np.ndarray, residuals: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """Which values reached the tolerances, (k,). One that rounding alone distinguishes from zero never does."""
        size = np.abs(values)
        tested = ((errors, self.tol), (residuals, self.tol_residual))
        return np.asarray(np.all([off <= tol * size for off, tol in tested if tol is not None], axis=0))

    def _known(self, ritz: RitzPairs, which: Which) -> bool:
        positions = wanted(ritz.values, self.k, which)
        size = np.abs(ritz.values[positions])
        tested = ((ritz.errors, self.tol), (ritz.residuals, self.tol_residual))
        if any(tol is not None and (off[positions] > np.maximum(tol * size, ritz.least)).any() for off, tol in tested):
            return False
        known = not self._contested(ritz, positions, which)
        return known and not (self.unseen > 0 and _unseen(ritz, positions, which, self.unseen))

    def _contested(self, ritz: RitzPairs, positions: np.ndarray, which: Which) -> bool:
        """Whether an unconverged value may yet turn out further out than the last wanted one."""
        tol = self.tol if self.tol is not None else self.tol_residual or 0.0
        last = ritz.values[positions[-1]]
        others = np.setdiff1d(np.arange(len(ritz.values)), positions)
        errors = ritz.errors[others]
        reach = _outward(ritz.values[others], which) + errors > _outward(last, which)
        return bool((reach & (errors > max(tol * abs(last), ritz.least))).any())

    def _ends_known(self, ritz: RitzPairs) -> bool:
        if self.ends >= 1.0:
            return True
        both = np.array([0, len(ritz.values) - 1])
        size, least = np.abs(ritz.values), max(NEAR_ZERO, ritz.floor)
        return bool((ritz.residuals[both] <= np.maximum(self.ends * size[both], least * size.max())).all())


def wanted(values: np.ndarray, k: int, which: Which) -> np.ndarray:
    """Positions of the wanted values in the order of the request, (k,) or fewer."""
    if which == "LM":
        return np.argsort(-np.abs(values), kind="stable")[:k]
    order = np.argsort(values, kind="stable")
    smallest, largest = order[:k], order[::-1][:k]
    return {"LA": largest, "SA": smallest, "both": np.concatenate([largest, smallest])}[which]


def _outward(values: np.ndarray, which: Which) -> np.ndarray:
    """How far out values are: what an order of the wanted ones compares."""
    return np.abs(values) if which == "LM" else values if which == "LA" else -values


def _unseen(ritz: RitzPairs, positions: np.ndarray, which: Which, unseen: float) -> bool:
    """Whether the start vector, partly random, may hide an eigenvalue further out than the last wanted one.

    All residuals can be small while an eigenvector of which the start has little has not appeared. Asked at points
    on both sides of each wanted value and, for LM, at the other sign of the last one, or beyond a Ritz value there.
    """
    if ritz.start is None:
        return False
    found = ritz.values[positions]
    apart = np.maximum(SEPARATION * np.abs(found), 1e4 * SEPARATION * ritz.least)
    points = np.concatenate([found - apart, found + apart])
    if which == "LM":
        side, opposite = -np.sign(found[-1]), -found[-1]
        rivals = np.delete(ritz.values, positions)
        near = side * rivals[np.abs(rivals - opposite) < apart[-1]]
        points = np.append(points, side * (near.max() + apart[-1]) if len(near) else opposite)
    beyond = _outward(points, which) >= _outward(found[-1], which)
    alone = (np.abs(points[:, None] - found) >= 0.9 * apart).all(axis=1)
    return bool((ritz.hidden(points[beyond & alone]) > unseen * UNSEEN).any())
