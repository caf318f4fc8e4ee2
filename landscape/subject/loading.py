"""Loading a subject: checkpoint, model and data brought together, and refused where they do not fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landscape import data as datasets
from landscape import models
from landscape.checkpoints.checkpoint import Checkpoint, label_of, newest_checkpoint, read_checkpoint
from landscape.checkpoints.state_dict_loading import load_into
from landscape.checkpoints.user_code import guarded
from landscape.data import tokens
from landscape.data.augment import Augmentation
from landscape.data.dataset import Batches, Images
from landscape.data.preprocessing import Fit, Preprocessing, parse_crop
from landscape.models import providers
from landscape.models.providers import Wanted
from landscape.options import OptionError
from landscape.subject.device import device as device_of
from landscape.subject.losses import cross_entropy, losses_of
from landscape.subject.model_building import build, named, no_code
from landscape.subject.outputs import logits_in
from landscape.subject.spec import Spec, Split
from landscape.subject.subject import Subject

MOST_PIXELS = 8192  # side of an image that a checkpoint may ask for
LONGEST = 1024  # tokens of a sequence, unless --block-size asks for more
log = logging.getLogger(__name__)


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
    known = Spec.__dataclass_fields__
    for name in options:
        if name not in known or name == "checkpoint":
            raise OptionError(
                f"unknown option {name}; expected one of {', '.join(n for n in known if n != 'checkpoint')}"
            )
    if isinstance(checkpoint, nn.Module):
        return _load(Spec(**options), module=checkpoint, label=label)
    path = Path(checkpoint) if checkpoint is not None else None
    if path is None and not options.get("model"):
        path = newest_checkpoint()
    subject = _load(Spec(checkpoint=path, **options), label=label)
    if subject.checkpoint is not None:
        _ = subject.checkpoint.sha256  # of the file as it was read, once
    return subject


def bare(spec: Spec) -> tuple[nn.Module, int]:
    """A model without data, in eval mode on the CPU, and the image size it takes (224 where nothing says it)."""
    path = newest_checkpoint() if spec.checkpoint is None and not spec.model else spec.checkpoint
    stored = read_checkpoint(path, weights=spec.weights, trust_pickle=spec.trust_pickle) if path else None
    if spec.model in models.NAMES and not stored:
        spec = replace(spec, model_arg={"image_size": spec.image_size or 224, **spec.model_arg})
    spec = named(spec, stored)
    own = _of_source(spec, stored)
    size = spec.image_size or (stored.data.get("size") if stored else 0) or (own.size if own else 0) or 224
    net = build(spec, stored, None)
    if stored is not None:
        load_into(net, stored, allow_missing=spec.allow_missing, logits=False)
    return net.eval(), int(spec.model_arg.get("image_size", size))


def example(model: nn.Module, size: int) -> Tensor:
    """Two inputs of the kind that a model takes: tokens where its configuration has a vocabulary, else RGB images."""
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int):
        context = getattr(config, "max_position_embeddings", None)
        return torch.randint(vocabulary, (2, min(16, context) if isinstance(context, int) else 16))
    return torch.randn(2, 3, size, size, dtype=next(model.parameters()).dtype)


def load_spec(spec: Spec) -> Subject:
    """Load a subject again, as in another process."""
    return _load(spec)


def _load(spec: Spec, *, module: nn.Module | None = None, label: str = "") -> Subject:
    device = device_of(spec.device)
    stored = None
    if spec.checkpoint is not None:
        stored = read_checkpoint(spec.checkpoint, weights=spec.weights, trust_pickle=spec.trust_pickle)
    if module is None:
        spec = named(spec, stored)
    asked, prepared = spec, _prepared(spec, stored)
    images = _images(prepared, stored)
    if images.sequences:
        spec = prepared
    elif prepared != spec and images.mean:
        log.info(
            "images as %s has them: %s", spec.model, Preprocessing(images.size, _fit(prepared), images.mean, images.std)
        )
        spec = prepared
    _say_unused(asked, images)
    model = module if module is not None else build(spec, stored, images)
    if stored is not None and model is not stored.module:
        stored = load_into(model, stored, allow_missing=spec.allow_missing, logits=spec.logits)
    if stored is not None and stored.batch_size:
        _refuse_other_batches(stored, spec, len(images))
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"the model ({type(model).__name__}) has no parameters: there is nothing to measure")
    model = model.to(device).eval()
    if first.dtype in (torch.float16, torch.bfloat16):
        model = model.float()
    augmentation = _augmentation(stored) if spec.augment else None
    default = label_of(stored.path) if stored else spec.model.rpartition("/")[2] or "model"
    subject = Subject(
        model=model,
        batches=Batches(images.to(device), spec.batch_size, augmentation, spec.seed),
        losses=losses_of(spec.loss),
        weight_decay=spec.weight_decay,
        label=label or default,
        spec=None if module is not None else spec,
        checkpoint=stored,
        seed=spec.seed,
        loss_name=spec.loss,
        part=partial(_part, spec, stored),
    )
    _fits(subject)
    return subject


def beside(subject: Subject, path: Path) -> Subject:
    """Another checkpoint on the mini-batches of a subject; one that names no architecture has the subject's.

    Raises:
        FileNotFoundError, ValueError: as `load`.
    """
    spec = subject.spec or Spec()
    stored = read_checkpoint(path, weights=spec.weights, trust_pickle=spec.trust_pickle)
    asked = replace(spec, model="", model_arg={}) if stored.native else spec
    model = build(asked, stored, subject.images)
    if model is not stored.module:
        stored = load_into(model, stored, allow_missing=spec.allow_missing, logits=spec.logits)
    model = model.to(subject.device, subject.dtype).eval()
    other = replace(
        subject,
        model=model,
        label=label_of(stored.path),
        checkpoint=stored,
        spec=replace(asked, checkpoint=path),
    )
    if other.images is not None:
        _fits(other)
    return other


def _of_source(spec: Spec, stored: Checkpoint | None) -> Preprocessing | None:
    """What a source says of its network's images; None of networks of the trainer and of callables."""
    if ":" not in spec.model or (stored is not None and stored.native):
        return None
    return providers.preprocessing(Wanted(spec.model, spec.model_arg, image_size=spec.image_size))


