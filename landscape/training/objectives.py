"""What a run minimises: the loss of a classifier, or of an encoder that needs no labels.

SimCLR (Chen et al. 2020, arXiv 2002.05709) compares two views of each image; a masked-image encoder in the style of
SimMIM (Xie et al. 2022, arXiv 2111.09886) reconstructs the pixels of masked patches. The checkpoints of an encoder
hold its weights without a classifier.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from landscape import models
from landscape.data import augment, recipes
from landscape.data.dataset import Batches, Images
from landscape.models.vit import ViT
from landscape.predictions.evaluation import evaluate
from landscape.probe import derived_seed
from landscape.subject.restoration import evaluation_mode
from landscape.training.training_set import balanced_rows, view

NEIGHBOURS = 20
TEMPERATURE = 0.07
LABELLED = 2048  # training samples at most, the same number of every class


def neighbour_accuracy(features: Callable[[Tensor], Tensor], train: Images, tests: Images, *, batch_size: int) -> float:
    """Share of the test images whose class wins the vote of the most similar training images.

    A neighbour of cosine similarity s has exp(s / 0.07) votes. `features` maps normalised images to (N, d).
    """
    labelled = train.take(balanced_rows(train.targets.cpu(), min(LABELLED, len(train))).numpy())
    known, wanted = (_unit_features(features, images, batch_size) for images in (labelled, tests))
    similar, index = (wanted @ known.T).topk(min(NEIGHBOURS, len(known)), dim=1)
    votes = torch.zeros(len(wanted), train.classes, device=wanted.device, dtype=wanted.dtype)
    votes.scatter_add_(1, labelled.targets[index], ((similar - 1) / TEMPERATURE).exp())
    return (votes.argmax(dim=1) == tests.targets).double().mean().item()


def _unit_features(features: Callable[[Tensor], Tensor], images: Images, batch_size: int) -> Tensor:
    found = [features(images.normalised(part)) for part in torch.split(images.inputs, batch_size)]
    return F.normalize(torch.cat(found).float(), dim=1)


Forward = Callable[..., Tensor]
HELD_OUT = 1024  # test samples that an encoder is evaluated on after an epoch


class Objective(Protocol):
    """How a network is made, what it is given, and what its loss is."""

    accuracy: ClassVar[str]  # the name of its accuracy in a checkpoint

    def build(self, model: str, arguments: Mapping[str, Any]) -> nn.Module:
        """The network that is trained, freshly initialised from the global generator."""

    def examples(self, images: Images, rows: Tensor, network: nn.Module, *, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs of some rows, (rows, ..., C, H, W), and what the loss compares the outputs with, a row each."""

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the rows; inputs with several views of a row come one after the other."""

    def evaluated(self, network: nn.Module, train: Images, tests: Batches, *, seed: int) -> dict[str, float]:
        """Loss and accuracy on the test split."""

    def encoder(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that a checkpoint holds."""


def objective_of(recipe: recipes.Recipe) -> Objective:
    """The objective of a recipe."""
    kinds: dict[str, type[Any]] = {"classification": Classification, "simclr": SimCLR, "mim": MaskedImages}
    made: Objective = kinds[recipe.objective](recipe)
    return made


def refuse_model(recipe: recipes.Recipe, model: str) -> None:
    """Raise a ValueError where the model does not suit the recipe's objective."""
    if recipe.objective == "mim" and "decoder" not in models.accepts(model):
        fit = ", ".join(name for name in models.NAMES if "decoder" in models.accepts(name))
        raise ValueError(f"--objective mim masks the patches of a ViT, {model} is none; give one of {fit}")


def refuse_images(recipe: recipes.Recipe, images: Images) -> None:
    """Raise a ValueError where the images do not suit the recipe's objective."""
    if recipe.objective == "simclr" and images.inputs.dtype != torch.uint8:
        raise ValueError(
            f"--objective simclr augments pixels, {images.name} gives {images.inputs.dtype}; give images as uint8 "
            "(digits, cifar10, a folder, or a Dataset of uint8 tensors)"
        )


