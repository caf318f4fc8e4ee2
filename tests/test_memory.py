"""Free memory: what the machine and the container say, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from landscape.data import memory
from landscape.data.augment import Augmentation
from landscape.data.dataset import Batches, BatchList, Images
from landscape.data.memory import GrowingTensor

MEMINFO = "MemTotal:       24000 kB\nMemFree:    1000 kB\nMemAvailable:   16000 kB\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    return tmp_path


def test_free_memory_is_what_the_machine_says(machine: Path) -> None:
    assert memory.available() == 16000 * 1024
    (machine / "meminfo").unlink()
    assert memory.available() > 2**20  # all that there is


@pytest.mark.parametrize(
    ("folder", "names", "cached"),
    [
        ("", ("memory.max", "memory.current"), "inactive_file"),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_a_container_may_leave_less(machine: Path, folder: str, names: tuple[str, str], cached: str) -> None:
    place = machine / folder
    place.mkdir(exist_ok=True)
    (place / names[0]).write_text("1000000\n")
    (place / names[1]).write_text("700000\n")
    (place / "memory.stat").write_text(f"anon 5\n{cached} 200000\n")
    assert memory.available() == 500_000
    (place / names[0]).write_text("max\n" if not folder else "9223372036854771712\n")
    assert memory.available() == 16000 * 1024


def test_bytes_have_a_readable_unit() -> None:
    sizes = [3, 150528, 154140672, 192_867_000_000, 4e13, 3e18]
    assert [memory.format_bytes(n) for n in sizes] == ["3 bytes", "151 kB", "154 MB", "193 GB", "40 TB", "3,000,000 TB"]


@pytest.mark.parametrize("rows", [7, None])
def test_blocks_become_one_tensor(rows: int | None) -> None:
    kept = GrowingTensor("numbers", rows)
    every = torch.arange(14.0).view(7, 2)
    for block in every.split([1, 4, 2]):
        kept.append(block)
    assert torch.equal(kept.tensor, every)
    with pytest.raises(ValueError, match=r"batch 3: samples are \(3,\) torch.float32, the first \(2,\) torch.float32"):
        kept.append(torch.zeros(1, 3), what="batch 3")


def test_rows_that_memory_does_not_hold_are_refused_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 8 * 2 * 100)
    GrowingTensor("some", 100).append(torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"some: 101 samples of 16 bytes need 1.62 kB"):
        GrowingTensor("some", 101).append(torch.zeros(1, 2, dtype=torch.float64))
    endless = GrowingTensor("endless", None)
    for _ in range(62):
        endless.append(torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"endless: .* is free; give fewer samples"):
        endless.append(torch.zeros(1, 2, dtype=torch.float64))


META = torch.device("meta")  # stands for a GPU: its tensors have no values, and mix with none of the host


def _images() -> Images:
    return Images(
        torch.arange(10 * 3 * 4 * 4).view(10, 3, 4, 4).to(torch.uint8), torch.arange(10), "made up", 10, 4,
        (0.5,) * 3, (0.2,) * 3,
    )  # fmt: skip


def test_samples_that_a_gpu_has_room_for_are_moved_there_at_once() -> None:
    batches = Batches(_images().for_device(META), 4)
    assert batches.images.inputs.device == META
    assert batches[2][0].device == META


def test_larger_samples_stay_on_the_host_and_are_copied_by_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "stays_on_host", lambda name, size, device: size == 10 * 48)
    images = _images()
    held = images.for_device(META)
    assert (held.inputs.device.type, held.targets.device) == ("cpu", META)
    assert torch.equal(held.inputs, images.inputs)
    augmentation = Augmentation(crop=1, flip=True)
    for batches in (Batches(held, 4), Batches(held, 4, augmentation), Batches(held.take(np.arange(9)), 4)):
        inputs, targets = batches[1]
        assert (inputs.shape, inputs.dtype, inputs.device) == ((4, 3, 4, 4), torch.float32, META)
        assert targets.device == META


def test_mini_batches_of_any_structure_stay_on_the_host_if_a_gpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def record(name: str, size: int, device: torch.device) -> bool:
        sizes.append(size)
        return len(sizes) == 1

    monkeypatch.setattr(memory, "stays_on_host", record)
    x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    batches = BatchList([(x, y)] * 2, [{"x": x, "y": y}] * 2, "made up")
    assert batches.for_device(META)[0][0].device.type == "cpu"
    assert batches.for_device(META)[0][0].device == META
    assert sizes == [x.nbytes + y.nbytes] * 2  # tensors in several places count once


@pytest.mark.parametrize(("size", "stays"), [(499, False), (501, True)])
def test_samples_take_half_of_a_gpus_free_memory(
    size: int, stays: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "available_on", lambda device: 1000)
    with caplog.at_level(logging.DEBUG, logger="landscape"):
        assert memory.stays_on_host("made up", size, torch.device("cuda")) is stays
    assert not memory.stays_on_host("made up", 10**15, torch.device("cpu"))
    assert ["made up: 501 bytes of samples stay" in message for message in caplog.messages] == [True] * stays
