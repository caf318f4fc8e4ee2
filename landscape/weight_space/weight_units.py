"""Units of weights that are perturbed one at a time: layers, blocks, heads, neuron groups; their Hessian traces."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from landscape.discovery.graph import Flow
from landscape.discovery.layer import Layer
from landscape.options import matching, nearest
from landscape.probe import derived_seed
from landscape.products import hvp_backends, micro_batches, vectors
from landscape.random_vectors import signs
from landscape.subject.subject import Subject
from landscape.weight_space import directions, weight_uses, weights_in_place

Rows = tuple[range, ...]  # of a weight as (filters, entries); () for all
Change = Callable[[Tensor, str], Tensor]  # rows of a weight and a key -> as many changed rows


@dataclass(frozen=True)
class Weight:
    """A weight of a matrix product, a convolution or an embedding."""

    name: str  # of the parameter
    module: str  # that owns it
    kind: str  # class of that module
    filters: directions.Filters
    count: int  # filters
    size: int  # numbers
    call: int  # position in `Flow.calls` of the first call that can read it


@dataclass(frozen=True)
class Piece:
    """All filters of a weight, or some of them."""

    weight: Weight
    rows: Rows = ()

    @property
    def size(self) -> int:
        return self.weight.size // self.weight.count * sum(map(len, self.rows or (range(self.weight.count),)))


@dataclass(frozen=True)
class WeightUnit:
    """Weights that are perturbed together."""

    name: str
    kind: str  # class of the module, or kind of the block
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def call(self) -> int:
        """Position in `Flow.calls` of the first call that can read one of its weights."""
        return min(piece.weight.call for piece in self.pieces)


def weights_of(subject: Subject, flow: Flow) -> list[Weight]:
    """The trainable weights that a forward pass uses, in order of execution.

    Biases, scales of norms, position tables and other parameters that are only added are left out, as are those with
    fewer than two axes longer than 1 outside of linear layers and convolutions.
    """
    uses = weight_uses.uses_of(subject, "filter", directions.POSITIONS)
    owners = _owners(subject.model)
    calls: dict[str, int] = {}
    for position, call in enumerate(flow.calls):
        calls.setdefault(call.module, position)
    found = []
    for name, p in uses.movable(subject.parameters).items():
        if p.dim() < 2 or re.search(directions.POSITIONS, name):
            continue
        module = subject.model.get_submodule(owners[id(p)][0])
        product = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        first = [i for owner in owners[id(p)] if (i := _first_call(owner, calls)) is not None]
        if first and (product or sum(size > 1 for size in p.shape) > 1):
            filters = uses.filters.get(name) or directions.Filters.along_rows(tuple(p.shape))
            kind, count = type(module).__name__, len(filters.rows(p))
            found.append(Weight(name, owners[id(p)][0], kind, filters, count, p.numel(), min(first)))
    return sorted(found, key=lambda weight: weight.call)


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that own each parameter, by its id; tied ones have several."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(name)
    return owners


def _first_call(module: str, calls: Mapping[str, int]) -> int | None:
    """The first call of a module, or of the innermost one around it that is called; None if only the model is."""
    name = module
    while name and name not in calls:
        name = name.rpartition(".")[0]
    return calls.get(name) if name or not module else None


def by_layer(weights: Sequence[Weight]) -> list[WeightUnit]:
    """A unit per module that owns weights."""
    modules: dict[str, list[Weight]] = {}
    for weight in weights:
        modules.setdefault(weight.module, []).append(weight)
    return [
        WeightUnit(module or group[0].name, group[0].kind, tuple(map(Piece, group)))
        for module, group in modules.items()
    ]


def by_block(weights: Sequence[Weight], layers: Sequence[Layer]) -> list[WeightUnit]:
    """A unit per residual branch, or layer of a network without; weights of none of them by layer."""
    found = {layer.name: layer for layer in layers}
    inside = {tap.module: layer.name for layer in layers if layer.branch for tap in layer.branch.leaves}
    blocks: dict[str, list[Weight]] = {}
    for weight in weights:
        around = [name for name in found if f"{weight.module}.".startswith(f"{name}.")]
        blocks.setdefault(inside.get(weight.module) or max(around, key=len, default=""), []).append(weight)
    rest = by_layer(blocks.pop("", []))
    units = [WeightUnit(name, found[name].kind, tuple(map(Piece, group))) for name, group in blocks.items()]
    return sorted([*units, *rest], key=lambda unit: unit.call)


def by_head(weights: Sequence[Weight], heads: Mapping[str, Mapping[str, Sequence[Rows]]]) -> list[WeightUnit]:
    """A unit per attention head; `heads`: by layer and name of the weight, the rows of each of its heads."""
    known = {weight.name: weight for weight in weights}
    return [
        WeightUnit(f"{layer}[head {h}]", "head", tuple(Piece(known[name], rows[h]) for name, rows in parts.items()))
        for layer, parts in heads.items()
        for h in range(min(map(len, parts.values())))
    ]


def by_neurons(weights: Sequence[Weight], count: int) -> list[WeightUnit]:
    """A unit per `count` consecutive output units (filters) of every weight."""
    return [
        WeightUnit(f"{unit.name}[{start}:{min(start + count, weight.count)}]", weight.kind, (Piece(weight, (rows,)),))
        for unit in by_layer(weights)
        for weight in (piece.weight for piece in unit.pieces)
        for start in range(0, weight.count, count)
        for rows in [range(start, min(start + count, weight.count))]
    ]


def selected(units: Sequence[WeightUnit], patterns: Sequence[str]) -> list[WeightUnit]:
    """The units of which a pattern matches the name or a module.

    Raises:
        ValueError: a pattern matches none; lists some.
    """
    names = [{unit.name, *(piece.weight.module for piece in unit.pieces)} for unit in units]
    found: set[str] = set()
    for pattern in patterns or ("",):
        matched = matching("layers", pattern, sorted(set().union(*names)))
        if not matched:
            some = nearest(pattern, (unit.name for unit in units), "unit")
            raise ValueError(f"--layers {pattern} matches no unit; {some}")
        found |= set(matched)
    return [unit for unit, own in zip(units, names, strict=True) if own & found]


def changed_weights(
    parameters: Mapping[str, Tensor], pieces: Sequence[Piece], change: Change
) -> tuple[dict[str, Tensor], float]:
    """The weights of some pieces, each piece changed by itself, and the squared norm of the change."""
    rows: dict[str, Tensor] = {}
    filters = {piece.weight.name: piece.weight.filters for piece in pieces}
    device = next(iter(parameters.values())).device
    squared = torch.zeros((), device=device, dtype=torch.float64)
    with torch.no_grad():
        for piece in pieces:
            name = piece.weight.name
            if name not in rows:
                rows[name] = filters[name].rows(parameters[name].detach()).clone()
            index = row_index(piece, device) if piece.rows else slice(None)
            before = rows[name][index]
            after = change(before, f"{name}{piece.rows or ''}")
            squared += torch.linalg.vector_norm(after - before, dtype=torch.float64) ** 2
            rows[name][index] = after
        changed = {name: filters[name].weight(own, parameters[name]) for name, own in rows.items()}
    return changed, squared.item()


def row_index(piece: Piece, device: torch.device) -> Tensor:
    """Positions of the rows of a piece."""
    ranges = piece.rows or (range(piece.weight.count),)
    return torch.cat([torch.arange(rows.start, rows.stop, rows.step) for rows in ranges]).to(device)


@contextmanager
def with_weights(subject: Subject, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the block with other weights, which are restored bit for bit."""
    with weights_in_place.WeightsInPlace(subject, weights) as place:
        place.interpolate(weights, 1.0)
        yield


