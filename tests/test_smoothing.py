"""Smoothing blocks inserted into trained networks equal built-in ones, keep names, and are layers of the stream."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from analytic import random_batch, rebatched, state
from command_line import Command
from torch import Tensor, nn
from torch.func import functional_call
from zoo import ZOO

import landscape
from landscape import models
from landscape.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from landscape.discovery.discover import discover
from landscape.models.blocks import Smoothing
from landscape.options import OptionError
from landscape.plots import drawing
from landscape.results import reader
from landscape.studies import kinds
from landscape.subject.loading.identity import identity, protocol
from landscape.subject.loading.smoothing import insert, inserted
from landscape.subject.spec import SmoothingOptions, smoothing_of

pytestmark = pytest.mark.slow

SAME = SmoothingOptions()
EXAMPLE = torch.linspace(-2, 2, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)


def network(name: str = "resnet_demo", **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, classes=4, image_size=16, **arguments).eval()


class PublishedBlur(nn.Module):
    """The block of the published code: its average pads zeros and so adds a row and a column."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh, self.relu, self.blur = nn.Tanh(), nn.ReLU(), nn.AvgPool2d(2, stride=1, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blur(self.relu(10 * self.tanh(x / 10)))
        return y


def published(name: str = "resnet_demo") -> nn.Module:
    model = network(name, smoothing=True)
    for stage in model.children():
        if isinstance(stage, nn.Sequential):
            stage[-1] = PublishedBlur()
    return model


@pytest.mark.parametrize("name", ["resnet_demo", "preresnet_demo", "alternet_demo"])
def test_inserted_blocks_equal_those_that_the_model_builds(name: str) -> None:
    plain, built = network(name), network(name, smoothing=True)
    weights = state(plain)
    assert insert(plain, SAME, EXAMPLE) == ("layer1", "layer2", "layer3")
    built.load_state_dict(plain.state_dict())
    assert torch.equal(plain(EXAMPLE), built(EXAMPLE))
    assert state(plain).keys() == weights.keys()  # names and order of the weights are as before
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in network(name).named_parameters()]
    assert [(layer.kind, layer.stage, layer.grid) for layer in discover(plain, EXAMPLE)] == [
        (layer.kind, layer.stage, layer.grid) for layer in discover(built, EXAMPLE)
    ]


def test_growing_blocks_equal_the_published_ones_and_all_layers_are_found() -> None:
    plain, theirs = network(), published()
    theirs.load_state_dict(plain.state_dict())
    insert(plain, SmoothingOptions(padding="grow"), EXAMPLE)
    assert torch.equal(plain(EXAMPLE), theirs(EXAMPLE))
    for model in (plain, theirs):
        layers = discover(model, EXAMPLE)
        kinds = ["stem", *["conv", "conv", "smoothing"] * 3]
        assert [layer.kind for layer in layers] == kinds
        assert [layer.stage for layer in layers] == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert [layer.grid[0] for layer in layers] == [16, 16, 16, 17, 9, 9, 10, 5, 5, 6]
        assert [layer.reduces for layer in layers] == [i in (4, 7) for i in range(10)]


def test_a_filter_of_each_channel_is_a_smoothing_layer_too() -> None:
    class Filter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kernel = torch.tensor([[1.0, 2, 1]]) * torch.tensor([[1.0], [2], [1]]) / 16
            return F.conv2d(F.pad(x, (1, 1, 1, 1)), kernel.expand(x.shape[1], 1, 3, 3), groups=x.shape[1])

    model = network(smoothing=True)
    model.get_submodule("layer2")[-1] = Filter()
    layers = discover(model, EXAMPLE)
    assert [layer.kind for layer in layers] == ["stem", *["conv", "conv", "smoothing"] * 3]
    assert layers[6].name == "layer2.2"


