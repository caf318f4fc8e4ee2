"""Running a probe: the same stored numbers with any executor and interruption, and what changes the run key."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import counting
import h5py
import numpy as np
import pytest
import torch
from analytic import attention_net
from torch import nn

from landscape import models
from landscape.checkpoints.checkpoint import state_dict_sha256, write_checkpoint
from landscape.checkpoints.raw_files import file_sha256
from landscape.executors.executor import Executor
from landscape.executors.local_processes import Processes
from landscape.executors.work import measure_chunk, work_of
from landscape.options import OptionError
from landscape.plots.report.table import checkpoints
from landscape.probe import Plan, Probe, Quantity, Shard, Unit, Values
from landscape.probes import PROBES, probe_class
from landscape.results import group as groups
from landscape.results import reader
from landscape.results.merging import merge_files
from landscape.results.run_key import Arrays, Outcome, RunKey, safe_label
from landscape.results.writer import Writer
from landscape.run import digest, reduce_of, run, run_key
from landscape.subject import identity, loading, subject

ARGUMENTS = {"blocks": (1, 1), "width": 8}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers: sums in another order have other last bits
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three snapshots; beside it a network that attends."""
    folder = tmp_path_factory.mktemp("resnet-digits")
    for epoch, name in enumerate(("init", "epoch_001", "final")):
        save(folder / f"{name}.pt", seed=epoch)
    attending(folder).mkdir()
    torch.manual_seed(0)
    arguments = {"classes": 10, "image_size": 16, "depth": 2}
    weights = models.build("vit_demo", **arguments).state_dict()
    save(attending(folder) / "final.pt", seed=0, model="vit_demo", model_args=arguments, state_dict=weights)
    return folder


