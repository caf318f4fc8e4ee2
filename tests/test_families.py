"""Local ViT, Swin, PiT, Mixer, ResNeXt and the variants of residual networks: sizes, twins of other makers, loops."""

from itertools import product
from typing import Any

import pytest
import torch
from foreign import off_its_start, torchvision_models
from torch import Tensor, nn

from landscape import models
from landscape.discovery.discover import discover
from landscape.layers.unit_removal import removals, removed
from landscape.models import swin, vit
from landscape.models.blocks import Smoothing

SMALL: dict[str, dict[str, Any]] = {
    "localvit_ti": {"dim": 12, "depth": 2},
    "swin_ti": {"dim": 12, "depths": (2, 2), "heads": (2, 4)},
    "pit_ti": {"depths": (1, 2), "heads": (1, 2), "head_dim": 8},
    "mixer_ti": {"dim": 12, "depth": 2, "token_hidden": 7, "channel_hidden": 9},
    "resnext50": {"blocks": (1, 1), "width": 16, "groups": 4, "width_per_group": 4},
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _small(name: str, image_size: int = 16, **arguments: Any) -> nn.Module:
    return models.build(name, classes=3, image_size=image_size, **{**SMALL.get(name, {}), **arguments})


def _images(size: int = 16, count: int = 2) -> Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64)


@pytest.mark.parametrize("name", SMALL)
def test_layers_are_found_and_units_removed(name: str) -> None:
    model, images = off_its_start(_small(name)), _images()
    kinds = {layer.kind for layer in discover(model, images)} - {"stem", "subsample"}
    wanted = {"resnext50": {"conv"}, "mixer_ti": {"mlp"}}
    assert kinds == wanted.get(name, {"msa", "mlp"})
    units = removals(model, discover(model, images))
    assert len(units) == {"resnext50": 2, "mixer_ti": 4, "localvit_ti": 4, "swin_ti": 8, "pit_ti": 6}[name]
    with torch.inference_mode():
        whole = model(images)
        for unit in units:
            with removed(model, unit):
                assert not torch.allclose(model(images), whole)


# Residual networks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block", "sizes"),
    [
        ("resnet18", "BasicBlock", {}), ("resnet50", "Bottleneck", {}),
        ("resnet50", "Bottleneck", {"groups": 4, "width_per_group": 16}),
        ("resnet50", "Bottleneck", {"groups": 1, "width_per_group": 128}),
    ],
    ids=["basic", "bottleneck", "as resnext", "as wide resnet"],
)  # fmt: skip
def test_torchvision_weights_give_torchvision_logits(name: str, block: str, sizes: dict[str, int]) -> None:
    theirs = torchvision_models().resnet
    twin = off_its_start(theirs.ResNet(getattr(theirs, block), [1, 1, 1, 1], num_classes=3, **sizes))
    ours = _small(name, 96, blocks=(1, 1, 1, 1), **sizes).double().eval()
    ours.load_state_dict(twin.state_dict())
    with torch.no_grad():
        images = _images(96)
        torch.testing.assert_close(ours(images), twin(images))


def test_smoothing_is_its_definition_at_every_position() -> None:
    x = 20 * _images(5)
    found = Smoothing()(x)
    bounded = (10 * torch.tanh(x / 10)).clamp(min=0)
    assert found.shape == x.shape
    for row, column in product(range(5), range(5)):
        below, right = min(row + 1, 4), min(column + 1, 4)
        corners = [bounded[..., r, c] for r in (row, below) for c in (column, right)]
        torch.testing.assert_close(found[..., row, column], torch.stack(corners).mean(0))
    assert list(Smoothing().parameters()) == []
    assert found.max() <= 10


