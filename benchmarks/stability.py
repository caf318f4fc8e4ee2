"""Instabilities of small trainings on digits as the monitor sees them: loss spikes, and edges of stability.

    python benchmarks/stability.py [--part spikes] [--seeds 10]
    python benchmarks/stability.py --part edges --seeds 5

Spikes: a tanh MLP 64-48-48-10, 20 % random labels, mini-batches of 64, a warmup of 100 steps, rows at every 4th. The
rate jumps at a random step from 400 to 800 by the smallest of 2^1.5, 2^2, 2^2.5, ... that gives a spike: three
successive losses within 200 steps that exceed the mean of the 200 before the jump by 7 standard deviations. "Ahead" are
the steps from the first alarm after the jump to the first of them, 0 without; "before" counts alarms before the jump,
"smaller" runs with an alarm after the next smaller jump, which gives no spike, and "sound" those of 2,000 steps with
one, of which odd seeds have a cosine schedule.

Edges: 64-50-50-10 without biases, half the squared error of 300 digits at once; sharpness over its threshold. Steepest
descent, -rate |g|* d with d of norm 1 and g'd = |g|*, has the threshold 2 / rate (arXiv 2603.05002): d are signs in the
largest entry, and polar factors of layers, as of Muon without momentum, in the largest singular value.
"""

import copy
import itertools
import logging
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import parser, table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Muon

import landscape
from landscape.studies.claims import over_seeds
from landscape.studies.edge_of_stability import half_squared_error, plateau, ratios
from landscape.subject.optimizer_rules import Norm, Rule

SOUND, WITHIN = 2000, 200
PIXELS, DIGITS = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
INPUTS = (PIXELS.float() / 16 - 0.305) / 0.376  # mean and standard deviation of all pixels


