"""What is NaN although all was measured has a reason, which is stored and said, whatever the probe."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape.probe import NotApplicable
from landscape.probes import OWN, probe_class
from landscape.statistics.stored import unmeasured

SMALLER = {"sensitivity": {"bits": "4"}}


class _Gate(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc(x.mean((2, 3), keepdim=True)))


class _Attending(nn.Module):
    """Self-attention of one or two heads to patches; no class token."""

    def __init__(self, patch: int, heads: int) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, patch, patch), nn.LayerNorm(8), nn.Linear(8, 5)
        self.attention = nn.MultiheadAttention(8, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), need_weights=False)[0]
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def _single_positions() -> nn.Module:
    stem = (nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), _Gate(8), nn.Conv2d(8, 8, 8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU())
    return nn.Sequential(*stem, nn.Flatten(), nn.Linear(8, 5))


def _dead() -> nn.Module:
    layers = [module for i in range(3) for module in (nn.Conv2d(8 if i else 3, 8, 3, 1, 1), nn.ReLU())]
    for parameter in layers[2].parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "maps of one position": _single_positions, "a layer of zeros": _dead,
    "one token": lambda: _Attending(16, 1), "one head": lambda: _Attending(4, 1), "two heads": lambda: _Attending(4, 2),
}  # fmt: skip
OF_LAYERS = [name for name in OWN if probe_class(name)().layers is not None]


@pytest.mark.parametrize("network", [pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS])
def test_a_layer_without_a_number_has_a_reason(network: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    torch.manual_seed(0)
    data = torch.randn(24, 3, 16, 16), torch.arange(24) % 5
    subject = landscape.load(NETWORKS[network]().eval(), data=data, batch_size=12)
    found = []
    for name in OF_LAYERS:
        probe = probe_class(name)(**{**probe_class(name).smallest, **SMALLER.get(name, {})})
        try:
            result = landscape.measure(probe, subject, out=None)
        except (NotApplicable, ValueError):  # says so itself
            continue
        plan = probe.plan(subject)
        for quantity in (plan.summaries or plan.quantities).keys() - {q for q in result if str(q).endswith("_se")}:
            values = result[quantity]
            finite = values.notnull().any(dim=[dim for dim in values.dims if dim != "layer"]).values
            why = result.attrs.get(f"{quantity}_unmeasured", "")
            names = result["name"].values[~finite] if "layer" in values.dims else [why] * int(not finite)
            assert all(layer and str(layer) in why for layer in names), (name, quantity, names, why)
            found += [(name, quantity)] * len(names)
    assert found
    assert len([text for text in caplog.messages if " NaN in " in text]) >= len({name for name, _ in found})


def test_layers_with_the_same_reason_share_it() -> None:
    found = unmeasured([("cka", "a", "still"), ("cka", "b", "dead"), ("cka", "c", "still"), ("nc3", "", "one class")])
    assert found == {"cka_unmeasured": "a, c: still; b: dead", "nc3_unmeasured": "one class"}
