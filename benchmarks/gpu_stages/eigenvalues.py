"""Stage `hessian`: the top five eigenvalues of mini-batches of 16, by this package and by two others."""

import copy
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from measuring import header, row
from other_engines import TOP, curvlinops, errors, pyhessian

from gpu_stages.networks import prepared
from gpu_stages.steps import Key, Row, Rows, Settings, Step, alone_in_memory, return_memory
from gpu_stages.timing import peak_gib, seconds, share_outside_kernels, shown
from gpu_stages.variants import cuda_graphs, side_by_side
from landscape.probes.hessian import Hessian
from landscape.products import hvp_backends
from landscape.products.hvp_backends import Kinks
from landscape.subject.loading.load import measuring
from landscape.subject.subject import Subject

TITLE = "Top-5 Hessian eigenvalues, mini-batches of 16"
ABOUT = """\
Synthetic images of ten classes; networks after 150 updates, or untrained with batch-norm statistics of the images.
PyHessian 0.1 at its defaults (tol 1e-3, 100 iterations), curvlinops with scipy's `eigsh` at tol 1e-3, this package at
its defaults (estimated relative error 1e-4, and a pass in double precision that fixes the activation pattern). `x M`:
M mini-batches side by side in one product. Each engine is warmed up, and alone in memory. Seconds per mini-batch are
means; `speed` is over the mini-batches that PyHessian had too; curvlinops also with its products compiled. Missed:
eigenvalues of a float64 reference (this package at an estimated relative error of 1e-6, on the same device) without
an estimate within 1 %, over the mini-batches that have a reference. curvlinops' time holds eigsh's own linear algebra
on the host. Outside kernels, of a few products after a warm-up: the share of wall time in which the device neither
computes nor copies; n/a without a GPU. Prepared: seconds of the first call beyond those of a later one (tracing and
choosing). Peak: all memory allocated on the device, the network included."""
CASES = [(name, size) for size in (224, 32) for name in ("resnet50", "vit_s", "resnet18", "vit_ti")]
SMALL_CASES = [("alternet_demo", 16)]
BATCH_SIZE, BATCHES, REFERENCES = 16, 32, 3
LARGE = 224  # pixels, from which untrained networks and products of all mini-batches are left out


@dataclass(frozen=True)
class Engine:
    """A way to the eigenvalues: how many mini-batches it gets, and how many at a time."""

    batches: int
    group: int = 1
    hvp: str = ""  # backend of this package; empty for another package
    together: int = 0  # mini-batches per product
    graphs: bool = True  # whether products may be replayed as CUDA graphs
    kinks: Kinks = "double"
    other: Callable[..., tuple[np.ndarray, int]] | None = None


def engines(settings: Settings, state: str = "trained") -> dict[str, Engine]:
    if settings.small:
        return {
            "PyHessian": Engine(1, other=pyhessian), "curvlinops + eigsh": Engine(1, other=curvlinops),
            "double-backward": Engine(2, hvp="double-backward"), "traced": Engine(2, hvp="traced"),
            "auto": Engine(2, 2, "auto"),
            "traced x 2": Engine(2, 2, "traced", 2), "traced, no CUDA graph": Engine(1, hvp="traced", graphs=False),
        }  # fmt: skip
    if state == "untrained":
        return {
            "PyHessian": Engine(1, other=pyhessian), "double-backward": Engine(4, hvp="double-backward"),
            "traced x 8": Engine(8, 8, "traced", 8),
        }  # fmt: skip
    return {
        "PyHessian": Engine(REFERENCES, other=pyhessian), "curvlinops + eigsh": Engine(REFERENCES, other=curvlinops),
        "double-backward": Engine(8, hvp="double-backward"), "traced": Engine(8, hvp="traced"),
        "traced, no CUDA graph": Engine(8, hvp="traced", graphs=False),
        "traced, kinks single": Engine(8, hvp="traced", kinks="single"),
        "traced x 8, no CUDA graph": Engine(8, 8, "traced", 8, graphs=False),
        "traced x 8": Engine(BATCHES, 8, "traced", 8), "traced x 32": Engine(BATCHES, 32, "traced", 32),
        "auto": Engine(BATCHES, BATCHES, "auto"),
        "curvlinops, compiled + eigsh": Engine(REFERENCES, other=partial(curvlinops, compiled=True)),
    }  # fmt: skip


def steps(settings: Settings) -> Sequence[Step]:
    """One engine after the other on the mini-batches of a case: what the last one prepared is freed."""
    return [
        Step((name, size, state, engine, i), partial(_measured, name, size, state, engine, i, settings))
        for state in (("trained",) if settings.small else ("trained", "untrained"))
        for name, size in (SMALL_CASES if settings.small else CASES)
        if state == "trained" or size < LARGE
        for engine, one in engines(settings, state).items()
        if size < LARGE or one.together < BATCHES
        for i in range(0, one.batches, one.group)
    ]


@dataclass
class Case:
    """A network with its mini-batches, and what was prepared for it."""

    subject: Subject
    exact: Subject  # in double precision
    tiny: bool
    probes: dict[str, tuple[Hessian, Subject] | None]  # of the engine alone that was used last; None: of a package
    references: dict[int, np.ndarray]


@alone_in_memory
def case_of(name: str, size: int, state: str, settings: Settings) -> Case:
    count = max(engine.batches for engine in engines(settings, state).values())
    batch_size = 4 if settings.small else BATCH_SIZE
    subject = prepared(
        name, size, state, settings.device,
        folder=settings.folder, small=settings.small, batch_size=batch_size, batches=count,
    )  # fmt: skip
    exact = replace(subject, model=copy.deepcopy(subject.model).double(), origin=replace(subject.origin, original=None))
    return Case(subject, exact, settings.small, {}, {})