class Lion(SGD):
    """Chen et al., arXiv 2302.06675, without weight decay."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            p -= self.param_groups[0]["lr"] * (0.9 * momentum + 0.1 * p.grad).sign()
            momentum.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "SGD, momentum 0.9, rate 0.05": lambda w, b: [SGD([*w, *b], lr=0.05, momentum=0.9)],
    "SGD, rate 0.1": lambda w, b: [SGD([*w, *b], lr=0.1)],
    "AdamW, rate 0.001": lambda w, b: [AdamW([*w, *b], lr=1e-3)],
    "Lion, rate 0.0003": lambda w, b: [Lion([*w, *b], lr=3e-4)],
    "Muon, rate 0.02, beside AdamW, 0.001": lambda w, b: [Muon(w, lr=0.02), AdamW(b, lr=1e-3)],
}


class Training:
    """A training and its losses, each that of a mini-batch after so many updates."""

    def __init__(self, optimizer: str, seed: int) -> None:
        self.generator, self.losses = np.random.default_rng(seed), list[float]()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 10))
        random = torch.from_numpy(self.generator.integers(0, 10, len(DIGITS)))
        self.targets = torch.where(torch.from_numpy(self.generator.random(len(DIGITS)) < 0.2), random, DIGITS)
        self.optimizers = OPTIMIZERS[optimizer](*([p for p in self.model.parameters() if p.ndim == n] for n in (2, 1)))
        self.rates = [one.param_groups[0]["lr"] for one in self.optimizers]

    def steps(self, factors: Iterable[float], after: Any = lambda: None) -> None:
        """Updates with these multiples of the learning rate, and a call `after` each."""
        for factor in factors:
            rows = torch.from_numpy(self.generator.integers(0, len(INPUTS), 64))
            self.model.zero_grad()
            loss = F.cross_entropy(self.model(INPUTS[rows]), self.targets[rows])
            loss.backward()
            for one, rate in zip(self.optimizers, self.rates, strict=True):
                one.param_groups[0]["lr"] = rate * factor * min(1.0, (len(self.losses) + 1) / 100)
                one.step()
            self.losses.append(loss.item())
            after()


def alarms(optimizer: str, seed: int, factors: Iterable[float]) -> list[int]:
    """The steps with an alarm, of a monitor that measures 64 of the samples."""
    training, how = Training(optimizer, seed), {"every": 4, "out": Path(tempfile.mkdtemp()) / "run.h5", "noise": 0}
    with landscape.Monitor(training.model, F.cross_entropy, (INPUTS[:64], training.targets[:64]), **how) as monitor:
        monitor._budget.allows = lambda kind, interval: kind == "row"  # type: ignore[method-assign]
        training.steps(factors, monitor.step)
        data = monitor.data()
    return [int(step) for step in data["step"].values[data["alarm"].values == 1]]


def planted(optimizer: str, seed: int) -> tuple[float, int, int, int, int]:
    """The jump, steps to its spike, from the first alarm to it, alarms before, and those of the next smaller jump."""
    jump, training = int(np.random.default_rng([seed, 1]).integers(400, 801)), Training(optimizer, seed)
    training.steps([1.0] * jump)
    high = np.mean(training.losses[-WITHIN:]) + 7 * np.std(training.losses[-WITHIN:])
    for factor in (2 ** (k / 2) for k in itertools.count(3)):
        trial = copy.deepcopy(training)
        trial.steps([factor] * WITHIN)
        above = ~(np.array(trial.losses[jump:]) <= high)  # a loss that is not finite is
        if (after := next((k for k in range(WITHIN - 2) if above[k : k + 3].all()), -1)) >= 0:
            break
    rests = [factor] * after, [factor / 2**0.5] * WITHIN
    found, smaller = (alarms(optimizer, seed, [1.0] * jump + rest) for rest in rests)
    ahead = next((jump + after - step for step in found if step > jump), 0)
    return factor, after, ahead, sum(step <= jump for step in found), len(smaller)


def spikes(seeds: int) -> None:
    """Print a row of the table per optimiser, for those after the first from half as many seeds."""
    rates = [1.0] * SOUND, [0.5 + 0.5 * math.cos(math.pi * t / SOUND) for t in range(SOUND)]
    columns = ("optimiser", "seeds", "jump", "spike after", "ahead", "by 20 or more", "before", "smaller", "sound")
    for name, count in zip(OPTIMIZERS, [seeds] + [seeds // 2] * 4, strict=True):
        jumps, after, ahead, early, smaller = zip(*(planted(name, seed) for seed in range(count)), strict=True)
        runs = (sum(map(bool, some)) for some in (smaller, [alarms(name, s, rates[s % 2]) for s in range(count)]))
        cells = (name, count, *(f"{min(some):.3g} to {max(some):.3g}" for some in (jumps, after)), ahead)
        print(table(columns, [(*cells, sum(one >= 20 for one in ahead), sum(early), *runs)]), flush=True)


class Steepest(SGD):
    """Steepest descent in the largest entry, or in the largest singular value of a layer."""

    def __init__(self, weights: Iterable[Tensor], lr: float, norm: Norm) -> None:
        super().__init__(weights, lr=lr)
        self.landscape_rule = Rule("steepest descent", norm=norm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,), spectral = self.param_groups, self.landscape_rule.norm == "spectral"
        parts = [torch.linalg.svd(p.grad, full_matrices=False) for p in group["params"] if spectral]
        units = [u @ v for u, _, v in parts] or [p.grad.sign() for p in group["params"]]
        dual = sum((p.grad * unit).sum() for p, unit in zip(group["params"], units, strict=True))
        for p, unit in zip(group["params"], units, strict=True):
            p -= group["lr"] * dual * unit


EDGES = {
    "gradient descent, rate 0.15": lambda w: SGD(w, lr=0.15),
    "Adam, rate 0.001": lambda w: Adam(w, lr=1e-3, betas=(0.9, 0.99), eps=1e-7),
    "sign descent, rate 0.0001": lambda w: Steepest(w, 1e-4, "elementwise"),
    "spectral descent, rate 0.03": lambda w: Steepest(w, 0.03, "spectral"),
}


def followed(name: str, seed: int) -> np.ndarray:
    """Sharpness over its threshold at every tenth step."""
    torch.manual_seed(seed)
    layers = [part for n, m in ((64, 50), (50, 50), (50, 10)) for part in (nn.Linear(n, m, bias=False), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])
    optimizer, batch = EDGES[name](model.parameters()), (INPUTS[:300], F.one_hot(DIGITS[:300], 10).float())
    how: dict[str, Any] = {"out": Path(tempfile.mkdtemp()) / "run.h5", "noise": 0, "tol": 1e-3, "overhead": math.inf}
    with landscape.Monitor(model, half_squared_error, batch, every=10, optimizer=optimizer, **how) as monitor:
        for _ in range(1500):
            optimizer.zero_grad()
            half_squared_error(model(batch[0]), batch[1]).mean().backward()
            optimizer.step()
            monitor.step()
        data = monitor.data()
    if isinstance(optimizer, Steepest):
        return np.asarray(data["norm_sharpness"].values[1:] * optimizer.param_groups[0]["lr"] / 2)
    return ratios(data, "preconditioned")


def edges(seeds: int) -> None:
    """Print first ratios, and means from the first that reaches 1 to the end, with the interval over seeds."""
    for name in EDGES:
        series = [followed(name, seed) for seed in range(seeds)]
        means = [plateau(one).mean() if plateau(one).size else math.nan for one in series]
        first, each = (", ".join(f"{one:.3f}" for one in some) for some in ([s[0] for s in series], means))
        print(table(["optimiser", "first", "mean", "per seed"], [(name, first, over_seeds(means), each)]), flush=True)


if __name__ == "__main__":
    arguments = parser(__doc__, part="spikes", seeds=10).parse_args()
    torch.set_num_threads(1)
    logging.getLogger("landscape").setLevel(logging.ERROR)
    {"spikes": spikes, "edges": edges}[arguments.part](arguments.seeds)
