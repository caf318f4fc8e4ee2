"""Lesions against forward passes written out without the removed unit."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import batches_of, rebatched, run_probe, same_state, state
from foreign import Encoder, Squeeze, off_its_start, residual_stream, torchvision_models, vit_stream
from torch import Tensor, nn

from landscape import models
from landscape.discovery.discover import discover
from landscape.layers.unit_removal import Removal, removals, removed, stages
from landscape.models import preresnet, resnet
from landscape.models.preresnet import PreResNet
from landscape.models.resnet import ResNet
from landscape.options import OptionError
from landscape.probes.lesion import Lesion
from landscape.subject.sample_statistics import intact_per_sample, per_sample
from landscape.subject.subject import Subject


def _model(name: str, size: int = 8, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    return off_its_start(models.build(name, classes=3, image_size=size, **arguments), 0.05)


def _images(size: int = 8) -> Tensor:
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _units(model: nn.Module, images: Tensor) -> dict[str, Removal]:
    return {unit.name: unit for unit in removals(model, discover(model, images))}


def _without(model: nn.Module, unit: str, images: Tensor) -> Tensor:
    with torch.inference_mode(), removed(model, _units(model, images)[unit]):
        return model(images)


def _subject(name: str = "resnet_demo") -> Subject:
    return Subject(_model(name), batches_of((3, 8, 8), (6, 5), 3))


# Forward passes without one unit


Broken = Callable[[nn.Module, Tensor], Tensor]


def _basic(block: resnet.Block, x: Tensor) -> Tensor:
    return F.relu(x if block.downsample is None else block.downsample(x))


def _pooled(block: resnet.Block | preresnet.Block, x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2, ceil_mode=True) if block.conv2.stride[0] > 1 else x


def _bottleneck(block: resnet.Block, x: Tensor) -> Tensor:
    skip = x if block.downsample is None else block.downsample(x)
    return F.relu(skip + block.bn3(block.conv3(_pooled(block, F.relu(block.bn1(block.conv1(x)))))))


def _preactivated_bottleneck(block: preresnet.Block, x: Tensor) -> Tensor:
    active = F.relu(block.bn1(x))
    skip = x if block.downsample is None else block.downsample(active)
    return skip + block.conv3(F.relu(block.bn3(_pooled(block, block.conv1(active)))))


def _preactivated_basic(block: preresnet.Block, x: Tensor) -> Tensor:
    return x if block.downsample is None else block.downsample(F.relu(block.bn1(x)))


def _residual(model: ResNet | PreResNet, images: Tensor, where: str, broken: Broken) -> Tensor:
    *_, x = residual_stream(model, images, where, broken)
    if isinstance(model, PreResNet):
        x = model.relu(model.bn(x))
    return model.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("unit", [f"blocks.{i}.{branch}" for i in range(5) for branch in ("attention", "mlp")])
def test_a_vision_transformer_without_a_branch(unit: str) -> None:
    model, images = _model("vit_demo"), _images()
    with torch.inference_mode():
        *_, x = vit_stream(model, images, without=unit)
        expected = model.head(model.norm(x)[:, 0])
        torch.testing.assert_close(_without(model, unit, images), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize(
    ("name", "arguments", "unit", "broken"),
    [
        ("resnet_demo", {}, "", _basic),
        ("preresnet_demo", {}, "", _preactivated_basic),
        ("resnet50", {"blocks": (2, 2), "width": 8}, ".conv2", _bottleneck),
        ("resnet50", {"blocks": (2, 2), "width": 8, "groups": 4, "width_per_group": 16}, ".conv2", _bottleneck),
        ("preresnet50", {"blocks": (2, 2), "width": 8}, ".conv2", _preactivated_bottleneck),
    ],
)
def test_a_residual_network_without_a_unit_of_each_block(
    name: str, arguments: dict[str, Any], unit: str, broken: Broken, size: int
) -> None:
    model, images = _model(name, size, **arguments), _images(size)
    blocks = [f"{stage}.{i}" for stage in model.stages for i in range(2)]
    assert list(_units(model, images)) == [block + unit for block in blocks]
    with torch.inference_mode():
        for block in blocks:
            expected = _residual(model, images, block, broken)
            torch.testing.assert_close(_without(model, block + unit, images), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_encoder_layers_without_attention(norm_first: bool) -> None:
    torch.manual_seed(0)
    model, images = Encoder(norm_first=norm_first).double().eval(), _images(16)[..., :8]
    with torch.inference_mode():
        found = _without(model, "encoder.layers.1.self_attn", images)
        attention = model.encoder.layers[1].get_submodule("self_attn")
        attention.out_proj.weight.zero_()
        attention.out_proj.bias.zero_()
        torch.testing.assert_close(found, model(images), rtol=1e-10, atol=1e-12)


class Pairs(nn.Module):
    """Attention that returns (output, weights), added without a module in between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))


