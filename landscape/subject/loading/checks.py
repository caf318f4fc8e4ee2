"""Reject models that cannot be measured: stochastic, in training mode, not matching their data, ending in a softmax."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints import checkpoint, user_code
from landscape.data import dataset, structure
from landscape.probe import NotApplicable
from landscape.subject import mc_dropout, weights_cache
from landscape.subject.loading import adaptation, ignored_targets, next_tokens
from landscape.subject.losses import MEANINGS, Losses, bce, cross_entropy
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject
from landscape.subject.targets import refuse_targets

_log = logging.getLogger(__name__)
ROUNDING = 1e-3  # of the sum of a row of probabilities, which a network in half precision gives


@dataclass(frozen=True)
class LogitsOf:
    """A forward pass that gives the logits behind the probabilities of a network."""

    base: structure.Forward
    of: str  # `softmax` or `sigmoid`

    def __call__(self, model: Callable[..., Any], inputs: structure.Nested) -> Tensor:
        shares = structure.logits_in(self.base(model, inputs))
        least = torch.finfo(shares.dtype).tiny
        if self.of == "softmax":
            return shares.clamp_min(least).log()
        return shares.clamp_min(least).log() - (1 - shares).clamp_min(torch.finfo(shares.dtype).eps / 2).log()


ENDS_IN: Mapping[str, str] = {"nll": "softmax", "bce-probabilities": "sigmoid"}  # by the name of the loss


def taken_as_probabilities(subject: Subject) -> Subject:
    """The subject with logits in place of probabilities, where its loss says that the network gives these."""
    end = ENDS_IN.get(subject.traits.name)
    return replace(subject, forward=LogitsOf(subject.forward, end)) if end else subject


def refuse_probabilities(subject: Subject, outputs: Any) -> None:
    """Reject outputs of all samples that lie in 0 to 1, with rows of sum 1 for cross-entropy: they are no logits.

    Samples are looked at until one of them is none; `outputs` are those of a few, so that this ends at once for
    logits. `--outputs logits` skips it. A loss of probabilities rejects the opposite, see `_refuse_logits`. One of
    torch's own that the user gives is obeyed with a warning.

    Raises:
        ValueError: all outputs are probabilities, or some are none where the loss takes them.
    """
    if isinstance(subject.forward, LogitsOf):
        _refuse_logits(subject, subject.forward)
    names: dict[Losses, tuple[str, str]] = {cross_entropy: ("softmax", "nll"), bce: ("sigmoid", "bce-probabilities")}
    known = names.get(subject.losses) or ignored_targets.of_torch(subject.losses)
    if (
        known is None
        or subject.traits.name in ENDS_IN
        or (subject.spec is not None and subject.spec.outputs == "logits")
    ):
        return
    if not _are_probabilities(subject, outputs):
        return
    for inputs, _ in subject.each_batch():
        if not _are_probabilities(subject, subject.outputs(inputs)):
            return
    end, loss = known
    if subject.losses not in names:
        _log.warning(
            "warning: all outputs of the model lie in 0 to 1: it ends in a %s, and the loss takes logits; loss=%r "
            "takes probabilities", end, loss,
        )  # fmt: skip
        return
    sums = " with rows of sum 1" if end == "softmax" else ""
    raise ValueError(
        f"all outputs of the model on all samples ({len(subject)}) lie in 0 to 1{sums}: it ends in a {end}, and its "
        f"probabilities would be scored as if they were logits; give --loss {loss} for probabilities, or --outputs "
        f"logits if these are logits"
    )


def _refuse_logits(subject: Subject, forward: LogitsOf) -> None:
    """Reject outputs of a few samples that are no probabilities: the logarithm would take those below 0 for 0."""
    shares = structure.logits_in(forward.base(subject.model, subject.example()[0])).double()
    least, most = shares.min().item(), shares.max().item()
    sums = shares.sum(dim=_classes(shares)) if forward.of == "softmax" and shares.dim() > 1 else torch.ones(1)
    if least < 0 or most > 1 or bool(((sums - 1).abs() > ROUNDING).any()):
        rows = ", in rows of sum 1" if forward.of == "softmax" else ""
        instead = (
            "leave --loss out for logits, and for the output of log_softmax" if rows else "give --loss bce for logits"
        )
        raise ValueError(
            f"the model returns {least:.4g} to {most:.4g}, and --loss {subject.traits.name} takes probabilities, "
            f"from 0 to 1{rows}; {instead}"
        )


def _classes(shares: Tensor) -> int:
    """The dimension of the classes: the second of rows and of maps, the last of sequences."""
    return 1 if shares.dim() in (2, 4) else shares.dim() - 1


def _are_probabilities(subject: Subject, outputs: Any) -> bool:
    shares = structure.logits_or_none(outputs)
    if shares is None or not shares.is_floating_point() or not bool(((shares >= 0) & (shares <= 1)).all()):
        return False
    if subject.losses is bce or "sigmoid" in (
        ignored_targets.of_torch(subject.losses) or ()
    ):  # a head that is still 0 gives logits of 0
        return bool((shares > 0).any()) and bool((shares < 1).any())
    if shares.dim() < 2:
        return False
    classes = _classes(shares)
    return shares.shape[classes] > 1 and bool(((shares.double().sum(dim=classes) - 1).abs() < ROUNDING).all())


def refuse_stochastic(subject: Subject, otherwise: str = "") -> None:
    """Reject models that are in training mode or stochastic in eval mode: every measurement would give other numbers.

    `otherwise` is what else can be done about it, for the message.
    """
    refuse_training(subject.model)
    if reason := variation(subject):
        or_loss = "" if subject.losses in MEANINGS else ", or its loss,"
        raise NotApplicable(f"the model ({type(subject.model).__name__}){or_loss} {reason}{otherwise}")


@weights_cache.once_per_weights
def variation(subject: Subject) -> str:
    """Why two passes of the same samples differ; "" if they do not, but for rounding."""
    inputs, targets = subject.example()
    outputs: list[list[Tensor]] = []
    drawn = False
    with subject.evaluating():
        for seed in (0, 0, 1):
            if seed and not drawn:
                break  # the seed changes nothing
            with user_code.fixed_rng(seed):
                before = user_code.rng_states()
                returned: list[Any] = [subject.outputs(inputs)]
                if subject.losses not in MEANINGS:  # a user's own may draw too
                    returned.append(subject.losses(returned[0], targets))
                outputs.append([tensor.detach() for tensor in structure.tensors_in(returned)])
                drawn = before != user_code.rng_states()
    first, again, *other = outputs
    if not all(map(_equal_but_for_rounding, first, again)):
        return (
            "gives other outputs for the same samples at every pass, expected the same; remove from its forward pass "
            "what changes between calls (a counter, the time, os.urandom)"
        )
    if other and not all(map(torch.equal, first, other[0])):
        return (
            "draws random numbers in evaluation mode, expected the same loss at every pass; "
            f"{_remedy(subject)}draw the noise with the data"
        )
    return ""


def _remedy(subject: Subject) -> str:
    """What to do about the random numbers of a model if they are those of dropout; else ""."""
    try:
        drops = not subject.members and any(call.rate for call in mc_dropout.calls_of(subject))
    except Exception:  # of a user's code
        drops = False
    if not drops:
        return ""
    return (
        "freeze its dropout masks (--mc-dropout 10), switch dropout off (of our models: --model-arg mc_dropout=0), or "
    )


def _equal_but_for_rounding(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors agree to 1e-4 of the largest entry: devices that add in any order are not random."""
    if first.shape != second.shape or not first.is_floating_point():
        return first.shape == second.shape and torch.equal(first, second)
    scale = first.nan_to_num().abs().amax().item() if first.numel() else 0.0
    return bool(torch.allclose(first, second, rtol=0.0, atol=1e-4 * scale, equal_nan=True))


