"""Build the bundled networks by name."""

import difflib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from landscape.models import alternet
from landscape.models.alternet import AlterNet
from landscape.models.mixer import Mixer
from landscape.models.pit import PiT
from landscape.models.preresnet import PreResNet
from landscape.models.resnet import SMALL, ResNet
from landscape.models.swin import Swin
from landscape.models.vit import LocalViT, ViT
from landscape.options import BOOLEANS, OptionError, alternatives

__all__ = ["NAMES", "accepts", "arguments_of", "build", "build_up", "summary"]

MODELS: Mapping[str, partial[Any]] = {
    "vit_ti": partial(ViT, dim=192, depth=12, heads=3),
    "vit_s": partial(ViT, dim=384, depth=12, heads=6),
    "vit_b": partial(ViT, dim=768, depth=12, heads=12),
    "localvit_ti": partial(LocalViT, dim=192, depth=12, heads=3),
    "resnet18": partial(ResNet, blocks=(2, 2, 2, 2)),
    "resnet34": partial(ResNet, blocks=(3, 4, 6, 3)),
    "resnet50": partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True),
    "resnet101": partial(ResNet, blocks=(3, 4, 23, 3), bottleneck=True),
    "resnext50": partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True, groups=32, width_per_group=4),
    "wideresnet50": partial(ResNet, blocks=(3, 4, 6, 3), bottleneck=True, width_per_group=128),
    "preresnet18": partial(PreResNet, blocks=(2, 2, 2, 2)),
    "preresnet34": partial(PreResNet, blocks=(3, 4, 6, 3)),
    "preresnet50": partial(PreResNet, blocks=(3, 4, 6, 3), bottleneck=True),
    "preresnet101": partial(PreResNet, blocks=(3, 4, 23, 3), bottleneck=True),
    "alternet18": partial(AlterNet, blocks=(2, 2, 2, 2), msa=(0, 1, 1, 1)),
    "alternet34": partial(AlterNet, blocks=(3, 4, 6, 4), msa=(0, 1, 3, 2)),
    "alternet50": partial(AlterNet, blocks=(3, 4, 6, 4), msa=(0, 1, 1, 2), bottleneck=True),
    "alternet101": partial(AlterNet, blocks=(3, 4, 23, 4), msa=(0, 1, 3, 2), bottleneck=True),
    "swin_ti": partial(Swin, dim=96, depths=(2, 2, 6, 2)),
    "pit_ti": partial(PiT, heads=(2, 4, 8), head_dim=32),
    "pit_xs": partial(PiT, heads=(2, 4, 8), head_dim=48),
    "pit_s": partial(PiT, heads=(3, 6, 12), head_dim=48),
    "mixer_ti": partial(Mixer, dim=256, depth=8, token_hidden=128, channel_hidden=1024),
    "mixer_s": partial(Mixer, dim=512, depth=8, token_hidden=256, channel_hidden=2048),
    # The demo sizes: 0.1 to 0.3 M parameters, a few seconds per epoch of digits on two CPU cores.
    "vit_demo": partial(ViT, dim=48, depth=5, heads=3, tokens=64, std=0.1),
    "resnet_demo": partial(ResNet, blocks=(2, 2, 2), width=16),
    "preresnet_demo": partial(PreResNet, blocks=(2, 2, 2), width=16),
    "alternet_demo": partial(AlterNet, blocks=(2, 2, 2), msa=(0, 1, 1), heads=(1, 2, 4), head_dim=32, width=16),
}
# Networks whose ImageNet version in the paper differs from the CIFAR version.
LARGE: Mapping[str, partial[Any]] = {
    "alternet50": partial(AlterNet, blocks=(3, 4, 6, 4), msa=(0, 1, 3, 2), bottleneck=True)
}
NAMES: tuple[str, ...] = tuple(MODELS)
SIZES = ("classes", "image_size", "channels")


def build(name: str, *, classes: int, image_size: int, channels: int = 3, **arguments: object) -> nn.Module:
    """A freshly initialised network, (N, channels, image_size, image_size) images to (N, classes) logits.

    Its structure depends only on the arguments, its weights on torch's random state. Up to 64 px a stem keeps the
    resolution. Further arguments are those of its constructor (see `accepts`); values may be text, as on a command
    line.

    Raises:
        ValueError: the name or an argument is unknown, or values contradict each other.
        OptionError: a value is outside its range.
    """
    kinds = _kinds(name)
    unknown = [argument for argument in arguments if argument not in accepts(name)]
    if unknown:
        raise ValueError(f"{name} has no argument {unknown[0]}; it accepts {', '.join(accepts(name))}")
    sizes = dict(zip(SIZES, map(whole_number, SIZES, (classes, image_size, channels)), strict=True))
    constructor = (LARGE if sizes["image_size"] > SMALL else MODELS).get(name, MODELS[name])
    given = {argument: converted(argument, value, kinds[argument]) for argument, value in arguments.items()}
    model: nn.Module = constructor(**sizes, **given)
    return model


