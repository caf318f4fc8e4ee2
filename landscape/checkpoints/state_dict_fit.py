"""A file's names of weights brought together with a model's: wrappers and prefixes off, other networks left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from landscape.checkpoints.containers import AVERAGED, BRANCHES

# DDP and SWA, torch.compile, FSDP, activation checkpointing: they wrap a module and add a part to every name.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# What methods train beside an encoder and throw away: projections, predictions, decoders, queues of keys.
THROWN_AWAY = re.compile(
    r"(projector|projection|projection_head|proj_head|predictor|prediction_head|queue|queue_ptr|decoder|decoder_\w+"
    r"|mask_token)"
)
HEADS = {"fc", "head", "heads", "classifier"}
# Counters of wrappers and profilers, and tables that a model makes by itself.
RECOMPUTED = {AVERAGED, "total_ops", "total_params", "relative_position_index", "attn_mask", "position_ids"}
TRAINED_ALONE = {part for pair in BRANCHES for part in pair}
ENCODERS = TRAINED_ALONE | {"encoder", "backbone", "trunk"}
DEPTH = 4  # parts that a prefix may have
ADDED_DEPTH = 2  # parts that a file may lack at the front


@dataclass(frozen=True)
class Fit:
    """How a file's names fit a model's.

    Args:
        names: the model's name -> the file's.
        prefix: taken off the file's names.
        added: put before them.
        dropped: the file's names that belong to something else, left out by rule.
        unexpected: the file's names that nothing explains.
        missing: the model's names that the file does not have.
    """

    names: Mapping[str, str]
    prefix: str = ""
    added: str = ""
    dropped: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def without(self, names: Collection[str]) -> Fit:
        """The fit with some of the model's names missing."""
        return replace(
            self,
            names={name: own for name, own in self.names.items() if name not in names},
            unexpected=(*self.unexpected, *(own for name, own in self.names.items() if name in names)),
            missing=(*self.missing, *(name for name in self.names if name in names)),
        )

    @property
    def words(self) -> str:
        """What was done beside taking every name as it is; "" for nothing."""
        parts = [f"without the prefix {self.prefix}"] if self.prefix else []
        parts += [f"with the prefix {self.added}"] if self.added else []
        parts += [f"dropped {grouped(self.dropped)}"] if self.dropped else []
        left = (("left out", self.unexpected), ("as initialised", self.missing))
        parts += [f"{kind} {counted(names)}" for kind, names in left if names]
        return ", ".join(parts)


def fit(names: Iterable[str], wanted: Collection[str], weights: str = "raw") -> Fit:
    """The fit of the most names, of equal ones the one that changes least.

    Args:
        names: of the file.
        wanted: of the model.
        weights: of two networks in one file the trained one ("raw") or its moving average ("ema").
    """
    own = list(names)
    if set(own) == set(wanted):
        return Fit({name: name for name in wanted})
    plain, model = _unwrapped(own), _unwrapped(wanted)  # the plain name -> the name
    if len(plain) < len(own) or len(model) < len(wanted):  # wrappers alone tell two names apart
        plain, model = {name: name for name in own}, {name: name for name in wanted}
    other = _other_branch(plain, model, weights)
    candidates = [name for name in plain if name not in other]
    prefix, added = _prefixes(candidates, model)
    matched, rest = {}, []
    for name in candidates:
        bare = added + name.removeprefix(prefix)
        if name.startswith(prefix) and bare in model:
            matched[bare] = name
        else:
            rest.append(name)
    thrown = [name for name in rest if _thrown_away(name, prefix)]
    if _beside_a_projection(prefix, thrown, rest):  # then its encoder's own head is one of them, whatever its name
        heads = [bare for bare, name in matched.items() if name.removeprefix(prefix).split(".")[0] in HEADS]
        thrown += [matched.pop(bare) for bare in heads]
        thrown += [name for name in rest if name.removeprefix(prefix).split(".")[0] in HEADS and name not in thrown]
    found = {model[bare]: plain[name] for bare, name in matched.items()}
    return Fit(
        names={name: found[name] for name in wanted if name in found},
        prefix=prefix,
        added=added,
        dropped=tuple(plain[name] for name in [*other, *thrown]),
        unexpected=tuple(plain[name] for name in rest if name not in thrown),
        missing=tuple(name for name in wanted if name not in found),
    )


