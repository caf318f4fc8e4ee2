"""Save, recompute and restore batch-norm statistics."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from landscape.options import invalid
from landscape.subject.subject import Subject, more_samples

INTERPOLATING = ("auto", "interpolate")  # values of `--bn` between several checkpoints


def recalibration(text: str) -> int:
    """Number of mini-batches from which `--bn` recomputes the statistics at every point; 0 for `frozen`."""
    kind, _, count = text.partition(":")
    if kind == "frozen" and not count:
        return 0
    if kind == "recalibrate" and count.isdigit() and int(count) > 0:
        return int(count)
    raise invalid("bn", text or "nothing", "frozen, or recalibrate:K with at least 1 mini-batch")


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def has_statistics(model: nn.Module) -> bool:
    """Whether the model has batch norm with running statistics."""
    return any(isinstance(module, _BatchNorm) and module.track_running_stats for module in model.modules())


def restore(model: nn.Module, kept: dict[str, Tensor]) -> None:
    """Restore the copies, bit for bit; to autograd, which may hold a graph of the caller's, nothing has changed."""
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])


def dependence(subject: Subject, count: int) -> dict[str, int]:
    """What recomputed statistics depend on beyond weights and data, for a probe's identity; empty if `count` is 0.

    Raises:
        ValueError: there are fewer than `count` mini-batches.
    """
    if count > len(subject.batches):
        raise ValueError(
            f"--bn recalibrate:{count} exceeds the {len(subject.batches)} mini-batches of the samples; "
            + more_samples(subject, f"give at most --bn recalibrate:{len(subject.batches)}", "lower --batch-size")
        )
    return {"batch_size": subject.batch_size} if count else {}


def refresh(subject: Subject, count: int) -> None:
    """Recompute the running statistics as the plain average over the first `count` mini-batches of the subject."""
    norms = [module for module in subject.model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
    try:
        with torch.enable_grad() if subject.traits.needs_graph else torch.no_grad():
            for i in range(count if norms else 0):
                for norm in norms:
                    norm.momentum = 1.0 / (i + 1)  # momentum=None does the same but reads a counter from the device
                subject.outputs(subject.batch(i)[0])
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()
