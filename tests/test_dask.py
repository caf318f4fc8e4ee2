"""Workers of a dask scheduler: the same data as in one process, also when workers are killed, join late or use TLS."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from dask_commands import ENVIRONMENT, Cluster, children
from measured_runs import assert_same, loaded, save, small, stored_result
from test_executors import network

from landscape.cli.main import exit_code
from landscape.probe import listening
from landscape.results import group as groups
from landscape.running.executor import PoisonUnits
from landscape.running.run import digest, run
from landscape.running.schedule import Schedule

if importlib.util.find_spec("distributed") is None:  # to import it takes half a second, in collection too
    pytest.skip("distributed is not installed", allow_module_level=True)
from landscape.running import dask_cluster
from landscape.running.dask_cluster import DaskCluster

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# The commands of dask, forked; what starts workers begins a new one when one dies, as a nanny does.
DASK = """
import os, sys
import dask
dask.config.refresh()  # from its own environment
while sys.argv[1] == "worker" and (worker := os.fork()):
    if os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) >= 0:
        sys.exit()
from dask.__main__ import main
main()
"""


class Forked(Cluster):
    """A cluster whose interpreters start in no time."""

    def _start(self, *words: str) -> Any:
        words = (*words, "--host", "127.0.0.1", *(("--no-nanny",) if words[0] == "worker" else ("--no-dashboard",)))
        command = ["-c", DASK, *words]
        process = forked.Popen(
            command, env=self._environment, cwd=self.folder, imports=["distributed", "dask.__main__"]
        )
        self.processes.append(process)
        return process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers; dask gives a task up after two deaths, by default four."""
    failures = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"}
    with Forked(tmp_path_factory.mktemp("cluster"), **failures) as cluster:
        cluster.worker()
        cluster.worker()
        yield cluster


def refused(scheduler: str, message: str) -> None:
    with pytest.raises(OSError, match=message), DaskCluster(scheduler):
        pass
    gc.collect()  # dask's client, which waits forever if it is collected while the loop of the next one starts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder / "final.pt", seed=0)
    return folder


def test_a_worker_that_has_another_file_enters_nothing(cluster: Cluster, tmp_path: Path) -> None:
    save(tmp_path / "final.pt", seed=0)
    subject, path = loaded(tmp_path), tmp_path / "results.h5"
    save(tmp_path / "final.pt", seed=1)
    with (
        DaskCluster(str(cluster.file)) as executor,
        pytest.raises(ValueError, match=r"has other weights; the file was"),
    ):
        run(small("variance"), subject, path, executor=executor)
    group = groups.stored_group(path, "variance", digest(small("variance"), subject))
    assert group is None or not groups.read_group(path, group)["done"].any()


def test_a_unit_that_kills_its_workers_is_named_and_the_others_are_stored(cluster: Cluster, tmp_path: Path) -> None:
    subject, path, probe = network(tmp_path, 21, kill="5"), tmp_path / "r.h5", small("trace")
    with DaskCluster(str(cluster.file)) as executor, pytest.raises(PoisonUnits, match=r"unit 2 \(batch=2\)"):
        run(probe, subject, path, executor=executor)
    done = groups.read_group(path, str(groups.stored_group(path, probe.name, digest(probe, subject))))["done"]
    assert done.ravel().tolist() == [1, 1, 0]


