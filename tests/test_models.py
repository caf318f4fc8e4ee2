"""The networks: sizes, agreement with independent computations, structure, and what they refuse."""

import math
from itertools import product
from typing import Any

import forked
import pytest
import torch
from foreign import off_its_start
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from landscape import models
from landscape.models import alternet, preresnet, resnet, vit
from landscape.models.blocks import drop_path, drop_path_rates
from landscape.options import OptionError

DEMOS = ("vit_demo", "resnet_demo", "preresnet_demo", "alternet_demo")
COUNTS: list[tuple[str, int, int, dict[str, object], int]] = [
    ("vit_ti", 100, 32, {}, 5_403_172),
    ("vit_s", 100, 32, {}, 21_423_076),
    ("vit_ti", 1000, 224, {}, 5_710_504),
    ("vit_ti", 100, 32, {"patch": 4, "head": "gap"}, 5_372_836),
    ("resnet18", 100, 32, {}, 11_220_132),
    ("resnet18", 1000, 224, {}, 11_689_512),  # torchvision
    ("resnet34", 100, 32, {}, 21_328_292),
    ("resnet50", 100, 32, {}, 23_705_252),
    ("resnet101", 100, 32, {}, 42_697_380),
    ("resnet50", 1000, 224, {}, 25_557_032),  # torchvision
    ("resnet50", 100, 32, {"groups": 32, "width_per_group": 4}, 23_177_124),
    ("preresnet18", 100, 32, {}, 11_218_340),
    ("preresnet50", 100, 32, {}, 23_697_572),
    ("alternet18", 100, 32, {}, 9_499_063),
    ("alternet34", 100, 32, {}, 22_362_954),
    ("alternet50", 100, 32, {}, 33_012_840),
    ("alternet50", 1000, 224, {}, 35_915_038),
    ("alternet50", 1000, 224, {"msa": [0, 1, 3, 2], "window": 7}, 35_915_038),
    *(("localvit_ti", 100, 32, {"neighbourhood": k}, 5_372_836) for k in (3, 4, 5, 7, None)),
    ("resnext50", 100, 32, {}, 23_177_124),
    ("resnext50", 1000, 224, {}, 25_028_904),  # torchvision
    ("wideresnet50", 1000, 224, {}, 68_883_240),  # torchvision
    ("swin_ti", 100, 32, {}, 27_562_126),
    ("swin_ti", 1000, 224, {"qkv_bias": True}, 28_288_354),  # torchvision
    ("pit_ti", 100, 32, {}, 4_576_740),
    ("mixer_ti", 100, 32, {}, 4_769_636),
    ("mixer_s", 1000, 224, {}, 18_528_264),  # timm
]

TINY: dict[str, dict[str, Any]] = {
    "vit_ti": {"dim": 12, "depth": 3, "heads": 3},
    "localvit_ti": {"dim": 12, "depth": 3},
    "swin_ti": {"dim": 12, "depths": (1, 2), "heads": (2, 4)},
    "pit_ti": {"depths": (1, 2), "heads": (1, 2), "head_dim": 8},
    "mixer_ti": {"dim": 12, "depth": 3, "token_hidden": 7, "channel_hidden": 9},
    "resnet18": {"blocks": (1, 2), "width": 8},
    "resnext50": {"blocks": (1, 2), "width": 16, "groups": 4, "width_per_group": 4},
    "preresnet18": {"blocks": (1, 2), "width": 8},
    "alternet18": {"blocks": (1, 2), "msa": (0, 1), "heads": (1, 2), "width": 8, "head_dim": 8},
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _on_meta(name: str, classes: int, image_size: int, **arguments: Any) -> nn.Module:
    with torch.device("meta"):  # shapes without values
        return models.build(name, classes=classes, image_size=image_size, **arguments)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _map_sizes(model: nn.Module, image_size: int) -> list[tuple[int, ...]]:
    sizes: list[tuple[int, ...]] = []
    for i in range(1, 5):
        layer = model.get_submodule(f"layer{i}")
        layer.register_forward_hook(lambda _module, _inputs, output: sizes.append(tuple(output.shape[1:])))
    model(torch.zeros(1, 3, image_size, image_size, device="meta"))
    return sizes


# Sizes


@pytest.mark.parametrize(("name", "classes", "image_size", "arguments", "count"), COUNTS)
def test_parameter_counts(name: str, classes: int, image_size: int, arguments: dict[str, object], count: int) -> None:
    assert _count(_on_meta(name, classes, image_size, **arguments)) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOS)
