"""Layers of networks that are built as those of the papers' own code are."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import run_probe
from torch import Tensor, nn

from landscape.discovery.discover import discover
from landscape.layers.selection import select_layers
from landscape.probes.attention import Attention as AttentionProbe
from landscape.subject.subject import Subject


class Attention(nn.Module):
    """Explicit attention with a stream of tokens, as in lucidrains' vit-pytorch."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.to_qkv, self.to_out = heads, nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        attention = (torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", attention, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(dim), Attention(dim, heads), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm1(x)) + x
        return self.ff(self.norm2(x)) + x


class Unfolded(nn.Module):
    """Patches cut by unfolding, which may overlap, and a class token."""

    def __init__(self, dim: int, patch: int, stride: int) -> None:
        super().__init__()
        self.unfold, self.linear = nn.Unfold(patch, stride=stride), nn.Linear(3 * patch**2, dim)
        self.token = nn.Parameter(torch.randn(1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.linear(self.unfold(x).transpose(1, 2))
        return torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1)


class Pool(nn.Module):
    """Between the stages of a PiT: a strided depthwise convolution of the map, a linear layer for the class token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.token, self.conv = nn.Linear(dim, 2 * dim), nn.Conv2d(dim, 2 * dim, 3, 2, 1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        token, tokens = x[:, :1], x[:, 1:]
        side = int(tokens.shape[1] ** 0.5)
        maps = self.conv(tokens.transpose(1, 2).unflatten(2, (side, side)))
        return torch.cat([self.token(token), maps.flatten(2).transpose(1, 2)], dim=1)


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def pit(patch: int, stride: int) -> nn.Module:
    blocks = [Transformer(8, 2), Pool(8), Transformer(16, 2), Transformer(16, 2)]
    return nn.Sequential(Unfolded(8, patch, stride), *blocks, First(), nn.LayerNorm(16), nn.Linear(16, 5))


@pytest.mark.parametrize(("patch", "stride"), [(4, 4), (5, 3)])
def test_tokens_of_unfolded_patches_have_a_grid(patch: int, stride: int) -> None:
    layers = discover(pit(patch, stride), torch.randn(2, 3, 32, 32))
    side = (32 - patch) // stride + 1
    half = -(-side // 2)
    assert [layer.kind for layer in layers] == ["stem", "msa", "mlp", "subsample", "msa", "mlp", "msa", "mlp"]
    assert [layer.grid for layer in layers] == [(side, side)] * 3 + [(half, half)] * 5
    assert {layer.prefix for layer in layers} == {1}
    assert all(layer.attention is None or layer.attention.grid == layer.grid for layer in layers)


class Bottleneck(nn.Module):
    """An inverted residual block, with a skip where its shapes allow one."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.skip, hidden = stride == 1 and before == after, 2 * before
        self.conv1 = nn.Sequential(nn.Conv2d(before, hidden, 1), nn.BatchNorm2d(hidden), nn.ReLU6())
        depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden)
        self.conv2 = nn.Sequential(depthwise, nn.BatchNorm2d(hidden), nn.ReLU6())
        self.conv3 = nn.Sequential(nn.Conv2d(hidden, after, 1), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv3(self.conv2(self.conv1(x)))
        return branch + x if self.skip else branch


class MobileNet(nn.Module):
    def __init__(self, last: int = 16) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6())
        blocks = [Bottleneck(8, 8, 1), Bottleneck(8, 12, 2), Bottleneck(12, 12, 1), Bottleneck(12, last, 1)]
        head = nn.Sequential(nn.Conv2d(last, 32, 1), nn.BatchNorm2d(32), nn.ReLU6())
        self.features, self.classifier = nn.Sequential(stem, *blocks, head), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


def test_the_last_block_of_a_mobilenet_is_a_layer_without_a_skip() -> None:
    layers = discover(MobileNet(), torch.randn(2, 3, 16, 16))
    assert [layer.name for layer in layers] == [
        "features.0.0", "features.1", "features.2", "features.3", "features.4",
    ]  # fmt: skip
    assert [layer.kind for layer in layers[1:]] == ["conv"] * 4
    assert [layer.grid for layer in layers] == [(8, 8)] * 2 + [(4, 4)] * 3


