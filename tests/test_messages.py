"""Mistakes on the command line: one line that says what was got, what was expected and what to do."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Command, one_line
from PIL import Image

from landscape.cli.main import exit_code
from landscape.probes import PROBES
from landscape.reporting import progress


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("surface", "--plane", "nowhere"), 1, "random, eigen"),
        (("surface", "--bn", "recalibrate:99"), 1, "mini-batches"),
        (("surface", "--model", "vit_demo"), 1, "a fresh model comes without data"),
        (("surface", "--plane", "nowhere.h5"), 1, "or a file of directions, got nowhere.h5"),
        (("line", "--bn", "recalibrate:99"), 1, "mini-batches"),
        (("line", "--along", "sideways"), 1, "random, eigen"),
        (("line", "--along", "none.pt"), 1, "no checkpoint at none.pt"),
        (("line", "--along", "checkpoints/resnet_demo-digits/init.pt"), 1, "two different ones"),
        (("line", "--along", "checkpoints/resnet_demo-digits"), 1, "at least two"),
        (("line", "--along", "checkpoints"), 1, "holds 0 different snapshots"),
        (("lesion", "--layers", "nothing_has_this_name"), 1, "matches no unit; its units are layer1.0"),
        (("probe-linear", "--pool", "cls"), 1, "use --pool mean"),
        (("corruption", "--severities", "6"), 2, "--severities must be 1 to 5"),
        (("corruption", "--corruptions", "gausian_noise"), 2, "did you mean gaussian_noise"),
        (("perturbation", "--perturbations", "rotat"), 2, "did you mean rotate?"),
        (("shape-bias", "--cues", "checkpoints"), 2, "cat1-elephant2.png"),
        (("probe-linear", "--split", "train"), 2, "drop it"),
        (("probe-linear", "--train-samples", "few"), 2, "10%"),
        (("hessian", "--verbose"), 2, "--quiet prints errors only and --verbose prints more; give one of them"),
        (("hessian", "--top", "99999999"), 1, "parameters"),
        (("hessian", "--params", "nothing_has_this_name"), 1, "no trainable parameter"),
        (("hessian", "--batches", "1000"), 1, "mini-batches"),
        (("hessian", "--samples", "few"), 2, "10%"),
        (("hessian", "--workers", "0"), 2, "at least 1"),
        (("hessian", "--model-arg", "width"), 2, "KEY=VALUE"),
        (("hessian", "--device", "tpu"), 2, "cuda"),
        (("hessian", "--data", "cifar100"), 1, "cifar-100-python"),
        (("hessian", "--data", "imagenet"), 1, "digits"),
        (("hessian", "nowhere.pt"), 1, "nowhere.pt"),
        (("fourier", "--layers", "no_such_layer"), 1, "similar names"),
        (("fourier", "--layers", "layer1:no_such_kind"), 1, "kinds are"),
        (("fourier", "--layers", "("), 2, "regular expression"),
        (("layers", "--image-size", "0"), 2, "at least 1"),
        (
            ("layers", "--model", "torch.nn:Linear", "--model-arg", "in_features=5", "--model-arg", "out_features=2"),
            1,
            "does not accept inputs",
        ),
        (("fourier", "--augment", "--model", "vit_demo", "--data", "digits", "--nonsense"), 2, "nonsense"),
        (("trajectory",), 1, "at least two"),
        (("plot", "nowhere.h5"), 1, "run a probe first"),
        (("show", "nowhere"), 1, "nowhere"),
        (("show", "checkpoints"), 1, "folder"),
        (("surface", "--resolution", "3", "--out", "checkpoints/resnet_demo-digits/final.pt/r.h5"), 1, "another path"),
        (("train", "vit_demi", "--data", "digits"), 1, "vit_demo"),
        (("train", "vit_demo", "--data", "digits", "--lr", "-1"), 2, "lr"),
        (("train", "vit_demo", "--data", "digits", "--recipe", "cifar"), 2, "cifar-vit"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_bad_input_ends_in_one_line(
    command: Command, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    probes = ("surface", "line", "hessian", "fourier", "trajectory", "lesion", "noise", "probe-linear")
    probes += ("corruption", "perturbation", "attack", "shape-bias")
    needs_out = words[0] in probes
    given = [words[0], *(["--out", str(tmp_path / "r.h5"), "--quiet"] if needs_out else []), *words[1:]]
    found, out, err = command(*given)
    assert (found, out) == (code, "")
    assert one_line(err)
    assert said in err
    assert list(tmp_path.iterdir()) == []


MISTAKES = """
import torch
from torch import nn
def model(width=8): return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
def needs(width): return model(width)
instance = model()
def data(): return torch.randn(16, 4), torch.arange(16) % 3
def wide(): return torch.randn(16, 5), torch.arange(16) % 3
def whole(): return torch.randint(0, 3, (16, 4)), torch.arange(16) % 3
def holes(): return torch.full((16, 4), float("nan")), torch.arange(16) % 3
def lazy(): return torch.nn.LazyLinear(3)
def starts_at_minus_one(): return torch.randn(16, 4), torch.arange(16) % 3 - 1
"""


FRESH = ("--model", "mine.py:model", "--data", "mine.py:data")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hessain", "ok.pt"), "(see: landscape --help)"),
        (("hessian", "--foo"), "(see: landscape hessian --help-all)"),
        (("plot", "--foo"), "(see: landscape plot --help)"),
        (("study", "show", "--foo"), "(see: landscape study show --help)"),
        (("hessian", "okk.pt", *FRESH), "there is ok.pt; give"),
        (("hessian", "ok.pt"), "nor its model; give --model NAME|file.py:callable and --data"),
        (("hessian", "ok.pt", "--model", "mine.py", "--data", "mine.py:data"), "give --model mine.py:model"),
        (("hessian", "ok.pt", "--model", "mine", "--data", "mine.py:data"), "give --model mine.py:model"),
        (("hessian", "ok.pt", "--model", "mine.py:needs", "--data", "mine.py:data"), "give --model-arg width=VALUE"),
        (("hessian", "ok.pt", "--model", "mine.py:instance", "--data", "mine.py:data"), "name a function that returns"),
        (
            ("hessian", "ok.pt", *FRESH, "--model-arg", "widht=3"),
            "mine.py:model has no argument widht; it takes --model-arg width=VALUE",
        ),
        (("hessian", "--model", "mine.py:model", "--data", "mine.py:wide"), "check the shape of the inputs of --data"),
        (("hessian", "--model", "mine.py:model", "--data", "mine.py:whole"), "which are int64: return inputs.float()"),
        (("hessian", "--model", "mine.py:model", "--data", "mine.py:holes"), "the inputs of the data are not finite"),
        (("hessian", "--model", "mine.py:model", "--data", "mine.py:starts_at_minus_one"), "leave such samples out"),
        (
            ("hessian", "--model", "mine.py:lazy", "--data", "mine.py:data"),
            "weight has no shape yet (a lazy module); call",
        ),
        (("hessian", "--model", "mine.py:model", "--data", "x.npy"), "--data x.npy,TARGETS.npy"),
        (("hessian", "ok.pt", *FRESH, "--augment"), "give --no-augment"),
        (("hessian", *FRESH, "--batches", "9"), "--batches 1"),
        (("hessian", *FRESH, "--mean", "0.5"), "got 0.5 and nothing"),
        (("hessian", *FRESH, "--out", "."), "give --out results.h5"),
        (("attention", *FRESH), "--layers 'attn:msa'"),
        (("surface", *FRESH, "--plane", "ok.pt"), "--plane ok.pt,OTHER.pt"),
        (("plot", "ok.pt"), "give a file that a probe wrote"),
        (("show", "code.pt"), "give a probe --trust-pickle"),
        (("train", "mine.py:model", "--data", "digits"), "landscape hessian WEIGHTS.pt --model mine.py:model"),
    ],
)
def test_a_mistake_names_the_option_and_a_value_that_works(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MISTAKES)
    torch.save(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).state_dict(), "ok.pt")
    torch.save(torch.nn.Linear(4, 3), "code.pt")
    np.save("x.npy", np.zeros((5, 3, 8, 8), np.uint8))
    code, _, err = command(*words, *(["--quiet"] if words[0] in PROBES else []))
    assert code in (1, 2)
    assert one_line(err.splitlines(keepends=True)[-1])
    assert said in err


NETWORKS = """
import torch
from torch import nn
def one(): return nn.Linear(4, 1)
def three(): return nn.Linear(4, 3)
def sigmoid(): return nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
def softmax(): return nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
def map(): return nn.Conv2d(4, 1, 1)
def maps(): return nn.Conv2d(4, 3, 1)
def x(*shape): return torch.randn(24, 4, *shape, generator=torch.Generator().manual_seed(0))
def true(): return x(), x()[:, 0] > 0
def binary(): return x(), (x()[:, 0] > 0).float()
def labels(): return x(), (x()[:, :3] > 0).float()
def classes(): return x(), torch.arange(24) % 3
def onehot(): return x(), nn.functional.one_hot(torch.arange(24) % 3)
def numbers(): return x(), x()[:, :1]
def mask(): return x(5, 5), (x(5, 5)[:, 0] > 0).long()
def floats(): return x(5, 5), (x(5, 5)[:, 0] > 0).float()
def void(): return x(5, 5), (x(5, 5)[:, 0] > 0).long() * 255
"""
SITUATIONS = [  # network, data, options
    *(("one", data, loss) for data in ("true", "binary", "labels", "classes", "numbers") for loss in ("", "bce")),
    *(("three", data, loss) for data in ("true", "binary", "labels", "classes", "onehot") for loss in ("", "bce")),
    ("sigmoid", "labels", "bce"), ("sigmoid", "labels", ""), ("softmax", "classes", ""), ("softmax", "classes", "bce"),
    *(("map", data, loss) for data in ("mask", "floats", "void") for loss in ("", "bce")),
    *(("maps", data, loss) for data in ("mask", "void") for loss in ("", "bce")),
]  # fmt: skip


def advised(options: tuple[str, ...], said: str) -> list[tuple[str, ...]]:
    """The options that a message advises: each without those to leave out, and with the value of one to give."""
    given = dict(zip(options[::2], options[1::2], strict=True))
    ways = [{**given, name: value} for name, value in re.findall(r"(?:give|or) (--[a-z-]+) ([\w.:/-]*\w)", said)]
    ways += [
        {key: given[key] for key in given if key != name} for name in re.findall(r"(?:leave|drop) (--[a-z-]+)", said)
    ]
    return [tuple(word for pair in sorted(way.items()) for word in pair) for way in ways]


@pytest.mark.campaign
def test_no_advice_leads_back_to_a_message_that_was_seen(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a refusal advises is tried, and what the next one advises, until a command works or advises no option."""
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETWORKS)

    @cache
    def refusal(network: str, data: str, options: tuple[str, ...]) -> str:
        own = ("--model", f"nets.py:{network}", "--data", f"nets.py:{data}")
        Path("r.h5").unlink(missing_ok=True)
        code, _, err = command("calibration", "--out", "r.h5", "--draws", "2", *own, *options)
        return err.splitlines(keepends=True)[-1] if code else ""

    def walk(network: str, data: str, options: tuple[str, ...], seen: list[str]) -> None:
        said = refusal(network, data, options)
        if not said:
            return
        assert one_line(said)
        assert "Error" not in said
        assert said not in seen, (network, data, options, *seen)
        for way in advised(options, said):
            walk(network, data, way, [*seen, said])

    for network, data, loss in SITUATIONS:
        walk(network, data, ("--loss", loss) if loss else (), [])


