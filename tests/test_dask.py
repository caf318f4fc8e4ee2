"""Workers of a dask scheduler: the same data as in one process, also when workers are killed, join late or use TLS."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from measured_runs import assert_same, loaded, save, small, stored_result
from test_executors import KILLER

from landscape.executors.executor import PoisonUnits
from landscape.results import group as groups
from landscape.run import digest, run
from landscape.subject import loading

if importlib.util.find_spec("distributed") is None:  # to import it takes half a second, in collection too
    pytest.skip("distributed is not installed", allow_module_level=True)
from landscape.executors.dask_cluster import DaskCluster

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
from dask_commands import ENVIRONMENT, Cluster, children  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CONNECT = """
import sys
from landscape.executors import dask_cluster
dask_cluster.CONNECT_SECONDS = 2.0
for address in sys.argv[1:]:
    try:
        dask_cluster.DaskCluster(address).__enter__()
    except OSError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    failures = {
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1"
    }  # deaths before dask gives a task up; 3 by default
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), **failures)
    cluster.worker()
    cluster.worker()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder / "final.pt", seed=0)
    return folder


def test_killed_workers_cost_nothing(cluster: Cluster, folder: Path, tmp_path: Path) -> None:
    probe, options = small("surface", resolution="7"), {"samples": 64}
    whole = stored_result(tmp_path / "one.h5", run(probe, loaded(folder, **options), tmp_path / "one.h5"))
    killed: list[int] = []

    def report(done: int, total: int) -> None:
        if done in (2, 20):
            nanny = cluster.processes[1 + len(killed) % 2].pid
            for worker in children(nanny)[:1]:
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)

    with DaskCluster(str(cluster.file)) as executor:
        outcome = run(probe, loaded(folder, **options), tmp_path / "r.h5", executor=executor, report=report)
    assert killed
    assert_same(stored_result(tmp_path / "r.h5", outcome), whole)


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
    code = KILLER.replace(
        '"worker_process" in pathlib.Path("/proc/self/cmdline").read_text()', f"os.getpid() != {os.getpid()}"
    )
    (tmp_path / "net.py").write_text(code)
    arguments = {"model": f"{tmp_path}/net.py:net", "model_arg": {"kill": "5"}, "data": "digits", "samples": 21}
    subject, path, probe = loading.load(**arguments, batch_size=8), tmp_path / "r.h5", small("trace")
    with DaskCluster(str(cluster.file)) as executor, pytest.raises(PoisonUnits, match=r"unit 2 \(batch=2\)"):
        run(probe, subject, path, executor=executor)
    done = groups.read_group(path, str(groups.stored_group(path, probe.name, digest(probe, subject))))["done"]
    assert done.ravel().tolist() == [1, 1, 0]


def test_workers_may_join_late_and_leave(folder: Path, tmp_path: Path) -> None:
    probe = small("surface", resolution="5")
    whole = stored_result(tmp_path / "one.h5", run(probe, loaded(folder), tmp_path / "one.h5"))
    cluster = Cluster(tmp_path)
    try:
        first: list[subprocess.Popen[bytes]] = []
        timer = threading.Timer(1.0, lambda: first.append(cluster.worker()))
        timer.start()
        left: list[int] = []

        def report(done: int, total: int) -> None:
            if done == 2 and not left:
                cluster.worker()
                first[0].terminate()  # it hands its tasks on
                left.append(done)

        with DaskCluster(str(cluster.file)) as executor:
            outcome = run(probe, loaded(folder), tmp_path / "r.h5", executor=executor, report=report)
        assert left
        assert_same(stored_result(tmp_path / "r.h5", outcome), whole)
    finally:
        cluster.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_with_tls_only_those_who_have_the_key_are_served(folder: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "workers.md").read_text()
    (command,) = re.findall(r"^openssl req .*$", text, re.MULTILINE)
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    names = re.findall(r"^export (DASK_DISTRIBUTED__COMM__\w+)=(\S+)$", text, re.MULTILINE)
    tls = {name: str(tmp_path / value) if value.endswith(".pem") else value for name, value in names}
    assert len(tls) == 8
    cluster = Cluster(tmp_path, "--protocol", "tls", **tls)
    try:
        cluster.worker()
        address = re.findall(r"tls://127\.0\.0\.1:\d+", cluster.file.read_text())[0]
        wrong = [sys.executable, "-c", CONNECT, address, address.replace("tls", "tcp")]
        done = subprocess.run(wrong, capture_output=True, text=True, timeout=60)
        assert [line[:30] for line in done.stdout.splitlines()] == ["no dask scheduler answers at t"] * 2, done.stderr
        words = ["variance", "final.pt", "--data", "digits", "--samples", "32", "--scheduler", str(cluster.file)]
        command = [sys.executable, "-P", "-m", "landscape", *words, "--out", str(tmp_path / "r.h5")]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **tls}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    finally:
        cluster.stop()


@pytest.mark.skipif(importlib.util.find_spec("dask_jobqueue") is None, reason="needs dask-jobqueue")
def test_the_recipe_for_slurm_runs_with_jobs_of_this_machine(folder: Path, tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "workers.md").read_text(), re.DOTALL)
    assert "SLURMCluster(" in recipe
    local = recipe.replace("from dask_jobqueue import SLURMCluster", "from dask_jobqueue.local import LocalCluster")
    local = re.sub(
        r"SLURMCluster\(.*?\n    \)", "LocalCluster(cores=1, processes=1, memory='1GB')", local, flags=re.DOTALL
    )
    local = local.replace("jobs=20", "jobs=2").replace("time.sleep(3600)", "time.sleep(0.2)")
    (tmp_path / "workers.py").write_text(local)
    jobs = subprocess.Popen([sys.executable, "workers.py"], cwd=tmp_path, env={**os.environ, **ENVIRONMENT})
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "scheduler.json").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        with DaskCluster(str(tmp_path / "scheduler.json")) as executor:
            outcome = run(small("variance"), loaded(folder), tmp_path / "r.h5", executor=executor)
        assert outcome.measured == outcome.units
    finally:
        jobs.send_signal(signal.SIGINT)
        try:
            jobs.wait(20)
        finally:
            jobs.kill()


def test_a_scheduler_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from landscape.executors import dask_cluster

    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 0.5)
    with pytest.raises(FileNotFoundError, match="there is no such file; give an address"), DaskCluster("nowhere.json"):
        pass
    with (
        pytest.raises(OSError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:9 "),
        DaskCluster("tcp://127.0.0.1:9"),
    ):
        pass