@pytest.mark.parametrize(("classes", "image_size"), [(2, 8), (10, 16), (100, 32), (10, 28), (5, 96)])
def test_demo_sizes_adapt_to_images_and_classes(name: str, classes: int, image_size: int) -> None:
    model = models.build(name, classes=classes, image_size=image_size).eval()
    assert 100_000 <= _count(model) <= 300_000
    assert model(torch.randn(2, 3, image_size, image_size)).shape == (2, classes)
    kinds = (vit.Block, resnet.Block, preresnet.Block, alternet.MSABlock)
    assert sum(isinstance(module, kinds) for module in model.modules()) >= 4


def test_vit_patches_grow_with_the_image() -> None:
    def grid(name: str, image_size: int) -> tuple[int, int]:
        model = _on_meta(name, 10, image_size)
        return model.grid_size

    assert [grid("vit_ti", size) for size in (16, 32, 64, 224)] == [(8, 8), (16, 16), (16, 16), (14, 14)]
    assert [grid("vit_demo", size) for size in (16, 32, 64, 224)] == [(8, 8)] * 4


@pytest.mark.parametrize("name", ["resnet50", "preresnet50", "alternet50"])
def test_stems_and_strides_which_are_those_of_the_3x3_convolution_of_bottlenecks(name: str) -> None:
    channels, attended = (256, 512, 1024, 2048), {"msa": (0, 1, 0, 1)} if name == "alternet50" else {}
    for image_size, sizes in ((32, (32, 16, 8, 4)), (224, (56, 28, 14, 7))):
        model = _on_meta(name, 10, image_size, blocks=(1, 2, 1, 2), **attended)
        assert _map_sizes(model, image_size) == [(c, s, s) for c, s in zip(channels, sizes, strict=True)]
        first = model.get_submodule("layer2.0")
        assert [first.get_submodule(f"conv{i}").stride for i in (1, 2, 3)] == [(1, 1), (2, 2), (1, 1)]


# Agreement with independent computations


def _layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return centred / scale * norm.weight + norm.bias


def _loop_vit(model: vit.ViT, image: Tensor, *, patch: int) -> Tensor:
    """Logits of one image, patch by patch, head by head, query by query."""
    weight, bias = model.patch_embedding.weight, model.patch_embedding.bias
    rows, columns = model.grid_size
    tokens = [] if model.cls_token is None else [model.cls_token[0, 0]]
    for row, column in product(range(rows), range(columns)):
        pixels = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        tokens.append(weight.flatten(1) @ pixels.flatten() + bias)
    x = torch.stack(tokens) + model.position_embedding[0]
    for block in model.blocks:
        attention = block.attention
        head_dim = x.shape[1] // attention.heads
        q, k, v = (_layer_norm(x, block.norm1) @ attention.qkv.weight.T).chunk(3, dim=1)
        mixed = torch.empty_like(x)
        for head, query in product(range(attention.heads), range(len(x))):
            own = slice(head * head_dim, (head + 1) * head_dim)
            scores = torch.stack([q[query, own] @ key[own] for key in k]) / math.sqrt(head_dim)
            weights = scores.exp() / scores.exp().sum()
            mixed[query, own] = sum((w * value[own] for w, value in zip(weights, v, strict=True)), torch.zeros(()))
        x = x + mixed @ attention.projection.weight.T + attention.projection.bias
        hidden = block.mlp[0](_layer_norm(x, block.norm2))
        x = x + block.mlp[3](hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))))
    x = _layer_norm(x, model.norm)
    return model.head(x.mean(0) if model.cls_token is None else x[0])


