"""The line probe: closed forms, ends that are the checkpoints themselves, barriers with paired errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from analytic import (
    attention_net,
    batches_of,
    convolution_net,
    losses_with,
    moved,
    quadratic,
    run_probe,
    state,
    symmetric,
)
from torch import Tensor

import landscape
from landscape import models
from landscape.data.dataset import Images
from landscape.options import OptionError
from landscape.probes.line import Line
from landscape.probes.surface import Surface
from landscape.results.headline_numbers import measured
from landscape.subject import batchnorm
from landscape.subject.loading.identity import asked
from landscape.subject.sample_statistics import per_sample
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject
from landscape.weight_space.bezier import training_part
from landscape.weight_space.directions import POSITIONS, random_direction
from landscape.weight_space.lines import ModelOnLine, lines_of
from landscape.weight_space.planes import half_range
from landscape.weight_space.weights_in_place import OWN

SAMPLES = torch.tensor([[1.0, 0.0], [2.0, 0.5], [0.5, -1.0], [3.0, 0.0], [-0.5, 0.2]])  # scale, offset


def _saddle() -> Subject:
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, -1.0]])
    matrix = symmetric([4.0, 3.0, 2.5, 1.0, -1.5, -2.0])
    return quadratic(matrix, weight=weight, slope=torch.linspace(-1, 1, 6), batches=[SAMPLES[:3], SAMPLES[3:]])


def _resnet(seed: int) -> Subject:
    """In float32, with statistics of batch norm away from their initial ones."""
    torch.manual_seed(seed)
    model = models.build("resnet_demo", classes=10, image_size=8, blocks=(1, 1), width=8)
    batches = [(inputs.float(), targets) for inputs, targets in batches_of((3, 8, 8), (8, 5), 10)]
    with torch.no_grad():
        model(batches[0][0] + seed)
    return Subject(model.eval(), batches)


def _saved(path: Path, weights: Mapping[str, Tensor]) -> str:
    torch.save(dict(weights), path)
    return str(path)


def test_a_quadratic_loss_has_its_closed_form_along_random_directions() -> None:
    subject, probe = _saddle(), Line(directions=2, resolution=6, range="-0.5:2", seed=3)
    found = run_probe(probe, subject)
    model = subject.model
    scale, offset = SAMPLES[:, 0].double().numpy(), SAMPLES[:, 1].double().numpy()
    for k in range(2):
        weights = {name: p.detach() for name, p in subject.parameters.items()}
        d = random_direction(weights, seed=3 + k, axis=0, ignore=POSITIONS)["weight"].flatten()
        for i, t in enumerate(found["t"]):
            w = (model.weight.flatten() + t * d).detach()  # type: ignore[operator, union-attr]
            samples = scale * (w @ model.matrix @ w / 2 + model.slope @ w).item() + offset  # type: ignore[operator]
            assert found["loss"][k, i] == pytest.approx(samples.mean(), rel=1e-12)
            assert found["loss_se"][k, i] == pytest.approx(samples.std(ddof=1) / 5**0.5, rel=1e-12)
            assert found["l2"][k, i] == pytest.approx((w @ w / 2).item(), rel=1e-12)
    np.testing.assert_allclose(found["loss_mean"], found["loss"].mean(axis=0))
    np.testing.assert_allclose(found["loss_spread"], np.abs(np.diff(found["loss"], axis=0))[0] / 2**0.5)


def test_a_random_line_is_the_middle_row_of_the_surface_of_its_seed() -> None:
    subject = attention_net()
    line = run_probe(Line(resolution=5, seed=2), subject)
    surface = run_probe(Surface(resolution="5,3", seed=2), subject)
    np.testing.assert_allclose(line["loss"][0], surface["loss"][:, 1], rtol=1e-13)
    np.testing.assert_allclose(line["accuracy"][0], surface["accuracy"][:, 1])


def test_both_ends_are_the_checkpoints_themselves_bit_for_bit(tmp_path: Path) -> None:
    one, two = _resnet(0), _resnet(1)
    found = run_probe(Line(along=_saved(tmp_path / "b.pt", two.model.state_dict()), resolution=3), one)
    for i, subject in ((0, one), (-1, two)):
        losses, right = (values.numpy() for values in per_sample(subject))
        assert found["loss"][0, i] == losses.mean()
        assert found["accuracy"][0, i] == right.mean()
        assert found["excess"][0, i] == found["excess_se"][0, i] == found["accuracy_deficit"][0, i] == 0.0
    assert found["t"].tolist() == [0.0, 1 / 32, 1 / 8, 0.5, 7 / 8, 31 / 32, 1.0]


def test_between_checkpoints_weights_and_statistics_are_interpolated(tmp_path: Path) -> None:
    subject = convolution_net()
    there = moved(subject, 1)
    found = run_probe(Line(along=_saved(tmp_path / "b.pt", there), resolution=6, range="-0.5:2"), subject)
    for i, t in enumerate(found["t"]):
        mixed = {name: (1 - t) * tensor + t * there[name] if tensor.is_floating_point() else tensor
                 for name, tensor in state(subject.model).items()}  # fmt: skip
        clipped = min(max(t, 0.0), 1.0)  # beyond, extrapolated variances may turn negative
        for name, buffer in subject.model.named_buffers():
            if buffer.is_floating_point():
                mixed[name] = (1 - clipped) * buffer + clipped * there[name]
        assert found["loss"][0, i] == pytest.approx(losses_with(subject, mixed).mean(), rel=1e-12)
    assert found["t"].tolist() == [-0.5, 0.0, 1 / 32, 1 / 8, 0.5, 7 / 8, 31 / 32, 1.0, 1.5, 2.0]


def test_frozen_statistics_stay_those_of_the_first_checkpoint(tmp_path: Path) -> None:
    subject = convolution_net()
    there = moved(subject, 1)
    found = run_probe(Line(along=_saved(tmp_path / "b.pt", there), resolution=2, bn="frozen"), subject)
    mixed = {**there, **{name: buffer for name, buffer in subject.model.named_buffers()}}
    here, itself = losses_with(subject, mixed).mean(), losses_with(subject, dict(there)).mean()
    assert abs(here - itself) > 1e-3
    assert found["loss"][0, -1] == pytest.approx(here, rel=1e-12)
    assert found["end_loss"][0] == pytest.approx(itself, rel=1e-12)
    assert found["end_excess"][0] == pytest.approx(here - itself, rel=1e-9)
    assert found["facts"]["statistics"] == "frozen"


def test_recalibrated_statistics_are_refreshed_at_every_point_ends_included(tmp_path: Path) -> None:
    subject = convolution_net()
    there = moved(subject, 1)
    found = run_probe(Line(along=_saved(tmp_path / "b.pt", there), resolution=3, bn="recalibrate:2"), subject)
    here = state(subject.model)
    expected = []
    for t in found["t"]:
        mixed = {name: (1 - t) * tensor + t * there[name] if tensor.is_floating_point() else tensor
                 for name, tensor in here.items()}  # fmt: skip
        subject.model.load_state_dict(mixed)
        batchnorm.refresh(subject, 2)
        expected.append(per_sample(subject)[0].mean().item())
    np.testing.assert_allclose(found["loss"][0], expected, rtol=1e-12)
    assert found["excess"][0, 3] == pytest.approx(expected[3] - (expected[0] + expected[-1]) / 2, rel=1e-9)


def test_the_barrier_of_a_concave_loss_has_its_closed_form_and_its_paired_error(tmp_path: Path) -> None:
    subject = _saddle()
    matrix, scale = subject.model.matrix, SAMPLES[:, 0].double().numpy()
    values, vectors = torch.linalg.eigh(matrix)  # type: ignore[arg-type]
    step = 2 * vectors[:, 0].reshape(2, 3)  # along which the curvature is -2
    other = {**state(subject.model), "weight": subject.model.weight.detach() + step}  # type: ignore[operator, union-attr]
    found = run_probe(Line(along=_saved(tmp_path / "b.pt", other), resolution=4), subject)
    t = found["t"]
    assert t.tolist() == pytest.approx([0, 1 / 48, 1 / 12, 1 / 3, 2 / 3, 11 / 12, 47 / 48, 1])
    bulge = -values[0].item() * 4 / 2 * t * (1 - t)  # -d'Ad t (1 - t) / 2 for scale 1
    np.testing.assert_allclose(found["excess"][0], scale.mean() * bulge, atol=1e-12)
    np.testing.assert_allclose(found["excess_se"][0], scale.std(ddof=1) / 5**0.5 * bulge, atol=1e-12)
    top = int(np.argmax(found["excess"][0]))
    ends = (found["excess"][0, top], found["excess_se"][0, top])
    assert (found["barrier"][0], found["barrier_se"][0]) == pytest.approx(ends, rel=1e-14)
    assert found["barrier_at"][0] == t[top]
    assert found["barrier"][0] == pytest.approx(scale.mean() * 4 * 2 / 9, rel=1e-12)


def test_the_line_between_networks_says_the_losses_of_both_ends_the_middle_and_the_best_point() -> None:
    torch.manual_seed(0)
    data, nets = (torch.randn(32, 5), torch.arange(32) % 3), [torch.nn.Linear(5, 3).double() for _ in range(2)]
    found = landscape.measure("line", nets[0], along=nets[1], data=data, resolution=7, out=None, quiet=True)
    said = {one.name: one for one in measured(found)}
    w, b = (torch.stack([getattr(net, name).detach() for net in nets]) for name in ("weight", "bias"))
    for t in (0.0, 0.5, 1.0):
        logits = data[0].double() @ ((1 - t) * w[0] + t * w[1]).T + (1 - t) * b[0] + t * b[1]
        loss = torch.nn.functional.cross_entropy(logits, data[1]).item()
        assert said[f"loss at {t:g}"].value == pytest.approx(loss, rel=1e-6)
    best = int(found["loss"].values.argmin())
    assert (said["lowest loss"].value, said["lowest loss"].at) == (
        float(found["loss"].min()), f"at {float(found['t'][best]):.4g}",
    )  # fmt: skip
    alone = landscape.measure("line", nets[0], data=data, resolution=3, out=None, quiet=True)
    assert not [one.name for one in measured(alone) if one.name.startswith(("loss at", "lowest"))]


def test_a_convex_loss_has_no_barrier(tmp_path: Path) -> None:
    subject = quadratic(symmetric([1.0, 2.0, 3.0]), batches=[SAMPLES[:4]])
    other = {**state(subject.model), "weight": torch.tensor([[3.0, -1.0, 2.0]]).double()}
    found = run_probe(Line(along=_saved(tmp_path / "b.pt", other), resolution=5), subject)
    assert (found["excess"][0, 1:-1] < 0).all()
    assert (found["barrier"][0], found["barrier_se"][0]) == (0.0, 0.0)


def test_a_low_barrier_beside_a_checkpoint_is_seen_between_two_points_of_the_grid(tmp_path: Path) -> None:
    """One of 0.023 beside each checkpoint, while the loss at 19 even points is below the straight line."""

    def bumps(outputs: Tensor, _: Tensor) -> Tensor:
        way = (1 - outputs[:, 0].sqrt()).clamp(0, 1)
        near = torch.minimum(way, 1 - way)
        return 5 * near * torch.exp(-50 * near) - near * (1 - near)

    batches = [(torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))]
    subject, end = Subject(_Plane().eval(), batches, losses=bumps), {"weight": torch.zeros(2, dtype=torch.float64)}
    found = run_probe(Line(along=_saved(tmp_path / "end.pt", end), resolution=21), subject)
    t, excess = found["t"], found["excess"][0]
    assert (excess[(t > 0.04) & (t < 0.96)] < 0).all()
    np.testing.assert_allclose(excess, excess[::-1], atol=1e-12)
    best = np.linspace(0, 0.05, 5001)
    top = (5 * best * np.exp(-50 * best) - best * (1 - best)).max()
    assert 0.64 * top < found["barrier"][0] == pytest.approx(0.0211, abs=1e-4)
    assert found["barrier_at"][0] in (0.0125, 0.9875)


def test_accuracy_falls_below_the_straight_line_by_its_paired_deficit(tmp_path: Path) -> None:
    subject = convolution_net(sizes=(40,))
    there = {**state(subject.model)}
    there["0.weight"], there["5.weight"] = -3 * there["0.weight"], 2 * there["5.weight"].flip(0)
    found = run_probe(Line(along=_saved(tmp_path / "b.pt", there), resolution=9), subject)
    rights = []
    (line,) = lines_of(subject, str(tmp_path / "b.pt"), normalize="filter", ignore="", seed=0, count=1)
    with ModelOnLine(subject, line, OWN) as model:
        for t in found["t"]:
            model.move_to(float(t))
            rights.append(per_sample(subject)[1].numpy())
    deficits = [(1 - t) * rights[0] + t * rights[-1] - right for t, right in zip(found["t"], rights, strict=True)]
    assert np.ptp([right.mean() for right in rights]) > 0.05  # it does change
    np.testing.assert_allclose(found["accuracy_deficit"][0], [d.mean() for d in deficits], atol=1e-14)
    errors = [d.std(ddof=1) / 40**0.5 for d in deficits]
    np.testing.assert_allclose(found["accuracy_deficit_se"][0], errors, atol=1e-14)
    top = int(np.argmax(found["accuracy_deficit"][0]))
    upper = max(d.mean() + 1.959963985 * error for d, error in zip(deficits, errors, strict=True))
    reach = (upper - deficits[top].mean()) / 1.959963985
    assert reach > 1.5 * errors[top]  # a position with a smaller deficit and a larger error
    assert (found["accuracy_barrier"][0], found["accuracy_barrier_se"][0]) == pytest.approx(
        (deficits[top].mean(), reach)
    )


def test_several_checkpoints_are_several_lines_from_one(tmp_path: Path) -> None:
    subject = attention_net()
    files = [_saved(tmp_path / f"{k}.pt", moved(subject, k)) for k in (1, 2)]
    both = run_probe(Line(along=",".join(files), resolution=3), subject)
    assert both["name"].tolist() == ["towards 1", "towards 2"]
    for k, file in enumerate(files):
        alone = run_probe(Line(along=file, resolution=3), subject)
        for name in ("loss", "excess", "excess_se"):
            np.testing.assert_array_equal(both[name][k], alone[name][0])
        assert both["barrier"][k] == alone["barrier"][0]


def test_eigenvectors_curve_by_the_two_ends_of_the_spectrum() -> None:
    subject = quadratic(symmetric([8.0, 3.0, 1.0, 0.5, 0.2, -2.0]), weight=torch.zeros(2, 3))
    found = run_probe(Line(along="eigen", resolution=3, range="0.5"), subject)
    np.testing.assert_allclose(found["loss"][:, 0], [8 / 8, -2 / 8], rtol=1e-3)
    assert ["largest" in name for name in found["name"]] == [True, False]
    np.testing.assert_allclose(found["norm"], 1.0, rtol=1e-6)


def test_the_range_along_eigenvectors_follows_from_the_flatter_curvature() -> None:
    offset = torch.tensor([[1.0, 4.0]])  # a loss of 4 at the saddle
    subject = quadratic(symmetric([200.0, 3.0, 1.0, -5.0]), weight=torch.zeros(1, 4), batches=(offset,))
    probe = Line(along="eigen", resolution=3)
    t = probe.plan(subject).over["t"]
    assert t == pytest.approx([-half_range(4.0, 0.0, -5.0), 0.0, half_range(4.0, 0.0, -5.0)])
    assert probe.identity(subject)["range"] == "by curvature"
    assert Line(along="eigen", resolution=3, range="1").plan(subject).over["t"].tolist() == [-1.0, 0.0, 1.0]


def test_the_first_component_of_a_straight_run_passes_through_its_snapshots(tmp_path: Path) -> None:
    subject = attention_net()
    here, there = state(subject.model), moved(subject, 1)
    for epoch, share in enumerate((1.0, 0.4, 0.0)):
        mixed = {name: here[name] + share * (there[name] - here[name]) for name in here}
        _saved(tmp_path / f"epoch_{epoch}.pt", mixed)
    length = sum((there[name] - here[name]).square().sum().item() for name in subject.parameters) ** 0.5
    found = run_probe(Line(along=str(tmp_path), resolution=2, range=f"0:{length}"), subject)
    assert found["loss"][0, 1] == pytest.approx(losses_with(subject, there).mean(), rel=1e-9)
    with pytest.raises(ValueError, match=r"3 snapshots of .* have 1 principal components; give --directions 1"):
        Line(along=str(tmp_path), directions=2).plan(subject)
    low, high = Line(along=str(tmp_path)).plan(subject).over["t"][[0, -1]]
    assert low < 0 < length < high


@pytest.mark.parametrize(("resolution", "span"), [(4, "-1:2"), (6, "-0.3:1.7"), (2, "-1:1"), (41, "-0.5:1.5")])
def test_the_checkpoints_are_exactly_on_the_grid(tmp_path: Path, resolution: int, span: str) -> None:
    subject = attention_net()
    file = _saved(tmp_path / "b.pt", moved(subject, 1))
    t = Line(along=file, resolution=resolution, range=span).plan(subject).over["t"]
    assert {0.0, 1.0} <= set(t)
    assert (np.diff(t) > 1e-6).all()
    assert resolution <= len(t) - 4 <= resolution + 2  # four beside the ends
    t = Line(resolution=resolution, range=span).plan(subject).over["t"]
    assert 0.0 in t


def test_a_barrier_is_known_only_when_all_between_the_ends_is_measured(tmp_path: Path) -> None:
    subject = attention_net()
    probe = Line(along=_saved(tmp_path / "b.pt", moved(subject, 1)), resolution=6, range="0:1.25")
    whole, part, half = (run_probe(probe, subject, units=units) for units in (None, 9, 7))
    assert whole["barrier"][0] == part["barrier"][0] > -1
    assert np.isnan(half["barrier"][0])
    assert np.isnan(run_probe(replace(probe, range="0:0.5"), subject)["barrier"][0])  # an end is not on the line


def test_a_weight_that_is_not_trained_moves_too(tmp_path: Path) -> None:
    subject = attention_net()
    there = moved(subject, 1)
    next(subject.model.parameters()).requires_grad_(False)
    found = run_probe(Line(along=_saved(tmp_path / "b.pt", there), resolution=2), subject)
    assert found["loss"][0, -1] == losses_with(subject, there).mean()


def test_an_invalid_line_is_rejected_in_one_sentence(tmp_path: Path) -> None:
    subject = attention_net()
    same = _saved(tmp_path / "same.pt", state(subject.model))
    wide = _saved(tmp_path / "wide.pt", {name: torch.zeros(7, 7) for name in state(subject.model)})
    for along, said in {
        same: "holds the same weights as the checkpoint; a line needs two different ones",
        wide: r"wide.pt has another architecture: \S+ is \(7, 7\), expected",
        "sideways": "--along must be random, eigen, a checkpoint B.pt, a run's folder or a file of .*, got sideways",
        str(tmp_path / "none.pt"): r"no checkpoint at \S+none.pt",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            Line(along=along).plan(subject)
    with pytest.raises(OptionError, match=r"--directions 2 cannot be combined with --along \S+wide.pt"):
        Line(along=wide, directions=2).plan(subject)
    with pytest.raises(ValueError, match="--bn interpolate needs another checkpoint"):
        Line(along=str(tmp_path), bn="interpolate").plan(_run_of(subject, tmp_path))
    with pytest.raises(ValueError, match="relax --ignore"):
        Line(ignore=".").plan(subject)


def _run_of(subject: Subject, folder: Path) -> Subject:
    for file in folder.iterdir():
        file.unlink()
    for epoch in range(3):
        _saved(folder / f"epoch_{epoch}.pt", moved(subject, epoch))
    return subject


class _Plane(torch.nn.Module):
    """Two weights; its outputs are their squared length, once per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 0.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.square().sum().expand(len(x), 1)