@pytest.mark.parametrize("name", ["resnet_demo", "preresnet_demo", "alternet_demo"])
def test_smoothing_ends_every_stage_and_changes_no_parameter(name: str) -> None:
    plain, smooth = _small(name), _small(name, smoothing=True)
    assert plain.state_dict().keys() == smooth.state_dict().keys()
    for stage in ("layer1", "layer2", "layer3"):
        assert isinstance(list(smooth.get_submodule(stage).children())[-1], Smoothing)
    assert sum(isinstance(module, Smoothing) for module in smooth.modules()) == 3


@pytest.mark.parametrize("name", ["resnet_demo", "preresnet_demo", "resnet50", "preresnet50", "alternet_demo"])
def test_dropout_is_on_at_test_time_before_the_last_convolution_and_averages_probabilities(name: str) -> None:
    sizes: dict[str, Any] = {"blocks": (1, 1), "width": 8}
    if name == "alternet_demo":
        sizes |= {"blocks": (1, 2), "msa": (0, 1), "heads": (1, 2)}
    model = _small(name, 8, **sizes, mc_dropout=0.3).eval()
    images = torch.randn(2, 3, 8, 8)
    last = "conv3" if name.endswith("50") else "conv2"
    shares: list[float] = []
    model.get_submodule(f"layer1.0.{last}").register_forward_pre_hook(
        lambda module, args: shares.append((args[0] == 0).double().mean().item())
    )
    assert not torch.equal(model(images), model(images))
    plain = _small(name, 8, **sizes).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(images), plain(images))
    zeros: list[float] = []
    plain.get_submodule(f"layer1.0.{last}").register_forward_pre_hook(
        lambda module, args: zeros.append((args[0] == 0).double().mean().item())
    )
    plain(images)
    expected = zeros[0] + 0.3 * (1 - zeros[0])
    assert shares[0] == pytest.approx(expected, abs=4 * (0.21 / (2 * 8 * 64)) ** 0.5)


def test_heads_of_a_residual_network() -> None:
    images = _images(8)
    for head in ("gap", "bn-gap", "mlp"):
        model = off_its_start(_small("resnet_demo", 8, head=head))
        kept: list[Tensor] = []
        model.get_submodule("layer3").register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
        with torch.no_grad():
            logits = model(images)
            x = kept[0]
            if head == "bn-gap":
                norm = model.get_submodule("pool.0")
                scale = norm.weight / (norm.running_var + norm.eps).sqrt()
                x = ((x - norm.running_mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]).relu()
            x = x.mean((2, 3))
            if head == "mlp":
                hidden = model.get_submodule("pool.1")
                x = (x @ hidden.get_parameter("weight").T + hidden.get_parameter("bias")).relu()
            fc = model.get_submodule("fc")
            torch.testing.assert_close(logits, x @ fc.get_parameter("weight").T + fc.get_parameter("bias"))


def test_the_mlp_head_of_blurs_takes_every_position_of_the_map() -> None:
    """The reference's sizes: 7 x 7 positions of 512 channels, two hidden layers of 4096, dropout 0.5."""
    with torch.device("meta"):
        whole = models.build("resnet18", classes=10, image_size=32, head="flat-mlp")
    shapes = [tuple(whole.get_parameter(name).shape) for name in ("pool.2.weight", "pool.5.weight", "fc.weight")]
    assert shapes == [(4096, 25088), (4096, 4096), (10, 4096)]
    model = off_its_start(_small("resnet_demo", 8, head="flat-mlp")).eval()
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5, 0.5]
    maps = torch.randn(2, 64, 7, 7, dtype=torch.float64)
    head, fc = model.get_submodule("pool"), model.get_submodule("fc")
    w1, b1, w2, b2 = (head.get_parameter(name) for name in ("2.weight", "2.bias", "5.weight", "5.bias"))
    hidden = ((maps.flatten(1) @ w1.T + b1).relu() @ w2.T + b2).relu()
    torch.testing.assert_close(fc(head(maps)), fc(hidden))
    assert not torch.allclose(head(maps), head(maps.flip(-1)))  # as it would after an average


