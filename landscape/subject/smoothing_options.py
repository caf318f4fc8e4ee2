"""Options of smoothing blocks: what a block does, and where the blocks are inserted.

Importing this module does not import torch: the command line reads its options here.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from landscape.options import invalid, one_of, parse_assignments, regular_expression, require

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
        """The arguments of a block."""
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
