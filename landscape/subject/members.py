"""Members of a stochastic network: networks with frozen dropout masks, and the average of their probabilities."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.checkpoints.user_code import fixed_rng
from landscape.data.batch_layout import Forward
from landscape.data.dataset import Batches, BatchList
from landscape.data.structure import Nested, common_length, rows_of
from landscape.probe import derived_seed
from landscape.subject.dropout_masks import DropoutCall, FrozenMasks, dropout_calls, frozen_masks
from landscape.subject.losses import Losses, bce, cross_entropy, huber, l1, mse
from landscape.subject.restoration import evaluation_mode

if TYPE_CHECKING:
    from landscape.subject.subject import Subject


_log = logging.getLogger(__name__)


class Positioned(NamedTuple):
    """Inputs of a mini-batch with the position of every sample in the data, (N,), which its masks belong to."""

    inputs: Nested
    positions: Tensor


def positioned(subject: Subject, i: int, inputs: Nested) -> Positioned:
    """The inputs of mini-batch i with their positions."""
    by_size = isinstance(subject.batches, Batches)
    first = i * subject.batch_size if by_size else sum(map(subject.samples, range(i)))
    return Positioned(inputs, torch.arange(first, first + subject.samples(i), device=subject.device))


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


def with_members(subject: Subject, members: int) -> Subject:
    """The subject as the mean prediction of a number of networks, which differ in their dropout masks.

    Probabilities are averaged, as log (1/N) sum_i p_i; of a regression, the outputs.

    Raises:
        ValueError: the model has no dropout, or the loss takes no probabilities.
    """
    subject = replace(subject, forward=without_members(subject.forward))
    if not members:
        return subject
    if subject.losses not in AVERAGES:
        name = f"--loss {subject.loss_name}" if subject.loss_name else "the loss"
        raise ValueError(
            f"--mc-dropout averages predicted probabilities, and {name} does not say what these are; give one of "
            "--loss cross-entropy, bce, mse, l1 or huber"
        )
    _refuse_unfrozen(subject.model)
    calls = calls_of(subject)
    if not any(call.rate for call in calls):
        raise ValueError(
            f"the model ({type(subject.model).__name__}) has no dropout with a rate above 0, so that all {members} "
            "members would be equal; drop --mc-dropout, or switch dropout on (of our models: --model-arg "
            "mc_dropout=0.3, of timm's: --model-arg drop_rate=0.1)"
        )
    if isinstance(subject.batches, BatchList) and None in map(subject.batches.samples, range(len(subject.batches))):
        raise ValueError(
            "--mc-dropout needs mini-batches with a row per sample, to which the masks belong; these have no such rows"
        )
    forward = MemberForward(subject.forward, members, subject.seed, AVERAGES[subject.losses], calls)
    return replace(subject, forward=forward)


def _refuse_unfrozen(model: Any) -> None:
    """Reject modules whose dropout would stay off; say which ones keep the mean of what they draw in training.

    Raises:
        ValueError: names the first one.
    """
    means = []
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        kind, where = type(module).__name__, name or "the model"
        rate = getattr(module, "drop_prob", getattr(module, "p", 1.0))
        if rate and any(map(_is_drop_block, type(module).__mro__)):
            raise ValueError(
                f"{where} is a {kind}, which scales its blocks by the whole mini-batch: its masks cannot be frozen per "
                "sample; build the model with a rate of 0 there, or drop --mc-dropout"
            )
        if isinstance(module, torch.jit.ScriptModule) and "dropout" in str(getattr(module, "inlined_graph", "")):
            raise ValueError(
                f"{where} is TorchScript and holds dropout, which stays off there: its masks cannot be frozen; give "
                "the module in Python (--model file.py:callable with its state_dict), or drop --mc-dropout"
            )
        if isinstance(module, nn.RReLU):
            means.append(where)
    if means:
        more = f" and {len(means) - 1} more" if len(means) > 1 else ""
        _log.info("note: %s%s (RReLU) keep their mean slope; --mc-dropout draws dropout masks only", means[0], more)


def _is_drop_block(kind: type) -> bool:
    """Whether a class is a library's: a network's own of that name may be anything."""
    return kind.__name__.startswith("DropBlock") and kind.__module__.partition(".")[0] in ("torchvision", "timm")


def calls_of(subject: Subject) -> list[DropoutCall]:
    """`dropout_calls` of the network as it is, for the first samples."""
    subject = subject.as_is()
    inputs, targets = subject.example()
    few = common_length((inputs, targets)) or 0

    def run(rows: slice = slice(None)) -> object:
        return subject.forward(subject.model, inputs if rows == slice(None) else rows_of(inputs, rows))

    with fixed_rng(0), subject.evaluating(), evaluation_mode(subject.model):
        return dropout_calls(subject.model, run, (lambda: run(slice(few - 1))) if few > 1 else None)


def _mean_probabilities(outputs: list[Tensor]) -> Tensor:
    """Logarithm of the mean of the members' probabilities, which are logits too."""
    classes = 1 if outputs[0].ndim == 4 else -1  # maps of classes
    return torch.stack([one.log_softmax(dim=classes) for one in outputs]).logsumexp(dim=0) - math.log(len(outputs))


def _mean_of_labels(outputs: list[Tensor]) -> Tensor:
    """The logit of the mean of the members' probabilities of every label."""
    logits = torch.stack(outputs)
    return F.logsigmoid(logits).logsumexp(dim=0) - F.logsigmoid(-logits).logsumexp(dim=0)


def _mean(outputs: list[Tensor]) -> Tensor:
    return torch.stack(outputs).mean(dim=0)


AVERAGES: Mapping[Losses, Callable[[list[Tensor]], Tensor]] = {
    cross_entropy: _mean_probabilities, bce: _mean_of_labels, mse: _mean, l1: _mean, huber: _mean,
}  # fmt: skip
