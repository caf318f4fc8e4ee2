"""Reject targets for which a loss has no meaning, and name the loss or the form of targets that has one."""

from collections.abc import Mapping

from torch import Tensor

from landscape.data.masks import are_masks
from landscape.data.structure import TARGETS
from landscape.subject import losses, spec
from landscape.subject.subject import Subject

SHARE_TOLERANCE = 1e-2  # of the sum of a row of probabilities, which may be stored in half precision


def are_probabilities(targets: Tensor) -> bool:
    """Whether targets are soft: (N, C) of at least two classes, each row non-negative with the sum 1."""
    if not targets.is_floating_point() or targets.dim() != 2 or targets.shape[1] < 2:
        return False
    rows = targets.double()
    return bool(((rows.sum(dim=1) - 1).abs() < SHARE_TOLERANCE).all() & (rows >= 0).all())


def refuse_targets(subject: Subject, outputs: Tensor) -> None:
    """Reject targets that do not fit the loss, given outputs of a few samples.

    Cross-entropy over a single output is always 0, and it needs classes or probabilities as targets; the binary
    cross-entropy needs targets from 0 to 1.

    Raises:
        ValueError: they do not fit.
    """
    targets, name = subject.batches[0][1] if subject.images is None else subject.images.targets, subject.data.in_words
    alone = targets is subject.batches[0][0]  # samples without a target, which a regression may reconstruct
    if not isinstance(targets, Tensor) or (alone and subject.losses is losses.cross_entropy):
        fields = f" (its fields are {', '.join(map(str, targets))})" if isinstance(targets, Mapping) else ""
        raise ValueError(
            f"{name} has no targets{fields}, which the loss needs; give pairs (input, target), a dict with one of "
            f"{', '.join(TARGETS[:4])}, or a loss of (outputs, batch)"
        )
    if subject.losses is losses.bce:
        if not _between_0_and_1(targets):
            low, high = targets.min().item(), targets.max().item()
            one = outputs.shape[1] == 1 if outputs.dim() > 1 else True
            other = "mse" if targets.is_floating_point() or one else "cross-entropy"
            several = ", or let the model return one output per class" if one and other != "cross-entropy" else ""
            raise ValueError(
                f"--loss bce needs targets from 0 to 1, those of {name} lie between {low:g} and {high:g}; give "
                f"--loss {other}{several}"
            )
    elif subject.losses is losses.cross_entropy and (outputs.dim() in (1, 2, 4) or subject.dense):
        if outputs.dim() == 4 or subject.dense:
            reason = _per_pixel(targets, outputs, (subject.spec or spec.Spec()).ignore_index)
        elif outputs[0].numel() == 1:
            reason = _single_output(targets)
        else:
            reason = _several_outputs(targets, outputs.shape[1])
        if reason:
            raise ValueError(
                f"the model returns {tuple(outputs.shape)} and {name} has the targets {_form(targets)}: {reason}"
            )


def _single_output(targets: Tensor) -> str:
    """Why cross-entropy does not fit a model with one output per sample."""
    always, labels = "cross-entropy over one output is always 0", targets[0].numel()
    if labels > 1:
        return f"{always}; let the model return {labels} outputs, as many as the targets have"
    if _between_0_and_1(targets):
        return f"{always}; give --loss bce for labels from 0 to 1, or --loss mse for a regression"
    if targets.is_floating_point():
        return f"{always}; give --loss mse (or l1, huber) for a regression"
    return f"{always}; let the model return one output per class, or give --loss mse for a regression"


def _several_outputs(targets: Tensor, classes: int) -> str:
    """Why cross-entropy over some classes does not fit the targets; "" if it does."""
    soft, shape = targets.is_floating_point(), tuple(targets.shape)
    if (targets.dim() == 1 and not soft) or (shape[1:] == (classes,) and are_probabilities(targets)):
        return ""
    flat = targets.dim() == 1 or shape[1:] == (1,)
    if flat and bool((targets == targets.round()).all()):
        squeeze = "" if targets.dim() == 1 else "[:, 0]"
        return f"cross-entropy needs class numbers (samples,) as integers; return targets{squeeze}.long()"
    if shape[1:] == (classes,) and not soft and are_probabilities(targets.float()):
        return "one-hot integers are no class numbers (samples,); return targets.argmax(1), or targets.float()"
    if shape[1:] == (classes,):
        label = (
            "--loss bce for several labels per sample" if _between_0_and_1(targets) else "--loss mse for a regression"
        )
        what = "rows do not sum to 1" if soft else "they are not class numbers (samples,)"
        return f"{what}, so that cross-entropy has no meaning; give {label}"
    return (
        f"cross-entropy needs class numbers (samples,) or probabilities (samples, {classes}); for a regression let the "
        "model return as many numbers as the targets have, and give --loss mse"
    )


def _per_pixel(targets: Tensor, outputs: Tensor, ignored: int) -> str:
    """Why the cross-entropy of every pixel does not fit outputs or targets; "" if it does."""
    if outputs.dim() != 4:
        return "a class per pixel needs logits (samples, classes, height, width); measure a network for segmentation"
    if outputs.shape[1] == 1:
        binary = "give --loss bce" if _between_0_and_1(targets) else "let the model return one map per class"
        return f"cross-entropy over one output is always 0; {binary}, or give --loss mse for a regression"
    if not are_masks(targets):
        if targets.dim() == 1:
            return (
                "logits per pixel do not fit one class per image; return targets (samples, height, width), or let the "
                "model average over positions: .mean((2, 3))"
            )
        numbers = "targets.argmax(1)" if targets.shape[1:] == outputs.shape[1:] else "targets.long()"
        return (
            f"cross-entropy needs class numbers (samples, height, width) as integers; return {numbers}, or give --loss "
            "mse for a regression"
        )
    if outputs.shape[2:] != targets.shape[1:]:
        height, width = targets.shape[1:]
        return (
            "logits of another resolution than the targets are not resized here, which would change the loss; let the "
            f'model do it: F.interpolate(logits, ({height}, {width}), mode="bilinear")'
        )
    if ignored == spec.Spec.ignore_index < outputs.shape[1]:  # which nobody chose
        return f"{ignored}, which stands for no label, is one of {outputs.shape[1]} classes; give --ignore-index -1"
    return ""


def _between_0_and_1(targets: Tensor) -> bool:
    return bool((targets >= 0).all() & (targets <= 1).all())


def _form(targets: Tensor) -> str:
    return f"{tuple(targets.shape)} {str(targets.dtype).removeprefix('torch.')}"
