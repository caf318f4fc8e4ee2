"""The state of an optimiser: read from every form of checkpoint, matched with a model, and its next update."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_preconditioner import proposed
from torch import Tensor, nn

import landscape
from landscape.checkpoints.optimizer_state import NoOptimizerState, class_names, read_optimizer_state
from landscape.data.recipes import recipe
from landscape.options import OptionError
from landscape.subject.loading.load import load
from landscape.subject.optimizers import (
    NO_UPDATE,
    OptimizerOptions,
    RestoredOptimizer,
    optimizer_identity,
    restored_optimizer,
)
from landscape.subject.subject import Subject
from landscape.training.train import train

MODEL = """
from torch import nn

def net(width=5):
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 3))

def matrices():
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))

def frozen():
    network = net()
    network[0].requires_grad_(False)
    return network
"""
Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "networks.py"
    file.write_text(MODEL)
    return str(file)


def _net(width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 3))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 4, generator=generator), torch.arange(12) % 3


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    inputs, targets = _data()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.optim.Optimizer:
    for _ in range(steps):
        for name, gradient in _gradients(model).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):  # before torch 2.7 the state does not tell which
        for group in optimizer.param_groups:
            group.setdefault("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return optimizer


def _file(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, entry: str = "optimizer") -> Path:
    torch.save({"state_dict": model.state_dict(), entry: optimizer.state_dict()}, path)
    return path


def _subject(path: Path, source: str, name: str = "net") -> Subject:
    return load(path, model=f"{source}:{name}", data=_data())


def _group(restored: RestoredOptimizer, name: str) -> dict[str, Any]:
    """The hyper-parameters of a parameter."""
    (found,) = (g for g in restored.optimizer.param_groups if any(p is restored.copies[name] for p in g["params"]))
    return found


def _require_next_update(subject: Subject, options: OptimizerOptions, model: nn.Module, real: Any) -> None:
    """The update of the restored optimiser is the difference that the real one's step makes, to single precision."""
    gradients = _gradients(model)
    found = restored_optimizer(subject, options).update(gradients)
    before = copy.deepcopy(model.state_dict())
    for name, p in model.named_parameters():
        p.grad = gradients.get(name)
    real.step()
    for name, p in model.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name].float(), p.detach() - before[name], rtol=1e-3, atol=3e-7)
        else:
            assert torch.equal(p, before[name])


@pytest.mark.parametrize("kind", [name for name in class_names() if name not in NO_UPDATE])
def test_every_optimiser_of_torch_makes_the_step_that_it_would_have_made(
    tmp_path: Path, source: str, kind: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    optimizer = _stepped(model, getattr(torch.optim, kind)(model.parameters(), lr=0.03))
    path = _file(tmp_path / "last.pt", model, optimizer)
    assert read_optimizer_state(path).kind == kind
    _require_next_update(_subject(path, source, "matrices"), OptimizerOptions(), model, optimizer)


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "dampening": 0.2, "maximize": True},
    ],
)
def test_momentum_and_weight_decay_are_those_of_the_state(tmp_path: Path, source: str, arguments: Any) -> None:
    model = _net()
    optimizer = _stepped(model, torch.optim.SGD(model.parameters(), lr=0.05, **arguments))
    path = _file(tmp_path / "last.pt", model, optimizer)
    _require_next_update(_subject(path, source), OptimizerOptions(), model, optimizer)


