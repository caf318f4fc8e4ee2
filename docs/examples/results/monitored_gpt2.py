"""Train a small GPT-2 on source code with Muon and AdamW, followed by a monitor, for the gallery.

The text is the Python source of installed packages (torch and NumPy); a token is a byte. Muon moves the matrices of the
blocks, AdamW the rest. The monitor has its default settings; plot_9_a_monitored_language_model.py draws its file.

Usage: python docs/examples/results/monitored_gpt2.py [FILE]
"""

import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

import landscape
from landscape.checkpoints.libraries import library

STEPS, BATCH, CONTEXT, CHARACTERS = 3000, 8, 64, 4_000_000
SIZE = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}
NONE = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": 0, "eos_token_id": 0}


def source() -> np.ndarray:
    """The ASCII characters of the modules of two packages, as tokens."""
    parts = [path.read_bytes() for one in (np, torch) for path in sorted(Path(one.__file__).parent.rglob("*.py"))]
    tokens = np.frombuffer(b"\n".join(parts), dtype=np.uint8)
    return tokens[tokens < SIZE["vocab_size"]][:CHARACTERS].astype(np.int64)


def main() -> None:
    """Train and measure."""
    transformers = library("transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZE, **NONE))
    matrices = [p for name, p in model.named_parameters() if name.startswith("transformer.h.") and p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda s: min((s + 1) / 100, 0.5 * (1 + math.cos(math.pi * s / STEPS))))
        for one in optimizers
    ]
    tokens, generator = source(), np.random.default_rng(0)

    def batch() -> dict[str, torch.Tensor]:
        at = generator.integers(0, len(tokens) - CONTEXT, BATCH)
        blocks = torch.from_numpy(np.stack([tokens[i : i + CONTEXT] for i in at]))
        return {"input_ids": blocks, "labels": blocks}

    out = sys.argv[1] if len(sys.argv) > 1 else "muon-gpt2.h5"
    about = "source code of installed packages"
    monitor = landscape.Monitor(
        model, "", batch(), out=out, optimizer=optimizers, data=about, label="GPT-2, Muon + AdamW"
    )
    seconds, start = 0.0, time.perf_counter()
    for step in range(STEPS):
        loss = model(**batch()).loss
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in (*optimizers, *schedules):
            one.step()
        before = time.perf_counter()
        monitor.step()
        seconds += time.perf_counter() - before
        if step % 100 == 99:
            share = seconds / (time.perf_counter() - start - seconds)
            print(f"step {step + 1}: loss {loss.item():.3f}, monitor {100 * share:.2f} % of the training", flush=True)
    monitor.close()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {sum(p.numel() for p in matrices):,} by Muon")


if __name__ == "__main__":
    main()
