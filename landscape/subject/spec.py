"""Options for loading a subject: checkpoint, model, data, objective, smoothing blocks. Those with a help are commands'.

Importing this module does not import torch: the command line reads its options here.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from landscape.options import (
    OptionError,
    at_least,
    invalid,
    one_of,
    parse_arguments,
    parse_assignments,
    parse_count,
    plain_value,
    regular_expression,
    require,
)
from landscape.plugins import place_of

Padding = Literal["same", "grow"]
Activation = Literal["relu", "gelu", "none"]
BLOCK_HELP = "temperature=10,blur=2,padding=same|grow,activation=relu|gelu|none: what a smoothing block does"


@dataclass(frozen=True)
class SmoothingOptions:
    """blur(activation(t tanh(x / t))) at the end of every stage, or where `at` says (Park & Kim 2022, "Blurs")."""

    temperature: float = 10.0  # t; infinity does not bound the features
    blur: int = 2  # side of the square of positions that are averaged
    padding: Padding = "same"  # "grow" pads zeros, as the published code does: an even blur adds a row and column
    activation: Activation = "relu"
    at: str = ""  # regular expression for names of modules whose outputs are smoothed; "" for the ends of stages

    @classmethod
    def parse(cls, block: str, at: str = "") -> Self:
        """From the texts of `--smooth-block` and `--smooth-at`; "" stands for the defaults.

        Raises:
            OptionError: a key is unknown, a value out of its range, or `at` is no regular expression.
        """
        regular_expression("smooth_at", at)
        given = parse_assignments("smooth_block", filter(None, block.split(",")))
        known = [field.name for field in fields(cls) if field.name != "at"]
        for key in given:
            require(key in known, "smooth_block", f"{key}=", f"{', '.join(f'{name}=' for name in known)}")
        one_of("smooth_block padding", padding := given.get("padding", cls.padding), get_args(Padding))
        one_of("smooth_block activation", activation := given.get("activation", cls.activation), get_args(Activation))
        temperature = _number("temperature", given.get("temperature", "10"))
        side = _number("blur", given.get("blur", "2"))
        require(temperature > 0, "smooth_block temperature", given.get("temperature"), "above 0 (inf: no bound)")
        require(
            side >= 1 and side == int(min(side, 1e9)), "smooth_block blur", given.get("blur"), "a whole number from 1"
        )
        return cls(temperature, int(side), padding, activation, at)  # type: ignore[arg-type]  # checked above

    @property
    def block(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "at"}

    def __str__(self) -> str:
        """The block as `--smooth-block` takes it."""
        return ",".join(
            f"{key}={value:g}" if key == "temperature" else f"{key}={value}" for key, value in self.block.items()
        )


def smoothing_of(
    smooth: bool | None, block: str, at: str, recorded: Mapping[str, Any] | None = None
) -> SmoothingOptions | None:
    """What is inserted, from the options and what a checkpoint's recipe says it was trained with; None for nothing."""
    if smooth is False:
        return None
    recipe = recorded or {}
    block, at = block or str(recipe.get("smooth", "")), at or str(recipe.get("smooth_at", ""))
    return SmoothingOptions.parse(block, at) if smooth or block or at else None


def recorded(options: SmoothingOptions | None) -> dict[str, str]:
    """The entries of a recipe that say what a network was trained with."""
    return {} if options is None else {"smooth": str(options), "smooth_at": options.at}


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise invalid(f"smooth_block {key}", text, "a number")
    return value


Split = Literal["train", "test"]
NO_OTHER_SPLIT = (
    "the subject's data have no other split, as they were made in Python; load it with "
    'landscape.load(..., data="file.py:function"), a function that takes a parameter split'
)
Weights = Literal["raw", "ema"]
Adapter = Literal["merged", "separate"]


