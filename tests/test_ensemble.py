"""Facts about ensembles: averages by definition, one forward pass per member, uncertainty and diversity."""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import rebatched, run_probe
from torch import Tensor, nn

import landscape
from landscape import models
from landscape.checkpoints.checkpoint import write_checkpoint
from landscape.options import OptionError
from landscape.plots.appearance import looks
from landscape.plots.figures import ensemble as plots
from landscape.predictions import timing
from landscape.predictions.running_sums import RunningSums, orders_of, sizes_of
from landscape.predictions.scores import sample_scores
from landscape.predictions.temperature import TemperatureFit, in_fit
from landscape.probes import ensemble
from landscape.probes.ensemble import Ensemble
from landscape.statistics.calibration import METRICS, summary
from landscape.subject import batchnorm
from landscape.subject.loading.identity import asked
from landscape.subject.losses import bce
from landscape.subject.mc_dropout import with_members
from landscape.subject.other_samples import on_split
from landscape.subject.subject import Origin, Subject


class Net(nn.Module):
    """A classifier of vectors, with dropout, that counts its passes over more than two samples."""

    def __init__(self, seed: int, classes: int = 4, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.drop, self.head = nn.Linear(6, 16), nn.Dropout(rate), nn.Linear(16, classes)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += len(x) > 2
        return self.head(self.drop(self.first(x).tanh()))


def networks(count: int, **options: float) -> list[Net]:
    return [Net(seed, **options).double().eval() for seed in range(count)]  # type: ignore[arg-type]


def subject_of(members: list[Net], *, samples: int = 50, size: int = 20) -> Subject:
    """A subject of the first network, with the other members by number."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (samples,), generator=generator)
    others = {str(i): member for i, member in enumerate(members) if i}
    return Subject(members[0], rebatched([(x, y)], size), origin=Origin(others=others), label="0")


def probe_of(count: int, **options: int) -> Ensemble:
    return Ensemble(members=",".join(map(str, range(1, count))), **{"draws": 20, "orders": 3, **options})  # type: ignore[arg-type]


def logits_of(members: list[Net], subject: Subject) -> list[Tensor]:
    x = torch.cat([inputs for inputs, _ in subject.batches])  # type: ignore[misc]
    with torch.no_grad():
        return [member(x) for member in members]


@pytest.mark.slow
def test_every_size_and_order_is_the_mean_of_probabilities() -> None:
    members = networks(4)
    subject = subject_of(members)
    found = run_probe(probe_of(4), subject)
    assert found["size"].tolist() == [1, 2, 3, 4]
    probabilities = torch.stack([z.softmax(1) for z in logits_of(members, subject)])
    targets = torch.cat([y for _, y in subject.batches])  # type: ignore[misc]
    orders = orders_of(4, 3, 0)
    assert orders.tolist() == [list(order) for order in itertools.permutations(range(4))]
    for k, size in enumerate([1, 2, 3, 4]):
        rows = [summary(sample_scores(probabilities[order[:size]].mean(0).log(), targets)) for order in orders]
        for name in METRICS:
            values = [row[name] for row in rows]
            assert found[name][k] == pytest.approx(np.mean(values), rel=1e-10, nan_ok=True)
            assert found[f"{name}_spread"][k] == pytest.approx(np.std(values, ddof=1), abs=1e-12, nan_ok=True)
    alone = [summary(sample_scores(p.log(), targets)) for p in probabilities]
    assert found["member_nll"] == pytest.approx([row["nll"] for row in alone])
    assert (found["nll_low"] <= found["nll"]).all()
    assert (found["nll"] <= found["nll_high"]).all()
    assert found["bin_count"].sum(axis=1).tolist() == [50] * 4


@pytest.mark.slow
def test_intervals_of_shares_end_at_one() -> None:
    """Also after they are moved from those of the first order to the mean over orders."""
    generator = torch.Generator().manual_seed(5)
    inputs, classes = torch.randn(60, 3, generator=generator), torch.randint(3, (60,), generator=generator)
    inputs += 4 * nn.functional.one_hot(classes, 3)
    ends = []
    for _ in range(3):
        members = [nn.Linear(3, 3, bias=False) for _ in range(3)]
        for member in members:
            nn.init.normal_(member.weight, generator=generator)
            member.weight.data += 2 * torch.eye(3)
        subject = landscape.load(members[0], data=(inputs, classes))
        found = landscape.measure("ensemble", subject, members=members[1:], out=None, quiet=True, draws=100)
        ends += [
            found[f"{name}_high"].max().item() for name in ("accuracy", "top5", "accuracy_90", "ece", "frequency_90")
        ]
    assert max(ends) == 1


def test_uncertainty_and_diversity_by_definition() -> None:
    members = networks(3)
    subject = subject_of(members)
    found = run_probe(probe_of(3), subject)
    p = torch.stack([z.softmax(1) for z in logits_of(members, subject)])
    entropy = -(p * p.log()).sum(2)
    mean = p.mean(0)
    predictive = -(mean * mean.log()).sum(1)
    assert found["predictive_entropy"][-1] == pytest.approx(predictive.mean().item())
    assert found["aleatoric_entropy"] == pytest.approx([entropy[:k].mean().item() for k in (1, 2, 3)])
    assert found["epistemic_entropy"][0] == pytest.approx(0.0, abs=1e-12)
    epistemic = predictive - entropy.mean(0)
    assert found["epistemic_entropy_se"][-1] == pytest.approx(epistemic.std().item() / math.sqrt(50))
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    divergence = torch.stack([(p[i] * (p[i] / p[j]).log()).sum(1) for i, j in pairs]).mean(0)
    assert found["mean_divergence"] == pytest.approx(divergence.mean().item())
    assert found["mean_divergence_se"] == pytest.approx(divergence.std().item() / math.sqrt(50))
    classes = p.argmax(2)
    for i, j in pairs:
        assert found["disagreement"][i, j] == pytest.approx((classes[i] != classes[j]).double().mean().item())
    assert np.diag(found["disagreement"]).tolist() == [0, 0, 0]
    assert found["mean_disagreement"] == pytest.approx(np.mean([found["disagreement"][i, j] for i, j in pairs]))


def test_the_cka_of_members_is_that_of_the_classifiers_inputs() -> None:
    members = networks(2)
    twin = copy.deepcopy(members[0])
    with torch.no_grad():
        twin.head.weight.mul_(-3.0)  # another classifier of the same features
    found = run_probe(probe_of(3), subject_of([*members, twin]))
    assert found["cka"][0, 2] == pytest.approx(1.0)
    assert found["cka"][0, 1] < 0.95
    assert found["mean_cka"] == pytest.approx((2 * found["cka"][0, 1] + 1 * found["cka"][0, 2]) / 3)


@pytest.mark.slow
def test_fifty_members_cost_fifty_forward_passes() -> None:
    members = networks(50)
    subject = subject_of(members, size=50)
    found = run_probe(probe_of(50, orders=10), subject)
    assert found["size"].tolist() == [1, 2, 3, 5, 10, 20, 50]
    assert [member.passes for member in members] == [1] * 50


@pytest.mark.slow
def test_the_numbers_do_not_depend_on_how_many_mini_batches_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(networks(3))
    wanted = run_probe(probe_of(3), subject)
    monkeypatch.setattr(ensemble, "MEMORY", 1)
    found = run_probe(probe_of(3), subject)
    for name in wanted:
        if name != "facts":
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_the_temperature_of_every_size_is_that_of_its_mean_probabilities() -> None:
    members = networks(3)
    subject = subject_of(members)
    found = run_probe(probe_of(3), subject)
    chosen = np.concatenate([in_fit(subject, 0, i) for i in range(3)])
    targets = torch.cat([y for _, y in subject.batches])  # type: ignore[misc]
    probabilities = torch.stack([z.softmax(1) for z in logits_of(members, subject)])
    for k, size in enumerate([1, 2, 3]):
        mean = probabilities[:size].mean(0).log()
        fit = TemperatureFit()
        fit.add(mean[chosen], targets[chosen])
        temperature = fit.fitted()
        assert found["temperature"][k] == pytest.approx(temperature.value, rel=1e-9)
        held = sample_scores(mean[~chosen], targets[~chosen]).nll.mean()
        scaled = sample_scores(mean[~chosen] / temperature.value, targets[~chosen]).nll.mean()
        assert found["held_nll"][k] == pytest.approx(held, rel=1e-5)
        assert found["scaled_nll"][k] == pytest.approx(scaled, rel=1e-5)


@pytest.mark.slow
def test_masks_of_every_network_are_members() -> None:
    members = networks(2, rate=0.4)
    subject = with_members(subject_of(members), 3)
    found = run_probe(probe_of(2), subject)
    assert found["name"].tolist() == ["0 #1", "0 #2", "0 #3", "1 #1", "1 #2", "1 #3"]
    assert found["size"].tolist() == [1, 2, 3, 5, 6]
    first = Ensemble(draws=20, orders=2)
    alone = run_probe(first, with_members(replace(subject_of(members), origin=Origin()), 3))
    assert alone["nll"][-1] == pytest.approx(
        found["sample_nll"][:, 2].ravel()[~np.isnan(found["sample_nll"][:, 2].ravel())].mean()
    )
    assert len(set(found["member_nll"].tolist())) == 6


def test_averages_keep_what_is_far_below_the_smallest_number() -> None:
    """log (e^-2000 + e^-2010) / 2, where the probabilities themselves are 0 in double precision."""
    sums = RunningSums(orders_of(2, 1, 0), sizes_of(2), torch.tensor([1]))
    for logit in (-2000.0, -2010.0):
        sums.add(torch.tensor([[0.0, logit]], dtype=torch.float64))
    wanted = 2000 + math.log(2) - math.log1p(math.exp(-10))
    assert sums.scores(frozenset({0, 1})).nll == pytest.approx(wanted, rel=1e-12)


def test_probabilities_of_exactly_0_and_1_are_averaged() -> None:
    sums = RunningSums(orders_of(2, 2, 0), sizes_of(2), torch.tensor([0]))
    for logits in ([0.0, -math.inf], [-math.inf, 0.0]):
        sums.add(torch.tensor([logits], dtype=torch.float64))
    assert sums.scores(frozenset({0, 1})).nll == pytest.approx(math.log(2))
    assert sums.member_scores[1].nll == math.inf
    assert sums.predictive_entropy[-1] == pytest.approx(math.log(2))
    assert sums.aleatoric_entropy[-1] == 0.0
    assert sums.divergence() == math.inf


@pytest.mark.parametrize("kind", ["one", "labels", "masks"])
def test_one_logit_several_labels_and_masks_are_averaged_by_row(kind: str) -> None:
    """Against means of sigmoids or softmaxes: of labels all rows count, of masks the labelled ones of every image."""
    generator = torch.Generator().manual_seed(2)
    make = {"one": partial(nn.Linear, 6, 1), "labels": partial(nn.Linear, 6, 3), "masks": partial(nn.Conv2d, 6, 4, 1)}
    members = [make[kind]().double().eval() for _ in range(3)]
    x = 2 * torch.randn((30, 6, 3, 5) if kind == "masks" else (30, 6), generator=generator, dtype=torch.float64)
    with torch.no_grad():
        z = torch.stack([member(x) for member in members])
    if kind == "masks":
        y = torch.randint(-1, 4, (30, 3, 5), generator=generator)
        p, classes = z.softmax(2).flatten(3).movedim(2, 3).numpy(), y.flatten(1).numpy()
        targets, there = y, classes >= 0
    else:
        y = torch.rand(z.shape[1:], generator=generator) < 0.5
        p, classes = torch.stack([1 - z.sigmoid(), z.sigmoid()], -1).numpy(), y.long().numpy()
        targets, there = (y[:, 0] if kind == "one" else y).float(), np.ones_like(classes, bool)
    others = {str(i): member for i, member in enumerate(members) if i}
    subject = Subject(members[0], rebatched([(x, targets)], 12), origin=Origin(others=others), label="0")
    found = run_probe(probe_of(3), subject if kind == "masks" else replace(subject, losses=bce))
    share = there / there.sum(1, keepdims=True) / 30
    mean = p.mean(0)
    own = np.take_along_axis(mean, np.where(there, classes, 0)[..., None], 2)[..., 0]
    entropy = -(mean * np.log(mean)).sum(2)
    assert found["nll"][-1] == pytest.approx(-(share * np.log(own)).sum())
    assert found["accuracy"][-1] == pytest.approx((share * (mean.argmax(2) == classes)).sum())
    assert found["brier"][-1] == pytest.approx((share * ((mean**2).sum(2) - 2 * own + 1)).sum())
    assert found["predictive_entropy"][-1] == pytest.approx((share * entropy).sum())
    assert found["disagreement"][0, 1] == pytest.approx((share * (p[0].argmax(2) != p[1].argmax(2))).sum())
    assert found["nll_se"][-1] == pytest.approx(
        (30 * share * -np.log(own)).sum(1).std(ddof=1) / 30**0.5, rel=0.5
    )  # by 20 resamples


def test_what_is_no_ensemble_is_refused_in_one_line() -> None:
    members = networks(2)
    with pytest.raises(
        ValueError, match=r"at least 2 members, got 1 \(0\); give several checkpoints, --snapshots last:5"
    ):
        Ensemble().plan(subject_of(members))
    other = [members[0], Net(3, classes=7).double().eval()]
    with pytest.raises(ValueError, match="1 predicts 7 classes and 0 4, expected members of the same classes"):
        run_probe(probe_of(2), subject_of(other))
    with pytest.raises(OptionError, match=r"--snapshots must be last:K or spread:K .*, got every:3"):
        Ensemble(snapshots="every:3")
    with pytest.raises(OptionError, match="--swa 8 averages snapshots of a run; give --snapshots last:5 with it"):
        Ensemble(swa=8)
    with pytest.raises(OptionError, match="takes the run of a checkpoint file, got a network in memory"):
        Ensemble(snapshots="last:2").plan(subject_of(members))


def save(path: Path, *, seed: int, epoch: float, **changed: object) -> Path:
    torch.manual_seed(seed)
    arguments = {"classes": 10, "image_size": 16, "blocks": (1, 1), "width": 8}
    weights = models.build("resnet_demo", **arguments).state_dict()
    content = {
        "model": "resnet_demo", "model_args": arguments, "state_dict": weights,
        "data": {"name": "digits"}, "recipe": {}, "epoch": epoch, "metrics": {}, "seed": seed,
    }  # fmt: skip
    write_checkpoint(path, **{**content, **changed})  # type: ignore[arg-type]
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for epoch, name in enumerate(("init", "epoch_001", "epoch_002", "epoch_003", "final")):
        save(tmp_path / f"{name}.pt", seed=epoch, epoch=float(epoch))
    return tmp_path


FEW = {"data": "digits", "samples": 24, "batch_size": 12}


def measured(subject: Subject, **options: Any) -> Any:
    return landscape.measure("ensemble", subject, out=None, quiet=True, draws=20, orders=2, **options)


@pytest.mark.slow
def test_members_are_snapshots_of_the_run_without_the_initial_weights(run: Path) -> None:
    subject = landscape.load(run / "final.pt", **FEW)
    last = measured(subject, snapshots="last:2")
    assert [str(name).rpartition("-")[2] for name in last["name"].values] == ["epoch_003", last["name"].values[1]]
    spread = measured(subject, snapshots="spread:2")
    assert str(spread["name"].values[0]).endswith("epoch_001")
    own = landscape.evaluate(run / "epoch_001.pt", **FEW)
    assert float(spread["member_nll"][0]) == pytest.approx(own["loss"], rel=1e-6)
    with pytest.raises(
        ValueError, match=r"holds 4 snapshots after training began, expected 9; give --snapshots last:4"
    ):
        measured(subject, snapshots="last:9")


def test_one_average_is_no_ensemble_and_the_message_says_what_to_type(run: Path) -> None:
    subject = landscape.load(run / "final.pt", **FEW)
    message = (
        r"--snapshots last:4 --swa 2 averages 4 snapshots into one network \(batch norm from 2 mini-batches\).*"
        "leave --swa out to take the snapshots as members, give several runs"
    )
    with pytest.raises(ValueError, match=message):
        measured(subject, snapshots="last:4", swa=2)


@pytest.mark.slow
def test_an_average_has_the_mean_weights_and_fresh_batch_norm_statistics(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for epoch in (1, 2):
        save(other / f"epoch_00{epoch}.pt", seed=10 + epoch, epoch=float(epoch))
    subject = landscape.load(run / "final.pt", **FEW)
    found = measured(subject, snapshots="last:2", swa=2, members=str(other / "epoch_002.pt"))
    assert [str(name)[:12] for name in found["name"].values] == ["average of 2"] * 2
    states = [torch.load(run / f"{name}.pt", weights_only=True)["state_dict"] for name in ("epoch_003", "final")]
    expected = landscape.load(run / "final.pt", **FEW)
    mean = {k: (v + states[1][k]) / 2 if v.is_floating_point() else v for k, v in states[0].items()}
    expected.model.load_state_dict(mean)
    train = replace(on_split(expected, "train", 24), model=expected.model)
    batchnorm.refresh(train, 2)
    with torch.no_grad():
        parts = [sample_scores(expected.model(x), y).nll for x, y in expected.each_batch()]  # type: ignore[operator, arg-type]
    assert float(found["member_nll"][0]) == pytest.approx(np.concatenate(parts).mean(), rel=1e-5)


@pytest.mark.slow
def test_members_trained_on_other_data_are_refused(run: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other.pt", seed=9, epoch=1.0, data={"name": "cifar10"})
    subject = landscape.load(run / "final.pt", **FEW)
    with pytest.raises(ValueError, match=r"was trained on cifar10 and .* on digits, expected members of one data set"):
        measured(subject, members=str(other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "std"])
def test_members_trained_on_other_inputs_are_refused_and_those_trained_alike_are_not(tmp_path: Path, name: str) -> None:
    made = {"name": "digits", "mean": [0.4] * 3, "std": [0.2] * 3}
    for label, data in (("first", made), ("alike", made), ("other", {**made, name: [0.1] * 3})):
        save(tmp_path / f"{label}.pt", seed=len(label), epoch=1.0, data=data)
    subject = landscape.load(tmp_path / "first.pt", **FEW)
    assert np.isfinite(measured(subject, members=str(tmp_path / "alike.pt"))["nll"]).all()
    said = rf"other was trained with the {name} \[0\.1.* and first with \[0\.[24].*; leave one of them out"
    with pytest.raises(ValueError, match=said):
        measured(subject, members=str(tmp_path / "other.pt"))


@pytest.mark.slow
def test_a_member_with_the_weights_of_another_is_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    twin = run / "twin.pt"
    twin.write_bytes((run / "final.pt").read_bytes())
    members = ",".join(str(run / name) for name in ("epoch_001.pt", "twin.pt"))
    label = landscape.load(run / "final.pt", **FEW).label
    data = measured(landscape.load(run / "final.pt", **FEW), members=members)
    assert [text for text in caplog.messages if "same weights" in text] == [
        f"note: {data['name'].values[2]} has the same weights as {label} and adds nothing to the ensemble"
    ]


@pytest.mark.slow
def test_the_prediction_time_of_all_members_is_stored_and_drawn_if_asked_for() -> None:
    subject = subject_of(networks(3))
    found = measured(subject, members="1,2", timed=4)
    for way in ("one_pass", "all"):
        mean, low, high = (found.attrs[f"seconds_per_image_{way}{end}"] for end in ("", "_low", "_high"))
        assert 0 < low <= mean <= high
    figure = plots.page([found], looks([found]))
    assert [ax.get_ylabel() for ax in figure.axes][-1].replace("\n", " ") == "prediction time (s per image)"
    np.testing.assert_array_equal(figure.axes[-1].containers[0][0].get_xdata(), [1, 3])
    plain = found.drop_attrs().assign_attrs(label="0")
    assert len(plots.page([plain], looks([plain])).axes) == 6
    probes = [asked(probe_of(3, timed=timed), subject) for timed in (0, 9)]
    assert probes[0] == probes[1]  # the time is no part of the run key


def test_every_member_of_an_ensemble_is_timed() -> None:
    members = networks(2, rate=0.5)
    subject = with_members(subject_of(members), 3)
    assert len(timing.per_image(subject, 5)) == 5
    before = members[0].passes
    probe_of(2, timed=2)._times(subject)
    assert members[0].passes == before  # one sample at a time
