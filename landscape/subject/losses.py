"""Losses per sample, the data term of the objective: by name, or from a user's file."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from landscape.checkpoints.user_code import import_callable, refuse_file_alone
from landscape.data.masks import are_masks
from landscape.data.structure import Nested, tensors_in
from landscape.discovery.operation_mode import OperationMode
from landscape.options import counted, invalid
from landscape.probe import Quantity
from landscape.subject.precision import at_least_single, exact


def loss_gradients(loss: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a loss by tensors; zeros by those that it does not depend on.

    Raises:
        ValueError: the model recomputes its activations in a way that has no such gradient.
    """
    try:
        return torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(
            "the model recomputes its activations by torch.utils.checkpoint with use_reentrant=True, which gives no "
            "gradient by given tensors; use use_reentrant=False, or switch it off while measuring"
        ) from error


def reduction(function: Callable[[Any, Any], Any], first: Any, second: Nested, *, calls_model: bool = False) -> str:
    """The reduction (`none`, `sum`, `mean`) of the call of PyTorch that returns the loss; "" where none does.

    Of a loss that calls the model, whose layers broadcast as they need, the tensors of the batch alone are watched.

    Raises:
        UserWarning: PyTorch makes N x N losses of N outputs and N targets.
    """
    pairs = _Pairs({tensor.data_ptr() for tensor in tensors_in(second)} if calls_model else None)
    calls = _Calls()
    try:
        with pairs, calls:
            found = function(first, second)
    except Exception:  # a loss that works unwatched
        return ""
    if pairs.met:
        raise UserWarning(pairs.met)
    return next((how for value, how in calls.returned if value is found), "")


