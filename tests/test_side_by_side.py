"""Mini-batches in threads side by side: the numbers of one after the other, in order, on no more CPUs than allowed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from test_members import stochastic
from torch import Tensor, nn

from landscape import api
from landscape.data import memory
from landscape.probes.hessian import Hessian
from landscape.products import micro_batches as module
from landscape.products.micro_batches import mini_batches_at_once, proceed, side_by_side
from landscape.subject import threads
from landscape.subject.loading.load import load
from landscape.subject.losses import LossTraits
from landscape.subject.mc_dropout import as_is
from landscape.subject.subject import Subject
from landscape.subject.threads import intra_op_threads, suitable_threads

# The warning is of torch's forward mode.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "_quota", lambda: 8)
    with intra_op_threads(3):
        yield


class KeepsItsFeatures(nn.Module):
    """A pass reads what the same pass has stored on the module, as of Grad-CAM's kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Conv2d(1, 4, 3))
        self.second = nn.Linear(64, 3)
        self.features = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.first(x)
        time.sleep(0.0005)  # another thread's turn, if it may have one
        return self.second(torch.relu(self.features).flatten(1))


def _subject(broken: bool = False) -> Subject:
    torch.manual_seed(0)
    x, y = torch.randn(24, 1, 6, 6), torch.randint(3, (24,))
    if broken:
        x[9] = torch.inf
    return load(KeepsItsFeatures(), data=(x, y), batch_size=4)


def _measured(probe: str, **options: Any) -> dict[str, np.ndarray]:
    subject = _subject(broken=options.pop("broken", False))
    result = api.measure(probe, subject, out=None, quiet=True, **options)
    return {str(name): values.to_numpy() for name, values in result.data_vars.items()}


@pytest.mark.parametrize(
    ("probe", "options"),
    [
        ("hessian", {"top": 2, "max_products": 12}),
        ("hessian", {"top": 2, "max_products": 12, "broken": True}),
        ("hessian", {"top": 2, "max_products": 12, "per_layer": True}),
        pytest.param("hessian", {"top": 2, "max_products": 12, "hvp": "traced"}, marks=pytest.mark.slow),
        ("trace", {"vectors": 4}),
        ("trace", {"vectors": 4, "tol": 0.3}),
    ],
)
def test_values_are_those_of_one_after_the_other_bit_for_bit(
    probe: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", logger="landscape"):
        together = _measured(probe, **options)
        assert "3 mini-batches at once, one thread each" in caplog.messages
        assert torch.get_num_threads() == 3
        caplog.clear()
        with intra_op_threads(1):
            alone = _measured(probe, **options)
        assert not [line for line in caplog.messages if "at once" in line]
    assert together.keys() == alone.keys()
    for name, values in alone.items():
        np.testing.assert_array_equal(together[name], values, err_msg=name)


def test_groups_run_at_the_same_time_with_one_thread_each_and_come_in_order() -> None:
    meeting, seen = threading.Barrier(2, timeout=20), set[int]()

    def measure(group: int) -> Iterator[int]:
        meeting.wait()  # breaks unless two are here at once
        seen.add(torch.get_num_threads())
        time.sleep(0.01 * (4 - group))
        yield from (10 * group, 10 * group + 1)

    with intra_op_threads(1):
        found = list(side_by_side(range(4), measure, 2, crowded=lambda: False))
    assert found == [0, 1, 10, 11, 20, 21, 30, 31]
    assert seen == {1}
    assert torch.get_num_threads() == 3


def test_groups_start_one_at_a_time_once_memory_was_short() -> None:
    running, most = 0, 0

    def measure(group: int) -> Iterator[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        yield group

    assert list(side_by_side(range(6), measure, 3, crowded=lambda: True)) == list(range(6))
    assert most == 1


def test_an_error_comes_after_the_groups_before_it() -> None:
    def measure(group: int) -> Iterator[int]:
        if group == 1:
            raise ValueError("the second")
        time.sleep(0.02)
        yield group

    results = side_by_side(range(3), measure, 3, crowded=lambda: False)
    assert next(results) == 0
    with pytest.raises(ValueError, match="the second"):
        next(results)


def test_threads_end_before_their_next_product_when_the_measurement_is_interrupted() -> None:
    products = []
    before = threading.active_count()

    def measure(group: int) -> Iterator[int]:
        yield group
        for _ in range(10_000):
            proceed()
            products.append(group)
            time.sleep(0.001)

    results = side_by_side(range(4), measure, 2, crowded=lambda: False)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert len(products) < 2_000


def test_a_product_is_the_place_where_an_interrupted_thread_ends() -> None:
    units = list(Hessian(top=2).plan(_subject()).units())
    before = set(threading.enumerate())  # other tests of this process may keep threads
    sweep = Hessian(top=2, max_products=200).sweep(_subject(), units)
    next(sweep)
    assert set(threading.enumerate()) > before
    sweep.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before
    assert torch.get_num_threads() == 3


def _at_once(subject: Subject, count: int = 6) -> int:
    with mini_batches_at_once(subject, count, vectors=10) as several:
        assert torch.get_num_threads() == (1 if several > 1 else torch.get_num_threads())
        return several


def test_as_many_at_once_as_threads_units_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = _subject()
    assert (_at_once(subject), _at_once(subject, 2), _at_once(subject, 1)) == (3, 2, 1)
    with suitable_threads(subject):  # a small network, whose operations have one thread
        assert _at_once(subject) == 3
    with intra_op_threads(1):
        assert _at_once(subject) == 1
    needed = module._memory(subject, 10)
    for mini_batches in (1, 2):
        monkeypatch.setattr(memory, "available", lambda n=mini_batches: int((n + 0.5) * needed / module.SHARE))
        assert _at_once(subject) == mini_batches


def test_a_large_network_with_few_mini_batches_keeps_the_threads_of_its_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "SMALL", 0)
    assert (_at_once(_subject(), 2), _at_once(_subject(), 3)) == (1, 3)


def test_what_threads_might_disturb_is_measured_one_after_the_other() -> None:
    subject = _subject()
    with torch.device("cpu"):  # a mode of the calling thread
        assert _at_once(subject) == 1
    subject.traits = LossTraits(needs_graph=True)
    assert _at_once(subject) == 1
    batches = [(torch.randn(4, 1, 6, 6), torch.randint(3, (4,))) for _ in range(6)]
    assert _at_once(Subject(KeepsItsFeatures().eval(), batches)) == 1


class DropPath(nn.Module):
    """Stochastic depth as a module, found by its name as that of timm is."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob = rate

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.slow
def test_members_run_in_threads_side_by_side() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh(), DropPath(0.5))]
    subject = stochastic(3, nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 3)))
    expected = [subject.loss(i) for i in (0, 1)]
    assert not torch.equal(expected[0], as_is(subject).loss(0))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: subject.loss(i % 2), range(40)))
    assert all(torch.equal(loss, expected[i % 2]) for i, loss in enumerate(found))
    assert not any(module._forward_hooks for module in subject.model.modules())
