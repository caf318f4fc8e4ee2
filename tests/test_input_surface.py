"""Loss around images: against a loop over single images, PGD's own loss, paired errors; bad input; figures."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic
import torch
import xarray as xr
from analytic import batches_of, run_probe
from matplotlib.figure import Figure
from test_attack import linear, on_pictures, pictures
from torch import Tensor, nn

from landscape.options import OptionError
from landscape.plots import appearance, headlines
from landscape.plots.figures import input_images, input_surface
from landscape.probe import derived_seed
from landscape.probes.input_surface import InputSurface
from landscape.subject.loading.identity import asked
from landscape.subject.losses import cross_entropy
from landscape.subject.other_samples import on_first
from landscape.subject.pixels import losses_of, pgd
from landscape.subject.subject import Subject

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3)))


def loss_at(subject: Subject, pixels: Tensor, target: int) -> Tensor:
    return cross_entropy(subject.model(((pixels - MEAN) / STD)[None]), torch.tensor([target]))[0]


def test_planes_and_lines_equal_a_loop_over_single_images() -> None:
    subject = on_pictures()
    found = run_probe(InputSurface("gradient,random,sign", resolution=3, range="0.2", images=2, seed=5), subject)
    images = pictures()
    losses, lines = np.empty((9, 3, 3)), np.empty((9, 3, 3))
    for i, (raw, target) in enumerate(zip(images.inputs, images.targets.tolist(), strict=True)):
        pixels = (raw / 255).requires_grad_()
        (slope,) = torch.autograd.grad(loss_at(subject, pixels, target), pixels)
        noise = torch.randn(slope.shape, generator=torch.Generator().manual_seed(derived_seed(5, i)))
        one, other, sign = (d / d.square().mean().sqrt() for d in (slope, noise, slope.sign()))
        rest = other - (other * one).mean() * one
        rest = rest / rest.square().mean().sqrt()
        at = (-0.2, 0.0, 0.2)
        with torch.no_grad():
            losses[i] = [[loss_at(subject, pixels + x * one + y * rest, target) for y in at] for x in at]
            lines[i] = [[loss_at(subject, pixels + t * d, target) for t in at] for d in (one, other, sign)]
    np.testing.assert_allclose(found["loss"], losses.mean(axis=0), rtol=2e-5)
    np.testing.assert_allclose(found["line_loss"], lines.mean(axis=0), rtol=2e-5)
    np.testing.assert_allclose(found["image_loss"], losses[:2], rtol=2e-5)
    np.testing.assert_allclose(found["loss_se"], losses.std(axis=0, ddof=1) / 3, rtol=1e-3)
    rise = losses - losses[:, 1:2, 1:2]
    np.testing.assert_allclose(found["rise"], rise.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(found["rise_se"], rise.std(axis=0, ddof=1) / 3, rtol=1e-3, atol=1e-7)
    assert found["rise"][1, 1] == found["rise_se"][1, 1] == 0.0


def test_neither_mini_batches_nor_a_loss_without_gradient_change_the_surface() -> None:
    probe = InputSurface("gradient,random", resolution=3, images=0)
    split, whole = (run_probe(probe, on_pictures(batch_size=size)) for size in (4, 9))
    np.testing.assert_allclose(split["loss"], whole["loss"], rtol=1e-6)
    np.testing.assert_allclose(split["line_rise_se"], whole["line_rise_se"], rtol=1e-4, atol=1e-7)
    flat = linear()
    nn.init.zeros_(flat[1].weight)  # type: ignore[index, arg-type]
    found = run_probe(InputSurface("gradient,pgd", resolution=3, steps=2), on_pictures(flat))
    for name in ("rise", "rise_se", "line_rise"):
        np.testing.assert_array_equal(found[name], 0.0)


def test_the_line_towards_pgd_passes_through_its_image() -> None:
    subject = on_first(on_pictures(linear(), batch_size=1), 1)
    pixels, losses = pictures().inputs[:1] / 255, losses_of(subject, 0)
    changed = pgd(losses, pixels, 8 / 255, step=2.5 * 8 / 255 / 4, steps=4, start=pixels)
    size = (changed - pixels).square().mean().sqrt().item()
    probe = InputSurface("pgd", resolution=2, range=f"0:{size!r}", steps=4, eps="8/255")
    found = run_probe(probe, subject)
    assert found["line_loss"][0, 1] == pytest.approx(losses(changed).item(), rel=1e-5)
    assert "loss" not in found  # one direction spans no plane
    assert probe.plan(subject).shape == (1, 1)
    assert InputSurface("pgd,random", resolution=3).plan(subject).shape == (1, 5)  # a killed run loses one row
    assert "seed" not in asked(probe, subject)


def test_bad_input_is_refused_in_words() -> None:
    for options, words in (
        ({"directions": "gradient,gradient"}, "each direction once"),
        ({"directions": "uphill"}, "gradient, sign, pgd"),
        ({"eps": "2"}, "above 0, at most 1"),
        ({"range": "0"}, "range"),
        ({"resolution": 1}, "at least 2"),
    ):
        with pytest.raises(OptionError, match=words):
            InputSurface(**options)  # type: ignore[arg-type]
    vectors = Subject(nn.Linear(4, 3).eval(), batches_of((4,), (5,), 3))
    with pytest.raises(ValueError, match=r"input-surface needs images \(N, C, H, W\), got \(5, 4\)"):
        run_probe(InputSurface(resolution=3), vectors)


def test_figures_show_planes_lines_and_the_border_of_the_prediction() -> None:
    found = run_probe(InputSurface("gradient,random,pgd", resolution=5, range="0.5", steps=2), on_pictures())
    t, plane = np.linspace(-0.5, 0.5, 5), ("x", "y")
    data = xr.Dataset(
        {
            **{name: (plane, found[name]) for name in ("loss", "rise", "rise_se")},
            **{f"line_{name}": (("direction", "t"), found[f"line_{name}"]) for name in ("rise", "rise_se")},
            **{name: (("image", *plane), found[name]) for name in ("image_loss", "image_accuracy")},
            "direction_name": ("direction", ["gradient of the image's loss", "random", "towards PGD"]),
        },
        {"x": t, "y": t, "t": t},
        synthetic.declared("input-surface", label="net"),
    )
    mean, lines = input_surface.draw(data, tuple(Figure().subplots(2)))
    assert len(lines.get_legend_handles_labels()[1]) == 3
    np.testing.assert_allclose(lines.lines[0].get_ydata(), found["line_rise"][0])
    assert (mean.get_xlabel(), mean.get_ylabel()) == ("gradient", "random, orthogonal")
    rows = input_images.page([data], appearance.looks([data]))
    assert sum(bool(ax.collections) for ax in rows.axes) >= len(found["image_loss"])
    assert headlines.numbers(data)["gradient rise at 0.5"] == found["line_rise"][0, -1]
