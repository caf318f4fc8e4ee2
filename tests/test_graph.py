"""The recorded graph of a forward pass."""

from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from landscape.discovery.graph import Flow, record


class Network(nn.Module):
    """One linear layer called twice, an addition in place, and a branch that ends nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.outer = nn.Sequential(nn.ReLU(), nn.Identity())

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
        first = self.linear(x)
        self.outer(first)
        second = self.linear(first)
        second += x
        constant = torch.ones(4).exp()
        return {"logits": (second * constant, x)}


@pytest.fixture
def flow() -> Flow:
    return record(Network(), torch.randn(2, 4))


def test_every_operation_on_the_input_is_recorded_and_none_on_constants(flow: Flow) -> None:
    assert [operation.name for operation in flow.operations] == ["linear", "relu", "linear", "add_", "mul"]
    assert [operation.weight for operation in flow.operations] == [(4, 4), (), (4, 4), (), ()]


def test_a_value_changed_in_place_is_a_new_node(flow: Flow) -> None:
    addition = flow.operations[3]
    (before, given), (after,) = addition.reads, addition.writes
    assert given == 0
    assert after not in (before, given)
    assert flow.operations[4].reads == (after,)
    assert [flow.maker[node] for node in (0, before, after)] == [-1, 2, 3]


def test_ancestors_are_all_values_that_a_value_depends_on_and_between_two_are_those_on_the_paths(flow: Flow) -> None:
    first, dead, second, total, logits = (operation.writes[0] for operation in flow.operations)

    def past(node: int) -> set[int]:
        return {other for other in range(len(flow.shapes)) if flow.ancestors[node] >> other & 1}

    assert past(dead) == {0, first, dead}
    assert past(logits) == {0, first, second, total, logits}
    first, dead, second, total, _ = (operation.writes[0] for operation in flow.operations)
    assert flow.between(0, total) == [0, 2, 3]
    assert flow.between(first, second) == [2]
    assert flow.between(dead, total) == []
    assert flow.between(total, total) == []


def test_recording_keeps_no_tensor_that_the_network_has_dropped() -> None:
    alive: list[int] = []

    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = []
            for _ in range(20):
                x = x.exp()
                made.append(ref(x))
                alive.append(sum(one() is not None for one in made))
            return x

    flow = record(Deep(), torch.randn(2, 4))
    assert max(alive) <= 2
    assert [operation.reads for operation in flow.operations] == [(node,) for node in range(20)]


def test_calls_have_their_number_parent_inputs_and_outputs(flow: Flow) -> None:
    called = [(call.module, call.number) for call in flow.calls]
    assert called == [("", 0), ("linear", 0), ("outer", 0), ("outer.0", 0), ("outer.1", 0), ("linear", 1)]
    root, first, outer, relu, identity, second = flow.calls
    assert (root.parent, root.start, root.stop, root.reads) == (-1, 0, 5, (0,))
    assert root.writes == (flow.operations[4].writes[0], 0)  # out of a dict of tuples
    parents = [flow.calls[call.parent].module for call in (first, outer, relu, identity, second)]
    assert parents == ["", "", "outer", "outer", ""]
    assert (identity.start, identity.stop) == (2, 2)
    assert identity.reads == identity.writes == relu.writes
    assert first.writes == outer.reads == second.reads
    assert [flow.calls[i].module for i in flow.enclosing(4)] == ["outer.1", "outer", ""]


def test_recording_restores_hooks_modes_and_torchs_switches_also_after_an_exception() -> None:
    model = Network()
    model.outer.eval()
    modes, fastpath = [module.training for module in model.modules()], torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError):
        record(model, torch.randn(2, 3))
    record(model, torch.randn(2, 4))
    assert [module.training for module in model.modules()] == modes
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_attention_inside_torchs_fused_encoder_layer_is_recorded() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    names = {operation.name for operation in record(layer, torch.randn(2, 5, 8)).operations}
    assert names & {"multi_head_attention_forward", "scaled_dot_product_attention", "softmax"}
    assert {"linear", "layer_norm", "add"} <= names | {"__add__"}


def test_what_a_hook_gives_back_is_recorded_what_it_only_reads_is_not() -> None:
    network, kept = Network(), []
    network.linear.register_forward_hook(lambda _, args, output: output.exp())
    network.outer.register_forward_pre_hook(lambda _, args: kept.append(args[0].sin()))
    names = [operation.name for operation in record(network, torch.randn(2, 4)).operations]
    assert names == ["linear", "exp", "relu", "linear", "exp", "add_", "mul"]
