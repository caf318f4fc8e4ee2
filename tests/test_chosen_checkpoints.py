"""Which checkpoints a command measures: those in a folder, the path of a run, or the line between two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MINE
from torch import Tensor, nn

import landscape
from landscape import data as datasets
from landscape.cli import measuring
from landscape.cli.main import exit_code
from landscape.results import reader
from landscape.subject.loading import preprocessing

pytestmark = pytest.mark.slow

Command = Callable[..., tuple[int, str]]
FEW = ("--vectors", "4")


def state(seed: int, width: int = 5) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    layers = nn.Flatten(), nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 3)
    return nn.Sequential(*layers).state_dict()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line beside mine.py: (exit code, stderr)."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)

    def run(name: str, *words: str) -> tuple[int, str]:
        code = exit_code([name, *words, "--model", "mine.py:model", "--data", "mine.py:data"])
        return code, capsys.readouterr().err

    return run


def seeds(folder: str, count: int = 3, name: str = "resnet_seed{}.pt") -> list[str]:
    Path(folder).mkdir()
    for seed in range(count):
        torch.save(state(seed), f"{folder}/{name.format(seed)}")
    return [f"{folder}/{name.format(seed)}" for seed in range(count)]


def labels(probe: str) -> list[str]:
    return [data.attrs["label"] for _, data in reader.find("results.h5", probe)]


def test_a_folder_of_independent_checkpoints_is_measured_whole_on_data_that_are_loaded_once(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, reads, kept = seeds("seeds"), [], []  # type: ignore[var-annotated]
    plain, as_usual = datasets.load_batches, measuring.load

    def counted(name: str, **options: Any) -> Any:
        reads.append(f"{name} {options['split']}")
        return plain(name, **options)

    def load(*given: Any, **options: Any) -> Any:
        subject = as_usual(*given, **options)
        kept.append(bool(preprocessing._shared.get()))
        return subject

    monkeypatch.setattr("landscape.data.load_batches", counted)
    monkeypatch.setattr(measuring, "load", load)
    code, err = command("trace", "seeds", *FEW)
    assert code == 0
    assert "seeds: 3 checkpoints, each measured by itself: resnet_seed0.pt, resnet_seed1.pt, resnet_seed2.pt\n" in err
    assert sorted(labels("trace")) == ["resnet_seed0", "resnet_seed1", "resnet_seed2"]
    assert reads == ["mine.py:data train"]
    assert kept == [True] * 3
    assert command("trace", files[0], *FEW, "--overwrite", "--quiet")[0] == 0
    assert len(reads) == 2  # the next command reads them anew
    assert not kept[-1]  # images are kept for further checkpoints alone
    code, err = command("trace", "seeds", *FEW, "--label", "one")
    assert (code, "once per checkpoint (3), got 1" in err) == (2, True)


def test_weights_that_do_not_fit_are_rejected_before_any_sample_is_read(command: Command) -> None:
    torch.save(state(0, width=9), "wide.pt")
    torch.save({f"other.{name}": value for name, value in state(0).items() if "3" in name}, "other.pt")
    with Path("mine.py").open("a") as mine:
        mine.write("\n\nimport pathlib\nmade = data\ndef data(): pathlib.Path('read').touch(); return made()\n")
    for file in ("wide.pt", "other.pt"):
        code, err = command("trace", file, *FEW)
        assert (code, "does not fit the model" in err) == (1, True)
        assert not Path("read").exists()


def test_a_trajectory_of_independent_checkpoints_is_refused_until_they_are_named(command: Command) -> None:
    files = seeds("seeds")
    code, err = command("trajectory", "seeds")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "are not recognisably one run: their names say seed 0, seed 1;" in err
    assert "landscape trajectory seeds/*.pt" in err
    assert command("trajectory", files[2], files[0], files[1], "--quiet")[0] == 0
    ((_, data),) = reader.find("results.h5", "trajectory")
    assert data["name"].values.tolist() == ["resnet_seed2", "resnet_seed0", "resnet_seed1"]


def test_a_trajectory_reads_its_snapshots_with_the_loading_options(command: Command) -> None:
    Path("run").mkdir()
    for epoch in (1, 2, 3):
        content = {"state_dict": state(epoch), "state_dict_ema": state(epoch + 10), "code": pytest.approx}
        torch.save(content, f"run/epoch_{epoch}.pt")
    code, err = command("trajectory", "run", "--weights", "ema")
    assert (code, "--trust-pickle" in err) == (1, True)
    gram = []
    for words in ((), ("--weights", "ema")):
        assert command("trajectory", "run", "--trust-pickle", "--quiet", *words)[0] == 0
    for number, (_, data) in enumerate(reader.find("results.h5", "trajectory")):
        ends = state(1 + 10 * number), state(3 + 10 * number)
        expected = sum(((ends[0][n] - ends[1][n]).double() ** 2).sum().item() for n in ends[0])
        gram.append(data["gram"].values[0, 0])
        assert gram[-1] == pytest.approx(expected)
    assert len(set(gram)) == 2


@pytest.mark.parametrize("words", [("line", "--along"), ("surface", "--resolution", "3", "--plane")])
def test_the_ends_of_a_line_and_a_plane_are_read_with_the_loading_options(command: Command, words: tuple[str]) -> None:
    for seed in (1, 2, 3):
        torch.save({"state_dict": state(seed), "state_dict_ema": state(seed + 10)}, f"{seed}.pt")
        torch.save(state(seed + 10), f"ema{seed}.pt")
    ends = "2.pt" if words[0] == "line" else "2.pt,3.pt"
    plain = ends.replace("2.pt", "ema2.pt").replace("3.pt", "ema3.pt")
    assert command(words[0], "1.pt", *words[1:], ends, "--weights", "ema", "--quiet")[0] == 0
    assert "already measured" in command(words[0], "ema1.pt", *words[1:], plain)[1]  # the same contents, one run key


def test_two_checkpoints_of_one_architecture_are_the_ends_of_a_line(command: Command) -> None:
    for seed in (1, 2, 3):
        torch.save(state(seed), f"{seed}.pt")
    torch.save(state(4, width=6), "wide.pt")
    code, err = command("line", "1.pt", "2.pt", "--resolution", "3")
    assert code == 0
    assert "line: from 1.pt to 2.pt; --along random measures random lines through each instead\n" in err
    ((_, data),) = reader.find("results.h5", "line")
    assert (data.attrs["along"], data.attrs["label"]) == ("checkpoints", "1")
    assert "already measured" in command("line", "1.pt", "--along", "2.pt", "--resolution", "3")[1]
    code, err = command("line", "1.pt", "2.pt", "--resolution", "3", "--label", "SGD, lr=1", "--label", "Adam")
    assert (code, labels("line")) == (0, ["SGD, lr=1 to Adam"])


def test_several_checkpoints_are_the_members_of_one_ensemble(command: Command) -> None:
    files = seeds("runs")
    code, said = command("ensemble", "runs", "--draws", "20")
    assert code == 0
    assert "ensemble: 3 checkpoints are its members" in said
    ((_, data),) = reader.find("results.h5", "ensemble")
    assert [Path(file).stem for file in files] == [str(name).rpartition("-")[2] for name in data["name"].values]
    assert data.attrs["label"].endswith(" + 2")
    code, said = command("ensemble", files[0])
    assert code == 1
    assert "an ensemble has at least 2 members, got 1" in said
    code, said = command("ensemble", files[0], "--members", f"{files[1]},{files[2]}", "--draws", "20")
    assert "already measured" in said  # the same members, however they are named


BETWEEN = "between two of them: landscape line 1.pt --along 2.pt\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("1.pt", "2.pt", "--along", "random"), "line: lines through each of 2 checkpoints\n"),
        (("1.pt", "2.pt", "--directions", "2"), f"line: random lines through each of 2 checkpoints; {BETWEEN}"),
        (("1.pt", "2.pt", "3.pt"), f"line: random lines through each of 3 checkpoints; {BETWEEN}"),
    ],
)
def test_random_lines_are_said_to_be_random(command: Command, words: tuple[str, ...], said: str) -> None:
    for seed in (1, 2, 3):
        torch.save(state(seed), f"{seed}.pt")
    code, err = command("line", *words, "--resolution", "2")
    assert (code, said in err) == (0, True)
    assert {data.attrs["along"] for _, data in reader.find("results.h5", "line")} == {"random"}
    assert len(labels("line")) == len([word for word in words if word.endswith(".pt")])


def test_checkpoints_of_two_architectures_are_not_joined_by_a_line(command: Command) -> None:
    torch.save(state(1), "1.pt")
    torch.save(state(4, width=6), "wide.pt")
    code, err = command("line", "1.pt", "wide.pt", "--resolution", "3")
    assert "line: random lines through each of 2 checkpoints, whose architectures differ\n" in err
    assert (code, "wide.pt does not fit the model" in err) == (1, True)
    code, err = command("line", "1.pt", "wide.pt", "--connect", "bezier", "--split", "test")
    assert code == 1
    assert err.endswith("connects two checkpoints of one architecture, and wide.pt has another one than 1.pt\n")


def test_a_curve_and_interpolated_statistics_need_two_checkpoints(command: Command) -> None:
    for seed in (1, 2, 3):
        torch.save(state(seed), f"{seed}.pt")
    code, err = command("line", "1.pt", "2.pt", "3.pt", "--connect", "bezier", "--split", "test")
    assert (code, "connects two checkpoints, got 3; for curves" in err) == (2, True)
    assert command("line", "1.pt", "2.pt", "--resolution", "2", "--bn", "interpolate")[0] == 0
    assert command("line", "1.pt", "--resolution", "2", "--bn", "interpolate")[0] == 2


def test_files_of_one_name_have_labels_of_their_own(command: Command) -> None:
    for seed, folder in enumerate("ab"):
        Path(folder).mkdir()
        torch.save(state(seed), f"{folder}/model.pt")
    assert command("trace", "a/model.pt", "b/model.pt", *FEW, "--quiet")[0] == 0
    assert sorted(labels("trace")) == ["a-model", "b-model"]


def test_a_label_is_readable_and_a_new_one_reaches_a_stored_result(command: Command) -> None:
    torch.save(state(1), "1.pt")
    words = ("trace", "1.pt", *FEW, "--label")
    assert command(*words, "SGD, lr=1e-2", "--quiet")[0] == 0
    assert labels("trace") == ["SGD, lr=1e-2"]
    ((group, _),) = reader.groups("results.h5")
    code, err = command(*words, "Adam")
    assert (code, f"{group} has the label Adam now, it was SGD, lr=1e-2" in err) == (0, True)
    assert command(*words[:-1])[0] == 0  # no label: none is changed
    assert (labels("trace"), next(iter(reader.groups("results.h5")))[0]) == (["Adam"], group)
    torch.save(state(1), "twin.pt")
    code, err = command("trace", "1.pt", "twin.pt", "--vectors", "4")
    assert (code, err.count("twin has the same weights as Adam"), labels("trace")) == (0, 1, ["Adam"])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("net.pt", {"epoch": 0}, "(model), epoch 0: initial weights, or those after a first epoch counted as 0,"),
        ("vit_init.pt", {}, "(model), initial weights by its name,"),
        ("vit_init.pt", {"epoch": 3}, "(model),"),
        ("kaiming_init_best.pt", {}, "(model),"),
    ],
)
def test_epoch_0_of_other_trainers_may_be_a_finished_epoch(
    command: Command, name: str, content: dict[str, Any], said: str
) -> None:
    torch.save({"model": state(1), **content}, name)
    assert f"{name} {said}" in command("trace", name, *FEW)[1]


def test_a_folder_in_python_is_a_run_or_an_error_that_names_its_files(command: Command) -> None:
    files = seeds("seeds")
    options = {"model": "mine.py:model", "data": "mine.py:data"}
    with pytest.raises(ValueError, match="seeds holds 3 checkpoints that are not one run's; name one of them: seeds/"):
        landscape.load("seeds", **options)
    with pytest.raises(ValueError, match="seeds holds 3 checkpoints that are not one run's"):
        landscape.measure("trace", "seeds", vectors=4, **options)
    Path("run").mkdir()
    for epoch, file in enumerate(files):
        Path(file).rename(f"run/epoch_{epoch}.pt")
    subject = landscape.load("run", **options)
    assert subject.checkpoint.path == Path("run/epoch_2.pt")
    code, err = command("evaluate", "run")
    assert (code, "run: epoch_2.pt, the last of a run's 3 checkpoints, is measured" in err) == (0, True)
