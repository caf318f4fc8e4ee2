"""Temporal smoothing: the weighted mean over frames by hand, one pass per frame, intervals over blocks of frames."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_dense import segmenter
from torch import Tensor, nn

from landscape.api import measure
from landscape.cli.main import exit_code
from landscape.options import OptionError
from landscape.plots.appearance import looks
from landscape.plots.figures.stream import WORDS, page
from landscape.predictions import timing
from landscape.predictions.frames import DRAWS, RingBuffer, frame_scores, frame_weights, near_boundary, smoothed
from landscape.predictions.scores import sample_scores
from landscape.results.headline_numbers import measured
from landscape.statistics.calibration import Resampled, summary, sums
from landscape.subject.loading.load import load
from landscape.subject.loading.sanity_check import mini_batch_effect
from landscape.subject.mc_dropout import as_is
from landscape.subject.subject import Subject

pytestmark = pytest.mark.slow

FRAMES, CLASSES = 14, 5


class Counted(nn.Module):
    """Counts the frames that pass through it."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Dropout(rate), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Any:
        frames.append(len(x))
        return self.net(x)


frames: list[int] = []


def video() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(FRAMES, 3, 2, 2, generator=generator, dtype=torch.float64)
    return steps.cumsum(dim=0), torch.randint(CLASSES, (FRAMES,), generator=generator)


def subject_of(rate: float = 0.0, **options: Any) -> Subject:
    torch.manual_seed(0)
    return load(Counted(rate).double().eval(), data=video(), ordered=True, **{"batch_size": 4, **options})


def stream(subject: Subject, **options: Any) -> Any:
    return measure("stream", subject, out=None, quiet=True, **{"timed": 0, **options})


def by_hand(p: Tensor, tau: float, past: int, ahead: int, clip: int = FRAMES) -> Tensor:
    """p_t = sum_s w_s p_{t-s} over the frames of the clip that exist."""
    means = []
    for t in range(len(p)):
        there = [s for s in range(t - past, t + ahead + 1) if 0 <= s < len(p) and s // clip == t // clip]
        weights = torch.tensor([math.exp(-abs(t - s) / tau) for s in there], dtype=torch.float64)
        means.append((weights[:, None] * p[there]).sum(dim=0) / weights.sum())
    return torch.stack(means)


@pytest.mark.parametrize(("past", "ahead", "clip"), [(3, 0, 0), (2, 2, 0), (0, 1, 0), (5, 1, 6)])
def test_scores_are_those_of_the_probabilities_averaged_by_hand(past: int, ahead: int, clip: int) -> None:
    subject, (inputs, targets) = subject_of(), video()
    found = stream(subject, tau="0.7,3", past=past, look_ahead=ahead, clip_length=clip)
    p = subject.model(inputs).detach().softmax(dim=1)
    assert found.method_name.values.tolist() == ["deterministic", "temporal", "temporal"]
    for j, tau in enumerate(found.tau.values.tolist()):
        mean = by_hand(p, tau, past, ahead, clip or FRAMES) if tau else p
        for name, value in summary(sample_scores(mean.log(), targets)).items():
            assert found[name][j].item() == pytest.approx(value, nan_ok=True), name
        first = {t for t in range(FRAMES) if t == 0 or (clip and t % clip == 0)}
        pairs = [t for t in range(FRAMES) if t not in first]
        same = [float(mean[t].argmax() == mean[t - 1].argmax()) for t in pairs]
        assert found.consistency[j].item() == pytest.approx(np.mean(same))
        surprise = [-(mean[t] * mean[t - 1].log()).sum().item() for t in pairs]
        assert found.consistency_nll[j].item() == pytest.approx(np.mean(surprise))


def test_every_frame_passes_once_for_all_tau() -> None:
    subject = subject_of()
    subject.example()
    mini_batch_effect(subject)
    frames.clear()
    stream(subject, tau="0.5,1,2,4,8", past=3, look_ahead=2)
    assert frames[-4:] == [4, 4, 4, 2]
    assert sum(frames[:-4]) <= 8  # by which the network is checked


def test_units_are_the_same_in_any_order() -> None:
    from landscape.probes.stream import Stream

    subject, probe = subject_of(), Stream(tau="2", past=3, look_ahead=1, timed=0)
    units = list(probe.plan(subject).units())
    together = list(probe.sweep(subject, units))
    for unit in (units[9], units[2], units[13]):
        alone = probe.measure(subject, unit)
        for name, value in alone.items():
            np.testing.assert_array_equal(value, together[unit.index[0]][name])


def test_mc_dropout_averages_its_members_and_one_pass_per_frame_draws_a_mask_for_each() -> None:
    subject, (_, targets) = subject_of(0.4, mc_dropout=3, batch_size=FRAMES), video()
    found = stream(subject, tau="2", past=2)
    assert found.method_name.values.tolist() == ["deterministic", "temporal", "mc_dropout", "mc_dropout_temporal"]
    assert (found.tau.values.tolist(), found.passes.values.tolist()) == ([0, 2, 0, 2], [1, 1, 3, 1])
    inputs, _ = subject.batch(0)
    with torch.no_grad():
        mean, plain = subject.outputs(inputs), as_is(subject).outputs(as_is(subject).batch(0)[0])
        with subject.member(0):
            one = subject.outputs(inputs)
    for i, logits in enumerate((plain, plain, mean, one)):
        p = logits.softmax(dim=1)
        logs = (by_hand(p, 2, 2, 0) if i % 2 else p).log()
        assert found.nll[i].item() == pytest.approx(summary(sample_scores(logs, targets))["nll"])
    smoothed = found.nll[1::2].values - found.nll[::2].values
    np.testing.assert_allclose(found.nll_change, [0, smoothed[0], 0, smoothed[1]], atol=1e-12)


def network(seed: int, classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, classes)).double().eval()


