"""What a monitor adds to a training: two trainings from one start, with and without it, step by step in turns.

    python benchmarks/monitor.py [--network vit|gpt2] [--every 100] [--pairs 5] [--overhead 0.02] [--data digits]

The demo ViT with mini-batches of 32 images, or a GPT-2 of 10.8 M parameters on random bytes, 4 x 128 of them per
mini-batch; AdamW, one thread, process time. Every pair is of `--every` steps, with one row if the budget allows it; the
first measurement, at the start, is not among them. "A row" is the median of those without eigenvalues by the monitor's
own clock, "added" and "share" the median over the pairs of all that it adds.
"""

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import parser, seconds, table
from torch import Tensor, nn
from torch.nn import functional as F

import landscape
from landscape import models
from landscape.checkpoints.libraries import library
from landscape.data.dataset import Batches
from landscape.monitoring import budget, monitor
from landscape.training.training_set import splits

Draw = Callable[[np.random.Generator], Any]
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def vit(data: str) -> tuple[nn.Module, Draw, Callable[..., Tensor]]:
    images, _ = splits(data, root=None)
    network = models.build("vit_demo", classes=images.classes, image_size=images.size)
    return network, lambda g: Batches(images.take(g.integers(0, len(images), 32)), 32)[0], F.cross_entropy


def gpt2(_: str) -> tuple[nn.Module, Draw, str]:
    transformers = library("transformers")
    size = {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 128, "vocab_size": 256}
    none = dict.fromkeys(DROPOUTS, 0.0) | dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **none))

    def draw(generator: np.random.Generator) -> dict[str, Tensor]:
        tokens = torch.from_numpy(generator.integers(0, 64, (4, 128)))
        return {"input_ids": tokens, "labels": tokens}

    return network, draw, ""


class Training:
    """One of the two trainings."""

    def __init__(self, network: nn.Module, draw: Draw, rate: float = 1e-3) -> None:
        self.network, self.draw = copy.deepcopy(network).train(), draw
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=rate)
        self.generator, self.monitor = np.random.default_rng(0), None

    def turn(self, steps: int) -> None:
        for _ in range(steps):
            batch = self.draw(self.generator)
            self.optimizer.zero_grad()
            loss = (
                self.network(**batch).loss
                if isinstance(batch, dict)
                else F.cross_entropy(self.network(batch[0]), batch[1])
            )
            loss.backward()
            self.optimizer.step()
            if self.monitor is not None:
                self.monitor.step()


def main() -> None:
    """Train both and print the share of every pair and the medians."""
    arguments = parser(__doc__, network="vit", every=100, pairs=5, overhead=0.02, data="digits").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network, draw, loss = {"vit": vit, "gpt2": gpt2}[arguments.network](arguments.data)
    alone, watched = Training(network, draw), Training(network, draw)
    elsewhere = 0.0  # time of the other training, which is no time of the monitored one
    monitor.Budget = functools.partial(budget.Budget, clock=lambda: budget.time.process_time() - elsewhere)
    fixed, out = draw(np.random.default_rng(1)), Path(tempfile.mkdtemp()) / "run.h5"

    def begin() -> None:
        watched.monitor = landscape.Monitor(
            watched.network, loss, fixed, every=arguments.every, overhead=arguments.overhead, out=out
        )

    first, pairs = seconds(begin), list[tuple[float, float]]()
    for pair in range(arguments.pairs):
        turns, spent = [functools.partial(one.turn, 1) for one in (watched, alone)], [0.0, 0.0]
        for _ in range(arguments.every):
            for i in (0, 1) if pair % 2 == 0 else (1, 0):
                spent[i] += (taken := seconds(turns[i]))
                elsewhere += taken * i
        pairs.append((spent[0], spent[1]))
        print(f"pair {pair + 1}: {100 * (spent[0] / spent[1] - 1):+.2f} %", flush=True)
    with_it, without = np.array(pairs).T
    data = watched.monitor.data()
    rows = data.isel(step=np.isnan(data["eigenvalue"].values[:, 0]))
    step, added = float(np.median(without)) / arguments.every, float(np.median(with_it / without - 1))
    same = all(map(torch.equal, watched.network.parameters(), alone.network.parameters()))
    cells = {
        "network": arguments.network, "parameters": f"{sum(p.numel() for p in network.parameters()):,}",
        "step": f"{step:.3f} s", "first, steps": f"{first / step:.0f}",
        "turns": arguments.pairs, "rows": rows.sizes["step"],
        "with eigenvalues": data.sizes["step"] - 1 - rows.sizes["step"],
        "passes": f"{float(rows['critical_passes'].mean()):.2f}",
        "a row, steps": f"{float(rows['seconds'].median()) / step:.2f}",
        "added, steps": f"{added * arguments.every:.2f}", "share": f"{100 * added:.2f} %", "weights equal": same,
    }  # fmt: skip
    print(table(list(cells), [list(cells.values())]))


if __name__ == "__main__":
    main()
