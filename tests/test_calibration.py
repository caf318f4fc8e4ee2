"""Facts about the calibration probe: metrics by definition, another optimiser's temperature, paired differences."""

import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from analytic import rebatched, run_probe
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.optimize import minimize_scalar
from simulated_cuda import simulated_cuda
from torch import Tensor, nn

from landscape.options import OptionError
from landscape.plots import FIGURES, appearance, differences, headlines
from landscape.plots.appearance import look_of
from landscape.plots.comparison import comparison
from landscape.plots.figures import calibration as figure
from landscape.plots.figures import calibration_test, calibration_train
from landscape.predictions import temperature
from landscape.predictions.scores import sample_scores
from landscape.predictions.temperature import HIGHEST, LOWEST, TemperatureFit
from landscape.probes import calibration
from landscape.probes.calibration import Calibration
from landscape.results import creation, group, reader
from landscape.running.run import run
from landscape.statistics.calibration import METRICS, SampleScores, bootstrap, paired_difference, summary
from landscape.statistics.intervals import quantile
from landscape.statistics.paired import Difference, by_error, comparable, mcnemar, paired_t
from landscape.subject.losses import LossTraits, bce, mse
from landscape.subject.subject import Subject


class Given(nn.Module):
    """Returns its inputs as logits, times a weight."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float64))
        self.passes = 0

    def forward(self, logits: Tensor) -> Tensor:
        self.passes += 1
        return self.scale * logits


def logits_and_classes(count: int = 300, *, overconfident: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits that are `overconfident` times those that the classes were drawn from."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return overconfident * logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


def subject_of(logits: Tensor, targets: Tensor, *, size: int = 64, scale: float = 1.0) -> Subject:
    return Subject(Given(scale).eval(), rebatched([(logits, targets)], size))


def test_metrics_are_those_of_all_samples_with_intervals_around_them() -> None:
    logits, targets = logits_and_classes()
    found = run_probe(Calibration(draws=200), subject_of(logits, targets))
    for name, value in summary(sample_scores(logits, targets)).items():
        assert found[name] == pytest.approx(value, rel=1e-12)
        assert found[f"{name}_low"] <= value <= found[f"{name}_high"]
    assert found["nll_se"] == pytest.approx(sample_scores(logits, targets).nll.std() / 300**0.5, rel=0.2)
    assert found["bin_count"].sum() == 300


@pytest.mark.parametrize(("spread", "error"), [(True, 0.0), (False, 0.03)])
def test_the_interval_of_the_calibration_error_holds_the_truth(spread: bool, error: float) -> None:
    generator, held, nothing = np.random.default_rng(0), 0, np.zeros(100)
    for _ in range(100):
        confidence = generator.uniform(0.05, 1, 100) if spread else np.full(100, 0.75)
        correct = (generator.random(100) < confidence - error).astype(float)
        interval = bootstrap(SampleScores(nothing, correct, correct, nothing, confidence), draws=200)["ece"]
        held += interval.low <= error <= interval.high
    assert held >= 88  # 36 and 73 with both ends reflected; 95 % less three standard deviations


@pytest.mark.parametrize("error", [0.03, 0.1])
def test_the_interval_of_a_difference_of_calibration_errors_holds_the_truth(error: float) -> None:
    """Of a calibrated network and one that is not, on the same samples."""
    generator, held, nothing = np.random.default_rng(0), 0, np.zeros(600)
    for _ in range(40):
        confidence, drawn = generator.uniform(0.4, 1, 600), generator.random(600)
        correct = [(drawn < confidence - off).astype(float) for off in (0.0, error)]
        both = [SampleScores(nothing, right, right, nothing, confidence) for right in correct]
        value, interval = paired_difference(*both, draws=200)["ece"]
        held += interval.low <= -error <= interval.high
        found = by_error(value, interval.error, 600, "", (interval.low, interval.high))
        assert (found.p < 0.05) == (not interval.low <= 0 <= interval.high)
    assert held >= 36  # 31 and 22 with both ends reflected at the estimate
    same = paired_difference(both[0], both[0])["ece"]
    assert (same[0], same[1].error, same[1].low, same[1].high) == (0, 0, 0, 0)


def test_the_error_over_any_number_of_bins_follows_from_the_stored_scores() -> None:
    logits, targets = logits_and_classes()
    found = run_probe(Calibration(draws=2), subject_of(logits, targets))
    confidence, correct = (found[f"sample_{name}"].ravel() for name in ("confidence", "correct"))
    known, (largest, guess) = np.isfinite(confidence), map(np.asarray, logits.softmax(1).max(1))
    for bins in (10, 15):
        of_scores, of_logits = (
            sum(abs((right - sure)[np.ceil(bins * sure) == i].sum()) for i in range(1, bins + 1)) / len(sure)
            for sure, right in ((confidence[known], correct[known]), (largest, guess == targets.numpy()))
        )
        assert of_scores == pytest.approx(of_logits, rel=1e-9)
        assert (found["ece"] == pytest.approx(of_logits, rel=1e-9)) == (bins == 10)  # of which there is no option
    assert "bins" not in Calibration.__dataclass_fields__


def test_the_temperature_is_that_of_another_optimiser_on_the_same_half() -> None:
    logits, targets = logits_and_classes()
    probe, subject = Calibration(draws=20), subject_of(logits, targets)
    found = run_probe(probe, subject)
    held = ~np.isnan(found["sample_scaled_confidence"].ravel()[:300])
    assert held.sum() == 150

    def nll(temperature: float) -> float:
        return float(sample_scores(logits[~held] / temperature, targets[~held]).nll.mean())

    wanted = minimize_scalar(nll, bounds=(LOWEST, HIGHEST), method="bounded", options={"xatol": 1e-9}).x
    assert found["temperature"] == pytest.approx(wanted, rel=1e-5)
    assert found["temperature_low"] < 2.0 < found["temperature_high"]
    scaled = summary(sample_scores(logits[held] / found["temperature"], targets[held]))
    before = summary(sample_scores(logits[held], targets[held]))
    for name in METRICS:
        assert found[f"scaled_{name}"] == pytest.approx(scaled[name], rel=1e-12)
        assert found[f"held_{name}"] == pytest.approx(before[name], rel=1e-12)
    assert found["scaling_nll"] == pytest.approx(scaled["nll"] - before["nll"])
    assert found["scaling_nll_high"] < 0 < found["held_ece"] - found["scaled_ece"]


@pytest.mark.slow
def test_the_error_of_the_temperature_is_its_spread_over_samples() -> None:
    drawn = []
    for seed in range(40):
        logits, _ = logits_and_classes(200)
        generator = torch.Generator().manual_seed(seed)
        targets = torch.multinomial((logits / 2).softmax(1), 1, generator=generator)[:, 0]
        fit = TemperatureFit()
        fit.add(logits, targets)
        drawn.append(fit.fitted())
    spread = np.std([fit.value for fit in drawn], ddof=1)
    assert np.mean([fit.error for fit in drawn]) == pytest.approx(spread, rel=0.25)
    assert np.mean([fit.value for fit in drawn]) == pytest.approx(2.0, abs=4 * spread / 40**0.5)


def test_temperatures_are_tried_together_on_a_device_with_the_bits_of_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits = TemperatureFit(), TemperatureFit()
    logits, targets = logits_and_classes(200)
    with simulated_cuda() as simulation:
        on_device = logits.to("cuda"), targets.to("cuda")
        simulation.operations = 0
        fits[0].add(*on_device)
        assert simulation.operations <= 40
    monkeypatch.setattr(temperature, "AT_ONCE", 1)
    fits[1].add(logits, targets)
    np.testing.assert_array_equal(fits[0].sums, fits[1].sums)


@pytest.mark.parametrize(("sign", "end"), [(1.0, LOWEST), (-1.0, HIGHEST)])
def test_a_likelihood_without_a_maximum_gives_an_end_of_the_range_and_says_so(
    sign: float, end: float, caplog: pytest.LogCaptureFixture
) -> None:
    targets = torch.arange(40) % 4
    logits = sign * 50 * nn.functional.one_hot(targets, 4).double()
    with caplog.at_level(logging.WARNING):
        found = run_probe(Calibration(draws=5), subject_of(logits, targets))
    assert found["temperature"] == end
    assert np.isnan(found["temperature_se"])
    assert f"the temperature is {end:g}, an end of its range" in caplog.text


def test_probabilities_of_exactly_0_and_1_are_scored() -> None:
    """Certain predictions, three of four right: the ECE of the last bin is 1/4, the NLL of the wrong ones infinite."""
    logits = torch.full((40, 3), -torch.inf, dtype=torch.float64)
    logits[:, 0] = 0.0
    targets = torch.tensor([0, 0, 0, 1]).repeat(10)
    found = run_probe(Calibration(draws=50), subject_of(logits, targets))
    assert (found["ece"], found["ece_signed"], found["accuracy_90"]) == (0.25, 0.25, 0.75)
    assert found["nll"] == np.inf
    assert np.isnan(found["nll_se"])
    assert found["bin_count"].tolist() == [0] * 9 + [40]
    assert found["brier"] == pytest.approx(0.5)


@pytest.mark.slow
def test_numbers_do_not_depend_on_the_batch_size_nor_on_whether_logits_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, targets = logits_and_classes()
    names = ("nll", "ece", "temperature", "scaled_nll", "scaled_ece", "ece_low")
    wanted = run_probe(Calibration(draws=50), subject_of(logits, targets))
    subject = subject_of(logits, targets, size=300)
    for found in (
        run_probe(Calibration(draws=50), subject),
        run_probe(Calibration(draws=50), subject_of(logits, targets, size=7)),
    ):
        assert [found[name] for name in names] == pytest.approx([wanted[name] for name in names], rel=1e-9)
    assert subject.model.passes == 1
    monkeypatch.setattr(calibration, "KEPT", 0)
    again = subject_of(logits, targets)
    found = run_probe(Calibration(draws=50), again)
    assert [found[name] for name in names] == [wanted[name] for name in names]
    assert again.model.passes == 10  # two passes over five mini-batches


def by_hand(p: np.ndarray, y: np.ndarray, there: np.ndarray) -> dict[str, float]:
    """Metrics of probabilities (N, rows, C) for classes (N, rows), by their definitions, every sample of one weight."""
    share = there / there.sum(1, keepdims=True) / len(p)
    own = np.take_along_axis(p, np.where(there, y, 0)[..., None], 2)[..., 0]
    sure, right = p.max(2), p.argmax(2) == y
    gaps = [
        np.where((sure > low / 10) & (sure <= (low + 1) / 10), share * (sure - right), 0).sum() for low in range(10)
    ]
    return {
        "nll": -(share * np.log(own)).sum(),
        "accuracy": (share * right).sum(),
        "brier": (share * ((p**2).sum(2) - 2 * own + 1)).sum(),
        "ece": np.abs(gaps).sum(),
        "frequency_90": (share * (sure > 0.9)).sum(),
    }


def rows_of(kind: str, n: int = 120) -> tuple[Subject, np.ndarray, np.ndarray, np.ndarray]:
    """A subject of one logit, of several labels or of masks; its probabilities, classes, and which are labelled."""
    generator = torch.Generator().manual_seed(1)
    shape = {"one": (n,), "labels": (n, 3), "masks": (n, 4, 5, 6)}[kind]
    logits = 4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "masks":
        classes = torch.randint(4, (n, 5, 6), generator=generator)
        classes[torch.rand(n, 5, 6, generator=generator) < 0.3] = -1
        p = logits.softmax(1).flatten(2).movedim(1, 2).numpy()
        y = classes.flatten(1).numpy()
        return subject_of(logits, classes), p, y, y >= 0
    labels = torch.rand(shape, generator=generator) < logits.sigmoid()
    p = torch.stack([1 - logits.sigmoid(), logits.sigmoid()], -1).view(n, -1, 2).numpy()
    y = labels.long().view(n, -1).numpy()
    return replace(subject_of(logits, labels.float()), losses=bce), p, y, np.ones_like(y, bool)


@pytest.mark.parametrize("kind", ["one", "labels", "masks"])
def test_one_logit_several_labels_and_masks_are_scored_by_row_with_errors_over_samples(kind: str) -> None:
    subject, p, y, there = rows_of(kind)
    probe = Calibration(draws=200)
    found = run_probe(probe, subject)
    for name, value in by_hand(p, y, there).items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    each = np.array([by_hand(p[i : i + 1], y[i : i + 1], there[i : i + 1])["nll"] for i in range(len(p))])
    assert found["nll_se"] == pytest.approx(each.std(ddof=1) / len(p) ** 0.5, rel=0.2)
    assert found["nll_se.n"] == len(p)
    assert found["bin_count"].sum() == pytest.approx(len(p))
    held = ~np.isnan(found["sample_scaled_confidence"].ravel())[np.isfinite(found["sample_nll"].ravel())]

    def scaled(half: np.ndarray, temperature: float) -> dict[str, float]:
        powers = p[half] ** (1 / temperature)
        return by_hand(powers / powers.sum(2, keepdims=True), y[half], there[half])

    limits = {"bounds": (LOWEST, HIGHEST), "method": "bounded", "options": {"xatol": 1e-9}}
    wanted = minimize_scalar(lambda t: scaled(~held, t)["nll"], **limits).x
    assert found["temperature"] == pytest.approx(wanted, rel=1e-4)
    for name in ("nll", "ece", "brier"):
        assert found[f"scaled_{name}"] == pytest.approx(scaled(held, found["temperature"])[name], rel=1e-9)


def test_the_error_of_a_temperature_is_over_samples_not_labels() -> None:
    """Ten equal labels of every sample say as much as one."""
    logits, classes = logits_and_classes()
    one, ten = TemperatureFit(), TemperatureFit()
    one.add(logits, classes)
    ten.add(logits[:, None].expand(-1, 10, -1), classes[:, None].expand(-1, 10))
    assert vars(ten.fitted()) == pytest.approx(vars(one.fitted()))


def test_what_is_no_classifier_is_refused() -> None:
    logits, targets = logits_and_classes(20)
    with pytest.raises(ValueError, match="got 1 sample; raise --samples"):
        Calibration().plan(subject_of(logits[:1], targets[:1]))
    with pytest.raises(OptionError, match="got --loss mse"):
        Calibration().plan(replace(subject_of(logits, targets), losses=mse, traits=LossTraits(name="mse")))
    with pytest.raises(ValueError, match=r"got targets \(20, 5\) torch.int64"):
        Calibration().plan(subject_of(logits, torch.zeros(20, 5, dtype=torch.long)))
    with pytest.raises(
        ValueError, match=r"logits that are not finite.*the inputs of the data are not finite; check --data"
    ):
        run_probe(Calibration(), subject_of(logits * torch.nan, targets))
    with pytest.raises(OptionError, match="--draws must be 2 to 100,000, got 1"):
        Calibration(draws=1)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two networks on the same samples, and one on others."""
    path, (logits, targets), times = tmp_path / "r.h5", logits_and_classes(), itertools.count()
    for module in (creation, group):
        monkeypatch.setattr(module, "now", lambda: f"2026-01-01T00:00:{next(times):02d}+00:00")
    for label, scale in (("one", 1.0), ("two", 0.5)):
        run(Calibration(draws=40), replace(subject_of(logits, targets, scale=scale), label=label), path)
    run(Calibration(draws=40), replace(subject_of(logits + 1, targets.flip(0)), label="elsewhere"), path)
    return path


