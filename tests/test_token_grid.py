"""Windowed residual streams: their tokens are put in the order of the image, wherever blocks have moved them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from analytic import run_probe
from foreign import Encoder, torchvision_models
from torch import Tensor, nn
from zoo import timm_model

from landscape.discovery.discover import discover
from landscape.layers.forward_hooks import feature_hooks
from landscape.layers.pooled_features import pooled
from landscape.probes.fourier import Fourier
from landscape.probes.geometry import Geometry
from landscape.probes.similarity import Similarity
from landscape.probes.variance import Variance
from landscape.subject.subject import Subject


class Block(nn.Module):
    """x + MLP(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Windows(nn.Module):
    """An MLP block on a map, one on its 4 x 4 windows, and one on the map again."""

    def __init__(self, *, batched: bool) -> None:
        super().__init__()
        self.batched = batched  # windows on the batch axis, or on an axis of their own
        self.stem = nn.Conv2d(3, 6, 2, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).permute(0, 2, 3, 1)  # (N, 8, 8, 6)
        x = self.blocks[0](x)
        x = x.reshape(-1, 2, 4, 2, 4, 6).transpose(2, 3)
        x = x.reshape(-1, 16, 6) if self.batched else x.reshape(-1, 4, 16, 6)
        x = self.blocks[1](x)
        x = x.reshape(-1, 2, 2, 4, 4, 6).transpose(2, 3).reshape(-1, 8, 8, 6)
        x = self.blocks[2](x)
        return self.head(x.mean((1, 2)))


def _maps(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    layers, found = discover(model, images), {}

    def receive(position: int, tensor: Tensor) -> None:
        found[layers[position].name] = layers[position].maps(tensor).clone()

    with torch.no_grad(), feature_hooks(model, layers, receive):
        model(images)
    return found


@pytest.mark.parametrize("batched", [False, True])
def test_maps_of_windows_are_those_of_the_image(batched: bool) -> None:
    torch.manual_seed(0)
    model = Windows(batched=batched).double().eval()
    images = torch.randn(6, 3, 16, 16).double()
    layers = discover(model, images)
    assert [(layer.name, layer.grid, layer.rows_per_image) for layer in layers] == [
        ("stem", (8, 8), 1),
        ("blocks.0.mlp", (8, 8), 1),
        ("blocks.1.mlp", (8, 8), 4 if batched else 1),
        ("blocks.2.mlp", (8, 8), 1),
    ]
    found = _maps(model, images)
    joined = model.blocks[1](found["blocks.0.mlp"].permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(found["blocks.1.mlp"], joined)
    subject = Subject(model, [(images, torch.arange(6) % 5)])
    assert run_probe(Fourier(), subject)["name"].tolist() == list(found)
    np.testing.assert_allclose(np.diag(run_probe(Similarity(), subject)["cka"]), 1.0)
    tensor = torch.randn(*((2 * 4,) if batched else (2, 4)), 16, 6)
    torch.testing.assert_close(pooled(layers[2], tensor, "mean"), tensor.reshape(2, 64, 6).mean(1))


def _maxvit() -> nn.Module:
    return torchvision_models().MaxVit((64, 64), 8, 4, [8, 16], [1, 1], 4, 0.0, num_classes=5)  # type: ignore[no-any-return]


NEST = {"img_size": 64, "embed_dims": (12, 12, 12), "num_heads": (2, 2, 2), "depths": (1, 1, 1)}
HIERA = {"img_size": (64, 64), "stages": (1, 1, 1, 1), "embed_dim": 8, "num_heads": 1}
FOREIGN: dict[str, tuple[Callable[[], nn.Module], int]] = {  # network; its first stages that end in a sum
    "torchvision maxvit": (_maxvit, 0),
    "timm hiera": (partial(timm_model, "hiera_tiny_224", **HIERA), 4),
    "timm nest": (partial(timm_model, "nest:Nest", **NEST), 2),
    "timm mobilevit": (partial(timm_model, "mobilevit_xxs"), 2),
    "timm mobilevitv2": (partial(timm_model, "mobilevitv2_050"), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_windowed_networks_have_the_maps_that_their_library_gives(name: str) -> None:
    torch.manual_seed(0)
    build, count = FOREIGN[name]
    model, images = build().eval(), torch.randn(2, 3, 64, 64)
    assert not any(layer.grid_unknown for layer in discover(model, images))
    if count:
        found = _maps(model, images).values()
        with torch.no_grad():
            stages = model.forward_intermediates(images, intermediates_only=True)
        for stage in stages[:count]:
            assert any(maps.shape == stage.shape and torch.allclose(maps, stage, atol=1e-5) for maps in found)


class Words(Encoder):
    """The same layers on indices of tokens."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__(batch_first=batch_first)
        self.words = nn.Embedding(9, 12)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.words(indices)
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("samples", [4, 6, 8])
@pytest.mark.parametrize("network", [Encoder, Words])
def test_networks_with_tokens_first_have_the_numbers_of_those_with_samples_first(
    network: Callable[..., nn.Module], samples: int
) -> None:
    """Also where a mini-batch has as many samples as there are tokens, or a whole multiple."""
    torch.manual_seed(0)
    inputs = torch.randint(9, (24, 8)) if network is Words else torch.randn(24, 3, 16, 8)
    models = [network(batch_first=first).double().eval() for first in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = inputs if network is Words else inputs.double()
    probes = [Similarity(), Geometry(images=24)] + [Fourier(), Variance()] * (network is Encoder)
    targets = torch.arange(24) % 5
    batches = [*zip(inputs.split(samples), targets.split(samples), strict=True)]
    for probe in probes:
        wanted, found = (run_probe(probe, Subject(model, batches)) for model in models)
        for name, values in wanted.items():
            if np.asarray(values).dtype.kind == "f":
                np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-9, err_msg=f"{probe.name}: {name}")
