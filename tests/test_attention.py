"""Attention statistics in closed form; maps of every kind of attention against the explicit softmax; the probe."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import attention_net, run_probe
from foreign import Encoder
from torch import Tensor, nn

from landscape import models
from landscape.discovery.discover import discover
from landscape.discovery.layer import AttentionCall
from landscape.layers import attention_statistics as metrics
from landscape.layers.attention_maps import AttentionMaps, attention_hooks, maps_from_qk
from landscape.layers.forward_hooks import run_with_hooks
from landscape.options import OptionError
from landscape.probes.attention import PER_HEAD, Attention
from landscape.probes.similarity import Similarity
from landscape.subject.subject import Subject

CPU = torch.device("cpu")


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _call(name: str, number: int) -> AttentionCall:
    return AttentionCall((name, number), 1, (0, 0), 0)


def _subject(model: nn.Module, *shape: int, samples: int = 6) -> Subject:
    images = _noise(samples, 3, *shape, seed=3)
    targets = torch.arange(samples) % 3
    return Subject(model.double().eval(), [(images[:4], targets[:4]), (images[4:], targets[4:])])


def _vit(**arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = {"classes": 3, "image_size": 8, "patch": 2, "dim": 12, "depth": 2, "heads": 3, "std": 0.5}
    return models.build("vit_demo", **{**shape, **arguments})


# Closed forms


HALVES = torch.block_diag(*[torch.full((2, 2), 0.5)] * 2)
FIRST = torch.eye(6)[0].expand(6, 6)  # all attention goes to the first token
FAR = (0 + 8 + 16 + 4 + 80**0.5 + 272**0.5) / 6
CLOSED: dict[str, tuple[Any, ...]] = {  # map, grid, size of a token, distance, entropy, mutual information
    "uniform": (torch.full((4, 4), 0.25), (2, 2), (2.0, 2.0), (0 + 2 + 2 + 8**0.5) / 4, math.log(4), 0.0),
    "to oneself": (torch.eye(6), (2, 3), (4.0, 4.0), 0.0, 0.0, 1.0),
    "to one token": (FIRST, (2, 3), (4.0, 8.0), FAR, 0.0, 0.0),
    "within halves": (HALVES, (2, 2), (1.0, 1.0), 0.5, math.log(2), 0.5),  # (ln 4 - ln 2) / ln 4
}


@pytest.mark.parametrize("name", CLOSED)
def test_statistics_of_one_map_in_all_heads_in_closed_form(name: str) -> None:
    one, grid, size, distance, entropy, information = CLOSED[name]
    maps = one.double().expand(2, 3, *one.shape)
    np.testing.assert_allclose(metrics.mean_distance(maps, metrics.distances(grid, size, CPU)), distance, atol=1e-12)
    np.testing.assert_allclose(metrics.entropy(maps), entropy, atol=1e-12)
    np.testing.assert_allclose(metrics.mutual_information(maps, metrics.entropy(maps)), information, atol=1e-12)
    np.testing.assert_allclose(metrics.head_cosine(maps), 1.0)


def test_statistics_of_random_maps_equal_their_definitions() -> None:
    maps = (2 * _noise(3, 4, 6, 6)).softmax(dim=-1)
    places = np.array([(3.0 * y, 2.0 * x) for y in range(2) for x in range(3)])
    a = maps.numpy()
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
    np.testing.assert_allclose(
        metrics.mean_distance(maps, metrics.distances((2, 3), (3.0, 2.0), CPU)),
        (a * distance).sum(axis=-1).mean(axis=-1),
    )
    joint = a / 6
    p = joint.sum(axis=-2, keepdims=True)
    information = (joint * np.log(joint / (p / 6))).sum(axis=(-2, -1))
    scale = np.sqrt(np.log(6) * -(p * np.log(p)).sum(axis=(-2, -1)))
    np.testing.assert_allclose(metrics.mutual_information(maps, metrics.entropy(maps)), information / scale)
    u = a / np.linalg.norm(a, axis=-1, keepdims=True)
    cosines = [(u[:, g] * u[:, h]).sum(axis=-1).mean(axis=-1) for g in range(4) for h in range(g)]
    np.testing.assert_allclose(metrics.head_cosine(maps), np.mean(cosines, axis=0))


def test_cosines_of_tokens_and_singular_values_are_those_of_numpy() -> None:
    tokens, before = _noise(3, 5, 7), _noise(3, 5, 7, seed=1)
    x, y = (z.numpy() / np.linalg.norm(z, axis=-1, keepdims=True) for z in (tokens, before))
    pairs = [(x[:, i] * x[:, j]).sum(axis=-1) for i in range(5) for j in range(i)]
    np.testing.assert_allclose(metrics.token_cosine(tokens), np.mean(pairs, axis=0))
    np.testing.assert_allclose(metrics.depth_cosine(tokens, before), (x * y).sum(axis=-1).mean(axis=-1))
    sigma = np.linalg.svd(tokens.numpy(), compute_uv=False)
    np.testing.assert_allclose(metrics.singular_values(tokens), np.log(sigma / sigma[:, :1]))


def test_collapsed_zero_and_single_tokens_and_heads_have_the_statistics_that_they_can_have() -> None:
    tokens = _noise(1, 1, 7).expand(2, 5, 7)
    np.testing.assert_allclose(metrics.token_cosine(tokens), 1.0)
    values = metrics.singular_values(tokens)
    np.testing.assert_allclose(values[:, 0], 0.0)
    assert (values[:, 1:] < -30).all()
    assert values.isfinite().all()
    maps = torch.ones(2, 1, 1, 1, dtype=torch.float64)
    assert metrics.head_cosine(maps).isnan().all()
    assert metrics.token_cosine(_noise(2, 1, 4)).isnan().all()
    assert metrics.mutual_information(maps, metrics.entropy(maps)).isnan().all()
    outputs = _noise(2, 3, 5, 4)
    outputs[1, 2] = 0.0
    pair = torch.cosine_similarity(outputs[1, 0], outputs[1, 1], dim=-1).mean()
    np.testing.assert_allclose(metrics.head_feature_cosine(outputs)[1], pair / 3)
    assert metrics.head_feature_cosine(outputs[:, :1]).isnan().all()


def test_prefix_tokens_are_removed_and_rows_renormalised() -> None:
    maps = _noise(2, 3, 6, 6).softmax(dim=-1)
    kept = metrics.between(maps, slice(2, None), slice(2, None))
    np.testing.assert_allclose(kept.sum(dim=-1), 1.0)
    np.testing.assert_allclose(kept[0, 0, 1, 2] / kept[0, 0, 1, 3], maps[0, 0, 3, 4] / maps[0, 0, 3, 5])


# The maps of attention functions


def _of(maps: AttentionMaps) -> Tensor:
    """All rows, in chunks of two."""
    return torch.cat([maps.chunk(slice(i, i + 2)) for i in range(0, maps.rows, 2)])


@pytest.mark.parametrize("leading", [(5,), (3, 2)])
@pytest.mark.parametrize(
    "given", ["nothing", "scale", "causal", "boolean", "additive", "per image", "one per image for all heads"]
)
def test_a_recomputed_map_times_the_values_is_what_the_fused_kernel_returns(
    leading: tuple[int, ...], given: str
) -> None:
    q, k, v = (_noise(*leading, 2, 4, 3, seed=i) for i in range(3))
    bias = _noise(*leading, 2, 4, 4, seed=5)
    options: dict[str, Any] = {
        "nothing": {},
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": torch.eye(4, dtype=torch.bool).roll(1, 0) | torch.eye(4, dtype=torch.bool)},
        "additive": {"attn_mask": _noise(4, 4, seed=4)},
        "per image": {"attn_mask": bias},
        "one per image for all heads": {"attn_mask": bias[..., :1, :, :]},
    }[given]
    maps = _of(maps_from_qk(q, k, v, **options))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(maps.sum(dim=-1), 1.0)
    np.testing.assert_allclose((maps @ v.flatten(0, -4)).reshape(expected.shape), expected, atol=1e-12)


def test_grouped_queries_share_their_keys() -> None:
    q, k, v = _noise(2, 4, 5, 3), _noise(2, 2, 5, 3, seed=1), _noise(2, 2, 5, 3, seed=2)
    maps = _of(maps_from_qk(q, k, v, enable_gqa=True))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    np.testing.assert_allclose(maps @ v.repeat_interleave(2, dim=1), expected, atol=1e-12)


@pytest.mark.parametrize("merged", [False, True])
def test_maps_of_an_explicit_softmax_are_its_output(merged: bool) -> None:
    """Attention written out, on (batch, head, token, width) or on (batch * head, token, width)."""
    x, found = _noise(4, 3, 5, 2), []
    with attention_hooks([(_call("softmax", 0), found.append, None)], 4):
        tokens = x.flatten(0, 1) if merged else x
        torch.softmax(tokens @ tokens.transpose(-2, -1), dim=-1)
    np.testing.assert_allclose(_of(found[0]), torch.softmax(x @ x.transpose(-2, -1), dim=-1))


@pytest.mark.parametrize("mask", ["none", "shared", "per head", "padding"])
def test_maps_of_torchs_module_are_its_weights_some_images_at_a_time(mask: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 2, batch_first=True).double().eval()
    x, found = _noise(4, 5, 6), []
    options: dict[str, Any] = {
        "none": {},
        "shared": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        "per head": {"attn_mask": _noise(8, 5, 5)},
        "padding": {"key_padding_mask": torch.arange(5).expand(4, 5) > torch.arange(1, 5)[:, None]},
    }[mask]
    expected, weights = module(x, x, x, average_attn_weights=False, **options)
    with torch.inference_mode(), attention_hooks([(_call("multi_head_attention_forward", 0), found.append, None)], 4):
        mixed, _ = module(x, x, x, need_weights=False, **options)
        np.testing.assert_allclose(_of(found[0]), weights.detach(), atol=1e-12)
    np.testing.assert_allclose(mixed, expected.detach(), atol=1e-12)


def test_attention_hooks_act_in_this_thread_and_block_only() -> None:
    x, found = _noise(2, 3, 5, 2), []
    with pytest.raises(ZeroDivisionError), attention_hooks([(_call("softmax", 0), lambda maps: 1 // 0, None)], 2):  # type: ignore[arg-type, return-value]
        torch.softmax(x, dim=-1)
    with attention_hooks([(_call("softmax", 1), found.append, None)], 2):
        torch.softmax(x, dim=-1)
    torch.softmax(x, dim=-1)
    assert found == []


# The probe


def _maps_of_vit(model: Any, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Map and tokens after the attention of every block, prefix included, written out."""
    x = model.patch_embedding(images).flatten(2).transpose(1, 2)
    x = torch.cat([model.cls_token.expand(len(x), -1, -1), x], dim=1) + model.position_embedding
    found = []
    for block in model.blocks:
        queries, keys, _ = block.attention.qkv(block.norm1(x)).chunk(3, dim=-1)
        q, k = (part.unflatten(2, (3, 4)).transpose(1, 2) for part in (queries, keys))
        maps = (q @ k.transpose(-2, -1) / 2).softmax(dim=-1)
        x = x + block.attention(block.norm1(x))
        found.append((maps, x))
        x = x + block.mlp(block.norm2(x))
    return found


