"""Running a probe: the same stored numbers with any executor, shards and interruption."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from analytic import attention_net
from measured_runs import assert_same, loaded, small, stop_after, stored_result
from torch import nn

from landscape.options import OptionError
from landscape.probe import Plan, Quantity, Shard, Unit, Values
from landscape.probes.variance import Variance
from landscape.results import group as groups
from landscape.results import reader
from landscape.results.run_key import RunKey
from landscape.results.writer import Writer
from landscape.running.executor import Executor
from landscape.running.run import digest, run, run_key
from landscape.subject import subject
from landscape.subject.loading import identity
from landscape.subject.loading import load as loading
from landscape.subject.subject import Subject

pytestmark = pytest.mark.usefixtures("one_thread")


# --- any way ---


@pytest.mark.slow
@pytest.mark.parametrize("bn", ["auto", "recalibrate:2"])
def test_a_line_to_another_checkpoint_is_the_same_by_any_way(
    snapshots: Path, tmp_path: Path, executors: Mapping[str, Executor], bn: str
) -> None:
    probe, path = small("line", along=str(snapshots / "init.pt"), directions=1, resolution=4, bn=bn), tmp_path / "r.h5"
    whole = stored_result(tmp_path / "whole.h5", run(probe, loaded(snapshots), tmp_path / "whole.h5"))
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(snapshots), path, report=stop_after(2))
    assert_same(stored_result(path, run(probe, loaded(snapshots), path)), whole)
    for kind, executor in executors.items():
        there = tmp_path / f"{kind}.h5"
        assert_same(stored_result(there, run(probe, loaded(snapshots), there, executor=executor)), whole)
    assert np.isfinite(whole["barrier"]).all()


@pytest.mark.slow
def test_the_digest_of_a_line_is_of_the_other_checkpoints_content(snapshots: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy.pt"
    copied.write_bytes((snapshots / "init.pt").read_bytes())
    probes = [small("line", along=str(file), directions=1) for file in (snapshots / "init.pt", copied)]
    assert len({digest(probe, loaded(snapshots)) for probe in probes}) == 1
    others = [
        {"along": str(snapshots / "epoch_001.pt")}, {"bn": "frozen"}, {"bn": "recalibrate:1"}, {"range": "0:2"},
        {"resolution": 4},
    ]  # fmt: skip
    found = {digest(small("line", along=str(copied), directions=1), loaded(snapshots))}
    for other in others:
        found.add(digest(small("line", **{"along": str(copied), "directions": 1, **other}), loaded(snapshots)))
    assert len(found) == len(others) + 1


@pytest.mark.slow
def test_fresh_models_are_the_same_in_threads(tmp_path: Path, executors: Mapping[str, Executor]) -> None:
    options: dict[str, Any] = {"model": "vit_demo", "data": "digits", "samples": 16, "batch_size": 2}
    probe, path = small("variance"), tmp_path / "results.h5"
    whole = stored_result(tmp_path / "whole.h5", run(probe, loading.load(**options), tmp_path / "whole.h5"))
    outcome = run(probe, loading.load(**options), path, executor=executors["threads"])
    assert_same(stored_result(path, outcome), whole)


@pytest.mark.slow
def test_threads_share_no_switch_of_the_attention_kernels(tmp_path: Path, executors: Mapping[str, Executor]) -> None:
    options: dict[str, Any] = {"model": "vit_demo", "model_arg": {"depth": 1}, "data": "digits", "samples": 16}
    probe, path = small("hessian", top=1, batches=8, max_products=2), tmp_path / "results.h5"
    here, there = (loading.load(**options, batch_size=2) for _ in range(2))
    whole = stored_result(tmp_path / "whole.h5", run(probe, here, tmp_path / "whole.h5"))
    outcome = run(probe, there, path, executor=executors["threads"])
    assert_same(stored_result(path, outcome), whole)
    assert torch.backends.cuda.flash_sdp_enabled()


# --- interruptions ---


@pytest.mark.slow
def test_a_report_counts_from_what_is_stored(snapshots: Path, tmp_path: Path) -> None:
    probe, path, seen = small("surface"), tmp_path / "results.h5", []
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(snapshots), path, report=stop_after(4))
    run(probe, loaded(snapshots), path, report=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 9) for done in range(5, 10)]
    seen.clear()  # in rounds, by the errors so far, every unit comes once too
    rounds = run(small("density", tol=0.5), loaded(snapshots), path, report=lambda done, total: seen.append(done))
    assert seen == list(range(1, rounds.units + 1))


@dataclass(frozen=True)
class Refusing(Variance):
    """Refuses its data when the given unit is measured."""

    name: ClassVar[str] = "refusing"

    at: int = 0

    def measure(self, subject: Subject, unit: Unit) -> Values:
        if unit.index[0] == self.at:
            raise ValueError("these data cannot be measured")
        return super().measure(subject, unit)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1])
def test_what_is_refused_at_its_first_unit_leaves_no_result(snapshots: Path, tmp_path: Path, at: int) -> None:
    path = tmp_path / "r.h5"
    run(small("variance"), loaded(snapshots), path, label="another")
    with pytest.raises(ValueError, match="these data cannot be measured"):
        run(Refusing(at=at), loaded(snapshots), path, label="refused")
    done = {str(data.attrs["label"]): int(data["done"].sum()) for _, data in reader.groups(path)}
    assert done.keys() == ({"another", "refused"} if at else {"another"})
    assert not list(tmp_path.glob("*journal*"))


def test_a_half_finished_result_resumes_with_its_own_batch_size(snapshots: Path, tmp_path: Path) -> None:
    probe, path = small("variance"), tmp_path / "results.h5"
    whole = stored_result(tmp_path / "whole.h5", run(probe, loaded(snapshots), tmp_path / "whole.h5"))
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(snapshots), path, report=stop_after(2))
    resumed = run(probe, loaded(snapshots, batch_size=32), path)
    assert (resumed.units, resumed.measured) == (4, 2)
    assert_same(stored_result(path, resumed), whole)
    again = run(probe, loaded(snapshots, batch_size=32), path, overwrite=True)
    assert (again.units, again.measured) == (1, 1)
    assert again.group == resumed.group


@pytest.mark.slow
def test_a_run_that_lost_its_file_resumes_from_its_journal(snapshots: Path, tmp_path: Path) -> None:
    probe, path = small("variance"), tmp_path / "results.h5"
    key, _ = run_key(probe, loaded(snapshots), "mine")
    writer = Writer(path, key)
    for unit in writer.pending()[:3]:
        writer.write(unit, probe.measure(loaded(snapshots), unit))
    writer._journal.__exit__(None, None, None)  # as a kill leaves it
    path.unlink()
    outcome = run(probe, loaded(snapshots, batch_size=32), path)  # one mini-batch, were it not for the journal's four
    assert (outcome.units, outcome.measured) == (4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"cap": 2.0}, {"precision": "bf16"}, {"memory_format": "channels_last"}],
    ids=lambda options: next(iter(options)),
)
def test_a_stopped_surface_in_any_mode_has_the_content_of_a_straight_one(
    options: dict[str, Any], snapshots: Path, tmp_path: Path
) -> None:
    probe, path, straight = small("surface", **options), tmp_path / "results.h5", tmp_path / "whole.h5"
    whole = stored_result(straight, run(probe, loaded(snapshots), straight))
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(snapshots), path, report=stop_after(4))
    assert_same(stored_result(path, run(probe, loaded(snapshots), path)), whole)


# --- shards ---


@pytest.mark.slow
def test_shards_divide_the_units_evenly_in_turns_and_independently_of_what_is_done(
    snapshots: Path, tmp_path: Path
) -> None:
    probe, path = small("surface"), tmp_path / "results.h5"
    key, _ = run_key(probe, loaded(snapshots), "")
    units = list(key.plan.units())
    parts = [Shard(i, 4).part(key.plan, units) for i in range(1, 5)]
    assert [unit.index for part in parts for unit in part] == [u.index for i in range(4) for u in units[i::4]]
    with pytest.raises(KeyboardInterrupt):
        run(probe, loaded(snapshots), path, report=stop_after(4))
    outcome = run(probe, loaded(snapshots), path, shard=Shard(2, 4))
    assert (outcome.units, outcome.measured) == (2, 1)  # units 1 and 5, of which the first was done
    assert stored_result(path, outcome)["done"].ravel().tolist() == [1, 1, 1, 1, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("surface", {"resolution": "21", "preview": True}, "decides by all units so far .* leave out --preview"),
        ("trace", {"tol": 0.1}, "leave out --tol"),
        ("surface", {"tune": True}, "--tune and --budget choose it by the speed of this one"),
    ],
)
def test_what_no_shard_can_know_alone_is_refused(
    name: str, options: dict[str, Any], message: str, snapshots: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        run(small(name, **options), loaded(snapshots), tmp_path / "results.h5", shard=Shard(1, 2))
    assert list(tmp_path.iterdir()) == []


# --- what cannot be ---


def test_workers_refuse_a_module_made_in_python(tmp_path: Path, executors: Mapping[str, Executor]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    made = loading.load(model, data="digits", samples=16)
    with pytest.raises(
        ValueError, match=r"cannot load a model, data or a loss made in Python; .*--model file.py:callable"
    ):
        run(small("surface"), made, tmp_path / "results.h5", executor=executors["threads"])


def test_a_journal_of_an_unknown_probe_is_adopted_without_its_summaries(snapshots: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    plan = Plan(over={"i": np.arange(3)}, quantities={"v": Quantity("v")}, summaries={"sum": Quantity("sum of v")})
    writer = Writer(path, RunKey("foreign", "toy", "f" * 10, plan, {"parameters": "{}"}))
    writer.write(plan.unit((1,)), {"v": 2.0})
    writer._journal.__exit__(None, None, None)
    run(small("variance"), loaded(snapshots), path)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hessian", "surface"])
def test_the_weights_are_hashed_once_per_run(
    name: str, snapshots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    hash_weights = identity.state_dict_sha256
    monkeypatch.setattr(identity, "state_dict_sha256", lambda state: hashed.append(len(state)) or hash_weights(state))
    measured = loaded(snapshots)
    run(small(name), measured, tmp_path / "results.h5")
    assert hashed == [len(measured.model.state_dict())]


@pytest.mark.slow
def test_the_processes_of_a_run_are_ready_for_the_next(
    snapshots: Path, tmp_path: Path, executors: Mapping[str, Executor]
) -> None:
    pids = []
    for name in ("surface", "variance", "noise"):
        run(small(name), loaded(snapshots), tmp_path / "results.h5", executor=executors["processes"])
        pids.append(executors["processes"].ready())  # type: ignore[attr-defined]
    assert len(pids[0]) == 1
    assert pids == [pids[0]] * 3
