"""The subject of a measurement: a model with its weights, a fixed set of mini-batches and the loss on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoints.checkpoint import Checkpoint, state_dict_sha256
from landscape.data.dataset import Batches, Images
from landscape.subject.losses import MEANINGS, Meaning, cross_entropy
from landscape.subject.networks_in_memory import Network
from landscape.subject.outputs import outputs_of
from landscape.subject.restoration import evaluation_mode
from landscape.subject.spec import Spec, Split
from landscape.subject.weights_cache import WeightsCache


@dataclass(eq=False)
class Subject:
    """A loaded model with the mini-batches it is measured on."""

    model: nn.Module  # on the device; in eval mode while it is measured
    batches: Sequence[tuple[Tensor, Tensor]]  # `batches[i]` is always the same `(inputs, targets)`, on the device
    losses: Callable[[Tensor, Tensor], Tensor] = cross_entropy  # `(outputs, targets) -> (N,)`, the data term per sample
    weight_decay: float = 0.0  # see `objective`
    label: str = "model"  # readable name
    spec: Spec | None = None  # how it was loaded; None for a subject made in Python
    checkpoint: Checkpoint | None = None  # what the checkpoint file holds beside the weights
    seed: int = 0
    loss_name: str = ""  # the name that `losses` was loaded by; "" for a function made in Python
    # `(split, samples) -> Images`, reads another part of the same data; None for data made in Python
    part: Callable[[Split, int | str], Images] | None = field(default=None, repr=False)
    # the caller's own module if `model` is a copy of it on another device or in another precision
    original: nn.Module | None = field(default=None, repr=False)
    # networks of the caller's that options of a probe name in place of checkpoint files
    others: Mapping[str, Network] = field(default_factory=dict, repr=False)
    # values that follow from the weights, see `once_per_weights`
    cache: WeightsCache = field(default_factory=WeightsCache, init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.batches, "__getitem__"):
            raise ValueError(
                f"batches is a {type(self.batches).__name__}, expected a sequence that gives the same mini-batches "
                "every time; materialise it once with list(...)"
            )

    def __len__(self) -> int:
        """Number of samples."""
        return sum(len(targets) for _, targets in self.batches) if self.images is None else len(self.images)

    @property
    def images(self) -> Images | None:
        """The data set in memory behind the batches; None for batches made in Python."""
        return self.batches.images if isinstance(self.batches, Batches) else None

    @property
    def batch_size(self) -> int:
        """Samples per mini-batch; the last one may have fewer."""
        return self.batches.batch_size if isinstance(self.batches, Batches) else len(self.batches[0][1])

    @property
    def reloadable(self) -> bool:
        """Whether its spec suffices to load it again, in another process say; a module made in Python cannot be."""
        return self.spec is not None and (self.spec.checkpoint is not None or bool(self.spec.model))

    @property
    def meaning(self) -> Meaning:
        """Units of the loss, which are unknown for a user's loss, and what accuracy counts."""
        return MEANINGS.get(self.losses, Meaning("loss"))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, as they are now; tied ones appear once, frozen ones not at all."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def size(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self.model.parameters())).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return next(iter(self.model.parameters())).dtype

    @cached_property
    def data_sha256(self) -> str:
        """SHA-256 of the samples.

        Raises:
            ValueError: the batches are others when they are read again.
        """
        if self.images is not None:
            return self.images.sha256
        digests = {
            state_dict_sha256({f"{i}/{j}": t for i in range(len(self.batches)) for j, t in enumerate(self.batches[i])})
            for _ in range(2)
        }
        if len(digests) > 1:
            raise ValueError(
                f"batches ({type(self.batches).__name__}) gives others when it is read again, expected the same every "
                "time; materialise it once with list(...)"
            )
        return digests.pop()

    def batch(self, i: int) -> tuple[Tensor, Tensor]:
        """Mini-batch i on the model's device, floating-point inputs in the model's precision."""
        inputs, targets = self.batches[i]
        inputs = inputs.to(self.device, self.dtype if inputs.is_floating_point() else None)
        return inputs, targets.to(self.device)

    def each_batch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every mini-batch, as `batch` gives it."""
        return (self.batch(i) for i in range(len(self.batches)))

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Correctness of every sample, (N,), whose mean is the accuracy; NaN where the loss defines none."""
        return self.meaning.right(outputs, targets)

    def loss(self, i: int) -> Tensor:
        """The data term on mini-batch i: mean over its samples."""
        inputs, targets = self.batch(i)
        with evaluation_mode(self.model):
            return self.losses(outputs_of(self.model, inputs), targets).mean()

    def l2(self) -> Tensor:
        """(1/2) sum ||w||^2 over the trainable parameters."""
        return 0.5 * torch.stack([p.square().sum() for p in self.parameters.values()]).sum()

    def objective(self, i: int) -> Tensor:
        """The loss + weight_decay * l2 on mini-batch i, differentiable in the model's parameters."""
        loss = self.loss(i)
        return loss + self.weight_decay * self.l2() if self.weight_decay else loss

    def refresh(self) -> None:
        """Copy the present weights and buffers of the caller's module, if the model is a copy of it."""
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
            raise ValueError("the subject's data have no other split; load it with landscape.load(..., data=...)")
        images = self.part(split, samples).to(self.device)
        return self._on(images, replace(self.spec, split=split, samples=samples) if self.spec else None)

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

    def _on(self, images: Images, spec: Spec | None) -> Subject:
        in_memory = isinstance(self.batches, Batches)
        batches = replace(self.batches, images=images) if in_memory else Batches(images, self.batch_size)  # type: ignore[type-var]
        return replace(self, batches=batches, spec=spec)