def test_the_probe_equals_a_forward_pass_written_out() -> None:
    subject = _subject(_vit(), 8, 8)
    found = run_probe(Attention(spectra_images=3), subject)
    parts = [_maps_of_vit(subject.model, images) for images, _ in subject.batches]
    distance = metrics.distances((4, 4), (2.0, 2.0), CPU)
    previous = None
    with torch.no_grad():
        for row in range(2):
            maps = torch.cat([part[row][0] for part in parts])[..., 1:, 1:]
            maps = maps / maps.sum(dim=-1, keepdim=True)
            tokens = torch.cat([part[row][1] for part in parts])[:, 1:]
            entropy = metrics.entropy(maps)
            expected = {
                "distance": metrics.mean_distance(maps, distance),
                "entropy": entropy,
                "mutual_information": metrics.mutual_information(maps, entropy),
                "head_cosine": metrics.head_cosine(maps),
                "token_cosine": metrics.token_cosine(tokens),
            }
            if previous is not None:
                expected["depth_cosine"] = metrics.depth_cosine(tokens, previous)
            for name, values in expected.items():
                np.testing.assert_allclose(found[name][row], values.mean(dim=0), rtol=1e-9, err_msg=name)
                error = values.std(dim=0) / 6**0.5
                np.testing.assert_allclose(found[f"{name}_se"][row], error, rtol=1e-6, err_msg=name)
            spectra = metrics.singular_values(torch.cat([tokens[:3], tokens[4:]])).mean(dim=0)
            np.testing.assert_allclose(found["token_singular_value"][row], spectra, rtol=1e-9)
            of_images = metrics.singular_values(tokens[:4].mean(dim=1))  # the smaller last mini-batch has other ranks
            np.testing.assert_allclose(found["image_singular_value"][row], of_images, rtol=1e-9)
            previous = tokens
    assert np.isnan(found["depth_cosine"][0])