@pytest.mark.parametrize("entry", ["optimizer", "optimizer_state_dict", "optimizer_state", "optimizer_states"])
def test_the_state_is_found_in_each_kind_of_checkpoint(tmp_path: Path, source: str, entry: str) -> None:
    model = _net()
    optimizer = _stepped(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    path, state = tmp_path / "last.ckpt", optimizer.state_dict()
    torch.save({"state_dict": model.state_dict(), entry: [state] if entry.endswith("states") else state}, path)
    found = read_optimizer_state(path)
    assert found.taken == (f"{entry}[0]" if entry.endswith("states") else entry)
    assert found.steps == 3
    _require_next_update(_subject(path, source), OptimizerOptions(), model, optimizer)


@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.bin"])
def test_the_state_lies_beside_weights_of_safetensors(tmp_path: Path, source: str, name: str) -> None:
    from safetensors.torch import save_file

    model = _net()
    optimizer = _stepped(model, torch.optim.Adam(model.parameters(), lr=0.01))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / name)
    subject = _subject(tmp_path / "model.safetensors", source)
    assert restored_optimizer(subject, OptimizerOptions()).words.endswith(f"state after 3 updates from {name}")
    _require_next_update(subject, OptimizerOptions(), model, optimizer)


def _decayed(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.002},
    ]


def test_groups_are_matched_by_the_shapes_of_their_entries(tmp_path: Path, source: str) -> None:
    for order in (1, -1):
        model = _net()
        optimizer = _stepped(model, torch.optim.AdamW(_decayed(model)[::order], lr=0.01))
        path = _file(tmp_path / f"last{order}.pt", model, optimizer)
        restored = restored_optimizer(_subject(path, source), OptimizerOptions())
        assert _group(restored, "0.weight")["weight_decay"] == 0.3
        assert _group(restored, "0.bias")["weight_decay"] == 0.0
        assert restored.learning_rate == 0.01
        assert _group(restored, "1.weight")["lr"] == 0.002
        assert restored.optimizer.state[restored.copies["3.weight"]]["exp_avg"].shape == (3, 5)
        _require_next_update(_subject(path, source), OptimizerOptions(), model, optimizer)


def test_names_in_the_state_decide_where_shapes_cannot(tmp_path: Path, source: str) -> None:
    model = _net()
    named = list(model.named_parameters())
    mixed = [named[1::2], named[::2]]  # vectors of one shape in both groups
    rates = [{"params": [p for _, p in group], "lr": 0.01 * i} for i, group in enumerate(mixed, 1)]
    optimizer = _stepped(model, torch.optim.Adam(rates, lr=0.01))
    path = _file(tmp_path / "unnamed.pt", model, optimizer)
    # biases in the first group fit, and so does each vector in either
    assert _group(restored_optimizer(_subject(path, source), OptimizerOptions()), "1.weight")["lr"] == 0.02
    model = _net()
    mixed = [[named[1], named[0]], named[2:]]
    wrong = [{"params": [dict(model.named_parameters())[n] for n, _ in group]} for group in mixed]
    path = _file(tmp_path / "order.pt", model, _stepped(model, torch.optim.Adam(wrong, lr=0.01)))
    with pytest.raises(ValueError, match=r"2 groups of 2, 4 parameters, and the model fits them in no usual way; give"):
        restored_optimizer(_subject(path, source), OptimizerOptions())
    model = _net()
    own = dict(model.named_parameters())
    named_groups = [{"params": [(n, own[n]) for n, _ in group], "lr": 0.01 * i} for i, group in enumerate(mixed, 1)]
    optimizer = _stepped(model, torch.optim.Adam(named_groups, lr=0.01))
    path = _file(tmp_path / "named.pt", model, optimizer)
    _require_next_update(_subject(path, source), OptimizerOptions(), model, optimizer)


def test_parameters_without_entries_were_frozen_and_stay(tmp_path: Path, source: str) -> None:
    for parameters in ("all", "trainable"):
        model = _net()
        model[0].requires_grad_(False)
        given = [p for p in model.parameters() if parameters == "all" or p.requires_grad]
        optimizer = _stepped(model, torch.optim.Adam(given, lr=0.01))
        path = _file(tmp_path / f"{parameters}.pt", model, optimizer)
        frozen = _subject(path, source, "frozen")
        assert next(iter(restored_optimizer(frozen, OptimizerOptions()).parameters)) == "1.weight"
        _require_next_update(frozen, OptimizerOptions(), model, optimizer)
        if parameters == "all":  # a model that was built without freezing
            restored = restored_optimizer(_subject(path, source), OptimizerOptions())
            assert restored.left_out == ("0.weight", "0.bias")
            assert "0.weight" not in restored.parameters
        else:
            with pytest.raises(ValueError, match=r"is of 4 parameters \(4\), the model has 6; give the model that was"):
                restored_optimizer(_subject(path, source), OptimizerOptions())


