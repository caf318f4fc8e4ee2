"""Run every probe on architectures of timm, torchvision and transformers: its headline number, or its error.

    python benchmarks/zoo.py [--only REGEX] [--samples 16] [--out zoo.md]

Small variants, randomly initialised (seed 0), on 16 handwritten digits at 32 to 64 px in mini-batches of 8; the two
language models on 16 sequences of 16 random tokens. Shows which probes run, and the errors of those that do not apply;
the numbers are those of untrained networks. `trajectory` gets a run of three snapshots: the initial weights and two
random steps.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import header, parser, row

import landscape
from landscape.models.libraries import library
from landscape.plots import headlines
from landscape.probes import PROBES
from landscape.subject.subject import Subject

TINY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
TOKENS = 16


@dataclass(frozen=True)
class Network:
    """A model: its spec, arguments, image size (0: tokens) and, for transformers, entries of its configuration."""

    spec: str
    size: int = 64
    arguments: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


VIT = {"image_size": 32, "patch_size": 8}
NETWORKS = [
    Network("timm:vit_tiny_patch16_224", arguments={"depth": 2}),
    Network("timm:deit_tiny_distilled_patch16_224", arguments={"depth": 2}),
    Network("timm:swin_tiny_patch4_window7_224", arguments={"window_size": 4, "embed_dim": 24, "depths": (2, 2, 2, 2)}),
    Network("timm:convnext_atto"),
    Network("timm:pit_ti_224", 224, {"depth": (1, 1, 1)}),
    Network("timm:mixer_s32_224"),
    Network("timm:beit_base_patch16_224", arguments={"depth": 2, "embed_dim": 96, "num_heads": 3}),
    Network("timm:eva02_tiny_patch14_224", 56, {"depth": 2}),
    Network("timm:resnet10t"),
    Network("torchvision:resnet18"),
    Network("torchvision.models:VisionTransformer", 32, {
        "image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64,
        "num_classes": 10,
    }),
    Network("torchvision.models:SwinTransformer", 32, {
        "patch_size": [4, 4], "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4],
        "num_classes": 10,
    }),
    Network("torchvision:regnet_y_400mf"),
    Network("torchvision:efficientnet_b0"),
    Network("torchvision:mobilenet_v3_small"),
    Network("hf:ViT", 32, config={**TINY, **VIT}),
    Network("hf:Swin", 32, config={
        "image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4,
    }),
    Network("hf:Dinov2", 28, config={
        "image_size": 28, "patch_size": 7, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
    }),
    Network("hf:ResNet", config={"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}),
    Network("hf:ConvNext", config={"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1]}),
    Network("hf:GPT2", 0, config={"vocab_size": 64, "n_positions": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    Network("hf:Llama", 0, config={
        "vocab_size": 64, "max_position_embeddings": TOKENS, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2,
    }),
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "surface": {"resolution": 3},
    "line": {"resolution": 3},
    "hessian": {"top": 1, "tol": 0.05, "ends": 1, "batches": 1},
    "trace": {"samples": 8, "vectors": 4},
    "density": {"samples": 8, "vectors": 1, "steps": 8},
    "attention": {"spectra_images": 2},
    "noise": {"bands": "0.3,0.7"},
    "probe-linear": {"train_samples": "32"},
    "ensemble": {"snapshots": "last:2"},
    "perturbation": {"perturbations": "translate"},
    "attack": {"eps": "2/255", "steps": 2},
    "corruption": {"corruptions": "brightness", "severities": "3"},
}


def folder_of(network: Network, root: Path) -> str:
    """The spec of a model; for transformers, of a folder with the configuration written to it."""
    if not network.config:
        return network.spec
    kind = network.spec.partition(":")[2]
    folder = root / kind
    transformers = library("transformers")
    special = {} if network.size else {"bos_token_id": 0, "eos_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**network.config, **special)
    if network.size:
        config.num_labels = 10
    config.save_pretrained(folder)
    return f"hf:{folder}"


def measured(network: Network, samples: int, root: Path) -> dict[str, str]:
    """One table cell per probe, and the number of parameters."""
    spec, tokens = folder_of(network, root), root / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(0, 64, samples * TOKENS + 1))
    data: dict[str, Any] = {"data": str(tokens)} if not network.size else {"data": "digits", "image_size": network.size}
    options = {**data, "model": spec, "model_arg": dict(network.arguments), "device": "cpu"}
    subject = landscape.load(None, **options, samples=samples, batch_size=8, split="test")
    run = root / f"run-{network.spec.replace(':', '-')}"
    run.mkdir()
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        torch.save(subject.model.state_dict(), run / f"step_{step}.pt")
        with torch.no_grad():
            for p in subject.parameters.values():
                p += 0.01 * torch.randn(p.shape, generator=generator)
    last = landscape.load(run / "step_2.pt", **options, samples=samples, batch_size=8, split="test")
    cells = {"parameters": f"{last.size / 1e6:.2f} M"}
    for probe in PROBES:
        settings: dict[str, Any] = {"run": str(run)} if probe == "trajectory" else dict(OPTIONS.get(probe, {}))
        part = last.first(settings.pop("samples", samples))
        cells[probe] = cell(probe, part, root / "zoo.h5", settings)
    return cells


def cell(probe: str, subject: Subject, out: Path, options: dict[str, Any]) -> str:
    """The first number of a probe's headline, or its error."""
    try:
        found = landscape.measure(probe, subject, out=out, **options)
    except ValueError as error:
        return f"refused: {' '.join(str(error).split())}"
    if not (found["done"] == 1).all():
        return "FAILED: unfinished"
    numbers = headlines.numbers(found)
    shown = [f"{name} {value:.3g}" for name, value in numbers.items() if isinstance(value, float)]
    return shown[0] if shown else "ok"


def main() -> None:
    arguments = parser(__doc__, only="", samples=16)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    names = list(PROBES)
    lines = [header("network", "parameters", *names, "s")]
    notes: dict[str, int] = {}
    for network in NETWORKS:
        if not re.search(options.only, network.spec):
            continue
        start = time.process_time()
        with tempfile.TemporaryDirectory() as root:
            try:
                cells = measured(network, options.samples, Path(root))
            except Exception as error:  # report it in the network's row
                cells = {"parameters": f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        for name, text in cells.items():
            if text.startswith(("refused", "FAILED")):
                cells[name] = f"{text.split(':')[0]} [{notes.setdefault(text, len(notes) + 1)}]"
        found = [cells["parameters"], *(cells.get(name, "") for name in names)]
        lines.append(row(network.spec, *found, f"{time.process_time() - start:.0f}"))
        print(lines[-1], flush=True)
    lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    print("\n".join(lines[-len(notes) - 1 :]))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
