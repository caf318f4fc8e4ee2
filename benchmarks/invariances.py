"""Which headline numbers of the core probes stay the same when the function does, or the data but for their order.

    python benchmarks/invariances.py [--only trace] [--networks relu]   # prints what is not as declared; exit code 1
    python benchmarks/invariances.py --write                            # writes benchmarks/INVARIANCES.md

Every change is made on three networks in float64: an MLP with ReLU, a ResNet with batch norm, a ViT. `=` is declared of
numbers that stay the same, to 1e-5 relative (1e-3 in float32), and `~` of estimates by other random vectors, which stay
within four standard errors of the difference. Nothing is declared of an empty cell: the number may change.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from certificates import CASES, Case, network, population
from measuring import header, parser, row
from torch import Tensor

import landscape
from landscape.probes import CORE, PROBES
from landscape.results.headline_numbers import Measured, numbers

PAGE = Path(__file__).parent / "INVARIANCES.md"
NETWORKS = ("relu", "resnet", "vit")
SAMPLES, BATCH = 48, 8
EPS = 1e-5  # of batch norm
FEWER = {"vectors": 8, "groups": 6}  # than the certificates take
Weights = dict[str, Tensor]


class Pair(NamedTuple):
    """Units between two layers: what makes them (by rows), what reads them (by columns), and how many there are."""

    made: tuple[str, ...]
    read: str
    scaled: tuple[str, ...] = ()  # what makes them behind batch norm; `made` where there is none


def _pairs(name: str) -> list[Pair]:
    if name == "relu":
        return [Pair((f"{i}.weight", f"{i}.bias"), f"{i + 2}.weight") for i in (1, 3)]
    blocks = [f"layer{stage}.{block}" for stage in (1, 2) for block in (0, 1)]
    norm = ("weight", "bias", "running_mean", "running_var")
    return [
        Pair((f"{b}.conv1.weight", *(f"{b}.bn1.{part}" for part in norm)), f"{b}.conv2.weight",
             (f"{b}.bn1.weight", f"{b}.bn1.bias"))
        for b in blocks
    ]  # fmt: skip


def _times(values: Tensor, factors: Tensor, axis: int) -> Tensor:
    return values * factors.view([-1 if dim == axis else 1 for dim in range(values.dim())])


def _factors(count: int, whole: bool) -> Tensor:
    return torch.full((count,), 3.0) if whole else torch.linspace(0.5, 2, count)


def rescaled(name: str, weights: Weights, *, whole: bool = False) -> Weights:
    """Multiply units (or whole layers) and divide what reads them: ReLU between, or nothing (values of attention)."""
    if name == "vit":
        for block in (0, 1):
            qkv, projection = f"blocks.{block}.attention.qkv.weight", f"blocks.{block}.attention.projection.weight"
            c = _factors(12, whole)
            weights[qkv] = torch.cat([weights[qkv][:24], _times(weights[qkv][24:], c, 0)])
            weights[projection] = _times(weights[projection], 1 / c, 1)
        return weights
    for pair in _pairs(name):
        c = _factors(weights[pair.read].shape[1], whole)
        for made in pair.scaled or pair.made:
            weights[made] = _times(weights[made], c, 0)
        weights[pair.read] = _times(weights[pair.read], 1 / c, 1)
    return weights


def before_norm(name: str, weights: Weights) -> Weights:
    """Multiply filters whose batch norm divides again (its stored statistics follow)."""
    for pair in _pairs(name):
        c = _factors(weights[pair.read].shape[1], whole=False)
        filters, _, _, mean, variance = pair.made
        weights[filters], weights[mean] = _times(weights[filters], c, 0), c * weights[mean]
        weights[variance] = c**2 * (weights[variance] + EPS) - EPS
    return weights


def permuted(name: str, weights: Weights) -> Weights:
    """Permute hidden units, of a ViT also heads."""
    draw = torch.Generator().manual_seed(5)
    pairs = [Pair((f"blocks.{b}.mlp.0.weight", f"blocks.{b}.mlp.0.bias"), f"blocks.{b}.mlp.3.weight") for b in (0, 1)]
    for pair in pairs if name == "vit" else _pairs(name):
        order = torch.randperm(weights[pair.read].shape[1], generator=draw)
        for made in pair.made:
            weights[made] = weights[made][order]
        weights[pair.read] = weights[pair.read][:, order]
    for block in (0, 1) if name == "vit" else ():
        qkv, projection = f"blocks.{block}.attention.qkv.weight", f"blocks.{block}.attention.projection.weight"
        weights[qkv] = weights[qkv].view(3, 2, 6, 12).flip(1).reshape(36, 12)
        weights[projection] = weights[projection].view(12, 2, 6).flip(1).reshape(12, 12)
    return weights


def _head(weights: Weights) -> list[str]:
    return list(weights)[-2:]


def louder(name: str, weights: Weights) -> Weights:
    """Double the logits."""
    return {**weights, **{key: 2 * weights[key] for key in _head(weights)}}


def relabelled(name: str, weights: Weights) -> Weights:
    """Permute the classes of the head as `_labels` does those of the data."""
    return {**weights, **{key: weights[key].roll(1, 0) for key in _head(weights)}}


Data = tuple[Tensor, Tensor]


def _shuffled(x: Tensor, y: Tensor) -> Data:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    return x[order], y[order]


@dataclass(frozen=True)
class Change:
    """One change of networks or data."""

    words: str
    weights: Callable[[str, Weights], Weights] | None = None
    data: Callable[[Tensor, Tensor], Data] | None = None
    batch: int = BATCH
    dtype: torch.dtype = torch.float64
    first: bool = True  # whether the network itself changes too, or only those it is compared with
    networks: Sequence[str] = NETWORKS


CHANGES: Mapping[str, Change] = {
    "filters": Change("filters rescaled", rescaled),
    "normed": Change("filters before batch norm rescaled", before_norm, networks=("resnet",)),
    "layers": Change("whole layers rescaled", lambda name, weights: rescaled(name, weights, whole=True)),
    "units": Change("units and heads permuted", permuted),
    "other": Change("units of the other network permuted", permuted, first=False),
    "logits": Change("logits doubled", louder),
    "labels": Change("classes permuted", relabelled, lambda x, y: (x, (y + 1) % 3)),
    "order": Change("samples in another order", data=_shuffled),
    "batches": Change("mini-batches of half the size", batch=BATCH // 2),
    "copies": Change("every sample twice", data=lambda x, y: (torch.cat([x, x]), torch.cat([y, y]))),
    "float32": Change("float32", dtype=torch.float32),
}


def measured(case: Case, name: str, change: Change | None = None) -> dict[str, Measured]:
    """Numbers of a probe on a network, changed or not."""
    x, y = (part[:SAMPLES] for part in population())
    others = (1, 2) if case.beside == "members" else (1,) if case.beside else ()
    models = [copy.deepcopy(network(name, seed)) for seed in (0, *others)]
    if change and change.data:
        x, y = change.data(x, y)
    for at, model in enumerate(models) if change else ():
        if change.weights and (at or change.first):
            model.load_state_dict(change.weights(name, dict(model.state_dict())))
    dtype = change.dtype if change else torch.float64
    batch = change.batch if change else BATCH
    subject = landscape.load(models[0].to(dtype), data=(x.to(dtype), y), batch_size=batch, device="cpu")
    beside: dict[str, Any] = {}
    if case.beside:
        rest = [model.to(dtype) for model in models[1:]]
        beside[case.beside] = rest if case.beside == "members" else rest[0]
    fewer = {name: value for name, value in FEWER.items() if name in case.options}
    options = {**case.options, **fewer, **beside}
    data = landscape.measure(case.probe, subject, out=None, quiet=True, **options)
    return {one.name: one for _, one in numbers(data) if re.fullmatch(case.certifies, one.name)}


WEIGHTS, DATA = {"filters", "normed", "layers", "units", "labels"}, {"order", "batches", "copies", "float32"}
VECTORS = {"units", "labels", "copies"}  # which get other random vectors


@dataclass(frozen=True)
class Declared:
    """Changes under which the numbers of a case stay the same, or estimate the same."""

    case: str
    numbers: str  # regular expression
    same: Set[str]
    estimates: Set[str] = frozenset()


DECLARED = (
    Declared("surface|line", "loss", WEIGHTS | DATA),
    Declared("surface|line", "accuracy", WEIGHTS | DATA | {"logits"}),
    Declared("surface.*|line|line-basin", ".*accuracy", DATA | {"normed", "layers", "logits"}),  # directions are drawn
    Declared("surface.*|line|line-basin", ".*", DATA | {"normed", "layers"}),
    Declared("line-between", "accuracy barrier", WEIGHTS | DATA | {"logits"}),
    Declared("line-between", ".*", WEIGHTS | DATA),
    Declared("barriers", ".*", WEIGHTS | {"float32"}),  # batch norm's statistics are of the first mini-batches
    Declared("align", "barrier before", {"filters", "layers", "units", "labels", "float32"}),
    Declared("align", "similarity", {"units", "labels"} | DATA),
    Declared("align", ".*", {"units", "labels", "float32"}),  # the matching depends on the size of weights
    Declared("hessian", ".*", {"units", "labels", "copies", "float32"}),
    Declared("trace|trace-one-batch", ".*", {"float32"}, VECTORS),
    Declared("trace-blocks", ".*", {"float32"}, VECTORS),
    Declared("density", "mean|.*heterogeneity", DATA, {"units", "labels"}),
    Declared("density", ".*", DATA),  # the ends depend on the first vector
    Declared("convexity", ".*", DATA),
    Declared("flatness-batches", "adaptive.*", WEIGHTS | {"copies", "float32"}),
    Declared("flatness-noise", "adaptive.*", {"filters", "normed", "layers", "float32"}, VECTORS),
    Declared("flatness-noise", ".*", {"float32"}, VECTORS),
    Declared("flatness-samples", "relative-flatness", (WEIGHTS - {"filters"}) | DATA),
    Declared("flatness-samples", "fisher-rao", WEIGHTS | DATA),
    Declared("flatness-vectors", "trace|frobenius", DATA, {"units", "labels"}),
    Declared("flatness-vectors", ".*", DATA),
    Declared("flatness-batches|step", ".*", {"units", "labels", "copies", "float32"}),
    Declared("noise-scale", ".*", {"units", "labels", "batches", "float32"}),  # groups of samples in their order
    Declared("sensitivity", "intact loss", WEIGHTS | DATA),
    Declared("sensitivity", "rank correlation", frozenset()),  # of traces by random vectors
    Declared("sensitivity", ".*", {"normed", "units", "labels"} | DATA),
)


def declared(case: str, number: str, change: str) -> str:
    """`=`, `~` or nothing."""
    for one in DECLARED:
        if re.fullmatch(one.case, case) and re.fullmatch(one.numbers, number):
            return "=" if change in one.same else "~" if change in one.estimates else ""
    raise KeyError(f"{case}, {number}: not declared")


def broken(before: Measured, after: Measured, declaration: str, change: Change) -> bool:
    """Whether a number changes against its declaration."""
    a, b = before.value, after.value
    same = math.isclose(a, b, rel_tol=1e-3 if change.dtype is torch.float32 else 1e-5, abs_tol=1e-9)
    near = declaration == "~" and abs(a - b) <= 4 * math.hypot(before.error, after.error)
    return bool(declaration) and not (same or near or (math.isnan(a) and math.isnan(b)))


def violations(case: str, name: str) -> Iterator[str]:
    """Measure a case on a network before and after every change, and describe what is not as declared."""
    before = measured(CASES[case], name)
    for key, change in CHANGES.items():
        if name in change.networks and (CASES[case].beside or change.first):
            after = measured(CASES[case], name, change)
            for number, one in before.items():
                declaration = declared(case, number, key)
                if declaration and (number not in after or broken(one, after[number], declaration, change)):
                    found = f"{after[number].value:.9g}" if number in after else "nothing"
                    yield f"{case}, {name}: {number} was {one.value:.9g}, is {found} with {change.words}"


def page() -> str:
    """The page: a row for every number of every case on the MLP."""
    rows = []
    for case in CORE_CASES:
        for number in measured(CASES[case], NETWORKS[0]):
            cells = (
                declared(case, number, key) if CASES[case].beside or change.first else ""
                for key, change in CHANGES.items()
            )
            rows.append(row(CASES[case].probe, number.replace("|", "\\|").replace(" of in memory", ""), *cells))
    return (
        f"{ABOUT}\n\n{header('probe', 'number', *(change.words for change in CHANGES.values()))}\n"
        + "\n".join(dict.fromkeys(rows))
        + "\n"
    )


ABOUT = """# What changes a number, and what does not

