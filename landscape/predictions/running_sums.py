"""Average the probabilities of members one after the other, for ensembles of several sizes and orders at once.

Probabilities are summed as logarithms: log sum_i p_i, so that a class that every member calls almost impossible keeps
its order of magnitude, and a member is needed only once.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.headline import HIGHER, LOWER, Headline
from landscape.predictions.scores import sample_means, sample_scores
from landscape.predictions.temperature import TemperatureFit
from landscape.statistics.calibration import SampleScores
from landscape.statistics.means import mean_and_standard_error
from landscape.statistics.ratio import alignment

SIZES = (1, 2, 3, 5, 10, 20, 50)
ALL_ORDERS = 5  # members up to which they join in every order: 31 subsets of 5


def sizes_of(members: int) -> list[int]:
    """Sizes of the ensembles that are scored: those of `SIZES` up to the number of members, and that number."""
    return sorted({size for size in SIZES if size < members} | {members})


def orders_of(members: int, count: int, seed: int) -> np.ndarray:
    """Orders in which members join, (orders, members): the given one first.

    Of few members all orders, so that the mean over orders is that over all subsets of every size; else random ones.
    """
    if members <= ALL_ORDERS:
        return np.array(list(itertools.permutations(range(members))))
    generator = np.random.default_rng(seed)
    return np.stack([np.arange(members), *(generator.permutation(members) for _ in range(count - 1))])


class RunningSums:
    """Sums over the members seen so far of one mini-batch's probabilities; members come in the order of their number.

    A sample may have several rows, one per label or pixel; its scores are means over them. Memory: (subsets + 2) x rows
    x classes, in double precision.
    """

    def __init__(
        self, orders: np.ndarray, sizes: Sequence[int], targets: Tensor, in_fit: np.ndarray | None = None
    ) -> None:
        self._sizes, self._targets, self._members = sizes, targets, orders.shape[1]
        self._in_fit = np.zeros(len(targets), dtype=bool) if in_fit is None else in_fit
        self.subsets = [[frozenset(order[:size].tolist()) for size in sizes] for order in orders]
        distinct = {subset for row in self.subsets for subset in row if len(subset) > 1}
        self._place = {subset: i for i, subset in enumerate(sorted(distinct, key=sorted))}
        self._sums: Tensor | None = None
        self._added = 0
        self.member_scores: list[SampleScores] = []
        self.predicted: list[Tensor] = []  # class of every row, by member
        self.predictive_entropy: list[np.ndarray] = []  # of the ensembles of the first order, by size
        self.aleatoric_entropy: list[np.ndarray] = []
        self.temperature_sums: list[np.ndarray] = []  # of the samples of the fit and of the others, (2, MOMENTS, STEPS)

    @property
    def held_out(self) -> int:
        """Number of samples that no temperature is fitted on."""
        return int((~self._in_fit).sum())

    @property
    def classes(self) -> int:
        """Number of classes; 0 before the first member."""
        return 0 if self._sums is None else self._sums.shape[-1]

    def add(self, logits: Tensor) -> None:
        """Take the logits (N, C), or (N, rows, C), of the next member."""
        logarithms = logits.double().log_softmax(dim=-1)
        if self._sums is None:
            shape = (len(self._place), *logarithms.shape)
            self._sums = torch.full(shape, -math.inf, dtype=torch.float64, device=logits.device)
            self._probability = torch.zeros_like(logarithms)
            self._logarithm, self._own = torch.zeros_like(logarithms), torch.zeros_like(logarithms[..., 0])
        probability = logarithms.exp()
        rows = [place for subset, place in self._place.items() if self._added in subset]
        if rows:
            self._sums[rows] = torch.logaddexp(self._sums[rows], logarithms)
        self._own += _expectation(probability, logarithms)
        self._probability += probability
        self._logarithm += logarithms
        self._added += 1
        self.member_scores.append(sample_scores(logarithms, self._targets))
        self.predicted.append(logarithms.argmax(dim=-1))
        if self._added in self._sizes:
            first = self._place.get(frozenset(range(self._added)))  # of the first order; None of one member
            mean = logarithms if first is None else self._sums[first] - math.log(self._added)
            self.predictive_entropy.append(-self._of_samples(_expectation(mean.exp(), mean)))
            self.aleatoric_entropy.append(-self._of_samples(self._own / self._added))
            self.temperature_sums.append(np.stack([self._temperature(mean, half) for half in (True, False)]))

    def _of_samples(self, values: Tensor) -> np.ndarray:
        return np.asarray(sample_means(values, self._targets).cpu())

    def _temperature(self, logarithms: Tensor, half: bool) -> np.ndarray:
        fit, rows = TemperatureFit(), np.flatnonzero(self._in_fit == half).tolist()
        if rows:
            fit.add(logarithms[rows], self._targets[rows])
        return fit.sums

    def scores(self, subset: frozenset[int]) -> SampleScores:
        """Scores of the mean probabilities of some members, once all are added."""
        if len(subset) == 1:
            return self.member_scores[next(iter(subset))]
        assert self._sums is not None
        mean = self._sums[self._place[subset]] - math.log(len(subset))
        return sample_scores(mean, self._targets)

    def differing(self) -> np.ndarray:
        """Whether two members' classes differ on a sample, or on which share of its rows, (member, other, N)."""
        classes = torch.stack(self.predicted)
        return np.stack([self._of_samples((own != classes).double()) for own in classes])

    def divergence(self) -> np.ndarray:
        """Kullback-Leibler divergence of every sample, the mean over ordered pairs of different members, (N,).

        sum_ij KL(p_i || p_j) = M sum_i <p_i, log p_i> - <sum_i p_i, sum_j log p_j>, so that no pair is formed.
        """
        m = self._members
        total = m * self._own - _expectation(self._probability, self._logarithm)
        return self._of_samples((total / (m * (m - 1))).clamp(min=0.0))


