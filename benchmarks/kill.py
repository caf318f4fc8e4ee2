"""Kill measurements and training with SIGKILL, resume them, and count what was lost: nothing may be.

    python benchmarks/kill.py [--kills 6] [--trainer 20] [--workers 20] [--probes surface,hessian]

Every probe is measured on a small network of digits, each finished unit acknowledged as soon as its writer returns.
Half of the kills come at a random moment, half right before a random operation on a file (open, write, sync, rename,
delete), most of them within a merge of journal and results file. After every kill the results file must be readable,
every acknowledged unit must be in it or in a journal, and no unit may be measured twice; when a run ends, its numbers
must be those of a run that was never killed. The same for the trainer and for runs with workers, whose command is
killed; `kill_workers.py` kills the workers, and `failing_calls.py` a merge before and within every call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fault_checks.commands import checkpoint, same, units

from landscape.checkpoints.checkpoint import read_checkpoint
from landscape.cli.main import exit_code
from landscape.probes import PROBES, probe_class
from landscape.results.writer import Writer
from landscape.running import local_processes
from landscape.running import run as run_module
from landscape.running.executor import IN_PROCESS
from landscape.running.run import run
from landscape.subject.loading.load import load

OPERATIONS = ("open", "pwrite", "fsync", "fchmod", "replace", "unlink", "ftruncate")
Units = set[tuple[int, ...]]


@dataclass
class Count:
    """What happened in one campaign."""

    kills: int = 0
    merging: int = 0  # of them inside a merge
    lost: int = 0  # acknowledged units that are gone
    twice: int = 0  # acknowledged units that were measured again
    unreadable: int = 0
    wrong: int = 0  # finished runs with other numbers
    finished: int = 0
    left: Counter[str] = field(default_factory=Counter)  # files that no run removed

    def line(self, what: str) -> str:
        """A row of the table."""
        numbers = self.kills, self.merging, self.lost, self.twice, self.unreadable, self.wrong, self.finished
        return f"| {what} | {' | '.join(map(str, numbers))} | {sum(self.left.values())} |"


def killed(body: Callable[[], None], at: int, after: float) -> tuple[bool, str]:
    """Run something in a forked process that dies before its operation `at` on files, or `after` so many seconds.

    Returns whether it was killed, and what it said.
    """
    reading_end, writing_end = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            os.close(reading_end)
            sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            _instrument(writing_end, at)
            body()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            os.write(writing_end, f"E {type(error).__name__}: {error}\n".encode())
        os._exit(code)
    os.close(writing_end)
    end = time.monotonic() + after
    ended = 0
    while not ended and time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)
    if not ended:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    with os.fdopen(reading_end) as stream:
        said = stream.read()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a run failed by itself: {said.splitlines()[-1:]}")
    return os.WIFSIGNALED(status), said


def _instrument(pipe: int, at: int) -> None:
    """Acknowledge units on a pipe, mark merges, and die before an operation on files."""
    left = [at]

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, dying(getattr(os, name)))
    write, merge = Writer.write, Writer.merge

    def acknowledged(self: Writer, unit: Any, values: Any) -> None:
        write(self, unit, values)
        os.write(pipe, f"U {json.dumps(unit.index)}\n".encode())

    def marked(self: Writer) -> None:
        os.write(pipe, b"M\n")
        merge(self)
        os.write(pipe, f"m {at - left[0]}\n".encode())

    Writer.write, Writer.merge = acknowledged, marked  # type: ignore[method-assign]


def units_in(said: str) -> list[tuple[int, ...]]:
    """The acknowledged units."""
    return [tuple(json.loads(line[2:])) for line in said.splitlines() if line.startswith("U ")]


def inside_merge(said: str) -> bool:
    """Whether the last that was said is that a merge begins."""
    marks = [line[0] for line in said.splitlines() if line[:1] in "Mm"]
    return bool(marks) and marks[-1] == "M"


def campaign(folder: Path, measure: Callable[[Path], None], kills: int, moments: random.Random, count: Count) -> None:
    """Kill a measurement so many times, each one resumed after the last, from a new file whenever it ends."""
    whole, path = folder / "whole.h5", folder / "results.h5"
    start = time.monotonic()
    _, said = killed(lambda: measure(whole), 0, 600)
    seconds = time.monotonic() - start
    operations = max((int(line[2:]) for line in said.splitlines() if line.startswith("m ")), default=40)
    known: Units = set()
    while kills:
        at, after = 0, 600.0
        if moments.random() < 0.5:
            at = moments.randrange(1, operations)
        else:
            after = moments.uniform(0.0, seconds)
        died, said = killed(lambda: measure(path), at, after)
        said_now = units_in(said)
        count.twice += len(known & set(said_now)) + len(said_now) - len(set(said_now))
        known |= set(said_now)
        if died:
            kills -= 1
            count.kills += 1
            count.merging += inside_merge(said)
        try:
            count.lost += len(known - {index for _, index in units(path)})
        except Exception as error:  # any way in which a file cannot be read
            count.unreadable += 1
            print(f"unreadable: {type(error).__name__}: {error}", file=sys.stderr)
        if not died or not kills:
            if died:
                killed(lambda: measure(path), 0, 600)
            count.finished += 1
            count.wrong += not same(path, whole)
            beside = [file.name for file in folder.iterdir() if file not in (whole, path)]
            count.left.update(beside)
            path.unlink()
            known = set()


def measuring(network: Path, name: str, *, workers: bool = False) -> Callable[[Path], None]:
    """A function that measures a probe, in its fastest meaningful form, into a file, with a merge after every unit."""
    probe = probe_class(name)(**probe_class(name).smallest)

    def measure(path: Path) -> None:
        run_module.MERGE_SECONDS = 0.0
        with local_processes.Processes(2) if workers else contextlib.nullcontext(IN_PROCESS) as executor:
            run(probe, load(network, data="digits", samples=32, batch_size=8), path, executor=executor)

    return measure


def kill_trainer(folder: Path, kills: int, moments: random.Random, count: Count) -> None:
    """Kill training: it resumes, and ends with the weights of a training that was never killed."""

    def train(to: Path) -> None:
        words = ["train", "resnet_demo", "--data", "digits", "--epochs", "3", "--fraction", "0.1", "--quiet"]
        raise SystemExit(exit_code([*words, "--out", str(to)]))

    start = time.monotonic()
    killed(lambda: train(folder / "whole"), 0, 600)
    seconds, path = time.monotonic() - start, folder / "run"
    wanted = read_checkpoint(folder / "whole" / "final.pt").state_dict
    while kills:
        at, after = (moments.randrange(1, 60), 600.0) if moments.random() < 0.5 else (0, moments.uniform(0, seconds))
        died, _ = killed(lambda: train(path), at, after)
        kills, count.kills = kills - died, count.kills + died
        for file in path.glob("*.pt") if path.exists() else ():
            try:
                torch.load(file, weights_only=True)
            except Exception as error:  # any way in which a file cannot be read
                count.unreadable += 1
                print(f"unreadable: {file.name}: {type(error).__name__}: {error}", file=sys.stderr)
        if not died or not kills:
            if died:
                killed(lambda: train(path), 0, 600)
            found = read_checkpoint(path / "final.pt").state_dict
            count.finished += 1
            count.wrong += not all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
            shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("kills", 6), ("trainer", 20), ("workers", 20), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--probes", default=",".join(PROBES))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    moments, counts = random.Random(chosen.seed), dict[str, Count]()
    print("| what | kills | inside a merge | lost | twice | unreadable | wrong | runs ended | files left |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        made = dict[str, Path]()
        for network, about in (("resnet_demo", {"blocks": (1, 1), "width": 8}), ("vit_demo", {"depth": 2})):
            Path(temporary, network).mkdir()
            snapshots = ("init", "epoch_001", "final")
            made[network] = checkpoint(Path(temporary, network), network, snapshots, **about)

        def campaigned(what: str, go: Callable[[Path, Count], None]) -> None:
            folder = Path(temporary) / f"campaign-{len(counts)}"
            folder.mkdir()
            counts[what] = Count()
            go(folder, counts[what])
            print(counts[what].line(what), flush=True)

        probes = chosen.probes.split(",") if chosen.kills else []
        if "corruption" in probes and importlib.util.find_spec("imagecorruptions") is None:
            print("corruption is left out: the package that makes them is not installed", file=sys.stderr)
            probes.remove("corruption")
        for name in probes:
            measure = measuring(made["vit_demo" if name.startswith("attention") else "resnet_demo"], name)
            campaigned(name, lambda f, c, m=measure: campaign(f, m, chosen.kills, moments, c))  # type: ignore[misc]
        if chosen.workers:
            measure = measuring(made["resnet_demo"], "surface", workers=True)
            campaigned("surface, two workers", lambda f, c: campaign(f, measure, chosen.workers, moments, c))
        if chosen.trainer:
            campaigned("landscape train", lambda f, c: kill_trainer(f, chosen.trainer, moments, c))
    total = Count()
    for count in counts.values():
        for name in ("kills", "merging", "lost", "twice", "unreadable", "wrong", "finished"):
            setattr(total, name, getattr(total, name) + getattr(count, name))
        total.left += count.left
    print(total.line("all"))
    failed = total.lost or total.twice or total.unreadable or total.wrong or total.left
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
