"""Let every call that changes a file be a command's last, or fail, and check what is left: nothing may be lost.

    python benchmarks/failing_calls.py [--stride 1] [--only run,merge,repair,report,train]

A library, compiled here and loaded before the C library, counts the calls (create, write, truncate, flush, rename,
delete, of Python as of HDF5) of a small run of two probes, a merge, a repair and a report. Then each of them in turn is
one before which the process is killed, a write that is killed half way, one that fails (EIO), one from which on all
fail, and one from which on the disk is full (ENOSPC). Afterwards every file opens and holds all units that were
reported; a command that failed has said so in one line, with exit code 1; and the same command then ends with the very
numbers of one that nothing happened to, and leaves no other file. A training is killed only: it goes on without
snapshots that cannot be written. `--stride n` tries every n-th point.
"""

import argparse
import contextlib
import ctypes
import functools
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("failing.c")
sys.path.append(str(Path(__file__).parents[1] / "tests"))
HOW = {
    "k": "killed before",
    "t": "killed within",
    "e": "fails",
    "E": "fails, and all later",
    "s": "no space from it on",
}
Unit = tuple[str, tuple[int, ...]]  # the digest of its result, and its index
ROOM = 1 << 14  # bytes in which calls are noted


def preloaded() -> None:
    """Compile the library, and start this program again with it."""
    if "LD_PRELOAD" in os.environ:
        return
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/failing.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, str(SOURCE), "-ldl"], check=True)
        given = {"LD_PRELOAD": library, "OMP_NUM_THREADS": "1", "LANDSCAPE_CACHE": ""}
        raise SystemExit(
            subprocess.run([sys.executable, *sys.argv], env={**os.environ, **given}, check=False).returncode
        )


@dataclass(frozen=True)
class Case:
    """Commands in a folder, and what they write."""

    commands: list[list[str]]
    writes: str
    before: Callable[[Path], object]  # makes the files that they need
    how: str = "".join(HOW)


@dataclass
class Ended:
    """How the commands ended in a process of their own."""

    code: int
    said: str
    kinds: str  # a letter for each call that changed a file
    reported: set[Unit] = field(default_factory=set)


def command(case: Case, folder: Path) -> int:
    """Run the commands in this process; the exit code of the last, or of the first that fails."""
    from landscape.cli.main import exit_code

    codes = (exit_code([str(folder / word) if "." in word else word for word in words]) for words in case.commands)
    return next(filter(None, codes), 0)