@pytest.mark.parametrize("head", ["cls", "gap"])
def test_vit_equals_a_loop(head: str) -> None:
    small = {"classes": 3, "image_size": 6, "patch": 2, "dim": 8, "depth": 2, "heads": 2, "head": head}
    model = off_its_start(models.build("vit_demo", **small), 0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # attention far from uniform
        images = torch.randn(2, 3, 6, 6, dtype=torch.float64)
        expected = torch.stack([_loop_vit(model, image, patch=2) for image in images])
        torch.testing.assert_close(model(images), expected)


def test_windowed_attention_equals_a_loop() -> None:
    window, heads, head_dim = 2, 3, 4
    attention = alternet.WindowAttention(5, 6, window, heads, head_dim).double()
    x = torch.randn(2, 5, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        attention.relative_position.normal_()
        q, kv = attention.query(x), attention.key_value(x)
        k, v = kv[:, : heads * head_dim], kv[:, heads * head_dim :]
        mixed = torch.zeros_like(q)
        inside = list(product(range(window), range(window)))
        for n, top, left, head in product(range(2), range(0, 4, window), range(0, 6, window), range(heads)):
            own = slice(head * head_dim, (head + 1) * head_dim)
            for i, j in inside:
                keys, values = (torch.stack([x[n, own, top + r, left + c] for r, c in inside]) for x in (k, v))
                scores = keys @ q[n, own, top + i, left + j] / math.sqrt(head_dim)
                offsets = [(r - i + window - 1, c - j + window - 1) for r, c in inside]
                scores += torch.stack([attention.relative_position[offset] for offset in offsets])
                mixed[n, own, top + i, left + j] = scores.softmax(0) @ values
        torch.testing.assert_close(attention(x), attention.projection(mixed))


def test_a_projecting_pre_activation_skip_starts_after_the_norm_and_has_none() -> None:
    block = preresnet.Block(4, 8, 2, bottleneck=False, rate=0.0)
    off_its_start(block, 0.1)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        active = block.bn1(x).clamp(min=0)
        branch = block.conv2(block.bn2(block.conv1(active)).clamp(min=0))
        skip = torch.einsum("oi,nihw->nohw", block.downsample.weight[:, :, 0, 0], active[:, :, ::2, ::2])
        torch.testing.assert_close(block(x), skip + branch)


# Structure


def test_a_stage_is_convolutions_then_pairs() -> None:
    def stages(name: str, image_size: int) -> list[str]:
        model = _on_meta(name, 10, image_size)
        layers = [model.get_submodule(f"layer{i}") for i in range(1, 5)]
        return ["".join("M" if isinstance(b, alternet.MSABlock) else "C" for b in layer) for layer in layers]

    assert stages("alternet50", 32) == ["CCC", "CCCM", "CCCCCM", "CMCM"]
    assert stages("alternet50", 224) == ["CCC", "CCCM", "CMCMCM", "CMCM"]
    assert stages("alternet18", 32) == ["CC", "CM", "CM", "CM"]
    assert alternet.placement(7, 2) == [False, False, False, False, True, False, True]


@pytest.mark.parametrize(
    ("image_size", "windows"), [(8, [4, 2]), (16, [4, 4]), (28, [7, 7]), (32, [4, 4]), (96, [6, 6])]
)
def test_demo_windows_tile_their_maps(image_size: int, windows: list[int]) -> None:
    model = models.build("alternet_demo", classes=10, image_size=image_size)
    found = [module for module in model.modules() if isinstance(module, alternet.WindowAttention)]
    assert [attention.window for attention in found] == windows
    assert [attention.relative_position.numel() for attention in found] == [(2 * w - 1) ** 2 for w in windows]


@pytest.mark.parametrize("name", [*DEMOS, *TINY])
def test_state_dicts_round_trip_hold_nothing_recomputable_and_follow_from_the_random_state(name: str) -> None:
    def built() -> nn.Module:
        return models.build(name, classes=10, image_size=16, **TINY.get(name, {})).eval()

    first, second = built(), built()
    images = torch.randn(2, 3, 16, 16)
    assert not torch.equal(first(images), second(images))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(images), second(images))
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    learnt = {key for key, _ in first.named_parameters()}
    assert all(key in learnt or key.split(".")[-1] in statistics for key in first.state_dict())
    torch.manual_seed(0)  # that of the first
    third = built().state_dict()
    assert all(torch.equal(tensor, third[key]) for key, tensor in first.state_dict().items())
    first(images).sum().backward()
    assert [key for key, p in first.named_parameters() if p.grad is None] == []


SHALLOW: dict[str, dict[str, Any]] = {"vit_demo": {"depth": 2, "patch": 2}}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode calls it
@pytest.mark.parametrize("name", DEMOS)
def test_forward_over_reverse_equals_double_backward(name: str) -> None:
    model = off_its_start(models.build(name, classes=3, image_size=8, **SHALLOW.get(name, {})), 0.1)
    images, targets = torch.randn(3, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2])
    weights = {key: tensor.detach() for key, tensor in model.named_parameters()}
    direction = {key: torch.randn_like(tensor) for key, tensor in weights.items()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (images,)), targets)

    with sdpa_kernel(SDPBackend.MATH):
        _, forward = torch.func.jvp(torch.func.grad(loss), (weights,), (direction,))
        inputs = list(model.parameters())
        gradient = torch.autograd.grad(loss(dict(model.named_parameters())), inputs, create_graph=True)
        backward = torch.autograd.grad(gradient, inputs, grad_outputs=list(direction.values()))
    for key, expected in zip(weights, backward, strict=True):
        torch.testing.assert_close(forward[key], expected, rtol=1e-8, atol=1e-10)


