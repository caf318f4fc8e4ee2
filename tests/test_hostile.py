"""The hostile corpus: every file ends in one clear line, runs nothing, writes nothing and takes little."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import h5py
import hostile
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from landscape import models
from landscape.checkpoints import file_formats, raw_files
from landscape.checkpoints.checkpoint import read_checkpoint
from landscape.cli.main import exit_code
from landscape.data import cifar, decoding, memory
from landscape.data.decoding import opened
from landscape.exchange import park2022_csv
from landscape.exchange.tomgoldstein import read_surface
from landscape.models import huggingface
from landscape.probe import Plan, Quantity
from landscape.results import reader
from landscape.results.journal import Journal, Record
from landscape.results.orphans import merge_orphans
from landscape.results.run_key import RunKey
from landscape.results.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
MODEL = """import torch
def model(): return torch.nn.Linear(4, 300)
def data(): return torch.ones(8, 4), torch.ones(8).long()
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, entered, with a model and data beside it."""
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    return tmp_path


def everything(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command ends."""
    capsys.readouterr()
    assert exit_code(words) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"landscape: .+\n", said.err)
    assert len(said.err) < 800
    return said.err


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


@pytest.mark.slow
def test_absurd_files_are_refused_within_bounds(study: Path) -> None:
    """In a process that may take 2 GiB and two minutes of processor time for all of them."""
    folder = study / "corpus"
    folder.mkdir()
    words = [sys.executable, "-W", "ignore", "-c", BOUNDED, str(Path(__file__).parent), str(folder)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = [json.loads(line) for line in ended.stdout.splitlines()]
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


def test_two_files_of_one_name_in_an_archive_are_refused(tmp_path: Path) -> None:
    """One reader would take the first, another the second."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name in ("archive/data.pkl", "archive/DATA.pkl"):
            archive.writestr(name, b"\x80\x02}.")
    with pytest.raises(ValueError, match="two files of one name"):
        read_checkpoint(tmp_path / "a.pt")


def test_a_turned_bit_in_a_weight_of_an_archive_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.full((64,), 1.25)}, path)
    whole = path.read_bytes()
    turned = bytearray(whole)
    turned[whole.index(struct.pack("<f", 1.25) * 2) + 40] ^= 4
    path.write_bytes(turned)
    with pytest.raises(ValueError, match=r"data/0' in it is damaged: Bad CRC-32.*copy it again"):
        read_checkpoint(path)


def test_a_damaged_name_in_an_archive_is_said_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes().replace(b"a/data/0", b"\x80/data/0", 1))
    with pytest.raises(ValueError, match="is not a readable checkpoint") as caught:
        read_checkpoint(path)
    assert not isinstance(caught.value, UnicodeDecodeError)


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


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_a_checkpoint_cut_anywhere_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{suffix}"
    weights = {f"layer{i}.weight": torch.randn(30, 30) for i in range(12)}
    if suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=suffix == ".pt")
    whole = path.read_bytes()
    for length in range(0, len(whole), 1024):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"is not a readable|would run code") as caught:
            read_checkpoint(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_a_checkpoint_with_a_bit_turned_is_read_or_refused(suffix: str, tmp_path: Path) -> None:
    path, generator = tmp_path / f"file{suffix}", np.random.default_rng(0)
    weights = {"layer.weight": torch.randn(5, 5), "layer.bias": torch.randn(5)}
    if suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=suffix == ".pt")
    whole = path.read_bytes()
    outcomes, said = {"read": 0, "refused": 0}, []
    for position in generator.integers(len(whole), size=150):
        turned = bytearray(whole)
        turned[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(turned)
        try:
            read_checkpoint(path)
            outcomes["read"] += 1
        except ValueError as error:
            outcomes["refused"] += 1
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


# --- results files ---


def run_key(label: str = "net", digest: str = "0123456789", size: int = 3) -> RunKey:
    plan = Plan(over={"unit": np.arange(size)}, quantities={"loss": Quantity("loss", "nats")})
    return RunKey("variance", label, digest, plan, {"parameters": "{}"})


def stored(path: Path) -> Path:
    """A results file with one result."""
    key = run_key()
    with Writer(path, key) as writer:
        for unit in writer.pending():
            writer.write(unit, {"loss": 1.0})
    return path


def changed(path: Path, change: Callable[[h5py.Group], object]) -> Path:
    with h5py.File(stored(path), "r+") as file:
        change(file["variance/net-0123456789"])
    return path


def virtual(group: h5py.Group, source: Path) -> None:
    layout = h5py.VirtualLayout(shape=(3,), dtype="f8")
    layout[:] = h5py.VirtualSource(str(source), "x", shape=(3,))
    group.create_virtual_dataset("far", layout)


REACHING_OUT: dict[str, Callable[[h5py.Group, Path], object]] = {
    "external": lambda group, secret: group.create_dataset("far", (3,), "f8", external=[(str(secret), 0, 24)]),
    "virtual": virtual,
    "rows": lambda group, secret: group.create_dataset("far", (10**12,), "f8", chunks=(1024,)),
    "bytes": lambda group, secret: group.create_dataset("far", (2**28,), "u1", chunks=(1024,), compression="gzip"),
}


@pytest.mark.parametrize("kind", REACHING_OUT)
def test_a_results_file_that_reaches_out_is_refused(kind: str, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = study / "secret"
    secret.write_bytes(b"s" * 24)
    path = changed(study / "r.h5", lambda group: REACHING_OUT[kind](group, secret))
    before = everything(study)
    for words in (["show", str(path)], ["plot", str(path)], ["report", str(path)], ["export", str(path)]):
        assert "refused" in refused(words, capsys)
    with pytest.raises(ValueError, match="refused"):
        Writer(path, run_key(digest="abcdefabcd"))
    assert everything(study) == before
    assert secret.read_bytes() == b"s" * 24


def test_links_are_not_followed_and_a_file_with_links_is_not_written(study: Path) -> None:
    other = stored(study / "other.h5")
    kept = other.read_bytes()
    for i, link in enumerate((h5py.ExternalLink(str(other), "/variance"), h5py.SoftLink("/variance"))):
        path = stored(study / f"r{i}.h5")
        with h5py.File(path, "r+") as file:
            file["hessian"] = link
        assert [name for name, _ in reader.groups(path)] == ["variance/net-0123456789"]
        with pytest.raises(ValueError, match=r"holds a link instead of data \(/hessian\).*give another --out"):
            Writer(path, run_key(digest="abcdefabcd"))
    assert other.read_bytes() == kept


DAMAGED = """
import json, sys
from pathlib import Path
from landscape.plots import headlines
from landscape.cli.damaged_files import check_not_damaged
path, whole = Path(sys.argv[1]), Path(sys.argv[1]).read_bytes()
import numpy as np
generator = np.random.default_rng(0)
outcomes = {"read": 0, "refused": 0}
def tried(content):
    path.write_bytes(content)
    try:
        check_not_damaged(path)
        headlines.summary(path)
        outcomes["read"] += 1
    except ValueError as error:
        assert "\\n" not in str(error), error
        outcomes["refused"] += 1
for length in range(0, len(whole), 1024):
    tried(whole[:length])
cut = dict(outcomes)
for position in generator.integers(len(whole), size=60):
    turned = bytearray(whole)
    turned[position] ^= 1 << int(generator.integers(8))
    tried(bytes(turned))
print(json.dumps([cut, outcomes]))
"""


@pytest.mark.slow
def test_a_damaged_results_file_is_read_or_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "r.h5")
    ended = subprocess.run([sys.executable, "-c", DAMAGED, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    cut, outcomes = json.loads(ended.stdout)
    assert cut["read"] == 0
    assert sum(outcomes.values()) == cut["refused"] + 60


def test_a_journal_cut_anywhere_gives_its_whole_records_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "r.h5.journal-0"
    with Journal(path) as journal:
        for i in range(40):
            journal.append(Record({"index": [i]}, {"loss": np.full(20, float(i))}))
    whole = path.read_bytes()
    for length in range(0, len(whole), 1024):
        path.write_bytes(whole[:length])
        with Journal(path) as journal:
            found = [record.data["index"][0] for record in journal.records()]
        assert found == list(range(len(found)))
        assert len(found) * 200 < length + 1000


LOSS = {"loss": {"long_name": "loss", "units": "nats", "dims": [], "dtype": "float64"}}
EMPTY: dict[str, object] = {"axes": [], "summaries": {}, "about": {}, "labels": {}, "facts": {}, "digest": "1"}
FAR = {"over": ["a", "b"], "quantities": LOSS, "probe": "variance", "label": "../../x", **EMPTY}


@pytest.mark.parametrize(
    ("data", "arrays"),
    [
        ({"key": {}}, {}),
        ({}, {"x": np.zeros(3)}),
        ({"key": FAR, "attributes": {}}, {f"axis:{name}": np.zeros(10**6, np.uint8) for name in "ab"}),
    ],
)
def test_a_journal_that_makes_no_sense_is_kept_under_another_name(
    data: dict[str, object], arrays: dict[str, np.ndarray], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path / "r.h5")
    with h5py.File(path) as file:
        held = [*file, *file["variance"]]
    with Journal(tmp_path / "r.h5.journal-feedfeed00") as journal:
        journal.append(Record({"index": [0]}, {"loss": np.float64(1)}))
        journal.append(Record(data, arrays))
    content = (tmp_path / "r.h5.journal-feedfeed00").read_bytes()
    merge_orphans(path, reduce_of=lambda probe, parameters: None)
    assert "none of its units can be merged" in caplog.text
    assert "kept as r.h5.unreadable-feedfeed00" in caplog.text
    assert (tmp_path / "r.h5.unreadable-feedfeed00").read_bytes() == content
    with h5py.File(path) as file:
        assert [*file, *file["variance"]] == held
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.h5", "r.h5.unreadable-feedfeed00"]


LABELS = [
    *("../../outside", "/etc/x", "a\0b", "..", "\x1b[2J", "$\\frac{$"),
    *('"><script>alert(1)</script>', "' onload='alert(1)"),
]


def surface(path: Path) -> h5py.File:
    """A results file with a small surface, open."""
    names = ("loss", "loss_se", "l2", "accuracy")
    axis = np.linspace(-1, 1, 3)
    plan = Plan(over={"x": axis, "y": axis}, quantities={name: Quantity(name) for name in names})
    with Writer(path, RunKey("surface", "net", "0123456789", plan, {"parameters": "{}"})) as writer:
        for unit in writer.pending():
            writer.write(unit, dict.fromkeys(names, 1.0 + unit.at["x"] ** 2 + unit.at["y"]))
    return h5py.File(path, "r+")


def attribute_names(page: Path) -> list[str]:
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.extend(name for name, _ in attrs)  # type: ignore[method-assign]
    parser.feed(page.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_a_label_is_text_wherever_it_is_shown(label: str, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study / "r.h5"
    with surface(path) as file:
        attributes = file["surface/net-0123456789"].attrs
        attributes["label"] = np.void(label.encode()) if "\0" in label else label
        attributes["protocol"] = attributes["model"] = attributes["data"] = label.replace("\0", "")
        for name in ("loss", "x"):
            file[f"surface/net-0123456789/{name}"].attrs["units"] = label.replace("\0", "")
    before = everything(study)
    for words in (["show"], ["plot", "--out", "figures"], ["report", "--out", "p.html"], ["export", "--out", "e"]):
        code = exit_code([words[0], str(path), *words[1:]])
        said = capsys.readouterr()
        assert code in (0, 1)
        assert code == 0 or re.fullmatch(r"landscape: .+", said.err.splitlines()[-1])
        assert "\0" not in label or "the attribute label is neither text nor a number" in said.err
        assert "\x1b" not in said.out + said.err
    made = everything(study) - before
    assert bool(made) == ("\0" not in label)
    assert all(made_here.is_relative_to(study / "inside") for made_here in made)
    page = study / "inside" / "p.html"
    if page.exists():
        assert "<script>alert" not in page.read_text()
        assert [name for name in attribute_names(page) if name.startswith("on")] == []


def test_pipes_are_refused_before_they_are_read(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.pt", "a.h5", "a.csv", "model.safetensors.index.json", "config.json"):
        os.mkfifo(study / name)
    os.mkfifo(study / "inside" / "metrics.csv")
    for words in (["show", "a.pt"], ["show", "a.h5"], ["show", "model.safetensors.index.json"], ["import", "a.csv"],
                  ["import", "a.h5"], ["plot", "inside"]):  # fmt: skip
        error = refused([words[0], str(study / words[1])], capsys)
        assert "neither a file nor a folder" in error or "no metrics.csv" in error
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        raw_files.json_of(study / "config.json")


def bomb(group: h5py.Group) -> None:
    """A chunk of 4 numbers that inflates to 16 MB."""
    made = group.create_dataset("far", (4,), "f8", chunks=(4,), compression="gzip")
    made.id.write_direct_chunk((0,), zlib.compress(bytes(2**24)))


def large_chunk(group: h5py.Group) -> None:
    """One number in a chunk of 1 GiB."""
    group.create_dataset("far", (1,), "f8", maxshape=(None,), chunks=(2**27,), compression="gzip")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (bomb, "a compressed chunk that is larger than it says; refused"),
        (large_chunk, "chunks of 1,073,741,824 bytes; refused"),
        (lambda group: group.attrs.update({f"a{i}": i for i in range(600)}), "expected at most 500; refused"),
    ],
)
def test_a_file_that_would_take_memory_or_time_is_refused(
    change: Callable[[h5py.Group], object], said: str, study: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        reader.groups(changed(study / "r.h5", change))


def test_compressed_results_are_read(study: Path) -> None:
    def pack(group: h5py.Group) -> None:
        group.create_dataset("more", data=np.arange(1000.0), compression="gzip", shuffle=True, fletcher32=True)
        group.create_dataset("other", data=np.arange(1000.0), compression="lzf")

    ((_, data),) = reader.groups(changed(study / "r.h5", pack))
    assert data["more"].sum() == data["other"].sum() == 499500


# --- models ---


def test_a_network_of_millions_of_layers_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="depth must be at most 1,000, got 1000000"):
        models.build("vit_demo", classes=10, image_size=32, depth=10**6)
    with pytest.raises(ValueError, match="one whole number per stage"):
        models.build("resnet_demo", classes=10, image_size=32, blocks=[1] * 10**6)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "num_hidden_layers": 10**7}))
    with pytest.raises(ValueError, match="num_hidden_layers 10,000,000, expected at most 10,000"):
        huggingface.build(str(tmp_path), {}, classes=None, image_size=None, weights=False)


# --- data ---


def test_scattered_points_do_not_become_a_grid_of_all_their_coordinates(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(300, len(park2022_csv.COLUMNS)))
    np.savetxt(tmp_path / "points.csv", rows, delimiter=",")
    with pytest.raises(ValueError, match=r"300 points at 300 x 300 coordinates, expected a grid"):
        park2022_csv.read_surface(tmp_path / "points.csv")


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


def test_a_picture_that_no_memory_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (400, 300)).save(tmp_path / "a.png")
    monkeypatch.setattr(decoding, "_room", decoding._Room(0))
    monkeypatch.setattr(memory, "available", lambda: 500_000)
    picture = decoding.Picture(0, str(tmp_path / "a.png"), str(tmp_path / "a.png"))
    with pytest.raises(ValueError, match=r"a\.png has 400 x 300 pixels, which need .* is free; make it smaller"):
        decoding.decoded([picture], name="x", count=1, of=1, size=8)


def test_a_batch_of_images_cannot_ask_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")  # an index into a memo of 2**31 entries
    with pytest.raises(ValueError, match="holds a list"):
        cifar.read_batch(path)


def test_a_picture_is_of_a_format_of_pictures_whatever_its_name(tmp_path: Path) -> None:
    """PostScript would start an interpreter."""
    path = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(path, "EPS")
    with pytest.raises(ValueError, match=r"a\.png cannot be decoded"):
        opened(str(path), str(path))


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
