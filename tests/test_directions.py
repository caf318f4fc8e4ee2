"""Random directions: norms, what does not move, and independence of everything but the seed."""

import re

import pytest
import torch
from torch import Tensor

from landscape import models
from landscape.weight_space.directions import POSITIONS, Normalize, normalised, random_direction, standard_normal


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv.weight": (4, 3, 5, 5), "linear.weight": (6, 8), "bias": (6,), "scale": (), "table": (2, 1, 3)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def _norms(tensor: Tensor, kept: int | None) -> Tensor:
    """Norms over all dims but one (None: over all)."""
    return tensor.norm() if kept is None else tensor.movedim(kept, 0).flatten(1).norm(dim=1)


def test_each_normalisation_gives_the_norms_that_it_names(weights: dict[str, Tensor]) -> None:
    for name, direction in random_direction(weights, seed=3, axis=0).items():
        torch.testing.assert_close(_norms(direction, 0), _norms(weights[name], 0), rtol=1e-12, atol=0)
    found = random_direction(weights, seed=3, axis=0, normalize="layer")
    plain = random_direction(weights, seed=3, axis=0, normalize="none")
    for name, direction in found.items():
        torch.testing.assert_close(_norms(direction, None), _norms(weights[name], None))
        ratio = direction / plain[name]
        torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))
    for name, direction in random_direction(weights, seed=3, axis=0, normalize="park2022").items():
        torch.testing.assert_close(direction.norm(dim=0), weights[name].norm(dim=0))


def test_without_normalisation_entries_are_standard_normal() -> None:
    direction = random_direction({"w": torch.full((300, 300), 7.0)}, seed=0, axis=0, normalize="none")["w"]
    assert direction.mean().item() == pytest.approx(0.0, abs=4 / 300)
    assert direction.std().item() == pytest.approx(1.0, abs=4 / 300)


def test_vectors_and_scalars_do_not_move(weights: dict[str, Tensor]) -> None:
    assert set(random_direction(weights, seed=0, axis=0)) == {"conv.weight", "linear.weight", "table"}
    assert set(random_direction(weights, seed=0, axis=0, ignore="^linear|table")) == {"conv.weight"}


@pytest.mark.parametrize("name", models.NAMES)
def test_position_embeddings_do_not_move_and_all_other_matrices_do(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name, classes=10, image_size=32)
    found = {n for n, p in model.named_parameters() if p.dim() >= 2 and re.search(POSITIONS, n)}
    tables = {n for n, p in model.named_parameters() if n.endswith(("position_embedding", "relative_position"))}
    assert found == tables
    assert bool(tables) == any(family in name for family in ("vit", "alternet", "swin", "pit"))


@pytest.mark.parametrize(
    "name", ["pos_embed", "encoder.pos_embedding", "relative_position_bias_table", "vit.embeddings.position_embeddings"]
)
def test_position_embeddings_of_other_libraries_do_not_move(name: str) -> None:
    weights = {name: torch.ones(3, 4), "proj.weight": torch.ones(3, 4)}
    assert set(random_direction(weights, seed=0, axis=0)) == {"proj.weight"}


def test_a_filter_of_zeros_stays_where_it_is() -> None:
    weight = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    found = random_direction({"w": weight}, seed=0, axis=0)["w"]
    assert not found[0].any()
    assert found[1].norm().item() == pytest.approx(5.0)


@pytest.mark.parametrize("normalize", ["filter", "layer", "park2022"])
def test_directions_scale_with_the_weights_and_are_finite_at_any_scale(normalize: Normalize) -> None:
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    plain = random_direction({"w": weight}, seed=0, axis=0, normalize=normalize)["w"]
    for scale in (1e-30, 1e30):
        scaled = random_direction({"w": weight * scale}, seed=0, axis=0, normalize=normalize)["w"]
        torch.testing.assert_close(scaled / scale, plain)
    assert not normalised(torch.zeros(4, 5), weight, normalize).any()


def test_a_direction_depends_on_seed_axis_and_name_alone(weights: dict[str, Tensor]) -> None:
    before = torch.random.get_rng_state()
    found = random_direction(weights, seed=5, axis=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    backwards = random_direction(dict(reversed(weights.items())), seed=5, axis=1)
    alone = random_direction({"linear.weight": weights["linear.weight"]}, seed=5, axis=1)
    assert all(torch.equal(found[name], backwards[name]) for name in found)
    assert torch.equal(found["linear.weight"], alone["linear.weight"])
    for seed, axis in ((6, 1), (5, 0)):
        other = random_direction(weights, seed=seed, axis=axis)
        assert not torch.equal(found["linear.weight"], other["linear.weight"])
    assert not torch.equal(standard_normal(weights["table"], 0, 0, "a"), standard_normal(weights["table"], 0, 0, "b"))


def test_random_directions_never_change() -> None:
    expected = torch.tensor([[-0.8299474716186523, 0.32947826385498047], [-1.305607795715332, 0.39484691619873047]])
    torch.testing.assert_close(standard_normal(torch.zeros(2, 2), 0, 0, "weight"), expected, rtol=1e-5, atol=1e-7)
