"""Which headline numbers of the core probes stay the same when the function does, or the data but for their order.

    python benchmarks/invariances.py [--only trace] [--networks relu]   # prints what is not as declared; exit code 1
    python benchmarks/invariances.py --write                            # writes benchmarks/INVARIANCES.md

Every change is made on three networks in float64: an MLP with ReLU, a ResNet with batch norm, a ViT. `=` is declared of
numbers that stay the same, to 1e-5 relative (1e-3 in float32), and `~` of estimates by other random vectors, which stay
within four standard errors of the difference; `×3` of numbers that are multiplied by that. Nothing is declared of an
empty cell: the number may change.
"""

import copy
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from certificates import CASES, Case, network, population
from measuring import header, parser, row
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parametrize

import landscape
from landscape.probe import NotApplicable
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


class _Twice(torch.nn.Module):
    """Reads a weight as twice the stored parameter."""

    def forward(self, stored: Tensor) -> Tensor:
        return 2 * stored

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def halved(model: torch.nn.Module) -> torch.nn.Module:
    """Store every weight in units twice as large: the parameters are halves, the function is the same."""
    for module in list(model.modules()):
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            parametrize.register_parametrization(module, name, _Twice())
    return model


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
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    model: Callable[[torch.nn.Module], torch.nn.Module] | None = None
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
    "loss": Change("loss tripled", loss=lambda outputs, y: 3 * functional.cross_entropy(outputs, y, reduction="none")),
    "halves": Change("weights in units twice as large", model=halved, networks=("relu",)),
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
    models = [change.model(model) for model in models] if change and change.model else models
    dtype = change.dtype if change else torch.float64
    batch = change.batch if change else BATCH
    own = {**case.loading, **({"loss": change.loss} if change and change.loss else {})}
    subject = landscape.load(models[0].to(dtype), data=(x.to(dtype), y), batch_size=batch, device="cpu", **own)
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
RATIO = {"loss", "halves"}  # neither the unit of the loss nor that of the weights matters
LOSS, CURVATURE = {"loss": 3.0}, {"loss": 3.0, "halves": 4.0}  # proportional to the loss; and per squared weight


@dataclass(frozen=True)
class Declared:
    """Changes under which the numbers of a case stay the same, estimate the same, or are multiplied by a factor."""

    case: str
    numbers: str  # regular expression
    same: Set[str]
    estimates: Set[str] = frozenset()
    factors: Mapping[str, float] = field(default_factory=dict)


