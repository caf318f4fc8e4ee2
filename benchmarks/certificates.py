"""Coverage of the 95 % interval of every headline number, from redraws of a population whose true value is known.

    python benchmarks/certificates.py --redraws 1000 --shard 1/4     # measures, one line of JSON per number; resumes
    python benchmarks/certificates.py --only trace --redraws 200
    python benchmarks/certificates.py --write                        # writes benchmarks/CERTIFICATES.md

The numbers are those that core and representation probes declare (`Probe.headlines`), so that none is left out. What is
redrawn with replacement, from a finite population: samples; whole mini-batches, with the seed; of `vectors`, the seed
alone; of a `torus`, points of it; `pairs` of normal variables. The truth of a mean is the same number of the whole
population, on which no interval depends; others are computed here, densely or in closed form.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import torch
from measuring import header, parser, row
from torch import Tensor, nn
from torch.nn import functional

import landscape
from landscape.api import parameter_defaults
from landscape.models import build
from landscape.probes import CORE, PROBES, REPRESENTATIONS, probe_class
from landscape.results.headline_numbers import Measured, numbers
from landscape.statistics.block_spectra import heterogeneity
from landscape.statistics.intervals import CERTIFIED, NORMAL, share_interval
from landscape.statistics.sensitivity import rank_correlation
from landscape.subject.other_samples import on_rows
from landscape.subject.subject import Subject

LINES, PAGE = (Path(__file__).parent / name for name in ("certificates.jsonl", "CERTIFICATES.md"))
POOL = 2048  # samples of the population
VECTORS, BATCHES = CERTIFIED["random vectors"], CERTIFIED["batch"]
CLASSES, SIZE = 3, 8
CORRELATION = 0.7  # of two normal variables, in place of predictor and loss increase over units
Truths = Mapping[str, float]


@cache
def population(count: int = POOL, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Smooth pictures with a mean per class, and noise."""
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(count) % CLASSES
    means = functional.interpolate(torch.randn(CLASSES, 1, 4, 4, generator=draw), size=size, mode="bilinear")
    return (0.7 * means[y] + torch.randn(count, 1, size, size, generator=draw)).double(), y


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIZE**2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    )


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "relu": lambda: nn.Sequential(*(nn.ReLU() if isinstance(one, nn.Tanh) else one for one in _mlp())),
    "resnet": lambda: build("resnet_demo", classes=CLASSES, image_size=SIZE, channels=1, blocks=(2, 2), width=4),
    "smooth": lambda: build(
        "resnet_demo", classes=CLASSES, image_size=SIZE, channels=1, blocks=(1, 1), width=4, mc_dropout=0.2,
        smoothing=True,
    ),
    "vit": lambda: build("vit_demo", classes=CLASSES, image_size=SIZE, channels=1, dim=12, depth=2, heads=2, tokens=16),
    "features": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(SIZE**2 // 4, CLASSES)),
}  # fmt: skip


