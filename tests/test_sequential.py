"""Networks without skips: their layers, the tensors at their taps, removed units, and errors."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import run_probe
from foreign import Plain, torchvision_models
from torch import Tensor, nn

from landscape.api import configure_shared_pass
from landscape.cli.main import exit_code
from landscape.discovery.discover import discover
from landscape.discovery.layer import Layer
from landscape.layers.forward_hooks import feature_hooks
from landscape.layers.selection import remarks
from landscape.layers.unit_removal import removals, removed
from landscape.probes import FEATURES, probe_class
from landscape.probes.lesion import Lesion
from landscape.running.shared_pass import applicable
from landscape.subject.subject import Subject


class Stack(nn.Module):
    """Convolutions with norm and activation, poolings, a strided convolution, two linear layers: as VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 6, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(6, 5, 1), nn.GELU(),
        )  # fmt: skip
        self.average = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(5, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 4))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.average(self.features(images)))


class Flat(nn.Module):
    """Residual blocks of vectors: no map anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 16 * 16, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _subject(model: nn.Module) -> Subject:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(module.num_features)
    pairs = [(torch.randn(8, 3, 16, 16).double(), torch.arange(8) % 4) for _ in range(2)]
    return Subject(model.double().eval(), pairs)


def _rows(layers: list[Layer]) -> list[tuple[str, str, int, bool, tuple[int, int]]]:
    return [(layer.name, layer.kind, layer.stage, layer.reduces, layer.grid) for layer in layers]


def test_every_weight_and_pooling_but_the_classifier_is_a_layer() -> None:
    subject = _subject(Stack())
    layers = discover(subject.model, subject.batches[0][0])
    assert _rows(layers) == [
        ("features.0", "stem", 0, False, (16, 16)),
        ("features.3", "conv", 1, False, (16, 16)),
        ("features.6", "subsample", 2, True, (8, 8)),
        ("features.7", "conv", 3, True, (4, 4)),
        ("features.9", "mlp", 3, False, (4, 4)),
        ("classifier.1", "mlp", 3, False, (0, 0)),
    ]
    assert ["no residual blocks" in remark for remark in remarks(layers)] == [True]


def test_taps_deliver_the_tensor_after_norm_activation_and_dropout() -> None:
    subject = _subject(Stack())
    model, images = subject.model, subject.batches[0][0]
    layers = discover(model, images)
    found: dict[int, Tensor] = {}
    with torch.inference_mode():
        with feature_hooks(model, layers, lambda at, tensor: found.update({at: tensor.clone()})):
            model(images)
        for at, stop in enumerate((3, 6, 7, 9, 11)):
            torch.testing.assert_close(found[at], model.features[:stop](images))
        torch.testing.assert_close(found[5], model.classifier[:4](model.average(model.features(images))))


def test_outputs_of_functions_are_tapped_at_the_module_that_reads_them() -> None:
    model, images = Plain().eval(), torch.randn(2, 3, 16, 16)
    layers = discover(model, images)
    assert _rows(layers) == [
        ("first", "stem", 0, False, (16, 16)),
        ("second", "conv", 1, False, (16, 16)),
        ("pool", "subsample", 2, True, (8, 8)),
    ]
    assert [(layer.tap.module, layer.tap.side) for layer in layers[:2]] == [("second", "input"), ("pool", "input")]


@pytest.mark.slow
def test_vgg() -> None:
    vgg = torchvision_models().vgg11_bn(num_classes=5).eval()
    layers = discover(vgg, torch.randn(2, 3, 32, 32))
    assert [layer.kind for layer in layers].count("subsample") == 4  # the last leaves a single position
    assert [layer.name for layer in layers if layer.kind in ("stem", "conv")] == [
        f"features.{i}" for i in (0, 4, 8, 11, 15, 18, 22, 25)
    ]
    assert [layer.name for layer in layers if not layer.spatial] == ["classifier.0", "classifier.3"]


def test_lesions_bypass_layers_that_keep_the_shape_of_their_input() -> None:
    subject = _subject(Stack())
    model, images = subject.model, subject.batches[0][0]
    units = removals(model, discover(model, images))
    assert [unit.name for unit in units] == ["features.3", "features.7", "classifier.1"]
    assert units[0].rule == "3x3 conv bypassed by identity (3, 4, 5)"
    assert units[1].rule == "3x3 conv bypassed by 2x2 average pooling (7, 8)"
    assert units[2].rule == "linear layer bypassed by identity (1, 2, 3)"
    parts = list(model.features)
    without = [nn.Sequential(*parts[:3], *parts[6:]), nn.Sequential(*parts[:7], nn.AvgPool2d(2), *parts[9:])]
    with torch.inference_mode():
        for unit, features in zip(units, without, strict=False):
            with removed(model, unit):
                found = model(images)
            torch.testing.assert_close(found, model.classifier(model.average(features(images))))
    loss = run_probe(Lesion(), subject)["loss_increase"]
    assert np.isfinite(loss).all()
    assert (loss != 0).all()


class Dropping(nn.Module):
    """Convolutions with dropout as a function between them, as in networks for MC dropout; the last ReLU is one too."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.relus = nn.ModuleList(nn.ReLU() for _ in range(4))
        self.fc, self.rate = nn.Linear(4, 3), rate

    def forward(self, x: Tensor) -> Tensor:
        for i, (conv, relu) in enumerate(zip(self.convs, self.relus, strict=True)):
            x = relu(conv(x)) if i < 3 else conv(x).relu()
            x = F.dropout(x, self.rate, self.training) if self.rate else x
        return self.fc(x.mean((2, 3)))


