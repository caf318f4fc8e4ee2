"""Scores of several data sets at the points of lines and planes, and the radii of their basins."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import quadratic, run_probe, symmetric
from torch import Tensor, nn

import landscape
from landscape import models
from landscape.checkpoints.checkpoint import write_checkpoint
from landscape.options import OptionError
from landscape.plots import appearance
from landscape.plots.figures import line_basins, surface_basins
from landscape.plots.headlines import numbers
from landscape.probes.line import Line
from landscape.probes.surface import Surface
from landscape.statistics.basins import distances, margin_of, of_lines, parse_margin, radius
from landscape.statistics.intervals import quantile
from landscape.subject.loading.further_data import Further, parse_further
from landscape.subject.subject import Subject
from landscape.weight_space.directions import random_direction
from landscape.weight_space.planes import plane_of

SCALES = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.2, 1.5], dtype=torch.float64)
MATRIX = symmetric([4.0, 3.0, 2.5, 1.0])
DIGITS: dict[str, Any] = {"data": "digits", "samples": 90, "batch_size": 40}


def _bowl() -> Subject:
    """The loss s_i w'Aw / 2 of sample i around its minimum."""
    samples = torch.stack([SCALES, torch.zeros(6)], dim=1)
    return quadratic(MATRIX, weight=torch.zeros(2, 2), batches=[samples[:4], samples[4:]])


def _curvature(first: Tensor, second: Tensor) -> float:
    return (first @ MATRIX @ second).item()


def _direction(seed: int) -> Tensor:
    weights = {"weight": torch.zeros(2, 2, dtype=torch.float64)}
    return random_direction(weights, seed=seed, axis=0, normalize="none", ignore="")["weight"].flatten()


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 12), nn.Tanh(), nn.Linear(12, 10))


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """A checkpoint that names its data."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"classes": 10, "image_size": 16, "blocks": (1, 1), "width": 4}
    weights = models.build("resnet_demo", **arguments).state_dict()
    write_checkpoint(
        tmp_path / "final.pt", model="resnet_demo", model_args=arguments, state_dict=weights, data={"name": "digits"},
        recipe={}, epoch=1.0, metrics={}, seed=0,
    )  # fmt: skip
    return tmp_path / "final.pt"


@pytest.fixture
def loss_file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(
        "def miss(outputs, targets):\n    return (outputs.argmax(1) != targets).double()\n"
    )
    return f"{tmp_path / 'own.py'}:miss"


@pytest.mark.slow
def test_the_radius_of_a_quadratic_loss_along_a_line_has_its_closed_form() -> None:
    """m a t^2 / 2 = margin at t = sqrt(2 margin / (m a)), and with the ends of m's interval at those of its own."""
    found = run_probe(Line(directions=2, resolution=151, range="1.5", margin="0.5", normalize="none"), _bowl())
    mean, half = SCALES.mean().item(), quantile(6) * SCALES.std().item() / math.sqrt(6)
    assert list(found["score_kind"]) == ["loss"]  # one output per sample has no accuracy
    for k in range(2):
        value, near, far = (
            math.sqrt(1.0 / (scale * _curvature(_direction(k), _direction(k))))
            for scale in (mean, mean + half, mean - half)
        )
        for side in range(2):
            for end, expected in (("", value), ("_low", near), ("_high", far)):
                assert found[f"basin_radius{end}"][k, side, 0] == pytest.approx(expected, rel=5e-3)
    assert found["basin_least"] == found["basin_radius"].min()
    assert found["basin_mean"] == pytest.approx(found["basin_radius"].mean())


@pytest.mark.slow
def test_the_radii_of_a_quadratic_loss_on_a_plane_have_their_closed_forms() -> None:
    """The worst direction is that of the larger eigenvalue of the plane's Hessian, the mean has half its trace."""
    subject = _bowl()
    found = run_probe(Surface(resolution="27", range="0.4", margin="0.2", normalize="none", seed=3), subject)
    plane = plane_of(subject, "random", normalize="none", ignore="", seed=3)
    first, second = (direction["weight"].flatten() for direction in plane.directions)
    mean, corner = SCALES.mean().item(), _curvature(first, second)
    hessian = mean * np.array([[_curvature(first, first), corner], [corner, _curvature(second, second)]])
    assert found["basin_least"][0] == pytest.approx(math.sqrt(0.4 / np.linalg.eigvalsh(hessian)[-1]), rel=0.02)
    assert found["basin_mean"][0] == pytest.approx(math.sqrt(0.4 / (np.trace(hessian) / 2)), rel=0.02)
    at = found["distance"]
    np.testing.assert_allclose(found["profile_mean"][:, 0], at**2 * np.trace(hessian) / 4, rtol=0.02, atol=5e-3)
    assert (found["profile_most"] >= found["profile_mean"]).all()


