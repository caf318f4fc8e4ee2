"""Align architectures of timm, torchvision and transformers: groups found, proof, planted permutations found again.

    python benchmarks/align.py [--only REGEX] [--out align.md]

Untrained networks (seed 0) in small variants, with uniform noise of 0.1 on every parameter and buffer so that initial
values that are all equal hide nothing. A copy gets its units permuted by a random element of all groups and Gaussian
noise of 1 % of each tensor's spread; `recovered` is the share of units that weight matching from one start puts back.
`axes` is the share of positions, over all axes of all parameters, that may move; `proof` the largest relative change of
the outputs under a random permutation of every group; seconds are process time, of recording, proof and matching.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import header, parser, row
from torch import Tensor, nn

from landscape import models
from landscape.models.libraries import library
from landscape.symmetry.matching import match
from landscape.symmetry.networks import jittered, proven, recorded, tensors_of
from landscape.symmetry.permutations import FIXED, Permutations

NOISE = 0.01
TOKENS = 12
TINY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
WORDS = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def timm(name: str, **arguments: Any) -> nn.Module:
    network: nn.Module = library("timm").create_model(name, pretrained=False, **arguments)
    return network


def torchvision(name: str, *arguments: Any, **options: Any) -> nn.Module:
    network: nn.Module = getattr(library("torchvision").models, name)(*arguments, **options)
    return network


def resnext() -> nn.Module:
    kind = library("torchvision").models.resnet
    network: nn.Module = kind.ResNet(kind.Bottleneck, [1, 1, 1, 1], groups=8, width_per_group=4)
    return network


def transformers(kind: str, task: str = "ForImageClassification", **config: Any) -> nn.Module:
    found = library("transformers")
    network: nn.Module = getattr(found, f"{kind}{task}")(getattr(found, f"{kind}Config")(**config))
    return network


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the size of its images, 0 for tokens
    "vit_demo": (lambda: models.build("vit_demo", classes=10, image_size=16), 16),
    "resnet_demo": (lambda: models.build("resnet_demo", classes=10, image_size=16), 16),
    "torchvision resnet18": (partial(torchvision, "resnet18"), 64),
    "torchvision resnet50": (partial(torchvision, "resnet50"), 64),
    "torchvision ResNeXt": (resnext, 64),
    "torchvision densenet": (partial(torchvision, "DenseNet", 8, (2, 2), 16), 64),
    "torchvision mobilenet_v3_small": (partial(torchvision, "mobilenet_v3_small"), 64),
    "torchvision efficientnet_b0": (partial(torchvision, "efficientnet_b0"), 64),
    "torchvision regnet_y_400mf": (partial(torchvision, "regnet_y_400mf"), 64),
    "torchvision shufflenet_v2_x0_5": (partial(torchvision, "shufflenet_v2_x0_5"), 64),
    "torchvision squeezenet1_1": (partial(torchvision, "squeezenet1_1"), 64),
    "torchvision mnasnet0_5": (partial(torchvision, "mnasnet0_5"), 64),
    "torchvision googlenet": (partial(torchvision, "googlenet", aux_logits=False, init_weights=False), 64),
    "torchvision ViT": (partial(torchvision, "VisionTransformer", 32, 8, 2, 2, 32, 64, num_classes=10), 32),
    "torchvision Swin": (
        partial(torchvision, "SwinTransformer", [4, 4], 12, [2, 2], [2, 4], [4, 4], num_classes=10), 32
    ),
    "timm vit_tiny": (partial(timm, "vit_tiny_patch16_224", depth=2), 224),
    "timm pit_ti": (partial(timm, "pit_ti_224", depth=(1, 1, 1)), 224),
    "timm beit": (partial(timm, "beit_base_patch16_224", depth=2, embed_dim=96, num_heads=3), 224),
    "timm eva02": (partial(timm, "eva02_tiny_patch14_224", depth=2, img_size=56), 56),
    "timm swin": (
        partial(
            timm, "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(2, 2, 2, 2)
        ), 64
    ),
    "timm convnext_atto": (partial(timm, "convnext_atto"), 64),
    "timm resnet10t": (partial(timm, "resnet10t"), 64),
    "timm xcit_nano": (partial(timm, "xcit_nano_12_p16_224", depth=2), 224),
    "transformers ViT": (partial(transformers, "ViT", **TINY, image_size=32, patch_size=8), 32),
    "transformers Swin": (
        partial(
            transformers, "Swin", image_size=32, patch_size=2, embed_dim=12, depths=[2, 1], num_heads=[2, 2],
            window_size=4,
        ), 32
    ),
    "transformers Dinov2": (
        partial(
            transformers, "Dinov2", image_size=28, patch_size=7, hidden_size=48, num_hidden_layers=2,
            num_attention_heads=3,
        ), 28
    ),
    "transformers ConvNext": (
        partial(transformers, "ConvNext", hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 2, 1]), 64
    ),
    "transformers GPT2": (
        partial(
            transformers, "GPT2", "LMHeadModel", vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        ), 0
    ),
    "transformers Llama": (
        partial(transformers, "Llama", "ForCausalLM", **WORDS, intermediate_size=48, num_key_value_heads=2), 0
    ),
    "transformers Qwen2": (
        partial(transformers, "Qwen2", "ForCausalLM", **WORDS, intermediate_size=48, num_key_value_heads=2), 0
    ),
    "transformers GPTNeoX": (partial(transformers, "GPTNeoX", "ForCausalLM", **WORDS, intermediate_size=48), 0),
    "transformers OPT": (
        partial(transformers, "OPT", "ForCausalLM", **WORDS, ffn_dim=48, word_embed_proj_dim=32), 0
    ),
    "transformers Bert": (partial(transformers, "Bert", "ForSequenceClassification", vocab_size=64, **TINY), 0),
}  # fmt: skip


def aligned(build: Callable[[], nn.Module], size: int) -> list[str]:
    """One row of the table."""
    torch.manual_seed(0)
    model = build().eval()
    inputs = torch.randn(2, 3, size, size) if size else torch.randint(1, 63, (2, TOKENS))
    with torch.no_grad():
        for name, tensor in jittered(model).items():
            tensors_of(model)[name].copy_(tensor)

    def run(network: nn.Module) -> Any:
        given = inputs.to(next(network.parameters()).dtype) if size else inputs
        found = network(given)
        return getattr(found, "logits", found)

    times = [time.process_time()]
    permutations, unknown = recorded(model, run, inputs)
    times.append(time.process_time())
    proof = proven(permutations, model, run)
    times.append(time.process_time())
    kept = proof.permutations
    own = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    planted = kept.random(np.random.default_rng(1))
    other = {name: _noisy(tensor) for name, tensor in kept.apply(own, planted).items()}
    moved = match(kept, own, other, restarts=1).moved
    times.append(time.process_time())
    recovered = (planted[moved] == kept.identity).mean() if kept.size else float("nan")
    without = ", ".join([*proof.refused, *sorted(unknown)]) or "-"
    return [
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M", str(len(kept.groups)), str(kept.size),
        f"{_share(kept, own):.2f}", f"{proof.error:.0e}", f"{100 * recovered:.1f} %",
        " / ".join(f"{b - a:.1f}" for a, b in pairwise(times)), without,
    ]  # fmt: skip


def _noisy(tensor: Tensor) -> Tensor:
    return tensor + NOISE * tensor.std(unbiased=False) * torch.randn(tensor.shape)


def _share(permutations: Permutations, tensors: dict[str, Tensor]) -> float:
    """Share of the positions along all axes that may move."""
    rows = [units if units.ndim == 1 else units[0] for axes in permutations.places.values() for units in axes.values()]
    moving = sum(int((units != FIXED).sum()) for units in rows)
    return moving / sum(sum(tensor.shape) for tensor in tensors.values())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="", help="regular expression: only these networks")
    arguments.add_argument("--out", type=Path, help="Markdown file")
    given = arguments.parse_args()
    lines = [header("network", "parameters", "groups", "units", "axes", "proof", "recovered", "seconds", "left out")]
    for name, (build, size) in NETWORKS.items():
        if re.search(given.only, name):
            lines.append(row(name, *aligned(build, size)))
            print(lines[-1], flush=True)
    if given.out:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
