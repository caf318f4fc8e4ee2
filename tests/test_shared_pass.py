"""Several probes from one forward pass: each result equals that of its probe alone, also after interruptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from analytic import same_state, state
from measured_runs import assert_same, save, stop_after
from torch import nn

import landscape
from landscape import models
from landscape.api import configure_shared_pass, features
from landscape.cli.main import exit_code
from landscape.layers import forward_hooks
from landscape.layers.forward_hooks import SMALL_MEAN, MapPart, map_parts, run_with_hooks
from landscape.options import OptionError
from landscape.probes import FEATURES, probe_class
from landscape.probes.fourier import Fourier
from landscape.probes.geometry import Geometry
from landscape.probes.variance import Variance
from landscape.results import group as groups
from landscape.results.run_key import Arrays, Outcome
from landscape.running.executor import Executor
from landscape.running.run import run
from landscape.running.shared_pass import SharedPassProbe, applicable, run_shared_pass
from landscape.subject.loading import load as loading
from landscape.subject.loading.checks import refuse_stochastic
from landscape.subject.loading.sanity_check import mini_batch_effect
from landscape.subject.subject import Subject

DIAGONAL = {"spectrum": "diagonal"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    arguments = {"classes": 10, "image_size": 16, "depth": 2}
    weights = models.build("vit_demo", **arguments).state_dict()
    path = tmp_path_factory.mktemp("vit") / "final.pt"
    return save(path, seed=0, model="vit_demo", model_args=arguments, state_dict=weights)


def probes(**options: Any) -> list[SharedPassProbe]:
    return configure_shared_pass([probe_class(name) for name in FEATURES], "", {"spectra_images": 1, **options})[0]


def loaded(path: Path, **options: Any) -> Subject:
    return loading.load(path, **{"data": "digits", "samples": 32, "batch_size": 8, **options})


def results(path: Path, outcomes: list[Outcome]) -> list[Arrays]:
    return [groups.read_group(path, outcome.group) for outcome in outcomes]


@pytest.fixture(scope="module")
def alone(vit: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Arrays]:
    path = tmp_path_factory.mktemp("alone") / "results.h5"
    return results(path, [run(probe, loaded(vit), path) for probe in probes()])


def assert_all_same(found: list[Arrays], wanted: list[Arrays]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


@pytest.mark.slow
def test_every_result_equals_that_of_its_probe_alone(vit: Path, alone: list[Arrays], tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    assert_all_same(results(path, run_shared_pass(probes(), loaded(vit), path)), alone)


@pytest.mark.slow
def test_a_mini_batch_passes_once_for_all_probes(vit: Path, tmp_path: Path) -> None:
    subject, passes = loaded(vit), []
    refuse_stochastic(subject)  # takes a pass, and so do finding the layers and other samples beside the first
    mini_batch_effect(subject)
    for probe in probes():
        probe.plan(subject)
    handle = subject.model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    run_shared_pass(probes(), subject, tmp_path / "results.h5")
    handle.remove()
    assert passes == [8, 8, 8, 8]


@pytest.mark.slow
def test_processes_equal_in_line(
    vit: Path, alone: list[Arrays], tmp_path: Path, executors: Mapping[str, Executor]
) -> None:
    path = tmp_path / "results.h5"
    outcomes = run_shared_pass(probes(), loaded(vit), path, executor=executors["processes"])
    assert_all_same(results(path, outcomes), alone)


@pytest.mark.slow
def test_stopped_and_resumed_equals_uninterrupted(vit: Path, alone: list[Arrays], tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    with pytest.raises(KeyboardInterrupt):
        run_shared_pass(probes(), loaded(vit), path, report=stop_after(1))
    outcomes = run_shared_pass(probes(), loaded(vit), path)
    assert [outcome.measured for outcome in outcomes] == [3, 3, 3, 3, 3]
    assert_all_same(results(path, outcomes), alone)
    assert [outcome.measured for outcome in run_shared_pass(probes(), loaded(vit), path)] == [0, 0, 0, 0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["results.h5"]


@pytest.mark.slow
def test_mini_batches_measured_alone_are_not_measured_again(vit: Path, alone: list[Arrays], tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    first, second = probes()[:2]
    run(first, loaded(vit), path)
    with pytest.raises(KeyboardInterrupt):
        run(second, loaded(vit), path, report=stop_after(3))
    outcomes = run_shared_pass(probes(), loaded(vit), path)
    assert [outcome.measured for outcome in outcomes] == [0, 1, 4, 4, 4]
    assert_all_same(results(path, outcomes), alone)
    again = run_shared_pass(probes(), loaded(vit), path, overwrite=True)
    assert [outcome.measured for outcome in again] == [4, 4, 4, 4, 4]


@pytest.mark.slow
def test_a_half_finished_result_keeps_its_batch_size_and_the_others_theirs(vit: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    with pytest.raises(KeyboardInterrupt):
        run(probes()[1], loaded(vit, batch_size=4), path, report=stop_after(1))
    outcomes = run_shared_pass(probes(), loaded(vit), path)
    assert [(outcome.units, outcome.measured) for outcome in outcomes] == [(4, 4), (8, 7), (4, 4), (4, 4), (4, 4)]


def test_probes_that_do_not_apply_are_left_out_with_their_reason(tmp_path: Path) -> None:
    subject = loaded(save(tmp_path / "resnet.pt", seed=0))
    fit, refused = applicable(probes(), subject)
    assert [probe.name for probe in fit] == ["fourier", "variance", "similarity", "geometry"]
    assert "no self-attention was found" in refused["attention"]
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10)).eval()
    fit, refused = applicable(probes(layers=("1",)), Subject(flat, subject.batches))
    assert [probe.name for probe in fit] == ["similarity", "geometry"]
    assert "needs a vision network" in refused["fourier"]


def test_layers_that_do_not_exist_are_an_error(vit: Path) -> None:
    with pytest.raises(ValueError, match="similar names"):
        applicable(probes(layers=("blokcs",)), loaded(vit))
    with pytest.raises(OptionError, match="regular expression"):
        applicable(probes(layers=("(",)), loaded(vit))


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_restores_the_model(vit: Path, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = loaded(vit)
    kept = state(subject.model)
    hooks = [probe.hooks(subject, (0,)) for probe in probes()]
    if fails:
        monkeypatch.setattr("landscape.layers.attention_statistics.token_cosine", lambda tokens: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            run_with_hooks(subject, (0,), hooks)
    else:
        run_with_hooks(subject, (0,), hooks)
    assert same_state(subject.model, kept)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.model.modules())
    assert torch.overrides._len_torch_function_stack() == 0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_probe_that_fails_loses_itself_alone(
    vit: Path, alone: list[Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("landscape.layers.attention_statistics.token_cosine", lambda tokens: 1 // 0)
    path, said = tmp_path / "results.h5", "ZeroDivisionError: integer division or modulo by zero"
    outcomes = run_shared_pass(probes(), loaded(vit), path)
    others = [i for i, name in enumerate(FEATURES) if name != "attention"]
    assert [outcome.failed for outcome in outcomes] == [said if name == "attention" else "" for name in FEATURES]
    assert_all_same(results(path, [outcomes[i] for i in others]), [alone[i] for i in others])
    with pytest.raises(ZeroDivisionError):
        run_shared_pass(probes()[FEATURES.index("attention") :][:1], loaded(vit), path)
    data = ["--data", "digits", "--samples", "16", "--batch-size", "8", "--out", str(tmp_path / "other.h5")]
    assert exit_code(["features", str(vit), *data]) == 1
    printed = capsys.readouterr()
    assert "failed alone, the others are measured: attention" in printed.err
    assert said in printed.err
    assert all(f"{FEATURES[i]} " in printed.out + printed.err for i in others)


@pytest.mark.slow
def test_from_python(vit: Path, tmp_path: Path) -> None:
    subject, path = loaded(vit), tmp_path / "results.h5"
    found = features(subject, out=path, spectra_images=2)
    assert list(found) == list(FEATURES)
    one = landscape.measure("attention", subject, out=path, spectra_images=2)
    assert one.attrs["created"] == found["attention"].attrs["created"]
    few = features(vit, probes=("variance",), out=path, data="digits", samples=16)
    assert few["variance"].sizes["batch"] == 1
    with pytest.raises(OptionError, match="has no option colour"):
        features(subject, out=path, colour="red")
    with pytest.raises(OptionError, match="got hessian, which cannot share"):
        features(subject, probes=("hessian",), out=path)
    with pytest.raises(OptionError, match="must be given to landscape"):
        features(subject, out=path, samples=16)


def test_every_probe_takes_one_transfer_from_the_device_per_mini_batch(
    vit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = loaded(vit)
    seen: list[torch.Size] = []
    cpu = torch.Tensor.cpu

    def count(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", count)
    for probe in probes():
        probe.hooks(subject, (0,))  # the layers are found once, with passes of their own
        seen.clear()
        run_with_hooks(subject, (1,), [probe.hooks(subject, (1,))])
        assert len(seen) == 1, probe.name


def test_probes_share_what_they_need_of_the_maps(vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = loaded(vit)
    made = configure_shared_pass([Fourier, Variance, Geometry], "", DIAGONAL)[0]
    hooks = [probe.hooks(subject, (0,)) for probe in made]
    seen: list[torch.Size] = []

    def count(maps: torch.Tensor) -> Iterator[MapPart]:
        seen.append(maps.shape)
        return map_parts(maps)

    monkeypatch.setattr(forward_hooks, "map_parts", count)
    run_with_hooks(subject, (0,), hooks)
    assert len(seen) == len(hooks[0].layers) == len(hooks[1].layers) > 0
    assert len(hooks[2].layers) >= len(seen)


@pytest.mark.parametrize("mean", [0.0, 3.0, 5.0, 100.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_parts_of_maps_know_the_moments_whatever_the_mean(mean: float, dtype: torch.dtype) -> None:
    maps = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).add(mean).to(dtype)
    maps[0, 0] = 0.0  # of a channel that is never active
    (part,) = map_parts(maps)
    exact = maps.double()
    centred = exact - exact.mean(dim=(2, 3), keepdim=True)
    assert part.level.dtype == part.varying.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(part.level.double(), exact.mean(dim=(2, 3)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(part.spread, centred.square().sum(dim=(2, 3)), rtol=1e-5, atol=1e-12)
    varying = part.varying.double()
    largest = varying.mean(dim=(2, 3)).abs() / centred.square().mean(dim=(2, 3)).sqrt().clamp_min(1e-30)
    assert largest.max() <= SMALL_MEAN
    torch.testing.assert_close(
        varying - varying.mean(dim=(2, 3), keepdim=True), centred, rtol=0, atol=2e-7 * (1 + abs(mean))
    )


def test_parts_share_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_hooks, "PART", 2 * 3 * 64)
    maps = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 100
    found = [(len(part.maps), part.varying.data_ptr(), part.varying.clone()) for part in map_parts(maps)]
    assert [n for n, _, _ in found] == [2, 2, 1]
    assert len({address for _, address, _ in found}) == 1
    torch.testing.assert_close(torch.cat([kept for *_, kept in found]), maps - maps.mean(dim=(2, 3), keepdim=True))
