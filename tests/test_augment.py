"""Augmentation: closed facts of crop, flip and mixing; Pillow as the oracle of RandAugment."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from torch import Generator, Tensor

from landscape.data import augment as ra
from landscape.data.augment import Augmentation, beta, cropped, flipped, smoothed
from landscape.options import OptionError

ALL = Augmentation(crop=2, flip=True, randaugment=9, mixup=1.0, cutmix=0.8, label_smoothing=0.1)


def random_batch(count: int, *, channels: int = 3, height: int = 8, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = Generator().manual_seed(count)
    inputs = torch.randint(256, (count, channels, height, width), generator=generator, dtype=torch.uint8)
    return inputs, torch.randint(10, (count,), generator=generator)


def smooth_picture(height: int = 24, width: int = 32) -> Tensor:
    """A picture (3, height, width) without noise, which would multiply every rounding of a coordinate."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    planes = torch.stack((40 + 180 * x, 20 + 150 * y, 90 + 70 * torch.sin(6 * x * y)))
    return planes.round().to(torch.uint8)


def picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# --- the whole ---


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 8, 8), (1, 7, 12), (3, 12, 5), (1, 2, 2)])
def test_any_size_of_one_or_three_channels_the_same_for_a_seed(channels: int, height: int, width: int) -> None:
    inputs, targets = random_batch(16, channels=channels, height=height, width=width)
    before, state = inputs.clone(), torch.random.get_rng_state()
    first, labels = ALL(inputs, targets, classes=10, seed=5)
    again, _ = ALL(inputs, targets, classes=10, seed=5)
    other, _ = ALL(inputs, targets, classes=10, seed=6)
    assert first.shape == inputs.shape
    assert labels.shape == (16, 10)
    assert first.amin() >= 0
    assert first.amax() <= 255
    assert torch.equal(first, again)
    assert not torch.equal(first.float(), other.float())
    assert torch.equal(inputs, before)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_recipe_names_its_augmentation_and_without_options_nothing_changes() -> None:
    recipe = {"lr": 1e-3, "crop": 4, "flip": True, "mixup": 0.8, "epochs": 3}
    assert Augmentation.of_recipe(recipe) == Augmentation(crop=4, flip=True, mixup=0.8)
    inputs, targets = random_batch(4)
    same, labels = Augmentation()(inputs, targets, classes=10, seed=0)
    assert same is inputs
    assert labels is targets


@pytest.mark.parametrize(
    ("name", "value"),
    [("crop", -1), ("randaugment", 11), ("mixup", -0.1), ("switch", 1.5), ("label_smoothing", 1), ("cutmix", math.nan)],
)
def test_values_out_of_range_are_option_errors(name: str, value: float) -> None:
    with pytest.raises(OptionError):
        Augmentation.of_recipe({name: value})


def test_what_cannot_be_augmented_is_explained() -> None:
    with pytest.raises(ValueError, match="needs images"):
        Augmentation(crop=1)(torch.zeros(4, 7), torch.zeros(4, dtype=torch.long), classes=2, seed=0)
    with pytest.raises(ValueError, match="needs uint8 images"):
        Augmentation(randaugment=9)(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long), classes=2, seed=0)
    with pytest.raises(ValueError, match="class numbers"):
        Augmentation(mixup=1.0)(torch.zeros(4, 7), torch.zeros(4), classes=0, seed=0)


# --- crop and flip ---


def test_a_crop_is_a_translate_of_the_padded_image() -> None:
    inputs, _ = random_batch(64, height=5, width=7)
    got = cropped(inputs, 2, Generator().manual_seed(0))
    places = set()
    for image, crop in zip(F.pad(inputs, (2, 2, 2, 2)), got, strict=True):
        found = [(y, x) for y in range(5) for x in range(5) if torch.equal(image[:, y : y + 5, x : x + 7], crop)]
        assert len(found) == 1
        places.add(found[0])
    assert len(places) > 15  # of 25 places, 64 independent draws


