"""Checkpoints: ours there and back, every foreign form, and files that are refused without running anything."""

import argparse
import collections
import functools
import importlib.metadata
import os
import pickle
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from hostile import Call
from safetensors.torch import save_file
from torch import Tensor, nn

import landscape
from landscape.checkpoints import raw_files
from landscape.checkpoints.checkpoint import (
    newest_checkpoint,
    read_checkpoint,
    save_atomically,
    state_dict_sha256,
    write_checkpoint,
)
from landscape.checkpoints.file_names import label_of
from landscape.checkpoints.state_dict_loading import load_into

KEYS = ["format", "model", "model_args", "state_dict", "data", "recipe", "epoch", "metrics", "seed", "versions"]


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network().state_dict().items()}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def contents() -> dict[str, Any]:
    data = {"name": "digits", "classes": 10, "size": 16, "mean": (0.1,) * 3, "std": (0.2,) * 3}
    return {
        "model": "resnet_demo", "model_args": {"blocks": (1, 1), "classes": 10}, "state_dict": network().state_dict(),
        "data": data, "recipe": {"name": "demo", "lr": 1e-3}, "epoch": 2.5, "metrics": {"accuracy": 0.75}, "seed": 3,
    }  # fmt: skip


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def loaded(path: Path, content: object, model: nn.Module | None = None) -> dict[str, Tensor]:
    """The weights of a model, here of other ones than are stored, that was loaded from such a file."""
    model = model or network(seed=1)
    load_into(model, read_checkpoint(saved(path, content)))
    return dict(model.state_dict())


# --- ours ---


def test_what_is_written_is_read(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = tmp_path / "run" / "final.pt"
    write_checkpoint(path, **contents())
    found = read_checkpoint(path)
    assert_same(found.state_dict, weights)
    given = contents()
    for name in ("model", "model_args", "data", "recipe", "epoch", "metrics", "seed"):
        assert getattr(found, name) == given[name]
    assert found.native
    assert found.versions["torch"] == importlib.metadata.version("torch")
    assert found.sha256 == raw_files.file_sha256(path)
    assert [file.name for file in path.parent.iterdir()] == ["final.pt"]


def test_a_file_is_plain_data_in_the_order_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "final.pt"
    write_checkpoint(path, **contents())
    content = torch.load(path, weights_only=True)  # with torch's own list of harmless globals
    assert list(content) == KEYS
    assert content["format"] == 1
    assert isinstance(content["epoch"], float)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []


def test_a_stored_tensor_is_no_view_of_a_larger_one(tmp_path: Path) -> None:
    content = {**contents(), "state_dict": {"weight": torch.zeros(1_000_000)[:10]}}
    write_checkpoint(tmp_path / "final.pt", **content)
    assert (tmp_path / "final.pt").stat().st_size < 10_000


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "final.pt"
    write_checkpoint(path, **contents())
    before = path.read_bytes()
    with pytest.raises((pickle.PicklingError, AttributeError)):
        save_atomically({"weights": torch.zeros(3), "code": lambda: None}, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


FULL = """
import resource, sys, torch
from pathlib import Path
from landscape.checkpoints.checkpoint import save_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    save_atomically({"weights": torch.zeros(100_000)}, Path(sys.argv[1]))
except OSError as error:
    print(error)
"""


def test_a_checkpoint_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_checkpoint(tmp_path / "a.pt", **contents())
    finally:
        os.umask(before)
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "final.pt", {"weights": torch.ones(3)})
    before = path.read_bytes()
    out, errors = forked.Popen(["-c", FULL, str(path)]).communicate()
    assert out.startswith(f"cannot write {path}: "), errors
    assert out.count("\n") == 1
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_state_dict_sha256_is_of_the_weights_not_of_the_file(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    wanted = state_dict_sha256(weights)
    write_checkpoint(tmp_path / "a.pt", **contents())
    saved(tmp_path / "b.pt", dict(reversed(list(weights.items()))))
    save_file(weights, tmp_path / "c.safetensors")
    torch.save(weights, tmp_path / "d.pth", _use_new_zipfile_serialization=False)
    found = {state_dict_sha256(read_checkpoint(file).state_dict) for file in tmp_path.iterdir()}
    assert found == {wanted}
    transposed = {**weights, "3.weight": weights["3.weight"].T.contiguous().T}  # other strides, equal values
    assert state_dict_sha256(transposed) == wanted


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {**w, "0.bias": w["0.bias"] + 1e-6},
        lambda w: {**w, "0.bias": w["0.bias"].double()},
        lambda w: {**w, "3.weight": w["3.weight"].reshape(4, 2)},
        lambda w: {("1.b" if name == "0.bias" else name): tensor for name, tensor in w.items()},
        lambda w: {name: tensor for name, tensor in w.items() if name != "0.bias"},
        lambda w: {**w, "1.num_batches_tracked": w["1.num_batches_tracked"] + 1},
    ],
)
def test_state_dict_sha256_sees_every_change(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], weights: dict[str, Tensor]
) -> None:
    assert state_dict_sha256(change(weights)) != state_dict_sha256(weights)


# --- foreign forms ---