def test_the_interval_of_a_radius_ends_where_those_of_the_worsening_reach_the_margin() -> None:
    r, none = np.array([1.0, 2.0, 3.0, 4.0]), np.zeros(4)
    assert radius(r, np.array([0.0, 1.0, 3.0, 9.0]), none, 2.0) == (2.5, 2.5, 2.5)
    assert radius(r, np.array([0.0, 1.0, 3.0, 9.0]), np.full(4, 1.5), 2.0) == (2.5, 1.5, pytest.approx(3 + 0.5 / 6))
    assert radius(r, none, none, 2.0) == (4.0, 4.0, math.inf)  # never
    assert radius(r, np.array([-5.0, 1.0, np.inf, 1.0]), none, 2.0) == (2.0, 2.0, 3.0)
    unfinished = radius(r, np.array([0.0, np.nan, 3.0, 9.0]), none, 2.0)
    assert all(map(math.isnan, unfinished))
    known = radius(r, np.array([3.0, np.nan, 3.0, 9.0]), none, 2.0)
    assert known == pytest.approx((2 / 3,) * 3)
    assert radius(r, np.array([0.0, 1.0, 3.0, 9.0]), np.full(4, np.nan), 2.0)[0] == 2.5  # a mean has no error


def test_a_point_that_is_not_finite_leaves_and_one_that_is_not_measured_is_not_known() -> None:
    arrays: dict[str, np.ndarray] = {
        "t": np.array([-1.0, 0.0, 0.5, 1.0]), "done": np.array([[1, 1, 1, 1], [0, 1, 1, 0]]),
        "score_margin": np.array([1.0]), "score_worse_se": np.zeros((2, 4, 1)), "score_samples": np.array([9.0]),
        "score_worse_part": np.zeros((2, 4, 1, 3)),
        "score_worse": np.array([[[np.nan], [0.0], [0.2], [2.0]], [[np.nan], [0.0], [0.2], [np.nan]]]),
    }  # fmt: skip
    found = of_lines(arrays)
    assert found["basin_radius"][0, :, 0] == pytest.approx([0.0, 0.5 + 0.5 * 0.8 / 1.8])
    assert np.isnan(found["basin_radius"][1]).all()
    assert np.isnan(found["basin_mean"]).all()
    assert distances(np.array([0.0, 1.0]), np.array([-1.0, 1.0])) == [0.0]  # the centre at the border


def test_margins_are_standard_errors_shares_or_numbers() -> None:
    assert [margin_of(text, -4.0, 0.1) for text in ("", "3se", "10%", "0.5")] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert math.isnan(margin_of("0.5", math.nan, 0.1))
    for text in ("much", "-1", "5 %%", "1.2.3"):
        with pytest.raises(OptionError, match="margin"):
            parse_margin(text)


