"""The simulated accelerator finds what a GPU would find, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_cuda import simulated_cuda
from torch import Tensor, nn

from landscape.subject.graph_replay import recordable

WRONG: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum of both": lambda here, there: here + there,
    "a product of both": lambda here, there: here @ there.T,
    "a concatenation of both": lambda here, there: torch.cat([here, there]),
    "in place": lambda here, there: here.add_(there),
    "a vector of the host times a number of the device": lambda here, there: here * there.sum(),
    "numpy of the device": lambda here, there: there.numpy(),
    "the host's generator": lambda here, there: torch.randn(3, device="cuda", generator=torch.Generator()),
    "the device's generator": lambda here, there: torch.randn(3, generator=torch.Generator("cuda")),
    "a loss of both": lambda here, there: nn.functional.mse_loss(here, there),
    "a device that is not there": lambda here, there: here.to("cuda:2"),
}
WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda there: there.sum().item(),
    "float": lambda there: float(there.sum()),
    "bool": lambda there: bool(there.sum() > 0),
    "tolist": lambda there: there.tolist(),
    "cpu": lambda there: there.cpu(),
    "to": lambda there: there.to("cpu", torch.float64),
    "a mask": lambda there: there[there > 0],
    "nonzero": lambda there: there.nonzero(),
    "allclose": lambda there: torch.allclose(there, there),
    "a copy into a tensor of the host": lambda there: torch.zeros(2, 3).copy_(there),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_gpu_refuses_is_refused(name: str) -> None:
    here = torch.ones(2, 3)
    with simulated_cuda(), pytest.raises((RuntimeError, TypeError), match=r"device|ordinal"):
        WRONG[name](here, here.to("cuda"))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_every_wait_is_counted_once_and_refused_where_it_is_to_be_recorded(name: str, inference: bool) -> None:
    with simulated_cuda() as simulation, torch.inference_mode(inference):
        there = torch.ones(2, 3).to("cuda")
        (there * 2).sum(dim=0)
        assert not simulation.waits
        with recordable(), pytest.raises(RuntimeError, match=r"waits|copies"):
            WAITING[name](there)
        simulation.waits.clear()
        WAITING[name](there)
        assert sum(simulation.waits.values()) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # imported for forward derivatives
def test_derivatives_copies_and_modules_stay_on_the_device() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = torch.func.jvp(lambda z: model(z).tanh(), (x,), (x,))[1]
    with simulated_cuda() as simulation:
        there, moved = x.to("cuda"), copy.deepcopy(model).to("cuda")
        tangent = torch.func.jvp(lambda z: moved(z).tanh(), (there,), (there,))[1]
        rows = torch.vmap(lambda row: moved(row) + torch.zeros(2, device=row.device))(there)
        (first,) = torch.autograd.grad(moved(there).square().sum(), moved.weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), moved.weight)
        optimizer = torch.optim.AdamW(moved.parameters())
        moved(there).sum().backward()
        optimizer.step()
        moved.load_state_dict(model.state_dict())
        tensors = [tangent, rows, first, second, moved.weight, copy.deepcopy(moved).weight, moved.weight.grad]
        assert {tensor.device for tensor in tensors} == {torch.device("cuda:0")}
        assert not simulation.waits
        assert torch.equal(tangent.cpu(), expected)
    assert x.device.type == "cpu"


def test_a_graph_runs_at_its_first_replay_and_must_not_wait() -> None:
    with simulated_cuda():
        x = torch.ones(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x * 2).exp()
        assert y.isnan().all()
        x.fill_(0.5)
        graph.replay()
        assert torch.equal(y, torch.full((3,), 1.0, device="cuda").exp())
        with pytest.raises(RuntimeError, match="synchronizing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.sum().item()


def test_page_locked_memory_must_not_change_while_the_device_reads_it() -> None:
    def written_to(*, after_waiting: bool) -> None:
        with simulated_cuda():
            here = torch.zeros(3).pin_memory()
            there = here.to("cuda", non_blocking=True)
            assert not after_waiting or there.sum().item() == 0
            here += 1

    written_to(after_waiting=True)
    with pytest.raises(AssertionError, match="page-locked"):
        written_to(after_waiting=False)


def test_calls_that_this_version_of_torch_does_not_have_are_refused() -> None:
    with simulated_cuda():
        with pytest.raises(TypeError, match="memory_pool"):
            torch.cuda.graph(torch.cuda.CUDAGraph(), memory_pool=torch.cuda.graph_pool_handle())  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="argument"):
            torch.cuda.empty_cache("cuda:0")  # type: ignore[call-arg]
