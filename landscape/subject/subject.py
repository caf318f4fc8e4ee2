"""What is measured: a model with its weights, a fixed set of mini-batches and the loss on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoints import checkpoint as checkpoints
from landscape.checkpoints.checkpoint import Checkpoint
from landscape.checkpoints.user_code import spec_sha256
from landscape.data.dataset import Batches, Images
from landscape.models import providers
from landscape.subject.losses import Meaning, cross_entropy, meaning_of
from landscape.subject.spec import Spec, Split

T = TypeVar("T")


@dataclass(eq=False)
class Subject:
    """A loaded model with the mini-batches it is measured on.

    Args:
        model: in eval mode, on the device.
        batches: `batches[i]` is always the same `(inputs, targets)`, on the device.
        losses: `(outputs, targets) -> (N,)`, the data term per sample.
        weight_decay: see `objective`.
        label: readable name.
        spec: how to load it again; None for a module made in Python.
        checkpoint: what the file said.
        loss_name: what `losses` was named by; "" for a function made in Python.
        part: `(split, samples) -> Images`, how to read another part of the same data; None for data made in Python.
    """

    model: nn.Module
    batches: Sequence[tuple[Tensor, Tensor]]
    losses: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    weight_decay: float = 0.0
    label: str = "model"
    spec: Spec | None = None
    checkpoint: Checkpoint | None = None
    seed: int = 0
    loss_name: str = ""
    part: Callable[[Split, int | str], Images] | None = field(default=None, repr=False)
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.batches, "__getitem__"):
            raise ValueError(
                f"batches is a {type(self.batches).__name__}, expected a sequence that gives the same mini-batches "
                "every time; materialise it once with list(...)"
            )

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Something that follows from this subject alone, made at the first request."""
        if key not in self._made:
            self._made[key] = make()
        return cast(T, self._made[key])

    def __len__(self) -> int:
        """Number of samples."""
        return sum(len(targets) for _, targets in self.batches) if self.images is None else len(self.images)

    @property
    def images(self) -> Images | None:
        """The resident samples behind the batches."""
        return self.batches.images if isinstance(self.batches, Batches) else None

    @property
    def meaning(self) -> Meaning:
        """What loss and accuracy stand for."""
        return meaning_of(self.losses)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, tied ones once; as they are now, frozen ones left out."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def size(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.model.parameters())).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return next(iter(self.model.parameters())).dtype

    def batch(self, i: int) -> tuple[Tensor, Tensor]:
        """Mini-batch i on the model's device, floating-point inputs in the model's precision."""
        inputs, targets = self.batches[i]
        inputs = inputs.to(self.device, self.dtype if inputs.is_floating_point() else None)
        return inputs, targets.to(self.device)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What accuracy is the mean of, (N,), see `Meaning`; NaN where the loss knows no right and wrong."""
        return self.meaning.right(outputs, targets)

    def loss(self, i: int) -> Tensor:
        """The data term on mini-batch i: mean over its samples."""
        inputs, targets = self.batch(i)
        return self.losses(outputs_of(self.model, inputs), targets).mean()

    def l2(self) -> Tensor:
        """(1/2) sum ||w||^2 over the trainable parameters."""
        return 0.5 * torch.stack([p.square().sum() for p in self.parameters.values()]).sum()

    def objective(self, i: int) -> Tensor:
        """The loss + weight_decay * l2 on mini-batch i, differentiable in the model's parameters."""
        loss = self.loss(i)
        return loss + self.weight_decay * self.l2() if self.weight_decay else loss

    @cached_property
    def intact(self) -> tuple[Tensor, Tensor]:
        """Loss and correctness of every sample with the model as it is, (N,) float64 on the CPU."""
        return per_sample(self)

    def rebatched(self, batch_size: int) -> Subject:
        """The same samples in mini-batches of another size."""
        if not isinstance(self.batches, Batches) or self.batches.batch_size == batch_size:
            return self
        spec = replace(self.spec, batch_size=int(batch_size)) if self.spec else None
        return replace(self, batches=replace(self.batches, batch_size=int(batch_size)), spec=spec)

    def other(self, split: Split, samples: int | str) -> Subject:
        """The same model on another part of its data.

        Raises:
            ValueError: the data were made in Python and have no other part.
        """
        if self.part is None:
            raise ValueError("the subject's data have no other split; load it with landscape.load(..., data=...)")
        images = self.part(split, samples).to(self.device)
        return self._on(images, replace(self.spec, split=split, samples=samples) if self.spec else None)

    def rows(self, rows: np.ndarray) -> Subject:
        """The same model on some of its samples."""
        assert self.images is not None
        return self._on(self.images.take(rows), None)

    def _on(self, images: Images, spec: Spec | None) -> Subject:
        known = isinstance(self.batches, Batches)
        batches = replace(self.batches, images=images) if known else Batches(images, self.batch_size)  # type: ignore[type-var]
        return replace(self, batches=batches, spec=spec)

    def first(self, samples: int) -> Subject:
        """The first of the samples, in the same order; all of them where they are not resident."""
        if not isinstance(self.batches, Batches) or samples >= len(self):
            return self
        images = replace(self.batches.images, inputs=self.batches.images.inputs[:samples],
                         targets=self.batches.images.targets[:samples])  # fmt: skip
        spec = replace(self.spec, samples=int(samples)) if self.spec else None
        return replace(self, batches=replace(self.batches, images=images), spec=spec)

    def identity(self, uses: Iterable[str]) -> dict[str, Any]:
        """What can change an answer: weights, data, user's code, and the fields a probe says it uses.

        Batch size and seed enter by themselves where augmentation depends on them.
        """
        augmentation = self.batches.augmentation if isinstance(self.batches, Batches) else None
        wanted = {*uses, *(("batch_size", "seed") if augmentation else ())}
        known = {"batch_size": self.batch_size, "weight_decay": self.weight_decay, "seed": self.seed}
        spec = self.spec or Spec()
        loss: dict[str, Any] = {} if self.losses is cross_entropy else {"loss": self._loss_identity}
        if self.meaning.accuracy:
            loss["accuracy"] = self.meaning.accuracy
        return {
            **loss,
            "weights": self._weights(),
            "model": [
                type(self.model).__qualname__,
                self._architecture or self._program_sha256,
            ],
            "data": [self._data_sha256, _code_sha256(spec.data)],
            "augmentation": asdict(augmentation) if augmentation else None,
            "spec": {name: known[name] for name in sorted(wanted)},
        }

    def attributes(self) -> dict[str, str | int | float]:
        """What is stored beside every answer."""
        spec = self.spec or Spec()
        images = self.images
        return {
            "spec": json.dumps(asdict(spec), default=str),
            "checkpoint_sha256": self.checkpoint.sha256 if self.checkpoint else "",
            "weights_taken": self.checkpoint.taken if self.checkpoint else self.origin,
            "epoch": self.checkpoint.epoch if self.checkpoint else math.nan,
            "model": spec.model or (self.checkpoint.model if self.checkpoint else type(self.model).__name__),
            "data": images.name if images else "in memory",
            "device": str(self.device),
            "batch_size": self.batch_size,
            "samples": len(self),
            "parameters_total": self.size,
            "protocol": self.protocol,
        }

    @property
    def origin(self) -> str:
        """Where the weights come from in words, without a checkpoint."""
        return providers.origin(self.spec.model) if self.spec else providers.AS_BUILT

    @property
    def protocol(self) -> str:
        """One line that has to stand beside every number."""
        spec = self.spec or Spec()
        images = self.images
        augmented = isinstance(self.batches, Batches) and self.batches.augmentation is not None
        parts = [
            f"{images.name} {spec.split}" if images else "data in memory",
            f"{len(self)} samples" if images is None or not images.sequences else images.sequences,
            f"batch size {self.batch_size}",
            "augmented once" if augmented else "no augmentation",
            f"weight decay {self.weight_decay:g}",
            *([f"loss {self.loss_name.rpartition('/')[2]}"] if self.loss_name else []),
            f"seed {self.seed}",
        ]
        return ", ".join(parts)

    @property
    def batch_size(self) -> int:
        """Samples per mini-batch, the last one perhaps less."""
        return self.batches.batch_size if isinstance(self.batches, Batches) else len(self.batches[0][1])

    def _weights(self) -> str:
        """SHA-256 of the weights as they are now. Where they have changed, nothing made of the old ones is kept."""
        found = checkpoints.weights_sha256(self.model.state_dict())
        if self._made.setdefault("weights", found) != found:
            self._made.clear()
            self.__dict__.pop("intact", None)
            self._made["weights"] = found
        return found

    @property
    def _architecture(self) -> str | None:
        """What pins the model beyond weights and class, whether the user or the checkpoint names it."""
        spec, stored = self.spec or Spec(), self.checkpoint
        own = stored is not None and stored.native and spec.model in ("", stored.model)
        if stored is None or not own:
            return providers.identity(spec.model, spec.model_arg)
        return providers.identity(stored.model, {**stored.model_args, **spec.model_arg})

    @property
    def _program_sha256(self) -> str | None:
        """Of a model that its file holds with its code, the file."""
        stored = self.checkpoint
        return stored.sha256 if stored is not None and stored.module is self.model else None

    @property
    def _loss_identity(self) -> list[str | None]:
        """Of a file its content and not its place; of a function made in Python its name is all there is."""
        code = _code_sha256(self.loss_name)
        name = self.loss_name.rpartition(":")[2] if code else self.loss_name
        return [name or f"{self.losses.__module__}:{getattr(self.losses, '__qualname__', '')}", code]

    @cached_property
    def _data_sha256(self) -> str:
        if self.images is not None:
            return self.images.sha256()
        found = {
            checkpoints.weights_sha256(
                {f"{i}/{j}": t for i in range(len(self.batches)) for j, t in enumerate(self.batches[i])}
            )
            for _ in range(2)
        }
        if len(found) > 1:
            raise ValueError(
                f"batches ({type(self.batches).__name__}) gives others when it is read again, expected the same every "
                "time; materialise it once with list(...)"
            )
        return found.pop()