def test_attention_that_returns_a_pair_is_removed() -> None:
    torch.manual_seed(0)
    model, images = Pairs().double().eval(), _images()
    with torch.inference_mode():
        expected = model.head(model.norm(model.stem(images).flatten(2).transpose(1, 2)).mean(1))
        torch.testing.assert_close(_without(model, "attention", images), expected)


@pytest.mark.parametrize(("stride", "padding"), [(1, ()), (2, ()), (1, (1, 1, 1, 1)), (2, (0, 1, 0, 1))])
def test_squeeze_and_excitation_still_pools_when_the_convolution_before_it_is_bypassed(
    stride: int, padding: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, images = Squeeze(stride, padding).double().eval(), _images()
    with torch.inference_mode():
        found = _without(model, "depthwise", images)
        torch.testing.assert_close(found, model.classified(model.stem(images), bypass=True))
        assert not torch.allclose(found, model(images))


@pytest.mark.slow
def test_a_convolution_that_starts_its_branch_is_no_bottleneck() -> None:
    convnext = torchvision_models().convnext
    settings = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    model, images = convnext.ConvNeXt(settings, num_classes=3).double().eval(), _images(32)
    with torch.inference_mode():
        found = _without(model, "features.1.0.block", images)
        x = model.features[2:](model.features[0](images))
        torch.testing.assert_close(found, model.classifier(model.avgpool(x)))


def test_a_removed_branch_that_overflows_contributes_nothing() -> None:
    model, images = _model("vit_demo"), _images()
    with torch.inference_mode():
        model.get_submodule("blocks.0.mlp.3").get_parameter("bias").fill_(torch.inf)
        assert not model(images).isfinite().any()
        assert _without(model, "blocks.0.mlp", images).isfinite().all()


# The probe


def test_differences_are_paired_per_sample_and_positive_where_it_gets_worse() -> None:
    subject = _subject()
    found = run_probe(Lesion(), subject)
    loss, right = (values.numpy() for values in per_sample(subject))
    assert found["facts"] == {"intact_loss": pytest.approx(loss.mean()), "intact_accuracy": right.mean()}
    for i, unit in enumerate(_units(subject.model, subject.batch(0)[0]).values()):
        with removed(subject.model, unit):
            after, still = (values.numpy() for values in per_sample(subject))
        for name, difference in (("loss_increase", after - loss), ("accuracy_drop", right - still)):
            assert found[name][i] == pytest.approx(difference.mean(), abs=1e-14)
            assert found[f"{name}_se"][i] == pytest.approx(difference.std(ddof=1) / 11**0.5, abs=1e-14)


def test_units_are_labelled_with_their_module_and_rule() -> None:
    subject = Subject(_model("resnet50", blocks=(1, 1), width=8), batches_of((3, 8, 8), (4,), 3))
    found = run_probe(Lesion(), subject)
    assert found["name"].tolist() == ["layer1.0.conv2", "layer2.0.conv2"]
    assert found["kind"].tolist() == ["conv", "conv"]
    assert found["stage"].tolist() == [1, 2]
    assert found["reduces"].tolist() == [0, 1]
    assert found["depth"].tolist() == [0.5, 1.0]
    assert found["rule"].tolist() == [
        "3x3 conv bypassed by identity (conv2, bn2, relu2)",
        "3x3 conv bypassed by 2x2 average pooling (conv2, bn2, relu2)",
    ]


def test_layers_selects_units_by_name() -> None:
    subject = _subject()
    chosen = Lesion(layers=("layer2", r"^layer1\.0$")).plan(subject).labels["name"][1]
    assert chosen.tolist() == ["layer1.0", "layer2.0", "layer2.1"]
    with pytest.raises(ValueError, match=r"--layers attention matches no unit; .* layer1\.0"):
        Lesion(layers=("attention",)).plan(subject)
    with pytest.raises(OptionError, match="--layers"):
        Lesion(layers=("fine", "["))


def test_recalibrated_statistics_are_those_of_the_lesioned_network_and_are_restored() -> None:
    subject = _subject()
    kept = state(subject.model)
    found = run_probe(Lesion(bn="recalibrate:2", layers=(r"layer1\.1",)), subject)
    assert same_state(subject.model, kept)
    (unit,) = (unit for name, unit in _units(subject.model, subject.batch(0)[0]).items() if name == "layer1.1")
    loss, _ = intact_per_sample(subject)
    norms = [module for module in subject.model.modules() if isinstance(module, nn.BatchNorm2d)]
    with removed(subject.model, unit), torch.no_grad():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        for i in range(2):
            subject.model(subject.batch(i)[0])
        subject.model.eval()
        after, _ = per_sample(subject)
    assert found["loss_increase"] == pytest.approx([(after - loss).mean().item()], rel=1e-9)


@pytest.mark.slow
def test_numbers_do_not_depend_on_the_batch_size() -> None:
    subject = _subject()
    found = run_probe(Lesion(), subject)
    for size in (1, 4):
        other = run_probe(Lesion(), replace(subject, batches=rebatched(subject.batches, size)))
        for name in ("accuracy_drop", "loss_increase", "loss_increase_se"):
            np.testing.assert_allclose(found[name], other[name], rtol=1e-9, atol=1e-12)


# Neighbours and stages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_demo", "resnet_demo"])
def test_neighbours_and_stages_are_removed_together(name: str) -> None:
    subject = _subject(name)
    found = removals(subject.model, discover(subject.model, subject.batch(0)[0]))
    loss, right = (values.numpy() for values in intact_per_sample(subject))
    together = list(pairwise(found))
    staged = {unit.layer.stage: [u for u in found if u.layer.stage == unit.layer.stage] for unit in found}
    for probe, groups in ((Lesion(pairs=True), together), (Lesion(stages=True), list(staged.values()))):
        study = run_probe(probe, subject)
        assert len(study["name"]) == len(groups)
        for i, parts in enumerate(groups):
            with ExitStack() as stack:
                for part in parts:
                    stack.enter_context(removed(subject.model, part))
                after, still = (values.numpy() for values in per_sample(subject))
            assert study["loss_increase"][i] == pytest.approx((after - loss).mean(), rel=1e-9)
            assert study["accuracy_drop"][i] == pytest.approx((right - still).mean(), abs=1e-14)
            assert study["depth"][i] == pytest.approx(np.mean([part.layer.depth for part in parts]))


@pytest.mark.slow
def test_groups_are_named_after_their_units() -> None:
    def named(name: str, **arguments: Any) -> list[str]:
        labels: np.ndarray = Lesion(**arguments).plan(_subject(name)).labels["name"][1]
        return labels.tolist()  # type: ignore[no-any-return]

    assert named("resnet_demo", stages=True) == ["layer1", "layer2", "layer3"]
    assert named("vit_demo", stages=True) == ["blocks"]
    assert named("vit_demo", stages=True, layers=("attention",)) == ["blocks"]
    assert named("vit_demo", pairs=True, layers=("attention",))[0] == "blocks.0.attention + blocks.1.attention"
    assert len(named("resnet_demo", pairs=True)) == 5
    kinds = Lesion(pairs=True).plan(_subject("vit_demo")).labels["kind"][1]
    assert set(kinds.tolist()) == {"other"}  # attention and MLP together
    assert Lesion(stages=True).plan(_subject("resnet_demo")).labels["reduces"][1].tolist() == [0, 1, 1]


def test_stages_of_one_module_are_told_apart_by_number() -> None:
    units = list(_units(_model("resnet_demo"), _images()).values())
    renamed = [replace(unit, name=f"features.{i}") for i, unit in enumerate(units)]
    assert [group.layer.name for group in stages(renamed)] == ["stage 1", "stage 2", "stage 3"]


def test_impossible_groups_are_errors() -> None:
    with pytest.raises(OptionError, match="--pairs and --stages cannot be combined"):
        Lesion(pairs=True, stages=True)
    with pytest.raises(ValueError, match=r"--pairs needs two units, there is only layer1\.0"):
        Lesion(pairs=True, layers=(r"layer1\.0",)).plan(_subject())
