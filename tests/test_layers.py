"""Discovered layers of known networks; their taps deliver the tensors of a forward pass written out."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from analytic import run_probe
from foreign import Encoder, Functional, Plain, Reshaped, Squeeze, residual_stream, torchvision_models, vit_stream
from torch import Tensor, nn
from torch.nn import functional

from landscape import models
from landscape.discovery.discover import discover
from landscape.discovery.layer import Layer, Tap
from landscape.layers.forward_hooks import feature_hooks
from landscape.layers.selection import layer_labels, remarks, select_layers, spatial_layers
from landscape.models.vit import ViT
from landscape.probe import NotApplicable
from landscape.probes.lesion import Lesion
from landscape.subject.subject import Subject

Row = tuple[str, str, int, bool, tuple[int, int]]  # name, kind, stage, reduces, grid


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _demo(name: str, size: int = 16, **arguments: Any) -> nn.Module:
    return models.build(name, classes=10, image_size=size, **arguments).eval()


def _images(*shape: int) -> Tensor:
    return torch.randn(3, 3, *(shape or (16, 16)))


def _rows(layers: list[Layer]) -> list[Row]:
    return [(layer.name, layer.kind, layer.stage, layer.reduces, layer.grid) for layer in layers]


def _blocks(side: int, blocks: tuple[int, ...], attention: tuple[str, ...] = ()) -> Iterator[Row]:
    """The residual blocks of our residual networks, each stage after the first at half the side."""
    for stage, count in enumerate(blocks, start=1):
        side = side if stage == 1 else -(-side // 2)
        for block in range(count):
            name = f"layer{stage}.{block}"
            is_attention = name in attention
            kind = "msa" if is_attention else "conv"
            yield f"{name}.attention" if is_attention else name, kind, stage, stage > 1 and block == 0, (side, side)


RESIDUAL: dict[str, tuple[Callable[[], nn.Module], int, list[Row]]] = {
    "resnet_demo": (lambda: _demo("resnet_demo"), 16, [*_blocks(16, (2, 2, 2))]),
    "preresnet_demo": (lambda: _demo("preresnet_demo"), 16, [*_blocks(16, (2, 2, 2))]),
    "alternet_demo": (
        lambda: _demo("alternet_demo"), 16, [*_blocks(16, (2, 2, 2), ("layer2.1", "layer3.1"))]
    ),
    "resnet50": (lambda: _demo("resnet50", 32, width=8), 32, [*_blocks(32, (3, 4, 6, 3))]),
    "preresnet50": (lambda: _demo("preresnet50", 32, width=8), 32, [*_blocks(32, (3, 4, 6, 3))]),
    "odd maps": (lambda: _demo("resnet_demo", 17), 17, [*_blocks(17, (2, 2, 2))]),
}  # fmt: skip


@pytest.mark.parametrize("name", RESIDUAL)
def test_a_residual_network_for_small_images_has_a_stem_and_a_layer_per_block(name: str) -> None:
    build, side, expected = RESIDUAL[name]
    assert _rows(discover(build(), _images(side, side))) == [("conv1", "stem", 0, False, (side, side)), *expected]


@pytest.mark.parametrize("maker", ["ours", pytest.param("torchvision", marks=pytest.mark.slow)])
def test_a_stem_with_pooling_has_a_layer_before_and_one_after_it(maker: str) -> None:
    model = _demo("resnet18", 96, width=8) if maker == "ours" else torchvision_models().resnet18().eval()
    layers = discover(model, _images(96, 96))
    stem = [("conv1", "stem", 0, False, (48, 48)), ("maxpool", "subsample", 0, True, (24, 24))]
    assert _rows(layers) == [*stem, *_blocks(24, (2, 2, 2, 2))]


class Skip(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x).relu()


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean((2, 3), keepdim=True)).sigmoid()


def test_a_smaller_map_is_named_by_what_makes_it_smaller_and_not_by_a_gate_before_it() -> None:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    stages = (Skip(4), Gate(4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 3, stride=2, padding=1), Skip(8))
    found = discover(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *stages, *head).eval(), _images(8, 8))
    assert [(layer.name, layer.kind, layer.grid) for layer in found] == [
        ("0", "stem", (8, 8)), ("1.conv", "conv", (8, 8)), ("4", "subsample", (4, 4)), ("5.conv", "conv", (4, 4)),
    ]  # fmt: skip
    two = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))  # without a skip
    stages = (Skip(4), nn.Conv2d(4, 8, 3, stride=2, padding=1), two, Skip(8))
    found = discover(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *stages, *head).eval(), _images(8, 8))
    assert _rows(found)[1:] == [
        ("1.conv", "conv", 1, False, (8, 8)), ("3", "conv", 2, True, (4, 4)), ("4.conv", "conv", 2, False, (4, 4)),
    ]  # fmt: skip
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Gate(4), nn.Conv2d(4, 4, 8), nn.Conv2d(4, 4, 1), nn.Flatten())
    found = discover(plain.append(nn.Linear(4, 3)).eval(), _images(8, 8))  # without skips, maps of one position at last
    assert [layer.name for layer in found] == ["0", "2", "3"]
    assert [layer.grid for layer in found] == [(8, 8), (1, 1), (1, 1)]


class Mixer(nn.Module):
    """A branch that mixes positions without a softmax: by a pooling, or by sums of keys times values."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.way, self.qkv, self.pool = way, nn.Conv2d(width, 3 * width, 1), nn.AvgPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "pool":
            return self.pool(x) - x  # type: ignore[no-any-return]
        queries, keys, values = self.qkv(x).flatten(2).mT.relu().chunk(3, dim=-1)
        if self.way == "one query":
            found = (queries.mean(1, keepdim=True) @ keys.mT).softmax(-1) @ values
            return found.mT[..., None].expand_as(x)  # type: ignore[no-any-return]
        return (queries @ (keys.mT @ values)).mT.reshape(x.shape)