DECLARED = (
    Declared("surface|line", "loss", WEIGHTS | DATA | {"halves"}, factors=LOSS),
    Declared("surface|line", "accuracy", WEIGHTS | DATA | RATIO | {"logits"}),
    Declared("surface.*|line-basin", ".*accuracy", DATA | {"normed", "layers", "logits", "loss"}),  # drawn directions
    Declared("surface-decay", ".*", DATA),  # weight decay is added
    Declared("surface|line", ".*", DATA | {"normed", "layers"}, factors=LOSS),
    Declared("surface.*|line-basin", ".*", DATA | {"normed", "layers"}),
    Declared("line-between", "accuracy barrier", WEIGHTS | DATA | RATIO | {"logits"}),
    Declared("line-between", ".*", WEIGHTS | DATA | {"halves"}, factors=LOSS),
    Declared("barriers", ".*", WEIGHTS | {"float32", "halves"}, factors=LOSS),  # statistics of the first mini-batches
    Declared(
        "barriers-aligned|align",
        "mean before|barrier before",
        {"filters", "layers", "units", "labels", "float32", "halves"},
        factors=LOSS,
    ),
    Declared("align", "similarity", {"units", "labels"} | DATA | RATIO),
    Declared("align", "accuracy.*", {"units", "labels", "float32"} | RATIO),
    Declared("barriers-aligned|align", ".*", {"units", "labels", "float32", "halves"}, factors=LOSS),
    Declared("hessian", "nep", {"units", "labels", "copies", "float32"} | RATIO),
    Declared("hessian-layers", ".*", {"units", "labels", "copies", "float32"}, factors=LOSS),
    Declared("hessian.*", ".*", {"units", "labels", "copies", "float32"}, factors=CURVATURE),
    Declared("trace|trace-one-batch", ".*", {"float32"}, VECTORS, CURVATURE),
    Declared("trace-blocks", "off_block", {"float32", "loss"}, VECTORS),
    Declared("trace-blocks", ".*", {"float32"} | RATIO, VECTORS),
    Declared("density", "mean", DATA, {"units", "labels"}, CURVATURE),
    Declared("density", ".*", DATA, factors=CURVATURE),  # the ends depend on the first vector
    Declared("density-blocks", ".*", DATA | {"loss"}, {"units", "labels"}),
    Declared("convexity", r".*centre", DATA | RATIO),
    Declared("convexity", ".*", DATA | {"loss"}),
    Declared("flatness-batches", "adaptive.*", WEIGHTS | {"copies", "float32", "halves"}, factors=LOSS),
    Declared("flatness-batches", ".*", {"units", "labels", "copies", "float32"}, factors=LOSS),
    Declared("flatness-noise", "adaptive.*", {"filters", "normed", "layers", "float32", "halves"}, VECTORS, LOSS),
    Declared("flatness-noise", ".*", {"float32"}, VECTORS, LOSS),
    Declared("flatness-level", ".*", {"loss"}, {"units", "labels"}, {"halves": 0.5}),  # in the unit of the weights
    Declared("flatness-samples", "relative-flatness", (WEIGHTS - {"filters"}) | DATA, factors=LOSS),
    Declared("flatness-samples", "fisher-rao", WEIGHTS | DATA, factors=LOSS),
    Declared("flatness-vectors", "trace|frobenius", DATA, {"units", "labels"}, CURVATURE),
    Declared("flatness-vectors", ".*", DATA, factors=CURVATURE),
    Declared("step", "change.*", {"units", "labels", "copies", "float32"}),
    Declared("step", "critical.*", {"units", "labels", "copies", "float32"}),  # searched for, to 1 %
    Declared("step", ".*", {"units", "labels", "copies", "float32"}, factors=CURVATURE),
    Declared(
        "noise-scale", ".*", {"units", "labels", "batches", "float32"} | RATIO
    ),  # groups of samples in their order
    Declared("sensitivity", "intact loss", WEIGHTS | DATA | {"halves"}, factors=LOSS),
    Declared("sensitivity.*", "rank correlation", frozenset()),  # of traces by random vectors
    Declared("sensitivity", ".*", {"normed", "units", "labels", "halves"} | DATA, factors=LOSS),
)


def declared(case: str, number: str, change: str) -> str:
    """`=`, `~`, a factor or nothing."""
    for one in DECLARED:
        if re.fullmatch(one.case, case) and re.fullmatch(one.numbers, number):
            factor = f"×{one.factors[change]:g}" if change in one.factors else ""
            return "=" if change in one.same else "~" if change in one.estimates else factor
    raise KeyError(f"{case}, {number}: not declared")


def broken(before: Measured, after: Measured, declaration: str, change: Change) -> bool:
    """Whether a number changes against its declaration."""
    a, b = before.value * float(declaration.removeprefix("×") if "×" in declaration else 1), after.value
    same = math.isclose(a, b, rel_tol=1e-3 if change.dtype is torch.float32 else 1e-5, abs_tol=1e-9)
    near = declaration == "~" and abs(a - b) <= 4 * math.hypot(before.error, after.error)
    return bool(declaration) and not (same or near or (math.isnan(a) and math.isnan(b)))


def violations(case: str, name: str) -> Iterator[str]:
    """Measure a case on a network before and after every change, and describe what is not as declared."""
    before = measured(CASES[case], name)
    for key, change in CHANGES.items():
        if name in change.networks and (CASES[case].beside or change.first):
            try:
                after = measured(CASES[case], name, change)
            except NotApplicable:  # relative flatness needs a linear layer's own weight
                after = {}
            for number, one in before.items():
                declaration = declared(case, number, key)
                if declaration and (number not in after or broken(one, after[number], declaration, change)):
                    found = f"{after[number].value:.9g}" if number in after else "nothing"
                    yield f"{case}, {name}: {number} was {one.value:.9g}, is {found} with {change.words}"


def page() -> str:
    """The page: what is written above its table, and a row for every number of every case on the MLP."""
    prose, rows = PAGE.read_text().partition("\n\n| probe")[0], []
    for case in CORE_CASES:
        for number in measured(CASES[case], NETWORKS[0]):
            cells = (
                declared(case, number, key) if CASES[case].beside or change.first else ""
                for key, change in CHANGES.items()
            )
            rows.append(row(CASES[case].probe, number.replace("|", "\\|").replace(" of in memory", ""), *cells))
    return (
        f"{prose}\n\n{header('probe', 'number', *(change.words for change in CHANGES.values()))}\n"
        + "\n".join(dict.fromkeys(rows))
        + "\n"
    )


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