def of_a_head(name: str) -> bool:
    """Whether a weight belongs to a classifier, by its name."""
    return any(part in HEADS for part in name.split(".")[:2])


def counted(names: Sequence[str]) -> str:
    """How many, and the first few: `4 (fc.0.weight, fc.0.bias, fc.2.weight, ...)`."""
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "0"


def _unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Names without the parts that wrappers add -> names."""
    return {".".join(part for part in name.split(".") if part not in WRAPPERS) or name: name for name in names}


def _other_branch(plain: Mapping[str, str], model: Mapping[str, str], weights: str) -> list[str]:
    """Names of the network that was not asked for, where a file holds a network and its moving average."""
    parts = {part for name in plain for part in name.split(".")}
    inside = {part for name in model for part in name.split(".")}
    for trained, average in BRANCHES:
        if trained in parts and average in parts and not {trained, average} <= inside:
            left = average if weights == "raw" else trained
            return [name for name in plain if left in name.split(".")]
    return []


def _prefixes(names: Collection[str], model: Mapping[str, str]) -> tuple[str, str]:
    """The prefix to take off and the one to put on with which most names are the model's."""
    scores: Counter[tuple[str, str]] = Counter()
    ends: dict[str, list[str]] = {}  # the model's names without their first parts -> those parts
    for name in model:
        for added, bare in _splits(name, ADDED_DEPTH):
            ends.setdefault(bare, []).append(added)
    for name in names:
        for prefix, bare in _splits(name, DEPTH):
            scores.update((prefix, added) for added in ends.get(bare, ()))
    best = max(scores, key=lambda pair: (scores[pair], -pair[1].count("."), -pair[0].count(".")), default=("", ""))
    # a few names that agree once their fronts are gone, as of two blocks, say nothing
    return best if 2 * scores[best] >= min(len(names), len(model)) else ("", "")


def _splits(name: str, depth: int) -> list[tuple[str, str]]:
    parts = name.split(".")
    return [
        (".".join([*parts[:i], ""]) if i else "", ".".join(parts[i:])) for i in range(min(depth, len(parts) - 1) + 1)
    ]


def _thrown_away(name: str, prefix: str) -> bool:
    parts = name.split(".")
    if parts[-1] in RECOMPUTED or any(THROWN_AWAY.fullmatch(part) for part in parts):
        return True
    return _last(prefix) in ENCODERS and not name.startswith(prefix) and parts[0] in HEADS


def grouped(names: Sequence[str]) -> str:
    """How many names, and of what: `63 (momentum_encoder 61, predictor, head)`."""
    counts = Counter(_what(name) for name in names)
    return f"{len(names)} ({', '.join(kind if n == 1 else f'{kind} {n}' for kind, n in counts.most_common())})"


def _what(name: str) -> str:
    parts = name.split(".")
    heads = [part for part in parts if part in HEADS or THROWN_AWAY.fullmatch(part)]
    return next(iter([*heads, *(part for part in parts if part in TRAINED_ALONE)]), parts[-1])


def _beside_a_projection(prefix: str, thrown: Sequence[str], rest: Sequence[str]) -> bool:
    """Whether an encoder's own `fc` or `head` is no classifier: it was trained against another network's."""
    beside = [
        name for name in thrown if not re.search(r"decoder|mask_token", name) and name.split(".")[-1] not in RECOMPUTED
    ]
    return _last(prefix) in TRAINED_ALONE or bool(beside)


def _last(prefix: str) -> str:
    return prefix.rstrip(".").rpartition(".")[2]
