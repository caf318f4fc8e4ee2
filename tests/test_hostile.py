"""Hostile checkpoints and data: every file ends in one clear line, runs nothing, writes nothing and takes little."""

import argparse
import collections
import json
import os
import pickle
import re
import struct
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import forked
import h5py
import hostile
import numpy as np
import pytest
import torch
from hostile_commands import beside_a_model, everything, refused
from PIL import Image
from safetensors.torch import save_file

import landscape.data
from landscape import models, options
from landscape.checkpoints import file_formats
from landscape.checkpoints.adapters import with_adapter
from landscape.checkpoints.checkpoint import read_checkpoint
from landscape.cli.main import exit_code
from landscape.data import cifar, decoding, memory
from landscape.data.decoding import opened
from landscape.exchange import csv_files
from landscape.exchange.tomgoldstein import read_surface
from landscape.models import huggingface

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return beside_a_model(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", hostile.CODE)
def test_no_checkpoint_runs_code(name: str, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran, path = study / "ran", study / name
    hostile.CODE[name](path, ran)
    before = everything(study)
    own = [] if name.startswith("named") else ["--model", "../mine.py:model", "--data", "../mine.py:data"]
    own += ["--data", "digits"] if name == "named-model.pt" else []
    error = refused(["trace", str(path), *own, "--out", "r.h5"], capsys)
    assert str(path) in error
    assert not ran.exists()
    assert everything(study) == before
    if not name.startswith(("named", "script")):
        error = refused(["show", str(path)], capsys)
        assert "would run code" in error or "is not a readable checkpoint" in error
    assert not ran.exists()


BOUNDED = """
import contextlib, io, json, resource, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import hostile
from landscape.cli.main import exit_code
folder = Path(sys.argv[2])
for name, make in hostile.ABSURD.items():
    make(folder / name)
limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2 * 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
own = ["--model", str(folder / "../mine.py:model"), "--data", str(folder / "../mine.py:data")]
for name in hostile.ABSURD:
    for command in ("trace", "show"):
        words = [command, str(folder / name)]
        words += ([] if name.startswith("far") else own) + ["--out", str(folder / "r.h5")] if command == "trace" else []
        error = io.StringIO()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = exit_code(words)
        print(json.dumps([name, command, code, error.getvalue()]), flush=True)
"""


@pytest.mark.campaign
def test_absurd_files_are_refused_within_bounds(study: Path) -> None:
    """In a process that may take 2 GiB and two minutes of processor time for all of them."""
    folder = study / "corpus"
    folder.mkdir()
    ended = forked.Popen(["-c", BOUNDED, str(Path(__file__).parent), str(folder)])
    out, errors = ended.communicate(timeout=600)
    assert ended.returncode == 0, errors[-2000:]
    told = [json.loads(line) for line in out.splitlines()]
    assert len(told) == 2 * len(hostile.ABSURD)
    # what only a look at the tensors tells, and what is fine to show: shapes, and plain data beside the weights
    shown = {
        *("expanded.pt", "expanded-far.pt", "meta.pt", "sparse.pt", "pointer.pt", "far-model.pt", "far-images.pt"),
        *("far-mean.pt", "shape.safetensors", "overflow.safetensors", "negative.safetensors", "dtype.safetensors"),
    }
    wrong = [
        (name, command, code, error)
        for name, command, code, error in told
        if not (code == 1 and re.fullmatch(r"landscape: .+\n", error) and "Error:" not in error)
        and not (command == "show" and name in shown and code == 0)
        and not (name == "pointer.pt" and code == 0)  # an array of pointers beside good weights is never made
    ]
    assert wrong == []


@pytest.mark.parametrize(("number", "name"), list(enumerate(hostile.EXPLODING)))
def test_a_pickle_cannot_ask_for_work_without_end(number: int, name: str, tmp_path: Path) -> None:
    """Containers that are hashed, compared or printed at twice the cost per level, keys of one hash, copies."""
    path = tmp_path / "a.pt"
    if number % 2:
        hostile.zipped(path, hostile.EXPLODING[name])
    else:
        start = [pickle.dumps(content, 2) for content in (0x1950A86A20F9469CFC6C, 1001, {})]
        path.write_bytes(b"".join(start) + hostile.EXPLODING[name])
    for read in (file_formats.outline_of, read_checkpoint):
        with pytest.raises(ValueError, match="is not a readable checkpoint") as caught:
            read(path)
        assert str(caught.value).isprintable()


def test_checkpoints_with_what_resembles_a_bomb_are_read(tmp_path: Path) -> None:
    """Shared values, tuples as keys, counters, sets, byte arrays, numbers of a generator's state."""
    shared = [1, 2, 3]
    content = {
        "state_dict": {"weight": torch.ones(2, 3)},
        "hyper": argparse.Namespace(steps=[shared] * 50, seed=2**127),
        "epoch": 10**400,
        "done": {(i, "x"): collections.Counter(a=i) for i in range(100)},
        "other": [{1, 2}, bytearray(b"abc"), collections.OrderedDict(a=shared), complex(1, 2), 10**100],
    }
    for zipped in (True, False):
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        assert read_checkpoint(tmp_path / "a.pt").taken == "state_dict"


def test_an_archive_with_two_files_of_one_name_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    """One reader would take the first, another the second."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name in ("archive/data.pkl", "archive/DATA.pkl"):
            archive.writestr(name, b"\x80\x02}.")
    with pytest.raises(ValueError, match="two files of one name"):
        read_checkpoint(tmp_path / "a.pt")
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes().replace(b"a/data/0", b"\x80/data/0", 1))
    with pytest.raises(ValueError, match="is not a readable checkpoint") as caught:
        read_checkpoint(path)
    assert not isinstance(caught.value, UnicodeDecodeError)


def test_a_turned_bit_in_a_weight_of_an_archive_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.full((64,), 1.25)}, path)
    whole = path.read_bytes()
    turned = bytearray(whole)
    turned[whole.index(struct.pack("<f", 1.25) * 2) + 40] ^= 4
    path.write_bytes(turned)
    with pytest.raises(ValueError, match=r"data/0' in it is damaged: Bad CRC-32.*copy it again"):
        read_checkpoint(path)


def test_an_archive_without_check_sums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert not any(member.CRC for member in archive.infolist())
    assert read_checkpoint(tmp_path / "a.pt").state_dict["weight"].sum() == 3


# --- damage: cut at every kilobyte, bits turned, noise ---


def saved(path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of the format that its suffix says, .pth the older one of torch."""
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=path.suffix == ".pt")
    return path


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_a_checkpoint_cut_anywhere_is_refused(suffix: str, tmp_path: Path) -> None:
    path = saved(tmp_path / f"file{suffix}", {f"layer{i}.weight": torch.randn(30, 30) for i in range(12)})
    whole = path.read_bytes()
    # a name cut in two is one that is not allowed
    refusal = r"is not a readable (checkpoint|safetensors file)|would run code"
    for length in [*range(0, len(whole), 1024), *(int(share * len(whole)) for share in (0.001, 0.1, 0.5, 0.9, 0.999))]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=refusal) as caught:
            read_checkpoint(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_a_checkpoint_with_a_bit_turned_is_read_or_refused(suffix: str, tmp_path: Path) -> None:
    generator, said = np.random.default_rng(0), []
    path = saved(tmp_path / f"file{suffix}", {"layer.weight": torch.randn(5, 5), "layer.bias": torch.randn(5)})
    whole = path.read_bytes()
    for position in generator.integers(len(whole), size=150):
        turned = bytearray(whole)
        turned[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(turned)
        try:
            read_checkpoint(path)
        except ValueError as error:
            said.append(str(error))
    assert said
    assert not [text for text in said if "\n" in text]


def test_noise_is_refused(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for i, start in enumerate([b"", b"PK\x03\x04", b"\x80\x02", b"\x89HDF\r\n\x1a\n", b"\x80\x04\x95"] * 8):
        path = tmp_path / f"{i}.pt"
        path.write_bytes(start + generator.bytes(3000))
        with pytest.raises(ValueError, match=r"is not a readable checkpoint|would run code"):
            read_checkpoint(path)


# --- models ---


def test_a_network_of_millions_of_layers_is_not_begun() -> None:
    with pytest.raises(ValueError, match="depth must be at most 1,000, got 1000000"):
        models.build("vit_demo", classes=10, image_size=32, depth=10**6)
    with pytest.raises(ValueError, match="one whole number per stage"):
        models.build("resnet_demo", classes=10, image_size=32, blocks=[1] * 10**6)


def described(folder: Path, config: dict[str, object]) -> Path:
    """A folder as Hugging Face libraries write it, of a few weights."""
    hostile.hugging_face(folder, hostile.weights())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "vit"}, "declares a ViTForImageClassification of 343,200,776 bytes in a file of [0-9,]+ bytes"),
        ({"model_type": "vit", "hidden_size": 120_000}, "declares a ViTForImageClassification of 2,800,707,507,464"),
        ({"model_type": "vit", "hidden_size": 12, "num_hidden_layers": 9000}, "of more than 50,000 modules; refused"),
        ({"model_type": "clip", "vision_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers 1,000,000,000"),
        ({"model_type": "resnet", "depths": [9000] * 1000}, "has depths 9,000,000, expected at most 10,000"),
    ],
)
def test_a_folder_describes_no_larger_network_than_its_weights_allow(
    config: dict[str, object], said: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder = described(tmp_path / "net", config)
    with pytest.raises(ValueError, match=said) as refusal:
        huggingface.build(str(folder), {}, classes=None, image_size=None, weights="modules" not in said)
    assert str(refusal.value).startswith(str(folder))


def test_a_configuration_alone_describes_no_larger_network_than_there_is_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "vit", "hidden_size": 120000}')
    with pytest.raises(ValueError, match=r"which needs 2\.8 TB of memory, and .* is free"):
        huggingface.build(str(tmp_path), {}, classes=None, image_size=None, weights=False)


