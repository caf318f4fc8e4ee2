"""The command line: what it writes, what it prints, its exit codes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
from command_line import Command, one_line

import landscape
from landscape.cli import measuring
from landscape.reporting.progress import text_table
from landscape.results import reader
from landscape.results.run_key import Outcome
from landscape.statistics.intervals import quantile
from landscape.statistics.rounding import plus_minus


@pytest.mark.slow
def test_the_newest_checkpoint_is_taken_and_named(command: Command, tmp_path: Path) -> None:
    code, _, err = command("variance", "--samples", "16", "--out", tmp_path / "r.h5")
    assert code == 0
    assert "checkpoints/resnet_demo-digits/final.pt" in err
    (group,) = landscape.open(tmp_path / "r.h5")["variance"].children
    assert group.startswith("resnet_demo-digits-")


@pytest.mark.slow
def test_labels_name_the_groups_of_several_checkpoints(command: Command, tmp_path: Path) -> None:
    files = ["checkpoints/resnet_demo-digits/final.pt", "checkpoints/resnet_demo-digits/init.pt"]
    torch.manual_seed(0)
    state = torch.load(files[1], weights_only=True)
    state["state_dict"]["conv1.weight"] += 1.0
    torch.save(state, tmp_path / "other.pt")
    files[1] = str(tmp_path / "other.pt")
    out = tmp_path / "r.h5"
    assert command("variance", *files, "--samples", "16", "--out", out, "--label", "one", "--label", "a b/c")[0] == 0
    names = sorted(landscape.open(out)["variance"].children)
    assert [re.sub(r"-\w{10}$", "", name) for name in names] == ["a_b_c", "one"]
    code, _, err = command("variance", *files, "--label", "only", "--out", out)
    assert code == 2
    assert one_line(err)


@pytest.mark.parametrize(
    ("words", "parameters", "loading"),
    [
        (
            ("surface", "--resolution", "51", "--normalize", "filter"),
            {"resolution": "51", "normalize": "filter", "l2_definition": "park2022"},
            {"split": "train", "augment": True, "weight_decay": 0.05},
        ),
        (("surface",), {"resolution": "21", "normalize": "park2022"}, {"augment": True, "weight_decay": 0.05}),
        (("surface", "--no-augment", "--weight-decay", "0"), {"normalize": "park2022"}, {"augment": False}),
        (("hessian", "--batch-size", "16", "--samples", "all"), {"top": 5}, {"samples": "all", "weight_decay": 0.05}),
        (("fourier", "--frequencies", "true"), {"frequencies": "true"}, {}),
        (("fourier", "--layers", "a", "--layers", "b"), {"layers": ("a", "b"), "frequencies": "park2022"}, {}),
        (("features", "--frequencies", "true", "--seed", "0"), {"frequencies": "true"}, {"seed": 0}),
    ],
)
def test_a_typed_option_wins_over_the_preset_also_with_its_default_value(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    parameters: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    original, made = measuring._configured, []

    def configured(*given: Any) -> Any:
        made.append(original(*given))
        raise ValueError("configured")

    monkeypatch.setattr(measuring, "_configured", configured)
    code, _, err = command(*words, "--preset", "park2022")
    assert (code, "configured" in err) == (1, True)
    (((probe, *_), *_), spec) = made[0]
    assert {name: getattr(probe, name) for name in parameters} == parameters
    assert {name: spec[name] for name in loading} == loading


SPLITS = """
import torch
def model(): return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
def data(split="train"):
    generator = torch.Generator().manual_seed(int(split == "test"))
    return torch.randn(30, 4, generator=generator), torch.arange(30) % 3
