"""A monitor measures what a full measurement does, leaves the training bit for bit as it is, and resumes with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_preconditioner import Foreign, soap
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import landscape
from landscape.options import OptionError
from landscape.plots.figures import monitor as monitor_figure
from landscape.results import reader
from landscape.results.protocols import samples_of

pytestmark = pytest.mark.slow

ALL: dict[str, Any] = {"overhead": math.inf}


def data(rows: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)


def network(*, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3)
    return nn.Sequential(*layers).to(dtype).train()


def train(
    model: nn.Module,
    steps: int,
    after: Callable[[], object] = lambda: None,
    before_backward: Callable[[], object] = lambda: None,
) -> torch.optim.Optimizer:
    """Momentum, dropout, batch norm, and gradients that are zeroed in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    inputs, targets = data()
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        rows = torch.randperm(len(inputs))[:16]
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(inputs[rows].to(dtype)), targets[rows])
        before_backward()
        loss.backward()
        optimizer.step()
        after()
    return optimizer


def dense(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of the mean loss in evaluation mode, by torch.func."""
    model.eval()
    names = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in names.values()]

    def loss(vector: Tensor) -> Tensor:
        parts = [v.view_as(p) for v, p in zip(vector.split(sizes), names.values(), strict=True)]
        outputs = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), batch[0].to(vector.dtype))
        return F.cross_entropy(outputs, batch[1])

    vector = torch.cat([p.reshape(-1) for p in names.values()])
    found = torch.func.grad(loss)(vector), torch.func.jacrev(torch.func.grad(loss))(vector)
    model.train()
    return found


def test_every_row_is_the_dense_hessian_gradient_and_distance_of_its_step(tmp_path: Path) -> None:
    model, batch = network(), data()
    begun = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    monitor = landscape.Monitor(model, F.cross_entropy, batch, every=2, out=tmp_path / "r.h5", top=2, tol=1e-6, **ALL)
    expected: list[tuple[Any, ...]] = []

    def note() -> None:
        if monitor.number % 2:
            return
        gradient, hessian = dense(model, batch)
        moved = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - begun
        expected.append((torch.linalg.eigvalsh(hessian).flip(0).numpy(), gradient.norm().item(), moved.norm()))

    note()
    train(model, 40, lambda: (monitor.step(), note()))
    found = monitor.data()
    assert found["step"].values.tolist() == list(range(0, 41, 2))
    assert found["converged"].values.all()
    for i, (spectrum, gradient, distance) in enumerate(expected):
        values = spectrum[:2]
        assert found["eigenvalue"].values[i] == pytest.approx(values, rel=1e-5), i
        assert found["gradient_norm"].values[i] == pytest.approx(gradient, rel=1e-9)
        off, estimated = np.abs(found["eigenvalue"].values[i] - values), found["error"].values[i]
        gaps = [np.abs(np.delete(spectrum, rank) - found["eigenvalue"].values[i, rank]).min() for rank in (0, 1)]
        assert (off <= found["residual"].values[i] ** 2 / gaps + 1e-9).all()  # Kato and Temple
        assert (off <= 2 * estimated + 1e-9).all()  # whose gap is that between Ritz values, which is larger
        assert found["distance"].values[i] == pytest.approx(float(distance), rel=1e-12, abs=0)
    checked = np.isfinite(found["warm_error"].values)
    assert np.flatnonzero(checked).tolist() == [20]
    assert np.abs(found["warm_error"].values[checked]).max() < 1e-5


def test_sparse_gradients_are_followed_as_the_dense_ones_that_they_are(tmp_path: Path) -> None:
    rows: list[dict[str, np.ndarray]] = []
    tokens, targets = torch.randint(7, (24, 3), generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = tmp_path / f"{sparse}.h5"
        monitor = landscape.Monitor(model, F.cross_entropy, (tokens, targets), out=out, every=2, **ALL)
        with monitor:
            for _ in range(4):
                optimizer.zero_grad()
                F.cross_entropy(model(tokens), targets).backward()
                optimizer.step()
                monitor.step()
        ((_, data),) = reader.groups(out)
        rows.append({name: data[name].values for name in ("loss", "gradient_norm", "distance", "eigenvalue")})
    for name, values in rows[0].items():
        np.testing.assert_allclose(values, rows[1][name], rtol=1e-9, err_msg=name)
        assert np.isfinite(values).any()


def test_the_largest_eigenvalue_is_that_of_landscape_hessian_on_the_same_batch(tmp_path: Path) -> None:
    model, batch = network(dtype=torch.float32), data()
    with landscape.Monitor(model, F.cross_entropy, batch, every=7, out=tmp_path / "r.h5", **ALL) as monitor:
        train(model, 7, monitor.step)
        subject = landscape.load(model, data=batch, batch_size=len(batch[1]))
        full = landscape.measure("hessian", subject, out=None, top=1, which="LA", quiet=True)
        assert monitor.data()["eigenvalue"].values[-1, 0] == pytest.approx(full["eigenvalue"].item(), rel=1e-2)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [
        *model.state_dict().values(),
        *(v for s in optimizer.state.values() for v in s.values() if v is not None),
    ]
    return [t.detach().numpy().tobytes() for t in (*tensors, *(p.grad for p in model.parameters()))] + [
        torch.get_rng_state().numpy().tobytes()
    ]


def test_training_is_bit_identical_with_and_without_a_monitor(tmp_path: Path) -> None:
    alone, watched = network(dtype=torch.float32), network(dtype=torch.float32)
    hooks: list[int] = []
    for model in (alone, watched):
        next(model.parameters()).register_hook(lambda g: hooks.append(1) or 2 * g)
    torch.manual_seed(1)
    expected = bits(alone, train(alone, 12))
    monitor = landscape.Monitor(watched, F.cross_entropy, data(), every=1, out=tmp_path / "r.h5", noise=3, **ALL)
    modes = [module.training for module in watched.modules()]
    torch.manual_seed(1)
    with torch.autocast("cpu", enabled=False):
        found = bits(watched, train(watched, 12, monitor.step, lambda: monitor.step(monitor.number + 1)))
    assert found == expected
    assert [module.training for module in watched.modules()] == modes
    assert len(hooks) == 24  # those of the training alone
    rows = monitor.data()
    assert rows.sizes["step"] == 25  # also between the forward and the backward pass
    assert np.isfinite(rows["eigenvalue"].values).all()


def test_autocast_and_inference_of_the_caller_do_not_reach_a_measurement(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    plain = landscape.Monitor(model, F.cross_entropy, data(), out=tmp_path / "a.h5").data()
    with torch.no_grad(), torch.autocast("cpu"):
        other = landscape.Monitor(model, F.cross_entropy, data(), out=tmp_path / "b.h5").data()
        assert torch.is_autocast_enabled("cpu")
    assert other["eigenvalue"].values == plain["eigenvalue"].values


@pytest.mark.parametrize("kind", ["sgd", "adam", "rmsprop"])
def test_what_the_optimiser_sees_is_the_dense_preconditioned_hessian(kind: str, tmp_path: Path) -> None:
    model, (inputs, targets) = network(), data()
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.25),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
    }[kind](model.parameters())
    how: dict[str, Any] = {"every": 1, "out": tmp_path / "r.h5", "optimizer": optimizer, "tol": 1e-8, **ALL}
    monitor = landscape.Monitor(model, F.cross_entropy, (inputs, targets), **how)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.double()), targets).backward()
        optimizer.step()
        monitor.step()
    found = monitor.data()
    states = [optimizer.state[p] for p in model.parameters()]
    _, hessian = dense(model, (inputs, targets))
    plain = torch.linalg.eigvalsh(hessian)[-1].item()
    assert found["eigenvalue"].values[-1, 0] == pytest.approx(plain, rel=1e-6)
    if kind == "sgd":
        diagonal, threshold = torch.ones(len(hessian)).double(), 3 / 0.1
        hessian = hessian + 0.25 * torch.eye(len(hessian))
        assert found["threshold"].values == pytest.approx(30 - 0.25)
    elif kind == "adam":
        second = torch.cat([s["exp_avg_sq"].reshape(-1) for s in states])
        diagonal, threshold = (1 - 0.8**3) * ((second / (1 - 0.9**3)).sqrt() + 1e-8), 3.6 / (0.2 * 0.01)
    else:
        diagonal, threshold = torch.cat([s["square_avg"].reshape(-1) for s in states]).sqrt() + 1e-3, 2 / 0.01
    root = diagonal.rsqrt()
    expected = torch.linalg.eigvalsh(root[:, None] * hessian * root)[-1].item()
    assert found["preconditioned"].values[-1, 0] == pytest.approx(expected, rel=1e-5)
    assert found["preconditioned_threshold"].values[-1] == pytest.approx(threshold)
    assert found["learning_rate"].values == pytest.approx(optimizer.param_groups[0]["lr"])
    if kind != "sgd":  # no state before the first update, and no threshold for the plain one
        assert np.isnan(found["preconditioned"].values[:, 0]).tolist() == [True, False, False, False]
        assert np.isnan(found["threshold"].values).all()


def test_optimisers_without_a_known_threshold_and_several_at_once_are_followed_and_the_page_says_so(
    tmp_path: Path,
) -> None:
    model = network(dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    both = torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-2)
    inputs, targets = data()
    how: dict[str, Any] = {"every": 1, "out": tmp_path / "r.h5", "optimizer": both, **ALL}
    monitor = landscape.Monitor(model, F.cross_entropy, (inputs, targets), **how)
    for _ in range(2):
        F.cross_entropy(model(inputs), targets).backward()
        for one in both:
            one.step()
        monitor.step()
    found = monitor.data()
    assert np.isfinite(found["eigenvalue"].values).all()
    assert np.isnan(found["preconditioned_threshold"].values).all()
    assert found.attrs["protocol"].endswith("optimiser Muon + AdamW (no threshold of Muon is known)")
    none = np.empty(0)
    assert monitor_figure._about_threshold([found], none, none, "").startswith("No threshold of Muon is")
    said = [monitor_figure._about_threshold([found], np.ones(1), np.array(some), "t") for some in ([2], [2, 1000])]
    assert said == ["Dashed: t.", "Dashed: t, where it is not far above."]  # else a line is missing without a word


def test_a_model_in_half_precision_is_followed_by_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, (inputs, targets) = network(dtype=torch.bfloat16), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    how: dict[str, Any] = {"every": 1, "out": tmp_path / "r.h5", "optimizer": optimizer, "tol": 1e-4, **ALL}
    monitor = landscape.Monitor(model, F.cross_entropy, (inputs, targets), **how)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.bfloat16()), targets).backward()
        optimizer.step()
        monitor.step()
    expected = torch.linalg.eigvalsh(dense(model.double(), (inputs, targets))[1])[-1].item()
    found = monitor.data()
    assert found["eigenvalue"].values[-1, 0] == pytest.approx(expected, rel=1e-3)
    assert np.isfinite(found["preconditioned"].values[1:]).all()


def test_the_protocol_says_what_is_known_of_the_batch_and_of_the_run(tmp_path: Path) -> None:
    model, batch = network(), "one mini-batch of 24 samples in evaluation mode"
    known: dict[str, Any] = {"every": 1, "data": "spirals train"}
    unknown: dict[str, Any] = {"every": 22, "optimizer": torch.optim.Adam(model.parameters()), **ALL}
    for given, words in (
        (known, f"spirals train, {batch}, every step, at most 2 % of the training time"),
        (unknown, f"{batch}, every 22nd step, optimiser Adam"),
    ):
        out = tmp_path / f"{given['every']}.h5"
        found = landscape.Monitor(model, F.cross_entropy, data(), out=out, **given).data()
        assert found.attrs["protocol"] == words
        assert found.attrs["data"] == given.get("data", "in memory")
        assert samples_of(found) == "24"  # of data in one part: no split


def test_only_updates_count(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # which leaves version counters alone
    monitor = landscape.Monitor(model, F.cross_entropy, data(), every=1, out=tmp_path / "r.h5", noise=0, **ALL)
    inputs, targets = data()
    for micro in range(12):  # three updates of four parts each
        (F.cross_entropy(model(inputs.double()), targets) / 4).backward()
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        monitor.step()
        monitor.step()  # twice in one step
    assert monitor.number == 3
    found = monitor.data()
    assert found["step"].values.tolist() == [0, 1, 2, 3]
    assert np.isnan(found["noise_scale"].values).all()
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0).step()  # of another model
    monitor.step()
    assert monitor.number == 3


def test_without_an_optimiser_of_pytorch_every_call_is_an_update(tmp_path: Path) -> None:
    model = network()
    monitor = landscape.Monitor(model, F.cross_entropy, data(), every=2, out=tmp_path / "r.h5", **ALL)
    for _ in range(4):
        for p in model.parameters():
            p.data.mul_(0.99)
        monitor.step()
    assert monitor.data()["step"].values.tolist() == [0, 2, 4]


def test_a_closure_optimiser_and_zero_gradients_are_followed(tmp_path: Path) -> None:
    model, (inputs, targets) = network(), data()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    monitor = landscape.Monitor(model, F.cross_entropy, (inputs, targets), every=1, out=tmp_path / "r.h5", **ALL)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.double()), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    monitor.step()
    for p in model.parameters():
        p.data.zero_()
    flat = torch.optim.SGD(model.parameters(), lr=0.1)
    flat.step()
    monitor.step()
    found = monitor.data()
    assert found["step"].values.tolist() == [0, 1, 2]
    zero = nn.Linear(6, 3).double()
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    balanced = (torch.randn(3, 6).repeat(3, 1), torch.arange(3).repeat_interleave(3))  # no gradient at zero weights
    row = landscape.Monitor(zero, F.cross_entropy, balanced, out=tmp_path / "zero.h5", noise=3).data().isel(step=0)
    assert row["gradient_norm"].item() == pytest.approx(0.0, abs=1e-12)
    assert row["eigenvalue"].values[0] > 0
    assert np.isnan(row["noise_scale"].item()) or row["gradient_squared"].item() > 0


def test_frozen_parameters_stay_out_and_other_ones_later_are_said_not_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    model[0].requires_grad_(False)
    monitor = landscape.Monitor(model, F.cross_entropy, data(), every=1, out=tmp_path / "r.h5", tol=1e-4, **ALL)
    _, hessian = dense(model, data())
    assert hessian.shape[0] < sum(p.numel() for p in model.parameters())
    expected = torch.linalg.eigvalsh(hessian)[-1].item()
    assert monitor.data()["eigenvalue"].values[0, 0] == pytest.approx(expected, rel=1e-3)
    model[0].requires_grad_(True)
    train(model, 5, monitor.step)
    assert monitor.data()["step"].values.tolist() == [0]
    said = [record.getMessage() for record in caplog.records if record.name.startswith("landscape.monitoring")]
    assert len(said) == 3
    assert "step 1 is not measured (6 tensors of the model are trainable, 4 were" in said[0]
    assert said[-1].endswith("the training goes on, without the monitor")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"loss": nn.CrossEntropyLoss(reduction="sum")},
            "the loss returns the sum over the mini-batch .* or divide by",
        ),
        ({"batch": None}, "Monitor needs batch="),
        ({"batch": data()[0]}, "the loss|the model"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"optimizer": "adam"}, "optimizer must be an optimiser of PyTorch, or a list of several, got str"),
        ({"other": (data()[0], data()[1] + 5)}, "other= cannot be measured .* classes of batch="),
        ({"overhead": 0.0}, "overhead must be above 0; math.inf leaves out no step, got 0"),
        ({"model": network().requires_grad_(False)}, "all parameters .* are frozen"),
        ({"model": lambda x: x}, "Monitor measures a module, got a function"),
        ({"other": (data()[0], data()[1] + 3)}, r"other= cannot be measured .*out of bounds.*the classes of batch="),
        ({"other": (data()[0][:, :4], data()[1])}, "other= cannot be measured with this model and loss"),
        ({"other": (data()[0][:0], data()[1][:0])}, "other= has no samples"),
        (
            {"loss": F.mse_loss, "batch": (data()[0], torch.ones(24, 3)), "other": (data()[0], torch.ones(24, 1))},
            "other= cannot be measured .* a target size",
        ),
        ({"optimizer": torch.optim.SGD(network().parameters(), lr=0.1)}, "SGD holds none of the 6 parameters"),
        ({"optimizer": [torch.optim.SGD(network().parameters()), "adam"]}, "optimizer must be an .* several, got list"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_cannot_be_measured_fails_in_one_line_before_the_training(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"model": network(), "loss": F.cross_entropy, "batch": data(), "out": tmp_path / "r.h5"}
    with pytest.raises((ValueError, OptionError), match=said) as error:
        landscape.Monitor(**{**given, **change})
    assert "\n" not in str(error.value)


def of_embedding(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0].abs().long().clamp(max=3)), batch[1])


def of_outputs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0].to(next(model.parameters()).dtype)), batch[1])


@pytest.mark.parametrize(
    "case", ["sparse gradients", "gradient scaling", "in no optimiser", "unused", "frozen", "SOAP"]
)
def test_unusual_trainings_are_followed_with_the_numbers_of_their_updates(case: str, tmp_path: Path) -> None:
    model: nn.Module = network(dtype=torch.float32)
    if case == "sparse gradients":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Flatten(), nn.Linear(18, 3))
    if case == "unused":
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    if case == "frozen":
        model[0].requires_grad_(False)
    moved = list(model[4].parameters() if case == "in no optimiser" else model.parameters())
    loss = of_embedding if case == "sparse gradients" else of_outputs
    optimizer: torch.optim.Optimizer = torch.optim.SGD(moved, lr=0.1)
    if case == "SOAP":
        optimizer = Foreign(moved, soap, betas=(0.9, 0.99), eps=1e-8)
    scaler = torch.amp.GradScaler("cpu", enabled=case == "gradient scaling", init_scale=1024.0)
    monitor = landscape.Monitor(
        model.eval(), loss, data(), every=1, out=tmp_path / "r.h5", optimizer=optimizer, noise=3, **ALL
    )
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        before = loss(model, data())
        scaler.scale(before).backward()
        weights = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        update = torch.cat([(p.detach() - w).flatten() for p, w in zip(model.parameters(), weights, strict=True)])
        monitor.step()
        expected.append((update.norm().item(), loss(model, data()).item(), loss(model, data()).item() - before.item()))
    found = monitor.data().isel(step=slice(1, None))
    for name, values in zip(("update_norm", "loss", "actual_change"), zip(*expected, strict=True), strict=True):
        assert found[name].values == pytest.approx(values, rel=1e-4, abs=1e-6), name
    assert np.isfinite(found["gradient_norm"].values).all()
    assert np.isfinite(found["eigenvalue"].values).all()


def test_replicas_are_unwrapped_and_shards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        replica = DistributedDataParallel(model)
        monitor = landscape.Monitor(replica, F.cross_entropy, data(), every=2, out=tmp_path / "r.h5", **ALL)
        train(replica, 4, monitor.step)
        assert monitor.data()["step"].values.tolist() == [0, 2, 4]
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        other = landscape.Monitor(replica, F.cross_entropy, data(), every=2, out=tmp_path / "other.h5", **ALL)
        train(replica, 4, other.step)
        assert other.number == 4
        assert not (tmp_path / "other.h5").exists()
        with pytest.raises(ValueError, match="only the process of rank 0 measures"):
            other.data()
    finally:
        dist.destroy_process_group()
    sharded = type("FullyShardedDataParallel", (nn.Sequential,), {})(*network())
    with pytest.raises(ValueError, match=r"is sharded by FSDP, which has no double backward"):
        landscape.Monitor(sharded, F.cross_entropy, data(), out=tmp_path / "s.h5")


def test_another_run_of_the_same_name_gets_a_number_and_overwrite_takes_its_place(tmp_path: Path) -> None:
    def run(steps: int, **options: Any) -> None:
        model = network()
        with landscape.Monitor(
            model, F.cross_entropy, data(), every=1, out=tmp_path / "r.h5", label="a", **ALL, **options
        ) as monitor:
            train(model, steps, monitor.step)

    def stored() -> dict[str, list[int]]:
        return {d.attrs["label"]: d["step"].values.tolist() for _, d in reader.groups(tmp_path / "r.h5")}

    run(2)
    run(1)
    assert stored() == {"a": [0, 1, 2], "a-2": [0, 1]}
    run(3, overwrite=True)
    assert stored() == {"a": [0, 1, 2], "a-2": [0, 1, 2, 3]}
    run(1, start=2)
    assert stored() == {"a": [0, 1, 2], "a-2": [0, 1, 2, 3]}
    run(0, start=1)
    assert stored() == {"a": [0, 1, 2], "a-2": [0, 1]}
