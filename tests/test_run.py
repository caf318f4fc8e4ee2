"""Running a probe: the same stored numbers with any executor, shards and interruption."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import counting
import numpy as np
import pytest
import torch
from analytic import attention_net
from measured_runs import (
    assert_same,
    fitting,
    loaded,
    one_thread,
    small,
    stop_after,
    stored_result,
    threads_and_processes,
    with_snapshots,
)
from torch import nn

from landscape.checkpoints.checkpoint import state_dict_sha256
from landscape.executors.executor import Executor
from landscape.options import OptionError
from landscape.probe import Plan, Quantity, Shard
from landscape.probes import PROBES
from landscape.results import group as groups
from landscape.results.merging import merge_files
from landscape.results.run_key import RunKey
from landscape.results.writer import Writer
from landscape.run import digest, reduce_of, run, run_key
from landscape.subject import identity, loading, subject


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_snapshots(tmp_path_factory.mktemp("resnet-digits"))


@pytest.fixture(scope="module")
def executors() -> Iterator[Mapping[str, Executor]]:
    with threads_and_processes() as executors:
        yield executors


# --- every probe ---


@pytest.mark.parametrize("name", PROBES)
def test_stored_equals_measured(name: str, folder: Path, tmp_path: Path) -> None:
    probe, path = small(name), tmp_path / "results.h5"
    stored = stored_result(path, run(probe, fitting(name, folder), path))
    fresh = fitting(name, folder)
    plan = probe.plan(fresh)
    assert stored["done"].all()
    for unit in reversed(list(plan.units())):  # any order
        for quantity, value in probe.measure(fresh, unit).items():
            np.testing.assert_array_equal(stored[quantity][unit.index], value, err_msg=f"{quantity} {unit.index}")
    for label, (_, values) in plan.labels.items():
        np.testing.assert_array_equal(stored[label], values)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("name", PROBES)
def test_threads_equal_processes_equal_in_line(
    name: str, kind: str, folder: Path, tmp_path: Path, executors: Mapping[str, Executor]
) -> None:
    probe = small(name)
    here, there = tmp_path / "here.h5", tmp_path / "there.h5"
    in_line = run(probe, fitting(name, folder), here)
    spread = run(probe, fitting(name, folder), there, executor=executors[kind])
    assert spread == in_line
    assert_same(stored_result(there, spread), stored_result(here, in_line))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_stopped_and_resumed_equals_uninterrupted(name: str, folder: Path, tmp_path: Path) -> None:
    probe, path = small(name), tmp_path / "results.h5"
    whole = stored_result(tmp_path / "whole.h5", run(probe, fitting(name, folder), tmp_path / "whole.h5"))
    one = fitting(name, folder)
    weights = state_dict_sha256(one.model.state_dict())
    with pytest.raises(KeyboardInterrupt) as caught:
        run(probe, one, path, report=stop_after(1))
    assert caught.traceback  # and still the model is as it was
    assert state_dict_sha256(one.model.state_dict()) == weights
    group = groups.stored_group(path, probe.name, digest(probe, one))
    assert group is not None
    assert groups.read_group(path, group)["done"].sum() == 1
    assert groups.attribute(path, group, "finished") == ""
    outcome = run(probe, fitting(name, folder), path)
    assert outcome.measured == outcome.units - 1
    assert_same(stored_result(path, outcome), whole)
    assert run(probe, one, path).measured == 0
    assert [file.name for file in tmp_path.iterdir() if "journal" in file.name or "lock" in file.name] == []


@pytest.mark.slow
@pytest.mark.parametrize("bn", ["auto", "recalibrate:2"])
def test_a_line_to_another_checkpoint_is_the_same_by_any_way(
    folder: Path, tmp_path: Path, executors: Mapping[str, Executor], bn: str
) -> None:
    probe, path = small("line", along=str(folder / "init.pt"), directions=1, resolution=4, bn=bn), tmp_path / "r.h5"
    whole = stored_result(tmp_path / "whole.h5", run(probe, loaded(folder), tmp_path / "whole.h5"))
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(folder), path, report=stop_after(2))
    assert_same(stored_result(path, run(probe, loaded(folder), path)), whole)
    for kind, executor in executors.items():
        there = tmp_path / f"{kind}.h5"
        assert_same(stored_result(there, run(probe, loaded(folder), there, executor=executor)), whole)
    assert np.isfinite(whole["barrier"]).all()


def test_the_digest_of_a_line_is_of_the_other_checkpoints_content(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy.pt"
    copied.write_bytes((folder / "init.pt").read_bytes())
    probes = [small("line", along=str(file), directions=1) for file in (folder / "init.pt", copied)]
    assert len({digest(probe, loaded(folder)) for probe in probes}) == 1
    others = [
        {"along": str(folder / "epoch_001.pt")}, {"bn": "frozen"}, {"bn": "recalibrate:1"}, {"range": "0:2"},
        {"resolution": 4},
    ]  # fmt: skip
    found = {digest(small("line", along=str(copied), directions=1), loaded(folder))}
    for other in others:
        found.add(digest(small("line", **{"along": str(copied), "directions": 1, **other}), loaded(folder)))
    assert len(found) == len(others) + 1


def test_fresh_models_are_the_same_in_threads(tmp_path: Path, executors: Mapping[str, Executor]) -> None:
    options: dict[str, Any] = {"model": "vit_demo", "data": "digits", "samples": 16, "batch_size": 2}
    probe, path = small("variance"), tmp_path / "results.h5"
    whole = stored_result(tmp_path / "whole.h5", run(probe, loading.load(**options), tmp_path / "whole.h5"))
    outcome = run(probe, loading.load(**options), path, executor=executors["threads"])
    assert_same(stored_result(path, outcome), whole)


def test_threads_share_no_switch_of_the_attention_kernels(tmp_path: Path, executors: Mapping[str, Executor]) -> None:
    options: dict[str, Any] = {"model": "vit_demo", "model_arg": {"depth": 1}, "data": "digits", "samples": 16}
    probe, path = small("hessian", top=1, batches=8, max_products=2), tmp_path / "results.h5"
    here, there = (loading.load(**options, batch_size=2) for _ in range(2))
    whole = stored_result(tmp_path / "whole.h5", run(probe, here, tmp_path / "whole.h5"))
    outcome = run(probe, there, path, executor=executors["threads"])
    assert_same(stored_result(path, outcome), whole)
    assert torch.backends.cuda.flash_sdp_enabled()


# --- interruptions ---

KILLED = """
import sys, torch
from pathlib import Path
from landscape.subject import loading
from landscape.probes.surface import Surface
from landscape.run import run
torch.set_num_threads(1)
loaded = loading.load(Path(sys.argv[1]), data="digits", samples=32, batch_size=8)
probe = Surface(resolution=sys.argv[3], preview=sys.argv[4] == "preview")
run(probe, loaded, Path(sys.argv[2]), report=lambda done, total: print(done, flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("resolution", "mode"), [("15", "exact"), ("19", "preview")])
def test_a_killed_process_resumes_behind_its_last_acknowledged_unit(
    folder: Path, tmp_path: Path, resolution: str, mode: str
) -> None:
    path = tmp_path / "results.h5"
    command = [sys.executable, "-c", KILLED, str(folder / "final.pt"), str(path), resolution, mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        time.sleep(0.1)
        process.kill()
        said = process.stdout.read().split()
    assert process.returncode == -signal.SIGKILL
    acknowledged = int(said[-1]) if said else 1
    probe = small("surface", resolution=resolution, preview=mode == "preview")
    outcome = run(probe, loaded(folder), path)
    assert outcome.units - acknowledged - 1 <= outcome.measured <= outcome.units - acknowledged
    assert outcome.measured > 0
    whole = run(probe, loaded(folder), tmp_path / "whole.h5")
    assert_same(stored_result(path, outcome), stored_result(tmp_path / "whole.h5", whole))


def test_a_report_counts_from_what_is_stored(folder: Path, tmp_path: Path) -> None:
    probe, path, seen = small("surface"), tmp_path / "results.h5", []
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(folder), path, report=stop_after(4))
    run(probe, loaded(folder), path, report=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 9) for done in range(5, 10)]