@pytest.mark.parametrize("batch_size", [4, FRAMES])
def test_of_several_networks_each_predicts_its_frames_in_turn(batch_size: int) -> None:
    """Also over the ends of mini-batches, whose 4 frames are no multiple of 3 networks."""
    (x, targets), nets = video(), [network(seed) for seed in (1, 2, 3)]
    subject = load(nets[0], data=(x, targets), ordered=True, batch_size=batch_size)
    found = stream(subject, tau="1.5", past=3, members=(nets[1], nets[2]))
    assert found.method_name.values.tolist() == ["deterministic", "temporal", "ensemble", "ensemble_temporal"]
    assert found.passes.values.tolist() == [1, 1, 3, 1]
    with torch.no_grad():
        p = torch.stack([net(x).softmax(dim=1) for net in nets])
    turn = torch.stack([p[t % 3, t] for t in range(FRAMES)])
    for i, expected in enumerate((p[0], by_hand(p[0], 1.5, 3, 0), p.mean(dim=0), by_hand(turn, 1.5, 3, 0))):
        nll = -expected[torch.arange(FRAMES), targets].log()
        np.testing.assert_allclose(found["frame_nll"][:, i], nll, rtol=1e-9)
    alone = stream(subject, tau="1.5", past=3)
    np.testing.assert_array_equal(found["frame_nll"][:, :2], alone["frame_nll"])
    assert [text.get_text() for text in page([found], looks([found])).legends[0].texts]
    timed = stream(subject, tau="1.5", past=3, members=(nets[1], nets[2]), timed=3)
    assert (timed.throughput > 0).all()


def test_networks_in_turn_are_of_the_same_classes_and_without_masks() -> None:
    with pytest.raises(ValueError, match=r"predicts 7 classes and .* 5, expected networks of the same classes"):
        stream(load(network(1), data=video(), ordered=True, batch_size=4), members=(network(2, 7),), timed=1)
    with pytest.raises(OptionError, match="takes one network per frame, --mc-dropout 2 one mask; drop one"):
        stream(subject_of(0.4, mc_dropout=2), members=(network(2),))