class Stages(nn.Module):
    """Stages that are neither called in sequence nor return a tensor alone."""

    class Stage(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.smoothing = 0.1  # a name that an inserted block may not take
            self.reduce = nn.Conv2d(inputs, outputs, 3, stride, 1)
            self.conv = nn.Conv2d(outputs, outputs, 3, 1, 1)

        def forward(self, x: Tensor, *, twice: bool = False) -> tuple[Tensor, int]:
            x = self.reduce(x)
            return x + self.conv(x).tanh() * (1 + twice), 3

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([self.Stage(3, 4, 1), self.Stage(4, 6, 2)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x, _ = stage(x, twice=True)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def test_a_module_that_is_no_sequence_returns_its_first_tensor_smoothed() -> None:
    torch.manual_seed(0)
    model = Stages().eval()
    plain = copy.deepcopy(model)
    assert insert(model, SAME, EXAMPLE) == ("stages.0", "stages.1")
    x, block = EXAMPLE, Smoothing()
    for stage in plain.stages:
        x = block(stage(x, twice=True)[0])
    expected = plain.head(x.mean((2, 3)))
    assert torch.equal(model(EXAMPLE), expected)
    weights = dict(model.named_parameters())
    assert weights.keys() == dict(plain.named_parameters()).keys()
    assert torch.equal(functional_call(model, weights, (EXAMPLE,)), expected)
    traced = torch.fx.experimental.proxy_tensor.make_fx(model)(EXAMPLE)
    assert torch.allclose(traced(EXAMPLE), expected)
    assert torch.equal(copy.deepcopy(model)(EXAMPLE), expected)
    assert type(model.stages[0]).__qualname__ == Stages.Stage.__qualname__
    assert torch.equal(plain(EXAMPLE), Stages.forward(plain, EXAMPLE))  # the class itself is unchanged
    assert inserted(plain) == {}


def test_named_modules_of_a_plain_transformer_are_smoothed_but_for_their_class_token() -> None:
    torch.manual_seed(0)
    model = models.build("vit_demo", classes=4, image_size=16).eval()
    with pytest.raises(ValueError, match=r"\(ViT\) has no stages .* name modules with --smooth-at REGEX"):
        insert(model, SAME, EXAMPLE)
    name = next(layer.tap.module for layer in discover(model, EXAMPLE) if layer.kind == "mlp")
    insert(model, SmoothingOptions(at=f"^{name}$"), EXAMPLE)
    (block,) = inserted(model).values()
    tokens = torch.randn(2, block.prefix + block.grid[0] * block.grid[1], 6, generator=torch.Generator().manual_seed(1))
    smooth = block(tokens)
    assert torch.equal(smooth[:, : block.prefix], tokens[:, : block.prefix])
    maps = tokens[:, block.prefix :].transpose(1, 2).reshape(2, 6, *block.grid)
    assert torch.equal(smooth[:, block.prefix :], Smoothing()(maps).flatten(2).transpose(1, 2))


def test_what_cannot_be_smoothed_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"stage 1 already ends in a smoothing block \(layer1.2\)"):
        insert(network(smoothing=True), SAME, EXAMPLE)
    with pytest.raises(ValueError, match="--smooth-at fc names fc, which returns 4, expected a map of positions"):
        insert(network(), SmoothingOptions(at="fc"), EXAMPLE)
    with pytest.raises(ValueError, match="--smooth-at nowhere matches no module of a forward pass; "):
        insert(network(), SmoothingOptions(at="nowhere"), EXAMPLE)
    with pytest.raises(ValueError, match=r"windows of 4 do not tile .* padding=same keeps the size"):
        insert(network("alternet_demo"), SmoothingOptions(padding="grow"), EXAMPLE)
    for block in ("blur=0", "temperature=0", "temperature=a", "padding=zero", "activation=tanh", "side=2"):
        with pytest.raises(OptionError, match="--smooth-block"):
            smoothing_of(None, block, "")
    with pytest.raises(OptionError, match="--no-smooth contradicts"):
        landscape.load(network(), data=random_batch((3, 16, 16), 4, 4, seed=0), smooth=False, smooth_at="layer1")


def test_options_survive_their_text() -> None:
    for options in (SAME, SmoothingOptions(float("inf"), 3, "grow", "none"), SmoothingOptions(2.5, at="a,b")):
        assert smoothing_of(True, str(options), options.at) == options
    assert smoothing_of(None, "", "") is None
    assert smoothing_of(None, "", "", {"smooth": str(SAME), "smooth_at": ""}) == SAME
    assert smoothing_of(False, "", "", {"smooth": str(SAME)}) is None
    assert smoothing_of(True, "", "") == SAME


def test_a_callers_module_is_copied_and_follows_its_weights() -> None:
    model = network()
    batch = random_batch((3, 16, 16), 8, 4, seed=0)
    data = (batch[0].float(), batch[1])
    subject = landscape.load(model, data=data, smooth=True)
    assert not inserted(model)
    assert set(inserted(subject.model)) == {f"layer{i}.smoothing" for i in (1, 2, 3)}
    assert "smoothing at 3 places" in protocol(subject)
    before = landscape.measure("variance", subject, out=None, quiet=True)
    assert list(before["kind"].values) == ["stem", *["conv", "conv", "smoothing"] * 3]
    with torch.no_grad():
        model.conv1.weight.mul_(2.0)
    after = landscape.measure("variance", subject, out=None, quiet=True)
    assert not torch.allclose(torch.tensor(before["variance"].values[0]), torch.tensor(after["variance"].values[0]))


def test_smoothing_is_part_of_the_run_key() -> None:
    data = rebatched([random_batch((3, 16, 16), 8, 4, seed=0)], 8)[0]
    keys = []
    for options in ({}, {"smooth": True}, {"smooth_block": "blur=3"}, {"smooth_at": "layer2$"}):
        subject = landscape.load(network(), data=(data[0].float(), data[1]), **options)
        keys.append(repr(identity(subject, ()).get("smoothing")))
    assert keys[0] == "None"
    assert len(set(keys)) == 4


def test_a_checkpoint_trained_with_smoothing_is_loaded_with_it(tmp_path: Path, command: Command) -> None:
    code, _, _ = command(
        "train", "resnet_demo", "--data", "digits", "--epochs", "0", "--smooth-block", "blur=3", "--out", str(tmp_path)
    )  # fmt: skip
    assert code == 0
    path = tmp_path / "final.pt"
    stored = read_checkpoint(path)
    assert stored.recipe["smooth"] == "temperature=10,blur=3,padding=same,activation=relu"
    assert [module.blur for module in inserted(landscape.load(path, samples=8).model).values()] == [3, 3, 3]
    assert not inserted(landscape.load(path, samples=8, smooth=False).model)
    assert "smoothing" in command("layers", str(path))[1]
    about = {k: getattr(stored, k) for k in ("model", "model_args", "state_dict", "data", "epoch", "metrics", "seed")}
    recipe = {key: value for key, value in stored.recipe.items() if not key.startswith("smooth")}
    write_checkpoint(tmp_path / "plain.pt", recipe=recipe, **about)
    assert not inserted(landscape.load(tmp_path / "plain.pt", samples=8).model)


def test_the_study_pairs_networks_by_their_dropout_masks(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    ).eval()  # fmt: skip
    inputs, targets = random_batch((3, 8, 8), 40, 4, seed=0)
    path, found = tmp_path / "results.h5", {}
    for smooth in (False, True):
        for masks in (0, 3):
            subject = landscape.load(
                model, data=(3 * inputs.float(), targets), smooth=smooth, mc_dropout=masks, label="a"
            )
            found[masks, smooth] = landscape.measure("calibration", subject, out=path, quiet=True, draws=50)
    (study,) = kinds.smoothing(reader.groups(path))
    assert kinds.sizes(study) == [0, 3]
    for masks, row in zip((0, 3), kinds.smoothing_table(study), strict=True):
        without, smooth = (float(found[masks, key]["nll"]) for key in (False, True))
        assert without != smooth
        assert row["dropout masks"] == ("3" if masks else "no dropout")
        assert row["NLL"] == f"{without:.3f} → {smooth:.3f}"
        assert row["NLL difference"].startswith(f"{smooth - without:+.3f} [")
    (picture,) = drawing.draw_studies(path, tmp_path)
    assert picture.name == "smoothing.png"


@pytest.mark.campaign
def test_the_study_of_a_checkpoint_is_one_command(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "resnet_demo", "--data", "digits", "--epochs", "0"]
    assert command(*words, *(f"--model-arg={size}" for size in ("mc_dropout=0.2", "width=4", "blocks=1,1")))[0] == 0
    words = ["smoothing", "--samples", "16", "--batch-size", "8", "--sizes", "1,2", "--batches", "1"]
    code, out, err = command(*words)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["1", "2"]
    probes = {name.partition("/")[0] for name, _ in reader.groups(Path("results.h5"))}
    assert probes == {"calibration", "fourier", "uncertainty", "hessian"}
    assert len(list(reader.groups(Path("results.h5")))) == 2 * 5
    code, _, err = command("smoothing", "--sizes", "0,2")
    assert code == 2
    assert "--sizes must be at least 1, got 0" in err


@pytest.mark.slow  # imports torchvision and transformers
@pytest.mark.parametrize(
    ("name", "stages"), [("torchvision convnext", 2), ("torchvision swin", 2), ("transformers resnet", 2)]
)
def test_stages_of_other_libraries_end_in_a_layer_each(name: str, stages: int) -> None:
    build, size = ZOO[name]
    model, example = build().eval(), torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    before = [(layer.name, layer.stage) for layer in discover(model, example)]
    weights = list(model.state_dict())
    assert len(insert(model, SAME, example)) == stages
    after = discover(model, example)
    assert [layer.stage for layer in after if layer.kind == "smoothing"] == list(range(1, stages + 1))
    assert [(layer.name, layer.stage) for layer in after if layer.kind != "smoothing"] == before
    assert list(model.state_dict()) == weights
