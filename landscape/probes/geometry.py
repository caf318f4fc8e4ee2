"""Measure the geometry of features: their dimension, how they collapse to their classes, and class separation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.headline import Headline
from landscape.layers import forward_hooks, layer_patterns, padding, pooled_features, selection
from landscape.options import at_least, one_of
from landscape.predictions.scores import padded
from landscape.probe import Plan, Probe, Quantity, Values
from landscape.statistics import neural_collapse, stored
from landscape.statistics.feature_dimension import (
    LEAST_SAMPLES,
    Estimate,
    effective_rank,
    participation_ratio,
    scatter,
    two_nn,
)
from landscape.subject.loading.identity import of_first
from landscape.subject.subject import Subject, more_samples
from landscape.subject.targets import are_probabilities
from landscape.subject.weights_cache import once_per_weights

LEAST_CLASSES = 2  # with at least two samples each
FEW = "fewer than two classes have two samples"
DIMENSIONS = {
    "effective_rank": "effective rank of the features",
    "participation_ratio": "participation ratio of the features' covariance",
    "intrinsic_dimension": "intrinsic dimension of the features (TwoNN)",
}
OF_CLASSES = {
    "class_separation": "class separation",
    "nc1": "NC1: variation within classes over that between them",
    "nc2_lengths": "NC2: coefficient of variation of the lengths of centred class means",
    "nc2_angles": "NC2: standard deviation of the cosines of centred class means",
    "nc2_simplex": "NC2: mean distance of their cosines from those of a simplex",
}
OF_CLASSIFIER = {"nc4": "NC4: share of decisions other than for the nearest class mean"}
SELF_DUALITY = {"nc3": "NC3: squared distance of classifier and class means, both of norm 1"}
OF_GROUPS = "groups of samples"  # that a jackknife leaves out
HEAD = "head_"  # quantities of the classifier's input
HEADLINE_NAMES = {
    "effective rank": "effective_rank", "participation ratio": "participation_ratio",
    "TwoNN dimension": "intrinsic_dimension", "class separation": "class_separation", "NC1": "nc1",
    "NC2 simplex": "nc2_simplex", "NC3": "nc3", "NC4": "nc4",
}  # fmt: skip


@dataclass(frozen=True)
class Geometry(Probe):
    """Effective rank, participation ratio, TwoNN dimension, NC1 to NC4 and class separation of pooled features.

    Features of an image are the average of a layer's map over positions (`mean`; of a sequence over its tokens without
    padding), or the class token (`cls`); those of the input of a linear classifier are measured too, for neural
    collapse as published. One forward pass. The pooled features of the first `images` samples are stored, in the
    precision of the network: images x channels of all layers x 4 bytes, in memory too. The other numbers are computed
    from them. Neural collapse is about the train split (`--split train`); means of few samples per class look more like
    a simplex, and closer to their samples, than they are.
    """

    name: ClassVar[str] = "geometry"
    certified: ClassVar[Mapping[str, int]] = {"samples": 512}
    logits: ClassVar[bool] = False
    headlines: ClassVar[Sequence[Headline]] = tuple(
        headline
        for words, name in HEADLINE_NAMES.items()
        for headline in (Headline(words, f"{HEAD}{name}"), Headline(words, name, {"layer": "last"}))
    )

    layers: layer_patterns.LayerPatterns = ()
    pool: Annotated[Literal["mean", "cls"], "features of a map: mean over positions, or the class token"] = "mean"
    images: Annotated[int, "at most this many images, the first of the data"] = 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", layer_patterns.expand(self.layers))
        one_of("pool", self.pool, ("mean", "cls"))
        at_least("images", self.images, LEAST_SAMPLES)

    def plan(self, subject: Subject) -> Plan:
        places, kept = pooled_features.places_of(subject, self.layers, self.pool), _kept(subject, self.images)
        if sum(kept) < LEAST_SAMPLES:
            raise ValueError(
                f"geometry needs at least {LEAST_SAMPLES} images, got {sum(kept)}; {more_samples(subject)}"
            )
        classifier = places.classifier
        layers = places.layers if classifier is None else places.layers[:-1]
        if self.pool == "cls":
            selection.require_class_token(layers)
        dtype = "float64" if subject.dtype == torch.float64 else "float32"
        classes = _classes(subject.batches[0][1]) is not None
        names = {**DIMENSIONS, **(OF_CLASSES if classes else {})}
        names |= OF_CLASSIFIER if classes and classifier is not None else {}
        alone = {**names, **(SELF_DUALITY if classes else {})} if classifier is not None else {}
        summaries = {name: _quantity(name, words, ("layer",)) for name, words in names.items()}
        for name, words in alone.items():
            summaries[f"{HEAD}{name}"] = _quantity(name, f"{words}, at the classifier's input", ())
        place = np.repeat(np.arange(len(places.widths)), places.widths)
        count = {"class_size": Quantity("images of the smallest class that counts")} if classes else {}
        axes, labels, about = _of_classifier(places, dtype)
        return Plan(
            over={**forward_hooks.units_of(subject), "batch": np.arange(len(kept))},
            axes={
                "layer": np.arange(len(layers)), "image": np.arange(max(kept)),
                "feature": np.arange(sum(places.widths)), **axes,
            },
            labels={
                **selection.layer_labels(layers, "layer"),
                "feature_layer": (
                    Quantity("layer of a feature; after the last one, the classifier's input", dims=("feature",)),
                    place,
                ),
                **labels,
            },
            quantities={
                "samples": Quantity("images of the mini-batch that count"),
                "features": Quantity("pooled features of an image", "feature", ("image", "feature"), dtype),
                **({"target": Quantity("class of an image", dims=("image",))} if classes else {}),
            },
            summaries={**summaries, "images_used": Quantity("images that count"), **count},
            about={
                "image": Quantity("image of a mini-batch"), "feature": Quantity("feature, layer by layer"), **about,
            },
            facts=of_first(subject, sum(kept)),
        )  # fmt: skip

    def hooks(self, subject: Subject, index: tuple[int, ...]) -> forward_hooks.FeatureHooks:
        i = index[0]
        places, kept = pooled_features.places_of(subject, self.layers, self.pool), _kept(subject, self.images)
        samples, count = subject.samples(i), kept[i] if i < len(kept) else 0
        found: dict[int, Tensor] = {}
        levels: dict[int, list[Tensor]] = {}
        counted = padding.Counted(subject, i)

        def on_features(position: int, tensor: Tensor) -> None:
            keep(position, places.pooled(position, tensor, self.pool, counted.of(places.layers[position])))

        def on_maps(position: int, part: forward_hooks.MapPart) -> None:
            levels.setdefault(position, []).append(part.level)

        def keep(position: int, rows: Tensor) -> None:
            if len(rows) != samples:
                raise ValueError(
                    f"{places.layers[position].name} has {len(rows)} rows for {samples} samples, expected one for "
                    "each; name other layers with --layers"
                )
            found[position] = rows[:count].clone()

        means = [p for p, layer in enumerate(places.layers) if layer.spatial and self.pool == "mean"]

        def values() -> Values:
            dtype = torch.float64 if subject.dtype == torch.float64 else torch.float32
            for position, parts in levels.items():
                keep(position, torch.cat(parts))
            rows = torch.cat([found[position] for position in range(len(places.layers))], dim=1)
            tensors = {"features": rows.to(dtype)}
            classes = _classes(subject.batches[i][1])
            if classes is not None:
                tensors["target"] = classes[:count].to(rows.device, dtype)  # exact: class numbers are small
            arrays = {name: padded(array, max(kept)) for name, array in forward_hooks.transferred(tensors).items()}
            return {"samples": count, **arrays}

        return forward_hooks.FeatureHooks(places.layers, on_features, values, on_maps=on_maps, in_parts=means)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Every measure of the finished mini-batches; of members the mean, with the error of one of them."""
        layers, place = len(data["layer"]), data["feature_layer"]
        members = list(_members(data))
        labels = [neural_collapse.Labels(member["target"]) if "target" in member else None for member in members]
        decisions = [_decisions(member["features"], data) for member in members]
        weight = data["classifier_weight"].astype(np.float64) if "classifier_weight" in data else None
        rows: list[dict[str, Estimate]] = []
        for at in range(place.max() + 1):
            found = [
                _measures(_at(member["features"], place, at), own, decided, weight if at == layers else None)
                for member, own, decided in zip(members, labels, decisions, strict=True)
            ]
            rows.append({name: Estimate(*np.mean([one[name] for one in found], axis=0)) for name in found[0]})
        used = members[0]
        result: dict[str, Any] = {"images_used": len(used["features"])}
        if "target" in used:
            sizes = np.unique(used["target"], return_counts=True)[1]
            result["class_size"] = sizes[sizes > 1].min(initial=len(used["target"])) if (sizes > 1).any() else np.nan
        for name in rows[0]:
            result[name], result[f"{name}_se"] = (np.array([row[name][k] for row in rows[:layers]]) for k in (0, 1))
        for name, estimate in (rows[layers] if len(rows) > layers else {}).items():
            result[f"{HEAD}{name}"], result[f"{HEAD}{name}_se"] = estimate
        few = labels[0] is not None and len(labels[0].known) < LEAST_CLASSES  # whatever the layer
        why = dict.fromkeys(
            (f"{HEAD if at == layers else ''}{name}", "", FEW)
            if few and name not in DIMENSIONS
            else (f"{HEAD if at == layers else ''}{name}", label, _why(name, used["features"][:, place == at]))
            for at, (row, label) in enumerate(zip(rows, (*data["name"], ""), strict=False))
            for name, (value, _) in row.items()
            if np.isnan(value)
        )
        groups = min(neural_collapse.GROUPS, result["images_used"])
        return (
            result
            | stored.unmeasured(why)
            | {f"{name}.n": groups for name in result if name.endswith("_se") and _over(name[:-3]) == OF_GROUPS}
        )


