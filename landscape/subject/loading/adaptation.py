"""Adapt the forward pass to a model and its loss: what the loss takes, whether a graph is needed, what is copied.

One pass of a few samples shows it, so that every probe runs on models of any shape.
"""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints.user_code import fixed_rng, parameters_of
from landscape.data import dataset, structure
from landscape.data.structure import logits_or_none
from landscape.options import first_line
from landscape.subject.loading import ignored_targets
from landscape.subject.loading.ignored_targets import named
from landscape.subject.losses import IGNORED, Loss, per_sample, reduction
from landscape.subject.precision import at_least_single, exact
from landscape.subject.restoration import refusing_written_weights
from landscape.subject.subject import Subject, with_traits

_log = logging.getLogger(__name__)


@contextmanager
def refusing_broadcasts() -> Iterator[None]:
    """Fail with a warning of PyTorch's where a loss would broadcast outputs or targets."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")
        yield


def adapted(subject: Subject, loss: Loss, *, noting: bool = True) -> Subject:
    """The subject with its loss, run in the way that a pass of a few samples has shown to work.

    A model that differentiates inside its forward pass keeps a graph, one that changes its input in place gets a copy
    of it, and a loss that returns a mean has no error over samples. A user's loss takes what the model returns; where
    it fails on that, it takes the logits in it. `noting`: say that a mean has no error over samples.

    Raises:
        ValueError: the model or the loss fails, or the loss returns no tensor of the right size.
    """
    with refusing_written_weights(subject.model), refusing_broadcasts():
        if loss.unreduced is not None:
            each = replace(loss, function=loss.unreduced, unreduced=None, per_output=True)
            try:
                apart = _adapted(subject, each, noting=False)
            except ignored_targets.Diluted:  # its mean over a mini-batch is one of those with a label
                return _adapted(subject, loss, noting=noting)
            if _same_mean(apart, loss):
                _log.info("%s is taken without its mean: one loss per sample", named(loss))
                return apart
        return _adapted(subject, loss, noting=noting)


def _same_mean(apart: Subject, loss: Loss) -> bool:
    """Whether losses per sample have the mean that PyTorch's loss returns, as without weights of classes."""
    if apart.traits.mean_only:
        return False
    i = _largest_batch(apart)
    inputs, targets = apart.batch(i)
    with fixed_rng(0), apart.evaluating():
        outputs = apart.outputs(inputs)
        whole = _exactly(loss.function)(outputs, targets).item()
        mean = apart.losses(outputs, targets).mean().item()
    return math.isclose(whole, mean, rel_tol=1e-5) or (math.isnan(whole) and math.isnan(mean))


def _largest_batch(subject: Subject) -> int:
    """The mini-batch with the most samples: the first may hold a single one, which has no mean and no sum."""
    lengths = (
        [structure.common_length(targets) or 0 for _, targets in subject.batches]
        if len(subject.batches) < ignored_targets.MANY
        else [0]
    )
    return max(range(len(lengths)), key=lengths.__getitem__)


def _adapted(subject: Subject, loss: Loss, *, noting: bool) -> Subject:
    subject = _with_loss(subject, loss)
    try:
        inputs, targets = subject.example()
    except Exception:  # of the loss, which counts the samples; the passes below say what fails
        inputs, targets = subject.batch(0)
    subject, returned = _first_pass(subject, loss, inputs)
    if not loss.own:
        return subject
    logits = None if loss.takes_model else logits_or_none(returned)
    try:
        found, how = _found(subject, loss, *((subject.model, inputs) if loss.takes_model else (returned, targets)))
    except Exception as error:  # whatever the user's function raises
        if logits is None or logits is returned:
            raise _failed(loss, error, targets) from error
        try:
            found, how = _found(subject, loss, logits, targets)
        except Exception:
            raise _failed(loss, error, targets) from error
        subject = replace(subject, forward=_logits_of(subject.forward))
    data = subject.batches if isinstance(subject.batches, dataset.BatchList) else subject.images
    counted = False  # in an accuracy
    if ignored := ignored_targets.ignored(loss, logits, data) if isinstance(found, Tensor) else []:
        assert data is not None
        assert logits is not None
        counted = targets.dim() == 1 or any(0 <= value < logits.shape[1] for value in ignored)
        if found.numel() == targets.numel() > (len(targets) if targets.dim() > 1 else 0) and found.dim():
            ignored_targets.refuse_diluting(loss, data, ignored)
    if how == "none" and not loss.per_output:
        loss = replace(loss, per_output=True)
        subject = replace(subject, losses=_with_loss(subject, loss).losses)
    samples = structure.common_length(targets)
    per_sample(loss, found, samples if isinstance(subject.batches, dataset.Batches) else None)
    mean_only = found.dim() == 0 and (
        samples != 1 or any((structure.common_length(t) or 1) != 1 for _, t in subject.batches)
    )
    subject = with_traits(subject, mean_only=mean_only)
    with fixed_rng(0), subject.evaluating():
        right = subject.losses_and_right(subject.outputs(inputs), targets)[1]
    unclassed = data is not None and dataset.lowest_target(data) < 0  # such as +1 and -1
    subject = with_traits(subject, no_accuracy=unclassed or counted or bool(right.isnan().all()))
    if not mean_only:
        return subject
    ignored_targets.refuse_empty_mean(subject, loss, ignored or [IGNORED])
    subject = with_traits(subject, coupled=bool(ignored) or _is_coupled(subject, loss, how))
    if not noting:
        return subject
    if subject.traits.coupled:
        _log.warning(
            "note: %s couples the samples of a mini-batch: its values belong to mini-batches of %d (--batch-size), and "
            "have no errors over samples", named(loss), subject.samples(0),
        )  # fmt: skip
    else:
        _log.warning(
            "note: %s returns a mean over the mini-batch, so that its values have no errors over samples; return one "
            "loss per sample for them", named(loss),
        )  # fmt: skip
    return subject


