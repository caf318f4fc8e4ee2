"""Results files and journals from an untrusted source: one clear line, nothing followed, run or written."""

import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hostile_commands import beside_a_model, everything, refused

from landscape.checkpoints import raw_files
from landscape.cli.main import exit_code
from landscape.plots import drawing, headlines
from landscape.probe import Plan, Quantity
from landscape.results import reader
from landscape.results.journal import MAGIC, Journal, Record
from landscape.results.run_key import RunKey
from landscape.results.unmerged_journals import merge_orphans, standings
from landscape.results.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return beside_a_model(tmp_path, monkeypatch)


def run_key(label: str = "net", digest: str = "0123456789", size: int = 3) -> RunKey:
    plan = Plan(over={"unit": np.arange(size)}, quantities={"loss": Quantity("loss", "nats")})
    return RunKey("variance", label, digest, plan, {"parameters": "{}"})


def stored(path: Path, digest: str = "0123456789") -> Path:
    """A results file with one result."""
    key = run_key(digest=digest)
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


@pytest.mark.slow
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


@pytest.mark.campaign
def test_a_damaged_results_file_is_read_or_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "r.h5")
    ended = subprocess.run([sys.executable, "-c", DAMAGED, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    cut, outcomes = json.loads(ended.stdout)
    assert cut["read"] == 0
    assert sum(outcomes.values()) == cut["refused"] + 60


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


WIDE = {**FAR, "probe": "variance", "label": "x", "digest": "feedfeed00"}


@pytest.mark.parametrize("data", [{"key": WIDE, "attributes": {}}, ["index"], {"key": {**WIDE, "over": [["a"], "b"]}}])
def test_a_journal_of_huge_axes_or_odd_keys_takes_neither_memory_nor_a_traceback(
    data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path / "r.h5")
    with Journal(tmp_path / "r.h5.journal-feedfeed00") as journal:
        journal.append(Record(data, {f"axis:{name}": np.zeros(30_000, np.uint8) for name in "ab"}))
        journal.append(Record({"index": [0, 0]}, {"loss": np.float64(1)}))
    assert [standing.group for standing in standings(path)] == ["variance/net-0123456789"]
    merge_orphans(path, reduce_of=lambda probe, parameters: None)
    assert "none of its units can be merged" in caplog.text
    assert (tmp_path / "r.h5.unreadable-feedfeed00").exists()


NUMBER = {"long_name": "n", "units": "", "dims": [], "dtype": "float64"}
SOUND: dict[str, Any] = {**WIDE, "over": ["a"]}
SERIES = {**SOUND, "axes": ["b", "c"], "grows": True, "quantities": {"loss": {**NUMBER, "dims": ["b", "c"]}}}
BYTES = "declares [0-9,]+ bytes"
DECLARED: dict[str, tuple[dict[str, Any], str]] = {  # keys of journals, and what is said of each
    "axes": ({**SOUND, "axes": ["b", "c"], "summaries": {"s": {**NUMBER, "dims": ["b", "c"]}}}, BYTES),
    "rows of a series": (SERIES, BYTES),
    "arrays": ({**SOUND, "summaries": {f"s{i}": NUMBER for i in range(2000)}}, "declares 2,002 arrays"),
    "text": ({**SOUND, "summaries": {"s": {**NUMBER, "dtype": "S2000000000"}}}, "of the type S2000000000"),
    "attributes": ({**SOUND, "facts": {f"f{i}": i for i in range(600)}}, "600 attributes, more than a result has"),
    "lists": ({**SOUND, "facts": {"f": [1] * 10**5}}, "the attribute f is neither text nor a number"),
    "names": ({**SOUND, "summaries": {"x/y": NUMBER}}, "declares the name 'x/y'"),
}  # fmt: skip


@pytest.mark.parametrize("stored_already", [False, True])
@pytest.mark.parametrize("what", DECLARED)
def test_a_journal_declares_no_more_than_a_result_has(
    what: str, stored_already: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its units stay in it, beside the file, and the results of the file are what they were."""
    data, said = DECLARED[what]
    digest = "feedfeed00" if stored_already else "0123456789"
    path = stored(tmp_path / "r.h5", digest)
    before = reader.groups(path)[0][1]
    with Journal(tmp_path / "r.h5.journal-feedfeed00") as journal:
        axes = {"axis:a": np.arange(3), "axis:b": np.zeros(8000, np.uint8), "axis:c": np.zeros(8000, np.uint8)}
        journal.append(Record({"key": data, "attributes": {}}, axes))
        journal.append(Record({"after": 0} if data.get("grows") else {"index": [0]}, {"loss": np.float64(1)}))
    assert [standing.group for standing in standings(path)] == [f"variance/net-{digest}"]
    merge_orphans(path, reduce_of=lambda probe, parameters: None)
    ((_, after),) = reader.groups(path)
    assert after.equals(before)
    if what == "axes" and stored_already:  # the arrays of the file count, not those that the journal declares
        return
    assert re.search(rf"none of its units can be merged \(ValueError: .*{said}", caplog.text)
    assert (tmp_path / "r.h5.unreadable-feedfeed00").exists()


@pytest.mark.slow
def test_false_starts_in_a_journal_are_given_up_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "r.h5.journal-0123456789"
    start = struct.pack("<III", 2**21, 0, 8) + b'{"data": ' + bytes(3)
    path.write_bytes(MAGIC + struct.pack("<II", 9, 0) + start * 200_000)
    before = os.times()
    with Journal(path) as journal:
        assert "cannot be read" in journal.unreadable
    assert sum(os.times()[:2]) - sum(before[:2]) < 10


LABELS = [
    *("../../outside", "/etc/x", "a\0b", "..", "\x1b[2J$\\frac{$", """"><script>alert(1)</script>' onload='alert(1)""")
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
def test_a_label_is_text_wherever_it_is_shown(
    label: str, study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, draw = study / "r.h5", drawing.draw
    monkeypatch.setattr(drawing, "draw", lambda *args, **options: draw(*args, **{**options, "figures": ("surface",)}))
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


def test_texts_of_a_file_are_printable_and_names_that_are_not_are_refused(study: Path) -> None:
    def named(group: h5py.Group) -> None:
        group.attrs["data"] = "\x1b[2J\x9b2J\x07data"
        group["loss"].attrs["units"] = "\x01\x1bnats"
        group["word"] = np.array(["\x1b]0;title", "plain"], dtype=object)

    ((_, data),) = reader.groups(changed(study / "r.h5", named))
    texts = [data.attrs["data"], data["loss"].attrs["units"], *data["word"].values]
    assert all(text.isprintable() for text in texts)
    assert texts[0].endswith("data")
    with h5py.File(study / "r.h5", "r+") as file:
        file.move("variance/net-0123456789", "variance/\x1b[2J-0123456789")
    with pytest.raises(ValueError, match="holds a name that cannot be shown") as refusal:
        reader.groups(study / "r.h5")
    assert str(refusal.value).isprintable()


def texts_of_a_megabyte(group: h5py.Group) -> None:
    """20,000 texts, all of which are one in the file."""
    made = group.create_dataset("words", (20_000,), h5py.string_dtype(), chunks=(20_000,))
    made[0] = "x" * 2**20
    group.file.flush()
    _, first = made.id.read_direct_chunk((0,))
    made.id.write_direct_chunk((0,), first[:16] * 20_000)


@pytest.mark.slow
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


def scales(count: int, axes: int = 1) -> Callable[[h5py.Group], object]:
    """A list of the scales of so many axes, each of so many references."""

    def change(group: h5py.Group) -> None:
        made = group.create_dataset("far", data=np.zeros(3))
        kind, axis = h5py.vlen_dtype(h5py.ref_dtype), np.array([group["unit"].ref] * count, h5py.ref_dtype)
        listed = np.empty(axes, object)
        listed[:] = [axis] * axes
        space = h5py.h5s.create_simple((axes,))
        h5py.h5a.create(made.id, b"DIMENSION_LIST", h5py.h5t.py_create(kind, logical=True), space).write(listed)

    return change


def looped(group: h5py.Group) -> None:
    group["loop"] = group.parent


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scales(20_000), "has 20,000 scales of an axis of /variance/net-0123456789/far, expected at most 8; refused"),
        (scales(1, axes=3000), "has scales of more axes than /variance/net-0123456789/far has; refused"),
        (looped, "holds the group /variance under several names; refused"),
        (bomb, "a compressed chunk that is larger than it says; refused"),
        (texts_of_a_megabyte, "declares arrays of [0-9,]+ bytes in a file of [0-9,]+ bytes; refused"),
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


@pytest.mark.parametrize("read", [reader.open, headlines.summary])
@pytest.mark.parametrize("kind", ["attribute", "link"])
def test_names_that_are_no_text_are_refused_in_one_line(kind: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    path = stored(tmp_path / "r.h5")
    with h5py.File(path, "r+") as file:
        group = next(iter(next(iter(file.values())).values()))
        if kind == "attribute":
            h5py.h5a.create(group.id, b"n\xe1\xff", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create(h5py.h5s.SCALAR))
        else:
            h5py.h5g.create(group.id, b"n\xe1\xff")
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        read(path)
    assert "\n" not in str(refused.value)
