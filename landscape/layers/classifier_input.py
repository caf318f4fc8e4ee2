"""Find the linear classifier of a network, whose input are the features that neural collapse is about."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints.key_matching import is_head
from landscape.data.structure import logits_or_none
from landscape.discovery.layer import Layer, Tap
from landscape.layers import forward_hooks, selection
from landscape.layers.pooled_features import pooled
from landscape.subject import mc_dropout, weights_cache
from landscape.subject.subject import Subject


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
    handles = [module.register_forward_hook(partial(keep, name)) for name, module in linear.items()]
    try:
        with subject.evaluating(), forward_hooks.feature_hooks(subject.model, layers, receive):
            logits = logits_or_none(subject.outputs(subject.example()[0]))
    finally:
        for handle in handles:
            handle.remove()
    found = next((name for name, (x, y) in made.items() if _is_classifier(x, y, logits)), "")
    if not found or _is_untrained(subject):
        return Places(tuple(layers), tuple(widths[i] for i in range(len(layers))), None)
    classifier = linear[found]
    shape = (classifier.in_features,)
    read = Layer(found, "head", 0, 1.0, False, Tap(found, "input"), shape, "none", (0, 0), of_images=False)
    return Places((*layers, read), (*(widths[i] for i in range(len(layers))), *shape), classifier)


def _is_classifier(inputs: Tensor, outputs: Tensor, logits: Tensor | None) -> bool:
    """Whether a linear layer returns the logits of one class per sample."""
    fits = inputs.ndim == 2 and logits is not None and outputs.shape == logits.shape and outputs.shape[1] > 1
    return fits and bool(torch.equal(outputs, logits))  # type: ignore[arg-type]


def _is_untrained(subject: Subject) -> bool:
    """Whether the checkpoint is an encoder, beside which the classifier is as initialised."""
    return subject.checkpoint is not None and any(map(is_head, subject.checkpoint.missing))
