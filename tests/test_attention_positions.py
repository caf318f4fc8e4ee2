"""Distance and entropy of every kind of attention, against the softmax of unfused networks and positions by hand."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from analytic import attention_net, convolution_net, run_probe
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from zoo import timm_model

from landscape import models
from landscape.discovery.discover import discover
from landscape.plots.appearance import look_of
from landscape.plots.figures import attention_maps as figures
from landscape.probes.attention import Attention
from landscape.probes.attention_maps import AttentionPictures
from landscape.subject.subject import Subject

Places = np.ndarray  # (window, token, 2) rows and columns in pixels, NaN for tokens that are no positions
FOUR, TWO = (2, 2, 2, 2), (1, 1)


class _Softmax(TorchFunctionMode):
    """Keeps every softmax over the last axis of three or more."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if getattr(func, "__name__", "") == "softmax" and result.ndim > 2:
            self.found.append(result)
        return result


def _grid(side: int, step: float = 1.0) -> Places:
    """One window that is the whole map, row by row."""
    return step * np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(1, -1, 2)


def _windows(side: int, window: int, step: float, shift: int = 0) -> Places:
    """Windows of neighbours; `shift`: of a map that was rolled by so many positions."""
    starts = _grid(side // window, window).reshape(-1, 1, 2)
    return step * ((starts + _grid(window) + shift) % side)


def _dilated(side: int, count: int, step: float) -> Places:
    """Windows of positions that are side / count apart."""
    apart = side // count
    return step * (_grid(apart).reshape(-1, 1, 2) + _grid(count, apart))


def _prefixed(places: Places, count: int = 1) -> Places:
    return np.concatenate([np.full((len(places), count, 2), np.nan), places], axis=1)


def _padded(side: int, window: int, step: float) -> Places:
    """Windows of a map that was filled up at its end."""
    places = _windows(-(-side // window) * window, window, step)
    return np.where((places < side * step).all(-1, keepdims=True), places, np.nan)


def _units(side: int, unit: int, step: float) -> Places:
    """Windows of which tokens are nested pairs of rows and columns, the finest first and slowest."""
    within, size = np.zeros((1, 2)), 1
    while size < unit:
        within = (within[:, None] + size * _grid(2)[0]).reshape(-1, 2)
        size *= 2
    return step * (_grid(side // unit, unit).reshape(-1, 1, 2) + within)


def _halo(side: int, block: int, window: int, step: float) -> Places:
    """Keys of blocks and their surroundings, NaN outside of the image."""
    places = _grid(side // block, block).reshape(-1, 1, 2) + _grid(window) - (window - block + 1) // 2
    return step * np.where(((places >= 0) & (places < side)).all(-1, keepdims=True), places, np.nan)


def _maxvit() -> nn.Module:
    timm = importlib.import_module("timm.models.maxxvit")
    attending = timm.MaxxVitTransformerCfg(dim_head=8, partition_ratio=16)
    shape = {"embed_dim": (16,), "depths": (1,), "block_type": ("M",), "stem_width": 8}
    return timm.MaxxVit(timm.MaxxVitCfg(**shape, transformer_cfg=attending), img_size=64, num_classes=5)  # type: ignore[no-any-return]


def _mvit() -> nn.Module:
    timm = importlib.import_module("timm.models.mvitv2")
    shape = {"depths": TWO, "embed_dim": (12, 24), "num_heads": (1, 2), "stride_q": ((1, 1), (2, 2))}
    return timm.MultiScaleVit(timm.MultiScaleVitCfg(**shape), img_size=(64, 64), num_classes=5)  # type: ignore[no-any-return]


def _of(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: timm_model(name, **arguments)


def _vit(**arguments: Any) -> Callable[[], nn.Module]:
    shape = {"img_size": 64, "embed_dim": 24, "depth": 1, "num_heads": 2}
    return _of("vision_transformer:VisionTransformer", **shape, **arguments)


SWIN = {"img_size": 64, "window_size": 4, "embed_dim": 12, "depths": (2,), "num_heads": (2,)}
PYRAMID = {"embed_dims": (16, 16, 16, 16), "num_heads": FOUR}
# How it is built, and of every self-attention the positions of its queries, and of its keys where they are others.
CASES: dict[str, tuple[Callable[[], nn.Module], list[Places | tuple[Places, Places] | str]]] = {
    "all to all": (_vit(reg_tokens=2), [_prefixed(_grid(4, 16), 3)]),
    "heads mixed": (_of("cait:Cait", img_size=64, embed_dim=24, depth=1, num_heads=2), [_grid(4, 16)]),
    "convolutions of heads": (
        _of("levit:Levit", img_size=64, embed_dim=(16, 16), num_heads=(2, 2), depth=TWO, key_dim=8, use_conv=True),
        [_grid(4, 16), (_grid(2, 32), _grid(4, 16)), _grid(2, 32)],
    ),
    "windows, shifted ones": (
        _of("swin_transformer:SwinTransformer", **SWIN), [_windows(16, 4, 4), _windows(16, 4, 4, shift=2)]
    ),
    "cosines": (
        _of("swin_transformer_v2:SwinTransformerV2", **SWIN), [_windows(16, 4, 4), _windows(16, 4, 4, shift=2)]
    ),
    "dilated": (_maxvit, [_windows(16, 4, 4), _dilated(16, 4, 4)]),
    "pooled keys": (
        _of("pvt_v2:PyramidVisionTransformerV2", depths=(1, 1, 1, 1), **PYRAMID),
        [
            (_grid(16, 4), _grid(2, 32) + 14), (_grid(8, 8), _grid(2, 32) + 12),
            (_grid(4, 16), _grid(2, 32) + 8), _grid(2, 32),
        ],
    ),
    "pooled queries and keys": (_mvit, [(_grid(16, 4), _grid(4, 16)), (_grid(8, 8), _grid(8, 8))]),
    "windows, and keys of windows": (
        _of("twins:Twins", img_size=64, depths=FOUR, wss=(4, 4, 4, 2), **PYRAMID),
        [_windows(16, 4, 4), (_grid(16, 4), _grid(2, 32) + 14)],
    ),
    "relative positions of padded windows": (
        _of(
            "vision_transformer_sam:VisionTransformerSAM", img_size=80, embed_dim=24, depth=2, num_heads=2,
            window_size=3, global_attn_indexes=(1,), use_rel_pos=True,
        ),
        [_padded(5, 3, 16), _grid(5, 16)],
    ),
    "blocks": (
        _of("nest:Nest", img_size=64, embed_dims=(12, 12, 12), num_heads=(2, 2, 2), depths=(1, 1, 1)),
        [_windows(16, 4, 4), _windows(8, 4, 8), _grid(4, 16)],
    ),
    "units": (
        _of("hiera:Hiera", img_size=(64, 64), stages=(1, 1, 1, 1), embed_dim=8, num_heads=1),
        [_units(16, 8, 4), (_units(8, 4, 8) + 2, _units(16, 8, 4))],
    ),
    "queries of the whole image": (
        _of("gcvit:GlobalContextVit", img_size=64, embed_dim=8, depths=(2, 1), num_heads=(2, 2), window_ratio=(16, 16)),
        [_windows(16, 4, 4), _windows(16, 4, 4), _windows(8, 4, 8)],
    ),
    "tokens apart": (_of("mobilevit_xxs"), [_dilated(8, 4, 8)] * 2 + [_dilated(4, 2, 16)] * 4),
    "channels": (
        _of("davit:DaVit", depths=TWO, embed_dims=(8, 16), num_heads=(2, 2), window_size=4),
        [_windows(16, 4, 4), "its maps are between channels", _windows(8, 4, 8), "its maps are between channels"],
    ),
    "surroundings of blocks": (_of("halonet26t"), [(_windows(16, 8, 16), _halo(16, 8, 12, 16))]),
    "of no queries": (_of("mobilevitv2_050"), ["its softmax over positions is of no pairs of queries and keys"] * 9),
    "around each position": (
        _of("volo:VOLO", img_size=64, layers=TWO, embed_dims=(12, 24), num_heads=(2, 2), post_layers=()),
        [_halo(8, 2, 3, 8), _grid(4, 16)],
    ),
    "one key for all heads": (_of("mobilenetv4_hybrid_medium"), [(_grid(4, 16), _grid(2, 32))]),
}  # fmt: skip


HEADS_FIRST = (
    "blocks",
    "units",
    "surroundings of blocks",
    "around each position",
)  # maps (image, head, window, query, key)


def _written_out(maps: Tensor, queries: Places, keys: Places, heads_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Distance and entropy per head, of maps whose leading axes are image, window, head, or image, head, window."""
    order = (2, -1, len(keys)) if heads_first else (2, len(keys), -1)
    several = maps.double().reshape(*order, *maps.shape[-2:]).numpy()
    several = several.swapaxes(1, 2) if heads_first else several
    distances, entropies, count = 0.0, 0.0, 0
    for window, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        inside = [np.isfinite(places).all(axis=-1) for places in (rows, columns)]
        kept = several[:, window][:, :, inside[0]][..., inside[1]]
        kept = kept / kept.sum(axis=-1, keepdims=True)
        apart = np.linalg.norm(rows[inside[0]][:, None] - columns[inside[1]], axis=-1)
        distances += (kept * apart).sum(axis=(0, 2, 3))
        entropies -= (kept * np.log(np.maximum(kept, 1e-300))).sum(axis=(0, 2, 3))
        count += 2 * inside[0].sum()
    return distances / count, entropies / count


# Networks of which the library alone takes a second are left to the campaign.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign] * (name in ("surroundings of blocks", "tokens apart")))
             for name in CASES]
)  # fmt: skip
def test_distance_and_entropy_are_those_of_the_softmax_at_positions_by_hand(name: str) -> None:
    torch.manual_seed(0)
    build, places = CASES[name]
    model = build().eval()
    side = {"surroundings of blocks": 256, "relative positions of padded windows": 80}.get(name, 64)
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        for parameter in model.parameters():  # sharper maps than those of small weights
            parameter.mul_(2.0 if parameter.ndim == 2 else 1.0)
    subject = Subject(model, [(images, torch.tensor([0, 1]))])
    found, facts = run_probe(Attention(), subject), Attention().plan(subject).facts
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    softmax = _Softmax()
    with torch.no_grad(), softmax:
        model(images)
    layers = [layer for layer in discover(model, images) if layer.attention]
    numbers = [layer.attention.key[1] for layer in layers if layer.attention]
    for row, expected in enumerate(places):
        maps = softmax.found[numbers[row]]
        if isinstance(expected, str):
            assert np.isnan(found["distance"][row]).all()
            assert str(found["name"][row]) in facts["distance_unmeasured"]
            assert facts["distance_unmeasured"].endswith(f": {expected}")
            assert np.isnan(found["entropy"][row]).all() == ("entropy_unmeasured" in facts) == ("queries" in name)
            continue
        queries, keys = expected if isinstance(expected, Sequence) else (expected, expected)
        distance, entropy = _written_out(maps, queries, keys, name in HEADS_FIRST)
        heads = len(distance)
        np.testing.assert_allclose(found["distance"][row, :heads], distance, rtol=1e-5, err_msg=f"{name}, {row}")
        np.testing.assert_allclose(found["entropy"][row, :heads], entropy, rtol=1e-5, err_msg=f"{name}, {row}")


# --- Pictures of attention: the rows of the maps that the network computes, mean over heads, without prefix ---


def test_the_maps_are_the_rows_of_softmax_over_the_patches() -> None:
    subject = attention_net(sizes=(3, 2))
    found = run_probe(AttentionPictures(images=5, queries="0.9,0.1,0,0.99"), subject)
    images = torch.cat([batch[0] for batch in subject.batches])
    kept: list[torch.Tensor] = []
    attention = subject.model.get_submodule("blocks.0.attention")
    attention.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        subject.model(images)
        query, key, _ = attention.get_submodule("qkv")(kept[0]).view(5, 5, 3, 2, 3).permute(2, 0, 3, 1, 4)
        maps = (query @ key.transpose(-1, -2) / 3**0.5).softmax(dim=-1)[..., 1:, 1:]
    maps = (maps / maps.sum(dim=-1, keepdim=True)).mean(dim=1).numpy()  # (image, query, key) of 2 x 2 patches
    np.testing.assert_allclose(found["attention"][:, 0, 0].reshape(5, 4), maps[:, 2], rtol=1e-9)
    np.testing.assert_allclose(found["attention"][:, 0, 1].reshape(5, 4), maps[:, 1], rtol=1e-9)
    assert found["picture"].shape == (5, 3, 4, 4)
    few = AttentionPictures(images=2).plan(subject)
    assert ", 2 samples, " in str(few.facts["protocol"])  # those that are drawn, of 5
    assert (found["picture"].min(), found["picture"].max()) == (0.0, 1.0)


def test_self_attention_within_windows_has_no_picture() -> None:
    torch.manual_seed(0)
    model = models.build("alternet_demo", classes=3, image_size=32).eval()
    subject = Subject(model, [(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))])
    with pytest.raises(ValueError, match=r"none of the \d self-attentions covers the whole image"):
        run_probe(AttentionPictures(images=1), subject)
    with pytest.raises(ValueError, match="no self-attention was found"):
        run_probe(AttentionPictures(images=1), convolution_net())


def test_more_pictures_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="13 pictures were asked for, the data have 12 samples"):
        AttentionPictures(images=13).plan(attention_net())


def test_networks_with_few_layers_get_pictures_as_large_as_those_of_networks_with_many() -> None:
    def result(depth: int) -> xr.Dataset:
        return xr.Dataset(
            {
                "attention": (("image", "layer", "query", "row", "column"), np.ones((1, depth, 1, 4, 4))),
                "picture": (("image", "channel", "pixel_row", "pixel_column"), np.zeros((1, 3, 8, 8))),
                "place": (("query", "coordinate"), np.array([[0.5, 0.5]])),
                "depth": ("layer", np.linspace(0, 1, depth)),
                "done": ("image", np.ones(1)),
            },
            attrs={"label": f"of {depth} layers", "protocol": "test"},
        )

    results = [result(6), result(1)]
    figure = figures.page(results, [look_of(data) for data in results])
    figure.draw_without_rendering()
    many, few = (ax.get_window_extent().width / np.ptp(ax.get_xlim()) for ax in figure.axes)
    assert few == pytest.approx(many)