@dataclass(frozen=True)
class Classification:
    """Cross-entropy with the classes, or with mixed and smoothed ones."""

    recipe: recipes.Recipe
    accuracy: ClassVar[str] = "accuracy"

    def build(self, model: str, arguments: Mapping[str, Any]) -> nn.Module:
        return models.build(model, **arguments)

    def examples(self, images: Images, rows: Tensor, network: nn.Module, *, seed: int) -> tuple[Tensor, Tensor]:
        augmentation = augment.Augmentation.of_recipe(asdict(self.recipe))
        inputs, targets = augmentation(images.inputs[rows], images.targets[rows], classes=images.classes, seed=seed)
        return images.normalised(inputs), targets

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(forward(inputs).float(), targets)  # from log-softmax, in fp32; soft targets too

    def evaluated(self, network: nn.Module, train: Images, tests: Batches, *, seed: int) -> dict[str, float]:
        found = evaluate(network, tests)
        return {name: found[name] for name in ("loss", "accuracy")}

    def encoder(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(weights)


@dataclass(frozen=True)
class SimCLR:
    """NT-Xent between two views of every image, of the projected features that the classifier would read.

    The other images of a mini-batch are the negatives: of one part of it with `accumulate`, of one process of several.
    """

    recipe: recipes.Recipe
    accuracy: ClassVar[str] = "neighbour_accuracy"

    def build(self, model: str, arguments: Mapping[str, Any]) -> nn.Module:
        network = models.build(model, **arguments)
        name = classifier_of(network)
        width = getattr(network, name).in_features
        setattr(
            network, name, nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.recipe.projection))
        )
        return network

    def examples(self, images: Images, rows: Tensor, network: nn.Module, *, seed: int) -> tuple[Tensor, Tensor]:
        pixels = images.inputs[rows]
        views = [images.normalised(view(pixels, derived_seed(seed, "view", k))) for k in (0, 1)]
        return torch.stack(views, dim=1), rows

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        return contrastive_loss(forward(inputs).float(), self.recipe.temperature)

    def evaluated(self, network: nn.Module, train: Images, tests: Batches, *, seed: int) -> dict[str, float]:
        return _of_encoder(self, network, train, tests, seed, partial(input_of, network, classifier_of(network)))

    def encoder(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in weights.items() if not name.startswith(("head.", "fc."))}