def test_the_legend_names_the_line_style_that_is_drawn_also_for_other_numbers_of_passes() -> None:
    results = [stream(subject_of(0.3, mc_dropout=passes, label=str(passes)), tau="1,2") for passes in (4, 2)]
    figure = page(results, looks(results))
    legend = {entry.get_label(): entry.get_linestyle() for entry in figure.legends[0].legend_handles}
    drawn = [line.get_linestyle() for line in figure.axes[0].lines if line.get_marker() != "None"]
    one, masks = "one pass, smoothed; thin: one pass", "one dropout mask, smoothed; thin: MC dropout, 4 or 2 passes"
    caption = " ".join(figure.texts[0].get_text().split())
    assert f"Solid: {one}. Dashed: {masks}. Bands" in caption
    assert legend["4"] == legend["2"] == "None"  # markers and colours are of networks
    assert drawn == 2 * [legend[one], legend[masks]]


def test_intervals_resample_blocks_of_frames() -> None:
    subject, (inputs, targets) = subject_of(), video()
    found = stream(subject, tau="2", block_length=3)
    scores = sample_scores(subject.model(inputs).detach().log_softmax(dim=1), targets)
    blocks = np.add.reduceat(sums(scores), np.arange(0, FRAMES, 3))
    resampled = Resampled.of(blocks, DRAWS, 0)
    for name in ("nll", "accuracy", "brier"):
        wanted = resampled.interval(name)
        assert found[f"{name}_low"][0].item() == pytest.approx(wanted.low, rel=1e-6)
        assert found[f"{name}_high"][0].item() == pytest.approx(wanted.high, rel=1e-6)
    assert found.nll_change[1].item() == pytest.approx((found.nll[1] - found.nll[0]).item())
    assert (found.nll_change_low[0], found.nll_change_high[0]) == (0.0, 0.0)
    assert found.attrs["blocks"] == 5


def test_the_ring_buffer_gives_the_same_mean_as_the_window() -> None:
    p = torch.rand(11, 1, CLASSES, 2, 3, dtype=torch.float64).softmax(dim=2)
    past, ahead, tau = 3, 2, 1.5
    ring = RingBuffer(tau, past, ahead)
    for t in range(len(p)):
        mean, centre = ring.push(p[t]), t - ahead
        if centre >= past:
            offsets = torch.arange(-past, ahead + 1)
            wanted = smoothed(p[centre - past : t + 1].log(), frame_weights(offsets, tau)).exp()
            torch.testing.assert_close(mean, wanted)


def test_what_has_no_probability_or_no_label_stays_finite_or_missing() -> None:
    logs = torch.tensor([[0.0, -torch.inf], [-1.0, math.log(1 - math.exp(-1))]]).double()
    mean = smoothed(logs, frame_weights(torch.tensor([-1, 0]), 1.0))
    assert mean.exp().sum().item() == pytest.approx(1.0)
    assert mean.isfinite().all()
    logs = torch.randn(4, 3, 3).double().log_softmax(dim=0)
    empty = torch.full((3, 3), -1)
    no = torch.zeros(1, 3, 3, dtype=torch.bool)
    found = frame_scores(logs[None], empty[None], before=logs[None], boundary=no)
    assert math.isnan(found["frame_nll"][0])
    assert found["union"].sum() == 0
    assert found["frame_consistency"] == 1.0


def test_pixels_near_a_boundary_are_those_within_the_distance_of_another_class() -> None:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(2, (3, 4), generator=generator).repeat_interleave(4, 0).repeat_interleave(4, 1)
    targets[2:4, 3:9] = -1
    for distance in (1, 2):
        wanted = torch.zeros(targets.shape, dtype=torch.bool)
        for y in range(12):
            for x in range(16):
                near = targets[max(y - distance, 0) : y + distance + 1, max(x - distance, 0) : x + distance + 1]
                wanted[y, x] = targets[y, x] >= 0 and bool((near[near >= 0] != targets[y, x]).any())
        assert torch.equal(near_boundary(targets, distance), wanted)


