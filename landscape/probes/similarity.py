"""Similarity of layers: centred kernel alignment over mini-batches (Nguyen et al. 2021; Kornblith et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints import checkpoint, snapshots
from landscape.layers.cka import LEAST, centred_kernel, hsic, hsic_of_itself
from landscape.layers.forward_hooks import Listener, one_pass
from landscape.layers.patterns import expanded
from landscape.layers.selection import Layer, labels, layers_of
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject import loading
from landscape.subject.derived import once_per_weights
from landscape.subject.identity import attributes
from landscape.subject.subject import Subject


@dataclass(frozen=True)
class Similarity(Probe):
    """Linear CKA of all pairs of layers, from the unbiased HSIC averaged over mini-batches before the ratio.

    Features are a layer's map flattened over channels and positions, without prefix tokens. One pass per mini-batch
    (one more through the other network); memory for a kernel of batch size squared per layer, however many images.
    """

    name: ClassVar[str] = "similarity"
    logits: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ("batch_size",)

    layers: Annotated[tuple[str, ...], "REGEX[:KIND] or file.toml: modules instead of the layers found"] = ()
    against: Annotated[str, "another checkpoint, whose layers these are compared with"] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", expanded(self.layers))

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, the other checkpoint by its content."""
        other = self._other(subject)
        against = "" if other is subject else checkpoint.weights_sha256(other.model.state_dict())
        return {**asdict(self), "against": against}

    def plan(self, subject: Subject) -> Plan:
        other = self._other(subject)
        if (samples := len(subject.batches[0][1])) < LEAST:
            raise ValueError(
                f"similarity got {samples} images per mini-batch, its unbiased estimate needs at least {LEAST}; "
                "ask for more with --batch-size and --samples"
            )
        found, others = layers_of(subject, self.layers), layers_of(other, self.layers)
        theirs = {f"other_{name}": item for name, item in labels(others, "other").items()}
        pair = ("layer", "other")
        return Plan(
            over={"batch": np.arange(len(subject.batches))},
            axes={"layer": np.arange(len(found)), "other": np.arange(len(others))},
            labels={**labels(found, "layer"), **theirs},
            quantities={
                "samples": Quantity("images in the mini-batch"),
                "hsic": Quantity("unbiased HSIC of two layers", "feature^4", pair),
                "hsic_layer": Quantity("unbiased HSIC of a layer with itself", "feature^4", ("layer",)),
                "hsic_other": Quantity("unbiased HSIC of another layer with itself", "feature^4", ("other",)),
            },
            summaries={
                "cka": Quantity("centred kernel alignment", dims=pair),
                "cka_se": Quantity("its standard error, by leaving out one mini-batch at a time", dims=pair),
            },
            about={
                "batch": Quantity("mini-batch"),
                "layer": Quantity("layer"),
                "other": Quantity("layer of the other network" if other is not subject else "layer"),
            },
            facts={"against": other.label, "against_model": attributes(other)["model"]} if self.against else {},
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (i,) = unit.index
        return one_pass(subject, i, [self.listener(subject, i)])[0]

    def listener(self, subject: Subject, i: int) -> Listener:
        """What listens to mini-batch i."""
        other = self._other(subject)
        found, others = layers_of(subject, self.layers), layers_of(other, self.layers)
        samples = len(subject.batches[i][1])
        own = _Kernels(found, samples, subject.device)

        def values() -> Values:
            theirs = own
            if other is not subject:
                theirs = _Kernels(others, samples, subject.device)
                one_pass(other, i, [Listener(others, theirs.receive, lambda: {})])
            return {
                "samples": samples,
                "hsic": hsic(own.found, theirs.found).cpu().numpy(),
                "hsic_layer": hsic_of_itself(own.found).cpu().numpy(),
                "hsic_other": hsic_of_itself(theirs.found).cpu().numpy(),
            }

        return Listener(found, own.receive, values)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """The alignment of all finished mini-batches, and its jackknife error over them."""
        use = (data["done"] == 1) & (data["samples"] >= LEAST)
        parts = tuple(data[name][use] for name in ("hsic", "hsic_layer", "hsic_other"))
        n = len(parts[0])
        sums = tuple(part.sum(axis=0) for part in parts)
        cka = _alignment(*sums) if n else np.full(data["hsic"].shape[1:], np.nan)
        error = np.full_like(cka, np.nan)
        if n > 1:
            left = np.stack([_alignment(*(s - part[i] for s, part in zip(sums, parts, strict=True))) for i in range(n)])
            error = np.sqrt((n - 1) / n * ((left - left.mean(axis=0)) ** 2).sum(axis=0))
        return {"cka": cka, "cka_se": error}

    def _other(self, subject: Subject) -> Subject:
        """The network on the other side, on the same mini-batches; the subject itself unless another is named."""
        if not self.against:
            return subject
        return _beside(subject, Path(self.against))


@once_per_weights
def _beside(subject: Subject, path: Path) -> Subject:
    return loading.beside(subject, snapshots.last(path) if path.is_dir() else path)


class _Kernels:
    """Centred kernels of all layers, filled in as their features pass by."""

    def __init__(self, layers: Sequence[Layer], samples: int, device: torch.device) -> None:
        self._layers = layers
        missing = torch.nan  # what a last mini-batch too small for an estimate leaves
        self.found = torch.full((len(layers), samples, samples), missing, dtype=torch.float64, device=device)

    def receive(self, position: int, tensor: Tensor) -> None:
        if len(tensor) >= LEAST:
            self.found[position] = centred_kernel(self._layers[position].features(tensor))


def _alignment(hsic: np.ndarray, layer: np.ndarray, other: np.ndarray) -> np.ndarray:
    """HSIC over the geometric mean of both layers' own; NaN where a layer does not vary over samples."""
    scale = layer[:, None] * other[None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        aligned: np.ndarray = np.where((layer[:, None] > 0) & (other > 0), hsic / np.sqrt(np.abs(scale)), np.nan)
    return aligned
