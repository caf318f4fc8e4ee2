"""Scores under corruptions: files and generated images, means and their errors, errors relative to a baseline."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cifar_files import write_test_images
from PIL import Image

import landscape
from landscape.data import corruptions
from landscape.data.sampling import subset
from landscape.exchange import csv_files, importing
from landscape.options import OptionError
from landscape.plots import appearance
from landscape.plots.figures import corruption as figure
from landscape.plots.figures import corruption_sizes as sizes
from landscape.probes.corruption import Corruption
from landscape.results import reader
from landscape.running.run import reduce_of
from landscape.statistics import calibration
from landscape.statistics.corruption_summary import paired_difference, reduced
from landscape.statistics.means import mean_and_standard_error
from landscape.subject.loading import identity
from landscape.subject.loading.load import load
from landscape.subject.subject import Subject

CLEAN = np.random.default_rng(0).integers(200, size=(40, 32, 32, 3), dtype=np.uint8)
CLASSES = np.random.default_rng(1).integers(10, size=40)
FEW = {"corruptions": "fog,snow", "severities": "1,5"}
LIBRARY = pytest.mark.skipif(
    "imagecorruptions" not in sys.modules and not __import__("importlib.util").util.find_spec("imagecorruptions"),
    reason="needs imagecorruptions-imaug",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """CIFAR-10's test images, and two corruptions of them that add multiples of the severity."""
    write_test_images(tmp_path, CLEAN, CLASSES)
    (tmp_path / "CIFAR-10-C").mkdir()
    for i, name in enumerate(("fog", "snow"), start=4):
        np.save(tmp_path / f"CIFAR-10-C/{name}.npy", np.concatenate([CLEAN + np.uint8(i * s) for s in range(1, 6)]))
    np.save(tmp_path / "CIFAR-10-C/labels.npy", np.tile(CLASSES.astype(np.uint8), 5))
    return tmp_path


def subject_on(root: Path, **options: Any) -> Subject:
    torch.manual_seed(0)
    small = {"blocks": (1, 1), "width": 8} | ({"mc_dropout": 0.3} if "mc_dropout" in options else {})
    return load(model="resnet_demo", model_arg=small, data="cifar10", data_root=root, device="cpu", **options)


def measured(subject: Subject, **options: Any) -> Any:
    return landscape.measure("corruption", subject, out=None, quiet=True, **{**FEW, **options})


@pytest.mark.slow
def test_every_cell_is_the_evaluation_on_its_file(root: Path) -> None:
    found = measured(subject_on(root, batch_size=7))
    assert found.attrs["source"] == "corruptions of CIFAR-10-C"
    for row, name in enumerate(("fog", "snow")):
        for column, severity in enumerate((1, 5)):
            other = subject_on(root, batch_size=40)
            there = load(
                model="resnet_demo", model_arg={"blocks": (1, 1), "width": 8}, data=f"cifar10-c:{name}:{severity}",
                data_root=root, device="cpu",
            )  # fmt: skip
            there.model.load_state_dict(other.model.state_dict())
            expected = landscape.evaluate(there)
            for ours, theirs in (("accuracy", "accuracy"), ("nll", "loss"), ("ece", "ece")):
                assert float(found[ours][row, column]) == pytest.approx(expected[theirs], abs=1e-6)
            for ours, theirs in (("accuracy_se", "accuracy_se"), ("nll_se", "loss_se")):
                assert float(found[ours][row, column]) == pytest.approx(expected[theirs], abs=1e-6)


@pytest.mark.slow
def test_the_error_of_a_mean_knows_that_all_corruptions_are_of_the_same_images(root: Path) -> None:
    for severity in ("fog", "snow"):  # all cells hold the same images
        np.save(root / f"CIFAR-10-C/{severity}.npy", np.tile(CLEAN, (5, 1, 1, 1)))
    found = measured(subject_on(root))
    cell = float(found["nll_se"][0, 0])
    assert float(found["mean_nll_se"]) == pytest.approx(cell, rel=1e-9)  # 4 cells, but no more images than one
    assert float(found["mean_nll"]) == pytest.approx(float(found["nll"][0, 0]))
    np.testing.assert_allclose(found["type_accuracy_se"], found["accuracy_se"][:, 0])