def _prepared(spec: Spec, stored: Checkpoint | None) -> Spec:
    """The spec with the preprocessing of its model's source where the options leave it open.

    The crop is for photographs: small images of a named data set come whole unless it is asked for.
    """
    if spec.block_size is None and spec.data.endswith(tokens.SUFFIX):
        length = providers.context(Wanted(spec.model, spec.model_arg))
        return replace(spec, block_size=min(length, LONGEST)) if length else spec
    own = _of_source(spec, stored)
    if own is None:
        return spec
    crop = "squash" if spec.data in datasets.NAMES else str(own.fit.crop)
    return replace(
        spec,
        image_size=spec.image_size or own.size,
        mean=spec.mean or own.mean,
        std=spec.std or own.std,
        interpolation=spec.interpolation or own.fit.interpolation,
        crop=spec.crop or crop,
    )


def _fit(spec: Spec) -> Fit:
    return Fit(spec.interpolation or "bilinear", parse_crop(spec.crop) if spec.crop else 1.0)


def _refuse_other_batches(stored: Checkpoint, spec: Spec, samples: int) -> None:
    """Refuse mini-batches of another size than the only one that an exported graph takes."""
    size = stored.batch_size
    if spec.batch_size != size or samples % size:
        raise ValueError(
            f"{stored.path} was exported for mini-batches of exactly {size}, got {samples} samples in mini-batches "
            f"of {spec.batch_size}; give --batch-size {size} and --samples {max(samples - samples % size, size)}, or "
            "export it with a dynamic batch dimension"
        )


def _images(spec: Spec, stored: Checkpoint | None) -> Images:
    name = spec.data or (no_code(stored, "data", str(stored.data.get("name", ""))) if stored else "")
    if not name:
        lacking = f"{stored.path} does not say what it was trained on" if stored else "a fresh model comes without data"
        raise ValueError(f"{lacking}; name it with --data NAME|FOLDER|file.py:callable")
    about = _description(stored) if stored else {}
    return datasets.load(
        name,
        root=spec.data_root,
        split=spec.split,
        samples=spec.samples,
        image_size=spec.image_size or (about.get("size") or None),
        mean=tuple(spec.mean or about.get("mean") or ()),
        std=tuple(spec.std or about.get("std") or ()),
        fit=_fit(spec) if spec.interpolation or spec.crop else None,
        block_size=spec.block_size,
    )