def assignments(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Values given in Python as the words that `parse_arguments` reads."""

    def word(value: Any) -> str:
        return ",".join(map(word, value)) if isinstance(value, list | tuple) else str(value)

    return tuple(f"{key}={word(value)}" for key, value in values.items())


@dataclass(frozen=True)
class Spec:
    """Everything needed to load a subject again elsewhere: plain and picklable.

    An empty value ("", None, ()) of a field means the value of the checkpoint, the model's provider or the data. In
    the resolved spec of a loaded subject, the provider's values are filled in.
    """

    checkpoint: Path | None = None  # file with the weights; None measures the freshly built model
    model: Annotated[
        str,
        "name, timm:NAME, torchvision:NAME, hf:FOLDER, module:callable or file.py:callable, where the checkpoint does "
        "not say",
    ] = ""
    model_arg: Annotated[Mapping[str, Any], "KEY=VALUE argument of the model; repeatable"] = field(default_factory=dict)
    data: Annotated[
        str,
        "NAME, FOLDER, FILE.npz, FILE.parquet, X.npy,Y.npy, tokens.npy or file.py:callable; default: the checkpoint's",
    ] = ""
    data_root: Annotated[Path | None, "folder that holds cifar-100-python/ and the like"] = None
    split: Annotated[Split, "split of the data"] = "test"
    samples: Annotated[int | str, "a number, a share such as 10%, or all"] = "all"
    batch_size: Annotated[int, "samples per mini-batch"] = 128
    augment: Annotated[bool, "augment by the checkpoint's own recipe, drawn once"] = False
    recipe: Annotated[str, "augment by this recipe of landscape train, such as cifar-vit, in place of its own"] = ""
    weight_decay: Annotated[float, "coefficient of (1/2) ||w||^2 in the objective"] = 0.0
    loss: Annotated[
        str,
        "cross-entropy (default) and bce, of logits; nll and bce-probabilities, of probabilities; mse, l1, huber; or "
        "file.py:callable: a loss per sample",
    ] = ""
    outputs: Annotated[Literal["", "logits"], "logits: the outputs are logits, although all lie in 0 to 1"] = ""
    mc_dropout: Annotated[int, "average over this many networks with frozen dropout masks; 0 leaves dropout off"] = 0
    ignore_index: Annotated[int, "class number of pixels without a label; negative ones never have any"] = 255
    image_size: Annotated[int | None, "side of the images in pixels"] = None
    mean: Annotated[tuple[float, ...], "mean of each channel, of pixels in 0 to 1: 0.5,0.5,0.5; needs --std"] = ()
    std: Annotated[tuple[float, ...], "standard deviation of each channel, likewise; needs --mean"] = ()
    interpolation: Annotated[str, "how images are resampled: bilinear, bicubic, lanczos ..."] = ""
    crop: Annotated[str, "share of the shorter side that the centre crop keeps, or squash"] = ""
    block_size: Annotated[int | None, "tokens per sequence of a token file; default: the context, at most 1024"] = None
    smooth: Annotated[
        bool | None, "smoothing blocks at the ends of the stages, without retraining; default: as it was trained"
    ] = None
    smooth_at: Annotated[str, "REGEX: smoothing blocks after these modules instead"] = ""
    smooth_block: Annotated[str, BLOCK_HELP] = ""
    device: Annotated[str, "auto, cpu, cuda or cuda:1"] = "auto"
    seed: Annotated[int, "seed of everything random"] = 0
    weights: Annotated[Weights, "the model's weights or their moving average"] = "raw"
    adapter: Annotated[
        Adapter, "of peft: merged into the weights of its base, or separate: only its own parameters are measured"
    ] = "merged"
    trust_pickle: Annotated[bool, "unpickle the checkpoint, which may run code: only for files you trust"] = False
    allow_missing: Annotated[
        bool, "keep initial values for weights that the checkpoint lacks or has in another shape"
    ] = False
    ordered: bool = False  # samples keep the order of their source, such as frames of a stream
    logits: bool = True  # the model's outputs are used as logits; if False, its classifier may be missing

    def __post_init__(self) -> None:
        from landscape.data.preprocessing import Resize, parse_crop

        if not isinstance(self.model, str):
            raise OptionError(
                f"model={type(self.model).__name__} is no name; a module made in Python is the first argument: "
                "landscape.load(module, data=...)"
            )
        object.__setattr__(self, "model", place_of("models", self.model))
        given: Any = self.model_arg
        if not isinstance(given, Mapping):  # words, as on the command line
            object.__setattr__(self, "model_arg", parse_arguments("model_arg", given))
        if isinstance(block := self.smooth_block, Mapping):
            object.__setattr__(self, "smooth_block", ",".join(assignments(block)))
        for name in ("batch_size", "seed", "weight_decay", "mc_dropout"):
            plain = plain_value(name, getattr(self, name), type(self).__dataclass_fields__[name].default)
            object.__setattr__(self, name, plain)
        at_least("weight_decay", self.weight_decay, 0.0)
        at_least("mc_dropout", self.mc_dropout, 0)
        one_of("split", self.split, ("train", "test"))
        one_of("outputs", self.outputs or "logits", ("logits",))
        one_of("weights", self.weights, get_args(Weights))
        one_of("adapter", self.adapter, get_args(Adapter))
        for name in ("batch_size", "image_size", "block_size"):
            if (value := getattr(self, name)) is not None:
                plain_value(name, value, 1)
                at_least(name, value, 1)
        for name in ("mean", "std"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | Real) else tuple(value))
        values: tuple[Any, ...] = (*self.mean, *self.std)
        numbers = all(isinstance(one, Real) and math.isfinite(one) for one in values)
        if not numbers or len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            mean, std = (",".join(map(str, values)) or "nothing" for values in (self.mean, self.std))
            raise OptionError(
                f"--mean and --std must both be given, one number per channel and --std above 0, such as --mean 0.5 "
                f"--std 0.25; got {mean} and {std}"
            )
        Resize(self.interpolation or "bilinear", parse_crop(self.crop or "1"))
        parse_count("samples", self.samples, 100)
        smoothing_of(self.smooth, self.smooth_block, self.smooth_at)
        if self.smooth is False and (self.smooth_at or self.smooth_block):
            raise OptionError("--no-smooth contradicts --smooth-at and --smooth-block; drop it, or drop these")

    @property
    def reading(self) -> dict[str, Any]:
        """The options by which a checkpoint file is read, of this one and of further files of the same question."""
        return {"weights": self.weights, "trust_pickle": self.trust_pickle}