def whole(): return data("both")[0] + 1, data()[1]
"""


@pytest.mark.slow
def test_the_split_reaches_a_function_of_the_user_and_one_part_is_called_so(command: Command, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(SPLITS)
    out = tmp_path / "r.h5"
    losses = []
    for data, split in (("data", "train"), ("data", "test"), ("whole", "train"), ("whole", "test")):
        words = ("--model", f"{mine}:model", "--data", f"{mine}:{data}", "--split", split)
        code, found, err = command("evaluate", *words, "--json")
        assert code == 0
        losses.append(json.loads(found)["loss"])
        assert f"mine.py:{data} {'(one part)' if data == 'whole' else split}, 30 samples" in err
        assert command("line", *words, "--out", out, "--resolution", "2")[0] == 0
    assert losses[0] != losses[1]
    assert losses[2] == losses[3]
    stored = [data.attrs for _, data in reader.groups(out)]
    assert sorted(re.findall(r"mine.py:\w+ \(?(\w+)", "\n".join(str(a["protocol"]) for a in stored))) == [
        "one",
        "test",
        "train",
    ]
    (whole,) = (str(attributes["protocol"]) for attributes in stored if "whole" in str(attributes["data"]))
    assert "mine.py:whole (one part), 30 samples" in whole


def test_without_an_error_none_is_printed(command: Command, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(SPLITS)
    words = ("evaluate", "--model", f"{mine}:model", "--data", f"{mine}:whole", "--samples")
    assert [("+-" in found, "nan" in found) for _, found, _ in (command(*words, n) for n in ("1", "9"))] == [
        (False, False), (True, False),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_linear_probe_of_one_part_scores_samples_that_it_is_not_fitted_on(command: Command, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(SPLITS)
    words = ("probe-linear", "--model", f"{mine}:model", "--layers", "0:other", "--out", tmp_path / "r.h5")
    code, _, err = command(*words, "--data", f"{mine}:whole")
    assert (code, one_line(err.splitlines(keepends=True)[-1])) == (1, True)
    assert "score fewer with --samples 15, or give data with a train split (a function: a parameter split)" in err
    code, _, err = command(*words, "--data", f"{mine}:whole", "--samples", "15")
    assert code == 0
    assert "has one part: the first 15 samples are scored, 15 others fitted" in err
    code, _, err = command(*words, "--data", f"{mine}:data")
    assert code == 0
    assert "one part" not in err


REGRESSOR = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.act = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.head = nn.Linear(4, 1)
    def forward(self, x):
        x = self.act(self.stem(x))
        return self.head(self.act(x + self.body(x)).mean((2, 3)))
def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 3, 8, 8, generator=generator), torch.randn(24, 1, generator=generator)
"""


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["lesion", "noise"])
def test_without_an_accuracy_headline_and_figure_are_of_the_loss(command: Command, tmp_path: Path, probe: str) -> None:
    (mine := tmp_path / "mine.py").write_text(REGRESSOR)
    out, words = tmp_path / "r.h5", ("--model", f"{mine}:Net", "--data", f"{mine}:data", "--loss", "mse")
    code, _, err = command(probe, *words, "--out", out)
    assert code == 0
    ((_, data),) = reader.groups(out)
    worst = int(data["loss_increase"].values.argmax())
    value, error = (data[name].values[worst].item() for name in ("loss_increase", "loss_increase_se"))
    largest = f"largest increase {plus_minus(value, quantile(24) * error)}, at "
    assert re.search(rf"intact loss [\d.]+, {re.escape(largest)}", err)
    assert largest in command("show", out)[1]
    code, _, err = command("plot", out, "--out", tmp_path / "figures")
    assert (code, (tmp_path / "figures" / f"{probe}.png").exists()) == (0, True)
    assert "no figure of" not in err


@pytest.mark.slow
def test_a_resumed_run_counts_as_complete(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("variance", "--samples", "16", "--out", tmp_path / "r.h5")
    assert "kept from before" not in command(*words)[2]
    ((group, _),) = reader.groups(tmp_path / "r.h5")
    monkeypatch.setattr("landscape.running.run.run", lambda *_, **__: Outcome(group, 1681, 1079))
    assert "(1,079 of 1,681 units in 0 s, the others are kept from before; in " in command(*words)[2]


@pytest.mark.slow
def test_a_result_with_a_new_label_is_reported_under_it(command: Command, tmp_path: Path) -> None:
    words = ("variance", "--samples", "16", "--out", tmp_path / "r.h5", "--label")
    assert "variance first net: " in command(*words, "first net")[2]
    assert "variance second: " in command(*words, "second")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [(("noise", "--eps", "0.3,0.7"), ("eps 0.3", "eps 0.7")),
     (("surface", "--directions", "2", "--resolution", "3"), ("seed 0", "seed 1"))],
)  # fmt: skip
def test_results_of_one_command_and_network_are_told_apart(
    words: tuple[str, ...], told: tuple[str, str], command: Command, tmp_path: Path
) -> None:
    said = command(*words, "--samples", "8", "--out", tmp_path / "r.h5")[2]
    shown = command("show", tmp_path / "r.h5")[1].splitlines()[1:3]
    assert all(f"({one}): " in said for one in told)
    assert [one in line for one, line in zip(told, sorted(shown, key=lambda line: told[1] in line), strict=True)] == [
        True,
        True,
    ]


