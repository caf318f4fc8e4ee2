"""Measure the similarity of layers by centred kernel alignment (Nguyen et al. 2021; Kornblith et al. 2019)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import state_dict_sha256
from landscape.discovery.layer import Layer
from landscape.headline import Headline
from landscape.layers import layer_patterns, padding, selection
from landscape.layers.cka import LEAST_SAMPLES, centred_kernel, hsic, hsic_of_itself
from landscape.layers.forward_hooks import FeatureHooks, transferred, units_of
from landscape.probe import Plan, Probe, Quantity, Values
from landscape.statistics import means, stored
from landscape.statistics.intervals import FEWEST
from landscape.statistics.ratio import alignment
from landscape.subject import other_networks, weights_cache
from landscape.subject.loading.identity import attributes
from landscape.subject.subject import Subject, more_samples

TERMS = ("hsic", "hsic_layer", "hsic_other")
ERROR = "mini-batches, by leaving out one at a time"


@dataclass(frozen=True)
class Similarity(Probe):
    """Linear CKA of all pairs of layers, from the unbiased HSIC averaged over mini-batches before the ratio.

    Features are a layer's map flattened over channels and positions, without prefix tokens; padding of sequences is
    moved behind their tokens and zero. One pass per mini-batch
    (and one through the other network); memory for one kernel of batch size squared per layer.
    """

    name: ClassVar[str] = "similarity"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"against": ()}
    certified: ClassVar[Mapping[str, int]] = {"batch": 16}
    logits: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ("batch_size",)
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("neighbours", "neighbours"),
        Headline("first with last", "cka", {"layer": 0, "other": -1}),
    )

    layers: layer_patterns.LayerPatterns = ()
    against: Annotated[str, "another checkpoint to compare the layers with"] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters, with the digest of the other checkpoint's weights in place of its path."""
        other = self._other(subject)
        against = "" if other is subject else state_dict_sha256(other.model.state_dict())
        return {"against": against}

    def plan(self, subject: Subject) -> Plan:
        other = self._other(subject)
        if (samples := subject.samples(0)) < LEAST_SAMPLES:
            raise ValueError(
                f"similarity needs at least {LEAST_SAMPLES} images per mini-batch, got {samples}; "
                + more_samples(subject, *(["raise --batch-size"] if samples < len(subject) else []))
            )
        layers, others = selection.layers_of(subject, self.layers), selection.layers_of(other, self.layers)
        theirs = {f"other_{name}": item for name, item in selection.layer_labels(others, "other").items()}
        pair = ("layer", "other")
        neighbours = {"neighbours": Quantity("alignment of neighbouring layers, mean", error=ERROR)}
        return Plan(
            over=units_of(subject),
            axes={"layer": np.arange(len(layers)), "other": np.arange(len(others))},
            labels={**selection.layer_labels(layers, "layer"), **theirs},
            quantities={
                "samples": Quantity("images in the mini-batch"),
                "hsic": Quantity("unbiased HSIC of two layers", "feature^4", pair),
                "hsic_layer": Quantity("unbiased HSIC of a layer with itself", "feature^4", ("layer",)),
                "hsic_other": Quantity("unbiased HSIC of another layer with itself", "feature^4", ("other",)),
            },
            summaries={
                "cka": Quantity("centred kernel alignment", dims=pair, error=ERROR),
                **({} if self.against else neighbours),
            },
            about={"other": Quantity("layer of the other network" if other is not subject else "layer")},
            facts={"against": other.label, "against_model": attributes(other)["model"]} if self.against else {},
        )

    def hooks(self, subject: Subject, index: tuple[int, ...]) -> FeatureHooks:
        i = index[0]
        other = self._other(subject)
        layers, others = selection.layers_of(subject, self.layers), selection.layers_of(other, self.layers)
        samples = subject.samples(i)
        counted = padding.Counted(subject, i)

        def unknown(count: int) -> Tensor:
            return torch.full((count, samples, samples), torch.nan, dtype=torch.float64, device=subject.device)

        def receive(kernels: Tensor, layers: Sequence[Layer], position: int, tensor: Tensor) -> None:
            layer = layers[position]
            features = padding.without_padding(layer.features(tensor), counted.of(layer))
            kernels[position] = centred_kernel(features)

        own = unknown(len(layers))

        def values() -> Values:
            theirs = own
            if other is not subject:
                theirs = unknown(len(others))
                FeatureHooks(others, partial(receive, theirs, others)).run(other, index)
            sums = {"hsic": hsic(own, theirs), "hsic_layer": hsic_of_itself(own), "hsic_other": hsic_of_itself(theirs)}
            return {"samples": samples, **transferred(sums)}

        return FeatureHooks(layers, partial(receive, own, layers), values)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """The alignment over all finished mini-batches, and its jackknife standard error."""
        labels, data = data, means.mean_over_members(data, "samples", *TERMS)
        use = (data["done"] == 1) & (data["samples"] >= LEAST_SAMPLES)
        terms = tuple(data[name][use] for name in TERMS)
        n = len(terms[0])
        sums = tuple(term.sum(axis=0) for term in terms)
        cka = alignment(*sums) if n else np.full(data["hsic"].shape[1:], np.nan)
        error, neighbours_error = np.full_like(cka, np.nan), np.array(np.nan)
        if n > 1:
            left = np.stack([alignment(*(s - term[i] for s, term in zip(sums, terms, strict=True))) for i in range(n)])
            error = means.jackknife_error(left)
            neighbours_error = means.jackknife_error(_neighbours(left)) if n >= FEWEST else neighbours_error
        neighbours = _neighbours(cka)
        named = [(labels[name], i) for i, name in enumerate(("name", "other_name"), 1) if n and name in labels]
        still = dict.fromkeys(str(name) for names, i in named for name in names[sums[i] == 0])
        why = [(quantity, name, stored.ALIKE) for quantity in ("cka", "neighbours") for name in still]
        why += [("neighbours", "", "it has one layer")] if len(cka) == 1 else []
        found = {"cka": cka, "cka_se": error, "neighbours": neighbours, "neighbours_se": neighbours_error}
        return {**found, "cka_se.n": n, "neighbours_se.n": n, **stored.unmeasured(why)}

    def _other(self, subject: Subject) -> Subject:
        """The network compared with, on the same mini-batches: that of `against`, or the subject itself."""
        return _compared(subject, Path(self.against)) if self.against else subject


@weights_cache.once_per_weights
def _compared(subject: Subject, path: Path) -> Subject:
    return other_networks.with_checkpoint(subject, path)


def _neighbours(cka: np.ndarray) -> np.ndarray:
    """Mean over neighbouring layers of alignments (..., layer, layer); NaN for a single layer."""
    return np.asarray(
        np.diagonal(cka, 1, -2, -1).mean(axis=-1) if cka.shape[-2] > 1 else np.full(cka.shape[:-2], np.nan)
    )
