"""The subject of a measurement: a model with its weights, a fixed set of mini-batches and the loss on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints.checkpoint import Checkpoint
from landscape.data.dataset import Batches, BatchList, BatchSource, CallersBatches, Images
from landscape.data.masks import are_masks
from landscape.data.structure import Forward, Nested, common_length, logits_or_none, map_tensors, outputs_of, rows_of
from landscape.options import alternatives
from landscape.subject import networks_in_memory, process_group, restoration
from landscape.subject.losses import (
    MEANINGS,
    OWN,
    OWN_WITHOUT_ACCURACY,
    PER_PIXEL,
    LossTraits,
    Meaning,
    cross_entropy,
    undefined_accuracy,
)
from landscape.subject.members import MemberForward, Positioned, running_alone
from landscape.subject.spec import Spec, Split


@dataclass(frozen=True)
class Origin:
    """Where the model and the samples of a subject come from, beside its spec."""

    # `(split, samples) -> samples`, reads another part of the same data; None for data made in Python
    part: Callable[[Split, int | str], Images | BatchList] | None = None
    # the caller's own module if the model is a copy of it on another device or in another precision
    original: nn.Module | None = None
    # networks of the caller's that options of a probe name in place of checkpoint files
    others: Mapping[str, networks_in_memory.Network] = field(default_factory=dict)
    objects: bool = False  # data or loss are objects made in Python, which no other process can load again


@dataclass(eq=False, repr=False)
class Subject:
    """A loaded model with the mini-batches it is measured on."""

    model: nn.Module  # on the device; in eval mode while it is measured
    # `batches[i]` is always the same `(inputs, targets)`, on the device; either may be a nested structure
    batches: Sequence[tuple[Nested, Nested]]
    losses: Callable[[Any, Any], Tensor] = cross_entropy  # `(outputs, targets) -> (N,)`, the data term per sample
    weight_decay: float = 0.0  # see `objective`
    label: str = "model"  # readable name
    spec: Spec | None = None  # how it was loaded; None for a subject made in Python
    checkpoint: Checkpoint | None = None  # what the checkpoint file holds beside the weights
    seed: int = 0
    forward: Forward = outputs_of  # gives the outputs that `losses` takes
    traits: LossTraits = field(default_factory=LossTraits)
    origin: Origin = field(default_factory=Origin)
    processes: process_group.ProcessGroup = process_group.SINGLE_PROCESS  # that share every product over the samples

    def __post_init__(self) -> None:
        if not hasattr(self.batches, "__getitem__"):
            raise ValueError(
                f"batches is a {type(self.batches).__name__}, expected a sequence that gives the same mini-batches "
                "every time; materialise it once with list(...)"
            )

    def __repr__(self) -> str:  # short: the model and the data themselves would fill many pages
        return f"Subject({self.label}, {type(self.model).__name__}, {self.size:,} parameters, {self.data.in_words})"

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.images) if self.images is not None else sum(map(self.samples, range(len(self.batches))))

    @cached_property
    def data(self) -> BatchSource:
        """The mini-batches with what is known of the data they are from."""
        return self.batches if isinstance(self.batches, BatchSource) else CallersBatches(self.batches)

    @property
    def images(self) -> Images | None:
        """The data set in memory behind the batches; None for batches made in Python."""
        return self.data.images

    @property
    def batch_size(self) -> int:
        """Samples per mini-batch; the last one may have fewer."""
        return self.batches.batch_size if isinstance(self.batches, Batches) else self.samples(0)

    def samples(self, i: int) -> int:
        """Samples of mini-batch i; where its structure does not tell, as of packed graphs, the number of losses."""
        if isinstance(self.batches, Batches):
            return min(self.batch_size, len(self.batches.images) - i * self.batch_size)
        if isinstance(self.batches, BatchList):
            known = self.batches.samples(i) if self.traits.mean_only or self.losses in MEANINGS else None
            known = 1 if known is None and self.traits.mean_only else known
        else:
            known = common_length(self.batches[i][1])
        return _counted_losses(self)[i] if known is None else known

    @property
    def divisible(self) -> bool:
        """Whether every tensor of a mini-batch has a row per sample, so that the mini-batch can be split up."""
        if isinstance(self.batches, Batches):
            return not self.traits.mean_only
        lengths = {i: common_length(self.batch(i)) for i in (0, -1)}
        return not self.traits.mean_only and all(n is not None and n == self.samples(i) for i, n in lengths.items())

    @property
    def reloadable(self) -> bool:
        """Whether its spec suffices to load it again, in another process say; a module made in Python cannot be."""
        named = self.spec is not None and (self.spec.checkpoint is not None or bool(self.spec.model))
        return named and not self.origin.objects

    @property
    def meaning(self) -> Meaning:
        """Units of the loss, which are unknown for a user's loss, and what accuracy counts."""
        return (
            PER_PIXEL
            if self.dense
            else MEANINGS.get(self.losses, OWN_WITHOUT_ACCURACY if self.traits.no_accuracy else OWN)
        )

    @cached_property
    def dense(self) -> bool:
        """Whether the loss is the cross-entropy of the class of every pixel."""
        by_class = self.losses is cross_entropy
        return by_class and are_masks(self.images.targets if self.images is not None else self.batches[0][1])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, as they are now; tied ones appear once, frozen ones not at all.

        Raises:
            ValueError: one is complex, which directions and curvature do not cover.
        """
        found = _trainable(self)
        if name := next((name for name, p in found.items() if p.is_complex()), ""):
            raise ValueError(
                f"the parameter {name} is {str(found[name].dtype).removeprefix('torch.')}, expected real numbers; make "
                "torch.view_as_real(weight) the parameter and use torch.view_as_complex of it in the forward pass"
            )
        return found

    @property
    def size(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in _trainable(self).values())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self.model.parameters())).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights, as of real numbers."""
        first = next(iter(self.model.parameters()))
        return next((p for p in self.model.parameters() if p.is_floating_point()), first).dtype.to_real()

    @property
    def members(self) -> int:
        """Number of networks with frozen dropout masks whose predictions are averaged; 0: the network as it is."""
        return self.forward.members if isinstance(self.forward, MemberForward) else 0

    def member(self, i: int) -> AbstractContextManager[None]:
        """The context in which forward passes are those of member i alone."""
        return running_alone(self.forward, i)

    def batch(self, i: int) -> tuple[Nested, Nested]:
        """Mini-batch i on the model's device, floating-point inputs in the model's precision.

        Of the inputs and the targets, those that `traits.whole` names are the batch as the data set gave it. With
        members, the inputs are `Positioned`.
        """
        inputs, targets = self.batches[i]
        if whole := self.traits.whole:
            targets = self.batches.wholes[i] if isinstance(self.batches, BatchList) else (inputs, targets)
            inputs = targets if whole == "both" else inputs
        converted = self.losses not in MEANINGS  # our own losses convert their targets by themselves
        inputs = map_tensors(inputs, partial(_moved, self.device, self.dtype))
        targets = map_tensors(targets, partial(_moved, self.device, self.dtype if converted else None))
        if self.members:
            by_size = isinstance(self.batches, Batches)
            first = i * self.batch_size if by_size else sum(map(self.samples, range(i)))
            inputs = Positioned(inputs, torch.arange(first, first + self.samples(i), device=self.device))
        return inputs, targets

    def example(self) -> tuple[Nested, Nested]:
        """The first two samples, or as many as the model takes; the first mini-batch as it is where a loader formed it.

        Rows of a padded mini-batch do not always make a smaller one: a model may shorten it to its longest sequence.
        """
        inputs, targets = self.batch(0)
        few = slice((self.checkpoint.batch_size if self.checkpoint else 0) or 2)
        split = not isinstance(self.batches, BatchList) and self.divisible
        return (rows_of(inputs, few), rows_of(targets, few)) if split else (inputs, targets)

    def each_batch(self) -> Iterator[tuple[Nested, Nested]]:
        """Every mini-batch, as `batch` gives it."""
        return (self.batch(i) for i in range(len(self.batches)))

    def evaluating(self) -> AbstractContextManager[object]:
        """The context of forward passes without a backward pass: no graph is recorded unless the model needs one.

        The caller's own module may keep tensors of a pass, which its training could not use if made in inference mode.
        """
        if self.traits.needs_graph:
            return restoration.recording_graphs()
        return torch.inference_mode() if self.reloadable else torch.no_grad()

    def outputs(self, inputs: Nested) -> Any:
        """What the model gives for the inputs of a mini-batch, as `losses` takes it."""
        return self.forward(self.model, inputs)

    def losses_and_right(self, outputs: Any, targets: Nested) -> tuple[Tensor, Tensor]:
        """Loss and correctness of every sample, (N,) each."""
        losses = self.losses(outputs, targets)
        logits = logits_or_none(outputs)
        if logits is None or not isinstance(targets, Tensor) or self.meaning.right is undefined_accuracy:
            return losses, torch.full_like(losses, torch.nan)
        right = self.meaning.right(logits, targets)  # of tokens with a loss each, say, there is none per loss
        return losses, right if right.shape == losses.shape else torch.full_like(losses, torch.nan)

    def loss(self, i: int) -> Tensor:
        """The data term on mini-batch i: mean over its samples."""
        inputs, targets = self.batch(i)
        with restoration.evaluation_mode(self.model):
            return self.losses(self.outputs(inputs), targets).mean()

    def objective(self, i: int) -> Tensor:
        """The loss + weight_decay * (1/2) ||w||^2 on mini-batch i, differentiable in the model's parameters."""
        loss = self.loss(i)
        return loss + self.weight_decay * l2_of(self) if self.weight_decay else loss