class UnitTraces:
    """Samples v_i' (H v)_i of the traces of all units' Hessian blocks, for one random vector after the other."""

    def __init__(self, subject: Subject, units: Sequence[WeightUnit], seed: int) -> None:
        self._subject = replace(subject, weight_decay=0.0) if subject.weight_decay else subject
        self._units, self._seed = units, seed
        self._product: tuple[int, micro_batches.MicroBatchedProduct] | None = None
        self._sample: tuple[tuple[int, int], np.ndarray] | None = None

    def release(self) -> None:
        self._product = None

    def sample(self, batch: int, vector: int) -> np.ndarray:
        """Those of one vector on one mini-batch: of all units, then of every unit, (place,)."""
        if self._sample is None or self._sample[0] != (batch, vector):
            self._sample = (batch, vector), self._measured(batch, vector)
        return self._sample[1]

    def _measured(self, batch: int, vector: int) -> np.ndarray:
        pieces = [piece for unit in self._units for piece in unit.pieces]
        names = dict.fromkeys(piece.weight.name for piece in pieces)
        parameters = {name: self._subject.parameters[name] for name in names}
        if self._product is None or self._product[0] != batch:
            self._product = batch, hvp_backends.curvature(self._subject, parameters, "double-backward").product(batch)
        like, device = list(parameters.values()), self._subject.device
        seed, size = derived_seed(self._seed, "trace", batch, vector), sum(p.numel() for p in like)
        drawn = signs(size, seed, device=device, dtype=self._subject.dtype)
        outside = {name: torch.zeros_like(p) for name, p in parameters.items()}
        inside, _ = changed_weights(outside, pieces, lambda rows, _: torch.ones_like(rows))
        drawn *= vectors.flat(inside[name] for name in names)
        forms = dict(zip(names, vectors.unflat(drawn * self._product[1](drawn), like), strict=True))
        of_rows = {
            piece.weight.name: piece.weight.filters.rows(forms[piece.weight.name]).double().sum(dim=1)
            for piece in pieces
        }
        own = [
            torch.stack([of_rows[p.weight.name][row_index(p, device)].sum() for p in unit.pieces]).sum()
            for unit in self._units
        ]
        values = torch.stack(own).cpu().numpy()
        return np.concatenate([[values.sum()], values])