def _why(measure: str, features: np.ndarray) -> str:
    """Why a measure of some features (image, feature) is NaN."""
    if not np.isfinite(features).all():
        return stored.NOT_FINITE
    if (features == features[:1]).all():
        return stored.ALIKE
    return "too few distances between samples" if measure in DIMENSIONS else "no difference within or between classes"


def _over(name: str) -> str:
    """What the independent values of a measure's error are."""
    return OF_GROUPS if name.removeprefix(HEAD) in {**OF_CLASSES, **SELF_DUALITY} else "samples"


def _quantity(name: str, words: str, dims: tuple[str, ...]) -> Quantity:
    """A measure as it is stored.

    NC2 has no bounds: noise alone makes it larger, so that of few samples the interval of a positive number lies above
    the truth (it held in 86 % of 200 redraws of 128 samples).
    """
    unbounded = name == "class_separation" or name.startswith("nc2")
    bounds = "share" if name in OF_CLASSIFIER else "" if unbounded else "positive"
    return Quantity(words, dims=dims, over=_over(name), bounds=bounds, error="images")


def _of_classifier(
    places: pooled_features.Places, dtype: str
) -> tuple[dict[str, np.ndarray], dict[str, tuple[Quantity, np.ndarray]], dict[str, Quantity]]:
    """Axes, labels and words about the axes that the weights of a linear classifier add to the plan."""
    if places.classifier is None:
        return {}, {}, {}
    weight, bias = (
        np.zeros(places.classifier.out_features, dtype)
        if part is None
        else part.detach().double().cpu().numpy().astype(dtype)
        for part in (places.classifier.weight, places.classifier.bias)
    )
    dims = ("class", "classifier_feature")
    return (
        {"class": np.arange(len(weight)), "classifier_feature": np.arange(weight.shape[1])},
        {
            "classifier_weight": (Quantity("weight of the linear classifier", dims=dims, dtype=dtype), weight),
            "classifier_bias": (Quantity("its bias", dims=dims[:1], dtype=dtype), bias),
        },
        {"classifier_feature": Quantity("feature of the classifier's input")},
    )