def more_samples(subject: Subject, *others: str) -> str:
    """What to do where there are too few samples: more of them, unless all are used already, or something else."""
    all_used = 0 < subject.data.available <= len(subject)
    ways = [*others, *([] if all_used else ["raise --samples"])]
    return alternatives(ways) if ways else f"{subject.data.in_words} has no more"


def with_traits(subject: Subject, **known: Any) -> Subject:
    """The subject with more known of its loss, `LossTraits`."""
    return replace(subject, traits=replace(subject.traits, **known))


def l2_of(subject: Subject) -> Tensor:
    """(1/2) sum ||w||^2 over the trainable parameters."""
    return 0.5 * torch.stack([p.square().sum() for p in subject.parameters.values()]).sum()


def _trainable(subject: Subject) -> dict[str, nn.Parameter]:
    return {name: p for name, p in subject.model.named_parameters() if p.requires_grad}


def _counted_losses(subject: Subject) -> list[int]:
    """How many losses every mini-batch has; computed once."""
    known: dict[str, Any] = vars(subject)
    if "_counts" not in known:
        # With a graph, also before it is known whether the model, or its loss, differentiates.
        with torch.enable_grad(), restoration.evaluation_mode(subject.model):
            known["_counts"] = [len(subject.losses(subject.outputs(x), y)) for x, y in subject.each_batch()]
    return known["_counts"]  # type: ignore[no-any-return]


def _moved(device: torch.device, dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
    """A tensor on a device, floating-point numbers in a precision; a GPU goes on computing while it is copied there."""
    # Detached, so that a model that asks for the gradient by its input leaves the samples alone.
    dtype = dtype if tensor.is_floating_point() else None
    return tensor.detach().to(device, dtype, non_blocking=device.type != "cpu")