def test_a_half_finished_result_resumes_with_its_own_batch_size(folder: Path, tmp_path: Path) -> None:
    probe, path = small("variance"), tmp_path / "results.h5"
    whole = stored_result(tmp_path / "whole.h5", run(probe, loaded(folder), tmp_path / "whole.h5"))
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(folder), path, report=stop_after(2))
    resumed = run(probe, loaded(folder, batch_size=32), path)
    assert (resumed.units, resumed.measured) == (4, 2)
    assert_same(stored_result(path, resumed), whole)
    again = run(probe, loaded(folder, batch_size=32), path, overwrite=True)
    assert (again.units, again.measured) == (1, 1)
    assert again.group == resumed.group


def test_a_run_that_lost_its_file_resumes_from_its_journal(folder: Path, tmp_path: Path) -> None:
    probe, path = small("variance"), tmp_path / "results.h5"
    key = run_key(probe, loaded(folder), "mine")
    writer = Writer(path, key)
    for unit in writer.pending()[:3]:
        writer.write(unit, probe.measure(loaded(folder), unit))
    writer._journal.__exit__(None, None, None)  # as a kill leaves it
    path.unlink()
    outcome = run(probe, loaded(folder, batch_size=32), path)  # one mini-batch, were it not for the journal's four
    assert (outcome.units, outcome.measured) == (4, 1)


@pytest.mark.parametrize(
    "options",
    [{"cap": 2.0}, {"precision": "bf16"}, {"memory_format": "channels_last"}, {"orthogonal": True}],
    ids=lambda options: next(iter(options)),
)
def test_a_stopped_surface_in_any_mode_has_the_content_of_a_straight_one(
    options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    probe, path, straight = small("surface", **options), tmp_path / "results.h5", tmp_path / "whole.h5"
    whole = stored_result(straight, run(probe, loaded(folder), straight))
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(folder), path, report=stop_after(4))
    assert_same(stored_result(path, run(probe, loaded(folder), path)), whole)