@pytest.mark.parametrize("container", ["", "state_dict", "model", "model_state_dict", "net", "params", "module"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod.", "model.module."])
def test_containers_and_wrappers_are_looked_through(
    container: str, prefix: str, tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    wrapped = {f"{prefix}{name}": tensor for name, tensor in weights.items()}
    path = saved(tmp_path / "foreign.pth", {container: wrapped, "epoch": 7} if container else wrapped)
    found = read_checkpoint(path)
    assert not found.native
    assert found.taken == (container or "the file itself")
    assert found.epoch == 7 or not container
    model = network(seed=1)
    load_into(model, found)
    assert_same(dict(model.state_dict()), weights)


def test_harmless_things_of_real_checkpoints_are_read(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    counts = collections.defaultdict(list)
    counts["a"].append(1)
    around = {
        "args": argparse.Namespace(lr=0.1, data=Path("/data"), betas=(0.9, 0.95)),
        "best": np.float64(0.5),
        "step": np.int64(3),
        "history": np.arange(6.0).reshape(2, 3),
        "counts": counts,
        "votes": collections.Counter("aab"),
        "names": collections.OrderedDict(a=1),
        "classes": {1, 2},
    }
    allowed = set(torch.serialization.get_safe_globals())
    found = read_checkpoint(saved(tmp_path / "timm.pth.tar", {"state_dict": weights, "arch": "vit", **around}))
    assert_same(found.state_dict, weights)
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.slow
def test_threads_read_at_the_same_time(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = saved(tmp_path / "timm.pth.tar", {"state_dict": weights, "args": argparse.Namespace(lr=0.1)})
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(read_checkpoint, [path] * 50):
            assert_same(found.state_dict, weights)


@pytest.mark.parametrize("container", ["state_dict", "model"])
def test_the_moving_average_is_taken_when_asked_for(container: str, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    average = {name: tensor * 2 for name, tensor in weights.items()}
    path = saved(tmp_path / "timm.pth", {container: weights, f"{container}_ema": average})
    raw, found = read_checkpoint(path), read_checkpoint(path, weights="ema")
    assert_same(raw.state_dict, weights)
    assert (raw.taken, raw.others) == (container, (f"{container}_ema",))
    assert_same(found.state_dict, average)
    assert found.taken == f"{container}_ema"
    with pytest.raises(ValueError, match=r"has no moving average \(state_dict_ema, model_ema, .*\); drop --weights"):
        read_checkpoint(saved(tmp_path / "none.pth", {container: weights}), weights="ema")


def test_weights_are_brought_into_the_models_precision(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    half = {name: t.half() if t.is_floating_point() else t for name, t in weights.items()}
    assert_same(loaded(tmp_path / "half.pt", half), {name: t.to(weights[name].dtype) for name, t in half.items()})


# --- weights that do not fit ---


def test_a_mismatch_lists_what_is_missing_and_what_is_unexpected(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    other = {("extra.weight" if name == "3.bias" else name): tensor for name, tensor in weights.items()}
    found = read_checkpoint(saved(tmp_path / "other.pt", other))
    model = network(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"1 missing keys \(3.bias\), 1 unexpected keys \(extra.weight\); .*--model"):
        load_into(model, found)
    assert_same(dict(model.state_dict()), before)


def test_weights_that_the_first_pass_would_make_have_the_shapes_of_the_file(tmp_path: Path) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))

    trained, inputs = lazy(), torch.rand(5, 3)
    trained(inputs)
    weights = {f"module.{name}": tensor for name, tensor in trained.state_dict().items()}
    model = lazy()
    load_into(model, read_checkpoint(saved(tmp_path / "lazy.pt", weights)))
    assert_same(dict(model.state_dict()), dict(trained.state_dict()))
    assert torch.equal(model.eval()(inputs), trained.eval()(inputs))
    named = "nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))"
    (tmp_path / "mine.py").write_text(f"from torch import nn\ndef lazy(): return {named}\n")
    how: dict[str, Any] = {"model": f"{tmp_path / 'mine.py'}:lazy", "data": (inputs, torch.arange(5) % 2)}
    assert_same(dict(landscape.load(tmp_path / "lazy.pt", **how).model.state_dict()), dict(trained.state_dict()))
    del weights["module.0.weight"]
    with pytest.raises(ValueError, match=r"1 missing keys \(0.weight\)"):
        load_into(lazy(), read_checkpoint(saved(tmp_path / "less.pt", weights)))


# --- files that would run code ---


class Stateful:
    """A call by way of an object's state."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return collections.OrderedDict, (), None, None, iter([("x", Call(os.system, self.command))])


ATTACKS: dict[str, Callable[[str], object]] = {
    "os.system": lambda command: Call(os.system, command),
    "subprocess": lambda command: Call(subprocess.getoutput, command),
    "eval": lambda command: Call(eval, f"__import__('os').system({command!r})"),
    "exec": lambda command: Call(exec, f"import os; os.system({command!r})"),
    "partial": lambda command: Call(functools.partial(os.system, command)),
    "getattr": lambda command: Call(getattr, Call(importlib.import_module, "os"), "system"),
    "nested": lambda command: {"state_dict": {"weight": torch.ones(2), "bias": Call(os.system, command)}},
    "beside": lambda command: {"state_dict": {"weight": torch.ones(2)}, "args": [Call(os.system, command)]},
    "state": Stateful,
    "defaultdict": lambda command: Call(collections.defaultdict, Call(os.system, command)),
    "numpy": lambda command: np.array([Call(os.system, command)], dtype=object),
    "torch.hub": lambda command: Call(torch.hub.load, command, "model"),
}


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_would_run_code_is_refused_by_name_and_not_run(
    attack: str, new_format: bool, tmp_path: Path
) -> None:
    ran, path = tmp_path / "ran", tmp_path / "evil.pt"
    torch.save(ATTACKS[attack](f"touch {ran}"), path, _use_new_zipfile_serialization=new_format)
    message = r"would run code to load \(.+\); refused.*state_dict\(\).*--trust-pickle"
    with pytest.raises(ValueError, match=message) as e:
        read_checkpoint(path)
    named = {"partial": "functools.partial", "getattr": "getattr", "eval": "eval", "exec": "exec"}
    named |= {"subprocess": "getoutput", "torch.hub": "torch.hub"}  # pickle calls subprocess by its name in Python 2
    assert named.get(attack, "system") in str(e.value)
    assert "\n" not in str(e.value)
    assert not ran.exists()


# --- files that are no checkpoints ---


PART = {"state_dict": {"w": torch.ones(1)}}
NO_CHECKPOINTS: dict[str, tuple[object, str]] = {  # bytes as they are, objects by torch.save
    "text": (
        b"epoch,loss\n1,0.5\n",
        r"is not a readable checkpoint \(neither an archive nor a pickle",
    ),
    "empty": (b"", r"is not a readable checkpoint"),
    "zeros": (bytes(5000), r"is not a readable checkpoint"),
    "zip": (b"PK\5\6" + bytes(18), r"is not a readable checkpoint"),
    "list": ([1, 2], r"holds a list, expected a dict of tensors"),
    "tensor": (torch.ones(3), r"holds a Tensor, expected a dict of tensors"),
    "no weights": ({"lr": 0.1, "b": 2}, r"holds no weights: .* got the keys lr, b"),
    "nothing": ({}, r"holds no weights"),
    "a key that is no text": ({"a\x1b[2J": 1}, r"got the keys a\ufffd\[2J"),
    "newer": ({"format": 2, "model": "vit_demo", "weights": {}}, r"format 2, this version reads format 1; update lan"),
    "incomplete": ({"format": 1, "model": "vit_demo", **PART}, r"lacks the entry 'model_args' of a format-1 check"),
    "other kinds": ({**dict.fromkeys(KEYS, "x"), "format": 1, **PART}, r"format-1 checkpoint: an entry has another"),
    "folder": (Path, r"is a folder, expected a checkpoint file such as .*final.pt"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    content, message = NO_CHECKPOINTS[kind]
    path = tmp_path / "file.pt"
    if content is Path:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        saved(path, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none.pt; give an existing file, or make one"):
        read_checkpoint(tmp_path / "none.pt")


# --- names ---


def test_the_newest_final_is_found_below_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no final.pt under .*; name one, or make one: landscape train"):
        newest_checkpoint(tmp_path)
    for age, name in enumerate(("b/final.pt", "a/deep/final.pt", "c/epoch_001.pt", "c/final.pt")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    assert newest_checkpoint(tmp_path) == tmp_path / "b/final.pt"
    os.utime(tmp_path / "c/final.pt")
    assert newest_checkpoint(tmp_path) == tmp_path / "c/final.pt"


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("checkpoints/vit_demo-digits/final.pt", "vit_demo-digits"),
        ("checkpoints/vit_demo-digits/epoch_012.pt", "vit_demo-digits-epoch_012"),
        ("checkpoints/vit_demo-digits/init.pt", "vit_demo-digits-init"),
        ("checkpoints/vit_demo-digits/warmup.pt", "vit_demo-digits-warmup"),
        ("checkpoints/vit_demo-digits/final_ema.pt", "vit_demo-digits-final_ema"),
        ("downloads/deit_tiny.pth", "deit_tiny"),
    ],
)
def test_labels_follow_from_paths(path: str, label: str) -> None:
    assert label_of(Path(path)) == label


def test_t7_is_a_file_of_torch_save_or_named_as_one_of_lua(tmp_path: Path) -> None:
    content = {"net": {"weight": torch.ones(2)}, "epoch": 3}
    for new_format in (True, False):
        torch.save(content, tmp_path / "w.t7", _use_new_zipfile_serialization=new_format)
        assert read_checkpoint(tmp_path / "w.t7").epoch == 3
    for lua in (b"\x04\0\0\0\x01\0\0\0\x03\0\0\0V 1" * 9, b"4\n1\n3\nV 1\n13\nnn.Sequential\n"):
        (tmp_path / "lua.t7").write_bytes(lua)
        with pytest.raises(ValueError, match=r"lua.t7 is not a readable checkpoint \(a .t7 that torch.save did not wr"):
            read_checkpoint(tmp_path / "lua.t7")