def test_each_image_is_flipped_with_probability_one_half() -> None:
    inputs, _ = random_batch(1)
    got = flipped(inputs.expand(4000, -1, -1, -1), Generator().manual_seed(0))
    mirrored = (got == inputs.flip(-1)).all((1, 2, 3))
    assert torch.equal(~mirrored, (got == inputs).all((1, 2, 3)))
    assert mirrored.double().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(4000))


# --- mixing and smoothing ---


def test_label_smoothing_is_the_closed_form() -> None:
    got = smoothed(torch.tensor([1, 3]), 4, 0.2)
    expected = [[0.05, 0.85, 0.05, 0.05], [0.05, 0.05, 0.05, 0.85]]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)
    twice = smoothed(smoothed(torch.tensor([1, 3]), 4, 0.0), 4, 0.2)
    assert torch.equal(twice, got)
    for seed in range(20):  # with mixing
        _, soft = ALL(*random_batch(8), classes=10, seed=seed)
        np.testing.assert_allclose(soft.sum(1).numpy(), 1, rtol=1e-6)
        assert soft.min().item() == pytest.approx(0.1 / 10)


def test_mixup_blends_inputs_and_targets_by_one_share() -> None:
    inputs, _ = random_batch(8)
    targets = torch.arange(8)
    for seed in range(50):
        mixed, soft = Augmentation(mixup=1.0)(inputs, targets, classes=8, seed=seed)
        share = soft[0, 0].item()
        assert torch.equal(soft.sum(1), torch.ones(8))  # exactly
        assert torch.equal(soft.diagonal(), torch.full((8,), share))
        x = inputs.double()
        expected = share * x + (1 - share) * x.flip(0)
        np.testing.assert_allclose(mixed.numpy(), expected.numpy(), rtol=1e-5, atol=1e-4)


def test_cutmix_targets_are_the_pixel_shares() -> None:
    dark = torch.zeros(2, 3, 9, 6, dtype=torch.uint8)
    inputs, targets = torch.cat([dark, dark + 255]), torch.tensor([0, 0, 1, 1])
    shares = []
    for seed in range(200):
        got, soft = Augmentation(cutmix=1.0)(inputs, targets, classes=2, seed=seed)
        assert got.dtype == torch.uint8
        pasted = got[:, 0] != inputs[:, 0]
        kept = 1 - pasted[0].double().mean().item()
        assert soft[0].tolist() == pytest.approx([kept, 1 - kept], abs=1e-6)
        assert torch.equal(soft.sum(1), torch.ones(4))
        assert torch.equal(soft[0], soft[3].flip(0))
        rows, columns = pasted[0].any(1), pasted[0].any(0)
        assert torch.equal(pasted[0], rows[:, None] & columns)  # a rectangle
        shares.append(kept)
    assert min(shares) < 0.5
    assert max(shares) == 1.0


def test_the_switch_chooses_cutmix_with_its_probability() -> None:
    inputs, targets = random_batch(2)
    both = Augmentation(mixup=1.0, cutmix=1.0, switch=0.3)
    cut = [both(inputs, targets, classes=10, seed=seed)[0].dtype == torch.uint8 for seed in range(1000)]
    assert np.mean(cut) == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 1000))
    for switch, dtype in ((0.0, torch.float32), (1.0, torch.uint8)):
        only = Augmentation(mixup=1.0, cutmix=1.0, switch=switch)
        assert {only(inputs, targets, classes=10, seed=seed)[0].dtype for seed in range(20)} == {dtype}


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    generator = Generator().manual_seed(1)
    shares = [beta(alpha, generator) for _ in range(2000)]
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 0.01


# --- RandAugment ---

LEVELS = (0.0, 0.375, 0.875, 1.0, -0.5)  # exact in binary, so that thresholds are the same integers

PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "invert": lambda image, _: ImageOps.invert(image),
    "solarize": lambda image, level: ImageOps.solarize(image, int(256 * abs(level))),
    "posterize": lambda image, level: (
        ImageOps.posterize(image, int(4 * abs(level))) if int(4 * abs(level)) else image.point(lambda _: 0)
    ),
    "solarize_add": lambda image, level: image.point(lambda i: min(255, i + int(110 * abs(level))) if i < 128 else i),
}
ENHANCED = {name: getattr(ImageEnhance, name.title()) for name in ("color", "contrast", "brightness", "sharpness")}


def operated(name: str, image: Tensor, level: float) -> Tensor:
    operation: Callable[[Tensor, Tensor], Tensor] = getattr(ra, name)
    pair = operation(torch.stack((image, image)), torch.tensor([level, 0.6]))
    assert pair.dtype == torch.uint8
    return pair[0]


@pytest.mark.parametrize("name", PILLOW)
@pytest.mark.parametrize("level", LEVELS)
def test_tone_operations_equal_pillow(name: str, level: float) -> None:
    noise = random_batch(1, height=40, width=40)[0][0] // 2 + 30
    constant = torch.full_like(noise, 17)
    for image in (smooth_picture(), noise, constant):
        assert torch.equal(operated(name, image, level), tensor(PILLOW[name](picture(image), level)))


@pytest.mark.parametrize("name", ENHANCED)
@pytest.mark.parametrize("level", LEVELS)
def test_enhancements_equal_pillow_to_one_grey_level(name: str, level: float) -> None:
    for image in (smooth_picture(), random_batch(1, height=9, width=11)[0][0]):
        expected = tensor(ENHANCED[name](picture(image)).enhance(0.1 + 1.8 * abs(level)))
        assert (operated(name, image, level).int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
@pytest.mark.parametrize("level", LEVELS)
def test_geometry_equals_pillow_to_one_grey_level(name: str, level: float) -> None:
    image = smooth_picture()
    source, bilinear, fill = picture(image), Image.Resampling.BILINEAR, (128, 128, 128)
    if name == "rotate":
        moved = source.rotate(30 * level, resample=bilinear, fillcolor=fill)
    else:
        width, height = source.size
        shear, shift = (0.3 * level if "shear" in name else 0), (0.45 * level if "translate" in name else 0)
        rows = (1, shear, shift * width, 0, 1, 0) if name.endswith("x") else (1, 0, 0, shear, 1, shift * height)
        moved = source.transform(source.size, Image.Transform.AFFINE, rows, bilinear, fillcolor=fill)
    difference = (operated(name, image, level).int() - tensor(moved).int()).abs().amax(0)
    # where a point falls on the very edge, rounding decides between picture and filling
    assert (difference > 1).double().mean() <= 0.005


def test_operations_strengths_and_signs_are_drawn_per_image() -> None:
    image = smooth_picture()
    batch = image.expand(300, -1, -1, -1)
    got = ra.randaugment(batch, Generator().manual_seed(0), magnitude=9, layers=1, std=1.0)
    untouched = (got == image).flatten(1).all(1).double().mean().item()
    # probability 1/2, or an operation that changes nothing
    assert untouched == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(300) + 1 / 15)
    assert len({row.numpy().tobytes() for row in got}) > 60
    # one image does not depend on the others' pixels
    other = torch.cat((batch[:150], torch.zeros_like(batch[150:])))
    again = ra.randaugment(other, Generator().manual_seed(0), magnitude=9, layers=1, std=1.0)
    assert torch.equal(again[:150], got[:150])


def test_a_grey_image_is_treated_like_three_equal_channels() -> None:
    grey, _ = random_batch(64, channels=1, height=12, width=10)
    for seed in range(5):
        pair = (grey, grey.repeat(1, 3, 1, 1))
        one, three = (ra.randaugment(x, Generator().manual_seed(seed), magnitude=9, layers=2, std=1.0) for x in pair)
        assert torch.equal(one.repeat(1, 3, 1, 1), three)
