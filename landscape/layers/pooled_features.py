"""The features that linear classifiers read, the network's own among them, and the samples that one is fitted to."""

import logging
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.checkpoints.key_matching import is_head
from landscape.data.sampling import shuffled
from landscape.data.structure import logits_or_none
from landscape.discovery.layer import Layer, Tap
from landscape.layers import forward_hooks, padding, selection
from landscape.options import parse_count
from landscape.subject import mc_dropout, other_samples, weights_cache
from landscape.subject.subject import Subject
from landscape.subject.targets import are_probabilities

_log = logging.getLogger(__name__)
LEAST_SAMPLES = 10  # to fit on
HELD_OUT = 0.2  # of the training samples


@weights_cache.once_per_weights
def pooled_features(
    subject: Subject, patterns: tuple[str, ...], pool: str, member: int | None = None, like: Subject | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Features of every layer, (N, features) on the CPU, the class shares, (N, classes) float64, and correctness, (N,).

    The layers are those of `like`, which has the same network and is scored; of other samples, correctness is 0.
    """
    layers = selection.layers_of(like or subject, patterns)
    rows: list[Tensor] = []
    targets: list[Tensor] = []
    right: list[Tensor] = []
    features: dict[int, Tensor] = {}

    def receive(position: int, tensor: Tensor) -> None:
        features[position] = pooled(layers[position], tensor, pool)

    for i in range(len(subject.batches)):
        inputs, wanted = subject.batch(i)
        alone = nullcontext() if member is None else subject.member(member)
        with alone, subject.evaluating(), forward_hooks.feature_hooks(subject.model, layers, receive):
            outputs = subject.outputs(inputs)
            scored = subject.losses_and_right(outputs, wanted)[1] if like is None else torch.zeros(len(wanted))
            right.append(scored.double().detach())
        row = torch.cat([features[position].detach() for position in range(len(layers))], dim=1)
        rows.append(row.cpu())  # one transfer per mini-batch
        targets.append(wanted)
    widths = [features[position].shape[1] for position in range(len(layers))]
    every = torch.cat(targets).cpu()
    shares = every.double() if every.is_floating_point() else F.one_hot(every.long()).double()
    return list(torch.split(torch.cat(rows), widths, dim=1)), shares, torch.cat(right).cpu()


def pooled(layer: Layer, tensor: Tensor, pool: str, counted: Tensor | None = None) -> Tensor:
    """Features of a layer's tensor, (N, features); of its tokens those `counted`, see `padding`."""
    if pool == "cls":
        return tensor[:, 0]
    if layer.spatial:
        return layer.maps(tensor).flatten(2).mean(dim=2)
    tensor = layer.features(tensor)
    return padding.mean_token(tensor, counted) if tensor.ndim > 2 else tensor


@weights_cache.once_per_weights
def training_samples(subject: Subject, samples: str) -> Subject:
    """The samples to fit on, none of which are scored."""
    scored = subject.images
    targets = subject.batches[0][1] if scored is None else scored.targets
    if isinstance(targets, Tensor):
        _refuse_other_than_classes(targets)
    train = other_samples.on_split(subject, "train", samples)
    fit = train.images
    if fit is None or scored is None:
        raise ValueError("a linear classifier needs samples of one input and one class each; measure it on such data")
    least = min(len(fit), len(scored))
    first = fit.inputs[:least].to(scored.inputs.device)  # one of them may have stayed on the host
    if torch.equal(first, scored.inputs[:least]):  # both splits are one set of samples
        wanted = samples if samples == "all" else str(len(scored) + parse_count("train_samples", samples, 10**9))
        train = other_samples.on_split(subject, "train", wanted)
        assert train.images is not None
        train = other_samples.on_rows(train, np.arange(len(scored), len(train.images)))
    one_part = train.images is not fit
    if len(train) < LEAST_SAMPLES:
        half = (len(train) + len(scored)) // 2
        fewer = f"score fewer with --samples {half}, or " if one_part and half >= LEAST_SAMPLES else ""
        raise ValueError(
            f"{subject.data.in_words} must have at least {LEAST_SAMPLES} samples to fit on besides the {len(scored)} "
            f"that are scored, got {len(train)}; {fewer}give data with a train split (a function: a parameter split)"
        )
    if one_part:
        counts = len(scored), len(train)
        _log.info("%s has one part: the first %d samples are scored, %d others fitted", subject.data.in_words, *counts)
    return train


def held_out(samples: int) -> Tensor:
    """Which of the training samples choose the penalty, (samples,) bool: always the same fifth."""
    chosen = torch.zeros(samples, dtype=torch.bool)
    chosen[torch.from_numpy(shuffled(samples)[: int(HELD_OUT * samples)])] = True
    return chosen


def _refuse_other_than_classes(targets: Tensor) -> None:
    if targets.is_floating_point():
        if not are_probabilities(targets):
            raise ValueError("a linear classifier needs classes, got real-valued targets; measure it on labelled data")
    elif targets.ndim != 1 or targets.min() < 0:
        raise ValueError(
            f"a linear classifier needs one class per sample, got {'several' if targets.ndim != 1 else 'negative'} "
            "targets; measure it on data with a class per image"
        )


@dataclass(frozen=True, eq=False)
class Places:
    """Where pooled features are taken: the layers, then the input of the classifier if there is a linear one."""

    layers: tuple[Layer, ...]
    widths: tuple[int, ...]  # features of each
    classifier: nn.Linear | None

    def pooled(self, position: int, tensor: Tensor, pool: str, counted: Tensor | None) -> Tensor:
        """Features at a place, (N, features), from the tokens that count."""
        read = self.classifier is not None and position == len(self.layers) - 1
        return tensor if read else pooled(self.layers[position], tensor, pool, counted)


@weights_cache.once_per_weights
def places_of(subject: Subject, patterns: tuple[str, ...], pool: str) -> Places:
    """The places of a subject, found by one pass over a few samples."""
    subject = mc_dropout.as_is(subject)
    layers = selection.layers_of(subject, patterns)
    made: dict[str, tuple[Tensor, Tensor]] = {}  # last input and output of every linear layer
    widths: dict[int, int] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            made[name] = args[0], output

    def receive(position: int, tensor: Tensor) -> None:
        widths[position] = pooled(layers[position], tensor.detach(), pool).shape[1]

    linear = {name: module for name, module in subject.model.named_modules() if isinstance(module, nn.Linear)}
    with ExitStack() as hooks, subject.evaluating(), forward_hooks.feature_hooks(subject.model, layers, receive):
        for name, module in linear.items():
            hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        logits = logits_or_none(subject.outputs(subject.example()[0]))
    found = next((name for name, (x, y) in made.items() if _is_classifier(x, y, logits)), "")
    if not found or not has_head(subject):
        return Places(tuple(layers), tuple(widths[i] for i in range(len(layers))), None)
    classifier = linear[found]
    shape = (classifier.in_features,)
    read = Layer(found, "head", 0, 1.0, False, Tap(found, "input"), shape, "none", (0, 0), of_images=False)
    return Places((*layers, read), (*(widths[i] for i in range(len(layers))), *shape), classifier)


def _is_classifier(inputs: Tensor, outputs: Tensor, logits: Tensor | None) -> bool:
    """Whether a linear layer returns the logits of one class per sample."""
    fits = inputs.ndim == 2 and logits is not None and outputs.shape == logits.shape and outputs.shape[1] > 1
    return fits and bool(torch.equal(outputs, logits))  # type: ignore[arg-type]


def has_head(subject: Subject) -> bool:
    """Whether the checkpoint holds the network's classifier; that of an encoder is as initialised."""
    return subject.checkpoint is None or not any(map(is_head, subject.checkpoint.missing))
