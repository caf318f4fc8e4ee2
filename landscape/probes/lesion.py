"""Lesion study: what breaks when one unit is removed (Park & Kim 2022, Fig. 10; Veit et al. 2016)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.layers.graph import Flow, record
from landscape.layers.partial_forward import Kept, Prefix, advanced, prefix_of, resumed
from landscape.layers.selection import labels, layers_of
from landscape.layers.unit_removal import Group, Removal, pairs, removals, removed, singles, stages
from landscape.options import OptionError, regular_expression
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject import batchnorm, outputs, sample_statistics
from landscape.subject.batchnorm import recalibration
from landscape.subject.derived import once_per_weights
from landscape.subject.outputs import intact, outputs_of
from landscape.subject.subject import Subject


@dataclass(frozen=True)
class Lesion(Probe):
    """Accuracy drop and loss increase when one unit is removed from the trained network, without retraining.

    Positive = worse. Errors are those of the paired differences per sample. Costs one pass over the samples for the
    intact network and at most one per unit: what lies before the removed unit does not run again, so that the deeper
    the unit, the less it costs.
    """

    name: ClassVar[str] = "lesion"

    layers: Annotated[tuple[str, ...], "regular expression: only units whose name or layer it finds"] = ()
    pairs: Annotated[bool, "remove each two neighbouring units together"] = False
    stages: Annotated[bool, "remove all units of a stage together"] = False
    bn: Annotated[str, "batch-norm statistics: frozen, or recalibrate:K on K mini-batches after each removal"] = (
        "frozen"
    )

    def __post_init__(self) -> None:
        recalibration(self.bn)
        for pattern in self.layers:
            regular_expression("layers", pattern)
        if self.pairs and self.stages:
            raise OptionError("--pairs and --stages are two studies; ask for one of them")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, and what refreshed statistics depend on."""
        return {**asdict(self), **batchnorm.dependence(subject, recalibration(self.bn))}

    def plan(self, subject: Subject) -> Plan:
        groups = self._groups(subject)
        loss, right = intact(subject)
        rules = np.array([group.rule for group in groups])
        return Plan(
            over={"batch": np.arange(len(subject.batches)), "unit": np.arange(len(groups))},
            labels={
                **labels([group.layer for group in groups], "unit"),
                "rule": (Quantity("what was done", dims=("unit",)), rules),
            },
            quantities=sample_statistics.quantities(subject.meaning),
            summaries=sample_statistics.summaries("unit", subject.meaning),
            about={"batch": Quantity("mini-batch"), "unit": Quantity("removed unit")},
            facts={"intact_loss": loss.mean().item(), "intact_accuracy": right.mean().item()},
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Units of one mini-batch share what lies before them."""
        groups, refreshed = self._groups(subject), recalibration(self.bn)
        known: dict[int, dict[str, Tensor]] = {}  # refreshed statistics of the network without a unit
        kept: Kept = {}
        held = point = -1
        for unit in units:
            batch, i = unit.index
            group = groups[i]
            prefix = Prefix() if refreshed else self._prefix(subject, i)
            if batch != held or prefix.point < point:
                (inputs, targets), held, kept = subject.batch(batch), batch, {}
            kept, point = advanced(subject.model, inputs, prefix, kept), prefix.point
            refresh = _statistics(subject, group, refreshed, known, i)
            without = removed(subject.model, *group.parts)
            with refresh, without, resumed(subject.model, kept), torch.inference_mode():
                after = outputs.loss_and_correctness(subject, inputs, targets)
            yield sample_statistics.change(subject, batch, after)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over all finished samples and their errors."""
        return sample_statistics.reduced(data, batches=0)

    def _groups(self, subject: Subject) -> list[Group]:
        found = _removals(subject)
        if not found:
            raise ValueError(
                "no unit of this network can be removed: it has no residual branch, and no convolution or linear layer "
                "with as many channels before as after it"
            )
        named = [r for r in found if not self.layers or _named((r.name, r.layer.name), self.layers)]
        if not named:
            names = ", ".join(removal.name for removal in found[:5])
            raise ValueError(f"--layers {' '.join(self.layers)} matches no unit; there are {names}, ...")
        if self.pairs and len(named) < 2:
            raise ValueError(f"--pairs needs two units, there is {named[0].name} alone; drop --pairs or --layers")
        return (pairs if self.pairs else stages if self.stages else singles)(named)

    def _prefix(self, subject: Subject, i: int) -> Prefix:
        """What need not run again before a unit; nothing where leaving it out changes a single bit."""
        return _proven(subject, self._groups(subject)[i].parts)


@once_per_weights
def _removals(subject: Subject) -> list[Removal]:
    return removals(subject.model, layers_of(subject))


@once_per_weights
def _flow(subject: Subject) -> Flow:
    return record(subject.model, subject.batch(0)[0][:2])


@once_per_weights
def _proven(subject: Subject, removed_parts: tuple[Removal, ...]) -> Prefix:
    example = subject.batch(0)[0][:2]
    bypassed = [tap for part in removed_parts for tap in part.bypassed]
    prefix = prefix_of(_flow(subject), [*bypassed, *(tap for part in removed_parts for tap in part.zeroed)], bypassed)
    with torch.inference_mode():
        with removed(subject.model, *removed_parts):
            whole = outputs_of(subject.model, example)
        try:
            kept = advanced(subject.model, example, prefix, {})
            outputs_of(subject.model, example.flip(-1))  # whoever hides something in a module shall not find it there
            with removed(subject.model, *removed_parts), resumed(subject.model, kept):
                short = outputs_of(subject.model, example)
        except Exception:  # whatever a foreign model does there, the long way remains
            return Prefix()
    return prefix if torch.allclose(whole, short, rtol=0.0, atol=0.0, equal_nan=True) else Prefix()


@contextmanager
def _statistics(
    subject: Subject, group: Group, count: int, known: dict[int, dict[str, Tensor]], i: int
) -> Iterator[None]:
    """Batch norm refreshed on `count` mini-batches of the network without the group; as it was for 0."""
    if not count:
        yield
        return
    before = batchnorm.statistics(subject.model)
    try:
        if i not in known:
            with removed(subject.model, *group.parts):
                batchnorm.refresh(subject, count)
            known[i] = batchnorm.statistics(subject.model)
        batchnorm.restore(subject.model, known[i])
        yield
    finally:
        batchnorm.restore(subject.model, before)


def _named(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)
