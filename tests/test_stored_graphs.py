"""Recorded graphs, notes and keys on disk; of compiled code see `test_compiled_products.py`."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from analytic import convolution_net, tanh_net

from landscape.curvature import hvp_backends, stored_graphs, stored_hessian
from landscape.curvature.compiler import beside
from landscape.curvature.hvp_backends import Hvp, curvature
from landscape.curvature.vectors import random_unit
from landscape.data import user_cache
from landscape.subject.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's forward mode


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(user_cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiled"


def refuse(*_: object, **__: object) -> None:
    pytest.fail("traced or compiled again")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "kind"), [(convolution_net, "traced-channels-last"), (tanh_net, "traced")])
def test_a_second_run_does_not_trace(
    make: Callable[[], Subject], kind: Hvp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_right(subject: Subject) -> None:
        vector = random_unit(subject.size, 3, device=torch.device("cpu"), dtype=torch.float64)
        traced, kept = (curvature(subject, subject.parameters, hvp).product(1) for hvp in (kind, "kept"))
        torch.testing.assert_close(traced(vector), kept(vector), rtol=1e-10, atol=1e-13)

    assert_right(make())
    (file,) = folder.iterdir()
    with monkeypatch.context() as second:
        second.setattr(hvp_backends, "trace", refuse)
        again = make()
        for tensor in (*again.model.buffers(), *again.model.parameters()):
            if tensor.is_floating_point():
                tensor.data.mul_(1.5)  # other weights and statistics, which the text does not hold
        assert_right(again)
    kept_text = file.read_text()
    if kind == "traced-channels-last":  # damaged files are of no other sort
        return
    for damaged in (kept_text[:-40], kept_text.replace("aten::mul(", "aten::add("), "{}", '{"graphs": [1, 2]}'):
        file.write_text(damaged)
        assert_right(make())  # recorded again
        assert file.read_text() == kept_text
    file.chmod(0o666)  # others could have written it
    assert stored_graphs.load_recorded(*file.stem.split(".")) is None


@pytest.mark.slow
def test_work_beside_a_block_is_done_once_and_in_this_process_if_the_copy_fails(tmp_path: Path) -> None:
    own, done = os.getpid(), tmp_path / "done"

    def note() -> None:
        with done.open("a") as stream:
            stream.write(f"{os.getpid() == own}\n")

    def fail_in_the_copy() -> None:
        if os.getpid() != own:
            os._exit(3)
        note()

    for work in (note, fail_in_the_copy):
        with beside(work):
            pass
    with pytest.raises(KeyError), beside(lambda: (time.sleep(60), note())[1]):
        raise KeyError
    several = sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1
    assert done.read_text().split() == ["False" if several else "True", "True"]


def test_the_key_follows_code_shapes_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tanh_net()

    def key(one: Subject) -> str:
        return stored_hessian.key_of(one, one.parameters, fixed=False)

    first = key(subject)
    with torch.no_grad():
        subject.model[0].weight.mul_(2)  # type: ignore[index, operator, union-attr]
    assert key(subject) == first == key(tanh_net())  # other weights are the same code
    sigmoid = tanh_net()
    sigmoid.model[1] = torch.nn.Sigmoid()  # type: ignore[operator]
    fixed = stored_hessian.key_of(subject, subject.parameters, fixed=True)  # the activation pattern
    assert len({first, fixed, key(sigmoid), key(tanh_net(sizes=(7, 7)))}) == 4
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert key(tanh_net()) != first


def test_without_a_writable_folder_nothing_is_kept_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(user_cache.VARIABLE, str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, logger="landscape"):
        for _ in range(2):
            assert stored_graphs.folder() is None
            stored_graphs.write_notes("key", {})
            assert stored_graphs.read_notes("key") == {}
    assert caplog.text.count("compiled graphs are not kept for later runs") == 1
    monkeypatch.setenv(user_cache.VARIABLE, "")
    assert stored_graphs.folder() is None


def test_notes_are_read_again_and_torn_ones_ignored(folder: Path) -> None:
    stored_graphs.write_notes("key", {"kept": [0.0, 1.0, 2.0]})
    assert stored_graphs.read_notes("key") == {"kept": [0.0, 1.0, 2.0]}
    (folder / "key.json").write_text('{"kept": [0.')
    assert stored_graphs.read_notes("key") == {}


def test_entries_used_longest_ago_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_graphs, "MOST_ENTRIES", 1)
    for i in range(5):
        stored_graphs.write_notes(str(i), {})
        os.utime(folder / f"{i}.json", (i, i))
    stored_graphs._forget_oldest(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["2.json", "3.json", "4.json"]


def test_what_a_killed_process_left_behind_is_deleted_a_day_later(folder: Path) -> None:
    stored_graphs.write_notes("key", {})
    for name, age in (("recent", 3600), ("old", 90_000)):
        (folder / f"{stored_graphs.UNFINISHED}{name}" / "sources").mkdir(parents=True)
        then = time.time() - age
        os.utime(folder / f"{stored_graphs.UNFINISHED}{name}", (then, then))
    stored_graphs._forget_oldest(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["key.json", f"{stored_graphs.UNFINISHED}recent"]


def test_notes_for_which_there_is_no_room_leave_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(json, "dump", full)
    stored_graphs.write_notes("key", {})
    assert list(folder.iterdir()) == []


def test_code_for_a_cpu_with_other_instructions_has_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, keys = tanh_net(), set[str]()
    for flags in ("fma avx512f", "fma avx512f avx512_fp16"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        monkeypatch.setattr(stored_hessian, "CPU", tmp_path / "cpuinfo")
        stored_hessian._instructions.cache_clear()
        keys.add(stored_hessian.key_of(subject, subject.parameters, fixed=False))
    stored_hessian._instructions.cache_clear()
    assert len(keys) == 2
