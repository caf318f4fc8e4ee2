"""Align two checkpoints by a permutation of units, and measure the barrier between them before and after."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from landscape.checkpoints import checkpoint, snapshots
from landscape.headline import Headline
from landscape.options import at_least
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject.other_networks import read_beside, run_of
from landscape.subject.subject import Subject
from landscape.weight_space import barriers, directions
from landscape.weight_space.barriers import Alignment, alignment, curves, line_of, points, write_aligned


@dataclass(frozen=True)
class Align(Probe):
    """The loss between a checkpoint and another, whose units are permuted to match (arXiv 2209.04836, Algorithm 1).

    Which units may be permuted is read off one forward pass of any network and proven on the other checkpoint: its
    outputs stay equal to 1e-5 under a random permutation of every group. The permutation maximises the inner product of
    the weights, one group after the other. The barrier is that of `line`; of networks with batch norm it is also given
    with the statistics recomputed at every point (arXiv 2211.08403). `--save` writes the permuted checkpoint.
    """

    name: ClassVar[str] = "align"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"against": ()}
    several: ClassVar[str] = "pair"
    checkpoints: ClassVar[str] = "two checkpoints of one architecture; the units of the second are permuted"
    split: ClassVar[str] = "train"
    certified: ClassVar[Mapping[str, int]] = {"samples": 256}
    smallest: ClassVar[Mapping[str, Any]] = {"resolution": 3, "restarts": 1, "repair": 1}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("barrier before", "barrier", {"curve": "before"}),
        Headline("barrier", "barrier", {"curve": -1}),
        Headline("accuracy barrier", "accuracy_barrier", {"curve": -1}),
        Headline("similarity", "similarity"),
    )

    against: Annotated[str, "the other checkpoint, which is permuted; default: the first snapshot of the run"] = ""
    resolution: Annotated[int, "points of the line, ends included; two more are added near each end"] = 11
    restarts: Annotated[int, "searches for the permutation; the one with the most similar weights is taken"] = 3
    repair: Annotated[int, "mini-batches from which batch norm's statistics are recomputed at every point; 0: none"] = (
        10
    )
    seed: Annotated[int, "seed of the order of the groups in the searches, and of the proof"] = 0

    def __post_init__(self) -> None:
        at_least("resolution", self.resolution, 2)
        at_least("restarts", self.restarts, 1)
        at_least("repair", self.repair, 0)

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, with the digest of the other weights in place of their path, and how many batches repair."""
        other = read_beside(subject, Path(self._other(subject)))
        recomputed = max(curve.statistics.recalibrate for curve in self._curves(subject))
        batch = {"batch_size": subject.batch_size} if recomputed else {}
        return {**batch, "against": checkpoint.state_dict_sha256(other.state_dict), "repair": recomputed}

    def plan(self, subject: Subject) -> Plan:
        names, found = [curve.name for curve in self._curves(subject)], alignment_of(self, subject)
        groups, size = found.proof.permutations.groups, found.proof.permutations.size
        of_unit = np.zeros(size)
        for k, group in enumerate(groups):
            of_unit[group.units] = k
        group_axis = ("group",)
        return Plan(
            over={"curve": np.arange(len(names)), "t": directions.beside_ends(np.linspace(0, 1, self.resolution))},
            axes={"group": np.arange(len(groups)), "unit": np.arange(size)},
            labels={
                "name": (Quantity("curve", dims=("curve",)), np.array(names)),
                "group_name": (
                    Quantity("first tensor and axis of the group's units", dims=group_axis),
                    np.array([group.name for group in groups]),
                ),
                "group_size": (
                    Quantity("units in the group", dims=group_axis), np.array([len(g) for g in groups], float)
                ),
                "group_moved": (Quantity("share of the group's units that change place", dims=group_axis), found.moved),
                "group_within": (
                    Quantity("group whose units are the blocks of this one, -1 for none", dims=group_axis),
                    np.array([group.within for group in groups], float),
                ),
                "unit_group": (Quantity("group of the unit", dims=("unit",)), of_unit),
                "permutation": (
                    Quantity("unit of the other checkpoint that comes to this place", dims=("unit",)),
                    found.match.moved.astype(float),
                ),
            },
            quantities={**barriers.means(subject.meaning), **barriers.paired(subject.meaning)},
            summaries=barriers.summaries(subject.meaning, ("curve",)),
            about={
                "t": Quantity("position on the line", "share of the way"), "group": Quantity("group of units"),
            },
            facts={
                "before": len(names) // 2 - 1,
                "other": self._shown(subject),
                "proof_error": found.proof.error,
                "similarity": found.match.cosine(found.match.similarity),
                "similarity_before": found.match.cosine(found.match.before),
                "refused": ", ".join(found.proof.refused) or "none",
            },
        )  # fmt: skip

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Points of one curve share the samples' losses at its ends."""
        kinds, other = self._curves(subject), self._other(subject)
        for k, of_curve in groupby(units, key=lambda unit: unit.index[0]):
            line = line_of(subject, other, kinds[k].aligned, self.restarts, self.seed)
            yield from points(subject, line, kinds[k].statistics, [float(unit.at["t"]) for unit in of_curve])

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """The barrier of every finished curve."""
        return barriers.highest(data)

    def save(self, subject: Subject, path: Path) -> str:
        """Write the permuted checkpoint."""
        found = alignment_of(self, subject)
        write_aligned(found, path)
        return f"{found.other.path} with its units permuted"

    def _curves(self, subject: Subject) -> Sequence[Any]:
        return curves(subject, align=True, repair=self.repair)

    def _other(self, subject: Subject) -> str:
        """The path of the other checkpoint, or the name of a network in memory."""
        if self.against:
            return self.against
        if subject.checkpoint is None:
            raise ValueError("align needs two checkpoints: landscape align A.pt B.pt, or against=... in Python")
        path = subject.checkpoint.path
        alone = f"align needs two checkpoints, got {path} alone: landscape align A.pt B.pt"
        try:
            first = run_of(subject, snapshots.run_folder(path))[0].path
        except ValueError as error:  # its folder holds no run
            raise ValueError(alone) from error
        if first == path:
            raise ValueError(alone)
        return str(first)

    def _shown(self, subject: Subject) -> str:
        as_it_is = line_of(subject, self._other(subject), False, self.restarts, self.seed)
        return as_it_is.name.removeprefix("towards ")


def alignment_of(probe: Align, subject: Subject) -> Alignment:
    """The permuted checkpoint of a probe, computed once for the subject's weights."""
    return alignment(subject, probe._other(subject), probe.restarts, probe.seed)