def _say_unused(spec: Spec, images: Images) -> None:
    """Say which of the options that were given do nothing on such data."""
    names: tuple[str, ...] = () if images.sequences else ("block_size",)
    if images.sequences or images.inputs.dtype != torch.uint8:
        names += ("image_size", "mean", "std", "interpolation", "crop")
    unused = [f"--{name.replace('_', '-')}" for name in names if getattr(spec, name)]
    if images.size and spec.image_size == images.size:
        unused = [name for name in unused if name != "--image-size"]
    if unused:
        kind = "token numbers" if images.sequences else f"{str(images.inputs.dtype).removeprefix('torch.')} inputs"
        log.warning("note: %s changes nothing: %s has %s, used as they are", ", ".join(unused), images.name, kind)


def _description(stored: Checkpoint) -> Mapping[str, Any]:
    """What a checkpoint says of its images.

    Raises:
        ValueError: it makes no sense.
    """
    size, channels = stored.data.get("size") or 1, [stored.data.get(key) or () for key in ("mean", "std")]
    sane = isinstance(size, int) and 1 <= size <= MOST_PIXELS
    for values in channels:
        sane = sane and isinstance(values, tuple | list) and all(isinstance(v, int | float) for v in values)
    if not sane:
        raise ValueError(f"{stored.path} describes images of size {size!r:.40} that cannot be; get it anew")
    return stored.data


def _part(spec: Spec, stored: Checkpoint | None, split: Split, samples: int | str) -> Images:
    return _images(replace(spec, split=split, samples=samples), stored)


def _augmentation(stored: Checkpoint | None) -> Augmentation:
    if stored is None or not stored.recipe:
        raise ValueError("--augment uses the checkpoint's own recipe and this one has none; drop --augment")
    return Augmentation.of_recipe(stored.recipe)


def classifies(subject: Subject) -> bool:
    """Whether its outputs are logits of the checkpoint's own: no features, and no classifier as it was initialised."""
    if subject.checkpoint is not None and subject.checkpoint.headless:
        return False
    if subject.spec is None or subject.spec.logits:
        return True
    try:
        _fits(replace(subject, spec=replace(subject.spec, logits=True)))
    except ValueError:
        return False
    return True


def _fits(subject: Subject) -> None:
    """Refuse a model whose inputs or classes are not those of the data, by one small forward pass."""
    images = subject.images
    assert images is not None
    few = (subject.checkpoint.batch_size if subject.checkpoint else 0) or 2
    inputs, targets = (part[:few] for part in subject.batch(0))
    shape = tuple(inputs.shape[1:])
    vocabulary = getattr(getattr(subject.model, "config", None), "vocab_size", None)
    if images.sequences and isinstance(vocabulary, int) and images.classes > vocabulary:
        raise ValueError(
            f"{images.name} has tokens up to {images.classes - 1} and the model's vocabulary ends at {vocabulary - 1}; "
            "measure it on tokens of its own tokenizer"
        )
    try:
        with torch.inference_mode():
            returned = subject.model(inputs)
    except (RuntimeError, AssertionError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"the model refuses inputs of shape {shape} from {images.name} ({reason}); check --data, "
            f"{'--block-size' if images.sequences else '--image-size'} and --model-arg"
        ) from error
    if subject.spec is not None and not subject.spec.logits:
        return
    outputs = logits_in(returned)
    if images.sequences and subject.losses is cross_entropy:
        if outputs.shape[:-1] != targets.shape or outputs.shape[-1] < images.classes:
            raise ValueError(
                f"the model returns {tuple(outputs.shape)} for sequences {tuple(targets.shape)} of tokens up to "
                f"{images.classes - 1}, expected (samples, tokens, vocabulary); measure a causal language model on them"
            )
        return
    if subject.loss_name:
        guarded(f"--loss {subject.loss_name}", lambda: subject.losses(outputs, targets))
        return
    if outputs.dim() != 2 or len(outputs) != len(inputs):
        raise ValueError(
            f"the model returns {tuple(outputs.shape)} for {len(inputs)} samples, expected (samples, classes)"
        )
    if targets.dim() != 1 or targets.is_floating_point():
        return
    classes = outputs.shape[1]
    named_set = bool(images.mean) and not images.counted
    if (named_set and images.classes != classes) or images.classes > classes:
        raise ValueError(
            f"the model has {classes} classes and {images.name} has {images.classes}; "
            "measure it on data with its own classes (--data)"
        )