Written by `python benchmarks/invariances.py --write`; the same command without `--write` measures every cell on three
networks (an MLP with ReLU, a ResNet with batch norm, a ViT; float64) and names each that is not as declared. `=`: the
number stays the same, to 1e-5 relative (1e-3 in float32). `~`: it is estimated by other random vectors, and stays
within four standard errors. Empty: it may change. The first four changes leave the function that the network computes
as it is.

- A number that changes with the parameterisation (eigenvalues, traces, sharpness that is not adaptive) is a property
  of the weights, not of the function (Dinh et al., ICML 2017): compare networks of one architecture, trained alike.
  Adaptive sharpness (Kwon et al., ICML 2021) and the Fisher-Rao norm (Liang et al., AISTATS 2019) do not change,
  relative flatness (Petzka et al., NeurIPS 2021) not with whole layers.
- Filter-normalised planes (Li et al., NeurIPS 2018) do not change with whole layers, nor with filters before batch
  norm. They do with single filters of a network without it: the layer that reads them is divided by another factor in
  each column, but its filters are normalised as wholes. Permuted units get other directions from the same seed.
- A barrier between two networks changes with the units of one of them. `align` finds a permutation that is the best
  nearby, not the best: other permutations of the same network lead to other ones, so that its barrier is an upper
  bound.
- `barriers` and `align` renew the statistics of batch norm on the first mini-batches: with batch norm they depend on
  the order of the samples. What is measured by mini-batches or groups depends on which samples they hold.
- `trajectory` is computed from stored weights alone, and is not in the table; a simulated GPU gives the numbers of
  the CPU in the tests of devices."""
CORE_CASES = [name for name, case in CASES.items() if PROBES[case.probe].group == CORE]


def main() -> None:
    made = parser(__doc__, only="", networks=",".join(NETWORKS))
    made.add_argument("--write", action="store_true", help="write the page of what is declared")
    given = made.parse_args()
    torch.set_num_threads(1)
    if given.write:
        PAGE.write_text(page())
        return
    cases = [name for name in CORE_CASES if re.search(given.only, name)]
    found = [one for case in cases for name in given.networks.split(",") for one in violations(case, name)]
    print("\n".join(found) or f"{len(cases)} cases: every number is as declared")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
