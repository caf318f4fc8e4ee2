"""Peers against exact values: each case is one small computation by another package, by ours, and exactly.

    python benchmarks/audit/cases.py                       # those whose package is installed; writes AUDIT.md
    python benchmarks/audit/cases.py "netcal: ECE, drawn"   # prints one

Exact values are closed forms, or dense matrices in double precision. A peer without a package is a published
definition.
"""

import contextlib
import datetime
import importlib.metadata
import io
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
import planes
from measuring import header, row

import landscape
from landscape.checkpoints.libraries import library
from landscape.products.hvp_backends import curvature

PAGE = Path(__file__).parents[1] / "AUDIT.md"


class Found(NamedTuple):
    """One number, three times; a peer that raises has a text."""

    exact: float
    theirs: float | str
    ours: float


def probabilities(name: str) -> tuple[Tensor, Tensor]:
    """Probabilities of three classes and labels."""
    draw = torch.Generator().manual_seed(0)
    if name == "certain":  # confidence 1 for all, three of four right: 0.25
        return torch.eye(3)[torch.zeros(400, dtype=torch.long)].double(), torch.tensor([0, 0, 0, 1, 0, 0, 0, 2]).repeat(
            50
        )
    if name == "half certain":  # half with confidence 1 and all wrong, half with 0.75 and all right: 0.5 + 0.125
        p = torch.tensor([[1.0, 0.0, 0.0], [0.75, 0.125, 0.125]]).double().repeat(200, 1)
        return p, torch.tensor([1, 0, 2, 0]).repeat(100)
    p = (3 * torch.randn(2000, 3, generator=draw).double()).softmax(1)
    return p, torch.multinomial(p.sqrt(), 1, generator=draw)[:, 0]


def ece(name: str, theirs: Callable[[Tensor, Tensor], float]) -> Found:
    p, y = probabilities(name)
    confidence, right = p.max(1).values.numpy(), (p.argmax(1) == y).double().numpy()
    bins = np.ceil(10 * confidence) - 1  # (0, 0.1] ... (0.9, 1.0]
    exact = sum(abs((right - confidence)[bins == b].sum()) for b in range(10)) / len(right)
    network = nn.Linear(3, 3, bias=False).double()
    network.weight.data = torch.eye(3).double()
    subject = landscape.load(network, data=(p.clamp(min=1e-300).log(), y), device="cpu")
    return Found(exact, theirs(p, y), float(landscape.measure("calibration", subject, out=None, quiet=True)["ece"]))


def torchmetrics_ece(p: Tensor, y: Tensor) -> float:
    library("torchvision")
    made = import_module("torchmetrics.classification").MulticlassCalibrationError(3, n_bins=10)
    return float(made(p, y))


def netcal_ece(p: Tensor, y: Tensor) -> float:
    return float(import_module("netcal.metrics").ECE(10).measure(p.numpy(), y.numpy()))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "gelu": nn.GELU, "relu": nn.ReLU}


def problem(activation: str, dtype: torch.dtype = torch.float64, samples: int = 64) -> tuple[nn.Module, Tensor, Tensor]:
    """A network of 5 linear layers and 473 weights with data."""
    torch.manual_seed(0)
    hidden = [part for _ in range(4) for part in (nn.Linear(10, 10), ACTIVATIONS[activation]())]
    network = nn.Sequential(*hidden, nn.Linear(10, 3))
    for p in network.parameters():
        p.data *= 2
    return network.to(dtype), torch.randn(samples, 10).to(dtype), torch.randint(3, (samples,))


