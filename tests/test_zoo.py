"""Discovered layers of other libraries' networks, every layer probe run on them, and `benchmarks/zoo.py` in short."""

import importlib.util
import json
import math
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from analytic import run_probe
from torch import Tensor
from zoo import ZOO, timm_model

from landscape.api import configure_shared_pass
from landscape.discovery.discover import discover
from landscape.discovery.layer import Layer
from landscape.layers.forward_hooks import feature_hooks
from landscape.probes import FEATURES, probe_class
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
    made, _ = configure_shared_pass([probe_class(name) for name in FEATURES], "", {"spectra_images": 1})
    fit, refused = applicable(made, subject)
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


SECONDS = 15  # of a network in the campaign
BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "zoo.py"


@pytest.fixture
def benchmark_of_zoo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/zoo.py`, with ten networks."""
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    spec = importlib.util.spec_from_file_location("benchmark_of_zoo", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    networks = ModuleType("zoo_networks")
    networks.names = lambda: [f"timm/{letter}" for letter in "abcdefghij"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zoo_networks", networks)
    return module


def test_shards_and_samples_divide_the_networks(benchmark_of_zoo: ModuleType) -> None:
    choose, everything = benchmark_of_zoo.choose, sys.modules["zoo_networks"].names()
    assert choose("1/1", "", 1.0, 0) == everything
    assert sorted(choose("1/3", "", 1.0, 0) + choose("2/3", "", 1.0, 0) + choose("3/3", "", 1.0, 0)) == everything
    assert choose("1/1", "[bd]$", 1.0, 0) == ["timm/b", "timm/d"]
    some = choose("1/1", "", 0.4, 7)
    assert len(some) == 4
    assert some == choose("1/1", "", 0.4, 7) != choose("1/1", "", 0.4, 8)


def test_what_a_measurement_gives_is_told_from_where_its_error_arises(benchmark_of_zoo: ModuleType) -> None:
    from landscape.options import at_least

    def outcome(measure: Any) -> str:
        return str(benchmark_of_zoo.outcome(measure)["outcome"])

    assert outcome(lambda: {"value": 1.0}) == "number"
    assert outcome(lambda: {"value": math.nan}) == "partial"
    assert outcome(lambda: {"nan": ["blocks.0"]}) == "partial"
    assert outcome(lambda: at_least("top", 0, 1)) == "refused"
    assert outcome(lambda: torch.zeros(2) + torch.zeros(3)) == "failed"
    assert outcome(lambda: int("a")) == "failed"


def test_later_rows_replace_earlier_ones_but_for_what_they_have_not_finished(
    benchmark_of_zoo: ModuleType, tmp_path: Path
) -> None:
    number, limit = {"outcome": "number", "version": "1"}, {"outcome": "limit"}
    rows = [
        {"name": "a", "discovery": {}, "fourier": number, "hessian": number},
        {"name": "a", "discovery": {}, "fourier": limit, "lesion": limit, "hessian": number | {"version": "2"}},
        {"name": "b", "broken": "ended by signal 9"}, {"name": "b", "discovery": {}, "fourier": number},
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = benchmark_of_zoo.read(file)
    assert found["a"] == rows[1] | {"fourier": number}
    assert found["b"] == rows[3]


def test_cells_that_differ_from_the_page_are_named(benchmark_of_zoo: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| network | layers |\n| timm/a (a_tiny) | 3 | 3 |  | 2 | x | x | part 2/3 | - | x |  |\n")
    old = benchmark_of_zoo.cells_of(page)["timm/a"]
    new = ["timm/a (a_tiny)", "3", "3", "", "2", "x", "limit", "x", "-", "x", "x"]
    assert benchmark_of_zoo.differing(new, old) == ["DIFFERS: timm/a (a_tiny): x, part 2/3 in the page"]


@pytest.mark.campaign
def test_a_tenth_of_the_libraries_networks_has_what_the_page_says(tmp_path: Path) -> None:
    """Two networks at a time; what one does not finish in `SECONDS` of CPU time is not compared."""
    for library in ("timm", "transformers", "torchvision"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    page = BENCHMARK.parents[1] / "docs" / "zoo.md"
    chosen = ["--sample", "0.1", "--seed", "10", "--jobs", "2", "--seconds", str(SECONDS), "--against", str(page)]
    command = [sys.executable, str(BENCHMARK), *chosen, "--rows", str(tmp_path / "rows.jsonl")]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    built = [row for row in rows if "discovery" in row]
    assert len(built) >= 40
    for column in ("variance", "similarity", "lesion", "hessian"):
        kinds = Counter(row[column]["outcome"] for row in built)
        assert kinds["number"] >= 0.9 * (len(built) - kinds["none"] - kinds["limit"]), (column, kinds)
        assert kinds["limit"] <= len(built) / 4


SMALL = {"img_size": 64, "depth": 2}
BLOCKS = "blocks.0.mlp blocks.1.mlp"
CROSSVIT = [f"blocks.{i}.blocks.{branch}.mlp" for branch in ("0.0", "1.3") for i in range(3)]
# Networks of timm -> (arguments, side of their images, layers that are the last of its own intermediate features)
INTERMEDIATES: dict[str, tuple[dict[str, Any], int, str]] = {
    "vit_base_patch16_siglip_224": ({**SMALL, "embed_dim": 48, "num_heads": 2}, 64, BLOCKS),
    "vit_tiny_r_s16_p8_224": (SMALL, 64, BLOCKS),
    "xcit_nano_12_p16_224": (SMALL, 64, BLOCKS),
    "tnt_s_legacy_patch16_224": (SMALL, 64, BLOCKS),
    "crossvit_tiny_240": ({}, 240, " ".join(CROSSVIT)),
    "davit_tiny": ({"depths": (1,) * 4}, 64, " ".join(f"stages.{i}.blocks.0.1.mlp" for i in range(4))),
    "twins_svt_small": ({"depths": (1,) * 4}, 64, " ".join(f"pos_block.{i}.proj" for i in range(4))),
    "coat_tiny": ({"img_size": 64}, 64, "serial_blocks1.1.mlp" + 3 * " parallel_blocks.5.mlp2"),
    "hrnet_w18_small": ({}, 64, "- " + " ".join(f"incre_modules.{i}.0" for i in range(4))),
    "rexnet_100": ({}, 64, " ".join(f"features.{i}" for i in (0, 2, 4, 10, 15))),
    "resnetv2_18": ({}, 64, "stem.conv " + " ".join(f"stages.{i}.blocks.1" for i in range(4))),
    "skresnet18": ({}, 64, "conv1 " + " ".join(f"layer{i}.1" for i in range(1, 5))),
}


@pytest.mark.parametrize(
    "name",
    ["vit_base_patch16_siglip_224", *(pytest.param(name, marks=marks) for names, marks in (
        (("vit_tiny_r_s16_p8_224", "xcit_nano_12_p16_224", "tnt_s_legacy_patch16_224", "twins_svt_small", "rexnet_100",
          "resnetv2_18", "skresnet18"), pytest.mark.slow),
        (("crossvit_tiny_240", "davit_tiny", "coat_tiny", "hrnet_w18_small"), pytest.mark.campaign),
    ) for name in names)],
)  # fmt: skip
def test_maps_of_the_layers_are_the_intermediate_features_that_the_library_gives(name: str) -> None:
    arguments, side, expected = INTERMEDIATES[name]
    torch.manual_seed(0)
    model, images = timm_model(name, **arguments).eval(), torch.randn(2, 3, side, side)
    layers = discover(model, images)
    found: dict[int, Tensor] = {}

    def receive(at: int, tensor: Tensor) -> None:
        if layers[at].spatial:
            found[at] = layers[at].maps(tensor).clone()

    with torch.inference_mode():
        with feature_hooks(model, layers, receive):
            model(images)
        wanted = model.forward_intermediates(images, intermediates_only=True)  # type: ignore[operator]
    names = []
    for features in wanted:
        like = [at for at, maps in found.items() if maps.shape == features.shape]
        equal = [layers[at].name for at in sorted(like) if torch.allclose(found[at], features, atol=1e-5)]
        names.append(equal[-1] if equal else "-")
    assert names == expected.split()