class Mixed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.norm, self.mixer = nn.BatchNorm2d(4), Mixer(4, way)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("way", "kind"), [("pool", "other"), ("linear", "msa"), ("one query", "msa")])
def test_what_mixes_positions_without_pairs_of_them_is_a_layer(way: str, kind: str) -> None:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    found = discover(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Mixed(way), Skip(4), *head).eval(), _images(8, 8))
    assert [(layer.name, layer.kind, layer.grid) for layer in found[1:]] == [
        ("1.mixer", kind, (8, 8)), ("2.conv", "conv", (8, 8)),
    ]  # fmt: skip
    attention = found[1].attention
    assert (attention is not None and "no pairs of queries and keys" in attention.reason) == (way == "linear")


@pytest.mark.parametrize(
    ("arguments", "size", "grid", "prefix"),
    [
        ({}, 16, (8, 8), 1),
        ({"head": "gap"}, 16, (8, 8), 0),
        ({"patch": 1}, 4, (4, 4), 1),
        ({"dim": 64, "heads": 4}, 16, (8, 8), 1),  # as many channels as patches
        ({"dim": 192, "heads": 3, "patch": 16}, 224, (14, 14), 1),  # nearly as many: 3 x 64 heads are no grid
    ],
)
def test_a_vision_transformer_has_two_layers_per_block_on_its_own_grid(
    arguments: dict[str, Any], size: int, grid: tuple[int, int], prefix: int
) -> None:
    layers = discover(_demo("vit_demo", size, depth=2, **arguments), _images(size, size))
    blocks = [(f"blocks.{i}.{part}", kind) for i in (0, 1) for part, kind in (("attention", "msa"), ("mlp", "mlp"))]
    assert _rows(layers) == [("patch_embedding", "stem", 0, False, grid), *((*b, 1, False, grid) for b in blocks)]
    assert {layer.prefix for layer in layers} == {prefix}


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_torch_encoder_layers_oblong_grids_and_register_tokens(norm_first: bool, prefix: int) -> None:
    layers = discover(Encoder(norm_first=norm_first, prefix=prefix).eval(), _images(16, 8))
    blocks = [
        (f"encoder.layers.{i}.{part}", kind)
        for i in (0, 1)
        for part, kind in (("self_attn", "msa"), ("linear2", "mlp"))
    ]
    assert _rows(layers) == [("embed", "stem", 0, False, (4, 2)), *((*b, 1, False, (4, 2)) for b in blocks)]
    assert {layer.prefix for layer in layers} == {prefix}


def test_patches_cut_by_reshaping_keep_their_grid() -> None:
    layers = discover(Reshaped().eval(), _images(16, 8))
    assert _rows(layers) == [("embed", "stem", 0, False, (8, 2)), ("projection", "msa", 1, False, (8, 2))]