def test_dropout_as_a_function_hides_no_unit_and_what_is_left_out_is_named(caplog: pytest.LogCaptureFixture) -> None:
    images = torch.randn(6, 4, 5, 5)
    units = [removals(model, discover(model, images)) for model in (Dropping(0.0).eval(), Dropping(0.3).eval())]
    assert [unit.name for unit in units[0]] == ["convs.0", "convs.1", "convs.2"]
    assert [(u.name, u.rule, u.bypassed) for u in units[1]] == [(u.name, u.rule, u.bypassed) for u in units[0]]
    caplog.set_level("INFO", "landscape")
    subject = Subject(Dropping(0.3).eval(), [(images, torch.arange(6) % 3)])
    assert Lesion().plan(subject).facts["left_out"] == "convs.3"
    assert "left out" in caplog.text


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (Flat, ["embed", "blocks.0", "blocks.1"]),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
         ["1", "3"]),
    ],
)  # fmt: skip
def test_without_maps_only_the_probes_that_need_them_are_left_out(build: type[nn.Module], names: list[str]) -> None:
    subject = _subject(build())
    assert [layer.name for layer in discover(subject.model, subject.batches[0][0])] == names
    fit, refused = applicable(configure_shared_pass([probe_class(name) for name in FEATURES], "", {})[0], subject)
    assert [probe.name for probe in fit] == ["similarity", "geometry"]
    assert "needs a vision network" in refused["fourier"]
    assert "needs a vision network" in refused["variance"]
    np.testing.assert_allclose(np.diag(run_probe(fit[0], subject)["cka"]), 1.0)
    assert np.isfinite(run_probe(Lesion(), subject)["loss_increase"]).all()


def test_blocks_of_vectors_are_removed_as_a_whole() -> None:
    subject = _subject(Flat())
    model, images = subject.model, subject.batches[0][0]
    first, _ = removals(model, discover(model, images))
    with torch.inference_mode():
        with removed(model, first):
            found = model(images)
        x = model.embed(images.flatten(1))
        torch.testing.assert_close(found, model.head(x + model.blocks[1](x)))


def test_networks_without_removable_units_or_layers_are_errors() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no unit of this network can be removed"):
        Lesion().plan(_subject(model))
    with pytest.raises(ValueError, match=r"no residual block, and no convolution or linear layer .* --layers REGEX"):
        discover(nn.Flatten(), torch.randn(2, 3, 4, 4))


@pytest.mark.slow
def test_the_command_prints_how_layers_were_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "from torch import nn\n"
        "def stack():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(),\n"
        "                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))\n"
    )
    command = ["features", "--model", f"{source}:stack", "--data", "digits", "--samples", "16", "--batch-size", "8"]
    assert exit_code([*command, "--out", str(tmp_path / "results.h5")]) == 0
    said = capsys.readouterr().err
    assert "note: this network has no residual blocks; its layers are" in said
    assert "note: attention is left out: no self-attention was found" in said
    assert said.count(f"in {tmp_path / 'results.h5'})") == 4


def test_a_norm_that_holds_its_activation_is_bypassed_with_its_convolution() -> None:
    class Normed(nn.BatchNorm2d):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(super().forward(x))  # type: ignore[no-any-return]

    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), Normed(4), nn.Conv2d(4, 4, 3, padding=1), Normed(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).eval()  # fmt: skip
    images = torch.randn(2, 3, 6, 6)
    (unit,) = removals(model, discover(model, images))
    assert [tap.module for tap in unit.bypassed] == ["2", "3"]
    with torch.no_grad(), removed(model, unit):
        torch.testing.assert_close(model(images), model[4:](model[:2](images)))
