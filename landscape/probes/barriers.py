"""Measure the barriers between all pairs of several checkpoints, as they are and aligned."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Annotated, Any, ClassVar

import numpy as np

from landscape.headline import Headline
from landscape.options import at_least
from landscape.predictions.member_networks import MemberNetwork, member_networks, parse_snapshots
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights
from landscape.weight_space import barriers, directions
from landscape.weight_space.barriers import Curve, curves, line_of, points, with_weights
from landscape.weight_space.scores import parts_of

MATRIX = {
    "barrier_matrix": "largest excess of the loss between two checkpoints",
    "accuracy_barrier_matrix": "largest deficit of the accuracy between two checkpoints",
}


@dataclass(frozen=True)
class Barriers(Probe):
    """The barrier between every two of several checkpoints, max_t [L(t) - (1 - t) L(0) - t L(1)], with paired errors.

    With `--align` also after the units of the second of a pair are permuted to those of the first, as in `align`. Of
    networks with batch norm, also with its statistics recomputed at every point. Small barriers between all of a set
    mean one basin, linearly connected (Frankle et al. 2020, arXiv 1912.05671).
    """

    name: ClassVar[str] = "barriers"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"members": ()}
    several: ClassVar[str] = "members"
    checkpoints: ClassVar[str] = "checkpoints of one architecture, or folders of them"
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"resolution": 3, "repair": 1, "snapshots": "last:2"}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("barrier", "barrier", {"curve": -1, "pair": "largest"}),
        Headline("mean", "barrier", {"curve": -1, "pair": "mean"}),
        Headline("mean before", "barrier", {"curve": "before", "pair": "mean"}),
    )

    members: Annotated[str, "further checkpoints, B.pt,C.pt; or list them as arguments"] = ""
    snapshots: Annotated[str, "take last:K or spread:K snapshots of the run of each checkpoint"] = ""
    align: Annotated[bool, "measure also with the second checkpoint of every pair permuted to match the first"] = False
    resolution: Annotated[int, "points of every line, ends included; two more are added near each end"] = 11
    restarts: Annotated[int, "searches for each permutation; the one with the most similar weights is taken"] = 3
    repair: Annotated[int, "mini-batches from which batch norm's statistics are recomputed at every point; 0: none"] = (
        10
    )
    seed: Annotated[int, "seed of the searches"] = 0

    def __post_init__(self) -> None:
        at_least("resolution", self.resolution, 2)
        at_least("restarts", self.restarts, 1)
        at_least("repair", self.repair, 0)
        parse_snapshots(self.snapshots)

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The digests of all weights in place of their paths, and how many batches repair."""
        recomputed = max(curve.statistics.recalibrate for curve in self._curves(subject))
        batch = {"batch_size": subject.batch_size} if recomputed else {}
        members = [network.sha256 for network in self._networks(subject)]
        return {**batch, "repair": recomputed, "snapshots": None, "members": members}

    def plan(self, subject: Subject) -> Plan:
        networks, kinds = self._networks(subject), self._curves(subject)
        if len(networks) < 2:
            raise ValueError(
                f"barriers lie between at least 2 checkpoints, got 1 ({subject.label}); give several, or "
                "--snapshots spread:5"
            )
        ends, matrix, per_line = _pairs(len(networks)), ("curve", "checkpoint", "other"), ("curve", "pair")
        numbers = np.arange(len(networks))
        meaning = subject.meaning
        about = {
            name: Quantity(words, meaning.units, matrix, error="samples")
            if name == "barrier_matrix"
            else meaning.of_accuracy(words, matrix, error="samples")
            for name, words in MATRIX.items()
        }
        return Plan(
            over={
                "curve": np.arange(len(kinds)), "pair": np.arange(len(ends)),
                "t": directions.beside_ends(np.linspace(0, 1, self.resolution)),
            },
            axes={"checkpoint": numbers, "other": numbers, "part": np.arange(parts_of(subject))},
            labels={
                "name": (Quantity("curve", dims=("curve",)), np.array([curve.name for curve in kinds])),
                "checkpoint_name": (Quantity("checkpoint", dims=("checkpoint",)), np.array([n.name for n in networks])),
                "first": (Quantity("checkpoint at t = 0", dims=("pair",)), np.array([i for i, _ in ends], float)),
                "second": (Quantity("checkpoint at t = 1", dims=("pair",)), np.array([j for _, j in ends], float)),
            },
            quantities={
                **barriers.means(meaning), **barriers.paired(meaning),
                "excess_part": Quantity("excess over every 16th sample, from each of the first 16 on", meaning.units,
                                        ("part",)),
            },
            summaries={
                **barriers.summaries(meaning, per_line), **about,
                "barrier_part": Quantity("the barrier over the same samples, about its value", meaning.units,
                                         (*per_line, "part")),
            },
            about={
                "pair": Quantity("pair of checkpoints"), "t": Quantity("position on the line", "share of the way"),
                "other": Quantity("other checkpoint"), "part": Quantity("part of the samples"),
            },
            facts={"before": len(kinds) // 2 - 1} if self.align else {},
        )  # fmt: skip

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Points of one line share the samples' losses at its ends, and pairs their first network."""
        networks, kinds = self._networks(subject), self._curves(subject)
        pairs = _pairs(len(networks))
        for (c, p), of_line in groupby(units, key=lambda unit: unit.index[:2]):
            first, second = pairs[p]
            start, other = _loaded(subject, networks[first]), str(networks[second].files[0])
            line = line_of(start, other, kinds[c].aligned, self.restarts, self.seed)
            at = [float(unit.at["t"]) for unit in of_line]
            yield from points(start, line, kinds[c].statistics, at, parts=parts_of(subject))

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """The barrier of every finished line, and symmetric matrices of them, 0 on the diagonal."""
        found = barriers.highest(data)
        n, first, second = len(data["checkpoint"]), data["first"].astype(int), data["second"].astype(int)
        matrices = {}
        for name in ("barrier", "barrier_se", "accuracy_barrier", "accuracy_barrier_se"):
            matrix = np.full((len(data["curve"]), n, n), np.nan)
            matrix[:, np.arange(n), np.arange(n)] = 0.0
            matrix[:, first, second] = matrix[:, second, first] = found[name]
            matrices[f"{name.removesuffix('_se')}_matrix{'_se' * name.endswith('_se')}"] = matrix
        parts = {"barrier_part": barriers.over_parts(data, found)} if "excess_part" in data else {}
        return {**found, **matrices, **parts}

    def _curves(self, subject: Subject) -> list[Curve]:
        return curves(subject, align=self.align, repair=self.repair)

    def _networks(self, subject: Subject) -> list[MemberNetwork]:
        others = tuple(filter(None, self.members.split(",")))
        return member_networks(subject, others, self.snapshots, 0)


def _pairs(count: int) -> list[tuple[int, int]]:
    return list(combinations(range(count), 2))


@once_per_weights
def _loaded(subject: Subject, network: MemberNetwork) -> Subject:
    """A network of the pair on the subject's mini-batches, in a copy of its model."""
    return with_weights(subject, str(network.files[0])) if network.files else subject