def test_a_unit_that_ends_the_program_ends_the_run_with_an_error(cluster: Cluster, tmp_path: Path) -> None:
    subject, path, probe = network(tmp_path, 21, end="5"), tmp_path / "r.h5", small("trace")
    with DaskCluster(str(cluster.file)) as executor, pytest.raises(ValueError, match=r"called sys.exit\(0\)"):
        run(probe, subject, path, executor=executor)
    group = groups.stored_group(path, probe.name, digest(probe, subject))
    assert group is None or groups.read_group(path, group)["done"].ravel()[-1] == 0


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_with_tls_only_those_who_have_the_key_are_served_by_workers_that_join_late_and_leave(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dask

    from landscape.running import dask_cluster

    text = (ROOT / "docs" / "workers.md").read_text()
    (command,) = re.findall(r"^openssl req .*$", text, re.MULTILINE)
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    names = re.findall(r"^export (DASK_DISTRIBUTED__COMM__\w+)=(\S+)$", text, re.MULTILINE)
    tls = {name: str(tmp_path / value) if value.endswith(".pem") else value for name, value in names}
    assert len(tls) == 8
    probe = small("surface", resolution="5")
    whole = stored_result(tmp_path / "one.h5", run(probe, loaded(folder), tmp_path / "one.h5"))
    with Forked(tmp_path, "--protocol", "tls", **tls) as cluster:
        address = re.findall(r"tls://127\.0\.0\.1:\d+", cluster.file.read_text())[0]
        with monkeypatch.context() as patch:
            patch.setattr(dask_cluster, "CONNECT_SECONDS", 2.0)
            for without in (address, address.replace("tls", "tcp")):
                refused(without, "no dask scheduler answers at t")
        workers: list[Any] = []
        left: list[int] = []

        def joined(count: int) -> None:
            if not workers:
                assert count == 0
                workers.append(cluster.worker())

        def report(done: int, total: int) -> None:
            if done == 2 and not left:
                workers.append(cluster.worker())
                left.extend(children(workers[0].pid))
                os.kill(left[0], signal.SIGTERM)

        listener: Any = SimpleNamespace(units=lambda *_: None, products=lambda *_, **__: None, workers=joined)
        given = dask.config.collect_env(tls)["distributed"]["comm"]
        with dask.config.set({"distributed.comm": dask.config.merge(dask.config.get("distributed.comm"), given)}):
            with DaskCluster(str(cluster.file)) as executor, listening(listener):
                outcome = run(probe, loaded(folder), tmp_path / "r.h5", executor=executor, report=report)
            assert len(left) == 1
            assert_same(stored_result(tmp_path / "r.h5", outcome), whole)
            words = ["variance", str(folder / "final.pt"), "--data", "digits", "--samples", "32"]
            assert exit_code([*words, "--scheduler", str(cluster.file), "--out", str(tmp_path / "r.h5")]) == 0


def test_a_result_that_died_with_its_worker_is_waited_for() -> None:
    """However long dask takes to compute it again, as long as its scheduler answers."""
    answers = [TimeoutError(), TimeoutError(), [(0.5, {"loss": 1.0})]]

    def result(timeout: float) -> Any:
        if isinstance(answer := answers.pop(0), TimeoutError):
            raise answer
        return answer

    executor, schedule = DaskCluster("tcp://nowhere:1"), Schedule(1, seconds=1.0)
    chunk = schedule.next("slot", 1, 0.0)
    executor._client = SimpleNamespace(status="running")
    task = SimpleNamespace(result=result, done=lambda: False)
    assert list(executor._results(task, chunk, "slot", schedule)) == [(0, {"loss": 1.0})]
    answers = [TimeoutError()]
    executor._client.status = "closed"
    with pytest.raises(ConnectionError, match="is gone; everything finished is stored"):
        list(executor._results(task, chunk, "slot", schedule))


@pytest.mark.campaign
@pytest.mark.skipif(importlib.util.find_spec("dask_jobqueue") is None, reason="needs dask-jobqueue")
def test_the_recipe_for_slurm_runs_with_jobs_of_this_machine(folder: Path, tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "workers.md").read_text(), re.DOTALL)
    assert "SLURMCluster(" in recipe
    local = recipe.replace("from dask_jobqueue import SLURMCluster", "from dask_jobqueue.local import LocalCluster")
    local = re.sub(
        r"SLURMCluster\(.*?\n    \)", "LocalCluster(cores=1, processes=1, memory='1GB')", local, flags=re.DOTALL
    )
    local = local.replace("jobs=20", "jobs=1").replace("time.sleep(3600)", "time.sleep(0.2)")
    environment = {**os.environ, **ENVIRONMENT}
    jobs = forked.Popen(["-c", local], cwd=tmp_path, env=environment, imports=["dask_jobqueue"])
    try:
        forked.wait_until(lambda: (tmp_path / "scheduler.json").exists() or jobs.poll() is not None)
        with DaskCluster(str(tmp_path / "scheduler.json")) as executor:
            outcome = run(small("variance"), loaded(folder), tmp_path / "r.h5", executor=executor)
        assert outcome.measured == outcome.units
    finally:
        jobs.send_signal(signal.SIGINT)
        try:
            jobs.wait(300)
        finally:
            jobs.kill()


def test_a_scheduler_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from landscape.running import dask_cluster

    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 0.5)
    refused("nowhere.json", "there is no such file; give an address")
    refused("tcp://127.0.0.1:9", r"no dask scheduler answers at tcp://127\.0\.0\.1:9 ")


def test_a_scheduler_file_without_an_address_is_refused_at_once(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "scheduler.json").write_text("{}")
    with (
        pytest.raises(ValueError, match=r"scheduler\.json has no address"),
        DaskCluster(str(tmp_path / "scheduler.json")),
    ):
        pass


def test_an_address_that_accepts_and_is_silent_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start, address = time.monotonic(), f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OSError, match=f"no dask scheduler answers at {address}"), DaskCluster(address):
            pass
        assert time.monotonic() - start < 10