@pytest.mark.parametrize(
    ("name", "bytes_"), [("vit_giant_patch14_reg4_dinov2", "4,545,935,360"), ("vit_h_14", "2,533,881,760")]
)
def test_a_file_names_no_larger_network_of_a_library_than_its_weights_allow(
    name: str, bytes_: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchvision" if name == "vit_h_14" else "timm")
    torch.save({"arch": name, "state_dict": hostile.weights()}, study / "a.pt")
    error = refused(["trace", str(study / "a.pt"), "--data", "../mine.py:data", "--out", "r.h5", "--quiet"], capsys)
    assert re.search(rf"a\.pt declares a (timm|torchvision):{name} of {bytes_} bytes in a file of [0-9,]+ bytes", error)


# --- data ---


def test_scattered_points_do_not_become_a_grid_of_all_their_coordinates(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(300, len(csv_files.COLUMNS)))
    np.savetxt(tmp_path / "points.csv", rows, delimiter=",")
    with pytest.raises(ValueError, match=r"300 points at 300 x 300 coordinates, expected a grid"):
        csv_files.read_surface(tmp_path / "points.csv")


def test_large_pictures_are_decoded_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(tmp_path / f"{i}.png") for i in range(4 * decoding.CHUNK)]
    for name in names:
        Image.new("L", (40, 40)).save(name)
    monkeypatch.setattr(decoding, "_room", decoding._Room(decoding.PIXEL_BYTES * 40 * 40))
    now, most, plain = [0], [0], decoding.pixels

    def counted(*arguments: object) -> np.ndarray:
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.001)
        now[0] -= 1
        return plain(*arguments)

    monkeypatch.setattr(decoding, "pixels", counted)
    pictures = [decoding.Picture(i, name, name) for i, name in enumerate(names)]
    decoding.decoded(pictures, name="x", count=len(names), of=len(names), size=8, threads=4)
    assert most[0] == 1


