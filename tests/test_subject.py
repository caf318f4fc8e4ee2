"""Subjects: the requested model, data and objective are loaded; parts that do not fit together are rejected."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from analytic import tanh_net
from measured_runs import save
from torch import Tensor, nn

from landscape.checkpoints.checkpoint import read_checkpoint, state_dict_sha256
from landscape.data.augment import Augmentation
from landscape.data.dataset import Batches
from landscape.data.recipes import RECIPES, at_size
from landscape.options import OptionError
from landscape.subject.loading.identity import identity
from landscape.subject.loading.load import load, load_spec
from landscape.subject.loading.sanity_check import check_sanity
from landscape.subject.losses import cross_entropy
from landscape.subject.other_samples import rebatched
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject, l2_of


class Wrapped(nn.Module):
    """A model that returns its logits in some wrapping."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.wrap = linear(), wrap

    def forward(self, inputs: Tensor) -> Any:
        return self.wrap(self.inner(inputs))


def linear(classes: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, classes))


def digits(model: nn.Module | Path | None = None, **options: Any) -> Subject:
    return load(linear() if model is None else model, **{"data": "digits", "samples": 20, **options})


def file(tmp_path: Path, code: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\nfrom torch import nn\n{code}\n")
    return str(path)


saved = partial(save, recipe={}, epoch=1.0)


# --- the objective ---


def test_the_objective_is_loss_plus_weight_decay_times_half_the_squared_norm() -> None:
    subject = digits(weight_decay=0.3, batch_size=8)
    weight, bias = subject.parameters.values()
    for i in range(3):
        inputs, targets = subject.batches[i]
        logits = inputs.double().flatten(1) @ weight.double().T + bias.double()
        data = (logits.logsumexp(dim=1) - logits[torch.arange(len(targets)), targets]).mean()
        half = (weight.double().square().sum() + bias.double().square().sum()) / 2
        assert subject.loss(i).item() == pytest.approx(data.item(), rel=1e-6)
        assert l2_of(subject).item() == pytest.approx(half.item(), rel=1e-6)
        assert subject.objective(i).item() == pytest.approx((data + 0.3 * half).item(), rel=1e-6)


def test_frozen_parameters_do_not_count_also_if_frozen_after_loading() -> None:
    model = linear()
    model[1].bias.requires_grad_(False)
    subject = digits(model)
    assert list(subject.parameters) == ["1.weight"]
    assert subject.size == 7680
    assert l2_of(subject).item() == pytest.approx(0.5 * model[1].weight.square().sum().item())
    subject = tanh_net()
    first = next(iter(subject.parameters))
    dict(subject.model.named_parameters())[first].requires_grad_(False)
    assert first not in subject.parameters


def test_the_loss_of_soft_targets_is_their_mixture_and_does_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    assert cross_entropy(logits, torch.tensor([1])).item() == 1e4
    shares = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    one, two = (cross_entropy(logits, torch.tensor([i])).item() for i in (0, 1))
    assert cross_entropy(logits, shares).item() == pytest.approx(0.25 * one + 0.75 * two)


NONE = r"returns no tensor and nothing named logits; wrap it"
SHAPE = r"the model returns .* for 2 samples, expected \(samples, classes\); .* --loss file.py:function"


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda z: {"scores": z}, NONE), (lambda z: ({"logits": z},), NONE),
        (lambda z: z.mean(), SHAPE), (lambda z: z[:1], SHAPE), (lambda z: z[:, :, None], SHAPE),
    ],
)  # fmt: skip
def test_outputs_that_are_no_logits_are_refused(wrap: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        digits(Wrapped(wrap))


def test_a_subject_is_shown_in_one_line_whatever_its_data() -> None:
    batches = [{"x": torch.rand(4, 2), "labels": torch.zeros(4, dtype=torch.long)} for _ in range(8)]
    assert repr(load(nn.Linear(2, 3), data=batches)) == "Subject(model, Linear, 9 parameters, the data in memory)"


# --- the samples ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("samples", value) for value in ("many", "0", -5, "0%", "inf%", "nan%", "1.5")), ("batch_size", 0),
        ("weight_decay", -0.1), ("weight_decay", math.nan), ("split", "val"), ("image_size", 0), ("device", "tpu"),
        ("device", "cuda:x"),
    ],
)  # fmt: skip
def test_a_value_out_of_its_range_is_a_usage_error(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"--{name.replace('_', '-')} must be .*, got {value}"):
        digits(**{name: value})


def test_a_batch_comes_in_the_models_precision() -> None:
    subject = digits(linear().double())
    inputs, targets = subject.batch(0)
    assert (inputs.dtype, targets.dtype, subject.loss(0).dtype) == (torch.float64, torch.int64, torch.float64)
    assert subject.loss(0).item() == pytest.approx(digits().loss(0).item(), rel=1e-5)
    assert digits(linear().half()).dtype == torch.float32  # half precision is for storage