def test_the_head_of_a_network_for_pixels_is_no_layer() -> None:
    class Pixels(MobileNet):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Conv2d(32, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(self.head(self.features(x)), x.shape[2:])

    assert [layer.name for layer in discover(Pixels(), torch.randn(2, 3, 16, 16))][-1] == "features.4"


class Vgg(nn.Sequential):
    """No residual block; a blur as of a smoothing block between its stages."""

    def __init__(self) -> None:
        stages = (
            (nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(2))
            for inputs in (3, 8)
        )
        super().__init__(*(layer for stage in stages for layer in stage), nn.Flatten(), nn.Linear(128, 5))


class Committee(nn.Module):
    """Members averaged in some way; or their features joined by one classifier, which is one network."""

    def __init__(self, joined: str, *members: nn.Module) -> None:
        super().__init__()
        self.joined, self.members, self.head = joined, nn.ModuleList(members), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = [member(x) for member in self.members]
        if self.joined == "sum":
            return sum(found[1:], found[0]) / len(found)
        if self.joined == "probabilities":  # as of a deep ensemble
            return torch.stack([logits.log_softmax(dim=-1) for logits in found]).logsumexp(dim=0)
        return self.head(torch.cat(found, dim=1)) if self.joined == "head" else torch.stack(found).mean(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("joined", "members"),
    [("sum", (Vgg, Vgg, Vgg)), ("stack", (Vgg, MobileNet)), ("probabilities", (MobileNet, partial(MobileNet, 20)))],
)
def test_networks_side_by_side_have_a_depth_axis_each_and_are_measured_one_at_a_time(
    joined: str, members: tuple[Callable[[], nn.Module], ...]
) -> None:
    images = torch.randn(2, 3, 16, 16)
    ensemble = Committee(joined, *(member() for member in members)).eval()
    layers = discover(ensemble, images)
    for i, member in enumerate(members):
        for expected in discover(member(), images):
            layer = layers.pop(0)
            assert layer.name == f"members.{i}.{expected.name}"
            assert (layer.kind, layer.stage, layer.depth) == (expected.kind, expected.stage, expected.depth)
            assert (layer.reduces, layer.grid) == (expected.reduces, expected.grid)
    assert not layers
    said = rf"holds {len(members)} networks side by side.*--layers '\^members\\\.0\\\.\.\*:stream'$"
    with pytest.raises(ValueError, match=said):
        select_layers(ensemble, images, ())
    one, alone = select_layers(ensemble, images, (r"^members\.0\..*:stream",)), discover(members[0](), images)
    assert [(layer.name, layer.depth) for layer in one] == [(f"members.0.{own.name}", own.depth) for own in alone]
    assert (one[0].depth, one[-1].depth) == (0.0, 1.0)
    classifier = [name for name, _ in ensemble.members[0].named_modules()][-1]
    with pytest.raises(ValueError, match="names no layer of the residual stream"):
        select_layers(ensemble, images, (rf"^members\.0\.{classifier}$:stream",))


def test_branches_that_one_classifier_joins_are_one_network() -> None:
    layers = select_layers(Committee("head", Vgg(), Vgg()).eval(), torch.randn(2, 3, 16, 16), ())
    assert [layer.depth for layer in layers] == sorted(layer.depth for layer in layers)
    assert layers[0].name == "members.0.0"


def test_experts_and_parallel_branches_are_one_network() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            return x + sum(expert(flat) for expert in self.experts).view_as(x)

    model = nn.Sequential(Unfolded(8, 4, 4), Experts(), Transformer(8, 2), First(), nn.Linear(8, 5))
    assert [layer.kind for layer in discover(model, torch.randn(2, 3, 16, 16))] == ["stem", "mlp", "msa", "mlp"]
    assert len(select_layers(model, torch.randn(2, 3, 16, 16), ())) == 4


class Local(nn.Module):
    """Convolutional attention: the keys of each query are the unfolded positions around it."""

    def __init__(self, dim: int, heads: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.heads, self.unfold = heads, {"kernel_size": kernel, "dilation": dilation}
        self.unfold["padding"] = dilation * (kernel - 1) // 2
        self.to_q, self.to_kv = nn.Conv2d(dim, dim, 1, bias=False), nn.Conv2d(dim, 2 * dim, 1, bias=False)
        self.to_out = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).flatten(2).unflatten(1, (self.heads, -1)).transpose(2, 3)
        places = self.unfold["kernel_size"] ** 2
        k, v = (
            F.unfold(t, **self.unfold).unflatten(1, (self.heads, -1, places)).permute(0, 1, 4, 3, 2)
            for t in self.to_kv(x).chunk(2, dim=1)
        )
        logits = torch.einsum("bhnwd,bhnwd->bhnw", q[:, :, :, None].expand_as(k), k) * q.shape[-1] ** -0.5
        self.attention = logits.softmax(dim=-1)
        out = torch.einsum("bhnw,bhnwd->bhnd", self.attention, v)
        return self.to_out(out.transpose(2, 3).flatten(1, 2).view_as(x))


class LocalTransformer(nn.Module):
    def __init__(self, *local: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.GroupNorm(1, 8), Local(8, *local), nn.GroupNorm(1, 8)
        self.ff = nn.Sequential(nn.Conv2d(8, 16, 1), nn.GELU(), nn.Conv2d(16, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm1(x)) + x
        return self.ff(self.norm2(x)) + x


@pytest.mark.parametrize(("side", "kernel", "dilation"), [(5, 3, 1), (3, 3, 1), (6, 3, 2), (4, 5, 1)])
def test_attention_to_unfolded_keys_is_measured_on_the_whole_grid(side: int, kernel: int, dilation: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 2, 2), *(LocalTransformer(2, kernel, dilation) for _ in range(2))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).double().eval()
    images = torch.randn(4, 3, 2 * side, 2 * side, dtype=torch.float64)
    found = run_probe(AttentionProbe(), Subject(model, [(images, torch.arange(4) % 3)]))
    assert found["rows"].tolist() == found["columns"].tolist() == [side, side]
    model(images)
    half = dilation * (kernel - 1) // 2
    for i, block in enumerate(layers[1:]):
        whole = torch.zeros(4, 2, side**2, side**2, dtype=torch.float64)
        for q in range(side**2):
            for w in range(kernel**2):
                row, column = q // side + dilation * (w // kernel) - half, q % side + dilation * (w % kernel) - half
                if 0 <= row < side and 0 <= column < side:
                    whole[:, :, q, row * side + column] = block.attention.attention[:, :, q, w].detach()
        whole /= whole.sum(dim=-1, keepdim=True)
        places = 2.0 * torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
        total = (whole * torch.cdist(places, places)).sum(dim=-1).mean(dim=2)
        information = torch.special.entr(whole).sum(dim=-1).mean(dim=2)
        np.testing.assert_allclose(found["distance"][i], total.mean(dim=0), rtol=1e-6)
        np.testing.assert_allclose(found["entropy"][i], information.mean(dim=0), rtol=1e-9)
