"""What a study of a file trains, measures, draws and says, of made-up results and of killed processes."""

import contextlib
import json
import math
import multiprocessing
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import h5py
import numpy as np
import pytest
import torch
import xarray as xr
from test_study_file import FILE, written

from landscape.api import names_of_results
from landscape.cli.main import exit_code
from landscape.cli.study import carry_out, workers_of
from landscape.plots import drawing
from landscape.plots.figures import correlations
from landscape.probe import NotApplicable
from landscape.statistics.rounding import interval
from landscape.statistics.seed_groups import mean_interval
from landscape.studies.conduct import Progress, conduct, steps_of
from landscape.studies.steps import pool
from landscape.studies.study_file import study_of
from landscape.training.train import Diverged


def made(name: str, seed: int, samples: str = "s") -> xr.Dataset:
    trace = math.exp(seed + (0.5 + 0.01 * seed) * (name == "a"))
    return xr.Dataset({"trace": trace}, attrs={"data_sha256": samples})


def test_a_study_of_files_pairs_seeds_keeps_what_is_done_and_refuses_other_data(tmp_path: Path) -> None:
    study = study_of(written(tmp_path), names_of_results)
    samples, asked = "s", list[str]()

    def measure(probe: str, file: Path, *, label: str, **options: Any) -> xr.Dataset:
        asked.append(f"{probe} {label}")
        return made(file.name[0], int(file.stem[-1]), samples)

    out = tmp_path / "out"
    how: Any = {"train": None, "measure": measure, "quiet": True}
    text, wrong, *_ = conduct(study, out, **how)
    assert wrong == []
    assert asked[:3] == ["trace a-s0", "trace b-s0", "calibration a-s0"]
    row = next(line for line in text.splitlines() if line.startswith("| sharpness |"))
    assert "+0.515 [" in row
    assert row.endswith("| **real** |")  # the spread over seeds, which is wider, is paired away
    assert "1, 1.02, 1.04, 1.06 | **holds** |" in text
    assert (out / "study.md").read_text() == text
    assert Progress.of(study, out).seconds.keys() == set(steps_of(study, study.claims))
    assert conduct(study, out, **how) == (text, [], [], [])
    with pytest.raises(ValueError, match="holds the study 'a against b', not 'another'"):
        conduct(study_of(written(tmp_path, ("a against b", "another")), names_of_results), out, **how)
    samples = "t"
    with pytest.raises(ValueError, match="the data changed since a-s0 trace was measured"):
        conduct(study, out, **how)

    def refuse(*_: Any, **__: Any) -> xr.Dataset:
        raise ValueError("--batch-size must be less; see landscape trace --help, or give another --out")

    said = r"^\[measure.trace\] of a-s0: batch_size must be less; see landscape trace --help, or give another --out$"
    with pytest.raises(ValueError, match=said):
        conduct(study, tmp_path / "refused", **{**how, "measure": refuse})


def test_what_a_file_says_otherwise_by_now_is_not_done_and_measured_anew(tmp_path: Path) -> None:
    def measure(probe: str, file: Path, *, samples: int = 9, **_: Any) -> xr.Dataset:
        return made(file.name[0], int(file.stem[-1]), str(samples))

    out, how = tmp_path / "out", {"train": None, "measure": measure, "quiet": True}
    conduct(study_of(written(tmp_path), names_of_results), out, **how)  # type: ignore[arg-type]
    edited = study_of(written(tmp_path, ("[measure.mine]", "[measure.mine]\nsamples = 4")), names_of_results)
    steps = steps_of(edited, edited.claims)
    before = Progress.of(edited, out)
    assert {step for step in steps if before.state(step) != "done"} == {step for step in steps if "mine" in step}
    assert "8 of 16 steps done, 8 left; the file has changed for a-s0 mine, b-s0 mine" in before.in_words(steps)
    conduct(edited, out, **how)  # type: ignore[arg-type]
    assert Progress.of(edited, out).in_words(steps) == "16 of 16 steps done, 0 left"


def test_pairs_that_all_differ_by_the_same_have_no_spread_and_are_not_missing(tmp_path: Path) -> None:
    def measure(probe: str, file: Path, **_: Any) -> xr.Dataset:
        return made(file.name[0], 0)

    how: Any = {"train": None, "measure": measure, "quiet": True}
    text, *_ = conduct(study_of(written(tmp_path), names_of_results), tmp_path / "out", **how)
    assert "| sharpness | +0.5 |  | **no spread over seeds** |" in text


