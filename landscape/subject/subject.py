"""The subject of a measurement: a model with its weights, a fixed set of mini-batches and the loss on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoints.checkpoint import Checkpoint
from landscape.data.batch_layout import Forward
from landscape.data.dataset import Batches, BatchList, Images, forget_sha256, sha256_of
from landscape.data.masks import are_masks
from landscape.data.structure import Nested, common_length, map_tensors, rows_of
from landscape.subject.losses import (
    MEANINGS,
    OWN,
    OWN_WITHOUT_ACCURACY,
    PER_PIXEL,
    Meaning,
    cross_entropy,
    undefined_accuracy,
)
from landscape.subject.members import MemberForward, positioned, running_alone, without_members
from landscape.subject.networks_in_memory import Network
from landscape.subject.outputs import logits_or_none, outputs_of
from landscape.subject.process_group import SINGLE_PROCESS, ProcessGroup
from landscape.subject.restoration import evaluation_mode, recording_graphs
from landscape.subject.spec import NO_OTHER_SPLIT, Spec, Split
from landscape.subject.weights_cache import WeightsCache

Whole = Literal["", "targets", "both"]


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
    loss_name: str = ""  # the name that `losses` was loaded by; "" for a function made in Python
    # `(split, samples) -> samples`, reads another part of the same data; None for data made in Python
    part: Callable[[Split, int | str], Images | BatchList] | None = field(default=None, repr=False)
    forward: Forward = outputs_of  # gives the outputs that `losses` takes
    # the caller's own module if `model` is a copy of it on another device or in another precision
    original: nn.Module | None = field(default=None, repr=False)
    # networks of the caller's that options of a probe name in place of checkpoint files
    others: Mapping[str, Network] = field(default_factory=dict, repr=False)
    whole: Whole = ""  # what `batch` replaces by the batch as the data set gave it, because the loss asks for it
    needs_graph: bool = False  # the model differentiates inside its forward pass, which needs a graph
    objects: bool = False  # data or loss are objects made in Python, which no other process can load again
    no_accuracy: bool = False  # outputs or targets are no classes, for a user's own loss
    mean_only: bool = False  # the loss gives a mean over the mini-batch, so that it has no error over samples
    coupled: bool = False  # that mean is not the mean of a loss per sample, so that it depends on the batch size
    processes: ProcessGroup = SINGLE_PROCESS  # that share every product over the samples
    cache: WeightsCache = field(default_factory=WeightsCache, init=False, repr=False)  # of `once_per_weights`

    def __post_init__(self) -> None:
        if not hasattr(self.batches, "__getitem__"):
            raise ValueError(
                f"batches is a {type(self.batches).__name__}, expected a sequence that gives the same mini-batches "
                "every time; materialise it once with list(...)"
            )

    def __repr__(self) -> str:  # short: the model and the data themselves would fill many pages
        return f"Subject({self.label}, {type(self.model).__name__}, {self.size:,} parameters, {self.data_in_words})"

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.images) if self.images is not None else sum(map(self.samples, range(len(self.batches))))

    @property
    def images(self) -> Images | None:
        """The data set in memory behind the batches; None for batches made in Python."""
        return self.batches.images if isinstance(self.batches, Batches) else None

    @property
    def _held(self) -> Images | BatchList | None:
        """The samples in memory; None for batches made in Python."""
        return self.batches if isinstance(self.batches, BatchList) else self.images

    @property
    def data_name(self) -> str:
        """The name of the data, as given to `load`."""
        return self._held.name if self._held is not None else "in memory"

    @property
    def data_in_words(self) -> str:
        """The name of the data, for messages."""
        return "the data in memory" if self.data_name == "in memory" else self.data_name

    @property
    def one_part(self) -> bool:
        """Whether the data have no train and test part."""
        return self._held is not None and self._held.one_part

    @property
    def batch_size(self) -> int:
        """Samples per mini-batch; the last one may have fewer."""
        return self.batches.batch_size if isinstance(self.batches, Batches) else self.samples(0)

    def samples(self, i: int) -> int:
        """Samples of mini-batch i; where its structure does not tell, as of packed graphs, the number of losses."""
        if isinstance(self.batches, Batches):
            return min(self.batch_size, len(self.batches.images) - i * self.batch_size)
        if isinstance(self.batches, BatchList):
            known = self.batches.samples(i) if self.mean_only or self.losses in MEANINGS else None
            known = 1 if known is None and self.mean_only else known
        else:
            known = common_length(self.batches[i][1])
        return self._counted[i] if known is None else known

    @cached_property
    def _counted(self) -> list[int]:
        # With a graph, also before it is known whether the model, or its loss, differentiates.
        with torch.enable_grad(), evaluation_mode(self.model):
            return [len(self.losses(self.outputs(inputs), targets)) for inputs, targets in self.each_batch()]

    @property
    def divisible(self) -> bool:
        """Whether every tensor of a mini-batch has a row per sample, so that the mini-batch can be split up."""
        if isinstance(self.batches, Batches):
            return not self.mean_only
        lengths = {i: common_length(self.batch(i)) for i in (0, -1)}
        return not self.mean_only and all(n is not None and n == self.samples(i) for i, n in lengths.items())

    @property
    def reloadable(self) -> bool:
        """Whether its spec suffices to load it again, in another process say; a module made in Python cannot be."""
        named = self.spec is not None and (self.spec.checkpoint is not None or bool(self.spec.model))
        return named and not self.objects

    @property
    def meaning(self) -> Meaning:
        """Units of the loss, which are unknown for a user's loss, and what accuracy counts."""
        return PER_PIXEL if self.dense else MEANINGS.get(self.losses, OWN_WITHOUT_ACCURACY if self.no_accuracy else OWN)

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
        found = self._trainable
        if name := next((name for name, p in found.items() if p.is_complex()), ""):
            raise ValueError(
                f"the parameter {name} is {str(found[name].dtype).removeprefix('torch.')}, expected real numbers; make "
                "torch.view_as_real(weight) the parameter and use torch.view_as_complex of it in the forward pass"
            )
        return found

    @property
    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def size(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in self._trainable.values())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self.model.parameters())).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights, as of real numbers."""
        parameters = list(self.model.parameters())
        return next((p for p in parameters if p.is_floating_point()), parameters[0]).dtype.to_real()

    @property
    def data_sha256(self) -> str:
        """SHA-256 of the samples as they are now.

        Raises:
            ValueError: the batches are others when they are read again.
        """
        return self._sequence_sha256 if self._held is None else self._held.sha256

    @cached_property
    def _sequence_sha256(self) -> str:
        return sha256_of(self.batches)

    @property
    def members(self) -> int:
        """Number of networks with frozen dropout masks whose predictions are averaged; 0: the network as it is."""
        return self.forward.members if isinstance(self.forward, MemberForward) else 0

    def member(self, i: int) -> AbstractContextManager[None]:
        """The context in which forward passes are those of member i alone."""
        return running_alone(self.forward, i)

    def as_is(self) -> Subject:
        """The network as it is, without members; the subject itself if it has none."""
        return replace(self, forward=without_members(self.forward)) if self.members else self

    def batch(self, i: int) -> tuple[Nested, Nested]:
        """Mini-batch i on the model's device, floating-point inputs in the model's precision.

        Of the inputs and the targets, those that `whole` names are the batch as the data set gave it. With members,
        the inputs are `Positioned`.
        """
        inputs, targets = self.batches[i]
        if self.whole:
            targets = self.batches.wholes[i] if isinstance(self.batches, BatchList) else (inputs, targets)
            inputs = targets if self.whole == "both" else inputs
        moved = map_tensors(inputs, self._as_input), map_tensors(targets, self._as_target)
        return (positioned(self, i, moved[0]), moved[1]) if self.members else moved

    def _as_input(self, tensor: Tensor) -> Tensor:
        # Detached, so that a model that asks for the gradient by its input leaves the samples alone.
        return self._moved(tensor, self.dtype if tensor.is_floating_point() else None)

    def _as_target(self, tensor: Tensor) -> Tensor:
        converted = self.losses not in MEANINGS and tensor.is_floating_point()  # our own losses convert by themselves
        return self._moved(tensor, self.dtype if converted else None)

    def _moved(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        device = self.device  # a GPU goes on computing while mini-batches are copied to it
        return tensor.detach().to(device, dtype, non_blocking=device.type != "cpu")

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
        if self.needs_graph:
            return recording_graphs()
        return torch.inference_mode() if self.reloadable else torch.no_grad()

    def outputs(self, inputs: Nested) -> Any:
        """What the model gives for the inputs of a mini-batch, as `losses` takes it."""
        return self.forward(self.model, inputs)

    def right(self, outputs: Any, targets: Nested) -> Tensor:
        """Correctness of every sample, (N,), whose mean is the accuracy; NaN where the loss defines none."""
        return self.losses_and_right(outputs, targets)[1]

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
        with evaluation_mode(self.model):
            return self.losses(self.outputs(inputs), targets).mean()

    def l2(self) -> Tensor:
        """(1/2) sum ||w||^2 over the trainable parameters."""
        return 0.5 * torch.stack([p.square().sum() for p in self.parameters.values()]).sum()

    def objective(self, i: int) -> Tensor:
        """The loss + weight_decay * l2 on mini-batch i, differentiable in the model's parameters."""
        loss = self.loss(i)
        return loss + self.weight_decay * self.l2() if self.weight_decay else loss

    def refresh(self) -> None:
        """Take what the caller may have changed: weights and buffers of a module that the model copies, and samples."""
        if not self.reloadable:  # arrays, and tensors by way of `data`, change without a trace
            vars(self).pop("_sequence_sha256", None)
            if self._held is not None:
                forget_sha256(self._held)
        if self.original is None:
            return
        with torch.no_grad():
            for own, theirs in zip(self.model.buffers(), self.original.buffers(), strict=True):
                own.copy_(theirs)
            for weight, source in zip(self.model.parameters(), self.original.parameters(), strict=True):
                weight.copy_(source)
                weight.requires_grad_(source.requires_grad)

    def rebatched(self, batch_size: int) -> Subject:
        """The same samples in mini-batches of another size."""
        if not isinstance(self.batches, Batches) or self.batches.batch_size == batch_size:
            return self
        spec = replace(self.spec, batch_size=int(batch_size)) if self.spec else None
        return replace(self, batches=replace(self.batches, batch_size=int(batch_size)), spec=spec)

    def other(self, split: Split, samples: int | str) -> Subject:
        """The same model on another split of its data.

        Raises:
            ValueError: the data were made in Python and have no other split.
        """
        if self.part is None:
            raise ValueError(NO_OTHER_SPLIT)
        spec = replace(self.spec, split=split, samples=samples) if self.spec else None
        return self._on(self.part(split, samples).for_device(self.device), spec)

    def rows(self, rows: np.ndarray) -> Subject:
        """The same model on some of its samples."""
        assert self.images is not None
        return self._on(self.images.take(rows), None)

    def first(self, samples: int) -> Subject:
        """The first of the samples, in the same order; all of them for batches made in Python."""
        if self.images is None or samples >= len(self):
            return self
        images = replace(self.images, inputs=self.images.inputs[:samples], targets=self.images.targets[:samples])
        return self._on(images, replace(self.spec, samples=int(samples)) if self.spec else None)

    def _on(self, samples: Images | BatchList, spec: Spec | None) -> Subject:
        if isinstance(samples, BatchList):
            return replace(self, batches=samples, spec=spec)
        in_memory = isinstance(self.batches, Batches)
        batches = replace(self.batches, images=samples) if in_memory else Batches(samples, self.batch_size)  # type: ignore[type-var]
        return replace(self, batches=batches, spec=spec)
