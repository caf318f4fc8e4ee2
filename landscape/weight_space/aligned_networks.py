"""Align a second checkpoint with a subject: permute its units, which leaves its function as it is."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoints.checkpoint import Checkpoint, save_atomically, state_dict_sha256, write_checkpoint
from landscape.checkpoints.file_names import label_of
from landscape.data.structure import Nested, map_tensors
from landscape.subject.mc_dropout import as_is
from landscape.subject.other_networks import read_beside
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights
from landscape.symmetry.matching import Match, match
from landscape.symmetry.networks import Proof, proven, recorded, tensors_of
from landscape.weight_space.lines import StraightLine, line_to
from landscape.weight_space.weight_differences import tensors_like

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


@once_per_weights
def alignment(subject: Subject, other: str, restarts: int, seed: int) -> Alignment:
    """Match the units of another checkpoint, a path or a network in memory, to those of the subject.

    Groups of units that may be permuted are found in one forward pass and proven on the other checkpoint's weights;
    those whose permutation changes its outputs stay, which is said.

    Raises:
        ValueError: the checkpoint has another architecture, weights of either are not finite, or nothing in the network
            can be permuted.
    """
    stored, own_state = read_beside(subject, Path(other)), subject.model.state_dict()
    state = tensors_like(stored, own_state)
    for whose, tensors in ((subject.label, own_state), (stored.path, state)):
        trained = (name for name, _ in subject.model.named_parameters() if name in tensors)
        if broken := next((name for name in trained if not tensors[name].isfinite().all()), ""):
            raise ValueError(
                f"{whose} has weights that are not finite ({broken}), which no units of another network match; "
                "take an earlier snapshot"
            )
    alone = as_is(subject)
    inputs = alone.example()[0]

    def run(model: nn.Module) -> Any:
        dtype = next(p for p in model.parameters() if p.is_floating_point()).dtype
        return alone.forward(model, _in_precision(inputs, dtype))

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
    stored = read_beside(subject, Path(other))
    model = copy.deepcopy(subject.model)
    model.load_state_dict(tensors_like(stored, subject.model.state_dict()), strict=False)
    return replace(
        subject, model=model, origin=replace(subject.origin, original=None), checkpoint=stored,
        label=_name(subject, other, stored),
    )  # fmt: skip


@once_per_weights
def line_between(subject: Subject, other: str) -> StraightLine:
    """The line to another checkpoint as it is."""
    stored = read_beside(subject, Path(other))
    state = tensors_like(stored, subject.model.state_dict())
    return line_to(subject, state, _name(subject, other, stored), state_dict_sha256(stored.state_dict))


@once_per_weights
def aligned_line(subject: Subject, other: str, restarts: int, seed: int) -> StraightLine:
    """The line to another checkpoint, aligned."""
    found = alignment(subject, other, restarts, seed)
    return line_to(subject, found.state, _name(subject, other, found.other), state_dict_sha256(found.other.state_dict))


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


def _in_precision(inputs: Nested, dtype: torch.dtype) -> Nested:
    return map_tensors(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