def _members(data: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Features, and classes if there are any, of the images of finished mini-batches, for each member."""
    done = data["done"] == 1
    for member in range(done.shape[1]) if done.ndim > 1 else (None,):
        own = np.flatnonzero(done if member is None else done[:, member])
        at = own if member is None else (own, member)
        counted = np.arange(len(data["image"])) < data["samples"][at][:, None]  # (batch, image)
        yield {name: data[name][at][counted] for name in ("features", "target") if name in data}


def _at(features: np.ndarray, place: np.ndarray, position: int) -> np.ndarray:
    """The features of one place, which lie side by side, float64."""
    first, end = np.searchsorted(place, [position, position + 1])
    return features[:, first:end].astype(np.float64)


def _decisions(features: np.ndarray, data: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The class that the linear classifier chooses for every image; None where there is none."""
    if "classifier_weight" not in data:
        return None
    read = _at(features, data["feature_layer"], data["feature_layer"].max())
    return np.asarray((read @ data["classifier_weight"].T.astype(np.float64) + data["classifier_bias"]).argmax(axis=1))


def _measures(
    x: np.ndarray, labels: neural_collapse.Labels | None, decisions: np.ndarray | None, weight: np.ndarray | None
) -> dict[str, Estimate]:
    """Every measure of the features of one place; NaN where one of them is not finite."""
    x = x if np.isfinite(x).all() else x[:0]
    centred = x - x.mean(axis=0) if len(x) else x
    product = scatter(centred)
    estimates = effective_rank(centred, product), participation_ratio(centred, product), two_nn(centred)
    found = dict(zip(DIMENSIONS, estimates, strict=True))
    return found if labels is None else found | neural_collapse.collapse(x, labels, decisions, weight)


def _classes(targets: Any) -> Tensor | None:
    """The class of every sample, (N,); None where targets are something else."""
    if not isinstance(targets, Tensor):
        return None
    if are_probabilities(targets):
        return targets.argmax(dim=1)
    return targets if targets.ndim == 1 and not targets.is_floating_point() and not targets.is_complex() else None


@once_per_weights
def _kept(subject: Subject, images: int) -> list[int]:
    """How many samples of each mini-batch count: the first `images` of all."""
    kept: list[int] = []
    for i in range(len(subject.batches)):
        kept.append(min(subject.samples(i), images - sum(kept)))
        if sum(kept) >= images:
            break
    return kept