def test_means_and_their_errors_are_those_of_the_scores_per_image() -> None:
    random = np.random.default_rng(0)
    scores = random.random((2, 3, 50))  # corruption, severity, image; one image per block
    cells = {"accuracy": scores.mean(axis=2), "nll": scores.mean(axis=2), "ece": scores.mean(axis=2)}
    data = {
        **cells,
        **{f"{name}_block": scores for name in cells},
        "ece_chance": np.zeros((2, 3)),
        "block_samples": np.ones(50),
        "done": np.ones((2, 3)),
    }
    baseline = {f"baseline_{name}": random.random((2, 3)) for name in cells}
    found = reduced({**data, **baseline})
    value, error = mean_and_standard_error(scores.mean(axis=(0, 1)))
    assert (found["mean_nll"], found["mean_nll_se"]) == pytest.approx((value, error))
    value, error = mean_and_standard_error(scores[1].mean(axis=0))
    assert (found["type_nll"][1], found["type_nll_se"][1]) == pytest.approx((value, error))
    error_of = 1 - scores
    share = error_of.sum(axis=1) / (1 - baseline["baseline_accuracy"]).sum(axis=1)[:, None]
    value, error = mean_and_standard_error(share.mean(axis=0))
    assert (found["mce"], found["mce_se"]) == pytest.approx((value, error))
    share = scores.sum(axis=1) / baseline["baseline_nll"].sum(axis=1)[:, None]
    assert found["mcnll"] == pytest.approx(share.mean())
    data["done"][1, 2] = 0
    half = reduced({**data, **baseline})
    assert np.isfinite(half["type_nll"][0])
    assert np.isnan([half["type_nll"][1], half["mean_nll"], half["mce"]]).all()


@pytest.mark.parametrize("excess", [0.0, 0.05])
def test_the_interval_of_a_mean_calibration_error_holds_the_truth_though_every_one_is_too_large(excess: float) -> None:
    """200 images under 15 corruptions; without what chance adds it held 0 in none of 40, and 0.05 in none."""
    random, inside = np.random.default_rng(0), 0
    for _ in range(40):
        base, luck = random.uniform(0.55, 0.85, 200), random.random(200)
        data: dict[str, np.ndarray] = {"done": np.ones((15, 1)), "block_samples": np.bincount(np.arange(200) % 100)}
        cells = []
        for _ in range(15):
            confidence = np.clip(base + random.normal(0, 0.03, 200), 0.51, 0.95)
            right = (np.where(random.random(200) < 0.7, luck, random.random(200)) < confidence - excess).astype(float)
            scores = calibration.SampleScores(*(right,) * 4, confidence)
            blocks = np.bincount(np.arange(200) % 100, calibration.gaps(scores))
            cells.append((calibration.summary(scores)["ece"], calibration.chance_ece(scores), blocks))
        for name, values in zip(("ece", "ece_chance", "ece_block"), zip(*cells, strict=True), strict=True):
            data[name] = np.array(values)[:, None]
        for name in ("accuracy", "nll"):
            data |= {name: data["ece"], f"{name}_block": data["ece_block"]}
        found = reduced(data)
        inside += bool(found["mean_ece_low"] <= excess <= found["mean_ece_high"])
        assert found["mean_ece_high"] - found["mean_ece_low"] < 0.2
    assert inside >= 37