# --- checkpoints and models ---


def test_a_checkpoint_of_ours_needs_no_option(tmp_path: Path) -> None:
    path = saved(tmp_path / "resnet-digits" / "final.pt")
    subject = load(path)
    stored = read_checkpoint(path)
    assert state_dict_sha256(subject.model.state_dict()) == state_dict_sha256(stored.state_dict)
    assert (subject.label, len(subject)) == ("resnet-digits", 360)
    assert subject.images.name == "digits"
    assert load(str(path), label="mine").label == "mine"


def test_a_bare_state_dict_goes_with_a_callable_in_a_file(tmp_path: Path) -> None:
    model = linear()
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "bare.pth")
    code = "def net(hidden=768): return nn.Sequential(nn.Flatten(), nn.Linear(hidden, 10))"
    options: dict[str, Any] = {"model": f"{file(tmp_path, code)}:net", "data": "digits", "samples": 20}
    subject = load(tmp_path / "bare.pth", **options)
    assert subject.loss(0).item() == digits(model).loss(0).item()
    assert subject.label == "bare"
    again = load_spec(subject.spec)
    assert identity(again, ()) == identity(subject, ())
    with pytest.raises(ValueError, match=r"1.weight is \(10, 768\) in the file and \(10, 700\) in the model"):
        load(tmp_path / "bare.pth", model_arg={"hidden": 700}, **options)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def net(): return 3", r"returned a int, expected a torch.nn.Module"),
        ("def net(): raise KeyError('width')", r"width"),
        ("def nett(): return 3", r"has no callable 'net'; it has nett"),
        ("def net(): return nn.Flatten()", r"no parameters"),
        ("def net(): return nn.Sequential(nn.Flatten(), nn.Linear(10, 10))", r"fails on inputs of shape \(3, 16, 16\)"),
        ("def net(): return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (768,)), nn.Embedding(3, 3))", r"fails on"),
    ],
)
def test_an_unusable_model_file_is_a_one_line_error(code: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(model=f"{file(tmp_path, code)}:net", data="digits", samples=4)
    assert "\n" not in str(caught.value)


def test_a_fresh_model_follows_its_seed_and_leaves_the_global_generator_alone() -> None:
    options: dict[str, Any] = {"model": "vit_demo", "data": "digits", "samples": 4}
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    digests = [state_dict_sha256(load(**options, seed=seed).model.state_dict()) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(3), wanted)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": linear(5)}, ValueError, r"the model has 5 classes and digits has 10; measure it on data"),
        ({"image_size": 8}, ValueError, r"fails on inputs of shape \(3, 8, 8\) from digits \(.+\); .*--image-size"),
        ({"batchsize": 3}, OptionError, r"unknown option batchsize; expected one of .*batch_size"),
        ({"device": "cuda"}, ValueError, r"--device cuda: this machine has 0 CUDA devices; use --device cpu or auto"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    if "device" in options and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(error, match=message):
        digits(**options)


def test_a_bare_state_dict_asks_for_its_architecture_and_data(tmp_path: Path) -> None:
    torch.save(linear().state_dict(), tmp_path / "bare.pth")
    with pytest.raises(ValueError, match=r"bare.pth holds weights only; name the architecture with --model"):
        load(tmp_path / "bare.pth", data="digits")
    with pytest.raises(ValueError, match=r"does not say what it was trained on; give --data"):
        load(tmp_path / "bare.pth", model="vit_demo")


def test_a_named_recipe_augments_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    path = saved(tmp_path / "final.pt")
    batches = load(path, augment=True, recipe="cifar-vit").batches
    assert isinstance(batches, Batches)
    pixels = batches.images.size
    assert batches.augmentation == Augmentation.of_recipe(dataclasses.asdict(at_size(RECIPES["cifar-vit"], pixels)))
    assert batches.augmentation != Augmentation.of_recipe(dataclasses.asdict(RECIPES["cifar-vit"]))  # 4 pixels of 32
    with pytest.raises(OptionError, match="--recipe cifar-vit says how images are augmented; add --augment"):
        load(path, recipe="cifar-vit")
    with pytest.raises(OptionError, match="--recipe cifar is unknown; expected one of cifar-"):
        load(path, augment=True, recipe="cifar")


def test_an_augmentation_is_drawn_once_per_seed(tmp_path: Path) -> None:
    path = saved(tmp_path / "final.pt", recipe={"crop": 2, "flip": True})
    one, same, other = (load(path, augment=True, samples=16, seed=seed).batches[0][0] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, load(path, samples=16).batches[0][0])


# --- the sanity check ---


def test_the_sanity_check_takes_fewer_large_images() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 128 * 128, 2))
    images, targets = torch.zeros(16, 3, 128, 128), torch.zeros(16, dtype=torch.long)
    assert check_sanity(Subject(model, [(images, targets)] * 6)).samples == 64


