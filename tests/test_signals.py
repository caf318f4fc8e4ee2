"""Signals at random moments, to a command, one of its workers, or all: what is finished is kept, and nobody is left.

One moment each of some signals and targets; with `MOMENTS=20` in the environment twenty of all.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import forked
import numpy as np
import pytest
from counting import everything
from fault_checks.commands import units
from measured_runs import save
from test_executors import alive

from landscape.cli.main import exit_code

pytestmark = [pytest.mark.campaign, pytest.mark.usefixtures("one_thread")]

MOMENTS = int(os.environ.get("MOMENTS", "1"))
GRACE = 60.0  # seconds in which a command ends, on a machine as busy as may be
SURFACE = ["surface", "final.pt", "--samples", "16", "--batch-size", "16", "--resolution", "9", "--quiet"]
# The command, which prints the units that it has stored and its workers, which are forked too.
COMMAND = f"""{forked.BESIDE}
import socket, sys
import forked
from landscape.cli.main import main
from landscape.cli.process_setup import end_by_signals
from landscape.running import local_processes
from landscape.results.writer import Writer
server, write = socket.socket(fileno=int(sys.argv[1])), Writer.write
def reported(self, unit, values):
    write(self, unit, values)
    print("unit", *unit.index, flush=True)
class Popen(forked.Popen):
    def __init__(self, *words, **how):
        super().__init__(*words, **how)
        print("worker", self.pid, flush=True)
forked._server, forked.Popen, Writer.write = (lambda: server), Popen, reported
local_processes.subprocess = forked
end_by_signals()
print("ready", flush=True)
main(sys.argv[2:])
"""
# Exit codes of a command that gets a signal, unless it had finished; one whose workers get it ends well.
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
TARGETS = ("command", "worker", "all")
PAIRS = [*(product(CODES, TARGETS) if "MOMENTS" in os.environ else zip(CODES, TARGETS, strict=True))]
TOOK: dict[str, float] = {}  # seconds of a run that nothing happened to


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and in `whole.h5` beside it the surface that nothing happened to."""
    folder = tmp_path_factory.mktemp("run")
    save(folder / "final.pt", seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert exit_code([*SURFACE, "--out", "whole.h5"]) == 0
    return folder / "final.pt"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A dask scheduler, whose workers are started by the runs."""
    pytest.importorskip("distributed")
    from test_dask import Forked

    with Forked(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def start(*words: str) -> forked.Popen:
    server = forked._server().fileno()
    *options, out = words
    command = ["-c", COMMAND, str(server), *SURFACE, *options, "--out", out]
    process = forked.Popen(command, pass_fds=(server,))
    process.wait_for("ready")
    return process


def printed(process: forked.Popen, what: str) -> list[tuple[int, ...]]:
    """The units, or workers, that a command has named so far."""
    lines = (line.split() for line in process.printed().splitlines(keepends=True) if line.endswith("\n"))
    return [tuple(map(int, numbers)) for name, *numbers in lines if name == what]


def held(path: Path) -> set[tuple[int, ...]]:
    """The finished units of a results file and of the journals beside it."""
    return {index for _, index in units(path)}


def assert_whole(path: Path, whole: Path) -> None:
    (_, mine), (_, theirs) = (next(iter(everything(file).values())) for file in (path, whole))
    assert list(mine) == list(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(mine[name], array, err_msg=name)


class Kind(NamedTuple):
    """How a surface is measured by several processes."""

    name: str
    begin: Callable[[], list[forked.Popen]]  # starts the commands
    workers: Callable[[list[forked.Popen]], list[int]]  # the processes that measure for them


@pytest.fixture(params=["local", "dask", "shards"])
def kind(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kind:
    shutil.copy(checkpoint, tmp_path)
    monkeypatch.chdir(tmp_path)
    if request.param == "shards":
        names = {"1/2": "1.h5", "2/2": "2.h5"}
        return Kind("shards", lambda: [start("--shard", *pair) for pair in names.items()], lambda _: [])
    if request.param == "local":
        begin = functools.partial(start, "--workers", "2")
        return Kind("local", lambda: [begin("r.h5")], lambda found: [pid for (pid,) in printed(found[0], "worker")])
    cluster = request.getfixturevalue("cluster")
    from test_dask import children

    def begin_with_two() -> list[forked.Popen]:
        forked.wait_until(lambda: all(n.poll() is not None or children(n.pid) for n in cluster.processes[1:]))
        for _ in range(2 - sum(nanny.poll() is None for nanny in cluster.processes[1:])):
            cluster.worker()
        return [start("--scheduler", str(cluster.file), "r.h5")]

    return Kind("dask", begin_with_two, lambda _: [pid for n in cluster.processes[1:] for pid in children(n.pid)[:1]])


def ended(kind: Kind, whole: Path, commands: list[forked.Popen], hit: Collection[int], number: int) -> bool:
    """Check how commands ended some of which got a signal; whether all is measured now, which is then removed."""
    for command in commands:
        _, errors = command.communicate(GRACE)
        assert command.returncode in ({0, CODES[number]} if command.pid in hit else {0}), errors
        if command.returncode > 0:
            assert re.fullmatch(r"(note: .*\n)*landscape: .*everything finished is kept.*\n", errors), errors
    left = hit if kind.name == "dask" else kind.workers(commands)  # others of dask serve whoever comes next
    forked.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), GRACE)
    files = [Path(name) for name in (("1.h5", "2.h5") if kind.name == "shards" else ("r.h5",))]
    for path, command in zip(files, commands, strict=True):
        named = printed(command, "unit")
        assert len(named) == len({*named})
        assert {*named} <= held(path)
    if any(command.returncode for command in commands):
        return False
    if kind.name == "shards":
        assert exit_code(["merge", *map(str, files), "--out", "r.h5", "--quiet"]) == 0
    assert_whole(Path("r.h5"), whole)
    for path in {Path("r.h5"), *files}:
        path.unlink()
    assert [path.name for path in Path().iterdir()] == ["final.pt"]
    return True


@pytest.mark.parametrize(("number", "target"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_what_is_finished_is_kept_and_nobody_is_left(kind: Kind, number: int, target: str, checkpoint: Path) -> None:
    """A shard is a command of its own, and the other one goes on."""
    if (kind.name, target) == ("shards", "worker"):
        pytest.skip("shards have no workers")
    moments, hits, slowest, over = random.Random(f"{kind.name} {number} {target}"), 0, 0.0, False
    while hits < MOMENTS or not over:
        begun = time.monotonic()
        commands = kind.begin()
        time.sleep(moments.uniform(0.0, TOOK.get(kind.name, 0.0)))
        those = [command.pid for command in commands if command.poll() is None] if target != "worker" else []
        workers = [pid for pid in kind.workers(commands) if alive(pid)] if target != "command" else []
        chosen = moments.sample([*those, *workers], len([*those, *workers]))[: None if target == "all" else 1]
        if hits == MOMENTS or kind.name not in TOOK or all(command.poll() is not None for command in commands):
            chosen = []
        now = time.monotonic()
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        over = ended(kind, checkpoint.with_name("whole.h5"), commands, chosen, number)
        hits, slowest = hits + bool(chosen), max(slowest, time.monotonic() - now if chosen else 0.0)
        if not chosen:  # on a machine that is less busy than before, shorter
            TOOK[kind.name] = time.monotonic() - begun
    print(f"{kind.name}, {signal.Signals(number).name} to {target}: {hits} moments, ended within {slowest:.1f} s")