@pytest.mark.slow
def test_errors_relative_to_itself_are_one_and_to_a_csv_as_defined(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.h5"
    first = landscape.measure("corruption", subject_on(root), out=out, label="base", quiet=True, **FEW)
    again = measured(subject_on(root), baseline=f"{out}:base")
    assert [float(again[name]) for name in ("mce", "mcnll", "mcece")] == pytest.approx([1, 1, 1])
    table = tmp_path / "base.csv"
    table.write_text("corruption,severity,accuracy\nfog,1,0.5\nfog,5,0.25\nsnow,1,0.6\nsnow,5,0.2\n")
    against = measured(subject_on(root), baseline=str(table))
    error = (1 - first["accuracy"].values).sum(axis=1) / [1.25, 1.2]
    np.testing.assert_allclose(against["relative_accuracy"], error)
    assert float(against["mce"]) == pytest.approx(error.mean())
    assert np.isnan(against["mcnll"])  # the baseline says no NLL


@pytest.mark.slow
def test_networks_on_the_same_images_are_compared_image_by_image(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.h5"
    for label in ("one", "two", "three"):
        subject = subject_on(root)
        with torch.no_grad():
            list(subject.model.parameters())[-2].mul_(1.0 if label == "one" else 1.2)
        chosen = FEW if label != "three" else {**FEW, "severities": "1"}
        landscape.measure("corruption", subject, out=out, label=label, quiet=True, **chosen)
    results = [reader.find(out, probe="corruption", label=label)[0][1] for label in ("one", "two", "three")]
    assert figure.alike(results) == [0, 1]  # the third has other severities
    found = paired_difference(results[1], results[0])
    cells = []
    for data in results[:2]:  # 40 images in 100 blocks: one each
        assert data["block_samples"].values.sum() == 40
        cells.append(data["nll_block"].values.mean(axis=(0, 1)))
    expected, error = mean_and_standard_error((cells[1] - cells[0])[:40])
    assert found["nll"][0] == pytest.approx(expected)
    assert found["nll"][1].error == pytest.approx(error)
    assert found["nll"][1].error < float(results[1]["mean_nll_se"])  # what is hard for both cancels
    assert list(figure.paired(results[1], results[0])) == ["mean accuracy", "mean nll", "mean ece"]
    labels = [ax.get_xlabel() for ax in figure.page(results, appearance.looks(results)).axes]
    assert labels[-3:] == ["difference in mean accuracy", "difference in mean NLL (nats)", "difference in mean ECE"]


@pytest.mark.slow
def test_every_size_of_an_ensemble_is_a_run_with_so_many_members_without_further_passes(root: Path) -> None:
    table = root / "base.csv"
    table.write_text("corruption,severity,accuracy,nll,ece\nfog,5,0.3,7,0.1\nsnow,5,0.2,6,0.1\n")
    given = {"baseline": str(table), "severities": "5"}
    passes: dict[int, int] = {}
    for members in (1, 5):
        subject = subject_on(root, mc_dropout=members, batch_size=16)
        passes[members] = 0
        handle = subject.model.register_forward_hook(lambda *_, m=members: passes.update({m: passes[m] + 1}))
        found = measured(subject, **given)
        handle.remove()
    assert passes[5] == 5 * passes[1] > 0
    assert found["size"].values.tolist() == [1, 2, 3, 5]
    for k, members in enumerate((1, 2, 3, 5)):
        alone = measured(subject_on(root, mc_dropout=members, batch_size=16), **given) if members != 5 else found
        for name in ("accuracy", "nll", "ece"):
            np.testing.assert_allclose(found[f"size_{name}"][..., k], alone[name], rtol=1e-12)
            np.testing.assert_allclose(found[f"size_{name}_block"][:, :, k], alone[f"{name}_block"], rtol=1e-12)
        for name in ("mean_accuracy", "mean_nll", "mean_ece", "mce", "mcnll", "mcece"):
            for end in ("", "_se"):
                np.testing.assert_allclose(found[f"size_{name}{end}"][k], alone[f"{name}{end}"], rtol=1e-12)
    drawn = sizes.page([found], appearance.looks([found]))
    assert [ax.get_ylabel() for ax in drawn.axes] == ["mCNLL", "mCE", "mCECE"]
    plain = measured(subject_on(root, mc_dropout=2, batch_size=16), severities="5")
    drawn = sizes.page([found, plain], appearance.looks([found, plain]))
    assert [ax.get_ylabel() for ax in drawn.axes] == ["mean NLL (nats)", "mean error", "mean ECE"]
    assert "size" not in measured(subject_on(root)).dims


def digest(subject: Subject, **options: Any) -> str:
    return identity.digest(Corruption(**{**FEW, **options}), subject)


def test_a_replaced_file_of_the_same_size_is_another_source(root: Path) -> None:
    subject, path = subject_on(root, samples=30), root / "CIFAR-10-C/snow.npy"
    before, content = digest(subject), np.load(path)
    used = int(subset(CLASSES.astype(np.int64), 30)[7])
    content[4 * 40 + used, 5, 6, 1] ^= 1
    np.save(path, content)
    assert digest(subject) != before
    assert digest(subject) == digest(subject_on(root, samples=30))
    content[4 * 40 + used, 5, 6, 1] ^= 1
    content[2 * 40 + used] ^= 1  # severity 3, which is not measured
    content[4 * 40 + int(subset(CLASSES.astype(np.int64), None)[35])] ^= 1  # a sample that is not measured
    np.save(path, content)
    assert digest(subject) == before


PUBLISHED = "{},{},2.67,0.0,0.9,0.4952,0.77,0.0,0.8,0.34,0.59,1.0,0.43,0.76,0.73,0.24\n"


@pytest.mark.slow
@pytest.mark.parametrize("last", ["", ",-0.11"])  # without and with the signed ECE, as in the file of CIFAR-10
def test_a_published_table_of_corruptions_is_read_and_imported(tmp_path: Path, last: str) -> None:
    path, out = tmp_path / "cifar100_alexnet_dnn_corrupted.csv", tmp_path / "r.h5"
    line = PUBLISHED.replace("\n", f"{last}\n")
    path.write_text("".join(line.format(s, name) for s in (1, 2) for name in ("zoom_blur", "fog")))
    table = csv_files.corruption_table(path)
    assert (table.names, table.severities) == (("zoom_blur", "fog"), (1, 2))
    assert {name: float(values[1, 0]) for name, values in table.scores.items()} == {
        "accuracy": 0.4952, "nll": 2.67, "ece": 0.24,
    }  # fmt: skip
    (outcome,) = importing.import_file(path, out, reduce_of=reduce_of)
    assert (outcome.units, outcome.measured) == (4, 4)
    ((_, data),) = reader.find(out, probe="corruption")
    assert float(data["mean_accuracy"]) == pytest.approx(0.4952)
    assert np.isnan(data["mean_accuracy_se"])
    assert importing.import_file(path, out, reduce_of=reduce_of)[0].measured == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("corruption,severity,accuracy\nfog,6,0.5\n", "severity 6 in line 2, expected 1 to 5"),
        ("corruption,severity,accuracy\nfog,1,49.5\n", "accuracy 49.5 in line 2, expected a fraction"),
        ("corruption,severity,accuracy\nfog,1,0.5\nfog,1,0.5\n", "fog of severity 1 twice, in line 3"),
        ("corruption,severity,accuracy\nfog,1\n", "2 columns in line 2, expected 3"),
        ("corruption,severity,wrong\nfog,1,2\n", "none of the columns accuracy, nll, ece"),
        ("x,y\n1,2\n", "is no table of corruptions"),
        ("", "is no table of corruptions"),
    ],
)
def test_a_table_that_cannot_be_a_baseline_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "b.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        csv_files.corruption_table(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"severities": "0"}, "--severities must be 1 to 5, separated by commas, got 0"),
        ({"severities": "1,6"}, "--severities must be 1 to 5"),
        ({"corruptions": "gausian_noise"}, "did you mean gaussian_noise"),
        ({"corruptions": "fog,fog"}, "names a corruption twice"),
    ],
)
def test_unknown_corruptions_and_severities_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Corruption(**options)