def test_initial_weights_have_the_spread_asked_for() -> None:
    for name, std in (("vit_ti", 0.02), ("vit_demo", 0.1)):
        model = models.build(name, classes=10, image_size=32, depth=1)
        for weight in (model.blocks.get_parameter("0.attention.qkv.weight"), model.position_embedding):
            assert weight.std().item() == pytest.approx(std, rel=0.05)
    convolution = models.build("resnet18", classes=10, image_size=32).get_parameter("layer1.0.conv1.weight")
    assert convolution.std().item() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.02)  # fan-out, He et al. 2015


# Stochastic depth


def test_drop_path_keeps_the_expectation_and_drops_whole_samples() -> None:
    branch = torch.rand(20_000, 2, 3, dtype=torch.float64) + 1
    dropped = drop_path(branch, 0.3, training=True)
    ratio = (dropped / branch).flatten(1)
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    torch.testing.assert_close(ratio, (ratio > 0).double() / 0.7, rtol=1e-12, atol=0)
    error = math.sqrt(0.3 / 0.7 / len(branch))  # standard deviation of the mean of kept / (1 - rate)
    assert abs(ratio[:, 0].mean().item() - 1) < 4 * error


@pytest.mark.parametrize("name", DEMOS)
def test_drop_path_acts_in_training_alone(name: str) -> None:
    plain = models.build(name, classes=10, image_size=16).eval()
    model = models.build(name, classes=10, image_size=16, drop_path=0.5)
    model.load_state_dict(plain.state_dict())
    images = torch.randn(8, 3, 16, 16)
    assert torch.equal(model.eval()(images), plain(images))
    assert drop_path(images, 0.5, training=False) is images
    assert not torch.equal(model.train()(images), model(images))


def test_every_family_has_drop_path() -> None:
    families = {type(_on_meta(name, 3, 16, **arguments)) for name, arguments in TINY.items()}
    assert families == {models.MODELS[name].func for name in models.NAMES}


@pytest.mark.parametrize("name", TINY)
def test_drop_path_is_applied_in_every_block_at_a_rate_that_rises_linearly(name: str) -> None:
    """With one block alone in training mode, and no norm, the output changes where the rate is not 0 and only there."""
    model = models.build(name, classes=3, image_size=16, drop_path=0.9, **TINY[name]).eval()
    blocks = [module for module in model.modules() if hasattr(module, "rate")]
    assert [block.rate for block in blocks] == pytest.approx([0.0, 0.45, 0.9])
    assert drop_path_rates(0.9, 1) == [0.0]
    images = torch.randn(16, 3, 16, 16)
    with torch.no_grad():
        still = model(images)
        for block in blocks:
            block.training = True  # of the block itself, not of the norms in it
            assert torch.equal(model(images), still) == (block.rate == 0)
            block.training = False


# Names and arguments


