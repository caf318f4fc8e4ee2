"""Kill measurements, merges and training with SIGKILL, resume them, and count what was lost: nothing may be.

    python benchmarks/kill.py [--kills 6] [--merges 20] [--trainer 20] [--workers 20] [--probes surface,hessian]

Every probe is measured on a small network of digits, each finished unit acknowledged as soon as its writer returns.
Half of the kills come at a random moment, half right before a random operation on a file (open, write, sync, rename,
delete), most of them within a merge of journal and results file. After every kill the results file must be readable,
every acknowledged unit must be in it or in a journal, and no unit may be measured twice; when a run ends, its numbers
must be those of a run that was never killed. The same for `landscape merge`, the trainer, and
runs with workers, whose command is killed; `kill_workers.py` kills the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dying import inside_merge, killed, units_in

from landscape import models
from landscape.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from landscape.cli.main import exit_code
from landscape.probe import Shard
from landscape.probes import PROBES, probe_class
from landscape.results import group as groups
from landscape.results import hdf5_file, unmerged_journals
from landscape.results.journal import NotAJournal, records_of
from landscape.results.merging import merge_files
from landscape.running import local_processes
from landscape.running import run as run_module
from landscape.running.executor import IN_PROCESS
from landscape.running.run import reduce_of, run
from landscape.subject.loading.load import load

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


def held(path: Path) -> Units:
    """The finished units of the only result of a file and of its journals."""
    found: Units = set()
    if path.exists():
        with hdf5_file.reading(path) as file:
            for _, group in groups.results_in(file):
                found |= set(map(tuple, np.argwhere(group["done"][()] == 1).tolist()))
    for journal in unmerged_journals.journals(path):
        try:
            found |= {tuple(record.data["index"]) for record in records_of(journal) if "index" in record.data}
        except NotAJournal:
            continue  # killed before its first byte
    return found


def content(path: Path) -> dict[str, Any]:
    """Every array of the only result of a file."""
    with hdf5_file.reading(path) as file:
        ((_, group),) = groups.results_in(file)
        return groups.arrays(group)


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two results hold the same numbers, to the last bit."""
    return list(mine) == list(theirs) and all(
        np.array_equal(mine[name], theirs[name], equal_nan=mine[name].dtype.kind == "f") for name in mine
    )


def campaign(folder: Path, measure: Callable[[Path], None], kills: int, moments: random.Random, count: Count) -> None:
    """Kill a measurement so many times, each one resumed after the last, from a new file whenever it ends."""
    whole, path = folder / "whole.h5", folder / "results.h5"
    start = time.monotonic()
    _, said = killed(lambda: measure(whole), 0, 600)
    seconds, wanted = time.monotonic() - start, content(whole)
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
            count.lost += len(known - held(path))
        except Exception as error:  # any way in which a file cannot be read
            count.unreadable += 1
            print(f"unreadable: {type(error).__name__}: {error}", file=sys.stderr)
        if not died or not kills:
            if died:
                killed(lambda: measure(path), 0, 600)
            count.finished += 1
            count.wrong += not same(content(path), wanted)
            beside = [file.name for file in folder.iterdir() if file not in (whole, path)]
            count.left.update(beside)
            path.unlink()
            known = set()


def checkpoints(folder: Path) -> dict[str, Path]:
    """A small residual network and a small transformer, untrained."""
    made = {}
    for name, arguments in (("resnet_demo", {"blocks": (1, 1), "width": 8}), ("vit_demo", {"depth": 2})):
        torch.manual_seed(0)
        about: dict[str, Any] = {"classes": 10, "image_size": 16, **arguments}
        run_folder = folder / name
        run_folder.mkdir()
        for epoch, snapshot in enumerate(("init", "epoch_001", "final")):
            state = models.build(name, **about).state_dict()
            write_checkpoint(
                run_folder / f"{snapshot}.pt", model=name, model_args=about, state_dict=state,
                data={"name": "digits"}, recipe={"crop": 2, "flip": True}, epoch=float(epoch), metrics={}, seed=0,
            )  # fmt: skip
        made[name] = run_folder / "final.pt"
    return made


def measuring(checkpoint: Path, name: str, *, workers: bool = False) -> Callable[[Path], None]:
    """A function that measures a probe, in its fastest meaningful form, into a file, with a merge after every unit."""
    probe = probe_class(name)(**probe_class(name).smallest)

    def measure(path: Path) -> None:
        run_module.MERGE_SECONDS = 0.0
        with local_processes.Processes(2) if workers else contextlib.nullcontext(IN_PROCESS) as executor:
            run(probe, load(checkpoint, data="digits", samples=32, batch_size=8), path, executor=executor)

    return measure


def kill_merges(folder: Path, checkpoint: Path, kills: int, moments: random.Random, count: Count) -> None:
    """Kill `landscape merge` of three shards: sources as they were, the output the old file or the new one."""
    probe = probe_class("surface")(resolution="9")
    sources = [folder / f"shard-{i}.h5" for i in (1, 2, 3)]
    whole, out = folder / "whole.h5", folder / "all.h5"
    subject = load(checkpoint, data="digits", samples=32, batch_size=8)
    run(probe, subject, whole)
    for number, path in enumerate(sources, start=1):
        run(probe, subject, path, shard=Shard(number, 3))
    kept, wanted = [path.read_bytes() for path in sources], content(whole)
    while kills:
        into = moments.choice([out, sources[0]])
        at = moments.randrange(1, 9)
        died, _ = killed(lambda into=into: merge_files(sources, into, reduce_of=reduce_of), at, 600)  # type: ignore[misc]
        kills, count.kills, count.merging = kills - died, count.kills + died, count.merging + died
        for path, before in zip(sources, kept, strict=True):
            if path.read_bytes() != before:
                count.wrong += not (path == into and same(content(path), wanted))
                path.write_bytes(before)
        if out.exists():
            count.wrong += not same(content(out), wanted)
            count.finished += not died
            out.unlink()
    for into in (out, sources[0]):  # once more: what kills left behind is replaced, then removed
        merge_files(sources, into, reduce_of=reduce_of)
        count.wrong += not same(content(into), wanted)
        count.finished += 1
    count.left.update(file.name for file in folder.iterdir() if file not in (*sources, whole, out))


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
    for name, default in (("kills", 6), ("merges", 20), ("trainer", 20), ("workers", 20), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--probes", default=",".join(PROBES))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    moments, counts = random.Random(chosen.seed), dict[str, Count]()
    print("| what | kills | inside a merge | lost | twice | unreadable | wrong | runs ended | files left |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        made = checkpoints(Path(temporary))

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
        if chosen.merges:
            checkpoint = made["resnet_demo"]
            campaigned("landscape merge", lambda f, c: kill_merges(f, checkpoint, chosen.merges, moments, c))
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
