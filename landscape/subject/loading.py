"""Load a subject: checkpoint, model and data, rejected with a one-line error where they do not fit together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landscape import models
from landscape.checkpoints.checkpoint import Checkpoint, label_of, newest_checkpoint, read_checkpoint
from landscape.checkpoints.state_dict_loading import load_into
from landscape.data.augment import Augmentation
from landscape.data.dataset import Batches, Images
from landscape.options import OptionError
from landscape.subject.checks import refuse_batch_size, refuse_misfit, vocabulary_size
from landscape.subject.device import device as device_of
from landscape.subject.losses import losses_of
from landscape.subject.model_building import architecture_of, build
from landscape.subject.preprocessing import load_images, of_provider, resolved
from landscape.subject.spec import Spec, Split
from landscape.subject.subject import Subject


def load(checkpoint: Path | str | nn.Module | None = None, *, label: str = "", **options: Any) -> Subject:
    """Load a checkpoint, its model and its data.

    Args:
        checkpoint: a file; a module made in Python; or None: the newest `final.pt` under ./checkpoints, or, with
            `model=`, that model freshly built.
        label: readable name, default from the file's name.
        **options: the fields of `Spec`, which are the command-line options.

    Raises:
        FileNotFoundError, ValueError: one line that says what was got, what was expected and what to do.
        OptionError: an option is out of its range.
    """
    known = [name for name in Spec.__dataclass_fields__ if name != "checkpoint"]
    for name in options:
        if name not in known:
            raise OptionError(f"unknown option {name}; expected one of {', '.join(known)}")
    if isinstance(checkpoint, nn.Module):
        return load_spec(Spec(**options), module=checkpoint, label=label)
    path = Path(checkpoint) if checkpoint is not None else None
    if path is None and not options.get("model"):
        path = newest_checkpoint()
    subject = load_spec(Spec(checkpoint=path, **options), label=label)
    if subject.checkpoint is not None:
        _ = subject.checkpoint.sha256  # hash the file now: it may be another one later
    return subject


def load_spec(spec: Spec, *, module: nn.Module | None = None, label: str = "") -> Subject:
    """Load a subject from its spec, for example in another process; `module` is a model made in Python."""
    device = device_of(spec.device)
    stored = _read(spec)
    spec, images = resolved(spec, stored)
    if stored is not None:
        model, stored = _model(spec, stored, images)
        if stored.batch_size:
            refuse_batch_size(stored, spec, len(images))
    else:
        model = build(spec, None, images) if module is None else module
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"the model ({type(model).__name__}) has no parameters: there is nothing to measure")
    model = model.to(device).eval()
    if first.dtype in (torch.float16, torch.bfloat16):
        model = model.float()
    if spec.augment and (stored is None or not stored.recipe):
        raise ValueError("--augment uses the checkpoint's own recipe and this one has none; drop --augment")
    augmentation = Augmentation.of_recipe(stored.recipe) if spec.augment and stored else None
    subject = Subject(
        model=model,
        batches=Batches(images.to(device), spec.batch_size, augmentation, spec.seed),
        losses=losses_of(spec.loss),
        weight_decay=spec.weight_decay,
        label=label or (label_of(stored.path) if stored else spec.model.rpartition("/")[2] or "model"),
        spec=None if module is not None else spec,
        checkpoint=stored,
        seed=spec.seed,
        loss_name=spec.loss,
        part=partial(_part, spec, stored),
    )
    refuse_misfit(subject)
    return subject


def with_checkpoint(subject: Subject, path: Path) -> Subject:
    """Another checkpoint on the mini-batches of a subject; one that names no architecture has the subject's."""
    spec = replace(subject.spec or Spec(), checkpoint=path)
    stored = read_checkpoint(path, weights=spec.weights, trust_pickle=spec.trust_pickle)
    if stored.native:
        spec = replace(spec, model="", model_arg={})
    model, stored = _model(spec, stored, subject.images)
    model = model.to(subject.device, subject.dtype).eval()
    other = replace(subject, model=model, label=label_of(stored.path), checkpoint=stored, spec=spec)
    if other.images is not None:
        refuse_misfit(other)
    return other


def model_without_data(spec: Spec) -> tuple[nn.Module, int]:
    """A model without data, in eval mode on the CPU, and its image size (224 if nothing says it)."""
    if spec.checkpoint is None and not spec.model:
        spec = replace(spec, checkpoint=newest_checkpoint())
    stored = _read(spec)
    arguments = spec.model_arg
    if spec.model in models.NAMES and not stored:
        arguments = {"image_size": spec.image_size or 224, **arguments}
    spec = replace(spec, model=spec.model or architecture_of(stored), model_arg=arguments, logits=False)
    own = of_provider(spec, stored)
    size = spec.image_size or (stored.data.get("size") if stored else 0) or (own.size if own else 0) or 224
    model = _model(spec, stored, None)[0] if stored else build(spec, None, None)
    return model.eval(), int(arguments.get("image_size", size))


def example(model: nn.Module, size: int) -> Tensor:
    """Two inputs that a model accepts: tokens if its configuration has a vocabulary, else RGB images."""
    vocabulary = vocabulary_size(model)
    if vocabulary is not None:
        context = getattr(model.config, "max_position_embeddings", None)
        return torch.randint(vocabulary, (2, min(16, context) if isinstance(context, int) else 16))
    return torch.randn(2, 3, size, size, dtype=next(model.parameters()).dtype)


def _read(spec: Spec) -> Checkpoint | None:
    if spec.checkpoint is None:
        return None
    return read_checkpoint(spec.checkpoint, weights=spec.weights, trust_pickle=spec.trust_pickle)


def _model(spec: Spec, stored: Checkpoint, images: Images | None) -> tuple[nn.Module, Checkpoint]:
    """The model with a checkpoint's weights, and the checkpoint, which then also says how its weights were taken."""
    model = build(spec, stored, images)
    if model is not stored.module:
        stored = load_into(model, stored, allow_missing=spec.allow_missing, logits=spec.logits)
    return model, stored


def _part(spec: Spec, stored: Checkpoint | None, split: Split, samples: int | str) -> Images:
    return load_images(replace(spec, split=split, samples=samples), stored)