def _is_coupled(subject: Subject, loss: Loss, how: str) -> bool:
    """Whether the loss of a mini-batch differs from the mean of the losses of its halves, as a contrastive loss does.

    Raises:
        ValueError: it is their sum.
    """
    inputs, targets = subject.batch(_largest_batch(subject))
    length = min(structure.common_length((inputs, targets)) or 0, 16) // 2 * 2
    if length < 2:
        if how == "sum":  # of a mini-batch that has no halves, such as one of graphs
            raise _summed(loss, "PyTorch's reduction is a sum")
        return False
    values = []
    try:
        with fixed_rng(0), subject.evaluating():
            for part in (slice(length), slice(length // 2), slice(length // 2, length)):
                outputs = subject.outputs(structure.rows_of(inputs, part))
                values.append(subject.losses(outputs, structure.rows_of(targets, part))[0].item())
    except Exception:  # a loss that takes mini-batches of this size alone
        return True
    whole, first, second = values
    tolerance = 1e-4 * max(abs(first), abs(second))
    if abs(whole - (first + second) / 2) <= tolerance or math.isnan(whole):
        return False
    if abs(whole - (first + second)) <= tolerance:
        raise _summed(loss, f"{whole:.4g} of {length} samples, {first:.4g} of half of them")
    return True


def _summed(loss: Loss, seen: str) -> ValueError:
    return ValueError(
        f"{named(loss)} returns the sum over the mini-batch ({seen}), expected one loss per sample or their mean; sum "
        "over the other dimensions alone, as in .flatten(1).sum(1), or divide by the number of samples"
    )


def _with_loss(subject: Subject, loss: Loss) -> Subject:
    """The subject with a loss as a function of what the forward pass gives and of what it asks for."""
    if not loss.own:
        return replace(with_traits(subject, name=loss.name), losses=loss.function)
    in_rows = isinstance(subject.batches, dataset.Batches)
    layout = replace(structure.BatchLayout.of(subject.model.forward), called_by_loss=loss.takes_model)

    def count(targets: structure.Nested) -> int | None:
        """Samples that a mean stands for, so that mini-batches weigh by their size."""
        if in_rows or not loss.takes_batch:
            return structure.common_length(targets)
        return dataset.count_of(layout.read("a batch", targets)[1], targets)

    function = _exactly(loss.function)

    @wraps(loss.function, updated=())
    def losses(outputs: Any, targets: structure.Nested) -> Tensor:
        found = outputs if loss.takes_model else function(outputs, targets)
        mean = isinstance(found, Tensor) and found.dim() == 0
        return per_sample(loss, found, count(targets) if mean or in_rows else None)

    def with_model(model: Callable[..., Any], batch: structure.Nested) -> Any:
        return loss.function(model, batch)

    whole = "both" if loss.takes_model else "targets" if loss.takes_batch else ""
    forward: structure.Forward = with_model if loss.takes_model else structure.call_model
    return replace(with_traits(subject, name=loss.name, whole=whole), losses=losses, forward=forward)


def _exactly(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A loss of logits of PyTorch's in double precision, its weights of classes included (`exact`); others as given."""
    if ignored_targets.of_torch(function) is None:
        return function
    doubled = copy.deepcopy(function).double() if isinstance(function, nn.Module) else function
    of_classes = function.keywords if isinstance(function, partial) else {}
    weights = {name: value.double() for name, value in of_classes.items() if isinstance(value, Tensor)}

    def losses(outputs: Any, targets: Any) -> Any:
        if not isinstance(outputs, Tensor) or (logits := exact(outputs)).dtype is not torch.double:
            return function(outputs, targets)
        shares = isinstance(targets, Tensor) and targets.is_floating_point()
        return doubled(logits, targets.double() if shares else targets, **weights).to(at_least_single(outputs))

    return losses


def _first_pass(subject: Subject, loss: Loss, inputs: structure.Nested) -> tuple[Subject, Any]:
    """The subject with a forward pass that works, and what it returns for a few samples."""
    run = subject.forward if loss.own else structure.call_model
    try:
        # First not in inference mode: tensors that the model makes once and keeps would have no use in a derivative.
        for context in (torch.no_grad(), subject.evaluating()):
            given = structure.map_tensors(inputs, torch.clone)
            with fixed_rng(0), context:
                returned = run(subject.model, given)
    except Exception as error:  # whatever a foreign model raises
        given = structure.map_tensors(inputs, torch.clone)
        try:
            with fixed_rng(0), torch.enable_grad():
                returned = run(subject.model, given)
        except Exception:
            raise (_failed(loss, error) if loss.takes_model else misfit(subject, inputs, error)) from error
        subject = replace(with_traits(subject, needs_graph=True), forward=_with_graph(subject.forward))
        _log.debug("the model differentiates inside its forward pass: every pass records a graph, which takes longer")
    features = subject.spec is not None and not subject.spec.logits
    if features and not loss.own and logits_or_none(returned) is None:  # of an encoder, which has no logits
        subject = replace(
            subject, forward=_with_graph(structure.call_model) if subject.traits.needs_graph else structure.call_model
        )
    pairs = zip(structure.tensors_in(inputs), structure.tensors_in(given), strict=False)
    if not all(torch.equal(before.nan_to_num(), after.nan_to_num()) for before, after in pairs):
        subject = replace(subject, forward=_on_copies(subject.forward))
        _log.debug("the model changes its input in place: it gets a copy of the samples")
    return subject, returned


def _found(subject: Subject, loss: Loss, first: Any, second: structure.Nested) -> tuple[Any, str]:
    """What the loss returns, and by which reduction of PyTorch."""
    with fixed_rng(0), torch.enable_grad() if subject.traits.needs_graph else subject.evaluating():
        second = structure.map_tensors(second, torch.clone) if loss.takes_model else second
        found = loss.function(first, second)
        return found, reduction(loss.function, first, second, calls_model=loss.takes_model)


def _with_graph(forward: structure.Forward) -> structure.Forward:
    def run(model: Callable[..., Any], inputs: structure.Nested) -> Any:
        with torch.enable_grad():
            return forward(model, inputs)

    return run


def _on_copies(forward: structure.Forward) -> structure.Forward:
    return lambda model, inputs: forward(model, structure.map_tensors(inputs, torch.clone))


def _logits_of(forward: structure.Forward) -> structure.Forward:
    return lambda model, inputs: logits_or_none(forward(model, inputs))


def misfit(subject: Subject, inputs: structure.Nested, error: Exception) -> ValueError:
    """The error of a model that fails on its inputs."""
    reason = first_line(error)
    own = "labels" in parameters_of(getattr(subject.model, "forward", subject.model))
    loss = ", or take the loss of the model itself, a function (model, batch): model(**batch).loss" if own else ""
    if isinstance(inputs, Mapping) and not isinstance(inputs, structure.KeywordInputs):
        return ValueError(
            f"the model fails on a batch with the fields {', '.join(map(str, inputs))} from {subject.data.in_words} "
            f"({reason}); name the input like a parameter of the model's forward or {', '.join(structure.INPUTS[:3])}, "
            f"and the target {', '.join(structure.TARGETS[:3])}{loss}"
        )
    shapes = ", ".join(str(tuple(tensor.shape[1:])) for tensor in structure.tensors_in(inputs))
    return ValueError(
        f"the model fails on inputs of shape {shapes} from {subject.data.in_words} ({reason}); check "
        f"{_causes(subject, inputs)}{loss}"
    )


def _causes(subject: Subject, inputs: structure.Nested) -> str:
    """What decides whether a model accepts the inputs: the options of this kind of data."""
    if subject.images is not None and subject.images.sequences:
        return "--data, --block-size and --model-arg"
    if subject.images is not None and subject.images.mean:
        return "--data, --image-size and --model-arg"
    if isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.shape[3] in (1, 3, 4) and inputs.shape[1] > 4:
        return "the inputs of --data, which lie as (N, H, W, C): return each as .permute(2, 0, 1), in real numbers"
    if isinstance(inputs, Tensor) and not inputs.is_floating_point():
        kind = str(inputs.dtype).removeprefix("torch.")
        pictures = ", or give --mean and --std of pictures" if kind == "uint8" else ""
        return (
            f"the inputs of --data, which are {kind}: return inputs.float() if the model takes real numbers{pictures}"
        )
    return "the shape of the inputs of --data, --model and --model-arg"


def _failed(loss: Loss, error: Exception, targets: structure.Nested = None) -> ValueError:
    reason = first_line(error)
    if isinstance(error, UserWarning):
        return ValueError(
            f"{named(loss)} compares every output with every target ({reason.partition('. ')[0]}); give both the same "
            "shape, as by outputs.squeeze(1), or targets.unsqueeze(1)"
        )
    hint = ""
    if isinstance(targets, Mapping) and not loss.takes_batch:
        fields = ", ".join(map(str, targets))
        hint = f"; the data name no target, so that it got the fields {fields}: give it the parameters (outputs, batch)"
    return ValueError(f"{named(loss)} failed with {type(error).__name__}: {reason}{hint}")
