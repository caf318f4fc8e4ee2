"""Two machines on one: network namespaces joined by a virtual cable, each with a folder that the other cannot see.

    python benchmarks/two_machines.py [--only dask,torchrun]

Every check runs real commands on a small network of digits and says what held: the workers of a dask scheduler,
`torchrun` with a rank on each machine, and shards that `landscape merge` joins. Needs Linux, root and `ip` (iproute2);
without them it says so and ends with exit code 0. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fault_checks.commands import LANDSCAPE, content, ended, expect, held, same

SURFACE = ["surface", "final.pt", "--samples", "16", "--resolution", "3"]
HVP = ["--hvp", "double-backward"]
HESSIAN = ["hessian", "final.pt", "--scope", "dataset", "--samples", "32", "--batch-size", "8", *HVP]
SLACK = 1e-6  # relative, of products that two ranks share


@dataclass(frozen=True)
class Machine:
    """A network namespace with one interface, and a folder."""

    name: str
    address: str
    folder: Path
    hidden: Path  # the folder of the other machine, in whose place it sees an empty one

    def start(self, words: list[str], **environment: str) -> subprocess.Popen[str]:
        """A command on this machine, in its folder."""
        alone = [
            "ip",
            "netns",
            "exec",
            self.name,
            "sh",
            "-c",
            'mount -t tmpfs none "$0" && exec "$@"',
            str(self.hidden),
        ]
        own = {"LANDSCAPE_CACHE": str(self.folder / "cache"), "GLOO_SOCKET_IFNAME": self.name, **environment}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*alone, *words], cwd=self.folder, env={**os.environ, **own}, **pipes)

    def landscape(self, words: list[str]) -> subprocess.Popen[str]:
        """A command of `landscape` on this machine."""
        return self.start([*LANDSCAPE, *words])


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces, whose only way out is the cable between them, and whose folders hold the same checkpoint."""
    names = [f"ls{os.getpid() % 100_000}{letter}" for letter in "ab"]  # also of the ends of the cable
    folders = [folder / name for name in ("first", "second")]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield (
            Machine(names[0], addresses[0], folders[0], folders[1]),
            Machine(names[1], addresses[1], folders[1], folders[0]),
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def unavailable() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    name = f"ls{os.getpid() % 100_000}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
    return "" if tried.returncode == 0 else f"namespaces cannot be made here ({tried.stderr.strip()})"


@contextlib.contextmanager
def cluster(first: Machine, second: Machine, *, workers: int = 1) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A scheduler on the first machine and workers on the second; its address, and what starts one more worker."""
    tool = [sys.executable, "-m", "dask"]
    address, file = f"tcp://{first.address}:8786", first.folder / "scheduler.json"
    options = ["--host", first.address, "--port", "8786", "--no-dashboard", "--scheduler-file", file.name]
    started = [first.start([*tool, "scheduler", *options])]

    def worker() -> subprocess.Popen[str]:
        started.append(second.start([*tool, "worker", address, "--nthreads", "1", "--no-dashboard", "--no-nanny"]))
        return started[-1]

    try:
        wait_for(file.exists)
        for _ in range(workers):
            worker()
        yield address, worker
    finally:
        file.unlink(missing_ok=True)
        for process in reversed(started):
            process.kill()
            process.communicate(timeout=60)


def wait_for(fact: Callable[[], object], seconds: float = 200) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.05)


def dask(first: Machine, second: Machine) -> str:
    """The command and a scheduler on one, a worker on the other: the bits of one process."""
    code, said = ended(first.landscape([*SURFACE, "--out", "one.h5"]))
    with cluster(first, second) as (address, _):
        far, far_said = ended(first.landscape([*SURFACE, "--out", "two.h5", "--scheduler", address]))
    wrong = expect((code == 0, said), (far == 0, far_said))
    return wrong or expect((same(first.folder / "two.h5", first.folder / "one.h5"), "other numbers"))


def other_checkpoint(first: Machine, second: Machine) -> str:
    """Another checkpoint at the same relative path of the worker: one line, nothing stored."""
    shutil.copy(second.folder / "other.pt", second.folder / "final.pt")
    with cluster(first, second) as (address, _):
        code, said = ended(first.landscape([*SURFACE, "--out", "other.h5", "--scheduler", address]))
    shutil.copy(first.folder / "final.pt", second.folder / "final.pt")
    finished = sum(int(arrays["done"].sum()) for arrays in content(first.folder / "other.h5").values())
    return expect((code == 1, f"exit {code}"), ("has other weights" in said, said), (finished == 0, "units stored"))


def no_checkpoint(first: Machine, second: Machine) -> str:
    """No checkpoint on the worker's machine: one line that names the file."""
    (second.folder / "final.pt").rename(second.folder / "away.pt")
    with cluster(first, second) as (address, _):
        code, said = ended(first.landscape([*SURFACE, "--out", "none.h5", "--scheduler", address]))
    (second.folder / "away.pt").rename(second.folder / "final.pt")
    return expect((code == 1, f"exit {code}"), ("final.pt" in said, said))


def late_worker(first: Machine, second: Machine) -> str:
    """A worker joins after the command began and is killed, and another one joins: the bits of one process."""
    words, out = [*SURFACE[:-1], "15"], first.folder / "late.h5"
    code, said = ended(first.landscape([*words, "--out", "early.h5"]))
    with cluster(first, second, workers=0) as (address, worker):
        command = first.landscape([*words, "--out", out.name, "--scheduler", address])
        wait_for(out.exists)
        killed = worker()
        wait_for(lambda: held(out))
        killed.kill()
        missing = 225 - held(out)
        worker()
        far, far_said = ended(command)
    wrong = expect((code == 0, said), (far == 0, far_said), (missing > 0, "the worker was not killed in time"))
    return wrong or expect((same(out, first.folder / "early.h5"), "other numbers"))


def torchrun(first: Machine, second: Machine) -> str:
    """A rank of torchrun on each: eigenvalues over all samples within 1e-6 of one process."""
    ranks = [
        machine.start([
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--node-rank", str(rank), "--master-addr", first.address, "--master-port", "29511", "-m", "landscape",
            *HESSIAN, "--out", "ranks.h5",
        ])
        for rank, machine in enumerate((first, second))
    ]  # fmt: skip
    codes = [ended(process) for process in ranks]
    code, said = ended(first.landscape([*HESSIAN, "--out", "alone.h5"]))
    wrong = expect((code == 0, said), *((code == 0, said) for code, said in codes))
    if wrong:
        return wrong
    (mine,), (theirs,) = (content(first.folder / name).values() for name in ("ranks.h5", "alone.h5"))
    close = np.allclose(mine["eigenvalue"], theirs["eigenvalue"], rtol=SLACK, atol=0)
    return expect((close, f"{mine['eigenvalue']} and {theirs['eigenvalue']}"))


def shards(first: Machine, second: Machine) -> str:
    """A shard on each, then landscape merge: the bits of one process."""
    parts = [
        ended(machine.landscape([*SURFACE, "--shard", f"{number}/2", "--out", f"part-{number}.h5"]))
        for number, machine in ((1, first), (2, second))
    ]
    shutil.copy(second.folder / "part-2.h5", first.folder)  # as a person brings it over
    parts.append(ended(first.landscape([*SURFACE, "--out", "unshared.h5"])))
    parts.append(ended(first.landscape(["merge", "part-1.h5", "part-2.h5", "--out", "all.h5"])))
    wrong = expect(*((code == 0, said) for code, said in parts))
    return wrong or expect((same(first.folder / "all.h5", first.folder / "unshared.h5"), "other numbers"))


CHECKS: dict[str, Callable[[Machine, Machine], str]] = {
    check.__name__: check for check in (dask, late_worker, other_checkpoint, no_checkpoint, torchrun, shards)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(CHECKS))
    chosen = parser.parse_args().only.split(",")
    if reason := unavailable():
        print(f"skipped: {reason}")
        return
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for seed, name in ((0, "final.pt"), (1, "other.pt")):
            make = ["train", "resnet_demo", "--data", "digits", "--epochs", "0", "--seed", str(seed), "--out", name]
            subprocess.run([*LANDSCAPE, *make], cwd=folder, check=True, capture_output=True)
        for machine in ("first", "second"):
            (folder / machine).mkdir()
            for name in ("final.pt", "other.pt"):
                shutil.copy(folder / name / "final.pt", folder / machine / name)
        with two_machines(folder) as (first, second):
            for name in chosen:
                check = CHECKS[name]
                wrong = check(first, second)
                failed += bool(wrong)
                print(f"| {name} | {check.__doc__} | {'FAILED: ' + wrong if wrong else 'holds'} |", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
