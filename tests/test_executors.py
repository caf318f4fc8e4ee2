"""Local workers: dead ones cost nothing, replaced files enter nowhere, and nothing survives the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import h5py
import measured_runs
import numpy as np
import pytest
import torch
from command_line import one_line
from measured_runs import Threads, assert_same, loaded, save, small, stored_result

import landscape
from landscape.api import configure
from landscape.cli.main import exit_code
from landscape.plots import headlines
from landscape.probe import listening
from landscape.probes.surface import Surface
from landscape.results import group as groups
from landscape.results import reader
from landscape.running import local_processes
from landscape.running.dask_cluster import slots
from landscape.running.executor import PoisonUnits
from landscape.running.local_processes import Processes, on_devices
from landscape.running.run import digest, run
from landscape.running.work import _on_own_device, measure_chunk, work_of
from landscape.running.worker_process import LEAVE, Ended, Measure, Ready
from landscape.subject.loading import load as loading
from landscape.subject.subject import Subject

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# In a worker, a network that kills the process as it loads or at a mini-batch of so many samples, or asks for its end
# there, and that notes its threads; it counts its calls, which changes no number. MAIN is the process of the tests.
NETWORK = """
import os, pathlib, signal, sys, torch
def net(kill="", end=""):
    if os.getpid() != MAIN:
        pathlib.Path(__file__).with_name("threads").write_text(str(torch.get_num_threads()))
        if kill == "load":
            os.kill(os.getpid(), signal.SIGKILL)
    class Net(torch.nn.Sequential):
        calls, seen = 0, ()
        def forward(self, x):
            self.calls, self.seen = self.calls + 1, (*self.seen, len(x))
            if os.getpid() != MAIN and str(len(x)) == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if os.getpid() != MAIN and str(len(x)) == end:
                sys.exit(0)
            return super().forward(x)
    torch.manual_seed(0)
    return Net(torch.nn.Flatten(), torch.nn.Linear(768, 10), torch.nn.ReLU(), torch.nn.Linear(10, 10))
""".replace("MAIN", str(os.getpid()))


def network(folder: Path, samples: int, batch_size: int = 8, **how: str) -> Subject:
    (folder / "net.py").write_text(NETWORK)
    model = f"{folder}/net.py:net"
    return loading.load(model=model, model_arg=how, data="digits", samples=samples, batch_size=batch_size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    save(tmp_path / "run" / "final.pt", seed=0)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def workers() -> Iterator[SimpleNamespace]:
    """Two workers that tests share, also after their death, of six threads together; and how many were reported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_processes, "subprocess", forked)  # commands below start them as users do
        patch.setattr(local_processes, "thread_limit", lambda: 6)
        counts: list[int] = []
        listener: Any = SimpleNamespace(units=lambda *_: None, products=lambda *_, **__: None, workers=counts.append)
        with Processes(2) as executor:
            yield SimpleNamespace(executor=executor, counts=counts, listening=lambda: listening(listener))