def test_a_batch_of_images_cannot_ask_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")  # an index into a memo of 2**31 entries
    with pytest.raises(ValueError, match="holds a list"):
        cifar.read_batch(path)


def test_a_picture_is_of_a_format_of_pictures_and_fits_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostScript would start an interpreter."""
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(path, "EPS")
    with pytest.raises(ValueError, match=r"a\.png cannot be decoded"):
        opened(str(path), str(path))
    Image.new("L", (400, 300)).save(tmp_path / "a.png")
    monkeypatch.setattr(decoding, "_room", decoding._Room(0))
    monkeypatch.setattr(memory, "available", lambda: 500_000)
    picture = decoding.Picture(0, str(tmp_path / "a.png"), str(tmp_path / "a.png"))
    with pytest.raises(ValueError, match=r"a\.png has 400 x 300 pixels, which need .* is free; make it smaller"):
        decoding.decoded([picture], name="x", count=1, of=1, size=8)


def test_an_imported_surface_keeps_its_numbers_in_its_own_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(np.ones(3).tobytes())
    with h5py.File(tmp_path / "surface.h5", "w") as file:
        file["xcoordinates"] = np.arange(3.0)
        file.create_dataset("train_loss", (3,), "f8", external=[(str(secret), 0, 24)])
    with pytest.raises(ValueError, match="keeps the numbers of /train_loss in another file"):
        read_surface(tmp_path / "surface.h5")


@pytest.mark.parametrize("probe", ["surface", "line"])
def test_a_grid_without_end_is_refused(probe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([probe, "--model", "resnet_demo", "--data", "noise", "--resolution", "1000000000"]) == 2
    assert "at most 5,000 points" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["hessian"], ["show"], ["layers"]])
def test_names_of_and_in_files_do_not_reach_the_terminal_as_commands(
    words: list[str], study: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of files, keys, and classes that a pickle asks for: escape sequences clear the screen or set its title."""
    wanted = b"\x80\x02cos\x1b[2J\nsys\x1b]0;title\x07tem\n."
    for name, content in (
        ("keys.pt", {"\x1b[2J": torch.ones(3), "a\x1b]0;x\x07b": torch.ones(2)}),
        ("pickle.pt", wanted),
    ):
        path = study / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save({"model": content, "epoch": "\x1b[31m"}, path)
        exit_code([*words, str(path)])
        shown = "".join(capfd.readouterr())
        assert shown
        assert "\x1b" not in shown
        assert "\x07" not in shown


