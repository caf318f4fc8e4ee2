"""Train a small GPT-2 on English prose and fine-tune it on Python code, for the gallery's basins of a language model.

Both kinds of text come with Python: the manual that `help()` shows (`pydoc_data.topics`), and the code of the standard
library without comments and docstrings. A token is a byte. Writes base/ and tuned/ (`save_pretrained`), and held-out
text as prose.npy and code.npy. Takes about six minutes on one core; plot_8_basins_of_a_language_model.py has the
commands that measured basins.h5 from both.

Usage: python docs/examples/results/small_gpt2.py [FOLDER]
"""

from __future__ import annotations

import ast
import math
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from landscape.checkpoints.libraries import library

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
CONTEXT, BATCH, HELD_OUT = 128, 16, 0.1
STEPS, RATE = {"base": 900, "tuned": 250}, {"base": 3e-3, "tuned": 5e-4}


def prose() -> bytes:
    """The manual of `help()`."""
    from pydoc_data import topics

    return "\n".join(topics.topics.values()).encode("ascii", "ignore")


def code(characters: int) -> bytes:
    """So many characters of the standard library's modules, without comments and docstrings."""
    parts, length = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
                node.body = body or [ast.Pass()]  # type: ignore[assignment]
        parts.append(ast.unparse(tree))
        length += len(parts[-1])
        if length > characters:
            break
    return "\n".join(parts).encode("ascii", "ignore")


def split(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Training part and held-out end, as tokens."""
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    border = int(len(tokens) * (1 - HELD_OUT))
    return tokens[:border], tokens[border:]


def train(model: torch.nn.Module, tokens: np.ndarray, steps: int, rate: float) -> None:
    """AdamW on random blocks, with a warm-up and a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    generator = np.random.default_rng(0)
    model.train()
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)))
        at = generator.integers(0, len(tokens) - CONTEXT - 1, BATCH)
        blocks = torch.from_numpy(np.stack([tokens[i : i + CONTEXT + 1] for i in at]))
        logits = model(blocks[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s", flush=True)
    model.eval()


def main() -> None:
    """Train both networks and write them with the held-out text."""
    transformers = library("transformers")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    folder.mkdir(parents=True, exist_ok=True)
    english = prose()
    texts = {"prose": split(english), "code": split(code(len(english)))}
    for name, (_, held_out) in texts.items():
        np.save(folder / f"{name}.npy", held_out)
    torch.manual_seed(0)
    size = {"n_positions": CONTEXT, "n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 128}
    without = dict.fromkeys(("bos_token_id", "eos_token_id"), 0) | dict.fromkeys(DROPOUTS, 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **without))
    for name, text in (("base", "prose"), ("tuned", "code")):
        train(model, texts[text][0], STEPS[name], RATE[name])
        model.save_pretrained(folder / name)


if __name__ == "__main__":
    main()