@pytest.mark.parametrize("prefix", [0, 3])
def test_torch_encoder_layers_with_oblong_grids_and_prefix_tokens(prefix: int) -> None:
    torch.manual_seed(0)
    subject = _subject(Encoder(prefix=prefix), 16, 8)
    found = run_probe(Attention(), subject)
    assert found["name"].tolist() == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert (found["rows"].tolist(), found["columns"].tolist()) == ([4, 4], [2, 2])
    model: Any = subject.model
    images = torch.cat([images for images, _ in subject.batches])
    with torch.no_grad():
        x = model.embed(images).flatten(2).transpose(1, 2) + model.positions
        x = model.encoder.layers[0].norm1(torch.cat([model.prefix.expand(len(x), -1, -1), x], dim=1))
        maps = model.encoder.layers[0].self_attn(x, x, x, average_attn_weights=False)[1]
        maps = metrics.between(maps, slice(prefix, None), slice(prefix, None))
    expected = metrics.mean_distance(maps, metrics.distances((4, 2), (4.0, 4.0), CPU)).mean(dim=0)
    np.testing.assert_allclose(found["distance"][0], expected, rtol=1e-9)


def test_maps_of_windows_count_per_window_on_the_window_grid() -> None:
    torch.manual_seed(0)
    model: Any = models.build("alternet_demo", classes=3, image_size=16)
    subject = _subject(model, 16, 16)
    layers = [layer for layer in discover(subject.model, subject.batches[0][0]) if layer.attention]
    found = run_probe(Attention(), subject)
    assert found["rows"].tolist() == [layer.attention.grid[0] for layer in layers if layer.attention] == [4, 4]
    received: list[AttentionMaps] = []
    assert layers[0].attention is not None
    images = torch.cat([images for images, _ in subject.batches])
    with torch.no_grad(), attention_hooks([(layers[0].attention, received.append, None)], 6):
        model(images)
        assert received[0].rows == 6 * 4  # windows of 4 x 4 in a map of 8 x 8
        maps = received[0].chunk(slice(0, 24))
    expected = metrics.mean_distance(maps, metrics.distances((4, 4), (2.0, 2.0), CPU)).mean(dim=0)
    np.testing.assert_allclose(found["distance"][0, : len(expected)], expected, rtol=1e-9)
    assert np.isnan(found["distance"][0, len(expected) :]).all()  # fewer heads than in the last stage
    assert found["distance"][0, 0] < 3 * 2 * 2**0.5


