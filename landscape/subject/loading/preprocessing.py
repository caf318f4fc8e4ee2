"""Load the images of a spec, preprocessed as the options, the checkpoint or the model's provider say, in this order."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from landscape import data as datasets
from landscape.checkpoints.checkpoint import Checkpoint
from landscape.data import augment, cifar, masks, numpy_files, recipes, sample_reading, structure, torch_dataset
from landscape.data.dataset import BatchList, Images
from landscape.data.masks import with_class_numbers, with_unlabelled
from landscape.data.preprocessing import IMAGENET_MEAN, Preprocessing, Resize, parse_crop
from landscape.models import providers
from landscape.models.providers import ModelRequest
from landscape.options import OptionError
from landscape.subject.loading.model_building import refuse_code, with_architecture
from landscape.subject.spec import Spec

MOST_PIXELS = 8192  # largest image side that a checkpoint may ask for
LONGEST = 1024  # tokens per sequence unless --block-size asks for more
OF_DATA = ("image_size", "mean", "std", "interpolation", "crop", "block_size")  # options of some kinds of data
SHARED = 2  # selections of images that are kept for the checkpoints of one command
_shared: ContextVar[dict[tuple[Any, ...], Images | BatchList] | None] = ContextVar("shared images", default=None)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataObject:
    """Data made in Python, and how they are read; without an object the data are those that a spec names."""

    made: Any = None
    classes: int | None = None  # number of classes where the data do not say it
    layout: Callable[[], structure.BatchLayout] = structure.BatchLayout
    whole: bool = False  # the loss takes the whole batch
    by_class: bool = True  # the loss is the cross-entropy, for which some pixels of masks may have no label


NAMED = DataObject()


@contextlib.contextmanager
def sharing_images() -> Iterator[None]:
    """Keep the images of a named data set for further subjects that are loaded with the same options in this block.

    The last two selections are kept, such as a test and a training part, which a subject holds anyway.
    """
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def resolved(
    spec: Spec, filled: Spec, stored: Checkpoint | None, given: DataObject = NAMED
) -> tuple[Spec, Images | BatchList]:
    """The spec that applies, `filled` by `with_provider` or with its model alone, and the images that it loads.

    Preprocessing and context length are the provider's. Inputs that are used as they are (floating-point tensors) have
    no preprocessing to fill in.
    """
    named = replace(spec, model=filled.model)
    images = load_images(filled, stored, given)
    _refuse_unused(named, images, stored)
    if isinstance(images, BatchList):
        return filled, images
    if not named.crop:
        _warn_of_crop(filled, images)
    if images.sequences:
        return filled, images
    if filled == named or not images.mean:
        known = named.mean or (stored and stored.data.get("mean")) or images.name in datasets.NAMES
        if images.mean and not known:
            _note_normalisation(images)
        return named, images
    preprocessing = Preprocessing(images.size, _resize(filled), images.mean, images.std)
    log.info("preprocessing of %s: %s", named.model, preprocessing)
    return filled, images


def load_images(spec: Spec, stored: Checkpoint | None, given: DataObject = NAMED) -> Images | BatchList:
    """The samples of an object, or those of a resolved spec, which are the checkpoint's where the spec names none.

    So are their size, mean and std.

    Raises:
        ValueError: neither names the data, or the checkpoint's description is invalid.
    """
    loaded = _of_name(spec, stored, given) if given.made is None else _of_object(spec, given)
    loaded = with_class_numbers(loaded) if given.by_class else loaded
    marked = with_unlabelled(loaded, spec.ignore_index, keep=spec.ordered) if given.by_class else loaded
    if marked is loaded and spec.ignore_index != Spec.ignore_index:
        raise OptionError(
            f"--ignore-index {spec.ignore_index} has no effect: it is for the cross-entropy of a class per pixel, "
            f"which {loaded.name} has not; leave it out, or leave these samples out of the data"
        )
    return marked if given.classes is None else replace(marked, classes=given.classes)


def _of_name(spec: Spec, stored: Checkpoint | None, given: DataObject) -> Images | BatchList:
    name = spec.data or (refuse_code(stored, "data", str(stored.data.get("name", ""))) if stored else "")
    if not name:
        lacking = f"{stored.path} does not say what it was trained on" if stored else "a fresh model comes without data"
        nor = "" if spec.model or stored is None or stored.native or stored.module is not None else ", nor its model"
        also = " --model NAME|file.py:callable and" if nor else ""
        raise ValueError(f"{lacking}{nor}; give{also} --data NAME|FOLDER|file.py:callable, such as --data digits")
    stated = _description(stored) if stored else {}
    options: dict[str, Any] = {
        "root": spec.data_root, "split": spec.split, "samples": spec.samples,
        "image_size": spec.image_size or (stated.get("size") or None),
        "mean": tuple(spec.mean or stated.get("mean") or ()), "std": tuple(spec.std or stated.get("std") or ()),
        "block_size": spec.block_size, "whole": given.whole, "ordered": spec.ordered,
    }  # fmt: skip
    shared, key = _shared.get(), (name, spec.interpolation, spec.crop, *options.values())
    loaded = shared.pop(key, None) if shared is not None else None
    layouts: list[structure.BatchLayout] = []

    def layout() -> structure.BatchLayout:
        layouts.append(given.layout())
        return layouts[-1]

    if loaded is None:
        resize = _resize(spec) if spec.interpolation or spec.crop else None
        loaded = datasets.load_batches(name, **options, resize=resize, layout=layout, batch_size=spec.batch_size)
    if shared is not None and isinstance(loaded, Images) and not layouts:  # others depend on how the model is called
        while len(shared) >= SHARED:
            del shared[next(iter(shared))]
        shared[key] = loaded
    return loaded


def _note_normalisation(images: Images) -> None:
    """Say with which mean and std pictures are normalised, if they are."""
    if not images.mean:
        return
    mean, std = (",".join(f"{value:.3g}" for value in values) for values in (images.mean, images.std))
    which = "ImageNet's " if images.mean == IMAGENET_MEAN else ""
    log.info(
        "%s: its pictures are normalised by %smean and std (%s and %s); for others give --mean and --std, or return "
        "floating-point tensors, which are left as they are", images.name, which, mean, std,
    )  # fmt: skip


def _of_object(spec: Spec, given: DataObject) -> Images | BatchList:
    resize = _resize(spec) if spec.interpolation or spec.crop else None
    request = sample_reading.Request(
        "data", spec.samples, spec.image_size, resize, given.layout, spec.batch_size, given.whole, spec.ordered
    )
    loaded = replace(torch_dataset.data_of(given.made, request), name="in memory", one_part=True)
    if isinstance(loaded, Images):
        loaded = replace(loaded, resized_from=resize.seen) if resize else loaded
        if spec.mean and loaded.mean:
            loaded = replace(loaded, mean=spec.mean, std=spec.std)
        else:
            _note_normalisation(loaded)
        return loaded if given.classes is None else replace(loaded, counted=False)
    return loaded


def with_provider(spec: Spec, stored: Checkpoint | None) -> Spec:
    """The spec with its architecture, and the preprocessing or context length that the model's provider states.

    There is no provider of our own models, callables and native checkpoints.
    The crop is meant for photographs: the small images of a named data set are not cropped unless it is asked for.
    """
    spec = with_architecture(spec, stored)
    request = ModelRequest(spec.model, spec.model_arg, image_size=spec.image_size)
    if spec.block_size is None and spec.data.endswith(numpy_files.SUFFIX):
        length = providers.context(request)
        return replace(spec, block_size=min(length, LONGEST)) if length else spec
    foreign = ":" in spec.model and not (stored is not None and stored.native)
    own = providers.preprocessing(request) if foreign else None
    if own is None:
        return spec
    if spec.data and masks.folder_of_split(Path(spec.data).expanduser(), spec.split):  # which is never resized
        return replace(spec, mean=spec.mean or own.mean, std=spec.std or own.std)
    crop = "squash" if spec.data in datasets.NAMES else str(own.resize.crop)
    return replace(
        spec, image_size=spec.image_size or own.size, mean=spec.mean or own.mean, std=spec.std or own.std,
        interpolation=spec.interpolation or own.resize.interpolation, crop=spec.crop or crop,
    )  # fmt: skip


def _resize(spec: Spec) -> Resize:
    return Resize(spec.interpolation or "bilinear", parse_crop(spec.crop) if spec.crop else 1.0)


def _description(stored: Checkpoint) -> Mapping[str, Any]:
    """A checkpoint's description of its images, checked."""
    size, channels = stored.data.get("size") or 1, [stored.data.get(key) or () for key in ("mean", "std")]
    valid = isinstance(size, int) and 1 <= size <= MOST_PIXELS
    for values in channels:
        valid = valid and isinstance(values, tuple | list) and all(isinstance(v, int | float) for v in values)
    if not valid:
        raise ValueError(
            f"{stored.path} describes images of size {size!r:.40} with an invalid size, mean or std; get the file anew"
        )
    return stored.data


