"""Targets of language models: next tokens, tokens without a target, padding; against sums over tokens by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape.predictions.evaluation import metrics_of
from landscape.products.operator import Curvature
from landscape.subject.loading.identity import protocol
from landscape.subject.losses import class_accuracy, cross_entropy
from landscape.subject.subject import Subject

VOCABULARY, TOKENS, SEQUENCES, PROMPT = 7, 6, 5, 2


class Language(nn.Module):
    """Logits of every token from the sum of those before it, or of all of them."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.embedding, self.head = nn.Embedding(VOCABULARY, 3), nn.Linear(3, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embedding(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[:, :, None]
        return self.head(torch.tanh(hidden.cumsum(dim=1) if self.causal else hidden + hidden.sum(1, True)))


def model(*, causal: bool = True) -> Language:
    torch.manual_seed(0)
    return Language(causal=causal).double().eval()


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))


def lengths() -> list[int]:
    return [TOKENS - row % 3 for row in range(SEQUENCES)]


def padded() -> dict[str, Tensor]:
    """Sequences of several lengths, as a collator of transformers pads them; the first tokens are a prompt."""
    ids, mask = tokens(), torch.ones(SEQUENCES, TOKENS, dtype=torch.long)
    for row, length in enumerate(lengths()):
        ids[row, length:], mask[row, length:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loaded(data: Any, *, causal: bool = True, **options: Any) -> Subject:
    return landscape.load(model(causal=causal), data=data, device="cpu", **options)


def by_hand(subject: Subject, batch: dict[str, Tensor]) -> list[Tensor]:
    """The losses of every predicted token, a tensor per sequence: no padding, no prompt, one token at a time."""
    logits, rows = subject.model(batch["input_ids"], batch["attention_mask"]), []
    for row in range(SEQUENCES):
        pairs = [(at - 1, at) for at in range(1, TOKENS) if batch["labels"][row, at] >= 0]
        wanted = [F.cross_entropy(logits[row, t], batch["labels"][row, at]) for t, at in pairs]
        rows.append(torch.stack(wanted))
    return rows


def test_the_tokens_as_their_own_targets_are_shifted_for_a_causal_model(caplog: pytest.LogCaptureFixture) -> None:
    ids = tokens()
    apart, same = loaded((ids[:, :-1], ids[:, 1:])), loaded((ids, ids))
    assert "the next token is the target" in caplog.text
    assert "targets shifted to the next token" in protocol(same)
    assert "shifted" not in protocol(apart)
    before, now = metrics_of(apart), metrics_of(same)
    assert now.keys() == before.keys()
    assert now == pytest.approx(before, rel=1e-12)


def test_a_model_that_sees_all_tokens_keeps_its_targets() -> None:
    ids = tokens()
    subject = loaded((ids, ids), causal=False)
    assert torch.equal(subject.batch(0)[1], ids)
    changed = ids.clone()
    changed[0, 1] = (ids[0, 1] + 1) % VOCABULARY  # labels of something else than the next token
    assert torch.equal(loaded((ids, changed)).batch(0)[1], changed)


def test_a_model_that_sees_the_next_tokens_which_are_its_targets_is_named(caplog: pytest.LogCaptureFixture) -> None:
    rows = tokens()
    for causal in (True, False):
        loaded((rows[:, :-1], rows[:, 1:]), causal=causal)
    assert caplog.text.count("are its next tokens, which the model sees") == 1


def test_loss_accuracy_and_perplexity_leave_out_prompt_and_padding() -> None:
    batch = padded()
    subject = loaded(batch)
    rows = by_hand(subject, batch)
    means = torch.stack([row.mean() for row in rows])
    found = metrics_of(subject)
    assert found["loss"] == pytest.approx(means.mean().item(), rel=1e-12)
    assert found["loss_se"] == pytest.approx(means.std().item() / math.sqrt(SEQUENCES), rel=1e-12)
    every = torch.cat(rows)
    assert found["token_loss"] == pytest.approx(every.mean().item(), rel=1e-12)
    assert found["perplexity"] == pytest.approx(every.mean().exp().item(), rel=1e-12)
    predicted = subject.model(batch["input_ids"], batch["attention_mask"])[:, :-1].argmax(dim=2)
    hits = [[float(predicted[r, t - 1] == y) for t, y in enumerate(labels) if t and y >= 0]
            for r, labels in enumerate(batch["labels"].tolist())]  # fmt: skip
    assert found["accuracy"] == pytest.approx(np.mean([np.mean(row) for row in hits]))


def test_the_error_of_the_loss_per_token_is_that_of_a_ratio() -> None:
    """Against the standard deviation of the ratio over resampled sequences (1,000 of them, to 10 %)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (200, TOKENS), generator=generator)
    counts = torch.randint(1, TOKENS, (200,), generator=generator)
    labels = ids.masked_fill(torch.arange(TOKENS) > counts[:, None], -100)
    subject = loaded((ids, labels), batch_size=64)
    found = metrics_of(subject)
    losses = torch.cat([subject.losses(subject.outputs(x), y) for x, y in subject.each_batch()]).detach()
    chosen = torch.randint(200, (1000, 200), generator=generator)
    ratios = (counts * losses)[chosen].sum(dim=1) / counts[chosen].sum(dim=1)
    assert found["token_loss"] == pytest.approx(((counts * losses).sum() / counts.sum()).item(), rel=1e-12)
    assert found["token_loss_se"] == pytest.approx(ratios.std().item(), rel=0.1)
    right = torch.cat([subject.losses_and_right(subject.outputs(x), y)[1] for x, y in subject.each_batch()]).detach()
    ratios = (counts * right)[chosen].sum(dim=1) / counts[chosen].sum(dim=1)
    assert found["token_accuracy"] == pytest.approx(((counts * right).sum() / counts.sum()).item(), rel=1e-12)
    assert found["token_accuracy_se"] == pytest.approx(ratios.std().item(), rel=0.1)
    assert "token_accuracy" not in metrics_of(loaded((ids, ids), batch_size=64))  # where it is the accuracy


def test_an_attention_mask_takes_the_target_of_padding() -> None:
    """Labels that repeat the padding, as without a collator that replaces them."""
    batch = padded()
    labels = batch["input_ids"].clone()
    labels[:, :PROMPT] = -100
    careless = loaded({**batch, "labels": labels})
    assert torch.equal(careless.batch(0)[1], loaded(batch).batch(0)[1])


@pytest.mark.parametrize("backend", ["double-backward", "traced"])
def test_hessian_products_are_those_of_the_tokens_that_count(backend: str) -> None:
    batch = padded()
    subject = loaded(batch)
    weights = list(subject.parameters.values())
    value = torch.stack([row.mean() for row in by_hand(subject, batch)]).mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, weights, create_graph=True)])
    rows = [torch.autograd.grad(entry, weights, retain_graph=True) for entry in gradient]
    dense = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    product = Curvature(subject, subject.parameters, backend).product(0)  # type: ignore[arg-type]
    found = torch.stack([product(row) for row in torch.eye(subject.size, dtype=torch.float64)])
    torch.testing.assert_close(found, dense, rtol=1e-10, atol=1e-12)


def test_any_negative_target_has_no_loss() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 4, VOCABULARY, dtype=torch.float64), torch.tensor([[1, -1, 3, -100], [0, 2, 4, 5]])
    expected = [F.cross_entropy(logits[0, [0, 2]], targets[0, [0, 2]]), F.cross_entropy(logits[1], targets[1])]
    torch.testing.assert_close(cross_entropy(logits, targets), torch.stack(expected))
    assert class_accuracy(logits, logits.argmax(dim=2).masked_fill(targets < 0, -1)).tolist() == [1.0, 1.0]


def test_sequences_without_a_target_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    ids = tokens()
    labels = ids.clone()
    labels[2] = -100
    assert len(loaded((ids, labels))) == SEQUENCES - 1
    assert "1 of 5 sequences of in memory have no target" in caplog.text
    batch = padded()
    without = {name: torch.cat([rows[:3], rows[4:]]) for name, rows in batch.items()}
    batch["labels"][3] = -100
    caplog.clear()
    found, expected = loaded(batch), loaded(without)
    assert "1 of 5 sequences of in memory have no target and are left out" in caplog.text
    assert (len(found), metrics_of(found)) == (SEQUENCES - 1, metrics_of(expected))
    with pytest.raises(ValueError, match=r"mini-batches have tensors without a row for each"):
        loaded([batch | {"bias": torch.zeros(7)}])
    batch["labels"][:] = -100
    with pytest.raises(ValueError, match="5 of 5 sequences of in memory have no target; check its labels"):
        loaded(batch)
    with pytest.raises(ValueError, match="none of the 5 sequences"):
        loaded((ids, torch.full_like(ids, -100)))


def test_a_loss_of_the_user_gets_its_targets_as_they_are_and_there_is_no_accuracy() -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs[:, :-1], targets[:, 1:])

    batch = padded()
    subject = loaded(batch, loss=own)
    assert torch.equal(subject.batch(0)[1], batch["labels"])
    of_batch = loaded(batch, loss=lambda outputs, batch: own(outputs, batch["labels"]))
    for found in map(metrics_of, (subject, of_batch)):
        assert found["loss"] == pytest.approx(metrics_of(loaded(batch))["loss"], rel=1e-12)
        assert "accuracy" not in found
