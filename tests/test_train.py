"""Training runs: what they write, how an interrupted run resumes, what is rejected."""

from __future__ import annotations

import csv
import errno
import math
import os
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from scipy.special import logsumexp

from landscape import models
from landscape.checkpoints.checkpoint import read_checkpoint, state_dict_sha256
from landscape.checkpoints.snapshots import of_run
from landscape.checkpoints.state_dict_loading import load_into
from landscape.data.augment import Augmentation
from landscape.data.recipes import Recipe, recipe
from landscape.options import OptionError
from landscape.predictions.evaluation import evaluate
from landscape.probe import derived_seed
from landscape.subject.device import device
from landscape.subject.process_group import ProcessGroup
from landscape.training import run_folder
from landscape.training.train import EpochResult, train
from landscape.training.training_set import balanced_rows, splits

SMALL = {"dim": 8, "depth": 2, "heads": 2, "patch": 4}
RESNET = {"blocks": (1, 1), "width": 8}
SOURCE = """
import torch

def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(22, 3, 8, 8, generator=generator), torch.arange(22) % 3

def bytes():
    images = torch.randint(256, (22, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return torch.utils.data.TensorDataset(images, torch.arange(22) % 3)

def broken():
    inputs, targets = images()
    return inputs / 0.0, targets

def vectors():
    return torch.randn(22, 5), torch.arange(22) % 3
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    return f"{file}:images"


def short(epochs: int = 3, **overrides: float | str | bool) -> Recipe:
    return recipe("demo", **{"epochs": epochs, "batch_size": 8, "lr": 1e-3, **overrides})


def stop_after(epoch: int) -> Callable[[EpochResult], None]:
    def report(progress: EpochResult) -> None:
        if progress.epoch == epoch:
            raise KeyboardInterrupt

    return report


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def weights(path: Path) -> str:
    return state_dict_sha256(read_checkpoint(path).state_dict)


def rows(folder: Path) -> list[dict[str, str]]:
    lines = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.slow
def test_the_run_folder_and_the_epochs_of_its_snapshots(source: str, tmp_path: Path) -> None:
    """22 samples in batches of 8 are 3 steps; a warm-up of 1/3 of 4 epochs ends after 4 of them."""
    out = tmp_path / "run"
    final = train("vit_demo", source, recipe=short(4, warmup=4 / 3), out=out, model_args=SMALL, snapshots=2)
    assert final == out / "final.pt"
    epochs = {path.name: read_checkpoint(path).epoch for path in out.glob("*.pt")}
    assert epochs == pytest.approx(
        {"init.pt": 0, "warmup.pt": 4 / 3, "epoch_002.pt": 2, "epoch_004.pt": 4, "final.pt": 4}
    )
    assert names(out) == {*epochs, "metrics.csv"}
    assert weights(out / "epoch_004.pt") == weights(final)
    assert [int(row["epoch"]) for row in rows(out)] == [1, 2, 3, 4]


def test_a_snapshot_rebuilds_the_network_its_metrics_were_measured_on(source: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    train("vit_demo", source, recipe=short(2, drop_path=0.3), out=tmp_path / "run", model_args=SMALL, seed=5)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's
    _, testing = splits(source, root=None)
    for path in (tmp_path / "run").glob("*.pt"):
        found = read_checkpoint(path)
        assert found.data == {"name": source, "classes": 3, "size": 8, "mean": (), "std": ()}
        assert found.model_args == {"classes": 3, "image_size": 8, "drop_path": 0.3, **SMALL}
        assert (found.recipe["name"], found.recipe["epochs"], found.seed) == ("demo", 2, 5)
        network = models.build(found.model, **found.model_args)
        load_into(network, found)
        measured = evaluate(network, [(testing.inputs, testing.targets)])
        assert found.metrics["loss"] == pytest.approx(measured["loss"], rel=1e-5)
        assert found.metrics["accuracy"] == measured["accuracy"]


def test_no_epochs_leave_the_seeded_initial_weights_twice(source: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train("vit_demo", source, recipe=short(0), out=out, model_args=SMALL, seed=3)
    torch.manual_seed(3)
    fresh = models.build("vit_demo", classes=3, image_size=8, **SMALL)
    assert names(out) == {"init.pt", "final.pt"}
    assert weights(out / "init.pt") == weights(out / "final.pt") == state_dict_sha256(fresh.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "arguments", "changes"),
    [
        ("vit_demo", SMALL, {"mixup": 1.0, "cutmix": 0.8, "drop_path": 0.5}),
        ("resnet_demo", RESNET, {"optimizer": "sgd", "label_smoothing": 0.1}),
        ("resnet_demo", RESNET, {"ema": 0.9, "accumulate": 2, "batch_size": 4, "sam": 0.1}),
    ],
)
def test_a_run_stopped_and_resumed_equals_an_uninterrupted_one(
    source: str, tmp_path: Path, model: str, arguments: dict[str, object], changes: dict[str, float]
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    given = {"recipe": short(4, warmup=1.5, **changes), "model_args": arguments, "snapshots": 1}
    train(model, source, out=whole, **given)
    seen: list[int] = []
    written: dict[Path, int] = {}

    def stopping(progress: EpochResult) -> None:
        seen.append(progress.epoch)
        if progress.epoch in (1, 2, 4):
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            train(model, source, out=stopped, report=stopping, **given)
        assert "resume.pt" in names(stopped)
        written |= {path: path.stat().st_mtime_ns for path in stopped.glob("*.pt") if path not in written}
    del written[stopped / "resume.pt"]
    train(model, source, out=stopped, report=stopping, **given)
    assert seen == [1, 2, 3, 4]
    assert names(stopped) == names(whole)
    assert {path: path.stat().st_mtime_ns for path in written} == written  # written once
    assert {path.name: weights(path) for path in stopped.glob("*.pt")} == {
        path.name: weights(path) for path in whole.glob("*.pt")
    }
    assert rows(stopped) == rows(whole)


@pytest.mark.slow
def test_an_interruption_at_any_write_loses_nothing(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    given = {"recipe": short(2), "model_args": SMALL, "snapshots": 1}
    train("vit_demo", source, out=whole, **given)
    for name in ("train.write_checkpoint", "run_folder.write_metrics", "run_folder.write_state", "run_folder.tidy"):
        killed, victim = tmp_path / name, f"landscape.training.{name}"
        write = pkgutil.resolve_name(victim)
        for survived in range(5):
            calls = iter(range(100))

            def once_too_often(
                *args: object, last: int = survived, count: Any = calls, write: Any = write, **named: object
            ) -> None:
                if next(count) == last:
                    raise KeyboardInterrupt
                write(*args, **named)

            monkeypatch.setattr(victim, once_too_often)
            with suppress(KeyboardInterrupt):
                train("vit_demo", source, out=killed, **given)
        monkeypatch.undo()
        assert weights(train("vit_demo", source, out=killed, **given)) == weights(whole / "final.pt")
        assert names(killed) == names(whole)
        assert rows(killed) == rows(whole)


def test_a_finished_run_is_returned_as_it_is(source: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    final = train("vit_demo", source, recipe=short(1), out=out, model_args=SMALL)
    written = final.stat().st_mtime_ns
    assert train("vit_demo", source, recipe=short(1), out=out, model_args=SMALL, report=stop_after(1)) == final
    assert final.stat().st_mtime_ns == written


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"recipe": short(2, lr=0.5)}, "recipe lr 0.001 in the folder, 0.5 requested"),
        ({"seed": 1}, "seed 0 in the folder, 1 requested"),
        ({"fraction": 0.5}, "recipe fraction 1.0 in the folder, 0.5 requested"),
        ({"model_args": {**SMALL, "depth": 3}}, "model_args depth 2 in the folder, 3 requested"),
    ],
)
def test_another_run_in_the_folder_is_refused(
    source: str, tmp_path: Path, other: dict[str, object], named: str, finished: bool
) -> None:
    given: dict[str, object] = {"recipe": short(2), "model_args": SMALL, "out": tmp_path / "run"}
    if finished:
        train("vit_demo", source, **given)
    else:
        with pytest.raises(KeyboardInterrupt):
            train("vit_demo", source, report=stop_after(1), **given)
    with pytest.raises(ValueError, match=f"holds another run .*{named}.*another --out"):
        train("vit_demo", source, **{**given, **other})


def test_a_loss_that_stops_being_finite_ends_in_one_line(source: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    wild = short(3, lr=1e30, clip=0.0, warmup=0.0)
    with pytest.raises(
        ValueError, match=r"^the loss became (nan|inf) at epoch 1, step \d; .*init\.pt; lower lr"
    ) as caught:
        train("vit_demo", source, recipe=wild, out=out, model_args=SMALL)
    assert "\n" not in str(caught.value)
    for path in out.glob("*.pt"):
        assert all(tensor.isfinite().all() for tensor in read_checkpoint(path).state_dict.values())
    assert names(out) == {"init.pt"}


def test_train_loss_is_the_cross_entropy_with_soft_targets(source: str, tmp_path: Path) -> None:
    """One epoch of one batch: -sum_c t_c (z_c - logsumexp z), recomputed from `init.pt` and the same augmentation."""
    mixing = short(1, batch_size=22, warmup=0.0, mixup=1.0, cutmix=0.8, label_smoothing=0.1, flip=False, crop=0)
    seen: list[EpochResult] = []
    train("vit_demo", source, recipe=mixing, out=tmp_path / "run", model_args=SMALL, report=seen.append)
    first = read_checkpoint(tmp_path / "run" / "init.pt")
    network = models.build(first.model, **first.model_args)
    load_into(network, first)
    training, _ = splits(source, root=None)
    order = torch.randperm(22, generator=torch.Generator().manual_seed(derived_seed(0, "order", 1)))
    inputs, targets = Augmentation.of_recipe(asdict(mixing))(
        training.inputs[order], training.targets[order], classes=3, seed=derived_seed(0, "augmentation", 1, 0)
    )
    logits = network(inputs).detach().double().numpy()
    losses = -(targets.numpy() * (logits - logsumexp(logits, axis=1, keepdims=True))).sum(axis=1)
    assert seen[0].train_loss == pytest.approx(losses.mean(), rel=1e-5)
    assert seen[0].lr == mixing.lr


def test_clipping_bounds_the_first_step(source: str, tmp_path: Path) -> None:
    """One step of SGD without momentum, with a gradient longer than `clip`, has length lr * clip."""
    one = short(1, optimizer="sgd", batch_size=22, warmup=0.0, weight_decay=0.0, lr=0.5, clip=1e-3)
    final = train("vit_demo", source, recipe=one, out=tmp_path / "run", model_args=SMALL)
    before = read_checkpoint(final.with_name("init.pt")).state_dict
    after = read_checkpoint(final).state_dict
    moved = math.sqrt(sum((after[name] - before[name]).double().square().sum().item() for name in before))
    assert moved == pytest.approx(0.5 * 1e-3, rel=1e-3)


def test_bytes_are_normalised_and_the_checkpoint_stores_the_crop_in_pixels(source: str, tmp_path: Path) -> None:
    data, made = source.replace(":images", ":bytes"), short(1, randaugment=9, crop=8)
    found = read_checkpoint(train("vit_demo", data, recipe=made, out=tmp_path / "run", model_args=SMALL))
    assert found.recipe["crop"] == 2  # 8 at 32 pixels
    assert len(found.data["mean"]) == 3


@pytest.mark.slow
def test_channels_last_changes_a_run_by_rounding_alone(source: str, tmp_path: Path) -> None:
    given = {"model_args": RESNET, "seed": 1}
    paths = [
        train("resnet_demo", source, recipe=short(2, memory_format=name), out=tmp_path / name, **given)
        for name in ("contiguous", "channels_last")
    ]
    one, other = (read_checkpoint(path).state_dict for path in paths)
    assert all(tensor.is_contiguous() for tensor in other.values())
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_memory_format_is_that_of_the_kind_of_model_or_of_the_run_that_is_resumed_and_stored(
    source: str, tmp_path: Path
) -> None:
    given = {"model_args": RESNET}
    narrow = {**RESNET, "width": 4}
    for model, arguments, expected in (
        ("vit_demo", SMALL, "contiguous"), ("resnet_demo", RESNET, "channels_last"),
        ("resnet_demo", narrow, "contiguous"),
    ):  # fmt: skip
        out = tmp_path / f"{model}-{arguments.get('width')}"
        final = train(model, source, recipe=short(0), out=out, model_args=arguments)
        assert read_checkpoint(final).recipe["memory_format"] == expected
    with pytest.raises(ValueError, match="needs 8 channels before a strided 1 x 1"):
        train(
            "resnet_demo", source, recipe=short(memory_format="channels_last"), out=tmp_path / "no", model_args=narrow
        )
    contiguous, out = short(2, memory_format="contiguous"), tmp_path / "run"
    whole = train("resnet_demo", source, recipe=contiguous, out=tmp_path / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        train("resnet_demo", source, recipe=contiguous, out=out, report=stop_after(1), **given)
    resumed = train("resnet_demo", source, recipe=short(2), out=out, **given)
    assert weights(resumed) == weights(whole)
    assert read_checkpoint(resumed).recipe["memory_format"] == "contiguous"
    with pytest.raises(ValueError, match="memory_format contiguous in the folder, channels_last requested"):
        train("resnet_demo", source, recipe=short(2, memory_format="channels_last"), out=out, **given)


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_larger_batch(source: str, tmp_path: Path) -> None:
    """22 samples: an update of 16 and one of 6, which makes at most three parts of two. No batch norm, no dropout."""
    given = {"model_args": SMALL, "seed": 2}
    mixing = {"mixup": 1.0, "cutmix": 0.8, "label_smoothing": 0.1, "optimizer": "sgd", "lr": 0.1}
    whole = train("vit_demo", source, recipe=short(2, **{**mixing, "batch_size": 16}), out=tmp_path / "whole", **given)
    one, begun = (read_checkpoint(path).state_dict for path in (whole, whole.with_name("init.pt")))
    assert max((one[name] - begun[name]).abs().max().item() for name in one) > 1e-2
    for batch_size, accumulate in ((8, 2), (4, 4), (16, 1)):
        accumulated = short(2, **{**mixing, "batch_size": batch_size, "accumulate": accumulate})
        parts = train("vit_demo", source, recipe=accumulated, out=tmp_path / f"in {accumulate}", **given)
        torch.testing.assert_close(read_checkpoint(parts).state_dict, one, rtol=1e-5, atol=1e-6)
        losses = ([row["train_loss"][:6] for row in rows(run.parent)] for run in (whole, parts))
        assert next(losses) == next(losses)


def test_a_second_run_in_the_same_folder_ends_in_one_line(source: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = {"recipe": short(1), "out": out, "model_args": SMALL}

    def again(progress: EpochResult) -> None:
        train("vit_demo", source, **given)

    with pytest.raises(RuntimeError, match=r"another process is training in .*run; .*another --out"):
        train("vit_demo", source, report=again, **given)
    assert weights(train("vit_demo", source, **given))  # the lock ended with the run


@pytest.mark.slow
def test_half_precision_is_for_snapshots_between_the_warm_up_and_the_end(source: str, tmp_path: Path) -> None:
    given = {"recipe": short(3, ema=0.5), "model_args": RESNET, "snapshots": 1}
    full, half = tmp_path / "full", tmp_path / "half"
    train("resnet_demo", source, out=full, **given)
    train("resnet_demo", source, out=half, snapshot_dtype="fp16", **given)
    assert names(half) == names(full)
    same = {path.name for path in full.glob("*.pt") if weights(path) == weights(half / path.name)}
    assert same == {"init.pt", "warmup.pt", "epoch_003.pt", "final.pt", "final_ema.pt"}  # training went on unrounded
    assert rows(half) == rows(full)
    for name in ("epoch_001.pt", "epoch_002.pt"):
        stored = torch.load(half / name, weights_only=True)["state_dict"]
        exact, found = read_checkpoint(full / name), read_checkpoint(half / name)
        for key, tensor in exact.state_dict.items():
            assert stored[key].dtype == (torch.float16 if tensor.ndim >= 2 else tensor.dtype)
            assert found.state_dict[key].dtype == tensor.dtype
            assert torch.equal(found.state_dict[key], tensor.half().float() if tensor.ndim >= 2 else tensor)
        network = models.build(found.model, **found.model_args)
        load_into(network, found)
        _, testing = splits(source, root=None)
        measured = evaluate(network, [(testing.inputs, testing.targets)])
        assert found.metrics["loss"] == pytest.approx(measured["loss"], rel=1e-6)
        assert found.metrics["loss"] != exact.metrics["loss"]
    assert [snapshot.epoch for snapshot in of_run(half)] == pytest.approx([0, 0.6667, 1, 2, 3], abs=1e-3)


def test_values_beyond_half_precision_keep_their_precision() -> None:
    found = run_folder.half_precision(
        {"wide": torch.full((2, 2), 1e5), "weight": torch.ones(2, 2), "count": torch.tensor(70000)}
    )
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "wide": torch.float32, "weight": torch.float16, "count": torch.int64,
    }  # fmt: skip


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_snapshot_and_a_run_that_can_resume(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    given = {"recipe": short(3), "model_args": SMALL, "snapshots": 1}
    train("vit_demo", source, out=whole, **given)
    save = torch.save

    def full(content: dict[str, object], stream: IO[bytes]) -> None:
        if content.get("epoch") == 2.0:
            stream.write(b"half a file")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, stream)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"^cannot write .*epoch_002\.pt: No space left on device; free some space"):
        train("vit_demo", source, out=out, **given)
    assert names(out) == {"init.pt", "warmup.pt", "epoch_001.pt", "metrics.csv", "resume.pt"}
    assert weights(out / "epoch_001.pt") == weights(whole / "epoch_001.pt")
    assert len(rows(out)) == 1
    monkeypatch.undo()
    assert weights(train("vit_demo", source, out=out, **given)) == weights(whole / "final.pt")
    assert names(out) == names(whole)


def test_a_metrics_table_that_cannot_be_written_is_named_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder.write_metrics(tmp_path, [{"epoch": 1}], ["epoch"])

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"^cannot write .*metrics\.csv: No space left on device; free some space"):
        run_folder.write_metrics(tmp_path, [{"epoch": 1}, {"epoch": 2}], ["epoch"])
    assert names(tmp_path) == {"metrics.csv"}
    assert (tmp_path / "metrics.csv").read_text() == "epoch\n1\n"


def test_bf16_keeps_fp32_weights(source: str, tmp_path: Path) -> None:
    given = {"model_args": SMALL}
    half = train("vit_demo", source, recipe=short(1, precision="bf16"), out=tmp_path / "bf16", **given)
    full = train("vit_demo", source, recipe=short(1), out=tmp_path / "fp32", **given)
    assert {tensor.dtype for tensor in read_checkpoint(half).state_dict.values()} == {torch.float32}
    assert weights(half) != weights(full)


def test_a_fraction_keeps_the_same_share_of_every_class() -> None:
    targets = torch.tensor([0] * 40 + [2] * 20 + [1] * 10)
    kept = balanced_rows(targets, 35)
    assert targets[kept].bincount().tolist() == [20, 5, 10]
    assert torch.equal(balanced_rows(targets, 70), torch.arange(70))


def test_a_damaged_resume_state_is_named(source: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train("vit_demo", source, recipe=short(), out=out, model_args=SMALL, report=stop_after(1))
    (out / "resume.pt").write_bytes((out / "resume.pt").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"resume\.pt is damaged .*delete it"):
        train("vit_demo", source, recipe=short(), out=out, model_args=SMALL)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "vit_dmeo"}, ValueError, "vit_demo"),
        ({"fraction": 0.0}, OptionError, "--fraction must be above 0 and at most 1, got 0.0"),
        ({"fraction": 0.01}, ValueError, "raise --fraction"),
        ({"snapshots": -1}, OptionError, "--snapshots must be at least 0, got -1"),
        ({"snapshot_dtype": "fp8"}, OptionError, "--snapshot-dtype must be fp32 or fp16, got fp8"),
        ({"model_args": {**SMALL, "patch": 3}}, ValueError, "patch=3 does not divide .* give one of 1, 2, 4, 8"),
        ({"device": "tpu"}, OptionError, "--device must be .*, got tpu"),
        ({"model_args": {"classes": 5}}, ValueError, "classes=5: the data decide"),
        ({"model_args": {"image_size": "big"}}, ValueError, "image_size must be a number of pixels .*, got big"),
        ({"model_args": {"image_size": 16}}, ValueError, "have 8 pixels"),
        ({"model_args": {"deph": 5}}, ValueError, "deph"),
        ({"recipe": short(2, randaugment=9)}, ValueError, "cifar-noaug"),
        ({"data": "vectors"}, ValueError, r"gives inputs \(22, 5\).*square images"),
        ({"data": "broken"}, ValueError, "the loss became nan at epoch 1, step 1; there is no snapshot yet"),
        ({"recipe": Recipe(epochs=2)}, OptionError, "--warmup must be between 0 and the 2 epochs of the run, got 5.0"),
    ],
)
def test_invalid_values_and_data_are_refused_before_anything_is_written(
    source: str, tmp_path: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    given = {"model": "vit_demo", "recipe": short(1), "out": tmp_path / "run", **changes}
    with pytest.raises(error, match=message):
        train(**given | {"data": source.replace("images", str(changes.get("data", "images")))})
    assert not (tmp_path / "run").exists()


def test_processes_without_samples_are_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples are no update of two processes, each of which needs two."""

    class Two(ProcessGroup):
        def on_main_process(self, work: Callable[[], Any]) -> Any:
            return work()

    monkeypatch.setattr("landscape.training.train.process_group", lambda: nullcontext(Two(0, 2)))
    with pytest.raises(ValueError, match="leaves 3 samples to 2 processes, expected at least two each"):
        train("vit_demo", source, recipe=short(1), out=tmp_path / "run", model_args=SMALL, fraction=3 / 22)
    assert not (tmp_path / "run").exists()


def test_device_names() -> None:
    assert device("cpu") == torch.device("cpu")
    assert device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="CUDA devices"):
        device("cuda:99")
    with pytest.raises(OptionError, match=r"--device must be auto, cpu, .*, got cuda:x"):
        device("cuda:x")