def killing(executor: Processes, *at: int) -> Callable[[int, int], None]:
    """A report that kills a worker after so many units."""

    def report(done: int, total: int) -> None:
        if done in at:
            os.kill(executor._workers[done % len(executor._workers)].process.pid, signal.SIGKILL)

    return report


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["surface", "hessian"])
def test_killed_workers_cost_nothing(
    name: str, folder: Path, tmp_path: Path, workers: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    probe = small(name, **({"resolution": "7"} if name == "surface" else {"top": 1, "batches": 16}))
    options: dict[str, Any] = {"samples": 64, "batch_size": 8 if name == "surface" else 4}
    path, executor = tmp_path / "results.h5", workers.executor
    whole = stored_result(tmp_path / "one.h5", run(probe, loaded(folder, **options), tmp_path / "one.h5"))
    workers.counts.clear()
    before = executor._started
    with workers.listening():
        kills = (5, 20, 21) if name == "surface" else (1, 2, 5)
        outcome = run(probe, loaded(folder, **options), path, executor=executor, report=killing(executor, *kills))
    assert executor._started > max(before, 2)
    assert workers.counts[-2:] == [1, 2]  # a listener hears how many there are
    assert "are measured by others" in caplog.text
    assert outcome.measured == outcome.units
    assert_same(stored_result(path, outcome), whole)


def test_a_unit_that_kills_its_workers_is_named_and_the_others_are_stored(
    tmp_path: Path, workers: SimpleNamespace
) -> None:
    subject, path, probe = network(tmp_path, 37, kill="5"), tmp_path / "r.h5", small("trace")
    with pytest.raises(PoisonUnits) as caught:
        run(probe, subject, path, executor=workers.executor)
    assert "killed a worker several times" in str(caught.value)
    assert "unit 4" in str(caught.value)
    done = groups.read_group(path, str(groups.stored_group(path, probe.name, digest(probe, subject))))["done"]
    assert done.reshape(5, -1).all(axis=1).tolist() == [True] * 4 + [False]


def test_a_model_that_counts_its_calls_is_the_same_in_workers(tmp_path: Path, workers: SimpleNamespace) -> None:
    subject, probe = network(tmp_path, 21), small("trace")
    key = digest(probe, subject)
    whole = run(probe, subject, None).data
    assert digest(probe, subject) == key
    outcome = run(probe, subject, None, executor=workers.executor)
    assert outcome.measured == outcome.units
    assert float(outcome.data.trace) == float(whole.trace)  # type: ignore[union-attr]
    subject.model.extra = 1  # type: ignore[assignment]
    assert digest(probe, subject) != key


def test_a_unit_that_ends_the_program_ends_the_run_with_an_error(tmp_path: Path, workers: SimpleNamespace) -> None:
    subject, path, probe = network(tmp_path, 21, end="5"), tmp_path / "r.h5", small("trace")
    with pytest.raises(ValueError, match=r"a user's code called sys.exit\(0\); everything finished is kept, remove"):
        run(probe, subject, path, executor=workers.executor)
    group = groups.stored_group(path, probe.name, digest(probe, subject))
    assert group is None or groups.read_group(path, group)["done"].reshape(3, -1)[-1].sum() == 0


def replace_checkpoint(folder: Path) -> None:
    save(folder / "final.pt", seed=1)


def replace_options(folder: Path) -> None:
    """The same weights, to be measured with smoothing blocks."""
    content = torch.load(folder / "final.pt", weights_only=True)
    torch.save({**content, "recipe": {**content["recipe"], "smooth_at": "layer1$"}}, folder / "final.pt")


def replace_network(folder: Path) -> None:
    torch.save({"weight": torch.ones(2)}, folder / "final.pt")


def replace_data(folder: Path) -> None:
    arrays = {"x": np.ones((32, 3, 16, 16), np.float32), "y": np.arange(32) % 10}
    np.savez(folder / "data.npz", **arrays)


def replace_code(folder: Path) -> None:
    (folder / "data.py").write_text((folder / "data.py").read_text() + "\n")


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        (replace_checkpoint, "final.pt has other weights; the file was replaced since the command began"),
        (replace_options, "final.pt has the same weights; the file was replaced since the command began"),
        (replace_network, "final.pt was replaced since the command began"),
        (replace_data, "has other samples; a file of it was replaced"),
        (replace_code, "code, or a further file that an option names, was replaced"),
    ],
)
def test_a_file_replaced_while_workers_start_enters_nowhere(
    replaced: Callable[[Path], None],
    said: str,
    folder: Path,
    tmp_path: Path,
    workers: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process tells of one; what it compares is the same in a thread."""
    arrays = {"x": np.zeros((32, 3, 16, 16), np.float32), "y": np.arange(32) % 10}
    np.savez(folder / "data.npz", **arrays)
    code = "import torch\ndef data(): return torch.zeros(32, 3, 16, 16), torch.arange(32) % 10\n"
    (folder / "data.py").write_text(code)
    data = f"{folder}/data.py:data" if replaced is replace_code else str(folder / "data.npz")
    subject, probe, path = loaded(folder, data=data), small("variance"), tmp_path / "results.h5"
    key = digest(probe, subject)
    where = local_processes if replaced is replace_checkpoint else measured_runs
    executor = workers.executor if replaced is replace_checkpoint else Threads()
    monkeypatch.setattr(where, "work_of", lambda *given: (work_of(*given), replaced(folder))[0])
    with pytest.raises(ValueError, match=said):
        run(probe, subject, path, executor=executor)
    group = groups.stored_group(path, probe.name, key)
    assert group is None or not groups.read_group(path, group)["done"].any()


def test_another_version_of_a_library_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_runs, "work_of", lambda *given: replace(work_of(*given), versions={"torch": "1.0"}))
    with pytest.raises(ValueError, match=r"has torch .*, expected 1\.0; install the same"):
        run(small("variance"), loaded(folder), tmp_path / "results.h5", executor=Threads())


def test_workers_that_die_while_they_load_end_the_run(
    tmp_path: Path, workers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_processes, "FAILED_STARTS", 2)
    subject = network(tmp_path, 16, 16, kill="load")
    with pytest.raises(RuntimeError, match="2 workers in a row died while they loaded"):
        run(small("trace"), subject, tmp_path / "results.h5", executor=workers.executor)


def test_workers_share_the_threads(tmp_path: Path, workers: SimpleNamespace) -> None:
    run(small("trace"), network(tmp_path, 8), None, executor=workers.executor)
    assert (tmp_path / "threads").read_text() == "3"


def test_with_cuda_every_worker_has_its_own_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    work: Any = work_of(small("variance"), loaded(folder))
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    assert [one.spec.device for one in on_devices(work, gpu, 8)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [one.spec.device for one in on_devices(work, gpu, 2)] == ["cuda:0", "cuda:1"]
    assert on_devices(work, SimpleNamespace(device=torch.device("cpu")), 2) == [work, work]  # type: ignore[arg-type]
    # Threads of dask: a worker that starts anew takes the free slots of its host.
    known = slots({"tcp://a:1": 1, "tcp://a:2": 2, "tcp://b:1": 1}, {})
    assert known == {"tcp://a:1": 0, "tcp://a:2": 1, "tcp://b:1": 0}
    assert slots({"tcp://a:2": 2, "tcp://a:3": 1}, known) == {"tcp://a:2": 1, "tcp://a:3": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [_on_own_device(work, rank, 1).spec.device for rank in range(2)] == ["cuda:1", "cuda:2"]
    with pytest.raises(ValueError, match="is thread 4 of its host, which has 3 GPUs, and each thread needs its own"):
        _on_own_device(work, 2, 1)
    assert _on_own_device(replace(work, spec=replace(work.spec, device="cpu")), 9, 9).spec.device == "cpu"


# --- the command ---

# With a file `hold` beside it, a worker measures some units, says so, and waits for that file to go.
HOLDING = """
import os, pathlib, sys, time, torch
HELD = pathlib.Path(__file__).with_name("hold")
class Net(torch.nn.Sequential):
    def forward(self, x):
        while HELD.exists() and any("worker_process" in word for word in sys.orig_argv):
            os.environ["PASSES"] = str(passes := int(os.environ.get("PASSES", "0")) + 1)
            if passes < 20:
                break
            HELD.with_name(f"holds-{os.getpid()}").touch()
            time.sleep(0.02)
        return super().forward(x)
def net():
    torch.manual_seed(0)
    return Net(torch.nn.Flatten(), torch.nn.Linear(768, 10))
"""
SURFACE = ["surface", "--data", "digits", "--samples", "32", "--quiet"]
HELD = [*SURFACE, "--model", "net.py:net", "--resolution", "9"]


@pytest.fixture
def held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[forked.Popen, set[int]]]:
    """A command that measures a surface with two workers, which have begun and do not end; and its workers."""
    monkeypatch.chdir(folder)
    (folder / "net.py").write_text(HOLDING)
    (folder / "hold").touch()
    process = forked.Popen(["-m", "landscape", *HELD, "--out", "r.h5", "--workers", "2", "--log", "log.jsonl"])
    forked.wait_until(lambda: len(list(folder.glob("holds-*"))) == 2 or process.poll() is not None)
    workers = {int(path.name.removeprefix("holds-")) for path in folder.glob("holds-*")}
    assert len(workers) == 2, process.communicate()
    assert workers == workers_of(process.pid)
    yield process, workers
    (folder / "hold").unlink(missing_ok=True)
    process.kill()


def logged(folder: Path, event: str) -> list[dict[str, Any]]:
    file = folder / "log.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["event"] == event]


def workers_of(pid: int) -> set[int]:
    """The worker processes that a process has started."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and "worker_process" in (stat.parent / "cmdline").read_text():
                found.add(int(stat.parent.name))
        except (OSError, ValueError):
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.campaign
def test_a_killed_command_leaves_no_worker(held: tuple[forked.Popen, set[int]]) -> None:
    process, workers = held
    process.kill()
    forked.wait_until(lambda: not any(map(alive, workers)))


@pytest.mark.campaign
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_at_once_and_keeps_what_is_finished(
    held: tuple[forked.Popen, set[int]], folder: Path, number: signal.Signals, code: int
) -> None:
    """Although its workers would never end by themselves; the same command then goes on to the same numbers."""
    process, workers = held
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert one_line(err)
    assert "everything finished is kept" in err
    assert logged(folder, "end")[-1]["error"] == ("terminated" if number == signal.SIGTERM else "interrupted")
    assert not any(map(alive, workers))
    assert list(folder.glob("*journal*")) == []
    with h5py.File(folder / "r.h5") as file:
        (group,) = file["surface"].values()
        finished = np.sum(group["done"][:])
        assert logged(folder, "progress")[-1]["finished"] <= finished < 81
    (folder / "hold").unlink()
    for out in ("r.h5", "whole.h5"):
        assert exit_code([*HELD, "--out", out]) == 0
    ((_, resumed),), ((_, straight),) = (list(reader.groups(folder / out)) for out in ("r.h5", "whole.h5"))
    assert resumed.done.all()
    for name in ("loss", "loss_se", "l2", "accuracy"):
        np.testing.assert_array_equal(resumed[name].values, straight[name].values)


@pytest.mark.campaign
def test_workers_give_the_file_of_one_process_and_import_no_module_of_the_working_directory(
    folder: Path, tmp_path: Path
) -> None:
    words = [*SURFACE, str(folder / "final.pt"), "--resolution", "3", "--out"]
    assert exit_code([*words, str(tmp_path / "one.h5")]) == 0
    for name in ("signal", "json", "h5py"):
        (folder / f"{name}.py").write_text(f"open('{folder}/executed', 'w').close()\nraise ImportError('mine')\n")
    command = [sys.executable, "-P", "-m", "landscape", *words, "two.h5", "--workers", "2", "--log", "log.jsonl"]
    done = subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "executed").exists()
    (end,) = logged(folder, "end")
    assert end["error"] is None
    (result,) = logged(folder, "result")
    assert (result["units"], result["measured"]) == (9, 9)
    assert logged(folder, "workers")[-1]["workers"] == 2
    assert {line["event"] for line in logged(folder, "message")} == {"message"}
    ((_, one),), ((_, two),) = (list(reader.groups(out)) for out in (tmp_path / "one.h5", folder / "two.h5"))
    np.testing.assert_allclose(two.loss.values, one.loss.values, rtol=1e-6)