def _code_sha256(spec: str) -> str | None:
    """SHA-256 of the file of `file.py:callable`; None for names and installed modules."""
    return spec_sha256(spec) if ":" in spec else None


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Logits of a model; see `logits_in`."""
    return logits_in(model(inputs))


def logits_in(returned: object) -> Tensor:
    """Logits from what a model returns.

    The rule: a tensor is the logits; of anything else what is named `logits` (the entry of a dict, the attribute of a
    dataclass or named tuple); without such a name the first tensor of a tuple or list.

    Raises:
        ValueError: there are none.
    """
    if isinstance(returned, Tensor):
        return returned
    named = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
    ordered = returned if isinstance(returned, tuple | list) else ()
    found = next((value for value in (named, *ordered) if isinstance(value, Tensor)), None)
    if found is None:
        raise ValueError("the model returns no tensor and nothing named logits; wrap it so that it returns logits")
    return found


def per_sample(subject: Subject) -> tuple[Tensor, Tensor]:
    """Loss and correctness of every sample, (N,) float64 on the CPU; one pass, one transfer at its end."""
    rows = []
    with torch.inference_mode():
        for i in range(len(subject.batches)):
            inputs, targets = subject.batch(i)
            outputs = outputs_of(subject.model, inputs)
            rows.append(
                torch.stack([subject.losses(outputs, targets).double(), subject.right(outputs, targets).double()])
            )
    loss, right = torch.cat(rows, dim=1).cpu()
    return loss, right
