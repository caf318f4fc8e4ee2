"""Find how a network uses its weights: the axes of filters, and the tables that are only added to activations.

The type of the module that owns a weight decides where it is known. Otherwise one forward pass is recorded, operation
by operation: which axes of a weight, or of a rearranged copy of it, a matrix product or a convolution sums over, and
whether it depends on the input's values which rows of a table are looked up.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints.user_code import fixed_rng
from landscape.options import listed
from landscape.subject import mc_dropout, weights_cache
from landscape.subject.loading.checks import refuse_training
from landscape.subject.subject import Subject
from landscape.weight_space.directions import POSITIONS, Filters, Normalize
from landscape.weight_space.pass_recorder import PassRecorder

_log = logging.getLogger(__name__)
# Position tables that `POSITIONS` does not name, for passes that do not show them: a table that is looked up by an
# attention mask from the data depends on the input's values.
TABLES = r"(^|\.)wpe\.|embed_positions|relative_attention_bias|rel_embeddings"
NORMS = (nn.LayerNorm, nn.RMSNorm)  # of any shape


@dataclass(frozen=True)
class WeightUses:
    """What a random direction has to know beyond the weights; empty for linear layers and ordinary convolutions."""

    filters: Mapping[str, Filters] = field(default_factory=dict)  # of weights whose filters are not along dim 0
    added: tuple[str, ...] = ()  # parameters that are only added to activations: position tables, biases of any shape
    unknown: tuple[str, ...] = ()  # weights whose use is unclear: dim 0 is taken to number the filters

    def movable(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights without the parameters that are only added."""
        return {name: weight for name, weight in weights.items() if name not in self.added}

    @property
    def identity(self) -> Any:
        """What a random direction depends on beyond seed, weights and options, for the run key."""
        if not (self.filters or self.added):
            return "random"
        return {"random": {n: [f.shape, f.summed] for n, f in self.filters.items()}, "not moved": self.added}

    @property
    def words(self) -> str:
        """The filters that are not slices along dim 0, or that may not be; "" if there are none."""
        words = [f"not along dim 0: {listed(self.filters)}"] if self.filters else []
        words += [f"use unclear, along dim 0: {listed(self.unknown)}"] if self.unknown else []
        return "; ".join(words)


def not_moved(subject: Subject, directions: Iterable[Mapping[str, Tensor]]) -> str:
    """The parameters that none of the directions moves, in short; "none" if every parameter moves."""
    moving = {name for direction in directions for name in direction}
    fixed = {name: p for name, p in subject.parameters.items() if name not in moving}
    tables = [name for name, p in fixed.items() if p.dim() >= 2]
    vectors, frozen = len(fixed) - len(tables), sum(not p.requires_grad for p in subject.model.parameters())
    parts = (
        listed(tables),
        f"biases and norm scales ({vectors})" * bool(vectors),
        f"frozen parameters ({frozen})" * bool(frozen),
    )
    return "; ".join(filter(None, parts)) or "none"


@weights_cache.once_per_weights
def weight_uses(subject: Subject, normalize: Normalize, ignore: str) -> WeightUses:
    """`uses_of`, for random directions: what is unusual is logged, once."""
    uses = uses_of(subject, normalize, ignore)
    for what, names in (
        ("filters not along dim 0", uses.filters), ("not moved, like biases and position tables", uses.added),
        ("use unclear, filters along dim 0 assumed", uses.unknown),
    ):  # fmt: skip
        if names:
            _log.info("random directions: %s: %s", what, listed(names))
    return uses


@weights_cache.once_per_weights
def uses_of(subject: Subject, normalize: Normalize, ignore: str) -> WeightUses:
    """How the subject's trainable parameters of two or more dimensions are used.

    Parameters that are only added stand still by the default of `--ignore` alone: a user's own replaces it.
    """
    weights = {name: p for name, p in subject.parameters.items() if p.dim() >= 2}
    by_default = ignore == POSITIONS
    if by_default:
        weights = {name: p for name, p in weights.items() if not re.search(POSITIONS, name)}
    typed = _by_types(subject.model, weights)
    doubtful = {name: p for name, p in weights.items() if len(typed[name]) != 1}
    recorder = _recorded(subject, doubtful)
    added = [
        n for n in weights if typed[n] == {None} or n in recorder.added or (n in doubtful and re.search(TABLES, n))
    ]
    tables = {id(m.weight) for m in subject.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    filters, unknown = {}, []
    for name, p in weights.items():
        found = recorder.filters(name) if name in doubtful else next(iter(typed[name]))
        if found is not None and found != Filters.along_rows(p.shape):
            filters[name] = found
        elif found is None and name not in added and id(p) not in tables and _ambiguous(p):
            unknown.append(name)
    per_filter = normalize == "filter"
    return WeightUses(
        filters if per_filter else {}, tuple(added) if by_default else (), tuple(unknown) if per_filter else ()
    )


def _ambiguous(weight: Tensor) -> bool:
    """Whether it matters which axis numbers the filters; a single token, (1, 1, D), is one filter in any case."""
    return weight.shape[0] > 1 or sum(size > 1 for size in weight.shape) > 1


def _by_types(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> dict[str, set[Filters | None]]:
    """Filters by the types of the modules that own a parameter: None for a norm's, empty where no type decides."""
    names = {id(p): name for name, p in weights.items()}
    found: dict[str, set[Filters | None]] = {name: set() for name in weights}
    for module in model.modules():
        for attribute, p in module._parameters.items():
            if id(p) in names and p is not None:
                found[names[id(p)]].update(_by_type(module, attribute, tuple(p.shape)))
    return found


def _by_type(module: nn.Module, name: str, shape: tuple[int, ...]) -> Iterator[Filters | None]:
    if isinstance(module, NORMS):
        yield None
    elif isinstance(module, nn.MultiheadAttention):
        yield from [Filters.along_rows(shape)] if name.endswith("proj_weight") else []
    elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
        yield from [Filters.along_rows(shape)] if name.startswith("weight_") else []
    elif name == "weight" and isinstance(module, nn.modules.conv._ConvTransposeNd):
        yield Filters.of_transposed_convolution(shape, module.groups)
    elif name == "weight" and isinstance(module, nn.Linear | nn.Bilinear | nn.modules.conv._ConvNd):
        yield Filters.along_rows(shape)
    elif name == "weight" and type(module).__name__ == "Conv1D" and shape[1:] == (getattr(module, "nf", None),):
        yield Filters(shape, (0,))  # of transformers: (in, out)


def _recorded(subject: Subject, parameters: Mapping[str, nn.Parameter]) -> PassRecorder:
    """A recorded forward pass of two samples, or of a mini-batch; without any use if the model cannot be recorded."""
    if not parameters:
        return PassRecorder({}, ())
    subject = mc_dropout.as_is(subject)
    refuse_training(subject.model)  # the pass would change batch norm's statistics
    whole = subject.batch(0)[0]
    for inputs in (subject.example()[0], whole):  # an exported program may take one batch size alone
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # its fused layer would hide the operations
        try:
            recorder = PassRecorder(parameters, inputs)
            with torch.no_grad(), fixed_rng(0), recorder:
                subject.outputs(inputs)
            return recorder
        except Exception as error:  # of a user's model; the measurement itself reports what is wrong
            _log.debug("the forward pass could not be recorded: %s", error)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
    return PassRecorder(parameters, whole)