def test_the_log_of_a_failed_command_ends_with_its_error(command: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    code, _, err = command("surface", "nowhere.pt", "--out", tmp_path / "r.h5", "--log", log)
    assert code == 1
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "end"]
    assert lines[-1]["error"] in err
    assert all(line["time"].endswith("+00:00") for line in lines)


# --- exhausted memory ---

HUNGRY = """
import os, torch
from torch import nn
def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 64))
    model.append(nn.Linear(64, 10))
    model[1].running_mean.normal_(), model[1].running_var.uniform_(0.5, 2)
    def eat(module, inputs):
        if len(inputs[0]) > int(os.environ.get("MOST", "1000")):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    model.register_forward_pre_hook(eat)
    return model
"""
EXHAUSTING: dict[str, dict[str, Any]] = {
    "surface": {"resolution": "3"},
    "line": {"resolution": 3},
    "hessian": {"top": 2, "hvp": "double-backward"},
    "trace": {"vectors": 4, "hvp": "double-backward"},
    "density": {"vectors": 1, "steps": 8, "hvp": "double-backward"},
    "flatness": {"steps": 1, "draws": 4, "vectors": 2, "hvp": "double-backward"},
}


def hungry(tmp_path: Path) -> Any:
    (tmp_path / "net.py").write_text(HUNGRY)
    given: dict[str, Any] = {"samples": 32, "batch_size": 32, "split": "train", "device": "cpu"}
    return landscape.load(model=f"{tmp_path}/net.py:net", data="digits", **given)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.campaign] * (n not in ("surface", "trace"))) for n in EXHAUSTING]
)
def test_exhausted_memory_divides_mini_batches_which_is_stored_and_changes_no_number(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject, out = hungry(tmp_path), tmp_path / "r.h5"
    whole = landscape.measure(name, subject, out=None, quiet=True, **EXHAUSTING[name])
    monkeypatch.setenv("MOST", "10")
    found = landscape.measure(name, subject, out=out, quiet=True, **EXHAUSTING[name])
    assert found.attrs["micro_batches"] == 4
    assert "micro_batches" not in whole.attrs
    assert found.attrs["batch_size"] == whole.attrs["batch_size"] == 32
    divided = [said for said in caplog.messages if said.startswith("out of memory: continuing")]
    assert len(divided) == 2 * (1 + (name == "flatness"))  # whose gradients and Hessian products are divided apart
    assert dict(found.sizes) == dict(whole.sizes)
    for quantity, values in whole.data_vars.items():
        if values.dtype.kind == "O":
            continue
        np.testing.assert_allclose(found[quantity], values, rtol=2e-4, atol=1e-6, err_msg=str(quantity))
    (row,) = headlines.summary(out)
    assert row["headline"].endswith("mini-batches in 4 parts (memory)")


def test_a_unit_that_is_a_mini_batch_is_not_another_one_where_memory_is_exhausted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = hungry(tmp_path)
    monkeypatch.setenv("MOST", "10")
    for name in ("variance", "lesion", "calibration"):
        with pytest.raises(torch.OutOfMemoryError):
            landscape.measure(name, subject, out=None, quiet=True)


def test_workers_say_that_they_divided_mini_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, (probe, _) = hungry(tmp_path), configure(Surface, "", {"resolution": "3"})
    work, units = work_of(probe, subject), list(probe.plan(subject).units())
    monkeypatch.setenv("MOST", "10")
    assert [values["micro_batches"] for _, values in measure_chunk(work, units)] == [4] * 9


@pytest.mark.campaign
def test_a_command_goes_on_where_a_mini_batch_exceeds_memory_from_its_first_pass_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hungry(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOST", "10")
    loading_options = ["--model", "net.py:net", "--data", "digits", "--samples", "32", "--device", "cpu"]
    assert exit_code(["surface", *loading_options, "--resolution", "3", "--out", "r.h5"]) == 0
    assert exit_code(["show", "r.h5"]) == 0
    assert "mini-batches in 4 parts (memory)" in capsys.readouterr().out


def test_a_unit_that_was_left_to_a_worker_that_died_is_measured_after_all(
    folder: Path, workers: SimpleNamespace
) -> None:
    probe, subject = small("surface"), loaded(folder)
    units = list(enumerate(probe.plan(subject).units()))[:2]
    workers.executor._start_missing(2)
    worker = workers.executor._workers[0]
    worker.pipe.send(work_of(probe, subject))
    assert isinstance(worker.pipe.recv(), Ready)
    worker.pipe.send(Measure(units))
    worker.pipe.send_bytes(LEAVE + b"1")
    while not isinstance(worker.pipe.recv(), Ended):
        pass
    worker.pipe.send(Measure(units[1:]))
    number, _ = worker.pipe.recv()
    assert number == 1
    assert isinstance(worker.pipe.recv(), Ended)
    worker.work = None  # what it has loaded is known here alone
