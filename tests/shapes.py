"""Networks and data of every shape, with the losses of each by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from landscape.subject.loading.load import load
from landscape.subject.subject import Subject

SAMPLES = 12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Autoencoder(nn.Module):
    """A variational autoencoder that returns a dictionary and draws its noise from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, log_variance = torch.tanh(self.encoder(x)).chunk(2, dim=1)
        return {"decoded": self.decoder(mean + (log_variance / 2).exp() * noise), "mean": mean, "spread": log_variance}


def evidence(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    divergence = (outputs["mean"].square() + outputs["spread"].exp() - 1 - outputs["spread"]).sum(dim=1) / 2
    return (outputs["decoded"] - batch["x"]).square().sum(dim=1) + divergence


class HeatEquation(nn.Module):
    """A physics-informed network: its output is the residual of u_xx = -u, by derivatives inside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return cast(Tensor, curvature + u)


class Sentences(nn.Module):
    """An LSTM over padded sequences of known lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return cast(Tensor, self.head(hidden[-1]))


class GraphNetwork(nn.Module):
    """Sums messages along edges, then nodes of each graph: nodes and edges are packed over the graphs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        received = (
            torch.zeros(len(nodes), 6).to(nodes).index_add(0, edges[1], torch.tanh(self.message(nodes))[edges[0]])
        )
        return cast(Tensor, self.head(torch.zeros(int(graph.max()) + 1, 6).to(nodes).index_add(0, graph, received)))


def graphs() -> list[dict[str, Tensor]]:
    """Three batches of four graphs of two to five nodes."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        sizes = torch.randint(2, 6, (4,), generator=generator)
        count = int(sizes.sum())
        starts = sizes.cumsum(0) - sizes
        edges = torch.cat(
            [torch.combinations(torch.arange(int(n))).T + s for n, s in zip(sizes, starts, strict=True)], 1
        )
        batches.append(
            {
                "nodes": torch.randn(count, 3, generator=generator),
                "edges": edges,
                "graph": torch.repeat_interleave(torch.arange(4), sizes),
                "y": torch.randint(2, (4,), generator=generator),
            }
        )
    return batches


class Segmentation(nn.Module):
    """A U-Net of one level: a logit for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(3, 3, 2, stride=2), nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.down(x))
        inner = torch.tanh(self.inner(F.avg_pool2d(first, 2)))
        return cast(Tensor, self.head(torch.cat([first, self.up(inner)], dim=1)))


def per_pixel(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").flatten(1).mean(dim=1)


class Denoiser(nn.Module):
    """Predicts the noise that was added to a sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 4))

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        return cast(Tensor, self.net(torch.cat([noisy, time[:, None]], dim=1)))


def diffusion(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    clean, noise, time = batch
    noisy = (1 - time)[:, None] * clean + time[:, None] * noise
    return cast(Tensor, (model(noisy, time) - noise).square().mean(dim=1))


@dataclass
class Measured:
    """A batch as a dataclass, as users pack theirs."""

    features: Tensor
    target: Tensor


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, batch: Measured) -> Tensor:
        return cast(Tensor, self.net(batch.features))


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(dim=1)


class Tokens(Dataset[dict[str, Any]]):
    """Samples as dicts, with a text beside the tensors."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i >= SAMPLES:
            raise IndexError(i)
        tokens = torch.randint(9, (6,), generator=torch.Generator().manual_seed(i))
        return {"tokens": tokens, "lengths": torch.tensor(1 + i % 6), "labels": i % 3, "text": f"sentence {i}"}


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Any]
CASES: dict[str, Case] = {
    "autoencoder": (Autoencoder, lambda: {"x": drawn(SAMPLES, 6), "noise": drawn(SAMPLES, 2, seed=1)}, evidence),
    "physics": (HeatEquation, lambda: (drawn(SAMPLES, 1), torch.zeros(SAMPLES, 1)), "mse"),
    "sentences": (Sentences, Tokens, ""),
    "graphs": (GraphNetwork, graphs, ""),
    "segmentation": (
        Segmentation,
        lambda: (drawn(SAMPLES, 1, 6, 6), (drawn(SAMPLES, 1, 6, 6, seed=1) > 0).float()),
        per_pixel,
    ),
    "regression": (Regression, lambda: Measured(drawn(SAMPLES, 3), drawn(SAMPLES, 2, seed=1)), weighted),
    "denoiser": (
        Denoiser,
        lambda: DataLoader(
            TensorDataset(drawn(SAMPLES, 4), drawn(SAMPLES, 4, seed=1), drawn(SAMPLES, seed=2).sigmoid()), batch_size=4
        ),
        diffusion,
    ),
}


def subject_of(case: str) -> Subject:
    build, data, loss = CASES[case]
    torch.manual_seed(0)
    return load(build().double(), data=data(), loss=loss, batch_size=4)


def losses_by_hand(case: str, model: nn.Module) -> list[Tensor]:
    """Losses per sample of every mini-batch of four, without any part of the package."""
    whole = CASES[case][1]()
    rows = [slice(at, at + 4) for at in range(0, SAMPLES, 4)]
    if case == "autoencoder":
        parts = [{name: tensor[row].double() for name, tensor in whole.items()} for row in rows]
        return [evidence(model(**part), part) for part in parts]
    if case == "physics":
        return [model(whole[0][row].double()).square()[:, 0] for row in rows]
    if case == "sentences":
        items = [[whole[i] for i in range(SAMPLES)][row] for row in rows]
        stacked = [
            {k: torch.stack([torch.as_tensor(i[k]) for i in part]) for k in ("tokens", "lengths", "labels")}
            for part in items
        ]
        return [F.cross_entropy(model(b["tokens"], b["lengths"]), b["labels"], reduction="none") for b in stacked]
    if case == "graphs":
        return [
            F.cross_entropy(model(b["nodes"].double(), b["edges"], b["graph"]), b["y"], reduction="none") for b in whole
        ]
    if case == "segmentation":
        return [per_pixel(model(whole[0][row].double()), whole[1][row].double()) for row in rows]
    if case == "regression":
        pairs = [(Measured(whole.features[row].double(), whole.target[row]), whole.target[row]) for row in rows]
        return [weighted(model(batch), target.double()) for batch, target in pairs]
    return [diffusion(model, tuple(part.double() for part in batch)) for batch in whole]