def accepts(name: str) -> tuple[str, ...]:
    """Names of the arguments that `build` accepts for this network besides the three sizes.

    Raises:
        ValueError: there is no such network.
    """
    return tuple(argument for argument in _kinds(name) if argument not in SIZES)


def arguments_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a network that was built with some of them: those, its own, and the defaults of its class.

    Raises:
        ValueError: there is no such network.
    """
    kinds = _kinds(name)
    parameters = inspect.signature(MODELS[name].func.__init__).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.name in accepts(name)}
    found = {**defaults, **MODELS[name].keywords, **given}
    return {
        key: converted(key, value, kinds[key])
        for key, value in found.items()
        if key in kinds and value is not inspect.Parameter.empty
    }


def build_up(name: str) -> list[tuple[int, ...]]:
    """The MSA placements of an AlterNet with 0, 1, 2, ... of its MSAs, from the last stage backward.

    Raises:
        ValueError: there is no such network, or it is not an AlterNet.
    """
    if "msa" not in accepts(name):
        raise ValueError(f"{name} is not an AlterNet; give one of {', '.join(n for n in NAMES if 'alternet' in n)}")
    msa = MODELS[name].keywords["msa"]
    return [alternet.build_up(msa, count) for count in range(sum(msa) + 1)]


def summary(name: str, **arguments: Any) -> str:
    """A line about a network: its family, arguments (the given ones override its own), and size for CIFAR-100.

    Raises:
        ValueError: there is no such network.
    """
    with torch.device("meta"):  # shapes without values: nothing is allocated or drawn
        model = build(name, classes=100, image_size=32, **arguments)
    count = sum(parameter.numel() for parameter in model.parameters())
    words = [
        argument if value is True else f"{argument} {'-'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for argument, value in {**MODELS[name].keywords, **arguments}.items()
    ]
    return f"{type(model).__name__}, {', '.join(words)}: {count / 1e6:.2f} M parameters (32 px, 100 classes)"


def _kinds(name: str) -> dict[str, Any]:
    if name not in MODELS:
        if ":" in name:
            raise ValueError(
                f"{name} is not one of the bundled networks, which alone are trained here; train it with code of your "
                f"own and measure it: landscape hessian WEIGHTS.pt --model {name}"
            )
        near = difflib.get_close_matches(name, NAMES, n=3) or list(NAMES[:3])
        raise ValueError(f"no model is named {name!r}; similar names: {', '.join(near)}; landscape models lists all")
    hints = get_type_hints(MODELS[name].func.__init__)
    return {argument: kind for argument, kind in hints.items() if argument != "return"}


MOST_STAGES = 100
MOST = dict.fromkeys(("depth", "depths", "blocks", "msa"), 1_000)  # layers: each takes a moment to make
LEAST = {"msa": 0}  # every other whole number counts something a network cannot do without


def converted(name: str, value: object, kind: Any) -> object:
    """Convert a value, which may be text ("4", "0,1,1,2", "true", "none") or a list, to the type of its annotation.

    The annotation is `int`, `float` (always a rate in [0, 1)), `bool`, `tuple[int, ...]`, a `Literal` of words, or one
    of them `| None`.

    Raises:
        OptionError: it cannot be converted, or is out of range.
    """
    if type(None) in get_args(kind):
        if value is None or str(value).lower() == "none":
            return None
        kind = next(member for member in get_args(kind) if member is not type(None))
        try:
            return converted(name, value, kind)
        except OptionError as error:
            raise OptionError(f"{error} (none is valid too)") from None
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _invalid(name, value, alternatives(get_args(kind)))
        return value
    if get_origin(kind) is tuple:
        words = value.strip("()[] ").rstrip(",").split(",") if isinstance(value, str) else value
        entries = words if isinstance(words, list | tuple) else [words]
        if not 0 < len(entries) <= MOST_STAGES:
            raise _invalid(name, value, "one whole number per stage, such as 2,2,2,2")
        return tuple(whole_number(name, entry) for entry in entries)
    if kind is bool:
        if str(value).lower() not in BOOLEANS:
            raise _invalid(name, value, "true or false")
        return BOOLEANS[str(value).lower()]
    return _rate(name, value) if kind is float else whole_number(name, value)


def whole_number(name: str, value: object) -> int:
    """Convert a whole number of at least 1 (of at least 0 where `LEAST` says so). Raises OptionError: it is none."""
    least = LEAST.get(name, 1)
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else least - 1
    except ValueError:
        number = least - 1
    if number < least:
        raise _invalid(name, value, f"a whole number of at least {least}")
    if number > MOST.get(name, number):
        raise _invalid(name, value, f"at most {MOST[name]:,}")
    return number


def _rate(name: str, value: object) -> float:
    try:
        rate = float(value) if isinstance(value, int | float | str) else float("nan")
    except ValueError:
        rate = float("nan")
    if not 0.0 <= rate < 1.0:
        raise _invalid(name, value, "a number of at least 0 and below 1")
    return rate


def _invalid(name: str, value: object, expected: str) -> OptionError:
    return OptionError(f"{name} must be {expected}, got {value}")
