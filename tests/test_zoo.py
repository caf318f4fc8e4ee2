"""Discovered layers of other libraries' networks, and every layer probe run on them."""

import math
import textwrap

import numpy as np
import pytest
import torch
from analytic import run_probe
from zoo import ZOO

from landscape.api import configure_shared_pass
from landscape.discovery.discover import discover
from landscape.discovery.layer import Layer
from landscape.probes import FEATURES
from landscape.running.shared_pass import applicable
from landscape.subject.subject import Subject

# name, kind, stage (r: reduces the map), grid + prefix tokens; of self-attentions: heads, grid or window
TIMM = ("patch_embed.proj", "blocks.{}", "attn")


def _hf(name: str, layers: str = "layers") -> tuple[str, str, str]:
    return f"{name}.embeddings.patch_embeddings.projection", f"{name}.{layers}.{{}}", "attention"


def _vit(stem: str, block: str, attention: str, depth: int, heads: int, grid: str, prefix: str = "+1") -> str:
    """The rows of a vision transformer, whose maps all have one size."""
    rows = [f"{stem} stem 0 {grid}{prefix}"]
    for i in range(depth):
        rows.append(f"{block.format(i)}.{attention} msa 1 {grid}{prefix} {heads} heads {grid}")
        rows.append(f"{block.format(i)}.mlp mlp 1 {grid}{prefix}")
    return "\n".join(rows)


EXPECTED = {
    "torchvision resnet": """
        conv1 stem 0 32x32
        maxpool subsample 0r 16x16
        layer1.0 conv 1 16x16
        layer2.0 conv 2r 8x8
        layer2.1 conv 2 8x8
        layer3.0 conv 3r 4x4
        layer4.0 conv 4r 2x2
    """,
    "torchvision vit": _vit("conv_proj", "encoder.layers.encoder_layer_{}", "self_attention", 2, 2, "4x4"),
    "torchvision swin": """
        features.0.0 stem 0 8x8
        features.1.0.attn msa 1 8x8 2 heads 4x4
        features.1.0.mlp mlp 1 8x8
        features.1.1.attn msa 1 8x8 2 heads 4x4
        features.1.1.mlp mlp 1 8x8
        features.2 subsample 2r 4x4
        features.3.0.attn msa 2 4x4 4 heads 4x4
        features.3.0.mlp mlp 2 4x4
        features.3.1.attn msa 2 4x4 4 heads 4x4
        features.3.1.mlp mlp 2 4x4
    """,
    "torchvision swin v2": """
        features.0.0 stem 0 8x8
        features.1.0.attn msa 1 8x8 2 heads 4x4
        features.1.0.mlp mlp 1 8x8
        features.2 subsample 2r 4x4
        features.3.0.attn msa 2 4x4 2 heads 4x4
        features.3.0.mlp mlp 2 4x4
    """,
    "torchvision convnext": """
        features.0.0 stem 0 8x8
        features.1.0.block conv 1 8x8
        features.2 subsample 2r 4x4
        features.3.0.block conv 2 4x4
        features.3.1.block conv 2 4x4
    """,
    "torchvision regnet": """
        stem.0 stem 0 32x32
        trunk_output.block1.block1-0.f conv 1r 16x16
        trunk_output.block2.block2-0.f conv 2r 8x8
        trunk_output.block3.block3-0.f conv 3r 4x4
        trunk_output.block3.block3-1.f conv 3 4x4
    """,
    "torchvision efficientnet": """
        features.0.0 stem 0 16x16
        features.1.0.block conv 1 16x16
        features.2.0.block conv 2r 8x8
        features.2.1.block conv 2 8x8
        features.3.0.block conv 2 8x8
        features.3.1.block conv 2 8x8
    """,
    "timm vit": _vit(*TIMM, 2, 3, "4x4"),
    "timm vit, oblong, no class token": _vit(*TIMM, 1, 3, "4x2", ""),
    "timm vit with registers": _vit(*TIMM, 1, 6, "4x4", "+5"),
    "timm deit, distilled": _vit(*TIMM, 2, 3, "4x4", "+2"),
    "timm swin": """
        patch_embed.proj stem 0 14x14
        layers.0.blocks.0.attn msa 1 14x14 2 heads 7x7
        layers.0.blocks.0.mlp mlp 1 14x14
        layers.0.blocks.1.attn msa 1 14x14 2 heads 7x7
        layers.0.blocks.1.mlp mlp 1 14x14
        layers.1.downsample subsample 2r 7x7
        layers.1.blocks.0.attn msa 2 7x7 4 heads 7x7
        layers.1.blocks.0.mlp mlp 2 7x7
        layers.1.blocks.1.attn msa 2 7x7 4 heads 7x7
        layers.1.blocks.1.mlp mlp 2 7x7
    """,
    "timm convnext": """
        stem.0 stem 0 16x16
        stages.0.blocks.0 conv 1 16x16
        stages.1.downsample subsample 2r 8x8
        stages.1.blocks.0 conv 2 8x8
        stages.2.downsample subsample 3r 4x4
        stages.2.blocks.0 conv 3 4x4
        stages.2.blocks.1 conv 3 4x4
        stages.3.downsample subsample 4r 2x2
        stages.3.blocks.0 conv 4 2x2
    """,
    "timm pit": """
        patch_embed.conv stem 0 7x7+1
        transformers.0.blocks.0.attn msa 1 7x7+1 2 heads 7x7
        transformers.0.blocks.0.mlp mlp 1 7x7+1
        transformers.1.pool subsample 2r 4x4+1
        transformers.1.blocks.0.attn msa 2 4x4+1 4 heads 4x4
        transformers.1.blocks.0.mlp mlp 2 4x4+1
    """,
    "timm mixer": """
        stem.proj stem 0 4x4
        blocks.0.mlp_tokens mlp 1 4x4
        blocks.0.mlp_channels mlp 1 4x4
        blocks.1.mlp_tokens mlp 1 4x4
        blocks.1.mlp_channels mlp 1 4x4
    """,
    "timm beit": _vit(*TIMM, 1, 3, "4x4"),
    "timm eva": _vit(*TIMM, 1, 3, "4x4"),
    "transformers vit": _vit(*_hf("vit"), 2, 2, "4x4"),
    "transformers deit": _vit(*_hf("deit"), 2, 2, "4x4", "+2"),
    "transformers swin": """
        swin.embeddings.patch_embeddings.projection stem 0 16x16
        swin.encoder.layers.0.blocks.0.attention msa 1 16x16 2 heads 4x4
        swin.encoder.layers.0.blocks.0.mlp mlp 1 16x16
        swin.encoder.layers.0.blocks.1.attention msa 1 16x16 2 heads 4x4
        swin.encoder.layers.0.blocks.1.mlp mlp 1 16x16
        swin.encoder.layers.0.downsample subsample 2r 8x8
        swin.encoder.layers.1.blocks.0.attention msa 2 8x8 2 heads 4x4
        swin.encoder.layers.1.blocks.0.mlp mlp 2 8x8
    """,
    "transformers resnet": """
        resnet.embedder.embedder.convolution stem 0 16x16
        resnet.embedder.pooler subsample 0r 8x8
        resnet.encoder.stages.0.layers.0.layer conv 1 8x8
        resnet.encoder.stages.1.layers.0.layer conv 2r 4x4
        resnet.encoder.stages.1.layers.1.layer conv 2 4x4
    """,
    "transformers dinov2": _vit(*_hf("dinov2", "encoder.layer"), 1, 2, "4x4"),
    "transformers dinov2 with registers": _vit(*_hf("dinov2_with_registers", "encoder.layer"), 1, 2, "4x4", "+5"),
}