def test_chunks_of_a_batch_give_the_result_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = _subject(_vit(dim=48), 8, 8)
    whole = run_probe(Attention(), subject)
    real = maps_from_qk

    def frugal(*args: Any, **kwargs: Any) -> AttentionMaps:
        maps = real(*args, **kwargs)
        return AttentionMaps(maps.rows, maps.row_size, 1, maps.device, maps.chunk)  # one image at a time

    monkeypatch.setattr("landscape.layers.attention_maps.maps_from_qk", frugal)
    monkeypatch.setattr(frugal, "__signature__", __import__("inspect").signature(real), raising=False)
    for name, values in run_probe(Attention(), subject).items():
        if name in ("distance", "mutual_information", "entropy", "head_cosine", "head_feature_cosine"):
            np.testing.assert_allclose(values, whole[name], rtol=1e-10)


def test_a_half_finished_result_is_that_of_the_finished_images_and_spectra_of_tokens_may_be_left_out() -> None:
    subject = _subject(_vit(), 8, 8)
    part = run_probe(Attention(), subject, units=1)
    first = run_probe(Attention(), Subject(subject.model, subject.batches[:1]))
    for name in ("distance", "mutual_information", "token_singular_value", "image_singular_value"):
        np.testing.assert_allclose(part[name], first[name], rtol=1e-12)
    nothing = run_probe(Attention(), subject, units=0)
    assert all(np.isnan(nothing[name]).all() for name in ("distance", "token_cosine", "image_singular_value"))
    found = run_probe(Attention(spectra_images=0), _subject(_vit(), 8, 8))
    assert np.isnan(found["token_singular_value"]).all()
    assert np.isfinite(found["distance"]).all()


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(OptionError, match="--spectra-images must be at least 0, got -1"):
        Attention(spectra_images=-1)
    with pytest.raises(OptionError, match="--pool must be mean or cls, got max"):
        Attention(pool="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cls needs a class token, blocks\.0\.attention has none; use --pool mean"):
        Attention(pool="cls").plan(_subject(_vit(head="gap"), 8, 8))
    with pytest.raises(ValueError, match="no self-attention was found"):
        Attention().plan(_subject(models.build("resnet_demo", classes=3, image_size=8), 8, 8))


