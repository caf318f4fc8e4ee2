"""Match the weight names of a file to those of a model: wrappers, prefixes, other networks, older timm releases."""

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from landscape.checkpoints.containers import AVERAGED, BRANCHES, is_average

# DDP and SWA, torch.compile, FSDP and activation checkpointing wrap a module and add a part to every name.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# What self-supervised methods train beside an encoder and discard: projections, predictors, decoders, queues of keys.
DISCARDED = re.compile(
    r"projector|projection(_head)?|proj_head|predictor|prediction_head|queue(_ptr)?|decoder(_\w+)?|mask_token"
)
# What a trainer's module holds beside its network: losses and metrics with tensors of their own.
BESIDE = re.compile(r"criterion|(.*_)?loss(es)?(_fn|_function)?|(.*_)?(metric|acc|accuracy)s?")
HEADS = {"fc", "head", "heads", "classifier"}
# Counters of wrappers and profilers, and tables that a model recomputes.
RECOMPUTED = {AVERAGED, "total_ops", "total_params", "relative_position_index", "attn_mask", "position_ids"}
TRAINED_ALONE = {part for pair in BRANCHES for part in pair}
ENCODERS = TRAINED_ALONE | {"encoder", "backbone", "trunk"}
DEPTH = 4  # maximum number of parts of a prefix
ADDED_DEPTH = 2  # maximum number of leading parts that the file may lack


@dataclass(frozen=True)
class KeyMatch:
    """How a file's names correspond to a model's."""

    names: Mapping[str, str]  # the model's name -> the file's
    prefix: str = ""  # removed from the file's names
    added: str = ""  # put in front of them
    dropped: tuple[str, ...] = ()  # the file's names that belong to another network, left out by rule
    unexpected: tuple[str, ...] = ()  # the file's other names that the model does not have
    missing: tuple[str, ...] = ()  # the model's names that the file does not have

    def without(self, names: Collection[str]) -> "KeyMatch":
        """The same match with some of the model's names missing."""
        return replace(
            self,
            names={name: own for name, own in self.names.items() if name not in names},
            unexpected=(*self.unexpected, *(own for name, own in self.names.items() if name in names)),
            missing=(*self.missing, *(name for name in self.names if name in names)),
        )

    @property
    def words(self) -> str:
        """What was changed or left out, for messages; "" for nothing."""
        parts = [f"without the prefix {self.prefix}"] if self.prefix else []
        parts += [f"with the prefix {self.added}"] if self.added else []
        parts += [f"dropped {grouped(self.dropped)}"] if self.dropped else []
        left = (("left out", self.unexpected), ("as initialised", self.missing))
        parts += [f"{kind} {len(names)}{listed(names)}" for kind, names in left if names]
        return ", ".join(parts)


def match_keys(names: Iterable[str], wanted: Collection[str], weights: str = "raw") -> KeyMatch:
    """Match as many names of a file as possible with `wanted`, the model's; of equal matches, with the least change.

    Of two networks in one file, `weights` selects the trained one ("raw") or its moving average ("ema").
    """
    own = list(names)
    if set(own) == set(wanted):
        return KeyMatch({name: name for name in wanted})
    plain, model = _unwrapped(own), _unwrapped(wanted)  # name without wrappers -> name
    if len(plain) < len(own) or len(model) < len(wanted):  # two names differ only by a wrapper
        plain, model = {name: name for name in own}, {name: name for name in wanted}
    other = _other_branch(plain, model, weights)
    candidates = [name for name in plain if name not in other]
    prefix, added = _prefixes(candidates, model, weights)
    matched, rest = {}, []
    for name in candidates:
        bare = added + name.removeprefix(prefix)
        if name.startswith(prefix) and bare in model:
            matched[bare] = name
        else:
            rest.append(name)
    whole = prefix != "" and len(matched) == len(model)
    beside = [name for name in rest if _is_beside(name, prefix, whole)]
    discarded = [name for name in rest if name not in beside and _is_discarded(name, prefix)]
    if _beside_a_projection(prefix, discarded):  # then the encoder's own head is a projection too

        def heads(names: Iterable[str]) -> list[str]:
            return [name for name in names if name.removeprefix(prefix).split(".")[0] in HEADS]

        discarded += [*heads(matched.values()), *(name for name in heads(rest) if name not in discarded)]
        matched = {bare: name for bare, name in matched.items() if name not in discarded}
    found = {model[bare]: plain[name] for bare, name in matched.items()}
    return KeyMatch(
        names={name: found[name] for name in wanted if name in found},
        prefix=prefix,
        added=added,
        dropped=tuple(plain[name] for name in [*other, *discarded, *beside]),
        unexpected=tuple(plain[name] for name in rest if name not in discarded and name not in beside),
        missing=tuple(name for name in wanted if name not in found),
    )