def test_adam_of_an_old_torch_must_be_named_if_it_decays(tmp_path: Path, source: str) -> None:
    for decay, named in ((0.0, ""), (0.2, "adamw")):
        model = _net()
        optimizer = _stepped(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay))
        state = optimizer.state_dict()
        del state["param_groups"][0]["decoupled_weight_decay"]
        path = tmp_path / f"{decay}.pt"
        torch.save({"state_dict": model.state_dict(), "optimizer": state}, path)
        subject = _subject(path, source)
        if named:
            with pytest.raises(ValueError, match=r"does not tell its class by .*betas.*; name the class .* AdamW$"):
                restored_optimizer(subject, OptimizerOptions())
        _require_next_update(subject, OptimizerOptions(named), model, optimizer)


def test_arguments_replace_those_of_the_state(tmp_path: Path, source: str) -> None:
    model = _net()
    optimizer = _stepped(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    subject = _subject(_file(tmp_path / "last.pt", model, optimizer), source)
    plain, ten = (
        restored_optimizer(subject, OptimizerOptions(arguments=a)).update(_gradients(model)) for a in ((), ("lr=0.1",))
    )
    torch.testing.assert_close(ten["0.weight"], 10 * plain["0.weight"])
    ids = [optimizer_identity(subject, OptimizerOptions(arguments=a)) for a in ((), ("lr=0.1",))]
    assert ids[0] != ids[1]
    assert ids[0]["optimizer"] == "SGD"
    assert len(ids[0]["optimizer_state"]) == 64
    new = restored_optimizer(subject, OptimizerOptions("adamw", ("lr=0.1", "betas=0.5,0.9"), state=False))
    assert new.fresh
    assert new.words.startswith("AdamW(lr=0.1, betas=(0.5, 0.9)")
    assert new.words.endswith(", new")


def test_nothing_of_the_model_or_of_a_live_optimiser_changes() -> None:
    model = _net()
    optimizer = _stepped(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the method `step` of the optimiser
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    updates = proposed(optimizer, list(_gradients(model).values()))
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert not called
    assert all(bool(update.any()) for update in updates)


@pytest.mark.slow
def test_errors_say_what_would_be_needed(tmp_path: Path, source: str) -> None:
    model = _net()
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "bare.pt")
    bare = _subject(tmp_path / "bare.pt", source)
    with pytest.raises(
        NoOptimizerState, match=r"bare.pt holds no optimiser state.*its keys: state_dict, epoch.*--snap"
    ):
        restored_optimizer(bare, OptimizerOptions())
    assert restored_optimizer(bare, OptimizerOptions("sgd", ("lr=0.5",))).fresh
    in_memory = landscape.load(model, data=_data())
    with pytest.raises(NoOptimizerState, match="was not loaded from a checkpoint, and has no optimiser state; save"):
        restored_optimizer(in_memory, OptimizerOptions())

    wide = _net(width=7)
    path = _file(tmp_path / "other.pt", model, _stepped(wide, torch.optim.Adam(wide.parameters())))
    with pytest.raises(ValueError, match=r"entries of shape \(7, 4\) where 0.weight of the model is \(5, 4\): it is"):
        restored_optimizer(_subject(path, source), OptimizerOptions())
    with pytest.raises(ValueError, match=r"is of Adam, not of SGD; drop --optimizer, or start a new one: --no-opt"):
        restored_optimizer(_subject(path, source), OptimizerOptions("sgd"))
    linear = nn.Linear(4, 3)
    path = _file(tmp_path / "fewer.pt", model, _stepped(linear, torch.optim.Adam(linear.parameters())))
    with pytest.raises(ValueError, match=r"is of 2 parameters \(2\), the model has 6; give the model that was trained"):
        restored_optimizer(_subject(path, source), OptimizerOptions())
    path = _file(tmp_path / "lbfgs.pt", model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"LBFGS evaluates the loss again and again within a step \(a closure\)"):
        restored_optimizer(_subject(path, source), OptimizerOptions())
    for value, message in (
        ([{"state": {}, "param_groups": [{"lr": 1.0, "params": [0]}]}] * 2, "the states of 2 optimisers under optim"),
        ({"weights": 3}, "a dict of weights under optimizer, expected torch's optimizer.state_dict"),
        ("adamw", "a str under optimizer, expected torch's"),
    ):
        torch.save({"state_dict": model.state_dict(), "optimizer": value}, tmp_path / "form.pt")
        with pytest.raises(ValueError, match=message):
            read_optimizer_state(tmp_path / "form.pt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("adamx",), "--optimizer must be Adafactor, .*; got adamx; did you mean Adam"),
        (("lbfgs",), "closure"),
        (("SparseAdam",), "sparse gradients alone"),
        (("sgd", ("beta=0.9",)), "SGD has no argument beta; it has dampening, lr"),
        (
            ("sgd", ("lr=-1",)),
            "--optimizer-arg must be arguments that SGD takes .Invalid learning rate: -1., got lr=-1",
        ),
        (("", (), False), "--no-optimizer-state needs a new optimiser"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        OptimizerOptions(*options)


def test_a_gradient_scaler_is_left_aside_with_a_note(
    tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = _net()
    optimizer = _stepped(model, torch.optim.Adam(model.parameters(), lr=0.01))
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    states = {"optimizer": optimizer.state_dict(), "scaler": scaler}
    torch.save({"state_dict": model.state_dict(), **states}, tmp_path / "amp.pt")
    with caplog.at_level(logging.INFO):
        _require_next_update(_subject(tmp_path / "amp.pt", source), OptimizerOptions(), model, optimizer)
    assert "the gradient scaler's state is not used" in caplog.text


class _Call:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_a_state_that_would_run_code_is_refused(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch.save({"param_groups": [{"lr": 1.0, "params": [0]}], "state": {0: _Call(touched)}}, tmp_path / "optimizer.pt")
    torch.save({"state_dict": _net().state_dict()}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"optimizer.pt would run code to load .*open"):
        read_optimizer_state(tmp_path / "weights.pt")
    assert not touched.exists()


@pytest.mark.slow
def test_snapshots_of_a_training_keep_the_state(tmp_path: Path) -> None:
    small = {"dim": 8, "depth": 2, "heads": 2}
    options = {"recipe": recipe("demo", epochs=2, batch_size=256), "model_args": small, "fraction": 0.4}
    finals = [
        train("vit_demo", "digits", out=tmp_path / name, snapshot_optimizer=name == "kept", **options)  # type: ignore[arg-type]
        for name in ("kept", "bare")
    ]
    kept, bare = (torch.load(path, weights_only=True) for path in finals)
    assert list(kept) == [*bare, "optimizer"]
    assert all(torch.equal(kept["state_dict"][name], tensor) for name, tensor in bare["state_dict"].items())
    subject = load(finals[0])
    restored = restored_optimizer(subject, OptimizerOptions())
    assert list(restored.parameters) == list(subject.parameters)
    assert not restored.fresh
    assert restored.words.startswith("AdamW(")
    assert "updates from final.pt" in restored.words
    decays = {name: _group(restored, name)["weight_decay"] for name in restored.parameters}
    assert decays["head.weight"] == 0.05
    assert decays["head.bias"] == 0.0
    assert restored_optimizer(load(finals[0].with_name("init.pt")), OptimizerOptions()).fresh
    simclr = recipe("demo", objective="simclr")
    with pytest.raises(OptionError, match="--objective simclr stores its encoder alone"):
        train("vit_demo", "digits", recipe=simclr, out=tmp_path / "ssl", snapshot_optimizer=True)