@dataclass(frozen=True)
class MaskedImages:
    """Mean absolute error of the normalised pixels of masked patches, reconstructed behind a small decoder."""

    recipe: recipes.Recipe
    accuracy: ClassVar[str] = "neighbour_accuracy"

    def build(self, model: str, arguments: Mapping[str, Any]) -> nn.Module:
        return WithMask(models.build(model, **self.of_autoencoder(arguments)))

    def of_autoencoder(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the network with its decoder, from those of the encoder."""
        return {**arguments, "decoder": self.recipe.decoder}

    def examples(self, images: Images, rows: Tensor, network: nn.Module, *, seed: int) -> tuple[Tensor, Tensor]:
        augmentation = augment.Augmentation(crop=self.recipe.crop, flip=self.recipe.flip)
        inputs, _ = augmentation(images.inputs[rows], images.targets[rows], classes=images.classes, seed=seed)
        generator = Generator().manual_seed(derived_seed(seed, "mask"))
        across, down = autoencoder(network).grid_size
        mask = random_mask(len(rows), across * down, self.recipe.mask, generator)
        return images.normalised(inputs), mask.to(inputs.device, non_blocking=True)

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        return masked_loss(forward, inputs, targets)

    def evaluated(self, network: nn.Module, train: Images, tests: Batches, *, seed: int) -> dict[str, float]:
        return _of_encoder(self, network, train, tests, seed, partial(mean_patch, autoencoder(network)))

    def encoder(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = self.autoencoder(weights)
        return {
            name: tensor for name, tensor in own.items() if not name.startswith(("head.", "decoder.", "mask_token"))
        }

    def autoencoder(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the encoder and its decoder."""
        return {name.removeprefix("vit."): tensor for name, tensor in weights.items()}


class WithMask(nn.Module):
    """Calls an autoencoder with a mask."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        """The pixels of every patch, (N, patch, channels * side^2), reconstructed without those of the mask."""
        return autoencoder(self).without_patches(images, mask)


def autoencoder(network: nn.Module) -> ViT:
    """The ViT within `WithMask`."""
    vit = network.get_submodule("vit")
    assert isinstance(vit, ViT)
    return vit


def contrastive_loss(embeddings: Tensor, temperature: float) -> Tensor:
    """NT-Xent (Chen et al. 2020, eq. 1) of rows (2 n, d), where rows 2 i and 2 i + 1 are the views of image i."""
    unit = F.normalize(embeddings, dim=1)
    similarity = (unit @ unit.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(similarity, torch.arange(len(unit), device=unit.device) ^ 1)


def masked_loss(forward: Forward, inputs: Tensor, mask: Tensor) -> Tensor:
    """Mean absolute error of the pixels of the masked patches; mask (N, patch) bool."""
    found = forward(inputs, mask).float()  # (N, patch, C * side * side)
    side = math.isqrt(found.shape[2] // inputs.shape[1])
    wanted = F.unfold(inputs, side, stride=side).transpose(1, 2)
    errors = (found - wanted).abs().mean(dim=2)
    return (errors * mask).sum() / mask.sum()  # to select them would wait for a device at every update


def random_mask(rows: int, patches: int, share: float, generator: Generator) -> Tensor:
    """The same number of patches of every image, at random, (rows, patches) bool: the share, and at least one."""
    count = min(max(1, round(share * patches)), patches)
    return torch.rand(rows, patches, generator=generator).argsort(dim=1).argsort(dim=1) < count


def classifier_of(network: nn.Module) -> str:
    """The name of the last linear layer, in the networks of the trainer."""
    return next(name for name in ("head", "fc") if hasattr(network, name))


def input_of(network: nn.Module, name: str, images: Tensor) -> Tensor:
    """What a module of the network is given for some images."""
    kept: list[Tensor] = []
    with network.get_submodule(name).register_forward_pre_hook(lambda module, args: kept.append(args[0])):
        network(images)
    return kept[0]


def mean_patch(network: ViT, images: Tensor) -> Tensor:
    """The mean patch token of a ViT's encoder; its class token gets no gradient from masked images."""
    kept: list[Tensor] = []
    with network.get_submodule("norm").register_forward_hook(lambda module, args, output: kept.append(output)):
        network(images)
    across, down = network.grid_size
    return kept[0][:, -across * down :].mean(dim=1)


def _of_encoder(
    objective: Objective, network: nn.Module, train: Images, tests: Batches, seed: int, features: Forward
) -> dict[str, float]:
    """The objective's own loss on test samples, always with the same views or masks, and their neighbours' accuracy."""
    rows = torch.arange(min(HELD_OUT, len(tests.images)))
    shown = tests.images.take(rows.numpy())
    total = 0.0
    with torch.no_grad(), evaluation_mode(network):
        for i, part in enumerate(torch.split(rows.to(shown.targets.device), tests.batch_size)):
            inputs, wanted = objective.examples(shown, part, network, seed=derived_seed(seed, "test", i))
            total += float(objective.loss(network, inputs.flatten(0, inputs.ndim - 4), wanted)) * len(part)
        accuracy = neighbour_accuracy(features, train, shown, batch_size=tests.batch_size)
    return {"loss": total / len(rows), "accuracy": accuracy}