def _bowl(outputs: Tensor, targets: Tensor) -> Tensor:
    """0 on the unit circle."""
    return (outputs[:, 0] - targets).square()


@pytest.mark.slow
def test_a_trained_curve_follows_a_bent_valley(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two points of a circle of minima, 120 degrees apart, against the best control point by quadrature."""
    batches = [(torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, dtype=torch.float64))] * 20
    subject = Subject(_Plane().eval(), batches, losses=_bowl)
    end = torch.tensor([-0.5, 0.75**0.5], dtype=torch.float64)
    path = _saved(tmp_path / "end.pt", {"weight": end})
    monkeypatch.setattr("landscape.weight_space.bezier.training_part", lambda given: given)
    monkeypatch.setattr(Images, "sha256", "")
    options = {"along": path, "resolution": 41}
    straight = run_probe(Line(**options), subject)
    curve = Line(**options, connect="bezier", connect_epochs=40, connect_rate=0.05)
    found = run_probe(curve, subject)
    assert straight["barrier"][0] == pytest.approx(0.75**2)
    t, start = np.linspace(0, 1, 2001), np.array([1.0, 0.0])

    def losses(radius: float) -> np.ndarray:
        control = radius * np.array([0.5, 0.75**0.5])
        w = np.outer((1 - t) ** 2, start) + np.outer(2 * t * (1 - t), control) + np.outer(t**2, end.numpy())
        return (np.square(w).sum(axis=1) - 1) ** 2

    best = min(np.linspace(0.5, 2.0, 301), key=lambda radius: losses(radius).mean())
    assert found["loss"].mean() == pytest.approx(np.interp(found["t"], t, losses(best)).mean(), abs=2e-3)
    assert found["barrier"][0] < 0.05
    assert [found["loss"][0, 0], found["loss"][0, -1]] == pytest.approx([0.0, 0.0], abs=1e-12)
    assert torch.equal(subject.model.weight.data, torch.tensor([1.0, 0.0], dtype=torch.float64))
    np.testing.assert_array_equal(run_probe(curve, replace(subject))["loss"], found["loss"])  # trained again
    assert asked(curve, subject) != asked(Line(**options), subject)


def test_a_curve_needs_another_checkpoint_and_another_split_than_it_is_trained_on() -> None:
    with pytest.raises(OptionError, match="bezier needs another checkpoint, got --along eigen"):
        Line(along="eigen", connect="bezier")
    subject = attention_net()
    with pytest.raises(ValueError, match="bezier needs another checkpoint, got --along random"):
        Line(connect="bezier", ignore="").plan(subject)
    with pytest.raises(ValueError, match="measures it on the other: --split test"):
        training_part(replace(subject, spec=Spec(split="train")))
