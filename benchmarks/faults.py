"""Faults of machines and users while a command measures: each check states what must happen, and says whether it did.

    python benchmarks/faults.py [--only full_disk,sigterm]

Every check runs real commands on a small network of digits, in a folder of its own. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from landscape.results import group as groups
from landscape.results.hdf5_file import reading

os.environ["OMP_NUM_THREADS"] = "1"  # sums over other numbers of threads have other last bits
LANDSCAPE = [sys.executable, "-m", "landscape"]
SURFACE = ["surface", "final.pt", "--samples", "16", "--out", "results.h5", "--resolution"]
QUICK, LONG, UNITS = [*SURFACE, "7"], [*SURFACE, "25"], 625  # of the long one


def start(words: list[str], folder: Path, **how: Any) -> subprocess.Popen[str]:
    """A command in a folder."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*LANDSCAPE, *words], cwd=folder, **pipes, **how)


def ended(process: subprocess.Popen[str], seconds: float = 200) -> tuple[int, str]:
    """Its exit code and its last line."""
    _, err = process.communicate(timeout=seconds)
    return process.returncode, (err.strip().splitlines() or [""])[-1]


def content(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Every result of a file, by its digest: the label is that of the folder."""
    with reading(path) as file:
        return {name.rpartition("-")[2]: groups.arrays(group) for name, group in groups.results_in(file)}


def same(mine: Path, theirs: Path) -> bool:
    """Whether two files hold the same numbers."""
    a, b = content(mine), content(theirs)
    return a.keys() == b.keys() and all(
        np.array_equal(a[name][key], b[name][key], equal_nan=b[name][key].dtype.kind == "f")
        for name in b
        for key in b[name]
    )


def done(path: Path) -> int:
    """Finished units of all results."""
    return sum(int((arrays["done"] == 1).sum()) for arrays in content(path).values())


def whole(folder: Path, words: list[str]) -> Path:
    """The same command without a fault, in another folder."""
    other = folder / "whole"
    other.mkdir()
    shutil.copy(folder / "final.pt", other)
    code, said = ended(start(words, other))
    assert code == 0, said
    return other / "results.h5"


def expect(*facts: tuple[bool, str]) -> str:
    """What is not as it should be."""
    return "; ".join(text for holds, text in facts if not holds)


def full_disk(folder: Path) -> str:
    """A disk that is full during a run: exit 1 in one line, the file as before, and a later run finishes."""
    first = ended(start(QUICK, folder))
    before = (folder / "results.h5").read_bytes()
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (len(before) + 2_000, resource.RLIM_INFINITY))
    code, said = ended(start([*LONG], folder, preexec_fn=limit))
    kept = (folder / "results.h5").read_bytes() == before
    again, _ = ended(start(LONG, folder))
    return expect(
        (first[0] == 0, first[1]), (code == 1 and "cannot write" in said, f"{code} {said}"), (kept, "the file changed"),
        (again == 0 and done(folder / "results.h5") == 49 + UNITS, "not finished"),
    )  # fmt: skip


def foreign_journals(folder: Path) -> str:
    """Notes, a link, and a journal that cannot be read beside the results: left, left, and kept under another name."""
    (folder / "precious").write_text("precious")
    (folder / "results.h5.journal-notes").write_text("notes")
    (folder / "results.h5.journal-aaaaaaaaaa").symlink_to("precious")
    (folder / "results.h5.journal-bbbbbbbbbb").write_bytes(b"\x00\x01 no journal" * 9)
    process = start(QUICK, folder)
    _, err = process.communicate(timeout=200)
    return expect(
        (process.returncode == 0, err), ("is kept as results.h5.unreadable-bbbbbbbbbb" in err, "not said"),
        ((folder / "precious").read_text() == "precious", "the link was followed"),
        ((folder / "results.h5.journal-notes").read_text() == "notes", "the notes are gone"),
    )  # fmt: skip


def damaged_file(folder: Path) -> str:
    """A results file without its start: commands refuse it and name repair, which recovers every result."""
    for seed in ("0", "1"):
        ended(start([*QUICK, "--seed", seed], folder))
    path, before = folder / "results.h5", content(folder / "results.h5")
    path.write_bytes(path.read_bytes()[:8] + bytes(500) + path.read_bytes()[508:])
    damaged = path.read_bytes()
    code, said = ended(start(QUICK, folder))
    repaired = ended(start(["repair", "results.h5", "--out", "new.h5"], folder))
    found = content(folder / "new.h5") if (folder / "new.h5").exists() else {}
    return expect(
        (code == 1, f"{code} {said}"), (path.read_bytes() == damaged, "the damaged file changed"),
        (repaired[0] == 0 and found.keys() == before.keys(), str(repaired)),
    )  # fmt: skip


CLOCK = """
import sys, time, datetime, random
from landscape.cli.main import main
real, jump = time.time, random.Random(0)
time.time = lambda: real() + jump.uniform(-1e6, 1e6)
from landscape.results import group
class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(time.time(), tz)
group.datetime = Jumping
main(sys.argv[1:])
"""


def clock_jumps(folder: Path) -> str:
    """A clock that jumps by days to and fro, and a results file from the future: the same numbers, and it resumes."""
    words = [sys.executable, "-c", CLOCK, *QUICK]
    first = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    os.utime(folder / "results.h5", (4e9, 4e9))
    code, said = ended(start(QUICK, folder))
    fine = same(folder / "results.h5", whole(folder, QUICK))
    return expect(
        (first.returncode == 0, first.stderr), (code == 0 and "already measured" in said, said), (fine, "other numbers")
    )


def fsync(folder: Path) -> str:
    """--fsync: the same numbers; every unit is flushed before it counts (at least as many flushes as units)."""
    counted = folder / "count"
    program = (
        "import os, sys; real, n = os.fsync, [0]\n"
        "def fsync(h): n[0] += 1; real(h)\n"
        "os.fsync = fsync\n"
        "from landscape.cli.main import exit_code\n"
        f"code = exit_code(sys.argv[1:]); open({str(counted)!r}, 'w').write(str(n[0])); sys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *QUICK, "--fsync"], cwd=folder, capture_output=True, text=True, check=False
    )
    enough = counted.exists() and int(counted.read_text()) >= 49
    return expect(
        (ran.returncode == 0, ran.stderr),
        (enough, "too few flushes"),
        (same(folder / "results.h5", whole(folder, QUICK)), "other numbers"),
    )


CHECKS: dict[str, Callable[[Path], str]] = {
    check.__name__: check for check in (full_disk, foreign_journals, damaged_file, clock_jumps, fsync)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(CHECKS))
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        make = ["train", "resnet_demo", "--data", "digits", "--epochs", "0", "--out", "made"]
        code, said = ended(start(make, Path(temporary)))
        assert code == 0, said
        for name in parser.parse_args().only.split(","):
            folder = Path(temporary) / name
            folder.mkdir()
            shutil.copy(Path(temporary) / "made" / "final.pt", folder)
            check = CHECKS[name]
            about = check.__doc__ or ""
            wrong = check(folder)
            failed += bool(wrong)
            print(f"| {name} | {about} | {'FAILED: ' + wrong if wrong else 'as it should be'} |", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
