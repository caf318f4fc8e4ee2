"""Members of a stochastic network: networks with frozen dropout masks, and the average of their probabilities."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.data.structure import Forward, Nested
from landscape.models.dropout_masks import DropoutCall, FrozenMasks, frozen_masks
from landscape.probe import derived_seed
from landscape.subject.losses import Losses, bce, cross_entropy, huber, l1, mse
from landscape.subject.precision import exact


class Positioned(NamedTuple):
    """Inputs of a mini-batch with the position of every sample in the data, (N,), which its masks belong to."""

    inputs: Nested
    positions: Tensor


def unpositioned(inputs: Nested) -> Nested:
    """What the model takes, of the inputs of a mini-batch."""
    return inputs.inputs if isinstance(inputs, Positioned) else inputs


def with_inputs(inputs: Nested, changed: Nested) -> Nested:
    """Changed inputs of the same samples."""
    return inputs._replace(inputs=changed) if isinstance(inputs, Positioned) else changed


@dataclass(eq=False)
class MemberForward:
    """The forward pass of a network with frozen dropout masks: of one member, or of all of them, averaged."""

    base: Forward  # of the network as it is
    members: int
    seed: int
    average: Callable[[list[Tensor]], Tensor]  # the outputs of all members as those of their mean prediction
    calls: Sequence[DropoutCall] = ()  # of one pass
    current: int | None = None  # the member that runs alone

    def __call__(self, model: Callable[..., Any], inputs: Positioned) -> Any:
        """Outputs of the current member; without one those of the mean prediction."""
        if self.current is not None:
            return self._of_member(model, inputs, self.current)
        return self.of_first(model, inputs, [self.members])[0]

    def of_first(self, model: Callable[..., Any], inputs: Positioned, counts: Sequence[int]) -> list[Any]:
        """Outputs of the mean prediction of the first members, for every count of them; one pass per member."""
        outputs = [self._of_member(model, inputs, member) for member in range(max(counts))]
        tensors = [one for one in outputs if isinstance(one, Tensor)]
        if len(tensors) < len(outputs):  # of an encoder, nothing to average
            return outputs[:1] * len(counts)
        return [self.average(tensors[:count]) for count in counts]

    def _of_member(self, model: Callable[..., Any], inputs: Positioned, member: int) -> Any:
        masks = FrozenMasks(derived_seed(self.seed, "dropout", member), inputs.positions, self.calls)
        with frozen_masks(model, masks):
            return self.base(model, inputs.inputs)


@contextlib.contextmanager
def running_alone(forward: Forward, member: int) -> Iterator[None]:
    """Run the block with the forward pass of one member."""
    if not isinstance(forward, MemberForward) or not 0 <= member < forward.members:
        got = forward.members if isinstance(forward, MemberForward) else 0
        raise IndexError(f"there is no member {member}: the subject has {got}")
    before, forward.current = forward.current, member
    try:
        yield
    finally:
        forward.current = before


def without_members(forward: Forward) -> Forward:
    """The forward pass of the network as it is, which takes inputs without positions."""
    return forward.base if isinstance(forward, MemberForward) else forward


def _mean_probabilities(outputs: list[Tensor]) -> Tensor:
    """Logarithm of the mean of the members' probabilities, which are logits too."""
    classes = 1 if outputs[0].ndim == 4 else -1  # maps of classes
    logarithms = torch.stack([exact(one).log_softmax(dim=classes) for one in outputs])
    return (logarithms.logsumexp(dim=0) - math.log(len(outputs))).to(outputs[0].dtype)


def _mean_of_labels(outputs: list[Tensor]) -> Tensor:
    """The logit of the mean of the members' probabilities of every label."""
    logits = exact(torch.stack(outputs))
    return (F.logsigmoid(logits).logsumexp(dim=0) - F.logsigmoid(-logits).logsumexp(dim=0)).to(outputs[0].dtype)


def _mean(outputs: list[Tensor]) -> Tensor:
    return torch.stack(outputs).mean(dim=0)


AVERAGES: Mapping[Losses, Callable[[list[Tensor]], Tensor]] = {
    cross_entropy: _mean_probabilities, bce: _mean_of_labels, mse: _mean, l1: _mean, huber: _mean,
}  # fmt: skip
