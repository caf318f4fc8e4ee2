"""One example per form of foreign checkpoint: each is a real file, loaded and measured as the table says."""

import argparse
import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import own
import pytest
import torch
from foreign import torchvision_models
from safetensors.torch import save_file
from torch import Tensor, nn

import landscape
from landscape.checkpoints import raw_files
from landscape.checkpoints.checkpoint import read_checkpoint
from landscape.cli.main import exit_code
from landscape.results import reader
from landscape.subject.loading.identity import attributes


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `mine.py`, entered."""
    shutil.copy(own.__file__, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def network(seed: int = 0) -> nn.Module:
    """The trained network of the examples, batch statistics and all."""
    torch.manual_seed(seed)
    net = own.model()
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.add_(torch.rand(buffer.shape))
    return net.eval()


def state(prefix: str = "", seed: int = 0) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.clone() for name, tensor in network(seed).state_dict().items()}


def body(prefix: str, seed: int = 0) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state(prefix, seed).items() if ".fc." not in f".{name}"}


def averaged() -> dict[str, Tensor]:
    mean = torch.optim.swa_utils.AveragedModel(network())
    mean.update_parameters(network())
    return mean.state_dict()


def sharded(folder: Path, suffix: str) -> Path:
    """Two shards and their index, as Hugging Face libraries write them."""
    folder.mkdir(exist_ok=True)
    stem, write = {"safetensors": ("model", save_file), "bin": ("pytorch_model", torch.save)}[suffix]
    weights, table = list(state().items()), {}
    for i, part in enumerate((weights[:4], weights[4:])):
        name = f"{stem}-{i + 1:05d}-of-00002.{suffix}"
        write(dict(part), folder / name)
        table |= dict.fromkeys(dict(part), name)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))
    return index


def hugging_face(folder: Path, suffix: str) -> Path:
    sharded(folder, suffix)
    (folder / "config.json").write_text(json.dumps({"model_type": "mine"}))
    (folder / "trainer_state.json").write_text(json.dumps({"epoch": 3.0}))
    return folder


def saved(path: Path, content: object, **how: Any) -> Path:
    torch.save(content, path, **how)
    return path


def file(name: str, content: object, **how: Any) -> Callable[[Path], Path]:
    return lambda folder: saved(folder / name, content, **how)


AROUND = {"epoch": 7, "args": argparse.Namespace(lr=0.1, output_dir=Path("/runs")), "optimizer": {"lr": 0.1}}
# form -> how its file is made; all of them hold the same network
FORMS: dict[str, Callable[[Path], Path]] = {
    "state dict": file("weights.pt", state()),
    "state dict, legacy": file("weights.pth", state(), _use_new_zipfile_serialization=False),
    "training dict": file("last.pt", {**AROUND, "model_state_dict": state()}),
    "timm": file("best.pth.tar", {**AROUND, "arch": "mine", "state_dict": state(), "state_dict_ema": state(seed=1)}),
    "DeiT, MAE": file("checkpoint.pth", {**AROUND, "model": state(), "model_ema": state(seed=1), "scaler": {}}),
    "SWA": file("swa.pt", averaged()),
    "Lightning": file("last.ckpt", {"pytorch-lightning_version": "2.5", "epoch": 7, "state_dict": state("net.")}),
    "compile and DDP": file("ddp.pt", {"model": state("_orig_mod.module.")}),
    "safetensors": lambda folder: save_file(state(), folder / "model.safetensors") or folder / "model.safetensors",
    "safetensors, sharded": lambda folder: sharded(folder / "shards", "safetensors"),
    "folder of shards": lambda folder: sharded(folder / "shards", "safetensors").parent,
    "Hugging Face folder": lambda folder: hugging_face(folder / "model", "safetensors"),
    "Hugging Face folder, bin": lambda folder: hugging_face(folder / "model", "bin"),
}
TAKEN = {  # where it is not the file itself
    "training dict": "model_state_dict", "timm": "state_dict", "DeiT, MAE": "model", "compile and DDP": "model",
    "SWA": "dropped 1 (n_averaged)", "Lightning": "state_dict, without the prefix net.",
}  # fmt: skip
DATA = {"data": "mine.py:data"}
MINE = {"model": "mine.py:model", **DATA}
ASKED = ("--model", "mine.py:model", "--data", "mine.py:data", "--out", "r.h5", "--quiet")


def outputs(subject: landscape.Subject) -> Tensor:
    with torch.inference_mode():
        return subject.model(subject.batch(0)[0])


def expected(subject: landscape.Subject, seed: int = 0) -> Tensor:
    with torch.inference_mode():
        return network(seed)(subject.batch(0)[0])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_network_that_was_saved_and_says_what_was_taken(form: str, mine: Path) -> None:
    path = FORMS[form](mine)
    subject = landscape.load(path, **MINE)
    assert torch.equal(outputs(subject), expected(subject))
    assert subject.checkpoint.missing == ()
    assert TAKEN.get(form, "the file itself") in subject.checkpoint.taken
    assert subject.checkpoint.sha256 == raw_files.sha256_of(path)


def test_one_of_several_shards_is_refused_with_the_index_of_all(mine: Path) -> None:
    index = sharded(mine / "shards", "bin")
    with pytest.raises(ValueError, match=f"of which {re.escape(str(index))} names all; give that one"):
        landscape.load(index.parent / "pytorch_model-00001-of-00002.bin", **MINE)


@pytest.mark.slow
def test_the_same_weights_in_another_form_are_the_same_result_which_says_what_was_taken(mine: Path) -> None:
    for form in ("Lightning", "state dict, legacy", "SWA", "safetensors, sharded", "Hugging Face folder, bin"):
        path = FORMS[form](mine)
        assert exit_code(["variance", str(path), *ASKED, "--label", "one"]) == 0
        assert exit_code(["show", str(path)]) == 0
    ((_, data),) = reader.groups("r.h5")
    assert TAKEN["Lightning"] in data.attrs["weights_taken"]
    assert data.attrs["checkpoint_sha256"] == raw_files.sha256_of(mine / "last.ckpt")


@pytest.mark.slow
def test_epoch_and_architecture_come_from_the_file(mine: Path) -> None:
    assert read_checkpoint(FORMS["timm"](mine)).arch == "mine"
    assert read_checkpoint(FORMS["timm"](mine)).epoch == 7
    folder = FORMS["Hugging Face folder"](mine)
    assert (read_checkpoint(folder).arch, read_checkpoint(folder).epoch) == (f"hf:{folder}", 3.0)
    (folder / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    assert read_checkpoint(folder).arch == "vit_tiny_patch16_224"
    arguments = argparse.Namespace(model="deit_tiny_patch16_224")
    assert read_checkpoint(saved(mine / "a.pt", {"model": state(), "args": arguments})).arch == "deit_tiny_patch16_224"
    for word in ("os:system", "../x.py:f", "a b", "", 3, None):
        assert read_checkpoint(saved(mine / "b.pt", {"state_dict": state(), "arch": word})).arch == ""
    with pytest.raises(ValueError, match=r"holds weights only \(of mine\); name the architecture"):
        landscape.load(FORMS["timm"](mine), data="mine.py:data")


# --- encoders of self-supervised methods: one network trained to contrast, one to fill in masks, in one comparison ---

MLP = {"0.weight": torch.zeros(8, 6), "0.bias": torch.zeros(8), "2.weight": torch.zeros(4, 8)}


def under(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


ENCODERS: dict[str, tuple[dict[str, Any], str]] = {
    "MoCo": (
        {
            "arch": "resnet50",
            "state_dict": {
                **body("module.encoder_q."), **under("module.encoder_q.fc.", MLP),
                **body("module.encoder_k.", seed=1), **under("module.encoder_k.fc.", MLP),
                "module.queue": torch.zeros(4, 9), "module.queue_ptr": torch.zeros(1),
            },
        },
        "raw",
    ),
    "DINO": (
        {
            "student": {**body("module.backbone."), **under("module.head.mlp.", MLP)},
            "teacher": {**body("backbone.", seed=1), **under("head.mlp.", MLP)},
        },
        "raw",
    ),
    "DINO, teacher": (
        {
            "student": {**body("module.backbone.", seed=1), **under("module.head.mlp.", MLP)},
            "teacher": {**body("backbone."), **under("head.mlp.", MLP)},
        },
        "ema",
    ),
    "MAE": ({"model": {**body(""), "mask_token": torch.zeros(1, 1, 6), **under("decoder_blocks.", MLP)}}, "raw"),
}  # fmt: skip


@pytest.mark.parametrize("method", ENCODERS)
def test_an_encoder_is_loaded_without_its_classifier_where_no_logits_are_needed(method: str, mine: Path) -> None:
    content, weights = ENCODERS[method]
    options = {**MINE, "weights": weights}
    path = saved(mine / f"{method}.pth", content)
    headless, fresh = (
        landscape.load(path, **options, **words) for words in ({"logits": False}, {"allow_missing": True})
    )
    assert headless.checkpoint.headless
    for subject in (headless, fresh):
        assert "dropped" in subject.checkpoint.taken
        assert "as initialised 2 (fc.weight, fc.bias)" in subject.checkpoint.taken
        model = subject.model.state_dict()
        assert all(torch.equal(model[name], tensor) for name, tensor in body("").items())
    with pytest.raises(ValueError, match=r"2 missing keys \(fc\.weight, fc\.bias\).*--allow-missing"):
        landscape.load(path, **options)


@pytest.mark.slow
def test_contrastive_and_masked_encoders_are_measured_and_stand_in_one_figure(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(saved(mine / f"{name}.pth", ENCODERS[name][0])) for name in ("MoCo", "MAE")]
    words = ASKED[:-1]
    assert exit_code(["variance", *paths, *words, "--label", "MoCo", "--label", "MAE"]) == 0
    assert capsys.readouterr().err.count("its classifier is not from the checkpoint") == 2
    assert all("dropped" in data.attrs["weights_taken"] for _, data in reader.groups("r.h5"))
    # what needs logits refuses, in one line, unless it is told to take a fresh classifier
    assert exit_code(["noise", paths[0], *words]) == 1
    error = capsys.readouterr().err
    assert (error.count("\n"), "--allow-missing" in error) == (1, True)
    assert exit_code(["plot", "r.h5", "--out", "figures", "--quiet"]) == 0
    assert (mine / "figures" / "variance.png").stat().st_size > 0


def test_missing_weights_are_those_of_the_seed_and_stored(mine: Path) -> None:
    path = saved(mine / "part.pt", body(""))
    subjects = [landscape.load(path, **MINE, allow_missing=True, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (subject.model.state_dict()["fc.weight"] for subject in subjects)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    stored = attributes(subjects[0])
    assert json.loads(str(stored["spec"]))["allow_missing"] is True
    assert "as initialised 2 (fc.weight, fc.bias)" in str(stored["weights_taken"])


# --- programs and pickled modules: the file holds the model itself, and is run on trust alone ---


def script(path: Path) -> Path:
    torch.jit.script(network()).save(path)  # type: ignore[no-untyped-call]
    return path


def exported(path: Path, *, fixed: bool = False) -> Path:
    batch = None if fixed else ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(network(), (torch.randn(4, 3, 8, 8),), dynamic_shapes=batch), path)
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", [script, exported])
def test_a_program_is_the_model_itself_on_trust(
    make: Callable[[Path], Path], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(mine / "program.pt2")
    data = ("--data", "mine.py:data", "--out", "r.h5", "--quiet")
    assert exit_code(["line", str(path), *data]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is a torch" in error.lower()
    assert "--trust-pickle" in error
    subject = landscape.load(path, **DATA, trust_pickle=True)
    torch.testing.assert_close(outputs(subject), expected(subject))
    if make is script:
        program = landscape.load(torch.jit.load(path), **DATA)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(outputs(program), expected(subject))
    assert exit_code(["line", str(path), *data, "--resolution", "2", "--trust-pickle"]) == 0
    assert exit_code(["hessian", str(path), *data, "--top", "1", "--batch-size", "16", "--trust-pickle"]) == 0
    assert landscape.load(path, **MINE, trust_pickle=True).checkpoint is not None
    if make is script:
        assert exit_code(["features", str(path), *data, "--trust-pickle"]) == 1
        assert "the modules of a TorchScript program cannot be hooked; save" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_fixed_batch_size_of_an_export_is_reported(mine: Path) -> None:
    path = exported(mine / "fixed.pt2", fixed=True)
    with pytest.raises(ValueError, match=r"exactly 4, got 16 samples in mini-batches of 128; give --batch-size 4 and"):
        landscape.load(path, **DATA, trust_pickle=True)
    with pytest.raises(ValueError, match=r"give --batch-size 4 and --samples 12"):
        landscape.load(path, **DATA, trust_pickle=True, batch_size=4, samples=14)
    subject = landscape.load(path, **DATA, trust_pickle=True, batch_size=4)
    torch.testing.assert_close(outputs(subject), expected(subject))


def test_a_pickled_module_is_the_model_itself_on_trust(mine: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    path = saved(mine / "whole.pt", net)
    with pytest.raises(ValueError, match=r"would run code to load \(.*torch.nn.modules.* --trust-pickle"):
        landscape.load(path, **DATA)
    subject = landscape.load(path, **DATA, trust_pickle=True)
    assert torch.equal(outputs(subject), net.eval()(subject.batch(0)[0]))
    assert subject.checkpoint.taken == "the pickled module itself"


# --- what the libraries themselves write ---


@pytest.mark.slow
def test_a_folder_of_transformers_itself(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("torchvision"):
        torchvision_models()
    transformers = pytest.importorskip("transformers", exc_type=(ImportError, RuntimeError))
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=4)
    net = transformers.ViTForImageClassification(config).eval()
    net.save_pretrained(mine / "vit", max_shard_size="4KB")
    assert len(list((mine / "vit").glob("*.safetensors"))) > 1
    (mine / "theirs.py").write_text(
        "import transformers\n"
        f"def model(): return transformers.ViTForImageClassification(transformers.ViTConfig(**{sizes!r}, "
        "image_size=8, patch_size=4, num_labels=4))\n"
    )
    subject = landscape.load(mine / "vit", model="theirs.py:model", data="mine.py:data")
    with torch.inference_mode():
        assert torch.equal(subject.model(subject.batch(0)[0]).logits, net(subject.batch(0)[0]).logits)
    base = transformers.ViTModel(config, add_pooling_layer=False)  # the encoder alone lacks the front of every name
    base.save_pretrained(mine / "base")
    subject = landscape.load(mine / "base", model="theirs.py:model", data="mine.py:data", logits=False)
    assert subject.checkpoint.missing == ("classifier.weight", "classifier.bias")


@pytest.mark.slow
def test_a_checkpoint_of_timm_itself(mine: Path) -> None:
    torchvision_models()
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    utils = pytest.importorskip("timm.utils", exc_type=(ImportError, RuntimeError))
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 4}
    net = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    average = utils.ModelEmaV3(net, decay=0.5)
    saver = utils.CheckpointSaver(
        net, torch.optim.SGD(net.parameters()), args=argparse.Namespace(model="vit_tiny_patch16_224", lr=0.1),
        model_ema=average, checkpoint_dir=str(mine), recovery_dir=str(mine),
    )  # fmt: skip
    saver.save_checkpoint(epoch=2, metric=0.5)
    (mine / "theirs.py").write_text(
        f"import timm\ndef model(): return timm.create_model('vit_tiny_patch16_224', **{sizes!r})\n"
    )
    path = next(mine.glob("checkpoint-2.pth.tar"))
    for weights in ("raw", "ema"):
        subject = landscape.load(path, model="theirs.py:model", data="mine.py:data", weights=weights)
        with torch.inference_mode():
            assert torch.equal(outputs(subject), net(subject.batch(0)[0]))
    read = read_checkpoint(path)
    assert (read.arch, read.epoch, read.others) == ("vit_tiny_patch16_224", 2.0, ("state_dict_ema",))


# --- large files ---


@pytest.mark.slow
def test_a_file_is_hashed_once_for_a_probe_and_not_for_a_run_of_snapshots(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, hashed = raw_files.file_sha256, []
    monkeypatch.setattr(raw_files, "file_sha256", lambda path: hashed.append(path) or read(path))
    path = FORMS["Lightning"](mine)
    assert exit_code(["variance", str(path), *ASKED]) == 0
    assert hashed == [path]
    for epoch in range(3):
        saved(mine / f"epoch_{epoch}.pth", state(seed=epoch))
    path.unlink()
    hashed.clear()
    assert exit_code(["trajectory", str(mine), *ASKED]) == 0
    assert len(hashed) == 1  # the last one, which the run is seen from


SHOWN = """
import resource, sys
from landscape.cli.main import exit_code
resource.setrlimit(resource.RLIMIT_AS, (900 * 2**20, resource.RLIM_INFINITY))
for path in sys.argv[1:]:
    assert exit_code(["show", path]) == 0, path
    assert "torch" not in sys.modules, path
