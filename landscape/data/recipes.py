"""Named training recipes: every number that decides how a network is trained."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, TypeAlias

from landscape.data.augment import Augmentation
from landscape.options import BOOLEANS, OptionError, invalid, parse_assignments, plain_value, require

Value: TypeAlias = float | int | str | bool

OF_LABELS = ("mixup", "cutmix", "label_smoothing", "randaugment")  # fields that an objective without labels ignores
OF_SGD = 5e-4  # weight decay; with the 0.05 of AdamW, where the learning rate scales it, networks hardly learn
FORMATS = ("contiguous", "channels_last")
TYPES: Mapping[type, str] = {  # in words, of what a file says too
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a table",
}  # fmt: skip
TRANSFORMERS = ("vit", "localvit", "swin", "pit", "mixer")  # families whose default recipe is `cifar-vit`


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. The defaults are the CIFAR recipe of Park & Kim (ICLR 2022), for CNNs and ViTs."""

    name: str = "cifar-vit"  # the recipe this one started from; its other fields may have been overridden
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1.25e-4  # the peak, reached at the end of the warm-up, from which half a cosine leads to 0
    momentum: float = 0.9
    # decoupled with adamw; with sgd the gradient of (weight_decay / 2) ||w||^2, and `OF_SGD` where none is given
    weight_decay: float = 0.05
    epochs: int = 305  # in all, the warm-up included
    warmup: float = 5.0  # epochs of linear warm-up; a fraction of an epoch counts in steps
    batch_size: int = 96
    clip: float = 5.0  # largest global norm of the gradient; 0 disables clipping
    label_smoothing: float = 0.1
    mixup: float = 1.0  # alpha of mixup's Beta distribution, 0 for none; `cutmix` likewise
    cutmix: float = 0.8
    switch: float = 0.5  # probability of cutmix instead of mixup, drawn per batch, if both are on
    randaugment: int = 9  # magnitude M, 0 for none
    randaugment_layers: int = 2  # operations per image
    randaugment_std: float = 1.0  # standard deviation of the magnitudes
    # padding of the random crop in pixels of a 32-pixel image, scaled with the image (`at_size`) and stored so
    crop: int = 4
    flip: bool = True
    drop_path: float = 0.1  # stochastic depth rate of the last block, rising linearly from the first
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # "auto" is bf16 autocast on a GPU that has it, fp32 elsewhere
    # "auto" is channels_last if most weights belong to convolutions: about a third faster, equal to rounding; a
    # checkpoint stores the one that was used
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    compile: bool = False  # by `torch.compile`; worth its start-up of about a minute on a GPU
    # mini-batches whose gradients add up to one update, that of a batch so many times larger; batch norm still sees
    # one mini-batch at a time
    accumulate: int = 1
    ema: float = 0.0  # decay of the moving average of the weights, 0 for none (`ema.moving_average`)
    sam: float = 0.0  # radius rho of sharpness-aware minimisation, 0 for none (`training.updates`)
    # what is minimised: the loss of a classifier, or without labels that of SimCLR or of masked images
    objective: Literal["classification", "simclr", "mim"] = "classification"
    temperature: float = 0.2  # of SimCLR's similarities
    projection: int = 64  # numbers that SimCLR compares
    mask: float = 0.6  # share of the patches that a masked-image encoder does not see
    decoder: int = 1  # blocks between such an encoder and the linear layer that reconstructs the pixels
    sync_bn: bool = False  # batch norm over the samples of all processes; changes nothing in a single process


RECIPES: Mapping[str, Recipe] = {
    # Tuned on digits, where large shifts and mirror images cost a small ViT most: 95 % and more for every demo model.
    "demo": Recipe(
        "demo", lr=2e-3, epochs=25, batch_size=32, clip=1.0, label_smoothing=0.0, mixup=0.0, cutmix=0.0,
        randaugment=0, crop=2, drop_path=0.0,
    ),
    "cifar-vit": Recipe("cifar-vit"),
    "cifar-cnn": Recipe("cifar-cnn"),
    # The CIFAR recipe without augmentation and nothing else changed, for the comparison of the two.
    "cifar-noaug": Recipe("cifar-noaug", mixup=0.0, cutmix=0.0, randaugment=0, crop=0, flip=False),
    # DeiT (Touvron et al. 2021, table 9) at its batch of 1,024, with a padded crop for the random resized one.
    "imagenet-vit": Recipe(
        "imagenet-vit", lr=1e-3, epochs=300, batch_size=1024, clip=0.0, mixup=0.8, cutmix=1.0, randaugment_std=0.5
    ),
}  # fmt: skip


def default_recipe(model: str) -> str:
    """The name of the recipe that a model is trained with when none is given."""
    if model.endswith("_demo"):
        return "demo"
    return "cifar-vit" if model.partition("_")[0] in TRANSFORMERS else "cifar-cnn"


