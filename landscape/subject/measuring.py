"""A measurement of a subject, whose model, samples and random generators may be the caller's."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from landscape.checkpoints.user_code import kept_rng
from landscape.subject.precision import exact_arithmetic
from landscape.subject.restoration import left_as_found, recording_graphs
from landscape.subject.subject import Subject


@contextlib.contextmanager
def measuring(subject: Subject) -> Iterator[None]:
    """A measurement of a subject's model, which may be the caller's own, in the middle of its training.

    Meanwhile it is in evaluation mode, with gradients enabled and in exact arithmetic, wherever the call stands.
    Afterwards modes, gradients, buffers, what is trainable and the global random generators are as before; weights are
    restored by what moves them (`WeightsInPlace`). Hooks on the gradients of parameters do not run meanwhile.
    """
    _refresh(subject)
    models = [subject.model, *(other for other in subject.origin.others.values() if isinstance(other, nn.Module))]
    with contextlib.ExitStack() as found, recording_graphs(), exact_arithmetic():
        found.enter_context(kept_rng())
        for model in models:
            found.enter_context(left_as_found(model))
        yield


def _refresh(subject: Subject) -> None:
    """Take what the caller may have changed: weights and buffers of a module that the model copies, and samples."""
    if not subject.reloadable:  # arrays, and tensors by way of `data`, change without a trace
        subject.data.forget_sha256()
    if subject.origin.original is None:
        return
    with torch.no_grad():
        for own, theirs in zip(subject.model.buffers(), subject.origin.original.buffers(), strict=True):
            own.copy_(theirs)
        for weight, source in zip(subject.model.parameters(), subject.origin.original.parameters(), strict=True):
            weight.copy_(source)
            weight.requires_grad_(source.requires_grad)