@pytest.mark.slow
def test_names_and_summaries_are_one_line_each() -> None:
    published = (
        "vit_ti vit_s vit_b localvit_ti resnet18 resnet34 resnet50 resnet101 preresnet18 preresnet50 resnext50 "
        "wideresnet50 alternet18 alternet34 alternet50 alternet101 swin_ti pit_ti pit_xs pit_s mixer_ti mixer_s "
        "vit_demo resnet_demo preresnet_demo alternet_demo"
    )
    assert set(published.split()) <= set(models.NAMES)
    assert len(set(models.NAMES)) == len(models.NAMES)
    assert models.summary("alternet50") == (
        "AlterNet, blocks 3-4-6-4, msa 0-1-1-2, bottleneck: 33.01 M parameters (32 px, 100 classes)"
    )
    assert all("\n" not in models.summary(name) for name in models.NAMES)


def test_arguments_may_come_as_words_and_lists_and_are_listed() -> None:
    def shapes(**arguments: object) -> dict[str, torch.Size]:
        model = _on_meta("alternet50", 10, 32, **arguments)
        return {name: tensor.shape for name, tensor in model.state_dict().items()}

    exact = shapes(msa=(0, 1, 3, 2), window=2, drop_path=0.1, bottleneck=False)
    assert shapes(msa="0,1,3,2", window="2", drop_path="0.1", bottleneck="false") == exact
    assert shapes(msa=[0, 1, 3, 2], window=2, bottleneck="False") == exact
    assert shapes(msa="(0, 1, 3, 2)", window=2, bottleneck=0) == exact
    assert "drop_path" in models.accepts("resnet_demo")
    assert "msa" in models.accepts("alternet18")
    assert "image_size" not in models.accepts("vit_ti")


