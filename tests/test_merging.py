"""Merging results files: shards are the whole run again, conflicts are named, and a kill leaves every file intact."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import counting
import forked
import h5py
import numpy as np
import pytest
from measured_runs import save

from landscape.cli.main import exit_code
from landscape.probe import Plan, Quantity
from landscape.results.merging import ConflictError, merge_files
from landscape.results.run_key import RunKey
from landscape.results.writer import Writer
from landscape.running.run import reduce_of

SHAPE = (4, 3)


def key(**options: Any) -> RunKey:
    return counting.run_key(shape=SHAPE, **options)


def part(path: Path, made: RunKey, units: slice, **changed: Any) -> Path:
    """A file with some of the units of a result, `changed` in one value."""
    with Writer(path, made, reduce_of=counting.reduce_of) as writer:
        for unit in list(made.plan.units())[units]:
            writer.write(unit, {**counting.values(unit), **changed})
    return path


def test_results_are_united_and_units_of_the_same_question_joined(tmp_path: Path) -> None:
    a, b, out = tmp_path / "a.h5", tmp_path / "b.h5", tmp_path / "all.h5"
    other = key(digest="a" * 10, label="other")
    part(a, key(), slice(0, 5))
    part(a, other, slice(0, 3))
    part(b, key(), slice(3, 9))  # two units in both, equal
    for path in (a, b):
        part(path, other, slice(3, 4), value=np.nan)  # as NaN is
    found = merge_files([a, b], out, reduce_of=counting.reduce_of)
    assert [(r.group, r.done, r.units, r.files) for r in found] == [
        ("counting/other-aaaaaaaaaa", 4, 12, 2), ("counting/toy-0123456789", 9, 12, 2)
    ]  # fmt: skip
    wanted = part(tmp_path / "wanted.h5", other, slice(0, 3))
    counting.assert_same_results(out, part(part(wanted, other, slice(3, 4), value=np.nan), key(), slice(0, 9)))
    part(out, key(), slice(9, 12))  # what was missing is measured into the merged file
    (_, arrays) = counting.everything(out)["counting/toy-0123456789"]
    assert arrays["done"].all()


@pytest.mark.slow
def test_the_output_may_be_one_of_the_files_and_is_added_to(tmp_path: Path) -> None:
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    part(a, key(), slice(0, 5))
    part(b, key(), slice(5, 12))
    before = b.read_bytes()
    merge_files([a, b], a, reduce_of=counting.reduce_of)
    counting.assert_same_results(a, part(tmp_path / "whole.h5", key(), slice(0, 12)))
    assert b.read_bytes() == before
    merge_files([a], b, reduce_of=counting.reduce_of)
    counting.assert_same_results(b, a)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.h5", "b.h5", "whole.h5"]


def test_different_values_are_a_conflict_that_names_them_and_writes_nothing(tmp_path: Path) -> None:
    a, b, c, out = (tmp_path / f"{name}.h5" for name in ("a", "b", "c", "all"))
    part(a, key(), slice(0, 5))
    part(b, key(), slice(4, 9), value=7.0)
    with pytest.raises(
        ConflictError, match=r"1 unit with other values, value at \(1, 1\) is .* in a.h5 and 7.0 in b.h5"
    ) as said:
        merge_files([a, b], out, reduce_of=counting.reduce_of)
    assert "\n" not in str(said.value)
    assert "--prefer" in str(said.value)
    assert not out.exists()
    kept = a.read_bytes()
    with pytest.raises(ConflictError):
        merge_files([b], a, reduce_of=counting.reduce_of)
    assert a.read_bytes() == kept
    for prefer, value in ((a, counting.values(key().plan.unit((1, 1)))["value"]), (b, 7.0)):
        for files in ([a, b], [b, a]):
            out.unlink(missing_ok=True)
            merge_files(files, out, reduce_of=counting.reduce_of, prefer=prefer)
            arrays = counting.everything(out)["counting/toy-0123456789"][1]
            assert arrays["value"][1, 1] == value
            assert arrays["done"].sum() == 9
            assert arrays["total"] == pytest.approx(np.nansum(arrays["value"]))
    out.write_bytes(a.read_bytes())  # the preferred file replaces what the output holds already
    merge_files([b], out, reduce_of=counting.reduce_of, prefer=b)
    assert counting.everything(out)["counting/toy-0123456789"][1]["value"][1, 1] == 7.0
    part(c, key(), slice(8, 9), value=8.0)  # against b, where the preferred file has nothing
    with pytest.raises(ConflictError, match=r"7\.0 in b\.h5 and 8\.0 in c\.h5"):
        merge_files([a, b, c], tmp_path / "new.h5", reduce_of=counting.reduce_of, prefer=a)
    with pytest.raises(ValueError, match="is none of the files to merge"):
        merge_files([a, b], out, reduce_of=counting.reduce_of, prefer=c)


def test_one_digest_with_other_axes_is_a_conflict(tmp_path: Path) -> None:
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    part(a, key(), slice(0, 5))
    part(b, counting.run_key(shape=(2, 3)), slice(0, 5))
    with pytest.raises(ConflictError, match="another axis x, so that it is not the same question"):
        merge_files([a, b], tmp_path / "all.h5", reduce_of=counting.reduce_of)


@pytest.mark.slow
def test_journals_of_killed_shards_are_merged_and_one_in_use_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "landscape")
    a, b, out = tmp_path / "a.h5", tmp_path / "b.h5", tmp_path / "all.h5"
    counting.stopped(a, key(), 5)
    a.unlink()  # and nothing but its journal was copied here
    with Writer(b, key(), reduce_of=counting.reduce_of) as living:
        for unit in living.pending()[5:8]:
            living.write(unit, counting.values(unit))
        living.merge()
        living.write(key().plan.unit((3, 0)), counting.values(key().plan.unit((3, 0))))
        (found,) = merge_files([a, b], out, reduce_of=counting.reduce_of)
    assert found.done == 8
    assert "b.h5.journal-0123456789 is being measured" in caplog.text


@pytest.mark.slow
def test_results_of_unknown_probes_are_copied_and_joined_as_they_are(tmp_path: Path) -> None:
    a, b, out = (tmp_path / f"{name}.h5" for name in ("a", "b", "all"))
    plan = Plan(over={"i": np.arange(3)}, quantities={"v": Quantity("v")}, summaries={"sum": Quantity("sum of v")})
    key = RunKey("future", "toy", "f" * 10, plan, {"parameters": '{"unheard_of": 1}', "more": [1, 2]})
    for path, i in ((a, 1), (b, 2)):
        with Writer(path, key) as writer:
            writer.write(plan.unit((i,)), {"v": 1.0 + i})
    with h5py.File(a, "r+") as file:
        file["future/toy-ffffffffff"]["unheard of"] = np.arange(4)
    wanted = counting.everything(a)
    merge_files([a], out, reduce_of=reduce_of)
    assert {name: list(arrays) for name, (_, arrays) in counting.everything(out).items()} == {
        name: list(arrays) for name, (_, arrays) in wanted.items()
    }
    merge_files([b], out, reduce_of=reduce_of)
    np.testing.assert_array_equal(counting.everything(out)["future/toy-ffffffffff"][1]["v"], [np.nan, 2.0, 3.0])


@pytest.mark.slow
def test_into_how_many_parts_mini_batches_were_divided_is_kept(tmp_path: Path) -> None:
    a, b, c, out = (tmp_path / f"{name}.h5" for name in ("a", "b", "c", "all"))
    part(a, key(), slice(0, 5))
    part(b, key(), slice(5, 7), micro_batches=4)
    part(c, key(), slice(7, 9), micro_batches=2)
    with Writer(c, key(), reduce_of=counting.reduce_of) as writer:
        unit = key().plan.unit((3, 0))
        writer.write(unit, counting.values(unit))
        c.unlink()  # what was merged before is written again
    merge_files([a, b, c], out, reduce_of=counting.reduce_of)
    found = [counting.everything(path)["counting/toy-0123456789"] for path in (a, b, c, out)]
    assert [attributes.get("micro_batches", 1) for attributes, _ in found] == [1, 4, 2, 4]
    assert found[-1][1]["done"].sum() == 10


CRASHING = """
import os, sys
from pathlib import Path
from landscape.cli import damaged_files
def fails():
    raise ValueError("nothing fits")
