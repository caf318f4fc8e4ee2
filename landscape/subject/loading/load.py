"""Load a subject: checkpoint, model and data, rejected with a one-line error where they do not fit together."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landscape import models
from landscape.checkpoints import file_names, snapshots, user_code
from landscape.checkpoints.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint
from landscape.data.dataset import Batches, BatchList, Images
from landscape.data.structure import BatchLayout
from landscape.options import OptionError, at_least, did_you_mean
from landscape.subject import losses, mc_dropout, precision, process_group, restoration
from landscape.subject.device import HALF, converted, converted_copy, is_on
from landscape.subject.device import device as device_of
from landscape.subject.loading import adaptation, checks, code_identity, next_tokens, preprocessing
from landscape.subject.loading.model_building import build, shaped, with_architecture, with_weights
from landscape.subject.loading.smoothing import insert, options_of, smoothed
from landscape.subject.spec import Spec, Split
from landscape.subject.subject import Origin, Subject


@contextlib.contextmanager
def measuring(subject: Subject) -> Iterator[None]:
    """A measurement of a subject's model, which may be the caller's own, in the middle of its training.

    Meanwhile it is in evaluation mode, with gradients enabled and in exact arithmetic, wherever the call stands.
    Afterwards modes, gradients, buffers, what is trainable and the global random generators are as before; weights are
    restored by what moves them (`WeightsInPlace`). Hooks on the gradients of parameters do not run meanwhile.
    """
    _refresh(subject)
    models = [subject.model, *(other for other in subject.origin.others.values() if isinstance(other, nn.Module))]
    with contextlib.ExitStack() as found, restoration.recording_graphs(), precision.exact_arithmetic():
        found.enter_context(user_code.kept_rng())
        for model in models:
            found.enter_context(restoration.left_as_found(model))
        yield


def _refresh(subject: Subject) -> None:
    """Take what the caller may have changed: weights and buffers of a module that the model copies, and samples."""
    if not subject.reloadable:  # arrays, and tensors by way of `data`, change without a trace
        subject.data.forget_sha256()
    if subject.origin.original is None:
        return
    with torch.no_grad():
        for own, theirs in zip(subject.model.buffers(), subject.origin.original.buffers(), strict=True):
            own.copy_(theirs)
        for weight, source in zip(subject.model.parameters(), subject.origin.original.parameters(), strict=True):
            weight.copy_(source)
            weight.requires_grad_(source.requires_grad)


_log = logging.getLogger(__name__)


def load(
    checkpoint: Path | str | nn.Module | None = None,
    *,
    data: Any = "",
    loss: str | Callable[[Any, Any], Any] = "",
    classes: int | None = None,
    label: str = "",
    **options: Any,
) -> Subject:
    """Load a checkpoint, its model and its data; model, data and loss may also be objects made in Python.

    Args:
        checkpoint: a file; the folder of a run, which means its last snapshot; a module made in Python; or None:
            the newest `final.pt` under ./checkpoints, or, with `model=`, that model freshly built. A module is never
            changed. It is measured with the weights that it has at that moment, and on the device where it is unless
            `device` names another.
        data: as on the command line; or a DataLoader, a Dataset, tensors `(inputs, targets)`, a tuple, dict or
            dataclass of tensors with a row per sample, or an iterable of mini-batches, which is read once. A mini-batch
            may be a tuple, dict or dataclass of tensors: entries with the names of the model's inputs go to the model;
            the last entry of a tuple, or the one named `labels`, `target` or `y`, is the target. Samples of one input
            and one target tensor are divided into mini-batches of `batch_size`, whatever the loader's was.
        loss: as on the command line; or a function of (outputs, targets), (outputs, batch) or (model, batch), as its
            parameters are named. It returns one loss per sample, or their mean, which then has no error.
        classes: number of classes of data that do not say it; otherwise one more than the largest class number.
        label: readable name, default from the file's name.
        **options: the fields of `Spec`, which are the command-line options.

    Raises:
        FileNotFoundError, ValueError: one line that says what was got, what was expected and what to do.
        OptionError: an option is out of its range.
    """
    _refuse_unknown(options)
    _refuse_kinds(checkpoint, data)
    module = unwrapped(checkpoint) if isinstance(checkpoint, nn.Module) else None
    made = None if isinstance(data, str | Path) else data
    objects = Objects(module, made, None if isinstance(loss, str) else loss, classes)
    options["data"] = str(data) if objects.data is None else ""
    options["loss"] = loss if isinstance(loss, str) else ""
    if classes is not None:
        at_least("classes", classes, 1)
    path = Path(checkpoint) if isinstance(checkpoint, str | Path) else None
    if checkpoint is None and not options.get("model"):
        path = newest_checkpoint()
    with user_code.kept_rng():
        subject = load_spec(Spec(checkpoint=path, **options), objects, label=label)
    if subject.checkpoint is not None:
        _ = subject.checkpoint.sha256  # hash the file now: it may be another one later
    return subject


def _refuse_unknown(options: Iterable[str]) -> None:
    known = [name for name in Spec.__dataclass_fields__ if name != "checkpoint"]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, [*known, "classes"])
            raise OptionError(f"unknown option {name}; expected one of {', '.join(known)}, classes{hint}")


def _refuse_kinds(checkpoint: object, data: object) -> None:
    """Reject objects of other kinds than `load` takes, and say what to give instead."""
    if not isinstance(checkpoint, str | Path | nn.Module | None):
        kind = type(checkpoint).__name__
        raise OptionError(
            f"a checkpoint is a path or a module, got a {kind}; give weights as module.load_state_dict(...)"
        )
    if inspect.isfunction(data) or isinstance(data, type):
        raise OptionError(f"data={data.__name__} is not called; give what it returns: data={data.__name__}(...)")


@dataclass(frozen=True)
class Objects:
    """What the caller made in Python, in place of what a spec names."""

    module: nn.Module | None = None
    data: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    classes: int | None = None
    noting: bool = True  # say of a loss that returns a mean that it has no error over samples


NO_OBJECTS = Objects()


def load_spec(spec: Spec, objects: Objects = NO_OBJECTS, *, label: str = "") -> Subject:
    """Load a subject from its spec, for example in another process."""
    device, module = device_of(spec.device), objects.module
    loss = losses.loss_of(objects.loss or spec.loss)
    if spec.checkpoint is not None:
        spec = replace(spec, checkpoint=snapshots.checkpoint_of(spec.checkpoint, **spec.reading))
    stored = read_checkpoint(spec.checkpoint, **spec.reading) if spec.checkpoint else None
    layout = cache(partial(_layout, spec, stored, module, loss.takes_model))
    given = preprocessing.DataObject(
        objects.data, objects.classes, layout, loss.takes_batch, loss.function is losses.cross_entropy
    )
    filled = preprocessing.with_provider(spec, stored)
    early = _model_before_images(filled, stored)
    spec, images = preprocessing.resolved(spec, filled, stored, given)
    of = images if isinstance(images, Images) else None
    if stored is not None:
        if early is None or spec != filled:
            early = None  # its memory is free before another model is built
            early = with_weights(spec, stored, of)
        model, stored = early
        if stored.batch_size and isinstance(images, Images):
            checks.refuse_batch_size(stored, spec, len(images))
    else:
        model = shaped(build(spec, None, of), spec.model) if module is None else shaped(module, "the module")
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"the model ({type(model).__name__}) has no parameters: there is nothing to measure")
    device = first.device if module is not None and spec.device == "auto" else device
    if device.type == "mps":
        raise ValueError("the module is on an Apple GPU, which has no double precision; give device='cpu'")
    if module is None:
        model = converted(model, device).eval()
    elif first.dtype in HALF or not is_on(first, device):
        model = converted_copy(model, device)
    augmentation = preprocessing.augmentation_of(spec, stored, images.size if isinstance(images, Images) else 0)
    moved = images.for_device(device)
    subject = Subject(
        model=model,
        batches=moved if isinstance(moved, BatchList) else Batches(moved, spec.batch_size, augmentation, spec.seed),
        weight_decay=spec.weight_decay,
        label=label or (file_names.label_of(stored.path) if stored else spec.model.rpartition("/")[2] or "model"),
        spec=spec,
        checkpoint=stored,
        seed=spec.seed,
        origin=Origin(
            part=None if isinstance(objects.data, Iterator) else partial(_part, spec, stored, given),
            original=module if module is not model else None,
            objects=objects.data is not None or objects.loss is not None,
        ),
    )
    with measuring(subject), code_identity.forward_passes(model):
        checks.refuse_vocabulary(subject)
        subject = checks.taken_as_probabilities(
            next_tokens.with_next_tokens(smoothed(adaptation.adapted(subject, loss, noting=objects.noting)))
        )
        checks.refuse_misfit(subject)
        subject = mc_dropout.with_members(subject, spec.mc_dropout)
    return subject


def model_without_data(spec: Spec) -> tuple[nn.Module, int]:
    """A model without data, in eval mode on the CPU, and its image size (224 if nothing says it)."""
    if spec.checkpoint is None and not spec.model:
        spec = replace(spec, checkpoint=newest_checkpoint())
    if spec.checkpoint is not None:
        spec = replace(spec, checkpoint=snapshots.checkpoint_of(spec.checkpoint, **spec.reading))
    stored = read_checkpoint(spec.checkpoint, **spec.reading) if spec.checkpoint else None
    arguments = spec.model_arg
    if spec.model in models.NAMES and not stored:
        arguments = {"image_size": spec.image_size or 224, **arguments}
    spec = replace(with_architecture(spec, stored), model_arg=arguments, logits=False)
    provided = preprocessing.with_provider(spec, stored).image_size
    size = spec.image_size or (stored.data.get("size") if stored else 0) or provided or 224
    model = with_weights(spec, stored, None)[0] if stored else shaped(build(spec, None, None), spec.model)
    model, size = model.eval(), int(arguments.get("image_size", size))
    if smoothing := options_of(spec, stored.recipe if stored else None):
        insert(model, smoothing, example(model, size))
    return model, size


def example(model: nn.Module, size: int) -> Tensor:
    """Two inputs that a model accepts: tokens if its configuration has a vocabulary, else RGB images."""
    vocabulary = checks.vocabulary_size(model)
    if vocabulary is not None:
        context = getattr(model.config, "max_position_embeddings", None)
        return torch.randint(vocabulary, (2, min(16, context) if isinstance(context, int) else 16))
    return torch.randn(2, 3, size, size, dtype=next(model.parameters()).dtype)


def unwrapped(module: nn.Module, *, divided: bool = False) -> nn.Module:
    """The module itself: compiled code has no second derivative, and a replica waits for the others.

    One whose weights FSDP has divided is refused, with `divided` that of FSDP's first version alone.
    """
    process_group.refuse_sharded(module, {"FullyShardedDataParallel"} if divided else process_group.SHARDED)
    replicated = isinstance(module, nn.parallel.DataParallel | nn.parallel.DistributedDataParallel)
    inner = module.module if replicated else dict(module.named_children()).get("_orig_mod")
    return unwrapped(inner, divided=divided) if isinstance(inner, nn.Module) else module


def _model_before_images(spec: Spec, stored: Checkpoint | None) -> tuple[nn.Module, Checkpoint] | None:
    """`_model` before any image is decoded, where it does not depend on them; else None.

    A checkpoint that does not fit is thus rejected at once.
    """
    if stored is None or stored.module is not None or not spec.logits or spec.allow_missing:
        return None
    if spec.model in models.NAMES or not spec.model:  # our own take the number of classes and the size of the images
        says = stored.native and spec.model in ("", stored.model)
        if not says or not {"classes", "image_size"} <= {**stored.model_args, **spec.model_arg}.keys():
            return None
    return with_weights(spec, stored, None)


def _part(
    spec: Spec, stored: Checkpoint | None, given: preprocessing.DataObject, split: Split, samples: int | str
) -> Images | BatchList:
    return preprocessing.load_images(replace(spec, split=split, samples=samples), stored, given)


def _layout(spec: Spec, stored: Checkpoint | None, module: nn.Module | None, called_by_loss: bool) -> BatchLayout:
    """How the model is called: of one that a spec names, from a model built for this purpose alone."""
    if module is None:
        module = build(with_architecture(spec, stored), stored, None)
    return replace(BatchLayout.of(module.forward), called_by_loss=called_by_loss)