def test_checkpoints_of_the_command_are_networks_measured_over_values_and_otherwise_where_one_does_not_apply(
    tmp_path: Path,
) -> None:
    content: Any = {
        "load": {"samples": 8, "model_arg": {"width": 4}},
        "networks": {"plain": {"given": True}, "smooth": {"given": True, "load": {"smooth": True}}},
        "measure": {
            "trace": {"over": {"mc_dropout": [0, 5]}, "otherwise": {"vectors": 4, "model_arg": {"depth": 1}}},
            "masks": {"probe": "density", "mc_dropout": 5},
        },
    }  # fmt: skip
    study = study_of(content, names_of_results, given=[Path("a.pt"), Path("b.pt")], changes={"load": {"samples": 4}})
    asked: list[dict[str, Any]] = []

    def measure(probe: str, file: Path, **options: Any) -> xr.Dataset:
        if options["mc_dropout"] == 5 and "vectors" not in options:
            raise NotApplicable(f"{options['samples']} samples have no dropout")
        asked.append({"probe": probe, "file": file.name, **options})
        return xr.Dataset()

    conduct(study, tmp_path, train=None, measure=measure, quiet=True)  # type: ignore[arg-type]
    assert list(study.networks) == ["a plain", "a smooth", "b plain", "b smooth"]
    assert list(study.measurements) == ["trace 0", "trace 5", "masks"]
    assert [(one["file"], one["label"], one["mc_dropout"], "smooth" in one) for one in asked] == [
        (f"{name}.pt", name, masks, smooth) for masks in (0, 5) for name in "ab" for smooth in (False, True)
    ]
    assert [one["model_arg"] for one in asked[3:5]] == [{"width": 4}, {"width": 4, "depth": 1}]
    assert {one["samples"] for one in asked} == {4}
    assert set(Progress.of(study, tmp_path).left_out) == {f"{name}-s0 masks" for name in study.networks}
    content["measure"] = {"masks": {"probe": "density", "mc_dropout": 5, "otherwise": {"samples": 2}}}
    study = study_of(content, names_of_results, given=[Path("a.pt")])
    with pytest.raises(ValueError, match=r"nothing to measure: 8 samples have no .*\notherwise: 2 samples have no"):
        conduct(study, tmp_path / "b", train=None, measure=measure, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it names its networks, got 1 checkpoints"):
        study_of({**content, "networks": {"a": {"model": "vit_demo"}}}, names_of_results, given=[Path("a.pt")])


def test_correlations_are_over_networks_with_their_seeds_kept_together(tmp_path: Path) -> None:
    """Two kinds of networks, within which the numbers fall together and between which they rise."""
    tables = "".join(f"[networks.n{i}]\nfiles = 'n{i}-*.pt'\ngroup = '{'ab'[i // 6]}'\n" for i in range(12))
    text = f"""title = "many"\n{tables}[measure.trace]\n[measure.calibration]
[numbers]\nsharpness = "trace.trace"\naccuracy = "calibration.accuracy"
[[correlations]]\nx = "sharpness"\ny = ["accuracy"]\n"""
    for i in range(12):
        for seed in range(2):
            (tmp_path / f"n{i}-{seed}.pt").touch()

    def measure(probe: str, file: Path, **_: Any) -> xr.Dataset:
        network, seed = (int(part) for part in file.stem[1:].split("-"))
        noise = 0.1 * (-1) ** seed
        accuracy = 100 * (network >= 6) - network + noise
        return xr.Dataset({"trace": network + noise} if probe == "trace" else {"accuracy": accuracy})

    study = study_of(written(tmp_path, text=text), names_of_results)
    found = conduct(study, tmp_path / "out", train=None, measure=measure, quiet=True)  # type: ignore[arg-type]
    (one,) = found.correlations
    assert [mean for mean, *_ in one.x] == pytest.approx(range(12))
    assert one.over_all[0] == pytest.approx((36 - 30) / 66)
    assert one.within == (-1, pytest.approx(np.nan, nan_ok=True), pytest.approx(np.nan, nan_ok=True))
    row = next(line for line in found.text.splitlines() if line.startswith("| sharpness and accuracy | 12 |"))
    assert row.endswith("| -1, without an interval |")
    (file,) = drawing.draw_page("correlations", found.correlations, tmp_path)
    assert file.name == "correlations.png"
    page = correlations.page([replace(one, groups=["a", "b"] * 6)] * 3)
    page.draw_without_rendering()
    left, right, _ = (ax.title.get_window_extent() for ax in page.axes)
    assert left.x1 < right.x0


def test_networks_over_values_are_drawn_as_a_diagram_and_measured_together_with_others(tmp_path: Path) -> None:
    content: Any = {
        "data": "digits",
        "train": {"model": "vit_demo", "seeds": 4},
        "networks": {
            "a": {"over": {"lr": [0.1, 0.2], "heads": [2, 4, 8]}},
            "b": {"over": {"depths": [[8, 8], [4]]}, "model": "pit_xs", "seeds": 2},
            "other": {"seeds": [5, 6, 7, 8], "measure": False},
        },
        "measure": {"line": {"with": ["other"]}},
        "numbers": {"loss": "line.loss"},
        "diagrams": [{"number": ["loss"], "over": ["lr", "heads"]}, {"number": "loss", "over": ["depths"]}],
    }
    trained, asked = list[str](), list[tuple[str, str]]()

    def train(*_: Any, overrides: Any = None, out: Path, **options: Any) -> None:
        trained.append(out.name)

    def measure(probe: str, file: Path, *, along: str, **_: Any) -> xr.Dataset:
        asked.append((file.parent.name, Path(along).parent.name))
        name, seed = file.parent.name.rsplit("-s", 1)
        loss = math.prod(map(float, name.split("-")[1:])) + 0.01 * int(seed)
        return xr.Dataset({"loss": math.nan if name.endswith("-4") else loss})

    study = study_of(content, names_of_results)
    one = study.networks["a-0.2-8"]
    assert (one.overrides["lr"], one.model_args["heads"], one.measured) == (0.2, 8, True)
    assert study.networks["b-8-8"].model_args["depths"] == (8, 8)
    found = conduct(study, tmp_path, train=train, measure=measure, quiet=True)
    assert len(trained) == len(set(trained)) == 4 * 6 + 2 * 2 + 4
    assert trained.index("other-s5") < trained.index("other-s6")
    assert {other for name, other in asked if name.endswith("-s1")} == {"other-s6"}  # the pairs are those of the seeds
    assert "| other |" not in found.text
    assert "| loss of a, lr by heads [95 %] | 0.1 | 0.2 |" in found.text
    by_hand = [mean_interval(0.01 * np.arange(4) + rate * 8) for rate in (0.1, 0.2)]
    assert f"| 8 | {interval(*by_hand[0])} | {interval(*by_hand[1])} |" in found.text
    assert "| 4 | no value | no value |" in found.text
    assert found.diagrams[0].cells[0.2, 8] == pytest.approx(by_hand[1])
    assert "| loss of b, depths [95 %] | 8,8 | 4 |" in found.text
    (file,) = drawing.draw_page("diagrams", found.diagrams, tmp_path)
    assert file.name == "diagrams.png"


@pytest.mark.slow
def test_a_study_of_the_trainers_own_metrics_alone_has_its_diagram(tmp_path: Path) -> None:
    """Of which no probe measures anything, so that there is no results file."""
    (tmp_path / "rates.toml").write_text(
        "data = 'digits'\n[train]\nepochs = 0\nseeds = 1\n"
        "[networks.a]\nmodel = 'resnet_demo'\nover = { lr = [0.1, 0.2] }\n"
        "[measure.metrics]\n[numbers]\nloss = \"metrics['loss']\"\n[[diagrams]]\nnumber = 'loss'\nover = ['lr']\n"
    )
    assert exit_code(["study", "run", str(tmp_path / "rates.toml"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert [file.name for file in (tmp_path / "out" / "figures").iterdir()] == ["diagrams.png"]
    assert not (tmp_path / "out" / "results.h5").exists()


@pytest.mark.slow
def test_steps_that_two_workers_carry_out_at_once_give_the_same_numbers(tmp_path: Path) -> None:
    """Of networks, one of which diverges, with a probe that does not apply."""
    content: Any = {
        "data": "digits", "train": {"model": "resnet_demo", "epochs": 1, "fraction": 0.05, "seeds": 1},
        "networks": {"a": {}, "b": {"lr": 1e30}, "c": {"seeds": [0, 1]}},
        "measure": {"attention": {"samples": 8}, "trace": {"samples": 16, "vectors": 4}},
    }  # fmt: skip
    study, texts = study_of(content, names_of_results), []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        with workers_of(study, workers, device="cpu") as how:
            texts.append(carry_out(study, out, **how, device="cpu", quiet=True).text)
    assert texts[0] == texts[1]
    assert "Diverged: 1 (b-s0)." in texts[0]
    found, expected = (
        {re.sub("[ac]-s0", "either", name): data for name, data in contents(tmp_path / one / "results.h5").items()}
        for one in "21"
    )  # whichever of two equal networks is the first names the result
    assert found == expected
    assert len({name.rpartition("/")[0] for name in expected}) == 2
    states = [json.loads((tmp_path / name / "study.json").read_text()) for name in "12"]
    assert [state["left_out"].keys() for state in states] == [{f"{n} attention" for n in ("a-s0", "c-s0", "c-s1")}] * 2


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_study_in_one_line() -> None:
    with pytest.raises(RuntimeError, match="one of 2 workers died"), pool(2) as each:
        list(each(os._exit, [1, 1]))
    assert not multiprocessing.active_children()


def test_a_number_without_a_value_and_a_training_that_diverges_stay_in_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = FILE.replace('files = "b-*.pt"', 'model = "resnet_demo"\nseeds = 4').replace("ln(trace", "1 / (trace")
    text = text.replace("trace.trace)", "trace.trace - 1)").replace("[networks.a]", "data = 'digits'\n[networks.a]", 1)
    study = study_of(written(tmp_path, text=text), names_of_results)

    def train(*_: Any, seed: int, report: Any, **options: Any) -> None:
        report(1, 2)
        if seed == 3:
            raise Diverged("the loss became nan at epoch 1, step 1")

    def measure(probe: str, file: Path, *, label: str, **_: Any) -> xr.Dataset:
        return xr.Dataset({"trace": np.float64(1.0 + int(label[-1]))})

    shown: list[tuple[float, int]] = []

    class Bar(contextlib.nullcontext[Any]):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(lambda *at: shown.append(at))

    monkeypatch.setattr("landscape.studies.conduct.Bar", Bar)
    text, wrong, *_ = conduct(study, tmp_path / "out", train=train, measure=measure)  # type: ignore[arg-type]
    steps = steps_of(study, ())
    assert (
        capsys.readouterr().err.count("note: a, seed 0 and 1 more: 1 / (trace.trace - 1) has no value") == 1
    )  # after one seed
    assert shown == sorted(shown)  # one bar over epochs and units of the whole study
    assert (shown[0], shown[-1]) == ((0.5, len(steps)), (len(steps) - 1, len(steps)))  # less the last one, of b-s3
    progress = Progress.of(study, tmp_path / "out")
    states = {step: progress.state(step) for step in steps}
    assert [step for step, state in states.items() if state == "diverged"] == [
        s for s in steps if s.startswith("b-s3 ")
    ]
    assert set(states.values()) == {"done", "diverged"}
    assert "Diverged: 1 (b-s3)." in text
    assert wrong[0].startswith("a, seed 0 and 1 more: 1 / (trace.trace - 1) has no value: it divides by zero")
    assert "| sharper |" in text


NET = """import torch
def net():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.Dropout(0.2),
                               torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 4)).eval()
def data():
    return torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4
"""
KILLS = int(os.environ.get("MOMENTS", "6"))
PROBES = """
trace = { vectors = 8 }
hessian = { batches = 2, top = 1 }
surface = { resolution = "3" }
line = { resolution = 3 }
masks = { probe = "calibration", draws = 20, mc_dropout = 2 }
calibration = { draws = 20 }
variance = {}
noise = {}
"""


def contents(file: Path) -> dict[str, bytes]:
    """Every array of a results file, byte for byte, by its name."""
    found: dict[str, bytes] = {}

    def read(name: str, one: Any) -> None:
        if isinstance(one, h5py.Dataset):
            found[name] = repr(one[()].tolist()).encode() if one.dtype.kind == "O" else one[()].tobytes()

    with h5py.File(file) as stored:
        stored.visititems(read)
    return found


@pytest.mark.campaign
def test_a_study_of_twelve_networks_that_is_killed_at_random_moments_ends_with_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    names: dict[str, Any] = {}
    exec(NET, names)
    for i in range(12):
        torch.manual_seed(i)
        torch.save(names["net"]().state_dict(), tmp_path / f"n{i}.pt")
    networks = "".join(f"n{i} = {{ files = 'n{i}.pt' }}\n" for i in range(12))
    load = "load = { model = 'net.py:net', batch_size = 16 }"
    text = f"title = 'twelve'\ndata = 'net.py:data'\n{load}\n[networks]\n{networks}[measure]{PROBES}"
    assert len(text.splitlines()) <= 40
    (tmp_path / "study.toml").write_text(text)
    command = ["-c", "import sys, landscape; landscape.study('study.toml', out=sys.argv[1], quiet=True)"]
    with forked.Popen([*command, "whole"], cwd=tmp_path) as whole:
        assert whole.wait(1200) == 0
    random, kills = np.random.default_rng(0), 0

    def size() -> int:
        return sum(file.stat().st_size for file in (tmp_path / "killed").glob("*") if file.exists())

    while kills < KILLS:
        with forked.Popen([*command, "killed"], cwd=tmp_path) as process:
            before = size()
            forked.wait_until(lambda: size() > before or process.poll() is not None, pause=0.001)  # noqa: B023
            time.sleep(random.uniform(0, 0.2))
            if process.poll() is not None:
                break
            kills += 1
    with forked.Popen([*command, "killed"], cwd=tmp_path) as process:
        assert process.wait(1200) == 0
    assert kills == KILLS
    found, expected = (contents(tmp_path / folder / "results.h5") for folder in ("killed", "whole"))
    assert len({name.rpartition("/")[0] for name in expected}) == 12 * 8
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    assert (tmp_path / "killed" / "study.md").read_text() == (tmp_path / "whole" / "study.md").read_text()