def recipe(name: str, **overrides: Value | None) -> Recipe:
    """A named recipe with some fields replaced; None keeps the recipe's own value.

    A warm-up that is not given is at most a fifth of the run, the weight decay of SGD 5e-4.

    Raises:
        OptionError: no such recipe or field, or a value of another type or out of its range.
    """
    if name not in RECIPES:
        raise OptionError(f"--recipe {name} is unknown; expected {_nearest(name, list(RECIPES))}")
    names = [field.name for field in fields(Recipe)]
    for field in overrides:
        if field not in names:
            raise OptionError(f"a recipe has no field {field!r}; expected {_nearest(field, names)}")
    usual = asdict(Recipe())
    given = {field: plain_value(field, value, usual[field]) for field, value in overrides.items() if value is not None}
    changed = replace(RECIPES[name], **given)
    if changed.objective != "classification":
        for field in (field for field in OF_LABELS if given.get(field)):
            what = f"--{field.replace('_', '-')} {given[field]}"
            raise OptionError(f"{what} belongs to labels; drop it for --objective {changed.objective}")
        changed = replace(changed, mixup=0.0, cutmix=0.0, label_smoothing=0.0, randaugment=0)
    if changed.optimizer == "sgd" and "weight_decay" not in given:
        changed = replace(changed, weight_decay=OF_SGD)
    if "warmup" not in given:
        changed = replace(changed, warmup=min(changed.warmup, changed.epochs / 5))
    made = validated(changed)
    if made.optimizer != "sgd" and made.momentum != RECIPES[name].momentum:
        raise OptionError(f"--momentum {made.momentum:g} belongs to sgd, got {made.optimizer}; drop it, or name sgd")
    return made


def parse_overrides(assignments: Sequence[str]) -> dict[str, Value]:
    """Parse overrides of a recipe such as `clip=1` and `flip=false`.

    Raises:
        OptionError: not of the form `FIELD=VALUE`, an unknown field, or a value of another type.
    """
    types: dict[str, type] = {name: type(value) for name, value in asdict(Recipe()).items() if name != "name"}
    overrides: dict[str, Value] = {}
    for field, value in parse_assignments("set", assignments).items():
        if field not in types:
            raise OptionError(f"--set {field}: a recipe has no such field; expected {_nearest(field, list(types))}")
        try:
            overrides[field] = BOOLEANS[value.lower()] if types[field] is bool else types[field](value)
        except (KeyError, ValueError):
            raise invalid(f"set {field}", value, TYPES[types[field]]) from None
    return overrides


def validated(recipe: Recipe) -> Recipe:
    """The same recipe, with every field in its range.

    Raises:
        OptionError: naming the option, what was given and what is expected.
    """
    r = recipe
    expectations: tuple[tuple[str, bool, str], ...] = (
        ("optimizer", r.optimizer in ("adamw", "sgd"), "adamw or sgd"),
        ("lr", 0 < r.lr < math.inf, "a positive number"),
        ("momentum", 0 <= r.momentum < 1, "at least 0 and less than 1"),
        ("weight_decay", 0 <= r.weight_decay < math.inf, "at least 0"),
        ("epochs", r.epochs >= 0 and r.epochs == int(r.epochs), "a whole number of at least 0"),
        ("warmup", 0 <= r.warmup <= r.epochs, f"between 0 and the {r.epochs} epochs of the run"),
        ("batch_size", r.batch_size >= 1 and r.batch_size == int(r.batch_size), "a whole number of at least 1"),
        ("clip", 0 <= r.clip < math.inf, "0 (no clipping) or positive"),
        ("crop", 0 <= r.crop <= 32, "between 0 (none) and 32 pixels of a 32-pixel image"),
        ("drop_path", 0 <= r.drop_path < 1, "at least 0 and less than 1"),
        ("precision", r.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16"),
        ("accumulate", r.accumulate >= 1 and r.accumulate == int(r.accumulate), "a whole number of at least 1"),
        ("ema", 0 <= r.ema < 1, "at least 0 (none) and less than 1"),
        ("sam", 0 <= r.sam < math.inf, "0 (none) or positive, such as 0.05"),
        ("objective", r.objective in ("classification", "simclr", "mim"), "classification, simclr or mim"),
        ("temperature", 0 < r.temperature < math.inf, "a positive number, such as 0.2"),
        ("projection", r.projection >= 1 and r.projection == int(r.projection), "a whole number of at least 1"),
        ("mask", 0 < r.mask <= 1, "above 0 and at most 1, such as 0.6"),
        ("decoder", r.decoder >= 0 and r.decoder == int(r.decoder), "a whole number of at least 0"),
        ("memory_format", r.memory_format in ("auto", *FORMATS), "auto, contiguous or channels_last"),
    )
    for name, holds, expected in expectations:
        require(holds, name, getattr(r, name), expected)
    Augmentation.of_recipe(asdict(recipe))  # which checks its own
    return recipe


def at_size(recipe: Recipe, size: int) -> Recipe:
    """The recipe for images of `size` pixels: 4 pixels of padding at 32 are 2 at 16 and 28 at 224."""
    return replace(recipe, crop=round(recipe.crop * size / 32))


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known
    return "one of " + ", ".join(near)