def test_data_sets_are_named_with_split_and_loss() -> None:
    found = parse_further("also", ["a=x.npy", "b=digits:test", "c=@mse", "d=in.npy,out.npy:train@own.py:f", "e=f.py:g"])
    assert found == [
        Further("a", "x.npy"), Further("b", "digits", "test"), Further("c", loss="mse"),
        Further("d", "in.npy,out.npy", "train", "own.py:f"), Further("e", "f.py:g"),
    ]  # fmt: skip
    for texts in (["digits"], ["=digits"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(OptionError, match="also must be NAME=DATA"):
            parse_further("also", texts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=digits:val", "'val' is no split; expected train or test"),
        ("a=f.py:g:val", "'val' is no split"),
        ("a=in.npy,out.npy:tset@mse", "'tset' is no split"),
        ("a=digits@mes", "'mes' is no loss; expected .* or file.py:callable; did you mean mse"),
        ("a=x:test@own.py", "'own.py' is no loss"),
    ],
)
def test_what_is_neither_a_split_nor_a_loss_is_named(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=rf"^--also a: {said}"):
        parse_further("also", [text])


def test_every_data_set_is_measured_as_by_itself(network: nn.Module, loss_file: str) -> None:
    """On the same line: values, errors and paired differences of the other split, and of a user's loss."""
    subject = landscape.load(network, split="train", **DIGITS)
    other = landscape.load(network, split="test", **DIGITS)
    missed = landscape.load(network, split="test", loss=loss_file, **DIGITS)
    probe = {"resolution": 5, "range": "0.4", "directions": 1}
    together = run_probe(Line(**probe, also=("held=digits:test", f"own=:test@{loss_file}")), subject)
    alone, misses = (run_probe(Line(**probe, margin="1"), one) for one in (other, missed))
    kinds = list(zip(together["score_data"], together["score_kind"], strict=True))
    own = [("digits", "loss"), ("digits", "accuracy")]
    assert kinds == [*own, ("held", "loss"), ("held", "accuracy"), ("own", "miss")]
    for name in ("score_value", "score_se", "score_worse", "score_worse_se"):
        np.testing.assert_array_equal(together[name][..., 2:4], alone[name])
        np.testing.assert_array_equal(together[name][..., 4], misses[name][..., 0])
    np.testing.assert_array_equal(together["score_value"][..., 0], together["loss"])
    np.testing.assert_allclose(together["score_se"][..., 1], together["accuracy_se"])
    np.testing.assert_allclose(together["score_worse"][..., 4], together["score_worse"][..., 3], atol=1e-12)
    assert (together["score_worse"][0, 2] == 0).all()  # at the checkpoint itself


@pytest.mark.parametrize("held", ["tensors", "batches"])
def test_a_further_loss_is_that_of_the_samples_in_memory(final: Path, held: str) -> None:
    """Not of the data that the checkpoint was trained on."""
    inputs, targets = torch.randn(12, 3, 16, 16), torch.arange(12) % 10
    subject = landscape.load(final, data=(inputs, targets))
    if held == "batches":
        subject = replace(subject, batches=[(inputs[:8], targets[:8]), (inputs[8:], targets[8:])])
    found = run_probe(Line(resolution=3, also=("again=@cross-entropy",)), subject)
    assert list(found["score_kind"]) == ["loss", "accuracy"] * 2
    np.testing.assert_array_equal(found["score_value"][..., 2:], found["score_value"][..., :2])
    with torch.no_grad():
        mean = nn.functional.cross_entropy(subject.model(inputs), targets).item()
    assert found["score_centre"][2] == pytest.approx(mean, rel=1e-5)
    with pytest.raises(ValueError, match=r"^--also b: the subject's data have no other split"):
        run_probe(Line(resolution=3, also=("b=:test",)), subject)


@pytest.mark.slow
def test_a_further_loss_may_differentiate(final: Path, tmp_path: Path) -> None:
    """A gradient penalty beside a loss that needs no graph: as measured by itself."""
    (tmp_path / "own.py").write_text(
        "import torch\n\ndef penalty(model, batch):\n"
        "    x = batch[0].clone().requires_grad_()\n"
        "    (slope,) = torch.autograd.grad(model(x).logsumexp(1).sum(), x, create_graph=True)\n"
        "    return slope.flatten(1).square().sum(1)\n"
    )
    loss = f"{tmp_path / 'own.py'}:penalty"
    subject = landscape.load(final, samples=12, batch_size=8)
    alone = landscape.load(final, samples=12, batch_size=8, loss=loss)
    for probe, options in ((Line, {"resolution": 3}), (Surface, {"resolution": "3"})):
        beside, itself = (
            run_probe(probe(**options, also=(f"own=@{loss}",)), subject),
            run_probe(probe(**options), alone),
        )
        np.testing.assert_allclose(beside["score_value"][..., 2], itself["loss"], rtol=1e-6)


@pytest.mark.slow
def test_the_accuracy_beside_a_mean_loss_has_an_error_and_a_radius(
    network: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss has neither, which is said once."""
    whole = landscape.load(network, **DIGITS)
    mean = landscape.load(
        network, loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets), **DIGITS
    )
    options = {"out": None, "resolution": 5, "range": "2", "margin": "2se"}
    found, wanted = (landscape.measure("line", one, **options) for one in (mean, whole))
    assert list(found["score_kind"].values) == ["loss", "accuracy"]
    for name in ("score_margin", "score_worse_se", "basin_mean", "basin_mean_low"):
        np.testing.assert_array_equal(found[name].values[..., 1], wanted[name].values[..., 1])
        assert np.isfinite(found[name].values[..., 1]).all()
    assert np.isnan(found["score_margin"].values[0])
    notes = [one.getMessage() for one in caplog.records if "--margin" in one.getMessage()]
    assert len(notes) == 1
    assert "loss of digits: without an error over samples the margin of 2se" in notes[0]


def test_a_further_loss_is_refused_where_the_targets_in_memory_were_changed(loss_file: str) -> None:
    """Targets of a causal model are then the next tokens."""
    tokens = torch.randint(7, (4, 6))
    subject = landscape.load(nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)), data=(tokens, tokens))
    with pytest.raises(ValueError, match=r"^--also own: for the cross-entropy the targets .* are the next tokens"):
        run_probe(Line(resolution=3, also=(f"own=@{loss_file}",)), subject)


def test_a_plane_has_the_scores_of_a_line_at_its_points(network: nn.Module) -> None:
    subject, also = landscape.load(network, split="train", **DIGITS), ("held=digits:test",)
    plane = run_probe(Surface(resolution="5,3", range="0.4", also=also), subject)
    line = run_probe(Line(resolution=5, range="0.4", also=also), subject)
    for name in ("score_value", "score_se", "score_worse", "score_worse_se"):
        np.testing.assert_allclose(plane[name][:, 1], line[name][0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(plane["score_worse_se"][..., 0], plane["rise_se"], rtol=1e-6, atol=1e-9)
    assert plane["score_worse_se"].shape == (5, 3, 4)


@pytest.mark.slow
def test_a_stopped_run_resumes_and_a_result_without_scores_is_as_before(network: nn.Module, tmp_path: Path) -> None:
    from landscape.results.writer import Writer
    from landscape.running.run import reduce_of, run_key
    from landscape.subject.loading.identity import weights_sha256

    subject = landscape.load(network, split="train", **DIGITS)
    probe = Line(resolution=3, range="0.4", also=("held=digits:test",), margin="10%")
    key, _ = run_key(probe, subject, "", weights=weights_sha256(subject))
    with Writer(tmp_path / "r.h5", key, reduce_of=reduce_of) as writer:
        first = next(iter(key.plan.units()))
        writer.write(first, probe.measure(subject, first))
    found = landscape.measure("line", subject, out=tmp_path / "r.h5", resolution=3, range="0.4",
                              also="held=digits:test", margin="10%")  # fmt: skip
    whole = run_probe(probe, subject)
    for name in ("score_worse", "score_worse_se", "basin_radius", "basin_mean_high", "score_centre"):
        np.testing.assert_array_equal(found[name].values, whole[name])
    assert "digits test" in str(found["score_protocol"].values[2])
    assert set(numbers(found)) >= {"basin of held loss", "basin of digits accuracy"}
    one = landscape.measure("line", subject, out=None, resolution=3, range="0:0.4", margin="10%")
    assert not any(name.startswith("narrowest") for name in numbers(one))  # a single direction to one side
    page = line_basins.page([found], appearance.looks([found]))
    assert [ax.get_ylabel() for ax in page.axes] == ["loss (nats)", "accuracy"]


@pytest.mark.slow
def test_tokens_of_several_files_have_loss_and_next_token_accuracy(tmp_path: Path) -> None:
    """A bigram model; the second file has the block size of the first, and a figure of the plane draws."""
    generator = np.random.default_rng(0)
    for name in ("prose", "code"):
        np.save(tmp_path / f"{name}.npy", generator.integers(0, 7, 400))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    subject = landscape.load(model, data=tmp_path / "prose.npy", block_size=16, samples=20)
    found = landscape.measure(
        "surface", subject, out=None, resolution=5, also=f"code={tmp_path / 'code.npy'}", margin="5%"
    )
    assert list(found["score_data"].values) == ["prose", "prose", "code", "code"]
    tokens = torch.from_numpy(np.load(tmp_path / "code.npy"))[: 24 * 16 + 1]
    with torch.no_grad():
        logits = model(tokens[:-1])
    every = nn.functional.cross_entropy(logits, tokens[1:])
    others = landscape.load(model, data=tmp_path / "code.npy", block_size=16)
    centre = landscape.measure("line", others, out=None, resolution=3, margin="5%")["score_centre"].values
    assert centre[0] == pytest.approx(every.item(), rel=1e-5)
    assert centre[1] == pytest.approx((logits.argmax(1) == tokens[1:]).double().mean().item())
    assert len(surface_basins.page([found], appearance.looks([found])).axes) == 2


def test_options_that_cannot_hold_are_refused(network: nn.Module) -> None:
    subject = landscape.load(network, split="train", **DIGITS)
    with pytest.raises(OptionError, match="have this name"):
        Line(also=("digits=digits:test",)).plan(subject)
    with pytest.raises(ValueError, match=r"^--also a: the model returns \(2, 10\) for targets \(2,\)"):
        Line(also=("a=@mse",)).plan(subject)
    with pytest.raises(ValueError, match=r"^--also a: .*no_such"):
        Line(also=("a=no_such.npy",)).plan(subject)
    made = landscape.load(network, loss=lambda outputs, targets: outputs[:, 0], split="train", **DIGITS)
    with pytest.raises(ValueError, match=r"^--also held: .*made in Python"):
        Line(also=("held=digits:test",)).plan(made)
