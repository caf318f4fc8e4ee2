"""Recorded graphs in torch's interpreter, bit for bit as called operation by operation."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from landscape.products import matrix_products
from landscape.products.interpreted_graph import interpreted


def _everything(x: Tensor, y: Tensor) -> list[Tensor]:
    """Several results, lists of tensors and numbers, optional tensors, constants of every type, infinite ones too."""
    first, second = torch.split(x, 2, dim=1)
    values, places = torch.topk(y, 2, dim=-1)
    masked = torch.where(y > 0, y, float("-inf")).softmax(-1)
    picked = y[:, places[0]].to(torch.float64).to(memory_format=torch.contiguous_format)
    pooled = torch.nn.functional.avg_pool2d(x.view(1, 1, *x.shape), 2)
    joined = torch.cat([first.permute(1, 0), second.t()], dim=1).clone(memory_format=torch.preserve_format)
    return [joined, values, masked, picked, pooled, torch.zeros_like(x, dtype=torch.int64), x.std(correction=1)]


@pytest.fixture
def arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 4, generator=generator), torch.randn(3, 5, generator=generator)


def test_results_are_those_of_the_graph_bit_for_bit(arguments: tuple[Tensor, Tensor]) -> None:
    graph = make_fx(_everything)(*arguments)
    run = interpreted(graph)
    assert run is not graph
    found, expected = run(*arguments), graph(*arguments)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


def test_large_matrix_products_are_those_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    if not matrix_products._has_avx512():
        pytest.skip("oneDNN is not the faster library on this CPU")
    monkeypatch.setattr(matrix_products, "LARGE", 0)
    a, b = torch.randn(32, 24), torch.randn(40, 24).t()
    graph = make_fx(lambda a, b: [matrix_products.operator()(a, b)])(a, b)
    run = interpreted(graph)
    assert run is not graph
    assert torch.equal(run(a, b)[0], graph(a, b)[0])


def _foreign(x: Tensor) -> list[Tensor]:
    return [x + 1]


@pytest.mark.parametrize("change", ["module", "constant", "attribute"])
def test_a_graph_that_the_interpreter_cannot_run_stays_as_it_is(change: str) -> None:
    graph = make_fx(_foreign)(torch.ones(3))
    (node,) = (n for n in graph.graph.nodes if n.op == "call_function")
    if change == "module":
        node.target = len
    elif change == "constant":
        node.args = (node.args[0], object())
    else:
        graph.register_buffer("held", torch.ones(3))
        with graph.graph.inserting_before(node):
            node.args = (node.args[0], graph.graph.get_attr("held"))
    assert interpreted(graph) is graph


@pytest.mark.slow
def test_other_threads_run_during_a_call() -> None:
    def slow(x: Tensor) -> list[Tensor]:
        for _ in range(200):
            x = torch.sin(x)
        return [x]

    x = torch.linspace(0, 1, 300_000)
    run: Callable[..., Any] = interpreted(make_fx(slow)(x))
    thread, ticks = threading.Thread(target=run, args=(x,)), 0
    thread.start()
    while thread.is_alive():
        time.sleep(1e-3)
        ticks += 1
    assert ticks > 5
