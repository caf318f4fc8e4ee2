"""Measure the loss around the images themselves: along their gradient, towards adversarial images, at random."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.headline import Headline
from landscape.layers.forward_hooks import transferred
from landscape.options import at_least, parse_choices, parse_range, require
from landscape.probe import Plan, Probe, Quantity, Unit, Values, derived_seed, make_texts
from landscape.statistics.means import means_by_name
from landscape.subject import sample_statistics
from landscape.subject.loading.identity import protocol
from landscape.subject.losses import Meaning
from landscape.subject.pixels import (
    gradient,
    loss_and_correctness_at,
    losses_of,
    parse_pixels,
    pgd,
    pixels_of,
    refuse_other_than_pixels,
)  # fmt: skip
from landscape.subject.subject import Subject
from landscape.weight_space.directions import ticks

DIRECTIONS = ("gradient", "sign", "pgd", "random")
STEP = 2.5  # of PGD, times eps / steps
NAMES = {
    "gradient": "gradient of the image's loss",
    "sign": "sign of the gradient",
    "pgd": "towards the image that PGD finds",
    "random": "random",
}
UNITS = "root mean square change of a pixel in [0, 1]"


@dataclass(frozen=True)
class InputSurface(Probe):
    """The loss at image + x d1 + y d2, averaged over images that have directions of their own, and of single images.

    Pixels are in [0, 1] before normalisation and are not clamped, so that the plane is flat. A direction is that of the
    gradient of the image's loss, its sign, the change that PGD finds from the image, or standard normal noise; each is
    scaled to a root mean square of 1 over the image's pixels, so that a coordinate means the same at every resolution.
    On the plane the second direction is made orthogonal to the first, image by image; lines follow every direction
    itself. Where the loss has no gradient at an image, its direction is zero. Errors are over images, those of rises
    paired with the intact images.

    Planes of this kind: Moosavi-Dezfooli et al. 2019 (arXiv 1811.09716), Fig. 2; PGD: Madry et al. 2018
    (arXiv 1706.06083), Section 2.1.
    """

    name: ClassVar[str] = "input-surface"
    smallest: ClassVar[Mapping[str, Any]] = {"resolution": 3, "steps": 2}
    headlines: ClassVar[Sequence[Headline]] = tuple(
        Headline(f"{words} rise at {{t:g}}", "line_rise", {"direction": NAMES[name], "t": -1})
        for name, words in zip(NAMES, ("gradient", "sign of gradient", "PGD", "random"), strict=True)
    )

    directions: Annotated[
        str, "of gradient, sign, pgd, random: a line along each; the first two span the plane, one alone has none"
    ] = "gradient,random,pgd"
    resolution: Annotated[int, "points per axis and line; odd numbers include the image itself"] = 21
    range: Annotated[str, "R or LOW:HIGH, as the root mean square change of a pixel in [0, 1]"] = "0.1"
    images: Annotated[int, "of the first images, planes of their own are kept"] = 6
    eps: Annotated[str, "largest change of a pixel by PGD, as a number or a fraction"] = "8/255"
    steps: Annotated[int, "steps of PGD"] = 10
    seed: Annotated[int, "seed of the random directions"] = 0

    def __post_init__(self) -> None:
        names = parse_choices("directions", self.directions, DIRECTIONS)
        require(len(set(names)) == len(names), "directions", self.directions, "each direction once")
        at_least("resolution", self.resolution, 2)
        at_least("images", self.images, 0)
        at_least("steps", self.steps, 1)
        make_texts(self, "range", "eps")
        parse_range("range", self.range)
        sizes = parse_pixels("eps", self.eps)
        require(len(sizes) == 1 and 0 < sizes[0] <= 1, "eps", self.eps, "one number above 0, at most 1")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """Texts parsed; what no direction uses does not matter."""
        names = self._chosen
        unused = [*(("seed",) if "random" not in names else ()), *(("eps", "steps") if "pgd" not in names else ())]
        parsed = {"directions": names, "range": parse_range("range", self.range), "eps": parse_pixels("eps", self.eps)}
        return parsed | dict.fromkeys(unused)

    def plan(self, subject: Subject) -> Plan:
        refuse_other_than_pixels(subject, "input-surface")
        meaning, names = subject.meaning, [NAMES[name] for name in self._chosen]
        at, plane = ticks(*parse_range("range", self.range), self.resolution), len(names) > 1
        kept = min(self.images, subject.samples(0)) if plane else 0
        axes = {"direction": np.arange(len(names)), "t": at}
        about = {
            "row": Quantity("line along a direction, then row of the plane"),
            "t": Quantity("position on the row", UNITS),
        }
        if plane:
            axes |= {"x": at, "y": at}
            about["x"] = Quantity(names[0], UNITS)
            about["y"] = Quantity(f"{names[1]}, its part orthogonal to the first", UNITS)
        if kept:
            axes["image"] = np.arange(kept)
            about["image"] = Quantity("image, in the order of the data")
        return Plan(
            over={
                "batch": np.arange(len(subject.batches)),
                "row": np.arange(len(names) + (self.resolution if plane else 0)),
            },
            axes=axes,
            labels={"direction_name": (Quantity("direction", dims=("direction",)), np.array(names))},
            quantities={
                "samples": Quantity("images in the mini-batch"),
                **_of_sums(meaning),
                **(_of_images(meaning, "row_", ("image", "t")) if kept else {}),
            },
            summaries={
                **_of_means(meaning, "line_", ("direction", "t")),
                **(_of_means(meaning, "", ("x", "y")) if plane else {}),
                **(_of_images(meaning, "", ("image", "x", "y")) if kept else {}),
            },
            about=about,
            facts={"data_sha256": subject.data.sha256, "protocol": f"{protocol(subject)}, {self._in_words()}"},
        )

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Rows of one mini-batch share its directions and the losses of its intact images."""
        at, current = ticks(*parse_range("range", self.range), self.resolution), -1
        for unit in units:
            batch, row = unit.index
            if batch != current:
                current, pixels = batch, pixels_of(subject, batch)
                lines = [_scaled(self._direction(name, subject, batch, pixels)) for name in self._chosen]
                if len(lines) > 1:
                    across = _scaled(_orthogonal(lines[1], lines[0]))
                with subject.evaluating():
                    intact = loss_and_correctness_at(subject, batch, pixels)[0]
            if row < len(lines):
                start, along = pixels, lines[row]
            else:
                start, along = pixels + at[row - len(lines)] * lines[0], across
            with subject.evaluating():
                points = torch.stack([loss_and_correctness_at(subject, batch, start + t * along) for t in at])
            found = _sums(points, intact)
            if len(lines) > 1 and (kept := min(self.images, subject.samples(0))):
                found |= _single_images(points, kept, there=batch == 0 and row >= len(lines))
            yield {"samples": len(pixels), **transferred(found)}

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Means over the images that are finished in a row, and their standard errors; planes of single images."""
        done, lines = data["done"] == 1, len(data["direction"])
        n = np.where(done, data["samples"], 0.0).sum(axis=0)[:, None]
        means = means_by_name(data, ("loss", "rise")) | {f"{name}_se.n": n for name in ("loss", "rise")}
        with np.errstate(invalid="ignore"):
            means["accuracy"] = np.where(done[:, :, None], data["accuracy_sum"], 0.0).sum(axis=0) / n
        found = {f"line_{name}": values[:lines] for name, values in means.items()}
        if len(n) > lines:
            found |= {name: values[lines:] for name, values in means.items()}
        for name in ("image_loss", "image_accuracy") if "row_image_loss" in data else ():
            found[name] = np.moveaxis(data[f"row_{name}"][0, lines:], 1, 0)  # (x, image, y) of the first mini-batch
        return found

    @property
    def _chosen(self) -> tuple[str, ...]:
        return tuple(parse_choices("directions", self.directions, DIRECTIONS))

    def _direction(self, name: str, subject: Subject, batch: int, pixels: Tensor) -> Tensor:
        losses = losses_of(subject, batch)
        if name == "random":
            first = sample_statistics.first_row(subject, batch)
            seeds = (derived_seed(self.seed, first + row) for row in range(len(pixels)))
            drawn = [torch.randn(pixels.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            return torch.stack(drawn).to(pixels)
        if name == "pgd":
            (eps,) = parse_pixels("eps", self.eps)
            return pgd(losses, pixels, eps, step=STEP * eps / self.steps, steps=self.steps, start=pixels) - pixels
        slope = gradient(losses, pixels)
        return slope.sign() if name == "sign" else slope

    def _in_words(self) -> str:
        attack = f"; PGD of {self.steps} steps within {self.eps}" if "pgd" in self.directions else ""
        return f"directions of every image scaled to a root mean square of 1, pixels not clamped{attack}"


def _of_sums(meaning: Meaning) -> dict[str, Quantity]:
    """What is stored of a row of a mini-batch, as `_sums` returns it."""
    squared, dims = f"{meaning.units}^2", ("t",)
    return {
        "loss_sum": Quantity("sum over images of the loss", meaning.units, dims),
        "loss_square_sum": Quantity("sum over images of the squared loss", squared, dims),
        "rise_sum": Quantity("sum over images of the loss minus the intact image's", meaning.units, dims),
        "rise_square_sum": Quantity("sum over images of its square", squared, dims),
        "accuracy_sum": meaning.of_accuracy("sum over images of the accuracy", dims),
    }


def _of_images(meaning: Meaning, prefix: str, dims: tuple[str, ...]) -> dict[str, Quantity]:
    """Loss and accuracy of the first images, as `_single_images` returns them for a row."""
    return {
        f"{prefix}image_loss": Quantity("loss of one image", meaning.units, dims),
        f"{prefix}image_accuracy": meaning.of_accuracy("accuracy of one image", dims),
    }


def _of_means(meaning: Meaning, prefix: str, dims: tuple[str, ...]) -> dict[str, Quantity]:
    """What `InputSurface.reduce` returns of these sums."""
    return {
        f"{prefix}loss": Quantity("loss", meaning.units, dims, bounds=meaning.bounds, error="images"),
        f"{prefix}rise": Quantity("loss minus that of the intact images", meaning.units, dims, error="images, paired"),
        f"{prefix}accuracy": meaning.of_accuracy("accuracy", dims, bounds="share"),
    }


def _scaled(direction: Tensor) -> Tensor:
    """Every image's direction with a root mean square of 1 over its pixels; zero stays zero."""
    size = direction.double().square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    return (direction / torch.where(size > 0, size, torch.inf)).to(direction.dtype)