# --- shards ---


def test_shards_divide_the_units_evenly_in_turns_and_independently_of_what_is_done(
    folder: Path, tmp_path: Path
) -> None:
    probe, path = small("surface"), tmp_path / "results.h5"
    key = run_key(probe, loaded(folder), "")
    units = list(key.plan.units())
    parts = [Shard(i, 4).part(key.plan, units) for i in range(1, 5)]
    assert [unit.index for part in parts for unit in part] == [u.index for i in range(4) for u in units[i::4]]
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(folder), path, report=stop_after(4))
    outcome = run(probe, loaded(folder), path, shard=Shard(2, 4))
    assert (outcome.units, outcome.measured) == (2, 1)  # units 1 and 5, of which the first was done
    assert stored_result(path, outcome)["done"].ravel().tolist() == [1, 1, 1, 1, 0, 1, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_merged_shards_are_the_run_in_one_process_to_the_last_bit(name: str, folder: Path, tmp_path: Path) -> None:
    probe, whole, out = small(name), tmp_path / "whole.h5", tmp_path / "all.h5"
    shards = [tmp_path / f"{i}.h5" for i in (1, 2, 3)]
    outcome = run(probe, fitting(name, folder), whole)
    for number, path in enumerate(shards, start=1):
        run(probe, fitting(name, folder), path, shard=Shard(number, 3))
    for path in reversed(shards):
        merged = merge_files([path], out, reduce_of=reduce_of)
    assert [(found.group, found.done, found.units) for found in merged] == [(outcome.group, *[outcome.units] * 2)]
    counting.assert_same_results(out, whole)
    merge_files([*shards, whole], tmp_path / "again.h5", reduce_of=reduce_of)
    counting.assert_same_results(tmp_path / "again.h5", whole)
    assert run(probe, fitting(name, folder), out).measured == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("surface", {"resolution": "21", "preview": True}, "decides by all units so far .* leave out --preview"),
        ("trace", {"tol": 0.1}, "leave out --tol"),
        ("surface", {"tune": True}, "--tune and --budget choose it by the speed of this one"),
    ],
)
def test_what_no_shard_can_know_alone_is_refused(
    name: str, options: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        run(small(name, **options), loaded(folder), tmp_path / "results.h5", shard=Shard(1, 2))
    assert list(tmp_path.iterdir()) == []


# --- what cannot be ---


def test_workers_refuse_a_module_made_in_python(tmp_path: Path, executors: Mapping[str, Executor]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    made = loading.load(model, data="digits", samples=16)
    with pytest.raises(
        ValueError, match=r"cannot load a model, data or a loss made in Python; .*--model file.py:callable"
    ):
        run(small("surface"), made, tmp_path / "results.h5", executor=executors["threads"])


def test_a_journal_of_an_unknown_probe_is_adopted_without_its_summaries(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    plan = Plan(over={"i": np.arange(3)}, quantities={"v": Quantity("v")}, summaries={"sum": Quantity("sum of v")})
    writer = Writer(path, RunKey("foreign", "toy", "f" * 10, plan, {"parameters": "{}"}))
    writer.write(plan.unit((1,)), {"v": 2.0})
    writer._journal.__exit__(None, None, None)
    run(small("variance"), loaded(folder), path)
    found = groups.read_group(path, "foreign/toy-ffffffffff")
    np.testing.assert_array_equal(found["v"], [np.nan, 2.0, np.nan])
    assert np.isnan(found["sum"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["surface", "lesion", "noise"])
def test_weights_changed_in_place_are_measured_anew(name: str, tmp_path: Path) -> None:
    def changed(net: subject.Subject) -> subject.Subject:
        with torch.no_grad():
            for p in net.model.parameters():
                p.mul_(1.5)
        return net

    probe, used = small(name), attention_net(sizes=(6, 6))
    run(probe, used, tmp_path / "used.h5")
    stored = [run(probe, changed(used), tmp_path / "used.h5").group]
    stored.append(run(probe, changed(attention_net(sizes=(6, 6))), tmp_path / "fresh.h5").group)
    assert stored[0] == stored[1]
    again, fresh = (groups.read_group(tmp_path / file, stored[0]) for file in ("used.h5", "fresh.h5"))
    for key, values in fresh.items():
        np.testing.assert_array_equal(again[key], values)


@pytest.mark.parametrize("name", ["hessian", "surface"])
def test_the_weights_are_hashed_once_per_run(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    hash_weights = identity.state_dict_sha256
    monkeypatch.setattr(identity, "state_dict_sha256", lambda state: hashed.append(len(state)) or hash_weights(state))
    measured = loaded(folder)
    run(small(name), measured, tmp_path / "results.h5")
    assert hashed == [len(measured.model.state_dict())]