class _Mixing(nn.Module):
    """Self-attention of two heads on 2 x 2 tokens and a class token, computed in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.drop = way, nn.Dropout(0.3)
        self.module = nn.MultiheadAttention(6, 2, batch_first=True)  # its weights are those of every way
        self.talk = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "module":
            return self.module(x, x, x, need_weights=False)[0]
        joined = F.linear(x, self.module.in_proj_weight, self.module.in_proj_bias)
        q, k, v = joined.unflatten(2, (3, 2, 3)).permute(2, 0, 3, 1, 4)  # each (image, head, token, 3)
        if self.way == "fused":
            out = F.scaled_dot_product_attention(q, k, v)
        elif self.way == "merged":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            out = torch.bmm(self.drop((q @ k.transpose(1, 2) / 3**0.5).softmax(-1)), v).unflatten(0, (-1, 2))
        else:
            logits = torch.einsum("bhid,bhjd->bhij", [q, k]) / 3**0.5
            if self.way == "sinks":  # a learnt number that takes part of the attention, and is left out
                logits = torch.cat([self.talk.bias.view(1, 2, 1, 1).expand(len(q), 2, 5, 1), logits], dim=-1)
            maps = self.drop(logits.softmax(-1)).to(q.dtype)
            maps = maps[..., 1:] if self.way == "sinks" else maps
            if self.way == "talking":  # heads mixed after the softmax
                maps = self.talk(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            out = {
                "einsum": lambda: torch.einsum("bhij,bjhd->bihd", maps, v.transpose(1, 2)).transpose(1, 2),
                "dots": lambda: torch.einsum("... i j, ... j d -> ... i d", maps, v),
            }.get(self.way, lambda: maps @ v)()
        return self.module.out_proj(out.transpose(1, 2).flatten(2))


class _Mixed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.first = nn.Conv2d(3, 6, 4, 4), nn.Parameter(torch.randn(1, 1, 6))
        self.mixing, self.norm, self.head = _Mixing(way), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
        return self.head(self.norm(x + self.mixing(x))[:, 0])


@pytest.mark.parametrize("way", ["fused", "module", "product", "merged", "einsum", "dots", "sinks"])
def test_the_cosine_of_the_outputs_of_heads_is_that_written_out(way: str) -> None:
    torch.manual_seed(0)
    model = _Mixed(way)
    subject = _subject(model, 8, 8)
    found = run_probe(Attention(), subject)
    x = model.embed(torch.cat([images for images, _ in subject.batches])).flatten(2).transpose(1, 2)
    x = torch.cat([model.first.expand(len(x), -1, -1), x], dim=1).detach().numpy()
    weight, bias = (t.detach().numpy() for t in (model.mixing.module.in_proj_weight, model.mixing.module.in_proj_bias))
    cosines = []
    for tokens in x @ weight.T + bias:  # of an image, (token, 18)
        outputs = []
        for head in (0, 1):
            q, k, v = (tokens[:, start + 3 * head : start + 3 * head + 3] for start in (0, 6, 12))
            logits = np.exp(q @ k.T / 3**0.5)
            outputs.append((logits / logits.sum(axis=1, keepdims=True) @ v)[1:])  # without that of the class token
        one, other = (output / np.linalg.norm(output, axis=1, keepdims=True) for output in outputs)
        cosines.append((one * other).sum(axis=1).mean())
    np.testing.assert_allclose(found["head_feature_cosine"], [np.mean(cosines)], rtol=1e-9)
    np.testing.assert_allclose(found["head_feature_cosine_se"], [np.std(cosines, ddof=1) / 6**0.5], rtol=1e-6)
    assert abs(found["head_feature_cosine"][0] - found["head_cosine"][0]) > 0.1


def test_sinks_and_what_other_probes_compute_meanwhile_change_no_statistic_of_heads() -> None:
    found = []
    for way, several in (("product", []), ("sinks", []), ("sinks", [Similarity()])):
        torch.manual_seed(0)
        subject = _subject(_Mixed(way), 8, 8)
        hooks = [probe.hooks(subject, (0,)) for probe in (*several, Attention())]
        found.append(run_with_hooks(subject, (0,), hooks)[-1])
    for name in (*PER_HEAD, "head_cosine", "head_feature_cosine"):
        for other in found[1:]:
            np.testing.assert_allclose(other[f"{name}_sum"], found[0][f"{name}_sum"], rtol=1e-9, err_msg=name)


def test_heads_mixed_after_the_softmax_have_no_outputs_of_their_own() -> None:
    torch.manual_seed(0)
    subject = _subject(_Mixed("talking"), 8, 8)
    found = run_probe(Attention(), subject)
    assert np.isnan(found["head_feature_cosine"]).all()
    assert np.isfinite(found["head_cosine"]).all()
    reason = "mixing: no product of its attention maps with the values was found"
    assert Attention().plan(subject).facts["head_feature_cosine_unmeasured"] == reason


def _attending() -> tuple[Subject, np.ndarray]:
    """A subject of one mini-batch and the stream after its self-attention, (image, token, channel)."""
    subject, kept = attention_net(sizes=(12,)), []
    subject.model.get_submodule("blocks.0.norm2").register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        subject.model(subject.batch(0)[0])
    return subject, kept[0].numpy()


def test_singular_values_of_class_tokens_are_those_of_numpy() -> None:
    subject, stream = _attending()
    found, mean = (run_probe(Attention(pool=pool), subject) for pool in ("cls", "mean"))  # type: ignore[arg-type]
    values = np.linalg.svd(stream[:, 0], compute_uv=False)
    np.testing.assert_allclose(found["image_singular_value"][0], np.log(values / values[0]), rtol=1e-6, atol=1e-12)
    assert np.abs(found["image_singular_value"] - mean["image_singular_value"]).max() > 0.1
    np.testing.assert_array_equal(found["token_singular_value"], mean["token_singular_value"])


def test_centred_singular_values_are_those_of_the_covariance() -> None:
    subject, stream = _attending()
    tokens = stream[:, 1:]  # without the class token
    found = run_probe(Attention(spectra_images=12, centred=True), subject)
    means = np.linalg.eigvalsh(np.cov(tokens.mean(axis=1).T))[::-1]
    np.testing.assert_allclose(found["image_singular_value"][0], np.log(means / means[0]) / 2, rtol=1e-6)
    each = [np.linalg.eigvalsh(np.cov(image.T))[::-1][:3] for image in tokens]  # four tokens leave three
    wanted = np.mean([np.log(values / values[0]) / 2 for values in each], axis=0)
    np.testing.assert_allclose(found["token_singular_value"][0, :3], wanted, rtol=1e-6)
    plain = run_probe(Attention(spectra_images=12), subject)
    assert np.abs(plain["image_singular_value"] - found["image_singular_value"]).max() > 0.1
