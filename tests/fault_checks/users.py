"""What users and batch systems do while commands measure: signals, the same file several times, files that change."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from dask_commands import children

from fault_checks.commands import (
    LONG,
    MAKE,
    MIDDLE,
    QUICK,
    beside,
    content,
    done,
    ended,
    expect,
    held,
    running,
    same,
    start,
    whole,
)
from landscape.results import reader

MOMENTS = int(os.environ.get("MOMENTS", "10"))
GRACE = 20.0  # seconds that a batch system leaves between SIGTERM and SIGKILL; 30 by default under Slurm


def _hearing_ctrl_c() -> None:
    """As on a terminal: a shell lets the commands that it starts in the background ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def sigint(folder: Path) -> str:
    """Ctrl-C at MOMENTS random moments of runs with and without workers, every other twice: code 130, one line.

    All processes of the terminal get it. What was finished is in file or journal, nobody is left, and a run that no
    signal reached has the numbers of one that nothing happened to.
    """
    wanted, moments, path = whole(folder, LONG), random.Random(0), folder / "results.h5"
    wrong, hits, slowest, took = Counter[str](), 0, 0.0, dict[int, float]()  # of a whole run, with so many workers
    since = time.monotonic()
    subprocess.run([sys.executable, "-c", ""], check=True)
    python = 2 * (time.monotonic() - since)  # in which Python has started, before which a command hears nothing
    while hits < MOMENTS or len(took) < 2:
        workers = 2 if hits % 3 == 2 or (took and len(took) < 2) else 1
        shown, since = os.environ | {"PYTHONFAULTHANDLER": "1"}, time.monotonic()
        process = start(
            [*LONG, "--workers", str(workers)], folder, preexec_fn=_hearing_ctrl_c, start_new_session=True, env=shown
        )
        if workers in took:
            time.sleep(moments.uniform(python, took[workers]))
        before, now = held(path), time.monotonic()
        for pause in (0.0, *([moments.uniform(0.0, 0.3)] if hits % 2 else ())) if workers in took else ():
            time.sleep(pause)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        try:
            _, err = process.communicate(timeout=3 * GRACE if workers in took else None)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # which prints where it is
            _, err = process.communicate()
        over, said = process.returncode == 0, err.strip().splitlines()
        hits, slowest = hits + (not over), max(slowest, 0.0 if over else time.monotonic() - now)
        facts = (
            (process.returncode in (0, 130), f"{process.returncode}: {err}"),
            (not _left(process.pid), "a process is left"), (before <= held(path), f"{held(path)} units of {before}"),
            (over or [i for i, line in enumerate(said, 1) if "finished is kept" in line] == [len(said)], err),
            ("Traceback" not in err and "Exception ignored" not in err, err),
            (not over or (same(path, wanted) and not beside(folder)), "other numbers, or files are left"),
        )  # fmt: skip
        wrong.update(text for holds, text in facts if not holds)
        if over:  # the next one measures all of it, on a machine that may be less busy
            took[workers] = time.monotonic() - since
            path.unlink()
    print(f"{hits} moments over {took[1]:.0f} s, with workers {took[2]:.0f} s; ended within {slowest:.1f} s")
    return "; ".join(f"{count} of {hits}: {text}" for text, count in wrong.items())


