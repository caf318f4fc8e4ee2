"""Other networks on the mini-batches of a subject: another checkpoint, a network in memory, the snapshots of a run."""

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from landscape.checkpoints import file_names, raw_files, snapshots
from landscape.checkpoints.adapters import FIELDS
from landscape.checkpoints.checkpoint import Checkpoint, read_checkpoint
from landscape.checkpoints.key_matching import renamed_by_timm
from landscape.checkpoints.snapshots import Snapshot, of_run
from landscape.checkpoints.state_dict_loading import load_into
from landscape.subject.loading import checks, smoothing
from landscape.subject.loading.model_building import with_weights
from landscape.subject.mc_dropout import as_is, with_members
from landscape.subject.networks_in_memory import checkpoint_of
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject


def with_checkpoint(subject: Subject, path: Path) -> Subject:
    """Another checkpoint on the mini-batches of a subject; one that names no architecture has the subject's."""
    if str(path) in subject.origin.others:
        return _with_network(subject, str(path))
    stored = read_beside(subject, path)
    spec = replace(subject.spec or Spec(), checkpoint=stored.path)
    if stored.native:
        spec = replace(spec, model="", model_arg={})
    model, stored = with_weights(spec, stored, subject.images)
    model = model.to(subject.device, subject.dtype).eval()
    other = smoothing.smoothed(_with_model(subject, model, file_names.label_of(stored.path), stored, spec))
    if other.images is not None:
        checks.refuse_misfit(as_is(other))
    return with_members(other, subject.members)


def _with_network(subject: Subject, name: str) -> Subject:
    """A network in memory on the mini-batches of a subject; of weights alone, a copy of the subject's model."""
    network = subject.origin.others[name]
    if not isinstance(network, nn.Module):
        model = copy.deepcopy(subject.model)
        load_into(model, checkpoint_of(name, network), allow_missing=False, logits=True)
        network = model
    spec = replace(subject.spec, checkpoint=None, model="") if subject.spec is not None else None
    return with_members(smoothing.smoothed(_with_model(subject, network, name, None, spec)), subject.members)


def _with_model(
    subject: Subject, model: nn.Module, label: str, checkpoint: Checkpoint | None, spec: Spec | None
) -> Subject:
    origin = replace(subject.origin, original=None)
    return replace(subject, model=model, origin=origin, label=label, checkpoint=checkpoint, spec=spec)


def read_beside(subject: Subject, path: Path) -> Checkpoint:
    """Another checkpoint, or the one that a run's folder stands for, read with the loading options of a subject.

    A network in memory comes before a file of its name.
    """
    if str(path) in subject.origin.others:
        return checkpoint_of(str(path), subject.origin.others[str(path)])
    options = (subject.spec or Spec()).reading
    return _in_model(subject, read_checkpoint(snapshots.checkpoint_of(path, **options), **options))


def _in_model(subject: Subject, stored: Checkpoint) -> Checkpoint:
    """Another checkpoint with the weights of a subject's model: an adapter on its base, other names as its own."""
    if stored.adapter:
        model, stored = with_weights(replace(subject.spec or Spec(), checkpoint=stored.path), stored, subject.images)
        return replace(stored, state_dict=dict(model.state_dict()))
    return replace(stored, state_dict=renamed_by_timm(subject.model, stored.state_dict) or stored.state_dict)


def run_of(subject: Subject, run: Path | Sequence[Path]) -> list[Snapshot]:
    """The snapshots of a run, as `snapshots.of_run` says, read with the loading options of a subject.

    Those that are adapters are merged, or have parameters of their own, as that of the subject.
    """
    found = of_run(run, **(subject.spec or Spec()).reading)
    return [
        replace(snapshot, in_model=partial(_in_model, subject), sha256=_sha256_with_scale(snapshot))
        for snapshot in found
    ]


def _sha256_with_scale(snapshot: Snapshot) -> str:
    """The digest of a snapshot's weights; of an adapter also of what else decides its function, such as its scale."""
    if not (snapshot.path.is_dir() and raw_files.holds_adapter(snapshot.path)):
        return snapshot.sha256
    adapter = raw_files.json_of(snapshot.path / raw_files.ADAPTER_CONFIG)
    decisive = json.dumps({name: adapter.get(name) for name in FIELDS}, sort_keys=True, default=str)
    return hashlib.sha256(f"{snapshot.sha256} {decisive}".encode()).hexdigest()
