"""The run key: what changes the digest of a result, its group and its label."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from measured_runs import ARGUMENTS, loaded, save, small

from landscape.checkpoints.raw_files import file_sha256
from landscape.plots.report.table import checkpoints
from landscape.probes import PROBES, probe_class
from landscape.results import reader
from landscape.results.run_key import OPTIONS, Outcome, safe_label
from landscape.running.run import digest, run, run_key
from landscape.subject.loading import load as loading
from landscape.subject.loading.identity import weights_sha256
from landscape.subject.subject import Subject

pytestmark = pytest.mark.usefixtures("one_thread")


EVERY = frozenset(name for name in PROBES if name != "corruption" or importlib.util.find_spec("imagecorruptions"))
USED = {name: probe_class(name).uses for name in PROBES}
BATCHWISE = {name for name in PROBES if "batch_size" in USED[name]} | {"align", "barriers"}  # batch norm is repaired
DECAYED = {name for name in PROBES if "weight_decay" in USED[name]} | {"surface"}  # of the objective


def digests(subject: Subject) -> dict[str, str]:
    """The digest of every probe, by name."""
    weights = weights_sha256(subject)
    return {name: digest(small(name), subject, weights) for name in EVERY}


@pytest.fixture(scope="module")
def reference(snapshots: Path) -> dict[str, str]:
    return digests(loaded(snapshots))


def elsewhere(folder: Path, empty: Path) -> Subject:
    """The same contents in other files."""
    for file in folder.iterdir():
        content = torch.load(file, weights_only=True)
        torch.save({**content, "metrics": {"accuracy": 0.5}}, empty / file.name)
    return loaded(empty, device="cpu", data_root=empty)


def another_weight(folder: Path, empty: Path) -> Subject:
    subject = loaded(folder)
    with torch.no_grad():
        next(iter(subject.parameters.values()))[0] += 1e-6
    return subject


def another_target(folder: Path, empty: Path) -> Subject:
    subject = loaded(folder)
    assert subject.images is not None
    subject.images.targets[-1] = (subject.images.targets[-1] + 1) % 10
    return subject


def named(folder: Path, empty: Path) -> Subject:
    return loading.load(folder / "final.pt", label="other", samples=32, batch_size=8)


@pytest.mark.parametrize(
    ("changed", "probes"),
    [
        (elsewhere, set()), (named, set()), ({"batch_size": 16}, BATCHWISE), ({"weight_decay": 0.1}, DECAYED),
        (another_weight, EVERY), (another_target, EVERY), ({"samples": 31}, EVERY), ({"split": "train"}, EVERY),
        ({"augment": True}, EVERY),
    ],
)  # fmt: skip
def test_the_digest_follows_weights_data_and_the_options_that_a_probe_uses(
    changed: Any, probes: set[str], snapshots: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    subject = loaded(snapshots, **changed) if isinstance(changed, dict) else changed(snapshots, tmp_path)
    found = digests(subject)
    assert {name for name in EVERY if found[name] != reference[name]} == probes & EVERY


def test_the_run_key_of_augmented_data_contains_seed_and_batch_size(snapshots: Path) -> None:
    options = [{}, {"seed": 1}, {"batch_size": 16}]
    digests = {digest(small("fourier"), loaded(snapshots, augment=True, **option)) for option in options}
    assert len(digests) == 3
    assert len({digest(small("fourier"), loaded(snapshots, **option)) for option in options}) == 1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("surface", {"seed": 1}), ("surface", {"resolution": "5"}), ("surface", {"normalize": "layer"}),
        ("surface", {"range": "0.5"}), ("hessian", {"seed": 1}), ("hessian", {"top": 3}),
        ("hessian", {"which": "SA"}), ("fourier", {"layers": ("layer1",)}), ("lesion", {"layers": ("layer1",)}),
        ("lesion", {"pairs": True}), ("probe-linear", {"train_samples": 63}), ("noise", {"seed": 1}),
        ("noise", {"eps": "0.3"}), ("noise", {"equal_energy": True}),
    ],
)  # fmt: skip
def test_the_digest_follows_the_parameters(
    name: str, parameters: dict[str, Any], snapshots: Path, reference: dict[str, str]
) -> None:
    assert digest(small(name, **parameters), loaded(snapshots)) != reference[name]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("hessian", {"hvp": "double-backward"}), ("trace", {"hvp": "double-backward", "max_vectors": 9}),
        ("surface", {"tolerance": 0.1}), ("sensitivity", {"group_size": 7}), ("ensemble", {"timed": 1}),
    ],
)  # fmt: skip
def test_options_that_cannot_matter_do_not_enter_the_run_key(
    name: str, parameters: dict[str, Any], snapshots: Path, reference: dict[str, str]
) -> None:
    assert digest(small(name, **parameters), loaded(snapshots)) == reference[name]


def test_the_batch_size_matters_where_batch_norm_is_recalibrated(snapshots: Path) -> None:
    probe = small("lesion", bn="recalibrate:1")
    assert digest(probe, loaded(snapshots, batch_size=4)) != digest(probe, loaded(snapshots))


def test_a_backend_that_autotuning_chose_is_no_option_of_the_command(snapshots: Path) -> None:
    made = {"choices": json.dumps({"hvp": "double-backward"})}
    for choices, stored in ((made, False), (None, True)):
        key, _ = run_key(small("hessian", hvp="double-backward"), loaded(snapshots), "", choices)
        assert ("hvp" in json.loads(key.attributes[OPTIONS])) == stored


def test_equal_parameters_in_two_spellings_have_one_run_key(snapshots: Path, reference: dict[str, str]) -> None:
    assert digest(small("surface", resolution="3,3", range="-1:1"), loaded(snapshots)) == reference["surface"]
    assert digest(small("noise", eps="0.70", bands=(0.2, 0.3, 0.7)), loaded(snapshots)) == reference["noise"]


def test_the_code_of_a_model_file_enters_the_run_key(snapshots: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    code = "from landscape.models import build\n"
    code += f"def make(): return build('resnet_demo', classes=10, image_size=16, **{ARGUMENTS})\n"
    digests = []
    for text in (code, code, f"{code}# another\n"):
        file.write_text(text)
        digests.append(digest(small("fourier"), loaded(snapshots, model=f"{file}:make")))
    assert digests[0] == digests[1] != digests[2]


def test_another_label_finds_the_same_group(snapshots: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    first = run(small("variance"), loaded(snapshots), path, label="first")
    second = run(small("variance"), loaded(snapshots), path, label="second")
    assert second == Outcome(first.group, 4, 0)
    assert first.group.startswith("variance/first-")


@pytest.mark.slow
def test_a_label_is_kept_as_given_and_a_new_one_renames_a_stored_result(
    snapshots: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "results.h5"
    caplog.set_level("INFO", "landscape")
    group = run(small("variance"), loaded(snapshots), path, label="SGD, lr=1e-2").group
    assert group.startswith("variance/SGD__lr_1e-2-")
    labels = []
    for label in ("", "Adam (ours) $x$", "", "a\0b\x1b[2J\nc"):
        assert run(small("variance"), loaded(snapshots), path, label=label) == Outcome(group, 4, 0)
        ((_, data),) = reader.find(path, "variance")
        labels.append(data.attrs["label"])
    assert labels == ["SGD, lr=1e-2", "Adam (ours) $x$", "Adam (ours) $x$", "a b [2J c"]
    assert f"{group} has the label Adam (ours) $x$ now, it was SGD, lr=1e-2" in caplog.text


@pytest.mark.slow
def test_a_label_that_another_checkpoint_has_is_said(
    snapshots: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
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


@pytest.mark.slow
def test_a_retrained_checkpoint_gets_a_group_of_its_own(snapshots: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    first = run(small("variance"), loaded(snapshots), path)
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


@pytest.mark.slow
def test_a_group_says_what_made_it(snapshots: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    outcome = run(small("hessian"), loaded(snapshots, weight_decay=0.5), path)
    with h5py.File(path) as file:
        about = dict(file[outcome.group].attrs)
    assert about["checkpoint_sha256"] == file_sha256(snapshots / "final.pt")
    assert about["epoch"] == 2.0
    assert (about["probe"], about["model"], about["data"]) == ("hessian", "resnet_demo", "digits")
    assert about["protocol"] == "digits test, 32 samples, batch size 8, no augmentation, weight decay 0.5, seed 0"
    assert {
        "label",
        "parameters",
        "spec",
        "uses",
        "several",
        "errors_over",
        "versions",
        "device",
        "created",
        "finished",
    } <= set(about)
