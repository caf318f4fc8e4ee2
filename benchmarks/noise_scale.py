"""Coverage of the intervals of `landscape noise-scale` on a linear regression, whose noise scales are known.

    python benchmarks/noise_scale.py [--redraws 1000] [--check 10]

Inputs are normal with variances 1, 1/2, 1/3, ..., the weights a distance off the true ones, so that G = C d,
S = (d' C d + noise) C + C d d' C and H = C in closed form. The numbers of every group are computed by NumPy from the
gradients x (x'd - e) and Hessians x x' of the samples; in the first `--check` redraws they must be those of the probe.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from measuring import parser, row
from torch import Tensor, nn

from landscape.probe import Values
from landscape.probes.noise_scale import NoiseScale, random_order
from landscape.results.noise_scale import summaries
from landscape.subject.subject import Subject

# Features, distance of every weight from the true one, samples, groups.
SETTINGS = ((20, 1.0, 1024, 32), (20, 0.3, 1024, 32), (20, 0.18, 1024, 32), (20, 0.3, 1024, 16), (20, 0.3, 8192, 32),
            (100, 0.2, 2048, 32), (20, 0.1, 1024, 32), (100, 0.05, 1024, 32))  # fmt: skip
KINDS = ("simple", "curvature")


def truth(features: int, off: float) -> dict[str, float]:
    """Both noise scales in closed form."""
    c, d = np.diag(1 / np.arange(1.0, features + 1)), np.full(features, off)
    gradient = c @ d
    covariance = (d @ c @ d + 1) * c + np.outer(gradient, gradient)
    return {
        "simple": np.trace(covariance) / (gradient @ gradient),
        "curvature": np.trace(c @ covariance) / (gradient @ c @ gradient),
    }


def redraw(features: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (samples, features) and targets at the true weights 0."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(samples, features)) / np.sqrt(np.arange(1, features + 1)), rng.normal(size=samples)


def by_numpy(inputs: np.ndarray, targets: np.ndarray, off: float, groups: int) -> dict[str, np.ndarray]:
    """What the probe measures in every group."""
    size, features = len(inputs) // (4 * groups), inputs.shape[1]
    x = inputs[: 4 * groups * size].reshape(groups, 4, size, features)
    errors = x.sum(axis=3) * off - targets[: 4 * groups * size].reshape(groups, 4, size)
    quarters = (x * errors[..., None]).mean(axis=2)
    means = quarters.mean(axis=1)
    noise = size / 3 * ((quarters - means[:, None]) ** 2).sum(axis=(1, 2))

    def product(quarter: slice, vectors: np.ndarray) -> np.ndarray:
        """H v of some quarters of every group with a vector per group."""
        part = x[:, quarter].reshape(groups, -1, features)
        along = np.einsum("gsf,gf->gs", part, vectors)
        return np.einsum("gsf,gs->gf", part, along) / part.shape[1]

    curved = np.zeros(groups)
    for a, c in ((0, 2), (2, 0)):
        difference = quarters[:, a] - quarters[:, a + 1]
        curved += size / 4 * (difference * product(slice(c, c + 2), difference)).sum(axis=1)
    offsets = random_order(groups - 1, 0)
    places = (np.arange(groups)[:, None] + offsets) % groups
    half = len(offsets) // 2
    turned = product(slice(None), means[places[:, :half]].mean(axis=1)) @ means.T
    kept = np.full((groups, groups), math.nan)
    np.put_along_axis(kept, places[:, half:], np.take_along_axis(turned, places[:, half:], axis=1), axis=1)
    return {"inner": means @ means.T, "noise": noise, "curved_inner": kept, "curved_noise": curved,
            "done": np.ones(groups)}  # fmt: skip


def by_probe(inputs: np.ndarray, targets: np.ndarray, off: float, groups: int) -> list[Values]:
    """The same, measured by the probe."""

    def losses(outputs: Tensor, wanted: Tensor) -> Tensor:
        return 0.5 * (outputs.flatten() - wanted).square()

    model = nn.Linear(inputs.shape[1], 1, bias=False).double().eval()
    nn.init.constant_(model.weight, off)
    subject = Subject(model, [(torch.from_numpy(inputs), torch.from_numpy(targets))], losses=losses)
    probe = NoiseScale(groups=groups)
    return list(probe.sweep(subject, list(probe.plan(subject).units())))


def agree(found: dict[str, np.ndarray], measured: list[Values]) -> bool:
    names = [name for name in found if name != "done"]
    return all(np.allclose(found[name], [one[name] for one in measured], rtol=1e-8, equal_nan=True) for name in names)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--redraws", type=int, default=1000)
    arguments.add_argument("--check", type=int, default=10)
    given = arguments.parse_args()
    print(row("features", "off", "samples", "groups", "noise scale", "true value", "resolved",
              "covered, of those", "median width / value", "covered, of all", "as the probe"))  # fmt: skip
    print(row(*["---"] * 11))
    for features, off, samples, groups in SETTINGS:
        known, same = truth(features, off), True
        found = []
        for seed in range(given.redraws):
            drawn = redraw(features, samples, seed)
            values = by_numpy(*drawn, off, groups)
            if seed < given.check:
                same &= agree(values, by_probe(*drawn, off, groups))
            found.append(summaries(values))
        for kind in KINDS:
            low, high, resolved = (
                np.array([one[f"{kind}_{what}"] for one in found]) for what in ("low", "high", "resolved")
            )
            inside, bounded = (low <= known[kind]) & (known[kind] <= high), resolved == 1
            width = np.median((high - low)[bounded]) / known[kind] if bounded.any() else math.nan
            covered = f"{inside[bounded].mean():.1%}" if bounded.sum() >= 100 else "-"
            print(row(features, off, samples, groups, kind, f"{known[kind]:.4g}", f"{bounded.mean():.0%}",
                      covered, f"{width:.2f}", f"{inside.mean():.1%}", "yes" if same else "NO"),
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