@pytest.mark.slow
def test_files_that_do_not_fit_are_refused(root: Path) -> None:
    folder = root / "CIFAR-10-C"
    with pytest.raises(OptionError, match=r"--corruptions frost is not in .*CIFAR-10-C; it has fog, snow"):
        measured(subject_on(root), corruptions="frost", source=str(folder))
    with pytest.raises(OptionError, match=r"holds neither CORRUPTION\.npy files"):
        measured(subject_on(root), source=str(root / "cifar-10-batches-py"))
    labels = np.load(folder / "labels.npy")
    np.save(folder / "labels.npy", (labels + 1) % 10)
    with pytest.raises(ValueError, match="other classes than the 40 of cifar10"):
        measured(subject_on(root))
    np.save(folder / "labels.npy", labels[:-1])
    with pytest.raises(ValueError, match=r"fog.npy is uint8 \(200, 32, 32, 3\) and labels.npy \(199,\)"):
        measured(subject_on(root))


def test_a_missing_package_names_the_command_that_installs_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(ValueError, match=r"; pip install imagecorruptions-imaug, or give a folder"):
        measured(subject_on(root), source="generated")


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_pictures_of_imagenet_c_are_found_in_both_layouts(tmp_path: Path, nested: bool) -> None:
    clean, corrupted = tmp_path / "clean", tmp_path / "ImageNet-C" / ("weather" if nested else "")
    for label in range(2):
        for i in range(3):
            places = [clean, *(corrupted / "fog" / str(severity) for severity in (1, 5))]
            for step, place in enumerate(places):
                (place / f"n{label}").mkdir(parents=True, exist_ok=True)
                Image.fromarray(CLEAN[3 * label + i] + np.uint8(20 * step)).save(place / f"n{label}/{i}.png")
    torch.manual_seed(0)
    arguments = {"classes": 2, "image_size": 32, "blocks": (1, 1), "width": 8}
    subject = load(model="resnet_demo", model_arg=arguments, data=str(clean), device="cpu")
    found = measured(subject, corruptions="fog", source=str(tmp_path / "ImageNet-C"))
    there = load(model="resnet_demo", model_arg=arguments, data=str(corrupted / "fog/5"), device="cpu")
    there.model.load_state_dict(subject.model.state_dict())
    assert float(found["nll"][0, 1]) == pytest.approx(landscape.evaluate(there)["loss"], abs=1e-6)
    chosen = {"corruptions": "fog", "source": str(tmp_path / "ImageNet-C")}
    before, replaced = digest(subject, **chosen), corrupted / "fog/5/n1/2.png"
    replaced.write_bytes(replaced.read_bytes() + b"\0")
    assert digest(subject, **chosen) != before