def _warn_of_crop(spec: Spec, images: Images) -> None:
    """Warn where the provider's crop enlarges and cuts pictures that have the network's size already."""
    side = images.size
    if images.resized_from == {(side, side)} and spec.crop not in ("", "squash") and float(spec.crop) < 1:
        log.warning(
            "warning: the pictures of %s have %d px, the size of the network; the crop %s that %s asks for enlarges "
            "and cuts them; if it was trained on whole pictures, give --crop 1",
            *(images.name, side, spec.crop, spec.model),
        )


def _refuse_unused(spec: Spec, images: Images | BatchList, stored: Checkpoint | None) -> None:
    """Reject given options that have no effect, all at once.

    Raises:
        OptionError: names them, and says how the data are used.
    """
    unused = {name for name in _unused(images, spec) if getattr(spec, name) != getattr(Spec, name, ())}
    how = "its samples are used as they are"
    if unused:
        names = [name for name in (*OF_DATA, "data_root") if name in unused]
    else:
        how = "there is no checkpoint"
        names = (
            [] if stored else [name for name in ("weights", "adapter") if getattr(spec, name) != getattr(Spec, name)]
        )
    if names:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise OptionError(f"{given}: no effect on {images.name}, as {how}; leave it out")


def _unused(images: Images | BatchList, spec: Spec) -> Iterator[str]:
    """The options that cannot have an effect on such data."""
    if images.name not in datasets.NAMES and not cifar.is_corrupted(images.name):
        yield "data_root"
    if isinstance(images, BatchList):
        yield from OF_DATA
        return
    if not images.sequences:
        yield "block_size"
    if images.sequences or not images.mean:
        yield from ("mean", "std")
    place = Path(images.name).expanduser()
    fixed = ":" in images.name or images.name == "in memory" or masks.folder_of_split(place, spec.split)
    if images.size != spec.image_size:
        yield "image_size"
    if images.inputs.dtype != torch.uint8 or (fixed and not images.resized_from):
        yield from ("interpolation", "crop")


def augmentation_of(spec: Spec, stored: Checkpoint | None, size: int) -> augment.Augmentation | None:
    """The augmentation of the named recipe, at the size of the images, or of the checkpoint's own.

    Raises:
        OptionError: a recipe is given without --augment, or there is none of that name.
        ValueError: neither names a recipe.
    """
    if not spec.augment:
        if spec.recipe:
            raise OptionError(f"--recipe {spec.recipe} says how images are augmented; add --augment, or drop it")
        return None
    if spec.recipe:
        return augment.Augmentation.of_recipe(asdict(recipes.at_size(recipes.recipe(spec.recipe), size or 32)))
    if stored is None or not stored.recipe:
        raise ValueError(
            "--augment uses the checkpoint's own recipe and this one has none; name one with --recipe cifar-vit (or "
            "cifar-cnn, imagenet-vit), or give --no-augment (a preset augments)"
        )
    return augment.Augmentation.of_recipe(stored.recipe)
