"""Cases of attacks, lines and permutations, whose exact values are closed forms of linear or permuted networks."""

import copy
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional

import landscape

Three = tuple[float, float, float]  # exact, theirs, ours
EPS = 8 / 255


def linear(pixels: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Two classes, pictures of 4 x 4 pixels: far from 0 and 1, or at them."""
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        network[1].weight.mul_(5)
    x = torch.rand(400, 1, 4, 4, generator=draw)
    x = 0.2 + 0.6 * x if pixels == "inside" else x.round()
    return network, x, (torch.rand(400, generator=draw) < network(x).softmax(1)[:, 1]).long()


def attacked(pixels: str, name: str, number: str) -> Three:
    """The worst point of the ball is a corner, cut at 0 and 1, since the logits are linear."""
    network, x, y = linear(pixels)
    made = import_module("torchattacks")
    attack = made.FGSM(network, eps=EPS) if name == "fgsm" else made.PGD(network, eps=EPS)
    w = network[1].weight.detach()
    away = (w[1] - w[0]).sign().view(1, 1, 4, 4) * (1 - 2 * y).view(-1, 1, 1, 1)
    torch.manual_seed(0)

    def reduced(pictures: Tensor) -> float:
        logits = network(pictures).detach()
        if number == "accuracy":
            return float((logits.argmax(1) == y).float().mean())
        return float(functional.cross_entropy(logits, y))

    subject = landscape.load(network, data=(x, y), device="cpu")
    ours = landscape.measure("attack", subject, out=None, quiet=True, eps="8/255", methods=name)
    return reduced((x + EPS * away).clamp(0, 1)), reduced(attack(x, y)), float(ours[number].squeeze())


def _mlp(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def _samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(64, 8, generator=draw), torch.randint(3, (64,), generator=draw)


def _farthest(network: nn.Module, run: Callable[[], object]) -> float:
    """The largest distance of the weights from those at the start, at all passes of a run."""
    start, found = nn.utils.parameters_to_vector(network.parameters()).detach().clone(), [0.0]
    hook = network.register_forward_pre_hook(
        lambda module, _: found.append(float((nn.utils.parameters_to_vector(module.parameters()) - start).norm()))
    )
    with torch.no_grad():
        run()
    hook.remove()
    return max(found)


def _random_line(network: nn.Module, **options: float) -> None:
    loss = import_module("loss_landscapes.metrics").Loss(nn.CrossEntropyLoss(), *_samples())
    import_module("loss_landscapes").random_line(network, loss, **options)


def _line(distance: float) -> tuple[float, float]:
    x, y = _samples()
    torch.manual_seed(0)
    theirs, ours = _mlp(), _mlp()
    torch.manual_seed(1)
    reached = _farthest(theirs, lambda: _random_line(theirs, distance=distance, steps=10))
    subject = landscape.load(ours, data=(x, y), device="cpu")
    return reached, _farthest(ours, lambda: landscape.measure("line", subject, out=None, quiet=True, range=distance))


def line_of_distance() -> Three:
    """Of a line asked for twice as far: how much farther its end is."""
    (theirs, ours), (their_double, our_double) = _line(0.5), _line(1.0)
    return 2.0, their_double / theirs, our_double / ours


def weights_after_a_line() -> Three:
    """The largest change of a weight of the network by being measured."""
    x, y = _samples()
    found = []
    for peer in (True, False):
        network = _mlp()
        before = copy.deepcopy(network)
        if peer:
            _random_line(network)
        else:
            subject = landscape.load(network, data=(x, y), device="cpu")
            landscape.measure("line", subject, out=None, quiet=True)
        pairs = zip(before.parameters(), network.parameters(), strict=True)
        found.append(max(float((a - b).abs().max()) for a, b in pairs))
    return 0.0, found[0], found[1]


def norm_of_filters() -> Three:
    """The largest relative error of the norms of a direction's filters after filter normalisation."""
    x, y = _samples()
    network = _mlp()
    vectors = import_module("loss_landscapes.model_interface.model_parameters")
    torch.manual_seed(1)
    direction = vectors.rand_u_like(point := vectors.ModelParameters([p.detach() for p in network.parameters()]))
    direction.filter_normalize_(point)
    pairs = [(w, d) for w, d in zip(point.parameters, direction.parameters, strict=True) if w.dim() > 1]
    theirs = max(float((d.norm(dim=1) / w.norm(dim=1) - 1).abs().max()) for w, d in pairs)
    seen: list[Tensor] = []
    hook = network.register_forward_pre_hook(
        lambda module, _: seen.append(torch.cat([p.detach().clone() for p in (module[0].weight.T, module[2].weight.T)]))
    )
    landscape.measure("line", landscape.load(network, data=(x, y), device="cpu"), out=None, quiet=True, range=1.0)
    hook.remove()
    start = torch.cat([network[0].weight.T, network[2].weight.T]).detach()
    far = max(seen, key=lambda w: float((w - start).norm())) - start
    ours = max(
        float((part.norm(dim=0) / whole.norm(dim=0) - 1).abs().max())
        for part, whole in zip(far.split((8, 16)), start.split((8, 16)), strict=True)
    )
    return 0.0, theirs, ours


def permuted_copy(width: int) -> Three:
    """Loss in the middle between a network and a copy with permuted units, over that of the network, after matching."""
    x, y = _samples()
    network, draw = _mlp(width), torch.Generator().manual_seed(2)
    other = copy.deepcopy(network)
    with torch.no_grad():
        for i in (0, 2):
            order = torch.randperm(width, generator=draw)
            other[i].weight.copy_(other[i].weight[order])
            other[i].bias.copy_(other[i].bias[order])
            other[i + 2].weight.copy_(other[i + 2].weight[:, order])
    matched, middle = copy.deepcopy(other), copy.deepcopy(network)
    import_module("rebasin").PermutationCoordinateDescent(network, matched, x).rebasin()
    with torch.no_grad():
        for a, b in zip(middle.parameters(), matched.parameters(), strict=True):
            a.lerp_(b, 0.5)
        theirs = float(functional.cross_entropy(middle(x), y) - functional.cross_entropy(network(x), y))
    subject = landscape.load(network, data=(x, y), device="cpu")
    ours = landscape.measure("align", subject, out=None, quiet=True, against=other)
    return 0.0, theirs, float(ours["barrier"][-1])
