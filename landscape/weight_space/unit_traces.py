"""Estimate the traces of the Hessian's diagonal blocks of all units at once, from shared Hessian products."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.trace_estimators import rademacher
from landscape.probe import derived_seed
from landscape.products.hvp_backends import curvature
from landscape.products.micro_batches import MicroBatchedProduct
from landscape.products.vectors import flat, unflat
from landscape.subject.subject import Subject
from landscape.weight_space.weight_units import Piece, WeightUnit, row_index


class UnitTraces:
    """Samples v_i' (H v)_i of the traces of all units' Hessian blocks, for one random vector after the other."""

    def __init__(self, subject: Subject, units: Sequence[WeightUnit], seed: int) -> None:
        self._subject = replace(subject, weight_decay=0.0) if subject.weight_decay else subject
        self._units, self._seed = units, seed
        self._product: tuple[int, MicroBatchedProduct] | None = None
        self._sample: tuple[tuple[int, int], np.ndarray] | None = None

    def release(self) -> None:
        """Free the graph of a mini-batch."""
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
            self._product = batch, curvature(self._subject, parameters, "double-backward").product(batch)
        like, device = list(parameters.values()), self._subject.device
        generator = torch.Generator().manual_seed(derived_seed(self._seed, "trace", batch, vector))
        signs = rademacher(sum(p.numel() for p in like), generator).to(device, self._subject.dtype)
        inside = _covered(parameters, pieces)
        signs *= flat(inside[name] for name in names)
        forms = dict(zip(names, unflat(signs * self._product[1](signs), like), strict=True))
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


def _covered(parameters: Mapping[str, Tensor], pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """1 in the rows of the pieces, 0 elsewhere, like the parameters."""
    rows: dict[str, Tensor] = {}
    filters = {piece.weight.name: piece.weight.filters for piece in pieces}
    for piece in pieces:
        p = parameters[piece.weight.name]
        own = rows.setdefault(piece.weight.name, torch.zeros_like(piece.weight.filters.rows(p.detach())))
        own[row_index(piece, own.device)] = 1.0
    return {name: filters[name].weight(own, parameters[name]) for name, own in rows.items()}