def test_a_stream_of_masks_has_scores_at_boundaries_and_frames_without_a_label() -> None:
    inputs = torch.randn(9, 3, 8, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(4, (9, 2, 2)).repeat_interleave(4, 1).repeat_interleave(5, 2)
    targets[4], targets[0, 0, 0] = 255, 255
    subject = load(segmenter(), data=(inputs, targets), ordered=True, batch_size=4)
    found = stream(subject, tau="2", boundary=1)
    assert len(subject) == 9
    assert math.isnan(found.frame_nll[4, 0])
    assert found.frame_consistency[4, 0] > 0  # which needs no label
    logs = subject.model(inputs)["out"].detach().log_softmax(dim=1)
    marked = targets.masked_fill(targets == 255, -1)
    edge = torch.stack([near_boundary(one, 1) for one in marked])
    own = torch.stack([log.gather(0, y.clamp(min=0)[None])[0] for log, y in zip(logs, marked, strict=True)])
    means = [-own[t][edge[t]].mean().item() for t in range(9) if edge[t].any()]
    assert found.boundary_nll[0].item() == pytest.approx(np.mean(means), rel=1e-5)
    assert 0 < found.mean_iou[0] < 1


def test_the_time_counts_a_pass_and_the_mean_behind_it_over_the_first_frames_each_once() -> None:
    seconds = timing.prediction_time(subject_of(0.3, mc_dropout=4), (), tau=1.0, past=5, look_ahead=0, frames=9)
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys([*WORDS][:4], 9)
    assert all(one < both for one, both in zip(seconds["deterministic"], seconds["temporal"], strict=True))
    taken = list(timing.single_inputs(subject_of(), FRAMES + 2))
    torch.testing.assert_close(torch.cat(taken[:FRAMES]), video()[0])
    torch.testing.assert_close(torch.cat(taken[FRAMES:]), video()[0][:2])


def test_the_time_of_a_prediction_is_stored_with_its_interval_and_drawn() -> None:
    found = stream(subject_of(0.3, mc_dropout=3), tau="1", timed=5)
    assert found.throughput.dims == ("method",)
    assert found.throughput[1] < found.throughput[0]
    mean, low, high = (found[f"seconds_per_frame{end}"].values for end in ("", "_low", "_high"))
    assert np.all([low > 0, low <= mean, mean <= high])
    *_, ax = page([found], looks([found])).axes
    ((points, _, _),) = ax.containers
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "one pass", "one pass,\nsmoothed", "MC dropout,\n3 passes", "one dropout mask,\nsmoothed",
    ]  # fmt: skip
    np.testing.assert_array_equal(points.get_xdata(), mean)
    relative = {one.name: one.value for one in measured(found)}["throughput mc dropout temporal"]
    assert relative == found.throughput[3] / found.throughput[0]
    assert stream(subject_of(), tau="1").throughput.isnull().all()
    assert timing.facts("t", [2.0, 2.0]) == {"t": 2.0, "t_low": 2.0, "t_high": 2.0}


def test_what_is_no_stream_is_refused() -> None:
    inputs, targets = video()
    model = Counted().double()
    with pytest.raises(ValueError, match="has one frame, and a stream at least two; "):
        stream(load(model, data=(inputs[:1], targets[:1]), ordered=True))
    with pytest.raises(ValueError, match="expected the same number of rows in both"):
        load(model, data=(inputs, targets[:-1]), ordered=True)
    with pytest.raises(ValueError, match="make them equal"):
        load(model, data=[(inputs[0], 1), (inputs[0, :, :1], 0)], ordered=True)
    for options, message in (
        ({"tau": "0"}, "--tau must be numbers above 0"),
        ({"past": 0}, "--past must be at least 1, or --look-ahead 1"),
        ({"clip_length": 1}, "--clip-length must be 0, or at least 2"),
    ):
        with pytest.raises(OptionError, match=message):
            stream(subject_of(), **options)


def test_frames_keep_their_order_and_other_probes_do_not(tmp_path: Path) -> None:
    inputs, targets = video()
    np.savez(tmp_path / "video.npz", frames=inputs.numpy(), labels=targets.numpy())
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom torch import nn\n"
        f"def model(): return nn.Sequential(nn.Flatten(), nn.Linear(12, {CLASSES})).double()\n"
    )
    data, name = str(tmp_path / "video.npz"), f"{tmp_path}/mine.py:model"
    ordered, balanced = (load(model=name, data=data, ordered=o) for o in (True, False))
    assert torch.equal(ordered.batch(0)[1], targets)
    assert not torch.equal(balanced.batch(0)[1], targets)
    out = tmp_path / "r.h5"
    assert exit_code(["stream", "--model", name, "--data", data, "--out", str(out), "--timed", "0", "--quiet"]) == 0
