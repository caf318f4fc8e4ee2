"""Recipes: their values, overrides and errors; the optimiser and the schedule they define."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from landscape.data.recipes import RECIPES, Recipe, at_size, default_recipe, parse_overrides, recipe, validated
from landscape.options import OptionError
from landscape.training.optimizer import Schedule, build_optimizer, parameter_groups


@pytest.mark.parametrize("name", ["cifar-vit", "cifar-cnn"])
def test_cifar_recipes_are_the_papers(name: str) -> None:
    r = recipe(name)
    assert (r.optimizer, r.lr, r.weight_decay, r.batch_size, r.clip) == ("adamw", 1.25e-4, 0.05, 96, 5.0)
    assert (r.epochs, r.warmup) == (305, 5.0)
    assert (r.label_smoothing, r.mixup, r.cutmix, r.switch) == (0.1, 1.0, 0.8, 0.5)
    assert (r.randaugment, r.randaugment_layers, r.randaugment_std) == (9, 2, 1.0)
    assert (r.crop, r.flip, r.drop_path) == (4, True, 0.1)


def test_every_recipe_is_valid_and_that_without_augmentation_changes_nothing_else() -> None:
    for name, r in RECIPES.items():
        assert validated(r).name == name
    augmented, plain = recipe("cifar-vit"), recipe("cifar-noaug")
    differing = {f.name for f in fields(Recipe) if getattr(augmented, f.name) != getattr(plain, f.name)}
    assert differing == {"name", "mixup", "cutmix", "randaugment", "crop", "flip"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("vit_demo", "demo"), ("alternet_demo", "demo"), ("vit_ti", "cifar-vit"), ("localvit_ti", "cifar-vit"),
        ("swin_ti", "cifar-vit"), ("pit_xs", "cifar-vit"), ("mixer_s", "cifar-vit"), ("resnet50", "cifar-cnn"),
        ("wideresnet50", "cifar-cnn"), ("alternet50", "cifar-cnn"),
    ],
)  # fmt: skip
def test_default_recipe(model: str, expected: str) -> None:
    assert default_recipe(model) == expected


def test_overrides_replace_none_keeps_and_sgd_has_a_weight_decay_of_its_own() -> None:
    r = recipe("cifar-vit", lr=0.5, epochs=None, flip=False)
    assert (r.lr, r.epochs, r.flip) == (0.5, 305, False)
    assert recipe("demo").weight_decay == 0.05
    assert recipe("demo", optimizer="sgd").weight_decay == 5e-4
    assert recipe("demo", optimizer="sgd", weight_decay=0.05).weight_decay == 0.05


@pytest.mark.parametrize(("epochs", "warmup"), [(305, 5.0), (25, 5.0), (10, 2.0), (2, 0.4), (0, 0.0)])
def test_default_warmup_is_at_most_a_fifth_of_the_run(epochs: int, warmup: float) -> None:
    assert recipe("cifar-cnn", epochs=epochs).warmup == pytest.approx(warmup)
    assert recipe("cifar-cnn", epochs=epochs, warmup=epochs).warmup == epochs  # unless asked for


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0), ("lr", -1.0), ("lr", math.nan), ("lr", math.inf), ("epochs", -1), ("warmup", 306.0),
        ("batch_size", 0), ("weight_decay", -0.1), ("momentum", 1.0), ("clip", -1.0), ("label_smoothing", 1.0),
        ("label_smoothing", -0.1), ("mixup", -0.5), ("cutmix", math.nan), ("switch", 1.5), ("randaugment", 11),
        ("drop_path", 1.0), ("optimizer", "adam"), ("precision", "fp16"), ("memory_format", "channels_first"),
        ("accumulate", 0), ("ema", 1.0), ("crop", -1), ("sam", -0.05), ("sam", math.inf),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_option_name(field: str, value: float | str) -> None:
    with pytest.raises(OptionError, match=f"--{field.replace('_', '-')} must be .*, got {value}"):
        recipe("cifar-vit", **{field: value})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"lr": "0.1"}, "--lr must be a number, got '0.1'"), ({"sam": True}, "--sam must be a number, got True"),
        ({"batch_size": 1.5}, "--batch-size must be a whole number, got 1.5"),
        ({"flip": 3}, "--flip must be True or False, got 3"),
        ({"momentum": 0.5}, "--momentum 0.5 belongs to sgd, got adamw"),
    ],
)  # fmt: skip
def test_values_of_another_type_or_optimiser_are_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        recipe("cifar-vit", **overrides)


def test_unknown_names_are_answered_with_similar_ones() -> None:
    with pytest.raises(OptionError, match="expected one of cifar-vit"):
        recipe("cifar-vti")
    with pytest.raises(OptionError, match="expected one of batch_size"):
        recipe("demo", batchsize=3)


def test_assignments_set_any_field() -> None:
    words = ["clip=1", "flip=no", "batch-size=7", "optimizer=sgd", "randaugment_std = 0.5", "precision=bf16"]
    found = parse_overrides(words)
    assert found == {
        "clip": 1.0, "flip": False, "batch_size": 7, "optimizer": "sgd", "randaugment_std": 0.5, "precision": "bf16",
    }  # fmt: skip
    assert isinstance(found["clip"], float)
    every = [f"{f.name}={getattr(RECIPES['demo'], f.name)}" for f in fields(Recipe) if f.name != "name"]
    assert recipe("demo", **parse_overrides(every)) == RECIPES["demo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cilp=1", "--set cilp: a recipe has no such field; expected one of clip"),
        ("name=mine", "--set name: a recipe has no such field"),
        ("clip", "--set must be KEY=VALUE, got clip"),
        ("flip=maybe", "--set flip must be true or false, got maybe"),
        ("batch_size=1.5", "--set batch-size must be a whole number, got 1.5"),
        ("lr=fast", "--set lr must be a number, got fast"),
    ],
)
def test_malformed_assignments_are_explained(words: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_overrides([words])


def test_crop_scales_with_the_image() -> None:
    assert [at_size(recipe("cifar-vit"), size).crop for size in (16, 32, 64, 224)] == [2, 4, 8, 28]


def test_rate_at_the_ends_of_warmup_and_cosine() -> None:
    schedule = Schedule.of_recipe(recipe("cifar-vit", lr=0.8, epochs=10, batch_size=32), samples=32 * 4)
    assert (schedule.per_epoch, schedule.warmup, schedule.steps) == (4, 8, 40)
    assert schedule.rate(0) == pytest.approx(0.1)
    assert schedule.rate(7) == pytest.approx(0.8)  # the last update of the warm-up has the peak
    assert schedule.rate(8) == pytest.approx(0.8)
    assert schedule.rate(24) == pytest.approx(0.4)  # half-way down
    assert schedule.rate(39) == pytest.approx(0.4 * (1 - math.cos(math.pi / 32)))  # one step before 0
    falling = [schedule.rate(step) for step in range(8, 40)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(("samples", "per_epoch"), [(95, 1), (96, 1), (97, 1), (98, 2), (192, 2)])
def test_a_last_batch_of_one_is_left_out(samples: int, per_epoch: int) -> None:
    assert Schedule.of_recipe(recipe("cifar-vit"), samples).per_epoch == per_epoch


def test_a_warmup_of_less_than_a_step_is_one_step() -> None:
    assert Schedule.of_recipe(recipe("cifar-vit", epochs=1, batch_size=96), samples=96).warmup == 1
    assert Schedule.of_recipe(recipe("cifar-vit", warmup=0.0), samples=96).warmup == 0


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.position_embedding = nn.Parameter(torch.zeros(1, 5, 4))
        self.relative_position = nn.Parameter(torch.zeros(9, 1))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def test_only_weight_matrices_decay() -> None:
    model = Small()
    decayed, free = parameter_groups(model, 0.05)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(model.head.weight)]
    assert {tuple(p.shape) for p in free["params"]} == {(1, 1, 4), (1, 5, 4), (9, 1), (4,), (2,)}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_one_step_without_gradient_shrinks_by_weight_decay_alone(name: str) -> None:
    """Decoupled (adamw) and as a gradient (sgd), w becomes (1 - lr * weight_decay) w; biases stay."""
    model = nn.Linear(3, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = build_optimizer(model, recipe("cifar-vit", optimizer=name, lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before["weight"] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(model.bias.detach(), before["bias"])