@pytest.mark.slow
def test_checkpoints_on_the_same_samples_are_compared_sample_by_sample_in_words_and_figure(study: Path) -> None:
    logits, targets = logits_and_classes()
    rows = {row["label"]: row["headline"] for row in headlines.summary(study)}
    one, two, elsewhere = (rows[label] for label in ("one", "two", "elsewhere"))
    mine, other = (sample_scores(scale * logits, targets) for scale in (0.5, 1.0))
    expected = {"nll": paired_t(mine.nll, other.nll), "accuracy": mcnemar(mine.correct, other.correct)}
    in_words = [f"{name} {d.value:+.4f} [{d.low:+.4f}, {d.high:+.4f}]" for name, d in expected.items()]
    assert f"against one {', '.join(in_words)}, brier" in two
    stored = {data.attrs["label"]: data for _, data in reader.groups(study)}
    tested = comparison.paired(stored["two"], stored["one"])  # what `compare` prints
    assert {name: tested[name] for name in expected} == expected
    assert "against" not in one
    assert "against" not in elsewhere
    groups_of = {data.attrs["label"]: name for name, data in reader.groups(study)}
    assert "against one nll" in headlines.headline(study, groups_of["two"])
    results = [data for _, data in reader.groups(study)]  # the diagram is the stored one, the differences below it
    axes = figure.draw(results[0], tuple(Figure().subplots(1, 2)), look=look_of(results[0]))
    shown = results[0]["bin_count"].values > 0
    line = axes[0].containers[-1][0]
    np.testing.assert_array_equal(line.get_xdata(), results[0]["bin_confidence"].values[shown])
    np.testing.assert_array_equal(line.get_ydata(), results[0]["bin_accuracy"].values[shown])
    assert sum(bar.get_height() for bar in axes[1].containers[-1]) == pytest.approx(1.0)
    assert {results[i].attrs["label"] for i in comparable(results)} == {"one", "two"}
    looks = [appearance.look_of(data) for data in results]
    page = FIGURES["calibration"].module.page(results, looks)
    assert [ax.get_xlabel() for ax in page.axes[-4:]] == [
        "difference in NLL (nats)", "difference in accuracy", "difference in Brier score", "difference in ECE"
    ]  # fmt: skip
    for ax, name in zip(page.axes[-4:], expected, strict=False):  # the intervals of the table
        ((bar,),) = (drawn[2] for drawn in ax.containers)
        assert bar.get_segments()[0][:, 0] == pytest.approx((expected[name].low, expected[name].high))


