"""Turn the dropout of a subject's network into members: networks whose masks are frozen."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from landscape.checkpoints.user_code import fixed_rng
from landscape.data.dataset import BatchList
from landscape.data.structure import common_length, rows_of
from landscape.models.dropout_masks import DropoutCall, dropout_calls
from landscape.options import listed
from landscape.probe import NotApplicable
from landscape.subject.members import AVERAGES, MemberForward, without_members
from landscape.subject.restoration import evaluation_mode
from landscape.subject.subject import Subject

_log = logging.getLogger(__name__)


def as_is(subject: Subject) -> Subject:
    """The network as it is, without members; the subject itself if it has none."""
    return replace(subject, forward=without_members(subject.forward)) if subject.members else subject


def with_members(subject: Subject, members: int) -> Subject:
    """The subject as the mean prediction of a number of networks, which differ in their dropout masks.

    Probabilities are averaged, as log (1/N) sum_i p_i; of a regression, the outputs.

    Raises:
        NotApplicable: the model has no dropout.
        ValueError: the loss takes no probabilities.
    """
    subject = as_is(subject)
    if not members:
        return subject
    if subject.losses not in AVERAGES:
        name = f"--loss {subject.traits.name}" if subject.traits.name else "the loss"
        raise ValueError(
            f"--mc-dropout averages predicted probabilities, and {name} does not say what these are; give one of "
            "--loss cross-entropy, bce, mse, l1 or huber"
        )
    _refuse_unfrozen(subject.model)
    calls = calls_of(subject)
    if not any(call.rate for call in calls):
        raise NotApplicable(
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
        few = listed(means, 1)
        _log.info("note: %s (RReLU) keep their mean slope; --mc-dropout draws dropout masks only", few)


def _is_drop_block(kind: type) -> bool:
    """Whether a class is a library's: a network's own of that name may be anything."""
    return kind.__name__.startswith("DropBlock") and kind.__module__.partition(".")[0] in ("torchvision", "timm")


def calls_of(subject: Subject) -> list[DropoutCall]:
    """`dropout_calls` of the network as it is, for the first samples."""
    subject = as_is(subject)
    inputs, targets = subject.example()
    few = common_length((inputs, targets)) or 0

    def run(rows: slice = slice(None)) -> object:
        return subject.forward(subject.model, inputs if rows == slice(None) else rows_of(inputs, rows))

    with fixed_rng(0), subject.evaluating(), evaluation_mode(subject.model):
        return dropout_calls(subject.model, run, (lambda: run(slice(few - 1))) if few > 1 else None)