def _expectation(probability: Tensor, values: Tensor) -> Tensor:
    """sum_c p_c v_c, where a probability of 0 counts nothing."""
    return torch.where(probability > 0, probability * values, 0.0).sum(dim=-1)


HEADLINES = (
    *(
        Headline(f"{name} of {words}", name, {"size": size}, reading, silent=True, like=name if size else "")
        for name, reading in (("nll", LOWER), ("accuracy", HIGHER), ("ece", LOWER), ("temperature", ""))
        for words, size in (("one member", 0), ("all members", -1))
    ),
    Headline("disagreement", "mean_disagreement"),
    Headline("epistemic entropy", "epistemic_entropy", {"size": -1}),
)
LEAST_SAMPLES = 4  # of a mini-batch whose HSIC is defined


def spread(values: np.ndarray) -> np.ndarray:
    """Standard deviation over orders, (order, size) to (size,); NaN for a single order."""
    if len(values) < 2:
        return np.full(values.shape[1], np.nan)
    with np.errstate(invalid="ignore"):
        return np.asarray(values.std(axis=0, ddof=1))


def uncertainty(data: Mapping[str, np.ndarray], done: np.ndarray) -> dict[str, np.ndarray]:
    """Mean entropies per size with their standard errors."""
    predictive, aleatoric = (
        np.moveaxis(data[f"sample_{name}"][done], 1, 0).reshape(len(data["size"]), -1)
        for name in ("predictive", "aleatoric")
    )
    shown = ~np.isnan(predictive).all(axis=0)
    found = {}
    entropies = {"predictive": predictive, "aleatoric": aleatoric, "epistemic": predictive - aleatoric}
    for name, values in entropies.items():
        pairs = np.array([mean_and_standard_error(row) for row in values[:, shown]])
        found[f"{name}_entropy"], found[f"{name}_entropy_se"] = pairs.T
    return found


def diversity(data: Mapping[str, np.ndarray], done: np.ndarray) -> dict[str, Any]:
    """Disagreement, divergence and alignment of the members."""
    samples = data["samples"][done]
    found: dict[str, Any] = {"disagreement": data["differing"][done].sum(axis=0) / samples.sum()}
    aligned = data["hsic"][done][samples >= LEAST_SAMPLES].sum(axis=0)
    found["cka"] = alignment(aligned, np.diag(aligned), np.diag(aligned))
    pairs = ~np.eye(len(aligned), dtype=bool)
    found["mean_cka"] = found["cka"][pairs].mean()
    for name in ("disagreement", "divergence"):
        values = data[f"sample_{name}"][done]
        found[f"mean_{name}"], found[f"mean_{name}_se"] = mean_and_standard_error(values[~np.isnan(values)])
    return found
