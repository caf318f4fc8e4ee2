"""Statistics over the tokens of padded sequences are those of each sequence measured by itself without padding."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import landscape
from landscape.checkpoints.libraries import library
from landscape.layers.cka import centred_kernel, hsic
from landscape.layers.padding import Counted, without_padding
from landscape.layers.selection import layers_of

LENGTHS, TOKENS = (6, 4, 3, 5, 6, 2), 6
SIZES = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 8}
TINY = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
Sequences = list[dict[str, Tensor]]


def network() -> nn.Module:
    pytest.importorskip("transformers")
    transformers: Any = library("transformers")
    torch.manual_seed(0)
    model: nn.Module = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, **SIZES))
    for p in model.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return model.double().eval()


def sequences(side: str) -> tuple[dict[str, Tensor], Sequences]:
    """A mini-batch padded on one side, and each of its sequences alone."""
    generator = torch.Generator().manual_seed(1)
    batch = {name: torch.zeros(len(LENGTHS), TOKENS, dtype=torch.long)
             for name in ("input_ids", "attention_mask", "position_ids")}  # fmt: skip
    alone = []
    for row, length in enumerate(LENGTHS):
        own = slice(0, length) if side == "right" else slice(TOKENS - length, TOKENS)
        ids = torch.randint(1, 20, (length,), generator=generator)
        for name, values in zip(batch, (ids, torch.ones_like(ids), torch.arange(length)), strict=True):
            batch[name][row, own] = values
        label = torch.tensor([row % 2])
        alone.append({**{name: batch[name][row : row + 1, own] for name in batch}, "labels": label})
    return {**batch, "labels": torch.cat([one["labels"] for one in alone])}, alone


def measured(probe: str, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """What a probe stores for one mini-batch."""
    subject = landscape.load(model, data=batch, batch_size=len(batch["labels"]), device="cpu")
    data = landscape.measure(probe, subject, out=None, quiet=True)
    return {str(name): data[name].values[0] for name in data.data_vars if data[name].dims[:1] == ("batch",)}


@pytest.mark.slow  # loads transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the library
@pytest.mark.parametrize(
    ("probe", "names"),
    [
        ("geometry", ["features"]),
        ("attention", [f"{name}{power}_sum" for name in ("entropy", "mutual_information", "head_cosine",
                       "head_feature_cosine") for power in ("", "_square")]),
    ],
)  # fmt: skip
def test_a_padded_mini_batch_has_the_numbers_of_its_sequences(probe: str, names: list[str]) -> None:
    model, (right, alone), (left, same) = network(), sequences("right"), sequences("left")
    assert str(alone) == str(same)
    copies = 4 if probe == "geometry" else 1  # the fewest samples that it takes; the first counts
    each = [measured(probe, model, {key: torch.cat([one[key]] * copies) for key in one}) for one in alone]
    for side, batch in (("right", right), ("left", left)):
        together = measured(probe, model, batch)
        for name in names:
            rows = np.array([one[name] for one in each])
            expected = rows[:, 0] if name == "features" else rows.sum(axis=0)  # per sample, or summed over samples
            if name == "features" and side == "left":  # BERT's head reads the first position, which is padding here
                together[name], expected = together[name][:, :-8], expected[:, :-8]
            assert np.isfinite(expected).all()
            assert together[name] == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@pytest.mark.slow  # loads transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the library
@pytest.mark.parametrize("side", ["right", "left"])
def test_similarity_compares_the_tokens_of_padded_sequences(side: str) -> None:
    """Against kernels of the features of each sequence alone, with zeros behind the shorter ones."""
    model, (batch, alone) = network(), sequences(side)
    layers = layers_of(landscape.load(model, data=batch, device="cpu"), ())
    features = torch.zeros(len(layers), len(LENGTHS), TOKENS, 8, dtype=torch.float64)
    modules = dict(model.named_modules())
    for row, one in enumerate(alone):
        for position, layer in enumerate(layers):
            kept: list[Any] = []

            def keep(_: nn.Module, given: Any, found: Any, layer: Any = layer, kept: list[Any] = kept) -> None:
                kept.append(given if layer.tap.side == "input" else found)

            handle = modules[layer.tap.module].register_forward_hook(keep)
            model(**one)
            handle.remove()
            tensor = kept[layer.tap.call] if isinstance(kept[layer.tap.call], Tensor) else kept[layer.tap.call][0]
            features[position, row, : LENGTHS[row]] = tensor[0].detach()
    kernels = torch.stack([centred_kernel(own) for own in features])
    found = measured("similarity", model, batch)["hsic"]
    assert found == pytest.approx(hsic(kernels, kernels).numpy(), rel=1e-8)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.embedding(input_ids).cumsum(dim=1))  # type: ignore[no-any-return]


def test_a_mask_given_by_its_position_hides_padding_as_by_its_name() -> None:
    torch.manual_seed(0)
    model, (batch, _) = Tagger(), sequences("right")
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["input_ids"] % 3
    named: Any = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    losses, tokens = [], []
    for data in (named, ((ids, mask), labels)):
        subject = landscape.load(model, data=data, device="cpu")
        losses.append(landscape.evaluate(subject)["loss"])
        tokens.append(Counted(subject, 0).of(layers_of(subject, (r"^embedding$",))[0]))
    assert losses[0] == losses[1]
    assert all(counted is not None and torch.equal(counted, mask == 1) for counted in tokens)


def test_a_field_that_the_model_does_not_get_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    batch, _ = sequences("right")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    landscape.load(Tagger(), data=[{"input_ids": ids, "own_mask": mask, "labels": ids % 3}] * 2, device="cpu")
    said = [record.getMessage() for record in caplog.records]
    assert sum("the model gets no own_mask of data;" in line for line in said) == 1


def test_tokens_move_to_the_front_in_their_order() -> None:
    tensor = torch.arange(12.0).reshape(2, 3, 2)
    counted = torch.tensor([[False, True, True], [True, False, False]])
    expected = [[[2.0, 3.0], [4.0, 5.0], [0.0, 0.0]], [[6.0, 7.0], [0.0, 0.0], [0.0, 0.0]]]
    assert without_padding(tensor, counted).tolist() == expected
    other = tensor[:, :2]
    assert without_padding(other, counted) is other  # other positions than tokens stay
