"""Loss and accuracy between two checkpoints, as they are or with the second aligned: its units permuted to match.

The barrier is the largest excess over the straight line between the ends, max_t [L(t) - (1 - t) L(0) - t L(1)]
(Frankle et al. 2020, arXiv 1912.05671). Its standard error is that of the excess of every sample there, whose noise
mostly cancels.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoints.checkpoint import Checkpoint, save_atomically, state_dict_sha256, write_checkpoint
from landscape.checkpoints.file_names import label_of
from landscape.data.structure import map_tensors
from landscape.probe import Quantity
from landscape.statistics.intervals import NORMAL
from landscape.statistics.means import error_over_parts, mean_and_standard_error
from landscape.subject import batchnorm, losses, mc_dropout, other_networks, sample_statistics, weights_cache
from landscape.subject.subject import Subject
from landscape.symmetry.matching import Match, match
from landscape.symmetry.networks import Proof, proven, recorded, tensors_of
from landscape.weight_space.lines import ModelOnLine, StraightLine, line_to
from landscape.weight_space.weight_differences import tensors_like
from landscape.weight_space.weights_in_place import RunningStatistics

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Alignment:
    """Another checkpoint with its units permuted to those of a subject."""

    other: Checkpoint
    proof: Proof
    match: Match
    state: Mapping[str, Tensor]  # of the permuted network, under the names of the model

    @property
    def moved(self) -> np.ndarray:
        """Share of the units of each group that have another place than before."""
        changed = self.match.moved != np.arange(self.proof.permutations.size)
        return np.array([changed[group.units].mean() for group in self.proof.permutations.groups])


@weights_cache.once_per_weights
def alignment(subject: Subject, other: str, restarts: int, seed: int) -> Alignment:
    """Match the units of another checkpoint, a path or a network in memory, to those of the subject.

    Groups of units that may be permuted are found in one forward pass and proven on the other checkpoint's weights;
    those whose permutation changes its outputs stay, which is said.

    Raises:
        ValueError: the checkpoint has another architecture, weights of either are not finite, or nothing in the network
            can be permuted.
    """
    stored, own_state = other_networks.read_beside(subject, Path(other)), subject.model.state_dict()
    state = tensors_like(stored, own_state)
    for whose, tensors in ((subject.label, own_state), (stored.path, state)):
        trained = (name for name, _ in subject.model.named_parameters() if name in tensors)
        if broken := next((name for name in trained if not tensors[name].isfinite().all()), ""):
            raise ValueError(
                f"{whose} has weights that are not finite ({broken}), which no units of another network match; "
                "take an earlier snapshot"
            )
    alone = mc_dropout.as_is(subject)
    inputs = alone.example()[0]

    def run(model: nn.Module) -> Any:
        dtype = next(p for p in model.parameters() if p.is_floating_point()).dtype
        return alone.forward(model, map_tensors(inputs, lambda t: t.to(dtype) if t.is_floating_point() else t))

    permutations, unknown = recorded(subject.model, run, inputs)
    theirs = copy.deepcopy(subject.model)
    theirs.load_state_dict(state, strict=False)
    proof = proven(permutations, theirs, run, seed=seed)
    if proof.refused:
        _log.info("align: %s stay: a permutation of them changed the outputs", ", ".join(proof.refused))
    if unknown:
        _log.info("align: units that meet %s stay: it has no rule", ", ".join(sorted(unknown)))
    if not proof.permutations.size:
        raise ValueError(
            f"no units of {type(subject.model).__name__} can be permuted: all of them meet operations with an order of "
            "their own; measure the line between the checkpoints: landscape line A.pt B.pt"
        )
    own, others = tensors_of(subject.model), tensors_of(theirs)
    learnt = {name for name, tensor in own.items() if isinstance(tensor, nn.Parameter)}
    weights = [{name: t.detach() for name, t in tensors.items() if name in learnt} for tensors in (own, others)]
    found = match(proof.permutations, *weights, restarts=restarts, seed=seed)
    _log.debug(
        "align: %d groups of units, outputs equal to %.0e under random permutations; similarity of the weights %.3f, "
        "%.3f aligned", len(proof.permutations.groups), proof.error, found.cosine(found.before),
        found.cosine(found.similarity),
    )  # fmt: skip
    with torch.no_grad():
        for name, tensor in proof.permutations.apply(
            {n: t.detach().clone() for n, t in others.items()}, found.moved
        ).items():
            others[name].copy_(tensor)
    return Alignment(stored, proof, found, {name: t.detach() for name, t in theirs.state_dict().items()})


def with_weights(subject: Subject, other: str) -> Subject:
    """Another checkpoint of the same model on the subject's mini-batches.

    Raises:
        ValueError: it has another architecture.
    """
    stored = other_networks.read_beside(subject, Path(other))
    model = copy.deepcopy(subject.model)
    model.load_state_dict(tensors_like(stored, subject.model.state_dict()), strict=False)
    return replace(
        subject, model=model, origin=replace(subject.origin, original=None), checkpoint=stored,
        label=_name(subject, other, stored),
    )  # fmt: skip


@weights_cache.once_per_weights
def line_of(subject: Subject, other: str, aligned: bool, restarts: int, seed: int) -> StraightLine:
    """The line to another checkpoint, as it is or aligned."""
    if aligned:
        found = alignment(subject, other, restarts, seed)
        stored, state = found.other, found.state
    else:
        stored = other_networks.read_beside(subject, Path(other))
        state = tensors_like(stored, subject.model.state_dict())
    return line_to(subject, state, _name(subject, other, stored), state_dict_sha256(stored.state_dict))


def write_aligned(found: Alignment, path: Path) -> None:
    """Write the permuted network as a checkpoint of its own, with all that the other one says of itself."""
    stored = found.other
    if not stored.native:
        save_atomically({"state_dict": dict(found.state), **({"arch": stored.arch} if stored.arch else {})}, path)
        return
    write_checkpoint(
        path, model=stored.model, model_args=stored.model_args, state_dict=found.state, data=stored.data,
        recipe=stored.recipe, epoch=stored.epoch, metrics=stored.metrics, seed=stored.seed,
    )  # fmt: skip


def _name(subject: Subject, other: str, stored: Checkpoint) -> str:
    return other if other in subject.origin.others else label_of(stored.path)


Samples: TypeAlias = tuple[np.ndarray, np.ndarray]  # loss and correctness of every sample
SUMMARIES = ("barrier", "barrier_se", "barrier_at", "accuracy_barrier", "accuracy_barrier_se")


def samples_of(subject: Subject) -> Samples:
    """The loss and the correctness of every sample at the present weights."""
    loss, right = sample_statistics.per_sample(subject)
    return loss.numpy(), right.numpy()


def values_at(t: float, samples: Samples, ends: Mapping[float, Samples], parts: int = 0) -> dict[str, Any]:
    """What is stored at a point of a line: means with their errors and, between two ends, the excess with its own.

    The excess of the loss also over so many parts of the samples.
    """
    (loss, loss_se), (accuracy, accuracy_se) = (mean_and_standard_error(values) for values in samples)
    values: dict[str, Any] = {"loss": loss, "loss_se": loss_se, "accuracy": accuracy, "accuracy_se": accuracy_se}
    if ends:
        signs = {"excess": 1.0, "accuracy_deficit": -1.0}
        for (name, sign), now, start, end in zip(signs.items(), samples, ends[0.0], ends[1.0], strict=True):
            with np.errstate(invalid="ignore"):
                difference = sign * (now - (1 - t) * start - t * end)
            values[name], values[f"{name}_se"] = mean_and_standard_error(difference)
            if parts and name == "excess":
                values["excess_part"] = np.array([difference[k::parts].mean() for k in range(parts)])
    return values


def means(meaning: losses.Meaning) -> dict[str, Quantity]:
    """Loss and accuracy at a point."""
    return {
        "loss": Quantity("loss", meaning.units, bounds=meaning.bounds, error="samples"),
        "accuracy": meaning.of_accuracy("accuracy", bounds="share", error="samples"),
    }


def paired(meaning: losses.Meaning) -> dict[str, Quantity]:
    """Loss above, and accuracy below, the straight line between those of the ends."""
    excess = "loss above the straight line between the ends' losses"
    deficit = "accuracy below the straight line between the ends' accuracies"
    return {
        "excess": Quantity(excess, meaning.units, error="samples"),
        "accuracy_deficit": meaning.of_accuracy(deficit, error="samples"),
    }


def summaries(meaning: losses.Meaning, per_line: tuple[str, ...]) -> dict[str, Quantity]:
    """The highest barriers of a line."""
    return {
        "barrier": Quantity("largest excess of the loss between the ends", meaning.units, per_line, error="samples"),
        "barrier_at": Quantity("where the barrier is", "share of the way", per_line),
        "accuracy_barrier": meaning.of_accuracy(
            "largest deficit of the accuracy between the ends", per_line, error="samples"
        ),
    }


def highest(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Largest excess and deficit of every line whose points from end to end are finished; NaN for the others.

    The position t is the last of the unit axes.
    """
    between = (data["t"] >= 0.0) & (data["t"] <= 1.0)
    t, shape = data["t"][between], data["done"].shape[:-1]
    found = {name: np.full(shape, np.nan) for name in SUMMARIES}
    complete = (data["done"][..., between] == 1).all(axis=-1) & ({0.0, 1.0} <= set(t))
    for k in map(tuple, np.argwhere(complete)):
        excess, deficit = data["excess"][k][between], data["accuracy_deficit"][k][between]
        top, low = int(np.argmax(excess)), int(np.argmax(deficit))
        values = [excess[top], _error_of_largest(excess, data["excess_se"][k][between]), t[top]]
        values += [deficit[low], _error_of_largest(deficit, data["accuracy_deficit_se"][k][between])]
        for name, value in zip(SUMMARIES, values, strict=True):
            found[name][k] = value
    return found


