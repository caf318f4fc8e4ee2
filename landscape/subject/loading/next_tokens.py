"""Targets of language models: padding has none, and a causal model predicts the token after each position.

A token file gives inputs and the tokens after them. Data for fine-tuning give the tokens themselves as `labels`, -100
where there is no loss, and models of transformers shift them in their own loss. Both are measured alike here.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from landscape.checkpoints.user_code import fixed_rng
from landscape.data import dataset, structure
from landscape.data.structure import logits_or_none
from landscape.subject.losses import IGNORED, MEANINGS, cross_entropy
from landscape.subject.spec import Split
from landscape.subject.subject import Subject, with_traits

MASK = "attention_mask"  # input that is 0 where a token is padding
TOLERANCE = 1e-4  # of the largest logit, for models that add in another order
Data = dataset.Images | dataset.BatchList
_log = logging.getLogger(__name__)


def with_next_tokens(subject: Subject) -> Subject:
    """The subject with the next token as the target of each position, and none for padding and after the last one.

    Targets are shifted where each is the input token of its own position, or negative, and the model is causal: its
    outputs do not depend on later tokens. A user's loss gets its targets as they are, and then there is no accuracy.
    Sequences without a target are left out, also of mini-batches that a loader formed: each other one has its own loss,
    the mean over its tokens.

    Raises:
        ValueError: no sequence has a target, or it cannot be taken out of its mini-batch.
    """
    data = subject.batches if isinstance(subject.batches, dataset.BatchList) else subject.images
    own = subject.losses not in MEANINGS
    if data is None or not (own or subject.losses is cross_entropy) or not all(map(_are_tokens, _targets_of(data))):
        return subject
    inputs, targets = subject.example()
    if not isinstance(targets, Tensor):  # but the batch, for a loss that takes it whole: there is no accuracy
        return subject
    with fixed_rng(0), subject.evaluating():
        logits = logits_or_none(subject.outputs(inputs))
    if logits is None or logits.dim() != 3 or logits.shape[:2] != targets.shape:
        return subject
    repeated = all(_repeat(*pair) for pair in _pairs_of(data))
    shift = repeated and not data.shifted and _is_causal(subject, logits)
    if not repeated and all(_follow(*pair) for pair in _pairs_of(data)) and not _is_causal(subject, logits):
        _log.warning(
            "warning: the targets of %s are its next tokens, which the model sees: its outputs depend on later tokens; "
            "for the loss of masked tokens give labels that are -100 but where a token is masked",
            subject.data.in_words,
        )
    if own:
        return with_traits(subject, no_accuracy=subject.traits.no_accuracy or shift)
    if shift:
        _log.warning(
            "note: the targets of %s are its tokens themselves, and the model is causal: at each position the next "
            "token is the target, as in the losses of transformers", subject.data.in_words,
        )  # fmt: skip
    prepared = partial(_prepared, subject.model, shift=shift)
    part = None if subject.origin.part is None else partial(_part, subject.origin.part, prepared)
    origin = replace(subject.origin, part=part)
    data = prepared(data)
    if isinstance(data, dataset.BatchList):
        return replace(subject, batches=data, origin=origin)
    assert isinstance(subject.batches, dataset.Batches)
    return replace(subject, batches=replace(subject.batches, images=data), origin=origin)


def of_tokens(subject: Subject) -> bool:
    """Whether the loss is the cross-entropy of the class of every token; the targets are (N, tokens) integers."""
    targets = subject.images.targets if subject.images is not None else subject.batches[0][1]
    return subject.losses is cross_entropy and _are_tokens(targets)


def _part(read: Callable[[Split, int | str], Data], prepared: Callable[[Data], Data], *of: Split | int | str) -> Data:
    return prepared(read(*of))  # type: ignore[arg-type]


def _prepared(model: nn.Module, data: Data, *, shift: bool) -> Data:
    """The data with the targets that count."""
    if isinstance(data, dataset.Images):
        targets = _next(data.targets) if shift else data.targets
        data = replace(data, targets=targets, shifted=shift)
        labelled = (targets >= 0).any(dim=1)
        if bool(labelled.all()):
            return data
        if not bool(labelled.any()):
            raise ValueError(
                f"none of the {len(data)} sequences of {data.name} has a target: all {targets.shape[1]} tokens of each "
                "are negative or have no next token; check its labels"
            )
        count = len(data) - int(labelled.sum())
        _log.warning("note: %d of %d sequences of %s have no target and are left out", count, len(data), data.name)
        return data.take(labelled.nonzero()[:, 0].cpu().numpy())
    pairs = []
    for inputs, targets in data.pairs:
        mask = structure.input_named(model, inputs, MASK)
        if isinstance(mask, Tensor) and mask.shape == targets.shape:
            targets = targets.masked_fill(mask == 0, IGNORED)
        pairs.append((inputs, _next(targets) if shift else targets))
    data = replace(data, pairs=pairs, shifted=shift)
    return data.labelled([(targets >= 0).any(dim=1) for _, targets in pairs], "sequences", "no target")


def _next(targets: Tensor) -> Tensor:
    """The targets (N, T) moved by one position, without one at the last."""
    return torch.cat([targets[:, 1:].long(), targets.new_full((len(targets), 1), IGNORED, dtype=torch.long)], dim=1)


def _pairs_of(data: Data) -> Iterator[tuple[structure.Nested, Tensor]]:
    return iter(data.pairs if isinstance(data, dataset.BatchList) else [(data.inputs, data.targets)])


def _targets_of(data: Data) -> Iterator[structure.Nested]:
    return (targets for _, targets in _pairs_of(data))


def _are_tokens(targets: structure.Nested) -> bool:
    """Whether targets are class numbers of tokens, (N, T) integers."""
    return isinstance(targets, Tensor) and targets.dim() == 2 and not targets.is_floating_point()


def _tokens(inputs: structure.Nested, targets: Tensor) -> Tensor | None:
    """The tokens that a model is given; None if it is given none of the shape of the targets."""
    named = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    found = structure.tensors_in(inputs) if named is None else iter([named])
    first = next(found, None)
    return first if _are_tokens(first) and first is not None and first.shape == targets.shape else None


def _repeat(inputs: structure.Nested, targets: Tensor) -> bool:
    """Whether every target is the token of its own position, or negative."""
    tokens = _tokens(inputs, targets)
    return tokens is not None and bool(((tokens.to(targets.device) == targets) | (targets < 0)).all())


def _follow(inputs: structure.Nested, targets: Tensor) -> bool:
    """Whether every target is the token after its position."""
    tokens = _tokens(inputs, targets)
    return tokens is not None and targets.shape[1] > 1 and torch.equal(tokens[:, 1:].to(targets), targets[:, :-1])


def _is_causal(subject: Subject, logits: Tensor) -> bool:
    """Whether the outputs of an example stay as they are where only later tokens change."""
    inputs, targets = subject.example()
    tokens = _tokens(inputs, targets)
    assert tokens is not None
    places = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
    last = torch.where(targets >= 0, places, 0).amax(dim=1, keepdim=True)  # which is no padding
    other = (tokens.gather(1, last) + 1) % (tokens.max() + 1)
    changed = tokens.scatter(1, last, other)
    with fixed_rng(0), subject.evaluating():
        now = subject.outputs(structure.map_tensors(inputs, lambda tensor: changed if tensor is tokens else tensor))
    found = logits_or_none(now)
    if found is None or found.shape != logits.shape:
        return False
    before = places < last
    difference = torch.where(before[:, :, None], (found - logits).abs(), 0.0)
    return bool(before.any()) and difference.max().item() <= TOLERANCE * logits.abs().max().item()