def _row(layer: Layer) -> str:
    rows, columns = layer.grid
    words = [layer.name, layer.kind, f"{layer.stage}{'r' if layer.reduces else ''}"]
    words.append(f"{rows}x{columns}" + (f"+{layer.prefix}" if layer.prefix else ""))
    if layer.attention is not None:
        rows, columns = layer.attention.grid
        words.append(f"{layer.attention.heads} heads {rows}x{columns}")
    return " ".join(words)


@pytest.fixture(scope="module")
def subjects() -> dict[str, Subject]:
    return {}


def _subject(name: str, subjects: dict[str, Subject]) -> Subject:
    """The network on six images, in double precision; built once."""
    if name not in subjects:
        torch.manual_seed(0)
        build, size = ZOO[name]
        model = build().double().eval()
        subjects[name] = Subject(model, [(torch.randn(6, 3, *size).double(), torch.arange(6) % 5)])
    return subjects[name]


def test_every_network_has_its_row() -> None:
    assert ZOO.keys() == EXPECTED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_layers_are_those_of_the_architecture(name: str, subjects: dict[str, Subject]) -> None:
    subject = _subject(name, subjects)
    layers = discover(subject.model, subject.batches[0][0])
    found = "\n".join(_row(layer) for layer in layers)
    assert found == textwrap.dedent(EXPECTED[name]).strip()
    if name.startswith("torchvision swin"):
        assert {layer.layout for layer in layers} == {"channels last"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_layer_probes_measure_them(name: str, subjects: dict[str, Subject]) -> None:
    subject = _subject(name, subjects)
    fit, refused = applicable(configure_shared_pass(FEATURES, "", {"spectra_images": 1})[0], subject)
    attends = "heads" in EXPECTED[name]
    assert list(refused) == ([] if attends else ["attention"])
    found = {probe.name: run_probe(probe, subject) for probe in fit}
    layers = len(EXPECTED[name].strip().splitlines())
    assert np.isfinite(found["fourier"]["delta_log_amplitude"][:, 0]).sum() == layers
    assert (found["variance"]["variance"] > 0).sum() == layers
    np.testing.assert_allclose(np.diag(found["similarity"]["cka"]), 1.0)
    if attends:
        sides = [found["attention"][name].max() for name in ("rows", "columns")]
        entropy = found["attention"]["entropy"]
        real = np.isfinite(entropy)
        assert real.any(axis=1).all()
        assert (entropy[real] <= math.log(sides[0] * sides[1]) + 1e-9).all()
        for quantity in ("distance", "mutual_information"):
            assert (found["attention"][quantity][real] > 0).all()
        assert (found["attention"]["mutual_information"][real] < 1).all()