# Local attention


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_a_neighbourhood_is_k_by_k_cut_at_the_borders(k: int, grid: tuple[int, int]) -> None:
    mask = vit.neighbours(grid, k)
    places = list(product(range(grid[0]), range(grid[1])))
    up, down = (k - 1) // 2, k // 2
    for q, k_ in product(range(len(places)), range(len(places))):
        offsets = [places[k_][axis] - places[q][axis] for axis in (0, 1)]
        assert mask[q, k_] == all(-up <= offset <= down for offset in offsets)
    inner = [q for q, place in enumerate(places) if all(up <= p < n - down for p, n in zip(place, grid, strict=True))]
    assert all(mask[q].sum() == k * k for q in inner)


def test_a_full_neighbourhood_is_global_attention_and_a_small_one_is_not() -> None:
    whole = off_its_start(_small("localvit_ti", neighbourhood="none"))
    images = _images()
    for k, equal in ((7, True), (9, True), (5, False)):  # a grid of 4 x 4: offsets up to 3
        model = _small("localvit_ti", neighbourhood=k).double().eval()
        model.load_state_dict(whole.state_dict())
        with torch.no_grad():
            assert torch.allclose(model(images), whole(images), rtol=1e-10, atol=1e-12) == equal


def test_a_token_is_moved_by_its_neighbours_alone() -> None:
    model = off_its_start(_small("localvit_ti", 32, neighbourhood=3, depth=1))
    grid, kept = 8, []
    model.get_submodule("blocks.0").register_forward_hook(lambda module, args, output: kept.append(output))
    images = _images(32, 1)
    moved = images.clone()
    moved[..., 12:16, 20:24] += 1  # the patch of row 3, column 5
    with torch.no_grad():
        model(images), model(moved)
    changed = (kept[0] - kept[1]).abs().amax((0, 2)).reshape(grid, grid) > 1e-9
    assert changed.nonzero().tolist() == [[row, column] for row in (2, 3, 4) for column in (4, 5, 6)]


# Swin


