"""Permutations of a network's units: found in any network, proven, matched and applied."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from foreign import torchvision_models
from torch import Tensor, nn

from landscape import models
from landscape.symmetry.labels import Calculus, Labels
from landscape.symmetry.matching import match
from landscape.symmetry.networks import TOLERANCE, proven, recorded, tensors_of
from landscape.symmetry.permutations import Permutations, Units


class Depthwise(nn.Module):
    """Grouped convolutions: a depth-wise one with two outputs per channel, and one of four groups, with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.grouped, self.project = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        x = x + self.project(torch.relu(self.grouped(torch.relu(self.depthwise(x)))))
        return self.head(x.mean(dim=(2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 10), nn.GELU(), nn.Linear(10, 5))


def gpt2() -> nn.Module:
    torchvision_models()  # without its compiled operators transformers cannot be imported
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 3}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, set[int]]] = {  # with sizes of groups that it must have
    "MLP": (mlp, 4, {10, 12}),
    "grouped convolutions": (Depthwise, 8, {4, 8, 16}),
    "ViT": (lambda: models.build("vit_demo", classes=5, image_size=8, depth=2), 8, {3, 48, 192}),
    "ResNet": (lambda: models.build("resnet_demo", classes=5, image_size=8), 8, {16, 32, 64}),
    "GPT-2": (gpt2, 0, {3, 12, 48}),
}


def jittered_network(build: Callable[[], nn.Module]) -> nn.Module:
    """A network with a little noise, so that initial values that are all equal do not hide a wrong permutation."""
    torch.manual_seed(0)
    model, generator = build().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in tensors_of(model).values():
            tensor.add_(0.1 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
    return model


def runner(size: int) -> tuple[Callable[[nn.Module], Any], Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 3, size, size, generator=generator)
    if not size:
        inputs = torch.randint(20, (2, 8), generator=generator)

    def run(model: nn.Module) -> Any:
        given = inputs.to(next(model.parameters()).dtype) if size else inputs
        found = model(given)
        return getattr(found, "logits", found)

    return run, inputs


def found_in(name: str) -> tuple[nn.Module, Callable[[nn.Module], Any], Permutations]:
    build, size, _ = NETWORKS[name]
    model, (run, inputs) = jittered_network(build), runner(size)
    permutations, unknown = recorded(model, run, inputs)
    assert not unknown
    return model, run, permutations


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_random_permutations_of_all_groups_leave_the_function_and_are_found_again(name: str) -> None:
    model, run, permutations = found_in(name)
    proof = proven(permutations, model, run, seed=1)
    assert not proof.refused
    assert proof.error <= 1e-12
    assert NETWORKS[name][2] <= {len(group) for group in permutations.groups}
    own = {key: tensor.detach() for key, tensor in tensors_of(model).items()}
    generator = np.random.default_rng(2)
    planted = permutations.random(generator)
    assert (planted != permutations.identity).mean() > 0.5
    moved = permutations.apply(own, planted)
    noisy = {key: tensor + 1e-3 * torch.randn_like(tensor) for key, tensor in moved.items()}
    found = match(permutations, own, noisy, restarts=1)
    assert (planted[found.moved] == permutations.identity).mean() >= 0.95
    assert found.similarity > found.before


def test_every_unit_of_a_network_without_an_order_of_its_own_moves() -> None:
    _, _, permutations = found_in("MLP")
    assert sorted(len(group) for group in permutations.groups) == [10, 12]
    assert set(permutations.places) == {"1.weight", "1.bias", "3.weight", "3.bias", "5.weight"}
    assert set(permutations.places["5.weight"]) == {1}  # the classes stay


def test_heads_move_as_blocks() -> None:
    _, _, permutations = found_in("GPT-2")
    within = [group for group in permutations.groups if group.within >= 0]
    assert {len(permutations.groups[group.within]) for group in within} == {3}  # heads
    assert {len(group) for group in within} == {12}  # of four units each, of keys and of values
    for _ in range(3):
        moved = permutations.random(np.random.default_rng(3))
        for group in within:
            came = [group.block[np.flatnonzero(group.units == u)[0]] for u in moved[group.units]]
            assert len({(int(a), int(b)) for a, b in zip(group.block, came, strict=True)}) == 3


def test_a_wrong_group_fails_the_proof_and_stays() -> None:
    """The classes, whose order the outputs show."""
    model, run, permutations = found_in("MLP")
    size = permutations.size
    places = {**permutations.places, "5.weight": {**permutations.places["5.weight"], 0: np.arange(size, size + 5)}}
    wrong = type(permutations.groups[0])("5.weight:0", np.arange(size, size + 5), np.zeros(5, dtype=np.int64), -1)
    proof = proven(Permutations([*permutations.groups, wrong], size + 5, places), model, run)
    assert proof.refused == ("5.weight:0",)
    assert proof.error <= TOLERANCE
    assert proof.permutations.size == size


class Picks(nn.Module):
    """Half of the units are treated in another way; the others pass an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(torch.cat([x[:, :4].tanh(), x[:, 4:].sin()], dim=1))
        return self.third(x.cumsum(dim=1))


def test_units_that_are_treated_differently_are_not_exchanged() -> None:
    model = jittered_network(Picks)
    inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    permutations, unknown = recorded(model, lambda m: m(inputs.to(next(m.parameters()).dtype)), inputs)
    assert unknown == {"cumsum"}
    assert sorted(len(group) for group in permutations.groups) == [4, 4]  # the halves; none after the sum in order
    assert proven(permutations, model, lambda m: m(inputs.to(next(m.parameters()).dtype))).error <= 1e-12


def test_a_partial_sum_makes_blocks_which_two_partitions_cannot_share() -> None:
    units = Units()
    calculus = Calculus(units)
    labels = Labels((4, 3), (units.fresh(12).reshape(4, 3),), (False, False))
    reduced = calculus.reduce(labels, [1])
    (blocks,) = reduced.arrays
    assert blocks.shape == (4, 1)
    assert (units.block_of(labels.arrays[0]) == units.find(blocks)).all()
    assert not any(units.pinned(int(u)) for u in labels.arrays[0].ravel())
    other = calculus.reduce(labels, [0])  # across the blocks
    assert all(units.pinned(int(u)) for u in (*labels.arrays[0].ravel(), *other.arrays[0].ravel()))


def test_matching_finds_the_best_assignment_of_one_group() -> None:
    """Of a group of four units all 24 permutations are tried."""
    from itertools import permutations as orders

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    inputs = torch.randn(2, 3, dtype=torch.float64)
    permutations, _ = recorded(model, lambda m: m(inputs), inputs)
    first, second = ({k: torch.randn_like(t) for k, t in tensors_of(model).items()} for _ in range(2))
    found = match(permutations, first, second, restarts=2)
    zero = match(permutations, first, {name: torch.zeros_like(tensor) for name, tensor in second.items()}, restarts=1)
    assert np.isnan(zero.cosine(zero.similarity))
    units = permutations.places["0.weight"][0]

    def similarity(order: tuple[int, ...]) -> float:
        moved = permutations.identity
        moved[units] = units[list(order)]
        return sum(float((first[k] * permutations.applied(k, second[k], moved)).sum()) for k in permutations.places)

    assert found.similarity == pytest.approx(max(map(similarity, orders(range(4)))), rel=1e-6)