def test_an_alternet_is_built_up_from_the_end_of_the_last_stage() -> None:
    placements = [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1, 2), (0, 1, 1, 2)]
    assert models.build_up("alternet50") == placements
    assert alternet.build_up((0, 1, 3, 2), 4) == (0, 0, 2, 2)
    counts = []
    for count, placed in enumerate(placements):
        model = _on_meta("alternet50", 100, 32, msa=placed)
        attended = [name for name, module in model.named_modules() if isinstance(module, alternet.MSABlock)]
        assert len(attended) == count
        counts.append(_count(model))
    assert counts == sorted(counts)
    assert counts[-1] == 33_012_840
    assert attended == ["layer2.3", "layer3.5", "layer4.1", "layer4.3"]
    assert "msa 0-0-0-1" in models.summary("alternet50", msa=(0, 0, 0, 1))
    with pytest.raises(ValueError, match=r"count must be 0 to the 4 MSAs of msa=\(0, 1, 1, 2\), got 5"):
        alternet.build_up((0, 1, 1, 2), 5)
    with pytest.raises(ValueError, match="vit_ti is not an AlterNet; give one of alternet18"):
        models.build_up("vit_ti")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("vit_tiny", {}, "no model is named 'vit_tiny'.*vit_ti"),
        ("", {}, "no model is named"),
        ("resnet18", {"depth": 3}, "resnet18 has no argument depth; it accepts blocks, bottleneck, width"),
        ("vit_ti", {"patch": 5}, "patch=5 does not divide images of 32 px; give one of 1, 2, 4, 8, 16, 32"),
        ("vit_ti", {"heads": 5}, "heads=5 do not share dim=192 evenly; give one of 1, 2, 3, 4"),
        ("resnet18", {"groups": 2}, "groups=2.*need bottleneck blocks"),
        ("resnet50", {"width": 8, "width_per_group": 4}, "give at least 8"),
        ("alternet50", {"window": 3}, "window=3 does not divide the 16 x 16 map; give one of 1, 2, 4, 8, 16"),
        ("alternet50", {"msa": (0, 1)}, "has 2 entries; give one per stage, 4 in all"),
        ("alternet50", {"heads": (3,)}, "has 1 entries; give one per stage, 4 in all"),
        ("alternet50", {"msa": (2, 1, 1, 2)}, "2 MSAs in stage 1 of 3 blocks; give at most 1"),
        ("swin_ti", {"window": 5}, "window=5 does not divide the 32 x 32 map; give one of 1, 2, 4, 8, 16, 32"),
        ("swin_ti", {"image_size": 20}, "a map of 20 x 20 cannot be halved 3 times"),
        ("swin_ti", {"heads": (3, 6)}, "has 2 entries; give one per stage, 4 in all"),
        ("swin_ti", {"heads": (5, 6, 12, 24)}, "do not share the 96 channels of stage 1 evenly"),
        ("mixer_ti", {"patch": 3}, "patch=3 does not divide images of 32 px; give one of 1, 2, 4"),
        ("localvit_ti", {"patch": 5}, "patch=5 does not divide images of 32 px"),
        ("pit_ti", {"heads": (2, 3, 8)}, "do not grow by whole factors"),
        ("pit_ti", {"heads": (2, 4)}, "has 2 entries; give one per stage, 3 in all"),
        ("pit_ti", {"patch": 40}, "patch=40 exceeds images of 32 px"),
        ("resnet18", {"head": "cls"}, "head must be gap, bn-gap, mlp or flat-mlp, got cls"),
        ("resnet18", {"mc_dropout": 1.0}, "mc_dropout must be a number of at least 0 and below 1, got 1.0"),
        ("localvit_ti", {"neighbourhood": 0}, "neighbourhood must be a whole number of at least 1, got 0"),
        ("localvit_ti", {"neighbourhood": "global"}, r"got global \(none is valid too\)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(name: str, arguments: dict[str, object], words: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=words) as caught:
        models.build(name, **{"classes": 10, "image_size": 32, **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_ti", {"classes": 0}), ("vit_ti", {"image_size": -32}), ("vit_ti", {"channels": "three"}),
        ("vit_ti", {"depth": 0}), ("vit_ti", {"depth": 2.5}), ("vit_ti", {"depth": True}),
        ("vit_ti", {"patch": "wide"}), ("vit_ti", {"patch": 0}), ("vit_ti", {"head": "mean"}),
        ("vit_ti", {"drop_path": 1.0}), ("vit_ti", {"drop_path": float("nan")}), ("vit_ti", {"dropout": "much"}),
        ("resnet18", {"bottleneck": "perhaps"}), ("resnet18", {"blocks": ""}), ("resnet18", {"blocks": []}),
        ("resnet18", {"blocks": (2, 0)}), ("alternet18", {"msa": (0, 1, 1, -1)}), ("alternet18", {"msa": "0,1,one,1"}),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_a_usage_error(name: str, arguments: dict[str, Any]) -> None:
    (argument,) = arguments
    with torch.device("meta"), pytest.raises(OptionError, match=f"^{argument} must be .*, got "):
        models.build(name, **{"classes": 10, "image_size": 32, **arguments})


OTHER_SIZE = "the images are 20 x 20 px, the model was built for 16 x 16"


@pytest.mark.parametrize("name", ["vit_demo", "alternet_demo", "localvit_ti", "swin_ti", "pit_ti", "mixer_ti"])
def test_images_of_another_size_are_refused(name: str) -> None:
    model = models.build(name, classes=10, image_size=16, **TINY.get(name, {}))
    with pytest.raises(ValueError, match="do not tile" if name == "alternet_demo" else OTHER_SIZE):
        model(torch.randn(2, 3, 20, 20))


@pytest.mark.slow
def test_networks_built_for_their_shapes_alone_or_recorded_do_not_import_the_compiler() -> None:
    """A checkpoint is built so first, directions record a pass; the import takes about as long as that of torch."""
    script = """
import sys, torch
from landscape import models
from landscape.subject.graph_replay import recordable
from landscape.subject.losses import _Pairs
from landscape.symmetry.networks import UnitRecorder
from landscape.weight_space.pass_recorder import PassRecorder
print("torch._dynamo" in sys.modules)
with torch.device("meta"):
    for name in ("resnet_demo", "preresnet_demo", "vit_demo"):
        assert all(p.is_meta for p in models.build(name, classes=10, image_size=32).parameters())
layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
for recorder in (PassRecorder, UnitRecorder):
    with torch.no_grad(), recorder(dict(layer.named_parameters()), x):
        layer(x)
for watched in (recordable(), _Pairs(None)):
    with watched:
        layer(x)
print("torch._dynamo" in sys.modules)
"""
    out, errors = forked.Popen(["-c", script]).communicate()
    assert out.split() == ["False", "False"], errors
