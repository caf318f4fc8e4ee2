"""Subjects whose loss, curvature or surface is known in closed form, and a probe's result without a results file."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from landscape import models
from landscape.probe import Probe, Stages, sweep
from landscape.products.vectors import flat, unflat
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject

Batch = tuple[Tensor, Tensor]


class Quadratic(nn.Module):
    """One output per sample, s (w'Aw / 2 + b'w) + o, where (s, o) is the sample."""

    matrix: Tensor
    slope: Tensor

    def __init__(self, weight: Tensor, matrix: Tensor, slope: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.register_buffer("matrix", matrix)
        self.register_buffer("slope", slope)

    def forward(self, samples: Tensor) -> Tensor:
        w = self.weight.flatten()
        value = w @ self.matrix @ w / 2 + self.slope @ w
        return samples[:, :1] * value + samples[:, 1:]


def quadratic(
    matrix: Tensor,
    *,
    weight: Tensor | None = None,
    slope: Tensor | None = None,
    batches: Sequence[Tensor] = (torch.tensor([[1.0, 0.0]]),),
    weight_decay: float = 0.0,
) -> Subject:
    """The bowl w'Aw / 2 + b'w; each batch holds rows (scale, offset), so that its Hessian is mean(scale) A.

    `weight` may have any shape of as many entries as A has rows; it starts at ones.
    """
    n = len(matrix)
    weight = torch.ones(1, n) if weight is None else weight
    slope = torch.zeros(n) if slope is None else slope
    model = Quadratic(*(tensor.to(matrix.dtype) for tensor in (weight, matrix, slope))).eval()
    pairs = [(batch.to(matrix.dtype), torch.zeros(len(batch), dtype=torch.long)) for batch in batches]
    return Subject(model, pairs, losses=lambda outputs, targets: outputs[:, 0], weight_decay=weight_decay)


def symmetric(eigenvalues: Sequence[float] | Tensor, seed: int = 0) -> Tensor:
    """A dense symmetric matrix of that spectrum, (n, n) float64."""
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    matrix: Tensor = q @ torch.diag(values) @ q.T
    return matrix


def softmax_regression(*, samples: int = 12, features: int = 4, classes: int = 3) -> tuple[Subject, Tensor]:
    """Cross-entropy of a linear layer, with its Hessian, the mean over samples of (diag p - p p') kron x x'."""
    inputs, targets = random_batch((features,), samples, classes, seed=1)
    torch.manual_seed(0)
    model = nn.Linear(features, classes, bias=False).double()
    p = torch.softmax(model(inputs), dim=1).detach()
    blocks = [torch.kron(torch.diag(q) - torch.outer(q, q), torch.outer(x, x)) for q, x in zip(p, inputs, strict=True)]
    return Subject(model, [(inputs, targets)]), torch.stack(blocks).mean(dim=0)


def tanh_net(*, sizes: Sequence[int] = (6, 6), weight_decay: float = 0.0) -> Subject:
    """A smooth network of 59 weights, cross-entropy over mini-batches of the given sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double().eval()
    return Subject(model, batches_of((4,), sizes, 3), weight_decay=weight_decay)


def convolution_net(*, sizes: Sequence[int] = (6, 6)) -> Subject:
    """Convolution, batch norm off its initial statistics, GELU, average: 3 classes of 3 x 6 x 6 images."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(4, 3)).double().eval()  # fmt: skip
    norm.running_mean = 0.3 * torch.randn(4, dtype=torch.float64)
    norm.running_var = 0.5 + torch.rand(4, dtype=torch.float64)
    return Subject(model, batches_of((3, 6, 6), sizes, 3))


def attention_net(*, sizes: Sequence[int] = (6, 6)) -> Subject:
    """One block of attention and MLP with layer norm, on 2 x 2 patches of 3 x 4 x 4 images."""
    torch.manual_seed(0)
    model = models.build(
        "vit_demo", classes=3, image_size=4, patch=2, dim=6, depth=1, heads=2, mlp_ratio=1, std=0.5
    )  # fmt: skip
    return Subject(model.double().eval(), batches_of((3, 4, 4), sizes, 3))


NETWORKS: dict[str, Callable[[], Subject]] = {
    "tanh": tanh_net,
    "convolution and batch norm": convolution_net,
    "attention and layer norm": attention_net,
}


ORDERS = torch.tensor(list(itertools.permutations((1.0, 1e-9, -1.0))))  # rounding leaves 0 of most of these sums


class Cancelling(nn.Module):
    """Units whose inputs are 1e-9 from a number, towards zero; single precision rounds them to the number itself."""

    def __init__(self, bend: Callable[[Tensor], Tensor], *, near: float = 0.0) -> None:
        super().__init__()
        self.units, self.bend, self.near = nn.Linear(3, 6, bias=False), bend, near
        self.out = nn.Linear(6, 3)
        with torch.no_grad():
            self.units.weight.copy_(-ORDERS if near > 0 else ORDERS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.bend(self.units(x) + self.near))
        return y


def cancelling() -> Subject:
    """A network of single precision with units near their kinks, on two mini-batches."""
    torch.manual_seed(0)
    model = Cancelling(nn.functional.relu).eval()
    inputs = torch.ones(4, 3)
    inputs[3] = torch.tensor([-1.0, 0.5, 2.0])  # another pattern than the first samples
    return Subject(model, [(inputs, torch.tensor([0, 1, 2, 0])), (inputs, torch.tensor([2, 2, 1, 0]))])


def in_double(subject: Subject) -> Subject:
    """The same network and inputs in double precision."""
    batches = [(x.double(), y) for x, y in subject.batches]
    return Subject(copy.deepcopy(subject.model).double(), batches)


class Branching(nn.Module):
    """Chooses its activation by the values it sees, which a trace cannot record."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.tanh() if y.sum() > 0 else y.sin()


class Passage(nn.Module):
    """Images as they are at `maps`, halved by pooling at `pooled`, behind foreign tokens at `tokens`."""

    def __init__(self, channels: int, prefix: int) -> None:
        super().__init__()
        self.maps = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.dirac_(self.maps.weight)
        self.pooled = nn.AvgPool2d(2)
        self.prefix = nn.Parameter(1e3 * torch.randn(1, prefix, channels))
        self.tokens = nn.Identity()
        self.head = nn.Linear(channels, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.maps(images)
        small = self.pooled(maps).mean((2, 3))
        tokens = torch.cat([self.prefix.expand(len(maps), -1, -1), maps.flatten(2).transpose(1, 2)], dim=1)
        logits: Tensor = self.head(self.tokens(tokens).mean(1) + small)
        return logits


def passage(maps: Tensor, *, batch_size: int = 5, prefix: int = 3) -> Subject:
    """A subject whose layers hold the given maps (N, C, H, W)."""
    torch.manual_seed(0)
    model = Passage(maps.shape[1], prefix).to(maps.dtype).eval()
    targets = torch.arange(len(maps)) % 3
    return Subject(model, rebatched([(maps, targets)], batch_size))


def random_batch(shape: tuple[int, ...], samples: int, classes: int, *, seed: int) -> Batch:
    """Standard normal inputs and random classes, float64."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(classes, (samples,), generator=generator)


def batches_of(shape: tuple[int, ...], sizes: Sequence[int], classes: int) -> list[Batch]:
    """Mini-batches of the given sizes."""
    return [random_batch(shape, size, classes, seed=10 + i) for i, size in enumerate(sizes)]


def rebatched(batches: Sequence[Batch], size: int) -> list[Batch]:
    """The same samples in the same order, in mini-batches of another size."""
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))


def dense_hessian(subject: Subject, i: int = 0) -> Tensor:
    """The Hessian of the loss on mini-batch i, (n, n), by vectorised reverse over reverse mode.

    Not by `torch.func.hessian`: forward mode under vmap is wrong for the weights of a layer norm (torch 2.13).
    """
    parameters = {name: p.detach() for name, p in subject.parameters.items()}
    inputs, targets = subject.batch(i)

    def loss(weights: Tensor) -> Tensor:
        pieces = dict(zip(parameters, unflat(weights, list(parameters.values())), strict=True))
        return subject.losses(functional_call(subject.model, pieces, (inputs,)), targets).mean()

    with sdpa_kernel(SDPBackend.MATH):
        return jacrev(grad(loss))(flat(parameters.values()))  # type: ignore[no-any-return]


def dense_of(subject: Subject, operator: str, i: int = 0) -> Tensor:
    """The matrix `ggn` or `fisher` of mini-batch i, (n, n), from per-sample derivatives and those of cross-entropy."""
    parameters = {name: p.detach() for name, p in subject.parameters.items()}
    inputs, targets = subject.batch(i)

    def logits(weights: Tensor) -> Tensor:
        pieces = dict(zip(parameters, unflat(weights, list(parameters.values())), strict=True))
        return functional_call(subject.model, pieces, (inputs,))  # type: ignore[no-any-return]

    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(logits)(flat(parameters.values()))  # (N, classes, n)
        p = torch.softmax(logits(flat(parameters.values())), dim=1)
    if operator == "fisher":
        slopes = torch.einsum("sc,scn->sn", p - nn.functional.one_hot(targets, p.shape[1]), jacobian)
        return slopes.T @ slopes / len(targets)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("scn,scd,sdm->nm", jacobian, middle, jacobian) / len(targets)


def failing_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Fail, as the loss of a user may."""
    raise ArithmeticError("no loss")


def run_probe(probe: Probe, subject: Subject, *, units: int | None = None) -> dict[str, Any]:
    """All arrays of a probe's result as the results file stores them, with its first `units` units measured.

    A probe that measures in stages does so unless `units` are given.
    """
    plan = probe.plan(subject)
    arrays: dict[str, Any] = {**plan.over, **plan.axes, **{name: values for name, (_, values) in plan.labels.items()}}
    for name, quantity in plan.quantities.items():
        arrays[name] = np.full(plan.shape + tuple(len(plan.axis(dim)) for dim in quantity.dims), np.nan)
    arrays["done"] = np.zeros(plan.shape, dtype=np.uint8)
    stage = probe.stage(arrays) if isinstance(probe, Stages) and units is None else None
    while True:
        pending = list(plan.units())[:units] if stage is None else [plan.unit(index) for index in stage.indices]
        for unit, values in zip(pending, sweep(probe, subject, pending), strict=True):
            for name in plan.quantities:
                arrays[name][unit.index] = values[name]
            arrays["done"][unit.index] = 1
        if stage is None or not stage.indices:
            break
        assert isinstance(probe, Stages)
        stage = probe.stage(arrays)
    reduce = getattr(probe, "reduce", None)
    return {**arrays, **(reduce(arrays) if reduce is not None else {}), "facts": plan.facts}


def state(model: nn.Module) -> Mapping[str, Tensor]:
    """A copy of all weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def moved(subject: Subject, seed: int, scale: float = 0.3) -> dict[str, Tensor]:
    """All weights and statistics with a number from 0 to `scale` added to each."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in state(subject.model).items()
    }


def losses_with(subject: Subject, weights: Mapping[str, Tensor]) -> np.ndarray:
    """Losses per sample of the network with other weights and statistics, after which it has its own again."""
    kept = state(subject.model)
    subject.model.load_state_dict(dict(weights))
    losses: np.ndarray = per_sample(subject)[0].numpy()
    subject.model.load_state_dict(dict(kept))
    return losses


def same_state(model: nn.Module, kept: Mapping[str, Tensor]) -> bool:
    """Whether the model's weights and buffers are those kept, bit for bit."""
    now = model.state_dict()
    return now.keys() == kept.keys() and all(torch.equal(now[name], kept[name]) for name in kept)