class _Sum(nn.Module):
    """The end of an attention or MLP of BERT: it reads the branch first, and adds what came before the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, branch: Tensor, stream: Tensor) -> Tensor:
        return self.norm(self.dense(branch) + stream)  # type: ignore[no-any-return]


class _SumInModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.sum = nn.Linear(3, 8), nn.Linear(8, 8), _Sum()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        return self.sum(self.inner(x).relu(), x)  # type: ignore[no-any-return]


def test_the_stem_ends_before_a_branch_that_the_adding_module_reads() -> None:
    assert discover(_SumInModule(), torch.randn(2, 5, 3))[0].tap == Tap("embedding", "output")


def test_depth_runs_from_zero_to_one_and_labels_say_the_same() -> None:
    layers = discover(_demo("alternet_demo"), _images())
    np.testing.assert_allclose([layer.depth for layer in layers], np.arange(7) / 6)
    said = layer_labels(layers, "layer")
    assert said["name"][1].tolist() == [layer.name for layer in layers]
    assert said["reduces"][1].tolist() == [0, 0, 0, 1, 0, 1, 0]
    assert {quantity.dims for quantity, _ in said.values()} == {("layer",)}


# What the taps deliver


def _features(model: nn.Module, layers: list[Layer], images: Tensor) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    with torch.inference_mode(), feature_hooks(model, layers, found.__setitem__):
        model(images)
    return [found[position] for position in range(len(layers))]


def _stream_of_encoder(model: Encoder, images: Tensor, *, norm_first: bool) -> Iterator[Tensor]:
    x = model.embed(images).flatten(2).transpose(1, 2) + model.positions
    x = torch.cat([model.prefix.expand(len(x), -1, -1), x], dim=1)
    yield x
    for layer in model.encoder.layers:
        y = layer.norm1(x) if norm_first else x
        x = x + layer.self_attn(y, y, y, need_weights=False)[0]
        yield x
        x = x if norm_first else layer.norm1(x)
        y = layer.norm2(x) if norm_first else x
        x = x + layer.linear2(torch.relu(layer.linear1(y)))
        last = x if norm_first else layer.norm2(x)
        yield last  # a block that ends in a norm is heard at its output
        x = last


STREAMS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    **{name: partial(lambda name: (_demo(name), _images()), name) for name in (
        "vit_demo", "resnet_demo", "preresnet_demo", "alternet_demo")},
    "preresnet50": lambda: (_demo("preresnet50", width=8), _images()),
    "before and after the pooling of a stem": lambda: (_demo("resnet18", 96, width=8), _images(96, 96)),
    "fused encoder": lambda: (Encoder().eval(), _images(16, 8)),
    "fused encoder, norm last": lambda: (Encoder(norm_first=False).eval(), _images(16, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_taps_deliver_the_residual_stream(name: str) -> None:
    model, images = STREAMS[name]()
    with torch.inference_mode():
        if isinstance(model, Encoder):
            expected = list(_stream_of_encoder(model, images, norm_first="last" not in name))
        else:
            expected = list((vit_stream if isinstance(model, ViT) else residual_stream)(model, images))
    for found, value in zip(_features(model, discover(model, images), images), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-5)


def test_tokens_become_maps_row_by_row_without_their_prefix_as_do_channels_that_are_last() -> None:
    model, images = Encoder(prefix=3).eval(), _images(16, 8)
    stem = discover(model, images)[0]
    with torch.no_grad():
        positions = model.positions.transpose(1, 2).reshape(1, 12, 4, 2)
        torch.testing.assert_close(stem.maps(_features(model, [stem], images)[0]), model.embed(images) + positions)
    layer = Layer("", "mlp", 1, 0.0, False, Tap("", "output"), (4, 5, 6), "channels last", (4, 5))
    x = torch.randn(2, 4, 5, 6)
    assert torch.equal(layer.maps(x), x.permute(0, 3, 1, 2))


# Layers named by patterns, and errors


def test_layers_can_be_named_without_a_residual_stream() -> None:
    assert _rows(select_layers(Plain().eval(), _images(), ["first:conv", "^pool$", "head"])) == [
        ("first", "conv", 1, False, (16, 16)),
        ("pool", "subsample", 2, True, (8, 8)),
        ("head", "other", 2, False, (0, 0)),
    ]


def test_a_sum_that_no_module_reads_or_returns_is_heard_at_the_addition_and_its_branch_can_be_removed() -> None:
    model, images = Functional().eval(), _images()
    layers = discover(model, images)
    assert _rows(layers) == [("stem", "stem", 0, False, (16, 16)), ("branch", "conv", 1, False, (16, 16))]
    with torch.inference_mode():
        stem = model.stem(images)
        torch.testing.assert_close(_features(model, layers, images), [stem, stem + model.branch(stem).relu()])
        intact, without = (
            functional.cross_entropy(model.head(x.mean((2, 3))), torch.arange(3))
            for x in (stem + model.branch(stem).relu(), stem)
        )
    found = run_probe(Lesion(layers=("branch",)), Subject(model, [(images, torch.arange(3))]))
    assert found["loss_increase"][0] == pytest.approx((without - intact).item(), abs=1e-6)


class Experts(nn.Module):
    """A feed-forward network of which a softmax chooses a part for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(8, 3), nn.Linear(8, 3 * 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares = self.router(tokens).softmax(dim=-1)
        hidden = functional.gelu(self.up(tokens))
        return self.down((hidden.unflatten(1, (3, 4)) * shares[..., None]).sum(dim=1)).view_as(x)


def test_a_softmax_that_chooses_experts_is_no_attention() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.experts = nn.Embedding(7, 8), nn.LayerNorm(8), Experts()
            self.final, self.head = nn.LayerNorm(8), nn.Linear(8, 7)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(self.final(x + self.experts(self.norm(x))))  # type: ignore[no-any-return]

    layers = discover(Network().eval(), torch.randint(7, (2, 5)))
    assert [(layer.name, layer.kind) for layer in layers[1:]] == [("experts", "mlp")]


def test_heads_that_are_computed_one_after_the_other_are_noted() -> None:
    class Heads(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.heads, self.out = nn.ModuleList(nn.Linear(8, 24) for _ in range(count)), nn.Linear(8 * count, 8)

        def forward(self, x: Tensor) -> Tensor:
            parts = (head(x).chunk(3, dim=-1) for head in self.heads)
            mixed = [(q @ k.transpose(-2, -1)).softmax(dim=-1) @ v for q, k, v in parts]
            return self.out(torch.cat(mixed, dim=-1))  # type: ignore[no-any-return]

    class Network(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.patches, self.attention, self.head = nn.Conv2d(3, 8, 4, 4), Heads(count), nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2)
            return self.head((x + self.attention(x)).mean(dim=1))  # type: ignore[no-any-return]

    notes = [remarks(discover(Network(count).eval(), _images())) for count in (1, 2)]
    assert notes[0] == []
    assert "attention calls attention 2 times (1 layers)" in notes[1][0]


def test_named_layers_come_in_order_of_execution_with_the_kinds_that_are_known() -> None:
    model, images = _demo("alternet_demo"), _images()
    found = select_layers(model, images, [r"^layer3\.1\.attention$", r"^layer2\.1$:msa", r"^layer1\.0$", "^conv1$"])
    assert _rows(found) == [
        ("conv1", "stem", 0, False, (16, 16)),
        ("layer1.0", "conv", 1, False, (16, 16)),
        ("layer2.1", "msa", 2, True, (8, 8)),
        ("layer3.1.attention", "msa", 3, True, (4, 4)),
    ]
    assert {layer.tap.side for layer in found} == {"output"}
    torch.testing.assert_close(_features(model, found, images)[1], list(residual_stream(model, images))[1])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layr1", "no module; similar names are .*layer1"),
        ("(", "not a regular expression"),
        ("fc:con", "no mod"),
        ("zzz", r"no module; its modules are \S+, \S+, \S+, \S+, \S+ and \d+ more$"),
    ],
)
def test_patterns_that_match_nothing_are_errors(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--layers .*{message}"):
        select_layers(_demo("resnet_demo"), _images(), [pattern])
    with pytest.raises(
        ValueError, match="no module with a name|not a regular" if pattern != "fc:con" else "with a name"
    ):
        select_layers(nn.Linear(4, 2), torch.zeros(2, 4), [pattern])


def test_a_network_without_maps_is_an_error_where_maps_are_needed() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).eval()
    subject = Subject(model, [(torch.randn(2, 3, 2, 2), torch.tensor([0, 1]))])
    with pytest.raises(NotApplicable, match="needs a vision network"):
        spatial_layers(subject, ("1",))


def test_discovery_and_hooks_restore_the_model() -> None:
    model, images = Squeeze(), _images()
    model.norm1.eval()  # one frozen norm in a model that is being trained
    modes, random = [module.training for module in model.modules()], torch.random.get_rng_state()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = discover(model, images)
    with pytest.raises(ZeroDivisionError), feature_hooks(model, layers, lambda position, tensor: 1 // 0):  # type: ignore[arg-type]
        model(images)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.load_state_dict(kept)
    discover(model, images)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)


READING = {
    "detach": lambda output: output.detach(),
    "statistics": lambda output: output.abs().mean((2, 3)) @ torch.ones(output.shape[1], 2),
    "copy": lambda output: output.clone().add_(1),
}


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_the_user_that_only_read_move_no_layer(reading: str, before: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).eval()  # fmt: skip
    images = torch.randn(2, 3, 6, 6)
    plain, kept = discover(model, images), []
    for module in (model[0], model[1], model[2], model[3]):
        if before:
            module.register_forward_pre_hook(lambda _, args: kept.append(READING[reading](args[0])))
        else:
            module.register_forward_hook(lambda _, args, output: kept.append(READING[reading](output)))
    assert discover(model, images) == plain
    assert kept