def optimizer(path: Path, **changed: object) -> None:
    model = torch.nn.Linear(4, 300)
    made = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    made.step()
    state = made.state_dict()
    state["param_groups"][0].update(changed)
    torch.save({"model": model.state_dict(), "optimizer": state}, path)


def processor(folder: Path, content: dict[str, object]) -> None:
    hostile.hugging_face(folder, hostile.weights())
    (folder / "config.json").write_text('{"image_size": 8, "model_type": "vit"}')
    (folder / "preprocessor_config.json").write_text(json.dumps(content))


def deep(folder: Path) -> None:
    """Class folders in which folders lie 1,500 deep."""
    places = [folder / "a", *[Path("d")] * 1500]
    back = os.open(".", os.O_RDONLY)
    for place in places:
        place.mkdir(parents=True)
        os.chdir(place)
    os.fchdir(back)
    os.close(back)


UNCLEAR: dict[str, tuple[str, Callable[[Path], object]]] = {  # what ended in a TypeError and the like: words, the file
    "far.safetensors": (
        "trace",
        lambda p: hostile.header(p, 0, {"w": hostile.entry([4], end=float("inf"))}, bytes(16)),
    ),  # type: ignore[arg-type]
    "shape.safetensors": ("trace", lambda p: hostile.header(p, 0, {"w": hostile.entry([[4]])}, bytes(16))),  # type: ignore[list-item]
    "rate.pt": ("step", lambda p: optimizer(p, lr=None)),
    "text.pt": ("step", lambda p: optimizer(p, lr="fast")),
    "pair.pt": ("step", lambda p: optimizer(p, betas=(0.9, None))),
    "decay.pt": ("step", lambda p: optimizer(p, weight_decay=None)),
    "means": ("processor", lambda p: processor(p, {"image_mean": [None] * 3, "size": 8})),
    "sizes": ("processor", lambda p: processor(p, {"size": {"shortest_edge": None}})),
    "longest": ("processor", lambda p: processor(p, {"size": [], "resample": 99})),
    "deep": ("data", deep),
    "sequence.npy": ("array", lambda p: p.write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': [], 'fortran_order': 1")),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_an_error_of_a_library_is_one_line_that_names_the_file(
    name: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, make = UNCLEAR[name]
    path = study / name
    make(path)
    own = ["--model", "../mine.py:model", "--data", "../mine.py:data", "--out", "r.h5"]
    words = {
        "data": ["trace", "--model", "../mine.py:model", "--data", str(path), "--out", "r.h5"],
        "processor": ["trace", "--model", f"hf:{path}", "--data", "digits", "--out", "r.h5"],
        "array": ["trace", "--model", "../mine.py:model", "--data", f"{path},{path}", "--out", "r.h5"],
    }.get(kind, [kind, str(path), *own, "--quiet"])
    try:
        error = refused(words, capsys)
    finally:
        subprocess.run(["rm", "-r", path], check=True)  # pytest's own removal recurses, and ends where folders are deep
    assert str(path) in error
    assert "--debug" not in error


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r": 2 * 10**8}, "declares the rank 200000000, and its tensors have at most 4"),
        ({"r": "four"}, "declares the rank four"),
        ({"rank_pattern": {"query": 10**9}}, "declares the rank 1000000000"),
        ({"rank_pattern": [1]}, "AttributeError"),
        ({"target_modules": "(a+)+$"}, "takes too long to match"),
        ({"alpha_pattern": {"(a|a)*b": 4}}, "takes too long to match"),
    ],
)
def test_adapters_are_checked_before_they_are_built(
    changed: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MATCHING_SECONDS", 0.2)
    model, weights = torch.nn.ModuleDict({"a" * 40 + "c": torch.nn.Linear(4, 4)}), {"lora_A": torch.ones(2, 4)}
    given = {"peft_type": "LORA", "r": 2, "target_modules": ["query"], **changed}
    with pytest.raises(ValueError, match=said) as caught:
        with_adapter(model, given, weights, tmp_path / "tuned", merged=True)
    assert str(tmp_path / "tuned") in str(caught.value)


def test_an_adapter_of_long_columns_is_no_larger_than_its_file_allows(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    weights = {"base_model.model.0.lora_A.weight": torch.ones(10**6, 1)}
    with pytest.raises(ValueError, match=r"tuned declares an adapter of 1,216,000,000 bytes in a file of 4,000,000"):
        with_adapter(
            torch.nn.Sequential(torch.nn.Linear(4, 300)), {"peft_type": "LORA", "r": 10**6, "target_modules": ["0"]},
            weights, tmp_path / "tuned", merged=True,
        )  # fmt: skip


def test_a_picture_of_parquet_that_unpacks_to_far_more_than_the_file_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"image": [bytes(80 * 2**20)], "label": [0]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(ValueError, match=r"a\.parquet declares pictures of .* bytes; refused"):
        landscape.data.load(str(tmp_path / "a.parquet"))
