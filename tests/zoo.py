"""Small, untrained networks of other libraries, built from their configurations; every library is optional."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from foreign import torchvision_models
from torch import nn

Size = tuple[int, int]


def timm_model(name: str, **arguments: Any) -> nn.Module:
    """A network of timm: by its name, or by `module:class`."""
    torchvision_models()  # without its compiled operators timm cannot be imported
    module, _, own = name.rpartition(":")
    if module:
        found = pytest.importorskip(f"timm.models.{module}", exc_type=(ImportError, RuntimeError))
        return getattr(found, own)(num_classes=5, **arguments)  # type: ignore[no-any-return]
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    return timm.create_model(name, pretrained=False, num_classes=5, **arguments)  # type: ignore[no-any-return]


def _transformers(name: str, **arguments: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**arguments)
    return getattr(transformers, f"{name}ForImageClassification")(config)


FIVE = {"num_classes": 5}
TORCHVISION: dict[str, tuple[int, Callable[[Any], nn.Module]]] = {  # name -> (size of its images, how it is built)
    "resnet": (64, lambda tv: tv.ResNet(tv.resnet.Bottleneck, [1, 2, 1, 1], **FIVE)),
    "vit": (32, lambda tv: tv.VisionTransformer(32, 8, 2, 2, 16, 32, **FIVE)),
    "swin": (32, lambda tv: tv.SwinTransformer([4, 4], 12, [2, 2], [2, 4], [4, 4], **FIVE)),
    "swin v2": (32, lambda tv: tv.SwinTransformer(
        [4, 4], 12, [1, 1], [2, 2], [4, 4], **FIVE, block=tv.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=tv.swin_transformer.PatchMergingV2,
    )),
    "convnext": (32, lambda tv: tv.ConvNeXt(
        [tv.convnext.CNBlockConfig(8, 16, 1), tv.convnext.CNBlockConfig(16, None, 2)], **FIVE
    )),
    "regnet": (64, lambda tv: tv.RegNet(
        tv.regnet.BlockParams([1, 1, 2], [8, 16, 24], [8, 8, 8], [1.0, 1.0, 1.0], [2, 2, 2], 0.25), **FIVE
    )),
    "efficientnet": (32, lambda tv: tv.EfficientNet(
        [
            tv.efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0),
            tv.efficientnet.MBConvConfig(4, 3, 2, 8, 16, 2, 1.0, 1.0),
            tv.efficientnet.MBConvConfig(4, 5, 1, 16, 24, 2, 1.0, 1.0),
        ],
        0.0, **FIVE,
    )),
}  # fmt: skip
VIT, PIT, MIXER = "vit_tiny_patch16_224", "pit:PoolingVisionTransformer", "mlp_mixer:MlpMixer"
TIMM: dict[str, tuple[Size, str, dict[str, Any]]] = {
    "vit": ((64, 64), VIT, {"img_size": 64, "depth": 2}),
    "vit, oblong, no class token": (
        (64, 32), VIT, {"img_size": (64, 32), "depth": 1, "class_token": False, "global_pool": "avg"}
    ),
    "vit with registers": ((56, 56), "vit_small_patch14_reg4_dinov2", {"img_size": 56, "depth": 1}),
    "deit, distilled": ((64, 64), "deit_tiny_distilled_patch16_224", {"img_size": 64, "depth": 2}),
    "swin": ((56, 56), "swin_tiny_patch4_window7_224", {
        "img_size": 56, "window_size": 7, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 24,
    }),
    "convnext": ((64, 64), "convnext_tiny", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}),
    "pit": ((32, 32), PIT, {
        "img_size": 32, "patch_size": 8, "stride": 4, "stem_type": "overlap", "base_dims": (8, 8), "depth": (1, 1),
        "heads": (2, 4), "mlp_ratio": 2,
    }),
    "mixer": ((32, 32), MIXER, {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 12}),
    "beit": ((64, 64), "beit_base_patch16_224", {"img_size": 64, "depth": 1, "embed_dim": 48, "num_heads": 3}),
    "eva": ((56, 56), "eva02_tiny_patch14_224", {"img_size": 56, "depth": 1}),
}  # fmt: skip
TINY = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
DINO = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 7}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
TRANSFORMERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "vit": (32, "ViT", {**TINY, "image_size": 32, "patch_size": 8}),
    "deit": (32, "DeiT", {**TINY, "image_size": 32, "patch_size": 8}),
    "swin": (32, "Swin", SWIN),
    "resnet": (32, "ResNet", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}),
    "dinov2": (28, "Dinov2", DINO),
    "dinov2 with registers": (28, "Dinov2WithRegisters", DINO),
}
# name -> (how it is built, size of its images)
ZOO: dict[str, tuple[Callable[[], nn.Module], Size]] = {
    **{f"torchvision {n}": (partial(lambda build: build(torchvision_models()), build), (side, side))
       for n, (side, build) in TORCHVISION.items()},
    **{f"timm {n}": (partial(timm_model, name, **arguments), size) for n, (size, name, arguments) in TIMM.items()},
    **{f"transformers {n}": (partial(_transformers, name, **arguments), (side, side))
       for n, (side, name, arguments) in TRANSFORMERS.items()},
}  # fmt: skip