def _measured(name: str, size: int, state: str, engine: str, i: int, settings: Settings) -> Row:
    case = case_of(name, size, state, settings)
    one, device = engines(settings, state)[engine], settings.device
    batches, found = range(i, i + one.group), list[Row]()

    def run() -> None:
        found[:] = eigenvalues(case, engine, one, batches)

    row: Row = {}
    known = engine in case.probes
    few = partial(eigenvalues, case, engine, one, batches if one.together else batches[:8], few=True)
    if not known:
        case.probes.clear()
        return_memory()
        first = seconds(few if one.other is not None else run, device)  # other packages prepare little, and warm up
    row["seconds"] = seconds(lambda: row.update(peak=peak_gib(run, device)), device)
    if not known:
        row["prepared"] = max(0.0, first - row["seconds"])
    row["seconds"] /= one.group
    row["batches"] = one.group
    row["products"] = sum(values["products"] for values in found) / one.group
    row["hvp"] = found[0].get("hvp", "")
    row["missed"], row["worst"], row["referenced"] = 0, 0.0, 0
    for k, values in zip(range(i, i + one.group), found, strict=True):
        if k < (1 if case.tiny else REFERENCES):
            worst, missed = errors(np.array(values["values"]), reference(case, k))
            row["missed"] += missed
            row["worst"] = max(row["worst"], worst)
            row["referenced"] += 1
    if not known:
        row["outside"] = share_outside_kernels(few, device)
    if one.other is not None:
        gc.collect()  # PyHessian leaves graphs in cycles
    return row


def eigenvalues(case: Case, name: str, engine: Engine, batches: range, *, few: bool = False) -> list[Row]:
    """Eigenvalues and products of some mini-batches by an engine; with `few`, what a few products give."""
    if engine.other is not None:
        case.probes[name] = None
        fewer = {"iterations": 2} if few and engine.other is pyhessian else {}
        found = [engine.other(case.subject, i, **fewer) for i in batches]
        return [{"values": values.tolist(), "products": products} for values, products in found]
    chosen = nullcontext() if engine.hvp == "auto" else side_by_side(engine.together)
    with chosen, cuda_graphs(engine.graphs), measuring(case.subject):
        made = case.probes.get(name)
        if made is None:  # with an own subject each, for what is prepared is kept with it
            subject = replace(case.subject)
            probe = Hessian(top=TOP, ends=1.0, hvp=engine.hvp, kinks=engine.kinks)  # type: ignore[arg-type]
            made = probe.resolved(subject, probe.autotune(subject) if engine.hvp == "auto" else {})
            case.probes[name] = made
        return swept(replace(made[0], max_products=TOP + 3) if few else made[0], made[1], batches)


def swept(probe: Hessian, subject: Subject, batches: range) -> list[Row]:
    units = list(probe.plan(subject).units())
    return [
        {
            "values": values["eigenvalue"].tolist(), "products": float(values["matvecs"]),
            "hvp": hvp_backends.CODES[int(values["hvp"])],
        }
        for values in probe.sweep(subject, [units[i] for i in batches])
    ]  # fmt: skip


def reference(case: Case, i: int) -> np.ndarray:
    if i not in case.references:
        probe = Hessian(top=TOP, ends=1.0, tol=1e-6, hvp="double-backward", kinks="single")
        with measuring(case.exact):
            (found,) = swept(probe, case.exact, range(i, i + 1))
        case.references[i] = np.array(found["values"])
    return case.references[i]


def tables(rows: Rows) -> str:
    columns = (
        "network", "px", "state", "engine", "mini-batches", "products", "s / mini-batch", "ms / product", "speed",
        "outside kernels", "peak GiB", "prepared s", "missed", "worst error",
    )  # fmt: skip
    lines = [header(*columns)]
    groups: dict[Key, dict[int, Row]] = {}
    for (*case, i), one in rows.items():
        groups.setdefault(tuple(case), {})[int(i)] = one
    for key, found in sorted(groups.items(), key=lambda item: _place(item[0])):
        lines.append(row(*key[:3], *_cells(str(key[3]), found, groups.get((*key[:3], "PyHessian"), {}))))
    return "\n".join(lines)


def _place(key: Key) -> tuple[int, str, int]:
    order = ["trained", "untrained"]
    return order.index(str(key[2])), str(key[0]), int(key[1])


def _cells(engine: str, found: dict[int, Row], base: dict[int, Row]) -> list[str]:
    every = list(found.values())
    count = sum(one["batches"] for one in every)
    mean = sum(one["seconds"] * one["batches"] for one in every) / count
    products = sum(one["products"] * one["batches"] for one in every) / count
    shared = [i for i in base if any(start <= i < start + one["batches"] for start, one in found.items())]
    others = statistics.fmean(base[i]["seconds"] for i in shared) if shared else math.nan
    own = [one["seconds"] for start, one in found.items() if any(start <= i < start + one["batches"] for i in shared)]
    known = TOP * sum(one["referenced"] for one in every)
    return [
        f"{engine} ({every[0]['hvp']})" if engine == "auto" else engine,
        str(count), f"{products:.1f}", f"{mean:.4f}", f"{1e3 * mean / products:.2f}",
        f"{others / statistics.fmean(own):.1f}x" if own else "",
        shown(_first(every, "outside"), "{:.0%}"), shown(_first(every, "peak"), "{:.2f}"),
        shown(_first(every, "prepared"), "{:.1f}"), f"{sum(one['missed'] for one in every)}/{known}",
        f"{max(one['worst'] for one in every):.1e}" if known else "",
    ]  # fmt: skip


def _first(rows: Sequence[Row], name: str) -> float:
    return next((float(one[name]) for one in rows if not math.isnan(float(one.get(name, math.nan)))), math.nan)
