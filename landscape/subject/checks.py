"""Reject models that cannot be measured: stochastic, in training mode, or not matching their data."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from landscape.checkpoints import user_code
from landscape.checkpoints.checkpoint import Checkpoint
from landscape.checkpoints.user_code import guarded
from landscape.data.dataset import Images
from landscape.subject.losses import cross_entropy
from landscape.subject.outputs import logits_in, outputs_of
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject
from landscape.subject.targets import refuse_targets
from landscape.subject.weights_cache import once_per_weights


def refuse_stochastic(subject: Subject) -> None:
    """Reject models that are in training mode or stochastic in eval mode; their loss surface would be noise."""
    refuse_training(subject.model)
    if _is_stochastic(subject):
        raise ValueError(
            f"the model ({type(subject.model).__name__}) draws random numbers in evaluation mode, expected the same "
            "loss at every pass; switch its dropout off (of our models: --model-arg mc_dropout=0)"
        )


@once_per_weights
def _is_stochastic(subject: Subject) -> bool:
    """Whether a forward pass changes the state of a random generator and its outputs depend on that state."""
    inputs = subject.batch(0)[0][:2]
    outputs = []
    with torch.inference_mode():
        for seed in (0, 1):
            with user_code.fixed_rng(seed):
                before = user_code.rng_states()
                outputs.append(outputs_of(subject.model, inputs))
                drawn = before != user_code.rng_states()
    return drawn and not torch.equal(*outputs)


def refuse_training(model: nn.Module) -> None:
    """Reject dropout and batch norm in training mode: random or batch-dependent outputs, statistics that change."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, module in model.named_modules():
        if module.training and isinstance(module, kinds):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is in training mode, expected evaluation mode: "
                "call model.eval() before measuring"
            )


def refuse_batch_size(stored: Checkpoint, spec: Spec, samples: int) -> None:
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
    images = subject.images
    assert images is not None
    few = (subject.checkpoint.batch_size if subject.checkpoint else 0) or 2
    inputs, targets = (part[:few] for part in subject.batch(0))
    returned = _returned(subject.model, inputs, images)
    if subject.spec is not None and not subject.spec.logits:
        return
    outputs = logits_in(returned)
    if not images.sequences:
        refuse_targets(subject, outputs)
    if images.sequences and subject.losses is cross_entropy:
        if outputs.shape[:-1] != targets.shape or outputs.shape[-1] < images.classes:
            raise ValueError(
                f"the model returns {tuple(outputs.shape)} for sequences {tuple(targets.shape)} of tokens up to "
                f"{images.classes - 1}, expected (samples, tokens, vocabulary); measure a causal language model on them"
            )
    elif subject.loss_name:
        guarded(f"--loss {subject.loss_name}", lambda: subject.losses(outputs, targets))
    elif outputs.dim() != 2 or len(outputs) != len(targets):
        raise ValueError(
            f"the model returns {tuple(outputs.shape)} for {len(targets)} samples, expected (samples, classes)"
        )
    elif targets.dim() == 1 and not targets.is_floating_point():
        classes = outputs.shape[1]
        named_set = bool(images.mean) and not images.counted
        if (named_set and images.classes != classes) or images.classes > classes:
            raise ValueError(
                f"the model has {classes} classes and {images.name} has {images.classes}; "
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


def vocabulary_size(model: nn.Module) -> int | None:
    """Size of the vocabulary that a model's configuration names, else None."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def _returned(model: nn.Module, inputs: Tensor, images: Images) -> object:
    vocabulary = vocabulary_size(model)
    if images.sequences and vocabulary is not None and images.classes > vocabulary:
        raise ValueError(
            f"{images.name} has tokens up to {images.classes - 1} and the model's vocabulary ends at {vocabulary - 1}; "
            "measure it on tokens of its own tokenizer"
        )
    try:
        with torch.inference_mode():
            return model(inputs)
    except (RuntimeError, AssertionError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"the model fails on inputs of shape {tuple(inputs.shape[1:])} from {images.name} ({reason}); check "
            f"--data, {'--block-size' if images.sequences else '--image-size'} and --model-arg"
        ) from error