class Threads:
    """Chunks as a worker of dask with two threads measures them."""

    here, workers = False, 2

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))

    def measure(self, probe: Any, subject: subject.Subject, units: Sequence[Unit]) -> Generator[tuple[Unit, Values]]:
        work, size = work_of(probe, subject), max(1, len(units) // 8)
        chunks = [units[i : i + size] for i in range(0, len(units), size)]
        for chunk, found in zip(chunks, self.pool.map(lambda chunk: measure_chunk(work, chunk), chunks), strict=True):
            yield from ((unit, values) for unit, (_, values) in zip(chunk, found, strict=True))


@pytest.fixture(scope="module")
def executors() -> Iterator[Mapping[str, Executor]]:
    threads = Threads()
    with threads.pool, Processes(2) as processes:
        yield {"threads": threads, "processes": processes}


def save(path: Path, *, seed: int, **changed: Any) -> Path:
    torch.manual_seed(seed)
    model = models.build("resnet_demo", classes=10, image_size=16, **ARGUMENTS)
    content = {
        "model": "resnet_demo",
        "model_args": {"classes": 10, "image_size": 16, **ARGUMENTS},
        "state_dict": model.state_dict(),
        "data": {"name": "digits"},
        "recipe": {"crop": 2, "flip": True},
        "epoch": float(seed),
        "metrics": {},
        "seed": seed,
    }
    write_checkpoint(path, **{**content, **changed})
    return path


def attending(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-attending")


def fitting(name: str, folder: Path) -> subject.Subject:
    """The network that a probe is tried on."""
    return loaded(attending(folder) if name.startswith("attention") else folder)


def loaded(folder: Path, **options: Any) -> subject.Subject:
    return loading.load(folder / "final.pt", **{"data": "digits", "samples": 32, "batch_size": 8, **options})


def small(name: str, **parameters: Any) -> Probe:
    made: Probe = probe_class(name)(**{**probe_class(name).smallest, **parameters})
    return made


def stored_result(path: Path, outcome: Outcome) -> Arrays:
    return groups.read_group(path, outcome.group)


def assert_same(found: Arrays, wanted: Arrays) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def stop_after(units: int) -> Callable[[int, int], None]:
    """A report that presses Ctrl-C."""

    def report(done: int, total: int) -> None:
        if done == units:
            signal.raise_signal(signal.SIGINT)

    return report


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


# --- the run key ---


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, str]:
    makes_images = importlib.util.find_spec("imagecorruptions") is not None  # without it that probe's tests are skipped
    return {name: digest(small(name), loaded(folder)) for name in PROBES if name != "corruption" or makes_images}


@pytest.mark.parametrize("name", PROBES)
def test_the_digest_does_not_depend_on_files_label_or_unused_options(
    name: str, folder: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for file in folder.iterdir():  # the same contents in other files
        content = torch.load(file, weights_only=True)
        torch.save({**content, "metrics": {"accuracy": 0.5}}, elsewhere / file.name)
    assert digest(small(name), loaded(elsewhere, device="cpu", data_root=tmp_path)) == reference[name]
    assert (
        digest(small(name), loading.load(folder / "final.pt", label="other", samples=32, batch_size=8))
        == (reference[name])
    )
    changed = digest(small(name), loaded(folder, batch_size=16))
    assert (changed != reference[name]) == (
        name
        in (
            "hessian", "trace", "step", "flatness", "sensitivity", "similarity", "attention", "ensemble", "uncertainty",
            "align", "barriers",
        )
    )  # fmt: skip
    changed = digest(small(name), loaded(folder, weight_decay=0.1))
    assert (changed != reference[name]) == (
        name in ("hessian", "trace", "step", "density", "surface", "convexity", "noise-scale")
    )


@pytest.mark.parametrize("name", PROBES)
def test_the_digest_follows_weights_and_data(name: str, folder: Path, reference: dict[str, str]) -> None:
    def changed(**options: Any) -> bool:
        return digest(small(name), loaded(folder, **options)) != reference[name]

    assert changed(samples=31)
    assert changed(split="train")
    assert changed(augment=True)
    other = loaded(folder)
    with torch.no_grad():
        next(iter(other.parameters.values()))[0] += 1e-6
    assert digest(small(name), other) != reference[name]
    other = loaded(folder)
    assert other.images is not None
    other.images.targets[-1] = (other.images.targets[-1] + 1) % 10
    assert digest(small(name), other) != reference[name]


def test_the_run_key_of_augmented_data_contains_seed_and_batch_size(folder: Path) -> None:
    options = [{}, {"seed": 1}, {"batch_size": 16}]
    digests = {digest(small("fourier"), loaded(folder, augment=True, **option)) for option in options}
    assert len(digests) == 3
    assert len({digest(small("fourier"), loaded(folder, **option)) for option in options}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("surface", {"seed": 1}),
        ("surface", {"resolution": "5"}),
        ("surface", {"normalize": "layer"}),
        ("surface", {"range": "0.5"}),
        ("hessian", {"seed": 1}),
        ("hessian", {"top": 3}),
        ("hessian", {"which": "SA"}),
        ("fourier", {"layers": ("layer1",)}),
        ("lesion", {"layers": ("layer1",)}),
        ("lesion", {"pairs": True}),
        ("probe-linear", {"train_samples": 63}),
        ("noise", {"seed": 1}),
        ("noise", {"eps": "0.3"}),
        ("noise", {"equal_energy": True}),
    ],
)
def test_the_digest_follows_the_parameters(
    name: str, parameters: dict[str, Any], folder: Path, reference: dict[str, str]
) -> None:
    assert digest(small(name, **parameters), loaded(folder)) != reference[name]


def test_equal_parameters_in_two_spellings_have_one_run_key(folder: Path, reference: dict[str, str]) -> None:
    assert digest(small("surface", resolution="3,3", range="-1:1"), loaded(folder)) == reference["surface"]
    assert digest(small("noise", eps="0.70", bands=(0.2, 0.3, 0.7)), loaded(folder)) == reference["noise"]


def test_the_code_of_a_model_file_enters_the_run_key(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    code = "from landscape.models import build\n"
    code += f"def make(): return build('resnet_demo', classes=10, image_size=16, **{ARGUMENTS})\n"
    digests = []
    for text in (code, code, f"{code}# another\n"):
        file.write_text(text)
        digests.append(digest(small("fourier"), loaded(folder, model=f"{file}:make")))
    assert digests[0] == digests[1] != digests[2]


def test_another_label_finds_the_same_group(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    first = run(small("variance"), loaded(folder), path, label="first")
    second = run(small("variance"), loaded(folder), path, label="second")
    assert second == Outcome(first.group, 4, 0)
    assert first.group.startswith("variance/first-")


def test_a_label_is_kept_as_given_and_a_new_one_renames_a_stored_result(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "results.h5"
    caplog.set_level("INFO", "landscape")
    group = run(small("variance"), loaded(folder), path, label="SGD, lr=1e-2").group
    assert group.startswith("variance/SGD__lr_1e-2-")
    labels = []
    for label in ("", "Adam (ours) $x$", "", "a\0b\x1b[2J\nc"):
        assert run(small("variance"), loaded(folder), path, label=label) == Outcome(group, 4, 0)
        ((_, data),) = reader.find(path, "variance")
        labels.append(data.attrs["label"])
    assert labels == ["SGD, lr=1e-2", "Adam (ours) $x$", "Adam (ours) $x$", "a b [2J c"]
    assert f"{group} has the label Adam (ours) $x$ now, it was SGD, lr=1e-2" in caplog.text


def test_a_label_that_another_checkpoint_has_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "results.h5"
    caplog.set_level("INFO", "landscape")
    for seed in (8, 9):
        save(tmp_path / "final.pt", seed=seed)
        run(small("variance"), loaded(tmp_path), path, label="mine")
    assert run(small("noise"), loaded(tmp_path), path, label="mine").measured
    assert caplog.text.count("is another checkpoint with the label mine; --label NAME gives it another") == 2
    names = checkpoints(reader.groups(path))  # the noise of the second is not in the row of the first
    assert len(set(names)) == 2
    assert all(name.startswith("mine (") for name in names)


def test_a_retrained_checkpoint_gets_a_group_of_its_own(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    first = run(small("variance"), loaded(folder), path)
    save(tmp_path / "final.pt", seed=9)
    second = run(small("variance"), loaded(tmp_path), path)
    assert second.measured == 4
    assert second.group != first.group


@pytest.mark.parametrize(
    ("label", "name"),
    [("vit demo", "vit_demo"), ("a/b", "a_b"), ("../..", "_"), ("", "checkpoint"), ("größe+1.0", "größe+1.0")],
)
def test_labels_are_safe_in_a_group_name(label: str, name: str) -> None:
    assert safe_label(label) == name


def test_a_group_says_what_made_it(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    outcome = run(small("hessian"), loaded(folder, weight_decay=0.5), path)
    with h5py.File(path) as file:
        about = dict(file[outcome.group].attrs)
    assert about["checkpoint_sha256"] == file_sha256(folder / "final.pt")
    assert about["epoch"] == 2.0
    assert (about["probe"], about["model"], about["data"]) == ("hessian", "resnet_demo", "digits")
    assert about["protocol"] == "digits test, 32 samples, batch size 8, no augmentation, weight decay 0.5, seed 0"
    assert {"label", "parameters", "spec", "versions", "device", "created", "finished"} <= set(about)


# --- probes that decide by what they know ---


@pytest.fixture(scope="module")
def previewed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    path = tmp_path_factory.mktemp("preview") / "whole.h5"
    return stored_result(path, run(preview(), few(folder), path))


def preview() -> Probe:
    return small("surface", resolution="21", preview=True, tolerance=0.5)


def few(folder: Path) -> subject.Subject:
    return loaded(folder, samples=4, batch_size=4)


@pytest.mark.slow
def test_a_preview_stores_what_it_evaluated_and_what_it_made_of_the_rest(
    previewed: Arrays, folder: Path, tmp_path: Path
) -> None:
    exact = stored_result(tmp_path / "r.h5", run(small("surface", resolution="21"), few(folder), tmp_path / "r.h5"))
    evaluated = previewed["evaluated"] == 1
    assert (evaluated.sum(), previewed["evaluations"]) == (340, 340)
    assert previewed["done"].all()
    for name in ("loss", "loss_se", "rise_se", "l2", "accuracy"):
        np.testing.assert_array_equal(previewed[name][evaluated], exact[name][evaluated], err_msg=name)
    error = np.abs(previewed["loss"] / exact["loss"] - 1)[~evaluated]
    assert 0 < np.quantile(error, 0.95) <= previewed["hold_out_error"] < 0.5
    np.testing.assert_allclose(previewed["l2"], exact["l2"], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("units", [30, 100, 285, 341, 420])  # coarse grid, rounds, hold-outs, interpolation
def test_a_preview_stopped_anywhere_has_the_content_of_a_straight_one(
    units: int, previewed: Arrays, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "results.h5"
    with pytest.raises(KeyboardInterrupt):
        run(preview(), few(folder), path, report=stop_after(units))
    outcome = run(preview(), few(folder), path)
    assert outcome.measured == 441 - units
    assert_same(stored_result(path, outcome), previewed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_preview_spread_over_workers_has_the_content_of_one_in_line(
    kind: str, previewed: Arrays, folder: Path, tmp_path: Path, executors: Mapping[str, Executor]
) -> None:
    path = tmp_path / "results.h5"
    assert_same(stored_result(path, run(preview(), few(folder), path, executor=executors[kind])), previewed)


@pytest.mark.slow
def test_a_preview_that_errs_too_much_is_the_exact_surface(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    exact = stored_result(path, run(small("surface", resolution="21"), few(folder), path))
    found = stored_result(path, run(small("surface", resolution="21", preview=True, tolerance=1e-9), few(folder), path))
    assert found["evaluated"].all()
    assert found["hold_out_error"] > 1e-9
    np.testing.assert_array_equal(found["loss"], exact["loss"])


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