def over_parts(data: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> np.ndarray:
    """The barrier of every line over each part of the samples, (..., part), at the position that gives its error.

    Scaled about their mean to that error, so that parts of several lines show how the lines' errors go together.
    """
    between = (data["t"] >= 0.0) & (data["t"] <= 1.0)
    upper = (data["excess"] + NORMAL * data["excess_se"])[..., between]
    at = np.where(np.isnan(upper), -np.inf, upper).argmax(axis=-1)
    parts = np.take_along_axis(data["excess_part"][..., between, :], at[..., None, None], axis=-2)[..., 0, :]
    own, mean = error_over_parts(parts), parts.mean(axis=-1)
    scale = np.divide(found["barrier_se"], own, out=np.zeros_like(own), where=own > 0)
    return np.asarray(found["barrier"][..., None] + scale[..., None] * (parts - mean[..., None]))


def _error_of_largest(values: np.ndarray, errors: np.ndarray) -> float:
    """The standard error whose interval about the largest value reaches the highest upper end of all, (position,).

    The true maximum is above that end no more often than its own position's is. The error at the largest value alone
    would be 0 where that is an end of the line.
    """
    return (float(np.max(values + NORMAL * errors)) - float(np.max(values))) / NORMAL


@dataclass(frozen=True)
class Curve:
    """One way from a checkpoint to another."""

    name: str
    aligned: bool
    statistics: RunningStatistics


def curves(subject: Subject, *, align: bool, repair: int) -> list[Curve]:
    """The curves of a network; with batch norm also with its statistics recomputed at every point, ends included.

    Interpolated statistics are not those of the interpolated network, whose activations shrink (Jordan et al. 2023,
    arXiv 2211.08403); recomputing them over `repair` mini-batches of the samples mends that.
    """
    count = min(repair, len(subject.batches)) if batchnorm.has_statistics(subject.model) else 0
    found = []
    for aligned in (False, True)[: 1 + align]:
        name = "aligned" if aligned else "as they are"
        found.append(Curve(name, aligned, RunningStatistics(interpolate=True)))
        if count:
            found.append(Curve(f"{name}, batch norm recomputed", aligned, RunningStatistics(recalibrate=count)))
    return found


def points(
    subject: Subject, line: StraightLine, statistics: RunningStatistics, at: Iterable[float],
    more: Callable[[Samples], Mapping[str, Any]] | None = None, parts: int = 0,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """What `values_at`, and `more`, say of some points; samples at the ends between checkpoints are measured once."""
    with ModelOnLine(subject, line, statistics) as model:
        ends = _ends(subject, line, statistics)
        for t in (0.0, 1.0) if line.kind == "checkpoints" else ():
            if t not in ends:
                model.move_to(t)
                ends[t] = samples_of(subject)
        for t in at:
            if more or t not in ends:
                model.move_to(t)
            samples = ends[t] if t in ends else samples_of(subject)
            values = {**values_at(t, samples, ends, parts), **(more(samples) if more else {})}
            if subject.traits.mean_only:
                unknown = ("loss_se", "excess_se", "excess_part")
                values |= {name: np.nan * values[name] for name in unknown if name in values}
            yield values


@weights_cache.once_per_weights
def _ends(subject: Subject, line: StraightLine, statistics: RunningStatistics) -> dict[float, Samples]:
    return {}
