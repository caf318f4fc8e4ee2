"""Recorded graphs on disk, and their keys."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from analytic import convolution_net, tanh_net

from landscape.data import user_cache
from landscape.products import hvp_backends, stored_hessian
from landscape.products.hvp_backends import curvature
from landscape.products.vectors import random_unit
from landscape.subject.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's forward mode


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(user_cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "traced"


def refuse(*_: object, **__: object) -> None:
    pytest.fail("traced again")


@pytest.mark.slow
@pytest.mark.parametrize("make", [convolution_net, tanh_net])
def test_a_second_run_does_not_trace(
    make: Callable[[], Subject], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_right(subject: Subject) -> None:
        vector = random_unit(subject.size, 3, device=torch.device("cpu"), dtype=torch.float64)
        traced, kept = (curvature(subject, subject.parameters, hvp).product(1) for hvp in ("traced", "double-backward"))  # type: ignore[arg-type]
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
    if make is convolution_net:  # damaged files are of no other sort
        return
    for damaged in (kept_text[:-40], kept_text.replace("aten::mul(", "aten::add("), "{}", '{"graphs": [1, 2]}'):
        file.write_text(damaged)
        assert_right(make())  # recorded again
        assert file.read_text() == kept_text
    file.chmod(0o666)  # others could have written it
    assert stored_hessian._read(file.stem) == {}


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
            assert stored_hessian.folder() is None
            stored_hessian._write("key.json", {})
            assert stored_hessian._read("key") == {}
    assert caplog.text.count("traced graphs are not kept for later runs") == 1
    monkeypatch.setenv(user_cache.VARIABLE, "")
    assert stored_hessian.folder() is None


def test_entries_used_longest_ago_are_deleted(folder: Path) -> None:
    for i in range(5):
        stored_hessian._write(f"{i}.json", {})
        os.utime(folder / f"{i}.json", (i, i))
    user_cache.forget_oldest(folder, stored_hessian.MOST_BYTES, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["2.json", "3.json", "4.json"]


def test_what_a_killed_process_left_behind_is_deleted_a_day_later(folder: Path) -> None:
    stored_hessian._write("key.json", {})
    for name, age in (("recent", 3600), ("old", 90_000)):
        (folder / f"{user_cache.UNFINISHED}{name}").write_text("{")
        then = time.time() - age
        os.utime(folder / f"{user_cache.UNFINISHED}{name}", (then, then))
    user_cache.forget_oldest(folder, stored_hessian.MOST_BYTES)
    assert sorted(path.name for path in folder.iterdir()) == ["key.json", f"{user_cache.UNFINISHED}recent"]


def test_notes_for_which_there_is_no_room_leave_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    stored_hessian._write("key.json", {})
    assert list(folder.iterdir()) == []
