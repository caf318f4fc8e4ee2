"""Dense prediction: a class per pixel, with pixels that have no label, in every probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from foreign import torchvision_models
from PIL import Image
from torch import Tensor, nn

from landscape import data
from landscape.api import measure
from landscape.predictions.evaluation import metrics_of
from landscape.predictions.scores import sample_scores
from landscape.statistics.calibration import summary
from landscape.subject.loading.load import load
from landscape.subject.subject import Subject

CLASSES, SIDE, IMAGES = 4, 8, 6


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


class Segmenter(nn.Module):
    """Two residual blocks at half the resolution; returns what torchvision's networks return."""

    def __init__(self, *, upsampled: bool = True, named: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.head = nn.Conv2d(6, CLASSES, 1)
        self.upsampled, self.named = upsampled, named

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.blocks(self.stem(x)))
        logits = F.interpolate(logits, x.shape[2:], mode="bilinear") if self.upsampled else logits
        return {"out": logits, "aux": logits[:, :1]} if self.named else logits


def samples(*, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(IMAGES, 3, SIDE, 10, generator=generator)
    targets = torch.randint(CLASSES, (IMAGES, SIDE, 10), generator=generator)
    targets[0, :6] = 255
    targets[1, :, :3] = -100
    return inputs, targets


def segmenter(**options: Any) -> Segmenter:
    torch.manual_seed(0)
    return Segmenter(**options).eval()


def subject_of(data: tuple[Tensor, Tensor] | None = None, **options: Any) -> Subject:
    return load(segmenter(), data=data or samples(), batch_size=4, **options)


def losses_by_hand(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over labelled pixels per image, by torch's own loss."""
    targets = targets.masked_fill(targets == 255, -100)
    return torch.stack([F.cross_entropy(model(x[None])["out"], y[None]) for x, y in zip(inputs, targets, strict=True)])


def test_the_loss_of_an_image_is_the_mean_over_its_labelled_pixels() -> None:
    subject, (inputs, targets) = subject_of(), samples()
    wanted = losses_by_hand(subject.model, inputs, targets).detach()
    found = metrics_of(subject)
    assert found["loss"] == pytest.approx(wanted.mean().item(), rel=1e-6)
    assert found["loss_se"] == pytest.approx(wanted.std().item() / IMAGES**0.5, rel=1e-5)
    predicted = subject.model(inputs)["out"].argmax(1)
    labelled = (targets >= 0) & (targets != 255)
    shares = torch.stack([(p == t)[m].double().mean() for p, t, m in zip(predicted, targets, labelled, strict=True)])
    assert found["accuracy"] == pytest.approx(shares.mean().item())
    assert subject.meaning.accuracy.startswith("share of an image's labelled pixels")


def test_the_mean_intersection_over_union_is_that_of_all_pixels_and_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    subject, (inputs, targets) = subject_of(), samples()
    labelled = (targets >= 0) & (targets != 255)
    predicted = subject.model(inputs)["out"].argmax(1)[labelled]
    wanted = metrics.jaccard_score(targets[labelled], predicted, average="macro")
    assert metrics_of(subject)["mean_iou"] == pytest.approx(wanted)


def test_the_ignored_class_is_an_option_and_part_of_the_data() -> None:
    inputs, targets = samples()
    moved = targets.masked_fill(targets == 255, 0)
    zero, other = subject_of((inputs, moved), ignore_index=0), subject_of((inputs, targets))
    assert (
        "class per pixel, 0 and negative targets ignored"
        in measure("line", zero, out=None, resolution=2, quiet=True).attrs["protocol"]
    )
    assert metrics_of(zero)["loss"] != metrics_of(other)["loss"]
    assert zero.data.sha256 != subject_of((inputs, moved), ignore_index=1).data.sha256
    with pytest.raises(
        ValueError, match="255, which stands for no label, is one of 256 classes; give --ignore-index -1"
    ):
        load(nn.Conv2d(3, 256, 1), data=(inputs, targets))


def test_images_without_a_labelled_pixel_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    inputs, targets = samples()
    targets[2] = 255
    subject = subject_of((inputs, targets))
    assert len(subject) == IMAGES - 1
    assert "1 of 6 images of data have no labelled pixel and are left out" in caplog.text.replace("in memory", "data")
    sized = [(inputs[:3], targets[:3]), (inputs[3:, :, :-2], targets[3:, :-2])]  # mini-batches that stay as they are
    found = subject_of(sized)  # type: ignore[arg-type]
    assert "1 of 6 images of in memory have no labelled pixel" in caplog.text.rpartition("note: ")[2]
    whole, rest = metrics_of(found), metrics_of(subject_of([(inputs[:2], targets[:2]), sized[1]]))  # type: ignore[arg-type]
    assert whole == rest
    with pytest.raises(ValueError, match=r"no pixel of the 6 targets .* is labelled: all are 255 or negative"):
        subject_of((inputs, torch.full_like(targets, 255)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "probe", ["surface", "line", "hessian", "trace", "density", "fourier", "variance", "lesion", "noise", "similarity"]
)
def test_every_probe_measures_a_dense_prediction(probe: str) -> None:
    options: dict[str, Any] = {
        "surface": {"resolution": 3}, "line": {"resolution": 3}, "hessian": {"top": 1}, "trace": {"vectors": 4},
        "density": {"vectors": 1, "steps": 3}, "noise": {"bands": "0.3,0.7"},
    }.get(probe, {})  # fmt: skip
    subject = subject_of()
    found = measure(probe, subject, out=None, quiet=True, **options)
    assert (found.done == 1).all()
    if probe in ("surface", "line"):
        losses = losses_by_hand(subject.model, *samples()).detach()
        centre = found.sel(x=0, y=0) if probe == "surface" else found.sel(t=0)
        assert centre.loss.values.item() == pytest.approx(losses.mean().item(), rel=1e-6)
        assert centre.loss_se.values.item() == pytest.approx(losses.std().item() / IMAGES**0.5, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")  # inside torch, at its first dual number
@pytest.mark.slow
@pytest.mark.parametrize(("hvp", "together"), [("double-backward", 0), ("traced", 0), ("traced", 2)])
def test_the_hessian_of_a_dense_prediction_is_that_of_the_loss_by_hand(
    hvp: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("landscape.products.hvp_backends.mini_batches_per_product", lambda *_: together)
    inputs, targets = samples()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, CLASSES, 1)).double()
    subject = load(model, data=(inputs.double(), targets), batch_size=4)
    found = measure("hessian", subject, out=None, top=1, tol=1e-4, hvp=hvp, kinks="single", quiet=True)
    parameters, ignored = list(model.parameters()), targets.masked_fill(targets == 255, -100)
    loss = torch.stack(
        [F.cross_entropy(model(x[None]), y[None]) for x, y in zip(inputs[:4].double(), ignored[:4], strict=True)]
    ).mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    every: dict[str, Any] = {"is_grads_batched": True, "materialize_grads": True, "allow_unused": True}
    rows = torch.autograd.grad(gradient, parameters, torch.eye(len(gradient)).to(gradient), **every)
    values = torch.linalg.eigvalsh(torch.cat([part.flatten(1) for part in rows], dim=1))
    largest = values[values.abs().argmax()].item()
    assert found.eigenvalue[0, 0].item() == pytest.approx(largest, rel=1e-3)


def test_what_does_not_fit_is_named_with_what_to_do() -> None:
    inputs, targets = samples()
    cases: list[tuple[nn.Module, Tensor, str]] = [
        (
            segmenter(upsampled=False),
            targets,
            r'let the model do it: F.interpolate\(logits, \(8, 10\), mode="bilinear"\)',
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(240, 3)), targets, "a class per pixel needs logits"),
        (segmenter(), targets.float(), r"return targets.long\(\), or give --loss mse"),
        (segmenter(), targets[:, 0, 0].clamp(0, 3), r"do not fit one class per image"),
        (segmenter(), torch.full_like(targets, 9), "the model has 4 classes and the data in memory has 10"),
    ]
    for model, wanted, message in cases:
        with pytest.raises(ValueError, match=message):
            load(model, data=(inputs, wanted))


def test_a_linear_probe_says_that_it_needs_one_class_per_image() -> None:
    with pytest.raises(
        ValueError, match="needs one class per sample, got several targets; measure it on data with a class"
    ):
        measure("probe-linear", subject_of(), out=None, quiet=True)


def test_forms_of_masks_and_of_logits_are_the_same_data_and_model() -> None:
    inputs, targets = samples()
    targets = targets.masked_fill(targets < 0, 255)
    wanted = metrics_of(subject_of((inputs, targets)))
    for form in (targets[:, None], targets.to(torch.uint8)):
        assert metrics_of(subject_of((inputs, form))) == wanted
    named, plain = (load(segmenter(named=named), data=samples()) for named in (True, False))
    assert metrics_of(named) == metrics_of(plain)
    assert np.isfinite(cast(float, metrics_of(plain)["ece_se"]))


def test_scores_of_single_classes_equal_those_of_a_classifier() -> None:
    from landscape.predictions.evaluation import evaluate

    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(5, 7).double(), torch.randn(40, 5).double() * 3, torch.randint(7, (40,))
    wanted = evaluate(model, [(inputs, targets)])
    logs = model(inputs).log_softmax(1).detach()
    found = summary(sample_scores(logs[:, None], targets[:, None]))  # a row per sample
    for name, key in (("nll", "loss"), ("accuracy", "accuracy"), ("top5", "top5"), ("brier", "brier"), ("ece", "ece")):
        assert found[name] == pytest.approx(wanted[key]), name
    assert found["frequency_90"] == pytest.approx((logs.exp().amax(1) > 0.9).double().mean().item())


def folder_of(root: Path, count: int = 5, *, without: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Pictures 8 to 12 of 10 x 8 pixels, as palette masks; one of them has none."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 8, 10, 3), dtype=np.uint8)
    masks = generator.integers(0, 4, (count, 8, 10), dtype=np.uint8)
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for i in range(count):
        Image.fromarray(pixels[i]).save(root / "images" / f"frame{8 + i}.png")
        mask = Image.fromarray(masks[i]).convert("P")
        mask.putdata(masks[i].flatten().tolist())
        if i != without:
            mask.save(root / "masks" / f"frame{8 + i}.png")
    masks[without] = 255
    return pixels, masks


def test_folders_of_pictures_and_masks_are_read_as_they_are(tmp_path: Path) -> None:
    pixels, masks = folder_of(tmp_path)
    ordered = data.load(str(tmp_path), ordered=True)
    np.testing.assert_array_equal(ordered.inputs.numpy(), pixels.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(ordered.targets.numpy(), masks)
    every = data.load(str(tmp_path))
    assert len(every) == 4  # the picture without a mask is for streams only
    np.save(tmp_path / "labels.npy", np.arange(5))
    for file in (tmp_path / "masks").iterdir():
        file.unlink()
    (tmp_path / "masks").rmdir()
    labelled = data.load(str(tmp_path), ordered=True)
    assert (labelled.targets.tolist(), labelled.classes) == ([0, 1, 2, 3, 4], 5)


def test_folders_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder_of(tmp_path / "a")
    Image.new("L", (9, 8)).save(tmp_path / "a" / "masks" / "frame8.png")
    with pytest.raises(ValueError, match=r"frame8.png is 9 x 8, its picture 10 x 8"):
        data.load(str(tmp_path / "a"))
    Image.new("RGB", (10, 8)).save(tmp_path / "a" / "masks" / "frame8.png")
    with pytest.raises(ValueError, match="a picture of mode RGB, expected one class number per pixel"):
        data.load(str(tmp_path / "a"))
    Image.new("RGB", (10, 9)).save(tmp_path / "a" / "images" / "frame9.png")
    with pytest.raises(ValueError, match=r"frame9.png is 10 x 9, frame8.png 10 x 8; make all of one size"):
        data.load(str(tmp_path / "a"), ordered=True)
    folder_of(tmp_path / "b")
    (tmp_path / "b" / "masks").rename(tmp_path / "b" / "gone")
    np.save(tmp_path / "b" / "labels.npy", np.arange(4))
    with pytest.raises(ValueError, match=r"labels.npy holds int64 \(4,\) for 5 pictures; expected class numbers"):
        data.load(str(tmp_path / "b"))


@pytest.mark.slow
def test_a_segmentation_network_of_torchvision_is_measured() -> None:
    torch.manual_seed(0)
    make = torchvision_models().segmentation.lraspp_mobilenet_v3_large
    model = make(weights=None, weights_backbone=None, num_classes=CLASSES).eval()
    inputs, targets = torch.randn(3, 3, 64, 64), torch.randint(CLASSES, (3, 64, 64))
    targets[0, :9] = 255
    subject = load(model, data=(inputs, targets), batch_size=3)
    wanted = losses_by_hand(model, inputs, targets).detach()
    found = measure("line", subject, out=None, resolution=3, quiet=True).sel(t=0)
    assert found.loss.values.item() == pytest.approx(wanted.mean().item(), rel=1e-5)
    for probe, options in (("noise", {"bands": "0.5"}), ("fourier", {}), ("variance", {})):
        assert (measure(probe, subject, out=None, quiet=True, **options).done == 1).all()
