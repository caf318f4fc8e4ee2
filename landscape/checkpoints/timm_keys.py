"""Rename weights of older timm releases to those of the installed one, by timm's own tables."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from landscape.checkpoints.key_matching import bare_names, match_keys

RENAMED = "renamed from an older timm"


def renamed_by_timm(model: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The same tensors under the names of the installed timm; None where the model is not timm's or nothing improves.

    timm renames in the `checkpoint_filter_fn` of a model's file (Swin before 0.8, PiT before 0.9). That function may
    also resample or split tensors, which would measure other weights than the file's: only names are taken from it, and
    what it leaves out keeps its name, so that the check of all keys and shapes still sees it.
    """
    convert = next((found for kind in type(model).__mro__ if (found := _filter_of(kind.__module__)) is not None), None)
    if convert is None:
        return None
    wanted = set(model.state_dict())
    found = match_keys(state_dict, wanted)
    if not found.missing:
        return None
    bare = bare_names(state_dict, found)
    given = {name: state_dict[own].detach() for name, own in bare.items()}  # a tensor object of its own for each name
    own_name = {id(tensor): bare[name] for name, tensor in given.items()}
    try:
        converted = convert(dict(given), model)
        new_names = {own_name[id(tensor)]: str(name) for name, tensor in converted.items()}
    except Exception:  # of another library, about names that it does not expect; KeyError: it made a new tensor
        return None
    renamed = {new_names.get(own, name): state_dict[own] for name, own in bare.items()}
    if len(renamed) < len(state_dict) or len(match_keys(renamed, wanted).missing) >= len(found.missing):
        return None
    return renamed


def _filter_of(module: str) -> Any:
    return getattr(sys.modules.get(module), "checkpoint_filter_fn", None) if module.startswith("timm.models.") else None
