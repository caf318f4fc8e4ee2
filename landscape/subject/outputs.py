"""Find the logits in what a model returns."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from landscape.data.structure import Nested, call_model


def outputs_of(model: Callable[..., Any], inputs: Nested) -> Tensor:
    """Logits of a model; see `logits_in`."""
    return logits_in(call_model(model, inputs))


def logits_or_none(returned: object) -> Tensor | None:
    """As `logits_in`, None if there are none."""
    try:
        return logits_in(returned)
    except ValueError:
        return None


def logits_in(returned: object) -> Tensor:
    """Logits from what a model returns.

    A tensor is the logits. Otherwise they are the value named `logits` (entry of a dict, attribute of a dataclass or
    named tuple), or `out` (entry of a dict, (N, C, H, W), as of torchvision's segmentation networks), or
    `last_hidden_state` (entry of a dict, (N, C)), or without one the first tensor of a tuple or list.

    Raises:
        ValueError: there are none.
    """
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        others = ((returned.get("out"), 4), (returned.get("last_hidden_state"), 2))
        several = (value for value, axes in others if isinstance(value, Tensor) and value.dim() == axes)
        named = returned["logits"] if returned.get("logits") is not None else next(several, None)
    else:
        named = getattr(returned, "logits", None)
    ordered = returned if isinstance(returned, tuple | list) else ()
    logits = next((value for value in (named, *ordered) if isinstance(value, Tensor)), None)
    if logits is None:
        raise ValueError(
            "the model returns no tensor and nothing named logits; wrap it so that it returns logits, or give a loss "
            "of what it returns with --loss file.py:function"
        )
    return logits
