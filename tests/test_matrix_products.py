"""Matrix products by oneDNN are those of torch, called directly and in a recorded graph."""

import importlib.util
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from landscape.products import matrix_products
from landscape.products import matrix_products as module
from landscape.products.graph_passes import use_onednn
from landscape.products.interpreted_graph import interpreted
from landscape.products.matrix_products import LARGE, faster_by_onednn, matmul

SHAPE = (160, 128, 144)  # m, k, n


def _pair(m: int, k: int, n: int, *, transposed: tuple[bool, bool] = (False, False)) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    a = torch.randn(k, m).T if transposed[0] else torch.randn(m, k)
    b = torch.randn(n, k).T if transposed[1] else torch.randn(k, n)
    return a, b


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with AVX-512, wherever oneDNN is."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(module, "_has_avx512", lambda: True)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("transposed", list(product((False, True), repeat=2)))
def test_products_are_those_of_torch_in_any_layout(transposed: tuple[bool, bool]) -> None:
    a, b = _pair(*SHAPE, transposed=transposed)
    assert faster_by_onednn(a, b)
    torch.testing.assert_close(matmul(a, b).double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("wide")
def test_onednn_is_not_given_a_matrix_with_gaps_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _pair(*SHAPE)
    wide, tall = torch.cat([b, b], dim=1)[:, : b.shape[1]], torch.cat([b, b])[: len(b)].T.contiguous().T
    given: list[Tensor] = []

    def spy(a: Tensor, weight: Tensor, *others: Any) -> Tensor:
        given.append(weight)
        return a @ weight.T

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
    for layout in (b, b.T.contiguous().T, wide, torch.cat([b.T, b.T], dim=1)[:, : len(b)].T, tall):
        torch.testing.assert_close(matmul(a, layout), a @ b)
    assert len(given) == 5
    assert all(weight.is_contiguous() or weight.T.is_contiguous() for weight in given)


@pytest.mark.usefixtures("wide")
def test_small_and_double_matrices_and_a_processor_without_avx512_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _pair(*SHAPE)
    small = _pair(10, 10, (LARGE - 1) // 200)
    assert not faster_by_onednn(a.double(), b.double())
    assert not faster_by_onednn(*small)
    assert torch.equal(matmul(*small), small[0] @ small[1])
    assert torch.equal(matmul(a.double(), b.double()), a.double() @ b.double())
    monkeypatch.setattr(module, "_has_avx512", lambda: False)
    assert not faster_by_onednn(a, b)
    assert torch.equal(matmul(a, b), a @ b)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("transposed", list(product((False, True), repeat=2)))
@pytest.mark.parametrize("changing", [(), (0,), (1,), (0, 1)])
def test_a_recorded_graph_computes_the_same(transposed: tuple[bool, bool], changing: tuple[int, ...]) -> None:
    a, b = _pair(*SHAPE, transposed=transposed)
    bias, small = torch.randn(SHAPE[2]), torch.randn(SHAPE[2], 2)

    def function(a: Tensor, b: Tensor, small: Tensor) -> Tensor:
        return (torch.addmm(bias, a, b) + a @ b) @ small

    recorded = make_fx(function)(a, b, small)
    inputs = [node for node in recorded.graph.nodes if node.op == "placeholder"]
    use_onednn(recorded.graph, {inputs[i] for i in changing})
    recorded.recompile()

    targets = [node.target for node in recorded.graph.nodes]
    assert targets.count(module.operator()) == 2
    assert targets.count(torch.ops.aten.mm.default) == 1  # the small one
    torch.testing.assert_close(recorded(a, b, small), function(a, b, small), rtol=1e-4, atol=1e-2)


def test_the_operator_is_registered_at_its_first_use_and_not_at_import() -> None:
    assert module.operator() is module.operator()
    spec = importlib.util.spec_from_file_location("a_second_import", module.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # torch accepts one definition per process


@pytest.mark.usefixtures("wide")
def test_the_changing_matrix_is_not_copied() -> None:
    """Of g^T x only the fixed x is copied, once for all g."""
    x, g = torch.randn(160, 128), torch.randn(160, 144)
    recorded = make_fx(lambda x, g: g.T @ x)(x, g)
    fixed, moving = (node for node in recorded.graph.nodes if node.op == "placeholder")
    use_onednn(recorded.graph, {moving, *moving.users})
    recorded.recompile()

    (copy,) = (node for node in recorded.graph.nodes if node.target == torch.ops.aten.clone.default)
    (view,) = copy.all_input_nodes
    assert view.all_input_nodes == [fixed]
    torch.testing.assert_close(recorded(x, g), g.T @ x, rtol=1e-4, atol=1e-4)


# --- Recorded graphs in torch's interpreter, bit for bit as called operation by operation ---


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
