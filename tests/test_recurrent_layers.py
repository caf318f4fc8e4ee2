"""Frozen dropout masks between stacked recurrent layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from analytic import rebatched
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from landscape.models.dropout_masks import DropoutCall, FrozenMasks, frozen_masks, kept
from landscape.probe import derived_seed
from landscape.products.hvp_backends import curvature
from landscape.subject.mc_dropout import as_is, calls_of, with_members
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject

SAMPLES, STEPS, INPUTS, UNITS, RATE = 5, 6, 3, 4, 0.4
LENGTHS = torch.tensor([4, 6, 2, 5, 1])
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}), "projected": (nn.LSTM, {"proj_size": 2}), "gru": (nn.GRU, {}), "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


def stack(kind: str, *, layers: int = 3, batch_first: bool = True, both: bool = False) -> nn.RNNBase:
    make, options = KINDS[kind]
    torch.manual_seed(0)
    known: dict[str, Any] = {**options, "batch_first": batch_first, "bidirectional": both, "dropout": RATE}
    return make(INPUTS, UNITS, layers, **known).double().eval()


def frozen(model: nn.Module, inputs: Any, positions: Tensor | None = None) -> Any:
    with frozen_masks(model, FrozenMasks(3, torch.arange(SAMPLES) if positions is None else positions)):
        return model(inputs)


def sequences() -> Tensor:
    return torch.randn(SAMPLES, STEPS, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_masks_between_them_are_those_of_single_layers(kind: str, both: bool) -> None:
    whole, x = stack(kind, both=both), sequences()
    expected, ends = x, []
    for layer in range(3):
        make, options = KINDS[kind]
        single = make(expected.shape[2], UNITS, 1, batch_first=True, bidirectional=both, **options).double()
        named = {name: p for name, p in whole.state_dict().items() if f"_l{layer}" in name}
        single.load_state_dict({name.replace(f"_l{layer}", "_l0"): p for name, p in named.items()})
        expected, end = single(expected)
        ends.append(end[0] if isinstance(end, tuple) else end)
        if layer < 2:
            mask = kept(derived_seed(3, layer), torch.arange(SAMPLES), expected[0].numel(), RATE)
            expected = expected * mask.view(expected.shape) / (1 - RATE)
    found, last = frozen(whole, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(last[0] if isinstance(last, tuple) else last, torch.cat(ends))


@pytest.mark.parametrize("kind", KINDS)
def test_padded_and_packed_sequences_have_the_same_masks(kind: str) -> None:
    x, model = sequences(), stack(kind)
    padded, _ = frozen(model, x)
    packed, _ = frozen(model, pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False))
    steps_first, _ = frozen(stack(kind, batch_first=False), x.transpose(0, 1))
    unpacked, _ = pad_packed_sequence(packed, batch_first=True)
    reached = (torch.arange(STEPS) < LENGTHS[:, None])[..., None]
    torch.testing.assert_close(unpacked, padded * reached)
    torch.testing.assert_close(steps_first.transpose(0, 1), padded)


class Reader(nn.Module):
    """Padded sequences whose lengths are the sums of their first elements' signs, packed in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = stack("lstm", layers=2), nn.Linear(UNITS, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] > 0).sum(dim=1).clamp(min=1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(packed)
        return self.head(hidden[-1])


def reader(size: int = SAMPLES) -> Subject:
    batches = rebatched([(sequences(), torch.arange(SAMPLES) % 3)], size)
    return with_members(Subject(Reader().eval(), batches), 2)


def test_recurrent_members_do_not_depend_on_the_mini_batches() -> None:
    whole = per_sample(reader())[0]
    assert not torch.allclose(whole, per_sample(as_is(reader()))[0])
    for size in (1, 2):
        torch.testing.assert_close(per_sample(reader(size))[0], whole)


def test_curvature_of_recurrent_members_is_that_of_their_loss() -> None:
    subject = reader()
    weight = subject.model.head.weight
    product = curvature(subject, {"w": weight}, "double-backward").product(0)

    inputs, targets = subject.batch(0)
    given: list[Tensor] = []
    with subject.model.head.register_forward_pre_hook(lambda _, args: given.append(args[0].detach())):
        subject.outputs(inputs)
    assert not torch.allclose(*given)

    def loss(values: Tensor) -> Tensor:
        members = [(hidden @ values.T + subject.model.head.bias.detach()).softmax(dim=1) for hidden in given]
        return F.nll_loss(torch.stack(members).mean(dim=0).log(), targets)

    dense = torch.autograd.functional.hessian(loss, weight.detach()).reshape(weight.numel(), -1)
    found = torch.stack([product(row) for row in torch.eye(weight.numel(), dtype=torch.float64)])
    torch.testing.assert_close(found, dense)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ((), "packed sequences of unknown order"),
        (
            ([DropoutCall(RATE, RATE, False, "encoder.rnn")],),
            "dropout between the recurrent layers of encoder.rnn acts on packed sequences of unknown order",
        ),
    ],
)
def test_packed_sequences_whose_order_is_unknown_are_refused_and_the_module_is_named(known: Any, said: str) -> None:
    packed = pack_padded_sequence(sequences(), LENGTHS, batch_first=True, enforce_sorted=False)
    with pytest.raises(ValueError, match=said), FrozenMasks(3, torch.arange(SAMPLES), *known):
        stack("gru")(packed)


def test_a_single_recurrent_layer_has_no_dropout() -> None:
    layer = nn.LSTM(INPUTS, UNITS, 1, batch_first=True).double().eval()
    layer.dropout = RATE
    model = nn.Sequential(layer, Last(), nn.Dropout(0.1), nn.Linear(UNITS, 3)).double().eval()
    subject = Subject(model, [(sequences(), torch.arange(SAMPLES) % 3)])
    assert [call.rate for call in calls_of(subject)] == [0.1]


class Last(nn.Module):
    """The output of the last step."""

    def forward(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0][:, -1]
