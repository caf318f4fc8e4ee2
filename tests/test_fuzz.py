"""Files with random damage: a reader of journals, results and checkpoints reads them or says in one line what is wrong.

Each reader gets a third of FUZZ_SECONDS (12 by default) in a process of its own, so that a crash of a library counts.
"""

import os
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

SECONDS = float(os.environ.get("FUZZ_SECONDS", "12"))
FUZZ = f"""{forked.BESIDE}
import faulthandler, logging
from pathlib import Path
from test_fuzz import fuzz
faulthandler.enable()
logging.disable(logging.WARNING)  # what the writer says of every journal that it sets aside
print(fuzz(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
"""
SLOW = 20.0  # seconds for one file, on a busy machine
INTERESTING = [0, 1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
WORDS = [b"\x80\x04.", b"PK\x03\x04", b"{}", b'"', b"[" * 40, b"\n\x1b[2J", b"cos\nsystem\n", b"(" * 40]
# Those that hash, copy, double, name and call.
OPCODES = [b")" + b"2\x86" * 60, b"s", b"\x90", b"2\x86", b"R", b"b", b"\x81", b"h\x00h\x00\x86q\x00", b"]K\x01a"]
OPCODES += [b"c%b\n" % name for name in (b"builtins\nset", b"collections\nCounter", b"builtins\nbytearray")]


def changes_of_a_file() -> Any:
    """Draw damage: a list of (kind, position as a share of the file, bytes)."""
    from hypothesis import strategies as st

    kinds = st.sampled_from(["overwrite", "insert", "delete", "cut", "repeat"])
    numbers = st.sampled_from(INTERESTING).map(lambda number: struct.pack("<Q", number))
    data = st.one_of(st.binary(min_size=1, max_size=12), numbers, st.sampled_from(WORDS), st.sampled_from(OPCODES))
    return st.lists(st.tuples(kinds, st.floats(0, 1), data), min_size=1, max_size=6)


def damaged(whole: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    content = bytearray(whole)
    for kind, share, data in changes:
        at = int(share * len(content))
        if kind == "overwrite":
            content[at : at + len(data)] = data
        elif kind == "insert":
            content[at:at] = data
        elif kind == "delete":
            del content[at : at + 8 * len(data)]
        elif kind == "cut":
            del content[at:]
        else:
            content[at:at] = content[max(at - 64, 0) : at]
    return bytes(content)


def resealed(content: bytes) -> bytes:
    """A journal whose first record has the check sum of what it now holds, so that damage inside is read."""
    from landscape.results.journal import MAGIC

    start = len(MAGIC)
    if len(content) < start + 8:
        return content
    (length,) = struct.unpack("<I", content[start : start + 4])
    payload = content[start + 8 : start + 8 + length]
    return content[: start + 4] + struct.pack("<I", zlib.crc32(payload)) + content[start + 8 :]


def journal(folder: Path) -> tuple[list[bytes], Callable[[Path], object], str]:
    from test_hostile_results import run_key

    from landscape.results.journal import Journal, Record
    from landscape.results.run_key import to_header
    from landscape.results.unmerged_journals import merge_orphans

    with Journal(folder / "made") as made:
        made.append(to_header(run_key()))
        for i in range(3):
            made.append(Record({"index": [i]}, {"loss": np.float64(i)}))
    whole = (folder / "made").read_bytes()

    def read(path: Path) -> None:
        results = path.with_name("r.h5")
        content = path.read_bytes()
        for number, variant in enumerate((content, resealed(content))):
            path.with_name(f"r.h5.journal-feedfeed0{number}").write_bytes(variant)
        merge_orphans(results, reduce_of=lambda probe, parameters: None)
        for left in [results, *path.parent.glob("r.h5.*")]:
            left.unlink(missing_ok=True)

    return [whole], read, "damaged"


def results(folder: Path) -> tuple[list[bytes], Callable[[Path], object], str]:
    from test_hostile_results import stored

    from landscape.cli import damaged_files
    from landscape.plots import headlines
    from landscape.results import reader

    damaged_files._may_fork = lambda: True  # torch is loaded here, as in no command that reads results
    whole = stored(folder / "made.h5").read_bytes()
    with h5py.File(folder / "made.h5") as file:
        assert "variance" in file

    def read(path: Path) -> None:
        damaged_files.check_not_damaged(path)  # as every command does first: HDF5 itself crashes on some files
        reader.groups(path)
        headlines.summary(path)

    return [whole], read, "damaged.h5"


def checkpoints(folder: Path) -> tuple[list[bytes], Callable[[Path], object], str]:
    from landscape.checkpoints import file_formats
    from landscape.checkpoints.checkpoint import read_checkpoint

    weights = {"layer.weight": torch.randn(5, 5), "layer.bias": torch.randn(5)}
    made = []
    for name in ("zip.pt", "legacy.pth", "file.safetensors"):
        if name == "file.safetensors":
            save_file(weights, folder / name)
        else:
            torch.save({"model": weights, "epoch": 3}, folder / name, _use_new_zipfile_serialization=name == "zip.pt")
        made.append((folder / name).read_bytes())
    with zipfile.ZipFile(folder / "zip.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))

    def read(path: Path) -> None:
        content = path.read_bytes()
        if not content.startswith(b"\x80\x02}"):
            read_checkpoint(path)
            return
        with zipfile.ZipFile(path, "w") as archive:  # with right check sums, so that damage inside is read
            for name in members:
                archive.writestr(name, content if name == pickled else members[name])
        for reader in (file_formats.outline_of, read_checkpoint):
            reader(path)

    return [*made, members[pickled]], read, "damaged.pt"


READERS = {"journal": journal, "results": results, "checkpoints": checkpoints}


def fuzz(kind: str, folder: Path, seconds: float) -> int:
    """Damage files until the time is over; how many were tried.

    Raises:
        Exception: a reader raised something else than a one-line ValueError or OSError, or took too long; the file is
            left in the folder.
    """
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st

    wholes, read, name = READERS[kind](folder)
    (folder / "in").mkdir()
    path, tried, number, end = folder / "in" / name, 0, 0, time.monotonic() + seconds

    def attempt(changes: list[tuple[str, float, bytes]], which: int) -> None:
        nonlocal tried
        tried += 1
        path.write_bytes(damaged(wholes[which % len(wholes)], changes))
        start = time.process_time()
        said = "read"
        try:
            read(path)
        except UnicodeDecodeError:
            raise  # a ValueError too, but no sentence
        except (ValueError, OSError) as error:
            said = str(error)
        assert said.strip()
        assert said.isprintable(), repr(said)
        assert time.process_time() - start < SLOW

    damage = given(changes_of_a_file(), st.integers(0, 3))
    while time.monotonic() < end:
        quiet = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        seed(number)(quiet(damage(attempt)))()
        number += 1
    return tried


@pytest.mark.campaign
@pytest.mark.parametrize("kind", READERS)
def test_a_reader_of_damaged_files_reads_or_refuses_them(kind: str, tmp_path: Path) -> None:
    process = forked.Popen(["-c", FUZZ, kind, str(tmp_path), str(SECONDS / len(READERS))])
    out, errors = process.communicate(SECONDS + 120)
    assert process.returncode == 0, out[-1000:] + errors[-3000:]
    assert int(out.split()[-1]) > 0