@pytest.mark.slow  # the package takes three seconds to import
@LIBRARY
def test_generated_images_belong_to_seed_and_row_alone() -> None:
    images = torch.from_numpy(CLEAN[:3]).permute(0, 3, 1, 2)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    for name in ("gaussian_noise", "impulse_noise", "glass_blur", "frost", "brightness"):
        whole = corruptions.corrupted(images, name, 3, 0)
        assert whole.shape == images.shape
        assert not torch.equal(whole, images)
        assert torch.equal(corruptions.corrupted(images[2:], name, 3, 0, first=2), whole[2:])
        with ThreadPoolExecutor(2) as pool:
            parts = list(
                pool.map(lambda i, name=name: corruptions.corrupted(images[i : i + 1], name, 3, 0, first=i), range(3))
            )
        assert torch.equal(torch.cat(parts), whole)
        if name != "brightness":
            assert not torch.equal(corruptions.corrupted(images, name, 3, 1), whole)
    assert np.array_equal(state, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.slow
@LIBRARY
def test_every_corruption_is_made_at_any_small_size() -> None:
    for size in (16, 32):
        images = torch.from_numpy(CLEAN[:1]).permute(0, 3, 1, 2)[..., :size, :size].contiguous()
        for name in corruptions.SETS["all"]:
            for severity in (1, 5):
                assert corruptions.corrupted(images, name, severity, 0).shape == images.shape


@pytest.mark.slow
@LIBRARY
def test_kept_images_are_used_until_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LANDSCAPE_CACHE", str(tmp_path))
    images = torch.from_numpy(CLEAN[:3]).permute(0, 3, 1, 2)
    made = corruptions.kept(images, "fog", 2, 0)
    with monkeypatch.context() as patched:
        patched.setattr(corruptions, "corrupted", None)
        assert torch.equal(corruptions.kept(images, "fog", 2, 0), made)
    (file,) = (tmp_path / "corruptions").glob("*.uint8")
    file.write_bytes(bytes(made.numel()))
    assert torch.equal(corruptions.kept(images, "fog", 2, 0), made)
    assert "is damaged; these images are made again" in caplog.text
    assert file.read_bytes() == made.numpy().tobytes()
    file.unlink()
    os.mkfifo(file)  # which nobody writes to
    assert torch.equal(corruptions.kept(images, "fog", 2, 0), made)
    assert file.is_file()
    corruptions.kept(images, "fog", 2, 1)
    corruptions.kept(images[:2], "fog", 2, 0)
    assert len(list((tmp_path / "corruptions").glob("*.uint8"))) == 3


@pytest.mark.slow
@LIBRARY
def test_generated_corruptions_say_so_in_the_protocol(root: Path) -> None:
    found = measured(subject_on(root, samples=4), corruptions="brightness", severities="1", source="generated")
    assert "corruptions generated by imagecorruptions-imaug" in found.attrs["protocol"]
    assert "severities as for 224 px" in found.attrs["protocol"]