"""


@pytest.mark.slow
def test_show_reads_the_outline_alone(mine: Path) -> None:
    """Of a safetensors file of 1 GB, with room for less, and of the others without torch."""
    entry = {"dtype": "F32", "shape": [2**14, 2**14], "data_offsets": [0, 2**30]}
    raw = json.dumps({"weight": entry}).encode()
    with (mine / "large.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + 2**30)  # a hole: no room on the disk either
    for suffix in ("pt", "pth"):
        content = {"state_dict": {"weight": torch.zeros(2**9, 2**9)}}
        torch.save(content, mine / f"large.{suffix}", _use_new_zipfile_serialization=suffix == "pt")
    files = [f"large.{suffix}" for suffix in ("safetensors", "pt", "pth")]
    ended = subprocess.run([sys.executable, "-c", SHOWN, *files], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [ended.stdout.count(f"1 tensor, {2**power:,} numbers") for power in (28, 18)] == [1, 2]


def test_a_file_from_before_batch_norm_counted_its_batches_fits_and_one_of_integers_does_not(mine: Path) -> None:
    torch.save({name: t for name, t in state().items() if "num_batches_tracked" not in name}, "old.pt")
    loaded = landscape.load(mine / "old.pt", **MINE)
    assert torch.equal(outputs(loaded), expected(loaded))
    torch.save({name: (100 * t).to(torch.int8) for name, t in state().items()}, "int8.pt")
    with pytest.raises(ValueError, match=r"int8.pt has stem.weight as int8 and the model as float32: quantized"):
        landscape.load(mine / "int8.pt", **MINE)


def test_a_pickled_module_finds_its_class_where_the_command_runs(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ModuleType("mine")  # as imported by the process that saves it
    exec((mine / "mine.py").read_text(), elsewhere.__dict__)
    with monkeypatch.context() as process:
        process.setitem(sys.modules, "mine", elsewhere)
        torch.save(elsewhere.model(), "whole.pt")
    with monkeypatch.context() as process:
        process.setitem(sys.modules, "mine", elsewhere)  # is put back, whatever is imported here
        del sys.modules["mine"]
        loaded = landscape.load(mine / "whole.pt", **DATA, trust_pickle=True)
        assert sys.modules["mine"].__file__ == str(mine / "mine.py")
        assert type(loaded.model) is sys.modules["mine"].Net
    (mine / "mine.py").rename(mine / "elsewhere.py")
    with pytest.raises(ValueError, match="needs the code of its model, and there is no module named 'mine'; run in"):
        landscape.load(mine / "whole.pt", data="elsewhere.py:data", trust_pickle=True)


@pytest.mark.parametrize(
    ("module", "where"), [("__main__", "of the script that saved it"), ("mine", "of the module mine, which has none")]
)
def test_a_pickled_module_whose_class_is_not_found_names_it(
    mine: Path, module: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, home = type("Lost", (torch.nn.Linear,), {"__module__": module}), ModuleType(module)
    monkeypatch.setitem(sys.modules, module, home)
    vars(home)["Lost"] = kind
    torch.save(kind(2, 2), "whole.pt")
    del vars(home)["Lost"]
    with pytest.raises(ValueError, match=f"needs the class Lost {where}.* name the class with --model file.py:Lost"):
        landscape.load(mine / "whole.pt", **DATA, trust_pickle=True)


def test_a_plain_pickle_says_what_it_is(mine: Path) -> None:
    (mine / "weights.pkl").write_bytes(pickle.dumps({"weight": [1.0, 2.0]}))
    with pytest.raises(ValueError, match=r"is not a readable checkpoint .* expected a file written by torch.save"):
        read_checkpoint(mine / "weights.pkl")