RECURRENT = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)
    def forward(self, x): return self.head(self.lstm(x)[0][:, -1])
def data(): return torch.zeros(8, 7, 5), torch.arange(8) % 3
"""


def test_layers_of_a_network_without_images_come_from_its_data(command: Command, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.py").write_text(RECURRENT)
    words = ("layers", "--model", f"{mine}:Net", "--layers", "lstm")
    code, out, err = command(*words)
    assert (code, out, one_line(err)) == (1, "", True)
    assert "does not accept inputs of shape (3, 224, 224)" in err
    assert "give --data, whose first inputs are then used" in err
    code, out, err = command(*words, "--data", f"{mine}:data", "--samples", "all", "--split", "train", "--json")
    assert code == 0
    assert [row["shape"] for row in json.loads(out)] == ["7 x 6"]


@pytest.mark.slow
def test_the_last_line_of_a_training_is_the_accuracy_of_its_final_weights(command: Command, tmp_path: Path) -> None:
    words = ("train", "vit_demo", "--data", "digits", "--epochs", "0", "--ema", "0.9", "--out", tmp_path / "run")
    code, _, err = command(*words)
    assert code == 0
    assert "final_ema.pt" in err
    assert "final.pt, loss " in err.splitlines()[-1]


@pytest.mark.slow
def test_a_command_loads_no_library_that_it_does_not_need(tmp_path: Path) -> None:
    """The package has hardly a module, version and help have none; `show` and `plot` of a results file no torch."""
    study = synthetic.write(tmp_path / "study.h5", synthetic.NETWORKS[:1], probes=("hessian", "variance"))
    plot = ["plot", str(study), "--out", str(tmp_path / "figures"), "--figure", "variance"]
    script = (
        "import sys\n"
        "before = {*sys.modules}\n"
        "import landscape\n"
        "assert len({*sys.modules} - before) <= 10 and 'numpy' not in sys.modules\n"
        "from landscape.cli.main import exit_code\n"
        "def loads(*words):\n"
        "    assert exit_code(list(words)) == 0\n"
        "    return {'torch', 'matplotlib', 'h5py', 'xarray', 'scipy', 'scipy.stats'} & {*sys.modules}\n"
        "assert loads('--version') == loads('--help') == set()\n"
        f"assert loads('show', {str(study)!r}) == {{'h5py', 'xarray'}}\n"
        f"assert not {{'torch', 'matplotlib'}} & loads('show', {str(study)!r}, '--json')\n"
        f"assert 'torch' not in loads(*{plot!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hessian" in done.stdout
    assert all(f"\n{probe} " in done.stdout for probe in ("hessian", "variance"))
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["variance.png"]


def test_the_text_table_is_aligned_and_leaves_unmeasured_cells_empty() -> None:
    lines = text_table([{"name": "a\x1b[2J", "NEP": 0.12345}, {"name": "long name", "NEP": float("nan")}]).splitlines()
    assert lines == ["name       NEP", "a\N{REPLACEMENT CHARACTER}[2J      0.1235", "long name"]
    assert text_table([]) == "(empty)"


@pytest.mark.slow
def test_show_prints_what_is_in_a_checkpoint_and_in_a_results_file(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "r.h5"
    assert command("variance", "--samples", "16", "--out", out)[0] == 0
    code, text, _ = command("show", out)
    assert code == 0
    assert "variance" in text
    assert "resnet_demo-digits" in text
    (row,) = json.loads(command("show", out, "--json")[1])
    assert (row["probe"], row["done"], row["units"]) == ("variance", 1, 1)
    about = json.loads(command("show", "checkpoints/resnet_demo-digits/final.pt", "--json")[1])
    assert about["model"] == "resnet_demo"
    assert about["data"]["classes"] == 10


@pytest.mark.slow
def test_show_loads_a_checkpoint_by_the_options_of_evaluate(command: Command, tmp_path: Path) -> None:
    checkpoint = "checkpoints/resnet_demo-digits/final.pt"
    plain = json.loads(command("show", checkpoint, "--json")[1])
    code, text, err = command("show", checkpoint, "--data", "digits", "--samples", "32", "--json")
    assert code == 0
    assert "M parameters; loss " in err
    about = json.loads(text)
    assert {name: about[name] for name in plain} == plain
    assert about["network"] == "ResNet"
    assert about["protocol"].startswith("digits test, 32 samples, batch size 128")
    out = tmp_path / "results.h5"
    assert command("variance", "--samples", "16", "--out", out)[0] == 0
    code, _, err = command("show", out, "--data", "digits")
    assert (code, one_line(err)) == (2, True)
    assert "--data loads a checkpoint, and" in err


def test_layers_needs_no_data(command: Command) -> None:
    rows = json.loads(command("layers", "--model", "vit_demo", "--image-size", "16", "--json")[1])
    kinds = [row["kind"] for row in rows]
    assert kinds == ["stem", *["msa", "mlp"] * 5]
    assert [float(row["depth"]) for row in rows] == pytest.approx(np.linspace(0, 1, 11), abs=1e-3)


@pytest.mark.slow
def test_layers_takes_run_folders_and_files_that_are_trusted(command: Command, tmp_path: Path) -> None:
    run = Path("checkpoints/resnet_demo-digits")
    code, text, _ = command("layers", run, "--json")
    assert code == 0
    state = torch.load(run / "final.pt", weights_only=True)["state_dict"]
    torch.save({"state_dict": state, "code": re.compile("x")}, tmp_path / "w.pt")
    words = ("layers", tmp_path / "w.pt", "--model", "resnet_demo", "--model-arg", "classes=10", "--image-size", "16")
    assert command(*words)[0] == 1
    code, trusted, _ = command(*words, "--trust-pickle", "--json")
    assert (code, json.loads(trusted)) == (0, json.loads(text))
    code, _, err = command(*words, "--trust-pickle", "--weights", "ema")
    assert (code, "has no moving average" in err) == (1, True)


@pytest.mark.slow
def test_the_moving_average_of_a_run_is_taken_from_beside_its_final_weights(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree("checkpoints/resnet_demo-digits", run)
    content = torch.load(run / "final.pt", weights_only=True)
    content["state_dict"]["conv1.weight"] += 1.0
    words = ("--samples", "16")
    code, _, err = command("evaluate", run, *words, "--weights", "ema")
    assert (code, "final.pt has no moving average" in err) == (1, True)
    torch.save(content, run / "final_ema.pt")
    wanted = command("evaluate", run / "final_ema.pt", *words)[1]
    assert wanted != command("evaluate", run, *words)[1]
    for given in (run, run / "final.pt"):
        code, out, err = command("evaluate", given, *words, "--weights", "ema")
        assert (code, out) == (0, wanted)
        assert f"run-final_ema: {run / 'final_ema.pt'} (state_dict, the moving average beside final.pt), init" in err
    code, _, err = command("variance", run / "init.pt", *words, "--weights", "ema", "--out", tmp_path / "r.h5")
    assert (code, "init.pt has no moving average" in err) == (1, True)
    groups = set()
    for given in ((run, "--weights", "ema"), (run / "final_ema.pt",)):
        assert command("variance", *given, *words, "--out", tmp_path / "r.h5")[0] == 0
        groups.update(landscape.open(tmp_path / "r.h5")["variance"].children)
    assert len(groups) == 1  # the same run key


def test_version_is_that_of_the_distribution(command: Command) -> None:
    from importlib import metadata

    assert command("--version")[1].strip() == metadata.version("landscape-probes")