def hessian(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the mean loss, densely in double precision."""
    names, values = zip(*network.named_parameters(), strict=True)
    sizes = [p.numel() for p in values]

    def loss(w: Tensor) -> Tensor:
        parts = (part.view_as(p) for part, p in zip(w.split(sizes), values, strict=True))
        return functional.cross_entropy(
            torch.func.functional_call(network, dict(zip(names, parts, strict=True)), (x.double(),)), y
        )

    return torch.func.hessian(loss)(torch.cat([p.detach().double().reshape(-1) for p in values]))


def our_product(network: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    subject = landscape.load(network, data=(x, y), batch_size=len(x), device="cpu")
    return curvature(subject, subject.parameters, "double-backward").product(0)(v.to(subject.dtype))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


Product = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def product_error(activation: str, theirs: Product, dtype: torch.dtype = torch.float32) -> Found:
    """Relative error of a Hessian product with a random unit vector."""
    network, x, y = problem(activation, dtype)
    v = functional.normalize(torch.randn(sum(p.numel() for p in network.parameters())), dim=0)
    exact = hessian(network, x, y) @ v.double()
    with torch.enable_grad():
        found = theirs(network, x, y, v.to(dtype))
    return Found(0.0, error(found, exact), error(our_product(network, x, y, v), exact))


def difference(network: nn.Module, x: Tensor, y: Tensor, v: Tensor, step: float = 5e-3) -> Tensor:
    """The central difference of gradients, by its definition."""
    parameters = list(network.parameters())
    start = nn.utils.parameters_to_vector(parameters).detach().clone()

    def gradient(w: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(w, parameters)
        made = torch.autograd.grad(functional.cross_entropy(network(x), y), parameters)
        return torch.cat([part.reshape(-1) for part in made])

    found = (gradient(start + step * v) - gradient(start - step * v)) / (2 * step)
    nn.utils.vector_to_parameters(start, parameters)
    return found


def eigenthings(network: nn.Module, batches: list[tuple[Tensor, Tensor]], method: str = "autograd") -> Any:
    made = import_module("hessian_eigenthings").HessianOperator
    return made(network, batches, lambda m, b: functional.cross_entropy(m(b[0]), b[1]), method=method)


def eigenthings_product(method: str) -> Product:
    return lambda network, x, y, v: eigenthings(network, [(x, y)], method).matvec(v)


def curvlinops_product(network: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    made = import_module("curvlinops").HessianLinearOperator
    with contextlib.redirect_stdout(io.StringIO()):
        return made(network, nn.CrossEntropyLoss(), list(network.parameters()), [(x, y)]) @ v


def pyhessian_of(network: nn.Module, x: Tensor, y: Tensor) -> Any:
    return import_module("pyhessian.hessian").hessian(network, nn.CrossEntropyLoss(), data=(x, y), cuda=False)


def pyhessian_product(network: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    made = pyhessian_of(network, x, y)
    parts = [part.view_as(p) for part, p in zip(v.split([p.numel() for p in made.params]), made.params, strict=True)]
    found = import_module("pyhessian.utils").hessian_vector_product(made.gradsH, made.params, parts)
    return torch.cat([part.detach().reshape(-1) for part in found])


def unequal_batches(theirs: Callable[[nn.Module, list[tuple[Tensor, Tensor]], Tensor], Tensor]) -> Found:
    """Relative error of a product over mini-batches of 48 and 16 samples, which are one mean over samples."""
    network, x, y = problem("tanh")
    v = functional.normalize(torch.randn(sum(p.numel() for p in network.parameters())).double(), dim=0)
    exact = hessian(network, x, y) @ v
    batches = list(zip(x.split(48), y.split(48), strict=True))
    ours = sum(len(a) / 64 * our_product(network, a, b, v) for a, b in batches)
    assert isinstance(ours, Tensor)
    return Found(0.0, error(theirs(network, batches, v), exact), error(ours, exact))


def curvlinops_batches(network: nn.Module, batches: list[tuple[Tensor, Tensor]], v: Tensor) -> Tensor:
    made = import_module("curvlinops").HessianLinearOperator
    return made(network, nn.CrossEntropyLoss(), list(network.parameters()), batches, check_deterministic=False) @ v


def top(theirs: Callable[[nn.Module, Tensor, Tensor], list[float]], activation: str = "tanh") -> Found:
    """The fifth eigenvalue by magnitude."""
    network, x, y = problem(activation)
    values = torch.linalg.eigvalsh(hessian(network, x, y))
    exact = float(values[values.abs().argsort(descending=True)[4]])
    found = sorted(theirs(network, x, y), key=abs)[-5]
    network.zero_grad()
    subject = landscape.load(network, data=(x, y), batch_size=64, device="cpu")
    ours = landscape.measure("hessian", subject, out=None, quiet=True, top=5)["eigenvalue"].values.reshape(-1)
    return Found(exact, float(found), float(sorted(ours, key=abs)[-5]))


def trace(theirs: Callable[[nn.Module, Tensor, Tensor], list[float]]) -> Found:
    """Root mean square error of a trace over 200 seeds, in units of the trace; about 32 products each."""
    network, x, y = problem("tanh")
    exact = float(hessian(network, x, y).trace())
    subject = landscape.load(network, data=(x, y), batch_size=64, device="cpu")
    ours = [float(landscape.measure("trace", subject, out=None, quiet=True, seed=seed)["trace"]) for seed in range(200)]
    rms = [float(np.sqrt(np.mean((np.array(values) / exact - 1) ** 2))) for values in (theirs(network, x, y), ours)]
    return Found(0.0, *rms)


def pyhessian_traces(network: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    made = pyhessian_of(network, x, y)
    return [float(np.mean(made.trace(maxIter=32))) for seed in range(200) if torch.manual_seed(seed)]


def curvlinops_trace(network: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    peer = import_module("curvlinops")
    made = peer.HessianLinearOperator(network, nn.CrossEntropyLoss(), list(network.parameters()), [(x, y)])
    return [float(peer.xtrace(made, 32)) for seed in range(200) if torch.manual_seed(seed)]


def two_objects() -> Found:
    """The largest eigenvalue of a second mini-batch, whose object was built after that of a first one."""
    network, x, y = problem("tanh")
    _first, second = (pyhessian_of(network, a, b) for a, b in zip(x.split(32), y.split(32), strict=True))
    theirs = float(second.eigenvalues(maxIter=1000, tol=1e-6)[0][0])
    network.zero_grad()
    exact = torch.linalg.eigvalsh(hessian(network, x[32:], y[32:]))
    subject = landscape.load(network, data=(x, y), batch_size=32, device="cpu")
    ours = landscape.measure("hessian", subject, out=None, quiet=True, top=1)["eigenvalue"].values.reshape(2, -1)[1, 0]
    return Found(float(exact[exact.abs().argmax()]), theirs, float(ours))


def density_mean() -> Found:
    """The mean of a spectral density: the trace over the number of weights."""
    network, x, y = problem("tanh")
    exact, n = float(hessian(network, x, y).trace()), sum(p.numel() for p in network.parameters())
    nodes, weights = (np.real(np.array(part)) for part in pyhessian_of(network, x, y).density(iter=20, n_v=8))
    network.zero_grad()
    subject = landscape.load(network, data=(x, y), batch_size=64, device="cpu")
    ours = landscape.measure("density", subject, out=None, quiet=True, vectors=8, steps=20)["mean"]
    return Found(exact / n, float((nodes * weights).sum(axis=1).mean()), float(ours))


def half(width: int, part: int, *before: nn.Module) -> nn.Sequential:
    """A linear network that keeps the first or the second half of its inputs."""
    linear = nn.Linear(2 * width, width, bias=False)
    linear.weight.data = torch.eye(2 * width)[part * width : (part + 1) * width]
    return nn.Sequential(*before, linear)


def cka(samples: int, width: int, shared: float, theirs: Callable[[Tensor, Tensor], float]) -> Found:
    """CKA of Gaussian features with `shared` of the variance in common, over all possible samples: shared."""
    draw = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(samples, width, generator=draw).double() for _ in range(2))
    y = shared**0.5 * x + (1 - shared) ** 0.5 * noise
    both = torch.stack([x, y])
    first, second = (half(width, part, nn.Flatten()).double() for part in (0, 1))
    subject = landscape.load(
        first, data=(torch.cat([x, y], dim=1), torch.zeros(samples, dtype=torch.long)), batch_size=samples,
        device="cpu",
    )  # fmt: skip
    found = landscape.measure("similarity", subject, out=None, quiet=True, against=second, layers=("1",))
    return Found(shared, theirs(*both), float(found["cka"][0, 0]))


def biased_cka(x: Tensor, y: Tensor) -> float:
    """Kornblith et al. 2019, equation for linear CKA, on one set of samples."""
    x, y = (part - part.mean(dim=0) for part in (x, y))
    return float((x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm()))


def torch_cka(x: Tensor, y: Tensor) -> float:
    ends = [half(x.shape[1], part) for part in (0, 1)]  # it computes in single precision
    made = import_module("torch_cka").CKA(*ends, "a", "b", ["0"], ["0"])
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.cat([x, y], dim=1).float(), torch.zeros(len(x))), batch_size=len(x)
    )
    with contextlib.redirect_stderr(io.StringIO()):
        made.compare(loader)
    return float(made.export()["CKA"][0, 0])


def simtorch_cka(x: Tensor, y: Tensor, batches: int = 1) -> float:
    model = import_module("simtorch.model").SimilarityModel  # it computes in single precision
    ends = [model(half(x.shape[1], part), layers_to_include=["0"]) for part in (0, 1)]
    made = import_module("simtorch.similarity").CKA(*ends)
    with contextlib.redirect_stderr(io.StringIO()):
        made.compute([(part,) for part in torch.cat([x, y], dim=1).float().chunk(batches)])
    return float(made.sim_matrix[0, 0])


def backpack_sums(extension: str, reduction: str) -> tuple[list[nn.Parameter], Tensor, Any]:
    """Parameters with what the package adds to a pass; gradients of all samples; and what our probe stores."""
    network, x, y = problem("tanh", samples=256)
    start = {name: p.detach().clone() for name, p in network.named_parameters()}

    def loss(p: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(network, p, (a[None],)), b[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(start, x, y)
    backpack, extensions = import_module("backpack"), import_module("backpack.extensions")
    subject = landscape.load(problem("tanh", samples=256)[0], data=(x, y), device="cpu")
    found = landscape.measure("noise-scale", subject, out=None, quiet=True, groups=32, simple=True)
    model, criterion = backpack.extend(network), backpack.extend(nn.CrossEntropyLoss(reduction=reduction))
    with backpack.backpack(getattr(extensions, extension)()):
        criterion(model(x), y).backward()
    return list(network.parameters()), torch.cat([part.flatten(1) for part in each.values()], dim=1), found


def backpack_noise() -> Found:
    """Trace of the covariance of a sample's gradient, from the sums of squares that the package adds to a pass."""
    parameters, each, found = backpack_sums("Variance", "mean")
    theirs = sum(float(p.variance.sum()) for p in parameters) * len(each) ** 2
    return Found(float(each.var(dim=0, correction=0).sum()), theirs, float(found["gradient_noise"]))


def backpack_squares() -> Found:
    """The sum over samples of the squared norms of their gradients."""
    parameters, each, found = backpack_sums("BatchL2Grad", "sum")
    theirs = sum(float(p.batch_l2.sum()) for p in parameters)
    return Found(
        float(each.square().sum()), theirs, float(found["gradient_noise"] + found["squared_gradient"]) * len(each)
    )


def pyhessian_top(network: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    torch.manual_seed(0)
    return [float(value) for value in pyhessian_of(network, x, y).eigenvalues(top_n=5)[0]]


def eigenthings_top(network: nn.Module, x: Tensor, y: Tensor, method: str = "autograd") -> list[float]:
    lanczos = import_module("hessian_eigenthings").algorithms.lanczos
    return [float(v) for v in lanczos(eigenthings(network, [(x, y)], method), k=5, seed=0).eigenvalues]


def curvlinops_top(network: nn.Module, x: Tensor, y: Tensor) -> list[float]:
    made = import_module("curvlinops").HessianLinearOperator
    operator = made(network, nn.CrossEntropyLoss(), list(network.parameters()), [(x, y)])
    found = import_module("scipy.sparse.linalg").eigsh(operator.to_scipy(), 5, which="LM", return_eigenvectors=False)
    return [float(value) for value in found]


PRODUCT, FLOAT = "relative error of a Hessian product, {}", torch.float32
CASES: dict[str, tuple[str, Callable[[], Found]]] = {  # peer: number -> package, case
    **{
        f"{peer}: ECE, {words}": (package, lambda name=name, of=of: ece(name, of))
        for peer, package, of in (("torchmetrics", "torchmetrics", torchmetrics_ece), ("netcal", "netcal", netcal_ece))
        for name, words in (("certain", "all confidences 1"), ("half certain", "half of them 1"), ("drawn", "drawn"))
    },
    **{
        f"{peer}: {PRODUCT.format(activation)}": (package, lambda a=activation, of=of: product_error(a, of, FLOAT))
        for peer, package, of in (
            ("central difference, step 5e-3", "", difference),
            ("hessian-eigenthings, finite difference", "hessian-eigenthings", eigenthings_product("finite_difference")),
            ("hessian-eigenthings", "hessian-eigenthings", eigenthings_product("autograd")),
            ("curvlinops", "curvlinops-for-pytorch", curvlinops_product),
            ("PyHessian", "PyHessian", pyhessian_product),
        )
        for activation in ACTIVATIONS
    },
    "hessian-eigenthings: product over mini-batches of 48 and 16": (
        "hessian-eigenthings",
        lambda: unequal_batches(lambda network, batches, v: eigenthings(network, batches).matvec(v)),
    ),
    "curvlinops: product over mini-batches of 48 and 16": (
        "curvlinops-for-pytorch", lambda: unequal_batches(curvlinops_batches),
    ),
    "hessian-eigenthings: fifth eigenvalue, default Lanczos": ("hessian-eigenthings", lambda: top(eigenthings_top)),
    "curvlinops: fifth eigenvalue, with eigsh": ("curvlinops-for-pytorch", lambda: top(curvlinops_top)),
    "PyHessian: fifth eigenvalue, defaults": ("PyHessian", lambda: top(pyhessian_top)),
    "PyHessian: eigenvalue of the second of two objects, both built first": ("PyHessian", two_objects),
    "PyHessian: mean of the density": ("PyHessian", density_mean),
    "PyHessian: relative error of the trace, at most 32 products": ("PyHessian", lambda: trace(pyhessian_traces)),
    "curvlinops: relative error of the trace, 32 products": ("curvlinops-for-pytorch", lambda: trace(curvlinops_trace)),
    **{
        f"{peer}: CKA of {n} samples, {width} features, {shared:g} in common": (
            package, lambda n=n, width=width, shared=shared, of=of: cka(n, width, shared, of)
        )
        for peer, package, of in (
            ("biased CKA", "", biased_cka), ("torch-cka", "torch-cka", torch_cka),
            ("simtorch", "simtorch", simtorch_cka),
        )
        for n, width, shared in ((64, 64, 0.0), (64, 64, 0.5), (1024, 16, 0.5))
    },
    "simtorch: CKA of equal features, four mini-batches": (
        "simtorch", lambda: cka(256, 16, 1.0, lambda x, y: simtorch_cka(x, y, 4)),
    ),
    "BackPACK: trace of the gradient's covariance": ("backpack-for-pytorch", backpack_noise),
    "BackPACK: sum of squared gradients": ("backpack-for-pytorch", backpack_squares),
    **{
        f"torchattacks: {number} under {name.upper()} of a linear network, pixels {words}": (
            "torchattacks", lambda of=(pixels, name, number): Found(*planes.attacked(*of))
        )
        for pixels, words, name, number in (
            ("inside", "inside", "fgsm", "accuracy"), ("bounds", "at 0 and 1", "fgsm", "loss"),
            ("inside", "inside", "pgd", "loss"),
        )
    },
    "loss-landscapes: error of filter norms of a direction": (
        "loss-landscapes", lambda: Found(*planes.norm_of_filters()),
    ),
    "loss-landscapes: length of a line of distance 1, over that of 0.5": (
        "loss-landscapes", lambda: Found(*planes.line_of_distance()),
    ),
    "loss-landscapes: largest change of a weight by a line": (
        "loss-landscapes", lambda: Found(*planes.weights_after_a_line()),
    ),
    **{
        f"rebasin: barrier to a permuted copy, two layers of {width}": (
            "rebasin", lambda width=width: Found(*planes.permuted_copy(width))
        )
        for width in (16, 64, 256)
    },
}  # fmt: skip

UPSTREAM = {  # what is known there of a number that is wrong
    "PyHessian: mean of the density": "amirgholami/PyHessian#17, mended after the release (#23)",
    "PyHessian: eigenvalue of the second of two objects, both built first": "no report found",
    "simtorch: CKA of equal features, four mini-batches": "ykumards/simtorch#20, mended after the release (#52)",
    "hessian-eigenthings: product over mini-batches of 48 and 16": "documented: a mean over them, of equal weights",
    "hessian-eigenthings: fifth eigenvalue, default Lanczos": "reported by it as not converged after 10 steps",
    "loss-landscapes: length of a line of distance 1, over that of 0.5": "mended after the release (8d34610)",
    "loss-landscapes: largest change of a weight by a line": "an option, deepcopy_model=True, avoids it",
}


def line(name: str) -> str:
    """The row of one case."""
    peer, _, number = name.partition(": ")
    package, case = CASES[name]
    version = importlib.metadata.version(package) if package else "by definition"
    try:
        found = case()
    except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as problem:
        return row(
            peer, version, number, "", f"{type(problem).__name__}: {str(problem)[:60]}".replace("|", "/"), "", "", "",
            UPSTREAM.get(name, ""),
        )  # fmt: skip
    theirs = float(found.theirs)
    off = [f"{abs(value - found.exact):.1e}" for value in (theirs, found.ours)]
    return row(
        peer, version, number, f"{found.exact:.5g}", f"{theirs:.5g}", f"{found.ours:.5g}", *off, UPSTREAM.get(name, "")
    )


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:]:
        print(*map(line, sys.argv[1:]), sep="\n")
        return
    rows = []
    for name in CASES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows.append(line(name))
            print(rows[-1], flush=True)
    prose = PAGE.read_text().partition("\n\nMeasured ")[0]
    names = ("peer", "version", "number", "exact", "theirs", "ours", "their error", "our error", "upstream")
    PAGE.write_text(
        f"{prose}\n\nMeasured {datetime.date.today()} with PyTorch {torch.__version__}.\n\n{header(*names)}\n"
        + "\n".join(rows)
        + "\n"
    )


if __name__ == "__main__":
    main()
