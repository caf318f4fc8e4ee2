"""Networks that end in a softmax or a sigmoid are refused as logits, and measured as what they give if one says so."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape

generator = torch.Generator().manual_seed(1)
INPUTS = torch.randn(96, 6, generator=generator)
CLASSES = torch.randint(4, (96,), generator=generator)
LABELS = torch.randint(2, (96, 3), generator=generator).float()


def net(outputs: int, *end: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, outputs), *end)


CASES = {
    "softmax": (net(4, nn.Softmax(dim=1)), net(4), CLASSES, "", "nll"),
    "sigmoid of one": (net(1, nn.Sigmoid()), net(1), LABELS[:, :1], "bce", "bce-probabilities"),
    "sigmoid of several": (net(3, nn.Sigmoid()), net(3), LABELS, "bce", "bce-probabilities"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_probabilities_are_refused_as_logits_and_equal_the_logits_under_their_own_loss(case: str) -> None:
    ends, logits, targets, loss, own = CASES[case]
    with pytest.raises(ValueError, match=rf"--loss {own} for probabilities, or --outputs logits"):
        landscape.load(ends, data=(INPUTS, targets), loss=loss)
    assert landscape.load(ends, data=(INPUTS, targets), loss=loss, outputs="logits").traits.name == loss
    pair = [landscape.load(model, data=(INPUTS, targets), loss=name) for model, name in ((ends, own), (logits, loss))]
    assert landscape.evaluate(pair[0]) == pytest.approx(landscape.evaluate(pair[1]), abs=1e-6)
    if case == "softmax":  # curvature is that of the logits behind the probabilities, too
        traces = [landscape.measure("trace", one, out=None, vectors=8).trace.item() for one in pair]
        assert traces[0] == pytest.approx(traces[1], rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_loss_of_torch_that_takes_logits_is_obeyed_with_a_warning(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends, logits, targets, loss, own = CASES[case]
    kind, function = (
        (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits) if loss else (nn.CrossEntropyLoss, F.cross_entropy)
    )
    for given in (kind(), kind(reduction="none"), function):
        for model, said in ((ends, [f"loss='{own}' takes probabilities"]), (logits, [])):
            caplog.clear()
            landscape.load(model, data=(INPUTS, targets), loss=given)
            assert re.findall(r"loss='\S+' takes probabilities", caplog.text) == said


class InRange(nn.Module):
    """Logits between 0 and 1 for all samples but the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * inputs[:, :1]


def test_a_single_output_outside_of_0_to_1_tells_logits() -> None:
    inputs = torch.rand(96, 1, generator=generator)
    targets = torch.randint(2, (96, 1), generator=generator).float()
    with pytest.raises(ValueError, match="ends in a sigmoid"):
        landscape.load(InRange(), data=(inputs, targets), loss="bce", batch_size=16)
    inputs[-1] = -0.5
    landscape.load(InRange(), data=(inputs, targets), loss="bce", batch_size=16)
    model = net(1)  # and a head that is still zero
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    landscape.load(model, data=(INPUTS, LABELS[:, :1]), loss="bce")


@pytest.mark.parametrize(
    ("model", "targets", "loss", "cure"),
    [
        (net(4), CLASSES, "nll", "leave --loss out"),
        (net(4, nn.LogSoftmax(dim=1)), CLASSES, "nll", "leave --loss out"),
        (net(4, nn.Sigmoid()), CLASSES, "nll", "in rows of sum 1"),
        (net(3), LABELS, "bce-probabilities", "give --loss bce"),
    ],
    ids=["logits", "log-probabilities", "sigmoids", "logits of labels"],
)
def test_what_is_no_probability_is_refused_where_the_loss_takes_them(
    model: nn.Module, targets: Tensor, loss: str, cure: str
) -> None:
    with pytest.raises(ValueError, match=rf"--loss {loss} takes probabilities.*{cure}"):
        landscape.load(model, data=(INPUTS, targets), loss=loss)