def _left(group: int) -> bool:
    """Whether a process of a group is still there, a second after its first one ended."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    return True


def same_question_twice(folder: Path) -> str:
    """The same command while the first one runs: refused in one line; the first ends, and a third finds all there."""
    first = running(LONG, folder, 20)
    first.send_signal(signal.SIGSTOP)  # however slowly the second one starts, the first still measures
    alive = first.poll() is None
    code, said = ended(start(LONG, folder))
    first.send_signal(signal.SIGCONT)
    ends, words = ended(first)
    third, found = ended(start(LONG, folder))
    fine = same(folder / "results.h5", whole(folder, LONG)) and not beside(folder)
    return expect(
        (alive, "the first ended too early for this check"), (code == 1, f"exit code {code}"),
        ("is being measured into results.h5 by another process" in said, said), (ends == 0, words),
        (third == 0 and "already measured" in found, found), (fine, "other numbers, or files are left"),
    )  # fmt: skip


OFTEN = """
import sys
from landscape.running import run
run.MERGE_SECONDS = 0.0
from landscape.cli.main import main
main(sys.argv[1:])
"""


def polling_reader(folder: Path) -> str:
    """A merge after every unit, and a reader all the time: it always finds a whole file, whose units only grow."""
    path, counts, errors = folder / "results.h5", [0], list[str]()
    process = start(MIDDLE, folder, OFTEN)
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            try:
                if path.exists():
                    counts.append(done(path))
                    counts.append(sum(reader.finished_units(found) for _, found in reader.groups(path)))
            except Exception as error:  # any way in which a file cannot be read
                errors.append(f"{type(error).__name__}: {error}")

    polling = threading.Thread(target=read)
    polling.start()
    try:
        code, said = ended(process)
    finally:
        over.set()
        polling.join()
    return expect(
        (code == 0, said), (not errors, str(errors[:1])), (counts == sorted(counts), "units were gone in between"),
        (len(set(counts)) > 10, f"only {len(set(counts))} states were seen"), (done(path) == 121, "not finished"),
    )  # fmt: skip


def checkpoint_replaced(folder: Path) -> str:
    """Another checkpoint under the same name during a run: only numbers of the first enter, also from later workers."""
    wanted, other = whole(folder, LONG), folder / "other"
    words = [*MAKE, "--seed", "1", "--out", "other"]
    assert ended(start(words, folder))[0] == 0
    first = (folder / "final.pt").read_bytes()

    def replace() -> None:
        shutil.copy(other / "final.pt", folder / "new.pt")
        (folder / "new.pt").replace(folder / "final.pt")

    process = running(LONG, folder, 20)
    replace()
    code, said = ended(process)
    alone = code == 0 and same(folder / "results.h5", wanted)
    again, words_of = ended(start(QUICK, folder))
    results = len(content(folder / "results.h5"))
    (folder / "final.pt").write_bytes(first)
    (folder / "results.h5").unlink()
    process = running([*LONG, "--workers", "2"], folder, 20)
    replace()
    for worker in children(process.pid)[:1]:
        os.kill(worker, signal.SIGKILL)
    late, reason = ended(process)
    (folder / "final.pt").write_bytes(first)
    resumed, end = ended(start(LONG, folder))
    return expect(
        (alone, f"{code} {said}"), (again == 0 and results == 2, f"{words_of}; {results} results"),
        (late == 0 or (late == 1 and "has other weights; the file was replaced" in reason), f"{late} {reason}"),
        (resumed == 0 and same(folder / "results.h5", wanted), f"after that: {end}"),
    )  # fmt: skip


def results_deleted(folder: Path) -> str:
    """The results file deleted during a run, after merges: said once, all units are in the file at the end."""
    wanted = whole(folder, MIDDLE)
    process = start(MIDDLE, folder, OFTEN)
    until = time.monotonic() + 200
    while not (folder / "results.h5").exists() or done(folder / "results.h5") < 20:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    (folder / "results.h5").unlink()
    _, err = process.communicate(timeout=200)
    return expect(
        (process.returncode == 0, err), (err.count("was deleted or replaced; its") == 1, err),
        (same(folder / "results.h5", wanted), "other numbers"), (not beside(folder), "files are left"),
    )  # fmt: skip


def many(folder: Path, commands: int) -> str:
    """So many commands with different questions on one results file, at once."""
    words = [[*QUICK, "--seed", str(seed)] for seed in range(commands)]
    together = [start(one, folder) for one in words]
    codes = [ended(process, 400) for process in together]
    apart = folder / "apart"
    apart.mkdir()
    shutil.copy(folder / "final.pt", apart)
    for one in words:
        assert ended(start(one, apart))[0] == 0
    return expect(
        (all(code == 0 for code, _ in codes), str(codes)), (not beside(folder), "files are left"),
        (same(folder / "results.h5", apart / "results.h5"), "other numbers"),
    )  # fmt: skip


def two_commands(folder: Path) -> str:
    """Two commands on one results file at once: both end, and the file is that of one after the other."""
    return many(folder, 2)


def eight_commands(folder: Path) -> str:
    """Eight commands on one results file at once: all end, and the file is that of one after the other."""
    return many(folder, 8)
