"""Measure accuracy and loss when one unit is removed, a lesion study (Park & Kim 2022, Fig. 10; Veit et al. 2016)."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from torch import Tensor

from landscape.discovery.discover import discover
from landscape.discovery.layer import Layer
from landscape.headline import Headline
from landscape.layers import selection
from landscape.layers.layer_patterns import parse
from landscape.layers.partial_forward import Cache, ResumePoint, advance, flow_of, resume_point, resumed, verified
from landscape.layers.unit_removal import Group, Removal, pairs, removals, removed, singles, stages
from landscape.options import OptionError, matching, nearest
from landscape.probe import NotApplicable, Plan, Probe, Quantity, Unit, Values
from landscape.subject import batchnorm, mc_dropout, sample_statistics, weights_cache
from landscape.subject.batchnorm import recalibration
from landscape.subject.subject import Subject

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lesion(Probe):
    """Accuracy drop and loss increase when one unit is removed from the trained network, without retraining.

    Positive = worse. Standard errors are of the paired differences per sample. Costs one pass over the samples for the
    intact network and at most one per unit: the modules before the removed unit do not run again, so that a deeper unit
    costs less.
    """

    name: ClassVar[str] = "lesion"
    headlines: ClassVar[Sequence[Headline]] = (
        replace(sample_statistics.INTACT[0],
                column=2, title="accuracy", definition="share of right classes of the intact network"),
        sample_statistics.INTACT[1],
        *sample_statistics.largest("unit", "at {name}", column=13, title="largest drop",
                 definition="largest accuracy drop, or loss increase, when one unit is removed"),
    )  # fmt: skip

    layers: Annotated[tuple[str, ...], "only units whose name or layer matches this regular expression"] = ()
    pairs: Annotated[bool, "remove each pair of neighbouring units together"] = False
    stages: Annotated[bool, "remove all units of a stage together"] = False
    bn: Annotated[str, "batch-norm statistics: frozen, or recalibrate:K on K mini-batches after each removal"] = (
        "frozen"
    )

    def __post_init__(self) -> None:
        recalibration(self.bn)
        for pattern in self.layers:
            parse(pattern)
        if self.pairs and self.stages:
            raise OptionError("--pairs and --stages cannot be combined; choose one of them")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, and what recalibrated batch-norm statistics depend on."""
        return batchnorm.dependence(subject, recalibration(self.bn))

    def plan(self, subject: Subject) -> Plan:
        groups = self._groups(subject)
        rules = np.array([group.rule for group in groups])
        return Plan(
            over={"batch": np.arange(len(subject.batches)), "unit": np.arange(len(groups))},
            labels={
                **selection.layer_labels([group.layer for group in groups], "unit"),
                "rule": (Quantity("what was done", dims=("unit",)), rules),
            },
            quantities=sample_statistics.quantities(subject.meaning),
            summaries=sample_statistics.summaries("unit", subject.meaning),
            about={"unit": Quantity("removed unit")},
            facts={**_left_out(subject, several=bool(self.layers)), **sample_statistics.intact_means(subject)},
        )

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Units of one mini-batch share the cached outputs of the modules before them."""
        groups, recalibrated = self._groups(subject), recalibration(self.bn)
        wanted = sorted({unit.index[1] for unit in units})
        points = dict.fromkeys(wanted, ResumePoint())
        if not recalibrated:
            points = dict(zip(wanted, resume_points(subject, [groups[i] for i in wanted]), strict=True))
        statistics: dict[int, dict[str, Tensor]] = {}  # recalibrated, of the network without a unit
        cache: Cache = {}
        current = reached = -1  # mini-batch and number of operations that the cache belongs to
        for unit in units:
            batch, i = unit.index
            group, point = groups[i], points[i]
            if batch != current or point.operations < reached:
                (inputs, targets), current, cache = subject.batch(batch), batch, {}
            with subject.evaluating():
                cache = advance(subject.model, inputs, point, cache, subject.forward)
            reached = point.operations
            recalibrate = _recalibrated(subject, group, recalibrated, statistics, i)
            without = removed(subject.model, *group.units)
            with recalibrate, without, resumed(subject.model, cache), subject.evaluating():
                after = sample_statistics.loss_and_correctness(subject, inputs, targets)
            yield sample_statistics.change(subject, batch, after)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        return sample_statistics.reduced(data)

    def _groups(self, subject: Subject) -> list[Group]:
        units = _removals(subject, several=bool(self.layers))
        if not units:
            raise NotApplicable(
                "no unit of this network can be removed: it has no residual branch, and no convolution or linear layer "
                "with as many input as output channels"
            )
        patterns = self.layers or ("",)
        names = [name for unit in units for name in (unit.name, unit.layer.name)]
        matched = {name for pattern in patterns for name in matching("layers", parse(pattern).expression, names)}
        selected = [unit for unit in units if {unit.name, unit.layer.name} & matched]
        if not selected:
            given = " ".join(self.layers)
            raise ValueError(f"--layers {given} matches no unit; {nearest(given, (u.name for u in units), 'unit')}")
        if self.pairs and len(selected) < 2:
            raise ValueError(f"--pairs needs two units, there is only {selected[0].name}; drop --pairs or --layers")
        return (pairs if self.pairs else stages if self.stages else singles)(selected)


@weights_cache.once_per_weights
def _layers(subject: Subject, *, several: bool) -> list[Layer]:
    """The discovered layers; `several`: also of several networks side by side, of which `--layers` names some."""
    subject = mc_dropout.as_is(subject)
    try:
        found = discover(subject.model, subject.example()[0], subject.forward)
    except ValueError as error:
        if "--layers" not in str(error):
            raise
        return []  # other modules, which --layers would name, are no units
    return found if several else selection.of_one_network(found)


@weights_cache.once_per_weights
def _removals(subject: Subject, *, several: bool) -> list[Removal]:
    return removals(subject.model, _layers(subject, several=several))


@weights_cache.once_per_weights
def _left_out(subject: Subject, *, several: bool) -> dict[str, str]:
    """The layers that compute something but are no units, because their parts are no modules; logged once."""
    units = {unit.layer.name for unit in _removals(subject, several=several)}
    layers = _layers(subject, several=several)
    names = [layer.name for layer in layers if layer.branch is not None and layer.name not in units]
    if names:
        _log.info(
            "left out, because their norm or activation is no module of its own or their shape changes: %s",
            ", ".join(names),
        )
    return {"left_out": ", ".join(names)} if names else {}


def resume_points(subject: Subject, groups: Sequence[Group]) -> list[ResumePoint]:
    """Where passes without each of the groups may resume; the start if resuming later would change a single bit."""
    flow = flow_of(subject)
    candidates = {}
    for group in groups:
        bypassed = [tap for unit in group.units for tap in unit.bypassed]
        point = resume_point(flow, [*bypassed, *(tap for unit in group.units for tap in unit.zeroed)], bypassed)
        candidates[group.units] = point, partial(removed, subject.model, *group.units)
    points = verified(subject, candidates)
    return [points[group.units] for group in groups]


@contextmanager
def _recalibrated(
    subject: Subject, group: Group, count: int, statistics: dict[int, dict[str, Tensor]], i: int
) -> Iterator[None]:
    """Run the block with batch norm recalibrated on `count` mini-batches without the group; unchanged for 0."""
    if not count:
        yield
        return
    before = batchnorm.statistics(subject.model)
    try:
        if i not in statistics:
            with removed(subject.model, *group.units):
                batchnorm.refresh(subject, count)
            statistics[i] = batchnorm.statistics(subject.model)
        batchnorm.restore(subject.model, statistics[i])
        yield
    finally:
        batchnorm.restore(subject.model, before)
