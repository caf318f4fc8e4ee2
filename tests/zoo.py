"""Small, untrained networks of other libraries, built from their configurations; every library is optional."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from foreign import torchvision_models
from torch import nn

Size = tuple[int, int]


def _torchvision(build: Callable[[Any], nn.Module]) -> nn.Module:
    return build(torchvision_models())


def _timm(name: str, **arguments: Any) -> nn.Module:
    torchvision_models()  # without its compiled operators timm cannot be imported
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **arguments)
    return model


def _timm_class(module: str, name: str, **arguments: Any) -> nn.Module:
    torchvision_models()
    found = pytest.importorskip(f"timm.models.{module}", exc_type=(ImportError, RuntimeError))
    model: nn.Module = getattr(found, name)(num_classes=5, **arguments)
    return model


def _transformers(name: str, **arguments: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**arguments)
    model: nn.Module = getattr(transformers, f"{name}ForImageClassification")(config)
    return model


TINY = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
# name -> (how it is built, size of its images)
ZOO: dict[str, tuple[Callable[[], nn.Module], Size]] = {
    "torchvision resnet": (
        partial(_torchvision, lambda tv: tv.ResNet(tv.resnet.Bottleneck, [1, 2, 1, 1], num_classes=5)),
        (64, 64),
    ),
    "torchvision vit": (
        partial(_torchvision, lambda tv: tv.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)),
        (32, 32),
    ),
    "torchvision swin": (
        partial(
            _torchvision, lambda tv: tv.SwinTransformer([4, 4], 12, [2, 2], [2, 4], [4, 4], num_classes=5)
        ),
        (32, 32),
    ),
    "torchvision swin v2": (
        partial(
            _torchvision,
            lambda tv: tv.SwinTransformer(
                [4, 4], 12, [1, 1], [2, 2], [4, 4], num_classes=5,
                block=tv.swin_transformer.SwinTransformerBlockV2,
                downsample_layer=tv.swin_transformer.PatchMergingV2,
            ),
        ),
        (32, 32),
    ),
    "torchvision convnext": (
        partial(
            _torchvision,
            lambda tv: tv.ConvNeXt(
                [tv.convnext.CNBlockConfig(8, 16, 1), tv.convnext.CNBlockConfig(16, None, 2)], num_classes=5
            ),
        ),
        (32, 32),
    ),
    "torchvision regnet": (partial(_torchvision, lambda tv: tv.RegNet(
        tv.regnet.BlockParams([1, 1, 2], [8, 16, 24], [8, 8, 8], [1.0, 1.0, 1.0], [2, 2, 2], 0.25), num_classes=5
    )), (64, 64)),
    "torchvision efficientnet": (
        partial(
            _torchvision,
            lambda tv: tv.EfficientNet(
                [
                    tv.efficientnet.MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0),
                    tv.efficientnet.MBConvConfig(4, 3, 2, 8, 16, 2, 1.0, 1.0),
                    tv.efficientnet.MBConvConfig(4, 5, 1, 16, 24, 2, 1.0, 1.0),
                ],
                0.0, num_classes=5,
            ),
        ),
        (32, 32),
    ),
    "timm vit": (partial(_timm, "vit_tiny_patch16_224", img_size=64, depth=2), (64, 64)),
    "timm vit, oblong, no class token": (
        partial(
            _timm, "vit_tiny_patch16_224", img_size=(64, 32), depth=1, class_token=False, global_pool="avg"
        ),
        (64, 32),
    ),
    "timm vit with registers": (partial(_timm, "vit_small_patch14_reg4_dinov2", img_size=56, depth=1), (56, 56)),
    "timm deit, distilled": (partial(_timm, "deit_tiny_distilled_patch16_224", img_size=64, depth=2), (64, 64)),
    "timm swin": (
        partial(
            _timm, "swin_tiny_patch4_window7_224", img_size=56, window_size=7, depths=(2, 2), num_heads=(2, 4),
            embed_dim=24,
        ),
        (56, 56),
    ),
    "timm convnext": (partial(_timm, "convnext_tiny", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)), (64, 64)),
    "timm pit": (
        partial(
            _timm_class, "pit", "PoolingVisionTransformer", img_size=32, patch_size=8, stride=4,
            stem_type="overlap", base_dims=(8, 8), depth=(1, 1), heads=(2, 4), mlp_ratio=2,
        ),
        (32, 32),
    ),
    "timm mixer": (
        partial(_timm_class, "mlp_mixer", "MlpMixer", img_size=32, patch_size=8, num_blocks=2, embed_dim=12), (32, 32)
    ),
    "timm beit": (
        partial(_timm, "beit_base_patch16_224", img_size=64, depth=1, embed_dim=48, num_heads=3), (64, 64)
    ),
    "timm eva": (partial(_timm, "eva02_tiny_patch14_224", img_size=56, depth=1), (56, 56)),
    "transformers vit": (partial(_transformers, "ViT", **TINY, image_size=32, patch_size=8), (32, 32)),
    "transformers deit": (partial(_transformers, "DeiT", **TINY, image_size=32, patch_size=8), (32, 32)),
    "transformers swin": (
        partial(
            _transformers, "Swin", image_size=32, patch_size=2, embed_dim=12, depths=[2, 1], num_heads=[2, 2],
            window_size=4,
        ),
        (32, 32),
    ),
    "transformers resnet": (
        partial(_transformers, "ResNet", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2]), (32, 32)
    ),
    "transformers dinov2": (
        partial(
            _transformers, "Dinov2", hidden_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28,
            patch_size=7,
        ),
        (28, 28),
    ),
    "transformers dinov2 with registers": (
        partial(
            _transformers, "Dinov2WithRegisters", hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
            image_size=28, patch_size=7,
        ),
        (28, 28),
    ),
}  # fmt: skip
