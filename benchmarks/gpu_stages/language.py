"""Stage `language`: the largest decoder whose top five Hessian eigenvalues fit, each size in a process of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import table
from torch import Tensor, nn
from torch.nn import functional as F

from gpu_stages.steps import OutOfTime, Row, Rows, Settings, Step
from gpu_stages.timing import peak_gib, seconds, shown
from landscape.probes.hessian import Hessian
from landscape.products.hvp_backends import CODES
from landscape.subject.loading.load import measuring
from landscape.subject.subject import Subject

TITLE = "Language models: the largest whose top-5 fits"
ABOUT = """\
Decoders of the GPT-2 architecture at random weights (single precision, tied embedding, 50,257 tokens), one mini-batch
of one sequence of 256 random tokens; top five eigenvalues at the default tol 1e-4 (estimated relative error), at most
80 products, `--hvp double-backward`. Products count those that recompute a basis in half precision. Peak: all memory
allocated on the device, weights included."""
# layers, width, heads
SIZES = {
    "124M": (12, 768, 12), "355M": (24, 1024, 16), "774M": (36, 1280, 20), "1.6B": (48, 1600, 25),
    "2.7B": (32, 2560, 32), "4.2B": (40, 2880, 36), "6.7B": (32, 4096, 32),
}  # fmt: skip
SMALL_SIZES = {"tiny": (1, 8, 2)}
VOCABULARY, CONTEXT, SHORT_VOCABULARY, SHORT_CONTEXT = 50_257, 256, 31, 8
PRODUCTS = 80
LEAST = 30.0  # seconds without which a size is not begun


class Block(nn.Module):
    """Causal self-attention and a perceptron, each after layer norm and beside an identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.mlp(self.before_mlp(x))


class Decoder(nn.Module):
    """Tokens (N, T) to logits (N, T, vocabulary), as GPT-2 (Radford et al. 2019)."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** (0.5 if "out" in name else 0.0))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return F.linear(x, self.tokens.weight)


def steps(settings: Settings) -> Sequence[Step]:
    sizes = SMALL_SIZES if settings.small else SIZES
    return [Step((name,), partial(_in_a_process, name, settings)) for name in sizes]


def _in_a_process(name: str, settings: Settings) -> Row:
    """The row of a size from a process of its own, which leaves nothing allocated whatever happens to it."""
    here = Path(__file__).resolve().parents[1]
    paths = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    left = settings.until - time.monotonic()
    if left < LEAST:
        raise OutOfTime(f"{left:.0f} s are left")
    command = [sys.executable, "-m", "gpu_stages.language", name, str(settings.device)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=min(left, 1e6), env=environment, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OutOfTime(f"not finished after {left:.0f} s") from None
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2] or f"exit status {ended.returncode}")
    row: Row = json.loads(ended.stdout.strip().rpartition("\n")[2])
    return row


def measured(name: str, device: torch.device) -> Row:
    """Products, time and memory of the top five of one size, in this process."""
    small = name in SMALL_SIZES
    vocabulary, context = (SHORT_VOCABULARY, SHORT_CONTEXT) if small else (VOCABULARY, CONTEXT)
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(*{**SIZES, **SMALL_SIZES}[name], vocabulary, context).eval()
    text = torch.randint(vocabulary, (1, context + 1), generator=torch.Generator().manual_seed(0)).to(device)
    subject = Subject(model, [(text[:, :-1], text[:, 1:])], label=name)
    probe = Hessian(top=2 if small else 5, hvp="double-backward", max_products=12 if small else PRODUCTS)
    units = list(probe.plan(subject).units())
    found: list[Any] = []

    def run() -> None:
        with measuring(subject):
            found.extend(probe.sweep(subject, units))

    with measuring(subject):  # chooses kernels and starts libraries
        list(replace(probe, max_products=probe.top + 1).sweep(subject, units))
    took: list[float] = []
    peak = peak_gib(lambda: took.append(seconds(run, device)), device)
    (values,) = found
    return {
        "parameters": subject.size, "products": float(values["matvecs"]), "seconds": took[0], "peak": peak,
        "values": values["eigenvalue"].tolist(), "converged": int(values["converged"].sum()),
        "hvp": CODES[int(values["hvp"])],
    }  # fmt: skip


def tables(rows: Rows) -> str:
    columns = ("size", "parameters", "products", "converged", "s", "s / product", "peak GiB", "weights' copies")
    return table((*columns, "largest eigenvalue"), (
        (name, f"{one['parameters'] / 1e6:.4g} M", f"{one['products']:.0f}",
         f"{one['converged']} of {len(one['values'])}", f"{one['seconds']:.1f}",
         f"{one['seconds'] / one['products']:.4f}", shown(one["peak"], "{:.1f}"),
         shown(one["peak"] * 2**30 / (4 * one["parameters"]), "{:.1f}"), f"{one['values'][0]:.4g}")
        for (name,), one in rows.items()
    ))  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], torch.device(sys.argv[2]))))