@pytest.mark.parametrize(("side", "window"), [(8, 4), (12, 4), (16, 4), (9, 3), (20, 5)])
def test_shifted_windows_see_what_they_held_before_the_roll(side: int, window: int) -> None:
    shift = window // 2
    mask = swin.shift_mask(side, window, shift)[:, 0]
    before = (torch.arange(side) + shift) % side  # the row that lies there after the roll
    count = side // window
    for n, (q, k) in product(range(count**2), product(range(window**2), repeat=2)):
        held = []
        for place in (q, k):
            row, column = (n // count) * window + place // window, (n % count) * window + place % window
            held.append([(before[at].item() - shift) // window for at in (row, column)])  # -1: above, left of the first
        assert mask[n, q, k] == (held[0] == held[1])


def _swin_weights(theirs: nn.Module) -> dict[str, Tensor]:
    """torchvision's weights under our names."""
    found = {}
    renamed = {"features.0.0": "patch_embedding", "features.0.2": "patch_norm", "norm": "norm", "head": "head"}
    for key, tensor in theirs.state_dict().items():
        if "relative_position_index" in key:
            continue
        module, _, leaf = key.rpartition(".")
        if module in renamed:
            found[f"{renamed[module]}.{leaf}"] = tensor
            continue
        _, number, *rest = key.split(".")
        stage = int(number) // 2
        if int(number) % 2 == 0:  # a merging of their own; ours begins the stage
            found[f"stages.{stage}.0.{'.'.join(rest)}"] = tensor
            continue
        block = int(rest[0]) + (stage > 0)
        name = ".".join(rest[1:])
        for old, new in (("attn.", "attention."), ("proj.", "projection."), ("mlp.3", "mlp.2")):
            name = name.replace(old, new)
        if name.endswith("relative_position_bias_table"):
            name, tensor = "attention.relative_position", tensor.flip(0)  # theirs is by query - key
        found[f"stages.{stage}.{block}.{name}"] = tensor
    return found


@pytest.mark.slow
def test_torchvision_swin_weights_give_its_logits() -> None:
    theirs = torchvision_models().swin_transformer.SwinTransformer(
        patch_size=[2, 2], embed_dim=12, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=3
    )
    off_its_start(theirs)
    ours = _small("swin_ti", 32, patch=2, window=4, qkv_bias=True).double().eval()  # four windows a side, then two
    ours.load_state_dict(_swin_weights(theirs))
    images = _images(32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-9, atol=1e-9)


# Mixer and PiT


def test_mixer_equals_its_definition() -> None:
    model = off_its_start(_small("mixer_ti", 8, patch=2))
    images, weights = _images(8), dict(model.named_parameters())

    def layer(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def mlp(x: Tensor, name: str) -> Tensor:
        hidden = layer(x, f"{name}.0")
        return layer(hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5)), f"{name}.2")

    with torch.no_grad():
        patches = images.reshape(2, 3, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 16, 12)
        x = patches @ weights["patch_embedding.weight"].flatten(1).T + weights["patch_embedding.bias"]
        for i in range(2):
            x = x + mlp(norm(x, f"blocks.{i}.norm1").mT, f"blocks.{i}.tokens").mT
            x = x + mlp(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp")
        torch.testing.assert_close(model(images), layer(norm(x, "norm").mean(1), "head"))


def _timm() -> Any:
    torchvision_models()
    return pytest.importorskip("timm", exc_type=ImportError)


def _renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for key, tensor in state.items():
        for theirs, ours in names.items():
            key = key.replace(theirs, ours)
        found[key] = tensor
    return found


@pytest.mark.slow
def test_timm_mixer_weights_give_its_logits() -> None:
    _timm()
    from timm.models.mlp_mixer import MlpMixer

    theirs = off_its_start(
        MlpMixer(num_classes=3, img_size=16, patch_size=4, num_blocks=2, embed_dim=16, mlp_ratio=(0.5, 2.0))
    )
    ours = _small("mixer_ti", patch=4, dim=16, token_hidden=8, channel_hidden=32).double().eval()
    names = {"stem.proj": "patch_embedding", "mlp_tokens": "tokens", "mlp_channels": "mlp", "fc1": "0", "fc2": "2"}
    ours.load_state_dict(_renamed(theirs.state_dict(), names))
    images = _images()
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.slow
def test_timm_pit_weights_give_its_logits() -> None:
    _timm()
    from timm.models.pit import PoolingVisionTransformer

    theirs = PoolingVisionTransformer(
        img_size=16, patch_size=4, stride=2, stem_type="overlap", base_dims=(8, 8, 8), depth=(1, 2, 1), heads=(1, 2, 4),
        mlp_ratio=4, num_classes=3,
    )  # fmt: skip
    off_its_start(theirs)
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():
            if name.endswith("qkv.bias"):
                tensor.zero_()  # ours has none
    state = theirs.state_dict()
    ours = _small("pit_ti", depths=(1, 2, 1), heads=(1, 2, 4), head_dim=8, patch=4).double().eval()
    for module in ours.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    positions = state.pop("pos_embed").flatten(2).mT
    names = {
        "patch_embed.conv": "patch_embedding", "attn.": "attention.", "proj.": "projection.", "fc1": "0", "fc2": "3",
    }  # fmt: skip
    found: dict[str, Tensor] = {"position_embedding": torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)}
    for key, tensor in _renamed({k: v for k, v in state.items() if "qkv.bias" not in k}, names).items():
        part, *place = key.split(".")
        if part != "transformers":
            found[key] = tensor
        elif place[1] == "pool":
            found[f"pools.{int(place[0]) - 1}.{'cls' if place[2] == 'fc' else 'conv'}.{place[3]}"] = tensor
        else:
            found[".".join(["stages", place[0], *place[2:]])] = tensor
    ours.load_state_dict(found)
    images = _images()
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))