class _Pairs(OperationMode):
    """Notices an elementwise operation of tensors (N, 1) and (N,)."""

    def __init__(self, watched: set[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met, self._watched = "", watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        n = len(result) if isinstance(result, Tensor) and result.dim() == 2 else 0
        if n > 1 and result.shape == (n, n):
            tensors = [one for one in args if isinstance(one, Tensor)]
            flat = [one for one in tensors if one.shape == (n,)]
            if self._watched is not None:
                flat = [one for one in flat if one.data_ptr() in self._watched]
            if flat and any(one.shape == (n, 1) for one in tensors):
                self.met = f"shapes ({n}, 1) and ({n},) become ({n}, {n})"
        return result


class _Calls(TorchFunctionMode):
    """Keeps what each call of PyTorch returned that has a reduction, and which."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[tuple[Tensor, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        how = (kwargs or {}).get("reduction")
        if how is None and getattr(func, "__name__", "") == "sum" and isinstance(result, Tensor) and not result.dim():
            how = "sum"
        if isinstance(how, str):
            self.returned.append((result, how))
        return result


Losses = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (N,)
IGNORED = -100  # target of a token without a loss, as of F.cross_entropy and transformers; so is every negative one


@dataclass(frozen=True)
class LossTraits:
    """What is known of the loss of a subject, and of the forward pass before it, beside the function itself."""

    name: str = ""  # by which it was loaded; "" for a function made in Python
    whole: Literal["", "targets", "both"] = ""  # what it takes as the batch that the data set gave
    needs_graph: bool = False  # the model differentiates inside its forward pass, which needs a graph
    no_accuracy: bool = False  # outputs or targets are no classes, for a user's own loss
    mean_only: bool = False  # it gives a mean over the mini-batch, so that it has no error over samples
    coupled: bool = False  # that mean is not the mean of a loss per sample, so that it depends on the batch size


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy from log-sum-exp, (N,): of logits (N, classes) and class indices (N,) or soft targets (N, classes).

    For a sequence, logits (N, tokens, vocabulary) and the next tokens (N, tokens), the mean over its tokens that have a
    target: each sequence weighs the same, however many these are. For dense prediction, logits (N, classes, H, W) and
    classes (N, H, W), likewise the mean over the labelled pixels of each image. Negative targets, such as -100, have no
    label.
    """
    logits = exact(outputs)
    if outputs.dim() == 4:
        # Not F.cross_entropy, whose two-dimensional form lacks derivatives that curvature needs under a function
        # transform.
        logarithms = logits.log_softmax(dim=1).gather(1, targets.clamp(min=0).long().unsqueeze(1)).squeeze(1)
        labelled = targets >= 0
        losses = -torch.where(labelled, logarithms, 0.0).flatten(1).sum(dim=1) / labelled.flatten(1).sum(dim=1)
    elif outputs.dim() == 3:
        wanted = with_ignored(targets).flatten()
        every = F.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=IGNORED, reduction="none")
        losses = mean_over_labelled(every, targets)
    else:
        wanted = targets.to(logits.dtype) if targets.is_floating_point() else targets.long()
        losses = F.cross_entropy(logits, wanted, reduction="none")
    return losses.to(at_least_single(outputs))


def with_ignored(targets: Tensor) -> Tensor:
    """Targets of tokens as int64, with `IGNORED` in place of every negative one."""
    return targets.long().masked_fill(targets < 0, IGNORED)


def mean_over_labelled(losses: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of every sequence, (N,), over its tokens with a target; the losses of the others are 0.

    `losses` has one entry per token of `targets` (N, tokens).
    """
    return losses.view(targets.shape).sum(dim=1) / (targets >= 0).sum(dim=1)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error per sample, (N,), mean over its outputs."""
    return F.mse_loss(*_rows(outputs, targets), reduction="none").mean(dim=1)


def l1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute error per sample, (N,), mean over its outputs."""
    return F.l1_loss(*_rows(outputs, targets), reduction="none").mean(dim=1)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber loss per sample, (N,), mean over its outputs: e^2/2 up to |e| = 1, then |e| - 1/2 (delta = 1)."""
    return F.huber_loss(*_rows(outputs, targets), reduction="none").mean(dim=1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits per sample, (N,), mean over its labels; for several labels per sample."""
    logits, wanted = _rows(exact(outputs), targets)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(dim=1).to(at_least_single(outputs))


def _rows(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets with one row per sample; sizes that differ are an error, as PyTorch would broadcast one."""
    if outputs.numel() != targets.numel():
        raise ValueError(
            f"the model returns {tuple(outputs.shape)} for targets {tuple(targets.shape)}, expected a number for each"
        )
    return outputs.reshape(len(outputs), -1), targets.to(outputs.dtype).reshape(len(outputs), -1)


def class_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether each sample's largest logit is that of its class, (N,); for a sequence, the share of such tokens.

    Tokens whose target is no class, negative or beyond the outputs, are padding and do not count. For dense prediction,
    the share of the labelled pixels, likewise: a loss of one's own may leave out a number such as 255.

    NaN if the targets are not classes.
    """
    pixels = outputs.dim() == 4 and are_masks(targets) and outputs.shape[2:] == targets.shape[1:]
    if pixels or (outputs.dim() == 3 and not targets.is_floating_point() and targets.shape == outputs.shape[:2]):
        logits = outputs if pixels else outputs.transpose(1, 2)
        hits = (logits.argmax(dim=1) == targets).flatten(1).double().sum(dim=1)  # of padding, none is predicted
        return hits / ((targets >= 0) & (targets < logits.shape[1])).flatten(1).sum(dim=1)
    if outputs.dim() != 2 or outputs.shape[1] < 2 or (targets.is_floating_point() and targets.shape != outputs.shape):
        return undefined_accuracy(outputs, targets)
    if not targets.is_floating_point() and targets.dim() != 1:
        return undefined_accuracy(outputs, targets)
    right = outputs.argmax(dim=1) == class_indices(targets)
    if not targets.is_floating_point():
        return right
    shares = ((targets.sum(dim=1) - 1).abs() < 1e-3) & (targets >= 0).all(dim=1)  # other real numbers are no classes
    return torch.where(shares, right.double(), torch.nan)


def class_indices(targets: Tensor) -> Tensor:
    """Class indices (N,) of targets that are class indices, or soft targets (N, classes)."""
    return targets.argmax(dim=1) if targets.is_floating_point() else targets


def label_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of a sample's labels that are predicted, (N,): the logit is above 0 exactly if the target is above 1/2."""
    logits, wanted = _rows(outputs, targets)
    return ((logits > 0) == (wanted > 0.5)).double().mean(dim=1)


def undefined_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """NaN for every sample, (N,): the loss defines no correctness."""
    return torch.full((len(targets),), torch.nan, device=outputs.device)


@dataclass(frozen=True)
class Meaning:
    """Units of a loss, and the accuracy that belongs to it."""

    units: str  # of the loss
    right: Losses = class_accuracy  # (outputs, targets) -> (N,), correctness of every sample; its mean is the accuracy
    accuracy: str = ""  # what the accuracy counts; "" for the share of samples whose class is the most probable one

    def of_accuracy(self, long_name: str, dims: tuple[str, ...] = (), bounds: str = "", error: str = "") -> Quantity:
        """A quantity that is an accuracy or a difference of two; its name says what is counted, or that nothing is."""
        units = "undefined" if self.right is undefined_accuracy else "1"
        words = f"{long_name} ({self.accuracy})" if self.accuracy else long_name
        return Quantity(words, units, dims, bounds=bounds, error=error)

    @property
    def bounds(self) -> str:
        """Those of the loss: a likelihood in nats is not below 0; a loss of one's own may be."""
        return "positive" if self.units == "nats" else ""


CLASSIFICATION = Meaning("nats")
PER_PIXEL = Meaning("nats", class_accuracy, "share of an image's labelled pixels whose class is the most probable one")
OWN = Meaning("loss")  # of a user's loss, whose units are unknown
OWN_WITHOUT_ACCURACY = Meaning("loss", undefined_accuracy, "none: outputs and targets are not one class per sample")
NAMES: Mapping[str, Losses] = {
    "cross-entropy": cross_entropy, "nll": cross_entropy, "mse": mse, "l1": l1, "huber": huber, "bce": bce,
    "bce-probabilities": bce,
}  # fmt: skip
NONE = "none: a regression has no classes"
MEANINGS: Mapping[Losses, Meaning] = {
    cross_entropy: CLASSIFICATION,
    mse: Meaning("squared error", undefined_accuracy, NONE),
    l1: Meaning("absolute error", undefined_accuracy, NONE),
    huber: Meaning("Huber loss", undefined_accuracy, NONE),
    bce: Meaning("nats", label_accuracy, "share of a sample's labels on their side of 1/2"),
}


@dataclass(frozen=True)
class Loss:
    """A loss, and what it is called with."""

    function: Callable[[Any, Any], Any]
    name: str = ""  # as given to `load`; "" for the default and for functions made in Python
    own: bool = False  # a user's function, which takes what the model returns as it is
    takes_model: bool = False  # called with (model, batch) instead of (outputs, ...)
    takes_batch: bool = False  # its second argument is the whole batch instead of the targets
    # of one of PyTorch's own losses that returns a mean: the same loss without it, one number per output
    unreduced: Callable[[Any, Any], Any] | None = None
    per_output: bool = False  # it returns one number per output, whose mean is the loss of a sample


DEFAULT = Loss(cross_entropy)
MODEL_NAMES = ("model", "net", "network", "module")  # names of a first parameter that asks for the model
BATCH_NAMES = ("batch",)  # names of a second parameter that asks for the whole batch


def loss_of(spec: str | Callable[[Any, Any], Any]) -> Loss:
    """The loss of `--loss` or `loss=`: one of `NAMES`, `file.py:callable`, `module:callable` or a callable.

    A callable takes (outputs, targets) of a mini-batch, or what the names of its parameters ask for: (model, batch) or
    (outputs, batch), the batch as the data set gives it. It returns one loss per sample, or their mean.

    Raises:
        OptionError: there is no loss of that name.
        FileNotFoundError, ValueError: the callable cannot be loaded.
    """
    if not isinstance(spec, str):
        name, function = "", spec
    elif not spec:
        return DEFAULT
    elif spec in NAMES:
        return Loss(NAMES[spec], spec)
    else:
        refuse_file_alone("loss", spec)
        if ":" not in spec:
            raise invalid("loss", spec, f"{', '.join(NAMES)}, or file.py:callable")
        name, function = spec, import_callable(spec)
    known = next((key for key, losses in NAMES.items() if losses is function), None)
    if known is not None:
        return Loss(function, "" if function is cross_entropy else known)
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return Loss(function, name, own=True)
    given = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_model = bool(given) and given[0] in MODEL_NAMES
    takes_batch = takes_model or (len(given) > 1 and given[1] in BATCH_NAMES)
    return Loss(function, name, True, takes_model, takes_batch, *_reduction_of(function))


def _reduction_of(function: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any] | None, bool]:
    """Of one of PyTorch's losses that returns a mean the same without it, and whether it has none already."""
    inner, given = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    if isinstance(function, nn.Module) and type(function).__module__ == "torch.nn.modules.loss":
        reduction = getattr(function, "reduction", "")
        bare: Any = copy.copy(function)
        bare.reduction = "none"
    elif getattr(inner, "__module__", "") == F.__name__ and "reduction" in inspect.signature(inner).parameters:
        reduction = given.get("reduction", inspect.signature(inner).parameters["reduction"].default)
        bare = wraps(inner)(partial(inner, **{**given, "reduction": "none"}))
    else:
        return None, False
    return (bare, False) if reduction == "mean" else (None, reduction == "none")


def per_sample(loss: Loss, found: Any, samples: int | None) -> Tensor:
    """What a user's loss returned, as one loss per sample (N,); a mean stands for each of the samples.

    Raises:
        ValueError: it is neither.
    """
    what = f"--loss {loss.name}" if loss.name else "the loss"
    if isinstance(found, Tensor) and loss.per_output and found.dim() > 1 and samples in (None, len(found)):
        return found.flatten(1).mean(dim=1)
    if isinstance(found, Tensor) and found.dim() == 0:
        return found.expand(samples or 1)
    if isinstance(found, Tensor) and found.dim() >= 1 and found.numel() == len(found) and samples in (None, len(found)):
        return found.flatten()  # (N, 1) of targets (N, 1)
    got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    count = f" for {counted(samples, 'sample')}" if samples else ""
    size = f", ({samples},)" if samples else ""
    raise ValueError(
        f'{what} returned {got}{count}, expected one loss per sample{size}; give torch\'s losses reduction="none" and '
        "take the mean over the other dimensions: .flatten(1).mean(1)"
    )
