"""Faults of machines: disks, files and clocks."""

import json
import os
from pathlib import Path

from fault_checks.commands import LONG, QUICK, UNITS, beside, content, ended, expect, held, running, same, start, whole
from landscape.results.unmerged_journals import journals

AS_ANY_USER = """
import ctypes, sys
libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, sets)
sets[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: what lets root write where nobody may
libc.capset(header, sets)
from landscape.cli.main import main
main(sys.argv[1:])
"""


def read_only_folder(folder: Path) -> str:
    """A folder that may not be written, from the start or during a run: exit 1 in one line, and nothing is lost."""
    path, how = folder / "results.h5", {"program": AS_ANY_USER}
    folder.chmod(0o555)
    code, said = ended(start(QUICK, folder, **how))
    elsewhere = [*QUICK[: QUICK.index("--out")], "--out", str(folder.parent / "elsewhere.h5"), "--resolution", "7"]
    other, told = ended(start(elsewhere, folder, **how))
    clean = not path.exists() and not beside(folder)
    folder.chmod(0o755)
    process = running(LONG, folder, 20, **how)
    folder.chmod(0o555)
    before = held(path)
    late, late_said = ended(process)
    kept = held(path)
    shown, found = ended(start(["show", "results.h5"], folder, **how))
    folder.chmod(0o755)
    again, end = ended(start(LONG, folder))
    return expect(
        (code == 1 and "cannot write results.h5: its folder cannot be written" in said, f"{code} {said}"),
        (clean, "something was written"), (other == 0, f"with --out elsewhere: {told}"),
        (late == 1 and "what was finished is kept in results.h5.journal-" in late_said, f"then {late} {late_said}"),
        (kept >= before, f"{kept} units are kept of {before}"), (shown == 0, f"show: {found}"),
        (again == 0 and same(path, whole(folder, LONG)) and not beside(folder), f"after that: {end}"),
    )  # fmt: skip


def torn_journal(folder: Path) -> str:
    """A journal whose last record was written in part: that unit alone is measured again."""
    process = running(LONG, folder, 100)
    process.kill()
    process.communicate()
    (journal,) = journals(folder / "results.h5")
    before = held(folder / "results.h5")
    journal.write_bytes(journal.read_bytes()[:-20])
    torn = held(folder / "results.h5")
    again, said = ended(start([*LONG, "--log", "log.jsonl"], folder))
    events = (folder / "log.jsonl").read_text().splitlines()
    (result,) = (json.loads(line) for line in events if '"event": "result"' in line)
    return expect(
        (torn == before - 1, f"{torn} units of {before}"), (again == 0, said),
        (result["measured"] == UNITS - torn, f"{result['measured']} units were measured, {torn} were there"),
        (same(folder / "results.h5", whole(folder, LONG)) and not beside(folder), "other numbers, or files are left"),
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
    first = ended(start(QUICK, folder, CLOCK))
    os.utime(folder / "results.h5", (4e9, 4e9))
    code, said = ended(start(QUICK, folder))
    fine = same(folder / "results.h5", whole(folder, QUICK))
    return expect((first[0] == 0, first[1]), (code == 0 and "already measured" in said, said), (fine, "other numbers"))


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
    ran = ended(start([*QUICK, "--fsync"], folder, program))
    enough = counted.exists() and int(counted.read_text()) >= 49
    return expect(
        (ran[0] == 0, ran[1]),
        (enough, "too few flushes"),
        (same(folder / "results.h5", whole(folder, QUICK)), "other numbers"),
    )