def test_differences_that_are_rounding_have_no_scale_of_their_own() -> None:
    figure_of = Figure()
    axes = figure_of.subplots(1, 2)
    ends = {"a": (1e-17, -2e-17, 3e-17), "b": (0.01, 0.0, 0.02)}
    shown = {name: Difference(*one, p=np.nan, method="") for name, one in ends.items()}
    differences.draw(axes, {"a": "NLL", "b": "ECE"}, [shown], [appearance.Look("one")])
    FigureCanvasAgg(figure_of).draw()
    assert [ax.xaxis.get_offset_text().get_text() for ax in axes] == ["", ""]
    assert axes[0].get_xticks().tolist() == [0.0]
    assert len(axes[1].get_xticks()) > 1


def test_a_wilson_interval_contains_the_accuracy_also_at_its_ends() -> None:
    bins = {"count": [0.0, 4, 20, 20], "confidence": [np.nan, 0.3, 0.6, 0.9], "accuracy": [np.nan, 0.0, 0.5, 1.0]}
    data = xr.Dataset({f"bin_{name}": ("bin", values) for name, values in bins.items()})
    _, accuracy, low, high = figure.diagram(data)
    assert (low <= accuracy).all()
    assert (accuracy <= high).all()
    assert high[0] == pytest.approx(quantile(4) ** 2 / (4 + quantile(4) ** 2))


