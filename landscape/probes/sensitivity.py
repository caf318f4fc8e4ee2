"""Measure loss and accuracy when the weights of one unit at a time are quantised, pruned, disturbed or truncated."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np

from landscape.discovery.layer import Layer
from landscape.headline import Headline
from landscape.layers import attention_maps, selection
from landscape.layers.partial_forward import Prefixes, ResumePoint, flow_of, resume_before, resumed, verified
from landscape.options import at_least, one_of, regular_expression, require
from landscape.probe import NotApplicable, Plan, Probe, Quantity, Unit, Values
from landscape.statistics.sensitivity import ALL, PARTS, summaries
from landscape.subject import losses, sample_statistics, weights_cache
from landscape.subject.subject import Subject
from landscape.weight_space import weight_units
from landscape.weight_space.perturbations import Granularity, Setting, settings_of

Kind = Literal["layer", "block", "head", "neurons"]


@dataclass(frozen=True)
class Sensitivity(Probe):
    """Loss increase and accuracy drop when the weights of one unit are perturbed, for every unit and setting.

    Positive = worse. Standard errors are of the paired differences per sample. Weights are those of matrix products,
    convolutions and embeddings; biases and norms stay as they are. Beside them all units together, whose loss increase
    minus the sum of the single ones is the additivity error, and the predictor of HAWQ-V2 (arXiv 1911.03852, eq. 2.11),

        tr(H_ii) / n_i |P(w_i) - w_i|^2,

    with H_ii the block of the loss Hessian of unit i with n_i weights. Its trace is the mean over Rademacher vectors v
    of v_i' (H v)_i: one product gives a sample for every unit.

    Costs, per setting, one pass over the samples for all units together and at most one per unit: the modules before
    the unit do not run again. A unit of work is one unit at one setting, or of one random vector, on one mini-batch.
    """

    name: ClassVar[str] = "sensitivity"
    uses: ClassVar[tuple[str, ...]] = ("batch_size",)
    smallest: ClassVar[Mapping[str, Any]] = {"bits": "4,2", "vectors": 2}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("intact loss", "intact_loss"),
        Headline("all at {setting_name}", "together_loss_increase", {"setting": "each"}),
        Headline("largest increase", "loss_increase", {"unit setting": "largest"}, where="at {name}, {setting_name}"),
        Headline("rank correlation", "rank_correlation", {"setting": -1}),
    )

    unit: Annotated[Kind, "what is perturbed at a time; neurons: groups of consecutive output units"] = "layer"
    layers: Annotated[tuple[str, ...], "only units whose name or module matches this regular expression"] = ()
    bits: Annotated[str, "bit-widths of round-to-nearest quantisation, separated by commas"] = "8,6,4,3,2"
    granularity: Annotated[Granularity, "what shares a scale: an output channel, a weight, or a group in a channel"] = (
        "channel"
    )
    group_size: Annotated[int, "weights per group, with --granularity group"] = 64
    sparsity: Annotated[str, "shares of the smallest weights set to 0, such as 0.5,0.9"] = ""
    noise: Annotated[str, "norms of Gaussian noise over that of the filter, such as 0.01,0.1"] = ""
    rank: Annotated[str, "shares of the full rank that are kept, such as 0.5,0.25"] = ""
    neurons: Annotated[int, "output units per group, with --unit neurons"] = 64
    vectors: Annotated[int, "Hessian products per mini-batch for the predictor; 0 leaves it out"] = 4
    seed: Annotated[int, "seed of the noise and of the random vectors"] = 0

    def __post_init__(self) -> None:
        one_of("unit", self.unit, get_args(Kind))
        for pattern in self.layers:
            regular_expression("layers", pattern)
        one_of("granularity", self.granularity, get_args(Granularity))
        at_least("group_size", self.group_size, 1)
        at_least("neurons", self.neurons, 1)
        require(self.vectors == 0 or self.vectors >= 2, "vectors", self.vectors, "0 or at least 2")
        self._settings()

    def identity(self, subject: Subject) -> dict[str, Any]:
        """Options of other granularities and units do not matter."""
        unused = {"group_size": self.granularity != "group", "neurons": self.unit != "neurons"}
        return dict.fromkeys(name for name, off in unused.items() if off)

    def plan(self, subject: Subject) -> Plan:
        units, settings, meaning = self._units(subject), self._settings(), subject.meaning
        return Plan(
            over={
                "batch": np.arange(len(subject.batches)),
                "trial": np.arange(len(settings) + self.vectors),
                "place": np.arange(len(units) + 1),
            },
            axes={"unit": np.arange(len(units)), "setting": np.arange(len(settings)), "part": np.arange(PARTS)},
            labels=_labels(units, settings),
            quantities={
                **sample_statistics.quantities(meaning),
                "part_loss_increase": Quantity("its sum over a part of the mini-batch", meaning.units, ("part",)),
                "squared_norm": Quantity("squared norm of the change of the weights", "squared weight"),
                "quadratic_form": Quantity("v' (H v) in the weights of the unit, v random signs", _curved(meaning)),
            },
            summaries=_summaries(meaning),
            about={
                "trial": Quantity("setting, then random vectors"), "unit": Quantity("perturbed unit"),
                "place": Quantity("all units together, then every unit"), "part": Quantity("part of the mini-batch"),
            },
            facts={
                **sample_statistics.intact_means(subject),
                "unperturbed": sum(p.numel() for p in subject.model.parameters()) - sum(unit.size for unit in units),
            },
        )  # fmt: skip

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Units of one mini-batch share cached outputs of the modules before them; those of one vector, H v."""
        places, settings = self._units(subject), self._settings()
        single = sorted({place for _, trial, place in (u.index for u in units) if trial < len(settings)} - {ALL})
        points = dict(zip(single, resume_points(subject, [places[place - 1] for place in single]), strict=True))
        prefixes = Prefixes(subject)
        traces = weight_units.UnitTraces(subject, places, self.seed)
        for unit in units:
            batch, trial, place = unit.index
            if trial >= len(settings):
                prefixes.release()
                yield {**dict.fromkeys(self._measured, math.nan), "samples": subject.samples(batch),
                       "part_loss_increase": np.full(PARTS, math.nan),
                       "quadratic_form": traces.sample(batch, trial - len(settings))[place]}  # fmt: skip
                continue
            traces.release()
            chosen = places if place == ALL else [places[place - 1]]
            inputs, targets = subject.batch(batch)
            cache = prefixes.at(batch, points.get(place, ResumePoint()))
            pieces = [piece for one in chosen for piece in one.pieces]
            weights, squared = weight_units.changed_weights(subject.parameters, pieces, settings[trial].applied)
            with weight_units.with_weights(subject, weights), resumed(subject.model, cache), subject.evaluating():
                after = sample_statistics.loss_and_correctness(subject, inputs, targets)
            yield {
                **sample_statistics.change(subject, batch, after),
                "part_loss_increase": sample_statistics.part_sums(subject, batch, after, PARTS),
                "squared_norm": squared, "quadratic_form": math.nan,
            }  # fmt: skip

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over all finished samples with their errors, and what follows from them."""
        return summaries(data)

    @property
    def _measured(self) -> tuple[str, ...]:
        return (*sample_statistics.quantities(), "squared_norm")

    def _settings(self) -> list[Setting]:
        return settings_of(
            self.bits, self.sparsity, self.noise, self.rank,
            granularity=self.granularity, group_size=self.group_size, seed=self.seed,
        )  # fmt: skip

    def _units(self, subject: Subject) -> list[weight_units.WeightUnit]:
        return _chosen_units(subject, self.unit, self.neurons, self.layers)


def _labels(
    units: Sequence[weight_units.WeightUnit], settings: Sequence[Setting]
) -> dict[str, tuple[Quantity, np.ndarray]]:
    rows: list[tuple[str, str, str, list[Any]]] = [
        ("name", "unit", "unit", [unit.name for unit in units]),
        ("kind", "unit", "class of the module, or kind of the block", [unit.kind for unit in units]),
        ("size", "unit", "weights in the unit", [unit.size for unit in units]),
        ("weights", "unit", "names of its parameters", [" ".join(_names(unit)) for unit in units]),
        ("setting_name", "setting", "setting", [setting.name for setting in settings]),
        ("method", "setting", "how weights are perturbed", [setting.method for setting in settings]),
        ("level", "setting", "bits, or share of zeros, of noise, of the rank", [setting.level for setting in settings]),
    ]
    return {name: (Quantity(about, dims=(axis,)), np.array(values)) for name, axis, about, values in rows}


def _summaries(meaning: losses.Meaning) -> dict[str, Quantity]:
    setting, each, units = ("setting",), ("unit", "setting"), meaning.units
    together = sample_statistics.summaries(setting, meaning)
    return {
        **sample_statistics.summaries(each, meaning),
        **{f"together_{name}": replace(known, long_name=f"{known.long_name}, all units together")
           for name, known in together.items()},
        "sum_loss_increase": Quantity("sum over units of loss after - before", units, setting),
        "additivity_error": Quantity("increase of all units together minus that sum", units, setting,
                                     error="parts of mini-batches", over="part"),
        "squared_change": Quantity("squared norm of the change of the unit's weights", "squared weight", each),
        "mean_trace": Quantity("trace of the unit's Hessian block over its weights", _curved(meaning), ("unit",),
                               error="random vectors"),
        "predictor": Quantity("mean trace times squared change", units, each),
        "rank_correlation": Quantity("Spearman's of predictor and loss increase over units", dims=setting, ends=True),
    }  # fmt: skip


def _curved(meaning: losses.Meaning) -> str:
    return f"{meaning.units} per squared weight"


def _names(unit: weight_units.WeightUnit) -> list[str]:
    """Names of its weights, with the rows where these are not all."""
    return [piece.weight.name + "".join(f"[{rows.start}:{rows.stop}]" for rows in piece.rows) for piece in unit.pieces]


@weights_cache.once_per_weights
def _chosen_units(
    subject: Subject, kind: Kind, neurons: int, patterns: tuple[str, ...]
) -> list[weight_units.WeightUnit]:
    """The units to perturb, in order of execution.

    Raises:
        NotApplicable: there is none.
        ValueError: a pattern matches none.
    """
    weights = weight_units.weights_of(subject, flow_of(subject))
    if kind == "head":
        units = _heads(subject, weights)
    elif kind == "neurons":
        units = weight_units.by_neurons(weights, neurons)
    else:
        units = (
            weight_units.by_layer(weights)
            if kind == "layer"
            else weight_units.by_block(weights, _layers(subject, kind))
        )
    if not units:
        raise NotApplicable("this network has no trainable weight of a linear layer, convolution or embedding")
    return weight_units.selected(units, patterns)


def _layers(subject: Subject, kind: Kind) -> list[Layer]:
    try:
        return selection.layers_of(subject, ())
    except ValueError as error:
        raise NotApplicable(
            f"--unit {kind} needs the blocks of the network, and none were found; give --unit layer or neurons"
        ) from error


def _heads(subject: Subject, weights: Sequence[weight_units.Weight]) -> list[weight_units.WeightUnit]:
    layers = [layer for layer in _layers(subject, "head") if layer.attention is not None]
    inside: dict[str, dict[str, int]] = {}
    for unit in weight_units.by_block(weights, layers):
        axes = {piece.weight.name: piece.weight.filters.order[0] for piece in unit.pieces}
        if all(len(piece.weight.filters.shape) == 2 for piece in unit.pieces):
            inside[unit.name] = axes
    found = weight_units.by_head(weights, attention_maps.rows_of_heads(subject, layers, inside))
    if not found:
        raise NotApplicable(
            "no weight of this network has rows that belong to single attention heads; give --unit layer or block"
        )
    return found


def resume_points(subject: Subject, units: Sequence[weight_units.WeightUnit]) -> list[ResumePoint]:
    """Where passes with other weights of each of the units may resume; verified with negated weights."""
    flow = flow_of(subject)
    keys = [(tuple(sorted({piece.weight.name for piece in unit.pieces})), unit.call) for unit in units]
    points = verified(
        subject, {(names, call): (resume_before(flow, call), partial(_negated, subject, names)) for names, call in keys}
    )
    return [points[key] for key in keys]


@contextmanager
def _negated(subject: Subject, names: Sequence[str]) -> Iterator[None]:
    with weight_units.with_weights(subject, {name: -subject.parameters[name].detach() for name in names}):
        yield