def test_the_sanity_check_is_loss_and_accuracy_of_the_first_batches() -> None:
    subject = digits(samples="all", batch_size=100)
    check = check_sanity(subject)
    assert check.samples == 300
    inputs, targets = (torch.cat(parts) for parts in zip(*subject.batches[:3], strict=True))
    with torch.no_grad():
        logits = subject.model(inputs).double()
    right = (logits.argmax(dim=1) == targets).double().mean()
    assert check.loss == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), rel=1e-6)
    assert check.accuracy == pytest.approx(right.item())
    assert check.at_chance


def test_a_model_of_nans_is_refused() -> None:
    model = linear()
    nn.init.constant_(model[1].weight, math.nan)
    with pytest.raises(ValueError, match=r"loss is nan on all of the first 20 samples; the weight 1.weight is not"):
        check_sanity(digits(model))


def test_rebatching_changes_only_the_batches() -> None:
    subject = load(model="vit_demo", data="digits", samples=20, batch_size=8)
    again = rebatched(subject, 5)
    assert [len(targets) for _, targets in again.batches] == [5, 5, 5, 5]
    assert again.spec == dataclasses.replace(subject.spec or Spec(), batch_size=5)
    assert identity(again, ()) == identity(subject, ())
    assert identity(again, ("batch_size",)) != identity(subject, ("batch_size",))
    assert rebatched(subject, 8) is subject


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.kept = []
    def forward(self, inputs):
        self.kept.append(inputs)
        return self.linear(act(inputs))
"""
BASE = "class Base(nn.Module):\n    def forward(self, inputs): return self.linear(torch.relu(inputs))\n"
DERIVED = NET.partition("    def forward")[0].replace("nn.Module", "Base")
LOSS = "def loss(outputs, targets, *, scale=1): return F.cross_entropy(outputs, targets, WEIGHT, reduction='none')\n"
OBJECT = """
class Loss:
    def __init__(self, weight): self.weight = weight
    def __call__(self, outputs, targets): return F.cross_entropy(outputs, targets, self.weight, reduction='none')
"""
CLOSURE = "def made(weight): return lambda o, t: F.cross_entropy(o, t, weight, reduction='none')\nloss = made(WEIGHT)\n"
CELLS = """import torch
from torch import nn
from torch.nn import functional as F
WEIGHT = torch.ones(2)
act = torch.relu
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "changed"),
    [
        (NET, NET.replace("act(", "torch.tanh(")),  # the class, defined anew
        (NET, "act = torch.tanh"),  # a function that it names
        ("def act(x): return x\n" + NET, "def act(x): return 2 * x"),
        (BASE + DERIVED, BASE.replace("relu", "tanh") + DERIVED),
        (LOSS, "WEIGHT = torch.tensor([1.0, 5.0])"),
        (LOSS, LOSS.replace("scale=1", "scale=2")),
        (CLOSURE, "loss = made(2 * WEIGHT)"),
        (OBJECT + "loss = Loss(WEIGHT)", "loss = Loss(2 * WEIGHT)"),
        ("loss = nn.CrossEntropyLoss(WEIGHT, reduction='none')", "loss = nn.CrossEntropyLoss(2 * WEIGHT)"),
    ],
)
def test_code_without_source_is_identified_by_everything_that_it_refers_to(cell: str, changed: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}  # as in a notebook, whose classes are in no file
    for part in (CELLS, NET, LOSS, cell):
        exec(part, names)

    def found() -> dict[str, Any]:
        torch.manual_seed(0)
        data = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 0, 1])
        return identity(load(names["Net"](), data=data, loss=names["loss"]), ())

    before = found()
    assert found() == before
    exec(cell, names)  # the same cell once more
    assert found() == before
    exec(changed, names)
    assert found() != before


def test_two_classes_of_one_name_in_one_file_are_two_models() -> None:
    def net(power: int) -> nn.Module:
        if power == 1:

            class Net(nn.Linear):
                def forward(self, inputs: Tensor) -> Tensor:
                    return super().forward(inputs)
        else:

            class Net(nn.Linear):  # type: ignore[no-redef]
                def forward(self, inputs: Tensor) -> Tensor:
                    return super().forward(inputs**2)

        torch.manual_seed(0)
        return Net(3, 2)

    data = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    assert identity(load(net(1), data=data), ()) == identity(load(net(1), data=data), ())
    assert identity(load(net(1), data=data), ()) != identity(load(net(2), data=data), ())