def bare_names(names: Iterable[str], found: KeyMatch) -> dict[str, str]:
    """The names of a file without wrappers and the matched prefix -> the file's own."""
    own = list(names)
    plain = _unwrapped(own)
    plain = plain if len(plain) == len(own) else {name: name for name in own}
    return {found.added + name.removeprefix(found.prefix): name_in_file for name, name_in_file in plain.items()}


def is_head(name: str) -> bool:
    """Whether a weight belongs to a classifier, by its name."""
    return any(part in HEADS for part in name.split(".")[:2])


def listed(names: Sequence[str]) -> str:
    """The first few in parentheses, after a space: ` (fc.0.weight, fc.0.bias, fc.2.weight, ...)`; "" for none."""
    return f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""


def _unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Name without the parts that wrappers add -> name."""
    return {".".join(part for part in name.split(".") if part not in WRAPPERS) or name: name for name in names}


def _other_branch(plain: Mapping[str, str], model: Mapping[str, str], weights: str) -> list[str]:
    """Names of the other network, if a file holds a network and its moving average."""
    parts = {part for name in plain for part in name.split(".")}
    inside = {part for name in model for part in name.split(".")}
    for trained, average in BRANCHES:
        if trained in parts and average in parts and not {trained, average} <= inside:
            left = average if weights == "raw" else trained
            return [name for name in plain if left in name.split(".")]
    return []


def _prefixes(names: Collection[str], model: Mapping[str, str], weights: str) -> tuple[str, str]:
    """The prefix to remove and the one to add that make most names the model's, of equal ones that of the `weights`."""
    scores: Counter[tuple[str, str]] = Counter()
    ends: dict[str, list[str]] = {}  # name without its first parts -> those parts
    for name in model:
        for added, bare in _splits(name, ADDED_DEPTH):
            ends.setdefault(bare, []).append(added)
    for name in names:
        for prefix, bare in _splits(name, DEPTH):
            scores.update((prefix, added) for added in ends.get(bare, ()))

    def rank(pair: tuple[str, str]) -> tuple[bool, int, bool, int, int]:
        asked = is_average(pair[0]) == (weights == "ema")
        enough = 2 * scores[pair] >= min(len(names), len(model))
        return asked and enough and weights == "ema", scores[pair], asked, -pair[1].count("."), -pair[0].count(".")

    best = max(scores, key=rank, default=("", ""))
    # a few names that agree without their first parts, as those of two blocks do, are no evidence
    return best if 2 * scores[best] >= min(len(names), len(model)) else ("", "")


def _splits(name: str, depth: int) -> list[tuple[str, str]]:
    parts = name.split(".")
    cuts = range(min(depth, len(parts) - 1) + 1)
    return [("".join(f"{part}." for part in parts[:i]), ".".join(parts[i:])) for i in cuts]


def _is_discarded(name: str, prefix: str) -> bool:
    parts = name.split(".")
    if parts[-1] in RECOMPUTED or any(DISCARDED.fullmatch(part) for part in parts):
        return True
    return _last(prefix) in ENCODERS and not name.startswith(prefix) and parts[0] in HEADS


def _is_beside(name: str, prefix: str, whole: bool) -> bool:
    """Whether a name is of a loss or a metric; or of another module than the one that is the `whole` model."""
    first = name.split(".")[0]
    return BESIDE.fullmatch(first) is not None or (whole and not name.startswith(prefix) and first not in HEADS)


def grouped(names: Sequence[str]) -> str:
    """How many names, by the module they belong to: `63 (momentum_encoder 61, predictor, head)`."""
    counts = Counter(_owner(name) for name in names)
    return f"{len(names)} ({', '.join(kind if n == 1 else f'{kind} {n}' for kind, n in counts.most_common())})"


def _owner(name: str) -> str:
    parts = name.split(".")
    heads = [part for part in parts if part in HEADS or DISCARDED.fullmatch(part)]
    trained = [part for part in parts if part in TRAINED_ALONE or BESIDE.fullmatch(part) or is_average(f"{part}.")]
    return [*heads, *trained, parts[-1] if parts[-1] in RECOMPUTED else parts[0]][0]


def _beside_a_projection(prefix: str, discarded: Sequence[str]) -> bool:
    """Whether an encoder's own `fc` or `head` is a projection, trained against another network's, and no classifier."""
    return _last(prefix) in TRAINED_ALONE or any(
        not re.search(r"decoder|mask_token", name) and name.split(".")[-1] not in RECOMPUTED for name in discarded
    )


def _last(prefix: str) -> str:
    return prefix.rstrip(".").rpartition(".")[2]


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