def refuse_training(model: nn.Module) -> None:
    """Reject dropout and batch norm in training mode: random or batch-dependent outputs, statistics that change."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, module in model.named_modules():
        if module.training and isinstance(module, kinds):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is in training mode, expected evaluation mode: "
                "call model.eval() before measuring"
            )


def refuse_batch_size(stored: checkpoint.Checkpoint, spec: Spec, samples: int) -> None:
    """Reject mini-batches of another size than the fixed one of an exported graph."""
    size = stored.batch_size
    if spec.batch_size != size or samples % size:
        raise ValueError(
            f"{stored.path} was exported for mini-batches of exactly {size}, got {samples} samples in mini-batches "
            f"of {spec.batch_size}; give --batch-size {size} and --samples {max(samples - samples % size, size)}, or "
            "export it with a dynamic batch dimension"
        )


def refuse_misfit(subject: Subject) -> None:
    """Reject a model whose inputs or classes do not match the data, by one small forward pass."""
    inputs, targets = subject.example()
    refuse_vocabulary(subject)
    try:
        with subject.evaluating():
            outputs = subject.outputs(inputs)
            if subject.spec is None or subject.spec.logits:
                _refuse_outputs(subject, outputs, targets)
                refuse_probabilities(subject, outputs)
    except (RuntimeError, AssertionError, TypeError, IndexError) as error:
        raise adaptation.misfit(subject, inputs, error) from error


def _refuse_outputs(subject: Subject, outputs: Any, targets: structure.Nested) -> None:
    """Reject outputs that the loss cannot take, or that belong to other classes than those of the data."""
    images = subject.images
    if subject.losses not in MEANINGS:
        return  # a user's own, which has been called
    outputs = structure.logits_in(outputs)
    if images is None or not images.sequences:
        refuse_targets(subject, outputs)
    if next_tokens.of_tokens(subject) and (outputs.dim() == 3 or (images is not None and images.sequences)):
        classes = images.classes if images is not None else 1 + max(int(t.max()) for _, t in subject.batches)
        if outputs.shape[:-1] != targets.shape and (len(outputs), *outputs.shape[2:]) == targets.shape:
            raise ValueError(
                f"the model returns {tuple(outputs.shape)} for targets {tuple(targets.shape)}: the classes of a "
                "position lie second, expected last; return outputs.transpose(1, 2)"
            )
        if outputs.shape[:-1] != targets.shape or outputs.shape[-1] < classes:
            raise ValueError(
                f"the model returns {tuple(outputs.shape)} for sequences {tuple(targets.shape)} of tokens up to "
                f"{classes - 1}, expected (samples, tokens, vocabulary), with a class or a token as the target of each"
            )
    elif subject.losses is not cross_entropy:
        subject.losses(outputs, targets)
    elif subject.dense:
        _refuse_classes(subject, outputs.shape[1])
    elif outputs.dim() != 2 or len(outputs) != len(targets):
        raise ValueError(
            f"the model returns {tuple(outputs.shape)} for {len(targets)} samples, expected (samples, classes); for "
            "other outputs, such as those of every token, give a loss of (outputs, targets) or (outputs, batch), on "
            "the command line --loss file.py:function"
        )
    elif targets.dim() == 1 and not targets.is_floating_point():
        _refuse_classes(subject, outputs.shape[1])


def _refuse_classes(subject: Subject, classes: int) -> None:
    data = subject.batches if isinstance(subject.batches, dataset.BatchList) else subject.images
    assert data is not None
    known = isinstance(data, dataset.Images) and bool(data.mean) and not data.counted
    if (known and data.classes != classes) or data.classes > classes:
        raise ValueError(
            f"the model has {classes} classes and {subject.data.in_words} has {data.classes}; "
            "measure it on data with its own classes (--data)"
        )


def why_no_loss(subject: Subject) -> str:
    """Why loss and accuracy of a subject have no meaning; "" if they have.

    The classifier is not the checkpoint's own, or, for a probe that needs no logits, the outputs do not fit the data.
    """
    if subject.checkpoint is not None and subject.checkpoint.headless:
        return "its classifier is not from the checkpoint: loss and accuracy are meaningless"
    if subject.spec is None or subject.spec.logits:
        return ""
    try:
        refuse_misfit(replace(subject, spec=replace(subject.spec, logits=True)))
    except ValueError as error:
        return f"loss and accuracy have no meaning: {error}"
    return ""


def require_tensor_outputs(subject: Subject) -> None:
    """Reject a loss and a model between which no single tensor stands, which a Gauss-Newton matrix needs."""
    got = "a loss that calls the model" if subject.traits.whole == "both" else ""
    if not got:
        with subject.evaluating():
            outputs = subject.outputs(subject.example()[0])
        got = "" if isinstance(outputs, Tensor) else f"a model that returns a {type(outputs).__name__}"
    if got:
        raise ValueError(
            f"the Gauss-Newton matrix needs a loss of one output tensor, got {got}; give --operator hessian or fisher"
        )


def require_losses_per_sample(subject: Subject) -> None:
    """Reject a loss that gives a mean over the mini-batch where the gradient of every sample is needed."""
    if subject.traits.mean_only:
        raise ValueError(
            "the Fisher matrix is a mean over the gradients of single samples, and the loss returns the mean of a "
            'mini-batch; return one loss per sample (reduction="none"), or give --operator hessian or ggn'
        )


def vocabulary_size(model: nn.Module) -> int | None:
    """Size of the vocabulary that a model's configuration names, else None."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def refuse_vocabulary(subject: Subject) -> None:
    """Reject tokens that a language model does not know."""
    vocabulary, images = vocabulary_size(subject.model), subject.images
    if images is not None and images.sequences and vocabulary is not None and images.classes > vocabulary:
        raise ValueError(
            f"{images.name} has tokens up to {images.classes - 1} and the model's vocabulary ends at {vocabulary - 1}; "
            "measure it on tokens of its own tokenizer"
        )
