"""Networks whose predictions are averaged: further checkpoints, snapshots of their runs, or averages of snapshots."""

import copy
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from landscape.checkpoints import checkpoint, file_names
from landscape.checkpoints.snapshots import Snapshot, load_snapshot, run_folder
from landscape.options import OptionError, invalid
from landscape.subject import batchnorm, mc_dropout, other_networks, other_samples, weights_cache
from landscape.subject.subject import Subject

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemberNetwork:
    """One network of an ensemble, loaded when it is its turn."""

    name: str
    sha256: str  # of what its weights come from
    files: tuple[Path, ...] = ()  # a checkpoint, or the snapshots whose weights are averaged; empty: the subject itself
    snapshots: tuple[Snapshot, ...] = ()
    refreshed: int = 0  # mini-batches of the train split that the average's batch norm is recomputed from

    def load(self, subject: Subject) -> Subject:
        """The network on the mini-batches of the subject.

        Raises:
            ValueError: it predicts other classes, or was trained on other data than the subject.
        """
        if not self.files:
            return subject
        other = other_networks.with_checkpoint(subject, self.files[0])
        own, theirs = (
            str(one.checkpoint.data.get("name", "")) if one.checkpoint is not None else "" for one in (subject, other)
        )
        if own and theirs and own != theirs:
            raise ValueError(
                f"{self.name} was trained on {theirs} and {subject.label} on {own}, expected members of one data set; "
                "leave one of them out"
            )
        self._refuse_other_inputs(subject, other)
        return self._averaged(other) if self.snapshots else other

    def _refuse_other_inputs(self, subject: Subject, other: Subject) -> None:
        """Reject a member that was trained on pixels with another mean or standard deviation than the subject."""
        for name in ("mean", "std"):
            own, theirs = (one.checkpoint.data.get(name) if one.checkpoint else None for one in (subject, other))
            if own and theirs and not np.allclose(np.asarray(own, float), np.asarray(theirs, float), atol=1e-4):
                raise ValueError(
                    f"{self.name} was trained with the {name} {theirs} of its pixels and {subject.label} with {own}, "
                    "and members get the same inputs; leave one of them out, or train them alike"
                )

    def _averaged(self, other: Subject) -> Subject:
        """The mean of the snapshots' weights (Izmailov et al. 2018, arXiv 1803.05407), batch norm recomputed."""
        model = copy.deepcopy(other.model)
        total: dict[str, torch.Tensor] = {}
        for snapshot in self.snapshots:
            load_snapshot(model, snapshot)
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    total[name] = total.get(name, 0.0) + value.double() / len(self.snapshots)
        model.load_state_dict({name: total.get(name, value) for name, value in model.state_dict().items()})
        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            train = other_samples.on_split(mc_dropout.as_is(other), "train", self.refreshed * other.batch_size)
            batchnorm.refresh(replace(train, model=model), min(self.refreshed, len(train.batches)))
        return replace(other, model=model, label=self.name)


def parse_snapshots(text: str) -> tuple[str, int]:
    """`last:K` or `spread:K` as kind and number, of at least 2; "" as ("", 0).

    Raises:
        OptionError: it is something else.
    """
    found = re.fullmatch(r"(last|spread):(\d{1,6})", text)
    if text and (found is None or int(found[2]) < 2):
        raise invalid("snapshots", text, "last:K or spread:K with K of at least 2, for example last:5")
    return (found[1], int(found[2])) if found else ("", 0)


@weights_cache.once_per_weights
def member_networks(subject: Subject, others: tuple[str, ...], snapshots: str, average: int) -> list[MemberNetwork]:
    """The subject and other checkpoints; or, of the run of each, some snapshots, or with `average` their mean weights.

    Raises:
        FileNotFoundError, ValueError: a checkpoint or a run cannot be read, or a run has fewer snapshots.
    """
    kind, count = parse_snapshots(snapshots)
    if not kind:
        name = file_names.label_of(subject.checkpoint.path) if subject.checkpoint is not None else subject.label
        first = MemberNetwork(name, checkpoint.state_dict_sha256(subject.model.state_dict()))
        return _noting_twins([first, *(_of_file(subject, Path(name)) for name in others)])
    if subject.checkpoint is None or any(name in subject.origin.others for name in others):
        raise OptionError(f"--snapshots {snapshots} takes the run of a checkpoint file, got a network in memory")
    found: list[MemberNetwork] = []
    for path in (subject.checkpoint.path, *map(Path, others)):
        chosen = _chosen(subject, run_folder(path), kind, count)
        if average:
            files = tuple(snapshot.path for snapshot in chosen)
            digest = ",".join(snapshot.sha256 for snapshot in chosen)
            name = f"average of {len(chosen)} of {file_names.label_of(path)}"
            found.append(MemberNetwork(name, f"average:{average}:{digest}", files, tuple(chosen), average))
        else:
            found += [MemberNetwork(file_names.label_of(one.path), one.sha256, (one.path,)) for one in chosen]
    return _noting_twins(found)


def _noting_twins(found: list[MemberNetwork]) -> list[MemberNetwork]:
    """The networks, after a word on those whose weights an earlier one has: they add nothing to an ensemble."""
    first: dict[str, str] = {}
    for network in found:
        if network.sha256 in first:
            twin = first[network.sha256]
            _log.warning("note: %s has the same weights as %s and adds nothing to the ensemble", network.name, twin)
        first.setdefault(network.sha256, network.name)
    return found


def _of_file(subject: Subject, path: Path) -> MemberNetwork:
    stored = other_networks.read_beside(subject, path)
    name = str(path) if str(path) in subject.origin.others else file_names.label_of(stored.path)
    return MemberNetwork(name, checkpoint.state_dict_sha256(stored.state_dict), (path,))


def _chosen(subject: Subject, folder: Path, kind: str, count: int) -> Sequence[Snapshot]:
    """The last snapshots of a run, or some from its first epoch to its end; never the initial weights."""
    trained = [snapshot for snapshot in other_networks.run_of(subject, folder) if snapshot.epoch != 0]
    if len(trained) < count:
        raise ValueError(
            f"{folder} holds {len(trained)} snapshots after training began, expected {count}; give --snapshots "
            f"{kind}:{max(len(trained), 2)}"
        )
    if kind == "last":
        return trained[-count:]
    return [trained[round(i)] for i in np.linspace(0, len(trained) - 1, count).tolist()]