def test_a_checkpoint_with_another_number_of_classes_is_rejected(command: Command, tmp_path: Path) -> None:
    (tmp_path / "three.py").write_text(
        "import torch\ndef data(): return torch.zeros(4, 3, 16, 16), torch.tensor([0, 1, 2, 50])\n"
    )
    code, _, err = command("hessian", "--data", f"{tmp_path / 'three.py'}:data", "--out", tmp_path / "r.h5")
    assert code == 1
    assert one_line(err)
    assert "10 classes" in err
    assert "51" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_rejected(command: Command, tmp_path: Path) -> None:
    code, _, err = command("variance", "--device", "cuda", "--out", tmp_path / "r.h5")
    assert code == 1
    assert one_line(err)
    assert "cpu" in err


def test_without_any_checkpoint_the_error_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(["surface"]) == 1
    err = capsys.readouterr().err
    assert one_line(err)
    assert "landscape train" in err


def test_a_missing_checkpoint_is_named_before_the_others_are_measured(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "results.h5"
    code, _, said = command("hessian", "checkpoints/resnet_demo-digits/final.pt", "gone.pt", "--out", out)
    assert (code, "no checkpoint at gone.pt" in said) == (1, True)
    assert not out.exists()


def test_a_model_in_the_place_of_a_checkpoint_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("layers", "hessian"):
        assert exit_code([command, "hf:folder"]) == 1
        assert "no checkpoint at hf:folder; a model is given with --model hf:folder" in capsys.readouterr().err


def test_the_name_of_a_run_must_not_be_a_path(command: Command) -> None:
    code, _, err = command("train", "vit_demo", "--data", "digits", "--epochs", "0", "--name", "../a")
    assert code == 2
    assert one_line(err)
    assert "--name must be a word, got the path ../a" in err


@pytest.mark.parametrize("words", [("--model", "hf:nowhere"), ("--model=hf:nowhere",)])
def test_a_missing_folder_of_a_model_is_found_before_anything_is_imported(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("landscape.cli.main.command_of", lambda _: pytest.fail("imported"))
    code, _, err = command("hessian", *words)
    assert (code, one_line(err), "no such folder" in err) == (1, True, True)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("cifar10-c:fog:3", "has a test split only"),
        ("tokens.npy", "holds tokens; training needs square images"),
        ("folder", "no test or val for the test split; give the other split"),
    ],
)
def test_data_that_no_network_can_be_trained_on_are_refused_without_the_options_of_probes(
    command_here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("tokens.npy", np.arange(20))
    for name in ("a", "b"):
        (folder := Path("folder", "train", name)).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(folder / "one.png")
    code, _, err = command_here("train", "vit_demo", "--data", data, "--epochs", "0", "--out", "run")
    assert (code > 0, one_line(err), said in err) == (True, True, True), err


@pytest.mark.parametrize(
    ("words", "function", "said"),
    [
        (
            ("train", "vit_demo", "--data", "digits"),
            "training.train.train",
            "a smaller --batch-size or another --device",
        ),
        (("study", "check", "any.toml"), "cli.study.study_named", "fewer files or smaller ones"),
    ],
)
def test_advice_where_memory_runs_out_names_options_of_the_command(
    command_here: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], function: str, said: str
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(f"landscape.{function}", exhausted)
    code, _, err = command_here(*words)
    assert (code, one_line(err), f"give {said}\n" in err) == (1, True, True), err


ENGINE = ("Hessian products: ", "is measured; name others: ")


@pytest.mark.slow
def test_a_run_prints_what_was_found_and_how_only_on_request(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line per network and probe, none twice; --verbose adds the engine's, and --log has them in any case."""
    for module, name in ((progress, "FORECAST_SECONDS"), (progress, "LINE_SECONDS")):
        monkeypatch.setattr(module, name, 1e6)  # on a busy machine the run is long enough for lines about time
    run = Path("checkpoints/resnet_demo-digits")
    words = ["hessian", run, run / "init.pt", "--samples", "16", "--batch-size", "4", "--top", "1"]
    printed, recorded = {}, {}
    for how in ([], ["--verbose"], ["--quiet"]):
        log, name = tmp_path / f"log{how}.jsonl", "".join(how)
        code, out, err = command(*words, *how, "--out", tmp_path / f"{name}.h5", "--log", log)
        assert (code, out) == (0, "")
        printed[name] = err.splitlines()
        events = map(json.loads, log.read_text().splitlines())
        recorded[name] = [event["text"] for event in events if event["event"] == "message"]
    lines = printed[""]
    assert len(set(lines)) == len(lines) == 6  # the second network has the weights of the first, which a note says
    protocol, loaded, found, *_ = lines
    assert protocol == "digits train, 16 samples, batch size 4, no augmentation, weight decay 0, seed 0; cpu"
    assert loaded.startswith(
        f"resnet_demo-digits: {run}/final.pt (state_dict), initial weights, 0.175 M parameters; loss "
    )
    assert found.startswith("hessian resnet_demo-digits: nep 0")
    assert re.search(r"ape [\d.]+ \[[\d.]+, [\d.]+\]", found)
    assert not [word for word in ENGINE for line in lines if word in line]
    assert printed["--quiet"] == []
    assert len(set(printed["--verbose"])) == len(printed["--verbose"]) > len(lines)
    for said in (printed["--verbose"], *recorded.values()):
        assert all(any(word in line for line in said) for word in ENGINE), said
    assert set(lines) <= set(recorded[""])


def test_another_package_of_our_name_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "landscape").mkdir()
    (tmp_path / "landscape" / "__init__.py").write_text("")
    file = Path(__file__).parents[1] / "landscape_probes.py"
    script = f"import runpy; runpy.run_path({str(file)!r})['main']()"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, one_line(done.stderr)) == (1, True)
    assert f"finds another package, {tmp_path}" in done.stderr
    done = subprocess.run([sys.executable, "-P", "-c", f"{script}", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