def result(label: str, split: str, nll: float, accuracy: float) -> xr.Dataset:
    numbers = {"nll": nll, "nll_low": nll - 0.1, "nll_high": nll + 0.1}
    numbers |= {"accuracy": accuracy, "accuracy_low": accuracy - 0.03, "accuracy_high": accuracy + 0.02}
    about = {"label": label, "spec": json.dumps({"split": split}), "data": "cifar10", "checkpoint_sha256": label}
    return xr.Dataset(numbers, attrs=about)


@pytest.mark.slow
def test_networks_are_drawn_as_accuracy_over_nll_on_test_and_as_error_over_training_nll() -> None:
    results = [result("a", "train", 0.5, 0.9), result("b", "test", 1.0, 0.7), result("a", "test", 0.8, 0.8)]
    assert calibration_test.select(results[:2]) == []  # one network is no comparison
    for module, chosen, place, width, height in (
        (calibration_test, [1, 2], (1.0, 0.7), [0.9, 1.1], [0.67, 0.72]),
        (calibration_train, [0, 2], (0.5, 0.2), [0.4, 0.6], [0.18, 0.23]),
    ):
        assert module.select(results) == chosen
        drawn = [results[i] for i in chosen]
        page = module.page(drawn, [appearance.look_of(data) for data in drawn])
        (point, _, (across, up)) = page.axes[0].containers[0]
        assert (point.get_xdata().item(), point.get_ydata().item()) == pytest.approx(place)
        np.testing.assert_allclose(across.get_segments()[0][:, 0], width)
        np.testing.assert_allclose(up.get_segments()[0][:, 1], height)
        if module is calibration_test:
            assert (page.axes[0].get_xlabel(), page.axes[0].get_ylabel()) == ("NLL on test (nats)", "accuracy on test")
