"""Log probabilities of the frames of a stream, by one network, by dropout members or by several networks."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from landscape.predictions.member_networks import member_networks
from landscape.subject.mc_dropout import as_is
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights


@once_per_weights
def networks_of(subject: Subject, others: tuple[str, ...]) -> list[Subject]:
    """Other checkpoints on the frames of a subject.

    Raises:
        FileNotFoundError, ValueError: a checkpoint cannot be read, or is of other data.
    """
    return [network.load(subject) for network in member_networks(subject, others, "", 0)[1:]] if others else []


class FrameProbabilities:
    """Log probabilities of every frame, (prediction, C, ...), from one pass per mini-batch and member or network."""

    def __init__(self, subject: Subject, others: Sequence[Subject] = ()) -> None:
        self._subject, self._plain, self._others = subject, as_is(subject), others
        sizes = [subject.samples(i) for i in range(len(subject.batches))]
        self._starts = np.cumsum([0, *sizes])
        self._known: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # mini-batch -> log probabilities (prediction, N, ...), targets

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, t: int) -> Tensor:
        i = self._batch_of(t)
        return self._batch(i)[0][:, t - self._starts[i]]

    def target(self, t: int) -> Tensor:
        """Target of a frame, () or (H, W)."""
        i = self._batch_of(t)
        return self._batch(i)[1][t - self._starts[i]]

    def forget(self, *, before: int) -> None:
        """Drop the mini-batches that end before a frame."""
        for i in [i for i in self._known if self._starts[i + 1] <= before]:
            del self._known[i]

    def _batch_of(self, t: int) -> int:
        return int(np.searchsorted(self._starts, t, side="right")) - 1

    def _batch(self, i: int) -> tuple[Tensor, Tensor]:
        if i not in self._known:
            subject, plain = self._subject, self._plain
            inputs, targets = plain.batch(i)
            with subject.evaluating():
                found = [plain.outputs(inputs).log_softmax(dim=1)]
                if subject.members:
                    found += self._of_members(i)
            if self._others:
                found += self._of_networks(i, found[0])
            assert isinstance(targets, Tensor)
            self._known[i] = torch.stack(found).cpu(), targets.cpu()  # frames are scored there: one wait per mini-batch
        return self._known[i]

    def _of_networks(self, i: int, own: Tensor) -> list[Tensor]:
        """The mean of all networks, and one of them per frame: frame t is that of network t mod n, the subject 0."""
        logs = [own]
        for other in self._others:
            with other.evaluating():
                logs.append(other.outputs(other.batch(i)[0]).log_softmax(dim=1))
            if logs[-1].shape != own.shape:
                raise ValueError(
                    f"{other.label} predicts {logs[-1].shape[1]} classes and {self._subject.label} {own.shape[1]}, "
                    "expected networks of the same classes; leave one of them out of --members"
                )
        every, rows = torch.stack(logs), torch.arange(len(own), device=own.device)
        return [every.logsumexp(dim=0) - math.log(len(logs)), every[(int(self._starts[i]) + rows) % len(logs), rows]]

    def _of_members(self, i: int) -> list[Tensor]:
        """The mean of all members, and one of them alone: its masks differ from frame to frame."""
        subject = self._subject
        inputs, _ = subject.batch(i)
        logs = []
        for member in range(subject.members):
            with subject.member(member):
                logs.append(subject.outputs(inputs).log_softmax(dim=1))
        return [torch.stack(logs).logsumexp(dim=0) - math.log(len(logs)), logs[0]]
