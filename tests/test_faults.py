"""Campaigns: calls that fail, a folder that may not be written, a clock that jumps, and flushes that are asked for."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_checks.commands import LONG, MAKE, QUICK, beside, ended, expect, held, running, same, start, whole

pytestmark = pytest.mark.campaign

FAILING_CALLS = Path(__file__).parents[1] / "benchmarks" / "failing_calls.py"
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


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="compiles what the calls go through")
def test_a_call_that_changes_a_file_may_be_the_last_or_fail() -> None:
    command = [sys.executable, str(FAILING_CALLS), "--stride", "41"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    *cases, total = (row.strip("| ").split(" | ") for row in process.stdout.splitlines()[2:])
    assert [name for name, *_ in cases] == ["run", "merge", "repair", "report", "train"]
    assert int(total[-2]) > 15
    assert int(total[-1]) == 0


def test_faults_of_machines_end_as_they_should(tmp_path: Path) -> None:
    """In one test, which measures once what no fault has happened to."""
    code, said = ended(start([*MAKE, "--out", "made"], tmp_path))
    assert code == 0, said
    checks: tuple[Callable[[Path], str], ...] = (clock_jumps, fsync, read_only_folder)
    wrong = {}
    for check in checks:
        folder = tmp_path / check.__name__
        folder.mkdir()
        shutil.copy(tmp_path / "made" / "final.pt", folder)
        wrong[check.__name__] = check(folder)
    assert not any(wrong.values()), wrong