def attempt(case: Case, folder: Path, at: int = 0, how: str = "k") -> Ended:
    """Run the commands in a fork of this process, in which something happens at a call; never at 0."""
    from landscape.results.writer import Writer
    from landscape.running import run

    errors, reports = folder.parent / "errors", folder.parent / "reports"
    memory = mmap.mmap(-1, ROOM)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setpgid(0, 0)
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            told = os.open(reports, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            write = Writer.write

            def reported(self: Writer, unit: object, values: object) -> None:
                write(self, unit, values)  # type: ignore[arg-type]
                os.write(told, f"{self.key.digest} {' '.join(map(str, unit.index))}\n".encode())  # type: ignore[attr-defined]

            Writer.write, run.MERGE_SECONDS = reported, 0.0  # type: ignore[assignment]
            os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            ctypes.CDLL(None).arm(
                ctypes.c_void_p(address), f"{folder}/".encode(), ctypes.c_long(at), ctypes.c_char(how.encode())
            )
            code = command(case, folder)
            ctypes.CDLL(None).arm(None, b"", ctypes.c_long(0), ctypes.c_char(b"k"))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    lines = [line.split() for line in reports.read_text().splitlines()]
    count = int.from_bytes(memory[:8], "little")
    return Ended(
        os.waitstatus_to_exitcode(status), errors.read_text(), memory[8 : 8 + count].decode(),
        {(digest, tuple(map(int, index))) for digest, *index in lines},
    )  # fmt: skip


def held(case: Case, folder: Path) -> set[Unit]:
    """The finished units of all results files that the commands name, and of the journals beside these."""
    from fault_checks.commands import units

    return set[Unit]().union(*(units(folder / word) for words in case.commands for word in words if ".h5" in word))


def same(mine: Path, theirs: Path) -> bool:
    """Whether two results files, pages, or checkpoints hold the same."""
    import torch
    from fault_checks import commands

    if mine.suffix == ".pt":
        weights, others = (torch.load(path, weights_only=True)["state_dict"] for path in (mine, theirs))
        return all(torch.equal(weights[name], tensor) for name, tensor in others.items())
    return commands.same(mine, theirs) if mine.suffix == ".h5" else mine.read_bytes() == theirs.read_bytes()


def wrong(case: Case, folder: Path, start: Path, whole: Path, at: int, how: str) -> str:
    """What is not as it should be when something happens at a call; "" if nothing."""
    from fault_checks.commands import expect

    shutil.rmtree(folder)
    shutil.copytree(start, folder)
    ended, out, finished = attempt(case, folder, at, how), folder / case.writes, whole / case.writes
    sources = [path for path in start.iterdir() if path.suffix in (".h5", ".pt", ".bak") and path.name != case.writes]
    try:
        lost = (held(case, start) | ended.reported) - held(case, folder)
        olds = [out, finished, *(path for path in [start / case.writes] if path.exists())]
        part = out.exists() and case is not RUN and not any(same(out, old) for old in olds[1:])
    except Exception as error:  # any way in which a file cannot be read
        return f"it cannot be read: {type(error).__name__}: {error}"
    lines = [line for line in ended.said.splitlines() if not line.startswith(("note: ", "warning: ", "gone: "))]
    told = len(lines) == 1 and lines[0].startswith("landscape: ") if ended.code else not lines
    first = expect(
        (ended.code == -9 if how in "kt" else ended.code in (0, 1), f"exit code {ended.code}"),
        (told or ended.code == -9, f"it said {ended.said!r} (exit code {ended.code})"),
        (ended.code != 0 or (out.exists() and same(out, finished)), "it ended well with other numbers"),
        (not lost, f"{len(lost)} units are gone"), (not part, "a part was written"),
        (all((folder / p.name).read_bytes() == p.read_bytes() for p in sources), "a source changed"),
    )  # fmt: skip
    if "repair" in case.commands[0] and out.exists():
        out.unlink()  # whole, as we know; it is not written again
    again = attempt(case, folder)
    names, known = ({str(path.relative_to(of)) for path in of.rglob("*")} for of in (folder, whole))
    nobodys = rf"tmp.*|\.{case.writes}\.[0-9a-f]{{8}}|.*\.lock"  # a living process might have them; locks are empty
    left = {name for name in names - known if not re.fullmatch(nobodys, name)}
    second = expect(
        (again.code == 0, f"again: {again.said!r}"), (again.code != 0 or same(out, finished), "again: other numbers"),
        (again.code != 0 or not left, f"files are left: {left}"),
    )  # fmt: skip
    return "; ".join(filter(None, (first, second)))


SMALL = ["--samples", "8", "--batch-size", "8", "--device", "cpu", "--quiet"]
LINE = ["line", "final.pt", "--resolution", "3", *SMALL]


def checkpoint(folder: Path) -> None:
    """A network of few weights."""
    from fault_checks import commands

    commands.checkpoint(folder, blocks=(1,), width=4)


def shards(folder: Path) -> None:
    """Two shards, one of which was killed and has left a journal."""
    checkpoint(folder)
    for number in "12":
        case = Case([[*LINE, "--shard", f"{number}/2", "--out", f"{number}.h5"]], f"{number}.h5", checkpoint)
        calls = attempt(case, folder).kinds
        if number == "2":
            (folder / "2.h5").unlink()
            attempt(case, folder, at=calls.rindex("w"))
    (folder / "final.pt").unlink()


def damaged(folder: Path) -> None:
    """A results file without its start."""
    measured(folder)
    content = (folder / "results.h5").read_bytes()
    (folder / "results.h5").unlink()
    (folder / "damaged.bak").write_bytes(content[:8] + bytes(500) + content[508:])


def measured(folder: Path) -> None:
    """A results file, and an older page."""
    checkpoint(folder)
    attempt(RUN, folder)
    (folder / "log.json").unlink()
    (folder / "final.pt").unlink()


def reported(folder: Path) -> None:
    """A results file, and an older page."""
    measured(folder)
    (folder / "report.html").write_text("older")


HOW_RUN = ["--out", "results.h5", "--fsync", "--log", "log.json"]
RUN = Case([[*LINE, *HOW_RUN], ["variance", "final.pt", *SMALL, *HOW_RUN]], "results.h5", checkpoint)
TRAIN = ["train", "resnet_demo", "--data", "digits", "--epochs", "2", "--fraction", "1e-1", "--device", "cpu",
         "--quiet"]  # fmt: skip
CASES: Mapping[str, Case] = {
    "run": RUN,
    "merge": Case([["merge", "1.h5", "2.h5", "--out", "all.h5", "--quiet"]], "all.h5", shards),
    "repair": Case([["repair", "damaged.bak", "--out", "new.h5", "--quiet"]], "new.h5", damaged),
    "report": Case([["report", "results.h5", "--out", "report.html", "--quiet"]], "report.html", reported),
    "train": Case([[*TRAIN, "--out", "a.run"]], "a.run/final.pt", Path.exists, "kt"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--only", default=",".join(CASES))
    chosen = parser.parse_args()
    preloaded()
    import torch
    import typer.main

    torch.set_num_threads(1)
    typer.main.get_command = functools.cache(typer.main.get_command)  # of all commands, the same in every fork
    failed = tried = 0
    print("| what | calls | points tried | wrong |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as temporary:
        for name in chosen.only.split(","):
            case, base = CASES[name], Path(temporary, name)
            folder, start, whole = (base / part for part in ("here", "start", "whole"))
            folder.mkdir(parents=True)
            case.before(folder)
            shutil.copytree(folder, start)
            shutil.copytree(folder, base / "warm")
            with contextlib.redirect_stdout(sys.stderr):  # what is imported and computed once is there in every fork
                assert command(case, base / "warm") == 0
            ended = attempt(case, folder)
            assert ended.code == 0, ended.said
            shutil.copytree(folder, whole)
            points = [
                (at, how) for at, kind in enumerate(ended.kinds, 1) for how in case.how if how != "t" or kind == "w"
            ]
            points = points[:: chosen.stride]
            bad = 0
            for at, how in points:
                if said := wrong(case, folder, start, whole, at, how):
                    bad += 1
                    print(
                        f"{name}: call {at} of {len(ended.kinds)} ({ended.kinds[at - 1]}) {HOW[how]}: {said}",
                        file=sys.stderr,
                    )
            failed, tried = failed + bad, tried + len(points)
            counts = ", ".join(f"{count} {kind}" for kind, count in Counter(ended.kinds).items())
            print(f"| {name} | {len(ended.kinds)} ({counts}) | {len(points)} | {bad} |", flush=True)
    print(f"| all | - | {tried} | {failed} |")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
