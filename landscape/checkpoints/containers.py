"""Find the weights in the content of a checkpoint, and the architecture that it names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from landscape.options import printable

T = TypeVar("T")
Weights = Literal["raw", "ema"]

# Names of entries, in the order of search. A teacher is the moving average of its student (DINO, iBOT, DINOv2).
CONTAINERS: Mapping[str, tuple[str, ...]] = {
    "raw": ("state_dict", "model_state_dict", "model", "net", "params", "module", "student", "teacher"),
    "ema": ("state_dict_ema", "model_ema", "ema", "ema_state_dict", "teacher"),
}
# Two networks in one dict, (trained, its moving average): MoCo, MoCo v3, BYOL, DINO.
BRANCHES = (
    ("encoder_q", "encoder_k"), ("base_encoder", "momentum_encoder"), ("online_network", "target_network"),
    ("online_encoder", "target_encoder"), ("student", "teacher"),
)  # fmt: skip
# A part of a name that says that what follows is a moving average, such as `ema_model` or `model_ema`.
AVERAGES = re.compile(r"(.*_)?(ema|swa|avg|averaged?|shadow|momentum|teacher|target)(_.*)?")
FORMAT = 1
AVERAGED = "n_averaged"  # of torch.optim.swa_utils.AveragedModel
THE_FILE = "the file itself"
ARCHITECTURE = re.compile(r"[A-Za-z][\w.\-/]{0,199}")
EXTRA_STATE = "_extra_state"  # of any type, by torch's convention


@dataclass(frozen=True)
class FoundWeights(Generic[T]):
    """The weights in the content of a file."""

    weights: dict[str, T]  # name -> tensor
    taken: str  # the entry that holds them
    others: tuple[str, ...] = ()  # further entries that hold weights


def weights_in(content: Any, weights: Weights) -> FoundWeights[Any]:
    """The weights in the content of a file, as tensors or outlines.

    Raises:
        ValueError: there are none; the message continues "FILE ..." and says what was found instead.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"holds a {type(content).__name__}, expected a dict of tensors (a state dict)")
    found = [name for name in CONTAINERS[weights] if is_state_dict(content.get(name))]
    everywhere = dict.fromkeys([*CONTAINERS["raw"], *CONTAINERS["ema"]])
    others = tuple(name for name in everywhere if name not in found[:1] and is_state_dict(content.get(name)))
    if found:
        return FoundWeights(_tensors(content[found[0]]), found[0], others)
    inside = [name for name in CONTAINERS["raw"] if is_state_dict(content.get(name))]
    raw = content[inside[0]] if inside else content
    if weights == "ema" and not (is_state_dict(raw) and _has_average(_tensors(raw))):
        raise ValueError(f"has no moving average ({', '.join(CONTAINERS['ema'])}); drop --weights ema")
    if not is_state_dict(raw):
        raise ValueError(
            f"holds no weights: expected a dict of tensors or one under {', '.join(CONTAINERS['raw'])}, "
            f"got the keys {', '.join(printable(key)[:40] for key in list(content)[:6])}"
        )
    return FoundWeights(_tensors(raw), inside[0] if inside else THE_FILE)


def is_native(content: Any) -> bool:
    """Whether the content is in this project's own format. Raises ValueError: it is, in another version."""
    if not isinstance(content, Mapping):
        return False
    version = content.get("format")
    if not isinstance(version, int) or not isinstance(content.get("model"), str):
        return False
    if version != FORMAT:
        raise ValueError(f"has format {version}, this version reads format {FORMAT}; update landscape")
    return True


def _has_average(names: Mapping[str, Any]) -> bool:
    """Whether a state dict is a moving average, or holds one next to the network."""
    parts = {part for name in names for part in name.split(".")}
    return AVERAGED in parts or any(average in parts for _, average in BRANCHES) or any(map(is_average, names))


def is_average(name: str) -> bool:
    """Whether one of the first parts of a name, or of a prefix, says that it is of a moving average."""
    return any(map(AVERAGES.fullmatch, name.split(".")[:-1]))


def is_state_dict(value: object) -> bool:
    """Whether a value is a non-empty mapping of names to tensors."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        return False
    tensors = [_is_tensor(item) for name, item in value.items() if not name.endswith(EXTRA_STATE)]
    return any(tensors) and all(tensors)


def architecture_in(content: Any) -> str:
    """The name of the architecture in the file: timm's `arch`, or `model` of a script's arguments; or "".

    It is not trusted: callers look it up among known names and never import it.
    """
    if not isinstance(content, Mapping):
        return ""
    arguments = content.get("args")
    arguments = arguments if isinstance(arguments, Mapping) else getattr(arguments, "__dict__", {})
    hyper = content.get("hyper_parameters")
    hyper = hyper if isinstance(hyper, Mapping) else {}
    words = [content.get("arch"), arguments.get("arch"), arguments.get("model"), hyper.get("arch"), hyper.get("model")]
    return next((word for word in words if isinstance(word, str) and ARCHITECTURE.fullmatch(word)), "")


def _tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state_dict.items() if _is_tensor(value)}


def _is_tensor(value: object) -> bool:
    return callable(getattr(value, "numel", None)) and hasattr(value, "shape")
