"""Hessian-vector products through attention of every library, without the fused kernels that lack derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from analytic import batches_of
from foreign import Encoder, torchvision_models
from torch import Tensor, nn

from landscape.products.hvp_backends import CODES, curvature
from landscape.products.operator import Curvature
from landscape.products.vectors import flat, random_unit, unflat
from landscape.subject.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the libraries


def _own() -> nn.Module:
    from landscape import models

    return models.build("vit_demo", classes=3, image_size=16, dim=16, depth=1, heads=2)


class SelfAttention(nn.Module):
    """torch's own multi-head attention, whose fast path has no derivative in eval mode at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).mT
        logits: Tensor = self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))
        return logits


def _torchvision() -> nn.Module:
    return torchvision_models().VisionTransformer(  # type: ignore[no-any-return]
        image_size=16, patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3
    )


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torchvision_models()
        timm = pytest.importorskip("timm", exc_type=ImportError)
        return timm.create_model(name, num_classes=3, **options)  # type: ignore[no-any-return]

    return build


def _transformers() -> nn.Module:
    torchvision_models()
    library = pytest.importorskip("transformers", exc_type=ImportError)
    config = library.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
        num_labels=3, attn_implementation="sdpa",
    )  # fmt: skip
    return library.ViTForImageClassification(config)  # type: ignore[no-any-return]


MAKES: dict[str, Callable[[], nn.Module]] = {
    "own": _own,
    "nn.MultiheadAttention": SelfAttention,
    "nn.TransformerEncoder": lambda: Encoder(grid=(4, 4)),
    "torchvision ViT": _torchvision,
    "timm ViT": _timm("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=12, depth=1, num_heads=2),
    "timm Swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(1, 2)
    ),
    "transformers ViT": _transformers,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES)
def test_products_through_attention_are_differences_of_its_gradient(make: str) -> None:
    torch.manual_seed(0)
    size = 32 if "Swin" in make else 16
    subject = Subject(MAKES[make]().double().eval(), batches_of((3, size, size), (4, 4), 3))
    parameters = list(subject.parameters.values())
    vector = random_unit(subject.size, 1, device=torch.device("cpu"), dtype=torch.float64)
    found = Curvature(subject, subject.parameters, "double-backward").product(1)(vector)

    def gradient(step: float) -> Tensor:
        moved = unflat(vector, parameters)
        with torch.no_grad():
            for p, direction in zip(parameters, moved, strict=True):
                p.add_(direction, alpha=step)
        gradients = torch.autograd.grad(subject.loss(1), parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for p, direction in zip(parameters, moved, strict=True):
                p.sub_(direction, alpha=step)
        return flat(gradients)

    difference = (gradient(1e-4) - gradient(-1e-4)) / 2e-4
    torch.testing.assert_close(found, difference, rtol=1e-4, atol=1e-6 * difference.norm().item())
    if make in ("torchvision ViT", "timm ViT"):
        traced = curvature(subject, subject.parameters, CODES[1]).product(1)(vector)  # type: ignore[arg-type]
        torch.testing.assert_close(traced, found, rtol=1e-9, atol=1e-12)
