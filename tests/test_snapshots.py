"""The snapshots of a run: which files count, in what order, and the vectors between them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from landscape.checkpoints import snapshots
from landscape.checkpoints.checkpoint import read_checkpoint, state_dict_sha256, write_checkpoint
from landscape.checkpoints.file_names import labels_of
from landscape.weight_space import weight_differences


def state(seed: float, width: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(int(10 * seed))
    return {"weight": torch.randn(width, 2, generator=generator), "bias": torch.randn(width, generator=generator)}


def ours(path: Path, *, epoch: float, seed: float | None = None) -> None:
    about: dict[str, Any] = {"model": "net", "model_args": {}, "data": {}, "recipe": {}, "metrics": {}, "seed": 0}
    write_checkpoint(path, state_dict=state(epoch if seed is None else seed), epoch=epoch, **about)


def run_of(folder: Path, **epochs: float) -> None:
    for name, epoch in epochs.items():
        ours(folder / f"{name}.pt", epoch=epoch)


def foreign(path: Path, seed: float, **content: Any) -> None:
    torch.save({"state_dict": state(seed), **content} if content else state(seed), path)


def names(folder: Path) -> list[str]:
    return [snapshot.path.name for snapshot in snapshots.of_run(folder)]


def test_the_stored_epoch_orders_not_the_name(tmp_path: Path) -> None:
    run_of(tmp_path, init=0.0, warmup=0.5, epoch_010=2.0, epoch_002=10.0, final=12.0)
    assert names(tmp_path) == ["init.pt", "warmup.pt", "epoch_010.pt", "epoch_002.pt", "final.pt"]
    assert [snapshot.epoch for snapshot in snapshots.of_run(tmp_path)] == [0.0, 0.5, 2.0, 10.0, 12.0]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (state(3, width=4), r"weight is \(4, 2\), expected \(3, 2\); keep"),
        ({"weight": torch.zeros(3, 2)}, r"bias is absent, expected \(3,\)"),
        ({**state(3), "scale": torch.zeros(5)}, r"scale is \(5,\), expected absent"),
    ],
)
def test_a_snapshot_of_other_shapes_is_named_with_its_first_mismatch(
    tmp_path: Path, other: dict[str, Tensor], said: str
) -> None:
    foreign(tmp_path / "epoch_1.pt", 1)
    for epoch in (2, 0):  # prefixes are no other architecture
        torch.save({f"module.{name}": tensor for name, tensor in state(epoch).items()}, tmp_path / f"epoch_{epoch}.pt")
    assert len(snapshots.of_run(tmp_path)) == 3
    (tmp_path / "epoch_0.pt").unlink()
    torch.save(other, tmp_path / "epoch_3.pt")
    with pytest.raises(ValueError, match=rf"epoch_3.pt has another architecture than epoch_1.pt: {said}"):
        snapshots.of_run(tmp_path)


def test_an_epoch_of_a_foreign_file_counts_before_its_name(tmp_path: Path) -> None:
    foreign(tmp_path / "1.ckpt", 1, epoch=9)
    foreign(tmp_path / "2.ckpt", 2, epoch=4)
    assert names(tmp_path) == ["2.ckpt", "1.ckpt"]


def test_equal_weights_count_once_whatever_their_file_says(tmp_path: Path) -> None:
    run_of(tmp_path, init=0, epoch_003=3, final=3)
    foreign(tmp_path / "copy.pth", 3, epoch=3)
    found = snapshots.of_run(tmp_path)
    assert [snapshot.epoch for snapshot in found] == [0.0, 3.0]
    assert found[-1].sha256 == state_dict_sha256(state(3))


def test_what_is_no_snapshot_is_left_out(tmp_path: Path) -> None:
    run_of(tmp_path, init=0, final=1)
    torch.save({"optimizer": {"lr": 0.1}}, tmp_path / "resume.pt")
    (tmp_path / "log.csv").write_text("epoch,loss\n")
    (tmp_path / "tensorboard").mkdir()
    assert names(tmp_path) == ["init.pt", "final.pt"]


@pytest.mark.parametrize("extra", ["same epoch", "other architecture", "no epoch", "no weights"])
def test_files_beside_those_of_the_trainer_are_left_out(
    tmp_path: Path, extra: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_of(tmp_path, init=0.0, epoch_001=1.0, epoch_002=2.0, final=3.0)
    if extra == "same epoch":
        ours(tmp_path / "init-with-statistics.pt", epoch=0.0, seed=7)
    elif extra == "other architecture":
        torch.save(state(1, width=5), tmp_path / "teacher.pt")
    elif extra == "no epoch":
        foreign(tmp_path / "mine.pt", 8)
    else:
        torch.save([1, 2], tmp_path / "notes.pt")
    with caplog.at_level("INFO"):
        assert names(tmp_path) == ["init.pt", "epoch_001.pt", "epoch_002.pt", "final.pt"]
    (left_out,) = {path.name for path in tmp_path.iterdir()} - set(names(tmp_path))
    assert f"the run is the files with the trainer's names, without {left_out}" in caplog.text


def test_a_damaged_file_of_the_trainer_is_not_left_out(tmp_path: Path) -> None:
    run_of(tmp_path, init=0.0, epoch_001=1.0, final=3.0)
    torch.save([1, 2], tmp_path / "epoch_002.pt")
    torch.save([1, 2], tmp_path / "notes.pt")
    with pytest.raises(ValueError, match=r"epoch_002\.pt"):
        snapshots.of_run(tmp_path)


def test_a_run_that_went_nowhere_is_refused(tmp_path: Path) -> None:
    ours(tmp_path / "init.pt", epoch=0, seed=1)
    ours(tmp_path / "final.pt", epoch=5, seed=1)
    with pytest.raises(
        ValueError, match=r"holds 1 different snapshots of .*, expected at least two; write some by landscape train"
    ):
        snapshots.of_run(tmp_path)


def test_a_run_that_came_back_ends_where_it_ended(tmp_path: Path) -> None:
    for epoch, seed in enumerate((1, 2, 3, 1)):
        ours(tmp_path / f"epoch_{epoch:03}.pt", epoch=epoch, seed=seed)
    found = snapshots.of_run(tmp_path)
    assert found[-1].sha256 == state_dict_sha256(state(1))
    assert [snapshot.epoch for snapshot in found] == [1.0, 2.0, 3.0]


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no run folder at .*none; give the folder that holds the snapshots"):
        snapshots.of_run(tmp_path / "none")
    with pytest.raises(ValueError, match=r"holds 0 different snapshots"):
        snapshots.of_run(tmp_path)
    foreign(tmp_path / "best.pth", 1)
    with pytest.raises(ValueError, match=r"best.pth stores no epoch and has no number in its name; rename it"):
        snapshots.of_run(tmp_path)


def test_a_folder_stands_for_its_final_or_its_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="landscape")
    run_of(tmp_path, init=0, epoch_002=2)
    assert snapshots.checkpoint_of(tmp_path) == tmp_path / "epoch_002.pt"
    ours(tmp_path / "final.pt", epoch=1)
    assert snapshots.checkpoint_of(tmp_path) == tmp_path / "final.pt"
    assert snapshots.what_to_measure(tmp_path) == [tmp_path / "final.pt"]
    assert caplog.messages[-1] == f"{tmp_path}: final.pt, of 3 checkpoints, is measured; name others: {tmp_path}/*.pt"


INDEPENDENT = {
    "their names say seed 0, seed 1": [f"resnet_seed{i}.pt" for i in range(8)],
    "their names say fold 1, fold 2": ["fold1-epoch_10.pt", "fold2-epoch_12.pt"],
    "model_0.pt stores no epoch and its name says none": ["model_0.pt", "model_1.pt", "model_2.pt"],
    "the names adam.pt and sgd.pt differ and say no epoch or step": ["adam.pt", "sgd.pt"],
    "2_resnet18.pth.tar stores no epoch": ["2_resnet18.pth.tar", "10_resnet18.pth.tar"],
}


@pytest.mark.parametrize("reason", INDEPENDENT)
def test_independent_checkpoints_in_a_folder_are_no_run_but_each_measured(
    tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="landscape")
    files = INDEPENDENT[reason]
    for seed, name in enumerate(files, start=1):
        foreign(tmp_path / name, seed)
    message = f"the {len(files)} checkpoints in .* are not recognisably one run: "
    with pytest.raises(snapshots.NotOneRun, match=message) as error:
        snapshots.of_run(tmp_path)
    order = f"or name them in order: landscape trajectory {tmp_path}/*{''.join(Path(files[0]).suffixes)}"
    assert all(words in str(error.value) for words in (reason, order))
    assert [path.name for path in snapshots.what_to_measure(tmp_path)] == files
    assert f"{len(files)} checkpoints, each measured by itself: {files[0]}, {files[1]}" in caplog.text
    with pytest.raises(ValueError, match=f"holds {len(files)} checkpoints that are not one run's; name one of them: "):
        snapshots.checkpoint_of(tmp_path)


def test_checkpoints_of_one_stored_epoch_or_of_two_architectures_are_no_run(tmp_path: Path) -> None:
    for seed in (1, 2):
        foreign(tmp_path / f"{seed}.pt", seed, epoch=200)
    with pytest.raises(snapshots.NotOneRun, match=r"1.pt and 2.pt have the same epoch"):
        snapshots.of_run(tmp_path)
    torch.save({"state_dict": state(3, width=5), "epoch": 100}, tmp_path / "2.pt")
    assert len(snapshots.what_to_measure(tmp_path)) == 2


RUNS = [
    ["resnet50_imagenet_init.pth.tar", "resnet50_imagenet_warmup.pth.tar", "resnet50_imagenet_epoch_010.pth.tar",
     "resnet50_imagenet_epoch_100.pth.tar"],
    ["vit_s16_init.pt", "vit_s16_warm-up.pt", "vit_s16_epoch1.pt", "vit_s16_epoch_2.pt", "vit_s16_last.pt"],
    ["init.pth", "model-v2-3.pth", "model-v2-20.pth", "model-v2-100.pth", "last.pth"],
    ["resnet18-epoch_2-acc_93.1.pt", "resnet18-epoch_10-acc_88.0.pt", "resnet18-epoch_30-acc_91.5.pt"],
    ["model_step500.pt", "model_step2000.pt", "model_step10000.pt"],
    ["checkpoint-9.pt", "checkpoint-10.pt", "checkpoint-11.pt"],
    ["ckpt_0.5.pt", "ckpt_1.5.pt", "ckpt_12.pt"],
    ["Epoch3.pt", "Epoch20.pt", "Epoch100.pt"],
    ["ckpt_9.t7", "ckpt_10.t7", "ckpt_11.t7"],
    ["epoch=0-step=90.ckpt", "epoch=0-step=100.ckpt", "epoch=3-step=300.ckpt", "last.ckpt"],
    ["resnet_seed3-epoch2.pt", "resnet_seed3-epoch10.pt"],
]  # fmt: skip


@pytest.mark.parametrize("files", RUNS)
def test_runs_are_recognised_by_their_names_and_ordered(tmp_path: Path, files: list[str]) -> None:
    for seed, name in enumerate(files, start=1):
        foreign(tmp_path / name, seed)
    assert names(tmp_path) == files


def test_warm_up_without_an_epoch_has_a_place_and_no_epoch(tmp_path: Path) -> None:
    for seed, name in enumerate(("net-init.pth", "net-warmup.pth", "net-epoch5.pth"), start=1):
        foreign(tmp_path / name, seed)
    np.testing.assert_array_equal([found.epoch for found in snapshots.of_run(tmp_path)], [0, np.nan, 5])


def test_folders_of_transformers_are_snapshots_and_their_last_copy_counts_once(tmp_path: Path) -> None:
    for seed, step in enumerate((500, 1000, 1500), start=1):
        for folder in (tmp_path / f"checkpoint-{step}", tmp_path):  # the trainer saves the last one outside too
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("{}")
            save_file(state(seed), folder / "model.safetensors")
    assert [(s.path.name, s.epoch) for s in snapshots.of_run(tmp_path)][:2] == [
        ("checkpoint-500", 500.0), ("checkpoint-1000", 1000.0)
    ]  # fmt: skip
    assert len(snapshots.of_run(tmp_path)) == 3


def test_the_best_of_a_run_has_no_place_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for epoch in (1, 2):
        foreign(tmp_path / f"checkpoint{epoch}.pth", epoch)
    foreign(tmp_path / "model_best.pth", 2)
    assert names(tmp_path) == ["checkpoint1.pth", "checkpoint2.pth"]
    foreign(tmp_path / "model_best.pth", 3)
    caplog.set_level("INFO", "landscape")
    assert names(tmp_path) == ["checkpoint1.pth", "checkpoint2.pth"]
    assert "model_best.pth is left out of the run: its epoch is unknown" in caplog.text
    foreign(tmp_path / "model_best.pth", 3, epoch=1.5)
    assert names(tmp_path) == ["checkpoint1.pth", "model_best.pth", "checkpoint2.pth"]


def test_files_that_are_named_are_a_run_in_their_order(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.pt" for name in ("c", "a", "b")]
    for seed, path in enumerate(files, start=1):
        foreign(path, seed)
    assert [s.path for s in snapshots.of_run(files)] == files
    numbered = [tmp_path / f"model_{number}.pt" for number in (1, 2, 10)]
    for seed, path in enumerate(numbered, start=1):
        foreign(path, seed)
    assert [s.path for s in snapshots.of_run(sorted(numbered))] == numbered  # a shell lists 10 before 2
    assert [s.path for s in snapshots.of_run(numbered[::-1])] == numbered[::-1]


def test_every_snapshot_is_read_as_the_run_is(tmp_path: Path) -> None:
    for epoch in (1, 2):
        torch.save({"state_dict": state(epoch), "state_dict_ema": state(epoch + 10)}, tmp_path / f"epoch_{epoch}.pt")
    found = snapshots.of_run(tmp_path, weights="ema")
    assert [s.sha256 for s in found] == [state_dict_sha256(state(11)), state_dict_sha256(state(12))]
    layer = nn.Linear(2, 3)
    snapshots.load_snapshot(layer, found[0])
    torch.testing.assert_close(layer.weight.data, state(11)["weight"])
    weights = state(12)
    expected = sum(((state(11)[n] - weights[n]).double() ** 2).sum().item() for n in weights)
    np.testing.assert_allclose(weight_differences.gram(found, weights), [[expected, 0], [0, 0]], rtol=1e-6)


def test_labels_of_several_checkpoints_are_distinct(tmp_path: Path) -> None:
    paths = ["a/model.pt", "b/model.pt", "c/x/final.pt", "d/x/final.pt", "net.pth.tar", "e/epoch_001.pt"]
    found = labels_of([tmp_path / path for path in paths])
    assert found == ["a-model", "b-model", "c-x", "d-x", "net", "e-epoch_001"]


def test_differences_and_their_inner_products(tmp_path: Path) -> None:
    run_of(tmp_path, epoch_0=0, epoch_1=1, epoch_2=2)
    weights = state(2)
    found = snapshots.of_run(tmp_path)
    flat = np.stack([np.concatenate([(state(t)[n] - weights[n]).double().ravel() for n in weights]) for t in range(3)])
    difference = weight_differences.difference(read_checkpoint(found[0].path), weights)
    np.testing.assert_allclose(np.concatenate([d.ravel() for d in difference.values()]), flat[0], rtol=1e-6)
    np.testing.assert_allclose(weight_differences.gram(found, weights), flat @ flat.T, rtol=1e-5, atol=1e-12)
    np.testing.assert_array_equal(weight_differences.gram(found, weights)[2], np.zeros(3))
    sums = weight_differences.combined(found, weights, np.array([[0.5, 2.0, 7.0], [1.0, 0.0, 0.0]]))
    expected = np.array([[0.5, 2.0, 7.0], [1.0, 0.0, 0.0]]) @ flat
    np.testing.assert_allclose([np.concatenate([d.ravel() for d in s.values()]) for s in sums], expected, rtol=1e-5)


def test_inner_products_do_not_depend_on_how_many_snapshots_are_held_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, **{f"epoch_{epoch}": epoch for epoch in range(5)})
    found, weights = snapshots.of_run(tmp_path), state(4)
    whole = weight_differences.gram(found, weights)
    assert whole[:4, :4].all()
    for held in (1, 2, 3):
        monkeypatch.setattr(weight_differences, "GRAM_BYTES", held * sum(4 * w.numel() for w in weights.values()))
        np.testing.assert_array_equal(weight_differences.gram(found, weights), whole)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    torch.save(state(1, width=4), tmp_path / "wide.pt")
    with pytest.raises(ValueError, match=r"wide.pt has another architecture: weight is \(4, 2\), expected \(3, 2\)"):
        weight_differences.difference(read_checkpoint(tmp_path / "wide.pt"), state(0))
    torch.save({"weight": torch.zeros(3, 2)}, tmp_path / "less.pt")
    with pytest.raises(ValueError, match=r"less.pt has another architecture: bias is missing, expected \(3,\)"):
        weight_differences.difference(read_checkpoint(tmp_path / "less.pt"), state(0))


def test_an_unknown_end_is_behind_every_number(tmp_path: Path) -> None:
    foreign(tmp_path / "final.pt", 1)
    foreign(tmp_path / "epoch_900.pt", 2)
    found = snapshots.of_run(tmp_path)
    assert [snapshot.path.stem for snapshot in found] == ["epoch_900", "final"]
    assert math.isinf(found[-1].epoch)