def _orthogonal(direction: Tensor, other: Tensor) -> Tensor:
    """The part of directions that is orthogonal to others of root mean square 1, image by image; zero if none is."""
    one, along = direction.double(), other.double()
    share = (one * along).mean(dim=(1, 2, 3), keepdim=True)
    rest = one - share * along
    left = rest.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    return torch.where(left > 1e-6, rest, 0.0).to(direction.dtype)


def _sums(points: Tensor, intact: Tensor) -> dict[str, Tensor]:
    """Sums over images of loss and correctness (t, 2, n), with `intact` losses (n,)."""
    loss, right = points.unbind(dim=1)
    rise = loss - intact
    sums = {
        "loss": loss, "loss_square": loss.square(), "rise": rise, "rise_square": rise.square(), "accuracy": right,
    }  # fmt: skip
    return {f"{name}_sum": values.sum(dim=-1) for name, values in sums.items()}


def _single_images(points: Tensor, kept: int, *, there: bool) -> dict[str, Tensor]:
    """Loss and accuracy of the first images in a row of their planes, (kept, t); NaN where they are not in it."""
    shown = points[..., :kept].permute(1, 2, 0) if there else points.new_full((2, kept, len(points)), math.nan)
    return dict(zip(("row_image_loss", "row_image_accuracy"), shown, strict=True))