@cache
def network(name: str, seed: int = 0) -> nn.Module:
    """A network after few steps on a quarter of the population."""
    torch.manual_seed(seed)
    made, (x, y) = NETWORKS[name]().double(), population()
    steps = torch.optim.Adam(made.parameters(), lr=0.01)
    for _ in range(12):
        steps.zero_grad()
        functional.cross_entropy(made(x[: POOL // 4]), y[: POOL // 4]).backward()
        steps.step()
    return made.eval()


@dataclass(frozen=True)
class Case:
    """A probe on a network, what is redrawn, and the truths that are not the numbers of the whole population."""

    probe: str
    network: str = "mlp"
    over: str = "samples"  # samples, mini-batches, or vectors (the seed)
    size: int = CERTIFIED["samples"]  # of a redraw
    batch: int = 32
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: str = ""  # option that takes another network
    exact: "Callable[[Case], Truths] | None" = None
    whole: Mapping[str, Any] = field(default_factory=dict)  # options of the measurement of the whole population
    loading: Mapping[str, Any] = field(default_factory=dict)
    pool: int = POOL
    certifies: str = ".*"  # regular expression of the names of its numbers

    def redraw(self, seed: int) -> dict[str, Measured]:
        """The numbers of one redraw."""
        draw, (x, y) = torch.Generator().manual_seed(seed), population()
        if self.over == "vectors":
            return self._measured(self._subject(x[: self.size], y[: self.size]), seed=seed)
        if self.over == "pairs":
            a, b = torch.randn(2, self.size, generator=draw).double().numpy()
            r, low, high = rank_correlation(a, CORRELATION * a + math.sqrt(1 - CORRELATION**2) * b)
            return {"rank correlation": Measured("rank correlation", r, low=low, high=high)}
        if self.over == "torus":
            angles = 2 * math.pi * torch.rand(self.size, 2, generator=draw).double()
            pairs = torch.cat([angles.cos(), angles.sin()], dim=1).view(-1, 1, 2, 2)
            return self._measured(self._subject(functional.interpolate(pairs, size=SIZE), y[: self.size]))
        at = torch.randint(
            self.pool // (self.batch if self.over == "mini-batches" else 1), (self.size,), generator=draw
        )
        if self.over == "samples":
            return self._measured(self._subject(x[at], y[at], at))
        whole = self._subject(x[: self.pool], y[: self.pool])
        return self._measured(replace(whole, batches=[whole.batches[int(i)] for i in at]), **self._seeded(seed))

    def _seeded(self, seed: int) -> dict[str, int]:
        """Mini-batches draw noise and vectors of their own, which are redrawn with them."""
        return {"seed": seed} if "seed" in parameter_defaults(probe_class(self.probe)) else {}

    def truths(self) -> Truths:
        """True values by name."""
        x, y = population()
        found: dict[str, float] = {}
        if self.over in ("samples", "mini-batches"):
            whole = self._measured(self._subject(x[: self.pool], y[: self.pool]), **self.whole)
            found = {name: one.value for name, one in whole.items()}
        return {**found, **(self.exact(self) if self.exact else {})}

    def _subject(self, x: Tensor, y: Tensor, rows: Tensor | None = None) -> Subject:
        loading = {"batch_size": self.batch, "device": "cpu", **self.loading}
        y = 4 * functional.one_hot(y, CLASSES).double() - 1 if "loss" in loading else y
        if "data" not in loading:
            return landscape.load(network(self.network), data=(x, y), **loading)
        whole = landscape.load(network(self.network), **loading)
        return whole if rows is None else on_rows(whole, rows.numpy())

    def _measured(self, subject: Subject, **more: Any) -> dict[str, Measured]:
        others = [network(self.network, seed) for seed in (1, 2)]
        beside = {self.beside: others if self.beside == "members" else others[0]} if self.beside else {}
        data = landscape.measure(self.probe, subject, out=None, quiet=True, **{**self.options, **beside, **more})
        return {one.name: one for _, one in numbers(data) if re.fullmatch(self.certifies, one.name)}


def scored(split: str) -> tuple[Tensor, Tensor]:
    """The samples that a linear probe is fitted to, which are not redrawn, or those that it is scored on."""
    x, y = population()
    return (x[-256:], y[-256:]) if split == "train" else (x, y)


def _dense(x: Tensor, y: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Hessian of the mean loss, its Gauss-Newton part, and the gradients of all samples; float64."""
    model = network(case.network)
    names, values = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)
    sizes = [p.numel() for p in values]
    flat = torch.cat([p.reshape(-1) for p in values])

    def logits(w: Tensor, inputs: Tensor = x) -> Tensor:
        parts = (part.view_as(p) for part, p in zip(w.split(sizes), values, strict=True))
        return torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (inputs,))

    def loss(w: Tensor, inputs: Tensor = x, targets: Tensor = y) -> Tensor:
        return functional.cross_entropy(logits(w, inputs), targets)

    hessian = torch.func.hessian(loss)(flat)
    jacobian, p = torch.func.jacrev(logits)(flat), logits(flat).softmax(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    gauss_newton = torch.einsum("nci,ncd,ndj->ij", jacobian, inner, jacobian) / len(x)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(flat, x[:, None], y[:, None])
    return hessian, gauss_newton, each


def _of_vectors(case: Case) -> Truths:
    """Trace, Frobenius norm (root mean square over mini-batches), ends, and expectations of ratios."""
    x, y = (part[: case.size] for part in population())
    parts = list(zip(x.split(case.batch), y.split(case.batch), strict=True))
    dense = [_dense(*part, case)[:2] for part in parts]
    hessians = torch.stack([hessian for hessian, _ in dense])
    mean = hessians.mean(dim=0)
    n, ends = len(mean), torch.linalg.eigvalsh(mean)
    rms = hessians.square().sum(dim=(1, 2)).mean().sqrt() if case.probe == "trace" else mean.norm()
    found = {"trace": mean.trace(), "frobenius": rms, "mean": mean.trace() / n, "largest": ends[-1],
             "smallest": ends[0], "top-eigenvalue": ends[-1]}  # fmt: skip
    if "blocks" in case.options:
        (hessian, gauss_newton), sizes = dense[0], _layers(case)
        blocks = torch.block_diag(*(torch.ones(size, size) for size in sizes))
        each = [torch.linalg.eigvalsh(part) for part in _diagonal(hessian, sizes)]
        nodes = nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=math.nan)[None].numpy()
        found |= heterogeneity(nodes, np.where(np.isnan(nodes), np.nan, 1 / np.array(sizes)[:, None]))
        v = torch.randint(0, 2, (n, 40_000), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
        for name, left in (("off_block", hessian * (1 - blocks)), ("non_gauss_newton", hessian - gauss_newton)):
            found[name] = ((left @ v).norm(dim=0) / (hessian @ v).norm(dim=0)).mean()
    return {name: float(value) for name, value in found.items() if np.ndim(value) == 0}


def _layers(case: Case) -> list[int]:
    """Parameters of every layer, weight and bias."""
    values = [p.numel() for p in network(case.network).parameters()]
    return [sum(pair) for pair in zip(values[::2], values[1::2], strict=True)]


def _diagonal(matrix: Tensor, sizes: list[int]) -> list[Tensor]:
    rows = matrix.split(sizes)
    return [row.split(sizes, dim=1)[i] for i, row in enumerate(rows)]


def _of_noise_level(case: Case) -> Truths:
    """The level of many draws, others than those of all redraws."""
    x, y = (part[: case.size] for part in population())
    found = case._measured(case._subject(x, y), draws=1000, seed=10**6)
    return {name: one.value for name, one in found.items()}


def _of_noise(case: Case) -> Truths:
    hessian, _, each = _dense(*population(), case)
    mean, covariance = each.mean(dim=0), torch.cov(each.T, correction=0)
    return {"simple": float(covariance.trace() / mean.dot(mean)),
            "curvature": float((hessian * covariance).sum() / (mean @ hessian @ mean))}  # fmt: skip


def _of_features(case: Case) -> Truths:
    """Those with bias corrections for a sample, which the whole population must not have."""
    x, y = population()
    x = functional.avg_pool2d(x, 2).flatten(1)
    covariance = torch.cov(x.T, correction=0)
    units = functional.normalize(x)
    means = torch.stack([units[y == c].mean(dim=0) for c in range(CLASSES)])
    within, overall = means.square().sum(dim=1).mean(), means.mean(dim=0).square().sum()
    return {"participation ratio": float(covariance.trace() ** 2 / covariance.square().sum()),
            "class separation": float(1 - (1 - within) / (1 - overall))}  # fmt: skip


def _certified(probe: str, over: str) -> int:
    """Fewest values of a probe, below which the doctor says that no coverage was measured."""
    return {**CERTIFIED, **probe_class(probe).certified}[over]


FAST: Mapping[str, Any] = {"hvp": "double-backward"}
OF_BATCHES = "sam,worst-l2,worst-linf,adaptive-worst-l2,adaptive-worst-linf"
NOISY = "average-l2,average-linf,adaptive-average-l2,adaptive-average-linf"
CASES: Mapping[str, Case] = {
    "surface": Case("surface", options={"resolution": 9}),
    "surface-decay": Case("surface", options={"resolution": 5}, loading={"weight_decay": 0.01}, certifies="least.*"),
    "surface-basin": Case("surface", options={"resolution": 17, "margin": "0.2"}, certifies=".*basin.*"),
    "line": Case("line", certifies="loss|highest"),
    "line-basin": Case("line", options={"margin": "0.2", "resolution": 101, "range": "2"}, certifies=".*basin.*"),
    "line-between": Case("line", beside="along", certifies=".*barrier|loss at.*|lowest.*"),
    "barriers": Case("barriers", beside="members"),
    "barriers-aligned": Case("barriers", beside="members", options={"align": True}, certifies="mean.*"),
    "align": Case("align", size=_certified("align", "samples"), beside="against"),
    "hessian-optimiser": Case("hessian", over="mini-batches", size=BATCHES, batch=8, certifies="sharpness|stability",
                              options={"operator": "preconditioned", "optimizer": "sgd", "optimizer_arg": ("lr=0.1",),
                                       "top": 1, **FAST}),
    "hessian-layers": Case("hessian", over="mini-batches", size=BATCHES, batch=8, certifies="largest",
                           options={"per_layer": True, "top": 1, **FAST}),
    "hessian": Case("hessian", over="mini-batches", size=BATCHES, batch=8, options={"top": 3, **FAST}),
    "trace": Case("trace", over="vectors", options={"vectors": VECTORS, **FAST}),
    "trace-one-batch": Case("trace", over="vectors", size=32, options={"vectors": VECTORS, **FAST}),
    "trace-blocks": Case("trace", over="vectors", size=32, options={"vectors": 64, "blocks": "module", **FAST},
                         exact=_of_vectors, certifies="off_block|non_gauss_newton"),
    "density": Case("density", over="vectors", options={"vectors": CERTIFIED["vector"], "steps": 16, **FAST}),
    "density-blocks": Case("density", over="vectors", size=32, certifies=".*heterogeneity",
                           options={"vectors": CERTIFIED["vector"], "blocks": "module", **FAST}),
    "convexity": Case("convexity", options={"resolution": 3}),
    "flatness-batches": Case("flatness", over="mini-batches", size=BATCHES, batch=8,
                             options={"measures": OF_BATCHES, "steps": 4}),
    "flatness-noise": Case("flatness", over="mini-batches", size=BATCHES, batch=8,
                           options={"measures": NOISY, "draws": 8}, whole={"draws": 40}),
    "flatness-level": Case("flatness", over="vectors", exact=_of_noise_level,
                           options={"measures": "pac-bayes-sigma", "draws": 20}),
    "flatness-samples": Case("flatness", size=256, options={"measures": "relative-flatness,fisher-rao"}),
    "flatness-vectors": Case("flatness", over="vectors", exact=_of_vectors,
                             options={"measures": "trace,frobenius,top-eigenvalue", "vectors": VECTORS, **FAST}),
    "step": Case("step", over="mini-batches", size=BATCHES, batch=8,
                 options={"optimizer": "sgd", "optimizer_arg": ("lr=0.1",)}),
    "noise-scale": Case("noise-scale", size=512, options={"groups": CERTIFIED["group"]}, exact=_of_noise),
    "sensitivity": Case("sensitivity"),
    "sensitivity-units": Case("sensitivity", over="pairs", size=12, certifies="rank correlation", exact=lambda case: {
        "rank correlation": 6 / math.pi * math.asin(CORRELATION / 2)}),  # Spearman's of normal variables
    "fourier": Case("fourier", "resnet"),
    "variance": Case("variance", "resnet"),
    "similarity": Case("similarity", "resnet", size=32 * _certified("similarity", "batch")),
    "attention": Case("attention", "vit"),
    "attention-maps": Case("attention-maps", "vit", options={"images": 128}, whole={"images": POOL}),
    "tokens": Case("tokens", "vit", size=CERTIFIED["image"], options={"method": "principal"}, whole={"images": POOL}),
    "geometry": Case("geometry", "features", size=_certified("geometry", "samples"), exact=_of_features,
                     whole={"images": POOL}, certifies="(?!TwoNN).*"),
    "geometry-torus": Case("geometry", "features", over="torus", size=_certified("geometry", "samples"),
                           certifies="TwoNN.*", exact=lambda case: {"TwoNN dimension": 2.0}),
    "lesion": Case("lesion", "resnet"),
    "lesion-regression": Case("lesion", "resnet", loading={"loss": "mse"}),
    "probe-linear": Case("probe-linear", "resnet", loading={"data": f"{__file__}:scored"}),
    "uncertainty": Case("uncertainty", "smooth", loading={"mc_dropout": 4}),
}  # fmt: skip
CASES = {name: replace(c, exact=c.exact or _of_vectors) if c.over == "vectors" else c for name, c in CASES.items()}


def measure(names: list[str], redraws: int, path: Path, shard: tuple[int, int] = (1, 1)) -> None:
    """Add the redraws that the file lacks, twenty of each case in turn; of a shard, every so many twenties."""
    known, (number, of) = {(one["case"], one["redraw"]) for one in _lines(path)}, shard
    for start, name in list(product(range(-1, redraws, 20), names))[number - 1 :: of]:
        for seed in range(start, min(start + 20, redraws)):
            if (name, seed) not in known:
                found = CASES[name].truths() if seed < 0 else {
                    key: (one.value, one.low, one.high) for key, one in CASES[name].redraw(seed).items()
                }  # fmt: skip
                with path.open("a") as file:
                    file.write(json.dumps({"case": name, "redraw": seed, "numbers": found}) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    whole = (line for line in path.read_text().splitlines() if line.endswith("}")) if path.exists() else ()
    return [json.loads(line) for line in whole]


def page(lines: list[dict[str, Any]]) -> str:
    """The page: what is written above its numbers, and a row for every declared number and case that measured it."""
    prose = re.split(r"\n\n\d+ declared numbers, ", PAGE.read_text())[0]
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in CASES}
    truths: dict[str, Truths] = {}
    for one in lines:
        if one["redraw"] < 0:
            truths[one["case"]] = one["numbers"]
        elif one["case"] in found:
            for name, ends in one["numbers"].items():
                found[one["case"]].setdefault(name, []).append(ends)
    rows, tally = [], dict.fromkeys(VERDICTS, 0)
    for probe, template in declared():
        pattern = "".join(re.escape(text) + (".*" if part else "") for text, part, _, _ in Formatter().parse(template))
        mine = [
            (case, name, np.array(values, dtype=float))
            for case, numbers_of in found.items() if CASES[case].probe == probe
            for name, values in numbers_of.items() if re.fullmatch(pattern, name)
        ]  # fmt: skip
        if not mine:
            reason = WITHOUT.get((probe, template)) or WITHOUT.get((probe, ""), "no redraws yet")
            rows.append(row(probe, template.replace("|", "\\|"), "", "", "", "", "", "", f"- {reason}"))
            tally["no case"] += 1
        for case, name, values in mine:
            cells, verdict = _judged(values, float(truths.get(case, {}).get(name, math.nan)))
            rows.append(row(probe, name.replace("|", "\\|"), case, CASES[case].over, *cells))
            tally[verdict] += 1
    cases = "\n".join(row(name, _conditions(case)) for name, case in CASES.items())
    summary = "; ".join(f"{count} {name}" for name, count in tally.items())
    return (
        f"{prose}\n\n{len(declared())} declared numbers, {sum(tally.values())} rows: {summary}.\n\n"
        + header("probe", "number", "case", "redrawn", "redraws", "truth", "mean", "width", "coverage, %")
        + "\n" + "\n".join(rows) + "\n\n## Cases\n\n" + header("case", "conditions") + f"\n{cases}\n"
    )  # fmt: skip


VERDICTS = ("within 93 to 97 %", "not told apart from it", "below", "above", "without an interval", "no case")
WITHOUT = {
    ("tokens", "divergence"): "of the t-SNE embedding of the images that it shows: no population value",
    ("trajectory", ""): "computed from stored weights, without sampling: no interval",
}


def declared() -> list[tuple[str, str]]:
    """Every probe of the two groups with the names of its numbers, in their order."""
    found = {
        (probe, headline.name): None
        for probe, entry in PROBES.items() if entry.group in (CORE, REPRESENTATIONS)
        for headline in probe_class(probe).headlines
    }  # fmt: skip
    return list(found)


def _judged(values: np.ndarray, truth: float) -> tuple[list[str], str]:
    """Cells of a row from the redraws (n, 3), and the verdict."""
    value, low, high = values.T
    known = np.isfinite(low) & ~np.isnan(high)
    cells = [f"{len(value)}", f"{truth:.4g}", f"{np.nanmean(value):.4g}"]
    if known.sum() < len(value) / 2 or math.isnan(truth) or not np.ptp(value[known]) > 0:
        return [*cells, "", "- value alone"], "without an interval"
    n, held = int(known.sum()), int(((low <= truth) & (truth <= high))[known].sum())
    bounded = known & np.isfinite(high)
    width = float(np.mean((high - low)[bounded]) / 2 / NORMAL / value.std(ddof=1)) if bounded.any() else math.nan
    below, above = map(float, share_interval(held / n, math.sqrt(held / n * (1 - held / n) / n), n))
    text = f"{100 * held / n:.1f} [{100 * below:.1f}, {100 * above:.1f}]"
    if 0.93 <= held / n <= 0.97:
        return [*cells, f"{width:.2f}", text], VERDICTS[0]
    if above >= 0.93 and below <= 0.97:
        return [*cells, f"{width:.2f}", text], VERDICTS[1]
    return [*cells, f"{width:.2f}", f"**{text}**"], "below" if above < 0.93 else "above"


def _conditions(case: Case) -> str:
    more = ", ".join(f"{name} {value}" for name, value in {**case.options, **case.loading}.items() if name != "data")
    if case.over == "pairs":
        return f"{case.size} pairs of normal variables of correlation {CORRELATION}"
    unit = f"{case.size} {'mini-batches' if case.over == 'mini-batches' else 'samples'} of {case.network}"
    return f"{unit}, batch size {case.batch}" + (f", {more}" if more else "")


def main() -> None:
    made = parser(__doc__, redraws=1000, only="", shard="1/1")
    made.add_argument("--lines", type=Path, default=LINES, help="file of the redraws")
    made.add_argument("--write", action="store_true", help="write the page from the redraws so far")
    given = made.parse_args()
    torch.set_num_threads(1)
    number, of = map(int, given.shard.split("/"))
    names = [name for name in CASES if re.search(given.only, name)]
    if given.write:
        PAGE.write_text(page(_lines(given.lines)))
    else:
        measure(names, given.redraws, given.lines, (number, of))


if __name__ == "__main__":
    main()
