"""Models whose forward pass writes their own weights are refused and left as they were; attention has one path."""

import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape.subject.loading.load import measuring

generator = torch.Generator().manual_seed(0)
CLASSES = torch.randint(3, (48,), generator=generator)


class BoundedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


class Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.head.weight.data = torch.renorm(self.head.weight.data, 2, 0, 0.3)
        return self.head(inputs)


class Clamped(Renormalised):
    def forward(self, inputs: Tensor) -> Tensor:
        self.head.weight.data.clamp_(-0.1, 0.1)  # leaves neither place nor version changed
        return self.head(inputs)


@pytest.mark.parametrize("kind", [BoundedEmbedding, Renormalised, Clamped])
def test_a_forward_pass_that_writes_weights_is_refused_and_the_model_left_bit_for_bit(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    tokens = kind is BoundedEmbedding
    inputs = torch.randint(20, (48, 6), generator=generator) if tokens else torch.randn(48, 6, generator=generator)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"writes the model's own weights \((embedding|head)\.weight\)"):
        landscape.load(model, data=(inputs, CLASSES))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_weights_that_are_nan_are_not_taken_for_written() -> None:
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    landscape.load(model, data=(torch.randn(48, 6, generator=generator), CLASSES))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        padding = inputs[..., 0].isnan()  # a mask that depends on the inputs
        padding[:, -2:] = True
        return self.head(self.encoder(inputs, src_key_padding_mask=padding).mean(1))


def test_a_padded_encoder_is_one_function_with_and_without_gradients() -> None:
    torch.manual_seed(0)
    subject = landscape.load(Padded(), data=(torch.randn(48, 6, 8, generator=generator), CLASSES))
    evaluated = landscape.evaluate(subject)["loss"]
    with measuring(subject):
        differentiated = subject.loss(0).item()
    assert evaluated == pytest.approx(differentiated, rel=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()  # the caller's setting
    found = landscape.measure("attention", subject, out=None, quiet=True)
    assert found["name"].values.tolist() == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