for work in (os.getpid, fails, os.abort):
    try:
        print(damaged_files.in_child(work, [Path(p) for p in sys.argv[1:]]) != os.getpid())
    except Exception as error:
        print(type(error).__name__, error)
def damaged(file):
    raise ValueError(f"{file.name} is damaged")
damaged_files.check_not_damaged = damaged
try:
    damaged_files.in_child(os.abort, [Path(p) for p in sys.argv[1:]])
except ValueError as error:
    print(error)
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_a_crash_of_hdf5_while_files_are_merged_becomes_an_error(tmp_path: Path) -> None:
    path = part(tmp_path / "a.h5", key(), slice(0, 5))
    done = subprocess.run([sys.executable, "-c", CRASHING, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "True",  # another process did the work
        "ValueError nothing fits",
        "RuntimeError the process that read 1 file died (SIGABRT); nothing was written, run again",
        "a.h5 is damaged",
    ]


KILLED = """
import os, signal
from pathlib import Path
import counting
from landscape.results import merging
left = MOMENT
def dies(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(os, name, call)
for name in ("open", "fsync", "fchmod", "replace", "unlink", "ftruncate", "pwrite"):
    dies(name)
merging.merge_files([Path(p) for p in SOURCES], Path(OUT), reduce_of=counting.reduce_of)
"""


@pytest.mark.campaign
@pytest.mark.parametrize("into_itself", [False, True])
def test_a_merge_killed_before_any_of_its_writes_leaves_every_file_intact(tmp_path: Path, into_itself: bool) -> None:
    a, b, whole = tmp_path / "a.h5", tmp_path / "b.h5", tmp_path / "whole.h5"
    part(a, key(), slice(0, 5))
    part(b, key(), slice(5, 12))
    part(whole, key(), slice(0, 12))
    out = a if into_itself else tmp_path / "all.h5"
    program = KILLED.replace("SOURCES", repr([str(a), str(b)])).replace("OUT", repr(str(out)))
    kills = 0
    for moment in range(1, 20):
        if not into_itself:
            out.unlink(missing_ok=True)
        kept = {path: path.read_bytes() for path in (a, b)}
        code = forked.Popen(["-c", forked.BESIDE + program.replace("MOMENT", str(moment))]).wait()
        assert b.read_bytes() == kept[b]
        if out.exists() and out.read_bytes() != kept[a]:
            counting.assert_same_results(out, whole)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
    assert kills >= 5
    merge_files([a, b], out, reduce_of=counting.reduce_of)
    counting.assert_same_results(out, whole)
    assert {file.name for file in tmp_path.iterdir()} <= {"a.h5", "b.h5", "whole.h5", "all.h5"}


# --- recipes of docs/clusters.md ---

RECIPES = (Path(__file__).parents[1] / "docs" / "clusters.md").read_text()
ECHO = '#!/bin/sh\nprintf "%s\\n" "$@" > "$TOLD"\n'


def recipe(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", RECIPES, re.DOTALL)
    return str(found).replace("101", "3")  # points along an axis


def command_line(*words: str) -> None:
    assert exit_code([*words, "--quiet"]) == 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save(tmp_path / "final.pt", seed=0)
    monkeypatch.chdir(tmp_path)
    command_line("surface", "final.pt", "--resolution", "3", "--out", "whole.h5")
    return tmp_path


def whole_again(folder: Path) -> None:
    counting.assert_same_results(folder / "results.h5", folder / "whole.h5")
    assert all(arrays["done"].all() for _, arrays in counting.everything(folder / "whole.h5").values())


@pytest.mark.slow
def test_the_array_script_measures_what_one_command_does(folder: Path) -> None:
    script = recipe("bash")
    assert "--array=1-8" in script
    (folder / "srun").write_text(ECHO)
    (folder / "srun").chmod(0o755)
    for task in range(1, 4):
        told = folder / f"told-{task}"
        numbers = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": "3", "TOLD": str(told)}
        environment = {**os.environ, **numbers, "PATH": f"{folder}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", script], check=True, env=environment)
        program, *words = told.read_text().splitlines()
        assert program == "landscape"
        command_line(*words)
    (merging,) = re.findall(r"^landscape (merge .*)$", RECIPES, re.MULTILINE)
    pattern, *rest = merging.split()[1:]
    command_line("merge", *sorted(map(str, Path().glob(pattern))), *rest)
    whole_again(folder)


@pytest.mark.campaign
def test_the_recipe_for_submitit_measures_what_one_command_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class AutoExecutor:
        def __init__(self, folder: str) -> None: ...
        def update_parameters(self, **parameters: int) -> None: ...
        def map_array(self, function: Any, shards: list[str]) -> list[Any]:
            return [SimpleNamespace(result=lambda shard=shard: function(shard)) for shard in shards]

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=AutoExecutor))
    capsys.readouterr()
    exec(recipe("python"), {})
    program, *words = capsys.readouterr().out.split()
    assert program == "landscape"
    command_line(*words)
    whole_again(folder)


@pytest.mark.slow
def test_units_of_a_checkpoint_that_was_replaced_between_shards_are_not_said_to_be_finished_by_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "1.h5", tmp_path / "2.h5"]
    for number, path in enumerate(files):
        key = counting.small(digest=f"{number}" * 10)
        key = replace(key, attributes={**key.attributes, "checkpoint_sha256": f"{number}" * 64})
        with Writer(path, key) as writer:
            writer.write(writer.pending()[0], counting.values(writer.pending()[0]))
        with h5py.File(path, "r+") as file:
            file[f"counting/toy-{key.digest}"].attrs["created"] = f"2026-01-0{number + 1}"
    assert exit_code(["merge", *map(str, files), "--out", str(tmp_path / "all.h5")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "units missing" in line]
    assert ["only its older file can finish them" in line for line in said] == [True, False]
